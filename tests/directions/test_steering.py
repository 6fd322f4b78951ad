"""Steering: the prediction against central differences in float64, and planted
directions.
"""

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.directions.downstream import carry_to_end, change_of_logits

PROMPTS = [f"w{i} w{3 * i + 2} w{i + 7} w{2 * i + 30}" for i in range(1, 9)]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    hf_model = tiny.huggingface_model("llama", dtype=torch.float64)
    return tiny.bridge(hf_model, tokenizer_folder)


@pytest.mark.both_lines
def test_measured_over_predicted_tends_to_1(model):
    """Over 8 prompts: |ratio − 1| falls in proportion to ε, both signs together."""
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 1, k=3)
    scales = [0.1, 0.03, 0.01, 0.003]
    result = tlc.directions.steer(model, PROMPTS, directions, scales, n_draws=2)
    errors = []
    for kind in ("direction", "random", "rotated", "low_gain", "activations"):
        ratio = result.of(kind, "kl") / result.of(kind, "predicted_kl")
        errors.append(np.abs(ratio - 1).mean(0))
        assert np.abs(ratio[:, -1] - 1).max() < 0.01
    slope = np.polyfit(np.log(scales), np.log(np.mean(errors, 0)), 1)[0]
    # Odd powers cancel in the mean over both signs: the error falls with ε².
    assert 1.5 < slope < 2.5


@pytest.mark.both_lines
@pytest.mark.parametrize("side", ["read", "write"])
def test_logits_change_as_the_derivative_says(model, side):
    """Amplification and alignment hold `Pv` and `g`: central differences by hooks."""
    traced = tlc.trace(model, PROMPTS[1])
    directions = tlc.directions.directions_of(traced, 0, k=2, side=side)
    first = 0 if side == "read" else 1
    t = traced.n_pos - 1
    arrived = carry_to_end(traced, directions.vectors, first, t)
    change = change_of_logits(traced, arrived, t)
    # Not smaller: norms of the model itself round to float32.
    epsilon = 3e-3

    def logits(scale):
        with (
            torch.no_grad(),
            model.hooks(fwd_hooks=directions.hooks(model, scale, position=t)),
        ):
            return model(traced.tokens.expand(2, -1))[:, t]

    distance = epsilon * traced.residual[first, t].norm()
    measured = (logits(epsilon) - logits(-epsilon)) / (2 * distance)
    error = (change - measured).norm(dim=1) / measured.norm(dim=1)
    assert float(error.max()) < 1e-3


def test_logits_of_a_model_on_disk_change_as_those_of_one_in_memory(folder_model):
    """Its weights are read outside of torch.func, which would take them away again."""
    traces = [
        tlc.trace(tlc.load_model(str(folder_model), memory=memory), PROMPTS[0])
        for memory in ("resident", "stream")
    ]
    vectors = torch.randn(20, tiny.D_MODEL, generator=torch.Generator().manual_seed(0))
    in_memory, on_disk = [change_of_logits(traced, vectors, 3) for traced in traces]
    torch.testing.assert_close(on_disk, in_memory)
    # Nothing is left of what was read.
    weights = traces[1].model.unembed.weight
    assert weights.is_empty


def test_one_direction_has_no_control_in_its_own_span(model):
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 1, k=1)
    result = tlc.directions.steer(model, PROMPTS[:2], directions, [0.1], n_draws=2)
    assert list(dict.fromkeys(result.kinds)) == [
        "direction",
        "random",
        "low_gain",
        "activations",
    ]
    table = result.to_dataframe().set_index("kind")
    draws = result.kl[1:3, 0].mean((-2, -1))
    assert table.draws_low["random"] == pytest.approx(float(draws.min()))
    assert table.draws_high["random"] == pytest.approx(float(draws.max()))


def test_plus_is_the_first_of_both_signs(model):
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 1, k=1)
    result = tlc.directions.steer(model, PROMPTS[:1], directions, [0.2], n_draws=1)
    t = traced.n_pos - 1
    unchanged = traced.logits(traced.residual[-1, t]).log_softmax(-1)
    best = unchanged.argmax()
    for sign, surprise in zip((1, -1), result.surprise[0, 0, :, 0], strict=True):
        hooks = directions.hooks(model, sign * 0.2, position=t)
        with torch.no_grad(), model.hooks(fwd_hooks=hooks):
            logits = model(traced.tokens[None])[0, t]
        steered_p = logits.softmax(-1)[best]
        expected = unchanged[best].exp() * torch.exp(-surprise)
        torch.testing.assert_close(steered_p, expected, rtol=1e-5, atol=0)


def test_prediction_is_amplification_times_alignment(model):
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 0, k=2)
    result = tlc.directions.steer(model, PROMPTS[:2], directions, [0.1], n_draws=2)
    lengths = torch.tensor(
        [float(tlc.trace(model, p).residual[0, -1].norm()) for p in PROMPTS[:2]]
    ).double()
    product = result.amplification**2 * result.alignment * (0.1 * lengths) ** 2 / 2
    torch.testing.assert_close(result.predicted_kl[:, 0], product)


def test_effects_are_those_of_the_definitions(model):
    """KL, surprise and logit difference of one step, written out."""
    # The two logits move apart here: where they move together, what the model's norms
    # round in float32 is 1e-6 of the difference.
    prompt = PROMPTS[1]
    traced = tlc.trace(model, prompt)
    directions = tlc.directions.directions_of(traced, 1, k=1)
    result = tlc.directions.steer(model, prompt, directions, [0.2], n_draws=1)
    with torch.no_grad():
        plain = model(traced.tokens[None])[0, -1]
        with model.hooks(fwd_hooks=directions.hooks(model, -0.2, position=3)):
            steered = model(traced.tokens[None])[0, -1]
    p, q = plain.softmax(-1), steered.softmax(-1)
    first, second = plain.topk(2).indices
    expected_kl = float((p * (p / q).log()).sum())
    assert float(result.kl[0, 0, 1, 0]) == pytest.approx(expected_kl, rel=1e-6)
    surprise = float(p[first].log() - q[first].log())
    assert float(result.surprise[0, 0, 1, 0]) == pytest.approx(surprise, rel=1e-6)
    margin = float((steered - plain)[first] - (steered - plain)[second])
    assert float(result.logit_difference[0, 0, 1, 0]) == pytest.approx(margin, rel=1e-6)


def test_bad_arguments(model):
    traced = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(traced, 1, k=1)
    with pytest.raises(ValueError, match="position"):
        tlc.directions.steer(model, "w1 w2", directions, position=5)
    with pytest.raises(ValueError, match="scales"):
        tlc.directions.steer(model, "w1 w2", directions, [-0.1])
    with pytest.raises(ValueError, match="`scales` is empty: wanted at least one"):
        tlc.directions.steer(model, "w1 w2", directions, [])
    narrow = tlc.directions.Directions(torch.eye(16)[:2], 1, "read", {})
    with pytest.raises(ValueError, match="width 16, and this model has width 32"):
        tlc.directions.steer(model, "w1 w2", narrow)
    late = tlc.directions.Directions(torch.eye(32)[:2], 2, "read", {})
    with pytest.raises(ValueError, match="of layer 2, and this model has 2 blocks"):
        tlc.directions.steer(model, "w1 w2", late)
    result = tlc.directions.steer(model, "w1", directions, [0.1], n_draws=1)
    with pytest.raises(ValueError, match="activations"):
        result.of("activations")
