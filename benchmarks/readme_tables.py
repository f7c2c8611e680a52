"""The README's table: a dozen rows that decide, losing ones among them, for `benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks import calls_grid, calls_tables, cpu_tables, gemm_tables, lu_gpu_tables, lu_tables
from benchmarks.gemm_grid import ENCODED, ONE
from benchmarks.markup import gpu, markdown, number
from benchmarks.sheet import Row, read

CPU = (
    *("float64 256 x 256 x 256", "float64 4096 x 4096 x 4096"),
    *("float32 256 x 256 x 256", "float32 4096 x 4096 x 4096"),
)
LU = "float32 512 x 512, by columns", "float64 4096 x 4096, by columns"
GPU = (
    *("float64 2048 x 2048 x 2048", "float32 512 x 512 x 512", "float32 4096 x 4096 x 4096"),
    *("float16 1024 x 1024 x 1024", "float16 8192 x 8192 x 8192"),
)
LOOPS = {
    "CPU": ("numpy", ("float64 256 x 256 x 256", "float32 256 x 256 x 256")),
    "GPU": ("cupy", ("float32 512 x 512 x 512", "float16 1024 x 1024 x 1024")),
}
"""Small products, which are shown as calls in a loop where these were measured."""

GPU_LU = "float64 512 x 512, by columns", "float64 8192 x 8192, by columns"


def summary() -> str:
    """Time beside the unprotected call: products and factorisations, on a CPU and on a GPU."""
    products = {f"{row['dtype']} {row['m']} x {row['k']} x {row['n']}": row for row in read("overhead")}
    loops, of_loops = _loops()
    body = [
        loops.get(("CPU", name))
        or ("CPU, A @ B", name, number(row["plain_ms"]), _added(row["overhead"]), _added(row["overhead_encoded"]))
        for name, row in ((name, products[name]) for name in CPU)
    ]
    factored = {lu_tables.name(row): row for row in lu_tables.latest("factor")}
    body += [
        ("CPU, lu_factor", name, number(row["scipy_ms"]), _added(float(row["auto"]) - 1), "")
        for name, row in ((name, factored[name]) for name in LU)
    ]
    on_card = {name: rows for suite in ("square", "skinny") for name, rows in gemm_tables.products(suite)}
    for name in GPU:
        rows = on_card[name]
        plain = number(float(next(iter(rows.values()))["plain_us"]) / 1000)
        on_its_own = ("GPU, A @ B", name, plain, *(_percent(rows.get(variant)) for variant in (ONE, ENCODED)))
        body.append(loops.get(("GPU", name)) or on_its_own)
    on_gpu = gpu(*(row for name in GPU for row in on_card[name].values()))
    factored_there = {lu_gpu_tables.name(row): row for row in lu_gpu_tables.latest("factor")}
    for name in GPU_LU:
        plain, own = (float(factored_there[name][f"{call}_call_ms"]) for call in ("cupy", "online"))
        body.append(("GPU, lu_factor", name, number(plain), _added(own / plain - 1), ""))
    on_gpu += f"; lu_factor: {gpu(*(factored_there[name] for name in GPU_LU))}"
    on_cpu = f"{cpu_tables.where(products[CPU[0]])}; lu_factor: {lu_tables.where(factored[LU[0]])}"
    head = ("operation", "operands", "unprotected, ms", "protected", "B encoded beforehand")
    return f"{markdown(head, body)}\nMedians of interleaved runs; {on_cpu}; {on_gpu}{of_loops}.\n"


def _loops() -> tuple[dict[tuple[str, str], tuple[str, ...]], str]:
    """The lines of calls in a loop that were measured, by machine and product, and on what they were."""
    found, where = {}, ""
    for machine, (library, names) in LOOPS.items():
        for name, rows in calls_tables.products(library).items() if calls_tables.there(library) else ():
            first = rows.get(calls_grid.EAGER[library])
            if name in names and first and first["overhead_pct"] and not first["error"]:
                beside = number(float(first["plain_us"]) / 1000)
                shown = (
                    calls_tables.overhead(rows.get(variant, {})) for variant in (first["variant"], calls_grid.ENCODED)
                )
                found[machine, name] = (f"{machine}, loop of A @ B", name, beside, *shown)
                last = first
        if any(of == machine for of, _ in found):
            where += f"; loops of 200 calls on the {machine}: {calls_tables.where(library, last)}"
    return found, where


def _added(share: str | float) -> str:
    return f"{float(share):+.1%}"


def _percent(row: Row | None) -> str:
    return f"{float(row['overhead_pct']):+.1f}%" if row else "not measured"


TABLES: Mapping[str, Callable[[], str]] = {"summary": summary}
