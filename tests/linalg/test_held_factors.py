"""Factors, pivots and right-hand sides between their check and their use: a bound made of what has changed hides it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Report, SilentDataCorruptionError, Status, protected_lu_solve, protected_solve
from tests.support.factor_cases import backward_error
from tests.support.planting import normal

FLIPPED = {np.float32: (30, 28, 26), np.float64: (62, 60, 58)}
Hook = Any


def flip(x: np.ndarray, i: int, j: int, bit: int) -> None:
    words = x.view(f"u{x.itemsize}")
    words[i, j] ^= words.dtype.type(1 << bit)


def is_solution(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> bool:
    return backward_error(a, x, b) <= 20 * len(a) * np.finfo(a.dtype).eps


def once(stage: str, change: Any, name: str = "", of_factors: str = "W") -> Hook:
    """A hook that changes an array of the factorisation, or of this stage where it has a name, the first time that the
    stage is reached with b, as only a solution's are."""
    kept: dict[str, Any] = {}

    def hook(at: str, arrays: Any) -> None:
        if at == "factored":
            kept.update(arrays)
        if at == stage and "done" not in kept and (at != "inputs" or "b" in arrays):
            kept["done"] = True
            change((arrays if name else kept)[name or of_factors])

    return hook


def solved(a: np.ndarray, b: np.ndarray, **options: Any) -> tuple[Any, Report]:
    try:
        x, report = protected_solve(a, b, return_report=True, **options)
        return x, report
    except SilentDataCorruptionError as error:
        return None, error.report


@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize("stage", ["inputs", "forward", "backward"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factors_that_change_behind_their_certificate_are_made_again(dtype: Any, stage: str, refine: bool) -> None:
    rng, changed = np.random.default_rng(0), 0
    for n in (3, 4, 12, 50):
        for trial in range(4):
            a, b = normal(n, n, dtype=dtype, seed=trial), normal(n, 1, dtype=dtype, seed=trial + 100)[:, 0]
            i, j = (int(x) for x in rng.integers(0, n, 2))
            bit = FLIPPED[dtype][(trial + n) % 3]
            hook = once(stage, lambda w, i=i, j=j, bit=bit: flip(w, i, j, bit))
            x, report = solved(a, b, on_stage=hook, refine=refine, mode="offline")
            assert is_solution(a, x, b), (n, trial)
            assert report.status is Status.CORRECTED
            changed += 1
    assert changed == 16


def test_factors_that_change_are_refused_where_nothing_is_to_be_repaired() -> None:
    a, b = normal(12, 12), normal(12, 1)
    hook = once("inputs", lambda w: flip(w, 7, 4, 62))
    _, report = solved(a, b, on_stage=hook, on_error="detect", mode="offline")
    assert report.status is Status.UNCORRECTABLE


@pytest.mark.parametrize("value", [lambda p: p ^ 1, lambda p: p | 1 << 20, lambda p: -p - 1])
def test_pivots_that_change_are_found(value: Any) -> None:
    a, b = normal(200, 200), normal(200, 1)
    lu, piv = linalg.lu_factor(a)

    def change(piv: np.ndarray) -> None:
        piv[100] = value(piv[100])

    with pytest.raises(SilentDataCorruptionError) as caught:
        protected_lu_solve((lu, piv), b, on_stage=once("encoded", change, "piv"))
    assert caught.value.report.status is Status.INPUT_CHANGED
    assert {fault.operand for fault in caught.value.report.faults} == {"piv"}

    x, report = solved(a, b, on_stage=once("inputs", change, of_factors="piv"), mode="offline")
    assert is_solution(a, x, b)
    assert report.status is Status.CORRECTED


def graded(n: int, decades: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """A system whose solutions are an inverse with columns of very different size."""
    a = np.logspace(0, -decades, n)[:, None] * normal(n, n)
    return a.astype(dtype), np.eye(n, dtype=dtype, order="F")


@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_small_solution_beside_large_ones_is_guarded(dtype: Any) -> None:
    n = 100
    a, b = graded(n, 10 if dtype is np.float64 else 4, dtype)
    lu = linalg.lu_factor(a)
    calls = [lambda hook: protected_lu_solve(lu, b, on_stage=hook, return_report=True)]
    calls += [lambda hook: protected_solve(a, b, on_stage=hook, return_report=True)]
    for call in calls:
        x, report = call(None)
        assert (report.status, report.suspicions) == (Status.CLEAN, 0)
        for i in range(0, n, 19):
            size = float(abs(x[:, 0]).max())

            def change(x: np.ndarray, i: int = i, size: float = size) -> None:
                x[i, 0] += dtype(2e5 * np.finfo(dtype).eps * size)

            y, report = call(once("backward", change, "x"))
            assert report.status is Status.CORRECTED
            assert np.array_equal(x, y)


@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")
@pytest.mark.parametrize(
    ("a", "x", "at", "value"),
    [
        (np.diag([1e-150, 1.0]), [[1e160, 0.0], [1.0, 1.0]], (1, 0), -1.0),
        *(
            (np.array([[1e-20, 1, 0], [0, 1, 0], [0, 0, 1]]), [[1, 1], [1, 0], [1, 1]], (0, 1), big)
            for big in (1e150, 1e300)
        ),
        (np.array([[1, 1], [0, 1e-17]]), [[-1e17, 2.0], [1e17, 0.0]], (0, 1), 0.0),
        (np.eye(3) + 3, [[1e-250, 1e250]] * 3, (1, 0), 1.5e-250),
        *((np.diag([1e-170, 1e170]), [[1e170], [1e-170]], (i, 0), 1.5 * x) for i, x in ((0, 1e170), (1, 1e-170))),
        (np.array([[1e-170, 1e-170], [0, 1e170]]), [[1e170], [1e-170]], (0, 0), -1e170),
    ],
    ids=["diagonal", "1e150", "1e300", "emptied", "far right-hand sides", "far rows, 0", "far rows, 1", "triangle"],
)
def test_a_fault_among_solutions_beyond_the_range_is_found(a: np.ndarray, x: Any, at: Any, value: float) -> None:
    b, done = a @ np.array(x, float), list[int]()

    def hook(stage: str, arrays: Any) -> None:
        if stage == "backward" and not done:
            done.append(1)
            arrays["x"][at] = value

    for call in (protected_solve, lambda a, b, **how: protected_lu_solve(linalg.lu_factor(a), b, **how)):
        done.clear()
        found, report = call(a, b, on_stage=hook, return_report=True)
        assert report.status is Status.CORRECTED
        np.testing.assert_allclose(found, linalg.solve(a, b), rtol=1e-12)
        done.append(1)
        assert call(a, b, on_stage=hook, return_report=True)[1].status is Status.CLEAN
