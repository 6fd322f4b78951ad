"""Surveys: many models, checkpoints and prompts, in units that survive a crash and run
on any executor.
"""

import gc
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from tl_coupling.arguments import (
    AnyPath,
    Count,
    Device,
    FloatDtype,
    checked,
    made_by,
    warn_caller,
)
from tl_coupling.files import file_name, output_folder
from tl_coupling.measures import check_reaches_processes
from tl_coupling.models import (
    Backend,
    Memory,
    ModelError,
    Quantization,
    load_model,
    with_own_modules,
)
from tl_coupling.progress import Progress
from tl_coupling.prompts import Prompt, Prompts, as_prompts
from tl_coupling.studies.surveys.checkpoints import (
    Checkpoint,
    QuantizedSource,
    Source,
    checkpoint_sources,
    is_cached,
    is_local,
)
from tl_coupling.studies.surveys.executors import Executor, ProcessPool
from tl_coupling.studies.surveys.kept import KeptPrompts
from tl_coupling.studies.surveys.local_models import attach_files, check_files
from tl_coupling.studies.surveys.measurements import measured_prompts
from tl_coupling.studies.surveys.records import Unit, write_planned
from tl_coupling.studies.surveys.results import (
    COSTS,
    FACTS,
    finished_units,
    joined_units,
    missing_units,
    records_of,
)
from tl_coupling.studies.surveys.settings import IMPLIED, PAPER_PROMPT, Settings
from tl_coupling.studies.surveys.units import Folder, Outcome, one_line

if TYPE_CHECKING:
    import xarray

# Labels of a model that is not a checkpoint of its training, and of its twin.
MAIN = "main"
UNTRAINED = "untrained"
# How a path begins that cannot be the name of a hub model.
_PATH_PREFIXES = ("/", "./", "../", "~")
# A model whose checkpoint a unit measures (a hub name, a folder, a file), and how it is
# quantised.
_Model = tuple[str, str | None]


