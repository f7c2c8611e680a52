"""Faults reach the tasks of a graph that was made while they were in force."""

from __future__ import annotations

from typing import Any

import dask
import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.faults import Plan, inject
from abft_tsm2.interop import dask as on_dask
from tests.support.dask_factors import blocks_of
from tests.support.planting import bits, normal

A, B = normal(48, 36), normal(36, 40, seed=1)


def product(**options: Any) -> Any:
    return on_dask.protected_gemm(blocks_of(A, 12), blocks_of(B, 12), return_report=True, **options)


@pytest.mark.parametrize("scheduler", ["sync", "threads"])
@pytest.mark.parametrize("site", ["product", "A", "B", "t"])
def test_a_fault_in_a_product_of_blocks_is_repaired(site: str, scheduler: str) -> None:
    expected, alone = dask.compute(*product(), scheduler=scheduler)
    quiet = ft.errstate(corrected="ignore", checksum_fault="ignore")
    with quiet, inject(Plan("bit_flip", site, "exponent_high", seed=(1,))) as injector:
        C, report = dask.compute(*product(), scheduler=scheduler)
    assert alone.status.name == "CLEAN"
    assert len(injector.planted) == 1
    assert report.status.name == ("CHECKSUM_FAULT" if site == "t" else "CORRECTED")
    np.testing.assert_allclose(C, expected, rtol=1e-12, atol=1e-12)


def test_without_a_fault_nothing_changes() -> None:
    expected, _ = dask.compute(*product(), scheduler="sync")
    with inject() as injector:
        C, report = dask.compute(*product(), scheduler="sync")
    assert injector.visits["multiplied"] == 48  # 4 x 4 blocks of 3 terms
    np.testing.assert_array_equal(bits(C), bits(expected))
    assert report.status.name == "CLEAN"


@pytest.mark.parametrize("panel", ["one", "tournament"])
def test_a_fault_in_a_panel_is_repaired(panel: str) -> None:
    M = normal(48, 48)
    with ft.errstate(corrected="ignore"), inject(Plan("bit_flip", "lu.factored_U", "exponent_high")) as injector:
        given: Any = {"panel": panel, "return_report": True}
        (lu, piv), report = dask.compute(*on_dask.protected_lu_factor(blocks_of(M, 12), **given), scheduler="sync")
    assert len(injector.planted) == 1
    assert report.status.name == "CORRECTED"
    order = np.arange(48)
    for i, p in enumerate(np.asarray(piv)):
        order[[i, p]] = order[[p, i]]
    np.testing.assert_allclose((np.tril(lu, -1) + np.eye(48)) @ np.triu(lu), M[order], atol=1e-10)
