"""Singular triplets from products alone: against the SVD of oracle Jacobians, on wide
blocks, hard spectra, and blocks without products.
"""

import signal
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
import tl_coupling as tlc
from tl_coupling.jacobians.matrix_free import WAY, _estimated_norm, matrix_free
from tl_coupling.spectra import (
    Products,
    Spectrum,
    products_of_triplets,
    triplets_of_products,
)

D = 128
K = 4
# Names of what is as wide as the stream, and of the MLP.
_WIDE = {"hidden_size": D, "intermediate_size": 2 * D}
WIDE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": D},
    "gptj": {"n_embd": D},
    "opt": {"hidden_size": D, "ffn_dim": 2 * D, "word_embed_proj_dim": D},
    "bloom": {"hidden_size": D},
    **dict.fromkeys(
        ["llama", "mistral", "gemma2", "qwen3", "phi", "olmo2", "gpt_neox"], _WIDE
    ),
}


@pytest.fixture(scope="module")
def wide_trace(tokenizer_folder):
    model = tiny.huggingface_model("llama", **WIDE["llama"])
    return tlc.trace(tiny.bridge(model, tokenizer_folder), tiny.TOKENS)


@pytest.mark.parametrize("architecture", WIDE)
def test_triplets_are_those_of_the_oracles_jacobian(architecture, tokenizer_folder):
    """On eleven architectures: σ to 1e-5 of σ₁, coupling of two blocks to 1e-4."""
    model = tiny.huggingface_model(architecture, **WIDE[architecture])
    trace = tlc.trace(tiny.bridge(model, tokenizer_folder), tiny.TOKENS)
    t = len(tiny.TOKENS) - 1
    J = torch.stack(
        [
            tiny.oracle_jacobian(model, tiny.TOKENS, layer, t, t)
            for layer in range(tiny.N_LAYERS)
        ]
    ).double()
    exact = torch.linalg.svd(J)
    spectra = [tlc.block_spectrum(trace, layer, K) for layer in range(tiny.N_LAYERS)]
    for found, S in zip(spectra, exact.S, strict=True):
        assert (found.S - S[:K]).abs().max() <= 1e-5 * S[0]
        assert WAY in found.method
        assert found.residuals.max() <= 1e-5
    A = spectra[1].U.mT.double() @ J[0] @ spectra[1].Vh.mT.double()
    expected = tlc.comparisons.jacobian_coupling(J, K).coupling()[0, 1]
    found_coupling = 1 - tlc.normalized_miscoupling(A)
    assert float(found_coupling) == pytest.approx(float(expected), abs=1e-4)


def products_of(J: Tensor) -> Products:
    return Products(
        lambda V: J @ V, lambda U: J.mT @ U, tuple(J.shape), J.dtype, J.device
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["fast decay", "slow decay", "repeated", "low rank", "far from normal"]
)
def test_hard_spectra_are_found_or_refused(name, dtype):
    """No triplet is wrong: either residuals and values are right, or there is none."""
    S = {
        "fast decay": torch.logspace(0, -6, 200),
        "slow decay": torch.linspace(2, 1, 200),
        "repeated": torch.cat([torch.full((6,), 3.0), torch.linspace(1, 0.1, 194)]),
        "low rank": torch.cat([torch.linspace(3, 2, 12), torch.zeros(188)]),
        "far from normal": torch.logspace(2, -1, 200),
    }[name].double()
    generator = torch.Generator().manual_seed(0)
    U, V = tlc.measures.random_rotations(2, 200, generator=generator)
    J = (U * S @ V.mT).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    found = triplets_of_products(products_of(J), K, tolerance)
    if name == "slow decay" and found is None:
        # Flat: no small space holds its top.
        return
    assert found is not None
    assert (found.S - S[:K]).abs().max() <= tolerance * S[0]
    right = J.double() @ found.V - found.U * found.S
    left = J.double().mT @ found.U - found.V * found.S
    for residual in (right, left):
        assert residual.norm(dim=0).max() <= 1.2 * tolerance * S[0]


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 64},
}


@pytest.mark.parametrize("architecture", [*WIDE, *EXPERTS])
def test_maps_by_products_are_those_of_the_oracles_jacobians(
    architecture, tokenizer_folder
):
    """σ to 1e-5 of σ₁, coupling to 1e-4, both orientations, experts as well."""
    model = tiny.huggingface_model(architecture, **(WIDE | EXPERTS)[architecture])
    trace = tlc.trace(tiny.bridge(model, tokenizer_folder), tiny.TOKENS)
    t = len(tiny.TOKENS) - 1
    J = torch.stack(
        [
            tiny.oracle_jacobian(model, tiny.TOKENS, layer, t, t)
            for layer in range(tiny.N_LAYERS)
        ]
    ).double()
    S = torch.linalg.svdvals(J)
    for orientation in ("ujv", "vju"):
        expected = tlc.comparisons.jacobian_coupling(J, K, orientation=orientation)
        found = tlc.depth_coupling(
            trace, K, orientation=orientation, method="products", chunk_size=5
        )
        assert (found.singular_values - S[:, :K]).abs().max() <= 1e-5 * S.max()
        difference = found.coupling() - expected.coupling()
        assert difference.abs().max() <= 1e-4
        assert WAY in found.provenance["svd"]
        norms = torch.linalg.matrix_norm(J)
        torch.testing.assert_close(
            found.frobenius_norms.double(), norms, rtol=0.1, atol=0
        )


