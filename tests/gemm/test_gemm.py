"""Protected products: every status, what each does to the caller, the stages, and faults of every kind."""

from __future__ import annotations

import logging
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, monitor, protected_gemm, verify_gemm
from abft_tsm2.errors import CorruptionWarning, UnverifiableWarning
from tests.support.cases import DTYPES
from tests.support.oracles import elements_outside
from tests.support.planting import Product, at, bits, both, normal, pair, put, scale

IDS = [dtype.name for dtype in DTYPES]
SIDES = ("rows", "columns", "both")


def swap_rows(C: np.ndarray) -> None:
    C[[3, 4]] = C[[4, 3]]


def swap_elements(C: np.ndarray) -> None:
    places = [np.argmin(C[3]), np.argmax(C[3])]
    C[3, places] = C[3, places[::-1]]


FAULTS: dict[str, Any] = {
    "element": put((5, 7), 1e3),
    "sign": scale((5, 7), -1),
    "NaN": put((5, 7), np.nan),
    "Inf": put((5, 7), -np.inf),
    "corners": put((slice(None, None, 79), slice(None, None, 63)), 777),
    "row": put(5, 100),
    "row of NaN": put(5, np.nan),
    "row x 1.25": scale(5, 1.25),
    "column": put((slice(None), 7), 100),
    "column of NaN": put((slice(None), 7), np.nan),
    "three columns": put((slice(None), [0, 7, 63]), 100),
    "tile": scale((slice(8, 40), slice(16, 48)), 1.25),
    "tile of 0": put((slice(8, 40), slice(16, 48)), 0),
    "tile of NaN": put((slice(8, 40), slice(16, 48)), np.nan),
    "rows swapped": swap_rows,
    "elements swapped": swap_elements,
    "scattered": put((np.arange(0, 80, 3), np.arange(0, 54, 2)), 1e3),
    "all 0": put(slice(None), 0),
    "all x 2": scale(slice(None), 2),
    "all NaN": put(slice(None), np.nan),
    "all Inf": put(slice(None), np.inf),
}
FEW = ("element", "sign", "NaN", "Inf", "elements swapped")  # repaired without touching anything else


