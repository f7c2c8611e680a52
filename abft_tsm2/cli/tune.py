"""The command ``abft-tsm2 tune``: problems that are measured, the progress, the file and the table."""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import click

from abft_tsm2 import __version__
from abft_tsm2.cli.output import announce, say
from abft_tsm2.core import choose, tuning_file
from abft_tsm2.core.autotune import Contest, contenders, judged, nbytes
from abft_tsm2.core.device import Device, query
from abft_tsm2.core.problem import SIZES, Problem
from abft_tsm2.core.tuning_file import VENDOR, Entry, Measurements
from abft_tsm2.errors import AbftError, NotSuitable
from abft_tsm2.io import matrix

# Types of A and C; columns that a measurement speaks for end at each of these; and sizes, that it speaks for 4 times
# larger or smaller ones (`abft_tsm2.core.tuning_file.kernels`).
_TYPES = (
    ("float32", "float32"),
    ("float64", "float64"),
    ("float32", "float64"),
    *((half, out) for half in ("float16", "bfloat16") for out in (half, "float32")),
)
_COLUMNS = (1, 2, 4, 8, 16, 32)
_LARGE = ((1024, 1024), (4096, 4096), (10240, 10240), (20480, 20480), (2**18, 1024), (1024, 2**18))  # m, k
_TALL = ((10**4, 1), (10**5, 1), (10**6, 1), (10**7, 1), (10**4, 1000))  # m, products; k is about n
_SHARE = 0.9  # of the free memory
_LINES = 10  # of progress, where no terminal is


class TuningError(AbftError):
    """The measurements cannot be kept; the message says why and what to do next."""


def problems(*, quick: bool = False) -> tuple[Problem, ...]:
    """The products that are measured, small ones first: A by columns and by rows, large with a narrow B, and tall.

    Parameters
    ----------
    quick : bool
        Only float32 and float64, 2 to 16 columns, one size of either kind.

    Examples
    --------
    >>> len(problems(quick=True)), len(problems())
    (32, 924)
    """
    types = _TYPES[:2] if quick else _TYPES
    columns = _COLUMNS[1:5] if quick else _COLUMNS
    large = [(m, k, 1) for m, k in (_LARGE[2:3] if quick else _LARGE)]
    tall = _TALL[2:3] if quick else _TALL
    found = []
    for (dtype, out), order, n in product(types, "FC", columns):
        # With k = 1 A is one column, and has no order.
        for m, k, batch in (*large, *((m, n if n > 1 else 8, batch) for m, batch in tall)):
            width = math.gcd(16, (m if order == "F" else k) * SIZES[dtype])
            found.append(
                Problem(m, k, n, dtype, order, out=out, batch=batch, width=width, out_order="F" if n == 1 else "C")
            )
    return tuple(sorted(found, key=nbytes))


def run(*, quick: bool, output: str | None, quiet: bool) -> None:
    """Measure on the current device, print a table, and write a file, also when interrupted.

    Parameters
    ----------
    quick : bool
        Few problems, one kernel for each.
    output : str, optional
        The file; by default the one of this card in the cache directory, which keeps what was measured before.
    quiet : bool
        Print nothing.

    Raises
    ------
    NotSuitable
        Without CuPy or a GPU, or where nothing fits into its free memory.
    MatrixFileError, TuningError
        If the file cannot be written: before anything is measured.
    WrongProduct, KernelCompileError
    """
    device = _card()
    path = Path(output) if output else tuning_file.path_of(device.name)
    if not output:
        _make_folder(path.parent)
    kept = {entry.problem: entry for entry in _previous(path, device)}
    cases = [problem for problem in problems(quick=quick) if contenders(problem, device, quick=quick)]
    done: list[Entry] = []
    skipped: list[str] = []
    stop: BaseException | None = None
    with matrix.output_file(path) as keep:
        try:
            for result in _with_progress(_results(device, cases, quick), len(cases), quiet):
                done.append(result) if isinstance(result, Entry) else skipped.append(result)
        except BaseException as error:  # Ctrl-C as well: what was measured is kept
            if not done:
                raise
            stop = error
        if not done:
            raise NotSuitable(f"nothing was measured: {skipped[0]}")
        kept.update({entry.problem: entry for entry in done})
        keep(tuning_file.to_json(_signed(device, tuple(kept.values()))).encode())
    choose.forget()
    if stop is not None:
        say(f"{len(done)} of {len(cases)} cases were measured and are kept in {path}")
        raise stop
    if not quiet:
        changed = [entry for entry in done if _differs(entry, device)]
        told = [_table(done if quick else changed, device), *(f"skipped: {line}" for line in skipped)]
        told += [f"{len(done)} cases on {device.name}, {len(changed)} of them differ from what is shipped: {path}"]
        announce("\n".join(told), f"{path} was written")


