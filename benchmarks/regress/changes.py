"""Faults of a case: an array of a stage, a change of it, and the visit at which it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from abft_tsm2.faults import SITES, Injector, Plan

Array = Any
NAN, INF = float("nan"), float("inf")


def put(x: Array, where: Any, value: float) -> None:
    x[where] = x.dtype.type(value)


def _scattered(x: Array) -> None:
    for i in range(5):
        put(x, (i * 3 % x.shape[0], (i * i + 1) % x.shape[1]), 50 + i)


def _swapped(x: Array) -> None:
    x[[0, -1]] = x[[-1, 0]]


def _rescale(x: Array, where: Any, factor: float) -> None:
    x[where] = x[where] * x.dtype.type(factor)


CHANGES: dict[str, Callable[[Array], None]] = {
    "element": lambda x: put(x, (x.shape[0] // 3, x.shape[1] // 2), 99),
    "small": lambda x: _rescale(x, (x.shape[0] // 2, x.shape[1] // 3), 1.0625),
    "nan": lambda x: put(x, (x.shape[0] // 2, x.shape[1] // 2), NAN),
    "inf": lambda x: put(x, (0, -1), -INF),
    "row": lambda x: put(x, x.shape[0] // 2, 0),
    "column": lambda x: _rescale(x, (slice(None), x.shape[1] // 2), 2),
    "block": lambda x: put(x, (slice(1, 4), slice(0, 3)), 7),
    "scattered": _scattered,
    "swapped": _swapped,
    "everything": lambda x: _rescale(x, ..., 1.5),
    "last": lambda x: put(x, (-1,) * x.ndim, 7),
}
"""Of a matrix, written to in place."""


@dataclass(frozen=True)
class Fault:
    """A change of one array.

    Attributes
    ----------
    stage, array, change : str
    visit : int
        Of the stage, counted from 0.
    again : str
        A stage at which the change is made each time once more.
    until : str
        A stage at which the array gets its bits back.
    beside : bool
        An element of the product is changed as well: only then is the array read.
    """

    stage: str
    array: str
    change: str
    visit: int = 0
    again: str = ""
    until: str = ""
    beside: bool = False

    def __str__(self) -> str:
        words = self.again and f"again when {self.again}", self.until and "passing", self.beside and "beside an element"
        more = "".join(f" {word}" for word in words if word)
        return f"{self.stage}.{self.array} {self.change} {self.visit}{more}"

    def planter(self) -> ChangePlanter:
        return ChangePlanter(self)


class ChangePlanter:
    """Makes the change of a fault: passed as ``on_stage``, or put in force by `planting`."""

    def __init__(self, fault: Fault) -> None:
        self.fault, self.visits = fault, 0
        self.planted: list[Fault] = []
        self._held: tuple[Array, Array] | None = None
        self._beside = Fault("multiplied", "C", "element").planter() if fault.beside else None

    def __call__(self, stage: str, arrays: Mapping[str, Array]) -> None:
        fault = self.fault
        if self._beside is not None:
            self._beside(stage, arrays)
        if stage == fault.until and self._held is not None:
            part, before = self._held
            part[...] = before
            self._held = None
        due = bool(self.planted) and stage == fault.again
        if stage == fault.stage:
            due |= self.visits == fault.visit
            self.visits += 1
        if not due or fault.array not in arrays:
            return
        array = arrays[fault.array]
        if not array.size or not getattr(array.flags, "writeable", True):
            return
        if fault.until:
            self._held = array, array.copy()
        CHANGES[fault.change](array)
        self.planted.append(fault)


# ---- faults at the sites that the package names ---------------------------------------------------------------------

MODELS = ("bit_flip", "nan", "offset", "column", "wrong_index", "swap_elements", "not_exchanged")
"""Of those that a site may have, the first ones in this order are planted there."""


def plans(site: str, visits: int, models: int) -> Iterator[Plan]:
    """Faults at the first, the second and the last visit that has a site, of so many models each."""
    among = SITES[site].among(visits)
    chosen = dict.fromkeys([*among[:2], *among[-1:]])
    for model in [model for model in MODELS if model in SITES[site].models][:models]:
        for visit in chosen:
            yield Plan(model, site, "exponent_high", factor=50.0, visit=visit, seed=(visit, 1))


def title(plan: Plan) -> str:
    """A plan in the name of a case."""
    return f"{plan.site} {plan.model} {plan.visit}{' persistent' if plan.persistent else ''}"


def injected(*plan: Plan) -> Callable[[], Injector]:
    return lambda: Injector(*plan)


def visits_of(call: Callable[[], Any]) -> Mapping[str, int]:
    """How often a clean call reaches each stage on the route that has no hook."""
    from abft_tsm2.core.faultpoint import planting

    counter = Injector()
    with planting(counter):
        call()
    return counter.visits
