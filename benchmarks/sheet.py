"""CSV files of results: written row by row or as a whole, and read."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]


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


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write results/NAME.csv; the columns are those of the first row."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(name: str, path: Path | None = None) -> list[Row]:
    """The rows of results/NAME.csv, or of another CSV."""
    path = path or RESULTS / f"{name}.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the benchmark that writes it (see each one's --help)")
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
