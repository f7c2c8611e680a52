"""Batches of small products on NumPy: each is verified, and where something is wrong repaired, as if by itself."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2 import Report, SilentDataCorruptionError, Status, errstate, monitor, protected_gemm
from abft_tsm2.checksum import verify
from abft_tsm2.gemm import host, stack
from benchmarks.walk import Walk
from tests.support.cases import DTYPES, arrange
from tests.support.planting import bits, normal
from tests.support.short_way import unrounded

IDS = [dtype.name for dtype in DTYPES]


def close(one: Report, other: Report) -> bool:
    """Whether reports say the same, but for times, and rounding of what was worked out with other operations."""

    def plain(report: Report) -> dict[str, Any]:
        of = report.to_dict()
        del of["seconds"], of["checks"], of["index"], of["products"], of["faults"]
        return of

    if plain(one) != plain(other) or len(one.checks) != len(other.checks) or len(one.faults) != len(other.faults):
        return False
    for a, b in zip(one.checks, other.checks, strict=True):
        if replace(a, bound=0, closest=0, detection_limit=0) != replace(b, bound=0, closest=0, detection_limit=0):
            return False
        for name in ("bound", "closest", "detection_limit"):
            if not np.isclose(getattr(a, name), getattr(b, name), rtol=1e-6, atol=0, equal_nan=True):
                return False
    return all(a == b for a, b in zip(one.faults, other.faults, strict=True))


def one_by_one(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **options: Any) -> Any:
    """Each product by itself, and the reports."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    C, reports = {}, {}
    for at in np.ndindex(*batch):
        C[at], reports[at] = protected_gemm(a[at], b[at], None if c is None else c[at], return_report=True, **options)
    return C, reports


