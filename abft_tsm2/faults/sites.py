"""Where a fault may strike: a stage of a protected operation, one of its live arrays, and a part of that array.

The stages are those of ``on_stage``. A site of an operand has two moments, because a fault may be in the memory, where
it stays, or on the way to the arithmetic, where it is gone when somebody looks again.
"""

from __future__ import annotations

import numpy as np

from abft_tsm2.arrays import bit_pattern, namespace
from abft_tsm2.faults.factor_sites import FACTOR_SITES
from abft_tsm2.faults.models import plant
from abft_tsm2.faults.oracle import narrowed, widened
from abft_tsm2.faults.plan import Plan
from abft_tsm2.faults.site import Arrays, Generator, Site, whole


def _partial_sum(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """C_ij = S + sum_{l >= p} a_il b_lj, where S = sum_{l < p} a_il b_lj is what the fault has changed."""
    A, B, C = arrays["A"], arrays["B"], arrays["C"]
    k = A.shape[1]
    p = int(rng.integers(1, k + 1)) if k else 0
    i, j = (int(rng.integers(size)) for size in C.shape)
    kind = C.dtype if C.dtype.itemsize >= 4 else np.float32  # 16-bit products are added up in float32
    xp = namespace(C)
    a, b = widened(A[i : i + 1, :], xp).astype(kind), widened(B[:, j : j + 1], xp).astype(kind)
    partial, rest = a[:, :p] @ b[:p, :], a[:, p:] @ b[p:, :]
    bit = plant(partial, plan, rng)
    with np.errstate(all="ignore"):
        bit_pattern(C)[i : i + 1, j : j + 1] = narrowed((partial + rest).astype(np.float64), C)
    return bit


def _stored_sum(arrays: Arrays, plan: Plan, rng: Generator) -> int:
    """One bit of one integer checksum of a stored matrix."""
    sums = arrays[str(rng.choice(["rows", "columns"]))]
    at = np.unravel_index(int(rng.integers(sums.size)), sums.shape)
    sums[at] ^= np.uint64(1 << int(rng.integers(64)))
    return -1


SITES: dict[str, Site] = {
    "product": Site("C, between the product and its check", "multiplied", whole("C"), again="corrected"),
    "partial": Site(
        "a partial sum of one element of C, before all terms are added", "multiplied", whole("C"), change=_partial_sum
    ),
    "A": Site("the left operand, after it was encoded", "encoded", whole("A"), until="multiplied"),
    "B": Site("the right operand, after it was encoded", "encoded", whole("B"), until="multiplied"),
    "A.stored": Site("an encoded left operand, before the product begins", "inputs", whole("A"), until="multiplied"),
    "B.stored": Site("an encoded right operand, before the product begins", "inputs", whole("B"), until="multiplied"),
    "s": Site("the checksums of the operand that was encoded first", "encoded", whole("s")),
    "t": Site("what the checksums of C should be", "encoded", whole("t")),
    "u": Site("the checksums of C", "verified", whole("u")),
    "repaired": Site("C, after it was repaired", "corrected", whole("C")),
    "stored": Site("a matrix kept with its checksums", "stored", whole("A")),
    "stored.sums": Site("the checksums kept with a matrix: a bit of one", "stored", whole("A"), change=_stored_sum),
    **FACTOR_SITES,
}
"""Sites of products and stored matrices, and those of factorisations."""

FUNCTION_SITES = ("product", "partial", "A", "B", "A.stored", "B.stored")
"""Those of any function of A and B that returns their product."""

PRODUCT_SITES = (*FUNCTION_SITES, "s", "t", "u", "repaired")
"""Those of a protected product."""
