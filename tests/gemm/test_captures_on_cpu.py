"""Products in captured graphs, on a card whose kernels run on the CPU: what replays add up to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2 import Status, policy
from abft_tsm2.checksum.device import tuned
from abft_tsm2.core.launch import PreparedLaunch
from abft_tsm2.errors import CorruptionWarning, UnverifiableWarning
from abft_tsm2.gemm import replays
from benchmarks.planting import planted
from tests.support import cupy_on_cpu
from tests.support.planted_products import QUIET, Faults, everything, operands, right

card, cp = cupy_on_cpu.card, cupy_on_cpu.cp


def capture(cp: Any, *calls: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """A graph of calls, and what they returned."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, ft.errstate(sync=False):
        stream.begin_capture()
        try:
            found = [call() for call in calls]
        finally:
            graph = stream.end_capture()
        return graph, found


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "batch"])
def test_replays_add_up(cp: Any, batch: tuple[int, ...], check: str) -> None:
    A, B, C = operands(cp, *batch)
    with planted(Faults(3, 4, 11), graphs=True), ft.errstate(**QUIET):
        call = lambda: ft.protected_gemm(A, B, out=C, check=check, return_report=True)  # noqa: E731
        graph, ((result, report),) = capture(cp, call)
        assert result is C
        assert report.status is Status.PENDING
        assert report.wait().status is Status.PENDING  # no replay yet
        for i in range(15):
            C[...] = 0
            graph.launch()
            assert right(A, B, C), i
            if i == 2:
                first = report.wait()
                assert (first.status, first.replays, first.faults) == (Status.CLEAN, 3, ())
        final = report.wait()
    assert final.status is Status.CORRECTED
    assert final.replays == 15
    faults = [fault for one in final.products or (final,) for fault in one.faults]
    assert {fault.repair for fault in faults} == {
        f"recomputed in float64 on the device, in replay {i}" for i in (3, 4, 11)
    }
    assert {(fault.rows, fault.columns) for fault in faults} == {((3,), (5,))}
    assert len(faults) == 3 * (batch or (1,))[0]
    assert ft.Report.from_dict(final.to_dict()).replays == 15
    assert "replays: 15" in str(final)


def test_products_of_one_graph_have_reports_of_their_own(cp: Any) -> None:
    A, B, C = operands(cp)
    D, E, F = operands(cp, seed=1)
    with planted(Faults(1, 4), graphs=True), ft.errstate(**QUIET):
        calls = [lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1]]
        calls += [lambda: ft.protected_gemm(D, E, out=F, return_report=True)[1]]
        graph, (one, two) = capture(cp, *calls)
        for _ in range(3):
            graph.launch()
        assert [one.wait().status, two.wait().status] == [Status.CORRECTED] * 2
        assert "replay 2" in one.wait().faults[0].repair  # calls 0, 2, 4 are its own
        assert "replay 0" in two.wait().faults[0].repair
    assert right(A, B, C)
    assert right(D, E, F)


def test_more_faults_than_the_log_has_space_for_are_counted(cp: Any) -> None:
    A, B, C = operands(cp)
    rounds = 300
    with planted(Faults(*range(rounds)), graphs=True), ft.errstate(**QUIET):
        graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
        for _ in range(rounds):
            graph.launch()
        final = report.wait()
    assert sum(fault.elements for fault in final.faults) == rounds
    assert final.status is Status.CORRECTED


def test_what_the_device_cannot_repair_is_refused_with_its_number(cp: Any) -> None:
    A, B, C = operands(cp)
    with planted(Faults(2, 5, plant=everything), graphs=True):
        graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
        for _ in range(7):
            graph.launch()
        with pytest.raises(ft.SilentDataCorruptionError, match=r"2 of 7 replays failed .* the first of them replay 2"):
            report.wait()
        with pytest.raises(ft.SilentDataCorruptionError):
            report.wait()  # it is not forgotten


def test_detected_and_not_repaired(cp: Any) -> None:
    A, B, C = operands(cp)
    with planted(Faults(1), graphs=True):
        graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, on_error="detect", return_report=True)[1])
        graph.launch()
        graph.launch()
        found = report.wait()
    assert found.status is Status.UNCORRECTABLE
    assert C[3, 5] == 1e4
    assert found.reasons[0].startswith("1 of 2 replays failed the check along rows")


