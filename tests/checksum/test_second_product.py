"""What a second product says of lines that failed their check, and how products made elsewhere are judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, encode, protected_gemm, verify_gemm
from abft_tsm2.checksum import diagnose, evidence, predicted, second_product
from abft_tsm2.core import matmul as products
from abft_tsm2.core.matmul import multiply, same_layout
from benchmarks import families
from tests.checksum.test_decisions import chain
from tests.support.planting import Product, everywhere, pair, put, scale

Patch = pytest.MonkeyPatch
STRUCTURED = ("const", "rank1const", "cancel_half")


def all_of_them(lines: Any, scale: Any, found: Any, *_: Any) -> tuple[np.ndarray, float]:
    return np.ones(found.at.size, np.bool_), 0.0


# ---- the same computation again -----------------------------------------------------------------------------


def half_cancelling(m: int, k: int, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose second half takes the first half off again: all roundings have one direction."""
    rng = np.random.default_rng(0)
    A = np.repeat(rng.uniform(0.1, 1, (m, 1)), k, 1)
    A[:, k // 2 :] *= -1
    return A.astype(dtype), np.repeat(rng.uniform(0.1, 1, (1, n)), k, 0).astype(dtype)


VIEWS: dict[str, Callable[[int, int, Any], np.ndarray]] = {
    "rows": lambda m, n, dtype: np.empty((m, n), dtype),
    "columns": lambda m, n, dtype: np.empty((m, n), dtype, order="F"),
    "every other element": lambda m, n, dtype: np.empty((2 * m, 2 * n), dtype)[::2, ::2],
    "upside down": lambda m, n, dtype: np.empty((m, n), dtype)[::-1, ::-1],
    "a part of columns": lambda m, n, dtype: np.empty((n + 3, m + 5), dtype).T[2 : m + 2, 1 : n + 1],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("shape", "dtype"), [((300, 2000, 200), np.float64), ((3, 30000, 3), np.float32)])
def test_the_result_may_lie_in_any_order(view: Any, shape: tuple[int, int, int], dtype: Any) -> None:
    m, k, n = shape
    A, B = half_cancelling(m, k, n, dtype) if m > 3 else (np.full((m, k), dtype(0.1)), np.full((k, n), dtype(0.3)))
    for check in ("rows", "columns"):
        out = view(m, n, dtype)
        _, report = protected_gemm(A, B, out=out, check=check, return_report=True)
        assert report.status.name == "CLEAN"
        np.testing.assert_array_equal(out, np.matmul(A, B, out=view(m, n, dtype)))


def test_a_last_block_of_one_line_is_no_computation_of_its_own() -> None:
    A, B = half_cancelling(2049, 1024, 2048, np.float64)  # 32 MB and a line
    assert protected_gemm(A, B, check="rows", return_report=True)[1].status.name == "CLEAN"


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_second_product_lies_as_the_first_one_does(view: Any) -> None:
    X = view(6, 5, np.float32)
    Y = same_layout(X)
    assert (Y.shape, Y.strides, Y.dtype) == (X.shape, X.strides, X.dtype)
    assert (Y.ctypes.data - X.ctypes.data) % 64 == 0
    assert not np.shares_memory(X, Y)
    Y[...] = 7


def test_without_its_layout_and_a_measure_of_errors_it_convicts_what_is_right(monkeypatch: Patch) -> None:
    A, B = np.full((3, 30000), np.float32(0.1)), np.full((30000, 3), np.float32(0.3))

    def by_order(A: Any, B: Any, out: Any, *more: Any, **options: Any) -> None:
        """A library that sums otherwise for another order of the result."""
        (chain if out.flags.f_contiguous else multiply)(A, B, out, *more, **options)

    def status() -> str:
        out = np.empty((3, 3), np.float32, order="F")
        return str(protected_gemm(A, B, out=out, return_report=True)[1].status.name)

    everywhere(monkeypatch, multiply, by_order)
    everywhere(monkeypatch, products.same_layout, lambda X: np.empty(X.shape, X.dtype))
    assert status() == "CLEAN"  # rounded otherwise, and no worse
    everywhere(monkeypatch, second_product._beyond_second, all_of_them)
    assert status() == "CORRECTED"


# ---- another computation ------------------------------------------------------------------------------------


def first_and_then(first: Any, then: Any) -> Any:
    """A library that computes its first product in one way, and all others in another."""
    calls: list[int] = []

    def multiply_now(*arguments: Any, **options: Any) -> None:
        (then if calls else first)(*arguments, **options)
        calls.append(1)

    return multiply_now


@pytest.mark.parametrize("family", STRUCTURED)
@pytest.mark.parametrize("turned", [False, True])
def test_where_nothing_comes_back_bit_for_bit_errors_are_measured(
    family: str, turned: bool, monkeypatch: Patch
) -> None:
    A, B = families.operands(family, 40, 8000, 24, np.random.default_rng(1), np.float32)
    orders = (multiply, chain) if turned else (chain, multiply)

    def status(change: Any) -> str:
        with monkeypatch.context() as patch:
            everywhere(patch, multiply, first_and_then(*orders))
            product = Product(A, B, change)
        assert not product.wrong.any()
        return product.status

    assert status(None) == "CLEAN"
    assert status(put((5, 7), 3e3)) == "CORRECTED"
    if family != "cancel_half":  # what is left of it is rounding
        assert status(scale(slice(None), 1.001)) == "CORRECTED"
        assert status(scale(7, 1.001)) == "CORRECTED"
    if not turned:
        monkeypatch.setattr(second_product, "_beyond_second", all_of_them)
        assert status(None) == "CORRECTED"


@pytest.mark.parametrize("family", STRUCTURED)
def test_a_change_above_the_limit_is_found_where_suspects_were_cleared(family: str, monkeypatch: Patch) -> None:
    A, B = families.operands(family, 40, 8000, 24, np.random.default_rng(1), np.float32)

    def add(size: float) -> Callable[[np.ndarray], None]:
        def change(C: np.ndarray) -> None:
            C[5, 7] += size

        return change

    def product(size: float) -> Any:
        with monkeypatch.context() as patch:
            everywhere(patch, multiply, first_and_then(chain, multiply))
            return Product(A, B, add(size))

    clean = product(0.0)
    assert clean.status == "CLEAN"
    assert clean.report.suspicions
    assert product(1.5 * clean.report.checks[0].detection_limit).status == "CORRECTED"


@pytest.mark.parametrize("factor", [1.001, 1.0005])
@pytest.mark.parametrize("where", [slice(None), (slice(None), slice(64, 128)), (slice(9, 73), slice(5, 69)), 200])
def test_a_scaled_part_of_c_stands_out_also_among_other_roundings(
    factor: float, where: Any, monkeypatch: Patch
) -> None:
    A, B = pair(256, 4096, 256, np.float32)
    everywhere(
        monkeypatch,
        multiply,
        first_and_then(
            multiply, lambda A, B, *rest, **options: multiply(np.asfortranarray(A[:, ::-1]), B[::-1], *rest, **options)
        ),
    )
    product = Product(A, B, scale(where, factor))
    assert product.status == "CORRECTED"
    assert product.error < 1e-5


def test_a_fault_of_both_products_is_computed_again_in_float64(monkeypatch: Patch) -> None:
    A, B = pair(100, 80, 60)

    def doubled(A: Any, B: Any, out: Any, *rest: Any, **options: Any) -> None:
        multiply(A, B, out, *rest, **options)
        out *= 2

    everywhere(monkeypatch, multiply, doubled)
    for check in ("rows", "columns"):
        product = Product(A, B, None, check=check)
        assert product.status == "CORRECTED"
        np.testing.assert_allclose(product.C, A @ B, rtol=1e-12, atol=1e-12)


# ---- products made elsewhere --------------------------------------------------------------------------------


LIBRARIES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "matmul": lambda A, B: A @ B,
    "one by one": lambda A, B: np.stack([np.cumsum(row[:, None] * B, axis=0)[-1] for row in A]),
    "einsum": lambda A, B: np.einsum("ij,jk->ik", A, B),
}


