"""What a campaign needs of the machines that carry it out, asked before anything is run."""

from __future__ import annotations

from importlib.util import find_spec

from abft_tsm2.errors import NotSuitable
from abft_tsm2.faults.campaign.file import FACTORISATIONS, Campaign, Suite
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.operands.products import require_part
from abft_tsm2.io.atomic import short
from abft_tsm2.io.matrix import MatrixFileError, physical_memory
from abft_tsm2.io.versions import cores

JOBS_PER_CORE = 16


def require_machine(campaign: Campaign) -> None:
    """Ask whether this machine can carry out all suites.

    Raises
    ------
    CampaignFileError
        If a file is missing, or holds a smaller matrix than the shapes want, or a library; or if matrices of a shape do
        not fit into the memory.
    """
    for suite in campaign.suites:
        _require_libraries(suite)
        _require_memory(suite)
        _require_files(suite)


def require_jobs(jobs: int) -> None:
    """NotSuitable for more processes than do any good: each has the package in its memory, and matrices."""
    most = JOBS_PER_CORE * cores()
    if jobs > most:
        raise NotSuitable(
            f"{jobs} jobs are too many for {cores()} cores: say {most} at most, or nothing for one on each core"
        )


def _require_libraries(suite: Suite) -> None:
    if "bfloat16" in suite.dtypes and find_spec("ml_dtypes") is None:
        raise CampaignFileError(
            f"suite {suite.name}: bfloat16 needs the package ml_dtypes, which is not installed here: pip install "
            "ml_dtypes, or leave the type out"
        )


def _require_memory(suite: Suite) -> None:
    """What is judged is float64: so the matrices of one trial, which is the least that a process has."""
    one = suite.operation in (*FACTORISATIONS, "storage")
    for m, k, n in suite.shapes:
        needed, there = 8 * (m * k if one else m * k + k * n + m * n), physical_memory()
        if needed > there:
            raise CampaignFileError(
                f"suite {suite.name}: matrices of the shape {[m, k, n]} take {needed / 1e9:.1f} GB in float64, and "
                f"this machine has {there / 1e9:.1f} GB of memory: choose a smaller shape"
            )


def _require_files(suite: Suite) -> None:
    m, k, n = (max(sizes) for sizes in zip(*suite.shapes, strict=True))
    for A, B in suite.files:
        try:
            require_part(A, m, k)
            require_part(B, k, n)
        except (MatrixFileError, OSError) as error:
            raise CampaignFileError(f"suite {suite.name}: {short(error)}") from error
