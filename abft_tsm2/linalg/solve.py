"""Solve linear systems, protected: SciPy's `lu_solve` and `solve`, substitutions checked and the solution certified."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import (
    FLOATS,
    Array,
    dtype_name,
    from_host,
    is_cupy,
    is_numpy,
    namespace,
    served_elsewhere,
    to_host,
)
from abft_tsm2.checksum.words import contiguous
from abft_tsm2.core.row_sums import rows_per_block
from abft_tsm2.linalg.blocked import Hook
from abft_tsm2.linalg.given import GivenFactors, GivenMatrix, GivenPivots, GivenSides, GivenWords
from abft_tsm2.linalg.inputs import as_array, for_blas, matrices_of, merged, not_finite, pair_of, pivots_of, stacked
from abft_tsm2.linalg.line_check import LineCheck
from abft_tsm2.linalg.lu import LuFactorisation, factored
from abft_tsm2.linalg.lu_options import LuOptions
from abft_tsm2.linalg.operand import Operand
from abft_tsm2.linalg.outcome import FACTORS, Findings, check_of
from abft_tsm2.linalg.structure import GENERAL, whole
from abft_tsm2.linalg.substitution import (
    ATTEMPTS,
    Work,
    as_read,
    by_kernels,
    order_of,
    queued,
    same,
    solved_by_kernels,
    substituted_carefully,
    substituted_twice,
    wrong_rows,
)
from abft_tsm2.linalg.triangular import (
    Triangle,
    Weighed,
    check_solution,
    far_power,
    scaled_down,
    solution_evidence,
    triangles,
)
from abft_tsm2.place import device_name
from abft_tsm2.report import Fault, Report, Status


def protected_lu_solve(
    lu_and_piv: Any,
    b: Any,
    trans: int = 0,
    overwrite_b: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
) -> Any:
    """Solve ``a x = b`` with the factors of a; each substitution is checked by its residual.

    Parameters
    ----------
    lu_and_piv : tuple
        From `protected_lu_factor` or `scipy.linalg.lu_factor`: lu (..., n, n) and piv (..., n). Where one of lu, piv
        and b is a Dask array, `abft_tsm2.interop.dask.protected_lu_solve` serves.
    b : (n,) or (..., n, r) array_like
    trans : {0, 1, 2}
        0: ``a x = b``; 1 and 2: ``a' x = b``.
    overwrite_b : bool
        Accepted for SciPy's sake; b is kept, for repairs.
    check_finite : bool
        Refuse NaN and Inf.
    on_error, return_report
        As in `protected_lu_factor`.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` at "inputs" (lu, b), "encoded" (lu, piv, b), "forward" (z) and "backward" (x) with
        the live arrays.

    Returns
    -------
    x : array
        Of b's shape.
    report : Report
        With ``return_report=True``.

    Raises
    ------
    SilentDataCorruptionError
        The solution is wrong and could not be repaired, or lu or b changed meanwhile.
    TypeError, ValueError
        Shapes that do not fit, with SciPy's messages; pivots that are no numbers of rows.

    Warns
    -----
    UnverifiableWarning
        The solution is not finite: U has a zero on its diagonal, or it overflows, or a number on the way to it does.

    Notes
    -----
    Forward and backward substitution obey ``|b - T x| <= gamma_n |T| |x|`` (N. J. Higham, Accuracy and Stability of
    Numerical Algorithms, 2002, theorem 8.5), which is checked for a random combination of the right-hand sides; a
    substitution that fails is done again. lu, piv and b are encoded for the length of the call: where one of them has
    changed meanwhile, the report is INPUT_CHANGED, or the solution is that of what was given. What lu and piv hold when
    the call begins is taken to be right, and between two calls nothing protects them: `protected_solve`, which has a,
    certifies the solution with it. Pivots that are booleans, NaN, fractions or beyond the rows are refused, where SciPy
    cuts them to 32-bit integers. O(n^2 + n r) operations more. On a GPU one system with pivots of int32 is queued
    with its checks, and the host waits once, at the end; what they suspect is solved once more, with the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([3.0, 4.0])
    >>> [round(float(x), 12) for x in ft.protected_lu_solve(ft.protected_lu_factor(A), b)]
    [1.0, 1.0]
    """
    lu, piv = pair_of(lu_and_piv)
    if (door := served_elsewhere(lu, piv, b)) is not None:
        given: Any = {"on_error": on_error, "return_report": return_report, "on_stage": on_stage}
        return door.protected_lu_solve((lu, piv), b, trans, overwrite_b, check_finite, **given)
    policy.check_on_error(on_error)
    later = on_stage is None and _on_device(lu, piv, b)  # kernels find what is not finite, and pivots that are no rows
    finite = check_finite and not later
    lu, B = as_array(lu, "lu", check_finite=False), as_array(b, "b", check_finite=finite)
    namespace(lu, B)
    if trans not in (0, 1, 2):
        raise ValueError(f"trans is {trans!r}: 0 for a x = b, 1 or 2 for a' x = b")
    if lu.ndim < 2 or lu.shape[-1] != lu.shape[-2]:
        raise ValueError(f"lu has to be square, the factors of a square matrix; its shape is {lu.shape}")
    n = lu.shape[-1]
    piv = piv if later else pivots_of(piv, tuple(lu.shape))
    if n != (B.shape[-2] if B.ndim > 1 else B.shape[0] if B.ndim else 0):
        raise ValueError(f"Shapes of lu {tuple(lu.shape)} and b {tuple(B.shape)} are incompatible")
    lu, B = _of_one_type(lu, B)

    def by_steps(lu: Array, piv: Any, B: Array, work: Work) -> Array:
        factors, pivots = GivenFactors(lu, lambda array: triangles(array, int(trans))), GivenPivots(piv)
        sides = GivenSides.of(B)
        if check_finite and not factors.finite:
            raise not_finite()
        work.given = factors, sides
        work.stage("encoded", lu=lu, piv=piv, b=B)
        return substituted_carefully(lu, pivots, B, int(trans), work, weighed=sides.weighed, given=factors)

    def on_device(lu: Array, piv: Any, B: Array, work: Work) -> Array:
        lu = contiguous(lu)
        found = by_kernels(lu, piv, B, int(trans), work, compared=True)
        if found.clean:
            return found.X  # the check has read the factors that were given, as have the substitutions
        if check_finite:
            as_array(lu, "lu")
            as_array(B, "b")
        weighed = as_read(found, B)
        factors = GivenFactors(lu, lambda array: triangles(array, int(trans)))
        left = found.left()
        work.given = GivenWords(lu, left.lines), GivenSides(weighed)
        if not work.confirm(suspected=False):
            return found.X
        pivots = GivenPivots(pivots_of(left.piv, tuple(lu.shape)))
        return substituted_carefully(lu, pivots, B, int(trans), work, found, weighed, factors)

    def one(lu: Array, piv: Any, B: Array) -> tuple[Array, Report]:
        work = Work(on_stage, repair=on_error != "detect")
        work.stage("inputs", lu=lu, b=B)
        kernels = solved_by_kernels(lu, B, work)
        x = on_device(lu, piv, B, work) if kernels else by_steps(for_blas(lu), piv, for_blas(B), work)
        return x, _report("lu_solve", B, work)

    x, report = _each(one, "lu_solve", lu, piv, B)
    policy.deliver(report, on_error)
    return (x, report) if return_report else x


def protected_cho_solve(
    c_and_lower: Any,
    b: Any,
    overwrite_b: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
) -> Any:
    """Solve ``a x = b`` with Cholesky's factor of a; each substitution is checked by its residual.

    Parameters
    ----------
    c_and_lower : tuple
        From `protected_cho_factor` or `scipy.linalg.cho_factor`: c (..., n, n), and whether its lower triangle is the
        factor. The other triangle may hold anything finite.
    b : (n,) or (..., n, r) array_like
    overwrite_b : bool
        Accepted for SciPy's sake; b is kept, for repairs.
    check_finite : bool
        Refuse NaN and Inf, in all of c.
    on_error, return_report
        As in `protected_lu_factor`.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` at "inputs" (c, b), "encoded" (c, b), "forward" (z) and "backward" (x) with the live
        arrays.

    Returns
    -------
    x : array
        Of b's shape.
    report : Report
        With ``return_report=True``.

    Raises
    ------
    SilentDataCorruptionError
        The solution is wrong and could not be repaired, or c or b changed meanwhile.
    TypeError, ValueError
        Shapes that do not fit, with SciPy's messages; Dask arrays.

    Warns
    -----
    UnverifiableWarning
        The solution is not finite: the factor has a zero on its diagonal, or it overflows, or a number on the way to it
        does.

    See Also
    --------
    protected_solve : certifies the solution with a, which is not known here.

    Notes
    -----
    As `protected_lu_solve`, with ``L z = b`` and ``L' x = z`` (N. J. Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, theorem 8.5); c and b are encoded for the length of the call as lu and b are there. CuPy arrays
    are solved by CuPy's triangular solves, and every check waits for the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A = np.array([[4.0, 2.0], [2.0, 3.0]])
    >>> [round(float(x), 12) for x in ft.protected_cho_solve(ft.protected_cho_factor(A), np.array([8.0, 8.0]))]
    [1.0, 2.0]
    """
    c, lower = pair_of(c_and_lower, "c_and_lower", "(c, lower)")
    if served_elsewhere(c, b) is not None:
        raise TypeError("c or b is a Dask array: protected_solve(a, b, assume_a='pos') solves systems of these")
    policy.check_on_error(on_error)
    C, B = as_array(c, "c", check_finite=check_finite), as_array(b, "b", check_finite=check_finite)
    namespace(C, B)
    if C.ndim < 2 or C.shape[-1] != C.shape[-2]:
        raise ValueError("The factored matrix c is not square.")
    n = C.shape[-1]
    if n != (B.shape[-2] if B.ndim > 1 else B.shape[0] if B.ndim else -1):
        raise ValueError(f"incompatible dimensions ({tuple(C.shape)} and {tuple(B.shape)})")
    C, B = _of_one_type(C, B)

    def halves(C: Array) -> tuple[Triangle, Triangle]:
        L = C if lower else C.T
        return Triangle(L, True, False), Triangle(L.T, False, False)

    def one(C: Array, _: Any, B: Array) -> tuple[Array, Report]:
        work, C, B = Work(on_stage, repair=on_error != "detect"), for_blas(C), for_blas(B)
        work.stage("inputs", c=C, b=B)
        factors, sides = GivenFactors(C, halves, "c"), GivenSides.of(B)
        work.given = factors, sides
        work.stage("encoded", c=C, b=B)
        x = substituted_twice(factors, sides.weighed, work)
        return x, _report("cho_solve", B, work)

    x, report = _each(one, "cho_solve", C, None, B)
    policy.deliver(report, on_error)
    return (x, report) if return_report else x


def protected_solve(
    a: Any,
    b: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
    assume_a: str | None = None,
    transposed: bool = False,
    *,
    mode: str = "auto",
    refine: bool = False,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
) -> Any:
    """Solve ``a x = b``: protected factorisation and substitution, and a certificate of the solution against a.

    Parameters
    ----------
    a : (..., n, n) array_like
        Dask arrays are served by `abft_tsm2.interop.dask.protected_solve`.
    b : (n,) or (..., n, r) array_like
    lower, assume_a
        SciPy's; every structure is solved by LU with pivoting, of all of a. With "sym", "her" or "pos" only the
        triangle that `lower` names is read.
    overwrite_a, overwrite_b : bool
        Accepted for SciPy's sake; a and b are kept, for repairs.
    check_finite : bool
        Refuse NaN and Inf.
    transposed : bool
        Solve ``a' x = b``.
    mode : {"auto", "online", "offline"}
        Of the factorisation, as in `protected_lu_factor`.
    refine : bool
        One step of iterative refinement, ``x + a^-1 (b - a x)``, the residual taken in float64; kept where its backward
        error, ``max_i |b - a x|_i / (|a| |x| + |b|)_i``, is no larger, and that of rounding: at most (n + 1) u.
    on_error, return_report
        As in `protected_lu_factor`.
    on_stage : callable, optional
        The stages of `protected_lu_factor`, then "inputs" (A, b), "forward" (z), "backward" (x) and "refined" (x).

    Returns
    -------
    x : array
        Of b's shape.
    report : Report
        With ``return_report=True``.

    Raises
    ------
    SilentDataCorruptionError
        The factors or the solution are wrong and could not be repaired, or a or b changed meanwhile.
    numpy.linalg.LinAlgError
        a is singular: a pivot is exactly zero.
    TypeError, ValueError
        Shapes that do not fit, with SciPy's messages.

    Warns
    -----
    scipy.linalg.LinAlgWarning
        a is singular within rounding.

    Notes
    -----
    The residual of a solution by Gaussian elimination obeys ``|b - A x| <= gamma_3n |L| |U| |x|`` (N. J. Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, theorem 9.4). What is wrong is factored and solved again only
    with an a and a b that are what they were when the call began. On a GPU the host waits for the factors, and for
    the certified solution.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> rng = np.random.default_rng(0)
    >>> A, b = rng.standard_normal((100, 100)), rng.standard_normal(100)
    >>> x, report = ft.protected_solve(A, b, refine=True, return_report=True)
    >>> report.status.name, bool(np.allclose(A @ x, b))
    ('CLEAN', True)
    """
    if (door := served_elsewhere(a, b)) is not None:
        given: Any = {"mode": mode, "refine": refine, "on_error": on_error, "on_stage": on_stage}
        given |= {"assume_a": assume_a, "transposed": transposed, "return_report": return_report}
        return door.protected_solve(a, b, lower, overwrite_a, overwrite_b, check_finite, **given)
    options = LuOptions(on_stage=on_stage, on_error=on_error, mode=mode, check_finite=check_finite)
    partly = assume_a not in GENERAL  # then what is not read has to be finite as well; else the checksums of a tell
    A, B = as_array(a, "a", check_finite=check_finite and partly), as_array(b, "b", check_finite=check_finite)
    namespace(A, B)
    if A.ndim < 2:
        raise ValueError(f"a must be a matrix or a stack of them; it has {A.ndim} dimensions, shape {tuple(A.shape)}")
    if A.shape[-1] != A.shape[-2]:
        raise ValueError(f"Expected square matrix, got a1.shape={tuple(A.shape)}")
    n = A.shape[-1]
    if B.ndim == 0 or n != (B.shape[-2] if B.ndim > 1 else B.shape[0]):
        raise ValueError(f"incompatible shapes: a1.shape={tuple(A.shape)} and b1.shape={tuple(B.shape)}")
    A, B = _of_one_type(whole(A, assume_a, lower), B)
    A = namespace(A).matrix_transpose(A) if transposed else A

    def one(A: Array, _: Any, B: Array) -> tuple[Array, Report]:
        return _solved(for_blas(A), for_blas(B), options, refine=refine)

    x, report = _each(one, "solve", A, None, B)
    policy.deliver(report, on_error)
    return (x, report) if return_report else x


# ---- one system ---------------------------------------------------------------------------------------------------


def _solved(A: Array, B: Array, options: LuOptions, *, refine: bool) -> tuple[Array, Report]:
    """Factor, solve, certify against A, and once more from the beginning where that fails."""
    work = Work(options.on_stage, options.repair)
    n, r = B.shape
    if 0 in (n, r):
        report = Findings().report("solve", (n, n, r), dtype_name(B.dtype), {}, device=device_name(B))
        return namespace(B).zeros_like(B), report
    X = namespace(B).full_like(B, float("nan"))  # until there is a solution
    sides = None if solved_by_kernels(A, B, work) else GivenSides.of(B)
    matrix = GivenMatrix(A)
    for attempt in range(ATTEMPTS):
        factors = factored(A, options, warn=False, kept=not attempt)
        _take_over(work, factors)
        if not attempt:  # A as it was encoded first
            first, matrix.encoding = factors, factors.checksums_of_input
            work.given = matrix, *([sides] if sides else [])
        if work.findings.statuses and work.findings.statuses[-1] in (Status.UNCORRECTABLE, Status.INPUT_CHANGED):
            break
        if factors.info:
            if work.findings.any and not work.confirm():
                break
            raise np.linalg.LinAlgError("A singular matrix detected.")
        before, held = work.findings.copy(), None
        if sides is not None:
            held = _Held(GivenWords.of(factors.W), GivenPivots(to_host(factors.piv)))
        work.stage("inputs", A=A, b=B)
        found = queued(factors.W, factors.piv, B, 0, work, A)
        clean = found is not None and found.clean
        if found is not None and (refine or not clean):  # b and the factors as kernels have read them
            held = _Held(GivenWords(factors.W, found.left().lines), GivenPivots(to_host(factors.piv)))
            sides = sides or GivenSides(as_read(found, B))
            work.given = matrix, sides
        if found is not None and clean:
            X, verdict = found.X, LineCheck.of(found.residual, found.bound)
        elif sides is not None and held is not None:
            X = substituted_carefully(factors.W, held.pivots, B, 0, work, found, sides.weighed)
            with work.clock("certify"):
                verdict = _certificate(matrix, held, X, sides.weighed, work)
                work.checks = (check_of("rows", verdict.residual, verdict.bound, sides.weighed.t),)
        if refine and verdict.clean and sides is not None and held is not None:
            X, verdict = _refined(matrix, held, X, sides.weighed, verdict, work)
        if held is not None and not held.same:  # what was found with them says nothing
            work.findings = before
            if not work.repair:
                work.findings.statuses.append(Status.UNCORRECTABLE)
                break
            work.findings.statuses.append(Status.CORRECTED)
            work.findings.faults.append(Fault(FACTORS, "operand", (), (), 0, math.nan, "factored again"))
            continue
        if verdict.clean or Status.UNVERIFIABLE in work.findings.statuses or not work.confirm():
            break
        if not work.repair:
            work.findings.statuses.append(Status.UNCORRECTABLE)
            break
        work.findings.statuses.append(Status.CORRECTED)
        work.findings.faults.append(wrong_rows("x", verdict, "solved again"))
    else:
        work.findings.statuses.append(Status.UNCORRECTABLE)
        work.findings.reasons.append(f"a x = b failed its check after {ATTEMPTS} factorisations and solutions")
    work.findings.name_tf32(B)
    if work.findings.any:
        work.confirm()  # of what was suspected, and of all that was computed again
    first.release()
    if not {Status.UNCORRECTABLE, Status.INPUT_CHANGED} & {*work.findings.statuses}:  # then these are factors of A
        _warn_of_condition(A, factors.W)
    sizes, seconds = (n, n, r), work.clock.seconds
    more: dict[str, Any] = {"checks": work.checks, "mode": factors.report.mode, "device": device_name(B)}
    report = work.findings.report("solve", sizes, dtype_name(B.dtype), seconds, **more)
    return X, report


class _Held(NamedTuple):
    """Factors and pivots as they were when they had been certified: a bound that is made of factors shows no change of
    them."""

    factors: GivenWords
    pivots: GivenPivots

    @property
    def same(self) -> bool:
        return all(one.compare() is Operand.SAME for one in self)


def _take_over(work: Work, factors: LuFactorisation) -> None:
    """What the factorisation found is part of the solution's report."""
    findings, report = work.findings, factors.report
    findings.decided &= factors.findings.decided
    findings.statuses += [status for status in (*report.also, report.status) if status is not Status.CLEAN]
    findings.faults += report.faults
    findings.reasons += report.reasons
    findings.restarted |= report.restarted
    findings.suspicions += report.suspicions
    for step, seconds in report.seconds.items():
        work.clock.seconds[step] = work.clock.seconds.get(step, 0.0) + seconds


