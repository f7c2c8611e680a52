"""Bound how far rounding alone moves a checksum: every tolerance of the package, with its source.

With ``s = B v``, ``t = A s`` and ``u = C v``, row i of ``C = alpha A B + beta C0`` has the residual
``r_i = u_i - alpha t_i - beta (C0 v)_i = sum_j v_j E_ij + checksum rounding``, E being the rounding error of C.

*Statistical bound* (detection): rounding errors of an inner product of length k behave like ``u sqrt(k)`` times the
2-norm of its partial sums (Higham and Mary, SIAM J. Sci. Comput. 41 (2019) A2815), and random signs make n of them
add like ``sqrt(n)`` (Hoeffding, J. Amer. Statist. Assoc. 58 (1963) 13)::

    tau_i = f max(|alpha| P2_i, ||C_i o v||_2, |beta| ||C0_i o v||_2) + 8 u_in |alpha| P2_i
            + 4 u_out (||C_i o v||_2 [+ |beta| ||C0_i o v||_2 on a GPU]) + (k tiny + tiny_out) ||v||_1
    P2_i^2 = sum_l a_il^2 ||B_l o v||_2^2
    ||C_i o v||_2 <= 1.01 (sqrt(k) |alpha| P2_i + |beta| ||C0_i o v||_2), or the line is wrong
    f = sqrt((4 u sqrt(k))^2 + (3/4 u_c (sqrt(k) + sqrt(2 n)))^2 [+ (4 u_p)^2])  [+ 0.1 u k where the adder truncates]

A part of P2 may fall far short of the whole. Then ``||C_i o v||_2`` counts as it is up to so many times the predicted
checksum p_i, which no fault of C changes: ``|p_i| <= sqrt(n) ||C_i o v||_2`` of a right line (Cauchy and Schwarz), and
such a bound is no more than a 16th of p_i.

C's rounding and the checksum's are independent of each other: their parts of f add in quadrature. u_p is the roundoff
of checksums whose terms are summed in float32 a few at a time, as the kernels do with 16-bit elements; u_in that of
operands which the product rounds before it multiplies them (TF32). The factor 4 is
measured: the largest residual of clean products is 2.6 units of ``u sqrt(k)`` on generic data, over BLAS, sequential
summation and cuBLAS. Structured data may exceed it (a chain of equal terms rounds in one direction); that is a
suspicion, not a verdict.

*Rigorous bound* (verdict on an element): ``|c_ij - exact| <= gamma_{k+2} (|alpha| |A| |B| + |beta| |C0|)_ij`` (Higham,
Accuracy and Stability of Numerical Algorithms, 2002, eq. 3.5 and sec. 3.5).

*Factorisations.* In ``P A = L U`` element (i, c) goes through one multiplication and subtraction for each column
eliminated before it; each rounds by at most u times the element as it then is (Higham 2002, theorem 9.3 and eq. 9.6).
Rounding errors of that many operations, weighted with random signs and added over a row, are a random walk::

    tau_i = f u sqrt(sum over eliminations of ||A_i^(l) o v||^2)      f = 3.6 (float64), 1.8 (float32, sums in float64)

The norm of a row of the trailing matrix need not be computed: random signs make the square of the row's carried
checksum an unbiased estimate of it (the projections of Johnson and Lindenstrauss, Contemp. Math. 26 (1984) 189, with a
single column), and the norm of A's own row is its floor. Columns likewise, with w. On normal data the bound is 7 to 9
standard deviations of clean residuals, n = 100 to 4096. Where it is exceeded, norms are computed instead of estimated;
what is flagged all the same is computed again and judged by four times that and the rigorous bound.

`tiny` is what one underflow may cost: the smallest subnormal, or the smallest normal where subnormals are flushed. The
processor is asked whether it does that, in each call: see `abft_tsm2.core.flushing`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import FLOATS, FloatType, Namespace, type_name
from abft_tsm2.checksum.weights import MEAN_SQUARE
from abft_tsm2.core.flushing import flushes

DETECT = 4.0  # units of u sqrt(k): measured largest on generic data 2.6, see above
TRUNCATION = 0.1  # units of u k: tensor cores truncate; measured largest on 16-bit inputs 0.06
INPUT = 8.0  # units of u_in: measured largest on generic data 3.3
PARTIAL_SUMS = 4.0  # units of u_p: s, t and u have a rounding or two each in float32 before they are added in float64
CHECKSUM = 0.75  # units of u_c (sqrt(k) + sqrt(2n)): chosen; clean float64 products stay a factor 4 below the bound
_FEW_TERMS = 12.0  # units of u_c
# From this k on checksums of float32 products may take float32 partial sums: 1.3 to 5 u rms each on normal data, as the
# processor's BLAS adds, beside 4.8 u of the product's own rounding at k = 512 and 6.3 u at 2048; the bound is
# 4 sqrt(k) u = 90 u and more.
PARTIAL = 512
SLACK = 1.01  # on a norm that Minkowski's inequality bounds: its rounding, that of bfloat16 included
TF32_ROUNDOFF = 2.0**-11  # 11 significant bits
OUTLIER = 8.0  # an element this many times further off than nine tenths of its row is not rounding
# Lines of a product that is computed a second time, and rounded otherwise, are measured by the errors of both: of
# lines of one length they differ by a factor of 2 at most on generic data, and a residual beyond its bound needs an
# error of a quarter of it at least (random signs: Hoeffding).
STANDS_OUT = 4.0
CHECKSUM_UNIT = FLOATS["float64"].unit_roundoff  # every checksum is summed in float64


@dataclass(frozen=True)
class Arithmetic:
    """How C was computed, as far as rounding goes.

    Attributes
    ----------
    accumulator : FloatType
        The format the products are summed in.
    stored : FloatType
        The format of C.
    truncating : bool
        Whether sums are truncated instead of rounded (tensor cores with 16-bit inputs).
    flushes, flushes_stored : bool
        Whether subnormal sums become zero; and, where C's format is narrower, subnormal elements that it is rounded to.
    u_in : float
        Unit roundoff of the operands, where the product rounds them to fewer digits than they have; else 0.
    partial : bool
        Whether checksums are summed in float32 a few terms at a time, however short they are.
    """

    accumulator: FloatType
    stored: FloatType
    truncating: bool = False
    flushes: bool = False
    flushes_stored: bool = False
    u_in: float = 0.0
    partial: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Worked out once: formulas are looked up by it."""
        flushes = self.flushes, self.flushes_stored
        return hash((self.accumulator, self.stored, self.truncating, flushes, self.u_in, self.partial))

    @functools.cached_property
    def u(self) -> float:
        return self.accumulator.unit_roundoff

    @functools.cached_property
    def u_out(self) -> float:
        """Unit roundoff of the extra rounding on storing C."""
        return self.stored.unit_roundoff if self.stored.precision < self.accumulator.precision else 0.0

    @functools.cached_property
    def u_added(self) -> float:
        """Unit roundoff of alpha A B before beta C0 is added: cuBLAS may round it as it stores C."""
        return self.u_out if self.truncating else 0.0

    @functools.cached_property
    def parts_from(self) -> float:
        """From which k on checksums may be summed from float32 parts."""
        return PARTIAL if self.accumulator.bits == 32 else math.inf

    def underflow(self, k: int, alpha: float = 1.0) -> float:
        """The most that underflow takes from one element: in k products, in scaling and adding, in storing."""
        a, c = self.accumulator, self.stored
        summed = a.smallest_normal if self.flushes else a.smallest_subnormal
        stored = c.smallest_normal if self.flushes_stored else c.smallest_subnormal
        return (k * max(1.0, abs(alpha)) + 2) * summed + (stored if self.u_out else 0.0)


