"""Faults in the workers of a cluster: in products, and in blocks between two tasks. Functions for ``Client.run``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
from distributed import Client, wait

import abft_tsm2

SINGLE, SQUARE = "single", "square"  # what can be restored, and what cannot

Array = np.ndarray[Any, Any]


def damaged(array: Any, pattern: str, rng: np.random.Generator | None = None) -> Any:
    """A copy with one bit of one element flipped, or of four in two rows and two columns, each another one; of a CuPy
    array another one."""
    if hasattr(array, "get"):
        import cupy

        return cupy.asarray(damaged(array.get(), pattern, rng))
    array = np.array(array, order="K")
    bits = array.view(f"u{array.itemsize}")
    rng = rng or np.random.default_rng(0)
    if pattern == SINGLE or min(array.shape) < 2:
        at = tuple(int(rng.integers(size)) for size in array.shape)
        bits[at] ^= np.array(1 << int(rng.integers(8 * array.itemsize)), bits.dtype)
        return array
    rows, columns = (rng.choice(size, 2, replace=False) for size in array.shape)
    which = rng.choice(8 * array.itemsize, 4, replace=False).reshape(2, 2)
    bits[np.ix_(rows, columns)] ^= np.array([[1 << int(bit) for bit in row] for row in which], bits.dtype)
    return array


def on_arrival(pattern: str, every: int, most: int, seed: int = 0) -> None:
    """Damage blocks as they are taken off the wire or the disk, each `every`-th, `most` of them."""
    from distributed.protocol.serialize import dask_deserialize

    from abft_tsm2.interop.dask.block import Block

    original = dask_deserialize.dispatch(Block)
    count = [0, 0]
    rng = np.random.default_rng(seed)

    def deserialize(header: Any, frames: Any) -> Any:
        block = original(header, frames)
        count[0] += 1
        if count[0] % every == 0 and count[1] < most:
            count[1] += 1
            block.array = damaged(block.array, pattern, rng)
        return block

    deserialize.count, deserialize.original = count, original  # type: ignore[attr-defined]
    dask_deserialize.register(Block)(deserialize)


def arrivals() -> int:
    """How many blocks were damaged here; and no more are."""
    from distributed.protocol.serialize import dask_deserialize

    from abft_tsm2.interop.dask.block import Block

    planted = dask_deserialize.dispatch(Block)
    if not hasattr(planted, "original"):
        return 0
    dask_deserialize.register(Block)(planted.original)
    return int(planted.count[1])


def in_memory(part: str, pattern: str, seed: int = 0, dask_worker: Any = None) -> int:
    """Damage every block in a worker's memory of which the key names this part."""
    rng = np.random.default_rng(seed)
    blocks = _blocks(part, dask_worker)
    for block in blocks:
        block.array = damaged(block.array, pattern, rng)
    return len(blocks)


def in_sums(part: str, seed: int, dask_worker: Any = None) -> int:
    """Flip a bit of the sums that such blocks travel with: of words, or those that are carried into products."""
    rng = np.random.default_rng(seed)
    blocks = _blocks(part, dask_worker)
    for block in blocks:
        if block.carried is not None and rng.integers(2):
            sums = block.carried.sums
            sums.view(np.uint64)[tuple(int(rng.integers(size)) for size in sums.shape)] ^= _bit(rng)
        else:
            side = "rows" if rng.integers(2) else "columns"
            sums = np.array(getattr(block.words, side))
            sums[int(rng.integers(sums.size))] ^= _bit(rng)
            object.__setattr__(block.words, side, sums)
    return len(blocks)


def _bit(rng: np.random.Generator) -> np.uint64:
    return np.uint64(1 << int(rng.integers(64)))


def _blocks(part: str, worker: Any) -> list[Any]:
    from abft_tsm2.interop.dask.block import Block

    return [x for key, x in list(worker.data.items()) if part in str(key) and isinstance(x, Block)]


def spill(dask_worker: Any = None) -> None:
    """Write to files all that a worker has in memory."""
    while dask_worker.data.fast:
        dask_worker.data.fast.evict()


