"""Names of what workers, scheduler and clients tell and ask one another."""

from __future__ import annotations

REPORTS, FAULTS = "abft-tsm2-reports", "abft-tsm2"  # topics of events: of all reports, and of what was found wrong
FOUND = "abft_tsm2_found"  # annotation of a task: what its steps have found, in runs that came to no end

# What the scheduler is asked to do: release a block, so that it is made again; keep a task from a worker; forget what a
# task has found, because it was raised; retire hosts or devices.
RUN_AGAIN, ELSEWHERE = "abft_tsm2_run_again", "abft_tsm2_elsewhere"
RAISED, QUARANTINE = "abft_tsm2_raised", "abft_tsm2_quarantine"
