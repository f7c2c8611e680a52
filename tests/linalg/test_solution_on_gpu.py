"""Linear systems solved and checked by the kernels of `abft_tsm2.linalg.device.solution` on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor, protected_lu_solve, protected_solve
from abft_tsm2.errors import UnverifiableWarning
from abft_tsm2.linalg import substitution
from abft_tsm2.linalg.device.solution import DeviceSolution, solve_on_device
from abft_tsm2.linalg.device.substitution_calls import SolveMethod, TriangularSolve
from abft_tsm2.linalg.triangular import Triangle, Weighed, check_solution, check_substitution, summing_weights
from tests.support.factor_cases import DTYPES
from tests.support.planting import normal

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")

IDS = [dtype.name for dtype in DTYPES]
SIZES = [(1, 1), (2, 3), (5, 1), (127, 2), (128, 64), (129, 70), (513, 1), (1000, 33), (2049, 7), (4096, 64)]
METHODS = [SolveMethod(), SolveMethod("trsv"), SolveMethod(block=256), SolveMethod("trsv", 512)]


def backward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray) -> float:
    """The largest normwise one of the columns, in units of roundoff."""
    wide, right, unknown = (y.astype(np.float64) for y in (a, b, x))
    residual = np.linalg.norm(right - wide @ unknown, axis=0)
    size = np.linalg.norm(wide) * np.linalg.norm(unknown, axis=0) + np.linalg.norm(right, axis=0)
    return float(np.max(residual / size)) / float(np.finfo(a.dtype).eps)


class OnCard:
    """A system and its factors, by SciPy, there and here."""

    def __init__(self, n: int, count: int, dtype: Any, order: str = "F") -> None:
        self.a, self.b = normal(n, n, dtype=dtype), normal(n, count, dtype=dtype, seed=1)
        self.lu, self.piv = linalg.lu_factor(self.a)
        self.operands = [cupy.asarray(x, order=order) for x in (self.lu, self.piv.astype(np.int32), self.b)]
        self.A = cupy.asarray(self.a, order=order)

    def found(self, trans: int = 0, *, certified: bool = False, **options: Any) -> DeviceSolution:
        return solve_on_device(*self.operands, trans, self.A if certified else None, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize(("n", "count"), SIZES)
def test_solutions_are_right_and_clean(n: int, count: int, trans: int, order: str, dtype: Any) -> None:
    of = OnCard(n, count, dtype, order)
    for certified in (False, True)[: 2 - trans]:
        found = of.found(trans, certified=certified)
        assert found.clean
        assert backward_error(of.a.T if trans else of.a, found.X.get(), of.b) < 50
        assert (np.abs(found.residual) <= found.bound).all()
        np.testing.assert_array_equal(found.t, summing_weights(of.b))


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("count", [1, 5])
def test_ways_to_solve(count: int, method: SolveMethod, dtype: Any) -> None:
    for order in "FC":
        of = OnCard(1500, count, dtype, order)
        for trans in (0, 1):
            found = of.found(trans, method=method)
            assert found.clean
            assert backward_error(of.a.T if trans else of.a, found.X.get(), of.b) < 50


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(("n", "count"), [(700, 1), (2049, 33)])
def test_bounds_are_those_of_the_careful_path(n: int, count: int, dtype: Any) -> None:
    of = OnCard(n, count, dtype)
    lu, _, B = of.operands
    t = summing_weights(B)
    lower, upper = Triangle(lu, True, True), Triangle(lu, False, False)
    order = cupy.asarray(substitution.permutation(of.piv, n))
    Z = cupy.asfortranarray(B[order])
    substitution.solve_triangle(lu, Z, lower=True, unit=True)
    for certified in (False, True):
        found = of.found(certified=certified)
        if certified:
            wanted = check_solution(of.A, (lower, upper), order, Weighed.of(found.X, t), Weighed.of(B, t))
        else:
            wanted = check_substitution(upper, Weighed.of(found.X, t), Weighed.of(Z, t))
        np.testing.assert_allclose(found.bound, wanted.bound.get(), rtol=1e-6)
        assert wanted.clean


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_operands_of_any_strides(dtype: Any) -> None:
    of = OnCard(300, 3, dtype)
    whole, sides = cupy.zeros((700, 690), dtype), cupy.zeros((690, 9), dtype)
    for lu in (whole[:600:2, 3:303], whole[:300, 3:303], whole.T[:300, 3:303], whole[299::-1, :300]):
        lu[...] = of.operands[0]
        for b in (sides[:600:2, ::3], sides[300:0:-1, 5:8], sides[1:301, 5:8]):
            b[...] = of.operands[2]
            x, report = protected_lu_solve((lu, of.operands[1]), b, return_report=True)
            assert report.status is Status.CLEAN
            assert backward_error(of.a, x.get(), of.b) < 50


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("refine", [False, True])
@pytest.mark.parametrize(("n", "count"), [(1, 1), (257, 1), (1000, 64)])
def test_solve_from_the_matrix(n: int, count: int, refine: bool, dtype: Any) -> None:
    a, b = normal(n, n, dtype=dtype), normal(n, count, dtype=dtype, seed=1)
    for given in (b, b[:, 0]):
        x, report = protected_solve(cupy.asarray(a), cupy.asarray(given), refine=refine, return_report=True)
        assert report.status is Status.CLEAN
        assert not report.suspicions
        assert x.shape == given.shape
        assert backward_error(a, x.get().reshape(n, -1), given.reshape(n, -1)) < 50


def test_factors_and_solutions_fit_each_other() -> None:
    a, b = normal(800, 800), normal(800, 5, seed=1)
    factors = protected_lu_factor(cupy.asarray(a))
    for trans in (0, 1, 2):
        x, report = protected_lu_solve(factors, cupy.asarray(b), trans, return_report=True)
        assert report.status is Status.CLEAN
        assert backward_error(a.T if trans else a, x.get(), b) < 50


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Callable[[int], None]], None]]:
    """Lets a function see the address of X after the substitution of that number, once."""
    solve, left = TriangularSolve.__call__, []

    def call(self: TriangularSolve, handle: int, T: int, X: int) -> None:
        solve(self, handle, T, X)
        if left:
            left[0][0] -= 1
            if left[0][0] < 0:
                left.pop()[1](X)

    monkeypatch.setattr(TriangularSolve, "__call__", call)
    yield lambda number, damage: left.append([number, damage])
    assert not left


def element(value: float, index: int, dtype: Any) -> Callable[[int], None]:
    def damage(address: int) -> None:
        memory = cupy.cuda.UnownedMemory(address, (index + 1) * np.dtype(dtype).itemsize, None)
        cupy.ndarray(index + 1, dtype, cupy.cuda.MemoryPointer(memory, 0))[index] = value

    return damage


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("value", [1e3, np.nan, np.inf])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("trans", [0, 1])
def test_a_fault_in_a_substitution_is_repaired(planted: Any, trans: int, number: int, value: float, dtype: Any) -> None:
    of = OnCard(700, 4, dtype)
    planted(number, element(value, 2 * 700 + 444, dtype))
    x, report = protected_lu_solve(tuple(of.operands[:2]), of.operands[2], trans, return_report=True)
    assert report.status is Status.CORRECTED
    assert backward_error(of.a.T if trans else of.a, x.get(), of.b) < 50
    if trans:  # the careful path turns lu first: all elements differ by rounding
        assert 2 in report.faults[0].columns
    else:
        assert report.faults[0].columns == (2,)


@pytest.mark.parametrize("number", [0, 1])
def test_a_fault_in_a_solution_from_the_matrix(planted: Any, number: int) -> None:
    a, b = normal(700, 700), normal(700, 4, seed=1)
    planted(number, element(1e3, 444, np.float64))
    x, report = protected_solve(cupy.asarray(a), cupy.asarray(b), return_report=True)
    assert report.status is Status.CORRECTED
    assert backward_error(a, x.get(), b) < 50


def test_operands_that_changed_are_not_certified() -> None:
    of = OnCard(700, 4, np.float64)
    of.A[33, 600] += 1e-6
    assert of.found().clean
    assert not of.found(certified=True).clean


# ---- what is not fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [0, 2])
def test_what_is_not_finite_is_refused(what: int) -> None:
    of = OnCard(300, 4, np.float64)
    of.operands[what][7, 3] = np.nan
    with pytest.raises(ValueError, match="must not contain infs or NaNs"):
        protected_lu_solve(tuple(of.operands[:2]), of.operands[2])
    with pytest.warns(UnverifiableWarning):
        protected_lu_solve(tuple(of.operands[:2]), of.operands[2], check_finite=False)


def test_pivots_that_are_no_rows_are_refused() -> None:
    of = OnCard(300, 4, np.float64)
    of.operands[1][7] = 300
    with pytest.raises(ValueError, match="piv holds 300"):
        protected_lu_solve(tuple(of.operands[:2]), of.operands[2])


def test_a_singular_matrix() -> None:
    of = OnCard(300, 4, np.float64)
    of.operands[0][200, 200] = 0
    with pytest.warns(UnverifiableWarning, match="singular"):
        protected_lu_solve(tuple(of.operands[:2]), of.operands[2])
    with pytest.raises(np.linalg.LinAlgError):
        protected_solve(cupy.zeros((5, 5)), cupy.ones(5))


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_far_ends_of_the_range_are_left_to_the_careful_path(scale: float) -> None:
    of = OnCard(300, 4, np.float64)
    of.operands[2] *= scale
    x, report = protected_lu_solve(tuple(of.operands[:2]), of.operands[2], return_report=True)
    assert report.status is Status.CLEAN
    assert backward_error(of.a, x.get() / scale, of.b) < 50


# ---- streams and threads ---------------------------------------------------------------------------------------------


def test_on_a_stream_of_the_caller() -> None:
    of, stream = OnCard(2000, 8, np.float64), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    for _ in range(3):
        with stream:
            of.operands[2] *= 2  # what is queued before is waited for
            x, report = protected_lu_solve(tuple(of.operands[:2]), of.operands[2], return_report=True)
            assert report.status is Status.CLEAN
            assert backward_error(of.a, x.get(), of.operands[2].get()) < 50


def test_threads_side_by_side() -> None:
    systems = [OnCard(400 + 100 * i, 1 + i, np.float64) for i in range(4)]
    wrong: list[int] = []

    def solve(i: int) -> None:
        of = systems[i]
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(20):
                x, report = protected_lu_solve(tuple(of.operands[:2]), of.operands[2], return_report=True)
                if report.status is not Status.CLEAN or backward_error(of.a, x.get(), of.b) > 50:
                    wrong.append(i)

    cupy.cuda.Device().synchronize()
    threads = [threading.Thread(target=solve, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_same_bits_every_time() -> None:
    of = OnCard(1500, 9, np.float64)
    first, second = of.found(certified=True), of.found(certified=True)
    assert first.X.get().tobytes() == second.X.get().tobytes()
    assert first.residual.tobytes() == second.residual.tobytes()
