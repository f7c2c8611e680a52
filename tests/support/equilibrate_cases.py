"""Matrices for the kernel that gives columns their weights (equilibrate), and the judge of these; what it does for the
product that it begins, as another one (wipe) does alone.

Columns may differ by all that their type holds, and be zero or hold NaN or Inf; where there are many rows, those that
the kernel looks at are found out by elements so large that a weight tells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from abft_tsm2.checksum.device.kernels import COLUMNS, SAMPLE, STATE, Equilibrate, WipeKernel
from abft_tsm2.core.problem import SIZES
from tests.support.both_cases import TYPES
from tests.support.check_cases import ENCODED, SEALED, STARTED_WORD, Launch, Stack, Tally, seen, wide
from tests.support.planting import kept

EQUILIBRATING = (
    *(Equilibrate(dtype, turned) for dtype in TYPES for turned in (False, True)),
    *(Equilibrate(dtype, turned, SIZES[dtype]) for dtype, turned in (("float32", False), ("float16", True))),
    Equilibrate("float16", width=8),
)
WIPE = WipeKernel()


@dataclass(frozen=True)
class Columns:
    """One equilibration of `batch` matrices (k, n)."""

    config: Equilibrate
    k: int
    n: int
    batch: int = 1
    scales: str = "equal"  # columns differ by powers of ten: none, "tens": 2, "large": 30 or what the type allows,
    # "extreme": as many as have squares, "beyond": more in float64; "octaves": up to 2^2. "zero": all of them are 0
    special: tuple[str, ...] = ()  # of "nan", "inf", "zero": columns that have no scale; "sparse": of one element
    share: float = 1.0  # of the elements that are not zero

    def matrices(self, seed: int = 0, sample: np.ndarray | None = None) -> Scaled:
        """All rows are the sample unless it is given.

        Columns of "beyond" have a size and no scale: squares of 1e200 are no float64, and so are those of 1e-200.
        """
        rng = np.random.default_rng([seed, self.k, self.n])
        dtype, shape = TYPES[self.config.dtype], (self.batch, self.k, self.n)
        turned, lines = self.config.turned, (self.n, self.k) if self.config.turned else (self.k, self.n)
        R = Stack.rows(self.batch, *lines, self.config.dtype, self.config.width, seed % 3)
        R = Stack(R.all, R.x.swapaxes(1, 2)) if turned else R
        extreme = {"float64": 150, "float32": 30, "bfloat16": 35, "float16": 3}[self.config.dtype]
        beyond = 200 if self.config.dtype == "float64" else extreme
        most = {"tens": 2, "large": min(extreme, 30), "extreme": extreme, "beyond": beyond}.get(self.scales, 0)
        power = rng.integers(-1, 2, (self.batch, 1, self.n)) * most
        values = rng.standard_normal(shape) * 10.0**power
        if self.scales == "octaves":
            values *= 2.0 ** rng.uniform(-2, 2, (self.batch, 1, self.n))
        if self.scales == "zero":
            values[...] = 0
        if self.share < 1:
            values *= rng.random(shape) < self.share
        R.x[...] = values.astype(dtype)
        sample = np.arange(self.k) if sample is None else sample
        places = rng.permutation(self.n)
        for number, kind in enumerate(self.special):
            column = R.x[:, :, places[number % self.n]]
            if kind in ("zero", "sparse"):
                column[...] = 0
                if kind == "sparse":
                    column[:, sample[11 * number % len(sample)]] = 2.0 ** -(4 + 3 * number)
            else:
                column[number % self.batch, sample[-1]] = {"nan": np.nan, "inf": -np.inf}[kind]
        base = rng.choice([-1.0, 1.0], self.n) * (1 + rng.integers(0, 1 << 22, self.n) / (1 << 23))
        return Scaled(self.config, R, sample, base.astype(np.float32))


class Scaled(NamedTuple):
    """Operands of an equilibration, and the rows that the norms are estimated from."""

    config: Equilibrate
    R: Stack
    sample: np.ndarray
    base: np.ndarray


class Weights(NamedTuple):
    """What a launch made: weights, and the sum and the smallest of each 32."""

    v: np.ndarray
    parts: np.ndarray
    state: np.ndarray


def equilibrated(task: Scaled, launch: Launch, encoded: int = ENCODED) -> Weights:
    """Launch, for a call of this number; AssertionError where something is written that should stay.

    There are fewer blocks than would do: the first takes turns, of one matrix all do.
    """
    config, (batch, k, n) = task.config, task.R.x.shape
    step, rs, cs = task.R.strides
    blocks = -(-n // COLUMNS)
    apart = -(-n // 4) * 4 + 4
    memory = np.full((batch, apart), np.nan, "float32" if SIZES[config.dtype] == 2 else "float64")
    v = seen(memory.ravel(), 0, (batch, n), (apart, 1))  # ends with the last weight
    parts, state = np.full((batch, blocks, 2), np.nan), np.full(STATE, SEALED, np.uint64)
    launch(
        config.name,
        (max(1, n // config.columns // (2 if batch == 1 else 1)), batch),
        config.t1,
        (
            *(k, n, task.R.x, rs, cs, step if batch > 1 else 0, kept(task.base), v, apart, parts),
            *(enlarge_of(k), state, encoded),
        ),
    )
    assert np.isnan(memory[:, n:]).all(), "an element between the weights of two products was written"
    return Weights(v, parts, state)


def enlarge_of(k: int) -> float:
    """k / rows in the sample, as abft_tsm2/checksum/device/check.py gives it."""
    return max(1.0, k / SAMPLE)


def seen_by_all(task: Scaled) -> np.ndarray:
    """The elements that every block looks at, (batch, rows, columns): the first row of each run, 32 columns; or where
    columns are contiguous all rows and 4 columns."""
    k = task.R.x.shape[1]
    if k >= SAMPLE:
        runs = np.asarray(task.sample).reshape(-1, 8)
    else:
        length = -(-k // 16)
        length += -length % (16 // SIZES[task.config.dtype]) if task.config.turned else 0  # whole vectors
        runs = np.arange(16)[:, None] * length + np.arange(length)
    rows = runs.ravel() if task.config.turned else runs[:, 0]
    return task.R.x[:, rows[rows < k], : 4 if task.config.turned else COLUMNS]


def exponents_of(task: Scaled) -> tuple[np.ndarray, np.ndarray]:
    """The powers of two that the base is multiplied by, (batch, n), within limits, or those of neighbours; and which of
    them are a tie, as far as single precision tells."""
    far, k = 100 if SIZES[task.config.dtype] == 2 else 1000, task.R.x.shape[1]
    with np.errstate(all="ignore"):
        square = _with_mean_of_sparse((task.R.x[:, task.sample].astype(np.float64) ** 2), k)
        has = (square > 0) & np.isfinite(square)
        common = (seen_by_all(task).astype(np.float64) ** 2).mean((1, 2))[:, None] * k
        centre = np.log2(np.where((common > 0) & np.isfinite(common), common, 1).astype(np.longdouble)) / 2
        size = np.log2(np.where(has, square, 1).astype(np.longdouble) * enlarge_of(k)) / 2
        size = np.clip(size - (centre - np.rint(centre)), -512, 512)  # squares that overflow, or nearly vanish
    exponent = np.where(has, np.clip(-np.rint(size), -far, far), -2 * far).astype(int)
    tie = (abs(abs(size - np.rint(size)) - 0.5) < 2.0**-20) & has
    for first in range(0, square.shape[1], COLUMNS):
        block, ties = exponent[:, first : first + COLUMNS], tie[:, first : first + COLUMNS]
        ties |= (block == -2 * far) & ties.any(1, keepdims=True)
        top = block.max(1, keepdims=True)
        block[...] = np.where(block > -2 * far, block, np.where(top > -2 * far, top, 0))
    return exponent, tie


def _with_mean_of_sparse(squares: np.ndarray, k: int) -> np.ndarray:
    """The sums of squares (batch, rows of the sample, n) by column; of a group of 32 most of which are zero in most
    runs, these have the mean of them all at least."""
    total = squares.sum(1)
    if k < SAMPLE:
        return total
    batch, rows, n = squares.shape
    runs = np.count_nonzero(squares.reshape(batch, rows // 8, 8, n).sum(2), axis=1)
    sparse = (2 * runs < rows // 8) & np.isfinite(total)
    for first in range(0, n, COLUMNS):
        block, few = total[:, first : first + COLUMNS], sparse[:, first : first + COLUMNS]
        mean = np.where(few, block, 0).sum(1, keepdims=True) / np.maximum(few.sum(1, keepdims=True), 1)
        most = 2 * few.sum(1, keepdims=True) >= block.shape[1]
        block[...] = np.where(few & most, np.maximum(block, mean), block)
    return total


def weight_faults(task: Scaled, made: Weights) -> list[str]:
    """What is wrong with weights."""
    found = []
    exponent, tie = exponents_of(task)
    blocks = [slice(j, j + COLUMNS) for j in range(0, exponent.shape[1], COLUMNS)]
    with np.errstate(all="ignore"):
        scale = made.v.astype(np.float64) / task.base  # exact where it is a power of two
        digits, power = np.frexp(scale)
        right = (digits == 0.5) & ((power - 1 == exponent) | (tie & (abs(power - 1 - exponent) == 1)))
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        wanted = f"{task.base[at[1]]} 2^{exponent[at]}"
        found.append(f"{(~right).sum()} weights are wrong, the first {at}: {made.v[at]}, not {wanted}")
    if not tie.any():
        found += _balance_faults(task, made.v.astype(np.longdouble))
    v = made.v.astype(np.longdouble)
    for number, block in enumerate(blocks):
        size, (total, least) = abs(v[:, block]), made.parts[:, number].T
        if not (abs(total - size.sum(1)) <= 1e-13 * total).all():
            found.append(f"sum |v| is {total} in block {number}, not {size.sum(1)}")
        if not (least == size.min(1)).all():
            found.append(f"the smallest |v| is {least} in block {number}, not {size.min(1)}")
    if made.state.any():
        found.append(f"{np.count_nonzero(made.state)} words of the state were not wiped")
    return found


def _balance_faults(task: Scaled, v: np.ndarray) -> list[str]:
    """Columns with a scale weigh as much as their base, as far as the sample and a power of two tell: within 2^(1/2)
    of the first columns' mean."""
    far = 99 if SIZES[task.config.dtype] == 2 else 490  # what is certain to be within limits
    with np.errstate(all="ignore"):
        k = task.R.x.shape[1]
        norm = np.sqrt(_with_mean_of_sparse(wide(task.R.x[:, task.sample]) ** 2, k) * enlarge_of(k))
        within = (norm > 2.0**-far) & (norm < 2.0**far)
        wrong = within & ~(abs(np.log2(abs(v * norm / task.base))) <= 1.001)
    if not wrong.any():
        return []
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return [f"{wrong.sum()} weights are wrong: column {at} of norm {norm[at]} has {v[at]} of {task.base[at[1]]}"]


