"""An LU on a GPU, on the CPU, the steps of which are tracked; and hooks that change what it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import linalg

from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.outcome import Findings
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card

N = 520  # steps of 128 columns, and one of 8
Change = Callable[[Mapping[str, Any]], None]


class Once:
    """A hook that changes arrays once, at a stage of the step that begins with a column."""

    def __init__(self, stage: str, column: int | None, change: Change) -> None:
        self.at, self.change, self.done, self.repaired = (stage, column), change, False, 0

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        self.repaired += stage == "repaired"
        column = arrays["step"][0] if "step" in arrays else None
        if (stage, column) == self.at and not self.done:
            self.done = True
            self.change(arrays)


def put(name: str, where: Any, value: float) -> Change:
    def change(arrays: Mapping[str, Any]) -> None:
        arrays[name][where] = value

    return change


def tracked(a: np.ndarray, hook: Any = None) -> tuple[DeviceFactorisation, Findings]:
    findings = Findings()
    run = DeviceFactorisation(on_card(a), checked=True, findings=findings, hook=hook)
    run.wait()
    return run, findings


def require_right(run: DeviceFactorisation, a: np.ndarray) -> None:
    assert run.clean
    np.testing.assert_array_equal(run.piv, linalg.get_lapack_funcs("getrf", (a,))(a)[1])
    assert not lu_outside(np.asarray(run.W), np.asarray(run.piv), a).any()
