"""Finished lines of an LU on a GPU, on the CPU, that have changed since they were checked, and sums behind checks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import linalg

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.checksum.bounds import changed_bound
from abft_tsm2.linalg.device.factorisation import DeviceFactorisation
from abft_tsm2.linalg.device.repair import DeviceRepair
from abft_tsm2.linalg.line_check import norm
from abft_tsm2.linalg.outcome import ROUNDS, Findings
from tests.support import lu_on_cpu, solver_on_cpu
from tests.support.factor_cases import lu_outside
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal
from tests.support.tracked_lu import N, Once, put, require_right, tracked


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> Any:
    return lu_on_cpu.install(monkeypatch, build_cache)


# ---- what is finished ------------------------------------------------------------------------------------------------

FINISHED = {
    "L": (put("W", (500, 200), 0.4), "element"),
    "U": (put("W", (200, 500), 4.0), "element"),
    "a pivot": (put("W", (200, 200), 40.0), "element"),
    "NaN in L": (put("W", (500, 200), np.nan), "element"),
    "Inf in U": (put("W", (200, 500), np.inf), "element"),
    "a row of U": (put("W", (200, slice(210, None)), 3.0), "row"),
    "the last row": (put("W", (N - 1, 100), 0.7), "element"),
    "g": (put("g", 200, 1e3), "checksum"),
    "y": (put("y", 200, 1e3), "checksum"),
}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_line_alone_is_computed_again(name: str) -> None:
    change, kind = FINISHED[name]
    dtype = "float64" if list(FINISHED).index(name) % 2 else "float32"
    hook, a = Once("finished", None, change), normal(N, N, dtype=dtype)
    run, findings = tracked(a, hook)
    require_right(run, a)
    assert hook.repaired == 1
    assert kind in {fault.kind for fault in findings.faults}
    assert len(findings.faults) == 1


def test_what_is_finished_and_was_used_is_repaired_first() -> None:
    """Multipliers that change after the step's sums were taken, before the next update: all later columns are wrong."""
    hook = Once("panel", 256, put("W", (500, 200), 0.75))
    a = normal(N, N)
    run, findings = tracked(a, hook)
    require_right(run, a)
    assert findings.statuses


