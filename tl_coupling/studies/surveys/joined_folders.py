"""Surveys in several folders as one: the shards of a job array of one's own."""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tl_coupling.arguments import warn_caller
from tl_coupling.results import common_facts, differing_facts
from tl_coupling.studies.surveys.checkpoints import step_order

if TYPE_CHECKING:
    import xarray

# What plans of one survey may differ in: each folder has prompts of its own.
_OF_EACH_FOLDER = {"prompts", "prompts_per_unit"}
_SAME_FOR_ALL = {"device", "versions"}
# Those of one model in several folders are summed up by themselves.
_COSTS = {"seconds", "peak_memory"}
# Attributes that are JSON objects by unit, or lists of units.
_BY_UNIT = ("failed", "provenance_by_unit")


def joined_folders(
    surveys: "Mapping[str, xarray.Dataset]", plans: Mapping[str, Mapping[str, Any]]
) -> "xarray.Dataset":
    """Return surveys, by their folders, as one with all their models and prompts.

    Units are named with their folder. Seconds of one model add up.

    Args:
        surveys: what `open_survey` gives of each folder.
        plans: what each was to measure.

    Raises:
        ValueError: other settings; one prompt's id with two texts; a model on a prompt
            that is in two folders; one name of models with other weights.
    """
    import xarray

    _check_settings(plans)
    _check_texts(surveys)
    _check_measured_once(surveys)
    _check_weights(surveys)
    _warn_of_gaps(surveys)
    pieces = list(_with_alike_checkpoints(surveys).values())
    joined = pieces[0].reset_coords(["task", "text"]).drop_vars(_COSTS)
    for piece in pieces[1:]:
        joined = joined.combine_first(
            piece.reset_coords(["task", "text"]).drop_vars(_COSTS)
        )
    seconds, memory = (
        xarray.concat([piece[name] for piece in pieces], "folder", join="outer")
        for name in ("seconds", "peak_memory")
    )
    joined = joined.assign(
        seconds=seconds.sum("folder", min_count=1), peak_memory=memory.max("folder")
    )
    # Joined dimensions are sorted: prompts come in the order of the folders.
    prompts = dict.fromkeys(
        prompt for piece in pieces for prompt in piece["prompt"].values.tolist()
    )
    joined = joined.sel(
        model=sorted(joined["model"].values.tolist(), key=step_order),
        checkpoint=sorted(joined["checkpoint"].values.tolist(), key=step_order),
        prompt=list(prompts),
    )
    texts = {name: joined[name].astype(str) for name in ("task", "text")}
    return joined.assign(texts).set_coords(list(texts)).assign_attrs(_attrs(surveys))


def _check_settings(plans: Mapping[str, Mapping[str, Any]]) -> None:
    (first, plan), *others = plans.items()
    for folder, other_plan in others:
        names = sorted((plan.keys() | other_plan.keys()) - _OF_EACH_FOLDER)
        differing = [name for name in names if plan.get(name) != other_plan.get(name)]
        if differing:
            raise ValueError(
                f"wanted surveys with the same settings, {', '.join(differing)} of "
                f"{folder} differ from those of {first}: open them one by one"
            )


def _check_texts(surveys: "Mapping[str, xarray.Dataset]") -> None:
    folders: dict[str, tuple[str, str]] = {}
    for folder, data in surveys.items():
        for prompt, text in zip(
            data["prompt"].values.tolist(), data["text"].values.tolist(), strict=True
        ):
            first, known_text = folders.setdefault(prompt, (folder, text))
            if text != known_text:
                raise ValueError(
                    f"prompt {prompt!r} is another text in {folder} than in {first}: "
                    "give each prompt an id of its own (in files, lines are numbered "
                    "where they have none)"
                )


