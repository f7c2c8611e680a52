"""Factor a matrix on a GPU without waiting for it: queue, and later read what the checks have found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.linalg.device.buffers import Sums, leading_dimension
from abft_tsm2.linalg.certificate_config import full_counts
from abft_tsm2.linalg.device.plan import Kind, plan_of
from abft_tsm2.linalg.device.schedule import Task
from abft_tsm2.linalg.encode import MatrixChecksums
from abft_tsm2.linalg.outcome import check_of
from abft_tsm2.report import SIDES, Check

SERVED = "float64", "float32"
_tokens = itertools.count(1)


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

    def __init__(
        self, A: Array, *, encoded: bool = True, checked: bool = False, after: Callable[[Task], None] | None = None
    ) -> None:
        import cupy

        m, n = A.shape
        dtype = dtype_name(A.dtype)
        self.A, self.kind = A, Kind(m, n, dtype, encoded=encoded, checked=checked)
        plan = plan_of(self.kind)
        self._steps = len(plan.schedule.steps)
        self.W = cupy.empty((leading_dimension(m, A.itemsize), n), dtype, order="F")[:m]
        self.piv = cupy.empty(min(m, n), cupy.int32)
        self.sums = Sums(m, n, self._steps)
        self.token = next(_tokens)
        where = self.sums.addresses() | {
            "A": A.data.ptr,
            "down": A.strides[0] // A.itemsize,
            "along": A.strides[1] // A.itemsize,
            "W": self.W.data.ptr,
            "piv": self.piv.data.ptr,
            "token": self.token,
        }
        self._stream = cupy.cuda.get_current_stream()
        self._after = after
        plan(self._stream.ptr, where, A, self.sums, after and (lambda task: after(task)))

    def wait(self) -> None:
        """Wait until it is done. Synchronises with the host."""
        self._stream.synchronize()

    # -- when it is done --

    @property
    def info(self) -> int:
        """Number, from 1, of the first pivot that is exactly zero; else 0."""
        return int(self.sums.on_host("info", np.int32)[0])

    @property
    def clean(self) -> bool:
        """Whether every check was made, and found everything right."""
        counts = self.sums.on_host("verified", np.uint64).tolist()
        full = full_counts(self.kind.m, self.kind.n)
        kept = (4, 5) if not self.kind.checked else ()
        if any(found != needed for i, (found, needed) in enumerate(zip(counts, full, strict=True)) if i not in kept):
            return False
        return not self.kind.checked or bool(np.all(self.sums.on_host("status", np.int64) == 8 * self.token))

    def checks(self) -> tuple[Check, ...]:
        """What the certificate says in a report."""
        found = []
        for side, weight, first, lines in (
            (SIDES[0], "v", 0, self.kind.m),
            (SIDES[1], "w", max(self.kind.m, self.kind.n), self.kind.n),
        ):
            residual, bound = (self.sums.on_host(name)[first : first + lines] for name in ("residuals", "bounds"))
            found.append(check_of(side, residual, bound, self.sums.on_host(weight)))
        return tuple(found)

    def encoding(self) -> MatrixChecksums:
        """The checksums of A, for the careful checks that follow a suspicion. Synchronises with the host."""
        sums, encoded = self.sums, self.sums.encoding
        sizes = []
        for name, lines in (("row_largest", self.kind.m), ("column_largest", self.kind.n)):
            with np.errstate(divide="ignore"):
                sizes.append(np.log2(sums.on_device(name, self.kind.dtype)[:lines].get().astype(np.float64)))
        v, w, rows, columns = (sums.on_device(name).copy() for name in ("v", "w", "row_floor", "column_floor"))
        S, Z = encoded.rows[:, 0].copy(), encoded.columns[0].copy()
        return MatrixChecksums(w, v, S, Z, rows, columns, sizes[0], sizes[1])
