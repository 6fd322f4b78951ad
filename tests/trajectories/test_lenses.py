"""Products of blocks against TransformerLens's own lens, fitted on one valid token."""

import pytest
import torch

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import entropy_by_depth, product_lens

pytestmark = pytest.mark.both_lines

PROMPTS = ["w3 w14 w15 w92 w7", "w65 w35 w2 w8"]
N_LAYERS = 3


def bridge(architecture, folder, **config):
    original = tiny.huggingface_model(
        architecture, seed=1, num_hidden_layers=N_LAYERS, **config
    )
    return tiny.bridge(original, folder)


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return bridge("llama", tokenizer_folder)


def their_lens(model, prompts):
    """TransformerLens's lens of the last token but one of each prompt."""
    from transformer_lens.tools.analysis import JacobianLens

    fitted = [
        JacobianLens.fit(
            model,
            [prompt],
            corpus="c",
            skip_first_positions=model.to_tokens(prompt).shape[1] - 2,
            show_progress=False,
        )
        for prompt in prompts
    ]
    means = {
        layer: sum(lens.jacobians[layer] for lens in fitted) / len(fitted)
        for layer in fitted[0].jacobians
    }
    return JacobianLens(
        means, n_prompts=len(prompts), d_model=model.cfg.d_model, metadata={}
    )


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "olmo2"])
def test_the_product_is_their_lens_on_one_token(architecture, tokenizer_folder):
    model = bridge(architecture, tokenizer_folder)
    theirs = their_lens(model, PROMPTS)
    # `fit` puts a BOS token first: the same tokens.
    traces = (tlc.trace(model, model.to_tokens(prompt)) for prompt in PROMPTS)
    ours = product_lens(traces, position=-2, progress=False)
    assert ours.source_layers == theirs.source_layers == [0, 1]
    assert ours.n_prompts == 2
    for layer, matrix in theirs.jacobians.items():
        assert (ours.jacobians[layer] - matrix).abs().max() <= 2e-6
        # It is far from what has no product in it.
        assert (matrix - torch.eye(len(matrix))).norm() > 1e-2


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "olmo2"])
def test_effects_on_later_tokens_are_their_fit(architecture, skip, tokenizer_folder):
    from transformer_lens.tools.analysis import JacobianLens

    model = bridge(architecture, tokenizer_folder)
    theirs = JacobianLens.fit(
        model, PROMPTS, corpus="c", skip_first_positions=skip, show_progress=False
    )
    traces = [tlc.trace(model, model.to_tokens(prompt)) for prompt in PROMPTS]
    ours = product_lens(traces, tokens="later", skip_first_positions=skip)
    assert ours.source_layers == theirs.source_layers == [0, 1]
    # TransformerLens 3.9 does not say how a lens was made.
    if hasattr(theirs, "estimator"):
        assert ours.estimator == theirs.estimator
    same_token = product_lens(traces, position=-2)
    for layer, matrix in theirs.jacobians.items():
        assert (ours.jacobians[layer] - matrix).abs().max() <= 1e-5
        assert (matrix - same_token.jacobians[layer]).abs().max() > 1e-3
    # They are not merged: what made them is said.
    with pytest.raises(ValueError, match="same provenance metadata"):
        JacobianLens.merge([ours, theirs])


def test_short_prompts_are_skipped_as_they_are_by_fit(model):
    traces = [tlc.trace(model, model.to_tokens(prompt)) for prompt in PROMPTS]
    with pytest.warns(UserWarning, match="a prompt of 5 tokens is skipped"):
        lens = product_lens(traces, tokens="later", skip_first_positions=4)
    assert lens.n_prompts == 1
    with (
        pytest.warns(UserWarning, match="is skipped"),
        pytest.raises(ValueError, match="wanted at least 18 tokens"),
    ):
        product_lens(traces, tokens="later")


def test_merging_refuses_other_estimators(model, tmp_path):
    from transformer_lens.tools.analysis import JacobianLens

    traces = [tlc.trace(model, prompt) for prompt in PROMPTS]
    first, second, both = (
        product_lens(some, corpus="c") for some in (traces[:1], traces[1:], traces)
    )
    merged = JacobianLens.merge([first, second])
    torch.testing.assert_close(merged.jacobians, both.jacobians)
    assert merged.metadata == both.metadata
    fitted = JacobianLens.fit(
        model, PROMPTS[:1], corpus="c", skip_first_positions=1, show_progress=False
    )
    with pytest.raises(ValueError, match="same provenance metadata"):
        JacobianLens.merge([first, fitted])
    first.save(str(tmp_path / "lens.pt"), dtype=torch.float32)
    loaded = JacobianLens.load(str(tmp_path / "lens.pt"))
    assert loaded.metadata["estimator"] == "tl_coupling.product_of_blocks"
    torch.testing.assert_close(loaded.jacobians, first.jacobians)


