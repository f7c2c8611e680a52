"""What a check on a GPU is compiled and launched by (`CheckSpec`), and where its workspace's parts lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.checksum.bounds import Arithmetic
from abft_tsm2.checksum.device.kernels import COLUMNS, STATE, sums_of
from abft_tsm2.core import cublas


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
    def of(cls, X: Array, *, transposed: bool) -> Layout:
        """Of a CuPy array (p, q), or (batch, p, q); `transposed`: a line is a column of it."""
        down, along = X.strides[-2:]
        p, q = X.shape[-2:]
        if transposed:
            down, along, p, q = along, down, q, p
        size = X.itemsize
        step = cublas.step(X)
        down, along = (down if p > 1 else size * q), (along if q > 1 else size)
        multiple = X.data.ptr | step | (down if along == size else along) | 16
        return cls(down // size, along // size, step // size, multiple & -multiple)

    @property
    def contiguous(self) -> bool:
        """Whether the lines are."""
        return self.cs == 1


class OperandPointers(NamedTuple):
    """What a right operand carries: addresses of v, of ``sum |v|`` and the smallest, of s, of squares, of bit sums."""

    v: int
    sizes: int
    s: int
    squares: int
    bit_sums: int


class OrderedLines(NamedTuple):
    """An encoded matrix as it lies in memory, and what it had: the address of the ordered sums of its lines (words,
    lines), how many lines of how many elements, and elements from the beginning of one to that of the next."""

    sums: int
    lines: int
    length: int
    apart: int


class CarriedChecksum(NamedTuple):
    """What an operand that was encoded before carries, whether its bits are compared with those of then, and a weak
    reference to its `Encoded`."""

    right: OperandPointers
    recheck: bool
    owner: Any = None


@dataclass(frozen=True)
class CheckSpec:
    """All that the kernels of one check are compiled, laid out and launched by: C = alpha L R + beta C0, line by line.

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
        Whether R was encoded before, and whether its bit sums are compared with those of then.
    split : bool
        Whether u is stored before it is judged, for a hook to see.
    joint : bool
        Whether the rows of L are summed by the kernel that judges those of C.
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
    joint: bool = False

    @property
    def acc(self) -> str:
        """The type of weights and of what a right operand carries."""
        return sums_of(self.dtype)

    @property
    def shared(self) -> bool:
        """Whether all products have the same right operand."""
        return self.right_batch == 1


def padded(n: int) -> int:
    """Elements that weights of n take: the next product's begin at a multiple of 16 bytes again."""
    return -(-n // 4) * 4


class WorkspaceLayout:
    """Where each part of a check's workspace lies.

    Attributes
    ----------
    nbytes : int
    """

    def __init__(self, spec: CheckSpec) -> None:
        self.nbytes = 0
        self._parts: dict[str, tuple[int, Any, int, int, int]] = {}
        acc, n, k, rights = spec.acc, padded(spec.n), padded(spec.k), spec.right_batch
        self._add("state", "uint64", 1, STATE)
        if not spec.carried:
            self._add("v", acc, rights, spec.n, n)
            self._add("sizes", "float64", rights, 2)
            self._add("parts", "float64", rights, 2 * -(-spec.n // COLUMNS))
        if not spec.carried or spec.recheck:
            for name, dtype in (("s", acc), ("squares", acc), ("right_bit_sums", "uint64")):
                self._add(name, dtype, rights, spec.k, k)
        added = ("t0", "added2", "added_bit_sums", "guards0") if spec.C0 is not None else ()
        stored = ("u", "u2") if spec.split else ()
        for name in ("t", "p2", "left_bit_sums", "guards", "tau", *added, *stored):
            self._add(
                name,
                "uint64" if name.startswith("guards") or name.endswith("bit_sums") else "float64",
                spec.batch,
                spec.m,
            )
        self._add("lines", "uint32", spec.batch, spec.m)

    def _add(self, name: str, dtype: str, products: int, count: int, apart: int = 0) -> None:
        """`count` elements of each product, `apart` from one to the next."""
        kind, apart = np.dtype(dtype), apart or count
        self._parts[name] = (self.nbytes, kind, products, count, apart)
        self.nbytes += -(-products * apart * kind.itemsize // 128) * 128

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def at(self, memory: int, name: str) -> int:
        """The address of a part in a workspace that begins at `memory`; 0 for one that it does not have."""
        part = self._parts.get(name)
        return 0 if part is None else memory + part[0]

    def array(self, memory: int, name: str) -> Array:
        """A part as an array (products, count)."""
        place, dtype, products, count, apart = self._parts[name]
        return elements(memory + place, products * apart, dtype).reshape(products, apart)[:, :count]

    def right(self, memory: int) -> OperandPointers:
        """What the right operand carries in this workspace."""
        return OperandPointers(*(self.at(memory, name) for name in ("v", "sizes", "s", "squares", "right_bit_sums")))


def elements(address: int, n: int, dtype: Any) -> Array:
    """n elements of a GPU's memory, which has another owner."""
    import cupy

    kind = np.dtype(dtype)
    memory = cupy.cuda.UnownedMemory(address, n * kind.itemsize, None)
    return cupy.ndarray((n,), kind, cupy.cuda.MemoryPointer(memory, 0))
