"""A HookedTransformer, which TransformerLens has until version 4."""

from typing import Any

import torch
from torch import nn

from tl_coupling.models.completeness import number_of_weights, only_whole
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs, facts_of
from tl_coupling.models.load_request import BootOptions, LoadRequest
from tl_coupling.models.loaded import version
from tl_coupling.models.refusals import refuse_custom_code
from tl_coupling.models.untrained import fresh_model

# How families of models name the branches of their checkpoints.
_BRANCHES = {
    "EleutherAI/pythia": "step{step}",
    "stanford-crfm/": "checkpoint-{step}",
}
_N_NEAREST = 3


def load_hooked(request: LoadRequest, source: str, device: torch.device) -> nn.Module:
    """Return a HookedTransformer with raw weights, and remember how it was loaded.

    Raises:
        ModelError: TransformerLens has none, the checkpoint is not published, or the
            model comes with code of its own; other errors are those of TransformerLens
            and HuggingFace.
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
    loaded_as: LoadedAs = {}
    untrained: dict[str, Any] = {}
    if request.untrained:
        untrained = _untrained(request, official)
    with only_whole(request.name) as loaded:
        model = HookedTransformer.from_pretrained_no_processing(
            source, **options, **untrained
        )
    # Models that TransformerLens keeps in its own format are not HuggingFace's.
    if loaded:
        loaded_as = loaded[-1].facts
    if request.untrained:
        loaded_as = number_of_weights(untrained["hf_model"])
    facts_of(model).loaded_as = loaded_as
    return model


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


def _untrained(request: LoadRequest, official: str) -> dict[str, Any]:
    """Return a HuggingFace model at its own initialisation, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    trusted = request.trust_remote_code
    config = AutoConfig.from_pretrained(official, trust_remote_code=trusted)
    return {
        "hf_model": fresh_model(
            AutoModelForCausalLM, config, request.dtype, trusted, None
        ),
        "tokenizer": AutoTokenizer.from_pretrained(official, trust_remote_code=trusted),
    }
