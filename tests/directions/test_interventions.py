"""Directions as hooks: against the stream by hand, TransformerLens's own interchange, and
what redundancy drops.
"""

import re

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

import tiny
import tl_coupling as tlc
from tl_coupling.directions import Directions
from tl_coupling.directions.interventions import removal_hooks
from tl_coupling.directions.projections import Projection

pytestmark = pytest.mark.both_lines

TOKENS = torch.tensor(tiny.TOKENS)


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.fixture(scope="module")
def trace(model):
    return tlc.trace(model, TOKENS)


def logits_with(model, hooks, n_rows=1):
    batch = TOKENS.expand(n_rows, -1)
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        return model(batch)


def frame(rank, seed=0, d=32):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(d, rank, generator=generator)).Q


@pytest.mark.parametrize("side", ["read", "write"])
def test_steering_moves_the_stream_by_a_share_of_its_length(model, trace, side):
    """By hand: the stream is moved, and the later blocks run on it."""
    directions = tlc.directions.directions_of(trace, 0, k=1, side=side)
    logits = logits_with(model, directions.hooks(model, 0.3, position=4))
    at = 0 if side == "read" else 1
    X = trace.residual[at].clone()
    X[4] += 0.3 * X[4].norm() * directions.vectors[0]
    for block in trace.blocks[at:]:
        X = X + block(X)
    torch.testing.assert_close(logits[0], trace.logits(X), atol=1e-4, rtol=1e-4)


def test_each_row_of_a_batch_gets_its_own_direction(model, trace):
    directions = tlc.directions.directions_of(trace, 1, k=3)
    together = logits_with(model, directions.hooks(model, 0.5), n_rows=3)
    for i in range(3):
        alone = logits_with(model, directions[i : i + 1].hooks(model, 0.5))
        torch.testing.assert_close(together[i], alone[0], atol=1e-5, rtol=1e-4)


@pytest.mark.xfail(
    Version(transformers.__version__) >= Version("5.24"),
    reason="TransformerLens 4.3 gives attention no cache with transformers 5.24",
    strict=True,
)
def test_steering_acts_in_generation_with_a_cache(model, trace):
    """A direction strong enough changes what is generated, the same as without a cache."""
    directions = tlc.directions.directions_of(trace, 1, k=1)
    options = {"max_new_tokens": 4, "do_sample": False, "verbose": False}
    with model.hooks(fwd_hooks=directions.hooks(model, 3.0)):
        steered = model.generate(TOKENS[None], **options)
        uncached = TOKENS[None]
        for _ in range(4):
            with torch.no_grad():
                following = model(uncached)[:, -1].argmax(-1, keepdim=True)
            uncached = torch.cat([uncached, following], dim=1)
    plain = model.generate(TOKENS[None], **options)
    assert steered.tolist() == uncached.tolist()
    assert steered.tolist() != plain.tolist()


@pytest.mark.parametrize("side", ["read", "write"])
def test_removal_of_rank_0_changes_nothing(model, side):
    nothing = Projection(dict.fromkeys((0, 1), torch.zeros(32, 0)))
    hooks = removal_hooks(nothing, (0, 1), side)
    assert torch.equal(logits_with(model, hooks), logits_with(model, []))


def test_removal_of_everything_written_drops_the_block(model, trace):
    """As `layer_redundancy` drops it: the stream passes the block as it is."""
    everything = Projection({1: torch.eye(32)})
    hooks = removal_hooks(everything, (1,), "write")
    dropped = trace.logits(trace.residual[1])
    torch.testing.assert_close(
        logits_with(model, hooks)[0], dropped, atol=1e-5, rtol=1e-4
    )


