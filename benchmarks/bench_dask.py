"""Products of Dask arrays on a cluster of processes, protected and not, interleaved, on operands with fresh names that
are in the memory of the workers.

    python -m benchmarks.bench_dask                    all of it that runs without a GPU
    python -m benchmarks.bench_dask products           times of two workers of one thread; a worker is killed
    python -m benchmarks.bench_dask faults             faults planted in blocks, on the wire, in sums and in files
    python -m benchmarks.bench_dask memory             operands and result on disk, two workers of 1 GiB
    python -m benchmarks.bench_dask device             CuPy chunks on one GPU, one worker and two that share it
    python -m benchmarks.bench_dask device --cards 2 --workers 2     a GPU each

The other side is ``a @ b`` of the same arrays on the same cluster. Outputs are compared in the same run. Writes
results/dask.csv and results/dask_faults.csv; the exit code is 1 where a bar is missed or a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import distributed
import numpy as np
from distributed import Client, LocalCluster, wait

import abft_tsm2
from benchmarks import sheet
from benchmarks.sheet import Sheet
from benchmarks.timing import machine

BARS = {("products", "float64"): 1.12, ("products", "float32"): 1.18, ("device", "float32"): 1.06}
"""The largest times relative to the product without protection."""

BLOCKS_MORE = 6
"""Blocks by which the peak of a worker's memory may be above that without protection."""

COLUMNS = (
    *(
        "suite",
        "dtype",
        "n",
        "block",
        "workers",
        "threads",
        "cards",
        "rounds",
        "plain_s",
        "protected_s",
        "ratio",
        "bar",
    ),
    *("plain_cpu_s", "protected_cpu_s", "plain_peak_mib", "protected_peak_mib"),
    *("worst_error", "killed", "error"),
)
FAULT_COLUMNS = ("place", "dtype", "products", "planted", "reported", "repaired", "raised", "silent")
ENVIRONMENT = ("device", "cores", "python", "numpy", "blas", "dask", "distributed", "cupy")

_number = itertools.count()


@contextlib.contextmanager
def cluster(workers: int, *, threads: int = 1, memory: str | int = "auto", cards: int = 0) -> Iterator[Client]:
    """Processes of one BLAS thread each (`distributed` starts them so), in turn on these `cards`, and a client."""
    with (
        tempfile.TemporaryDirectory() as where,
        dask.config.set({"temporary-directory": where}),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads,
            memory_limit=memory,
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
        ) as processes,
        Client(processes) as client,
    ):
        if cards:
            client.run(_take_card, cards)
        yield client


def _take_card(cards: int, dask_worker: Any) -> None:
    """Before this process has seen any."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(dask_worker.name % cards)


def fresh(x: Any) -> Any:
    """The same blocks with new names: nothing of an earlier product is known."""
    return da.map_blocks(_view, x, name=f"fresh-{next(_number)}", dtype=x.dtype, meta=x._meta)


def _view(x: Any) -> Any:
    return x[...]


def _plain(a: Any, b: Any) -> Any:
    return a @ b


METHODS: dict[str, Callable[[Any, Any], Any]] = {"plain": _plain, "protected": abft_tsm2.protected_gemm}


def timed(client: Client, a: Any, b: Any, rounds: int, settle: Callable[[], Any]) -> dict[str, list[tuple[float, ...]]]:
    """Seconds of each method, and CPU seconds of all workers, `rounds` times after one to warm up."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in METHODS}
    for number in range(-1, rounds):
        for name in sorted(METHODS, reverse=number % 2 == 0):
            operands = client.persist([fresh(a), fresh(b)])
            wait(operands)
            settle()
            C = METHODS[name](*operands)
            before = sum(client.run(time.process_time).values())
            start = time.perf_counter()
            C = C.persist()
            wait(C)
            settle()
            took = time.perf_counter() - start
            if number >= 0:
                found[name].append((took, sum(client.run(time.process_time).values()) - before))
            del C, operands
    return found


