"""Matrix files, read and written: .npy, .npz and Matrix Market; written whole or not at all.

A large .npy is memory-mapped in both directions and worked on in row panels, so that a matrix may be larger
than the memory. A file appears under its name only when it is complete (`abft_tsm2.io.atomic`).
"""

from __future__ import annotations

import errno
import gzip
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy

from abft_tsm2.arrays import FLOATS
from abft_tsm2.io.atomic import MatrixFileError as MatrixFileError
from abft_tsm2.io.atomic import Name, atomic_path, reason, short, writing
from abft_tsm2.io.atomic import output_file as output_file
from abft_tsm2.io.market import read_market

Matrix = np.ndarray[Any, np.dtype[Any]]
Check = Callable[[str, tuple[int, ...], np.dtype[Any]], None]  # refuses what an array's head announces

MAP_BYTES = 64 * 2**20  # a .npy from this size on is mapped, not read
PANEL_BYTES = 256 * 2**20  # a row panel of A together with its rows of C
FORMATS = (".npy", ".npz", ".mtx", ".mtx.gz")

_DTYPE_ADVICE = {
    "i": "pass --dtype float64, which converts (exactly below 2**53)",
    "u": "pass --dtype float64, which converts (exactly below 2**53)",
    "b": "pass --dtype float64, which converts",
    "c": "complex is not supported: save the real and the imaginary part as two files",
    "O": "Python objects are never unpickled: save it as numbers with np.save(file, x.astype('float64'))",
    "V": "records, and bfloat16, have no numeric type in this format: save x.astype('float32') instead",
}


def read_matrix(name: Name, *, dtype: str | None = None, vectors: bool = False) -> Matrix:
    """Read a matrix of floating-point numbers.

    Parameters
    ----------
    name : str or path
        A .npy, .npz, .mtx or .mtx.gz file. ``file.npz:x`` names the array ``x`` of an archive; an archive of
        one array needs no name. A .npy of `MAP_BYTES` or more is memory-mapped, read-only.
    dtype : {"float32", "float64"}, optional
        What the caller is going to convert to, with `convert`. Without it, a file of integers is refused.
    vectors : bool
        Whether an array of one dimension will do as well.

    Returns
    -------
    (m, k) ndarray, or (m,) where `vectors` allows it
        In the dtype and the order of the file: not yet converted.

    Raises
    ------
    MatrixFileError
        If there is no such file, it is damaged, or what it holds is not a real matrix.

    Examples
    --------
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "A.npy")
    ...     np.save(path, np.eye(3))
    ...     read_matrix(path).shape
    (3, 3)
    """
    return _read(name, partial(_check, dtype=dtype, vectors=vectors))


def read_indices(name: Name) -> Matrix:
    """Read a vector of integers, such as pivots; otherwise as `read_matrix`."""
    return _read(name, _check_indices)


