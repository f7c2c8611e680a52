"""What holds of every protected product, over shapes, orders, types, scales, families of data and faults.

A clean product is never called faulty and is bit for bit what the library computes without protection. After one
planted fault, every element is within the rigorous rounding bound of the exact product, or the fault was below what
its line can see: |v_j d| <= bound + |clean residual|, computed here in the widest type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from abft_tsm2 import Report, SilentDataCorruptionError, Status, encode, errstate, protected_gemm, verify_gemm
from abft_tsm2.checksum.bounds import arithmetic, statistical_bound
from abft_tsm2.gemm import host, small
from benchmarks import families
from tests.support.cases import DTYPES, ORDERS, arrange, finfo
from tests.support.oracles import WIDE, elements_outside
from tests.support.planting import bits

FULL = tuple(dtype for dtype in DTYPES if dtype.itemsize >= 4)
EDGE = (0, 1)
CHECKS = ("auto", "rows", "columns", "both")
ALARMS = {Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE}

sizes = st.sampled_from(EDGE) | st.integers(2, 40) | st.sampled_from([63, 64, 65, 150])
lengths = st.sampled_from(EDGE) | st.integers(2, 40) | st.sampled_from([64, 127, 129, 500])


factors = st.sampled_from([0.0, 1.0, -1.0]) | st.floats(1e-3, 100) | st.floats(-100, -1e-3)


@dataclass(frozen=True)
class Given:
    """Operands of one product, and how it is asked for."""

    a: np.ndarray
    b: np.ndarray
    check: str
    label: str  # what Hypothesis shows of a failing example

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.label)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.a.dtype

    def product(self, **options: Any) -> tuple[np.ndarray, Report]:
        c, report = protected_gemm(self.a, self.b, check=self.check, return_report=True, **options)
        return c, report

    def unprotected(self) -> np.ndarray:
        """A @ B as the library computes it; 16-bit types through float32, rounded once."""
        with np.errstate(all="ignore"):
            if self.dtype.itemsize >= 4:
                return self.a @ self.b
            product: np.ndarray = (self.a.astype(np.float32) @ self.b.astype(np.float32)).astype(self.dtype)
            return product


@st.composite
def products(
    draw: Any,
    dtypes: Any = DTYPES,
    least: int = 0,
    tags: tuple[str, ...] = (),
    checks: Any = CHECKS,
    scaled: bool = True,
) -> Given:
    m, k, n = draw(sizes), draw(lengths), draw(sizes)
    assume(min(m, k, n) >= least)
    dtype, check = draw(st.sampled_from(dtypes)), draw(st.sampled_from(checks))
    family = draw(st.sampled_from(families.names(*tags))) if min(m, k, n) > 0 else "normal"
    orders = draw(st.tuples(st.sampled_from(ORDERS), st.sampled_from(ORDERS)))
    seed = draw(st.integers(0, 2**16))
    a, b = families.operands(family, m, k, n, np.random.default_rng(seed), dtype)
    label = f"{family} {m}x{k}x{n} {dtype.name} {orders} seed {seed} check {check}"
    if scaled and families.FAMILIES[family].tag in ("generic", "structured") and draw(st.booleans()):
        # By powers of two that leave room for the family's own range and for the sum.
        reach = {8: 1000, 4: 100}.get(dtype.itemsize, 8)
        left = draw(st.integers(-reach, reach))
        right = draw(st.integers(-reach, min(reach, reach - left)))
        label += f" x 2^{left} 2^{right}"
        with np.errstate(all="ignore"):
            a, b = (a.astype(WIDE) * WIDE(2) ** left).astype(dtype), (b.astype(WIDE) * WIDE(2) ** right).astype(dtype)
    return Given(arrange(a, orders[0]), arrange(b, orders[1]), check, label)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    return x.dtype == y.dtype and np.array_equal(bits(x), bits(y))


def ordinary(x: Given) -> bool:
    """Whether nothing in the product is near the ends of its type's range, not even the largest sum."""
    wide_a, wide_b = abs(x.a.astype(WIDE)), abs(x.b.astype(WIDE))
    largest = WIDE(float(finfo(x.dtype).max))
    return bool(np.isfinite(wide_a).all() and np.isfinite(wide_b).all() and (wide_a @ wide_b <= largest / 4).all())


