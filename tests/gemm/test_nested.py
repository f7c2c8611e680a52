"""A product that begins in the middle of another one, in a signal handler: neither changes what the other one finds."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, protected_gemm
from abft_tsm2.gemm import host, small
from tests.support.planting import pair
from tests.support.short_way import fully, told

IN_THE_MIDDLE = (
    *("exponents_from", "equilibrated", "squares_of", "squares_times", "summed_squares", "squares_at", "copied"),
    *("missed_by_sample", "clean_check", "_clean", "_encode", "encode", "predict"),
)


def at_calls(names: tuple[str, ...], handler: Any) -> Any:
    """For `sys.setprofile`: what a signal handler does that comes whenever one of these functions begins or returns."""
    inside: list[int] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_name in names and not inside:
            inside.append(1)
            handler()
            inside.clear()

    return profile


@pytest.mark.parametrize("whole", [False, True], ids=["short", "full"])
@pytest.mark.parametrize(("dtype", "shape"), [("float64", (300, 600, 300)), ("float32", (130, 130, 130))])
def test_bounds_and_bits_are_those_of_a_product_alone(dtype: str, shape: tuple[int, int, int], whole: bool) -> None:
    (A, B), (X, Y) = (tuple(x.astype(dtype) for x in pair(*shape, seed=seed)) for seed in (1, 5))
    X *= np.float32(1e6)
    multiply = fully if whole else protected_gemm
    C, alone = multiply(A, B, return_report=True)
    Z, other = protected_gemm(X, Y, return_report=True)
    inner: list[Any] = []
    before = sys.getprofile()
    sys.setprofile(at_calls(IN_THE_MIDDLE, lambda: inner.append(protected_gemm(X, Y, return_report=True))))
    try:
        found, report = multiply(A, B, return_report=True)
    finally:
        sys.setprofile(before)
    assert len(inner) > 4
    assert np.array_equal(found, C)
    assert told(report) == told(alone)
    for one, its in inner:
        assert np.array_equal(one, Z)
        assert told(its) == told(other)


def test_a_product_in_the_middle_has_the_caller_s_context(monkeypatch: pytest.MonkeyPatch) -> None:
    (A, B), users = pair(16, 16, 16), ContextVar[str]("users", default="nobody's")
    users.set("mine")
    seen, raised = set[str](), []
    for place in (small, host):
        honest = place.multiply

        def wrong(P: Any, Q: Any, C: Any, *more: Any, honest: Any = honest, **named: Any) -> None:
            honest(P, Q, C, *more, **named)
            if P is not A:
                C[0, 0] += 1.0

        monkeypatch.setattr(place, "multiply", wrong)

    def handler() -> None:
        seen.add(users.get())
        np.seterr(all="raise")
        try:
            protected_gemm(A.copy(), B)
        except SilentDataCorruptionError:
            raised.append(1)

    state = np.geterr()
    with errstate(corrected="raise"):
        sys.setprofile(at_calls(("encode", "clean"), handler))
        try:
            _, report = protected_gemm(A, B, return_report=True)
        finally:
            sys.setprofile(None)
        assert report.status is Status.CLEAN
    assert (seen, len(raised)) == ({"mine"}, 4)
    assert np.geterr() == state
    with np.errstate(all="warn"):
        assert protected_gemm(A, np.zeros_like(B), return_report=True)[1].status is Status.CLEAN
