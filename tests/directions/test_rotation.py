"""Rotations of what blocks read and write, against torch's own hooks and algebra."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from scipy import stats

import tiny
import tl_coupling as tlc
from random_matrices import gaussian
from tl_coupling.directions import rotation
from tl_coupling.directions.interventions import rotation_hooks
from tl_coupling.directions.rotation import Rotation, random_rotation

PROMPTS = [f"w{i} w{3 * i + 2} w{i + 7} w{2 * i + 30} w{5 * i}" for i in range(1, 5)]
SIDES = ["read", "write", "both"]


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.fixture
def rotation_of_32():
    return random_rotation(32, 70.0, torch.Generator().manual_seed(3))


def rotated_logits(model, tokens, rotations, side, first_position=0):
    """Logits with torch's hooks on the blocks' modules; none of TransformerLens's."""

    def turned(x, R):
        return torch.cat(
            [x[:, :first_position], (R @ x[:, first_position:, :, None])[..., 0]], 1
        )

    def around(block, R):
        reads = {"read": R, "write": torch.eye(len(R)), "both": R.T}[side]
        entered = []

        def before(_, args):
            entered[:] = [args[0], turned(args[0], reads)]
            return (entered[1].clone(), *args[1:])

        def after(_, __, answer):
            h, read = entered
            output = answer[0] if isinstance(answer, tuple) else answer
            step = output - read
            new = h + (step if side == "read" else turned(step, R))
            return (new, *answer[1:]) if isinstance(answer, tuple) else new

        return block.register_forward_pre_hook(before), block.register_forward_hook(
            after
        )

    with ExitStack() as undo, torch.no_grad():
        for layer, R in rotations.items():
            for handle in around(model.blocks[layer], R):
                undo.callback(handle.remove)
        return model(tokens[None])[0]


def loss(logits, tokens):
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]))


@pytest.mark.parametrize("first_position", [0, 2])
@pytest.mark.parametrize("side", SIDES)
def test_a_rotation_is_what_modules_of_rotated_blocks_predict(
    model, side, first_position
):
    result = tlc.directions.rotate(
        model,
        PROMPTS[0],
        side=side,
        angle=60,
        n_draws=1,
        seed=5,
        first_position=first_position,
    )
    generator = torch.Generator().manual_seed(5)
    shared, first, second = (random_rotation(32, 60.0, generator) for _ in range(3))
    half = 0.5 * torch.eye(32)
    tokens = tlc.trace(model, PROMPTS[0]).tokens
    with torch.no_grad():
        plain = model(tokens[None])[0]
    if side == "both":
        # Half the identity is symmetric, and so its own transpose.
        assert torch.equal(half, half.T)
    for kind, rotations in (
        ("together", {0: shared, 1: shared}),
        ("apart", {0: first, 1: second}),
        ("shrunk", {0: half, 1: half}),
    ):
        logits = rotated_logits(model, tokens, rotations, side, first_position)
        change = loss(logits, tokens) - loss(plain, tokens)
        assert float(result.of(kind)[0]) == pytest.approx(change, abs=2e-5)
        p, q = plain.softmax(-1), logits.softmax(-1)
        divergence = float((p * (p / q).log()).sum(-1).mean())
        assert float(result.of(kind, "kl")[0]) == pytest.approx(divergence, abs=2e-5)
        assert abs(change) > 1e-4 or kind == "shrunk"


@pytest.mark.parametrize("side", SIDES)
def test_the_identity_changes_no_bit(model, side):
    tokens = tlc.trace(model, PROMPTS[0]).tokens.expand(3, -1)
    identity = torch.eye(32).expand(3, 32, 32)
    with torch.no_grad():
        plain = model(tokens)
        hooks = rotation_hooks(dict.fromkeys(range(2), identity), side)
        with model.hooks(fwd_hooks=hooks):
            assert torch.equal(model(tokens), plain)
    nothing = tlc.directions.rotate(model, PROMPTS, side=side, angle=0, n_draws=1)
    # Batches of another size are multiplied in another order.
    assert float(nothing.loss_change.abs().max()) < 1e-6


