"""Shared subspaces and ablation on models whose answer is known, planted or random."""

import numpy as np
import pytest
import torch

import tiny
import tl_coupling as tlc
from linear_blocks import affine_trace
from random_matrices import gaussian
from tl_coupling.directions import Subspace

pytestmark = pytest.mark.both_lines

D = 24
L = 5


def planted_trace(seed=0):
    """Blocks that read two shared directions and write two others, each with directions
    of its own of smaller gain.
    """
    frame = torch.linalg.qr(gaussian(D, D, seed=1)).Q
    read, write = frame[:, :2], frame[:, 2:4]
    blocks = []
    for layer in range(L):
        own = 0.2 * gaussian(D, D, seed=10 + layer) / D**0.5
        blocks.append(
            3 * write @ torch.tensor([1.5, 1.0]).double().diag() @ read.mT + own
        )
    x = gaussian(6, D, seed=50 + seed)
    return affine_trace(torch.stack(blocks), x=x), read, write


def cosines(first, second):
    return torch.linalg.svdvals(first.double().mT @ second.double())


def test_planted_subspaces_are_found():
    trace, read, write = planted_trace()
    subspace = tlc.directions.shared_subspace([trace], rank=2, k=2)
    assert float(cosines(subspace.read, read).min()) > 0.99
    assert float(cosines(subspace.write, write).min()) > 0.99
    # Every block has them, and random frames are far from that.
    assert float(subspace.eigenvalues.min()) > 0.95
    assert float(subspace.null_eigenvalues.max()) < 0.7


def test_subspaces_are_leading_eigenvectors_of_the_mean_projector():
    """Against numpy, over two prompts, weighted the same."""
    traces = [planted_trace(seed)[0] for seed in (0, 1)]
    subspace = tlc.directions.shared_subspace(traces, rank=4, k=3)
    G = np.zeros((D, D))
    for trace in traces:
        for layer in range(L):
            _, _, Vh = np.linalg.svd(tlc.block_jacobian(trace, layer).double().numpy())
            G += Vh[:3].T @ Vh[:3] / (2 * L)
    values = np.linalg.eigvalsh(G)[::-1]
    np.testing.assert_allclose(subspace.eigenvalues[0], values[:4], atol=1e-5)
    projector = subspace.read.double().numpy() @ subspace.read.double().numpy().T
    assert np.trace(projector @ G) == pytest.approx(values[:4].sum(), abs=1e-5)


def test_random_blocks_share_what_random_frames_share():
    blocks = torch.stack([gaussian(D, D, seed=s) for s in range(40)])
    subspace = tlc.directions.shared_subspace([affine_trace(blocks)], rank=1, k=3)
    null = subspace.null_eigenvalues[0, :, 0]
    spread = float(null.std())
    assert float(abs(subspace.eigenvalues[0, 0] - null.mean())) < 4 * spread
    # Its mean over all directions is k / d.
    whole = tlc.directions.shared_subspace([affine_trace(blocks)], rank=D, k=3)
    assert float(whole.eigenvalues[1].mean()) == pytest.approx(3 / D, abs=1e-5)


def test_unshared_directions_have_the_gains_of_the_shared_ones():
    trace, _, _ = planted_trace()
    subspace = tlc.directions.shared_subspace([trace], rank=3, k=3)
    for side in (0, 1):
        for layer in range(L):
            unshared = subspace.unshared[side, layer].double()
            assert (
                float((subspace.bases[side].double().mT @ unshared).abs().max()) < 1e-4
            )
            J = tlc.block_jacobian(trace, layer)
            J = J if side == 0 else J.mT
            gain = float((J @ unshared).square().sum(0).mean().sqrt())
            assert gain == pytest.approx(
                float(subspace.gains[side, layer, 1]), rel=1e-3
            )


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


PROMPTS = [f"w{i} w{3 * i + 2} w{i + 7} w{2 * i + 30} w{5 * i}" for i in range(1, 7)]


