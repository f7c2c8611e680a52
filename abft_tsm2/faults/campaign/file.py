"""The campaign file, read and checked: suites of operations, faults and schemes, and the trials that follow.

Everything follows from the file and a trial's number: operands, fault, and all random choices.
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from abft_tsm2.arrays import FLOATS
from abft_tsm2.faults.campaign.folder import CampaignFileError
from abft_tsm2.faults.plan import Plan, bits_of, require_known
from abft_tsm2.faults.sites import SUMS
from abft_tsm2.faults.trials.trial import Trial, Workload
from abft_tsm2.io.atomic import short

FACTORISATIONS = ("lu", "solve", "lu_solve", "cholesky", "cho_solve")
OPERATIONS = ("gemm", "verify", *FACTORISATIONS, "storage")
ORDERS = ("C", "F")
BEYOND = 2**63  # what no number of anything reaches
MOST = 10**7  # trials of a suite: their numbers are kept in memory


@dataclass(frozen=True)
class FaultEntry:
    """A kind of fault of a suite; parameters are those of `Plan`, and

    share : float
        How often it is chosen, relative to the other kinds.
    factor : float, or two of them
        Two: a size between them, all decades being equally likely.
    also : tuple of Fault
        Faults that are planted with it.
    """

    model: str
    site: str = "product"
    bits: str = "any"
    count: int = 1
    factor: float | tuple[float, float] = 2.0
    persistent: bool = False
    visit: int = 0
    share: float = 1.0
    also: tuple[FaultEntry, ...] = ()

    def plans(self, seed: tuple[int, ...]) -> tuple[Plan, ...]:
        """The faults of one trial."""
        factor: Any = self.factor
        if isinstance(factor, tuple):
            low, high = map(math.log, factor)
            factor = math.exp(np.random.default_rng([*seed, 0xFAC]).uniform(low, high))
        one = Plan(self.model, self.site, str(self.bits), self.count, factor, self.persistent, self.visit, seed)
        others = (plan for i, other in enumerate(self.also) for plan in other.plans((*seed, i + 1)))
        return one, *others


@dataclass(frozen=True)
class Suite:
    """Trials of one operation.

    Parameters
    ----------
    name, operation : str
    trials : int
        Of all schemes together.
    shapes : tuple of (m, k, n)
    fault : tuple of Fault
        Kinds of faults, of which each trial has one.
    schemes : tuple of str
        Each sees the same operands and the same faults.
    clean : float
        The share of trials without a fault.
    per_scene : int
        How many trials of each scheme share operands.
    dtypes, families, orders : tuple of str
        Drawn for each scene, the group of trials that share operands.
    files : tuple of (A, B)
        Matrix files, which take their turn among the families.
    options : mapping
        Further options of the operation.
    """

    name: str
    operation: str
    trials: int
    shapes: tuple[tuple[int, int, int], ...]
    fault: tuple[FaultEntry, ...]
    schemes: tuple[str, ...] = ("protected",)
    clean: float = 0.1
    per_scene: int = 64
    dtypes: tuple[str, ...] = ("float64",)
    families: tuple[str, ...] = ("normal",)
    orders: tuple[str, ...] = ("C",)
    files: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def scenes(self) -> int:
        return -(-self.trials // (self.per_scene * len(self.schemes)))

    def numbers(self, scene: int) -> range:
        """The trials of a scene, counted within the suite."""
        size = self.per_scene * len(self.schemes)
        return range(scene * size, min((scene + 1) * size, self.trials))


@dataclass(frozen=True)
class Campaign:
    """Suites, whose trials are numbered one after the other.

    Attributes
    ----------
    name : str
    seed : int
        Of everything.
    timeout : float
        Seconds after which a trial counts as hung.
    suites : tuple of Suite
    text : str
        The file it was read from.
    """

    name: str
    seed: int
    timeout: float
    suites: tuple[Suite, ...]
    text: str

    @property
    def trials(self) -> int:
        return sum(suite.trials for suite in self.suites)

    def first(self, suite: int) -> int:
        """The number of a suite's first trial."""
        return sum(one.trials for one in self.suites[:suite])

    def place(self, number: int) -> tuple[int, int]:
        """Suite and scene of a trial; IndexError where there is none of that number."""
        at = number
        for index, suite in enumerate(self.suites):
            if 0 <= at < suite.trials:
                return index, at // (suite.per_scene * len(suite.schemes))
            at -= suite.trials
        raise IndexError(f"the campaign has trials 0 to {self.trials - 1}, not {number}")

    def workload(self, suite: int, scene: int) -> Workload:
        """The operands of a scene."""
        s, seed = self.suites[suite], (self.seed, suite, scene)
        rng = np.random.default_rng([*seed, 0x5CE])
        m, k, n = s.shapes[int(rng.integers(len(s.shapes)))]
        families = (*s.families, *(f"file:{a},{b}" for a, b in s.files))
        dtype, family, order = (str(rng.choice(names)) for names in (s.dtypes, families, s.orders))
        return Workload(s.operation, m, k, n, dtype, family, order, seed, s.options)

    def trial(self, number: int) -> Trial:
        """A trial: trials of all schemes in turn have the same faults."""
        index, _ = self.place(number)
        suite = self.suites[index]
        case, scheme = divmod(number - self.first(index), len(suite.schemes))
        seed = (self.seed, index, case)
        rng = np.random.default_rng([*seed, 0x7A1])
        if not suite.fault or rng.random() < suite.clean:
            return Trial(number, (), suite.schemes[scheme])
        shares = np.cumsum([fault.share for fault in suite.fault])
        chosen = suite.fault[int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))]
        return Trial(number, chosen.plans(seed), suite.schemes[scheme])