class Flip:
    """An on_stage hook that flips bits of elements of one live array, once."""

    def __init__(self, places: list[tuple[float, float, int]], operand: str = "C", stage: str = "multiplied") -> None:
        self.places, self.operand, self.stage = places, operand, stage
        self.before = self.after = np.zeros((0, 0))

    def __call__(self, stage: str, arrays: Mapping[str, np.ndarray]) -> None:
        if stage != self.stage or self.before.size:
            return
        target = arrays[self.operand]
        self.before = target.copy()
        for row, column, bit in self.places:
            at = int(row * target.shape[0]), int(column * target.shape[1])
            word = target.view(f"u{target.itemsize}")
            word[at] ^= word.dtype.type(1) << (bit % (8 * target.itemsize))
        self.after = target.copy()


flips = st.tuples(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True), st.integers(0, 63))


def visible(x: Given, before: np.ndarray, after: np.ndarray, side: str, times: float = 1.0) -> np.ndarray:
    """Boolean, for each line of one side: whether a change of C moved its checksum beyond what rounding explains,
    or beyond several times that."""
    a, b = x.a.astype(WIDE), x.b.astype(WIDE)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        before, after = before.astype(WIDE), after.astype(WIDE)
    if side == "columns":
        a, b, before, after = b.T, a.T, before.T, after.T
        v = encode(x.a, side="columns").weights.columns[:, 0].astype(WIDE)
    else:
        v = encode(x.b, side="rows").weights.rows[:, 0].astype(WIDE)
    how, (k, n) = arithmetic(x.dtype.name, x.dtype.name), b.shape
    with np.errstate(all="ignore"):
        size = np.sqrt((a * a) @ ((b * b) @ (v * v)))
        held = np.sqrt((after * after) @ (v * v))
        lost = how.underflow(k) * abs(v).sum()
        bound = statistical_bound(np, how, k, n, products=size, stored=held, added=None, underflow=lost)
        # Changes that are subnormal beside the operands' largest elements, in float64, are not looked for.
        bound += k * WIDE(2) ** -1020 * max(1, abs(a).max()) * max(1, abs(b).max()) * abs(v).max()
        residual = abs(before @ v - a @ (b @ v))
        noise = 2.0**-53 * (math.sqrt(k) + math.sqrt(2 * n)) * np.maximum(size, held)
        change = np.where(after == before, 0, after - before)
        seen: np.ndarray = ~(abs(change @ v) <= times * bound + residual + noise)
    return seen


def sides(x: Given) -> tuple[str, ...]:
    short = "rows" if x.b.shape[1] <= x.a.shape[0] else "columns"
    return {"auto": (short,), "both": ("rows", "columns")}.get(x.check, (x.check,))


# ---- clean --------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(products())
def test_a_clean_product_is_never_called_faulty_and_is_bit_for_bit_the_same(x: Given) -> None:
    held = x.a.copy(), x.b.copy()
    with errstate(unverifiable="ignore"), np.errstate(all="ignore"):
        c, report = x.product()
        assert not {report.status, *report.also} & ALARMS
        assert report.status is Status.CLEAN or not ordinary(x)
        assert same_bits(c, x.unprotected())
        assert same_bits(x.a, held[0])
        assert same_bits(x.b, held[1])
        found = verify_gemm(x.a, x.b, c, check=x.check)
        assert not {found.status, *found.also} & ALARMS
    lines = {"rows": x.a.shape[0], "columns": x.b.shape[1]}
    for check in report.checks:
        assert check.lines == lines[check.side]
        assert 0 <= check.closest <= 1
        assert report.status is not Status.CLEAN or check.verified == check.lines
    assert [check.side for check in report.checks] == list(sides(x))


@settings(max_examples=150)
@given(
    products(FULL, tags=("generic", "structured"), scaled=False),
    factors,
    factors,
    st.integers(0, 2**16),
    st.booleans(),
)
def test_alpha_beta_and_c(x: Given, alpha: float, beta: float, seed: int, inplace: bool) -> None:
    shape = x.a.shape[0], x.b.shape[1]
    c0 = np.random.default_rng(seed).standard_normal(shape).astype(x.dtype)
    with np.errstate(all="ignore"):
        expected = alpha * (x.a @ x.b) if alpha != 1 else x.a @ x.b
        if alpha == 0:  # as in BLAS, nothing is read
            expected = np.zeros(shape, x.dtype)
        expected = expected + beta * c0 if beta != 0 else expected
        out = c0.copy() if inplace else None
        c, report = x.product(c=out if inplace else c0, alpha=alpha, beta=beta, out=out)
    assert report.status is Status.CLEAN
    assert not inplace or c is out
    assert same_bits(c, expected.astype(x.dtype))


