"""Cases of products, factorisations and solutions of Dask arrays, computed in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import dask
import dask.array as da
import scipy.linalg

from abft_tsm2.core.faultpoint import planting
from abft_tsm2.faults import SITES
from abft_tsm2.interop import dask as protected
from benchmarks.regress.changes import Fault, injected, plans, title, visits_of
from benchmarks.regress.factorisations import normal, positive
from benchmarks.regress.lines import Case

Array = Any
CHUNK = 12
ORDER = 36
FAULTS = (
    *(Fault("multiplied", "C", change) for change in ("element", "nan", "row", "everything")),
    Fault("multiplied", "C", "element", 4),
    Fault("multiplied", "C", "element", again="corrected"),
    *(Fault("encoded", array, "element", visit) for array in "AB" for visit in (0, 2)),
    Fault("inputs", "A", "element"),
    *(Fault("encoded", array, "last") for array in "t"),
    Fault("verified", "u", "nan"),
)


def collection(x: Array) -> Any:
    """A Dask array of a NumPy array: of the same name in every run."""
    return da.from_array(x, chunks=CHUNK)


def computed(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """All that a lazy call returns; a result that fails is raised."""
    with dask.config.set(scheduler="synchronous"):
        return dask.compute(*function(*map(collected, operands), return_report=True, **options))


def collected(x: Any) -> Any:
    return tuple(map(collection, x)) if isinstance(x, tuple) else collection(x)


def cases() -> Iterator[Case]:
    yield from products()
    yield from factorisations()


def products() -> Iterator[Case]:
    for dtype, batch in product(("float64", "float32", "float16"), ((), (2,))):
        two = lambda d=dtype, b=batch: (normal((*b, 30, 25), d), normal((*b, 25, 20), d, 2))  # noqa: E731
        name = f"dask gemm {dtype} {batch}"
        for check in ("auto", "both"):
            call = partial(computed, protected.protected_gemm, check=check)
            yield Case(f"{name} {check} clean", two, call)
            yield from with_faults(f"{name} {check}", two, call)
    three = lambda: (normal((30, 25)), normal((25, 20), seed=2), normal((30, 20), seed=3))  # noqa: E731
    added = partial(computed, protected.protected_gemm, alpha=0.5, beta=-2.0)
    yield Case("dask gemm added clean", three, added)
    yield from with_faults("dask gemm added", three, added)
    for on_error in ("detect", "raise"):
        two = lambda: (normal((30, 25)), normal((25, 20), seed=2))  # noqa: E731
        yield from with_faults(f"dask gemm {on_error}", two, partial(added, on_error=on_error))


def with_faults(name: str, operands: Callable[[], Any], call: Callable[..., Any]) -> Iterator[Case]:
    for fault, by_hook in product(FAULTS, (False, True)):
        way = "hook" if by_hook else "users"
        group = f"dask gemm {way} {fault.stage}.{fault.array}"
        yield Case(f"{name} {way} {fault}", operands, call, fault.planter, by_hook, group)


def factorisations() -> Iterator[Case]:
    square = lambda: (normal((ORDER, ORDER)),)  # noqa: E731
    system = lambda: (normal((ORDER, ORDER)), normal((ORDER, 2), seed=2))  # noqa: E731
    given = lambda: (scipy.linalg.lu_factor(normal((ORDER, ORDER))), normal((ORDER, 2), seed=2))  # noqa: E731
    calls: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
        "lu one": (square, partial(computed, protected.protected_lu_factor, panel="one")),
        "lu tournament": (square, partial(computed, protected.protected_lu_factor, panel="tournament")),
        "lu online": (square, partial(computed, protected.protected_lu_factor, mode="online")),
        "tall tournament": (
            lambda: (normal((60, 20)),),
            partial(computed, protected.protected_lu_factor, panel="tournament"),
        ),
        "cholesky lower": (lambda: (positive(ORDER),), partial(computed, protected.protected_cholesky, lower=True)),
        "cholesky upper": (lambda: (positive(ORDER),), partial(computed, protected.protected_cholesky)),
        "solve one": (system, partial(computed, protected.protected_solve, panel="one")),
        "lu_solve plain": (given, partial(computed, protected.protected_lu_solve)),
        "lu_solve turned": (given, lambda *x, **how: computed(protected.protected_lu_solve, *x, trans=1, **how)),
    }
    for name, (operands, call) in calls.items():
        yield Case(f"dask {name} clean", operands, call)
        visits = visits_of(lambda operands=operands, call=call: call(*operands()))
        yield from of_sites(f"dask {name}", operands, call, visits)
        yield from of_arrays(f"dask {name}", operands, call)


def of_sites(name: str, operands: Callable[[], Any], call: Callable[..., Any], visits: Any) -> Iterator[Case]:
    """Faults at the sites of the factorisations that tasks carry out, in the first, the second and the last of them."""
    family = "cholesky" if "cholesky" in name else "lu"
    for site in sorted(SITES):
        if site.partition(".")[0] != family or not visits.get(SITES[site].stage):
            continue
        for plan, by_hook in product(plans(site, visits[SITES[site].stage], 1), (False, True)):
            way = "hook" if by_hook else "users"
            group = f"{name} {way} {SITES[site].stage}"
            yield Case(f"{name} {way} {title(plan)}", operands, call, injected(plan), by_hook, group)


def of_arrays(name: str, operands: Callable[[], Any], call: Callable[..., Any]) -> Iterator[Case]:
    """Faults in every matrix of every stage, at the first, the second and the last visit."""
    seen: dict[tuple[str, str], int] = {}

    def look(stage: str, arrays: Any) -> None:
        for array, x in arrays.items():
            if getattr(x, "ndim", 0) == 2 and x.size and x.dtype.kind == "f":
                seen[stage, array] = seen.get((stage, array), 0) + 1

    with planting(look):
        call(*operands())
    for (stage, array), count in sorted(seen.items()):
        for visit, by_hook in product(sorted({0, 1, count - 1} & set(range(count))), (False, True)):
            way, fault = "hook" if by_hook else "users", Fault(stage, array, "last", visit)
            yield Case(f"{name} {way} {fault}", operands, call, fault.planter, by_hook)
