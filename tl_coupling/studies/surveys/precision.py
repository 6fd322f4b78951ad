"""How far each measure moves when the weights of a model are rounded.

The same prompts are measured with weights of several precisions. Only weights are
rounded: activations, and everything that is computed from them, stay in float32.
"""

import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from tl_coupling.arguments import AnyPath, Device, checked, warn_caller
from tl_coupling.blocks import Trace
from tl_coupling.comparisons import maps_of
from tl_coupling.files import file_name, output_folder
from tl_coupling.jacobians import Connection, Decomposed, block_jacobians, couple
from tl_coupling.measures import MEASURES, mean_name, subspace_overlap
from tl_coupling.models import Backend, ModelError, is_gguf, load_model, needs_package
from tl_coupling.progress import Progress
from tl_coupling.prompts import Prompt, Prompts, as_prompts
from tl_coupling.studies.surveys.checkpoints import (
    Checkpoint,
    QuantizedSource,
    Source,
    is_local,
)
from tl_coupling.studies.surveys.local_models import attach_files, check_files
from tl_coupling.studies.surveys.measurements import measure_each_prompt
from tl_coupling.studies.surveys.settings import PAPER_PROMPT, Settings
from tl_coupling.studies.surveys.units import Folder, Outcome, Unit, load_unit, one_line
from tl_coupling.studies.surveys.variables import measures

if TYPE_CHECKING:
    import xarray

PRECISIONS = ("float32", "bfloat16", "int8", "nf4")
# The measures of `precision_changes`, in this order, in words.
COMPARED_MEASURES = {
    mean_name("coupling"): MEASURES["coupling"].words,
    mean_name("normalized_miscoupling"): MEASURES["normalized_miscoupling"].words,
    mean_name("spectral_miscoupling"): MEASURES["spectral_miscoupling"].words,
    "pair_change": "coupling of a pair, RMS change",
    "left_overlap": "overlap of left singular subspaces",
    "right_overlap": "overlap of right singular subspaces",
    "largest_singular_value_change": "largest singular value, |σ'/σ − 1|",
    "singular_values_change": "top singular values, |σ'/σ − 1|",
    "line_shape_score": "line-shape score",
    "line_shape_score_all_tokens": "line-shape score, all tokens",
    "expodistance": "expodistance",
    "expodistance_all_tokens": "expodistance, all tokens",
    "loss": "loss (nats per token)",
}
_VECTORS = ("left", "right")
# Sizes that all weights of one model have in common, beside its class: TransformerLens'
# name for each, and words.
_SIZES = {
    "n_heads": "attention heads",
    "n_key_value_heads": "key-value heads",
    "d_head": "width of a head",
    "d_mlp": "width of the MLP",
    "d_vocab": "vocabulary",
}
# llama.cpp calls both of them llama.
_ALIKE_IN_GGUF = ["LlamaForCausalLM", "MistralForCausalLM"]


class PrecisionChange(NamedTuple):
    """Say how far one measure moves at one precision, in the mean over prompts.

    `spread` is the standard deviation of the change over prompts, NaN for one prompt;
    `k` is None for measures without one.
    """

    measure: str
    k: int | None
    precision: str
    value: float
    change: float
    spread: float


