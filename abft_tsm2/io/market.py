"""Matrix Market files, read: SciPy's reader is given only what was checked here before.

What is stored of a matrix that is not general (its lower triangle) is completed here, too, and the reader is handed it
as a general one: of a dense triangle that is not square it writes outside of its array, of no rows it divides by them.
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from abft_tsm2.io.atomic import MatrixFileError, short

Matrix = np.ndarray[Any, np.dtype[Any]]
Check = Callable[[str, tuple[int, ...], np.dtype[Any]], None]  # refuses what an array's head announces

_CHUNK = 2**22  # bytes that are looked at together
_LONGEST = 2**16  # bytes of a line
_INDEX = rb"0*+[1-9]\d*+"
_REAL = rb"-?+(?:(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?+\d++)?+|(?i:inf(?:inity)?+|nan))"
_VALUES = {"integer": rb"-?+\d++", "unsigned-integer": rb"\d++", "pattern": b""}  # others: _REAL
_STORED = {"integer": "int64", "unsigned-integer": "uint64", "complex": "complex128"}  # others: float64

_WORDS = {
    "format": ("coordinate", "array"),
    "field": ("real", "double", "integer", "unsigned-integer", "pattern", "complex"),
    "symmetry": ("general", "symmetric", "skew-symmetric", "hermitian"),
}
_SIZES = {"coordinate": ("rows", "columns", "entries"), "array": ("rows", "columns")}


class _MarketHead(NamedTuple):
    """What a file says of itself; its sizes stand in line `line`."""

    form: str
    field: str
    symmetry: str
    rows: int
    columns: int
    entries: int
    line: int

    @property
    def stored(self) -> tuple[int, int]:
        """The shape that SciPy's reader is given: of a dense triangle one column."""
        whole = self.form == "coordinate" or self.symmetry == "general"
        return (self.rows, self.columns) if whole else (self.entries, 1)

    def plain(self) -> bytes:
        """The head of a general matrix with these entries, in as many lines: errors have numbers of lines."""
        sizes = (*self.stored, self.entries) if self.form == "coordinate" else self.stored
        about = "%\n" * (self.line - 2)
        return f"%%MatrixMarket matrix {self.form} {self.field} general\n{about}{' '.join(map(str, sizes))}\n".encode()


def read_market(path: Path, check: Check, limit: int) -> Matrix:
    """The matrix of a .mtx or .mtx.gz file, dense; entries of the same place are added.

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
        If it is no such file, is damaged, contradicts its own head, or becomes too large.
    """
    opened: Callable[..., Any] = gzip.open if path.name.lower().endswith(".gz") else open
    try:
        with opened(path, "rb") as stream:
            head = _head(stream)
            check(str(path), (head.rows, head.columns), np.dtype(_STORED.get(head.field, "float64")))
            _require_room(path, head, limit)
            body = stream.tell()
            _require_entries(stream, head)
            stream.seek(body)
            return _matrix(stream, head)
    except (ValueError, OverflowError, EOFError, zlib.error) as error:
        raise MatrixFileError(
            f"{path} is not a Matrix Market file or is damaged ({short(error)}); write it again with scipy.io.mmwrite"
        ) from error


def _require_room(path: Path, head: _MarketHead, limit: int) -> None:
    dense = 8 * head.rows * head.columns
    if dense > limit:
        raise MatrixFileError(
            f"{path} has {head.entries} entries and becomes {dense / 1e9:.1f} GB as a dense "
            f"{head.rows} x {head.columns} matrix, more than half of the memory "
            f"({limit / 1e9:.1f} GB); write it as .npy, which is worked on in pieces"
        )


# ---- the head ------------------------------------------------------------------------------------------------------


def _head(stream: IO[bytes]) -> _MarketHead:
    """Read the head, up to the line of the sizes; ValueError where it is none."""
    form, field, symmetry = _banner(_line(stream, 1))
    number, line = 2, _line(stream, 2)
    while line and (not line.strip() or line.startswith(b"%")):
        number, line = number + 1, _line(stream, number + 1)
    names = _SIZES[form]
    if not re.fullmatch(rb"\s*+\d{1,18}(?:[ \t]++\d{1,18}){%d}\s*+" % (len(names) - 1), line):
        raise ValueError(
            f"line {number} is {_shown(line)}, where its sizes have to be, whole numbers: {' '.join(names)}"
        )
    rows, columns, *entries = map(int, line.split())
    if symmetry != "general" and rows != columns:
        raise ValueError(f"line 1 says {symmetry}, and line {number} {rows} x {columns}: such a matrix is square")
    triangle = rows * (rows + (-1 if symmetry == "skew-symmetric" else 1)) // 2
    if entries and entries[0] and not rows * columns:
        raise ValueError(f"line {number} has {entries[0]} entries of a {rows} x {columns} matrix, which has none")
    needed = entries[0] if entries else rows * columns if symmetry == "general" else triangle
    return _MarketHead(form, field, symmetry, rows, columns, needed, number)


