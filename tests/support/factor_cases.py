"""What the tests of factorisations share: shapes, matrices, a judge, and calls compared with SciPy's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2 import Status, protected_lu_factor
from abft_tsm2.errors import UnverifiableWarning
from tests.support.oracles import WIDE
from tests.support.planting import Change, Hook, normal
from tests.support.wide_products import wide_moduli, wide_product

DTYPES = (np.dtype(np.float64), np.dtype(np.float32))
MODES = ("auto", "online", "offline")

# Edges, primes, and powers of two with their neighbours: 64 is a block, 128 are two.
SQUARE = ((1, 1), (2, 2), (3, 3), (7, 7), (31, 31), (63, 63), (64, 64), (65, 65), (97, 97), (129, 129))
OBLONG = ((1, 9), (9, 1), (2, 3), (13, 5), (5, 13), (64, 65), (65, 64), (127, 33), (33, 127), (300, 2), (2, 300))
EMPTY = ((0, 0), (0, 3), (3, 0))


def unit(dtype: Any) -> float:
    """Unit roundoff."""
    return float(np.finfo(dtype).eps) / 2


def gamma(terms: int, dtype: Any) -> Any:
    return WIDE(terms) * WIDE(unit(dtype)) / (1 - WIDE(terms) * WIDE(unit(dtype)))


def permutation(piv: np.ndarray, rows: int) -> np.ndarray:
    """p with ``(P A)[i] = A[p[i]]``, from LAPACK's exchanges."""
    p = np.arange(rows)
    for i, j in enumerate(piv):
        p[[i, j]] = p[[j, i]]
    return p


