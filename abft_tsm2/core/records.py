"""Where kernels leave what they found for the host: pages of pinned memory, cut into records of 1 KB.

A record is written last by the kernel behind a product, and read by the host whenever it likes: its first word, the
stamp, says whether it is there. Nobody copies anything, and nobody waits for a stream to look.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

WORDS = 128  # of a record
_PAGE = 64  # records

_free: list[Record] = []
_lock = threading.Lock()
_pages: list[Any] = []  # pinned memory goes back to the system with the process


class Record:
    """One record.

    Attributes
    ----------
    address : int
        Where a kernel writes it.
    words : (128,) uint64 ndarray
        kernels/repair.cu says what they mean.
    """

    __slots__ = ("address", "words")

    def __init__(self, address: int, words: np.ndarray[Any, np.dtype[np.uint64]]) -> None:
        self.address, self.words = address, words

    @property
    def there(self) -> bool:
        """Whether the kernel has written it."""
        return bool(self.words[0])

    def number(self, word: int) -> float:
        """A word read as float64."""
        return float(self.words[word : word + 1].view(np.float64)[0])

    def free(self) -> None:
        """Give it back: nobody reads it any more, and no kernel will write it."""
        with _lock:
            _free.append(self)


def take() -> Record:
    """A record that is not there yet."""
    with _lock:
        if not _free:
            _more()
        record = _free.pop()
    record.words[0] = 0
    return record


def _more() -> None:
    import cupy

    page = cupy.cuda.alloc_pinned_memory(_PAGE * WORDS * 8)
    words = np.frombuffer(page, np.uint64, _PAGE * WORDS).reshape(_PAGE, WORDS)
    words[...] = 0
    _pages.append(page)
    _free.extend(Record(page.ptr + 8 * WORDS * i, words[i]) for i in range(_PAGE))
