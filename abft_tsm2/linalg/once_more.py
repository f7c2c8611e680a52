"""Factor once more on a GPU where evidence finds factors right, and sums of all of their product do not.

An error that rounding might have made, but did not, does not come again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from abft_tsm2.arrays import same_bits
from abft_tsm2.linalg.outcome import Findings

if TYPE_CHECKING:
    from abft_tsm2.linalg.lu_on_device import LuOnDevice


def factored_once_more(run: LuOnDevice, mode: str) -> None:
    """Take the second factors if nothing is suspected of them, and they are those of the same matrix; else all is as it
    was, also where there is no memory for them. A hook's exceptions are raised.

    `run`: settled, its factors beside A.
    """
    kept, e, known = dict(vars(run)), run.encoding, run.findings
    if not known.suspicions:
        known.recomputed(None)
    run.findings = Findings()  # of factors that may not be taken
    taken = False
    try:
        with run.clock("factor"):
            again = run.queued(mode)
            again.wait()
            sums = again.encoding()
        taken = run.take(again) and same_bits(sums.S, e.S) and same_bits(sums.Z, e.Z)
    except MemoryError:
        if run.options.on_stage is not None:
            raise
    finally:
        found = run.findings
        if not taken:
            vars(run).update(kept)
    if taken:
        known.join(found)
        run.findings = known
