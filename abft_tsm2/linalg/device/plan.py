"""A schedule made into launches: kernels, cuBLAS's products, events; with the memory that they share.

A plan belongs to a shape, a type and a thread, and is kept: what changes from call to call is the addresses of the
matrix, of its factors and of its checksums.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from abft_tsm2.arrays import FLOATS, Array, dtype_name
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.compiler import Kernel
from abft_tsm2.core.device import device_of
from abft_tsm2.core.encode_both import PLACE, launched_by
from abft_tsm2.core.graphs import EXTERNAL
from abft_tsm2.core.kept import thrice
from abft_tsm2.core.launch import PreparedLaunch, Step, Value
from abft_tsm2.core.problem import SIZES
from abft_tsm2.linalg.device import certificate_config, check_config, evidence_config, move_config
from abft_tsm2.linalg.device.buffers import KEPT, NAN_BYTE, STATE, WORD, Buffers, RunSums, leading_dimension
from abft_tsm2.linalg.device.certificate_config import CertificateKernel, Tiles
from abft_tsm2.linalg.device.check_config import Advance, ColumnSums, JudgeStep, RowSums, StartSums, SumModuli
from abft_tsm2.linalg.device.evidence_config import EvidenceKernel
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.device.lanes import LibraryPanel, PreparedProduct, lanes
from abft_tsm2.linalg.device.move_config import Launch, MoveKernel
from abft_tsm2.linalg.device.panel_config import PanelConfig
from abft_tsm2.linalg.device.queued import GraphsOfRuns
from abft_tsm2.linalg.device.schedule import PANEL, Schedule, Task

PLANS = 4  # of a thread
FIXED = "fixed"
"""Name of the address 0, behind which places of a plan's own memory lie."""


@dataclass(frozen=True)
class Kind:
    """What a plan is made for.

    Attributes
    ----------
    m, n : int
    dtype : {"float64", "float32"}
    turned : bool
        Whether A's columns are contiguous, and not its rows.
    width : int
        A's lines begin at multiples of so many bytes.
    encoded, checked : bool
        Whether the factors are certified at the end, and whether each step is checked on the way.
    tracked, staged : bool
        Whether the verdicts of steps are read while later ones are under way, and whether a hook sees what they make.
    in_place : bool
        Whether the factors take the place of A.
    ld : int
        Leading dimension of the factors: that of A in its place.
    """

    m: int
    n: int
    dtype: str
    turned: bool
    width: int
    encoded: bool
    checked: bool
    tracked: bool = False
    staged: bool = False
    in_place: bool = False
    ld: int = 0

    @classmethod
    def of(cls, A: Array, *, in_place: bool = False, **how: bool) -> Kind:
        """That of a CuPy array with contiguous rows or columns."""
        turned = A.strides[1] != A.itemsize and A.shape[1] > 1
        width = math.gcd(16, A.data.ptr, A.strides[turned])
        m, n = A.shape
        ld = A.strides[1] // A.itemsize if in_place else leading_dimension(m, A.itemsize)
        return cls(m, n, dtype_name(A.dtype), turned, width, in_place=in_place, ld=ld, **how)


