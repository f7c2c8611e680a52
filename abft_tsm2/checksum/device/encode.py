"""Encode a CuPy matrix for products on a GPU: weights first, then the checksums of both sides in one read of it.

The weights are those that the kernels of a product make (kernels/check/equilibrate.cu), and what `encode` returns is
what products use: `Encoded.weights` and the sums in float64 are the same numbers that the kernels' workspace holds.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, float_type
from abft_tsm2.checksum.device.check import right_operand
from abft_tsm2.checksum.device.layout import CarriedChecksum
from abft_tsm2.checksum.encode import OperandChecksum, Sided, kept, log2_column_norms, part_of
from abft_tsm2.core.encode_both import Encoding, encode_both


@dataclass(frozen=True, eq=False)
class DeviceChecksums:
    """What a CuPy matrix carries for the kernels: as right operand (rows) and as left one (columns).

    Attributes
    ----------
    sides : Sided
        Where that is: `OperandPointers`, or None.
    memory : tuple of arrays
        What they point into.
    """

    sides: Sided
    memory: tuple[Array, ...]

    def carried(self, side: str, recheck: bool, owner: Any) -> CarriedChecksum | None:
        """What it carries into a check of that side; `owner`: the `Encoded` that has this."""
        pointers = getattr(self.sides, side)
        return None if pointers is None else CarriedChecksum(pointers, recheck, weakref.ref(owner))


class MatrixEncoding(NamedTuple):
    """Checksums of a matrix for the host's procedure and for the kernels."""

    right: OperandChecksum | None
    left: OperandChecksum | None
    device: DeviceChecksums


class _OneSide:
    """One side that is encoded: its check, its memory, and R, the matrix as that side's right operand."""

    def __init__(self, A: Array, side: str) -> None:
        self.check, self.memory = right_operand(A, side)
        self.R = A if side == "rows" else A.T
        self._at = self.memory.data.ptr

    def equilibrate(self, stream: int) -> None:
        self.check.equilibrate(self._at)(stream, {"R": self.R.data.ptr})

    def part(self, name: str) -> Array:
        return self.check.workspace.array(self._at, name)[0]

    @property
    def weights(self) -> Array:
        """V (n, 1) in float64, which holds those of the kernels exactly."""
        return self.part("v").astype(np.float64)[:, None]

    def weigh_again(self, squares: Array) -> bool:
        """Make weights from exact norms where a row stands out that the sample may have missed."""
        missed = bool((squares > self.check.outstanding).any())
        return missed and self.check.weigh_exactly(self._at, self.R)

    def keep(self, V: Array, taken: Encoding) -> OperandChecksum:
        """Store the sums of rows in the kernels' workspace, and return what the host's procedure uses."""
        sums, squares = taken.rows, taken.row_squares
        size = abs(V)
        self.part("s")[...] = sums[:, 0]
        self.part("squares")[...] = squares
        self.part("right_bit_sums")[...] = taken.row_words
        self.part("sizes")[0], self.part("sizes")[1] = size.sum(), size.min()
        head = squares[: part_of(sums.shape[0]), None]  # type: ignore[index]
        return OperandChecksum(V, sums, head, kept(V, sums, head), False, lasting=True)

    @property
    def pointers(self) -> object:
        return self.check.workspace.right(self._at)


def encode_on_device(A: Array, right: bool, left: bool) -> MatrixEncoding:
    """Encode a CuPy matrix (p, q) that lies in a layout that kernels read.

    Parameters
    ----------
    A : (p, q) CuPy array
    right, left : bool
        Which sides are wanted: ``A V`` for a right operand, ``W'A`` for a left one.

    Notes
    -----
    One read of A beside the sample that the weights are from, two where a row stands out that the sample has missed.
    Synchronises with the host.
    """
    import cupy

    with A.device:
        stream = cupy.cuda.get_current_stream()
        sides = [_OneSide(A, side) if wanted else None for side, wanted in (("rows", right), ("columns", left))]
        for one in sides:
            if one is not None:
                one.equilibrate(stream.ptr)
        V, W, taken = _both(A, *sides)
        squares = taken.row_squares, taken.column_squares
        missed = [one is not None and one.weigh_again(z) for one, z in zip(sides, squares, strict=True)]
        if any(missed):
            V, W, taken = _both(A, *sides)
        rows, columns = sides
        carried_right = None if rows is None else rows.keep(V, taken)
        carried_left = None if columns is None else columns.keep(W, taken.transposed)
        stream.synchronize()  # it may be used on any stream
    pointers = Sided(*(one and one.pointers for one in sides))
    made = DeviceChecksums(pointers, tuple(one.memory for one in sides if one is not None))
    return MatrixEncoding(carried_right, carried_left, made)


def _both(A: Array, rows: _OneSide | None, columns: _OneSide | None) -> tuple[Array, Array, Encoding]:
    """V, W, and what one read of A gives with them; a side that is not wanted has ones."""
    import cupy

    V, W = (
        cupy.ones((n, 1)) if one is None else one.weights for one, n in zip((rows, columns), A.shape[::-1], strict=True)
    )
    return V, W, encode_both(A, V, W, squares=True, words=True, dtype="float64")


def norms_on_device(A: Array) -> Sided:
    """2-norms of the rows (p,) and columns (q,) of a CuPy matrix, of their finite elements: one read where no sum of
    squares is near the ends of float64's range."""
    import cupy

    with A.device:
        (p, q), one = A.shape, cupy.ones
        taken = encode_both(A, one((q, 1)), one((p, 1)), squares=(one(p), one(q)), dtype="float64")
        least = float_type(taken.rows).smallest_normal ** (1 / 2) if float_type(A).bits == 64 else -1.0
        norms = []
        of_both: tuple[tuple[Array, Array], ...] = ((taken.row_squares, A.T), (taken.column_squares, A))
        for squares, lines in of_both:
            sure = bool(((squares > least) & cupy.isfinite(squares)).all())
            norms.append(cupy.sqrt(squares) if sure else cupy.asarray(np.exp2(log2_column_norms(lines))))
    return Sided(*norms)
