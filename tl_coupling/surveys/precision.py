"""How far each measure moves when weights are rounded: the same prompts, the same
model, weights of several precisions.

Only weights are rounded. Activations, and everything that is computed of them, stay in
float32 at every precision.
"""

import gc
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tl_coupling.arguments import AnyPath, Device, checked, warn_caller
from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import file_name, output_folder
from tl_coupling.jacobians import block_jacobians, fill_pairs
from tl_coupling.measures import MEASURES, mean_name, subspace_overlap
from tl_coupling.models import Backend, ModelError, is_gguf, load_model, needs_package
from tl_coupling.progress import Progress
from tl_coupling.spectra import svd
from tl_coupling.surveys.checkpoints import Checkpoint, Source, is_local
from tl_coupling.surveys.local_models import check_files, with_files
from tl_coupling.surveys.measurements import (
    PAPER_PROMPT,
    Prompts,
    Settings,
    as_prompts,
    measures,
    of_each_prompt,
)
from tl_coupling.surveys.units import Folder, Unit, load_unit, one_line
from tl_coupling.traces import Trace

if TYPE_CHECKING:
    import xarray

PRECISIONS = ("float32", "bfloat16", "int8", "nf4")
# What each row of `movements` is, in this order.
MOVING = {
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
# What weights of one model have in common beside its class, as TransformerLens'
# configuration names it, and in words.
_SIZES = {
    "n_heads": "attention heads",
    "n_key_value_heads": "key-value heads",
    "d_head": "width of a head",
    "d_mlp": "width of the MLP",
    "d_vocab": "vocabulary",
}
# llama.cpp calls both of them llama.
_ALIKE_IN_GGUF = ["LlamaForCausalLM", "MistralForCausalLM"]


class Moved(NamedTuple):
    """How far one measure moves at one precision: the mean over prompts of its value
    and of its change.

    `spread` is the standard deviation of the change over prompts, NaN for one; `k` is
    None for measures without one.
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
        name, checkpoint, backend, device: as in `load_model`.
        precisions: "float32", "bfloat16", "int8", "nf4"; or `NAME=MODEL`, other weights
            of the same model under that name: a GGUF file, a folder, a hub name.
            Changes are from the first. One of another class or of other sizes fails,
            and so does one that splits the prompts into other tokens.
        prompts, settings: as in `measure_prompts`.
        folder: where the result of each precision is written when it is done; a run
            there does what is missing. It holds `2 n_layers d_model k` numbers for each
            prompt, the singular vectors of the first precision.
        progress: wraps the loop over precisions; by default bars in a terminal or
            notebook, False for none.

    Returns:
        what `measure_prompts` gives, `[precision prompt …]`, and

        - `left_overlap`, `right_overlap`, `[precision prompt k layer]`: how far the top
          k left (right) singular vectors of a Jacobian span the same space as those of
          the first precision, the mean squared cosine of the principal angles
          (`coupling.subspace_overlap`); 1 for the same space, `k / d_model` for random
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
        ValueError: unknown precisions, fewer than two, or one twice; results of
            something else in the folder.
        ModelError: the first precision could not be measured, or bitsandbytes is
            missing.

    Example:
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded", "progress": False}
        >>> data = tlc.surveys.precision_sweep("models/width16/step2", ["float32", "bfloat16"], prompts, **how)
        >>> change = data.pair_change.sel(k=4).mean("prompt").values.tolist()
        >>> 0 == change[0] < change[1] < 0.1
        True
    """
    import xarray

    chosen, settings = as_prompts(prompts), settings or Settings()
    if len(settings.orientations) > 1:
        raise ValueError(
            f"precisions are compared in one orientation, got {', '.join(settings.orientations)}"
        )
    sources = _sources(str(name), precisions, checkpoint)
    first = next(iter(sources))
    loading: dict[str, Any] = {"backend": backend, "device": device}
    plan: dict[str, Any] = {
        "kind": "precision",
        "model": str(name),
        "checkpoint": checkpoint,
        "first": first,
        "backend": backend,
    }
    plan |= {"prompts": [[p.id, p.task, p.text] for p in chosen], **settings.as_plan()}
    place = (
        tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder))
    )
    with place as where, output_folder(where) as path:
        results = Folder(path, plan, temporary=folder is None)
        units = [
            Unit(file_name(one), {"precision": one, "source": source})
            for one, source in sources.items()
        ]

        def measure(unit: Unit) -> "xarray.Dataset":
            # A bridge and its hook points refer to each other.
            gc.collect()
            check_files(unit)
            precision = unit.what["precision"]
            reference = None if precision == first else load_unit(path, units[0])
            model = load_model(**unit.what["source"], **loading)
            architecture = _architecture(model, is_gguf(unit.what["source"]["name"]))
            # Older results do not hold it.
            if reference is not None and "architecture" in reference.attrs:
                _check_architecture(
                    architecture, json.loads(reference.attrs["architecture"]), precision
                )
            if precision == "bfloat16":
                _round_to_bfloat16(model)
            found = of_each_prompt(
                model, chosen, settings, partial(_measures, settings=settings), progress
            )
            found = found.assign_attrs(architecture=json.dumps(architecture))
            # They may have changed amid the loading.
            check_files(unit)
            return (
                found if reference is None else _compared(found, reference, precision)
            )

        with results.held():
            units = with_files(results, units)
            # What is compared needs what it is compared with.
            outcomes = results.run(units[:1], measure, progress=False)
            if error := outcomes[0].error:
                raise ModelError(
                    f"{first} could not be measured, with which the others are compared: {error}"
                )
            outcomes += results.run(units[1:], measure, progress)
        failed = {
            one: o.error
            for one, o in zip(sources, outcomes, strict=True)
            if o.status == "failed"
        }
        if failed:
            warn_caller(
                f"{len(failed)} of {len(sources)} precisions failed: {one_line(failed)}"
            )
        done = [
            unit
            for unit, outcome in zip(units, outcomes, strict=True)
            if outcome.status != "failed"
        ]
        pieces = [load_unit(path, unit) for unit in done]
    pieces[0] = _compared(pieces[0], pieces[0], first)
    provenance = {
        unit.what["precision"]: json.loads(one.attrs["provenance"])
        for unit, one in zip(done, pieces, strict=True)
    }
    data = xarray.concat(pieces, "precision", combine_attrs="drop_conflicts")
    data = data.assign_coords(precision=list(provenance))
    width = next(iter(provenance.values()))["d_model"]
    said = {
        "model": str(name),
        "d_model": width,
        "provenance": json.dumps(provenance),
        "failed": json.dumps(failed),
    }
    return data.assign_attrs(said)