def test_rows_and_columns_of_their_own_are_the_same_map(wide_trace):
    whole = tlc.depth_coupling(wide_trace, K, method="products")
    row = tlc.depth_coupling(wide_trace, K, rows=[1], cols=[0, 1], method="products")
    torch.testing.assert_close(row.coupling(), whole.coupling()[1:])
    torch.testing.assert_close(row.singular_values, whole.singular_values[1:])
    assert row.provenance["paths"] == whole.provenance["paths"]


def test_a_layer_that_is_row_and_column_is_decomposed_once(wide_trace, monkeypatch):
    decomposed = []

    def counted(trace, connection, *args):
        decomposed.append(connection.layer)
        return matrix_free(trace, connection, *args)

    monkeypatch.setattr("tl_coupling.jacobians.decomposed.matrix_free", counted)
    tlc.depth_coupling(wide_trace, K, rows=[1], cols=[1, 0], method="products")
    assert sorted(decomposed) == [0, 1]


def test_several_tokens_and_a_mean_take_products_too(wide_trace):
    positions = [3, -1]
    found = tlc.depth_coupling(wide_trace, K, position=positions, method="products")
    exact = tlc.depth_coupling(wide_trace, K, position=positions)
    torch.testing.assert_close(found.coupling(), exact.coupling(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("position", [-1, [2, 4]])
def test_means_over_prompts_take_products_too(wide_trace, position):
    traces = [wide_trace, tlc.trace(wide_trace.model, wide_trace.tokens.flip(0))]
    found, exact = (
        tlc.mean_depth_coupling(traces, K, position, method=method)
        for method in ("products", "jacobians")
    )
    assert found.provenance["method"] == "products"
    assert "method" not in exact.provenance
    for of_pairs in ("coupling", "spread"):
        difference = getattr(found, of_pairs)() - getattr(exact, of_pairs)()
        assert difference.abs().max() <= 1e-4


def test_both_orientations_are_of_the_same_triplets(wide_trace, monkeypatch):
    decomposed = []

    def counted(*args):
        decomposed.append(args)
        return matrix_free(*args)

    exact = tlc.comparisons.depth_coupling_by_orientation(wide_trace, K)
    monkeypatch.setattr("tl_coupling.jacobians.decomposed.matrix_free", counted)
    found = tlc.comparisons.depth_coupling_by_orientation(
        wide_trace, K, method="products"
    )
    assert len(decomposed) == tiny.N_LAYERS
    for orientation in ("ujv", "vju"):
        difference = found[orientation].coupling() - exact[orientation].coupling()
        assert difference.abs().max() <= 1e-4


def test_a_block_without_products_is_decomposed_in_full(tiny_trace):
    """A narrow one has no room for a Krylov space: J stands in its place."""
    found = tlc.depth_coupling(tiny_trace, tiny.D_MODEL, method="products")
    exact = tlc.depth_coupling(tiny_trace, tiny.D_MODEL)
    torch.testing.assert_close(found.coupling(), exact.coupling())
    assert "full SVD" in found.provenance["svd"]


def test_the_estimated_norm_is_that_of_a_known_matrix():
    """A tail of 192 directions: 64 probes know it to a few per cent."""
    generator = torch.Generator().manual_seed(1)
    U, V = tlc.measures.random_rotations(2, 200, generator=generator)
    S = torch.cat([torch.linspace(9, 4, 8), torch.linspace(2, 0.5, 192)]).double()
    J = products_of(U * S @ V.mT)
    spectrum = Spectrum(U[:, :8], S[:8], V[:, :8].mT)
    assert float(_estimated_norm(J, spectrum)) == pytest.approx(
        float(S.norm()), rel=0.03
    )


def test_auto_takes_what_the_plan_says(wide_trace, tokenizer_folder):
    """Products of wide experts, with a small k; J where `without` needs it."""
    assert tlc.plan(wide_trace, K).cheaper == "jacobians"
    sizes = {"hidden_size": 1536, "intermediate_size": 16}
    experts = tiny.bridge(tiny.huggingface_model("mixtral", **sizes), tokenizer_folder)
    trace = tlc.trace(experts, tiny.TOKENS)
    plan = tlc.plan(trace, 1)
    assert plan.cheaper == "products"
    by_products = tlc.plan(trace, 1, method="products")
    assert by_products.jacobians == 0
    assert sum(by_products.flops.values()) < sum(plan.flops.values())
    found = tlc.depth_coupling(trace, 1, method="auto")
    assert WAY in found.provenance["svd"]
    other = tlc.trace(experts, tiny.TOKENS[:4])
    mean = tlc.mean_depth_coupling([trace, other], 1, method="auto")
    assert mean.provenance["method"] == "products"
    found = tlc.depth_coupling(wide_trace, K, method="auto")
    assert WAY not in found.provenance["svd"]
    changed = tlc.depth_coupling(wide_trace, K, without="identity", method="auto")
    assert WAY not in changed.provenance["svd"]
    for measure in (
        tlc.depth_coupling,
        tlc.comparisons.depth_coupling_by_orientation,
        lambda trace, k, **options: tlc.mean_depth_coupling([trace], k, **options),
    ):
        with pytest.raises(ValueError, match="need the Jacobians"):
            measure(wide_trace, K, without="identity", method="products")


@pytest.mark.parametrize("chosen", [{}, {"rows": [0]}, {"position": [3, -1]}])
def test_a_limit_of_memory_holds_for_products_too(wide_trace, chosen):
    """As the plan says; within it fewer vectors go through a block at a time."""
    by_products = {"method": "products", **chosen}
    with pytest.raises(ValueError, match="`max_memory` must be at least"):
        tlc.depth_coupling(wide_trace, K, max_memory="1KB", **by_products)
    least = tlc.plan(wide_trace, K, method="products").peak
    limited = tlc.depth_coupling(wide_trace, K, max_memory=least, **by_products)
    free = tlc.depth_coupling(wide_trace, K, **by_products)
    torch.testing.assert_close(limited.coupling(), free.coupling(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4, 10, 50])
def test_the_cost_is_the_one_that_is_stated(k):
    """Of the docstring of `depth_coupling`, for the k + 1 triplets that it takes."""
    stated = 20 * (k + min(9, k + 3))
    assert products_of_triplets(k + 1) == pytest.approx(stated, rel=0.05)


def test_the_default_k_is_said_once(tiny_trace):
    with pytest.warns(UserWarning, match="is used in place of the default") as said:
        tlc.depth_coupling(tiny_trace, method="auto")
    assert sum("in place of the default" in str(one.message) for one in said) == 1


def test_blocks_without_parameters_have_a_plan():
    class Sine(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.sin(x)

    blocks = torch.nn.Sequential(Sine(), Sine())
    x = torch.rand(1, 3, 8)
    trace = tlc.trace_modules(blocks, lambda: blocks(x))
    assert tlc.plan(trace, 2).weights == 0
    found = tlc.depth_coupling(trace, 2, method="auto")
    torch.testing.assert_close(
        found.coupling(), tlc.depth_coupling(trace, 2).coupling()
    )


def test_what_the_iteration_does_not_reach_is_decomposed_in_full(tiny_trace):
    """A narrow block has no room for a Krylov space; the result is that of `svd`."""
    found = tlc.block_spectrum(tiny_trace, 0, K, position=3)
    exact = tlc.svd(tlc.block_jacobian(tiny_trace, 0, position=3), K)
    torch.testing.assert_close(found.S, exact.S)
    assert "full SVD" in found.method


def test_a_block_that_has_no_second_derivative_is_decomposed_in_full(tokenizer_folder):
    """Forward mode and a second backward pass both fail in a custom Function."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    model = tiny.huggingface_model("llama", **WIDE["llama"])
    for layer in tiny.layers_of(model):
        layer.mlp.register_forward_hook(lambda _, args, output: Once.apply(output))
    blocks = tiny.layers_of(model)
    ids = torch.tensor([tiny.TOKENS])
    trace = tlc.trace_modules(blocks, lambda: model(ids))
    found = tlc.block_spectrum(trace, 1, 2)
    exact = torch.linalg.svdvals(tlc.block_jacobian(trace, 1))
    torch.testing.assert_close(found.S, exact[:2])


def test_an_interrupt_takes_effect_between_products():
    """Of a large block they take minutes: it does not wait for the triplets."""

    class Counting(torch.nn.Linear):
        calls, interrupted_at = 0, -1

        def forward(self, x: Tensor) -> Tensor:
            # Of the class: a module's own attributes are left as they were found.
            Counting.calls += 1
            if self.calls == self.interrupted_at:
                signal.raise_signal(signal.SIGINT)
            return x + torch.tanh(super().forward(x))

    width = 256
    block = Counting(width, width)
    block.weight.data *= torch.logspace(0, -2, width)
    x = torch.randn(1, 3, width)

    def triplets() -> None:
        trace = tlc.trace_modules([block], lambda: block(x))
        assert WAY in tlc.block_spectrum(trace, 0, 16).method

    triplets()
    # The last but two: what comes before the products is over by then.
    block.interrupted_at = 2 * block.calls - 2
    with pytest.raises(KeyboardInterrupt):
        triplets()
    assert block.calls == block.interrupted_at


def test_bad_input_is_refused(tiny_trace):
    with pytest.raises(ValueError, match="k"):
        tlc.block_spectrum(tiny_trace, 0, tiny.D_MODEL + 1)
    with pytest.raises(ValueError, match="layer"):
        tlc.block_spectrum(tiny_trace, 7)