def reset() -> str:
    """Delete what was measured on the current device; returns a message."""
    path = tuning_file.path_of(_card().name)
    try:
        path.unlink()
    except FileNotFoundError:
        return f"nothing was measured: there is no {path}"
    except OSError as error:
        raise TuningError(f"cannot delete {path}: {error.strerror}") from error
    finally:
        choose.forget()
    return f"deleted {path}"


def _card() -> Device:
    try:
        import cupy
    except ImportError as error:
        raise NotSuitable(
            f"tune measures a GPU, and CuPy cannot be imported ({error}): install abft_tsm2[cu13] or abft_tsm2[cu12]"
        ) from error
    if not cupy.is_available():
        raise NotSuitable("tune measures a GPU, and CuPy finds none: check nvidia-smi and CUDA_VISIBLE_DEVICES")
    return query()


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TuningError(
            f"cannot create {folder}: {error.strerror}; name another cache directory in "
            f"{tuning_file.VARIABLE}, or a file with --output"
        ) from error


def _previous(path: Path, device: Device) -> tuple[Entry, ...]:
    """The entries of the file that hold for this card and driver."""
    try:
        return tuning_file.read(path, device.name).entries
    except (OSError, ValueError):
        return ()


def _signed(device: Device, entries: tuple[Entry, ...]) -> Measurements:
    import cupy

    today = datetime.date.today().isoformat()
    return Measurements(device.name, tuning_file.driver(), cupy.__version__, __version__, today, entries)


def _results(device: Device, cases: Sequence[Problem], quick: bool) -> Iterator[Entry | str]:
    """For each case its entry, or the reason why there is none."""
    import cupy

    pool = cupy.get_default_memory_pool()
    try:
        contest = Contest(device)
    except MemoryError as error:
        raise NotSuitable(f"too little GPU memory is free to measure with ({error}): end what else uses it") from error
    for problem in cases:
        pool.free_all_blocks()
        free = int(cupy.cuda.runtime.memGetInfo()[0])
        missing = f"{_label(problem)} takes {nbytes(problem) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        if nbytes(problem) > _SHARE * free:
            yield missing
            continue
        try:
            times = contest.measure(problem, contenders(problem, device, quick=quick))
        except MemoryError:  # another process has taken it meanwhile
            yield missing
            continue
        yield judged(problem, device, times)
    pool.free_all_blocks()


def _with_progress(results: Iterator[Entry | str], length: int, quiet: bool) -> Iterator[Entry | str]:
    """The same results, shown as a bar on a terminal, else as `_LINES` lines."""
    if quiet or sys.stderr.isatty():
        bar: Any = click.progressbar(results, length=length, label="tune", file=sys.stderr)
        with contextlib.nullcontext(results) if quiet else bar as steps:
            yield from steps
        return
    for number, result in enumerate(results, 1):
        yield result
        if number * _LINES // length > (number - 1) * _LINES // length:
            say(f"tune: {number} of {length} cases")


def _differs(entry: Entry, device: Device) -> bool:
    """Whether another contender was chosen than the one that is shipped."""
    default = [(config.form, config.shape) for config in choose.shipped(entry.problem, device).configs[:1]]
    return (entry.kernel, entry.shape) != (default[0] if default else (VENDOR, None))


def _table(entries: Sequence[Entry], device: Device) -> str:
    """One line for each entry; a star where it is not what is shipped."""
    columns: Mapping[str, Callable[[Entry], str]] = {
        "case": lambda entry: _label(entry.problem),
        "chosen": lambda entry: f"{_name(entry)}{' *' if _differs(entry, device) else ''}",
        "ms": lambda entry: f"{entry.milliseconds:.3g}",
        "vendor ms": lambda entry: "" if entry.vendor is None else f"{entry.vendor:.3g}",
        "gain": lambda entry: "" if entry.vendor is None else f"{entry.vendor / entry.milliseconds:.2f}",
    }
    if not entries:
        return "every choice is the one that is shipped"
    rows = [list(columns), *([column(entry) for column in columns.values()] for entry in entries)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if any(_differs(entry, device) for entry in entries):
        lines.append("* differs from the choice that is shipped")
    return "\n".join(lines)


def _name(entry: Entry) -> str:
    shape = entry.shape
    if shape is None:
        return "vendor library"
    kept = "" if shape.leaves_first else " kept"
    return f"{entry.kernel} {shape.t1}/{shape.tcf}/{shape.t3}/{shape.pairs}/{shape.blocks}{kept}"


def _label(problem: Problem) -> str:
    types = problem.dtype if problem.out == problem.dtype else f"{problem.dtype} -> {problem.out}"
    many = f"{problem.batch} x " if problem.batch > 1 else ""
    lines = {"F": "columns", "C": "rows"}[problem.order]
    return f"{types}, A in {lines}, {many}({problem.m} x {problem.k} x {problem.n})"
