"""What calls on a GPU are remembered by, with arrays that only say what CuPy's would."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import queued


class Array:
    def __init__(self, strides: tuple[int, ...] = (64, 8)) -> None:
        self.shape, self.strides, self.dtype = (8, 8), strides, np.dtype("f8")
        self.data = SimpleNamespace(device_id=0, ptr=4096)


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array, cuda=card))


def test_a_key_tells_the_strides_of_out_apart() -> None:
    # So that what was accepted of one out says nothing of another one that overlaps itself.
    keys = {queued.key_of(Array(), Array(), Array(strides), ()) for strides in ((64, 8), (0, 8), (8, 8), (8, 64))}
    assert len(keys) == 4
    assert None not in keys


@pytest.mark.parametrize("options", [([],), (1.0, np.array(2.0)), ("rows", {})], ids=str)
def test_options_without_a_hash_are_not_remembered_but_judged(options: tuple[Any, ...]) -> None:
    assert queued.key_of(Array(), Array(), None, options) is None
    assert queued.key_of(Array(), Array(), None, (1.0, "rows", None)) is not None
