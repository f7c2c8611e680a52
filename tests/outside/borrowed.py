"""Tests of other libraries, borrowed from where they are installed, with abft_tsm2's functions under their names.

A file of this folder assigns their classes and functions to names of its own, and pytest collects them there. While one
of them runs, the names that its module reads are swapped, in one way or in both:

- "as they are": every call goes to the protected function.
- "real numbers": integers are computed in float64, where the original does so; a call with operands of other types
  (complex, object, ...) goes to the original. So a test that tries all types one after the other tries those that are
  protected to its end.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

import abft_tsm2
from abft_tsm2 import Status

AS_THEY_ARE, REAL_NUMBERS = "as they are", "real numbers"
PROTECTED = ("float16", "float32", "float64")
NO_ALARM = {Status.CLEAN, Status.UNVERIFIABLE}


def load(name: str, path: Path | None = None) -> Any:
    """Their module, by its name or from a file. Its warnings and its settings of Hypothesis are no matter of ours."""
    ours = settings.get_current_profile_name()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name) if path is None else _from_file(name, path)
    finally:
        settings.load_profile(ours)


def _from_file(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Swap:
    """A protected function with the signature of the one whose name it gets."""

    protected: Callable[..., Any]
    original: Callable[..., Any]
    integers: bool = True
    """The original computes integers in float64."""


class Namespace:
    """A module with other members: only who reads them here gets those."""

    def __init__(self, module: Any, members: Mapping[str, Any]) -> None:
        self._module, self._members = module, members

    def __getattr__(self, name: str) -> Any:
        return self._members[name] if name in self._members else getattr(self._module, name)


def _is_pair(x: Any) -> bool:
    """Such as (lu, piv), whose first part is an operand."""
    return isinstance(x, tuple | list) and len(x) > 0 and hasattr(x[0], "shape") and x[0].shape != ()


def _operands(values: Iterable[Any]) -> list[Any]:
    """The arrays among the arguments."""
    first = [x[0] if _is_pair(x) else x for x in values]
    return [np.asarray(x) if isinstance(x, list) else x for x in first if isinstance(x, list) or hasattr(x, "dtype")]


def _dtype_of(x: Any) -> np.dtype[Any]:
    """NumPy's type of that name, where a library has types of its own: array_api_strict.float64."""
    return x.dtype if isinstance(x.dtype, np.dtype) else np.dtype(str(x.dtype).rpartition(".")[2])


def _in_float64(x: Any) -> Any:
    """Integers in float64; all else as it is."""
    if _is_pair(x):
        return (_in_float64(x[0]), *x[1:])
    made = np.asarray(x) if isinstance(x, list) else x
    return made.astype(np.float64) if hasattr(made, "dtype") and _dtype_of(made).kind in "biu" else x


class Calls:
    """Counts the calls that reach a protected function. What one of them calls itself is the original."""

    def __init__(self) -> None:
        self.number = 0
        self._inside = threading.local()

    def through(self, swap: Swap, mode: str) -> Callable[..., Any]:
        @functools.wraps(swap.protected)
        def protected(*args: Any, **named: Any) -> Any:
            if getattr(self._inside, "yes", False):
                return swap.original(*args, **named)
            self.number += 1
            self._inside.yes = True
            try:
                return swap.protected(*args, **named)
            finally:
                self._inside.yes = False

        @functools.wraps(swap.protected)
        def of_real_numbers(*args: Any, **named: Any) -> Any:
            dtypes = [_dtype_of(x) for x in _operands([*args, *named.values()])]
            if any(x.name not in PROTECTED and not (swap.integers and x.kind in "biu") for x in dtypes):
                return swap.original(*args, **named)
            return protected(*map(_in_float64, args), **{name: _in_float64(x) for name, x in named.items()})

        return protected if mode == AS_THEY_ARE else of_real_numbers


def swapping(*swaps_of: tuple[Any, Mapping[str, Swap]], modes: Sequence[str] = (AS_THEY_ARE,)) -> Any:
    """A fixture for every test of a file, to be assigned to a name: under it these names of their modules are swapped.

    A name is that of a function, or has dots, of which the first part is a module that theirs has imported. Fails the
    tests that call no protected function, and those that one raises an alarm in.
    """

    # One way is no parameter: tests that are methods of a unittest.TestCase have none.
    @pytest.fixture(autouse=True, params=modes if len(modes) > 1 else None)
    def swapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
        mode = request.param if len(modes) > 1 else modes[0]
        calls, in_place_of = Calls(), {}
        for module, swaps in swaps_of:
            made = {name: calls.through(swap, mode) for name, swap in swaps.items()}
            in_place_of |= {swap.original: made[name] for name, swap in swaps.items()}
            for name, value in _tree(module, made).items():
                monkeypatch.setattr(module, name, value)
        with abft_tsm2.monitor() as log:
            yield in_place_of
        assert calls.number, "called no protected function"
        assert {report.status for report in log} <= NO_ALARM

    return swapped


def _tree(module: Any, members: Mapping[str, Any]) -> dict[str, Any]:
    """What each name of `module` becomes: functions, and namespaces that hold those of names with dots."""
    below: dict[str, dict[str, Any]] = {}
    made = {name: value for name, value in members.items() if "." not in name}
    for name, value in members.items():
        head, _, rest = name.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
    for head, inner in below.items():
        original = getattr(module, head)
        made[head] = Namespace(original, _tree(original, inner))
    return made


def checkout(variable: str, source: str) -> Path:
    """The folder of a checkout that an environment variable names; else the test, or the file of tests, is skipped."""
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} is not set: the path of a checkout of {source}", allow_module_level=True)
    return Path(given).resolve(strict=True)
