"""Problems for the kernels that check products (line_sums, judge, equilibrate), and judges of what they made of them.

Nothing here runs a kernel: a `Launch` is handed in, which takes the kernel's name, the grid, the threads of a block and
the arguments.

Why these cases
---------------
*Configurations.* Every type with every width of load that its elements allow; teams, rows, vectors ahead, weights given
or squared, and words in cycles, so that every two of them meet (`tests/test_line_sums_on_cpu.py` counts).

*Shapes* (`shapes`) follow the kernel's constants, where its edges are. p one row, one below, at and above the rows of a
team and of a block; q one element, one below, at and above a vector, what a team takes at a time, what it has on its
way, and some of it more.

*Memory.* An address is a multiple of just as many bytes as a configuration loads. Rows and matrices have gaps in
between; these are NaN, as is what weights have beyond their end, and all that a kernel should write beforehand. What
lies beyond a matrix is guarded by tests/cuda_on_cpu.

*Verdicts.* The bounds are those of abft_tsm2/checksum/bounds.py. Residuals are planted at a known part of the bound,
negative ones too, and between them lines that are zero or hold NaN or Inf, whose bound is not finite, or whose norm is
above the largest. `judge` takes sums as they are given, and so residuals one part in 10^6 off the bound: square roots
of a kernel and its ratios have seven digits (ROOT, RATIO).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.checksum import bounds
from abft_tsm2.core.check_config import COLUMNS, SAMPLE, STATE, Equilibrate, Judge, LineSums
from abft_tsm2.core.config import SIZES
from tests.both_cases import TYPES
from tests.cuda_on_cpu.library import _Address
from tests.kernel_cases import GUARD

Launch = Callable[[str, tuple[int, ...], int, tuple[Any, ...]], None]
NULL = _Address(0)
SEALED = 0xFBFB_FBFB_FBFB_FBFB  # words that nobody should write
TYPES_OF_SUMS = [
    *(("float64", "float64"), ("float32", "float64"), ("float32", "float32"), ("float16", "float32")),
    *([("bfloat16", "float32")] if "bfloat16" in TYPES else []),
]
WIDTHS = {name: tuple(width for width in (16, 8, 4, 2) if width >= SIZES[name]) for name in TYPES}
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24}


# ---- configurations ------------------------------------------------------------------------------------------------


def _summing() -> Iterator[LineSums]:
    for a, (dtype, acc) in enumerate(TYPES_OF_SUMS):
        for b in range(4):
            i = 4 * a + b
            given, words = divmod((a + b) % 4, 2)
            team, rows, ahead = (1, 2, 4, 8)[(b + 3) % 4], (1, 2, 4)[i % 3], (1, 2, 4)[(i // 5 + 2 * b) % 3]
            yield LineSums(
                *(dtype, acc, bool(given), bool(words)),
                out=acc if i % 2 else "float64",
                width=WIDTHS[dtype][b % len(WIDTHS[dtype])],
                t1=max(64, 32 * team) if i % 5 else 256,
                team=team,
                rows=rows,
                ahead=ahead,
            )


def _judging() -> Iterator[LineSums]:
    casts = {("float32", "float32"): ["", "float16", "bfloat16", "float16"]}
    i = 0
    for dtype, acc in TYPES_OF_SUMS:
        for out in casts.get((dtype, acc), [""]):
            if out in ("", *TYPES):
                team, rows, ahead = (1, 4, 2, 8)[i % 4], (4, 1, 2)[i % 3], (2, 4, 1)[i % 3]
                width, t1 = WIDTHS[dtype][(i // 2) % len(WIDTHS[dtype])], (256, 128, 64, 256)[i % 4]
                yield LineSums(
                    *(dtype, acc), verdict=True, out=out, width=width, t1=t1, team=team, rows=rows, ahead=ahead
                )
                i += 1


SUMMING = tuple(_summing())
JUDGING = tuple(_judging())
JUDGE = Judge()
EQUILIBRATING = tuple(Equilibrate(dtype, turned) for dtype in TYPES for turned in (False, True))


# ---- arrays in memory ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stack:
    """Matrices (batch, p, q) in memory: `all` is the whole of it, `x` the view that holds the elements."""

    all: np.ndarray
    x: np.ndarray

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...], shift: int = 0) -> Stack:
        """All NaN; strides in elements, the first element is `shift` elements from a multiple of 16 bytes."""
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = np.full(GUARD + shift + reach + 1 + GUARD, np.nan, dtype)
        assert memory.ctypes.data % 16 == 0
        return cls(memory, _seen(memory, GUARD + shift, shape, strides))

    @classmethod
    def rows(cls, batch: int, p: int, q: int, dtype: str, width: int, gap: int = 0) -> Stack:
        """Contiguous rows whose addresses are multiples of `width` bytes and no more, `gap` of these further apart."""
        unit = width // SIZES[dtype]
        ld = (-(-q // unit) + gap) * unit
        step = p * ld + gap * unit
        return cls.of((batch, p, q), TYPES[dtype], (step, ld, 1), unit if width < 16 else 0)

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return tuple(stride // self.x.itemsize for stride in self.x.strides)

    @property
    def around(self) -> bytes:
        """What is no element of a matrix, bit by bit."""
        outside = np.ones(self.all.size, bool)
        offset = (self.x.ctypes.data - self.all.ctypes.data) // self.all.itemsize
        _seen(outside, offset, self.x.shape, self.strides)[...] = False
        return _bits(self.all)[outside].tobytes()


def _seen(memory: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    steps = tuple(stride * memory.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(memory[offset:], shape, steps)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) if x.itemsize == 2 else x).astype(np.longdouble)


def _vectors(values: np.ndarray, padding: int = 4) -> np.ndarray:
    """Each row of values at a multiple of 16 bytes, NaN in between; ends with the last value."""
    r, n = values.shape
    apart = -(-n // 4) * 4 + padding
    memory = np.full(r * apart, np.nan, values.dtype)
    assert memory.ctypes.data % 16 == 0
    out = _seen(memory, 0, (r, n), (apart, 1))
    out[...] = values
    return out


def step_of(values: np.ndarray) -> int:
    """Elements from one row to the next, 0 where there is one for all."""
    return values.strides[0] // values.itemsize if len(values) > 1 else 0


def _account(low: int = 0) -> np.ndarray:
    """The words of a product's state."""
    state = np.full(STATE, SEALED, np.uint64)
    state[0], state[1] = low, 0
    return state


