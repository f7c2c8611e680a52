"""Families of matrices with a formula, most of them known under these names from MATLAB's gallery.

Their elements are correlated, and so are the rounding errors of their factors: these are the matrices on which a bound
for independent errors is tried. References: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002,
chapter 28; MATLAB's ``gallery``. What leaves the range of a type at some order is scaled, or made of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.faults.operands.spectra import Generator, Make, Matrix

Formula = Callable[[Matrix, Matrix, int], Matrix]
BLOCK = 6  # the order of the blocks of matrices whose elements grow like factorials


def _of(formula: Formula) -> Make:
    """a_ij from i (a column), j (a row), both from 1, and n."""

    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        i = np.arange(1.0, n + 1)
        with np.errstate(all="ignore"):
            return np.array(np.broadcast_to(formula(i[:, None], i[None, :], n), (n, n)), float)

    return make


def _blocks(small: Callable[[], Matrix]) -> Make:
    """diag(X, X, ...) of a small matrix, the last one cut off."""

    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        x = small()
        return np.kron(np.eye(-(-n // len(x))), x)[:n, :n]

    return make


def _diagonals(n: int, **of: Matrix | float) -> Matrix:
    """A matrix of a diagonal ("main") and its neighbours ("below", "above")."""
    place = {"below": -1, "main": 0, "above": 1}
    a = np.zeros((n, n))
    for name, values in of.items():
        size = n - abs(place[name])
        a += np.diag(np.broadcast_to(np.asarray(values, float), (size,)), place[name])
    return a


# ---- Vandermonde's -------------------------------------------------------------------------------------------------


def _vander(low: float, high: float, increasing: bool = False) -> Make:
    """Powers of equally spaced points; scaled as a whole where the highest leaves the range."""

    def make(n: int, rng: Generator, dtype: Any) -> Matrix:
        points = np.linspace(low, high, n)
        largest = max(abs(low), abs(high))
        limit = math.log2(float(np.finfo(dtype).max)) / 2
        back = max(0.0, (n - 1) * math.log2(largest) - limit)
        powers = np.arange(n) if increasing else np.arange(n)[::-1]
        with np.errstate(all="ignore"):
            sizes = np.exp2(np.log2(abs(points))[:, None] * powers - round(back))
        sizes[:, powers == 0] = 2.0 ** -round(back)
        return np.asarray(np.where(powers % 2, np.sign(points)[:, None], 1.0) * sizes)

    return make


def _chebvand(n: int, rng: Generator, dtype: Any) -> Matrix:
    return np.asarray(np.polynomial.chebyshev.chebvander(np.linspace(0, 1, n), n - 1).T)


def _chebspec(n: int, rng: Generator, dtype: Any) -> Matrix:
    # differentiation on the points cos(i pi / n), without the first row and column
    x = np.cos(np.arange(n + 1) * np.pi / n)
    c = np.where(np.isin(np.arange(n + 1), (0, n)), 2.0, 1.0) * (-1.0) ** np.arange(n + 1)
    d = (c[:, None] / c) / (x[:, None] - x + np.eye(n + 1))
    d -= np.diag(d.sum(1))
    return np.asarray(d[1:, 1:])


# ---- triangles, and what grows -------------------------------------------------------------------------------------


def _kahan(n: int, rng: Generator, dtype: Any) -> Matrix:
    s, c = math.sin(1.2), math.cos(1.2)
    return np.asarray(s ** np.arange(n)[:, None] * (np.eye(n) - c * np.triu(np.ones((n, n)), 1)))


def _growth(n: int, rng: Generator, dtype: Any) -> Matrix:
    # 1 and -t below the diagonal, ones in the last column: elements grow to (1 + t)^(n - 1), within the range
    most = 400.0 if np.dtype(dtype) == np.float64 else 80.0
    t = min(1.0, 2.0 ** (most / max(1, n - 1)) - 1)
    a: Matrix = np.eye(n) - t * np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    return a


def _pascal(n: int, rng: Generator, dtype: Any) -> Matrix:
    # binomial(i + j, i) as long as it fits; then the same with ones on the diagonal
    if n <= 30:
        a = np.ones((n, n))
        for row in range(1, n):
            a[row] = np.cumsum(a[row - 1])
        return a
    logs = np.array([math.lgamma(j + 1) for j in range(2 * n)])
    i = np.arange(n)
    x = logs[np.add.outer(i, i)] - np.add.outer(logs[i], logs[i])
    return np.asarray(np.exp(x - np.add.outer(np.diag(x), np.diag(x)) / 2))


def _binomial(n: int, rng: Generator, dtype: Any) -> Matrix:
    # (-1)^j binomial(i, j) 2^-i
    logs = np.array([math.lgamma(j + 1) for j in range(n)])
    i = np.arange(n)
    x = logs[:, None] - logs - logs[np.maximum(np.subtract.outer(i, i), 0)] - i[:, None] * math.log(2)
    return np.asarray(np.tril((-1.0) ** i * np.exp(x)))


def _dramadah(n: int, rng: Generator, dtype: Any) -> Matrix:
    column, row = np.ones(n), np.zeros(n)
    column[1::4] = 0
    column[2::4] = 0
    row[[0, 1, 3][: (n > 0) + (n > 1) + (n > 3)]] = 1
    i = np.arange(n)
    apart = i[:, None] - i
    return np.asarray(np.where(apart >= 0, column[abs(apart)], row[abs(apart)]))


# ---- of integers ---------------------------------------------------------------------------------------------------


def _magic(n: int, rng: Generator, dtype: Any) -> Matrix:
    # of odd order the Siamese one; of even order 1 to n^2, half of them reflected: of rank 3 where 4 divides n
    i, j = np.mgrid[1 : n + 1, 1 : n + 1]
    if n % 2:
        return np.asarray(n * ((i + j - 1 + n // 2) % n) + (i + 2 * j - 2) % n + 1.0)
    there = np.arange(1.0, n * n + 1).reshape(n, n)
    return np.where((i % 4 // 2) == (j % 4 // 2), n * n + 1 - there, there)


def _hadamard(n: int, rng: Generator, dtype: Any) -> Matrix:
    # the first rows and columns of Sylvester's: (-1)^(number of common binary digits)
    common = np.bitwise_and.outer(np.arange(n), np.arange(n))
    odd = np.zeros_like(common)
    while common.any():
        odd ^= common & 1
        common >>= 1
    return 1.0 - 2.0 * odd


def _gcd(n: int, rng: Generator, dtype: Any) -> Matrix:
    return np.gcd.outer(np.arange(1, n + 1), np.arange(1, n + 1)).astype(float)


def _riemann(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(2.0, n + 2)
    return np.where(i % i[:, None] == 0, i[:, None] - 1, -1.0)


def _rosser() -> Matrix:
    upper = [
        [611, 196, -192, 407, -8, -52, -49, 29],
        [0, 899, 113, -192, -71, -43, -8, -44],
        [0, 0, 899, 196, 61, 49, 8, 52],
        [0, 0, 0, 611, 8, 44, 59, -23],
        [0, 0, 0, 0, 411, -599, 208, 208],
        [0, 0, 0, 0, 0, 411, 208, 208],
        [0, 0, 0, 0, 0, 0, 99, -911],
        [0, 0, 0, 0, 0, 0, 0, 99],
    ]
    a = np.array(upper, float)
    return np.asarray(a + np.triu(a, 1).T)


def _inverse_hilbert() -> Matrix:
    return np.round(np.linalg.inv(_hilbert_block()))


def _hilbert_block() -> Matrix:
    i = np.arange(1.0, BLOCK + 1)
    return np.asarray(1 / (i[:, None] + i - 1))


def _involution() -> Matrix:
    # D H of order n with (D H)^2 = I: d_1 = -n, d_(j + 1) = -(n^2 - j^2) d_j / j^2
    d, a = -float(BLOCK), _hilbert_block()
    a[:, 0] *= d
    for j in range(1, BLOCK):
        d *= -(BLOCK**2 - j**2) / j**2
        a[j] *= d
    return a


def _factorials() -> Matrix:
    return np.array([[float(math.factorial(i + j)) for j in range(1, BLOCK + 1)] for i in range(1, BLOCK + 1)])


# ---- orthogonal ----------------------------------------------------------------------------------------------------


def _helmert(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(1.0, n)
    a = np.tril(np.ones((n, n)))
    a[0] = 1 / np.sqrt(n)
    if n > 1:
        a[1:] = np.tril(np.ones((n, n)))[:-1] / np.sqrt(i * (i + 1))[:, None]
        a[np.arange(1, n), np.arange(1, n)] = -i / np.sqrt(i * (i + 1))
    return a


def _lauchli(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = math.sqrt(float(np.finfo(dtype).eps)) * np.eye(n, k=-1)
    a[0] = 1
    return a


def _forsythe(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = np.eye(n, k=1)
    a[-1, 0] = math.sqrt(float(np.finfo(dtype).eps))
    return a


def _gear(n: int, rng: Generator, dtype: Any) -> Matrix:
    a = _diagonals(n, below=1, above=1)
    a[0, -1], a[-1, 0] = 1, -1
    return a


def _wilkinson(n: int, rng: Generator, dtype: Any) -> Matrix:
    return _diagonals(n, below=1, main=abs(np.arange(n) - (n - 1) / 2), above=1)


def _clement(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(1.0, n)
    return _diagonals(n, below=np.sqrt(i * (n - i)), above=np.sqrt(i * (n - i)))


def _lesp(n: int, rng: Generator, dtype: Any) -> Matrix:
    i = np.arange(2.0, n + 1)
    return _diagonals(n, below=1 / i, main=-(2 * np.arange(2.0, n + 2) + 1), above=i)


GALLERY: Mapping[str, Make] = {
    "vander 0.1 3": _vander(0.1, 3),
    "vander 0.5 1.5": _vander(0.5, 1.5),
    "vander 0.1 1.3 increasing": _vander(0.1, 1.3, increasing=True),
    "vander -1 1": _vander(-1, 1),
    "vander 0.9 1.1": _vander(0.9, 1.1),
    "vander 0.97 1.03": _vander(0.97, 1.03),
    "vander 0.99 1.01": _vander(0.99, 1.01),
    "chebvand": _chebvand,
    "chebspec": _chebspec,
    "lehmer": _of(lambda i, j, n: np.minimum(i, j) / np.maximum(i, j)),
    "minij": _of(lambda i, j, n: np.minimum(i, j)),
    "moler": _of(lambda i, j, n: np.where(i == j, i, np.minimum(i, j) - 2)),
    "pascal": _pascal,
    "binomial": _binomial,
    "hilbert": _of(lambda i, j, n: 1 / (i + j - 1)),
    "lotkin": _of(lambda i, j, n: np.where(i == 1, 1.0, 1 / (i + j - 1))),
    "cauchy": _of(lambda i, j, n: 1 / (i + j)),
    "parter": _of(lambda i, j, n: 1 / (i - j + 0.5)),
    "ris": _of(lambda i, j, n: 0.5 / (n - i - j + 1.5)),
    "invhilb": _blocks(_inverse_hilbert),
    "invol": _blocks(_involution),
    "ipjfact": _blocks(_factorials),
    "rosser": _blocks(_rosser),
    "circul": _of(lambda i, j, n: (j - i) % n + 1),
    "hankel": _of(lambda i, j, n: np.maximum(n - i - j + 2, 0)),
    "fiedler": _of(lambda i, j, n: abs(i - j)),
    "pei": _of(lambda i, j, n: 1.0 + (i == j)),
    "kms": _of(lambda i, j, n: 0.5 ** abs(i - j)),
    "prolate": _of(lambda i, j, n: 0.5 * np.sinc((i - j) * 0.5)),
    "tridiag": _of(lambda i, j, n: 2.0 * (i == j) - (abs(i - j) == 1)),
    "clement": _clement,
    "wilkinson": _wilkinson,
    "gearmat": _gear,
    "lesp": _lesp,
    "forsythe": _forsythe,
    "jordbloc": _of(lambda i, j, n: 1.0 * (i == j) + (j == i + 1)),
    "lauchli": _lauchli,
    "frank": _of(lambda i, j, n: np.where(j >= i - 1, n + 1 - np.maximum(i, j), 0.0)),
    "grcar": _of(lambda i, j, n: ((j >= i) & (j <= i + 3)) - 1.0 * (i == j + 1)),
    "dramadah": _dramadah,
    "redheff": _of(lambda i, j, n: 1.0 * ((j == 1) | (j % i == 0))),
    "riemann": _riemann,
    "gcdmat": _gcd,
    "magic": _magic,
    "hadamard": _hadamard,
    "kahan": _kahan,
    "condex": _of(lambda i, j, n: (i == j) - 1.0 * (i > j)),
    "gfpp": _growth,
    "orthog 1": _of(lambda i, j, n: np.sqrt(2 / (n + 1)) * np.sin(i * j * np.pi / (n + 1))),
    "orthog 2": _of(lambda i, j, n: 2 / np.sqrt(2 * n + 1) * np.sin(2 * i * j * np.pi / (2 * n + 1))),
    "orthog 3": _of(lambda i, j, n: np.cos((i - 1) * (j - 0.5) * np.pi / n)),
    "orthog 4": _helmert,
    "orthog 5": _of(lambda i, j, n: np.sin(_turn(i, j, n)) / np.sqrt(n) + np.cos(_turn(i, j, n)) / np.sqrt(n)),
    "orthog 6": _of(lambda i, j, n: np.sqrt(2 / n) * np.cos((i - 0.5) * (j - 0.5) * np.pi / n)),
    "gaussian kernel": _of(lambda i, j, n: np.exp(-((12 * (i - j) / n) ** 2))),
    "exponential": _of(lambda i, j, n: np.exp(-i * j / n)),
    "cosine": _of(lambda i, j, n: np.cos(i * j / n)),
    "identity": _of(lambda i, j, n: 1.0 * (i == j)),
    "ones": _of(lambda i, j, n: np.ones((n, n))),
    "nearly ones": lambda n, rng, dtype: np.ones((n, n)) + 4 * float(np.finfo(dtype).eps) * np.eye(n),
}
"""Functions of n, a generator and a type, by name."""


def _turn(i: Matrix, j: Matrix, n: int) -> Matrix:
    return np.asarray(2 * np.pi * (i - 1) * (j - 1) / n)


DEFINITE = frozenset(
    (
        *("lehmer", "minij", "moler", "pascal", "hilbert", "cauchy", "pei", "kms", "prolate", "tridiag", "gcdmat"),
        *("gaussian kernel", "identity", "nearly ones"),
    )
)
"""Those that are symmetric and positive definite, some of them only in exact arithmetic."""
