"""Bounds: each formula against one derived here, against measured rounding, and against planted changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2 import Status, detection_limit, encode, protected_gemm
from abft_tsm2.arrays import FLOATS
from abft_tsm2.checksum.bounds import (
    Arithmetic,
    arithmetic,
    bound_factors,
    checksum_noise_factor,
    element_noise,
    largest_norm,
    rigorous_factor,
    statistical_bound,
    statistical_factor,
)
from benchmarks import families
from tests.support.cases import DTYPES
from tests.support.oracles import WIDE, exact_product

IDS = [dtype.name for dtype in DTYPES]
U = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SMALLEST = {"float64": 2.0**-1074, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
PAIRS = [("float64", "float64"), ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
PAIRS += [("float16", "float32"), ("bfloat16", "float32")]
sizes = st.integers(1, 10**6)
positive = st.floats(1e-200, 1e200)


# ---- how a product is computed ------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "output"), PAIRS)
def test_arithmetic_of_each_pair_of_types(inputs: str, output: str) -> None:
    a = arithmetic(inputs, output)
    wide = inputs if inputs in ("float32", "float64") else "float32"
    assert a.u == U[wide]
    assert a.u_out == (U[output] if output in ("float16", "bfloat16") else 0.0)
    stored = SMALLEST[output] if wide != output else 0.0
    assert a.underflow(5) == 7 * SMALLEST[wide] + stored
    assert a.underflow(5, alpha=-3.0) == 17 * SMALLEST[wide] + stored
    assert not a.truncating


def test_flushed_subnormals_cost_a_whole_smallest_normal() -> None:
    for name, normal in (("float32", 2.0**-126), ("float64", 2.0**-1022)):
        assert arithmetic(name, name, library="cupy").underflow(7) == 9 * normal
        assert arithmetic(name, name, library="array_api_strict").underflow(7) == 9 * SMALLEST[name]
    assert arithmetic("float16", "float16", library="cupy").underflow(7) == 9 * 2.0**-126 + 2.0**-14


# ---- the formulas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "output"), PAIRS)
@given(k=sizes, n=sizes, products=positive, stored=positive, added=st.none() | positive)
def test_the_statistical_bound(
    inputs: str, output: str, k: int, n: int, products: float, stored: float, added: float | None
) -> None:
    # 4 sqrt(k) roundings of C, independent of those of its float64 checksum; and four roundings of a narrow C.
    u = U[inputs] if inputs in ("float32", "float64") else U["float32"]
    u_out = U[output] if output in ("float16", "bfloat16") else 0.0
    stored_at_most = min(stored, 1.01 * (k**0.5 * products + (added or 0.0)))
    factor = ((4 * u) ** 2 * k + (0.75 * 2**-53 * (k**0.5 + (2 * n) ** 0.5)) ** 2) ** 0.5
    expected = factor * max(products, stored_at_most, added or 0.0) + 4 * u_out * stored_at_most
    a = arithmetic(inputs, output)
    found = statistical_bound(np, a, k, n, products=products, stored=stored, added=added, underflow=0.0)
    assert math.isclose(found, expected, rel_tol=1e-12)
    below = statistical_bound(np, a, k, n, products=products, stored=0.0, added=added, underflow=1e-3 * products)
    assert below >= 1e-3 * products


def test_truncating_adders_err_in_one_direction() -> None:
    a = Arithmetic(FLOATS["float32"], FLOATS["float32"], truncating=True)
    rounding = Arithmetic(FLOATS["float32"], FLOATS["float32"])
    for k in (1, 100, 10**5):
        assert math.isclose(statistical_factor(a, k, 1) - statistical_factor(rounding, k, 1), 0.1 * k * 2.0**-24)
        assert rigorous_factor(a, k) > 1.9 * rigorous_factor(rounding, k)


@pytest.mark.parametrize(("inputs", "output"), PAIRS)
@given(k=st.integers(1, 10**8), n=sizes)
def test_rigorous_and_usual_rounding_of_an_element(inputs: str, output: str, k: int, n: int) -> None:
    a = arithmetic(inputs, output)
    # |fl(x.y) - x.y| <= k u |x||y| for every k (Jeannerod and Rump 2013); alpha and beta c add two operations.
    assert math.isclose(rigorous_factor(a, k), (k + 2) * (a.u + 2.0**-53), rel_tol=1e-12)
    assert math.isclose(element_noise(a, k), k**0.5 * (a.u + 2.0**-53), rel_tol=1e-12)
    assert element_noise(a, k) < rigorous_factor(a, k)
    assert math.isclose(checksum_noise_factor(k, n), 8 * 2.0**-53 * (k**0.5 + (2 * n) ** 0.5), rel_tol=1e-12)


@given(k=sizes, n=sizes, more=st.integers(1, 1000))
def test_no_bound_shrinks_as_a_product_grows(k: int, n: int, more: int) -> None:
    for pair in PAIRS:
        a = arithmetic(*pair)
        assert statistical_factor(a, k, n) < statistical_factor(a, k + more, n)
        assert statistical_factor(a, k, n) <= statistical_factor(a, k, n + more)  # lost beside float32's rounding
        assert rigorous_factor(a, k) < rigorous_factor(a, k + more)
        assert element_noise(a, k) < element_noise(a, k + more)
        assert a.underflow(k) <= a.underflow(k + more)  # equal where the smallest stored number is all of it


@given(at=st.integers(0, 5), factor=st.floats(1.0, 1e6))
def test_the_bound_grows_with_every_statistic(at: int, factor: float) -> None:
    a = arithmetic("float16", "float16")
    values = {"products": np.full(6, 2.0), "stored": np.full(6, 2.0), "added": np.full(6, 2.0), "underflow": 1e-9}
    before = statistical_bound(np, a, 10, 20, **values)
    for name in ("products", "stored", "added"):
        raised = values[name].copy()
        raised[at] *= factor
        after = statistical_bound(np, a, 10, 20, **{**values, name: raised})
        assert (after >= before).all()
        assert np.array_equal(np.delete(after, at), np.delete(before, at))


def test_what_is_not_finite_shows() -> None:
    a, sizes = arithmetic("float64", "float64"), {"products": np.ones(1), "added": np.ones(1), "underflow": 0.0}
    for bad in (np.inf, np.nan):
        for name in ("products", "added"):
            values = {**sizes, name: np.array([bad])}
            with np.errstate(all="ignore"):
                assert not np.isfinite(statistical_bound(np, a, 3, 3, stored=np.ones(1), **values)).any()
        # What C holds shows in the bound or in its norm, which no right C has.
        stored = np.array([bad])
        bound = statistical_bound(np, a, 3, 3, stored=stored, **sizes)
        assert not (np.isfinite(bound) & (stored <= largest_norm(3, **sizes))).any()


@given(k=sizes, large=st.floats(1.0, 1e100))
def test_a_large_fault_does_not_widen_the_bound_it_is_compared_with(k: int, large: float) -> None:
    for pair in PAIRS:
        a, values = arithmetic(*pair), {"products": 2.0, "added": 3.0, "underflow": 1e-30}
        most = largest_norm(k, **values)
        assert math.isclose(most, 1.01 * (k**0.5 * 2.0 + 3.0) + 1e-30, rel_tol=1e-12)
        at_most = statistical_bound(np, a, k, 9, stored=most, **values)
        assert statistical_bound(np, a, k, 9, stored=most * large, **values) == at_most


# ---- against measured rounding ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("family", families.names("generic", "structured", "pathological"))
def test_no_element_is_beyond_the_rigorous_bound(family: str, dtype: np.dtype[Any]) -> None:
    rng = np.random.default_rng(5)
    m, k, n = 4, 60, 3
    a, b = families.operands(family, m, k, n, rng, dtype)
    c = protected_gemm(a, b)
    how = arithmetic(dtype.name, dtype.name)
    exact, total = exact_product(a, b), exact_product(abs(a), abs(b))
    for i, j in np.ndindex(m, n):
        error = float(abs(exact_product(c[i : i + 1, j : j + 1], np.ones((1, 1), dtype))[0, 0] - exact[i, j]))
        allowed = rigorous_factor(how, k) * float(total[i, j]) + 2 * how.u_out * abs(float(exact[i, j]))
        assert error <= allowed + how.underflow(k)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("family", families.names("generic", "structured", "pathological"))
def test_no_right_line_is_longer_than_its_largest_norm(family: str, dtype: np.dtype[Any]) -> None:
    for m, k, n in ((20, 30, 10), (3, 1000, 2), (2, 1, 1)):
        a, b = families.operands(family, m, k, n, np.random.default_rng(7), dtype)
        c, v = protected_gemm(a, b, check="rows").astype(WIDE), encode(b, side="rows").weights.rows[:, 0].astype(WIDE)
        size = np.sqrt(a.astype(WIDE) ** 2 @ (b.astype(WIDE) ** 2 @ v**2))
        lost = arithmetic(dtype.name, dtype.name).underflow(k) * abs(v).sum()
        assert (np.sqrt(c**2 @ v**2) <= largest_norm(k, products=size, added=None, underflow=lost)).all()


@pytest.mark.parametrize("name", ["float64", "float32", "float16"])
@pytest.mark.parametrize("family", families.names("generic"))
def test_residuals_of_generic_data_keep_their_distance(family: str, name: str) -> None:
    rng = np.random.default_rng(6)
    m, k, n = 60, 500, 40
    a, b = families.operands(family, m, k, n, rng, np.dtype(name))
    c = protected_gemm(a, b, check="rows").astype(WIDE)
    v = encode(b, side="rows").weights.rows[:, 0].astype(WIDE)
    wide_a, wide_b = a.astype(WIDE), b.astype(WIDE)
    residual = abs(c @ v - wide_a @ (wide_b @ v))
    bound = statistical_bound(
        np,
        arithmetic(name, name),
        k,
        n,
        products=np.sqrt(wide_a**2 @ (wide_b**2 @ v**2)),
        stored=np.sqrt(c**2 @ v**2),
        added=None,
        underflow=arithmetic(name, name).underflow(k) * abs(v).sum(),
    )
    assert (residual <= 0.7 * bound).all()
    if family in ("normal", "uniform01", "uniform-11"):
        assert residual.max() >= 0.02 * bound.min()  # a bound that is never approached finds less than it could


# ---- what is promised beforehand ----------------------------------------------------------------------------


def found_share(m: int, k: int, n: int, dtype: np.dtype[Any], share: float, trials: int, **options: Any) -> float:
    """How often a change of `share` detection limits in one random element of C is found."""
    found = 0
    limit = detection_limit(m, k, n, dtype, options.get("out_dtype"))
    for seed in range(trials):
        rng = np.random.default_rng([seed, m, k, n])
        a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((m, k), (k, n)))
        at, sign = (rng.integers(m), rng.integers(n)), rng.choice([-1, 1])

        def change(stage: str, arrays: Any, at: Any = at, sign: float = sign) -> None:
            if stage == "multiplied":
                c = arrays["C"]
                rms = np.sqrt(np.mean(c.astype(np.float64) ** 2))
                c[at] = c[at].astype(np.float64) + sign * share * limit * rms

        _, report = protected_gemm(a, b, on_stage=change, on_error="detect", return_report=True, **options)
        found += report.status is Status.UNCORRECTABLE
    return found / trials


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("shape", [(64, 64, 64), (256, 256, 256), (40, 300, 200), (200, 300, 40), (100, 1024, 90)])
def test_a_change_at_the_limit_is_found(shape: tuple[int, int, int], dtype: np.dtype[Any]) -> None:
    assert found_share(*shape, dtype, 1.0, 20) >= 0.95


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_small_products_find_little_more_than_the_limit(dtype: np.dtype[Any]) -> None:
    # Their lines are few and differ more among one another.
    for shape in ((2, 2, 2), (5, 3, 7), (300, 3, 5), (3, 3000, 3)):
        assert found_share(*shape, dtype, 6.0, 12) == 1.0


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_the_limit_is_not_an_exaggeration(name: str) -> None:
    assert found_share(256, 256, 256, np.dtype(name), 0.25, 25) <= 0.1
    assert found_share(64, 64, 64, np.dtype(name), 0.25, 25) <= 0.1


def test_half_precision_kept_in_float32_finds_more() -> None:
    half = np.dtype(np.float16)
    assert detection_limit(64, 64, 64, half, "float32") < detection_limit(64, 64, 64, half) / 100
    assert found_share(64, 64, 64, half, 1.0, 25, out_dtype="float32") >= 0.95


def test_detection_limit_grows_with_the_product_and_with_the_unit_roundoff() -> None:
    by_type = [detection_limit(100, 100, 100, name) for name in ("float64", "float32", "float16", "bfloat16")]
    assert by_type == sorted(by_type)
    for dtype in U:
        by_k = [detection_limit(100, k, 100, dtype) for k in (1, 10, 100, 10**5)]
        assert by_k == sorted(by_k)
        by_n = [detection_limit(100, 100, n, dtype) for n in (1, 10, 100)]
        assert by_n == sorted(by_n)
        assert detection_limit(10**5, 100, 30, dtype) == detection_limit(30, 100, 10**5, dtype)
    # The published limits of normal data: 3.7e-4 and 1.5e-3 in float32, 6.8e-13 and 2.7e-12 in float64.
    for name, n, published in (("float32", 1024, 3.7e-4), ("float32", 4096, 1.5e-3), ("float64", 4096, 2.7e-12)):
        assert published < detection_limit(n, n, n, name) < 2.5 * published


def test_detection_limit_of_types() -> None:
    assert detection_limit(9, 9, 9, np.float32) == detection_limit(9, 9, 9, "float32")
    assert detection_limit(9, 9, 9) == detection_limit(9, 9, 9, np.dtype(">f8"))
    for bad in ("int32", np.complex128, "float8", bool):
        with pytest.raises(TypeError, match="is not protected: choose among float64"):
            detection_limit(9, 9, 9, bad)
    with pytest.raises((TypeError, ValueError), match="float32"):
        detection_limit(9, 9, 9, "float32", out_dtype="float64")
    for shape in ((0, 1, 1), (1, 0, 1), (1, 1, -3)):
        with pytest.raises(ValueError, match="at least 1"):
            detection_limit(*shape)


def test_sizes_of_a_detection_limit_are_whole_numbers() -> None:
    for dtype in ("f4", "<f4", "single", "float32"):
        assert detection_limit(np.int8(9), np.array(9), np.uint64(9), dtype) == detection_limit(9, 9, 9, np.float32)
    for position, name in enumerate("mkn"):
        for wrong in (np.nan, np.inf, 2.5, 9.0, "9", None, True, np.array([9])):
            with pytest.raises(TypeError, match=f"{name} is .*: sizes are whole numbers"):
                detection_limit(*[wrong if i == position else 9 for i in range(3)])
        for wrong in (2**63, 10**400, 10**5000):
            with pytest.raises(ValueError, match=rf"{name} is 2\*\*63 or more"):
                detection_limit(*[wrong if i == position else 9 for i in range(3)])


def test_a_sum_that_cublas_may_have_rounded_twice() -> None:
    given = {"products": 1.0, "stored": 0.5, "underflow": 0.0}
    for library, twice in (("numpy", 0.0), ("cupy", 4 * 2.0**-8 * 3.0)):
        a = arithmetic("bfloat16", "bfloat16", library=library)
        least = replace(a, stored=FLOATS["float32"])  # the same, but for the rounding of C
        both = [statistical_bound(np, one, 16, 16, added=3.0, **given) for one in (a, least)]
        assert math.isclose(both[0] - both[1], 4 * 2.0**-8 * 0.5 + twice, rel_tol=1e-12)


@given(
    names=st.sampled_from(PAIRS),
    k=st.integers(1, 5000),
    n=st.integers(1, 5000),
    alpha=st.sampled_from([1.0, -2.5]),
    sizes=st.tuples(*[st.floats(0, 1e6)] * 3),
    more=st.floats(1, 20),
)
def test_the_bound_of_a_line_in_plain_numbers_is_that_of_arrays(
    names: Any, k: int, n: int, alpha: float, sizes: Any, more: float
) -> None:
    a, (products, stored, added) = arithmetic(*names), sizes
    lost = a.underflow(k, alpha)
    known: Any = {"added": np.array([added]), "underflow": lost}
    largest = largest_norm(k, products=more * np.array([products]), **known)
    tau = statistical_bound(
        np, a, k, n, products=np.array([products]), stored=np.array([stored]), largest=largest, **known
    )
    found = bound_factors(a, k, n, alpha).of_line(products, stored, added, lost, more)
    np.testing.assert_allclose(found, (tau[0], largest[0]), rtol=1e-13)
    assert found == bound_factors(replace(a), k, n, alpha).of_line(products, stored, added, lost, more)
    assert hash(replace(a)) == hash(a)
    least = statistical_bound(np, a, k, n, products=np.array([products]), stored=None, added=None, underflow=lost)
    np.testing.assert_array_equal(bound_factors(a, k, n, alpha).of_lines(np.array([products]), lost), least)
