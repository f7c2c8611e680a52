"""Matrix files: .npy, .npz and Matrix Market in; the same out, whole or not at all.

A large .npy is memory-mapped in both directions and worked on in row panels, so that a matrix may be larger
than the memory. A file appears under its name only when it is complete: it is written beside its place,
flushed to the disk, and renamed.
"""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from abft_tsm2.arrays import FLOATS
from abft_tsm2.errors import AbftError

Matrix = np.ndarray[Any, np.dtype[Any]]
Name = str | os.PathLike[str]

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


class MatrixFileError(AbftError):
    """A matrix file cannot be read or written; the message says why and what to do next."""


def read_matrix(name: Name, *, dtype: str | None = None) -> Matrix:
    """Read a matrix of floating-point numbers.

    Parameters
    ----------
    name : str or path
        A .npy, .npz, .mtx or .mtx.gz file. ``file.npz:x`` names the array ``x`` of an archive; an archive of
        one array needs no name. A .npy of `MAP_BYTES` or more is memory-mapped, read-only.
    dtype : {"float32", "float64"}, optional
        What the caller is going to convert to, with `convert`. Without it, a file of integers is refused.

    Returns
    -------
    (m, k) ndarray
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
    path, member = split_name(name)
    extension = _extension(path, "read")
    try:
        if not path.exists():
            raise MatrixFileError(f"{path}: no such file; check the name and the folder")
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            raise MatrixFileError(f"{path} is {kind}; name a matrix file")
        if extension == ".npy":
            return _read_npy(path, dtype)
        if extension == ".npz":
            return _read_npz(path, member, dtype)
        return _read_market(path, dtype)
    except (OSError, ValueError) as error:
        raise MatrixFileError(f"{path} cannot be read: {_reason(error)}") from error


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
    raise MatrixFileError(f"{path} cannot be {verb}: its extension is none of {formats}; convert it to one")


def _check(source: str, shape: tuple[int, ...], stored: np.dtype[Any], dtype: str | None) -> None:
    """Refuse what is not a real matrix, before its data are read."""
    if len(shape) != 2:
        advice = "save x.reshape(1, -1) or x.reshape(-1, 1)" if len(shape) == 1 else "save one matrix a file"
        raise MatrixFileError(f"{source} is no matrix: it has {len(shape)} dimensions, shape {shape}; {advice}")
    if stored.name in FLOATS or (dtype and stored.kind in "iubf"):
        return
    advice = _DTYPE_ADVICE.get(stored.kind, "pass --dtype float64, or save x.astype('float64')")
    raise MatrixFileError(f"{source} holds {stored.name}, which cannot be checked: {advice}")


def _header(stream: IO[bytes], source: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and dtype from the head of a .npy; `stream` is left at the first byte of the data."""
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise MatrixFileError(
            f"{source} is not a .npy file or its head is damaged ({_short(error)}); write it again with np.save"
        ) from error
    return shape, dtype


def _read_npy(path: Path, dtype: str | None) -> Matrix:
    with path.open("rb") as stream:
        shape, stored = _header(stream, str(path))
        _check(str(path), shape, stored, dtype)
        size = shape[0] * shape[1] * stored.itemsize
        present = os.fstat(stream.fileno()).st_size - stream.tell()
    if present < size:
        raise MatrixFileError(
            f"{path} is truncated: {shape[0]} x {shape[1]} {stored.name} need {size} bytes, "
            f"{present} are there; copy or write it again"
        )
    return np.asarray(np.load(path, mmap_mode="r" if size >= MAP_BYTES else None, allow_pickle=False))


