"""What the kernel that repairs flagged lines (kernels/repair/repair.cu) is called with, and the judge of what it made
of that.

Nothing here runs a kernel; `Work.arguments` are those of a launch, NumPy arrays for pointers and `NULL` where there is
none. `tests.support.repair_faults` has the products, each with a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.checksum import bounds
from abft_tsm2.checksum.device.check import repair_bytes
from abft_tsm2.checksum.device.kernels import RepairKernel
from abft_tsm2.core.generated import splitmix64
from tests.support.check_cases import CALL_WORD, FAINTEST, JUDGED_WORD, guards_of
from tests.support.cuda_on_cpu.library import _Address
from tests.support.planting import bits

NULL = _Address(0)
WORDS = 160
CAP, TOLD = 2048, 39  # lines, and faults that the record names
SHORT = 128  # columns of which every element is looked at
CLEAN, REPAIRED, UNRESOLVED, CLEARED = 0, 1, 2, 3
CALL, ENCODED = (1 << 40) + 77, (1 << 40) + 76  # numbers of calls
DIGEST = 127  # of the record: what was encoded
SEALED = np.uint64(0xABCDABCDABCDABCD)  # in words of the record that were not written


@dataclass
class Work:
    """One call: operands, what the check has left behind, and what the kernel is to write. C has faults already."""

    config: RepairKernel
    L: np.ndarray
    R: np.ndarray
    C: np.ndarray
    cast: np.ndarray | None
    C0: np.ndarray | None
    alpha: float
    beta: float
    v: np.ndarray
    clean: np.ndarray  # C without faults
    exact: np.ndarray  # in the widest type there is
    checks: dict[str, Any]
    wrong: np.ndarray  # where C is wrong
    outcome: int = REPAIRED
    most: int = 1 << 40  # lines that are repaired
    written: bool | None = None  # whether what is wrong is replaced; by default where all is repaired
    changed: bool = False  # L or R, after their words were summed
    freely: np.ndarray | None = None  # what may be replaced by the product without being told, or not
    completed: bool = True  # whether all of `freely` is the product afterwards
    lines: list[int] | None = None  # flagged ones; by default those that the check flags
    words: bool = True
    off: int = 0
    scratch: int | None = None
    state: np.ndarray = field(default_factory=lambda: np.zeros(32, np.uint64))
    record: np.ndarray = field(default_factory=lambda: np.full(WORDS, SEALED, np.uint64))

    def bound(self, C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residuals of all lines, and their bounds."""
        c = self.checks
        with np.errstate(all="ignore"):
            weighted = C.astype(np.float64) * self.v[:, None, :].astype(np.float64)
            residual = abs(weighted.sum(2) - self.alpha * c["t"] - (self.beta * c["t0"] if self.beta else 0))
            added = abs(self.beta) * np.sqrt(c["added2"]) if self.beta else None
            underflow = c["underflow"] * c["sizes"][: len(self.v), :1]
            products = abs(self.alpha) * np.sqrt(c["p2"])
            n = C.shape[2]
            tau = bounds.statistical_bound(
                *(np, c["arithmetic"], c["terms"], n),
                products=products,
                stored=np.sqrt((weighted**2).sum(2)),
                added=added,
                underflow=underflow,
            )
        return residual, tau

    def far_off(self, C: np.ndarray, units: float) -> np.ndarray:
        """Where C is off by more than so many units of roundoff of the sum of all terms' magnitudes."""
        a, exact = self.checks["arithmetic"], self.exact.astype(np.float64)
        added = 0.0 if self.C0 is None else abs(self.beta * self.C0.astype(np.float64))
        size = abs(self.alpha) * abs(self.L.astype(np.float64)) @ abs(self.R.astype(np.float64)) + added
        excess = abs(C - exact) - a.u_out * (abs(exact) + added) - self.checks["underflow"]
        return np.asarray(~(excess <= units * a.u * size))

    @property
    def flagged(self) -> list[int]:
        if self.lines is not None:
            return self.lines
        residual, tau = self.bound(self.C)
        with np.errstate(invalid="ignore"):
            return [int(i) for i in np.flatnonzero(~((residual <= tau) & (tau >= FAINTEST) & np.isfinite(tau)).ravel())]

    def guard(self) -> None:
        """Take guards of what must hold, unless they are there."""
        c = self.checks
        for name, parts in (("guards", ("t", "p2")), ("guards0", ("t0", "added2"))):
            if name not in c and parts[0] in c:
                c[name] = guards_of(*(c[part] for part in parts), ENCODED)

    def digest(self) -> int:
        """What t and the sums of bits add up to, with multipliers of their own."""
        c, total = self.checks, 0
        names = ["t", "p2", "left_words", "t0", "added2", "added_words", "right_words"]
        for which, name in enumerate(names):
            if name not in c or (not self.words and name.endswith("words")):
                continue
            for i, bits_of in enumerate(np.ascontiguousarray(c[name]).view(np.uint64).ravel().tolist()):
                one = splitmix64(0, np.array([i + 1 + (which << 48)], np.uint64))
                total += (int(one[0]) | 1) * bits_of
        return total % 2**64

    def arguments(self) -> tuple[Any, ...]:
        c, a, flagged = self.checks, self.checks["arithmetic"], self.flagged
        batch, m, n = self.C.shape
        k = self.L.shape[2]
        order = np.random.default_rng(7).permutation(len(flagged))
        lines = np.asarray(flagged, np.uint32)[order] if flagged else np.zeros(1, np.uint32)
        self.state[0] = len(flagged) | self.off << 32
        self.state[1] = 0x3F000000 << 32 | (m * batch - 1)
        self.state[CALL_WORD], self.state[JUDGED_WORD] = CALL, m * batch
        self.guard()
        tau = self.bound(self.C)[1].ravel()
        terms = c["terms"]
        factor, root = bounds.statistical_factor(a, terms, n), 1.01 * float(np.sqrt(terms))
        size = repair_bytes(self.config, k, n) if self.scratch is None else self.scratch
        scratch = np.full(size + 16, 255, np.uint8)
        scratch = scratch[-scratch.ctypes.data % 16 :][:size]
        beta = self.beta != 0

        def strided(x: np.ndarray | None) -> tuple[Any, ...]:
            if x is None:
                return (NULL, 0, 0, 0)
            step, rows, columns = (s // x.itemsize for s in x.strides)
            return (x, rows, columns, step if len(x) > 1 else 0)

        return (
            *(m, k, n, batch, *strided(self.L), *strided(self.R), *strided(self.C), *strided(self.cast)),
            *(*strided(self.C0), self.alpha, self.beta, self.v, n if len(self.v) > 1 else 0),
            *(c["t"], c["t0"] if beta else NULL, c["p2"], c["added2"] if beta else NULL, tau),
            *(factor, 0.0, 4 * a.u_out, root, c["guards"], c["guards0"] if beta else NULL, ENCODED),
            *((c["left_words"], c["right_words"]) if self.words else (NULL, NULL)),
            c["added_words"] if self.words and beta else NULL,
            *(k if len(c["right_words"]) > 1 else 0, a.u, bounds.rigorous_factor(a, terms), a.u_out, c["underflow"]),
            *(c["sizes"], self.most, lines, self.state, scratch, size, CALL, self.record, NULL, 1),
        )


def judged(work: Work, launch: Callable[[tuple[Any, ...]], None]) -> list[str]:
    """Launches the kernel; what is wrong with what it has left in C, in its cast and in the record."""
    before, flagged, tau = work.C.copy(), len(work.flagged), work.bound(work.C)[1].ravel()
    launch(work.arguments())
    found: list[str] = []

    def expect(what: str, value: Any, wanted: Any) -> None:
        if value != wanted:
            found.append(f"{what} is {value}, not {wanted}")

    record, C, wrong = work.record, work.C, work.wrong
    batch, m, n = C.shape
    written = wrong if (work.outcome == REPAIRED if work.written is None else work.written) else np.zeros_like(wrong)
    kept = bits(C) == bits(before)
    free = np.zeros_like(wrong) if work.freely is None or not written.any() else work.freely
    if not kept[~(written | free)].all():
        found.append(f"{np.count_nonzero(~kept & ~(written | free))} element(s) were written that should stay")
    best = work.exact.astype(np.float64)
    with np.errstate(all="ignore"):
        if work.config.out == "float64":  # the kernel's own sum has roundings, too
            near = abs(C - best) <= 2.0**-53 * (abs(best) + 8 * abs(work.L) @ abs(work.R))
        else:  # 16 bits by way of float32
            near = best.astype(np.float32).astype(C.dtype) == C
        if work.cast is not None:
            expect("the cast", bits(work.cast).tolist(), bits(C.astype(work.cast.dtype)).tolist())
    if not near[written | (free & work.completed)].all():
        found.append(f"{np.count_nonzero(~near & (written | free))} repaired element(s) are not the product")
    expect("the stamp", int(record[0]), CALL)
    expect("the number of lines", int(record[1]) & 0xFFFFFFFF, flagged)
    expect("the count of lines that were judged", int(record[1]) >> 32, batch * m)
    expect("the call that was judged", int(record[7]) >> 8, CALL)
    expect("the outcome", int(record[2]), work.outcome)
    expect("the closest", int(record[3]), int(work.state[1]))
    expect("the digest", int(record[DIGEST]), work.digest() if work.outcome == UNRESOLVED else int(record[DIGEST]))
    expect("bounds", record[128:].tobytes(), tau[(2 * np.arange(32) + 1) * tau.size // 64].tobytes())
    expect("the least weight", float(record[5:6].view(np.float64)[0]), float(work.checks["sizes"][:, 1].min()))
    expect("the flags", int(record[7]) & 0xFF, work.off | 2 * work.changed)
    places = [tuple(place) for place in np.argwhere(written.reshape(batch * m, n)).tolist()]
    if (free & written).any():
        if work.completed and work.config.dtype in ("float32", "float64"):
            told = max(8.0, 2 * float(np.sqrt(work.L.shape[2])))  # of a line that is wrong all over
            least, most = (int((work.far_off(before, units) & (free | written)).sum()) for units in (1.1 * told, 7))
            if not least <= record[6] <= most:
                found.append(f"the number of wrong elements is {record[6]}, not {least} to {most}")
        return found
    expect("the number of wrong elements", int(record[6]), len(places))
    faults, told = record[8 : 8 + 3 * TOLD].reshape(TOLD, 3), min(TOLD, len(places))
    named = [(int(x) & 0xFFFFFFFF, int(x) >> 32) for x in faults[:told, 0]]
    expect("places", named, places[:told])  # the first lines' also where not all are kept: their tickets come first
    for number, x in ((1, before), (2, C)):
        values = np.array([x.reshape(batch * m, n)[place] for place in places[:told]], np.float64)
        got = faults[:told, number].copy().view(np.float64)
        expect(f"value {number} of the faults", np.array_equal(got, values, equal_nan=True), True)
    if not (faults[told:] == SEALED).all():
        found.append("more faults were written than there are")
    return found
