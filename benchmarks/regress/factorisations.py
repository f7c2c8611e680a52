"""Cases of LU, Cholesky and solutions on NumPy: a fault at every site and visit, and every option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import scipy.linalg

import abft_tsm2 as ft
from abft_tsm2.faults import SITES, Plan
from benchmarks.regress.changes import injected, plans, title, visits_of
from benchmarks.regress.lines import Case

Array = Any
Operands = Callable[[], tuple[Any, ...]]
BLOCK = 64
ORDER = 200
"""Of matrices: steps with and without a trailing matrix, and a last one that is narrower."""


def normal(shape: tuple[int, ...], dtype: str = "float64", seed: int = 1) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def positive(n: int, dtype: str = "float64", batch: tuple[int, ...] = ()) -> Array:
    X = normal((*batch, n, n))
    return (X @ X.swapaxes(-1, -2) + n * np.eye(n)).astype(dtype)


def system(n: int, count: int, dtype: str = "float64") -> tuple[Array, Array]:
    return normal((n, n), dtype), normal((n, count), dtype, 2)


def factored(n: int, count: int, dtype: str = "float64") -> tuple[Any, Array]:
    A, b = system(n, count, dtype)
    return scipy.linalg.lu_factor(A), b


def factored_positive(n: int, count: int, dtype: str = "float64") -> tuple[Any, Array]:
    return scipy.linalg.cho_factor(positive(n, dtype), lower=True), normal((n, count), dtype, 2)


def lu(**options: Any) -> Callable[..., Any]:
    return lambda A, **more: ft.protected_lu_factor(A, return_report=True, **options, **more)


def cholesky(**options: Any) -> Callable[..., Any]:
    return lambda A, **more: ft.protected_cholesky(A, return_report=True, **options, **more)


def solve(**options: Any) -> Callable[..., Any]:
    return lambda A, b, **more: ft.protected_solve(A, b, return_report=True, **options, **more)


def lu_solve(**options: Any) -> Callable[..., Any]:
    return lambda lu, b, **more: ft.protected_lu_solve(lu, b, return_report=True, **options, **more)


def cho_solve(**options: Any) -> Callable[..., Any]:
    return lambda c, b, **more: ft.protected_cho_solve(c, b, return_report=True, **options, **more)


def cases() -> Iterator[Case]:
    yield from faults()
    yield from options()
    yield from shapes()


# ---- faults --------------------------------------------------------------------------------------------------------


def procedures(dtype: str) -> Iterator[tuple[str, tuple[str, ...], Operands, Callable[..., Any]]]:
    """Name, names of sites, operands and call."""
    for m, n in ((ORDER, ORDER), (ORDER, 120), (120, ORDER)):
        A = lambda m=m, n=n: (normal((m, n), dtype),)  # noqa: E731
        for mode in ("online", "offline", "auto"):
            yield f"lu {mode} {m}x{n}", ("lu",), A, lu(mode=mode, **({"block": BLOCK} if mode == "online" else {}))
    for lower in (True, False):
        S = lambda: (positive(ORDER, dtype),)  # noqa: E731
        yield f"cholesky lower {lower}", ("cholesky",), S, cholesky(lower=lower, block=BLOCK)
    two = lambda: system(ORDER, 3, dtype)  # noqa: E731
    for mode in ("online", "offline"):
        yield f"solve {mode}", ("lu", "solve"), two, solve(mode=mode)
    yield "solve refined", ("lu", "solve"), two, solve(refine=True)
    for trans in (0, 1):
        given = lambda: factored(ORDER, 3, dtype)  # noqa: E731
        yield f"lu_solve {trans}", ("lu_solve", "solve"), given, lu_solve(trans=trans)
    yield "cho_solve", ("cho_solve", "solve"), lambda: factored_positive(ORDER, 3, dtype), cho_solve()


def faults() -> Iterator[Case]:
    for dtype in ("float64", "float32"):
        for name, own, operands, call in procedures(dtype):
            yield Case(f"{name} {dtype} clean", operands, call)
            yield from planted(f"{name} {dtype}", own, operands, call, 2 if dtype == "float64" else 1)
    for name, own, operands, call in procedures("float64"):
        for on_error in ("detect", "raise"):
            refusing = lambda *x, c=call, e=on_error, **more: c(*x, on_error=e, **more)  # noqa: E731
            yield from planted(f"{name} {on_error}", own, operands, refusing, 1)


def planted(
    name: str, own: tuple[str, ...], operands: Operands, call: Callable[..., Any], models: int
) -> Iterator[Case]:
    """A fault at each site that a clean call reaches, at the first, the second and the last visit."""
    visits = visits_of(lambda: call(*operands()))
    for site in sorted(SITES):
        if site.partition(".")[0] not in own or not visits.get(SITES[site].stage):
            continue
        found = list(plans(site, visits[SITES[site].stage], models))
        for plan in (*found, *lasting(site)):
            for by_hook in (False, True):
                way = "hook" if by_hook else "users"
                group = f"{' '.join(name.split()[:2])} {way} {SITES[site].stage}"
                yield Case(f"{name} {way} {title(plan)}", operands, call, injected(plan), by_hook, group)


def lasting(site: str) -> Iterator[Plan]:
    """A fault that is there again whenever the site is reached."""
    if "bit_flip" in SITES[site].models and SITES[site].visits == "any":
        yield Plan("bit_flip", site, "exponent_high", persistent=True, seed=(3,))


# ---- options, shapes -----------------------------------------------------------------------------------------------

ELEMENT = {
    "lu": Plan("bit_flip", "lu.factored_U", "exponent_high", seed=(2,)),
    "lu online": Plan("bit_flip", "lu.trailing", "exponent_high", seed=(2,)),
    "cholesky": Plan("bit_flip", "cholesky.trailing", "exponent_high", seed=(2,)),
    "solve": Plan("bit_flip", "solve.backward", "exponent_high", seed=(2,)),
}


def with_element(name: str, operands: Operands, call: Callable[..., Any], plan: str) -> Iterator[Case]:
    """A clean case, and one with a fault on each route."""
    yield Case(f"{name} clean", operands, call)
    yield Case(f"{name} users {ELEMENT[plan].site}", operands, call, injected(ELEMENT[plan]))
    yield Case(f"{name} hook {ELEMENT[plan].site}", operands, call, injected(ELEMENT[plan]), by_hook=True)


def options() -> Iterator[Case]:
    n = 150
    square, two = (lambda: (normal((n, n)),)), (lambda: system(n, 2))
    vector = lambda: (normal((n, n)), normal((n,), seed=2))  # noqa: E731
    for block in (1, 32, 500):
        yield from with_element(f"lu block {block}", square, lu(mode="online", block=block), "lu online")
        yield from with_element(f"cholesky block {block}", lambda: (positive(n),), cholesky(block=block), "cholesky")
    for overwrite, finite in product((False, True), (False, True)):
        how: Any = {"overwrite_a": overwrite, "check_finite": finite}
        yield from with_element(f"lu overwrite {overwrite} finite {finite}", square, lu(**how), "lu")
        yield from with_element(
            f"cholesky overwrite {overwrite} finite {finite}", lambda: (positive(n),), cholesky(**how), "cholesky"
        )
        yield from with_element(f"solve overwrite {overwrite} finite {finite}", vector, solve(**how), "solve")
    for assume, lower in product(("gen", "sym", "pos", "her"), (False, True)):
        symmetric = lambda: (positive(n), normal((n, 2), seed=2))  # noqa: E731
        call = solve(assume_a=assume, lower=lower)
        yield from with_element(f"solve assume {assume} {lower}", symmetric, call, "solve")
    for refine, transposed in product((False, True), (False, True)):
        call = solve(refine=refine, transposed=transposed)
        yield from with_element(f"solve {refine} {transposed}", two, call, "solve")
    for lower in (False, True):
        call = lambda A, lower=lower, **more: ft.protected_cho_factor(A, lower, return_report=True, **more)  # noqa: E731
        yield from with_element(f"cho_factor {lower}", lambda: (positive(n),), call, "cholesky")
    yield from without_report(n)


def without_report(n: int) -> Iterator[Case]:
    yield from with_element("alone lu", lambda: (normal((n, n)),), ft.protected_lu_factor, "lu")
    yield from with_element("alone cholesky", lambda: (positive(n),), ft.protected_cholesky, "cholesky")
    yield from with_element("alone solve", lambda: system(n, 2), ft.protected_solve, "solve")
    yield from with_element("alone lu_solve", lambda: factored(n, 2), ft.protected_lu_solve, "solve")
    yield from with_element("alone cho_solve", lambda: factored_positive(n, 2), ft.protected_cho_solve, "solve")


def _holding(value: float, A: Array) -> tuple[Array]:
    A[A.shape[0] // 2, 1] = A[1, A.shape[0] // 2] = value
    return (A,)


def shapes() -> Iterator[Case]:
    """Sizes, stacks, orders in memory, types, and matrices that cannot be factored or certified."""
    for shape in ((0, 0), (1, 1), (1, 7), (7, 1), (2, 3), (50, 50), (3, 40, 40), (2, 2, 30, 20), (5,), (0, 4, 4)):
        A = lambda shape=shape: (normal(shape),)  # noqa: E731
        for mode in ("online", "offline", "auto", "wrong"):
            yield Case(f"lu shape {shape} {mode}", A, lu(mode=mode))
        systems = lambda shape=shape: (normal(shape), normal((*shape[:-1], 2), seed=2))  # noqa: E731
        yield Case(f"solve shape {shape}", systems, solve())
        if shape[-1:] == shape[-2:-1]:
            yield Case(f"cholesky shape {shape}", lambda s=shape: (positive(s[-1], batch=s[:-2]),), cholesky())
    stacks = lambda: (positive(90, batch=(3,)),)  # noqa: E731
    yield from with_element("lu stack", stacks, lu(), "lu")
    yield from with_element("cholesky stack", stacks, cholesky(block=32), "cholesky")
    yield from with_element("solve stack", lambda: (*stacks(), normal((3, 90, 2), seed=2)), solve(), "solve")
    for dtype, order in product(("float64", "float32", "float16", ">f8", "int64", "complex128"), "CF"):
        A = lambda d=dtype, o=order: (np.asarray(8 * positive(60).astype(d), order=o),)  # noqa: E731
        for name, call in (("lu", lu()), ("online", lu(mode="online", block=16)), ("cholesky", cholesky())):
            yield Case(f"{name} type {dtype} {order}", A, call)
    yield from special()


def special() -> Iterator[Case]:
    calls: dict[str, Callable[..., Any]] = {"auto": lu(), "online": lu(mode="online", block=32), "cholesky": cholesky()}
    calls |= {"solve": lambda A: solve()(A, normal((90,), seed=2))}
    made: dict[str, Callable[[], Any]] = {
        "singular": lambda: (np.outer(np.arange(90.0), np.ones(90)),),
        "zero": lambda: (np.zeros((90, 90)),),
        "nan": lambda: _holding(float("nan"), positive(90)),
        "inf": lambda: _holding(float("inf"), positive(90)),
        "huge": lambda: _holding(1e308, positive(90)),
        "tiny": lambda: (positive(90) * 1e-300,),
        "indefinite": lambda: (positive(90) - 150 * np.eye(90),),
        "graded": lambda: (positive(90) * np.logspace(0, -12, 90) * np.logspace(0, -12, 90)[:, None],),
        "growing": lambda: (
            np.eye(90) - np.tri(90, k=-1) + np.eye(90)[:, -1:] * 0 + np.outer(np.ones(90), np.eye(90)[-1]),
        ),
    }
    for (name, operands), (how, call) in product(made.items(), calls.items()):
        yield Case(f"special {name} {how}", operands, call)
    for name in ("nan", "huge", "singular"):
        yield Case(f"special {name} unchecked", made[name], lu(check_finite=False))
