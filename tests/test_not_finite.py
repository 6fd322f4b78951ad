"""NaN and infinity planted into whatever public functions take and results hold: an error
in one line, or NaN in what comes out, and never a number or a verdict as if nothing was
wrong.

What is called is the example in a function's docstring, which `test_public_names` demands
of each: a function that is added is swept as well, and so is the class of its result.
"""

import dataclasses
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import xarray
from matplotlib.artist import Artist
from torch import Tensor, nn

import tl_coupling as tlc
from example_calls import Call, as_given, calls_in_example
from fingerprints import fingerprint
from planting import Change, Place, places
from public_api import public_names
from test_contexts import FUNCTIONS, is_called_plainly, members_of
from test_public_names import examples
from tl_coupling.blocks import BlockError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Of examples, which are run elsewhere.
]

# What is planted for comparison: where it changes nothing, a number is not read.
OTHER_NUMBERS: tuple[Change, ...] = (
    lambda x: 0.1 - 1.5 * x,
    lambda x: 100 * (abs(x) + 1),
    lambda x: 0.0,
)
# Calls that take nothing in which a number could be planted.
WITHOUT_NUMBERS = {
    "tl_coupling.checkpoint_sweep": "texts, and the files of a model",
    "tl_coupling.generalization.generalization_study": "texts and files",
    "tl_coupling.generalization.paper_table1": "nothing",
    "tl_coupling.generalization.read_scores": "a file",
    "tl_coupling.load_model": "a name",
    "tl_coupling.load_prompts": "a file",
    "tl_coupling.measures.mean_random_coupling": "whole numbers",
    "tl_coupling.open_survey": "a folder",
    "tl_coupling.plan": "sizes: it computes nothing",
    "tl_coupling.plots.off_screen": "nothing",
    "tl_coupling.plots.paper_style": "nothing",
    "tl_coupling.prompts.prompts_per_task": "texts",
    "tl_coupling.run_survey": "texts, and files of models",
    "tl_coupling.surveys.local_checkpoints": "a folder",
    "tl_coupling.surveys.precision_sweep": "texts, and the files of a model",
    "tl_coupling.surveys.pythia_steps": "whole numbers",
    "tl_coupling.surveys.slurm_executor": "a folder",
}


# Of these NaN is what was not measured: it is left out, and how many are left is said.
MISSING_IS_NAN = {
    "tl_coupling.generalization.bootstrap": "a model that was not measured",
    "tl_coupling.generalization.prompt_correlations": "a prompt that was not measured",
    "tl_coupling.generalization.task_means": "a prompt that was not measured",
    "tl_coupling.redundancy.redundancy_correlations": "a pair that was not merged",
    "tl_coupling.surveys.measure_table": "a pair or a prompt that was not measured",
    "tl_coupling.statistics.linear_fit": "a model that lacks a value, which n says",
}
# In how many places numbers are planted where a call takes long: into a model, or what a
# picture is drawn of. They are spread evenly.
MOST_PLACES = 6
# Rooms of pure tensors and arrays: each call takes milliseconds.
FAST_ROOMS = ("measures", "spectra", "statistics")


def in_tiers(names: Iterable[str]) -> list[Any]:
    """Return parameters of a test: what takes a model or draws is in the long tier."""
    in_long_tier = pytest.mark.long("plants numbers into models, or into pictures")
    return [
        name
        if name.split(".")[1] in FAST_ROOMS
        else pytest.param(name, marks=in_long_tier)
        for name in sorted(names)
    ]


class Outcome(NamedTuple):
    """What a call gave, or why it refused; and its warnings."""

    result: Any
    refusal: Exception | None
    warnings: frozenset[str]

    @classmethod
    def of(cls, call: Callable[[], Any]) -> "Outcome":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result, refusal = call(), None
            except Exception as error:
                result, refusal = None, error
        return cls(result, refusal, frozenset(str(w.message) for w in caught))

    @property
    def content(self) -> Any:
        """What tells it from others."""
        if self.refusal is not None:
            return type(self.refusal).__name__
        return fingerprint(self.result)


def refuses_in_a_line(refusal: Exception) -> bool:
    # torch and numpy have classes of their own for what they cannot decompose.
    is_own = isinstance(refusal, ValueError | TypeError | BlockError)
    is_foreign = isinstance(refusal, np.linalg.LinAlgError)
    return is_own and not is_foreign and "\n" not in str(refusal)


