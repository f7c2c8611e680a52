"""Faults are planted at the site they name, at their moment, and nowhere else; and around functions of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, SilentDataCorruptionError, encode, errstate, protected_gemm
from abft_tsm2.faults import SITES, Injector, Plan, inject
from abft_tsm2.faults.sites import FUNCTION_SITES
from tests.support.cases import ORDERS, arrange
from tests.support.oracles import elements_outside
from tests.support.planting import at, bits, both, pair, put

BIG = "exponent_high"
STAGES = {
    **{"product": ("multiplied", "C"), "partial": ("multiplied", "C"), "A": ("encoded", "A"), "B": ("encoded", "B")},
    **{"A.stored": ("inputs", "A"), "B.stored": ("inputs", "B"), "s": ("encoded", "s"), "t": ("encoded", "t")},
    **{"u": ("verified", "u"), "repaired": ("corrected", "C")},
}
OWN = [site for site in SITES if site not in FUNCTION_SITES]


class Looking:
    """A hook around an injector, which keeps what that one changed, and when."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        self.changes: list[tuple[str, str, np.ndarray]] = []

    def __call__(self, stage: str, arrays: Any) -> None:
        before = {name: bits(x).copy() for name, x in arrays.items() if isinstance(x, np.ndarray)}
        self.injector(stage, arrays)
        for name, was in before.items():
            changed = bits(arrays[name]) != was
            if changed.any():
                self.changes.append((stage, name, changed))


def product(*plans: Plan, hook: Any = None, **options: Any) -> tuple[np.ndarray | None, Report, Looking]:
    """A protected product of 40 x 50 x 30 with faults; None where it was refused."""
    look = Looking(Injector(*plans))
    A, B = options.pop("operands", None) or pair(40, 50, 30)
    every = look if hook is None else both(hook, look)
    try:
        C, report = protected_gemm(A, B, on_stage=every, return_report=True, **options)
    except SilentDataCorruptionError as error:
        return None, error.report, look
    return C, report, look


def never_wrong(C: np.ndarray | None, operands: Any = None) -> None:
    A, B = operands or pair(40, 50, 30)
    assert C is None or not elements_outside(C, A, B).any()


# ---- sites ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", sorted(STAGES))
def test_a_site_is_hit_at_its_stage_in_its_array(site: str) -> None:
    hook = at("multiplied", "C", put((3, 4), 1e3)) if site == "repaired" else None
    C, _, look = product(Plan("bit_flip", site, BIG), hook=hook)
    stage, name = STAGES[site]
    assert look.changes[0][:2] == (stage, name)
    assert look.changes[0][2].sum() == 1
    assert [(one.plan.site, one.stage) for one in look.injector.planted] == [(site, stage)]
    if "stored" not in site:  # an operand that was wrong before the call is what is multiplied
        never_wrong(C)


@pytest.mark.parametrize("site", ["A", "B"])
def test_a_transient_fault_of_an_operand_is_gone_when_somebody_looks(site: str) -> None:
    operands = pair(40, 50, 30)
    C, report, look = product(Plan("bit_flip", site, BIG), operands=operands)
    assert look.changes[0][:2] == ("encoded", site)
    for x, right in zip(operands, pair(40, 50, 30), strict=True):
        np.testing.assert_array_equal(bits(x), bits(right))
    assert report.status.name == "CORRECTED"
    never_wrong(C)


@pytest.mark.parametrize("site", ["A", "B"])
def test_a_persistent_fault_of_an_operand_stays_and_is_noticed(site: str) -> None:
    operands = pair(40, 50, 30)
    C, report, _ = product(Plan("bit_flip", site, BIG, persistent=True), operands=operands)
    changed = [(bits(x) != bits(right)).sum() for x, right in zip(operands, pair(40, 50, 30), strict=True)]
    assert changed == ([1, 0] if site == "A" else [0, 1])
    assert C is None
    assert report.status.name == "INPUT_CHANGED"


