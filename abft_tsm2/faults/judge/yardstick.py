"""The judge's yardstick: how far rounding moves the weighted sum of a line, worked out without the package's bounds.

A line of a clean result has the rounding errors e_j, known from a result in more precision than a long double has. A
vector x of the judge's own, of random signs and of moduli in [1, 1.5) times the powers of two c_j in the line's
weights, has the residual ``sum_j x_j e_j``; its root mean square over all such vectors is
``sqrt(19/12 sum_j (c_j e_j)^2)``.
Some data round little, or not at all; the yardstick is that, and in quadrature a part of what rounding may do
(`LEAST`: N. J. Higham, T. Mary, SIAM J. Sci. Comput. 41, 2019, A2815).

A line is excused for what it does not find up to `REACH` yardsticks, however large its bound is; and a bound that is a
few times that part of what rounding may do is too small. ``python -m benchmarks.yardsticks`` measures all this anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.judge.oracle import ReferenceArithmetic, Tf32

Array = Any
MEAN_SQUARE = 19 / 12  # of a modulus in [1, 1.5)
CHECKSUM_UNIT = FLOATS["float64"].unit_roundoff
# Parts of what rounding does: rounding errors of normal data have a root mean square of 0.3 u sqrt(k) |A_i||B o x|, as
# BLAS adds up to some hundred terms. The others have the same share in what may be expected of them.
LEAST = 0.3  # units of u sqrt(k)
LEAST_SUMS = 0.056  # units of u_c (sqrt(k) + sqrt(2n)): of the checksums
LEAST_PARTIAL = 0.3  # units of the roundoff of float32: of checksums of 16-bit operands on a GPU
LEAST_STORED = 0.3  # units of the roundoff of what is rounded last
LEAST_INPUT = 0.6  # units of the roundoff of TF32
LEAST_TRUNCATED = 0.0075  # units of u k, of tensor cores
TF32_UNIT = 2.0**-11
PARTS = 4 / LEAST
"""Of a documented bound: so many times what rounding is expected to do at least; half of it is too small."""
REACH: Mapping[str, float] = {"float64": 36.0, "float32": 16.0}
"""By the type of the sums: what a line promises to find at most, in yardsticks. Measured over all families of products,
shapes of 1 to 4096 (`benchmarks.yardsticks`): 31.5 in float64, where few terms are summed over long lines and checksums
round as much as the product, 14.9 in float32."""

FEWEST = 16  # operations that an element of a factorisation has at least
FACTOR_REACH, SOLUTION_REACH = 64.0, 256.0
"""The same of factorisations and solutions: bounds are up to 40 yardsticks, limits of solutions 164; see
`abft_tsm2.faults.analysis.sharpness.MEASURED`. Matrices whose factors grow by many decades have more (gfpp)."""


class Yardstick(NamedTuple):
    """Of each line: the yardstick, and the part of it that rounding has whatever the data are."""

    noise: Array
    least: Array


def noise_of_product(
    how: ReferenceArithmetic, k: int, errors: Array, powers: Any, products: Array, stored: Array, xp: Any
) -> Yardstick:
    """The yardsticks of the lines of a product.

    Parameters
    ----------
    how : ReferenceArithmetic
        How it was computed.
    k : int
        Terms of an element.
    errors : (lines, n) array
        Of the product without a fault.
    powers : (n,) array
        The powers of two in the weights.
    products, stored : (lines,) arrays
        ``||A_i||B o x||`` and ``||C_i o x||``, with any vector of such moduli.
    xp : module
    """
    n, u = powers.size, FLOATS[how.sums].unit_roundoff
    scale = xp.maximum(products, xp.minimum(stored, math.sqrt(k) * products))
    partial = LEAST_PARTIAL * FLOATS["float32"].unit_roundoff * (xp is not np and how.truncating)
    part = math.hypot(LEAST * u * math.sqrt(k), LEAST_SUMS * CHECKSUM_UNIT * (math.sqrt(k) + math.sqrt(2 * n)), partial)
    least = (part + LEAST_TRUNCATED * u * k * how.truncating) * scale
    if how.rounds:
        least = least + LEAST_STORED * FLOATS[how.out].unit_roundoff * stored
    if isinstance(how, Tf32):
        least = least + LEAST_INPUT * TF32_UNIT * products
    tiny = LEAST * ((k + 2) * FLOATS[how.sums].smallest_normal + FLOATS[how.out].smallest_normal)
    found = (errors * errors) @ xp.asarray(MEAN_SQUARE * powers * powers)
    return Yardstick(xp.sqrt(found + least * least) + tiny * float(powers.sum()), least)


def noise_of_factors(errors: Array, sizes: Array, dtype: Any, terms: int) -> Array:
    """The yardstick of each line of a factorisation, or of the residuals of a solution.

    Parameters
    ----------
    errors, sizes : (lines,) arrays
        Weighted norms of its errors without a fault, and of what it is made of: a line of A.
    dtype : dtype
        Of the factors.
    terms : int
        Operations on an element.
    """
    kind = FLOATS[np.dtype(dtype).name]
    count = terms + FEWEST
    least = LEAST * (kind.unit_roundoff * math.sqrt(count) * sizes + count * kind.smallest_normal)
    return np.asarray(np.hypot(errors, least) + np.finfo(np.float64).tiny)
