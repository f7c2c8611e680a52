"""Cases of products on NumPy: small ones, large ones and stacks, encoded operands, and every option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, product
from typing import Any

import numpy as np

import abft_tsm2 as ft
from abft_tsm2.faults import Plan
from benchmarks.regress.changes import CHANGES, Fault, injected, plans, title
from benchmarks.regress.lines import Case

Array = Any
DTYPES = ("float64", "float32", "float16", "bfloat16")
SHAPES = ((20, 30, 10), (5, 3000, 7), (64, 500, 48), (130, 70, 90), (40, 30, 8200))
"""The last one is too long for the procedure of small products; so is none of the others."""
ORDERS = ("CC", "FC", "CF", "FF", "VC", "CV")
CHECKS = ("auto", "rows", "columns", "both")

FAULTS = (
    *(Fault("multiplied", "C", change) for change in CHANGES),
    *(Fault("multiplied", "C", change, again="corrected") for change in ("element", "nan")),
    Fault("multiplied", "C", "element", again="multiplied"),
    *(
        Fault(stage, array, change)
        for stage in ("inputs", "encoded")
        for array in "AB"
        for change in ("element", "nan")
    ),
    *(Fault("encoded", array, "element", until="multiplied") for array in "AB"),
    *(Fault("encoded", array, change) for array in "st" for change in ("last", "nan")),
    *(Fault("verified", "u", change) for change in ("last", "nan")),
    Fault("verified", "C", "element"),
    *(Fault(stage, array, "last", beside=True) for stage, array in (("encoded", "s"), ("encoded", "t"))),
    Fault("corrected", "C", "last", beside=True),
)
FEW = tuple(
    one for one in FAULTS if str(one) in {"multiplied.C element 0", "multiplied.C row 0", "encoded.A element 0"}
)


def kind(dtype: str) -> Any:
    if dtype != "bfloat16":
        return np.dtype(dtype)
    from ml_dtypes import bfloat16

    return np.dtype(bfloat16)


def matrix(shape: Sequence[int], dtype: str, order: str, seed: int) -> Array:
    """Normal entries in row ("C") or column ("F") order, or every second column of a matrix ("V"), turned ("R")."""
    rows, columns = shape[-2:]
    X = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(kind(dtype))
    if order == "F":
        return X.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    if order == "V":
        wide = np.zeros((*shape[:-2], rows, 2 * columns), X.dtype)
        wide[..., ::2] = X
        return wide[..., ::2]
    return X[..., ::-1, ::-1] if order == "R" else X


def pair(m: int, k: int, n: int, dtype: str, order: str = "CC") -> Callable[[], tuple[Array, Array]]:
    return lambda: (matrix((m, k), dtype, order[0], 1), matrix((k, n), dtype, order[1], 2))


def gemm(**options: Any) -> Callable[..., Any]:
    """A protected product with these options, and its report unless that is declined."""
    chosen: Any = {"return_report": True, **options}
    return lambda *operands, **more: ft.protected_gemm(*operands, **chosen, **more)


def with_faults(name: str, operands: Any, call: Any, faults: Sequence[Fault], group: str) -> Iterator[Case]:
    """A clean case, and one for each fault and way of planting it."""
    yield Case(f"{name} clean", operands, call)
    for fault, by_hook in product(faults, (False, True)):
        route = "hook" if by_hook else "users"
        own = f"{group} {route} {fault.stage}.{fault.array}"
        yield Case(f"{name} {route} {fault}", operands, call, fault.planter, by_hook, own)


def cases() -> Iterator[Case]:
    for some in (grid, results_alone, options, sixteen_bits, encoded, stored, stacks, shapes, sites):
        yield from some()


def grid() -> Iterator[Case]:
    """Every type, size and fault; orders and checks in turn."""
    turns = cycle(product(CHECKS, ORDERS))
    for dtype, (m, k, n) in product(DTYPES, SHAPES):
        for _ in range(2 if n < 80 else 1):
            check, order = next(turns)
            name = f"gemm {dtype} {m}x{k}x{n} {order} {check}"
            yield from with_faults(name, pair(m, k, n, dtype, order), gemm(check=check), FAULTS, "gemm")
        next(turns)


def results_alone() -> Iterator[Case]:
    """Without a report, which is another way through the procedures of small products."""
    turns = cycle(product(CHECKS, ORDERS))
    for dtype, (m, k, n) in product(("float64", "float32", "bfloat16"), ((20, 30, 10), (64, 500, 48), (40, 30, 8200))):
        check, order = next(turns)
        name = f"alone {dtype} {m}x{k}x{n} {order} {check}"
        operands = pair(m, k, n, dtype, order)
        yield from with_faults(name, operands, gemm(check=check, return_report=False), FAULTS, "alone")
        for _ in range(4):
            next(turns)


# ---- options -------------------------------------------------------------------------------------------------------


def into(layout: str, dtype: str = "") -> Callable[..., Any]:
    """A product written to an array of the caller's, which is returned beside the result: both have to be it."""

    def call(A: Array, B: Array, *c: Array, **more: Any) -> Any:
        shape = (*A.shape[:-1], B.shape[-1])
        out = c[0] if layout == "c" else matrix(shape, dtype or str(A.dtype), layout, 3)
        options: Any = {"alpha": 0.75, "beta": -1.5} if c else {}
        result, report = ft.protected_gemm(A, B, *c, out=out, return_report=True, **options, **more)
        return result is out, out, report

    return call


