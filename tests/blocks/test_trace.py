"""What a trace holds, and what it refuses."""

import base64
import html
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc

pytestmark = pytest.mark.both_lines


@pytest.fixture
def model(tokenizer_folder: Path) -> nn.Module:
    return tiny.bridge(tiny.huggingface_model("gpt2"), tokenizer_folder)


def test_the_stream_is_the_sum_of_what_the_blocks_add(tiny_trace: tlc.Trace) -> None:
    for layer, f in enumerate(tiny_trace.blocks):
        step = tiny_trace.residual[layer + 1] - tiny_trace.residual[layer]
        torch.testing.assert_close(
            f(tiny_trace.residual[layer]), step, rtol=0, atol=1e-5
        )


def test_final_norm_is_huggingfaces_last_hidden_state(model: nn.Module) -> None:
    hidden = tiny.huggingface_model("gpt2")(
        torch.tensor([tiny.TOKENS]), output_hidden_states=True
    ).hidden_states
    raw, normed = (
        tlc.trace(model, tiny.TOKENS),
        tlc.trace(model, tiny.TOKENS, final_norm=True),
    )
    torch.testing.assert_close(
        normed.residual, torch.cat(hidden).detach(), rtol=1e-5, atol=1e-5
    )
    assert torch.equal(raw.residual[:-1], normed.residual[:-1])
    assert not torch.allclose(raw.residual[-1], normed.residual[-1], atol=0.1)


def test_final_norm_changes_the_last_jacobian_only_by_the_chain_rule(
    model: nn.Module,
) -> None:
    raw, normed = (
        tlc.trace(model, tiny.TOKENS),
        tlc.trace(model, tiny.TOKENS, final_norm=True),
    )
    J_raw, J_normed = tlc.block_jacobians(raw), tlc.block_jacobians(normed)
    assert torch.equal(J_raw[0], J_normed[0])
    norm = nn.LayerNorm(tiny.D_MODEL)
    norm.load_state_dict(tiny.huggingface_model("gpt2").transformer.ln_f.state_dict())
    norm_jacobian = torch.autograd.functional.jacobian(norm, raw.residual[-1, -1])
    identity = torch.eye(tiny.D_MODEL)
    torch.testing.assert_close(
        J_normed[1], norm_jacobian @ (J_raw[1] + identity) - identity, rtol=0, atol=1e-4
    )


def test_ids_text_and_batches_of_one_give_the_same_trace(model: nn.Module) -> None:
    text = " ".join(f"w{i}" for i in tiny.TOKENS)
    ids = [
        tiny.TOKENS,
        torch.tensor(tiny.TOKENS),
        torch.tensor([tiny.TOKENS]),
        np.array(tiny.TOKENS),
    ]
    traces = [
        tlc.trace(model, p)
        for p in (text, tlc.Prompt(text, "an id"), *ids, np.array([tiny.TOKENS]))
    ]
    assert all(torch.equal(t.residual, traces[0].residual) for t in traces)
    assert traces[0].str_tokens == tuple(text.split())


def test_provenance_is_json_and_says_how_it_was_made(model: nn.Module) -> None:
    provenance = json.loads(json.dumps(tlc.trace(model, "w3 w4").provenance))
    assert provenance["tokens"] == [3, 4]
    assert provenance["prompt"] == "w3 w4"
    assert provenance["n_layers"] == tiny.N_LAYERS
    # A wheel of the index has no build in its version, and torch itself does.
    release = torch.__version__.partition("+")[0]
    assert provenance["versions"]["torch"].partition("+")[0] == release
    assert {
        "model",
        "dtype",
        "device",
        "weight_processing",
        "final_norm",
        "linearised_in",
    } <= set(provenance)


def test_centred_writing_weights_are_noticed(model: nn.Module) -> None:
    model.enable_compatibility_mode()
    with pytest.warns(UserWarning, match="writing weights are centred"):
        trace = tlc.trace(model, tiny.TOKENS)
    assert "center_writing_weights" in trace.provenance["weight_processing"]


def test_hooks_are_gone_after_a_trace_even_one_that_failed(model: nn.Module) -> None:
    def n_hooks() -> int:
        return sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()
        )

    tlc.block_jacobian(tlc.trace(model, tiny.TOKENS), 1)
    n_before = n_hooks()
    tlc.block_jacobians(tlc.trace(model, tiny.TOKENS))
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tlc.trace(model, tiny.TOKENS)
    handle.remove()
    assert n_hooks() == n_before