@checked
def precision_sweep(
    name: AnyPath,
    precisions: Sequence[str] = PRECISIONS,
    prompts: Prompts = PAPER_PROMPT,
    *,
    settings: Settings | None = None,
    checkpoint: Checkpoint | None = None,
    folder: AnyPath | None = None,
    backend: Backend = "auto",
    device: Device | None = None,
    progress: Progress | None = None,
) -> "xarray.Dataset":
    """Measure the same prompts with a model's weights at several precisions.

    Weights alone are rounded: "bfloat16" is every weight rounded to bfloat16, "int8"
    and "nf4" are the dequantised weights of linear layers that bitsandbytes quantised.
    All are computed in float32, so that what a kernel in half precision or in integers
    does to activations is not part of the comparison.

    Args:
        name: of the model, as in `load_model`; so are `checkpoint`, `backend` and
            `device`.
        precisions: "float32", "bfloat16", "int8", "nf4"; or `NAME=MODEL`, other weights
            of the same model under that name: a GGUF file, a folder, a hub name.
            Changes are from the first. One of another class or of other sizes fails,
            and so does one that splits the prompts into other tokens.
        prompts: what is measured, as in `measure_prompts`.
        settings: how, as there, of whole Jacobians in one orientation.
        checkpoint: of the model.
        folder: where the result of each precision is written when it is done; a run
            there does what is missing. It holds `2 n_layers d_model k` numbers for each
            prompt, the singular vectors of the first precision.
        backend: TransformerLens' class.
        device: where the model is.
        progress: wraps the loop over precisions; by default bars in a terminal or
            notebook, False for none.

    Returns:
        what `measure_prompts` gives, `[precision prompt …]`, and

        - `left_overlap`, `right_overlap`, `[precision prompt k layer]`: how far the top
          k left (right) singular vectors of a Jacobian span the same space as those of
          the first precision, the mean squared cosine of the principal angles
          (`measures.subspace_overlap`); 1 for the same space, `k / d_model` for random
          ones;
        - `pair_change`, `[precision prompt k]`: root mean square, over pairs of
          different layers, of the change of coupling; that of a mean may hide how far
          pairs move;
        - `largest_singular_value_change` and `singular_values_change`, `[precision
          prompt layer]`: `|σ'/σ − 1|` of the largest, and its mean over all that are
          kept.

        Precisions that failed are missing, with a warning; their errors are in
        `attrs["failed"]`.

    Raises:
        ValueError: unknown precisions, fewer than two, or one twice; settings with
            `without`, `metric` or another `method`; results of something else in the
            folder.
        ModelError: the first precision could not be measured, or bitsandbytes is
            missing.

    Example:
        >>> weights = ("models/width16/step2", ["float32", "bfloat16"])
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded"}
        >>> data = tlc.surveys.precision_sweep(*weights, prompts, **how, progress=False)
        >>> change = data.pair_change.sel(k=4).mean("prompt").values.tolist()
        >>> 0 == change[0] < change[1] < 0.1
        True
    """
    named_prompts = as_prompts(prompts)
    settings = settings or Settings()
    if len(settings.orientations) > 1:
        raise ValueError(
            "precisions are compared in one orientation, "
            f"got {', '.join(settings.orientations)}"
        )
    if settings.without or settings.metric or settings.method != "jacobians":
        raise ValueError(
            "precisions are compared by whole Jacobians: leave `without`, `metric` and "
            "`method` out of the settings"
        )
    sources = _sources(str(name), precisions, checkpoint)
    first = next(iter(sources))
    plan = {
        "kind": "precision",
        "model": str(name),
        "checkpoint": checkpoint,
        "first": first,
        "backend": backend,
        "prompts": [[prompt.id, prompt.task, prompt.text] for prompt in named_prompts],
        **settings.as_plan(),
    }
    units = [
        Unit(file_name(precision), {"precision": precision, "source": source})
        for precision, source in sources.items()
    ]
    with _folder_or_temporary(folder) as path:
        results = Folder(path, plan, temporary=folder is None)
        with results.held():
            units = attach_files(results, units)
            sweep = _Sweep(
                prompts=named_prompts,
                settings=settings,
                folder=path,
                first=units[0],
                loading={"backend": backend, "device": device},
                progress=progress,
            )
            outcomes = sweep.run(results, units)
        measured = {
            precision: load_unit(path, unit)
            for precision, unit, outcome in zip(sources, units, outcomes, strict=True)
            if outcome.status != "failed"
        }
    failed = {
        precision: outcome.error
        for precision, outcome in zip(sources, outcomes, strict=True)
        if outcome.status == "failed"
    }
    if failed:
        warn_caller(
            f"{len(failed)} of {len(sources)} precisions failed: {one_line(failed)}"
        )
    # With itself: overlaps of 1 and changes of 0, so that all precisions have the same
    # variables.
    measured[first] = _compared(measured[first], measured[first], first)
    return _joined_precisions(measured, str(name), failed)