def options() -> Iterator[Case]:
    for dtype, (m, k, n) in product(("float64", "float32", "bfloat16"), ((20, 30, 10), (130, 70, 90))):
        three = lambda m=m, k=k, n=n, dtype=dtype: (*pair(m, k, n, dtype)(), matrix((m, n), dtype, "C", 3))  # noqa: E731
        size, two = f"{dtype} {m}x{k}x{n}", pair(m, k, n, dtype)
        for alpha, beta in ((1.0, 1.0), (0.5, -2.0), (-1.25, 0.0), (0.0, 3.0)):
            call = gemm(alpha=alpha, beta=beta)
            yield from with_faults(f"factors {size} {alpha} {beta}", three, call, FAULTS, "factors")
        yield from with_faults(f"scaled {size}", two, gemm(alpha=-0.5), FEW, "scaled")
        for layout in "CFVR":
            yield from with_faults(f"out {size} {layout}", two, into(layout), FEW, "out")
        yield from with_faults(f"out {size} added", three, into("F"), FEW, "out")
        yield from with_faults(f"out {size} is c", three, into("c"), FEW, "out")
        for on_error in ("correct", "detect", "raise"):
            call = gemm(on_error=on_error)
            yield from with_faults(f"on_error {size} {on_error}", two, call, FAULTS, f"on_error {on_error}")
    yield from policies()


def policies() -> Iterator[Case]:
    """`errstate`: what is warned of, raised, logged or ignored."""
    for corrected, changed in product(("ignore", "warn", "raise", "log"), ("raise", "warn")):

        def call(*operands: Array, _c: Any = corrected, _i: Any = changed, **more: Any) -> Any:
            with ft.errstate(corrected=_c, input_changed=_i, uncorrectable=_i):
                return ft.protected_gemm(*operands, return_report=True, **more), ft.geterr()

        yield from with_faults(f"errstate {corrected} {changed}", pair(60, 50, 40, "float64"), call, FEW, "errstate")


def sixteen_bits() -> Iterator[Case]:
    """16-bit operands: rounded last, or not at all."""
    for dtype, (m, k, n) in product(("float16", "bfloat16"), ((20, 30, 10), (64, 500, 48))):
        two = pair(m, k, n, dtype)
        for name, chosen in (("verified", {"verify": "float32"}), ("wide", {"out_dtype": "float32"})):
            yield from with_faults(f"{name} {dtype} {m}x{k}x{n}", two, gemm(**chosen), FAULTS, name)
        three = lambda m=m, n=n, dtype=dtype, two=two: (*two(), matrix((m, n), dtype, "C", 3))  # noqa: E731
        call = gemm(verify="float32", alpha=0.5, beta=2.0)
        yield from with_faults(f"verified {dtype} {m}x{k}x{n} added", three, call, FEW, "verified")
        yield from with_faults(f"wide {dtype} {m}x{k}x{n} out", two, into("C", "float32"), FEW, "wide")


# ---- encoded operands ----------------------------------------------------------------------------------------------


def coded(
    which: str, m: int, k: int, n: int, dtype: str, change: str = "", **options: Any
) -> Callable[[], tuple[Any, Any]]:
    """Operands of which some are encoded; one of them is changed afterwards, in memory."""

    def operands() -> tuple[Any, Any]:
        A, B = pair(m, k, n, dtype)()
        E = ft.encode(A, **options) if "A" in which else A
        F = ft.encode(B, **options) if "B" in which else B
        if change:
            CHANGES[change](A if which[-1] == "A" else B)
        return E, F

    return operands


