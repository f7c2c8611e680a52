"""Seconds of the first call of a kernel: compiled anew, and found in CuPy's cache by a later process.

    python -m benchmarks.first_call

Every kernel of the paper at its own parameters for n = 16, each in a process of its own, three times; CuPy is loaded
and the card awake when the clock starts. Writes results/first_call.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from abft_tsm2.core.paper.config import BYTES, VARIANTS, Config, published
from benchmarks import sheet
from benchmarks.load_efficiency import problem

REPEATS = 3


def configurations() -> list[Config]:
    """The largest kernel of every variant and type."""
    return [published(problem(variant, dtype), variant) for variant in VARIANTS for dtype in BYTES]


def child(number: int) -> None:
    """Print the seconds that one kernel takes to be there, and what it was measured on."""
    import cupy

    from abft_tsm2.core.compiler import kernel

    cupy.zeros(1, cupy.float32).fill(1)
    cupy.cuda.Device().synchronize()
    begun = time.perf_counter()
    kernel(configurations()[number])
    taken = time.perf_counter() - begun
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    print(json.dumps({"seconds": taken, "device": name, "cupy": cupy.__version__}))


def process(number: int, cache: str) -> dict[str, object]:
    """What a new process with that cache says of one kernel."""
    command = [sys.executable, "-m", "benchmarks.first_call", "--child", str(number)]
    environment = {**os.environ, "CUPY_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{configurations()[number].name} failed:\n{done.stderr}")
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(number: int, config: Config) -> dict[str, object]:
    """One row: medians of both times."""
    first, later, answer = [], [], {}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as cache:
            for seconds in (first, later):
                answer = process(number, cache)
                seconds.append(float(str(answer["seconds"])))
    print(f"{config.name}: {statistics.median(first):.3f} s, later {1e3 * statistics.median(later):.1f} ms", flush=True)
    times = {"first_s": round(statistics.median(first), 4), "later_ms": round(1e3 * statistics.median(later), 2)}
    return {"kernel": config.name, **times, "device": answer["device"], "cupy": answer["cupy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    number = parser.parse_args().child
    if number is not None:
        child(number)
        return
    print(sheet.write("first_call", [measure(*item) for item in enumerate(configurations())]))


if __name__ == "__main__":
    main()
