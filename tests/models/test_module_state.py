"""Nothing of a model is another after it was measured: no tensor, attribute, hook, mode
or flag, and not torch's generator.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import changed_models
import tiny
import tl_coupling as tlc
from tiny import needs_hooked_transformer
from tl_coupling.models.module_state import attributes_set
from zoo.models import randomised

pytestmark = pytest.mark.both_lines

TOKENS = [3, 14, 15, 92, 65, 35, 89, 79]


def measured(model: nn.Module, tokens: list[int]) -> None:
    """Measure a model in several ways: singly, across tokens, and by its parts."""
    trace = tlc.trace(model, tokens)
    tlc.depth_coupling(trace, k=3)
    tlc.block_jacobians(trace, position=1)
    tlc.self_coupling(trace, layer=0, other_layer=1, k=3, positions=[1, 3])
    # Not every block is affine where gates are held.
    with suppress(tlc.gradients.DerivativeError):
        tlc.dynamics.frozen_jacobian(trace, 1)
    assert trace.is_causal in (True, False)
    trace.logits(trace.residual[-1])


def check_unchanged(model: nn.Module, tokens: list[int]) -> None:
    with torch.no_grad():
        ids = torch.tensor([tokens])
        before = output_of(model, ids)
    state = changed_models.state_of(model)
    measured(model, tokens)
    assert changed_models.changes_of(state, changed_models.state_of(model)) == []
    with torch.no_grad():
        assert torch.equal(output_of(model, ids), before)


def output_of(model: Any, ids: Tensor) -> Tensor:
    output = model(ids)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gpt_neox", "bloom"])
@pytest.mark.parametrize("kind", ["bridge", "in memory"])
def test_a_model_is_left_as_it_was(
    architecture: str, kind: str, tokenizer_folder: Path
) -> None:
    model = tiny.huggingface_model(architecture)
    if kind == "bridge":
        model = tiny.bridge(model, tokenizer_folder)
    check_unchanged(model, TOKENS)


@needs_hooked_transformer
@pytest.mark.parametrize("positions", ["rotary", "alibi", "standard"])
@pytest.mark.parametrize("switch", ["set_use_split_qkv_input", "set_use_attn_in"])
@pytest.mark.filterwarnings("ignore")
def test_tables_that_attention_makes_again_for_more_rows_are_put_back(
    positions: str, switch: str
) -> None:
    """With edited tables the logits would be others for good."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    rotation = {"rotary_dim": 8} if positions == "rotary" else {}
    config = HookedTransformerConfig(
        n_layers=2,
        d_model=16,
        n_heads=2,
        d_head=8,
        d_mlp=24,
        n_ctx=10,
        d_vocab=100,
        act_fn="gelu",
        positional_embedding_type=positions,
        **rotation,
    )
    model = randomised(lambda: HookedTransformer(config))
    getattr(model, switch)(True)
    with torch.no_grad():
        # Fills in ALiBi's table.
        model(torch.tensor([TOKENS]))
        for block in model.blocks:
            for name in ("rotary_sin", "rotary_cos", "alibi"):
                table = getattr(block.attn, name, None)
                if table is not None:
                    table.add_(0.3)
    check_unchanged(model, TOKENS)


ROTATIONS = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 8,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    },
}


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_frequencies_that_depend_on_the_length_are_put_back(rotation: str) -> None:
    model = tiny.huggingface_model(
        "llama", max_position_embeddings=16, rope_parameters=ROTATIONS[rotation]
    )
    state = changed_models.state_of(model)
    tlc.depth_coupling(tlc.trace(model, [*TOKENS, *TOKENS[:7]]), k=3)
    assert changed_models.changes_of(state, changed_models.state_of(model)) == []


class Counts(nn.Module):
    """Counts its calls in a buffer in place, in one that it replaces, and in an
    attribute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("in_place", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.attribute = 0

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.attribute += 1
        return x + torch.tanh(self.linear(x))


def test_what_modules_count_is_put_back_also_after_an_error() -> None:
    blocks = [Counts() for _ in range(2)]
    net, x = nn.Sequential(*blocks).eval(), torch.randn(1, 4, 6)
    state = changed_models.state_of(net)
    trace = tlc.trace_modules(blocks, lambda: net(x))
    tlc.depth_coupling(trace, k=3)
    with torch.no_grad():
        blocks[0].linear.weight *= 2
        with pytest.raises(tlc.gradients.StepError):
            tlc.block_jacobian(trace, 0)
        blocks[0].linear.weight /= 2
    assert changed_models.changes_of(state, changed_models.state_of(net)) == []


def test_the_generator_is_left_where_it_was() -> None:
    """Also where a hook draws, and the block is refused for it."""
    model = tiny.huggingface_model("llama")
    model.model.layers[1].register_forward_hook(
        lambda _, __, output: output + 0.1 * torch.randn_like(output)
    )
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    trace = tlc.trace(model, TOKENS)
    with pytest.raises(tlc.gradients.StepError):
        tlc.block_jacobian(trace, 1)
    assert torch.equal(torch.rand(3), expected)


def test_attributes_are_put_back_when_setting_one_fails() -> None:
    class Stubborn:
        size = 1

        @property
        def colour(self) -> str:
            return "red"

    stubborn = Stubborn()
    with (
        pytest.raises(AttributeError),
        attributes_set([(stubborn, "size", 2), (stubborn, "colour", "blue")]),
    ):
        pytest.fail("the context was entered")
    assert stubborn.size == 1