class FactorPlan:
    """The launches of one kind of factorisation on the current device.

    Attributes
    ----------
    kind : Kind
    schedule : Schedule
    buffers : Buffers
    ld : int
        Leading dimension of the factors.
    calls, recorded : list
        What does each task: where it is queued, and where it is recorded for a graph.
    recordable : bool
        Whether all of it can be recorded.
    judged : list of CuPy events
        Where the verdict on each step is read on the way.
    graphs : GraphsOfRuns
    """

    def __init__(self, kind: Kind, A: Array) -> None:
        import cupy

        self.kind, self.m, self.n, self.K = kind, kind.m, kind.n, min(kind.m, kind.n)
        stored, size = FLOATS[kind.dtype], SIZES[kind.dtype]
        self.size, self.ld = size, kind.ld
        how = {name: getattr(kind, name) for name in ("encoded", "checked", "tracked", "staged", "in_place")}
        self.schedule = Schedule(kind.m, kind.n, **how)
        device = device_of(cupy.cuda.runtime.getDevice())
        self.multiprocessors = device.multiprocessors
        self.tiles = Tiles.of(kind.dtype, kind.m, kind.n, self.multiprocessors)
        ends = self.schedule.ends
        finished = self.K - self.schedule.steps[-1].width
        self.left = (
            move_config.left_rows(kind.dtype, kind.m, finished, ends[0], self.multiprocessors) if finished else None
        )
        constants = certificate_config.constants(stored, kind.m, kind.n)
        self.buffers = Buffers(self.schedule, kind.dtype, self.tiles, self.left, constants, self.initial_state())
        self.lanes = lanes()
        self.finished, self.forked = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
        self.judged = [cupy.cuda.Event(disable_timing=True) for _ in self.schedule.steps] if kind.tracked else []
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(self.schedule.events)]
        self._bases = tuple(
            cupy.asarray(thrice(weights("balanced", size, seed=i)[:, 0])) for i, size in enumerate((kind.m, kind.n))
        )
        self._free: list[RunSums] = []
        self.graphs = GraphsOfRuns()
        self._early = kind.tracked and all(part.whole for part in self.schedule.parts)
        self._sums, self._A = self.borrow(), A
        self._keeps: list[Any] = []
        self.calls = [(task, self.launches(task)) for task in self.schedule]
        self.recorded = [(task, self._from_outside(task) or steps) for task, steps in self.calls]
        kernels = [panel_kernel(kind.dtype, kind.m - step.j) for step in self.schedule.steps]
        self.recordable = all(kernels) and not kind.staged
        self.give_back(self._sums)
        del self._A
        cupy.cuda.get_current_stream().synchronize()  # what was set here may be used on any stream

    def launches(self, task: Task) -> list[Step]:
        """What does a task."""
        found: list[Step] = getattr(self, f"_{task.name}")(task.lane, *task.numbers)
        return found

    def _from_outside(self, task: Task) -> list[Step]:
        """A wait for an event of the prefix, which no graph records."""
        if task.name == "wait" and task.numbers[0] < self.schedule.prefix_events:
            return self._wait(task.lane, task.numbers[0], EXTERNAL)
        return []

    def handles(self, main: int) -> dict[str, int]:
        """Of the streams by lane. Checks come before products where every step ends when both have."""
        return self.lanes.handles(main, early=self._early)

    def borrow(self) -> RunSums:
        """Memory for what a run leaves, until it is given back."""
        if self._free:
            return self._free.pop()
        widest = max(step.width for step in self.schedule.steps) if self.kind.tracked else 0
        return RunSums(self.m, self.n, len(self.schedule.steps), widest)

    def give_back(self, sums: RunSums) -> None:
        """What has been borrowed, when nothing of it is needed any more."""
        self._free.append(sums)

    # -- places --

    def order(self, k: int) -> tuple[int, int]:
        """Addresses of the snapshot when k columns are factored: the order of rows, and their places."""
        b, at = self.buffers, 4 * self.m * self.schedule.snapshot(k)
        return b["order"] + at, b["places"] + at

    def _place(self, row: int, column: int) -> tuple[tuple[str, int], int]:
        return ("W", (row + column * self.ld) * self.size), self.ld

    def _gathered(self, lane: str, width: int, row: int = 0) -> tuple[tuple[str, int], int]:
        return (FIXED, self.buffers.gathered[lane].data.ptr + row * self.size), width

    # -- launches --

    def kernel(self, config: Kernel, launch: Launch, *values: Value, clustered: bool = False) -> list[Step]:
        shape, shared = (launch.grid, launch.threads), launch.shared_bytes
        return [PreparedLaunch(config, *shape, values, chained=False, shared_bytes=shared, clustered=clustered)]

    def move(self, routine: str, launch: Launch, *values: Value) -> list[Step]:
        return self.kernel(MoveKernel(routine, self.kind.dtype), launch, *values)

    def _certificate(
        self, routine: str, *values: Value, grid: tuple[int, ...] | None = None, norms: bool = False
    ) -> list[Step]:
        config = CertificateKernel(routine, self.kind.dtype, norms)
        return self.kernel(config, Launch(grid or config.grid(self.m, self.n), config.threads), *values)

    def _product(self, lane: str, sizes: Any, alpha: float, A: Any, B: Any, beta: float, C: Any) -> list[Step]:
        return [PreparedProduct(self.lanes, lane, self.kind.dtype, sizes, alpha, A, B, beta, C)]

    def _record(self, lane: str, event: int) -> list[Step]:
        from cupy.cuda import runtime

        handle = self._events[event].ptr
        return [lambda stream, where: runtime.eventRecord(handle, stream)]

    def _wait(self, lane: str, event: int, flags: int = 0) -> list[Step]:
        from cupy.cuda import runtime

        handle = self._events[event].ptr
        return [lambda stream, where: runtime.streamWaitEvent(stream, handle, flags)]

    def _begin(self, lane: str) -> list[Step]:
        (order, places), m = self.order(0), self.m
        from cupy.cuda import runtime

        size, b, way = self._sums.bytes_wiped, self.buffers, runtime.memcpyDeviceToDevice
        ends = 4 * self.schedule.snapshot(self.K) if self.left else 0
        return [
            lambda stream, where: runtime.memsetAsync(where["row_largest"], 0, size, stream),
            lambda stream, where: runtime.memsetAsync(b["line_sums"], NAN_BYTE, b.line_sums.nbytes, stream),
            lambda stream, where: ends and runtime.memcpyAsync(b["ends"], b["first_ends"], ends, way, stream),
            *self.move("identity", move_config.identity(m), order, places, m, "info", self.buffers["started"]),
        ]

    def _measure(self, lane: str, c0: int, c1: int) -> list[Step]:
        launch, part = move_config.measure(self.m, c1 - c0), "rest" if c0 else "first"
        values = f"A {part}", "down", "along", self.m, c1 - c0, f"W {part}", self.ld, "row_largest", f"largest {part}"
        return self.move("measure", launch, *values)

    # -- what the steps do --

    def _panel(self, lane: str, k: int, b: int) -> list[Step]:
        config = panel_kernel(self.kind.dtype, self.m - k)
        (order0, _), (order1, places1), buffers = self.order(k), self.order(k + b), self.buffers
        if config is None:
            place, _ = self._place(k, k)
            pivots, info = buffers["getrf_pivots"], buffers["getrf_info"]
            factor = LibraryPanel(self.lanes, self.kind.dtype, self.m - k, b, place, self.ld, pivots, info)
            exchanges = pivots, info, self.m, k, b, "piv", order0, order1, places1, "info"
            return [factor, *self.move("pivots_to_order", move_config.pivots_to_order(self.m), *exchanges)]
        values = "W", self.ld, self.m, k, b, "piv", order0, order1, places1, buffers["moved"], "info"
        launch = Launch((config.cluster,), config.threads(self.m - k), config.shared_bytes)
        return self.kernel(config, launch, *values, buffers["started"], self._token(k), clustered=True)

    def _token(self, k: int) -> int:
        return k // PANEL + 1

    def _gate(self, lane: str, k: int) -> list[Step]:
        if panel_kernel(self.kind.dtype, self.m - k) is None:
            return []
        return self.move("gate", move_config.gate(), self.buffers["started"], self._token(k))

    def _exchange_rows(self, lane: str, k: int, b: int, c0: int, c1: int, gather: int) -> list[Step]:
        to = (self._gathered(lane, b)[0][1], b) if gather else (0, 0)
        values = "W", self.ld, k, b, c0, c1, *self.order(k), *self.order(k + b), *to
        return self.move("exchange_rows", move_config.exchange_rows(b, c1 - c0), *values)

    def _exchange_solve(self, lane: str, k: int, b: int, c0: int, c1: int) -> list[Step]:
        launch = move_config.exchange_solve(self.kind.dtype, c1 - c0)
        values = "W", self.ld, k, b, c0, c1, *self.order(k), *self.order(k + b)
        return self.move("exchange_solve", launch, *values)

    def _solve_rows(self, lane: str, j: int, width: int, k: int, b: int, c0: int, c1: int) -> list[Step]:
        # U(k:k+b, c0:c1) = L(k:k+b, k:k+b)^-1 G
        (_, gathered), ld = self._gathered(lane, width, k - j)
        launch = move_config.solve_rows(self.kind.dtype, c1 - c0, self.multiprocessors)
        return self.move("solve_rows", launch, "W", self.ld, k, b, c0, c1, gathered, ld)

    def _substitute(self, lane: str, j: int, width: int, k: int, b: int, c0: int, c1: int) -> list[Step]:
        # the step's rows of G below: G -= L(k+b:j1, k:k+b) U(k:k+b, c0:c1)
        below, j1 = self._gathered(lane, width, k + b - j), j + width
        return self._product(
            lane, (j1 - k - b, c1 - c0, b), -1.0, self._place(k + b, k), self._place(k, c0), 1.0, below
        )

    def _update(self, lane: str, j: int, width: int, c0: int, c1: int) -> list[Step]:
        # A(j1:, c0:c1) -= L(j1:, J) U(J, c0:c1), with the rows that fill up the columns: tensor cores want multiples of
        # 16 bytes (NVIDIA, Matrix Multiplication Background User's Guide)
        j1 = j + width
        sizes = (self.m if self.kind.in_place else self.ld) - j1, c1 - c0, width
        return self._product(lane, sizes, -1.0, self._place(j1, j), self._place(j, c0), 1.0, self._place(j1, c0))

    def _left_map(self, lane: str, k: int) -> list[Step]:
        b, panels = self.buffers, self.schedule.snapshot(k)
        values = self.order(k)[0], b["places"], b["ends"], self.m, b["map"]
        return self.move("left_map", move_config.left_map(self.m, panels), *values)

    def _left_rows(self, lane: str, k: int) -> list[Step]:
        """Those of columns :k as they are in order when so many are factored."""
        b, left = self.buffers, self.left
        assert left is not None, "there is a step behind columns whose rows are to move"
        values = "W", self.ld, self.m, k, b["ends"], b["map"], b["scratch"] if left.scratch_rows else 0
        return self.move("left_rows", left.launch, *values, left.scratch_rows)

    def _left_done(self, lane: str, k: int) -> list[Step]:
        return self.move("left_done", move_config.left_done(), self.buffers["ends"], self.schedule.snapshot(k), k)

    # -- checksums, and the checks of the steps --

    def initial_state(self) -> tuple[float, float, float]:
        """Growth and operations before the first step."""
        return check_config.initial_state(FLOATS[self.kind.dtype], self.m, self.n)

    def _encode(self, lane: str) -> list[Step]:
        from cupy.cuda import runtime

        w, v = (base.data.ptr for base in self._bases)
        weigh = move_config.scale_weights(self.m, self.n)
        sides = "row_largest", w, "w", self.m, "column_largest", v, "v", self.n
        moduli, start, b = SumModuli(), StartSums(), self.buffers
        least = "w", "v", "row_largest", "column_largest", self.m, self.n, b["constants"], b["least"]
        found, encode = self._encoded()
        S, row_squares, Z, column_squares, row_words, column_words = found
        taken = S, row_squares, self.m, Z, column_squares, self.n
        made = (
            "S",
            "Z",
            "carried_S",
            "carried_Z",
            "row_floor",
            "column_floor",
            b["initial"],
            "steps_state",
            b["state"],
        )
        way, m, n = runtime.memcpyDeviceToDevice, WORD * self.m, WORD * self.n
        return [
            *self.move("scale_weights", weigh, *sides),
            *self.kernel(moduli, Launch((1,), moduli.threads), "w", self.m, "v", self.n, b["moduli"]),
            lambda stream, where: runtime.memsetAsync(b["least"], NAN_BYTE, b.least.nbytes, stream),
            *self._certificate("least_weights", *least),
            *encode,
            lambda stream, where: runtime.memcpyAsync(where["row_words"], row_words, m, way, stream),
            lambda stream, where: runtime.memcpyAsync(where["column_words"], column_words, n, way, stream),
            *self.kernel(start, Launch((start.grid(self.m, self.n),), start.threads), *taken, *made),
            self._brought("weights"),
        ]

    def _encoded(self) -> tuple[list[int], list[Step]]:
        """``A v``, squares of the weighted norms of rows, both of columns, and sums of words of rows and columns:
        addresses, and what computes them."""
        v, w = (self._sums.on_device(name) for name in "vw")
        named = {v.data.ptr: "v", w.data.ptr: "w", self._A.data.ptr: "A"}
        steps: list[Step] = []

        def launch(config: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
            values: list[Value] = []
            for arg in args:
                address = arg.data.ptr if hasattr(arg, "data") and hasattr(arg.data, "ptr") else int(arg)
                values.append(named.get(address, address) if hasattr(arg, "ndim") and arg.ndim else address)
            if not steps:
                values[PLACE] = ["A", "lead"]
            self._keeps.append(args)
            steps.extend(self.kernel(config, Launch(grid, config.t1), *values))

        # The cluster of a panel, beside which this runs, needs neighbouring multiprocessors, all of them free.
        spared = move_config.PANEL_BLOCKS if panel_kernel(self.kind.dtype, self.m) else 0
        found = launched_by(launch, self._A, v[:, None], w[:, None], spared)
        arrays = [found.rows, found.row_squares, found.columns, found.column_squares]
        return [x.data.ptr for x in (*arrays, found.row_words, found.column_words)], steps

    def _column_sums(self, lane: str, j: int, width: int) -> list[Step]:
        kernel, b = ColumnSums(self.kind.dtype), self.buffers
        values = "W", self.ld, self.m, j, width, self.order(j + width)[0], "w", b["g"], b["biggest"]
        return self.kernel(kernel, Launch((kernel.grid(width),), kernel.threads), *values)

    def _row_sums(self, lane: str, j: int, width: int) -> list[Step]:
        kernel, b = RowSums.of(self.kind.dtype, width), self.buffers
        values = "W", self.ld, self.n, j, width, "v", b["g"], "carried_Z", b["parts"]
        return self.kernel(kernel, Launch((kernel.grid(self.n - j - width),), kernel.threads), *values)

    def _judge_step(self, lane: str, j: int, width: int) -> list[Step]:
        kernel, b = JudgeStep.of(self.kind.dtype, width), self.buffers
        parts = RowSums.of(self.kind.dtype, width).grid(self.n - j - width)
        at = self.schedule.number_of(j)
        values = (
            *("W", self.ld, self.m, self.n, j, width, self.order(j + width)[0], "w", "v", b["g"], "carried_S"),
            *("carried_Z", b["biggest"], b["parts"], parts, b["y"], "row_floor", "column_floor", b["moduli"]),
            *("steps_state", "step_residuals", "step_bounds", "status", at, 1, b["in_doubt"]),
            b["constants"],
        )
        return self.kernel(kernel, Launch((1,), kernel.threads), *values)

    def _line_squares(self, lane: str, j: int, width: int) -> list[Step]:
        kernel, b = EvidenceKernel("line_squares", self.kind.dtype), self.buffers
        looked = f"looked {self.schedule.number_of(j) % KEPT}"
        of_step = "W", self.ld, self.m, j, width, self.order(j + width)[0], self.order(0)[1], b["ends"], b["g"], b["y"]
        judged = "step_residuals", "step_bounds", max(self.m, self.n), b["in_doubt"], looked
        return self.kernel(kernel, evidence_config.line_squares(width), *of_step, *judged)

    def _advance(self, lane: str, j: int, width: int) -> list[Step]:
        kernel, b = Advance(self.kind.dtype), self.buffers
        values = "W", self.ld, self.m, j, width, self.order(j + width)[0], b["y"], "carried_S"
        return self.kernel(kernel, Launch((kernel.grid(self.m - j - width),), kernel.threads), *values)

    def _keep_sums(self, lane: str, j: int) -> list[Step]:
        """What is carried into this step, so that it can begin again: S, Z and the state lie together."""
        from cupy.cuda import runtime

        size = WORD * (self.m + self.n + STATE)
        kept = self.buffers["kept"] + size * (self.schedule.number_of(j) % KEPT)
        way = runtime.memcpyDeviceToDevice
        return [lambda stream, where: runtime.memcpyAsync(kept, where["carried_S"], size, way, stream)]

    def _stage(self, lane: str, *numbers: int) -> list[Step]:
        return []

    # -- the certificate --

    def _sum_factors(self, lane: str, first: int, last: int) -> list[Step]:
        """``w'L`` and ``U v`` of some lines that have no such sums from steps: g and y."""
        return self._sums_of_lines(first, last, self.buffers["g"], self.buffers["y"])

    def _sum_again(self, lane: str, last: int) -> list[Step]:
        """The same of the first lines, as they are now."""
        return self._sums_of_lines(0, last, self.buffers["g_again"], self.buffers["y_again"])

    def _sums_of_lines(self, first: int, last: int, g: int, y: int) -> list[Step]:
        # before the end a later order, where a step behind them is done again
        order = (self.order(0)[0], self.buffers["ends"]) if last < self.K else (self.order(self.K)[0], 0)
        return self._sums_of_factors((first, last), order, (0, 0), (g, y, self.buffers["largest"], 0, 0), norms=False)

    def _multiply_sums(self, lane: str) -> list[Step]:
        """``g U`` and ``L y``, and ``w'L`` and ``U v`` as they are now."""
        b = self.buffers
        made = b["g_again"], b["y_again"], b["largest"], "gU", "Ly"
        return self._sums_of_factors((0, self.K), (self.order(self.K)[0], 0), (b["g"], b["y"]), made, norms=True)

    def _sums_of_factors(
        self, lines: tuple[int, int], order: tuple[int, int], sums: tuple[int, int], made: Any, *, norms: bool
    ) -> list[Step]:
        """Of lines first:last by factor_sums.cu, or of all with norms, for which it is given `sums`; `made`: addresses.
        `order`: as present_order of certificate.cuh takes it."""
        b, m, n = self.buffers, self.m, self.n
        tiles, parts = self.tiles, (b["column_parts"], b["row_parts"], b["largest_parts"])
        of_lines = m, n, *lines, *order
        added = *tiles.grid, *tiles.at(lines[0]), *of_lines, "w", sums[1]
        count = (m, n) if norms else (lines[1] - lines[0],) * 2
        grid = CertificateKernel("add_factor_parts", norms=norms).grid(*count)
        return [
            *self._certificate(
                "factor_sums", "W", self.ld, *of_lines, "w", "v", *sums, *parts, grid=tiles.grid, norms=norms
            ),
            *self._certificate("add_factor_parts", *parts, *added, *made, grid=grid, norms=norms),
        ]

    def _count_growth(self, lane: str) -> list[Step]:
        b, order = self.buffers, self.order(self.K)[0]
        values = b["y"], order, "row_floor", self.m, self.n, b["constants"], b["state"]
        return self._certificate("count_growth", *values)

    def _judge_factors(self, lane: str) -> list[Step]:
        b = self.buffers
        values = (
            *("Ly", "gU", self.order(self.K)[0], "S", "Z", "row_floor", "column_floor", b["largest"]),
            *(b["moduli"], b["state"], self.m, self.n, b["constants"], "residuals", "bounds", "verified"),
        )
        return self._certificate("judge_factors", *values, norms=True)

    def _replay_pivots(self, lane: str) -> list[Step]:
        return self._certificate("replay_pivots", "piv", self.buffers["order"], self.m, self.K, "verified")

    def _see_all(self, lane: str) -> list[Step]:
        b, of_A = self.buffers, ("row_largest", "column_largest")
        known = b["least"], self.m, self.n, b["constants"], "bounds"
        return self._certificate("see_all", self.order(self.K)[0], *of_A, *known, "verified")

    def _compare_sums(self, lane: str, last: int) -> list[Step]:
        """Of the first lines, whose rows are in order when so many are factored."""
        b, order = self.buffers, self.order(last)[0]
        sums = b["g_again"], b["g"], b["y_again"], b["y"]
        values = *sums, "W", self.ld, "column_floor", "row_floor", "w", order, self.m, last, b["constants"]
        grid = CertificateKernel("compare_sums").grid(last, last)
        return self._certificate("compare_sums", *values, "verified", b["differs"], grid=grid)

    def _bring(self, lane: str) -> list[Step]:
        return [self._brought("verdict")]

    def _brought(self, part: str) -> Step:
        """Copies a part of what a run leaves to the host."""
        from cupy.cuda import runtime

        of, to, size = f"{part} of", f"{part} to", self._sums.bytes_of[part]
        return lambda stream, where: runtime.memcpyAsync(where[to], where[of], size, runtime.memcpyDeviceToHost, stream)


_kept = PlansOfThread(PLANS)


def plan_of(kind: Kind, A: Array) -> FactorPlan:
    """That of this thread, on the current device. It does not keep A."""
    found: FactorPlan = _kept.of(kind, lambda: FactorPlan(kind, A))
    return found


def panel_kernel(dtype: str, rows: int) -> PanelConfig | None:
    """The kernel for panels of so many rows; None where cuSOLVER's is faster, or the device has no such cluster."""
    import cupy

    config = PanelConfig.of(dtype, rows)
    return config if config and _has_room(config, int(cupy.cuda.runtime.getDevice())) else None


@functools.lru_cache(maxsize=64)
def _has_room(config: PanelConfig, device: int) -> bool:
    """Whether the device can hold one cluster of the kernel's blocks."""
    if device_of(device).compute_capability < (9, 0):
        return False
    launch = PreparedLaunch(
        *(config, (config.cluster,), 32 * config.warps_most, ()),
        chained=False,
        shared_bytes=config.shared_bytes,
        clustered=True,
    )
    return launch.active_clusters() > 0
