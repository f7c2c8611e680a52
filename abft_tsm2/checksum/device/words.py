"""Sum the words of a matrix on a GPU by rows and by columns, and compare them with those that it had: one read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from abft_tsm2.arrays import Array
from abft_tsm2.core.compiler import kernel


@dataclass(frozen=True)
class WordsConfig:
    """Compile-time constants of kernels/check/words.cu."""

    file: ClassVar[str] = "check/words.cu"

    compare: bool
    t1: int = 128
    rows: int = 32
    steps: int = 4

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"words_{'compare' if self.compare else 'sum'}_t1_{self.t1}_rows_{self.rows}_steps_{self.steps}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"T1": self.t1, "ROWS": self.rows, "STEPS": self.steps, "COMPARE": int(self.compare)}

    def blocks(self, rows: int, length: int) -> int:
        """Those of a launch."""
        return -(-length // (self.t1 * self.steps)) * -(-rows // self.rows)


SUM, COMPARE = WordsConfig(compare=False), WordsConfig(compare=True)


def word_sums(words: Array) -> tuple[Array, Array]:
    """The sums of the rows and of the columns of ``words`` (m, n), contiguous uint64, not empty.

    On the current stream of the words' device; no host synchronisation.
    """
    rows, length = words.shape
    sums = _launched(SUM, words, words, words)  # there is nothing to compare with: what stands there is not read
    return sums[:rows], sums[rows : rows + length]


def words_differ(words: Array, of_rows: Array, of_columns: Array) -> Array:
    """Whether a row or a column of them has another sum than it had; a boolean on the GPU."""
    return _launched(COMPARE, words, of_rows, of_columns)[-1:].view("bool")[0]  # its first byte


def _launched(config: WordsConfig, words: Array, of_rows: Array, of_columns: Array) -> Array:
    import cupy

    rows, length = words.shape
    with words.device:
        sums = cupy.zeros(rows + length + 2, dtype=cupy.uint64)
        arguments: tuple[Any, ...] = (rows, length, words, of_rows, of_columns, sums)
        kernel(config)((config.blocks(rows, length),), (config.t1,), arguments)
    return sums
