"""Sums for the kernels that check products (line_sums), judges of what they made of them, and faults planted into them;
verdicts are in `tests.support.verdict_cases`, weights in `tests.support.equilibrate_cases`.

Nothing here runs a kernel: a `Launch` is handed in, which takes the kernel's name, the grid, the threads of a block and
the arguments.

Why these cases
---------------
*Configurations.* Every type with every width of load that its elements allow; teams, rows, vectors ahead, weights given
or squared, and words in cycles, so that every two of them meet (`tests/kernels/test_check_rows_on_cpu.py` counts).

*Shapes* (`shapes`) follow the kernel's constants, where its edges are. p one row, one below, at and above the rows of a
team and of a block; q one element, one below, at and above a vector, what a team takes at a time, what it has on its
way, and some of it more.

*Memory.* An address is a multiple of just as many bytes as a configuration loads. Rows and matrices have gaps in
between; these are NaN, as is what weights have beyond their end, and all that a kernel should write beforehand. What
lies beyond a matrix is guarded by tests/support/cuda_on_cpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.checksum.device.kernels import STATE, LineSums
from abft_tsm2.core.problem import SIZES
from tests.support.both_cases import TYPES
from tests.support.cuda_on_cpu.library import _Address
from tests.support.kernel_cases import GUARD
from tests.support.planting import bits

Launch = Callable[[str, tuple[int, ...], int, tuple[Any, ...]], None]
NULL = _Address(0)
SEALED = 0xFBFB_FBFB_FBFB_FBFB  # words that must not be written
TYPES_OF_SUMS = [
    *(("float64", "float64"), ("float32", "float64"), ("float32", "float32"), ("float16", "float32")),
    *([("bfloat16", "float32")] if "bfloat16" in TYPES else []),
]
WIDTHS = {name: tuple(width for width in (16, 8, 4, 2) if width >= SIZES[name]) for name in TYPES}
FAINTEST = 2.0**-1060  # bounds below verify nothing, as kernels/check/state.cuh has it
CALL_WORD, JUDGED_WORD, UNBOUNDED_WORD = 16, 17, 18  # of the state, as kernels/check/state.cuh has them
ENCODED, CALL = (1 << 33) + 5, (1 << 41) + 6  # numbers of calls
STARTED_WORD, VERDICTS_WORD = 1, 2  # of a tally
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


SUMMING = tuple(_summing())


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
        return cls(memory, seen(memory, GUARD + shift, shape, strides))

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
        seen(outside, offset, self.x.shape, self.strides)[...] = False
        return bits(self.all)[outside].tobytes()


def seen(memory: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    steps = tuple(stride * memory.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(memory[offset:], shape, steps)


def wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32) if x.itemsize == 2 else x).astype(np.longdouble)


def laid_out(values: np.ndarray, padding: int = 4) -> np.ndarray:
    """Each row of values at a multiple of 16 bytes, NaN in between; ends with the last value."""
    r, n = values.shape
    apart = -(-n // 4) * 4 + padding
    memory = np.full(r * apart, np.nan, values.dtype)
    assert memory.ctypes.data % 16 == 0
    out = seen(memory, 0, (r, n), (apart, 1))
    out[...] = values
    return out


def step_of(values: np.ndarray) -> int:
    """Elements from one row to the next, 0 where there is one for all."""
    return values.strides[0] // values.itemsize if len(values) > 1 else 0


def account(low: int = 0) -> np.ndarray:
    """The words of a product's state."""
    state = np.full(STATE, SEALED, np.uint64)
    state[0], state[1] = low, 0
    state[[CALL_WORD, JUDGED_WORD]] = 0
    return state


class Tally:
    """Where replays are counted, as kernels/check/state.cuh has it, while the one of this number runs. It lies in this
    process: under AddressSanitizer kernels run in another one, and do not reach it."""

    def __init__(self, replay: int) -> None:
        self._before = np.array([replay, 7, 7, *[SEALED] * 5], np.uint64)
        self.words = self._before.copy()

    @property
    def number(self) -> int:
        """What a kernel takes for the number of the call."""
        return self.words.ctypes.data | 1 << 63

    def faults(self, *counted: int) -> list[str]:
        """What is wrong with it, where these words have each counted one replay."""
        wanted = self._before.copy()
        wanted[list(counted)] += np.uint64(1)
        return [] if np.array_equal(self.words, wanted) else [f"replays are counted as {self.words[1:3].tolist()}"]


