"""Bound the rounding of single elements of products, factorisations and solutions, whatever its pattern.

Unlike those of `abft_tsm2.checksum.bounds` for whole lines, they take nothing for random: an honest result of any order
of additions never exceeds them, underflow included. Sources: N. J. Higham, Accuracy and Stability of Numerical
Algorithms, 2002.
"""

from __future__ import annotations

from typing import Any

from abft_tsm2.arrays import FloatType
from abft_tsm2.checksum.bounds import Arithmetic, lost
from abft_tsm2.core.flushing import flushes


def gamma(stored: FloatType, terms: Any) -> Any:
    """n u / (1 - n u) of n operations (Higham 2002, lemma 3.1)."""
    n = terms * stored.unit_roundoff
    return n / (1 - n)


def factored_rounding(stored: FloatType, terms: Any) -> Any:
    """What ``|L| |U|`` is multiplied with: ``|PA - LU| <= gamma_k |L| |U|`` for an element with k terms (Higham 2002,
    theorem 9.3), and two operations for libraries that multiply by the reciprocal of a pivot."""
    return gamma(stored, terms + 2)


def compared_rounding(stored: FloatType, terms: Any) -> Any:
    """What ``|A| + 2 |L| |U|`` is multiplied with where ``PA - LU`` is computed in the type of the factors: that takes
    another ``gamma_k (|A| + |L| |U|)`` (Higham 2002, eq. 3.13)."""
    return factored_rounding(stored, terms)


def definite_rounding(stored: FloatType, terms: Any) -> Any:
    """The same of ``|A - L L'| <= gamma_k+1 |L||L|'`` (Higham 2002, theorem 10.3)."""
    return gamma(stored, terms + 3)


def substituted_rounding(stored: FloatType, terms: Any) -> Any:
    """``|b - T x| <= gamma_n |T| |x|`` of substitution in any order (Higham 2002, theorem 8.5); two operations as in
    `factored_rounding`."""
    return gamma(stored, terms + 2)


def solved_rounding(stored: FloatType, terms: Any) -> Any:
    """``|b - A x| <= gamma_3n |L| |U| |x|`` (Higham 2002, theorem 9.4)."""
    return gamma(stored, 3 * (terms + 2))


def underflow(stored: FloatType, terms: int, pivots: Any) -> Any:
    """What `terms` operations may lose to underflow: `lost` in a product or a difference, in a quotient as much times
    the pivot that it was divided by (Higham 2002, eq. 2.8). `pivots`: moduli, at least 1."""
    return (terms + 2) * lost(stored) * pivots


def flushed(stored: FloatType) -> float:
    """How large an operand may be that counts as zero: what a product may lose of its other factor; 0.0 where the
    processor does not do that."""
    return stored.smallest_normal if flushes() else 0.0


def largest_multiplier(stored: FloatType) -> float:
    """|l| <= 1 under partial pivoting, but for the rounding of a reciprocal and of the product with it."""
    return 1 + 4 * stored.unit_roundoff


def smallest_pivot(stored: FloatType) -> float:
    """LAPACK and OpenBLAS (getf2) do not divide by a pivot whose reciprocal may overflow, below the smallest normal
    number; twice that, for its own rounding."""
    return 2 * stored.smallest_normal


def skipped_pivots(stored: FloatType, rows: Any) -> Any:
    """How far P A - L U may be off where such pivots are not divided by: what stays in their columns, as elements and
    as multipliers, is no larger than they are. `rows`: the sums of |u| over the rows of those pivots."""
    return 2 * smallest_pivot(stored) * (1.0 + rows)


def sequential_bound(
    a: Arithmetic, *, partial_sums: Any, products: Any, result: Any, added: Any, underflow: Any
) -> Any:
    """What summing an element in order may leave at most: a running error bound (Higham 2002, sec. 3.3).

    ``|c_ij - exact| <= u (sum_l |S_l| + sum_l |l_il r_lj|) + 2 u (|S_k| + |beta c0_ij|) + rounding of what is stored``

    Parameters
    ----------
    partial_sums, products : arrays
        ``sum_l |S_l|`` over the partial sums S_l, and the sum of the magnitudes of the terms.
    result, added : arrays
        ``|S_k|`` and ``|beta c0_ij|``.
    underflow : array
        ``Arithmetic.underflow`` in the units of the others.
    """
    unit = a.u * (2 if a.truncating else 1)
    whole = result + added
    summed = unit * (partial_sums + products + 2 * whole)
    return summed + 2 * a.u_out * whole + a.u_added * added + 4 * a.u_in * products + underflow
