"""The report: plain data, exact round trips, a schema that refuses what is broken, and a readable text."""

from __future__ import annotations

import doctest
import gc
import itertools
import json
import math
import pickle
import weakref
from dataclasses import FrozenInstanceError, replace

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import abft_tsm2.report
from abft_tsm2.report import KINDS, PRECEDENCE, SIDES, Check, Fault, Report, Status, by_precedence

counts = st.integers(0, 10**12)
sizes = st.floats(min_value=0.0) | st.just(math.nan)  # includes inf
positions = st.lists(st.integers(0, 10**6), max_size=4).map(tuple)
texts = st.text(st.characters(codec="utf-8"), max_size=8)
finished = st.sampled_from(PRECEDENCE)

faults = st.builds(
    Fault,
    operand=texts,
    kind=st.sampled_from(KINDS),
    rows=positions,
    columns=positions,
    elements=counts,
    magnitude=sizes,
    repair=texts,
)
checks = st.builds(
    Check,
    side=st.sampled_from(SIDES),
    vectors=counts,
    lines=counts,
    verified=counts,
    bound=sizes,
    closest=sizes,
    closest_line=st.integers(-1, 10**9),
    detection_limit=sizes,
)
fields = {
    "status": st.sampled_from(Status),
    "operation": texts,
    "m": counts,
    "k": counts,
    "n": counts,
    "dtype": texts,
    "checks": st.lists(checks, max_size=2).map(tuple),
    "faults": st.lists(faults, max_size=3).map(tuple),
    "suspicions": counts,
    "recomputed": sizes,
    "also": st.lists(st.sampled_from(Status), max_size=3, unique=True).map(tuple),
    "reasons": st.lists(texts, max_size=3).map(tuple),
    "seconds": st.dictionaries(texts, sizes, max_size=4),
    "index": positions,
}
products = st.builds(Report, **fields)
reports = st.builds(Report, **fields, products=st.lists(products, max_size=2).map(tuple))

VALIDATOR = jsonschema.Draft202012Validator(Report.schema())


def example(status: Status = Status.CORRECTED, **changes: object) -> Report:
    report = Report(
        status,
        "gemm",
        256,
        4096,
        300,
        "float32",
        checks=(Check("rows", 1, 256, 256, 1.2e-5, 0.31, 17, 3.4e-4),),
        faults=(Fault("C", "element", (17,), (203,), 1, 3.2e7, "recomputed"),),
        suspicions=2,
        recomputed=1 / 256,
        seconds={"encode": 0.25, "multiply": 2.5, "verify": 0.125, "correct": 0.0625},
    )
    return replace(report, **changes)


def refuse_token(token: str) -> None:
    raise AssertionError(f"{token} is not JSON")


@given(reports)
@settings(max_examples=150, deadline=None)
def test_every_report_survives_json_and_pickle_and_satisfies_the_schema(report: Report) -> None:
    text = report.to_json()
    data = json.loads(text, parse_constant=refuse_token)
    VALIDATOR.validate(data)
    assert data == report.to_dict()
    assert Report.from_dict(data) == report
    assert Report.from_dict(report.to_dict()) == report
    assert pickle.loads(pickle.dumps(report)) == report
    assert json.loads(report.to_json(indent=2)) == data
    assert len(str(report).splitlines()) >= 3


def test_the_schema_is_itself_valid_and_names_the_version() -> None:
    jsonschema.Draft202012Validator.check_schema(Report.schema())
    assert Report.schema()["properties"]["schema"] == {"const": "abft_tsm2/report/1"}
    batch = Report.merge([example(index=(0,)), example(index=(1,))], operation="gemm").to_dict()
    assert [batch["schema"], *(product["schema"] for product in batch["products"])] == ["abft_tsm2/report/1"] * 3


def test_the_schema_lists_the_same_choices_as_the_code() -> None:
    schema = Report.schema()["$defs"]
    assert schema["status"]["enum"] == [status.name for status in Status]
    assert tuple(schema["fault"]["properties"]["kind"]["enum"]) == KINDS
    assert tuple(schema["check"]["properties"]["side"]["enum"]) == SIDES


