"""Gradients pulled back through a block at several tokens, against all its Jacobians."""

import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.blocks import StepError, pull_back_span
from tl_coupling.blocks import spans as spans_module

pytestmark = pytest.mark.both_lines

PROMPT = "w3 w14 w15 w92 w7 w65 w35"
START = 2


def expected(trace, layer, gradients, start):
    """The sum over Jacobians of every pair of tokens, by the gate's own last way."""
    pulled = gradients.clone()
    for s in range(gradients.shape[1]):
        for t in range(s, gradients.shape[1]):
            function = trace.blocks[layer].full_sequence(start + s, start + t)
            J = torch.autograd.functional.jacobian(
                function, trace.residual[layer, start + s]
            )
            pulled[:, s] += gradients[:, t] @ J
    return pulled


@pytest.fixture(scope="module", params=["llama", "gpt2", "olmo2", "bloom", "gemma2"])
def trace(request, tokenizer_folder):
    original = tiny.huggingface_model(request.param, seed=1)
    return tlc.trace(tiny.bridge(original, tokenizer_folder), PROMPT)


@pytest.mark.parametrize("way", ["span_linearised", "span_local", "full_sequence"])
def test_it_is_the_sum_over_jacobians(trace, way, monkeypatch):
    ways = spans_module._ways

    def from_this_on(*args):
        names = list(ways(*args))
        first = [name for name, _ in names].index(way)
        return names[first:]

    monkeypatch.setattr(spans_module, "_ways", from_this_on)
    gradients = torch.randn(3, 4, trace.d_model)
    wanted = expected(trace, 1, gradients, START)
    path = pull_back_span(trace.blocks[1], gradients, START)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
    # BLOOM's MLP also takes the stream that it is added to.
    takes_stream = "bloom" in type(trace.model.original_model).__name__.lower()
    if takes_stream and way == "span_linearised":
        way = "span_local"
    assert path == way


def test_a_wrong_way_is_not_taken(trace, monkeypatch):
    monkeypatch.setattr(
        spans_module._TimesEach,
        "forward",
        staticmethod(lambda gradient, J: 1.01 * torch.bmm(gradient[:, None], J)[:, 0]),
    )
    gradients = torch.randn(3, 4, trace.d_model)
    wanted = expected(trace, 0, gradients, START)
    path = pull_back_span(trace.blocks[0], gradients, START)
    assert path != "span_linearised"
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)


def test_a_block_that_changed_is_refused(tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("llama", seed=1), tokenizer_folder)
    trace = tlc.trace(model, PROMPT)
    block = trace.blocks[1]
    with torch.no_grad():
        next(model.blocks[1].parameters()).mul_(1.1)
    with pytest.raises(StepError, match="is not the function that was traced"):
        pull_back_span(block, torch.randn(3, 4, trace.d_model), START)
