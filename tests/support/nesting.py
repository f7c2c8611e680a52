"""Code that runs in the middle of a call, where a signal handler or a finaliser may."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any


@lru_cache(None)
def _after_calls(code: CodeType) -> frozenset[int]:
    """The places of a function where it has just called another: signals are looked for there, and in loops."""
    steps = list(dis.get_instructions(code))
    return frozenset(later.offset for step, later in pairwise(steps) if step.opname.startswith("CALL"))


@contextmanager
def after_calls(of: Callable[[str], bool], run: Callable[[], Any]) -> Iterator[None]:
    """Run something after every call that functions make whose files are chosen by `of`."""

    def step(frame: FrameType, event: str, _: Any) -> Any:
        if not of(frame.f_code.co_filename):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and frame.f_lasti in _after_calls(frame.f_code):
            run()  # nothing is traced meanwhile
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)
