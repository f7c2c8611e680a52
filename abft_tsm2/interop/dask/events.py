"""Reports of tasks, sent to the client that asked for them: through the scheduler's events.

A worker logs an event for each report; clients of the process that made the graph hand it to their monitors. The
scheduler passes on what a worker sends in order, and tells a client of a finished task later than of the events of
those before it: when ``compute`` returns, the reports have arrived.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
import warnings
from collections import Counter
from typing import Any

from abft_tsm2 import errors, policy
from abft_tsm2.interop.dask.messages import FAULTS, REPORTS
from abft_tsm2.interop.dask.place import worker
from abft_tsm2.report import Report

METRIC = "abft faults"  # a column of the dashboard's table of workers
ORIGIN = uuid.uuid4().hex  # of this process: events of others' graphs are not for its monitors


_computations: Counter[str] = Counter()  # of graphs that this process has sent to a cluster, by their names


def begin(name: str) -> None:
    """Count a computation of a graph that this process sends to a cluster, and have its events handed to monitors."""
    _computations[name] += 1
    if (client := current_client()) is not None:
        subscribe(client)


def counted(name: str, identity: str) -> str:
    """What a monitor counts once: a task that ran twice in one computation of the graph `name`; and the report of a
    worker in this process, which arrives twice."""
    return f"{_computations[name]}-{identity}"


def send(report: Report, name: str, identity: str, origin: str, warning: type[Warning] | None = None) -> None:
    """Log the report of a task of a graph as an event of the cluster that it runs on; nothing outside of one.

    `warning`: the category in which the client is to warn of it."""
    here = worker()
    if here is None:
        return
    text = json.dumps(report.to_dict(), allow_nan=False)
    message = {
        "origin": origin,
        "graph": name,
        "identity": identity,
        "report": text,
        "warning": warning and warning.__name__,
    }
    here.log_event(REPORTS, message)


def send_faults(report: Report, identity: str) -> None:
    """Log what one run of a task found wrong, if anything, for the scheduler's plugin to count."""
    here = worker()
    if here is not None and report.faulty:
        guarded(here)
        place = {"worker": report.worker, "host": report.host, "device": report.device}
        faults = [str(fault) for fault in report.faults] or list(report.reasons)
        here.log_event(FAULTS, {**place, "status": report.status.name, "task": identity, "faults": faults})
        _counted(here)


def guarded(here: Any) -> bool:
    """Whether the scheduler has its plugin, `guard`, which is sent there from here; it cannot take it where this
    package is not installed."""
    if "_abft_guarded" not in here.__dict__:
        from distributed.protocol.pickle import dumps
        from distributed.utils import sync

        from abft_tsm2.interop.dask.guard import ClusterGuard

        given = {"plugin": dumps(ClusterGuard()), "name": ClusterGuard.name, "idempotent": True}
        try:
            sync(here.loop, here.scheduler.register_scheduler_plugin, **given)
        except OSError:  # it may be there again the next time
            return False
        except Exception:  # whatever the scheduler raises
            here._abft_guarded = False
        else:
            here._abft_guarded = True
    return bool(here._abft_guarded)


def _counted(here: Any) -> None:
    """Show the number of reports with faults in the dashboard's table of workers."""
    counts = here.__dict__.setdefault("_abft_faults", [0])
    counts[0] += 1
    here.metrics.setdefault(METRIC, lambda _: counts[0])


def current_client() -> Any:
    """The client that `compute` would use now; None where there is none."""
    if "distributed" not in sys.modules:
        return None
    from distributed import default_client

    try:
        return default_client()
    except ValueError:
        return None


def subscribe(client: Any) -> None:
    """Have the events of a cluster handed to this process's monitors."""
    if REPORTS not in client._event_handlers:
        client.subscribe_topic(REPORTS, receive)


def receive(event: tuple[float, Any]) -> None:
    """Hand the report of an event to the monitors."""
    _, message = event
    if message["origin"] != ORIGIN:
        return
    report = Report.from_dict(json.loads(message["report"]))
    policy.receive(report, counted(message["graph"], message["identity"]))
    if message["warning"]:
        warnings.warn(policy.warning_text(report), getattr(errors, message["warning"]), stacklevel=2)


class ClusterReports:
    """What a monitor asks when it begins and when it ends."""

    def begin(self) -> None:
        self._since = time.time()
        if (client := current_client()) is not None:
            subscribe(client)

    def end(self) -> None:
        """Ask for the events of a client that was made meanwhile, and has no subscription."""
        client = current_client()
        if client is not None and REPORTS not in client._event_handlers and not client.asynchronous:
            for event in client.get_events(REPORTS):
                if event[0] >= self._since:  # by the scheduler's clock
                    receive(event)
            subscribe(client)


policy.add_source(ClusterReports())
