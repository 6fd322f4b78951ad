"""Products of blocks against mpmath, autograd and plain float64; their nulls."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

import tl_coupling as tlc
from linear_blocks import affine_trace, coupled
from random_matrices import gaussian
from tl_coupling.dynamics.conjugation import (
    conjugated_grams,
    largest_eigenvalue,
    log_largest_of_product,
    rotated,
)
from tl_coupling.dynamics.depth_products import Products
from tl_coupling.dynamics.factored import FactoredProduct

D = 8


def exact_logs(factors: list[torch.Tensor]) -> list[float]:
    """Logarithms of the singular values of a product, with 400 digits."""
    with mpmath.workdps(400):
        product = mpmath.eye(len(factors[0]))
        for factor in factors:
            product = mpmath.matrix(factor.tolist()) * product
        values = mpmath.svd_r(product, compute_uv=False)
        return sorted((float(mpmath.log(value)) for value in values), reverse=True)


def multiplied(factors: list[torch.Tensor]) -> FactoredProduct:
    product = FactoredProduct.identity(len(factors[0]))
    for factor in factors:
        product = product.then(factor)
    return product


FACTORS = {
    "I + J": [torch.eye(D).double() + gaussian(D, D, seed=i) for i in range(30)],
    "close to I": [
        torch.eye(D).double() + 0.1 * gaussian(D, D, seed=i) for i in range(30)
    ],
    "stiff": [
        torch.tensor([1e5, 1, 1, 1, 1, 1, 1, 1e-5]).double().diag()
        @ (torch.eye(D) + 0.01 * gaussian(D, D, seed=i))
        for i in range(28)
    ],
}


@pytest.mark.parametrize("name", FACTORS)
def test_all_singular_values_of_a_long_product_equal_mpmaths(name):
    factors = FACTORS[name]
    expected = exact_logs(factors)
    logs = multiplied(factors).log_singular_values()
    assert logs.tolist() == pytest.approx(expected, abs=1e-9)
    if name == "stiff":
        # What is multiplied out in float64 is wrong by hundreds of nats.
        product = torch.eye(D).double()
        for factor in factors:
            product = factor @ product
        plain = float(torch.linalg.svdvals(product)[-1].clamp(min=1e-320).log())
        assert plain > expected[-1] + 100


def test_singular_factors_give_minus_infinity():
    projection = torch.diag(torch.tensor([1.0, 1.0, 0.0]))
    logs = multiplied([projection, 2 * torch.eye(3)]).log_singular_values()
    assert logs[:2].tolist() == pytest.approx([math.log(2)] * 2)
    assert logs[2] == -math.inf
    zero = multiplied([torch.zeros(3, 3), torch.eye(3)])
    assert (zero.log_singular_values() == -math.inf).all()


def test_the_logarithms_add_up_to_those_of_the_determinants(tiny_trace):
    steps = torch.eye(32) + tlc.block_jacobians(tiny_trace).double()
    result = tlc.dynamics.products(tiny_trace)
    determinants = torch.linalg.slogdet(steps).logabsdet.cumsum(0)
    sums = result.log_singular_values.sum(-1)
    assert torch.allclose(sums, determinants, rtol=0, atol=1e-9)


def test_the_product_is_autograds_derivative_of_a_prompt_of_one_token(tiny_trace):
    """Of one token nothing goes by way of others: P is the model's whole Jacobian."""
    trace = tlc.trace(tiny_trace.model, tiny_trace.tokens[:1])

    def last(x):
        for block in trace.blocks:
            x = x + block.partial(0, 0)(x)
        return x

    J = tlc.block_jacobians(trace).double()
    product = tlc.dynamics.block_product(trace)
    P = (torch.eye(32) + J[1]) @ (torch.eye(32) + J[0])
    assert torch.allclose(product.dense(), P, atol=1e-12)


