"""Edits of source files: one text at one place is replaced by another, and whatever does not fit is an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class EditError(ValueError):
    """The file does not hold the text that the edit replaces."""


@dataclass(frozen=True)
class Edit:
    """`old` becomes `new` at its `occurrence`-th place in `file` (1 is the first); `found` places are expected."""

    file: str
    old: str
    new: str
    occurrence: int = 1
    found: int = 1

    def apply(self, source: str) -> str:
        pieces = source.split(self.old) if self.old else []
        if len(pieces) - 1 != self.found:
            raise EditError(f"{self.file}: found {max(len(pieces) - 1, 0)} times, not {self.found}: {self.old!r}")
        if not 1 <= self.occurrence <= self.found:
            raise EditError(f"{self.file}: occurrence {self.occurrence} of {self.found}")
        before, after = pieces[: self.occurrence], pieces[self.occurrence :]
        return self.old.join(before) + self.new + self.old.join(after)


@dataclass(frozen=True)
class LineEdit:
    """The lines `old` that begin at line `line` of `file` become `new`."""

    file: str
    line: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        lines, old = source.split("\n"), self.old.split("\n")
        first = self.line - 1
        if lines[first : first + len(old)] != old:
            raise EditError(f"{self.file}:{self.line}: these lines do not stand there: {self.old!r}")
        return "\n".join([*lines[:first], *self.new.split("\n"), *lines[first + len(old) :]])


@contextmanager
def edited(tree: Path, edits: tuple[Edit | LineEdit, ...]) -> Iterator[None]:
    """The tree with all the edits, made one after another, and as it was again afterwards."""
    kept: dict[Path, str] = {}
    try:
        for edit in edits:
            path = tree / edit.file
            source = path.read_text()
            kept.setdefault(path, source)
            _write(path, edit.apply(source))
        yield
    finally:
        for path, source in kept.items():
            _write(path, source)


def _write(path: Path, source: str) -> None:
    """Python takes byte code for current whose source has the same second and size: there must be none."""
    path.write_text(source)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
