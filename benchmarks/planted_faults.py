"""Planted faults: what is found, what is repaired, what escapes.

    python -m benchmarks.planted_faults                        20000 faults over all families and types
    python -m benchmarks.planted_faults --only 17              those of product 17 again, with their reports
    python -m benchmarks.planted_faults bits --size 4096       share of single flips found, bit by bit

Faults are planted through on_stage: in C after the product, in the checksums, in A and B after encoding. The
judge does not believe the report: it compares with the exact product (`tests.support.oracles`) and with the same call
without a fault. A fault is above the limit where it moves the checksum of a line by more than the bound and
the clean residual; each of those must be found, and no element of such a line may leave the rounding bound in
what is returned. A fault in a checksum must leave C as it is, bit for bit. Writes results/planted_faults.csv,
planted_bits.csv and bits.csv; the exit code is 1 where one of this is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from abft_tsm2 import Report, SilentDataCorruptionError, encode, protected_gemm
from benchmarks import tables
from benchmarks.clean_products import Product, alarm
from benchmarks.judge import OUTCOMES, Change, Judge, Plan, Watch
from tests.support.cases import REGIMES, finfo
from tests.support.oracles import Exact

PLANTED_REGIMES = tuple(regime for regime in REGIMES if regime.name not in ("tiny", "longest k"))


# ---- faults -----------------------------------------------------------------------------------------------


def plans(dtype: np.dtype[Any], rng: np.random.Generator) -> list[Plan]:
    """One fault of every kind, and one of every exponent bit, for a product of this type."""
    width, mantissa = 8 * dtype.itemsize, finfo(dtype).nmant
    on_c = [
        Plan("NaN", _set(np.nan)),
        Plan("Inf", _set(np.inf)),
        Plan("x 1e30", _scale_element(1e30)),
        Plan("sign", _flip(width - 1), bit=width - 1),
        *(Plan("exponent bit", _flip(bit), bit=bit) for bit in range(mantissa, width - 1)),
        *(Plan("random bit", _flip(int(bit)), bit=int(bit)) for bit in rng.integers(0, width, 4)),
        Plan("3 to 10 elements", _several),
        Plan("two elements swapped", _swap),
        Plan("row", _row),
        Plan("column", lambda c, rng: _row(c.T, rng)),
        Plan("tile zeroed", _scale_tile(0.0)),
        Plan("tile x 1.001", _scale_tile(1.001)),
        Plan("all of C x 1.01", lambda c, rng: _assign(c, c.astype(np.float64) * 1.01)),
    ]
    on_checksums = [
        Plan(f"{name}: {what}", change, name, "verified" if name == "u" else "encoded")
        for name in "stu"
        for what, change in (("value", _shift), ("NaN", _set(np.nan)))
    ]
    on_inputs = [Plan(f"{name} changed", _flip(int(rng.integers(0, width))), name, "encoded") for name in ("A", "B")]
    return on_c + on_checksums + on_inputs


def flip_bit(x: np.ndarray, position: tuple[int, ...], bit: int) -> None:
    """Flip one bit (0 is the lowest) of one element of an array of any layout."""
    word = x[position].reshape(1).view(f"u{x.itemsize}")
    x[position] = (word ^ word.dtype.type(1 << bit)).view(x.dtype)[0]


def _position(x: np.ndarray, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(int(rng.integers(size)) for size in x.shape)


def _assign(x: np.ndarray, values: Any) -> None:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x[...] = np.asarray(values).astype(x.dtype)


def _set(value: float) -> Change:
    return lambda x, rng: x.__setitem__(_position(x, rng), value)


def _scale_element(factor: float) -> Change:
    def change(x: np.ndarray, rng: np.random.Generator) -> None:
        at = _position(x, rng)
        _assign(x[at[:-1]][at[-1] : at[-1] + 1], x[at].astype(np.longdouble) * factor)

    return change


def _flip(bit: int) -> Change:
    return lambda x, rng: flip_bit(x, _position(x, rng), bit)


def _shift(x: np.ndarray, rng: np.random.Generator) -> None:
    size = float(abs(np.nan_to_num(x.astype(np.float64), posinf=0, neginf=0)).max())
    x[_position(x, rng)] = size or 1.0


def _several(x: np.ndarray, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(3, 11))):
        flip_bit(x, _position(x, rng), int(rng.integers(finfo(x.dtype).nmant - 2, 8 * x.itemsize)))


def _swap(x: np.ndarray, rng: np.random.Generator) -> None:
    row, first, second = int(rng.integers(x.shape[0])), *map(int, rng.integers(0, x.shape[1], 2))
    x[row, [first, second]] = x[row, [second, first]]


def _row(x: np.ndarray, rng: np.random.Generator) -> None:
    size = float(abs(np.nan_to_num(x.astype(np.float64), posinf=0, neginf=0)).max())
    _assign(x[int(rng.integers(x.shape[0]))], rng.uniform(-1, 1, x.shape[1]) * size)


def _scale_tile(factor: float) -> Change:
    def change(x: np.ndarray, rng: np.random.Generator) -> None:
        i, j = (int(rng.integers(max(1, size - 63))) for size in x.shape)
        tile = x[i : i + 64, j : j + 64]
        _assign(tile, tile.astype(np.float64) * factor)

    return change


# ---- the campaign -----------------------------------------------------------------------------------------


def plant(product: Product) -> Iterator[tuple[Plan, dict[str, bool], Report]]:
    """Plant one fault of every kind, one at a time, in one product; those that change no bit are left out."""
    rng = np.random.default_rng([product.seed, product.index, 1])
    exact = Exact.of(product.a, product.b, product.c, **product.scalars)
    clean = Watch()
    honest, report = product.protect(on_error="detect", on_stage=clean)
    if alarm(product, honest, report) or exact.outside(honest).any():
        raise RuntimeError(f"{product} is wrong without any fault: see benchmarks.clean_products\n{report}")
    judge = Judge(product, exact, honest, report, clean)
    for plan in plans(product.case.dtype, rng):
        watch = Watch(plan, rng)
        result: np.ndarray | None = None
        try:
            result, report = product.protect(on_error="correct", on_stage=watch)
        except SilentDataCorruptionError as error:
            report = error.report
        if plan.operand in "AB":
            watch.restore()
        if watch.changed:
            yield plan, judge(plan, result, report, watch), report


def campaign(
    count: int, seed: int = 0, indices: Iterable[int] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Plant `count` faults, or those of `indices`: rows by kind, rows by bit, a line for each failure."""
    by_kind: dict[tuple[str, str], Counter[str]] = {}
    by_bit: dict[tuple[str, int], Counter[str]] = {}
    failures: list[str] = []
    total, index, queue = 0, 0, list(indices)
    while queue if indices else total < count:
        product = Product.draw(seed, queue.pop(0) if indices else index, PLANTED_REGIMES)
        index += 1
        for plan, outcome, report in plant(product):
            total += 1
            by_kind.setdefault((plan.kind, product.case.dtype.name), Counter()).update(outcome)
            if plan.bit >= 0:
                by_bit.setdefault((product.case.dtype.name, plan.bit), Counter()).update(outcome)
            broken = [name for name in ("missed_above", "wrong_above", "damaged") if outcome[name]]
            if broken:
                failures.append(f"{product}; {plan.kind} {plan.bit}: {', '.join(broken)}: {report}")
                print(f"FAILURE {failures[-1]}", flush=True)
            elif indices:
                print(f"{plan.kind} {plan.bit}: {[name for name in OUTCOMES if outcome[name]]}\n{report}")
        if index % 100 == 0:
            print(f"{total} faults in {index} products, {len(failures)} failures", file=sys.stderr)
    kinds = [{"kind": kind, "dtype": dtype, **_counts(n)} for (kind, dtype), n in by_kind.items()]
    bits = [{"dtype": dtype, "bit": bit, **_counts(n)} for (dtype, bit), n in sorted(by_bit.items())]
    return kinds, bits, failures