def _read_npz(path: Path, member: str | None, dtype: str | None) -> Matrix:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]
            chosen = _choose(path, names, member)
            source = f"{path}:{chosen}"
            with archive.open(f"{chosen}.npy") as stream:
                _check(source, *_header(stream, source), dtype)
            with archive.open(f"{chosen}.npy") as stream:
                return np.asarray(npy.read_array(stream, allow_pickle=False))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise MatrixFileError(
            f"{path} is damaged or not a .npz archive ({_short(error)}); write it again with np.savez"
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


def _read_market(path: Path, dtype: str | None) -> Matrix:
    from scipy import io, sparse

    try:
        rows, columns, entries, _, field, _ = io.mminfo(path)
        stored = {"integer": "int64", "unsigned-integer": "uint64", "complex": "complex128"}
        _check(str(path), (rows, columns), np.dtype(stored.get(field, "float64")), dtype)
        dense, limit = 8 * rows * columns, physical_memory() // 2
        if dense > limit:
            raise MatrixFileError(
                f"{path} has {entries} entries and becomes {dense / 1e9:.1f} GB as a dense "
                f"{rows} x {columns} matrix, more than half of the memory "
                f"({limit / 1e9:.1f} GB); write it as .npy, which is worked on in pieces"
            )
        matrix = io.mmread(path)
    except (ValueError, OverflowError, EOFError, zlib.error) as error:
        raise MatrixFileError(
            f"{path} is not a Matrix Market file or is damaged ({_short(error)}); write it again with scipy.io.mmwrite"
        ) from error
    return np.asarray(matrix.toarray() if sparse.issparse(matrix) else matrix)


def physical_memory() -> int:
    """Bytes of physical memory, 8 GB where the system does not tell."""
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
def output_matrix(name: Name, shape: tuple[int, int], dtype: np.dtype[Any]) -> Iterator[Matrix]:
    """An array to fill, that becomes the file `name` when the block ends, and nothing when it fails.

    A .npy is filled in place on the disk, so that it may be larger than the memory; its space is reserved
    beforehand, so that a full disk is known before any work is done.

    Raises
    ------
    MatrixFileError
        If the file cannot be written; whatever was there before is still there.
    """
    path = Path(name)
    extension = _extension(path, "written")
    with atomic_path(path) as temporary:
        if extension == ".npy" and 0 not in shape:
            with _writing(path):
                mapped = _reserved(temporary, shape, dtype)
            yield np.asarray(mapped)
            with _writing(path):
                mapped.flush()
        else:
            matrix = np.zeros(shape, dtype)
            yield matrix
            with _writing(path):
                _WRITERS[extension](temporary, matrix)


def _reserved(temporary: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> np.memmap[Any, Any]:
    # Writing to a mapped page for which the disk has no room would kill the process: claim every page now.
    if shutil.disk_usage(temporary.parent).free < shape[0] * shape[1] * dtype.itemsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    mapped = npy.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):
        with temporary.open("r+b") as stream:
            try:
                os.posix_fallocate(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # it cannot reserve
                    raise
    return mapped


@contextmanager
def output_file(name: Name) -> Iterator[Callable[[bytes], None]]:
    """A function that takes the content of the file `name`, which appears when the block ends."""
    with atomic_path(name) as temporary:

        def keep(content: bytes) -> None:
            with _writing(Path(name)):
                temporary.write_bytes(content)

        yield keep


@contextmanager
def atomic_path(name: Name) -> Iterator[Path]:
    """A temporary file in the folder of `name`: renamed to it when the block ends, removed when it fails.

    Raises
    ------
    MatrixFileError
        If the folder is missing or not writable, the disk is full, or `name` is not a regular file.
    """
    path = Path(name)
    with _writing(path):
        target = Path(os.path.realpath(path))  # a link stays a link: the file behind it is replaced
        if target.is_dir():
            raise MatrixFileError(f"{path} is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise MatrixFileError(f"{path} is not a regular file and will not be replaced; name another")
        if not target.parent.is_dir():
            raise MatrixFileError(f"cannot write {path}: there is no folder {path.parent}; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is there and read-only")
        temporary = target.parent / f".abft_tsm2-{secrets.token_hex(6)}.tmp"
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666))
    try:
        yield temporary
        with _writing(path):
            if target.exists():
                shutil.copymode(target, temporary)
            _flush_to_disk(temporary, os.O_RDWR)
            os.replace(temporary, target)
            if os.name == "posix":
                _flush_to_disk(target.parent, os.O_RDONLY)
    finally:
        temporary.unlink(missing_ok=True)


def _flush_to_disk(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MatrixFileError(f"cannot write {path}: {_reason(error)}") from error


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

_FULL = "free space there, or write to another disk"
_CLOSED = "change the permissions, or write to another folder"
_NEXT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the limit on file sizes is too small for it (ulimit -f)",
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
}


def _reason(error: Exception) -> str:
    what = _short(error)
    advice = _NEXT.get(getattr(error, "errno", 0))
    return f"{what}; {advice}" if advice else what


def _short(error: Exception) -> str:
    """The first line of an error's message, without its number and file name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = text.strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:] or type(error).__name__
