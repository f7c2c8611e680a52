"""What the protection of a clean product costs by the data in it, beside that of standard normal data.

    python -m benchmarks.bench_data                         NumPy, 64 to 2048: some ten minutes
    python -m benchmarks.bench_data --device                CuPy, 256 to 8192, all types
    python -m benchmarks.bench_data --only "float32 256"    cells whose name contains this text

Writes results/data.csv or data_gpu.csv. `cost_us` is the median over the rounds of the protected call's time less the
plain one's, `ratio` is that over the cost for normal data of the same rounds; on a card the protected call waits for
its verdict, and so does the plain one for its product. `bar` is what the ratio may be at most; where the data are
constant rows times constant columns, `bar_us` is the cost for normal data and a second product. Both products of a cell
are the same, and the report is CLEAN. The exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from abft_tsm2 import errstate, protected_gemm
from benchmarks import sheet
from benchmarks.rows import short
from benchmarks.timing import machine, paired

Pair = tuple[np.ndarray, np.ndarray]
Make = Callable[[np.random.Generator, int], Pair]


def _each(draw: Callable[[np.random.Generator, int], np.ndarray]) -> Make:
    return lambda rng, n: (draw(rng, n), draw(rng, n))


def _normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal((n, n))


def _zero_column(rng: np.random.Generator, n: int) -> Pair:
    A, B = _normal(rng, n), _normal(rng, n)
    B[:, 3] = 0
    return A, B


def _padded(rng: np.random.Generator, n: int) -> Pair:
    A, B = _normal(rng, n), _normal(rng, n)
    for X in (A, B):
        X[7 * n // 8 :], X[:, 7 * n // 8 :] = 0, 0
    return A, B


def _half_small(rng: np.random.Generator, n: int) -> Pair:
    A = _normal(rng, n)
    A[:, : n // 2] *= 1e-3
    return A, _normal(rng, n)


def _softmax(rng: np.random.Generator, n: int) -> Pair:
    A = np.exp(3 * _normal(rng, n))
    return A / A.sum(1, keepdims=True), _normal(rng, n)


def _image(rng: np.random.Generator, n: int) -> np.ndarray:
    at = np.linspace(0, 1, n)
    shade = 128 + 60 * np.sin(7 * at)[:, None] * np.cos(5 * at) + 10 * _normal(rng, n)
    return np.clip(np.rint(shade), 0, 255) / 255


def _covariance(rng: np.random.Generator, n: int) -> Pair:
    X = rng.standard_normal((2 * n, n)) * rng.random(n)
    S = X.T @ X / (2 * n)
    return S, S.copy()


DATA: dict[str, Make] = {
    "normal": _each(_normal),
    "uniform": _each(lambda rng, n: rng.random((n, n))),
    "relu": _each(lambda rng, n: np.maximum(_normal(rng, n), 0)),
    "softmax": _softmax,
    "image": _each(_image),
    "sparse": _each(lambda rng, n: _normal(rng, n) * (rng.random((n, n)) < 0.01)),
    "zero column": _zero_column,
    "padded": _padded,
    "sorted": lambda rng, n: (np.sort(_normal(rng, n), 1), np.sort(_normal(rng, n), 0)),
    "half of k small": _half_small,
    "B x 1e-11": lambda rng, n: (_normal(rng, n), _normal(rng, n) * 1e-11),
    "equal": lambda rng, n: (np.full((n, n), 0.7), np.full((n, n), 1.3)),
    "covariance": _covariance,
    "constant rows x columns": lambda rng, n: (
        _normal(rng, n)[:, :1] + np.zeros(n),
        _normal(rng, n)[:1] / 16 + np.zeros((n, 1)),  # so that no sum leaves the range of float16
    ),
    "A x 1e-200": lambda rng, n: (_normal(rng, n) * 1e-200, _normal(rng, n)),
}
LEAST = {"B x 1e-11": 1e-30, "A x 1e-200": 1e-300}  # a type has to reach
BARS = {"normal": float("nan"), "A x 1e-200": 5.0, "constant rows x columns": float("nan")}  # of the others 1.5
CPU_SIZES, GPU_SIZES = (64, 128, 256, 512, 1024, 2048), (256, 512, 1024, 2048, 4096, 8192)
CPU_TYPES, GPU_TYPES = ("float64", "float32"), ("float64", "float32", "float16", "bfloat16")


def rounds_of(n: int, device: bool) -> int:
    """Of calls that are compared."""
    if device:
        return 41 if n <= 2048 else 15
    return 201 if n <= 128 else 61 if n <= 512 else 15


def drawn(n: int) -> dict[str, Pair]:
    """All data of one size, in float64."""
    with ThreadPoolExecutor() as threads:
        pairs = threads.map(lambda make, seed: make(np.random.default_rng(seed), n), DATA.values(), range(len(DATA)))
        return dict(zip(DATA, pairs, strict=True))


def measured(dtype: str, n: int, device: bool, data: dict[str, Pair]) -> list[dict[str, Any]]:
    """The rows of one type and size: all data in the same rounds."""
    if device:
        import cupy as xp

        wait = xp.cuda.get_current_stream().synchronize
    else:
        xp, wait = np, lambda: None
    if dtype == "bfloat16":
        import ml_dtypes

        kind: Any = ml_dtypes.bfloat16
    else:
        kind = np.dtype(dtype)
    calls: dict[str, Callable[[], Any]] = {}
    reports = {}
    names = list(data)
    for name, pair in data.items():
        A, B = (xp.asarray(X.astype(kind)) for X in pair)
        C = xp.empty((n, n), A.dtype)
        plain = _plain(xp, A, B, C)

        def timed_plain(plain: Callable[[], Any] = plain) -> None:
            plain()
            wait()

        calls[f"plain {name}"] = timed_plain
        calls[f"protected {name}"] = lambda A=A, B=B, C=C: protected_gemm(A, B, out=C)
        right = plain().copy()
        with errstate(unverifiable="ignore"):
            found, reports[name] = protected_gemm(A, B, return_report=True)
        assert bool((abs(found.astype("f8") - right.astype("f8")) <= _allowed(right, n)).all()), (
            f"{name}: another product"
        )
        for _ in range(3):
            calls[f"protected {name}"]()
    # On a card what is measured begins behind the same product: behind milliseconds of the host's it is slower.
    seconds = paired(calls, rounds_of(n, device), before=calls[f"plain {names[0]}"] if device else wait)
    usual = _cost(seconds, "normal")
    product = statistics.median(seconds["plain normal"])
    rows = []
    for name in names:
        cost, bar = _cost(seconds, name), BARS.get(name, 1.5)
        limit = usual + product if name == "constant rows x columns" else bar * usual
        rows.append(
            {
                **{"library": "cupy" if device else "numpy", "dtype": dtype, "n": n, "data": name},
                "plain_us": short(1e6 * statistics.median(seconds[f"plain {name}"])),
                "cost_us": short(1e6 * cost),
                "ratio": short(cost / usual),
                "bar": bar,
                "bar_us": short(1e6 * limit),
                "held": "" if limit != limit else str(cost <= limit),
                "status": reports[name].status.name,
                "suspicions": reports[name].suspicions,
            }
        )
    return rows


def _allowed(right: Any, n: int) -> float:
    """By how much two right products may differ."""
    return 64 * float(abs(right).max()) * {8: 2.0**-52, 4: 2.0**-23, 2: 2.0**-8}[right.dtype.itemsize]


def _plain(xp: Any, A: Any, B: Any, C: Any) -> Callable[[], Any]:
    """The library's own product."""

    def call() -> Any:
        return xp.matmul(A, B, out=C)

    return call


