"""Surveys: many models, checkpoints and prompts, in units that survive a crash and run
on any executor.
"""

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from tl_coupling.models import Backend, Memory, ModelError, Quantization, load_model
from tl_coupling.progress import Progress
from tl_coupling.surveys.checkpoints import (
    Checkpoint,
    Source,
    checkpoint_sources,
    is_cached,
    is_local,
)
from tl_coupling.surveys.executors import Executor
from tl_coupling.surveys.local_models import check_files, with_files
from tl_coupling.surveys.measurements import (
    IMPLIED,
    PAPER_PROMPT,
    Prompts,
    Settings,
    as_prompts,
    measure_prompts,
)
from tl_coupling.surveys.results import (
    COSTS,
    FACTS,
    finished_units,
    joined_units,
    records_of,
)
from tl_coupling.surveys.units import Folder, Unit, one_line

if TYPE_CHECKING:
    import xarray

MAIN, UNTRAINED = "main", "untrained"
_LOADING = ("backend", "device", "dtype", "memory")


@made_by("Survey(models, prompts)")
@checked
@dataclass(frozen=True)
class Survey:
    """What is measured on what: every model, at every checkpoint, on every prompt.

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
            parallel, but each loads its model anew.
        backend, device, dtype, memory: as in `load_model`.
        quantization: as there. Quantised models are named so, "gpt2 (nf4)", and may
            share a folder with others.

    ValueError where models or prompts are missing or there twice, or checkpoints are of
    a model that is not surveyed.

    Example:
        >>> [unit.key for unit in tlc.Survey(["gpt2", "distilgpt2"], ["One and one is", "Two and two is"]).units()]
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
        """Raise on what cannot be measured; keep paths as they are meant now, and
        prompts as a list.
        """
        one = (
            [self.models] if isinstance(self.models, str | os.PathLike) else self.models
        )
        given = (
            list(one.items())
            if isinstance(one, Mapping)
            else [(os.fspath(source), source) for source in one]
        )
        names = [name for name, _ in given]
        if not names or "" in names or len(set(names)) < len(names):
            raise ValueError(
                f"`models` must be one or more names, each once, got {names}"
            )
        # A folder is the same however its path is written and wherever a worker starts.
        models = {
            name: str(Path(s).resolve()) if is_local(s) else os.fspath(s)
            for name, s in given
        }
        if missing := [
            s
            for s in models.values()
            if s.startswith(("/", "./", "../", "~")) and not is_local(s)
        ]:
            raise ValueError(f"there is no such folder: {', '.join(missing)}")
        if self.untrained and (
            self.quantization is not None or self.memory == "stream"
        ):
            raise ValueError(
                '`untrained` goes with neither `quantization` nor `memory="stream"`: leave it out'
            )
        if not isinstance(one, Mapping) and len(set(models.values())) < len(models):
            raise ValueError(
                f"`models` must be different folders, got {names}; a mapping gives one several names"
            )
        by_model = (
            self.checkpoints
            if isinstance(self.checkpoints, Mapping)
            else dict.fromkeys(names, self.checkpoints)
        )
        if unknown := set(by_model) - set(names):
            raise ValueError(
                f"`checkpoints` names models that are not surveyed: {sorted(unknown)}; there are {names}"
            )
        for chosen in by_model.values():
            if chosen is not None and not chosen:
                raise ValueError("`checkpoints` is empty: wanted at least one")
            if chosen and (
                len(set(chosen)) < len(chosen) or len({type(c) for c in chosen}) > 1
            ):
                raise ValueError(
                    f"`checkpoints` must be all steps or all revisions, each once, got {list(chosen)}"
                )
        if (
            self.untrained
            and self.checkpoints is not None
            and not isinstance(self.checkpoints, Mapping)
        ):
            raise ValueError(
                "`untrained` does not go with `checkpoints` of all models: leave one out, or name models"
            )
        object.__setattr__(self, "models", models)
        object.__setattr__(self, "prompts", as_prompts(self.prompts))

    def units(self) -> list[Unit]:
        """The pieces of work, in the order of models, checkpoints and prompts."""
        prompts, found = as_prompts(self.prompts), []
        size = self.prompts_per_unit or len(prompts)
        how, suffix = (
            ({}, "")
            if (q := self.quantization) is None
            else ({"quantization": q}, f" ({q})")
        )
        for label, name in dict[str, str](self.models).items():  # type: ignore[arg-type]
            model = label + suffix
            for checkpoint, plain in self._sources(label, name).items():
                source: Source = plain | how
                what = {"model": model, "checkpoint": checkpoint, "source": source}
                for first in range(0, len(prompts), size):
                    key = (
                        f"{file_name(model)}@{file_name(str(checkpoint))}"
                        + f"+{first}" * (size < len(prompts))
                    )
                    some = prompts[first : first + size]
                    found.append(
                        Unit(
                            key,
                            what | {"prompts": [first, first + len(some)]},
                            (source, some),
                        )
                    )
        return found

    def _sources(self, model: str, name: str) -> dict[Any, Source]:
        chosen = (
            self.checkpoints.get(model)
            if isinstance(self.checkpoints, Mapping)
            else self.checkpoints
        )
        if chosen is not None or (
            Path(name).is_dir() and not Path(name, "config.json").exists()
        ):
            return checkpoint_sources(name, chosen)
        twin = {UNTRAINED: {"name": name, "untrained": True}} if self.untrained else {}
        return {MAIN: {"name": name}} | twin

    def plan(self) -> dict[str, Any]:
        """What the results depend on beside the models, JSON-able."""
        return {
            "kind": "survey",
            "prompts_per_unit": self.prompts_per_unit,
            "backend": self.backend,
            "dtype": str(self.dtype).removeprefix("torch."),
            **self.settings.as_plan(),
            "prompts": [[p.id, p.task, p.text] for p in as_prompts(self.prompts)],
        }


@dataclass
class MeasureModel:
    """Measures a unit. After the first model that is not there without a network, only
    cached ones are tried.

    `texts` are those of the prompts in the plan, by id.
    """

    survey: Survey
    progress: Progress | None = None
    no_network: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, unit: Unit) -> "xarray.Dataset":
        """Load its model and measure its prompts."""
        # A bridge and its hook points refer to each other, and an error holds its model
        # until it is recorded.
        gc.collect()
        (source, prompts), asked = unit.given, self.survey
        if self.no_network and not is_cached(source):
            raise ModelError(f"not tried: {self.no_network}")
        self._check_inputs(unit)
        try:
            model = load_model(
                **source, **{name: getattr(asked, name) for name in _LOADING}
            )
        except ModelError as error:
            self.no_network = self.no_network or (
                str(error) if "no network" in str(error) else None
            )
            raise
        data = measure_prompts(model, prompts, asked.settings, self.progress)
        # They may have changed amid the loading.
        self._check_inputs(unit)
        return data

    def _check_inputs(self, unit: Unit) -> None:
        """Raise where the model or an image is no longer what it was when the run
        began.
        """
        check_files(unit)
        _, prompts = unit.given
        for prompt in prompts:
            if prompt.image is not None and prompt.text != self.texts.get(
                prompt.id, prompt.text
            ):
                raise ValueError(
                    f"prompt {prompt.id!r}: the image {prompt.image} was changed after this run began: restore it and "
                    "run again, or choose another folder of results"
                )


@checked
def run(
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
            units and for the prompts of each, in a terminal or notebook; False for
            none.

    Returns:
        as `open_survey`. Units that failed are missing (NaN), with a warning; their
        errors are in `attrs["failed"]`.

    Raises:
        ValueError: the folder has results of another survey, of another model under the
            same name, or of a local model whose files are others now; or another run is
            using it.
        ModelError: not one unit could be measured.
        OSError: the folder cannot be written to; what is finished is kept.

    The values do not depend on the executor, on interruptions or on `prompts_per_unit`,
    as long as torch runs with the same number of threads. Cost beside the measurements:
    the files of local models are read once for their checksums. A unit that kills its
    worker fails; with executors other than `process_pool`, others may fail with it.
    Without a network, only cached models are tried after the first that is not.

    Example:
        >>> models = {f"width{width}": f"models/width{width}/step2" for width in (8, 12, 16, 20, 24, 28)}
        >>> survey = tlc.Survey(models, prompts, settings=tlc.Settings(k=(2, 4), window=1))
        >>> data = tlc.run(survey, "survey", progress=False)
        >>> data.mean_coupling.dims, data.mean_coupling.shape
        (('model', 'checkpoint', 'prompt', 'k'), (6, 1, 4, 2))
    """
    return _run(survey, folder, executor, progress)


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
        folder, progress, executor: as in `run`; a unit is a checkpoint.

    Returns:
        what `open_survey` gives for this model without its size and cost, `[checkpoint
        prompt …]`, in the order asked for. Checkpoints that failed are left out, with a
        warning; their errors are in `attrs["failed"]`.

    Errors are those of `run`, and ValueError for checkpoints of different depths. One
    model is in memory at a time.

    Example:
        >>> how = {"settings": tlc.Settings(k=(2, 4), window=1), "progress": False}
        >>> sweep = tlc.checkpoint_sweep("models/width16", prompts=prompts, folder="sweep", **how)
        >>> sweep.checkpoint.values.tolist(), sweep.mean_coupling.dims
        ([0, 2], ('checkpoint', 'prompt', 'k'))
    """
    label = Path(name).resolve().name if Path(name).is_dir() else os.fspath(name)
    wanted = (
        list(checkpoint_sources(name, None)) if checkpoints is None else checkpoints
    )
    loading = (backend, device, dtype, quantization, memory)
    asked = Survey(
        {label: name},
        prompts,
        {label: wanted},
        False,
        settings or Settings(),
        None,
        *loading,
    )
    data = _run(asked, folder, executor, progress, os.fspath(name))
    failed = json.loads(data.attrs["failed"])
    model, there = (
        asked.units()[0].what["model"],
        [c for c in wanted if str(c) not in failed],
    )
    data = data.sel(model=model, checkpoint=there, drop=True)
    # Joined with a deeper model, one with fewer layers is filled up with NaN.
    if len(set(data["n_layers"].values)) > 1:
        depths = dict(
            zip(
                data["checkpoint"].values.tolist(),
                data["n_layers"].values.tolist(),
                strict=True,
            )
        )
        raise ValueError(
            f"the checkpoints of {name} are not of one architecture; layers: {depths}"
        )
    return data.drop_vars([*FACTS, *COSTS]).assign_attrs(model=os.fspath(name))


def _run(
    survey: Survey,
    folder: AnyPath | None,
    executor: Executor | None,
    progress: Progress | None,
    sweep_of: str = "",
) -> "xarray.Dataset":
    """`run`; or the units of a sweep alone, which are called by their checkpoints."""
    units = survey.units()
    place = (
        tempfile.TemporaryDirectory()
        if folder is None
        else nullcontext(os.fspath(folder))
    )
    with place as where, output_folder(where) as path:
        results = Folder(path, survey.plan(), folder is None, IMPLIED)
        # Bars of several workers would overwrite each other.
        within: Progress | None = (
            None if executor is None and progress is None else False
        )
        # What is there is still there when the units are run.
        with results.held():
            _check_names(results, units)
            units = with_files(results, units)
            texts = {prompt_id: text for prompt_id, _, text in results.plan["prompts"]}
            measure = MeasureModel(survey, within, texts=texts)
            outcomes = results.run(units, measure, progress, executor)
        gc.collect()
        what = f"checkpoints of {sweep_of}" if sweep_of else "units"
        labels = [
            str(unit.what["checkpoint"]) if sweep_of else unit.key for unit in units
        ]
        failed = {
            label: o.error
            for label, o in zip(labels, outcomes, strict=True)
            if o.status == "failed"
        }
        if len(failed) == len(outcomes):
            first, error = next(iter(failed.items()))
            raise ModelError(
                f"none of the {len(failed)} {what} could be measured; {first}: {error}"
            )
        if failed:
            warn_caller(
                f"{len(failed)} of {len(outcomes)} {what} failed and are left out: {one_line(failed)}"
            )
        finished = (
            [o.unit for o in outcomes if o.status != "failed"]
            if sweep_of
            else finished_units(results)
        )
        # Of this run: other models may have failed in earlier ones.
        data = joined_units(results, finished).assign_attrs(failed=json.dumps(failed))
        return data.load() if folder is None else data


def _check_names(results: Folder, units: Sequence[Unit]) -> None:
    """Raise ValueError where a name would stand for two models of the folder, or one of
    them would have two names.
    """
    measured_units = [
        content["what"]
        for content in records_of(results).values()
        if content.get("status") == "finished"
    ]
    models = {unit["model"]: _model_of(unit) for unit in measured_units}
    names = {_model_of(unit): unit["model"] for unit in measured_units}
    for unit in units:
        name = unit.what["model"]
        model = _model_of(unit.what)
        # Results of two models under one name would be overwritten, or be taken
        # together in means.
        if (before := models.get(name, model)) != model:
            raise ValueError(
                f"{results.path} holds results of {_in_words(before)} as {name!r}, asked for is {_in_words(model)}: "
                "give it another name, or choose another folder"
            )
        # Two spellings of one path would be two models.
        if (other := names.get(model, name)) != name and str(
            Path(name).resolve()
        ) == model[0]:
            raise ValueError(
                f"{results.path} holds results of {model[0]!r} as {other!r}: ask for it by that name, got {name!r}"
            )


def _model_of(unit: Mapping[str, Any]) -> tuple[str, str | None]:
    """The model whose checkpoint a unit measures (a hub name, a folder, a file), and
    how it is quantised.
    """
    source = unit["source"]
    name = source["name"]
    # A folder of checkpoints has one model in it, in a folder for each step.
    is_local_checkpoint = "checkpoint" not in source and unit["checkpoint"] not in (
        MAIN,
        UNTRAINED,
    )
    if is_local_checkpoint:
        name = str(Path(name).parent)
    return name, source.get("quantization")


def _in_words(model: tuple[str, str | None]) -> str:
    name, quantization = model
    return repr(name) if quantization is None else f"{name!r} in {quantization}"