def in_files(seed: int = 0, dask_worker: Any = None) -> int:
    """Flip a bit in the midst of each file of a worker, where the array is."""
    rng = np.random.default_rng(seed)
    done = 0
    for path in Path(dask_worker.local_directory).rglob("*"):
        if path.is_file() and path.stat().st_size > 8192:
            content = bytearray(path.read_bytes())
            content[len(content) // 2 + int(rng.integers(1024))] ^= 1 << int(rng.integers(8))
            path.write_bytes(content)
            done += 1
    return done


def in_product(share: float, seed: int, stage: str, arrays: Mapping[str, Any]) -> None:
    """Flip a bit of C in a share of all products: an ``on_stage``."""
    if stage != "multiplied":
        return
    rng = _streams.setdefault(seed, np.random.default_rng([seed, id(arrays) % 2**31]))
    if rng.random() < share:
        arrays["C"][...] = damaged(arrays["C"], SINGLE, rng)
        _planted[seed] = _planted.get(seed, 0) + 1


_streams: dict[int, np.random.Generator] = {}
_planted: dict[int, int] = {}


def planted_in_products(seed: int) -> int:
    """How many `in_product` has planted here."""
    return _planted.get(seed, 0)


# ---- products with faults ------------------------------------------------------------------------------------------

PLACES = ("product", "memory", "memory, four at once", "wire", "wire, four at once", "sums", "file")
_seeds = itertools.count(1)
_BLOCKS = 6  # along each side of a matrix


def planted_products(client: Client, place: str, dtype: str, count: int, block: int) -> dict[str, Any]:
    """Products with faults in one place, until there were `count`; what became of them."""
    n = _BLOCKS * block
    x, y = (np.random.default_rng(seed).standard_normal((n, n)).astype(dtype) for seed in (1, 2))
    right, size = x.astype(np.float64) @ y, abs(x.astype(np.float64)) @ abs(y)
    rounding = n * float(np.finfo(dtype).eps) / 2 * size
    clean = _product(client, x, y, block, None)[1].compute()
    found = {"place": place, "dtype": dtype, "products": 0, "planted": 0, "reported": 0, "raised": 0, "silent": 0}
    repaired = 0
    while found["planted"] < count:
        seed = next(_seeds)
        hook = functools.partial(in_product, 0.1, seed) if place == "product" else None
        kept, C, report = _product(client, x, y, block, hook)
        plant, planted = _planter(client, place, seed, kept)
        before = plant()
        try:
            with abft_tsm2.monitor() as log:
                C, report = dask.compute(C, report)
        except abft_tsm2.SilentDataCorruptionError:
            found["raised"] += 1
        else:
            # a product that was repaired may be rounded otherwise; blocks are restored bit for bit
            same = np.all(abs(C - right) <= rounding) if place == "product" else np.array_equal(C, clean)
            found["silent"] += not same
        found["products"] += 1
        found["planted"] += before + planted()
        faults = [fault for one in log for fault in one.faults]
        found["reported"] += sum(1 for one in log if one.faults or one.reasons)
        repaired += sum(1 for fault in faults if fault.repair)
    return {**found, "repaired": repaired}


def _product(client: Client, x: Array, y: Array, block: int, hook: Any) -> tuple[Any, Any, Any]:
    """A product whose first tasks have run: the blocks of the operands are in the memory of the workers."""
    a, b = (da.from_array(z, chunks=block, name=f"operand-{next(_seeds)}") for z in (x, y))
    C, report = abft_tsm2.protected_gemm(a, b, on_stage=hook, return_report=True)
    read = [layer for layer in C.dask.layers if layer.startswith("read-")]
    kept = client.get(C.dask, [key for layer in read for key in C.dask.layers[layer]], sync=False)
    wait(kept)
    return (read, kept), C, report


def _planter(
    client: Client, place: str, seed: int, kept: tuple[list[str], Any]
) -> tuple[Callable[[], int], Callable[[], int]]:
    """What plants before the product and says how many, and what says how many were planted during it."""
    part = kept[0][0].partition("-protected-")[2]  # of both operands of this product
    pattern = SQUARE if "four" in place else SINGLE

    def total(function: Any, *arguments: Any) -> int:
        return sum(client.run(function, *arguments).values())

    def none() -> int:
        return 0

    if place == "product":
        return none, lambda: total(planted_in_products, seed)
    if place.startswith("wire"):

        def begin() -> int:
            client.run(on_arrival, pattern, 3, 1000, seed)
            return 0

        return begin, lambda: total(arrivals)
    if place == "file":

        def spilled() -> int:
            client.run(spill)
            return total(in_files, seed)

        return spilled, none
    if place == "sums":
        return lambda: total(in_sums, part, seed), none
    return lambda: total(in_memory, part, pattern, seed), none