def same_as_one_by_one(a: np.ndarray, b: np.ndarray, c: np.ndarray | None = None, **options: Any) -> Report:
    with errstate(unverifiable="ignore"):
        C, report = protected_gemm(a, b, c, return_report=True, **options)
        expected, reports = one_by_one(a, b, c, **options)
    assert len(report.products) == len(reports)
    for product, (at, alone) in zip(report.products, reports.items(), strict=True):
        assert product.index == at
        assert np.array_equal(bits(C[at]), bits(expected[at]))
        assert close(product, alone), (product, alone)
    return report


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of products that went through stacks."""
    sizes: list[int] = []
    honest = stack.Stack.outcome

    def counted(self: stack.Stack, *arguments: Any) -> stack.StackOutcome:
        outcome = honest(self, *arguments)
        sizes.append(outcome.number)
        return outcome

    monkeypatch.setattr(stack.Stack, "outcome", counted)
    return sizes


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
def test_a_clean_batch_is_that_of_its_products(dtype: Any, order: str, check: str, stacked: list[int]) -> None:
    a, b = normal(3, 7, 12, 20, dtype=dtype), normal(3, 7, 20, 9, dtype=dtype, seed=1)
    if order == "F":
        a, b = (np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2) for x in (a, b))
    if order == "strided":
        a, b = (np.repeat(np.repeat(x, 2, axis=-1), 3, axis=-2)[..., ::3, ::2] for x in (a, b))
    report = same_as_one_by_one(a, b, check=check)
    assert report.status is Status.CLEAN
    assert sum(stacked) == 21


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 70)] * 3),
    batch=st.sampled_from([(1,), (5,), (2, 3), (1, 4), (3, 1, 2)]),
    shared=st.sampled_from(["neither", "a", "b", "first axis of b"]),
    dtype=st.sampled_from(DTYPES),
    orders=st.tuples(*[st.sampled_from("CF")] * 2),
    factors=st.sampled_from([(1.0, 0.0), (2.5, 0.0), (1.0, 1.0), (-0.5, 3.0)]),
    check=st.sampled_from(["auto", "rows", "columns", "both"]),
    odd=st.sampled_from(["", "zero", "zero column", "nan", "inf", "huge", "tiny", "integers"]),
    seed=st.integers(0, 2**16),
)
def test_any_batch_is_that_of_its_products(
    sizes: Any, batch: Any, shared: str, dtype: Any, orders: Any, factors: Any, check: str, odd: str, seed: int
) -> None:
    (m, k, n), rng = sizes, np.random.default_rng(seed)
    a = rng.standard_normal((*(() if shared == "a" else batch), m, k))
    b = rng.standard_normal((*({"b": (), "first axis of b": batch[1:]}.get(shared, batch)), k, n))
    if odd == "integers":
        a, b = np.rint(a), np.rint(b)
    first = (0,) * (b.ndim - 2)
    if odd in ("zero", "zero column"):
        b[first] = 0 if odd == "zero" else b[first] * (np.arange(n) > 0)
    if odd in ("nan", "inf"):
        b[(*first, 0, 0)] = np.nan if odd == "nan" else np.inf
    if odd in ("huge", "tiny"):
        b[first] *= {2: 2.0**10, 4: 2.0**100, 8: 2.0**900}[dtype.itemsize] ** (1 if odd == "huge" else -1)
    c = rng.standard_normal((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), m, n))
    a, b, c = (x.astype(dtype) for x in (a, b, c))
    if orders[0] == "F":
        a = np.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
    if orders[1] == "F":
        b = np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)
    with np.errstate(all="ignore"):
        same_as_one_by_one(a, b, c, alpha=factors[0], beta=factors[1], check=check)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 90)] * 3),
    dtype=st.sampled_from(DTYPES),
    orders=st.tuples(*[st.sampled_from("CF")] * 2),
    factors=st.sampled_from([(1.0, 0.0), (2.5, 0.0), (1.0, 1.0), (-0.5, 3.0)]),
    data=st.sampled_from(["normal", "positive", "integers", "zero"]),
    seed=st.integers(0, 2**16),
)
def test_the_first_verdict_is_that_of_the_whole_procedure(
    sizes: Any, dtype: Any, orders: Any, factors: Any, data: str, seed: int
) -> None:
    (m, k, n), rng = sizes, np.random.default_rng(seed)
    a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, n)), rng.standard_normal((m, n))
    if data != "normal":
        a, b = {"positive": (abs(a), abs(b)), "integers": (np.rint(a), np.rint(b)), "zero": (0 * a, b)}[data]
    a, b, c = arrange(a.astype(dtype), orders[0]), arrange(b.astype(dtype), orders[1]), c.astype(dtype)
    options: Any = {"alpha": factors[0], "beta": factors[1], "return_report": True}
    C, report = protected_gemm(a, b, c, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_passed", lambda *_: None)
        expected, whole = protected_gemm(a, b, c, **options)
    assert np.array_equal(bits(C), bits(expected))
    assert close(report, whole), (report, whole)


# ---- faults -------------------------------------------------------------------------------------------------


def spoil(patch: pytest.MonkeyPatch, out: np.ndarray, number: int, before: Any = None, after: Any = None) -> None:
    """Change something as the stack is multiplied that holds this product: once."""
    honest, done = stack.multiply, []

    def spoiled(A: Any, B: Any, C: Any, *arguments: Any, **options: Any) -> None:
        hit = not done and np.shares_memory(C, out[number])
        if hit:
            done.append(1)
            if before:
                before()
        honest(A, B, C, *arguments, **options)
        if hit and after:
            after()

    patch.setattr(stack, "multiply", spoiled)


def batch(dtype: Any = np.float64, count: int = 1000, n: int = 16) -> tuple[np.ndarray, ...]:
    a, b = normal(count, n, n, dtype=dtype), normal(count, n, n, dtype=dtype, seed=1)
    return a, b, np.empty((count, n, n), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("check", ["auto", "rows", "columns", "both"])
@pytest.mark.parametrize("number", [0, 137, 999])
def test_a_fault_in_one_product_is_repaired(
    dtype: Any, check: str, number: int, monkeypatch: pytest.MonkeyPatch, stacked: list[int]
) -> None:
    a, b, out = batch(dtype)
    plain, _ = protected_gemm(a, b, return_report=True)

    def wrong(C: np.ndarray) -> None:
        C[3, 4] = 99

    spoil(monkeypatch, out, number, after=lambda: wrong(out[number]))
    C, report = protected_gemm(a, b, out=out, check=check, return_report=True)
    assert C is out
    assert report.status is Status.CORRECTED
    others = np.arange(1000) != number
    assert np.array_equal(bits(C[others]), bits(plain[others]))
    assert [p.index for p in report.products if p.status is not Status.CLEAN] == [(number,)]
    hook = {"on_stage": lambda stage, arrays: wrong(arrays["C"]) if stage == "multiplied" else None}
    by_itself, alone = protected_gemm(a[number], b[number], check=check, return_report=True, **hook)
    assert alone.status is Status.CORRECTED
    assert np.array_equal(bits(C[number]), bits(by_itself))
    assert close(report.products[number], alone)
    assert (report.products[number].faults[0].rows, report.products[number].faults[0].columns) == ((3,), (4,))
    assert sum(stacked) == 2000
    assert set(report.seconds) == {"encode", "multiply", "verify", "correct"}


def test_without_the_verdict_on_the_stack_the_fault_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = batch()
    honest = stack.first_verdict

    def blind(*arguments: Any) -> Any:
        found = honest(*arguments)
        return found._replace(ok=np.ones_like(found.ok))

    spoil(monkeypatch, out, 137, after=lambda: out[137].__setitem__((3, 4), 99))
    monkeypatch.setattr(stack, "first_verdict", blind)
    _, report = protected_gemm(a, b, out=out, return_report=True)
    assert report.status is Status.CLEAN
    assert out[137, 3, 4] == 99


def test_nan_and_what_is_only_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = batch()
    spoil(monkeypatch, out, 137, after=lambda: out[137].__setitem__((3, 4), np.nan))
    _, report = protected_gemm(a, b, out=out, on_error="detect", return_report=True)
    assert report.status is Status.UNCORRECTABLE
    assert np.isnan(out[137, 3, 4])
    spoil(monkeypatch, out, 137, after=lambda: out[137].__setitem__((3, 4), np.inf))
    with monitor() as log, pytest.raises(SilentDataCorruptionError):
        protected_gemm(a, b, out=out, on_error="raise")
    assert [one.status for one in log] == [Status.UNCORRECTABLE]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_operand_that_changes_after_it_was_encoded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = batch()
    c = normal(1000, 16, 16, seed=3)
    operand = {"a": a, "b": b, "c": c}[name]
    spoil(monkeypatch, out, 137, before=lambda: operand[137].__setitem__((3, 4), 99))
    with pytest.raises(SilentDataCorruptionError, match=f"{name if name == 'c' else name.upper()} changed") as raised:
        protected_gemm(a, b, c, beta=1.0, out=out)
    report = raised.value.report
    assert report.status is Status.INPUT_CHANGED
    assert [p.index for p in report.products if p.status is not Status.CLEAN] == [(137,)]


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_operand_that_is_wrong_only_while_it_is_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, out = batch()
    right = protected_gemm(a, b)
    operand = {"a": a, "b": b}[name]
    kept = operand[137, 3, 4]

    def put(value: float) -> Callable[[], None]:
        return lambda: operand[137].__setitem__((3, 4), value)

    spoil(monkeypatch, out, 137, before=put(99.0), after=put(kept))
    _, report = protected_gemm(a, b, out=out, return_report=True)
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["t", "products"])
def test_what_was_predicted_for_one_product_is_hit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what only widens its bound, and hides a fault."""
    a, b, out = batch(count=200)
    right, honest = protected_gemm(a, b), stack.predict

    def hit(*arguments: Any) -> Any:
        expected = honest(*arguments)
        getattr(expected, name)[137, 3] = 1e60
        return expected

    monkeypatch.setattr(stack, "predict", hit)
    spoil(monkeypatch, out, 137, after=lambda: out[137].__setitem__((3, 4), 99))
    _, report = protected_gemm(a, b, out=out, check="rows", return_report=True)
    assert (report.status, report.also) == (Status.CORRECTED, (Status.CHECKSUM_FAULT,))
    np.testing.assert_allclose(out, right, rtol=1e-12, atol=1e-12)
    assert [p.index for p in report.products if p.status is not Status.CLEAN] == [(137,)]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(2, 40)] * 3),
    dtype=st.sampled_from(DTYPES),
    check=st.sampled_from(["auto", "rows", "columns", "both"]),
    place=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 3),
    bit=st.integers(0, 63),
    seed=st.integers(0, 1000),
)
def test_a_flipped_bit_is_treated_as_in_a_product_by_itself(
    sizes: Any, dtype: Any, check: str, place: Any, bit: int, seed: int
) -> None:
    (m, k, n), count = sizes, 9
    a, b = normal(count, m, k, dtype=dtype, seed=seed), normal(count, k, n, dtype=dtype, seed=seed + 1)
    number, row, column = int(place[0] * count), int(place[1] * m), int(place[2] * n)

    def flip(C: np.ndarray) -> None:
        word = C.view(f"u{C.itemsize}")
        word[row, column] ^= word.dtype.type(1) << (bit % (8 * C.itemsize))

    out = np.empty((count, m, n), dtype)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        spoil(patch, out, number, after=lambda: flip(out[number]))
        C, report = protected_gemm(a, b, out=out, check=check, return_report=True)
        hook = {"on_stage": lambda stage, arrays: flip(arrays["C"]) if stage == "multiplied" else None}
        alone, single = protected_gemm(a[number], b[number], check=check, return_report=True, **hook)
    assert close(report.products[number], single)
    assert np.array_equal(bits(C[number]), bits(alone))
    assert report.status is single.status
    assert all(p.status is Status.CLEAN for i, p in enumerate(report.products) if i != number)


