"""Is anything slower than it was? Two versions of the package, each in a process of its own, measured in turns.

    git worktree add ../before COMMIT
    python -m benchmarks.before_after ../before                  products and factorisations on the CPU
    python -m benchmarks.before_after ../before --device         the rows of gemm_device.csv on the GPU, and those
                                                                 of our products in stream.csv; host; encode
    python -m benchmarks.before_after ../before --device --only "repair" --output after.csv

A cell is slower if the median of its differences exceeds 1 %, 2 microseconds and half of the spread of the differences
(without the largest and the smallest). On a GPU calls that nothing waits for are timed by the card, behind a kernel
that lets them queue up; others by the host. The exit code is 1 if a cell is slower or failed.

Two processes of one version differ as well, by up to 10 % where the host waits for each call: on an H200 a fifth of
the waited repairs of a version beside itself were called slower. Such a cell is slower if it is so in most of several
runs; `before_after .` measures this version beside itself.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

# The other version runs this file as well, beside modules of its own: it takes nothing from the folder.
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("cell", "before_us", "now_us", "difference_us", "low_us", "high_us", "slower", "error")
Cell = dict[str, Any]
SECONDS = 0.02  # of a measurement, unless a single call takes longer
_SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'
VARIANTS: dict[str, dict[str, str]] = {
    "two-sided": {"check": "both"},
    "float32": {"verify": "float32"},
    "TF32": {"precision": "tf32"},
}


# ---- what is measured -----------------------------------------------------------------------------------------------


def cpu_cells() -> Iterator[Cell]:
    for dtype in ("float64", "float32"):
        for n in (64, 256, 1024):
            yield {"suite": "gemm", "dtype": dtype, "m": n, "k": n, "n": n}
    for name in ("protected_lu_factor", "protected_cholesky"):
        for n in (256, 1024):
            yield {"suite": name, "dtype": "float64", "m": n, "k": n, "n": n}


def gpu_cells() -> Iterator[Cell]:
    with (RESULTS / "gemm_device.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["suite"] != "host" or row["variant"].startswith("errstate"):
                names = ("suite", "dtype", "out", "variant", "faults")
                yield {**{x: row[x] for x in names}, **{x: int(row[x]) for x in ("m", "k", "n", "batch")}}
    with (RESULTS / "stream.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "own" and row["suite"] in ("rows", "columns")]
    for row in rows:
        names = ("order", "dtype", "out")
        yield {"suite": "tsm2", **{x: row[x] for x in names}, **{x: int(row[x]) for x in ("m", "k", "n")}}
    for dtype in ("float64", "float32", "float16"):
        yield {"suite": "encode", "dtype": dtype, "m": 1024, "k": 1024}


# ---- one version ----------------------------------------------------------------------------------------------------


def cpu_call(cell: Cell) -> Callable[[], Any]:
    import numpy as np

    import abft_tsm2 as ft

    rng, n = np.random.default_rng(0), cell["n"]
    A, B = (rng.standard_normal((n, n)).astype(cell["dtype"]) for _ in range(2))
    if cell["suite"] == "gemm":
        return lambda: ft.protected_gemm(A, B)
    A = A @ A.T + n * np.eye(n)
    return lambda: getattr(ft, cell["suite"])(A)


def gpu_call(cell: Cell) -> tuple[Callable[[], Any], bool]:
    """The call, and whether the host waits for it."""
    import cupy
    import numpy as np

    import abft_tsm2 as ft

    def drawn(shape: tuple[int, ...], order: str = "C", seed: int = 0) -> Any:
        kind: Any = __import__("ml_dtypes").bfloat16 if cell["dtype"] == "bfloat16" else cell["dtype"]
        wide = cupy.float64 if cell["dtype"] == "float64" else cupy.float32
        x = cupy.random.default_rng(seed).standard_normal(shape, dtype=wide).astype(np.dtype(kind))
        return cupy.asfortranarray(x) if order == "columns" else x

    plant_after_products("clean", 0, 0)
    lead = (cell["batch"],) if cell.get("batch", 1) > 1 else ()
    A = drawn((*lead, cell["m"], cell["k"]), cell.get("order", "C"))
    if cell["suite"] == "encode":
        return lambda: ft.encode(A), True
    B = drawn((*lead, cell["k"], cell["n"]), seed=1)
    out: dict[str, Any] = {} if cell["out"] == cell["dtype"] else {"dtype": cell["out"]}
    if cell["suite"] == "tsm2":
        return lambda: ft.tall_skinny_matmul(A, B, **out), False
    if cell["variant"].startswith("encoded"):
        B = ft.encode(B, side="rows", recheck=cell["variant"].endswith("rechecked"))
    options = dict(VARIANTS.get(cell["variant"], {})) | ({"out_dtype": cell["out"]} if out else {})
    if cell["suite"] == "host":
        report = not cell["variant"].endswith("dropped")
        return lambda: ft.protected_gemm(A, B, return_report=report), "True" in cell["variant"]
    C = cupy.empty((*lead, cell["m"], cell["n"]), np.dtype(cell["out"]) if out else A.dtype)
    if cell["suite"] == "repair":
        ft.protected_gemm(A, B, out=C)
        plant_after_products(cell["faults"], cell["m"], cell["n"])
        status = ft.protected_gemm(A, B, out=C, return_report=True)[1].status.name
        if (status == "CLEAN") != (cell["faults"] == "clean"):
            raise AssertionError(f"{cell['faults']} planted, and the report says {status}")
    return lambda: ft.protected_gemm(A, B, out=C, **options), "True" in cell["variant"]


def plant_after_products(faults: str, m: int, n: int) -> None:
    """From now on a product of m x n by cuBLAS is followed by faults: a hook would let the host wait at every stage."""
    import cupy
    import numpy as np

    loaded = [module for name, module in sys.modules.items() if name.startswith("abft_tsm2.core")]
    Gemm = next((module.Gemm for module in loaded if hasattr(module, "Gemm")), None)
    if Gemm is None:  # nothing was multiplied yet
        return
    Gemm.__call__ = multiply = vars(Gemm).get("unplanted", Gemm.__call__)
    Gemm.unplanted = multiply
    if faults == "clean":
        return
    tile = 128 * (n + 1) + (n * np.arange(128)[:, None] + np.arange(128)).ravel()
    places = cupy.asarray(tile if faults == "tile" else 37 * (n + 1) * np.arange(int(faults)))
    values: dict[Any, Any] = {}

    def and_plant(gemm: Any, A: Any, B: Any, C: Any, *factors: float) -> None:
        multiply(gemm, A, B, C, *factors)
        if C.size == m * n:
            bits = C.view(f"u{C.itemsize}").reshape(-1)
            if C.dtype not in values:
                values[C.dtype] = cupy.asarray(np.full(places.size, 1e4).astype(C.dtype).view(bits.dtype))
            bits.put(places, values[C.dtype])

    Gemm.__call__ = and_plant


def seconds_of(call: Callable[[], Any], cell: Cell, waited: bool, device: bool) -> float:
    """Of one call, of as many as take `SECONDS`."""
    if not device:
        return _by_host(call, lambda: None, 200)
    import cupy
    import numpy as np

    synchronize = cupy.cuda.Device().synchronize
    if waited or cell["suite"] == "host":
        return _by_host(call, synchronize, 20, in_queue=not waited)
    spin, ends = cupy.RawKernel(_SPIN, "spin"), [cupy.cuda.Event() for _ in range(2)]
    once = _by_host(call, synchronize, 2)
    count = max(1, min(20, int(SECONDS / once)))
    synchronize()
    spin((1,), (1,), (np.int64(2e9 * (count * 250e-6 + 2e-4)),))
    ends[0].record()
    for _ in range(count):
        call()
    ends[1].record()
    ends[1].synchronize()
    return float(cupy.cuda.get_elapsed_time(*ends)) / 1000 / count


def _by_host(call: Callable[[], Any], synchronize: Callable[[], Any], most: int, in_queue: bool = False) -> float:
    """The median; `in_queue`: until a call returns, not until its work is done."""
    times: list[float] = []
    while len(times) < 3 or (sum(times) < SECONDS and len(times) < most):
        synchronize()
        begun = time.perf_counter()
        call()
        if not in_queue:
            synchronize()
        times.append(time.perf_counter() - begun)
    return median(times)


def serve(device: bool) -> None:
    """Measure the cells that are asked for, line by line."""
    import abft_tsm2 as ft

    assert Path(ft.__file__).is_relative_to(Path.cwd()), ft.__file__
    prepared: tuple[Any, Any, bool] = (None, None, False)
    for line in sys.stdin:
        cell = json.loads(line)
        try:
            if cell != prepared[0]:
                prepared = (None, None, False)  # the last one's memory goes first
                prepared = (cell, *(gpu_call(cell) if device else (cpu_call(cell), True)))
            with ft.errstate(sync=prepared[2], corrected="ignore"):
                if device:
                    prepared[1]()
                answer: float | str = seconds_of(prepared[1], cell, prepared[2], device)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


# ---- both -----------------------------------------------------------------------------------------------------------


def ask(version: Any, cell: Cell) -> float | str:
    version.stdin.write(json.dumps(cell) + "\n")
    version.stdin.flush()
    answer: float | str = json.loads(version.stdout.readline())
    return answer


def compared(versions: list[Any], cell: Cell, rounds: int) -> dict[str, Any]:
    """The row of a cell: differences of each round, in which both take turns to be first."""
    name = " ".join(str(value) for value in cell.values())
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):  # the first one warms up
        for i in (0, 1) if number % 2 else (1, 0):
            answer = ask(versions[i], cell)
            if isinstance(answer, str):
                return {"cell": name, "slower": "", "error": f"{('before', 'now')[i]}: {answer}"}
            if number >= 0:
                times[i].append(answer * 1e6)
    differences = sorted(now - before for before, now in zip(*times, strict=True))
    low, high = (differences[1], differences[-2]) if rounds > 4 else (differences[0], differences[-1])
    middle, before = median(differences), median(times[0])
    slower = middle > max(0.01 * before, 2.0, (high - low) / 2)
    values = (before, median(times[1]), middle, low, high)
    return {"cell": name, **dict(zip(COLUMNS[1:6], (f"{x:.3f}" for x in values), strict=True)), "slower": slower}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the folder of the other version, with abft_tsm2 and its kernels")
    parser.add_argument("--device", action="store_true", help="measure on the GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains TEXT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), metavar="S", help="begin nothing after S")
    parser.add_argument("--output", type=Path, default=Path("before_after.csv"), metavar="CSV")
    options = parser.parse_args(arguments)
    every = gpu_cells() if options.device else cpu_cells()
    cells = [x for x in every if options.only in " ".join(str(value) for value in x.values())]
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])['serve'](len(sys.argv) > 3)"
    folders = (options.before.resolve(), Path(__file__).resolve().parents[1])
    more = (__file__, *(["--device"] if options.device else []))
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Threads of BLAS spin for a while after a product, and would take the cores of the other version.
    pipes: Any = {
        "env": {**os.environ, **({} if options.device else threads)},
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
    }
    versions = [subprocess.Popen([sys.executable, "-c", code, str(x), *more], cwd=x, **pipes) for x in folders]
    begun, bad, done = time.monotonic(), 0, 0
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cell in cells:
            if time.monotonic() - begun > options.limit_seconds:
                break
            row = compared(versions, cell, options.rounds)
            writer.writerow(row)
            file.flush()
            bad, done = bad + bool(row["slower"] or row.get("error")), done + 1
            shown = row.get("error") or f"{row['before_us']:>12} -> {row['now_us']:>12} us" + "  SLOWER" * row["slower"]
            print(f"{row['cell']:70} {shown}", flush=True)
    for version in versions:
        version.communicate()  # closes what it reads: it ends
    print(f"{done} of {len(cells)} cells, {bad} slower or failed; rows in {options.output}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
