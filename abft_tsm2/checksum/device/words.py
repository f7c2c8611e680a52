"""Sum the words of a matrix on a GPU by lines and across them, and compare them with those that it had: one read."""

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

    def blocks(self, size: int, length: int) -> int:
        """Those of a launch for so many words in lines of that length."""
        return -(-length // (self.t1 * self.steps)) * -(-size // (length * self.rows))


SUM, COMPARE = WordsConfig(compare=False), WordsConfig(compare=True)


def word_sums(words: Array, length: int) -> tuple[Array, Array]:
    """The sums of lines of so many words, and across these lines.

    `words`: contiguous uint64, not empty; the last line may be shorter. On the current stream of their device; no host
    synchronisation.
    """
    sums = _launched(SUM, words, length)
    return sums[: -length - 2], sums[-length - 2 : -2]


def words_differ(words: Array, across: Array, lines: Array | None = None) -> Array:
    """Whether a sum across lines, of as many words as there are such sums, is another than it was, or one of `lines`; a
    boolean on the GPU."""
    return _launched(COMPARE, words, across.size, across, lines)[-1:].view("bool")[0]  # its first byte


def _launched(
    config: WordsConfig, words: Array, length: int, across: Array | None = None, lines: Array | None = None
) -> Array:
    import cupy

    with words.device:
        sums = cupy.zeros(-(-words.size // length) + length + 2, dtype=cupy.uint64)
        nothing = 0  # a null pointer
        compared = (nothing if of is None else of for of in (lines, across))
        arguments: tuple[Any, ...] = (words.size, length, words, *compared, sums)
        kernel(config)((config.blocks(words.size, length),), (config.t1,), arguments)
    return sums