def test_properties_are_those_of_the_product_multiplied_out(tiny_trace):
    J = tlc.block_jacobians(tiny_trace).double()
    P = (torch.eye(32) + J[1]) @ (torch.eye(32) + J[0])
    result = tlc.dynamics.products(tiny_trace)
    sigma = np.linalg.svd(P.numpy(), compute_uv=False)
    shares = sigma / sigma.sum()
    energy = sigma**2
    assert result.log_largest[1] == pytest.approx(math.log(sigma[0]))
    assert result.log_mean_square[1] == pytest.approx(math.log(energy.mean()))
    assert result.participation_ratio[1] == pytest.approx(
        energy.sum() ** 2 / (energy**2).sum()
    )
    assert result.effective_rank[1] == pytest.approx(
        math.exp(-(shares * np.log(shares)).sum())
    )
    assert result.growth_rates[1].tolist() == pytest.approx(
        (np.log(sigma) / 2).tolist()
    )


def test_rotations_are_orthogonal_and_uniform():
    generator = torch.Generator().manual_seed(1)
    identity = torch.eye(5, dtype=torch.float64)
    drawn = torch.stack([rotated(identity, generator) for _ in range(3000)])
    assert torch.allclose(drawn.mT @ drawn, identity.expand(3000, 5, 5), atol=1e-12)
    # Each entry, and each of a rotation that is turned by a fixed one, has the law of a
    # coordinate of a uniform unit vector: (1 + x)/2 is Beta(2, 2) in 5 dimensions.
    turn = torch.linalg.qr(gaussian(5, 5, seed=3)).Q
    for values in (drawn[:, 0, 0], drawn[:, 4, 1], (turn @ drawn)[:, 2, 3]):
        law = stats.beta(2, 2)
        assert stats.kstest((1 + values.numpy()) / 2, law.cdf).pvalue > 1e-3
    determinants = torch.linalg.det(drawn)
    assert abs(float(determinants.mean())) < 0.1


def test_conjugated_products_have_the_law_of_blocks_conjugated_one_by_one():
    """Drawn as they are defined, with a rotation of its own for each block."""
    steps = torch.eye(6).double() + 0.6 * gaussian(3, 6, 6, seed=4)
    values = torch.linalg.svdvals(steps)
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    ours, defined = [], []
    for _ in range(400):
        *_, (gram, log_divisor) = conjugated_grams(values, generator)
        ours.append(0.5 * math.log(largest_eigenvalue(gram)) + log_divisor)
        P = np.eye(6)
        for step in steps.numpy():
            Q = stats.ortho_group.rvs(6, random_state=rng)
            P = Q @ step @ Q.T @ P
        defined.append(math.log(np.linalg.norm(P, 2)))
    assert stats.ks_2samp(ours, defined).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(5, 5), (40, 40), (200, 20), (300, 300)])
def test_the_largest_eigenvalue_is_that_of_a_decomposition(shape):
    X = gaussian(*shape, seed=2).float()
    G = X @ X.mT
    expected = float(torch.linalg.eigvalsh(G.double())[-1])
    assert float(largest_eigenvalue(G)) == pytest.approx(expected, rel=1e-5)
    assert float(largest_eigenvalue(torch.zeros_like(G))) == 0
    assert float(largest_eigenvalue(torch.eye(64))) == pytest.approx(1)


SMALL_STEPS = torch.tensor([0.0, 0.01, 0.1, 1.0, 0.1, 30.0]).double()


@pytest.mark.parametrize("d", [1, 3, 40, 250])
@pytest.mark.parametrize("scales", [SMALL_STEPS, 1e20 * SMALL_STEPS, -SMALL_STEPS / 30])
def test_the_largest_singular_value_of_a_product_needs_no_product(scales, d):
    """Close to I, where many directions are amplified alike, and far from it."""
    J = scales[:, None, None] * gaussian(6, d, d, seed=d) / d**0.5
    P = np.eye(d)
    for matrix in J.float().double().numpy():
        P = (np.eye(d) + matrix) @ P
    expected = math.log(np.linalg.norm(P / np.abs(P).max(), 2) * np.abs(P).max())
    assert log_largest_of_product(list(J.float())) == pytest.approx(expected, abs=1e-5)
    zero = [*J.float(), -torch.eye(d)]
    assert log_largest_of_product(zero) == -math.inf