BREAKAGES = {
    "another schema": lambda data: data.update(schema="abft_tsm2/report/2"),
    "unknown status": lambda data: data.update(status="FINE"),
    "message for a name": lambda data: data.update(status=Status.CLEAN.value),
    "unknown field": lambda data: data.update(colour="red"),
    "number as text": lambda data: data.update(m="256"),
    "negative size": lambda data: data.update(k=-1),
    "fraction of a row": lambda data: data["faults"][0].update(rows=[1.5]),
    "negative infinity": lambda data: data["faults"][0].update(magnitude="-Infinity"),
    "null magnitude": lambda data: data["faults"][0].update(magnitude=None),
    "unknown kind": lambda data: data["faults"][0].update(kind="corner"),
    "unknown side": lambda data: data["checks"][0].update(side="diagonal"),
    "closest line below -1": lambda data: data["checks"][0].update(closest_line=-2),
    "time as text": lambda data: data["seconds"].update(verify="fast"),
    "a status twice": lambda data: data.update(also=["UNVERIFIABLE", "UNVERIFIABLE"]),
    "broken product": lambda data: data["products"][0].pop("status"),
    **{f"no {name}": lambda data, name=name: data.pop(name) for name in example().to_dict()},
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_dict_fails_validation(name: str) -> None:
    data = example(products=(example(),)).to_dict()
    VALIDATOR.validate(data)
    BREAKAGES[name](data)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(data)


def test_from_dict_says_what_is_wrong() -> None:
    data = example().to_dict()
    with pytest.raises(ValueError, match=r"cannot read schema 'abft_tsm2/report/9': .* 'abft_tsm2/report/1'"):
        Report.from_dict({**data, "schema": "abft_tsm2/report/9"})
    with pytest.raises(ValueError, match="not a Report: m, also missing"):
        Report.from_dict({name: value for name, value in data.items() if name not in ("m", "also")})
    with pytest.raises(ValueError, match="unknown status 'FINE': choose one of CLEAN, CORRECTED"):
        Report.from_dict({**data, "status": "FINE"})
    for wrong in ([], None, 1, "CLEAN", [data]):
        with pytest.raises(ValueError, match="not a Report, which is a mapping of names to values"):
            Report.from_dict(wrong)  # type: ignore[arg-type]
    for name, wrong in {
        **dict.fromkeys(("m", "suspicions"), 1.5),
        **dict.fromkeys(("dtype", "operation", "mode"), 5),
        **{key: [[]] for key in ("checks", "faults", "products")},
        **dict.fromkeys(("reasons", "also", "index"), "CLEAN"),
        "seconds": [],
        "recomputed": "much",
        "status": None,
    }.items():
        for value in (wrong, None, {"a": "b"}):
            with pytest.raises(ValueError, match=rf"Report\.{name} is "):
                Report.from_dict({**data, name: value})
    for name in ("m", "k", "n", "suspicions"):
        with pytest.raises(ValueError, match=f"{name} = -1 of a Report: at least 0"):
            Report.from_dict({**data, name: -1})
    with pytest.raises(ValueError, match="closest_line = -2 of a Check: at least -1"):
        Report.from_dict({**data, "checks": [{**data["checks"][0], "closest_line": -2}]})
    with pytest.raises(ValueError, match=r"Report\.recomputed is 1000.*: int too large"):
        Report.from_dict({**data, "recomputed": 10**400})
    with pytest.raises(ValueError, match="not a Fault: rows missing"):
        Report.from_dict({**data, "faults": [{"operand": "C", "kind": "element"} | dict.fromkeys(
            ("columns", "elements", "magnitude", "repair"), 0)]})  # fmt: skip


def test_numpy_values_become_plain_ones() -> None:
    rows, columns = np.nonzero(np.eye(3, dtype=bool))
    fault = Fault("C", np.str_("block"), rows, columns, np.int64(3), np.float32(np.inf), "recomputed")
    check = Check("rows", np.int8(1), np.uint64(2**63), np.intp(5), np.float16(0.5), np.float64(0.25), -1, 0)
    report = Report(
        Status.CLEAN, "gemm", np.int32(3), np.bool_(True).item(), 3, np.dtype(np.float32), [check], [fault],
        np.int64(1), np.float32(0.5), index=np.array([0, 2]), seconds={"encode": np.float64(0.5)},
    )  # fmt: skip
    plain = report.to_dict()
    assert json.loads(report.to_json()) == plain
    VALIDATOR.validate(plain)
    assert plain["faults"][0]["rows"] == [0, 1, 2]
    assert plain["faults"][0]["magnitude"] == "Infinity"
    assert (report.dtype, report.k, report.index) == ("float32", 1, (0, 2))
    assert type(report.k) is int  # JSON would print a bool as true

    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)] + list(value)
        return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]

    assert {type(leaf) for leaf in leaves(plain)} <= {int, float, str, bool}