@pytest.mark.parametrize("side", ["read", "write"])
def test_half_a_turn_is_a_sign(model, side):
    """All draws are `−I`: one number, that of modules with a minus."""
    result = tlc.directions.rotate(model, PROMPTS[0], [1], side, angle=180, n_draws=3)
    tokens = tlc.trace(model, PROMPTS[0]).tokens
    with torch.no_grad():
        plain = model(tokens[None])[0]
    logits = rotated_logits(model, tokens, {1: -torch.eye(32)}, side)
    change = loss(logits, tokens) - loss(plain, tokens)
    assert result.kinds == ("alone", "alone", "alone", "shrunk")
    assert result.loss_change[:, 0].tolist() == pytest.approx([change] * 4, abs=2e-5)


def test_blocks_that_are_rotated_together_with_what_is_around_them_predict_the_same(
    model, rotation_of_32
):
    """In coordinates that are rotated as a whole nothing changes but rounding."""
    tokens = tlc.trace(model, PROMPTS[0]).tokens[None]
    R = rotation_of_32
    inside = rotation_hooks(dict.fromkeys(range(2), R[None]), "both")
    into = ("blocks.0.hook_resid_pre", lambda h, hook: h @ R.T)
    out_of = ("blocks.1.hook_resid_post", lambda h, hook: h @ R)
    with torch.no_grad():
        plain = model(tokens)
        with model.hooks(fwd_hooks=[into, *inside, out_of]):
            around = model(tokens)
        with model.hooks(fwd_hooks=inside):
            alone = model(tokens)
    assert torch.allclose(around, plain, atol=1e-5)
    assert not torch.allclose(alone, plain, atol=1e-2)


def test_the_jacobian_of_a_block_that_writes_rotated_is_rotated(model, rotation_of_32):
    J = tlc.block_jacobians(tlc.trace(model, PROMPTS[0]))
    hooks = rotation_hooks({0: rotation_of_32[None]}, "write")
    with model.hooks(fwd_hooks=hooks):
        rotated = tlc.block_jacobian(tlc.trace(model, PROMPTS[0]), 0)
    assert torch.allclose(rotated, rotation_of_32 @ J[0], atol=1e-5)
    assert torch.allclose(
        torch.linalg.svdvals(rotated), torch.linalg.svdvals(J[0]), atol=1e-5
    )


@pytest.mark.parametrize("side", SIDES)
def test_together_keeps_coupling_and_apart_destroys_it(side):
    """In algebra, for blocks that share their singular vectors."""
    d, k, n = 48, 6, 4
    U, V = (torch.linalg.qr(gaussian(d, d, seed=seed)).Q for seed in (1, 2))
    sizes = torch.linspace(3, 1, d) * torch.linspace(1, 2, n)[:, None]
    J = (U * sizes[:, None].double()) @ V.mT

    def rotated(R):
        if side == "read":
            return J @ R
        return R @ J if side == "write" else R @ J @ R.mT

    generator = torch.Generator().manual_seed(0)
    draws = [random_rotation(d, 90.0, generator).double() for _ in range(n)]

    def coupling(J):
        return tlc.comparisons.jacobian_coupling(J, k).coupling()

    before = coupling(J)
    together = coupling(rotated(draws[0]))
    assert torch.allclose(together, before, atol=1e-5)
    off_diagonal = ~torch.eye(n, dtype=torch.bool)
    assert float(before[off_diagonal].min()) > 0.99
    apart = coupling(rotated(torch.stack(draws)))
    assert float(apart[off_diagonal].max()) < 0.5


