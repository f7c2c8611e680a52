"""Known cards, the card that is present, and what its memory reaches; CuPy is played by a stand-in without a GPU."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2.core.device import KNOWN, Ceilings, Device, known, measure, query
from abft_tsm2.errors import NotSuitable

# Table 2 of the paper, its text for the A100, NVIDIA's data sheets: GB/s, GFLOP/s in float32 and in float64.
PEAKS = {
    "K40c": (288, 5046, 1430),
    "M40": (288, 6844, 213),
    "P100": (720, 10600, 4600),
    "V100": (900, 15000, 7500),
    "A100": (1555, 19500, 9700),
    "H100": (3350, 67000, 34000),
    "H200": (4800, 67000, 34000),
}
# Multiply-adds in float64 that a multiprocessor finishes a clock (Programming Guide, arithmetic throughput).
FLOAT64_UNITS = {"K40c": 64, "M40": 4, "P100": 32, "V100": 32, "A100": 32, "H100": 64, "H200": 64}


def test_peaks_are_the_published_ones() -> None:
    assert set(KNOWN) == set(PEAKS)
    for name, (gbs, float32, float64) in PEAKS.items():
        card = known(name)
        assert (card.peak_gbs, card.peak_gflops("float32"), card.peak_gflops("float64")) == (gbs, float32, float64)


@pytest.mark.parametrize("name", PEAKS)
def test_peak_multiprocessors_and_clock_belong_together(name: str) -> None:
    card = KNOWN[name]
    computed = 2 * FLOAT64_UNITS[name] * card.multiprocessors * card.clock_ghz
    assert card.peak_gflops("float64") == pytest.approx(computed, rel=0.02)


@pytest.mark.parametrize(
    ("name", "card"),
    [("h200", "H200"), ("NVIDIA H200", "H200"), ("Tesla V100-SXM2-16GB", "V100"), (" k40C ", "K40c")],
)
def test_known_by_short_and_by_driver_name(name: str, card: str) -> None:
    assert known(name) is KNOWN[card]


# Boards with another memory, other clocks or a part of the chip: the published peaks are not theirs.
@pytest.mark.parametrize(
    "name", ["GTX 1080", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB", "NVIDIA H200 MIG 1g.18gb", ""]
)
def test_other_boards_are_not_taken_for_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r"K40c, M40, P100, V100, A100, H100, H200"):
        known(name)


def test_a_peak_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'float16' on V100: choose from float32, float64"):
        known("V100").peak_gflops("float16")


def test_devices_are_values() -> None:
    assert hash(known("A100")) == hash(known("a100"))
    with pytest.raises(TypeError):
        KNOWN["A100"] = known("V100")  # type: ignore[index]


class FakeCupy(ModuleType):
    """What `query` and `measure` use of CuPy, over one card with the given driver's answers."""

    def __init__(self, properties: dict[str, Any], attributes: dict[str, int], free: int = 2**34) -> None:
        super().__init__("cupy")
        self.asked: list[int | None] = []

        class Card(contextlib.nullcontext[Any]):
            def __init__(card, index: int | None = None) -> None:
                super().__init__(card)
                self.asked.append(index)
                card.id = 0 if index is None else index
                card.attributes = attributes

        runtime = SimpleNamespace(getDeviceProperties=lambda index: properties, memGetInfo=lambda: (free, 2 * free))
        pool = SimpleNamespace(malloc=None, free_all_blocks=lambda: None)
        self.cuda = SimpleNamespace(
            Device=Card,
            runtime=runtime,
            MemoryPool=lambda: pool,
            using_allocator=lambda malloc: contextlib.nullcontext(),
        )
        self.is_available = lambda: True
        # An array of gigabytes that takes none: only its shape counts here.
        self.ones = lambda size, dtype: np.broadcast_to(np.ones((), dtype), (size,))
        self.empty_like = lambda x: x
        self.sum, self.copyto = (lambda x: None), (lambda y, x: None)


H200 = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
    "sharedMemPerBlock": 49152,
    "maxThreadsPerMultiProcessor": 2048,
    "maxThreadsPerBlock": 1024,
    "l2CacheSize": 60 * 2**20,
    "memoryBusWidth": 6144,
}
RTX4090 = H200 | {
    "name": b"NVIDIA GeForce RTX 4090",
    "minor": 9,
    "major": 8,
    "multiProcessorCount": 128,
    "sharedMemPerMultiprocessor": 102400,
    "maxThreadsPerMultiProcessor": 1536,
    "l2CacheSize": 72 * 2**20,
    "memoryBusWidth": 384,
}
RTX4090_CLOCKS = {"ClockRate": 2_520_000, "MemoryClockRate": 10_501_000, "SingleToDoublePrecisionPerfRatio": 64}