def test_coupled_blocks_gain_and_unrelated_blocks_do_not():
    """`A_l = U S_l Uᵀ` add up exactly: σ₁ of the product is the product of `1 + s₁`."""
    A, _, S = coupled()
    result = tlc.dynamics.products(affine_trace(A), n_draws=40)
    expected = (1 + S).log().cumsum(0).amax(-1)
    assert result.log_largest.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert (result.alignment_gain_interval[1:, 0] > 0).all()
    assert result.alignment_gain[0] == pytest.approx(0, abs=1e-6)

    unrelated = 0.2 * gaussian(12, 60, 60, seed=8).float()
    chance = tlc.dynamics.jacobian_products(unrelated, n_draws=40)
    inside = (chance.alignment_gain_interval[:, 0] <= 1e-5) & (
        chance.alignment_gain_interval[:, 1] >= -1e-5
    )
    assert inside.double().mean() > 0.8


def in_band(result: Products) -> bool:
    low, high = result.null_band.unbind(-1)
    off_by_rounding = 1e-5
    return bool(
        (result.log_largest >= low - off_by_rounding).all()
        and (result.log_largest <= high + off_by_rounding).all()
    )


@pytest.mark.long("computes hundreds of products")
def test_a_whole_line_of_unrelated_blocks_stays_in_the_band():
    """At every depth at once, as a single depth's interval does not promise."""
    A, _, _ = coupled()
    assert not in_band(tlc.dynamics.products(affine_trace(A)))
    whole, at_each_depth = 0, 0
    for seed in range(40):
        unrelated = 0.2 * gaussian(8, 12, 12, seed=seed).float()
        result = tlc.dynamics.jacobian_products(unrelated, seed=seed)
        whole += in_band(result)
        low, high = result.alignment_gain_interval.unbind(-1)
        at_each_depth += bool(((low <= 1e-5) & (high >= -1e-5)).all())
    assert whole >= 34
    assert at_each_depth < whole


def test_two_draws_give_no_band(tiny_trace):
    result = tlc.dynamics.products(tiny_trace, n_draws=2)
    low, high = result.null_interval.unbind(-1)
    assert bool((low[1:] < high[1:]).all())
    with pytest.raises(ValueError, match="at least 3 draws, got 2: ask for 19 or more"):
        _ = result.null_band
    few = tlc.dynamics.products(tiny_trace, n_draws=3)
    with pytest.warns(UserWarning, match="one more line with 75%, not 95%"):
        low, high = few.null_band.unbind(-1)
    assert float(high[-1] - low[-1]) > 0


def test_orders_of_two_blocks_are_both_drawn():
    J = 0.5 * gaussian(2, 4, 4, seed=5)
    result = tlc.dynamics.jacobian_products(J, n_draws=20)
    first, second = torch.eye(4) + J
    both = {
        round(float(torch.linalg.matrix_norm(P, 2).log()), 5)
        for P in (first @ second, second @ first)
    }
    assert {round(value, 5) for value in result.shuffled_log_largest.tolist()} == both


def test_the_same_seed_gives_the_same_draws_and_another_others(tiny_trace):
    first, again, other = (
        tlc.dynamics.products(tiny_trace, n_draws=3, seed=seed) for seed in (1, 1, 2)
    )
    assert torch.equal(first.null_log_largest, again.null_log_largest)
    assert not torch.equal(first.null_log_largest, other.null_log_largest)