# ---- faults of C --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_of_c_is_found_and_repaired(kind: str, side: str, dtype: Any) -> None:
    A, B = pair(80, 96, 64, dtype)
    product = Product(A, B, FAULTS[kind], check=side)
    assert product.status == "CORRECTED"
    assert not product.wrong.any()
    report = product.report
    assert all(f.operand == "C" and f.repair for f in report.faults)
    if kind in FEW:
        assert np.array_equal(bits(product.C)[~product.hit], bits(product.clean)[~product.hit])
        assert {(f.rows[0], f.columns[0]) for f in report.faults} == set(zip(*np.nonzero(product.hit), strict=True))
    hit = product.hit.any(axis=1), product.hit.any(axis=0)
    for fault in report.faults:  # no fault is reported where there was none
        assert all(hit[0][i] for i in fault.rows)
        assert all(hit[1][j] for j in fault.columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", FAULTS)
def test_verify_finds_the_same_faults_in_a_product_that_exists(kind: str, side: str, dtype: Any) -> None:
    A, B = pair(80, 96, 64, dtype)
    C = protected_gemm(A, B)
    assert verify_gemm(A, B, C, check=side).status is Status.CLEAN
    before = C.copy()
    FAULTS[kind](C)
    kept = bits(C).copy()
    hit = bits(before) != kept
    with pytest.raises(SilentDataCorruptionError) as caught:
        verify_gemm(A, B, C, check=side)
    report = verify_gemm(A, B, C, check=side, on_error="detect")
    assert caught.value.report.faults == report.faults
    assert report.status is Status.UNCORRECTABLE
    assert report.operation == "verify_gemm"
    assert report.faults
    assert all(f.operand == "C" and f.repair == "" for f in report.faults)
    for fault in report.faults:
        assert hit[np.ix_(fault.rows or range(80), fault.columns or range(64))].any()
    assert np.array_equal(bits(C), kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_every_bit_of_the_exponent_and_the_sign(dtype: Any) -> None:
    A, B = pair(40, 50, 30, dtype)
    mantissa = {2**-11: 10, 2**-8: 7, 2**-24: 23, 2**-53: 52}
    width = 8 * dtype.itemsize
    first = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}[dtype.name]
    assert first in mantissa.values()
    for bit in range(first, width):

        def flip(C: np.ndarray, bit: int = bit) -> None:
            x = np.abs(C.astype(np.float64))
            i, j = np.unravel_index(np.argmax(x), x.shape)  # a large element: in a small one a bit may be rounding
            pattern = C[i : i + 1, j].view(f"u{C.itemsize}") ^ np.array([1 << bit], f"u{C.itemsize}")
            C[i, j] = pattern.view(C.dtype)[0]

        product = Product(A, B, flip)
        assert product.status == "CORRECTED", bit
        assert not product.wrong.any()
        assert len(product.report.faults) == 1


# ---- faults of the checksums --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("stage", "name"), [("encoded", "t"), ("verified", "u"), ("encoded", "s")])
@pytest.mark.parametrize("value", [1e3, np.nan, np.inf])
@pytest.mark.parametrize("where", [(5, 0), slice(None)], ids=["one", "all"])
def test_a_wrong_checksum_leaves_c_as_it_is(stage: str, name: str, where: Any, value: float, side: str) -> None:
    A, B = pair(80, 96, 64, np.float32)
    product = Product(A, B, None, check=side, on_stage=at(stage, name, put(where, value)))
    # s has served its purpose when t is there: what happens to it later does no harm
    assert product.status == ("CLEAN" if name == "s" else "CHECKSUM_FAULT")
    assert product.report.ok
    assert np.array_equal(bits(product.C), bits(product.clean))
    if name != "s":
        assert {(f.operand, f.kind) for f in product.report.faults} == {(name, "checksum")}
        lines = 64 if side == "columns" else 80
        assert product.report.faults[0].rows == ((5,) if where == (5, 0) else tuple(range(lines)))


@pytest.mark.parametrize(("stage", "name"), [("encoded", "t"), ("verified", "u")])
@pytest.mark.parametrize("line", [5, 40])
def test_a_wrong_checksum_hides_no_fault_of_c(stage: str, name: str, line: int) -> None:
    A, B = pair(80, 96, 64, np.float32)
    product = Product(A, B, put((5, 7), 1e3), check="rows", on_stage=at(stage, name, put((line, 0), np.nan)))
    assert product.status == "CORRECTED"
    assert product.report.also == (Status.CHECKSUM_FAULT,)
    assert {f.operand for f in product.report.faults} == {"C", name}
    assert not product.wrong.any()


# ---- repairs that do not hold -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["element", "row", "all NaN"])
def test_repairs_that_do_not_hold_are_given_up(kind: str, side: str) -> None:
    A, B = pair(80, 96, 64)
    again = at("corrected", "C", FAULTS[kind])
    with pytest.raises(SilentDataCorruptionError, match=r"not hold|still disagree") as caught:
        Product(A, B, FAULTS[kind], check=side, on_stage=again)
    report = caught.value.report
    assert report.status is Status.UNCORRECTABLE
    assert not report.ok
    assert any(f.repair == "" for f in report.faults)


def test_a_repair_damaged_once_is_repaired_again() -> None:
    A, B = pair(80, 96, 64)
    times: list[int] = []

    def hook(stage: str, arrays: Any) -> None:
        if stage == "corrected" and not times:
            times.append(1)
            arrays["C"][60, 2] = np.nan

    product = Product(A, B, put((5, 7), 1e3), on_stage=hook)
    assert product.status == "CORRECTED"
    assert not product.wrong.any()
    assert {(f.rows, f.columns) for f in product.report.faults} == {((5,), (7,)), ((60,), (2,))}


# ---- statuses and what they do ------------------------------------------------------------------------------


def scenario(name: str, **options: Any) -> Any:
    """A product that ends in the status of this name (UNCORRECTABLE, too, where repair is not allowed)."""
    A, B = pair(40, 50, 30)
    planted = {
        "CLEAN": None,
        "CORRECTED": at("multiplied", "C", put((3, 4), 1e3)),
        "CHECKSUM_FAULT": at("verified", "u", put((3, 0), 1e3)),
        "INPUT_CHANGED": at("encoded", "A", put((3, 4), 1e3)),
        "UNVERIFIABLE": None,
        "UNCORRECTABLE": both(*(at(s, "C", put((3, 4), 1e3)) for s in ("multiplied", "corrected"))),
    }
    if name == "UNVERIFIABLE":
        A[2, 2] = np.nan
    return protected_gemm(A, B, on_stage=planted[name], return_report=True, **options)


STATUSES = [status.name for status in Status if status is not Status.PENDING]
DEFAULTS = {"CLEAN": "nothing", "CORRECTED": "log", "CHECKSUM_FAULT": "log", "UNVERIFIABLE": "warn"}
KEYS = ("corrected", "checksum_fault", "unverifiable", "input_changed", "uncorrectable")


@pytest.mark.parametrize("name", STATUSES)
@pytest.mark.parametrize("on_error", [None, "correct", "detect", "raise"])
@pytest.mark.parametrize("action", [None, "log", "warn", "raise"])
def test_on_error_wins_over_errstate(name: str, on_error: str | None, action: Any, caplog: Any) -> None:
    if name == "CORRECTED" and on_error in ("detect", "raise"):  # where nothing is repaired
        expected, default = "UNCORRECTABLE", "raise"
    else:
        expected, default = name, DEFAULTS.get(name, "raise")
    wrong = expected in ("INPUT_CHANGED", "UNCORRECTABLE")
    wanted = default if action is None or name == "CLEAN" else action
    if wrong and on_error in ("correct", "raise"):
        wanted = "raise"
    if on_error == "detect" and wanted == "raise":
        wanted = "log"
    state: dict[str, Any] = {} if action is None else dict.fromkeys(KEYS, action)
    with errstate(**state), monitor() as log, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            _, report = scenario(name, on_error=on_error)
            raised = False
        except SilentDataCorruptionError as error:
            report, raised = error.report, True
    assert report.status.name == expected
    assert log.reports == [report]
    assert raised == (wanted == "raise")
    category = UnverifiableWarning if name == "UNVERIFIABLE" else CorruptionWarning
    assert [w.category for w in warned] == ([category] if wanted == "warn" else [])
    logged = [r for r in caplog.records if r.levelno >= logging.WARNING and r.name == "abft_tsm2"]
    assert len(logged) == (wanted == "log")


@pytest.mark.parametrize("on_error", ["detect", "raise"])
def test_where_repair_is_not_asked_for_c_is_left_as_it_was_found(on_error: str) -> None:
    A, B = pair(40, 50, 30)
    out, wrong = np.empty((40, 30)), A @ B
    wrong[3, 4] = 1e3
    hook = at("multiplied", "C", put((3, 4), 1e3))
    if on_error == "raise":
        with pytest.raises(SilentDataCorruptionError):
            protected_gemm(A, B, out=out, on_error=on_error, on_stage=hook)
    else:
        protected_gemm(A, B, out=out, on_error=on_error, on_stage=hook)
    assert np.array_equal(out, wrong)


def test_unknown_choices_are_refused_before_any_work() -> None:
    for call in (
        lambda: protected_gemm(np.eye(2), np.eye(2), on_error="fix", on_stage=pytest.fail),
        lambda: verify_gemm(np.eye(2), np.eye(2), np.eye(2), on_error="fix"),
        lambda: verify_gemm(np.eye(2), np.eye(2), np.eye(2), on_error="correct"),
    ):
        with pytest.raises(ValueError, match="on_error"):
            call()


# ---- stages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_stages_come_in_order_with_the_live_arrays(dtype: Any) -> None:
    A, B = pair(40, 50, 30, dtype)
    seen: list[tuple[str, dict[str, tuple[int, ...]]]] = []

    def hook(stage: str, arrays: Any) -> None:
        seen.append((stage, {name: x.shape for name, x in arrays.items()}))
        assert all(x.flags.writeable for x in arrays.values())
        for name, x in (("A", A), ("B", B)):
            assert name not in arrays or np.shares_memory(arrays[name], x)
        if stage == "multiplied":
            arrays["C"][3, 4] = np.nan

    protected_gemm(A, B, check="rows", on_stage=hook)
    assert seen == [
        ("inputs", {"A": (40, 50), "B": (50, 30)}),
        ("encoded", {"A": (40, 50), "B": (50, 30), "s": (50, 1), "t": (40, 1)}),
        ("multiplied", {"C": (40, 30)}),
        ("verified", {"C": (40, 30), "u": (40, 1)}),
        ("corrected", {"C": (40, 30)}),
    ]


def test_what_a_hook_raises_reaches_the_caller() -> None:
    def hook(stage: str, arrays: Any) -> None:
        if stage == "multiplied":
            raise KeyError("mine")

    with monitor() as log, pytest.raises(KeyError, match="mine"):
        protected_gemm(np.eye(3), np.eye(3), on_stage=hook)
    assert len(log) == 0


def test_a_change_before_encoding_is_the_callers_data() -> None:
    A, B = pair(40, 50, 30)
    C, report = protected_gemm(A, B, return_report=True, on_stage=at("inputs", "A", put((1, 1), 5.0)))
    assert A[1, 1] == 5.0
    assert report.status is Status.CLEAN
    assert not elements_outside(C, A, B).any()


# ---- the report ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", [None, "element", "all NaN"])
def test_fields_of_the_report(side: str, kind: str | None) -> None:
    A, B = pair(80, 96, 64, np.float32)
    report = Product(A, B, FAULTS[kind] if kind else None, check=side).report
    assert (report.operation, report.m, report.k, report.n, report.dtype) == ("gemm", 80, 96, 64, "float32")
    assert [c.side for c in report.checks] == (["rows", "columns"] if side == "both" else [side])
    for check in report.checks:
        lines = 80 if check.side == "rows" else 64
        assert (check.lines, check.verified, check.vectors) == (lines, lines, 1)
        assert 0 <= check.closest <= 1
        assert 0 <= check.closest_line < lines
        assert 0 < check.bound < 1e-2
        assert 0 < check.detection_limit < 1e-1
    assert 0 < report.closest <= 1
    assert set(report.seconds) == {"encode", "multiply", "verify"} | ({"correct"} if kind else set())
    assert all(seconds > 0 for seconds in report.seconds.values())
    assert report.total_seconds == pytest.approx(sum(report.seconds.values()))
    assert (report.recomputed > 0) == bool(kind)
    assert report.suspicions == 0
    if kind == "element":
        (fault,) = report.faults
        assert (fault.kind, fault.rows, fault.columns, fault.elements) == ("element", (5,), (7,), 1)
        assert fault.magnitude == pytest.approx(1e3, rel=0.1)
        assert report.recomputed < 0.1
    if kind == "all NaN":
        assert sum(f.elements for f in report.faults) == 80 * 64
        assert all(np.isnan(f.magnitude) for f in report.faults)


# ---- the caller's settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("kind", [None, "element", "NaN", "row", "all x 2"])
def test_strict_floating_point_settings_of_the_caller_do_not_reach_inside(kind: str | None, dtype: Any) -> None:
    A, B = pair(80, 96, 64, dtype)
    A[4], B[:, 3] = 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with np.errstate(all="raise"):
            C, report = protected_gemm(
                A, B, return_report=True, on_stage=at("multiplied", "C", FAULTS[kind]) if kind else None
            )
    assert report.status is (Status.CORRECTED if kind else Status.CLEAN)
    assert not elements_outside(C, A, B).any()


# ---- threads ------------------------------------------------------------------------------------------------


def test_eight_threads_with_faults_and_one_monitor_for_all() -> None:
    started = threading.Barrier(8)

    def work(thread: int) -> list[tuple[bool, str]]:
        outcome = []
        started.wait(timeout=30)
        for turn in range(6):
            A, B = pair(50 + 10 * thread, 60, 40 + turn, np.float32, seed=100 * thread + turn)
            kind = [None, "element", "row", "all NaN", "column of NaN"][(thread + turn) % 5]
            product = Product(A, B, FAULTS[kind] if kind else None)
            right = product.status == ("CORRECTED" if kind else "CLEAN") and not product.wrong.any()
            outcome.append((right, product.status))
        return outcome

    with monitor() as log, ThreadPoolExecutor(8) as pool:
        outcomes = [one for part in pool.map(work, range(8)) for one in part]
    assert all(right for right, _ in outcomes)
    assert len(log) == 48
    assert {s.name: n for s, n in log.counts.items()} == {
        name: sum(status == name for _, status in outcomes) for name in ("CLEAN", "CORRECTED")
    }


def test_threads_may_share_one_operand() -> None:
    B = normal(300, 200)
    A = [normal(100, 300, seed=i) for i in range(16)]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: protected_gemm(x, B), A))
    assert all(np.array_equal(C, x @ B) or np.allclose(C, x @ B, rtol=1e-12) for C, x in zip(results, A, strict=True))
