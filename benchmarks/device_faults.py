"""Faults for a product on a GPU, and what became of each: all that the planted campaign needs no card for.

A change of one element of C by more than the detection limit of the clean call's report is promised to be found. That
limit is of one line, and a fault widens the bound of its own, so a change counts as `sure` to be found from SURE limits
on, where no other change of its line can cancel it; what is not finite is sure anywhere. What is not sure may stay as
it was planted: whatever else the call returns has to be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2 import Status
from abft_tsm2.arrays import bit_pattern
from abft_tsm2.faults.judge.oracle import widened
from tests.support.cases import finfo

SURE = 2.0
SEVERAL = ("3 to 10 elements", "16 elements")
TILES = {"tile 64 zeroed": (64, 0.0), "tile 64 x 1.001": (64, 1.001)}
TILES |= {"tile 128 zeroed": (128, 0.0), "tile 128 x 1.001": (128, 1.001)}
MASS = ("row", "column", "NaN in 1000 elements")  # which may be left to the host
OUTCOMES = ("planted", "above", "found", "repaired", "left", "refused", "missed_above", "missed_below", "damaged")
"""What `outcomes` says of a fault: `left`, that lines of it in which changes may cancel stayed as they were planted
while others were repaired; `refused`, that the report has an error; `damaged`, that something else is wrong."""


@dataclass(frozen=True)
class Faults:
    """Planted in one call, whose product is a stack of matrices, or a stack of one.

    Attributes
    ----------
    kinds : tuple of str
        Of each fault.
    fault, place : (p,) int arrays
        Of each element that is changed: its fault, and its place in the flat stack; in the order of the places.
    bits, change : (p,) arrays
        What it becomes, and by how much that differs from what it was: NaN or infinite where it is not finite.
    """

    kinds: tuple[str, ...]
    fault: np.ndarray
    place: np.ndarray
    bits: np.ndarray
    change: np.ndarray

    @classmethod
    def of(cls, kinds: Sequence[str], fault: np.ndarray, place: np.ndarray, clean: np.ndarray, rng: Any) -> Faults:
        """Faults of these kinds in the clean stack; elements that they leave as they are do not count."""
        before = clean.reshape(-1)[place]
        after = before.copy()
        for number, kind in enumerate(kinds):
            after[fault == number] = changed(kind, before[fault == number], clean, rng)
        with np.errstate(all="ignore"):
            change = abs(widened(after) - widened(before))
        order = np.argsort(place)
        order = order[(bit_pattern(after) != bit_pattern(before))[order]]
        return cls(tuple(kinds), fault[order], place[order], bit_pattern(after)[order], change[order])


def single_kinds(dtype: np.dtype[Any]) -> list[str]:
    """Faults of one element."""
    bits = [f"bit {bit}" for bit in range(8 * dtype.itemsize - 1)]
    return [*bits, "sign", "x 1e30", "NaN", "Inf"]


def singles(clean: np.ndarray, count: int, rng: np.random.Generator) -> Faults:
    """So many faults of one element each, no two of them in the same row or column of the stack."""
    batch, m, n = clean.shape
    count = min(count, m, n)
    products = rng.integers(0, batch, count)
    rows, columns = rng.permutation(m)[:count], rng.permutation(n)[:count]
    names = single_kinds(clean.dtype)
    kinds = [str(name) for name in rng.choice(names, count, replace=count > len(names))]
    return Faults.of(kinds, np.arange(count), (products * m + rows) * n + columns, clean, rng)


def several(kind: str, clean: np.ndarray, rng: np.random.Generator) -> Faults:
    """One fault of many elements."""
    place = places(kind, clean.shape[1:], rng)
    return Faults.of([kind], np.zeros(place.size, int), place, clean, rng)


def places(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of the elements that a fault of many changes, in a matrix."""
    m, n = shape
    every: np.ndarray = np.arange(m * n).reshape(m, n)
    if kind in ("row", "column"):
        i, j = (int(rng.integers(size)) for size in shape)
        return every[i] if kind == "row" else every[:, j]
    if kind in TILES:
        side = TILES[kind][0]
        i, j = (int(rng.integers(max(1, size - side + 1))) for size in shape)
        return every[i : i + side, j : j + side].reshape(-1)
    count = {SEVERAL[0]: int(rng.integers(3, 11)), SEVERAL[1]: 16}.get(kind, 1000)
    return rng.choice(m * n, min(count, m * n), replace=False)