def test_forks_give_the_same_draws(tiny_trace, monkeypatch):
    alone = tlc.dynamics.products(tiny_trace, n_draws=3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        forked = tlc.dynamics.products(tiny_trace, n_draws=3)
    finally:
        torch.set_num_threads(threads)
    for name in Products.DIMS.keys() - {"layers"}:
        assert torch.allclose(getattr(alone, name), getattr(forked, name), rtol=1e-6)


def test_every_run_of_blocks_has_its_largest_singular_value():
    J = 0.3 * gaussian(4, 9, 9, seed=6)
    trace = affine_trace(J[:, :6, :6])
    result = tlc.dynamics.product_map(trace, n_draws=3)
    for last in range(4):
        for first in range(4):
            if first > last:
                assert result.log_largest[last, first].isnan()
                continue
            P = torch.eye(6).double()
            for matrix in J[first : last + 1, :6, :6]:
                P = P + matrix @ P
            expected = float(torch.linalg.matrix_norm(P, 2).log())
            assert result.log_largest[last, first] == pytest.approx(expected, abs=1e-6)
    assert (
        result.null_log_largest.diagonal(dim1=1, dim2=2).tolist()
        == [pytest.approx(result.log_largest.diagonal().tolist(), abs=1e-6)] * 3
    )


@pytest.mark.long("computes hundreds of products")
def test_runs_of_conjugated_blocks_have_the_law_of_conjugated_products():
    J = 0.5 * gaussian(3, 6, 6, seed=7)
    trace = affine_trace(J)
    of_map = tlc.dynamics.product_map(trace, n_draws=300).null_log_largest[:, 2, 0]
    of_products = tlc.dynamics.products(trace, n_draws=300).null_log_largest[:, 2]
    assert stats.ks_2samp(of_map.numpy(), of_products.numpy()).pvalue > 1e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: tlc.dynamics.products(t, n_draws=1), "`n_draws` must be at least 2"),
        (lambda t: tlc.dynamics.products(t, layers=[]), "`layers` is empty"),
        (lambda t: tlc.dynamics.products(t, layers=[2]), "`layer` must lie in"),
        (
            lambda t: tlc.dynamics.jacobian_products(torch.ones(2, 3, 3), layers=[1]),
            "`layers` must name each of the 2 matrices",
        ),
        (
            lambda t: tlc.dynamics.jacobian_products(torch.ones(0, 3, 3)),
            "at least one, got 0",
        ),
    ],
)
def test_bad_input_is_refused(tiny_trace, call, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        call(tiny_trace)


def matrix(d, seed):
    return gaussian(d, d, seed=seed)


@pytest.mark.parametrize(
    ("J", "message"),
    [
        (-torch.eye(4).expand(2, 4, 4), "layer 0: J is −I"),
        (torch.stack([0.3 * matrix(4, 1), -torch.eye(4)]), "layer 1: J is −I"),
        (-torch.ones(1, 1, 1), "layer 0: J is −I"),
        (torch.full((2, 4, 4), math.nan), "NaN or infinite"),
        (torch.full((2, 4, 4), math.inf), "NaN or infinite"),
        (torch.ones(2, 4, 4).index_fill(0, torch.tensor(1), -math.inf), "NaN or inf"),
        (torch.ones(2, 0, 0), "at least one row and one column"),
        (1e305 * torch.ones(2, 4, 4).double(), "`J` must have entries up to 1e+300"),
    ],
)
def test_jacobians_without_products_are_refused_in_a_line(J, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")) as error:
        tlc.dynamics.jacobian_products(J, n_draws=2)
    assert "\n" not in str(error.value)


def test_a_block_that_nothing_passes_is_refused_on_a_trace():
    J = torch.stack([0.3 * matrix(6, 1), -torch.eye(6).double()])
    for measure in (tlc.dynamics.products, tlc.dynamics.product_map):
        # Remarks on a trace are made once.
        trace = affine_trace(J)
        with (
            pytest.raises(ValueError, match="layer 1: J is −I"),
            pytest.warns(UserWarning, match="normalises the stream itself"),
            pytest.warns(
                UserWarning, match="directions of the stream do not pass the block"
            ),
        ):
            measure(trace, n_draws=2)
    assert tlc.dynamics.products(trace, layers=[0], n_draws=2).layers == (0,)


@pytest.mark.parametrize("scale", [1e-30, 1e15, 1e30, 1e37])
def test_products_of_large_and_small_jacobians_in_float32(scale):
    """Their logarithms are those of mpmath, and every draw is finite."""
    J = (scale * gaussian(3, 4, 4, seed=2)).float()
    result = tlc.dynamics.jacobian_products(J, n_draws=3)
    steps = [torch.eye(4).double() + matrix.double() for matrix in J]
    for n in range(3):
        expected = exact_logs(steps[: n + 1])
        assert result.log_singular_values[n].tolist() == pytest.approx(expected)
    draws = (result.null_log_largest, result.shuffled_log_largest)
    assert all(drawn.isfinite().all() for drawn in draws)
    assert (result.alignment_gain.abs() < 5).all()
    assert result.participation_ratio.isfinite().all()


@pytest.mark.parametrize("scale", [1e160, 1e250])
def test_products_of_very_large_jacobians_in_float64(scale, monkeypatch):
    J = scale * gaussian(3, 4, 4, seed=2)
    result = tlc.dynamics.jacobian_products(J.clone(), n_draws=3)
    expected = exact_logs([torch.eye(4).double() + matrix for matrix in J])
    assert result.log_singular_values[-1].tolist() == pytest.approx(expected)
    assert (result.alignment_gain.abs() < 5).all()
    monkeypatch.setattr(
        "tl_coupling.dynamics.runs.block_jacobians", lambda *_, **__: J.clone()
    )
    of_map = tlc.dynamics.product_map(affine_trace(torch.zeros(3, 4, 4).double()))
    assert of_map.log_largest[:, 0].tolist() == pytest.approx(
        result.log_largest.tolist(), rel=1e-6
    )
    assert (of_map.alignment_gain[:, 0].abs() < 5).all()


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_jacobians_of_16_bits_have_the_products_of_their_values(dtype):
    J = (0.3 * gaussian(3, 4, 4, seed=2)).to(dtype)
    ours = tlc.dynamics.jacobian_products(J, n_draws=3)
    expected = tlc.dynamics.jacobian_products(J.float(), n_draws=3)
    for name in Products.DIMS.keys() - {"layers"}:
        assert torch.equal(getattr(ours, name), getattr(expected, name))


def test_a_product_that_is_zero_in_some_orders_has_no_nan():
    """`E₁₂ E₁₂ = 0`, but `I + J` of every block is not."""
    step = torch.zeros(3, 3).double()
    step[0, 1] = 1
    other = torch.diag(torch.tensor([1.0, 2.0, 0.0])).double()
    J = (torch.stack([step, step, other]) - torch.eye(3)).float()
    result = tlc.dynamics.jacobian_products(J, n_draws=8)
    with pytest.warns(UserWarning, match="participation ratio"):
        ratio = result.participation_ratio
    assert (result.log_singular_values[1:] == -math.inf).all()
    assert ratio.isnan().tolist() == [False, True, True]
    assert (result.shuffled_log_largest == -math.inf).all()
    assert result.null_log_largest.isfinite().all()
    assert (result.alignment_gain[1:] == -math.inf).all()
    with pytest.warns(
        UserWarning, match="directions of the stream do not pass the block"
    ):
        of_map = tlc.dynamics.product_map(affine_trace(J.double()), n_draws=1)
    assert of_map.log_largest[1, 0] == of_map.log_largest[2, 0] == -math.inf
    assert of_map.log_largest[2, 1] == pytest.approx(0, abs=1e-9)
    assert of_map.log_largest[2, 2] == pytest.approx(math.log(2))


EYE = torch.eye(3).double()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FactoredProduct.identity(-1), "`d` must be at least 1, got -1"),
        (lambda: FactoredProduct.identity(0), "`d` must be at least 1, got 0"),
        (lambda: FactoredProduct.identity(2.5), "`d` must be a whole number"),
        (lambda: FactoredProduct.identity(2, "toaster"), "`device` must be a device"),
        (lambda: multiplied([EYE, torch.eye(4)]), r"as the product has, got \[4 4\]"),
        (lambda: multiplied([EYE, torch.ones(2, 3)]), r"`M` must have shape \[d d\]"),
        (lambda: multiplied([EYE, torch.ones(3, 2)]), r"`M` must have shape \[d d\]"),
        (lambda: multiplied([EYE, torch.ones(3)]), r"`M` must have shape \[d d\]"),
        (lambda: multiplied([EYE, EYE[None]]), r"`M` must have shape \[d d\]"),
        (lambda: multiplied([EYE, EYE + 1j]), "`M` must be a floating-point"),
        (lambda: multiplied([EYE, [[1.0]]]), "`M` must be a floating-point"),
        (lambda: multiplied([EYE, EYE * math.nan]), "`M` must be finite"),
        (lambda: multiplied([EYE, EYE * math.inf]), "`M` must be finite"),
        (lambda: FactoredProduct(EYE, EYE[0], torch.eye(4)), "with d = 3 as in `Q`"),
        (lambda: FactoredProduct(EYE, torch.zeros(4), EYE), "with d = 3 as in `Q`"),
        (lambda: FactoredProduct(EYE + 0j, EYE[0], EYE), "`Q` must be a floating"),
        (lambda: FactoredProduct(EYE * math.nan, EYE[0], EYE), "`Q` must be finite"),
        (lambda: FactoredProduct(EYE, EYE[0] * math.nan, EYE), "`log_scale` must be"),
        (lambda: FactoredProduct(EYE, EYE[0] / 0, EYE), "`log_scale` must be finite"),
        (lambda: multiplied([EYE, 1e300 * EYE, 1e300 * EYE]).dense(), "too large for"),
    ],
)
def test_what_is_no_product_is_refused_in_a_line(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_no_error_recommends_to_drop_an_imaginary_part():
    with pytest.raises(TypeError, match="complex128") as error:
        multiplied([EYE, EYE + 1j])
    assert "float()" not in str(error.value)


def test_factors_of_all_sizes_and_dtypes_are_multiplied():
    sizes = [1e-320, 1e-200, 1e200, 1.5e308, 1.0]
    factors = [size * torch.ones(3, 3).double() for size in sizes]
    logs = multiplied(factors).log_singular_values()
    expected = sum(map(math.log, sizes)) + len(sizes) * math.log(3)
    # A number of 320 digits has four bits.
    assert float(logs[0]) == pytest.approx(expected, abs=0.1)
    half = multiplied([EYE.half(), 2 * EYE.float()])
    assert half.log_singular_values().tolist() == pytest.approx([math.log(2)] * 3)
    from_float32 = FactoredProduct(EYE.float(), torch.zeros(3), EYE.float()).then(EYE)
    assert from_float32.Q.dtype == torch.float64
    assert multiplied([EYE.numpy()]).dense().tolist() == EYE.tolist()


@pytest.mark.parametrize("seed", [2**32, 2**63, 2**64 - 1, 2**64, 2**128])
def test_seeds_of_any_size_give_draws_of_their_own(tiny_trace, seed):
    ours = tlc.dynamics.product_map(tiny_trace, n_draws=1, seed=seed)
    again = tlc.dynamics.product_map(tiny_trace, n_draws=1, seed=seed)
    zero = tlc.dynamics.product_map(tiny_trace, n_draws=1)
    assert ours.null_log_largest[0, 1, 0] == again.null_log_largest[0, 1, 0]
    assert ours.null_log_largest[0, 1, 0] != zero.null_log_largest[0, 1, 0]
