"""The fast check on a GPU: weights, checksums, bounds and verdicts by kernels that read each matrix once, no host.

A product is seen line by line as in `abft_tsm2.checksum.sides`: C (m lines of n) = alpha L R + beta C0. Before it,
`DeviceCheck.encode` takes ``s = R v`` and ``t = L s`` with the squares behind the bounds, and the sums of both
operands' bits; behind it, `DeviceCheck.verify` takes ``u = C v`` and compares it with t line by line, and
`DeviceCheck.repair` lets kernels/repair/repair.cu locate and repair what failed, and write down for the host what it
found.

Each is TSM2R with one column of weights and an epilogue, which takes statistics or gives the verdict: of matrices whose
lines are contiguous kernels/check/tsm2r_rows.cu, of the others tsm2r_columns.cu beside it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, dtype_name, to_host
from abft_tsm2.checksum.bounds import arithmetic, bound_factors, rigorous_factor
from abft_tsm2.checksum.device.kernels import (
    CHANGED,
    COLUMNS,
    FIXED,
    MISSED,
    SAMPLE,
    AcrossPlan,
    Equilibrate,
    JudgeKernel,
    RepairKernel,
    across_sums,
    line_sums,
)
from abft_tsm2.checksum.device.layout import (
    CarriedChecksum,
    CheckSpec,
    Layout,
    OperandPointers,
    WorkspaceLayout,
    elements,
    padded,
)
from abft_tsm2.checksum.encode import OFF_BY, equilibrated, exponents, log2_column_norms
from abft_tsm2.checksum.weights import MEAN_SQUARE, weights
from abft_tsm2.core.device import device_of
from abft_tsm2.core.launch import PreparedLaunch, Step, Value, Where
from abft_tsm2.core.memory import scratch

OPERANDS = ("L", "R", "C", "C0", "D")
"""Names under which steps look for addresses; "record" is where the repair writes what it found. "encoded" and "call"
are the numbers of the call that has encoded the operands, and of the verdict on C."""
_OUTSTANDING = 256.0  # a row's weighted squares, in units of an equilibrated column's: one may be off by about 2^4


_NONE = (0, 0, 0)
_FEW = 16  # lines, or a quarter of all, are repaired on the device: what hit more of them may have hit all


class LineSumsArguments(NamedTuple):
    """Where a pass over a matrix puts what it takes: addresses (0 for none), the type of both sums, the elements from
    one product's to the next's, and the address of the guards of both sums."""

    sums: int
    squares: int
    words: int
    dtype: str
    step: int
    guards: int = 0


class DeviceCheck:
    """The steps of one `CheckSpec` on the current device.

    Attributes
    ----------
    case : Case
    account : Account
        Where the steps find what they leave for one another: methods take the address of one.
    """

    def __init__(self, case: CheckSpec, multiprocessors: int) -> None:
        self.case, self.account, self._multiprocessors = case, WorkspaceLayout(case), multiprocessors
        self._v_step, self._s_step = (0, 0) if case.shared else (padded(case.n), padded(case.k))

    # ---- before the product ----

    def encode(self, memory: int, kept: CarriedChecksum | None) -> list[Step]:
        """All that precedes the product: the weights, ``s = R v``, ``t = L s``, ``C0 v``.

        Parameters
        ----------
        memory : int
            Address of an account, not initialised.
        kept : Kept or None
            Of a right operand that was encoded before.
        """
        case, right = self.case, self._right(memory, kept)
        steps = self.carry(memory) if kept is None else []
        into = self._lines(memory, "t", "p2", "left_words", "guards")
        steps.append(self._pass("L", memory, right.s, right.squares, into, fresh=kept is not None))
        if kept is not None and case.recheck:
            steps.append(self._pass("R", memory, right.v, 0, self._carried(memory), expected=right.words))
        if case.C0 is not None:
            into = self._lines(memory, "t0", "added2", "added_words", "guards0")
            steps.append(self._pass("C0", memory, right.v, 0, into))
        return steps

    def carry(self, memory: int) -> list[Step]:
        """The right operand's part: weights and ``s = R v``."""
        return [self.equilibrate(memory), self._sums_of_right(memory)]

    def _sums_of_right(self, memory: int, *, fresh: bool = False) -> Step:
        """``s = R v``, the squares and the bit sums, with the weights that are there."""
        return self._pass("R", memory, self.account.right(memory).v, 0, self._carried(memory), fresh=fresh)

    @np.errstate(all="ignore")
    def weigh_exactly(self, memory: int, R: Array) -> bool:
        """Weights of a single R by the exact norms of its columns, where those by a sample are far off.

        Returns whether that was so: what is made with the weights has to be made again. Synchronises with the host.
        """
        import cupy

        case, far = self.case, 100 if self.case.acc == "float32" else 1000
        v, sizes = self.account.array(memory, "v")[0], self.account.array(memory, "parts")[0]
        exact = np.clip(exponents(log2_column_norms(R)), -far, far)
        moved = exact + np.log2(abs(to_host(v).astype(np.float64)))
        if not moved.max() - moved.min() > OFF_BY:
            return False
        better = equilibrated(weights("balanced", case.n), exact)[:, 0]
        v[...] = cupy.asarray(better.astype(case.acc))
        sizes[0::2], sizes[1::2] = 0, abs(better).min()
        sizes[0] = abs(better).sum()
        return True

    def equilibrate(self, memory: int) -> Step:
        """Weights of the right operand, scaled by the norms of its columns in a sample of its rows."""
        case, (rs, cs, step, _) = self.case, self.case.R
        base = _base(case.n)
        right, at = self.account.right(memory), functools.partial(self.account.at, memory)
        config = Equilibrate(case.dtype, turned=not case.R.contiguous)
        values: tuple[Value, ...] = (
            *(case.k, case.n, "R", rs, cs, step, base.data.ptr, right.v, self._v_step, at("parts")),
            *(max(1.0, case.k / SAMPLE), at("state")),
        )
        return PreparedLaunch(config, (-(-case.n // COLUMNS), case.right_batch), config.t1, values, base)

    @property
    def outstanding(self) -> float:
        """Weighted squares of a row of R beyond which the sample may have missed it; inf where all rows are sampled."""
        return _OUTSTANDING * MEAN_SQUARE if self.case.k > SAMPLE else np.inf

    def _right(self, memory: int, kept: CarriedChecksum | None) -> OperandPointers:
        """What the right operand carries: of this account, or of before."""
        return self.account.right(memory) if kept is None else kept.right

    def _carried(self, memory: int) -> LineSumsArguments:
        """The parts of an account that a pass over R fills."""
        right = self.account.right(memory)
        return LineSumsArguments(right.s, right.squares, right.words, self.case.acc, padded(self.case.k))

    def _lines(self, memory: int, sums: str, squares: str, words: str, guards: str = "") -> LineSumsArguments:
        """These parts of an account, of all lines."""
        y, z, bits, guard = (self.account.at(memory, name) for name in (sums, squares, words, guards))
        return LineSumsArguments(y, z, bits, "float64", self.case.m, guard)

    def _pass(
        self,
        name: str,
        memory: int,
        w: int,
        w2: int,
        into: LineSumsArguments,
        *,
        expected: int = 0,
        fresh: bool = False,
    ) -> Step:
        """``X w``, ``(X o X) w2`` (w o w unless given) and the words of X, which is R, L, C or C0.

        `expected`: address of words to compare with; `fresh`: this is the first step, and wipes the state. C was
        written by the step in front: it is not read before that has ended.
        """
        case, state = self.case, self.account.at(memory, "state")
        layout, p, q, w_step, dtype = self._operand(name)
        first = name == "R" and not expected  # the first look at R: its weights are from a sample
        outstanding = self.outstanding if first else np.inf
        sizes = (self.account.at(memory, "parts"), -(-case.n // COLUMNS), self.account.at(memory, "sizes"))
        guards: tuple[Value, ...] = (into.guards, "encoded" if into.guards else 0)
        results: tuple[Value, ...] = (
            *into[:3],
            into.step,
            float(outstanding),
            state,
            2 if name == "C" else int(fresh),
            expected,
        )
        results += (*(sizes if first else _NONE), *guards)
        products = case.right_batch if name == "R" else case.batch
        wanted = {"acc": case.acc, "given": name == "L", "words": name != "C", "out": into.dtype}
        return self._over((name, layout, dtype), (p, q, products), (w, w2, w_step), results, wanted)

    def _over(
        self,
        matrix: tuple[str, Layout, str],
        counts: tuple[int, int, int],
        right: tuple[int, int, int],
        results: tuple[Value, ...],
        wanted: dict[str, Any],
    ) -> Step:
        """A launch over the lines of a matrix: along memory or across it, as they lie."""
        (name, layout, dtype), (p, q, products) = matrix, counts
        if layout.contiguous:
            config = line_sums(dtype, p, q, self._multiprocessors, width=layout.width, products=products, **wanted)
            values: tuple[Value, ...] = (p, q, name, layout.rs, layout.step, *right, *results)
            return PreparedLaunch(config, (-(-p // config.lines), products), config.t1, values)
        across = across_sums(dtype, p, q, self._multiprocessors, width=layout.width, products=products, **wanted)
        plan = AcrossPlan.of(across, p, q, self._multiprocessors, products)
        partial, tickets = scratch(plan.nbytes, plan.tickets)
        values = (p, q, name, layout.cs, layout.step, *right, *results, plan.slice, partial.data.ptr, tickets.data.ptr)
        return PreparedLaunch(across, plan.grid, across.t1, values, (partial, tickets))

    def _operand(self, name: str) -> tuple[Layout, int, int, int, str]:
        """Layout, lines, positions, step of the weights, and type of R, L, C or C0."""
        case = self.case
        if name == "R":
            return case.R, case.k, case.n, self._v_step, case.dtype
        if name == "L":
            return case.L, case.m, case.k, self._s_step, case.dtype
        layout = case.C if name == "C" else case.C0
        assert layout is not None
        return layout, case.m, case.n, self._v_step, case.out

    # ---- behind the product ----

    def verify(self, memory: int, kept: CarriedChecksum | None, alpha: float, beta: float) -> list[Step]:
        """``u = C v``, and the verdict on each line unless the case is `split`: then `judge` has it."""
        case, right = self.case, self._right(memory, kept)
        if "u" in self.account:
            return [self._pass("C", memory, right.v, 0, self._lines(memory, "u", "u2", ""))]
        results = (
            *self._bound(memory, right, alpha, beta),
            *((0, 0, 0) if case.D is None else ("D", case.D.rs if case.D.contiguous else case.D.cs, case.D.step)),
        )
        counts, weights = (case.m, case.n, case.batch), (right.v, 0, self._v_step)
        wanted = {"acc": case.acc, "verdict": True, "out": case.cast}
        return [self._over(("C", case.C, case.out), counts, weights, results, wanted)]

    def judge(self, memory: int, kept: CarriedChecksum | None, alpha: float, beta: float) -> list[Step]:
        """The verdict on sums that `verify` has stored."""
        case, right, config = self.case, self._right(memory, kept), JudgeKernel()
        u, u2 = (self.account.at(memory, name) for name in ("u", "u2"))
        values: tuple[Value, ...] = (case.m, u, u2, *self._bound(memory, right, alpha, beta))
        return [PreparedLaunch(config, (-(-case.m // config.t1), case.batch), config.t1, values)]

    def _bound(self, memory: int, right: OperandPointers, alpha: float, beta: float) -> tuple[Value, ...]:
        """VERDICT_ARGUMENTS of kernels/check/verdict.cuh."""
        case, at = self.case, functools.partial(self.account.at, memory)
        factors = bound_factors(case.arithmetic, case.terms, case.n, alpha)
        return (
            *(float(alpha), float(beta), at("t"), at("p2"), at("t0"), at("added2")),
            *(right.sizes, 0 if case.shared else 2, *factors, at("tau"), at("lines"), at("state")),
            *(at("guards"), at("guards0"), "encoded", "call"),
        )

    def repair(
        self, memory: int, kept: CarriedChecksum | None, alpha: float, beta: float, *, write: bool
    ) -> list[Step]:
        """Location and repair of what failed; the record is written in any case. C stays as it is unless `write`."""
        case, at = self.case, functools.partial(self.account.at, memory)
        right = self._right(memory, kept)
        config = RepairKernel(case.dtype, case.out, case.cast, turned=not case.R.contiguous)
        nbytes = repair_bytes(config, case.k, case.n) if write else 0  # without memory it leaves all to the host
        space, _ = scratch(nbytes, 0)
        a, f = case.arithmetic, bound_factors(case.arithmetic, case.terms, case.n, alpha)
        layouts = (("L", case.L), ("R", case.R), ("C", case.C), ("D", case.D), ("C0", case.C0))
        values: tuple[Value, ...] = (
            *(case.m, case.k, case.n, case.batch),
            *(x for name, x_of in layouts for x in ((0, 0, 0, 0) if x_of is None else (name, *x_of[:3]))),
            *(float(alpha), float(beta), right.v, self._v_step),
            *(at("t"), at("t0"), at("p2"), at("added2"), at("tau"), f.factor, f.input_factor, f.out_factor, f.root),
            *(at("guards"), at("guards0"), "encoded"),
            *(at("left_words"), right.words, at("added_words"), self._s_step),
            *(a.u, rigorous_factor(a, case.terms), float(a.u_out), f.underflow, right.sizes),
            *(max(_FEW, case.m * case.batch // 4), at("lines"), at("state")),
            *(space.data.ptr, nbytes, "call", "record"),
        )
        return [PreparedLaunch(config, (config.blocks * self._multiprocessors, 1), config.t1, values, space)]

    # ---- what hooks and the host look at ----

    def encoded(self, memory: int, kept: CarriedChecksum | None) -> tuple[Array, Array]:
        """s (k, 1) and t (m, 1) of a single product."""
        right = self._right(memory, kept)
        return elements(right.s, self.case.k, self.case.acc)[:, None], self.account.array(memory, "t").T

    def observed(self, memory: int) -> Array:
        """u (m, 1) of a single product whose case is `split`."""
        return self.account.array(memory, "u").T

    def differences(
        self, then: int, now: int, kept: CarriedChecksum | None, where: Where, *, observed: bool
    ) -> dict[str, tuple[int, ...]]:
        """Where two accounts of the same product differ: "R", "L", "C0" for operands, "v", "s", "t" for checksums, and
        "u", where it was `observed`; each with the places.

        Kernels add in a fixed order, so that what is not the same bit for bit is not the same. Synchronises.
        """
        names = {"R": ("right_words",), "L": ("left_words",), "C0": ("added_words",), "v": ("v", "sizes")}
        names |= {"s": ("s", "squares"), "t": ("t", "p2", "t0", "added2")} | ({"u": ("u", "u2")} if observed else {})
        if kept is not None:  # what an encoded operand carries is its own
            names = {name: parts for name, parts in names.items() if name not in "Rvs"}
        found = {name: self._differing(then, now, parts) for name, parts in names.items()}
        if kept is not None and self._changed(kept.right, where):
            found["R"] = (0,)
        return {name: places for name, places in found.items() if places}

    def _differing(self, then: int, now: int, parts: tuple[str, ...]) -> tuple[int, ...]:
        places: set[int] = set()
        for name in parts:
            if name in self.account:
                before, after = (self.account.array(memory, name) for memory in (then, now))
                bits = f"u{before.itemsize}"
                different = (before.view(bits) != after.view(bits)).any(axis=0)
                places.update(int(i) for i in to_host(different.nonzero()[0]))
        return tuple(sorted(places))

    def _changed(self, right: OperandPointers, where: Where) -> bool:
        """Whether R is not what it was when it was encoded."""
        import cupy

        k = padded(self.case.k)
        memory = cupy.zeros(self.account.nbytes // 8 + 3 * k)
        y, z, words = (memory.data.ptr + self.account.nbytes + 8 * k * i for i in range(3))
        into = LineSumsArguments(y, z, words, self.case.acc, k)
        step = self._pass("R", memory.data.ptr, right.v, 0, into, expected=right.words)
        step(cupy.cuda.get_current_stream().ptr, where)
        return bool(self.flags(memory.data.ptr) & CHANGED)

    def flags(self, memory: int) -> int:
        """MISSED, CHANGED: what passes have noticed so far. Synchronises."""
        return int(self.account.array(memory, "state")[0, 0]) >> 32


def repair_bytes(config: RepairKernel, k: int, n: int) -> int:
    """Memory that kernels/repair/repair.cu needs."""
    stripes = -(-n // config.stripe)
    slabs = max(1, min(264 // stripes, -(-k // 128)))
    return FIXED + 64 * (2 * k + (3 + 2 * slabs) * n)


class DeviceOperandChecksum(NamedTuple):
    """What a matrix carries, the memory that holds it, its weights there, and whether they are from exact norms."""

    right: OperandPointers
    memory: Array
    weights: Array
    exact: bool


def right_operand(X: Array, side: str) -> tuple[DeviceCheck, Array]:
    """The check of a CuPy matrix as right operand of products, and memory for what it carries, not initialised.

    side "rows": X itself; "columns": its transpose, for a left operand. On the current device, which is X's.
    """
    import cupy

    R = X if side == "rows" else X.T
    layout = Layout.of(R, turned=False)
    k, n = R.shape
    name = dtype_name(X.dtype)
    case = CheckSpec(1, k, n, 1, 1, name, name, "", layout, layout, layout, None, None, arithmetic(name, name), k)
    check = DeviceCheck(case, device_of(X.device.id).multiprocessors)
    return check, cupy.empty(check.account.nbytes, cupy.uint8)


def carried_on_device(X: Array, side: str) -> DeviceOperandChecksum:
    """What a CuPy matrix carries into products, as `right_operand`. Synchronises with the host."""
    import cupy

    with X.device:
        check, memory = right_operand(X, side)
        at, stream, where = memory.data.ptr, cupy.cuda.get_current_stream(), {"R": X.data.ptr}
        for step in check.carry(at):
            step(stream.ptr, where)
        again = bool(check.flags(at) & MISSED) and check.weigh_exactly(at, X if side == "rows" else X.T)
        if again:
            check._sums_of_right(at, fresh=True)(stream.ptr, where)
        stream.synchronize()  # it may be used on any stream
    return DeviceOperandChecksum(check.account.right(at), memory, check.account.array(at, "v")[0], again)


@functools.lru_cache(maxsize=256)
def _base_on(n: int, device: int) -> Array:
    import cupy

    made = cupy.asarray(weights("balanced", n)[:, 0].astype("float32"))
    cupy.cuda.get_current_stream().synchronize()  # once: whatever stream uses it next, it is there
    return made


def _base(n: int) -> Array:
    """Weights before they are scaled, on the current device."""
    import cupy

    return _base_on(n, cupy.cuda.runtime.getDevice())