def _banner(line: bytes) -> tuple[str, str, str]:
    """Format, field and symmetry of the first line."""
    first, *words = line.decode("ascii", "replace").lower().split()
    if first not in ("%%matrixmarket", "%matrixmarket") or words[:1] != ["matrix"] or len(words) != 4:
        raise ValueError(f"line 1 is {_shown(line)}, not %%MatrixMarket matrix {' '.join(_WORDS)}")
    for (name, known), word in zip(_WORDS.items(), words[1:], strict=True):
        if word not in known:
            raise ValueError(f"line 1 has the {name} {word!r}, which is none of {', '.join(known)}")
    form, field, symmetry = words[1:]
    unsigned = field in ("pattern", "unsigned-integer")
    if (form, field) == ("array", "pattern") or (symmetry == "skew-symmetric" and unsigned):
        raise ValueError(f"line 1 says {form}, {field} and {symmetry}, which do not go together")
    return form, field, symmetry


def _line(stream: IO[bytes], number: int) -> bytes:
    """The next line of the head; ValueError where there is none, or none that a head has."""
    line = stream.readline(_LONGEST)
    if not line.strip() and number == 1:
        raise ValueError("line 1 is empty")
    if not line:
        raise ValueError(f"it ends at line {number}, before the sizes")
    if not line.endswith(b"\n"):
        raise ValueError(f"line {number}, {_shown(line)}, has no end, or is longer than {_LONGEST} bytes")
    return line


def _shown(line: bytes) -> str:
    return repr(line.strip()[:40].decode("ascii", "replace"))


# ---- the body ------------------------------------------------------------------------------------------------------


def _require_entries(stream: IO[bytes], head: _MarketHead) -> None:
    """ValueError unless each line of the body is one entry, or empty, and there are as many as the head says."""
    value = _VALUES.get(head.field, _REAL)
    words = [_INDEX, _INDEX, *([value] if value else [])] if head.form == "coordinate" else [value]
    entry = rb"[ \t]*+" + rb"[ \t]++".join(words) + rb"[ \t]*+\r?"
    one, several = re.compile(entry), re.compile(rb"(?:" + entry + rb"\n)++")
    number, entries, chunk = head.line, 0, b"\n"
    while more := stream.read(_CHUNK):
        rest = stream.readline(_LONGEST)
        chunk = more + rest
        if len(rest) < _LONGEST and several.fullmatch(chunk):
            entries += chunk.count(b"\n")
        else:  # line by line: some are empty, or one is wrong
            for at, text in enumerate(chunk.split(b"\n"), number + 1):
                full = bool(text.strip(b" \t\r"))
                if full and (len(text) + 1 >= _LONGEST or not one.fullmatch(text)):
                    raise ValueError(f"line {at} is {_shown(text)}, which is not one entry")
                entries += full
        number += chunk.count(b"\n")
    if not chunk.endswith(b"\n"):
        raise ValueError("its last line has no end and may have been cut in a number: append a line end if it is whole")
    if entries != head.entries:
        triangle = head.form == "array" and head.symmetry != "general"
        part = f" (the lower triangle of a {head.symmetry} matrix)" if triangle else ""
        raise ValueError(f"line {head.line} asks for {head.entries} entries{part}, and {entries} are there")


class _Plain:
    """The file as SciPy's reader is to see it: another head, and the body."""

    def __init__(self, head: bytes, body: IO[bytes]) -> None:
        self._head, self._body = head, body

    def read(self, size: int = -1) -> bytes:
        head, self._head = self._head, b""
        return head or self._body.read(size)


def _matrix(stream: IO[bytes], head: _MarketHead) -> Matrix:
    from scipy import io

    if 0 in (head.rows, head.columns, head.entries):
        return np.zeros((head.rows, head.columns), _STORED.get(head.field, "float64"))
    body = stream.tell()
    found = io.mmread(_Plain(head.plain(), stream))
    if head.symmetry == "general":
        return np.asarray(found if head.form == "array" else found.toarray())
    sign, inside = (-1, 1) if head.symmetry == "skew-symmetric" else (1, 0)
    if head.form == "array":
        return _completed(_triangle(found[:, 0], head.rows, inside), sign)
    above = found.row < found.col + inside
    if above.any():
        stream.seek(body)
        wrong, text = _line_of_entry(stream, head, int(np.argmax(above)))
        what = "the lower triangle, without the diagonal," if inside else "the lower triangle"
        raise ValueError(f"line {wrong} is {_shown(text)}: only {what} of a {head.symmetry} matrix is stored")
    return _completed(np.asarray(found.toarray()), sign)


def _triangle(values: Matrix, order: int, inside: int) -> Matrix:
    """The matrix of this lower triangle, stored by columns, the diagonal first unless it is `inside`."""
    lower, first = np.zeros((order, order), values.dtype), 0
    for j in range(order):
        column = lower[j + inside :, j]
        column[:] = values[first : first + len(column)]
        first += len(column)
    return lower


def _completed(lower: Matrix, sign: int) -> Matrix:
    """The whole matrix, in place; above the diagonal with this sign."""
    for j in range(len(lower)):
        lower[j, j + 1 :] = sign * lower[j + 1 :, j]
    return lower


def _line_of_entry(stream: IO[bytes], head: _MarketHead, entry: int) -> tuple[int, bytes]:
    """The number and the text of the line of an entry, the first being 0."""
    entries = (x for x in enumerate(stream, head.line + 1) if not x[1].isspace())
    return next(itertools.islice(entries, entry, None))
