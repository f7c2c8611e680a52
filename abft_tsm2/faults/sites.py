"""Sites of faults: a stage of a protected operation, one of its live arrays, and a part of that array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from abft_tsm2.arrays import bit_pattern, from_host, namespace, to_host
from abft_tsm2.checksum.weights import balanced
from abft_tsm2.faults.judge.oracle import narrowed, widened
from abft_tsm2.faults.models import CHANGES, plant
from abft_tsm2.faults.plan import Plan

Array = Any
Arrays = Mapping[str, Any]
Generator = np.random.Generator
Part = Callable[[Arrays, Generator], Array | None]
"""Chooses the part of the live arrays that is hit: a view, or None where this moment has no such part."""

OPERANDS = ("A", "B", "b", "lu", "c")
"""Arrays that a fault may be planted in at a later stage than that which names them."""
GENERAL = frozenset(CHANGES)
"""The models that change any array."""


def whole(name: str) -> Part:
    """All of one array."""
    return lambda arrays, rng: arrays.get(name)


@dataclass(frozen=True)
class Site:
    """A place for faults.

    Attributes
    ----------
    text : str
        What it is.
    stage : str
        The stage of ``on_stage`` at which it is written.
    part : callable
    again : str
        The stage at which a fault that comes back is there once more.
    until : str
        The stage at which a fault that does not stay in memory is undone.
    change : callable, optional
        ``change(arrays, plan, rng)`` in place of the fault models, where the site has its own.
    models : frozenset of str
        Those that make sense here.
    visits : {"any", "first", "trailing", "later"}
        Which steps of a factorisation have it: those with a trailing matrix, or with something finished before.
    """

    text: str
    stage: str
    part: Part
    again: str = ""
    until: str = ""
    change: Callable[[Arrays, Plan, Generator], int] | None = None
    models: frozenset[str] = GENERAL
    visits: str = "any"

    def among(self, visits: int, steps: int = 0) -> range:
        """Those of so many visits of the stage at which the site is there.

        Parameters
        ----------
        visits : int
        steps : int
            Of the factorisation, where they are more: on a GPU the last one may have nothing to exchange or solve.

        Examples
        --------
        >>> Site("what is left", "updated", whole("W"), visits="trailing").among(7)
        range(0, 6)
        """
        steps = max(visits, steps)
        first, last = {"first": (0, 1), "trailing": (0, steps - 1), "later": (1, steps)}.get(self.visits, (0, steps))
        return range(first, min(last, visits))


Change = Callable[[Arrays, Plan, Generator], int]
INDICES = frozenset({"wrong_index", "swap_elements"})
ELEMENTS = GENERAL - {"row", "column", "tile", "warp", "swap_elements", "swap_rows", "swap_columns"}
ELEMENTS -= {"cycle_elements", "cycle_rows", "cycle_columns", "opposite", "rectangle"}
OF_VECTORS = ELEMENTS | {"swap_elements", "cycle_elements", "opposite", "tile"}
LEFT_BEHIND = 8  # columns in which rows are not exchanged


def step(arrays: Arrays) -> tuple[int, int]:
    """The columns j:j1 of the panel; all of them outside of a step."""
    first, last = arrays.get("step", (0, min(arrays["W"].shape)))
    return int(first), int(last)


def _between(low: int, high: int, rng: Generator) -> int:
    return int(rng.integers(low, max(high, low + 1)))


# ---- parts of W ----------------------------------------------------------------------------------------------------


def _right(arrays: Arrays) -> slice:
    """The columns right of the panel, or those of them that this moment is of."""
    return slice(*arrays.get("columns", (step(arrays)[1], arrays["W"].shape[1])))


def _trailing(arrays: Arrays, rng: Generator) -> Array:
    _, j1 = step(arrays)
    return arrays["W"][j1:, _right(arrays)]


def _ahead(arrays: Arrays, rng: Generator) -> Array:
    j, j1 = step(arrays)
    return arrays["W"][j:, j1:]


def _panel(arrays: Arrays, rng: Generator) -> Array:
    j, j1 = step(arrays)
    return arrays["W"][j:, j:j1]


def _new_rows(arrays: Arrays, rng: Generator) -> Array:
    j, j1 = step(arrays)
    return arrays["W"][j:j1, _right(arrays)]


def _lower(arrays: Arrays, rng: Generator) -> Array:
    """Of L, below its unit diagonal."""
    W, (_, j1) = arrays["W"], step(arrays)
    s = _between(1, min(j1, W.shape[0] - 1) + 1, rng)
    return W[s:, :s]


def _upper(arrays: Arrays, rng: Generator) -> Array:
    """Of U, with its diagonal."""
    W, (_, j1) = arrays["W"], step(arrays)
    s = _between(1, j1 + 1, rng)
    return W[:s, s - 1 :]


# ---- halves of a symmetric matrix ----------------------------------------------------------------------------------


def _lower_trailing(arrays: Arrays, rng: Generator) -> Array:
    W, (_, j1) = arrays["W"], step(arrays)
    s = _between(j1, W.shape[0], rng)
    return W[s:, j1 : s + 1]


def _lower_panel(arrays: Arrays, rng: Generator) -> Array:
    W, (j, j1) = arrays["W"], step(arrays)
    s = _between(j, W.shape[0], rng)
    return W[s:, j : min(s + 1, j1)]


def _lower_finished(arrays: Arrays, rng: Generator) -> Array:
    """Of L, with its diagonal."""
    W, (_, j1) = arrays["W"], step(arrays)
    s = _between(0, j1, rng)
    return W[s:, : s + 1]


def _lower_A(arrays: Arrays, rng: Generator) -> Array:
    A = arrays["A"]
    s = _between(0, A.shape[0], rng)
    return A[s:, : s + 1]


def _lower_c(arrays: Arrays, rng: Generator) -> Array:
    """Of a factor that was given, with its diagonal."""
    c = arrays["c"]
    s = _between(0, c.shape[0], rng)
    return c[s:, : s + 1]


def _in_both_halves(part: Part) -> Change:
    """What is changed below the diagonal of W, above it too: whichever half a factorisation works in."""

    def change(arrays: Arrays, plan: Plan, rng: Generator) -> int:
        W = arrays["W"]
        if arrays.get("one_half"):  # the other one is not worked in
            return plant(part(arrays, rng), plan, rng)
        before = bit_pattern(W).copy()
        bit = plant(part(arrays, rng), plan, rng)
        i, c = (before != bit_pattern(W)).nonzero()
        W[c, i] = W[i, c]
        return bit

    return change


# ---- pivots, order, A ----------------------------------------------------------------------------------------------


def _wrong(x: Array, entries: range, least: Callable[[int], int], size: int, plan: Plan, rng: Generator) -> int:
    """Some entries of x, or two that change places: `least(i)` to `size` are what may stand in entry i."""
    if plan.model == "swap_elements":
        if len(entries) > 1:
            first, second = (int(i) for i in rng.choice(entries, 2, replace=False))
            x[first], x[second] = int(x[second]), int(x[first])
        return -1
    for i in rng.choice(entries, min(plan.count, len(entries)), replace=False).tolist():
        others = np.setdiff1d(np.arange(least(i), size), int(x[i]))
        if others.size:
            x[i] = int(rng.choice(others))
    return -1


def _new_pivots(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    return _wrong(arrays["piv"], range(*step(arrays)), lambda i: i, arrays["W"].shape[0], plan, rng)


def _finished_pivots(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    return _wrong(arrays["piv"], range(step(arrays)[1]), lambda i: i, arrays["W"].shape[0], plan, rng)


def _places(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    size = arrays["perm"].shape[0]
    return _wrong(arrays["perm"], range(size), lambda i: 0, size, plan, rng)


def _not_exchanged(left: bool) -> Change:
    """In a few columns the rows are where they were before the step."""

    def change(arrays: Arrays, plan: Plan, rng: Generator) -> int:
        W, piv, (j, j1) = arrays["W"], to_host(arrays["piv"]), step(arrays)
        low, high = (0, j) if left else (j1, W.shape[1])
        first = _between(low, high - LEFT_BEHIND + 1, rng)
        part, rows = W[:, first : min(first + LEFT_BEHIND, high)], np.arange(W.shape[0])
        for i in range(j1 - 1, j - 1, -1):
            pair = [i, int(piv[i])]
            rows[pair] = rows[pair[::-1]]
        part[...] = part[from_host(rows, part)]
        return -1

    return change


def _where_A_is_needed(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """An element of the trailing matrix, and the element of A that it would be computed from."""
    A, W, (_, j1) = arrays["A"], arrays["W"], step(arrays)
    i, c = (_between(j1, size, rng) for size in W.shape)
    row = int(arrays["perm"][i])
    plant(A[row : row + 1, c : c + 1], plan, rng)
    return plant(W[i : i + 1, c : c + 1], plan, rng)


# ---- sums ----------------------------------------------------------------------------------------------------------


def _ahead_of(name: str) -> Part:
    """The sums of rows or columns that are not finished."""
    return lambda arrays, rng: arrays[name][step(arrays)[1] :]


def _up_to(name: str) -> Part:
    """The sums of what is finished."""
    return lambda arrays, rng: arrays[name][: step(arrays)[1]]


SUMS = {
    "S": "the sums of rows, A v",
    "Z": "the sums of columns, w'A",
    "g": "the sums of columns of L, w'L",
    "y": "the sums of rows of U, U v",
    "v": "the weights of columns",
    "w": "the weights of rows",
}


def _vector(text: str, stage: str, part: Part, visits: str = "any") -> Site:
    return Site(text, stage, part, models=OF_VECTORS, visits=visits)


def _sums(operation: str, encoded: str, updated: str, finished: str, ahead: str) -> dict[str, Site]:
    """Sites of checksums, one letter each: when A is encoded, after a step, at the end; `ahead`: what is left of
    them after a step belongs to the trailing matrix."""
    found = {f"{operation}.encoded_{x}": _vector(f"{SUMS[x]}, when A is encoded", "encoded", whole(x)) for x in encoded}
    for x in updated:
        part = _ahead_of(x) if x in ahead else _up_to(x) if x in "gy" else whole(x)
        visits = "trailing" if x in ahead else "any"
        found[f"{operation}.updated_{x}"] = _vector(f"{SUMS[x]}, after a step", "updated", part, visits)
    for x in finished:
        part = _up_to(x) if x in "gy" else whole(x)
        found[f"{operation}.finished_{x}"] = _vector(f"{SUMS[x]}, at the end", "finished", part)
    return found


# ---- all of them ---------------------------------------------------------------------------------------------------


def _indices(text: str, stage: str, change: Change, name: str = "piv") -> Site:
    return Site(text, stage, whole(name), change=change, models=INDICES)


def _exchange(text: str, left: bool) -> Site:
    models, visits = frozenset({"not_exchanged"}), "later" if left else "trailing"
    return Site(text, "swapped", whole("W"), change=_not_exchanged(left), models=models, visits=visits)


def _halves(text: str, stage: str, part: Part, visits: str = "any") -> Site:
    return Site(text, stage, part, change=_in_both_halves(part), visits=visits)


FACTOR_SITES: dict[str, Site] = {
    # LU, checked in every step
    "lu.ahead": Site("what is right of the first panel, not yet begun", "panel", _ahead, visits="first"),
    "lu.panel": Site("a panel that has just been factored", "panel", _panel),
    "lu.pivots": _indices("the pivots of a panel that has just been factored", "panel", _new_pivots),
    "lu.swapped_left": _exchange("rows of L that were to be exchanged", left=True),
    "lu.swapped_right": _exchange("rows right of the panel that were to be exchanged", left=False),
    "lu.solved": Site("rows of U right of the panel, just solved for", "solved", _new_rows, visits="trailing"),
    "lu.trailing": Site("the trailing matrix, after a step", "updated", _trailing, visits="trailing"),
    "lu.updated_L": Site("finished columns of L, after a step", "updated", _lower),
    "lu.updated_U": Site("finished rows of U, after a step", "updated", _upper),
    "lu.updated_pivots": _indices("finished pivots, after a step", "updated", _finished_pivots),
    "lu.updated_places": _indices("the list of where rows come from, after a step", "updated", _places, "perm"),
    "lu.finished_L": Site("L, before the last check", "finished", _lower),
    "lu.finished_U": Site("U, before the last check", "finished", _upper),
    "lu.finished_pivots": _indices("the pivots, before the last check", "finished", _finished_pivots),
    "lu.finished_places": _indices("the list of where rows come from, at the end", "finished", _places, "perm"),
    **_sums("lu", "SZvw", "SZgyw", "gyw", ahead="SZ"),
    "lu.encoded_A": Site("A, when it is encoded: before it is copied", "encoded", whole("A")),
    "lu.updated_A": Site("A, after a step", "updated", whole("A")),
    "lu.needed_A": Site(
        "the trailing matrix, and the element of A that it would be repaired from",
        *("updated", whole("W")),
        change=_where_A_is_needed,
        models=ELEMENTS,
        visits="trailing",
    ),
    # LU by LAPACK, checked at the end
    "lu.factored": Site("L and U as LAPACK returns them, all of the array", "factored", whole("W")),
    "lu.factored_L": Site("L as LAPACK returns it", "factored", _lower),
    "lu.factored_U": Site("U as LAPACK returns it", "factored", _upper),
    "lu.factored_pivots": _indices("the pivots as LAPACK returns them", "factored", _finished_pivots),
    # Solutions
    "solve.b": _vector("b of a system, after it was encoded", "inputs", whole("b"), visits="later"),
    "solve.used_b": _vector("b, after the forward substitution", "forward", whole("b")),
    "lu_solve.lu": Site("the factors that were given, after they were encoded", "encoded", whole("lu")),
    "lu_solve.b": _vector("b of a system with these, after it was encoded", "encoded", whole("b")),
    "lu_solve.used_lu": Site("the factors, after the forward substitution", "forward", whole("lu")),
    "cho_solve.c": Site("Cholesky's factor that was given, after it was encoded", "encoded", _lower_c),
    "cho_solve.b": _vector("b of a system with this, after it was encoded", "encoded", whole("b")),
    "cho_solve.used_c": Site("the factor, after the forward substitution", "forward", _lower_c),
    "solve.forward": _vector("the solution of L z = P b", "forward", whole("z")),
    "solve.backward": _vector("the solution of U x = z", "backward", whole("x")),
    # Cholesky
    "cholesky.panel": _halves("a panel that has just been factored", "panel", _lower_panel),
    "cholesky.trailing": _halves("the trailing matrix, after a step", "updated", _lower_trailing, "trailing"),
    "cholesky.updated_L": _halves("finished columns of L, after a step", "updated", _lower_finished),
    "cholesky.finished_L": _halves("L, before the last check", "finished", _lower_finished),
    **_sums("cholesky", "Zw", "Zgw", "gw", ahead="Z"),
    "cholesky.encoded_A": Site("A, when it is encoded: after it is copied", "encoded", _lower_A),
    "cholesky.updated_A": Site("A, after a step", "updated", _lower_A),
}
"""Sites of factorisations and solutions."""

STAGES = {
    ("lu", "online"): ("encoded", "panel", "swapped", "solved", "updated", "finished"),
    ("lu", "offline"): ("encoded", "factored"),
    ("lu", "auto"): ("encoded", "factored"),
    ("lu", "none"): ("factored",),
    ("solve", "protected"): ("encoded", "factored", "inputs", "forward", "backward"),
    ("solve", "none"): ("factored", "backward"),
    ("lu_solve", "protected"): ("encoded", "forward", "backward"),
    ("lu_solve", "none"): ("backward",),
    ("cho_solve", "protected"): ("encoded", "forward", "backward"),
    ("cho_solve", "none"): ("backward",),
    ("cholesky", "protected"): ("encoded", "panel", "updated", "finished"),
    ("cholesky", "none"): ("finished",),
}
"""By operation and scheme. "auto" is what it is for matrices of a few thousand columns; "none" is SciPy's function."""


