"""The frozen list of planted defects: each breaks one check of the package, and tests have to notice."""

from __future__ import annotations

import queue
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance import suite, trees
from tests.acceptance.edits import Edit, edited
from tests.acceptance.table import Table

LISTS = Path(__file__).parent / "defects"
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("name", "outcome", "seconds", "tests", "first_failing", "without_the_defect")


@dataclass(frozen=True)
class Defect:
    """`without`: what gets through; `hint`: tests tried first, where they exist; `tests`: all that may see it."""

    name: str
    without: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    hint: tuple[str, ...] = ()


def parse(text: str, origin: str = "") -> list[Defect]:
    """Read tables `[[defect]]`, each with one edit (`file`, `old`, `new`, ...) or several (`[[defect.edit]]`)."""
    found = []
    for entry in tomllib.loads(text).get("defect", []):
        edits = entry.pop("edit", None) or [
            {x: entry.pop(x) for x in ("file", "old", "new", "occurrence", "found") if x in entry}
        ]
        name, without = entry.pop("name"), entry.pop("without")
        tests, hint = tuple(entry.pop("tests")), tuple(entry.pop("hint", ()))
        if entry:
            raise ValueError(f"{origin}: {name}: unknown keys {sorted(entry)}")
        found.append(Defect(name, without, tuple(Edit(**edit) for edit in edits), tests, hint))
    return found


def frozen(folder: Path = LISTS) -> list[Defect]:
    found = [one for path in sorted(folder.glob("*.toml")) for one in parse(path.read_text(), path.name)]
    names = [one.name for one in found]
    if len(set(names)) != len(names):
        raise ValueError(f"names that stand twice: {sorted({name for name in names if names.count(name) > 1})}")
    return found


def present(tree: Path, tests: tuple[str, ...]) -> list[str]:
    """Those of the tests whose file is there, and in it the function that is named."""
    found = []
    for test in tests:
        path, *inside = test.split("::")
        file = tree / path
        if file.exists() and (not inside or f"def {inside[-1].partition('[')[0]}(" in file.read_text()):
            found.append(test)
    return found


@dataclass(frozen=True)
class Options:
    """Of a run over defects: `tests` instead of what the list names; `limit` in seconds for each call of pytest."""

    jobs: int = 1
    tests: tuple[str, ...] = ()
    limit: float = 600.0
    again: bool = False
    pytest: tuple[str, ...] = ()
    confirm: bool = True


def judge(tree: Path, defect: Defect, options: Options) -> dict[str, object]:
    """Run the tests on the defect, the hinted ones first; the one that fails has to pass without the defect."""
    sets = [list(options.tests)] if options.tests else [present(tree, defect.hint), present(tree, defect.tests)]
    seconds, tests, last = 0.0, 0, suite.Run(suite.ERROR, 0.0, 0, "no test is there", "")
    with edited(tree, defect.edits):
        for targets in filter(None, sets):
            last = suite.run(tree, targets, options.limit, list(options.pytest))
            seconds, tests = seconds + last.seconds, tests + last.tests
            if last.outcome != suite.SURVIVED:
                break
    row = {"name": defect.name, "outcome": last.outcome, "seconds": f"{seconds:.1f}", "tests": tests}
    row["first_failing"] = last.first or (last.output[-200:].strip() if last.outcome == suite.ERROR else "")
    if last.outcome == suite.KILLED and "::" not in last.first:
        row["outcome"] = suite.ERROR  # it broke a module or the process: no test has looked at it
    elif last.outcome == suite.KILLED and options.confirm:
        honest = suite.run(tree, [last.first], options.limit, list(options.pytest))
        row["without_the_defect"] = {suite.SURVIVED: "passes"}.get(honest.outcome, honest.outcome)
        if honest.outcome != suite.SURVIVED:
            row["outcome"] = suite.ERROR
    return row


def run(defects: list[Defect], checkout: Path, results: Path, options: Options) -> Table:
    """Judge every defect that has no row yet, and write a row for each."""
    table = Table(results, COLUMNS)
    left = [one for one in defects if options.again or one.name not in table.rows]
    print(f"{len(defects)} defects, {len(defects) - len(left)} done before", flush=True)
    with trees.copies(checkout, min(options.jobs, max(len(left), 1))) as free, ThreadPoolExecutor(options.jobs) as pool:

        def one(defect: Defect, free: queue.SimpleQueue[Path] = free) -> dict[str, object]:
            tree = free.get()
            try:
                return judge(tree, defect, options)
            except ValueError as error:
                return {"name": defect.name, "outcome": suite.ERROR, "first_failing": error}
            finally:
                free.put(tree)

        for number, done in enumerate(as_completed([pool.submit(one, defect) for defect in left]), 1):
            row = done.result()
            table.put(row)
            print(f"[{number}/{len(left)}] {row['outcome']:8} {row.get('seconds', 0):>6} s  {row['name']}", flush=True)
    return table


def summary(defects: list[Defect], table: Table) -> int:
    """Print how many ended how, and all that were not killed; 1 if there are any."""
    rows = [table.rows[one.name] for one in defects if one.name in table.rows]
    counts = {
        outcome: sum(row["outcome"] == outcome for row in rows)
        for outcome in ("killed", "survived", "timeout", "error")
    }
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), f"of {len(defects)}")
    for row in rows:
        if row["outcome"] != suite.KILLED:
            print(f"  {row['outcome']}: {row['name']}: {row['first_failing']}")
    return int(counts["killed"] < len(defects))