def encoded() -> Iterator[Case]:
    two = (("float64", (60, 50, 40)), ("float32", (20, 30, 10)), ("bfloat16", (64, 500, 48)))
    turns = cycle(CHECKS)
    for (dtype, shape), which in product(two, ("A", "B", "AB")):
        for recheck, repair in product((True, False), (True, False)):
            name = f"encoded {which} {dtype} {'x'.join(map(str, shape))} recheck {recheck} repair {repair}"
            how: dict[str, Any] = {"recheck": recheck, "repair": repair}
            call = gemm(check=next(turns))
            some = FAULTS[::2] if recheck else FAULTS[1::2]
            yield from with_faults(name, coded(which, *shape, dtype, **how), call, some, "encoded")
            for change in ("element", "nan", "row", "column", "everything", "swapped"):
                yield Case(f"{name} stored {change}", coded(which, *shape, dtype, change, **how), call)
                alone = gemm(return_report=False)
                yield Case(f"{name} stored {change} alone", coded(which, *shape, dtype, change, **how), alone)
        next(turns)
    for weights in ("ones", "linear", "normal", "dct"):
        operands = coded("AB", 60, 50, 40, "float64", weights=weights)
        yield from with_faults(f"weights {weights}", operands, gemm(check="both"), FEW, "weights")


def stored() -> Iterator[Case]:
    """Encoded matrices by themselves, existing products, and what else is public."""
    for dtype, change, repair in product(DTYPES, ("", "element", "nan", "row", "block", "everything"), (True, False)):
        one = coded("A", 60, 50, 40, dtype, change, repair=repair)
        name = f"stored {dtype} {change or 'clean'} {repair}"
        yield Case(f"{name} verify", one, lambda E, _: E.verify())
        yield Case(f"{name} correct", one, lambda E, _: E.correct())
        yield Case(f"{name} product", one, lambda E, B: E @ B)
        yield Case(f"{name} turned", one, lambda E, _: E.T)
    yield from existing()
    for m, k, n in ((1, 1, 1), *SHAPES):
        yield Case(f"limit {m}x{k}x{n}", tuple, lambda s=(m, k, n): [ft.detection_limit(*s, dtype=d) for d in DTYPES])
    for name in ("balanced", "ones", "linear", "signs", "normal", "vandermonde", "chebyshev", "dct"):
        yield Case(f"weights {name}", tuple, lambda name=name: [ft.weights(name, n, 2) for n in (1, 5, 1000)])
    yield from plain()


def existing() -> Iterator[Case]:
    for dtype, change, check in product(DTYPES, ("", *CHANGES), CHECKS):

        def operands(dtype: str = dtype, change: str = change) -> tuple[Array, ...]:
            A, B = pair(60, 50, 40, dtype)()
            C = np.asarray(A.astype(np.float32) @ B.astype(np.float32) if A.itemsize == 2 else A @ B).astype(A.dtype)
            if change:
                CHANGES[change](C)
            return A, B, C

        call = lambda A, B, C, check=check: ft.verify_gemm(A, B, C, check=check)  # noqa: E731
        yield Case(f"verify {dtype} {check} {change or 'clean'}", operands, call)
        call = lambda A, B, C: ft.verify_gemm(A, B, C, C.copy(), alpha=0.0, beta=1.0, on_error="detect")  # noqa: E731
        yield Case(f"verify {dtype} {check} {change or 'clean'} itself", operands, call)


def plain() -> Iterator[Case]:
    """Products without protection."""
    for dtype, (m, k, n) in product(DTYPES, ((500, 40, 3), (4, 600, 5), (70, 8, 60))):
        for order, scale in product(("CC", "FF", "VR"), ({}, {"alpha": -0.5})):
            two, name = pair(m, k, n, dtype, order), f"{dtype} {m}x{k}x{n} {order} {scale}"
            yield Case(f"matmul {name}", two, lambda A, B, s=scale: ft.tall_skinny_matmul(A, B, **s))
            yield Case(f"tsm2r {name}", two, lambda A, B, s=scale: ft.tsm2r(A, B, **s))
            yield Case(f"tsm2l {name}", two, lambda A, B, s=scale: ft.tsm2l(A, B, **s))

    def both(A: Array, B: Array) -> Any:
        found = ft.encode_both(
            A, ft.weights("normal", A.shape[1], 2), ft.weights("normal", A.shape[0], 2), squares=True
        )
        return [getattr(found, name) for name in sorted(getattr(found, "_fields", ()))] or list(found)

    for dtype, order in product(DTYPES, ("CC", "FF", "VV")):
        yield Case(f"encode_both {dtype} {order}", pair(150, 90, 3, dtype, order), both)