def sites_of(operation: str, scheme: str) -> frozenset[str]:
    """The sites of an operation that is protected by a scheme; none for what is not there."""
    own = {"solve": ("lu", "solve"), "cholesky": ("cholesky",), "lu": ("lu",)}.get(operation, (operation, "solve"))
    stages = STAGES.get((operation, scheme), ())
    names = {name for name in FACTOR_SITES if name.partition(".")[0] in own and FACTOR_SITES[name].stage in stages}
    if scheme == "none":  # which has no sums
        names = {name for name in names if name.rpartition("_")[2] not in SUMS}
    return frozenset(names)


def _partial_sum(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """C_ij = S + sum_{l >= p} a_il b_lj, where S = sum_{l < p} a_il b_lj is what the fault has changed."""
    A, B, C = arrays["A"], arrays["B"], arrays["C"]
    k = A.shape[1]
    p = int(rng.integers(1, k + 1)) if k else 0
    i, j = (int(rng.integers(size)) for size in C.shape)
    kind = C.dtype if C.dtype.itemsize >= 4 else np.float32  # 16-bit products are added up in float32
    xp = namespace(C)
    a, b = widened(A[i : i + 1, :], xp).astype(kind), widened(B[:, j : j + 1], xp).astype(kind)
    partial, rest = a[:, :p] @ b[:p, :], a[:, p:] @ b[p:, :]
    bit = plant(partial, plan, rng)
    with np.errstate(all="ignore"):
        bit_pattern(C)[i : i + 1, j : j + 1] = narrowed((partial + rest).astype(np.float64), C.dtype)
    return bit


def _stored_sum(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """One bit of one integer checksum of a stored matrix."""
    sums = arrays[str(rng.choice(["rows", "columns"]))]
    at = np.unravel_index(int(rng.integers(sums.size)), sums.shape)
    sums[at] ^= np.uint64(1 << int(rng.integers(64)))
    return -1


def _kept_weights(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """The weights of columns, or of rows, that all products of these sizes share."""
    kept = balanced(int(rng.choice([arrays["A"].shape[0], arrays["B"].shape[1]])))
    kept.flags.writeable = True
    bit = plant(kept, plan, rng)
    kept.flags.writeable = False
    return bit


SITES: dict[str, Site] = {
    "product": Site("C, between the product and its check", "multiplied", whole("C"), again="corrected"),
    "partial": Site(
        "a partial sum of one element of C, before all terms are added", "multiplied", whole("C"), change=_partial_sum
    ),
    "A": Site("the left operand, after it was encoded", "encoded", whole("A"), until="multiplied"),
    "B": Site("the right operand, after it was encoded", "encoded", whole("B"), until="multiplied"),
    "A.stored": Site("an encoded left operand, before the product begins", "inputs", whole("A"), until="multiplied"),
    "B.stored": Site("an encoded right operand, before the product begins", "inputs", whole("B"), until="multiplied"),
    "kept.v": Site(
        "weights that are kept between calls", "inputs", whole("A"), change=_kept_weights, models=OF_VECTORS
    ),
    "s": Site("the checksums of the operand that was encoded first", "encoded", whole("s")),
    "t": Site("what the checksums of C should be", "encoded", whole("t")),
    "u": Site("the checksums of C", "verified", whole("u")),
    "repaired": Site("C, after it was repaired", "corrected", whole("C")),
    "repeated": Site("the product computed once more, which C is compared with", "repeated", whole("C")),
    "stored": Site("a matrix kept with its checksums", "stored", whole("A")),
    "stored.sums": Site("the checksums kept with a matrix: a bit of one", "stored", whole("A"), change=_stored_sum),
    **FACTOR_SITES,
}
"""Sites of products and stored matrices, and those of factorisations."""

FUNCTION_SITES = ("product", "partial", "A", "B", "A.stored", "B.stored")
"""Those of any function of A and B that returns their product."""

DEVICE_SITES = (*FUNCTION_SITES, "repaired", "repeated")
"""Those of a protected product on a GPU, without a hook."""

GRAPH_SITES = {"product": "C", "A": "A", "B": "B"}
"""Those of a protected product in a CUDA graph, and their arrays."""

PRODUCT_SITES = (*FUNCTION_SITES, "kept.v", "s", "t", "u", "repaired", "repeated")
"""Those of a protected product; a hook sees nothing of the one that is repeated."""
