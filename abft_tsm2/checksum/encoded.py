"""Encoding: a matrix with the checksums it carries into products, and those that guard it in memory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any, Never

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import (
    Array,
    as_operand,
    dtype_name,
    float_type,
    from_host,
    in_numpy,
    is_column_major,
    is_cupy,
    namespace,
    same_bits,
    to_host,
)
from abft_tsm2.checksum.device.encode import DeviceChecksums, encode_on_device, norms_on_device
from abft_tsm2.checksum.device.layout import OrderedLines
from abft_tsm2.checksum.encode import OperandChecksum, Sided, carry, log2_column_norms
from abft_tsm2.checksum.storage import Diagnosis, IntegerChecksums, diagnose_storage, integer_checksums, restore
from abft_tsm2.checksum.weights import Weights, weights
from abft_tsm2.checksum.words import WordSums
from abft_tsm2.core.cublas import layout
from abft_tsm2.core.row_sums import fingerprint, small
from abft_tsm2.place import device_name
from abft_tsm2.report import Fault, Report, Status


@dataclass(frozen=True, eq=False, repr=False)
class Encoded:
    """A matrix with its checksums. Made by `encode`.

    ``A @ E`` and ``E @ B`` are `protected_gemm`. It is no array: where one is meant, take ``E.array``.

    Attributes
    ----------
    array : (p, q) array
        The matrix itself: a reference, not a copy.
    repair : bool
        Whether `array` may be written to repair it.
    recheck : bool
        Whether each use in a product first checks that `array` is still what was encoded.
    norms : Sided
        2-norms of the rows (p,) and columns (q,), of their finite elements, in float64.
    integers : IntegerChecksums
        Bit-exact checksums that find and restore corrupted elements.
    fingerprint : (words, lines) array of uint64
        The `abft_tsm2.core.row_sums.fingerprint` of `array`, for a quick check at each use.
    dtype : dtype
        Of `array`, when it was encoded.
    bits : array or None
        A copy of a NumPy matrix of fewer than 2**17 elements, as unsigned integers: it is compared in less time than
        sums that see order are taken.
    """

    array: Array
    repair: bool
    recheck: bool
    norms: Sided
    integers: IntegerChecksums
    fingerprint: Array
    right: OperandChecksum | None
    left: OperandChecksum | None
    device: DeviceChecksums | None = None
    dtype: Any = None
    bits: Array | None = None

    @property
    def row_checksums(self) -> Array | None:
        """(p, r) array of float64, ``A V``: what a right operand carries; None if that side was not asked for."""
        return None if self.right is None else self.right.sums

    @property
    def column_checksums(self) -> Array | None:
        """(r, q) array of float64, ``W^T A``: what a left operand carries; None if that side was not asked for."""
        return None if self.left is None else self.left.sums.T

    @property
    def weights(self) -> Sided:
        """V (q, r) behind `row_checksums`, W (p, r) behind `column_checksums`."""
        return Sided(*(None if side is None else side.weights for side in (self.right, self.left)))

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.array.shape[1]

    __array_ufunc__ = None  # NumPy and CuPy leave A @ E to E

    def __matmul__(self, other: Any) -> Any:
        return _multiplied(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _multiplied(other, self)

    def __radd__(self, other: Any) -> Never:
        # NumPy, which offers its sum to E, takes a refusal for a list's, and says so.
        raise TypeError(f"a {type(other).__name__} and an Encoded are not added: use E.array")

    def __array__(self, *_: Any, **__: Any) -> Never:
        raise TypeError(
            "an Encoded is not made an array in silence, as what is computed with that is not protected: "
            "use E.array where an array is meant, protected_gemm or @ for products"
        )

    @property
    def T(self) -> Encoded:
        """The transpose, of the same memory: what the one carries as a right operand, the other carries as a left one.

        Raises
        ------
        TypeError
            If the array does not say in which order its elements lie: of a library without strides.
        """
        A = self.as_encoded()
        if A.size and 1 not in A.shape and is_column_major(A) == is_column_major(A.T):  # lines of its fingerprint
            raise TypeError("the array has no strides, or equal ones, that tell its rows from its columns: encode A.T")
        rows, columns, i = self.norms.rows, self.norms.columns, self.integers
        d = self.device
        device = None if d is None else DeviceChecksums(d.sides.turned(), d.memory)
        return replace(
            self,
            array=A.T,
            norms=Sided(columns, rows),
            integers=IntegerChecksums((i.shape[1], i.shape[0]), i.itemsize, i.columns, i.rows),
            fingerprint=self.fingerprint if A.size else fingerprint(A.T),
            right=self.left,
            left=self.right,
            device=device,
            bits=None if self.bits is None else self.bits.T,
        )

    def __repr__(self) -> str:
        A, sides = self.array, (("row", self.row_checksums), ("column", self.column_checksums))
        made = [f"{name} checksums {tuple(sums.shape)}" for name, sums in sides if sums is not None]
        kind = f"{type(A).__module__.partition('.')[0]} array on {device_name(A)}"
        return (
            f"{type(self).__name__}: {' x '.join(map(str, A.shape))} {dtype_name(A.dtype)}, {kind}\n"
            f"  carries {' and '.join(made)}\n"
            f"  repair={self.repair}, recheck={self.recheck}"
        )

    def as_encoded(self) -> Array:
        """`array`, in the shape and type in which it was encoded.

        Raises
        ------
        ValueError
            If it was given others in place (``A.dtype = ...``, ``A.shape = ...``): its bits are other numbers then.
        """
        found, then = (tuple(self.array.shape), self.array.dtype), (self.integers.shape, self.dtype)
        if found != then:
            raise ValueError(
                f"the array was encoded as {then[0]} of {_shown(then[1])} and is {found[0]} of {_shown(found[1])} now: "
                "set its dtype and shape back, or encode it anew"
            )
        return self.array

    def changed(self) -> bool:
        """Whether the array's bits differ from those that were encoded: one read.

        A small matrix is compared with a copy. Of others 64-bit sums of each line are, which see every change of one or
        two elements of a line, and such as change places; of changes of more those that cancel with multipliers of 31
        bits, which nothing but chance makes, only `verify` finds.
        """
        array = self.as_encoded()
        if self.bits is not None:
            return bool((array.view(self.bits.dtype) != self.bits).any())
        return not same_bits(self.fingerprint, fingerprint(array))

    def holds(self, array: Array) -> bool:
        """Whether this array, the encoded one or a copy of it in any order, has the bits that were encoded; the integer
        checksums have the last word, in case it is the fingerprint that was hit."""
        return same_bits(self.fingerprint, fingerprint(array)) or diagnose_storage(array, self.integers).clean

    def ordered_lines(self) -> OrderedLines:
        """What kernels compare a CuPy matrix with: the lines that `fingerprint` is of."""
        lines = self.array.T if is_column_major(self.array) else self.array
        if lines.shape[0] != self.fingerprint.shape[1]:  # a single line, which lies either way
            lines = lines.T
        apart = lines.strides[0] // lines.dtype.itemsize if lines.shape[0] > 1 else 0
        count, length = lines.shape
        return OrderedLines(int(self.fingerprint.data.ptr), count, length, apart)

    def is_in_doubt(self) -> bool:
        """Whether what it carries was hit, or the array has changed, which is read where `recheck` is set: asked when
        the checksums of a product have been predicted from it, so that they and the product follow from one matrix."""
        return not self.intact() or (self.recheck and self.changed())

    def diagnose(self) -> Diagnosis:
        """Compare the array with its integer checksums, and locate what is wrong."""
        return diagnose_storage(self.as_encoded(), self.integers)

    def intact(self) -> bool:
        """Whether what the array carries into products still has the bits it was made with: O(p + q)."""
        return all(side.intact() for side in (self.right, self.left) if side is not None)

    def verify(self) -> Report:
        """Find every corrupted element of the stored matrix, down to the last bit.

        Returns
        -------
        report : Report
            CLEAN; INPUT_CHANGED with the faults (one for each element that was located, or one for the lines that
            disagree where it was not); CHECKSUM_FAULT where only the stored checksums disagree.

        Notes
        -----
        Integer arithmetic only: no tolerance. Synchronises with the host. Reads the matrix once. Never raises on
        what it finds: see `correct`.
        """
        found = self.diagnose()
        report = self._report(found, repaired="")
        policy.deliver(report, "detect")
        return report

    def correct(self) -> Report:
        """Restore every corrupted element bit for bit, or refuse and leave the matrix as it is.

        Returns
        -------
        report : Report
            CLEAN, CORRECTED, or CHECKSUM_FAULT.

        Raises
        ------
        SilentDataCorruptionError
            If the pattern of faults does not determine the original (two wrong elements in one row and in one
            column, say). Nothing has been changed then.
        ValueError
            If the array is read-only.

        Notes
        -----
        This call is itself the permission to write into the array, whatever `repair` says.
        """
        found = self.diagnose()
        if found.corruptions and not found.refused:
            restore(self.array, found.corruptions)
        report = self._report(found, repaired="restored bit for bit from integer checksums")
        policy.deliver(report, "correct")
        return report

    def _report(self, found: Diagnosis, repaired: str) -> Report:
        reasons: tuple[str, ...] = ()
        faults = storage_faults(found, self.array, "A", repaired)
        if found.clean:
            status = Status.CLEAN
        elif found.refused:
            status = Status.UNCORRECTABLE if repaired else Status.INPUT_CHANGED
            reasons = (found.refused,)
        elif found.corruptions:
            status = Status.CORRECTED if repaired else Status.INPUT_CHANGED
        else:
            status = Status.CHECKSUM_FAULT
        p, q = self.shape
        return Report(
            status=status,
            operation="encoded",
            m=p,
            k=0,
            n=q,
            dtype=float_type(self.array).name,
            faults=faults,
            reasons=reasons,
            device=device_name(self.array),
        )


class Carrying(Encoded):
    """A right operand whose maker guards it: it carries sums into products, and has nothing to be restored from."""

    @classmethod
    def of(cls, array: Array, right: OperandChecksum, words: WordSums) -> Carrying:
        """An operand with `carried` sums, and the sums of the `words` that it had then."""
        none: Any = None
        return cls(array, False, False, none, none, words, right, None)

    def as_encoded(self) -> Array:
        return self.array

    def changed(self) -> bool:
        return not self.holds(self.array)

    def holds(self, array: Array) -> bool:
        return not self.fingerprint.differ(array)

    def diagnose(self) -> Diagnosis:
        refused = "it is not what it was when its sums were taken" if self.changed() else ""
        return Diagnosis(False, refused=refused, checksum_fault=not refused)


def _multiplied(a: Any, b: Any) -> Any:
    return importlib.import_module("abft_tsm2.gemm").protected_gemm(a, b)


def _shown(dtype: Any) -> str:
    """A dtype with its byte order, where that is not this machine's."""
    return dtype_name(dtype) if getattr(dtype, "isnative", True) else str(dtype.str)