# ---- stacks, vectors, nothing --------------------------------------------------------------------------------------

BATCHES = (
    ((7, 20, 30), (7, 30, 20)),
    ((3, 40, 30), (30, 20)),
    ((40, 30), (3, 30, 20)),
    ((2, 1, 24, 16), (3, 16, 40)),
    ((3, 300, 200), (3, 200, 250)),
    ((2, 5, 3000), (2, 3000, 4)),
)


def stacks() -> Iterator[Case]:
    visited = (*FAULTS, *(Fault("multiplied", "C", change, 2) for change in ("element", "row", "nan", "everything")))
    turns = cycle(CHECKS)
    for (left, right), dtype in product(BATCHES, ("float64", "float32", "bfloat16")):
        orders = ("CC", "VF") if dtype == "float64" else ("CC",)
        for order in orders:
            two = lambda a=left, b=right, d=dtype, o=order: (matrix(a, d, o[0], 1), matrix(b, d, o[1], 2))  # noqa: E731
            name = f"stack {dtype} {left} {right} {order}"
            faults = visited if left[-2] < 300 else FEW
            yield from with_faults(name, two, gemm(check=next(turns)), faults, "stack")
            yield from with_faults(f"{name} alone", two, gemm(return_report=False), FEW, "stack alone")
        whole = (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
        three = lambda two=two, whole=whole, d=dtype: (*two(), matrix(whole, d, "C", 3))  # noqa: E731
        yield from with_faults(f"{name} added", three, gemm(alpha=0.5, beta=-2.0), visited[:14], "stack added")
        yield from with_faults(f"{name} out", three, into("c"), FEW, "stack out")
        yield from with_faults(f"{name} detect", two, gemm(on_error="detect"), FEW, "stack detect")
        if dtype == "bfloat16":
            yield from with_faults(f"{name} verified", two, gemm(verify="float32"), FEW, "stack verified")
            yield from with_faults(f"{name} wide", two, gemm(out_dtype="float32"), FEW, "stack wide")


def shapes() -> Iterator[Case]:
    """Vectors, sizes of 0 and 1, and operands that are refused: by the kind of the exception."""
    some = ((), (0,), (1,), (30,), (0, 30), (30, 0), (1, 1), (1, 30), (30, 1), (20, 30), (0, 20, 30), (2, 30, 5))
    for left, right in product(some, some):
        two = lambda a=left, b=right: (_of(a, 1), _of(b, 2))  # noqa: E731
        for report in (True, False):
            yield Case(f"shapes {left} {right} report {report}", two, gemm(return_report=report))
    kinds = ("float64", "float32", "float16", ">f8", "int64", "bool", "complex128", "int8")
    for left, right in product(kinds, kinds):
        two = lambda a=left, b=right: (_of((20, 30), 1).astype(a), _of((30, 10), 2).astype(b))  # noqa: E731
        yield Case(f"types {left} {right}", two, gemm())
    for name, wrong in {
        "check": {"check": "all"},
        "on_error": {"on_error": "ignore"},
        "verify": {"verify": "float64"},
        "precision": {"precision": "tf32"},
        "out_dtype": {"out_dtype": "float16"},
        "beta": {"beta": 1.0},
        "alpha": {"alpha": "1"},
    }.items():
        yield Case(f"refused {name}", pair(20, 30, 10, "float32"), gemm(**wrong))


def _of(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def sites() -> Iterator[Case]:
    """The sites of products that `abft_tsm2.faults` names."""
    names = ("product", "partial", "A", "B", "A.stored", "B.stored", "s", "t", "u", "repaired")
    beside = Plan("bit_flip", bits="exponent_high", seed=(5,))
    operands = {
        "small": pair(60, 50, 40, "float64"),
        "large": pair(40, 30, 8200, "float32"),
        "stack": lambda: (matrix((4, 20, 30), "float32", "C", 1), matrix((4, 30, 20), "float32", "C", 2)),
        "encoded": coded("AB", 60, 50, 40, "float64"),
    }
    for (name, two), site in product(operands.items(), names):
        for plan in plans(site, 1, 4):
            for by_hook in (False, True):
                way = "hook" if by_hook else "users"
                own = f"sites {name} {way} {site}"
                both = (beside, plan) if site in ("s", "repaired") else (plan,)
                yield Case(f"sites {name} {way} {title(plan)}", two, gemm(), injected(*both), by_hook, own)
