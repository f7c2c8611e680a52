"""CuPy's own tests of dot and linalg.solve hold for the protected functions on a card.

Of a checkout, of the version that is installed: the environment variable ABFT_TSM2_CUPY_TESTS names it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.outside.borrowed import REAL_NUMBERS, Swap, checkout, load, swapping

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", exc_type=ImportError)
folder = checkout("ABFT_TSM2_CUPY_TESTS", "github.com/cupy/cupy") / "tests/cupy_tests/linalg_tests"

import abft_tsm2 as ft

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

EXPECTED: dict[str, str] = {}
LEFT_OUT = {
    r"TestProduct::(?!.*dot)": "calls another function",
    r"TestProduct::.*(vdot|tensordot)": "calls another function",
}

# CuPy makes a class of each set of parameters.
globals().update({name: value for name, value in vars(of_product).items() if name.startswith(("TestDot", "TestProduct"))})
globals().update({name: value for name, value in vars(of_solve).items() if name.startswith("TestSolve")})
