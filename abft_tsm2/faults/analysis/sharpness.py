"""Whether the checks of a campaign are as sharp as they were when they were measured.

Two numbers are compared, as medians over the families of operands: the bounds in the judge's own yardsticks
(`abft_tsm2.faults.judge.yardstick`), and the share of faults that lie below the bounds, of single flips of any bit of
the result. Twice as much as was measured is a broken promise: such bounds excuse what should be found. So is a repair
of factors, online, after which more than a fifth of them have to be restarted from A.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from abft_tsm2.faults.analysis.stats import clopper_pearson
from abft_tsm2.faults.trials.trial import FACTORED, WRONG_PLACE, protects

LARGER = 2.0  # times what was measured
PRODUCT = "product"  # the site
RESTARTED = 0.2  # of corrected factors; measured 7 in 440
MISPLACED = 0.05  # of faults in factors; measured 3 in 1600, of changes close to what is found
FLIPS = 30  # of a family, from which on their share counts


class MeasuredSharpness(NamedTuple):
    """What checks of an operation and type have been.

    Attributes
    ----------
    bound : float
        Bounds in yardsticks: of products the median over the families, and no family has twice that; of factors the
        largest of any family.
    below : float
        The share of flipped bits below the bounds, NaN where it was not measured.
    families : mapping of str to float
        Bounds of factors, by family: the largest over the shapes.
    """

    bound: float
    below: float = math.nan
    families: Mapping[str, float] = MappingProxyType({})

    @classmethod
    def of(cls, *bounds: float) -> MeasuredSharpness:
        """Of factors, by `MATRICES`."""
        return cls(max(bounds), math.nan, dict(zip(MATRICES, bounds, strict=True)))

    def ratio(self, family: str, bounds: list[float]) -> float:
        """How many times what was measured these bounds are."""
        return median(bounds) / self.families.get(family, self.bound)


MATRICES = ("normal", "uniform", "graded", "positive definite", "condition 1e10", "sparse", "toeplitz", "dominant")
# Measured on a Xeon with OpenBLAS's SkylakeX kernels: products by `benchmarks.yardsticks` (all families but "zeros", 8
# to 4096 terms), factors of order 24 to 320, online and offline. No flip lies below the bound where 16 bits are
# verified in float32.
MEASURED: Mapping[tuple[str, str], MeasuredSharpness] = {
    ("gemm", "float64"): MeasuredSharpness(11.8, 0.0469),
    ("gemm", "float32"): MeasuredSharpness(10.5, 0.105),
    ("gemm", "float16"): MeasuredSharpness(7.29, 0.25),
    ("gemm", "bfloat16"): MeasuredSharpness(7.82, 0.281),
    ("gemm", "float16 in float32"): MeasuredSharpness(10.6),
    ("gemm", "bfloat16 in float32"): MeasuredSharpness(13.2),
    ("lu", "float64"): MeasuredSharpness.of(24, 22, 26, 17, 22, 27, 37, 28),
    ("lu", "float32"): MeasuredSharpness.of(9.5, 10.4, 40, 7.4, 8.9, 11.8, 16, 11.7),
    ("cholesky", "float64"): MeasuredSharpness.of(14.4, 15.4, 22.5, 12.2, 21.7, 13.1, 15.5, 18.4),
    ("cholesky", "float32"): MeasuredSharpness.of(5.6, 6.8, 10, 5.4, 9.6, 5.3, 7.1, 8.2),
    ("solve", "float64"): MeasuredSharpness.of(104, 94, 164, 22, 39, 97, 14.1, 19.4),
    ("solve", "float32"): MeasuredSharpness.of(42, 38, 64, 10.3, 20.3, 44, 7.1, 9.2),
}
"""By operation and type, with the type of the check where it is another one."""


class Sharpness:
    """The trials of a campaign, as far as they say how sharp its checks are."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._flips: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self._restarted: list[bool] = []
        self._misplaced: list[bool] = []
        self._seen: set[tuple[Any, ...]] = set()

    def add(self, line: Mapping[str, Any]) -> None:
        """Count a trial."""
        scheme = line.get("scheme")
        if scheme is None or "dtype" not in line or not protects(scheme):
            return
        kind, family = kind_of(line), line.get("family", "")
        scene = (line["suite"], line.get("scene"), scheme)
        sharpness = line.get("sharpness")
        if sharpness is not None and scene not in self._seen:
            self._seen.add(scene)
            if float(sharpness) >= 0:  # not NaN: of operands that hold no number
                self._bounds[kind][family].append(float(sharpness))
        if line["operation"] in FACTORED and line["located"]:
            self._misplaced.append(line["located"] == WRONG_PLACE)
        if scheme == "online" and line["outcome"] == "corrected" and line["single"] and not line["persistent"]:
            self._restarted.append(bool(line.get("restarted")))
        if line["model"] == "bit_flip" and line["site"] == PRODUCT and line["bits"] == "any" and line["single"]:
            self._flips[kind][family].append(line["outcome"] == "below_bound")

    def found(self) -> dict[tuple[str, str], MeasuredSharpness]:
        """What was measured here, by operation and type."""
        return {
            kind: MeasuredSharpness(
                median([median(bounds) for bounds in self._bounds[kind].values()] or [math.nan]),
                _share(self._flips[kind]),
                {family: max(bounds) for family, bounds in self._bounds[kind].items()},
            )
            for kind in sorted({*self._bounds, *self._flips})
        }

    @property
    def broken(self) -> list[str]:
        """Bounds that are larger than they were, in words."""
        texts = []
        for kind, found in self.found().items():
            if kind not in MEASURED:
                continue
            name, known = " of ".join(kind), MEASURED[kind]
            bounds = self._bounds[kind]
            times = median([known.ratio(family, some) for family, some in bounds.items()] or [math.nan])
            if times > LARGER:
                texts.append(
                    f"{name}: bounds are {times:.3g} times as large as they were, {found.bound:.3g} times the root "
                    f"mean square of what rounding does (medians over {len(bounds)} families)"
                )
            if found.below > LARGER * known.below and self._surely(kind, known.below):
                texts.append(
                    f"{name}: {100 * found.below:.3g} % of flipped bits lie below the bound (median over families), "
                    f"and {100 * known.below:.3g} % have been"
                )
        for trials, most, what in (
            (self._restarted, RESTARTED, "lu: factors that stayed wrong after their repair, and were restarted from A"),
            (self._misplaced, MISPLACED, "faults in factors that were said to be elsewhere"),
        ):
            if trials and clopper_pearson(sum(trials), len(trials))[0] > most:
                texts.append(f"{what}: {sum(trials)} of {len(trials)}, and {100 * most:.0f} % may be")
        return texts

    def _surely(self, kind: tuple[str, str], known: float) -> bool:
        """Whether more flips lie below the bound than chance explains."""
        every = [below for flips in self._flips[kind].values() for below in flips]
        return clopper_pearson(sum(every), len(every))[0] > known


def kind_of(line: Mapping[str, Any]) -> tuple[str, str]:
    """Operation and type of a trial."""
    checked = f" in {line['scheme']}" if line["scheme"] in ("float32", "tf32") else ""
    return line["operation"], line["dtype"] + checked


def _share(families: Mapping[str, list[bool]]) -> float:
    shares = [sum(flips) / len(flips) for flips in families.values() if len(flips) >= FLIPS]
    return median(shares or [math.nan])
