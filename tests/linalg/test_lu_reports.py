"""Protected factorisations from inside: stages, planted faults, statuses and reports."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Report, SilentDataCorruptionError, Status, errstate, monitor, protected_lu_factor
from abft_tsm2.checksum.weights import weights
from abft_tsm2.linalg import lu_options
from abft_tsm2.linalg.outcome import check_of
from tests.support.factor_cases import DTYPES, MODES, clean, described, lu_outside
from tests.support.planting import everywhere, normal, put

IDS = [dtype.name for dtype in DTYPES]


def hit(stage: str, name: str, change: Any, step: int = 0) -> Any:
    """A hook that changes a live array the first time that the stage (of this step, if it has steps) is reached."""
    done: list[str] = []

    def hook(reached: str, arrays: Any) -> None:
        at = arrays.get("step", (step,))[0]
        if reached == stage and at == step and not done:
            done.append(reached)
            change(arrays[name])

    return hook


def test_stages_come_in_order_with_the_live_arrays() -> None:
    a = normal(40, 30)
    seen: list[tuple[str, Any]] = []

    def hook(stage: str, arrays: Any) -> None:
        seen.append((stage, arrays.get("step")))
        if stage == "inputs":
            assert np.shares_memory(arrays["A"], a) or np.array_equal(arrays["A"], a)
        elif stage == "encoded":
            assert {"A", "S", "Z", "v", "w"} <= set(arrays)
        elif stage == "updated":
            assert {"W", "piv", "S", "Z", "g", "y", "perm", "w"} <= set(arrays)
            assert arrays["W"].shape == (40, 30)
            assert np.array_equal(np.sort(arrays["perm"]), np.arange(40))

    clean(a, mode="online", block=16, on_stage=hook)
    steps = [(name, at) for at in ((0, 16), (16, 30)) for name in ("panel", "swapped", "solved", "updated")]
    assert seen == [("inputs", None), ("encoded", None), *steps, ("finished", None)]

    seen.clear()
    clean(a, mode="offline", on_stage=lambda stage, arrays: seen.append((stage, sorted(arrays))))
    assert [stage for stage, _ in seen] == ["inputs", "encoded", "factored"]
    assert {"W", "piv"} <= set(seen[-1][1])


FAULTS: Mapping[str, tuple[str, Any]] = {
    "of the trailing matrix": ("updated", put((37, 35), 1e3)),
    "NaN": ("updated", put((37, 35), np.nan)),
    "of U": ("solved", put((3, 33), 1e3)),
    "of L": ("panel", put((29, 5), 7.0)),
    "finished": ("finished", put((8, 20), 1e3)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_repaired_and_reported(kind: str, dtype: Any) -> None:
    a = normal(40, 40, dtype=dtype)
    stage, change = FAULTS[kind]
    with monitor() as log:
        hook = hit(stage, "W", change)
        (lu, piv), report = protected_lu_factor(a, mode="online", block=16, on_stage=hook, return_report=True)
    assert report.status is Status.CORRECTED
    assert log.reports == [report]
    assert report.faults
    assert all(fault.repair for fault in report.faults)
    assert not lu_outside(lu, piv, a).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(a)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("value", [1e3, np.nan, np.inf])
@pytest.mark.parametrize("where", [(30, 20), (20, 30), (7, 7), slice(None)], ids=str)
def test_a_fault_is_repaired_offline_too(where: Any, value: float, dtype: Any) -> None:
    a = normal(40, 40, dtype=dtype)
    hook = hit("factored", "W", put(where, value))
    (lu, piv), report = protected_lu_factor(a, mode="offline", on_stage=hook, return_report=True)
    assert report.status is Status.CORRECTED
    assert not lu_outside(lu, piv, a).any()
    np.testing.assert_array_equal(piv, linalg.lu_factor(a)[1])


def test_on_error_and_errstate_decide() -> None:
    a = normal(40, 40)

    def call(**options: Any) -> Report:
        hook = hit("updated", "W", put((37, 35), 1e3))
        result: Report = protected_lu_factor(a, mode="online", block=16, on_stage=hook, return_report=True, **options)[
            1
        ]
        return result

    assert call().status is Status.CORRECTED
    assert call(on_error="correct").status is Status.CORRECTED
    assert call(on_error="detect").status is Status.UNCORRECTABLE
    with pytest.raises(SilentDataCorruptionError) as caught:
        call(on_error="raise")
    assert caught.value.report.operation == "lu_factor"
    with errstate(corrected="raise"), pytest.raises(SilentDataCorruptionError):
        call()


def always(stage: str, arrays: Any) -> None:
    if "W" in arrays:
        arrays["W"][30, 35] = np.nan


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_what_cannot_be_repaired_is_raised(mode: str) -> None:
    a = normal(40, 40)
    with monitor() as log, pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_factor(a, mode=mode, on_stage=always)
    assert caught.value.report.status is Status.UNCORRECTABLE
    assert log.reports == [caught.value.report]
    (_, _), report = protected_lu_factor(a, mode=mode, on_stage=always, on_error="detect", return_report=True)
    assert report.status is Status.UNCORRECTABLE


def test_what_a_hook_raises_reaches_the_caller() -> None:
    def hook(stage: str, arrays: Any) -> None:
        if stage == "updated":
            raise KeyError("mine")

    with monitor() as log, pytest.raises(KeyError, match="mine"):
        protected_lu_factor(normal(40, 40), mode="online", on_stage=hook)
    assert len(log) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_report(mode: str, dtype: Any) -> None:
    a = normal(60, 45, dtype=dtype)
    with monitor() as log:
        returned = protected_lu_factor(a, mode=mode, return_report=True)
    (lu, piv), report = returned
    assert described((lu, piv)) == (((60, 45), dtype), ((45,), np.int32))
    assert log.reports == [report]
    assert (report.operation, report.status, report.dtype) == ("lu_factor", Status.CLEAN, dtype.name)
    assert (report.m, report.n) == (60, 45)
    assert report.ok
    assert report.faults == ()
    assert report.checks
    assert all(check.verified == check.lines > 0 for check in report.checks)
    assert report.closest <= 1
    assert report.seconds
    assert all(seconds >= 0 for seconds in report.seconds.values())
    assert ("offline" in report.mode or "online" in report.mode) if mode == "auto" else mode in report.mode
    assert report.mode in str(report)
    jsonschema.Draft202012Validator(Report.schema()).validate(report.to_dict())
    assert Report.from_dict(report.to_dict()) == report


@pytest.mark.parametrize("n", [90, 300, 611, 1030])
def test_nothing_is_computed_again_where_nothing_is_wrong(n: int) -> None:
    """But by chance: bounds are statistical, and in which order a BLAS adds decides which line rounds most."""
    again = 0
    for seed in range(8):
        a = np.random.default_rng(seed).standard_normal((n, n))
        _, report = protected_lu_factor(a, mode="online", return_report=True)
        assert report.status is Status.CLEAN
        again += "correct" in report.seconds
    assert again <= 1


@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize("n", [90, 300, 611, 1030])
def test_nothing_is_computed_again_where_nothing_is_rounded(n: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers, the weights' as well, have so few digits that all sums are exact in any order."""
    everywhere(monkeypatch, weights, lambda *given, **options: np.rint(weights(*given, **options) * 16) / 16)
    rng = np.random.default_rng(n)
    L = np.tril(rng.integers(-1, 2, (n, n)) * 0.5, -1)
    U = np.triu(rng.integers(-1, 2, (n, n)), 1) + 4 * np.eye(n)
    (lu, piv), report = protected_lu_factor((L + np.eye(n)) @ U, mode=mode, return_report=True)
    assert np.array_equal(lu, L + U)
    assert np.array_equal(piv, np.arange(n))
    assert (report.status, report.suspicions) == (Status.CLEAN, 0)
    assert [check.closest for check in report.checks] == [0.0, 0.0]
    assert "correct" not in report.seconds