def _counts(outcomes: Counter[str]) -> dict[str, int]:
    return {name: int(outcomes[name]) for name in OUTCOMES}


# ---- bit by bit -------------------------------------------------------------------------------------------

DESIGN = {
    ("float32", 1024): {12: 32, 13: 61, 14: 81, 15: 90, 16: 95, 17: 98, 18: 99, 19: 99, 20: 100},
    ("float32", 4096): {12: 0, 13: 5, 14: 32, 15: 61, 16: 80, 17: 90, 18: 95, 19: 97, 20: 99},
    ("float64", 1024): {11: 4, 12: 32, 13: 61, 14: 81, 15: 90, 16: 95, 18: 99, 20: 100},
    ("float64", 4096): {11: 0, 12: 0, 13: 5, 14: 32, 15: 61, 16: 80, 18: 95, 20: 99},
}
"""Per cent of single flips found that the bounds were designed for, normal data of this size, row checks."""

BARS = {("float32", 4096): (17, 0.90), ("float64", 4096): (18, 0.95)}
LINES = 256


def detection_by_bit(n: int, dtype: str, bits: Iterable[int], flips: int, seed: int = 0) -> dict[int, float]:
    """Share of single flips of each bit found in an n x n x n product of normal data.

    A row's check depends on no other row. So LINES rows of the product serve, with one flip in each, and one call
    judges them all: its report names the rows that it found wrong.
    """
    rng = np.random.default_rng([seed, n])
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((LINES, n), (n, n)))
    encoded = encode(b, side="rows")
    shares = {}
    for bit in bits:

        def flip_in_every_row(stage: str, arrays: Mapping[str, np.ndarray], bit: int = bit) -> None:
            if stage == "multiplied":
                for row in range(LINES):
                    flip_bit(arrays["C"], (row, int(rng.integers(n))), bit)

        found = planted = 0
        while planted < flips:
            _, report = protected_gemm(
                a, encoded, check="rows", on_error="detect", return_report=True, on_stage=flip_in_every_row
            )
            found += len(wrong_rows(report))
            planted += LINES
        shares[bit] = found / planted
    return shares


