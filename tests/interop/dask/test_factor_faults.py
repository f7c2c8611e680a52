"""Factorisations and solutions of Dask arrays, with faults in each kind of task, between tasks, and on a cluster."""

import time

import dask
import numpy as np
import pytest
import scipy.linalg

import abft_tsm2 as ft
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.errors import SilentDataCorruptionError, UnverifiableWarning
from abft_tsm2.interop.dask import cholesky, exchange, panel, tiles
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.report import Status
from benchmarks.dask_planting import SINGLE, SQUARE, arrivals, damaged, on_arrival
from tests.support.dask_factors import CALLS, blocks_of, factored, same
from tests.support.factor_cases import lu_outside
from tests.support.planting import normal


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


# ---- faults in what is computed -----------------------------------------------------------------------------------


def planting(stage, task, name, change):
    """A hook that changes an array once, at a stage of a task of this kind."""
    done = []

    def hook(reached, arrays):
        if reached == stage and arrays["task"][0] == task and not done and arrays[name].size:
            done.append(arrays["task"])
            change(arrays[name])

    hook.done = done
    return hook


def wrong(x):
    x[0, 0] += 1 + abs(x[0, 0])


@pytest.mark.parametrize(
    ("call", "stage", "task", "name"),
    [
        ("one", "factored", "panel", "W"),
        ("one", "multiplied", "product", "C"),
        ("one", "forward", "solved", "X"),
        ("one", "moved", "panel", "X"),
        ("one", "moved", "right-up", "X"),
        ("one", "moved", "right-down", "X"),
        ("one", "moved", "solved", "X"),
        ("one", "moved", "product", "X"),
        ("one", "moved", "left-up", "X"),
        ("one", "moved", "left-down", "X"),
        ("one", "moved", "left-above", "X"),
        ("one", "moved", "left-below", "X"),
        ("tournament", "factored", "contender", "W"),
        ("tournament", "factored", "winner", "W"),
        ("tournament", "factored", "champion", "W"),
        ("tournament", "moved", "contender", "X"),
        ("tournament", "moved", "winner", "X"),
        ("tournament", "moved", "champion", "X"),
        ("tournament", "moved", "factor", "X"),
        ("tournament", "forward", "factor", "X"),
        ("tall", "moved", "factor", "X"),
        ("lu_solve", "forward", "forward", "X"),
        ("lu_solve", "backward", "backward", "X"),
        ("lu_solve", "multiplied", "forward-product", "C"),
        ("lu_solve", "multiplied", "backward-product", "C"),
        ("lu_solve", "moved", "b-above", "X"),
        ("transposed", "forward", "forward", "X"),
        ("transposed", "moved", "x-below", "X"),
        ("solve", "multiplied", "residual", "C"),
        ("solve", "multiplied", "upper-reach", "C"),
        ("solve", "multiplied", "lower-reach", "C"),
        ("solve", "moved", "reach-above", "X"),
        ("cholesky", "panel", "factored", "W"),
        ("cholesky", "forward", "solved", "X"),
        ("cholesky", "multiplied", "product", "C"),
    ],
)
def test_a_fault_in_a_task_is_repaired_there(call, stage, task, name, right):
    hook = planting(stage, task, name, wrong)
    with ft.monitor() as log:
        result, report = dask.compute(*CALLS[call](return_report=True, on_stage=hook))
    assert len(hook.done) == 1
    expected, clean = right[call]
    if stage in ("factored", "panel", "multiplied"):  # repaired by steps or in more digits, which round otherwise
        for found, one in zip(*((x if isinstance(x, tuple) else (x,)) for x in (result, expected)), strict=True):
            np.testing.assert_allclose(found, one, rtol=0, atol=1e-11)
    else:
        assert same(result, expected)
    assert (report.status, log.counts[Status.CORRECTED]) == (Status.CORRECTED, 1)
    (hit,) = (one for one in report.products if one.status is not Status.CLEAN)
    assert hit.index == hook.done[0][1:]
    assert hit.faults[0].repair
    moving = stage == "moved" and task not in (
        "panel",
        "solved",
        "product",
        "contender",
        "winner",
        "champion",
        "factor",
    )
    assert len(report.products) == len(clean.products) + moving


