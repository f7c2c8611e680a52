"""Encode, verify and repair on a GPU: the launches of one check, by kernels that read each matrix once; no host.

A product is seen line by line as in `abft_tsm2.checksum.sides`: C (m lines of n) = alpha L R + beta C0. Before it,
`DeviceCheck.encode` takes ``s = R v`` and ``t = L s`` with the squares behind the bounds, and the sums of both
operands' bits; behind it, `DeviceCheck.verify` takes ``u = C v`` and compares it with t line by line (where a product
is short it takes t as well: nothing hides a pass over L), and `DeviceCheck.repair` lets kernels/repair/repair.cu locate
and repair what failed, and write down for the host what it found.

Each is TSM2R with one column of weights and an epilogue, which takes statistics or gives the verdict: of matrices whose
lines are contiguous kernels/check/tsm2r_rows.cu, of the others tsm2r_columns.cu beside it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, dtype_name, to_host
from abft_tsm2.checksum.bounds import arithmetic, bound_factors, recomputed_noise_factor, rigorous_factor
from abft_tsm2.checksum.device import tuned
from abft_tsm2.checksum.device.kernels import (
    CHANGED,
    COLUMNS,
    FIXED,
    MISSED,
    SAMPLE,
    STATE,
    AcrossPlan,
    Equilibrate,
    JudgeKernel,
    OrderedKernel,
    RepairKernel,
    WipeKernel,
    across_sums,
    line_sums,
)
from abft_tsm2.checksum.device.layout import (
    CarriedChecksum,
    CheckSpec,
    Layout,
    OperandPointers,
    OrderedLines,
    WorkspaceLayout,
    elements,
    padded,
)
from abft_tsm2.checksum.encode import OFF_BY, equilibrated, exponents, log2_column_norms
from abft_tsm2.checksum.weights import MEAN_SQUARE, weights
from abft_tsm2.core import memory as memories
from abft_tsm2.core.device import device_of
from abft_tsm2.core.kept import thrice
from abft_tsm2.core.launch import PreparedLaunch, Step, Value, Where
from abft_tsm2.core.problem import SIZES
from abft_tsm2.report import Check, LineLimits

# Steps are given addresses under the names "L", "R", "C", "C0" and "D"; "record" is where the repair writes what it
# found, "tally" where it adds that up for the replays of a graph, or 0. "encoded" and "call" are the numbers of the
# call that has encoded the operands, and of the verdict on C; for replays both are `ReplayTally.number`.
_OUTSTANDING = 256.0  # a row's weighted squares, in units of an equilibrated column's: one may be off by about 2^4


_NONE = (0, 0, 0)
_FEW = 16  # lines, or a quarter of all, are repaired on the device: what hit more of them may have hit all


class LineSumsArguments(NamedTuple):
    """Where a pass over a matrix writes its sums: addresses (0 for none), the type of both sums, the elements from
    one product's to the next's, and the address of the guards of both sums."""

    sums: int
    squares: int
    bit_sums: int
    dtype: str
    step: int
    guards: int = 0


class DeviceCheck:
    """The steps of one `CheckSpec` on the current device.

    Attributes
    ----------
    spec : CheckSpec
    workspace : WorkspaceLayout
        Where the steps find what they leave for one another: methods take the address of one.
    """

    def __init__(self, spec: CheckSpec, multiprocessors: int) -> None:
        self.spec, self.workspace, self._multiprocessors = spec, WorkspaceLayout(spec), multiprocessors
        self._v_step, self._s_step = (0, 0) if spec.shared else (padded(spec.n), padded(spec.k))

    # ---- before the product ----

    def encode(self, memory: int, carried: CarriedChecksum | None, left: OrderedLines | None = None) -> list[Step]:
        """All that precedes the product: the weights, ``s = R v``, ``t = L s`` unless `joint`, ``C0 v``.

        Parameters
        ----------
        memory : int
            Address of a workspace, not initialised.
        carried : CarriedChecksum or None
            Of a right operand that was encoded before.
        left : OrderedLines or None
            What L had, where it was encoded before and is to be compared.
        """
        spec, right = self.spec, self._right(memory, carried)
        steps = self.carry(memory, "encoded") if carried is None else [self._wipe(memory, "encoded")]
        if carried is not None and spec.recheck:
            steps.append(self._pass("R", memory, right.v, 0, self._carried(memory), expected=right.bit_sums))
        if not spec.joint:
            steps += [self._pass("L", memory, right.s, right.squares, self._of_left(memory)), *self._same(memory, left)]
        if spec.C0 is not None:
            into = self._lines(memory, "t0", "added2", "added_bit_sums", "guards0")
            steps.append(self._pass("C0", memory, right.v, 0, into))
        return steps

    def _same(self, memory: int, left: OrderedLines | None) -> list[Step]:
        """Whether L is what it was when it was encoded, behind the pass that has summed it: what changes later shows in
        C. All products have the same L."""
        if left is None:
            return []
        config, state = OrderedKernel(SIZES[self.spec.dtype]), self.workspace.at(memory, "state")
        pieces = config.pieces(left.length)
        some = left.lines if pieces > 1 else 0
        parts, tickets = memories.scratch(8 * some * pieces * config.words, some)
        values = left.lines, left.length, "L", left.apart, pieces, left.sums, parts.data.ptr, tickets.data.ptr, state
        return [PreparedLaunch(config, (config.blocks(left.lines, left.length),), config.t1, values, (parts, tickets))]

    def carry(self, memory: int, encoded: Value = 0) -> list[Step]:
        """The right operand's part: weights and ``s = R v``; `encoded`: the number of the call, of a product."""
        return [self.equilibrate(memory, encoded), self._sums_of_right(memory)]

    def sum_again(self, memory: int) -> list[Step]:
        """``s = R v``, the squares and the bit sums once more, with the weights that are there; flags are wiped."""
        return [self._wipe(memory), self._sums_of_right(memory)]

    def _wipe(self, memory: int, encoded: Value = 0) -> Step:
        pause = tuned.PAUSE[SIZES[self.spec.dtype]] if encoded else 0
        return PreparedLaunch(WipeKernel(), (1,), STATE, (self.workspace.at(memory, "state"), encoded, pause))

    def _sums_of_right(self, memory: int) -> Step:
        return self._pass("R", memory, self.workspace.right(memory).v, 0, self._carried(memory))

    @np.errstate(all="ignore")
    def weigh_exactly(self, memory: int, R: Array) -> bool:
        """Weights of a single R by the exact norms of its columns, where those by a sample are far off.

        Returns whether that was so: what is made with the weights has to be made again. Synchronises with the host.
        """
        import cupy

        spec, far = self.spec, 100 if self.spec.acc == "float32" else 1000
        v, sizes = self.workspace.array(memory, "v")[0], self.workspace.array(memory, "parts")[0]
        exact = np.clip(exponents(log2_column_norms(R)), -far, far)
        moved = exact + np.log2(abs(to_host(v).astype(np.float64)))
        if not moved.max() - moved.min() > OFF_BY:
            return False
        better = equilibrated(weights("balanced", spec.n), exact)[:, 0]
        v[...] = cupy.asarray(better.astype(spec.acc))
        sizes[0::2], sizes[1::2] = 0, abs(better).min()
        sizes[0] = abs(better).sum()
        return True

    def equilibrate(self, memory: int, encoded: Value = 0) -> Step:
        """Weights of the right operand, scaled by the norms of its columns in a sample of its rows."""
        spec, (rs, cs, step, _) = self.spec, self.spec.R
        base = _base(spec.n)
        right, at = self.workspace.right(memory), functools.partial(self.workspace.at, memory)
        config = Equilibrate(spec.dtype, not spec.R.contiguous, spec.R.width)
        values: tuple[Value, ...] = (
            *(spec.k, spec.n, "R", rs, cs, step, base.data.ptr, right.v, self._v_step, at("parts")),
            *(max(1.0, spec.k / SAMPLE), at("state"), encoded),
        )
        blocks = min(-(-spec.n // config.columns), max(1, tuned.WEIGHT_BLOCKS // spec.right_batch))
        return PreparedLaunch(config, (blocks, spec.right_batch), config.t1, values, base)

    @property
    def outstanding(self) -> float:
        """Weighted squares of a row of R beyond which the sample may have missed it; inf where all rows are sampled."""
        return _OUTSTANDING * MEAN_SQUARE if self.spec.k > SAMPLE else np.inf

    def _right(self, memory: int, carried: CarriedChecksum | None) -> OperandPointers:
        """What the right operand carries: of this workspace, or of before."""
        return self.workspace.right(memory) if carried is None else carried.right

    def _carried(self, memory: int) -> LineSumsArguments:
        """The parts of a workspace that a pass over R fills."""
        right = self.workspace.right(memory)
        return LineSumsArguments(right.s, right.squares, right.bit_sums, self.spec.acc, padded(self.spec.k))

    def _of_left(self, memory: int) -> LineSumsArguments:
        """The parts of a workspace for the sums of L, whichever kernel takes them."""
        return self._lines(memory, "t", "p2", "left_bit_sums", "guards")

    def _lines(self, memory: int, sums: str, squares: str, bit_sums: str, guards: str = "") -> LineSumsArguments:
        """These parts of a workspace, of all lines."""
        y, z, bits, guard = (self.workspace.at(memory, name) for name in (sums, squares, bit_sums, guards))
        return LineSumsArguments(y, z, bits, "float64", self.spec.m, guard)

    def _pass(
        self,
        name: str,
        memory: int,
        w: int,
        w2: int,
        into: LineSumsArguments,
        *,
        expected: int = 0,
    ) -> Step:
        """``X w``, ``(X o X) w2`` (w o w unless given) and the bit sums of X, which is R, L, C or C0.

        `expected`: address of bit sums to compare with. C was written by the step in front: it is not read before that
        has ended.
        """
        spec, state = self.spec, self.workspace.at(memory, "state")
        layout, p, q, w_step, dtype = self._operand(name)
        first = name == "R" and not expected  # the first read of R: its weights are from a sample
        outstanding = self.outstanding if first else np.inf
        sizes = (self.workspace.at(memory, "parts"), -(-spec.n // COLUMNS), self.workspace.at(memory, "sizes"))
        guards: tuple[Value, ...] = (into.guards, "encoded" if into.guards else 0)
        results: tuple[Value, ...] = (
            *into[:3],
            into.step,
            float(outstanding),
            state,
            int(name == "C"),
            expected,
        )
        results += (*(sizes if first else _NONE), *guards)
        products = spec.right_batch if name == "R" else spec.batch
        wanted = {"acc": spec.acc, "given": name == "L", "words": name != "C", "out": into.dtype}
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
        (name, layout, dtype), (p, q, products), compared = matrix, counts, "verdict" in wanted
        if layout.contiguous:
            config = line_sums(dtype, p, q, self._multiprocessors, width=layout.width, products=products, **wanted)
            values: tuple[Value, ...] = (p, q, name, layout.rs, layout.step, *right, *results)
            grid = -(-p // config.lines), products
            return PreparedLaunch(config, grid, config.t1, values, compared=compared)
        across = across_sums(dtype, p, q, self._multiprocessors, width=layout.width, products=products, **wanted)
        plan = AcrossPlan.of(across, p, q, self._multiprocessors, products)
        partial, tickets = memories.scratch(plan.nbytes, plan.tickets)
        values = (p, q, name, layout.cs, layout.step, *right, *results, plan.slice, partial.data.ptr, tickets.data.ptr)
        return PreparedLaunch(across, plan.grid, across.t1, values, (partial, tickets), compared=compared)

    def _operand(self, name: str) -> tuple[Layout, int, int, int, str]:
        """Layout, lines, positions, step of the weights, and type of R, L, C or C0."""
        spec = self.spec
        if name == "R":
            return spec.R, spec.k, spec.n, self._v_step, spec.dtype
        if name == "L":
            return spec.L, spec.m, spec.k, self._s_step, spec.dtype
        layout = spec.C if name == "C" else spec.C0
        assert layout is not None
        return layout, spec.m, spec.n, self._v_step, spec.out

    # ---- behind the product ----

    def verify(
        self,
        memory: int,
        carried: CarriedChecksum | None,
        alpha: float,
        beta: float,
        left: OrderedLines | None = None,
    ) -> list[Step]:
        """``u = C v``, and the verdict on each line unless `split`: then `judge` has it. `left`: as `encode` has it."""
        spec, right = self.spec, self._right(memory, carried)
        if "u" in self.workspace:
            return [self._pass("C", memory, right.v, 0, self._lines(memory, "u", "u2", ""))]
        results = (
            *self._bound(memory, right, alpha, beta),
            *((0, 0, 0) if spec.D is None else ("D", spec.D.rs if spec.D.contiguous else spec.D.cs, spec.D.step)),
        )
        counts, weights = (spec.m, spec.n, spec.batch), (right.v, 0, self._v_step)
        wanted, layout = {"acc": spec.acc, "verdict": True, "out": spec.cast}, spec.C
        if spec.joint:
            into = self._of_left(memory)
            results += ("L", spec.k, spec.L.rs, spec.L.step, right.s, right.squares, self._s_step)
            results += (*into[:3], into.guards)
            wanted["joint"], layout = True, layout._replace(width=min(layout.width, spec.L.width))
        same = self._same(memory, left) if spec.joint else []
        return [self._over(("C", layout, spec.out), counts, weights, results, wanted), *same]

    def judge(self, memory: int, carried: CarriedChecksum | None, alpha: float, beta: float) -> list[Step]:
        """The verdict on sums that `verify` has stored."""
        spec, right, config = self.spec, self._right(memory, carried), JudgeKernel()
        u, u2 = (self.workspace.at(memory, name) for name in ("u", "u2"))
        values: tuple[Value, ...] = (spec.m, u, u2, *self._bound(memory, right, alpha, beta))
        grid = -(-spec.m // config.t1), spec.batch
        return [PreparedLaunch(config, grid, config.t1, values, compared=True)]

    def _bound(self, memory: int, right: OperandPointers, alpha: float, beta: float) -> tuple[Value, ...]:
        """VERDICT_ARGUMENTS of kernels/check/verdict.cuh."""
        spec, at = self.spec, functools.partial(self.workspace.at, memory)
        factors = bound_factors(spec.arithmetic, spec.terms, spec.n, alpha)
        return (
            *(float(alpha), float(beta), at("t"), at("p2"), at("t0"), at("added2")),
            *(right.sizes, 0 if spec.shared else 2, *factors, at("tau"), at("lines"), at("state")),
            *(at("guards"), at("guards0"), "encoded", "call"),
        )

    def repair(
        self, memory: int, carried: CarriedChecksum | None, alpha: float, beta: float, *, write: bool
    ) -> list[Step]:
        """Location and repair of what failed; the record is written in any case. C stays as it is unless `write`."""
        spec, at = self.spec, functools.partial(self.workspace.at, memory)
        right = self._right(memory, carried)
        config = RepairKernel(spec.dtype, spec.out, spec.cast, turned=not spec.R.contiguous)
        nbytes = repair_bytes(config, spec.k, spec.n) if write else 0  # without memory it leaves all to the host
        space, _ = memories.scratch(nbytes, 0)
        a, f = spec.arithmetic, bound_factors(spec.arithmetic, spec.terms, spec.n, alpha)
        layouts = (("L", spec.L), ("R", spec.R), ("C", spec.C), ("D", spec.D), ("C0", spec.C0))
        values: tuple[Value, ...] = (
            *(spec.m, spec.k, spec.n, spec.batch),
            *(x for name, x_of in layouts for x in ((0, 0, 0, 0) if x_of is None else (name, *x_of[:3]))),
            *(float(alpha), float(beta), right.v, self._v_step),
            *(at("t"), at("t0"), at("p2"), at("added2"), at("tau"), f.factor, f.input_factor, f.out_factor, f.root),
            *(at("guards"), at("guards0"), "encoded"),
            *(at("left_bit_sums"), right.bit_sums, at("added_bit_sums"), self._s_step),
            *(a.u, rigorous_factor(a, spec.terms), float(a.u_out), f.underflow, right.sizes),
            *(max(_FEW, spec.m * spec.batch // 4), at("lines"), at("state")),
            *(space.data.ptr, nbytes, "call", "record", "tally", "ring"),
        )
        blocks = config.blocks * self._multiprocessors
        return [PreparedLaunch(config, (blocks, 1), config.t1, values, space, compared=True)]

    # ---- for hooks and the host ----

    def encoded(self, memory: int, carried: CarriedChecksum | None) -> tuple[Array, Array]:
        """s (k, 1) and t (m, 1) of a single product."""
        right = self._right(memory, carried)
        return elements(right.s, self.spec.k, self.spec.acc)[:, None], self.workspace.array(memory, "t").T

    def recomputed(self, memory: int) -> Array:
        """u (m, 1) of a single product whose check is `split`."""
        return self.workspace.array(memory, "u").T

    def predict_again(self, memory: int, right: OperandPointers, alpha: float, beta: float, where: Where) -> None:
        """``t = L s`` of an operand's sums, by the kernel that takes it in a product; on the current stream."""
        import cupy

        steps = [self._pass("L", memory, right.s, right.squares, self._of_left(memory))]
        if self.spec.joint:
            steps = self.verify(memory, CarriedChecksum(right, False), alpha, beta)
        for step in steps:
            step(cupy.cuda.get_current_stream().ptr, {"call": where["encoded"], **where})

    def bits_changed(self, right: OperandPointers, where: Where) -> bool:
        """Whether the sums of R's bits, which do not see order, are not what they were when it was encoded."""
        import cupy

        k = padded(self.spec.k)
        memory = cupy.zeros(self.workspace.nbytes // 8 + 3 * k)
        y, z, bits = (memory.data.ptr + self.workspace.nbytes + 8 * k * i for i in range(3))
        into = LineSumsArguments(y, z, bits, self.spec.acc, k)
        step = self._pass("R", memory.data.ptr, right.v, 0, into, expected=right.bit_sums)
        step(cupy.cuda.get_current_stream().ptr, where)
        return bool(self.flags(memory.data.ptr) & CHANGED)

    @np.errstate(all="ignore")
    def limits(self, memory: int, carried: CarriedChecksum | None, found: Check, alpha: float) -> list[Check]:
        """The check of a verdict, with the limits of all lines, for each product. Synchronises.

        A clean residual is taken to be as large a share of its bound as the closest one: the kernels keep no others.
        """
        spec = self.spec
        tau = to_host(self.workspace.array(memory, "tau"))
        v = self.workspace.array(memory, "v") if carried is None else elements(carried.right.v, spec.n, spec.acc)[None]
        moduli = np.abs(to_host(v).astype(np.float64))
        f = bound_factors(spec.arithmetic, spec.terms, spec.n, alpha)
        noise = recomputed_noise_factor(spec.n, partial=spec.arithmetic.partial) / f.factor
        allowed = (1 + found.closest + min(1.0, noise)) * tau / (1 - f.factor - f.out_factor)
        checks = []
        for i, own in enumerate(allowed):
            limits = LineLimits(found.side, own.tolist(), moduli[i if len(moduli) > 1 else 0].tolist())
            checks.append(found.with_limits(limits, float(np.median(tau[i])), found.closest, found.closest_line))
        return checks

    def flags(self, memory: int) -> int:
        """MISSED, CHANGED: flags that passes have set so far. Synchronises."""
        return int(self.workspace.array(memory, "state")[0, 0]) >> 32


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
    layout = Layout.of(R, transposed=False)
    k, n = R.shape
    name = dtype_name(X.dtype)
    spec = CheckSpec(1, k, n, 1, 1, name, name, "", layout, layout, layout, None, None, arithmetic(name, name), k)
    check = DeviceCheck(spec, device_of(X.device.id).multiprocessors)
    return check, cupy.empty(check.workspace.nbytes, cupy.uint8)


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
            for step in check.sum_again(at):
                step(stream.ptr, where)
        stream.synchronize()  # it may be used on any stream
    return DeviceOperandChecksum(check.workspace.right(at), memory, check.workspace.array(at, "v")[0], again)


@functools.lru_cache(maxsize=256)
def _base_on(n: int, device: int) -> Array:
    import cupy

    with memories.uncaptured():  # once: whatever stream uses it next, it is there
        return cupy.asarray(thrice(weights("balanced", n)[:, 0].astype("float32")))


def _base(n: int) -> Array:
    """Weights before they are scaled, three times, on the current device."""
    import cupy

    return _base_on(n, cupy.cuda.runtime.getDevice())
