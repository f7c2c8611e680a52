"""One line for each of many results: bits of arrays, statuses, reports without prose or times, trials of campaigns.

    python -m benchmarks.regress.same_bits > before.txt            and after a change that must change nothing:
    python -m benchmarks.regress.same_bits > after.txt
    diff -I '^#' before.txt after.txt
    python -m benchmarks.regress.same_bits --in OLD > before.txt   of the package in the folder of another version
    python -m tests.support.gate_on_cpu > before.txt               the same, and the route of CuPy on the CPU
    python -m benchmarks.regress.same_bits --only device           on a card, with the sequence of launches

Lines that begin with "#" are no results: they count the cases that reach each procedure of the package, by statuses and
kinds of repairs, and name stages of which no fault was noticed. The exit code is 1 where no case reaches a procedure or
a repair that is listed as required (`benchmarks.regress.reached`), else 0. Procedures that a version does not have are
called absent, and not required.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PARTS = ("products", "factorisations", "cupy", "dask")
QUICK = 16
"""With --quick one case of so many is carried out."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.regress.same_bits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--only", choices=(*PARTS, "device", "campaigns"), help="this part alone")
    text = "one case of N, chosen by its name; no campaigns, and nothing is required of the others"
    made.add_argument("--sample", type=int, default=1, metavar="N", help=text)
    made.add_argument("--quick", dest="sample", action="store_const", const=QUICK, help=f"--sample {QUICK}")
    made.add_argument("--no-campaigns", action="store_true", help="all parts but the campaigns, which take minutes")
    made.add_argument("--device", action="store_true", help="also a real CuPy, with the sequence of its launches")
    made.add_argument("--in", dest="folder", metavar="FOLDER", help="run the package of another checkout")
    text = "a procedure, and a kind of repair in it, that some case has to reach as well; may be repeated"
    made.add_argument("--require", metavar="PROCEDURE[:REPAIR]", action="append", default=[], help=text)
    return made


def parts_of(options: argparse.Namespace) -> list[str]:
    if options.only:
        return [options.only]
    return [
        *PARTS,
        *(["device"] if options.device else []),
        *([] if options.sample > 1 or options.no_campaigns else ["campaigns"]),
    ]


def is_chosen(name: str, sample: int) -> bool:
    return zlib.crc32(name.encode()) % sample == 0


def cases_of(part: str) -> Iterator[Any]:
    """The cases of a part; its module is imported here, when it is known whose package is run."""
    if part == "products":
        from benchmarks.regress import products as found
    elif part == "factorisations":
        from benchmarks.regress import factorisations as found  # type: ignore[no-redef]
    elif part == "cupy":
        from benchmarks.regress import on_cupy as found  # type: ignore[no-redef]
    elif part == "dask":
        from benchmarks.regress import on_dask as found  # type: ignore[no-redef]
    else:
        from benchmarks.regress import on_device as found  # type: ignore[no-redef]
    return found.cases()


def carried_out(part: str, reached: Any, sample: int) -> Iterator[str]:
    """The lines of a part."""
    from benchmarks.regress.lines import run

    for case in cases_of(part):
        if is_chosen(case.name, sample):
            with reached.watching():
                outcome = run(case)
            reached.count(case, outcome)
            yield outcome.line
            yield from case.details()


def print_all(options: argparse.Namespace, *, cupy: bool = False) -> int:
    """Print the lines of all parts that are asked for, and the counts; the exit code."""
    from benchmarks.regress.reached import REQUIRED, Reached

    reached = Reached()
    required = [tuple([*one.split(":"), ""][:2]) for one in options.require]
    for part in parts_of(options):
        if part == "cupy" and not cupy:
            print("# cupy is left out: python -m tests.support.gate_on_cpu runs it on the CPU")
            continue
        if part == "campaigns":
            from benchmarks.regress.campaigns import lines

            for line in lines():
                print(line, flush=True)
            continue
        for line in carried_out(part, reached, options.sample):
            print(line, flush=True)
        required += [] if options.sample > 1 else REQUIRED.get(part, ())
    for line in reached.lines(parts_of(options)):
        print(line)
    missing = [f"reached by no case: {one}" for one in reached.missing(required)]
    missing += [] if options.sample > 1 else [f"noticed in no case: a fault of {one}" for one in reached.unnoticed()]
    for one in missing:
        print(f"# required, and {one}")
    return 1 if missing else 0


def main(arguments: Sequence[str] | None = None, stand_ins: Any = None) -> int:
    """The command. `stand_ins`: of CuPy, where it is to run on the CPU."""
    options = parser().parse_args(arguments)
    folder = str(Path(options.folder or ".").resolve())
    os.chdir(folder)
    sys.path.insert(0, folder)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the same sums on every machine that has the same kernels
    try:
        if stand_ins is not None:
            from benchmarks.regress import on_cupy

            on_cupy.stand_ins = stand_ins
        return print_all(options, cupy=stand_ins is not None)
    except KeyboardInterrupt:
        print("# interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
