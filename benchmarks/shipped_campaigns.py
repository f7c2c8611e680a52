"""The campaigns that ship with the package: carried out, reported, and their results kept.

    python -m benchmarks.shipped_campaigns                          all of those that need no GPU
    python -m benchmarks.shipped_campaigns lu-full adversarial      these
    python -m benchmarks.shipped_campaigns gemm-gpu --device gpu
    python -m benchmarks.shipped_campaigns lu-gpu clean-lu-gpu --device gpu --jobs 15       judged by the host
    python -m benchmarks.shipped_campaigns adversarial --device gpu --label gpu
    OPENBLAS_CORETYPE=Haswell python -m benchmarks.shipped_campaigns clean-products --label haswell
    python -m benchmarks.shipped_campaigns routes clean-products --flush    subnormal numbers are zero: label "flushed"

Each runs in .benchmarks/NAME, where it goes on if it was interrupted. What is kept of a campaign that is finished are
its file, manifest and tables, in results/campaigns/NAME; its trials follow from the file. With a label these are
NAME.LABEL: the same file on another device, or with other kernels of BLAS, which the manifest names.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from abft_tsm2.__main__ import main as abft_tsm2
from abft_tsm2.faults.analysis import report
from benchmarks.sheet import RESULTS

CAMPAIGNS = Path(__file__).parent / "campaigns"
WORK = Path(".benchmarks")
KEPT = ("campaign.toml", "manifest.json", "summary.csv", "summary.json")
ON_GPU = ("gemm-gpu", "routes-gpu", "lu-gpu", "swaps-gpu", "clean-products-gpu", "clean-lu-gpu")


def names() -> list[str]:
    """The campaigns there are."""
    return sorted(path.stem for path in CAMPAIGNS.glob("*.toml"))


def command(*words: str) -> int:
    """A command of abft-tsm2, in this process; its exit code."""
    try:
        abft_tsm2(words)
    except SystemExit as done:
        return int(done.code or 0)


def keep(name: str) -> None:
    """Copy the results of a campaign that is finished."""
    to = RESULTS / "campaigns" / name
    to.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        shutil.copyfile(WORK / name / file, to / file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names())}; all that need no GPU")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--jobs", metavar="N", help="processes; without it, one for each core, 8 for a GPU")
    parser.add_argument("--label", default="", help="of the results: NAME.LABEL")
    parser.add_argument("--flush", action="store_true", help="with flush-to-zero and denormals-are-zero")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names()):
        parser.error(f"there is no campaign {', '.join(sorted(unknown))}: choose from {', '.join(names())}")
    broken = 0
    for name in options.names or [name for name in names() if name not in ON_GPU]:
        kept = ".".join(filter(None, (name, options.label, "flushed" * options.flush)))
        file, out = str(CAMPAIGNS / f"{name}.toml"), str(WORK / kept)
        more = ("--jobs", options.jobs) if options.jobs else ()
        more += ("--flush",) if options.flush else ()
        code = command("campaign", "run", file, "-o", out, "--resume", "--device", options.device, *more)
        if code > 1:  # an interrupt, or a file that cannot be used
            return code
        broken += code
        for form in ("csv", "json"):
            report.write(out, format=form)
        keep(kept)
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
