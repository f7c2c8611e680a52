"""What a site is: a stage of a protected operation, one of its live arrays, and a part of that array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.faults.models import CHANGES
from abft_tsm2.faults.plan import Plan

Array = Any
Arrays = Mapping[str, Any]
Generator = np.random.Generator
Part = Callable[[Arrays, Generator], Array | None]
"""Chooses the part of the live arrays that is hit: a view, or None where this moment has no such part."""

GENERAL = frozenset(CHANGES)
"""The models that change any array."""


def whole(name: str) -> Part:
    """All of one array."""
    return lambda arrays, rng: arrays.get(name)


@dataclass(frozen=True)
class Site:
    """A place for faults.

    Attributes
    ----------
    text : str
        What it is.
    stage : str
        The stage of ``on_stage`` at which it is written.
    part : callable
    again : str
        The stage at which a fault that comes back is there once more.
    until : str
        The stage at which a fault that does not stay in memory is undone.
    change : callable, optional
        ``change(arrays, plan, rng)`` in place of the fault models, where the site has its own.
    models : frozenset of str
        Those that make sense here.
    visits : {"any", "first", "trailing", "later"}
        Which steps of a factorisation have it: those with a trailing matrix, or with something finished before.
    """

    text: str
    stage: str
    part: Part
    again: str = ""
    until: str = ""
    change: Callable[[Arrays, Plan, Generator], int] | None = None
    models: frozenset[str] = GENERAL
    visits: str = "any"

    def among(self, visits: int) -> range:
        """Those of so many visits of the stage at which the site is there.

        Examples
        --------
        >>> Site("what is left", "updated", whole("W"), visits="trailing").among(7)
        range(0, 6)
        """
        first, last = {"first": (0, 1), "trailing": (0, visits - 1), "later": (1, visits)}.get(self.visits, (0, visits))
        return range(first, min(last, visits))