@made_by("Survey(models, prompts)")
@checked
@dataclass(frozen=True)
class Survey:
    """What a survey measures: every model, at every checkpoint, on every prompt.

    Attributes:
        models: hub names, local folders in HuggingFace format, GGUF files or folders of
            checkpoints; or a mapping to these from the names used in the results.
        prompts, settings: what every model is measured on, and how.
        checkpoints: training steps or hub revisions, of all models; or a mapping from
            models to theirs. By default the model itself ("main"), or all of a local
            folder of checkpoints.
        untrained: also measure each model's untrained twin, as checkpoint "untrained";
            not with checkpoints.
        prompts_per_unit: a unit of work is one model and checkpoint with this many
            prompts, all by default. Small units lose less when cut off and can run in
            parallel, but each loads its model again.
        backend, device, dtype, memory: as in `load_model`. Where no backend is asked
            for, a HuggingFace model is measured by its own modules, without a bridge.
        quantization: as there. Quantised models are named so, "gpt2 (nf4)", and may
            share a folder with others.

    ValueError where models or prompts are missing or there twice, or checkpoints are of
    a model that is not surveyed.

    Example:
        >>> survey = tlc.Survey(["gpt2", "distilgpt2"], ["One and one is"])
        >>> [unit.key for unit in survey.units()]
        ['gpt2@main', 'distilgpt2@main']
    """

    models: AnyPath | Mapping[str, AnyPath] | Sequence[AnyPath]
    prompts: Prompts
    checkpoints: Sequence[Checkpoint] | Mapping[str, Sequence[Checkpoint]] | None = None
    untrained: bool = False
    settings: Settings = field(default_factory=Settings)
    prompts_per_unit: Count | None = None
    backend: Backend = "auto"
    device: Device | None = None
    dtype: FloatDtype = torch.float32
    quantization: Quantization | None = None
    memory: Memory = "resident"

    def __post_init__(self) -> None:
        """Raise on what cannot be measured.

        Paths are kept as they are meant now, and prompts as a list.
        """
        sources = self._named_sources()
        # A folder is the same however its path is written and wherever a worker starts.
        models = {
            name: str(Path(source).resolve()) if is_local(source) else os.fspath(source)
            for name, source in sources.items()
        }
        self._check_models(models)
        if self.settings.metric is not None and self.prompts_per_unit is not None:
            raise ValueError(
                'the metric "stream" is of all prompts of a model, which are then one '
                "unit: leave `prompts_per_unit` out"
            )
        self._check_untrained()
        self._check_checkpoints(list(models))
        # The way that frozen dataclasses leave open to their own initialisation.
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "prompts", as_prompts(self.prompts))

    def _named_sources(self) -> dict[str, AnyPath]:
        """Return what the models are loaded from, by the names used in the results."""
        if isinstance(self.models, Mapping):
            pairs = list(self.models.items())
        elif isinstance(self.models, str | os.PathLike):
            pairs = [(os.fspath(self.models), self.models)]
        else:
            pairs = [(os.fspath(source), source) for source in self.models]
        names = [name for name, _ in pairs]
        if not names or "" in names or len(set(names)) < len(names):
            raise ValueError(
                f"`models` must be one or more names, each once, got {names}"
            )
        return dict(pairs)

    def _check_models(self, models: dict[str, str]) -> None:
        """Raise where a folder is missing, or is given twice by different paths.

        `models` are resolved paths or hub names, by the names used in the results.
        """
        missing = [
            source
            for source in models.values()
            if source.startswith(_PATH_PREFIXES) and not is_local(source)
        ]
        if missing:
            raise ValueError(f"there is no such folder: {', '.join(missing)}")
        # A mapping may give one model two names on purpose.
        if isinstance(self.models, Mapping):
            return
        if len(set(models.values())) < len(models):
            raise ValueError(
                f"`models` must be different folders, got {list(models)}; "
                "a mapping gives one several names"
            )

    def _check_untrained(self) -> None:
        """Raise where untrained twins are asked for that cannot be."""
        if not self.untrained:
            return
        if self.quantization is not None or self.memory == "stream":
            raise ValueError(
                "`untrained` cannot be combined with `quantization` or "
                '`memory="stream"`: leave it out'
            )

    def _check_checkpoints(self, names: list[str]) -> None:
        """Raise where checkpoints are of no model, none, mixed or there twice."""
        checkpoints_by_model: Mapping[str, Sequence[Checkpoint] | None]
        if isinstance(self.checkpoints, Mapping):
            checkpoints_by_model = self.checkpoints
        else:
            checkpoints_by_model = dict.fromkeys(names, self.checkpoints)
        unknown = set(checkpoints_by_model) - set(names)
        if unknown:
            raise ValueError(
                "`checkpoints` names models that are not surveyed: "
                f"{sorted(unknown)}; there are {names}"
            )
        for checkpoints in checkpoints_by_model.values():
            if checkpoints is not None:
                _check_alike(checkpoints)
        are_of_all = not isinstance(self.checkpoints, Mapping | None)
        if self.untrained and are_of_all:
            raise ValueError(
                "`untrained` cannot be combined with `checkpoints` of all models: leave "
                "one out, or name models"
            )

    def units(self) -> list[Unit]:
        """Return the pieces of work, in the order of models, checkpoints, prompts."""
        units: list[Unit] = []
        for label, name in dict[str, str](self.models).items():  # type: ignore[arg-type]
            model = label
            if self.quantization is not None:
                model = f"{label} ({self.quantization})"
            for checkpoint, source in self._sources(label, name).items():
                quantized: QuantizedSource = {**source}
                if self.quantization is not None:
                    quantized["quantization"] = self.quantization
                units += self._units_of(model, checkpoint, quantized)
        return units

    def _units_of(
        self, model: str, checkpoint: Checkpoint, source: QuantizedSource
    ) -> Iterator[Unit]:
        """Yield the units of one model and checkpoint, some prompts each."""
        prompts = as_prompts(self.prompts)
        n_per_unit = self.prompts_per_unit or len(prompts)
        # The name of the unit's files; `+` and a number where its prompts are several
        # units.
        key = f"{file_name(model)}@{file_name(str(checkpoint))}"
        for first in range(0, len(prompts), n_per_unit):
            unit_prompts = prompts[first : first + n_per_unit]
            subject = {
                "model": model,
                "checkpoint": checkpoint,
                "source": source,
                "prompts": [first, first + len(unit_prompts)],
            }
            is_whole = n_per_unit >= len(prompts)
            unit_key = key if is_whole else f"{key}+{first}"
            yield Unit(unit_key, subject, UnitInputs(source, unit_prompts))

    def _sources(self, model: str, name: str) -> dict[Checkpoint, Source]:
        """Return what `load_model` takes for each checkpoint of a model."""
        checkpoints = self.checkpoints
        if isinstance(checkpoints, Mapping):
            checkpoints = checkpoints.get(model)
        path = Path(name)
        # A model in HuggingFace format has a config; a folder of checkpoints has one in
        # each.
        is_folder_of_many = path.is_dir() and not (path / "config.json").exists()
        if checkpoints is not None or is_folder_of_many:
            return checkpoint_sources(name, checkpoints)
        sources: dict[Checkpoint, Source] = {MAIN: {"name": name}}
        if self.untrained:
            sources[UNTRAINED] = {"name": name, "untrained": True}
        return sources

    def plan(self) -> dict[str, Any]:
        """Return what the results depend on beside the models, JSON-able."""
        return {
            "kind": "survey",
            "prompts_per_unit": self.prompts_per_unit,
            "backend": self.backend,
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.settings.as_plan(),
            "prompts": [[p.id, p.task, p.text] for p in as_prompts(self.prompts)],
        }


