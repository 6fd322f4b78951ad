"""The whole model's derivative against autograd through the model itself."""

import pytest
import torch

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

PROMPT = "w3 w14 w15 w92 w7"


def bridge(architecture, folder):
    return tiny.bridge(tiny.huggingface_model(architecture, seed=1), folder)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "olmo2"])
@pytest.mark.parametrize("position", [-1, 2])
def test_it_is_the_models_own(architecture, position, tokenizer_folder):
    model = bridge(architecture, tokenizer_folder)
    trace = tlc.trace(model, PROMPT)
    D = tlc.dynamics.model_jacobian(trace, 1, position=position)

    def after_last(stream):
        """The model with this stream in the place of what enters block 1."""
        seen = {}
        hooks = [
            ("blocks.1.hook_in", lambda *_, **__: stream[None]),
            ("blocks.1.hook_out", lambda value, **__: seen.update(value=value)),
        ]
        model.run_with_hooks(trace.tokens[None], fwd_hooks=hooks)
        return seen["value"][0, position]

    expected = torch.autograd.functional.jacobian(after_last, trace.residual[1])
    torch.testing.assert_close(D, expected.movedim(1, 0), rtol=1e-4, atol=1e-5)
    assert D.norm() > 1


def test_frozen_it_makes_the_last_stream(tokenizer_folder):
    trace = tlc.trace(bridge("llama", tokenizer_folder), PROMPT)
    frozen = tlc.dynamics.model_jacobian(trace, function="frozen")
    made = torch.einsum("tij,tj->i", frozen, trace.residual[0])
    torch.testing.assert_close(made, trace.residual[-1, -1], rtol=1e-4, atol=1e-5)
    own = tlc.dynamics.model_jacobian(trace)
    assert (own - frozen).norm() > 1e-2 * own.norm()


def test_of_tokens_that_see_later_ones(tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("bert", seed=1), tokenizer_folder)
    trace = tlc.trace(model, PROMPT)
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        D = tlc.dynamics.model_jacobian(trace, -1, position=1)
    block = trace.blocks[-1]
    for t in range(trace.n_pos):
        J = torch.autograd.functional.jacobian(
            block.full_sequence(t, 1), trace.residual[-2, t]
        )
        expected = J + torch.eye(trace.d_model) * (t == 1)
        torch.testing.assert_close(D[t], expected, rtol=1e-4, atol=1e-5)