def sample_faults(config: Equilibrate, k: int, launch: Launch) -> list[str]:
    """What is wrong with the rows that are looked at, of k that are too many, and with the weights that follow."""
    # An element of each column is large: its weight tells whether the element was seen.
    task = Columns(config, k, k).matrices()
    task.R.x[...] = np.ones((), task.R.x.dtype)
    task.R.x[0, np.arange(k), np.arange(k)] = 2.0**15
    sample = np.flatnonzero(abs(equilibrated(task, launch).v[0]) < 2.0**-10)
    if sample.size != SAMPLE:
        return [f"{sample.size} rows are looked at"]
    runs, found = sample.reshape(-1, 8), []
    # Where columns are contiguous a run begins with a whole vector, the last one in front of its place.
    slack = 16 // SIZES[config.dtype] - 1 if config.turned else 0
    parts = (runs[:, [0, -1]] + np.array([slack, 0])) // (k // len(runs))
    if (np.diff(runs) != 1).any() or (parts[:, 0] != np.arange(len(runs))).any() or (parts[:, 1] > parts[:, 0]).any():
        found.append(f"the rows looked at are no runs of eight, one in each part: {sample.tolist()}")
    if k >= 1000 and len(set(np.diff(runs[:, 0]))) < len(runs) // 2:
        found.append(f"the rows looked at are periodic: {sample.tolist()}")
    for number, special in enumerate(((), ("zero", "nan"))):
        some = Columns(config, k, 40, 2, "octaves" if special else "equal", special).matrices(number, sample)
        made = equilibrated(some, launch)
        found += weight_faults(some, made)
        if not special:  # columns of one norm, up to what a sample of 128 misses: one scale
            size = abs(made.v * np.sqrt((wide(some.R.x) ** 2).sum(1)) / some.base)
            if not ((size.max(1) / size.min(1) < 1.3**2).all() and size.min() > 0.5 and size.max() < 2):
                found.append(f"columns weigh from {size.min()} to {size.max()} times as much as they should")
    outside = Columns(config, k, 40, 2).matrices()
    outside.R.x[:, sample, 5] = 0
    return found + weight_faults(outside._replace(sample=sample), equilibrated(outside, launch))


