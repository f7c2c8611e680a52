"""Factor a matrix on a GPU: queue it without waiting, and later read what the checks have found; or read the verdicts
of steps while later ones are under way, and repair what is wrong then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array, to_host
from abft_tsm2.core import faultpoint
from abft_tsm2.core.problem import SIZES
from abft_tsm2.linalg.device.buffers import KEPT
from abft_tsm2.linalg.device.certificate_config import SAME_COLUMNS, SAME_ROWS, full_counts
from abft_tsm2.linalg.device.host_copy import HostCopy
from abft_tsm2.linalg.device.places import FactorPlaces
from abft_tsm2.linalg.device.plan import Kind, plan_of
from abft_tsm2.linalg.device.queued import After, QueuedRun
from abft_tsm2.linalg.device.repair import JUDGED, DeviceRepair, suspected
from abft_tsm2.linalg.device.schedule import PANEL, SETTLED, STAGES, Step, Task
from abft_tsm2.linalg.encode import Bits, MatrixChecksums
from abft_tsm2.linalg.evidence import Lines
from abft_tsm2.linalg.inputs import for_kernels
from abft_tsm2.linalg.outcome import ROUNDS, Findings, check_of
from abft_tsm2.report import SIDES, Check

AHEAD, DOUBTED = 2, 3
"""Steps that are queued while the verdict on the first of them is awaited, and while a host looks at a doubt, so that a
GPU does not wait for it."""
assert KEPT > DOUBTED, "what is carried into a step is kept until its verdict is known"
assert SETTLED >= DOUBTED, "no step is done again before columns that are settled"


class DeviceFactorisation:
    """P A = L U, queued on the current stream of A's device.

    Parameters
    ----------
    A : (m, n) CuPy array
        float64 or float32, of any strides that are whole elements. Not to be written before the factorisation is done.
    host : HostCopy, optional
        Of A, whose memory the factors take then: A is brought there first where it is not there any more.
    encoded, checked : bool
        Whether the factors are certified at the end, and each step is checked on the way.
    findings : Findings, optional
        Where faults are noted that are repaired on the way. Then `wait` queues most of it, for it reads the verdict on
        each checked step; without it, all is queued here.
    after : callable, optional
        Called with each task when it has run, before the next is queued: for planting faults.
    hook : callable, optional
        The ``on_stage`` of `protected_lu_factor`.

    Attributes
    ----------
    W : (m, n) CuPy array, column-major
    piv : (min(m, n),) int32 CuPy array
    """

    def __init__(
        self,
        A: Array,
        *,
        host: HostCopy | None = None,
        encoded: bool = True,
        checked: bool = False,
        findings: Findings | None = None,
        after: After | None = None,
        hook: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        import cupy

        A, (m, n) = host.memory if host else for_kernels(A), A.shape
        tracked, staged = checked and findings is not None, hook is not None
        how = {"encoded": encoded, "checked": checked, "tracked": tracked, "staged": staged}
        self.kind = Kind.of(A, in_place=host is not None, **how)
        try:
            self._plan = plan_of(self.kind, A)
            self.W = A if host else _rows_of(m, cupy.empty((self._plan.ld, n), A.dtype, order="F"))
            self.piv = cupy.empty(min(m, n), cupy.int32)
            self._sums = self._plan.borrow()
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise MemoryError(_too_large(self.kind)) from error
        self._host, self._hook = host, hook
        self._A = host.array if host else A  # what repairs read
        self._stream = cupy.cuda.get_current_stream()
        if host:
            host.begin(self._stream.ptr)
        after = after if hook is None else self._staged
        places = None
        if after is None and (planter := faultpoint.current()) is not None:
            arrays = {"W": self.W, "piv": self._sums.on_device("piv", np.int32)[: min(m, n)], "A": self._A}
            places = FactorPlaces(planter, self._plan.schedule, arrays)
        self._run = QueuedRun(self._plan, self._stream.ptr, A, self.W, self.piv, self._sums, after, places)
        self._repair: DeviceRepair | None = None
        self._unchanged: dict[str, int] = {}
        if tracked and findings is not None:
            self._repair = DeviceRepair(self._plan, self._run, self._A, self.W, self._sums, findings)
        else:
            self._run.all()

    def wait(self) -> None:
        """Wait until it is done. Synchronises with the host."""
        if self._repair:
            try:
                self._track(self._repair)
            except BaseException:  # nothing is to run on in memory that is given back
                self._run.before(self._stream.ptr)
                self._run.end()
                self._stream.synchronize()
                self.release()
                raise
        self._stream.synchronize()
        self._repair = None  # whose memory copies may have read until now

    def _track(self, repair: DeviceRepair) -> None:
        """Queue the steps, some of them ahead of the last verdict, and repair what is found wrong."""
        run, count, queued, judged = self._run, len(self._plan.schedule.steps), 0, 0
        while judged < count:
            verdict = None if queued < min(count, judged + AHEAD) else run.verdict(judged)
            doubted = verdict not in (None, JUDGED) and queued < min(count, judged + DOUBTED)
            if verdict is None or (doubted and repair.may_be_fine(judged)):
                run.part(queued)
                queued += 1
            elif verdict == JUDGED or (again := repair.begins_again(judged, queued)) is None:
                repair.agreed(judged)
                judged += 1
            else:
                queued = judged = again
                if again:
                    run.panels(again)
                else:
                    if self._host:
                        self._host.begin(self._stream.ptr)
                    run.begin()
                self._stage("repaired")
        run.part(count)
        run.end()
        for _ in range(ROUNDS):
            self._stream.synchronize()
            if self.certified:
                return
            if not repair.finished():
                self._unchanged = repair.unchanged
                return
            self._stage("repaired")
            run.certificate()

    # -- the stages of a hook --

    def _staged(self, task: Task) -> None:
        if task.name == "stage":
            name, *step = task.numbers
            self._stage(STAGES[name], *step)

    def _stage(self, name: str, *step: int) -> None:
        """Hand the live arrays to the hook."""
        if self._hook is None:
            return
        of_run, buffers, K = self._sums.on_device, self._plan.buffers, min(self.W.shape)
        if name == "encoded":
            arrays = {"A": self._A, **{x: of_run(x) for x in ("S", "Z", "v", "w")}}
        else:
            arrays = {"W": self.W, "piv": of_run("piv", np.int32)[:K]}
            if name != "factored":
                order = buffers.order[self._plan.schedule.snapshot(step[1] if step else K)]
                carried = {x: of_run(f"carried_{x}") for x in "SZ"}
                arrays |= {**carried, "g": buffers.g, "y": buffers.y, "w": of_run("w"), "perm": order, "A": self._A}
        self._hook(name, {**arrays, "step": step} if step else arrays)

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
        """Whether every check of the finished factors was made, and found everything right. Of a run that repairs,
        sums are right as well that guessed norms of their lines do not explain, but their own do."""
        counts = self._counts
        for which, name in ((SAME_COLUMNS, "g"), (SAME_ROWS, "y")):
            counts[which] += self._unchanged.get(name, 0)
        return counts == list(full_counts(self.kind.m, self.kind.n))

    @property
    def agrees(self) -> bool:
        """Whether sums of all rows and columns of the product are those of A."""
        return self._counts[:2] == [self.kind.m, self.kind.n]

    @property
    def _counts(self) -> list[int]:
        counts: list[int] = self._sums.on_host("verified", np.uint64).tolist()
        return counts

    @functools.cached_property
    def suspects(self) -> Lines:
        """Rows, in their final order, and columns that the steps' checks have found wrong, or have not judged."""
        m, n = self.kind.m, self.kind.n
        masks = np.zeros(m, bool), np.zeros(n, bool)
        if self.kind.checked:
            statuses: list[int] = self._sums.status.tolist()
            for step, status in zip(self._plan.schedule.steps, statuses, strict=True):
                if status != JUDGED:
                    for side, mask in enumerate(masks):
                        mask[step.j : step.j1] = self._suspected(step, status, side)
        return masks

    def _suspected(self, step: Step, status: int, side: int) -> Any:
        m, n, sums = self.kind.m, self.kind.n, self._sums
        first = (0, max(m, n))[side]
        at = slice(first + step.j, first + step.j1)
        residual, bound = (to_host(sums.on_device(f"step_{name}")[at]) for name in ("residuals", "bounds"))
        squares = to_host(sums.on_device(("Ly", "gU")[side])[(m, n)[side] :][step.j : step.j1])
        return suspected(status, side, residual, bound, squares, self.kind.dtype)

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
        sums = self._sums
        sizes: list[Any] = []
        for name, lines in (("row_largest", self.kind.m), ("column_largest", self.kind.n)):
            with np.errstate(divide="ignore"):
                sizes.append(np.log2(to_host(sums.on_device(name, self.kind.dtype)[:lines]).astype(np.float64)))
        S, Z, w, v, rows, columns = (
            sums.on_device(x).copy() for x in ("S", "Z", "w", "v", "row_floor", "column_floor")
        )
        row_words, column_words = (sums.on_device(x, np.uint64).copy() for x in ("row_words", "column_words"))
        bits = Bits(row_words, column_words, v, w)
        return MatrixChecksums(w, v, S, Z, rows, columns, sizes[0], sizes[1], bits=bits)


def _rows_of(m: int, W: Array) -> Array:
    """The first rows of a matrix; the others, with which products are computed as well, are zero."""
    if m < W.shape[0]:
        W[m:] = 0
    return W[:m]


def _too_large(kind: Kind) -> str:
    """What is said where a matrix does not fit, before anything is computed."""
    import cupy

    m, n, size = kind.m, kind.n, SIZES[kind.dtype]
    panels = -(-min(m, n) // PANEL)
    needed = (0 if kind.in_place else m * n * size) + 3 * 4 * m * (panels + 1)
    free = cupy.cuda.runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes()
    what = "the checks of its factors" if kind.in_place else "its factors and their checks"
    text = f"a of shape ({m}, {n}), {kind.dtype}, needs {needed / 1e9:.3g} GB beside it on the GPU for {what}"
    return f"{text}, and about 0.2 GB to work with: {free / 1e9:.3g} GB are free"
