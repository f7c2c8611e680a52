"""Faults in a stored matrix: what the integer checksums find, locate and restore.

    python -m benchmarks.storage --patterns 10000 --out benchmarks/results/storage.csv        about 20 seconds

One flip: every bit of every element of small matrices, and samples of a larger one; each must be restored bit
for bit. Patterns of 2 to 8 flips: restored bit for bit, or refused with the matrix left alone; restoration is
promised where no row, or no column, holds two wrong elements. A flip in a stored sum must be told from one in
the matrix. Half of the matrices are normal data, half random bit patterns (NaN payloads, both zeros).
The exit code is 1 if anything else happens.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.checksum.storage import IntegerChecksums, diagnose_storage, integer_checksums, restore
from abft_tsm2.core.row_sums import fingerprint
from benchmarks import tables, timing

DTYPES = ("float16", "float32", "float64")
SHAPES = ((1, 1), (1, 13), (13, 1), (5, 7), (17, 24), (64, 33))
LARGE = (257, 513)
OUTCOMES = ("restored", "refused", "checksum_fault", "clean", "wrong")


@dataclass(frozen=True)
class Flips:
    """Bits to flip, as (row, column, bit); `before` sets them first, and so the sign of each change."""

    places: tuple[tuple[int, int, int], ...]
    before: tuple[int, ...] = ()


Regime = Callable[[np.random.Generator, int, int, int, int], Flips]


def random_elements(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    return _flips(rng.integers(m, size=count), rng.integers(n, size=count), rng.integers(bits, size=count))


def same_row(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    return _flips([rng.integers(m)] * count, rng.integers(n, size=count), rng.integers(bits, size=count))


def same_column(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    return _flips(rng.integers(m, size=count), [rng.integers(n)] * count, rng.integers(bits, size=count))


def one_element(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    where = [rng.integers(m)] * count, [rng.integers(n)] * count
    return _flips(*where, rng.choice(bits, size=count, replace=False))


def same_bit_in_row(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    columns = _some(rng, n, count)
    return _flips([rng.integers(m)] * len(columns), columns, [rng.integers(bits)] * len(columns))


def equal_changes(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    """The same bit set in elements of a small grid, so that rows and columns are shared."""
    rows, columns = _some(rng, m, 3), _some(rng, n, 3)
    grid = [(i, j) for i in rows for j in columns]
    chosen = [grid[at] for at in _some(rng, len(grid), count)]
    bit = int(rng.integers(bits))
    return Flips(tuple((i, j, bit) for i, j in chosen), (0,) * len(chosen))


def staircase(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    """A path of elements that share a row and a column in turn: peeled from its ends."""
    rows, columns = rng.permutation(m), rng.permutation(n)
    steps = min(count, m + n - 1, 2 * min(m, n))
    places = [(rows[step // 2], columns[(step + 1) // 2 % n]) for step in range(steps)]
    return _flips(*zip(*places, strict=True), rng.integers(bits, size=steps))


def rectangle(rng: np.random.Generator, m: int, n: int, bits: int, count: int) -> Flips:
    """The same bit in the corners of rectangles: changes +d and -d in turn; often one corner is left out."""
    rows, columns = _some(rng, m, 2), _some(rng, n, max(2, count // 2))
    bit, odd = int(rng.integers(bits)), count % 2 or int(rng.integers(2))
    corners = [(i, j, bit) for j in columns for i in rows]
    before = [(a + b) % 2 for b in range(len(columns)) for a in range(len(rows))]
    keep = len(corners) - 1 if odd and len(corners) > 2 else len(corners)
    return Flips(tuple(corners[:keep]), tuple(before[:keep]))


REGIMES: dict[str, Regime] = {
    "random elements": random_elements,
    "same row": same_row,
    "same column": same_column,
    "one element": one_element,
    "same bit in a row": same_bit_in_row,
    "equal changes": equal_changes,
    "staircase": staircase,
    "rectangle +d -d +d": rectangle,
}


def matrix(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Normal data or random bit patterns, in C or Fortran order."""
    if rng.integers(2):
        x = rng.standard_normal(shape).astype(dtype)
    else:
        x = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)[..., 0]
    return np.asfortranarray(x) if rng.integers(2) else np.ascontiguousarray(x)


def plant(x: np.ndarray, flips: Flips) -> tuple[np.ndarray, IntegerChecksums, np.ndarray]:
    """The right matrix, its checksums, and a copy with the bits flipped."""
    right = x.copy(order="K")
    patterns = _bits(right)
    one = patterns.dtype.type(1)
    for (i, j, bit), value in zip(flips.places, flips.before, strict=False):
        patterns[i, j] = (patterns[i, j] & ~(one << bit)) | (patterns.dtype.type(value) << bit)
    wrong = right.copy(order="K")
    for i, j, bit in flips.places:
        _bits(wrong)[i, j] ^= one << bit
    return right, integer_checksums(right), wrong


def outcome(right: np.ndarray, sums: IntegerChecksums, wrong: np.ndarray) -> str:
    """One of `OUTCOMES`; "wrong" where diagnosis wrote to the matrix or restoration made another one."""
    held = _bits(wrong).copy()
    found = diagnose_storage(wrong, sums)
    if not np.array_equal(_bits(wrong), held) or (found.refused and found.corruptions):
        return "wrong"
    if not found.corruptions:
        return "refused" if found.refused else "checksum_fault" if found.checksum_fault else "clean"
    restore(wrong, found.corruptions)
    same = np.array_equal(_bits(wrong), _bits(right)) and diagnose_storage(wrong, sums).clean
    return "restored" if same else "wrong"


