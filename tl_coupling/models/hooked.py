"""A HookedTransformer, which TransformerLens has until version 4."""

from typing import Any

import torch
from torch import nn

from tl_coupling.models.completeness import (
    LoadedWeights,
    load_whole,
    refuse_unplaced,
)
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import facts_of
from tl_coupling.models.harmless import is_of_tower
from tl_coupling.models.load_request import BootOptions, LoadRequest
from tl_coupling.models.loaded import version
from tl_coupling.models.refusals import refuse_custom_code
from tl_coupling.models.untrained import fresh_model
from tl_coupling.models.weights import quantized

# How families of models name the branches of their checkpoints.
_BRANCHES = {
    "EleutherAI/pythia": "step{step}",
    "stanford-crfm/": "checkpoint-{step}",
}
# Whose models TransformerLens keeps in a format of its own.
_OWN_FORMAT = ("NeelNanda", "ArthurConmy", "Baidicoot")
# HuggingFace's classes, by the model's type, of which TransformerLens reads the weights
# (`loading_from_pretrained.get_pretrained_state_dict`); AutoModelForCausalLM of others.
_CLASSES = {"bert": "AutoModelForPreTraining", "gemma3": "AutoModel"}
_N_NEAREST = 3


def load_hooked(request: LoadRequest, source: str, device: torch.device) -> nn.Module:
    """Return a HookedTransformer with raw weights, and remember how it was loaded.

    Raises:
        ModelError: TransformerLens has none, or one that takes not all weights; the
            checkpoint is not published, or the model comes with code of its own; other
            errors are those of TransformerLens and HuggingFace.
    """
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        raise ModelError(
            '`backend="hooked"` needs transformer-lens 3 (HookedTransformer was removed '
            f"in 4.0), installed is {version('transformer-lens')}: use "
            'backend="bridge" or `pip install "transformer-lens<4"`'
        ) from None
    from transformer_lens.loading_from_pretrained import get_official_model_name

    official = get_official_model_name(source)
    options = request.boot_options(device)
    _name_branch(options, request.name, official)
    if not request.trust_remote_code:
        refuse_custom_code(request.name, official, options.get("revision"))
    if official.startswith(_OWN_FORMAT) and not request.untrained:
        return HookedTransformer.from_pretrained_no_processing(source, **options)
    # Given the model, TransformerLens loads none, which might lack weights.
    weights = _huggingface_weights(request, official, options.get("revision"))
    taken = _note_parameters(weights.model)
    model = HookedTransformer.from_pretrained_no_processing(
        source, hf_model=weights.model, **options
    )
    left = [
        name
        for name, parameter in weights.model.named_parameters(remove_duplicate=False)
        # A bias of zeros adds nothing, and a text has no pictures.
        if id(parameter) not in taken and parameter.any() and not is_of_tower(name)
    ]
    refuse_unplaced(
        repr(request.name), left, "a HookedTransformer", 'use backend="bridge"'
    )
    facts_of(model).loaded_as = weights.facts
    return model


class _NotedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module, which note the identity of each that is asked for."""

    def __init__(
        self, parameters: dict[str, nn.Parameter | None], taken: set[int]
    ) -> None:
        super().__init__(parameters)
        self._taken = taken

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._taken.add(id(parameter))
        return parameter


def _note_parameters(model: nn.Module) -> set[int]:
    """Return a set that fills with the identities of the parameters that are taken from
    a model by name, as TransformerLens does in `convert_…_weights`.
    """
    taken: set[int] = set()
    for module in model.modules():
        vars(module)["_parameters"] = _NotedParameters(module._parameters, taken)
    return taken


def _name_branch(options: BootOptions, name: str, official: str) -> None:
    """Put the branch of a step in place of the step, for families whose branches are
    known.

    HookedTransformer asks for a step with an empty token unless HF_TOKEN is set, which
    the hub's client refuses to send; for a branch it asks without one.
    """
    from transformer_lens.loading_from_pretrained import get_checkpoint_labels

    step = options.get("checkpoint_value")
    families = [family for family in _BRANCHES if official.startswith(family)]
    if step is None or not families:
        return
    published, _ = get_checkpoint_labels(official)
    if step not in published:
        nearest_first = sorted(published, key=lambda label: abs(label - step))
        nearest = sorted(nearest_first[:_N_NEAREST])
        raise ModelError(
            f"{name!r} has no checkpoint {step}; the nearest are {nearest}"
        )
    del options["checkpoint_value"]
    options["revision"] = _BRANCHES[families[0]].format(step=step)


def _huggingface_weights(
    request: LoadRequest, official: str, revision: str | None
) -> LoadedWeights:
    """Return the HuggingFace model whose weights a HookedTransformer takes."""
    import transformers

    trusted = request.trust_remote_code
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trusted}
    config = transformers.AutoConfig.from_pretrained(official, **where)
    auto = getattr(
        transformers, _CLASSES.get(config.model_type, "AutoModelForCausalLM")
    )
    if request.untrained:
        fresh = fresh_model(auto, config, request.dtype, trusted, None)
        return LoadedWeights(fresh, missing_of_head=())
    options: dict[str, Any] = {**where, "config": config, "dtype": request.dtype}
    if quantized.how_saved(config) is not None:
        # TransformerLens 3 would take codes for weights.
        options |= quantized.loading_options(
            request.name, config, None, torch.device("cpu"), request.dtype
        )
    return load_whole(request.name, auto.from_pretrained, official, **options)