# ---- sums ----------------------------------------------------------------------------------------------------------


def shapes(config: LineSums) -> list[tuple[int, int]]:
    """(p, q) at which a kernel of these constants has its edges."""
    v, lines = 16 // SIZES[config.dtype], config.lines
    stride = 32 * config.team * v
    ahead = config.ahead * stride
    return [
        *((1, 1), (2, max(1, v - 1)), (config.rows, v), (config.rows + 1, v + 1)),
        *((lines - 1 or 3, stride - 1), (lines, stride), (lines + 1, stride + 1)),
        *((3, ahead - v), (2, ahead), (5, ahead + v), (config.rows + 2, ahead + stride + 2 * v + 1)),
    ]


@dataclass(frozen=True)
class Case:
    """One pass over `batch` matrices (p, q), `gap` loads of a lane between their rows, and more between matrices.

    `shared`: one vector of weights for all of them.
    """

    config: LineSums
    p: int
    q: int
    batch: int = 1
    gap: int = 0
    shared: bool = False

    def task(self, seed: int = 0) -> Task:
        """Normal entries of rows whose sizes differ."""
        config, rng = self.config, np.random.default_rng([seed, self.p, self.q])
        X = Stack.rows(self.batch, self.p, self.q, config.dtype, config.width, self.gap)
        X.x[...] = rng.standard_normal(X.x.shape) * 2.0 ** rng.integers(-3, 4, (self.batch, self.p, 1))
        vectors = 1 if self.shared else self.batch
        w = _vectors(rng.standard_normal((vectors, self.q)).astype(config.acc))
        w2 = _vectors(rng.random((vectors, self.q)).astype(config.acc)) if config.given else None
        return Task(config, X, w, w2)


def cases(config: LineSums) -> Iterator[Case]:
    """Every shape, with batches, gaps and shared weights in turn."""
    for i, (p, q) in enumerate(shapes(config)):
        yield Case(config, p, q, (1, 3, 2)[i % 3], (0, 1, 2, 3)[i % 4], i % 6 == 4)


class Task(NamedTuple):
    """Operands of sums."""

    config: LineSums
    X: Stack
    w: np.ndarray
    w2: np.ndarray | None


class Sums(NamedTuple):
    """What a launch made: arrays (batch, p)."""

    y: np.ndarray
    z: np.ndarray
    words: np.ndarray | None
    state: np.ndarray
    sizes: np.ndarray


