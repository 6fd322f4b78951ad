"""A network whose blocks read one known direction, write another, and whose unembedding
uses it: everything finds it, and the controls do not.
"""

import pytest
import torch

import tiny
import tl_coupling as tlc

TOKEN = 7
PROMPTS = [f"w{i} w{3 * i + 2} w{i + 7} w{2 * i + 30} w{5 * i}" for i in range(1, 7)]


@pytest.fixture(scope="module")
def planted(tokenizer_folder):
    """A Llama of small random weights, and a neuron in every MLP that reads `read` and
    writes `write`, which promotes one token.
    """
    model = tiny.huggingface_model("llama", num_hidden_layers=4)
    frame = torch.linalg.qr(torch.randn(32, 32, generator=torch.manual_seed(3))).Q
    read, write = frame[:, 0], frame[:, 1]
    with torch.no_grad():
        for layer in model.model.layers:
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    parameter *= 0.1
            layer.post_attention_layernorm.weight.fill_(1)
            layer.mlp.gate_proj.weight[0] = 3 * read
            layer.mlp.up_proj.weight[0] = 3 * read
            layer.mlp.down_proj.weight[:, 0] = write / 500
        model.model.norm.weight.fill_(1)
        # Every token has some of what is read.
        embedding = model.model.embed_tokens.weight
        embedding += (2 - embedding @ read)[:, None] * read
        model.lm_head.weight *= 0.1
        model.lm_head.weight[TOKEN] = write
    return tiny.bridge(model, tokenizer_folder), read, write


@pytest.fixture(scope="module")
def subspace(planted):
    model, _, _ = planted
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS[:3]]
    return tlc.directions.shared_subspace(traces, rank=1, k=1)


def test_the_shared_subspace_is_the_planted_one(planted, subspace):
    _, read, write = planted
    assert abs(float(subspace.write[:, 0] @ write)) > 0.95
    # The norm before the MLP takes out of `read` what points along the stream.
    assert abs(float(subspace.read[:, 0] @ read)) > 0.5
    assert bool((subspace.eigenvalues > subspace.null_eigenvalues.amax(1)).all())


def test_decoding_finds_the_token(planted):
    model, _, _ = planted
    trace = tlc.trace(model, PROMPTS[0])
    decoded = tlc.directions.decode(trace, 2, k=1, n_tokens=1)
    for way in range(3):
        ends = [decoded.texts_of(way, 0, end)[0] for end in (0, 1)]
        assert f"w{TOKEN}" in ends
        drawn = decoded.control_kurtosis[0, way]
        assert float(decoded.kurtosis[way, 0]) > float(drawn.nanquantile(0.9))


def test_steering_acts_and_its_controls_do_not(planted):
    model, _, _ = planted
    trace = tlc.trace(model, PROMPTS[0])
    directions = tlc.directions.directions_of(trace, 2, k=1, side="write")
    result = tlc.directions.steer(model, PROMPTS[3:], directions, [0.1])
    for control in ("random", "low_gain", "activations"):
        difference = result.against(control)
        assert float(difference.low[0]) > 0
        assert result.of("direction").mean() > 3 * result.of(control).mean()


def test_ablation_costs_and_its_controls_do_not(planted, subspace):
    model, _, _ = planted
    result = tlc.directions.ablate(model, PROMPTS[3:], subspace)
    own = result.of("shared", "kl").mean()
    for control in ("random", "unshared", "low_gain"):
        assert float(result.against(control, "kl").low) > 0
        assert own > 5 * result.draws(control, "kl").max()
