"""The kernels for today's GPUs: which there are, with which constants, and how they are launched.

They read A once, at the rate of the memory: 16 bytes a load, several loads of a thread under way, k divided among so
many blocks that every multiprocessor is busy, the parts added in a fixed order. `form` says how: "columns" and "rows",
by how A lies, "staged", rows that go through shared memory, and "tensor", on tensor cores, are TSM2R
(kernels/tsm2/tsm2r_columns.cu and so on); "small" is TSM2L with few rows of B (kernels/tsm2/tsm2l_stream.cu). The
constants keep the paper's names where they mean what the paper's do (C. Rivera et al., TSM2X, 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from abft_tsm2.core.device import Device
from abft_tsm2.core.problem import C_TYPES, SIZES, Problem, fitting
from abft_tsm2.core.tuned import (
    AT_ONCE,
    BEST,
    CACHED,
    FEW_COLUMNS,
    FEW_ROWS,
    ONE_WAVE,
    STAGED,
    TENSOR,
    TENSOR_LARGE,
    Shape,
    shape_of,
)

TURNING = ("columns", "tensor")  # forms that may read B along its columns
FORMS = ("columns", "rows", "staged", "tensor", "small")
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # t2 of TSM2R; a product with fewer columns takes the next larger one
SMALL = 32  # rows and columns of B with which TSM2L keeps all of B at hand
_SHARED = 48 * 1024  # static shared memory of a block
_SUMS = 512  # bytes of a vector of A with all its columns of C: more do not fit the registers
_GRID = 65535  # blocks along y and z


@dataclass(frozen=True)
class Stream:
    """One kernel: a form, the types of its operands, how wide it loads, and its shape.

    Attributes
    ----------
    form : str
        One of `FORMS`.
    dtype, weights, sums, out : str
        Types of A, of B, of products and sums, and of C.
    width : int
        Bytes of A in one load: 16, or what its address and strides are multiples of.
    t2 : int
        Columns of C.
    shape : Shape
    order : int
        Of A: 0 where columns are contiguous, 1 where rows are ("tensor"), and where they have no gap ("small"); 2 for
        rows with gaps and for any strides ("small").
    k : int
        Rows of B ("small"); else 0.
    out_order, out_width : int
        Of C, as `order` and `width` ("small"); else 0.
    turned : bool
        Whether B is read along its columns, 16 bytes at a time ("columns" and "tensor").
    """

    form: str
    dtype: str
    weights: str
    sums: str
    out: str
    width: int
    t2: int
    shape: Shape
    order: int = 0
    k: int = 0
    out_order: int = 0
    out_width: int = 0
    turned: bool = False

    @property
    def file(self) -> str:
        """The file of kernels/ that holds the form."""
        return "tsm2/tsm2l_stream.cu" if self.form == "small" else f"tsm2/tsm2r_{self.form}.cu"

    @property
    def name(self) -> str:
        """Name of the compiled kernel."""
        types = "_".join(f"{letter}{_short(getattr(self, field))}" for letter, field in _TYPES.items())
        shape = self.shape
        tail = "" if shape.leaves_first else "_kept"
        tail += f"_order_{self.order}" if self.form in ("tensor", "small") else ""
        tail += "_turned" if self.turned else ""
        if self.form == "small":
            tail += f"_k_{self.k}_c_{self.out_order}_w{self.out_width}"
        return (
            f"{self.form}_{types}_w{self.width}_t1_{shape.t1}_t2_{self.t2}_t3_{shape.t3}_tcf_{shape.tcf}"
            f"_p{shape.pairs}_b{shape.blocks}{tail}"
        )

    @property
    def macros(self) -> dict[str, str | int]:
        """The constants that the file asks for."""
        shape = self.shape
        types = {name: C_TYPES[getattr(self, field)] for name, field in _MACROS.items()}
        sizes = {"WIDTH": self.width, "T1": shape.t1, "T2": self.t2, "TCF": shape.tcf, "BLOCKS": shape.blocks}
        sizes["LEAVES_FIRST"] = int(shape.leaves_first)
        if self.form == "small":
            orders = {"A_ORDER": self.order, "C_ORDER": self.out_order, "C_WIDTH": self.out_width}
            return {**types, **sizes, "T3": self.k, "GROUP": shape.t3, **orders}
        steps = {"T3": shape.t3, "PAIRS": shape.pairs}
        if self.form in TURNING:
            steps["TURNED"] = int(self.turned)
        if self.form == "tensor":  # its vectors are what the tensor cores take
            steps |= {"WIDTH": 16, "ALIGNED": self.width, "ORDER": self.order, "SIZE": SIZES[self.dtype]}
        return {**types, **sizes, **steps}

    @property
    def vector(self) -> int:
        """Elements of A in one load."""
        return self.width // SIZES[self.dtype]

    @property
    def run(self) -> int:
        """Rows of a thread that lie side by side ("small")."""
        if self.order == 0:
            return self.vector
        return self.out_width // SIZES[self.out] if self.out_order == 0 else 1

    @property
    def tile(self) -> int:
        """Rows of C of a block."""
        shape, warps = self.shape, self.shape.t1 // 32
        if self.form == "small":
            return shape.tcf * shape.t1 * self.run
        rows = {"rows": warps, "staged": shape.t1, "columns": 32 * self.vector, "tensor": 16 * warps}
        return shape.tcf * rows[self.form]

    @property
    def step(self) -> int:
        """Elements of k that a block multiplies at a time: slices of k are multiples of it."""
        if self.form in ("columns", "staged"):
            return self.shape.t3 * (self.vector if self.form == "staged" else self.shape.t1 // 32)
        depth = 32 * self.vector if self.form == "rows" else 16 if self.dtype == "float64" else 32
        return depth * self.shape.t3

    @property
    def sums_per_thread(self) -> int:
        """What a thread leaves behind of a part of k, as the kernels count it."""
        count = self.shape.tcf * self.t2
        if self.form == "rows":
            return -(-count // 32)
        if self.form in ("tensor", "staged"):
            return count // 2 if self.form == "tensor" else count
        return -(-count * self.vector // (self.shape.t1 // 32))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: of TSM2R two stages of B, and what the warps exchange; of TSM2L B and the tiles."""
        if self.form == "small":
            b = self.k * (-(-self.t2 // self.shape.t3) * self.shape.t3) * SIZES[self.sums]
            tiles = (self.order, SIZES[self.dtype], self.k), (self.out_order, SIZES[self.sums], self.t2)
            return b + self.shape.t1 // 32 * max(self._tile_bytes(*tile) for tile in tiles)
        size, shape, warps = SIZES[self.sums], self.shape, self.shape.t1 // 32
        unit, steps = 16 // size, max(1, 2 * shape.pairs)
        if self.form == "tensor":
            stage = self.step * steps
            rows = stage * (self.t2 + (0 if size < 8 else 2 if self.order else 4))
            turned = self.t2 * (stage + (32 if size < 8 else 8 if self.order else 4))
            return 2 * max(rows, turned) * SIZES[self.dtype] + 4
        if self.form == "staged":
            pitch = (-(-self.t2 // unit) | 1) * 16
            return shape.pairs * (self.tile * shape.t3 * 16 + self.step * pitch) + 4
        if self.form == "rows":
            units = -(-self.vector * self.t2 // unit)
            return 2 * (32 * shape.t3 * steps) * (units + 1 - units % 2) * 16 + 4
        quads = -(-self.t2 // 4)
        line = -(-self.t2 // unit) * unit if quads < 2 else (quads + 1 - quads % 2) * 4
        return (2 * (self.step * steps) * line + warps * shape.t1) * size + 4

    def _tile_bytes(self, order: int, size: int, columns: int) -> int:
        """What the rows of a warp take in shared memory, with the gaps that spread them over the banks."""
        if order == 0:
            return 16
        row = self.run * columns * size
        elements = self.tile // (self.shape.t1 // 32) * columns
        gaps = 0 if columns * size % 16 else elements // (self.run * columns * (8 // math.gcd(row // 16, 8)))
        return -(-(elements * size + gaps * 16) // 16) * 16


_TYPES = {"a": "dtype", "b": "weights", "s": "sums", "c": "out"}
_MACROS = {"A_TYPE": "dtype", "B_TYPE": "weights", "ACC": "sums", "C_TYPE": "out"}


def _short(dtype: str) -> str:
    """``float32`` as ``f32``, ``bfloat16`` as ``b16``."""
    return dtype[0] + dtype[-2:]


def candidates(problem: Problem) -> Iterator[Stream]:
    """The kernels made for a problem, best first; none if there is no form for it."""
    m, k, n = problem.m, problem.k, problem.n
    if min(m, k, n) == 0:
        return
    types = (problem.dtype, problem.weights, problem.sums, problem.out)
    if k <= SMALL and n <= SMALL:
        yield _small(problem)
    form = {"F": "columns", "C": "rows"}.get(problem.order)
    if form is None or n > COLUMNS[-1]:
        return
    kind = problem.dtype.replace("bfloat16", "float16")
    few = FEW_COLUMNS if kind == "float64" or form == "columns" else 1  # 16-bit rows would wait for their conversion
    if n > few and (problem.width == 16 or kind == "float64") and problem.weights == problem.dtype:
        t2 = -(-n // 8) * 8
        shapes = TENSOR.get((problem.order, kind, problem.b_order), TENSOR.get((problem.order, kind, "C")))
        if shapes is not None and t2 <= max(shapes) and (kind == "float64" or problem.sums == "float32"):
            made = [_for_width(shape_of(shapes, t2), "tensor", problem)]
            least, large = TENSOR_LARGE.get((problem.order, kind), {}).get(t2, (0, None))
            if large is not None and problem.width == 16:
                made.insert(0 if m * k * SIZES[kind] >= least else 1, large)
            order, turned = "FC".index(problem.order), problem.b_order == "F"
            for shape in made:
                yield Stream("tensor", *types, problem.width, t2, shape, order=order, turned=turned)
    t2, width = fitting(COLUMNS, n), problem.width
    if form == "rows" and n > 2 * FEW_COLUMNS and width == 16 and problem.sums == problem.dtype in STAGED:
        yield Stream("staged", *types, 16, t2, shape_of(STAGED[kind], t2))
    size, wide = SIZES[problem.dtype], SIZES[problem.sums]
    shapes = BEST.get((form, problem.dtype, problem.sums)) or BEST[form, kind, problem.sums]
    while width > size and width // size * t2 * wide > _SUMS:
        width //= 2
    shape = _for_width(shape_of(shapes, t2), form, problem, width // size * t2 * wide)
    config = Stream(form, *types, width, t2, shape)
    config = replace(config, turned=problem.b_order == "F" and _turns(config))
    while config.shared_bytes > _SHARED and form == "rows" and shape.pairs + shape.t3 > 1:
        shape = replace(shape, pairs=shape.pairs // 2) if shape.pairs else replace(shape, t3=shape.t3 // 2)
        config = replace(config, shape=shape)
    yield config


def _small(problem: Problem) -> Stream:
    """TSM2L: a thread has some 128 bytes of A, less where rows are few, and as many blocks as registers are left."""
    k, n, rows = problem.k, problem.n, problem.m * problem.batch
    (order, width), (out_order, out_width) = problem.small
    size, wide = SIZES[problem.dtype], SIZES[problem.sums]
    single = size == wide == 4
    few, alone = rows <= FEW_ROWS, rows <= (ONE_WAVE if single else FEW_ROWS)
    if order == 0 and (size == wide or k > 8):
        width = min(width, 8)
    if order == 0 and few and width * k > 64:
        width = min(width, size)
    run = width // size if order == 0 else out_width // SIZES[problem.out] if out_order == 0 else 1
    row = run * k * size
    reach = max(row, run * n * wide) if order else row
    tcf = next(tcf for tcf in (8, 4, 2, 1) if tcf * reach <= 128 or tcf == 1)
    if order == 0:
        tcf = min(tcf, 4 if size == wide else 1)
    elif row >= 32:
        tcf = min(tcf, 2)
    if few or (alone and order == 0):
        tcf = 1
    elif tcf == 1 and reach == 128 and (width == 16 if order or size == 2 else size == wide == 8):
        tcf = 2
    group = -(-n // -(-n // AT_ONCE)) if alone else 4  # as many at each of the times
    group = min(n, group) if n <= 2 else -(-group // 4) * 4
    blocks = _small_blocks(problem, tcf, row, run * group)
    blocks = 1 if few else min(blocks, 3) if alone else blocks
    leaves_first = rows * (k * size + n * SIZES[problem.out]) <= CACHED
    types = (problem.dtype, problem.weights, problem.sums, problem.out)
    shape = Shape(64, tcf, group, 1, 2 * blocks, leaves_first)
    return _within_shared(Stream("small", *types, width, n, shape, order, k, out_order, out_width))


def _small_blocks(problem: Problem, tcf: int, row: int, sums: int) -> int:
    """Blocks of 128 threads that a multiprocessor has the registers for, where a thread holds `row` bytes of A and
    `sums` sums, and `tcf` times so much."""
    (order, _), (out_order, _) = problem.small
    size, wide = SIZES[problem.dtype], SIZES[problem.sums]
    single = size == wide == 4
    held = tcf * row // 4 + max(0, tcf * sums * wide // 4 - 16)  # of the sums those beyond some
    first = 32 if single and (order or tcf == 1) else 8 if tcf >= 4 and size < wide else 16
    most = (first, 6), (64 if single else 48, 4), (80, 3)
    blocks = next((blocks for registers, blocks in most if held <= registers), 2)
    if (
        problem.n > FEW_COLUMNS * 4 or order != out_order or order == 2
    ):  # strides, or sums that wait, take registers too
        blocks = min(blocks, 3 if order == out_order < 2 else 2)
    return blocks


def _within_shared(config: Stream) -> Stream:
    """With so few rows of a thread that those which go through shared memory fit into it."""
    while config.shared_bytes > _SHARED:
        if config.shape.tcf > 1:
            config = replace(config, shape=replace(config.shape, tcf=config.shape.tcf // 2))
        elif config.order == 0 and config.width > SIZES[config.dtype]:
            config = replace(config, width=config.width // 2)
        elif config.out_width > SIZES[config.out]:
            config = replace(config, out_width=config.out_width // 2)
        else:
            break
    return config


def _for_width(shape: Shape, form: str, problem: Problem, sums_bytes: int = _SUMS) -> Shape:
    """Narrower loads, and more of them, as long as the sums fit the registers."""
    factor = min(4, 16 // problem.width)
    if factor == 1:
        return shape
    if form == "columns":
        return replace(
            shape, tcf=shape.tcf * max(1, min(factor, _SUMS // sums_bytes)), blocks=max(1, shape.blocks * 3 // 4)
        )
    t3 = min(4, shape.t3 * factor) if form == "rows" else shape.t3  # "tensor" has as many vectors as before
    return replace(shape, t3=t3, blocks=max(1, shape.blocks - 1))


def _turns(config: Stream) -> bool:
    """Whether a kernel can be made to read B along its columns: a step of "columns" has to be made of 16 bytes each."""
    if config.form != "columns":
        return config.form == "tensor"
    return config.weights == config.sums and config.shape.t3 * SIZES[config.sums] % 16 == 0


def why_not(problem: Problem | None, config: Stream, device: Device) -> str | None:
    """Why `config` cannot serve `problem` on `device`; None if it can. See `abft_tsm2.core.paper.config.why_not`."""
    return next(_objections(problem, config, device), None)


def _objections(problem: Problem | None, config: Stream, device: Device) -> Iterator[str]:
    if config.form not in FORMS:
        yield f"there is no form {config.form!r}: choose from {', '.join(FORMS)}"
        return
    if config.form == "tensor":
        if config.t2 % 8 or not 0 < config.t2 <= COLUMNS[-1]:
            yield f"t2 = {config.t2}: the tensor cores take 8, 16, 24 or 32 columns"
        if config.weights != config.dtype or (config.dtype != "float64" and config.sums != "float32"):
            yield "the tensor cores multiply float64 by float64, and 16-bit elements by others of their type in float32"
        if config.dtype != "float64" and config.order == 0 and config.shape.tcf % 4:
            yield f"tcf = {config.shape.tcf}: columns of 16-bit elements make up four tiles at a time"
        if device.compute_capability < (8, 0):
            yield f"compute capability {device.compute_capability} has no such tensor cores: 8.0 has"
    elif config.form == "staged" and config.width != 16:
        yield f"loads of {config.width} bytes: rows go through shared memory by 16"
    elif config.form != "small" and config.t2 not in COLUMNS:
        yield f"t2 = {config.t2}: {config.form} is compiled for t2 in {', '.join(map(str, COLUMNS))}"
    if config.turned and not _turns(config):
        yield f"{config.form} with t3 = {config.shape.t3} of {config.weights} cannot read B along its columns"
    if config.shared_bytes > min(_SHARED, device.shared_bytes_per_block):
        yield f"a block takes {config.shared_bytes} bytes of shared memory, and has {_SHARED}"
    if problem is None:
        return
    if problem.batch > _GRID:
        yield f"{problem.batch} products are more than the {_GRID} of one launch"
    types = (config.dtype, config.weights, config.sums, config.out)
    if types != (problem.dtype, problem.weights, problem.sums, problem.out):
        yield f"the kernel's types of A, B, sums and C are {types}, the problem's are others: {problem}"
    if config.form == "small":
        yield from _small_objections(problem, config)
        return
    if config.turned and problem.b_order != "F":
        yield "the kernel reads B along its columns, and these do not begin at multiples of 16 bytes"
    if config.width > problem.width:
        yield f"loads of {config.width} bytes, but A lies at multiples of {problem.width}"
    if problem.n > config.t2:
        yield f"n = {problem.n} is more than the {config.t2} columns of the kernel"
    order = {"columns": "F", "rows": "C", "staged": "C"}.get(config.form, "FC"[config.order])
    if problem.order != order:
        yield f"{config.form} reads A of order {order}, and this one is {problem.order}"


def _small_objections(problem: Problem, config: Stream) -> Iterator[str]:
    if (config.k, config.t2) != (problem.k, problem.n):
        yield f"the kernel is made for k = {config.k}, n = {config.t2}, not {problem.k} and {problem.n}"
    if config.shape.t3 != config.t2 and (config.shape.t3 % 4 or config.shape.t3 == 0):
        yield f"t3 = {config.shape.t3} columns at a time: all {config.t2} of them, or a multiple of 4"
    for name, (order, width), (has, most) in (
        ("A", (config.order, config.width), problem.small[0]),
        ("C", (config.out_order, config.out_width), problem.small[1]),
    ):
        if order != has or width > most:
            yield f"{name} is of order {has} at multiples of {most} bytes, the kernel takes {order} and {width}"