def guards_of(sums: np.ndarray, squares: np.ndarray, encoded: int) -> np.ndarray:
    """Of two sums (batch, p), as kernels/check/state.cuh has them."""
    found = np.empty(sums.shape, np.uint64)
    for line, (y, z) in enumerate(zip(sums.ravel(), squares.ravel(), strict=True)):
        first, second = (int(np.float64(x).view(np.uint64)) for x in (y, z))
        mixed = first ^ (second << 32 | second >> 32) & 2**64 - 1
        found.ravel()[line] = mixed + ((encoded << 32) + line + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
    return found


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
        w = laid_out(rng.standard_normal((vectors, self.q)).astype(config.acc))
        w2 = laid_out(rng.random((vectors, self.q)).astype(config.acc)) if config.given else None
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
    written: bool = False,
    outstanding: float = np.inf,
    expected: np.ndarray | None = None,
    state: np.ndarray | None = None,
    parts: np.ndarray | None = None,
    guards: np.ndarray | None = None,
    encoded: int = ENCODED,
) -> Sums:
    """Launch; AssertionError where something is written that should stay. `parts`: (batch, count, 2); `guards`: where
    they go."""
    config, (batch, p, q) = task.config, task.X.x.shape
    step, ld, _ = task.X.strides
    state = account() if state is None else state
    out = [np.full((batch, p + 3), np.nan, config.out) for _ in "yz"]
    words = np.full((batch, p + 3), SEALED, np.uint64)
    sealed = [bits(x).copy() for x in (*out, words)]
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
            *(float(outstanding), state, int(written), NULL if padded is None else padded),
            *((NULL, 0, NULL) if parts is None else (parts, parts.shape[1], sizes)),
            *(NULL if guards is None else guards, encoded),
        ),
    )
    for x, before in zip((*out, words), sealed, strict=True):
        assert (bits(x)[:, p:] == before[:, p:]).all(), "an element between two products was written"
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
    return np.asarray(bits(x).astype(np.uint64).sum(-1, dtype=np.uint64))


