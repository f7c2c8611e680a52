"""False alarms: protected products without any fault, over all families, types, orders and shapes.

    python -m benchmarks.clean_products                        20000 products, about a quarter of an hour
    python -m benchmarks.clean_products --count 500            a quick look
    python -m benchmarks.clean_products --only 1234 1235       these again, with their reports

A fault verdict on a clean product is a false alarm: there must be none. UNVERIFIABLE is one too, unless an
operand or the product holds numbers outside the normal range. Writes results/clean_products.csv; the exit
code is 1 after an alarm.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2 import Report, Status, errstate, protected_gemm
from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.judge.oracle import Array, widened
from benchmarks import tables
from tests.support import families
from tests.support.cases import REGIMES, Case, Regime, arrange, draw

ALARMS = {Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE}
EXACT_SCALARS = (1.0, -0.5, 2.0, -1.0)  # numbers that every type holds exactly


@dataclass(frozen=True)
class Product:
    """One reproducible product: everything follows from the seed and the index."""

    seed: int
    index: int
    family: str
    case: Case
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray | None
    alpha: float
    beta: float
    check: str

    @classmethod
    def draw(cls, seed: int, index: int, regimes: Iterable[Regime] = REGIMES) -> Product:
        """Families take turns; the rest is random."""
        rng = np.random.default_rng([seed, index])
        family = families.names()[index % len(families.FAMILIES)]
        case = draw(rng, regimes=regimes)
        a, b = families.operands(family, case.m, case.k, case.n, rng, case.dtype)
        a, b = arrange(a, case.order_a), arrange(b, case.order_b)
        check = str(rng.choice(["auto", "auto", "rows", "columns", "both"]))
        if rng.random() < 0.75:
            return cls(seed, index, family, case, a, b, None, 1.0, 0.0, check)
        alpha, beta = rng.choice(EXACT_SCALARS, 2)
        return cls(seed, index, family, case, a, b, _addend(a, b, rng), float(alpha), float(beta), check)

    @property
    def scalars(self) -> dict[str, Any]:
        """The arguments that stand beside a, b and c."""
        return {"alpha": self.alpha, "beta": self.beta}

    def protect(self, **options: Any) -> tuple[np.ndarray, Report]:
        """The protected product and its report."""
        # Some families overflow, and NumPy says so as it does for A @ B.
        with errstate(unverifiable="ignore"), np.errstate(over="ignore", invalid="ignore"):
            result: tuple[np.ndarray, Report] = protected_gemm(
                self.a, self.b, self.c, **self.scalars, check=self.check, return_report=True, **options
            )
        return result

    def normal_range(self, result: np.ndarray) -> bool:
        """Whether no operand, element or partial sum comes near the ends of the type's range."""
        with np.errstate(all="ignore"):
            return normal_range([self.a, self.b, self.c, result], self.case.dtype.name, np)

    def __str__(self) -> str:
        terms = "" if self.c is None else f" alpha={self.alpha:g} beta={self.beta:g}"
        return f"{self.index}: {self.family} {self.case} check={self.check}{terms}"


def _addend(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    # Of the product's size, and half of the time the product itself, so that beta = -alpha leaves rounding
    # only.
    with np.errstate(all="ignore"):
        c = (a @ b).astype(np.float64)
    c = np.where(np.isfinite(c), c, 0)
    if rng.random() < 0.5:
        c = rng.uniform(-1, 1, c.shape) * abs(c).max(initial=0)
    return arrange(c.astype(a.dtype), str(rng.choice(["C", "F", "strided"])))


@dataclass
class Tally:
    """What happened to the products of one family and type."""

    products: int = 0
    alarms: int = 0
    suspicions: int = 0
    unverifiable: int = 0
    closest: float = 0.0


def normal_range(arrays: Sequence[Array | None], dtype: str, xp: Any) -> bool:
    """Whether no element of A, B, c and C, and no partial sum of A B, comes near the ends of the type's range."""
    limits = FLOATS[dtype]
    sizes = [abs(widened(x, xp)) for x in arrays if x is not None]
    ok = [(x == 0) | ((x >= limits.smallest_normal) & (x <= limits.largest / 4)) for x in (*sizes, sizes[0] @ sizes[1])]
    return all(bool(one.all()) for one in ok)


def alarm(product: Product, result: np.ndarray, report: Report) -> bool:
    """Whether the report of this clean product is a false alarm."""
    held = {report.status, *report.also}
    return bool(held & ALARMS) or (Status.UNVERIFIABLE in held and product.normal_range(result))


def sweep(
    indices: Iterable[int], seed: int = 0, regimes: Iterable[Regime] = REGIMES
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the products; return the rows of the table and one line for each false alarm."""
    tallies: dict[tuple[str, str], Tally] = {}
    alarms: list[str] = []
    for done, index in enumerate(indices):
        product = Product.draw(seed, index, regimes)
        result, report = product.protect(on_error="detect")
        tally = tallies.setdefault((product.family, product.case.dtype.name), Tally())
        tally.products += 1
        tally.suspicions += report.suspicions
        tally.unverifiable += Status.UNVERIFIABLE in (report.status, *report.also)
        tally.closest = max(tally.closest, report.closest)
        if alarm(product, result, report):
            tally.alarms += 1
            alarms.append(f"{product}: {report}")
            print(f"FALSE ALARM {alarms[-1]}", flush=True)
        if done % 1000 == 999:
            print(f"{done + 1} products, {len(alarms)} false alarms", file=sys.stderr, flush=True)
    rows = [{"family": family, "dtype": dtype, **vars(tally)} for (family, dtype), tally in sorted(tallies.items())]
    return rows, alarms


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", metavar="INDEX", help="these again, with their reports")
    parser.add_argument("--output", default="clean_products", metavar="NAME", help="results/NAME.csv")
    options = parser.parse_args(arguments)
    if options.only:
        for index in options.only:
            product = Product.draw(options.seed, index)
            result, report = product.protect(on_error="detect")
            print(f"{product}\n{report}\nfalse alarm: {alarm(product, result, report)}")
        return 0
    rows, alarms = sweep(range(options.count), options.seed)
    tables.write(options.output, rows)
    total = {key: sum(row[key] for row in rows) for key in ("products", "suspicions", "unverifiable")}
    closest = max((row["closest"], row["family"], row["dtype"]) for row in rows)
    print(
        f"{total['products']} clean products: {len(alarms)} false alarms, "
        f"{total['suspicions']} suspicions cleared, {total['unverifiable']} unverifiable; "
        f"closest residual {closest[0]:.3f} of its bound ({closest[1]}, {closest[2]})"
    )
    for line in alarms:
        print(f"false alarm: --seed {options.seed} --only {line.partition(':')[0]}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