def worst(C: Any, a: Any, b: Any) -> float:
    """The largest error of C x, in units of the roundoff bound of a row, for a random x; in float64."""
    x = da.random.default_rng(5).standard_normal(C.shape[1], chunks=C.chunks[1])
    if "cupy" in type(C._meta).__module__:
        import cupy

        x = x.map_blocks(cupy.asarray, meta=cupy.empty(0))
    found, right, size = dask.compute(
        _in_double(C) @ x, _in_double(a) @ (_in_double(b) @ x), abs(_in_double(a)) @ (abs(_in_double(b)) @ abs(x))
    )
    unit = float(np.finfo(C.dtype).eps) / 2
    return float((abs(found - right) / (unit * a.shape[1] ** 0.5 * size)).max())


def _in_double(x: Any) -> Any:
    return x.astype("float64")


def row(suite: str, a: Any, block: int, client: Client, times: Any, worst_error: float, **more: Any) -> dict[str, Any]:
    threads = list(client.nthreads().values())
    median = {name: [statistics.median(part) for part in zip(*values, strict=True)] for name, values in times.items()}
    ratio = median["protected"][0] / median["plain"][0]
    shown = {"suite": suite, "dtype": str(a.dtype), "n": a.shape[0], "block": block, "workers": len(threads)}
    return {
        **shown,
        "threads": threads[0],
        "rounds": len(times["plain"]),
        "plain_s": round(median["plain"][0], 4),
        "protected_s": round(median["protected"][0], 4),
        "ratio": round(ratio, 4),
        "bar": BARS.get((suite, str(a.dtype)), ""),
        "plain_cpu_s": round(median["plain"][1], 3),
        "protected_cpu_s": round(median["protected"][1], 3),
        "worst_error": round(worst_error, 4),
        **more,
    }


# ---- products on the CPU -------------------------------------------------------------------------------------------