def _certificate(matrix: GivenMatrix, held: _Held, X: Array, B: Weighed, work: Work) -> LineCheck:
    """``A X = B``, row by row; what is suspected, by evidence from all elements. A is compared with what it was when it
    has been factored and is about to be read once more, so that both have read the same."""
    work.confirm(suspected=False, of=(matrix,))
    A, lu, places = matrix.A, held.factors.array, order_of(held.pivots)
    if places is None:  # they have changed
        nothing = namespace(A).full_like(B.sums, float("nan"))
        return LineCheck.of(nothing, nothing)
    order = from_host(places, A)
    factors = Triangle(lu, True, True), Triangle(lu, False, False)
    verdict = check_solution(A, factors, order, Weighed.of(X, B.t), B)
    if not verdict.clean:
        with work.clock("evidence"):
            found = solution_evidence(A, factors, order, X, B.X)
        if not found.clean:
            return found
        if B.same:
            work.findings.suspicions += 1
            return found
    return verdict


def _refined(
    matrix: GivenMatrix, held: _Held, X: Array, B: Weighed, verdict: LineCheck, work: Work
) -> tuple[Array, LineCheck]:
    """X + A^-1 (B - A X), where its componentwise backward error is no larger, and that of rounding. Where one step
    leaves more, the matrix is so ill-conditioned that the step does not converge (N. J. Higham, 2002, theorem 12.4)."""
    xp, A, lu = namespace(X), matrix.A, held.factors.array
    with np.errstate(all="ignore"):
        # In units of powers of two where A and X are near the ends of the range, so that A X stays in it on the way.
        of_a, of_x = far_power(A), far_power(X)

        def backward_error(x: Array) -> tuple[Array, float]:
            """By A and B as they are now."""
            return _backward_error(scaled_down(A, of_a), scaled_down(x, of_x), scaled_down(B.X, of_a + of_x))

        residual = backward_error(X)[0]
        scale = float(xp.max(xp.abs(residual)))
        if not 0.0 < scale < float("inf"):
            return X, verdict
        statuses, reasons = list(work.findings.statuses), list(work.findings.reasons)
        right = xp.astype(residual / scale, X.dtype)
        found = queued(lu, held.pivots.array, right, 0, work)
        if found is not None and found.clean:
            step = found.X
        else:
            step = substituted_carefully(lu, held.pivots, right, 0, work, found)
        if {*work.findings.statuses[len(statuses) :]} == {Status.UNVERIFIABLE}:  # it overflows; X is as good as before
            work.findings.statuses, work.findings.reasons = statuses, reasons
            return X, verdict
        last, before = X, verdict
        for attempt in range(ATTEMPTS):
            better = scaled_down(X, of_x) + scale * scaled_down(step, -of_a)
            better = xp.astype(scaled_down(better, -of_x), X.dtype)
            work.stage("refined", x=better)
            after = _certificate(matrix, held, better, B, work)
            if attempt and same(last, better):  # the matrix is so ill-conditioned that a step leads astray
                break
            if attempt:
                work.findings.statuses.append(Status.CORRECTED)
                work.findings.faults.append(wrong_rows("x", before, "refined again"))
            if after.clean:
                error, left = backward_error(X)[1], backward_error(better)[1]
                rounding = (A.shape[0] + 1) * FLOATS[dtype_name(X.dtype)].unit_roundoff
                if not left <= min(error, rounding):
                    break
                work.confirm(suspected=False)  # what it was computed from
                return better, after
            last, before = better, after
    return X, _certificate(matrix, held, X, B, work)  # it has lain there since


