"""Residual alignment: networks that have its four properties exactly, or all but one;
random ones; numpy's loops.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tl_coupling as tlc
from linear_blocks import D, L, affine_trace
from random_matrices import gaussian
from tl_coupling.blocks import Trace
from tl_coupling.measures import alignment_matrices, subspace_overlap, vector_alignment
from tl_coupling.spectra import Spectrum, tail_energy
from tl_coupling.trajectories import ResidualAlignment, residual_alignment

MEASURES = ("vector_alignment", "subspace_overlap")
RANK = 3
START = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


def orthogonal(d: int = D, *batch: int, seed: int = 3) -> Tensor:
    Q, R = torch.linalg.qr(gaussian(*batch, d, d, seed=seed))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def gains(start: Tensor = START, n_layers: int = L, d: int = D) -> Tensor:
    """`σ_i = 1 / (c_i + l)` at layer l, and zeros beyond."""
    S = torch.zeros(n_layers, d, dtype=torch.float64)
    S[:, : len(start)] = 1 / (start + torch.arange(n_layers)[:, None])
    return S


def network(U: Tensor, S: Tensor, V: Tensor, x: Tensor | None = None) -> Trace:
    """A linear residual network whose block l is `U_l S_l V_lᵀ`; one U or V is that of
    all layers.
    """
    return affine_trace((U * S[:, None]) @ V.mT, x=x)


# Networks whose measures are known


def test_a_network_with_all_four_properties_has_them_exactly():
    U = orthogonal()
    result = residual_alignment(network(U, gains(), U), n_classes=RANK)
    assert result.k == RANK
    assert result.line_shape_score == pytest.approx(1, abs=1e-12)
    assert result.equidistance == pytest.approx(0, abs=1e-12)
    for measure in MEASURES:
        torch.testing.assert_close(
            result.within_blocks(measure), torch.ones(L, dtype=torch.float64)
        )
        torch.testing.assert_close(
            result.across_blocks(measure), torch.ones(L, L, dtype=torch.float64)
        )
    assert result.tail_energy.max() < 1e-20
    torch.testing.assert_close(
        result.inverse_fit.slope, torch.ones(RANK, dtype=torch.float64)
    )
    torch.testing.assert_close(result.inverse_fit.intercept, START)
    torch.testing.assert_close(
        result.inverse_fit.r_squared, torch.ones(RANK, dtype=torch.float64)
    )
    ideal = {
        "line_shape_score": 1,
        "equidistance": 0,
        "vector_alignment_within_blocks": 1,
        "vector_alignment_across_blocks": 1,
        "tail_energy": 0,
        "inverse_singular_value_slope": 1,
        "inverse_singular_value_r_squared": 1,
    }
    assert result.summary() == pytest.approx(ideal, abs=1e-9)


def test_shrinking_blocks_are_aligned_with_negative_cosines():
    U = orthogonal()
    for sign in (1, -1):
        result = residual_alignment(network(sign * U, 0.1 * gains(), U), n_classes=RANK)
        torch.testing.assert_close(
            result.within_blocks(), torch.ones(L, dtype=torch.float64)
        )
        of_own = result.uv.diagonal().diagonal()
        torch.testing.assert_close(of_own, torch.full_like(of_own, sign))


@pytest.mark.parametrize("n_layers", [4, 8, 16])
def test_ideal_networks_that_grow_alike_have_gains_of_one_over_their_depth(n_layers):
    U, growth = orthogonal(), 5.0
    start = torch.tensor([n_layers / (growth - 1)], dtype=torch.float64)
    trace = network(U, gains(start, n_layers), U, x=U[None, :, 0])
    result = residual_alignment(trace, n_classes=1)
    torch.testing.assert_close(trace.residual[-1, 0], growth * U[:, 0])
    assert float(result.singular_values[0, 0]) == pytest.approx((growth - 1) / n_layers)
    assert result.equidistance == pytest.approx(0, abs=1e-12)


def test_alignment_within_blocks_alone_and_across_blocks_alone():
    # Left and right vectors in independent halves of the space.
    halves = torch.eye(D, dtype=torch.float64)
    across = residual_alignment(
        network(halves, gains(), halves.roll(RANK, 1)), n_classes=RANK
    )
    assert across.within_blocks("subspace_overlap").max() < 1e-20
    assert across.across_blocks().min() > 1 - 1e-12
    # Layers take turns in the same halves.
    turns = torch.stack([halves.roll(RANK * (layer % 2), 1) for layer in range(L)])
    within = residual_alignment(network(turns, gains(), turns), n_classes=RANK)
    assert within.within_blocks().min() > 1 - 1e-12
    same_half = (torch.arange(L)[:, None] - torch.arange(L)) % 2 == 0
    for measure in MEASURES:
        torch.testing.assert_close(within.across_blocks(measure), same_half.double())
    # Of the 12 pairs of different layers 4 are two apart.
    assert within.summary()["vector_alignment_across_blocks"] == pytest.approx(1 / 3)


def test_left_vectors_that_align_alone_are_half_of_what_aligns_across():
    halves = torch.eye(D, dtype=torch.float64)
    turns = torch.stack([halves.roll(RANK * (layer % 2), 1) for layer in range(L)])
    result = residual_alignment(network(halves, gains(), turns), n_classes=RANK)
    assert float(result.across_blocks()[0, 1]) == pytest.approx(0.5)


def test_the_third_property_alone_is_missing_where_the_rank_exceeds_the_classes():
    U = orthogonal()
    for n_classes in range(1, D + 2):
        result = residual_alignment(network(U, gains(), U), n_classes, k=1)
        energy = gains().square()
        torch.testing.assert_close(
            result.tail_energy, energy[:, n_classes:].sum(1) / energy.sum(1)
        )
        assert result.line_shape_score == pytest.approx(1)


def test_the_fourth_property_alone_is_missing_where_gains_are_the_same_at_all_layers():
    U = orthogonal()
    S = gains()[:1].expand(L, D)
    with pytest.warns(UserWarning, match="R² of 3 is undefined"):
        result = residual_alignment(network(U, S, U), n_classes=RANK).summary()
    assert result["vector_alignment_across_blocks"] == pytest.approx(1)
    assert result["inverse_singular_value_slope"] == pytest.approx(0, abs=1e-12)
    assert np.isnan(result["inverse_singular_value_r_squared"])
    # Steps that grow as (1 + σ)^l, along as many directions.
    assert result["equidistance"] > 0.1


def test_the_measures_are_those_of_the_token():
    U = orthogonal()
    trace = network(
        U, gains(), U, x=torch.stack([U[:, 0], U[:, 1] + U[:, 5], U[:, 0] - U[:, 1]])
    )
    x = trace.residual.clone()
    x[2, 1] += 1
    bent = Trace(**vars(trace) | {"residual": x})
    values = [
        residual_alignment(bent, RANK, position).line_shape_score
        for position in range(-3, 0)
    ]
    assert values == pytest.approx(tlc.line_shape_score(x).tolist())
    assert values[1] > 1.01
    assert residual_alignment(bent, RANK, -2).position == 1


# Matrices of cosines


@pytest.mark.parametrize("sides", ["uv", "uu", "vv"])
@pytest.mark.parametrize("k", [1, 2, D, None])
def test_alignment_matrices_are_the_cosines_one_by_one(sides, k):
    spectra = tlc.svd(gaussian(L, D, D))
    vectors = {"u": spectra.U.mT.numpy(), "v": spectra.Vh.numpy()}
    A = alignment_matrices(spectra, k, sides)
    k = D if k is None else k
    assert A.shape == (L, L, k, k)
    for row, col, i, j in np.ndindex(*A.shape):
        cosine = vectors[sides[0]][row, i] @ vectors[sides[1]][col, j]
        assert float(A[row, col, i, j]) == pytest.approx(cosine, abs=1e-12)
    if sides != "uv":
        torch.testing.assert_close(A[2, 2], torch.eye(k, dtype=A.dtype))


def test_a_coupling_matrix_is_made_of_alignment_matrices():
    J = gaussian(L, D, D)
    spectra = tlc.svd(J)
    left, right = (
        alignment_matrices(spectra, sides="uu"),
        alignment_matrices(spectra, sides="vv"),
    )
    for row, col in ((0, 1), (3, 2)):
        other_spectrum = Spectrum(spectra.U[col], spectra.S[col], spectra.Vh[col])
        A = left[col, row] * spectra.S[row] @ right[row, col]
        torch.testing.assert_close(A, tlc.coupling_matrix(J[row], other_spectrum, D))


def test_measures_of_a_matrix_entry_by_entry():
    A = alignment_matrices(tlc.svd(gaussian(L, D, D)), 4)
    for row, col in np.ndindex(L, L):
        entries = A[row, col].numpy()
        assert float(vector_alignment(A)[row, col]) == pytest.approx(
            sum(entries[i, i] ** 2 for i in range(4)) / 4
        )
        angles = np.linalg.svd(entries, compute_uv=False)
        assert float(subspace_overlap(A)[row, col]) == pytest.approx((angles**2).mean())


seeds = st.integers(0, 2**16)


@settings(max_examples=20)
@given(seed=seeds, k=st.integers(1, D))
def test_measures_do_not_depend_on_signs_basis_or_scale(seed, k):
    J, Q = gaussian(2, D, D, seed=seed), orthogonal(seed=seed + 1)
    spectra = tlc.svd(J)
    signs = gaussian(2, D, seed=seed + 2).sign()
    flipped = Spectrum(
        spectra.U * signs[:, None], spectra.S, spectra.Vh * signs[..., None]
    )
    turned, scaled, transposed = tlc.svd(Q @ J @ Q.mT), tlc.svd(3 * J), tlc.svd(J.mT)
    for measure in (vector_alignment, subspace_overlap):
        values = {
            sides: measure(alignment_matrices(spectra, k, sides))
            for sides in ("uv", "uu", "vv")
        }
        for sides, value in values.items():
            assert value.min() >= 0
            assert value.max() <= 1 + 1e-12
            for variant in (flipped, turned, scaled):
                torch.testing.assert_close(
                    measure(alignment_matrices(variant, k, sides)), value
                )
        torch.testing.assert_close(
            measure(alignment_matrices(transposed, k, "uu")), values["vv"]
        )
        torch.testing.assert_close(
            measure(alignment_matrices(transposed, k, "uv")), values["uv"].mT
        )
    A = alignment_matrices(spectra, k)
    assert (vector_alignment(A) <= subspace_overlap(A) + 1e-12).all()
    torch.testing.assert_close(
        subspace_overlap(alignment_matrices(spectra)), torch.ones(2, 2, dtype=A.dtype)
    )


@settings(max_examples=20)
@given(seed=seeds)
def test_rotations_inside_a_repeated_singular_value_change_vectors_and_not_subspaces(
    seed,
):
    spectra = tlc.svd(gaussian(2, D, D, seed=seed))
    R = orthogonal(3, seed=seed)
    turned = Spectrum(
        spectra.U[..., :3] @ R,
        torch.ones_like(spectra.S[:, :3]),
        R.mT @ spectra.Vh[:, :3],
    )
    A, A_turned = (alignment_matrices(vectors, 3) for vectors in (spectra, turned))
    torch.testing.assert_close(subspace_overlap(A_turned), subspace_overlap(A))
    assert not torch.allclose(
        vector_alignment(A_turned), vector_alignment(A), rtol=1e-3
    )


# What random singular vectors give


@pytest.mark.parametrize("k", [1, 4, D])
def test_null_is_the_mean_over_random_jacobians(k):
    spectra = tlc.svd(gaussian(400, D, D, seed=k), k)
    result = residual_alignment(affine_trace(gaussian(2, D, D)), n_classes=2, k=k)
    for name, measure in (
        ("vector_alignment", vector_alignment),
        ("subspace_overlap", subspace_overlap),
    ):
        within = measure(alignment_matrices(spectra)).diagonal()
        # Pairs that share no matrix are independent.
        across = measure(alignment_matrices(spectra, sides="uu")).diagonal(1)[::2]
        for values in (within, across):
            error = float(values.std()) / len(values) ** 0.5
            assert error < 0.1 * result.null(name)
            assert float(values.mean()) == pytest.approx(
                result.null(name), abs=4 * error + 1e-12
            )


def test_null_is_that_of_transformerlens_projection_kernel():
    analysis = pytest.importorskip("transformer_lens.tools.analysis")
    if not hasattr(analysis, "random_projection_kernel_moments"):
        pytest.skip("this TransformerLens has no random_projection_kernel_moments")
    for k in (1, 3, D):
        result = residual_alignment(affine_trace(gaussian(2, D, D)), n_classes=2, k=k)
        kernel = analysis.random_projection_kernel_moments(D, k)
        assert result.null("subspace_overlap") == pytest.approx(kernel.mean / k)


# The energy beyond a rank


@settings(max_examples=30)
@given(seed=seeds, rank=st.integers(1, D))
def test_tail_energy_is_what_the_nearest_matrix_of_that_rank_leaves_out(seed, rank):
    J = gaussian(D, D, seed=seed)
    U, S, Vh = np.linalg.svd(J.numpy())
    nearest = U[:, :rank] * S[:rank] @ Vh[:rank]
    left_out = np.linalg.norm(J.numpy() - nearest) ** 2 / np.linalg.norm(J.numpy()) ** 2
    value = float(tail_energy(torch.from_numpy(S), rank))
    assert value == pytest.approx(left_out, abs=1e-12)
    assert float(tail_energy(torch.from_numpy(1e200 * S), rank)) == pytest.approx(value)
    assert value <= 1 - rank / D + 1e-12


def test_tail_energy_at_its_ends():
    flat = torch.ones(2, 8)
    torch.testing.assert_close(tail_energy(flat, 3), torch.full((2,), 5 / 8))
    for rank in (8, 9, 1000):
        assert not tail_energy(flat, rank).any()
    with pytest.warns(UserWarning, match="tail energy is undefined"):
        assert tail_energy(torch.zeros(1, 4), 2).isnan().all()


# A model, and the result


def test_a_models_measures_are_those_of_its_jacobians(tiny_trace):
    result = residual_alignment(tiny_trace, n_classes=4, position=5)
    J = tlc.block_jacobians(tiny_trace, position=5).double().numpy()
    U, S, Vh = np.linalg.svd(J)
    np.testing.assert_allclose(
        result.singular_values, S, rtol=1e-4, atol=1e-4 * S.max()
    )
    within = [
        np.mean(np.diag(U[layer, :, :4].T @ Vh[layer, :4].T) ** 2) for layer in range(2)
    ]
    np.testing.assert_allclose(result.within_blocks(), within, rtol=1e-3)
    overlap = [
        np.sum((side[0] @ side[1].T) ** 2) / 4
        for side in (U[:, :, :4].swapaxes(1, 2), Vh[:, :4])
    ]
    assert float(result.across_blocks("subspace_overlap")[0, 1]) == pytest.approx(
        np.mean(overlap), rel=1e-3
    )
    np.testing.assert_allclose(
        result.tail_energy, (S[:, 4:] ** 2).sum(1) / (S**2).sum(1), rtol=1e-4
    )
    assert result.equidistance == pytest.approx(
        float(tlc.equidistance(tiny_trace.residual)[5])
    )
    assert set(result.provenance["paths"]) == {"layer 0, token 5", "layer 1, token 5"}
    assert (result.position, result.n_classes, result.provenance["position"]) == (
        5,
        4,
        5,
    )


@pytest.mark.parametrize(
    ("n_classes", "k", "wanted"), [(2, None, 2), (1000, None, D), (2, 5, 5)]
)
def test_as_many_vectors_as_classes_by_default(n_classes, k, wanted):
    assert (
        residual_alignment(affine_trace(gaussian(L, D, D)), n_classes, k=k).k == wanted
    )


def test_repr_says_what_was_measured_and_the_four_values():
    result = residual_alignment(affine_trace(gaussian(L, D, D)), 2)
    for name, value in result.summary().items():
        assert f"{name}={value:.3f}" in repr(result)
    assert "'affine', position=2, n_classes=2, k=2" in repr(result)
    assert "null of alignment 0.167" in repr(result)


def test_file_round_trip(tmp_path):
    result = residual_alignment(affine_trace(gaussian(L, D, D)), 2)
    again = ResidualAlignment.load(result.save(tmp_path / "alignment.nc"))
    assert again.summary() == pytest.approx(result.summary(), rel=1e-15)
    assert torch.equal(again.uv, result.uv)
    assert (again.n_classes, again.position, again.provenance) == (
        2,
        2,
        result.provenance,
    )
    assert result.to_dataset()["uv"].dims == ("layer", "other_layer", "i", "j")
    with pytest.raises(ValueError, match=r"ResidualAlignment\.save"):
        ResidualAlignment.load(
            tlc.depth_coupling(affine_trace(gaussian(L, D, D)), k=2).save(
                tmp_path / "map.nc"
            )
        )


# What is refused, and what is warned of


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "`k` must be at least 1, got 0"),
        ({"k": D + 1}, rf"`k` must lie in \[1, {D}\].*, got {D + 1}"),
        ({"n_classes": 0}, "`n_classes` must be at least 1, got 0"),
        ({"position": 3}, r"`position` must lie in \[-3, 2\].*, got 3"),
    ],
)
def test_arguments_out_of_range_are_one_line(options, message):
    with pytest.raises(ValueError, match=message) as error:
        residual_alignment(
            affine_trace(gaussian(L, D, D)), **{"n_classes": 2} | options
        )
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("as_a_user")
def test_a_number_of_classes_that_is_no_number():
    with pytest.raises(
        TypeError, match=r"`n_classes` must be a whole number, got 2\.5"
    ):
        residual_alignment(affine_trace(gaussian(L, D, D)), 2.5)


def test_a_model_of_one_block_is_refused():
    with pytest.raises(
        ValueError,
        match="alignment across blocks takes at least 2 of them, this model has 1",
    ):
        residual_alignment(affine_trace(gaussian(1, D, D)), 2)


def test_spectra_of_other_shapes_are_refused():
    for J in (gaussian(D, D), gaussian(2, D, D + 1), gaussian(2, 2, D, D)):
        with pytest.raises(
            ValueError,
            match="`spectra` must be those of square matrices, one for each layer",
        ):
            alignment_matrices(tlc.svd(J))
    with pytest.raises(ValueError, match=r"`k` must lie in \[1, 3\]"):
        alignment_matrices(tlc.svd(gaussian(2, D, D), 3), 4)


@pytest.mark.parametrize("measure", [vector_alignment, subspace_overlap])
def test_a_coupling_matrix_is_no_matrix_of_cosines(measure):
    for A in (
        torch.tensor([[2.0, 0.0], [0.0, 0.5]]),
        torch.tensor([[0.5, torch.nan], [0.0, 0.5]]),
    ):
        with pytest.raises(
            ValueError, match="`A` must hold cosines, as `alignment_matrices` gives"
        ):
            measure(A)


def test_a_k_beyond_the_rank_is_warned_of():
    U = orthogonal()
    with pytest.warns(
        UserWarning, match="k = 4 is above the rank of layer 0, token 2, layer 1"
    ):
        residual_alignment(network(U, gains(), U), n_classes=RANK + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        residual_alignment(network(U, gains(), U), n_classes=RANK)