def single_flips(rng: np.random.Generator, samples: int) -> Iterator[tuple[str, str, bool]]:
    """(dtype, outcome, success) of one flip: every bit of small matrices, some of a large one."""
    for dtype in DTYPES:
        bits = 8 * np.dtype(dtype).itemsize
        for shape in ((1, 1), (1, 5), (5, 1), (5, 7)):
            for at in np.ndindex(*shape, bits):
                yield dtype, *_single(rng, shape, dtype, at)
        for _ in range(samples):
            at = tuple(int(rng.integers(size)) for size in (*LARGE, bits))
            yield dtype, *_single(rng, LARGE, dtype, at)


def _single(rng: np.random.Generator, shape: tuple[int, int], dtype: str, at: Any) -> tuple[str, bool]:
    right, sums, wrong = plant(matrix(rng, shape, dtype), Flips((at,)))
    noticed = bool((fingerprint(wrong) != fingerprint(right)).any())
    result = outcome(right, sums, wrong)
    return result, noticed and result == "restored"


def patterns(rng: np.random.Generator, count: int) -> Iterator[tuple[str, str, str, bool, bool]]:
    """(dtype, regime, outcome, promised, success) of `count` patterns of 2 to 8 flips."""
    for number in range(count):
        regime = list(REGIMES)[number % len(REGIMES)]
        dtype = DTYPES[number // len(REGIMES) % len(DTYPES)]
        m, n = SHAPES[int(rng.integers(len(SHAPES)))] if number % 50 else LARGE
        bits = 8 * np.dtype(dtype).itemsize
        while True:
            flips = REGIMES[regime](rng, m, n, bits, int(rng.integers(2, 9)))
            if len(flips.places) > 1:
                break
            m, n = SHAPES[-1]  # the shape was too small for this regime
        right, sums, wrong = plant(matrix(rng, (m, n), dtype), flips)
        rows, columns = np.nonzero(_bits(right) != _bits(wrong))
        promised = len(set(rows)) == len(rows) or len(set(columns)) == len(columns)
        result = outcome(right, sums, wrong)
        yield dtype, regime, result, promised, result == "restored" or (result == "refused" and not promised)


def stored_sums(rng: np.random.Generator, count: int) -> Iterator[tuple[str, str, str, bool]]:
    """(dtype, regime, outcome, success) of a flip in the stored sums, every other time in the matrix too."""
    for number in range(count):
        dtype = DTYPES[number % len(DTYPES)]
        shape = SHAPES[int(rng.integers(len(SHAPES)))]
        at = tuple(int(rng.integers(size)) for size in (*shape, 8 * np.dtype(dtype).itemsize))
        both = number // len(DTYPES) % 2 == 1
        right, sums, wrong = plant(matrix(rng, shape, dtype), Flips((at,) if both else ()))
        side = "rows" if rng.integers(2) else "columns"
        hit = getattr(sums, side).copy()
        hit.reshape(-1)[rng.integers(hit.size)] ^= np.uint64(1) << np.uint64(rng.integers(64))
        result = outcome(right, replace(sums, **{side: hit}), wrong)
        yield (
            dtype,
            "stored sum and matrix" if both else "stored sum",
            result,
            result == ("refused" if both else "checksum_fault"),
        )


def measure(count: int, seed: int) -> tuple[list[dict[str, Any]], int]:
    """The rows of the table, and how many cases did not end as they must."""
    rng = np.random.default_rng(seed)
    cells: dict[tuple[str, str], Counter[str]] = {}
    failures = 0

    def note(regime: str, dtype: str, result: str, success: bool, promised: bool) -> None:
        nonlocal failures
        cell = cells.setdefault((regime, dtype), Counter())
        cell.update({result: 1, "cases": 1, "promised": promised, "promise_kept": promised and result == "restored"})
        failures += not success

    for dtype, result, success in single_flips(rng, samples=max(20, count // 50)):
        note("one flip", dtype, result, success, True)
    for dtype, regime, result, promised, success in patterns(rng, count):
        note(regime, dtype, result, success, promised)
    for dtype, regime, result, success in stored_sums(rng, max(20, count // 10)):
        note(regime, dtype, result, success, False)
    machine = {key: timing.machine()[key] for key in ("device", "python", "numpy")}
    keys = ("cases", *OUTCOMES, "promised", "promise_kept")
    rows = [
        {"regime": regime, "dtype": dtype, **{key: cell[key] for key in keys}, "seed": seed, **machine}
        for (regime, dtype), cell in cells.items()
    ]
    return rows, failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", type=int, default=10_000, metavar="N", help="patterns of 2 to 8 flips")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=tables.RESULTS / "storage.csv", metavar="CSV")
    options = parser.parse_args(arguments)
    rows, failures = measure(options.patterns, options.seed)
    head = ("regime", "dtype", "cases", *OUTCOMES, "promised", "promise_kept")
    print(tables.markdown(head, ([str(row[key]) for key in head] for row in rows)))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    cases = sum(row["cases"] for row in rows)
    print(f"{cases} cases, {failures} that ended otherwise than they must: {'NOT met' if failures else 'met'}")
    return int(failures > 0)


def _flips(rows: Any, columns: Any, bits: Any) -> Flips:
    # Twice the same bit is no flip at all.
    places = {(int(i), int(j), int(b)) for i, j, b in zip(rows, columns, bits, strict=True)}
    return Flips(tuple(sorted(places)))


def _some(rng: np.random.Generator, length: int, count: int) -> list[int]:
    return [int(i) for i in rng.permutation(length)[:count]]


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.dtype.itemsize}")


if __name__ == "__main__":
    sys.exit(main())
