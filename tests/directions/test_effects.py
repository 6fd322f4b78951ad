"""Prompts of `ablate`, `rotate` and `steer`: token ids, in every form that `trace` takes,
against the text and HuggingFace's own model.
"""

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines

TEXTS = ["w3 w14 w15 w92 w65", "w35 w89 w79 w32"]
IDS = [[3, 14, 15, 92, 65], [35, 89, 79, 32]]
FORMS = {
    "lists": IDS,
    "tuples": tuple(map(tuple, IDS)),
    "arrays": [np.array(ids) for ids in IDS],
    "tensors": [torch.tensor(ids) for ids in IDS],
    "batches of one": [torch.tensor([ids], dtype=torch.int32) for ids in IDS],
    "prompts": [tlc.Prompt(tokens=ids, id=str(i)) for i, ids in enumerate(IDS)],
    "a text and ids": [TEXTS[0], IDS[1]],
}


@pytest.fixture(scope="module")
def hf_model():
    return tiny.huggingface_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def model(hf_model, tokenizer_folder):
    return tiny.bridge(hf_model, tokenizer_folder)


@pytest.fixture(scope="module")
def directions(model):
    return tlc.directions.directions_of(
        tlc.trace(model, "w1 w2 w3"), 1, k=1, side="read"
    )


@pytest.fixture(scope="module")
def measured(model, directions):
    """Return, by function, what it measures of prompts: effects, ids of prompts."""
    subspace = tlc.directions.Subspace.of(torch.eye(32)[:, :2], [0, 1], "write")

    def ablated(prompts):
        result = tlc.directions.ablate(model, prompts, subspace, n_draws=1)
        return torch.cat([result.loss[None], result.loss_change, result.kl]), result

    def rotated(prompts):
        result = tlc.directions.rotate(model, prompts, n_draws=1)
        return torch.cat([result.loss[None], result.loss_change, result.kl]), result

    def steered(prompts):
        result = tlc.directions.steer(model, prompts, directions, [0.1], n_draws=1)
        return torch.cat([result.kl, result.surprise]), result

    return {"ablate": ablated, "rotate": rotated, "steer": steered}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", ["ablate", "rotate", "steer"])
def test_token_ids_give_the_numbers_of_their_text(measured, function, form):
    of_texts, by_text = measured[function](TEXTS)
    of_ids, by_ids = measured[function](FORMS[form])
    assert torch.equal(of_ids, of_texts)
    assert by_ids.prompts == by_text.prompts == ("0", "1")
    # The two prompts differ, so that neither stands for both.
    assert not torch.equal(of_ids[..., 0], of_ids[..., 1])


@pytest.mark.parametrize("function", ["ablate", "rotate", "steer"])
@pytest.mark.parametrize("ids", [IDS[0], torch.tensor(IDS[0]), torch.tensor([IDS[0]])])
def test_numbers_alone_are_one_prompt(measured, function, ids):
    of_ids, result = measured[function](ids)
    of_text, _ = measured[function](TEXTS[0])
    assert torch.equal(of_ids, of_text)
    assert result.prompts == ("0",)


def test_prompts_that_can_be_walked_through_once_are_all_there(measured):
    of_texts, _ = measured["rotate"](TEXTS)
    for prompts in (TEXTS, IDS):
        once, _ = measured["rotate"](iter(prompts))
        assert torch.equal(once, of_texts)


def test_rows_of_a_tensor_are_prompts(measured):
    rows = torch.tensor([IDS[0][:4], IDS[1]])
    _, result = measured["rotate"](rows)
    _, by_text = measured["rotate"](["w3 w14 w15 w92", TEXTS[1]])
    assert torch.equal(result.loss_change, by_text.loss_change)


def test_losses_are_those_of_the_huggingface_model(measured, hf_model):
    _, result = measured["ablate"]([torch.tensor(ids) for ids in IDS])
    for i, ids in enumerate(IDS):
        batch = torch.tensor([ids])
        expected = float(hf_model(batch, labels=batch).loss)
        assert float(result.loss[i]) == pytest.approx(expected, rel=1e-6)


def test_a_step_is_one_in_the_huggingface_model(measured, hf_model, directions):
    """A hook of torch moves the stream that the second block reads."""
    _, result = measured["steer"](IDS)
    block = tiny.layers_of(hf_model)[1]

    def moved(_, arguments):
        h = arguments[0].clone()
        h[0, -1] += 0.1 * h[0, -1].norm() * directions.vectors[0]
        return (h, *arguments[1:])

    for i, ids in enumerate(IDS):
        batch = torch.tensor([ids])
        with torch.no_grad():
            log_p = hf_model(batch).logits[0, -1].log_softmax(-1)
            with block.register_forward_pre_hook(moved):
                log_p_moved = hf_model(batch).logits[0, -1].log_softmax(-1)
        expected = float((log_p.exp() * (log_p - log_p_moved)).sum())
        assert expected > 1e-5
        # The sign that comes first is the positive one.
        assert float(result.kl[0, 0, 0, i]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("function", ["ablate", "rotate", "steer"])
def test_token_ids_that_are_no_prompts_are_refused_in_one_line(measured, function):
    measure = measured[function]
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, \d+\], got 3 …"):
        measure([[3, 1_000_000]])
    with pytest.raises(
        ValueError,
        match=r"must be token ids \[n_pos\] or \[1 n_pos\] of one prompt; got shape "
        r"\[2, 3\]: give each prompt by itself, unpadded",
    ):
        measure([torch.tensor([[1, 2, 3], [4, 5, 6]])])
    with pytest.raises(TypeError, match=r"`input_ids` of what a tokenizer returns"):
        measure({"input_ids": [1, 2, 3]})
    with pytest.raises(ValueError, match="one prompt is there twice, as '"):
        measure([TEXTS[0], IDS[0]])
    with pytest.raises(ValueError, match="`prompts` is empty: wanted at least one"):
        measure([])
    with pytest.raises(ValueError, match="the prompt is empty"):
        measure([[]])
