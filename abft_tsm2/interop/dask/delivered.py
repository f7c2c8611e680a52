"""Blocks of results that have been returned, and the sums of their words: a later operation reads the same memory.

A reader that finds such a block changed and has it as it was writes it back, so that the user gets what was returned:
where its own sums and those of the block that was returned say the same. Users may change what they were given.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from abft_tsm2.arrays import Array, is_numpy
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.interop.dask.block import as_matrix

_held: dict[int, tuple[weakref.ref[Any], WordSums]] = {}  # by their addresses
_writes, _lock = 0, threading.Lock()


def remember(array: Array, words: WordSums) -> None:
    """Keep the sums of an array that is returned for as long as the array is there."""
    if not is_numpy(array):
        return
    address = _address(array)

    def forget(ended: weakref.ref[Any]) -> None:
        if (held := _held.get(address)) is not None and held[0] is ended:
            del _held[address]

    _held[address] = weakref.ref(array, forget), words


def written_back(changed: Array, restored: Array) -> bool:
    """Whether the memory of a returned block has been `restored` to what both sums say."""
    global _writes
    if not is_numpy(changed) or not changed.flags.writeable or (held := _held.get(_address(changed))) is None:
        return False
    array, words = held[0](), held[1]
    if array is None:
        return False
    layout = _layout(as_matrix(array))
    views = [
        new for old, new in ((changed, restored), (changed.T, restored.T)) if _layout(old) == _layout(new) == layout
    ]
    if not views or words.differ(views[0]):
        return False
    with _lock:
        changed[...] = restored
        _writes += 1
    return True


def writes() -> int:
    """A number that changes where a block is written to: what another task has read meanwhile may have been wrong, and
    be right when it is compared."""
    with _lock:
        return _writes


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _layout(array: Array) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides
