"""The judge of a protected product on a GPU, which believes no report.

Rows of C, all of them where the product is small, are compared element by element with a product in float64 and the
rigorous bound of `benchmarks.gpu_products`, a few columns of which are compared with NumPy's longdouble in turn. A
random vector x looks at all of C: C x against A (B x), row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from abft_tsm2.faults.judge.oracle import (
    BLOCK_BYTES,
    Array,
    Reference,
    ReferenceArithmetic,
    reference,
    require,
    widened,
)
from benchmarks.gpu_products import errors

WHOLE = 2**33  # multiplications up to which every element is compared
SAMPLED = 64  # rows of each larger product
COLUMNS = 16  # of the reference that are compared with longdouble
SIGMAS = 8.0  # of an element of E x, whose variance is the squared norm of that row of E: the bound on C x - A (B x)


class Judge:
    """Says how far a product of A and B is from right.

    Parameters
    ----------
    A, B : (..., m, k), (..., k, n) arrays
    how : Arithmetic
    xp : module
        NumPy or CuPy.
    rows : sequence of int
        Compared element by element, beside those that always are.
    """

    def __init__(self, A: Array, B: Array, how: ReferenceArithmetic, xp: Any, rows: Sequence[int] = ()) -> None:
        (m, self._k), n = A.shape[-2:], B.shape[-1]
        self._how, self._xp = how, xp
        self._rows = list(range(m))
        if A.size * n > WHOLE:
            steps = max(1, SAMPLED - 1)
            self._rows = sorted({*(i * (m - 1) // steps for i in range(SAMPLED)), *rows})
        self._whole = len(self._rows) == m
        some = self._some(A)
        self._expected = reference(some, B, xp, sums=how.sums)
        step = max(1, n // COLUMNS)
        e = self._expected
        few = Reference(*(x[..., ::step] for x in (e.high, e.low, e.magnitude)))
        require(few, some, B[..., ::step], xp, sums=how.sums)
        self._x = xp.random.default_rng(m + n).standard_normal((n, 1))
        self._predicted = _times(A, _times(B, self._x, xp)[0], xp)[0]

    def __call__(self, C: Array) -> float:
        """The largest of errors over what is allowed to them: right up to 1. NaN where C has one."""
        found = errors(self._some(C), self._expected, self._k, self._xp, arithmetic=self._how)
        seen, norms = _times(C, self._x, self._xp)
        allowed = SIGMAS * self._how.norm(self._k) * norms
        ratios = (found.norm, found.worst, float((abs(seen - self._predicted) / allowed).max()))
        return math.nan if any(math.isnan(ratio) for ratio in ratios) else max(ratios)

    def _some(self, X: Array) -> Array:
        """The rows that are compared, in float64."""
        if self._whole:
            return widened(X, self._xp)
        # By slices: CuPy gathers no bfloat16.
        return self._xp.concatenate([widened(X[..., i : i + 1, :], self._xp) for i in self._rows], axis=-2)


def _times(X: Array, x: Array, xp: Any) -> tuple[Array, Array]:
    """X x in float64, and the 2-norms of X's rows; both (..., rows, 1)."""
    rows, columns = X.shape[-2:]
    step = max(1, BLOCK_BYTES // (8 * columns * math.prod(X.shape[:-2])))
    product, norms = (xp.zeros((*X.shape[:-1], 1)) for _ in range(2))
    for at in range(0, rows, step):
        part = widened(X[..., at : at + step, :], xp)
        product[..., at : at + step, :] = part @ x
        norms[..., at : at + step, :] = (part * part).sum(-1, keepdims=True) ** 0.5
    return product, norms
