"""Small campaigns with known counts, written as a campaign writes them, for the tests of summaries and reports."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from abft_tsm2.faults.analysis.summary import Summary

CAMPAIGN = """name = "made up"
seed = 7

[[suite]]
name = "bits"

[[suite]]
name = "a storm"
"""

WIDTHS = {"float32": (32, 23), "float64": (64, 52)}
SCHEMES = ("protected", "both", "none", "double", "rtol")


def trial(number: int, **changes: Any) -> dict[str, Any]:
    """A trial with a fault that was found and repaired, but for the changes."""
    return {
        "trial": number,
        "suite": "bits",
        "scene": number // 8,
        "operation": "gemm",
        "scheme": "protected",
        "m": 256,
        "k": 512,
        "n": 128,
        "dtype": "float32",
        "family": "normal",
        "order": "C",
        "model": "bit_flip",
        "site": "product",
        "bits": "any",
        "bit": 30,
        "persistent": False,
        "single": True,
        "outcome": "corrected",
        "status": "CORRECTED",
        "located": "exact",
        "size": 1e6,
        "relative": 2.0,
        "limit": 1e-5,
        "chance": None,
        "closest": None,
        "seconds": 0.002,
        "note": "",
    } | changes


def clean(number: int, **changes: Any) -> dict[str, Any]:
    """A trial without a fault."""
    nothing = {
        "model": "",
        "site": "",
        "bits": "",
        "bit": -1,
        "single": False,
        "outcome": "clean",
        "status": "CLEAN",
        "located": "",
    }
    return trial(number, **nothing, size=None, relative=None, limit=None, closest=0.25) | changes


def folder(path: Path, records: Iterable[dict[str, Any]], *, campaign: str = CAMPAIGN, **manifest: Any) -> Path:
    """Write a campaign's folder; all its trials are planned, but for the manifest's changes."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one) for one in records]
    (path / "trials.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (path / "campaign.toml").write_text(campaign, encoding="utf-8")
    known = {
        "schema": "abft_tsm2/campaign/1",
        "name": "made up",
        "seed": 7,
        "trials": len(lines),
        "device": "a processor with 2 cores",
        "versions": {"abft_tsm2": "1.0", "numpy": "2.4.6", "cupy": None},
        "started": "2030-01-02T03:04:05",
        "finished": "2030-01-02T03:09:05",
        "seconds": 300.0,
        "command": "abft-tsm2 campaign run campaign.toml",
        "jobs": 2,
    }
    (path / "manifest.json").write_text(json.dumps(known | manifest), encoding="utf-8")
    return path


def lifelike(trials: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Trials that look like a real campaign's: every site, outcome and scheme, sizes that follow the bit."""
    rng = random.Random(seed)
    for number in range(trials):
        scheme, dtype = SCHEMES[number % len(SCHEMES)], rng.choice(list(WIDTHS))
        k = rng.choice([256, 1024, 4096])
        common = {
            "scheme": scheme,
            "dtype": dtype,
            "m": k,
            "k": k,
            "n": k,
            "seconds": 1e-8 * k**2 * rng.uniform(1, 1.3),
        }
        common["seconds"] *= {"none": 1, "protected": 1.15, "both": 1.3, "double": 2.05, "rtol": 1.1}[scheme]
        if number % 4 == 0:
            alarm = scheme == "rtol" and rng.random() < 0.03
            closest = None if scheme in ("none", "double") else rng.betavariate(2, 9)
            yield clean(number, closest=closest, outcome="false_alarm" if alarm else "clean", **common)
            continue
        yield _faulty(number, rng, common)


def _faulty(number: int, rng: random.Random, common: dict[str, Any]) -> dict[str, Any]:
    scheme, dtype = common["scheme"], common["dtype"]
    bits, mantissa = WIDTHS[dtype]
    bit = rng.randrange(bits)
    relative = math.ldexp(rng.uniform(0.5, 2), bit - mantissa) if bit < mantissa else rng.choice([0.5, 4.0, 1e9])
    limit = 2e-6 if dtype == "float32" else 4e-15
    size = relative / limit
    site = rng.choices(["product", "operand_a", "checksum"], [8, 1, 1])[0]
    model = "bit_flip" if number % 3 else rng.choice(["random_value", "row", "opposite"])
    persistent = number % 11 == 0
    rounding = 0.02 * limit
    outcome, located = "sdc", ""
    if relative < rounding:
        outcome = "masked"
    elif model == "opposite" and scheme != "double" and rng.random() < 0.05:
        outcome, size = "cancelled", 0.01
    elif scheme in ("protected", "both"):
        if size > 1 or rng.random() < size**2:
            outcome, located = ("detected" if persistent else "corrected"), rng.choices(["exact", "covered"], [9, 1])[0]
        else:
            outcome = "below_bound"
    elif scheme == "double" or (scheme == "rtol" and relative > 1e-3):
        outcome = "detected"
    elif size <= 1:
        outcome = "below_bound"
    flips = model == "bit_flip"
    return trial(
        number,
        suite="bits" if flips else "a storm",
        site=site,
        model=model,
        bits="any" if flips else "",
        bit=bit if flips else -1,
        persistent=persistent,
        outcome=outcome,
        status={"corrected": "CORRECTED", "detected": "UNCORRECTABLE"}.get(outcome, "CLEAN"),
        located=located,
        size="Infinity" if relative > 1e8 and size > 1 else size,
        relative=relative,
        limit=limit,
        **common,
    )


def read(path: Path, records: list[dict[str, Any]], **options: Any) -> Summary:
    return Summary.read(folder(path, records, **options))


def numbered(*trials: dict[str, Any]) -> list[dict[str, Any]]:
    return [one | {"trial": number} for number, one in enumerate(trials)]