def lost(kind: FloatType) -> float:
    """What one underflow costs at most on this processor, in the mode it is in."""
    return kind.smallest_normal if flushes() else kind.smallest_subnormal


_NORMAL = FLOATS["float64"].smallest_normal


def lost_in_checksum() -> float:
    """What no bound falls below: what underflow takes from a checksum itself, `lost` of float64."""
    return _NORMAL if flushes() else TINIEST


class BoundFactors(NamedTuple):
    """What the statistical bound is made of, for one product.

    Attributes
    ----------
    factor, input_factor, out_factor : float
        Of ``max(|alpha| P2, ||C o v||, |beta| ||C0 o v||)``, of ``|alpha| P2``, of ``||C o v||``.
    root : float
        ``||C o v||`` cannot exceed so many ``|alpha| P2``, but for C0.
    underflow : float
        Of ``||v||_1``.
    """

    factor: float
    input_factor: float
    out_factor: float
    root: float
    underflow: float

    def of_lines(self, products: Any, underflow: float) -> Any:
        """`statistical_bound` of lines of which no more is known."""
        return self.factor * products + (self.input_factor * products + underflow if self.input_factor else underflow)

    def of_line(
        self, products: float, stored: float, added: float, underflow: float, more: float
    ) -> tuple[float, float]:
        """`statistical_bound` and `largest_norm` of a line in plain numbers, a few of which take less time than arrays.
        `more`: so many times `products` may be the norm that they are a part of."""
        largest = self.root * more * products + SLACK * added + underflow
        norm = min(stored, largest)
        rounded = self.input_factor * products + self.out_factor * norm + underflow
        return self.factor * max(products, added, norm) + rounded, largest

    def largest(self, products: Any, added: Any, underflow: float, more: float) -> Any:
        """`largest_norm` of lines, of which `products` times `more` is P2."""
        found = (self.root * more) * products
        if added is not None:
            found += SLACK * added
        found += underflow
        return found

    def of_norms(self, products: Any, norm: Any, added: Any, underflow: float, added_factor: float = 0.0) -> Any:
        """`statistical_bound` of lines, whose ``||C_i o v||``, cut to `largest`, may not be known yet; `added_factor`:
        of `added`, as it is rounded."""
        scale = products if added is None else np.maximum(products, added)
        if norm is None:
            tau = self.factor * scale
        else:
            tau = np.maximum(scale, norm)
            tau *= self.factor
            if self.out_factor:
                tau += self.out_factor * norm
            if added is not None and added_factor:
                tau += added_factor * added
        if self.input_factor:
            tau += self.input_factor * products
        tau += underflow
        return tau