def test_entropy_is_that_of_their_readout(model):
    trace = tlc.trace(model, PROMPTS[0])
    lens = product_lens([tlc.trace(model, PROMPTS[1])])
    readout = lens.readout(model, trace.tokens[None], return_full_logits=True)
    entropies = entropy_by_depth(trace, lens)
    for layer, logits in readout.lens_logits.items():
        expected = torch.distributions.Categorical(logits=logits.double()).entropy()
        torch.testing.assert_close(
            entropies[layer + 1].double(), expected, atol=1e-5, rtol=1e-5
        )
    assert entropies[0].isnan().all()
    own = entropy_by_depth(trace)
    torch.testing.assert_close(entropies[-1], own[-1])
    assert (entropies[1:-1] - own[1:-1]).abs().max() > 1e-4
    del lens.jacobians[0]
    assert entropy_by_depth(trace, lens).isnan().all(1).tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_what_has_no_lens_is_refused(model, tokenizer_folder):
    with pytest.raises(ValueError, match="`traces` is empty"):
        product_lens([])
    with pytest.raises(TypeError, match="iterable of traces, got str"):
        product_lens(PROMPTS)
    normed = tlc.trace(model, PROMPTS[0], final_norm=True)
    with pytest.raises(ValueError, match="before the final norm"):
        product_lens([normed])
    trace = tlc.trace(model, PROMPTS[0])
    other = bridge("llama", tokenizer_folder, rms_norm_eps=1e-3)
    other_trace = tlc.trace(other, PROMPTS[0])
    with pytest.raises(ValueError, match="of one model"):
        product_lens([trace, other_trace])
    blocks = [torch.nn.Identity(), torch.nn.Identity()]

    def run():
        x = torch.ones(1, 2, 4)
        for block in blocks:
            x = block(x)

    lens = product_lens([trace])
    # Of blocks that add nothing it is the identity.
    of_modules = product_lens([tlc.trace_modules(blocks, run)])
    assert torch.equal(of_modules.jacobians[0], torch.eye(4))
    lens.metadata["weights_digest"] = "another"
    with pytest.raises(ValueError, match="with other weights"):
        entropy_by_depth(trace, lens)
    with pytest.raises(TypeError, match="`lens` must be a JacobianLens or None, got"):
        entropy_by_depth(trace, 3)
    for skip in (-1, -30):
        with pytest.raises(
            ValueError, match="`skip_first_positions` must be at least 0"
        ):
            product_lens([trace], tokens="later", skip_first_positions=skip)
    shallow = tiny.bridge(
        tiny.huggingface_model("llama", num_hidden_layers=1), tokenizer_folder
    )
    for tokens in ("same", "later"):
        with pytest.raises(ValueError, match="at least 2 blocks, got 1"):
            product_lens([tlc.trace(shallow, PROMPTS[0])], tokens=tokens)


class ReferenceLens:
    """The lens of the reference implementation: matrices, and no metadata."""

    def __init__(self, jacobians, n_prompts, d_model):
        self.jacobians = jacobians
        self.source_layers = list(range(len(jacobians)))
        self.n_prompts = n_prompts
        self.d_model = d_model

    def transport(self, residual, layer):
        return residual @ self.jacobians[layer].T


def test_a_lens_of_the_reference_implementation_is_read_in_memory(model, tmp_path):
    """As its own file would be, which TransformerLens reads."""
    from transformer_lens.tools.analysis import JacobianLens

    traces = [
        tlc.trace(model, " ".join(f"w{i}" for i in range(a, a + 20))) for a in (1, 9)
    ]
    lens = product_lens(traces, tokens="later")
    J = {layer: matrix.clone() for layer, matrix in lens.jacobians.items()}
    in_memory = ReferenceLens(J, 2, 32)
    file = tmp_path / "lens.pt"
    facts = {"n_prompts": 2, "source_layers": sorted(J), "d_model": 32}
    torch.save({"J": J, **facts}, file)
    from_file = JacobianLens.load(str(file))
    x = entropy_by_depth(traces[0], in_memory)
    assert torch.equal(
        x.nan_to_num(-1), entropy_by_depth(traces[0], from_file).nan_to_num(-1)
    )
    audit = tlc.trajectories.lens_audit(in_memory, traces)
    of_file = tlc.trajectories.lens_audit(from_file, traces)
    assert torch.equal(audit.distance, of_file.distance)
    assert audit.lens_n_prompts == 2
    directions = tlc.directions.directions_of(traces[0], 1, k=1)
    decoded = tlc.directions.decode(traces[0], directions, lens=in_memory)
    assert "lens" in decoded.ways


def test_a_lens_of_another_make_is_refused_with_the_way_to_go_on(model):
    trace = tlc.trace(model, "w1 w2 w3")
    for jacobians in ([torch.eye(32)], {}, {0: torch.eye(32).numpy()}):
        with pytest.raises(
            TypeError,
            match=r"`lens\.jacobians` must map layers to tensors.*: save the lens",
        ):
            entropy_by_depth(trace, ReferenceLens(jacobians, 1, 32))
    uneven = ReferenceLens({0: torch.eye(32), 1: torch.eye(16)}, 1, 32)
    with pytest.raises(ValueError, match="`lens` has matrices of other shapes"):
        entropy_by_depth(trace, uneven)


def test_modules_have_a_lens_of_their_own(tokenizer_folder):
    """The same matrices as of the model that they are from."""
    hf_model = tiny.huggingface_model("llama", num_hidden_layers=3)
    ids = torch.tensor([[3, 14, 15, 92]])
    of_model = product_lens([tlc.trace(hf_model, ids)])
    layers = hf_model.model.layers
    traced = tlc.trace_modules(layers, lambda: hf_model(ids, use_cache=False))
    of_modules = product_lens([traced])
    for layer, J in of_model.jacobians.items():
        torch.testing.assert_close(of_modules.jacobians[layer], J)
    assert of_modules.metadata["weights_digest"] == traced.provenance["weights_digest"]
    with pytest.raises(ValueError, match="logits"):
        entropy_by_depth(traced, of_modules)
