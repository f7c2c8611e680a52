"""The contest of kernels: who takes part, who wins by how much, whose product is wrong, and what a time is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core import autotune, choose, tuning_file
from abft_tsm2.core.autotune import MARGIN, Contender, Contest, WrongProduct, contenders, judged, operands, winner
from abft_tsm2.core.device import known
from abft_tsm2.core.problem import Problem
from abft_tsm2.core.split_k import problem_of
from abft_tsm2.errors import NotSuitable
from tests.support.fake_card import Card

CARD = replace(known("H200"), name="Some card", peak_gbs=48.0, l2_bytes=1 << 20)
PROBLEM = Problem(300, 200, 4, "float32")
LARGE = Problem(10240, 10240, 4, "float32")


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(tuning_file.VARIABLE, str(tmp_path))
    choose.forget()
    yield
    choose.forget()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A card made of NumPy, whose memory is as fast as `CARD` says."""
    card = Card()
    modules = card.modules()

    def copy(to: Any, of: Any) -> None:
        card.launch(lambda: np.copyto(to, of), 2 * of.nbytes / (1e9 * CARD.peak_gbs))

    modules["cupy"].copyto = copy
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return card


def multiplying(monkeypatch: pytest.MonkeyPatch, card: Card, seconds: Callable[[Contender], float]) -> list[Contender]:
    """Kernels and a vendor library that multiply by NumPy and take so long; returns who was called."""
    called: list[Contender] = []

    def plan(config: Contender) -> Any:
        def multiply(A: Any, B: Any, C: Any, alpha: float, beta: float) -> None:
            called.append(config)
            product = alpha * (A.astype(np.float64) @ B.astype(np.float64))
            card.launch(lambda: np.copyto(C, product.astype(C.dtype)), seconds(config))

        return multiply

    monkeypatch.setattr(autotune, "by_vendor", lambda *_: plan(None))
    monkeypatch.setattr(autotune, "launched", lambda config, *_: plan(config))
    return called


# ---- who takes part, and who wins ----------------------------------------------------------------------------------


def test_contenders_are_what_is_shipped_its_alternatives_and_the_library() -> None:
    default = choose.shipped(LARGE, CARD).configs[0]
    assert contenders(LARGE, CARD, quick=True) == (default, None)
    everyone = contenders(LARGE, CARD)
    assert set(everyone) == {*tuning_file.alternatives(LARGE, CARD), None}
    assert len(everyone) == len(set(everyone)) > 2
    # Also where the library is shipped, and where it has no such product.
    slow = replace(CARD, peak_gflops_float32=1.0)
    assert choose.shipped(LARGE, slow).configs == ()
    assert contenders(LARGE, slow, quick=True) == (default, None)
    wide = replace(LARGE, out="float64")
    assert None not in contenders(wide, CARD)
    assert contenders(wide, CARD)
    assert contenders(replace(LARGE, n=100), CARD) == ()


TIMES = st.floats(0.01, 1000)


@given(TIMES, TIMES, TIMES)
def test_only_by_a_margin_another_takes_the_place_of_the_default(default: float, other: float, vendor: float) -> None:
    first, second = tuning_file.alternatives(LARGE, CARD)[:2]
    times = {first: default, second: other, None: vendor}
    best = winner(times, first)
    if min(other, vendor) >= (1 - MARGIN) * default:
        assert best == first
    else:
        assert times[best] == min(other, vendor)
    assert winner(times, None) in (None, min(times, key=lambda name: times[name]))


@pytest.mark.parametrize(
    ("times", "expected"),
    [((1.0, 0.98), "own"), ((1.0, 0.96), "vendor"), ((0.98, 1.0), "own"), ((1.0, 1.0), "own")],
)
def test_an_entry_is_the_winner(times: tuple[float, float], expected: str) -> None:
    own = choose.shipped(LARGE, CARD).configs[0]
    entry = judged(LARGE, CARD, {own: times[0], None: times[1]})
    assert (entry.problem, entry.form, entry.vendor) == (LARGE, "columns", times[1])
    if expected == "own":
        assert (entry.kernel, entry.shape, entry.milliseconds) == (own.form, own.shape, times[0])
    else:
        assert (entry.kernel, entry.shape, entry.milliseconds) == (tuning_file.VENDOR, None, times[1])
    slow = replace(CARD, peak_gflops_float32=1.0)  # there the library is shipped, and has the benefit of the doubt
    assert (judged(LARGE, slow, {own: times[0], None: times[1]}).kernel == "vendor") == (times[0] >= 0.97 * times[1])


# ---- operands ------------------------------------------------------------------------------------------------------


@given(
    st.integers(2, 40),
    st.integers(2, 40),
    st.integers(2, 9),
    st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    st.sampled_from("FC"),
    st.integers(1, 3),
)
def test_operands_are_exact_and_as_asked(m: int, k: int, n: int, dtype: str, order: str, batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotune, "_PERIOD", 50)  # so that numbers repeat
        autotune._numbers.cache_clear()
        for name, module in Card().modules().items():
            patch.setitem(sys.modules, name, module)
        problem = Problem(m, k, n, dtype, order, out="float64", batch=batch)
        A, B, C = operands(problem)
        found = problem_of(A, B, C)
        assert replace(found, width=16, small=problem.small) == problem
        assert autotune.nbytes(problem) == A.nbytes + B.nbytes + C.nbytes
        for x, steps in ((A, 256), (B, 8)):
            numbers = np.asarray(x).astype(np.float64) * steps
            assert (numbers == np.rint(numbers)).all()
            assert np.abs(numbers).max() <= steps
            assert np.count_nonzero(numbers) > 0
    autotune._numbers.cache_clear()


