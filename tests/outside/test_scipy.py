"""SciPy's own tests of solve, LU, Cholesky and stacks of them hold for the protected functions."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.linalg

import abft_tsm2 as ft
from tests.outside.borrowed import Swap, load, swapping

of_solve = load("scipy.linalg.tests.test_basic")
of_lu = load("scipy.linalg.tests.test_decomp_lu")
of_cholesky = load("scipy.linalg.tests.test_decomp_cholesky")
of_stacks = load("scipy.linalg.tests.test_batch")

NAMES = ("solve", "lu_factor", "lu_solve", "cholesky", "cho_factor", "cho_solve")
SWAPS = {name: Swap(getattr(ft, f"protected_{name}"), getattr(scipy.linalg, name)) for name in NAMES}


def some(*names: str) -> dict[str, Swap]:
    return {name: SWAPS[name] for name in names}


swapped = swapping(
    (of_solve, some("solve")),
    (of_lu, some("solve", "lu_factor", "lu_solve")),
    (of_cholesky, some("cholesky", "cho_factor", "cho_solve")),
    (of_stacks, {f"linalg.{name}": swap for name, swap in SWAPS.items()}),
)

COMPLEX = "complex numbers are not supported yet"
OVERWRITES = "differs: overwrite_a and overwrite_b are accepted, and nothing is overwritten"
EXPECTED = {
    r"\[.*complex": COMPLEX,
    r"_(complex|complex2|complexb|her|her_actuallysym|20Feb04|20Feb04_bug)$": COMPLEX,
    r"test_(pos_fails_sym_complex|symmetric_hermitian)": COMPLEX,
    # Of the parameters: transposed, b's dimensions, order and type, a's order and type, overwrite_b, overwrite_a.
    r"TestSolve::test_overwrite_args\[([^-]+-){4}F-float-[^-]+-True\]": OVERWRITES,
    r"TestSolve::test_overwrite_args\[[^-]+-(1-.|2-F)-float-.-[a-z]+-True-": OVERWRITES,
    r"TestSolve::test_(scalar_a_and_1D_b|singular_scalar)": "differs: a scalar is no matrix",
    r"TestSolve::test_posdef_not_posdef": "differs: with assume_a='pos' a matrix that is not definite is solved by LU",
    r"TestOverwrite": "differs: objects with __array__ or __array_interface__ alone are refused",
    r"TestBatch::test_ldl_cholesky\[float..-fun_n_out2": "differs: `lower` of the factors of a stack is one bool",
}
LEFT_OUT = {
    r"TestLUFactor::test_check_finite": "calls `lu` alone",
    r"TestBatch::test_ldl_cholesky.*fun_n_out1": "calls `ldl` alone",
    r"TestBatch::test_schur_lu.*schur\]": "calls `schur` alone",
}


class TestSolve(of_solve.TestSolve):
    pass


class TestLUFactor(of_lu.TestLUFactor):
    pass


class TestLUSolve(of_lu.TestLUSolve):
    pass


class TestCholesky(of_cholesky.TestCholesky):
    pass


class TestChoFactor(of_cholesky.TestChoFactor):
    pass


class TestOverwriteOfSolve:
    test_solve = of_solve.TestOverwrite.test_solve


class TestOverwriteOfCholesky:
    test_cholesky = of_cholesky.TestOverwrite.test_cholesky
    test_cho_factor = of_cholesky.TestOverwrite.test_cho_factor
    test_cho_solve = of_cholesky.TestOverwrite.test_cho_solve


class TestBatch:
    """Of theirs those that call a function that has a protected one; parameters that are functions are swapped here."""

    test_ldl_cholesky = of_stacks.TestBatch.test_ldl_cholesky
    test_schur_lu = of_stacks.TestBatch.test_schur_lu
    test_solve = of_stacks.TestBatch.test_solve
    test_lu_solve = of_stacks.TestBatch.test_lu_solve
    test_cho_solve = of_stacks.TestBatch.test_cho_solve

    @pytest.fixture(autouse=True)
    def functions(self, swapped: dict[Any, Any]) -> None:
        self.swapped = swapped

    def batch_test(self, function: Any, *args: Any, **options: Any) -> Any:
        return of_stacks.TestBatch.batch_test(self, self.swapped.get(function, function), *args, **options)