@settings(max_examples=100)
@given(products(least=1), st.sampled_from([np.nan, np.inf, -np.inf]), st.tuples(*[st.floats(0, 0.999)] * 4))
def test_what_is_not_finite_makes_its_own_lines_unverifiable(x: Given, bad: float, at: tuple[float, ...]) -> None:
    (m, k), n = x.a.shape, x.b.shape[1]
    x.a[int(at[0] * m), int(at[1] * k)] = bad
    x.b[int(at[2] * k), int(at[3] * n)] = bad
    with errstate(unverifiable="ignore"), np.errstate(all="ignore"):
        c, report = x.product()
        assert report.status is Status.UNVERIFIABLE
        assert report.reasons
        assert not set(report.also) & ALARMS
        assert same_bits(c, x.unprotected()) or np.isnan(c).any()
    assert not elements_outside(c, x.a, x.b).any()


# ---- one fault ----------------------------------------------------------------------------------------------


@settings(max_examples=500)
@given(products(least=1, tags=("generic", "structured", "pathological")).filter(ordinary), flips)
def test_one_flipped_bit_is_repaired_or_below_the_limit(x: Given, place: Any) -> None:
    flip = Flip([place])
    with np.errstate(all="ignore"):
        c, report = x.product(on_stage=flip)
    assert report.status in (Status.CLEAN, Status.CORRECTED)
    outside = elements_outside(c, x.a, x.b)
    if report.status is Status.CORRECTED:
        assert not outside.any()
        assert report.faults
        assert report.recomputed > 0
    elif outside.any():
        for side in sides(x):
            assert not visible(x, flip.before, flip.after, side).any()
        assert same_bits(c, flip.after)


@settings(max_examples=200)
@given(products(least=1, tags=("generic", "structured")).filter(ordinary), st.lists(flips, min_size=2, max_size=6))
def test_several_flipped_bits(x: Given, places: list[Any]) -> None:
    flip = Flip(places)
    with np.errstate(all="ignore"):
        c, report = x.product(on_stage=flip)
    assert report.status in (Status.CLEAN, Status.CORRECTED)
    outside = elements_outside(c, x.a, x.b)
    for side in sides(x):
        lines = outside.any(axis=1 if side == "rows" else 0)
        assert not (lines & visible(x, flip.before, c, side)).any()  # what is left is below the limit
        seen = visible(x, flip.before, flip.after, side).any()
        assert not seen or report.status is Status.CORRECTED or not elements_outside(flip.after, x.a, x.b).any()


@settings(max_examples=150)
@given(products(least=2, tags=("generic",), scaled=False), flips)
def test_a_bit_flipped_in_an_existing_product_is_located(x: Given, place: Any) -> None:
    flip = Flip([place])
    with np.errstate(all="ignore"):
        c = x.unprotected()
        flip("multiplied", {"C": c})
        held = c.copy()
        report = verify_gemm(x.a, x.b, c, check=x.check, on_error="detect")
    assert same_bits(c, held)
    assert report.status in (Status.CLEAN, Status.UNCORRECTABLE)
    # A product from elsewhere may show another pattern of rounding: up to four times the bound.
    seen = any(visible(x, flip.before, flip.after, side, 4).any() for side in sides(x))
    if seen and elements_outside(c, x.a, x.b).any():
        assert report.status is Status.UNCORRECTABLE
        at = int(place[0] * c.shape[0]), int(place[1] * c.shape[1])
        assert any(at[0] in (f.rows or (at[0],)) and at[1] in (f.columns or (at[1],)) for f in report.faults)


@settings(max_examples=60)
@given(st.integers(8, 90), st.integers(8, 90), st.integers(8, 90), st.sampled_from(FULL), flips, st.integers(0, 99))
def test_the_reported_limit_is_kept(m: int, k: int, n: int, dtype: Any, place: Any, seed: int) -> None:
    # Elements of one size, so that the limit of the middle line is nearly that of every line.
    rng = np.random.default_rng([seed, m, k, n])
    a, b = (rng.choice([-1, 1], shape) * rng.uniform(1, 1.5, shape) for shape in ((m, k), (k, n)))
    x = Given(a.astype(dtype), b.astype(dtype), "rows", f"{m}x{k}x{n} {dtype} seed {seed}")
    _, clean = x.product()
    flip = Flip([place])
    _, report = x.product(on_stage=flip)
    with np.errstate(all="ignore"):
        change = abs(flip.after - flip.before).max()
    if not change <= 1.5 * clean.checks[0].detection_limit:
        assert report.status is Status.CORRECTED