@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("data", ["constant", "harmonic", "normal"])
@pytest.mark.parametrize("k", [400, 20000])
def test_every_change_above_the_limit_of_the_report_is_found(k: int, data: str, library: str, check: str) -> None:
    # What is called certain has to count with all that a sum in another order is excused.
    A, B = pair(12, k, 9, np.float32)
    if data == "constant":
        A, B = np.full_like(A, 0.1), np.full_like(B, 0.3)
    if data == "harmonic":
        A[:] = 1 / np.arange(1, k + 1)
        B = abs(B)
    C = LIBRARIES[library](A, B)
    clean = verify_gemm(A, B, C, check=check)
    assert clean.status.name == "CLEAN"
    limit = clean.checks[0].detection_limit
    assert limit < 0.05 * abs(C).max() or data == "normal"
    for factor in (1.5, 3.0, 10.0):  # the limit is a median over the lines
        wrong = C.copy()
        wrong[5, 4] += factor * limit
        assert verify_gemm(A, B, wrong, check=check, on_error="detect").status.name == "UNCORRECTABLE", factor


def in_order(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    out = np.empty((A.shape[0], B.shape[1]), A.dtype)
    chain(A, B, out)
    return out


ORDERS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "first to last": in_order,
    "last to first": lambda A, B: in_order(A[:, ::-1], B[::-1]),
    "einsum": lambda A, B: np.einsum("ik,kj->ij", A, B),
    "one by one": lambda A, B: np.add.accumulate(A[:, :, None] * B, axis=1)[:, -1],
}


