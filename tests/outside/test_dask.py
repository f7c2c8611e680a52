"""Dask's own tests of matmul, dot and linalg hold for the protected functions of Dask arrays."""

from __future__ import annotations

import dask.array as da

import abft_tsm2.interop.dask as ft
from tests.outside.borrowed import Swap, load, swapping
from tests.outside.dask_names import cholesky, dot, lu, matmul

of_products = load("dask.array.tests.test_routines")
of_linalg = load("dask.array.tests.test_linalg")

DOT = Swap(dot, da.dot, integers=False)
swapped = swapping(
    (of_products, {"da.matmul": Swap(matmul, da.matmul, integers=False), "da.dot": DOT}),
    (
        of_linalg,
        {
            "da.dot": DOT,
            "da.linalg.lu": Swap(lu, da.linalg.lu),
            "da.linalg.solve": Swap(ft.protected_solve, da.linalg.solve),
            "da.linalg.cholesky": Swap(cholesky, da.linalg.cholesky),
        },
    ),
)

EXPECTED = {
    r"test_cholesky_complex": "complex numbers are not supported yet",
    r"test_lu_errors": "differs: matrices and chunks that are not square are taken",
    r"test_solve_assume_a": "differs: there is no sym_pos, which SciPy has removed",
}
LEFT_OUT = {
    r"test_(tsqr|sfqr).*ValueError\]": "ends before it multiplies",
}

test_matmul = of_products.test_matmul
test_dot_persist_equivalence = of_products.test_dot_persist_equivalence
test_lu_1 = of_linalg.test_lu_1
test_lu_2 = of_linalg.test_lu_2
test_lu_3 = of_linalg.test_lu_3
test_lu_errors = of_linalg.test_lu_errors
test_solve = of_linalg.test_solve
test_solve_assume_a = of_linalg.test_solve_assume_a
test_cholesky = of_linalg.test_cholesky
test_cholesky_complex = of_linalg.test_cholesky_complex
test_tsqr = of_linalg.test_tsqr
test_sfqr = of_linalg.test_sfqr
