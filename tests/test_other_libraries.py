"""Arrays of libraries that are not taken: refused by every operation before anything is computed, with what to do.

The libraries themselves are not needed: what tells them is the module that a type is of, and what tells a tensor's
state are its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from abft_tsm2 import (
    encode,
    protected_cho_solve,
    protected_cholesky,
    protected_gemm,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
    tall_skinny_matmul,
    verify_gemm,
)
from abft_tsm2.arrays import as_operand, as_output, real_number
from abft_tsm2.linalg.inputs import pivots_of


class Foreign:
    """What NumPy could convert, and an array of the standard, but for the library that it is of."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise AssertionError("converted, though it should have been refused")

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        raise AssertionError("used, though it should have been refused")


def of(library: str, name: str = "Array", bases: tuple[type, ...] = (Foreign,), **attributes: Any) -> Any:
    """An object of a type of that name, with these attributes."""
    return type(name, bases, {"__module__": library, **attributes})()


def tensor(**attributes: Any) -> Any:
    usual = {"device": "cpu", "requires_grad": False, "layout": "torch.strided", "dtype": "torch.float32"}
    return of("torch", "Tensor", **{**usual, **attributes})


TRACER = type("Tracer", (Foreign,), {"__module__": "jax._src.core"})
FRAME = type("DataFrame", (Foreign,), {"__module__": "pandas"})
REFUSED: dict[str, tuple[Any, str]] = {
    "jax": (of("jaxlib._jax", "ArrayImpl"), r"nothing can be written into a JAX array.*pass numpy\.asarray\(x\)$"),
    "jax traced": (
        of("jax._src.interpreters.partial_eval", "DynamicJaxprTracer", (TRACER,)),
        r"JAX traces this function .*no numbers yet.*outside of what is traced, or through jax\.pure_callback$",
    ),
    "pandas": (of("pandas", "DataFrame"), r"pandas\.DataFrame: pass x\.to_numpy\(dtype='float64'\)$"),
    "derived from pandas": (of("mine", "Frame", (FRAME,)), r"mine\.Frame: pass x\.to_numpy\(dtype='float64'\)$"),
    "sparse": (of("sparse.numba_backend._coo.core", "COO"), r"sparse\.COO: pass x\.todense\(\)$"),
    "scipy.sparse": (scipy.sparse.csr_array(np.eye(2)), r"csr_array: pass x\.toarray\(\)$"),
    "scipy.sparse matrix": (scipy.sparse.coo_matrix(np.eye(2)), r"coo_matrix: pass x\.toarray\(\)$"),
    "a linear operator": (of("scipy.sparse.linalg._interface"), "pass a NumPy or CuPy array$"),
    "cupyx.scipy.sparse": (of("cupyx.scipy.sparse._csr", toarray=None), r"pass x\.toarray\(\)$"),
    "tensorflow": (of("tensorflow.python.framework.ops"), r"pass x\.numpy\(\)$"),
    "torch": (tensor(), r"torch\.Tensor: pass x\.numpy\(\)$"),
    "needs a gradient": (
        tensor(requires_grad=True),
        r"needs a gradient, which ends here; pass x\.detach\(\)\.numpy\(\)$",
    ),
    "torch, on a GPU": (tensor(device="cuda:0"), r"pass cupy\.from_dlpack\(x\)$"),
    "needs a gradient, on a GPU": (
        tensor(device="cuda:1", requires_grad=True),
        r"a gradient.*pass cupy\.from_dlpack\(x\.detach\(\)\)$",
    ),
    "torch, elsewhere": (tensor(device="mps:0"), r"pass x\.cpu\(\)\.numpy\(\)$"),
    "torch, sparse": (tensor(layout="torch.sparse_coo"), r"pass x\.to_dense\(\)\.numpy\(\)$"),
    "torch, bfloat16": (tensor(dtype="torch.bfloat16"), r"pass x\.float\(\)\.numpy\(\)$"),
    "without memory": (
        of("other", dtype=np.dtype("float64"), shape=(2, 2)),
        "without __dlpack__: pass a NumPy or CuPy array$",
    ),
}
each = pytest.mark.parametrize(("x", "sentence"), REFUSED.values(), ids=REFUSED)


@each
def test_one_sentence_says_what_to_do(x: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence) as error:
        as_operand(x, "x")
    text = str(error.value)
    assert text.startswith("x is a ")
    assert "\n" not in text


def computed(*_: Any) -> None:
    raise AssertionError("something was computed")


def _calls(x: Any) -> dict[str, Callable[[], Any]]:
    eye, b = np.eye(2), np.ones(2)
    hook = {"on_stage": computed}
    return {
        "a": lambda: protected_gemm(x, eye, **hook),
        "b": lambda: protected_gemm(eye, x, **hook),
        "a and b": lambda: protected_gemm(x, x, **hook),
        "c": lambda: protected_gemm(eye, eye, x, beta=1.0, **hook),
        "verify": lambda: verify_gemm(x, eye, eye),
        "verify C": lambda: verify_gemm(eye, eye, x),
        "encode": lambda: encode(x),
        "tall": lambda: tall_skinny_matmul(x, eye),
        "skinny": lambda: tall_skinny_matmul(eye, x),
        "lu": lambda: protected_lu_factor(x, **hook),
        "cholesky": lambda: protected_cholesky(x, **hook),
        "solve": lambda: protected_solve(x, b, **hook),
        "solve b": lambda: protected_solve(eye, x, **hook),
        "lu_solve": lambda: protected_lu_solve((x, np.arange(2)), b, **hook),
        "lu_solve b": lambda: protected_lu_solve((eye, np.arange(2)), x, **hook),
        "cho_solve": lambda: protected_cho_solve((x, True), b, **hook),
        "cho_solve b": lambda: protected_cho_solve((eye, True), x, **hook),
    }


@pytest.mark.parametrize("operation", _calls(None))
@pytest.mark.parametrize("x", [REFUSED[name][0] for name in ("jax", "jax traced", "pandas", "sparse", "torch")])
def test_refused_by_every_operation_before_anything_is_computed(x: Any, operation: str) -> None:
    with pytest.raises(TypeError, match=r"^\w+ is a .*(pass |pure_callback)"):
        _calls(x)[operation]()


OF_LIBRARIES = [x for name, (x, _) in REFUSED.items() if name != "without memory"]


@pytest.mark.parametrize("x", OF_LIBRARIES)
def test_pivots_are_refused_likewise(x: Any) -> None:
    with pytest.raises(TypeError, match=r"^piv is a "):
        pivots_of(x, (2, 2))


@pytest.mark.parametrize("x", OF_LIBRARIES)
def test_an_output_is_not_to_be_a_copy(x: Any) -> None:
    with pytest.raises(TypeError, match=r"^out is a .*must be a NumPy or CuPy array, to be written into$"):
        as_output(x)


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ValueError])
def test_what_refuses_to_be_an_array_is_a_type_error(error: type[Exception]) -> None:
    class Refuses:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            raise error("call something else")

    for call in (lambda: as_operand(Refuses(), "x"), lambda: encode(np.eye(2), weights=Refuses())):
        with pytest.raises(TypeError, match=r"call something else$"):
            call()


def test_a_number_that_is_none_is_shown_in_one_line() -> None:
    for value in (np.eye(100), np.ones(2000).tolist(), "no", 1j):
        with pytest.raises(TypeError, match=r"expected a real number$") as error:
            real_number(value, "alpha")
        assert len(str(error.value)) < 120
        assert "\n" not in str(error.value)
