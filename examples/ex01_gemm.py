"""A protected product in place of ``A @ B``, and what its report tells."""

from __future__ import annotations

import numpy as np

import abft_tsm2 as ft

rng = np.random.default_rng(0)
A, B = rng.standard_normal((600, 400)), rng.standard_normal((400, 500))

C, report = ft.protected_gemm(A, B, return_report=True)
print(report)

# The result is what A @ B gives; the report says that it was checked, and how sharply.
assert np.allclose(C, A @ B, rtol=1e-12, atol=1e-12)
assert report.status is ft.Status.CLEAN
assert report.checks[0].verified == report.checks[0].lines  # every line of C

# How small a wrong element is sure to be found, beforehand, relative to the typical size of C.
limit = ft.detection_limit(600, 400, 500, "float64")
print(f"a change of {limit:.1e} of the typical element of C is sure to be found")
