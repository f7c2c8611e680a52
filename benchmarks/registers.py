"""Registers and spills of the paper's kernels at its own parameters: ``python -m benchmarks.registers``, without a GPU.

Compiles with NVRTC (``pip install .[test]``) and writes results/registers.csv; docs/kernels.rst shows it. The column
``printed`` has what Tables 3 and 4 of the paper give for a V100 and n = 16.
"""

from __future__ import annotations

import argparse
import io
import re

from abft_tsm2.core.compiler import source
from abft_tsm2.core.paper.config import Config
from benchmarks import sheet

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Config and the printed number of registers: TSM2X, 2021, Tables 3 (V100) and 4.
PRINTED = (
    (Config("V3", "float32", 128, 16, 32), 144),
    (Config("V3", "float64", 128, 16, 16), 180),
    (Config("V3", "float64", 128, 16, 12), 168),
    (Config("Opt-1", "float32", 128, 16, 32), 144),
    (Config("Opt-1", "float64", 128, 16, 16), 180),
    (Config("Opt-1", "float64", 128, 16, 12), 168),
    (Config("Opt-2", "float32", 128, 16, 32), 251),
    (Config("Opt-2", "float64", 128, 16, 16), 254),
    (Config("Opt-2", "float64", 128, 16, 12), 252),
)


def compiled(text: str, architecture: str) -> tuple[bytes, str]:
    """Machine code, and what the assembler says about registers and spills; the options are those of CuPy."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(std="c++17", arch=architecture, ftz=True, ptxas_options="-v")
    code = Program(text, "c++", options).compile("cubin", logs=log).code
    return code, log.getvalue()


def resources(config: Config, architecture: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of them that are stored to memory for want of more."""
    log = compiled(source(config), architecture)[1]
    used, spilled = (re.search(p, log) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    if used is None or spilled is None:
        raise ValueError(f"the assembler did not say what {config.name} takes:\n{log}")
    return int(used[1]), int(spilled[1])


def row(config: Config, printed: int) -> dict[str, str | int]:
    """One line of the table: registers, and in brackets the bytes spilled, on each architecture."""
    cells = {}
    for architecture in ARCHITECTURES:
        registers, spilled = resources(config, architecture)
        cells[architecture] = f"{registers} ({spilled} bytes spilled)" if spilled else str(registers)
    sizes = {"t1": config.t1, "t2": config.t2, "t3": config.t3}
    return {"variant": config.variant, "dtype": config.dtype, **sizes, "printed": printed, **cells}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(sheet.write("registers", [row(*printed) for printed in PRINTED]))


if __name__ == "__main__":
    main()
