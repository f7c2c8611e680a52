"""The commands ``abft-tsm2 lu | solve``: factor a matrix file, solve a linear system of files."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import click
import numpy as np

import abft_tsm2
from abft_tsm2.cli.output import (
    EXIT_CODES,
    PRINTED,
    computing,
    conclude_file,
    refuse,
    refuse_same_file,
    report_to,
    say,
)
from abft_tsm2.errors import SilentDataCorruptionError
from abft_tsm2.io import matrix
from abft_tsm2.io.matrix import Matrix, MatrixFileError
from abft_tsm2.report import Report

Hook = Callable[[str, Mapping[str, Any]], None]
FACTORS = ("lu", "piv")  # what the archives that `lu` writes hold
# Of every call; what is not finite `_finite` has refused, and said where it is.
_OPTIONS: Any = {"check_finite": False, "on_error": "correct", "return_report": True}


_MODES = click.Choice(["auto", "online", "offline"])
_options = computing(
    click.option("--mode", type=_MODES, default="auto", help="online: check after each panel; offline: at the end.")
)


@click.command(epilog=EXIT_CODES)
@click.argument("a")
@click.option("-o", "--output", "out", metavar="LU", required=True, help="Where to write the factors, a .npz.")
@_options
def lu(a: str, out: str, report: str | None, mode: str, dtype: str | None, quiet: bool) -> int:
    """Write the factors of P A = L U, with partial pivoting, checked and repaired.

    A is a .npy, .npz (file.npz:name where it holds several arrays), .mtx or .mtx.gz file, square or not. The .npz
    holds the arrays lu and piv as scipy.linalg.lu_factor returns them, for scipy.linalg.lu_solve and for the command
    solve. It is not written when the factors are known to be wrong; the report is written even then.

    \b
    Example:
      abft-tsm2 lu A.npy -o lu.npz --report report.json
    """
    refuse_same_file([a], out, report)
    A = matrix.read_matrix(a, dtype=dtype)
    A = matrix.convert(_finite(A, a), _common(dtype, A), a)
    pivots = min(A.shape)
    refused = contextlib.suppress(SilentDataCorruptionError)
    size = A.nbytes + np.dtype(np.int32).itemsize * pivots
    with report_to(report) as keep, refused, matrix.output_arrays(out, size) as write:
        factor = partial(abft_tsm2.protected_lu_factor, A, mode=mode, **_OPTIONS)
        factors, result = _outcome(factor, a, pivots, quiet)
        keep(result)
        refuse(result)
        write(**dict(zip(FACTORS, factors, strict=True)))
    return conclude_file(result, quiet or report == PRINTED, out)


@click.command(epilog=EXIT_CODES)
@click.argument("a")
@click.argument("b")
@click.option("-o", "--output", "out", metavar="X", required=True, help="Where to write the solution.")
@click.option("--refine", is_flag=True, help="Improve the solution once, by its residual.")
@_options
def solve(a: str, b: str, out: str, refine: bool, report: str | None, mode: str, dtype: str | None, quiet: bool) -> int:
    """Write the solution of A x = b, checked and repaired.

    A is a square matrix, or the .npz that the command lu has written: then it is not factored again. b is a vector, or
    a matrix whose columns are solved for; x has its shape. Files are .npy, .npz (file.npz:name where it holds several
    arrays), .mtx or .mtx.gz. x is not written when it is known to be wrong; the report is written even then.

    \b
    Example:
      abft-tsm2 solve A.npy b.npy -o x.npy --report report.json
    """
    refuse_same_file([a, b], out, report)
    factored = _holds_factors(a)
    if factored and (refine or mode != "auto"):
        needless = "--refine needs A itself" if refine else "--mode is about factoring A"
        raise click.UsageError(f"{needless}, and {a} holds its factors")
    A, piv = _factors(a, dtype) if factored else (matrix.read_matrix(a, dtype=dtype), None)
    B = matrix.read_matrix(b, dtype=dtype, vectors=True)
    _conformable(A, a, B, b)
    common = _common(dtype, A, B)
    A, B = (matrix.convert(_finite(x, name), common, name) for x, name in ((A, a), (B, b)))
    refused = contextlib.suppress(SilentDataCorruptionError)
    with report_to(report) as keep, refused, matrix.output_matrix(out, B.shape, common) as X:
        if piv is None:
            work = partial(abft_tsm2.protected_solve, A, B, mode=mode, refine=refine, **_OPTIONS)
        else:
            work = partial(abft_tsm2.protected_lu_solve, (A, piv), B, **_OPTIONS)
        x, result = _outcome(work, a, len(A), quiet or piv is not None)
        keep(result)
        refuse(result)
        X[...] = x
    return conclude_file(result, quiet or report == PRINTED, out)


def _holds_factors(name: str) -> bool:
    held = [one for one in FACTORS if one in matrix.members(name)]
    if len(held) == 1:
        (missing,) = set(FACTORS) - set(held)
        raise MatrixFileError(
            f"{name} holds {held[0]} and no {missing}: factors are both; write it again with abft-tsm2 lu, or name "
            f"{name}:{held[0]} if that is the matrix itself"
        )
    return len(held) == len(FACTORS)


def _factors(name: str, dtype: str | None) -> tuple[Matrix, Matrix]:
    """The arrays that lu has written. LAPACK follows wrong pivots out of the matrix, so they are checked here."""
    factors = matrix.read_matrix(f"{name}:{FACTORS[0]}", dtype=dtype)
    piv = matrix.read_indices(f"{name}:{FACTORS[1]}").astype(np.int64)
    steps, rows = min(factors.shape), len(factors)
    if piv.shape != (steps,) or not np.all((np.arange(steps) <= piv) & (piv < rows)):
        of = f"the {rows} x {factors.shape[1]} lu"
        raise MatrixFileError(f"{name} is damaged: its piv are no pivots of {of}; write it again with abft-tsm2 lu")
    zeros = np.flatnonzero(np.diagonal(factors) == 0)
    if zeros.size:
        raise click.ClickException(_singular(name, f"diagonal number {zeros[0] + 1} of U is zero"))
    return factors, piv.astype(np.int32)


def _conformable(A: Matrix, a: str, B: Matrix, b: str) -> None:
    rows, columns = A.shape
    if rows != columns:
        raise MatrixFileError(
            f"{a} is {rows} x {columns}: solve takes square matrices; for more rows than columns, "
            "numpy.linalg.lstsq finds the x that comes closest"
        )
    if B.shape[0] != rows:
        hint = "transpose it" if B.shape[-1] == rows else "check which files they are"
        shape = " x ".join(map(str, B.shape)) if B.ndim == 2 else f"a vector of {B.size}"
        raise MatrixFileError(
            f"{a} is {rows} x {columns} and {b} is {shape}: the rows of b ({B.shape[0]}) must be those of A "
            f"({rows}); {hint}"
        )


def _common(dtype: str | None, *operands: Matrix) -> np.dtype[Any]:
    """What to compute in: float32 only where all are."""
    single = all(x.dtype.newbyteorder("=") == np.float32 for x in operands)
    return np.dtype(dtype or (np.float32 if single else np.float64))


def _finite(x: Matrix, name: str) -> Matrix:
    finite = np.isfinite(x)
    if not finite.all():
        first = tuple(map(int, np.unravel_index(np.argmin(finite), x.shape)))
        raise MatrixFileError(f"{name} holds {x[first]} at {list(first)}: linear systems need finite numbers")
    return x


def _outcome(work: Callable[..., tuple[Any, Report]], name: str, columns: int, quiet: bool) -> tuple[Any, Report]:
    """What `work` returns, or nothing and the report of what it could not repair; each warning becomes a line."""
    from numpy.linalg import LinAlgError

    try:
        with warnings.catch_warnings(record=True) as caught, abft_tsm2.errstate(unverifiable="log"):
            warnings.simplefilter("always", RuntimeWarning)  # what SciPy says of numbers
            with _progress(columns, quiet) as hook:
                outcome = work(on_stage=hook)
    except SilentDataCorruptionError as error:
        outcome = None, error.report
    except LinAlgError as error:
        raise click.ClickException(_singular(name, str(error).rstrip("."))) from error
    except MemoryError as error:
        why = f"out of memory ({error or 'no details'})"
        raise click.ClickException(f"{why}; --dtype float32 needs half as much, where it will do") from error
    for warning in caught:
        say(f"Warning: {name}: {warning.message}")
    return outcome


def _singular(name: str, why: str) -> str:
    return f"{name} is singular ({why}): the system has no solution, or more than one; check what A was made from"


@contextlib.contextmanager
def _progress(columns: int, quiet: bool) -> Iterator[Hook | None]:
    """A hook that moves a bar with every panel of columns; none where standard error is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=columns, label="columns", file=sys.stderr) as bar:

        def move(stage: str, arrays: Mapping[str, Any]) -> None:
            if stage == "updated":
                bar.update(max(0, arrays["step"][1] - bar.pos))

        yield move
        bar.update(columns - bar.pos)
