"""Whether the checks of a campaign are as sharp as they were when they were measured.

Two numbers are compared, as medians over the families of operands: the bounds in the judge's own yardsticks
(`abft_tsm2.faults.judge.yardstick`), and the share of faults that lie below the bounds, of single flips of any bit of
the result. Twice as much as was measured is a broken promise: such bounds excuse what should be found. So is a repair
of factors, online, after which more than a fifth of them have to be restarted from A.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from abft_tsm2.faults.analysis.stats import clopper_pearson
from abft_tsm2.faults.trials.trial import protects

LARGER = 2.0  # times what was measured
PRODUCT = "product"  # the site
RESTARTED = 0.2  # of corrected factors; measured 7 in 440
FLIPS = 30  # of a family, from which on their share counts


class Measured(NamedTuple):
    """Bounds in yardsticks, and the share of flipped bits below them; NaN where it was not measured."""

    bound: float
    below: float


MEASURED: Mapping[tuple[str, str], Measured] = {}
"""By operation and type, with the type of the check where it is another one."""


class Sharpness:
    """The trials of a campaign, as far as they say how sharp its checks are."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._flips: dict[tuple[str, str], dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
        self._restarted: list[bool] = []
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
        if scheme == "online" and line["outcome"] == "corrected" and line["single"] and not line["persistent"]:
            self._restarted.append(bool(line.get("restarted")))
        if line["model"] == "bit_flip" and line["site"] == PRODUCT and line["bits"] == "any" and line["single"]:
            self._flips[kind][family].append(line["outcome"] == "below_bound")

    def found(self) -> dict[tuple[str, str], Measured]:
        """What was measured here, by operation and type."""
        return {
            kind: Measured(_middle(self._bounds[kind]), _share(self._flips[kind]))
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
            if found.bound > LARGER * known.bound:
                texts.append(
                    f"{name}: bounds are {found.bound:.3g} times the root mean square of what rounding does (median over "
                    f"{len(self._bounds[kind])} families), and have been {known.bound:.3g} times that"
                )
            if found.below > LARGER * known.below and self._surely(kind, known.below):
                texts.append(
                    f"{name}: {100 * found.below:.3g} % of flipped bits lie below the bound (median over families), and "
                    f"{100 * known.below:.3g} % have been"
                )
        if self._restarted and clopper_pearson(sum(self._restarted), len(self._restarted))[0] > RESTARTED:
            texts.append(
                f"lu: of {len(self._restarted)} factorisations that were repaired online {sum(self._restarted)} stayed wrong "
                f"and were restarted from A; it may be {100 * RESTARTED:.0f} %"
            )
        return texts

    def _surely(self, kind: tuple[str, str], known: float) -> bool:
        """Whether more flips lie below the bound than chance explains."""
        every = [below for flips in self._flips[kind].values() for below in flips]
        return clopper_pearson(sum(every), len(every))[0] > known


def kind_of(line: Mapping[str, Any]) -> tuple[str, str]:
    """Operation and type of a trial."""
    checked = f" in {line['scheme']}" if line["scheme"] in ("float32", "tf32") else ""
    return line["operation"], line["dtype"] + checked


def _middle(families: Mapping[str, list[float]]) -> float:
    return median([median(numbers) for numbers in families.values()] or [float("nan")])


def _share(families: Mapping[str, list[bool]]) -> float:
    shares = [sum(flips) / len(flips) for flips in families.values() if len(flips) >= FLIPS]
    return median(shares or [float("nan")])
