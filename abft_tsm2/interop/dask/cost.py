"""A model of the time of a protected product on a cluster: multiplying, checking, receiving blocks, and scheduling."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import FLOATS, Array, from_host, is_cupy, is_numpy, namespace, to_host, type_name
from abft_tsm2.gemm.operands import problem_of
from abft_tsm2.interop.dask import events, graphs
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.gemm import LINKS, blocks_held, chain
from abft_tsm2.interop.dask.task import GraphOptions

_STEP = 256  # blocks to choose are multiples of that
_SMALL = 64  # of a block whose product is nothing but calls
_REPEATS, _TASKS = 7, 50  # of each short measurement, and in each round of those of tasks


class ClusterSeconds(NamedTuple):
    """Where the time of a product goes, in seconds; the first four are of the worker with the most to do.

    Attributes
    ----------
    compute : float
        Multiplications.
    checks : float
        What protection adds to them.
    transfers : float
        Receiving blocks of A and B.
    tasks : float
        Beginning and ending its tasks; with `ClusterModel.gpu` what a GPU does not hide of that, and of calls.
    scheduling : float
        Of the scheduler, which does the tasks of all workers one after the other.
    """

    compute: float
    checks: float
    transfers: float
    tasks: float
    scheduling: float

    @property
    def total(self) -> float:
        """That of the worker, or of the scheduler where it has more to do."""
        return max(self.compute + self.checks + self.transfers + self.tasks, self.scheduling)


@dataclass(frozen=True)
class ClusterModel:
    """The time of a protected product of Dask arrays, from what one worker, the network and the scheduler do a second.

    Parameters
    ----------
    flop_rate : float
        Multiplications and additions a second, of a product of blocks in float64 on one worker. Twice as many in
        narrower types.
    read_rate : float
        Bytes a second that checks read on one worker.
    bandwidth : float
        Bytes a second that a worker receives.
    latency : float
        Seconds until a block begins to arrive.
    per_product : float
        Seconds that a protected product takes beside its multiplications and reads: calls, mostly.
    per_task : float
        Seconds of a worker for each task, whatever it does.
    scheduler : float
        Seconds of the scheduler for each task. Dask's documentation says 0.2 to 1 ms for both together.
    gpu : bool
        Whether workers multiply on GPUs, with two threads or more each: a task has eight products instead of four, and
        the host works ahead while the device multiplies and checks.

    Raises
    ------
    ValueError
        A rate is not positive, or a time negative.
    TypeError
        `gpu` is neither True nor False.

    Notes
    -----
    The matrices are M x K and K x N blocks of b x b elements of s bytes, on W workers. One worker has at most
    c = ceil(M N / W) blocks of C, and takes ::

        compute     c K 2 b^3 / flop_rate
        checks      c s b^2 (2 K + K + 3 K + 3 (K - 1) + 1) / read_rate + c K per_product
                    + ceil(M K / W) 2 s b^2 / read_rate + ceil(K N / W) 3 s b^2 / read_rate
        transfers   R (latency + s b^2 / bandwidth)
        tasks       (c K + c + ceil(M K / W) + ceil(K N / W)) per_task

    A product counts as a task of its own, although a task makes a few of them and so has fewer words to read. It reads
    A for its sums and to compare its words, B to compare, C for its sums and twice for those of its words, and from the
    second on C0 for its sums, their norms, and to compare; C is compared once more at the end. What reads an operand's
    block sums its words by rows and by columns, and what it carries where it is the right one.

    *Transfers.* The products of one block of C stay with the worker that has its sum, and blocks of A, B and C are
    placed independently of one another, each worker being as likely as any. A worker has none of the N blocks of C in
    a row with probability (1 - 1/W)^N, and then needs nothing of that row of A; what it needs it has already with
    probability 1/W. So it receives R = K (1 - 1/W) (M (1 - (1 - 1/W)^N) + N (1 - (1 - 1/W)^M)) blocks: with many
    workers 2 K M N / W, two for each product. Were C's blocks placed on a grid of processes, it would be
    K (M + N) / sqrt(W) (R. A. van de Geijn and J. Watts, SUMMA, Concurrency: Practice and Experience 9 (1997) 255),
    less by up to sqrt(c); but Dask's scheduler knows no grid.

    *GPUs.* With `gpu`, c K per_product and the time of tasks count as far as they are above that of the rest of
    compute and checks.

    *Sum and bound.* Receiving is added to computing, although Dask does both at once where it can. The scheduler is
    serial, and takes (M K N + M N + M K + K N) scheduler for all tasks: it keeps no more workers busy than a product
    takes longer than its own time for a task.

    Examples
    --------
    >>> model = ClusterModel(flop_rate=1e12, read_rate=5e10, bandwidth=1e9)
    >>> found = model.seconds(65536, 65536, 65536, block=4096, workers=64)
    >>> found.total < model.seconds(65536, 65536, 65536, block=4096, workers=16).total
    True
    >>> model.memory(4096, threads=2) / 2**30  # GiB
    3.0
    """

    flop_rate: float
    read_rate: float
    bandwidth: float
    latency: float = 1e-3
    per_product: float = 1e-3
    per_task: float = 5e-4
    scheduler: float = 2e-4
    gpu: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.gpu, bool):
            raise TypeError(f"gpu is {self.gpu!r}: True or False")
        for one in fields(self):
            value = getattr(self, one.name)
            rate = one.name in ("flop_rate", "read_rate", "bandwidth")
            if not (value > 0 if rate else value >= 0):
                raise ValueError(f"{one.name} is {value}: {'a rate is above' if rate else 'a time is at least'} 0")

    def seconds(
        self, m: int, k: int, n: int, block: int, dtype: Any = "float64", workers: int = 1, protected: bool = True
    ) -> ClusterSeconds:
        """The time of a product of (m, k) and (k, n) in square blocks.

        Parameters
        ----------
        m, k, n : int
        block : int
            Rows and columns of a block; the last ones of a matrix count as whole.
        dtype : str or dtype
        workers : int
            Of one thread each, or whose rates are those of all their threads together.
        protected : bool
            False: of the same products, summed along the same chains, without a check.

        Raises
        ------
        TypeError
            For a dtype that is not supported.
        ValueError
            If a size, `block` or `workers` is below 1.
        """
        M, K, N = _counts(m, k, n, block, workers)
        bm, bk, bn = (min(block, length) for length in (m, k, n))
        size, wide = _sizes(dtype)
        chains = math.ceil(M * N / workers)
        lefts, rights = math.ceil(M * K / workers), math.ceil(K * N / workers)
        compute = chains * K * self.product_seconds(bm, bk, bn, dtype)
        checks, tasks, everywhere = 0.0, chains * K, M * K * N
        if protected:
            checks = chains * sum(self.check_seconds(bm, bk, bn, dtype, first=step == 0) for step in range(min(K, 2)))
            checks += chains * max(0, K - 2) * self.check_seconds(bm, bk, bn, dtype, first=False)
            read = lefts * 2 * bm * bk * size + rights * 3 * bk * bn * size + chains * bm * bn * wide
            checks += read / self.read_rate
            tasks += chains + lefts + rights
            everywhere += M * N + M * K + K * N
        a, b = _received(M, K, N, workers)
        transfers = (a + b) * self.latency + (a * bm * bk + b * bk * bn) * size / self.bandwidth
        host = tasks * self.per_task
        if self.gpu:
            calls = chains * K * self.per_product if protected else 0.0
            checks -= calls
            host = max(0.0, host + calls - compute - checks)
        return ClusterSeconds(compute, checks, transfers, host, everywhere * self.scheduler)

    def product_seconds(self, m: int, k: int, n: int, dtype: Any = "float64") -> float:
        """The time of one product of blocks on one worker, without its checks."""
        return 2.0 * m * k * n * _sizes(dtype)[1] / 8 / self.flop_rate

    def check_seconds(self, m: int, k: int, n: int, dtype: Any = "float64", *, first: bool = False) -> float:
        """What protection adds to one product of blocks; `first`: of a chain, without C0."""
        return self.per_product + _reads(m, k, n, dtype, first) / self.read_rate

    def blocks_received(self, m: int, k: int, n: int, block: int, workers: int) -> float:
        """The blocks of A and B that a worker is expected to receive: R of the notes."""
        return sum(_received(*_counts(m, k, n, block, workers), workers))

    def overhead(self, m: int, k: int, n: int, block: int, dtype: Any = "float64", workers: int = 1) -> float:
        """The time of the protected product over that of the same product without checks; parameters of `seconds`.

        Examples
        --------
        >>> model = ClusterModel(flop_rate=1e12, read_rate=5e10, bandwidth=1e9)
        >>> model.overhead(65536, 65536, 65536, 8192) < model.overhead(65536, 65536, 65536, 1024)
        True
        """
        with_checks, without = (
            self.seconds(m, k, n, block, dtype, workers, protected).total for protected in (True, False)
        )
        return with_checks / without

    def memory(self, block: int, dtype: Any = "float64", threads: int = 1) -> int:
        """Bytes that the tasks of a worker hold at a time, for each thread: the operands of a task, C0, C, and two
        blocks on their way.

        Beside them a worker has its share of what is kept: operands in memory, finished blocks of C.
        """
        return blocks_held(LINKS["cupy" if self.gpu else "numpy"]) * threads * _sizes(dtype)[1] * block * block

    def choose_block(
        self, m: int, k: int, n: int, memory: float, dtype: Any = "float64", workers: int = 1, threads: int = 1
    ) -> int:
        """The block with the least time whose tasks fit into a worker's memory.

        Parameters
        ----------
        m, k, n, dtype, workers
            As in `seconds`.
        memory : float
            Bytes that a worker may have; tasks get 60 % of it, above which Dask spills blocks to disk.
        threads : int
            Of a worker, each with a task.

        Returns
        -------
        block : int
            A multiple of 256, except where less has room or the matrices are smaller; of equals the largest.

        Raises
        ------
        ValueError
            If not even blocks of one element fit.

        Examples
        --------
        >>> model = ClusterModel(flop_rate=1e12, read_rate=5e10, bandwidth=1e9)
        >>> model.choose_block(65536, 65536, 65536, memory=16e9, workers=16)
        8192
        """
        largest = math.isqrt(max(0, int(graphs.SHARE * memory)) // self.memory(1, dtype, threads))
        if not largest:
            raise ValueError(f"memory is {memory:g} bytes: tasks of {threads} threads have no room in it")
        largest = min(largest, max(m, k, n))
        sizes = range(_STEP, largest + 1, _STEP) if largest >= _STEP else (largest,)
        return min(sizes, key=lambda block: (self.seconds(m, k, n, block, dtype, workers).total, -block))

    @classmethod
    def measured(cls, client: Any = None, block: int = 512, dtype: Any = "float64", like: Array | None = None) -> Self:
        """The model of a cluster, by a few seconds of short measurements on two of its workers.

        Parameters
        ----------
        client : distributed.Client, optional
            The current one unless given; without one, of two processes on this machine that are started for it.
        block : int
            Of the products and transfers that are timed, from 256: rates rise with it.
        dtype : str or dtype
        like : array, optional
            Of the kind of the blocks, NumPy or CuPy, such as ``cupy.empty(0)``; NumPy arrays unless given.

        Raises
        ------
        ValueError
            If `block` is too small, or the cluster has one worker only.
        TypeError
            If `like` is no such array.

        Notes
        -----
        By one thread of a worker while the others rest: a worker of several threads that share its memory and cores is
        slower in each. On GPUs rates hold for this dtype alone: float64 may take more or less than twice the time of
        float32. Where client and scheduler are one process, its time is that of both. A script that starts
        processes needs ``if __name__ == "__main__":``.
        """
        like = np.empty(0) if like is None else like
        if not (is_numpy(like) or is_cupy(like)):
            raise TypeError(f"like is a {type(like).__name__}: a NumPy or CuPy array is needed, such as cupy.empty(0)")
        if block < _STEP:
            raise ValueError(f"block is {block}: at least {_STEP}, or its product is nothing but calls")
        client = events.current_client() if client is None else client
        if client is not None:
            with client.as_current():
                return cls(**_measurements(client, block, type_name(dtype), like))
        from distributed import Client, LocalCluster

        with (
            LocalCluster(
                n_workers=2, threads_per_worker=1 if is_numpy(like) else 2, dashboard_address="127.0.0.1:0"
            ) as cluster,
            Client(cluster, set_as_default=False) as own,
            own.as_current(),
        ):
            return cls(**_measurements(own, block, type_name(dtype), like))


def _counts(m: int, k: int, n: int, block: int, workers: int) -> tuple[int, int, int]:
    """M, K and N: how many blocks."""
    if min(m, k, n, block, workers) < 1:
        raise ValueError(f"m, k, n = {m}, {k}, {n} in blocks of {block} on {workers} workers: all are at least 1")
    return math.ceil(m / block), math.ceil(k / block), math.ceil(n / block)


def _sizes(dtype: Any) -> tuple[int, int]:
    """Bytes of an element of A and B, and of a partial sum of C."""
    if (name := type_name(dtype)) not in FLOATS:
        raise TypeError(f"dtype is {name}: supported are {', '.join(FLOATS)}")
    size = FLOATS[name].bits // 8
    return size, max(4, size)


def _reads(m: int, k: int, n: int, dtype: Any, first: bool) -> int:
    """Bytes that the checks of one product read."""
    size, wide = _sizes(dtype)
    return (2 * m * k + k * n) * size + (3 if first else 6) * m * n * wide


def _received(M: int, K: int, N: int, workers: int) -> tuple[float, float]:
    """Blocks of A, and of B, that a worker is expected to receive."""
    elsewhere = 1 - 1 / workers
    return K * M * elsewhere * (1 - elsewhere**N), K * N * elsewhere * (1 - elsewhere**M)


# ---- measurements --------------------------------------------------------------------------------------------------


def _measurements(client: Any, block: int, dtype: str, like: Array) -> dict[str, Any]:
    """The parameters of a model of that cluster."""
    workers = list(client.scheduler_info(n_workers=-1)["workers"])
    if len(workers) < 2:
        raise ValueError(f"the cluster has {len(workers)} worker: transfers are measured between two")
    here, there = workers[:2]
    gpu, like = is_cupy(like), namespace(like).empty(0)
    multiply, check, calls = client.submit(_product_times, block, dtype, like, workers=[here], pure=False).result()
    least, reads = (_reads(*(side,) * 3, dtype, False) for side in (_SMALL, block))
    read_rate = reads / max(check, 1e-7) if gpu else (reads - least) / max(check - calls, 1e-7)

    latency, whole = (_delivery(client, here, there, side, dtype, like) for side in (1, block))
    per_task, scheduler = _task_times(client, here)
    return {
        "flop_rate": 2 * block**3 / multiply * _sizes(dtype)[1] / 8,
        "read_rate": read_rate,
        "bandwidth": block * block * _sizes(dtype)[0] / max(whole - latency, 1e-7),
        "latency": latency,
        "per_product": calls if gpu else max(0.0, calls - least / read_rate),
        "per_task": per_task,
        "scheduler": scheduler,
        "gpu": gpu,
    }


def _product_times(block: int, dtype: str, like: Array) -> tuple[float, float, float]:
    """Of a product of blocks, on a worker: multiplying, and all else; and all else of a small one. On a GPU of one of
    a task of several, which hide what the host does or, where they are small, are hidden by it."""
    links = 1 if is_numpy(like) else LINKS["cupy"]
    options = GraphOptions("measured", "gemm", origin="")  # monitors are not told, here or at the client
    found = []
    for side in (_SMALL, block):
        settings: dict[str, Any] = {"alpha": 1.0, "check": "auto", "verify": None, "precision": None}
        X = from_host(np.random.default_rng(0).standard_normal((side, side)).astype(np.dtype(dtype)), like)
        arithmetic = problem_of(X, X, None, beta=0.0, out_dtype=None, **settings).arithmetic
        chunk = graphs.Chunk("b", X.shape, str(X.dtype), arithmetic)
        a, b, c0 = Block.of(X), graphs.read(chunk, X), Block.of(X.copy())
        steps = []
        for _ in range(_REPEATS + 1):
            begun = time.perf_counter()
            with policy.reports_kept():
                C = chain(options, (0, 0, 0), [(a, b)] * links, c0, {**settings, "beta": 1.0, "widen": False})
            taken = (time.perf_counter() - begun) / links
            multiply = C.reports[-1].seconds["multiply"] if is_numpy(X) else _multiply_seconds(X, links)
            steps.append((multiply, taken - multiply))
        found.append([median(times) for times in zip(*steps[1:], strict=True)])  # the first one warms up
    (_, calls), (multiply, check) = found
    return multiply, check, calls


def _multiply_seconds(X: Array, times: int) -> float:
    """Of one of so many products on a GPU, whose reports have no times."""
    to_host(X[:1, :1])
    begun = time.perf_counter()
    for _ in range(times):
        C = X @ X
    to_host(C[:1, :1])
    return (time.perf_counter() - begun) / times


def _delivery(client: Any, source: str, target: str, side: int, dtype: str, like: Array) -> float:
    """Seconds that a block is on its way to another worker, by that one's own clock."""
    for number in range(_REPEATS + 1):
        block = client.submit(_block, side, dtype, number, like, workers=[source], pure=False)
        client.submit(_nothing, number, block, workers=[target], pure=False).result()
    return float(median(client.run(_last_deliveries, _REPEATS, workers=[target])[target]))


def _task_times(client: Any, worker: str) -> tuple[float, float]:
    """Seconds for each task of a worker, and of the scheduler."""
    from distributed import wait

    block = client.submit(_block, 1, "float64", 0, np.empty(0), workers=[worker], pure=False)
    steps = []
    for _ in range(_REPEATS + 1):
        cpu, begun = client.run_on_scheduler(time.thread_time), time.perf_counter()
        wait(client.map(_nothing, range(_TASKS), [block] * _TASKS, workers=[worker], pure=False))
        taken = time.perf_counter() - begun
        steps.append((taken / _TASKS, (client.run_on_scheduler(time.thread_time) - cpu) / _TASKS))
    per_task, scheduler = (median(times) for times in zip(*steps[1:], strict=True))
    return per_task, scheduler


def _last_deliveries(count: int, dask_worker: Any) -> list[float]:
    return [one["stop"] - one["start"] for one in list(dask_worker.transfer_incoming_log)[-count:]]


def _block(side: int, dtype: str, number: int, like: Array) -> Block:
    return Block.of(namespace(like).full((side, side), number, dtype=np.dtype(dtype)))


def _nothing(number: int, block: Block) -> int:
    return number
