"""Logits, losses and final norms of all kinds of endings, against the HuggingFace model
that was not wrapped.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

import tiny
import tl_coupling as tlc
from tl_coupling.studies.surveys import loss
from zoo import configs
from zoo.configs import at_depth

pytestmark = pytest.mark.both_lines

UNGROUPED, BASE = (
    at_depth(configs.BASE, tiny.N_LAYERS),
    at_depth(configs.GROUPED, tiny.N_LAYERS),
)
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Endings that are not just a norm and a matrix; scales far from one, so that leaving
# them out shows.
CONFIGS: dict[str, dict[str, Any]] = {
    "cohere": {**BASE, "logit_scale": 0.3},
    "cohere2": {**BASE, "logit_scale": 0.3, "head_dim": 8, "sliding_window": 4},
    "granite": {**BASE, "logits_scaling": 4.0, "residual_multiplier": 0.7},
    "granitemoe": {**BASE, **EXPERTS, "logits_scaling": 4.0},
    "granitemoehybrid": {
        **BASE,
        **EXPERTS,
        "logits_scaling": 4.0,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "rope",
        "shared_intermediate_size": 48,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
    },
    "falcon_h1": {
        **BASE,
        "lm_head_multiplier": 0.4,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    },
    "modernbert-decoder": UNGROUPED,
    "bert": UNGROUPED,
    "roberta": {**UNGROUPED, "max_position_embeddings": 40},
    "openai-gpt": at_depth(configs.GPT, tiny.N_LAYERS),
    "opt": tiny.CONFIGS["opt"],
    "opt-post-norm": {**tiny.CONFIGS["opt"], "do_layer_norm_before": False},
    # As opt-350m: post-norm, and projections between the stream and the embedding.
    "opt-projected": {
        **tiny.CONFIGS["opt"],
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 16,
    },
    "gemma2": {**tiny.CONFIGS["gemma2"], "final_logit_softcapping": 0.5},
    **{name: tiny.CONFIGS[name] for name in ("gpt2", "llama", "bloom", "mixtral")},
}
WITHOUT_FINAL_NORM = {"bert", "roberta", "openai-gpt", "opt-post-norm", "opt-projected"}
# The bridge of TransformerLens 3.9 computes other blocks than HuggingFace for Cohere,
# and has none for RoBERTa.
ONLY_ON_4 = {"cohere", "cohere2", "roberta"} if tiny.HAS_HOOKED_TRANSFORMER else set()
ARCHITECTURES = sorted(CONFIGS.keys() - ONLY_ON_4)
IDS = torch.tensor([tiny.TOKENS])


def huggingface_model(
    architecture: str, dtype: torch.dtype = torch.float32
) -> nn.Module:
    fields = configs.IDS | CONFIGS[architecture]
    kind = (
        AutoModelForMaskedLM
        if architecture in ("bert", "roberta")
        else AutoModelForCausalLM
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "opt" if architecture.startswith("opt") else architecture, **fields
        )
        model = kind.from_config(
            config, dtype=dtype, attn_implementation="eager"
        ).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.15)
            else:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.config.architectures = [type(model).__name__]
    return model.requires_grad_(False)


def logits_after(hf_model: nn.Module, X: torch.Tensor) -> torch.Tensor:
    """Logits of the HuggingFace model where its last layer returns X, `[n_pos
    d_model]`.
    """

    def put(_: nn.Module, __: Any, output: Any) -> Any:
        return (X[None], *output[1:]) if isinstance(output, tuple) else X[None]

    handle = tiny.layers_of(hf_model)[-1].register_forward_hook(put)
    try:
        return hf_model(IDS).logits[0]
    finally:
        handle.remove()


def cross_entropy(logits: torch.Tensor) -> float:
    return float(
        -logits.log_softmax(-1)[range(len(tiny.TOKENS) - 1), tiny.TOKENS[1:]].mean()
    )


def close(got: torch.Tensor, expected: torch.Tensor, rel: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).detach().norm()) <= rel * float(
        expected.detach().norm()
    )


@contextmanager
def forward_passes(model: nn.Module) -> Iterator[list[str]]:
    """Every time that a block really runs, its attention does."""
    calls: list[str] = []
    handle = model.blocks[0].ln1.register_forward_hook(
        lambda *_: calls.append("block 0")
    )
    yield calls
    handle.remove()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_at_every_depth_are_huggingfaces(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = huggingface_model(architecture)
    model = tiny.bridge(hf_model, tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    expected = hf_model(IDS).logits[0]
    close(trace.logits(trace.residual[-1]), expected)
    close(
        trace.logits(trace.residual),
        torch.stack([logits_after(hf_model, X) for X in trace.residual]),
    )
    assert loss(trace) == pytest.approx(cross_entropy(expected), abs=1e-5)
    if architecture != "opt-post-norm":  # TransformerLens itself cannot run this one.
        close(model(IDS)[0], expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_final_norm_is_huggingfaces_or_refused(
    architecture: str, tokenizer_folder: Path
) -> None:
    hf_model = huggingface_model(architecture)
    model = tiny.bridge(hf_model, tokenizer_folder)
    if architecture in WITHOUT_FINAL_NORM:
        with pytest.raises(
            ValueError,
            match=r"norm after the last block, and this model has none: leave it off$",
        ):
            tlc.trace(model, tiny.TOKENS, final_norm=True)
        with pytest.raises(ValueError, match="norm after the last block"):
            tlc.trace(model, tiny.TOKENS).logits(
                torch.ones(tiny.D_MODEL), normalised=True
            )
        return
    trace = tlc.trace(model, tiny.TOKENS, final_norm=True)
    output = hf_model(IDS, output_hidden_states=True)
    close(trace.residual[-1], output.hidden_states[-1][0])
    close(trace.logits(trace.residual[-1], normalised=True), output.logits[0])
    assert loss(trace) == pytest.approx(cross_entropy(output.logits[0]), abs=1e-5)


def test_another_norm_under_that_name_is_refused(tokenizer_folder: Path) -> None:
    """Hidden states that are the stream after some other norm than `ln_final`."""
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    model.original_model.model.register_forward_hook(
        lambda _, __, output: output.__class__(
            **{**output, "hidden_states": (2 * output.last_hidden_state,)}
        )
    )
    with pytest.raises(
        ValueError, match="which `ln_final` of this model is not: leave it off"
    ):
        tlc.trace(model, tiny.TOKENS, final_norm=True)


def test_rows_in_any_number_and_order(tokenizer_folder: Path) -> None:
    hf_model = huggingface_model("cohere2" if "cohere2" in ARCHITECTURES else "granite")
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS)
    expected = hf_model(IDS).logits[0]
    last = trace.residual[-1]
    close(trace.logits(last[5]), expected[5])
    order = torch.tensor([[7, 7, 0], [3, 1, 2], [4, 4, 5], [0, 0, 6]])
    close(trace.logits(last[order]), expected[order])
    for x in (last[:, 1:], last[:0]):
        with pytest.raises(
            ValueError,
            match=r"residual stream \[\*batch 32\], one row or more, got \[\d, \d+\]",
        ):
            trace.logits(x)


def test_one_token_is_enough(tokenizer_folder: Path) -> None:
    hf_model = huggingface_model("granite")
    trace = tlc.trace(tiny.bridge(hf_model, tokenizer_folder), tiny.TOKENS[:1])
    close(trace.logits(trace.residual[-1]), hf_model(IDS[:, :1]).logits[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_in_other_precisions(dtype: torch.dtype, tokenizer_folder: Path) -> None:
    model = tiny.bridge(huggingface_model("granite", dtype), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    got = trace.logits(trace.residual[-1])
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got, model(IDS)[0].to(got.dtype), rtol=1e-12, atol=1e-12)


def test_a_model_is_run_once_and_then_only_its_ends(tokenizer_folder: Path) -> None:
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    with forward_passes(model) as calls:
        trace.logits(trace.residual[-1])
        assert len(calls) == 1
        loss(tlc.trace(model, tiny.TOKENS[:5]))
        trace.logits(trace.residual)
        assert len(calls) == 2  # The trace.
        trace.logits(trace.residual[-1], normalised=True)
        assert len(calls) == 3
        trace.logits(trace.residual[-1], normalised=True)
        assert len(calls) == 3


def test_rows_of_many_depths_are_unembedded_together(tokenizer_folder: Path) -> None:
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    trace.logits(trace.residual[-1])
    sizes: list[int] = []
    handle = model.unembed.register_forward_hook(
        lambda _, __, logits: sizes.append(logits[..., 0].numel())
    )
    rows = trace.residual.repeat(5, 1, 1)
    assert rows.shape[:2] == (15, 8)
    together = trace.logits(rows)
    handle.remove()
    assert sizes == [64, 56]
    for of_depth, expected in zip(together, map(trace.logits, rows), strict=True):
        close(of_depth, expected)


def test_the_model_is_as_before_even_after_an_exception(tokenizer_folder: Path) -> None:
    hf_model = huggingface_model("llama")
    model = tiny.bridge(hf_model, tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    # As accelerate does it: an instance with a forward of its own.
    own = vars(model.blocks[0])["forward"] = model.blocks[0].forward
    attributes = {name: vars(module).copy() for name, module in model.named_modules()}
    trace.logits(trace.residual[-1], normalised=True)
    handle = model.unembed.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trace.logits(trace.residual[-1], normalised=True)
    handle.remove()
    assert model.blocks[0].forward is own
    for name, module in model.named_modules():
        assert vars(module).keys() == attributes[name].keys(), name
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        assert all(vars(module)[hook] is attributes[name][hook] for hook in hooks), name
    close(model(IDS), hf_model(IDS).logits)


def test_hooks_act_once(tokenizer_folder: Path) -> None:
    """What a hook does to the last block's output is in the stream; what one does
    behind it is done to the logits.
    """
    hf_model = huggingface_model("granite")
    model = tiny.bridge(hf_model, tokenizer_folder)
    plain = tlc.trace(model, tiny.TOKENS).logits(torch.ones(3, tiny.D_MODEL))

    def shifted(value: torch.Tensor, hook: object) -> torch.Tensor:
        return value + torch.arange(tiny.D_MODEL)

    with model.hooks(
        fwd_hooks=[("blocks.1.hook_resid_post", shifted), ("ln_final.hook_in", shifted)]
    ):
        handle = model.blocks[1].register_forward_hook(
            lambda _, __, output: output * torch.arange(tiny.D_MODEL)
        )
        trace = tlc.trace(model, tiny.TOKENS)
        close(trace.logits(trace.residual[-1]), model(IDS)[0])
        handle.remove()
        hooked = trace.logits(torch.ones(3, tiny.D_MODEL))
    assert float((hooked - plain).norm() / plain.norm()) > 0.1
    close(trace.logits(torch.ones(3, tiny.D_MODEL)), plain)


def test_an_ending_that_works_in_place_leaves_the_trace_alone(
    tokenizer_folder: Path,
) -> None:
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    trace = tlc.trace(model, tiny.TOKENS)
    model.ln_final.register_forward_pre_hook(lambda _, args: (args[0].add_(1),))
    residual = trace.residual.clone()
    close(trace.logits(trace.residual[-1]), model(IDS)[0])
    assert torch.equal(trace.residual, residual)


def test_processed_weights(tokenizer_folder: Path) -> None:
    model = tiny.bridge(huggingface_model("gpt2"), tokenizer_folder)
    model.enable_compatibility_mode()
    with pytest.warns(UserWarning, match="centred"):
        trace = tlc.trace(model, tiny.TOKENS)
    close(trace.logits(trace.residual[-1]), model(IDS)[0])


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (lambda logits: BaseModelOutput(last_hidden_state=logits), "none"),
        (
            lambda logits: CausalLMOutput(logits=logits[:, 0]),
            r"logits of shape \[1, 100\]",
        ),
    ],
    ids=["no head", "one answer for the prompt"],
)
def test_models_without_logits_for_every_token_are_refused(
    output: Any, shown: str, tokenizer_folder: Path
) -> None:
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    model.original_model.register_forward_hook(lambda _, __, own: output(own.logits))
    trace = tlc.trace(model, tiny.TOKENS)
    with pytest.raises(
        ValueError,
        match=f"LlamaForCausalLM gives {shown}: load it with a language-model head$",
    ):
        trace.logits(trace.residual[-1])


def test_logits_that_mix_tokens_are_refused(tokenizer_folder: Path) -> None:
    model = tiny.bridge(huggingface_model("llama"), tokenizer_folder)
    handle = model.unembed.register_forward_hook(lambda _, __, output: output.cumsum(1))
    trace = tlc.trace(model, tiny.TOKENS)
    with pytest.raises(ValueError, match=r"do not follow, token by token, .* differ"):
        loss(trace)
    handle.remove()
    assert loss(trace) > 0


@tiny.needs_hooked_transformer
@pytest.mark.parametrize("normalization_type", [None, "LN", "LNPre", "RMS", "RMSPre"])
def test_hooked_transformers(normalization_type: str | None) -> None:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=32,
        n_ctx=16,
        d_head=8,
        n_heads=4,
        d_vocab=tiny.VOCAB,
        act_fn="gelu",
        normalization_type=normalization_type,
        output_logits_soft_cap=2.0,
        seed=0,
    )
    model = HookedTransformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.add_(
            0.1
            * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        )
    trace = tlc.trace(model, tiny.TOKENS)
    assert loss(trace) == pytest.approx(float(model(IDS, return_type="loss")), abs=1e-5)
    for X in trace.residual:
        expected = model.run_with_hooks(
            IDS, fwd_hooks=[("blocks.1.hook_resid_post", lambda *_, hook, X=X: X[None])]
        )
        close(trace.logits(X), expected[0])
    if normalization_type is None:
        with pytest.raises(ValueError, match="this model has none: leave it off"):
            tlc.trace(model, tiny.TOKENS, final_norm=True)
        return
    normed = tlc.trace(model, tiny.TOKENS, final_norm=True)
    close(normed.residual[-1], model.ln_final(trace.residual[-1]))
    close(normed.logits(normed.residual[-1], normalised=True), model(IDS)[0])
