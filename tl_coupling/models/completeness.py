"""Whether a checkpoint holds the weights of its model. What transformers does not find
in it, it draws at random.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs
from tl_coupling.models.loaded import n_weights

# What wrappers of a module put before the name of each of its weights: torch.compile,
# DataParallel, FSDP.
_WRAPPERS = r"^(?:(?:_orig_mod|module|_fsdp_wrapped_module)\.)+"
# Buffers in floating point that a rule makes: frequencies of rotations, what masks and
# ALiBi's slopes hold.
_MADE_BY_RULE = re.compile(r"(^|[._])(inv_freq|masked_bias|slopes|alibi)$")
# Parts that neither the stream nor the logits depend on: BERT's and ViT's pooled first
# token, and what reads it.
_READS_POOLED = re.compile(r"(^|\.)(pooler|seq_relationship)\.")
# A layer or an expert, by its number.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")
_N_NAMED = 3
# No model has as many layers by far.
_TOO_DEEP = 10_000
_COUNTS_LAYERS = re.compile(r"(^|_)(layers?|blocks?|block_count)$")


class LoadedWeights(NamedTuple):
    """A HuggingFace model.

    Attributes:
        model: the model.
        missing_of_head: the names of its head's weights that its checkpoint lacks: they
            are random.
        unexpected: what its checkpoint holds besides.
    """

    model: nn.Module
    missing_of_head: tuple[str, ...]
    unexpected: tuple[str, ...] = ()

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
    name: str, from_pretrained: Callable[..., Any], *arguments: Any, **options: Any
) -> LoadedWeights:
    """Return what HuggingFace's `from_pretrained` loads, if the checkpoint holds all
    its weights; the head may lack.

    Prefixes that wrap every key (`_orig_mod.`, `module.`) are taken off. Tied weights,
    and buffers that a rule makes, are not missing.

    Raises:
        ModelError: weights of the body are missing, or have another shape; the
            checkpoint has more layers or experts than its configuration says. The
            message names the first of them.
    """
    # Shapes that differ would be a RuntimeError, which names none.
    options["output_loading_info"] = True
    options["ignore_mismatched_sizes"] = True
    model, report = from_pretrained(*arguments, **options)
    if report["missing_keys"] and _are_wrapped(report["unexpected_keys"]):
        # Freed before it is loaded again: two would not fit where one does.
        del model
        options["key_mapping"] = {_WRAPPERS: ""}
        model, report = from_pretrained(*arguments, **options)
    missing_of_head = _check(name, model, report)
    return LoadedWeights(model, missing_of_head, tuple(report["unexpected_keys"]))


def _are_wrapped(keys: Collection[str]) -> bool:
    return bool(keys) and all(re.match(_WRAPPERS, key) for key in keys)


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


class _Report(TypedDict):
    """What HuggingFace found while it loaded a checkpoint."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    # Each with the shape that it has, and the one that was expected.
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]


def _check(name: str, model: Any, report: _Report) -> tuple[str, ...]:
    """Raise ModelError unless the body is whole; return which weights of the head are
    missing.
    """
    state = model.state_dict()
    missing = sorted(
        key
        for key in report["missing_keys"]
        if not _is_made_by_rule(key, state.get(key))
    )
    missing_of_head = tuple(key for key in missing if _is_of_head(model, key))
    missing_of_body = [
        key
        for key in missing
        if key not in missing_of_head and not _READS_POOLED.search(key)
    ]
    if missing_of_body:
        unexpected = sorted(report["unexpected_keys"])
        hint = ""
        if unexpected:
            hint = f"; what it holds besides: {_named(unexpected)}"
        raise ModelError(
            f"{name!r} lacks {len(missing_of_body)} of the {len(state)} weights of a "
            f"{type(model).__name__}: {_named(missing_of_body)}{hint}; they would be random: "
            "save it again, with HuggingFace's `save_pretrained`, from the whole model"
        )
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        shapes = [
            f"{key} is {list(shape)}, wanted {list(expected)}"
            for key, shape, expected in mismatched[:_N_NAMED]
        ]
        raise ModelError(
            f"{name!r} holds {len(mismatched)} weights of another shape than its "
            f"configuration says: {'; '.join(shapes)}; load it with its own "
            "configuration"
        )
    deeper = _deeper_weights(model, report["unexpected_keys"], state)
    if deeper:
        raise ModelError(
            f"{name!r} holds {len(deeper)} weights of layers or experts that its "
            f"configuration does not have: {_named(deeper)}; load it with its own "
            "configuration"
        )
    return tuple(key for key in missing_of_head if not _READS_POOLED.search(key))


def _is_made_by_rule(key: str, tensor: torch.Tensor | None) -> bool:
    """Say whether a buffer is a mask, numbers of positions, or frequencies: no learned
    numbers.
    """
    if tensor is None:
        return True
    # Whole numbers are not trained.
    if not tensor.is_floating_point() and not tensor.is_complex():
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


def _deeper_weights(
    model: Any, unexpected: Iterable[str], state: Mapping[str, object]
) -> list[str]:
    """Return unexpected keys that are those of a layer or expert, but for its number."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    kinds = {_NUMBER.sub("*", key) for key in state}
    # Checkpoints of the body alone have keys without its prefix.
    kinds |= {_NUMBER.sub("*", key.removeprefix(prefix)) for key in state}
    config = getattr(model.config, "text_config", None) or model.config
    # Layers that predict later tokens stand behind the last one, and transformers
    # leaves them out.
    n_later = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    depth = int(getattr(config, "num_hidden_layers", None) or 0)
    later = [re.compile(rf"(^|\.){depth + i}\.") for i in range(n_later)]
    return sorted(
        key
        for key in unexpected
        if _NUMBER.sub("*", key) in kinds
        and not any(pattern.search(key) for pattern in later)
    )


def _named(keys: Iterable[str]) -> str:
    names = list(keys)
    if len(names) > _N_NAMED:
        names = [*names[:_N_NAMED], "…"]
    return ", ".join(names)
