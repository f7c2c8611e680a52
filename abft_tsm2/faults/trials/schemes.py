"""Schemes that protect a product, those of this package and those that a campaign compares with.

A scheme computes a product that may be faulty, and says whether it found a fault. Those of this package are called as
users call them, and faults are planted in places of the procedure itself (`abft_tsm2.core.faultpoint`), or through
``on_stage``; the others call ``multiply``, into which the same faults are planted.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, dtype_name
from abft_tsm2.checksum.encoded import encode
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.capture import current, stream_at
from abft_tsm2.core.faultpoint import planting
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.faults.injection import Injector
from abft_tsm2.faults.judge.oracle import widened
from abft_tsm2.faults.plan import require_known
from abft_tsm2.gemm import protected_gemm, verify_gemm
from abft_tsm2.policy import errstate
from abft_tsm2.report import Report, Status

Array = Any
STACKED = 3  # products
FAULT = {Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE}

CLOSE = {"float64": (1e-7, 1e-7), "float32": (1.3e-6, 1e-5), "float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
"""rtol and atol of each type: the defaults of torch.testing.assert_close."""

FIXED = {"float64": 1e-10, "float32": 0.1, "float16": 0.1, "bfloat16": 0.1}
"""Absolute tolerances of checksums, as published programs have them."""


@dataclass
class SchemeCall:
    """One product to be protected.

    Attributes
    ----------
    A, B : arrays
    xp : module
    hook : GemmHook
        Plants the faults: set for the call, or passed as ``on_stage``.
    multiply : callable
        ``multiply(A, B)``, with the faults in it.
    keep : dict
        What a scheme keeps from one product to the next of the same operands.
    out : array, optional
        Where the product goes; for schemes of this package.
    hooked : bool
        Whether the faults have sites that only ``on_stage`` reaches.
    """

    A: Array
    B: Array
    xp: Any
    hook: GemmHook
    multiply: Callable[[Array, Array], Array]
    keep: dict[str, Any] = field(default_factory=dict)
    out: Array | None = None
    hooked: bool = False


@dataclass(frozen=True)
class SchemeAnswer:
    """The answer of a scheme: the product, None where it refuses; whether it found a fault, and its report."""

    C: Array | None
    status: str = ""
    found: bool = False
    report: Report | None = None


@dataclass(frozen=True)
class Scheme:
    """A scheme that protects a product.

    Attributes
    ----------
    text : str
    run : callable
    own : bool
        Whether it is one of this package's, with all sites; the others have those of a function (`faults.inject`).
    captured : bool
        Whether it is for a GPU, and has `sites.GRAPH_SITES`.
    seeds : int
        By how many independent weights each line is checked.
    """

    text: str
    run: Callable[[SchemeCall], SchemeAnswer]
    own: bool = False
    captured: bool = False
    seeds: int = 1


class GemmHook:
    """Plants faults into a product, and shows it to a judge before it is checked.

    Parameters
    ----------
    injector : Injector
    watch : callable
        Given each product, with the faults in it.
    """

    def __init__(self, injector: Injector, watch: Callable[[Array], None]) -> None:
        self.injector, self.watch = injector, watch
        self._copies: list[Array] = []

    def __call__(self, stage: str, arrays: Mapping[str, Array]) -> None:
        self.injector(stage, arrays)
        if stage == "multiplied":
            self.watch(arrays["C"])

    def record(self, stage: str, stream: int, arrays: Mapping[str, Array]) -> list[Any]:
        """The same in a graph: a copy of each product is shown by `show`."""
        import cupy

        made = self.injector.record(stage, stream, arrays)
        if stage == "multiplied":
            self._copies.append(cupy.empty(arrays["C"].shape, arrays["C"].dtype))
            with current(stream_at(stream)):
                bit_pattern(self._copies[-1])[...] = bit_pattern(arrays["C"])
        return [*made, *self._copies]

    def show(self) -> None:
        """Show what replays have left."""
        for copy in self._copies:
            self.watch(copy)


def _answer(C: Array, report: Report) -> SchemeAnswer:
    found = bool({report.status, *report.also} & FAULT)
    return SchemeAnswer(C if report.ok else None, report.status.name, found or not report.ok, report)


def _raised(error: SilentDataCorruptionError) -> SchemeAnswer:
    return SchemeAnswer(None, error.report.status.name, True, error.report)


def _protected(hooked: bool = False, **options: Any) -> Callable[[SchemeCall], SchemeAnswer]:
    def run(call: SchemeCall) -> SchemeAnswer:
        call.hooked |= hooked
        return _called(call, call.A, call.B, **options)

    return run


def _called(call: SchemeCall, A: Any, B: Any, **options: Any) -> SchemeAnswer:
    """The protected product with the faults in it."""
    if call.hooked:
        options["on_stage"] = call.hook
    try:
        with planting(call.hook):
            C, report = protected_gemm(A, B, out=call.out, return_report=True, **options)
        report = report.wait()
    except SilentDataCorruptionError as error:
        return _raised(error)
    return _answer(C, report)


def _deferred(call: SchemeCall) -> SchemeAnswer:
    """Queued, and waited for later."""
    with errstate(sync=False):
        return _called(call, call.A, call.B)


def _captured(call: SchemeCall) -> SchemeAnswer:
    """Captured into a graph, which is replayed once."""
    C = call.xp.empty((call.A.shape[0], call.B.shape[1]), call.A.dtype) if call.out is None else call.out
    stream = call.xp.cuda.Stream(non_blocking=True)
    call.xp.cuda.Device().synchronize()
    with stream, errstate(sync=False):
        with planting(call.hook):
            stream.begin_capture()
            try:
                report = protected_gemm(call.A, call.B, out=C, return_report=True)[1]
            finally:
                graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    call.hook.show()
    try:
        return _answer(C, report.wait())
    except SilentDataCorruptionError as error:
        return _raised(error)


def _encoded(call: SchemeCall) -> SchemeAnswer:
    """Both operands are encoded beforehand, and right again for the next product."""
    if not call.keep:
        call.keep.update({name: encode(x.copy(order="K")) for name, x in (("A", call.A), ("B", call.B))})
    EA, EB = call.keep["A"], call.keep["B"]
    try:
        return _called(call, EA, EB)
    finally:
        for E, x in ((EA, call.A), (EB, call.B)):
            bit_pattern(E.array)[...] = bit_pattern(x)
        if any(one.plan.site == "s" for one in call.hook.injector.planted):  # which they carry
            call.keep.clear()


def _stacked(call: SchemeCall) -> SchemeAnswer:
    """The first product of a stack, all of which have these operands, each its own copy."""
    A, B = (_stack_of(x, call.xp) for x in (call.A, call.B))
    try:
        with planting(call.hook):
            C, report = protected_gemm(A, B, return_report=True)
    except SilentDataCorruptionError as error:
        return replace(_raised(error), report=error.report.products[0])
    return replace(_answer(C[0], report), report=report.products[0])


def _stack_of(x: Array, xp: Any) -> Array:
    """Copies of a matrix, in its order of memory."""
    by_columns = x.flags.f_contiguous and not x.flags.c_contiguous
    made = xp.empty((STACKED, *(x.shape[::-1] if by_columns else x.shape)), x.dtype)
    made = made.swapaxes(1, 2) if by_columns else made
    bit_pattern(made)[...] = bit_pattern(x)
    return made


def _second_seed(call: SchemeCall) -> SchemeAnswer:
    """The usual check, and another one with other weights, no two of which are alike."""
    answer = _protected()(call)
    if answer.C is None or answer.report is None:
        return answer
    left, right = call.A, call.B
    if answer.report.checks[0].side == "rows":
        right = encode(right, side="rows", weights=weights("balanced", right.shape[1], seed=2))
    else:
        left = encode(left, side="columns", weights=weights("balanced", left.shape[0], seed=2))
    again = verify_gemm(left, right, answer.C, on_error="detect")
    return answer if again.ok else SchemeAnswer(None, again.status.name, True, again)


def _double(call: SchemeCall) -> SchemeAnswer:
    first, second = call.multiply(call.A, call.B), call.multiply(call.A, call.B)
    same = bool((bit_pattern(first) == bit_pattern(second)).all())
    return SchemeAnswer(first, "SAME") if same else SchemeAnswer(None, "DIFFERENT", True)


def _rtol(call: SchemeCall) -> SchemeAnswer:
    C, other = call.multiply(call.A, call.B), call.multiply(call.A, call.B)
    rtol, atol = CLOSE[dtype_name(C.dtype)]
    first, second = widened(C, call.xp), widened(other, call.xp)
    with np.errstate(all="ignore"):
        close = bool((abs(first - second) <= atol + rtol * abs(second)).all())
    return SchemeAnswer(C, "CLOSE") if close else SchemeAnswer(None, "NOT CLOSE", True)


def _fixed(call: SchemeCall) -> SchemeAnswer:
    """K.-H. Huang, J. A. Abraham 1984: sums of rows and columns with ones, in float64 or float32 as the data are, and
    an absolute tolerance."""
    C, xp = call.multiply(call.A, call.B), call.xp
    kind = np.float64 if dtype_name(call.A.dtype) == "float64" else np.float32
    a, b, c = (widened(x, xp).astype(kind) for x in (call.A, call.B, C))
    allowed = FIXED[dtype_name(call.A.dtype)]
    with np.errstate(all="ignore"):
        rows = abs(c.sum(1) - a @ b.sum(1)) <= allowed
        columns = abs(c.sum(0) - a.sum(0) @ b) <= allowed
    return SchemeAnswer(C, "PASSED") if bool(rows.all() & columns.all()) else SchemeAnswer(None, "FAILED", True)


SCHEMES: Mapping[str, Scheme] = {
    "none": Scheme("the vendor's product as it is", lambda call: SchemeAnswer(call.multiply(call.A, call.B), "")),
    "protected": Scheme("protected_gemm: one check for each line of the longer side", _protected(), True),
    "rows": Scheme('protected_gemm(check="rows")', _protected(check="rows"), True),
    "columns": Scheme('protected_gemm(check="columns")', _protected(check="columns"), True),
    "both": Scheme('protected_gemm(check="both")', _protected(check="both"), True),
    "detect": Scheme('protected_gemm(on_error="detect"): no repair', _protected(on_error="detect"), True),
    "float32": Scheme('protected_gemm(verify="float32"), of 16-bit operands', _protected(verify="float32"), True),
    "tf32": Scheme('protected_gemm(precision="tf32"), on a GPU', _protected(precision="tf32"), True),
    "stacked": Scheme(
        f"protected_gemm of a stack of {STACKED} such products, the first of which counts", _stacked, True
    ),
    "encoded": Scheme("protected_gemm of operands from encode(), rechecked at each use", _encoded, True),
    "hooked": Scheme("protected_gemm(on_stage=...), which goes the way that has every stage", _protected(True), True),
    "deferred": Scheme("protected_gemm under errstate(sync=False), and report.wait()", _deferred, True),
    "captured": Scheme("protected_gemm in a CUDA graph, on a GPU", _captured, True, captured=True),
    "second seed": Scheme("protected_gemm, then verify_gemm with other weights", _second_seed, True, seeds=2),
    "double": Scheme("the product twice, and every bit compared", _double),
    "rtol": Scheme("the product twice, compared within the tolerances of torch.testing.assert_close", _rtol),
    "fixed": Scheme("sums of rows and columns with ones, compared within a fixed tolerance", _fixed),
}
"""Schemes by name; ``module:function`` names one of a user's own, called as ``function(A, B, multiply)``."""


