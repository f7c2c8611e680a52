"""Cases of products, factorisations and solutions of Dask arrays, computed in this thread.

Dask chooses in which order the tasks of a graph run, by names that are others in each run. A fault is therefore planted
where a stage has arrays of certain bits, and not at a visit of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, product
from typing import Any

import dask
import dask.array as da
import numpy as np
import scipy.linalg

from abft_tsm2.core.faultpoint import planting
from abft_tsm2.interop import dask as protected
from benchmarks.regress.changes import CHANGES
from benchmarks.regress.factorisations import normal, positive
from benchmarks.regress.lines import Case, digest

Array = Any
Operands = Callable[[], tuple[Any, ...]]
CHUNK = 12
ORDER = 36
OF_PRODUCTS = ("element", "nan", "row", "everything")
"""Changes of a product; in all else the last element is changed."""


def computed(function: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """All that a lazy call returns; a result that fails is raised."""
    with dask.config.set(scheduler="synchronous"):
        return dask.compute(*function(*map(_collection, operands), return_report=True, **options))


def _collection(x: Any) -> Any:
    return tuple(map(_collection, x)) if isinstance(x, tuple) else da.from_array(x, chunks=CHUNK)


def floats(arrays: Mapping[str, Any]) -> dict[str, Array]:
    return {name: x for name, x in arrays.items() if isinstance(x, np.ndarray) and x.size and x.dtype.kind == "f"}


def bits_of(arrays: Mapping[str, Array]) -> str:
    """Of all arrays of a stage, in which one task differs from another."""
    own = floats(arrays)
    return digest(part for name in sorted(own) for part in (name.encode(), np.ascontiguousarray(own[name]).tobytes()))


class PlanterOfBits:
    """Changes one array of a stage, known by the bits there: the first time, or each time that it is reached."""

    def __init__(self, stage: str, array: str, bits: str, change: str, lasting: bool) -> None:
        self._where, self._bits, self._change, self._lasting = (stage, array), bits, change, lasting
        self.planted: list[str] = []

    def __call__(self, stage: str, arrays: Mapping[str, Array]) -> None:
        own, array = self._where
        if stage != own or array not in arrays or (self.planted and not self._lasting):
            return
        if arrays[array].flags.writeable and bits_of(arrays) == self._bits:
            CHANGES[self._change](arrays[array])
            self.planted.append(stage)


def seen_by(call: Callable[[], Any]) -> dict[tuple[str, str], list[str]]:
    """The bits that a clean call has once at each stage, by its arrays, in an order that is not that of the tasks."""
    seen: dict[tuple[str, str], Counter[str]] = {}

    def look(stage: str, arrays: Mapping[str, Any]) -> None:
        for name in floats(arrays):
            seen.setdefault((stage, name), Counter())[bits_of(arrays)] += 1

    with planting(look):
        call()
    return {where: sorted(bits for bits, count in seen[where].items() if count == 1) for where in sorted(seen)}


def cases() -> Iterator[Case]:
    for name, operands, call in (*products(), *factorisations()):
        yield Case(f"dask {name} clean", operands, call)
        yield from with_faults(f"dask {name}", operands, call)


def products() -> Iterator[tuple[str, Operands, Callable[..., Any]]]:
    for dtype, batch in (("float64", ()), ("float64", (2,)), ("float32", ()), ("float16", ())):
        two = lambda d=dtype, b=batch: (normal((*b, 30, 25), d), normal((*b, 25, 20), d, 2))  # noqa: E731
        for check in ("auto", "both") if dtype == "float64" else ("auto",):
            call = partial(computed, protected.protected_gemm, check=check)
            yield f"gemm {dtype} {len(batch)} {check}", two, call
    three = lambda: (normal((30, 25)), normal((25, 20), seed=2), normal((30, 20), seed=3))  # noqa: E731
    yield "gemm added", three, partial(computed, protected.protected_gemm, alpha=0.5, beta=-2.0)
    for on_error in ("detect", "raise"):
        two = lambda: (normal((30, 25)), normal((25, 20), seed=2))  # noqa: E731
        yield f"gemm {on_error}", two, partial(computed, protected.protected_gemm, on_error=on_error)


def factorisations() -> Iterator[tuple[str, Operands, Callable[..., Any]]]:
    square = lambda: (normal((ORDER, ORDER)),)  # noqa: E731
    system = lambda: (normal((ORDER, ORDER)), normal((ORDER, 2), seed=2))  # noqa: E731
    given = lambda: (scipy.linalg.lu_factor(normal((ORDER, ORDER))), normal((ORDER, 2), seed=2))  # noqa: E731
    lu, cholesky = protected.protected_lu_factor, protected.protected_cholesky
    for panel, mode in product(("one", "tournament"), ("auto", "online")):
        yield f"lu {panel} {mode}", square, partial(computed, lu, panel=panel, mode=mode)
    yield "lu tall", lambda: (normal((60, 20)),), partial(computed, lu, panel="tournament")
    yield "cholesky lower", lambda: (positive(ORDER),), partial(computed, cholesky, lower=True)
    yield "cholesky upper", lambda: (positive(ORDER),), partial(computed, cholesky)
    yield "cholesky detect", lambda: (positive(ORDER),), partial(computed, cholesky, on_error="detect")
    yield "solve one", system, partial(computed, protected.protected_solve, panel="one")
    yield "solve tournament", system, partial(computed, protected.protected_solve, panel="tournament")
    yield "lu_solve plain", given, partial(computed, protected.protected_lu_solve)
    yield "lu_solve turned", given, lambda *x, **how: computed(protected.protected_lu_solve, *x, trans=1, **how)


def with_faults(name: str, operands: Operands, call: Callable[..., Any]) -> Iterator[Case]:
    """Faults in the first, the second and the last of the arrays that each stage has under a name."""
    ways = cycle((False, True))
    for (stage, array), found in seen_by(lambda: call(*operands())).items():
        changes = OF_PRODUCTS if stage == "multiplied" and array == "C" else ("last",)
        chosen = sorted({0, len(found) - 1} & set(range(len(found))))
        some = [(i, change, False) for i, change in product(chosen, changes)]
        some += [(i, changes[0], True) for i in chosen[:1] if array in "CWX"]
        for i, change, lasting in some:
            by_hook = next(ways)
            way = "hook" if by_hook else "users"
            planter = partial(PlanterOfBits, stage, array, found[i], change, lasting)
            title = f"{name} {way} {stage}.{array} {change} {i}{' lasting' if lasting else ''}"
            group = f"{' '.join(name.split()[:2])} {stage}"
            yield Case(title, operands, call, planter, by_hook, group)
