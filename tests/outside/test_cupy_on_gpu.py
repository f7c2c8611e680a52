"""CuPy's own tests of dot and linalg.solve hold for the protected functions on a card.

Of a checkout, of the version that is installed: the environment variable ABFT_TSM2_CUPY_TESTS names it.
"""

from __future__ import annotations

from typing import Any

import pytest

import abft_tsm2 as ft
from tests.outside.borrowed import REAL_NUMBERS, Swap, checkout, load, swapping

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", exc_type=ImportError)
folder = checkout("ABFT_TSM2_CUPY_TESTS", "github.com/cupy/cupy") / "tests/cupy_tests/linalg_tests"

of_product = load("outside_cupy_test_product", folder / "test_product.py")
of_solve = load("outside_cupy_test_solve", folder / "test_solve.py")

original_dot = cupy.dot


def dot(a: Any, b: Any, out: Any = None) -> Any:
    """Of operands with one or two axes; of others it is another product than `protected_gemm`."""
    if not {cupy.ndim(a), cupy.ndim(b)} <= {1, 2}:
        return original_dot(a, b, out)
    return ft.protected_gemm(a, b, out=out)


# A test tries all types one after the other, by functions of `cupy` itself.
swapped = swapping(
    (cupy, {"dot": Swap(dot, original_dot, integers=False)}),
    (cupy.linalg, {"solve": Swap(ft.protected_solve, cupy.linalg.solve)}),
    modes=(REAL_NUMBERS,),
)

EXPECTED = {
    r"TestSolve_.*test_invalid_shape": "differs: a matrix that is not square is a ValueError, as in SciPy",
    r"TestSolve_.*test_solve_singular_empty__assert_raises": "differs: without right-hand sides nothing is singular",
}
LEFT_OUT = {
    r"TestDot_.*\(2, 3, [04]\)": "three axes: another product",
    r"TestProduct::test_transposed_dot": "three axes: another product",
    r"TestProduct::(?!.*_dot)": "calls another function",
}

# CuPy makes a class of each set of parameters.
CLASSES = {**vars(of_product), **vars(of_solve)}
globals().update(
    {name: CLASSES[name] for name in CLASSES if name.startswith(("TestDot_", "TestSolve_")) or name == "TestProduct"}
)