def scheme_of(name: str) -> Scheme:
    """The scheme of that name.

    Raises
    ------
    ValueError
        If there is none, or its function cannot be imported.
    """
    if ":" not in name:
        require_known("scheme", name, SCHEMES)
        return SCHEMES[name]
    try:
        own = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"scheme {name!r}: {error}; it is to be module:function, importable from here") from error

    def run(call: SchemeCall) -> SchemeAnswer:
        C = own(call.A, call.B, call.multiply)
        return SchemeAnswer(C, "" if C is not None else "REFUSED", C is None)

    return Scheme(f"{name}(A, B, multiply), which returns the product or None", run)


def refused(A: Array, B: Array) -> Array:
    """The product of schemes that are given faults through ``on_stage``."""
    raise TypeError("this scheme multiplies by itself: its faults come through on_stage")


def faulty(injector: Injector, xp: Any, watch: Callable[[Array], None]) -> Callable[[Array, Array], Array]:
    """The vendor's product with faults in it; `watch` sees each result."""

    def plain(A: Array, B: Array) -> Array:
        if dtype_name(A.dtype) in ("float16", "bfloat16") and xp is np:  # NumPy's own would be rounded at each step
            return (A.astype(np.float32) @ B.astype(np.float32)).astype(A.dtype)
        return A @ B

    multiply = injector.around(plain)

    def watched(A: Array, B: Array) -> Array:
        C = multiply(A, B)
        watch(C)
        return C

    return watched
