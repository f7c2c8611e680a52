"""`encode_both` on a GPU: every load path, and what only a GPU can show. ``pytest -m gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2.core import encode_both as module
from abft_tsm2.core.encode_both import EncodeTask, Encoding, encode_both, run, workspace_bytes
from abft_tsm2.core.encode_config import BothConfig
from abft_tsm2.core.generated import KINDS, Generated
from tests.support.both_cases import CONFIGS, Case, cases, exactly, faults
from tests.support.cases import DTYPES, ORDERS, arrange

pytestmark = pytest.mark.gpu


def on_card(cp: Any, x: Any) -> Any:
    """A copy of the same strides and alignment; what is no array stays."""
    if not isinstance(x, np.ndarray):
        return x
    low = sum((n - 1) * min(0, step) for n, step in zip(x.shape, x.strides, strict=True))
    high = sum((n - 1) * max(0, step) for n, step in zip(x.shape, x.strides, strict=True)) + x.itemsize
    memory = cp.zeros(high - low + 16, np.uint8)
    out = cp.ndarray(x.shape, x.dtype, memory.data + (x.ctypes.data + low) % 16 - low, x.strides)
    out[...] = cp.asarray(np.ascontiguousarray(x))
    return out


def on_host(cp: Any, encoding: Encoding) -> Encoding:
    return Encoding(*(x if x is None else cp.asnumpy(x) for x in encoding))


def moved(cp: Any, task: EncodeTask) -> EncodeTask:
    A, V, W, p, q = (on_card(cp, x) for x in (task.A, task.V, task.W, task.p, task.q))
    return EncodeTask(A, V, W, p, q, task.squares, task.words, task.sums)


def encoded(cp: Any, case: Case, task: EncodeTask) -> Encoding:
    workspace = cp.full(max(1, workspace_bytes(case.config, case.plan)), 255, np.uint8)
    return on_host(cp, run(case.config, case.plan, moved(cp, task), workspace, module._launched))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
def test_every_load_path(cp: Any, config: BothConfig) -> None:
    for case in cases(config):
        task = case.task()
        assert not faults(encoded(cp, case, task), task), str(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ORDERS)
def test_every_layout_and_type(cp: Any, layout: str, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(1)
    A = arrange(rng.standard_normal((301, 1500)).astype(dtype), layout)
    for sums in ["float64"] if dtype.itemsize == 8 else ["float32", "float64"]:
        V, W = rng.standard_normal((1500, 3)).astype(sums), Generated("balanced", 2, 3)
        found = encode_both(on_card(cp, A), cp.asarray(V), W, squares=True, words=True, dtype=sums)
        assert not faults(on_host(cp, found), EncodeTask(A, V, W, None, None, True, True, sums))


@pytest.mark.parametrize("r", [5, 9])
def test_more_columns_than_the_kernel_takes(cp: Any, r: int) -> None:
    rng = np.random.default_rng(1)
    A, V, W = (rng.standard_normal(shape) for shape in ((300, 200), (200, r), (300, 1)))
    found = encode_both(*(cp.asarray(x) for x in (A, V, W)), squares=True, words=True)
    assert not faults(on_host(cp, found), EncodeTask(A, V, W, None, None, True, True, "float64"))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (1, 1), (1, 70_000), (70_000, 1), (3, 3)])
def test_small_and_empty(cp: Any, shape: tuple[int, int]) -> None:
    m, k = shape
    A, V, W = np.random.default_rng(0).random(shape, np.float32), Generated("ramp", 2), Generated("balanced")
    found = on_host(cp, encode_both(cp.asarray(A), V, W, squares=True, words=True))
    assert not faults(found, EncodeTask(A, V, W, None, None, True, True, "float32"))
    assert found.rows.shape == (m, 2)
    assert found.columns.shape == (1, k)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_generated_weights_are_those_of_the_host_in_every_bit(cp: Any, kind: str, dtype: str) -> None:
    V, W = Generated(kind, 4, 2**64 - 3), Generated(kind, 4, 11)
    found = on_host(cp, encode_both(cp.eye(2000, dtype=dtype), V, W))
    assert (found.rows == V.weights(2000).astype(dtype)).all()
    assert (found.columns == W.weights(2000).astype(dtype).T).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_repeats_are_equal_bit_for_bit(cp: Any, dtype: str) -> None:
    A = cp.random.default_rng(0).standard_normal((5000, 7000), dtype=np.dtype(dtype))
    V, W = Generated("balanced", 2, 1), Generated("balanced", 2, 2)
    results = {
        tuple(x.tobytes() for x in on_host(cp, encode_both(A, V, W, squares=True, words=True))) for _ in range(10)
    }
    assert len(results) == 1
    found = encode_both(A, V, W, squares=True, words=True)
    for name, (value, bound) in exactly(EncodeTask(cp.asnumpy(A), V, W, None, None, True, False, dtype)).items():
        assert (abs(cp.asnumpy(getattr(found, name)) - value) <= bound).all()


def test_more_than_2_to_the_32_elements(cp: Any) -> None:
    m, k = 66_000, 65_536
    A = cp.empty((m, k), cp.float16)
    for at in range(0, m, 6000):
        A[at : at + 6000] = cp.random.default_rng(at).random((min(6000, m - at), k), dtype=np.float32)
    found = encode_both(A, Generated("ones"), Generated("ones"), words=True)
    rows, columns = np.array([0, 1, m // 2, m - 1]), np.array([0, k // 2, k - 1])
    part, across = cp.asnumpy(A[rows]), cp.asnumpy(A[:, columns])
    np.testing.assert_allclose(cp.asnumpy(found.rows)[rows, 0], part.astype("f8").sum(1), rtol=1e-4)
    np.testing.assert_allclose(cp.asnumpy(found.columns)[0, columns], across.astype("f8").sum(0), rtol=1e-4)
    assert (cp.asnumpy(found.row_words)[rows] == part.view("u2").sum(1, dtype=np.uint64)).all()
    assert (cp.asnumpy(found.column_words)[columns] == across.copy().view("u2").sum(0, dtype=np.uint64)).all()


def test_calls_are_queued_on_the_callers_stream_and_can_be_captured(cp: Any) -> None:
    A = cp.random.default_rng(0).standard_normal((3000, 2000))
    V, W = Generated("balanced", 2, 1), Generated("balanced", 2, 2)
    expected = encode_both(A, V, W)
    stream = cp.cuda.Stream(non_blocking=True)
    late = cp.zeros_like(A)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        late[...] = A
        found = encode_both(late, V, W)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert bool((found.rows == expected.rows).all())
    assert bool((found.columns == expected.columns).all())
