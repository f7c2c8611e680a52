"""Products of Dask arrays with the axes of a batch, which broadcast as NumPy's do."""

import itertools

import dask
import dask.array as da
import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.interop.dask import gemm
from abft_tsm2.report import Status
from benchmarks.dask_planting import SINGLE, damaged

ERROR = {"float64": 1e-14, "float32": 4e-6, "float16": 4e-2}
CASES = [  # shapes of a and b, and their chunks
    ((2, 3, 4), (4, 5), (1, 2, 2), (2, 3)),
    ((4, 5), (2, 5, 3), (3, 2), (1, 2, 3)),
    ((7, 4, 4), (7, 4, 5), (2, 3, 2), (3, 2, 2)),  # chunks of the batch that do not meet
    ((6, 1, 4, 5), (3, 5, 2), (2, 1, 2, 2), (2, 3, 1)),
    ((1, 5, 3, 4), (6, 1, 4, 2), (1, 2, 2, 3), (4, 1, 2, 2)),
    ((2, 3, 4, 9), (2, 3, 9, 6), (1, 2, 3, 1), (2, 2, 1, 4)),  # chains of several tasks
    ((4,), (3, 4, 5), (2,), (2, 2, 3)),
    ((3, 5, 4), (4,), (2, 2, 3), (2,)),
    ((2, 0, 3), (2, 3, 4), -1, -1),
    ((0, 2, 3), (3, 4), -1, -1),
    ((2, 2, 0), (2, 0, 4), -1, -1),
]


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def operands(case, dtype="float64"):
    a, b, *chunks = case
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(a).astype(dtype), rng.standard_normal(b).astype(dtype)
    return x, y, *(da.from_array(z, chunks=sizes) for z, sizes in zip((x, y), chunks, strict=True))


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("case", CASES)
def test_as_in_matmul(case, dtype):
    x, y, a, b = operands(case, dtype)
    expected = x.astype(float) @ y.astype(float)
    c = np.random.default_rng(1).standard_normal(expected.shape).astype(dtype)
    for one, other in ((a, b), (a, y), (x, b)):
        lazy, report = ft.protected_gemm(one, other, return_report=True)
        C, report = dask.compute(lazy, report)
        assert (lazy.shape, lazy.dtype, C.shape, C.dtype) == (expected.shape, dtype) * 2
        np.testing.assert_allclose(C, expected, rtol=0, atol=8 * ERROR[dtype])
        assert report.status is Status.CLEAN
    C = ft.protected_gemm(a, b, c, alpha=2.0, beta=-0.5).compute()
    np.testing.assert_allclose(C, 2 * expected - 0.5 * c.astype(float), rtol=0, atol=16 * ERROR[dtype])


@pytest.mark.parametrize("case", CASES[:6])
def test_faults_in_products_are_repaired(case):
    x, y, a, b = operands(case)

    def spoil(stage, arrays):
        if stage == "multiplied":
            arrays["C"][0, 0] += 1

    C, report = dask.compute(*ft.protected_gemm(a, b, on_stage=spoil, return_report=True))
    np.testing.assert_allclose(C, x @ y, rtol=0, atol=1e-13)
    assert {one.status for one in report.products} == {Status.CORRECTED}


@pytest.mark.parametrize("operand", ["A", "B", "C0"])
def test_a_block_that_changed_between_two_tasks(monkeypatch, operand):
    x, y, a, b = operands(CASES[5])
    made, done = gemm.chain, []

    def chain(options, step, pairs, c0, settings):
        if step == (1, 0, 1, 1, 8):
            block = {"A": pairs[0][0], "B": pairs[0][1], "C0": c0}[operand]
            block.array = damaged(block.array, SINGLE)
            done.append(step)
        return made(options, step, pairs, c0, settings)

    monkeypatch.setattr(gemm, "chain", chain)
    C, report = dask.compute(*ft.protected_gemm(a, b, return_report=True))
    assert done
    np.testing.assert_allclose(C, x @ y, rtol=0, atol=1e-13)
    (fault,) = [fault for one in report.products for fault in one.faults]
    assert fault.operand == {"A": "A(1, 0, 1, 8)", "B": "B(1, 0, 8, 1)", "C0": "C0"}[operand]


def test_what_does_not_broadcast_is_refused():
    a, b = da.ones((2, 3, 4)), da.ones((3, 4, 5))
    with pytest.raises(ValueError, match="their batch axes do not broadcast"):
        ft.protected_gemm(a, b)
    for one, other in itertools.permutations((da.ones(()), b)):
        with pytest.raises(ValueError, match="vectors, matrices, or batches"):
            ft.protected_gemm(one, other)