@pytest.mark.parametrize(
    ("columns", "on_gpu", "mode"),
    [(40, False, "offline"), (41, False, "online"), (41, True, "offline"), (50, True, "offline"), (51, True, "online")],
)
def test_auto_saves_large_factorisations_from_being_done_twice(
    columns: int, on_gpu: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lu_options, "OFFLINE_UP_TO", 40)
    monkeypatch.setattr(lu_options, "OFFLINE_ON_GPU", 50)
    monkeypatch.setattr(lu_options, "is_cupy", lambda A: on_gpu)
    options = lu_options.LuOptions(on_stage=None, on_error=None, mode="auto", check_finite=True)
    chosen, why = options.chosen(normal(60, columns))
    assert chosen == mode
    assert f"{columns} columns" in why
    if not on_gpu:
        monkeypatch.undo()
        monkeypatch.setattr(lu_options, "OFFLINE_UP_TO", 40)
        report = protected_lu_factor(normal(60, columns), return_report=True)[1]
        assert report.mode == f"{mode}: {why}"


def test_a_batch_is_one_report() -> None:
    with monitor() as log:
        protected_lu_factor(normal(4, 20, 20))
    assert [len(report.products) for report in log] == [4]


def test_strict_settings_of_the_caller_do_not_reach_inside() -> None:
    tiny = normal(70, 70) * 2.0**-1000
    low = normal(70, 5) @ normal(5, 70)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        for a in (tiny, low):
            for mode in MODES:
                lu, piv = clean(a, mode=mode)
                with np.errstate(all="ignore"):
                    assert not lu_outside(lu, piv, a).any()


def test_threads_do_not_meet() -> None:
    matrices = [normal(60 + i, 60, seed=i) for i in range(8)]

    def work(a: np.ndarray) -> bool:
        lu, piv = clean(a, mode="online", block=16)
        return not lu_outside(lu, piv, a).any()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, matrices))


def test_lines_without_a_bound_are_not_counted_as_verified() -> None:
    """What subnormal numbers leave of norms may be no number."""
    residual, bound = np.array([0.0, 0.0, 1.0, 0.5]), np.array([0.0, np.nan, 0.0, 1.0])
    check = check_of("rows", residual, bound, np.ones(4))
    assert (check.lines, check.verified) == (4, 2)
    assert (check.closest, check.closest_line) == (0.5, 3)