def products(n: int, block: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Two workers of one thread; and one that is killed in the midst of a product."""
    for dtype in ("float64", "float32"):
        with cluster(2) as client:
            a, b = client.persist([on_host(n, block, dtype, seed) for seed in (1, 2)])
            wait([a, b])
            times = timed(client, a, b, rounds, lambda: None)
            C = abft_tsm2.protected_gemm(fresh(a), fresh(b)).persist()
            error = worst(C, a, b)
            killed = _killed(client, C, n, block, dtype, statistics.median(took for took, _ in times["protected"]))
            yield row("products", a, block, client, times, error, killed=killed)


def on_host(n: int, block: int, dtype: str, seed: int) -> Any:
    return da.random.default_rng(seed).standard_normal((n, n), chunks=block).astype(dtype)


def _killed(client: Client, C: Any, n: int, block: int, dtype: str, after: float) -> str:
    """Whether the bits are those of C when a worker is killed on the way; the operands are computed again as well."""
    right = C.compute()
    a, b = (on_host(n, block, dtype, seed) for seed in (1, 2))
    future = client.compute(abft_tsm2.protected_gemm(fresh(a), fresh(b)))
    time.sleep(after / 2)
    os.kill(next(iter(client.run(os.getpid).values())), signal.SIGKILL)
    same = np.array_equal(future.result().view("u1"), right.view("u1"))
    client.wait_for_workers(2)
    return "same bits" if same else "other bits"


# ---- faults --------------------------------------------------------------------------------------------------------


def faults(count: int, block: int) -> Iterator[dict[str, Any]]:
    """Faults in products, in blocks and their sums between two tasks, on the wire, and in files of spilled blocks."""
    from benchmarks.dask_planting import PLACES, planted_products

    with cluster(2) as client:
        for place in PLACES:
            for dtype in ("float64", "float32"):
                yield planted_products(client, place, dtype, count // (2 * len(PLACES)), block)


# ---- memory --------------------------------------------------------------------------------------------------------


class Peak:
    """The most memory that a worker has resident, sampled from outside."""

    def __init__(self, client: Client) -> None:
        import psutil

        self._workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
        self._stop = threading.Event()
        self.bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            for worker in self._workers:
                with contextlib.suppress(Exception):  # a worker that is gone
                    self.bytes = max(self.bytes, worker.memory_info().rss)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def memory(n: int, block: int, limit: int, where: Path) -> Iterator[dict[str, Any]]:
    """Operands read from files, the result written to one, with less memory than either of them takes."""
    folder = where / f"dask-{n}"
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_file(folder / f"{name}.npy", n, seed) for seed, name in enumerate("ab")]
    peaks, seconds, error = {}, {}, 0.0
    for name, product in METHODS.items():
        with cluster(2, memory=limit) as client, Peak(client) as peak:
            out = np.lib.format.open_memmap(folder / "c.npy", mode="w+", dtype=np.float32, shape=(n, n))
            start = time.perf_counter()
            C = product(*(_from_file(path, n, block) for path in paths))
            C.map_blocks(_to_file, str(folder / "c.npy"), block, dtype="u1", chunks=(1, 1)).compute()
            seconds[name] = [(time.perf_counter() - start, 0.0)]
        peaks[name] = peak.bytes / 2**20
        error = max(error, _file_error(*(np.load(path, mmap_mode="r") for path in (*paths, folder / "c.npy"))))
        del out
    bar = peaks["plain"] + BLOCKS_MORE * block * block * 4 / 2**20
    more = {f"{name}_peak_mib": round(value, 1) for name, value in peaks.items()}
    missed = "" if peaks["protected"] <= bar else f"the peak is above {bar:.0f} MiB"
    like = da.empty((n, n), dtype="float32", chunks=block)
    with cluster(2, memory=limit) as client:
        yield row("memory", like, block, client, seconds, error, **more, error=missed)


def _file(path: Path, n: int, seed: int) -> Path:
    if not path.exists():
        X = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, n))
        rng = np.random.default_rng(seed)
        for at in range(0, n, 1024):
            X[at : at + 1024] = rng.standard_normal((min(1024, n - at), n), np.float32)
    return path


def _from_file(path: Path, n: int, block: int) -> Any:
    at = da.map_blocks(_read, str(path), block, chunks=da.core.normalize_chunks(block, (n, n)), dtype=np.float32)
    return at.map_blocks(_view, name=f"read-{path.stem}-{next(_number)}", dtype=np.float32)


def _read(path: str, block: int, block_info: Any = None) -> np.ndarray:
    (i, i1), (j, j1) = block_info[None]["array-location"]
    return np.array(np.load(path, mmap_mode="r")[i:i1, j:j1])


def _to_file(C: np.ndarray, path: str, block: int, block_info: Any = None) -> np.ndarray:
    i, j = (block * at for at in block_info[0]["chunk-location"])
    np.load(path, mmap_mode="r+")[i : i + C.shape[0], j : j + C.shape[1]] = C
    return np.zeros((1, 1), "u1")


def _file_error(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> float:
    """As `worst`, block by block of rows."""
    x = np.random.default_rng(5).standard_normal(c.shape[1])

    def times(X: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate([X[at : at + 1024].astype(np.float64) @ y for at in range(0, len(X), 1024)])

    def size(X: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.concatenate([abs(X[at : at + 1024]).astype(np.float64) @ y for at in range(0, len(X), 1024)])

    off = abs(times(c, x) - times(a, times(b, x)))
    return float((off / (2.0**-24 * len(x) ** 0.5 * size(a, size(b, abs(x))))).max())


# ---- a GPU ---------------------------------------------------------------------------------------------------------


def device(
    n: int, block: int, rounds: int, threads: int, workers_each: Sequence[int], cards: int
) -> Iterator[dict[str, Any]]:
    """CuPy chunks: so many workers that share the GPUs."""
    for workers in workers_each:
        # memory: Dask would count the card's as the host's
        with cluster(workers, threads=threads, memory=0, cards=cards) as client:
            client.run(_pool, 0.9 / -(-workers // cards))
            a, b = client.persist([on_device(n, block, seed) for seed in (1, 2)])
            wait([a, b])
            times = timed(client, a, b, rounds, lambda: client.run(synchronize))
            C = abft_tsm2.protected_gemm(fresh(a), fresh(b)).persist()
            wait(C)
            yield row("device", a, block, client, times, worst(C, a, b), cards=cards)
            del C, a, b


def on_device(n: int, block: int, seed: int) -> Any:
    import cupy

    like = da.empty((n, n), chunks=block, dtype="float32")
    return like.map_blocks(_random, seed, dtype="float32", meta=cupy.empty((0, 0), "float32"))


def _random(x: Any, seed: int, block_info: Any = None) -> Any:
    import cupy

    at = block_info[0]["chunk-location"]
    rng = cupy.random.default_rng(10_000 * seed + 100 * at[0] + at[1])
    return rng.standard_normal(x.shape, dtype=cupy.float32)


def synchronize() -> None:
    import cupy

    cupy.cuda.Device().synchronize()


def _pool(share: float) -> None:
    """Each worker of a card gets a part of it."""
    import cupy

    cupy.get_default_memory_pool().set_limit(fraction=share)


# ---- command line --------------------------------------------------------------------------------------------------


def environment(suite: str) -> dict[str, str]:
    found = {**machine(), "dask": dask.__version__, "distributed": distributed.__version__, "cupy": ""}
    if suite == "device":
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        found |= {"device": name, "cupy": cupy.__version__}
    return {key: found[key] for key in ENVIRONMENT}


def bad(found: dict[str, Any]) -> str:
    """What is wrong with a row, or nothing."""
    if found.get("silent"):
        return f"{found['silent']} faults were silent"
    if found.get("error"):
        return str(found["error"])
    if float(found.get("worst_error", 0.0)) > 1.0:
        return "the product is wrong"
    if found.get("killed") == "other bits":
        return "other bits after a worker was killed"
    if found.get("bar") and found["ratio"] > found["bar"]:
        return f"the bar is {found['bar']}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", help="products, faults, memory, device; without one: the first three")
    parser.add_argument("--n", type=int, help="rows and columns of the matrices")
    parser.add_argument("--block", type=int, help="those of a block")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2, help="threads of a worker that has a GPU: one feeds it")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="those that share a GPU")
    parser.add_argument("--cards", type=int, default=1, help="GPUs, which workers get in turn")
    parser.add_argument("--where", type=Path, default=Path(tempfile.gettempdir()), help="folder for operands on disk")
    parser.add_argument("--output", type=Path, default=sheet.RESULTS, help="folder of the CSV files")
    options = parser.parse_args(arguments)
    names = options.suites or ["products", "faults", "memory"]
    if unknown := set(names) - {"products", "faults", "memory", "device"}:
        parser.error(f"unknown suite {', '.join(sorted(unknown))}: choose products, faults, memory, device")
    if not 1 <= options.cards <= min(options.workers):
        parser.error(f"--cards {options.cards}: from 1 to the number of workers, so that each has one")
    failed = False
    for name in names:
        n = options.n or {"memory": 16384, "device": 32768}.get(name, 4096)
        block = options.block or {"memory": 2048, "device": 4096, "faults": 64}.get(name, 1024)
        suite = {
            "products": lambda n=n, block=block: products(n, block, options.rounds),
            "faults": lambda block=block: faults(options.faults, block),
            "memory": lambda n=n, block=block: memory(n, block, 1 << 30, options.where),
            "device": lambda n=n, block=block: device(
                n, block, options.rounds, options.threads, options.workers, options.cards
            ),
        }[name]
        file, columns = ("dask_faults", FAULT_COLUMNS) if name == "faults" else ("dask", COLUMNS)
        more = environment(name)
        with Sheet(options.output / f"{file}.csv", (*columns, *ENVIRONMENT), append=True) as csv:
            for found in suite():
                csv.append({**found, **more})
                why = bad(found)
                failed |= bool(why)
                print(" ".join(f"{key}={value}" for key, value in found.items() if value != ""), why, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
