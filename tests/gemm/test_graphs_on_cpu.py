"""Calls with the same operands, which become graphs by themselves, on a card whose kernels run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.checksum.device import tuned
from abft_tsm2.gemm import replays
from benchmarks.planting import planted
from tests.support import cupy_on_cpu
from tests.support.planted_products import QUIET, Faults, everything, operands, right

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp


@pytest.mark.parametrize(("check", "joint"), [("rows", True), ("rows", False), ("columns", True), ("both", True)])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_a_call_with_the_same_operands_becomes_a_graph(
    cp: Any, batch: tuple[int, ...], sync: bool, check: str, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if joint else 0)
    A, B, C = operands(cp, *batch)
    found = []
    with ft.errstate(sync=sync, **QUIET), planted(Faults(4, 7), graphs=True):
        for _ in range(10):
            C[...] = 0
            report = ft.protected_gemm(A, B, out=C, check=check, return_report=True)[1].wait()
            found.append(report.status)
            assert right(A, B, C)
    assert len(replays._made) == 1
    assert [i for i, status in enumerate(found) if status is Status.CORRECTED] == [4, 7]
    assert set(found) == {Status.CLEAN, Status.CORRECTED}


def test_other_operands_options_and_streams_are_no_part_of_it(cp: Any) -> None:
    A, B, C = operands(cp)
    for _ in range(4):
        ft.protected_gemm(A, B, out=C)
    (graph,) = replays._made
    before = graph._launched
    others = operands(cp, seed=1)
    ft.protected_gemm(*others[:2], out=others[2])
    ft.protected_gemm(A, B, out=C, check="columns")
    ft.protected_gemm(A, B, out=C, alpha=2.0)
    with cp.cuda.Stream(non_blocking=True):
        ft.protected_gemm(A, B, out=C)
    assert graph._launched == before
    assert right(*others)
    ft.protected_gemm(A, B, out=C)
    assert graph._launched == before + 1


def test_what_changes_between_calls_is_seen(cp: Any) -> None:
    A, B, C = operands(cp)
    for i in range(8):
        A[...] = np.random.default_rng(i).standard_normal(A.shape)
        B *= 1.5
        assert ft.protected_gemm(A, B, out=C, return_report=True)[1].status is Status.CLEAN
        assert right(A, B, C)


def test_reports_that_nobody_has_waited_for_yet_are_kept(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "RING", 4)
    A, B, C = operands(cp)
    reports = []
    with ft.errstate(sync=False, **QUIET), planted(Faults(5, 9, 20), graphs=True):
        for _ in range(30):
            reports.append(ft.protected_gemm(A, B, out=C, return_report=True)[1])
        found = [report.wait() for report in reports]
    (graph,) = replays._made
    assert graph._launched >= 20
    assert [i for i, report in enumerate(found) if report.status is Status.CORRECTED] == [5, 9, 20]
    assert {report.status for report in found} == {Status.CLEAN, Status.CORRECTED}


@pytest.mark.parametrize("skipped", ["check/tsm2r_rows.cu", "repair/repair.cu"])
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "queued"])
def test_a_graph_whose_kernel_does_not_run_is_not_believed(
    card: tuple[Any, cupy_on_cpu.Kernels], sync: bool, skipped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cp, kernels), skip = card, []
    run = kernels._run

    def without(config: int, function: int, pointers: int) -> None:
        if kernels._configs[function - 1].file not in skip:
            run(config, function, pointers)

    monkeypatch.setattr(kernels, "_run", without)
    A, B, C = operands(cp)
    with ft.errstate(sync=sync, unverifiable="ignore", **QUIET):
        for _ in range(4):
            ft.protected_gemm(A, B, out=C)
        skip.append(skipped)
        report = ft.protected_gemm(A, B, out=C, return_report=True)[1].wait()
        skip.clear()
        assert report.status is not Status.CLEAN or not sync or report.suspicions
        assert not replays._made  # another one is made
        for _ in range(4):
            assert ft.protected_gemm(A, B, out=C, return_report=True)[1].wait().status is Status.CLEAN


def test_verdicts_are_those_of_their_own_calls_where_reports_are_read_late(
    card: tuple[Any, cupy_on_cpu.Kernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repair that does not run shifts the numbers of the device by one: no record is believed from there on."""
    (cp, kernels), skip = card, list[bool]()
    run = kernels._run

    def without(config: int, function: int, pointers: int) -> None:
        if not (skip and kernels._configs[function - 1].file == "repair/repair.cu"):
            run(config, function, pointers)

    monkeypatch.setattr(kernels, "_run", without)
    A, B, C = operands(cp)
    reports, bad = [], {7}
    quiet = ft.errstate(sync=False, unverifiable="ignore", **QUIET)
    with quiet, planted(Faults(*bad, plant=everything), graphs=True):
        for i in range(12):
            if i == 5:
                skip.append(True)
            reports.append(ft.protected_gemm(A, B, out=C, return_report=True)[1])
            skip.clear()
        (graph,) = replays._made
        found = [report.wait() for report in reports]
        assert all(found[i].status is Status.CLEAN and not found[i].suspicions for i in range(5))
        assert found[5].status is not Status.CLEAN
        assert not found[7].ok
        assert graph not in replays._made


