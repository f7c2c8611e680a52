"""What `benchmarks.lu_plans` does to the live arrays of a factorisation, and to which part of them.

A change is random within its place: which element, row or tile. Places follow from the step, the columns j:j1: the
trailing matrix begins at j1, the panel are columns j:j1 from row j on, what is finished ends at j1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.planted_faults import flip_bit

Array = np.ndarray[Any, np.dtype[Any]]
Generator = np.random.Generator


@dataclass(frozen=True)
class Moment:
    """The arrays of a stage, and the columns j:j1 of its panel; all of them, 0:K, where no step is under way."""

    arrays: Mapping[str, Any]

    def __getitem__(self, name: str) -> Array:
        array: Array = self.arrays[name]
        return array

    @property
    def W(self) -> Array:
        return self["W"]

    @property
    def K(self) -> int:
        return int(min(self.W.shape))

    @property
    def j(self) -> int:
        return int(self.arrays["step"][0]) if "step" in self.arrays else 0

    @property
    def j1(self) -> int:
        return int(self.arrays["step"][1]) if "step" in self.arrays else self.K


Change = Callable[[Moment, Generator], None]
Spot = Callable[[Moment, Generator], tuple[int, ...]]
"""Chooses one element."""
Area = Callable[[Moment, Generator], Array]
"""Chooses a part of W, a view."""
Element = Callable[[Array, tuple[int, ...], Generator], None]
"""Changes one element."""


# ---- elements ----------------------------------------------------------------------------------------------


def bit_of(bits: Callable[[int, int], range]) -> Element:
    """A random one of some bits, which follow from the number of bits of the mantissa and of the word."""

    def change(x: Array, at: tuple[int, ...], rng: Generator) -> None:
        flip_bit(x, at, int(rng.choice(bits(int(np.finfo(x.dtype).nmant), 8 * x.itemsize))))

    return change


exponent_bit = bit_of(lambda mantissa, width: range(mantissa, width - 1))
sign_bit = bit_of(lambda mantissa, width: range(width - 1, width))
random_bit = bit_of(lambda mantissa, width: range(width))
high_bit = bit_of(lambda mantissa, width: range(mantissa - 4, width))


def put(value: float) -> Element:
    return lambda x, at, rng: x.__setitem__(at, value)


def times(factor: float) -> Element:
    def change(x: Array, at: tuple[int, ...], rng: Generator) -> None:
        x[at] = (x[at].astype(np.longdouble) * factor).astype(x.dtype)

    return change


def shift(x: Array, at: tuple[int, ...], rng: Generator) -> None:
    """By as much as the largest element."""
    x[at] += np.nan_to_num(abs(x), posinf=0, neginf=0).max() or 1.0


def in_w(spot: Spot, element: Element) -> Change:
    return lambda moment, rng: element(moment.W, spot(moment, rng), rng)


def _between(low: int, high: int, rng: Generator) -> int:
    return int(rng.integers(low, max(high, low + 1)))


def trailing(at: Moment, rng: Generator) -> tuple[int, ...]:
    return _between(at.j1, at.W.shape[0], rng), _between(at.j1, at.W.shape[1], rng)


def panel(at: Moment, rng: Generator) -> tuple[int, ...]:
    return _between(at.j, at.W.shape[0], rng), _between(at.j, at.j1, rng)


def ahead(at: Moment, rng: Generator) -> tuple[int, ...]:
    """Right of the panel, before the step has come there."""
    return _between(at.j, at.W.shape[0], rng), _between(at.j1, at.W.shape[1], rng)


def new_rows(at: Moment, rng: Generator) -> tuple[int, ...]:
    return _between(at.j, at.j1, rng), _between(at.j1, at.W.shape[1], rng)


def finished_l(at: Moment, rng: Generator) -> tuple[int, ...]:
    column = _between(0, min(at.j1, at.W.shape[0] - 1), rng)
    return _between(column + 1, at.W.shape[0], rng), column


def finished_u(at: Moment, rng: Generator) -> tuple[int, ...]:
    row = _between(0, at.j1, rng)
    return row, _between(row, at.W.shape[1], rng)


def below_diagonal(spot: Spot) -> Spot:
    """The same element of a symmetric matrix whose lower triangle is looked at."""

    def mirrored(at: Moment, rng: Generator) -> tuple[int, ...]:
        i, c = spot(at, rng)
        return max(i, c), min(i, c)

    return mirrored


# ---- more than one -----------------------------------------------------------------------------------------

TILE = 32


def scaled(area: Area, *factors: float) -> Change:
    """A part of W times one of several factors."""

    def change(at: Moment, rng: Generator) -> None:
        part = area(at, rng)
        part *= part.dtype.type(rng.choice(factors))

    return change


def tile(area: Area) -> Change:
    return scaled(area, 0.0, 1.01, -1.0, 2.0)


def trailing_tile(at: Moment, rng: Generator) -> Array:
    i, c = (_between(at.j1, size - TILE + 1, rng) for size in at.W.shape)
    return at.W[i : i + TILE, c : c + TILE]


def tile_ahead(at: Moment, rng: Generator) -> Array:
    i, c = (_between(low, size - TILE + 1, rng) for low, size in zip((at.j, at.j1), at.W.shape, strict=True))
    return at.W[i : i + TILE, c : c + TILE]


def tile_of_l(at: Moment, rng: Generator) -> Array:
    i = _between(TILE, at.W.shape[0] - TILE + 1, rng)
    end = min(at.j1, i)
    c = _between(0, end - TILE + 1, rng)
    return at.W[i : i + TILE, c : min(c + TILE, end)]


def tile_of_u(at: Moment, rng: Generator) -> Array:
    c = _between(TILE, at.W.shape[1] - TILE + 1, rng)
    end = min(at.j1, c)
    r = _between(0, end - TILE + 1, rng)
    return at.W[r : min(r + TILE, end), c : c + TILE]


def tile_below_diagonal(at: Moment, rng: Generator) -> Array:
    """Of the trailing matrix, below its diagonal."""
    i = _between(min(at.j1 + TILE, at.K - 1), at.W.shape[0] - TILE + 1, rng)
    c = _between(at.j1, i - TILE + 1, rng)
    return at.W[i : i + TILE, c : min(c + TILE, i)]


def trailing_row(at: Moment, rng: Generator) -> Array:
    return at.W[_between(at.j1, at.W.shape[0], rng), at.j1 :]


def trailing_column(at: Moment, rng: Generator) -> Array:
    return at.W[at.j1 :, _between(at.j1, at.W.shape[1], rng)]


def whole_column(at: Moment, rng: Generator) -> Array:
    return at.W[:, _between(0, at.W.shape[1], rng)]


def new_columns(at: Moment, rng: Generator) -> Array:
    first = _between(at.j1, at.W.shape[1] - 3, rng)
    return at.W[at.j : at.j1, first : first + 4]


def garbage(at: Moment, rng: Generator) -> None:
    part = at.W[at.j :, at.j : at.j1]
    part[...] = rng.standard_normal(part.shape) * abs(part).max(initial=0)


def not_exchanged(left: bool) -> Change:
    """In 8 columns the rows are where they were before the step."""

    def change(at: Moment, rng: Generator) -> None:
        low, high = (0, at.j) if left else (at.j1, at.W.shape[1])
        first = _between(low, high - 7, rng)
        part, piv = at.W[:, first : min(first + 8, high)], at["piv"]
        for i in range(at.j1 - 1, at.j - 1, -1):
            part[[i, piv[i]]] = part[[piv[i], i]]

    return change


# ---- pivots, order, sums, A --------------------------------------------------------------------------------


def _other(x: Array, i: int, low: int, high: int, rng: Generator) -> None:
    """Another one of low:high into x[i]."""
    others = np.setdiff1d(np.arange(low, high), x[i])
    if others.size:
        x[i] = rng.choice(others)


def finished_pivot(at: Moment, rng: Generator) -> None:
    """A finished one: another row that it might be."""
    i = _between(0, at.j1, rng)
    _other(at["piv"], i, i, at.W.shape[0], rng)


def new_pivot(at: Moment, rng: Generator) -> None:
    i = _between(at.j, at.j1, rng)
    _other(at["piv"], i, i, at.W.shape[0], rng)


def pivots_swapped(at: Moment, rng: Generator) -> None:
    first, second = rng.integers(at.j, at.j1, 2)
    at["piv"][[first, second]] = at["piv"][[second, first]]


def place(at: Moment, rng: Generator) -> None:
    perm = at["perm"]
    _other(perm, _between(0, perm.size, rng), 0, perm.size, rng)


def in_sums(name: str, element: Element) -> Change:
    """One of the sums that are still needed: of rows and columns ahead, or of what is finished."""

    def change(at: Moment, rng: Generator) -> None:
        x, low, high = at[name], 0, at[name].size
        if "step" in at.arrays:
            low, high = (at.j1, high) if name in "SZ" else (0, at.j1) if name in "gy" else (0, high)
        element(x, (_between(low, high, rng),), rng)

    return change


def in_both_halves(change: Change) -> Change:
    """What is changed below the diagonal of W, above it too: whichever half a factorisation works in."""

    def mirrored(at: Moment, rng: Generator) -> None:
        before = np.array(at.W)
        change(at, rng)
        i, c = np.nonzero(before != at.W)
        at.W[c, i] = at.W[i, c]

    return mirrored


def anywhere(name: str, element: Element) -> Change:
    """In any array."""
    return lambda at, rng: element(at[name], tuple(_between(0, size, rng) for size in at[name].shape), rng)


def where_a_is_needed(at: Moment, rng: Generator) -> None:
    """An element of the trailing matrix, and the element of A that it would be computed from."""
    i, c = trailing(at, rng)
    exponent_bit(at["A"], (int(at["perm"][i]), c), rng)
    exponent_bit(at.W, (i, c), rng)


ELEMENTS: Mapping[str, Element] = {
    "exponent bit": exponent_bit,
    "sign bit": sign_bit,
    "random bit": random_bit,
    "NaN": put(float("nan")),
    "Inf": put(float("inf")),
    "x 1e30": times(1e30),
}
IN_SUMS: Mapping[str, Element] = {"value": shift, "NaN": put(float("nan")), "bit": random_bit}
