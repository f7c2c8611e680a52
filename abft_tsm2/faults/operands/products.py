"""Operands of the products that faults are planted in: distributions, pairs, and a user's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.operands.pairs import PAIRS
from abft_tsm2.faults.operands.wide import WIDE
from abft_tsm2.faults.plan import require_known
from abft_tsm2.faults.trials.trial import Workload
from abft_tsm2.io.matrix import MatrixFileError, read_matrix

Matrix = np.ndarray[Any, np.dtype[Any]]
Generator = np.random.Generator
Draw = Callable[[Generator, tuple[int, int]], Matrix]


def _sparse(rng: Generator, shape: tuple[int, int]) -> Matrix:
    return np.asarray(rng.standard_normal(shape) * (rng.random(shape) < 0.1))


def _graded(rng: Generator, shape: tuple[int, int]) -> Matrix:
    rows, columns = (2.0 ** rng.integers(-6, 7, size) for size in shape)
    return np.asarray(rng.standard_normal(shape) * rows[:, None] * columns)


def _low_rank(rng: Generator, shape: tuple[int, int]) -> Matrix:
    return np.asarray(rng.standard_normal((shape[0], 4)) @ rng.standard_normal((4, shape[1])) / 2)


FAMILIES: Mapping[str, tuple[str, Draw]] = {
    "normal": ("independent normal numbers", lambda rng, shape: rng.standard_normal(shape)),
    "uniform": ("uniform in [0, 1): all of one sign", lambda rng, shape: rng.random(shape)),
    "symmetric": ("uniform in [-1, 1)", lambda rng, shape: rng.uniform(-1, 1, shape)),
    "shifted": ("normal numbers around 1", lambda rng, shape: rng.standard_normal(shape) + 1),
    "lognormal": ("exp of normal numbers: many decades", lambda rng, shape: rng.lognormal(0, 1, shape)),
    "relu": ("normal numbers, the negative ones 0", lambda rng, shape: np.maximum(rng.standard_normal(shape), 0)),
    "sparse": ("nine of ten elements 0", _sparse),
    "graded": ("rows and columns of scales from 1/64 to 64", _graded),
    "low rank": ("of rank 4", _low_rank),
    "integers": ("small integers", lambda rng, shape: rng.integers(-8, 9, shape).astype(np.float64)),
}
"""Distributions, each with what it is."""

FILES = "file:"
"""Begins the family of operands that are read: ``file:A.npy,B.npy``."""


def dtype_of(name: str) -> Any:
    """The type of that name; bfloat16 needs the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def require_family(name: str) -> None:
    """ValueError for a family that does not exist; for files see `require_part`."""
    if not name.startswith(FILES):
        require_known("family of operands", name, {**FAMILIES, **PAIRS, **WIDE})


def require_part(name: str, rows: int, columns: int) -> None:
    """MatrixFileError for a file that cannot be read, or holds a smaller matrix."""
    _part(name, (rows, columns))


def operands(workload: Workload, xp: Any = np) -> tuple[Any, Any]:
    """A (m x k) and B (k x n) of a workload, in its type and order, as arrays of NumPy or CuPy.

    Raises
    ------
    ValueError
        For a family that does not exist.
    MatrixFileError
        If a file cannot be read, or holds a smaller matrix.
    """
    w = workload
    shapes = ((w.m, w.k), (w.k, w.n))
    if w.family.startswith(FILES):
        names = w.family.removeprefix(FILES).split(",")
        pair = [_part(name, shape) for name, shape in zip(names, shapes, strict=True)]
    else:
        require_family(w.family)
        rng = np.random.default_rng([*w.seed, 0xDA7A])
        if w.family in PAIRS:
            pair = list(PAIRS[w.family][1](rng, w.m, w.k, w.n))
        elif w.family in WIDE:
            pair = list(WIDE[w.family][1](rng, w.m, w.k, w.n, FLOATS[w.dtype]))
        else:
            pair = [FAMILIES[w.family][1](rng, shape) for shape in shapes]
    order: Any = w.order
    with np.errstate(over="ignore", under="ignore"):
        A, B = (np.array(x, dtype=dtype_of(w.dtype), order=order) for x in pair)
    return xp.asarray(A, order=order), xp.asarray(B, order=order)


def _part(name: str, shape: tuple[int, int]) -> Matrix:
    """The first rows and columns of a file."""
    x = read_matrix(name, dtype="float64")
    if x.shape[0] < shape[0] or x.shape[1] < shape[1]:
        raise MatrixFileError(
            f"{name} is {x.shape[0]} x {x.shape[1]}, the campaign wants {shape[0]} x {shape[1]} of it: choose smaller "
            "shapes, or another file"
        )
    return x[: shape[0], : shape[1]]
