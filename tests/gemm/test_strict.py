"""The float32 and float64 paths in the words of the array API standard alone.

array-api-strict refuses whatever the standard lacks, so what passes here works with every library that follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import (
    SilentDataCorruptionError,
    Status,
    detection_limit,
    encode,
    errstate,
    protected_gemm,
    tall_skinny_matmul,
    verify_gemm,
)
from abft_tsm2.arrays import from_host, to_host
from abft_tsm2.core.row_sums import column_squares, encoding_pass, fingerprint, take_rows, weighted_squares
from benchmarks import families
from tests.support.oracles import elements_outside

strict = pytest.importorskip("array_api_strict")

NAMES = ("float32", "float64")
SHAPES = ((1, 1, 1), (1, 7, 1), (7, 1, 5), (3, 5, 2), (40, 30, 20), (20, 30, 40), (130, 17, 4), (4, 300, 130))
EMPTY = ((0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0))
LINES = ("rows", "columns", "both", "auto")


def there(x: np.ndarray) -> Any:
    """A strict array with the values of `x`."""
    return strict.asarray(np.array(x))


def operands(m: int, k: int, n: int, name: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, m, k, n])
    return rng.standard_normal((m, k)).astype(name), rng.standard_normal((k, n)).astype(name)


def is_strict(x: Any, name: str, shape: tuple[int, ...]) -> bool:
    return type(x) is type(strict.ones(1)) and x.dtype == getattr(strict, name) and x.shape == shape


def planted(change: Callable[[Any], None], operand: str = "C", stage: str = "multiplied") -> Any:
    """An on_stage hook that changes one live array once."""
    done: list[bool] = []

    def hook(at: str, arrays: Any) -> None:
        if at == stage and not done:
            done.append(True)
            change(arrays[operand])

    return hook


# ---- clean --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", LINES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_clean_products(shape: tuple[int, int, int], check: str, name: str) -> None:
    a, b = operands(*shape, name)
    A, B = there(a), there(b)
    C, report = protected_gemm(A, B, check=check, return_report=True)
    assert report.status is Status.CLEAN
    assert is_strict(C, name, (shape[0], shape[2]))
    assert not elements_outside(to_host(C), a, b).any()
    assert np.array_equal(to_host(A), a)
    assert np.array_equal(to_host(B), b)
    assert verify_gemm(A, B, C, check=check).status is Status.CLEAN
    assert report.checks[0].lines == report.checks[0].verified


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", families.names("generic", "structured", "pathological"))
def test_no_false_alarm(family: str, name: str) -> None:
    for seed, shape in enumerate(((30, 40, 20), (5, 200, 9))):
        a, b = families.operands(family, *shape, np.random.default_rng(seed), np.dtype(name))
        C, report = protected_gemm(there(a), there(b), check="both", return_report=True)
        assert report.status is Status.CLEAN
        assert not elements_outside(to_host(C), a, b).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", families.names("extreme"))
def test_the_ends_of_the_range(family: str, name: str) -> None:
    a, b = families.operands(family, 30, 40, 20, np.random.default_rng(3), np.dtype(name))
    with errstate(unverifiable="log"), np.errstate(all="ignore"):
        C, report = protected_gemm(there(a), there(b), return_report=True)
    assert report.status in (Status.CLEAN, Status.UNVERIFIABLE)
    assert not elements_outside(to_host(C), a, b).any()


@pytest.mark.parametrize("name", NAMES)
def test_alpha_beta_c_and_out(name: str) -> None:
    a, b = operands(20, 30, 10, name)
    c = np.random.default_rng(9).standard_normal((20, 10)).astype(name)
    A, B, C0 = there(a), there(b), there(c)
    for check in LINES:
        C, report = protected_gemm(A, B, C0, alpha=0.5, beta=-2.0, check=check, return_report=True)
        assert report.status is Status.CLEAN
        assert not elements_outside(to_host(C), a, b, c, alpha=0.5, beta=-2.0).any()
        assert verify_gemm(A, B, C, C0, alpha=0.5, beta=-2.0, check=check).status is Status.CLEAN
        assert np.array_equal(to_host(C0), c)
        out = there(c)
        fault = planted(lambda x: x.__setitem__((3, 4), strict.asarray(1e20, dtype=x.dtype)))
        C, report = protected_gemm(
            A, B, out, alpha=0.5, beta=-2.0, out=out, check=check, return_report=True, on_stage=fault
        )
        assert C is out
        assert report.status is Status.CORRECTED
        assert not elements_outside(to_host(C), a, b, c, alpha=0.5, beta=-2.0).any()


@pytest.mark.parametrize("name", NAMES)
def test_vectors_and_batches_as_matmul(name: str) -> None:
    rng = np.random.default_rng(1)
    for left, right in (((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 4)), ((2, 3, 5), (5, 4)), ((2, 1, 3, 5), (4, 5, 2))):
        a, b = rng.standard_normal(left).astype(name), rng.standard_normal(right).astype(name)
        C = protected_gemm(there(a), there(b))
        assert is_strict(C, name, np.matmul(a, b).shape)
        np.testing.assert_allclose(to_host(C), np.matmul(a, b), rtol=1e-4, atol=1e-5)


def test_mixed_types_are_promoted() -> None:
    a, b = operands(9, 8, 7, "float64")
    C = protected_gemm(there(a.astype(np.float32)), there(b))
    assert is_strict(C, "float64", (9, 7))
    assert not elements_outside(to_host(C), a.astype(np.float32).astype(np.float64), b).any()
    assert detection_limit(9, 8, 7, C.dtype) == detection_limit(9, 8, 7, "float64")


# ---- faults -------------------------------------------------------------------------------------------------


def set_to(at: Any, value: float) -> Callable[[Any], None]:
    return lambda x: x.__setitem__(at, strict.asarray(value, dtype=x.dtype))


def scale(at: Any, factor: float) -> Callable[[Any], None]:
    return lambda x: x.__setitem__(at, x[at] * factor)


FAULTS = {
    "element": scale((5, 3), -1.0),
    "huge element": set_to((5, 3), 1e30),
    "NaN": set_to((5, 3), float("nan")),
    "Inf": set_to((5, 3), float("inf")),
    "row": scale((5, slice(None)), 1.5),
    "NaN row": set_to((5, slice(None)), float("nan")),
    "column": scale((slice(None), 3), 1.5),
    "NaN column": set_to((slice(None), 3), float("nan")),
    "tile": scale((slice(0, 16), slice(8, 24)), 1.01),
    "all": scale((slice(None), slice(None)), 1.01),
    "all NaN": set_to((slice(None), slice(None)), float("nan")),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("kind", FAULTS)
def test_planted_faults_are_found_and_repaired(kind: str, check: str, name: str) -> None:
    for shape in ((40, 30, 25), (30, 20, 70)):
        a, b = operands(*shape, name)
        A, B = there(a), there(b)
        C, report = protected_gemm(A, B, check=check, return_report=True, on_stage=planted(FAULTS[kind]))
        assert report.status is Status.CORRECTED
        assert all(f.operand == "C" and f.repair for f in report.faults)
        assert is_strict(C, name, (shape[0], shape[2]))
        assert not elements_outside(to_host(C), a, b).any()
        FAULTS[kind](C)
        held = to_host(C).copy()
        found = verify_gemm(A, B, C, check=check, on_error="detect")
        assert found.status is Status.UNCORRECTABLE
        assert found.faults
        assert np.array_equal(to_host(C), held, equal_nan=True)
        with pytest.raises(SilentDataCorruptionError):
            verify_gemm(A, B, C, check=check)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("operand", ["t", "u"])
@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_faults_in_checksums_leave_c_alone(operand: str, check: str, value: float, name: str) -> None:
    a, b = operands(20, 30, 25, name)
    stage = "verified" if operand == "u" else "encoded"
    fault = planted(set_to((2, 0), value), operand, stage)
    C, report = protected_gemm(there(a), there(b), check=check, return_report=True, on_stage=fault)
    assert report.status is Status.CHECKSUM_FAULT
    assert np.array_equal(to_host(C), to_host(protected_gemm(there(a), there(b))))


@pytest.mark.parametrize("name", NAMES)
def test_an_operand_that_changes_underway_is_noticed(name: str) -> None:
    a, b = operands(20, 30, 25, name)
    for check in ("rows", "columns"):
        for operand in ("A", "B"):
            fault = planted(set_to((2, 3), 1e10), operand, "encoded")
            with pytest.raises(SilentDataCorruptionError, match=rf"\b{operand} changed"):
                protected_gemm(there(a), there(b), check=check, on_stage=fault)


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_from_nan_is_unverifiable_and_the_rest_is_checked(name: str) -> None:
    a, b = operands(20, 30, 25, name)
    a[3, 4], b[5, 6] = np.nan, np.inf
    fault = planted(set_to((10, 11), 1e10))
    for check in ("rows", "columns"):
        with errstate(unverifiable="ignore"), np.errstate(invalid="ignore"):
            C, report = protected_gemm(there(a), there(b), check=check, return_report=True)
            assert report.status is Status.UNVERIFIABLE
            assert report.reasons
            C, report = protected_gemm(there(a), there(b), return_report=True, on_stage=fault)
        assert not elements_outside(to_host(C), a, b).any()
    assert Status.UNVERIFIABLE in (report.status, *report.also)


# ---- encoded ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["rows", "columns", "both"])
def test_encoded_operands(side: str, name: str) -> None:
    a, b = operands(20, 30, 25, name)
    A, B = there(a), there(b)
    E, F = encode(A, side=side), encode(B, side=side)
    for sums in (E.row_checksums, E.column_checksums, E.weights.rows, E.weights.columns):
        assert sums is None or type(sums) is type(A)
    assert E.array is A
    if side != "columns":
        np.testing.assert_allclose(to_host(E.row_checksums), a @ to_host(E.weights.rows), rtol=1e-5, atol=1e-5)
    if side != "rows":
        np.testing.assert_allclose(to_host(E.column_checksums), to_host(E.weights.columns).T @ a, rtol=1e-5, atol=1e-5)
    for check in LINES:
        for left, right in ((E, B), (A, F), (E, F)):
            C, report = protected_gemm(left, right, check=check, return_report=True)
            assert report.status is Status.CLEAN
            assert not elements_outside(to_host(C), a, b).any()


@pytest.mark.parametrize("name", NAMES)
def test_storage_faults(name: str) -> None:
    a, b = operands(20, 30, 25, name)
    for repair in (False, True):
        A = there(a)
        E = encode(A, repair=repair)
        assert not E.changed()
        assert E.verify().status is Status.CLEAN
        A[2, 3] = -A[2, 3] * 4.0
        assert E.changed()
        assert [(f.rows, f.columns) for f in E.verify().faults] == [((2,), (3,))]
        C, report = protected_gemm(E, there(b), return_report=True)
        assert report.status is Status.CORRECTED
        assert not elements_outside(to_host(C), a, b).any()
        assert np.array_equal(to_host(A), a) is repair
        assert E.correct().status is (Status.CLEAN if repair else Status.CORRECTED)
        assert np.array_equal(to_host(A), a)
        A[2:4, 2:4] = strict.zeros((2, 2), dtype=A.dtype)
        held = to_host(A).copy()
        with pytest.raises(SilentDataCorruptionError):
            E.correct()
        assert np.array_equal(to_host(A), held)


# ---- passes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_passes_agree_with_those_on_numpy(name: str) -> None:
    for p, q in ((0, 4), (4, 0), (1, 1), (13, 7), (1500, 900)):
        x = operands(p, q, 1, name)[0]
        W = np.random.default_rng(2).standard_normal((q, 2))
        far = to_host(encoding_pass(there(x), there(W)))
        np.testing.assert_allclose(far, encoding_pass(x, W), rtol=1e-10, atol=1e-10)
        for h in (0, q // 2, q):
            far = to_host(weighted_squares(there(x), there(W[:h] ** 2)))
            np.testing.assert_allclose(far, weighted_squares(x, W[:h] ** 2), rtol=1e-4)
        assert np.array_equal(to_host(fingerprint(there(x))), to_host(fingerprint(there(x.copy()))))
        np.testing.assert_allclose(to_host(column_squares(there(x))), column_squares(x), rtol=1e-4)
        rows = np.arange(0, p, 3)
        assert np.array_equal(to_host(take_rows(there(x), rows)), take_rows(x, rows))
        assert is_strict(tall_skinny_matmul(there(x), there(W.astype(name))), name, (p, 2))


# ---- what is refused ----------------------------------------------------------------------------------------


def test_two_libraries_in_one_call() -> None:
    x, y = np.ones((3, 3)), strict.ones((3, 3))
    for call in (
        lambda: protected_gemm(x, y),
        lambda: protected_gemm(y, x),
        lambda: protected_gemm(y, y, x, beta=1.0),
        lambda: protected_gemm(x, x, out=y),
        lambda: verify_gemm(x, x, y),
        lambda: verify_gemm(y, x, y),
        lambda: protected_gemm(encode(x), y),
        lambda: protected_gemm(y, encode(x)),
        lambda: tall_skinny_matmul(x, y),
    ):
        with pytest.raises(TypeError, match="array_api_strict and numpy in one call: move them to one library"):
            call()


@pytest.mark.parametrize("name", ["int64", "uint8", "bool", "complex128"])
def test_types_that_are_not_protected(name: str) -> None:
    x = strict.ones((3, 3), dtype=getattr(strict, name))
    for call in (lambda: protected_gemm(x, x), lambda: encode(x), lambda: tall_skinny_matmul(x, x)):
        with pytest.raises(TypeError, match=rf"dtype {name}: "):
            call()


def test_from_the_host_and_back() -> None:
    x = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(to_host(from_host(x, strict.ones(1))), x)
