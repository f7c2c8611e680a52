"""The fast check on a GPU: weights, checksums, bounds and verdicts by kernels that read each matrix once, no host.

A product is seen line by line as in `abft_tsm2.checksum.lines`: C (m lines of n) = alpha L R + beta C0. Before it,
`Checker.encode` takes ``s = R v`` and ``t = L s`` with the squares behind the bounds, and the sums of both operands'
bits; behind it, `Checker.verify` takes ``u = C v``, compares it with t line by line, and lets kernels/repair.cu locate
and repair what failed. What the kernels leave for one another lies in one piece of memory, the product's account; what
they found, in a record that the host may read when it likes.

Matrices whose lines are contiguous are read by kernels/line_sums.cu, the others by kernels/encode_both.cu.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, dtype_name
from abft_tsm2.checksum.bounds import Arithmetic, arithmetic, bound_factors, rigorous_factor
from abft_tsm2.checksum.carry import sampled_rows
from abft_tsm2.checksum.weights import weights
from abft_tsm2.core.check_config import COLUMNS, STATE, Equilibrate, Judge, Repair, line_sums, sums_of
from abft_tsm2.core.encode_both import encode_both
from abft_tsm2.core.generated import Generated
from abft_tsm2.core.launch import device_of
from abft_tsm2.core.launcher import Launcher
from abft_tsm2.core.workspace import scratch

_OUTSTANDING = 64.0  # a row's weighted squares, in units of the mean that equilibrated columns give: look again
_MEAN_SQUARE = sum((1 + h / 128) ** 2 for h in range(65)) / 65  # of a balanced weight
_VERDICT = "dd" + "qqqqq" + "q" + "ddddd" + "qqq"  # VERDICT_ARGUMENTS of kernels/verdict.cuh


class Layout(NamedTuple):
    """How the lines of a matrix, or of a stack of them, lie in memory.

    Attributes
    ----------
    rs, cs, step : int
        Elements from one line to the next, from one position of a line to the next, from one matrix to the next.
    width : int
        Bytes of which the address, and the larger of the strides, are multiples, at most 16.
    """

    rs: int
    cs: int
    step: int
    width: int

    @classmethod
    def of(cls, X: Array, *, turned: bool) -> Layout:
        """Of a CuPy array (p, q), or (batch, p, q); `turned`: a line is a column of it."""
        down, along = X.strides[-2:]
        if turned:
            down, along = along, down
        p, q = X.shape[-2:] if not turned else X.shape[:-3:-1]
        size = X.itemsize
        step = X.strides[0] if X.ndim == 3 and X.shape[0] > 1 else 0
        down, along = (down if p > 1 else size * q), (along if q > 1 else size)
        multiple = X.data.ptr | step | (down if along == size else along) | 16
        return cls(down // size, along // size, step // size, multiple & -multiple)

    @property
    def contiguous(self) -> bool:
        """Whether the lines are."""
        return self.cs == 1


class Right(NamedTuple):
    """What a right operand carries: addresses of v, of ``sum |v|`` and the smallest, of s, of the squares, of words."""

    v: int
    sizes: int
    s: int
    squares: int
    words: int


class Kept(NamedTuple):
    """What an operand that was encoded before carries, and whether its bits are compared with those of then."""

    right: Right
    recheck: bool


class Sums(NamedTuple):
    """Where a pass over a matrix puts what it takes: addresses (0 for none), the type of both sums, and the elements
    from one product's to the next's."""

    sums: int
    squares: int
    words: int
    dtype: str
    step: int


@dataclass(frozen=True)
class Case:
    """All that the kernels of one check are compiled, laid out and launched by.

    Attributes
    ----------
    m, k, n, batch : int
        Lines, their terms, their length; products.
    right_batch : int
        Right operands: 1 where all products share it.
    dtype, out, cast : str
        Types of the operands, of C, and of the copy of C that the verdict's pass makes ("" for none).
    L, R, C : Layout
    C0, D : Layout or None
        Of the matrix that beta multiplies, and of the copy.
    arithmetic : Arithmetic
    terms : int
        Roundings in one element.
    carried, recheck : bool
        Whether R was encoded before, and whether its words are compared with those of then.
    split : bool
        Whether u is stored before it is judged, so that somebody may look at it.
    """

    m: int
    k: int
    n: int
    batch: int
    right_batch: int
    dtype: str
    out: str
    cast: str
    L: Layout
    R: Layout
    C: Layout
    C0: Layout | None
    D: Layout | None
    arithmetic: Arithmetic
    terms: int
    carried: bool = False
    recheck: bool = False
    split: bool = False


class Arrays(NamedTuple):
    """The operands of one call, CuPy arrays seen as they are: lines are columns of them where `turned`."""

    L: Any
    R: Any
    C: Any
    C0: Any
    D: Any
    turned: bool


def _padded(n: int) -> int:
    """Elements that weights of n take: the next product's begin at a multiple of 16 bytes again."""
    return -(-n // 4) * 4


class Checker:
    """The kernels of one `Case` on the current device. May be used from several threads.

    Attributes
    ----------
    nbytes : int
        Of an account.
    """

    def __init__(self, case: Case, multiprocessors: int) -> None:
        self.case, self._multiprocessors = case, multiprocessors
        self._acc = sums_of(case.dtype)
        self._places: dict[str, tuple[int, Any, int, int, int]] = {}
        self.nbytes = 0
        n, k = _padded(case.n), _padded(case.k)
        self._place("state", "uint64", 1, STATE)
        if not case.carried:
            self._place("v", self._acc, case.right_batch, case.n, n)
            self._place("sizes", "float64", case.right_batch, 2)
            self._place("parts", "float64", case.right_batch, 4 * -(-case.n // COLUMNS))
        if not case.carried or case.recheck:
            for name, dtype in (("s", self._acc), ("squares", self._acc), ("right_words", "uint64")):
                self._place(name, dtype, case.right_batch, case.k, k)
        added = ("t0", "added2", "added_words") if case.C0 is not None else ()
        stored = ("u", "u2") if case.split or not case.C.contiguous else ()
        for name in ("t", "p2", "left_words", "tau", *added, *stored):
            self._place(name, "uint64" if name.endswith("words") else "float64", case.batch, case.m)
        self._place("lines", "uint32", case.batch, case.m)
        self._v_step, self._s_step = (n, k) if case.right_batch > 1 else (0, 0)
        self._mean = _MEAN_SQUARE * case.n / case.k  # of a row's weighted squares

    def _place(self, name: str, dtype: str, products: int, count: int, apart: int = 0) -> None:
        """`count` elements of each product, `apart` from one to the next."""
        apart = apart or count
        self._places[name] = (self.nbytes, np.dtype(dtype), products, count, apart)
        self.nbytes += -(-products * apart * np.dtype(dtype).itemsize // 128) * 128

    def part(self, account: int, name: str) -> Array:
        """A part of an account as an array (products, count)."""
        place, dtype, products, count, apart = self._places[name]
        return _array(account + place, products * apart, dtype).reshape(products, apart)[:, :count]

    def at(self, account: int, name: str) -> int:
        """The address of a part of an account; 0 for one that this case does not have."""
        place = self._places.get(name)
        return 0 if place is None else account + place[0]

    def right(self, account: int) -> Right:
        """What the right operand carries, in this account."""
        return Right(*(self.at(account, name) for name in ("v", "sizes", "s", "squares", "right_words")))

    # ---- before the product ----

    def encode(self, account: int, arrays: Arrays, kept: Kept | None, stream: int) -> None:
        """Queue all that precedes the product: the weights, ``s = R v``, ``t = L s``, ``C0 v``.

        Parameters
        ----------
        account : int
            Address of `nbytes` bytes, not initialised.
        arrays : Arrays
        kept : Kept or None
            Of a right operand that was encoded before.
        stream : int
            Handle of the stream, which is CuPy's current one too.
        """
        case, right, state, fresh = self.case, self.right(account), self.at(account, "state"), True
        if kept is None:
            self.carry(account, arrays, stream)
            fresh = False
        else:
            own, right = right, kept.right
            if case.recheck:
                into = Sums(own.s, own.squares, own.words, self._acc, _padded(case.k))
                self._pass("R", state, arrays, right.v, 0, into, stream, expected=right.words, fresh=True)
                fresh = False
        into = self._sums_of(account, "t", "p2", "left_words")
        self._pass("L", state, arrays, right.s, right.squares, into, stream, fresh=fresh)
        if case.C0 is not None:
            into = self._sums_of(account, "t0", "added2", "added_words")
            self._pass("C0", state, arrays, right.v, 0, into, stream)

    def _sums_of(self, account: int, sums: str, squares: str, words: str) -> Sums:
        """These parts of an account, of all lines."""
        y, z, bits = (self.at(account, name) for name in (sums, squares, words))
        return Sums(y, z, bits, "float64", self.case.m)

    def carry(self, account: int, arrays: Arrays, stream: int) -> None:
        """Queue the right operand's part: weights and ``s = R v``."""
        right = self.right(account)
        self._equilibrate(account, arrays, stream)
        into = Sums(right.s, right.squares, right.words, self._acc, _padded(self.case.k))
        self._pass("R", self.at(account, "state"), arrays, right.v, 0, into, stream)

    def _equilibrate(self, account: int, arrays: Arrays, stream: int) -> None:
        case, (rs, cs, step, _) = self.case, self.case.R
        base, sample = _constants(case.n, case.k)
        right = self.right(account)
        # The ticket belongs to the stream and is 0 again after each use.
        _, tickets = scratch(0, case.right_batch)
        self._equilibrator(
            *(stream, case.n, arrays.R.data.ptr, rs, cs, step, sample.data.ptr, sample.size, case.k / sample.size),
            *(base.data.ptr, right.v, self._v_step, self.at(account, "parts"), tickets.data.ptr, right.sizes),
            self.at(account, "state"),
        )

    @functools.cached_property
    def _equilibrator(self) -> Launcher:
        case = self.case
        config = Equilibrate(case.dtype, turned=not case.R.contiguous)
        return Launcher(config, (-(-case.n // COLUMNS), case.right_batch), config.t1, "qqqqqqqdqqqqqqq")

    def _pass(
        self,
        name: str,
        state: int,
        arrays: Arrays,
        w: int,
        w2: int,
        into: Sums,
        stream: int,
        *,
        expected: int = 0,
        fresh: bool = False,
    ) -> None:
        """``X w``, ``(X o X) w2`` (w o w unless given) and the words of X, which is R, L, C or C0."""
        X, layout, p, q, w_step = self._operand(name, arrays)
        if layout.contiguous:
            sampled = name == "R" and not expected and self.case.k > sampled_rows(self.case.k).size
            self._summer(name)(
                *(stream, p, q, X.data.ptr, layout.rs, layout.step, w, w2, w_step),
                *(into.sums, into.squares, into.words, into.step),
                *(_OUTSTANDING * self._mean if sampled else np.inf, state, int(fresh), expected),
            )
            return
        if fresh:
            _array(state, STATE, "uint64")[...] = 0
        lines_in_columns(X, arrays.turned, p, q, w, w2, self._acc, into)
        if expected:
            changed = (_array(into.words, p, "uint64") != _array(expected, p, "uint64")).any()
            _array(state, 2, "uint32")[1:] |= changed.astype("uint32") << 1

    def _operand(self, name: str, arrays: Arrays) -> tuple[Any, Layout, int, int, int]:
        """Array, layout, lines, positions and step of the weights of R, L, C or C0."""
        case = self.case
        if name == "R":
            return arrays.R, case.R, case.k, case.n, self._v_step
        if name == "L":
            return arrays.L, case.L, case.m, case.k, self._s_step
        layout = case.C if name == "C" else case.C0
        assert layout is not None
        return getattr(arrays, name), layout, case.m, case.n, self._v_step

    @functools.cache  # noqa: B019  a checker lives as long as the process
    def _summer(self, name: str) -> Launcher:
        case = self.case
        p, q = {"R": (case.k, case.n), "L": (case.m, case.k)}.get(name, (case.m, case.n))
        layout = {"R": case.R, "L": case.L, "C": case.C, "C0": case.C0}[name]
        assert layout is not None
        config = line_sums(
            case.dtype if name in "RL" else case.out,
            p,
            q,
            self._multiprocessors,
            acc=self._acc,
            given=name == "L",
            words=name != "C",
            out=self._acc if name == "R" else "float64",
            width=layout.width,
        )
        products = case.right_batch if name == "R" else case.batch
        return Launcher(config, (-(-p // config.lines), products), config.t1, "q" * 12 + "d" + "qqq")

    # ---- behind the product ----

    def verify(
        self,
        account: int,
        arrays: Arrays,
        kept: Kept | None,
        alpha: float,
        beta: float,
        stream: int,
    ) -> None:
        """Queue ``u = C v`` and the verdict on each line; in two steps where the case is `split`: see `judge`."""
        case, right = self.case, self.right(account) if kept is None else kept.right
        if case.split or not case.C.contiguous:
            into = self._sums_of(account, "u", "u2", "")
            self._pass("C", self.at(account, "state"), arrays, right.v, 0, into, stream)
            if not case.split:
                self.judge(account, kept, alpha, beta, stream)
            return
        D = case.D
        self._verdict(
            *(stream, case.m, case.n, arrays.C.data.ptr, case.C.rs, case.C.step, right.v, 0, self._v_step),
            *self._bound(account, right, alpha, beta),
            *((0, 0, 0) if D is None else (arrays.D.data.ptr, D.rs, D.step)),
        )

    def judge(self, account: int, kept: Kept | None, alpha: float, beta: float, stream: int) -> None:
        """Queue the verdict on sums that `verify` has stored."""
        u, u2 = self.at(account, "u"), self.at(account, "u2")
        right = self.right(account) if kept is None else kept.right
        self._judge(stream, self.case.m, u, u2, *self._bound(account, right, alpha, beta))

    def _bound(self, account: int, right: Right, alpha: float, beta: float) -> tuple[Any, ...]:
        """VERDICT_ARGUMENTS of kernels/verdict.cuh."""
        case = self.case
        named = (self.at(account, name) for name in ("t", "p2", "t0", "added2"))
        step = 2 if self._v_step else 0
        factors = bound_factors(case.arithmetic, case.terms, case.n, alpha)
        return (
            *(alpha, beta, *named, right.sizes, step, *factors),
            *(self.at(account, name) for name in ("tau", "lines", "state")),
        )

    @functools.cached_property
    def _verdict(self) -> Launcher:
        case = self.case
        config = line_sums(
            case.out,
            case.m,
            case.n,
            self._multiprocessors,
            acc=self._acc,
            verdict=True,
            out=case.cast,
            width=case.C.width,
        )
        grid = -(-case.m // config.lines), case.batch
        return Launcher(config, grid, config.t1, "q" * 8 + _VERDICT + "qqq")

    @functools.cached_property
    def _judge(self) -> Launcher:
        config = Judge()
        return Launcher(config, (-(-self.case.m // config.t1), self.case.batch), config.t1, "qqq" + _VERDICT)

    def repair(
        self,
        account: int,
        arrays: Arrays,
        kept: Kept | None,
        alpha: float,
        beta: float,
        stream: int,
        record: int,
        *,
        write: bool,
    ) -> None:
        """Queue the location and repair of what failed; the record is written in any case."""
        case, right = self.case, self.right(account) if kept is None else kept.right
        nbytes = repair_bytes(case.k, case.n) if write else 0  # without memory it leaves all to the host
        memory, _ = scratch(nbytes, 0)
        a, f = case.arithmetic, bound_factors(case.arithmetic, case.terms, case.n, alpha)
        named = (self.at(account, name) for name in ("t", "t0", "p2", "added2", "tau"))
        self._repairer(
            *(stream, case.m, case.k, case.n, case.batch),
            *(x for X, layout in self._matrices(arrays) for x in _matrix(X, layout)),
            *(alpha, beta, right.v, self._v_step, *named, f.factor, f.out_factor, f.root),
            *(self.at(account, "left_words"), right.words, self._s_step),
            *(a.u, rigorous_factor(a, case.terms), a.u_out, f.underflow, right.sizes),
            *(self.at(account, "lines"), self.at(account, "state"), memory.data.ptr, nbytes, record),
        )

    def _matrices(self, arrays: Arrays) -> tuple[tuple[Any, Layout | None], ...]:
        case = self.case
        return (arrays.L, case.L), (arrays.R, case.R), (arrays.C, case.C), (arrays.D, case.D), (arrays.C0, case.C0)

    @functools.cached_property
    def _repairer(self) -> Launcher:
        case = self.case
        config = Repair(case.dtype, case.out, case.cast, turned=not case.R.contiguous)
        letters = "qqqq" + "qqqq" * 5 + "dd" + "qq" + "qqqqq" + "ddd" + "qqq" + "dddd" + "qqqqqq"
        return Launcher(config, (config.blocks * self._multiprocessors, 1), config.t1, letters)

    # ---- what hooks and the host look at ----

    def encoded(self, account: int, kept: Kept | None) -> tuple[Array, Array]:
        """s (k, 1) and t (m, 1) of a single product."""
        right = self.right(account) if kept is None else kept.right
        return _array(right.s, self.case.k, self._acc)[:, None], self.part(account, "t").T

    def observed(self, account: int) -> Array:
        """u (m, 1) of a single product whose case is `split`."""
        return self.part(account, "u").T

    def differences(self, then: int, now: int, kept: Kept | None, arrays: Arrays) -> list[str]:
        """Where two accounts of the same product differ: "R", "L", "C0" for operands, "v", "s", "t", "u" for checksums.

        Kernels add in a fixed order, so that what is not the same, bit for bit, is not the same. Synchronises.
        """
        names = {"R": ("right_words",), "L": ("left_words",), "C0": ("added_words",), "v": ("v", "sizes")}
        names |= {"s": ("s", "squares"), "t": ("t", "p2", "t0", "added2"), "u": ("u", "u2")}
        found = [name for name, parts in names.items() if any(self._differs(then, now, part) for part in parts)]
        if kept is not None:
            found = [name for name in found if name not in "Rvs"]  # those of an encoded operand are its own
            if self._changed(kept.right, arrays):
                found.insert(0, "R")
        return found

    def _differs(self, then: int, now: int, name: str) -> bool:
        if name not in self._places:
            return False
        before, after = (self.part(account, name) for account in (then, now))
        bits = f"u{before.itemsize}"
        return bool((before.view(bits) != after.view(bits)).any())

    def _changed(self, right: Right, arrays: Arrays) -> bool:
        """Whether R is not what it was when it was encoded."""
        import cupy

        k = self.case.k
        sums = cupy.empty((3, _padded(k)))
        state = cupy.zeros(STATE, cupy.uint64)
        y, z, words = (x.data.ptr for x in sums)
        into = Sums(y, z, words, self._acc, _padded(k))
        stream = cupy.cuda.get_current_stream().ptr
        self._pass("R", state.data.ptr, arrays, right.v, 0, into, stream, expected=right.words)
        return bool(state.view(cupy.uint32)[1] & 2)


def repair_bytes(k: int, n: int) -> int:
    """Memory that kernels/repair.cu needs."""
    stripes = -(-n // Repair.stripe)
    slabs = max(1, min(264 // stripes, -(-k // 128)))
    return 45152 + 64 * (2 * k + (3 + 2 * slabs) * n)


def _matrix(X: Array | None, layout: Layout | None) -> tuple[int, int, int, int]:
    """Address and strides."""
    return (0, 0, 0, 0) if X is None or layout is None else (X.data.ptr, layout.rs, layout.cs, layout.step)


def carried_on_device(X: Array, side: str) -> tuple[Right, Array]:
    """What a CuPy matrix carries into products, and the memory that holds it.

    side "rows": as right operand; "columns": as left operand, of whose transpose it is the same.
    """
    import cupy

    turned = side == "columns"
    layout = Layout.of(X, turned=turned)
    k, n = X.shape if not turned else X.shape[::-1]
    name = dtype_name(X.dtype)
    case = Case(1, k, n, 1, 1, name, name, "", layout, layout, layout, None, None, arithmetic(name, name), k)
    checker = Checker(case, device_of(X.device.id).multiprocessors)
    with X.device:
        memory = cupy.empty(checker.nbytes, cupy.uint8)
        checker.carry(memory.data.ptr, Arrays(X, X, X, None, None, turned), cupy.cuda.get_current_stream().ptr)
        cupy.cuda.get_current_stream().synchronize()  # it may be used on any stream
    return checker.right(memory.data.ptr), memory


@functools.lru_cache(maxsize=256)
def _constants_of(n: int, k: int, device: int) -> tuple[Any, Any]:
    import cupy

    made = cupy.asarray(weights("balanced", n)[:, 0].astype("float32")), cupy.asarray(sampled_rows(k))
    cupy.cuda.get_current_stream().synchronize()  # once: whatever stream uses them next, they are there
    return made


def _constants(n: int, k: int) -> tuple[Any, Any]:
    """Weights before they are scaled, and the rows of the sample, on the current device."""
    import cupy

    return _constants_of(n, k, cupy.cuda.runtime.getDevice())


def _array(address: int, n: int, dtype: Any) -> Array:
    """n elements of memory that somebody else keeps."""
    import cupy

    dtype = np.dtype(dtype)
    memory = cupy.cuda.UnownedMemory(address, n * dtype.itemsize, None)
    return cupy.ndarray((n,), dtype, cupy.cuda.MemoryPointer(memory, 0))


def lines_in_columns(X: Array, turned: bool, p: int, q: int, w: int, w2: int, acc: str, into: Sums) -> None:
    """The pass of kernels/line_sums.cu over lines that are not contiguous: p lines of q elements of X.

    X is one matrix, whose columns the lines are where `turned`.
    """
    X = X.reshape(X.shape[-2:])
    matrix = X if turned else X.T  # a line is a column of it
    weight = _array(w, q, acc).astype("float64")
    square = weight * weight if not w2 else _array(w2, q, acc).astype("float64")
    found = encode_both(
        matrix,
        Generated("ones"),
        weight[:, None],
        squares=(square, _zeros(p)),
        words=into.words != 0,
        dtype="float64",
    )
    _array(into.sums, p, into.dtype)[...] = found.columns[0]
    _array(into.squares, p, into.dtype)[...] = found.column_squares
    if into.words:
        _array(into.words, p, "uint64")[...] = found.column_words


def _zeros(n: int) -> Array:
    import cupy

    return cupy.zeros(n)