# ---- reports, and the rest ----------------------------------------------------------------------------------


def test_the_report_is_one_like_any_other() -> None:
    a, b, _ = batch(count=30)
    _, report = protected_gemm(a, b, return_report=True)
    assert "products" not in report.__dict__
    assert str(report).startswith("gemm batch of 30, each m=16 k=16 n=16 float64: CLEAN")
    assert [p.index for p in report.products] == [(i,) for i in range(30)]
    assert report.products is report.products
    for other in (
        Report.from_dict(report.to_dict()),
        pickle.loads(pickle.dumps(report)),
        copy.deepcopy(report),
        replace(report, dtype="float64"),
        Report.merge(report.products, operation="gemm"),
    ):
        if len(other.seconds) == len(report.seconds):
            other = replace(other, seconds=report.seconds)
        assert other == report
        assert report == other
    assert type(pickle.loads(pickle.dumps(protected_gemm(a, b, return_report=True)[1]))) is Report
    total = {step: sum(p.seconds[step] for p in report.products) for step in report.seconds}
    assert total == pytest.approx(dict(report.seconds))
    assert report.closest == max(p.closest for p in report.products)
    assert replace(report, m=3) != report


def test_a_report_keeps_no_array_alive() -> None:
    import weakref

    a, b, out = batch(count=30)
    seen = [weakref.ref(x) for x in (a, b, out)]
    _, report = protected_gemm(a, b, out=out, return_report=True)
    del a, b, out, _
    assert [x() for x in seen] == [None] * 3
    assert len(report.products) == 30


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_operands_that_are_the_same_for_all(dtype: Any) -> None:
    a, b = normal(7, 5, dtype=dtype), normal(5, 6, dtype=dtype)
    for x, y in ((np.broadcast_to(a, (4, 7, 5)), b), (a, np.broadcast_to(b, (4, 5, 6)))):
        same_as_one_by_one(x, y, check="both")
    same_as_one_by_one(np.broadcast_to(a, (2, 3, 7, 5)), np.broadcast_to(b, (3, 5, 6)), check="both")