def summed(
    task: Task,
    launch: Launch,
    *,
    fresh: bool = False,
    outstanding: float = np.inf,
    expected: np.ndarray | None = None,
    state: np.ndarray | None = None,
    parts: np.ndarray | None = None,
) -> Sums:
    """Launch; AssertionError where something is written that should stay. `parts`: (batch, count, 2)."""
    config, (batch, p, q) = task.config, task.X.x.shape
    step, ld, _ = task.X.strides
    state = _account() if state is None else state
    out = [np.full((batch, p + 3), np.nan, config.out) for _ in "yz"]
    words = np.full((batch, p + 3), SEALED, np.uint64)
    sealed = [_bits(x).copy() for x in (*out, words)]
    padded = None
    if expected is not None:
        padded = np.full((batch, p + 3), SEALED, np.uint64)
        padded[:, :p] = expected
    sizes = np.full((batch, 2), -1.0)
    launch(
        config.name,
        (-(-p // config.lines), batch),
        config.t1,
        (
            *(p, q, task.X.x, ld, step if batch > 1 else 0, task.w, NULL if task.w2 is None else task.w2),
            *(step_of(task.w), *out, words if config.words else NULL, p + 3),
            *(float(outstanding), state, int(fresh), NULL if padded is None else padded),
            *((NULL, 0, NULL) if parts is None else (parts, parts.shape[1], sizes)),
        ),
    )
    for x, before in zip((*out, words), sealed, strict=True):
        assert (_bits(x)[:, p:] == before[:, p:]).all(), "an element between two products was written"
    return Sums(out[0][:, :p], out[1][:, :p], words[:, :p] if config.words else None, state, sizes)


def exactly(task: Task) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums in longdouble, and how far rounding explains (Higham, 2002, sec. 3.1).

    A term is added to the others of its lane, and these to those of the other lanes and warps: so many roundings. Where
    `acc` is float32, y has them in float64 but for those of one vector.
    """
    config = task.config
    X, w = wide(task.X.x), wide(task.w)[:, None, :]
    w2 = w * w if task.w2 is None else wide(task.w2)[:, None, :]
    v, q = 16 // SIZES[config.dtype], X.shape[2]
    depth = q // (32 * config.team) + v + 5 + config.team + 4
    u, found = UNIT[config.acc], {}
    once = UNIT[config.out]
    many = depth * u if config.acc == "float64" else (v + 2) * u + depth * UNIT["float64"]
    with np.errstate(all="ignore"):
        for name, terms, units in (("y", X * w, many), ("z", X * X * w2, depth * u)):
            value = terms.sum(2)
            found[name] = value, 1.01 * (units + once) * abs(terms).sum(2) + 2 * q * float(np.finfo(config.acc).tiny)
    return found


def words_of(x: np.ndarray) -> np.ndarray:
    """Sums of the bits of each row, modulo 2^64."""
    return np.asarray(_bits(x).astype(np.uint64).sum(-1, dtype=np.uint64))


def sum_faults(exact: dict[str, tuple[np.ndarray, np.ndarray]], sums: dict[str, np.ndarray]) -> list[str]:
    """Which sums are further from their exact values than the bound beside these allows."""
    found = []
    for name, (value, bound) in exact.items():
        with np.errstate(all="ignore"):
            ok = abs(sums[name].astype(np.longdouble) - value) <= bound
        if not ok.all():
            at = tuple(int(i) for i in np.argwhere(~ok)[0])
            found.append(f"{(~ok).sum()} of {name} are wrong, the first {at}: {sums[name][at]}, not {value[at]}")
    return found


def faults(task: Task, sums: Sums) -> list[str]:
    """What is wrong with sums of finite numbers, and with their flags."""
    found = sum_faults(exactly(task), {"y": sums.y, "z": sums.z})
    if sums.words is not None and not np.array_equal(sums.words, words_of(task.X.x)):
        found.append("words are wrong")
    return found


def flag_faults(task: Task, launch: Launch) -> list[str]:
    """What is wrong with the sums, with the flags that they raise, and with the state."""
    sums = summed(task, launch)
    found = faults(task, sums)
    largest = float(np.max(sums.z))
    above, below = largest * (1 + 1e-6), largest * (1 - 1e-3)
    last = sums.z.size - 1
    wanted = words_of(task.X.x)
    for what, options, flags in (
        ("nothing", {}, 0),
        ("a little more than the largest", {"outstanding": above}, 0),
        ("a little less", {"outstanding": below}, 1),
        *((("expected words", {"expected": wanted}, 0),) if task.config.words else ()),
        *(
            (f"other words in line {line}", {"expected": _changed(wanted, line), "outstanding": o}, 2 + (o < largest))
            for line, o in (((0, np.inf), (last, below), (last // 2, above)) if task.config.words else ())
        ),
    ):
        state = summed(task, launch, state=_account(5), **options).state
        if state[0] != 5 | flags << 32:
            found.append(f"with {what} given, word 0 of the state is {int(state[0]):#x}, not {5 | flags << 32:#x}")
        if state[1] != 0 or (state[2:] != SEALED).any():
            found.append("other words of the state were written")
    wiped = summed(task, launch, fresh=True, state=np.full(STATE, SEALED, np.uint64)).state
    if wiped.any():
        found.append(f"{np.count_nonzero(wiped)} words of the state were not wiped")
    if task.config.given:
        return found
    count = 1 + 7 * task.X.x.shape[1] % 70 + 128 * (task.X.x.shape[1] % 2)
    parts = np.random.default_rng(count).uniform(1, 2, (len(sums.y), count, 2))
    sizes = summed(task, launch, parts=parts).sizes
    if not np.allclose(sizes[:, 0], parts[..., 0].sum(1), rtol=1e-14) or (sizes[:, 1] != parts[..., 1].min(1)).any():
        found.append(f"sizes are wrong: {sizes.tolist()}")
    return found


def _changed(words: np.ndarray, line: int) -> np.ndarray:
    out = words.copy()
    out.ravel()[line] ^= np.uint64(1)
    return out


# ---- verdicts ------------------------------------------------------------------------------------------------------

RATIOS = (0.0, 0.3, -0.8, 1.3, 0.8, -3.0, 1e-3, 50.0, -0.6)  # of a residual to its bound
NEAR = (1 - 1e-6, 1 + 1e-6, -1 + 1e-6, -1 - 1e-6, 0.5, 1 + 1e-6, 0.0)
ROOT = 2.0**-23  # of kernels/verdict.cuh: half the rounding of its argument to float32, and that of the root
RATIO = 3 * 2.0**-24  # both sides are rounded to float32, and so is the quotient
SPECIAL = (
    *("nan in C", "inf in C", "zero", "zero but residual", "infinite squares", "nan squares", "nan prediction"),
    *("infinite prediction", "norm above", "norm just below", "infinite addend"),
)


class Terms(NamedTuple):
    """VERDICT_ARGUMENTS of kernels/verdict.cuh: numbers, and arrays (batch, p)."""

    alpha: float
    beta: float
    t: np.ndarray
    p2: np.ndarray
    t0: np.ndarray | None
    added2: np.ndarray | None
    sizes: np.ndarray
    factors: bounds.Factors


@dataclass(frozen=True)
class Judged:
    """What is judged, and what has to come out.

    Attributes
    ----------
    config : LineSums or Judge
    C : Stack or None
        What sums are taken of, with these weights.
    u, squares : (batch, p) arrays
        The sums as they are, in longdouble.
    terms : Terms
    tau, ok, decided, ratio : (batch, p) arrays
        `decided`: not so close to the bound that rounding of the sums decides.
    slack, delta : (batch, p) array, and float
        How far a kernel's ratio may be off, and relatively its norms and bounds.
    copied : int
        Bytes that the addresses of D are multiples of; 0: of 16 that of the first element, and odd distances.
    """

    config: LineSums | Judge
    C: Stack | None
    w: np.ndarray
    u: np.ndarray
    squares: np.ndarray
    terms: Terms
    tau: np.ndarray
    ok: np.ndarray
    decided: np.ndarray
    ratio: np.ndarray
    slack: np.ndarray
    delta: float
    copied: int = 2


@dataclass(frozen=True)
class Trial:
    """One verdict on lines of RATIOS or NEAR in turn, and of SPECIAL in between."""

    config: LineSums | Judge
    p: int
    q: int
    batch: int = 1
    gap: int = 0
    shared: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    special: bool = True
    tf32: bool = False
    underflow: bool = True  # False: the bound of zero is zero
    near: bool = False  # residuals of NEAR
    copied: int = 2  # as in Judged

    @property
    def dtype(self) -> str:
        return self.config.dtype if isinstance(self.config, LineSums) else "float32"

    def judged(self, seed: int = 0) -> Judged:
        rng = np.random.default_rng([seed, self.p, self.q])
        config, shape = self.config, (self.batch, self.p)
        lines = isinstance(config, LineSums)
        acc = config.acc if isinstance(config, LineSums) else "float64"
        width = config.width if isinstance(config, LineSums) else 16
        inputs = "float16" if acc == "float32" and self.dtype == "float32" else self.dtype
        tf32 = self.tf32 and self.dtype == "float32"
        arithmetic = bounds.arithmetic(inputs, self.dtype, library="cupy" if acc == "float32" else "numpy", tf32=tf32)
        k = 100_000 if self.dtype == "float64" else 3000  # tau far above the rounding of a kernel's own sums
        vectors = 1 if self.shared else self.batch
        sign = rng.choice([-1.0, 1.0], (vectors, self.q))
        w = _vectors((sign * (1 + rng.integers(0, 65, (vectors, self.q)) / 128)).astype(acc))

        count = self.batch * self.p
        kinds: list[Any] = [NEAR[i % len(NEAR)] for i in range(count)]
        if not self.near:  # all different, and on the same side of the bound
            some = np.resize(RATIOS, count)
            kinds = list(some * np.where(abs(some) < 1, rng.uniform(0.7, 1, count), rng.uniform(1, 1.4, count)))
        if self.special and len(kinds) > 4:
            for i, place in enumerate(rng.permutation(len(kinds))[: max(1, len(kinds) // 3)]):
                kinds[place] = SPECIAL[(i + seed) % len(SPECIAL)]
        named = np.array([x if isinstance(x, str) else "" for x in kinds]).reshape(shape)
        wanted = np.array([x if isinstance(x, float) else 0.5 for x in kinds]).reshape(shape)
        wanted[named == "zero but residual"] = 2.0

        C = Stack.rows(self.batch, self.p, self.q, self.dtype, width, self.gap)
        C.x[...] = rng.standard_normal(C.x.shape) * 2.0 ** rng.integers(-3, 4, (*shape, 1))
        C.x[(named == "zero") | (named == "zero but residual")] = 0
        weighted = wide(C.x) * wide(w)[:, None, :]
        u, squares = weighted.sum(2), (weighted**2).sum(2)
        if not lines:
            u, squares = (x.astype(np.float64).astype(np.longdouble) for x in (u, squares))
        norm = np.sqrt(squares)

        # P2, and what C0 adds, such that the norm is what a clean product may have.
        alpha, beta = self.alpha, self.beta
        p2 = (norm * 10 ** rng.uniform(-1, 1, shape)).astype(np.float64) ** 2
        root = bounds.SLACK * np.sqrt(k)
        with np.errstate(divide="ignore"):
            for name, part in (("norm above", 0.6), ("norm just below", 1.02)):
                p2[named == name] = (part * norm[named == name].astype(np.float64) / root / abs(alpha)) ** 2
        t0 = added2 = None
        if beta:
            t0 = rng.standard_normal(shape) * norm.astype(np.float64)
            added2 = (norm.astype(np.float64) * 10 ** rng.uniform(-2, 0.5, shape)) ** 2
            added2[np.char.startswith(named, "norm")] = 0
        sizes = np.stack([abs(w).astype(np.float64).sum(1), abs(w).astype(np.float64).min(1)], 1)
        factors = bounds.bound_factors(arithmetic, k, self.q, alpha)
        if not self.underflow:
            factors = factors._replace(underflow=0.0)

        def judged_by(p2: np.ndarray, added2: np.ndarray | None, norm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """tau and the largest norm, in the words of abft_tsm2/checksum/bounds.py."""
            known = {
                "products": abs(alpha) * np.sqrt(p2.astype(np.longdouble)),
                "added": None if added2 is None else abs(beta) * np.sqrt(added2.astype(np.longdouble)),
                "underflow": factors.underflow * sizes[:, :1],
            }
            largest = bounds.largest_norm(k, **known)
            stored = np.where(norm <= largest, norm, largest)  # of one that is NaN, too
            return bounds.statistical_bound(np, arithmetic, k, self.q, stored=stored, **known), largest

        tau, _ = judged_by(p2, added2, norm)
        t = (u - wanted * tau) if t0 is None else (u - wanted * tau) - beta * t0
        t = (t / alpha).astype(np.float64)

        # What is not finite comes in when the finite part is known.
        with np.errstate(all="ignore"):
            C.x[named == "nan in C", self.q - 1] = np.nan
            C.x[named == "inf in C", 0] = -np.inf
            for name, value in (("nan in C", np.nan), ("inf in C", np.inf)):
                u[named == name] = squares[named == name] = value
            p2[named == "infinite squares"] = np.inf
            p2[named == "nan squares"] = np.nan
            t[named == "nan prediction"] = np.nan
            t[named == "infinite prediction"] = -np.inf
            if added2 is not None:
                added2[named == "infinite addend"] = np.inf
            norm = np.sqrt(squares)
            tau, largest = judged_by(p2, added2, norm)
            expected = alpha * t.astype(np.longdouble)
            scale = abs(u) + abs(expected)
            if t0 is not None:
                expected, scale = expected + beta * t0, scale + abs(beta * t0)
            residual = abs(u - expected)
            v, team = (16 // SIZES[self.dtype], config.team) if isinstance(config, LineSums) else (0, 1)
            depth = self.q // (32 * team) + v + 10 + team if lines else 0
            noise = 4 * 2.0**-53 * scale
            if lines:
                noise = noise + 4 * norm * (
                    UNIT["float64"] * np.sqrt(depth) + (np.sqrt(v) * UNIT["float32"] if acc == "float32" else 0)
                )
            delta = depth * UNIT[acc] + 1e-14 + ROOT
            ok = (residual <= tau) & np.isfinite(tau) & (norm <= largest)
            near = (abs(residual - tau) <= noise + delta * tau) | (abs(norm - largest) <= delta * largest)
            near &= np.isfinite(tau) & np.isfinite(residual)
            zero = (tau == 0) & (residual == 0)
            ratio = np.where(tau > 0, residual / tau, 0)
            slack = np.where(tau > 0, noise / tau, 0) + (delta + 1.01 * RATIO) * ratio
        if isinstance(config, LineSums) and config.out:
            _ties(C.x, named == "", config.out, rng)
        terms = Terms(alpha, beta, t, p2, t0, added2, sizes, factors)
        decided = ~near | zero
        sums = (C if lines else None, w, u, squares)
        return Judged(config, *sums, terms, tau, ok, decided, ratio, slack, delta, self.copied)


def _ties(X: np.ndarray, plain: np.ndarray, out: str, rng: np.random.Generator) -> None:
    """In lines whose sums are not finite anyway: halfway between two numbers of `out`, one digit off, the extremes."""
    for line in np.argwhere(~np.isfinite(X.astype(np.float64)).all(2) & ~plain):
        row = X[tuple(line)]
        pattern = rng.integers(0, 2**16, row.size).astype(np.uint16)
        with np.errstate(all="ignore"):
            low, high = (x.view(TYPES[out]).astype(np.float64) for x in (pattern, pattern + np.uint16(1)))
            middle = ((low + high) / 2).astype(np.float32)
            towards = np.nextafter(middle, np.float32(np.inf) * rng.choice([-1, 1], row.size).astype(np.float32))
            values = np.where(rng.random(row.size) < 0.5, middle, towards)
        kept = row[[0, -1]].copy()
        row[...] = np.where(rng.random(row.size) < 0.1, np.float32(65520) * (1 + rng.random(row.size) * 1e-3), values)
        row[[0, -1]] = np.where(np.isfinite(kept), row[[0, -1]], kept)


class Verdicts(NamedTuple):
    """What a launch made: tau (batch, p), the lines that it lists, and the state."""

    tau: np.ndarray
    lines: np.ndarray
    state: np.ndarray
    D: np.ndarray | None


def verdicts(judged: Judged, launch: Launch, state: np.ndarray | None = None) -> Verdicts:
    config, terms = judged.config, judged.terms
    batch, p = judged.u.shape
    q = judged.w.shape[1]
    state = _account() if state is None else state
    tau, lines = np.full((batch, p), np.nan), np.full(batch * p, 0xFBFBFBFB, np.uint32)
    sizes = terms.sizes
    arguments: tuple[Any, ...] = (
        *(terms.alpha, terms.beta, terms.t, terms.p2, *(NULL if x is None else x for x in (terms.t0, terms.added2))),
        *(sizes, 2 if len(sizes) > 1 else 0, *(float(x) for x in terms.factors), tau, lines, state),
    )
    if isinstance(config, Judge):
        u, squares = (np.ascontiguousarray(x.astype(np.float64)) for x in (judged.u, judged.squares))
        launch(config.name, (-(-p // config.t1), batch), config.t1, (p, u, squares, *arguments))
        return Verdicts(tau, lines, state, None)
    assert judged.C is not None
    cast: tuple[Any, ...] = (NULL, 0, 0)
    D, around = None, b""
    if config.out:
        if judged.copied:
            D = Stack.rows(batch, p, q, config.out, judged.copied, 1)
        else:
            D = Stack.of((batch, p, q), TYPES[config.out], (p * (q | 1) + 3, q | 1, 1))
        around = D.around
        cast = (D.x, D.strides[1], D.strides[0] if batch > 1 else 0)
    step, ld, _ = judged.C.strides
    launch(
        config.name,
        (-(-p // config.lines), batch),
        config.t1,
        (p, q, judged.C.x, ld, step if batch > 1 else 0, judged.w, NULL, step_of(judged.w), *arguments, *cast),
    )
    assert D is None or D.around == around, "an element between two rows of the copy was written"
    return Verdicts(tau, lines, state, None if D is None else D.x)


def verdict_faults(judged: Judged, made: Verdicts) -> list[str]:
    """What is wrong with a verdict whose state was empty."""
    found = []
    tau, ratio = judged.tau.ravel(), judged.ratio.ravel()
    decided, ok = judged.decided.ravel(), judged.ok.ravel()
    with np.errstate(all="ignore"):
        bounds = made.tau.ravel().astype(np.longdouble)
        right = (abs(bounds - tau) <= (judged.delta + 1e-13) * abs(tau)) | (~np.isfinite(tau) & ~np.isfinite(bounds))
    if not right.all():
        at = int(np.flatnonzero(~right)[0])
        found.append(f"{(~right).sum()} bounds are wrong, the first of line {at}: {bounds[at]}, not {tau[at]}")
    count = int(made.state[0]) & 0xFFFFFFFF
    listed = [int(x) for x in made.lines[: min(count, made.lines.size)]]
    if count > made.lines.size or len(set(listed)) < count or (made.lines[count:] != 0xFBFBFBFB).any():
        found.append(f"{count} lines are listed, as {listed[:8]}...")
    wrong = {int(i) for i in np.flatnonzero(decided & ~ok)}
    if not wrong <= set(listed):
        found.append(f"lines {sorted(wrong - set(listed))[:8]} are not listed")
    surplus = set(listed) - wrong - {int(i) for i in np.flatnonzero(~decided)}
    if surplus:
        found.append(f"lines {sorted(surplus)[:8]} are listed, and nothing is wrong with them")
    passed = np.setdiff1d(np.arange(tau.size), listed)
    closest, line = int(made.state[1]) >> 32, int(made.state[1]) & 0xFFFFFFFF
    value = float(np.array([closest], np.uint32).view(np.float32)[0])
    if not passed.size:
        if made.state[1] != 0:
            found.append(f"the closest is {value} of line {line}, and no line passed")
    elif line not in passed:
        found.append(f"the closest is line {line}, which did not pass")
    else:
        slack = judged.slack.ravel()
        if not abs(value - ratio[line]) <= slack[line]:
            found.append(f"the closest has ratio {value}, its line {line} has {ratio[line]}")
        if not (ratio[passed] - slack[passed] <= value).all():
            found.append(f"the closest has ratio {value}, the largest is {ratio[passed].max()}")
    if made.state[0] >> 32 != 0 or (made.state[2:] != SEALED).any():
        found.append("other words of the state were written")
    if made.D is not None:
        assert judged.C is not None
        with np.errstate(all="ignore"):
            copy = judged.C.x.astype(made.D.dtype)
        both = np.isnan(copy.astype(np.float32)) & np.isnan(made.D.astype(np.float32))
        if not ((_bits(copy) == _bits(made.D)) | both).all():
            place = tuple(int(i) for i in np.argwhere((_bits(copy) != _bits(made.D)) & ~both)[0])
            found.append(f"the copy is wrong at {place}: {made.D[place]}, not {copy[place]} of {judged.C.x[place]}")
    return found


def trials(config: LineSums | Judge) -> Iterator[Trial]:
    """Batches, gaps, alpha and beta in turn."""
    if isinstance(config, Judge):
        sizes = [(1, 3), (5, 40), (config.t1 - 1, 9), (config.t1 + 1, 20), (600, 8)]
    else:
        v, lines = 16 // SIZES[config.dtype], config.lines
        stride = 32 * config.team * v
        sizes = [(1, 1), (7, v + 1), (2 * lines + 1, stride - 1), (lines, stride + v), (30, config.ahead * stride + 3)]
        sizes += [(41, 2 * v + 1)]
    for i, (p, q) in enumerate(sizes):
        alpha, beta = ((1.0, 0.0), (-0.5, 0.0), (2.0, -1.5), (1.0, 0.75), (-3.0, 2.0), (1.0, 1.0))[i % 6]
        yield Trial(
            *(config, p, q, (2, 1, 3)[i % 3], (0, 2, 1)[i % 3], i % 4 == 3, alpha, beta),
            tf32=i % 2 == 1,
            near=isinstance(config, Judge) and i % 2 == 1,
            underflow=i % 5 != 4,
            copied=(2, 8, 4, 0)[i % 4],
        )


# ---- equilibration -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """One equilibration of `batch` matrices (k, n)."""

    config: Equilibrate
    k: int
    n: int
    batch: int = 1
    scales: str = "equal"  # columns differ by powers of ten: none, "tens": 2, "large": 30 or what the type allows,
    # "extreme": as many as have squares, "beyond": more in float64. "zero": all of them are 0
    special: tuple[str, ...] = ()  # of "nan", "inf", "zero": columns that have no scale

    def matrices(self, seed: int = 0, sample: np.ndarray | None = None) -> Scaled:
        """All rows are the sample unless it is given.

        Columns of "beyond" have a size and no scale: squares of 1e200 are no float64, and so are those of 1e-200.
        """
        rng = np.random.default_rng([seed, self.k, self.n])
        dtype, shape = TYPES[self.config.dtype], (self.batch, self.k, self.n)
        gap = 1 + seed % 3
        step = (self.k + gap) * (self.n + gap)
        strides = (step, 1, self.k + gap) if self.config.turned else (step, self.n + gap, 1)
        R = Stack.of(shape, dtype, strides, 1)
        extreme = {"float64": 150, "float32": 30, "bfloat16": 35, "float16": 3}[self.config.dtype]
        beyond = 200 if self.config.dtype == "float64" else extreme
        most = {"tens": 2, "large": min(extreme, 30), "extreme": extreme, "beyond": beyond}.get(self.scales, 0)
        power = rng.integers(-1, 2, (self.batch, 1, self.n)) * most
        values = rng.standard_normal(shape) * 10.0**power
        if self.scales == "zero":
            values[...] = 0
        R.x[...] = values.astype(dtype)
        sample = np.arange(self.k) if sample is None else sample
        places = rng.permutation(self.n)
        for number, kind in enumerate(self.special):
            column = R.x[:, :, places[number % self.n]]
            if kind == "zero":
                column[...] = 0
            else:
                column[number % self.batch, sample[-1]] = {"nan": np.nan, "inf": -np.inf}[kind]
        base = rng.choice([-1.0, 1.0], self.n) * (1 + rng.integers(0, 65, self.n) / 128)
        return Scaled(self.config, R, sample, base.astype(np.float32))


class Scaled(NamedTuple):
    """Operands of an equilibration, and the rows that the norms are estimated from."""

    config: Equilibrate
    R: Stack
    sample: np.ndarray
    base: np.ndarray


class Weights(NamedTuple):
    """What a launch made: weights, and the sum and the smallest of each block's."""

    v: np.ndarray
    parts: np.ndarray
    state: np.ndarray


def equilibrated(task: Scaled, launch: Launch) -> Weights:
    """Launch; AssertionError where something is written that should stay."""
    config, (batch, k, n) = task.config, task.R.x.shape
    step, rs, cs = task.R.strides
    blocks = -(-n // COLUMNS)
    apart = -(-n // 4) * 4 + 4
    memory = np.full((batch, apart), np.nan, "float32" if SIZES[config.dtype] == 2 else "float64")
    v = _seen(memory.ravel(), 0, (batch, n), (apart, 1))  # ends with the last weight
    parts, state = np.full((batch, blocks, 2), np.nan), np.full(STATE, SEALED, np.uint64)
    launch(
        config.name,
        (blocks, batch),
        config.t1,
        (k, n, task.R.x, rs, cs, step if batch > 1 else 0, task.base, v, apart, parts, unshare_of(k), state),
    )
    assert np.isnan(memory[:, n:]).all(), "an element between the weights of two products was written"
    return Weights(v, parts, state)


def unshare_of(k: int) -> float:
    """sqrt(rows in the sample / k), as abft_tsm2/checksum/on_device.py gives it."""
    return float((SAMPLE / k if k >= 2 * SAMPLE else 1.0) ** 0.5)


def scales_of(task: Scaled) -> np.ndarray:
    """What the base is multiplied by, (batch, n): 1 / norm, within limits, or that of neighbours."""
    far = 100 if SIZES[task.config.dtype] == 2 else 1000
    with np.errstate(all="ignore"):
        seen = task.R.x[:, task.sample].astype(np.float64)
        square = (seen**2).sum(1)
        has = (square > 0) & np.isfinite(square)
        # square = 4^half m, m in [1, 4)
        half = (np.frexp(np.where(has, square, 1))[1] - 1) // 2
        m = np.where(has, square, 1) * 2.0**-half * 2.0**-half
        digits = np.where(has, unshare_of(task.R.x.shape[1]) / np.sqrt(m), 1)
    exponent = np.where(has, np.clip(-half, -far, far), -2 * far)
    for first in range(0, square.shape[1], COLUMNS):
        block = exponent[:, first : first + COLUMNS]
        top = block.max(1, keepdims=True)
        block[...] = np.where(block > -2 * far, block, np.where(top > -2 * far, top, 0))
    return digits.astype(np.longdouble) * np.exp2(exponent.astype(np.longdouble))


def weight_faults(task: Scaled, made: Weights) -> list[str]:
    """What is wrong with weights."""
    found = []
    scale = scales_of(task)
    blocks = [slice(j, j + COLUMNS) for j in range(0, scale.shape[1], COLUMNS)]
    v = made.v.astype(np.longdouble)
    with np.errstate(all="ignore"):
        # Eight significant bits: off by a half of the last one at most, and by what float32 rounds of the scale.
        right = abs(v - task.base * scale) <= (2.0**-8 + 2.0**-21) * abs(task.base) * scale
        digits = np.frexp(made.v)[0].astype(np.float64) * 256
    if not right.all():
        at = tuple(int(i) for i in np.argwhere(~right)[0])
        found.append(f"{(~right).sum()} weights are wrong, the first {at}: {v[at]}, not {task.base[at[1]] * scale[at]}")
    found += _balance_faults(task, v)
    if (np.isfinite(digits) & (digits != np.round(digits))).any():
        found.append("weights have more than eight significant bits")
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
    """Columns with a scale weigh as much as their base, as far as the sample tells: within 2 %."""
    far = 99 if SIZES[task.config.dtype] == 2 else 490  # what is certain to be within limits
    with np.errstate(all="ignore"):
        norm = np.sqrt((wide(task.R.x[:, task.sample]) ** 2).sum(1)) / unshare_of(task.R.x.shape[1])
        within = (norm > 2.0**-far) & (norm < 2.0**far)
        wrong = within & ~(abs(v * norm / task.base - 1) <= 0.02)
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
    if (np.diff(runs) != 1).any() or (runs[:, [0, -1]] // (k // len(runs)) != np.arange(len(runs))[:, None]).any():
        found.append(f"the rows looked at are no runs of eight, one in each part: {sample.tolist()}")
    if k >= 1000 and len(set(np.diff(runs[:, 0]))) < len(runs) // 2:
        found.append(f"the rows looked at are periodic: {sample.tolist()}")
    for number, special in enumerate(((), ("zero", "nan"))):
        some = Columns(config, k, 40, 2, special=special).matrices(number, sample)
        made = equilibrated(some, launch)
        found += weight_faults(some, made)
        if not special:  # what a sample of 128 misses
            size = abs(made.v * np.sqrt((wide(some.R.x) ** 2).sum(1)) / some.base)
            if not (abs(size - 1) < 0.25).all():
                found.append(f"columns weigh from {size.min()} to {size.max()} times as much as they should")
    outside = Columns(config, k, 40, 2).matrices()
    outside.R.x[:, sample, 5] = 0
    return found + weight_faults(outside._replace(sample=sample), equilibrated(outside, launch))


def matrices(config: Equilibrate) -> Iterator[Columns]:
    """Shapes around a block's columns and a warp's samples, with all that columns may be like in turn."""
    yield Columns(config, 1, 1)
    yield Columns(config, 5, 32, 2)
    yield Columns(config, 40, 33, 1, scales="large")
    yield Columns(config, 33, 100, 3, special=("zero", "nan", "inf", "zero"))
    yield Columns(config, 9, 31, 2, special=("nan",) * 31)
    yield Columns(config, 8, 65, 2, scales="zero")
    yield Columns(config, 255, 70, 2, scales="tens", special=("zero", "inf"))
    yield Columns(config, 16, 64, 1, scales="extreme", special=("zero",))
    yield Columns(config, 7, 40, 2, scales="beyond")
