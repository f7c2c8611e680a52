"""Families of operands: what real and adversarial matrices look like to a rounding bound.

Each family is a function of (m, k, n, rng, scales) that gives A (m x k) and B (k x n) in float64; `generate` calls it
by name and `operands` rounds to a type. Those that suit every type are the pairs of the fault campaigns. The tag says
what a rounding bound may expect:

- generic: entries without order; rounding errors behave like independent random numbers.
- structured: neighbours are related (sorted, periodic, repeated, exact integers), so rounding errors are too,
  or vanish.
- pathological: products in which rounding errors add up coherently, or which cancel to almost nothing.
- extreme: the ends of the type's range: subnormal, vanishing and overflowing products, zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np

from abft_tsm2.faults.operands.pairs import PAIRS

try:
    from ml_dtypes import finfo
except ImportError:  # bfloat16 is optional, as it is in the library
    from numpy import finfo  # type: ignore[assignment]

Operands = tuple[np.ndarray, np.ndarray]
Generator = np.random.Generator


@dataclass(frozen=True)
class Scales:
    """The range of a type: what is large in float64 is Inf in float16."""

    largest: float
    smallest: float  # the smallest subnormal
    tiny: float  # small, but far from subnormal

    @classmethod
    def of(cls, dtype: Any) -> Scales:
        limits = finfo(np.dtype(dtype))
        tiny = {11: 1e-4, 53: 1e-300}.get(limits.nmant + 1, 1e-30)
        return cls(float(limits.max), float(limits.smallest_subnormal), tiny)

    def decades(self, wanted: float) -> float:
        """`wanted` decades, or as many as a product of two and a sum allow."""
        return min(wanted, float(np.log10(self.largest)) / 4)


Make = Callable[[int, int, int, Generator, Scales], Operands]
Draw = Callable[[Generator, tuple[int, int], Scales], np.ndarray]


@dataclass(frozen=True)
class Family:
    """A function that makes A and B of m, k, n, a generator and scales; the tag says what a bound may expect."""

    name: str
    tag: str
    make: Make


def generate(name: str, m: int, k: int, n: int, rng: Generator, dtype: Any = np.float64) -> Operands:
    """A (m x k) and B (k x n) of a family, in float64, at scales that suit `dtype`."""
    return FAMILIES[name].make(m, k, n, rng, Scales.of(dtype))


def operands(name: str, m: int, k: int, n: int, rng: Generator, dtype: Any) -> Operands:
    """A and B of a family, rounded to `dtype`."""
    with np.errstate(over="ignore", under="ignore"):
        a, b = (x.astype(dtype) for x in generate(name, m, k, n, rng, dtype))
    return a, b


def names(*tags: str) -> tuple[str, ...]:
    """Names of the families that carry one of the tags, of all families when none is given."""
    return tuple(f.name for f in FAMILIES.values() if not tags or f.tag in tags)


# ---- how they are made --------------------------------------------------------------------------------------------


def _of(of_a: Draw, of_b: Draw | None = None) -> Make:
    """A and B drawn one after the other; B like A where there is no function of its own."""
    return lambda m, k, n, rng, scales: (of_a(rng, (m, k), scales), (of_b or of_a)(rng, (k, n), scales))


def _pair(name: str) -> Make:
    """A pair of the fault campaigns."""
    return lambda m, k, n, rng, scales: PAIRS[name][1](rng, m, k, n)


def _normal(rng: Generator, shape: Any, scales: Scales) -> np.ndarray:
    return rng.standard_normal(shape)


def _spread(rng: Generator, decades: float, shape: Any) -> np.ndarray:
    return 10.0 ** rng.uniform(-decades, decades, shape)


def _scaled_lines(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    d = s.decades(6)
    return rng.standard_normal((m, k)) * _spread(rng, d, (m, 1)), rng.standard_normal((k, n)) * _spread(rng, d, (1, n))


def _scaled_inner(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    d = _spread(rng, s.decades(6), k)
    return rng.standard_normal((m, k)) * d, rng.standard_normal((k, n)) / d[:, None]


def _outliers(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a[rng.integers(m)] *= 10.0 ** s.decades(6)
    b[:, rng.integers(n)] *= 10.0 ** s.decades(6)
    a[:, rng.integers(k)] *= 10.0 ** s.decades(4)
    return a, b


def _softmax(rng: Generator, shape: Any, s: Scales) -> np.ndarray:
    z = rng.standard_normal(shape) * 3
    z = np.exp(z - z.max(1, keepdims=True))
    return z / z.sum(1, keepdims=True)


def _digits(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    # Pixels are 0..16; in sixteenths they are as exact and stay finite in float16.
    images = _digit_images() / 16
    pixels = np.arange(k) % images.shape[1]
    a = images[np.arange(m) % len(images)][:, pixels]
    return a, images[(np.arange(n) + 7) % len(images)][:, pixels].T


@cache
def _digit_images() -> np.ndarray:
    from sklearn.datasets import load_digits

    return np.asarray(load_digits().data)


def _mixed_columns(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    b = rng.standard_normal((k, n)) * _spread(rng, s.decades(8), (1, n))
    b[:, rng.random(n) < 0.25] = 0
    return rng.standard_normal((m, k)), b


def _edge_of_underflow(rng: Generator, shape: Any, s: Scales) -> np.ndarray:
    # Terms from a hundred thousand times the smallest subnormal down to below it.
    return rng.standard_normal(shape) * np.sqrt(s.smallest) * 10 ** rng.uniform(-2, 2, shape)


def _huge(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    # sum |a||b| stays below a quarter of the largest number, from a balanced to a lopsided split of the range.
    product, share = s.largest / 4 / k, rng.uniform(0.5, 0.95)
    scale = product**share
    return rng.uniform(-1, 1, (m, k)) * scale, rng.uniform(-1, 1, (k, n)) * (product / scale)


def _overflow(m: int, k: int, n: int, rng: Generator, s: Scales) -> Operands:
    # A random element overflows with a probability of about one in eight.
    scale = np.sqrt(s.largest / 1.5 / np.sqrt(k))
    return rng.standard_normal((m, k)) * scale, rng.standard_normal((k, n)) * scale


_MAKERS: Mapping[str, Mapping[str, Make]] = {
    "generic": {
        "uniform01": _of(lambda rng, shape, s: rng.random(shape)),
        "uniform-11": _of(lambda rng, shape, s: rng.uniform(-1, 1, shape)),
        "normal": _of(_normal),
        "normal+1": _of(lambda rng, shape, s: rng.standard_normal(shape) + 1),
        "loguni8": _of(lambda rng, shape, s: _spread(rng, s.decades(8), shape) * rng.choice([-1.0, 1.0], shape)),
        "loguni2": _of(lambda rng, shape, s: _spread(rng, s.decades(2), shape) * rng.choice([-1.0, 1.0], shape)),
        "illrowcol": _scaled_lines,
        "illinner": _scaled_inner,
        "outlier_rc": _outliers,
        "sparse1": _of(lambda rng, shape, s: rng.standard_normal(shape) * (rng.random(shape) < 0.01)),
        "lowrank": _pair("nearly low rank"),
        "softmax_v": _of(_softmax, _normal),
        "relu_w": _of(
            lambda rng, shape, s: np.maximum(rng.standard_normal(shape), 0),
            lambda rng, shape, s: rng.standard_normal(shape) * shape[0] ** -0.5,
        ),
        "mixedrows": _pair("mixed rows"),
    },
    "structured": {
        "cancel_alt": _pair("neighbours cancel"),
        "sorted": _pair("sorted"),
        "sine": _pair("sine"),
        "digits": _digits,
        "dupcols": _pair("equal columns"),
        "arange": _pair("counted up"),
        "int": _of(lambda rng, shape, s: rng.integers(-8, 8, shape).astype(float)),
        # Non-negative integers as in images: exact until the sum leaves the mantissa.
        "counts": _of(lambda rng, shape, s: rng.integers(0, int(10 ** s.decades(2.4)), shape).astype(float)),
        "mixed_columns": _mixed_columns,
        "onehot": _pair("one of each"),  # a permutation where m == k, a gather with repeats or holes otherwise
    },
    "pathological": {
        "cancel_half": _pair("halves nearly cancel"),
        "const": _pair("constant"),
        "rank1const": lambda m, k, n, rng, s: (
            np.repeat(rng.random((m, 1)) + 0.1, k, 1),
            np.repeat(rng.random((1, n)) + 0.1, k, 0),
        ),
        "rank1pm": _pair("signed lines"),
        "hilbert": _pair("hilbert"),
    },
    "extreme": {
        "zeros": _pair("zeros"),
        "tiny": _of(lambda rng, shape, s: rng.standard_normal(shape) * s.tiny, _normal),
        # Every term of the sum underflows, most of them to zero.
        "vanishing": _of(lambda rng, shape, s: rng.standard_normal(shape) * s.tiny),
        "subnormal": _of(lambda rng, shape, s: rng.integers(-99, 100, shape) * s.smallest, _normal),
        "edge_of_underflow": _of(_edge_of_underflow),
        "huge": _huge,
        "overflow": _overflow,
    },
}
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {name: Family(name, tag, make) for tag, makers in _MAKERS.items() for name, make in makers.items()}
)
