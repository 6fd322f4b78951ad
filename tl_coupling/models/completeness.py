"""Whether a checkpoint and its model are the same weights. What transformers does not
find in a checkpoint, it draws at random; what it finds besides, it leaves out.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from tl_coupling.models.contents import Contents, OwnFormat, unplaced_names
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs
from tl_coupling.models.file_tensors import tensors_in
from tl_coupling.models.formats import (
    FLOAT_INSTEAD,
    format_of_tensors,
    unread_format,
)
from tl_coupling.models.harmless import reads_pooled
from tl_coupling.models.loaded import n_weights
from tl_coupling.models.patched_transformers import (
    Place,
    Reading,
    Weight,
    noted_readings,
    weights_of,
)

# Prefixes that wrappers of a module put before the names of its weights: torch.compile,
# DataParallel, FSDP.
_WRAPPERS = r"^(?:(?:_orig_mod|module|_fsdp_wrapped_module)\.)+"
# Buffers in floating point that a rule makes: frequencies of rotations, what masks and
# ALiBi's slopes hold.
_MADE_BY_RULE = re.compile(r"(^|[._])(inv_freq|masked_bias|slopes|alibi)$")
# A layer or an expert, by its number.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_N_NAMED = 3
# Characters of a message of transformers.
_MOST_QUOTED = 150
# The end of a conversion's pattern that takes up scales.
_SCALES = "_scale_inv"
# No model has as many layers by far.
_TOO_DEEP = 10_000
_COUNTS_LAYERS = re.compile(r"(^|_)(layers?|blocks?|block_count)$")


class LoadedWeights(NamedTuple):
    """A HuggingFace model.

    Attributes:
        model: the model.
        missing_of_head: the names of its head's weights that its checkpoint lacks: they
            are random.
    """

    model: nn.Module
    missing_of_head: tuple[str, ...]

    @property
    def facts(self) -> LoadedAs:
        """What provenance says of them: how many weights the model has, and whether its
        head is not the checkpoint's.
        """
        return {
            **number_of_weights(self.model),
            **describe_head(self.missing_of_head),
        }


def load_whole(
    name: str,
    from_pretrained: Callable[..., Any],
    *arguments: Any,
    file: OwnFormat | None = None,
    **options: Any,
) -> LoadedWeights:
    """Return what HuggingFace's `from_pretrained` loads, if the checkpoint holds all
    its weights and nothing else; the head may lack.

    Prefixes that wrap every key (`_orig_mod.`, `module.`) are taken off. Tied weights,
    and buffers that a rule makes, are not missing. What a checkpoint may hold besides
    is listed in `harmless.py`. An adapter beside it is held to the same.

    Args:
        name: the model's name in error messages.
        from_pretrained: HuggingFace's.
        *arguments: of `from_pretrained`.
        file: what is read, where it is neither safetensors nor a pickle.
        **options: of `from_pretrained`.

    Raises:
        ModelError: weights of the body are missing, or have another shape or dtype;
            the checkpoint holds a tensor that the model has no place for, such as a
            bias, or more layers or experts than its configuration says; it holds codes
            that nothing turns into numbers. The message names the first of them.
    """
    # Shapes that differ would be a RuntimeError, which names none.
    options["output_loading_info"] = True
    options["ignore_mismatched_sizes"] = True
    model, readings = _read(name, from_pretrained, *arguments, **options)
    if any(map(_is_wrapped, readings)):
        # Freed before it is loaded again: two would not fit where one does.
        del model
        options["key_mapping"] = {_WRAPPERS: ""}
        model, readings = _read(name, from_pretrained, *arguments, **options)
    missing_of_head: list[str] = []
    for reading, described in zip(readings, _described(name), strict=False):
        contents = Contents.from_reading(model, reading, file)
        missing_of_head += _check(described, model, contents, file)
    return LoadedWeights(model, tuple(missing_of_head))


def _described(name: str) -> tuple[str, str]:
    """Return what errors call a model, and the adapter that is read after it."""
    return repr(name), f"the adapter of {name!r}"


def _read(
    name: str, from_pretrained: Callable[..., Any], *arguments: Any, **options: Any
) -> tuple[Any, list[Reading]]:
    """Return a model, and what was read of its files."""
    with noted_readings() as readings:
        try:
            model, report = from_pretrained(*arguments, **options)
        # transformers' own says of each that details are in its log.
        except RuntimeError:
            for reading, described in zip(readings, _described(name), strict=False):
                _refuse_unconverted(described, reading)
            raise
    if readings:
        return model, readings
    # For a class that loads weights in its own way, transformers' report is all there
    # is.
    places = {key: Place(key, None) for key in report["unexpected_keys"]}
    reading = Reading((), places, weights_of(model), SimpleNamespace(**report))
    return model, [reading]


def _is_wrapped(reading: Reading) -> bool:
    """Say whether all tensors that had no place are those that are missing, but for a
    prefix.
    """
    unplaced = unplaced_names(reading)
    if not unplaced or not reading.report.missing_keys:
        return False
    return all(re.match(_WRAPPERS, name) for name in unplaced)


def number_of_weights(model: nn.Module) -> LoadedAs:
    """Return how many weights HuggingFace's model has, tied ones once: bridges add
    zeros, and copies of what they cut.
    """
    # Tied weights count under one of their names.
    tied_to = getattr(model, "all_tied_weights_keys", {})
    weights_by_name = {
        tied_to.get(name, name): weight
        for name, weight in model.named_parameters(remove_duplicate=False)
    }
    # Parameters that are one object under several names count once as well.
    distinct = {id(weight): weight for weight in weights_by_name.values()}
    return {"n_params": sum(map(n_weights, distinct.values()))}


def check_depth(name: str, fields: Mapping[str, object]) -> None:
    """Raise ModelError on a configuration of more layers than any model has, which
    would fill all memory.

    `fields` may hold those of a model's towers: dictionaries.
    """
    for field, value in fields.items():
        if isinstance(value, dict):
            check_depth(name, value)
            continue
        is_too_large = isinstance(value, int) and value >= _TOO_DEEP
        if is_too_large and _COUNTS_LAYERS.search(field):
            raise ModelError(
                f"{name!r} says that it has {value:,} layers (`{field}`), wanted fewer "
                f"than {_TOO_DEEP:,}: its configuration is damaged or malicious"
            )


def describe_head(missing: tuple[str, ...]) -> LoadedAs:
    """Return the provenance of a head that the checkpoint lacks; nothing for one that it
    holds.
    """
    if not missing:
        return {}
    return {"head": f"not in the checkpoint ({_named(missing)})"}


def _check(
    described: str, model: Any, contents: Contents, file: OwnFormat | None
) -> list[str]:
    """Raise ModelError unless the body is whole, and nothing is left; return which
    weights of the head are missing.
    """
    reading = contents.reading
    _refuse_codes(described, contents, unread_format(model.config))
    _refuse_partial_blocks(described, reading)
    missing = sorted(
        key
        for key in reading.report.missing_keys
        if not _is_made_by_rule(key, reading.weights.get(key))
    )
    missing_of_head = [key for key in missing if _is_of_head(model, key)]
    missing_of_body = [
        key for key in missing if key not in missing_of_head and not reads_pooled(key)
    ]
    left = sorted(left.tensor.name for left in contents.left)
    if missing_of_body:
        hint = f"; what it holds besides: {_named(left)}" if left else ""
        raise ModelError(
            f"{described} lacks {len(missing_of_body)} of the {len(reading.weights)} "
            f"weights of a {type(model).__name__}: {_named(missing_of_body)}{hint}; "
            "they would be random: save it again, with HuggingFace's "
            "`save_pretrained`, from the whole model"
        )
    refuse_other_shapes(described, reading.report.mismatched_keys)
    deeper = _deeper_weights(model, contents)
    if deeper:
        raise ModelError(
            f"{described} holds {len(deeper)} weights of layers or experts that its "
            f"configuration does not have: {_named(deeper)}; load it with its own "
            "configuration"
        )
    _refuse_replaced(described, contents)
    if file is not None:
        file.refuse(left)
    refuse_unplaced(
        described,
        left,
        f"a {type(model).__name__} of its configuration",
        "load it with its own configuration, or as the class that it was saved from",
    )
    return [key for key in missing_of_head if not reads_pooled(key)]


def refuse_unplaced(
    described: str, parts: Collection[str], owner: str, advice: str
) -> None:
    """Raise ModelError on parts of a file that the model would lack; none is fine.

    Args:
        described: what the message calls the model.
        parts: names of tensors, or of settings.
        owner: what has no place for them.
        advice: what to do.
    """
    if parts:
        raise ModelError(
            f"{described} holds {_named(sorted(parts))}, for which {owner} has no "
            f"place: the model without would be another one; {advice}"
        )


def refuse_other_shapes(
    described: str, mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Raise ModelError on weights of another shape than their model's; none is fine.

    Args:
        described: what the message calls the model.
        mismatched: the name of each, its shape, and the one that the model needs.
    """
    shapes = [
        f"{key} is {list(shape)}, wanted {list(expected)}"
        for key, shape, expected in sorted(mismatched)
    ]
    if shapes:
        raise ModelError(
            f"{described} holds {len(shapes)} weights of another shape than its "
            f"configuration says: {'; '.join(shapes[:_N_NAMED])}; load it with its own "
            "configuration"
        )