def test_memory_that_copies_read_is_kept_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last repair that is allowed comes too late, too, and nobody has waited since."""
    waits, put, freed = list[int](), DeviceRepair._put, list[int]()

    def noted(self: DeviceRepair, values: Any, to: Any) -> None:
        put(self, values, to)
        weakref.finalize(values, lambda: freed.append(len(waits)))
        waits.clear()

    def faulty(stage: str, arrays: Mapping[str, Any]) -> None:
        if stage in ("finished", "repaired"):
            arrays["W"][130, 100] += 40.0

    synchronize = solver_on_cpu._Stream.synchronize
    monkeypatch.setattr(DeviceRepair, "_put", noted)
    monkeypatch.setattr(solver_on_cpu._Stream, "synchronize", lambda self: (waits.append(1), synchronize(self)))
    run = DeviceFactorisation(on_card(normal(140, 140)), checked=True, findings=Findings(), hook=faulty)
    run.wait()
    assert not run.certified
    assert len(freed) == ROUNDS
    assert all(freed)


# ---- the sums, the order of rows, A ---

SUMS = {
    **{f"{name} of A": ("encoded", None, put(name, 400, 1e6)) for name in "SZ"},
    **{name: ("updated", 128, put(name, 400, 1e6)) for name in "SZ"},
    "g": ("updated", 128, put("g", 100, 1e6)),
    "y": ("updated", 128, put("y", 100, 1e6)),
    "w": ("updated", 128, put("w", 400, 1e6)),
    "perm": ("updated", 128, put("perm", slice(400, 402), 400)),
    "perm later": ("updated", 256, put("perm", slice(400, 402), 400)),
    "perm, wildly": ("updated", 128, put("perm", 400, 2**31 - 1)),
    "piv": ("updated", 128, put("piv", 100, 519)),
}


@pytest.mark.parametrize("name", SUMS)
def test_what_the_checks_rest_on_may_be_wrong(name: str) -> None:
    stage, column, change = SUMS[name]
    hook, a = Once(stage, column, change), normal(N, N)
    (lu, piv), report = protected_lu_factor(on_card(a), mode="online", return_report=True, on_stage=hook)
    assert hook.done
    assert report.status in (Status.CLEAN, Status.CORRECTED, Status.CHECKSUM_FAULT), report
    np.testing.assert_array_equal(piv, linalg.get_lapack_funcs("getrf", (a,))(a)[1])
    assert not lu_outside(np.asarray(lu), np.asarray(piv), a).any()


@pytest.mark.parametrize("name", ["S", "Z", "g"])
def test_a_wrong_sum_convicts_no_element(name: str) -> None:
    hook = Once("updated", 128, put(name, 400 if name != "g" else 100, 1e6))
    _, report = protected_lu_factor(on_card(normal(N, N)), mode="online", return_report=True, on_stage=hook)
    assert not [fault for fault in report.faults if fault.kind != "checksum" and fault.repair != "factored again"]


# ---- sums of lines that guessed norms do not explain ---


class Doubted:
    """A hook that changes the sum of a finished line, a row of U or a column of L, by a part of what another order of
    addition may change: of the line that is the largest beside what norms of A's lines make of it."""

    def __init__(self, name: str, a: np.ndarray, by: float) -> None:
        self.name, self.by, self.a, self.K = name, by, a, min(a.shape)
        self.v = self.w = np.empty(0)

    def __call__(self, stage: str, arrays: Mapping[str, Any]) -> None:
        if stage == "encoded":
            self.v, self.w = np.array(arrays["v"]), np.array(arrays["w"])
        elif stage == "finished":
            W, perm = np.asarray(arrays["W"]).astype(np.float64), np.asarray(arrays["perm"])
            own, guess = (self._of_rows if self.name == "y" else self._of_columns)(W, self.a[perm], self.w[perm])
            guess = np.maximum(guess, np.abs(np.asarray(arrays[self.name])))
            line = int(np.argmax(own / guess))
            assert guess[line] < own[line] / 3
            own[line] *= changed_bound(1.0, max(W.shape[self.name == "y"] - line, 1))
            arrays[self.name][line] += self.by * own[line]

    def _of_rows(self, W: np.ndarray, PA: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = np.array([norm(W[r, r:] * self.v[r:]) for r in range(self.K)])
        return own, linalg.norm(PA * self.v, axis=1)[: self.K]

    def _of_columns(self, W: np.ndarray, PA: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        own = np.array([norm(W[c + 1 :, c] * w[c + 1 :]) + abs(w[c]) for c in range(self.K)])
        own[W.shape[0] - 1 :] = 0.0  # no elements, no evidence
        tail = np.sqrt(np.cumsum(w[::-1] ** 2)[::-1])[: self.K]
        return own, np.minimum(linalg.norm(PA.T * w, axis=1)[: self.K] / np.abs(W.diagonal()), tail)


DOUBTED = [
    ("y", (N, N), np.float64),
    ("g", (N, N), np.float64),
    ("y", (400, 200), np.float32),
    ("g", (200, 400), np.float32),
]


@pytest.mark.parametrize(("name", "shape", "dtype"), DOUBTED)
def test_a_sum_that_guessed_norms_do_not_explain_is_judged_by_its_line(name: str, shape: Any, dtype: Any) -> None:
    a = normal(*shape, dtype=dtype)
    run, findings = tracked(a, Doubted(name, a, 0.5))
    require_right(run, a)
    assert not findings.faults
    assert run._unchanged == {"g": 0, "y": 0} | {name: 1}


@pytest.mark.parametrize("name", ["y", "g"])
def test_a_sum_that_its_line_does_not_explain_is_wrong(name: str) -> None:
    a = normal(N, N)
    run, findings = tracked(a, Doubted(name, a, 2.0))
    require_right(run, a)
    assert [fault.kind for fault in findings.faults] == ["checksum"]


@pytest.mark.parametrize("place", ["the line", "the weights"])
def test_a_line_that_does_not_give_its_sums_is_not_acquitted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has changed since the sums were taken, and weights on the host, which would make any bound large enough."""
    a, settle = normal(N, N), DeviceRepair._settle

    def changed(self: DeviceRepair, line: Any, here: Any, *more: Any) -> bool:
        if place == "the line":
            line.here[0, 100] = here[0, 100] = 1e30
        else:
            line = line._replace(weights=np.array(line.weights))
            line.weights[100] = 1e30
        return settle(self, line, here, *more)

    monkeypatch.setattr(DeviceRepair, "_settle", changed)
    run, _ = tracked(a, Doubted("y", a, 0.5))
    assert run._unchanged.get("y", 0) == 0
    if place == "the line":
        require_right(run, a)


def test_a_sum_of_no_elements_is_not_acquitted() -> None:
    run, _ = tracked(normal(N, N), Once("finished", None, put("g", N - 1, 1e6)))
    assert not run.clean
