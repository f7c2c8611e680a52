"""One product of small matrices on NumPy: the short procedure finds, and reports, what the full one does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from abft_tsm2 import SilentDataCorruptionError, Status, errstate, monitor, protected_gemm
from abft_tsm2.checksum import small as sums
from abft_tsm2.checksum.encode import encoded_right, sampled_beyond
from abft_tsm2.checksum.predicted import predict
from abft_tsm2.checksum.small import SmallSums
from abft_tsm2.gemm import host, small
from abft_tsm2.gemm.operands import problem_of
from tests.support.cases import arrange
from tests.support.planting import bits, normal, pair
from tests.support.short_way import fully, told, unrounded

DTYPES = [np.dtype(name) for name in ("float64", "float32", "float16", ml_dtypes.bfloat16)]
IDS = [dtype.name for dtype in DTYPES]
CHECKS = ["auto", "rows", "columns", "both"]
SIZES = [(16, 16, 16), (3, 2, 7), (65, 70, 33), (40, 300, 60), (130, 20, 128)]
SAMPLED = [(72, 520, 90), (500, 540, 380)]  # k is so long that scales are of a sample, and float32 is summed in parts
FORMS = [(dtype, sizes) for dtype in DTYPES for sizes in SIZES] + [
    (dtype, sizes) for dtype in DTYPES[:2] for sizes in SAMPLED
]
FIELDS = ["V", "V2", "s", "t", "squares", "products"]


def spoil(patch: pytest.MonkeyPatch, before: Any = None, after: Any = None) -> None:
    """Change something before a small product is computed, or its result after."""
    honest = host.multiply

    def spoiled(A: Any, B: Any, C: Any, **options: Any) -> None:
        if before is not None:
            before()
        honest(A, B, C, **options)
        if after is not None:
            after(C)

    patch.setattr(small, "multiply", spoiled)


# ---- clean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "sizes"), FORMS, ids=str)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
def test_a_clean_product_is_that_of_the_full_procedure(
    dtype: Any, check: str, orders: str, sizes: Any, ended: list[bool]
) -> None:
    """Whether its first verdict is the last one is a matter of chance, and of the order in which a BLAS adds."""
    A, B = (arrange(x, order) for x, order in zip(pair(*sizes, dtype=dtype), orders, strict=True))
    expected, full = fully(A, B, check=check, return_report=True)
    for _ in range(2):  # the first of its form, and one of those that follow
        C, report = protected_gemm(A, B, check=check, return_report=True)
        assert np.array_equal(bits(C), bits(expected))
        assert told(report) == told(full)
        assert list(report.seconds) == ["encode", "multiply", "verify"]
    assert len(ended) == 2


@pytest.mark.parametrize(("dtype", "sizes"), FORMS, ids=str)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
def test_a_product_that_cannot_round_goes_the_short_way(
    dtype: Any, check: str, orders: str, sizes: Any, ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = unrounded(monkeypatch, *sizes, dtype)
    A, B = (arrange(x, order) for x, order in zip(operands, orders, strict=True))
    expected, full = fully(A, B, check=check, return_report=True)
    for _ in range(2):
        C, report = protected_gemm(A, B, check=check, return_report=True)
        assert np.array_equal(bits(C), bits(expected))
        assert told(report) == told(full)
        assert [found.closest for found in report.checks] == [0.0] * len(report.checks)
        assert list(report.seconds) == ["encode", "multiply", "verify"]
    assert ended == [False] * 2


@pytest.mark.parametrize(("dtype", "sizes"), FORMS, ids=str)
@pytest.mark.parametrize("orders", ["CC", "CF", "FC", "FF"])
@pytest.mark.parametrize("outlier", [False, True])
def test_its_sums_are_those_of_the_full_procedure_to_the_last_bit(
    dtype: Any, sizes: Any, orders: str, outlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an operand would seem to have changed, when a fault is looked for."""
    tries, honest = [], SmallSums._carry
    monkeypatch.setattr(SmallSums, "_carry", lambda *given: (tries.append(1), honest(*given)))
    A, B = pair(*sizes, dtype=dtype)
    if outlier:  # in rows that no sample has
        A[:, -1], B[-1] = np.geomspace(1, 5000, len(A)), np.geomspace(1, 5000, B.shape[1])
        beyond = sampled_beyond(len(B))
        assert beyond is None or len(B) - 1 not in beyond
    A, B = (arrange(x, order) for x, order in zip((A, B), orders, strict=True))
    C, partial = np.zeros((len(A), B.shape[1]), dtype), dtype.itemsize == 4 and len(B) >= 512
    form = small.SmallForm(problem_of(A, B, None, alpha=1.0, beta=0.0, check="both"))
    for side in form._sides():
        L, R, X = (A, B, C) if side.lines(A, B, C).side == "rows" else (B.T, A.T, C.T)
        side.encode(L, R)
        assert len(tries) == (2 if outlier and len(R) >= 512 else 1)
        tries.clear()
        lines, found = side.lines(L, R, X), side.predicted()
        expected = predict(lines, encoded_right(R, host.balanced(R.shape[1]), partial))
        for one, other in zip((*found.carried[:3], *found[1:3]), (*expected.carried[:3], *expected[1:3]), strict=True):
            assert np.array_equal(bits(one), bits(other))
        assert found.intact()
        assert found.carried.intact()


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90) | st.integers(512, 560), st.integers(1, 90)),
    dtype=st.sampled_from(DTYPES),
    orders=st.tuples(*[st.sampled_from(["C", "F", "padded", "strided", "transposed", "reversed"])] * 2),
    check=st.sampled_from(CHECKS),
    odd=st.sampled_from(["", "", "zero", "zero column", "nan", "inf", "huge", "tiny", "integers", "positive"]),
    place=st.none() | st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    bit=st.integers(0, 63),
    on_error=st.sampled_from([None, "correct", "detect"]),
    seed=st.integers(0, 2**16),
)
def test_any_product_is_that_of_the_full_procedure(
    sizes: Any, dtype: Any, orders: Any, check: str, odd: str, place: Any, bit: int, on_error: Any, seed: int
) -> None:
    (m, k, n), rng = sizes, np.random.default_rng(seed)
    A, B = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    if odd in ("integers", "positive"):
        A, B = (np.rint(x) if odd == "integers" else abs(x) for x in (A, B))
    if odd in ("zero", "zero column"):
        B *= 0 if odd == "zero" else np.arange(n) > 0
    if odd in ("nan", "inf"):
        B[0, 0] = np.nan if odd == "nan" else np.inf
    if odd in ("huge", "tiny"):
        B *= {2: 2.0**10, 4: 2.0**100, 8: 2.0**900}[dtype.itemsize] ** (1 if odd == "huge" else -1)
    with np.errstate(all="ignore"):
        A, B = (arrange(x.astype(dtype), order) for x, order in zip((A, B), orders, strict=True))

    def flip(C: np.ndarray) -> None:
        words = C.view(f"u{C.itemsize}")
        words[int(place[0] * m), int(place[1] * n)] ^= words.dtype.type(1 << bit % (8 * C.itemsize))

    results = []
    for procedure in (protected_gemm, protected_gemm, fully):
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"), errstate(unverifiable="ignore"):
            if place is not None:
                honest, done = host.multiply, []

                def spoiled(*arguments: Any, honest: Any = honest, done: list[int] = done, **options: Any) -> None:
                    honest(*arguments, **options)
                    if not done:  # what is computed for a repair is right
                        done.append(1)
                        flip(arguments[2])

                for steps in (small, host):
                    patch.setattr(steps, "multiply", spoiled)
            try:
                results.append(procedure(A, B, check=check, on_error=on_error, return_report=True))
            except SilentDataCorruptionError as error:
                results.append((None, error.report))
    (C, report), (again, second), (expected, full) = results
    assert told(report) == told(second) == told(full)
    for found in (C, again):
        assert (found is None) == (expected is None)
        assert found is None or np.array_equal(bits(found), bits(expected))


