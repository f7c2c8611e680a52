"""Engines of cuBLAS, types and compute types of a product, and how they reduce float32 operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.checksum.bounds import Arithmetic, arithmetic
from abft_tsm2.core.cublas import CUDA_TYPES
from benchmarks import gpu_timing


@dataclass(frozen=True)
class Engine:
    """Types of a product and the compute type by which cuBLAS multiplies.

    Attributes
    ----------
    name, inputs, out : str
        Its name, the type of A and B, that of C.
    compute : int
        cublasComputeType_t.
    reduced : bool
        Whether operands lose bits before they are multiplied (TF32).
    plain : str
        The engine that is computed where the library declines to emulate.
    """

    name: str
    inputs: str
    out: str
    compute: int
    reduced: bool = False
    plain: str = ""

    @property
    def arithmetic(self) -> Arithmetic:
        """What the package's bound takes it for."""
        return arithmetic(self.inputs, self.out, library="cupy", tf32=self.reduced)


ENGINES = (
    Engine("float64", "float64", "float64", 70),
    Engine("float64 fixed-point", "float64", "float64", 79, plain="float64"),
    Engine("float32", "float32", "float32", 68),
    Engine("float32 TF32", "float32", "float32", 77, reduced=True),
    Engine("float32 BF16x9", "float32", "float32", 78, plain="float32"),
    Engine("float16->float32", "float16", "float32", 68),
    Engine("float16", "float16", "float16", 68),
    Engine("bfloat16->float32", "bfloat16", "float32", 68),
    Engine("bfloat16", "bfloat16", "bfloat16", 68),
)
Multiply = Callable[[Engine, Array, Array], Array]
"""The product of C-ordered operands by an engine; RuntimeError where it is not offered."""

_KEPT_AS = {"bfloat16": "uint16"}


class Cublas:
    """`Multiply` by cublasGemmEx, row-major: to cuBLAS the matrices are transposed, and C' = B' A'."""

    def __call__(self, engine: Engine, A: Array, B: Array) -> Array:
        import cupy
        from cupy_backends.cuda.libs import cublas

        (m, k), n = A.shape, B.shape[1]
        nan = 0x7FC0 if engine.out in _KEPT_AS else math.nan  # what is not computed shows
        C = cupy.full((m, n), nan, dtype=_KEPT_AS.get(engine.out, engine.out))
        factors = np.array((1, 0), engine.arithmetic.accumulator.name)
        at, of, to = factors.ctypes.data, CUDA_TYPES[engine.inputs], CUDA_TYPES[engine.out]
        cublas.gemmEx(
            *(cupy.cuda.device.get_cublas_handle(), 0, 0, n, m, k),
            *(at, B.data.ptr, of, n, A.data.ptr, of, k),
            *(at + factors.itemsize, C.data.ptr, to, n, engine.compute, -1),
        )
        return C


def declined(error: RuntimeError) -> str:
    """What to note of a product that raised."""
    text = gpu_timing.message(error)
    return f"not offered on this card: {text}" if "CUBLAS_STATUS" in text else f"failed: {text}"


# ---- how operands are reduced --------------------------------------------------------------------------------------


def probe() -> NDArray[np.float32]:
    """256 x 256 float32 numbers with all patterns of the 13 bits that TF32 lacks, after 0 to 3 in those before, of both
    signs."""
    low, before, sign = np.arange(2**13), np.arange(4)[:, None], np.array([1, -1])[:, None, None]
    found = sign * (1 + (before * 2**13 + low) * 2.0**-23)
    return np.asarray(found, np.float32).reshape(256, 256)


def kept(x: NDArray[np.float32], y: NDArray[np.float32]) -> str:
    """What an engine did to the operand x, of which y is the product with the identity."""
    steps, found = x.astype(np.float64) * 2.0**10, y.astype(np.float64) * 2.0**10
    rules = {
        "exact": steps,
        "truncated": np.trunc(steps),
        "nearest, ties to even": np.rint(steps),
        "nearest, ties away": np.copysign(np.floor(abs(steps) + 0.5), steps),
    }
    for name, expected in rules.items():
        if np.array_equal(found, expected):
            return name
    return f"otherwise, off by up to {abs(found - steps).max():.3g} of the last place of TF32"


def reduction(engine: Engine, multiply: Multiply, xp: Any = np) -> str:
    """How an engine reduces float32 operands before it multiplies them."""
    x, one = xp.asarray(probe()), xp.asarray(np.eye(256, dtype=np.float32))
    try:
        both = [kept(probe(), to_host(multiply(engine, *pair))) for pair in ((x, one), (one, x))]
    except RuntimeError as error:
        return declined(error)
    return both[0] if both[0] == both[1] else f"A: {both[0]}; B: {both[1]}"
