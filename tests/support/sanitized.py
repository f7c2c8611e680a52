"""Programs that run under compute-sanitizer, which has to find what is planted into their kernels."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.core import compiler
from abft_tsm2.core.compiler import Kernel


class Plant(NamedTuple):
    """What is replaced in the kernels of a file, by what."""

    file: str
    text: str
    by: str


def put(plant: Plant) -> None:
    """Replace the text in what is compiled from now on."""
    source = compiler.source

    def with_plant(config: Kernel) -> str:
        text = source(config)
        if config.file != plant.file:
            return text
        assert plant.text in text, f"{plant.file} has no {plant.text!r}"
        return text.replace(plant.text, plant.by)

    compiler.source = with_plant


def main(
    text: str | None, plants: Mapping[str, Plant], run: Callable[[str | None], str], dtypes: Iterable[np.dtype[Any]]
) -> None:
    """The command line of a program with that description: runs it for one type or all of them."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", choices=sorted(plants))
    parser.add_argument("--dtype", choices=[dtype.name for dtype in dtypes], help="only this one")
    given = parser.parse_args()
    if given.plant is not None:
        put(plants[given.plant])
    print(run(given.dtype))