def count(value: Any, is_counted: Callable[[Any], Any], words: str) -> int:
    """Return how many numbers of a value are counted; of a text, how many words."""
    counted = partial(count, is_counted=is_counted, words=words)
    match value:
        case str():
            return len(re.findall(rf"\b({words})\b", value, re.IGNORECASE))
        case None:
            # In JSON it stands for NaN.
            return 1
        case bool() | int() | nn.Module():
            return 0
        case float() | complex() | np.generic():
            return int(is_counted(value))
        case Tensor():
            return counted(value.detach().cpu().numpy())
        case np.ndarray():
            return int(is_counted(value).sum()) if value.dtype.kind in "fc" else 0
        case xarray.Dataset():
            return counted([array.values for array in value.variables.values()])
        case pandas.DataFrame():
            return counted([value[name].to_numpy() for name in value])
        case Mapping():
            return counted(list(value.values()))
        case list() | tuple():
            return sum(map(counted, value))
        case tlc.Trace():
            return counted(value.residual)
        case _ if type(value).__name__ == "JacobianLens":
            return counted(value.jacobians)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return counted([getattr(value, f.name) for f in dataclasses.fields(value)])
    return 0


n_nan = partial(count, is_counted=np.isnan, words="nan")
n_not_finite = partial(
    count, is_counted=lambda values: ~np.isfinite(values), words="nan|inf"
)


def n_numbers(value: Any) -> int:
    """Return how many numbers a value has: one that is left out is None, say."""
    match value:
        case Tensor():
            return value.numel()
        case np.ndarray():
            return value.size
        case Mapping():
            return n_numbers(list(value.values()))
        case list() | tuple():
            return sum(map(n_numbers, value))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return n_numbers(
                [getattr(value, f.name) for f in dataclasses.fields(value)]
            )
    return 0


def shows(planted: Outcome, clean: Outcome) -> bool:
    """Say whether an outcome tells that something is wrong."""
    if planted.refusal is not None:
        return refuses_in_a_line(planted.refusal)
    if clean.refusal is not None:
        return False
    if isinstance(planted.result, Artist):
        # A gap, where something was drawn: a picture gives no verdict.
        return True
    if isinstance(planted.result, str) and "<svg" in clean.result:
        # So is a page of pictures.
        return planted.content != clean.content
    # Where infinity has a meaning, NaN in its place has none.
    for counted in (n_not_finite, n_nan):
        if counted(planted.result) > counted(clean.result):
            return True
    is_left_out = n_numbers(planted.result) < n_numbers(clean.result)
    return is_left_out and bool(planted.warnings - clean.warnings)


def known_places(value: Any) -> Iterator[Place]:
    """Yield places of numbers that are known: NaN in place of NaN is no change."""
    for place in places(value):
        numbers: list[float] = []

        def seen(number: float, numbers: list[float] = numbers) -> float:
            numbers.append(number)
            return number

        outcome_at(place, seen, id)
        if not np.isnan(numbers).any():
            yield place


def outcome_at(place: Place, change: Change, call: Callable[[Any], Any]) -> Outcome:
    """Return the outcome of a call with another number; a value that refuses to hold it
    refuses.
    """

    def with_another() -> Any:
        with place.changed(change) as value:
            return call(value)

    return Outcome.of(with_another)


def is_read(place: Place, call: Callable[[Any], Any], clean: Outcome) -> bool:
    """Say whether the outcome of a call hangs on a number."""
    outcomes = (outcome_at(place, change, call) for change in OTHER_NUMBERS)
    return any(outcome.content != clean.content for outcome in outcomes)


@pytest.fixture
def calls_of(
    _example_folder: Path,
    _example_names: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    as_a_user: None,
) -> Callable[[str], list[Call]]:
    """Provide the calls of a function in its example."""
    monkeypatch.chdir(_example_folder)
    return lambda name: calls_in_example(FUNCTIONS[name], _example_names)


# --- what functions take


def test_only_calls_without_numbers_are_left_out() -> None:
    assert WITHOUT_NUMBERS.keys() | MISSING_IS_NAN.keys() <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", in_tiers(FUNCTIONS.keys() - WITHOUT_NUMBERS.keys()))