def bound_factors(a: Arithmetic, k: int, n: int, alpha: float = 1.0) -> BoundFactors:
    """The factors of `statistical_bound`, for kernels that work it out line by line."""
    root = SLACK * math.sqrt(k)
    return BoundFactors(statistical_factor(a, k, n), INPUT * a.u_in, 4 * a.u_out, root, a.underflow(k, alpha))


@functools.cache
def arithmetic(
    inputs: str, output: str, *, library: str = "numpy", tf32: bool = False, flushed: bool = False
) -> Arithmetic:
    """The arithmetic of a product of promoted input type `inputs` and result type `output`, both by name.

    `tf32`: float32 operands are rounded to 11 significant bits, as tensor cores do when they are asked to. `flushed`:
    the processor takes subnormal numbers for zero, but not where it rounds to 16 bits; a GPU always may.
    """
    half = FLOATS[inputs].bits < 32
    gpu = library == "cupy"
    return Arithmetic(
        FLOATS["float32" if half else inputs],
        FLOATS[output],
        truncating=gpu and (half or tf32),
        flushes=gpu or flushed,
        flushes_stored=gpu,
        u_in=TF32_ROUNDOFF if tf32 else 0.0,
        partial=gpu and half,
    )


def statistical_factor(a: Arithmetic, k: int, n: int) -> float:
    """What multiplies ``max(|alpha| P2, ||C o v||, |beta| ||C0 o v||)`` in the statistical bound.

    k counts the additions of one element: the inner dimension, and two more when alpha or beta scale and add.
    """
    product = a.u * DETECT * math.sqrt(k)
    checksum = CHECKSUM_UNIT * CHECKSUM * (math.sqrt(k) + math.sqrt(2 * n))
    partial = FLOATS["float32"].unit_roundoff * PARTIAL_SUMS if a.partial else 0.0
    return math.hypot(product, checksum, partial) + (a.u * TRUNCATION * k if a.truncating else 0.0)