@contextmanager
def _folder_or_temporary(folder: AnyPath | None) -> Iterator[Path]:
    """Open the folder of results, or one that is gone afterwards."""
    if folder is None:
        with tempfile.TemporaryDirectory() as place, output_folder(place) as path:
            yield path
    else:
        with output_folder(str(folder)) as path:
            yield path


@dataclass(frozen=True)
class _Sweep:
    """What is measured at every precision.

    Attributes:
        prompts: what is measured.
        settings: how.
        folder: where the results are.
        first: the precision that the others are compared with.
        loading: further arguments of `load_model`.
        progress: wraps the loops over precisions and over prompts.
    """

    prompts: list[Prompt]
    settings: Settings
    folder: Path
    first: Unit
    loading: dict[str, Any]
    progress: Progress | None

    def run(self, results: Folder, units: list[Unit]) -> list[Outcome]:
        """Measure the first precision, and then the others, which need it.

        Raises:
            ModelError: the first could not be measured.
        """
        (outcome,) = results.run([self.first], self.measure, progress=False)
        if outcome.error:
            raise ModelError(
                f"{self.first.subject['precision']} could not be measured, with which "
                f"the others are compared: {outcome.error}"
            )
        return [outcome, *results.run(units[1:], self.measure, self.progress)]

    def measure(self, unit: Unit) -> "xarray.Dataset":
        """Measure one precision, and compare it with the first."""
        # A bridge and its hook points refer to each other.
        gc.collect()
        check_files(unit)
        precision = unit.subject["precision"]
        source = unit.subject["source"]
        is_first = precision == self.first.subject["precision"]
        reference = None if is_first else load_unit(self.folder, self.first)
        model = load_model(**source, **self.loading)
        architecture = _Architecture.from_model(model, is_gguf(source["name"]))
        # Older results do not hold it.
        if reference is not None and "architecture" in reference.attrs:
            reference_architecture = _Architecture.from_json(
                reference.attrs["architecture"]
            )
            _check_architecture(architecture, reference_architecture, precision)
        if precision == "bfloat16":
            _round_to_bfloat16(model)
        measured = measure_each_prompt(
            model,
            self.prompts,
            self.settings,
            partial(_measures, settings=self.settings),
            self.progress,
        )
        measured = measured.assign_attrs(architecture=architecture.as_json())
        # They may have changed amid the loading.
        check_files(unit)
        if reference is None:
            return measured
        return _compared(measured, reference, precision)


def _joined_precisions(
    measured: "dict[str, xarray.Dataset]", model: str, failed: dict[str, str | None]
) -> "xarray.Dataset":
    """Return the results of all precisions as one dataset, with their provenance.

    Args:
        measured: the results of each precision.
        model: what was measured.
        failed: the errors of the other precisions.
    """
    import xarray

    provenance = {
        precision: json.loads(precision_data.attrs["provenance"])
        for precision, precision_data in measured.items()
    }
    data = xarray.concat(
        list(measured.values()), "precision", combine_attrs="drop_conflicts"
    )
    width = next(iter(provenance.values()))["d_model"]
    return data.assign_coords(precision=list(measured)).assign_attrs(
        model=model,
        d_model=width,
        provenance=json.dumps(provenance),
        failed=json.dumps(failed),
    )


@checked
def precision_changes(data: "xarray.Dataset") -> list[PrecisionChange]:
    """Return how far each measure moves, one row for each measure, k and precision.

    Args:
        data: what `precision_sweep` returns.

    Returns:
        rows with the fields `measure`, `k`, `precision`, `value`, the mean over
        prompts, and `change` from the first precision with its `spread` over prompts.

    Example:
        >>> weights = ("models/width16/step2", ["float32", "bfloat16"])
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded"}
        >>> data = tlc.surveys.precision_sweep(*weights, prompts, **how, progress=False)
        >>> tlc.surveys.precision_changes(data)[0][:3]
        ('mean_coupling', 2, 'float32')
    """
    rows: list[PrecisionChange] = []
    for measure in COMPARED_MEASURES:
        values = data[measure]
        if "layer" in values.dims:
            values = values.mean("layer", skipna=False)
        if "k" not in values.dims:
            rows += _changes_of_measure(values, measure, None)
            continue
        for k in data["k"].values.tolist():
            rows += _changes_of_measure(values.sel(k=k), measure, k)
    return rows


