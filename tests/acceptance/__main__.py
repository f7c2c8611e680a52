"""Acceptance of the tests: `python -m tests.acceptance defects`, `... mutants choose | contexts | run | summary`."""

from __future__ import annotations

from pathlib import Path

import click

from tests.acceptance import defects as of_defects
from tests.acceptance import trees

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


if __name__ == "__main__":
    main()
