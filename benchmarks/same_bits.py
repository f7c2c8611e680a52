"""One line for each of many results: bits of arrays, reports without prose or times, trials of campaigns.

    python -m benchmarks.same_bits > before.txt       and after a change that must change nothing:
    python -m benchmarks.same_bits > after.txt; diff before.txt after.txt
    python /elsewhere/same_bits.py                    in the folder of an older version: public names are all it needs

Products of every type, order, batch and check, clean and with planted faults; encoded operands; LU, Cholesky and solve;
and the first trials of the campaigns that ship.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, ".")

import numpy as np

import abft_tsm2 as ft
from abft_tsm2.__main__ import main as abft_tsm2

PROSE = {"reasons", "seconds", "time", "detail", "reason", "repaired"}
CAMPAIGNS = {"quick": 1.0, "storage": 0.05, "adversarial": 0.1, "gemm-full": 0.01, "lu-full": 0.02, "peers": 0.01}
CAMPAIGNS |= {"swaps": 0.01, "clean-products": 0.01}


def digest(x: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def without_prose(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: without_prose(value) for key, value in x.items() if key not in PROSE}
    return [without_prose(one) for one in x] if isinstance(x, list) else x


def told(report: Any) -> str:
    """A report without prose and times: a digest."""
    return digest(np.frombuffer(json.dumps(without_prose(report.to_dict()), sort_keys=True).encode(), np.uint8))


def operands(m: int, k: int, n: int, dtype: str, order: str, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    if dtype == "bfloat16":
        from ml_dtypes import bfloat16 as kind
    else:
        kind = np.dtype(dtype)
    A, B = (rng.standard_normal(shape).astype(kind) for shape in ((m, k), (k, n)))
    return np.asarray(A, order=order[0]), np.asarray(B, order=order[1])  # type: ignore[call-overload]


FAULTS: dict[str, tuple[str, str, Any]] = {
    "clean": ("", "", None),
    "element": ("multiplied", "C", lambda x: x.__setitem__((x.shape[0] // 3, x.shape[1] // 2), 99)),
    "nan": ("multiplied", "C", lambda x: x.__setitem__((1, 2), np.nan)),
    "row": ("multiplied", "C", lambda x: x.__setitem__(2, 0)),
    "everything": ("multiplied", "C", lambda x: x.__imul__(x.dtype.type(1.5))),
    "A": ("encoded", "A", lambda x: x.__setitem__((3, 1), 7)),
    "t": ("encoded", "t", lambda x: x.__setitem__((3, 0), 7)),
    "s": ("encoded", "s", lambda x: x.__setitem__((3, 0), 7)),
    "u": ("verified", "u", lambda x: x.__setitem__((4, 0), 7)),
}


def hook(stage: str, name: str, change: Any) -> Any:
    if change is None:
        return None

    def planted(reached: str, arrays: Any) -> None:
        if reached == stage and name in arrays:
            change(arrays[name])

    return planted


def products() -> Iterator[tuple[str, Any]]:
    for dtype in ("float64", "float32", "float16", "bfloat16"):
        for m, k, n in ((20, 30, 10), (130, 70, 90), (64, 500, 48), (5, 3000, 7)):
            for order in ("CC", "FC", "CF", "FF"):
                for check in ("auto", "both"):
                    for fault, planted in FAULTS.items():
                        A, B = operands(m, k, n, dtype, order, 1)
                        options = {"check": check, "on_stage": hook(*planted), "return_report": True}
                        name = f"gemm {dtype} {m}x{k}x{n} {order} {check} {fault}"
                        yield name, lambda A=A, B=B, o=options: ft.protected_gemm(A, B, **o)
    for fault, planted in FAULTS.items():
        rng = np.random.default_rng(2)
        A, B, c = (rng.standard_normal(s) for s in ((3, 40, 30), (30, 20), (3, 40, 20)))
        o: dict[str, Any] = {"alpha": 0.5, "beta": -2.0, "on_stage": hook(*planted), "return_report": True}
        yield f"batch {fault}", lambda A=A, B=B, c=c, o=o: ft.protected_gemm(A, B, c, **o)
        A, B = rng.standard_normal((60, 50)), rng.standard_normal((50, 40))
        o = {"on_stage": hook(*planted), "return_report": True}
        for recheck in (True, False):
            E, F = ft.encode(A.copy(), recheck=recheck), ft.encode(B.copy(), repair=True, recheck=recheck)
            yield f"encoded {recheck} {fault}", lambda E=E, F=F, o=o: ft.protected_gemm(E, F, **o)
        C = A @ B
        if planted[2] is not None and planted[1] == "C":
            planted[2](C)
        yield f"verify {fault}", lambda A=A, B=B, C=C: (C, ft.verify_gemm(A, B, C, on_error="detect"))


LU_FAULTS: dict[str, Any] = {"clean": None}
for _stage in ("inputs", "encoded", "panel", "swapped", "solved", "updated", "verified", "factored"):
    LU_FAULTS[_stage] = _stage


def lu_hook(stage: str | None, scale: float) -> Any:
    seen: list[int] = []

    def planted(reached: str, arrays: Any) -> None:
        if reached == stage:
            seen.append(1)
            x = next(iter(arrays.values()))
            if len(seen) == 2 and hasattr(x, "shape") and x.ndim == 2 and min(x.shape) > 1:
                x[x.shape[0] // 2, x.shape[1] // 2] += scale

    return None if stage is None else planted


def factorisations() -> Iterator[tuple[str, Any]]:
    rng = np.random.default_rng(5)
    for dtype in ("float64", "float32"):
        for m, n in ((1, 1), (50, 50), (300, 300), (300, 120), (120, 300)):
            A = rng.standard_normal((m, n)).astype(dtype)
            for mode in ("online", "offline", "auto"):
                for stage in LU_FAULTS.values():
                    o = {"mode": mode, "on_stage": lu_hook(stage, 3.0), "return_report": True}
                    name = f"lu {dtype} {m}x{n} {mode} {stage}"
                    yield name, lambda A=A, o=o: flat(ft.protected_lu_factor(A, **o))
        A = rng.standard_normal((200, 200)).astype(dtype)
        b = rng.standard_normal((200, 3)).astype(dtype)
        S = (A @ A.T + 200 * np.eye(200)).astype(dtype)
        for stage in LU_FAULTS.values():
            o = {"on_stage": lu_hook(stage, 3.0), "return_report": True}
            yield f"cholesky {dtype} {stage}", lambda S=S, o=o: flat(ft.protected_cholesky(S, **o))
            yield f"solve {dtype} {stage}", lambda A=A, b=b, o=o: flat(ft.protected_solve(A, b, **o))


def flat(found: Any) -> tuple[Any, Any]:
    """Arrays of a factorisation as one, and its report."""
    *arrays, report = found
    parts: list[bytes] = []
    for one in arrays:
        parts += [np.ascontiguousarray(x).tobytes() for x in (one if isinstance(one, tuple) else (one,))]
    return np.frombuffer(b"".join(parts), np.uint8), report


def lines(cases: Iterator[tuple[str, Any]]) -> Iterator[str]:
    for name, call in cases:
        with ft.errstate(corrected="ignore"):
            try:
                result, report = call()
                yield f"{name}: {report.status.name} {digest(result)} {told(report)}"
            except ft.SilentDataCorruptionError as error:
                yield f"{name}: raised {error.report.status.name} {told(error.report)}"
            except Exception as error:
                yield f"{name}: {type(error).__name__}"


def trials(name: str, share: float) -> Iterator[str]:
    """Lines of a campaign, of which a share of the trials is carried out."""
    text = Path("benchmarks/campaigns", f"{name}.toml").read_text(encoding="utf-8")

    def fewer(found: re.Match[str]) -> str:
        return f"trials = {max(20, round(int(found[1].replace('_', '')) * share))}"

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.toml")
        file.write_text(re.sub(r"trials = ([\d_]+)", fewer, text), encoding="utf-8")
        try:
            abft_tsm2(["campaign", "run", str(file), "-o", str(Path(folder, "out")), "--jobs", "2", "-q"])
        except SystemExit as done:
            yield f"{name}: exit {done.code}"
        found = Path(folder, "out", "trials.jsonl").read_text(encoding="utf-8").splitlines()
        for line in sorted(json.dumps(without_prose(json.loads(one)), sort_keys=True) for one in found):
            yield f"{name}: {line}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-campaigns", action="store_true", help="products and factorisations only")
    options = parser.parse_args()
    for cases in (products(), factorisations()):
        for line in lines(cases):
            print(line)
    if not options.no_campaigns:
        for name, share in CAMPAIGNS.items():
            for line in trials(name, share):
                print(line)


if __name__ == "__main__":
    main()
