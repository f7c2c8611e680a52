"""The performance model against the paper's numbers, against its own laws, and with the paper's slips planted in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from abft_tsm2.core.choose import modelled
from abft_tsm2.core.device import KNOWN, Device, known
from abft_tsm2.core.paper.config import BYTES, Config, choices
from abft_tsm2.core.paper.model import (
    AS_PRINTED,
    WELL_POSED,
    Choices,
    Parameters,
    compute_time,
    compute_utilisation,
    is_compute_bound,
    max_occupancy,
    memory_time,
    memory_utilisation,
    optimise,
    predicted_gain,
    predicted_time,
    ratio,
    registers_per_thread,
    shared_bytes_per_thread,
    t2_threshold,
)
from abft_tsm2.core.problem import Problem
from benchmarks.paper import parameters
from benchmarks.sheet import read

devices = st.sampled_from(list(KNOWN.values()))
dtypes = st.sampled_from(list(BYTES))
tiles = st.floats(1, 64)  # t2 and t3 are real numbers to the descent


# -- the paper's numbers ------------------------------------------------------------------------------------------


# (card, as the paper gives it, exactly): 40, 6, 50, 70 and 50 in its text.
THRESHOLDS = [("K40c", 40, 39.72), ("M40", 6, 5.917), ("P100", 50, 51.11), ("V100", 70, 66.67), ("A100", 50, 49.90)]


@pytest.mark.parametrize(("card", "text", "exact"), THRESHOLDS)
def test_threshold_of_t2(card: str, text: float, exact: float) -> None:
    found = t2_threshold(known(card), "float64")
    assert found == pytest.approx(exact, abs=0.005)
    assert found == pytest.approx(text, rel=0.05)


@pytest.mark.parametrize("card", ["K40c", "M40", "P100", "V100", "A100"])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_what_bounds_the_papers_problems(card: str, n: int) -> None:
    # Memory, everywhere but float64 on the M40, whose threshold of 6 lies among these n.
    assert is_compute_bound(Problem(20480, 20480, n, "float64"), known(card)) == (card == "M40" and n > 6)
    assert not is_compute_bound(Problem(20480, 20480, n, "float32"), known(card))


@pytest.mark.parametrize("dtype", BYTES)
def test_an_h200_becomes_compute_bound_at_64(dtype: str) -> None:
    bounds = [is_compute_bound(Problem(20480, 20480, n, dtype), known("H200")) for n in (16, 64)]
    assert bounds == [False, True]


def test_gain_of_the_a100_over_the_v100() -> None:
    assert predicted_gain(known("A100"), known("V100"), "float64") == pytest.approx(1.7, abs=0.05)
    # Compute-bound on both, the arithmetic decides: 9.7 over 7.5.
    assert predicted_gain(known("A100"), known("V100"), "float64", n=256) == pytest.approx(1.3, abs=0.01)


# With the latencies of KNOWN and C = 16; the paper's own are not printed, so no table of it can be the oracle here.
@pytest.mark.parametrize(
    ("card", "size", "t2_t3"),
    [
        ("K40c", 20480, (5, 5)),
        ("K40c", 30720, (7, 8)),
        ("M40", 20480, (6, 1)),
        ("P100", 20480, (3, 3)),
        ("P100", 30720, (4, 4)),  # what Table 3 has
    ],
)
def test_procedure_as_printed(card: str, size: int, t2_t3: tuple[int, int]) -> None:
    found = optimise(Problem(size, size, 16, "float64"), known(card))
    assert (found.t2, found.t3) == t2_t3
    assert found.converged
    assert found.compute_bound == (card == "M40")


@pytest.mark.parametrize("row", parameters.TABLES, ids=lambda row: f"{row.kernel}-{row.dtype}-{row.t3}")
def test_tables_3_and_4_leave_a_plausible_c(row: parameters.Printed) -> None:
    tiles_alone = registers_per_thread(row.dtype, row.t2, row.t3, replace(AS_PRINTED, fixed_registers=0))
    if row.kernel != "Opt-2":  # which holds nextC beside, and stands at the limit of 255 registers
        assert 6 <= row.registers - tiles_alone <= 32
    # The shared memory column is right where a number is printed, and 4 or 8 times too large where a formula is.
    computed = row.t1 * shared_bytes_per_thread(row.dtype, row.t2)
    assert row.shared_bytes == computed * (BYTES[row.dtype] if row.t2 == 16 else 1)


# -- laws ---------------------------------------------------------------------------------------------------------


@given(devices, dtypes, tiles, tiles)
def test_occupancy_obeys_every_limit(device: Device, dtype: str, t2: float, t3: float) -> None:
    threads = max_occupancy(device, dtype, t2, t3)
    slack = 1 + 1e-12
    assert 0 < threads <= device.max_threads_per_sm
    assert threads * registers_per_thread(dtype, t2, t3) <= device.registers_per_sm * slack
    assert threads * shared_bytes_per_thread(dtype, t2) <= device.shared_bytes_per_sm * slack


def test_each_limit_of_the_occupancy_is_reached() -> None:
    k40c = known("K40c")
    assert max_occupancy(k40c, "float32", 1, 1) == 2048  # threads
    assert max_occupancy(k40c, "float64", 1, 64) == 65536 / (2 * (3 + 128) + 16)  # registers
    assert max_occupancy(k40c, "float64", 32, 1) == 48 * 1024 / 256  # shared memory: 192, registers would allow 306


@given(devices, dtypes, tiles, tiles, st.floats(1.01, 4))
def test_more_loads_in_flight_never_lower_a_utilisation(
    device: Device, dtype: str, t2: float, t3: float, factor: float
) -> None:
    # Occupancy falls with t3, but always by less than t3 grows.
    for utilisation in (memory_utilisation, compute_utilisation):
        assert utilisation(device, dtype, t2, factor * t3) > utilisation(device, dtype, t2, t3)
        assert utilisation(device, dtype, t2, t3, WELL_POSED) == min(1, utilisation(device, dtype, t2, t3))


@given(devices, tiles, tiles)
def test_an_element_of_float64_keeps_twice_the_bytes_in_flight(device: Device, t2: float, t3: float) -> None:
    threads = {dtype: max_occupancy(device, dtype, t2, t3) for dtype in BYTES}
    assert threads["float64"] <= threads["float32"] <= 2 * threads["float64"]
    bytes_per_thread = {dtype: memory_utilisation(device, dtype, t2, t3) / threads[dtype] for dtype in BYTES}
    assert bytes_per_thread["float64"] == pytest.approx(2 * bytes_per_thread["float32"])


@given(devices, dtypes, tiles, tiles, st.floats(1.5, 8))
def test_twice_the_latency_needs_twice_the_concurrency(
    device: Device, dtype: str, t2: float, t3: float, factor: float
) -> None:
    slow = Choices(
        memory_latency_cycles=factor * device.memory_latency_cycles,
        arithmetic_latency_cycles=factor * device.arithmetic_latency_cycles,
    )
    for utilisation in (memory_utilisation, compute_utilisation):
        assert factor * utilisation(device, dtype, t2, t3, slow) == pytest.approx(utilisation(device, dtype, t2, t3))


def test_utilisation_by_hand() -> None:
    # V100, t2 = 16, t3 = 12 in float64: 65536 / (2 (48 + 24) + 16) = 409.6 threads by registers, 768 by shared memory;
    # 409.6 x 12 x 8 bytes under way, 362 cycles x 900 / (80 x 1.455) bytes a cycle needed.
    v100 = known("V100")
    assert memory_utilisation(v100, "float64", 16, 12) == pytest.approx(39321.6 / (362 * 900 / 116.4))
    assert compute_utilisation(v100, "float64", 16, 12) == pytest.approx(409.6 * 12 * 16 * 2 / (8 * 7500 / 116.4))


@given(devices, dtypes, st.sampled_from([1, 2]))
def test_the_ratio_is_one_at_the_threshold(device: Device, dtype: str, flops: int) -> None:
    threshold = t2_threshold(device, dtype, flops=flops)
    assert ratio(device, dtype, threshold, flops=flops) == pytest.approx(1)
    assert t2_threshold(device, dtype, flops=1) == pytest.approx(flops * threshold)


@given(devices, dtypes, tiles, tiles)
def test_the_ratio_is_that_of_the_times(device: Device, dtype: str, t2: float, t3: float) -> None:
    assume(min(f(device, dtype, t2, t3) for f in (memory_utilisation, compute_utilisation)) > 1)
    problem = Problem(20480, 20480, 16, dtype)
    times = compute_time(problem, device, t2, t3, WELL_POSED) / memory_time(problem, device, t2, t3, WELL_POSED)
    assert ratio(device, dtype, t2, flops=2) == pytest.approx(times)
    assert ratio(device, dtype, t2) == pytest.approx(times / 2)  # the slip: a multiply-add counted once


def test_predicted_time_is_the_longer_one_at_most_at_peak() -> None:
    v100, problem = known("V100"), Problem(20480, 20480, 16, "float64")
    reading, computing = 20480**2 * 8 / 900e9, 2 * 20480**2 * 16 / 7500e9
    assert predicted_time(problem, v100, t2=16, t3=12) == pytest.approx(reading)
    assert predicted_time(problem, v100, t2=8, t3=12) == pytest.approx(2 * reading)
    assert predicted_time(replace(problem, n=64), v100, t2=64, t3=12) == pytest.approx(4 * computing)
    assert predicted_time(problem, v100, 16, 12, AS_PRINTED) == pytest.approx(reading)  # never above the peak


# -- the procedure ------------------------------------------------------------------------------------------------


@given(
    devices,
    st.builds(Problem, st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 300), dtypes),
    st.builds(Choices, cap=st.booleans(), flops=st.sampled_from([1, 2]), relative=st.booleans(), limit=st.just(60)),
)
def test_the_procedure_stays_in_its_bounds(device: Device, problem: Problem, choices: Choices) -> None:
    found = optimise(problem, device, choices)
    assert 1 <= found.t2 <= max(1, problem.n)
    assert found.t3 >= 1
    assert found.steps <= 60
    if found.compute_bound:
        assert is_compute_bound(problem, device, flops=choices.flops)
        assert found.t2 >= t2_threshold(device, problem.dtype, flops=choices.flops) - 0.5


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("n", [2, 16])
def test_well_posed_it_finds_what_a_search_finds(device: Device, dtype: str, n: int) -> None:
    problem = Problem(20480, 20480, n, dtype)
    found = optimise(problem, device, WELL_POSED)
    assert found.converged
    best = min(predicted_time(problem, device, t2, t3) for t2 in range(1, n + 1) for t3 in range(1, 65))
    assert predicted_time(problem, device, found.t2, found.t3) <= 1.01 * best
    if not is_compute_bound(problem, device, flops=2):
        assert found.t2 == n  # A is read once, as Table 3 has it for K40c and V100


def test_as_printed_it_depends_on_the_size_and_well_posed_it_does_not() -> None:
    def found(size: int, choices: Choices) -> tuple[int, int]:
        parameters = optimise(Problem(size, size, 16, "float64"), known("K40c"), choices)
        return parameters.t2, parameters.t3

    assert found(5120, AS_PRINTED) < found(10240, AS_PRINTED) < found(20480, AS_PRINTED)
    assert found(5120, WELL_POSED) == found(20480, WELL_POSED) == (16, 3)


def test_rounding_t3_to_the_nearest_may_starve_the_memory() -> None:
    problem, h100 = Problem(20480, 20480, 16, "float64"), known("H100")
    up, nearest = optimise(problem, h100, WELL_POSED), optimise(problem, h100, replace(WELL_POSED, t3_up=False))
    assert (up.t3, nearest.t3) == (2, 1)
    assert predicted_time(problem, h100, 16, 1) > 1.3 * predicted_time(problem, h100, 16, 2)


def test_uncapped_there_is_no_best_t3() -> None:
    problem = Problem(20480, 20480, 16, "float64")
    times = [memory_time(problem, known("K40c"), 16, 10.0**power) for power in range(8)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == len(times)


def test_the_unit_of_time_decides_where_it_stops() -> None:
    problem, p100 = Problem(10240, 10240, 16, "float64"), known("P100")
    seconds, tens = (optimise(problem, p100, Choices(seconds_per_unit=unit)) for unit in (1.0, 0.1))
    assert seconds.t2 < tens.t2
    assert seconds.t3 < tens.t3


def test_choices_are_followed() -> None:
    problem, k40c = Problem(20480, 20480, 16, "float64"), known("K40c")
    printed = optimise(problem, k40c)
    assert optimise(problem, k40c, Choices(stop_on="time")).steps < printed.steps
    assert optimise(problem, k40c, Choices(stop=1e-3)).steps < printed.steps
    short = optimise(problem, k40c, Choices(limit=100))
    assert (short.steps, short.converged) == (100, False)
    assert optimise(problem, k40c, Choices(memory_latency_cycles=1000)).t3 > printed.t3
    with pytest.raises(ValueError, match=r"stop_on = 'gradient': a descent stops on 'move' or on 'time'"):
        Choices(stop_on="gradient")


def test_at_the_threshold_itself_it_is_memory_bound() -> None:
    # Line 1: n <= threshold. 900 GB/s and 7200 GFLOP/s balance at t2 = 64 exactly.
    balanced, problem = replace(known("V100"), peak_gflops_float64=7200.0), Problem(20480, 20480, 64, "float64")
    assert t2_threshold(balanced, "float64") == 64
    assert not is_compute_bound(problem, balanced)
    assert optimise(problem, balanced).t2 < 64  # by computing it would have to stay there


def test_nothing_to_multiply_and_other_types() -> None:
    for shape in ((0, 5, 5), (5, 0, 5), (5, 5, 0)):
        assert optimise(Problem(*shape, "float64"), known("V100")) == Parameters(1, 1, 0.0, False, 0, True)
    with pytest.raises(ValueError, match=r"float32 and float64, not 'float16'"):
        shared_bytes_per_thread("float16", 4)
    with pytest.raises(ValueError, match=r"'float16' on V100"):
        optimise(Problem(5, 5, 5, "float16"), known("V100"))


@pytest.mark.parametrize("dtype", [np.float32, np.dtype(np.float32), "f4", ">f4", "single"], ids=str)
def test_types_are_what_numpy_takes_as_one(dtype: Any) -> None:
    card, tile = known("H200"), {"t2": 4.0, "t3": 2.0}
    assert card.peak_gflops(dtype) == card.peak_gflops("float32")
    assert t2_threshold(card, dtype) == t2_threshold(card, "float32")
    assert ratio(card, dtype, 3.0) == ratio(card, "float32", 3.0)
    assert predicted_gain(card, known("V100"), dtype) == predicted_gain(card, known("V100"), "float32")
    assert shared_bytes_per_thread(dtype, 4) == 16
    assert registers_per_thread(dtype, **tile) == registers_per_thread("float32", **tile)
    for estimate in (max_occupancy, memory_utilisation, compute_utilisation):
        assert estimate(card, dtype, **tile) == estimate(card, "float32", **tile)
    assert Problem(100, 100, 4, dtype, weights=dtype, out=dtype) == Problem(100, 100, 4, "float32")
    assert Config("V3", dtype, 128, 4, 4) == Config("V3", "float32", 128, 4, 4)
    assert set(choices(card, dtype=dtype)) == {config for config in choices(card) if config.dtype == "float32"} != set()
    assert modelled(Problem(10**4, 10**4, 4, dtype), card) == modelled(Problem(10**4, 10**4, 4, "float32"), card)


# -- the paper's slips, planted: each check above has to see them --------------------------------------------------


Time = Callable[[Problem, Device, float, float], float]
Utilisation = Callable[[Device, str, float, float], float]


def grows_with_the_work(time: Time) -> bool:
    """Twice m, twice k, twice n each take twice the time at fixed t2."""
    shape = {"m": 4096, "k": 512, "n": 16}
    base = time(Problem(**shape, dtype="float64"), known("V100"), 4, 4)
    grown = [
        time(Problem(**(shape | {name: 2 * size}), dtype="float64"), known("V100"), 4, 4)
        for name, size in shape.items()
    ]
    return grown == pytest.approx([2 * base] * 3)


def counts_bytes(utilisation: Utilisation) -> bool:
    """At full occupancy the same number of elements of float64 keeps twice the bytes in flight."""
    return utilisation(known("V100"), "float64", 1, 1) == pytest.approx(2 * utilisation(known("V100"), "float32", 1, 1))


def counts_both_operations(utilisation: Utilisation) -> bool:
    """One thread a lane, each with latency_comp multiply-adds under way, is exactly peak (V100: 64 lanes, 8 cycles)."""
    lanes = known("V100").peak_gflops("float64") / (2 * 80 * 1.455)
    full = 8 * lanes / max_occupancy(known("V100"), "float64", 1, 1)
    return utilisation(known("V100"), "float64", 1, 1) == pytest.approx(1 / full)


def test_line_12_with_n_n_k_is_seen() -> None:
    def slip(problem: Problem, device: Device, t2: float, t3: float) -> float:
        return memory_time(replace(problem, m=problem.n), device, t2, t3)

    assert grows_with_the_work(memory_time)
    assert grows_with_the_work(compute_time)
    assert not grows_with_the_work(slip)


def test_elements_against_bytes_are_seen() -> None:
    def slip(device: Device, dtype: str, t2: float, t3: float) -> float:
        return memory_utilisation(device, dtype, t2, t3) / BYTES[dtype]

    assert counts_bytes(memory_utilisation)
    assert not counts_bytes(slip)


def test_a_multiply_add_counted_once_is_seen() -> None:
    def slip(device: Device, dtype: str, t2: float, t3: float) -> float:
        return compute_utilisation(device, dtype, t2, t3) / 2

    assert counts_both_operations(compute_utilisation)
    assert not counts_both_operations(slip)


def test_line_9_bounds_t2_by_n_not_by_k() -> None:
    # In milliseconds the descent of the computing time runs into its upper bound.
    found = optimise(Problem(30720, 30720, 16, "float64"), known("M40"), Choices(seconds_per_unit=1e-3, limit=3000))
    assert found.compute_bound
    assert found.t2 <= 16


# -- the tables of the documentation ------------------------------------------------------------------------------


def test_the_documented_tables_are_current() -> None:
    def text(rows: list[dict[str, object]]) -> list[dict[str, str]]:
        return [{key: str(value) for key, value in row.items()} for row in rows]

    assert text(parameters.resources()) == read("resources")
    for card in ("M40", "H200"):
        assert text(parameters.procedure([card])) == [row for row in read("parameters") if row["card"] == card]
    quick = [row for row in read("parameters_choices") if "not ended" not in row["P100"]]
    assert len(quick) >= 9
    assert [row["choice"] for row in read("parameters_choices")] == list(parameters.VARIATIONS)
    for row in quick:
        problem = Problem(20480, 20480, parameters.N, "float64")
        found = optimise(problem, known("P100"), parameters.VARIATIONS[row["choice"]])
        assert row["P100"] == f"{found.t2}, {found.t3}"
