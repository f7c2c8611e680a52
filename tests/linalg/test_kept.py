"""What is kept between calls lies in memory for as long as a process runs: a bit of it that flips changes no result."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import abft_tsm2 as ft
from abft_tsm2.checksum import encode as gemm_encode
from abft_tsm2.core import kept
from abft_tsm2.linalg.encode import MatrixChecksums, _powers
from tests.support.planting import at, normal, pair, put, scale

A, b = normal(140, 140), normal(140, 3)
SPD = A @ A.T + 140 * np.eye(140)
LONG = pair(40, 1500, 900)
CALLS = {
    "offline": lambda **how: ft.protected_lu_factor(A, mode="offline", **how),
    "online": lambda **how: ft.protected_lu_factor(A, mode="online", **how),
    "solve": lambda **how: ft.protected_solve(A, b, **how),
    "Cholesky": lambda **how: ft.protected_cholesky(SPD, **how),
    "long product": lambda **how: ft.protected_gemm(*LONG, **how),
    "stored": lambda **how: ft.protected_gemm(ft.encode(A, side="rows", recheck=True), b, **how),
}
FAULTS = {
    "offline": at("factored", "W", put((90, 40), 1e3)),
    "online": at("updated", "W", scale((130, 135), 1e3)),
    "solve": at("factored", "W", put((90, 40), 1e3)),
}


def results(found: Any) -> list[bytes]:
    return [x.tobytes() for x in (found if isinstance(found, tuple) else (found,))]


def flipped(array: np.ndarray, bit: int) -> None:
    """Flip one bit of an array in the middle, though it is read-only, as a fault does."""
    array.flags.writeable = True
    memory = array.reshape(-1).view(np.uint8)
    memory[memory.size // array.itemsize // 2 * array.itemsize + bit // 8] ^= 1 << bit % 8
    array.flags.writeable = False


def hit_calls(call: Any) -> Iterator[Any]:
    """What a call finds with a bit of an array flipped, for each that is kept and several bits."""
    for held in kept.everything:
        for arguments in list(held):
            for bit in (0, 6, 62, 63):
                array = held[arguments][0] if arguments in held else np.empty(0)
                if bit < 8 * array.itemsize and array.size:
                    flipped(array, bit)
                    yield call()
                    flipped(array, bit)


@pytest.mark.parametrize("name", CALLS)
def test_a_bit_of_any_kept_array_changes_nothing(name: str) -> None:
    call = CALLS[name]
    right, report = call(return_report=True)
    assert report.status is ft.Status.CLEAN
    count = 0
    for found, report in hit_calls(lambda: call(return_report=True)):
        count += 1
        assert (report.status, report.faults) == (ft.Status.CLEAN, ())
        assert results(found) == results(right)
    assert count > 3


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_with_a_bit_of_any_kept_array_flipped(name: str) -> None:
    CALLS[name]()
    with np.errstate(all="ignore"):
        for _, report in hit_calls(lambda: CALLS[name](return_report=True, on_stage=FAULTS[name])):
            assert report.status is ft.Status.CORRECTED


def test_no_array_is_kept_uncompared() -> None:
    for call in CALLS.values():
        call()
    for module in pkgutil.walk_packages(ft.__path__, "abft_tsm2."):
        if "interop" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    caches = {
        f"{name}.{attribute}": value
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "abft_tsm2" and not name.endswith("autotune")  # operands that are timed
        for attribute, value in list(vars(module).items())
        if isinstance(value, functools._lru_cache_wrapper)
    }
    assert caches
    for name, cache in caches.items():
        held = [x for x in gc.get_referents(cache) if x is not vars(cache)]
        for _ in range(3):  # in tuples, lists and what holds such
            assert not any(isinstance(x, np.ndarray) for x in held), name
            held = [x for one in held if isinstance(one, tuple | list | dict) for x in gc.get_referents(one)]


def test_a_fault_while_an_entry_is_made_does_not_last() -> None:
    made: list[int] = []

    @kept.compared
    def ramp(n: int) -> Any:
        made.append(n)
        x = np.arange(n)
        x[0] = len(made) == 1  # the first time only
        return x

    assert ramp(3).tolist() == [0, 1, 2]
    assert ramp(3).tolist() == [0, 1, 2]
    assert len(made) == 3


@pytest.mark.parametrize("half", [3, 4])
def test_a_nan_among_ordered_norms_is_no_number(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = np.linspace(-1, 1, 2 * half + 1)

    class Hit(np.ndarray):
        def sort(self, *args: Any, **options: Any) -> None:
            super().sort(*args, **options)
            self[half] = np.nan

    assert gemm_encode._within(norms.view(Hit), -1000) is None
    monkeypatch.setattr(np, "sort", lambda x: np.where(np.arange(x.size) == half, np.nan, x))
    assert np.array_equal(_powers(norms)[0], np.rint(norms))


def test_the_sizes_of_lines_that_no_sample_shows() -> None:
    """Lines of a symmetric matrix are long somewhere else each: norms and sums stay in the range."""
    V = np.vander(np.linspace(-4, 4, 400), 400)
    e = MatrixChecksums.of(np.tril(V) + np.tril(V, -1).T)
    for x in (e.w, e.v, e.S, e.Z, e.row_norms, e.column_norms, e.row_sizes, e.column_sizes):
        assert np.isfinite(x).all()
