"""Protected products of Dask arrays on many workers: a model beside measured runs, and simulated clusters.

    python -m benchmarks.dask_model                      all of it, two minutes on two cores
    python -m benchmarks.dask_model --only model         the model beside one and two processes of this machine
    python -m benchmarks.dask_model --only gpus          the same beside one and two GPUs, with a worker each
    python -m benchmarks.dask_model --only simulation    1 to 10,000 workers, simulated
    python -m benchmarks.dask_model --only figure        docs/figures/dask_scaling.svg, from dask_simulation.csv

Measured: medians of `persist` of the protected product, of the same graph without checks, and of Dask's own ``A @ B``,
in turn, on operands in the workers' memory; one BLAS thread a worker. The model's parameters are measured on the same
two processes beforehand. Writes results/dask_model.csv and results/dask_model_gpus.csv.

Simulated: a cluster as `CLUSTER` says, with products that grow with it: a worker has four blocks of C in the mean, each
a sum of eight products. Writes results/dask_simulation.csv.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import statistics
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.interop.dask import ClusterModel, protected_gemm
from benchmarks import bench_dask, figures, sheet
from benchmarks.rows import short
from benchmarks.timing import machine

CLUSTER = ClusterModel(flop_rate=1e12, read_rate=5e10, bandwidth=1.25e9)
"""Workers of a socket each, 1 Tflop/s in float64, on a network of 10 Gbit/s."""

WORKERS = (1, 4, 16, 64, 256, 1024, 4096, 10_000)  # squares
BLOCKS = (4096, 8192, 16384)
ROWS, STEPS = 2, 8  # of C there are ROWS sqrt(W) blocks by as many, each a sum of STEPS products
AHEAD = 2  # blocks of C that a worker has begun: one receives while the other computes
PROTECTED, PLAIN, DASK = "protected", "the same graph without checks", "A @ B of Dask"
FAULTY = "protected, with faults"
PARTS = ("model", "gpus", "simulation", "figure")


# ---- simulated -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazards:
    """Faults of simulated workers.

    Attributes
    ----------
    rate, faulty_rate : float
        Faults in a second of computing, of a worker and of a defective one.
    faulty : float
        Share of the workers that are defective. Among several thousand machines a few have such cores: P. H. Hochschild
        et al., Cores that don't count, HotOS 2021.
    lost : float
        Share of the faults that cost the partial sum: it is made again from its first product.
    repair : float
        What any other costs, in times of its product: one more, and the evidence that a row was wrong.
    quarantine_after : int
        Faults after which a worker is retired.
    """

    rate: float = 1e-6
    faulty_rate: float = 0.2
    faulty: float = 1e-3
    lost: float = 0.1
    repair: float = 1.5
    quarantine_after: int = 5


@dataclass
class Simulated:
    """What a simulated run did.

    Attributes
    ----------
    seconds : float
    busy : float
        Seconds of computing and checking, of all workers together.
    finished : int
        Blocks of C.
    products, again : int
        That were computed, and those of them that had been computed before.
    received : int
        Blocks that workers received.
    faults, retired : int
    """

    seconds: float = 0.0
    busy: float = 0.0
    finished: int = 0
    products: int = 0
    again: int = 0
    received: int = 0
    faults: int = 0
    retired: int = 0


class Fleet:
    """Simulated workers: when each is free, what it has, and what it was found to do."""

    def __init__(self, model: ClusterModel, workers: int, hazards: Hazards | None, seed: int) -> None:
        self.model, self.hazards = model, hazards
        self.rng = np.random.default_rng([seed, 1])
        self.thread = [0.0] * workers
        self.link = [0.0] * workers
        self.held: list[set[int]] = [set() for _ in range(workers)]
        self.faults = [0] * workers
        self.alive = workers
        self.retired = [False] * workers
        self.repair = 0.0 if hazards is None else hazards.repair
        self.rates = [0.0 if hazards is None else hazards.rate] * workers
        if hazards is not None:
            for worker in self.rng.permutation(workers)[: round(hazards.faulty * workers)]:
                self.rates[worker] = hazards.faulty_rate
        self.count = Simulated()

    def receive(self, worker: int, block: int, made_by: int, at: float, size: float) -> float:
        """When a worker has a block; it receives one after the other."""
        if made_by == worker or block in self.held[worker]:
            return at
        self.held[worker].add(block)
        self.count.received += 1
        self.link[worker] = max(self.link[worker], at) + self.model.latency + size / self.model.bandwidth
        return self.link[worker]

    def run(self, worker: int, at: float, seconds: float) -> float:
        """When a worker has done a task that takes so long and can begin then."""
        self.thread[worker] = max(self.thread[worker], at) + seconds
        self.count.busy += seconds
        return self.thread[worker]

    def hit(self, worker: int, seconds: float) -> bool:
        """Whether a product has a fault; workers that have too many are retired."""
        rate = self.rates[worker]
        if rate == 0.0 or self.rng.random() >= -math.expm1(-rate * seconds):
            return False
        assert self.hazards is not None
        self.count.faults += 1
        self.faults[worker] += 1
        if self.faults[worker] >= self.hazards.quarantine_after and not self.retired[worker] and self.alive > 1:
            self.retired[worker] = True
            self.alive -= 1
            self.count.retired += 1
        return True

    def lost(self) -> bool:
        """Whether a fault costs the partial sum."""
        return self.hazards is not None and bool(self.rng.random() < self.hazards.lost)

    def free(self) -> int:
        """The worker that is free first."""
        return min((w for w, gone in enumerate(self.retired) if not gone), key=self.thread.__getitem__)


def simulate(
    model: ClusterModel,
    m: int,
    k: int,
    n: int,
    block: int,
    dtype: str = "float64",
    workers: int = 1,
    *,
    protected: bool = True,
    hazards: Hazards | None = None,
    seed: int = 0,
) -> Simulated:
    """Run the tasks of a product on simulated workers, event by event.

    Parameters
    ----------
    model : ClusterModel
        How long each step takes.
    m, k, n, block, dtype, workers, protected
        As in `ClusterModel.seconds`; sizes are multiples of `block`.
    hazards : Hazards, optional
        Faults of a protected product; none unless given.
    seed : int
        Of the order of the blocks of C, of the defective workers, and of the faults.

    Returns
    -------
    Simulated

    Notes
    -----
    List scheduling (R. L. Graham, SIAM J. Appl. Math. 17 (1969) 416): a worker that has fewer than `AHEAD` blocks of C
    under way begins the next one, in random order. Each has one thread, receives blocks one after the other while it
    computes, and keeps them. The scheduler is serial: a task begins, at the earliest, when it has come to it.
    """
    M, K, N = (length // block for length in (m, k, n))
    fleet = Fleet(model, workers, hazards if protected else None, seed)
    size = float(block * block * np.dtype(dtype).itemsize)
    multiply = model.product_seconds(block, block, block, dtype)
    checks = [model.check_seconds(block, block, block, dtype, first=one) if protected else 0.0 for one in (True, False)]
    compared = model.per_task + size / model.read_rate
    scheduler, last = 0.0, K if protected else K - 1  # a protected block is compared once more before it is returned
    there = [0.0] * ((M + N) * K)  # when each block of A and B can be sent
    if protected:
        for block_read in range(len(there)):
            scheduler += model.scheduler
            reads = 2 if block_read < M * K else 3
            there[block_read] = fleet.run(
                block_read % workers, scheduler, model.per_task + reads * size / model.read_rate
            )

    waiting = deque(divmod(int(chain), N) for chain in np.random.default_rng(seed).permutation(M * N))
    events: list[tuple[float, int, int, int, int, int]] = []  # ready at, in this order, on worker, row, column, step
    numbers = itertools.count()

    def begin(worker: int, at: float) -> None:
        if waiting:
            heapq.heappush(events, (at, next(numbers), worker, *waiting.popleft(), 0))

    for _ in range(AHEAD):
        for worker in range(workers):
            begin(worker, 0.0)
    while events:
        at, number, worker, i, j, step = heapq.heappop(events)
        scheduler = ready = max(scheduler, at) + model.scheduler
        if fleet.retired[worker]:
            worker = fleet.free()
            if step:
                ready = fleet.receive(worker, -number, -1, ready, size)
        if step == K:
            done = fleet.run(worker, ready, compared)
        else:
            for one in (i * K + step, (M + j) * K + step):
                arrives = fleet.receive(worker, one, one % workers, max(scheduler, there[one]), size)
                ready = max(ready, arrives)
            seconds, lost = model.per_task + multiply + checks[step > 0], False
            if fleet.hit(worker, seconds):
                lost = fleet.lost()
                seconds += 0.0 if lost else fleet.repair * multiply
            done = fleet.run(worker, ready, seconds)
            fleet.count.products += 1
            if lost:
                fleet.count.again += step + 1
                step = -1
        if step < last:
            heapq.heappush(events, (done, next(numbers), worker, i, j, step + 1))
        else:
            fleet.count.finished += 1
            fleet.count.seconds = max(fleet.count.seconds, done)
            begin(worker, done)
    return fleet.count


def simulation(
    workers: Sequence[int], blocks: Sequence[int], model: ClusterModel = CLUSTER
) -> Iterator[dict[str, Any]]:
    """Rows: without checks, protected, and protected on workers that have faults."""
    for block in blocks:
        for count in workers:
            side, k = ROWS * math.isqrt(count) * block, STEPS * block
            plain = 0.0
            for run, hazards in ((PLAIN, None), (PROTECTED, None), (FAULTY, Hazards())):
                found = simulate(model, side, k, side, block, workers=count, protected=run != PLAIN, hazards=hazards)
                plain = plain or found.seconds
                predicted = model.seconds(side, k, side, block, workers=count, protected=run != PLAIN).total
                yield {
                    **{"block": block, "workers": count, "m": side, "k": k, "n": side, "run": run},
                    "seconds": short(found.seconds),
                    "efficiency": short(2 * side * k * side / model.flop_rate / count / found.seconds),
                    "overhead": short(found.seconds / plain - 1),
                    "model_seconds": "" if hazards else short(predicted),
                    "received": short(found.received / count),
                    **{name: getattr(found, name) for name in ("products", "again", "faults", "retired")},
                    **asdict(model),
                    **{name: machine()[name] for name in ("python", "numpy")},
                }


# ---- measured ------------------------------------------------------------------------------------------------------


def unprotected(x: Any, y: Any) -> Any:
    """The product of Dask arrays by the graph of the protected one, without checks."""
    import dask.array as da
    from dask.highlevelgraph import HighLevelGraph

    name = f"unprotected-{uuid.uuid4().hex}"
    (rows, steps), columns = x.numblocks, y.numblocks[1]
    layer: dict[Any, Any] = {}
    for i, j, step in itertools.product(range(rows), range(columns), range(steps)):
        key = (name, i, j) if step == steps - 1 else (f"{name}-step", i, j, step)
        before = (f"{name}-step", i, j, step - 1) if step else None
        layer[key] = (_product, (x.name, i, step), (y.name, step, j), before)
    graph = HighLevelGraph.from_collections(name, layer, dependencies=[x, y])
    return da.Array(graph, name, (x.chunks[0], y.chunks[1]), dtype=x.dtype)


def _product(a: Any, b: Any, before: Any) -> Any:
    return a @ b if before is None else a @ b + before


def _received(dask_worker: Any) -> int:
    return sum(len(one["keys"]) for one in dask_worker.transfer_incoming_log)


def measured(client: Any, x: Any, y: Any, repeats: int, settle: Callable[[], Any]) -> dict[str, tuple[float, float]]:
    """Median seconds of each way to multiply, and the blocks that a worker received; the first round warms up."""
    import dask.array as da
    from distributed import wait

    x, y = client.persist([x, y])
    wait([x, y])
    ways: dict[str, Callable[[Any, Any], Any]] = {PROTECTED: protected_gemm, PLAIN: unprotected, DASK: da.matmul}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats + 1):
        for way, multiply in ways.items():
            before = sum(client.run(_received).values())
            settle()
            begun = time.perf_counter()
            C = multiply(x, y).persist()
            wait(C)
            settle()
            taken = time.perf_counter() - begun
            counts = client.run(_received)
            times[way].append((taken, (sum(counts.values()) - before) / len(counts)))
            del C
    return {way: tuple(map(statistics.median, zip(*found[1:], strict=True))) for way, found in times.items()}


def comparison(n: int, block: int, repeats: int, *, gpus: bool = False) -> Iterator[dict[str, Any]]:
    """Rows: the model beside measured runs; its parameters are measured on the two processes. `gpus`: these have a GPU
    and two threads each."""
    models: dict[str, ClusterModel] = {}
    threads = 2 if gpus else 1
    for workers in (2, 1):
        with bench_dask.cluster(workers, threads=threads, memory=0, cards=workers if gpus else 0) as client:
            for dtype in ("float32",) if gpus else ("float64", "float32"):
                if gpus:
                    x, y = (bench_dask.on_device(n, block, seed) for seed in (1, 2))
                else:
                    x, y = (bench_dask.on_host(n, block, dtype, seed) for seed in (1, 2))
                if dtype not in models:
                    models[dtype] = ClusterModel.measured(client, block, dtype, like=x._meta)
                model = models[dtype]
                settle = partial(client.run, bench_dask.synchronize) if gpus else lambda: None
                for way, (seconds, received) in measured(client, x, y, repeats, settle).items():
                    found = model.seconds(n, n, n, block, dtype, workers, protected=way == PROTECTED)
                    known = way != DASK
                    yield {
                        **{"dtype": dtype, "n": n, "block": block, "workers": workers, "way": way, "repeats": repeats},
                        "predicted_s": short(found.total) if known else "",
                        "measured_s": short(seconds),
                        "ratio": short(seconds / found.total) if known else "",
                        "predicted_received": short(model.blocks_received(n, n, n, block, workers)) if known else "",
                        "measured_received": short(received),
                        **({f"{step}_s": short(part) if known else "" for step, part in found._asdict().items()}),
                        **{name: short(value) for name, value in asdict(model).items()},
                        **{"threads": threads, **bench_dask.environment("device" if gpus else "model")},
                    }


# ---- figure and command line -----------------------------------------------------------------------------------------


def scaling(source: Path | None = None) -> figures.Drawn:
    """Efficiency, and overhead of protection, of the simulated clusters."""
    rows = sheet.read("dask_simulation", source)
    figure, axes = figures.panels(1, 2)
    panels = (
        (axes[0][0], "efficiency", "share of the workers' peak"),
        (axes[0][1], "overhead", "time beyond that without checks"),
    )
    for axis, column, label in panels:
        for block, colour in zip(dict.fromkeys(row["block"] for row in rows), figures.COLOURS, strict=False):
            for run, line in ((PROTECTED, "-"), (PLAIN, "--"), (FAULTY, ":")):
                if (run, column) == (PLAIN, "overhead"):
                    continue
                shown = [row for row in rows if (row["block"], row["run"]) == (block, run)]
                name = f"blocks of {block}" if run == PROTECTED else None
                x, y = ([float(row[which]) for row in shown] for which in ("workers", column))
                axis.plot(x, y, line, color=colour, marker="o", markersize=2.5, label=name)
        axis.set_xscale("log")
        axis.set_xlabel("workers")
        axis.set_ylabel(label)
        axis.set_title(column)
        axis.grid(linewidth=0.3)
    axes[0][0].set_ylim(0, 1)
    where = (
        f"simulated: {float(rows[0]['flop_rate']):.0e} flop/s a worker, {1e3 * float(rows[0]['scheduler']):g} ms a task"
    )
    return figure, axes, "Weak scaling; dashed: without checks, dotted: with faults", where


def written(name: str, rows: Iterator[dict[str, Any]], shown: Sequence[str]) -> None:
    """Write results/NAME.csv, and print these columns on the way."""
    kept = []
    for row in rows:
        kept.append(row)
        print("  ".join(f"{column} {row[column]}" for column in shown), flush=True)
    print(sheet.write(name, kept))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part; without it all that need no GPU")
    parser.add_argument("--size", type=int, help="of the products that are measured: 2048, on GPUs 32768")
    parser.add_argument("--block", type=int, help="of those: 512, on GPUs 4096")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most", type=int, default=max(WORKERS), help="workers to simulate")
    parser.add_argument("--suffix", default="", help="of the names of the CSV files and of the figure")
    options = parser.parse_args(arguments)
    simulated = f"dask_simulation{options.suffix}"
    shown = ("dtype", "workers", "way", "predicted_s", "measured_s", "ratio", "measured_received")
    if options.only in (None, "model"):
        rows = comparison(options.size or 2048, options.block or 512, options.repeats)
        written(f"dask_model{options.suffix}", rows, shown)
    if options.only == "gpus":
        rows = comparison(options.size or 32768, options.block or 4096, options.repeats, gpus=True)
        written(f"dask_model_gpus{options.suffix}", rows, shown)
    if options.only in (None, "simulation"):
        rows = simulation([count for count in WORKERS if count <= options.most], BLOCKS)
        written(simulated, rows, ("block", "workers", "run", "seconds", "efficiency", "overhead", "again", "retired"))
    if options.only in (None, "figure"):
        drawn = scaling(sheet.RESULTS / f"{simulated}.csv")
        figures.finish(*drawn, figures.FIGURES / f"dask_scaling{options.suffix}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
