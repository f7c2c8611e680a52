"""Sites of factorisations: a fault changes its place in the live arrays, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import bit_pattern
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.sites import FACTOR_SITES
from abft_tsm2.faults.trials.factor_calls import FactorProblem, Watch, at_visit
from tests.linalg.test_factor_faults import SCHEMES, N, workload

Arrays = dict[str, Any]
Mask = Callable[..., Any]


def copies(arrays: Mapping[str, Any]) -> Arrays:
    return {name: x if name == "step" else np.array(x, order="K") for name, x in arrays.items()}


GIVEN = ("b", "lu", "c")  # named at one stage, and changed at another


@pytest.fixture(scope="module")
def moments() -> dict[tuple[str, str], Arrays]:
    """The arrays of each stage of each operation; of the steps, the third one."""
    seen: dict[tuple[str, str], Arrays] = {}
    for operation, scheme in SCHEMES:
        watch, given = Watch(), dict[str, Any]()

        def hook(stage: str, arrays: Any, operation: str = operation, watch: Watch = watch, given: Any = given) -> None:
            watch(stage, arrays)
            given |= {name: arrays[name] for name in GIVEN if name in arrays}
            if watch.injector.visits[stage] <= 3:
                seen[operation, stage] = copies({**given, **arrays})

        FactorProblem.of(workload(operation)).call(scheme, hook)  # type: ignore[arg-type]
    return seen


def halves(mask: Mask) -> Mask:
    return lambda i, c, j, j1: mask(np.maximum(i, c), np.minimum(i, c), j, j1)


WHERE: Mapping[str, Mask] = {
    "lu.ahead": lambda i, c, j, j1: (i >= j) & (c >= j1),
    "lu.panel": lambda i, c, j, j1: (i >= j) & (c >= j) & (c < j1),
    "lu.swapped_left": lambda i, c, j, j1: (i >= j) & (c < j),
    "lu.swapped_right": lambda i, c, j, j1: (i >= j) & (c >= j1),
    "lu.solved": lambda i, c, j, j1: (i >= j) & (i < j1) & (c >= j1),
    "lu.trailing": lambda i, c, j, j1: (i >= j1) & (c >= j1),
    "lu.needed_A": lambda i, c, j, j1: (i >= j1) & (c >= j1),
    "lu.updated_L": lambda i, c, j, j1: (c < j1) & (i > c),
    "lu.updated_U": lambda i, c, j, j1: (i < j1) & (i <= c),
    "lu.finished_L": lambda i, c, j, j1: i > c,
    "lu.finished_U": lambda i, c, j, j1: i <= c,
    "lu.factored_L": lambda i, c, j, j1: i > c,
    "lu.factored_U": lambda i, c, j, j1: i <= c,
    "cholesky.panel": halves(lambda i, c, j, j1: (i >= j) & (c >= j) & (c < j1)),
    "cholesky.trailing": halves(lambda i, c, j, j1: (i >= j1) & (c >= j1)),
    "cholesky.updated_L": halves(lambda i, c, j, j1: c < j1),
}
"""Where in W a site may be changed; all of it, where none is named."""

VECTORS: Mapping[str, Mask] = {
    **{f"lu.updated_{x}": lambda i, j, j1: i >= j1 for x in "SZ"},
    **{f"lu.updated_{x}": lambda i, j, j1: i < j1 for x in ("g", "y", "pivots")},
    "lu.pivots": lambda i, j, j1: (i >= j) & (i < j1),
    "cholesky.updated_Z": lambda i, j, j1: i >= j1,
    "cholesky.updated_g": lambda i, j, j1: i < j1,
}
ARRAYS = {"pivots": "piv", "places": "perm", "forward": "z", "backward": "x"}


def array_of(site: str) -> str:
    """The array that a site is in."""
    last = site.rpartition(".")[2].rpartition("_")[2]
    return ARRAYS.get(last, last if last in (*"SZgyvwA", *GIVEN) else "W")


def planted(plan: Plan, arrays: Arrays) -> tuple[Arrays, dict[str, Any]]:
    """The arrays with a fault, and where each was changed."""
    after, stage = copies(arrays), FACTOR_SITES[plan.site].stage
    Injector(plan)(stage, after)
    changed = {name: bit_pattern(after[name]) != bit_pattern(x) for name, x in arrays.items() if name != "step"}
    return after, {name: where for name, where in changed.items() if where.any()}


@pytest.mark.parametrize("site", FACTOR_SITES)
def test_a_fault_changes_its_place_and_nothing_else(site: str, moments: Any) -> None:
    arrays = moments[site.partition(".")[0], FACTOR_SITES[site].stage]
    j, j1 = arrays.get("step", (0, N))
    allowed = {"A", "W"} if site == "lu.needed_A" else {array_of(site)}
    mirrored = site.startswith("cholesky") and array_of(site) == "W"
    for model in sorted(FACTOR_SITES[site].models):
        hits = 0
        for seed in range(12 if model in ("stuck_at_0", "stuck_at_1") else 2):
            plan = Plan(model, site, seed=(seed,))
            after, changed = planted(plan, arrays)
            hits += bool(changed)
            assert changed.keys() <= allowed
            if "W" in changed and site in WHERE:
                assert not (changed["W"] & ~WHERE[site](*np.indices((N, N)), j, j1)).any()
            elif changed and site in VECTORS:
                assert not (changed[array_of(site)] & ~VECTORS[site](np.arange(N), j, j1)).any()
            if model in ("nan", "inf", "scaled", "bit_flip", "wrong_index"):
                assert all(1 <= where.sum() <= 1 + mirrored for where in changed.values())
        assert hits, model
        again, _ = planted(plan, arrays)
        assert all((bit_pattern(again[name]) == bit_pattern(after[name])).all() for name in after if name != "step")


def test_both_halves_of_a_definite_matrix_are_changed(moments: Any) -> None:
    for site in ("cholesky.panel", "cholesky.trailing", "cholesky.updated_L"):
        arrays = moments["cholesky", FACTOR_SITES[site].stage]
        after, changed = planted(Plan("column", site), arrays)
        np.testing.assert_array_equal(changed["W"], changed["W"].T)
        i, c = changed["W"].nonzero()
        np.testing.assert_array_equal(after["W"][i, c], after["W"][c, i])


def test_every_element_of_a_triangle_may_be_hit(moments: Any) -> None:
    hit = np.zeros((N, N), bool)
    for seed in range(700):
        for name in "LU":
            plan = Plan("random_value", f"lu.finished_{name}", count=N * N, seed=(seed,))
            hit |= planted(plan, moments["lu", "finished"])[1]["W"]
    assert hit.all()


def test_steps_are_drawn_where_the_place_is() -> None:
    def drawn(site: str, visits: int, steps: int = 0) -> set[int]:
        return {at_visit(Plan("nan", site, seed=(seed,)), visits, steps).visit for seed in range(60)}

    assert drawn("lu.panel", 4) == {0, 1, 2, 3}
    assert drawn("lu.ahead", 4) == {0}
    assert drawn("lu.trailing", 4) == {0, 1, 2}
    assert drawn("lu.solved", 3, steps=4) == {0, 1, 2}  # nothing is right of the last step, which a GPU leaves out
    plan = Plan("not_exchanged", "lu.swapped_left")
    assert {at_visit(replace(plan, seed=(seed,)), 3).visit for seed in range(60)} == {1, 2}
    assert at_visit(replace(plan, visit=2), 9).visit == 2
    with pytest.raises(ValueError, match="choose a smaller block"):
        at_visit(Plan("nan", "lu.trailing"), 1)
