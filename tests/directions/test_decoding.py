"""Decoding against TransformerLens's unembedding, derivatives of logits, and the parts of
the stream.
"""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch
import transformer_lens

import tiny
import tl_coupling as tlc
from tl_coupling.directions.decoding import _groups
from tl_coupling.jacobians import block_directions

K = 3


def seeded():
    return torch.Generator().manual_seed(0)


def adding(vector):
    """Return a hook that moves the stream at the last token."""

    def add(stream, hook):
        stream = stream.clone()
        stream[0, -1] += vector
        return stream

    return add


@pytest.fixture(scope="module")
def model(tokenizer_folder):
    return tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)


@pytest.fixture(scope="module")
def trace(model):
    return tlc.trace(model, "w3 w14 w15 w92 w65 w35")


@pytest.fixture(scope="module")
def decoded(trace):
    return tlc.directions.decode(trace, 0, K, n_tokens=99, n_draws=6)


def logits_of(decoded, way):
    """All logits of each direction, from the lists of all tokens at the first end."""
    ids = torch.tensor(decoded.token_ids)
    w = decoded.ways.index(way)
    logits = torch.full((K, max(decoded.token_ids) + 1), torch.nan)
    for i in range(K):
        logits[i, ids[decoded.tokens[w, i, 0]]] = decoded.logits[w, i, 0]
    return logits


@pytest.mark.both_lines
def test_the_raw_way_is_the_unembedding_of_transformerlens(model, trace, decoded):
    """`SVDInterpreter` multiplies `W_Uᵀ` with columns: the same convention."""
    write = block_directions(trace, 0, K).write
    expected = model.W_U.detach().mT @ write
    found = logits_of(decoded, "unembedding")
    seen = found.isfinite()
    torch.testing.assert_close(
        found[seen], expected.mT[:, : found.shape[1]][seen], atol=1e-6, rtol=1e-4
    )


@pytest.mark.both_lines
@pytest.mark.parametrize("way", ["final_norm", "network"])
def test_other_ways_are_central_differences_of_logits(model, trace, decoded, way):
    """Of the model's own logits, with the stream moved by a hook of TransformerLens."""
    name = (
        "blocks.1.hook_resid_post"
        if way == "final_norm"
        else "blocks.0.hook_resid_post"
    )
    write = block_directions(trace, 0, K).write
    epsilon = 1e-2

    def logits(direction, sign):
        def add(stream, hook):
            stream = stream.clone()
            stream[0, -1] += sign * epsilon * direction
            return stream

        with torch.no_grad(), model.hooks(fwd_hooks=[(name, add)]):
            return model(trace.tokens[None])[0, -1]

    found = logits_of(decoded, way)
    for i in range(K):
        expected = logits(write[:, i], 1) - logits(write[:, i], -1)
        expected = expected[: found.shape[1]] / (2 * epsilon)
        seen = found[i].isfinite()
        error = (found[i][seen] - expected[seen]).norm() / expected[seen].norm()
        assert float(error) < 1e-3


@pytest.mark.both_lines
@pytest.mark.parametrize("layer", [0, 1])
def test_components_sum_to_the_stream(trace, layer):
    decoded = tlc.directions.decode(trace, layer, K, n_draws=2)
    read = block_directions(trace, layer, K).read
    torch.testing.assert_close(
        decoded.reads.sum(1), trace.residual[layer, -1] @ read, atol=1e-5, rtol=1e-4
    )
    expected = ["embed"]
    if layer:
        expected += ["L0H0", "L0H1", "L0H2", "L0H3", "0_mlp_out"]
    assert list(decoded.components) == [*expected, "rest"]
    # A Llama has no biases: nothing is left.
    assert float(decoded.reads[:, -1].abs().max()) < 1e-5


def test_heads_are_what_transformerlens_says(model, trace):
    decoded = tlc.directions.decode(trace, 1, K, n_draws=2)
    read = block_directions(trace, 1, K).read
    with torch.no_grad():
        _, cache = model.run_with_cache(trace.tokens[None])
    head = cache.stack_head_results(1)[2, 0, -1]
    i = decoded.components.index("L0H2")
    torch.testing.assert_close(decoded.reads[:, i], head @ read, atol=1e-5, rtol=1e-4)


