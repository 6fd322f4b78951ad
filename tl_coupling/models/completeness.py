"""Whether a checkpoint holds the weights of its model. What transformers does not find
in it, it draws at random.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs

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
    """A HuggingFace model, and the names of its head's weights that its checkpoint
    lacks: they are random.
    """

    model: nn.Module
    missing_of_head: tuple[str, ...]

    @property
    def facts(self) -> LoadedAs:
        """What provenance says of them: how many weights the model has, and that its
        head is not the checkpoint's.
        """
        return {
            **number_of_weights(self.model),
            **describe_head(self.missing_of_head),
        }


def load_whole(
    name: str, from_pretrained: Callable[..., Any], *arguments: Any, **options: Any
) -> LoadedWeights:
    """What HuggingFace's `from_pretrained` loads, if the checkpoint holds all its
    weights; the head may lack.

    Prefixes that wrap every key (`_orig_mod.`, `module.`) are taken off. Tied weights,
    and buffers that a rule makes, are not missing.

    Raises:
        ModelError: weights of the body are missing, or have another shape; the
            checkpoint has more layers or experts than its configuration says. The
            message names the first of them.
    """
    # Shapes that differ would be a RuntimeError, which names none.
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, report = from_pretrained(*arguments, **options)
    unexpected = report["unexpected_keys"]
    if (
        report["missing_keys"]
        and unexpected
        and all(re.match(_WRAPPERS, key) for key in unexpected)
    ):
        del model
        mapping = {"key_mapping": {_WRAPPERS: ""}}
        model, report = from_pretrained(*arguments, **options, **mapping)
    return LoadedWeights(model, _check(name, model, report))


@contextmanager
def only_whole(name: str) -> Iterator[list[LoadedWeights]]:
    """Context in which whoever calls HuggingFace's `from_pretrained` gets whole models
    only; the list holds them.
    """
    from transformers import PreTrainedModel

    loaded: list[LoadedWeights] = []
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: type, *arguments: Any, **options: Any) -> Any:
        loaded.append(load_whole(name, original, cls, *arguments, **options))
        return loaded[-1].model

    with patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield loaded


def number_of_weights(model: nn.Module) -> LoadedAs:
    """How many weights HuggingFace's model has, tied ones once: bridges add zeros, and
    copies of what they cut.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    named = {
        tied.get(name, name): weight
        for name, weight in model.named_parameters(remove_duplicate=False)
    }
    states = {
        id(weight): (weight, getattr(weight, "quant_state", None))
        for weight in named.values()
    }
    sizes = (
        weight.numel() if state is None else state.shape.numel()
        for weight, state in states.values()
    )
    return {"n_params": sum(sizes)}


def check_depth(name: str, fields: dict[str, Any]) -> None:
    """Raise ModelError on a configuration of more layers than any model has, which
    would fill all memory.

    `fields` may hold those of a model's towers: dictionaries.
    """
    for field, value in fields.items():
        if isinstance(value, dict):
            check_depth(name, value)
        elif (
            isinstance(value, int)
            and value >= _TOO_DEEP
            and _COUNTS_LAYERS.search(field)
        ):
            said = f"{name!r} says that it has {value:,} layers (`{field}`)"
            raise ModelError(
                f"{said}, wanted fewer than {_TOO_DEEP:,}: its configuration is damaged, or made to harm"
            )


def describe_head(missing: tuple[str, ...]) -> LoadedAs:
    """Provenance of a head that the checkpoint lacks; nothing for one that it holds."""
    return {"head": f"not in the checkpoint ({_named(missing)})"} if missing else {}


def _check(name: str, model: Any, report: dict[str, Any]) -> tuple[str, ...]:
    """Raise ModelError unless the body is whole; which weights of the head are
    missing.
    """
    state = model.state_dict()
    tensors = {key: state.get(key) for key in report["missing_keys"]}
    missing = sorted(
        key for key, tensor in tensors.items() if not _is_made_by_rule(key, tensor)
    )
    head = tuple(key for key in missing if _is_of_head(model, key))
    body = [key for key in missing if key not in head and not _READS_POOLED.search(key)]
    instead = "they would be random: save it again, with HuggingFace's `save_pretrained`, from the whole model"
    if body:
        of = f"{len(body)} of the {len(state)} weights of a {type(model).__name__}"
        others = sorted(report["unexpected_keys"])
        hint = f"; what it holds besides: {_named(others)}" if others else ""
        raise ModelError(f"{name!r} lacks {of}: {_named(body)}{hint}; {instead}")
    if mismatched := sorted(report["mismatched_keys"]):
        shapes = (
            f"{key} is {list(given)}, wanted {list(wanted)}"
            for key, given, wanted in mismatched[:_N_NAMED]
        )
        said = f"{name!r} holds {len(mismatched)} weights of another shape than its configuration says"
        raise ModelError(
            f"{said}: {'; '.join(shapes)}; load it with its own configuration"
        )
    if deeper := _beyond(model, report["unexpected_keys"], state):
        said = f"{name!r} holds {len(deeper)} weights of layers or experts that its configuration does not have"
        raise ModelError(
            f"{said}: {_named(deeper)}; load it with its own configuration"
        )
    return tuple(key for key in head if not _READS_POOLED.search(key))


def _is_made_by_rule(key: str, tensor: torch.Tensor | None) -> bool:
    """Whether a buffer is a mask, numbers of positions, or frequencies: no learned
    numbers.
    """
    is_number = tensor is not None and (
        tensor.is_floating_point() or tensor.is_complex()
    )
    return not is_number or _MADE_BY_RULE.search(key) is not None


def _is_of_head(model: Any, key: str) -> bool:
    """Whether a weight is behind the body, `model.base_model`, or in what makes the
    logits.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and hasattr(model, prefix):
        return not key.startswith(f"{prefix}.")
    unembedding = model.get_output_embeddings()
    weights = dict(model.named_parameters(remove_duplicate=False))
    return unembedding is not None and any(
        weights.get(key) is weight for weight in unembedding.parameters()
    )


def _beyond(model: Any, unexpected: Iterable[str], state: dict[str, Any]) -> list[str]:
    """Unexpected keys that are those of a layer or expert, but for its number."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    kinds = {_NUMBER.sub("*", key) for key in state}
    kinds |= {_NUMBER.sub("*", key.removeprefix(prefix)) for key in state}
    config = getattr(model.config, "text_config", None) or model.config
    # Layers that predict later tokens stand behind the last one, and transformers
    # leaves them out.
    n_later = int(getattr(config, "num_nextn_predict_layers", None) or 0)
    depth = int(getattr(config, "num_hidden_layers", None) or 0)
    later = re.compile(
        "|".join(rf"(^|\.){depth + i}\." for i in range(n_later)) or "(?!)"
    )
    return sorted(
        key
        for key in unexpected
        if _NUMBER.sub("*", key) in kinds and not later.search(key)
    )


def _named(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names[:_N_NAMED]) + (", …" if len(names) > _N_NAMED else "")
