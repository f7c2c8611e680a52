"""Output files that appear under their names whole, or not at all.

A file is written under a temporary name in the same folder, flushed to the disk, and renamed. What a process that was
killed has left there under such a name is removed when the next file is written to the folder.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from abft_tsm2.errors import AbftError

Name = str | os.PathLike[str]


class MatrixFileError(AbftError):
    """A matrix file cannot be read or written; the message says why and what to do next."""


@contextmanager
def output_file(name: Name) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that takes the content of the file `name`, which appears when the block ends."""
    with atomic_path(name) as temporary:

        def keep(content: bytes) -> None:
            with writing(Path(name)):
                temporary.write_bytes(content)

        yield keep


@contextmanager
def atomic_path(name: Name) -> Iterator[Path]:
    """Yield a temporary file in the folder of `name`: renamed to it when the block ends, removed when it fails.

    Raises
    ------
    MatrixFileError
        If the folder is missing or not writable, the disk is full, or `name` is not a regular file.
    """
    path = Path(name)
    with writing(path):
        target = _behind(path)
        if target.is_dir():
            raise MatrixFileError(f"{path} is a folder; name a file in it")
        if target.exists() and not target.is_file():
            raise MatrixFileError(f"{path} is not a regular file and will not be replaced; name another")
        if not target.parent.is_dir():
            raise MatrixFileError(f"cannot write {path}: there is no folder {path.parent}; create it first")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is there and read-only")
    temporary = target.parent / f"{_PREFIX}{secrets.token_hex(6)}{_SUFFIX}"
    held = -1
    try:
        with writing(path):
            _remove_abandoned(target.parent)
            held = _new(temporary)
        yield temporary
        with writing(path):
            if target.exists():
                shutil.copymode(target, temporary)
            _flush_to_disk(temporary, os.O_RDWR)
            os.replace(temporary, target)
            if os.name == "posix":
                _flush_to_disk(target.parent, os.O_RDONLY)
    finally:
        with suppress(OSError):  # where it could not be made
            temporary.unlink()
        if held >= 0:
            os.close(held)


def _behind(path: Path) -> Path:
    """The file behind links, which stay: it is the one that is replaced.

    Raises
    ------
    MatrixFileError
        For /dev/stdout and the like. What they stand for may be any file, that a shell keeps open.
    """
    here = path
    for _ in range(40):  # as many as Linux follows
        folder = os.path.realpath(here.parent)
        if folder == "/dev" or folder.startswith("/proc/"):
            raise MatrixFileError(
                f"{path} is a device or a stream; files are written under another name first, then renamed: name a file"
            )
        if not here.is_symlink():
            return Path(folder, here.name)
        here = Path(folder, os.readlink(here))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


_PREFIX, _SUFFIX = f".abft_tsm2-{os.uname().nodename}-", ".tmp"  # locks may be known to one machine alone
_YOUNG = 10.0  # seconds: one that was made just now is about to be locked


def _new(temporary: Path) -> int:
    """Make a temporary file; returns its descriptor, with a lock on it, which ends with this process."""
    held = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    with suppress(OSError):  # where the file system has no locks, nothing is taken for abandoned either
        fcntl.flock(held, fcntl.LOCK_EX)
    return held


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes that were killed: those that nobody has locked."""
    for one in folder.glob(f"{glob.escape(_PREFIX)}*{_SUFFIX}"):
        with suppress(OSError):  # locked, gone meanwhile, or another user's
            if time.time() - one.stat().st_mtime < _YOUNG:
                continue
            descriptor = os.open(one, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                one.unlink()
            finally:
                os.close(descriptor)


def _flush_to_disk(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MatrixFileError(f"cannot write {path}: {reason(error)}") from error


_FULL = "free space there, or write to another disk"
_CLOSED = "change the permissions, or write to another folder"
_NEXT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "the limit on file sizes is too small for it (ulimit -f)",
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.EEXIST: "it is no folder: name one",
    errno.ENOTDIR: "a part of the name is no folder: name one",
}


def reason(error: Exception) -> str:
    what = short(error)
    advice = _NEXT.get(getattr(error, "errno", 0))
    return f"{what}; {advice}" if advice else what


def short(error: Exception) -> str:
    """The first line of an error's message, without its number and file name."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = text.strip().partition("\n")[0].rstrip(".")
    return line[:1].lower() + line[1:] or type(error).__name__