@checked
def movements(data: "xarray.Dataset") -> list[Moved]:
    """How far each measure of a `precision_sweep` moves, one row for each measure, k
    and precision.

    Rows have the fields `measure`, `k`, `precision`, `mean` over prompts, and `change`
    from the first precision with its `spread` over prompts.

    Example:
        >>> how = {"settings": tlc.Settings(k=(2, 4)), "folder": "rounded", "progress": False}
        >>> data = tlc.surveys.precision_sweep("models/width16/step2", ["float32", "bfloat16"], prompts, **how)
        >>> tlc.surveys.movements(data)[0][:3]
        ('mean_coupling', 2, 'float32')
    """
    rows = []
    for measure in MOVING:
        values = (
            data[measure].mean("layer")
            if "layer" in data[measure].dims
            else data[measure]
        )
        changes = values - values.isel(precision=0)
        for k in data["k"].values.tolist() if "k" in values.dims else [None]:
            at = {} if k is None else {"k": k}
            for precision in data["precision"].values.tolist():
                value, change = (
                    one.sel(precision=precision, **at).values
                    for one in (values, changes)
                )
                spread = (
                    float(np.std(change, ddof=1)) if len(change) > 1 else float("nan")
                )
                rows.append(
                    Moved(
                        measure,
                        k,
                        precision,
                        float(value.mean()),
                        float(change.mean()),
                        spread,
                    )
                )
    return rows


def _sources(
    name: str, precisions: Sequence[str], checkpoint: Checkpoint | None
) -> dict[str, Source]:
    """What `load_model` takes for each precision, by its name."""
    own: Source = (
        {"name": name}
        if checkpoint is None
        else {"name": name, "checkpoint": checkpoint}
    )
    found: list[tuple[str, Source]] = []
    for text in precisions:
        label, equals, other = text.partition("=")
        if label and other:
            found.append(
                (
                    label,
                    {"name": str(Path(other).resolve()) if is_local(other) else other},
                )
            )
        elif equals or text not in PRECISIONS:
            wanted = f"{', '.join(PRECISIONS)}, or NAME=MODEL for other weights of the same model"
            raise ValueError(
                f"`precisions` must be {wanted} (a GGUF file, a folder, a hub name); got {text!r}"
            )
        else:
            is_quantised = text in ("int8", "nf4")
            if is_quantised:
                needs_package(f"{text!r}", "bitsandbytes")
            found.append((text, own | {"quantization": text} if is_quantised else own))
    if len(found) < 2 or len(dict(found)) < len(found):
        raise ValueError(
            f"`precisions` must be two or more, each once; got {list(precisions)}"
        )
    return dict(found)