def _backward_error(a: Array, x: Array, b: Array) -> tuple[Array, float]:
    """``b - a x``, and its largest element in units of ``|a| |x| + |b|``: what LAPACK's gerfs returns as berr (N. J.
    Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem 7.3)."""
    xp, n, residual, worst = namespace(x), a.shape[0], b - a @ x, 0.0
    step = rows_per_block(a.shape[1])
    for at in (slice(lo, min(n, lo + step)) for lo in range(0, n, step)):
        size = xp.abs(a[at, :]) @ xp.abs(x) + xp.abs(b[at, :])
        off = xp.where(size > 0, xp.abs(residual[at, :]) / size, xp.zeros_like(size))
        worst = max(worst, float(xp.max(off)))
    return residual, worst


def _warn_of_condition(A: Array, lu: Array) -> None:
    """SciPy's warning of a matrix that is singular within rounding."""
    if not is_numpy(A) or not np.isfinite(lu).all():
        return
    linalg = importlib.import_module("scipy.linalg")
    gecon = linalg.get_lapack_funcs("gecon", (lu,))
    with np.errstate(all="ignore"):
        norm = float(np.max(np.sum(np.abs(A), axis=0)))
    rcond, _ = gecon(lu, norm)
    if rcond < np.finfo(A.dtype).eps:
        text = f"An ill-conditioned matrix detected: rcond = {rcond}."
        warnings.warn(text, linalg.LinAlgWarning, stacklevel=policy.caller_level())


