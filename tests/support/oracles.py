"""Two judges of a product that share no code with the library.

1. `Exact`: every element against the product in a wider type, within the rigorous rounding bound of
   N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, section 3.5:
   |fl(A B) - A B| <= gamma_k |A||B| in any order of summation, with gamma_k = k u / (1 - k u).
   alpha and beta add two roundings, a narrow output type one of its own, underflow k subnormals.
2. `rows_outside`: the random-vector check of R. Freivalds (1977): C x against A (B x), in three passes.

The first bound holds for every correct library whatever it does inside: an element outside it is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from tests.support.cases import finfo

WIDE = np.longdouble


@dataclass(frozen=True)
class Exact:
    """The exact result alpha A B + beta c and how far a computed one may be from it, element by element.

    All arrays are m x n and scaled by 2^-(row_i + column_j), so that they neither overflow nor vanish.

    Attributes
    ----------
    value, bound : the result in the wide type, and the largest distance that rounding explains
    highest, lowest : every partial sum, in any order of summation, lies in [-lowest, highest]
    exponent : row_i + column_j
    nonfinite : where an operand holds NaN or Inf, and so must the result
    dtype : type of the result
    """

    value: np.ndarray
    bound: np.ndarray
    highest: np.ndarray
    lowest: np.ndarray
    exponent: np.ndarray
    nonfinite: np.ndarray
    dtype: np.dtype[Any]

    @classmethod
    def of(
        cls,
        a: np.ndarray,
        b: np.ndarray,
        c: np.ndarray | None = None,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Exact:
        """Of `alpha * a @ b + beta * c`; alpha and beta must be numbers that the type of a and b holds
        exactly."""
        dtype = np.result_type(a, b)
        k = a.shape[1]
        # float64 is wide enough for the narrower types, and much faster.
        wide = np.dtype(np.float64) if dtype.itemsize < 8 else np.dtype(WIDE)
        a, nonfinite_rows, rows = _scaled(a, 1, wide)
        b, nonfinite_columns, columns = _scaled(b, 0, wide)
        exponent = rows + columns
        nonfinite = nonfinite_rows | nonfinite_columns
        with np.errstate(over="ignore", under="ignore"):
            value = a @ b if alpha >= 0 else -a @ b
            magnitude = abs(a) @ abs(b)
            # Before alpha scales it down, the sum itself may have left the range.
            highest, lowest = (max(1, abs(alpha)) * (magnitude + sign * value) / 2 for sign in (1, -1))
            value, magnitude = abs(alpha) * value, abs(alpha) * magnitude
            if beta != 0 and c is not None:
                nonfinite = nonfinite | ~np.isfinite(c)
                term = np.ldexp(beta * np.where(np.isfinite(c), c, 0).astype(wide), -exponent)
                value, magnitude = value + term, magnitude + abs(term)
                highest, lowest = highest + np.maximum(term, 0), lowest + np.maximum(-term, 0)
            bound = (_gamma(k + 2, _unit(_accumulator(dtype))) + _gamma(k + 2, _unit(wide))) * magnitude
            subnormals = abs(alpha) * k + 2
            bound += np.ldexp(wide.type(subnormals * _smallest(_accumulator(dtype))), -exponent)
            bound += subnormals * _smallest(wide)
            if dtype.itemsize < 4:  # accumulated in float32, rounded once
                bound += _unit(dtype) * (abs(value) + bound) + np.ldexp(wide.type(_smallest(dtype)), -exponent)
        return cls(value, bound, highest + bound, lowest + bound, exponent, nonfinite, dtype)

    def outside(self, c: np.ndarray) -> np.ndarray:
        """Boolean m x n: the elements of the computed product `c` that rounding does not explain."""
        if c.shape != self.value.shape:
            raise ValueError(f"the product has shape {c.shape}, its operands give {self.value.shape}")
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            found = c.astype(self.value.dtype)  # invalid: a signalling NaN
            error = abs(np.ldexp(found, -self.exponent) - self.value)
            ok = (error <= self.bound) & np.isfinite(found)
            # An Inf that the exact result may round to is right.
            reach = np.sign(found) * self.value + self.bound
            ok |= np.isinf(found) & (reach >= np.ldexp(_overflow(self.dtype), -self.exponent))
            # So is one that a partial sum may have reached, and NaN = Inf - Inf where both ends are in reach.
            limit = np.ldexp(_overflow(_accumulator(self.dtype)), -self.exponent)
            high, low = self.highest >= limit, self.lowest >= limit
            ok |= np.where(np.isnan(found), high & low, np.where(found > 0, high, low) & np.isinf(found))
        return np.where(self.nonfinite, np.isfinite(found), ~ok)


def elements_outside(
    c: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    addend: np.ndarray | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> np.ndarray:
    """Boolean m x n: the elements of `c` that cannot be a rounded alpha a b + beta addend. See `Exact`."""
    return Exact.of(a, b, addend, alpha=alpha, beta=beta).outside(c)


def rows_outside(c: np.ndarray, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Boolean m: the rows of `c` whose random combination differs from that of a b by more than rounding.

    Weights are random signs times 1 to 2, so that no element can hide and no two equal and opposite errors
    cancel for sure. For finite operands whose product does not overflow.
    """
    dtype = np.result_type(a, b)
    k, n = b.shape
    a, _, rows = _scaled(a, 1, np.dtype(WIDE))
    b, _, columns = _scaled(b, 0, np.dtype(WIDE))
    x = (rng.choice([-1.0, 1.0], n) * rng.uniform(1, 2, n)).astype(WIDE)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cx = np.ldexp(c.astype(WIDE), -(rows + columns)) @ x
        abx = a @ (b @ x)
        magnitude = abs(a) @ (abs(b) @ abs(x))
        relative = _gamma(k + 2, _unit(_accumulator(dtype)))
        if dtype.itemsize < 4:
            relative += _unit(dtype) * (1 + relative)
        # Both combinations are rounded too, each element in at most k + n + 2 operations.
        relative += 2 * _gamma(k + n + 2, _unit(np.dtype(WIDE))) * (1 + relative)
        subnormals = (k + 2) * _smallest(_accumulator(dtype)) + _smallest(dtype)
        underflow = np.ldexp(WIDE(subnormals), -(rows + columns)) @ abs(x) + n * k * _smallest(np.dtype(WIDE))
        ok = (abs(cx - abx) <= relative * magnitude + underflow) & np.isfinite(cx)
    return ~ok


