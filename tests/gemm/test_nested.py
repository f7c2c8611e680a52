"""A product that begins in the middle of another, in a signal handler or a finaliser, and what such code may do."""

from __future__ import annotations

import contextlib
import decimal
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, encode, errstate, monitor, protected_gemm
from tests.support.nesting import after_calls
from tests.support.planting import at, bits, pair, put
from tests.support.short_way import fully, told

WAYS = {"short": protected_gemm, "full": fully}
# So large that squares, or copies in another type, lie in memory that is kept; sampled, in parts, and neither.
LARGE = [
    ("float64", (140, 520, 140)),
    ("float64", (140, 90, 140)),
    ("float32", (260, 300, 260)),
    ("float32", (260, 600, 260)),
    ("float16", (140, 100, 140)),
]
STATE = {"divide": "warn", "over": "raise", "under": "ignore", "invalid": "call"}  # no default
IGNORING = dict.fromkeys(STATE, "ignore")


def ours(path: str) -> bool:
    return "/abft_tsm2/" in path.replace("\\", "/")


def ours_and_errstate(path: str) -> bool:
    return ours(path) or path == np.errstate.__enter__.__code__.co_filename


class Interrupt(BaseException):
    pass


def once(number: int, act: Callable[[], Any]) -> tuple[Callable[[], None], list[int]]:
    """What acts the time of that number, and how often it came."""
    times = [0]

    def run() -> None:
        times[0] += 1
        if times[0] == number + 1:
            act()

    return run, times


def told_of(*operands: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    C, report = protected_gemm(*operands, return_report=True, **options)
    return bits(C), told(report)


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "sizes"), LARGE, ids=str)
def test_a_product_amid_every_step_of_another_changes_nothing(dtype: str, sizes: Any, way: str, check: str) -> None:
    """Theirs is all that is kept: squares of larger numbers would make the bounds of smaller ones too wide."""
    (A, B), (X, Y), call = pair(*sizes, dtype=dtype), pair(140, 90, 140, seed=5), WAYS[way]
    X, Y = 1e8 * X, 1e8 * Y
    right, inner = call(A, B, check=check, return_report=True), call(X, Y, check=check, return_report=True)
    found: list[Any] = []
    with after_calls(ours, lambda: found.append(call(X, Y, check=check, return_report=True))):
        C, report = call(A, B, check=check, return_report=True)
    assert report.status is Status.CLEAN
    assert told(report) == told(right[1])
    assert np.array_equal(bits(C), bits(right[0]))
    assert len(found) > 40
    for Z, its in found:
        assert told(its) == told(inner[1])
        assert np.array_equal(bits(Z), bits(inner[0]))


@pytest.mark.parametrize("way", WAYS)
def test_code_amid_a_product_is_in_the_context_of_the_code_around_it(way: str) -> None:
    """Of NumPy's error state it may find that all is ignored, as in any `numpy.errstate`."""
    (A, B), call = pair(16, 16, 16), WAYS[way]
    call(A, B)
    own, states, raised = ContextVar("own", default="default"), [], []
    faulty = {"on_stage": at("multiplied", "C", put((3, 4), 99))}

    def run() -> None:
        states.append(np.geterr())
        assert own.get() == f"set {len(states) - 1} times"
        own.set(f"set {len(states)} times")
        assert decimal.getcontext().prec == 7
        with pytest.raises(SilentDataCorruptionError):
            protected_gemm(A, B, **faulty)
        raised.append(1)

    own.set("set 0 times")
    with decimal.localcontext(prec=7), np.errstate(**STATE), errstate(corrected="raise"), monitor() as log:
        with after_calls(ours, run):
            call(A, B)
        assert np.geterr() == STATE
    assert own.get() == f"set {len(states)} times"
    assert len(raised) == len(states) > 40
    assert log.counts == {Status.CLEAN: 1, Status.CORRECTED: len(states)}
    assert {tuple(state.items()) for state in states} == {tuple(state.items()) for state in (STATE, IGNORING)}


def test_an_error_state_that_is_set_amid_a_product_is_not_that_of_the_next() -> None:
    """Of the interrupted product, it may be."""
    (A, B), zeros = pair(16, 16, 16), np.zeros((16, 16))
    protected_gemm(A, B)
    expected = told_of(A, zeros)
    kept, lost = 0, 0
    for number in range(1000):
        run, times = once(number, lambda: np.seterr(all="raise"))
        with np.errstate(**STATE):
            with contextlib.suppress(FloatingPointError), after_calls(ours, run):
                protected_gemm(A, B)
            if times[0] <= number:
                break
            kept += np.geterr() == dict.fromkeys(STATE, "raise")
            lost += np.geterr() == STATE
            np.seterr(**STATE)
            C, report = told_of(A, zeros)  # log2 of 0
        assert report == expected[1]
        assert np.array_equal(C, expected[0])
    assert kept + lost == number > 40
    assert kept > 4  # where NumPy's state was the caller's


@pytest.mark.parametrize("carried", [False, True])
def test_an_interrupt_leaves_the_error_state_and_the_next_product_as_they_were(carried: bool) -> None:
    """Wherever it comes, also where `numpy.errstate` has just set the state."""
    A, B = pair(16, 90, 140)
    right = encode(B) if carried else B
    expected = told_of(A, right)

    def interrupt() -> None:
        raise Interrupt

    for number in range(1000):
        run, times = once(number, interrupt)
        with np.errstate(**STATE):
            with contextlib.suppress(Interrupt), after_calls(ours_and_errstate, run):
                protected_gemm(A, right)
            assert np.geterr() == STATE
        if times[0] <= number:
            break
        C, report = told_of(A, right)
        assert report == expected[1]
        assert np.array_equal(C, expected[0])
    assert number > 40
