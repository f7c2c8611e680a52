"""Tables of products of Dask arrays, from results/dask*.csv, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks.markup import csv_table, ratio
from benchmarks.sheet import Row, read

PLACES = {
    "product": "a bit of the product of two blocks",
    "memory": "a bit of each block in memory",
    "memory, four at once": "the same, four bits that sums do not locate",
    "wire": "a bit of a block on the wire",
    "wire, four at once": "the same, four bits that sums do not locate",
    "sums": "a bit of the sums that a block travels with",
    "file": "a bit of the file of a spilled block",
}


def latest(suite: str) -> list[Row]:
    """The last row of each kind of product of a suite."""
    found: dict[tuple[str, ...], Row] = {}
    for row in read("dask"):
        if row["suite"] == suite:
            found[tuple(row[key] for key in ("device", "dtype", "n", "workers", "threads", "cards"))] = row
    return list(found.values())


def times() -> str:
    """Seconds of products on clusters of processes, without protection and with it."""
    head = ("product", "workers x threads", "A @ B, s", "protected, s", "protected / A @ B", "target")
    rows = [*latest("products"), *latest("memory"), *latest("device")]
    body = [
        (
            f"{_on(row)}{row['dtype']} {row['n']} in blocks of {row['block']}",
            f"{row['workers']} x {row['threads']}",
            row["plain_s"],
            row["protected_s"],
            ratio(row["ratio"]),
            ratio(row["bar"]),
        )
        for row in rows
    ]
    return csv_table(head, body) + _footer(rows)


def _on(row: Row) -> str:
    gpus = "GPU, " if row["cards"] in ("", "1") else f"{row['cards']} GPUs, "
    return {"products": "CPU, ", "memory": "CPU, 1 GiB a worker, files, ", "device": gpus}[row["suite"]]


def faults() -> str:
    """What became of faults that were planted on a cluster."""
    found: dict[str, list[int]] = {}
    rows = read("dask_faults")
    for row in rows:
        counts = found.setdefault(row["place"], [0] * 4)
        for i, key in enumerate(("products", "planted", "raised", "silent")):
            counts[i] += int(row[key])
    body = [(PLACES[place], *map(str, counts)) for place, counts in found.items()]
    total = [sum(column) for column in zip(*found.values(), strict=True)]
    body.append(("all", *map(str, total)))
    return csv_table(("place", "products", "planted", "raised", "silent"), body) + _footer(rows[-1:])


def model() -> str:
    """The model's seconds beside those that were measured."""
    rows = [*read("dask_model"), *read("dask_model_gpus")]
    body = [
        (
            f"{'GPU' if row['cupy'] else 'CPU'}, {row['dtype']} {row['n']} in blocks of {row['block']}",
            row["workers"],
            row["way"],
            *(f"{float(row[key]):.3g}" for key in ("predicted_s", "measured_s")),
            ratio(row["ratio"]),
            *(f"{float(row[key]):.0f}" for key in ("predicted_received", "measured_received")),
        )
        for row in rows
        if row["predicted_s"]
    ]
    head = ("product", "workers", "graph", "model, s", "measured, s", "measured / model", "blocks received", "measured")
    return csv_table(head, body) + _footer(rows)


def _footer(rows: list[Row]) -> str:
    kinds = dict.fromkeys(
        f"{row['device']}, Dask {row['dask']}, NumPy {row['numpy']}" + (f", CuPy {cupy}" if cupy else "")
        for row in rows
        for cupy in [row.get("cupy")]
    )
    return f"\n{'; '.join(kinds)}.\n"


TABLES: Mapping[str, Callable[[], str]] = {"dask-times": times, "dask-faults": faults, "dask-model": model}
