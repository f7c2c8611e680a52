"""Products on a GPU: what can be said of them without one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.faults.layouts import LAYOUTS
from abft_tsm2.queued import order_of


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
