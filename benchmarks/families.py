"""Families of operands: what real and adversarial matrices look like to a rounding bound.

Each family is a function of (m, k, n, rng, scales) that gives A (m x k) and B (k x n) in float64; `generate`
calls it by name and `operands` rounds to a type. The tag says what a rounding bound may expect:

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

try:
    from ml_dtypes import finfo
except ImportError:  # bfloat16 is optional, as it is in the library
    from numpy import finfo  # type: ignore[assignment]

Operands = tuple[np.ndarray, np.ndarray]
Generator = np.random.Generator


@dataclass(frozen=True)
class Scales:
    """How far a type reaches: what is large in float64 is Inf in float16."""

    largest: float
    smallest: float  # the smallest subnormal
    tiny: float  # small, but far from subnormal

    @classmethod
    def of(cls, dtype: Any) -> Scales:
        limits = finfo(np.dtype(dtype))
        tiny = {11: 1e-4, 53: 1e-300}.get(limits.nmant + 1, 1e-30)
        return cls(float(limits.max), float(limits.smallest_subnormal), tiny)

    def decades(self, wanted: float) -> float:
        """`wanted` decades, or as many as leave room for a product of two and a sum."""
        return min(wanted, float(np.log10(self.largest)) / 4)


@dataclass(frozen=True)
class Family:
    name: str
    tag: str
    make: Callable[[int, int, int, Generator, Scales], Operands]


_registry: dict[str, Family] = {}
FAMILIES: Mapping[str, Family] = MappingProxyType(_registry)


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


def _family(name: str, tag: str) -> Callable[..., Any]:
    def register(make: Callable[[int, int, int, Generator, Scales], Operands]) -> Any:
        _registry[name] = Family(name, tag, make)
        return make

    return register


def _spread(rng: Generator, decades: float, shape: Any) -> np.ndarray:
    return 10.0 ** rng.uniform(-decades, decades, shape)


# ---------------------------------------------------------------------------------------------------- generic


@_family("uniform01", "generic")
def _uniform01(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.random((m, k)), rng.random((k, n))


@_family("uniform-11", "generic")
def _uniform_symmetric(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.uniform(-1, 1, (m, k)), rng.uniform(-1, 1, (k, n))


@_family("normal", "generic")
def _normal(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.standard_normal((m, k)), rng.standard_normal((k, n))


@_family("normal+1", "generic")
def _normal_shifted(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.standard_normal((m, k)) + 1, rng.standard_normal((k, n)) + 1


@_family("loguni8", "generic")
def _loguni8(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return _loguniform(m, k, n, rng, scales.decades(8))


@_family("loguni2", "generic")
def _loguni2(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return _loguniform(m, k, n, rng, scales.decades(2))


def _loguniform(m: int, k: int, n: int, rng: Generator, decades: float) -> Operands:
    a, b = (_spread(rng, decades, shape) * rng.choice([-1.0, 1.0], shape) for shape in ((m, k), (k, n)))
    return a, b


@_family("illrowcol", "generic")
def _ill_rows_and_columns(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    d = scales.decades(6)
    return rng.standard_normal((m, k)) * _spread(rng, d, (m, 1)), rng.standard_normal((k, n)) * _spread(rng, d, (1, n))


@_family("illinner", "generic")
def _ill_inner(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    d = _spread(rng, scales.decades(6), k)
    return rng.standard_normal((m, k)) * d, rng.standard_normal((k, n)) / d[:, None]


@_family("outlier_rc", "generic")
def _outlier_row_and_column(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    a[rng.integers(m)] *= 10.0 ** scales.decades(6)
    b[:, rng.integers(n)] *= 10.0 ** scales.decades(6)
    a[:, rng.integers(k)] *= 10.0 ** scales.decades(4)
    return a, b


@_family("sparse1", "generic")
def _sparse(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    a, b = (rng.standard_normal(shape) * (rng.random(shape) < 0.01) for shape in ((m, k), (k, n)))
    return a, b


@_family("lowrank", "generic")
def _lowrank(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    normal = rng.standard_normal
    a = normal((m, 3)) @ normal((3, k)) + 1e-3 * normal((m, k))
    return a, normal((k, 3)) @ normal((3, n)) + 1e-3 * normal((k, n))


@_family("softmax_v", "generic")
def _softmax(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    z = rng.standard_normal((m, k)) * 3
    z = np.exp(z - z.max(1, keepdims=True))
    return z / z.sum(1, keepdims=True), rng.standard_normal((k, n))


@_family("relu_w", "generic")
def _relu(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.maximum(rng.standard_normal((m, k)), 0), rng.standard_normal((k, n)) * k**-0.5


@_family("mixedrows", "generic")
def _mixed_rows(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    a = rng.standard_normal((m, k))
    a[::100] = abs(a[::100])  # one row in a hundred sums up instead of averaging out
    return a, rng.standard_normal((k, n)) + 1


# ------------------------------------------------------------------------------------------------- structured


@_family("cancel_alt", "structured")
def _cancel_alternating(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    a, b, h = rng.random((m, k)) + 0.5, rng.random((k, n)) + 0.5, k // 2
    b[1::2] = -b[0 : 2 * h : 2] * (1 + 1e-6 * rng.standard_normal((h, n)))
    a[:, 1::2] = a[:, 0 : 2 * h : 2]
    return a, b


@_family("sorted", "structured")
def _sorted(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.sort(rng.standard_normal((m, k)), 1), np.sort(rng.standard_normal((k, n)), 0)


@_family("sine", "structured")
def _sine(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    x = 2 * np.pi * np.arange(k) / k
    a = np.sin(np.outer(rng.integers(1, 8, m), x) + rng.uniform(0, 6, (m, 1)))
    return a, np.cos(np.outer(x, rng.integers(1, 8, n)) + rng.uniform(0, 6, (1, n)))


@_family("digits", "structured")
def _digits(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # Pixels are 0..16; in sixteenths they are as exact and stay finite in float16.
    images = _digit_images() / 16
    pixels = np.arange(k) % images.shape[1]
    a = images[np.arange(m) % len(images)][:, pixels]
    return a, images[(np.arange(n) + 7) % len(images)][:, pixels].T


@cache
def _digit_images() -> np.ndarray:
    from sklearn.datasets import load_digits

    return np.asarray(load_digits().data)


@_family("dupcols", "structured")
def _duplicate_columns(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.random((m, k)), np.repeat(rng.random((k, 1)), n, 1)


@_family("arange", "structured")
def _arange(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.arange(m * k).reshape(m, k) / (m * k), np.arange(k * n).reshape(k, n) / (k * n)


@_family("int", "structured")
def _small_integers(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.integers(-8, 8, (m, k)).astype(float), rng.integers(-8, 8, (k, n)).astype(float)


@_family("counts", "structured")
def _counts(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # Non-negative integers as in images: exact until the sum leaves the mantissa.
    top = int(10 ** scales.decades(2.4))
    return rng.integers(0, top, (m, k)).astype(float), rng.integers(0, top, (k, n)).astype(float)


@_family("mixed_columns", "structured")
def _mixed_columns(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    b = rng.standard_normal((k, n)) * _spread(rng, scales.decades(8), (1, n))
    b[:, rng.random(n) < 0.25] = 0
    return rng.standard_normal((m, k)), b


@_family("onehot", "structured")
def _onehot(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # A permutation where m == k, a gather with repeats or holes otherwise.
    a = np.zeros((m, k))
    a[np.arange(m), rng.permutation(max(m, k))[:m] % k] = 1
    return a, rng.standard_normal((k, n))


# ----------------------------------------------------------------------------------------------- pathological


@_family("cancel_half", "pathological")
def _cancel_half(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # The second half of the sum takes away what the first has gathered.
    h = k // 2
    a, b = np.zeros((m, k)), np.zeros((k, n))
    a[:, :h], b[:h] = rng.random((m, h)) + 0.5, rng.random((h, n)) + 0.5
    a[:, h : 2 * h] = a[:, :h] * (1 + 1e-6 * rng.standard_normal((m, h)))
    b[h : 2 * h] = -b[:h] * (1 + 1e-6 * rng.standard_normal((h, n)))
    return a, b


@_family("const", "pathological")
def _constant(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.full((m, k), 0.1), np.full((k, n), 0.3)


@_family("rank1const", "pathological")
def _constant_rows(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.repeat(rng.random((m, 1)) + 0.1, k, 1), np.repeat(rng.random((1, n)) + 0.1, k, 0)


@_family("rank1pm", "pathological")
def _constant_rows_signed(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.repeat(rng.standard_normal((m, 1)), k, 1), np.repeat(rng.standard_normal((1, n)), k, 0)


@_family("hilbert", "pathological")
def _hilbert(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    inner = np.arange(k)
    return 1 / (np.arange(m)[:, None] + inner + 1.0), 1 / (inner[:, None] + np.arange(n) + 1.0)


# ---------------------------------------------------------------------------------------------------- extreme


@_family("zeros", "extreme")
def _zeros(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return np.zeros((m, k)), np.zeros((k, n))


@_family("tiny", "extreme")
def _tiny(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.standard_normal((m, k)) * scales.tiny, rng.standard_normal((k, n))


@_family("vanishing", "extreme")
def _vanishing(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # Every term of the sum underflows, most of them to zero.
    return rng.standard_normal((m, k)) * scales.tiny, rng.standard_normal((k, n)) * scales.tiny


@_family("subnormal", "extreme")
def _subnormal(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    return rng.integers(-99, 100, (m, k)) * scales.smallest, rng.standard_normal((k, n))


@_family("edge_of_underflow", "extreme")
def _edge_of_underflow(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # Terms from a hundred thousand times the smallest subnormal down to below it.
    root = np.sqrt(scales.smallest)
    a, b = (rng.standard_normal(s) * root * 10 ** rng.uniform(-2, 2, s) for s in ((m, k), (k, n)))
    return a, b


@_family("huge", "extreme")
def _huge(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # sum |a||b| stays below a quarter of the largest number, from a balanced to a lopsided split of the
    # range.
    product, share = scales.largest / 4 / k, rng.uniform(0.5, 0.95)
    scale = product**share
    return rng.uniform(-1, 1, (m, k)) * scale, rng.uniform(-1, 1, (k, n)) * (product / scale)


@_family("overflow", "extreme")
def _overflow(m: int, k: int, n: int, rng: Generator, scales: Scales) -> Operands:
    # A random element overflows with a probability of about one in eight.
    scale = np.sqrt(scales.largest / 1.5 / np.sqrt(k))
    return rng.standard_normal((m, k)) * scale, rng.standard_normal((k, n)) * scale
