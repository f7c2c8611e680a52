"""Verdicts of a GPU that were not made, checksums that were lost with their line, operands that change after a repair.
These need one: ``pytest -m gpu``.

Steps of a check are left out, and records and states overwritten, behind the kernels on their stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status, policy
from abft_tsm2.checksum.device.check import DeviceCheck
from abft_tsm2.checksum.device.layout import elements
from abft_tsm2.core.launch import Step
from abft_tsm2.core.memory import WORDS
from abft_tsm2.gemm import known, plan
from benchmarks.planting import planted
from tests.gemm.test_device_gemm import normal, wrong
from tests.support.check_cases import JUDGED_WORD

pytestmark = pytest.mark.gpu

Steps = Callable[[DeviceCheck, int, list[Step]], list[Step]]
ELEMENT = (3, 5)


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of another test is used here, and none of these elsewhere."""
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(known, "_known", {})


def spoil(monkeypatch: pytest.MonkeyPatch, method: str, change: Steps) -> None:
    """Change the steps that a check makes of one of its methods."""
    make = getattr(DeviceCheck, method)

    def spoiled(self: DeviceCheck, memory: int, *arguments: Any, **named: Any) -> list[Step]:
        return change(self, memory, make(self, memory, *arguments, **named))

    monkeypatch.setattr(DeviceCheck, method, spoiled)


def overwritten(value: int) -> Steps:
    """The record, behind the kernel that has written it."""
    from cupy.cuda import runtime

    def overwrite(stream: int, where: Any) -> None:
        runtime.memsetAsync(where["record"], value, 8 * WORDS, stream)

    return lambda check, memory, steps: [*steps, overwrite]


def short_by_one(check: DeviceCheck, memory: int, steps: list[Step]) -> list[Step]:
    """The count of lines, behind the kernel that judges."""
    state = elements(check.workspace.at(memory, "state"), 32, "uint64")

    def take(stream: int, where: Any) -> None:
        state[JUDGED_WORD] -= np.uint64(1)

    return [*steps, take]


def nothing(check: DeviceCheck, memory: int, steps: list[Step]) -> list[Step]:
    return []


SPOILED: dict[str, tuple[str, Callable[[], Steps]]] = {
    "verdict skipped": ("verify", lambda: nothing),
    "repair skipped": ("repair", lambda: nothing),
    "record zeroed": ("repair", lambda: overwritten(0)),
    "record of ones": ("repair", lambda: overwritten(0xFF)),
    "a line short": ("verify", lambda: short_by_one),
}


