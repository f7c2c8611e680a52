"""Matrix Market files: read by SciPy, after a look at every line.

SciPy's reader takes as much of a line as is a number and passes over the rest: of 1,5 it reads 1. In a file that ends
in the middle of 1.5E-3 it may read beyond the end.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from abft_tsm2.atomic import MatrixFileError, short

Matrix = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 2**22
_WHOLE = rb"[+-]?+\d++"
_REAL = rb"[+-]?+(?:(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?+\d++)?+|(?i:inf(?:inity)?+|nan))"
_STORED = {"integer": "int64", "unsigned-integer": "uint64", "complex": "complex128"}  # others: float64


def read(path: Path, check: Callable[[str, tuple[int, ...], np.dtype[Any]], None], limit: int) -> Matrix:
    """The matrix of a .mtx or .mtx.gz file, dense.

    Parameters
    ----------
    path : path
    check : callable
        Refuses, by name, shape and dtype, what is not to be read.
    limit : int
        Bytes that the dense matrix may take.

    Raises
    ------
    MatrixFileError
        If it is no such file, is damaged, or becomes too large.
    """
    from scipy import io, sparse

    try:
        rows, columns, entries, form, field, _ = io.mminfo(path)
        check(str(path), (rows, columns), np.dtype(_STORED.get(field, "float64")))
        dense = 8 * rows * columns
        if dense > limit:
            raise MatrixFileError(
                f"{path} has {entries} entries and becomes {dense / 1e9:.1f} GB as a dense "
                f"{rows} x {columns} matrix, more than half of the memory "
                f"({limit / 1e9:.1f} GB); write it as .npy, which is worked on in pieces"
            )
        opened: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
        with opened(path, "rb") as stream:
            _look_at_lines(stream, _entry(form, field))
        matrix = io.mmread(path)
    except (ValueError, OverflowError, EOFError, zlib.error) as error:
        raise MatrixFileError(
            f"{path} is not a Matrix Market file or is damaged ({short(error)}); write it again with scipy.io.mmwrite"
        ) from error
    return np.asarray(matrix.toarray() if sparse.issparse(matrix) else matrix)


def _entry(form: str, field: str) -> bytes:
    """What a line of the body holds: a value, with its place where only some are stored."""
    value = [] if field == "pattern" else [_WHOLE if "integer" in field else _REAL]
    return rb"[ \t]++".join([_WHOLE, _WHOLE, *value] if form == "coordinate" else value)


def _look_at_lines(stream: IO[bytes], entry: bytes) -> None:
    """ValueError at the first line of the body that is not one entry, or has no end; empty ones are passed over."""
    line, number, chunk = stream.readline(), 1, b""
    while line and (not line.strip() or line.startswith(b"%")):  # of the head, which the sizes end
        line, number = stream.readline(), number + 1
    line_of = rb"[ \t]*+(?:" + entry + rb"[ \t]*+)?\r?"
    one, several = re.compile(line_of), re.compile(rb"(?:" + line_of + rb"\n)*+(?:" + line_of + rb")?")
    while more := stream.read(_CHUNK):
        chunk = more + stream.readline()
        if not several.fullmatch(chunk):
            for wrong, text in enumerate(chunk.split(b"\n"), number + 1):
                if not one.fullmatch(text):
                    shown = text[:40].decode("ascii", "replace")
                    raise ValueError(f"line {wrong} is {shown!r}, which is not one entry")
        number += chunk.count(b"\n")
    if not (chunk or line).endswith(b"\n"):
        raise ValueError("its last line has no end and may have been cut in a number: append a line end if it is whole")
