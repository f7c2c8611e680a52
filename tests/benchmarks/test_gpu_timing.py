"""The stopwatch for GPUs on a card whose clocks are simulated, so that the true times are known; its statistics."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from benchmarks import ceilings, gpu_timing
from benchmarks.gpu_timing import Call, DeviceLostError, Stopwatch, graph
from benchmarks.timing import summary
from tests.support.fake_card import Card

# ---- statistics ---------------------------------------------------------------------------------------------------


def test_median_and_quartiles() -> None:
    found = summary([5, 1, 4, 2, 3])
    assert (found.median, found.lower_quartile, found.upper_quartile, found.count) == (3, 2, 4, 5)


@pytest.mark.parametrize(
    ("count", "rank", "coverage"),
    [(6, 1, 0.96875), (8, 1, 0.9921875), (9, 2, 0.9609375), (15, 4, 0.96484375), (25, 8, 0.956714749)],
)
def test_interval_of_the_median_is_the_tabulated_one(count: int, rank: int, coverage: float) -> None:
    # Ranks and coverages of the sign test's interval, as in tables of the binomial distribution.
    found = summary(range(1, count + 1))
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.coverage == pytest.approx(coverage, abs=1e-9)


def test_interval_covers_the_median_of_a_skewed_distribution_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    found = [summary(rng.exponential(1, 15)) for _ in range(4000)]
    hits = np.mean([one.low <= math.log(2) <= one.high for one in found])
    assert abs(hits - found[0].coverage) < 4 * math.sqrt(0.25 / len(found))


def test_too_few_times_give_all_of_them_and_say_so() -> None:
    assert summary([3, 1]).coverage == 0.5
    assert summary([2.0]) == summary([2.0], 0.5)
    assert summary([2.0]).coverage == 0
    assert 0.95 <= summary(range(3000)).coverage < 0.96  # more samples than a float has powers of two


@pytest.mark.parametrize("times", [[], [1.0, math.nan], [math.inf]])
def test_no_summary_of_what_is_not_there(times: list[float]) -> None:
    with pytest.raises(ValueError, match="measure again"):
        summary(times)


# ---- the stopwatch ------------------------------------------------------------------------------------------------


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, module in card.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(gpu_timing.time, "perf_counter", lambda: card.host)
    monkeypatch.setattr(gpu_timing.time, "monotonic", lambda: card.host)
    return card


def launch(card: Card, seconds: float, seen: list[Any] | None = None, name: str = "") -> Callable[[int], None]:
    """A call that takes the card so long, and notes its name and which copy it was given."""
    record = (lambda i: seen.append((name, i))) if seen is not None else (lambda i: None)
    return lambda i: card.launch(lambda: record(i), seconds)


@pytest.mark.parametrize("seconds", [2e-6, 5e-5, 3e-3, 0.2])
@pytest.mark.parametrize("capture", [None, graph])
def test_times_are_the_cards_and_not_the_hosts(card: Card, seconds: float, capture: Any) -> None:
    card.launch_seconds = 3e-5  # the host is slower than the short calls
    times = Stopwatch().measure({"call": Call(launch(card, seconds), capture=capture)})["call"]
    assert times.seconds == pytest.approx([seconds] * len(times.seconds), rel=1e-6)
    assert times.hidden == len(times.seconds)
    assert times.batch * seconds >= 0.99e-3 or times.batch == gpu_timing.QUEUE
    assert times.graph == (capture is not None and seconds < gpu_timing.SHORT)


def test_a_host_that_is_not_ahead_is_noticed(card: Card) -> None:
    card.launch_seconds = 1.0  # no spinning kernel hides this
    times = Stopwatch(rounds=(2, 2)).measure({"call": Call(launch(card, 1e-3))})["call"]
    assert times.seconds
    assert times.hidden == 0


def test_rounds_are_interleaved_and_begin_with_another_one_each_time(card: Card) -> None:
    seen: list[Any] = []
    calls = {name: Call(launch(card, 2e-3, seen, name)) for name in "abc"}
    times = Stopwatch(rounds=(6, 6)).measure(calls)
    timed = "".join(name for name, _ in seen[-18:])
    assert timed == "abc" + "bca" + "cab" + "abc" + "bca" + "cab"
    assert {len(one.seconds) for one in times.values()} == {6}


def test_slow_calls_get_fewer_samples_spread_over_all_rounds(card: Card) -> None:
    seen: list[Any] = []
    calls = {"fast": Call(launch(card, 1e-3, seen, "f")), "slow": Call(launch(card, 0.02, seen, "s"))}
    times = Stopwatch(rounds=(7, 40)).measure(calls)
    assert len(times["slow"].seconds) == 7
    assert len(times["fast"].seconds) == 40
    order = "".join(name for name, _ in seen)
    assert max(map(len, order[order.rindex("sss") + 3 :].split("s"))) <= 8


@pytest.mark.parametrize("capture", [None, graph])
def test_calls_walk_through_all_copies(card: Card, capture: Any) -> None:
    seen: list[Any] = []
    times = Stopwatch(rounds=(3, 3)).measure({"call": Call(launch(card, 1e-4, seen), copies=50, capture=capture)})
    assert times["call"].batch == 50
    assert [i for _, i in seen[-100:]] == 2 * list(range(50)) or capture is None
    assert sorted(i for _, i in seen[-100:]) == sorted(2 * list(range(50)))


def test_calls_of_many_launches_do_not_fill_the_queue(card: Card) -> None:
    def call(_: int) -> None:
        for _ in range(64):
            card.launch(lambda: None, 1e-6)

    times = Stopwatch(rounds=(2, 2)).measure({"call": Call(call, launches=64)})["call"]
    assert times.batch * 64 <= gpu_timing.QUEUE
    assert times.seconds == pytest.approx([64e-6] * 2)


def test_an_error_is_kept_and_the_others_go_on(card: Card) -> None:
    count = 0

    def breaks(i: int) -> None:
        nonlocal count
        count += 1
        if count > 5:
            raise RuntimeError("boom\nand more")
        card.launch(lambda: None, 2e-3)

    calls = {"bad": Call(lambda i: 1 / 0), "late": Call(breaks), "good": Call(launch(card, 2e-3))}
    times = Stopwatch(rounds=(7, 7)).measure(calls)
    assert times["bad"].error == "ZeroDivisionError: division by zero"
    assert times["late"].error == "RuntimeError: boom and more"
    assert not times["late"].seconds
    assert len(times["good"].seconds) == 7


def test_without_a_graph_calls_are_queued_and_the_reason_is_kept(card: Card) -> None:
    card.capturable = False
    times = Stopwatch(rounds=(2, 2)).measure({"call": Call(launch(card, 1e-5), capture=graph)})["call"]
    assert not times.graph
    assert times.note.startswith("no graph: RuntimeError: operation not permitted")
    assert times.seconds == pytest.approx([1e-5] * 2)


def test_a_lost_device_ends_the_run(card: Card) -> None:
    def destroys(_: int) -> None:
        card.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(DeviceLostError, match="compute-sanitizer"):
        Stopwatch().measure({"good": Call(launch(card, 1e-3)), "bad": Call(destroys)})


def test_the_deadline_ends_the_rounds_and_keeps_the_times(card: Card) -> None:
    times = Stopwatch(rounds=(50, 50), deadline=0.1).measure({"call": Call(launch(card, 0.01))})["call"]
    assert 1 <= len(times.seconds) < 50


def test_copies_exceed_the_cache(card: Card) -> None:
    cache = 1 << 16
    assert gpu_timing.copies(5 * cache) == 1
    assert gpu_timing.copies(cache) == gpu_timing.CACHES
    assert gpu_timing.copies(1000) * 1000 >= gpu_timing.CACHES * cache


def test_ceilings_are_bytes_over_time(card: Card) -> None:
    found = ceilings.measure(Stopwatch())
    assert found.of("read") == pytest.approx(4000, rel=1e-3)  # the fake card moves 4 TB/s
    assert found.of("copy") == pytest.approx(4000, rel=1e-3)


def test_the_environment_names_card_and_versions(card: Card) -> None:
    found = gpu_timing.environment()
    assert (found["device"], found["driver"], found["cuda"]) == ("Fake card", "13.0", "13.2")
    assert all(isinstance(text, str) for text in found.values())


# ---- the stopwatch's rounds, and the host's clock -----------------------------------------------------------------


def test_even_rounds_have_a_sample_of_every_contender(card: Card) -> None:
    watch, seen = Stopwatch(budget=0.05, even=True), []
    watch.after = lambda: seen.append(card.host)

    def taking(seconds: float) -> Call:
        return Call(lambda _: card.launch(lambda: None, seconds))

    times = watch.measure({"fast": taking(2e-3), "slow": taking(9e-3)})
    assert len(times["fast"].seconds) == len(times["slow"].seconds) >= 7
    assert len(seen) >= 2 * len(times["fast"].seconds)


def test_host_times_are_of_the_calls_and_not_of_the_card(card: Card) -> None:
    seen: list[str] = []

    def call(name: str, launches: int) -> Any:
        def run() -> None:
            seen.append(name)
            for _ in range(launches):
                card.launch(lambda: None, 1.0)  # the card is far slower than the host

        return run

    found = gpu_timing.host_times({"one": call("one", 1), "three": call("three", 3)}, 50)
    assert {name: len(times) for name, times in found.items()} == {"one": 60, "three": 60}
    assert found["one"] == pytest.approx([1e-5] * 60)
    assert found["three"] == pytest.approx([3e-5] * 60)
    assert [name for name, _ in groupby(seen)] == ["one", "three", "one", "three"]  # one, three; three, one; one, three
