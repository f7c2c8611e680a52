"""Fixed weights: encoded once, used in many products, and guarded while they lie in memory."""

from __future__ import annotations

import numpy as np

import abft_tsm2 as ft

rng = np.random.default_rng(0)
W = rng.standard_normal((400, 300)).astype(np.float32)
original = W.copy()

# repair=True allows E to write into W; otherwise a product uses a repaired copy and says so.
E = ft.encode(W, repair=True)

for batch in range(3):
    x = rng.standard_normal((200, 400)).astype(np.float32)
    y, report = ft.protected_gemm(x, E, return_report=True)
    assert report.status is ft.Status.CLEAN
    print(f"batch {batch}: {report.status.value}")

# The lowest bit of one weight flips in memory: far below what a product could notice.
W.view(np.uint32)[17, 42] ^= np.uint32(1)

found = E.verify()
print(found)
assert not found.ok
assert (found.faults[0].rows, found.faults[0].columns) == ((17,), (42,))

print(E.correct())
assert E.verify().ok
assert np.array_equal(W.view(np.uint32), original.view(np.uint32))  # bit for bit
