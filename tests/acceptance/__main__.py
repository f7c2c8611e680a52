"""Acceptance of the tests: `python -m tests.acceptance defects`, `... mutants choose | contexts | run | summary`."""

from __future__ import annotations

from pathlib import Path

import click

from tests.acceptance import defects as of_defects
from tests.acceptance import mutants as of_mutants
from tests.acceptance import trees
from tests.acceptance.choose import draw
from tests.acceptance.contexts import Contexts, measure, pieces

CHECKOUT = click.Path(exists=True, file_okay=False, path_type=Path)
TABLE = click.Path(dir_okay=False, path_type=Path)


@click.group()
def main() -> None:
    """Do the tests see what they are there for?"""


@main.command()
@click.option("--only", multiple=True, help="Only the defects with this name, or whose name begins like it.")
@click.option("--jobs", default=1, show_default=True, help="Copies of the checkout that are tested at a time.")
@click.option("--tests", multiple=True, help="Run these files, folders or ids instead of those of the list.")
@click.option("--suite", type=CHECKOUT, default=trees.HERE, help="A checkout: its package is edited, its tests run.")
@click.option("--results", type=TABLE, default=of_defects.RESULTS / "defects.csv", show_default="defects.csv")
@click.option("--limit", default=600.0, show_default=True, help="Seconds for each call of pytest.")
@click.option("--workers", default=0, help="Processes of each call of pytest (pytest-xdist).")
@click.option("--again", is_flag=True, help="Also what has a row already.")
def defects(only, jobs, tests, suite, results, limit, workers, again) -> None:
    """Plant each defect of the frozen list and run the tests that should see it."""
    chosen = [one for one in of_defects.frozen() if not only or one.name.startswith(tuple(only))]
    parallel = ("-n", str(workers), "--dist", "worksteal") if workers else ()
    options = of_defects.Options(jobs, tests, limit, again, parallel)
    table = of_defects.run(chosen, suite.resolve(), results, options)
    raise SystemExit(of_defects.summary(chosen, table))


@main.group()
def mutants() -> None:
    """Random mutants of the package, and which of them a suite kills."""


@mutants.command()
@click.option("--seed", default=59, show_default=True)
@click.option("--count", default=60, show_default=True)
@click.option("--reserve", default=120, show_default=True, help="So many more, for lines that no test touches.")
@click.option(
    "--contexts", multiple=True, type=TABLE, help="What `contexts` has written: of the old suite, of the new."
)
def choose(seed, count, reserve, contexts) -> None:
    """Choose mutants; once more with --contexts to leave out those whose lines no test touches."""
    drawn = draw(trees.HERE / "abft_tsm2", seed, count + reserve)
    table = of_mutants.write(drawn, count, [Contexts(path) for path in contexts])
    states = [row["state"] for row in table.rows.values()]
    print({state: states.count(state) for state in ("chosen", "not covered", "reserve")})


@mutants.command()
@click.option("--suite", type=CHECKOUT, default=trees.HERE, help="A checkout: its tests are run on its package.")
@click.option("--out", type=TABLE, required=True, help="The file that keeps what matters, NAME.json.gz.")
@click.option("--only", multiple=True, help="Only these folders or files of tests.")
@click.option("--workers", default=0, help="Processes (pytest-xdist).")
@click.option("--limit", default=7200.0, show_default=True, help="Seconds for each folder.")
@click.option("--again", is_flag=True, help="Also the folders that are done.")
def contexts(suite, out, only, workers, limit, again) -> None:
    """Run a suite under coverage, folder by folder: which tests touch the lines of the mutants."""
    kept, lines = Contexts(out), of_mutants.lines_of()
    for piece in only or pieces(suite.resolve()):
        if piece in kept.pieces and not again:
            continue
        found = measure(suite.resolve(), piece, lines, workers, limit)
        kept.put(piece, found)
        print(f"{piece}: {len(found['tests'])} tests touch files of mutants; pytest exited {found['exit']}", flush=True)
    print("branches taken, of all: {} of {}".format(*kept.branches(suite.resolve())))


@mutants.command()
@click.option("--suite", type=CHECKOUT, default=trees.HERE, help="A checkout: its package is mutated, its tests run.")
@click.option("--name", required=True, help="Of the results, e.g. old or new: results/mutants_NAME.csv.")
@click.option("--contexts", type=TABLE, required=True, help="What `contexts` has written of that suite.")
@click.option("--jobs", default=1, show_default=True, help="Copies of the checkout that are tested at a time.")
@click.option("--limit", default=1800.0, show_default=True, help="Seconds for each call of pytest.")
@click.option("--whole", is_flag=True, help="Run the survivors on the whole suite.")
@click.option("--workers", default=0, help="Processes of each run of the whole suite (pytest-xdist).")
@click.option("--only", multiple=True, help="Only the mutants of these numbers.")
@click.option("--again", is_flag=True, help="Also what has a row already.")
def run(suite, name, contexts, jobs, limit, whole, workers, only, again) -> None:
    """Run the tests that touch a mutant's lines on each of the chosen mutants."""
    options = of_mutants.Options(jobs, limit, again, whole, workers)
    of_mutants.run(suite.resolve(), name, Contexts(contexts), options, only)
    of_mutants.summary(name)


@mutants.command()
@click.argument("names", nargs=-1, required=True)
def summary(names) -> None:
    """How many of the chosen mutants each suite has killed."""
    for name in names:
        of_mutants.summary(name)


if __name__ == "__main__":
    main()
