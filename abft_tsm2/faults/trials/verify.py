"""Trials of products that were made elsewhere: summed in any order, right but for rounding, and checked afterwards.

A scheme is the order in which the terms of an element were added. Nothing is planted: a fault that is found is a false
alarm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, dtype_name
from abft_tsm2.faults.judge.oracle import Reference, arithmetic, evened, narrowed, reference, require, widened
from abft_tsm2.faults.operands.products import operands, require_family
from abft_tsm2.faults.plan import Plan, require_known
from abft_tsm2.faults.trials.trial import Finding, Trial, TrialGroup, Workload, drawn_from, quiet
from abft_tsm2.gemm import verify_gemm
from abft_tsm2.report import Status

Array = Any
Sum = Callable[[Array, Array, Any], Array]
BLOCK = 32  # terms that are added at once
CHECKS = ("auto", "rows", "columns", "both")


def _one_by_one(A: Array, B: Array, xp: Any) -> Array:
    C = xp.zeros((A.shape[0], B.shape[1]), A.dtype)
    for at in range(A.shape[1]):  # C += A(:, l) B(l, :)
        C += A[:, at : at + 1] * B[at : at + 1, :]
    return C


def _in_blocks(A: Array, B: Array, xp: Any) -> Array:
    C = xp.zeros((A.shape[0], B.shape[1]), A.dtype)
    for at in range(0, A.shape[1], BLOCK):  # C += A(:, l:l+b) B(l:l+b, :)
        C += A[:, at : at + BLOCK] @ B[at : at + BLOCK, :]
    return C


def _by_row(A: Array, B: Array, add: Callable[[Array], Array], xp: Any) -> Array:
    """c_i' = the sum over l of a_il b_l', as `add` adds the rows of such a matrix."""
    return xp.stack([add(row[:, None] * B) for row in A])


SUMS: Mapping[str, Sum] = {
    "one by one": _one_by_one,
    "backwards": lambda A, B, xp: _one_by_one(A[:, ::-1], B[::-1, :], xp),
    "in blocks": _in_blocks,
    "einsum": lambda A, B, xp: xp.einsum("il,lj->ij", A, B),
    "cumsum": lambda A, B, xp: _by_row(A, B, lambda terms: terms.cumsum(axis=0)[-1], xp),
    "pairwise": lambda A, B, xp: _by_row(A, B, lambda terms: xp.ascontiguousarray(terms.T).sum(axis=1), xp),
    "row by row": lambda A, B, xp: xp.stack([row @ B for row in A]),
}
"""Orders of summation, by name; those of 16-bit operands are made in float32 and rounded once."""


def require_scheme(operation: str, scheme: str, options: Mapping[str, Any]) -> None:
    """ValueError for an order of summation that there is not."""
    require_known("order of summation", scheme, SUMS)


def require_possible(operation: str, scheme: str, plan: Plan) -> None:
    """ValueError: these trials have no faults."""
    raise ValueError("products that were made elsewhere are checked without faults: leave them out, say clean = 1.0")


def require_workload(workload: Workload) -> None:
    """ValueError for a family or an option that does not exist."""
    require_family(workload.family)
    for name, given in workload.options:
        require_known("option of verify", name, ("check",))
        for one in drawn_from(given):
            require_known("check", one, CHECKS)


class VerifyTrials(TrialGroup):
    """Operands, their product in more precision, and products of other libraries."""

    def __init__(self, workload: Workload, xp: Any) -> None:
        self.xp = xp
        self.A, self.B = operands(workload, xp)
        given = dict(workload.options).get("check", "auto")
        drawn = np.random.default_rng([*workload.seed, 0xC4EC])
        self.check = str(drawn.choice(given)) if isinstance(given, list) else str(given)
        self.how = arithmetic(dtype_name(self.A.dtype), truncating=False)
        self.expected: Reference = reference(*evened(self.A, self.B, xp), xp, sums=self.how.sums)
        require(self.expected, self.A, self.B, xp, sums=self.how.sums)

    def _product(self, scheme: str) -> Array:
        """The product as another library adds it up; ArithmeticError where it is not right."""
        A, B = (widened(x, self.xp).astype(self.how.sums, copy=False) for x in (self.A, self.B))
        wide = SUMS[scheme](A, B, self.xp)
        C = self.xp.empty(wide.shape, self.A.dtype)
        bit_pattern(C)[...] = narrowed(wide.astype(np.float64), C.dtype)
        error = abs(widened(C, self.xp) - self.expected.high - self.expected.low)
        # products are rounded before they are added, and where a sum began at 0, once more
        if not bool((error <= self.how.bound(self.expected, A.shape[1] + 2)).all()):
            raise ArithmeticError(f"the product of {scheme!r} is off by more than rounding explains")
        return C

    def one(self, trial: Trial) -> Finding:
        C = self._product(trial.scheme)
        before = bit_pattern(C).copy()
        begun = time.perf_counter()
        with quiet():
            report = verify_gemm(self.A, self.B, C, check=self.check, on_error="detect")
        seconds = time.perf_counter() - begun
        found = Finding("clean", report.status.name, seconds=seconds, closest=report.closest, report=report)
        if report.status is not Status.CLEAN or bool((bit_pattern(C) != before).any()):
            found.outcome = "false_alarm"
        return found


GROUP = VerifyTrials  # what a campaign asks a module of trials for