@pytest.fixture(scope="module")
def subspace(model) -> Subspace:
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS[:3]]
    return tlc.directions.shared_subspace(traces, rank=4, k=4)


@pytest.mark.parametrize("side", ["read", "write"])
def test_ablation_is_what_its_hooks_do(model, subspace, side):
    """Loss and KL with the subspace's own hooks, written out."""
    result = tlc.directions.ablate(model, PROMPTS[3], subspace, side=side, n_draws=2)
    tokens = tlc.trace(model, PROMPTS[3]).tokens[None]
    with torch.no_grad():
        plain = model(tokens)[0]
        with model.hooks(fwd_hooks=subspace.hooks(model, side)):
            ablated = model(tokens)[0]

    def loss(logits):
        return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:]))

    change = loss(ablated) - loss(plain)
    assert float(result.of("shared")[0]) == pytest.approx(change, abs=1e-5)
    p, q = plain.softmax(-1), ablated.softmax(-1)
    kl = float((p * (p / q).log()).sum(-1).mean())
    assert float(result.of("shared", "kl")[0]) == pytest.approx(kl, abs=1e-5)


def test_controls_remove_what_they_say(model, subspace):
    result = tlc.directions.ablate(model, PROMPTS[3:], subspace, n_draws=8)
    removed = {kind: result.of(kind, "removed").mean() for kind in set(result.kinds)}
    # A random subspace of 32 dimensions holds 4 of 32 parts, "principal" the most.
    assert removed["random"] == pytest.approx(4 / 32, abs=0.06)
    assert removed["principal"] > removed["span"]
    assert removed["principal"] > removed["random"]
    # One layer sees the same stream in both passes: as much is removed there.
    one = tlc.directions.ablate(model, PROMPTS[3:], subspace, [0], n_draws=8)
    np.testing.assert_allclose(
        one.of("norm_matched", "removed"), one.of("shared", "removed"), rtol=1e-4
    )


def test_first_tokens_can_be_left_alone(model, subspace):
    """By hand: what the blocks write is projected from the fourth token on."""
    result = tlc.directions.ablate(
        model, PROMPTS[3], subspace, first_position=3, n_draws=1
    )
    tokens = tlc.trace(model, PROMPTS[3]).tokens[None]
    B = subspace.write
    entered = []

    def keep(stream, hook):
        entered.append(stream.clone())
        return stream

    def project(stream, hook):
        step = stream - entered.pop()
        step[:, 3:] = step[:, 3:] @ B @ B.mT
        step[:, :3] = 0
        return stream - step

    hooks = [
        hook
        for layer in subspace.layers
        for hook in (
            (f"blocks.{layer}.hook_resid_pre", keep),
            (f"blocks.{layer}.hook_resid_post", project),
        )
    ]
    with torch.no_grad():
        before = model(tokens)[0].log_softmax(-1)
        with model.hooks(fwd_hooks=hooks):
            after = model(tokens)[0].log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1)
    assert float(kl[:3].abs().max()) < 1e-6
    assert float(result.of("shared", "kl")[0]) == pytest.approx(float(kl.mean()), 1e-3)


@pytest.mark.parametrize("first_position", [5, 6, 99])
def test_first_position_lies_in_every_prompt(model, subspace, first_position):
    with pytest.raises(ValueError, match=r"must be below \d+, the number of tokens"):
        tlc.directions.ablate(
            model,
            [f"{PROMPTS[3]} {PROMPTS[4]}", PROMPTS[4]],
            subspace,
            first_position=first_position,
        )
    last = tlc.directions.ablate(
        model, PROMPTS[3], subspace, first_position=4, n_draws=1
    )
    assert bool(last.removed.isfinite().all())


def test_a_layer_counts_once(model, subspace):
    with pytest.raises(ValueError, match=r"each layer once, got \[0, 0\]"):
        tlc.directions.ablate(model, PROMPTS[3], subspace, layers=[0, 0])
    with pytest.raises(ValueError, match=r"each layer once, got \[1, 1\]"):
        tlc.directions.shared_subspace(
            [tlc.trace(model, PROMPTS[3])], rank=2, k=2, layers=[1, -1]
        )


