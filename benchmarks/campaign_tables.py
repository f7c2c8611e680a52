"""Tables of campaigns, from results/campaigns/*/summary.json, for `benchmarks.tables`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from abft_tsm2.faults.analysis.stats import rate_text
from benchmarks import sheet
from benchmarks.markup import csv_table

ORDER = (
    *(
        "gemm-full",
        "gemm-gpu",
        "routes",
        "routes-gpu",
        "lu-full",
        "lu-gpu",
        "storage",
        "adversarial",
        "swaps",
        "swaps-gpu",
    ),
    *("peers", "quick"),
    *("clean-products", "clean-products-gpu", "clean-factorisations", "clean-lu-gpu"),
)


def summaries() -> dict[str, dict[str, Any]]:
    """What is known of each campaign that has been carried out, by name or NAME.LABEL."""
    folders = [path for name in ORDER for kind in (name, f"{name}.*") for path in sorted(_kept().glob(kind))]
    found = {folder.name: folder / "summary.json" for folder in folders}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in found.items() if path.exists()}


def _kept() -> Path:
    return sheet.RESULTS / "campaigns"


def _with_faults(wanted: bool) -> dict[str, dict[str, Any]]:
    return {name: one for name, one in summaries().items() if bool(one["verdict"]["planted"]) == wanted}


def campaigns() -> str:
    """Each campaign in a line: what became of the faults under schemes that protect."""
    counted = ("corrected", "detected", "masked", "below_bound", "cancelled")
    head = ("campaign", "faults", "silent corruption", "corrected", "refused", "masked", "below the bound", "cancelled")
    body = []
    for name, one in _with_faults(True).items():
        v, ran = one["verdict"], one["manifest"]
        silent, alarms = rate_text(v["sdc"], v["planted"]), rate_text(v["false_alarm"], v["clean_trials"])
        rate = f"{one['trials'] / ran['seconds']:.0f}" if ran["seconds"] else ""
        faults = (name, str(v["planted"]), _events(silent), *(str(v[key]) for key in counted))
        body.append((*faults, str(v["clean_trials"]), _events(alarms), rate))
    head = (*head, "clean trials", "false alarms", "trials / s")
    return f"{csv_table(head, body)}\n{where(_with_faults(True).values())}\n"


def without_faults() -> str:
    """Each campaign that plants no fault in a line, with the kernels of BLAS that it ran on."""
    head = ("campaign", "BLAS", "clean trials", "false alarms", "other failures", "trials / s")
    body = []
    for name, one in _with_faults(False).items():
        v, ran = one["verdict"], one["manifest"]
        alarms, failures = rate_text(v["false_alarm"], v["clean_trials"]), v["sdc"] + v["crash"] + v["hang"]
        rate = f"{one['trials'] / ran['seconds']:.0f}" if ran["seconds"] else ""
        kernel = "" if "NVIDIA" in ran["device"] else str(ran["versions"].get("blas kernel") or "")
        body.append((name, kernel, str(v["clean_trials"]), _events(alarms), str(failures), rate))
    return f"{csv_table(head, body)}\n{where(_with_faults(False).values())}\n"


def cancellation() -> str:
    """What the default check hid of swaps and opposite changes, beside what random weights would."""
    head = ("campaign", "type", "fault", "faults", "cancelled", "expected", "standard deviation")
    body = [
        (
            name,
            row["dtype"] if row["scheme"] == "protected" else f"{row['dtype']} into {row['scheme']}",
            row["model"],
            str(row["faults"]),
            str(row["cancelled"]),
            f"{row['expected']:.2g}",
            f"{row['deviation']:.2g}",
        )
        for name, one in summaries().items()
        if name.startswith(("swaps", "adversarial"))
        for row in one.get("cancellation", [])
        if row["scheme"] == "float32" or row["scheme"] == "protected"
    ]
    return f"{csv_table(head, body)}\n"


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
    return f"{csv_table(head, body)}\n{where([one])}\n"


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
    "clean-campaigns": without_faults,
    "cancellation": cancellation,
    "peers-transient": partial(contest, "transient"),
    "peers-persistent": partial(contest, "persistent"),
}
