"""An operand that is wrong from one stage of an operation to another, for all pairs of them: as where a bit of it flips
in a cache, and what is read next comes from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from abft_tsm2 import Report, SilentDataCorruptionError, errstate
from abft_tsm2.core.faultpoint import planting

Place = tuple[int, int]
LAST = 10**6  # stages: the change stays


def whiles(call: Callable[[], Any]) -> Iterator[tuple[int, int]]:
    """Numbers of the stages at which a change begins and ends, of those behind "inputs": operands are encoded then.

    `call` is carried out once, to count the stages.
    """
    stages: list[str] = []
    with planting(lambda stage, arrays: stages.append(stage)):
        call()
    first = next(number for number, stage in enumerate(stages, 1) if stage != "inputs")
    for begin in range(first, len(stages) + 1):
        yield from ((begin, end) for end in (*range(begin + 1, len(stages) + 4), LAST))


def result(
    call: Callable[[Mapping[str, Any]], tuple[Any, Report]],
    given: Mapping[str, Any],
    which: str,
    places: tuple[Place, Place],
    between: tuple[int, int],
) -> tuple[Any, Report] | None:
    """What a call returns whose operand has another number in a place, or two numbers exchanged where both places are
    different, from one stage to another; None where it is refused."""
    X, (p, q), stage = given[which], places, 0
    before = float(X[p]), float(X[q])
    wrong = (1 - 3 * before[0],) * 2 if p == q else before[::-1]

    def act(_: str, arrays: Mapping[str, Any]) -> None:
        nonlocal stage
        stage += 1
        if stage in between:
            X[p], X[q] = wrong if stage == between[0] else before

    try:
        with planting(act), errstate(corrected="ignore", unverifiable="ignore"):
            return call(given)
    except SilentDataCorruptionError:
        return None
    finally:
        assert stage >= between[0], "nothing was planted"
        X[p], X[q] = before


def silent(
    call: Callable[[Mapping[str, Any]], tuple[Any, Report]],
    given: Mapping[str, Any],
    operands: Iterable[str],
    missed: Callable[[Any], Any],
    most: float,
    triangles: str = "",
) -> list[str]:
    """Where a wrong result is returned: one that is `missed` by more than `most`. Of `triangles` the lower parts
    change."""
    found = []
    for number, between in enumerate(whiles(lambda: call(given))):
        for which in operands:
            for places in places_of(given[which].shape, number, lower=which in triangles):
                returned = result(call, given, which, places, between)
                if returned is not None and not np.abs(missed(returned[0])).max() < most:
                    found.append(f"{which} {places} {between}: {returned[1].status.name}")
    return found


def places_of(shape: tuple[int, int], number: int, lower: bool = False) -> tuple[tuple[Place, Place], ...]:
    """One place, and two of a row; of the lower triangle where that is asked for."""
    rng = np.random.default_rng(number)
    i = int(rng.integers(shape[0] // 2, shape[0]))
    j, other = (int(x) for x in rng.choice(i if lower else shape[1], 2, replace=False))
    return ((i, j), (i, j)), ((i, j), (i, other))