@pytest.mark.parametrize(
    ("call", "task"),
    [
        ("one", "panel"),
        ("one", "right-up"),
        ("one", "product"),
        ("one", "left-above"),
        ("one", "left-below"),
        ("tournament", "winner"),
        ("lu_solve", "b-above"),
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_elements_that_change_places_in_rows_that_move(call, task, axis, right):
    def swap(X):
        at = (0, slice(None)) if axis else (slice(None), 0)
        X[at] = np.roll(X[at], 1)

    hook = planting("moved", task, "X", swap)
    result, report = dask.compute(*CALLS[call](return_report=True, on_stage=hook))
    assert len(hook.done) == 1
    assert same(result, right[call][0])
    assert report.status is Status.CORRECTED


@pytest.mark.parametrize("call", ["one", "tournament", "solve", "cholesky"])
def test_a_fault_is_only_detected(call, caplog):
    hook = planting("multiplied", "product", "C", wrong)
    _, report = dask.compute(*CALLS[call](return_report=True, on_stage=hook, on_error="detect"))
    assert report.status is Status.UNCORRECTABLE
    hook = planting("multiplied", "product", "C", wrong)
    with pytest.raises(SilentDataCorruptionError):
        dask.compute(CALLS[call](on_stage=hook, on_error="raise"))


def test_rows_that_moved_wrongly_are_only_detected():
    hook = planting("moved", "right-up", "X", wrong)
    _, report = dask.compute(*CALLS["one"](return_report=True, on_stage=hook, on_error="detect"))
    assert report.status is Status.UNCORRECTABLE
    assert {fault.kind for one in report.products for fault in one.faults} >= {"rows"}


def test_rows_that_are_moved_wrongly_again_and_again_are_refused():
    def hook(stage, arrays):
        if stage == "moved" and arrays["task"][0] == "right-up" and arrays["X"].size:
            wrong(arrays["X"])

    with pytest.raises(SilentDataCorruptionError) as raised:
        dask.compute(CALLS["one"](on_stage=hook))
    assert raised.value.report.faults[0].kind == "rows"


def once(function, change):
    """A function that gives something else the first time it is called."""
    done = []

    def changed(*arguments, **options):
        result = function(*arguments, **options)
        if not done:
            done.append(True)
            result = change(result)
        return result

    return changed


def test_factors_that_are_copied_wrongly(right, monkeypatch):
    def change(x):
        wrong(x)
        return x

    monkeypatch.setattr(panel, "_by_rows", once(panel._by_rows, change))
    result, report = dask.compute(*CALLS["one"](return_report=True))
    assert same(result, right["one"][0])
    assert report.status is Status.CORRECTED
    assert "factored again" in str(report)


def test_factors_that_change_after_their_check(right, monkeypatch):
    def change(run):
        wrong(run.W)
        return run

    monkeypatch.setattr(panel, "factored", once(panel.factored, change))
    result, report = dask.compute(*CALLS["one"](return_report=True))
    assert same(result, right["one"][0])
    assert report.status is Status.CORRECTED


@pytest.mark.parametrize(
    ("name", "call"), [("product_here", "one"), ("substitution", "lu_solve"), ("substitution", "one")]
)
def test_what_changes_between_its_check_and_its_sums(name, call, right, monkeypatch):
    def change(x):
        wrong(x.X if name == "substitution" else x)
        return x

    monkeypatch.setattr(tiles, name, once(getattr(tiles, name), change))
    with ft.monitor() as log:
        result, _ = dask.compute(*CALLS[call](return_report=True))
    assert same(result, right[call][0])
    assert log.counts[Status.CORRECTED] == 1


def test_a_factor_that_changes_behind_its_last_check(monkeypatch, right):
    made = cholesky.factored_here

    def changed(*arguments, **options):
        L = made(*arguments, **options)
        wrong(L)
        return L

    monkeypatch.setattr(cholesky, "factored_here", changed)
    L, report = dask.compute(*CALLS["cholesky"](return_report=True))
    assert same(L, right["cholesky"][0])
    assert report.status is Status.CORRECTED


# ---- faults between tasks -----------------------------------------------------------------------------------------


def hit(result, pattern):
    """The result of a task, whose block, or one of its blocks, is not what it was made of."""
    block = result
    if isinstance(result, panel.Panel):
        block = result.blocks[-1]
    elif isinstance(result, panel.Contender):
        block = result.rows
    if not isinstance(block, Block) or block.array.size == 0 or (pattern == SQUARE and min(block.array.shape) < 2):
        return False
    block.array = damaged(block.array, pattern)
    return True


def corrupting(monkeypatch, kind, change):
    """Have the result of one task of a kind changed: the first that `change` says it has changed."""
    add, done = tiles.TileTasks.add, []

    def planted(self, task, name, at, *arguments):
        def changed(*given):
            result = task(*given)
            if not done and change(result):
                done.append(at)
            return result

        return add(self, changed if name == kind else task, name, at, *arguments)

    monkeypatch.setattr(tiles.TileTasks, "add", planted)
    return done


BETWEEN = [
    *(("one", kind) for kind in ("panel", "factor", "pivots", "right-up", "right-down", "solved", "product")),
    *(("one", kind) for kind in ("left-up", "left-down", "left-above", "left-below")),
    *(("tournament", kind) for kind in ("contender", "winner", "champion", "packed", "panel-down", "factor")),
    *(("lu_solve", kind) for kind in ("b-up", "b-down", "b-above", "b-below", "forward", "forward-product")),
    *(("transposed", kind) for kind in ("x-above", "backward", "backward-product")),
    *(("solve", kind) for kind in ("residual", "upper-reach", "lower-reach", "reach-above", "accepted")),
    *(("cholesky", kind) for kind in ("factored", "solved", "product")),
]


@pytest.mark.parametrize(("call", "kind"), BETWEEN)
def test_a_block_that_changed_between_two_tasks_is_restored(call, kind, right, monkeypatch):
    done = corrupting(monkeypatch, kind, lambda result: hit(result, SINGLE))
    with ft.monitor() as log:
        result, report = dask.compute(*CALLS[call](return_report=True))
    assert len(done) == 1
    assert same(result, right[call][0])
    assert log.counts[Status.CORRECTED] >= 1
    (found,) = (one for one in log if one.status is Status.CORRECTED)
    assert "restored bit for bit" in found.faults[0].repair
    assert report.status is Status.CORRECTED


@pytest.mark.parametrize("kind", ["panel", "right-up", "right-down", "solved", "product", "left-up", "left-below"])
def test_sums_that_changed_between_two_tasks_are_taken_again(kind, right, monkeypatch):
    def change(result):
        block = result.blocks[-1] if isinstance(result, panel.Panel) else result
        if block.array.size == 0:
            return False
        block.words = WordSums.of(block.array)  # its own
        block.words.rows[-1] ^= np.uint64(1 << 40)
        return True

    done = corrupting(monkeypatch, kind, change)
    with ft.monitor() as log:
        result = dask.compute(*CALLS["one"]())
    assert len(done) == 1
    assert same(result, right["one"][0])
    assert log.counts[Status.CHECKSUM_FAULT] == 1


@pytest.mark.parametrize(("call", "kind"), [("one", "product"), ("one", "panel"), ("lu_solve", "forward-product")])
def test_a_block_that_is_lost_is_refused(call, kind, monkeypatch):
    done = corrupting(monkeypatch, kind, lambda result: hit(result, SQUARE))
    with pytest.raises(SilentDataCorruptionError) as raised:
        dask.compute(CALLS[call]())
    assert len(done) == 1
    found = raised.value.report
    assert Status.INPUT_CHANGED in (found.status, *found.also)


def test_a_lost_block_that_cannot_be_factored_is_told_as_any_other(monkeypatch):
    def change(block):
        block.array = block.array.copy()
        block.array[:2, :2] = [[-1e6, 2e6], [2e6, -3e6]]
        return True

    done = corrupting(monkeypatch, "product", change)
    with ft.monitor() as log, pytest.raises(SilentDataCorruptionError, match="INPUT_CHANGED"):
        dask.compute(CALLS["cholesky"]())
    assert len(done) == 1
    assert log.counts[Status.INPUT_CHANGED] == 1


def test_pivots_that_name_no_row_are_restored(right, monkeypatch):
    def change(piv):
        piv.array = piv.array.copy()
        piv.array[0, 1] += 1 << 20
        return True

    corrupting(monkeypatch, "pivots", change)
    with ft.monitor() as log:
        result = dask.compute(*CALLS["one"]())
    assert same(result, right["one"][0])
    assert log.counts[Status.CORRECTED] == 1


@pytest.mark.parametrize("part", [slice(None), slice(40, None)])
@pytest.mark.parametrize("kind", ["backward", "solved", "product"])
def test_a_wrong_solution_fails_the_check_of_its_residual(kind, part, monkeypatch):
    def change(block):  # and sums of its own, which say that it is right
        array = block.array.copy()
        array[1, 1] += 1e-6 * abs(array).max()
        block.array, block.words = array, Block.of(array).words
        return True

    corrupting(monkeypatch, kind, change)
    with pytest.raises(SilentDataCorruptionError, match="a x = b fails its check"):
        CALLS["solve"]()[part].compute()


def test_a_solution_whose_residual_overflows_is_not_called_right():
    a, x, b = np.triu(np.full((2, 2), 1e308)), np.array([1.0, -1.0]), np.array([0.0, -1e308])
    with pytest.warns(UnverifiableWarning):
        found, report = dask.compute(*ft.protected_solve(blocks_of(a, 1), b, return_report=True))
    assert report.status is Status.UNVERIFIABLE
    np.testing.assert_allclose(found, x, rtol=1e-15)


# ---- exchanges ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_exchanges_are_those_of_lapack(seed, back):
    rng = np.random.default_rng(seed)
    sizes, first = [5, 5, 5, 3], 5
    n, k = sum(sizes), int(rng.integers(1, 6))
    piv = np.array([rng.integers(first + i, n) for i in range(k)], np.int32)[None, :]
    x = rng.standard_normal((n, 4))
    expected = x.copy()
    steps = list(enumerate(piv[0], first))
    for place, other in reversed(steps) if back else steps:
        expected[[place, other]] = expected[[other, place]]
    moves, lows = exchange.Exchange(first, 5, back), tiles.starts(sizes)
    options = tiles.GraphOptions("test", "lu_factor")
    column = {i: Block.of(x[low : low + size]) for i, (low, size) in enumerate(zip(lows, sizes, strict=True)) if i}
    pivots = Block.of(piv)
    ups = [exchange.rows_up(options, ("up", i), moves, lows[i], column[i], pivots) for i in (2, 3)]
    down = exchange.rows_down(options, ("down",), moves, column[1], pivots)
    assert sum(len(piece.array) for piece in ups) == len(down.array) <= k
    above = exchange.exchanged_above(options, ("above",), moves, lows[2:], column[1], ups, pivots)
    below = [exchange.exchanged_below(options, ("b", i), moves, lows[i], column[i], down, pivots) for i in (2, 3)]
    found = np.concatenate([x[:5], above.array, *(block.array for block in below)])
    np.testing.assert_array_equal(found, expected)


def test_exchanges_that_bring_rows_to_their_places():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = 4 + rng.permutation(12)[:5]
        piv = panel._exchanges(rows.tolist(), 4)
        found = np.arange(16)
        for place, other in enumerate(piv, 4):
            assert other >= place
            found[[place, other]] = found[[other, place]]
        np.testing.assert_array_equal(found[4:9], rows)


# ---- on a cluster -------------------------------------------------------------------------------------------------

on_cluster = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:Sending large graph")


@on_cluster
@pytest.mark.parametrize(("name", "pattern"), [("tournament", SQUARE), ("solve", SQUARE), ("cholesky", SINGLE)])
def test_blocks_damaged_on_the_wire(name, pattern, right, client):
    client.run(on_arrival, pattern, 3, 3)
    try:
        with dask.config.set(scheduler=client), ft.monitor() as log:
            result, report = dask.compute(*CALLS[name](return_report=True))
    finally:
        planted = sum(client.run(arrivals).values())
    assert planted > 0
    assert same(result, right[name][0])
    assert log.counts[Status.CORRECTED] >= 1
    assert all(fault.repair for report in log for fault in report.faults)  # by the worker that found it, at once
    assert len(report.products) >= len(right[name][1].products)
    assert set(report.by_worker()) <= set(client.scheduler_info()["workers"])


@on_cluster
def test_the_client_is_warned_of_a_zero_pivot(client):
    a = normal(48, 48)
    a[:, 20] = a[:, 40] = 0

    def computed():
        lu, piv, _ = factored(a, 16)
        for _ in range(30):  # the warning takes a way of its own
            client.run(int)
            time.sleep(0.01)
        return lu, piv

    with dask.config.set(scheduler=client), pytest.warns(scipy.linalg.LinAlgWarning, match="Diagonal number 21"):
        lu, piv = computed()
    assert not lu_outside(lu, piv, a).any()
