"""A product on two worker processes, of which one computes wrongly: who it was, and a picture of who did what.

python examples/ex05_cluster.py tasks.png          without a name: into the folder for temporary files
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, get_worker

import abft_tsm2 as ft
from abft_tsm2.interop.dask import protected_gemm

COLOURS = {"read": "#7f9f3f", "product": "#1f4e79", "c": "#8064a2", "transfer": "#c8590b"}


def a_bad_core(stage: str, arrays: Mapping[str, Any]) -> None:
    """Corrupt an element of every product that worker 1 computes."""
    if stage == "multiplied" and get_worker().name == 1:
        arrays["C"][12, 34] += 1.0


def main(picture: Path) -> None:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        rng = da.random.default_rng(0)
        A, B = dask.persist(rng.standard_normal((768, 768), chunks=256), rng.standard_normal((768, 768), chunks=256))
        client.get_task_stream()  # records from now on
        with ft.monitor() as log:
            C, report = dask.compute(*protected_gemm(A, B, on_stage=a_bad_core, return_report=True))
        tasks = client.get_task_stream()

        print(report.headline)
        print(log)
        for address, found in report.by_worker().items():
            print(f"{address} on {found['host']}: {found['faulty']} of {found['tasks']} products were wrong")

        # Every wrong block was repaired before another task read it, and all of them came from one worker.
        assert np.allclose(C, A.compute() @ B.compute(), rtol=0, atol=1e-10)
        assert report.status is ft.Status.CORRECTED
        assert log.counts[ft.Status.CORRECTED] > 0
        assert len({fault.worker for one in log for fault in one.faults}) == 1

    if draw(tasks, report, picture):
        print(f"picture: {picture}")


def draw(tasks: Sequence[Mapping[str, Any]], report: ft.Report, picture: Path) -> bool:
    """A line for each worker and a bar for each task, products with a fault marked; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    faulty = {(one.worker, one.index) for one in report.products if one.faults}
    workers = sorted({task["worker"] for task in tasks})
    begun = min(part["start"] for task in tasks for part in task["startstops"])
    figure, axis = pyplot.subplots(figsize=(9, 2.5))
    for task in tasks:
        name, *index = task["key"] if isinstance(task["key"], tuple) else (task["key"],)
        kind = next((kind for kind in COLOURS if name.startswith(kind)), "c")
        line = workers.index(task["worker"])
        for part in task["startstops"]:
            colour = COLOURS.get(part["action"], COLOURS[kind])
            axis.barh(line, part["stop"] - part["start"], left=part["start"] - begun, color=colour, edgecolor="white")
        if (task["worker"], tuple(index)) in faulty and kind == "product":
            axis.plot(task["startstops"][-1]["stop"] - begun, line, "x", color="red", markersize=8)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axis.legend(handles, ["read", "multiply and check", "return", "receive"], ncols=4, loc="upper center", fontsize=8)
    axis.set_yticks(range(len(workers)), [f"worker {number}" for number in range(len(workers))])
    axis.set_ylim(-0.6, len(workers))
    axis.set_xlabel("seconds; a cross: a fault was found and repaired")
    figure.tight_layout()
    figure.savefig(picture)
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "picture", nargs="?", type=Path, default=Path(tempfile.gettempdir()) / "abft_tsm2_tasks.png", help="to write"
    )
    main(parser.parse_args().picture)
