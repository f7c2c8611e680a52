"""Protected products in arrays of exact size: what tests/gemm/test_device_gemm.py runs under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.support.sanitized_products [--plant NAME, of those in PLANTS]
compute-sanitizer --tool racecheck python -m tests.support.sanitized_products --dtype float32   which takes its time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from abft_tsm2 import Status, encode, errstate, protected_gemm
from tests.support.cases import DTYPES
from tests.support.sanitized import Plant, main

SHAPES = ((33, 47, 65), (130, 257, 70), (70, 300, 200))
OPTIONS: tuple[dict[str, Any], ...] = ({"check": "rows"}, {"check": "columns"}, {"check": "both"})
PLANTS = {
    "lines-past-the-end": Plant("check/tsm2r_rows.cu", "smaller(first + i, p - 1)", "first + i + 4096"),
    "faults-past-the-end": Plant("repair/repair.cu", "record[8 + 3 * rank[i] + q]", "record[1 << 20]"),
}
"""What memcheck has to find."""


def _nothing(C: Any) -> None:
    """A clean product."""


def _element(C: Any) -> None:
    C[..., 5, 7] = np.nan


def _tile(C: Any) -> None:
    C[..., 3:20, 4:31] = 1e4


def _column(C: Any) -> None:
    C[..., :, 9] = -1e4


def _scattered(C: Any) -> None:
    C[..., ::2, 11] = np.inf


FAULTS: tuple[Callable[[Any], None], ...] = (_nothing, _element, _tile, _column, _scattered)


def cases(only: str | None = None) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Operands of every type, in rows and in columns, single and stacked, and the options of a product."""
    import cupy

    for number, dtype in enumerate(DTYPES):
        if only not in (None, dtype.name):
            continue
        m, k, n = SHAPES[number % len(SHAPES)]
        rng = np.random.default_rng(number)
        A, B = (cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in ((m, k), (k, n)))
        for options in OPTIONS:
            yield A, B, options
        yield cupy.asfortranarray(A), cupy.asfortranarray(B), {}
        yield cupy.stack([A, A]), cupy.stack([B, B]), {}
        yield A, encode(B), {}
        if dtype.itemsize == 2:
            yield A, B, {"verify": "float32"}
            yield A, B, {"out_dtype": np.float32}


def run(only: str | None = None) -> int:
    """The number of products; each that is planted into must be repaired."""
    import cupy

    cupy.cuda.set_allocator(None)  # the pool's blocks are larger than the arrays: it would hide an access past the end
    count = 0
    for A, B, options in cases(only):
        for plant in FAULTS:

            def hook(stage: str, arrays: Any, plant: Callable[[Any], None] = plant) -> None:
                if stage == "multiplied":
                    plant(arrays["C"])

            with errstate(corrected="ignore"):
                _, report = protected_gemm(A, B, on_stage=hook, return_report=True, **options)
            wanted = Status.CLEAN if plant is _nothing else Status.CORRECTED
            assert report.status is wanted, f"{plant.__name__} {options}: {report}"
            count += 1
    cupy.cuda.Device().synchronize()
    return count


if __name__ == "__main__":
    main(__doc__, PLANTS, lambda only: f"{run(only)} products", DTYPES)
