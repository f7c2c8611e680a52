"""Solve a linear system with its factors on a GPU, every substitution checked, without the host until it is done.

``X = U^-1 L^-1 P B``, or ``X = P' L'^-1 U'^-1 B`` of the transposed system. The formulas of the checks are those of
`abft_tsm2.linalg.triangular`; right-hand sides are added up with the same weights. Where A is given as well,
``A X = B`` is certified against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from abft_tsm2.arrays import FLOATS, Array, dtype_name, from_host, namespace, to_host
from abft_tsm2.checksum.device.kernels import OrderedKernel
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core import faultpoint
from abft_tsm2.core.compiler import Kernel
from abft_tsm2.core.cublas import layout
from abft_tsm2.core.device import device_of
from abft_tsm2.core.kept import thrice
from abft_tsm2.core.launch import PreparedLaunch, Step, Value
from abft_tsm2.core.problem import SIZES
from abft_tsm2.linalg.device import check_config, move_config
from abft_tsm2.linalg.device.kept import PlansOfThread
from abft_tsm2.linalg.device.move_config import Launch, MoveKernel
from abft_tsm2.linalg.device.solution_config import (
    COUNTS,
    PANEL,
    RIGHT_BACKWARD,
    RIGHT_EXCHANGES,
    RIGHT_FORWARD,
    RIGHT_PLACES,
    RIGHT_SOLUTION,
    SAME_LINES,
    SolutionKernel,
    part_sums,
)
from abft_tsm2.linalg.device.substitution_calls import SolveMethod, TriangularSolve, handle_on
from abft_tsm2.linalg.outcome import check_of_clean
from abft_tsm2.linalg.triangular import Weighed
from abft_tsm2.report import Check

METHOD = SolveMethod()
KEPT = 8
"""Plans of a thread."""
ALIGNED = 256
"""Bytes that arrays of the workspace begin at multiples of."""
POISON = 0xFF
"""Of which NaN consists, and numbers that are no row."""


class LeftOnDevice(NamedTuple):
    """What the workspace of a solution holds of its operands.

    Attributes
    ----------
    t, sums, squares : float64 CuPy arrays
        Weights of the right-hand sides, and what `Weighed` has of their rows.
    piv : int32 CuPy array
        As the kernels have read it.
    order : int32 CuPy array or None
        Of those rows; None where it is theirs.
    lines : uint64 CuPy array
        The ordered sums of lu (words, n), as it was before it was read; None of a solution that compares none.
    """

    t: Array
    sums: Array
    squares: Array
    piv: Array
    order: Array | None
    lines: Array | None


class DeviceSolution(NamedTuple):
    """A solution, and what its checks say.

    Attributes
    ----------
    X : (n, count) CuPy array, column-major
    clean : bool
        Whether every check was made, and found everything right.
    residual, bound, t : float64 arrays on the host
        Of the last check, row by row; weights of the right-hand sides.
    largest : float64 array on the host
        The largest modulus of each solution; empty where there is one alone.
    left : callable
        What the workspace holds of the operands.
    """

    X: Array
    clean: bool
    residual: Any
    bound: Any
    t: Any
    largest: Any
    left: Callable[[], LeftOnDevice]

    def weighed(self, B: Array) -> Weighed | None:
        """B with the weights and sums that were taken when it was read; None where they are none, or not finite."""
        xp = namespace(B)
        left = self.left()
        t, sums, squares = left.t, left.sums, left.squares
        if not all(bool(xp.all(xp.isfinite(x))) for x in (t, sums, squares)):
            return None
        if left.order is None:
            return Weighed(B, t, sums, squares)
        places = to_host(left.order)
        if not np.array_equal(np.sort(places), np.arange(places.size)):
            return None
        back = from_host(np.argsort(places), B)
        return Weighed(B, t, xp.take(sums, back), xp.take(squares, back))

    def check(self) -> Check:
        """What the last check says in a report, all of its lines being right."""
        return check_of_clean("rows", np.abs(self.residual), self.bound, float(np.min(np.abs(self.t))))


def solve_on_device(
    lu: Array,
    piv: Array,
    B: Array,
    trans: int = 0,
    A: Array | None = None,
    method: SolveMethod = METHOD,
    *,
    compared: bool = False,
) -> DeviceSolution:
    """Solve ``a X = B``, or ``a' X = B``, with the factors of a; synchronises with the host once.

    Parameters
    ----------
    lu : (n, n) CuPy array
        float64 or float32.
    piv : (n,) int32 CuPy array
        Counted from 0; those that are not LAPACK's are found, and the solution is not clean.
    B : (n, count) CuPy array of the same type
        Neither n nor count is 0.
    trans : {0, 1, 2}
    A : (n, n) CuPy array of the same type, optional
        What lu was made of, for a certificate of ``A X = B``. With trans = 0.
    method : SolveMethod, optional
    compared : bool
        Whether a solution is clean only where lu holds between the substitutions and their checks what it held before
        it was read. So a change that lasts from a substitution to its check, which then holds, is seen.
    """
    import cupy
    from cupy.cuda import runtime

    lu, A = _for_kernels(lu), None if A is None else _for_kernels(A)
    if any(stride % B.itemsize for stride in B.strides):
        B = cupy.array(B, order="F")
    piv = cupy.ascontiguousarray(piv)
    kind = SolutionKind.of(lu, B, trans, A, method, compared)
    plan: SolutionPlan = _kept.of(kind, lambda: SolutionPlan(kind))
    X = cupy.empty(B.shape, B.dtype, order="F")
    space = cupy.empty(plan.bytes, cupy.uint8)
    down, along = (stride // B.itemsize for stride in B.strides)
    if B.shape[1] == 1:
        along = B.shape[0]  # it may be 0, by which `measure` would take rows to be what is contiguous
    where = {"lu": lu.data.ptr, "piv": piv.data.ptr, "B": B.data.ptr, "X": X.data.ptr, "down": down, "along": along}
    if A is not None:
        where["A"] = A.data.ptr
    stream = cupy.cuda.get_current_stream().ptr
    planter = faultpoint.current()
    places = None if planter is None else partial(_reach, planter, plan.unknowns(X, space))
    plan(stream, where, space.data.ptr, places)
    runtime.streamSynchronize(stream)
    return DeviceSolution(X, *plan.found(), lambda: plan.left(space))


def _reach(planter: faultpoint.Planter, X: Array, stage: str) -> None:
    planter(stage, {"z" if stage == "forward" else "x": X})


def _for_kernels(M: Array) -> Array:
    """M, or a copy of it where neither its rows nor its columns are contiguous."""
    import cupy

    if layout(M) != "A" and M.data.ptr % M.itemsize == 0:
        return M
    return cupy.array(M, order="C" if layout(M) == "C" else "F")


def _leading(M: Array, by_columns: bool) -> int:
    """Elements from one contiguous line of a square matrix to the next."""
    n = int(M.shape[0])
    return max(n, M.strides[1 if by_columns else 0] // M.itemsize if n > 1 else 1)


@dataclass(frozen=True)
class SolutionKind:
    """What a plan is made for.

    Attributes
    ----------
    n, count : int
        Equations and right-hand sides.
    dtype : {"float64", "float32"}
    by_columns, ld : bool, int
        Whether columns of lu are contiguous, and not its rows; its leading dimension.
    turned : bool
        Whether the transposed system is solved.
    A_by_columns, A_ld : bool, int
        The same of A; 0 where there is none.
    method : SolveMethod
    compared : bool
        Whether lu is compared with what it was.
    """

    n: int
    count: int
    dtype: str
    by_columns: bool
    ld: int
    turned: bool
    A_by_columns: bool
    A_ld: int
    method: SolveMethod
    compared: bool

    @classmethod
    def of(cls, lu: Array, B: Array, trans: int, A: Array | None, method: SolveMethod, compared: bool) -> SolutionKind:
        """That of CuPy arrays."""
        n, count = B.shape
        by_columns, A_by_columns = layout(lu) == "F", A is not None and layout(A) == "F"
        leading = _leading(lu, by_columns), 0 if A is None else _leading(A, A_by_columns)
        lies, A_lies = (by_columns, leading[0]), (A_by_columns, leading[1])
        return cls(n, count, dtype_name(B.dtype), *lies, trans != 0, *A_lies, method, compared)


class TriangularSystem(NamedTuple):
    """One of the triangles of lu, and the unknowns that it is solved for.

    `least`, `most`: r - c of its elements (r, c) where they lie; `by_rows`: whether the rows of the system are rows
    there; `which`: the count of right lines; `name`: of X t and (X o X)(t o t); `given`: of the same of the right-hand
    sides.
    """

    least: int
    most: int
    by_rows: bool
    unit: bool
    which: int
    name: str
    given: str


class SolutionPlan:
    """The launches of one kind of solution on the current device.

    Attributes
    ----------
    kind : SolutionKind
    bytes : int
        Of the workspace of a call.
    """

    def __init__(self, kind: SolutionKind) -> None:
        import cupy

        self.kind = kind
        self._multiprocessors = device_of(cupy.cuda.runtime.getDevice()).multiprocessors
        self._base = cupy.asarray(thrice(weights("balanced", kind.count, seed=2)[:, 0]))
        self._constants = cupy.asarray(thrice(check_config.constants(FLOATS[kind.dtype]), check_config.ROOM))
        self._certified = kind.A_ld > 0
        n = kind.n
        # A system's triangle by rows: those of lu, or of lu' where either it or what is solved is transposed.
        by_rows = kind.by_columns != kind.turned
        below, above = ((1, n), (-n, 0)) if kind.by_columns else ((-n, -1), (0, n))
        parts = (above, below) if kind.turned else (below, above)
        self._factors = (
            TriangularSystem(*parts[0], by_rows, not kind.turned, RIGHT_FORWARD, "z", "b"),
            TriangularSystem(*parts[1], by_rows, kind.turned, RIGHT_BACKWARD, "x", "z"),
        )
        self._offsets, self._zeros, self._poisoned, self.bytes = self._laid_out()
        # Of the last check, which is brought together with the counts before and the weights behind it.
        length = self._offsets["moduli"] - self._offsets["verified"]
        self._pinned = cupy.cuda.alloc_pinned_memory(length)
        self._host = np.frombuffer(self._pinned, np.uint8, length)
        self._prepared = self._steps()
        substitutions = [i for i, step in enumerate(self._prepared) if not isinstance(step, PreparedLaunch)]
        self._solved = dict(zip(substitutions, ("forward", "backward"), strict=True))
        cupy.cuda.get_current_stream().synchronize()  # what was set here may be used on any stream

    @property
    def _measured(self) -> int:
        """Solutions whose moduli are measured: all of several, and not one alone."""
        return self.kind.count if self.kind.count > 1 else 0

    @property
    def _last(self) -> int:
        return RIGHT_SOLUTION if self._certified else RIGHT_BACKWARD

    def _laid_out(self) -> tuple[dict[str, int], int, int, int]:
        """Bytes from the beginning of the workspace to each array; to the end of what is wiped, to that of what is
        poisoned, and to the end of all."""
        kind, double = self.kind, 8
        n, count, item = kind.n, kind.count, SIZES[kind.dtype]
        tiles = max(self._sums(factor.by_rows)[2] for factor in self._factors)
        if self._certified:
            tiles = max(tiles, self._sums(kind.A_by_columns)[2])
        wiped = {"row_largest": n * item, "largest": count * item, "verified": COUNTS * double}
        wiped |= {"solutions": self._measured * item}
        vectors = ("b", "b_squares", "z", "z_squares", "x", "x_squares", "reach_x", "reach_z", "reach", "others")
        poisoned = {"residuals": n * double, "bounds": n * double, "t": count * double, "moduli": double}
        poisoned |= {"logs": count * double, **dict.fromkeys(vectors, n * double), "other_bounds": n * double}
        poisoned |= {"piv": 4 * n, "order": 4 * n, "places": 4 * n, "moves": 4 * n * self._panels}
        poisoned |= {"parts": (2 + self._certified) * tiles * n * double}
        if kind.compared:
            config = OrderedKernel(item)
            sums = config.words * n * double
            wiped = {"tickets": 4 * n, **wiped}
            poisoned |= {"lines": sums, "lines_parts": sums * config.pieces(n)}
        offsets, at, ends = {}, 0, []
        for part in (wiped, poisoned, {"turned": kind.turned * n * count * item}):
            for name, size in part.items():
                offsets[name] = at
                at += -(-size // ALIGNED) * ALIGNED
            ends.append(at)
        return offsets, *ends  # type: ignore[return-value]

    @property
    def _panels(self) -> int:
        return -(-self.kind.n // PANEL)

    def __call__(
        self, stream: int, where: dict[str, int], space: int, places: Callable[[str], None] | None = None
    ) -> None:
        """Queue it on a stream, with a workspace at this address.

        Parameters
        ----------
        where : dict
            Addresses and strides of the operands.
        places : callable, optional
            Called with "forward" and "backward" behind the substitutions.
        """
        from cupy.cuda import runtime

        given, where = where["piv"], where | {name: space + offset for name, offset in self._offsets.items()}
        where["handle"], where["same_lines"] = handle_on(stream), where["verified"] + 8 * SAME_LINES
        self._host[: COUNTS * 8] = 0  # those of the call before
        runtime.memsetAsync(space, 0, self._zeros, stream)
        runtime.memsetAsync(space + self._zeros, POISON, self._poisoned - self._zeros, stream)
        runtime.memcpyAsync(where["piv"], given, 4 * self.kind.n, runtime.memcpyDeviceToDevice, stream)
        for number, step in enumerate(self._prepared):
            step(stream, where)
            if places is not None and number in self._solved:
                places(self._solved[number])
        start = where["verified"]
        runtime.memcpyAsync(self._pinned.ptr, start, self._host.nbytes, runtime.memcpyDeviceToHost, stream)

    def unknowns(self, X: Array, space: Array) -> Array:
        """Where both substitutions work: X, or a part of the workspace, of which X gets the rows in their order."""
        if not self.kind.turned:
            return X
        at = self._offsets["turned"]
        return space[at : at + X.nbytes].view(X.dtype).reshape(X.shape[::-1]).T

    def found(self) -> tuple[bool, Any, Any, Any, Any]:
        """Whether all is right; residuals, bounds and weights of the last check; moduli of solutions: when done."""
        n, count = self.kind.n, self.kind.count
        counts = self._brought("verified", COUNTS, np.uint64).tolist()
        asked = [RIGHT_EXCHANGES, RIGHT_PLACES, RIGHT_FORWARD, RIGHT_BACKWARD]
        asked += [RIGHT_SOLUTION] * self._certified + [SAME_LINES] * self.kind.compared
        lines = (self._brought(name, size).copy() for name, size in (("residuals", n), ("bounds", n), ("t", count)))
        largest = self._brought("solutions", self._measured, self.kind.dtype).astype(np.float64)
        return all(counts[which] == n for which in asked), *lines, largest

    def left(self, space: Array) -> LeftOnDevice:
        """Of the workspace of a call that is done."""
        n = self.kind.n
        sizes = {"t": self.kind.count, "b": n, "b_squares": n}
        found = [space[(at := self._offsets[name]) : at + 8 * size].view(np.float64) for name, size in sizes.items()]
        piv, order = (space[(at := self._offsets[name]) : at + 4 * n].view(np.int32) for name in ("piv", "order"))
        lines = None
        if self.kind.compared:
            at, size = self._offsets["lines"], 8 * n * OrderedKernel(SIZES[self.kind.dtype]).words
            lines = space[at : at + size].view(np.uint64).reshape(-1, n)
        return LeftOnDevice(found[0], found[1], found[2], piv, None if self.kind.turned else order, lines)

    def _brought(self, name: str, count: int, dtype: Any = np.float64) -> Any:
        at = self._offsets[name] - self._offsets["verified"]
        return self._host[at : at + np.dtype(dtype).itemsize * count].view(dtype)

    # -- launches --

    def _steps(self) -> list[Step]:
        kind, n = self.kind, self.kind.n
        first, second = self._factors
        # The transposed system is solved beside X, and its rows come to their places at the end.
        into, gather, to, scatter = ("turned", 0, "X", "order") if kind.turned else ("X", "order", 0, 0)
        sizes = n, kind.count
        measure, launch = MoveKernel("measure", kind.dtype), move_config.measure(*sizes)
        # B itself is what is summed: of the copy that is made as columns are measured nothing is left.
        measured = "B", "down", "along", *sizes, into, n, "row_largest", "largest"
        solved = "X", 1, n, *sizes, 0, n, "row_largest", "solutions"  # of its rows nothing is asked
        read = "B", "down", "along", *sizes, gather, "t", into, n, 0, "b", "b_squares"
        return [
            *(self._lines("keep") if kind.compared else ()),
            *self._kernel(measure, launch, *measured),
            *self._own("sum_weights", "largest", self._base.data.ptr, kind.count, "logs", "t", "moduli"),
            *self._own("pivot_moves", "piv", n, "moves", "verified"),
            *self._own("follow_moves", "moves", n, self._panels, "order", "places", "verified"),
            *self._own("weigh_rows", *read),
            self._solve(first, into),
            *self._own("weigh_rows", into, 1, n, *sizes, 0, "t", 0, n, 0, "z", "z_squares"),
            self._solve(second, into),
            *self._own("weigh_rows", into, 1, n, *sizes, 0, "t", to, n, scatter, "x", "x_squares"),
            *(self._lines("count") if kind.compared else ()),
            *self._check_factor(second, "reach_x"),
            *self._check_factor(first, "reach_z", "reach_x" if self._certified else ""),
            *(self._certify() if self._certified else ()),
            *(self._kernel(measure, launch, *solved) if self._measured else ()),
        ]

    def _kernel(self, config: Kernel, launch: Launch, *values: Value) -> list[Step]:
        return [PreparedLaunch(config, launch.grid, launch.threads, values, chained=False)]

    def _lines(self, answer: Literal["keep", "count"]) -> list[Step]:
        """The ordered sums of the lines of lu as it lies in memory: kept, or compared with those."""
        config, n = OrderedKernel(SIZES[self.kind.dtype], answer=answer), self.kind.n
        launch = Launch((config.blocks(n, n),), config.t1)
        values = n, n, "lu", self.kind.ld, config.pieces(n), "lines", "lines_parts", "tickets", "same_lines"
        return self._kernel(config, launch, *values)

    def _own(self, routine: str, *values: Value, more: bool = False) -> list[Step]:
        config = SolutionKernel(routine, self.kind.dtype, more)
        return self._kernel(config, config.launch(self.kind.n), *values)

    def _sums(self, by_rows: bool, more: bool = False) -> tuple[SolutionKernel, Launch, int]:
        """The kernel for sums of lines, its launch, and how many parts each sum has."""
        config = part_sums(self.kind.dtype, by_rows=by_rows, more=more)
        return config, *config.tiled(self.kind.n, self._multiprocessors)

    def _solve(self, factor: TriangularSystem, X: str) -> Step:
        kind = self.kind
        how = {"lower": factor.most > 0, "turned": not factor.by_rows, "unit": factor.unit}
        call = TriangularSolve(kind.dtype, kind.n, kind.count, kind.ld, kind.n, **how, method=kind.method)
        return lambda stream, where: call(where["handle"], where["lu"], where[X])

    def _check_factor(self, factor: TriangularSystem, last: str, more: str = "") -> list[Step]:
        """``T X = B``; with `more`, what it makes of these squares as well."""
        sums, launch, tiles = self._sums(factor.by_rows, bool(more))
        x = factor.name, f"{factor.name}_squares", more or 0
        part = "lu", self.kind.ld, self.kind.n, factor.least, factor.most
        lines = ("residuals", "bounds") if factor.which == self._last else ("others", "other_bounds")
        judged = "parts", tiles, self.kind.n, self.kind.count, int(factor.unit), *x
        given = factor.given, f"{factor.given}_squares", 0, 0, last, "moduli", self._constants.data.ptr
        return [
            *self._kernel(sums, launch, *part, *x, "parts"),
            *self._own("judge_solution", *judged, *given, *lines, "verified", factor.which, more=bool(more)),
        ]

    def _certify(self) -> list[Step]:
        """``A X = B``; what B holds lies by place, and so does what the factors make of the squares."""
        kind, n = self.kind, self.kind.n
        sums, launch, tiles = self._sums(kind.A_by_columns)
        x = "x", "x_squares", 0
        given = "b", "b_squares", "places", "reach_z", "reach", "moduli", self._constants.data.ptr
        out = "residuals", "bounds", "verified", RIGHT_SOLUTION
        return [
            *self._kernel(sums, launch, "A", kind.A_ld, n, -n, n, *x, "parts"),
            *self._own("judge_solution", "parts", tiles, n, kind.count, 0, *x, *given, *out),
        ]


_kept = PlansOfThread(KEPT)