@pytest.mark.parametrize("d", [1, 2, 7, 12])
def test_every_vector_is_turned_by_the_angle(d):
    generator = torch.Generator().manual_seed(d)
    R = random_rotation(d, 35.0, generator)
    assert torch.allclose(R @ R.mT, torch.eye(d), atol=1e-6)
    assert float(torch.linalg.det(R)) == pytest.approx(1, abs=1e-5)
    cosines = torch.linalg.eigvals(R).real
    n_fixed = d % 2
    turned = [np.cos(np.radians(35))] * (d - n_fixed)
    assert sorted(cosines.tolist()) == pytest.approx(turned + [1.0] * n_fixed, abs=1e-5)
    assert torch.equal(random_rotation(d, 0.0, generator), torch.eye(d))


def test_planes_of_rotations_have_no_preferred_direction():
    """A quarter turn of e₁ is uniform on the sphere orthogonal to it, here in five
    dimensions: `(1 + x)/2` of a coordinate is Beta(2, 2).
    """
    generator = torch.Generator().manual_seed(0)
    turned = torch.stack(
        [random_rotation(6, 90.0, generator)[:, 0] for _ in range(2000)]
    )
    assert float(turned[:, 0].abs().max()) < 1e-6
    for coordinate in (1, 5):
        values = (1 + turned[:, coordinate].numpy()) / 2
        assert stats.kstest(values, stats.beta(2, 2).cdf).pvalue > 1e-3


def test_tables_and_differences_are_means_over_draws_and_intervals_over_prompts():
    rng = np.random.default_rng(0)
    changes = torch.from_numpy(rng.normal(size=(5, 6)))
    kinds = ("together", "together", "apart", "apart", "shrunk")
    prompts = tuple("abcdef")
    result = Rotation(
        torch.ones(6), changes, changes.abs(), kinds, (0, 1), prompts, "write", 90.0, {}
    )
    together, apart = changes[:2].mean(0).numpy(), changes[2:4].mean(0).numpy()
    expected = stats.ttest_rel(together, apart)
    difference = result.against("apart")
    assert difference.estimate == pytest.approx((together - apart).mean())
    low, high = expected.confidence_interval()
    assert (difference.low, difference.high) == pytest.approx((low, high))
    table = result.to_dataframe().set_index("kind")
    assert list(table.index) == ["together", "apart", "shrunk"]
    assert table.loc["apart", "loss_change"] == pytest.approx(apart.mean())
    assert table.loc["apart", "first_less_this"] == pytest.approx(difference.estimate)
    assert table.loc["together", "first_less_this"] == 0
    assert table.loc["apart", "draws_low"] == pytest.approx(
        changes[2:4].mean(1).min().item()
    )
    assert result.draws("apart").tolist() == pytest.approx(
        changes[2:4].mean(1).tolist()
    )
    assert result.of("shrunk", "kl") == pytest.approx(changes[4].abs().numpy())
    with pytest.raises(ValueError, match="no 'alone' here, only together, apart"):
        result.of("alone")
    with pytest.raises(ValueError, match="no 'removed' here, only loss_change, kl"):
        result.against("apart", "removed")


def test_batches_and_single_passes_give_the_same(model, monkeypatch):
    together = tlc.directions.rotate(model, PROMPTS, n_draws=3)
    monkeypatch.setattr(rotation, "_BYTES_OF_ROTATIONS", 1)
    one_by_one = tlc.directions.rotate(model, PROMPTS, n_draws=3)
    assert torch.allclose(together.loss_change, one_by_one.loss_change, atol=1e-5)
    assert together.kinds == one_by_one.kinds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": []}, "`layers` is empty"),
        ({"layers": [0, -2]}, r"each layer once, got \[0, 0\]"),
        ({"layers": [2]}, r"`layer` must lie in \[-2, 1\]"),
        ({"first_position": 9}, "nothing would be changed"),
        ({"prompts": ["w1 w2", "w1  w2"]}, "one prompt is there twice"),
        ({"angle": float("nan")}, "`angle` must be finite"),
        ({"side": "sideways"}, "`side` must be"),
    ],
)
def test_bad_input_is_refused_in_a_line(model, options, message):
    with pytest.raises((TypeError, ValueError), match=message) as error:
        tlc.directions.rotate(model, **({"prompts": PROMPTS} | options))
    assert "\n" not in str(error.value)
