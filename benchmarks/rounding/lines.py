"""Residuals of the rows of a checked product, for `benchmarks.rounding`, and the units that they are measured in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.checksum.bounds import statistical_bound
from abft_tsm2.checksum.encode import equilibrated, exponents
from abft_tsm2.checksum.weights import weights
from abft_tsm2.faults.judge.oracle import BLOCK_BYTES
from benchmarks.rounding.engines import Engine
from benchmarks.rounding.operands import widened

Vector = NDArray[np.float64]
NEGLIGIBLE = 0.1  # of a bound: the part of underflow, itself a hundred times its effect, in rows that tell of rounding


@dataclass(frozen=True)
class Encoded:
    """What the check of C = A B needs of the operands: the weights v of the columns (on the device), and for each row
    t = A B v, P2 and P (on the host)."""

    k: int
    weights: Array
    predicted: Vector
    products: Vector
    magnitudes: Vector

    @classmethod
    def of(cls, A: Array, B: Array, name: str, xp: Any = np) -> Encoded:
        """Of operands of a type."""
        (m, k), n = A.shape, B.shape[1]
        squares = xp.zeros(n)
        for _, b in _blocks(B, name, xp):
            squares += (b * b).sum(axis=0)
        with np.errstate(divide="ignore"):
            exponent = exponents(np.log2(to_host(squares)) / 2)
        v = xp.asarray(np.ascontiguousarray(equilibrated(weights("balanced", n), exponent)[:, 0]))
        s, q2 = xp.zeros(k), xp.zeros(k)
        for part, b in _blocks(B, name, xp):
            s[part] = b @ v
            q2[part] = (b * b) @ (v * v)
        q = xp.sqrt(q2)
        t, products, magnitudes = (xp.zeros(m) for _ in range(3))
        for part, a in _blocks(A, name, xp):
            t[part] = a @ s
            products[part] = xp.sqrt((a * a) @ q2)
            magnitudes[part] = abs(a) @ q
        return cls(k, v, *(to_host(x) for x in (t, products, magnitudes)))

    def lines(self, C: Array, name: str, xp: Any = np) -> Lines:
        """The rows of a product of type `name` beside what was predicted of them."""
        v = self.weights
        found, stored = xp.zeros(C.shape[0]), xp.zeros(C.shape[0])
        for part, c in _blocks(C, name, xp):
            found[part] = c @ v
            stored[part] = xp.sqrt((c * c) @ (v * v))
        with np.errstate(invalid="ignore"):
            residual = abs(to_host(found) - self.predicted)
        weight = float(abs(v).sum())
        return Lines(self.k, v.size, weight, residual, self.products, self.magnitudes, to_host(stored))


@dataclass(frozen=True)
class Lines:
    """The rows of a checked product, on the host.

    Attributes
    ----------
    k, n, weight : int, int, float
        Terms of an element, elements of a row, ||v||_1.
    residual, products, magnitudes, stored : (m,) arrays
        r = |u - t|, P2 = sqrt((A o A) ||B_l o v||^2), P = |A| ||B_l o v||, cn = ||C_i o v||.
    """

    k: int
    n: int
    weight: float
    residual: Vector
    products: Vector
    magnitudes: Vector
    stored: Vector


MEASURES = ("ratio", "ratio_999", "linear", "stored", "inputs_11", "inputs_10", "over_tau")
"""See `measure`."""


def measure(lines: Lines, engine: Engine) -> dict[str, float]:
    """The largest residuals of a product, each in units of what a constant multiplies.

    Returns
    -------
    measures : dict
        ``ratio``: r / (u sqrt(k) max(P2, cn)), and ``ratio_999`` its 99.9 % quantile over the rows; ``linear``:
        r / (u k P); ``stored``: r / (u_out cn) where C is rounded once more; ``inputs_11``, ``inputs_10``:
        r / (2^-11 P2) and r / (2^-10 P2) where operands are reduced; ``over_tau``: r / tau. All but the last leave out
        rows in whose bound underflow takes part. What cannot be judged, NaN, is infinitely large.
    """
    a = engine.arithmetic
    sizes: dict[str, Any] = {"products": lines.products, "stored": lines.stored, "added": None}
    underflow = a.underflow(lines.k) * lines.weight
    with np.errstate(invalid="ignore"):
        tau = statistical_bound(np, a, lines.k, lines.n, underflow=underflow, **sizes)
    clear = ~(underflow > NEGLIGIBLE * tau)

    def worst(unit: Any, where: Any = clear) -> Vector:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.where(lines.residual == 0, 0.0, lines.residual / unit)
        return np.asarray(np.where(np.isnan(found), np.inf, found)[where])

    largest = np.maximum(lines.products, lines.stored)
    ratio = worst(a.u * math.sqrt(lines.k) * largest)
    found = {
        "ratio": ratio.max(initial=0.0),
        "ratio_999": np.quantile(ratio, 0.999, method="higher") if ratio.size else 0.0,
        "linear": worst(a.u * lines.k * lines.magnitudes).max(initial=0.0),
    }
    if a.u_out:
        found["stored"] = worst(a.u_out * lines.stored).max(initial=0.0)
    if engine.reduced:
        found |= {f"inputs_{bits}": worst(2.0**-bits * lines.products).max(initial=0.0) for bits in (11, 10)}
    found["over_tau"] = worst(tau, slice(None)).max(initial=0.0)
    return {name: float(value) for name, value in found.items()}


def _blocks(x: Array, name: str, xp: Any) -> Iterator[tuple[slice, Array]]:
    """x in float64, as many rows at a time as fit into a block."""
    rows = max(1, BLOCK_BYTES // (8 * x.shape[1]))
    for at in range(0, x.shape[0], rows):
        yield slice(at, at + rows), widened(x[at : at + rows], name, xp)
