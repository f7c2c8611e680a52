"""The paper's performance model under its public path: see `abft_tsm2.core.paper.model`."""

from abft_tsm2.core.paper.model import *  # noqa: F403
