"""Factor a matrix on a GPU without waiting for it: queue, and later read what the checks have found."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, to_host
from abft_tsm2.checksum.bounds import COMPUTED, COMPUTED_LEAST, FLOOR_TERMS, LEAST, USUAL, factored_bound
from abft_tsm2.linalg.device.certificate_config import full_counts
from abft_tsm2.linalg.device.plan import After, Kind, plan_of
from abft_tsm2.linalg.device.schedule import Step
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.evidence import Lines
from abft_tsm2.linalg.inputs import for_kernels
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.outcome import check_of
from abft_tsm2.report import SIDES, Check

ROW, COLUMN, JUDGED = 1, 2, 8
"""Status of a step, as kernels/factor/judge_step.cu leaves it: a row, or a column, is not right; it was judged."""
SAME_COLUMNS, SAME_ROWS = 4, 5  # of what kernels/factor/certificate.cuh counts


class DeviceFactorisation:
    """P A = L U, queued on the current stream of A's device.

    Parameters
    ----------
    A : (m, n) CuPy array
        float64 or float32, of any strides that are whole elements. Not to be written before the factorisation is done.
    encoded, checked : bool
        Whether the factors are certified at the end, and each step is checked on the way.
    after : callable, optional
        Called with each task when it has run, before the next is queued: for planting faults.

    Attributes
    ----------
    W : (m, n) CuPy array, column-major
    piv : (min(m, n),) int32 CuPy array
    """

    def __init__(self, A: Array, *, encoded: bool = True, checked: bool = False, after: After | None = None) -> None:
        import cupy

        A, (m, n) = for_kernels(A), A.shape
        self.kind = Kind.of(A, encoded=encoded, checked=checked)
        self._plan = plan_of(self.kind, A)
        self.W = cupy.empty((self._plan.ld, n), A.dtype, order="F")[:m]
        self.piv = cupy.empty(min(m, n), cupy.int32)
        self._sums = self._plan.borrow()
        self._stream = cupy.cuda.get_current_stream()
        self._plan(self._stream.ptr, A, self.W, self.piv, self._sums, after)

    def wait(self) -> None:
        """Wait until it is done. Synchronises with the host."""
        self._stream.synchronize()

    def release(self) -> None:
        """Give back the memory of the checks, of which nothing can be asked any more."""
        self._plan.give_back(self._sums)
        del self._sums

    # -- when it is done --

    @property
    def info(self) -> int:
        """Number, from 1, of the first pivot that is exactly zero; else 0."""
        return int(self._sums.on_host("info", np.int32)[0])

    @property
    def clean(self) -> bool:
        """Whether nothing is suspected."""
        return self.certified and not any(lines.any() for lines in self.suspects)

    @property
    def certified(self) -> bool:
        """Whether every check of the finished factors was made, and found everything right."""
        needed = list(full_counts(self.kind.m, self.kind.n))
        if not self.kind.checked:
            needed[SAME_COLUMNS] = needed[SAME_ROWS] = 0
        counts: list[int] = self._sums.on_host("verified", np.uint64).tolist()
        return counts == needed

    @functools.cached_property
    def suspects(self) -> Lines:
        """Rows, in their final order, and columns that the steps' checks have found wrong, or have not judged."""
        m, n = self.kind.m, self.kind.n
        masks = np.zeros(m, bool), np.zeros(n, bool)
        if self.kind.checked:
            statuses: list[int] = self._sums.on_host("status", np.int64).tolist()
            for step, status in zip(self._plan.schedule.steps, statuses, strict=True):
                if status != JUDGED:
                    for side, mask in enumerate(masks):
                        mask[step.j : step.j1] = self._suspected(step, status, side)
        return masks

    def _suspected(self, step: Step, status: int, side: int) -> Any:
        """Which rows (side 0) or columns of a step are not fine, as `LuChecksums` judges them: where norms that were
        estimated do not do, by computed ones."""
        if status & ~(ROW | COLUMN) != JUDGED:
            return True
        if not status & (ROW, COLUMN)[side]:
            return False
        m, n, sums = self.kind.m, self.kind.n, self._sums
        first = (0, max(m, n))[side]
        at = slice(first + step.j, first + step.j1)
        residual, bound = (sums.on_host(f"step_{name}")[at] for name in ("residuals", "bounds"))
        squares = sums.on_host(("Ly", "gU")[side])[(m, n)[side] :]
        runs = LineCheck.relative_to_median(residual, bound, USUAL, LEAST).suspected
        norms = factored_bound(FLOATS[self.kind.dtype], np.sqrt(squares[step.j : step.j1]), -FLOOR_TERMS, 0.0)
        return ~LineCheck.relative_in_runs(residual, COMPUTED * (bound + norms), runs, USUAL, COMPUTED_LEAST).ok

    def checks(self) -> tuple[Check, ...]:
        """What the certificate says in a report."""
        found = []
        for side, weight, first, lines in (
            (SIDES[0], "v", 0, self.kind.m),
            (SIDES[1], "w", max(self.kind.m, self.kind.n), self.kind.n),
        ):
            residual, bound = (self._sums.on_host(name)[first : first + lines] for name in ("residuals", "bounds"))
            found.append(check_of(side, residual, bound, self._sums.on_host(weight)))
        return tuple(found)

    def encoding(self) -> MatrixChecksums:
        """The checksums of A, for the careful checks that follow a suspicion. Synchronises with the host."""
        sums, sizes = self._sums, []
        for name, lines in (("row_largest", self.kind.m), ("column_largest", self.kind.n)):
            with np.errstate(divide="ignore"):
                sizes.append(np.log2(to_host(sums.on_device(name, self.kind.dtype)[:lines]).astype(np.float64)))
        arrays = (sums.on_device(name).copy() for name in ("w", "v", "S", "Z", "row_floor", "column_floor"))
        return MatrixChecksums(*arrays, *sizes)