@pytest.mark.parametrize("site", ["A.stored", "B.stored"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_encoded_operand_that_changes_is_repaired_before_it_is_used(site: str, persistent: bool) -> None:
    A, B = pair(40, 50, 30)
    encoded = (encode(A.copy()), B) if site[0] == "A" else (A, encode(B.copy()))
    C, report, look = product(Plan("bit_flip", site, BIG, persistent=persistent), operands=encoded)
    assert look.changes[0][:2] == ("inputs", site[0])
    assert report.status.name == "CORRECTED"
    never_wrong(C)


@pytest.mark.parametrize("site", ["product", "partial"])
def test_a_transient_fault_of_the_product_is_repaired(site: str) -> None:
    C, report, look = product(Plan("bit_flip", site, BIG, seed=(4,)))
    assert report.status.name == "CORRECTED"
    assert len(look.injector.planted) == 1
    never_wrong(C)


@pytest.mark.parametrize("check", ["rows", "columns", "both"])
def test_a_persistent_fault_of_the_product_comes_back_and_is_refused(check: str) -> None:
    for seed in range(8):
        C, report, look = product(Plan("bit_flip", bits=BIG, persistent=True, seed=(seed,)), check=check)
        stages = [one.stage for one in look.injector.planted]
        assert stages[:2] == ["multiplied", "corrected"]
        assert len({(i, j) for _, _, change in look.changes for i, j in np.argwhere(change)}) == 1  # the same place
        assert C is None
        assert report.status.name == "UNCORRECTABLE"


def test_a_second_visit_is_not_hit_unless_the_fault_persists() -> None:
    once, again = Injector(Plan("nan", visit=1)), Injector(Plan("nan", visit=1, persistent=True))
    for injector, expected in ((once, [1]), (again, [1, 2, 3])):
        hit = []
        for visit in range(4):
            C = np.zeros((3, 3))
            injector("multiplied", {"C": C})
            if np.isnan(C).any():
                hit.append(visit)
        assert hit == expected


def test_several_faults_at_once_are_all_planted() -> None:
    plans = (Plan("nan", seed=(1,)), Plan("inf", seed=(2,)), Plan("bit_flip", "u", BIG), Plan("offset", "t"))
    C, _, look = product(*plans)
    assert {id(one.plan) for one in look.injector.planted} == set(map(id, plans))
    assert {change[:2] for change in look.changes} >= {("multiplied", "C"), ("verified", "u"), ("encoded", "t")}
    assert sum(change.sum() for stage, _, change in look.changes if stage == "multiplied") == 2
    never_wrong(C)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_faults_find_their_place_in_every_order(order: str, dtype: str) -> None:
    A, B = (arrange(x, order) for x in pair(40, 50, 30, np.dtype(dtype)))
    for site in ("product", "partial", "A", "B"):
        C, report, look = product(Plan("bit_flip", site, BIG), operands=(A, B))
        assert len(look.injector.planted) == 1
        never_wrong(C, (A, B))
        assert report.status.name in ("CORRECTED", "UNCORRECTABLE", "CLEAN")


# ---- a partial sum -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("seed", range(6))
def test_a_changed_partial_sum_is_what_the_element_is_computed_from(seed: int, dtype: str) -> None:
    A, B = pair(7, 12, 5, np.dtype(dtype))
    seen: dict[str, np.ndarray] = {}
    keep = at("multiplied", "C", lambda C: seen.update(before=C.copy()))
    after = at("multiplied", "C", lambda C: seen.update(after=C.copy()))
    injector = Injector(Plan("bit_flip", "partial", "sign", seed=(seed,)))
    with errstate(corrected="ignore"):
        protected_gemm(A, B, on_stage=both(keep, both(injector, after)))
    ((i, j),) = np.argwhere(seen["before"] != seen["after"])
    terms = A[i].astype(np.float64) * B[:, j].astype(np.float64)
    expected = terms.sum() - 2 * np.cumsum(terms)  # after 1, 2, ... terms the sum changed its sign
    error = abs(expected - float(seen["after"][i, j])).min()
    assert error <= 20 * np.finfo(dtype).eps * abs(terms).sum()


def test_a_partial_sum_that_is_lost_leaves_what_is_added_later() -> None:
    A, B = np.ones((4, 9)), np.ones((9, 3))
    left = set()
    for seed in range(60):
        with inject(Plan("scaled", "partial", factor=0.0, seed=(seed,)), target=np.matmul) as multiply:
            left.add(float(multiply(A, B).min()))
    assert left == set(map(float, range(9)))  # all lengths from one term to all nine


def test_sums_of_no_terms_can_be_hit() -> None:
    with inject(Plan("nan", "partial"), target=np.matmul) as multiply:
        assert np.isnan(multiply(np.ones((3, 0)), np.ones((0, 2)))).sum() == 1


# ---- inject --------------------------------------------------------------------------------------------------------


def test_an_injector_is_given_where_there_is_no_target() -> None:
    A, B = pair(40, 50, 30)
    with inject(Plan("bit_flip", bits=BIG)) as hook:
        C, report = protected_gemm(A, B, on_stage=hook, return_report=True)
    assert isinstance(hook, Injector)
    assert report.status.name == "CORRECTED"
    never_wrong(C)


def test_an_experiment_without_its_fault_is_an_error() -> None:
    A, B = pair(4, 5, 3)
    plans = Plan("nan", seed=(9,)), Plan("nan", "repaired", visit=7)
    message = r"'repaired'.* was never planted: stages reached are inputs 1 times"
    with pytest.raises(RuntimeError, match=message), inject(*plans) as hook:
        protected_gemm(A, B, on_stage=hook)
    with pytest.raises(RuntimeError, match="never planted: stages reached are none"), inject(Plan("nan")):
        pass
    with pytest.raises(RuntimeError, match="never planted"), inject(Plan("nan", visit=2), target=np.matmul) as multiply:
        multiply(A, B)


def test_an_error_in_the_block_is_not_covered_up() -> None:
    with pytest.raises(KeyError, match="mine"), inject(Plan("nan")):
        raise KeyError("mine")


def twice(multiply: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Dual modular redundancy: compute twice, compare every bit."""

    def compared(A: np.ndarray, B: np.ndarray) -> np.ndarray:
        first, second = multiply(A, B), multiply(A, B)
        if not np.array_equal(bits(first), bits(second)):
            raise ArithmeticError("the two products differ")
        return first

    return compared


@pytest.mark.parametrize("site", FUNCTION_SITES)
def test_computing_twice_finds_what_passes_and_misses_what_stays(site: str) -> None:
    A, B = pair(10, 12, 8)
    with inject(Plan("bit_flip", site, BIG), target=np.matmul) as multiply, pytest.raises(ArithmeticError):
        twice(multiply)(A, B)
    with inject(Plan("bit_flip", site, BIG, persistent=True), target=np.matmul) as multiply:
        C = twice(multiply)(A, B)
    assert elements_outside(C, A, B).any()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("site", FUNCTION_SITES)
@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_the_callers_operands_stay_as_they_are(order: str, site: str, persistent: bool) -> None:
    A, B = (arrange(x, order) for x in pair(6, 7, 5))
    kept = bits(A).copy(), bits(B).copy()
    given = []

    def multiply(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        given.append((bits(x) != kept[0]).sum() + (bits(y) != kept[1]).sum())
        assert np.sign(x.strides).tolist() == np.sign(A.strides).tolist()
        assert (abs(x.strides[0]) < abs(x.strides[1])) == (abs(A.strides[0]) < abs(A.strides[1]))
        return np.matmul(x, y)

    plan = Plan("bit_flip", site, BIG, persistent=persistent)
    with inject(plan, target=multiply) as faulty:
        results = [faulty(A, B) for _ in range(3)]
    wrong = [bool(elements_outside(C, A, B).any()) for C in results]
    assert wrong == [True, persistent, persistent]
    assert given == [int(hit and site not in ("product", "partial")) for hit in wrong]
    np.testing.assert_array_equal(bits(A), kept[0])
    np.testing.assert_array_equal(bits(B), kept[1])


def test_results_that_cannot_be_written_to_are_copied() -> None:
    fixed = np.ones((3, 4))
    fixed.flags.writeable = False
    with inject(Plan("nan"), target=lambda A, B: fixed) as multiply:
        assert np.isnan(multiply(np.ones(3), np.ones(4))).sum() == 1
    assert (fixed == 1).all()


@pytest.mark.parametrize(
    "result",
    [lambda A, B: A, lambda A, B: B, lambda A, B: A.T, lambda A, B: A[1:, ::-1]],
    ids=["A", "B", "A.T", "part"],
)
def test_a_function_that_returns_its_argument_does_not_hand_the_fault_back_through_it(result: Any) -> None:
    A, B = np.ones((3, 4)), np.ones((4, 5))
    with inject(Plan("nan"), target=result) as multiply:
        assert np.isnan(multiply(A, B)).sum() == 1
    assert (A == 1).all()
    assert (B == 1).all()


def test_keywords_and_the_name_are_handed_on() -> None:
    def scaled(A: np.ndarray, B: np.ndarray, *, by: float = 1.0) -> np.ndarray:
        """A product and a factor."""
        return by * (A @ B)

    with inject(Plan("bit_flip", bits="0"), target=scaled) as multiply:
        C = multiply(np.eye(3), np.eye(3), by=3.0)
    assert (multiply.__name__, multiply.__doc__) == ("scaled", "A product and a factor.")
    assert len(multiply.injector.planted) == 1
    np.testing.assert_allclose(C, 3 * np.eye(3), atol=1e-300)


@pytest.mark.parametrize("site", OWN)
def test_sites_that_a_function_does_not_have_are_refused(site: str) -> None:
    model = sorted(SITES[site].models)[0]
    inside = pytest.raises(ValueError, match="is inside of a protected operation")
    with inside, inject(Plan(model, site), target=np.matmul):
        pass


# ---- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("site", ["product", "partial", "A", "B", "s", "t", "u"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_product_on_a_gpu_with_a_fault_is_right_or_refused(cp: Any, site: str, persistent: bool) -> None:
    A, B = pair(130, 257, 70, np.float32)
    injector = Injector(Plan("bit_flip", site, BIG, persistent=persistent))
    with errstate(corrected="ignore", checksum_fault="ignore"):
        try:
            C = protected_gemm(cp.asarray(A), cp.asarray(B), on_stage=injector)
        except SilentDataCorruptionError:
            C = None
    assert injector.planted
    never_wrong(None if C is None else cp.asnumpy(C), (A, B))


@pytest.mark.gpu
@pytest.mark.parametrize("site", FUNCTION_SITES)
def test_a_function_on_a_gpu_is_hit_once(cp: Any, site: str) -> None:
    A, B = pair(40, 50, 30)
    there = cp.asarray(A), cp.asarray(B)
    with inject(Plan("bit_flip", site, BIG), target=cp.matmul) as multiply:
        wrong = [bool(elements_outside(cp.asnumpy(multiply(*there)), A, B).any()) for _ in range(2)]
    assert wrong == [True, False]
    for x, kept in zip(there, (A, B), strict=True):
        np.testing.assert_array_equal(cp.asnumpy(x), kept)
