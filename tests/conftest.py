"""What every test runs under: BLAS threads, Hypothesis' settings."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # One process a core already: more BLAS threads only wait for one another. Read by NumPy's first import.
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

from hypothesis import settings

# The same examples on every machine, and no deadline: a slow machine is not a fault.
# A longer, random search: make test ARGS="--hypothesis-profile=search"
settings.register_profile("default", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile("default")