def _round_to_bfloat16(model: Any) -> None:
    # A bridge does not list every part of the model that it wraps, and holds copies of
    # some.
    for part in (model, getattr(model, "original_model", model)):
        for parameter in part.parameters():
            parameter.data = parameter.data.bfloat16().to(parameter.dtype)


def _architecture(model: Any, in_gguf: bool) -> dict[str, Any]:
    """Which class the model may be of, and its sizes as far as they are known."""
    original = getattr(model, "original_model", None)
    name = (
        getattr(model.cfg, "original_architecture", None)
        if original is None
        else type(original).__name__
    )
    sizes = {size: getattr(model.cfg, size, None) for size in _SIZES}
    # Some configurations leave it out where there are no fewer.
    sizes["n_key_value_heads"] = sizes["n_key_value_heads"] or sizes["n_heads"]
    return {
        "classes": _ALIKE_IN_GGUF if in_gguf and name in _ALIKE_IN_GGUF else [name],
        **sizes,
    }


def _check_architecture(
    found: dict[str, Any], reference: dict[str, Any], precision: str
) -> None:
    """Raise before anything is measured where class or sizes, as far as both are known,
    are not the reference's.
    """
    another = f"{precision} is not the model it is compared with"
    if set(found["classes"]).isdisjoint(reference["classes"]):
        raise ValueError(
            f"{another}: they are {found['classes'][0]} and {reference['classes'][0]}"
        )
    for size, words in _SIZES.items():
        if (
            None not in (found[size], reference[size])
            and found[size] != reference[size]
        ):
            raise ValueError(f"{another}: {words} {found[size]} and {reference[size]}")


def _measures(traced: Trace, settings: Settings) -> "xarray.Dataset":
    """Every measure of one prompt, its tokens, and the top singular vectors, `[layer
    width vector]`.
    """
    k, t = settings.largest(traced.d_model), traced.position_index(settings.position)
    orientation = settings.orientations[0]
    J = block_jacobians(traced, position=t, function="branches", progress=False)
    spectrum = svd(J, k)
    A, layers, at = (
        J.new_empty(len(J), len(J), k, k),
        tuple(range(len(J))),
        (t,) * len(J),
    )
    fill_pairs(A, J, spectrum, orientation)
    norms, provenance = torch.linalg.matrix_norm(J), traced.provenance | {"position": t}
    named = layers, layers, at, at, "depth", orientation, provenance
    data = measures(
        traced, settings, CouplingMap(A, spectrum.S, norms, traced.d_model, *named)
    )
    dims = ("layer", "width", "vector")
    vectors = {
        side: (dims, one.cpu().numpy())
        for side, one in zip(_VECTORS, (spectrum.U, spectrum.Vh.mT), strict=True)
    }
    return data.assign(
        vectors | {"tokens": json.dumps(traced.provenance.get("tokens"))}
    )


def _compared(
    found: "xarray.Dataset", reference: "xarray.Dataset", precision: str
) -> "xarray.Dataset":
    """What was found, with how far it is from the reference; ValueError unless both are
    of one model.
    """
    shapes = [(one.sizes["layer"], one.sizes["width"]) for one in (found, reference)]
    if shapes[0] != shapes[1]:
        sizes = " and ".join(
            f"{n_layers} blocks of width {width}" for n_layers, width in shapes
        )
        raise ValueError(
            f"{precision} is not the model it is compared with: they have {sizes}"
        )
    if not found["tokens"].equals(reference["tokens"]):
        raise ValueError(
            f"{precision} is not the model it is compared with: it splits the prompts into other tokens"
        )
    ks = found["k"].values.tolist()
    for side in _VECTORS:
        ours, theirs = (
            torch.from_numpy(one[side].values) for one in (found, reference)
        )
        overlaps = [subspace_overlap(theirs[..., :k].mT @ ours[..., :k]) for k in ks]
        found[f"{side}_overlap"] = (
            ("prompt", "k", "layer"),
            torch.stack(overlaps, 1).numpy(),
        )
    change = found["coupling"] - reference["coupling"]
    pairs = change["layer"] != change["other_layer"]
    found["pair_change"] = np.sqrt(
        (change**2).where(pairs).mean(("layer", "other_layer"))
    )
    relative = abs(found["singular_values"] / reference["singular_values"] - 1)
    found["largest_singular_value_change"] = relative.isel(singular_value=0, drop=True)
    found["singular_values_change"] = relative.mean("singular_value")
    # Needed of the reference alone, while others are compared with it.
    found.attrs.pop("architecture", None)
    return found.drop_vars([*_VECTORS, "tokens"])
