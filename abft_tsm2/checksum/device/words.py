"""Compare the words of a matrix on a GPU with the sums that they had: one read, and one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from abft_tsm2.arrays import Array
from abft_tsm2.core.compiler import kernel


@dataclass(frozen=True)
class WordsConfig:
    """Compile-time constants of kernels/check/words.cu."""

    file: ClassVar[str] = "check/words.cu"

    t1: int = 128

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"words_t1_{self.t1}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        return {"T1": self.t1}


_CONFIG = WordsConfig()


def words_differ(words: Array, sums: Array) -> Array:
    """Whether a row of ``words`` (m, n), contiguous uint64, has another sum than it had; a boolean on the GPU.

    On the current stream of the words' device; no host synchronisation.
    """
    import cupy

    rows, length = words.shape
    with words.device:
        differ = cupy.zeros((), dtype=cupy.bool_)
        each = _CONFIG.t1 // 32
        arguments: tuple[Any, ...] = (rows, length, words, sums, differ)
        kernel(_CONFIG)(((rows + each - 1) // each,), (_CONFIG.t1,), arguments)
    return differ