def wrong_rows(report: Report) -> set[int]:
    """The rows of C that a report calls wrong."""
    rows: set[int] = set()
    for fault in report.faults:
        if fault.operand == "C":
            rows.update(fault.rows or range(report.m))
    return rows


def bits_table(n: int, flips: int, seed: int = 0) -> tuple[list[dict[str, Any]], bool]:
    """Rows of the table by bit for float32 and float64, and whether the bars are met."""
    rows, met = [], True
    for dtype, low in (("float32", 8), ("float64", 8)):
        width = 8 * np.dtype(dtype).itemsize
        # Above the highest bit of the design every flip is found: a few of them are enough to see it.
        wanted = [*range(low, 24), *range(24, width, 4), width - 2, width - 1]
        design = DESIGN.get((dtype, n), {})
        for bit, share in detection_by_bit(n, dtype, sorted(set(wanted)), flips, seed).items():
            expected = design.get(bit, np.nan) / 100
            row = {"dtype": dtype, "n": n, "bit": bit, "flips": flips, "found": round(share, 4)}
            rows.append({**row, "design": expected})
            known = f" (design {expected:.0%})" if bit in design else ""
            print(f"{dtype} {n} bit {bit:2d}: {share:6.1%} found{known}", flush=True)
            at, bar = BARS.get((dtype, n), (-1, 0.0))
            met &= bit != at or share >= bar
    return rows, met


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["faults", "bits"], default="faults")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="INDEX", help="these products again")
    parser.add_argument("--size", type=int, nargs="+", default=[1024, 4096], metavar="N", help="for bits")
    parser.add_argument("--flips", type=int, default=1024, help="for bits: how many of each, in steps of 256")
    parser.add_argument("--prefix", default="", help="of the names of the CSVs")
    options = parser.parse_args(arguments)
    if options.what == "bits":
        results = [bits_table(n, options.flips, options.seed) for n in options.size]
        tables.write(f"{options.prefix}bits", [row for rows, _ in results for row in rows])
        return 0 if all(met for _, met in results) else 1
    kinds, bits, failures = campaign(options.count, options.seed, options.only)
    if not options.only:
        tables.write(f"{options.prefix}planted_faults", kinds)
        tables.write(f"{options.prefix}planted_bits", bits)
    total = Counter[str]()
    for row in kinds:
        total.update({name: row[name] for name in OUTCOMES})
    print(", ".join(f"{total[name]} {name.replace('_', ' ')}" for name in OUTCOMES))
    for line in failures:
        print(f"failure: --seed {options.seed} --only {line.partition(':')[0]}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