def storage_faults(found: Diagnosis, array: Array, operand: str, repaired: str) -> tuple[Fault, ...]:
    """The report's entries for what the integer checksums found in a stored matrix."""
    if found.refused:
        return (Fault(operand, "block", found.rows, found.columns, 0, float("nan")),)
    kind = np.dtype(f"u{float_type(array).bits // 8}")

    def value(bits: int) -> float:
        return float(np.array([bits], kind).view(to_host(array[:0, :0]).dtype)[0])

    faults = []
    for c in found.corruptions:
        with np.errstate(all="ignore"):
            magnitude = abs(value(c.found) - value(c.original))
        faults.append(Fault(operand, "element", (c.row,), (c.column,), 1, magnitude, repaired))
    return tuple(faults)


def _chosen_weights(given: Any, n: int, name: str) -> tuple[Weights, bool]:
    """Weights for n elements, and whether to equilibrate them: explicit ones are used as they are."""
    if given is None or isinstance(given, str):
        kind = given or "balanced"
        return weights(kind, n), kind == "balanced"
    V = in_numpy(given, f"{name} weights")
    if V.dtype.kind not in "iuf":
        raise TypeError(f"{name} weights have dtype {V.dtype}: real numbers are expected")
    V = V.astype(np.float64)
    V = V[:, None] if V.ndim == 1 else V
    if V.ndim != 2 or V.shape[0] != n or V.shape[1] < 1:
        raise ValueError(f"{name} weights have shape {np.shape(given)}: expected ({n},) or ({n}, r)")
    if not np.all(np.isfinite(V)):
        raise ValueError(f"{name} weights hold NaN or Inf")
    blind = np.flatnonzero(~V.any(axis=1))
    if blind.size:
        raise ValueError(
            f"{name} weights are 0 for {blind.size} elements (first: {int(blind[0])}), which nothing would check: "
            "give each a weight"
        )
    return V, False


