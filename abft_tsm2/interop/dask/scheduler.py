"""Have the scheduler of a cluster recover lost blocks, count faults, and retire what is faulty again and again."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from abft_tsm2.interop.dask import events
from abft_tsm2.interop.dask.messages import QUARANTINE


def install(client: Any = None, *, quarantine_after: int | None = None) -> Any:
    """Have a cluster recover lost blocks, count faults, and retire the hosts or devices that have too many.

    Parameters
    ----------
    client : distributed.Client, optional
        The current one unless given.
    quarantine_after : int, optional
        Reports with faults, from one device of one host, after which its workers are retired: what they hold is moved,
        what they were to do runs elsewhere, and a worker that starts there later is retired as well. None: nothing is
        retired. The last device that is left is never retired.

    Returns
    -------
    None, or with an asynchronous client something to await.

    Raises
    ------
    ValueError
        If `quarantine_after` is no whole number, or below 1, or there is no client.

    Notes
    -----
    Without a call of it, the first worker that finds a fault has the scheduler do the same with the defaults. The
    package has to be installed where the scheduler runs. Faults are counted by host and device, because a worker that
    was started again has another address. The device is the UUID of a GPU, the value of the environment variable
    ``ABFT_TSM2_DEVICE`` where a worker has it, or "cpu". Events of the topic "abft-tsm2" tell of each fault, and of
    what was retired; the dashboard's table of workers has a column "abft faults".

    Examples
    --------
    >>> from distributed import Client, LocalCluster
    >>> from abft_tsm2.interop.dask import install
    >>> cluster = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0")
    >>> with cluster, Client(cluster) as client:
    ...     install(client, quarantine_after=3)
    """
    given: Any = quarantine_after
    if given is not None and (given is True or not isinstance(given, Integral) or given < 1):
        raise ValueError(
            f"quarantine_after is {given!r}: a whole number of faults, 1 or more, or None for no quarantine"
        )
    client = events.current_client() if client is None else client
    if client is None:
        raise ValueError("there is no client: make a distributed.Client first, or pass one")
    return client.sync(_installed, client, quarantine_after)


async def _installed(client: Any, quarantine_after: int | None) -> None:
    events.subscribe(client)
    from abft_tsm2.interop.dask.guard import ClusterGuard

    await client.register_plugin(ClusterGuard())
    await getattr(client.scheduler, QUARANTINE)(after=quarantine_after)
