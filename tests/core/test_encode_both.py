"""`encode_both`: on NumPy and on arrays of the standard, its kernels on the CPU and compiled, and on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abft_tsm2.core import encode_both as module
from abft_tsm2.core.compiler import source
from abft_tsm2.core.encode_both import EncodeTask, Encoding, encode_both, run, workspace_bytes
from abft_tsm2.core.encode_config import AddConfig, BothConfig, EncodePlan, adder_of, choices, choose, why_not
from abft_tsm2.core.generated import KINDS, Generated
from benchmarks.registers import ARCHITECTURES
from tests.support.both_cases import CONFIGS, TYPES, Case, aligned, cases, exactly, faults
from tests.support.cases import ORDERS as LAYOUTS
from tests.support.cases import arrange
from tests.support.cubins import Cubins, mostly_tuned
from tests.support.cuda_on_cpu import ORDERS, KernelFault, Library, build
from tests.support.libraries import in_every_order, library_of, some, texts
from tests.support.oracles import elements_outside

ADDERS = sorted({AddConfig(config.sums, config.words) for config in CONFIGS}, key=lambda config: config.name)
SMALL = CONFIGS[0]
names = {"ids": lambda x: getattr(x, "name", x)}

# ---- the kernels on the CPU ----------------------------------------------------------------------------------------


library = library_of(lambda: texts((*CONFIGS, *ADDERS)))
sanitized = library_of(lambda: texts((*CONFIGS, *ADDERS)), sanitize=True)


def encoded(
    case: Case, task: EncodeTask, library: Library, order: str, renamed: dict[str, str] | None = None
) -> Encoding:
    """What the kernels make of a case, all that they do not write being NaN."""
    workspace = aligned(np.full(workspace_bytes(case.config, case.plan), 255, np.uint8))

    def launch(config: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        library.run((renamed or {}).get(config.name, config.name), grid, config.t1, args, order=order)

    return run(case.config, case.plan, task, workspace, launch)


@pytest.mark.parametrize("config", CONFIGS, **names)
def test_every_load_path_in_every_order(
    library: Library, config: BothConfig, orders: Callable[[int], tuple[str, ...]]
) -> None:
    for number, case in enumerate(cases(config)):
        task = case.task()
        results = [encoded(case, task, library, order) for order in orders(number)]
        assert not faults(results[0], task), str(case)
        for other in results[1:]:
            for x, y in zip(results[0], other, strict=True):
                assert x is y is None or x.tobytes() == y.tobytes(), str(case)


@pytest.mark.parametrize("config", some(CONFIGS, 5), **names)
def test_every_load_path_under_address_sanitizer(sanitized: Library, config: BothConfig) -> None:
    for number, case in enumerate(cases(config)):
        task = case.task()
        assert not faults(encoded(case, task, sanitized, ORDERS[number % 3]), task), str(case)


@given(
    config=st.sampled_from(CONFIGS),
    m=st.integers(1, 80),
    vectors=st.integers(1, 120),
    cut=st.integers(1, 80),
    extra=st.integers(0, 2),
    given=st.booleans(),
    columns=st.sampled_from([(0, 0), (1, 0), (0, 2)]),
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 2**32),
)
def test_drawn_problems(library, config, m, vectors, cut, extra, given, columns, order, seed):
    vector = config.width // TYPES[config.dtype].itemsize
    case = Case(config, m, vectors * vector, min(cut, m), extra, given, columns)
    task = case.task(seed)
    assert not faults(encoded(case, task, library, order), task), str(case)


@pytest.mark.parametrize("sums", ["float32", "float64"])
@pytest.mark.parametrize("kind", KINDS)
def test_generated_weights_are_those_of_the_host_in_every_bit(build_cache: Path, kind: str, sums: str) -> None:
    # The rows of an identity are weights: nothing is rounded.
    config = BothConfig("float64" if sums == "float64" else "float32", sums, 4, right=kind, left=kind, t1=32)
    built = build([(config.name, source(config)), *((a.name, source(a)) for a in ADDERS)], cache=build_cache)
    V, W = Generated(kind, 4, 2**64 - 3), Generated(kind, 4, 11)
    task = EncodeTask(aligned(np.eye(140, dtype=config.dtype)), V, W, None, None, False, False, sums)
    encoding = encoded(Case(config, 140, 140, 50), task, built, "random")
    assert (encoding.rows == V.weights(140).astype(sums)).all()
    assert (encoding.columns == W.weights(140).astype(sums).T).all()


def test_many_parts_are_shared_by_more_warps(build_cache: Path) -> None:
    case = Case(CONFIGS[4], 2, 64 * 520, 2)
    adder = adder_of(case.config, case.plan)
    assert adder.t1 == 1024
    built = build([(config.name, source(config)) for config in (case.config, adder)], cache=build_cache)
    task = case.task()
    assert not faults(encoded(case, task, built, "random"), task)


def test_what_is_not_finite_stays_in_its_row_and_column(library: Library) -> None:
    case = Case(SMALL, 70, 520, 33)
    task = case.task()
    task.A[3, 10], task.A[69, 519], task.A[33, 512] = np.nan, np.inf, -np.inf
    encoding = encoded(case, task, library, "forward")
    assert not elements_outside(encoding.rows, task.A, task.V).any()
    assert not elements_outside(encoding.columns.T, task.A.T, task.W).any()
    assert np.isfinite(encoding.row_squares).sum() == 67
    assert np.isfinite(encoding.column_squares).sum() == 517
    task.A[...] = 1
    task.W[33, 0] = np.inf  # the first row of the second group
    assert np.isposinf(encoded(case, task, library, "forward").columns[0]).all()


# name: (what is replaced, by what, what is then said), of SMALL and of ADD
ADD = AddConfig(SMALL.sums, SMALL.words)
WRONG, OVERRUN = "are wrong", "global memory overrun"
PLANTED = {
    "no_barrier_of_a_panel": ("__syncthreads();  // the one", "// the one", "race: |uninitialised shared"),
    "one_stage_only": ("panel += PANEL, stage ^= 1", "panel += PANEL", "race: |are wrong"),
    "weights_of_the_last_panel": (
        "keep(weights + (stage ^ 1)",
        "keep(weights + stage",
        "race: |uninitialised|are wrong",
    ),
    "rows_of_the_next_group": ("first + step + i + T3 < rows", "first + step + i + T3 < m", WRONG),
    "columns_beyond_the_matrix": ("there && c * T1 * V < columns", "there", WRONG),
    "rows_beyond_the_group": ("if (row >= left_rows) continue;", "", OVERRUN + "|are wrong|uninitialised"),
    "a_column_beyond_is_stored": ("if (j >= k) continue;", "if (j > k) continue;", OVERRUN + "|are wrong"),
    "every_lane_stores": ("if (place < SUMS) totals", "totals", "race: |shared memory overrun|are wrong"),
    "halves_exchanged": ("kept = upper ? other : x[i]", "kept = upper ? x[i] : other", WRONG),
    "other_sum": ("upper && count > 1 ? half : 0", "upper && count > 2 ? half : 0", "race: |uninitialised|are wrong"),
    "sums_not_cleared": ("sum[v][q] = ACC(0);", "", WRONG),
    "squares_of_one_side": ("sum[v][q] += term * left[q];", "sum[v][q] += e * left[q];", WRONG),
    "given_weights_squared": ("return given ? w : w * w;", "return w * w;", WRONG),
    "words_of_rows": ("words[i] += bits;", "words[i] = bits;", WRONG),
    "words_of_columns": ("word_sum[v] += bits;", "word_sum[v] ^= bits;", WRONG),
    "parts_of_one_stripe": ("row_parts[(Index(blockIdx.x) * VALUES + q)", "row_parts[(q)", WRONG),
}
PLANTED_ADD = {
    "a_part_missing": ("p < number;", "p < number - 1;", WRONG),
    "one_beyond_the_end": ("i >= count", "i > count", OVERRUN),
    "read_too_early": ("__syncthreads();", "", "race: |uninitialised shared"),
    "parts_of_the_neighbour": ("parts + p * count + i", "parts + p * count + i - 1 + (i == 0)", WRONG),
}


def planted(name: str, config: Any, old: str, new: str) -> tuple[str, str]:
    text = source(config)
    assert text.count(old) == 1, f"{name}: the kernel has not one {old!r}"
    return name, text.replace(old, new).replace(config.name, name)


faulty = library_of(
    lambda: [
        *(planted(name, SMALL, old, new) for name, (old, new, _) in PLANTED.items()),
        *(planted(name, ADD, old, new) for name, (old, new, _) in PLANTED_ADD.items()),
        *texts((SMALL, ADD)),
    ]
)


def what_is_found(library: Library, config: BothConfig, order: str, renamed: dict[str, str]) -> str:
    for case in cases(config):
        task = case.task()
        try:
            found = faults(encoded(case, task, library, order, renamed), task)
        except KernelFault as fault:
            return str(fault)
        if found:
            return "; ".join(found)
    return "nothing"


@in_every_order("name", [*PLANTED, *PLANTED_ADD])
def test_planted_faults_are_caught(faulty: Library, name: str, order: str) -> None:
    expected = {**PLANTED, **PLANTED_ADD}[name][2]
    renamed = {(SMALL if name in PLANTED else ADD).name: name}
    assert re.search(expected, what_is_found(faulty, SMALL, order, renamed))


@pytest.mark.parametrize("order", ORDERS)
def test_without_them_nothing_is_found(faulty: Library, order: str) -> None:
    assert what_is_found(faulty, SMALL, order, {}) == "nothing"


def test_reads_beyond_the_matrix_are_caught(build_cache: Path) -> None:
    name = "reads_beyond"
    text = planted(name, SMALL, "there && c * T1 * V < columns", "true")
    built = build([text, (ADD.name, source(ADD))], sanitize=True, cache=build_cache)
    case = Case(SMALL, 40, 516, 40)
    with pytest.raises(KernelFault, match=r"(?s)heap-buffer-overflow.*READ of size"):
        encoded(case, case.task(), built, "forward", {SMALL.name: name})
    built.close()


@pytest.mark.parametrize("field", ["none", *Encoding._fields])
def test_the_judge_finds_one_wrong_element(field: str) -> None:
    task = Case(SMALL, 23, 36, 5).task()
    encoding = encode_both(task.A, task.V, task.W, squares=True, words=True)
    if field != "none":
        x = getattr(encoding, field)
        at = (1,) * x.ndim
        x[at] += 1 if x.dtype == np.uint64 else 2.5 * exactly(task)[field][1][at]
    assert bool(faults(encoding, task)) == (field != "none")


# ---- the way to the kernels, on the CPU ----------------------------------------------------------------------------


class OnCard(np.ndarray):
    """An array whose address is where CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