def _check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise ValueError unless these are all steps or all revisions, each once."""
    if not checkpoints:
        raise ValueError("`checkpoints` is empty: wanted at least one")
    types = {type(checkpoint) for checkpoint in checkpoints}
    if len(set(checkpoints)) < len(checkpoints) or len(types) > 1:
        raise ValueError(
            "`checkpoints` must be all steps or all revisions, each once, "
            f"got {list(checkpoints)}"
        )


class UnitInputs(NamedTuple):
    """What a unit of a survey measures."""

    source: QuantizedSource
    prompts: list[Prompt]


@dataclass
class MeasureModel:
    """Measures a unit. After the first model that is not there without a network, only
    cached ones are tried.

    `texts` are those of the prompts in the plan, by id; `folder` is where results are,
    and measured prompts of a unit are kept, if they are.
    """

    survey: Survey
    progress: Progress | None = None
    no_network: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __call__(self, unit: Unit) -> "xarray.Dataset":
        """Load its model and measure its prompts."""
        # A bridge and its hook points refer to each other, and an error holds its model
        # until it is recorded.
        gc.collect()
        inputs: UnitInputs = unit.inputs
        if self.no_network and not is_cached(inputs.source):
            raise ModelError(f"not tried: {self.no_network}")
        self._check_inputs(unit)
        model = self._loaded(inputs.source)
        settings = self.survey.settings
        kept = None if self.folder is None else KeptPrompts(self.folder, unit)
        data = measured_prompts(model, inputs.prompts, settings, self.progress, kept)
        # They may have changed amid the loading.
        self._check_inputs(unit)
        return data

    def _loaded(self, source: QuantizedSource) -> nn.Module:
        """Return the model, by its own modules unless a backend was asked for; note
        where there is no network.
        """
        survey = self.survey
        try:
            model = load_model(
                **source,
                backend=survey.backend,
                device=survey.device,
                dtype=survey.dtype,
                memory=survey.memory,
            )
        except ModelError as error:
            if self.no_network is None and "no network" in str(error):
                self.no_network = str(error)
            raise
        return with_own_modules(model) if survey.backend == "auto" else model

    def _check_inputs(self, unit: Unit) -> None:
        """Raise where the model or an image is no longer what it was.

        What they were when the run began is in the plan and in the unit's facts.
        """
        check_files(unit)
        inputs: UnitInputs = unit.inputs
        for prompt in inputs.prompts:
            text_of_plan = self.texts.get(prompt.id, prompt.text)
            if prompt.image is not None and prompt.text != text_of_plan:
                raise ValueError(
                    f"prompt {prompt.id!r}: the image {prompt.image} was changed after "
                    "this run began: restore it and run again, or choose another "
                    "folder of results"
                )


@checked
def run_survey(
    survey: Survey,
    folder: AnyPath | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Measure what a survey asks for, and open the results.

    Args:
        folder: where each unit's result is written when it is done. A run there keeps
            what is finished and measures what is missing, failed or damaged; models may
            be added. A local model whose files change between units or runs is an
            error, which says how to go on. By default the results are in memory only.
        executor: by default units run one after the other in this process. Otherwise
            anything with `submit`: a pool of concurrent.futures, a Client of
            dask.distributed, submitit on a SLURM cluster (one job array; preempted jobs
            are queued again). It gets names and paths, never models; its workers must
            see the folder.
        progress: wraps the loop over units, `tqdm.tqdm` for one. By default bars for
            units and for the prompts of each, in a terminal or notebook; True for these,
            and lines in a log; False for none.

    Returns:
        as `open_survey`. Units that failed are missing (NaN), with a warning; their
        errors are in `attrs["failed"]`. `attrs["missing"]` also lists units of earlier
        runs that were not finished.

    Raises:
        ValueError: the folder has results of another survey, of another model under the
            same name, or of a local model whose files are others now; or another run is
            using it; or processes cannot import a measure of one's own.
        ModelError: not one unit could be measured.
        OSError: the folder cannot be written to; what is finished is kept.

    The values do not depend on the executor, on interruptions or on `prompts_per_unit`,
    as long as torch runs with the same number of threads. Cost beside the measurements:
    the files of local models are read once for their checksums. A unit that kills its
    worker fails; with executors other than `process_pool`, others may fail with it.
    Without a network, only cached models are tried after the first that is not.

    Example:
        >>> widths = (8, 12, 16, 20, 24, 28)
        >>> models = {f"width{width}": f"models/width{width}/step2" for width in widths}
        >>> settings = tlc.Settings(k=(2, 4), window=1)
        >>> survey = tlc.Survey(models, prompts, settings=settings)
        >>> data = tlc.run_survey(survey, "survey", progress=False)
        >>> data.mean_coupling.dims, data.mean_coupling.shape
        (('model', 'checkpoint', 'prompt', 'k'), (6, 1, 4, 2))
    """
    units = survey.units()
    with _results_folder(survey, folder) as results:
        outcomes = _outcomes(survey, results, units, executor, progress)
        labels = [unit.key for unit in units]
        failed = _failed(outcomes, labels, "units")
        # Those of earlier runs as well.
        finished = finished_units(results)
        data = joined_units(results, finished)
        # These failed in this run: other models may have failed in earlier ones.
        missing = missing_units(results, finished, failed)
        data = data.assign_attrs(failed=json.dumps(failed), missing=json.dumps(missing))
        # A temporary folder is about to go, and lazy values with it.
        return data.load() if folder is None else data


