"""Conversions of kernels/tsm2/wide.cuh, of 16-bit formats and back: every pattern, and floats at every edge of
rounding.

On the CPU what is plain is compared with NumPy and ml_dtypes; on a GPU its instructions are compared with the same, so
the two agree. A NaN may become any NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core.compiler import OPTIONS, source
from tests.support.cuda_on_cpu import build
from tests.support.stream_kernel_cases import TYPES

HALVES = [name for name in ("float16", "bfloat16") if name in TYPES]
BLOCK = 64
KERNEL = """
extern "C" __global__ void ENTRY(Index count, const unsigned short* patterns, float* wide, Index floats,
                                 const float* values, unsigned short* plain, unsigned short* narrow) {
  const Index first = Index(blockIdx.x) * blockDim.x + threadIdx.x, step = Index(gridDim.x) * blockDim.x;
  for (Index i = first; i < count; i += step) wide[i] = WIDENED(A_TYPE{patterns[i]});
  for (Index i = first; i < floats; i += step) {
    plain[i] = narrowed_plain(values[i], A_TYPE()).bits;
    narrow[i] = narrowed(values[i], A_TYPE()).bits;
  }
}
"""


@dataclass(frozen=True)
class Conversions:
    """The header, for one of the formats."""

    half: str
    widened: str = "widened"
    file = "tsm2/wide.cuh"

    @property
    def name(self) -> str:
        return f"{self.widened}_{self.half}"

    @property
    def macros(self) -> dict[str, str | int]:
        types = {"A_TYPE": self.half, "B_TYPE": self.half, "C_TYPE": self.half, "ACC": "float"}
        return {**types, "WIDTH": 2, "T1": BLOCK, "T2": 1, "WIDENED": self.widened}

    @property
    def text(self) -> str:
        return source(self) + KERNEL


PLAIN = [Conversions("float16", "widened_plain"), Conversions("float16"), Conversions("bfloat16")]


def patterns() -> np.ndarray:
    return np.arange(2**16, dtype=np.uint16)


def floats(half: str) -> np.ndarray:
    """What a format has, what lies half way between neighbours, and the floats next to these; and any patterns."""
    exact = patterns().view(TYPES[half]).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    with np.errstate(over="ignore"):
        middle = (exact[:-1].astype(np.float64) + exact[1:]) / 2
        beyond = 2 * exact[-1].astype(np.float64) - middle[-1]  # rounds to infinity
    edges = np.concatenate([exact, middle.astype(np.float32), np.float32([beyond, -beyond])])
    assert (middle.astype(np.float32) == middle).all()
    nearby = [np.nextafter(edges, np.float32(limit)) for limit in (np.inf, -np.inf)]
    special = np.array(
        [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32
    )
    drawn = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)
    any_sign = np.concatenate([special, special | 0x80000000, drawn]).astype(np.uint32)
    return np.concatenate([edges, *nearby, any_sign.view(np.float32), np.float32([-0.0])])


def narrowed(values: np.ndarray, half: str) -> np.ndarray:
    """By NumPy or ml_dtypes."""
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(TYPES[half])


def same_numbers(found: np.ndarray, expected: np.ndarray) -> bool:
    """Bit by bit, but for what a NaN holds."""
    nan = np.isnan(expected)
    bits = f"u{found.itemsize}"
    return bool((np.isnan(found) == nan).all() and (found.view(bits)[~nan] == expected.view(bits)[~nan]).all())


def check(conversions: Conversions, results: tuple[np.ndarray, np.ndarray, np.ndarray], values: np.ndarray) -> None:
    wide, plain, narrow = results
    half = TYPES[conversions.half]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        assert same_numbers(wide, patterns().view(half).astype(np.float32))
    expected = narrowed(values, conversions.half)
    assert same_numbers(plain.view(half), expected)
    assert same_numbers(narrow.view(half), expected)


def outputs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.zeros(2**16, np.float32), *(np.zeros(values.size, np.uint16) for _ in range(2))


@pytest.fixture(scope="module")
def library(build_cache: Path) -> Any:
    doubtful = PLAIN[0].text.replace("0xfffu + (size >> 13 & 1u)", "0x1000u").replace(PLAIN[0].name, "ties_away")
    return build([*((c.name, c.text) for c in PLAIN), ("ties_away", doubtful)], cache=build_cache)


def run(library: Any, name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    wide, plain, narrow = outputs(values)
    args = [2**16, patterns(), wide, values.size, values, plain, narrow]
    library.run(name, 4, BLOCK, args)
    return wide, plain, narrow


@pytest.mark.parametrize("conversions", [c for c in PLAIN if c.half in HALVES], ids=lambda c: c.name)
def test_every_pattern_and_every_rounding(library, conversions):
    values = floats(conversions.half)
    check(conversions, run(library, conversions.name, values), values)


def test_another_rounding_of_ties_is_seen(library):
    values = floats("float16")
    with pytest.raises(AssertionError):
        check(PLAIN[0], run(library, "ties_away", values), values)


@pytest.mark.gpu
@pytest.mark.parametrize("half", HALVES)
def test_the_instructions_of_a_gpu_do_the_same(half):
    cp = pytest.importorskip("cupy")
    conversions, values = Conversions(half), floats(half)
    kernel = cp.RawModule(code=conversions.text, options=OPTIONS).get_function(conversions.name)
    wide, plain, narrow = (cp.asarray(x) for x in outputs(values))
    args = (np.int64(2**16), cp.asarray(patterns()), wide, np.int64(values.size), cp.asarray(values), plain, narrow)
    kernel((64,), (BLOCK,), args)
    check(conversions, tuple(cp.asnumpy(x) for x in (wide, plain, narrow)), values)
