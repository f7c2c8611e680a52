"""Calls whose arguments were checked before: of the next one with such arguments only addresses are new, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from abft_tsm2 import policy
from abft_tsm2.checksum.device.record import CallInfo, untouched
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import faultpoint
from abft_tsm2.core.memory import thread_of
from abft_tsm2.gemm import fallback, pending, replays
from abft_tsm2.gemm.device import DeviceProduct
from abft_tsm2.gemm.operands import GemmProblem
from abft_tsm2.gemm.pending import Pending
from abft_tsm2.gemm.plan import CallOptions, Operands, ProductPlan, mark, order_of, wide_product
from abft_tsm2.gemm.replays import GraphCall
from abft_tsm2.report import Report

_MOST = 4096  # that are kept


@dataclass(eq=False)
class KnownCall:
    """What a call came to whose arguments were checked.

    Attributes
    ----------
    plan, options, info
        Of the product.
    shape, dtype
        Of the result.
    wide : str or None
        The order of the float32 product, if there is one.
    extents : tuple of int
        Bytes from the first element of A, B and C to the end of the last.
    graphs : dict
        `GraphCall` by the addresses of A, B and C, the stream, and the block that faults are planted in.
    """

    plan: ProductPlan
    options: CallOptions
    info: CallInfo
    shape: tuple[int, ...]
    dtype: Any
    wide: str | None
    extents: tuple[int, ...]
    graphs: dict[Any, GraphCall] = field(default_factory=dict)

    def operands(self, A: Any, B: Any, C: Any, call: GraphCall | None = None) -> Operands:
        """Of a call; of one that has run as a graph, with its float32 product."""
        if call is not None:
            wide = call.wide
        else:
            wide = wide_product(self.shape, self.wide) if self.wide else None
        if len(self.shape) == 3:
            import cupy

            A, B = (x if x.ndim == 3 else cupy.broadcast_to(x, (self.shape[0], *x.shape)) for x in (A, B))
        return Operands(A, B, C, None, wide)

    def overlap(self, A: Any, B: Any, C: Any) -> bool:
        """Whether C may share memory with A or B."""
        at, reach = C.data.ptr, self.extents[2]
        a, b = A.data.ptr, B.data.ptr
        return bool((at < a + self.extents[0] and a < at + reach) or (at < b + self.extents[1] and b < at + reach))


_known: dict[Any, KnownCall] = {}


def key_of(a: Any, b: Any, out: Any, options: tuple[Any, ...]) -> Any:
    """All that a call depends on but addresses, where it is of the kind that is remembered; else None."""
    carried = None
    if isinstance(b, Encoded):
        carried, b = None if b.device is None else b.device.carried("rows", b.recheck, b), b.array
        if carried is None:
            return None
    cupy = sys.modules.get("cupy")
    if cupy is None or type(a) is not cupy.ndarray or type(b) is not cupy.ndarray:
        return None
    if out is not None and type(out) is not cupy.ndarray:
        return None
    device = a.data.device_id
    if not device == b.data.device_id == cupy.cuda.runtime.getDevice() or (
        out is not None and out.data.device_id != device
    ):
        return None
    try:
        hash(options)
    except TypeError:  # the checks of the operands say what is wrong with them
        return None
    return mark(a), mark(b), mark(out), carried, device, options


def remember(key: Any, product: DeviceProduct) -> None:
    """Know the calls of this key (`key_of`) from now on."""
    A, B, C = product.operands[:3]
    if any(stride < 0 for x in (A, B, C) for stride in x.strides):  # which `overlap` does not see through
        return
    if len(_known) >= _MOST:
        _known.clear()
    wide = None if product.operands.wide is None else order_of(C)
    extents = tuple(map(_extent, (A, B, C)))
    _known[key] = KnownCall(product.plan, product.options, product.info, C.shape, C.dtype, wide, extents)


def _extent(x: Any) -> int:
    """Bytes from the first element to the end of the last."""
    return int(sum((n - 1) * stride for n, stride in zip(x.shape, x.strides, strict=True)) + x.itemsize)


def run(
    key: Any,
    operands: tuple[Any, Any, Any],
    stream: Any,
    on_error: str | None,
    *,
    reported: bool,
    limits: bool,
    ask: Callable[[Any], GemmProblem],
) -> tuple[Any, Report | None] | None:
    """Make a known call of a, b and out on the current stream: the result, and the report if it is `reported`.

    None where the call is not known, or `out` may share memory with operands. `limits`: as of `fallback.run`. `ask`:
    what makes the problem of a result, where the kernels leave it to the host.
    """
    a, b, out = operands
    known = _known.get(key)
    if known is None:
        return None
    A, B = a, b.array if isinstance(b, Encoded) else b
    if out is None:
        import cupy

        C = cupy.empty(known.shape, known.dtype)
    else:
        C = out
    # A graph has the faults that were planted when it was made.
    where = A.data.ptr, B.data.ptr, C.data.ptr, stream.ptr, thread_of(stream.ptr), faultpoint.number()
    call, launched = known.graphs.get(where), None
    if call is None and out is not None and known.overlap(A, B, C):
        return None
    if replays.enabled[0]:
        call = call or replays.due(known, where, lambda: known.operands(A, B, C))
        launched = None if call is None else call.launch(stream)
    if launched is None:
        product = DeviceProduct(known.plan, known.options, known.info, known.operands(A, B, C), limits=limits)
        if policy.synchronous():
            return C, product.report() or fallback.verify_on_host(product, ask(C))
        return C, policy.queued(pending.queue(product), on_error, known.info if reported else None)
    assert call is not None
    records, event = launched
    if not policy.synchronous():
        verdict = Pending(records, event, call, tuple(map(pending.owner_of, (A, B, C))))
        return C, policy.queued(verdict, on_error, known.info if reported else None)
    try:
        for record in records:
            record.bring(stream.ptr)
        stream.synchronize()
    except BaseException:
        for record in records:
            record.free()
        raise
    if not reported and all(map(untouched, records)):
        for record in records:
            record.free()
        return C, None
    product = DeviceProduct(known.plan, known.options, known.info, known.operands(A, B, C, call), limits=limits)
    return C, product.settle(records, call) or fallback.verify_on_host(product, ask(C))
