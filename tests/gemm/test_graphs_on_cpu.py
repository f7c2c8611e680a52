"""Products that run as CUDA graphs, whose kernels run on the CPU: calls that become graphs by themselves, and captures.

On a card the same is tested in tests/gemm/test_graphs_on_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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
from tests.support.oracles import Exact

QUIET: dict[str, Any] = {"corrected": "ignore", "input_changed": "log", "uncorrectable": "log"}
M, K, N = 60, 50, 70


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> tuple[Any, cupy_on_cpu.Kernels]:
    return cupy_on_cpu.install(monkeypatch, build_cache)


@pytest.fixture
def cp(card: tuple[Any, cupy_on_cpu.Kernels]) -> Any:
    return card[0]


def operands(cp: Any, *batch: int, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    A, B = (rng.standard_normal((*batch, *shape)).astype(np.float32) for shape in ((M, K), (K, N)))
    return cp.asarray(A), cp.asarray(B), cp.asarray(np.zeros((*batch, M, N), np.float32))


def right(A: Any, B: Any, C: Any) -> bool:
    each = zip(A, B, C, strict=True) if A.ndim == 3 else [(A, B, C)]
    return not any(Exact.of(np.asarray(a), np.asarray(b), None).outside(np.asarray(c)).any() for a, b, c in each)


class Faults:
    """A fault in the product of some calls, counted from 0 on."""

    def __init__(self, *calls: int, plant: Callable[[Any], None] | None = None) -> None:
        self.calls, self.count, self.plant = set(calls), 0, plant or self.element

    @staticmethod
    def element(C: Any) -> None:
        C[..., 3, 5] = 1e4

    def __call__(self, C: Any) -> None:
        if self.count in self.calls:
            self.plant(C)
        self.count += 1


def everything(C: Any) -> None:
    C *= 2


# ---- calls that become graphs ----------------------------------------------------------------------------------------


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
    with ft.errstate(sync=sync, **QUIET):
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
    with ft.errstate(sync=False, **QUIET), planted(Faults(*bad, plant=everything), graphs=True):
        for i in range(12):
            if i == 5:
                skip.append(True)
            reports.append(ft.protected_gemm(A, B, out=C, return_report=True)[1])
            skip.clear()
        (graph,) = replays._made
        found = [report.wait() for report in reports]
        assert all(found[i].status is Status.CLEAN and not found[i].suspicions for i in range(5))
        assert found[5].suspicions or not found[5].ok
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


# ---- captures -------------------------------------------------------------------------------------------------------


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