def _refuse_replaced(described: str, contents: Contents) -> None:
    if contents.replaced:
        names = sorted(tensor.name for tensor in contents.replaced)
        raise ModelError(
            f"{described} holds {_named(names)} more than once, under another name or in "
            "another file, with other numbers: save it again, with HuggingFace's "
            "`save_pretrained`, from the model that is meant"
        )


def _refuse_codes(
    described: str, contents: Contents, stated_format: str | None
) -> None:
    codes = contents.codes()
    if not codes:
        return
    dtypes = sorted({tensor.dtype_name for tensor in codes})
    kind = stated_format or format_of_tensors(contents.tensors, dtypes)
    looks_like = f", which looks like {kind}" if kind else ""
    raise ModelError(
        f"{described} holds {', '.join(dtypes)} in place of floating point{looks_like}: "
        f"{_named(sorted(tensor.name for tensor in codes))}; its configuration has no "
        "`quantization_config` that says for which numbers these codes stand, or none "
        f"that covers them all: {FLOAT_INSTEAD}"
    )


def _refuse_unconverted(described: str, reading: Reading) -> None:
    """Raise ModelError on tensors that transformers could not make weights of."""
    _refuse_partial_blocks(described, reading)
    errors = reading.report.conversion_errors
    if not errors:
        return
    # A traceback, the message, and a line that names the weight again.
    lines = str(next(iter(errors.values()))).strip().splitlines()
    reason = lines[-2].strip() if len(lines) > 1 else lines[-1]
    unplaced = unplaced_names(reading)
    hint = f"; what it holds besides: {_named(sorted(unplaced))}" if unplaced else ""
    raise ModelError(
        f"{described} lacks tensors of which {_named(sorted(errors))} is made, or holds "
        f"some of another shape ({reason[:_MOST_QUOTED]}){hint}; save it again, "
        "with HuggingFace's `save_pretrained`, from the whole model"
    )


