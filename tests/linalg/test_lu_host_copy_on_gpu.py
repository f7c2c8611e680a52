"""LU factored in the memory of the matrix, on a GPU, with a copy on the host for repairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.linalg.device.buffers import ALIGNED, leading_dimension
from abft_tsm2.policy import errstate
from benchmarks.lu_gpu_contenders import planted
from tests.linalg.test_lu_on_gpu import IDS, check, check_repaired
from tests.support.factor_cases import DTYPES
from tests.support.planting import normal

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy")


def placed(A: np.ndarray, further: int = 0) -> Any:
    """A on the card, in columns of whole loads, and of so many more between them."""
    m, n = A.shape
    ld = leading_dimension(m, A.itemsize) + further * ALIGNED // A.itemsize
    a = cupy.empty((ld, n), A.dtype, order="F")[:m]
    a[...] = cupy.asarray(A)
    return a


def in_place(a: Any, mode: str = "online", **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    options = {"overwrite_a": True, "preserve": "host", "return_report": True, **options}
    (lu, piv), report = protected_lu_factor(a, mode=mode, **options)
    assert lu is a
    return lu.get(), piv.get(), report


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("mode", ["online", "offline"])
@pytest.mark.parametrize(("m", "n", "further"), [(1000, 1000, 0), (1001, 900, 5), (700, 1100, 1)])
def test_factors_take_the_place_of_a(m: int, n: int, further: int, mode: str, dtype: Any) -> None:
    A = normal(m, n, dtype=dtype)
    a, found = placed(A, further), set()
    for _ in range(4):  # the first by launches, then as graphs
        a[...] = cupy.asarray(A)
        lu, piv, report = in_place(a, mode)
        assert report.status is Status.CLEAN
        assert not report.suspicions
        check(A, lu, piv, report)
        np.testing.assert_array_equal(piv, linalg.lapack.get_lapack_funcs("getrf", (A,))(A)[1])
        found.add(lu.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(("fault", "repair"), [("trailing", "steps late"), ("finished L", "from A")])
@pytest.mark.parametrize("further", [0, 3])
def test_a_fault_is_repaired_from_the_host(further: int, fault: str, repair: str, dtype: Any) -> None:
    A = normal(1500, 1500, dtype=dtype)
    a = placed(A, further)
    for _ in range(3):
        a[...] = cupy.asarray(A)
        with planted(fault):
            lu, piv, report = in_place(a)
        check_repaired(A, lu, piv, report, repair)


def changing(stage: str, column: int | None, times: int) -> Any:
    """A hook that changes an element of W where a stage comes, so many times."""
    left = [None] * times

    def hook(name: str, arrays: Any) -> None:
        if (name, arrays["step"][0] if "step" in arrays else None) == (stage, column) and left:
            left.pop()
            arrays["W"][900, 60] += 3.0

    return hook


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize(
    ("mode", "stage", "column", "times"),
    [("online", "panel", 0, 1), ("offline", "factored", None, 1), ("offline", "factored", None, 2)],
    ids=["from the first step", "once more", "by steps"],
)
def test_it_is_factored_again_into_the_same_memory(
    mode: str, stage: str, column: int | None, times: int, dtype: Any
) -> None:
    A = normal(1000, 1000, dtype=dtype)
    lu, piv, report = in_place(placed(A, 1), mode, on_stage=changing(stage, column, times))
    assert report.status is Status.CORRECTED
    check(A, lu, piv, report)


def test_verdicts_that_are_awaited_keep_their_copies() -> None:
    matrices = [normal(1000, 1000, seed=i) for i in range(3)]
    placed_ones = [placed(A) for A in matrices]
    how: dict[str, Any] = {"overwrite_a": True, "preserve": "host", "return_report": True}
    with errstate(sync=False):
        queued = [protected_lu_factor(a, **how) for a in placed_ones]
    for ((lu, piv), report), a, A in zip(queued, placed_ones, matrices, strict=True):
        assert report.wait().status is Status.CLEAN
        assert lu is a
        check(A, lu.get(), piv.get(), report.wait())


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_the_device_has_one_matrix(mode: str) -> None:
    """And what the checks need. A pool keeps what it has once taken."""
    n, beside = 8192, {}
    how: dict[str, Any] = {"overwrite_a": True, "return_report": True, "mode": mode}
    for preserve in ("device", "host"):
        a, pool = cupy.random.default_rng(1).standard_normal((n, n)).T, cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            _, report = protected_lu_factor(a, preserve=preserve, **how)
        assert report.status is Status.CLEAN
        beside[preserve] = pool.total_bytes() / a.nbytes
    assert beside["device"] >= 1.0
    assert beside["host"] < 0.5


def test_what_does_not_lie_as_factors_do_is_refused() -> None:
    for a in (cupy.asarray(normal(64, 64)), cupy.asarray(normal(65, 64), order="F"), placed(normal(65, 64))[1:]):
        before = a.copy()
        with pytest.raises(ValueError, match=r"strides of a are .* make it as cupy.empty"):
            in_place(a)
        assert bool((a == before).all())