def test_reading_less_leaves_the_stream(model, trace):
    """By hand: `X + f(X − (X − μ)BBᵀ)`."""
    B, mean = frame(3), trace.residual[1].mean(0)
    hooks = removal_hooks(Projection({1: B}, {1: mean}), (1,), "read")
    X = trace.residual[1]
    expected = X + trace.blocks[1](X - (X - mean) @ B @ B.mT)
    torch.testing.assert_close(
        logits_with(model, hooks)[0], trace.logits(expected), atol=1e-4, rtol=1e-4
    )


def test_removal_is_an_interchange_with_the_mean(trace):
    """TransformerLens's `SubspaceInterchange`, with the mean as its source."""
    interchange = pytest.importorskip("transformer_lens.tools.analysis.interchange")
    B, mean = frame(3), trace.residual[1].mean(0)
    x = trace.residual[1]
    kept = x - Projection({1: B}, {1: mean}).project(x[None], 1)[0]
    theirs = interchange.SubspaceInterchange(B)(x, mean.expand_as(x))
    torch.testing.assert_close(kept, theirs, atol=1e-6, rtol=1e-5)


def test_vectors_are_normalised_and_that_is_said(trace):
    with pytest.warns(UserWarning, match="lengths 2 to 2 were normalised"):
        directions = Directions(2 * torch.eye(32)[:2], 1, "read", trace.provenance)
    assert directions.vectors.norm(dim=1).tolist() == [1, 1]
    with pytest.raises(ValueError, match="not 0"):
        Directions(torch.zeros(1, 32), 1, "read", trace.provenance)


def test_directions_are_refused_by_other_weights(
    model, trace, tokenizer_folder, tmp_path
):
    directions = tlc.directions.directions_of(trace, 1, k=1)
    saved = Directions.load(directions.save(tmp_path / "directions.nc"))
    assert saved.hooks(model, 0.1)[0][0] == "blocks.1.hook_resid_pre"
    other = tiny.bridge(tiny.huggingface_model("llama", seed=1), tokenizer_folder)
    with pytest.raises(ValueError, match="other weights"):
        saved.hooks(other, 0.1)
    subspace = tlc.directions.shared_subspace([trace], rank=2, k=2)
    with pytest.raises(ValueError, match="other weights"):
        subspace.hooks(other)
    with pytest.raises(ValueError, match="other weights"):
        tlc.directions.ablate(other, "w1 w2", subspace)


@tiny.needs_hooked_transformer
def test_hooked_transformers_take_the_hooks():
    from zoo.models import hooked_transformer

    model = hooked_transformer(
        "HookedTransformer, parallel attention and MLP", 2, torch.float32
    )
    traced = tlc.trace(model, TOKENS)
    directions = tlc.directions.directions_of(traced, 1, k=1, side="write")
    logits = logits_with(model, directions.hooks(model, 0.2))
    X = traced.residual[2]
    moved = X + 0.2 * X.norm(dim=1, keepdim=True) * directions.vectors[0]
    torch.testing.assert_close(logits[0], traced.logits(moved), atol=1e-4, rtol=1e-4)


def directions(n=2, d=32, layer=1, dtype=torch.float32):
    vectors = torch.nn.functional.normalize(frame(n, d=max(n, d))[:d].mT.double())
    return Directions(vectors.to(dtype), layer, "read", {})