def _read(name: Name, check: Check) -> Matrix:
    path, member = split_name(name)
    extension = _extension(path, "read")
    try:
        if not path.exists():
            raise MatrixFileError(f"{path}: no such file; check the name and the folder")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise MatrixFileError(f"{path} is {kind}; name a matrix file")
        if extension == ".npy":
            return _read_npy(path, check)
        if extension == ".npz":
            return _read_npz(path, member, check)
        return read_market(path, check, physical_memory() // 2)
    except (OSError, ValueError) as error:
        raise MatrixFileError(f"{path} cannot be read: {reason(error)}") from error


def split_name(name: Name) -> tuple[Path, str | None]:
    """The path of the file, and which array of it: ``dir/file.npz:x`` -> ``dir/file.npz``, ``x``."""
    name = os.fspath(name)
    at = name.lower().rfind(".npz:")
    if at < 0 or os.path.exists(name):
        return Path(name), None
    return Path(name[: at + 4]), name[at + 5 :]


def _extension(path: Path, verb: str) -> str:
    for extension in FORMATS:
        if path.name.lower().endswith(extension):
            return extension
    formats = ", ".join(FORMATS)
    advice = "convert it to one" if verb == "read" else "name a file with one of them"
    raise MatrixFileError(f"{path} cannot be {verb}: its extension is none of {formats}; {advice}")


def _check(
    source: str, shape: tuple[int, ...], stored: np.dtype[Any], *, dtype: str | None, vectors: bool = False
) -> None:
    """Refuse what is not a real matrix (or vector), before its data are read."""
    if len(shape) != 2 and not (vectors and len(shape) == 1):
        advice = "save x.reshape(1, -1) or x.reshape(-1, 1)" if len(shape) == 1 else "save one matrix a file"
        kind = "neither a matrix nor a vector" if vectors else "no matrix"
        raise MatrixFileError(f"{source} is {kind}: it has {len(shape)} dimensions, shape {shape}; {advice}")
    if stored.name in FLOATS or (dtype and stored.kind in "iubf"):
        return
    advice = _DTYPE_ADVICE.get(stored.kind, "pass --dtype float64, or save x.astype('float64')")
    raise MatrixFileError(f"{source} holds {stored.name}, which cannot be checked: {advice}")


def _check_indices(source: str, shape: tuple[int, ...], stored: np.dtype[Any]) -> None:
    if len(shape) != 1 or stored.kind not in "iu":
        raise MatrixFileError(f"{source} is no vector of integers: it holds {stored.name} of shape {shape}")


class _NumpyHead(NamedTuple):
    """What the head of a .npy says of its array."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape))} {self.dtype.name}"


def _header(stream: IO[bytes], source: str) -> _NumpyHead:
    """The head of a .npy; `stream` is left at the first byte of the data."""
    try:
        version = npy.read_magic(stream)
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version[0]}.{version[1]}")
        shape, fortran, dtype = _VERSIONS[version](stream)
    except (ValueError, TypeError, KeyError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise MatrixFileError(
            f"{source} is not a .npy file or its head is damaged ({short(error)}); write it again with np.save"
        ) from error
    for size in shape:  # NumPy takes booleans and negative numbers for sizes here, and fails later
        if isinstance(size, bool) or size < 0:
            what = "a boolean is no size" if isinstance(size, bool) else "a shape cannot be negative"
            raise MatrixFileError(f"{source} has the shape {shape} in its head: {what}; write it again with np.save")
    if math.prod(max(1, size) for size in shape) * max(1, dtype.itemsize) >= 2**63:  # NumPy counts so, beside a 0 too
        raise MatrixFileError(
            f"{source} has the shape {shape} in its head: no array of {dtype.name} is so large; write it again with "
            "np.save"
        )
    return _NumpyHead(shape, "F" if fortran else "C", dtype)


_VERSIONS: dict[tuple[int, int], Any] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    (3, 0): npy.read_array_header_2_0,  # which differs in the names of records
}


def _require_size(head: _NumpyHead, present: int, source: str) -> None:
    """MatrixFileError unless the data are as many bytes as the head says."""
    if present < head.size:
        raise MatrixFileError(
            f"{source} is truncated: {head} need {head.size} bytes, {present} are there; copy or write it again"
        )
    if present > head.size:
        raise MatrixFileError(
            f"{source} goes on behind its array: {head} take {head.size} bytes, {present} are there; write it again, "
            "each array to a file of its own"
        )


def _read_npy(path: Path, check: Check) -> Matrix:
    with path.open("rb") as stream:
        head = _header(stream, str(path))
        check(str(path), head.shape, head.dtype)
        _require_size(head, os.fstat(stream.fileno()).st_size - stream.tell(), str(path))
        if head.size < MAP_BYTES:
            return _data(stream, head)
        return np.asarray(np.memmap(stream, head.dtype, "r", stream.tell(), head.shape, head.order))


def _data(stream: IO[bytes], head: _NumpyHead) -> Matrix:
    """The array behind the head that was checked; EOFError where it ends too early."""
    flat = np.empty(math.prod(head.shape), head.dtype)
    left = flat.view(np.uint8).data
    while left:
        read = stream.readinto(left[:MAP_BYTES])  # type: ignore[attr-defined]
        if not read:
            raise EOFError(f"{len(left)} of {head.size} bytes are missing")
        left = left[read:]
    return flat.reshape(head.shape, order=head.order)


def members(name: Name) -> list[str]:
    """The names of the arrays in a .npz; none for another file, and for one that cannot be read."""
    try:
        with zipfile.ZipFile(name) as archive:
            return _members(archive)
    except (OSError, ValueError, zipfile.BadZipFile):
        return []


def _members(archive: zipfile.ZipFile) -> list[str]:
    return [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]


def _read_npz(path: Path, member: str | None, check: Check) -> Matrix:
    try:
        with zipfile.ZipFile(path) as archive:
            chosen = _choose(path, _members(archive), member)
            source, entry = f"{path}:{chosen}", archive.getinfo(f"{chosen}.npy")
            with archive.open(entry) as stream:
                head = _header(stream, source)
                check(source, head.shape, head.dtype)
                _require_size(head, entry.file_size - stream.tell(), source)
                if head.size > physical_memory():
                    raise MatrixFileError(
                        f"{source}, {head}, is larger than the memory; write it as .npy, which is worked on in pieces"
                    )
                return _data(stream, head)
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise MatrixFileError(
            f"{path} is damaged or not a .npz archive ({short(error)}); write it again with np.savez"
        ) from error


def _choose(path: Path, names: list[str], member: str | None) -> str:
    if not names:
        raise MatrixFileError(f"{path} holds no array; write it with np.savez({path.name!r}, x)")
    listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    if member is None:
        if {"indices", "indptr", "data"} <= set(names):
            raise MatrixFileError(f"{path} is a SciPy sparse matrix; save it with np.save(file, x.toarray())")
        if len(names) > 1:
            raise MatrixFileError(f"{path} holds {len(names)} arrays ({listing}); name one: {path}:{names[0]}")
        return names[0]
    if member not in names:
        nearest = get_close_matches(member, names, 1)
        hint = f"did you mean {path}:{nearest[0]}?" if nearest else f"it holds {listing}"
        raise MatrixFileError(f"{path} has no array {member!r}; {hint}")
    return member


def physical_memory() -> int:
    """Bytes of physical memory, 8 GB where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * 10**9


def convert(block: Matrix, dtype: np.dtype[Any], source: Name) -> Matrix:
    """`block` in `dtype` and native byte order, without a copy where it already is.

    Raises
    ------
    MatrixFileError
        If a finite value would become infinite.
    """
    try:
        with np.errstate(over="raise"):
            return np.asarray(block, dtype=dtype)
    except FloatingPointError as error:
        raise MatrixFileError(
            f"{source} has values beyond the largest {dtype.name}, {FLOATS[dtype.name].largest:.3g}; "
            "pass --dtype float64"
        ) from error


def row_panels(rows: int, row_bytes: int, panel_bytes: int = PANEL_BYTES) -> Iterator[slice]:
    """Consecutive slices that cover `rows` rows, each of about `panel_bytes` bytes; one at least.

    Examples
    --------
    >>> [(p.start, p.stop) for p in row_panels(10, 8, 32)]
    [(0, 4), (4, 8), (8, 10)]
    """
    step = max(1, panel_bytes // max(1, row_bytes))
    for start in range(0, max(1, rows), step):
        yield slice(start, min(rows, start + step))


@contextmanager
def output_matrix(name: Name, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Matrix]:
    """A matrix or vector to fill, that becomes the file `name` when the block ends, and nothing when it fails.

    A .npy is filled in place on the disk, so that it may be larger than the memory; its space is reserved
    beforehand, so that a full disk is known before any work is done.

    Raises
    ------
    MatrixFileError
        If the file cannot be written; whatever was there before is still there.
    """
    path = Path(name)
    extension = _extension(path, "written")
    if len(shape) == 1 and extension.startswith(".mtx"):
        raise MatrixFileError(f"{path} cannot be written: Matrix Market has no vectors; name a .npy file")
    with atomic_path(path) as temporary:
        if extension == ".npy" and 0 not in shape:
            with writing(path):
                mapped = _reserved(temporary, shape, dtype)
            yield np.asarray(mapped)
            with writing(path):
                mapped.flush()
        else:
            matrix = np.zeros(shape, dtype)
            yield matrix
            with writing(path):
                _WRITERS[extension](temporary, matrix)


@contextmanager
def output_arrays(name: Name, size: int) -> Iterator[Callable[..., None]]:
    """A function that takes, by name, the arrays of the .npz `name`, which appears when the block ends.

    Raises
    ------
    MatrixFileError
        If the file cannot be written, or the disk has less than its `size` bytes free, before any work is done.
    """
    path = Path(name)
    if _extension(path, "written") != ".npz":
        raise MatrixFileError(f"{path} cannot be written: it is to hold several arrays; name a .npz file")
    save: Callable[..., None] = np.savez
    with atomic_path(path) as temporary:
        with writing(path):
            _want_room(temporary, size)

        def keep(**arrays: Matrix) -> None:
            with writing(path), temporary.open("wb") as stream:
                save(stream, **arrays)

        yield keep


def _want_room(temporary: Path, size: int) -> None:
    if shutil.disk_usage(temporary.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reserved(temporary: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    # Writing to a mapped page on a full disk would kill the process: claim every page now.
    _want_room(temporary, math.prod(shape) * dtype.itemsize)
    mapped = npy.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with temporary.open("r+b") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # it cannot reserve
                    raise
    return mapped


def _write_numpy(temporary: Path, matrix: Matrix, save: Callable[..., None]) -> None:
    with temporary.open("wb") as stream:
        save(stream, matrix, allow_pickle=False)


def _write_market(temporary: Path, matrix: Matrix, opened: Callable[..., Any] = open) -> None:
    from scipy import io

    with opened(temporary, "wb") as stream:
        io.mmwrite(stream, matrix)


_WRITERS: dict[str, Callable[[Path, Matrix], None]] = {
    ".npy": partial(_write_numpy, save=np.save),
    ".npz": partial(_write_numpy, save=np.savez),
    ".mtx": _write_market,
    ".mtx.gz": partial(_write_market, opened=gzip.open),
}
