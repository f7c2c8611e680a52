"""Run the chosen mutants: on each the tests that touch its lines, and where it survives them the whole suite."""

from __future__ import annotations

import ast
import csv
import queue
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance import suite, trees
from tests.acceptance.choose import Mutant
from tests.acceptance.contexts import Contexts
from tests.acceptance.edits import LineEdit, edited
from tests.acceptance.table import Table

HERE = Path(__file__).parent
LIST, EQUIVALENT, RESULTS = HERE / "mutants.csv", HERE / "equivalent.toml", HERE / "results"
LISTED = ("number", "state", *Mutant._fields)
COLUMNS = ("number", "file", "line", "outcome", "on", "seconds", "tests", "first_failing")


def write(mutants: list[Mutant], count: int, contexts: list[Contexts], path: Path = LIST) -> Table:
    """List mutants: the first `count` that some test touches are `chosen`, the others `not covered` or `reserve`."""
    table, chosen = Table(path, LISTED), 0
    table.rows.clear()
    for number, one in enumerate(mutants, 1):
        covered = not contexts or any(each.tests_of(one.file, statement(one)) for each in contexts)
        state = "not covered" if not covered else "chosen" if chosen < count else "reserve"
        chosen += state == "chosen"
        row = {"number": number, "state": state, **one._asdict()}
        table.rows[str(number)] = {name: str(value) for name, value in row.items()}
    table.write()
    return table


def read(path: Path = LIST) -> list[tuple[str, str, Mutant]]:
    """(number, state, mutant) of all that are listed."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [(row["number"], row["state"], _mutant(row)) for row in rows]


def _mutant(row: dict[str, str]) -> Mutant:
    line, occurrence = int(row["line"]), int(row["occurrence"])
    return Mutant(row["file"], line, row["operator"], occurrence, row["old"], row["new"])


def lines_of(path: Path = LIST) -> dict[str, set[int]]:
    """The lines of all listed mutants, by file."""
    found: dict[str, set[int]] = {}
    for _, _, one in read(path):
        found.setdefault(one.file, set()).update(statement(one))
    return found


def statement(mutant: Mutant) -> range:
    """The lines of the innermost statement that holds the mutant, as coverage notes one line of a statement: of a
    condition or a loop its head, of a function, whose head runs at import, all of it."""
    lines = mutant.old.split("\n")
    last = mutant.line + max(i for i, text in enumerate(lines) if text.strip() or i == 0)
    tree, found = ast.parse((trees.HERE / mutant.file).read_text()), range(mutant.line, last + 1)
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt) and not isinstance(node, ast.ClassDef):
            of = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if last in of:
                body = getattr(node, "body", None)
                whole = body is None or isinstance(node, ast.FunctionDef)
                head = of if whole else range(node.lineno, max(body[0].lineno, node.lineno + 1))
                found = head if last in head else found
    return found


@dataclass(frozen=True)
class Options:
    """`limit`: seconds for each call of pytest; `whole`: survivors are run on the whole suite, by `workers`."""

    jobs: int = 1
    limit: float = 1800.0
    again: bool = False
    whole: bool = False
    workers: int = 0


def judge(tree: Path, number: str, mutant: Mutant, contexts: Contexts, options: Options) -> dict[str, object]:
    """The tests that touch the mutant's lines, or the whole suite, until one fails."""
    row: dict[str, object] = {"number": number, "file": mutant.file, "line": mutant.line}
    row["on"] = "whole suite" if options.whole else "touching tests"
    tests = sorted(contexts.tests_of(mutant.file, statement(mutant)))
    if not tests and not options.whole:
        return {**row, "outcome": suite.SURVIVED, "tests": 0, "first_failing": "no test touches it"}
    with edited(tree, (LineEdit(mutant.file, mutant.line, mutant.old, mutant.new),)):
        if options.whole:
            parallel = ["-n", str(options.workers), "--dist", "worksteal"] if options.workers else []
            done = suite.run(tree, ["tests"], options.limit, parallel)
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
                chosen.write("\n".join(tests))
                chosen.flush()
                files = sorted({test.partition("::")[0] for test in tests})
                done = suite.run(tree, files, options.limit, [], Path(chosen.name))
    row |= {"outcome": done.outcome, "seconds": f"{done.seconds:.1f}", "tests": done.tests}
    row["first_failing"] = done.first or (done.output[-200:].strip() if done.outcome == suite.ERROR else "")
    return row


def run(checkout: Path, name: str, contexts: Contexts, options: Options, only: tuple[str, ...] = ()) -> Table:
    """Judge every chosen mutant that has no row yet in `mutants_NAME.csv`; `whole`: every one that has survived."""
    table = Table(RESULTS / f"mutants_{name}.csv", COLUMNS)
    chosen = [(number, one) for number, state, one in read() if state == "chosen" and (not only or number in only)]
    if options.whole:
        on = {number: (row["outcome"], row["on"]) for number, row in table.rows.items()}
        left = [x for x in chosen if on.get(x[0]) == (suite.SURVIVED, "touching tests")]
    else:
        left = [x for x in chosen if options.again or x[0] not in table.rows]
    print(f"{len(chosen)} mutants, {len(left)} to be run", flush=True)
    with trees.copies(checkout, min(options.jobs, max(len(left), 1))) as free, ThreadPoolExecutor(options.jobs) as pool:

        def one(number: str, mutant: Mutant, free: queue.SimpleQueue[Path] = free) -> dict[str, object]:
            tree = free.get()
            try:
                return judge(tree, number, mutant, contexts, options)
            finally:
                free.put(tree)

        for count, done in enumerate(as_completed([pool.submit(one, *each) for each in left]), 1):
            row = done.result()
            table.put(row)
            print(
                f"[{count}/{len(left)}] {row['outcome']:8} {row['number']:>4} {row['file']}:{row['line']}", flush=True
            )
    return table


def equivalent(path: Path = EQUIVALENT) -> dict[str, str]:
    """Numbers of mutants that change nothing that a user could see, and why."""
    entries = tomllib.loads(path.read_text()).get("equivalent", []) if path.exists() else []
    return {str(one["number"]): one["reason"] for one in entries}


def summary(name: str) -> tuple[int, int]:
    """Print what has become of the chosen mutants; how many were killed, and of how many that are not equivalent."""
    table, same = Table(RESULTS / f"mutants_{name}.csv", COLUMNS), equivalent()
    chosen = [number for number, state, _ in read() if state == "chosen" and number not in same]
    outcomes = {number: table.rows.get(number, {}).get("outcome", "not run") for number in chosen}
    killed = sum(outcome in (suite.KILLED, suite.TIMEOUT) for outcome in outcomes.values())
    print(f"{name}: {killed} of {len(chosen)} killed, {len(same)} equivalent")
    for number, outcome in outcomes.items():
        if outcome not in (suite.KILLED, suite.TIMEOUT):
            row = table.rows.get(number, {})
            print(f"  {outcome}: {number} {row.get('file', '')}:{row.get('line', '')} {row.get('first_failing', '')}")
    return killed, len(chosen)
