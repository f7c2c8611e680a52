"""Which tests touch which lines: a suite is run under coverage folder by folder, and what matters of it is kept.

Kept are, for the lines of the chosen mutants, the tests that run them; for their files, the tests that run anything of
them (a line that runs at import alone has no test of its own); and for all files the branches that were taken.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.acceptance import suite

Kept = dict[str, Any]


def pieces(checkout: Path) -> list[str]:
    """The folders of tests that hold test files, and the files beside them."""
    tests = checkout / "tests"
    found = {path.parent for path in tests.rglob("test_*.py")}
    folders = {path.relative_to(checkout).parts[1] for path in found if path != tests} - {"acceptance"}
    return [*(f"tests/{name}" for name in sorted(folders)), *sorted(f"tests/{x.name}" for x in tests.glob("test_*.py"))]


def measure(checkout: Path, piece: str, lines: dict[str, set[int]], workers: int, limit: float) -> Kept:
    """Run one piece under coverage; `lines`: those of the mutants, by file."""
    from coverage import CoverageData

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "coverage")
        options = ["--cov=abft_tsm2", "--cov-branch", "--cov-context=test", "--cov-report="]
        options += ["-n", str(workers), "--dist", "worksteal"] if workers else []
        environ = {**suite.environment(checkout), "COVERAGE_FILE": str(base)}
        command = suite.command([piece], options)
        done = subprocess.run(command, cwd=checkout, env=environ, timeout=limit, capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):  # of failures the lines are known as well
            raise RuntimeError(f"{piece}: pytest exited {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        data = CoverageData(str(base))
        data.read()
        kept = condense(data, checkout, lines)
    kept["exit"], kept["end"] = done.returncode, done.stdout[-2000:]
    return kept


def condense(data: Any, checkout: Path, lines: dict[str, set[int]]) -> Kept:
    """`arcs`: by file; `lines`: by file and line the numbers of tests, which `tests` lists."""
    numbers: dict[str, int] = {}
    arcs, found = {}, {}
    for name in data.measured_files():
        file = os.path.relpath(name, checkout)
        arcs[file] = sorted(data.arcs(name) or [])
        if file not in lines:
            continue
        touching: dict[int, set[int]] = defaultdict(set)
        for line, contexts in data.contexts_by_lineno(name).items():
            for context in filter(None, contexts):
                number = numbers.setdefault(context.partition("|")[0], len(numbers))
                touching[0].add(number)
                if line in lines[file]:
                    touching[line].add(number)
        found[file] = {str(line): sorted(tests) for line, tests in touching.items()}
    return {"tests": list(numbers), "lines": found, "arcs": arcs}


class Contexts:
    """What is kept of all pieces, in one compressed file that is whole after each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: dict[str, Kept] = json.loads(gzip.decompress(path.read_bytes())) if path.exists() else {}

    def put(self, piece: str, kept: Kept) -> None:
        self.pieces[piece] = kept
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        whole.write_bytes(gzip.compress(json.dumps(self.pieces, separators=(",", ":")).encode(), mtime=0))
        whole.replace(self.path)

    def tests_of(self, file: str, lines: range) -> set[str]:
        """The tests that run one of these lines; those that run anything of the file, where it runs at import alone."""
        found = self._of(file, [str(line) for line in lines])
        return found or (self._of(file, ["0"]) if self._runs_at_import(file, lines) else set())

    def _of(self, file: str, lines: list[str]) -> set[str]:
        return {
            kept["tests"][number]
            for kept in self.pieces.values()
            for line in lines
            for number in kept["lines"].get(file, {}).get(line, [])
        }

    def _runs_at_import(self, file: str, lines: range) -> bool:
        arcs = (arc for kept in self.pieces.values() for arc in kept["arcs"].get(file, []))
        return any(abs(end) in lines for arc in arcs for end in arc)

    def branches(self, checkout: Path) -> tuple[int, int]:
        """Branches taken, and all there are, of the package's files that were measured."""
        from coverage import Coverage, CoverageData

        arcs: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for kept in self.pieces.values():
            for file, some in kept["arcs"].items():
                arcs[str(checkout / file)].update((a, b) for a, b in some)
        with tempfile.TemporaryDirectory() as folder:
            data = CoverageData(f"{folder}/coverage")
            data.add_arcs(arcs)
            data.write()
            coverage = Coverage(data_file=f"{folder}/coverage", branch=True, config_file=False)
            coverage.load()
            coverage.json_report(outfile=f"{folder}/report.json", ignore_errors=True)
            totals = json.loads(Path(folder, "report.json").read_text())["totals"]
        return totals["covered_branches"], totals["num_branches"]
