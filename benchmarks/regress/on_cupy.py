"""Cases of products, factorisations and solutions of CuPy arrays: on a CPU that stands for a card, or on a card.

What stands for CuPy, and runs the kernels, is that of the tests of the version that is run: `stand_ins`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any, Protocol

import numpy as np
import scipy.linalg

import abft_tsm2 as ft
from abft_tsm2.faults import Plan
from benchmarks.regress.changes import Fault, injected, title
from benchmarks.regress.factorisations import normal, positive
from benchmarks.regress.lines import Case

Array = Any
Move = Callable[[Array], Array]
FAULTS = (
    *(Fault("multiplied", "C", change) for change in ("element", "nan", "row", "everything", "scattered")),
    Fault("multiplied", "C", "element", again="corrected"),
    *(Fault("encoded", array, "element") for array in "AB"),
    Fault("inputs", "A", "element"),
)
HOOKED = (
    *FAULTS,
    Fault("encoded", "s", "last", beside=True),
    *(Fault(*one, "last") for one in (("encoded", "t"), ("verified", "u"))),
)
LU_SITES = {
    "online": ("lu.panel", "lu.solved", "lu.trailing", "lu.finished_L", "lu.finished_U"),
    "offline": ("lu.panel", "lu.solved", "lu.trailing", "lu.factored_L", "lu.factored_U"),
}
KEPT_CALLS = 8
"""Of one product: enough for it to become a graph, and for replays of that."""


class StandIns(Protocol):
    """What stands for a card on a CPU: contexts in which CuPy is replaced."""

    def cupy(self, name: str) -> AbstractContextManager[Any]:
        """The module that stands for CuPy: for "products", "lu" or "cholesky"."""

    def solutions(self) -> AbstractContextManager[Move]:
        """What turns a NumPy array into one that solutions take for CuPy's."""


stand_ins: StandIns | None = None
"""Set by the command that has them (`tests.support.gate_on_cpu`): benchmarks import no tests."""


def cases() -> Iterator[Case]:
    if stand_ins is None:
        return
    for name, some in (("products", products), ("lu", lu), ("cholesky", cholesky)):
        with stand_ins.cupy(name) as cupy:
            yield from some(cupy)
    with stand_ins.solutions() as on_card:
        yield from solutions(on_card)


# ---- products ------------------------------------------------------------------------------------------------------


def products(cupy: Any) -> Iterator[Case]:
    for dtype, (m, k, n) in product(("float32", "float64", "float16"), ((60, 50, 70), (33, 200, 5))):
        two = lambda d=dtype, m=m, k=k, n=n: tuple(map(cupy.asarray, _pair(m, k, n, d)))  # noqa: E731
        for check in ("auto", "both") if dtype == "float32" else ("auto",):
            call = lambda A, B, c=check, **more: ft.protected_gemm(A, B, check=c, return_report=True, **more)  # noqa: E731
            yield from with_faults(f"cupy gemm {dtype} {m}x{k}x{n} {check}", two, call)
    yield from product_options(cupy)
    yield from queued(cupy)


def _pair(m: int, k: int, n: int, dtype: str, batch: tuple[int, ...] = ()) -> tuple[Array, Array]:
    return normal((*batch, m, k), dtype), normal((*batch, k, n), dtype, 2)


def with_faults(name: str, operands: Callable[[], Any], call: Callable[..., Any], few: bool = False) -> Iterator[Case]:
    yield Case(f"{name} clean", operands, call)
    for by_hook, faults in ((False, FAULTS), (True, HOOKED)):
        way = "hook" if by_hook else "users"
        for fault in faults[:1] if few else faults:
            group = f"cupy gemm {way} {fault.stage}.{fault.array}"
            yield Case(f"{name} {way} {fault}", operands, call, fault.planter, by_hook, group)


def product_options(cupy: Any) -> Iterator[Case]:
    two = lambda: tuple(map(cupy.asarray, _pair(60, 50, 70, "float32")))  # noqa: E731
    three = lambda: (*two(), cupy.asarray(normal((60, 70), "float32", 3)))  # noqa: E731
    for how in (
        {"alpha": 0.5},
        {"check": "rows"},
        {"check": "columns"},
        {"on_error": "detect"},
        {"on_error": "raise"},
        {"return_report": False},
    ):
        call = lambda A, B, how=how, **more: ft.protected_gemm(A, B, **{"return_report": True, **how}, **more)  # noqa: E731
        yield from with_faults(f"cupy gemm {how}", two, call, few=True)
    added = lambda A, B, c, **more: ft.protected_gemm(A, B, c, alpha=0.5, beta=2.0, return_report=True, **more)  # noqa: E731
    yield from with_faults("cupy gemm added", three, added, few=True)
    into = lambda A, B, c, **more: ft.protected_gemm(A, B, out=c, return_report=True, **more)  # noqa: E731
    yield from with_faults("cupy gemm out", three, into, few=True)
    stack = lambda: tuple(map(cupy.asarray, _pair(30, 20, 25, "float32", (3,))))  # noqa: E731
    yield from with_faults("cupy gemm stack", stack, lambda A, B, **m: ft.protected_gemm(A, B, return_report=True, **m))
    half = lambda: tuple(map(cupy.asarray, _pair(60, 50, 70, "float16")))  # noqa: E731
    for how in ({"verify": "float32"}, {"out_dtype": "float32"}):
        call = lambda A, B, how=how, **more: ft.protected_gemm(A, B, return_report=True, **how, **more)  # noqa: E731
        yield from with_faults(f"cupy gemm half {how}", half, call, few=True)
    coded = lambda: (ft.encode(two()[0]), two()[1])  # noqa: E731
    yield from with_faults(
        "cupy gemm encoded", coded, lambda A, B, **m: ft.protected_gemm(A, B, return_report=True, **m)
    )
    existing = lambda A, B, c: ft.verify_gemm(A, B, c, on_error="detect")  # noqa: E731
    yield Case("cupy verify wrong", three, existing)
    yield Case("cupy verify right", two, lambda A, B: ft.verify_gemm(A, B, cupy.matmul(A, B), on_error="detect"))