@pytest.mark.parametrize(
    "prompts",
    [
        [PROMPTS[3], PROMPTS[4], PROMPTS[3]],
        [tlc.Prompt(PROMPTS[3], "a"), tlc.Prompt(PROMPTS[3], "b")],
        [PROMPTS[3], PROMPTS[3].replace(" ", "  ")],
    ],
)
def test_a_prompt_counts_once(model, subspace, prompts):
    """Else the interval has no width and p is 0."""
    with pytest.raises(ValueError, match="one prompt is there twice, as "):
        tlc.directions.ablate(model, prompts, subspace)
    with pytest.raises(ValueError, match="one prompt is there twice, as "):
        tlc.directions.steer(
            model,
            prompts,
            tlc.directions.directions_of(tlc.trace(model, PROMPTS[0]), 1, k=1),
        )


def test_traces_are_of_one_model_traced_in_one_way(model):
    trace = tlc.trace(model, PROMPTS[0])
    normed = tlc.trace(model, PROMPTS[1], final_norm=True)
    for traces in ([trace, normed], [normed, trace]):
        with pytest.raises(ValueError, match="same final_norm, got "):
            tlc.directions.shared_subspace(traces, rank=2, k=2)
    with pytest.raises(ValueError, match="one prompt is there twice"):
        tlc.directions.shared_subspace([trace, trace], rank=2, k=2)
    of_normed = tlc.directions.shared_subspace([normed], rank=2, k=2)
    assert of_normed.provenance["final_norm"] is True


def test_the_provenance_is_of_all_prompts(model):
    traces = [tlc.trace(model, prompt) for prompt in PROMPTS[:2]]
    traces[1].provenance["remarks"].append("the second is odd")
    provenance = tlc.directions.shared_subspace(traces, rank=2, k=2).provenance
    assert provenance["prompts"] == PROMPTS[:2]
    assert provenance["remarks"] == ["the second is odd"]
    assert provenance["model"] == traces[0].provenance["model"]
    assert not {"prompt", "tokens", "str_tokens"} & provenance.keys()


@pytest.mark.parametrize("side", ["read", "write"])
def test_on_a_random_model_the_shared_subspace_is_as_needed_as_others(model, side):
    """Nothing is trained here: the subspace lies among the draws of its controls."""
    found_on = [tlc.trace(model, prompt) for prompt in PROMPTS[:3]]
    subspace = tlc.directions.shared_subspace(found_on, rank=2, k=4)
    result = tlc.directions.ablate(model, PROMPTS[3:], subspace, side=side)
    shared = float(result.of("shared").mean())
    drawn = np.concatenate([result.draws("random"), result.draws("span")])
    assert drawn.min() <= shared <= drawn.max()


def test_bad_arguments(model, subspace, tokenizer_folder):
    with pytest.raises(ValueError, match="rank"):
        tlc.directions.ablate(model, "w1 w2", subspace, rank=5)
    with pytest.raises(ValueError, match="layers"):
        tlc.directions.ablate(model, "w1 w2", subspace, [7])
    with pytest.raises(ValueError, match="at least 2 tokens"):
        tlc.directions.ablate(model, "w1", subspace)
    with pytest.raises(ValueError, match="empty"):
        tlc.directions.shared_subspace([])
    with pytest.raises(TypeError, match="`traces` must be"):
        tlc.directions.shared_subspace(["w1"])
    trace = tlc.trace(model, "w1 w2")
    with pytest.raises(ValueError, match="rank"):
        tlc.directions.shared_subspace([trace], rank=33)
    bert = tiny.bridge(tiny.huggingface_model("bert"), tokenizer_folder)
    with (
        pytest.raises(ValueError, match="normalises the stream"),
        pytest.warns(UserWarning, match="normalises the stream itself"),
    ):
        tlc.directions.shared_subspace([tlc.trace(bert, tiny.TOKENS)], rank=2, k=2)