def _usual(given: Any) -> bool:
    """Whether these weights are what the kernels make."""
    return given is None or (isinstance(given, str) and given == "balanced")


def encode(A: Any, side: str = "both", weights: Any = None, repair: bool = False, *, recheck: bool = True) -> Encoded:
    """Encode a matrix once, to check its storage and to reuse it over many protected products.

    Parameters
    ----------
    A : (p, q) array, float64, float32, float16 or bfloat16
        Any order and strides. Kept by reference.
    side : {"both", "rows", "columns"}
        "rows": ``A V``, for use as a right operand. "columns": ``W^T A``, for use as a left operand.
    weights : None, str, array, or pair of those
        None: balanced random signs, equilibrated. A name of `abft_tsm2.weights`, or arrays (q, r) for the rows and
        (p, r) for the columns, used as they are; a pair (for rows, for columns) with ``side="both"``.
    repair : bool
        Let a protected product that finds this array corrupted write the repaired elements into it. Otherwise it
        computes with a repaired copy.
    recheck : bool
        Check at each use in a product that the array is still what was encoded (one read). Without it a change since
        then shows in the product only where the check uses the checksums of this operand: those of b in a check of
        rows, those of a in one of columns, those of both with ``check="both"``.

    Returns
    -------
    E : Encoded

    Raises
    ------
    TypeError
        For integers, booleans or complex, or anything that is not an array.
    ValueError
        If A is not a matrix, `side` is unknown, or weights have another length, are not finite or leave an element out.

    Notes
    -----
    Huang and Abraham 1984 for the checksums; they are taken in float64. The integer checksums need ``32 (p + q)``
    bytes for each 32-bit word of an element; of a NumPy matrix of fewer than 2**17 elements a copy is kept, too. NaN
    and Inf in A are encoded as they are: the product says UNVERIFIABLE where they matter, the integer checksums guard
    them like any value. Synchronises with the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A = np.random.default_rng(0).standard_normal((40, 30))
    >>> E = ft.encode(A)
    >>> A[3, 4] = 0.0
    >>> E.verify().faults[0].rows, E.correct().status.name
    ((3,), 'CORRECTED')
    """
    if isinstance(A, Encoded):
        raise TypeError("A is encoded already: pass A.array to encode it anew")
    if side not in ("both", "rows", "columns"):
        raise ValueError(f"side is {side!r}: choose 'both', 'rows' or 'columns'")
    A = as_operand(A, "A")
    if A.ndim != 2:
        raise ValueError(f"A has shape {tuple(A.shape)}: encode takes one matrix (encode each of a batch by itself)")
    for name, value in (("repair", repair), ("recheck", recheck)):
        if not isinstance(value, bool | np.bool_):  # "no" would be a permission to write
            raise TypeError(f"{name} is {value!r}: True or False")
    if isinstance(weights, tuple) and len(weights) != 2:
        raise ValueError(f"weights is a tuple of {len(weights)}: a pair is expected, (for rows, for columns)")
    pair = weights if isinstance(weights, tuple) and side == "both" else (weights, weights)
    wanted = (side != "columns", side != "rows")
    if is_cupy(A) and A.size and layout(A) != "A" and all(map(_usual, pair)):
        integers = _integers(A)
        made = encode_on_device(A, *wanted)
        more: Any = (made.right, made.left, made.device, A.dtype)
        return Encoded(A, repair, recheck, norms_on_device(A), *integers, *more)
    right = left = None
    if wanted[0]:
        V, equilibrate = _chosen_weights(pair[0], A.shape[1], "row")
        right = carry(A, V, equilibrate=equilibrate)._replace(lasting=True)
    if wanted[1]:
        W, equilibrate = _chosen_weights(pair[1], A.shape[0], "column")
        left = carry(A.T, W, equilibrate=equilibrate)._replace(lasting=True)
    norms = Sided(*(from_host(np.exp2(log2_column_norms(x)), A) for x in (A.T, A)))
    bits = A.view(f"u{A.dtype.itemsize}").copy(order="K") if isinstance(A, np.ndarray) and small(A) else None
    return Encoded(A, repair, recheck, norms, *_integers(A), right, left, None, A.dtype, bits)


def _integers(A: Array) -> tuple[IntegerChecksums, Array]:
    """The integer checksums of a matrix, and its `fingerprint`, which is among them: a copy."""
    sums = integer_checksums(A)
    along = sums.columns if is_column_major(A) else sums.rows
    return sums, namespace(along).asarray(along[:, 1], copy=True, order="C")