def _changes_of_measure(
    values: "xarray.DataArray", measure: str, k: int | None
) -> Iterator[PrecisionChange]:
    """Yield a row for each precision, from values `[precision prompt]`."""
    changes = values - values.isel(precision=0)
    for precision in values["precision"].values.tolist():
        value = values.sel(precision=precision).values
        change = changes.sel(precision=precision).values
        # One prompt has no spread.
        spread = float("nan")
        if len(change) > 1:
            spread = float(np.std(change, ddof=1))
        yield PrecisionChange(
            measure=measure,
            k=k,
            precision=precision,
            value=float(value.mean()),
            change=float(change.mean()),
            spread=spread,
        )


def _sources(
    name: str, precisions: Sequence[str], checkpoint: Checkpoint | None
) -> dict[str, QuantizedSource]:
    """Return what `load_model` takes for each precision, by its name."""
    weights: Source = {"name": name}
    if checkpoint is not None:
        weights["checkpoint"] = checkpoint
    labelled = [_labelled_source(text, weights) for text in precisions]
    sources = dict(labelled)
    if len(sources) < 2 or len(sources) < len(labelled):
        raise ValueError(
            f"`precisions` must be two or more, each once; got {list(precisions)}"
        )
    return sources


def _labelled_source(text: str, weights: Source) -> tuple[str, QuantizedSource]:
    """Return the name of a precision and what `load_model` takes for it.

    Args:
        text: a name from `PRECISIONS`, or `NAME=MODEL`.
        weights: the model that is rounded.
    """
    label, equals, model = text.partition("=")
    if label and model:
        # Kept in the plan: a folder is the same from wherever a run starts.
        name = str(Path(model).resolve()) if is_local(model) else model
        return label, {"name": name}
    if equals or text not in PRECISIONS:
        raise ValueError(
            f"`precisions` must be {', '.join(PRECISIONS)}, or NAME=MODEL for other "
            "weights of the same model (a GGUF file, a folder, a hub name); "
            f"got {text!r}"
        )
    quantized: QuantizedSource = {**weights}
    if text not in ("int8", "nf4"):
        return text, quantized
    needs_package(f"{text!r}", "bitsandbytes")
    quantized["quantization"] = "int8" if text == "int8" else "nf4"
    return text, quantized


def _round_to_bfloat16(model: nn.Module) -> None:
    """Round every weight of a model, and leave its dtype."""
    # A bridge does not list every part of the model that it wraps, and holds copies of
    # some.
    for part in (model, getattr(model, "original_model", model)):
        for parameter in part.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)


@dataclass(frozen=True)
class _Architecture:
    """What weights must have in common to be of one model.

    Attributes:
        classes: which class the model may be of.
        sizes: by the names in `_SIZES`; `None` where one is not known.
    """

    classes: list[str | None]
    sizes: dict[str, int | None]

    @classmethod
    def from_model(cls, model: nn.Module, is_from_gguf: bool) -> "_Architecture":
        """Return the architecture of a model, as far as it is known."""
        name = _class_name(model)
        classes = [name]
        if is_from_gguf and name in _ALIKE_IN_GGUF:
            classes = [*_ALIKE_IN_GGUF]
        sizes = {size: getattr(model.cfg, size, None) for size in _SIZES}
        # Some configurations leave it out where there are no fewer.
        sizes["n_key_value_heads"] = sizes["n_key_value_heads"] or sizes["n_heads"]
        return cls(classes, sizes)

    def as_json(self) -> str:
        """Return it as results hold it."""
        return json.dumps({"classes": self.classes, **self.sizes})

    @classmethod
    def from_json(cls, text: str) -> "_Architecture":
        """Read what results hold."""
        sizes = json.loads(text)
        classes = sizes.pop("classes")
        return cls(classes, sizes)


def _class_name(model: nn.Module) -> str | None:
    """Return the name of HuggingFace's class of a model, if it is known."""
    original = getattr(model, "original_model", None)
    if original is not None:
        return type(original).__name__
    return getattr(model.cfg, "original_architecture", None)


