"""Faults in a CUDA graph: a kernel that is recorded with the product, and a table on the device: what it changes when.

What a graph runs is fixed when it is captured, so that replays are counted on the device, and a change is one that
follows from the bits of the word alone: ``(word & keep) ^ flip``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from abft_tsm2.arrays import to_host
from abft_tsm2.core.launch import PreparedLaunch
from abft_tsm2.core.memory import uncaptured
from abft_tsm2.faults.models import plant
from abft_tsm2.faults.plan import Plan

Array = Any
Words = np.ndarray[Any, np.dtype[Any]]
HEAD, FIELDS, HITS = 2, 8, 5
"""Of the table of kernels/faults/plant.cu: words in front, words of a change, and which of them counts."""
COMES_BACK, ONCE = 1, 2
OF_WORDS = frozenset({"bit_flip", "multi_bit", "stuck_at_0", "stuck_at_1", "random_value", "nan", "inf"})
"""The models whose changes are such whatever they are planted into."""
_WORDS = {2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}


@dataclass(frozen=True)
class PlantKernel:
    """Compile-time constants of kernels/faults/plant.cu: bytes of a word."""

    file: ClassVar[str] = "faults/plant.cu"

    width: int

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"plant_{8 * self.width}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"WORD": _WORDS[self.width]}


class RecordedFault:
    """A fault in an array on a GPU, for a graph.

    Parameters
    ----------
    plan : Plan
    array : (m, n) or (batch, m, n) CuPy array
        Where it is planted. Not kept.
    visits : int
        Matrices that have been there before; the plan's visit is counted from the first of them.
    stays : bool
        Whether a fault that is persistent stays in memory once it is there; else it is planted anew at each visit.

    Attributes
    ----------
    bit : int
        The number of the bit, where one bit of one word is changed; else -1.

    Raises
    ------
    ValueError
        Where the change depends on more than the bits of a word.
    """

    def __init__(self, plan: Plan, array: Array, visits: int, *, stays: bool) -> None:
        import cupy

        self.plan = plan
        rows, columns, keep, flip = changes(plan, array.shape[-2:], array.dtype)
        self.bit = _only_bit(keep, flip)
        table = np.zeros(HEAD + FIELDS * rows.size, np.uint64)
        table[:HEAD] = visits, rows.size
        fields = table[HEAD:].reshape(-1, FIELDS)
        fields[:, 0], fields[:, 1] = plan.visit, (ONCE | COMES_BACK if stays else COMES_BACK) * plan.persistent
        size, (down, along) = array.itemsize, array.strides[-2:]
        fields[:, 2] = ((rows * down + columns * along) // size).astype(np.int64).view(np.uint64)
        fields[:, 3], fields[:, 4] = keep, flip
        with uncaptured():
            self.table = cupy.asarray(table)
        count, apart = (array.shape[0], array.strides[0] // size) if array.ndim == 3 else (1, 0)
        self._launches = [
            PreparedLaunch(
                PlantKernel(size),
                *((1,), 1, (array.data.ptr, count, apart, self.table.data.ptr, back)),
                keeps=self.table,
                chained=False,
            )
            for back in (0, 1)
        ]

    def plant(self, stream: int) -> None:
        """Queue it on a stream, given by its handle."""
        self._launches[0](stream, {})

    def take_back(self, stream: int) -> None:
        """Queue what makes the words again what they were."""
        self._launches[1](stream, {})

    def hits(self) -> int:
        """How often it was planted. Synchronises with the device."""
        import cupy

        cupy.cuda.Device().synchronize()
        with uncaptured():
            counts = to_host(self.table)[HEAD:].reshape(-1, FIELDS)[:, HITS]
        return int(counts.max(initial=0))

    def switch_off(self) -> None:
        """Let later replays go without it. Synchronises with the device."""
        import cupy

        cupy.cuda.Device().synchronize()
        with uncaptured():
            self.table[1:2] = 0


def changes(plan: Plan, shape: tuple[int, int], dtype: Any) -> tuple[Words, Words, Words, Words]:
    """Rows and columns of the words that a plan changes in a matrix, and for each ``keep`` and ``flip``.

    They are found by planting the fault into words of zeros, of ones, and of random bits.

    Raises
    ------
    ValueError
        Where a word is not ``(word & keep) ^ flip`` afterwards.

    Examples
    --------
    >>> rows, columns, keep, flip = changes(Plan("bit_flip", bits="sign"), (4, 5), np.dtype("float32"))
    >>> rows.size, hex(keep[0]), hex(flip[0])
    (1, '0xffffffff', '0x80000000')
    """
    kind = np.dtype(f"uint{8 * dtype.itemsize}")
    every = ~kind.type(0)

    def after(words: Words) -> Words:
        words = words.copy()
        plant(words.view(dtype), plan, plan.rng())
        return words

    zeros, ones = (after(np.full(shape, value, kind)) for value in (kind.type(0), every))
    keep, flip = zeros ^ ones, zeros
    before = np.random.default_rng(0).integers(0, every, shape, dtype=kind, endpoint=True)
    if not np.array_equal(after(before), (before & keep) ^ flip):
        raise ValueError(
            f"{plan.model} depends on the values of an array: in a graph plant one that changes bits "
            f"({', '.join(sorted(OF_WORDS))}), or keep calls out of graphs"
        )
    rows, columns = np.nonzero((keep != every) | (flip != 0))
    return rows, columns, keep[rows, columns], flip[rows, columns]


def _only_bit(keep: Words, flip: Words) -> int:
    """The number of the bit that is changed in the only word, or -1."""
    changed = int(flip[0] | ~keep[0]) if keep.size == 1 else 0
    return changed.bit_length() - 1 if changed.bit_count() == 1 else -1
