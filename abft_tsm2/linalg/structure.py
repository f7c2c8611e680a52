"""What of a matrix is read where its structure is known: SciPy's `assume_a`."""

from __future__ import annotations

from abft_tsm2.arrays import Array, namespace

GENERAL = (None, "gen", "general")


def structure_of(assume_a: str | None) -> str:
    """What of a matrix is read: "all", "mirrored" (one triangle, and the other one is the same), "upper", "lower",
    "diagonal" or "tridiagonal"."""
    known = {
        **dict.fromkeys((*GENERAL, "banded"), "all"),
        **dict.fromkeys(("sym", "symmetric", "her", "hermitian", "pos", "positive definite"), "mirrored"),
        "diagonal": "diagonal",
        "tridiagonal": "tridiagonal",
        "upper triangular": "upper",
        "lower triangular": "lower",
    }
    if assume_a not in known:
        raise ValueError(f"{assume_a} is not a recognized matrix structure")
    return known[assume_a]


def whole(A: Array, assume_a: str | None, lower: bool) -> Array:
    """All of A, from one of its triangles where the structure says that the other one is not to be read."""
    kind = structure_of(assume_a)
    if kind == "all":
        return A
    xp = namespace(A)
    if kind == "mirrored":
        half = xp.tril(A) if lower else xp.triu(A)
        other = xp.tril(A, k=-1) if lower else xp.triu(A, k=1)
        return half + xp.matrix_transpose(other)
    if kind == "diagonal":
        return xp.tril(xp.triu(A))
    if kind == "tridiagonal":
        return xp.tril(xp.triu(A, k=-1), k=1)
    return xp.triu(A) if kind == "upper" else xp.tril(A)