def test_statistics_are_those_of_scipy(trace, decoded):
    logits = (block_directions(trace, 0, K).write.mT @ trace.model.W_U.detach()).numpy()
    kurtosis = scipy.stats.kurtosis(logits.astype(float), axis=1)
    np.testing.assert_allclose(decoded.kurtosis[0], kurtosis, rtol=1e-3, atol=1e-4)
    next_token = int(trace.logits(trace.residual[-1, -1]).argmax())
    place = scipy.stats.rankdata(-logits, axis=1, method="min")[:, next_token]
    assert decoded.next_token_rank[0, :, 0].tolist() == place.astype(int).tolist()


def test_gains_that_are_close_are_one_group():
    gains = torch.tensor([2.0, 1.99, 1.975, 1.5, 1.0, 0.995])
    assert _groups(gains).tolist() == [0, 0, 0, 1, 2, 2]


def test_other_prompts_and_a_lens(model, trace):
    others = [tlc.trace(model, text) for text in ("w1 w2", "w5 w6 w7")]
    lens = tlc.trajectories.product_lens([trace])
    decoded = tlc.directions.decode(
        trace, 0, K, others=others, lens=lens, n_draws=4, n_tokens=2
    )
    assert decoded.ways[-1] == "lens"
    # A lens of this prompt alone is the rest of the network.
    torch.testing.assert_close(
        decoded.logits[-1], decoded.logits[2], atol=1e-4, rtol=1e-3
    )
    n_drawn = decoded.control_kurtosis[:, 0].isfinite().sum(1)
    assert n_drawn.tolist() == [4, 4, 2 * K]
    with pytest.raises(TypeError, match="`others` must be"):
        tlc.directions.decode(trace, 0, K, others=["w1"])
    with pytest.raises(ValueError, match="layer"):
        tlc.directions.decode(trace, 5, K)


@pytest.mark.parametrize("architecture", ["gemma2", "olmo2", "exaone4"])
def test_heads_are_what_they_add_behind_a_norm(architecture, tokenizer_folder):
    """Of the stream of the original model: the weights of its norm by hand."""
    original = tiny.huggingface_model(architecture)
    traced = tlc.trace(tiny.bridge(original, tokenizer_folder), tiny.TOKENS)
    layer = tiny.layers_of(original)[0]
    seen = {}

    def note_z(_, args):
        seen["z"] = args[0][0, -1]

    def note_norm(_, args, output):
        seen["attended"] = args[0][0, -1]
        seen["written"] = output[0, -1]

    layer.self_attn.o_proj.register_forward_pre_hook(note_z)
    layer.post_attention_layernorm.register_forward_hook(note_norm)
    with torch.no_grad():
        original(torch.tensor([tiny.TOKENS]))
    W_O = layer.self_attn.o_proj.weight.detach().unflatten(1, (4, -1))
    heads = torch.einsum("dhz,hz->hd", W_O, seen["z"].unflatten(0, (4, -1)))
    norm = layer.post_attention_layernorm
    weight = norm.weight.detach() + (1 if architecture == "gemma2" else 0)
    epsilon = norm.eps if architecture == "gemma2" else norm.variance_epsilon
    added = heads * weight / (seen["attended"].square().mean() + epsilon).sqrt()
    torch.testing.assert_close(added.sum(0), seen["written"], atol=1e-4, rtol=1e-3)

    decoded = tlc.directions.decode(traced, 1, K, n_draws=2)
    read = block_directions(traced, 1, K).read
    places = [decoded.components.index(f"L0H{head}") for head in range(4)]
    torch.testing.assert_close(
        decoded.reads[:, places], (added @ read).mT, atol=1e-4, rtol=1e-3
    )
    # All of the stream is one component or another.
    assert float(decoded.reads[:, -1].abs().max()) < 1e-4


def test_an_unembedding_that_cannot_be_differentiated_is_said(
    trace: tlc.Trace,
) -> None:
    """torch.func has no numpy."""
    kept = []
    unembedding = trace.model.original_model.get_output_embeddings()
    handle = unembedding.register_forward_pre_hook(
        lambda _, args: kept.append(args[0].detach().cpu().numpy())
    )
    try:
        with pytest.raises(
            tlc.gradients.DerivativeError,
            match="norm or unembedding cannot be differentiated",
        ):
            tlc.directions.decode(trace, 0, K, n_tokens=99, n_draws=6)
    finally:
        handle.remove()
    assert kept


