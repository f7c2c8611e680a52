"""Small campaigns that tests carry out, and what they read of their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from abft_tsm2.faults.campaign.file import parse
from abft_tsm2.faults.campaign.run import run

OWN = "tests.support.campaign_schemes"
SMALL = f"""seed = 3
[[suite]]
name = "products"
operation = "gemm"
trials = 64
per_scene = 8
shapes = [[12, 14, 10], [9, 16, 11]]
dtypes = ["float64", "float32"]
schemes = ["protected", "none", "double", "{OWN}:compares"]
[[suite.fault]]
model = "bit_flip"
[[suite.fault]]
model = "nan"

[[suite]]
name = "stored"
operation = "storage"
trials = 20
shapes = [[12, 14, 1]]
schemes = ["encoded", "crc"]
[[suite.fault]]
model = "bit_flip"
site = "stored"
"""
SLOW = f"""[[suite]]
name = "slow"
operation = "gemm"
trials = 200
per_scene = 15
shapes = [[12, 14, 10]]
schemes = ["{OWN}:slow"]
clean = 0.5
[[suite.fault]]
model = "scaled"
factor = 1.0
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "trials.jsonl").read_text(encoding="utf-8")
    assert not text or text.endswith("\n")
    return [json.loads(one, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for one in text.splitlines()]


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The lines in the order of their numbers, without times."""
    found = sorted(lines(folder), key=lambda one: one["trial"])
    return [{name: x for name, x in one.items() if name != "seconds"} for one in found]


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that was carried out in this process."""
    folder = tmp_path_factory.mktemp("campaigns") / "done"
    run(parse(SMALL), folder, jobs=0, command="abft-tsm2 campaign run small.toml")
    return folder
