"""Linear models of a trajectory, and noise along it: blocks that are linear, and
HuggingFace's forward pass.
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from linear_blocks import N_POS, D, L, affine_trace, coupled
from random_matrices import gaussian
from tl_coupling.blocks import BlockFunction, Trace
from tl_coupling.trajectories import linearisation, perturbation

PREDICTIONS = ("one_step", "product", "closed_form", "previous", "input")


# Linear blocks: what the predictions are is known


def test_linear_blocks_are_predicted_exactly():
    trace = affine_trace(0.5 * gaussian(L, D, D))
    result = linearisation(trace, closed_form=False)
    for prediction in ("one_step", "product"):
        assert result.relative_error(prediction).max() < 1e-12
        assert (1 - result.cosine_similarity(prediction)).abs().max() < 1e-12


@pytest.mark.parametrize("reference_layer", [None, 0, 2, -1])
def test_coupled_blocks_have_the_closed_form_whichever_layer_gives_u(reference_layer):
    result = linearisation(affine_trace(coupled()[0]), reference_layer=reference_layer)
    assert result.relative_error("closed_form").max() < 1e-10
    assert result.reference_layer == (
        L // 2 if reference_layer is None else reference_layer % L
    )


def test_closed_form_of_blocks_that_are_not_coupled_misses():
    result = linearisation(affine_trace(gaussian(L, D, D)))
    assert result.relative_error("product").max() < 1e-12
    assert result.relative_error("closed_form").min() > 0.1


def test_closed_form_takes_every_gain_as_positive():
    # Blocks that shrink have the singular values of blocks that grow; eq. 24 knows only
    # those.
    A, U, S = coupled()
    trace = affine_trace(-0.1 * A)
    expected = torch.stack(
        [
            U @ ((1 + 0.1 * S[: layer + 1]).prod(0) * (U.mT @ trace.residual[0, -1]))
            for layer in range(L)
        ]
    )
    torch.testing.assert_close(
        linearisation(trace).closed_form, expected, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("k", [1, 3, D])
def test_closed_form_of_k_vectors_leaves_the_rest_alone(k):
    A, U, S = coupled()
    result = linearisation(affine_trace(A), k=k)
    x = result.trajectory[0]
    inside = U[:, :k] @ U[:, :k].mT @ x
    grown = torch.stack(
        [
            U[:, :k] @ ((1 + S[: layer + 1, :k]).prod(0) * (U[:, :k].mT @ x))
            for layer in range(L)
        ]
    )
    torch.testing.assert_close(
        result.closed_form, x - inside + grown, rtol=1e-10, atol=1e-10
    )
    assert result.k == k


def test_the_constant_of_an_affine_block_is_what_is_missed():
    A, b = 0.5 * gaussian(L, D, D), gaussian(L, D, seed=1)
    trace = affine_trace(A, b)
    x = trace.residual[:, 1]
    result = linearisation(trace, position=1, closed_form=False)
    torch.testing.assert_close(result.one_step, x[1:] - b, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        result.relative_error("one_step"), b.norm(dim=-1) / x[1:].norm(dim=-1)
    )
    assert result.position == 1
    naive = x[0]
    for layer in range(L):
        naive = naive + A[layer] @ naive
        torch.testing.assert_close(result.product[layer], naive, rtol=1e-10, atol=1e-10)


def test_predictions_of_no_block():
    trace = affine_trace(0.5 * gaussian(L, D, D))
    x = trace.residual[:, -1].numpy()
    result = linearisation(trace, closed_form=False)
    size = np.linalg.norm(x[1:], axis=1)
    np.testing.assert_allclose(
        result.relative_error("previous"),
        np.linalg.norm(np.diff(x, axis=0), axis=1) / size,
    )
    np.testing.assert_allclose(
        result.relative_error("input"), np.linalg.norm(x[1:] - x[0], axis=1) / size
    )
    np.testing.assert_allclose(
        result.cosine_similarity("input"),
        x[1:] @ x[0] / size / np.linalg.norm(x[0]),
        rtol=1e-12,
    )


def test_a_product_beyond_the_range_of_the_dtype_is_followed():
    # Gains of 1e30 at each of four layers: 1e120, where float32 ends at 3e38.
    stream = torch.ones(N_POS, D)
    call = affine_trace(1e30 * torch.eye(D)[None], x=stream).blocks[0].call
    blocks = tuple(
        BlockFunction(layer, call, stream, call(stream).detach() - stream)
        for layer in range(L)
    )
    trace = dataclasses.replace(
        affine_trace(torch.zeros(L, D, D), x=stream), blocks=blocks
    )
    for closed_form in (True, False):
        result = linearisation(trace, closed_form=closed_form)
        torch.testing.assert_close(
            result.product[-1] / 1e120, torch.ones(D).double(), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(
            result.cosine_similarity("product"), torch.ones(L).double()
        )


def test_a_stream_that_dies_is_undefined_and_said_so():
    trace = affine_trace(torch.stack([-torch.eye(D), gaussian(D, D).float()]).double())
    with pytest.warns(UserWarning, match="normalises the stream itself"):
        result = linearisation(trace, closed_form=False)
    with pytest.warns(
        UserWarning, match="relative error is undefined .* after layer 0, 1"
    ):
        assert result.relative_error("one_step").isnan().all()
    with pytest.warns(UserWarning, match="2 of 2 cosine similarities are undefined"):
        assert result.cosine_similarity("product").isnan().all()


# A model


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("position", [-1, 3])
def test_against_huggingfaces_jacobians(
    tokenizer_folder: Path, architecture: str, position: int
):
    witness = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(witness, tokenizer_folder), tiny.TOKENS)
    t = position % len(tiny.TOKENS)
    hidden = witness(
        torch.tensor([tiny.TOKENS]), output_hidden_states=True
    ).hidden_states
    J = [
        tiny.oracle_jacobian(witness, tiny.TOKENS, layer, t, t)
        for layer in range(tiny.N_LAYERS)
    ]
    x = [hidden[0][0, t].detach(), hidden[1][0, t].detach()]
    result = linearisation(trace, position)
    one_step = torch.stack([x[layer] + J[layer] @ x[layer] for layer in range(2)])
    product = torch.stack(
        [x[0] + J[0] @ x[0], x[0] + J[0] @ x[0] + J[1] @ (x[0] + J[0] @ x[0])]
    )
    for got, expected in ((result.one_step, one_step), (result.product, product)):
        torch.testing.assert_close(
            got.float(), expected, rtol=1e-4, atol=1e-4 * float(expected.norm())
        )
    by_products = linearisation(trace, position, closed_form=False)
    torch.testing.assert_close(
        by_products.one_step, result.one_step, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(
        by_products.product, result.product, rtol=1e-4, atol=1e-4
    )
    assert by_products.closed_form is None
    assert by_products.k is by_products.reference_layer is None
    for prediction in PREDICTIONS:
        assert (
            result.relative_error(prediction).shape
            == result.cosine_similarity(prediction).shape
            == (2,)
        )


@pytest.mark.parametrize("architecture", ["gpt_neox", "gptj"])
def test_a_parallel_pre_norm_block_does_not_see_its_tokens_length(
    tokenizer_folder: Path, architecture: str
):
    # f(c x) = f(x) but for the norm's ε, so that J x = 0 (Euler): the linear model says
    # that nothing happens.
    trace = tlc.trace(
        tiny.bridge(tiny.huggingface_model(architecture), tokenizer_folder), tiny.TOKENS
    )
    result = linearisation(trace, closed_form=False)
    steps = result.trajectory.diff(dim=0).norm(dim=-1)
    assert (
        (result.one_step - result.predicted("previous")).norm(dim=-1) < 1e-2 * steps
    ).all()


def test_final_norm_is_part_of_the_last_step(tiny_trace: Trace):
    normed = tlc.trace(tiny_trace.model, tiny.TOKENS, final_norm=True)
    a, b = (
        linearisation(tiny_trace, closed_form=False),
        linearisation(normed, closed_form=False),
    )
    # Matrix products of equal numbers may differ in their last bits, by where the memory
    # of their factors begins.
    torch.testing.assert_close(b.one_step[0], a.one_step[0], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(a.one_step[-1], b.one_step[-1], rtol=0.1)


def test_linearisation_describes_itself_and_reports_progress(tiny_trace: Trace):
    seen = []
    result = linearisation(
        tiny_trace, progress=lambda layers: seen.extend(layers) or seen
    )
    assert seen == [0, 1]
    assert json.loads(json.dumps(result.provenance))["position"] == len(tiny.TOKENS) - 1
    assert result.provenance["linearised_in"] == "float32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 8}, r"`position` must lie in \[-8, 7\]"),
        (
            {"reference_layer": 2},
            r"must lie in \[-2, 1\] for this 2-block model, got 2",
        ),
        ({"k": 33}, r"`k` must lie in \[1, 32\]"),
        ({"k": 3, "closed_form": False}, "belong to the closed form"),
        ({"reference_layer": 0, "closed_form": False}, "belong to the closed form"),
    ],
)
def test_linearisation_refuses(tiny_trace: Trace, options, message: str):
    with pytest.raises(ValueError, match=message):
        linearisation(tiny_trace, **options)


def test_a_closed_form_left_out_is_named(tiny_trace: Trace):
    with pytest.raises(ValueError, match="left out: measure with `closed_form=True`"):
        linearisation(tiny_trace, closed_form=False).relative_error("closed_form")


# Noise


def noisy_hidden_states(
    witness: nn.Module, position: int, noise: Tensor
) -> list[Tensor]:
    """HuggingFace's stream with noise added to one token where it enters the first
    layer; final norm last.
    """

    def add(_: nn.Module, args, kwargs):
        X = (args[0] if args else kwargs["hidden_states"]).clone()
        X[0, position] += noise
        return (
            ((X, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": X})
        )

    seen = []
    layers = tiny.layers_of(witness)
    handles = [layers[0].register_forward_pre_hook(add, with_kwargs=True)]
    handles.append(
        layers[1].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(
                (args[0] if args else kwargs["hidden_states"])[0, position]
            ),
            with_kwargs=True,
        )
    )
    try:
        with torch.no_grad():
            last = witness(
                torch.tensor([tiny.TOKENS]), use_cache=False, output_hidden_states=True
            ).hidden_states[-1]
    finally:
        for handle in handles:
            handle.remove()
    return [*seen, last[0, position]]


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("position", [-1, 4])
def test_perturbation_against_huggingface(
    tokenizer_folder: Path, architecture: str, position: int
):
    witness = tiny.huggingface_model(architecture)
    trace = tlc.trace(
        tiny.bridge(witness, tokenizer_folder), tiny.TOKENS, final_norm=True
    )
    scales, n_samples, seed = (0.1, 2.0), 3, 5
    result = perturbation(
        trace, scales, position=position, n_samples=n_samples, seed=seed
    )

    with torch.no_grad():
        clean = [
            h[0, position]
            for h in witness(
                torch.tensor([tiny.TOKENS]), output_hidden_states=True
            ).hidden_states
        ]
    standard = gaussian(n_samples, tiny.D_MODEL, seed=seed).float()
    for i, scale in enumerate(scales):
        for j in range(n_samples):
            noise = scale * clean[0].norm() / math.sqrt(tiny.D_MODEL) * standard[j]
            noisy = [clean[0] + noise, *noisy_hidden_states(witness, position, noise)]
            expected = [
                float(torch.cosine_similarity(a, b, dim=0))
                for a, b in zip(clean, noisy, strict=True)
            ]
            np.testing.assert_allclose(
                result.cosine_similarity[i, j], expected, rtol=0, atol=2e-5
            )


def test_no_noise_changes_nothing_and_more_changes_more(tiny_trace: Trace):
    result = perturbation(tiny_trace, (0, 0.01, 0.1, 1.0), n_samples=4)
    torch.testing.assert_close(
        result.cosine_similarity[0], torch.ones(4, 3), rtol=0, atol=1e-6
    )
    assert (result.mean.diff(dim=0) < 0).all()
    torch.testing.assert_close(result.mean, result.cosine_similarity.sum(1) / 4)


def test_noise_of_scale_one_is_as_long_as_the_embedding(tiny_trace: Trace):
    first = perturbation(tiny_trace, (0.5, 1.0), n_samples=40).mean[:, 0]
    torch.testing.assert_close(
        first, torch.tensor([1 / math.sqrt(1.25), 1 / math.sqrt(2)]), rtol=0, atol=0.05
    )


def test_absolute_noise_is_relative_noise_of_other_scales(tiny_trace: Trace):
    """Scale s of absolute noise is `s √d / ‖x^0‖` of relative noise, sample by
    sample.
    """
    absolute = perturbation(tiny_trace, (0.02, 0.5), relative=False, n_samples=3)
    in_units = math.sqrt(tiny.D_MODEL) / float(tiny_trace.residual[0, -1].norm())
    relative = perturbation(tiny_trace, (0.02 * in_units, 0.5 * in_units), n_samples=3)
    torch.testing.assert_close(
        absolute.cosine_similarity, relative.cosine_similarity, rtol=0, atol=1e-5
    )
    assert (absolute.relative, relative.relative, absolute.scales) == (
        False,
        True,
        (0.02, 0.5),
    )
    assert "absolute scales" in repr(absolute)


def test_noise_is_seeded_and_the_callers_generator_left_alone(tiny_trace: Trace):
    state = torch.random.get_rng_state()
    a, b, c = (
        perturbation(tiny_trace, (1.0,), n_samples=2, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a.cosine_similarity, b.cosine_similarity)
    assert not torch.allclose(a.cosine_similarity, c.cosine_similarity, atol=1e-3)
    assert (a.seed, c.seed, a.scales, a.position) == (0, 1, (1.0,), 7)
    assert json.loads(json.dumps(a.provenance))["position"] == 7


def test_the_trace_is_left_as_it_was(tiny_trace: Trace):
    stream = tiny_trace.residual.clone()
    perturbation(tiny_trace, (1.0,), n_samples=1)
    assert torch.equal(tiny_trace.residual, stream)


def test_linear_blocks_that_scale_keep_every_angle():
    trace = affine_trace(0.7 * torch.eye(D).double().expand(L, D, D))
    cosine = perturbation(trace, (0.3,), n_samples=2).cosine_similarity
    torch.testing.assert_close(cosine, cosine[..., :1].expand_as(cosine))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scales": ()}, "`scales` must be finite numbers of at least 0, one or more"),
        ({"scales": (0.1, -1.0)}, r"got \[0.1, -1.0\]"),
        ({"scales": (math.nan,)}, "`scales` must be finite"),
        ({"n_samples": 0}, "`n_samples` must be at least 1, got 0"),
        ({"position": 8}, r"`position` must lie in \[-8, 7\]"),
    ],
)
def test_perturbation_refuses(tiny_trace: Trace, arguments, message: str):
    with pytest.raises(ValueError, match=message):
        perturbation(tiny_trace, **arguments)


def test_an_embedding_of_zero_has_no_scale():
    trace = affine_trace(
        gaussian(L, D, D), x=torch.zeros(N_POS, D, dtype=torch.float64)
    )
    with pytest.raises(ValueError, match="the embedding of token 2 is zero"):
        perturbation(trace)
    with pytest.warns(UserWarning, match="cosine similarities are undefined"):
        assert (
            perturbation(trace, (1.0,), relative=False).cosine_similarity.isnan().any()
        )
