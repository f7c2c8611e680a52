"""Protected matrix multiplication: the public functions, and which procedure serves a problem.

`abft_tsm2.gemm.operands` checks their arguments. `abft_tsm2.gemm.host` puts the five steps in order (encode, multiply,
verify, locate and correct, report), and so does `abft_tsm2.gemm.device` on a GPU; `abft_tsm2.checksum` and
`abft_tsm2.core` are the steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from abft_tsm2 import policy
from abft_tsm2.arrays import is_cupy, namespace, served_elsewhere
from abft_tsm2.checksum.encoded import Encoded
from abft_tsm2.core import faultpoint
from abft_tsm2.core.capture import current_stream, is_captured, relaxed
from abft_tsm2.gemm import captured, fallback, known, pending, small, stack
from abft_tsm2.gemm.host import Hook, Product
from abft_tsm2.gemm.operands import GemmProblem, factor, problem_of
from abft_tsm2.gemm.plan import serves
from abft_tsm2.place import device_name
from abft_tsm2.report import Report, Status

_FACTORS = (float, int, np.float64, np.float32)


def protected_gemm(
    a: Any,
    b: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    out: Any = None,
    out_dtype: Any = None,
    check: str = "auto",
    on_error: str | None = None,
    return_report: bool = False,
    on_stage: Hook | None = None,
    verify: str | None = None,
    precision: str | None = None,
) -> Any:
    """Matrix product ``alpha a @ b + beta c`` that finds, locates and repairs silent data corruption.

    Parameters
    ----------
    a : (..., m, k) array or Encoded
        float64, float32, float16 or bfloat16, NumPy or CuPy, any order and strides; 1-D and batches as in
        `numpy.matmul`. Never written, except an `Encoded` with ``repair=True`` that was found corrupted. Dask arrays
        are multiplied by `abft_tsm2.interop.dask.protected_gemm`.
    b : (..., k, n) array or Encoded
    c : (..., m, n) array, optional
        Read only where ``beta != 0``; same dtype as the result.
    alpha, beta : float
        As in BLAS: with ``alpha = 0`` a and b are not read.
    out : array, optional
        Where to put the result; may be `c` (a copy of it is then kept for repairs) but not overlap a, b or itself. In
        this machine's byte order.
    out_dtype : dtype, optional
        float32 for 16-bit operands, whose product is then not rounded to 16 bits.
    check : {"auto", "rows", "columns", "both"}
        Which lines of the result carry a checksum. "auto" sums over the shorter side, which is sharper, or uses
        what an `Encoded` operand carries.
    on_error : {None, "correct", "detect", "raise"}
        "correct": repair; raise what cannot be repaired. "detect": repair nothing and raise nothing, only report.
        "raise": raise at any corruption. None: as `errstate` says (by default the same as "correct").
    return_report : bool
        Return ``(result, report)``.
    on_stage : callable, optional
        ``on_stage(stage, arrays)`` is called at "inputs" (A, B), "encoded" (A, B, s, t), "multiplied" (C),
        "verified" (C, u) and "corrected" (C) with the live arrays, which it may write to: for tracing and for
        fault injection. Once per product of a batch. Such a call goes the way that has every stage;
        `abft_tsm2.faults.inject` plants faults into calls as they are.
    verify : {None, "float32"}
        "float32": a product with a 16-bit result is computed and checked in float32, and rounded then: finer by a
        factor of 25 to 200 than checking what is stored, for twice the memory traffic of the check.
    precision : {None, "tf32"}
        "tf32": float32 CuPy arrays are multiplied by tensor cores, which round them to 11 significant bits first; the
        bound of the check is as much wider. So it is where NVIDIA_TF32_OVERRIDE forces TF32 on cuBLAS.

    Returns
    -------
    C : array
        Of the library and shape that ``a @ b`` has, in the promoted dtype (or `out_dtype`).
    report : Report
        With ``return_report=True``. For a batch, ``report.products`` holds one report for each product.

    Raises
    ------
    SilentDataCorruptionError
        The result is wrong and could not be repaired, or an operand changed after it was encoded.
    TypeError, ValueError
        Operands that cannot be multiplied or protected; the message says what to do.

    Warns
    -----
    UnverifiableWarning
        A part of the result follows from NaN or Inf in the operands and could not be checked.

    Notes
    -----
    Huang and Abraham, IEEE Trans. Computers C-33 (1984) 518, with one checksum for each row (or column) in float64
    and repair by recomputation. Detection costs one read of each matrix. A change of C is found when
    ``|sum_j v_j delta_ij|`` exceeds the bound plus the clean residual; see `detection_limit`. Extra memory: at most
    64 MB and O(m + k + n), and as much as C where lines failed in which no element is wrong beyond doubt: then these
    lines (on NumPy, if their bits come back), or the whole product, are computed a second time, into the same layout.
    After a repair, and before the verdict, each operand is read once more and compared with what was encoded.
    Thread-safe.

    CuPy arrays are multiplied by cuBLAS and checked by kernels on the caller's current stream, repairs included; the
    host waits once, at the end, and not at all under ``errstate(sync=False)``, where the report is PENDING and
    ``report.wait()`` gives the final one. There the stream may also be captured into a CUDA graph: ``report.wait()``
    then sums up all replays so far. The host waits more often where something was found that the kernels leave to it,
    and with `c` where ``verify="float32"``.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> rng = np.random.default_rng(0)
    >>> A, B = rng.standard_normal((64, 48)), rng.standard_normal((48, 32))
    >>> def cosmic_ray(stage, arrays):
    ...     if stage == "multiplied":
    ...         arrays["C"][5, 7] *= -1
    >>> C, report = ft.protected_gemm(A, B, return_report=True, on_stage=cosmic_ray)
    >>> report.status.name, report.faults[0].rows, report.faults[0].columns
    ('CORRECTED', (5,), (7,))
    >>> bool(np.allclose(C, A @ B, rtol=1e-12))
    True
    """
    if (door := served_elsewhere(a, b, c)) is not None:
        given: Any = {"alpha": alpha, "beta": beta, "out": out, "out_dtype": out_dtype, "check": check}
        given |= {"on_error": on_error, "return_report": return_report, "on_stage": on_stage}
        return door.protected_gemm(a, b, c, **given, verify=verify, precision=precision)

    def problem(out: Any) -> GemmProblem:
        policy.check_on_error(on_error)
        factors: Any = {"alpha": factor(alpha, "alpha"), "beta": factor(beta, "beta")}
        given: Any = {"out": out, "out_dtype": out_dtype, "check": check, "verify": verify, "precision": precision}
        return problem_of(a, b, c, **factors, **given)

    report: Report | None
    key: Any = None
    write = on_error is None or on_error == "correct"
    found: tuple[Any, Report | None] | None = None
    A, B = (a.array if isinstance(a, Encoded) else a), (b.array if isinstance(b, Encoded) else b)
    if on_stage is None and (planter := faultpoint.current()) is not None:
        _plant_inputs(planter, A, B)
    if type(A) is type(B) is np.ndarray:
        plain = c is None and out_dtype is None and verify is None and precision is None
        if plain and on_stage is None and type(alpha) is type(beta) is float and alpha == 1.0 and beta == 0.0:
            start, usual = perf_counter(), small.known(a, b, check)
            if usual is not None and (out is None or usual[0].takes(out, A, B)):
                policy.check_on_error(on_error)
                form, carried, encoded = usual
                C = np.empty(form.shape, form.dtype) if out is None else out
                more: Any = {"write": write, "told": return_report or policy.observed(), "limits": return_report}
                more |= {"carried": carried, "encoded": encoded}
                found = C, form.product(A, B, C, lambda: problem(C), start=start, **more)
    elif is_cupy(A):
        stream = current_stream()
        if stream.ptr > 1 and stream.is_capturing():  # the default stream cannot be, and must not be asked
            with relaxed():
                found = _captured(problem(out), on_stage, on_error, write=write)
        elif c is None and on_stage is None:
            options = alpha, beta, out_dtype, check, on_error, verify, precision
            # Of other types one that was changed, or that is complex, may be taken for the one that was checked.
            if type(alpha) in _FACTORS and type(beta) in _FACTORS:
                key = known.key_of(a, b, out, options)
            if key is not None:
                reported = return_report or policy.observed()
                told: Any = {"reported": reported, "limits": return_report}
                found = known.run(key, (a, b, out), stream, on_error, **told, ask=problem)
    if found is None:
        asked = problem(out)
        report = _run(asked, "gemm", on_stage, on_error, write=write, key=key, limits=return_report)
        result = asked.result()
    else:
        result, report = found
    if report is not None:
        policy.deliver(report, on_error)
    return (result, report) if return_report else result


def _plant_inputs(planter: faultpoint.Planter, A: Any, B: Any) -> None:
    """Let a planter see operands before anything is done with them, whatever they are; not where that were captured."""
    if is_cupy(A) and is_captured(current_stream()):
        return
    try:
        np.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    except (AttributeError, ValueError):  # the checks of the operands say what is wrong with them
        return
    faultpoint.reach(planter, "inputs", A=A, B=B)


def _captured(
    asked: GemmProblem, on_stage: Hook | None, on_error: str | None, *, write: bool
) -> tuple[Any, Report | None]:
    """The result and the report of a product on a stream that is captured."""
    if policy.synchronous() or on_stage is not None:
        raise RuntimeError(
            "the stream is captured into a graph, and nothing can be waited for: use errstate(sync=False), no on_stage"
        )
    report = captured.run(asked, "gemm", on_error, write=write)
    return asked.result(), report


def verify_gemm(
    A: Any,
    B: Any,
    C: Any,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    check: str = "auto",
    on_error: str | None = None,
) -> Report:
    """Was this existing product right? Checks ``C = alpha A @ B + beta c``; C is not changed.

    Parameters
    ----------
    A, B : arrays or Encoded
        As in `protected_gemm`.
    C : (..., m, n) array
        The product to check, in the dtype of ``A @ B`` (or float32 for 16-bit operands).
    c, alpha, beta, check
        As in `protected_gemm`.
    on_error : {None, "detect", "raise"}
        "detect": only report. None: as `errstate` says (by default a wrong C raises). "raise": raise.

    Returns
    -------
    report : Report
        CLEAN, UNCORRECTABLE with the located faults, UNVERIFIABLE, ...

    Raises
    ------
    SilentDataCorruptionError
        C is wrong, unless ``on_error="detect"``.

    Notes
    -----
    C may come from another library or machine, and may have been summed in order, from either end, pairwise or in
    blocks. (With the terms permuted, a clean product of constructed data may be called wrong: only ``gamma_k |A||B|``
    holds for every order, and would hide what is a hundred times smaller.) A line that fails its check is wrong where
    one of its elements is beyond the rigorous bound ``gamma_k |A||B|``; or where it is much further from an accurate
    product than lines that did not fail, or an element much further than the rest of its line, and further than a sum
    in order, first to last or last to first, may be (running error bound: Higham 2002, sec. 3.3). What passes is CLEAN;
    ``report.checks`` says how small a change was certain to be found, counting with the roundings of a sum in order.
    Where CUPY_TF32 or NVIDIA_TF32_OVERRIDE is set, float32 CuPy arrays are taken for TF32 products, as CuPy's own are.
    Where partial sums may have overflowed, an Inf in C is UNVERIFIABLE. Synchronises with the host.

    Examples
    --------
    >>> import numpy as np
    >>> import abft_tsm2 as ft
    >>> A, B = np.ones((3, 4)), np.ones((4, 5))
    >>> ft.verify_gemm(A, B, A @ B).status.name
    'CLEAN'
    """
    policy.check_on_error(on_error)
    if C is None:
        raise TypeError("C is None: verify_gemm checks a product that exists; does what computed it return nothing?")
    if on_error == "correct":
        raise ValueError("verify_gemm changes nothing: use on_error=None, 'detect' or 'raise'")
    alpha, beta = factor(alpha, "alpha"), factor(beta, "beta")
    if is_cupy(C) and is_captured(current_stream()):
        raise RuntimeError("the stream is captured into a graph, and nothing can be waited for: verify outside of it")
    problem = problem_of(A, B, c, alpha=alpha, beta=beta, existing=C, check=check)
    report = _run(problem, "verify_gemm", None, on_error, write=False)
    policy.deliver(report, on_error)
    return report


def _run(
    problem: GemmProblem,
    operation: str,
    on_stage: Hook | None,
    on_error: str | None,
    *,
    write: bool,
    key: Any = None,
    limits: bool = True,
) -> Report:
    """Every product of the problem, and one report of them all."""
    if is_cupy(problem.c) and serves(problem):
        keep = None if key is None else partial(known.remember, key)
        if on_stage is None and not policy.synchronous():
            return pending.run(problem, operation, on_error, write=write, keep=keep)
        return fallback.run(problem, operation, on_stage, write=write, keep=keep, limits=limits)
    if problem.wide:
        return _rounded_last(problem, operation, on_stage, write=write, limits=limits)
    start = perf_counter()
    if on_stage is None and (form := small.form_of(problem)) is not None:
        operands = problem.a, problem.b, problem.c, lambda: problem
        known_of: Any = {"carried": problem.carried(), "encoded": problem.encoded(), "start": start}
        report = form.product(*operands, write=write, limits=limits, **known_of)
        assert report is not None
        return report
    caller = np.geterr()  # holds for the product itself, as it would for a @ b
    with np.errstate(all="ignore"):  # what is not finite shows in a verdict
        if problem.batch and on_stage is None and stack.serves(problem):
            return stack.run(problem, operation, caller, write=write, limits=limits)
        reports = []
        for task in problem.tasks():
            reports.append(Product(task, problem, operation, on_stage, write, caller, limits=limits).report())
    if not problem.batch:
        return reports[0]
    if not reports:  # a batch of no products
        (m, k), n = problem.a.shape[-2:], problem.b.shape[-1]
        what: Any = {"operation": operation, "m": m, "k": k, "n": n, "dtype": problem.dtype}
        return Report(status=Status.CLEAN, **what, device=device_name(problem.c))
    return Report.merge(reports, operation=operation)


def _rounded_last(problem: GemmProblem, operation: str, on_stage: Hook | None, *, write: bool, limits: bool) -> Report:
    """Multiply in float32, and round to the result's 16 bits what has been checked. Waits for the verdict: the float32
    products are gone later."""
    xp = namespace(problem.c)
    c = xp.empty(problem.c.shape, dtype=xp.float32, device=problem.c.device)
    c0 = None if problem.c0 is None else xp.astype(problem.c0, xp.float32)
    with policy.errstate(sync=True):
        report = _run(replace(problem, c=c, c0=c0, wide=False), operation, on_stage, None, write=write, limits=limits)
    kept = (
        np.geterr() if report.ok else dict[str, Any](over="ignore", invalid="ignore")
    )  # the report says what it holds
    with np.errstate(**kept):
        problem.c[...] = xp.astype(c, problem.c.dtype)
    return report
