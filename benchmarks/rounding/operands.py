"""Families of operands for `benchmarks.rounding`, and types in which they are kept: bfloat16 as its bit patterns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, Array


class Draw:
    """Random float64 numbers, and the array module they come from."""

    def __init__(self, seed: int, xp: Any = np) -> None:
        self.xp, self._generator = xp, xp.random.default_rng(seed)

    def normal(self, *shape: int) -> Array:
        return self._generator.standard_normal(math.prod(shape), dtype=self.xp.float64).reshape(shape)

    def uniform(self, *shape: int) -> Array:
        return self._generator.random(math.prod(shape), dtype=self.xp.float64).reshape(shape)

    def spread(self, decades: float, *shape: int) -> Array:
        """Powers of ten from -decades to decades, uniform in the exponent."""
        return self.xp.exp((2 * decades * math.log(10)) * (self.uniform(*shape) - 0.5))

    def steps(self, n: int) -> Array:
        """0, 1, ..., n - 1 in float64."""
        return self.xp.arange(n, dtype=self.xp.float64)


Operands = tuple[Array, Array]
Family = Callable[[Draw, int, int, int], Operands]


def _pair(of_a: Callable[..., Array], of_b: Callable[..., Array] | None = None) -> Family:
    """A and B from functions of a `Draw` and a shape; from the same one where there is no other."""
    return lambda d, m, k, n: (of_a(d, m, k), (of_b or of_a)(d, k, n))


def _scaled_inner(d: Draw, m: int, k: int, n: int) -> Operands:
    scale = d.spread(2, k)
    return d.normal(m, k) * scale, d.normal(k, n) / scale[:, None]


def _mixed_rows(d: Draw, m: int, k: int, n: int) -> Operands:
    a = d.normal(m, k)
    a[::100] = abs(a[::100])  # one row in a hundred sums up instead of averaging out
    return a, d.normal(k, n) + 1


def _sine(d: Draw, m: int, k: int, n: int) -> Operands:
    at = d.steps(k)
    return d.xp.sin(0.01 * at + 6 * d.uniform(m, 1)), d.xp.cos(0.013 * at[:, None] + 6 * d.uniform(1, n))


def _pairs_cancel(d: Draw, m: int, k: int, n: int) -> Operands:
    # To a millionth of each.
    a, b, half = d.uniform(m, k) + 0.5, d.uniform(k, n) + 0.5, k // 2
    b[1::2] = b[0 : 2 * half : 2] * (-1 - 1e-6 * d.normal(half, n))
    a[:, 1::2] = a[:, 0 : 2 * half : 2]
    return a, b


def _halves_cancel(d: Draw, m: int, k: int, n: int) -> Operands:
    # The second half of the sum takes away what the first has gathered.
    a, half = d.uniform(m, k) + 1, k // 2
    a[:, half : 2 * half] = -a[:, :half]
    return a, 1 + 1e-3 * d.normal(k, n)


def _hilbert(d: Draw, *shape: int) -> Array:
    return 1 / (d.steps(shape[0])[:, None] + d.steps(shape[1]) + 1)


GENERIC: Mapping[str, Family] = {
    "normal": _pair(Draw.normal),
    "uniform01": _pair(Draw.uniform),
    "uniform x normal": _pair(Draw.uniform, Draw.normal),
    "normal+1": _pair(lambda d, *s: d.normal(*s) + 1),
    "lognormal": _pair(
        lambda d, *s: d.xp.exp(3 * d.normal(*s)),
        lambda d, *s: d.xp.exp(3 * d.normal(*s)) * d.xp.sign(d.normal(*s)),
    ),
    "six decades": _pair(lambda d, *s: d.normal(*s) * d.spread(3, *s)),
    "scaled rows and columns": _pair(
        lambda d, m, k: d.normal(m, k) * d.spread(2, m, 1),
        lambda d, k, n: d.normal(k, n) * d.spread(2, 1, n),
    ),
    "scaled inner": _scaled_inner,
    "sparse": _pair(lambda d, *s: d.normal(*s) * (d.uniform(*s) < 0.02)),
    "low rank": _pair(lambda d, m, n: d.normal(m, 4) @ d.normal(4, n)),
    "mixed rows": _mixed_rows,
}
"""Entries without order: rounding errors behave like independent random numbers."""

STRUCTURED: Mapping[str, Family] = {
    "sorted": _pair(
        lambda d, m, k: d.xp.sort(d.uniform(m, k), axis=1),
        lambda d, k, n: d.xp.sort(d.uniform(k, n), axis=0),
    ),
    "sine": _sine,
    "equal columns": _pair(Draw.uniform, lambda d, k, n: d.uniform(k, 1) + d.xp.zeros((k, n))),
    "constant": _pair(lambda d, *s: d.xp.full(s, 0.1), lambda d, *s: d.xp.full(s, 0.3)),
    "constant rows": _pair(
        lambda d, m, k: d.uniform(m, 1) + d.xp.zeros((m, k)),
        lambda d, k, n: d.uniform(1, n) + d.xp.zeros((k, n)),
    ),
    "constant rows of both signs": _pair(
        lambda d, m, k: d.normal(m, 1) + d.xp.zeros((m, k)),
        lambda d, k, n: d.normal(1, n) + d.xp.zeros((k, n)),
    ),
    "pairs cancel": _pairs_cancel,
    "halves cancel": _halves_cancel,
    "Hilbert": _pair(_hilbert),
}
"""Neighbours are related, or the sum cancels: rounding errors may all have the same sign."""

FAMILIES = {"generic": GENERIC, "structured": STRUCTURED}


def fitted(A: Array, B: Array, name: str) -> Operands:
    """A and B times powers of two with which a product of that type overflows nowhere; they are for float16 only."""
    if FLOATS[name].max_exponent > 16:
        return A, B
    top_a, top_b = (math.frexp(float(abs(x).max()))[1] for x in (A, B))
    largest = float((abs(A) @ abs(B).max(axis=1)).max())
    together = 14 - math.frexp(largest)[1]
    of_a = (together + top_b - top_a) // 2  # the largest elements of both become alike
    return A * 2.0 ** min(of_a, 15 - top_a), B * 2.0 ** min(together - of_a, 15 - top_b)


def rounded(x: Array, name: str, xp: Any = np) -> Array:
    """x, float64, in a type and in C order; finite numbers to the nearest bfloat16, ties to even."""
    x = xp.ascontiguousarray(x)
    if name != "bfloat16":
        return x.astype(name, copy=False)
    bits = x.astype(xp.float32).view(xp.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(xp.uint16)


def widened(x: Array, name: str, xp: Any = np) -> Array:
    """x, of a type, in float64, exactly."""
    if name == "bfloat16":
        x = (x.astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(xp.float64, copy=False)