# ---- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", [16, 70])
def test_a_fault_is_repaired(
    dtype: Any, check: str, n: int, monkeypatch: pytest.MonkeyPatch, ended: list[bool]
) -> None:
    A, B = pair(n, n, n, dtype=dtype)
    right = protected_gemm(A, B, check=check)
    spoil(monkeypatch, after=lambda C: C.__setitem__((3, 4), 99))
    untold = protected_gemm(A, B, check=check)  # nobody reads a report
    C, report = protected_gemm(A, B, check=check, return_report=True)
    assert np.array_equal(bits(untold), bits(C))
    assert report.status is Status.CORRECTED
    assert [(fault.rows, fault.columns) for fault in report.faults] == [((3,), (4,))] * len(report.faults)
    np.testing.assert_allclose(C, right, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
    assert set(report.seconds) == {"encode", "multiply", "verify", "correct"}
    assert ended[1:] == [True, True]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_without_its_verdict_a_fault_goes_unnoticed(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = pair(16, 16, 16, dtype=dtype)
    _, honest = protected_gemm(A, B, return_report=True)
    spoil(monkeypatch, after=lambda C: C.__setitem__((3, 4), 99))
    monkeypatch.setattr(SmallSums, "clean", lambda *_, told: honest.checks[:told])
    C, report = protected_gemm(A, B, return_report=True)
    assert report.status is Status.CLEAN
    assert C[3, 4] == protected_gemm(A, B)[3, 4] == 99


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_only_detected_stays(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = pair(16, 16, 16)
    out = np.empty((16, 16))
    spoil(monkeypatch, after=lambda C: C.__setitem__((3, 4), value))
    for options in ({}, {"out": out}):
        C, report = protected_gemm(A, B, on_error="detect", return_report=True, **options)
        assert report.status is Status.UNCORRECTABLE
        assert np.array_equal(C[3, 4], value, equal_nan=True)
    assert C is out
    with monitor() as log, pytest.raises(SilentDataCorruptionError):
        protected_gemm(A, B, on_error="raise")
    assert [one.status for one in log] == [Status.UNCORRECTABLE]


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("check", ["rows", "columns", "both"])
@pytest.mark.parametrize("name", ["A", "B"])
def test_an_operand_that_changes_after_it_was_encoded(
    name: str, check: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = pair(16, 16, 16, dtype=dtype)
    protected_gemm(A, B, check=check)
    operand = {"A": A, "B": B}[name]
    spoil(monkeypatch, before=lambda: operand.__setitem__((5, 4), 99))
    with pytest.raises(SilentDataCorruptionError, match=f"{name} changed") as raised:
        protected_gemm(A, B, check=check)
    assert raised.value.report.status is Status.INPUT_CHANGED


@pytest.mark.parametrize("name", ["A", "B"])
def test_an_operand_that_is_wrong_only_while_it_is_multiplied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = pair(16, 16, 16)
    right = protected_gemm(A, B)
    operand = {"A": A, "B": B}[name]
    kept = operand[3, 4]
    spoil(
        monkeypatch,
        before=lambda: operand.__setitem__((3, 4), 99),
        after=lambda _: operand.__setitem__((3, 4), kept),
    )
    C, report = protected_gemm(A, B, return_report=True)
    assert report.status is Status.CORRECTED
    np.testing.assert_allclose(C, right, rtol=1e-12, atol=1e-12)


def hit(patch: pytest.MonkeyPatch, field: str, value: float) -> None:
    """Change what was encoded, after it was."""
    honest = SmallSums.encode

    def encode(self: SmallSums, *given: Any) -> None:
        honest(self, *given)
        getattr(self._now, field)[3] = value

    patch.setattr(SmallSums, "encode", encode)


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
@pytest.mark.parametrize("field", FIELDS)
def test_what_was_encoded_is_hit(field: str, dtype: Any, monkeypatch: pytest.MonkeyPatch, ended: list[bool]) -> None:
    """Also what only widens a bound, and hides a fault."""
    A, B = pair(16, 16, 16, dtype=dtype)
    right = protected_gemm(A, B, check="rows")
    hit(monkeypatch, field, 1e30)
    spoil(monkeypatch, after=lambda C: C.__setitem__((3, 4), 99))
    assert protected_gemm(A, B, check="rows")[3, 4] != 99  # nobody reads the report
    C, report = protected_gemm(A, B, check="rows", return_report=True)
    assert report.status is Status.CORRECTED
    assert (Status.CHECKSUM_FAULT in report.also) == (
        field in ("V", "s", "t", "products")
    )  # of others no verdict is made
    np.testing.assert_allclose(C, right, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)
    assert ended[1:] == [True, True]


@pytest.mark.parametrize("field", ["V", "s"])
def test_what_is_hit_while_sums_are_predicted_is_no_change_of_an_operand(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, B = pair(16, 16, 16)
    right, honest = protected_gemm(A, B, check="rows"), sums.squares_of
    form = small.known(A, B, "rows")[0]
    assert form is not None
    memory = form._free[-1][0]

    def late(X: Any) -> Any:
        if X is A:
            getattr(memory._now, field)[3] = 1e30
        return honest(X)

    monkeypatch.setattr(sums, "squares_of", late)
    C, report = protected_gemm(A, B, check="rows", return_report=True)
    assert report.status is Status.CHECKSUM_FAULT
    assert np.array_equal(C, right)


def test_without_the_comparison_of_bits_a_bound_that_was_hit_hides_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    A, B = pair(16, 16, 16)
    hit(monkeypatch, "products", 1e60)
    spoil(monkeypatch, after=lambda C: C.__setitem__((3, 4), 99))
    honest = SmallSums.clean

    def trusting(self: SmallSums, C: Any, L: Any, R: Any, *, told: bool) -> Any:
        self._right_bits, self._left_bits = self._right.tobytes(), self._left.tobytes()
        return honest(self, C, L, R, told=told)

    monkeypatch.setattr(SmallSums, "clean", trusting)
    C, report = protected_gemm(A, B, check="rows", return_report=True)
    assert report.status is Status.CLEAN
    assert C[3, 4] == 99


# ---- callers -----------------------------------------------------------------------------------------------------


def test_the_callers_error_state_holds_for_the_product_alone(ended: list[bool]) -> None:
    A = np.full((16, 16), 1e200)
    tiny = np.full((16, 16), 1e-200)
    with np.errstate(all="raise"):
        with pytest.raises(FloatingPointError):
            protected_gemm(A, A)
        _, report = protected_gemm(A, tiny, return_report=True)  # the squares overflow and underflow
        assert report.status is Status.CLEAN
        assert np.geterr()["over"] == "raise"
    with pytest.warns(RuntimeWarning, match="overflow"), errstate(unverifiable="ignore"):
        protected_gemm(A, A, on_error="detect")
    assert ended[0] is False


def test_threads_have_memory_of_their_own() -> None:
    operands = [pair(16, 16, 16, seed=seed) for seed in range(0, 128, 2)]
    expected = [fully(A, B, return_report=True) for A, B in operands]

    def many(number: int) -> bool:
        (A, B), (right, full) = operands[number], expected[number]
        for _ in range(60):
            C, report = protected_gemm(A, B, return_report=True)
            if not np.array_equal(C, right) or told(report) != told(full):
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, range(len(operands))))
    form = small.known(*operands[0], "auto")[0]
    assert form is not None
    assert len(form._free) <= small._IDLE


def off_by_one_byte(x: Any) -> Any:
    memory = np.empty(x.nbytes + 1, np.uint8)
    moved = np.ndarray(x.shape, x.dtype, memory, 1, x.strides)
    moved[...] = x
    return moved


@pytest.mark.parametrize("stored", [off_by_one_byte, lambda x: x.astype(x.dtype.newbyteorder())])
@pytest.mark.parametrize("check", ["rows", "columns"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_operands_that_numpy_copies_first_go_the_full_way(
    order: str, check: str, stored: Callable[[Any], Any], ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums have other last bits where `dot` takes them, by which a fault would be that of an operand."""
    A, B = (arrange(x, order) for x in pair(9, 7, 5))
    right = protected_gemm(A, B, check=check)
    ended.clear()
    for operands in ((stored(A), stored(B)), (stored(A), B), (A, stored(B))):
        with monkeypatch.context() as patch:
            honest = host.multiply

            def spoiled(*given: Any, honest: Any = honest, patch: Any = patch, **options: Any) -> None:
                honest(*given, **options)
                given[2][3, 4] = 99
                patch.undo()

            patch.setattr(host, "multiply", spoiled)
            C, report = protected_gemm(*operands, check=check, return_report=True)
        assert report.status is Status.CORRECTED
        np.testing.assert_allclose(C, right, rtol=1e-12, atol=1e-12)
    assert ended == []


def test_what_is_not_plain_goes_the_full_way(ended: list[bool]) -> None:
    A, B = pair(16, 16, 16)
    protected_gemm(A, B)
    ended.clear()
    c = normal(16, 16, seed=7)
    protected_gemm(A, B, c, beta=1.0)
    protected_gemm(A, B, alpha=2.0)
    protected_gemm(A, B, on_stage=lambda *_: None)
    protected_gemm(A[::2, ::2], B[::2, ::2])
    protected_gemm(A, B, out=np.empty((16, 16), order="F"))
    protected_gemm(A[0], B)
    protected_gemm(*pair(9000, 2, 3))
    protected_gemm(*pair(16, 1100, 1100))
    assert ended == []


def test_arguments_are_checked_as_ever() -> None:
    A, B = pair(16, 16, 16)
    protected_gemm(A, B)
    wrong: list[tuple[dict[str, Any], Any]] = [
        ({"alpha": True}, TypeError),
        ({"check": "no"}, ValueError),
        ({"check": ["rows"]}, ValueError),
        ({"on_error": "no"}, ValueError),
        ({"verify": "no"}, ValueError),
        ({"precision": "tf32"}, ValueError),
        ({"out": A}, ValueError),
        ({"out_dtype": "float32"}, ValueError),
        ({"beta": 1.0}, ValueError),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            protected_gemm(A, B, **options)
    with pytest.raises(ValueError, match="cannot be multiplied"):
        protected_gemm(A, B[:8])


@pytest.mark.parametrize("dtype", DTYPES, ids=IDS)
def test_operands_and_results_of_all_kinds(dtype: Any, ended: list[bool]) -> None:
    class Labelled(np.ndarray):
        pass

    A, B = pair(16, 16, 16, dtype=dtype)
    expected = fully(A, B)
    frozen = A.copy()
    frozen.flags.writeable = False
    out = np.empty((16, 16), dtype)
    with errstate(unverifiable="ignore"):
        for one in (A.view(Labelled), frozen):
            C = protected_gemm(one, B)
            assert type(C) is np.ndarray
            assert np.array_equal(bits(C), bits(expected))
        assert protected_gemm(A, B, out=out) is out
    assert np.array_equal(bits(out), bits(expected))
    assert len(ended) == 3
    if dtype.itemsize == 2:
        for options in ({"verify": "float32"}, {"out_dtype": np.float32}):
            C, report = protected_gemm(A, B, return_report=True, **options)
            plain, full = fully(A, B, return_report=True, **options)
            assert np.array_equal(bits(C), bits(plain))
            assert told(report) == told(full)
        assert len(ended) == 5


def test_no_more_forms_are_kept_than_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_forms", {})
    monkeypatch.setattr(small, "_MOST", 3)
    for n in range(2, 10):
        assert protected_gemm(*pair(n, n, n), return_report=True)[1].status is Status.CLEAN
        assert len(small._forms) <= 3