# ---- shapes -------------------------------------------------------------------------------------------------------


def _on_device(lu: Any, piv: Any, b: Any) -> bool:
    """Whether these are one system in the memory of a GPU, of shapes and a type of pivots that fit."""
    if not all(map(is_cupy, (lu, piv, b))) or lu.ndim != 2 or b.ndim not in (1, 2):
        return False
    n = lu.shape[0]
    return lu.shape == (n, n) and piv.shape == (n,) and b.shape[0] == n and dtype_name(piv.dtype) == "int32"


def _of_one_type(A: Array, B: Array) -> tuple[Array, Array]:
    xp = namespace(A)
    common = xp.result_type(A, B)
    return xp.astype(A, common, copy=False), xp.astype(B, common, copy=False)


def _report(operation: str, B: Array, work: Work) -> Report:
    """What was found in one system with factors that were given."""
    n, r = B.shape
    more: dict[str, Any] = {"checks": work.checks, "device": device_name(B)}
    return work.findings.report(operation, (n, n, r), dtype_name(B.dtype), work.clock.seconds, **more)


def _each(
    one: Callable[[Array, Any, Array], tuple[Array, Report]], operation: str, A: Array, piv: Any, B: Array
) -> tuple[Array, Report]:
    """`one` of every matrix of a stack and its right-hand sides, which broadcast as in SciPy.

    What is not finite shows in a verdict, not in NumPy's warnings."""
    vector = B.ndim == 1
    xp, B = namespace(B), B[:, None] if vector else B
    batch = np.broadcast_shapes(tuple(A.shape[:-2]), tuple(B.shape[:-2]))
    if not batch:
        with np.errstate(all="ignore"):
            x, report = one(A, piv, B)
        return (x[:, 0] if vector else x), report
    A, B = xp.broadcast_to(A, (*batch, *A.shape[-2:])), xp.broadcast_to(B, (*batch, *B.shape[-2:]))
    piv = None if piv is None else np.broadcast_to(piv, (*batch, piv.shape[-1]))
    pivots = [None if piv is None else piv[at] for at in np.ndindex(batch)]
    with np.errstate(all="ignore"):
        done = [one(*each) for each in zip(matrices_of(A), pivots, matrices_of(B), strict=True)]
    if done:
        x, report = stacked([x for x, _ in done], batch), merged([one for _, one in done], batch, operation)
    else:
        x = xp.zeros_like(B)
        sizes = (B.shape[-2], B.shape[-2], B.shape[-1])
        report = Findings().report(operation, sizes, dtype_name(B.dtype), {}, device=device_name(B))
    return (x[..., 0] if vector else x), report