def hit(C: Any) -> None:
    if C.shape[-1] == 70:  # the product; checksums of operands may be products of cuBLAS as well
        C[(..., *ELEMENT)] = 1e4


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", SPOILED)
def test_what_is_no_verdict_is_looked_at(
    cp: Any, name: str, sync: bool, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, change = SPOILED[name]
    spoil(monkeypatch, method, change())
    shape = (batch,) if batch else ()
    a, b = normal(cp, *shape, 60, 50), normal(cp, *shape, 50, 70, seed=1)
    with ft.errstate(sync=sync, unverifiable="ignore"):
        c, report = ft.protected_gemm(a, b, return_report=True)
        report = report.wait()
    assert report.status is (Status.CLEAN if sync else Status.UNVERIFIABLE)  # later nothing shows what was multiplied
    assert report.suspicions >= 60
    for x, y, z in zip(a, b, c, strict=True) if batch else [(a, b, c)]:
        assert not wrong(cp, x, y, z)
    with ft.errstate(sync=sync, uncorrectable="log"), planted(hit):
        c, report = ft.protected_gemm(a, b, return_report=True)
    with ft.errstate(uncorrectable="log", unverifiable="ignore"):
        final = report.wait()
    if final.status is Status.UNCORRECTABLE:  # what nothing has repaired is told
        assert not sync
        return
    if final.status is Status.UNVERIFIABLE and not sync:
        final = replace(final, status=Status.CLEAN)
    assert final.status in (
        Status.CORRECTED,
        Status.CLEAN,
    )  # where the record alone was lost, the kernel has repaired C
    for x, y, z in zip(a, b, c, strict=True) if batch else [(a, b, c)]:
        assert not wrong(cp, x, y, z)


@pytest.mark.parametrize("sync", [True, False])
def test_a_record_of_the_call_before_is_no_verdict(cp: Any, sync: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that writes it runs once; later calls find what it has left."""
    left = [1]

    def first(check: DeviceCheck, memory: int, steps: list[Step]) -> list[Step]:
        def once(stream: int, where: Any) -> None:
            for step in steps if left else ():
                step(stream, where)
            left.clear()

        return [once]

    a, b = normal(cp, 60, 50), normal(cp, 50, 70, seed=1)
    spoil(monkeypatch, "repair", first)
    with ft.errstate(sync=True):
        assert ft.protected_gemm(a, b, return_report=True)[1].suspicions == 0
    with ft.errstate(sync=sync, uncorrectable="log"), planted(hit):
        c, report = ft.protected_gemm(a, b, return_report=True)
    with ft.errstate(uncorrectable="log"):
        final = report.wait()
    assert final.status is (Status.CORRECTED if sync else Status.UNCORRECTABLE)
    assert wrong(cp, a, b, c) is not sync


def test_no_report_is_dismissed_whose_verdict_was_not_made(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "verify", nothing)
    a, b = normal(cp, 60, 50), normal(cp, 50, 70, seed=1)

    def drop() -> None:
        for _ in range(200):
            ft.protected_gemm(a, b)
            cp.cuda.Device().synchronize()
        policy._sweep()  # the last of them as well: no later test shall be warned of it

    with ft.errstate(sync=False, uncorrectable="log"), planted(hit), pytest.warns(match="never waited"):
        drop()


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("also_c", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_checksum_that_is_lost_with_its_line(cp: Any, dtype: str, also_c: bool, check: str) -> None:
    a, b = normal(cp, 130, 257, dtype=dtype), normal(cp, 257, 70, dtype=dtype, seed=1)

    def plant(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            arrays["t"][3] = 0
        if stage == "multiplied" and also_c:
            arrays["C"][3 if check == "rows" else (slice(None), 3)] = 0

    c, report = ft.protected_gemm(a, b, check=check, return_report=True, on_stage=plant)
    statuses = {report.status, *report.also}
    assert report.status is (Status.CORRECTED if also_c else Status.CHECKSUM_FAULT)
    assert Status.CHECKSUM_FAULT in statuses
    assert not wrong(cp, a, b, c)


@pytest.mark.parametrize("operand", ["A", "B", "c"])
@pytest.mark.parametrize("encoded", [False, True])
def test_an_operand_that_changes_after_a_repair(cp: Any, operand: str, encoded: bool) -> None:
    a, b, c0 = (normal(cp, *shape, seed=i) for i, shape in enumerate(((130, 257), (257, 70), (130, 70))))
    kept = {"A": a.copy(), "B": b.copy(), "c": c0.copy()}
    where = {"A": a, "B": b, "c": c0}[operand]
    right = ft.encode(b, side="rows") if encoded else b

    def plant(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][ELEMENT] = 1e4
        if stage == "corrected":
            where[7, 11] = 3.0

    with ft.errstate(input_changed="log"):
        out, report = ft.protected_gemm(a, right, c0, beta=0.5, check="rows", return_report=True, on_stage=plant)
    if encoded and operand == "B":
        assert report.status is Status.CORRECTED
        assert not wrong(cp, kept["A"], kept["B"], out, kept["c"], beta=0.5)
    else:
        assert report.status is Status.INPUT_CHANGED
        assert operand in str(report)


def test_a_repair_after_which_nothing_changes_is_one(cp: Any) -> None:
    a, b = normal(cp, 130, 257), normal(cp, 257, 70, seed=1)
    told = list[str]()

    def plant(stage: str, arrays: Any) -> None:
        told.append(stage)
        if stage == "multiplied":
            arrays["C"][ELEMENT] = 1e4

    for right in (b, ft.encode(b, side="rows")):
        c, report = ft.protected_gemm(a, right, return_report=True, on_stage=plant)
        assert report.status is Status.CORRECTED
        assert len(report.faults) == 1
        assert not wrong(cp, a, b, c)
    assert told.count("corrected") == 2


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_columns_that_change_places_are_seen(cp: Any, dtype: str) -> None:
    """Weights differ pairwise in magnitude, whatever the norms of the columns."""
    rng = np.random.default_rng(0)
    a = normal(cp, 96, 64, dtype=dtype)
    b = normal(cp, 64, 80, dtype=dtype, seed=1)
    wide = None if dtype == "float64" else np.float32  # not rounded to 16 bits, which hides small differences
    for _ in range(60):
        i, j = (int(x) for x in rng.choice(80, 2, replace=False))

        def swap(C: Any, i: int = i, j: int = j) -> None:
            C[:, [i, j]] = C[:, [j, i]]

        with planted(swap), ft.errstate(corrected="ignore"):
            c, report = ft.protected_gemm(a, b, check="rows", out_dtype=wide, return_report=True)
        assert report.status is Status.CORRECTED
        assert not wrong(cp, a, b, c)
