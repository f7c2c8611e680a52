"""Problems for `encode_both`, and the judge of what came out. Nothing here runs a kernel.

Shapes follow the kernel's constants, where its edges are: a stripe of columns less a vector, a stripe, one and two of
them and a vector; rows below, at and above those loaded ahead and those of a panel; groups of one row, of a few, of no
multiple of anything, and of all. Around A in its buffer lies NaN. Weights are given, strided, or made by the kernel;
those of the squares are given or follow from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.core.encode_both import EncodeTask, Encoding
from abft_tsm2.core.encode_config import BothConfig, EncodePlan, choose
from abft_tsm2.core.generated import Generated
from abft_tsm2.core.problem import SIZES
from tests.support.cases import DTYPES

TYPES = {dtype.name: dtype for dtype in DTYPES}
CONFIGS = (
    BothConfig("float32", "float32", 2, 16, True, True, t1=64, t3=4, rows=2, tcf=2),
    BothConfig("float64", "float64", 4, 16, True, right="ramp", left="balanced", t1=32, t3=4, rows=2),
    BothConfig("float64", "float64", 3, 8, False, True, right="ones", t1=32, t3=8, rows=8, tcf=3),
    BothConfig("float32", "float64", 1, 4, False, True, t1=96, t3=8, rows=4, tcf=3),
    BothConfig("float32", "float32", 1, 8, True, t1=32, t3=2, rows=1, tcf=1),
    BothConfig("float16", "float32", 3, 16, True, True, left="ramp", t1=32, t3=4, rows=4),
    BothConfig("float16", "float64", 1, 8, True, t1=32, t3=1, rows=1, tcf=2),
    choose("float32", "float32", 1, squares=True),
    choose("float64", "float64", 2, squares=True, words=True),
    *([BothConfig("bfloat16", "float32", 2, 2, True, True, right="balanced", t1=32)] if "bfloat16" in TYPES else []),
)


@dataclass(frozen=True)
class Case:
    """One call: A is m x k with rows `extra` vectors apart in memory, cut into groups of `slice` rows."""

    config: BothConfig
    m: int
    k: int
    slice: int
    extra: int = 0
    given: bool = False
    columns: tuple[int, int] = (0, 0)  # fewer of V, of W

    @property
    def plan(self) -> EncodePlan:
        stripes, groups = -(-self.k // self.config.stripe), -(-self.m // self.slice)
        return EncodePlan(self.m, self.k, stripes, groups, self.slice)

    def task(self, seed: int = 0) -> EncodeTask:
        """Operands of normal entries."""
        config, rng = self.config, np.random.default_rng([seed, self.m, self.k])
        vector = config.width // SIZES[config.dtype]
        memory = np.full((self.m + 2, self.k + (self.extra + 2) * vector), np.nan, TYPES[config.dtype])
        A = aligned(memory)[1 : self.m + 1, vector : vector + self.k]
        A[...] = rng.standard_normal(A.shape)

        def weights(n: int, kind: str, fewer: int) -> Any:
            r = max(1, config.r - fewer)
            if kind != "read":
                return Generated(kind, r, seed + n)
            full = np.full((2 * n, 3 * r), np.nan, config.sums)
            full[::2, ::3] = rng.standard_normal((n, r))
            return full[::2, ::3]

        V, W = weights(self.k, config.right, self.columns[0]), weights(self.m, config.left, self.columns[1])
        given = self.given and config.squares
        p, q = ((rng.random(2 * n).astype(config.sums)[::2] if given else None) for n in (self.m, self.k))
        return EncodeTask(A, V, W, p, q, config.squares, config.words, config.sums)


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of 16 bytes."""
    memory = np.empty(x.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    out = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def cases(config: BothConfig) -> Iterator[Case]:
    """Every shape at which a kernel of these constants has its edges, layouts and weights in turn."""
    vector, stripe = config.width // SIZES[config.dtype], config.stripe
    shapes = (
        *((1, vector, 1), (2, stripe, 1), (config.t3 + 1, stripe + vector, config.t3), (31, stripe - vector, 31)),
        *((32, stripe, 32), (33, vector, 33), (70, stripe + vector, 33), (97, 3 * vector, 97), (67, stripe, 5)),
        (9, 2 * stripe + vector, 4),
    )
    for i, shape in enumerate(shapes):
        fewer = ((0, 0), (1, 0), (0, 1))[i % 3] if config.r > 1 else (0, 0)
        yield Case(config, *shape, extra=i % 3, given=i % 2 == 1, columns=fewer)


def exactly(task: EncodeTask) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each sum and how far rounding explains, element by element.

    gamma_n of the magnitude, N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, sec. 3.1:
    one rounding for each sum and product on the way of a term, three more products for squares. In float64 where sums
    are float32, else in longdouble.
    """
    wide = np.float64 if task.sums == "float32" else np.longdouble
    A = task.A.astype(wide)
    V, W = (
        (x.weights(n).astype(task.sums) if isinstance(x, Generated) else x).astype(wide)
        for x, n in ((task.V, A.shape[1]), (task.W, A.shape[0]))
    )
    u, tiny = np.finfo(task.sums).eps / 2, np.finfo(task.sums).smallest_subnormal

    def bounded(value: np.ndarray, magnitude: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        units = (n + 4) * (u + np.finfo(wide).eps)
        return value, units / (1 - units) * magnitude + (n + 4) * float(tiny)

    (m, k), found = A.shape, {}
    found["rows"] = bounded(A @ V, abs(A) @ abs(V), k)
    found["columns"] = bounded(W.T @ A, abs(W.T) @ abs(A), m)
    if task.squares:
        q, p = (x[:, 0] ** 2 if given is None else given.astype(wide) for x, given in ((V, task.q), (W, task.p)))
        found["row_squares"] = bounded(A**2 @ q, A**2 @ q, k)
        found["column_squares"] = bounded(p @ A**2, p @ A**2, m)
    return found


def words(A: np.ndarray, axis: int) -> np.ndarray:
    """Sums of the bit patterns modulo 2^64, in Python's integers."""
    bits = np.ascontiguousarray(A).view(f"u{A.itemsize}").astype(object)
    return np.array([int(sum(line)) % 2**64 for line in (bits if axis == 1 else bits.T)], np.uint64)


def faults(encoding: Encoding, task: EncodeTask) -> list[str]:
    """What is wrong with an encoding of finite numbers."""
    found = []
    for name, (value, bound) in exactly(task).items():
        sums = getattr(encoding, name)
        if sums.shape != value.shape or sums.dtype != task.sums:
            found.append(f"{name} is {sums.shape} of {sums.dtype}, not {value.shape} of {task.sums}")
            continue
        with np.errstate(invalid="ignore", over="ignore"):
            ok = abs(sums.astype(value.dtype) - value) <= bound
        if not ok.all():
            at = tuple(int(i) for i in np.argwhere(~ok)[0])
            found.append(f"{(~ok).sum()} elements of {name} are wrong, the first {at}: {sums[at]}, not {value[at]}")
    if task.words:
        for name, axis in (("row_words", 1), ("column_words", 0)):
            if not np.array_equal(getattr(encoding, name), words(task.A, axis)):
                found.append(f"{name} are wrong")
    missing = [name for name in encoding._fields if getattr(encoding, name) is None]
    wanted = (["row_squares", "column_squares"] if not task.squares else []) + (
        ["row_words", "column_words"] if not task.words else []
    )
    return found if missing == wanted else [*found, f"{missing} are None, not {wanted}"]
