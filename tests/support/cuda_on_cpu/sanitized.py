"""The process that runs kernels under AddressSanitizer: requests come in, arrays or exceptions go out.

``python -m tests.support.cuda_on_cpu.sanitized LIBRARY``, with libasan preloaded; see `library`.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from tests.support.cuda_on_cpu.library import KernelFault, execute, load


def main(path: Path) -> None:
    # What a kernel prints must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    loaded = load(path)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = execute(loaded, *request, guard=0)
        except (KernelFault, TypeError) as fault:
            answer = fault
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
