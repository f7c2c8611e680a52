"""A small set of cases in arrays of exact size: what tests/core/test_kernels_on_gpu.py runs under compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.support.compute_sanitizer [--plant NAME, of those in PLANTS]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from abft_tsm2.core import compiler
from abft_tsm2.core.compiler import Kernel
from abft_tsm2.core.division import Grid, workspace
from abft_tsm2.core.kernels import Shape, Stream
from abft_tsm2.core.paper.config import VARIANTS, Config, launch
from abft_tsm2.core.paper.launch import arguments
from abft_tsm2.core.problem import Problem
from tests.support.stream_kernel_cases import order_of

SHAPES = ((1, 1, 1), (129, 33, 3), (64, 65, 5), (200, 7, 2))
STREAM_SHAPES = ((1, 1, 1), (130, 33, 0), (261, 70, 3), (129, 300, 2), (65, 700, 0))  # n = 0: all that a kernel has
PLANTS: dict[str, tuple[str, str]] = {
    "reads-past-the-end": ("smaller(row, m - 1)", "row + 4096"),
    "no-barrier": ("__syncthreads();", ""),
    "every-tile-is-whole": ("tile_row + 32 * V * TCF <= m", "tile_row <= m"),
    "fragments-past-the-end": ("smaller(row + group() + 8 * i, m - 1)", "row + group() + 8 * i + 4096"),
    "any-b-is-aligned": ("reinterpret_cast<unsigned long long>(B) % 16 == 0", "true"),
    "writes-past-the-parts": ("(split * PIECES + p) * T1", "((split + 1) * PIECES + p) * T1"),
}
"""What memcheck has to find, and racecheck "no-barrier": what is replaced in the kernels, by what."""


def configurations() -> list[Config]:
    """Every variant and type, with tiles that are smaller than the matrices."""
    made = []
    for dtype in ("float32", "float64"):
        for variant in VARIANTS:
            t2 = 1 if variant == "V0" else 2
            t3 = 1 if variant in ("V0", "V1") else 4
            made.append(Config(variant, dtype, 64, t2, t3, 2 if variant.startswith("Opt") else 1))
    return made


def streams() -> Iterator[Stream]:
    """Every form of TSM2R, with several stages of B; wide loads and narrow ones; conversions; B along its columns."""
    half = ("float16", "float16", "float32", "float32")
    for form in ("columns", "rows"):
        for types, width in (
            (("float32",) * 4, 16),
            (("float32",) * 4, 4),
            (("float64",) * 4, 8),
            (half, 16),
        ):
            yield Stream(form, *types, width, 4, Shape(64, 2, 1, 1, 1))
    yield Stream("rows", *half, 16, 2, Shape(64, 2, 1, 1, 1))
    yield Stream("columns", *("float32",) * 4, 16, 12, Shape(64, 2, 4, 1, 1), turned=True)
    yield Stream("staged", *("float32",) * 4, 16, 12, Shape(64, 2, 4, 2, 1))
    yield Stream("staged", *("float32",) * 4, 16, 16, Shape(32, 2, 8, 2, 1))
    yield Stream("staged", *("float64",) * 4, 16, 9, Shape(64, 1, 2, 3, 1))
    for turned in (False, True):
        for order in (0, 1):
            yield Stream("tensor", *("float64",) * 4, 16, 16, Shape(64, 2, 1, 1, 1), order, turned=turned)
        yield Stream("tensor", *half, 16, 24, Shape(64, 1, 1, 1, 1), 1, turned=turned)
        yield Stream("tensor", *half, 16, 16, Shape(64, 4, 1, 1, 1), 0, turned=turned)


def of_the_paper(text: Callable[[Kernel], str]) -> int:
    """The number of launches."""
    import cupy

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
    return count


def of_today(text: Callable[[Kernel], str]) -> int:
    """The number of launches: with k whole, and in parts of a step; with B at a multiple of 16 bytes, and not.

    What reads B along its columns has them at such multiples. B too ends with its last element.
    """
    import cupy

    count = 0
    for config in streams():
        kernel = cupy.RawModule(code=text(config), options=compiler.OPTIONS).get_function(config.name)
        real = np.dtype(config.sums).type
        for m, k, n in ((m, k, n or config.t2) for m, k, n in STREAM_SHAPES):
            line, lines = (m, k) if order_of(config) == "F" else (k, m)
            lda = -(-line // config.vector) * config.vector
            A = cupy.ones((lines - 1) * lda + line, config.dtype)  # up to the last element, and no further
            total = -(-k // config.step)
            rsb, csb = (1, -(-k // 8) * 8) if config.turned else (n, 1)
            for steps, shift in ((total, 0), (1, 1)):
                offset = 0 if config.turned else shift
                B = cupy.ones(offset + (k - 1) * rsb + (n - 1) * csb + 1, config.weights)[offset:]
                C = cupy.zeros((m, n), config.out)
                shape = Grid(-(-m // config.tile), -(-total // steps), steps * config.step, 1)
                nbytes, tickets = workspace(config, shape)
                scratch = cupy.empty(nbytes, cupy.uint8), cupy.zeros(tickets, cupy.uint32)
                b, c = (B, rsb, csb, 0), (C, n, 1, 0)
                values: list[Any] = [m, k, n, real(1), A, lda, 0, *b, real(shift), *c, shape.slice]
                args = (np.int64(x) if isinstance(x, int) else x for x in (*values, *scratch))
                kernel((shape.tiles, shape.parts), (config.shape.t1,), tuple(args))
                count += 1
    return count


def run(text: Callable[[Kernel], str]) -> int:
    """The number of launches."""
    import cupy

    cupy.cuda.set_allocator(None)  # the pool's blocks are larger than the arrays: it would hide an access past the end
    count = of_the_paper(text) + of_today(text)
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
