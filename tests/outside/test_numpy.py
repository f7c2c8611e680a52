"""NumPy's own tests of matmul, linalg.solve and linalg.cholesky hold for the protected functions."""

from __future__ import annotations

from typing import Any

import numpy as np

import abft_tsm2 as ft
from tests.outside.borrowed import AS_THEY_ARE, REAL_NUMBERS, Swap, load, swapping

of_products = load("numpy._core.tests.test_multiarray")
of_linalg = load("numpy.linalg.tests.test_linalg")


def matmul(a: Any, b: Any, out: Any = None) -> Any:
    return ft.protected_gemm(a, b, out=out)


def cholesky(a: Any, upper: bool = False) -> Any:
    return ft.protected_cholesky(a, lower=not upper)


SOLVE, CHOLESKY = Swap(ft.protected_solve, np.linalg.solve), Swap(cholesky, np.linalg.cholesky)
swapped = swapping(
    (of_products, {"np.matmul": Swap(matmul, np.matmul, integers=False)}),
    (of_linalg, {"np.linalg.cholesky": CHOLESKY, "linalg.cholesky": CHOLESKY, "linalg.solve": SOLVE}),
    modes=(AS_THEY_ARE, REAL_NUMBERS),
)

COMPLEX = "complex numbers are not supported yet"
EXPECTED = {
    r"TestMatmul::test_(shapes|result_types|scalar_output)\[as": "integers, booleans, complex numbers and objects",
    r"TestMatmul::test_(vector|matrix)_(vector|matrix)_values\[as": "integers, booleans, complex numbers and objects",
    r"TestMatmul::test_exceptions\[as": "integers are a TypeError before their shapes are a ValueError",
    r"TestMatmul::test_out_arg\[as": "differs: the message of the TypeError; a complex `out` is one",
    r"TestMatmul::test_empty_out": "differs: the message of the ValueError",
    r"TestMatmul::test_dot_equivalent_matrix_matrix_blastypes\[as they are-complex": COMPLEX,
    r"TestMatmul::test_matmul_(object|object_type_scalar|empty)\[as": "object arrays",
    r"TestMatmul::test_matmul_bool\[as": "booleans",
    r"TestSolve::test_(generalized_)?sq_cases\[as": COMPLEX,
    r"TestSolve::test_types\[as they are-complex": COMPLEX,
    r"TestSolve::test_0_size": "differs: the result is no instance of a subclass of ndarray that b is one of",
    r"TestCholesky::test_basic_property\[as they are-.*-complex": COMPLEX,
    r"TestCholesky::test_(0_size|upper_lower_arg)\[as": COMPLEX,
}
LEFT_OUT = {
    r"\[real numbers-.*complex": "complex alone",
    r"TestCholesky::test_upper_lower_arg\[real": "complex alone",
    r"TestMatmul::test_matmul_(object_type_scalar|empty|exception_multiply|exception_add)\[real": "objects alone",
    r"TestMatmul::test_matmul_bool\[real": "booleans alone",
}


def every_tenth_view(cases: list[Any]) -> list[Any]:
    """Of the strided views of each matrix; stacks of them take most of a minute together."""
    strided = [case for case in cases if "strided" in case.tags]
    return [case for case in cases if "strided" not in case.tags] + strided[::10]


class TestMatmul(of_products.TestMatmul):
    @property
    def matmul(self) -> Any:
        return of_products.np.matmul


class TestSolve(of_linalg.TestSolve):
    TEST_CASES = every_tenth_view(of_linalg.TestSolve.TEST_CASES)


class TestCholesky(of_linalg.TestCholesky):
    pass
