"""Problems for the kernel that sums lines across memory (kernels/check/tsm2r_columns.cu), and judges of what it made of
them.

What is judged, and by which model, is that of `tests.support.check_cases` and `tests.support.verdict_cases`; X lies in
memory row by row of positions here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.checksum.device.kernels import STATE, AcrossSums, LineSums
from abft_tsm2.core.problem import SIZES
from tests.support import check_cases as cases
from tests.support.both_cases import TYPES
from tests.support.check_cases import NULL, SEALED, TYPES_OF_SUMS, UNIT, WIDTHS, Stack
from tests.support.cuda_on_cpu import Library
from tests.support.verdict_cases import Judged, Trial, Verdicts


def vector_of(config: AcrossSums) -> int:
    return config.width // SIZES[config.dtype]


def _summing() -> Iterator[AcrossSums]:
    for a, (dtype, acc) in enumerate(TYPES_OF_SUMS):
        for b in range(4):
            given, words = divmod((a + b) % 4, 2)
            width = WIDTHS[dtype][b % len(WIDTHS[dtype])]
            t1 = max(32 * width // SIZES[dtype], (32, 64, 96, 256)[(a + b) % 4])
            ahead, out = (1, 2, 3, 6)[(a + 2 * b) % 4], (acc, "float64")[b % 2]
            yield AcrossSums(dtype, acc, bool(given), bool(words), False, out, width, t1, ahead)


def _judging() -> Iterator[AcrossSums]:
    i = 0
    for dtype, acc in TYPES_OF_SUMS:
        for out in ("", "float16", "bfloat16") if dtype == acc == "float32" else ("",):
            if out in ("", *TYPES):
                width = (16, 8)[i % 2] if out else WIDTHS[dtype][i % 2]
                t1 = max(32 * width // SIZES[dtype], (64, 256, 128)[i % 3])
                yield AcrossSums(dtype, acc, verdict=True, out=out, width=width, t1=t1, ahead=(2, 5, 3)[i % 3])
                i += 1


SUMMING, JUDGING = tuple(_summing()), tuple(_judging())


# ---- sums -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One pass over `batch` matrices (p, q) in slices; `gap` loads between rows of memory and more between matrices."""

    config: AcrossSums
    p: int
    q: int
    slice: int
    batch: int = 1
    gap: int = 0
    shared: bool = False

    def task(self, seed: int = 0) -> Task:
        config, rng = self.config, np.random.default_rng([seed, self.p, self.q])
        X = Stack.rows(self.batch, self.q, self.p, config.dtype, config.width, self.gap)
        X.x[...] = rng.standard_normal(X.x.shape) * 2.0 ** rng.integers(-3, 4, (self.batch, 1, self.p))
        vectors = 1 if self.shared else self.batch
        w = _apart(rng.standard_normal((vectors, self.q)).astype(config.acc))
        w2 = _apart(rng.random((vectors, self.q)).astype(config.acc)) if config.given else None
        return Task(self, X, w, w2)


class Task(NamedTuple):
    case: Case
    X: Stack
    w: np.ndarray
    w2: np.ndarray | None

    @property
    def lines(self) -> np.ndarray:
        """(batch, p, q)."""
        return self.X.x.transpose(0, 2, 1)


class Sums(NamedTuple):
    y: np.ndarray
    z: np.ndarray
    words: np.ndarray
    state: np.ndarray
    sizes: np.ndarray


def _apart(values: np.ndarray) -> np.ndarray:
    """Rows with NaN in between; ends with the last value."""
    r, n = values.shape
    memory = np.full((r, n + 3), np.nan, values.dtype)
    memory[:, :n] = values
    return memory[:, :n]