def _cost(seconds: dict[str, list[float]], name: str) -> float:
    pairs = zip(seconds[f"protected {name}"], seconds[f"plain {name}"], strict=True)
    return statistics.median(protected - plain for protected, plain in pairs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="store_true", help="CuPy on the current GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains TEXT")
    parser.add_argument("--output", metavar="NAME", help="results/NAME.csv")
    options = parser.parse_args(arguments)
    device = options.device
    if device:
        from benchmarks.gpu_timing import environment

        where = environment()
    else:
        where = machine()
    sizes, types = (GPU_SIZES, GPU_TYPES) if device else (CPU_SIZES, CPU_TYPES)
    rows: list[dict[str, Any]] = []
    for n in sizes:
        asked = [dtype for dtype in types if options.only in f"{dtype} {n}"]
        data = drawn(n) if asked else {}
        for dtype in asked:
            tiny = {"float16": 6e-8, "float64": 1e-308}.get(dtype, 1e-38)
            for row in measured(dtype, n, device, {k: v for k, v in data.items() if LEAST.get(k, 1.0) >= tiny}):
                rows.append({**row, **where})
                missed = "  BAR MISSED" if row["held"] == "False" else ""
                print(
                    f"{dtype:8s} {n:5d} {row['data']:24s} plain {row['plain_us']:>10} us, "
                    f"protection {row['cost_us']:>10} us, {row['ratio']:>8} x normal's{missed}",
                    flush=True,
                )
            sheet.write(options.output or ("data_gpu" if device else "data"), rows)
    if not rows:
        parser.error(f"no cell is named like {options.only!r}: they are called float64 256 and so on")
    return 0 if all(row["held"] != "False" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
