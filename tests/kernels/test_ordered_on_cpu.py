"""The kernel that compares the ordered sums of a matrix, run on the CPU: as it is, and with faults in it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from abft_tsm2.checksum.device.kernels import OrderedKernel
from abft_tsm2.core.compiler import source
from abft_tsm2.core.ordered_sums import ordered_sums
from benchmarks.registers import ARCHITECTURES
from tests.kernels.test_kernels_compile import spilled
from tests.support.both_cases import TYPES
from tests.support.cubins import Cubins
from tests.support.cuda_on_cpu import ORDERS
from tests.support.libraries import Libraries, first_complaint, library_of, texts, with_faults

KINDS = {"float16": OrderedKernel(2, 64, 64), "float32": OrderedKernel(4, 64, 64), "float64": OrderedKernel(8, 64, 64)}
ANSWERS = ("flag", "keep", "count")
SINGLE, DOUBLE = KINDS["float32"], KINDS["float64"]
KEEPING, COUNTING = replace(DOUBLE, answer="keep"), replace(DOUBLE, answer="count")
FAULTS = {
    "sums_without_order": (SINGLE, "a * (Bits(x) & 0xffffffffu)", 0, "Bits(x) & 0xffffffffu"),
    "multipliers_of_another_place": (SINGLE, "add(sums, j + 32 * i, x[i])", 0, "add(sums, j + i, x[i])"),
    "even_multipliers": (SINGLE, "2 * x + 1", 0, "2 * x"),
    "without_the_high_word": (DOUBLE, "a * (x >> 32)", 0, "0"),
    "low_words_alone_compared": (DOUBLE, "int w = 0; w < WORDS; w++) same", 0, "int w = 0; w < 1; w++) same"),
    "without_the_last_element": (SINGLE, "j + 32 * i < end", 0, "j + 32 * i < end - 1"),
    "one_piece_of_a_line": (SINGLE, "(piece + 1) * PIECE", 0, "PIECE"),
    "the_first_piece_compares": (SINGLE, "!= unsigned(pieces - 1)", 0, "!= 0u"),
    "sum_of_the_last_piece": (SINGLE, "sums[w] += __ldcg(own + i * WORDS + w)", 0, "sums[w] = __ldcg(own + w)"),
    "tickets_left": (SINGLE, "tickets[line] = 0", 0, "tickets[line] = 1"),
    "half_of_the_warp": (SINGLE, "int bit = 16; bit; bit /= 2) sums", 0, "int bit = 8; bit; bit /= 2) sums"),
    "lines_without_gaps": (SINGLE, "X + line * apart", 0, "X + line * length"),
    "sum_of_the_first_line": (SINGLE, "== expected[w * lines + line]", 0, "== expected[w * lines]"),
    "flag_of_another_kind": (SINGLE, "+ 1, 2u)", 0, "+ 1, 1u)"),
    "kept_for_the_first_line": (KEEPING, "expected[w * lines + line] =", 0, "expected[w * lines] ="),
    "low_words_alone_kept": (KEEPING, "w < WORDS; w++) expected", 0, "w < 1; w++) expected"),
    "lines_of_another_sum_counted": (COUNTING, "if (same) atomicAdd", 0, "atomicAdd"),
}
ALL = [replace(config, answer=answer) for config in KINDS.values() for answer in ANSWERS]
library = library_of(lambda: [*texts(ALL), *with_faults(FAULTS)])
SHAPES = [(1, 1), (3, 40), (33, 64), (5, 65), (2, 700)]


def wrong(library: Libraries, name: str, config: OrderedKernel, shape: tuple[int, int], order: str) -> list[str]:
    """What is wrong with the answers to a matrix: as it was, with a bit flipped, two elements that change places, and
    two whose bits change by as much, one up and one down."""
    dtype = next(kind for kind, one in KINDS.items() if one.size == config.size)
    rng = np.random.default_rng(shape)
    memory = rng.integers(1, 250, (shape[0], shape[1] + 3)).astype(TYPES[dtype])
    X = memory[:, : shape[1]]
    expected, words = ordered_sums(X.copy()), memory.view(f"u{config.size}")[:, : shape[1]]
    lines, length = shape
    last, one = (lines - 1, length - 1), words.dtype.type(1)
    found, pieces = [], config.pieces(length)
    parts, tickets = np.zeros(lines * pieces * config.words, np.uint64), np.zeros(lines, np.uint32)

    def judged(what: str) -> None:
        state, given, now = np.zeros(32, np.uint64), expected.copy(), ordered_sums(X.copy())
        if config.answer == "keep":
            given[...] = 0
        args = (lines, length, words, length + 3, pieces, given, parts, tickets, state)
        library.run(name, (config.blocks(lines, length),), config.t1, args, order=order)
        same = (now == expected).all(axis=0)
        answer = {"flag": 0 if same.all() else 2 << 32, "keep": 0, "count": int(same.sum())}[config.answer]
        if int(state[0]) != answer or tickets.any():
            found.append(f"{shape}, {what}: {int(state[0]):x} and not {answer:x}, {tickets.max()} tickets")
        if (given != (now if config.answer == "keep" else expected)).any():
            found.append(f"{shape}, {what}: other sums are there")

    judged("as it was")
    for bit in (0, 8 * config.size - 2):
        for place in ((0, 0), last, (lines // 2, length // 2)):
            words[place] ^= one << words.dtype.type(bit)
            judged(f"bit {bit} of {place}")
            words[place] ^= one << words.dtype.type(bit)
    if length > 1:
        for change in ("places", "up and down"):
            held = words[last[0]].copy()
            if change == "places":
                X[last[0], [0, -1]] = X[last[0], [-1, 0]]
            else:
                words[last[0], 0] += one
                words[last[0], -1] -= one
            judged(change)
            words[last[0]] = held
    return found


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("config", ALL, ids=lambda config: config.name)
def test_what_changed_is_told(library: Libraries, config: OrderedKernel, order: str) -> None:
    for shape in SHAPES:
        assert not wrong(library, config.name, config, shape, order)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(library: Libraries, name: str) -> None:
    config = FAULTS[name][0]
    assert first_complaint(SHAPES, lambda shape: wrong(library, name, config, shape, "reverse")) != "nothing"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_it_compiles_without_spills(compiled: Cubins, size: int, answer: str, architecture: str) -> None:
    config = OrderedKernel(size, answer=answer)
    code, log = compiled(source(config), architecture)
    assert config.name.encode() in code
    assert spilled(log) == 0, log