REFUSED = {
    "layer -1": (
        lambda model: directions(layer=-1),
        "`layer` must be at least 0, got -1",
    ),
    "none": (lambda model: directions()[:0], "`vectors` must hold at least one"),
    "no width": (
        lambda model: Directions(torch.ones(2, 0), 1, "read", {}),
        "`vectors` must hold at least one direction, got shape [2, 0]",
    ),
    "no such layer": (
        lambda model: directions(layer=2).hooks(model, 0.1),
        "of layer 2, and this model has 2 blocks",
    ),
    "another width": (
        lambda model: directions(d=16).hooks(model, 0.1),
        "these directions have width 16, and this model has width 32",
    ),
    "a width of 1": (
        lambda model: directions(n=1, d=1).hooks(model, 0.1),
        "these directions have width 1, and this model has width 32",
    ),
    "no model": (lambda model: directions().hooks(None, 0.1), "`model` must be a"),
    "a name": (lambda model: directions().hooks("gpt2", 0.1), "`model` must be a"),
    "no hooks": (
        lambda model: directions().hooks(torch.nn.Identity(), 0.1),
        "interventions need a TransformerBridge",
    ),
    **{
        f"scale {scale}": (
            lambda model, scale=scale: directions().hooks(model, scale),
            "`scale` must be ",
        )
        for scale in ("a", None, True, [0.1], np.nan, -np.inf, torch.tensor(np.nan))
    },
    **{
        f"position {position!r}": (
            lambda model, position=position: directions().hooks(model, 1, position),
            "`position` must be a whole number or None",
        )
        for position in ("a", 1.5, [0])
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_cannot_act_are_refused_in_a_line(model, name):
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as error:
        call(model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("n", "n_rows", "position", "message"),
    [
        (3, 2, None, "3 directions need a batch of 3 rows, one each, got 2"),
        (2, 1, None, "2 directions need a batch of 2 rows, one each, got 1"),
        (2, 3, -1, "2 directions need a batch of 2 rows, one each, got 3"),
        (2, 2, 99, "`position` must lie in [-8, 7] for a batch of 8 tokens, got 99"),
        (1, 3, -9, "`position` must lie in [-8, 7] for a batch of 8 tokens, got -9"),
    ],
)
def test_batches_that_hooks_do_not_fit_are_refused_in_a_line(
    model, n, n_rows, position, message
):
    hooks = directions(n).hooks(model, 0.1, position)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        logits_with(model, hooks, n_rows)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("scale", [1, np.float32(1), np.array(1.0), torch.tensor(1.0)])
def test_a_scale_is_any_number_and_a_position_counts_from_both_ends(model, scale):
    expected = logits_with(model, directions().hooks(model, 1.0, 0), n_rows=2)
    ours = logits_with(model, directions().hooks(model, scale, -8), n_rows=2)
    assert torch.equal(ours, expected)
    assert not torch.equal(ours, logits_with(model, [], n_rows=2))


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_directions_of_16_bits_are_float32_from_then_on(model, dtype, tmp_path):
    ours = directions(dtype=dtype)
    lengths = ours.vectors.norm(dim=1)
    assert lengths.tolist() == pytest.approx([1, 1], abs=1e-6)
    loaded = Directions.load(ours.save(tmp_path / "directions.nc"))
    assert torch.equal(loaded.vectors, ours.vectors)
    result = tlc.directions.steer(model, "w1 w2", ours, [0.1], n_draws=2)
    assert result.kl.isfinite().all()


def test_a_subspace_of_another_model_is_refused(trace, tokenizer_folder):
    found = tlc.directions.shared_subspace([trace], rank=2, k=4)
    unknown = tlc.directions.Subspace(
        **vars(found) | {"provenance": {"model": "unknown"}}
    )
    narrow = tiny.bridge(tiny.huggingface_model("gpt2", n_embd=16), tokenizer_folder)
    for call in (
        lambda model: unknown.hooks(model),
        lambda model: tlc.directions.ablate(model, "w1 w2", unknown),
    ):
        with pytest.raises(ValueError, match="width 32, and this model has width 16"):
            call(narrow)
        with pytest.raises(ValueError, match="interventions need"):
            call(torch.nn.Identity())
    with pytest.raises(TypeError, match="`model` must be a"):
        unknown.hooks(None)
    with pytest.raises(ValueError, match='`side` must be "read" or "write"'):
        unknown.hooks(trace.model, "both")


class Autoencoder(torch.nn.Module):
    """What SAELens puts in the place of a hook point."""

    def __init__(self, d: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = torch.nn.Linear(d, 4 * d)
            self.decoder = torch.nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.decoder(self.encoder(x).relu())


@pytest.mark.parametrize(
    "place", ["blocks.0.mlp.hook_out", "blocks.0.hook_out", "blocks.1.hook_in"]
)
def test_directions_made_with_a_module_spliced_in_are_refused_without_it(
    place, tokenizer_folder
):
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    path, _, name = place.rpartition(".")
    part = model.get_submodule(path)
    original = getattr(part, name)
    without = tlc.trace(model, TOKENS)
    assert "spliced" not in without.provenance

    spliced_in = Autoencoder(32)
    setattr(part, name, spliced_in)
    with_module = tlc.trace(model, TOKENS)
    assert not torch.allclose(with_module.residual, without.residual, atol=0.1)
    recorded = with_module.provenance["spliced"]
    assert list(recorded) == [place]
    assert recorded[place].startswith("Autoencoder ")
    directions = tlc.directions.directions_of(with_module, 1, 2)
    subspace = tlc.directions.shared_subspace([with_module], 2)
    assert len(directions.hooks(model, 0.1)) == 1

    setattr(part, name, Autoencoder(32, seed=1))
    with pytest.raises(ValueError, match=f"spliced in at {place}"):
        directions.hooks(model, 0.1)
    setattr(part, name, original)
    for refused in (
        lambda: directions.hooks(model, 0.1),
        lambda: tlc.directions.steer(model, "w1 w2", directions, [0.1]),
        lambda: tlc.directions.ablate(model, "w1 w2", subspace),
    ):
        with pytest.raises(ValueError, match=rf"spliced in at {place} .* has none"):
            refused()


@pytest.mark.parametrize("side", ["read", "write"])
def test_a_subspace_of_ones_own_is_removed_as_written_out(model, trace, side):
    """By hand: `X + f(X − XBBᵀ)` and `X + f(X)(I − BBᵀ)`, of columns that are not
    orthonormal.
    """
    columns = frame(3, seed=4) @ torch.tensor([[2.0, 1, 0], [0, 1, 0], [0, 0, 3]])
    own = tlc.directions.Subspace.of(columns, 1, side)
    Q = torch.linalg.pinv(columns)
    projector = columns @ Q
    X = trace.residual[1]
    f = trace.blocks[1]
    if side == "read":
        expected = X + f(X - X @ projector)
    else:
        expected = X + f(X) - f(X) @ projector
    torch.testing.assert_close(
        logits_with(model, own.hooks(model))[0],
        trace.logits(expected),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("side", ["read", "write"])
def test_ablation_of_ones_own_subspace_is_that_of_the_shared_one(model, trace, side):
    """A shared subspace given as one's own, with the same prompts: all conditions."""
    traces = [trace, tlc.trace(model, "w3 w4 w5 w9 w2")]
    shared = tlc.directions.shared_subspace(traces, rank=3, k=4)
    basis = shared.read if side == "read" else shared.write
    own = tlc.directions.Subspace.of(basis, [0, 1], side, traces=traces, name="mine")
    prompts = ["w6 w1 w7 w8", "w2 w9 w11 w4 w5"]
    expected = tlc.directions.ablate(model, prompts, shared, side=side, n_draws=2)
    result = tlc.directions.ablate(model, prompts, own, n_draws=2)
    assert result.kinds == expected.kinds
    assert result.side == side
    for effect in ("loss_change", "kl", "removed"):
        torch.testing.assert_close(
            getattr(result, effect), getattr(expected, effect), atol=1e-5, rtol=1e-4
        )
    assert result.provenance["directions"] == "mine"
    assert result.provenance["model"] == shared.provenance["model"]


def test_ones_own_subspace_takes_controls_from_the_prompts(model, tmp_path):
    prompts = ["w6 w1 w7 w8", "w2 w9 w11 w4 w5"]
    own = tlc.directions.Subspace.of(frame(2), 1, "read")
    result = tlc.directions.ablate(model, prompts, own, n_draws=2)
    assert len(set(result.kinds)) == 7
    # μ is 0: what its hooks do, and nothing else.
    tokens = tlc.trace(model, prompts[0]).tokens[None]
    with torch.no_grad(), model.hooks(fwd_hooks=own.hooks(model)):
        logits = model(tokens)[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])
    change = float(loss - result.loss[0])
    assert result.of("shared")[0] == pytest.approx(change, abs=1e-5)
    # The controls are those of the same subspace with these prompts as its traces.
    traces = [tlc.trace(model, prompt) for prompt in prompts]
    with_traces = tlc.directions.Subspace.of(frame(2), 1, "write", traces=traces)
    own = tlc.directions.Subspace.of(frame(2), 1, "write")
    for kind in ("span", "unshared", "low_gain"):
        np.testing.assert_allclose(
            tlc.directions.ablate(model, prompts, own, n_draws=2).of(kind),
            tlc.directions.ablate(model, prompts, with_traces, n_draws=2).of(kind),
            atol=1e-6,
        )
    loaded = tlc.directions.Subspace.load(own.save(tmp_path / "own.nc"))
    assert torch.equal(loaded.bases, own.bases)
    assert (loaded.side, loaded.layers, repr(loaded)) == ("write", (1,), repr(own))


@pytest.mark.parametrize(
    ("basis", "layer", "message"),
    [
        (torch.eye(3, 32), 0, "got shape [3, 32]: transpose it"),
        (torch.zeros(32, 1), 0, "`basis` must be finite and not 0"),
        (torch.eye(32)[:, [0, 1, 0]], 0, "of which one is in the span of the others"),
        (torch.eye(32)[:, :2], -1, "counted from 0, got [-1]"),
        (torch.eye(32)[:, :2], [], "counted from 0, got []"),
        (torch.eye(32)[:, :2], [1, 1], "each layer once, got [1, 1]"),
    ],
)
def test_a_basis_that_is_none_is_refused_in_a_line(basis, layer, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tlc.directions.Subspace.of(basis, layer)
    assert "\n" not in str(error.value)


BASIS = torch.eye(32)[:, :2]


@pytest.mark.parametrize(
    ("basis", "layer", "message"),
    [
        (BASIS.tolist(), 0, "`basis` must be a floating-point torch tensor"),
        (BASIS.int(), 0, "convert it with `.float()`"),
        (BASIS.bool(), 0, "convert it with `.float()`"),
        (np.eye(32, dtype=int)[:, :2], 0, "`basis` must be a floating-point"),
        (BASIS.to(torch.complex64), 0, "`basis` must be a floating-point"),
        (BASIS.to_sparse(), 0, "a dense one is wanted"),
        (BASIS[:, 0], 0, "`basis` must have shape [d_model rank], got [32]"),
        ([[1.0, 2.0], [3.0]], 0, "`basis` must be a floating-point"),
        ("text", 0, "`basis` must be a floating-point"),
        (None, 0, "`basis` must be a floating-point"),
        (BASIS, "0", "`layer` must be"),
        (BASIS, 1.5, "`layer` must be"),
        (BASIS, True, "`layer` must be"),
        (BASIS, None, "`layer` must be"),
    ],
)
def test_what_is_no_basis_is_refused_in_a_line(as_a_user, basis, layer, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as error:
        tlc.directions.Subspace.of(basis, layer)
    assert "\n" not in str(error.value)


def test_an_array_is_a_basis(as_a_user):
    expected = tlc.directions.Subspace.of(BASIS, [0, 1])
    for basis in (BASIS.numpy(), BASIS.double(), BASIS.half(), BASIS.requires_grad_()):
        own = tlc.directions.Subspace.of(basis, np.array([0, 1]))
        assert torch.equal(own.bases, expected.bases)
        assert own.layers == (0, 1)
    assert tlc.directions.Subspace.of(BASIS, np.int64(1)).layers == (1,)
