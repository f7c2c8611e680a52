"""Run a protected operation as one task of a graph: its operands, its report, and what the client asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from abft_tsm2 import policy
from abft_tsm2.arrays import is_cupy, namespace, to_host
from abft_tsm2.core import faultpoint
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.interop.dask import delivered, events
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.place import located, place
from abft_tsm2.interop.dask.recovery import Rerun, elsewhere, found_before, raised, recovered, remember
from abft_tsm2.interop.dask.streams import in_turn, stream_for
from abft_tsm2.report import Fault, Report, Status, by_precedence

ATTEMPTS = 3
_WRONG = {Status.UNCORRECTABLE, Status.INPUT_CHANGED}

Hook = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class GraphOptions:
    """What a graph carries to each of its tasks.

    Attributes
    ----------
    name : str
        Of the graph: with the number of a step, the identity of a task that may run twice.
    operation : str
    on_error : {None, "correct", "detect", "raise"}
    on_stage : callable, optional
    actions : mapping
        What `errstate` said where the graph was made.
    planter : callable, optional
        Of faults, in force where the graph was made.
    origin : str
        The process that made it, whose monitors are told.
    sent : bool
        Whether it has left the process that made it.
    """

    name: str
    operation: str
    on_error: str | None = None
    on_stage: Hook | None = None
    actions: Mapping[str, Any] = field(default_factory=policy.geterr)
    planter: faultpoint.Planter | None = field(default_factory=faultpoint.current)
    origin: str = events.ORIGIN
    sent: bool = field(default=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """A client sends the graph, for one computation; what the scheduler sends to workers was `sent` before."""
        if not self.sent:
            events.begin(self.name)
        return {**self.__dict__, "sent": True}

    def claim(self) -> None:
        """Have this process send the graph, and its monitors told, though another one may have made it."""
        self.__dict__.update(origin=events.ORIGIN, sent=False)

    def identity(self, step: tuple[Any, ...]) -> str:
        """What names a task, however often it runs."""
        return f"{self.name}-{'-'.join(map(str, step))}"

    def label(self, kind: str) -> str:
        """The name of tasks of one kind: it comes first, for the scheduler expects of a task the time of others whose
        names begin alike (`dask.utils.key_split`), and shows them in one colour."""
        return f"{kind}-{self.name}"

    @property
    def repairs(self) -> bool:
        return self.on_error is None or self.on_error == "correct"


def run(
    options: GraphOptions,
    step: tuple[Any, ...],
    blocks: Mapping[str, Block | None],
    work: Callable[..., Any],
    *,
    sync: bool = True,
) -> tuple[Any, Report]:
    """``work(**arrays)`` with the arrays of the blocks, and one report of all that was protected in it.

    The blocks are compared with their sums when the work is done: what it read was right from beginning to end. Where
    one was not, it is recovered and the work done again.

    Parameters
    ----------
    sync : bool
        False: verdicts of a GPU are awaited once, behind all that the task queues; nothing in the work needs them.

    Raises
    ------
    SilentDataCorruptionError
        The result is wrong, or a block is lost, and the policy of the graph says so.
    distributed.Reschedule
        A block has to be made again first, or the work to be done by another worker.
    """
    given = {name: block for name, block in blocks.items() if block is not None}
    for block in given.values():
        block.align()
    found: list[tuple[Status, Fault]] = []
    for _ in range(ATTEMPTS):
        with faultpoint.planting(options.planter):
            result, reports, changed, error = _attempt(given, work, sync)
        if not changed:
            if sync or not any(report.status in _WRONG for report in reports):
                break
            sync = True  # what a GPU's kernels leave to the host
            continue
        for name in changed:
            found += _recovered(options, step, name, given[name], found)
        if any(status in _WRONG for status, _ in found):
            break
    else:  # recovered each time, and changed again while it was read
        found += [(Status.INPUT_CHANGED, Fault(name, "block", (), (), 0, float("nan"))) for name in changed]
    if error is not None and not changed:
        raise error
    identity = options.identity(step)
    this = _combined(options, step, reports, found)
    report = _with_earlier(identity, this)
    if reports or report.faults:  # what only moves data has nothing to say
        _deliver(options, identity, this, report)
    if error is not None:  # there is no result, whatever the policy says
        raise SilentDataCorruptionError(report) from error
    remember(identity, this.faults)
    return result, report


def _attempt(
    given: Mapping[str, Block], work: Callable[..., Any], sync: bool
) -> tuple[Any, list[Report], list[str], Exception | None]:
    """The result, the reports, the blocks that had changed in the end, and what was raised: of a block that changed it
    says nothing. While nothing was written back, or else again."""
    while True:
        writes = delivered.writes()
        outcome = _once(given, work, sync)
        if delivered.writes() == writes:
            return outcome


def _once(
    given: Mapping[str, Block], work: Callable[..., Any], sync: bool
) -> tuple[Any, list[Report], list[str], Exception | None]:
    result, error = None, None
    held = [(block.array, block.words) for block in given.values()]  # another thread may recover a block meanwhile
    arrays = [array for array, _ in held]
    with stream_for(*arrays), policy.reports_kept(sync=sync) as reports:
        with contextlib.nullcontext() if sync else in_turn(*arrays):
            try:
                result = work(**{name: block.array for name, block in given.items()})
            except (ArithmeticError, LookupError, ValueError) as caught:  # LinAlgError is one
                error = caught
            flags: Any = [words.differ(array) for array, words in held]
        reports = [report.wait() for report in reports]
        if flags and is_cupy(flags[0]):  # read at once
            flags = to_host(namespace(flags[0]).stack(flags))
    read = zip(given.items(), held, flags, strict=True)
    changed = [name for (name, block), (array, _), flag in read if flag or block.array is not array]
    return result, reports, changed, error


def _recovered(
    options: GraphOptions, step: tuple[Any, ...], name: str, block: Block, found: list[tuple[Status, Fault]]
) -> list[tuple[Status, Fault]]:
    """How a block was recovered, after those that were `found` before; nothing where another task has done it."""
    if not options.repairs:
        return [(Status.INPUT_CHANGED, Fault(name, "block", (), (), 0, float("nan")))]
    try:
        return recovered(name, block, options.identity(step), [fault for _, fault in found])
    except Rerun as again:
        from distributed import Reschedule

        report = _combined(options, step, [], [*found, (Status.CORRECTED, again.args[0])])
        events.send_faults(report, options.identity(step))
        raise Reschedule(str(again.args[0])) from None


def _combined(
    options: GraphOptions, step: tuple[Any, ...], reports: list[Report], found: list[tuple[Status, Fault]]
) -> Report:
    """One report of the operations of a task, and of what happened to its operands; here."""
    statuses = [status for report in reports for status in (report.status, *report.also)]
    status, also = by_precedence([*statuses, *(status for status, _ in found)])
    faults = [*(fault for _, fault in found), *(fault for report in reports for fault in report.faults)]
    first = reports[0] if reports else Report(status, options.operation, 0, 0, 0, "")
    lost = [fault.operand for one, fault in found if one in _WRONG]
    reasons = [f"{', '.join(lost)} changed between two tasks, and no copy of it is as it was"] if lost else []
    seconds: dict[str, float] = {}
    for report in reports:
        for name, time in report.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + time
    return replace(
        first,
        status=status,
        operation=options.operation,
        also=also,
        faults=tuple(map(located, faults)),
        checks=tuple(check for report in reports for check in report.checks),
        suspicions=sum(report.suspicions for report in reports),
        reasons=tuple(dict.fromkeys([*reasons, *(reason for report in reports for reason in report.reasons)])),
        seconds=seconds,
        index=tuple(part for part in step if isinstance(part, int)),
        products=(),
        **place()._asdict(),
    )


def _with_earlier(identity: str, report: Report) -> Report:
    """The report of a step, with the faults of its runs before this one."""
    before = found_before(identity)
    if not before:
        return report
    status, also = by_precedence([report.status, *report.also, Status.CORRECTED])
    return replace(report, status=status, also=also, faults=(*before, *report.faults))


def _deliver(options: GraphOptions, identity: str, this: Report, report: Report) -> None:
    """Tell monitors and scheduler of a task, and do what the policy says, here and at the client: of all its runs, or
    of this one where another worker is to do it again."""
    if {this.status, *this.also} & _WRONG and options.repairs:
        faults = this.faults or [Fault("the result", "block", (), (), 0, float("nan"))]
        if elsewhere(identity, faults):
            from distributed import Reschedule

            events.send_faults(this, identity)
            raise Reschedule(this.headline)
    actions = dict(options.actions)
    if report.worker:  # its warnings are printed where no user looks: the client warns
        actions = {key: "log" if action == "warn" else action for key, action in actions.items()}
    counted = events.counted(options.name, identity) if report.worker else ""
    with policy.errstate(**actions):
        wrong: SilentDataCorruptionError | None = None
        try:
            policy.deliver(report, options.on_error, identity=counted)
        except SilentDataCorruptionError as error:
            wrong = error
    with policy.errstate(**options.actions):
        warning = policy.warning_for(policy.actions_for(report, options.on_error))
    events.send(report, options.name, identity, options.origin, warning)
    events.send_faults(this, identity)
    if wrong is not None:
        raised()
        raise wrong
