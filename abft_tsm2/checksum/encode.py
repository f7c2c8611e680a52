"""Encoding: the checksums a matrix carries into a product, and those that guard it in memory.

A right operand R (k x n) carries ``s = R v``; a left operand carries ``w^T L``, which is the same thing said of its
transpose. Weights are equilibrated: each is divided by the power of two nearest to its column's norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, as_operand, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.integers import (
    Diagnosis,
    IntegerChecksums,
    diagnose,
    integer_checksums,
    restore,
)
from abft_tsm2.checksum.weights import SEED, Weights, equilibrated, exponents, weights
from abft_tsm2.core.tsm2 import (
    column_squares,
    encoding_pass,
    fingerprint,
    rows_per_block,
    take_rows,
    widened,
)
from abft_tsm2.report import Fault, Report, Status

_SAMPLE_SHARE = 8  # one row in eight tells a column's scale; rows the sample may have missed are looked up
_SAMPLE_RUN = 8  # rows are sampled in runs at random places: no period in the data can hide from them
_SUSPICIOUS = 8.0  # a row whose checksum is this many times the median may change a column's norm
_OFF_BY = 4.0  # powers of two by which a weight may be off before it costs sensitivity that matters


@dataclass(frozen=True, eq=False)
class Carried:
    """What a right operand R (k x n) carries into a row check.

    Attributes
    ----------
    weights : (n, r) array of float64
        V.
    sums : (k, r) array of float64
        ``R V``.
    fingerprint : array of uint64
        Of R's bits when it was encoded.
    """

    weights: Array
    sums: Array
    fingerprint: Array


def log2_column_norms(R: Array) -> NDArray[np.float64]:
    """log2 of the 2-norm of each column of R (k x n), over its finite elements; -inf for a zero column.

    Exact in range: nothing overflows or underflows, whatever the data. Two reads of R.
    """
    xp = namespace(R)
    k, n = R.shape
    rows = rows_per_block(n)

    def finite_block(at: int) -> Array:
        block = widened(R, at, min(k, at + rows))
        return xp.where(xp.isfinite(block), xp.abs(block), xp.zeros_like(block))

    peak = np.zeros(n)
    for at in range(0, k, rows):
        peak = np.maximum(peak, to_host(xp.max(finite_block(at), axis=0)))
    shift = np.frexp(peak)[1].astype(np.int64)
    halves = [from_host(np.ldexp(np.ones(n), -part), R) for part in (shift // 2, shift - shift // 2)]
    squares = np.zeros(n)
    for at in range(0, k, rows):
        block = finite_block(at) * halves[0] * halves[1]
        squares += to_host(xp.sum(block * block, axis=0))
    with np.errstate(divide="ignore"):
        return np.asarray(shift + 0.5 * np.log2(squares))


def _sample(k: int) -> NDArray[np.int64]:
    """An eighth of k row indices: one run of eight at a random place in each group of 64."""
    group = _SAMPLE_SHARE * _SAMPLE_RUN
    starts = np.arange(0, k - group + 1, group)
    starts = starts + np.random.default_rng(SEED).integers(0, group - _SAMPLE_RUN + 1, starts.size)
    return np.asarray((starts[:, None] + np.arange(_SAMPLE_RUN)).ravel(), np.int64)


def _sampled_exponents(R: Array) -> NDArray[np.int64]:
    """Scales of R's columns from an eighth of its rows; from all of R where the sample says nothing."""
    k, n = R.shape
    if k < _SAMPLE_SHARE * _SAMPLE_RUN**2:  # fewer than 64 sampled rows would scatter the scales
        squares = to_host(column_squares(R)).astype(np.float64)
    else:
        rows = _sample(k)
        squares = np.zeros(n)
        for part in np.array_split(rows, -(-rows.size // rows_per_block(n))):
            squares += to_host(column_squares(take_rows(R, part)))
    reliable = float_type(R).smallest_normal ** (1 / 2) if float_type(R).bits >= 32 else 0.0
    if np.all((squares > reliable) & np.isfinite(squares)):
        return exponents(0.5 * np.log2(squares))
    return exponents(log2_column_norms(R))


def _missed_by_sample(R: Array, sums: Array, exponent: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Better exponents if a row with an outstanding checksum shows that a column was misjudged, else None.

    A row can change a column's norm by ``2**4`` only if it is so much larger than the others that its checksum,
    a signed sum of its elements, stands out (except where they cancel to one part in a thousand).
    """
    size = np.max(np.abs(to_host(sums)), axis=1, initial=0.0)
    if not np.all(np.isfinite(size)):
        return None
    large = np.flatnonzero(size > _SUSPICIOUS * np.median(size)) if size.size else size
    if large.size == 0:
        return None
    if large.size > 16 + R.shape[0] // 16:
        exact = exponents(log2_column_norms(R))
    else:
        xp = namespace(R)
        total = np.full(R.shape[1], float(_SAMPLE_SHARE))  # the sample's own norm, in units of 2^e, squared
        for row in large:
            total += np.ldexp(to_host(xp.astype(R[int(row), :], xp.float64)), -exponent) ** 2
        exact = exponents(exponent + 0.5 * np.log2(total))
    moved = exact - exponent
    return exact if moved.size and moved.max() - moved.min() > _OFF_BY else None


@np.errstate(all="ignore")
def carry(R: Array, base: Weights, *, equilibrate: bool = True) -> Carried:
    """Encode a right operand: one read of R (two where the sample of its rows misjudged it).

    Parameters
    ----------
    R : (k, n) array
    base : (n, r) ndarray of float64
        Weights before equilibration.
    equilibrate : bool
    """
    if not equilibrate:
        V = from_host(base, R)
        first = encoding_pass(R, V, fingerprint=True)
        return Carried(V, first.sums, first.fingerprint)
    exponent = _sampled_exponents(R)
    V = from_host(equilibrated(base, exponent), R)
    first = encoding_pass(R, V, fingerprint=True)
    better = _missed_by_sample(R, first.sums, exponent)
    if better is None:
        return Carried(V, first.sums, first.fingerprint)
    V = from_host(equilibrated(base, better), R)
    return Carried(V, encoding_pass(R, V).sums, first.fingerprint)


class Sided(NamedTuple):
    """One value for each side of a matrix; None where a side was not encoded."""

    rows: Any
    columns: Any


@dataclass(frozen=True, eq=False)
class Encoded:
    """A matrix with its checksums. Made by `encode`.

    Attributes
    ----------
    array : (p, q) array
        The matrix itself: a reference, not a copy.
    repair : bool
        Whether `array` may be written to repair it.
    recheck : bool
        Whether each use in a product first checks that `array` is still what was encoded.
    norms : Sided
        2-norms of the rows (p,) and columns (q,), of their finite elements, in float64.
    integers : IntegerChecksums
        Bit-exact checksums that find and restore corrupted elements.
    """

    array: Array
    repair: bool
    recheck: bool
    norms: Sided
    integers: IntegerChecksums
    right: Carried | None
    left: Carried | None

    @property
    def row_checksums(self) -> Array | None:
        """(p, r) array of float64, ``A V``: what a right operand carries; None if that side was not asked for."""
        return None if self.right is None else self.right.sums

    @property
    def column_checksums(self) -> Array | None:
        """(r, q) array of float64, ``W^T A``: what a left operand carries; None if that side was not asked for."""
        return None if self.left is None else self.left.sums.T

    @property
    def weights(self) -> Sided:
        """V (q, r) behind `row_checksums`, W (p, r) behind `column_checksums`."""
        return Sided(*(None if side is None else side.weights for side in (self.right, self.left)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    def changed(self) -> bool:
        """Whether the array's bits differ from those that were encoded: one read, 64-bit sums of each line.

        Finds every single wrong element; changes that cancel within a line only `verify` finds.
        """
        side, seen = (self.right, self.array) if self.right is not None else (self.left, self.array.T)
        assert side is not None
        return not np.array_equal(to_host(fingerprint(seen)), to_host(side.fingerprint))

    def verify(self) -> Report:
        """Find every corrupted element of the stored matrix, down to the last bit.

        Returns
        -------
        report : Report
            CLEAN; INPUT_CHANGED with the faults (one for each element that was located, or one for the lines that
            disagree where it was not); CHECKSUM_FAULT where only the stored checksums disagree.

        Notes
        -----
        Integer arithmetic only: no tolerance. Synchronises with the host. Reads the matrix once. Never raises on
        what it finds: see `correct`.
        """
        found = diagnose(self.array, self.integers)
        report = self._report(found, repaired="")
        policy.deliver(report, "detect")
        return report

    def correct(self) -> Report:
        """Restore every corrupted element bit for bit, or refuse and leave the matrix as it is.

        Returns
        -------
        report : Report
            CLEAN, CORRECTED, or CHECKSUM_FAULT.

        Raises
        ------
        SilentDataCorruptionError
            If the pattern of faults does not determine the original (two wrong elements in one row and in one
            column, say). Nothing has been changed then.
        ValueError
            If the array is read-only.

        Notes
        -----
        This call is itself the permission to write into the array, whatever `repair` says.
        """
        found = diagnose(self.array, self.integers)
        if found.corruptions and not found.refused:
            restore(self.array, found.corruptions)
        report = self._report(found, repaired="restored bit for bit from integer checksums")
        policy.deliver(report, "correct")
        return report

    def _report(self, found: Diagnosis, repaired: str) -> Report:
        reasons: tuple[str, ...] = ()
        faults = storage_faults(found, self.array, "A", repaired)
        if found.clean:
            status = Status.CLEAN
        elif found.refused:
            status = Status.UNCORRECTABLE if repaired else Status.INPUT_CHANGED
            reasons = (found.refused,)
        elif found.corruptions:
            status = Status.CORRECTED if repaired else Status.INPUT_CHANGED
        else:
            status = Status.CHECKSUM_FAULT
        p, q = self.shape
        return Report(
            status=status,
            operation="encoded",
            m=p,
            k=0,
            n=q,
            dtype=float_type(self.array).name,
            faults=faults,
            reasons=reasons,
        )


def storage_faults(found: Diagnosis, array: Array, operand: str, repaired: str) -> tuple[Fault, ...]:
    """The report's entries for what the integer checksums found in a stored matrix."""
    if found.refused:
        return (Fault(operand, "block", found.rows, found.columns, 0, float("nan")),)
    kind = np.dtype(f"u{float_type(array).bits // 8}")

    def value(bits: int) -> float:
        return float(np.array([bits], kind).view(to_host(array[:0, :0]).dtype)[0])

    faults = []
    for c in found.corruptions:
        with np.errstate(all="ignore"):
            magnitude = abs(value(c.found) - value(c.original))
        faults.append(Fault(operand, "element", (c.row,), (c.column,), 1, magnitude, repaired))
    return tuple(faults)


def _chosen_weights(given: Any, n: int, name: str) -> tuple[Weights, bool]:
    """Weights for n elements, and whether to equilibrate them: explicit ones are used as they are."""
    if given is None or isinstance(given, str):
        kind = given or "balanced"
        return weights(kind, n), kind == "balanced"
    V = np.asarray(given, dtype=np.float64)
    V = V[:, None] if V.ndim == 1 else V
    if V.ndim != 2 or V.shape[0] != n or V.shape[1] < 1:
        raise ValueError(f"{name} weights have shape {np.shape(given)}: expected ({n},) or ({n}, r)")
    if not np.all(np.isfinite(V)):
        raise ValueError(f"{name} weights hold NaN or Inf")
    blind = np.flatnonzero(~V.any(axis=1))
    if blind.size:
        raise ValueError(
            f"{name} weights are 0 for {blind.size} elements (first: {int(blind[0])}), which nothing would check: "
            "give each a weight"
        )
    return V, False


def encode(A: Any, side: str = "both", weights: Any = None, repair: bool = False, *, recheck: bool = True) -> Encoded:
    """Encode a matrix once, to check its storage and to reuse it over many protected products.

    Parameters
    ----------
    A : (p, q) array, float64, float32, float16 or bfloat16
        Any order and strides. Kept by reference.
    side : {"both", "rows", "columns"}
        "rows": ``A V``, for use as a right operand. "columns": ``W^T A``, for use as a left operand.
    weights : None, str, array, or pair of those
        None: balanced random signs, equilibrated. A name of `abft_tsm2.weights`, or arrays (q, r) for the rows and
        (p, r) for the columns, used as they are; a pair (for rows, for columns) with ``side="both"``.
    repair : bool
        Let a protected product that finds this array corrupted write the repaired elements into it. Otherwise it
        computes with a repaired copy.
    recheck : bool
        Check at each use in a product that the array is still what was encoded (one read).

    Returns
    -------
    E : Encoded

    Raises
    ------
    TypeError
        For integers, booleans or complex, or anything that is not an array.
    ValueError
        If A is not a matrix, is empty of columns and rows at once asked for weights of another length, or `side` is
        unknown.

    Notes
    -----
    Huang and Abraham 1984 for the checksums; they are taken in float64. The integer checksums need ``32 (p + q)``
    bytes for each 32-bit word of an element. NaN and Inf in A are encoded as they are: the product says
    UNVERIFIABLE where they matter, the integer checksums guard them like any value. Synchronises with the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A = np.random.default_rng(0).standard_normal((40, 30))
    >>> E = ft.encode(A)
    >>> A[3, 4] = 0.0
    >>> E.verify().faults[0].rows, E.correct().status.name
    ((3,), 'CORRECTED')
    """
    if isinstance(A, Encoded):
        raise TypeError("A is encoded already: pass A.array to encode it anew")
    if side not in ("both", "rows", "columns"):
        raise ValueError(f"side is {side!r}: choose 'both', 'rows' or 'columns'")
    A = as_operand(A, "A")
    if A.ndim != 2:
        raise ValueError(f"A has shape {tuple(A.shape)}: encode takes one matrix (encode each of a batch by itself)")
    pair = weights if isinstance(weights, tuple) and side == "both" else (weights, weights)
    right = left = None
    if side != "columns":
        V, equilibrate = _chosen_weights(pair[0], A.shape[1], "row")
        right = carry(A, V, equilibrate=equilibrate)
    if side != "rows":
        W, equilibrate = _chosen_weights(pair[1], A.shape[0], "column")
        left = carry(A.T, W, equilibrate=equilibrate)
    norms = Sided(*(from_host(np.exp2(log2_column_norms(x)), A) for x in (A.T, A)))
    return Encoded(A, repair, recheck, norms, integer_checksums(A), right, left)
