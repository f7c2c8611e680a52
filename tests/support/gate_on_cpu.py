"""The gate `benchmarks.regress.same_bits` with CuPy's route on the CPU as well.

    python -m tests.support.gate_on_cpu [options of benchmarks.regress.same_bits]

What stands for CuPy belongs to the package that is run: with ``--in FOLDER`` it is that of the folder.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regress import same_bits

MODULES = {"products": "cupy_on_cpu", "lu": "lu_on_cpu", "cholesky": "solver_on_cpu"}


class StandIns:
    """`benchmarks.regress.on_cupy.StandIns`.

    Parameters
    ----------
    cache : Path
        Where kernels compiled for the CPU are kept.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def cupy(self, name: str) -> Iterator[Any]:
        with pytest.MonkeyPatch.context() as patch:
            made = importlib.import_module(f"tests.support.{MODULES[name]}").install(patch, self._cache)
            yield made[0] if isinstance(made, tuple) else made

    @contextmanager
    def solutions(self) -> Iterator[Any]:
        from abft_tsm2.linalg import solve

        cases = importlib.import_module("tests.support.solution_cases")
        given = solve.as_array  # which takes arrays of a subclass of NumPy's for NumPy's
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solve, "as_array", lambda x, *more, **named: given(x, *more, **named).view(type(x)))
            cases.install(patch, self._cache)
            yield cases.on_card


def main() -> int:
    for name in ("tests", "tests.support"):
        sys.modules.pop(name, None)  # what is imported later is that of the folder that the gate runs in
    cache = os.environ.get("ABFT_TSM2_BUILT_KERNELS", Path(tempfile.gettempdir()) / "abft_tsm2-regress-kernels")
    return same_bits.main(stand_ins=StandIns(Path(cache)))


if __name__ == "__main__":
    sys.exit(main())
