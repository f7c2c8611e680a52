"""What is asked of a product: shapes, types and layouts (`Problem`), and the names of types in kernels/."""

from __future__ import annotations

from dataclasses import dataclass

from abft_tsm2.arrays import type_name

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element
C_TYPES = {"float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16"}  # in kernels/


@dataclass(frozen=True)
class Problem:
    """C = alpha A B + beta C.

    Attributes
    ----------
    m, k, n : int
        A is m x k, B is k x n.
    dtype : str
        Of A. This and the other types may be given as anything that NumPy takes as a dtype.
    order : str
        Of A: ``"F"`` where columns are contiguous (any leading dimension), ``"C"`` where rows are, ``"A"`` for neither.
    weights, out : str
        Types of B and of C; that of A unless given.
    batch : int
        Products of this shape.
    width : int
        The bytes, at most 16, of which A's address and strides are multiples.
    out_order : str
        Of C, as `order`.
    b_order : str
        ``"F"`` where the columns of B are contiguous and begin at multiples of 16 bytes, else ``"C"``.
    small : pair of pairs of int
        How TSM2L takes A, and C: order and bytes of a load or store, as `abft_tsm2.core.kernels.Stream` has them.
    """

    m: int
    k: int
    n: int
    dtype: str
    order: str = "F"
    weights: str = ""
    out: str = ""
    batch: int = 1
    width: int = 16
    out_order: str = "C"
    b_order: str = "C"
    small: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", type_name(self.dtype))
        if not self.small:
            a, c = (0 if order == "F" else 1 for order in (self.order, self.out_order))
            object.__setattr__(self, "small", ((a, self.width), (c, 16)))
        for name in ("weights", "out"):
            given = getattr(self, name)
            object.__setattr__(self, name, self.dtype if isinstance(given, str) and not given else type_name(given))

    @property
    def sums(self) -> str:
        """The type in which products are added: float64 where one of the operands is, else float32."""
        return "float64" if "float64" in (self.dtype, self.weights, self.out) else "float32"


def fitting(values: tuple[int, ...], needed: int) -> int:
    """The first of ascending values that is no less than `needed`, or the last."""
    return next((value for value in values if value >= needed), values[-1])
