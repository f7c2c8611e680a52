"""A CSV file that keeps what was measured, whatever happens afterwards."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Sheet:
    """A CSV file that grows row by row; each row is on disk as soon as it is appended.

    Parameters
    ----------
    path : Path
    columns : sequence of str
    append : bool
        Go on with the file that is there, if there is one.

    Raises
    ------
    ValueError
        If that file has other columns.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, append: bool = False) -> None:
        self.path, self.columns = path, tuple(columns)
        path.parent.mkdir(parents=True, exist_ok=True)
        go_on = append and path.exists() and path.stat().st_size > 0
        if go_on:
            with path.open(newline="", encoding="utf-8") as file:
                there = tuple(next(csv.reader(file)))
            if there != self.columns:
                different = sorted(set(there) ^ set(self.columns))
                raise ValueError(f"{path} has other columns ({', '.join(different)}): name another --output")
        self._file = path.open("a" if go_on else "w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.columns, lineterminator="\n")
        if not go_on:
            self._writer.writeheader()
            self._file.flush()

    def append(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)
        self._file.flush()

    def __enter__(self) -> Sheet:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