def test_a_report_keeps_no_array_alive() -> None:
    positions = np.arange(3)
    fault = Fault("C", "row", positions, positions[:1], positions.size, positions.max(), "recomputed")
    report = example(faults=[fault], index=positions)
    dead = weakref.ref(positions)
    del positions
    gc.collect()
    assert dead() is None
    assert report.faults[0].rows == (0, 1, 2)


def test_wrong_values_are_refused_and_fields_are_frozen() -> None:
    with pytest.raises(ValueError, match="unknown side 'diagonal': choose one of rows, columns"):
        Check("diagonal", 1, 1, 1, 0.0, 0.0, -1, 0.0)
    with pytest.raises(ValueError, match="unknown kind 'corner': choose one of element, row"):
        Fault("C", "corner", (), (), 1, 0.0)
    with pytest.raises(ValueError, match="unknown status 7"):
        example(status=7)
    with pytest.raises(TypeError):
        example(m=1.5)
    with pytest.raises(FrozenInstanceError):
        example().m = 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(example())


def test_equality_sees_every_field_and_a_nan_equals_itself() -> None:
    nan = Fault("C", "element", (1,), (2,), 1, float("nan"))
    assert nan == Fault("C", "element", (1,), (2,), 1, float("nan"))
    assert example(faults=(nan,)) == example(faults=(replace(nan),))
    changes = {
        "status": Status.CLEAN, "operation": "encoded", "m": 1, "k": 1, "n": 1, "dtype": "float64",
        "checks": (), "faults": (nan,), "suspicions": 0, "recomputed": math.nan,
        "also": (Status.UNVERIFIABLE,), "reasons": ("so",), "seconds": {}, "index": (0,),
        "products": (example(),),
    }  # fmt: skip
    for name, value in changes.items():
        assert example(**{name: value}) != example(), name
    assert example() != 3


def test_ok_needs_every_status_that_holds_to_be_fine() -> None:
    fine = {Status.CLEAN, Status.CORRECTED, Status.CHECKSUM_FAULT}
    for status in Status:
        assert example(status).ok is (status in fine)
        for also in Status:
            assert example(status, also=(also,)).ok is (status in fine and also in fine)


def test_what_could_not_be_checked_is_no_fault() -> None:
    def report(status: Status, *also: Status) -> Report:
        return Report(status, "gemm", 1, 1, 1, "float64", also=also)

    assert not any(report(status).faulty for status in (Status.CLEAN, Status.UNVERIFIABLE, Status.PENDING))
    repaired = (Status.CORRECTED, Status.CHECKSUM_FAULT, Status.INPUT_CHANGED, Status.UNCORRECTABLE)
    assert all(report(status).faulty for status in repaired)
    assert report(Status.UNVERIFIABLE, Status.CHECKSUM_FAULT).faulty


def test_workers_are_charged_with_the_faults_that_were_found_there() -> None:
    def report(worker: str, *found: Fault, status: Status = Status.CORRECTED) -> Report:
        return Report(status, "gemm", 1, 1, 1, "float64", faults=found, worker=worker, host="here", device="cpu")

    fault = Fault("C", "element", (0,), (0,), 1, 1.0, "recomputed")
    there = replace(fault, worker="other", host="there", device="GPU")
    tasks = (report("one", fault, fault), report("one", there, fault), report("one", status=Status.UNCORRECTABLE))
    tasks += (report("one", status=Status.UNVERIFIABLE), report("", fault))
    whole = replace(report("", status=Status.UNCORRECTABLE), products=tasks)
    assert whole.by_worker() == {
        "one": {"host": "here", "device": "cpu", "tasks": 4, "faulty": 3, "faults": (fault, fault, fault)},
        "other": {"host": "there", "device": "GPU", "tasks": 0, "faulty": 1, "faults": (there,)},
    }
    assert report("", fault).by_worker() == {}


def test_closest_and_total_seconds() -> None:
    check = example().checks[0]
    assert example(checks=()).closest == 0.0
    ratios = (0.1, math.nan, 0.7, 0.2)
    for order in itertools.permutations(ratios):
        assert example(checks=tuple(replace(check, closest=ratio) for ratio in order)).closest == 0.7
    assert example().total_seconds == 2.9375
    assert example(seconds={}).total_seconds == 0.0


