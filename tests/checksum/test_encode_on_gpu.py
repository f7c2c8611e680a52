"""What `encode` makes of CuPy matrices: one set of weights, that of the kernels, for the host and for the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2 import encode, protected_gemm
from abft_tsm2.checksum.device.check import carried_on_device
from abft_tsm2.checksum.device.layout import elements

pytestmark = pytest.mark.gpu
DTYPES = ("float64", "float32", "float16", "bfloat16")


def matrix(cp: Any, shape: tuple[int, int], dtype: str, order: str, seed: int = 0) -> Any:
    kind: Any = __import__("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    x = np.random.default_rng([seed, *shape]).standard_normal(shape)
    x[:, 1::3] *= 64
    x[2::5] /= 64
    A = cp.asarray(x.astype(np.float32 if dtype == "bfloat16" else kind))
    A = A.astype(kind) if dtype == "bfloat16" else A
    if order == "strided":
        wide = cp.empty((2 * shape[0], shape[1] + 3), A.dtype)
        wide[::2, : shape[1]] = A
        return wide[::2, : shape[1]]
    return cp.asarray(A, order=order)


def host(x: Any) -> Any:
    return np.asarray(x.astype("float64").get(), np.longdouble)


def near(found: Any, left: Any, right: Any) -> bool:
    """Whether `found` is left @ right up to the rounding of float64 sums."""
    found, bound = np.asarray(found.get(), np.longdouble), abs(left) @ abs(right)
    return bool((abs(found - left @ right) <= 2 * (left.shape[1] + 1) * 2.0**-53 * bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("shape", [(300, 200), (1, 70), (70, 1), (7, 1000), (1000, 33)])
@pytest.mark.parametrize("side", ["both", "rows", "columns"])
def test_host_and_kernels_have_the_same_checksums(
    cp: Any, dtype: str, order: str, shape: tuple[int, int], side: str
) -> None:
    A = matrix(cp, shape, dtype, order)
    E, a = encode(A, side=side), host(A)
    assert E.device is not None
    wanted = ("rows", "columns") if side == "both" else (side,)
    for one in ("rows", "columns"):
        pointers, carried = getattr(E.device.sides, one), E.right if one == "rows" else E.left
        if one not in wanted:
            assert pointers is carried is None
            continue
        R = a if one == "rows" else a.T
        k, n = R.shape
        alone = carried_on_device(A, one)
        acc = alone.weights.dtype
        assert bool((carried.weights[:, 0] == alone.weights).all())
        assert bool((elements(pointers.v, n, acc) == alone.weights).all())
        assert bool((elements(pointers.words, k, "uint64") == elements(alone.right.words, k, "uint64")).all())
        assert bool((elements(pointers.s, k, acc) == carried.sums[:, 0].astype(acc)).all())
        v = host(carried.weights)
        assert near(carried.sums, R, v)
        assert carried.intact()
        for mine, others in ((pointers.squares, alone.right.squares), (pointers.sizes, alone.right.sizes)):
            count, kind = (k, acc) if mine == pointers.squares else (2, "float64")
            cp.testing.assert_allclose(elements(mine, count, kind), elements(others, count, kind), rtol=1e-5)
    np.testing.assert_allclose(E.norms.rows.get(), np.sqrt((a * a).sum(axis=1)).astype(float), rtol=1e-4)
    np.testing.assert_allclose(E.norms.columns.get(), np.sqrt((a * a).sum(axis=0)).astype(float), rtol=1e-4)
    assert not E.changed()
    A[shape[0] // 2, shape[1] // 2] += 1
    assert E.changed()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_row_that_the_sample_missed_has_weights_from_exact_norms(cp: Any, dtype: str) -> None:
    exact = []
    for row in (1003, 1444, 1777, 2222):  # the sample has 128 of 3000
        A = matrix(cp, (3000, 64), dtype, "C")
        A[:, :] /= 1e6
        A[row, ::2] = 1e6
        E, alone = encode(A), carried_on_device(A, "rows")
        assert bool((E.right.weights[:, 0] == alone.weights).all())
        assert near(E.right.sums, host(A), host(E.right.weights))
        assert protected_gemm(cp.ones((5, 3000), dtype), E, return_report=True)[1].status.name == "CLEAN"
        exact.append(alone.exact)
    assert any(exact)


def test_norms_at_the_ends_of_the_range(cp: Any) -> None:
    a = np.ones((40, 30))
    a[3], a[5], a[7, 2], a[8] = 1e300, 1e-300, np.nan, 0.0
    E = encode(cp.asarray(a))
    finite = np.where(np.isfinite(a), a, 0).astype(np.longdouble)
    np.testing.assert_allclose(E.norms.rows.get(), np.sqrt((finite * finite).sum(axis=1)).astype(float), rtol=1e-10)
    np.testing.assert_allclose(E.norms.columns.get(), np.sqrt((finite * finite).sum(axis=0)).astype(float), rtol=1e-10)