def test_verdicts_are_those_of_their_own_calls_after_an_interrupt(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B, C = operands(cp)
    launch, stop = cupy_on_cpu.CapturedGraph.launch, [False]

    def interrupted(graph: Any, stream: Any = None) -> None:
        launch(graph, stream)
        if stop[0]:
            stop[0] = False
            raise KeyboardInterrupt

    monkeypatch.setattr(cupy_on_cpu.CapturedGraph, "launch", interrupted)
    arm: list[bool] = []
    with planted(lambda C: everything(C) if arm and arm.pop() else None, graphs=True), ft.errstate(**QUIET):
        for i in range(12):
            stop[0] = i == 5
            arm += [True] * (i in (6, 9))
            try:
                report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
            except KeyboardInterrupt:
                continue
            assert right(A, B, C)
            assert (report.status is Status.CORRECTED) == (i in (6, 9))


def test_late_verdicts_are_not_on_what_was_written_since(cp: Any) -> None:
    A, B, C = operands(cp)
    with planted(Faults(5, plant=everything), graphs=True), ft.errstate(sync=False, **QUIET):
        reports = [ft.protected_gemm(A, B, out=C, return_report=True)[1] for _ in range(8)]
        found = [report.wait() for report in reports]
    assert [report.status is Status.UNCORRECTABLE for report in found] == [i == 5 for i in range(8)]
    assert "to the same place since" in found[5].reasons[0]


@pytest.mark.parametrize("calls", [1, 6], ids=["step by step", "graph"])
def test_an_encoded_operand_that_changed_is_told_late(cp: Any, calls: int) -> None:
    A, B, C = operands(cp)
    E = ft.encode(B)
    with ft.errstate(sync=False, **QUIET):
        for _ in range(calls):
            ft.protected_gemm(A, E, out=C)
        B[3, 4] += 1
        assert ft.protected_gemm(A, E, out=C, return_report=True)[1].wait().status is Status.INPUT_CHANGED


def test_factors_that_can_change_are_read_each_time(cp: Any) -> None:
    class Factor:
        value = 1.0

        def __float__(self) -> float:
            return self.value

    A, B, C = operands(cp)
    alpha: Any = Factor()
    for alpha.value in (1.0, 1.0, 1.0, 1.0, 3.0):
        ft.protected_gemm(A, B, out=C, alpha=alpha)
    assert np.allclose(C, 3 * (np.asarray(A) @ np.asarray(B)), rtol=1e-4, atol=1e-4)


def test_overlap_is_seen_of_arrays_that_run_backwards(cp: Any) -> None:
    pool = cp.asarray(np.random.default_rng(0).standard_normal((6, 8, 8)).astype(np.float32))
    A, B = pool[3::-1], cp.asarray(np.eye(8, dtype=np.float32))
    ft.protected_gemm(A, B, out=cp.asarray(np.zeros((4, 8, 8), np.float32)))
    before = np.array(pool)
    for _ in range(4):
        with pytest.raises(ValueError, match="shares memory"):
            ft.protected_gemm(A, B, out=pool[2:6])
    assert (pool == before).all()


def test_a_graph_that_cannot_be_made_is_done_without(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(replays, "Graph", fails)
    A, B, C = operands(cp)
    for _ in range(8):
        assert ft.protected_gemm(A, B, out=C, return_report=True)[1].status is Status.CLEAN
    assert not replays._made


@pytest.mark.parametrize("how", [{}, {"verify": "float32"}], ids=["float32", "float16 by way of float32"])
def test_everything_wrong_is_left_to_the_host(cp: Any, how: dict[str, str]) -> None:
    A, B, C = (x.astype(np.float16) if how else x for x in operands(cp))
    with planted(Faults(5, plant=everything), graphs=True), ft.errstate(corrected="ignore"):
        found = []
        for _ in range(8):
            found.append(ft.protected_gemm(A, B, out=C, return_report=True, **how)[1].status)
            assert right(A, B, C)
    assert len(replays._made) == 1
    assert [i for i, status in enumerate(found) if status is Status.CORRECTED] == [5]


def test_no_more_graphs_are_kept_than_are_used(cp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_MOST", 2)
    monkeypatch.setattr(replays, "_UNUSED", 8)
    given = [operands(cp, seed=i) for i in range(4)]
    for _ in range(5):
        for A, B, C in given:
            ft.protected_gemm(A, B, out=C)
            assert right(A, B, C)
    assert len(replays._made) == 2  # used in turns: none makes place for another one
    for _ in range(20):
        ft.protected_gemm(*given[3][:2], out=given[3][2])
    assert any(where[0] == given[3][0].data.ptr for _, where in replays._made.values())
    assert len(replays._made) == 2