def triangles(lu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """L (m x k) and U (k x n) in the wide type."""
    k, wide = min(lu.shape), lu.astype(WIDE)
    return np.tril(wide[:, :k], -1) + np.eye(len(lu), k, dtype=WIDE), np.triu(wide[:k])


def lu_outside(lu: np.ndarray, piv: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Boolean m x n: where P A - L U is more than rounding explains.

    |P A - L U| <= gamma_k |L||U| (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, theorem 9.3),
    k = min(m, n), with two operations more, for libraries that multiply by the reciprocal of a pivot.
    """
    L, U = triangles(lu)
    k = min(lu.shape)
    error = abs(a.astype(WIDE)[permutation(piv, len(a))] - wide_product(L, U))
    bound = gamma(k + 2, lu.dtype) * wide_moduli(L, U) + (k + 2) * WIDE(float(np.finfo(lu.dtype).smallest_subnormal))
    outside: np.ndarray = ~(error <= bound)
    return outside


def cholesky_outside(c: np.ndarray, a: np.ndarray, lower: bool) -> np.ndarray:
    """Boolean n x n: where A - R'R, or A - L L', is more than rounding explains: gamma_{n+1} |R|'|R| (Higham, 2002,
    theorem 10.3), with an operation more for libraries that multiply by the reciprocal of a pivot."""
    L = np.tril(c.astype(WIDE)) if lower else np.triu(c.astype(WIDE)).T
    half = np.tril(a.astype(WIDE)) if lower else np.triu(a.astype(WIDE)).T
    whole = half + np.tril(half, -1).T
    bound = gamma(len(a) + 2, c.dtype) * wide_moduli(L, L.T)
    wrong: np.ndarray = ~(abs(whole - wide_product(L, L.T)) <= bound)
    return wrong


def backward_error(a: np.ndarray, x: np.ndarray, b: np.ndarray, *, by_rows: bool = False) -> float:
    """How much A and b would have to change, relative to their norms (or to each element), for x to be the solution.

    Higham, sections 7.1 and 7.2; the largest of all right-hand sides.
    """
    A, X, B = a.astype(WIDE), x.astype(WIDE).reshape(len(b), -1), b.astype(WIDE).reshape(len(b), -1)
    residual = abs(wide_product(A, X) - B)
    if by_rows:
        size = wide_moduli(A, X) + abs(B)
    else:
        size = abs(A).sum(axis=1).max() * abs(X).max(axis=0) + abs(B).max(axis=0)
    ratio = np.where(residual == 0, 0, residual / np.where(size > 0, size, 1))
    return float(ratio.max()) if np.isfinite(ratio).all() else np.inf


def positive(n: int, dtype: Any = np.float64, seed: int = 0) -> np.ndarray:
    """Symmetric, positive definite, and well-conditioned."""
    x = normal(n, n, seed=seed)
    return (x @ x.T / max(1, n) + np.eye(n)).astype(dtype)


def clean(a: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a matrix, which have to be called clean."""
    (lu, piv), report = protected_lu_factor(a, return_report=True, **options)
    assert report.status is Status.CLEAN, report
    return lu, piv


SIZES = (1, 2, 7, 31, 63, 64, 65, 97, 129)
RIGHT = ("vector", "column", "two", "many")


def right(kind: str, n: int, dtype: Any = np.float64) -> np.ndarray:
    """A right-hand side of n rows."""
    columns = {"vector": (), "column": (1,), "two": (2,), "many": (40,)}[kind]
    return normal(n, *columns, dtype=dtype, seed=5)


def solved(x: Any, a: np.ndarray, b: np.ndarray) -> bool:
    """Whether x solves a system near A x = b: the residual of Gaussian elimination, whose growth is small here."""
    # Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, theorem 9.5, with growth below 8.
    return backward_error(a, x, b) <= 8 * 3 * max(1, len(a)) * unit(x.dtype)


def once(stage: str, name: str, change: Change) -> Hook:
    """A hook that changes a live array the first time that the stage is reached."""
    done: list[str] = []

    def hook(reached: str, arrays: Any) -> None:
        if reached == stage and not done:
            done.append(reached)
            change(arrays[name])

    return hook


@dataclass(frozen=True)
class Outcome:
    """What a call came to."""

    value: Any
    error: BaseException | None
    warned: tuple[tuple[type, str], ...]

    @property
    def kind(self) -> Any:
        """Type and message of what it raised; of what it returned, shapes and types."""
        if self.error is not None:
            return type(self.error), str(self.error)
        return described(self.value)


def described(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    return tuple(map(described, value)) if isinstance(value, tuple | list) else value


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
    """Call it; what could not be checked is not worth a word here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", UnverifiableWarning)
        value, error = None, None
        try:
            value = function(*arguments, **options)
        except Exception as raised:
            error = raised
    return Outcome(value, error, tuple((w.category, str(w.message)) for w in caught))


def computed_in(*operands: Any) -> np.dtype[Any]:
    """float32 where everything is float32; what has fewer bits is computed in float64 (SciPy: in float32)."""
    single = all(np.asarray(x).dtype.newbyteorder("=") == np.float32 for x in operands)
    return np.dtype(np.float32 if single else np.float64)


# What can be passed instead of a plain float64 matrix; SciPy takes each.
INPUTS: Mapping[str, Callable[[np.ndarray], Any]] = {
    "list": lambda x: x.tolist(),
    "tuples": lambda x: tuple(map(tuple, x.tolist())),
    "int64": lambda x: np.rint(4 * x).astype(np.int64),
    "int32": lambda x: np.rint(4 * x).astype(np.int32),
    "int16": lambda x: np.rint(4 * x).astype(np.int16),
    "uint8": lambda x: np.rint(9 * abs(x)).astype(np.uint8),
    "bool": lambda x: np.eye(len(x), dtype=bool),
    "float16": lambda x: x.astype(np.float16),
    "longdouble": lambda x: x.astype(np.longdouble),
    "foreign": lambda x: x.astype(">f8"),
    "foreign single": lambda x: x.astype(">f4"),
    "matrix": lambda x: x.view(np.matrix),
}