def exact_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product as an object array of fractions: no rounding at all, for small matrices."""
    a, b = (np.vectorize(Fraction, otypes=[object])(x.astype(np.float64)) for x in (a, b))
    return a @ b


def _scaled(x: np.ndarray, axis: int, wide: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # x with each line divided by the power of two of its largest element; the lines with NaN or Inf; the
    # exponents.
    with np.errstate(invalid="ignore"):
        x = x.astype(wide)
    finite = np.isfinite(x)
    x = np.where(finite, x, 0)
    exponent = np.frexp(abs(x).max(axis, keepdims=True, initial=0))[1]
    with np.errstate(under="ignore"):
        return np.ldexp(x, -exponent), ~finite.all(axis, keepdims=True), exponent


def _accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def _unit(dtype: np.dtype[Any]) -> float:
    return float(finfo(dtype).eps) / 2


def _smallest(dtype: np.dtype[Any]) -> Any:
    return dtype.type(finfo(dtype).smallest_subnormal) if dtype == WIDE else float(finfo(dtype).smallest_subnormal)


def _overflow(dtype: np.dtype[Any]) -> Any:
    # From here on rounding to nearest gives Inf: the largest number and half a unit in its last place.
    largest = WIDE(float(finfo(dtype).max))
    return largest + largest * _unit(dtype) / 2


def _gamma(k: int, u: float) -> float:
    if not k * u < 1:
        raise ValueError(f"k = {k} is too long for the bound gamma_k at u = {u:.2g}; take fewer columns of A")
    return k * u / (1 - k * u)
