"""The cases of CuPy's arrays on a card, with the launches of each call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.regress import on_cupy
from benchmarks.regress.launches import Recorder, noting, recorded
from benchmarks.regress.lines import Case


def cases() -> Iterator[Case]:
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as missing:  # whatever a machine without a card or a driver raises
        yield Case(f"device: no CuPy or no card, {type(missing).__name__}", tuple, tuple)
        return
    yield from with_launches(on_card(cupy))


def on_card(cupy: object) -> Iterator[Case]:
    yield from on_cupy.products(cupy)
    yield from on_cupy.lu(cupy)
    yield from on_cupy.cholesky(cupy)
    yield from on_cupy.solutions(cupy.asarray)  # type: ignore[attr-defined]


def with_launches(some: Iterable[Case]) -> Iterator[Case]:
    """The same cases; below the line of each, a line for each kernel that its call has launched."""
    recorder = Recorder()
    with recorded(recorder) as found:
        if not found:
            yield Case("device: this version has no place where launches are recorded", tuple, tuple)
        for case in some:
            name = f"device {case.name}"

            def details(name: str = name) -> list[str]:
                return [f"{name} launch {i}: {line}" for i, line in enumerate(recorder.lines)]

            yield replace(case, name=name, call=noting(case.call, recorder), details=details)