def _refuse_partial_blocks(described: str, reading: Reading) -> None:
    """Raise ModelError on codes with a scale for each block where the last block is not
    whole: transformers divides a matrix into as many blocks of equal size.
    """
    block = getattr(reading.quantization, "weight_block_size", None)
    if not block:
        return
    tensors = {tensor.name: tensor for tensor in tensors_in(reading.files)}
    partial = [
        codes.name
        for name, scales in tensors.items()
        if (reading.places[name].pattern or "").endswith(_SCALES)
        and (codes := tensors.get(f"{name.rpartition('.')[0]}.weight")) is not None
        and _has_partial_block(codes.shape, scales.shape, tuple(block))
    ]
    if partial:
        raise ModelError(
            f"{described} is in FP8 with a scale for each block of {block[0]} × "
            f"{block[1]}, and the last blocks of {len(partial)} of its weights are not "
            f"whole ({_named(sorted(partial))}), which transformers does not dequantise: "
            f"{FLOAT_INSTEAD}"
        )


def _has_partial_block(
    shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, ...]
) -> bool:
    if len(shape) != 2 or len(grid) != 2:
        return False
    return any(
        n_blocks > 1 and size % width and n_blocks == -(-size // width)
        for size, n_blocks, width in zip(shape, grid, block, strict=True)
    )


def _is_made_by_rule(key: str, weight: Weight | None) -> bool:
    """Say whether a buffer is a mask, numbers of positions, or frequencies: no learned
    numbers.
    """
    if weight is None:
        return True
    # Whole numbers are not trained.
    if not weight.dtype.is_floating_point and not weight.dtype.is_complex:
        return True
    return _MADE_BY_RULE.search(key) is not None


def _is_of_head(model: Any, key: str) -> bool:
    """Say whether a weight is behind the body, `model.base_model`, or in what makes the
    logits.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        return not key.startswith(f"{prefix}.")
    unembedding = model.get_output_embeddings()
    if unembedding is None:
        return False
    weight = dict(model.named_parameters(remove_duplicate=False)).get(key)
    return any(weight is parameter for parameter in unembedding.parameters())


def _deeper_weights(model: Any, contents: Contents) -> list[str]:
    """Return tensors without a place that are those of a layer or expert, but for its
    number.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    weights = contents.reading.weights
    kinds = {_NUMBER.sub("*", key) for key in weights}
    # Checkpoints of the body alone have keys without its prefix.
    kinds |= {_NUMBER.sub("*", key.removeprefix(prefix)) for key in weights}
    return sorted(
        left.tensor.name
        for left in contents.left
        if left.weight not in weights and _NUMBER.sub("*", left.weight) in kinds
    )


def _named(keys: Iterable[str]) -> str:
    names = list(keys)
    if len(names) > _N_NAMED:
        names = [*names[:_N_NAMED], "…"]
    return ", ".join(names)