def wiped(launch: Launch, encoded: int) -> np.ndarray:
    """The state behind the kernel that wipes it for a call of this number."""
    state = np.full(STATE, SEALED, np.uint64)
    launch(WIPE.name, (1,), STATE, (state, encoded, 6000))
    return state


def begin_faults(begin: Callable[[int], np.ndarray]) -> list[str]:
    """What is wrong with the state that `begin` leaves for a call of a number, and with how replays are counted."""
    tally = Tally(ENCODED)
    states = [begin(encoded) for encoded in (0, ENCODED, tally.number)]
    found = [f"{np.count_nonzero(state)} words of the state were not wiped" for state in states if state.any()]
    return found + tally.faults(STARTED_WORD)


def matrices(config: Equilibrate) -> Iterator[Columns]:
    """Shapes around a block's columns and a warp's samples, with all that columns may be like in turn."""
    yield Columns(config, 1, 1)
    yield Columns(config, 5, 32, 2)
    yield Columns(config, 12, 9, 3, scales="octaves")
    yield Columns(config, 21, 300, 2, scales="octaves")
    yield Columns(config, 40, 33, 1, scales="large")
    yield Columns(config, 33, 100, 3, scales="octaves", special=("zero", "nan", "inf", "zero"))
    yield Columns(config, 9, 31, 2, special=("nan",) * 31)
    yield Columns(config, 8, 65, 2, scales="zero")
    yield Columns(config, 127, 70, 2, scales="tens", special=("zero", "inf"))
    yield Columns(config, 128, 230, 1, scales="octaves")
    yield Columns(config, 128, 100, 2, share=0.01)
    yield Columns(config, 128, 33, 1, special=("sparse",) * 3)
    yield Columns(config, 128, 70, 2, scales="octaves", share=0.05, special=("nan", "inf"))
    yield Columns(config, 16, 64, 1, scales="extreme", special=("zero",))
    yield Columns(config, 7, 40, 2, scales="beyond")
