"""Changes that the weighted sum of a line has hidden in a campaign, compared with what random weights would hide."""

from __future__ import annotations

import math
from typing import Any

from abft_tsm2.faults.analysis.tables import Row, at_the_product, counted, gathered, grouped
from abft_tsm2.faults.analysis.tally import Tally
from abft_tsm2.faults.trials.trial import protects

SEVERAL = ("swap_elements", "swap_rows", "swap_columns", "opposite", "rectangle")
"""The models that change several elements of a line so that they may cancel."""


FEW, RARE = 30.0, 0.00135  # the latter: what lies beyond three standard deviations of a normal variable


def cancellation(tally: Tally) -> list[Row]:
    """Faults that may cancel, by scheme, type and model: how many were hidden, and how many are to be expected.

    "expected" is the sum of the probabilities p of `abft_tsm2.faults.judge.hiding`, "deviation" the square root of the
    sum of p (1 - p), and "within" whether no more were hidden than `allowed` says.
    """
    cells = {
        key: cell
        for key, cell in at_the_product(tally).items()
        if protects(key.scheme) and any(one in SEVERAL for one in key.model.split(" + "))
    }
    rows = []
    for labels, members in grouped(cells, "scheme", "dtype", "model").items():
        counts, p = counted(members), gathered(members, "chances")
        expected, deviation = float(p.sum()), math.sqrt(float((p * (1 - p)).sum()))
        rows.append(
            {
                **dict(zip(("scheme", "dtype", "model"), labels, strict=True)),
                "faults": counts.total(),
                "cancelled": counts["cancelled"],
                "expected": expected,
                "deviation": deviation,
                "within": counts["cancelled"] <= allowed(expected, deviation),
            }
        )
    return rows


def allowed(expected: float, deviation: float) -> float:
    """Three standard deviations more than expected; or, where few are, what a Poisson variable exceeds as rarely.

    Examples
    --------
    >>> allowed(0.0, 0.0), allowed(0.07, 0.26), allowed(400.0, 19.0)
    (0, 2, 457.0)
    """
    number, term = 0, math.exp(-expected)
    left = 1 - term  # P(X > number)
    while expected < FEW and left > RARE:
        number += 1
        term *= expected / number
        left -= term
    return max(number, expected + 3 * deviation)


def cases(tally: Tally) -> list[dict[str, Any]]:
    """The trials with the lowest numbers of each type in which a fault was hidden, with the reason in "note"."""
    return [record for dtype in sorted(tally.cancelled) for _, record in tally.cancelled[dtype]]
