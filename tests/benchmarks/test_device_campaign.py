"""The campaigns for products on a GPU, on the CPU: NumPy stands in for CuPy, and wrong products for a wrong card."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import abft_tsm2
from abft_tsm2 import Report, Status
from abft_tsm2.arrays import FLOATS, bit_pattern
from abft_tsm2.report import Check
from benchmarks import device_campaign, device_clean, device_planted, device_runs, tables
from benchmarks.clean_products import normal_range
from benchmarks.device_clean import Clean, Group, alarm, groups, plan
from benchmarks.device_operands import MODES, TYPES, Base, Mode, Shape, kernels, modes, numbers
from benchmarks.device_planted import Campaign
from benchmarks.device_runs import MOST_FAILURES, Run
from tests.support import families

SMALL = (Shape(16, 16, 16, 8), Shape(33, 47, 25, 3), Shape(20, 12, 96), Shape(48, 40, 36, every=7))
PLANTED = (Shape(96, 80, 72), Shape(40, 64, 32, 6), Shape(30, 90, 150))
FAULTY = Mode("float32")


def running(seconds: float = math.inf, seed: int = 0) -> Run:
    return Run(np, seed, time.monotonic() + seconds)


def options(what: str, tmp_path: Path, *more: str) -> Any:
    return device_campaign.parser().parse_args([what, "--output", str(tmp_path / "found.csv"), *more])


def rows_of(tmp_path: Path) -> list[tables.Row]:
    return tables.read("", tmp_path / "found.csv")


# ---- operands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
def test_many_products_are_one_in_another_order(dtype: str) -> None:
    base = Base.draw("int", dtype, (7, 9, 5), np.random.default_rng(0))
    first = np.sort((base.A.view(TYPES[dtype]).astype(float) @ base.B.view(TYPES[dtype]).astype(float)).ravel())
    A, B = base.many(20, np.random.default_rng(1), "CF", scaled=0)
    assert A.dtype == B.dtype == TYPES[dtype]
    assert A.flags.c_contiguous
    assert B.swapaxes(-1, -2).flags.c_contiguous
    for a, b in zip(A.astype(float), B.astype(float), strict=True):
        np.testing.assert_array_equal(np.sort((a @ b).ravel()), first)
    kept = [bool((np.sort(abs(a), 0) == np.sort(abs(A[0]), 0)).all()) for a in A]
    assert 0 < sum(kept) < 20  # the inner order is another one in some of them
    assert len({a.tobytes() for a in A}) == len({b.tobytes() for b in B}) == 20


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_scaled_by_powers_of_two(dtype: str) -> None:
    base = Base.draw("int", dtype, (40, 3, 5), np.random.default_rng(0))
    base.A.view(TYPES[dtype])[...] = 3
    A, _ = base.many(1, np.random.default_rng(1), scaled=1)
    assert {float(x) for x in A.astype(float).ravel()} == {3.0, 1.5, 0.75, 0.375}
    assert bool(np.equal(A, A[:, :, :1]).all())


def test_the_same_seed_gives_the_same_products() -> None:
    base = Base.draw("normal", "float32", (4, 3, 5), np.random.default_rng(0))
    twice = [base.many(3, np.random.default_rng(2)) for _ in range(2)]
    assert all(bool((x == y).all()) for x, y in zip(*twice, strict=True))


def test_modes_and_their_kernels() -> None:
    assert [str(mode) for mode in MODES if mode not in modes(np)] == ["float32 TF32"]
    assert modes(SimpleNamespace()) == list(MODES)
    assert {str(mode): dict(mode.options) for mode in MODES if mode.options} == {
        "float16 float32": {"verify": "float32"},
        "bfloat16 float32": {"verify": "float32"},
        "float32 TF32": {"precision": "tf32"},
    }
    found = {one.name for one in kernels(MODES, device_clean.SHAPES, 132)}
    assert {"repair_bfloat16_float32_bfloat16_turned_128_2", "equilibrate_float64"} <= found


# ---- clean products: groups, plan, alarms -------------------------------------------------------------------------


def test_every_family_takes_part_in_every_shape() -> None:
    found = groups(MODES)
    assert len({str(group) for group in found}) == len(found)
    for shape in device_clean.SHAPES:
        members = [group for group in found if group.shape == shape]
        assert {group.mode for group in members} == set(MODES)
        if shape.every <= len(MODES):
            assert {group.family for group in members} == set(families.names())
        assert len(members) == pytest.approx(len(MODES) * len(families.names()) / shape.every, abs=2)


@pytest.mark.parametrize("rows", [1e3, 3e6, 8e7])
def test_a_plan_adds_up_and_shapes_share_alike(rows: float) -> None:
    planned = plan(groups(MODES), rows)
    of_shape: Counter[Shape] = Counter()
    for group, calls in planned.items():
        assert calls >= 1
        of_shape[group.shape] += calls * group.shape.rows
    assert set(of_shape) == set(device_clean.SHAPES)
    for shape, checked in of_shape.items():
        members = sum(group.shape == shape for group in planned)
        assert rows / len(of_shape) <= checked <= rows / len(of_shape) + members * shape.rows


def report_of(status: Status, *also: Status) -> Report:
    return Report(status, "gemm", 2, 2, 2, "float32", (Check("rows", 1, 2, 2, 1, 0.5, 0, 2),), also=also)


@pytest.mark.parametrize("status", Status)
def test_what_an_alarm_is(status: Status) -> None:
    quiet = {Status.CLEAN, Status.UNVERIFIABLE, Status.PENDING}
    assert alarm(report_of(status), normal=False) is (status not in quiet)
    assert alarm(report_of(status), normal=True) is (status not in quiet - {Status.UNVERIFIABLE})
    if status is not Status.PENDING:
        assert alarm(report_of(Status.UNVERIFIABLE, Status.CHECKSUM_FAULT), normal=False)


@np.errstate(invalid="ignore")
@pytest.mark.parametrize("dtype", TYPES)
def test_the_normal_range(dtype: str) -> None:
    limits = FLOATS[dtype]
    one = np.ones((2, 2)).astype(TYPES[dtype])
    assert normal_range([one, one, None, one], dtype, np)
    assert normal_range([one, 0 * one, 0 * one, one], dtype, np)
    for value in (limits.largest / 2, limits.smallest_normal / 2, np.inf, np.nan):
        odd = one.copy()
        odd[1, 0] = value
        for at in range(4):
            assert not normal_range([odd if i == at else one for i in range(4)], dtype, np)
    large = np.full((2, 2), limits.largest**0.5 / 2).astype(TYPES[dtype])
    assert not normal_range([large, large, None, one], dtype, np)  # the sum of the terms' magnitudes


def test_clean_products_raise_no_alarm() -> None:
    run, asked = running(), groups(modes(np), SMALL)
    campaign = Clean(run, asked)
    campaign.check(3e4)
    assert run.failures == []
    found = campaign.table()
    assert {(row["family"], row["dtype"], row["mode"]) for row in found} == {
        (group.family, group.mode.dtype, group.mode.variant) for group in asked
    }
    assert sum(row["rows"] for row in found) == campaign.rows >= 3e4
    assert tuple(found[0]) == device_clean.COLUMNS
    assert all(0 <= row["closest"] <= 1 and row["products"] > 0 for row in found)
    overflowing = [tally for group, tally in campaign.tallies.items() if group.family == "overflow"]
    assert any(tally.suspicions for tally in overflowing)
    assert all(tally.products <= 2 for tally in overflowing if tally.suspicions)  # of the first call alone


def test_all_variants_of_calls_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[str] = Counter()

    def watched(a: Any, b: Any, c: Any, **named: Any) -> Any:
        asked[named.get("check", "")] += 1
        asked["c is the product"] += c is not None and named["alpha"] == -named["beta"]
        asked["scaled"] += c is not None
        asked["columns contiguous"] += not a.flags.c_contiguous
        asked[f"{a.ndim} axes"] += 1
        return abft_tsm2.protected_gemm(a, b, c, **named)

    monkeypatch.setattr(device_clean, "protected_gemm", watched)
    run = running()
    Clean(run, [group for group in groups(modes(np), SMALL) if group.family == "normal"]).check(2e4)
    assert run.failures == []
    assert min(asked[key] for key in ("", "columns", "both", "c is the product", "scaled", "2 axes", "3 axes")) > 0
    assert asked["columns contiguous"] > 0


def wrong(change: Any, **extra: Any) -> Any:
    """A library that changes C in front of the check, and reports what it is told to."""

    def multiply(a: Any, b: Any, c: Any = None, **named: Any) -> Any:
        def hook(stage: str, arrays: Any) -> None:
            if stage == "multiplied":
                change(arrays["C"])

        C, report = abft_tsm2.protected_gemm(a, b, c, **named, on_stage=hook)
        return C, replace(report, **extra)

    return multiply


@pytest.mark.parametrize("status", [Status.CORRECTED, Status.UNVERIFIABLE])
def test_a_false_alarm_is_told_with_the_call_that_shows_it_again(
    status: Status, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def damage(C: Any) -> None:
        if status is Status.CORRECTED:
            C[0, 0] = 1e4

    extra = {} if status is Status.CORRECTED else {"status": status}
    monkeypatch.setattr(device_clean, "protected_gemm", wrong(damage, **extra))
    monkeypatch.setattr(device_clean, "SHAPES", SMALL)
    monkeypatch.setattr(device_clean, "groups", lambda modes: [Group("normal", FAULTY, SMALL[2])])
    run = running(seed=5)
    assert device_campaign.clean(run, options("clean", tmp_path), {"device": "none"}) == 1
    assert len(run.failures) == 1
    assert f"again: clean --seed 5 --only 'normal {FAULTY} {SMALL[2]}' --call 0" in capsys.readouterr().out
    (row,) = rows_of(tmp_path)
    assert (row["alarms"], row["products"], row["device"]) == ("1", "1", "none")


def test_one_call_is_shown_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(device_clean, "groups", lambda modes: [Group("normal", FAULTY, shape) for shape in SMALL])
    run = replace(running(), show=True)
    assert device_campaign.clean(run, options("clean", tmp_path, "--only", "20x12", "--call", "3"), {}) == 0
    text = capsys.readouterr().out
    assert "normal float32 one-sided 1 of 20x12x96 call 3 (" in text
    assert "checked: " in text
    assert len(rows_of(tmp_path)) == 1
    assert device_campaign.clean(run, options("clean", tmp_path, "--only", "no such"), {}) == 2
    assert "no group is named like no such" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["clean", "planted"])
def test_an_interrupt_keeps_what_is_counted(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = {"clean": device_clean, "planted": device_planted}[what]
    monkeypatch.setattr(device_clean, "groups", lambda modes: groups(modes, SMALL))
    monkeypatch.setattr(device_clean, "LONGEST_QUEUE", 4)
    monkeypatch.setattr(device_planted.Campaign, "__init__", _small_campaign)
    calls = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise KeyboardInterrupt
        return abft_tsm2.protected_gemm(*arguments, **named)

    monkeypatch.setattr(module, "protected_gemm", interrupted)
    carried_out = {"clean": device_campaign.clean, "planted": device_campaign.planted}[what]
    assert carried_out(running(), options(what, tmp_path), {}) == 130
    assert len(rows_of(tmp_path)) > 3


def _small_campaign(self: Campaign, run: Run, modes: Any) -> None:
    self.run, self.modes, self.shapes, self.counts = run, modes, PLANTED, {}


def test_time_and_failures_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = running(seconds=-1)
    campaign = Clean(run, groups(modes(np), SMALL))
    campaign.check(1e9)
    assert campaign.rows == 0
    lost: list[BaseException] = []
    monkeypatch.setattr(device_runs, "require_device", lost.append)
    run = Run(SimpleNamespace(), 0, math.inf)  # a card that cannot do anything
    planted = Campaign(run, MODES, PLANTED)
    planted.plant(1e5)
    assert planted.planted == 0
    assert run.over
    assert len(run.failures) == len(lost) == MOST_FAILURES
    assert "AttributeError" in run.failures[0]


# ---- planted faults, and the command line --------------------------------------------------------------------------


def test_a_broken_promise_is_told_with_the_scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    calls = 0

    def forgetful(a: Any, b: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return abft_tsm2.protected_gemm(a, b, **named, on_error="detect" if calls == 7 else "correct")

    monkeypatch.setattr(device_planted, "protected_gemm", forgetful)
    monkeypatch.setattr(device_planted.Campaign, "__init__", _small_campaign)
    run = running(seed=3)
    assert device_campaign.planted(run, options("planted", tmp_path, "--count", "300"), {"device": "none"}) == 1
    assert len(run.failures) == 1
    assert "again: planted --seed 3 --scene 0" in capsys.readouterr().out
    assert {row["device"] for row in rows_of(tmp_path)} == {"none"}
    run = replace(running(seed=3), show=True)
    monkeypatch.undo()
    monkeypatch.setattr(device_planted.Campaign, "__init__", _small_campaign)
    assert device_campaign.planted(run, options("planted", tmp_path, "--scene", "1"), {}) == 0
    assert "scene 1: " in capsys.readouterr().out


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for what in ("clean", "planted"):
        assert device_campaign.main([what]) == 2
        assert "nothing can be checked here: " in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        device_campaign.main(["--help"])
    assert "no false alarm in 8e7 rows" in capsys.readouterr().out


def test_bit_patterns_become_numbers() -> None:
    for dtype, kind in TYPES.items():
        x = np.arange(6).reshape(2, 3).astype(kind)
        for order in "CF":
            made = numbers(bit_pattern(x), dtype, np, order)
            assert bool((made == x).all())
            assert made.flags[f"{order}_CONTIGUOUS"]
