"""What a right operand carries into a check: ``s = R v``, with weights that suit R's columns.

A left operand carries ``w^T L``, which is the same thing said of its transpose. Weights are equilibrated: each is
divided by the power of two nearest to its column's norm. The norms are taken from a sample of R's rows, and from all
of R where the sample says nothing or an outstanding row shows that it erred.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, float_type, from_host, namespace, to_host
from abft_tsm2.checksum.weights import SEED, Weights, equilibrated, exponents
from abft_tsm2.core.tsm2 import column_squares, encoding_pass, fingerprint, rows_per_block, widened

_SAMPLE_RUNS = 8  # so many runs of rows tell a column's scale; rows the sample may have missed are looked up
_SAMPLE_RUN = 16  # rows in a run, at a random place: no period in the data can hide from them
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
    fingerprint : array of uint64, or None
        Of R's bits when it was encoded; only of a matrix that is kept encoded.
    guard : tuple of arrays of uint64
        Fingerprints of `weights` and `sums`: a checksum that has its own may be out of date, but was not hit.
    partial : bool
        How the sums were taken, see `encoding_pass`.
    """

    weights: Array
    sums: Array
    fingerprint: Array | None
    guard: tuple[Array, Array]
    partial: bool

    def intact(self) -> bool:
        """Whether the weights and sums still have the bits they were made with."""
        pairs = zip((self.weights, self.sums), self.guard, strict=True)
        return all(np.array_equal(to_host(fingerprint(now)), to_host(then)) for now, then in pairs)


def carried(weights: Array, sums: Array, of_matrix: Array | None, partial: bool = False) -> Carried:
    """Put what was just computed under guard."""
    return Carried(weights, sums, of_matrix, (fingerprint(weights), fingerprint(sums)), partial)


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


@functools.lru_cache(maxsize=64)
def _sample(k: int) -> list[slice]:
    """Runs of rows, one at a random place in each eighth of k rows; all rows where k is small."""
    group = k // _SAMPLE_RUNS
    if group < 4 * _SAMPLE_RUN:  # little is saved
        return [slice(0, k)]
    places = np.random.default_rng(SEED).integers(0, group - _SAMPLE_RUN + 1, _SAMPLE_RUNS)
    starts = np.arange(_SAMPLE_RUNS) * group + places
    return [slice(int(at), int(at) + _SAMPLE_RUN) for at in starts]


def _sampled_exponents(R: Array) -> NDArray[np.int64]:
    """Scales of R's columns from a sample of its rows; from all of R where the sample says nothing."""
    squares = np.zeros(R.shape[1])
    for rows in _sample(R.shape[0]):
        squares += to_host(column_squares(R[rows, :]))
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
        share = sum(rows.stop - rows.start for rows in _sample(R.shape[0])) / R.shape[0]
        total = np.full(R.shape[1], 1 / share)  # the sample's own norm, in units of 2^e, squared
        for row in large:
            total += np.ldexp(to_host(xp.astype(R[int(row), :], xp.float64)), -exponent) ** 2
        exact = exponents(exponent + 0.5 * np.log2(total))
    moved = exact - exponent
    return exact if moved.size and moved.max() - moved.min() > _OFF_BY else None


@np.errstate(all="ignore")
def carry(R: Array, base: Weights, *, equilibrate: bool = True, prints: bool = False, partial: bool = False) -> Carried:
    """Encode a right operand: one read of R (two where the sample of its rows misjudged it).

    Parameters
    ----------
    R : (k, n) array
    base : (n, r) ndarray of float64
        Weights before equilibration.
    equilibrate : bool
    prints : bool
        Take R's fingerprint too.
    partial : bool
        As in `encoding_pass`.
    """
    if not equilibrate:
        V = from_host(base, R)
        first = encoding_pass(R, V, fingerprint=prints)
        return carried(V, first.sums, first.fingerprint)
    exponent = _sampled_exponents(R)
    V = from_host(equilibrated(base, exponent), R)
    first = encoding_pass(R, V, fingerprint=prints, partial=partial)
    better = _missed_by_sample(R, first.sums, exponent)
    if better is None:
        return carried(V, first.sums, first.fingerprint, partial)
    V = from_host(equilibrated(base, better), R)
    return carried(V, encoding_pass(R, V, partial=partial).sums, first.fingerprint, partial)
