"""Factorisations and solutions in arrays of exact size: what tests/linalg/test_factors_sanitized_on_gpu.py runs under
compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.support.sanitized_factors [--plant NAME, of those in PLANTS]
compute-sanitizer --tool synccheck python -m tests.support.sanitized_factors [--plant NAME, of those in BARRIERS]
compute-sanitizer --tool racecheck python -m tests.support.sanitized_factors --dtype float32   which takes its time

No test runs racecheck: it may know nothing of the messages that the blocks of a cluster send into each other's shared
memory, nor of the barriers that count them, and the panel kernel is made of these. Of that kernel alone it said
something on an H200 (compute-sanitizer 2025.3.1, not done after 270 s): that a lane writes what another one of its warp
has read. Those are multipliers of columns to come, which `push` of panel_columns.cuh sends in one vector with those
before them, and which nobody uses. Where that kernel is excluded, racecheck ends with an error of its own.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import numpy as np

from abft_tsm2 import (
    Report,
    Status,
    errstate,
    protected_cholesky,
    protected_lu_factor,
    protected_lu_solve,
    protected_solve,
)
from abft_tsm2.core.graphs import Graph
from benchmarks.lu_gpu_contenders import planted
from tests.support.factor_cases import DTYPES, positive
from tests.support.planting import normal
from tests.support.sanitized import Plant, main

SHAPES = ((5, 5), (129, 129), (300, 300), (520, 520), (300, 130), (130, 300))
SIZES = (5, 129, 300)  # of what is solved, and of definite matrices
MODES = *("online",) * 3, *("offline",) * 2  # launches when a matrix comes first, graphs when it comes again
FAULTY, HOOKED = 700, 300  # sizes
STAGES = {"online": "updated", "offline": "factored"}


PLANTS = {
    "columns-past-the-end": Plant(
        "factor/exchange_rows.cu", "row < b ? int(smaller(COLUMNS, c1 - column)) : 0", "row < b ? COLUMNS : 0"
    ),
    "rows-past-the-end": Plant("factor/advance.cu", "(r < m ? r : m - 1)", "r"),
    "a-strip-past-the-end": Plant("factor/panel.cu", "c < b && warp_row", "warp_row"),
    "right-hand-sides-past-the-end": Plant("factor/weigh_rows.cu", "c < count; c += WARPS", "c <= count; c += WARPS"),
    "a-tile-past-the-end": Plant("factor/copy_triangle.cu", "i < height && j < width && ", ""),
}
"""What memcheck has to find: each leaves out a limit, so that what lies just behind an array is read."""
BARRIERS = {
    "a-barrier-of-half-a-warp": Plant(
        "factor/add_factor_parts.cu", "__syncthreads();", "if (threadIdx.x % 32 < 16) __syncthreads();"
    )
}
"""What synccheck has to find."""


class ExactMemory:
    """Blocks of exactly the size that is asked for, each kept for the next array of its size on the same stream.

    CuPy's pool rounds sizes up, which would hide an access past the end. Without any pool factors might come to another
    address at each call, and only what comes to the same one is launched as a graph.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[int, int]] = {}
        self._free: dict[tuple[int, int], list[int]] = defaultdict(list)

    def take(self, size: int, device: int) -> int:
        import cupy

        kind = size, int(cupy.cuda.get_current_stream().ptr)
        at = self._free[kind].pop() if self._free[kind] else int(cupy.cuda.runtime.malloc(size))
        self._kinds[at] = kind
        return at

    def give_back(self, at: int, device: int) -> None:
        self._free[self._kinds[at]].append(at)

    def install(self) -> None:
        """For all arrays from now on, and on the host for all that a card reads and writes there."""
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(self.take, self.give_back).malloc)
        cupy.cuda.set_pinned_memory_allocator(None)  # none is kept


def count_graphs() -> list[int]:
    """A list that gets the stream of each graph that is launched."""
    launch, launched = Graph.launch, list[int]()

    def counted(self: Graph, stream: int) -> None:
        launched.append(stream)
        launch(self, stream)

    Graph.launch = counted  # type: ignore[method-assign]
    return launched


def require(report: Report, status: Status, *what: Any) -> None:
    assert report.status is status, f"{what}: {report}"


def on_card(*shape: int, dtype: Any, order: Any = "F", seed: int = 0) -> Any:
    import cupy

    return cupy.asarray(normal(*shape, dtype=dtype, seed=seed), order=order)


def of_all_shapes(dtype: Any) -> int:
    """The number of factorisations, as of all that follow here."""
    count = 0
    for shape, order in itertools.product(SHAPES, "CF"):
        A = on_card(*shape, dtype=dtype, order=order)
        for mode in MODES:
            require(protected_lu_factor(A, mode=mode, return_report=True)[1], Status.CLEAN, shape, order, mode)
            count += 1
    return count


def with_faults(dtype: Any) -> int:
    """What a fault costs runs kernels, too: one of the queue, and one of a hook, which is queued without graphs."""
    A, faults = on_card(FAULTY, FAULTY, dtype=dtype), ("trailing", "finished")
    for fault in faults:
        with planted(fault), errstate(corrected="ignore"):
            require(protected_lu_factor(A, mode="online", return_report=True)[1], Status.CORRECTED, fault)
    A = on_card(HOOKED, HOOKED, dtype=dtype)
    for mode, at in STAGES.items():
        pending = [at]

        def hook(stage: str, arrays: Any, pending: list[str] = pending) -> None:
            if stage in pending:
                pending.remove(stage)
                arrays["W"][250, 200] += 3

        with errstate(corrected="ignore"):
            _, report = protected_lu_factor(A, mode=mode, return_report=True, on_stage=hook)
        require(report, Status.CORRECTED, mode, at)
    return len(faults) + len(STAGES)


def of_systems(dtype: Any) -> int:
    """Solutions with factors and from the matrix, for one right-hand side and for several."""
    count = 0
    for n in SIZES:
        A = on_card(n, n, dtype=dtype)
        factors = protected_lu_factor(A)
        count += 1
        for sides, order in itertools.product((1, 7), "CF"):
            B = on_card(n, sides, dtype=dtype, order=order, seed=1)
            for trans in (0, 1):
                _, report = protected_lu_solve(factors, B, trans, return_report=True)
                require(report, Status.CLEAN, n, sides, order, trans)
            require(protected_solve(A, B, return_report=True)[1], Status.CLEAN, n, sides, order)
            count += 1
    return count


def of_definite(dtype: Any) -> int:
    """Factors of Cholesky, of either triangle."""
    import cupy

    count = 0
    for n, order, lower in itertools.product(SIZES, "CF", (False, True)):
        A = cupy.asarray(positive(n, dtype), order=order)
        require(protected_cholesky(A, lower, return_report=True)[1], Status.CLEAN, n, order, lower)
        count += 1
    return count


@np.errstate(all="ignore")
def run(only: str | None = None) -> str:
    """How many factorisations there were, and how many graphs; every report is what it should be."""
    import cupy

    ExactMemory().install()
    launched, count = count_graphs(), 0
    for dtype in DTYPES:
        if only in (None, dtype.name):
            count += sum(part(dtype) for part in (of_all_shapes, with_faults, of_systems, of_definite))
    cupy.cuda.Device().synchronize()
    assert launched, "nothing was launched as a graph: has a cluster of the panel kernel no room on this card?"
    return f"{count} factorisations, {len(launched)} graphs"


if __name__ == "__main__":
    main(__doc__, PLANTS | BARRIERS, run, DTYPES)
