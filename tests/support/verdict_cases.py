"""Verdicts for the kernels that give them (line_sums, judge), and the judge of those.

The bounds are those of abft_tsm2/checksum/bounds.py. Residuals are planted at a known part of the bound,
negative ones too, and between them lines that are zero or hold NaN or Inf, whose bound is not finite, or whose norm is
above the largest. `judge` takes sums as they are given, and so residuals one part in 10^6 off the bound: square roots
of a kernel and its ratios have seven digits (ROOT, RATIO). A joint kernel sums rows of L, which are made for what is
expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.device.kernels import JudgeKernel, LineSums, sums_of
from abft_tsm2.core.problem import SIZES
from tests.support.both_cases import TYPES
from tests.support.check_cases import (
    CALL,
    CALL_WORD,
    ENCODED,
    FAINTEST,
    JUDGED_WORD,
    NULL,
    SEALED,
    TYPES_OF_SUMS,
    UNBOUNDED_WORD,
    UNIT,
    WIDTHS,
    Launch,
    Stack,
    Sums,
    Task,
    account,
    exactly,
    faults,
    guards_of,
    laid_out,
    step_of,
    wide,
)
from tests.support.planting import bits


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


def _joining() -> Iterator[LineSums]:
    """Any two of a team's warps, its rows and the vectors ahead meet."""
    for dtype, width, t1, team, rows, ahead in (
        *(("float16", 16, 256, 2, 2, 1), ("float16", 2, 128, 1, 4, 2), ("float16", 8, 512, 4, 1, 1)),
        *(("bfloat16", 16, 256, 1, 2, 1), ("bfloat16", 4, 256, 4, 4, 2)),
        *(("float32", 16, 128, 2, 1, 2), ("float32", 4, 64, 1, 1, 2)),
        *(("float64", 16, 256, 4, 2, 2), ("float64", 8, 256, 2, 4, 1)),
    ):
        if dtype in TYPES:
            shape = {"width": width, "t1": t1, "team": team, "rows": rows, "ahead": ahead}
            yield LineSums(dtype, sums_of(dtype), verdict=True, out="", joint=True, **shape)


def apart(config: LineSums) -> tuple[LineSums, LineSums]:
    """What does the work of a joint kernel in two passes: the sums of L, the verdict on C."""
    judging = replace(config, joint=False)
    return replace(judging, verdict=False, given=True, words=True, out="float64"), judging


JUDGING, JOINED = tuple(_judging()), tuple(_joining())
JUDGE = JudgeKernel()
RATIOS = (0.0, 0.3, -0.8, 1.3, 0.8, -3.0, 1e-3, 50.0, -0.6)  # of a residual to its bound
NEAR = (1 - 1e-6, 1 + 1e-6, -1 + 1e-6, -1 - 1e-6, 0.5, 1 + 1e-6, 0.0)
ROOT = 2.0**-23  # of kernels/check/verdict.cuh: half the rounding of its argument to float32, and that of the root
RATIO = 3 * 2.0**-24  # both sides are rounded to float32, and so is the quotient
SPECIAL = (
    *("nan in C", "inf in C", "zero", "zero but residual", "infinite squares", "nan squares", "nan prediction"),
    *("infinite prediction", "norm above", "norm just below", "infinite addend"),
)


