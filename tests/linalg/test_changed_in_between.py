"""Operands and solutions that change where no stage lies between two reads: no wrong solution is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import linalg

import abft_tsm2 as ft
from abft_tsm2 import Status
from abft_tsm2.linalg import certify, given, solve, substitution
from tests.support.planting import normal

N = 40
Patch = pytest.MonkeyPatch


class System:
    """A system, what solves it, and the operands that are given."""

    def __init__(self, name: str, n: int = N, count: int = 3) -> None:
        a = normal(n, n)
        self.a, self.b = (a @ a.T + n * np.eye(n) if name == "cho_solve" else a), normal(n, count, seed=1)
        self.name, self.given = name, {"b": np.array(self.b, order="F")}
        if name == "solve":
            self.given["a"] = self.a.copy()
        elif name == "lu_solve":
            self.given["lu"], self.piv = linalg.lu_factor(self.a)
        else:
            self.given["c"] = linalg.cholesky(self.a, lower=True)

    def outcome(self, on_stage: Any = None, **options: Any) -> Status:
        """The status, which is raised, or that of a solution that is right."""
        now, how = self.given, {"return_report": True, "on_stage": on_stage, **options}
        try:
            if self.name == "solve":
                x, report = ft.protected_solve(now["a"], now["b"], **how)
            elif self.name == "lu_solve":
                x, report = ft.protected_lu_solve((now["lu"], self.piv), now["b"], **how)
            else:
                x, report = ft.protected_cho_solve((now["c"], True), now["b"], **how)
        except ft.SilentDataCorruptionError as refused:
            return refused.report.status
        np.testing.assert_allclose(self.a @ x, self.b, atol=1e-8 * float(np.abs(self.b).max()))
        return report.status


def before(call: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def acting(*args: Any, **named: Any) -> Any:
        act()
        return call(*args, **named)

    return acting


def behind(call: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def acting(*args: Any, **named: Any) -> Any:
        result = call(*args, **named)
        act()
        return result

    return acting


def swapped(x: np.ndarray) -> None:
    x[2, 2], x[3, 3] = x[3, 3], x[2, 2]


def signs(x: np.ndarray) -> None:
    x[2, 2], x[3, 3] = -x[2, 2], -x[3, 3]


@pytest.mark.parametrize("change", [swapped, signs])
@pytest.mark.parametrize(("name", "operand"), [("solve", "a"), ("lu_solve", "lu"), ("cho_solve", "c")])
def test_two_elements_of_a_diagonal(name: str, operand: str, change: Callable[[np.ndarray], None]) -> None:
    """Of 10 x 10: a prime number of words lies between them."""
    for order in ("C", "F"):
        system, changes = System(name, n=10), [change]
        system.given[operand] = np.array(system.given[operand], order=order)  # type: ignore[call-overload]

        def hook(stage: str, arrays: Any) -> None:
            if stage == "forward" and changes:  # noqa: B023
                changes.pop()(system.given[operand])  # noqa: B023

        assert system.outcome(hook) is Status.INPUT_CHANGED, order


@pytest.mark.parametrize("name", ["solve", "lu_solve", "cho_solve"])
def test_b_is_right_again_behind_its_evidence(monkeypatch: Patch, name: str) -> None:
    system = System(name)
    b, right = system.given["b"], system.given["b"].copy()
    copied = before(substitution.like_columns, lambda: b.__setitem__((5, 1), 9.0))
    monkeypatch.setattr(substitution, "like_columns", copied)
    evidence = behind(substitution.substitution_evidence, lambda: b.__setitem__(..., right))
    monkeypatch.setattr(substitution, "substitution_evidence", evidence)
    system.outcome()


@pytest.mark.parametrize("when", [before, behind])
@pytest.mark.parametrize("name", ["solve", "lu_solve", "cho_solve"])
@pytest.mark.parametrize("operand", ["matrix", "b"])
def test_an_operand_changes_beside_its_words(monkeypatch: Patch, operand: str, name: str, when: Any) -> None:
    """Before they are taken, and behind the weighted sums; or behind both."""
    system = System(name)
    which = {"solve": "a", "lu_solve": "lu", "cho_solve": "c"}[name] if operand == "matrix" else "b"
    wrong, words = [9.0], "fingerprint" if operand == "b" else "sums_of_words"

    def change() -> None:
        if wrong:
            system.given[which][5, 1] = wrong.pop()

    monkeypatch.setattr(given, words, when(getattr(given, words), change))
    if (which, when) == ("a", before):  # nothing is taken of it before
        system.a[5, 1] = 9.0
        assert system.outcome() is Status.CLEAN
    else:
        assert system.outcome() is Status.INPUT_CHANGED


def test_a_solution_is_damaged_while_it_is_refined(monkeypatch: Patch) -> None:
    system = System("solve")
    held: list[np.ndarray] = []

    def certified(*args: Any) -> Any:
        held.append(args[2])
        return certificate(*args)

    certificate, step = solve._certificate, solve.substituted_carefully
    monkeypatch.setattr(solve, "_certificate", certified)
    damage = before(step, lambda: [x.__setitem__((7, 1), 1e3) for x in held[:1]])  # of the step, not before
    monkeypatch.setattr(solve, "substituted_carefully", damage)
    assert system.outcome(refine=True) is Status.CORRECTED


@pytest.mark.parametrize("trans", [0, 1])
def test_the_order_of_rows_is_another_once(monkeypatch: Patch, trans: int) -> None:
    system, made = System("lu_solve"), []
    system.a = system.a.T if trans else system.a

    def permutation(*args: Any) -> Any:
        order = right(*args)
        made.append(order)
        if len(made) == 1:
            order[3] ^= 1
        return order

    right = substitution.permutation
    monkeypatch.setattr(substitution, "permutation", permutation)
    assert system.outcome(trans=trans) is Status.CORRECTED


def test_a_matrix_is_right_again_behind_the_elements_that_explain_its_sums(monkeypatch: Patch) -> None:
    """It was wrong when it was copied, and when suspected lines of the factors were compared with it."""
    a = normal(N, N)
    A, right = a.copy(), a[5, 3]
    lines = [0, 1]  # the row and the column

    def restore() -> None:
        lines.pop()
        A[5, 3] = A[5, 3] if lines else right

    monkeypatch.setattr(certify, "_explained", behind(certify._explained, restore))

    def hook(stage: str, arrays: Any) -> None:
        if stage == "encoded":
            A[5, 3] = 2.0

    with pytest.raises(ft.SilentDataCorruptionError) as refused:
        ft.protected_lu_factor(A, mode="offline", on_stage=hook)
    assert refused.value.report.status is Status.INPUT_CHANGED