def recomputed_noise_factor(n: int, *, partial: bool = False) -> float:
    """How far the rounding of ``u = C v`` moves where an element of C changes, in units of ``||C_i o v||``: its part of
    f. Measured over float64 and float32, n = 40 to 3000: two thirds of it at most, nine tenths where it is
    `partial`. Of few terms, where roundings do not average, it is 8.4 units at most (n = 2 to 128, 160,000 changes
    each, equal terms among them), and never more than ``2 gamma_n ||C_i o v||_1``."""
    if partial:
        return PARTIAL_SUMS * FLOATS["float32"].unit_roundoff
    return CHECKSUM_UNIT * max(CHECKSUM * math.sqrt(2 * n), min(_FEW_TERMS, 2 * n * math.sqrt(n)))


def checksum_noise_factor(k: int, n: int, *, partial: bool = False) -> float:
    """Two evaluations of one checksum never differ by more: its own part of the bound, with a margin of eight."""
    if partial:  # float32 sums of 256 terms, in sixteen lanes
        return 8 * FLOATS["float32"].unit_roundoff * math.sqrt(16)
    return 8 * CHECKSUM_UNIT * (math.sqrt(k) + math.sqrt(2 * n))


def statistical_bound(
    xp: Namespace,
    a: Arithmetic,
    k: int,
    n: int,
    *,
    products: Any,
    stored: Any,
    added: Any,
    underflow: Any,
    largest: Any = None,
) -> Any:
    """The bound tau of the residual, elementwise over lines and weight columns.

    Parameters
    ----------
    products, stored, added : arrays or None
        ``|alpha| P2``, ``||C o v||`` and ``|beta| ||C0 o v||``; None where one is 0 or not known.
    underflow : array or float
        ``Arithmetic.underflow(k) ||v||_1`` in the units of the residual.
    largest : array, optional
        What `stored` is cut to; by default the `largest_norm` of the others.
    """
    scale = products if added is None else xp.maximum(products, added)
    rounded = INPUT * a.u_in * products + underflow if a.u_in else underflow
    if stored is None:
        return statistical_factor(a, k, n) * scale + rounded
    if largest is None:
        largest = largest_norm(k, products=products, added=added, underflow=underflow)
    stored = xp.minimum(stored, largest)
    if added is not None and a.u_added:  # alpha A B, if it was rounded, is no larger than C and beta C0 together
        rounded = rounded + 4 * a.u_added * added
    if a.u_out:
        rounded = rounded + 4 * a.u_out * stored
    return statistical_factor(a, k, n) * xp.maximum(scale, stored) + rounded


TINIEST = FLOATS["float64"].smallest_subnormal


def least_bound(terms: int, smallest: float) -> float:
    """The least that a bound has to be, for checksums with weights of at least the modulus `smallest`.

    Each of the `terms` that are added up for a residual, k in t and n in u, may lose half of the smallest subnormal
    number (Higham 2002, eq. 2.8). Residuals below that are 0 whatever C is. 0, and of no effect, where all that is lost
    of an element of C is less than a normal number: its weight is that much larger.
    """
    return 0.0 if smallest >= terms * CHECKSUM_UNIT else terms * TINIEST


def largest_norm(k: int, *, products: Any, added: Any, underflow: Any) -> Any:
    """What ``||C_i o v||_2`` cannot exceed, so that a large fault does not widen the bound it is compared with.

    ``||C_i o v|| <= sum_l |a_il| ||B_l o v|| <= sqrt(k) P2_i`` (Minkowski, then Cauchy and Schwarz), and one per cent
    for rounding, that of bfloat16 included. Parameters as in `statistical_bound`.
    """
    norm = math.sqrt(k) * products
    return SLACK * (norm if added is None else norm + added) + underflow


FACTORISATION = {"float64": 3.6, "float32": 1.8}  # f above
FLOOR_TERMS = 16  # operations that every element of a factorisation is granted
SUM_SHARE, SUMMED = 1 / 4, 64  # what the rounding of one term of a checksum counts, in so many operations


