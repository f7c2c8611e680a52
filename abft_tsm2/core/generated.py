"""Weights that kernels make where they use them: ones, a ramp, random signs. kernels/tsm2/generated.cuh is the other
half.

Each weight is a function of its index and column, in integers or in float64 alone, so that host and device agree in
every bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KINDS = ("ones", "ramp", "balanced")
MAGNITUDES = 1 << 22  # of balanced weights: as many as there are numbers of float32 in [1, 1.5)
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64


@dataclass(frozen=True)
class Generated:
    """Weight columns described instead of stored.

    Parameters
    ----------
    kind : {"ones", "ramp", "balanced"}
        ``ones``: 1 everywhere. ``ramp``: column c is ``((i + 1) / n)^c``, i = 0, 1, ..., n - 1, so that its first
        column is ones. ``balanced``: random sign times ``1 + g 2^-23``, g = 0, 1, ..., 2^22 - 1 in a random order, so
        that up to 2^22 elements differ pairwise in magnitude, and beyond that each magnitude occurs at most
        ceil(n / 2^22) times; the signs balance up to about sqrt(n).
    r : int
        Number of columns.
    seed : int
        0 to 2^64 - 1, of ``balanced``.

    Raises
    ------
    ValueError
        For an unknown kind, no column, or a seed out of range.

    Notes
    -----
    ``balanced`` hashes index and column by the finalizer of SplitMix64 (G. L. Steele, D. Lea, C. H. Flood, Fast
    splittable pseudorandom number generators, OOPSLA 2014); its weights are exact in float32 and float64, the types in
    which kernels add; no kernel takes them as 16-bit operands, which hold no 2^22 magnitudes. Powers of the ramp are
    taken in float64 and rounded once.

    Examples
    --------
    >>> from abft_tsm2.core.generated import Generated
    >>> Generated("ramp", r=3).weights(4)
    array([[1.    , 0.25  , 0.0625],
           [1.    , 0.5   , 0.25  ],
           [1.    , 0.75  , 0.5625],
           [1.    , 1.    , 1.    ]])
    """

    kind: str
    r: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown weights {self.kind!r}: choose from {', '.join(KINDS)}, or pass an array")
        if self.r < 1:
            raise ValueError(f"r = {self.r}: weights have at least one column")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed = {self.seed} is not in 0 to 2^64 - 1")

    def weights(self, n: int) -> NDArray[np.float64]:
        """The weights of n elements, in every bit those that a kernel makes (rounded to float32 where it computes so).

        Parameters
        ----------
        n : int

        Returns
        -------
        V : (n, r) ndarray of float64
        """
        if self.kind == "ones":
            return np.ones((n, self.r))
        if self.kind == "balanced":
            return _balanced(n, self.r, self.seed)
        V = np.ones((n, self.r))
        if n and self.r > 1:
            V[:, 1:] = (np.arange(1.0, n + 1) * (1.0 / n))[:, None]
        return np.multiply.accumulate(V, axis=1)


def splitmix64(seed: int, i: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers i of those that begin with `seed`, as kernels/tsm2/splitmix64.cuh has them."""
    z: NDArray[np.uint64] = np.uint64(seed) + i * np.uint64(_GOLDEN)
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    return z


def _balanced(n: int, r: int, seed: int) -> NDArray[np.float64]:
    # Number i + 2^48 q says the sign, by its top bit; g is a bijection of i modulo 2^22 with keys from the column.
    i, column = np.arange(n, dtype=np.uint64)[:, None], np.arange(r, dtype=np.uint64) << np.uint64(48)
    z, keys = splitmix64(seed, i + column), splitmix64(seed ^ (2**64 - 1), column)
    most = np.uint64(MAGNITUDES - 1)
    g = i + keys & most
    g = (g ^ g >> np.uint64(11)) * np.uint64(0x2C1B3C6D) & most
    g = (g ^ g >> np.uint64(9) ^ keys >> np.uint64(32)) * np.uint64(0x297A2D39) & most
    g ^= g >> np.uint64(11)
    sign = np.where(z >> np.uint64(63), -1.0, 1.0)
    return np.asarray(sign * (1 + g.astype(np.float64) / (2 * MAGNITUDES)))