VIEWS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {  # of 72 x 88 elements; the bytes of a load
    "rows": (lambda x: x, 16),
    "columns": (lambda x: x.T, 16),
    "upside down": (lambda x: x[::-1], 16),
    "part of rows": (lambda x: x[3:50, 4:72], 16),
    "two elements on": (lambda x: x[:, 2:80], 8),
    "one element on": (lambda x: x[:, 1:], 4),
    "odd length": (lambda x: x[:, :71].T, 4),
    "one row": (lambda x: x[:1], 16),
    "one column": (lambda x: x[:, 3:4], 4),
    "every other": (lambda x: x[:, ::2], 0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_take_the_widest_loads(build_cache: Path, monkeypatch: pytest.MonkeyPatch, view: str) -> None:
    rng, launched = np.random.default_rng(3), []

    def launch(config: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        launched.append(config)
        build([(config.name, source(config))], cache=build_cache).run(config.name, grid, config.t1, args)

    monkeypatch.setattr(module, "_launched", launch)
    monkeypatch.setattr(module, "scratch", lambda nbytes, tickets: (aligned(np.full(nbytes, 255, np.uint8)), None))
    make, width = VIEWS[view]
    A = make(aligned(rng.standard_normal((72, 88)).astype(np.float32)))
    V, W = (rng.standard_normal((n, r)).astype(np.float32) for n, r in zip(A.shape[::-1], (2, 1), strict=True))
    task = EncodeTask(A, V, W, None, None, True, False, "float32")
    encoding = module._on_device(replace(task, A=A.view(OnCard)), 1)
    assert not faults(Encoding(*(x if x is None else np.asarray(x) for x in encoding)), task)
    assert [config.width for config in launched if isinstance(config, BothConfig)] == ([width] if width else [])


# ---- NumPy, and the standard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_type(dtype: str, layout: str) -> None:
    rng = np.random.default_rng(5)
    A = arrange(rng.standard_normal((40, 53)).astype(TYPES[dtype]), layout)
    for sums in {"float64": ["float64"]}.get(dtype, ["float32", "float64"]):
        V, W = rng.standard_normal((53, 5)).astype(sums), Generated("balanced", 2, 3)
        encoding = encode_both(A, V, W, squares=True, words=True, dtype=sums)
        assert not faults(encoding, EncodeTask(A, V, W, None, None, True, True, sums))


@given(
    m=st.integers(0, 400),
    k=st.integers(0, 400),
    r=st.integers(1, 6),
    dtype=st.sampled_from(sorted(TYPES)),
    layout=st.sampled_from(["C", "F"]),
    weighted=st.booleans(),
    words=st.booleans(),
    seed=st.integers(0, 99),
)
def test_drawn_matrices(m, k, r, dtype, layout, weighted, words, seed):
    rng = np.random.default_rng(seed)
    A = np.asarray(rng.standard_normal((m, k)).astype(TYPES[dtype]), order=layout)
    V, W = Generated("ramp", r), Generated("balanced", 7 - r, seed)
    p, q = rng.random(m), rng.random(k)
    encoding = encode_both(A, V, W, squares=(p, q) if weighted else True, words=words)
    sums = "float64" if dtype == "float64" else "float32"
    p, q = (x.astype(sums) if weighted else None for x in (p, q))
    assert not faults(encoding, EncodeTask(A, V, W, p, q, True, words, sums))


def test_of_the_standard_alone() -> None:
    strict = pytest.importorskip("array_api_strict")
    rng = np.random.default_rng(2)
    A, V, W = (rng.standard_normal(shape) for shape in ((30, 20), (20, 2), (30, 3)))
    found = encode_both(*(strict.asarray(x) for x in (A, V, W)), squares=True, words=True)
    assert {type(x) for x in found} == {type(strict.asarray(A))}
    assert not faults(Encoding(*map(np.from_dlpack, found)), EncodeTask(A, V, W, None, None, True, True, "float64"))


def test_nan_and_inf_spread_as_in_a_product() -> None:
    A = np.ones((5, 7))
    A[1, 2], A[3, 4] = np.nan, np.inf
    encoding = encode_both(A, Generated("ones"), Generated("ones"), squares=True)
    assert np.isnan(encoding.rows[1, 0])
    assert np.isposinf(encoding.columns[0, 4])
    assert np.isfinite(encoding.row_squares).tolist() == [True, False, True, False, True]


A, V, W = np.ones((4, 3)), np.ones((3, 2)), np.ones((4, 1))
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "vector": ((A[0], V, W), {}, ValueError, r"A has shape \(3,\): pass a matrix"),
    "V": ((A, W, W), {}, ValueError, r"V has shape \(4, 1\), A \(4, 3\): V has k = 3 rows"),
    "W": ((A, V, V), {}, ValueError, r"W has shape \(3, 2\), A \(4, 3\): W has m = 4 rows"),
    "narrow": ((A, V, W), {"dtype": np.float32}, ValueError, "sums of float64 elements are taken in float64"),
    "half": ((A.astype("f2"), V, W), {"dtype": "float16"}, ValueError, "taken in float32 or float64"),
    "integers": ((A.astype(int), V, W), {}, TypeError, "integers are not checked"),
    "three": ((A, V, W), {"squares": (W[:, 0],) * 3}, ValueError, r"a pair \(p, q\)"),
    "p": ((A, V, W), {"squares": (V[:, 0], V[:, 0])}, ValueError, r"p has shape \(3,\).*are \(4,\)"),
    "no column": ((A, V[:, :0], W), {"squares": True}, ValueError, r"pass squares=\(p, q\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    arguments, options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        encode_both(*arguments, **options)


def test_libraries_do_not_mix() -> None:
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match="in one call"):
        encode_both(A, strict.asarray(V), W)


# ---- configurations ------------------------------------------------------------------------------------------------


def test_every_choice_is_valid_and_has_a_name_of_its_own() -> None:
    found = choices()
    assert not [reason for reason in map(why_not, found) if reason]
    assert len({config.name for config in found}) == len(found)
    default = choose("float32", "float32", 1)
    wrong = {"dtype": "int8", "sums": "float16", "r": 5, "width": 2, "right": "normal", "t1": 48, "t3": 5, "rows": 3}
    for name, value in {**wrong, "tcf": 0, "blocks": 0}.items():
        assert why_not(replace(default, **{name: value})), name
    assert "32 that a warp adds" in str(why_not(replace(default, r=4, squares=True, t3=8, rows=8)))
    assert "bytes of shared memory" in str(why_not(replace(default, sums="float64", r=4, t1=1024)))


@given(m=st.integers(1, 10**6), k=st.integers(1, 10**6), multiprocessors=st.integers(1, 200), waves=st.integers(1, 8))
def test_a_plan_covers_the_matrix_once(m, k, multiprocessors, waves):
    config = choose("float32", "float32", 2, squares=True)
    plan = EncodePlan.of(config, m, k, multiprocessors, waves)
    assert (plan.groups - 1) * plan.slice < m <= plan.groups * plan.slice
    assert (plan.stripes - 1) * config.stripe < k <= plan.stripes * config.stripe
    assert plan.groups <= 65535
    assert adder_of(config, plan).t1 in (256, 1024)
    assert plan.groups == 1 or plan.groups * plan.stripes <= waves * config.blocks * multiprocessors


PLAIN = [config for config in choices() if config.width == 16 and config.squares and not config.words]
ROTATED = PLAIN + [config for config in choices() if config.r == 2 and config.words and config.squares]
COMPILED = {(config, "sm_90") for config in PLAIN}  # the rest for one each, in turn
COMPILED |= {(config, ARCHITECTURES[number % len(ARCHITECTURES)]) for number, config in enumerate(ROTATED)}


@pytest.mark.parametrize(("config", "architecture"), mostly_tuned(sorted(COMPILED, key=str)), **names)
def test_choices_compile_without_spills(compiled: Cubins, config: BothConfig, architecture: str) -> None:
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, (
        f"{config.name} {architecture}\n{log}"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(compiled: Cubins, architecture: str) -> None:
    made = choose("float32", "float64", 4, squares=True, words=True, right="balanced", left="ramp")
    for config in (made, AddConfig("float64", True), AddConfig("float64", True, 1024)):
        assert (
            " 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
            in compiled(source(config), architecture)[1]
        )