def operations(stored: FloatType, count: int, length: int) -> float:
    """Roundings, in units of that of a factor's element, that `count` operations on a line leave in its residual.

    The checksum of a line of `length` elements is a sum itself, with as many roundings in float64. Whatever is taken
    off a carried checksum is made of such sums, a multiple of at most 1 for each operation: SUM_SHARE is measured.
    """
    sums = max(1.0, count / SUMMED) if count else 0.0
    return count + SUM_SHARE * sums * length * (CHECKSUM_UNIT / stored.unit_roundoff) ** 2


def factored_bound(stored: FloatType, reach: Any, terms: int, weight: float) -> Any:
    """The bound of the residual of a row or column of a factorisation.

    Parameters
    ----------
    stored : FloatType
        The type of the factors; checksums are float64.
    reach : array
        The square root of the sum over the operations of the line's squared weighted norms.
    terms, weight : int, float
        Operations on one element, each of which may underflow, and the weights' sum of moduli.
    """
    underflow = (terms + FLOOR_TERMS) * lost(stored) * weight
    return FACTORISATION[stored.name] * stored.unit_roundoff * reach + underflow


def factored_element(stored: FloatType, reach: Any, terms: int) -> Any:
    """How far two ways to compute an element of a factorisation may be apart: eight times what its checksum is granted.

    `reach`: as in `factored_bound`, of the element. What remains of it after l operations is
    ``sum_{k >= l} l_ik u_kc``, so that the squares of all remainders add up to ``sum_k (k + 1) l_ik^2 u_kc^2``.
    """
    spread = 8 * FACTORISATION[stored.name] * stored.unit_roundoff
    return spread * reach + (terms + FLOOR_TERMS) * lost(stored)


# Residuals of one check, in units of their bounds: so many times the median is as far from clean as the bound itself is
# on normal data. Where most operations are on small numbers, it is much less than the bound, but it is not
# taken to be less than a thirtieth of it.
USUAL, LEAST = 10.0, 0.03
COMPUTED, COMPUTED_LEAST = 1 / 2, 0.15  # of the bound, and in place of LEAST, where norms are computed


def rigorous_factored(stored: FloatType, terms: int) -> float:
    """gamma of ``|PA - LU| <= gamma |L| |U|`` and ``|A - L L'| <= gamma |L||L'|`` (Higham 2002, theorems 9.3 and 10.3),
    and for sums of as many terms in float64."""
    return (terms + FLOOR_TERMS) * (stored.unit_roundoff + 2 * CHECKSUM_UNIT)


DEFINITE = {"float64": 3.5, "float32": 1.7}  # f of Cholesky's factors, above
DEFINITE_SHARE = 1 / 4  # what a term of one of their checksums counts, in operations
DEFINITE_USUAL, DEFINITE_LEAST = 7.0, 0.1  # as USUAL and LEAST; one or two of 100 clean panels exceed 7 medians
DEFINITE_COMPUTED = 10.0  # in place of DEFINITE_USUAL, where norms are computed


def definite_bound(stored: FloatType, size: Any, terms: Any, length: int, weight: float) -> Any:
    """The bound of the residual of a column of ``A = L L'``.

    Parameters
    ----------
    stored : FloatType
        The type of L; checksums are float64.
    size : array
        The column's weighted norm in A, or in a trailing matrix if that is larger.
    terms : int or array
        Operations on one element, each of which may underflow.
    length : int
        Elements of a column.
    weight : float
        The weights' sum of moduli.
    """
    walk = (FLOOR_TERMS + terms + DEFINITE_SHARE * length * (CHECKSUM_UNIT / stored.unit_roundoff) ** 2) ** 0.5
    underflow = (terms + FLOOR_TERMS) * lost(stored) * weight
    return DEFINITE[stored.name] * stored.unit_roundoff * walk * size + underflow


def definite_element(stored: FloatType, size: Any, terms: int) -> Any:
    """How far two ways to compute an element of A - L L' may be apart: twelve times what its checksum is granted.

    `size`: the root of ``a_ic^2 + sum_l l_il^2 l_cl^2``.
    """
    spread = 12 * DEFINITE[stored.name] * math.sqrt(terms + FLOOR_TERMS) * stored.unit_roundoff
    return spread * size + (terms + FLOOR_TERMS) * lost(stored)


