"""The faults that `benchmarks.lu_faults` plants in a factorisation: what, where and when.

A plan changes the live arrays of one stage, once, in a random step among those in which its place exists: for the
trailing matrix there has to be one, for what is finished something before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.lu_changes import (
    ELEMENTS,
    IN_SUMS,
    Change,
    Generator,
    Moment,
    Spot,
    ahead,
    anywhere,
    below_diagonal,
    exponent_bit,
    finished_l,
    finished_pivot,
    finished_u,
    garbage,
    high_bit,
    in_both_halves,
    in_sums,
    in_w,
    new_columns,
    new_pivot,
    new_rows,
    not_exchanged,
    panel,
    pivots_swapped,
    place,
    random_bit,
    scaled,
    shift,
    tile,
    tile_ahead,
    tile_below_diagonal,
    tile_of_l,
    tile_of_u,
    trailing,
    trailing_column,
    trailing_row,
    trailing_tile,
    where_a_is_needed,
    whole_column,
)


@dataclass(frozen=True)
class Plan:
    """One kind of fault.

    Attributes
    ----------
    kind, stage : str
    change : callable
    names : tuple of str
        The arrays that it changes.
    steps : {"any", "first", "trailing", "later"}
        Which steps it may hit; those with a trailing matrix, those with something finished before.
    operation, mode : str
    gradual : bool
        Bits of any weight: changes in the range between what is harmless and what is sure to be seen.
    refusable : bool
        A itself is hit: a refusal is as good as a repair.
    times : int
        How often it is planted in each matrix.
    """

    kind: str
    stage: str
    change: Change
    names: tuple[str, ...] = ("W",)
    steps: str = "any"
    operation: str = "lu"
    mode: str = "online"
    gradual: bool = False
    refusable: bool = False
    times: int = 1

    def step(self, count: int, rng: Generator) -> int:
        """The number of the step to hit, of `count`; a plan without steps hits the first moment of its stage."""
        low, high = {"first": (0, 1), "trailing": (0, count - 1), "later": (1, count)}.get(self.steps, (0, count))
        return int(rng.integers(low, high)) if low < high else -1


class Watch:
    """An on_stage hook that plants one fault, once: repairs see no further one.

    Attributes
    ----------
    changed : whether any bit is another
    where : the columns of the step that was hit, as text
    steps : how many steps have begun
    """

    def __init__(self, plan: Plan | None = None, step: int = 0, rng: Generator | None = None) -> None:
        self.plan, self.step, self.rng = plan, step, rng
        self.changed, self.where = False, ""
        self.seen: list[tuple[int, int]] = []

    @property
    def steps(self) -> int:
        return len(self.seen)

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        at = arrays.get("step")
        if at is not None and tuple(at) not in self.seen:
            self.seen.append(tuple(at))
        plan = self.plan
        if plan is None or self.rng is None or stage != plan.stage:
            return
        if at is not None and self.seen.index(tuple(at)) != self.step:
            return
        if not set(plan.names) <= set(arrays):
            return
        self.plan, self.where = None, "" if at is None else f", step of columns {at[0]}:{at[1]}"
        before = {name: np.array(arrays[name]) for name in plan.names}
        with np.errstate(all="ignore"):
            plan.change(Moment(arrays), self.rng)
        self.changed = any(old.tobytes() != np.array(arrays[name]).tobytes() for name, old in before.items())


# ---- all of them -------------------------------------------------------------------------------------------

FEW = ("exponent bit", "random bit", "NaN")
AFTERWARDS = {"updated": "later", "finished": "at the end"}


def _elements(where: str, stage: str, spot: Spot, *names: str, steps: str = "any") -> Iterator[Plan]:
    for name in names:
        often = {"exponent bit": 3, "random bit": 4}.get(name, 1)
        gradual = name == "random bit"
        yield Plan(f"{where}: {name}", stage, in_w(spot, ELEMENTS[name]), steps=steps, gradual=gradual, times=often)


def _in_a_step() -> Iterator[Plan]:
    yield from _elements("not yet begun", "panel", ahead, "exponent bit", "NaN", steps="first")
    yield Plan("not yet begun: tile", "panel", tile(tile_ahead), steps="first")
    yield from _elements("trailing", "updated", trailing, *ELEMENTS, steps="trailing")
    yield Plan("trailing: tile", "updated", tile(trailing_tile), steps="trailing")
    yield Plan("trailing: row", "updated", scaled(trailing_row, 1.25), steps="trailing")
    yield Plan("trailing: column", "updated", scaled(trailing_column, 1.25), steps="trailing")
    yield from _elements("panel", "panel", panel, "exponent bit", "sign bit", "random bit", "NaN", "x 1e30")
    yield Plan("panel: garbage", "panel", garbage)
    yield Plan("panel: wrong pivot", "panel", new_pivot, ("piv",))
    yield Plan("panel: pivots swapped", "panel", pivots_swapped, ("piv",))
    yield Plan("rows not exchanged: left", "swapped", not_exchanged(True), steps="later")
    yield Plan("rows not exchanged: right", "swapped", not_exchanged(False), steps="trailing")
    yield from _elements("U12", "solved", new_rows, *FEW, steps="trailing")
    yield Plan("U12: columns zeroed", "solved", scaled(new_columns, 0.0), steps="trailing")


def _in_what_is_finished() -> Iterator[Plan]:
    for stage, when in AFTERWARDS.items():
        for name, spot, area in (("L", finished_l, tile_of_l), ("U", finished_u, tile_of_u)):
            yield Plan(f"finished {name}, {when}: high bit", stage, in_w(spot, high_bit))
            yield Plan(f"finished {name}, {when}: random bit", stage, in_w(spot, random_bit), gradual=True, times=2)
            yield Plan(f"finished {name}, {when}: tile", stage, tile(area))
        yield Plan(f"pivots, {when}", stage, finished_pivot, ("piv",))
        yield Plan(f"places, {when}", stage, place, ("perm",))


def _in_what_is_carried() -> Iterator[Plan]:
    for stage, when in AFTERWARDS.items():
        for name in "SZgyw" if stage == "updated" else "gyw":
            for what, element in IN_SUMS.items():
                steps = "trailing" if name in "SZ" else "any"
                yield Plan(f"{name}, {when}: {what}", stage, in_sums(name, element), (name,), steps=steps)
    for name in "SZvw":
        yield Plan(f"{name}, encoded: value", "encoded", in_sums(name, shift), (name,))
    for stage, when in (("encoded", "before it is copied"), ("updated", "later")):
        yield Plan(f"A, {when}", stage, anywhere("A", exponent_bit), ("A",), refusable=True)
    needed = Plan("A, where a repair needs it", "updated", where_a_is_needed, ("A", "W"), steps="trailing")
    yield replace(needed, refusable=True)


def _offline() -> Iterator[Plan]:
    yield from _elements("offline, L", "factored", finished_l, *FEW)
    yield from _elements("offline, U", "factored", finished_u, *FEW)
    yield Plan("offline: column", "factored", scaled(whole_column, 1.25))
    yield Plan("offline: tile", "factored", tile(tile_of_u))
    yield Plan("offline: pivots", "factored", finished_pivot, ("piv",))


def _solution() -> Iterator[Plan]:
    for stage, name in (("forward", "z"), ("backward", "x")):
        for what in FEW:
            change = anywhere(name, ELEMENTS[what])
            yield Plan(f"{stage}: {what}", stage, change, (name,), gradual=what == "random bit", times=4)


def _definite() -> Iterator[Plan]:
    yield from _elements("trailing", "updated", below_diagonal(trailing), *FEW, steps="trailing")
    yield Plan("trailing: tile", "updated", tile(tile_below_diagonal), steps="trailing")
    yield from _elements("panel", "panel", below_diagonal(panel), *FEW)
    for stage, when in AFTERWARDS.items():
        yield Plan(f"finished L, {when}: high bit", stage, in_w(finished_l, high_bit))
        yield Plan(f"finished L, {when}: tile", stage, tile(tile_of_l))


PLANS: tuple[Plan, ...] = (
    *_in_a_step(),
    *_in_what_is_finished(),
    *_in_what_is_carried(),
    *(replace(plan, mode="offline") for plan in _offline()),
    *(replace(plan, operation="solve") for plan in _solution()),
    *(replace(plan, operation="cholesky", change=in_both_halves(plan.change)) for plan in _definite()),
)
"""Every kind of fault; `Plan.operation` says in what."""
