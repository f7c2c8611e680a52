"""tsm2l_stream.cu, run on the CPU and judged element by element; and the tests tested."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core.compiler import kernel
from tests.support.cuda_on_cpu import ORDERS, Library
from tests.support.kernel_cases import SCALARS
from tests.support.libraries import first_fault, in_every_order, library_of, some, texts, with_faults
from tests.support.stream_cases import B_ORDERS, CONFIGS, FREE, Case, Operands, Stream, cases, faults

COLUMNS = Stream("float32", "float32", 3, 5, tcf=2)
SMALL = Stream("float32", "float32", 13, 7, width=8, c_width=8)
ROWS = Stream("float32", "float32", 8, 8, "rows", "rows", 4)
ODD = Stream("float32", "float32", 5, 7, "rows", "rows", 2)
NARROW = Stream("float32", "float32", 5, 2, "rows", "rows", 2)
ANY = Stream("float32", "float32", 7, 3, "any", "any", 1, 4, 4)
MIXED = Stream("float32", "float32", 8, 8, "columns", "rows")
HALF = Stream("bfloat16", "bfloat16", 8, 8, "rows", "rows", 4, acc="float32")
WRONG = "elements are wrong"
OUTSIDE = "global memory overrun|around C were written|elements are wrong"


library = library_of(lambda: texts(CONFIGS))
sanitized = library_of(lambda: texts(CONFIGS), sanitize=True)


def run(library: Library, operands: Operands, order: str, *, name: str = "", seed: int = 0) -> np.ndarray:
    """The buffer of C after the kernel has run on a copy of it."""
    case = operands.case
    memory = operands.c.memory.copy()
    grid = (case.blocks, 1, case.products)
    arguments = operands.arguments(memory)
    library.run(name or case.config.name, grid, case.config.t1, arguments, order=order, seed=seed)
    return memory


def names(config: Stream) -> str:
    return config.name


@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_every_path_in_every_order(library, config, orders):
    for number, case in enumerate(cases(config)):
        operands = Operands.of(case)
        results = [run(library, operands, order) for order in orders(number)]
        assert not faults(operands, results[0]), str(case)
        for order, memory in zip(orders(number), results, strict=True):
            assert memory.tobytes() == results[0].tobytes(), f"{case}: another result in {order} order"


@pytest.mark.parametrize("config", some(CONFIGS, 12), ids=names)
def test_every_path_under_address_sanitizer(sanitized, config):
    for number, case in enumerate(cases(config)):
        operands = Operands.of(case, 1)
        assert not faults(operands, run(sanitized, operands, ORDERS[number % 3])), str(case)


@pytest.mark.parametrize("config", [COLUMNS, ROWS, ODD, ANY, MIXED], ids=names)
def test_what_is_not_finite_stays_in_its_row_and_column(library, config):
    m = config.tile + 5
    operands = Operands.of(Case(config, m))
    a, b = operands.a.matrices()[0], operands.b.matrices()[0]
    a[3, 0], a[m - 1, config.k - 1], b[1, 2] = np.nan, np.inf, -np.inf
    c = operands.c.matrices(run(library, operands, "forward"))[0]
    expected = np.ones(c.shape, bool)
    expected[[3, m - 1]] = False
    expected[:, 2] = False
    assert (np.isfinite(c) == expected).all()


@pytest.mark.parametrize("config", [COLUMNS, ROWS, ODD, ANY, MIXED], ids=names)
def test_a_row_does_not_depend_on_the_grid_nor_on_other_rows(library, config):
    m = 5 * config.tile + 3
    whole = Operands.of(Case(config, m, blocks=1, data="normal"))
    expected = whole.c.matrices(run(library, whole, "forward"))[0]
    part = Operands.of(Case(config, m - config.tile - 1, blocks=7, data="normal"))
    part.a.matrices()[0][...] = whole.a.matrices()[0][: part.case.m]
    part.b.matrices()[0][...] = whole.b.matrices()[0]
    assert (part.c.matrices(run(library, part, "forward"))[0] == expected[: part.case.m]).all()


def test_drawn_problems(library):
    @given(
        case=st.builds(
            Case,
            config=st.sampled_from(CONFIGS),
            m=st.integers(0, 700),
            blocks=st.integers(1, 4),
            products=st.integers(1, 3),
            extra=st.integers(0, 5),
            free=st.sampled_from(FREE),
            b_order=st.sampled_from(B_ORDERS),
            alpha=st.sampled_from(SCALARS),
            beta=st.sampled_from(SCALARS),
            data=st.sampled_from(["uniform", "normal"]),
        ),
        order=st.sampled_from(ORDERS),
        seed=st.integers(0, 2**32 - 1),
    )
    def check(case, order, seed):
        operands = Operands.of(case, seed)
        assert not faults(operands, run(library, operands, order, seed=seed)), str(case)

    check()


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=names)
def test_every_path_on_a_gpu(config):
    cp = pytest.importorskip("cupy")

    def results(operands: Operands) -> bytes:
        stacks = (operands.a, operands.b, operands.c)
        # As integers, since CuPy does not know all types; for a matrix, the address of its element (0, 0).
        buffers = [cp.asarray(stack.memory.view(f"u{stack.memory.itemsize}")) for stack in stacks]
        pairs = zip(buffers, stacks, strict=True)
        addresses = iter([buffer.data.ptr + stack.offset * buffer.itemsize for buffer, stack in pairs])
        arguments = [
            np.uint64(next(addresses, 0)) if isinstance(x, np.ndarray) else np.int64(x) if isinstance(x, int) else x
            for x in operands.arguments(operands.c.memory)
        ]
        case = operands.case
        kernel(config)((case.blocks, 1, case.products), (config.t1,), tuple(arguments))
        return cp.asnumpy(buffers[2]).tobytes()

    for case in cases(config):
        operands = Operands.of(case)
        found = results(operands)
        assert not faults(operands, np.frombuffer(found, operands.c.memory.dtype)), str(case)
        assert results(operands) == found


SYNC = "__syncwarp();"
LAST = "first >= TILE * T2"
# name: (kernel, what is replaced, which occurrence, by what, what is then said)
PLANTED = {
    "b_used_too_early": (COLUMNS, "__syncthreads();", 0, "", WRONG),
    "a_overwrites_c": (HALF, SYNC, 0, ";", WRONG),
    "a_read_too_early": (ODD, SYNC, 1, ";", WRONG),
    "c_overwrites_a": (ODD, SYNC, 2, ";", WRONG),
    "c_overwrites_c": (MIXED, SYNC, 2, ";", WRONG),
    "c_read_too_early": (MIXED, SYNC, 3, ";", WRONG),
    "gaps_of_a": (ROWS, "RowsA::place(place_of(r) * T3)", 0, "place_of(r) * T3", WRONG),
    "gaps_of_c": (MIXED, "RowsC::place(first + v)", 0, "(first + v)", WRONG),
    "last_vector": (NARROW, "if (is_vector(i)) write", 0, "write", "shared memory overrun|" + WRONG),
    "last_store": (ODD, LAST, 0, "false", OUTSIDE),
    "columns_kept": (ODD, "T2 % GROUP == 0 || q + i < T2", 0, "true", "shared memory overrun|" + WRONG),
    "columns_stored": (COLUMNS, "T2 % GROUP && q + i >= T2", 0, "false", OUTSIDE),
    "rows_stored_by_columns": (SMALL, "PLAIN || count >= STORED", 0, "true", OUTSIDE),
    "rows_stored": (NARROW, "PLAIN || count >= STORED", 0, "true", OUTSIDE),
    "last_tile": (NARROW, "beta == ACC(0) && row + TILE <= m", 0, "beta == ACC(0)", OUTSIDE),
    "c_is_read": (ROWS, "!PLAIN && beta != ACC(0)", 0, "!PLAIN", WRONG),
    "c_is_not_read": (ROWS, "!PLAIN && beta != ACC(0)", 0, "false", WRONG),
    "no_alpha": (ANY, "sum[r][i] *= alpha;", 0, ";", WRONG),
    "no_zeros": (ANY, "sum[r][i] = ACC(0);", 0, ";", WRONG),
    "stride_of_columns": (ANY, "along<COUNT>(i % COLUMNS, cs)", 0, "i % COLUMNS", WRONG),
    "too_far_on": (ANY, "Index(gridDim.x) * WARPS * TILE", 0, "Index(gridDim.x) * WARPS * TILE * 2", WRONG),
    "one_b_for_all": (HALF, "B += blockIdx.z * bsb;", 0, "", WRONG),
}
# What is read and then not used: only AddressSanitizer sees it.
ADDRESSES = {
    "tile_of_columns": (COLUMNS, "rows >= TILE", 0, "true"),
    "rows_of_columns": (COLUMNS, "rows - first);", 0, "rows - first + 1);"),
    "tile_of_rows": (ROWS, "rows >= TILE", 1, "true"),
    "vector_of_rows": (ODD, "rows * T3 - vector(i)", 0, "rows * T3 - vector(i) + 1"),
    "columns_of_b": (COLUMNS, "q < T2 ? ACC(widened(B", 0, "true ? ACC(widened(B"),
}


faulty = library_of(lambda: with_faults(PLANTED))
faulty_addresses = library_of(lambda: with_faults(ADDRESSES), sanitize=True)


def what_is_found(library: Library, name: str, config: Stream, order: str) -> str:
    """The first thing that is wrong with a kernel over all cases."""

    def judged(case: Case) -> list[str]:
        operands = Operands.of(case)
        return faults(operands, run(library, operands, order, name=name))

    return first_fault(cases(config), judged)


@in_every_order("name", PLANTED)
def test_faults_planted_into_the_kernel_are_caught(faulty, name, order):
    config, *_, expected = PLANTED[name]
    assert re.search(expected, what_is_found(faulty, name, config, order))


@pytest.mark.parametrize("name", some(ADDRESSES, 4))
def test_reads_outside_of_the_matrices_are_caught(faulty_addresses, name):
    found = what_is_found(faulty_addresses, name, ADDRESSES[name][0], "forward")
    assert re.search(rf"(?s)address error: kernel {name}.*heap-buffer-overflow.*READ of size (4|16).*\.cuh?:\d+", found)


JUDGED = Case(ANY, 40, products=2, extra=3, alpha=-0.5, beta=2.0, data="normal")


@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float64")])
@pytest.mark.parametrize("wrong", ["nan", "zero", "few units", "neighbour", "guard", "gap", "none"])
def test_the_judge_finds_one_wrong_element(types, wrong):
    a, c = types
    width, c_width = 2 if a == "bfloat16" else 4, {"bfloat16": 2, "float32": 4, "float64": 8}[c]
    sums = "float32" if c == "bfloat16" else c
    config = replace(ANY, a=a, c=c, acc=sums, width=width, c_width=c_width)
    operands = Operands.of(replace(JUDGED, config=config))
    memory = operands.c.memory.copy()
    a, b, c = (stack.matrices().astype(np.longdouble) for stack in (operands.a, operands.b, operands.c))
    result = operands.c.matrices(memory)
    exact = -0.5 * (a @ b) + 2 * c
    result[...] = exact.astype(np.float64)
    assert not faults(operands, memory)
    at, size = (1, 11, 1), abs(0.5 * (abs(a) @ abs(b)) + 2 * abs(c))[1, 11, 1]
    eps = float(np.finfo(np.float32).eps) * 10 if config.c == "float32" else 0.02 if config.c == "bfloat16" else 5e-15
    if wrong == "guard":
        memory[3] = 0
    elif wrong == "gap":
        memory[operands.c.offset + config.n] = 1
    elif wrong != "none":
        values = {"nan": np.nan, "zero": 0, "few units": exact[at] + eps * size, "neighbour": exact[1, 11, 2]}
        result[at] = np.float64(values[wrong])
    found = faults(operands, memory)
    if wrong in ("guard", "gap"):
        assert found == ["1 element(s) around C were written"]
    elif wrong == "none":
        assert found == []
    else:
        assert re.match(r"1 of \d+ elements are wrong, the first C\[1, 11, 1\]", found[0])
