"""A CSV file of results that is whole after each row, so that a run which ends early goes on where it was."""

from __future__ import annotations

import csv
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path


class Table:
    """Rows by the value of their first column, written anew with each row that is put."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, list(columns)
        self._lock = threading.Lock()
        self.rows: dict[str, dict[str, str]] = {}
        if path.exists():
            with path.open(newline="") as file:
                self.rows = {row[self.columns[0]]: dict(row) for row in csv.DictReader(file)}

    def put(self, row: Mapping[str, object]) -> None:
        with self._lock:
            self.rows[str(row[self.columns[0]])] = {name: str(row.get(name, "")) for name in self.columns}
            self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with whole.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.rows.values())
        whole.replace(self.path)
