"""LU factored by the kernels of `abft_tsm2.linalg.device`: pivots, certificates, and faults planted on the way."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, errstate, protected_lu_factor
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.faults.operands.matrices import FAMILIES
from abft_tsm2.linalg import lu_on_device
from abft_tsm2.linalg.device import plan
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.device.schedule import Task
from abft_tsm2.linalg.evidence import factor_evidence
from abft_tsm2.linalg.outcome import Findings
from benchmarks.lu_gpu_contenders import planted
from tests.linalg.test_growth import wilkinson
from tests.support.factor_cases import DTYPES, lu_outside
from tests.support.lu_matrices import MATRICES, MAY_OVERFLOW, NEAR_TIES
from tests.support.planting import normal

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

IDS = [dtype.name for dtype in DTYPES]
SHAPES = [
    *((1, 1), (5, 5), (127, 127), (128, 128), (129, 129), (500, 500), (1000, 1000), (1003, 1003)),
    *((1, 9), (9, 1), (300, 2), (2, 300), (700, 260), (260, 700), (5000, 130), (130, 5000)),
]
BY_LIBRARY = {np.dtype("float64"): 16500, np.dtype("float32"): 33000}
"""Rows of a panel that is too tall for the kernel."""


def factored(a: np.ndarray, mode: str = "online", **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    (lu, piv), report = protected_lu_factor(cupy.asarray(a, order="A"), mode=mode, return_report=True, **options)
    return lu.get(), piv.get(), report


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors_are_those_of_lapack(shape: tuple[int, int], order: str, mode: str, dtype: Any) -> None:
    a = np.asarray(normal(*shape, dtype=dtype), order=order)
    lu, piv, report = factored(a, mode)
    assert report.status is Status.CLEAN
    assert not report.suspicions
    np.testing.assert_array_equal(piv, linalg.lapack.get_lapack_funcs("getrf", (a,))(a)[1])
    if max(shape) <= 300:
        assert not lu_outside(lu, piv, a).any()
    else:
        check(a, lu, piv, report)


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("family", ["gaussian kernel", "toeplitz", "vander 0.1 3", "vander 0.5 1.5", "binomial"])
def test_subnormal_numbers_are_no_faults(family: str, mode: str) -> None:
    a = np.asarray(FAMILIES[family](1000, np.random.default_rng(3), np.float32), np.float32)
    assert np.count_nonzero((a != 0) & (abs(a) < np.finfo(np.float32).tiny)) > 100
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)  # some pivots are zero
        lu, piv, report = factored(a, mode)
    assert report.status is Status.CLEAN, report
    assert factor_evidence(a, lu, piv).right


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_views_of_any_strides(dtype: Any) -> None:
    whole = normal(900, 800, dtype=dtype)
    x = cupy.asarray(whole)
    for part in (
        (slice(1, 601, 2), slice(3, 303)),
        (slice(600, None, -1), slice(0, 500)),
        (slice(0, 64), slice(5, 700)),
    ):
        before = x.copy()
        (lu, piv), report = protected_lu_factor(x[part], return_report=True)
        assert report.status is Status.CLEAN
        check(whole[part], lu.get(), piv.get(), report)
        assert bool((x == before).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_tall_panels_are_the_librarys(dtype: Any) -> None:
    a = normal(BY_LIBRARY[dtype], 200, dtype=dtype)
    for mode in ("online", "offline"):
        lu, piv, report = factored(a, mode)
        assert report.status is Status.CLEAN
        np.testing.assert_array_equal(piv, linalg.lapack.get_lapack_funcs("getrf", (a,))(a)[1])
        L, U = np.tril(lu, -1) + np.eye(*lu.shape), np.triu(lu[:200])
        exchanged = a.astype(np.float64)
        for i, p in enumerate(piv):
            exchanged[[i, p]] = exchanged[[p, i]]
        np.testing.assert_allclose(L @ U, exchanged, atol=200 * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("n", [120, 300])
@pytest.mark.parametrize("name", MATRICES)
def test_hard_matrices(name: str, n: int, dtype: Any) -> None:
    a = MATRICES[name](n, np.random.default_rng(n), dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        warnings.simplefilter("ignore", UnverifiableWarning)
        for mode in ("online", "offline"):
            lu, piv, report = factored(a, mode)
            if name in MAY_OVERFLOW and report.status is Status.UNVERIFIABLE:
                continue
            assert report.status is Status.CLEAN, report
            assert not lu_outside(lu, piv, a).any()
            if name not in NEAR_TIES:
                right = linalg.lu_factor(a)[1]
                assert np.count_nonzero(piv != right) <= len(right) // 10


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_ties_go_to_the_first_row(dtype: Any) -> None:
    a = np.random.default_rng(1).choice([-1.0, 1.0], (400, 128)).astype(dtype)
    _, piv, _ = factored(a[:, :1])
    assert piv[0] == 0
    _, piv, _ = factored(np.where(np.arange(400)[:, None] < 7, 0.5, a[:, :1]).astype(dtype))
    assert piv[0] == 7


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_zero_pivots_are_named(dtype: Any) -> None:
    a = normal(300, 300, dtype=dtype)
    a[:, [37, 200]] = 0
    with pytest.warns(linalg.LinAlgWarning, match="Diagonal number 38 is exactly zero"):
        lu, piv, report = factored(a)
    assert report.status is Status.CLEAN
    assert not lu_outside(lu, piv, a).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_tiny_pivots_are_divided_by(dtype: Any) -> None:
    small = float(np.finfo(dtype).smallest_subnormal)
    a = np.triu(normal(200, 200, dtype=dtype)) + np.diag(np.full(199, 0.25, dtype), -1).astype(dtype)
    a[:, 5] = 0
    a[5:8, 5] = [7 * small, -3 * small, 2 * small]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lu, _, report = factored(a)
    assert report.status in (Status.CLEAN, Status.UNVERIFIABLE)
    assert np.all(np.abs(np.tril(lu, -1)) <= 1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    a = normal(300, 300)
    a[200, 150] = value
    with pytest.raises(ValueError, match="infs or NaNs"):
        factored(a)
    with pytest.warns(UnverifiableWarning):
        _, piv, report = factored(a, check_finite=False)
    assert report.status is Status.UNVERIFIABLE
    assert np.all(piv >= np.arange(300))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_bits_repeat(mode: str, dtype: Any) -> None:
    a, results = cupy.asarray(normal(1100, 1100, dtype=dtype), order="F"), []
    for _ in range(6):  # the first by launches, then as a graph
        lu, piv = protected_lu_factor(a, mode=mode)
        results.append((lu.get().tobytes(), piv.get().tobytes()))
        del lu, piv
    assert len(set(results)) == 1
    kept = [protected_lu_factor(a, mode=mode) for _ in range(3)]  # at other addresses
    assert {lu.get().tobytes() for lu, _ in kept} == {results[0][0]}


def test_the_current_stream_stays() -> None:
    a = cupy.asarray(normal(400, 400))
    expected = protected_lu_factor(a)[0].get()
    stream = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    stream.use()
    try:
        for _ in range(3):
            stream.use()  # CuPy's own `get` goes back to the default stream
            lu, _ = protected_lu_factor(a)
            assert cupy.cuda.get_current_stream().ptr == stream.ptr
            np.testing.assert_array_equal(lu.get(), expected)
    finally:
        before.use()


def test_threads_factor_side_by_side() -> None:
    a = [cupy.asarray(normal(600, 600, seed=i)) for i in range(4)]
    expected, found = [protected_lu_factor(x)[0].get() for x in a], {}

    def run(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(4):
                found[i] = protected_lu_factor(a[i])[0].get()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        np.testing.assert_array_equal(found[i], expected[i])


# ---- faults ----------------------------------------------------------------------------------------------------------

CHANGES = {"sign": 63, "exponent": 62, "mantissa": 51, "high exponent": 55}


class Planted:
    """Changes one number after one of the tasks."""

    def __init__(self, monkeypatch: Any, at: int, change: Any) -> None:
        self.at, self.change, self.count, self.made = at, change, 0, []
        self.late = False

        def make(A: Any, **options: Any) -> DeviceFactorisation:
            made = DeviceFactorisation.__new__(DeviceFactorisation)
            self.made.append(made)
            made.__init__(A, after=self.after if len(self.made) == 1 else None, **options)
            return made

        monkeypatch.setattr(lu_on_device, "DeviceFactorisation", make)

    def after(self, task: Any) -> None:
        if task.name in ("record", "wait"):
            return
        self.late |= task == Task("main", "multiply_sums")  # nothing reads the factors after that
        if self.count == self.at and not self.late:
            self.change(self.made[0])
            cupy.cuda.runtime.deviceSynchronize()
        self.count += 1


def flipped(array: Any, index: Any, bit: int) -> None:
    """Flip a bit, counted for float64; the like one of float32."""
    words = array.view(cupy.uint64 if array.itemsize == 8 else cupy.uint32)
    place = bit if array.itemsize == 8 else max(0, bit - 32) if bit >= 61 else bit - 29
    words[index] ^= words.dtype.type(1 << place)


def element(i: int, j: int, bit: int) -> Any:
    def change(run: DeviceFactorisation) -> None:
        column = run.W[:, j]
        flipped(column[i : i + 1], 0, bit)

    return change


def of_sums(name: str, i: int, bit: int) -> Any:
    def change(run: DeviceFactorisation) -> None:
        flipped(run._sums.on_device(name)[i : i + 1], 0, bit)

    return change


def of_buffers(name: str, i: int, bit: int) -> Any:
    def change(run: DeviceFactorisation) -> None:
        flipped(getattr(run._plan.buffers, name).ravel()[i : i + 1], 0, bit)

    return change


def check(a: np.ndarray, lu: np.ndarray, piv: np.ndarray, report: Any) -> None:
    """Right, to the accuracy of a factorisation, whatever was planted."""
    assert report.status in (Status.CLEAN, Status.CORRECTED, Status.CHECKSUM_FAULT), report
    exchanged = a.astype(np.float64)
    for i, p in enumerate(piv):
        exchanged[[i, p]] = exchanged[[p, i]]
    K = min(a.shape)
    L, U = np.tril(lu[:, :K].astype(np.float64), -1) + np.eye(len(lu), K), np.triu(lu[:K].astype(np.float64))
    unit = float(np.finfo(a.dtype).eps)
    assert np.abs(L @ U - exchanged).max() <= 40 * unit * len(a)
    assert np.abs(np.tril(lu, -1)).max() <= 1 + 10 * unit


def check_repaired(a: np.ndarray, lu: np.ndarray, piv: np.ndarray, report: Any, repair: str) -> None:
    """Right, and one fault was repaired, in this way."""
    assert report.status is Status.CORRECTED
    assert len(report.faults) == 1
    assert repair in report.faults[0].repair
    check(a, lu, piv, report)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("bit", CHANGES.values(), ids=CHANGES)
def test_a_changed_element_is_repaired(bit: int, mode: str, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, rng = normal(600, 600, dtype=dtype), np.random.default_rng(bit)
    repaired = 0
    for _ in range(12):
        with monkeypatch.context() as patch:
            at = int(rng.integers(3, 52 if mode == "online" else 32))
            Planted(patch, at, element(*rng.integers(0, 600, 2).tolist(), bit))
            lu, piv, report = factored(a, mode)
        check(a, lu, piv, report)
        repaired += report.status is Status.CORRECTED
    assert repaired >= 6  # where an element is dead, or not yet copied, nothing happens


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("name", ["v", "w", "carried_S", "carried_Z", "row_floor", "column_floor"])
def test_a_changed_sum_does_no_harm(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = normal(600, 600)
    for at in (8, 20, 40):
        with monkeypatch.context() as patch:
            Planted(patch, at, of_sums(name, 300, 62))
            check(a, *factored(a, mode))


@pytest.mark.parametrize(("name", "bit"), [("g", 62), ("y", 62), ("moduli", 62), ("biggest", 62)])
def test_a_changed_part_of_the_way_does_no_harm(name: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a = normal(600, 600)
    for at in range(3, 40, 4):
        with monkeypatch.context() as patch:
            Planted(patch, at, of_buffers(name, 1, bit))
            check(a, *factored(a))


@pytest.mark.parametrize(
    "kernel", ["sum_factors", "multiply_sums", "judge_factors", "replay_pivots", "see_all", "judge_step"]
)
def test_a_check_that_is_not_made_shows(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = kernel != "sum_factors"  # which does what the steps do where they are checked
    first, second = (cupy.asarray(normal(400, 400, seed=seed), order="F") for seed in (0, 1))
    clean = DeviceFactorisation(first, checked=checked)
    clean.wait()
    assert clean.clean
    clean.release()
    monkeypatch.setattr(plan.FactorPlan, f"_{kernel}", lambda *_: [])
    monkeypatch.setattr(plan, "_kept", PlansOfThread(plan.KEPT))
    run = DeviceFactorisation(second, checked=checked)
    run.wait()
    assert not run.clean
    run.release()


def test_wrong_pivots_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    a = normal(600, 600)

    def change(run: DeviceFactorisation) -> None:
        pivots = run._sums.on_device("piv", cupy.int32)
        pivots[100] = 500 if int(pivots[100]) != 500 else 501

    for mode in ("online", "offline"):
        with monkeypatch.context() as patch:
            Planted(patch, 30, change)
            check(a, *factored(a, mode))


def test_no_alarm_without_a_fault() -> None:
    rng = np.random.default_rng(3)
    for i in range(40):
        n, dtype = int(rng.integers(200, 900)), DTYPES[i % 2]
        a = cupy.asarray(rng.standard_normal((n, n)) * 10.0 ** rng.integers(-9, 9, (n, 1)), dtype)
        for mode in ("online", "offline"):
            report = protected_lu_factor(a, mode=mode, return_report=True)[1]
            assert report.status is Status.CLEAN


# ---- steps that are read on the way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_verdicts_that_are_read_on_the_way_change_no_bit(dtype: Any) -> None:
    a = cupy.asarray(normal(1500, 1500, dtype=dtype))
    once, found = DeviceFactorisation(a, checked=True), []
    once.wait()
    for _ in range(3):  # launches, graphs that are recorded, and these graphs again
        findings = Findings()
        run = DeviceFactorisation(a, checked=True, findings=findings)
        run.wait()
        assert run.clean
        assert not findings.statuses
        found.append((run.W.get(), run.piv.get()))
        run.release()
        del run
    for W, piv in found:
        np.testing.assert_array_equal(W, once.W.get())
        np.testing.assert_array_equal(piv, once.piv.get())
    once.release()


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(("fault", "repair"), [("trailing", "steps late"), ("finished L", "from A")])
@pytest.mark.parametrize("n", [1500, 3000])
def test_a_fault_costs_the_steps_since_then(n: int, fault: str, repair: str, dtype: Any) -> None:
    a = normal(n, n, dtype=dtype)
    _, right, _ = factored(a)
    for _ in range(3):
        with planted(fault):
            lu, piv, report = factored(a)
        check_repaired(a, lu, piv, report, repair)
        if fault == "finished L":
            np.testing.assert_array_equal(piv, right)


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_hook_sees_the_stages(mode: str) -> None:
    stages: list[str] = []
    a = normal(500, 500)

    def hook(stage: str, arrays: Any) -> None:
        stages.append(stage)
        if stage in ("updated", "factored") and stages.count(stage) == 1:
            arrays["W"][450, 300] += 3.0

    lu, piv, report = factored(a, mode, on_stage=hook)
    assert report.status is Status.CORRECTED
    assert "no graphs" in report.mode
    check(a, lu, piv, report)
    assert {"inputs", "encoded"} <= set(stages)
    assert "repaired" in stages or mode == "offline"


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize(
    ("dtype", "sizes"), [("float32", range(120, 136)), ("float64", (530, 1015, 1026))], ids=["32", "64"]
)
def test_growth_to_the_edge_of_the_range(dtype: str, sizes: Any, mode: str) -> None:
    """As tests/linalg/test_growth.py."""
    for n in sizes:
        a = wilkinson(n, np.dtype(dtype))
        with errstate(unverifiable="ignore"):
            lu, _, report = factored(a, mode)
        assert report.faults == (), (n, report)
        assert report.status is (Status.CLEAN if np.isfinite(lu).all() else Status.UNVERIFIABLE), (n, report)
