"""The schedule of a GPU's LU, run with NumPy in any order that its streams and events allow."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from abft_tsm2.linalg.device.schedule import CHECKS, LANES, LEFT, MAIN, PANEL, SETTLED, Schedule, Step, Task, steps_of
from tests.support.lu_machine import InPlace, Machine, alone, error_of, error_of_factors, queued, wide_steps

SHAPES = [(700, 700), (640, 640), (100, 100), (900, 333), (300, 810), (513, 512), (1, 5), (257, 700)]
SMALL = [(500, 500), (600, 333), (300, 610)]
WIDTHS = [128, 256, 512]
BIG = [(128, 128), (5000, 5000), (16384, 16384), (20000, 300), (40, 9000), (10007, 10007)]


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_any_order_that_the_streams_allow_gives_the_factors(m, n, width):
    A = np.random.default_rng(m).standard_normal((m, n))
    for seed in range(2):
        schedule = Schedule(m, n, checked=bool(seed), steps=wide_steps(m, n, width), chunk=(100, 256)[seed])
        assert error_of(A, schedule, seed, graphs=bool(seed)) < 1e-9


@pytest.mark.parametrize(("m", "n"), SMALL)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("tracked", "staged"), [(True, False), (False, True), (True, True)])
def test_so_do_those_that_are_tracked_or_seen_by_a_hook(m, n, width, tracked, staged):
    A = np.random.default_rng(m).standard_normal((m, n))
    for seed, chunk in enumerate((100, n)):
        how = {"tracked": tracked, "staged": staged, "steps": wide_steps(m, n, width), "chunk": chunk}
        schedule = Schedule(m, n, checked=True, **how)
        assert error_of(A, schedule, seed) < 1e-9
        if not staged:
            assert error_of(A, schedule, seed, graphs=True) < 1e-9


@pytest.mark.parametrize(("m", "n"), SMALL)
@pytest.mark.parametrize("kind", [{}, {"tracked": True}, {"staged": True}])
def test_factors_in_the_place_of_a_matrix_begin_when_it_is_encoded(m, n, kind):
    A, wrong = np.random.default_rng(m).standard_normal((m, n)), 0
    for seed in range(8):
        for in_place in (True, False):
            schedule = Schedule(m, n, checked=True, in_place=in_place, steps=wide_steps(m, n, 256), **kind)
            right = error_of(A, schedule, seed, graphs=not kind.get("staged"), machine=InPlace) < 1e-9
            assert right or not in_place
            wrong += not right
    assert wrong or kind.get("staged")  # there all streams wait before the first panel


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("kind", [{"chunk": 200}, {"tracked": True}, {"tracked": True, "chunk": 200}, {"staged": True}])
def test_a_stream_that_does_not_wait_is_seen(lane, kind):
    A = np.random.default_rng(0).standard_normal((800, 800))
    schedule = Schedule(800, 800, checked=True, steps=wide_steps(800, 800, 256), **kind)
    schedule.tasks = [t for t in schedule.tasks if t.lane != lane or t.name != "wait"]

    def wrong(seed) -> bool:
        try:
            return not error_of(A, schedule, seed) < 1e-9
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError):
            return True  # what it needs is not there

    assert any(wrong(seed) for seed in range(10))


@pytest.mark.parametrize(("m", "n"), BIG)
def test_steps_cover_all_columns_in_whole_panels(m, n):
    steps = steps_of(m, n)
    assert [step.j for step in steps] == [0, *(step.j1 for step in steps[:-1])]
    assert steps[-1].j1 == min(m, n)
    assert all(step.j % PANEL == 0 for step in steps)


@pytest.mark.parametrize(("m", "n"), [*BIG, (2048, 2048), (1024, 1024), (32768, 32768), (30000, 700)])
def test_most_columns_are_settled_early_but_of_steps_that_may_be_done_again(m, n):
    for kind in ({}, {"checked": True, "tracked": True}, {"encoded": False}):
        schedule, K = Schedule(m, n, **kind), min(m, n)
        at = [place for place, task in enumerate(schedule) if task.name == "left_done"]
        if K < 1000:
            assert (schedule.early, at) == (0, [])
            continue
        assert max(1024, K // 8) + 512 >= K - schedule.early > 0
        assert [schedule.tasks[place].numbers for place in at] == [(schedule.early,)]
        number = [step.j1 for step in schedule.steps].index(schedule.early)
        if "tracked" in kind:
            part = schedule.parts[number + SETTLED]
            assert part.start <= at[0] < part.stop
        assert not Schedule(m, n, staged=True, **kind).early


# -- parts --


def flaws_of(schedule: Schedule) -> set[str]:
    """Why parts cannot be queued, and recorded, as they say: a part that is recorded is entered from the caller's
    stream, joined to it at its end, and waits for nothing that another part has recorded."""
    tasks, flaws = schedule.tasks, set()
    edges = [schedule.prefix, *(part.stop for part in schedule.parts)]
    if [*(part.start for part in schedule.parts), len(tasks)] != edges:
        flaws.add("tasks between parts")
    if len(schedule.parts) != (len(schedule.steps) + 1 if schedule.tracked else 1):
        flaws.add("not a part for each step")
    of_prefix = {task.numbers[0] for task in tasks[: schedule.prefix] if task.name == "record"}
    in_order: set[int] = set()  # of parts that are not whole
    loose: set[str] = set()  # streams whose last task the caller's does not wait for
    for part in schedule.parts:
        if part.whole and loose:
            flaws.add("not joined before")
        inside = set(LANES) if loose else {MAIN}
        recorded: dict[int, str] = {}
        ends: dict[str, int] = {}
        for lane, name, numbers in tasks[part.start : part.stop]:
            if name == "wait":
                (event,) = numbers
                if event in recorded:
                    inside.add(lane)
                elif event not in (of_prefix if part.whole else of_prefix | in_order):
                    flaws.add("waits for another part")
                if lane == MAIN and ends.get(recorded.get(event)) == event:
                    loose.discard(recorded[event])
            if lane not in inside:
                flaws.add("not entered")
            if lane != MAIN:
                loose.add(lane)
            ends.pop(lane, None)
            if name == "record":
                recorded[numbers[0]], ends[lane] = lane, numbers[0]
        if part.whole and loose:
            flaws.add("not joined behind")
        if not part.whole:
            in_order |= set(recorded)
    return flaws


def schedules() -> list[Schedule]:
    """Of all kinds that are recorded."""
    cases = [(m, n, steps_of(m, n), None) for m, n in [*BIG, (30000, 30000), (14000, 30000)]]
    cases += [(m, n, wide_steps(m, n, w), c) for m, n in SHAPES for w in WIDTHS for c in (100, n)]
    cases.append((1400, 1600, wide_steps(1400, 1600, 512, 128, 256, 128, 128, 256), 200))
    kinds = [{"encoded": False}, {}, {"checked": True}, {"checked": True, "tracked": True}]
    kinds.append({**kinds[-1], "in_place": True})
    return [Schedule(m, n, steps=steps, chunk=chunk, **kind) for m, n, steps, chunk in cases for kind in kinds]


def test_parts_are_queued_and_recorded_as_they_say():
    for schedule in schedules():
        assert not flaws_of(schedule), (schedule.m, schedule.n, schedule.steps, schedule.chunk)


def test_parts_are_whole_but_where_products_in_chunks_run_on_beside_panels():
    for schedule in schedules():
        wide = [step for step in schedule.steps[1:] if step.width > PANEL]
        run_on = schedule.tracked and schedule.chunk < schedule.n and wide
        assert all(part.whole for part in schedule.parts) == (not run_on)


def test_each_step_has_a_part_which_judges_it_and_factors_the_next_panels():
    for schedule in schedules():
        tasks, steps, parts = schedule.tasks, schedule.steps, schedule.parts
        for step, part in zip(steps, parts, strict=False) if schedule.tracked else ():
            checks = [t for t in tasks[part.start : part.stop] if t.name in ("keep_sums", "judge_step")]
            assert checks == [Task(CHECKS, "keep_sums", (step.j,)), Task(CHECKS, "judge_step", (step.j, step.width))]
        for number, (step, panels) in enumerate(zip(steps, schedule.panels, strict=True)):
            part = parts[max(0, number - 1)] if schedule.tracked else parts[0]
            assert part.start <= panels.start < panels.stop <= part.stop
            assert [t.numbers for t in tasks[panels] if t.name == "panel"] == step.panels
        assert parts[-1].start <= schedule.certificate.start < schedule.certificate.stop == parts[-1].stop


def changed(schedule: Schedule, place: int, *tasks: Task) -> Schedule:
    """With other tasks, or none, in place of one."""
    found, more = copy.copy(schedule), len(tasks) - 1
    found.tasks = [*schedule.tasks[:place], *tasks, *schedule.tasks[place + 1 :]]
    edges = [(p, p.start + more * (p.start > place), p.stop + more * (p.stop > place)) for p in schedule.parts]
    found.parts = [part._replace(start=start, stop=stop) for part, start, stop in edges]
    return found


def spoiled(schedule: Schedule):
    """What is wrong, and the schedule with that."""
    tasks, waited = schedule.tasks, {t.numbers[0] for t in schedule if t.name == "wait"}
    of_graphs = [t.numbers[0] for p in schedule.parts if p.whole for t in tasks[p.start : p.stop] if t.name == "record"]
    lane_of = {t.numbers[0]: t.lane for t in schedule if t.name == "record"}
    for number, part in enumerate(schedule.parts):
        inside = {t.numbers[0] for t in tasks[part.start : part.stop] if t.name == "record"}
        elsewhere = next(event for event in of_graphs if event not in inside)
        for place in range(part.start, part.stop):
            task = tasks[place]
            if task.name == "record" and task.numbers[0] in waited:
                yield f"without {task}", changed(schedule, place)
            if task.name == "wait":
                yield f"for another part: {task}", changed(schedule, place, task._replace(numbers=(elsewhere,)))
                later = [t.numbers[0] for t in tasks[place + 1 : part.stop] if (t.lane, t.name) == (MAIN, "wait")]
                if task.lane == MAIN and lane_of[task.numbers[0]] not in [lane_of[event] for event in later]:
                    yield f"not joined: {task}", changed(schedule, place)
        last = part.stop - 1
        for lane in LANES[1:] if part.whole else ():
            yield f"not joined at the end: {lane}", changed(schedule, last, tasks[last], Task(lane, "update"))
        for lane in {t.lane for t in tasks[part.start : part.stop]} - {MAIN} if part.whole or not number else ():
            found = copy.copy(schedule)
            waits = [part.start <= at < part.stop and (t.lane, t.name) == (lane, "wait") for at, t in enumerate(tasks)]
            found.tasks = [Task(lane, "update") if wait else t for t, wait in zip(tasks, waits, strict=True)]
            yield f"not entered: {lane}", found
        for parts in ([], [part._replace(stop=part.stop - 1)]):
            found = copy.copy(schedule)
            found.parts = [*schedule.parts[:number], *parts, *schedule.parts[number + 1 :]]
            yield f"tasks are left out of part {number}", found
        if not part.whole:
            found = copy.copy(schedule)
            found.parts = [p._replace(whole=p.whole or p == part) for p in schedule.parts]
            yield f"part {number} is not whole", found


@pytest.mark.parametrize("chunk", [200, 1500])
def test_flaws_of_parts_are_found(chunk):
    steps = [Step(0, 128), Step(128, 512), Step(512, 1024), Step(1024, 1152), Step(1152, 1280)]
    schedule = Schedule(1280, 1500, checked=True, tracked=True, steps=steps, chunk=chunk)
    assert not flaws_of(schedule)
    for why, wrong in spoiled(schedule):
        assert flaws_of(wrong), why


# -- a factorisation that begins again --

SHAPES_AGAIN = [
    *[(700, 700, [128]), (900, 520, [128]), (420, 800, [128]), (400, 300, [128]), (900, 900, [256])],
    *[(1000, 700, [256]), (600, 800, [256]), (1150, 1200, [512]), (900, 1000, [256, 128, 256, 128, 128])],
]
CHUNKED, GRAPHS, STAGED = "chunked", "graphs", "staged"
KINDS_AGAIN = [(), (GRAPHS,), (CHUNKED,), (CHUNKED, GRAPHS), (STAGED,)]  # an odd number: each comes with both delays


@pytest.mark.parametrize(("m", "n", "widths"), SHAPES_AGAIN)
def test_a_factorisation_begins_again_at_a_step(m, n, widths):
    A, steps = np.random.default_rng(m).standard_normal((m, n)), wide_steps(m, n, *widths)
    cases = [(number, done) for number in range(len(steps)) for done in (1, 2, 3) if number + done <= len(steps)]
    kinds = itertools.cycle(KINDS_AGAIN)
    for seed, ((number, done), kind) in enumerate(zip(cases, kinds, strict=False)):
        j, chunk, graphs = steps[number].j, 200 if CHUNKED in kind else n, GRAPHS in kind
        schedule = Schedule(m, n, checked=True, tracked=True, staged=STAGED in kind, steps=steps, chunk=chunk)
        prefix, machine = schedule.tasks[: schedule.prefix], Machine(A, schedule, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            machine.run([*prefix, *queued(schedule, 0, number, graphs=graphs)])
            machine.W[j, j] += 1.0
            machine.run(queued(schedule, number, number + done, graphs=graphs))
            before = np.array(machine.residuals)
            if number:
                machine.take_back(number)
                first = alone(schedule.tasks[schedule.panels[number]])
            else:
                first = prefix
            machine.run([*first, *queued(schedule, number, graphs=graphs)])
        assert len(before) == 2 * (number + done)
        assert (before[: 2 * number] < 1e-9).all()
        assert max(before[2 * number :][:2]) > 1e-3
        again = machine.residuals[len(before) :]
        assert len(again) == 2 * (len(steps) - number) + 4
        assert np.max(again) < 1e-9
        assert error_of_factors(machine) < 1e-9


def test_finished_factors_are_verified_again_alone():
    A = np.random.default_rng(0).standard_normal((600, 500))
    schedule = Schedule(600, 500, checked=True, tracked=True, steps=wide_steps(600, 500, 256))
    machine = Machine(A, schedule, np.random.default_rng(0))
    machine.run(schedule.tasks)
    for change, agree in ((0.0, True), (1.0, False), (-1.0, True)):
        machine.W[400, 300] += change
        machine.residuals = []
        machine.run(alone(schedule.tasks[schedule.certificate]))
        assert len(machine.residuals) == 4
        assert (np.max(machine.residuals) < 1e-9) == agree


# -- looks at a step that is in doubt --


def written(task: Task) -> int:
    """The first column that a task writes or moves: 0 of what else a look reads, and far right of what it does not."""
    at = {"panel": 0, "exchange_rows": 2, "exchange_solve": 2, "solve_rows": 4, "substitute": 4, "update": 2}
    if task.name in ("column_sums", "row_sums", "judge_step"):
        return task.numbers[0]
    if task.name in ("begin", "left_map", "left_rows", "left_done", "sum_factors"):
        return 0
    return task.numbers[at[task.name]] if task.name in at else 1 << 40


def disturbed(tasks: list[Task]) -> list[tuple[Task, Task]]:
    """Looks, and tasks that may run beside them and write what they read."""
    of_lane, known, before = dict.fromkeys(LANES, frozenset()), {}, []
    for k, task in enumerate(tasks):
        if task.name == "wait":
            of_lane[task.lane] |= known[task.numbers[0]]
        before.append(of_lane[task.lane])
        of_lane[task.lane] |= {k}
        if task.name == "record":
            known[task.numbers[0]] = of_lane[task.lane]
    return [
        (look, task)
        for i, look in enumerate(tasks)
        for k, task in enumerate(tasks)
        if look.name == "line_squares" and k not in before[i] and i not in before[k] and i != k
        if written(task) < sum(look.numbers)
    ]


@pytest.mark.parametrize(
    ("m", "n", "chunk"), [(2048, 2048, None), (2048, 2048, 256), (1500, 700, 256), (400, 1500, 512)]
)
def test_a_look_reads_what_lies_still(m, n, chunk):
    schedule = Schedule(m, n, checked=True, tracked=True, chunk=chunk, steps=wide_steps(m, n, 256))
    tasks = schedule.tasks
    assert [task.numbers for task in tasks if task.name == "line_squares"] == [(s.j, s.width) for s in schedule.steps]
    assert not disturbed(tasks)
    assert disturbed([task._replace(lane=LEFT) if task.name == "line_squares" else task for task in tasks])
    if schedule.early:
        assert disturbed([task._replace(lane=LEFT) if task.name == "left_rows" else task for task in tasks])


def test_a_look_sees_the_lines_of_the_factors():
    m = 1300
    schedule = Schedule(m, m, checked=True, tracked=True, steps=wide_steps(m, m, 128), chunk=512)
    assert schedule.early
    for seed in range(4):
        machine = Machine(np.random.default_rng(seed).standard_normal((m, m)), schedule, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            machine.run(schedule.tasks)
        for j, j1 in schedule.steps:
            squares = np.sum(np.hstack([machine.W[j:j1, :j], machine.W[:j, j:j1].T]) ** 2, 1)
            np.testing.assert_allclose(machine.looked[j], squares, rtol=1e-10)


# -- what a hook sees --


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_hook_sees_the_stages_in_order(m, n, width):
    A, steps = np.random.default_rng(n).standard_normal((m, n)), wide_steps(m, n, width)
    for seed, how in enumerate(({}, {"checked": True}, {"checked": True, "tracked": True})):
        expected = [("encoded",)]
        for step in steps:
            solved = ("swapped", "solved") if step.j1 < n else ()
            expected += [(name, *step) for name in ("panel", *solved, "updated")]
        expected.append(("finished" if how else "factored",))
        schedule = Schedule(m, n, staged=True, steps=steps, **how)
        machine = Machine(A, schedule, np.random.default_rng(seed))
        with np.errstate(all="ignore"):
            machine.run(schedule.tasks)
        assert machine.stages == expected
