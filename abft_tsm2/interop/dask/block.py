"""A block of a matrix on its way between tasks, with the sums of its words.

Between the task that made a block and the ones that read it lie memory, the wire, and the disk a worker spills to. The
sums travel along: whoever has read a block compares, and what changed meanwhile is found and restored.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from abft_tsm2.arrays import Array, is_numpy, namespace
from abft_tsm2.checksum.encode import OperandChecksum
from abft_tsm2.checksum.encoded import Carrying
from abft_tsm2.checksum.words import WordSums, contiguous
from abft_tsm2.interop.dask.place import task_key
from abft_tsm2.report import Report


@dataclass(eq=False)
class Block:
    """A matrix, and what guards it between two tasks. Made by `Block.of`.

    Attributes
    ----------
    array : (m, n) array
        NumPy or CuPy, contiguous by rows or by columns. Never written to: a restored block has another one.
    shape : tuple of int
        Of what it was given as: a stack of matrices lies in `array` one under the other.
    words : WordSums
        Of `array`, when the block was made.
    key : str or tuple
        Of the task on a cluster that made the block, which may be asked to run again; None elsewhere.
    reports : tuple of Report
        Of the tasks that this block is the result of, as far back as another block does not have them.
    carried : OperandChecksum, optional
        What it carries into products whose right operand it is.
    """

    array: Array
    shape: tuple[int, ...]
    words: WordSums
    key: Any = None
    reports: tuple[Report, ...] = ()
    carried: OperandChecksum | None = None

    @classmethod
    def of(cls, array: Array, reports: tuple[Report, ...] = (), words: WordSums | None = None) -> Block:
        """The block of a matrix, or a stack of them, of any order and strides, here and now."""
        matrix = contiguous(as_matrix(array))
        return cls(matrix, tuple(array.shape), words or WordSums.of(matrix), task_key(), reports)

    def align(self) -> None:
        """Copy an array that came off the wire at an odd address, which every pass over it would be slower for."""
        if is_numpy(self.array) and not self.array.flags.aligned:
            self.array = self.array.copy(order="K")

    def changed(self) -> Array:
        """Whether the array is not what the block was made of: one read. A boolean where the array is."""
        return self.words.differ(self.array)

    def as_given(self, array: Array) -> Array:
        """An array like the block's, in the shape of what the block was given as."""
        return array if len(self.shape) == 2 else namespace(array).reshape(array, self.shape)

    def as_right(self) -> Array | Carrying:
        """The array, with the sums that it carries where it has them."""
        return self.array if self.carried is None else Carrying.of(self.array, self.carried, self.words)

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + int(self.array.nbytes) + self.words.nbytes


def as_matrix(X: Array) -> Array:
    """A matrix, or those of a stack one under the other."""
    return X if X.ndim == 2 else namespace(X).reshape(X, (math.prod(X.shape[:-1]), X.shape[-1]))


if "distributed" in sys.modules:  # arrays in it travel as arrays do on their own: those of a GPU from card to card
    from distributed.protocol import register_generic

    register_generic(Block)
