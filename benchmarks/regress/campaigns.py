"""The first trials of the campaigns that ship, a line each."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from abft_tsm2.__main__ import main as abft_tsm2
from benchmarks.regress.lines import without_prose

SHARES = {"quick": 1.0, "storage": 0.05, "adversarial": 0.1, "gemm-full": 0.01, "lu-full": 0.02, "peers": 0.01}
SHARES |= {"swaps": 0.01, "clean-products": 0.01}
LEAST = 20
"""Trials of a campaign that are carried out at least."""


def lines() -> Iterator[str]:
    for name, share in SHARES.items():
        yield from trials(name, share)


def trials(name: str, share: float) -> Iterator[str]:
    """Lines of a campaign, of which a share of the trials is carried out."""
    text = Path("benchmarks/campaigns", f"{name}.toml").read_text(encoding="utf-8")

    def fewer(found: re.Match[str]) -> str:
        return f"trials = {max(LEAST, round(int(found[1].replace('_', '')) * share))}"

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.toml")
        file.write_text(re.sub(r"trials = ([\d_]+)", fewer, text), encoding="utf-8")
        try:
            abft_tsm2(["campaign", "run", str(file), "-o", str(Path(folder, "out")), "--jobs", "2", "-q"])
        except SystemExit as done:
            yield f"{name}: exit {done.code}"
        found = Path(folder, "out", "trials.jsonl").read_text(encoding="utf-8").splitlines()
        for line in sorted(json.dumps(without_prose(json.loads(one)), sort_keys=True) for one in found):
            yield f"{name}: {line}"
