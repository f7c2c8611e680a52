"""The tables of campaigns, from results/campaigns/*/summary.json; see `benchmarks.tables`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from abft_tsm2.faults.stats import rate_text
from benchmarks.tables import RESULTS, markdown

ORDER = ("gemm-full", "gemm-gpu", "lu-full", "storage", "adversarial", "peers", "quick")


def summaries() -> dict[str, dict[str, Any]]:
    """What is known of each campaign that has been carried out."""
    found = {name: RESULTS / "campaigns" / name / "summary.json" for name in ORDER}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items() if path.exists()}


def campaigns() -> str:
    """Each campaign in a line: what became of the faults under schemes that protect."""
    counted = ("corrected", "detected", "masked", "below_bound", "cancelled")
    head = ("campaign", "faults", "silent corruption", "corrected", "refused", "masked", "below the bound", "cancelled")
    body = []
    for name, one in summaries().items():
        v, ran = one["verdict"], one["manifest"]
        silent, alarms = rate_text(v["sdc"], v["planted"]), rate_text(v["false_alarm"], v["clean_trials"])
        rate = f"{one['trials'] / ran['seconds']:.0f}" if ran["seconds"] else ""
        faults = (name, str(v["planted"]), _events(silent), *(str(v[key]) for key in counted))
        body.append((*faults, str(v["clean_trials"]), _events(alarms), rate))
    head = (*head, "clean trials", "false alarms", "trials / s")
    return f"{markdown(head, body)}\n{where(summaries().values())}\n"


def contest(suite: str) -> str:
    """The schemes of the peers campaign, side by side."""
    one = summaries()["peers"]
    head = (
        "scheme",
        "faults",
        "found",
        "harmless",
        "wrong and returned",
        "share",
        "clean trials",
        "false alarms",
        "time",
    )
    times = _times(one["cost"])
    body = [
        (
            row["scheme"],
            str(row["faults"]),
            str(row["found"]),
            str(row["harmless"]),
            str(row["escaped"]),
            f"{row['escaped_share']:.1%}",
            str(row["clean_trials"]),
            str(row["false_alarm"]),
            times.get(row["scheme"], ""),
        )
        for row in one["contest"]
        if row["suite"] == suite
    ]
    return f"{markdown(head, body)}\n{where([one])}\n"


def where(found: Iterable[Mapping[str, Any]]) -> str:
    """What they ran on."""
    lines = set()
    for one in found:
        ran, versions = one["manifest"], one["manifest"]["versions"]
        cupy = f", CuPy {versions['cupy']}" if "NVIDIA" in ran["device"] else ""
        libraries = f"NumPy {versions['numpy']}, SciPy {versions['scipy']}, Python {versions['python']}"
        lines.add(f"{ran['device']}{cupy}, {libraries}")
    return "; ".join(sorted(lines)) + "."


def _events(text: str) -> str:
    """A rate without the number of trials, which has a column of its own."""
    count, _, rest = text.partition(" of ")
    return f"{count} {rest.partition(' ')[2]}"


def _times(cost: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Of each scheme the time of the largest product, in multiples of that of the product alone."""
    rows = list(cost)
    largest = max((row["m"] * row["k"] * row["n"] for row in rows), default=0)
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["m"] * row["k"] * row["n"] == largest and row["times_none"] is not None:
            found.setdefault(row["scheme"], []).append(row["times_none"])
    return {scheme: " / ".join(f"{value:.1f} x" for value in values) for scheme, values in found.items()}


TABLES: Mapping[str, Callable[[], str]] = {
    "campaigns": campaigns,
    "peers-transient": partial(contest, "transient"),
    "peers-persistent": partial(contest, "persistent"),
}