def changed(kind: str, before: np.ndarray, clean: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """What elements become by a fault."""
    bits, dtype = bit_pattern(before), before.dtype
    top = 8 * dtype.itemsize - 1
    if kind == "sign" or kind.startswith("bit "):
        return flipped(bits, top if kind == "sign" else int(kind[4:])).view(dtype)
    if kind in SEVERAL:
        return flipped(bits, rng.integers(finfo(dtype).nmant - 2, top + 1, bits.size)).view(dtype)
    if kind == "Inf" or kind.startswith("NaN"):
        return np.full(before.shape, np.inf if kind == "Inf" else np.nan).astype(dtype)
    if kind in ("row", "column"):
        values = rng.uniform(-1, 1, before.shape) * float(abs(widened(clean)).max())
    else:
        values = widened(before) * (1e30 if kind == "x 1e30" else TILES[kind][1])
    with np.errstate(all="ignore"):
        return values.astype(dtype)


def flipped(bits: np.ndarray, bit: Any) -> np.ndarray:
    """Bit patterns with one bit changed in each; 0 is the lowest."""
    word: Any = bits.dtype.type
    pattern: np.ndarray = bits ^ (word(1) << np.asarray(bit, bits.dtype))
    return pattern


@dataclass(frozen=True)
class Seen:
    """What a judge found after the call at the elements that were changed, and elsewhere.

    Attributes
    ----------
    line : (p,) int array
        The line of C that each is checked in.
    wrong, closer, stayed : (p,) boolean arrays
        Whether the element is beyond what rounding explains; at most half as far off as it was planted; exactly as it
        was planted.
    elsewhere : (batch,) int array
        How many other elements of each product are wrong.
    product : (p,) int array
        The product of each element.
    statuses : list of Status
        What the report says of each product.
    limit : float
        Of detection, of the clean call's report.
    """

    line: np.ndarray
    wrong: np.ndarray
    closer: np.ndarray
    stayed: np.ndarray
    elsewhere: np.ndarray
    product: np.ndarray
    statuses: Sequence[Status]
    limit: float


def outcomes(faults: Faults, seen: Seen) -> list[dict[str, bool]]:
    """What became of each fault: `OUTCOMES`, and whether a promise is `broken`. Empty for one that changed nothing."""
    _, line = np.unique(seen.line, return_inverse=True)
    large = ~(faults.change <= SURE * seen.limit)
    alone = np.bincount(line)[line] == 1
    sure = ~np.isfinite(faults.change) | (alone & large)
    touched = (np.bincount(line, ~seen.stayed) > 0)[line]
    corrected, fine = (
        np.array([status in some for status in seen.statuses])[seen.product]
        for some in ((Status.CORRECTED,), (Status.CORRECTED, Status.CLEAN))
    )
    found = ~seen.stayed & corrected
    # What was computed again is right, and what is sure to be found is closer than before, too; in a line of which
    # something was found nothing large may stay.
    bad = (~seen.stayed & (seen.wrong | (sure & ~seen.closer))) | (seen.stayed & touched & large)
    bad |= (seen.elsewhere > 0)[seen.product]

    def any_of(mask: np.ndarray) -> Any:
        return np.bincount(faults.fault, mask, len(faults.kinds)) > 0

    planted, above, hit, refused = (any_of(x) for x in (np.ones(line.size), sure, found, ~fine))
    missed_above = any_of(sure & ~found) & ~refused
    damaged = any_of(bad) & ~refused
    left = any_of(seen.stayed & seen.wrong) & hit & ~missed_above & ~damaged & ~refused
    result = {
        "planted": planted,
        "above": above,
        "found": hit,
        "repaired": hit & ~left & ~missed_above & ~damaged & ~refused,
        "left": left,
        "refused": refused,
        "missed_above": missed_above,
        "missed_below": planted & ~above & ~hit & ~refused,
        "damaged": damaged,
    }
    one_element = np.bincount(faults.fault, minlength=len(faults.kinds)) == 1
    result["broken"] = missed_above | damaged | (refused & (above | one_element))
    return [{name: bool(x[i]) for name, x in result.items()} if planted[i] else {} for i in range(len(faults.kinds))]
