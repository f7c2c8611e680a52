"""Faults are planted on the route that calls without a hook take, and change nothing else."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from abft_tsm2 import Report, SilentDataCorruptionError, encode, errstate, protected_gemm, verify_gemm
from abft_tsm2.core import faultpoint
from abft_tsm2.faults import Injector, Plan, inject
from abft_tsm2.gemm import host, small, stack
from tests.support.oracles import elements_outside
from tests.support.planting import bits, normal, pair

BIG = "exponent_high"
INSIDE = ("product", "partial", "A", "B")
SUMS = ("t", "u")
Operands = Callable[[], tuple[Any, Any]]

SMALL: Operands = lambda: pair(40, 50, 30)  # noqa: E731
LARGE: Operands = lambda: pair(8200, 3, 5)  # noqa: E731
BATCH: Operands = lambda: (normal(6, 20, 16), normal(16, 24, seed=1))  # noqa: E731
WIDE_BATCH: Operands = lambda: (normal(3, 150, 120), normal(3, 120, 140, seed=1))  # noqa: E731
ENCODED: Operands = lambda: (pair(40, 50, 30)[0], encode(pair(40, 50, 30)[1], repair=True))  # noqa: E731
HALVES: Operands = lambda: pair(40, 50, 30, np.float16)  # noqa: E731
ROUTES = {
    "small": (SMALL, {}),
    "both sides": (SMALL, {"check": "both"}),
    "out": (SMALL, {"out": True}),
    "encoded": (ENCODED, {}),
    "halves": (HALVES, {}),
    "wide": (HALVES, {"verify": "float32"}),
    "full": (LARGE, {}),
    "scaled": (SMALL, {"alpha": 2.0}),
    "stack": (BATCH, {}),
    "stack, both sides": (BATCH, {"check": "both"}),
    "batch": (WIDE_BATCH, {}),
}


@contextmanager
def procedures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The procedures that products begin with in the block."""
    begun: list[str] = []

    def noting(owner: Any, method: str, name: str) -> None:
        honest = getattr(owner, method)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            begun.append(name)
            return honest(self, *arguments, **options)

        monkeypatch.setattr(owner, method, noted)

    with monkeypatch.context():
        noting(small.SmallForm, "product", "small")
        noting(stack.Stack, "outcome", "stack")
        noting(host.Product, "report", "full")
        yield begun


def call(route: str, *plans: Plan) -> tuple[np.ndarray, Report, Injector]:
    """A product on a route, with faults; operands of its own."""
    operands, options = ROUTES[route]
    A, B = operands()
    if "out" in options:
        options = {"out": np.empty((A.shape[0], B.shape[1]))}
    quiet = errstate(corrected="ignore", checksum_fault="ignore")
    with quiet, np.errstate(all="ignore"), inject(*plans) as injector:  # of a product with a fault in it
        C, report = protected_gemm(A, B, return_report=True, **options)
    return C, report, injector


def plain(x: Any) -> np.ndarray:
    return getattr(x, "array", x)


def never_wrong(route: str, C: np.ndarray) -> None:
    operands, options = ROUTES[route]
    A, B = map(plain, operands())
    A, B = (np.broadcast_to(x, (*C.shape[:-2], *x.shape[-2:])) for x in (A, B))
    for index in np.ndindex(*C.shape[:-2]):
        assert not elements_outside(C[index], A[index], B[index], alpha=options.get("alpha", 1.0)).any()


