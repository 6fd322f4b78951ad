"""The rest of a model on one token, against the whole model moved by hooks."""

import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.directions.onward import Onward

pytestmark = pytest.mark.both_lines

PROMPTS = ["w3 w14 w15 w92", "w6 w5 w35 w89 w7"]
# Rotary and learned positions, parallel blocks, grouped queries, sandwich norms, a soft
# cap; BLOOM's keys have heads and sequences in one axis, and it is run as a whole.
KINDS = {"llama": True, "gpt2": True, "gpt_neox": True, "gemma2": True, "bloom": False}


def steered(model, side="read", **options):
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 0, k=2, side=side)
    return tlc.directions.steer(
        model, PROMPTS, directions, [0.03, 0.3], n_draws=2, **options
    )


@pytest.mark.parametrize("side", ["read", "write"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rest_gives_what_the_whole_model_gives(
    kind, side, tokenizer_folder, monkeypatch
):
    model = tiny.bridge(tiny.huggingface_model(kind), tokenizer_folder)
    said = []
    agrees = Onward.agrees
    monkeypatch.setattr(
        Onward, "agrees", lambda *args: said.append(agrees(*args)) or said[-1]
    )
    of_rest = steered(model, side)
    assert said == 2 * [KINDS[kind]]
    monkeypatch.setattr(Onward, "agrees", lambda *_: False)
    of_whole = steered(model, side)
    for name in ("kl", "surprise", "logit_difference"):
        torch.testing.assert_close(
            getattr(of_rest, name), getattr(of_whole, name), atol=2e-5, rtol=1e-3
        )
    assert float(of_whole.kl.max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_run_on_one_token_too(
    dtype, tokenizer_folder, monkeypatch
):
    """In float32, as everything is measured: the effects are those of the same weights in
    float32, up to the rounding of the recorded stream.
    """
    model = tiny.bridge(tiny.huggingface_model("llama", dtype=dtype), tokenizer_folder)
    said = []
    agrees = Onward.agrees
    monkeypatch.setattr(
        Onward, "agrees", lambda *args: said.append(agrees(*args)) or said[-1]
    )
    of_rest = steered(model)
    assert said == [True, True]
    in_float32 = steered(model.float())
    assert said == [True] * 4
    torch.testing.assert_close(of_rest.kl, in_float32.kl, atol=1e-4, rtol=0.05)


def test_in_16_bits_a_row_that_meets_others_is_not_taken_for_the_model(
    tokenizer_folder, monkeypatch
):
    """Off by less than the model rounds, which only the same arithmetic shows."""
    model = tiny.bridge(
        tiny.huggingface_model("llama", dtype=torch.bfloat16), tokenizer_folder
    )
    traced = tlc.trace(model, PROMPTS[0])
    onward = Onward(traced, 1, traced.n_pos - 1)
    row = traced.residual[1, -1]
    log_p = onward.log_probabilities(row[None])[0]
    assert onward.agrees(row, log_p)
    original = type(traced.blocks[1]).outputs_in_place
    monkeypatch.setattr(
        type(traced.blocks[1]),
        "outputs_in_place",
        lambda *args: 1.003 * original(*args),
    )
    moved = onward.log_probabilities(row[None])[0]
    assert 2e-5 < float((moved.exp() - log_p.exp()).abs().max()) < 2**-8
    assert not onward.agrees(row, log_p)


def test_a_token_that_is_not_the_last(tokenizer_folder, monkeypatch):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    of_rest = steered(model, position=1)
    monkeypatch.setattr(Onward, "agrees", lambda *_: False)
    of_whole = steered(model, position=1)
    torch.testing.assert_close(of_rest.kl, of_whole.kl, atol=2e-5, rtol=1e-3)


def test_a_rest_that_is_not_the_models_is_not_used(tokenizer_folder):
    """Logits that hooks change are not those of the stream that leaves the blocks."""
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    traced = tlc.trace(model, PROMPTS[0])
    last = traced.n_pos - 1
    onward = Onward(traced, 1, last)
    row = traced.residual[1, last]
    with torch.no_grad():
        own = model(traced.tokens[None])[0, last].double().log_softmax(-1)
    assert onward.agrees(row, own)
    assert not onward.agrees(1.1 * traced.residual[1, 0], own)
    shifted = (own.exp() + torch.tensor([1e-4, *[0] * (len(own) - 1)])).log()
    assert not onward.agrees(row, shifted)
    assert not onward.agrees(row, torch.full_like(own, torch.nan))


def test_tokens_that_act_on_earlier_ones_are_no_context(monkeypatch, tokenizer_folder):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    traced = tlc.trace(model, PROMPTS[0])
    monkeypatch.setattr(type(traced), "is_causal", False)
    onward = Onward(traced, 1, 3)
    row = traced.residual[1, 3]
    assert not onward.agrees(row, onward.log_probabilities(row[None])[0])
