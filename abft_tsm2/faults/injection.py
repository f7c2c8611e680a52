"""Injection of faults while the shipped code runs: on the route of any call, through ``on_stage``, or around a function
of a user's own."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from abft_tsm2.arrays import is_writable, overlap
from abft_tsm2.core.faultpoint import planting
from abft_tsm2.faults.models import plant
from abft_tsm2.faults.plan import Plan, require_known
from abft_tsm2.faults.recorded import RecordedFault
from abft_tsm2.faults.sites import FUNCTION_SITES, GRAPH_SITES, OPERANDS, SITES, Site

Array = Any


@dataclass(frozen=True)
class Planted:
    """A fault that was planted: its plan, the stage, and the number of the bit (-1 where it is not one bit)."""

    plan: Plan
    stage: str
    bit: int
    fault: Any = field(default=None, repr=False)  # of a graph


class Injector:
    """What plants faults into the live arrays: set by `inject` for a block's protected operations, or passed to one as
    ``on_stage``; a call with that goes the way that has every stage.

    Parameters
    ----------
    *plans : Plan
        All of them are planted, each at its own site and visit.

    Attributes
    ----------
    planted : list of Planted
        What has been planted so far.
    visits : Counter
        How often each stage has been reached, by all threads; once for each product of a batch, in their order.

    Raises
    ------
    ValueError
        For a site that does not exist, or a model that makes no sense there.

    Notes
    -----
    Arrays are changed on their own device; the host is not waited for, and nothing is copied to it.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> from abft_tsm2 import faults
    >>> A, B = np.eye(40), np.random.default_rng(0).standard_normal((40, 30))
    >>> hook = faults.Injector(faults.Plan("bit_flip", bits="exponent_high", seed=(3,)))
    >>> C, report = ft.protected_gemm(A, B, on_stage=hook, return_report=True)
    >>> len(hook.planted), report.status.name, bool(np.allclose(C, B))
    (1, 'CORRECTED', True)
    """

    def __init__(self, *plans: Plan) -> None:
        self.plans = plans
        for plan in plans:
            require_known("site", plan.site, SITES)
            if plan.model not in SITES[plan.site].models:
                there = ", ".join(sorted(SITES[plan.site].models))
                raise ValueError(f"{plan.model} cannot be planted at {plan.site!r}; there it may be {there}")
        self.planted: list[Planted] = []
        self.visits: Counter[str] = Counter()
        self._seen: dict[int, dict[str, Array]] = {}  # by thread
        self._undo: list[tuple[int, str, Array, Array]] = []
        self._changed: list[Array] = []
        self._recorded: list[RecordedFault] = []
        self._passing: list[tuple[int, str, RecordedFault]] = []  # thread, and stage at which it is taken back

    @property
    def bit(self) -> int:
        """The number of the bit, where all that was planted changed the same one; else -1."""
        bits = {one.bit for one in self.planted}
        return bits.pop() if len(bits) == 1 else -1

    def __reduce__(self) -> Any:
        raise TypeError(
            "an injector counts the visits of one process and is not sent to another: use a scheduler of this process, "
            "or pass a function of your own as on_stage"
        )

    def missing(self) -> list[Plan]:
        """The plans that were not planted: their sites were not reached."""
        self._count_replays()
        there = {id(one.plan) for one in self.planted}
        return [plan for plan in self.plans if id(plan) not in there]

    def __call__(self, stage: str, arrays: Mapping[str, Array]) -> None:
        with _one_at_a_time:
            visit = self.visits[stage]
            self.visits[stage] += 1
            seen = self._seen.setdefault(threading.get_ident(), {})
            seen.update({name: arrays[name] for name in OPERANDS if name in arrays})
            self._take_back(stage)
            for plan in self.plans:
                site = SITES[plan.site]
                here = stage == site.stage and (visit == plan.visit or (plan.persistent and visit > plan.visit))
                if here or (plan.persistent and stage == site.again):
                    self._plant(plan, site, stage, {**seen, **arrays})

    def _plant(self, plan: Plan, site: Site, stage: str, arrays: Mapping[str, Array]) -> None:
        rng = plan.rng()
        try:
            self._plant_at(plan, site, stage, arrays, rng)
        except KeyError as missing:
            raise ValueError(
                f"site {plan.site!r}: there is no {missing} on this route; pass the injector as on_stage"
            ) from None

    def _plant_at(self, plan: Plan, site: Site, stage: str, arrays: Mapping[str, Array], rng: Any) -> None:
        if site.change is not None:
            self.planted.append(Planted(plan, stage, site.change(arrays, plan, rng)))
            return
        part = _to_write(site.part(arrays, rng))
        if part is None:
            return
        if site.until and plan.persistent:  # what stays in memory is still there
            if any(overlap(one, part) for one in self._changed):
                return
            self._changed.append(part)
        elif site.until:
            self._undo.append((threading.get_ident(), site.until, part, part.copy()))
        self.planted.append(Planted(plan, stage, plant(part, plan, rng)))

    def _take_back(self, stage: str) -> None:
        """Undo transient changes of this thread: the operand is right again when it is verified."""
        due = threading.get_ident(), stage
        for *when, part, before in self._undo:
            if tuple(when) == due:
                part[...] = before
        self._undo = [one for one in self._undo if one[:2] != due]

    # ---- in graphs ----

    def record(self, stage: str, stream: int, arrays: Mapping[str, Array]) -> list[Any]:
        """Put the faults of a stage into the graph that is captured on a stream: `abft_tsm2.core.faultpoint.record`.

        Visits are counted on from those until now, by each graph for itself.

        Raises
        ------
        ValueError
            For a site or a model that there is not in a graph.
        """
        with _one_at_a_time:
            here = threading.get_ident(), stage
            for *when, fault in self._passing:
                if tuple(when) == here:
                    fault.take_back(stream)
            self._passing = [one for one in self._passing if one[:2] != here]
            made = [self._record(plan, stream, arrays) for plan in self.plans if SITES[plan.site].stage == stage]
            self._recorded += made
            return list(made)

    def _record(self, plan: Plan, stream: int, arrays: Mapping[str, Array]) -> RecordedFault:
        site = SITES[plan.site]
        if plan.site not in GRAPH_SITES:
            raise ValueError(f"there is no site {plan.site!r} in a graph: it has {', '.join(GRAPH_SITES)}")
        fault = RecordedFault(plan, arrays[GRAPH_SITES[plan.site]], self.visits[site.stage], stays=bool(site.until))
        fault.plant(stream)
        if site.until and not plan.persistent:
            self._passing.append((threading.get_ident(), site.until, fault))
        return fault

    def _count_replays(self) -> None:
        """Note what graphs have planted. Synchronises with the device where there are any."""
        for fault in self._recorded:
            noted = sum(one.fault is fault for one in self.planted)
            more = fault.hits() - noted
            self.planted += [Planted(fault.plan, SITES[fault.plan.site].stage, fault.bit, fault)] * more

    def stop(self) -> None:
        """Plant nothing more, in graphs that are replayed later either."""
        self._count_replays()
        for fault in self._recorded:
            fault.switch_off()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of A and B, ... with the faults planted into its arguments or its result; see `inject`."""
        for plan in self.plans:
            if plan.site not in FUNCTION_SITES:
                raise ValueError(
                    f"site {plan.site!r} is inside of a protected operation: a function of one's own has "
                    "'product', 'partial', 'A' and 'B'; pass an Injector as on_stage for the others"
                )

        @functools.wraps(function)
        def faulty(*arguments: Any, **options: Any) -> Any:
            given = list(arguments)
            sites = {plan.site.partition(".")[0] for plan in self.plans}
            for position, name in enumerate("AB"):
                if name in sites and len(given) > position:
                    given[position] = given[position].copy(order="K")  # the caller's own array stays as it is
            operands = dict(zip("AB", given, strict=False))
            for stage in ("inputs", "encoded"):
                self(stage, operands)
            result = function(*given, **options)
            if not is_writable(result) or any(overlap(result, one) for one in operands.values()):
                result = result.copy(order="K")
            self("multiplied", {**operands, "C": result})
            return result

        return faulty