# ---- what is right, and what a time is ------------------------------------------------------------------------------


@pytest.mark.parametrize("out", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", "FC")
@pytest.mark.parametrize("batch", [1, 3])
def test_right_products_of_every_type_pass(
    card: Card, monkeypatch: pytest.MonkeyPatch, out: str, order: str, batch: int
) -> None:
    dtype = out if out in ("float16", "bfloat16") else "float32"
    problem = replace(PROBLEM, dtype=dtype, weights=dtype, out=out, order=order, batch=batch)
    multiplying(monkeypatch, card, lambda config: 1e-3)
    assert Contest(CARD).measure(problem, contenders(problem, CARD))


FAULTS: dict[str, Callable[[Any], None]] = {
    "one element by its last bit": lambda C: C.view(np.uint32).__setitem__((-1, -1), C.view(np.uint32)[-1, -1] ^ 1),
    "first row": lambda C: C.__setitem__(0, 0.0),
    "not a number": lambda C: C.__setitem__((5, 0), np.nan),
    "two rows exchanged": lambda C: C.__setitem__(slice(0, 2), C[1::-1].copy()),
    "every sign": lambda C: np.negative(C, out=C),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("culprit", ["kernel", "vendor"])
def test_a_wrong_product_is_an_error(card: Card, monkeypatch: pytest.MonkeyPatch, name: str, culprit: str) -> None:
    problem = replace(PROBLEM, k=512)
    own = contenders(problem, CARD)[0]
    multiplying(monkeypatch, card, lambda config: 1e-3)
    victim = {"kernel": "launched", "vendor": "by_vendor"}[culprit]
    right = getattr(autotune, victim)

    def spoiled(*arguments: Any) -> Any:
        def multiply(*operands: Any) -> None:
            right(*arguments)(*operands)
            FAULTS[name](operands[2])

        return multiply

    Contest(CARD).measure(problem, (own, None))
    monkeypatch.setattr(autotune, victim, spoiled)
    said = own.name if culprit == "kernel" else "the vendor library"
    with pytest.raises(WrongProduct, match=rf"^{said} multiplied wrongly: C\[\d+, \d\] of product 0 is "):
        Contest(CARD).measure(problem, (own, None))


def test_a_product_that_is_not_written_is_wrong(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "by_vendor", lambda *_: lambda *operands: None)
    with pytest.raises(WrongProduct, match="is nan and should be"):
        Contest(CARD).measure(PROBLEM, (None,))
    # Also by the second of two: the product of the first does not stand in for it.
    multiplying(monkeypatch, card, lambda config: 1e-3)
    own = contenders(replace(PROBLEM, k=512), CARD)[0]
    monkeypatch.setattr(autotune, "by_vendor", lambda *_: lambda *operands: None)
    with pytest.raises(WrongProduct, match="vendor library"):
        Contest(CARD).measure(replace(PROBLEM, k=512), (own, None))


@pytest.mark.parametrize("microseconds", [3.0, 30.0, 3000.0])
def test_a_time_is_the_cards_and_not_the_hosts(
    card: Card, monkeypatch: pytest.MonkeyPatch, microseconds: float
) -> None:
    problem = replace(PROBLEM, k=512)
    own = contenders(problem, CARD)[0]
    times = {own: 1e-6 * microseconds, None: 2e-6 * microseconds}
    called = multiplying(monkeypatch, card, lambda config: times[config])
    found = Contest(CARD).measure(problem, (own, None))
    assert found == pytest.approx({name: 1e3 * seconds for name, seconds in times.items()}, rel=1e-6)
    assert called.count(own) > autotune.ROUNDS + 2 or microseconds > 50
    # The copy is what hides the host's time: without it launches of 10 microseconds are what one sees.
    monkeypatch.setattr(sys.modules["cupy"], "copyto", lambda to, of: None)
    found = Contest(CARD).measure(problem, (own, None))
    assert (found[own] > 1.5e-3 * microseconds) == (microseconds < 10)


def test_contenders_that_do_not_serve_are_left_out(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplying(monkeypatch, card, lambda config: 1e-3)

    def refuse(*_: Any) -> None:
        raise NotSuitable("not today")

    monkeypatch.setattr(autotune, "launched", refuse)
    assert set(Contest(CARD).measure(PROBLEM, contenders(replace(PROBLEM, k=512), CARD))) == {None}


def test_rounds_are_interleaved(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(PROBLEM, k=512)
    pair = (contenders(problem, CARD)[0], None)
    called = multiplying(monkeypatch, card, lambda config: 1e-3)
    Contest(CARD).measure(problem, pair)
    assert called == [*pair] * (autotune.ROUNDS + 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", "FC")
def test_on_a_card_every_contender_multiplies_exactly(dtype: str, order: str) -> None:
    pytest.importorskip("cupy")
    from abft_tsm2.core.device import query

    device = query()
    race = Contest(device)
    for m, k, n, batch in ((1024, 1024, 4, 1), (10_000, 8, 8, 1), (1000, 16, 16, 3)):
        problem = Problem(m, k, n, dtype, order, batch=batch)
        assert problem_of(*operands(problem)) == problem
        names = contenders(problem, device)
        times = race.measure(problem, names)
        assert set(times) == set(names)
        assert all(0 < milliseconds < 100 for milliseconds in times.values())
