"""Numbers of other tools, made here by this package's calls, against their definitions
written out over HuggingFace's own model: no bridge and no `tl_coupling` take part.

`docs/how-to/other-tools.md` shows the calls. TransformerLens's `JacobianLens` is in
`tests/trajectories/test_lenses.py`, its `SVDInterpreter` in
`tests/directions/test_decoding.py`.
"""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tiny
import tl_coupling as tlc

LAST = len(tiny.TOKENS) - 1
ARCHITECTURES = ("llama", "gpt2", "gpt_neox")


@pytest.fixture(params=ARCHITECTURES)
def original(request: pytest.FixtureRequest) -> Any:
    return tiny.huggingface_model(request.param)


@pytest.fixture
def trace(original: nn.Module, tokenizer_folder: Path) -> tlc.Trace:
    return tlc.trace(tiny.bridge(original, tokenizer_folder), tiny.TOKENS)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


def states_of(original: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return what enters each layer, and what leaves it, by hooks: the last of
    HuggingFace's hidden states would be normalised.
    """
    before: list[Tensor] = []
    after: list[Tensor] = []

    def record(module: nn.Module, given: Any, output: Any) -> None:
        before.append(given[0])
        after.append(output[0] if isinstance(output, tuple) else output)

    handles = [
        layer.register_forward_hook(record) for layer in tiny.layers_of(original)
    ]
    original(torch.tensor([tiny.TOKENS]), use_cache=False)
    for handle in handles:
        handle.remove()
    return before, after


# Local gain: the largest singular value of ∂h_{l+1,t} / ∂h_{l,t}, the skip included.


def gain(original: Any, layer: int) -> tuple[float, Tensor]:
    """Return σ₁ of one layer at the last token, and its Jacobian, row by row."""
    before, after = states_of(original)
    rows = [
        torch.autograd.grad(entry, before[layer], retain_graph=True)[0][0, LAST]
        for entry in after[layer][0, LAST]
    ]
    J = torch.stack(rows).double()
    return float(torch.linalg.svdvals(J)[0]), J


def power_iteration(trace: tlc.Trace, layer: int, n_steps: int) -> float:
    """Return σ₁ from products with vectors, as on the page."""
    v = torch.randn(trace.d_model, generator=torch.Generator().manual_seed(0))
    for _ in range(n_steps):
        v = v / v.norm()
        u = v + tlc.block_jvp(trace, layer, v)
        v = u + tlc.block_vjp(trace, layer, u)
    return float(v.norm().sqrt())


def test_local_gain(original: Any, trace: tlc.Trace) -> None:
    identity = torch.eye(trace.d_model)
    for layer in range(trace.n_layers):
        expected, J_expected = gain(original, layer)
        J = tlc.block_jacobian(trace, layer)
        assert relative_error(identity + J, J_expected) < 2e-6
        ours = float(tlc.spectra.singular_values(identity + J)[0])
        assert abs(ours / expected - 1) < 2e-6
        # It is not σ₁ of what the block adds.
        assert abs(float(tlc.spectra.singular_values(J)[0]) / expected - 1) > 1e-3


def test_local_gain_from_products_with_vectors(original: Any, trace: tlc.Trace) -> None:
    expected, _ = gain(original, 0)
    assert abs(power_iteration(trace, 0, 25) / expected - 1) < 1e-4


def test_sensitivity_per_squared_displacement(original: Any, trace: tlc.Trace) -> None:
    """Equation 1 of Porter et al.: `½ σ₁² uᵀ Bᵀ F B u`, B from the layer to the logits."""
    layer, scale = 0, 0.1
    _, J = gain(original, layer)
    U, S, Vh = torch.linalg.svd(J)
    after: list[Tensor] = []
    handle = tiny.layers_of(original)[layer].register_forward_hook(
        lambda module, given, output: after.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    logits = original(torch.tensor([tiny.TOKENS]), use_cache=False).logits[0, LAST]
    handle.remove()
    rows = [
        torch.autograd.grad(entry, after[0], retain_graph=True)[0][0, LAST]
        for entry in logits
    ]
    B = torch.stack(rows).double()
    p = logits.detach().double().softmax(-1)
    F = p.diag() - torch.outer(p, p)
    Bu = B @ U[:, 0]
    expected = 0.5 * S[0].square() * (Bu @ F @ Bu)

    v = tlc.directions.Directions.of(Vh[:1].float(), layer, side="read")
    prompt = " ".join(f"w{token}" for token in tiny.TOKENS)
    steered = tlc.directions.steer(trace.model, prompt, v, [scale], n_draws=1)
    displacement = scale * trace.residual[layer, LAST].norm()
    ours = steered.predicted_kl[0, 0, 0] / displacement.square()
    assert abs(float(ours / expected) - 1) < 1e-4


# Block influence and angular distance: of the stream before and after blocks.


def test_block_influence_and_angular_distance(original: Any, trace: tlc.Trace) -> None:
    for layer, (before, after) in enumerate(zip(*states_of(original), strict=True)):
        rows = zip(before[0].detach().double(), after[0].detach().double(), strict=True)
        cosines = [float(x @ y / (x.norm() * y.norm())) for x, y in rows]
        influence = 1 - sum(cosines) / len(cosines)
        angle = math.acos(cosines[LAST]) / math.pi
        cosine = functional.cosine_similarity(
            trace.residual[layer], trace.residual[layer + 1], dim=-1
        )
        assert abs(float(1 - cosine.mean()) - influence) < 1e-6
        assert abs(float(cosine[-1].arccos() / torch.pi) - angle) < 1e-6


def test_block_influence_of_the_study_of_redundancy(
    original: Any, trace: tlc.Trace
) -> None:
    # The same tokens, as words of the tokenizer.
    prompt = " ".join(f"w{token}" for token in tiny.TOKENS)
    data = tlc.redundancy.layer_redundancy(trace.model, [prompt], k=(4,))
    influences = data["block_influence"].values[0]
    for influence, before, after in zip(influences, *states_of(original), strict=True):
        products = (before * after).sum(-1)
        cosines = products / (before.norm(dim=-1) * after.norm(dim=-1))
        assert abs(influence - float(1 - cosines.mean())) < 1e-6


# Detached Jacobian: the whole model's, with norms, attention patterns and gates held.


def detached_jacobian(
    original: Any, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Return the embeddings, and the derivative by them of what leaves the last layer
    at the last token, where the modules of a Llama hold their coefficients.
    """
    original.set_attn_implementation("eager")
    softmax = functional.softmax
    outputs: list[Tensor] = []

    def norm_of(module: Any, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True) + module.variance_epsilon
        return module.weight * (x * torch.rsqrt(variance).detach())

    for module in original.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(norm_of, module)
        elif type(module).__name__ == "LlamaMLP":
            module.act_fn.forward = lambda gate: functional.silu(gate).detach()
    tiny.layers_of(original)[-1].register_forward_hook(
        lambda module, given, output: outputs.append(output)
    )
    embeddings = original.get_input_embeddings()(torch.tensor([tokens])).detach()
    embeddings.requires_grad_()
    with monkeypatch.context() as patch:
        patch.setattr(
            functional,
            "softmax",
            lambda *given, **options: softmax(*given, **options).detach(),
        )
        original(inputs_embeds=embeddings, use_cache=False)
    (output,) = outputs
    state = (output[0] if isinstance(output, tuple) else output)[0, -1]
    rows = [
        torch.autograd.grad(entry, embeddings, retain_graph=True)[0][0]
        for entry in state
    ]
    return embeddings.detach()[0], torch.stack(rows)


def test_detached_jacobian_of_the_whole_model(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made of frozen Jacobians between all tokens, layer after layer."""
    tokens = tiny.TOKENS[:3]
    original = tiny.huggingface_model("llama")
    trace = tlc.trace(tiny.bridge(original, tokenizer_folder), tokens)
    n_pos, d = trace.n_pos, trace.d_model
    total = torch.eye(n_pos * d)
    for layer in range(trace.n_layers):
        # `[output token, output entry, input token, input entry]`
        step = torch.eye(n_pos * d).reshape(n_pos, d, n_pos, d)
        for output, given in product(range(n_pos), repeat=2):
            if given > output:
                continue
            step[output, :, given] += tlc.dynamics.frozen_jacobian(
                trace, layer, input_position=given, output_position=output
            )
        total = step.reshape(n_pos * d, n_pos * d) @ total
    ours = total.reshape(n_pos, d, n_pos, d)[-1]

    embeddings, theirs = detached_jacobian(original, tokens, monkeypatch)
    assert relative_error(ours, theirs) < 5e-6
    whole = tlc.dynamics.model_jacobian(trace, function="frozen")
    assert relative_error(whole.movedim(0, 1), theirs) < 5e-6
    # It makes what leaves the last block, which the Jacobian itself does not.
    made = torch.einsum("dte,te->d", ours, embeddings)
    assert relative_error(made, trace.residual[-1, -1]) < 5e-6
    J = tlc.block_jacobian(trace, 1)
    assert relative_error(J, tlc.dynamics.frozen_jacobian(trace, 1)) > 1e-2