@checked
def checkpoint_sweep(
    name: AnyPath,
    checkpoints: Sequence[Checkpoint] | None = None,
    prompts: Prompts = PAPER_PROMPT,
    *,
    settings: Settings | None = None,
    folder: AnyPath | None = None,
    backend: Backend = "auto",
    device: Device | None = None,
    dtype: FloatDtype = torch.float32,
    quantization: Quantization | None = None,
    memory: Memory = "resident",
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> "xarray.Dataset":
    """Survey one model at every checkpoint: coupling, singular values, shapes of
    trajectories, loss.

    Args:
        name: a hub name whose checkpoints are published (`"EleutherAI/pythia-160m"`),
            or a folder as for `local_checkpoints`.
        checkpoints: training steps (`int`) or hub revisions (`str`); by default all of
            the folder, or `pythia_steps()`.
        prompts, settings, backend, device, dtype, quantization, memory: as in `Survey`.
        folder, progress, executor: as in `run_survey`; a unit is a checkpoint.

    Returns:
        what `open_survey` gives for this model without its size and cost, `[checkpoint
        prompt …]`, in the order asked for. Checkpoints that failed are left out, with a
        warning; their errors are in `attrs["failed"]`.

    Errors are those of `run_survey`, and ValueError for checkpoints of different depths. One
    model is in memory at a time.

    Example:
        >>> settings = tlc.Settings(k=(2, 4), window=1)
        >>> sweep = tlc.checkpoint_sweep(
        ...     "models/width16", None, prompts, settings=settings, folder="sweep", progress=False
        ... )
        >>> sweep.checkpoint.values.tolist(), sweep.mean_coupling.dims
        ([0, 2], ('checkpoint', 'prompt', 'k'))
    """
    label = Path(name).resolve().name if Path(name).is_dir() else os.fspath(name)
    if checkpoints is None:
        checkpoints = list(checkpoint_sources(name, None))
    survey = Survey(
        models={label: name},
        prompts=prompts,
        checkpoints={label: checkpoints},
        settings=settings or Settings(),
        backend=backend,
        device=device,
        dtype=dtype,
        quantization=quantization,
        memory=memory,
    )
    units = survey.units()
    with _results_folder(survey, folder) as results:
        outcomes = _outcomes(survey, results, units, executor, progress)
        labels = [str(unit.subject["checkpoint"]) for unit in units]
        failed = _failed(outcomes, labels, f"checkpoints of {os.fspath(name)}")
        measured_units = [
            outcome.unit for outcome in outcomes if outcome.status != "failed"
        ]
        data = joined_units(results, measured_units)
        data = data.assign_attrs(failed=json.dumps(failed))
        if folder is None:
            data = data.load()
    measured_checkpoints = [
        checkpoint for checkpoint in checkpoints if str(checkpoint) not in failed
    ]
    model = units[0].subject["model"]
    # The data are those of these checkpoints alone, in the order asked for: the folder
    # may hold others.
    data = data.sel(model=model, checkpoint=measured_checkpoints, drop=True)
    _check_depths(data, name)
    return data.drop_vars([*FACTS, *COSTS]).assign_attrs(model=os.fspath(name))


def _check_depths(data: "xarray.Dataset", name: AnyPath) -> None:
    """Raise ValueError where checkpoints have different numbers of layers.

    Joined with a deeper model, one with fewer layers is filled up with NaN.
    """
    n_layers = data["n_layers"].values.tolist()
    if len(set(n_layers)) > 1:
        steps = data["checkpoint"].values.tolist()
        depths = dict(zip(steps, n_layers, strict=True))
        raise ValueError(
            f"the checkpoints of {name} are not of one architecture; layers: {depths}"
        )


@contextmanager
def _results_folder(survey: Survey, folder: AnyPath | None) -> Iterator[Folder]:
    """Open the folder of results, or one that is removed after the block."""
    with ExitStack() as stack:
        is_temporary = folder is None
        if folder is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = stack.enter_context(output_folder(os.fspath(folder)))
        yield Folder(path, survey.plan(), is_temporary, IMPLIED)


def _outcomes(
    survey: Survey,
    results: Folder,
    units: list[Unit],
    executor: Executor | None,
    progress: Progress | None,
) -> list[Outcome]:
    """Measure what is missing, and return what became of every unit."""
    # Bars of several workers would overwrite each other; a function wraps units alone.
    shows_prompts = executor is None and not callable(progress)
    if isinstance(executor, ProcessPool | ProcessPoolExecutor):
        for own in survey.settings.own_measures:
            check_reaches_processes(own.function, own.name)
    progress_of_prompts = progress if shows_prompts else False
    # The folder is held, so that results that are there now are still there when the
    # units are run.
    with results.held():
        _check_names(results, units)
        described_units = attach_files(results, units)
        write_planned(results.path, units)
        texts = {prompt_id: text for prompt_id, _, text in results.plan["prompts"]}
        # Workers may have another working directory.
        folder = None if results.temporary else results.path.resolve()
        measure = MeasureModel(survey, progress_of_prompts, texts=texts, folder=folder)
        outcomes = results.run(described_units, measure, progress, executor)
    gc.collect()
    return outcomes


def _failed(
    outcomes: Sequence[Outcome], labels: Sequence[str], noun: str
) -> dict[str, str | None]:
    """Return the errors of units by label, with a warning; ModelError if all failed."""
    failed = {
        label: outcome.error
        for label, outcome in zip(labels, outcomes, strict=True)
        if outcome.status == "failed"
    }
    if len(failed) == len(outcomes):
        first, error = next(iter(failed.items()))
        raise ModelError(
            f"none of the {len(failed)} {noun} could be measured; {first}: {error}"
        )
    if failed:
        warn_caller(
            f"{len(failed)} of {len(outcomes)} {noun} failed and are left out: "
            f"{one_line(failed)}"
        )
    return failed


def _check_names(results: Folder, units: Sequence[Unit]) -> None:
    """Raise ValueError where names in the folder and those asked for do not agree.

    A name would stand for two models of the folder, or one of them would have two
    names.
    """
    measured_units = [
        content["what"]
        for content in records_of(results).values()
        if content.get("status") == "finished"
    ]
    models = {unit["model"]: _model_of(unit) for unit in measured_units}
    # The reverse of `models`, as neither may stand for two.
    names = {_model_of(unit): unit["model"] for unit in measured_units}
    for unit in units:
        name = unit.subject["model"]
        model = _model_of(unit.subject)
        # Results of two models under one name would be overwritten, or be taken
        # together in means.
        measured_model = models.get(name, model)
        if measured_model != model:
            raise ValueError(
                f"{results.path} holds results of {_describe_model(measured_model)} as "
                f"{name!r}, asked for is {_describe_model(model)}: "
                "give it another name, or choose another folder"
            )
        # Two spellings of one path would be two models.
        measured_name = names.get(model, name)
        is_path_of_model = str(Path(name).resolve()) == model[0]
        if measured_name != name and is_path_of_model:
            raise ValueError(
                f"{results.path} holds results of {model[0]!r} as {measured_name!r}: "
                f"ask for it by that name, got {name!r}"
            )


def _model_of(subject: Mapping[str, Any]) -> _Model:
    """Return the model whose checkpoint a unit measures."""
    source = subject["source"]
    name = source["name"]
    # A folder of checkpoints has one model in it, in a folder for each step.
    has_step = subject["checkpoint"] not in (MAIN, UNTRAINED)
    if has_step and "checkpoint" not in source:
        name = str(Path(name).parent)
    return name, source.get("quantization")


def _describe_model(model: _Model) -> str:
    name, quantization = model
    return repr(name) if quantization is None else f"{name!r} in {quantization}"
