"""A small set of cases in arrays of exact size: what tests/test_kernels_on_gpu.py runs under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.compute_sanitizer [--plant reads-past-the-end | no-barrier]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from abft_tsm2.core import compiler
from abft_tsm2.core.config import VARIANTS, Config, Problem, launch
from abft_tsm2.core.launch import arguments

SHAPES = ((1, 1, 1), (129, 33, 3), (64, 65, 5), (200, 7, 2))
PLANTS: dict[str, tuple[str, str]] = {
    "reads-past-the-end": ("smaller(row, m - 1)", "row + 4096"),
    "no-barrier": ("__syncthreads();", ""),
}


def configurations() -> list[Config]:
    """Every variant and type, with tiles that are smaller than the matrices."""
    made = []
    for dtype in ("float32", "float64"):
        for variant in VARIANTS:
            t2 = 1 if variant == "V0" else 2
            t3 = 1 if variant in ("V0", "V1") else 4
            made.append(Config(variant, dtype, 64, t2, t3, 2 if variant.startswith("Opt") else 1))
    return made


def run(text: Callable[[Config], str]) -> int:
    """The number of launches."""
    import cupy

    cupy.cuda.set_allocator(None)  # the pool's blocks are larger than the arrays: it would hide an access past the end
    count = 0
    for config in configurations():
        kernel = cupy.RawModule(code=text(config), options=compiler.OPTIONS).get_function(config.name)
        for m, k, n in SHAPES:
            A = cupy.asfortranarray(cupy.ones((m, k), config.dtype))
            B, C = cupy.ones((k, n), config.dtype), cupy.zeros((m, n), config.dtype)
            for beta in (0.0, 1.0):
                shape = launch(Problem(m, k, n, config.dtype), config)
                kernel((shape.grid,), (shape.block,), arguments(A, B, C, 1.0, beta))
                count += 1
    cupy.cuda.Device().synchronize()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", choices=sorted(PLANTS))
    plant = parser.parse_args().plant
    if plant is None:
        print(run(compiler.source), "launches")
    else:
        print(run(lambda config: compiler.source(config).replace(*PLANTS[plant])), "launches")


if __name__ == "__main__":
    main()