def test_the_model_still_predicts_after_a_trace(model: nn.Module) -> None:
    ids = torch.tensor([tiny.TOKENS])
    expected = tiny.huggingface_model("gpt2")(ids).logits
    tlc.trace(model, ids)
    torch.testing.assert_close(model(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([0] * 33, "33 tokens, this model's context holds 32"),
        ([5, 100], r"must lie in \[0, 99\], got 5 … 100"),
        ([-1, 5], r"must lie in \[0, 99\]"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            r"one prompt; got shape \[2, 3\]: give each prompt by itself, unpadded",
        ),
    ],
)
def test_prompts_that_cannot_be_traced(
    model: nn.Module, prompt: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.trace(model, prompt)


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (["w1 w2", "w3"], r"\['w1 w2', 'w3'\]"),
        ([tlc.Prompt("w1", "a"), tlc.Prompt("w2", "b")], "a list"),
        ([[1, 2], [3, 4]], "a list"),
        ([1.0, 2.0], r"\[1.0, 2.0\]"),
        (7, "7"),
    ],
)
def test_what_is_not_one_prompt_is_refused(
    model: nn.Module, prompt: object, got: str
) -> None:
    accepted = (
        "a string, a path, a Prompt, a PIL.Image, a list of whole numbers, an integer "
        "torch tensor"
    )
    with pytest.raises(
        TypeError,
        match=rf"`prompt` must be {accepted} .*, got {got}: trace prompts one at a time",
    ):
        tlc.trace(model, prompt)


def test_pixels_are_not_text(model: nn.Module) -> None:
    for pixels in (torch.zeros(2), torch.zeros(1, 3, 8, 8)):
        with pytest.raises(
            TypeError,
            match=r"this model reads text.*token ids.*a tensor of torch\.float32",
        ):
            tlc.trace(model, pixels)


def test_models_that_cannot_be_traced(model: nn.Module) -> None:
    model.train()
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        tlc.trace(model, tiny.TOKENS)
    model.eval()
    model.blocks[1].train()
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        tlc.trace(model, tiny.TOKENS)
    with pytest.raises(TypeError, match="load_model"):
        tlc.trace(nn.Linear(2, 2), tiny.TOKENS)
    with pytest.raises(ValueError, match=r"float32 or torch\.float64"):
        tlc.trace(model.eval(), tiny.TOKENS, dtype=torch.float16)