def _check_measured_once(surveys: "Mapping[str, xarray.Dataset]") -> None:
    folders: dict[tuple[str, str, str], str] = {}
    for folder, data in surveys.items():
        for model, checkpoint, prompt in _measured(data):
            cell = (model, str(checkpoint), prompt)
            first = folders.setdefault(cell, folder)
            if first != folder:
                raise ValueError(
                    f"{model}, checkpoint {checkpoint}, prompt {prompt!r} was measured "
                    f"in {first} and in {folder}: each counts once, leave one out"
                )


def _measured(data: "xarray.Dataset") -> Iterable[tuple[str, object, str]]:
    """Return model, checkpoint and prompt of all that was measured."""
    is_measured = data["n_pos"].notnull().stack(cell=["model", "checkpoint", "prompt"])
    cells: Iterable[tuple[str, object, str]] = (
        is_measured["cell"].values[is_measured.values].tolist()
    )
    return cells


def _check_weights(surveys: "Mapping[str, xarray.Dataset]") -> None:
    known: dict[str, tuple[str, str]] = {}
    for folder, data in surveys.items():
        digests = json.loads(data.attrs["weights_digests"])
        for model, digest in digests.items():
            if digest is None:
                continue
            first, known_digest = known.setdefault(model, (folder, digest))
            if digest != known_digest:
                raise ValueError(
                    f"{model} has other weights in {folder} than in {first}: "
                    "give them different names"
                )


def _warn_of_gaps(surveys: "Mapping[str, xarray.Dataset]") -> None:
    """Warn where a folder lacks prompts of another one, and has other models."""
    asked: set[tuple[str, str]] = set()
    for data in surveys.values():
        models = data["model"].values.tolist()
        asked.update(itertools.product(models, data["prompt"].values.tolist()))
    all_models = {model for model, _ in asked}
    all_prompts = {prompt for _, prompt in asked}
    n_gaps = len(all_models) * len(all_prompts) - len(asked)
    if n_gaps:
        warn_caller(
            f"the folders have {len(all_models)} models and {len(all_prompts)} prompts, "
            f"but {n_gaps} of these pairs in none of them (NaN)"
        )


def _with_alike_checkpoints(
    surveys: "Mapping[str, xarray.Dataset]",
) -> "dict[str, xarray.Dataset]":
    """Return the surveys with checkpoints that are all numbers, or all text."""
    kinds = {data["checkpoint"].dtype.kind for data in surveys.values()}
    # Text of all lengths is of kind "U" or "O".
    if kinds <= {"i"} or kinds <= {"U", "O"}:
        return dict(surveys)
    return {
        folder: data.assign_coords(checkpoint=data["checkpoint"].astype(str))
        for folder, data in surveys.items()
    }


def _attrs(surveys: "Mapping[str, xarray.Dataset]") -> dict[str, str]:
    """Return the attributes of all, with units named by their folder."""
    provenances = {
        folder: json.loads(data.attrs["provenance"]) for folder, data in surveys.items()
    }
    attrs: dict[str, Any] = {"provenance": common_facts(*provenances.values())}
    for name in ("models", "weights_digests"):
        attrs[name] = {}
        for data in surveys.values():
            attrs[name].update(json.loads(data.attrs[name]))
    for name in _BY_UNIT:
        attrs[name] = {
            f"{folder}: {unit}": value
            for folder, data in surveys.items()
            for unit, value in json.loads(data.attrs.get(name, "{}")).items()
        }
    attrs["missing"] = [
        f"{folder}: {unit}"
        for folder, data in surveys.items()
        for unit in json.loads(data.attrs["missing"])
    ]
    differing = differing_facts(list(provenances.values()), _SAME_FOR_ALL)
    if differing:
        warn_caller(
            f"the folders were not all measured alike: {', '.join(sorted(differing))} "
            "differ; attrs['provenance_by_unit'] says how"
        )
        for folder, provenance in provenances.items():
            facts = {name: provenance.get(name) for name in differing}
            attrs["provenance_by_unit"][folder] = facts
    if not attrs["provenance_by_unit"]:
        del attrs["provenance_by_unit"]
    return {name: json.dumps(value) for name, value in attrs.items()}