@pytest.mark.parametrize("route", ROUTES)
def test_without_a_fault_the_route_and_every_bit_are_those_of_a_call_alone(
    route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands, options = ROUTES[route]
    options = {name: value for name, value in options.items() if name != "out"}
    with procedures(monkeypatch) as begun:
        expected, alone = protected_gemm(*operands(), return_report=True, **options)
        usual = list(begun)
        C, report, injector = call(route)
    assert begun == 2 * usual
    assert injector.visits["multiplied"] == max(1, len(report.products))
    np.testing.assert_array_equal(bits(C), bits(expected))
    assert (report.status, report.checks, report.suspicions) == (alone.status, alone.checks, alone.suspicions)


@pytest.mark.parametrize("site", INSIDE)
@pytest.mark.parametrize("route", ROUTES)
def test_a_transient_fault_is_planted_on_the_same_route_and_repaired(
    route: str, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with procedures(monkeypatch) as begun:
        call(route)
        usual = list(begun)
        C, report, injector = call(route, Plan("bit_flip", site, BIG, seed=(2,)))
    assert begun[len(usual) :] == usual
    assert len(injector.planted) == 1
    assert report.status.name == "CORRECTED"
    never_wrong(route, C)


@pytest.mark.parametrize("site", SUMS)
@pytest.mark.parametrize("route", ROUTES)
def test_a_checksum_that_is_hit_is_no_fault_of_the_product(route: str, site: str) -> None:
    expected, _, _ = call(route)
    C, report, injector = call(route, Plan("bit_flip", site, BIG, seed=(2,), persistent=True))
    assert injector.planted
    assert report.status.name == "CHECKSUM_FAULT"
    np.testing.assert_array_equal(bits(C), bits(expected))


@pytest.mark.parametrize("route", ROUTES)
def test_a_fault_that_comes_back_is_refused(route: str) -> None:
    with pytest.raises(SilentDataCorruptionError) as caught:
        call(route, Plan("bit_flip", bits=BIG, persistent=True))
    assert caught.value.report.status.name == "UNCORRECTABLE"


@pytest.mark.parametrize("site", ["A", "B"])
@pytest.mark.parametrize("route", ["small", "full", "stack"])
def test_an_operand_that_stays_changed_is_named(route: str, site: str) -> None:
    with pytest.raises(SilentDataCorruptionError) as caught:
        call(route, Plan("bit_flip", site, BIG, persistent=True))
    assert caught.value.report.status.name == "INPUT_CHANGED"
    assert {fault.operand for one in (caught.value.report, *caught.value.report.products) for fault in one.faults} == {
        site
    }


@pytest.mark.parametrize("site", ["B", "B.stored"])
def test_an_encoded_operand_of_a_small_product_is_restored(site: str) -> None:
    C, report, injector = call("encoded", Plan("bit_flip", site, BIG, persistent=True))
    assert injector.planted
    assert report.status.name == "CORRECTED"
    never_wrong("encoded", C)


@pytest.mark.parametrize("route", ["stack", "stack, both sides", "batch"])
@pytest.mark.parametrize("site", ["product", "partial"])
def test_a_visit_is_a_product_of_the_batch(route: str, site: str) -> None:
    C, report, _ = call(route, Plan("bit_flip", site, BIG, visit=2))
    assert [one.index for one in report.products if one.status.name != "CLEAN"] == [(2,)]
    never_wrong(route, C)


@pytest.mark.parametrize("model", ["", "nan", "random_value"])
def test_a_second_product_is_a_site_of_its_own(model: str) -> None:
    """Beyond the bound, and within what roundings might do: the product is computed again."""
    A, B = pair(512, 512, 512)
    limit = protected_gemm(A, B, return_report=True)[1].checks[0].detection_limit
    stages: list[str] = []
    beside = Injector(*([Plan(model, "repeated")] if model else []))

    def planter(stage: str, arrays: Any) -> None:
        stages.append(stage)
        beside(stage, arrays)
        if stage == "multiplied":
            arrays["C"][3, 5] += 2 * limit

    with errstate(corrected="ignore"), faultpoint.planting(planter):
        C, report = protected_gemm(A, B, return_report=True)
    assert (stages.count("multiplied"), stages.count("repeated")) == (1, 1)
    assert beside.missing() == []
    assert report.status.name == "CORRECTED"
    assert abs(C[3, 5] - (A @ B)[3, 5]) < limit


def test_products_of_the_block_are_counted() -> None:
    A, B = SMALL()
    with errstate(corrected="ignore"), inject(Plan("nan", visit=2)) as injector:
        found = [protected_gemm(A, B, return_report=True)[1].status.name for _ in range(4)]
        verify_gemm(A, B, A @ B)  # computes no product
    assert found == ["CLEAN", "CLEAN", "CORRECTED", "CLEAN"]
    assert injector.visits["multiplied"] == 4
    assert faultpoint.current() is None


def test_a_hook_takes_the_place_of_the_plan() -> None:
    A, B = SMALL()
    with errstate(corrected="ignore"), inject(Plan("nan")) as injector:
        C, report = protected_gemm(A, B, on_stage=injector, return_report=True)
    assert (len(injector.planted), injector.visits["multiplied"], report.status.name) == (1, 1, "CORRECTED")
    never_wrong("small", C)


def test_a_plan_in_force_stays_in_its_process() -> None:
    with pytest.raises(TypeError, match="is not sent to another"):
        pickle.dumps(Injector(Plan("nan")))


def test_another_thread_is_not_hit() -> None:
    A, B = SMALL()
    found: list[str] = []
    with errstate(corrected="ignore"), inject(Plan("nan")):
        other = threading.Thread(target=lambda: found.append(protected_gemm(A, B, return_report=True)[1].status.name))
        other.start()
        other.join()
        found.append(protected_gemm(A, B, return_report=True)[1].status.name)
    assert found == ["CLEAN", "CORRECTED"]


def test_threads_that_share_a_plan_have_operands_of_their_own() -> None:
    """What one thread's product takes back is not what another's has just been changed by."""
    injector, done = Injector(Plan("scaled", "A", factor=1e6, persistent=False, visit=0)), []

    def products(seed: int) -> None:
        A, B = pair(24, 20, 16, seed=seed)
        kept = A.copy()
        with errstate(corrected="ignore"), faultpoint.planting(injector):
            for _ in range(20):
                C = protected_gemm(A, B)
                done.append(np.array_equal(A, kept) and not elements_outside(C, kept, B).any())

    threads = [threading.Thread(target=products, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert done == [True] * 80
    assert len(injector.planted) == 1
    assert injector.visits["multiplied"] == 80