def test_hooks_encoded_operands_and_large_products_go_one_by_one(stacked: list[int]) -> None:
    a, b, _ = batch(count=3)
    stages: list[str] = []
    protected_gemm(a, b, on_stage=lambda stage, arrays: stages.append(stage))
    assert stages.count("multiplied") == 3
    protected_gemm(normal(2, 200, 10), normal(2, 10, 200))
    protected_gemm(normal(2, 0, 10), normal(2, 10, 4))
    protected_gemm(normal(2, 5, 10, dtype=np.float32), normal(2, 10, 4))
    assert not stacked
    assert protected_gemm(a[:0], b[:0], return_report=True)[1].products == ()


def test_the_callers_error_state_holds_for_the_products() -> None:
    a, b, _ = batch(count=3)
    a[1] *= 1e200
    b[1] *= 1e200
    with np.errstate(over="raise"), pytest.raises(FloatingPointError):
        protected_gemm(a, b, on_error="detect")
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        protected_gemm(a, b, on_error="detect")


def test_threads_do_not_disturb_each_other() -> None:
    a, b, _ = batch(np.float32, count=300)
    right = protected_gemm(a, b)

    def work(seed: int) -> bool:
        if seed % 2:
            x, y = normal(16, 16, seed=seed), normal(16, 16, seed=seed + 1)
            return all(np.array_equal(protected_gemm(x, y), x @ y) for _ in range(20))
        return all(np.array_equal(protected_gemm(a, b), right) for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))


def test_a_stack_is_a_short_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = unrounded(monkeypatch, 16, 16, 16, batch=(1000,))
    for _ in range(2):
        protected_gemm(a, b)
    found, before = Walk(), sys.getprofile()
    sys.setprofile(found)
    try:
        protected_gemm(a, b)
    finally:
        sys.setprofile(before)
    assert found.total <= 396  # of two stacks
    assert found.outside <= 260
    assert host.Product.report.__qualname__ not in {name for _, name in found.calls}
