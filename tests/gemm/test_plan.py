"""Calls on a GPU: what they are remembered by, with arrays that only say what CuPy's would; orders of their results."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.faults.trials.gemm import LAYOUTS
from abft_tsm2.gemm import plan as plans
from abft_tsm2.gemm.known import key_of
from abft_tsm2.gemm.plan import CallOptions, ProductPlan, order_of, side_stream


class Array:
    def __init__(self, strides: tuple[int, ...] = (64, 8)) -> None:
        self.shape, self.strides, self.dtype = (8, 8), strides, np.dtype("f8")
        self.data = SimpleNamespace(device_id=0, ptr=4096)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    anything = lambda **_: object()  # noqa: E731
    card = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0), Event=anything, Stream=anything)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array, cuda=card))


@pytest.mark.usefixtures("cupy")
def test_a_key_tells_the_strides_of_out_apart() -> None:
    # So that what was accepted of one out says nothing of another one that overlaps itself.
    keys = {key_of(Array(), Array(), Array(strides), ()) for strides in ((64, 8), (0, 8), (8, 8), (8, 64))}
    assert len(keys) == 4
    assert None not in keys


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("options", [([],), (1.0, np.array(2.0)), ("rows", {})], ids=str)
def test_options_without_a_hash_are_not_remembered_but_judged(options: tuple[Any, ...]) -> None:
    assert key_of(Array(), Array(), None, options) is None
    assert key_of(Array(), Array(), None, (1.0, "rows", None)) is not None


# ---- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize(("handle", "shared"), [(0, True), (12345, True), (2, False)])
def test_threads_share_events_and_workspaces_of_a_stream_but_for_default_streams_of_their_own(
    monkeypatch: pytest.MonkeyPatch, handle: int, shared: bool
) -> None:
    # With one pair of events for two streams, operands would be encoded before they are there.
    monkeypatch.setattr(plans, "_side_streams", {})
    with ThreadPoolExecutor(1) as thread:
        own, other = side_stream(handle), thread.submit(side_stream, handle).result()
    assert side_stream(handle) is own
    assert [x is y for x, y in zip(own, other, strict=True)] == [shared] * 3
    monkeypatch.setattr(plans, "LaunchSequence", lambda plan, options, key, side: SimpleNamespace(key=key))
    plan, options = ProductPlan((), (), None, on_side_stream=True), CallOptions((), 1.0, 0.0, False, ())
    plan.give(mine := plan.take(handle, options))
    with ThreadPoolExecutor(1) as thread:
        assert (thread.submit(plan.take, handle, options).result() is mine) is shared


# ---- the order of a float32 product ---------------------------------------------------------------------------------


def contiguous(X: np.ndarray, *, lines: int) -> bool:
    """Whether lines along this axis are, as kernels take them (`Layout.contiguous`)."""
    return X.shape[lines] == 1 or X.strides[lines] == X.itemsize


@given(m=st.integers(1, 4), n=st.integers(1, 4), layout=st.sampled_from([*LAYOUTS]))
def test_a_float32_product_lies_as_what_it_is_rounded_to(m: int, n: int, layout: str) -> None:
    # Else kernels that read one and write the other line by line would write it transposed.
    C = LAYOUTS[layout](np, m, n, np.float16)
    if C is None or (order := order_of(C)) is None:
        return
    wide = np.empty((m, n), np.float32, order=order)  # type: ignore[call-overload]
    for lines in (0, 1):
        assert contiguous(wide, lines=lines) == contiguous(C, lines=lines), (C.strides, order)


@pytest.mark.parametrize(
    ("layout", "order"),
    [("C", "C"), ("F", "F"), ("part", "C"), ("transposed", "F"), ("strided", None), ("negative", None)],
)
def test_which_orders_are_served(layout: str, order: str | None) -> None:
    assert order_of(LAYOUTS[layout](np, 30, 20, np.float16)) == order


def test_a_vector_whose_elements_lie_apart_is_not() -> None:
    X = np.zeros((30, 20), np.float16)
    assert order_of(X[:, 3:4]) is None
    assert order_of(X[3:4]) is not None
    assert order_of(X.T[:, 3:4]) is not None
    assert order_of(X[3:4, 3:4]) is not None