def test_weights_that_are_not_finite_are_named(tokenizer_folder: Path) -> None:
    hf_model = tiny.huggingface_model("llama")
    hf_model.model.layers[0].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(
        ValueError,
        match=r"layer 1 has NaN or infinite entries; parameter '.*down_proj.*' is not finite",
    ):
        tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    hf_model = tiny.huggingface_model("llama")
    hf_model.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("inf")
    with pytest.raises(ValueError, match="NaN or infinite"):
        tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer": 2}, r"`layer` must lie in \[-2, 1\] for this 2-block model, got 2"),
        ({"layer": -3}, "got -3"),
        (
            {"layer": 0, "position": 8},
            r"must lie in \[-8, 7\] for this 8-token prompt, got 8",
        ),
        ({"layer": 0, "input_position": -9}, "`input_position`"),
        ({"layer": 0, "output_position": 99}, "`output_position`"),
        ({"layer": 0, "chunk_size": 0}, "`chunk_size` must be at least 1, got 0"),
    ],
)
def test_connections_out_of_range(
    tiny_trace: tlc.Trace, arguments: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.block_jacobian(tiny_trace, **arguments)


def test_products_want_a_vector_of_the_streams_width(tiny_trace: tlc.Trace) -> None:
    for product in (tlc.block_jvp, tlc.block_vjp):
        with pytest.raises(ValueError, match=r"shape \[32\], got \[31\]"):
            product(tiny_trace, 0, torch.ones(31))


def test_negative_layers_and_positions_count_from_the_end(
    tiny_trace: tlc.Trace,
) -> None:
    assert torch.equal(
        tlc.block_jacobian(tiny_trace, -1, position=-2),
        tlc.block_jacobian(tiny_trace, 1, position=6),
    )
    assert torch.equal(
        tlc.block_jacobians(tiny_trace, [-1])[0], tlc.block_jacobian(tiny_trace, 1)
    )


def test_chunks_change_memory_and_nothing_else(tiny_trace: tlc.Trace) -> None:
    expected = tlc.block_jacobian(tiny_trace, 1)
    for chunk_size in (1, 5, 32, 1000):
        torch.testing.assert_close(
            tlc.block_jacobian(tiny_trace, 1, chunk_size=chunk_size),
            expected,
            rtol=0,
            atol=1e-6,
        )


class Streams(nn.Module):
    """A model as TransformerLens' look from outside: embedding, `blocks` called as
    `order` says, unembedding.
    """

    def __init__(
        self,
        order: list[int],
        between: Callable[[torch.Tensor], torch.Tensor] = lambda X: X,
    ) -> None:
        super().__init__()
        self.cfg = SimpleNamespace(n_ctx=32, d_vocab=tiny.VOCAB, model_name="streams")
        self.order, self.between = order, between
        self.embed = nn.Embedding(tiny.VOCAB, tiny.D_MODEL)
        self.blocks = nn.ModuleList(AddsALine() for _ in range(2))
        self.unembed = nn.Linear(tiny.D_MODEL, tiny.VOCAB)

    def forward(
        self, tokens: torch.Tensor, return_type: str | None = "logits"
    ) -> torch.Tensor:
        X = self.embed(tokens)
        for i, block in enumerate(self.order):
            X = self.blocks[block](X if i == 0 or block else self.between(X))
        return self.unembed(X)


class AddsALine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(tiny.D_MODEL, tiny.D_MODEL)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + torch.tanh(self.line(hidden_states))


def test_a_model_that_runs_its_blocks_again_has_a_layer_for_each_call() -> None:
    model = Streams([0, 1, 0, 1, 0, 1]).eval()
    trace = tlc.trace(model, tiny.TOKENS)
    assert trace.n_layers == trace.provenance["n_layers"] == 6
    X = model.embed(torch.tensor(tiny.TOKENS))
    for layer in range(6):
        line = model.blocks[layer % 2].line
        slope = 1 - torch.tanh(line(X[-1])) ** 2
        torch.testing.assert_close(
            tlc.block_jacobian(trace, layer),
            slope[:, None] * line.weight,
            rtol=1e-4,
            atol=1e-6,
        )
        X = X + torch.tanh(line(X))
    torch.testing.assert_close(trace.residual[-1], X.detach())


def test_a_stream_that_is_changed_before_the_blocks_run_again_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="output of block 1 is changed before the next block, where the model runs "
        "its blocks again",
    ):
        tlc.trace(
            Streams([0, 1, 0, 1], between=lambda X: X / X.norm()).eval(), tiny.TOKENS
        )


@pytest.mark.parametrize("order", [[0], [1, 0], [0, 1, 0], [0, 0, 1, 1], []])
def test_blocks_out_of_order_are_refused(order: list[int]) -> None:
    with pytest.raises(
        ValueError,
        match="calls its 2 blocks one after the other, this one called "
        + (r"them in the order \[" if order else "none of them"),
    ):
        tlc.trace(Streams(order).eval(), tiny.TOKENS)


@pytest.mark.parametrize(
    ("streams", "shape"),
    [
        (lambda X: X[:, :, None].repeat(1, 1, 2, 1), r"\[1 8 2 32\]"),
        (lambda X: X.repeat(2, 1, 1), r"\[2 8 32\]"),
    ],
)
def test_several_parallel_streams_are_refused(
    streams: Callable[[torch.Tensor], torch.Tensor], shape: str
) -> None:
    model = Streams([0, 1], between=lambda X: X).eval()
    embed = model.embed.forward
    model.embed.forward = lambda tokens: streams(embed(tokens))
    with pytest.raises(
        ValueError,
        match="wanted one residual stream .* block 0 takes " + shape.replace(" ", ", "),
    ):
        tlc.trace(model, tiny.TOKENS)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e300])
def test_products_want_a_finite_vector(tiny_trace: tlc.Trace, value: float) -> None:
    vector = torch.ones(32, dtype=torch.float64)
    vector[3] = value
    for product in (tlc.block_jvp, tlc.block_vjp):
        with pytest.raises(
            ValueError,
            match=r"`vector` must be finite in torch\.float32, got NaN or infinite",
        ):
            product(tiny_trace, 0, vector)


