"""A HookedTransformer has all weights of its checkpoint, or is refused: TransformerLens 3
takes those that it knows, and leaves out the others without a word.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc

pytestmark = [pytest.mark.both_lines, tiny.needs_hooked_transformer]
NAME = "Qwen/Qwen3-0.6B"


@pytest.fixture
def published(hub: Path) -> Iterator[Any]:
    """Put a tiny Qwen 3 where the hub's of that name is looked for."""

    def publish(model: nn.Module) -> nn.Module:
        tiny.add_to_hub_cache(hub, NAME, {"main": model})
        return model

    yield publish
    shutil.rmtree(hub / f"models--{NAME.replace('/', '--')}")


def stream_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        states = model(torch.tensor([tiny.TOKENS]), output_hidden_states=True)
    return torch.cat(states.hidden_states[:-1])


def test_biases_that_it_does_not_take(published: Any) -> None:
    published(tiny.huggingface_model("qwen3", attention_bias=True))
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(NAME, backend="hooked")
    assert str(caught.value) == (
        f"{NAME!r} holds model.layers.0.self_attn.k_proj.bias, "
        "model.layers.0.self_attn.o_proj.bias, model.layers.0.self_attn.q_proj.bias, …, "
        "for which a HookedTransformer has no place: the model without would be another "
        'one; use backend="bridge"'
    )


@pytest.mark.parametrize("has_zeros", [True, False])
def test_what_it_takes_is_all(has_zeros: bool, published: Any) -> None:
    plain = tiny.huggingface_model("qwen3", attention_bias=has_zeros)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    published(plain)
    trace = tlc.trace(tlc.load_model(NAME, backend="hooked"), tiny.TOKENS)
    torch.testing.assert_close(
        trace.residual[:-1], stream_of(plain), rtol=1e-4, atol=1e-4
    )
    tlc.load_model(NAME, backend="hooked", untrained=True)
