"""Campaign files: what is wrong in one is said with its place and the nearest right thing; what follows from one."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults import MODELS, SITES
from abft_tsm2.faults.campaign.file import OPERATIONS, Campaign, FaultEntry, Suite, load, parse
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.operands.pairs import PAIRS
from abft_tsm2.faults.operands.products import FAMILIES, operands
from abft_tsm2.faults.operands.wide import WIDE, decades_of
from abft_tsm2.faults.trials.schemes import SCHEMES
from abft_tsm2.faults.trials.storage import SCHEMES as STORED
from abft_tsm2.faults.trials.trial import OUTCOMES, Finding, Workload
from abft_tsm2.io.matrix import MatrixFileError

HEAD = '[[suite]]\nname = "small"\noperation = "gemm"\ntrials = 90\nshapes = [[8, 9, 7]]\n'
FAULT = '[[suite.fault]]\nmodel = "bit_flip"\n'
FILES = Path(__file__).resolve().parents[2] / "benchmarks" / "campaigns"


def suite(more: str = "", fault: str = "", **changes: str) -> str:
    """The text of a campaign of one suite: `more` in the suite, `fault` in its fault, `changes` of entries."""
    text = HEAD
    for name, value in changes.items():
        text = "".join(
            line if not line.startswith(f"{name} =") else f"{name} = {value}\n" for line in text.splitlines(True)
        )
    return f"{text}{more}\n{FAULT}{fault}\n"


WRONG = {
    "a typo in an entry": (suite("tpye = 3"), "unknown entry of a suite 'tpye'"),
    "a typo near an entry": (suite("per_scenes = 3"), "did you mean 'per_scene'"),
    "a typo at the top": ("sed = 3\n" + suite(), "unknown entry 'sed': did you mean 'seed'"),
    "a typo in a fault": (suite(fault="cuont = 2"), "unknown entry of a fault 'cuont': did you mean 'count'"),
    "a model": (
        suite(fault="").replace("bit_flip", "bitflip"),
        "unknown fault model 'bitflip': did you mean 'bit_flip'",
    ),
    "a site": (suite(fault='site = "prodct"'), "unknown site 'prodct': did you mean 'product'"),
    "a class of bits": (suite(fault='bits = "exponnt"'), "unknown class of bits 'exponnt': did you mean 'exponent'"),
    "a bit that is not there": (suite(fault="bits = 64"), "float64 has no bit 64: its bits are 0 to 63"),
    "of one of the types": (suite('dtypes = ["float64", "float16"]', "bits = 17"), "float16 has no bit 17"),
    "a scheme": (suite('schemes = ["protectd"]'), "unknown scheme 'protectd': did you mean 'protected'"),
    "no module of a scheme": (
        suite('schemes = ["nowhere:f"]'),
        "No module named 'nowhere'; it is to be module:function",
    ),
    "no function": (suite('schemes = ["tests.support.campaign_schemes:nothing"]'), "has no attribute 'nothing'"),
    "a type": (suite('dtypes = ["flot32"]'), "unknown dtype 'flot32': did you mean 'float32'"),
    "a family": (
        suite('families = ["normal", "unifrm"]'),
        "unknown family of operands 'unifrm': did you mean 'uniform'",
    ),
    "an order": (suite('orders = ["K"]'), "unknown order 'K'"),
    "an operation": (suite(operation='"gmm"'), "unknown operation 'gmm': did you mean 'gemm'"),
    "an option": (suite("options = {block = 3}"), "unknown option of gemm 'block': choose from 'out'"),
    "a site of a factorisation": (
        suite(fault='site = "lu.encoded_A"'),
        "'lu.encoded_A' cannot be planted into a product",
    ),
    "a site that a scheme has not": (
        suite('schemes = ["protected", "none"]', 'site = "u"'),
        "bit_flip at 'u' cannot be planted into a product under scheme 'none'",
    ),
    "an operand that was not stored": (suite(fault='site = "A.stored"'), "under scheme 'protected'"),
    "sums of a function": (suite('schemes = ["double"]', 'site = "s"'), "under scheme 'double'"),
    "a model of pivots": (suite().replace("bit_flip", "wrong_index"), "wrong_index at 'product' cannot be planted"),
    "one shape for many": (suite(shapes="[8, 9, 7]"), "an entry of shapes = 8 is to be a list"),
    "two sizes": (suite(shapes="[[8, 9]]"), r"shapes = \[\[8, 9\]\]: a list of \[m, k, n\], each at least 1"),
    "a size of 0": (suite(shapes="[[8, 0, 7]]"), "each at least 1"),
    "truth for a size": (suite(shapes="[[true, 9, 7]]"), r"shapes = \[\[True, 9, 7\]\]: a list of \[m, k, n\]"),
    "a size that no array has": (suite(shapes="[[9223372036854775807, 1, 1]]"), r"no matrix has 2\*\*63 bytes"),
    "a count that no array has": (suite(fault=f"count = {10**25}"), r"count = 10{25} is to be below 2\*\*63"),
    "a count above all shapes": (
        suite(fault="count = 100_000_000"),
        "count = 100000000: the largest matrix of the campaign has [0-9]+ elements",
    ),
    "a count in floating point": (suite(fault="count = 1e8"), "count = 100000000.0 is to be a whole number"),
    "no shape": (suite(shapes="[]"), r"shapes = \[\]"),
    "text for a number": (suite(trials='"many"'), "trials = 'many' is to be a whole number"),
    "a number for a count": (suite(fault="count = 1.5"), "count = 1.5 is to be a whole number"),
    "no count": (suite(fault="count = 0"), "count = 0"),
    "text for truth": (suite(fault='persistent = "no"'), "persistent = 'no' is to be true or false"),
    "one for many": (suite('schemes = "none"'), "schemes = 'none' is to be a list"),
    "none of many": (suite("dtypes = []"), "dtypes is empty"),
    "three factors": (
        suite(fault="factor = [1, 2, 3]"),
        r"factor = \[1, 2, 3\]: one number, or the smallest and the largest",
    ),
    "text for a factor": (suite(fault='factor = "x"'), "factor = 'x': one number"),
    "a factor that is no number": (suite(fault="factor = nan"), "factor = nan: one number"),
    "a factor without end": (suite(fault="factor = -inf"), "factor = -inf: one number"),
    "a factor of what is planted with it": (
        suite(fault='also = [{ model = "scaled", factor = nan }]'),
        "factor = nan: one number",
    ),
    "one of two factors": (suite(fault="factor = [nan, 2.0]"), r"factor = \[nan, 2.0\]: one number"),
    "a share of nothing": (suite(fault="share = 0"), "share = 0: a number above 0"),
    "clean above 1": (suite("clean = 1.5"), "clean = 1.5"),
    "too many trials": (suite(trials="1_000_000_000"), "trials = 1000000000: 10000000 at most"),
    "no trials": (suite(trials="0"), "trials = 0"),
    "one file": (suite('files = [["A.npy"]]'), "two names of files each"),
    "missing entries": ('[[suite]]\nname = "small"\n' + FAULT, "operation, trials, shapes missing"),
    "no fault": (HEAD, r"it has no \[\[suite.fault\]\]: add one, or say clean = 1.0"),
    "no model": (HEAD + "[[suite.fault]]\ncount = 2\n", "a fault has no model"),
    "two of one name": (suite() + suite(), "two suites have the same name"),
    "no suite": ("seed = 3\n", r"it has no \[\[suite\]\]: nothing to run"),
    "a negative seed": ("seed = -1\n" + suite(), "seed = -1"),
    "truth for a seed": ("seed = true\n" + suite(), "seed = True"),
    "a number for a name": ("name = 1\n" + suite(), "name = 1 is to be text"),
    "no time": ("timeout = 0\n" + suite(), "timeout = 0"),
    "a table for a list": ("[suite]\nname = 'small'\n", "suite = .* is to be a list"),
    "no TOML": ("seed = = 3\n" + suite(), "line 1"),
}
AT_THE_TOP = ("a typo at the top", "two of one name", "no suite", "a negative seed", "truth for a seed", "no time")
AT_THE_TOP += ("a table for a list", "no TOML", "a number for a name")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_with_its_place(name: str, tmp_path: Path) -> None:
    text, message = WRONG[name]
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(CampaignFileError, match=message) as error:
        load(path)
    said = str(error.value)
    assert said.startswith(f"{path}: " if name in AT_THE_TOP else f"{path}, suite small: ")
    assert "\n" not in said


def test_a_suite_without_a_name_has_a_number() -> None:
    with pytest.raises(CampaignFileError, match="the campaign, suite 2: name missing"):
        parse(suite() + suite().replace('name = "small"\n', ""))


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "no.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CampaignFileError, match=rf"cannot read {path}: .*; name a campaign file, .toml"):
        load(path)


@pytest.mark.parametrize("path", sorted(FILES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_campaigns_of_the_repository_can_be_read(path: Path) -> None:
    campaign = load(path)
    assert campaign.trials > 0
    assert campaign.text == path.read_text()


def test_defaults_and_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a name.toml"
    path.write_text(suite())
    campaign = load(path)
    assert (campaign.name, campaign.seed, campaign.timeout, campaign.trials) == ("a name", 0, 60.0, 90)
    (one,) = campaign.suites
    assert (one.schemes, one.clean, one.dtypes, one.families, one.orders) == (
        *(("protected",), 0.1, ("float64",), ("normal",), ("C",)),
    )


# ---- what follows --------------------------------------------------------------------------------------------------

MANY = """seed = 11
[[suite]]
name = "first"
operation = "gemm"
trials = 3001
per_scene = 50
clean = 0.25
shapes = [[8, 9, 7], [5, 6, 4]]
dtypes = ["float64", "float32"]
families = ["normal", "relu"]
orders = ["C", "F"]
schemes = ["protected", "none", "double"]
[[suite.fault]]
model = "bit_flip"
share = 3
[[suite.fault]]
model = "offset"
factor = [1e-6, 1.0]
[[suite.fault]]
model = "nan"
share = 0.5
also = [{model = "inf", site = "B"}, {model = "scaled", factor = 3.0}]

