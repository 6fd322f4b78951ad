"""Coupling of every head with every head: numpy's decompositions, and made-up heads."""

import dataclasses

import numpy as np
import pytest
import torch

import tl_coupling as tlc
from tl_coupling.comparisons import HeadCoupling, head_coupling


def coupling_by_numpy(
    J_1: np.ndarray, J_2: np.ndarray, k: int, orientation: str
) -> float:
    U, _, Vh = np.linalg.svd(J_2)
    left, right = U[:, :k], Vh[:k].T
    if orientation == "vju":
        left, right = right, left
    A = left.T @ J_1 @ right
    return 1 - np.linalg.norm(A - np.diag(np.diag(A))) / np.linalg.norm(A)


@pytest.mark.parametrize("orientation", ["ujv", "vju"])
def test_every_pair_is_that_of_the_heads_own_singular_vectors(tiny_trace, orientation):
    result = head_coupling(tiny_trace, k=3, orientation=orientation, position=2)
    parts = [
        tlc.block_parts(tiny_trace, layer, 2, function="branches") for layer in range(2)
    ]
    J = {
        label: part[label].double().numpy()
        for part in parts
        for label in part.labels
        if "H" in label
    }
    assert tuple(J) == result.labels
    assert result.layers == (0,) * 4 + (1,) * 4
    for row, J_1 in enumerate(J.values()):
        for col, J_2 in enumerate(J.values()):
            expected = coupling_by_numpy(J_1, J_2, 3, orientation)
            assert float(result.coupling[row, col]) == pytest.approx(expected, abs=1e-4)


def test_random_axes_give_the_null_and_a_head_itself_gives_1(tiny_trace):
    result = head_coupling(tiny_trace, k=4)
    assert result.coupling.diagonal().tolist() == pytest.approx([1] * 8, abs=1e-3)
    assert result.null == pytest.approx(1 - (1 - 1 / 4) ** 0.5)
    of_draws = [
        head_coupling(tiny_trace, k=4, seed=seed).null_coupling for seed in range(12)
    ]
    miscoupling = 1 - torch.stack(of_draws)
    mean_square = float(miscoupling.square().mean())
    assert 1 - mean_square**0.5 == pytest.approx(result.null, abs=0.02)


def made_up(coupling: torch.Tensor, null: torch.Tensor) -> HeadCoupling:
    return HeadCoupling(
        coupling=coupling,
        null_coupling=null,
        labels=("L0H0", "L0H1", "L5H0", "L5H1"),
        layers=(0, 0, 5, 5),
        position=1,
        k=2,
        orientation="ujv",
        provenance={"model": "made up"},
    )


def test_pairs_of_one_layer_do_not_count(tmp_path):
    coupling = torch.full((4, 4), 0.9)
    coupling[:2, 2:] = torch.tensor([[0.1, 0.2], [0.3, 0.8]])
    coupling[2:, :2] = torch.tensor([[0.5, 0.1], [0.1, 0.1]])
    result = made_up(coupling, torch.tensor([[0.2, 0.45]] * 4))
    assert result.largest_of_null == pytest.approx(0.45)
    assert result.share_above_null == pytest.approx(2 / 8)
    assert [(a, b) for a, b, _ in result.strongest(2)] == [
        ("L0H1", "L5H1"),
        ("L5H0", "L0H0"),
    ]
    assert len(result.strongest(100)) == 8
    by_layer = result.by_layer()
    assert by_layer.diagonal().isnan().all()
    assert by_layer[0, 1] == pytest.approx(0.8)
    assert by_layer[1, 0] == pytest.approx(0.5)
    table = result.to_dataframe()
    assert len(table) == 8
    assert table["coupling"].max() == pytest.approx(0.8)
    assert HeadCoupling.load(result.save(tmp_path / "h.nc")).labels == result.labels
    assert "25.0% of pairs" in repr(result)


def test_a_head_that_adds_nothing_is_undefined_and_not_counted():
    coupling = torch.full((4, 4), 0.2)
    coupling[3] = torch.nan
    result = made_up(coupling, torch.full((4, 3), 0.3))
    assert all(pair.coupling > 0 for pair in result.strongest(8))
    assert result.share_above_null == 0


def test_above_a_null_that_is_not_known_it_is_not_known_what_lies():
    """Zero stood for it: every pair lay above."""
    null = torch.full((4, 3), 0.3)
    null[3] = torch.nan
    coupling = torch.full((4, 4), 0.4)
    assert made_up(coupling, null).share_above_null == 1
    unknown = made_up(coupling, torch.full((4, 3), torch.nan))
    assert np.isnan(unknown.largest_of_null)
    assert np.isnan(unknown.share_above_null)


def test_more_vectors_than_a_head_has_are_refused(tiny_trace):
    with pytest.raises(ValueError, match="at most the rank of a head, 8, got 9"):
        head_coupling(tiny_trace, k=9)


def test_a_head_of_low_rank_has_no_axes_and_is_named(tiny_trace, monkeypatch):
    """As one that hardly looks at the token itself."""
    whole = tlc.block_parts(tiny_trace, 1, function="branches")
    U, S, Vh = torch.linalg.svd(whole.matrices[2])
    matrices = whole.matrices.clone()
    matrices[2] = U[:, :2] * S[:2] @ Vh[:2]
    of_low_rank = dataclasses.replace(whole, matrices=matrices)

    def block_parts(trace, layer, *options, **more):
        if layer == 1:
            return of_low_rank
        return tlc.block_parts(trace, layer, *options, **more)

    monkeypatch.setattr("tl_coupling.comparisons.heads.block_parts", block_parts)
    with pytest.warns(UserWarning, match="1 of 8 heads .*L1H2 has 2") as warned:
        result = head_coupling(tiny_trace, k=4)
    assert warned[0].filename == __file__
    assert result.coupling[:, 6].isnan().all()
    assert result.coupling[6, :6].isfinite().all()
    assert all(pair.vectors_of != "L1H2" for pair in result.strongest(100))
    assert 0 <= result.share_above_null <= 1


def test_the_picture_has_the_largest_of_each_pair_of_layers_and_all_shares():
    generator = torch.Generator().manual_seed(0)
    first, second = (
        made_up(
            torch.rand(4, 4, generator=generator), torch.rand(4, 4, generator=generator)
        )
        for _ in range(2)
    )
    fig = tlc.plots.plot_head_coupling({"trained": first, "untrained": second})
    left, right, shares, _ = fig.axes
    for ax, result in ((left, first), (right, second)):
        np.testing.assert_allclose(ax.images[0].get_array(), result.by_layer())
    assert left.images[0].get_clim() == right.images[0].get_clim()
    lines = {line.get_label(): line for line in shares.lines}
    x, y = lines["trained"].get_data()
    values = first.of_different_layers
    for value, share in zip(x, y, strict=True):
        assert share == pytest.approx(float((values >= value).double().mean()))
    assert len(lines["random axes"].get_xdata()) == 16
    (text,) = shares.texts
    assert f"{first.strongest(1)[0].coupling:.2f}" in text.get_text()
    one_layer = dataclasses.replace(first, layers=(0, 0, 0, 0))
    with pytest.raises(ValueError, match="need two layers"):
        tlc.plots.plot_head_coupling(one_layer)
