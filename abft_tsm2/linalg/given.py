"""Operands of a solution, encoded for the length of a call: whether they are still what was given."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from abft_tsm2.arrays import (
    Array,
    float_type,
    from_host,
    is_cupy,
    is_numpy,
    namespace,
    same_bits,
)
from abft_tsm2.checksum.bounds import CHECKSUM_UNIT, changed_bound
from abft_tsm2.checksum.words import sums_of_words
from abft_tsm2.core.row_sums import fingerprint
from abft_tsm2.linalg.encode import MatrixChecksums, balanced, wide
from abft_tsm2.linalg.host_sums import triangle_times
from abft_tsm2.linalg.line_check import LineCheck, column_norms, norm
from abft_tsm2.linalg.operand import Operand, compare
from abft_tsm2.linalg.triangular import Triangle, Weighed, summing_weights

HEAVIEST = 1.5  # the largest weight
UNEVEN = 2.0**14  # times the bound of other rows: random numbers bring it up to 2^12


class Given(Protocol):
    """An operand that was encoded."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    def compare(self) -> Operand:
        """Whether it is what was encoded."""


class GivenMatrix:
    """A matrix that is factored, and its words from before.

    Checksums show what counts in the factors. An element that is small in its row and in its column counts in a
    solution, where the unknown that it is multiplied by is large. Those of a GPU have the sums of all words.

    Attributes
    ----------
    encoding : callable
        Its checksums, when it has been factored.
    """

    name = "A"

    def __init__(self, A: Array) -> None:
        self.A = A
        self.encoding: Callable[[], MatrixChecksums]
        self._words = None if is_cupy(A) else GivenWords.of(A, self.name)

    def compare(self) -> Operand:
        if self._words is not None:
            return self._words.compare()
        e = self.encoding()
        if not e.is_of_finite(self.A):
            return Operand.SAME  # as it was: its factors say so
        return compare(self.A, e).operand


def _words_of(A: Array) -> Array:
    """Sums in which any change of one or of two elements shows."""
    return sums_of_words(A) if is_numpy(A) and not is_cupy(A) else fingerprint(A)


@dataclass(frozen=True, eq=False)
class GivenWords:
    """A matrix, and its words from before; None of one that kernels did not come to read."""

    array: Array
    words: Array | None
    name: str = "lu"

    @classmethod
    def of(cls, array: Array, name: str = "lu") -> GivenWords:
        return cls(array, _words_of(array), name)

    def compare(self) -> Operand:
        same = self.words is not None and same_bits(_words_of(self.array), self.words)
        return Operand.SAME if same else Operand.CHANGED


class GivenPivots:
    """Pivots on the host, and their bytes from before: no check of a solution shows that they are others."""

    name = "piv"

    def __init__(self, array: Any) -> None:
        self.array, self._bytes = array, array.tobytes()

    def compare(self) -> Operand:
        return Operand.SAME if self.array.tobytes() == self._bytes else Operand.CHANGED


@dataclass(eq=False)
class GivenSides:
    """Right-hand sides, with weighted sums of their columns, and their fingerprint; None of those that kernels read."""

    weighed: Weighed
    bits: Array | None = None
    name: str = "b"

    @classmethod
    def of(cls, B: Array) -> GivenSides:
        weighed = Weighed.of(B, summing_weights(B))
        return cls(weighed, fingerprint(B))  # later: B that changes in between does not agree with its sums

    def compare(self) -> Operand:
        same = self.bits is None or same_bits(fingerprint(self.weighed.X), self.bits)
        return Operand.SAME if same and self.weighed.same else Operand.CHANGED


class GivenTriangle:
    """One of the triangles of factors, and weighted sums of its columns."""

    def __init__(self, triangle: Triangle) -> None:
        T, lower, unit = triangle
        n = int(T.shape[0])
        self.weights = from_host(balanced(n), T)
        turned = Triangle(T.T, not lower, unit)
        if is_numpy(T) and n and (T.flags.c_contiguous or T.flags.f_contiguous):
            self.sums = wide(
                triangle_times(turned.T, balanced(n).astype(T.dtype, copy=False), lower=not lower, unit=unit)
            )
        else:
            self.sums = turned.times(self.weights)
        self._triangle, self._unit = triangle, float_type(T).unit_roundoff

    @property
    def same(self) -> bool:
        """Whether its columns add up to what they did, but for the order of addition."""
        now, n = GivenTriangle(self._triangle).sums, int(self.weights.shape[0])
        if same_bits(now, self.sums):
            return True
        norms = HEAVIEST * column_norms(wide(self._triangle.block(slice(0, n), slice(0, n))))
        bound = changed_bound(norms, n) * (self._unit / CHECKSUM_UNIT)
        return LineCheck.of(now - self.sums, bound).clean

    def agrees(self, X: Weighed, B: Weighed, check: LineCheck) -> bool:
        """Whether ``w'(T X)``, of the rows of a check, is ``(w'T) X`` but for rounding: the triangle that was solved
        with, and read by the check, is the one that was encoded. `check`: of ``T X = B``, clean."""
        terms = self.sums * X.sums
        found = float(namespace(terms).sum(terms)) - float(self.weights @ (B.sums + check.residual))
        own = 8 * self._unit * math.sqrt(2.0 * terms.shape[0]) * norm(terms)
        return abs(found) <= own + CHECKSUM_UNIT / self._unit * norm(self.weights * check.bound) < math.inf

    @staticmethod
    def shows_all(check: LineCheck) -> bool:
        """Whether rows are of a size: in one sum with rows that are much larger a row could change unseen."""
        bound, xp = check.bound, namespace(check.bound)
        return 0 in bound.shape or float(xp.max(bound)) <= UNEVEN * float(xp.min(bound))


class GivenFactors:
    """Factors, packed: their words, and weighted sums of both triangles.

    Attributes
    ----------
    triangles : pair of GivenTriangle
        In the order in which they are solved for.

    Parameters
    ----------
    array : (n, n) array
    of : callable
        The triangles of such an array.
    name : str
        What a report calls it.
    """

    def __init__(self, array: Array, of: Callable[[Array], tuple[Triangle, Triangle]], name: str = "lu") -> None:
        self.array, self.of, self.name = array, of, name
        with np.errstate(all="ignore"):
            first, second = of(array)
            self.triangles = GivenTriangle(first), GivenTriangle(second)
            # Later: what changes in between does not agree with the sums of triangles.
            self._words = GivenWords.of(array, name)

    @property
    def finite(self) -> bool:
        """Whether they hold neither NaN nor Inf: no weight is zero, so that either shows in a sum."""
        xp = namespace(self.array)
        sums = (bool(xp.all(xp.isfinite(one.sums))) for one in self.triangles)
        return all(sums) or bool(xp.all(xp.isfinite(self.array)))

    def are_seen_by(self, count: int) -> bool:
        """Whether the check of one combination of so many solutions shows a change of these factors: what it does to
        several cancels there in one of 2^40 cases where sums are of float64, but in one of a thousand in float32."""
        return count <= 1 or float_type(self.array).bits >= 64

    def compare(self) -> Operand:
        found = self._words.compare()
        return found if all(one.same for one in self.triangles) else Operand.CHANGED