def test_logits_want_a_finite_stream(tiny_trace: tlc.Trace) -> None:
    with pytest.raises(
        ValueError, match="`x` must be finite, got NaN or infinite entries"
    ):
        tiny_trace.logits(torch.full((32,), torch.nan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("architecture", "is_causal"),
    [("llama", True), ("gpt2", True), ("mixtral", True), ("bert", False)],
)
def test_causality_does_not_depend_on_rounding(
    architecture: str, is_causal: bool, dtype: torch.dtype, tokenizer_folder: Path
) -> None:
    original = tiny.huggingface_model(architecture, dtype=dtype)
    trace = tlc.trace(tiny.bridge(original, tokenizer_folder), tiny.TOKENS)
    assert trace.is_causal is is_causal


def test_changed_weights_make_no_model_act_on_earlier_tokens(
    tokenizer_folder: Path,
) -> None:
    """They are what is refused, by their own reason."""
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    with torch.no_grad():
        for parameter in model.blocks[1].parameters():
            parameter.mul_(1.5)
    assert trace.is_causal
    with pytest.raises(
        tlc.gradients.StepError, match="not the function that was traced"
    ):
        tlc.trajectories.product_lens([trace], tokens="later", skip_first_positions=1)


def test_hooks_have_the_names_that_were_typed(model: nn.Module) -> None:
    names = [
        "hook_embed",
        "blocks.0.hook_resid_pre",
        "blocks.0.attn.hook_q",
        "blocks.0.attn.hook_z",
        "blocks.0.hook_resid_post",
        "blocks.1.hook_mlp_out",
        "ln_final.hook_scale",
    ]
    for name in names:
        model.add_hook(name, lambda z, hook: z)
    assert sorted(tlc.trace(model, tiny.TOKENS).provenance["hooks"]) == sorted(names)
    model.reset_hooks()


def test_a_model_that_fails_by_itself_says_how_it_was_called(
    tokenizer_folder: Path,
) -> None:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the size of tensor a\n  must match")

    model.forward = fails
    message = (
        r"the model itself fails when called as `model\(.*\)` \(RuntimeError: the size of "
        r"tensor a must match\): try .*, or another version of TransformerLens"
    )
    with pytest.raises(ValueError, match=message) as refused:
        tlc.trace(model, tiny.TOKENS)
    assert "\n" not in str(refused.value)


class StandInEnvoy:
    """A module wrapped as nnsight does it: the envoy of a list walks through others."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __iter__(self) -> object:
        return iter([StandInEnvoy(part) for part in self._module])


def test_blocks_that_nnsight_wraps_are_its_modules() -> None:
    network = tiny.huggingface_model("gpt2")
    layers = network.transformer.h
    ids = torch.tensor([tiny.TOKENS])

    def run() -> object:
        return network(ids, use_cache=False)

    expected = tlc.trace_modules(layers, run)
    for blocks in (StandInEnvoy(layers), [StandInEnvoy(layer) for layer in layers]):
        trace = tlc.trace_modules(blocks, run)
        assert torch.equal(trace.residual, expected.residual)
        digest = trace.provenance["weights_digest"]
        assert digest == expected.provenance["weights_digest"]
    with pytest.raises(TypeError, match=r"got one GPT2Block: give them in a list"):
        tlc.trace_modules(StandInEnvoy(layers[0]), run)


def test_a_notebook_shows_norms_of_the_stream(tiny_trace: tlc.Trace) -> None:
    norms = np.linalg.norm(tiny_trace.residual.numpy().astype(float), axis=-1)
    page = tiny_trace._repr_html_()
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows[1:]]
    assert [html.unescape(row[0]) for row in cells] == [
        repr(token) for token in tiny_trace.str_tokens
    ]
    shown = np.array([[float(cell) for cell in row[1:]] for row in cells])
    layers = [0, tiny_trace.n_layers // 2, tiny_trace.n_layers]
    np.testing.assert_array_equal(shown[:, 0], np.arange(tiny_trace.n_pos))
    np.testing.assert_allclose(shown[:, 1:], norms[layers].T, rtol=1e-3)

    (data,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    # Brighter is larger, in every channel together.
    brightness = np.array(picture).sum(-1)
    assert brightness.shape == norms.shape
    assert brightness.argmax() == norms.argmax()
    assert brightness.argmin() == norms.argmin()
    assert f"from {norms.min():.3g} (dark) to {norms.max():.3g} (bright)" in page


def test_a_notebook_shows_a_stream_of_zeros(tiny_trace: tlc.Trace) -> None:
    nothing = replace(tiny_trace, residual=torch.zeros_like(tiny_trace.residual))
    page = nothing._repr_html_()
    assert "<table" in page
    assert "<img" not in page
    one = replace(tiny_trace, residual=nothing.residual.clone())
    one.residual[1, 2, 0] = 5.0
    assert "from 5 (dark) to 5 (bright)" in one._repr_html_()
