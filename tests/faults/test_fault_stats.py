"""Confidence intervals of counted rates, against SciPy's own and against what they promise."""

from __future__ import annotations

import doctest
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from abft_tsm2.faults.analysis import stats
from abft_tsm2.faults.analysis.stats import clopper_pearson, rate_text

COUNTS = st.integers(0, 10**6).flatmap(lambda trials: st.tuples(st.integers(0, trials), st.just(trials)))
CONFIDENCES = st.floats(0.5, 0.9999)


@pytest.mark.parametrize(
    ("events", "trials"), [(0, 1), (1, 1), (0, 12345), (12, 345), (17, 17), (500, 1000), (1, 10**6)]
)
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_the_interval_is_scipys_exact_one(events, trials, confidence):
    other = binomtest(events, trials).proportion_ci(confidence, method="exact")
    assert clopper_pearson(events, trials, confidence) == pytest.approx((other.low, other.high), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    ("events", "trials", "low", "high"),
    [
        (1, 10, 0.0025285785, 0.4450161170),  # in many tables
        (10, 100, 0.0490046892, 0.1762225977),
    ],
)
def test_known_values(events, trials, low, high):
    assert clopper_pearson(events, trials) == pytest.approx((low, high), rel=1e-7)


@given(st.integers(1, 10**7))
def test_no_event_gives_the_closed_form(trials):
    # (1 - p)^n = 0.025: what "nothing was found" says.
    low, high = clopper_pearson(0, trials)
    assert low == 0
    assert high == pytest.approx(-math.expm1(math.log(0.025) / trials), rel=1e-9)


def test_without_a_trial_nothing_is_known():
    assert clopper_pearson(0, 0) == (0.0, 1.0)


@given(COUNTS, CONFIDENCES)
def test_the_interval_holds_what_was_counted_and_mirrors(counts, confidence):
    events, trials = counts
    low, high = clopper_pearson(events, trials, confidence)
    assert 0 <= low <= (events / trials if trials else 1) <= high <= 1 or (trials == 0 and (low, high) == (0, 1))
    mirrored = clopper_pearson(trials - events, trials, confidence)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


@given(COUNTS, CONFIDENCES)
def test_more_confidence_is_wider_and_more_events_are_higher(counts, confidence):
    events, trials = counts
    low, high = clopper_pearson(events, trials, confidence)
    wide_low, wide_high = clopper_pearson(events, trials, (1 + confidence) / 2)
    assert wide_low <= low + 1e-12
    assert wide_high >= high - 1e-12
    if events < trials:
        next_low, next_high = clopper_pearson(events + 1, trials, confidence)
        assert next_low >= low - 1e-12
        assert next_high >= high - 1e-12


@given(st.integers(1, 60), st.floats(1e-6, 1))
def test_it_covers_the_truth_as_often_as_promised(trials, truth):
    covered = sum(
        binom.pmf(events, trials, truth)
        for events in range(trials + 1)
        if clopper_pearson(events, trials)[0] <= truth <= clopper_pearson(events, trials)[1]
    )
    assert covered >= 0.95 - 1e-9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((2, 1), "2 events of 1 trials"),
        ((-1, 1), "-1 events"),
        ((0, -1), "of -1 trials"),
        ((1, 2, 0.0), "got 0.0"),
        ((1, 2, 1.0), "got 1.0"),
        ((1, 2, 95), "got 95"),
        ((1, 2, math.nan), "got nan"),
    ],
)
def test_nonsense_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        clopper_pearson(*arguments)


@pytest.mark.parametrize(
    ("events", "trials", "text"),
    [
        (0, 12345, "0 of 12345 (< 0.030 %)"),
        (12, 345, "12 of 345 (3.5 %, 1.8 to 6.0 %)"),
        (0, 0, "0 of 0"),
        (0, 1, "0 of 1 (< 97.5 %)"),
        (345, 345, "345 of 345 (100 %, 98.9 to 100 %)"),
        (1, 2, "1 of 2 (50 %, 1.2 to 98.8 %)"),
        (0, 10**7, "0 of 10000000 (< 0.000037 %)"),
        (1, 10**6, "1 of 1000000 (0.00010 %, 0.0000025 to 0.00056 %)"),
    ],
)
def test_the_text(events, trials, text):
    assert rate_text(events, trials) == text


def test_thousands_are_grouped_where_asked_for():
    assert rate_text(0, 12345, grouping=" ") == "0 of 12 345 (< 0.030 %)"


def test_the_text_refuses_nonsense():
    with pytest.raises(ValueError, match="events are among trials"):
        rate_text(3, 2)


@given(COUNTS)
def test_the_printed_interval_holds_the_exact_one(counts):
    events, trials = counts
    if not events:
        return
    low, high = clopper_pearson(events, trials)
    printed = rate_text(events, trials).rpartition(", ")[2].removesuffix(" %)").split(" to ")
    assert float(printed[0]) <= 100 * low * (1 + 1e-12)
    assert float(printed[1]) >= 100 * high * (1 - 1e-12)


def test_the_examples_run():
    assert doctest.testmod(stats).failed == 0