# ---- operands -----------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(products(least=1, tags=("generic", "structured"), scaled=False), st.sampled_from("AB"), flips)
def test_a_bit_that_flips_in_an_operand_underway_is_noticed_or_harmless(x: Given, operand: str, place: Any) -> None:
    a, b = x.a.copy(), x.b.copy()
    refused = None
    try:
        with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
            c, report = x.product(on_stage=Flip([place], operand, "encoded"))
    except SilentDataCorruptionError as error:
        refused = error.report
    if refused is not None:
        assert refused.status is Status.INPUT_CHANGED
        assert any(f"{operand} changed" in reason for reason in refused.reasons)
        return
    original = Given(a, b, x.check, x.label)
    assert report.status is Status.CLEAN
    assert not any(visible(original, original.unprotected(), c, side).any() for side in sides(x))


@settings(max_examples=150)
@given(products(least=1, scaled=False), st.sampled_from("AB"), flips, st.booleans(), st.booleans())
def test_a_bit_that_flips_in_an_encoded_operand_is_restored(
    x: Given, operand: str, place: Any, repair: bool, recheck: bool
) -> None:
    with np.errstate(all="ignore"), errstate(unverifiable="ignore"):
        expected, held = x.unprotected(), {"A": x.a, "B": x.b}[operand]
        right = held.copy()
        carries = (operand == "B" and "rows" in sides(x)) or (operand == "A" and "columns" in sides(x))
        e = encode(held, repair=repair, recheck=recheck or not carries)
        Flip([place], operand, "")("", {operand: held})
        a, b = (e, x.b) if operand == "A" else (x.a, e)
        c, report = protected_gemm(a, b, check=x.check, return_report=True)
        if e.recheck:
            assert Status.CORRECTED in (report.status, *report.also)
            # A repaired copy may lie differently in memory, and BLAS then sums in another order.
            assert same_bits(c, expected) or not repair or np.isnan(expected).any()
            assert same_bits(held, right) is repair
        e.correct()
        assert same_bits(held, right)
        assert not elements_outside(c, x.a, x.b).any() or not e.recheck


# ---- the properties themselves: a check that sees nothing must not pass ------------------------------------


def normal(dtype: Any = np.float64) -> Given:
    rng = np.random.default_rng(9)
    return Given(rng.standard_normal((12, 9)).astype(dtype), rng.standard_normal((9, 8)).astype(dtype), "rows", "")


def test_a_blind_check_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, flip = host.judge, (0.5, 0.5, 60)

    def blind(*arguments: Any) -> Any:
        verdict = honest(*arguments)
        return replace(verdict, ok=np.ones_like(verdict.ok))

    examples: list[tuple[Any, tuple[Any, ...]]] = [
        (test_one_flipped_bit_is_repaired_or_below_the_limit, (normal(), flip)),
        (test_several_flipped_bits, (normal(), [flip, (0.1, 0.1, 61)])),
        (test_a_bit_flipped_in_an_existing_product_is_located, (normal(), flip)),
        (test_the_reported_limit_is_kept, (9, 9, 9, np.dtype(np.float64), flip, 0)),
        (test_a_bit_that_flips_in_an_operand_underway_is_noticed_or_harmless, (normal(), "B", flip)),
    ]
    for test, arguments in examples:
        test.hypothesis.inner_test(*arguments)
    monkeypatch.setattr(host, "judge", blind)
    for test, arguments in examples:
        with pytest.raises(AssertionError):
            test.hypothesis.inner_test(*arguments)


def test_a_result_that_is_not_the_librarys_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, clean = host.multiply, test_a_clean_product_is_never_called_faulty_and_is_bit_for_bit_the_same

    def off_by_a_bit(*arguments: Any, **options: Any) -> None:
        honest(*arguments, **options)
        arguments[2][0, 0] = np.nextafter(arguments[2][0, 0], np.inf)

    clean.hypothesis.inner_test(normal())
    for steps in host, small:
        monkeypatch.setattr(steps, "multiply", off_by_a_bit)
    with pytest.raises(AssertionError):
        clean.hypothesis.inner_test(normal())


def test_a_repair_that_is_not_within_rounding_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(x: Given, **options: Any) -> tuple[np.ndarray, Report]:
        c, report = protected_gemm(x.a, x.b, check=x.check, return_report=True, **options)
        c[3] *= 1 + 1e-12
        return c, report

    monkeypatch.setattr(Given, "product", careless)
    with pytest.raises(AssertionError):
        test_one_flipped_bit_is_repaired_or_below_the_limit.hypothesis.inner_test(normal(), (0.5, 0.5, 60))
