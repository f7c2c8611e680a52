"""The fault models: changes of a live array in place, on the array's own device, and never through the host.

Words are changed as unsigned integers of the same width, so that every type and every layout is served, NaN and its
payload, subnormal numbers and both zeros among them. Numbers that are computed with are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, FloatType, bit_pattern, dtype_name, from_host, namespace
from abft_tsm2.faults.judge.oracle import narrowed, widened
from abft_tsm2.faults.plan import PRODUCTION, Plan, bits_of

Array = Any
Generator = np.random.Generator
Change = Callable[[Array, Plan, Generator], int]
Places = tuple[Any, Any]

TILE, WARP = 64, 32


def plant(x: Array, plan: Plan, rng: Generator) -> int:
    """Change an array as a plan's model says.

    Parameters
    ----------
    x : (m,) or (m, n) array, NumPy or CuPy
        Live: it is written to.
    plan : Plan
    rng : Generator
        Which elements, which bits, which sign.

    Returns
    -------
    bit : int
        The number of the bit, where one bit of a word is what was changed; else -1.
    """
    if x.size == 0:
        return -1
    with np.errstate(all="ignore"):
        return CHANGES[plan.model](x if x.ndim == 2 else x[:, None], plan, rng)


# ---- elements ------------------------------------------------------------------------------------------------------


def places(x: Array, count: int, rng: Generator) -> Places:
    """Indices of `count` different elements, or of all where there are fewer."""
    chosen = rng.choice(x.size, min(count, x.size), replace=False, shuffle=False)
    rows, columns = np.unravel_index(chosen, x.shape)
    return rows, columns


def _on(x: Array, at: Places) -> Any:
    """Indices on the device of x; of a single element, which needs none of them there, as slices."""
    if at[0].size == 1:
        return tuple(slice(int(one[0]), int(one[0]) + 1) for one in at)
    return tuple(from_host(one, x) for one in at)


def _words(x: Array, at: Places, change: Callable[[Array, Any], Array]) -> None:
    """Change words: `change` is given them and their type, an unsigned integer."""
    at = _on(x, at)
    words = bit_pattern(x)
    words[at] = change(words[at], words.dtype.type)


def _flip(x: Array, at: Places, mask: int) -> None:
    _words(x, at, lambda w, word: w ^ word(mask))


def values(x: Array, at: Any) -> Array:
    """Elements in float64."""
    return widened(bit_pattern(x)[at].view(x.dtype), namespace(x))


def _put(x: Array, at: Any, numbers: Array) -> None:
    bit_pattern(x)[at] = narrowed(numbers, x.dtype)


def _sign(dtype: str) -> int:
    return 1 << (FLOATS[dtype].bits - 1)


def _infinity(kind: FloatType) -> int:
    """Its bit pattern; what is below are the finite numbers."""
    return ((1 << (kind.bits - kind.precision)) - 1) << (kind.precision - 1)


def _bit_flip(x: Array, plan: Plan, rng: Generator) -> int:
    bits = rng.choice(bits_of(plan.bits, dtype_name(x.dtype)), min(plan.count, x.size))
    rows, columns = places(x, plan.count, rng)
    for bit, i, j in zip(bits.tolist(), rows, columns, strict=False):
        _flip(x, (np.array([i]), np.array([j])), 1 << bit)
    return int(bits[0]) if plan.count == 1 else -1


def _multi_bit(x: Array, plan: Plan, rng: Generator) -> int:
    bits = bits_of(plan.bits, dtype_name(x.dtype))
    chosen = rng.choice(bits, min(plan.count, len(bits)), replace=False)
    _flip(x, places(x, 1, rng), sum(1 << int(bit) for bit in chosen))
    return int(chosen[0]) if chosen.size == 1 else -1


def _stuck(value: int) -> Change:
    def change(x: Array, plan: Plan, rng: Generator) -> int:
        bit = int(rng.choice(bits_of(plan.bits, dtype_name(x.dtype))))
        mask = 1 << bit
        if value:
            _words(x, places(x, plan.count, rng), lambda w, word: w | word(mask))
        else:
            _words(x, places(x, plan.count, rng), lambda w, word: w & ~word(mask))
        return bit

    return change


def _random_value(x: Array, plan: Plan, rng: Generator) -> int:
    kind = FLOATS[dtype_name(x.dtype)]
    at = places(x, plan.count, rng)
    magnitude = rng.integers(0, _infinity(kind), at[0].size, dtype=np.uint64)
    found = magnitude | (rng.integers(0, 2, at[0].size, dtype=np.uint64) << np.uint64(kind.bits - 1))
    bit_pattern(x)[_on(x, at)] = from_host(found.astype(f"uint{kind.bits}"), x)
    return -1


def _scaled(x: Array, plan: Plan, rng: Generator) -> int:
    at = _on(x, places(x, plan.count, rng))
    _put(x, at, values(x, at) * plan.factor)
    return -1


def _rms(x: Array) -> Array:
    """The root mean square of x, a number on its device."""
    wide = widened(x, namespace(x))
    return (wide * wide).mean() ** 0.5


def _offset(x: Array, plan: Plan, rng: Generator) -> int:
    at = places(x, plan.count, rng)
    sign = from_host(rng.choice([-1.0, 1.0], at[0].size), x)
    here = _on(x, at)
    _put(x, here, values(x, here) + sign * (plan.factor * _rms(x)))
    return -1


def _special(exponent_only: bool) -> Change:
    def change(x: Array, plan: Plan, rng: Generator) -> int:
        kind = FLOATS[dtype_name(x.dtype)]
        pattern = _infinity(kind) | (0 if exponent_only else 1 << (kind.precision - 2))
        sign = int(rng.integers(2)) * _sign(kind.name)
        _words(x, places(x, plan.count, rng), lambda w, word: (w & word(0)) | word(pattern | sign))
        return -1

    return change


def _carry(too_many: bool) -> Change:
    """The digits of a word, exponent and all, are one integer: a carry into a bit adds to it, and runs on."""

    def change(x: Array, plan: Plan, rng: Generator) -> int:
        dtype = dtype_name(x.dtype)
        bit = int(rng.choice(bits_of("mantissa" if plan.bits == "any" else plan.bits, dtype)))
        one, sign = 1 << bit, _sign(dtype)

        def carried(w: Array, word: Any) -> Array:
            digits = w & word(sign - 1)
            # Nothing can be taken from less than the carry itself: zero is what is left.
            found = digits + word(one) if too_many else digits - (digits >= word(one)) * word(one)
            return (w & word(sign)) | (found & word(sign - 1))

        _words(x, places(x, plan.count, rng), carried)
        return bit

    return change


def _production(x: Array, plan: Plan, rng: Generator) -> int:
    kind = str(rng.choice(list(PRODUCTION), p=list(PRODUCTION.values())))
    if kind != "compound":
        return CHANGES[kind](x, plan, rng)
    _bit_flip(x, plan, rng)
    _carry(bool(rng.integers(2)))(x, plan, rng)
    return -1


# ---- regions -------------------------------------------------------------------------------------------------------


def _times(part: Array, factor: float) -> int:
    wide = widened(part, namespace(part))
    bit_pattern(part)[...] = narrowed(wide * factor, part.dtype)
    return -1


def _row(x: Array, plan: Plan, rng: Generator) -> int:
    i = int(rng.integers(x.shape[0]))
    return _times(x[i : i + 1, :], plan.factor)


def _tile(x: Array, plan: Plan, rng: Generator) -> int:
    i, j = (int(rng.integers(max(1, size - TILE + 1))) for size in x.shape)
    return _times(x[i : i + TILE, j : j + TILE], plan.factor)


def _warp(x: Array, plan: Plan, rng: Generator) -> int:
    i, lane = int(rng.integers(x.shape[0])), int(rng.integers(min(WARP, x.shape[1])))
    return _times(x[i : i + 1, lane::WARP], plan.factor)


def _round(*parts: Array) -> int:
    """Move what is in each part to the next one, and what is in the last to the first."""
    words = [bit_pattern(part) for part in parts]
    last = words[-1].copy()
    for one, before in zip(words[:0:-1], words[-2::-1], strict=True):
        one[...] = before
    words[0][...] = last
    return -1


def _some(size: int, count: int, rng: Generator) -> list[int]:
    """`count` different numbers below size; fewer, where there are fewer."""
    if size < 2:
        return [0]
    return list(map(int, rng.choice(size, min(count, size), replace=False)))


def _two(size: int, rng: Generator) -> tuple[int, int]:
    chosen = _some(size, 2, rng)
    return chosen[0], chosen[-1]


def _moved_rows(count: int) -> Change:
    def change(x: Array, plan: Plan, rng: Generator) -> int:
        return _round(*(x[i : i + 1, :] for i in _some(x.shape[0], count, rng)))

    return change


def _line(x: Array, rng: Generator) -> Array:
    """x or its transpose, whichever has lines of two elements."""
    across = bool(rng.integers(2)) if min(x.shape) > 1 else x.shape[1] == 1
    return x.T if across else x


def _moved_elements(count: int) -> Change:
    def change(x: Array, plan: Plan, rng: Generator) -> int:
        x = _line(x, rng)
        i = int(rng.integers(x.shape[0]))
        return _round(*(x[i : i + 1, j : j + 1] for j in _some(x.shape[1], count, rng)))

    return change


def _across(change: Change) -> Change:
    """The same of columns."""
    return lambda x, plan, rng: change(x.T, plan, rng)


def _add(x: Array, corners: list[tuple[int, int, float]], change: Array) -> int:
    for i, j, sign in corners:
        at = _on(x, (np.array([i]), np.array([j])))
        _put(x, at, values(x, at) + sign * change)
    return -1


def _opposite(x: Array, plan: Plan, rng: Generator) -> int:
    change = plan.factor * _rms(x)
    x = _line(x, rng)
    i, (j, k) = int(rng.integers(x.shape[0])), _two(x.shape[1], rng)
    return _add(x, [(i, j, 1.0), (i, k, -1.0)], change)


def _rectangle(x: Array, plan: Plan, rng: Generator) -> int:
    (i, k), (j, h) = (_two(size, rng) for size in x.shape)
    return _add(x, [(i, j, 1.0), (i, h, -1.0), (k, j, -1.0), (k, h, 1.0)], plan.factor * _rms(x))


CHANGES: Mapping[str, Change] = {
    "bit_flip": _bit_flip,
    "multi_bit": _multi_bit,
    "stuck_at_0": _stuck(0),
    "stuck_at_1": _stuck(1),
    "random_value": _random_value,
    "scaled": _scaled,
    "offset": _offset,
    "nan": _special(exponent_only=False),
    "inf": _special(exponent_only=True),
    "wrong_carry": _carry(too_many=True),
    "missing_carry": _carry(too_many=False),
    "production": _production,
    "row": _row,
    "column": _across(_row),
    "tile": _tile,
    "warp": _warp,
    "swap_elements": _moved_elements(2),
    "swap_rows": _moved_rows(2),
    "swap_columns": _across(_moved_rows(2)),
    "cycle_elements": _moved_elements(3),
    "cycle_rows": _moved_rows(3),
    "cycle_columns": _across(_moved_rows(3)),
    "opposite": _opposite,
    "rectangle": _rectangle,
}
"""All models but those that only one site has."""
