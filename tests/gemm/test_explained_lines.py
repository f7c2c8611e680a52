"""Clean products of data unlike normal data cost no pass over an operand that tells nothing.

A line beyond its first bound is explained by a part of C; a sparse operand is encoded once; where roundings have one
direction, the suspected lines alone are multiplied again. None of that hides a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, protected_gemm
from abft_tsm2.checksum import diagnose, reproduced
from abft_tsm2.checksum.encode import carry, missed_by_sample
from abft_tsm2.checksum.line_norms import UnexplainedLines
from abft_tsm2.checksum.small import SmallSums
from abft_tsm2.checksum.weights import balanced
from abft_tsm2.core.matmul import multiply
from abft_tsm2.gemm.host import Product
from tests.checksum.test_decisions import chain
from tests.gemm.test_ordinary_data import FAMILIES
from tests.support.planting import at, everywhere, pair, put

Patch = pytest.MonkeyPatch
Pair = tuple[np.ndarray, np.ndarray]


def drawn(data: str, *sizes: int) -> Pair:
    return FAMILIES[data](np.random.default_rng(0), *sizes)


def counted(monkeypatch: Patch, where: Any, name: str, calls: list[Any]) -> None:
    honest: Callable[..., Any] = getattr(where, name)

    def called(*arguments: Any) -> Any:
        calls.append(arguments[1:])
        return honest(*arguments)

    monkeypatch.setattr(where, name, called)


# ---- lines beyond their first bound -------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["half of k small", "softmax", "uniform", "tiny", "huge"])
@pytest.mark.parametrize("sizes", [(200, 600, 240), (300, 1500, 500)])
def test_a_part_of_c_explains_lines_of_which_the_first_terms_tell_little(
    data: str, sizes: tuple[int, int, int], monkeypatch: Patch
) -> None:
    A, B = drawn(data, *sizes)
    explained: list[Any] = []
    counted(monkeypatch, UnexplainedLines, "_measure_stored", explained)
    for further in ("_measure_products", "_measure_in_range"):
        monkeypatch.setattr(UnexplainedLines, further, None)  # reads operands once more
    for _ in range(2):  # the second one by what is kept of the first
        protected_gemm(A, B, check="rows")
    assert explained


@pytest.mark.parametrize("reached", [True, False])
def test_a_large_wrong_line_does_not_enlarge_its_own_bound(reached: bool, monkeypatch: Patch) -> None:
    """Two elements whose changes cancel in the checksum, but for its rounding."""
    A, B = drawn("half of k small", 100, 300, 200)
    V = carry(B, balanced(200)).weights[:, 0]

    def cancelling(C: np.ndarray) -> None:
        size = 1e22 * np.abs(C).max()
        C[7, 3], C[7, 90] = size / V[3], -size / V[90]

    if not reached:
        monkeypatch.setattr(UnexplainedLines, "_largest_predicted", lambda self: np.full(self.at.size, np.inf))
    C, report = protected_gemm(A, B, check="rows", on_stage=at("multiplied", "C", cancelling), return_report=True)
    assert report.status.name == ("CORRECTED" if reached else "CLEAN")
    assert np.allclose(C, A @ B) == reached


# ---- a sparse operand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["small", "any"])
def test_a_sparse_operand_is_encoded_once(route: str, monkeypatch: Patch) -> None:
    A, B = drawn("sparse", 200, 600, 700)
    encodings: list[Any] = []
    if route == "small":
        counted(monkeypatch, SmallSums, "_carry", encodings)
        protected_gemm(A, B, check="rows")
    else:
        everywhere(monkeypatch, missed_by_sample, lambda *_: encodings.append(1))
        carry(B, balanced(700))
        encodings.append(1)
    assert len(encodings) == 1


def test_weights_of_a_sparse_operand_fit_columns_that_the_sample_does_not_show() -> None:
    B = drawn("sparse", 10, 1024, 400)[1]
    B[:, ::2] *= 2.0**-30
    B[:64, :], B[500, 5], B[900, 6] = 0, 2.0**20, 2.0**20
    V = np.abs(carry(B, balanced(400)).weights[:, 0])
    norms = np.sqrt((B * B).sum(axis=0))
    weighted = (V * norms)[norms > 0]
    assert weighted.max() / weighted.min() <= 2 * 1.5


# ---- roundings of one direction -----------------------------------------------------------------------------


def few_chains() -> Pair:
    """All rows of a product that is summed in order round in one direction for most of the time, and some too far."""
    A, B = pair(96, 1000, 120, np.float32)
    A[:, :800] = np.random.default_rng(1).uniform(0.1, 1, (96, 1))
    B[...] = np.random.default_rng(2).uniform(0.1, 1, 120)
    return A, B


def lines_alone(A: Any, B: Any, out: Any, *more: Any, **options: Any) -> None:
    """A library that rounds a few lines otherwise than all."""
    chain(A, B, out, *more, **options)
    if len(out) < 96:
        np.nextafter(out, np.inf, out=out)


@pytest.mark.parametrize("how", ["alike", "otherwise"])
def test_suspected_lines_are_multiplied_again_alone(how: str, monkeypatch: Patch) -> None:
    A, B = few_chains()
    again: list[Any] = []
    everywhere(monkeypatch, multiply, chain if how == "alike" else lines_alone)
    counted(monkeypatch, Product, "again", again)
    monkeypatch.setattr(reproduced, "workers", lambda: 2)  # half of the lines
    _, report = protected_gemm(A, B, check="rows", return_report=True)
    assert report.status.name == "CLEAN"
    assert 1 <= report.suspicions <= 48
    sizes = [given[1].size if len(given) > 1 else 96 for given in again]
    assert sizes[0] <= 48
    assert sizes[1:] == ([] if how == "alike" else [96])
    assert report.recomputed == sum(sizes) / 96


@pytest.mark.parametrize("looked", [True, False])
def test_what_an_operand_has_become_clears_no_suspicion(looked: bool, monkeypatch: Patch) -> None:
    A, B = pair(96, 300, 120)
    if not looked:
        monkeypatch.setattr(diagnose, "is_as_before", lambda *_: True)
        monkeypatch.setattr(diagnose, "have_same_bits", lambda *_: True)
    change = at("encoded", "A", put((7, 3), 5.0))
    if looked:
        with pytest.raises(SilentDataCorruptionError, match="A changed"):
            protected_gemm(A, B, check="rows", on_stage=change)
    else:
        assert protected_gemm(A, B, check="rows", on_stage=change, return_report=True)[1].status.name == "CLEAN"


@pytest.mark.parametrize("shape", [(300, 3000, 20), (20, 3000, 300), (17, 600, 33)])
def test_a_suspicion_of_one_product_is_none_of_the_next(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    rng, suspected = np.random.default_rng(0), 0
    A, B = np.eye(m, k), rng.standard_normal((k, n))  # rows that a first look leaves undecided
    for _ in range(30):
        equal = np.repeat(rng.standard_normal((m, 1)), k, 1), np.repeat(rng.standard_normal((1, n)), k, 0)
        _, first = protected_gemm(*equal, check="both", return_report=True)
        suspected += first.suspicions > 0
        _, report = protected_gemm(A, B, check="both", return_report=True)
        assert (first.status, report.status, report.suspicions) == (Status.CLEAN, Status.CLEAN, 0)
    assert suspected or shape == (17, 600, 33)  # which some processors round otherwise
