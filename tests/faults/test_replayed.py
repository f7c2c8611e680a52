"""Trials of campaigns that once broke a promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from abft_tsm2.faults import Plan
from abft_tsm2.faults.campaign.file import operation_of
from abft_tsm2.faults.trials.trial import Trial, Workload


def replayed(workload: Workload, *plans: Plan, scheme: str) -> Any:
    return operation_of(workload.operation).GROUP(workload, np).one(Trial(0, plans, scheme))


def test_where_elements_are_convicted_lines_that_differ_are_wrong_too() -> None:
    """All of C is off by one per cent, so that no line stands out; a few elements are beyond the rigorous bound."""
    workload = Workload("gemm", 24, 5000, 20, "bfloat16", "graded columns", "C", (20261128, 4, 49))
    for seed in (981, 994):
        plan = Plan("tile", factor=1.01, seed=(20261128, 4, seed))
        assert replayed(workload, plan, scheme="both").outcome == "corrected"


def test_all_lines_that_a_repair_changes_are_named() -> None:
    workload = Workload("gemm", 9000, 4, 6, "float16", "factorials", "F", (59, 0, 84))
    found = replayed(workload, Plan("swap_columns", seed=(59, 0, 1697)), scheme="protected")
    assert (found.outcome, found.located) == ("corrected", "exact")


@pytest.mark.parametrize("scheme", ["stacked", "protected"])
def test_squares_that_left_the_range_vouch_for_no_norm(scheme: str) -> None:
    workload = Workload("gemm", 24, 70, 20, "bfloat16", "graded lines", "F", (20261128, 3, 146))
    for seed in range(5830, 5850):
        plan = Plan("swap_elements", site="A", persistent=True, seed=(20261128, 3, seed))
        assert replayed(workload, plan, scheme=scheme).outcome != "sdc"


def test_an_element_of_u_that_only_its_sum_convicts_is_repaired() -> None:
    """Of rows over 30 decades: it is off by less than two ways to compute it may be, and the sum of its row stands."""
    workload = Workload("lu", 100, 100, 100, "float32", "graded rows", "F", (20261128, 7, 192), (("block", [8, 16]),))
    found = replayed(workload, Plan("bit_flip", "lu.finished_U", seed=(20261128, 7, 3857)), scheme="online")
    assert (found.outcome, found.status, found.located) == ("corrected", "CORRECTED", "exact")
