"""Which kernel factors a panel on a GPU, and how it is launched: kernels/factor/panel.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from abft_tsm2.core.problem import C_TYPES, SIZES
from abft_tsm2.linalg.device.schedule import PANEL

# Rows a lane, tiles a strip, and up to how many rows of a panel: what was fastest on an H200. More rows a lane leave
# less room for a strip in registers; the limits are those of 8 warps a block, beyond which registers spill.
_SHAPES = {
    "float64": ((4, 4, 4096), (8, 4, 8192), (16, 1, 16384)),
    "float32": ((4, 4, 4096), (8, 4, 8192), (16, 2, 16384), (32, 1, 32768)),
}


@dataclass(frozen=True)
class PanelConfig:
    """Compile-time constants of kernels/factor/panel.cu: the type of W, and how a warp holds its part of a strip.

    Attributes
    ----------
    dtype : {"float64", "float32"}
    rows_a_lane : int
        Rows of a strip that a quad of lanes holds; a warp has 8 times as many.
    tiles : int
        Tiles of 8 columns in a strip.
    warps_most : int
        Of a block.
    """

    file: ClassVar[str] = "factor/panel.cu"
    cluster: ClassVar[int] = 16
    """Blocks, which are one cluster."""

    dtype: str
    rows_a_lane: int
    tiles: int
    warps_most: int = 8

    @classmethod
    def of(cls, dtype: str, m: int) -> PanelConfig | None:
        """The kernel for panels of m rows; none where a cluster does not hold them."""
        for rows_a_lane, tiles, most in _SHAPES[dtype]:
            if m <= most:
                return cls(dtype, rows_a_lane, tiles)
        return None

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        return f"panel_{self.dtype}_{self.rows_a_lane}_{self.tiles}_{self.warps_most}"

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        sizes = {"ROWS_A_LANE": self.rows_a_lane, "TILES": self.tiles, "WARPS_MOST": self.warps_most}
        return {"REAL": C_TYPES[self.dtype], "WIDTH": SIZES[self.dtype], **sizes}

    @property
    def grid(self) -> int:
        """Blocks of a launch."""
        return self.cluster

    def threads(self, m: int) -> int:
        """Of a block, for a panel of m rows. Messages take at least 4 warps."""
        rows = self.cluster * 8 * self.rows_a_lane  # of a cluster, by a warp of each block
        warps = max(4, -(-m // rows))
        if warps > self.warps_most:
            raise ValueError(f"{self.name} takes panels of up to {rows * self.warps_most} rows, not {m}")
        return 32 * warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the layout of kernels/factor/panel_state.cuh."""
        size = SIZES[self.dtype]
        vectors = 8 * size // 16  # of a row of a tile
        message, strip = 1 + vectors, 8 * self.tiles
        exchanged = 2 * self.cluster * message + 2 * 16 * message + 2 * 16 + 2 * self.tiles * vectors
        buffer = 8 * (8 * self.rows_a_lane if self.tiles > 1 else 64)
        elements = PANEL * PANEL + PANEL * (strip + 4) + self.tiles * 8 * strip + self.warps_most * buffer
        return 16 * exchanged + size * elements + 2 * 4 * PANEL + 8 * (2 + self.tiles)
