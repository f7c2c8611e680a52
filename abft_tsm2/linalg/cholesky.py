"""Protected Cholesky factorisation: SciPy's `cholesky` and `cho_factor`, the factor checked, repaired and certified.

`abft_tsm2.linalg.blocked_cholesky` is the factorisation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import Array, dtype_name, namespace
from abft_tsm2.core.blas import clear_above, copy_by_columns, factor_columns, subtract_square
from abft_tsm2.linalg.blocked_cholesky import CholeskyFactorisation, block_size
from abft_tsm2.linalg.blocked_lu import Clock, Hook
from abft_tsm2.linalg.inputs import as_array, for_blas, over_batch, report_of, stacked
from abft_tsm2.linalg.lu import check_options
from abft_tsm2.linalg.outcome import FACTORS, Findings
from abft_tsm2.report import Check, Fault, Report


def protected_cholesky(
    a: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
) -> Any:
    """Cholesky factorisation that finds, locates and repairs silent data corruption: ``A = L L'``, or ``A = U'U``.

    Parameters
    ----------
    a : (..., n, n) array_like
        Symmetric positive definite; only one triangle of it is read. float64 or float32, NumPy or CuPy, any order;
        other real types are computed in float64. Kept for repairs and never written.
    lower : bool
        Whether to read the lower triangle and return L, or the upper one and U.
    overwrite_a : bool
        Accepted for SciPy's sake. It saves nothing here, because a is needed to the end.
    check_finite : bool
        Refuse NaN and Inf, in the whole matrix. Without it, one with NaN or Inf in the triangle that is read is
        factored by LAPACK and reported UNVERIFIABLE.
    on_error : {None, "correct", "detect", "raise"}
        As in `protected_gemm`.
    return_report : bool
        Return ``(c, report)``.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` with the live arrays, which it may write to: "inputs" (A), "encoded" (A, Z, w); in
        each step "panel" and "updated" (W, Z, g, w, A and ``step = (j, j1)``); "finished" before the last check,
        "repaired" after each repair. Of A and W the lower triangles count: with ``lower=False`` both are transposed.
    block : int, optional
        Columns of a panel; what is larger than n is as n.

    Returns
    -------
    c : (..., n, n) array
        L or U, with zeros in the other triangle; column-major, of a's library.
    report : Report
        With ``return_report=True``; its faults are in c's rows and columns. ``report.products`` holds one for each
        matrix of a stack.

    Raises
    ------
    numpy.linalg.LinAlgError
        A leading minor of a is not positive. That is said of the matrix only: the panel in which the factorisation
        stopped has been computed again from a, whose sums are those taken before.
    SilentDataCorruptionError
        The factor is wrong and could not be repaired, or a changed meanwhile.
    TypeError, ValueError
        What cannot be factored; the message says what to do.

    Warns
    -----
    UnverifiableWarning
        a holds NaN or Inf.

    See Also
    --------
    protected_cho_factor : the same for `scipy.linalg.cho_solve`.
    protected_lu_factor : for matrices that are not positive definite.

    Notes
    -----
    ``|A - L L'| <= gamma_{n+1} |L||L'|`` (N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, theorem
    10.3). K.-H. Huang and J. A. Abraham, IEEE Trans. Computers C-33 (1984) 518. Extra memory: O(n) beside the result.
    Thread-safe. On a GPU every step synchronises with the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> X = np.random.default_rng(0).standard_normal((200, 300))
    >>> A = X @ X.T
    >>> def cosmic_ray(stage, arrays):
    ...     if stage == "updated" and arrays["step"] == (64, 128):
    ...         arrays["W"][170, 150] *= -1
    >>> L, report = ft.protected_cholesky(A, lower=True, return_report=True, on_stage=cosmic_ray)
    >>> print(report.status.name, report.faults[0].rows, report.faults[0].columns)
    CORRECTED (170,) (150,)
    >>> bool(np.allclose(L @ L.T, A))
    True
    """
    asked = CholeskyOptions("cholesky", bool(lower), True, block, on_stage, on_error)
    c, report = _factored(a, asked, check_finite)
    return (c, report) if return_report else c


def protected_cho_factor(
    a: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    block: int | None = None,
) -> Any:
    """Cholesky factorisation for `scipy.linalg.cho_solve`, protected as by `protected_cholesky`.

    Parameters
    ----------
    a : (..., n, n) array_like
        As all others are, as in `protected_cholesky`.
    lower, overwrite_a, check_finite : bool
    on_error, return_report, on_stage, block : optional

    Returns
    -------
    c : (..., n, n) array
        L or U in one triangle; what a has in the other one is in the other one. Column-major.
    lower : bool
        Which triangle, as given; for a stack, too.
    report : Report
        With ``return_report=True``, which returns ``((c, lower), report)``.

    Raises
    ------
    numpy.linalg.LinAlgError, SilentDataCorruptionError, TypeError, ValueError
        As `protected_cholesky`.

    See Also
    --------
    protected_cholesky : the same with zeros in the other triangle.

    Notes
    -----
    N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 10.1.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.linalg import cho_solve
    >>> import abft_tsm2 as ft
    >>> A = np.array([[9.0, 3, 1, 5], [3, 7, 5, 1], [1, 5, 9, 2], [5, 1, 2, 6]])
    >>> x = cho_solve(ft.protected_cho_factor(A), np.ones(4))
    >>> bool(np.allclose(A @ x, 1))
    True
    """
    asked = CholeskyOptions("cho_factor", bool(lower), False, block, on_stage, on_error)
    c, report = _factored(a, asked, check_finite)
    return ((c, lower), report) if return_report else (c, lower)


@dataclass(frozen=True)
class CholeskyOptions:
    """How matrices are to be factored."""

    function: str
    lower: bool
    clear: bool
    block: int | None
    on_stage: Hook | None
    on_error: str | None


def _factored(a: Any, asked: CholeskyOptions, check_finite: bool) -> tuple[Array, Report]:
    """Factor a matrix, or a stack of them, and deliver the report."""
    policy.check_on_error(asked.on_error)
    check_options("online", asked.block)
    A = as_array(a, "a", check_finite=check_finite)
    if A.ndim < 2:
        A = namespace(A).reshape(A, (1, -1))
    *batch, m, n = A.shape
    if 0 in batch:
        raise ValueError(f"`{asked.function}` does not support zero-size batches.")
    if m != n:
        raise ValueError(f"Input array is expected to be square but has the shape: {(m, n)}.")
    if n == 0:
        c, report = namespace(A).empty_like(A), _report(Findings(), A, asked, Clock())
    elif not batch:
        c, report = _one(A, asked)
    else:
        done = over_batch(lambda one: _one(one, asked), A)
        c = stacked([one for one, _ in done], tuple(batch))
        reports = [replace(one, index=at) for at, (_, one) in zip(np.ndindex(*batch), done, strict=True)]
        report = Report.merge(reports, operation="cholesky")
    policy.deliver(report, asked.on_error)
    return c, report


def _one(A: Array, asked: CholeskyOptions) -> tuple[Array, Report]:
    """Factor one matrix that is not empty."""
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        run = CholeskyFactorisation(
            for_blas(A), asked.lower, asked.block, asked.on_stage, repair=asked.on_error != "detect"
        )
        run.run()
        if asked.clear:
            clear_above(run.W)
    return run.result, _report(run.findings, A, asked, run.clock, run.checks())


def _report(
    findings: Findings, A: Array, asked: CholeskyOptions, clock: Clock, checks: tuple[Check, ...] = ()
) -> Report:
    n = int(A.shape[-1])
    findings.faults[:] = [_in_result(fault, asked.lower) for fault in findings.faults]
    report = report_of(findings, "cholesky", (n, n, n), dtype_name(A.dtype), clock.seconds, checks=checks)
    return replace(report, recomputed=2 * report.recomputed)  # half as many operations as an LU


def _in_result(fault: Fault, lower: bool) -> Fault:
    """A fault in rows and columns of L or U, as they are returned."""
    if fault.operand != FACTORS:
        return fault
    if lower:
        return replace(fault, operand="L")
    kind = {"row": "column", "column": "row"}.get(fault.kind, fault.kind)
    return replace(fault, operand="U", kind=kind, rows=fault.columns, columns=fault.rows)


def unprotected(A: Array, lower: bool = False, block: int | None = None) -> Array:
    """The blocked factorisation without any check. What protection is measured against."""
    result = copy_by_columns(A)
    W, n = result if lower else result.T, A.shape[0]
    b = block or block_size(n)
    for j in range(0, n, b):
        j1 = min(j + b, n)
        if factor_columns(W[j:, j:j1]):
            raise np.linalg.LinAlgError("not positive definite")
        subtract_square(W[j1:, j1:], W[j1:, j:j1])
    clear_above(W)
    return result