def test_precedence_of_every_set_of_statuses() -> None:
    order = ["UNCORRECTABLE", "INPUT_CHANGED", "CORRECTED", "UNVERIFIABLE", "CHECKSUM_FAULT", "CLEAN"]
    assert [status.name for status in PRECEDENCE] == order
    for size in range(1, 7):
        for held in itertools.permutations(Status, size):
            names = [name for name in order if Status[name] in held]
            if Status.PENDING in held:
                if size > 1:
                    with pytest.raises(ValueError, match="PENDING cannot be combined"):
                        by_precedence(held)
                continue
            status, also = by_precedence(held)
            assert status.name == names[0]
            assert [other.name for other in also] == [name for name in names[1:] if name != "CLEAN"]
    assert by_precedence([]) == (Status.CLEAN, ())
    assert by_precedence([Status.PENDING, Status.PENDING]) == (Status.PENDING, ())


def test_merge_summarises_a_batch() -> None:
    clean = example(Status.CLEAN, faults=(), suspicions=3, recomputed=0.0, index=(0,), seconds={"multiply": 1.0})
    unverifiable = example(
        Status.UNVERIFIABLE,
        faults=(),
        index=(1,),
        also=(Status.CHECKSUM_FAULT,),
        reasons=("row 5 of A holds NaN",),
    )
    corrected = example(index=(2,), recomputed=0.5, reasons=("row 5 of A holds NaN", "x"))
    batch = Report.merge([clean, unverifiable, corrected], operation="verify_gemm")
    assert (batch.status, batch.also) == (Status.CORRECTED, (Status.UNVERIFIABLE, Status.CHECKSUM_FAULT))
    assert (batch.operation, batch.m, batch.k, batch.n, batch.dtype) == (
        "verify_gemm",
        256,
        4096,
        300,
        "float32",
    )
    assert batch.suspicions == 7
    assert batch.recomputed == pytest.approx((1 / 256 + 0.5) / 3)
    assert batch.seconds == {"multiply": 6.0, "encode": 0.5, "verify": 0.25, "correct": 0.125}
    assert batch.reasons == ("row 5 of A holds NaN", "x")
    assert batch.products == (clean, unverifiable, corrected)
    assert (batch.checks, batch.faults, batch.closest) == ((), (), 0.31)
    assert not batch.ok
    VALIDATOR.validate(json.loads(batch.to_json()))
    assert Report.from_dict(json.loads(batch.to_json())) == batch


def test_merge_refuses_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match="a batch has products"):
        Report.merge([], operation="gemm")
    with pytest.raises(ValueError, match="all of one"):
        Report.merge([example(), example(n=7)], operation="gemm")
    with pytest.raises(ValueError, match="PENDING"):
        Report.merge([example(Status.PENDING), example()], operation="gemm")
    assert Report.merge([example(Status.PENDING)] * 2, operation="gemm").status is Status.PENDING


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "C[17, 203] was off by 3.2e+07: recomputed"),
        ({"repair": ""}, "C[17, 203] was off by 3.2e+07: not repaired"),
        ({"magnitude": math.nan}, "C[17, 203] was off by nan: recomputed"),
        ({"rows": (), "elements": 256}, "C[:, 203] (256 elements) was off by up to 3.2e+07: recomputed"),
        ({"rows": (4, 5, 6), "columns": (9, 8)}, "C[4:7, [9, 8]] was off by 3.2e+07: recomputed"),
        ({"rows": (0, 2 * 10**18)}, "C[[0, 2000000000000000000], 203] was off by 3.2e+07: recomputed"),
        ({"rows": (1, 3, 5, 7, 9)}, "C[[1, 3, 5, 7, ... 5 in all], 203] was off by 3.2e+07: recomputed"),
    ],
)
def test_a_fault_reads_as_a_sentence(changes: dict[str, object], text: str) -> None:
    assert str(replace(example().faults[0], **changes)) == text


def test_the_text_of_a_report() -> None:
    assert str(example(also=(Status.UNVERIFIABLE,), reasons=("row 5 of A holds NaN",))).splitlines() == [
        "gemm m=256 k=4096 n=300 float32: CORRECTED, faults were found and repaired; "
        "also UNVERIFIABLE, a part could not be checked",
        "  checked: 256 of 256 rows, 1 checksum vector, bound 1.2e-05, "
        "closest clean residual 0.31 of its bound (row 17), sure to find a change of 0.00034",
        "  fault: C[17, 203] was off by 3.2e+07: recomputed",
        "  suspicions: 2, cleared by recomputing them",
        "  recomputed: 0.39 % of the multiplications",
        "  reason: row 5 of A holds NaN",
        "  time: encode 0.25 s, multiply 2.5 s, verify 0.125 s, correct 0.0625 s, total 2.94 s",
    ]