def stored_bound(norm: Any, terms: int) -> Any:
    """How far two sums of the same `terms` numbers may be apart, in whatever order; `norm`: of the weighted numbers."""
    return checksum_noise_factor(terms, terms) * norm


def changed_bound(norm: Any, terms: int) -> Any:
    """The same where a line beyond it is only computed again: two sums of the same numbers have come up to a sixth of
    `stored_bound` apart."""
    return stored_bound(norm, terms) / 4


def rigorous_factor(a: Arithmetic, k: int) -> float:
    """gamma of the rigorous bound, for the product's rounding and for that of the float64 recomputation."""
    operations = (k + 2) * (2 if a.truncating else 1)
    return operations * a.u + (k + 2) * CHECKSUM_UNIT + 4 * a.u_in  # truncated operands are off by 2 u_in each


def usual_of(sizes: Any) -> Any:
    """What nine tenths of the elements of each line do not exceed, (..., 1): `OUTLIER` times as much stands out."""
    return np.quantile(sizes, 0.9, axis=-1, method="lower", keepdims=True)


def element_noise(a: Arithmetic, k: int) -> float:
    """The usual error of an element in units of ``(A o A)(B o B)``'s root: ``(u + u_c) sqrt(k)``."""
    return (a.u + CHECKSUM_UNIT) * math.sqrt(max(k, 1)) + 2 * a.u_in


def detection_limit(m: int, k: int, n: int, dtype: Any = "float64", out_dtype: Any = None) -> float:
    """The smallest change of one element to expect a protected product of this size and type to find, on normal data.

    Parameters
    ----------
    m, k, n : int
        Sizes of ``A (m, k) @ B (k, n)``.
    dtype : dtype or str
        Of the operands.
    out_dtype : dtype or str, optional
        Of the result; by default that of the operands.

    Returns
    -------
    limit : float
        Relative to the root mean square of C, for operands of independent normal entries, or data like these. Of other
        data, rows of very different size say, it tells nothing: ``report.limit(i, j)`` is the limit of an element of a
        product that was checked, in C's units, and ``report.checks[0].detection_limit`` that of any element.

    Raises
    ------
    TypeError
        For a dtype that is not protected, and sizes that are no whole numbers.
    ValueError
        For a size below 1, and one that no array has.

    Notes
    -----
    The statistical bound of `abft_tsm2.checksum.bounds` with ``P2 = ||C o v|| = sqrt(n) rms(v) rms(C)``, summed over
    the shorter side, and a quarter more for the clean residual; divided by the smallest weight, 1.

    Examples
    --------
    >>> from abft_tsm2 import detection_limit
    >>> 1e-3 < detection_limit(4096, 4096, 4096, "float32") < 3e-3
    True
    """
    m, k, n = _size(m, "m"), _size(k, "k"), _size(n, "n")
    names = [type_name(dtype), type_name(dtype if out_dtype is None else out_dtype)]
    if not set(names) <= set(FLOATS):
        raise TypeError(f"dtype {' -> '.join(names)} is not protected: choose among {', '.join(FLOATS)}")
    if names[1] not in (names[0], "float32") or (names[0] != names[1] and FLOATS[names[0]].bits > 16):
        raise ValueError(f"no product of {names[0]} is stored in {names[1]}: only 16-bit operands in float32")
    a = arithmetic(names[0], names[1])
    terms = min(m, n)
    bound = (statistical_factor(a, k, terms) + 4 * a.u_out) * math.sqrt(terms * MEAN_SQUARE)
    # A clean residual rarely exceeds a quarter of the bound; norms of short lines scatter like 1 / sqrt(terms).
    return 1.25 * (1 + 2 / math.sqrt(terms)) * bound


def _size(value: Any, name: str) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError("no number")
        size = index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}: sizes are whole numbers") from error
    if not 1 <= size < 2**63:
        shown = size if size < 1 else "2**63 or more"
        raise ValueError(f"{name} is {shown}: sizes must be at least 1, and no array is as large as 2**63")
    return size