def harmonic(m: int, k: int, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    x = 1 / np.arange(1.0, k + 1)
    return np.outer(np.arange(1, m + 1), x).astype(dtype), np.outer(x, np.arange(1, n + 1)).astype(dtype)


def some_constant(m: int, k: int, n: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Constant rows among random ones."""
    A, B = np.random.default_rng(0).uniform(0.1, 1, (m, k)), np.full((k, n), 0.3)
    A[2 : 2 + m // 8] = 0.1
    return A.astype(dtype), B.astype(dtype)


OPERANDS: dict[str, Callable[[int, int, int, Any], tuple[np.ndarray, np.ndarray]]] = {
    "constant": lambda m, k, n, dtype: (np.full((m, k), dtype(0.1)), np.full((k, n), dtype(0.3))),
    "harmonic": harmonic,
    "half cancelling": half_cancelling,
    "some constant": some_constant,
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("kind", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_honest_product_is_clean_in_whatever_order_it_was_summed(kind: Any, order: Any, dtype: Any) -> None:
    for m, k, n in ((16, 20000, 7), (40, 3000, 3)):
        A, B = kind(m, k, n, dtype)
        C = order(A, B)
        for check in ("rows", "columns"):
            assert verify_gemm(A, B, C, check=check).status.name == "CLEAN"


def test_without_the_bound_of_a_sum_in_order_constant_lines_among_others_are_faults(monkeypatch: Patch) -> None:
    A, B = some_constant(40, 20000, 24, np.float32)
    C = in_order(A, B)
    assert verify_gemm(A, B, C).status.name == "CLEAN"
    monkeypatch.setattr(second_product, "sequential_errors", lambda lines, scale, line, columns: np.zeros(columns.size))
    assert verify_gemm(A, B, C, on_error="detect").status.name == "UNCORRECTABLE"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", [in_order, ORDERS["einsum"]])
def test_a_row_and_an_element_of_it_that_are_wrong_are_found(order: Any, dtype: Any) -> None:
    A, B = pair(60, 4096, 48, dtype)
    C = order(A, B)
    for where, factor in ((7, 1.001), ((7, 9), 1.1), ((slice(None), 3), 1.1)):
        wrong = C.copy()
        wrong[where] *= dtype(factor)
        report = verify_gemm(A, B, wrong, check="rows", on_error="detect")
        assert report.status.name == "UNCORRECTABLE"
        assert 7 in {row for fault in report.faults for row in fault.rows} or not report.faults[0].rows


def test_without_the_measure_of_the_controls_a_scaled_row_passes(monkeypatch: Patch) -> None:
    A, B = pair(60, 4096, 48, np.float32)
    C = in_order(A, B)
    C[7] *= np.float32(1.001)
    assert verify_gemm(A, B, C, check="rows", on_error="detect").status.name == "UNCORRECTABLE"
    monkeypatch.setattr(second_product, "_beyond_controls", lambda *given: ~all_of_them(*given)[0])
    assert verify_gemm(A, B, C, check="rows", on_error="detect").status.name == "CLEAN"


def test_an_overflow_that_depends_on_the_order_cannot_be_verified() -> None:
    A, B = families.operands("overflow", 40, 2000, 24, np.random.default_rng(1), np.float32)
    with np.errstate(all="ignore"):
        C = in_order(A, B)
    assert np.isinf(C).any()
    with pytest.warns(UserWarning, match="partial sums may have overflowed"):
        report = verify_gemm(A, B, C, check="rows")
    assert report.status.name == "UNVERIFIABLE"


# ---- the measures themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_in_order_keeps_its_bound(dtype: Any) -> None:
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    honest = evidence.sequential_errors

    def noted(lines: Any, scale: Any, line: int, columns: Any) -> np.ndarray:
        most = honest(lines, scale, line, columns)
        at_ = np.asarray([line])
        for turn in (slice(None), slice(None, None, -1)):
            summed = in_order(lines.L[at_][:, turn], lines.R[turn][:, columns])
            seen.append((np.abs(evidence.line_errors(lines, scale, at_, summed, columns))[0], most))
        return most

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_product, "sequential_errors", noted)
        for kind in OPERANDS.values():
            A, B = kind(40, 3000, 24, dtype)
            C = in_order(A, B)
            C[7] *= dtype(1.01)
            verify_gemm(A, B, C, check="rows", on_error="detect")
    assert seen
    for error, most in seen:
        assert (error <= most).all()


# ---- what a verdict is made of ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(None), 7])
def test_t_and_c_lost_together_are_found(rows: Any, monkeypatch: Patch) -> None:
    A, B = pair(200, 300, 150)

    def lost(stage: str, arrays: Any) -> None:
        for reached, name in (("encoded", "t"), ("multiplied", "C")):
            if stage == reached:
                arrays[name][rows] = 0

    def status() -> str:
        C, report = protected_gemm(A, B, on_stage=lost, check="rows", return_report=True)
        assert np.allclose(C, A @ B) == (report.status.name == "CORRECTED")
        return str(report.status.name)

    assert status() == "CORRECTED"
    monkeypatch.setattr(predicted.PredictedSums, "intact", lambda self: True)
    assert status() == "CLEAN"


def test_a_bound_that_was_hit_hides_no_fault() -> None:
    A, B = pair(60, 50, 40)
    honest = predicted.predict

    def hit(*arguments: Any) -> Any:
        expected = honest(*arguments)
        expected.products[...] = 1e60
        return expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("abft_tsm2.gemm.host.predict", hit)
        product = Product(A, B, put((5, 7), 99.0), check="rows")
        assert (product.status, product.report.also[0].name) == ("CORRECTED", "CHECKSUM_FAULT")
        assert not product.wrong.any()
        assert Product(A, B, None, check="rows").status == "CHECKSUM_FAULT"


# ---- operands that change while C is repaired ---------------------------------------------------------------


@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("name", ["A", "B", "c"])
@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("back", [False, True], ids=["stays", "comes back"])
def test_an_operand_that_changes_while_c_is_repaired(name: str, check: str, encoded: bool, back: bool) -> None:
    rng = np.random.default_rng(0)
    X = {"A": rng.standard_normal((100, 80)), "B": rng.standard_normal((80, 60)), "c": rng.standard_normal((100, 60))}
    right = X["A"] @ X["B"] + X["c"]
    given = {which: encode(x) if encoded and which == name != "c" else x for which, x in X.items()}
    repairs: list[int] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "multiplied" and not repairs:
            arrays["C"][3, 4] = 99
        if stage == "corrected":
            repairs.append(1)
            if len(repairs) == 1:
                X[name][5, 6] += 10
            elif back and len(repairs) == 2:
                X[name][5, 6] -= 10

    arguments: Any = {"beta": 1.0, "check": check, "on_stage": hook, "return_report": True}
    if encoded and name != "c":
        C, report = protected_gemm(given["A"], given["B"], X["c"], **arguments)
        assert report.status.name == "CORRECTED"
        np.testing.assert_allclose(C, right)
        return
    with pytest.raises(SilentDataCorruptionError) as raised:
        protected_gemm(given["A"], given["B"], X["c"], **arguments)
    assert raised.value.report.status.name == "INPUT_CHANGED"


def test_without_a_second_look_at_the_operands_a_right_product_is_made_wrong(monkeypatch: Patch) -> None:
    A, B = pair(100, 80, 60)
    right = A @ B

    def hook(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            arrays["C"][3, 4] = 99
        if stage == "corrected" and B[5, 6] < 5:
            B[5, 6] += 10

    monkeypatch.setattr(diagnose, "differing", lambda *_: None)  # at first they are as before
    C, report = protected_gemm(A, B, on_stage=hook, return_report=True)
    assert report.status.name == "CORRECTED"
    assert not np.allclose(C, right)
