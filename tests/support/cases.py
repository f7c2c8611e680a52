"""The one generator of shapes x orders x dtypes.

Why this grid
-------------
*Shapes.* Each of m, k and n is a regime of its own for a checked product: k sets the rounding bound, n (or m)
the length of a checksum, m (or n) the number of lines checked. So the fixed grid holds: 1 in every position
(a checksum of one element, a product that is one multiplication), primes (no block size divides them), sizes
one below, at and above a power of two (the ends of row blocks), one long dimension with two short ones in
each position, and a square one for the ordinary case. What depends on k alone (bounds) appears up to
k = 100000 in the drawn cases, where the other two dimensions are then short.

*Orders.* What a library may get wrong with layout is decided by the strides: unit stride in rows (C), in
columns (F), a leading dimension larger than the row (padded), no unit stride at all (strided), a transposed
view of a padded buffer (transposed), and negative strides (reversed). The two operands mix freely, but an
order matters on its own: the fixed grid gives each shape one order pair in turn and each order pair one
shape, instead of the full product, which is thirteen times larger and finds no more.

*Dtypes.* The four types that the product takes; bfloat16 only where ml_dtypes is installed.

The fixed grid (`cases`) is for unit tests, the drawn cases (`draw`) for sweeps: most of them small, because
mistakes at the edges show in small shapes and because many seeds matter more than large sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import numpy as np

try:
    import ml_dtypes
except ImportError:  # the type is optional, as it is in the library
    ml_dtypes = None

DTYPES: tuple[np.dtype[Any], ...] = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16))
if ml_dtypes is not None:
    DTYPES += (np.dtype(ml_dtypes.bfloat16),)

ORDERS = ("C", "F", "padded", "strided", "transposed", "reversed")

SHAPES = (
    (1, 1, 1),
    (1, 7, 1),
    (7, 1, 5),
    (1, 16, 33),
    (33, 16, 1),
    (3, 5, 2),
    (13, 17, 19),
    (31, 32, 33),
    (64, 64, 64),
    (127, 129, 128),
    (1000, 3, 4),
    (4, 1000, 3),
    (3, 4, 1000),
)


@dataclass(frozen=True)
class Case:
    """One product: its shape, its type and the memory layout of the two operands."""

    m: int
    k: int
    n: int
    dtype: np.dtype[Any]
    order_a: str = "C"
    order_b: str = "C"

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}-{self.dtype.name}-{self.order_a}-{self.order_b}"


@dataclass(frozen=True)
class Regime:
    """Ranges from which (m, k, n) are drawn, log-uniformly; `weight` is its share of the draws."""

    name: str
    m: tuple[int, int]
    k: tuple[int, int]
    n: tuple[int, int]
    weight: float


REGIMES = (
    Regime("tiny", (1, 8), (1, 8), (1, 8), 0.25),
    Regime("small", (1, 64), (1, 64), (1, 64), 0.35),
    Regime("medium", (16, 200), (16, 200), (16, 200), 0.25),
    Regime("long k", (1, 16), (1_000, 20_000), (1, 16), 0.05),
    Regime("longest k", (1, 6), (100_000, 100_000), (1, 6), 0.01),
    Regime("tall", (1_000, 20_000), (1, 32), (1, 16), 0.025),
    Regime("wide", (1, 16), (1, 32), (1_000, 20_000), 0.025),
    Regime("large", (200, 600), (200, 600), (200, 600), 0.04),
)


def finfo(dtype: np.dtype[Any]) -> Any:
    """Limits of a floating-point type, bfloat16 included."""
    return np.finfo(dtype) if dtype.kind == "f" else ml_dtypes.finfo(dtype)


def arrange(x: np.ndarray, order: str) -> np.ndarray:
    """A matrix equal to the 2-D `x` whose memory has the given order; what surrounds it in its buffer is
    NaN."""
    rows, columns = x.shape
    if order == "C":
        return np.array(x, order="C")
    if order == "F":
        return np.array(x, order="F")
    if order == "padded":
        view = _nan((rows, columns + 5), x.dtype)[:, 2 : 2 + columns]
    elif order == "strided":
        view = _nan((2 * rows, 3 * columns), x.dtype)[::2, 1::3]
    elif order == "transposed":
        view = _nan((columns, rows + 3), x.dtype)[:, :rows].T
    elif order == "reversed":
        view = _nan((rows, columns), x.dtype)[::-1, ::-1]
    else:
        raise ValueError(f"order {order!r} is not one of {ORDERS}")
    view[...] = x
    return view


def cases(dtypes: Iterable[np.dtype[Any]] = DTYPES) -> list[Case]:
    """The fixed grid: every shape and every pair of orders with every dtype, paired in turn."""
    pairs = list(product(ORDERS, ORDERS))
    turns = list(zip(cycle(SHAPES), pairs, strict=False))
    return [Case(*shape, dtype, *pair) for dtype in dtypes for shape, pair in turns]


def draw(
    rng: np.random.Generator,
    dtypes: Iterable[np.dtype[Any]] = DTYPES,
    regimes: Iterable[Regime] = REGIMES,
) -> Case:
    """One random case. Half precision gets half of the weight of the other types."""
    dtypes, regimes = tuple(dtypes), tuple(regimes)
    weight = np.array([regime.weight for regime in regimes])
    regime = regimes[rng.choice(len(regimes), p=weight / weight.sum())]
    m, k, n = (_log_uniform(rng, *limits) for limits in (regime.m, regime.k, regime.n))
    share = np.array([1.0 if dtype.itemsize > 2 else 0.5 for dtype in dtypes])
    dtype = dtypes[rng.choice(len(dtypes), p=share / share.sum())]
    return Case(m, k, n, dtype, str(rng.choice(ORDERS)), str(rng.choice(ORDERS)))


def _nan(shape: tuple[int, int], dtype: np.dtype[Any]) -> np.ndarray:
    # A read outside the operand then shows at once.
    return np.full(shape, np.nan, dtype)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return min(high, int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))