# ---- reading -------------------------------------------------------------------------------------------------------


def load(path: str | Path) -> Campaign:
    """Read a campaign file.

    Raises
    ------
    CampaignFileError
        If it cannot be read, or asks for what is not there: which entry, and what it may be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CampaignFileError(f"cannot read {path}: {short(error)}; name a campaign file, .toml") from error
    return parse(text, str(path))


def parse(text: str, path: str = "the campaign") -> Campaign:
    """A campaign from its text; errors as of `load`."""
    where = path
    try:
        data = tomllib.loads(text)
        suites = []
        for number, entry in enumerate(_list(data.pop("suite", []), "suite"), 1):
            where = f"{path}, suite {entry.get('name', number) if isinstance(entry, dict) else number}"
            suites.append(_suite(entry))
        where = path
        head = {"name": Path(path).stem, "seed": 0, "timeout": 60.0}
        for name in data:
            require_known("entry", name, (*head, "suite"))
        if not suites:
            raise ValueError("it has no [[suite]]: nothing to run")
        name, seed, timeout = ({**head, **data}[key] for key in head)
        if not _is("str", name):
            raise ValueError(f"name = {name!r} is to be text")
        if not _is("int", seed) or seed < 0 or not _is("float", timeout) or not timeout > 0:
            raise ValueError(f"seed = {seed!r} and timeout = {timeout!r}: a number from 0 on, and seconds above 0")
        if len({suite.name for suite in suites}) < len(suites):
            raise ValueError("two suites have the same name")
        campaign = Campaign(name, seed, float(timeout), tuple(suites), text)
        for index, suite in enumerate(suites):
            where = f"{path}, suite {suite.name}"
            _require_possible(campaign, index)
    except (ValueError, TypeError, tomllib.TOMLDecodeError) as error:
        raise CampaignFileError(f"{where}: {error}") from error
    return campaign


def require_device(campaign: Campaign, gpu: bool) -> None:
    """Ask whether all suites can be carried out there, before anything is run.

    Raises
    ------
    CampaignFileError
        For an operation that no faults are planted in on a GPU, a scheme that is for a GPU alone, and for a matrix that
        a GPU factors in too few steps.
    """
    for index, suite in enumerate(campaign.suites):
        module = operation_of(suite.operation)
        try:
            if suite.operation in FACTORISATIONS and gpu:
                module.require_library(suite.operation, "cupy")
                _require_fits(campaign, index, gpu)
            elif suite.operation == "gemm":
                for scheme in suite.schemes:
                    module.require_library(scheme, "cupy" if gpu else "numpy")
        except ValueError as error:
            raise CampaignFileError(f"suite {suite.name}: {error}") from error


def operation_of(name: str) -> Any:
    """The module that carries out trials of an operation: its GROUP runs them, and require_workload,
    require_scheme and require_possible say what is possible."""
    from abft_tsm2.faults.trials import factor as factor_trials
    from abft_tsm2.faults.trials import gemm, storage, verify

    return {"gemm": gemm, "verify": verify, "storage": storage}.get(name, factor_trials)


def _suite(entry: Any) -> Suite:
    given = _known(entry, Suite, "entry of a suite")
    for name in ("shapes", "files"):
        if name in given:
            given[name] = tuple(tuple(_list(one, f"an entry of {name}")) for one in _list(given[name], name))
    for name in ("schemes", "dtypes", "families", "orders"):
        if name in given:
            given[name] = tuple(_list(given[name], name))
            if not given[name]:
                raise ValueError(f"{name} is empty")
    given["fault"] = tuple(_fault(one) for one in _list(given.get("fault", []), "fault"))
    given["options"] = tuple(sorted(_table(given.get("options", {})).items()))
    missing = [f.name for f in fields(Suite) if f.name not in given and f.default is MISSING]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    suite = Suite(**given)
    require_known("operation", suite.operation, OPERATIONS)
    for dtype in suite.dtypes:
        require_known("dtype", dtype, FLOATS)
    for order in suite.orders:
        require_known("order", order, ORDERS)
    if any(len(pair) != 2 for pair in suite.files):
        raise ValueError(f"files = {[list(pair) for pair in suite.files]}: a list of [A, B], two names of files each")
    whole = [x for shape in suite.shapes for x in shape]
    if not whole or not all(_is("int", x) and x > 0 for x in whole) or any(len(s) != 3 for s in suite.shapes):
        raise ValueError(f"shapes = {[list(s) for s in suite.shapes]}: a list of [m, k, n], each at least 1")
    if max(8 * max(m * k, k * n, m * n) for m, k, n in suite.shapes) >= BEYOND:
        raise ValueError(f"shapes = {[list(s) for s in suite.shapes]}: no matrix has 2**63 bytes")
    if not (0 <= suite.clean <= 1 and suite.trials >= 1 and suite.per_scene >= 1):
        raise ValueError(
            f"clean = {suite.clean}, trials = {suite.trials}, per_scene = {suite.per_scene}: a share from 0 to 1, and "
            "two numbers from 1 on"
        )
    if suite.trials > MOST:
        raise ValueError(f"trials = {suite.trials}: {MOST} at most; write several campaigns")
    if not suite.fault and suite.clean < 1:
        raise ValueError("it has no [[suite.fault]]: add one, or say clean = 1.0")
    return suite


def _fault(entry: Any) -> FaultEntry:
    if isinstance(entry, dict) and isinstance(entry.get("bits"), int):
        entry = {**entry, "bits": str(entry["bits"])}
    given = _known(entry, FaultEntry, "entry of a fault")
    factor = given.get("factor", 2.0)
    if isinstance(factor, list):
        if len(factor) != 2 or not 0 < factor[0] <= factor[1] < math.inf:
            raise ValueError(f"factor = {factor}: one number, or the smallest and the largest, both above 0")
        given["factor"] = tuple(map(float, factor))
    elif not (_is("float", factor) and math.isfinite(factor)):
        raise ValueError(
            f"factor = {factor!r}: one number, or a list of the smallest and the largest; what is not finite is put in "
            "by the models nan and inf"
        )
    given["also"] = tuple(_fault(one) for one in _list(given.get("also", []), "also"))
    if "model" not in given:
        raise ValueError("a fault has no model")
    fault = FaultEntry(**given)
    if not 0 < fault.share < math.inf:
        raise ValueError(f"share = {fault.share}: a number above 0")
    return fault


def _known(entry: Any, kind: Any, what: str) -> dict[str, Any]:
    given, known = _table(entry), {f.name: str(f.type) for f in fields(kind)}
    for name, value in given.items():
        require_known(what, name, known)
        if not _is(known[name], value):
            raise ValueError(f"{name} = {value!r} is to be {_KINDS[known[name]][0]}")
        if known[name] == "int" and value >= BEYOND:
            raise ValueError(f"{name} = {value!r} is to be below 2**63")
    return given


_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
}


def _is(kind: str, value: Any) -> bool:
    """Whether a value is of the kind that an annotation names; of others nothing is said."""
    if kind not in _KINDS:
        return True
    return isinstance(value, _KINDS[kind][1]) and (kind == "bool" or not isinstance(value, bool))


def _table(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{entry!r} is not a table of names and values")
    return dict(entry)


def _list(entry: Any, name: str) -> Sequence[Any]:
    if not isinstance(entry, list):
        raise ValueError(f"{name} = {entry!r} is to be a list")
    return entry


def _require_possible(campaign: Campaign, index: int) -> None:
    """ValueError for a fault that cannot be planted, before anything is run."""
    suite = campaign.suites[index]
    module = operation_of(suite.operation)
    largest = max(max(m * k, k * n, m * n) for one in campaign.suites for m, k, n in one.shapes)
    for scene in range(min(suite.scenes, 4 * len(suite.families) * len(suite.dtypes))):
        module.require_workload(campaign.workload(index, scene))
    for family in suite.families:  # those that chance has left out, too
        module.require_workload(replace(campaign.workload(index, 0), family=family))
    for scheme in suite.schemes:
        module.require_scheme(suite.operation, scheme, dict(suite.options))
    for fault in suite.fault:
        for plan in fault.plans((0,)):
            for dtype in suite.dtypes:
                bits_of(plan.bits, _type_at(plan.site, dtype))
            if plan.count > largest:
                raise ValueError(f"count = {plan.count}: the largest matrix of the campaign has {largest} elements")
            for scheme in suite.schemes:
                module.require_possible(suite.operation, scheme, plan)
    if suite.operation in FACTORISATIONS:
        _require_fits(campaign, index, gpu=False)


def _require_fits(campaign: Campaign, index: int, gpu: bool) -> None:
    """ValueError for a matrix that is factored in too few steps for a fault."""
    suite, workload = campaign.suites[index], campaign.workload(index, 0)
    plans = [plan for fault in suite.fault for plan in fault.plans((0,))]
    for plan, scheme, (m, k, n) in itertools.product(plans, suite.schemes, suite.shapes):
        operation_of(suite.operation).require_fits(replace(workload, m=m, k=k, n=n), scheme, plan, gpu)


def _type_at(site: str, dtype: str) -> str:
    """The type of the numbers at a site, of operands of a type: checksums are float64, sums float32 at least."""
    if site in ("kept.v", "s", "t", "u") or site.rpartition("_")[2] in SUMS:
        return "float64"
    return "float32" if site == "partial" and FLOATS[dtype].bits == 16 else dtype