@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
@pytest.mark.parametrize("skipped", ["the verdict", "the repair", "the sums of A", "verdict and repair"])
def test_a_replay_without_proof_of_work_is_told(
    card: tuple[Any, cupy_on_cpu.Kernels], skipped: str, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cp, kernels), skip, run = card, list[bool](), card[1]._run
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if joint else 0)

    def without(config: int, function: int, pointers: int) -> None:
        kernel: Any = kernels._configs[function - 1]
        verdict = kernel.file == "check/tsm2r_rows.cu" and kernel.verdict
        sums = kernel.file == "check/tsm2r_rows.cu" and (kernel.joint or kernel.given)
        repair = kernel.file == "repair/repair.cu"
        named = {"the verdict": verdict, "the repair": repair, "the sums of A": sums}
        named["verdict and repair"] = verdict or repair
        if not (skip and named[skipped]):
            run(config, function, pointers)

    monkeypatch.setattr(kernels, "_run", without)
    A, B, C = operands(cp)
    graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
    graph.launch()
    skip.append(True)
    A *= 2
    graph.launch()
    skip.clear()
    graph.launch()
    with ft.errstate(**QUIET):
        found = report.wait()
    if skipped == "the sums of A" and not joint:  # what was expected is that of another A: all lines fail
        assert found.status is Status.UNCORRECTABLE
    else:
        assert found.status is Status.UNCORRECTABLE
        assert any(
            "replays" in reason and ("no verdict" in reason or "left no record" in reason) for reason in found.reasons
        )
    assert found.replays == 3


def test_an_encoded_operand_that_changes_is_refused(cp: Any) -> None:
    A, B, C = operands(cp)
    E = ft.encode(B)
    graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, E, out=C, return_report=True)[1])
    graph.launch()
    assert report.wait().status is Status.CLEAN
    B[4, 5] += 1
    graph.launch()
    with pytest.raises(ft.SilentDataCorruptionError, match="an operand had changed"):
        report.wait()


def test_an_encoded_left_operand_is_captured_too(cp: Any) -> None:
    A, B, C = operands(cp)
    E = ft.encode(A)
    graph, (report,) = capture(cp, lambda: ft.protected_gemm(E, B, out=C, return_report=True)[1])
    for _ in range(3):
        graph.launch()
    assert (report.wait().status, report.wait().replays) == (Status.CLEAN, 3)
    assert right(A, B, C)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_called_wrong(cp: Any, value: float) -> None:
    A, B, C = operands(cp)
    graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
    graph.launch()
    A[3, 4] = value
    graph.launch()
    with pytest.warns(UnverifiableWarning, match="NaN or Inf in the operands"):
        found = report.wait()
    assert (found.status, found.replays) == (Status.UNVERIFIABLE, 2)
    assert "replay 1" in found.reasons[0]


def test_what_cannot_be_captured_says_so(cp: Any) -> None:
    A, B, C = operands(cp)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match=r"use errstate\(sync=False\)"):
            ft.protected_gemm(A, B, out=C)
        stream.end_capture()
    with pytest.raises(ValueError, match="contiguous rows or columns"):
        capture(cp, lambda: ft.protected_gemm(A[:, ::2], B[::2], out=C))


def test_memory_belongs_to_the_graph_and_what_was_found_outlives_it(cp: Any) -> None:
    A, B, C = operands(cp)
    cupy_on_cpu.Kept.made.clear()
    with planted(Faults(0), graphs=True), ft.errstate(**QUIET):
        graph, (report,) = capture(cp, lambda: ft.protected_gemm(A, B, out=C, return_report=True)[1])
        graph.launch()
        (kept,) = cupy_on_cpu.Kept.made
        kept.needed = False
        assert report.wait().status is Status.CORRECTED
        assert report._open.verdict is None  # its memory is free


@pytest.mark.parametrize("gone", [False, True], ids=["at exit", "dropped"])
def test_a_report_that_was_never_waited_for_warns_of_what_was_refused(cp: Any, gone: bool) -> None:
    A, B, C = operands(cp)
    cupy_on_cpu.Kept.made.clear()
    with planted(Faults(0, plant=everything), graphs=True):
        graph, _ = capture(cp, lambda: ft.protected_gemm(A, B, out=C))
        clean, _ = capture(cp, lambda: ft.protected_gemm(A, B, out=C))
        graph.launch()
        clean.launch()
    _never, _ = capture(cp, lambda: ft.protected_gemm(A, B, out=C))
    if gone:
        for kept in cupy_on_cpu.Kept.made:
            kept.needed = False
    with pytest.warns(CorruptionWarning, match="never waited for") as caught:
        policy._sweep() if gone else policy._sweep_at_exit()
    assert len(caught) == 1
    assert not policy._open


@pytest.mark.parametrize(("joint", "launches"), [(True, 4), (False, 5)], ids=["joint", "apart"])
def test_launches_are_those_of_one_product(
    cp: Any, joint: bool, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(tuned, "JOINT", tuned.JOINT if joint else 0)
    monkeypatch.setattr(replays.ReplayedProduct, "queue", _counting(made, replays.ReplayedProduct.queue))
    A, B, C = operands(cp)
    capture(cp, lambda: ft.protected_gemm(A, B, out=C))
    assert made == [launches]  # weights, B, A unless beside C; C, repair


def _counting(made: list[Any], queue: Callable[..., None]) -> Callable[..., None]:
    def counted(self: Any, stream: Any, workspace: Any) -> None:
        launches = 0
        call = PreparedLaunch.__call__

        def one(launch: PreparedLaunch, stream: int, where: Any) -> None:
            nonlocal launches
            launches += 1
            call(launch, stream, where)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PreparedLaunch, "__call__", one)
            queue(self, stream, workspace)
        made.append(launches)

    return counted
