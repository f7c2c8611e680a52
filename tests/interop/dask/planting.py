"""Faults in the workers of a cluster, between two tasks: functions for ``Client.run``."""

import numpy as np

SINGLE, SQUARE = "single", "square"  # what can be restored, and what cannot


def damaged(array, pattern):
    """A copy with one bit of one element flipped, or of four in two rows and two columns, differently."""
    array = np.array(array, order="K")
    bits = array.view(f"u{array.itemsize}")
    i, j = (0, 0) if pattern == SINGLE else ([0, 0, 1, 1], [0, 1, 0, 1])
    bits[i, j] ^= (1 << 20) if pattern == SINGLE else np.array([1 << 20, 1 << 18, 1 << 19, 1 << 17], bits.dtype)
    return array


def on_arrival(pattern, every, most):
    """Damage blocks as they are taken off the wire or the disk, each `every`-th, `most` of them."""
    from distributed.protocol.serialize import dask_deserialize

    from abft_tsm2.interop.dask.block import Block

    original = dask_deserialize.dispatch(Block)
    count = [0, 0]

    def deserialize(header, frames):
        block = original(header, frames)
        count[0] += 1
        if count[0] % every == 0 and count[1] < most:
            count[1] += 1
            block.array = damaged(block.array, pattern)
        return block

    deserialize.count, deserialize.original = count, original
    dask_deserialize.register(Block)(deserialize)


def arrivals():
    """How many blocks were damaged here; and no more are."""
    from distributed.protocol.serialize import dask_deserialize

    from abft_tsm2.interop.dask.block import Block

    planted = dask_deserialize.dispatch(Block)
    if not hasattr(planted, "original"):
        return 0
    dask_deserialize.register(Block)(planted.original)
    return planted.count[1]


def in_memory(part, pattern, dask_worker=None):
    """Damage every block in a worker's memory of which the key names this part."""
    from abft_tsm2.interop.dask.block import Block

    done = 0
    for key, value in list(dask_worker.data.items()):
        if part in str(key) and isinstance(value, Block):
            value.array = damaged(value.array, pattern)
            done += 1
    return done
