"""Models at their own initialisation."""

from typing import Any

import torch
from torch import nn

from tl_coupling.models.load_request import UNTRAINED_SEED


def fresh_model(
    auto: Any,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attention: str | None,
) -> nn.Module:
    """Return a HuggingFace model at its own initialisation, seeded.

    Args:
        auto: HuggingFace's class, with `from_config`.
        config: its configuration.
        dtype: of the weights.
        trust_remote_code: whether code that comes with it may run.
        attention: HuggingFace's name of the attention's implementation; None for its
            default.
    """
    # That of the CPU alone: `load_model` puts it back as the caller had it.
    torch.default_generator.manual_seed(UNTRAINED_SEED)
    return auto.from_config(
        config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attention,
    )
