"""One product of small matrices on NumPy: the five steps of `abft_tsm2.gemm.host` in few calls, where all is plain,
or encoded beforehand.

What is the same for all products of the same shapes, types and strides is found by one look-up: a `SmallForm`, with the
memory for what is encoded. A product that is not found clean is settled by a `Product`, with what was encoded for it
before it was computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextvars import copy_context
from time import perf_counter
from typing import Any

import numpy as np

from abft_tsm2.arrays import Array
from abft_tsm2.checksum import small
from abft_tsm2.checksum.encode import OperandChecksum
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.checksum.small import SmallSums
from abft_tsm2.core import faultpoint
from abft_tsm2.core.flushing import flushes
from abft_tsm2.core.matmul import multiply
from abft_tsm2.gemm.host import EncodedSide, Product
from abft_tsm2.gemm.operands import GemmProblem
from abft_tsm2.report import Check, Report, Status

_MOST = 24 << 20  # bytes of all forms that are kept, with their memory of O(m + k + n)
_IDLE = 8  # sets of that memory: one for each thread that multiplies at the same time
_OBJECTS = 1 << 13  # bytes of a form's objects, and of a set's, beside their arrays
_SHARE = 1 << 18  # bytes of a form's sets, of which one is kept whatever it has

_forms: dict[Any, SmallForm] = {}
os.register_at_fork(after_in_child=_forms.clear)  # their reports name the device, which may have another name now
Carried = tuple[OperandChecksum | None, OperandChecksum | None]
_NOTHING: Carried = None, None


def known(a: Any, b: Any, check: str) -> tuple[SmallForm, Carried, list[Encoded]] | None:
    """The form of ``a @ b`` into a new array, what the operands carry, and those that are encoded, if there was a
    product like it before. a and b are NumPy's arrays, or such that were encoded."""
    encoded: list[Encoded] = []
    A, B, carried = a, b, _NOTHING
    if not type(a) is type(b) is np.ndarray:
        encoded += [x for x in (a, b) if isinstance(x, Encoded)]
        A, B = (x.as_encoded() if isinstance(x, Encoded) else x for x in (a, b))
        carried = b.right if isinstance(b, Encoded) else None, a.left if isinstance(a, Encoded) else None
    dtype = A.dtype
    like = A.shape, B.shape, A.strides, B.strides, dtype, B.dtype, dtype, False, check, flushes()
    try:
        form = _forms.get((*like, carried[0] is None, carried[1] is None))
    except TypeError:  # a check that has no hash; the checks of the arguments say what is wrong with it
        return None
    if form is None or not (A.flags.aligned and B.flags.aligned) or (encoded and not _serves(carried)):
        return None
    return form, carried, encoded


def _serves(carried: Carried) -> bool:
    """Whether that is one column of weights each."""
    return not any(side is not None and side.weights.shape[1] != 1 for side in carried)


def form_of(problem: GemmProblem) -> SmallForm | None:
    """The form of a product, which is made for the first of its kind; None where it is not one of small matrices, as
    they are, or as they were encoded."""
    p = problem
    if p.batch or p.exists or type(p.c) is not np.ndarray:
        return None
    if p.c0 is not None or p.alpha != 1.0 or p.wide or p.c.dtype != p.arithmetic.stored.name:
        return None
    if not (small.serves(p.a, p.b, p.arithmetic) and p.c.flags.c_contiguous):
        return None
    carried = p.carried()
    if not _serves(carried):
        return None
    rounded = p.dtype != p.arithmetic.stored.name  # later, and the report says so
    like = p.a.shape, p.b.shape, p.a.strides, p.b.strides, p.a.dtype, p.b.dtype, p.c.dtype, rounded, p.check
    key = *like, p.arithmetic.flushes, carried[0] is None, carried[1] is None
    form = _forms.get(key)
    if form is None:
        form = SmallForm(p)
        if form.most + sum(one.most for one in list(_forms.values())) > _MOST:
            _forms.clear()
        _forms[key] = form
    return form


