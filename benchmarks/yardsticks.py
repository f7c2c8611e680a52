"""Measure what the judge of campaigns compares with: bounds and promises in yardsticks, flipped bits below the bound.

python -m benchmarks.yardsticks [--trials N] [--device] prints the constants of `abft_tsm2.faults.judge.yardstick`
(`REACH`, `FACTOR_REACH`) and `abft_tsm2.faults.analysis.sharpness` (`MEASURED`), of this machine and BLAS.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.faults.campaign.file import parse
from abft_tsm2.faults.campaign.run import run
from abft_tsm2.faults.judge.product import Promise
from abft_tsm2.faults.operands.pairs import PAIRS
from abft_tsm2.faults.operands.products import FAMILIES
from abft_tsm2.faults.trials.trial import breach

SHAPES = [[48, 64, 56], [64, 64, 64], [128, 96, 100], [16, 4096, 16], [256, 256, 256], [400, 20, 1], [500, 8, 400]]
MATRICES = ["normal", "uniform", "graded", "positive definite", "condition 1e10", "sparse", "toeplitz", "dominant"]
SUITE = """
[[suite]]
name = "{name}"
operation = "{operation}"
trials = {trials}
per_scene = 16
clean = 0.0
shapes = {shapes}
dtypes = ["{dtype}"]
families = {families}
schemes = {schemes}
[[suite.fault]]
model = "bit_flip"
site = "{site}"
"""


def campaign(trials: int, factors: bool) -> str:
    """The text of the campaign: flips of any bit, of each type on its own."""
    families = [name for name in [*FAMILIES, *PAIRS] if name != "zeros"]
    text = "seed = 20261128\nname = 'yardsticks'\n"
    for dtype, scheme in [(x, "protected") for x in ("float64", "float32", "float16", "bfloat16")] + [
        (x, "float32") for x in ("float16", "bfloat16")
    ]:
        some = [name for name in families if dtype != "float16" or name != "graded"]  # which leaves its range
        names: Any = {"name": f"{dtype} {scheme}", "operation": "gemm", "dtype": dtype, "site": "product"}
        text += SUITE.format(**names, trials=trials, shapes=SHAPES, families=some, schemes=[scheme])
    orders = [[n] * 3 for n in (24, 64, 96, 200)]
    for operation, site, schemes in (
        (
            ("lu", "lu.factored", ["offline"]),
            ("lu", "lu.panel", ["online"]),
            ("cholesky", "cholesky.panel", ["protected"]),
            ("solve", "solve.backward", ["protected"]),
        )
        if factors
        else ()
    ):
        for dtype in ("float64", "float32"):
            names = {"name": f"{site} {dtype}", "operation": operation, "dtype": dtype, "site": site}
            text += SUITE.format(**names, trials=trials // 4, shapes=orders, families=MATRICES, schemes=schemes)
    return text


def main() -> None:
    """Measure and print."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--trials", type=int, default=2000, help="of each type")
    asked.add_argument("--device", action="store_true", help="products on a GPU")
    options = asked.parse_args()
    reach: dict[str, float] = defaultdict(float)
    made = Promise.__init__

    def noted(promise: Any, *arguments: Any) -> None:
        made(promise, *arguments)
        check, how = arguments[4], arguments[6]
        if check.limits is not None and np.isfinite(promise.reach):
            reach[how.sums] = max(reach[how.sums], promise.reach)

    Promise.__init__ = noted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        count = run(parse(campaign(options.trials, not options.device)), Path(folder), jobs=0, gpu=options.device)
        print(dict(count.outcomes))
        for text in (Path(folder) / "trials.jsonl").read_text().splitlines():
            if breach(line := json.loads(text)):
                print(line)
        print("REACH", dict(reach))
        for kind, found in count.sharpness.found().items():
            print(
                f"    {kind}: {found.bound:.3g}, {found.below:.3g}", {k: round(x, 1) for k, x in found.families.items()}
            )


if __name__ == "__main__":
    main()
