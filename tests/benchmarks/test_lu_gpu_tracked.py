"""How a benchmark queues steps, on the CPU: as a whole, one by one, and with verdicts read on the way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from abft_tsm2.linalg.device.queued import QueuedRun
from benchmarks import lu_gpu_contenders as contenders
from tests.support import lu_on_cpu
from tests.support.lu_on_cpu import on_card
from tests.support.planting import normal

STEPS = 4
WAYS = {
    "online": ["part 0", "end"],
    "parts": [*(f"part {k}" for k in range(STEPS + 1)), "end"],
    "read": [
        *("part 0", "part 1", "verdict 0", "part 2", "verdict 1", "part 3", "verdict 2", "verdict 3", "part 4", "end"),
    ],
}


@pytest.mark.parametrize("name", WAYS)
def test_how_steps_are_queued(name: str, monkeypatch: pytest.MonkeyPatch, build_cache: Path) -> None:
    lu_on_cpu.install(monkeypatch, build_cache)
    part, verdict, seen = QueuedRun.part, QueuedRun.verdict, list[str]()
    monkeypatch.setattr(QueuedRun, "part", lambda self, k: (seen.append(f"part {k}"), part(self, k)))
    monkeypatch.setattr(QueuedRun, "verdict", lambda self, k: (seen.append(f"verdict {k}"), verdict(self, k))[1])
    run = contenders.tracked(on_card(normal(128 * STEPS, 128 * STEPS, seed=1)))[name]
    with contenders.ended(SimpleNamespace(record=lambda: seen.append("end"))):
        run()
    assert seen == WAYS[name]
    run()
    assert seen.count("end") == 1  # and the verdicts are read again
    assert sum(one.startswith("verdict") for one in seen) == (2 * STEPS if name == "read" else 0)
