"""What a GPU can hold and how fast it is: the cards of the paper and today's (`KNOWN`), and the one present (`query`).

Limits come from the tables of technical specifications by compute capability in the CUDA C++ Programming Guide. Peaks
of K40c, M40, P100 and V100 are those of the paper's Table 2 (C. Rivera et al., TSM2X, 2021), of the A100 those of its
text, of H100 and H200 those of NVIDIA's data sheets. A peak is a number of a data sheet; what a card really reaches is
measured on demand by `measure`.
"""

from __future__ import annotations

import functools
import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from abft_tsm2.arrays import type_name
from abft_tsm2.errors import NotSuitable


@dataclass(frozen=True)
class Device:
    """A GPU as the performance model and the choice of a configuration see it.

    Attributes
    ----------
    name : str
        As the driver reports it, or the short name of a known card.
    compute_capability : tuple of two int
    multiprocessors : int
    registers_per_sm : int
        32-bit registers of a multiprocessor.
    shared_bytes_per_sm, shared_bytes_per_block : int
        Shared memory of a multiprocessor, and what a block may declare statically.
    max_threads_per_sm, max_threads_per_block : int
    max_registers_per_thread : int
    l2_bytes : int
        Second-level cache.
    clock_ghz : float
        Of the cores, at which the peaks are counted.
    peak_gbs : float
        Memory bandwidth, 10^9 bytes/s.
    peak_gflops_float32, peak_gflops_float64 : float
        Without tensor cores, 10^9 operations/s; a multiply-add is two operations.
    memory_latency_cycles : float
        From the issue of a load to its use, the memory idle: an assumption of the model, see `KNOWN`.
    arithmetic_latency_cycles : float
        Between dependent multiply-adds in float64, the type in which these products become compute-bound first:
        an assumption of the model, see `KNOWN`.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    registers_per_sm: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    max_threads_per_sm: int
    max_threads_per_block: int
    max_registers_per_thread: int
    l2_bytes: int
    clock_ghz: float
    peak_gbs: float
    peak_gflops_float32: float
    peak_gflops_float64: float
    memory_latency_cycles: float
    arithmetic_latency_cycles: float

    def peak_gflops(self, dtype: Any) -> float:
        """Peak of float32 or float64 arithmetic, 10^9 operations/s; `dtype` is anything that NumPy takes as one.

        Raises
        ------
        ValueError
            For any other type.
        """
        peaks = {"float32": self.peak_gflops_float32, "float64": self.peak_gflops_float64}
        name = type_name(dtype)
        if name not in peaks:
            raise ValueError(f"no peak is known for dtype {name!r} on {self.name}: choose from {', '.join(peaks)}")
        return peaks[name]


@dataclass(frozen=True)
class Ceilings:
    """What the memory of a card reaches, in 10^9 bytes/s.

    Attributes
    ----------
    read_gbs : float
        Of a kernel that only reads.
    copy_gbs : float
        Of a copy within the card; bytes read and bytes written both count.
    """

    read_gbs: float
    copy_gbs: float

    def of(self, name: str) -> float:
        """The ceiling called ``"read"`` or ``"copy"``."""
        return {"read": self.read_gbs, "copy": self.copy_gbs}[name]


KIB, MIB = 1024, 1024 * 1024


def _card(
    name: str,
    compute_capability: tuple[int, int],
    multiprocessors: int,
    shared_kib: int,
    l2_mib: float,
    *,
    clock_ghz: float,
    gbs: float,
    gflops: tuple[float, float],  # float32, float64
    latencies: tuple[float, float],  # of memory, of a multiply-add in float64
) -> Device:
    # What all of them have in common: 65536 registers and 2048 threads to a multiprocessor, 255 registers to a thread,
    # 1024 threads and 48 KiB of static shared memory to a block (Programming Guide, compute capabilities 3.5 to 9.0).
    return Device(
        name=name,
        compute_capability=compute_capability,
        multiprocessors=multiprocessors,
        registers_per_sm=65536,
        shared_bytes_per_sm=shared_kib * KIB,
        shared_bytes_per_block=48 * KIB,
        max_threads_per_sm=2048,
        max_threads_per_block=1024,
        max_registers_per_thread=255,
        l2_bytes=int(l2_mib * MIB),
        clock_ghz=clock_ghz,
        peak_gbs=float(gbs),
        peak_gflops_float32=float(gflops[0]),
        peak_gflops_float64=float(gflops[1]),
        memory_latency_cycles=float(latencies[0]),
        arithmetic_latency_cycles=float(latencies[1]),
    )


# Latencies are published microbenchmarks of the architecture, not of exactly this card at this clock: Y. Arafa et al.,
# arXiv 1905.08778, 2019 (Kepler to Volta, both latencies); W. Luo et al., arXiv 2402.13499, 2024 (memory of Ampere and
# Hopper, rounded; their multiply-add is taken to be Volta's). The paper measured its own and does not print them.
KNOWN: Mapping[str, Device] = MappingProxyType(
    {
        card.name: card
        for card in (
            # Table 2 counts float32 at the K40c's boost clock and float64 at the base clock, which stands here.
            _card("K40c", (3, 5), 15, 48, 1.5, clock_ghz=0.745, gbs=288, gflops=(5046, 1430), latencies=(331, 10)),
            _card("M40", (5, 2), 24, 96, 3, clock_ghz=1.114, gbs=288, gflops=(6844, 213), latencies=(379, 48)),
            # 4600 and 720 belong to the PCIe board, 10600 to the SXM2 one: the clock is that of the PCIe board.
            _card("P100", (6, 0), 56, 64, 4, clock_ghz=1.303, gbs=720, gflops=(10600, 4600), latencies=(482, 8)),
            _card("V100", (7, 0), 80, 96, 6, clock_ghz=1.455, gbs=900, gflops=(15000, 7500), latencies=(362, 8)),
            _card("A100", (8, 0), 108, 164, 40, clock_ghz=1.41, gbs=1555, gflops=(19500, 9700), latencies=(470, 8)),
            # H100 SXM5 80 GB and H200 SXM 141 GB: NVIDIA's data sheets of both give 67 and 34 TFLOPS.
            _card("H100", (9, 0), 132, 228, 50, clock_ghz=1.98, gbs=3350, gflops=(67000, 34000), latencies=(480, 8)),
            _card("H200", (9, 0), 132, 228, 60, clock_ghz=1.98, gbs=4800, gflops=(67000, 34000), latencies=(480, 8)),
        )
    }
)


def known(name: str) -> Device:
    """A card of `KNOWN` by its short name or by the name that its driver reports; case does not matter.

    Raises
    ------
    ValueError
        For a card that is not in the table; the message lists those that are.

    Examples
    --------
    >>> known("V100").peak_gbs
    900.0
    >>> known("NVIDIA H200") == known("h200")
    True
    """
    found = _published(name)
    if found is None:
        raise ValueError(
            f"no card {name!r} is known, only {', '.join(KNOWN)}: build a Device from its data sheet, or query() "
            "the one that is present"
        )
    return found


# A driver's name says the board, not just the chip: an H100 PCIe or an A100 80 GB has other peaks than those of KNOWN.
_DRIVER_NAMES = {
    "tesla k40c": "K40c",
    "tesla m40": "M40",
    "tesla p100-pcie-16gb": "P100",
    "tesla v100-sxm2-16gb": "V100",
    "tesla v100-sxm2-32gb": "V100",
    "a100-sxm4-40gb": "A100",
    "nvidia a100-sxm4-40gb": "A100",
    "a100-pcie-40gb": "A100",
    "nvidia a100-pcie-40gb": "A100",
    "nvidia h100 80gb hbm3": "H100",
    "nvidia h200": "H200",
}


def _published(name: str) -> Device | None:
    short = {key.lower(): key for key in KNOWN} | _DRIVER_NAMES
    key = short.get(name.strip().lower())
    return None if key is None else KNOWN[key]


# Cores per multiprocessor: results per clock cycle of float32 multiply-add (Programming Guide, table of arithmetic
# instructions' throughput), one entry for each step between compute capabilities.
_CORES = {(3, 0): 192, (5, 0): 128, (6, 0): 64, (6, 1): 128, (7, 0): 64, (8, 0): 64, (8, 6): 128}


def query(index: int | None = None) -> Device:
    """The GPU that is present, as its driver describes it.

    Parameters
    ----------
    index : int, optional
        Which one; by default CuPy's current device.

    Returns
    -------
    device : Device
        Limits are the driver's. Peaks and latencies of a card of `KNOWN` are the published ones; of any other, peaks
        follow from clocks, bus width and cores, and latencies are those of the closest known architecture.

    Raises
    ------
    NotSuitable
        Without CuPy or without a GPU.

    Notes
    -----
    Does not synchronise with the device.
    """
    cupy = _cupy("query a GPU")
    card = cupy.cuda.Device(index)
    properties = cupy.cuda.runtime.getDeviceProperties(card.id)
    name = properties["name"].decode()
    capability = (int(properties["major"]), int(properties["minor"]))
    published = _published(name)
    model = published or _relative(capability)
    found = replace(
        model,
        name=name,
        compute_capability=capability,
        multiprocessors=int(properties["multiProcessorCount"]),
        registers_per_sm=int(properties["regsPerMultiprocessor"]),
        shared_bytes_per_sm=int(properties["sharedMemPerMultiprocessor"]),
        shared_bytes_per_block=int(properties["sharedMemPerBlock"]),
        max_threads_per_sm=int(properties["maxThreadsPerMultiProcessor"]),
        max_threads_per_block=int(properties["maxThreadsPerBlock"]),
        l2_bytes=int(properties["l2CacheSize"]),
    )
    return found if published else _with_computed_peaks(found, card.attributes, int(properties["memoryBusWidth"]))


@functools.cache  # asking the driver takes longer than a small product
def device_of(index: int) -> Device:
    """The GPU of that number."""
    return query(index)


def _with_computed_peaks(device: Device, attributes: Mapping[str, int], bus_bits: int) -> Device:
    # CUDA 13 took the clocks out of the device properties; as attributes they remain. Both are in kHz, and memory
    # transfers twice a clock.
    clock_ghz = attributes["ClockRate"] / 1e6
    cores = _CORES[max(step for step in _CORES if step <= max(device.compute_capability, min(_CORES)))]
    float32 = 2 * cores * device.multiprocessors * clock_ghz
    return replace(
        device,
        clock_ghz=clock_ghz,
        peak_gbs=2 * attributes["MemoryClockRate"] * bus_bits / 8 / 1e6,
        peak_gflops_float32=float32,
        peak_gflops_float64=float32 / attributes["SingleToDoublePrecisionPerfRatio"],
    )


def _relative(capability: tuple[int, int]) -> Device:
    """The newest known card that is not newer than this compute capability, or the oldest."""
    older = [card for card in KNOWN.values() if card.compute_capability <= capability]
    return older[-1] if older else next(iter(KNOWN.values()))


def measure(index: int | None = None) -> Ceilings:
    """What the memory of a GPU reaches now: one reading kernel and one copy, each the median of 20.

    Parameters
    ----------
    index : int, optional
        Which GPU; by default CuPy's current device.

    Returns
    -------
    ceilings : Ceilings

    Raises
    ------
    NotSuitable
        Without CuPy or a GPU, or if there is too little free memory for arrays that no cache holds.

    Notes
    -----
    Takes up to 4 GiB for its two arrays and gives it back. Waits for the device after every repetition. Takes some
    tens of milliseconds on cards of today; run nothing else on the card meanwhile.
    """
    cupy = _cupy("measure a GPU's memory")
    benchmark = importlib.import_module("cupyx.profiler").benchmark
    card = cupy.cuda.Device(index)
    with card:
        l2_bytes = int(cupy.cuda.runtime.getDeviceProperties(card.id)["l2CacheSize"])
        free = int(cupy.cuda.runtime.memGetInfo()[0])
        size = min(2 * 1024 * MIB, free // 4) // 8
        if 8 * size < 4 * l2_bytes:
            raise NotSuitable(
                f"{free} bytes of GPU memory are free, and arrays beyond the cache's {l2_bytes} bytes need "
                f"{16 * l2_bytes}: free memory first (cupy.get_default_memory_pool().free_all_blocks())"
            )
        pool = cupy.cuda.MemoryPool()
        with cupy.cuda.using_allocator(pool.malloc):
            x = cupy.ones(size, dtype="float64")
            y = cupy.empty_like(x)

            def seconds(call: Any, *arguments: Any) -> float:
                times = benchmark(call, arguments, n_repeat=20, n_warmup=3).gpu_times[0]
                return statistics.median(float(t) for t in times)

            # The sum of a long vector reads as fast as any kernel; a copy between arrays of one layout is the driver's.
            read = 8 * size / seconds(cupy.sum, x)
            copy = 2 * 8 * size / seconds(cupy.copyto, y, x)
            del x, y
        pool.free_all_blocks()
    return Ceilings(read_gbs=read / 1e9, copy_gbs=copy / 1e9)


def _cupy(purpose: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise NotSuitable(
            f"CuPy is needed to {purpose}, and importing it failed ({error}): install abft_tsm2[cu13] or "
            f"abft_tsm2[cu12], or take a known card ({', '.join(KNOWN)})"
        ) from error
    if not cupy.is_available():
        raise NotSuitable(
            f"no GPU is there to {purpose}: check nvidia-smi and CUDA_VISIBLE_DEVICES, or take a known card "
            f"({', '.join(KNOWN)})"
        )
    return cupy