def sum_faults(exact: dict[str, tuple[np.ndarray, np.ndarray]], sums: dict[str, np.ndarray]) -> list[str]:
    """Which sums are further from their exact values than the bound beside these allows, or another infinity or NaN."""
    found = []
    for name, (value, bound) in exact.items():
        with np.errstate(all="ignore"):
            ok = abs(sums[name].astype(np.longdouble) - value) <= bound
            ok |= ~np.isfinite(value) & ((sums[name] == value) | (np.isnan(sums[name]) & np.isnan(value)))
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
        ("both flags", {"state": account(5 | 3 << 32)}, 3),
        ("one flag", {"state": account(5 | 2 << 32), "written": True, "outstanding": below}, 3),
        ("a little more than the largest", {"outstanding": above}, 0),
        ("a little less", {"outstanding": below}, 1),
        *((("expected words", {"expected": wanted}, 0),) if task.config.words else ()),
        *(
            (f"other words in line {line}", {"expected": _changed(wanted, line), "outstanding": o}, 2 + (o < largest))
            for line, o in (((0, np.inf), (last, below), (last // 2, above)) if task.config.words else ())
        ),
    ):
        state = summed(task, launch, **{"state": account(5), **options}).state
        if state[0] != 5 | flags << 32:
            found.append(f"with {what} given, word 0 of the state is {int(state[0]):#x}, not {5 | flags << 32:#x}")
        if state[[1, CALL_WORD, JUDGED_WORD]].any() or (state[2:CALL_WORD] != SEALED).any():
            found.append("other words of the state were written")
    tally = Tally(ENCODED)
    for encoded in (ENCODED, tally.number):
        guards = np.zeros(sums.y.shape, np.uint64)
        sums = summed(task, launch, guards=guards, encoded=encoded)
        if not np.array_equal(guards, guards_of(sums.y, sums.z, ENCODED)):
            found.append("guards are wrong")
    found += tally.faults()
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


# ---- faults planted into the kernel --------------------------------------------------------------------------------

FULL = next(config for config in SUMMING if config.ahead > 1 and config.rows > 1 and config.team < 8)
TEAM = next(config for config in SUMMING if config.team > 2 and config.given and config.words and config.width > 4)
ALONE = replace(SUMMING[0], words=True, rows=4)
NARROW = next(config for config in SUMMING if config.dtype == "float16" and config.words)
RACE, WRONG, OVERRUN = "race: |uninitialised shared", "are wrong", "global memory overrun"
FLAGS = "word 0 of the state"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
SUM_FAULTS: dict[str, tuple[LineSums, str, int, str, str]] = {
    "no_barrier_of_a_team": (TEAM, "__syncthreads();", 1, "", RACE),
    "a_member_twice": (TEAM, "y_parts[(warp + member)", 0, "y_parts[(warp + member - 1)", "y are wrong"),
    "squares_of_members": (TEAM, "z_parts[(warp + member)", 0, "z_parts[(warp + 1)", "z are wrong"),
    "words_of_members": (TEAM, "word_parts[(warp + member)", 0, "word_parts[(warp + 1)", "words are wrong"),
    "every_warp_stores": (
        TEAM,
        "place < ROWS && warp % TEAM == 0 && row",
        0,
        "place < ROWS && row",
        f"{WRONG}|{FLAGS}",
    ),
    "every_lane_adds": (TEAM, "if (place < ROWS) {", 0, "if (true) {", f"{RACE}|{WRONG}|overrun"),
    "rows_beyond_are_stored": (ALONE, "warp % TEAM == 0 && row < p", 0, "warp % TEAM == 0", f"{OVERRUN}|between two"),
    "a_row_in_two_places": (ALONE, "product * out_step + line] = OUT(y)", 0, "line] = OUT(y)", WRONG),
    "rows_of_the_neighbour": (ALONE, "smaller(first + i, p - 1)", 0, "smaller(first + i + 1, p - 1)", WRONG),
    "the_first_matrix_only": (ALONE, "X + product * step", 1, "X", WRONG),
    "the_first_weights_only": (ALONE, "weights + product * w_step", 0, "weights", WRONG),
    "weights_of_y_for_squares": (TEAM, "x * x * w2 :", 0, "x * x * w :", "z are wrong"),
    "squares_of_weights_given": (TEAM, "squares + product * w_step", 0, "weights + product * w_step", "z are wrong"),
    "not_squared": (ALONE, ": term * term;", 0, ": x * term;", "z are wrong"),
    "vectors_beyond_the_row": (FULL, "j < whole; j += STRIDE", 0, "j < q; j += STRIDE", f"{WRONG}|{OVERRUN}"),
    "vectors_ahead_beyond": (FULL, "j + (AHEAD - 1) * STRIDE < whole", 0, "j < whole", f"{WRONG}|{OVERRUN}"),
    "last_vectors_forgotten": (FULL, "j < whole; j += STRIDE", 0, "false; j += STRIDE", WRONG),
    "the_first_vectors_only": (FULL, "(x[a], j + a * STRIDE, w", 0, "(x[0], j + a * STRIDE, w", WRONG),
    "weights_of_the_first_vectors": (FULL, "(x[a], j + a * STRIDE, w", 0, "(x[a], j, w", WRONG),
    "the_rest_forgotten": (ALONE, "if (l >= q) return;", 0, "return;", WRONG),
    "the_rest_beyond_the_row": (TEAM, "if (l >= q) return;", 0, "", f"{WRONG}|{OVERRUN}"),
    "the_rest_by_every_warp": (TEAM, "if (warp % TEAM == 0) {", 0, "{", WRONG),
    "the_rest_of_the_first_row": (ALONE, "at[i][l]", 0, "at[0][l]", WRONG),
    "weights_of_the_rest": (TEAM, "right = w[l]", 0, "right = w[threadIdx.x % 32]", "y are wrong"),
    "square_weights_of_the_rest": (TEAM, "w2[l]", 0, "w2[threadIdx.x % 32]", "z are wrong"),
    "words_of_the_rest": (ALONE, "words[i] += pattern(element);", 0, "", "words are wrong"),
    "words_differ": (ALONE, "words += pattern(x.x[e]);", 0, "words ^= pattern(x.x[e]);", "words are wrong"),
    "words_of_narrow_elements": (NARROW, "words += sum;", 0, "words = sum;", "words are wrong"),
    "outstanding_below": (ALONE, "double(z) > outstanding", 0, "double(z) < outstanding", FLAGS),
    "outstanding_unseen": (ALONE, "+ 1, 1u)", 0, "+ 1, 0u)", FLAGS),
    "expected_of_the_first": (ALONE, "expected[product * out_step + line]", 0, "expected[line]", FLAGS),
    "the_other_flag": (ALONE, "+ 1, 2u)", 0, "+ 1, 1u)", FLAGS),
    "the_state_is_wiped": (ALONE, "if (!GIVEN && parts", 0, "state[0] = 0; if (!GIVEN && parts", FLAGS),
    "a_word_is_wiped": (
        ALONE,
        "if (!GIVEN && parts",
        0,
        "state[9] = 0; if (!GIVEN && parts",
        "other words of the state",
    ),
    "flags_are_replaced": (
        ALONE,
        "atomicOr(reinterpret_cast<unsigned*>(state) + 1, 1u)",
        0,
        "reinterpret_cast<unsigned*>(state)[1] = 1u",
        FLAGS,
    ),
    "guards_of_the_sum_alone": (
        ALONE,
        "pattern(sum) ^ (bits << 32 | bits >> 32)",
        0,
        "pattern(sum)",
        "guards are wrong",
    ),
    "guards_of_the_first_product": (ALONE, "guards[own]", 0, "guards[line]", "guards are wrong"),
    "guards_of_no_call": (ALONE, "OUT(z)), own, number)", 0, "OUT(z)), own, 0)", "guards are wrong"),
    "guards_of_a_tally": (ALONE, "guards ? number_of(encoded) : 0", 0, "guards ? encoded : 0", "guards are wrong"),
    "sizes_of_the_first_product": (ALONE, "sizes + 2 * product", 0, "sizes", "sizes are wrong"),
    "sizes_of_32_blocks": (ALONE, "b + 32 * i < count;", 0, "i == 0 && b < count;", "sizes are wrong"),
    "sizes_of_64_blocks": (ALONE, "b += 32 * AT_ONCE", 0, "b += 999", "sizes are wrong"),
    "sizes_from_the_first_product": (ALONE, "parts + 2 * product * part_count", 0, "parts", "sizes are wrong"),
    "least_of_a_lane": (ALONE, "least = fmin(least, __shfl", 0, "least = fmax(least, __shfl", "sizes are wrong"),
}