def _run(
    library: Library,
    config: AcrossSums,
    values: tuple[Any, ...],
    counts: tuple[int, int, int, int],
    order: str,
    name: str,
) -> None:
    """Launch for `counts` of lines, positions, positions of a group, products, in memory that is just large enough."""
    p, q, slice, batch = counts
    stripes, groups = -(-p // config.lines), -(-q // slice)
    size = stripes * groups * batch * (2 + config.words) * config.lines
    partial = np.full(size, np.nan).view(np.uint8) if groups > 1 else NULL
    tickets = np.zeros(stripes * batch, np.uint32)
    grid = (stripes, groups, batch)
    library.run(name or config.name, grid, config.t1, (p, q, *values, slice, partial, tickets), order=order)
    assert not tickets.any(), "tickets are not 0 again"


def summed(
    task: Task,
    library: Library,
    order: str = "forward",
    renamed: str = "",
    *,
    written: bool = False,
    outstanding: float = np.inf,
    expected: np.ndarray | None = None,
    flags: int = 0,
    parts: np.ndarray | None = None,
    encoded: int = cases.ENCODED,
) -> Sums:
    """Launch on a state with these flags; AssertionError where something is written that should stay."""
    (config, p, q, slice, batch, *_), X = task.case, task.X
    step, ld, _ = X.strides
    state = np.full(STATE, SEALED, np.uint64)
    state[0] = 5 | flags << 32
    guards = np.zeros((batch, p), np.uint64)
    y, z = (np.full((batch, p + 3), np.nan, config.out) for _ in "yz")
    words = np.full((batch, p + 3), SEALED, np.uint64)
    wanted: Any = NULL
    if expected is not None:
        wanted = np.full((batch, p + 3), SEALED, np.uint64)
        wanted[:, :p] = expected
    sizes = np.full((batch, 2), np.nan)
    given = (NULL, 0, NULL) if parts is None else (parts, parts.shape[1], sizes)
    values = (
        *(X.x, ld, step if batch > 1 else 0, task.w, NULL if task.w2 is None else task.w2, cases.step_of(task.w)),
        *(
            y,
            z,
            words if config.words else NULL,
            p + 3,
            float(outstanding),
            state,
            int(written),
            wanted,
            *given,
            guards,
            encoded,
        ),
    )
    _run(library, config, values, (p, q, slice, batch), order, renamed)
    assert np.isnan(y[:, p:]).all(), "an element between two products was written"
    assert np.isnan(z[:, p:]).all(), "an element between two products was written"
    assert np.array_equal(guards, cases.guards_of(y[:, :p], z[:, :p], cases.ENCODED)), "guards are wrong"
    assert (words[:, p if config.words else 0 :] == SEALED).all(), "a word between two products was written"
    return Sums(y[:, :p], z[:, :p], words[:, :p], state, sizes)


def exactly(task: Task) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums in longdouble, and how far rounding explains (Higham, 2002, sec. 3.1)."""
    config, q = task.case.config, task.case.q
    wide = [None if x is None else x.astype(np.longdouble)[:, None, :] for x in (task.w, task.w2)]
    X, w, w2 = cases.wide(task.lines), wide[0], wide[1]
    w2 = w * w if w2 is None else w2
    units = {"y": (config.ahead + 2) * UNIT[config.acc] + (q + 40) * UNIT["float64"], "z": (q + 10) * UNIT[config.acc]}
    found = {}
    with np.errstate(all="ignore"):
        for name, terms in (("y", X * w), ("z", X * X * w2)):
            bound = 1.01 * (units[name] + UNIT[config.out]) * abs(terms).sum(2)
            found[name] = terms.sum(2), bound + 2 * q * float(np.finfo(config.acc).tiny)
    return found


def faults(task: Task, sums: Sums) -> list[str]:
    found = cases.sum_faults(exactly(task), {"y": sums.y, "z": sums.z})
    if task.case.config.words and not np.array_equal(sums.words, cases.words_of(task.lines)):
        found.append("words are wrong")
    return found


def flag_faults(task: Task, library: Library, order: str = "forward", renamed: str = "") -> list[str]:
    """What is wrong with the sums, with the flags that they raise, with the state, and with sizes."""
    case, rng, tally = task.case, np.random.default_rng(1), cases.Tally(cases.ENCODED)

    def made(**options: Any) -> Sums:
        return summed(task, library, order, renamed, **options)

    sums = made()
    found = faults(task, sums)
    largest = float(sums.z.max())
    above, below = largest * (1 + 1e-6), largest * (1 - 1e-3)
    wanted = cases.words_of(task.lines)
    changed = wanted.copy()
    changed[-1, -1] ^= np.uint64(1)
    tried: list[tuple[dict[str, Any], int]] = [
        *(({}, 0), ({"outstanding": above}, 0), ({"outstanding": below}, 1)),
        *(({"flags": 3}, 3), ({"flags": 2, "outstanding": below, "written": True}, 3)),  # what is there stays
    ]
    if case.config.words:
        tried += [
            ({"expected": wanted}, 0),
            ({"expected": changed}, 2),
            ({"expected": changed, "outstanding": below}, 3),
        ]
    for options, flags in tried:
        state = made(**options).state
        if state[0] != 5 | flags << 32:
            found.append(f"word 0 of the state is {int(state[0]):#x}, not {5 | flags << 32:#x}")
        if (state[1:] != SEALED).any():
            found.append("other words of the state were written")
    made(encoded=tally.number)
    found += tally.faults()
    if case.config.given:
        return found
    parts = rng.random((case.batch, 137, 2))
    sizes = made(parts=parts).sizes
    if not (np.allclose(sizes[:, 0], parts[..., 0].sum(1), 1e-14) and (sizes[:, 1] == parts[..., 1].min(1)).all()):
        found.append("sizes are wrong")
    return found


def shapes(config: AcrossSums) -> list[tuple[int, int, int]]:
    """p, q, slice at which a kernel of these constants has its edges."""
    v, lines, warps = vector_of(config), config.lines, config.warps
    turn = warps * config.ahead
    return [
        *((v, 1, 1), (lines - v or v, max(1, warps - 1), 7), (lines, warps, 1), (lines + v, warps + 1, warps + 1)),
        *((v, turn - 1 or 1, 3 * turn), (2 * lines + v, turn, turn), (v, turn + 1, turn), (lines, 2 * turn, turn)),
        *((lines + v, 2 * turn + warps + 1, warps + 2), (2 * v, 3 * turn + 1, turn + 1), (v, 67, 4), (v, 67, 4 * turn)),
    ]


def some_cases(config: AcrossSums) -> Iterator[Case]:
    """Every shape, with batches, gaps and shared weights in turn."""
    for i, shape in enumerate(shapes(config)):
        yield Case(config, *shape, (1, 3, 2)[i % 3], (0, 1, 2, 3)[i % 4], i % 6 == 4)


# ---- verdicts -------------------------------------------------------------------------------------------------------


def judged_by_digits(trial: Trial, seed: int = 0) -> Judged:
    """The model's verdict; roots and ratios of the kernel have seven digits (kernels/check/verdict.cuh)."""
    judged = trial.judged(seed)
    return replace(judged, delta=judged.delta + 1e-6, slack=judged.slack + 1e-6 * (1 + judged.ratio))


def trials(config: AcrossSums) -> Iterator[Trial]:
    """The model's: of a kernel for contiguous lines, with the same types."""
    v, lines, warps = vector_of(config), config.lines, config.warps
    turn = warps * config.ahead
    like = LineSums(config.dtype, config.acc, verdict=True, out=config.out)
    sizes = [
        (v, 1),
        (7 * v, warps + 1),
        (2 * lines + v, turn - 1),
        (lines, turn + 3),
        (3 * v, 3 * turn + 2),
        (9 * v, 70),
    ]
    for i, (p, q) in enumerate(sizes):
        alpha, beta = ((1.0, 0.0), (-0.5, 0.0), (2.0, -1.5), (1.0, 0.75), (-3.0, 2.0), (1.0, 1.0))[i % 6]
        yield Trial(
            *(like, p, q, (2, 1, 3)[i % 3], (0, 2, 1)[i % 3], i % 4 == 3, alpha, beta),
            tf32=i % 2 == 1,
            underflow=i % 5 != 4,
        )


def verdicts(
    config: AcrossSums, judged: Judged, slice: int, library: Library, order: str, renamed: str = "", gap: int = 1
) -> Verdicts:
    """Launch; AssertionError where something is written that should stay."""
    terms, (batch, p), q = judged.terms, judged.u.shape, judged.w.shape[1]
    assert judged.C is not None
    C = Stack.rows(batch, q, p, config.dtype, config.width, gap)
    C.x[...] = judged.C.x.transpose(0, 2, 1)
    step, ld, _ = C.strides
    state = cases.account()
    tau, lines = np.full((batch, p), np.nan), np.full(batch * p, 0xFBFBFBFB, np.uint32)
    cast: tuple[Any, ...] = (NULL, 0, 0)
    D, around = None, b""
    if config.out:
        D = Stack.rows(batch, q, p, config.out, (2, 16)[gap % 2], 1)
        around = D.around
        cast = (D.x, D.strides[1], D.strides[0] if batch > 1 else 0)
    values = (
        *(C.x, ld, step if batch > 1 else 0, judged.w, NULL, cases.step_of(judged.w), terms.alpha, terms.beta),
        *(NULL if x is None else x for x in (terms.t, terms.p2, terms.t0, terms.added2)),
        *(terms.sizes, 2 if len(terms.sizes) > 1 else 0, *(float(x) for x in terms.factors), tau, lines, state),
        *(*terms.guards, *cast),
    )
    _run(library, config, values, (p, q, slice, batch), order, renamed)
    assert D is None or D.around == around, "an element between two rows of the copy was written"
    return Verdicts(tau, lines, state, None if D is None else D.x.transpose(0, 2, 1))


def slices(config: AcrossSums, q: int) -> tuple[int, ...]:
    """One group, and several."""
    return q, max(1, q // 3), config.warps * config.ahead
