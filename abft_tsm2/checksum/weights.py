"""Choose the weights: the columns that a matrix is multiplied by to be encoded.

A checksum of a row is ``sum_j v_j c_ij``. Random signs make the rounding errors of the n terms add like ``sqrt(n)``
whatever the data are (Hoeffding 1963); signs nearly in balance keep the mean of the data from drowning the rest;
magnitudes of nearly one modulus leave no element hard to see; and magnitudes that differ pairwise tell two swapped
elements apart. Scaling each weight by a power of two that undoes the scale of its column (equilibration) keeps one
large column from drowning the others. The other families are those of the literature, for comparison and for encodings
of several columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from abft_tsm2.core.generated import MAGNITUDES
from abft_tsm2.core.kept import compared

SEED = 0x5EED
MEAN_SQUARE = 19 / 12
"""Of a balanced weight: the mean of x^2 over [1, 1.5)."""
Weights = NDArray[np.float64]


def _balanced(n: int, r: int, rng: np.random.Generator) -> Weights:
    """sign x (1 + g 2^-23), g = floor(p(j) 2^22 / 2P): 2P places on [1, 1.5), even ones for the P positive weights, odd
    ones for the others, sqrt(n) fewer.

    Up to `MAGNITUDES` elements have pairwise different magnitudes, and those of one sign are twice as far apart as n of
    them can be: two elements that change places change the checksum by at least their difference / (n + sqrt(n) + 2).
    Beyond that a magnitude occurs at most ceil(n / MAGNITUDES) times. All lie on the grid of float32, so that casting a
    weight to it is exact.

    Signs in exact balance would be blind to one change of all elements of a constant line; with this excess such
    a change shows as much as a random one, and the mean of the data weighs no more than their scatter.
    """
    excess = math.isqrt(max(n - 1, 0)) + 1  # ceil(sqrt(n))
    positive = min(n, (n + excess + 1) // 2)
    out = np.empty((n, r))
    for c in range(r):
        odd = 2 * rng.permutation(positive)[: n - positive] + 1
        places = rng.permutation(np.concatenate([2 * np.arange(positive), odd]))
        sign, of = np.where(places % 2 == 0, 1.0, -1.0), max(2 * positive, 1)
        if of > MAGNITUDES:  # no place may be left empty
            places, of = places.argsort().argsort(), n
        out[:, c] = sign * (1 + places * MAGNITUDES // of / (2 * MAGNITUDES))
    return out


_FAMILIES: dict[str, Callable[[int, int, np.random.Generator], NDArray[Any]]] = {
    "balanced": _balanced,
    "ones": lambda n, r, rng: np.ones((n, r)),
    "linear": lambda n, r, rng: np.vander(np.arange(1.0, n + 1), max(r, 1), increasing=True)[:, :r],
    "signs": lambda n, r, rng: rng.permuted(
        np.broadcast_to(np.where(np.arange(n) < n // 2, -1.0, 1.0)[:, None], (n, r)), axis=0
    ),
    "normal": lambda n, r, rng: rng.standard_normal((n, r)),
    "vandermonde": lambda n, r, rng: np.vander(np.arange(1.0, n + 1) / max(n, 1), max(r, 1), increasing=True)[:, :r],
    "chebyshev": lambda n, r, rng: np.polynomial.chebyshev.chebvander(np.linspace(-1, 1, n), max(r, 1))[:, :r],
    "dct": lambda n, r, rng: np.cos(np.outer((np.arange(n) + 0.5) * (np.pi / max(n, 1)), np.arange(r))),
}


def weights(kind: str = "balanced", n: int = 1, r: int = 1, *, seed: int = SEED) -> Weights:
    """Weight columns for n elements.

    Parameters
    ----------
    kind : {"balanced", "ones", "linear", "signs", "normal", "vandermonde", "chebyshev", "dct"}
        ``balanced`` is what protected products and factorisations use: random signs, nearly in balance, and up to
        2^22 pairwise different magnitudes of [1, 1.5), exact in float32; those of one sign are twice as far apart.
        ``linear`` has the columns 1, i, i^2, ... of Huang and Abraham, ``vandermonde`` (i/n)^p, ``chebyshev`` T_p on
        [-1, 1], ``dct`` the DCT-II basis.
    n : int
        Length.
    r : int
        Number of columns.
    seed : int
        For the random kinds.

    Returns
    -------
    V : (n, r) ndarray of float64, read-only

    Raises
    ------
    ValueError
        For an unknown kind or a negative size.

    Notes
    -----
    K.-H. Huang, J. A. Abraham, Algorithm-based fault tolerance for matrix operations, IEEE Trans. Computers C-33
    (1984) 518-528. No host synchronisation.

    Examples
    --------
    >>> from abft_tsm2 import weights
    >>> V = weights("balanced", 100)
    >>> int((V > 0).sum()), int((V < 0).sum()), bool((abs(V) >= 1).all() and (abs(V) <= 1.5).all())
    (55, 45, True)
    """
    if kind not in _FAMILIES:
        raise ValueError(f"unknown weights {kind!r}: choose from {', '.join(_FAMILIES)}")
    for name, value in (("n", n), ("r", r), ("seed", seed)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name} is {value!r}: a whole number is expected")
    if n < 0 or r < 1:
        raise ValueError(f"weights need n >= 0 and r >= 1, got n = {n}, r = {r}")
    made: Weights = _made(kind, n, r, seed)
    return made


@compared
def _made(kind: str, n: int, r: int, seed: int) -> Weights:
    return np.ascontiguousarray(_FAMILIES[kind](n, r, np.random.default_rng([seed, n])), dtype=np.float64)


def balanced(n: int, seed: int = SEED) -> Weights:
    """``weights("balanced", n, seed=seed)``, of a length that is known to be one."""
    made: Weights = _made("balanced", n, 1, seed)
    return made