def _check_architecture(
    architecture: _Architecture, reference: _Architecture, precision: str
) -> None:
    """Raise ValueError where class or sizes, as far as known, are not the reference's.

    Called before anything is measured, which may take hours.
    """
    another = f"{precision} is not the model it is compared with"
    if set(architecture.classes).isdisjoint(reference.classes):
        raise ValueError(
            f"{another}: they are {architecture.classes[0]} and {reference.classes[0]}"
        )
    for name, words in _SIZES.items():
        size = architecture.sizes[name]
        size_of_reference = reference.sizes[name]
        if size is None or size_of_reference is None:
            continue
        if size != size_of_reference:
            raise ValueError(f"{another}: {words} {size} and {size_of_reference}")


def _measures(traced: Trace, settings: Settings) -> "xarray.Dataset":
    """Measure one prompt; with its tokens and the leading singular vectors.

    The vectors are `[layer width vector]`.
    """
    k = settings.largest(traced.d_model)
    t = traced.position_index(settings.position)
    orientation = settings.orientations[0]
    connections = [Connection(layer, t, t, t) for layer in range(traced.n_layers)]
    J = block_jacobians(traced, position=t, function="branches", progress=False)
    # No more triplets than are compared: nothing is said of the cut here.
    decomposed = Decomposed.from_jacobians(J, connections, k, n_triplets=k)
    coupled = couple(decomposed.rows(), len(decomposed), decomposed, (orientation,))
    provenance = traced.provenance | {"position": t}
    maps = maps_of(coupled, connections, decomposed, "depth", provenance)
    data = measures(traced, settings, maps[orientation])
    dims = ("layer", "width", "vector")
    spectra = decomposed.spectra
    return data.assign(
        left=(dims, spectra.U.cpu().numpy()),
        right=(dims, spectra.Vh.mT.cpu().numpy()),
        tokens=json.dumps(traced.provenance.get("tokens")),
    )


def _compared(
    measured: "xarray.Dataset", reference: "xarray.Dataset", precision: str
) -> "xarray.Dataset":
    """Add how far the results of a precision are from the reference.

    Raises:
        ValueError: they are of different models.
    """
    _check_comparable(measured, reference, precision)
    ks = measured["k"].values.tolist()
    for side in _VECTORS:
        vectors = torch.from_numpy(measured[side].values)
        reference_vectors = torch.from_numpy(reference[side].values)
        overlaps = [
            # Vectors are columns, `[prompt layer width k]`: the product holds their
            # cosines.
            subspace_overlap(reference_vectors[..., :k].mT @ vectors[..., :k])
            for k in ks
        ]
        measured[f"{side}_overlap"] = (
            ("prompt", "k", "layer"),
            torch.stack(overlaps, 1).numpy(),
        )
    change = measured["coupling"] - reference["coupling"]
    # A layer is coupled with itself at every precision.
    squared_changes = (change**2).where(change["layer"] != change["other_layer"])
    measured["pair_change"] = np.sqrt(squared_changes.mean(("layer", "other_layer")))
    # `[prompt layer singular_value]`, each with the one of the same rank.
    relative = abs(measured["singular_values"] / reference["singular_values"] - 1)
    largest = relative.isel(singular_value=0, drop=True)
    measured["largest_singular_value_change"] = largest
    measured["singular_values_change"] = relative.mean("singular_value")
    # Needed of the reference alone, while others are compared with it.
    measured.attrs.pop("architecture", None)
    # The vectors take most of the room, and were needed for overlaps alone.
    return measured.drop_vars([*_VECTORS, "tokens"])


def _check_comparable(
    measured: "xarray.Dataset", reference: "xarray.Dataset", precision: str
) -> None:
    """Raise ValueError unless both are of one model, which has read the same tokens."""
    another = f"{precision} is not the model it is compared with"
    shape, shape_of_reference = (
        f"{data.sizes['layer']} blocks of width {data.sizes['width']}"
        for data in (measured, reference)
    )
    if shape != shape_of_reference:
        raise ValueError(f"{another}: they have {shape} and {shape_of_reference}")
    if not measured["tokens"].equals(reference["tokens"]):
        raise ValueError(f"{another}: it splits the prompts into other tokens")