def queued(cupy: Any) -> Iterator[Case]:
    """Products that are not waited for, that become graphs, and that are captured."""
    three = lambda: tuple(map(cupy.asarray, (*_pair(60, 50, 70, "float32"), np.zeros((60, 70), np.float32))))  # noqa: E731
    element = Plan("bit_flip", bits="exponent_high", visit=5, seed=(4,))
    first = Plan("bit_flip", bits="exponent_high", seed=(4,))
    stays = Plan("bit_flip", "A", "exponent_high", seed=(4,), persistent=True)
    for sync in (True, False):

        def repeated(A: Array, B: Array, C: Array, sync: bool = sync) -> list[Any]:
            found = []
            with ft.errstate(sync=sync):
                for _ in range(KEPT_CALLS):
                    report = ft.protected_gemm(A, B, out=C, return_report=True)[1].wait()
                    found += [report, np.array(C if not hasattr(C, "get") else C.get())]
            return found

        yield Case(f"cupy repeated {sync} clean", three, repeated)
        for plan in (element, first, stays):
            yield Case(f"cupy repeated {sync} {title(plan)}", three, repeated, injected(plan))

    def pending(A: Array, B: Array, C: Array) -> Any:
        found = []
        with ft.errstate(sync=False, corrected="ignore"):
            for added in ((), (C,)):  # the second one is no call that is known
                found += ft.protected_gemm(A, B, *added, beta=float(len(added)), return_report=True)
        return [one.wait() if isinstance(one, ft.Report) else one for one in found]

    def captured(A: Array, B: Array, C: Array) -> Any:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, ft.errstate(sync=False, corrected="ignore"):
            stream.begin_capture()
            try:
                report = ft.protected_gemm(A, B, out=C, return_report=True)[1]
            finally:
                graph = stream.end_capture()
            for _ in range(KEPT_CALLS):
                graph.launch(stream)
            stream.synchronize()
            return C, report.wait()

    for name, call in (("pending", pending), ("captured", captured)):
        yield Case(f"cupy {name} clean", three, call)
        for plan in (first, element, stays, Plan("row", factor=0.0, seed=(4,)), Plan("tile", factor=1.5, seed=(4,))):
            yield Case(f"cupy {name} {title(plan)}", three, call, injected(plan))


# ---- factorisations ------------------------------------------------------------------------------------------------


def lu(cupy: Any) -> Iterator[Case]:
    for dtype, mode in product(("float64", "float32"), ("online", "offline")):
        one = lambda d=dtype: (cupy.asarray(normal((200, 200), d)),)  # noqa: E731
        call = lambda A, mode=mode, **more: ft.protected_lu_factor(A, mode=mode, return_report=True, **more)  # noqa: E731
        yield Case(f"cupy lu {mode} {dtype} clean", one, call)
        for site, visit in product(LU_SITES[mode], (0, 1) if dtype == "float64" else (1,)):
            plan = Plan("bit_flip", site, "exponent_high", visit=visit, seed=(3,))
            group = f"cupy lu {mode} {site}"
            yield Case(f"cupy lu {mode} {dtype} {title(plan)}", one, call, injected(plan), group=group)
    yield Case("cupy lu singular", lambda: (cupy.asarray(np.ones((60, 60))),), ft.protected_lu_factor)


def cholesky(cupy: Any) -> Iterator[Case]:
    for dtype, lower in product(("float64", "float32"), (True, False)):
        one = lambda d=dtype: (cupy.asarray(positive(150, d)),)  # noqa: E731
        call = lambda A, lower=lower, **more: ft.protected_cholesky(A, lower, return_report=True, **more)  # noqa: E731
        yield Case(f"cupy cholesky {lower} {dtype} clean", one, call)
        for site in ("cholesky.finished_L", "cholesky.encoded_A"):
            plan = Plan("bit_flip", site, "exponent_high", seed=(3,))
            yield Case(f"cupy cholesky {lower} {dtype} {title(plan)}", one, call, injected(plan))


def solutions(on_card: Move) -> Iterator[Case]:
    for dtype, count, trans in product(("float64", "float32"), (1, 3), (0, 1)):

        def operands(dtype: str = dtype, count: int = count) -> tuple[Array, ...]:
            a, b = normal((100, 100), dtype), normal((100, count), dtype, 2)
            lu, piv = scipy.linalg.lu_factor(a)
            return on_card(np.asarray(lu, order="F")), on_card(piv), on_card(b)

        def call(lu: Array, piv: Array, b: Array, trans: int = trans, **more: Any) -> Any:
            return ft.protected_lu_solve((lu, piv), b, trans, return_report=True, **more)

        yield Case(f"cupy lu_solve {dtype} {count} {trans} clean", operands, call)
        for site in ("solve.forward", "solve.backward"):
            plan = Plan("bit_flip", site, "exponent_high", seed=(3,))
            group = f"cupy lu_solve {site}"
            yield Case(
                f"cupy lu_solve {dtype} {count} {trans} {title(plan)}", operands, call, injected(plan), group=group
            )