[[suite]]
name = "second"
operation = "gemm"
trials = 10
clean = 1.0
shapes = [[3, 3, 3]]
"""


@pytest.fixture(scope="module")
def many() -> Campaign:
    return parse(MANY)


def test_all_schemes_see_the_same_faults_and_operands(many: Campaign) -> None:
    for first in range(0, 3000, 3):
        trials = [many.trial(number) for number in range(first, first + 3)]
        assert [trial.scheme for trial in trials] == ["protected", "none", "double"]
        assert trials[0].plans == trials[1].plans == trials[2].plans
        assert many.place(first) == many.place(first + 2)


def test_trials_are_numbered_through_and_each_belongs_to_one_scene(many: Campaign) -> None:
    found = []
    for index, one in enumerate(many.suites):
        for scene in range(one.scenes):
            numbers = [many.first(index) + number for number in one.numbers(scene)]
            assert {many.place(number) for number in numbers} == {(index, scene)}
            found += numbers
    assert found == list(range(many.trials)) == list(range(3011))
    assert [many.trial(number).number for number in (0, 17, 3010)] == [0, 17, 3010]
    for number in (-1, 3011):
        with pytest.raises(IndexError, match=f"the campaign has trials 0 to 3010, not {number}"):
            many.place(number)


def test_a_trial_does_not_depend_on_the_others(many: Campaign) -> None:
    alone = parse(MANY.split("\n\n")[0])  # without the second suite
    longer = parse(MANY.replace("trials = 3001", "trials = 6000"))
    for number in (0, 1, 77, 2999):
        assert many.trial(number) == alone.trial(number) == longer.trial(number)
        at = many.place(number)
        assert many.workload(*at) == alone.workload(*at) == longer.workload(*at)
    assert parse(MANY.replace("seed = 11", "seed = 12")).trial(0) != many.trial(0)


def test_plans_of_different_trials_differ(many: Campaign) -> None:
    seeds = Counter(plan.seed for number in range(0, 3000, 3) for plan in many.trial(number).plans)
    assert max(seeds.values()) == 1


def test_shares_are_respected(many: Campaign) -> None:
    cases = [many.trial(number) for number in range(0, 3000, 3)]
    kinds = Counter(" + ".join(plan.model for plan in trial.plans) for trial in cases)
    assert set(kinds) == {"", "bit_flip", "offset", "nan + inf + scaled"}
    for kind, share in (("", 0.25), ("bit_flip", 0.5), ("offset", 1 / 6), ("nan + inf + scaled", 1 / 12)):
        deviation = math.sqrt(share * (1 - share) / len(cases))
        assert abs(kinds[kind] / len(cases) - share) < 4 * deviation
    assert all(many.trial(number).plans == () for number in range(3001, 3011))


def test_what_is_planted_with_a_fault_has_parameters_of_its_own(many: Campaign) -> None:
    trial = next(many.trial(n) for n in range(3000) if len(many.trial(n).plans) == 3)
    one, two, three = trial.plans
    assert [(plan.model, plan.site, plan.factor) for plan in trial.plans] == [
        *(("nan", "product", 2.0), ("inf", "B", 2.0), ("scaled", "product", 3.0)),
    ]
    assert len({one.seed, two.seed, three.seed}) == 3


def test_sizes_between_two_factors_are_spread_over_decades(many: Campaign) -> None:
    plans = [plan for number in range(0, 3000, 3) for plan in many.trial(number).plans if plan.model == "offset"]
    decades = np.log10([plan.factor for plan in plans])
    assert -6 <= decades.min() < -5.5
    assert -0.5 < decades.max() <= 0
    assert abs(decades.mean() + 3) < 4 * math.sqrt(3 / len(plans))


def test_scenes_take_turns_among_shapes_types_families_and_orders(many: Campaign) -> None:
    scenes: Any = [many.workload(0, scene) for scene in range(many.suites[0].scenes)]
    assert {(w.m, w.k, w.n) for w in scenes} == {(8, 9, 7), (5, 6, 4)}
    for name, values in (("dtype", "float64 float32"), ("family", "normal relu"), ("order", "C F")):
        assert {getattr(w, name) for w in scenes} == set(values.split())


def test_a_bit_may_be_a_number_or_its_text() -> None:
    one, other = (parse(suite("clean = 0.0", f"bits = {bits}")) for bits in ("3", '"3"'))
    assert one.trial(0) == other.trial(0)
    assert one.trial(0).plans[0].bits == "3"


@pytest.mark.parametrize("bits", ["63", "40"])
def test_checksums_have_the_bits_of_float64_whatever_the_operands_are(bits: str) -> None:
    campaign = parse(suite('dtypes = ["float32"]\nclean = 0.0', f'bits = {bits}\nsite = "t"'))
    assert campaign.trial(0).plans[0].bits == bits


# ---- operands ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("family", [*FAMILIES, *WIDE])
def test_operands_follow_from_the_seed(family: str, order: str, dtype: str) -> None:
    w = Workload("gemm", 20, 30, 10, dtype, family, order, (1, 2, 3))
    A, B = operands(w)
    assert (A.shape, B.shape, A.dtype.name, B.dtype.name) == ((20, 30), (30, 10), dtype, dtype)
    assert A.flags[f"{order}_CONTIGUOUS"]
    assert np.isfinite(A.astype(float)).all()
    again = operands(w)
    other = operands(Workload("gemm", 20, 30, 10, dtype, family, order, (1, 2, 4)))
    assert (A.tobytes(), B.tobytes()) == (again[0].tobytes(), again[1].tobytes())
    assert A.tobytes() != other[0].tobytes()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", WIDE)
def test_operands_over_the_range_are_normal_numbers_and_so_is_their_product(family: str, dtype: str) -> None:
    kind = FLOATS[dtype]
    for seed in range(5):
        for m, k, n in ((1, 1, 1), (7, 2, 3), (20, 300, 10)):
            A, B = (x.astype(np.longdouble) for x in operands(Workload("gemm", m, k, n, dtype, family, "C", (seed,))))
            for x in (A, B):
                assert (abs(x[x != 0]) >= kind.smallest_normal).all()
                assert (abs(x) <= kind.largest).all()
            assert (abs(A) @ abs(B) <= kind.largest).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_families_reach_as_far_as_they_say(dtype: str) -> None:
    def spread(family: str, of: int, axis: int) -> float:
        x = abs(operands(Workload("gemm", 60, 300, 60, dtype, family, "C", (1,)))[of].astype(float)).max(axis=axis)
        return float(np.log10(x.max()) - np.log10(x[x > 0].min()))

    there = decades_of(FLOATS[dtype])
    assert spread("factorials", 0, 0) > 0.8 * there
    assert spread("wide inside", 1, 1) > 0.3 * there
    assert spread("sentinel", 0, 0) + spread("sentinel", 1, 1) > 0.3 * there
    assert spread("graded columns", 1, 0) > min(28.0, 1.4 * there - 2)
    assert spread("graded lines", 0, 1) > min(28.0, 0.7 * there - 2)


def test_operands_of_ones_own_are_read_and_cut(tmp_path: Path) -> None:
    whole = np.arange(30.0).reshape(5, 6), np.arange(42.0).reshape(6, 7)
    for name, x in zip("AB", whole, strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    pair = f"{tmp_path}/A.npy", f"{tmp_path}/B.npy"
    campaign = parse(
        suite(f'families = ["normal"]\nfiles = [["{pair[0]}", "{pair[1]}"]]\nper_scene = 1', shapes="[[4, 5, 3]]")
    )
    kinds = Counter(campaign.workload(0, scene).family for scene in range(90))
    assert set(kinds) == {"normal", f"file:{pair[0]},{pair[1]}"}
    assert min(kinds.values()) > 25
    w = next(w for w in (campaign.workload(0, scene) for scene in range(90)) if w.family != "normal")
    A, B = operands(w)
    np.testing.assert_array_equal(A, whole[0][:4, :5])
    np.testing.assert_array_equal(B, whole[1][:5, :3])
    with pytest.raises(MatrixFileError, match=r"A\.npy is 5 x 6, the campaign wants 9 x 5 of it"):
        operands(Workload("gemm", 9, 5, 3, "float64", w.family, "C", (0,)))


# ---- the documentation ---------------------------------------------------------------------------------------------

NAMES = {
    "model": MODELS,
    "site": SITES,
    "scheme": [*SCHEMES, *STORED],
    "outcome": OUTCOMES,
    "entry of a suite": [f.name for f in fields(Suite)],
    "entry of a fault": [f.name for f in fields(FaultEntry)],
    "operation": OPERATIONS,
    "family": {**FAMILIES, **PAIRS, **WIDE},
    "field of a line": [
        "trial",
        "scene",
        "bits",
        "persistent",
        "single",
        *(f.name for f in fields(Finding) if f.name != "report"),
    ],
}


@pytest.mark.parametrize("kind", NAMES)
def test_the_documentation_has_every_name(kind: str) -> None:
    page = (FILES.parents[1] / "docs" / "campaigns.rst").read_text(encoding="utf-8")
    assert [name for name in NAMES[kind] if f"``{name}``" not in page] == []
