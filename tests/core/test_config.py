"""Configurations: the predicate and its reasons, the launch, the published parameters, the choice by shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core import choose, kernels, tuning_file
from abft_tsm2.core.device import KNOWN, known
from abft_tsm2.core.paper import profile
from abft_tsm2.core.paper.config import BYTES, T1, VARIANTS, Config, choices, is_valid, launch, published, why_not
from abft_tsm2.core.problem import Problem
from abft_tsm2.errors import NotSuitable

H200 = known("H200")
GOOD = Config("V3", "float64", 128, 16, 16)
SQUARE = Problem(20480, 20480, 16, "float64")


@pytest.mark.parametrize(
    ("problem", "config", "device", "reason"),
    [
        (SQUARE, replace(GOOD, variant="V4"), H200, r"no variant 'V4': choose from V0, V1, V2, V3, Opt-1, Opt-2"),
        (SQUARE, replace(GOOD, dtype="float16"), H200, r"float32 and float64, not float16"),
        (SQUARE, replace(GOOD, t1=96), H200, r"t1 = 96: V3 is compiled for t1 in 64, 128, 256"),
        (SQUARE, replace(GOOD, t2=3), H200, r"t2 = 3: V3 is compiled for t2 in 2, 4, 8, 16"),
        (SQUARE, replace(GOOD, t3=5), H200, r"t3 = 5: "),
        (SQUARE, replace(GOOD, tcf=2), H200, r"tcf = 2: V3 is compiled for tcf in 1$"),
        (SQUARE, Config("V0", "float64", 128, 2), H200, r"t2 = 2: V0 is compiled for t2 in 1$"),
        (SQUARE, Config("V2", "float64", 64, 2, 4), H200, r"t1 = 64: V2 is compiled for t1 in 128$"),
        (SQUARE, Config("Opt-1", "float64", 128, 2, 8), H200, r"t2 = 2: Opt-1"),
        (SQUARE, GOOD, replace(H200, max_threads_per_block=64), r"more than the 64 threads"),
        (SQUARE, GOOD, replace(H200, shared_bytes_per_block=16383), r"takes 16384 bytes of shared memory, .* 16383"),
        (SQUARE, replace(GOOD, t3=32), H200, r"registers a thread, and a block of 128 threads has 255"),
        (SQUARE, GOOD, replace(H200, registers_per_sm=16384), r"has 128 for each"),
        (replace(SQUARE, dtype="float32"), GOOD, H200, r"multiplies float64, the operands are float32"),
        (replace(SQUARE, order="C"), GOOD, H200, r"A is not column-major"),
        (replace(SQUARE, m=2**31 * 128), GOOD, H200, r"more than 2147483647 blocks"),
    ],
)
def test_every_reason(problem, config, device, reason):
    assert why_not(SQUARE, GOOD, H200) is None
    found = why_not(problem, config, device)
    assert found is not None
    with pytest.raises(NotSuitable, match=reason):
        raise NotSuitable(found)
    assert not is_valid(problem, config, device)


@pytest.mark.parametrize("device", KNOWN.values(), ids=lambda device: device.name)
def test_choices_are_of_every_variant_and_type_and_distinct(device):
    configs = choices(device)
    assert {(config.variant, config.dtype) for config in configs} == {(v, d) for v in VARIANTS for d in BYTES}
    assert len({config.name for config in configs}) == len(configs)
    assert choices(device, variant="V3", dtype="float32") == tuple(
        config for config in configs if (config.variant, config.dtype) == ("V3", "float32")
    )


@given(st.integers(0, 10**8), st.integers(0, 10**5), st.integers(0, 64), st.sampled_from(sorted(BYTES)))
def test_published_parameters_can_be_chosen_and_the_launch_covers_every_row_once(m, k, n, dtype):
    problem = Problem(m, k, n, dtype)
    for variant in VARIANTS:
        config = published(problem, variant)
        assert is_valid(problem, config, H200)
        grid = launch(problem, config)
        assert grid.block == config.t1
        assert (
            grid.grid * grid.block * config.tcf >= m > (grid.grid - 1) * grid.block * config.tcf or m == grid.grid == 0
        )


def test_published_parameters_are_the_papers():
    def of(variant, m, n, dtype):
        config = published(Problem(m, m, n, dtype), variant)
        return config.t1, config.t2, config.t3, config.tcf

    assert of("V3", 30720, 16, "float32") == (128, 16, 32, 1)
    assert of("V3", 10240, 8, "float64") == (128, 8, 16, 1)
    assert of("V3", 20480, 2, "float64") == (128, 2, 12, 1)
    assert [of("Opt-1", 10**e, 16, "float32")[3] for e in (4, 5, 6, 7)] == [1, 1, 2, 8]
    assert [of("Opt-2", 10**e, 16, "float64")[3] for e in (4, 5, 6, 7)] == [1, 1, 1, 4]


UNMEASURED = replace(H200, name="a card that was never measured")
MEASURED = replace(H200, name="NVIDIA H200")


@pytest.mark.parametrize(
    ("m", "k", "n", "form"),
    [
        (10**6, 8, 8, "small"),
        (10**6, 16, 16, "small"),
        (20480, 20480, 2, "columns"),
        (20480, 300, 1, "columns"),
        (10, 10**6, 4, "columns"),
        (10**5, 200, 4, "columns"),  # k is short, and m makes up for it
        (16, 200, 1, None),  # nothing to do for most of the card
        (4096, 4096, 4096, None),  # not skinny
        (20480, 20480, 33, None),
    ],
)
@pytest.mark.parametrize("dtype", sorted(BYTES))
@pytest.mark.parametrize("card", [UNMEASURED, MEASURED], ids=lambda card: card.name)
def test_the_shape_decides(m, k, n, form, dtype, card):
    problem = Problem(m, k, n, dtype)
    choice = choose.shipped(problem, card)
    assert [config.form for config in choice.configs[:1]] == ([form] if form else [])
    assert choice.source == ("table" if card is MEASURED else "model")
    assert all(kernels.why_not(problem, config, card) is None for config in choice.configs)
    rows = choose.shipped(replace(problem, order="C"), card).configs
    assert [config.form for config in rows[:1]] == ([form.replace("columns", "rows")] if form else [])
    strided = choose.shipped(replace(problem, order="A", width=BYTES[dtype]), card).configs
    assert [config.form for config in strided] == (["small"] if form == "small" else [])


def test_without_a_measurement_what_ships_decides(monkeypatch, tmp_path):
    monkeypatch.setenv(tuning_file.VARIABLE, str(tmp_path))
    choose.choose.cache_clear()
    for problem in (SQUARE, replace(SQUARE, n=2), replace(SQUARE, n=2, order="C"), Problem(5, 5, 5, "float32")):
        assert choose.choose(problem, UNMEASURED) == choose.shipped(problem, UNMEASURED)
        assert choose.choose(problem, UNMEASURED).source == "model"
    choose.choose.cache_clear()


def test_the_vendor_library_is_left_to_where_it_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(
        choose, "COLUMNS_AHEAD", {MEASURED.name: {("C", "float64", "float64"): 4, ("C", "float32", "float32"): 8}}
    )
    few = replace(SQUARE, n=4, order="C")
    assert choose.shipped(few, MEASURED).configs
    assert choose.shipped(replace(few, n=5), MEASURED).configs == ()
    assert choose.shipped(replace(few, n=5), UNMEASURED).configs
    assert choose.shipped(replace(few, dtype="float32", weights="float32", out="float32", n=8), MEASURED).configs
    # What cuBLAS has no call for is ours, however many columns.
    assert choose.shipped(replace(few, dtype="float32", weights="float32", n=8), MEASURED).configs
    assert choose.shipped(replace(few, out_order="A", n=8), MEASURED).configs


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("n", "b_order", "out_order", "width", "form"),
    [
        (4, "F", "F", 16, "columns"),
        (5, "F", "F", 16, "tensor"),
        (8, "C", "F", 16, "tensor"),
        (16, "C", "C", 16, "tensor"),
        (9, "F", "C", 16, None),  # cuBLAS
        (9, "C", "F", 16, None),
        (17, "C", "C", 16, None),
        (5, "C", "C", 8, None),  # no vectors for the tensor cores
    ],
)
def test_columns_of_16_bits_go_to_the_tensor_cores_where_these_are_ahead(n, b_order, out_order, width, form, dtype):
    card = replace(H200, name="NVIDIA H200")
    problem = Problem(20480, 20480, n, dtype, out="float32", b_order=b_order, out_order=out_order, width=width)
    configs = choose.shipped(problem, card).configs
    assert [config.form for config in configs[:1]] == ([form] if form else [])


def test_the_model_keeps_to_what_the_memory_leaves_time_for():
    slow = replace(UNMEASURED, peak_gflops_float64=UNMEASURED.peak_gbs)  # an operation for each byte
    one = Problem(20480, 20480, 1, "float64")
    for device, ours in (
        (UNMEASURED, True),
        (slow, True),
        (replace(slow, peak_gflops_float64=UNMEASURED.peak_gbs / 2), False),
    ):
        assert bool(choose.shipped(one, device).configs) is ours
    assert choose.shipped(replace(one, n=4), UNMEASURED).configs
    assert not choose.shipped(replace(one, n=4), slow).configs


@given(st.integers(1, 10**6), st.integers(65, 10**5), st.integers(1, 64), st.sampled_from(sorted(BYTES)))
def test_the_models_parameters_are_rounded_to_a_kernel_that_exists(m, k, n, dtype):
    problem = Problem(m, k, n, dtype)
    for device in (H200, known("V100"), known("M40")):
        config = choose.modelled(problem, device)
        assert config.variant == "V3"
        assert is_valid(problem, config, device)


def test_profiling_without_a_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    for sweep in (profile.profile_t1, profile.profile_tcf):
        with pytest.raises(NotSuitable, match="CuPy"):
            sweep(SQUARE)
    with pytest.raises(ValueError, match="V3 has no tcf: choose from Opt-1, Opt-2"):
        profile.profile_tcf(SQUARE, config=GOOD)
    assert all(t1 % 32 == 0 for t1 in T1)
