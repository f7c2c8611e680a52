"""The scheduler's plugin, on a scheduler of which it sees what is given here."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from abft_tsm2.interop.dask.guard import ATTEMPTS, ClusterGuard
from abft_tsm2.interop.dask.messages import FAULTS, FOUND


class Worker(NamedTuple):
    address: str


class Scheduler(SimpleNamespace):
    """Workers by address, on the hosts that these say; and the tasks that there are."""

    def __init__(self, places, **tasks):
        super().__init__(places=places, tasks=tasks, handlers={}, moved=[], said=[], busy=set(), able=None, filled=0)
        self.loop = SimpleNamespace(add_callback=lambda what: what())

    @property
    def workers(self):
        return dict.fromkeys(self.places)

    @property
    def running(self):
        return {Worker(address) for address in self.places}

    def valid_workers(self, task):
        allowed = {one for one in self.places if self.able is None or one in self.able}
        if task.worker_restrictions:
            allowed &= task.worker_restrictions
        elif self.able is None:
            return None
        return {Worker(address) for address in allowed}

    def transitions(self, what, stimulus_id):
        self.moved.append(what)

    def stimulus_queue_slots_maybe_opened(self, stimulus_id):
        self.filled += 1

    def log_event(self, topic, message):
        assert topic == FAULTS
        self.said.append(message)

    async def retire_workers(self, workers, **_):
        await asyncio.sleep(0.01)  # other faults come in meanwhile
        closed = {one: self.places.pop(one) for one in workers if one not in self.busy}
        return closed


class Guard(ClusterGuard):
    async def _places(self, workers):
        await asyncio.sleep(0.001)
        return {one: self.scheduler.places[one] for one in workers if one in self.scheduler.places}


@dataclass(eq=False)
class Task:
    state: str = "processing"
    run_spec: Any = "what to run"
    worker_restrictions: Any = None
    host_restrictions: Any = None
    loose_restrictions: bool = False
    annotations: Any = None
    has_lost_dependencies: bool = False
    dependencies: set[Any] = field(default_factory=set)
    key: Any = ""


def guarded(scheduler, what):
    """Run what is to be done with a guard of this scheduler."""

    async def work():
        guard = Guard()
        await guard.start(scheduler)
        await what(guard)
        while guard.under_way:
            await asyncio.sleep(0.001)
        return guard

    return asyncio.run(work())


def fault(guard, where):
    guard.log_event(FAULTS, {"host": where[0], "device": where[1]})


# ---- tasks that run elsewhere --------------------------------------------------------------------------------------


def test_a_task_is_kept_from_one_worker_and_runs_on_all_others_whoever_comes_and_goes():
    one = Task(annotations={"mine": 1}, host_restrictions={"here"})
    scheduler = Scheduler({"a": "", "b": "", "c": ""}, one=one)

    async def what(guard):
        assert await guard.elsewhere("one", "a", ["found"])
        assert (one.worker_restrictions, one.host_restrictions) == ({"b", "c"}, None)
        assert one.annotations == {"mine": 1, FOUND: ["found"]}
        del scheduler.places["b"]
        guard.remove_worker(scheduler, "b", stimulus_id="")
        assert one.worker_restrictions == {"c"}
        scheduler.places["d"] = ""
        guard.add_worker(scheduler, "d")
        assert one.worker_restrictions == {"c", "d"}
        assert scheduler.moved == []
        one.state = "no-worker"
        scheduler.places = {"a": ""}
        guard.remove_worker(scheduler, "d", stimulus_id="")
        assert one.worker_restrictions is None  # better there than nowhere
        assert scheduler.moved == [{"one": "processing"}]
        guard.transition("one", "processing", "memory")
        assert (one.worker_restrictions, one.host_restrictions, one.annotations) == (None, {"here"}, {"mine": 1})
        assert not guard.avoided
        assert not guard.attempts

    guarded(scheduler, what)


def test_only_workers_that_can_run_a_task_count():
    one, two = Task(), Task(worker_restrictions={"a", "b"})
    scheduler = Scheduler({"a": "", "b": "", "c": ""}, one=one, two=two)
    scheduler.able = {"a", "c"}  # they have a resource that the tasks need

    async def what(guard):
        assert await guard.elsewhere("one", "a", [])
        assert one.worker_restrictions == {"c"}
        assert not await guard.elsewhere("two", "a", ["found"])  # the user said a or b
        assert (two.worker_restrictions, two.annotations) == ({"a", "b"}, None)
        assert not await guard.elsewhere("three", "a", [])
        two.loose_restrictions = True  # and then that they are a preference
        assert await guard.elsewhere("two", "a", ["found"])
        assert two.worker_restrictions == {"c"}

    guarded(scheduler, what)


def test_a_task_is_given_away_so_often_and_no_more():
    scheduler = Scheduler(dict.fromkeys("abcdefg", ""), one=Task())

    async def what(guard):
        asked = [await guard.elsewhere("one", worker, []) for worker in "abcde"]
        assert asked == [True] * ATTEMPTS + [False] * (5 - ATTEMPTS)

    guarded(scheduler, what)


def test_a_restart_leaves_nothing():
    scheduler = Scheduler({"a": "", "b": ""}, one=Task())

    async def what(guard):
        assert await guard.elsewhere("one", "a", [])
        scheduler.tasks.clear()
        guard.restart(scheduler)
        guard.add_worker(scheduler, "b")
        assert not guard.avoided
        assert not guard.attempts

    guarded(scheduler, what)


def test_chunks_in_whose_memory_a_block_may_lie_are_made_again_with_it():
    product = Task("memory", key=("product-protected-gemm-1", 0, 0))
    result = Task("memory", dependencies={product}, key=("protected-gemm-1-c", 0, 0))
    view, gone = Task("memory", dependencies={result}, key=("transpose-2", 0, 0)), Task("released", key="file")
    block = Task("memory", dependencies={view, gone}, key=("read-a-protected-gemm-3", 0, 0))
    later = Task("memory", dependencies={block}, key=("product-protected-gemm-3", 0, 0))
    scheduler = Scheduler({}, block=block, later=later)

    async def what(guard):
        assert await guard.run_again("block", "reader", [])
        assert await guard.run_again("later", "reader", [])
        view.run_spec = None
        assert not await guard.run_again("block", "another", [])

    guarded(scheduler, what)
    first, second = scheduler.moved
    assert first == dict.fromkeys(["block", view.key, result.key], "released")
    assert second == {"later": "released"}


def test_a_block_is_made_again_so_often_and_no_more():
    source, reader = Task("memory"), Task()
    scheduler = Scheduler({"a": ""}, source=source, reader=reader)

    async def what(guard):
        for key in ("reader", "source"):  # the reader's own block, which is in no memory; and another's
            asked = [await guard.run_again(key, "reader", [key]) for _ in range(5)]
            assert asked == [True] * ATTEMPTS + [False] * (5 - ATTEMPTS)
        assert scheduler.moved == [{"source": "released"}] * ATTEMPTS
        source.state = "processing"  # another reader has asked
        assert await guard.run_again("source", "reader", ["more"])
        assert reader.annotations == {FOUND: ["more"]}
        await guard.raised("reader")
        assert reader.annotations is None

    guarded(scheduler, what)


def test_workers_that_have_room_again_are_given_what_is_queued():
    scheduler = Scheduler({"a": "", "b": ""}, source=Task("memory"), reader=Task(), one=Task(), other=Task())

    async def what(guard):
        assert await guard.run_again("source", "reader", [])
        assert await guard.elsewhere("one", "a", [])
        for key, filled in (("other", 0), ("reader", 1), ("one", 2)):
            guard.transition(key, "processing", "released")
            guard.transition(key, "released", "waiting")
            assert scheduler.filled == filled

    guarded(scheduler, what)


def test_a_loss_after_a_reader_has_ended_is_another_one():
    source, reader = Task("memory"), Task()
    scheduler = Scheduler({"a": ""}, source=source, reader=reader)

    async def what(guard):
        for _ in range(3):
            asked = [await guard.run_again("source", "reader", []) for _ in range(ATTEMPTS + 1)]
            assert asked == [True] * ATTEMPTS + [False]
            guard.transition("reader", "processing", "memory")
        assert not guard.attempts
        assert not guard.asked

    guarded(scheduler, what)


@pytest.mark.parametrize(
    "data",
    [
        Task("released", run_spec=None),
        Task("released", has_lost_dependencies=True),
        Task("released", dependencies={Task("waiting", dependencies={Task("released", run_spec=None)})}),
    ],
)
def test_a_block_of_data_that_are_gone_is_not_released(data):
    """Dask would forget it, and all that depends on it."""
    source = Task("memory", dependencies={Task("memory", run_spec=None), data})
    scheduler = Scheduler({"a": ""}, source=source, reader=Task())

    async def what(guard):
        assert not await guard.run_again("source", "reader", [])
        data.state = "memory"
        data.has_lost_dependencies = False
        assert await guard.run_again("source", "reader", [])
        source.has_lost_dependencies = True
        assert not await guard.run_again("source", "reader", [])

    guarded(scheduler, what)
    assert scheduler.moved == [{"source": "released"}]


# ---- quarantine ----------------------------------------------------------------------------------------------------

A, B, C = ("host", "A"), ("host", "B"), ("host", "C")


@pytest.mark.parametrize("devices", [(A, B), (A, B, C)])
def test_devices_that_have_too_many_faults_at_once_are_not_all_retired(devices):
    scheduler = Scheduler({f"worker {number}": where for number, where in enumerate(devices)})

    async def what(guard):
        await guard.quarantine(2)
        for _ in range(2):
            for where in devices:
                fault(guard, where)

    guard = guarded(scheduler, what)
    assert len(scheduler.places) == 1
    assert guard.retired == {*devices} - {*scheduler.places.values()}
    assert [message["why"].endswith("is all that is left: kept") for message in scheduler.said][-1]
    assert len(scheduler.said) == len(devices)


def test_a_worker_at_a_retired_place_is_retired_unless_it_is_all_that_is_left():
    scheduler = Scheduler({"a": A, "b": B})

    async def what(guard):
        await guard.quarantine(1)
        fault(guard, A)
        await asyncio.sleep(0.05)
        assert [*scheduler.places] == ["b"]
        scheduler.places["a again"] = A
        guard.add_worker(scheduler, "a again")
        await asyncio.sleep(0.05)
        assert [*scheduler.places] == ["b"]
        scheduler.places = {"a at last": A}
        guard.add_worker(scheduler, "a at last")

    guard = guarded(scheduler, what)
    assert [*scheduler.places] == ["a at last"]
    assert (guard.retired, guard.kept) == (set(), {A})


def test_a_device_that_cannot_be_retired_is_not_said_to_be():
    scheduler = Scheduler({"a": A, "b": B})
    scheduler.busy = {"a"}

    async def what(guard):
        await guard.quarantine(1)
        fault(guard, A)

    guard = guarded(scheduler, what)
    assert [*scheduler.places] == ["a", "b"]
    assert guard.retired == set()
    assert "no other worker has room for: kept" in scheduler.said[0]["why"]
