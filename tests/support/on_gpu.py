"""The package's functions on NumPy arrays, computed on a GPU: so that tests written for a CPU run there unchanged.

``pytest --on-gpu tests/gemm/test_gemm.py ...`` puts these in place of the functions that the tests have imported.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import abft_tsm2
from abft_tsm2 import Encoded

NAMES = ("protected_gemm", "verify_gemm", "encode")

CPU_ALONE = {
    "test_1_a_cleared_suspicion_ends_clean_and_is_counted": "puts a product of its own in place of the CPU's",
    "test_14_equal_flips_neither_cancel_nor_pair_up": "looks at the array inside an Encoded with NumPy",
    "test_15_the_worst_status_wins_and_the_report_lists_the_rest": "writes to the array inside an Encoded with NumPy",
    "test_fields_of_the_report": "asks for seconds and multiplications, which are not counted on a GPU",
    "test_a_wrong_checksum_hides_no_fault_of_c": "a line that was repaired is right whatever its checksum was",
}
"""Tests that are about the CPU's ways, and why."""


def _there(x: Any) -> Any:
    import cupy

    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def _here(x: Any) -> Any:
    import cupy

    return cupy.asnumpy(x) if isinstance(x, cupy.ndarray) else x


class _Mirror:
    """What a hook sees: NumPy copies of the device's arrays, whose changes go back to the device."""

    def __init__(self, hook: Callable[[str, Any], None], operands: dict[int, tuple[Any, np.ndarray]]) -> None:
        self._hook = hook
        # Device array and its copy; those of operands are the test's own arrays, which it may change as well.
        self._copies: dict[tuple[int, tuple[int, ...]], tuple[Any, np.ndarray]] = {}
        for x, own in operands.values():
            self._copies[x.data.ptr, x.shape] = (x, own)

    def __call__(self, stage: str, arrays: dict[str, Any]) -> None:
        shown = {name: self._copy(x) for name, x in arrays.items()}
        before = {key: copy.tobytes() for key, (_, copy) in self._copies.items()}
        self._hook(stage, shown)
        for key, (x, copy) in self._copies.items():
            if copy.tobytes() != before[key]:
                x[...] = _there(copy)

    def _copy(self, x: Any) -> np.ndarray:
        key = (x.data.ptr, x.shape)
        if key in self._copies:
            mine = self._copies[key][1]
            if mine.flags.writeable:
                mine[...] = _here(x)
        else:
            self._copies[key] = (x, _here(x))
        return self._copies[key][1]


def protected_gemm(a: Any, b: Any, c: Any = None, **options: Any) -> Any:
    """As the package's, on the GPU."""
    out, hook = options.pop("out", None), options.pop("on_stage", None)
    given = None if out is None else _there(out)
    operands = [_there(x) for x in (a, b)] + [given if out is not None and out is c else _there(c)]
    if hook is not None:
        pairs = zip(operands, (a, b, c), strict=True)
        options["on_stage"] = _Mirror(hook, {id(own): (x, own) for x, own in pairs if isinstance(own, np.ndarray)})
    try:
        found = abft_tsm2.protected_gemm(*operands, out=given, **options)
    finally:
        if out is not None:
            out[...] = _here(given)
    result = found[0] if options.get("return_report") else found
    host = out if out is not None else _here(result)
    if isinstance(host, np.ndarray) and host.ndim == 0:
        host = host[()]
    return (host, found[1]) if options.get("return_report") else host


def verify_gemm(A: Any, B: Any, C: Any, c: Any = None, **options: Any) -> Any:
    """As the package's, on the GPU."""
    return abft_tsm2.verify_gemm(_there(A), _there(B), _there(C), _there(c), **options)


def encode(A: Any, *positional: Any, **options: Any) -> Encoded:
    """As the package's, of a copy on the GPU."""
    return abft_tsm2.encode(_there(A), *positional, **options)


def put_in(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Let a module's tests use these."""
    for name in NAMES:
        if getattr(module, name, None) is getattr(abft_tsm2, name):
            patch.setattr(module, name, globals()[name])
