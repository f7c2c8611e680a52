"""Fault injection: plans of faults, hooks that plant them, and campaigns that count what becomes of them.

The public names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from abft_tsm2.faults.injection import Injector, inject
    from abft_tsm2.faults.plan import MODELS, Plan
    from abft_tsm2.faults.sites import SITES

__all__ = ["MODELS", "SITES", "Injector", "Plan", "inject"]

_HOME = {"MODELS": "plan", "Plan": "plan", "SITES": "sites", "Injector": "injection", "inject": "injection"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found directly from now on
    return value
