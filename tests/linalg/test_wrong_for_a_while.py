"""An operand that is wrong for a while leaves no wrong factors and no wrong solution."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.linalg

import abft_tsm2 as ft
from tests.support import for_a_while
from tests.support.for_a_while import LAST, result

Given = Mapping[str, Any]


class Case(NamedTuple):
    """What is called, which operands change, and by what the result misses the equation."""

    call: Callable[[Given], tuple[Any, ft.Report]]
    operands: str
    missed: Callable[[Any, Given], Any]


def lu_case(mode: str) -> Case:
    def missed(factors: Any, x: Given) -> Any:
        lu, piv = factors
        order = np.arange(len(piv))
        for i, p in enumerate(piv):
            order[[i, p]] = order[[p, i]]
        return (np.tril(lu, -1) + np.eye(len(piv))) @ np.triu(lu) - x["A"][order]

    return Case(lambda x: ft.protected_lu_factor(x["A"], mode=mode, return_report=True), "A", missed)


def solution_case(call: Callable[[Given], Any], operands: str, of: str = "A") -> Case:
    return Case(call, operands, lambda X, x: (x[of].astype("f8") @ X - x["b"]) / np.abs(X).max())


CASES = {
    "lu online": lu_case("online"),
    "lu offline": lu_case("offline"),
    "cholesky": Case(
        lambda x: ft.protected_cholesky(x["S"], lower=True, return_report=True), "S", lambda L, x: L @ L.T - x["S"]
    ),
    "solve": solution_case(lambda x: ft.protected_solve(x["A"], x["b"], return_report=True), "A b"),
    "refined": solution_case(lambda x: ft.protected_solve(x["A"], x["b"], refine=True, return_report=True), "A b"),
    "lu_solve": solution_case(lambda x: ft.protected_lu_solve((x["lu"], x["piv"]), x["b"], return_report=True), "lu b"),
    "cho_solve": solution_case(
        lambda x: ft.protected_cho_solve((x["c"], True), x["b"], return_report=True), "c b", of="S"
    ),
}


def silent(name: str, dtype: Any, n: int, most: float) -> list[str]:
    """Where a wrong result is returned, off by more than `most`."""
    rng, case = np.random.default_rng(2), CASES[name]
    A, b = rng.standard_normal((n, n)).astype(dtype), rng.standard_normal((n, 3)).astype(dtype)
    S = (A @ A.T + n * np.eye(n)).astype(dtype)
    lu, piv = scipy.linalg.lu_factor(A)
    right = {"A": A, "b": b, "S": S, "lu": lu, "piv": piv, "c": scipy.linalg.cholesky(S, lower=True)}
    given = {which: X.copy(order="K") for which, X in right.items()}
    which = case.operands.split()
    return for_a_while.silent(case.call, given, which, lambda found: case.missed(found, right), most, triangles="Sc")


@pytest.mark.parametrize("name", CASES)
def test_no_wrong_result_is_returned(name: str) -> None:
    assert not silent(name, np.float64, 60, 1e-8)


def test_nor_is_a_refinement_by_what_was_wrong() -> None:
    assert not silent("refined", np.float32, 300, 1e-2)


def test_a_change_that_cancels_in_one_combination_of_solutions_is_seen() -> None:
    n, rng = 300, np.random.default_rng(2)
    A, b = rng.standard_normal((n, n)).astype(np.float32), rng.standard_normal((n, 3)).astype(np.float32)
    lu, piv = scipy.linalg.lu_factor(A)
    given = {"lu": lu, "b": b, "piv": piv}
    places = (256, 148), (256, 191)  # what they are multiplied by is nearly the same in the sum of three solutions
    assert result(CASES["lu_solve"].call, given, "lu", places, (2, LAST)) is None