def _to_write(x: Array | None) -> Array | None:
    """An array that can be written to: a matrix that a whole batch has is a view that cannot."""
    if x is None or is_writable(x) or not isinstance(x.base, np.ndarray):
        return x
    owner = x.base
    if not is_writable(owner):
        return x
    before = (x.ctypes.data - owner.ctypes.data) // owner.itemsize
    whole = np.lib.stride_tricks.as_strided(owner, (before + 1,), (owner.itemsize,))
    return np.lib.stride_tricks.as_strided(whole[before:], x.shape, x.strides)


_one_at_a_time = threading.RLock()  # of an injector that operations of several threads reach


@contextmanager
def inject(*plans: Plan, target: Callable[..., Any] | None = None) -> Iterator[Any]:
    """Plant faults into the protected operations of a block, or into any function that returns a matrix.

    Every protected operation in the block goes the way that it goes without, and the faults are planted there: into
    small products and stacks as into large ones.

    Parameters
    ----------
    *plans : Plan
    target : callable, optional
        A function of a user's own: a plain product, a wrapper that computes twice, another library. It is called as
        ``target(A, B, ...)``, any number of times: a fault hits the call of its ``visit``, or all calls from that one
        on if it is persistent. Its sites are "product", "partial", "A" and "B"; operands are copied before they are
        changed.

    Yields
    ------
    callable
        Without `target` an `Injector`, which is in force in this thread, or asynchronous task, until the block ends. It
        may be passed as ``on_stage``, too: such a call goes another way, which has more sites ("u" and "repaired" of a
        product that nothing else is wrong in). With `target` the function to call in its place, whose ``injector`` says
        what was planted.

    Raises
    ------
    ValueError
        For a site that does not exist, or that the function does not have; in the block, for one that a CUDA graph does
        not have, or a model whose change depends on values there.
    RuntimeError
        At the end of the block, if a fault was never planted because its site was not reached: an experiment without
        its fault proves nothing.

    Notes
    -----
    On a GPU the sites "product", "partial", "A" and "B" of products are reached without a hook, behind the call of
    cuBLAS; a call that becomes a CUDA graph, or is captured into one, has the faults in the graph (but for "partial"),
    whose replays are counted on the device. They stop with the block. Of factorisations and solutions there the sites
    are those of W, of pivots and of unknowns ("lu.panel", "lu.solved", "lu.trailing", "lu.factored", "lu.finished_L",
    "solve.forward", "cholesky.finished_L", ...); a step has one visit for each operation, and no graph is made of it.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> from abft_tsm2 import faults
    >>> A, B = np.ones((3, 4)), np.ones((4, 5))
    >>> with faults.inject(faults.Plan("nan")):
    ...     C, report = ft.protected_gemm(A, B, return_report=True)
    >>> report.status.name, bool((C == 4).all())
    ('CORRECTED', True)

    A function of one's own:

    >>> with faults.inject(faults.Plan("nan"), target=np.matmul) as multiply:
    ...     first, second = multiply(A, B), multiply(A, B)
    >>> int(np.isnan(first).sum()), int(np.isnan(second).sum())
    (1, 0)
    """
    injector = Injector(*plans)
    if target is None:
        with planting(injector):
            try:
                yield injector
            finally:
                injector.stop()
    else:
        faulty: Any = injector.around(target)
        faulty.injector = injector
        yield faulty
    for plan in injector.missing():
        reached = ", ".join(f"{name} {count} times" for name, count in injector.visits.items()) or "none"
        raise RuntimeError(f"{plan} was never planted: stages reached are {reached}")