class Terms(NamedTuple):
    """VERDICT_ARGUMENTS of kernels/check/verdict.cuh: numbers, and arrays (batch, p)."""

    alpha: float
    beta: float
    t: np.ndarray
    p2: np.ndarray
    t0: np.ndarray | None
    added2: np.ndarray | None
    sizes: np.ndarray
    factors: bounds.BoundFactors

    @property
    def guards(self) -> tuple[Any, ...]:
        """Of t and p2, of t0 and added2, and the numbers of the calls."""
        of_added = NULL if self.t0 is None or self.added2 is None else guards_of(self.t0, self.added2, ENCODED)
        return guards_of(self.t, self.p2, ENCODED), of_added, ENCODED, CALL


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
    left : Task or None
        What a joint kernel has t and p2 from.
    """

    config: LineSums | JudgeKernel
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
    left: Task | None = None


@dataclass(frozen=True)
class Trial:
    """One verdict on lines of RATIOS or NEAR in turn, and of SPECIAL in between."""

    config: LineSums | JudgeKernel
    p: int
    q: int
    batch: int = 1
    gap: int = 0
    shared: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    special: bool = True
    tf32: bool = False
    underflow: float | None = None  # in place of the arithmetic's: the bound of zero is zero, or subnormal
    near: bool = False  # residuals of NEAR
    copied: int = 2  # as in Judged
    left_columns: int = 1  # of L, for a joint kernel

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
        w = laid_out((sign * (1 + rng.integers(0, 1 << 22, (vectors, self.q)) / (1 << 23))).astype(acc))

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
        if self.underflow is not None:
            factors = factors._replace(underflow=self.underflow)

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
        left, longest, left_norm = None, self.q, 0.0
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
            if isinstance(config, LineSums) and config.joint:
                left, longest = self._left(t, p2, rng), max(self.q, self.left_columns)
                (t, _), (p2, _) = exactly(left).values()
                left_norm = abs(alpha) * np.sqrt(((wide(left.X.x) * wide(left.w)[:, None, :]) ** 2).sum(2))
            norm = np.sqrt(squares)
            tau, largest = judged_by(p2, added2, norm)
            expected = alpha * t.astype(np.longdouble)
            scale = abs(u) + abs(expected)
            if t0 is not None:
                expected, scale = expected + beta * t0, scale + abs(beta * t0)
            residual = abs(u - expected)
            v, team = (16 // SIZES[self.dtype], config.team) if isinstance(config, LineSums) else (0, 1)
            depth = longest // (32 * team) + v + 10 + team if lines else 0
            noise = 4 * 2.0**-53 * scale
            if lines:
                noise = noise + 4 * (norm + left_norm) * (
                    UNIT["float64"] * np.sqrt(depth) + (np.sqrt(v) * UNIT["float32"] if acc == "float32" else 0)
                )
            delta = depth * UNIT[acc] + 1e-14 + ROOT
            ok = (residual <= tau) & (tau >= FAINTEST) & np.isfinite(tau) & (norm <= largest)
            near = (abs(residual - tau) <= noise + delta * tau) | (abs(norm - largest) <= delta * largest)
            near &= np.isfinite(tau) & np.isfinite(residual)
            zero = (tau == 0) & (residual == 0)
            ratio = np.where(tau > 0, residual / tau, 0)
            slack = np.where(tau > 0, noise / tau, 0) + (delta + 1.01 * RATIO) * ratio
        if isinstance(config, LineSums) and config.out:
            _ties(C.x, named == "", config.out, rng)
        terms = Terms(alpha, beta, *(x.astype(np.float64) for x in (t, p2)), t0, added2, sizes, factors)
        decided = ~near | zero
        sums = (C if lines else None, w, u, squares)
        return Judged(config, *sums, terms, tau, ok, decided, ratio, slack, delta, self.copied, left)

    def _left(self, t: np.ndarray, p2: np.ndarray, rng: np.random.Generator) -> Task:
        """L, s and s2 with L s and (L o L) s2 as near to t and p2 as the digits of L allow: every other column makes up
        t, where squares weigh little, the others what is left of p2. Where t or p2 is not finite, so are these."""
        assert isinstance(self.config, LineSums)
        (batch, p), k, config = t.shape, self.left_columns, self.config
        vectors, second = 1 if self.shared else batch, np.arange(k) % 2 == 1
        s = rng.choice([-1.0, 1.0], (vectors, k)) * rng.uniform(1, 2, (vectors, k)) * np.where(second, 2.0**-6, 1)
        s2 = rng.uniform(1, 2, (vectors, k)) * np.where(second | (k == 1), 1, 2.0**-14)
        s, s2 = (laid_out(x.astype(config.acc)) for x in (s, s2))
        x = (0.1 + abs(rng.standard_normal((batch, p, k)))) * np.sign(s)[:, None, :]
        x[:, :, 2:] *= rng.choice([1, 1, 1, 1, -1], (batch, p, k))[:, :, 2:]
        part, square = x * s[:, None, :], x**2 * s2[:, None, :]
        of_second = square[:, :, second].sum(2) if k > 1 else np.inf
        more = np.zeros((batch, p))
        for _ in range(3):
            most = (t - more * part[:, :, second].sum(2)) / part[:, :, ~second].sum(2)
            more = np.sqrt(np.maximum(p2 - most**2 * square[:, :, ~second].sum(2), 0) / of_second)
        L = Stack.rows(batch, p, k, self.dtype, config.width, self.gap + 1)
        x = x * np.where(second, more[:, :, None], most[:, :, None])
        L.x[...] = np.where(abs(x) < (2.0**-50 if config.acc == "float32" else 0), 0, x)  # squares keep their digits
        return Task(apart(config)[0], L, s, s2)


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
    """What a launch made: tau (batch, p), the lines that it lists, and the state; of L t, p2, words and guards."""

    tau: np.ndarray
    lines: np.ndarray
    state: np.ndarray
    D: np.ndarray | None
    left: tuple[np.ndarray, ...] = ()


def verdicts(judged: Judged, launch: Launch, state: np.ndarray | None = None, guards: tuple[Any, ...] = ()) -> Verdicts:
    """Launch; `guards`: those of other terms, of what was encoded."""
    config, terms = judged.config, judged.terms
    batch, p = judged.u.shape
    q = judged.w.shape[1]
    state = account() if state is None else state
    tau, lines = np.full((batch, p), np.nan), np.full(batch * p, 0xFBFBFBFB, np.uint32)
    sizes, of_products = terms.sizes, (terms.t, terms.p2)
    of_sums, *others = guards or terms.guards
    if judged.left is not None:  # nothing else has them
        of_products, of_sums = (NULL, NULL), NULL
    arguments: tuple[Any, ...] = (
        *(terms.alpha, terms.beta, *of_products, *(NULL if x is None else x for x in (terms.t0, terms.added2))),
        *(
            sizes,
            2 if len(sizes) > 1 else 0,
            *(float(x) for x in terms.factors),
            tau,
            lines,
            state,
            *(of_sums, *others),
        ),
    )
    if isinstance(config, JudgeKernel):
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
    left: tuple[np.ndarray, ...] = ()
    beside: tuple[Any, ...] = ()
    if judged.left is not None:
        _, L, s, s2 = judged.left
        left = tuple(np.full((batch, p), value) for value in (np.nan, np.nan, np.uint64(SEALED), np.uint64(SEALED)))
        beside = (L.x, L.x.shape[2], L.strides[1], L.strides[0] if batch > 1 else 0, s, s2, step_of(s), *left)
    launch(
        config.name,
        (-(-p // config.lines), batch),
        config.t1,
        (p, q, judged.C.x, ld, step if batch > 1 else 0, judged.w, NULL, step_of(judged.w), *arguments, *cast, *beside),
    )
    assert D is None or D.around == around, "an element between two rows of the copy was written"
    return Verdicts(tau, lines, state, None if D is None else D.x, left)


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
    if (
        made.state[0] >> 32 != 0
        or (np.delete(made.state, [0, 1, CALL_WORD, JUDGED_WORD, UNBOUNDED_WORD]) != SEALED).any()
    ):
        found.append("other words of the state were written")
    unbounded = int((~np.isfinite(tau.ravel()[[x for x in listed if x < tau.size]])).sum())
    if int(made.state[UNBOUNDED_WORD] - np.uint64(SEALED)) != unbounded:
        found.append(f"{unbounded} lines fail without a bound, and others are counted")
    if int(made.state[CALL_WORD]) != CALL or int(made.state[JUDGED_WORD]) != tau.size:
        found.append(f"{made.state[JUDGED_WORD]} lines are counted for call {made.state[CALL_WORD]}")
    if judged.left is not None:
        t, p2, words, guards = made.left
        found += faults(judged.left, Sums(t, p2, words, made.state, judged.terms.sizes))
        if not np.array_equal(guards, guards_of(t, p2, ENCODED)):
            found.append("guards are wrong")
    if made.D is not None:
        assert judged.C is not None
        with np.errstate(all="ignore"):
            copy = judged.C.x.astype(made.D.dtype)
        both = np.isnan(copy.astype(np.float32)) & np.isnan(made.D.astype(np.float32))
        if not ((bits(copy) == bits(made.D)) | both).all():
            place = tuple(int(i) for i in np.argwhere((bits(copy) != bits(made.D)) & ~both)[0])
            found.append(f"the copy is wrong at {place}: {made.D[place]}, not {copy[place]} of {judged.C.x[place]}")
    return found


def trials(config: LineSums | JudgeKernel) -> Iterator[Trial]:
    """Batches, gaps, alpha and beta in turn."""
    columns = [1]
    if isinstance(config, JudgeKernel):
        sizes = [(1, 3), (5, 40), (config.t1 - 1, 9), (config.t1 + 1, 20), (600, 8)]
    else:
        v, lines = 16 // SIZES[config.dtype], config.lines
        stride = 32 * config.team * v
        sizes = [(1, 1), (7, v + 1), (2 * lines + 1, stride - 1), (lines, stride + v), (30, config.ahead * stride + 3)]
        sizes += [(41, 2 * v + 1)]
        columns = [1, stride + v, 2 * v + 1, config.ahead * stride + 3, v - 1 or 3, stride - 1, 1, 2 * v]
        sizes += [(13, 5), (5, 1)] if config.joint else []
    for i, (p, q) in enumerate(sizes):
        alpha, beta = ((1.0, 0.0), (-0.5, 0.0), (2.0, -1.5), (1.0, 0.75), (-3.0, 2.0), (1.0, 1.0))[i % 6]
        yield Trial(
            *(config, p, q, (2, 1, 3)[i % 3], (0, 2, 1)[i % 3], i % 4 == 3, alpha, beta),
            left_columns=columns[i % len(columns)],
            tf32=i % 2 == 1,
            near=isinstance(config, JudgeKernel) and i % 2 == 1,
            underflow={4: 0.0, 2: 2.0**-1045}.get(i % 5),
            copied=(2, 8, 4, 0)[i % 4],
        )