def test_the_shortest_text_and_a_long_one() -> None:
    lines = str(Report(Status.CLEAN, "gemm", 0, 3, 4, "float64")).splitlines()
    assert lines[1:] == ["  checked: nothing", "  time: not taken"]
    fault = example().faults[0]
    text = str(example(faults=tuple(replace(fault, rows=(row,)) for row in range(25)), reasons=tuple("abcde")))
    assert text.count("  fault: ") == 10
    assert "C[9, 203]" in text
    assert "C[10, 203]" not in text
    assert "  and 15 more faults\n" in text
    assert "  and 2 more reasons\n" in text
    sides = example(checks=(example().checks[0], Check("columns", 2, 300, 0, math.nan, 0.0, -1, math.inf)))
    assert "  checked: 0 of 300 columns, 2 checksum vectors, bound nan, sure to find a change of inf\n" in str(sides)


def test_the_text_of_a_batch_shows_the_worst_first() -> None:
    clean = [example(Status.CLEAN, faults=(), suspicions=0, index=(0, number)) for number in range(9)]
    repaired = [example(index=(1, number), faults=example().faults * 3) for number in range(6)]
    lost = example(Status.UNCORRECTABLE, index=(2, 7), faults=(), reasons=("C is read-only",))
    lines = str(Report.merge([*clean, *repaired, lost], operation="gemm")).splitlines()
    assert lines[0].startswith("gemm batch of 16, each m=256 k=4096 n=300 float32: UNCORRECTABLE, the result is")
    assert lines[1:8] == [
        "  statuses: 1 UNCORRECTABLE, 6 CORRECTED, 9 CLEAN",
        "  closest clean residual: 0.31 of its bound (product [0, 0])",
        "  product: [2, 7] UNCORRECTABLE: C is read-only",
        *(
            f"  product: [1, {number}] CORRECTED: C[17, 203] was off by 3.2e+07: recomputed (and 2 more)"
            for number in range(4)
        ),
    ]
    assert lines[8] == "  and 2 more products"
    assert lines[-1].startswith("  time: encode 4 s")


def test_docstring_examples() -> None:
    results = doctest.testmod(abft_tsm2.report)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_second_look_adds_to_the_first() -> None:
    fault = Fault("C", "element", (1,), (2,), 1, 3.0, "recomputed")
    other = replace(fault, rows=(5,))
    sizes = ("gemm", 8, 8, 8, "float32")
    first = Report(Status.CORRECTED, *sizes, faults=(fault,), suspicions=1, reasons=("a",), index=(3,))
    clean = Report(Status.CLEAN, *sizes, reasons=("a", "b"))
    assert first.followed_by(clean) == replace(first, reasons=("a", "b"))
    assert clean.followed_by(clean) == clean
    worse = first.followed_by(Report(Status.UNCORRECTABLE, *sizes, faults=(other,)))
    assert (worse.status, worse.also, worse.faults) == (Status.UNCORRECTABLE, (Status.CORRECTED,), (fault, other))
    batch = Report.merge([first, clean], operation="gemm").followed_by(Report.merge([clean, clean], operation="gemm"))
    assert [one.status for one in batch.products] == [Status.CORRECTED, Status.CLEAN]


def test_its_repr_has_what_is_not_as_usual() -> None:
    report = Report(Status.CLEAN, "gemm", 2, 3, 4, "float64", index=(5,))
    assert repr(report) == ("Report(status=Status.CLEAN, operation='gemm', m=2, k=3, n=4, dtype='float64', index=(5,))")
    assert eval(repr(report)) == report
    assert eval(repr(example())) == example()


def test_its_repr_is_short_whatever_was_found() -> None:
    fault = Fault("C", "rows", tuple(range(0, 5000, 2)), (), 5000, math.inf)
    assert "rows=(0, 2, 4, 6, ... 2500 in all)" in repr(fault)
    entries = [example(faults=(fault,) * 1000, index=(i,)) for i in range(1000)]
    assert len(repr(entries[0])) < 2000
    batch = Report.merge(entries, operation="gemm")
    assert repr(batch).endswith("products=<1000 reports>)")
    assert len(repr(batch)) < 500
