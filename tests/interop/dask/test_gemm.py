"""Protected products of Dask arrays, on the schedulers of one process."""

import threading

import dask
import dask.array as da
import numpy as np
import pytest
from dask.utils import key_split
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg.blas import dgemm

import abft_tsm2 as ft
from abft_tsm2.interop.dask import gemm, graphs
from abft_tsm2.interop.dask.block import Block
from abft_tsm2.interop.dask.task import GraphOptions, run
from abft_tsm2.report import Report, Status
from benchmarks.dask_planting import SINGLE, SQUARE, damaged


@pytest.fixture(autouse=True)
def in_this_thread(monkeypatch):
    """Two products a task, so that chains of three blocks have two tasks."""
    monkeypatch.setitem(gemm.LINKS, "numpy", 2)
    with dask.config.set(scheduler="synchronous"):
        yield


def chunks_of(n):
    """Any way to cut n into up to four chunks, some of them empty."""
    cuts = st.lists(st.integers(0, n), max_size=3)
    return cuts.map(lambda at: tuple(int(x) for x in np.diff([0, *sorted(at), n])))


@st.composite
def products(draw):
    m, k, n = (draw(st.integers(1, 24)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x, y, z = (rng.standard_normal(shape) for shape in ((m, k), (k, n), (m, n)))
    a = da.from_array(x, chunks=(draw(chunks_of(m)), draw(chunks_of(k))))
    b = da.from_array(np.asarray(y, order=draw(st.sampled_from("CF"))), chunks=(draw(chunks_of(k)), draw(chunks_of(n))))
    c = da.from_array(z, chunks=draw(st.integers(1, 30)))
    return x, y, z, a, b, c


@given(products(), st.sampled_from([(1.0, 0.0), (-0.5, 2.0), (1.0, 1.0)]))
@settings(max_examples=40, deadline=None)
def test_any_chunks(operands, factors):
    x, y, z, a, b, c = operands
    alpha, beta = factors
    C, report = ft.protected_gemm(a, b, c, alpha=alpha, beta=beta, return_report=True)
    assert isinstance(C, da.Array)
    given, found = ([[size for size in cut if size] for cut in both] for both in ((a.chunks[0], b.chunks[1]), C.chunks))
    assert found == given  # Dask drops empty chunks where it makes those of a and b the same
    assert C.dtype == np.float64
    C, report = dask.compute(C, report)
    bound = 1e-14 * (abs(alpha) * abs(x) @ abs(y) + abs(beta * z)) * (x.shape[1] + 2)
    assert np.all(abs(C - (alpha * (x @ y) + beta * z)) <= bound)
    assert np.all(abs(C - dgemm(alpha, x, y, beta, z)) <= bound)
    assert report.status is Status.CLEAN
    assert Report.from_dict(report.to_dict()) == report


@pytest.mark.parametrize(("left", "right"), [((5,), (5, 4)), ((3, 5), (5,)), ((5,), (5,))])
def test_vectors_as_in_matmul(left, right):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(left), rng.standard_normal(right)
    C = ft.protected_gemm(da.from_array(x, chunks=2), y)
    assert C.shape == (x @ y).shape
    np.testing.assert_allclose(C.compute(), x @ y, rtol=1e-13)
    if C.ndim == 1:
        c = np.ones(C.shape)
        np.testing.assert_allclose(ft.protected_gemm(x, da.from_array(y, chunks=2), c, beta=2.0).compute(), x @ y + 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_types(dtype):
    kind = np.dtype(dtype if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((40, 64)).astype(kind), rng.standard_normal((64, 24)).astype(kind)
    C = ft.protected_gemm(da.from_array(x, chunks=16), da.from_array(y, chunks=16))
    assert C.dtype == kind
    C = C.compute()
    assert C.dtype == kind
    exact = x.astype(np.float64) @ y.astype(np.float64)
    size = abs(x.astype(np.float64)) @ abs(y.astype(np.float64))
    # partial sums are kept in float32: one rounding to 16 bits, whatever the number of blocks
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    assert np.all(abs(C.astype(np.float64) - exact) <= unit * abs(exact) * 1.001 + 66 * 2.0**-24 * size)
    if dtype != "float32":
        wide = ft.protected_gemm(da.from_array(x, chunks=16), y, out_dtype="float32")
        assert wide.dtype == wide.compute().dtype == np.float32


def test_a_wrong_rounding_to_16_bits_is_found(monkeypatch):
    x = np.ones((8, 8), np.float16)
    C = ft.protected_gemm(da.from_array(x, chunks=4), x)
    right = graphs.namespace

    class Rounding:
        def __getattr__(self, name):
            return getattr(right(np.ones(1)), name)

        def astype(self, X, dtype):
            X = X.astype(dtype)
            if dtype == np.float16:
                X[0, 0] *= 1.01
            return X

    monkeypatch.setattr(graphs, "namespace", lambda *_: Rounding())
    with pytest.raises(ft.SilentDataCorruptionError, match="not rounded to the nearest"):
        C.compute()


A, B = da.ones((6, 4), chunks=2), da.ones((4, 6), chunks=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ft.protected_gemm(A, A), ValueError, "inner dimensions 4 and 6"),
        (lambda: ft.protected_gemm(A, B, out=np.zeros((6, 6))), TypeError, "dask.array.store"),
        (lambda: ft.protected_gemm(A, ft.encode(B.compute())), TypeError, "b is encoded: .* pass its .array"),
        (lambda: ft.protected_gemm(A, dask.delayed(np.ones)((4, 5))), TypeError, "b is a Delayed, .*from_delayed"),
        (lambda: ft.protected_gemm(A.astype(int), B), TypeError, "integers are not checked"),
        (lambda: ft.protected_gemm(A[A[:, 0] > 0], B), ValueError, "compute_chunk_sizes"),
        (lambda: ft.protected_gemm(A, B, beta=1.0), ValueError, "needs c"),
        (lambda: ft.protected_gemm(A, B, np.zeros((6, 5)), beta=1.0), ValueError, "c has shape"),
        (lambda: ft.protected_gemm(A, B, check="all"), ValueError, "check is 'all'"),
        (lambda: ft.protected_gemm(A, B, on_error="ignore"), ValueError, "unknown on_error"),
        (lambda: ft.protected_gemm(A, B, alpha="2"), TypeError, "alpha"),
        (lambda: ft.protected_gemm(A, B, precision="tf32"), ValueError, "tf32"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_computed(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_too_large_chunks_are_warned_of(monkeypatch):
    monkeypatch.setattr(graphs, "smallest_worker", lambda: (1 << 30, 2))
    a = da.ones((8192, 8192), chunks=4096)
    with pytest.warns(da.PerformanceWarning, match=r"128 MiB are too large.*2048 x 2048"):
        ft.protected_gemm(a, a)
    ft.protected_gemm(a.rechunk(2048), a.rechunk(2048))


def test_chunks_of_files_are_read_by_each_task_and_not_kept(tmp_path):
    x = np.random.default_rng(0).standard_normal((24, 24))
    np.save(tmp_path / "x.npy", x)
    file = da.from_array(np.load(tmp_path / "x.npy", mmap_mode="r"), chunks=8, inline_array=True)
    C = ft.protected_gemm(file, file)
    assert not [key for key in C.dask.to_dict() if "read-" in str(key)]
    np.testing.assert_allclose(C.compute(), x @ x, atol=1e-13)
    kept = da.from_array(x, chunks=8)
    assert len([key for key in ft.protected_gemm(kept, kept).dask.to_dict() if "read-" in str(key)]) == 9


def test_it_is_lazy_and_named_by_its_arguments():
    c, half = np.ones((6, 6)), da.ones((4, 4), chunks=2, dtype="float16")
    with ft.errstate(corrected="raise"):
        strict = ft.protected_gemm(A, B)
    products = [
        *(ft.protected_gemm(A, B), ft.protected_gemm(A, B, alpha=2.0), ft.protected_gemm(A, B, on_error="detect")),
        *(ft.protected_gemm(A, B, c, beta=1.0), ft.protected_gemm(A, B, c, beta=2.0), strict),
        *(ft.protected_gemm(half, half), ft.protected_gemm(half, half, out_dtype="float32")),
        *(ft.protected_gemm(A, B, check="columns"), ft.protected_gemm(B, A)),
    ]
    assert len({C.name for C in products}) == len(products)
    assert ft.protected_gemm(A, B).name == products[0].name


def test_what_reads_has_names_of_its_own():
    """Dask takes the time of tasks for that of others of their name: a product for as short as reading a block."""
    a = da.ones((4, 4), chunks=2).persist()
    plain, told = ft.protected_gemm(a, a.T).dask, ft.protected_gemm(a, a.T, return_report=True)[0].dask
    names = {key_split(key) for key in plain if "protected" in key[0]}
    assert names == {"read-a-protected-gemm", "read-b-protected-gemm", "protected-gemm"}
    assert names | {"product-protected-gemm"} == {key_split(key) for key in told if "protected" in key[0]}


def test_two_tasks_that_read_a_block_which_changes():
    """One of them recovers it while the other one has read what it was."""
    x = np.random.default_rng(0).standard_normal((64, 64))
    block = Block.of(x)
    options = GraphOptions("race", "gemm")
    found, once = [], threading.Barrier(2)

    def work(A):
        C = A @ A
        once.wait(5)
        return C

    def task(step):
        try:
            found.append(run(options, (step,), {"A": block}, work)[0])
        except threading.BrokenBarrierError:
            found.append(None)

    was = block.array
    block.array = damaged(block.array, SINGLE)
    threads = [threading.Thread(target=task, args=(step,)) for step in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for C in found:
        np.testing.assert_array_equal(C, was @ was)


def test_a_report_beside_the_result_computes_nothing_twice():
    products = []

    def count(stage, arrays):
        products.append(stage)

    x = da.from_array(np.ones((24, 24)), chunks=8)
    _, report = dask.compute(*ft.protected_gemm(x, x, on_stage=count, return_report=True))
    assert products.count("multiplied") == 27
    assert len(report.products) == 18


def test_a_chain_reads_few_blocks():
    x = da.from_array(np.ones((64, 64)), chunks=8)
    C = ft.protected_gemm(x, x)
    steps = [task for key, task in C.dask.to_dict().items() if "product" in str(key)]
    assert len(steps) == 8 * 8 * 8 // gemm.LINKS["numpy"]
    assert all(len(getattr(task, "dependencies", ())) <= 2 * gemm.LINKS["numpy"] + 1 for task in steps)


def test_errstate_goes_to_the_threads():
    x = da.from_array(np.random.default_rng(0).standard_normal((64, 64)), chunks=32)

    def ray(stage, arrays):
        if stage == "multiplied":
            arrays["C"][3, 4] += 1.0

    with ft.monitor() as log, dask.config.set(scheduler="threads"):
        D = ft.protected_gemm(x, x, on_stage=ray).compute()
    np.testing.assert_allclose(D, x.compute() @ x.compute(), atol=1e-12)
    assert log.counts == {Status.CORRECTED: 4}
    with pytest.raises(ft.SilentDataCorruptionError):
        ft.protected_gemm(x, x, on_stage=ray, on_error="raise").compute()
    with ft.monitor() as log:
        E = ft.protected_gemm(x, x, on_stage=ray, on_error="detect").compute()
    assert log.counts == {Status.UNCORRECTABLE: 4}
    assert abs(E - D).max() > 0.5
    with ft.errstate(corrected="raise"):
        C = ft.protected_gemm(x, x, on_stage=ray)
    with dask.config.set(scheduler="threads"), pytest.raises(ft.SilentDataCorruptionError):
        C.compute()


@pytest.mark.parametrize("operand", ["A(1, 2)", "B(2, 2)", "C0"])
@pytest.mark.parametrize("pattern", [SINGLE, SQUARE])
def test_a_block_that_changed_between_two_tasks(monkeypatch, operand, pattern):
    """Restored where the sums tell what it was; without a cluster there is nobody else to ask where not."""
    x = np.random.default_rng(0).standard_normal((96, 96))
    C = ft.protected_gemm(da.from_array(x, chunks=32), da.from_array(x, chunks=32))
    right = C.compute()
    made = gemm.chain

    def chain(options, step, pairs, c0, settings):
        if step == (1, 2, 2):
            ((a, b),) = pairs
            block = {"A(1, 2)": a, "B(2, 2)": b, "C0": c0}[operand]
            block.array = damaged(block.array, pattern)
        return made(options, step, pairs, c0, settings)

    monkeypatch.setattr(gemm, "chain", chain)
    C, report = ft.protected_gemm(da.from_array(x, chunks=32), da.from_array(x, chunks=32), return_report=True)
    if pattern == SQUARE:
        with pytest.raises(ft.SilentDataCorruptionError, match="no copy of it is as it was"):
            C.compute()
        return
    C, report = dask.compute(C, report)
    np.testing.assert_array_equal(C, right)
    assert report.status is Status.CORRECTED
    (fault,) = [fault for one in report.products for fault in one.faults]
    assert (fault.operand, fault.kind, len(fault.rows), len(fault.columns)) == (operand, "element", 1, 1)
    assert "restored bit for bit" in fault.repair


def test_rows_of_equal_sums_that_change_places_between_two_tasks(monkeypatch):
    made = gemm.chain

    def chain(options, step, pairs, c0, settings):
        pairs[0][0].array = pairs[0][0].array[[1, 0, *range(2, 32)]]
        return made(options, step, pairs, c0, settings)

    monkeypatch.setattr(gemm, "chain", chain)
    C = ft.protected_gemm(da.from_array(np.eye(32), chunks=32), np.ones((32, 32)) + np.arange(32.0)[:, None])
    with pytest.raises(ft.SilentDataCorruptionError, match="no copy of it is as it was"):
        C.compute()


@pytest.mark.parametrize("part", ["rows", "columns", "diagonals", "carried"])
def test_sums_that_change_between_two_tasks(monkeypatch, part):
    x = np.random.default_rng(0).standard_normal((96, 96))
    right = ft.protected_gemm(da.from_array(x, chunks=32), da.from_array(x, chunks=32)).compute()
    made = gemm.chain

    def chain(options, step, pairs, c0, settings):
        if step == (1, 2, 2):
            ((_, b),) = pairs
            if part == "carried":
                b.carried.sums[3, 0] += 1.0
            else:
                getattr(b.words, part)[3] += np.uint64(1 << 40)
        return made(options, step, pairs, c0, settings)

    monkeypatch.setattr(gemm, "chain", chain)
    operands = da.from_array(x, chunks=32), da.from_array(x, chunks=32)
    C, report = dask.compute(*ft.protected_gemm(*operands, return_report=True))
    np.testing.assert_array_equal(C, right)
    assert report.ok
    assert report.status is Status.CHECKSUM_FAULT


def test_the_result_is_compared_before_it_is_returned(monkeypatch):
    x = np.random.default_rng(0).standard_normal((64, 64))
    right = ft.protected_gemm(da.from_array(x, chunks=32), x).compute()
    made = gemm.chain

    def chain(options, step, *blocks):
        block = made(options, step, *blocks)
        if step == (1, 0, 0):
            block.array = damaged(block.array, SINGLE)
        return block

    monkeypatch.setattr(gemm, "chain", chain)
    with ft.monitor() as log:
        C = ft.protected_gemm(da.from_array(x, chunks=32), x).compute()
    np.testing.assert_array_equal(C, right)
    assert log.counts[Status.CORRECTED] == 1


def test_what_is_not_finite_is_said_once_for_a_task():
    x = np.ones((8, 8))
    x[2, 3] = np.nan
    C, report = ft.protected_gemm(da.from_array(x, chunks=4), np.ones((8, 8)), return_report=True)
    with pytest.warns(ft.errors.UnverifiableWarning):
        C, report = dask.compute(C, report)
    assert np.isnan(C[2]).all()
    assert report.status is Status.UNVERIFIABLE


@pytest.mark.parametrize(
    ("changed", "found"), [(lambda x: x[:3], r"shape \(3, 4\) and dtype float64"), (np.float32, "dtype float32")]
)
@pytest.mark.parametrize("keep", [True, False])
def test_a_chunk_that_is_not_what_the_array_says_is_refused(changed, found, keep):
    x = da.from_array(np.ones((8, 8)), chunks=4) if keep else da.ones((8, 8), chunks=4)
    wrong = da.map_blocks(changed, x, chunks=x.chunks, dtype=x.dtype, meta=x._meta)
    with pytest.raises(ValueError, match=f"a has a chunk of .*{found} where the Dask array says .*4, 4.* and float64"):
        ft.protected_gemm(wrong, np.ones((8, 8))).compute()


def test_other_byte_orders():
    x = np.random.default_rng(0).standard_normal((8, 8))
    other = x.astype(x.dtype.newbyteorder())
    C = ft.protected_gemm(da.from_array(other, chunks=4), other, other, beta=2.0).compute()
    np.testing.assert_allclose(C, x @ x + 2 * x, rtol=0, atol=1e-13)