def test_what_a_function_takes(
    name: str, calls_of: Callable[[str], list[Call]]
) -> None:
    def call(arguments: Any) -> Any:
        args, kwargs = arguments
        return FUNCTIONS[name](*as_given(args), **as_given(kwargs))

    numbers = [math.nan, math.inf]
    if name in MISSING_IS_NAN:
        numbers.remove(math.nan)
    n_places = 0
    for args, kwargs, _ in calls_of(name):
        clean = Outcome.of(lambda: call((args, kwargs)))  # noqa: B023
        chosen = list(known_places((args, kwargs)))
        n_places += len(chosen)
        if isinstance(clean.result, Artist):
            # One gap is like another.
            numbers = [math.nan]
        if name.split(".")[1] not in FAST_ROOMS:
            chosen = chosen[:: 1 + len(chosen) // MOST_PLACES]
        for place, number in product(chosen, numbers):
            planted = outcome_at(place, lambda _: number, call)  # noqa: B023
            if shows(planted, clean):
                continue
            assert planted.refusal is None, (place.name, number, planted.refusal)
            assert planted.content == clean.content, (place.name, number)
            # NaN in a weight that is read is in all that follows.
            is_weight = ".model." in place.name
            assert is_weight or not is_read(place, call, clean), place.name
    assert n_places, f"{name} takes no number: say in WITHOUT_NUMBERS what it takes"


# --- what results hold


CLASSES = {name: c for name, c in public_names().items() if inspect.isclass(c)}
NO_RESULTS = {
    "tl_coupling.ModelError": "an error",
    "tl_coupling.blocks.BlockError": "an error",
    "tl_coupling.gradients.DerivativeError": "an error",
    "tl_coupling.gradients.StepError": "an error",
    "tl_coupling.Prompt": "texts, and a difficulty, which must be finite",
    "tl_coupling.Settings": "whole numbers",
    "tl_coupling.Survey": "texts",
    "tl_coupling.Trace": "is what functions take",
    "tl_coupling.blocks.BlockCall": "a module and its arguments",
    "tl_coupling.gradients.BlockFunction": "a part of a trace",
    "tl_coupling.interactive.View": "a page",
    "tl_coupling.jacobians.Plan": "sizes, before anything is computed",
    "tl_coupling.surveys.process_pool": "processes",
    "tl_coupling.training.CouplingCallback": "measures as `measure` does",
}
# What a reading leaves out on purpose, and its documentation says so.
LEAVES_OUT = {
    ("Carriers", "table"): "a row without a share in some draw is not in the null",
    ("Comparison", "differing"): "a pair whose p is not known is not said to differ",
    ("Decoded", "to_dataframe"): "a control with fewer draws has NaN for the others",
    ("HeadCoupling", "__repr__"): "a head that adds nothing has no coupling",
    ("HeadCoupling", "by_layer"): "a head that adds nothing has no coupling",
    ("HeadCoupling", "largest_of_null"): "a head that adds nothing has no coupling",
    ("HeadCoupling", "share_above_null"): "a head that adds nothing has no coupling",
    ("HeadCoupling", "strongest"): "a head that adds nothing has no coupling",
    ("HeadCoupling", "table"): "a head that adds nothing has no coupling",
    ("TrajectoryResult", "table"): "it says for how many tokens a mean is undefined",
    ("Generalization", "remarks"): "what is not known is not said",
}


class Reading(NamedTuple):
    """A property, or a method that takes nothing but its object."""

    name: str
    is_property: bool

    def of(self, result: Any) -> Any:
        value = getattr(result, self.name)
        return value if self.is_property else value()


def readings_of(cls: type) -> list[Reading]:
    readings = []
    for name, member in members_of(cls).items():
        is_property = isinstance(member, property | cached_property)
        is_public = name == "__repr__" or not name.startswith("_")
        # A file holds what the result does.
        is_saving = name in ("save", "load", "to_dataset")
        if is_public and not is_saving and (is_property or is_called_plainly(member)):
            readings.append(Reading(name, is_property))
    return readings


@pytest.fixture
def instance_of(
    _example_folder: Path,
    _example_names: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    as_a_user: None,
) -> Callable[[type], Any]:
    """Provide the result of a class that its example makes."""
    monkeypatch.chdir(_example_folder)

    def run(cls: type) -> Any:
        made: list[Any] = []
        make = cls.__init__

        def noted(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            made.append(self)

        names = dict(_example_names)
        with monkeypatch.context() as patch:
            patch.setattr(cls, "__init__", noted)
            for example in examples(cls):
                exec(example.source, names)
        of_class = [result for result in made if type(result) is cls]
        assert of_class, f"the example of {cls.__name__} makes none"
        return of_class[-1]

    return run


def test_every_class_of_results_is_here() -> None:
    assert NO_RESULTS.keys() <= CLASSES.keys()
    names = {cls.__name__ for cls in CLASSES.values()}
    assert {name for name, _ in LEAVES_OUT} <= names


@pytest.mark.parametrize("name", in_tiers(CLASSES.keys() - NO_RESULTS.keys()))
def test_what_a_result_holds(name: str, instance_of: Callable[[type], Any]) -> None:
    cls = CLASSES[name]
    result = instance_of(cls)
    readings = [
        reading
        for reading in readings_of(cls)
        if (cls.__name__, reading.name) not in LEAVES_OUT
    ]
    clean = {r: Outcome.of(lambda: r.of(result)) for r in readings}  # noqa: B023
    # What infinity means a result says itself.
    for place in known_places(result):
        for reading in readings:
            planted = outcome_at(place, lambda _: math.nan, reading.of)
            if shows(planted, clean[reading]):
                continue
            where = (place.name, reading.name, planted.refusal)
            assert planted.content == clean[reading].content, where
            assert not is_read(place, reading.of, clean[reading]), where