def play(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> FakeCupy:
    cupy = FakeCupy(*arguments, **options)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_a_known_card_keeps_its_published_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, H200 | {"multiProcessorCount": 114}, {})
    card = query()
    assert card.name == "NVIDIA H200"
    assert (card.peak_gbs, card.peak_gflops("float64"), card.memory_latency_cycles) == (4800, 34000, 480)
    assert card.multiprocessors == 114  # limits are the driver's


def test_peaks_of_an_unknown_card_follow_from_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = play(monkeypatch, RTX4090, RTX4090_CLOCKS)
    card = query(1)
    assert cupy.asked == [1]
    assert card == Device(
        name="NVIDIA GeForce RTX 4090",
        compute_capability=(8, 9),
        multiprocessors=128,
        registers_per_sm=65536,
        shared_bytes_per_sm=102400,
        shared_bytes_per_block=49152,
        max_threads_per_sm=1536,
        max_threads_per_block=1024,
        max_registers_per_thread=255,
        l2_bytes=72 * 2**20,
        clock_ghz=2.52,
        peak_gbs=pytest.approx(1008, rel=1e-3),  # as its data sheet has them
        peak_gflops_float32=pytest.approx(82600, rel=1e-3),
        peak_gflops_float64=pytest.approx(1290, rel=1e-3),
        memory_latency_cycles=known("A100").memory_latency_cycles,
        arithmetic_latency_cycles=known("A100").arithmetic_latency_cycles,
    )


# Cores of a multiprocessor: 192, 128, 64, 128, 64, 64, 128 and, for what came later, 128.
@pytest.mark.parametrize(
    ("capability", "cores"),
    [((3, 7), 192), ((5, 3), 128), ((6, 0), 64), ((6, 2), 128), ((7, 5), 64), ((8, 0), 64), ((12, 0), 128)],
)
def test_cores_by_compute_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cores: int) -> None:
    play(monkeypatch, RTX4090 | {"major": capability[0], "minor": capability[1]}, RTX4090_CLOCKS)
    assert query().peak_gflops("float32") == pytest.approx(2 * cores * 128 * 2.52)


@pytest.mark.parametrize("asked", [query, measure])
def test_without_cupy_and_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotSuitable, match=r"CuPy is needed .* install abft_tsm2\[cu13\]"):
        asked()
    play(monkeypatch, H200, {}).is_available = lambda: False
    with pytest.raises(NotSuitable, match=r"no GPU .* check nvidia-smi"):
        asked()


class FakeProfiler(ModuleType):
    """cupyx.profiler with a stopwatch that shows 1 ms for a sum, 4 ms for a copy, and one repeat out of line."""

    def __init__(self, cupy: FakeCupy) -> None:
        super().__init__("cupyx.profiler")

        def benchmark(call: Any, arguments: tuple[Any, ...], *, n_repeat: int, n_warmup: int) -> SimpleNamespace:
            seconds = np.full((1, n_repeat), {cupy.sum: 1e-3, cupy.copyto: 4e-3}[call])
            seconds[0, 0] = 1.0
            self.bytes = arguments[0].nbytes
            return SimpleNamespace(gpu_times=seconds)

        self.benchmark = benchmark


def test_ceilings_count_bytes_read_and_bytes_written(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(play(monkeypatch, H200, {}))
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.profiler", profiler)
    found = measure()
    assert profiler.bytes == 2**31
    assert found == Ceilings(read_gbs=pytest.approx(2**31 / 1e-3 / 1e9), copy_gbs=pytest.approx(2 * 2**31 / 4e-3 / 1e9))


def test_ceilings_need_more_memory_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = FakeProfiler(play(monkeypatch, H200, {}, free=2**29))
    monkeypatch.setitem(sys.modules, "cupyx", ModuleType("cupyx"))
    monkeypatch.setitem(sys.modules, "cupyx.profiler", profiler)
    with pytest.raises(NotSuitable, match=r"536870912 bytes of GPU memory are free"):
        measure()


@pytest.mark.gpu
def test_the_card_that_is_present() -> None:
    pytest.importorskip("cupy")
    card, reached = query(), measure()
    assert card.multiprocessors > 0
    assert 0 < card.peak_gflops("float64") <= card.peak_gflops("float32")
    # No memory exceeds its peak; well below half of it something else is being measured.
    assert 0.5 * card.peak_gbs < reached.copy_gbs < card.peak_gbs
    assert 0.5 * card.peak_gbs < reached.read_gbs < card.peak_gbs
