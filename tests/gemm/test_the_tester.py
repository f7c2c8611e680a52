"""Each check is there for a fault that gets through without it: with the check it is caught, without it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Encoded, Report, SilentDataCorruptionError, Status, arrays, encode, protected_gemm
from abft_tsm2.checksum import correct, predicted, repairs, rescaled, storage, verify
from abft_tsm2.checksum import encode as carry
from abft_tsm2.checksum import encoded as encoding
from abft_tsm2.checksum import sides as lines
from abft_tsm2.checksum.encode import exponents
from abft_tsm2.checksum.line_norms import UnexplainedLines
from abft_tsm2.gemm import host
from tests.checksum.test_decisions import an_outlier_row
from tests.support.planting import Product, at, everywhere, normal, pair, put, scale, transient

Patch = pytest.MonkeyPatch


class Careless(SimpleNamespace):
    """NumPy for a module whose author believes that every number is finite."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


CARELESS = Careless(isfinite=lambda x: np.ones(np.shape(x), np.bool_))


# ---- detection ----------------------------------------------------------------------------------------------


def test_without_a_bound_everything_passes(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    assert Product(A, B, put((3, 4), 1e3)).status == "CORRECTED"
    everywhere(monkeypatch, verify.largest_norm, lambda *_, **__: np.inf)
    everywhere(monkeypatch, verify.statistical_bound, lambda *_, products, **__: 0 * products + 1e300)
    missed = Product(A, B, put((3, 4), 1e3))
    assert missed.status == "CLEAN"
    assert missed.wrong.any()


def test_an_infinite_bound_is_no_bound(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    everywhere(monkeypatch, verify.largest_norm, lambda *_, **__: np.inf)
    everywhere(monkeypatch, verify.statistical_bound, lambda *_, products, **__: 0 * products + np.inf)
    found = Product(A, B, put((3, 4), 1e3))
    assert found.status == "CORRECTED"
    assert not found.wrong.any()
    monkeypatch.setattr(verify, "np", CARELESS)
    missed = Product(A, B, put((3, 4), 1e3))
    assert missed.status == "CLEAN"
    assert missed.wrong.any()


def test_a_comparison_written_the_wrong_way_round_lets_nan_pass(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    honest = verify.judge

    def careless(*arguments: Any) -> verify.SideVerdict:
        verdict = honest(*arguments)
        nan = np.isnan(predicted.residual_of(*arguments[:3])).any(axis=1)  # bad = residual > bound: False for NaN
        return replace(verdict, ok=verdict.ok | nan)

    assert Product(A, B, put((3, 4), np.nan)).status == "CORRECTED"
    everywhere(monkeypatch, verify.judge, careless)
    assert Product(A, B, put((3, 4), np.nan)).status == "CLEAN"


def test_weights_that_do_not_fit_the_columns_see_little(monkeypatch: Patch) -> None:
    def statuses() -> list[str]:
        found = []
        for row in (3, 300, 600, 1000):
            A, B = pair(96, 1024, 200)
            an_outlier_row(B, row)
            small = put((5, 150), float((A @ B)[5, 150]) + 1e-8)
            found.append(Product(A, B, small, check="rows").status)
        return found

    assert statuses() == ["CORRECTED"] * 4
    everywhere(monkeypatch, carry.missed_by_sample, lambda *_: None)
    assert statuses().count("CLEAN") >= 2


def test_ones_as_weights_do_not_see_two_elements_swapped(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)

    def swap(C: np.ndarray) -> None:
        C[3, [4, 9]] = C[3, [9, 4]]

    assert Product(A, B, swap, check="rows").status == "CORRECTED"
    everywhere(monkeypatch, host.balanced, lambda n: np.ones((n, 1)))
    everywhere(monkeypatch, exponents, lambda x: np.zeros(x.shape, np.int64))
    assert Product(A, B, swap, check="rows").status == "CLEAN"


def test_without_the_addend_in_the_bound_cancellation_comes_close(monkeypatch: Patch) -> None:
    A, B = pair(100, 3000, 100, np.float32)
    c = -(A @ B)
    with_it = Product(A, B, None, c=c, beta=1.0).report.closest
    honest = verify.statistical_bound

    def without(*arguments: Any, **options: Any) -> Any:
        return honest(*arguments, **{**options, "products": options["products"] * 0, "added": None})

    everywhere(monkeypatch, verify.statistical_bound, without)
    monkeypatch.setattr(UnexplainedLines, "explain", lambda *_, **__: False)  # with norms that know of the addend
    suspected = Product(A, B, None, c=c, beta=1.0).report
    assert suspected.suspicions > 0 or suspected.closest > 2 * with_it


# ---- what a failed check means ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "B"])
def test_without_the_guards_a_changed_operand_looks_like_a_checksum_fault(name: str, monkeypatch: Patch) -> None:
    def run() -> Product:
        A, B = pair(40, 50, 30)
        return Product(A, B, None, on_stage=at("encoded", name, put((3, 4), 7)))

    with pytest.raises(SilentDataCorruptionError, match=f"{name} changed"):
        run()
    everywhere(monkeypatch, predicted.changed_operands, lambda *_: [])
    product = run()
    assert product.report.ok
    A, B = pair(40, 50, 30)
    assert not np.allclose(product.C, A @ B)


def test_without_the_comparison_of_checksums_their_faults_go_unnoticed(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    hook = at("verified", "u", put((3, 0), np.nan))
    assert Product(A, B, None, on_stage=hook).status == "CHECKSUM_FAULT"
    everywhere(monkeypatch, predicted.differing, lambda *_: None)
    assert Product(A, B, None, on_stage=hook).status == "CLEAN"


@pytest.mark.parametrize("recheck", [True, False])
def test_without_a_look_at_what_is_carried_a_damaged_norm_hides_a_fault(recheck: bool, monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)

    def run() -> tuple[np.ndarray, Report]:
        E = encode(B, side="rows", recheck=recheck)
        E.right.squares[3] = 1e40  # the bound of every row is now huge
        return protected_gemm(A, E, on_stage=at("multiplied", "C", put((3, 4), 1e3)), return_report=True)

    C, report = run()
    assert {report.status, *report.also} == {Status.CORRECTED, Status.CHECKSUM_FAULT}
    np.testing.assert_allclose(C, A @ B)
    monkeypatch.setattr(Encoded, "intact", lambda self: True)
    C, report = run()
    assert report.status is Status.CLEAN
    assert C[3, 4] == 1e3


def test_without_a_recheck_a_changed_operand_is_used(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)

    def run() -> Status:
        E = encode(A.copy())
        E.array[3, 4] = np.nextafter(E.array[3, 4], 9)
        return protected_gemm(E, B, return_report=True)[1].status

    assert run() is Status.CORRECTED
    monkeypatch.setattr(encoding.Encoded, "changed", lambda self: False)
    assert run() is Status.CLEAN


def test_without_position_weights_three_corners_look_like_the_fourth(monkeypatch: Patch) -> None:
    def run() -> bool:
        A = np.ones((20, 30), np.float32)
        E = encode(A.copy())
        patterns = E.array.view(np.uint32)
        patterns[2, 3] += 4096
        patterns[2, 9] -= 4096
        patterns[5, 3] -= 4096
        try:
            E.correct()
        except SilentDataCorruptionError:
            return False
        return np.array_equal(E.array, A)

    assert run()
    everywhere(monkeypatch, storage._multipliers, lambda length: np.ones(length, np.uint64))
    assert not run()


@pytest.mark.filterwarnings("ignore::abft_tsm2.errors.UnverifiableWarning")
def test_without_the_mask_nan_in_an_operand_is_taken_for_a_fault(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    A[3, 4] = np.nan
    assert Product(A, B, None, on_error="detect").status == "UNVERIFIABLE"
    everywhere(monkeypatch, lines.finite_lines, lambda X: np.ones(X.shape[0], np.bool_))
    assert Product(A, B, None, on_error="detect").status != "UNVERIFIABLE"


# ---- location and repair ------------------------------------------------------------------------------------


def nothing(*_: Any, **__: Any) -> None:
    return None


def test_a_mass_suspicion_accepted_unseen_returns_a_wrong_product(monkeypatch: Patch) -> None:
    A, B = pair(256, 4096, 256, np.float32)
    assert Product(A, B, scale(slice(None), 1.001)).status == "CORRECTED"
    everywhere(monkeypatch, correct._multiply_again, nothing)
    accepted = Product(A, B, scale(slice(None), 1.001))
    assert accepted.status == "CLEAN"
    assert accepted.error > 1e-3


def test_a_column_that_is_not_completed_keeps_wrong_elements(monkeypatch: Patch) -> None:
    def left() -> int:
        wrong = 0
        for seed in range(6):
            for bit in range(5, 11):  # a few elements of column 23 beyond what the check of a row sees
                A, B = pair(128, 16, 512, np.float32, seed=seed)
                flipped = (B[2, 23].view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
                product = Product(A, B, None, check="rows", on_stage=transient("B", (2, 23), flipped))
                wrong += product.status == "CORRECTED" and bool(product.wrong.any())
        return wrong

    assert left() == 0
    everywhere(monkeypatch, correct._complete_columns, nothing)
    assert left() > 0


def test_without_a_second_look_a_damaged_repair_is_returned(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    hook = at("corrected", "C", put((3, 4), 1e3))
    with pytest.raises(SilentDataCorruptionError):
        Product(A, B, put((3, 4), 1e3), on_stage=hook)
    honest = rescaled.verify_rescaled
    looks: list[int] = []

    def only_once(*arguments: Any) -> rescaled.RescaledVerdict:
        found = honest(*arguments)
        if looks:
            found = replace(found, verdict=replace(found.verdict, ok=np.ones_like(found.verdict.ok)))
        looks.append(1)
        return found

    everywhere(monkeypatch, rescaled.verify_rescaled, only_once)
    returned = Product(A, B, put((3, 4), 1e3), on_stage=hook)
    assert returned.status == "CORRECTED"
    assert returned.wrong[3, 4]


def test_adding_the_residual_instead_of_recomputing_would_not_do(monkeypatch: Patch) -> None:
    A, B = pair(40, 50, 30)
    for value in (1e25, np.inf, np.nan):
        assert not Product(A, B, put((3, 4), value)).wrong.any()
    honest = repairs.replace

    def add(lines: Any, line: int, places: Any, value: Any, write: bool) -> None:
        with np.errstate(invalid="ignore"):
            found = lines.C[line].copy()
            honest(lines, line, places, found + (value - found), write)

    everywhere(monkeypatch, repairs.replace, add)
    for value in (np.inf, np.nan):
        with pytest.raises(SilentDataCorruptionError):
            Product(A, B, put((3, 4), value))


def test_a_repair_that_leaves_one_element_is_not_accepted(monkeypatch: Patch) -> None:
    A, B = pair(80, 96, 64, np.float32)
    honest: Callable[..., None] = repairs.replace

    def all_but_one(lines: Any, line: int, places: Any, value: Any, write: bool) -> None:
        honest(lines, line, places[:-1], value, write)

    everywhere(monkeypatch, repairs.replace, all_but_one)
    with pytest.raises(SilentDataCorruptionError):
        Product(A, B, put(5, 1e3), check="rows")


# ---- operands -----------------------------------------------------------------------------------------------


def test_without_the_test_for_overlap_the_product_eats_its_operand(monkeypatch: Patch) -> None:
    A, B = pair(30, 30, 30)
    with pytest.raises(ValueError, match="shares memory"):
        protected_gemm(A, B, out=A)
    everywhere(monkeypatch, arrays.overlap, lambda x, y: False)
    right = A @ B
    try:
        wrong = protected_gemm(A, B, out=A, on_error="detect")
    except SilentDataCorruptionError:
        return
    assert not np.allclose(A @ B, right) or not np.allclose(wrong, right)


def test_without_a_copy_of_c_a_repair_adds_what_is_there_no_more(monkeypatch: Patch) -> None:
    A, B = pair(30, 40, 20)
    hook = at("multiplied", "C", put((3, 4), 1e3))

    def run() -> np.ndarray:
        c = normal(30, 20, seed=3)
        return protected_gemm(A, B, c, beta=1.0, out=c, on_stage=hook, on_error="detect")

    right = A @ B + normal(30, 20, seed=3)
    assert np.allclose(np.delete(run(), 3, 0), np.delete(right, 3, 0))
    everywhere(monkeypatch, arrays.overlap, lambda x, y: False)
    assert not np.allclose(np.delete(run(), 3, 0), np.delete(right, 3, 0))
