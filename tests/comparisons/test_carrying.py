"""What components carry of coupling: against a loop over matrices, in closed form, in
random frames, and of every architecture.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
import tl_coupling as tlc
from tl_coupling.comparisons import Carriers

SHARES = ("diagonal_share", "energy_share", "jacobian_share")
# Their layer 0 is not attention, their layer 1 is.
HYBRIDS = {
    "granitemoehybrid",
    "jamba",
    "lfm2",
    "olmo_hybrid",
    "recurrent_gemma",
}
WITHOUT_ATTENTION = {"mamba", "rwkv"}


@pytest.fixture(scope="module")
def result(tiny_trace: tlc.Trace) -> Carriers:
    return tlc.carriers(tiny_trace, k=4, position=-2, n_draws=3)


def inner(a: Tensor, b: Tensor) -> float:
    return sum(
        float(x) * float(y) for x, y in zip(a.flatten(), b.flatten(), strict=True)
    )


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
def test_shares_are_those_of_a_loop_over_matrices(
    orientation: str, tiny_trace: tlc.Trace
) -> None:
    k = 3
    result = tlc.carriers(tiny_trace, k, orientation=orientation, n_draws=2)
    for row in range(2):
        parts = tlc.block_parts(tiny_trace, row)
        J = tlc.block_jacobian(tiny_trace, row)
        for col in range(2):
            U, _, Vh = torch.linalg.svd(tlc.block_jacobian(tiny_trace, col))
            left, right = U[:, :k].mT, Vh[:k].mT
            if orientation == "vju":
                left, right = right.mT, left.mT
            A = left @ J @ right
            for place, J_c in enumerate(parts.matrices):
                A_c = left @ J_c @ right
                diagonal = inner(A_c.diagonal(), A.diagonal())
                expected = (
                    diagonal / inner(A.diagonal(), A.diagonal()),
                    inner(A_c, A) / inner(A, A),
                    inner(J_c, J) / inner(J, J),
                )
                for name, value in zip(SHARES, expected, strict=True):
                    share = float(getattr(result, name)[row, col, place])
                    assert share == pytest.approx(value, abs=2e-4), name
    assert result.labels == ("H0", "H1", "H2", "H3", "mlp_out", "mlp∘attn")


def test_own_vectors_make_a_diagonal(result: Carriers) -> None:
    """Of a layer in its own singular vectors, A is diagonal: both shares are one."""
    for layer in range(2):
        diagonal = result.diagonal_share[layer, layer]
        assert torch.allclose(diagonal, result.energy_share[layer, layer], atol=1e-5)
        assert (
            float((diagonal - result.jacobian_share[layer, layer]).abs().max()) > 1e-3
        )


@pytest.mark.parametrize("architecture", tiny.in_tiers(tiny.CONFIGS))
def test_components_sum_to_the_jacobian_and_shares_to_one(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = tiny.huggingface_model(architecture)
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    if architecture in WITHOUT_ATTENTION | HYBRIDS:
        with pytest.raises(
            ValueError, match=r"layer 0: .*no attention and MLP that can"
        ):
            tlc.block_parts(trace, 0)
    if architecture in WITHOUT_ATTENTION:
        return
    parts = tlc.block_parts(trace, 1, function="branches")
    J = tlc.block_jacobian(trace, 1, function="branches")
    assert float((parts.matrices.sum(0) - J).norm()) < 1e-5 * float(J.norm())
    # Whatever module attention is in, TransformerLens knowing it or not.
    assert "1_attn_out" not in parts.labels
    assert "L1H3" in parts.labels
    layers = [1] if architecture in HYBRIDS else [0, 1]
    result = tlc.carriers(trace, k=4, layers=layers, n_draws=2)
    for name in SHARES:
        sums = getattr(result, name).sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5), name


def test_random_vectors_give_the_share_of_the_jacobian(tiny_trace: tlc.Trace) -> None:
    result = tlc.carriers(tiny_trace, k=10, n_draws=400)
    excess = result.null_share - result.jacobian_share[:, :1]
    standard_error = excess.std(1) / 400**0.5
    # A is not quite Gaussian in 32 dimensions.
    assert bool((excess.mean(1).abs() < 4 * standard_error + 2e-3).all())
    low, high = result.null_interval("H1")
    assert -0.2 < low < 0 < high < 0.2
    again = tlc.carriers(tiny_trace, k=10, n_draws=400)
    assert again.null_share.equal(result.null_share)
    other = tlc.carriers(tiny_trace, k=10, n_draws=400, seed=1)
    assert not other.null_share.equal(result.null_share)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("n_layers", [2, 4])
def test_the_interval_of_the_null_holds_means_in_random_vectors(
    k: int, n_layers: int
) -> None:
    """Of random components, drawn anew by numpy: every column has its own vectors, and
    no row meets those of its own layer.
    """
    rng = np.random.default_rng(10 * k + n_layers)
    d = 12
    components = rng.standard_normal((n_layers, 2, d, d))
    components[:, 1] *= 0.5

    def shares(n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the excess of both in n frames, the same for all rows, and that of J."""
        Q, R = np.linalg.qr(rng.standard_normal((2, n, d, k)))
        U, V = Q * np.sign(np.diagonal(R, axis1=-2, axis2=-1))[..., None, :]
        parts = np.einsum("nak, lcab, nbk -> lnck", U, components, V, optimize=True)
        whole = parts.sum(2)
        share = np.einsum("lnck, lnk -> lnc", parts, whole)
        J = components.sum(1)
        of_J = np.einsum("lcab, lab -> lc", components, J)
        of_J /= (J * J).sum((-2, -1))[:, None]
        return share / (whole * whole).sum(-1)[..., None], of_J

    n_means = 400
    excess, of_J = shares(n_layers * n_means)
    excess = (excess - of_J[:, None]).reshape(n_layers, n_layers, n_means, 2)
    is_different = ~np.eye(n_layers, dtype=bool)
    means = excess[is_different].mean(0)[:, 0]
    layers = tuple(range(n_layers))
    inside = []
    for _ in range(4):
        null_share, _ = shares(max(200, 2000 // k))
        pairs = torch.from_numpy(of_J)[:, None].expand(-1, n_layers, -1)
        result = Carriers(
            diagonal_share=pairs,
            energy_share=pairs,
            jacobian_share=pairs,
            null_share=torch.from_numpy(null_share),
            labels=("attn_out", "mlp_out"),
            row_layers=layers,
            col_layers=layers,
            position=0,
            k=k,
            orientation="ujv",
            provenance={},
        )
        low, high = result.null_interval("attn_out")
        inside.append(np.mean((low < means) & (means < high)))
    assert np.mean(inside) > 0.93, inside


def test_small_matrices_are_drawn_more_often(tiny_trace: tlc.Trace) -> None:
    """Shares of few entries vary more."""
    n_draws = [tlc.carriers(tiny_trace, k).null_share.shape[1] for k in (1, 10)]
    assert n_draws == [2000, 200]


def test_means_are_over_other_layers(result: Carriers) -> None:
    excess = result.diagonal_share - result.jacobian_share
    assert torch.allclose(result.mean(), (excess[0, 1] + excess[1, 0]) / 2)
    assert torch.allclose(result.by_layer(), torch.stack([excess[0, 1], excess[1, 0]]))
    assert torch.allclose(result.mean().sum(), torch.tensor(0.0), atol=1e-5)
    table = result.to_dataframe()
    row = table[(table["layer"] == 1) & (table["component"] == "mlp_out")]
    assert float(row["excess"].iloc[0]) == pytest.approx(float(excess[1, 0, 4]))


def test_heads_are_merged_to_attention(result: Carriers) -> None:
    merged = result.by_branch()
    assert merged.labels == ("attn_out", "mlp_out", "mlp∘attn")
    for name in (*SHARES, "null_share"):
        shares = getattr(result, name)
        of_attention = shares[..., :4].sum(-1)
        assert torch.allclose(getattr(merged, name)[..., 0], of_attention)
        assert getattr(merged, name)[..., 1:].equal(shares[..., 4:])
    assert merged.by_branch().labels == merged.labels


def test_result_is_saved(result: Carriers, tmp_path: Path) -> None:
    loaded = Carriers.load(result.save(tmp_path / "carriers.nc"))
    assert (loaded.labels, loaded.row_layers) == (result.labels, (0, 1))
    assert (loaded.k, loaded.position) == (4, 6)
    for name in (*SHARES, "null_share"):
        assert getattr(loaded, name).equal(getattr(result, name))
    assert loaded.provenance == result.provenance
    assert "mlp_out" in repr(loaded)


def test_what_cannot_be_asked_is_refused(
    result: Carriers, tiny_trace: tlc.Trace
) -> None:
    with pytest.raises(ValueError, match="one of H0, H1"):
        result.null_interval("H7")
    alone = tlc.carriers(tiny_trace, k=2, layers=[1], n_draws=1)
    with pytest.raises(ValueError, match="two layers"):
        alone.mean()
    with pytest.raises(ValueError, match="two draws"):
        alone.null_interval("H1")
    assert "layer" in repr(alone)
    with pytest.raises(ValueError, match="must name"):
        Carriers(**{**vars(result), "labels": ("H0",)})
