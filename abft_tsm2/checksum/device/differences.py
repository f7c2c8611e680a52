"""Compare what was encoded for a product with what its operands give now: by the same kernels, so bit for bit.

Sums of bits alone do not see elements of a line change places; the checksums s and t do. Where one of these is not what
it was, either it was hit or an operand changed: t was computed from s, and so each shows of the other which it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from abft_tsm2.arrays import Array, same_bits, to_host
from abft_tsm2.checksum.device.check import DeviceCheck
from abft_tsm2.checksum.device.layout import CarriedChecksum, OperandPointers, elements
from abft_tsm2.core.generated import splitmix64
from abft_tsm2.core.launch import Where

_MIX = 0x9E3779B97F4A7C15  # as kernels/check/state.cuh has it
_MIX_BACK = pow(_MIX, -1, 1 << 64)


def differences(
    check: DeviceCheck, then: int, now: int, carried: CarriedChecksum | None, *, recomputed: bool
) -> dict[str, tuple[int, ...]]:
    """Compare two workspaces of the same product: what differs of "R", "L", "C0" for sums of operands' bits, "v", "s",
    "t", "t0" for checksums, and "u", where it was `recomputed`; each with the places. Synchronises."""
    names = {"R": ("right_bit_sums",), "L": ("left_bit_sums",), "C0": ("added_bit_sums",), "v": ("v", "sizes")}
    names |= {"s": ("s", "squares"), "t": ("t", "p2"), "t0": ("t0", "added2")}
    names |= {"u": ("u", "u2")} if recomputed else {}
    if carried is not None:  # what an encoded operand carries is its own
        names = {name: parts for name, parts in names.items() if name not in "Rvs"}
    found = {name: _differing(check, then, now, parts) for name, parts in names.items()}
    return {name: places for name, places in found.items() if places}


def _differing(check: DeviceCheck, then: int, now: int, parts: tuple[str, ...]) -> tuple[int, ...]:
    places: set[int] = set()
    for name in parts:
        if name in check.workspace:
            places.update(np.flatnonzero(_different(check, then, now, name).any(axis=0)).tolist())
    return tuple(sorted(places))


def _different(check: DeviceCheck, then: int, now: int, name: str) -> np.ndarray[Any, Any]:
    """Where a part has other bits, (products, count), on the host."""
    before, after = (check.workspace.array(memory, name) for memory in (then, now))
    bits = f"u{before.itemsize}"
    return to_host(before.view(bits) != after.view(bits))


def digest_of(check: DeviceCheck, memory: int, carried: CarriedChecksum | None) -> int:
    """What a workspace holds of the operands that were encoded, in one number, as kernels/repair/repair.cu has it.
    Synchronises."""
    names, total = ("t", "p2", "left_bit_sums", "t0", "added2", "added_bit_sums"), 0
    for which, name in enumerate(names):
        if name in check.workspace:
            total += _hashed(to_host(check.workspace.array(memory, name)), which)
    if carried is None:
        words = check.workspace.array(memory, "right_bit_sums")
    else:
        words = elements(carried.right.bit_sums, check.spec.k, "uint64")
    return (total + _hashed(to_host(words), len(names))) % (1 << 64)


def _hashed(x: np.ndarray[Any, Any], which: int) -> int:
    bits = np.ascontiguousarray(x).view(np.uint64).ravel()
    places = np.arange(1, bits.size + 1, dtype=np.uint64) + np.uint64(which << 48)
    return int(np.sum((splitmix64(0, places) | np.uint64(1)) * bits, dtype=np.uint64))


def was_other(check: DeviceCheck, then: int, now: int, sums: str = "t") -> bool:
    """Whether a line's t, as it was computed then, is not what it is now: it has other bits, and was not hit, as its
    guard says. "t0": of what C0 gives."""
    parts, guards = (("t", "p2"), "guards") if sums == "t" else (("t0", "added2"), "guards0")
    first, squares, guard = (to_host(check.workspace.array(then, name)).copy() for name in (*parts, guards))
    intact = _fits(first.view(np.uint64).ravel(), squares.view(np.uint64).ravel(), guard.ravel())
    different = [_different(check, then, now, name).ravel() for name in parts]
    return bool(((different[0] | different[1]) & intact).any())


def _fits(first: Any, squares: Any, guard: Any) -> np.ndarray[Any, Any]:
    """Whether guards are those of two sums each, whatever the number of the call (`guard_of` of state.cuh)."""
    turned = squares << np.uint64(32) | squares >> np.uint64(32)
    mixed = (guard - (first ^ turned)) * np.uint64(_MIX_BACK)  # number << 32 + line + 1
    line = np.arange(1, guard.size + 1, dtype=np.uint64)
    return np.asarray((mixed - line) & np.uint64(0xFFFFFFFF) == 0)


def predicted_otherwise(
    check: DeviceCheck,
    then: int,
    now: int,
    carried: CarriedChecksum | None,
    copy: Array | None,
    call: tuple[float, float, Where],
) -> bool:
    """Whether t of a line, as it was computed then, is not what it is now, and not because sums of R or weights were
    hit: L or R is another one then.

    Parameters
    ----------
    carried, copy : CarriedChecksum and array (k, 1), or None
        What R carries, if it was encoded before, and a copy of its sums.
    call : tuple
        alpha and beta, and where the operands are. Of `now` the sums are overwritten.
    """
    if not was_other(check, then, now):
        return False
    if carried is None:
        right = _with_old_weights(check, then, now, call[2])
    else:
        right = None if copy is None else _with_copied_sums(check, carried.right, copy)
    if right is None:
        return True
    check.predict_again(now, right.pointers, *call)
    return was_other(check, then, now)


class _SumsBefore(NamedTuple):
    """What an operand carries, and what has to stay for it."""

    pointers: OperandPointers
    keeps: Any


def _with_copied_sums(check: DeviceCheck, right: OperandPointers, copy: Array) -> _SumsBefore | None:
    """What R carries, with a copy of its sums, where they are not the same."""
    sums = copy[:, 0].astype(check.spec.acc)
    held = elements(right.s, check.spec.k, check.spec.acc)
    return None if same_bits(sums, held) else _SumsBefore(right._replace(s=sums.data.ptr), sums)


def _with_old_weights(check: DeviceCheck, then: int, now: int, where: Where) -> _SumsBefore | None:
    """The sums of R with the weights of then, where these are others than those of now."""
    import cupy

    if not _differing(check, then, now, ("v",)):
        return None
    check.workspace.array(now, "v")[...] = check.workspace.array(then, "v")
    stream = cupy.cuda.get_current_stream().ptr
    for step in check.sum_again(now):
        step(stream, where)
    return _SumsBefore(check.workspace.right(now), None)