def interpreted(model, vector_type, head=None):
    """TransformerLens's own logits of a weight's singular vectors, `[d_vocab k]`."""
    interpreter = transformer_lens.SVDInterpreter(model)
    return interpreter.get_singular_vectors(vector_type, 1, K, head_index=head)[:, 0]


@pytest.mark.both_lines
@pytest.mark.parametrize("vector_type", ["OV", "w_in", "w_out"])
def test_singular_vectors_of_weights_are_decoded_as_by_transformerlens(
    model, trace, vector_type
):
    """`SVDInterpreter` takes the sides that write, and of `w_in` the one that reads."""
    block = model.blocks[1]
    if vector_type == "OV":
        W = model.W_V[1, 0] @ model.W_O[1, 0]
    elif vector_type == "w_in":
        W = block.mlp.W_in.mT * block.ln2.w
    else:
        W = block.mlp.W_out
    Vh = torch.linalg.svd(W.detach().float(), full_matrices=False).Vh
    side = "read" if vector_type == "w_in" else "write"
    directions = tlc.directions.Directions.of(Vh[:K], 1, side, name=vector_type)
    decoded = tlc.directions.decode(trace, directions, n_tokens=99, n_draws=2)
    # Of grouped queries it takes the head of that number on both sides: only the first
    # head's are the same.
    theirs = interpreted(model, vector_type, head=0).mT
    ours = logits_of(decoded, "unembedding")
    seen = ours.isfinite()
    theirs = theirs[:, : ours.shape[1]]
    # The sign of a singular vector is arbitrary.
    signs = (ours.nan_to_num() * theirs).sum(1, keepdim=True).sign()
    torch.testing.assert_close(ours[seen], (signs * theirs)[seen], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("side", ["read", "write"])
def test_directions_of_ones_own_are_decoded_where_they_are(model, trace, side):
    """Central differences of the model's logits, and products with the stream."""
    vectors = torch.linalg.qr(torch.randn(32, K, generator=seeded())).Q.mT
    directions = tlc.directions.Directions.of(vectors, 1, side)
    decoded = tlc.directions.decode(trace, directions, n_tokens=99, n_draws=2)
    found = logits_of(decoded, "network")
    epsilon = 1e-2
    for i in range(K):
        moved = []
        for sign in (1, -1):
            hooks = [(directions.hook_point, adding(sign * epsilon * vectors[i]))]
            with torch.no_grad(), model.hooks(fwd_hooks=hooks):
                moved.append(model(trace.tokens[None])[0, -1])
        expected = (moved[0] - moved[1])[: found.shape[1]] / (2 * epsilon)
        seen = found[i].isfinite()
        error = (found[i][seen] - expected[seen]).norm() / expected[seen].norm()
        assert float(error) < 1e-3
    x = trace.residual[1 if side == "read" else 2, -1]
    torch.testing.assert_close(decoded.reads.sum(1), vectors @ x, atol=1e-5, rtol=1e-4)
    J = tlc.block_jacobian(trace, 1)
    gains = (J @ vectors.mT if side == "read" else J.mT @ vectors.mT).norm(dim=0)
    torch.testing.assert_close(decoded.gains, gains)
    assert decoded.groups.tolist() == [0, 1, 2]
    assert decoded.provenance["model"] == trace.provenance["model"]


def test_directions_that_were_found_are_decoded_as_the_block_is(trace):
    """Tokens of what block 0 writes, and components of what block 1 reads."""
    written = tlc.directions.directions_of(trace, 0, K, side="write")
    ours = tlc.directions.decode(trace, written, n_tokens=4, n_draws=2)
    expected = tlc.directions.decode(trace, 0, K, n_tokens=4, n_draws=2)
    torch.testing.assert_close(ours.logits, expected.logits)
    torch.testing.assert_close(ours.gains, expected.gains, atol=1e-5, rtol=1e-4)
    assert ours.texts == expected.texts
    read = tlc.directions.directions_of(trace, 1, K)
    ours = tlc.directions.decode(trace, read, k=2, n_draws=2)
    expected = tlc.directions.decode(trace, 1, 2, n_draws=2)
    torch.testing.assert_close(ours.reads, expected.reads)


def test_what_directions_cannot_have_is_refused(trace):
    own = tlc.directions.Directions.of(torch.eye(32)[:2], 0, "read")
    lens = tlc.trajectories.product_lens([trace])
    for arguments, message in (
        ({"others": [trace]}, "directions are the same on all"),
        ({"k": 3}, "at most 2, the number of directions"),
        ({"lens": lens}, "nothing for what block 0 reads"),
    ):
        with pytest.raises(ValueError, match=message):
            tlc.directions.decode(trace, own, **arguments)
    narrow = tlc.directions.Directions.of(torch.eye(8)[:2], 0)
    with pytest.raises(ValueError, match="width 8, and this model has width 32"):
        tlc.directions.decode(trace, narrow)
    # A lens of this prompt alone is the rest of the network, from the block before.
    read = tlc.directions.Directions.of(torch.eye(32)[:2], 1, "read")
    decoded = tlc.directions.decode(trace, read, lens=lens, n_draws=2)
    torch.testing.assert_close(
        decoded.logits[-1], decoded.logits[2], atol=1e-4, rtol=1e-3
    )


def test_a_model_on_disk_is_decoded_as_one_in_memory(folder_model):
    """Nothing is read off weights that are not there: they are NaN in between."""
    in_memory, on_disk = [
        tlc.directions.decode(
            tlc.trace(tlc.load_model(str(folder_model), memory=memory), tiny.TOKENS),
            layer=1,
            k=2,
            n_draws=2,
        )
        for memory in ("resident", "stream")
    ]
    for name in ("gains", "tokens", "logits", "kurtosis", "next_token_rank"):
        torch.testing.assert_close(getattr(on_disk, name), getattr(in_memory, name))
    assert on_disk.components == ("embed", "0_attn_out", "0_mlp_out", "rest")
    assert in_memory.components[1:5] == ("L0H0", "L0H1", "L0H2", "L0H3")
    heads = in_memory.reads[:, 1:5].sum(1)
    torch.testing.assert_close(on_disk.reads[:, 1], heads, atol=1e-5, rtol=1e-4)
    for component in (0, -2):
        torch.testing.assert_close(
            on_disk.reads[:, component], in_memory.reads[:, component]
        )


def test_a_kurtosis_that_is_not_known_stands_out_from_nothing(tiny_trace):
    """No draw is above NaN: the share of those was 0, as of a direction that stands out."""
    decoded = tlc.directions.decode(tiny_trace, 1, k=2, n_draws=4)
    shares = [decoded.kurtosis_exceeded(0, i) for i in (0, 1)]
    drawn = decoded.control_kurtosis[0, 0].numpy()
    for i, share in enumerate(shares):
        assert share == np.mean(drawn >= float(decoded.kurtosis[0, i]))
    kurtosis = decoded.kurtosis.clone()
    kurtosis[0, 1] = torch.nan
    planted = dataclasses.replace(decoded, kurtosis=kurtosis)
    assert planted.kurtosis_exceeded(0, 0) == shares[0]
    assert math.isnan(planted.kurtosis_exceeded(0, 1))
    # Without other prompts that control has no draws.
    assert math.isnan(decoded.kurtosis_exceeded(0, 0, "other_prompts"))
    table = planted.to_dataframe().query("way == 'unembedding' and direction == 1")
    assert table.kurtosis_exceeded_by_random.isna().all()


@pytest.fixture(scope="module")
def subspace(model):
    traces = [tlc.trace(model, text) for text in ("w3 w14 w15 w9", "w5 w8 w2")]
    return tlc.directions.shared_subspace(traces, rank=K, k=4)


def moved_logits(network, layer, side, vector, tokens):
    """HuggingFace's logits of the last token, with the stream moved there: a hook of
    torch behind a layer, or before it.
    """

    def add_behind(module, arguments, output):
        stream = output[0] if isinstance(output, tuple) else output
        stream[0, -1] += vector

    def add_before(module, arguments):
        arguments[0][0, -1] += vector

    block = network.model.layers[layer]
    handle = (
        block.register_forward_hook(add_behind)
        if side == "write"
        else block.register_forward_pre_hook(add_before)
    )
    with torch.no_grad():
        logits = network(torch.tensor([tokens])).logits[0, -1]
    handle.remove()
    return logits


@pytest.mark.parametrize(
    ("side", "layer"), [("write", 1), ("read", 1), ("write", 0), (None, 1)]
)
def test_a_subspace_is_decoded_as_its_directions_are_in_plain_torch(
    trace, subspace, side, layer
):
    """`u W_U`, the norm's derivative by hand, and differences of HuggingFace's logits;
    neither TransformerLens nor a Jacobian of ours has a part in them.
    """
    network = tiny.huggingface_model("llama").eval()
    basis = (subspace.read if side == "read" else subspace.write).double()
    wanted = subspace.directions(layer=layer, side=side) if layer == 0 else subspace
    options = {} if layer == 0 else {"side": side}
    decoded = tlc.directions.decode(trace, wanted, n_tokens=99, n_draws=2, **options)

    W_U = network.lm_head.weight.detach().double()
    w = network.model.norm.weight.detach().double()
    streams = []
    handle = network.model.layers[-1].register_forward_hook(
        lambda module, arguments, output: streams.append(
            output[0] if isinstance(output, tuple) else output
        )
    )
    tokens = trace.tokens.tolist()
    with torch.no_grad():
        network(torch.tensor([tokens]))
    handle.remove()
    x = streams[0].reshape(-1, 32)[-1].double()
    scale = (x.square().mean() + network.config.rms_norm_eps).sqrt()
    # The derivative of `w x / scale` along u.
    normed = w[:, None] * (basis / scale - x[:, None] * (x @ basis) / (32 * scale**3))
    differences = []
    epsilon = 1e-2
    for u in basis.float().mT:
        above, below = (
            moved_logits(network, layer, side or "write", sign * epsilon * u, tokens)
            for sign in (1, -1)
        )
        differences.append((above - below).double() / (2 * epsilon))
    expected = {
        "unembedding": (W_U @ basis).mT,
        "final_norm": (W_U @ normed).mT,
        "network": torch.stack(differences),
    }
    for way, logits in expected.items():
        found = logits_of(decoded, way).double()
        seen = found.isfinite()
        assert int(seen.sum()) > 50
        logits = logits[:, : found.shape[1]]
        error = (found[seen] - logits[seen]).norm() / logits[seen].norm()
        assert float(error) < 1e-3
    assert decoded.layer == layer
    behind = 0 if side == "read" else 1
    products = trace.residual[layer + behind, -1].double() @ basis
    torch.testing.assert_close(
        decoded.reads.sum(1).double(), products, atol=1e-5, rtol=1e-4
    )


def test_a_subspace_of_ones_own_is_decoded_on_its_side(trace, tmp_path):
    basis = torch.linalg.qr(torch.randn(32, K, generator=seeded())).Q
    own = tlc.directions.Subspace.of(basis, [0, 1], "read", name="probes")
    decoded = tlc.directions.decode(trace, own, k=2, n_tokens=3, n_draws=2)
    assert decoded.provenance["hook_point"] == "blocks.1.hook_resid_pre"
    assert decoded.provenance["own"]
    assert decoded.provenance["directions"] == "probes"
    products = trace.residual[1, -1] @ basis[:, :2]
    torch.testing.assert_close(decoded.reads.sum(1), products, atol=1e-5, rtol=1e-4)
    loaded = tlc.directions.Decoded.load(decoded.save(tmp_path / "decoded.nc"))
    assert loaded.provenance["subspace"] == decoded.provenance["subspace"]


def test_what_a_subspace_cannot_have_is_refused(trace, subspace):
    with pytest.raises(ValueError, match="`side` says which directions of a subspace"):
        tlc.directions.decode(trace, 0, K, side="write")
    with pytest.raises(ValueError, match="`side` says which directions of a subspace"):
        tlc.directions.decode(trace, subspace.directions(), side="write")
    with pytest.raises(
        ValueError, match=r"one of the layers of the subspace, \[0, 1\]"
    ):
        subspace.directions(layer=2)
    with pytest.raises(ValueError, match="at most 3, the number of directions"):
        tlc.directions.decode(trace, subspace, k=4)


def test_above_a_control_are_those_above_its_largest_draw(tiny_trace):
    decoded = tlc.directions.decode(tiny_trace, 1, k=3, n_draws=4)
    largest = float(decoded.control_kurtosis[0, 2].max())
    kurtosis = decoded.kurtosis.clone()
    # Above, as large as a draw, and not known.
    kurtosis[2] = torch.tensor([largest + 0.1, largest, torch.nan])
    planted = dataclasses.replace(decoded, kurtosis=kurtosis)
    assert planted.above_control(2) == [0]
    assert planted.above_control(2, "other_prompts") == []