class SmallForm:
    """What a product of small matrices is by shapes, types and strides alone: how it is computed, and its report."""

    def __init__(self, problem: GemmProblem) -> None:
        p = problem
        (m, k), n = p.a.shape, p.b.shape[1]
        self.shape, self.dtype = (m, n), p.c.dtype
        self._columns = tuple(side == "columns" for side in p.sides())
        self._problem = p.a.dtype, p.arithmetic
        known: Any = {"operation": "gemm", "m": m, "k": k, "n": n, "dtype": p.dtype}
        self._report = Report.made_of(status=Status.CLEAN, **known)
        self._free: list[list[SmallSums]] = []
        sides = self._sides()
        nbytes = _OBJECTS + sum(side.nbytes for side in sides)
        self._idle = max(1, min(_IDLE, _SHARE // nbytes))
        self.most = _OBJECTS + self._idle * nbytes
        self._free.append(sides)

    def takes(self, out: Any, A: Array, B: Array) -> bool:
        """Whether a result goes to this array as to a new one."""
        if type(out) is not np.ndarray or out.dtype != self.dtype or out.shape != self.shape:
            return False
        flags = out.flags
        apart = flags.c_contiguous and flags.writeable and flags.aligned
        return apart and not np.may_share_memory(out, A) and not np.may_share_memory(out, B)

    def _sides(self) -> list[SmallSums]:
        """Those of a product that has ended, or new ones: what no two products have at a time, whatever thread or
        handler begins one."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        (m, n), k, (dtype, a) = self.shape, self._report.k, self._problem
        sides = []
        for columns in self._columns:
            lines = (n, k, m) if columns else (m, k, n)
            sides.append(SmallSums("columns" if columns else "rows", lines, dtype, a))
        return sides

    def product(
        self,
        A: Array,
        B: Array,
        C: Array,
        ask: Callable[[], GemmProblem],
        *,
        write: bool,
        told: bool = True,
        limits: bool = True,
        carried: Carried = _NOTHING,
        encoded: Sequence[Encoded] = (),
        start: float | None = None,
    ) -> Report | None:
        """Encode, multiply and verify; settle what is not clean. The report, or None of a clean product.

        Parameters
        ----------
        ask : callable
            Makes the problem, for what is not clean.
        write, told, limits : bool
            Repair what is wrong; report clean products; and measure how small changes are sure to be found.
        carried : pair
            As of `GemmProblem.carried`.
        encoded
            Operands that are encoded: one that is not what it was is settled as in any other product.
        start : float
            When it was begun, if not now.
        """
        sides = self._sides()
        start = start or perf_counter()
        surrounding = copy_context()
        try:
            self._encode(sides, A, B, carried)
            if encoded and any(operand.is_in_doubt() for operand in encoded):
                return _restored(ask(), write, limits)
            if (planter := faultpoint.current()) is not None:
                for side in sides:
                    faultpoint.reach(planter, "encoded", A=A, B=B, **side.encoded())
            predicted = perf_counter()
            multiply(A, B, C, stage="multiplied")  # in the caller's error state, as a @ b
            multiplied = perf_counter()
            checks = self._clean(sides, A, B, C, told, limits)
        except BaseException:
            # An interrupt may come just when `numpy.errstate` has set the state, and leave it so.
            np.seterr(**surrounding.run(np.geterr))
            raise
        now = perf_counter()
        seconds = {"encode": predicted - start, "multiply": multiplied - predicted, "verify": now - multiplied}
        report = None
        if checks is None:
            report = self._settled(sides, ask(), seconds, write, carried, limits)
            if report.status is not Status.CLEAN:  # nor is their memory used again
                return report
        elif told:
            report = self._report.like(checks=checks, seconds=seconds)
        if len(self._free) < self._idle:
            self._free.append(sides)
        return report

    @np.errstate(all="ignore")  # what is not finite shows in a verdict; in half the time of a `with`
    def _encode(self, sides: list[SmallSums], A: Array, B: Array, carried: Carried) -> None:
        for columns, side in zip(self._columns, sides, strict=True):
            if columns:
                side.encode(B.T, A.T, carried[1])
            else:
                side.encode(A, B, carried[0])

    @np.errstate(all="ignore")
    def _clean(
        self, sides: list[SmallSums], A: Array, B: Array, C: Array, told: bool, limits: bool
    ) -> tuple[Check, ...] | None:
        checks: tuple[Check, ...] = ()
        for columns, side in zip(self._columns, sides, strict=True):
            X, L, R = (C.T, B.T, A.T) if columns else (C, A, B)
            check = side.clean(X, L, R, told=told)
            if check is None:
                return None
            checks += tuple(side.measured(one, X, L, R) for one in check) if limits else check
        return checks

    def _settled(
        self,
        sides: list[SmallSums],
        problem: GemmProblem,
        seconds: dict[str, float],
        write: bool,
        carried: Carried,
        limits: bool,
    ) -> Report:
        """The report of a product that may be wrong, by the procedure of any other one from its verdict on."""
        product = _product(problem, write, limits)
        with np.errstate(all="ignore"):
            product.seconds.update(seconds)
            own = []
            for columns, one in zip(self._columns, sides, strict=True):
                lines = product.lines("columns" if columns else "rows")
                own.append(EncodedSide(lines, one.predicted(carried[columns])))
            product.settle(own, [one.failed() for one in sides])
            return product.concluded(own, intact=True)


def _restored(problem: GemmProblem, write: bool, limits: bool) -> Report:
    """The report of a product of encoded operands one of which is not what it was."""
    product = _product(problem, write, limits)
    with np.errstate(all="ignore"):
        return product.report()


def _product(problem: GemmProblem, write: bool, limits: bool) -> Product:
    """Of the problem's only matrices, multiplied in the caller's error state."""
    return Product(next(problem.tasks()), problem, "gemm", None, write, np.geterr(), limits=limits)
