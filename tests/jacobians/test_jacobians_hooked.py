"""HookedTransformer on TransformerLens 3, as users have it: from its constructor,
processed, hooked, in bfloat16.

The witness is TransformerLens itself: autograd from one hook point of a whole forward
pass to the next.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tl_coupling as tlc

pytestmark = [pytest.mark.both_lines, tiny.needs_hooked_transformer]

LAST = 7
PAIRS = [(0, 0), (4, 4), (LAST, LAST), (4, LAST), (0, LAST)]


def hooked(seed: int = 0, **settings: Any) -> Any:
    """Fresh from the constructor: in train mode, which says nothing, because it has no
    dropout.
    """
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    given = {
        "n_layers": 2,
        "d_model": 32,
        "n_ctx": 32,
        "d_head": 8,
        "n_heads": 4,
        "d_mlp": 48,
        "d_vocab": 100,
        "act_fn": "gelu",
        "device": "cpu",
        "seed": seed,
        "init_weights": True,
        "initializer_range": 0.3,
    }
    return HookedTransformer(HookedTransformerConfig(**given | settings))


def oracle(
    model: Any, layer: int, t1: int, t2: int, X: torch.Tensor | None = None
) -> torch.Tensor:
    leaf: dict[str, torch.Tensor] = {}

    def enter(z: torch.Tensor, hook: Any) -> torch.Tensor:
        leaf["X"] = (z if X is None else X[None]).detach().clone().requires_grad_()
        return leaf["X"]

    def leave(z: torch.Tensor, hook: Any) -> None:
        leaf["Y"] = z

    hooks = [
        (f"blocks.{layer}.hook_resid_pre", enter),
        (f"blocks.{layer}.hook_resid_post", leave),
    ]
    model.run_with_hooks(torch.tensor([tiny.TOKENS]), fwd_hooks=hooks)
    rows = [
        torch.autograd.grad(y, leaf["X"], retain_graph=True)[0][0, t1]
        for y in leaf["Y"][0, t2]
    ]
    return torch.stack(rows) - (t1 == t2) * torch.eye(len(rows), dtype=rows[0].dtype)


def assert_right(model: Any, witness: Any = None, rel: float = 1e-5) -> tlc.Trace:
    trace = tlc.trace(model, tiny.TOKENS)
    for layer in range(2):
        for t1, t2 in PAIRS:
            expected = oracle(
                witness or model,
                layer,
                t1,
                t2,
                None if witness is None else trace.residual[layer],
            )
            J = tlc.block_jacobian(trace, layer, input_position=t1, output_position=t2)
            assert float((J - expected).norm()) <= rel * max(
                float(expected.norm()), 1e-3
            )
    return trace


def assert_cheapest(trace: tlc.Trace) -> None:
    assert set(tlc.depth_coupling(trace, k=4).provenance["paths"].values()) == {
        "token_local_recorded"
    }


KINDS = [
    {"normalization_type": norm, **positions}
    for norm in ("LN", "LNPre", "RMS", "RMSPre", None)
    for positions in ({}, {"positional_embedding_type": "rotary", "rotary_dim": 8})
]


@pytest.mark.parametrize(
    "settings", KINDS, ids=lambda s: "-".join(str(v) for v in s.values())
)
def test_straight_from_the_constructor(settings: dict) -> None:
    model = hooked(**settings)
    assert model.training
    trace = assert_right(model)
    assert_cheapest(trace)


@pytest.mark.parametrize(
    "settings", KINDS, ids=lambda s: "-".join(str(v) for v in s.values())
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(settings: dict, dtype: torch.dtype) -> None:
    """In float32 at the stream that the half-precision model has; its configuration
    says half precision too.
    """
    model = hooked(dtype=dtype, **settings)
    witness = hooked(dtype=torch.float32, **settings)
    # Positions in the attention are rounded to the model's dtype when it is made, and
    # stay so.
    witness.load_state_dict(
        {name: t.float() for name, t in model.state_dict().items()}, strict=False
    )
    for name, buffer in witness.named_buffers():
        if "rotary" in name:
            buffer.data = dict(model.named_buffers())[name].float()
    trace = assert_right(model, witness)
    assert model.cfg.dtype == dtype
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_cheapest(trace)


def test_processed_weights_are_measured_as_they_are(hub: Any) -> None:
    from transformer_lens import HookedTransformer

    model = HookedTransformer.from_pretrained("gpt2", device="cpu")
    with pytest.warns(UserWarning, match="writing weights are centred"):
        trace = assert_right(model)
    assert {"fold_ln", "center_writing_weights"} <= set(
        trace.provenance["weight_processing"]
    )


def test_hooks_on() -> None:
    model, plain = hooked(), hooked()
    model.add_hook("blocks.1.hook_mlp_out", lambda z, hook: 2 * z)
    trace = assert_right(model)
    assert "blocks.1.hook_mlp_out" in trace.provenance["hooks"]
    assert not torch.allclose(
        tlc.block_jacobian(trace, 1),
        tlc.block_jacobian(tlc.trace(plain, tiny.TOKENS), 1),
        rtol=0.1,
    )


@pytest.mark.filterwarnings("ignore:this model's writing weights are centred")
def test_the_pages_lines_run_as_printed() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "models.md").read_text()
    (lines,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "HookedTransformerC" in block
    ]
    names: dict[str, Any] = {"tlc": tlc}
    with pytest.warns(UserWarning, match="writing weights are centred"):
        exec(lines, names)
    assert names["trace"].provenance["hooks"] == ["blocks.2.hook_mlp_out"]
    assert names["model"].cfg.dtype == torch.bfloat16
    assert (
        tlc.block_jacobian(tlc.trace(names["model"], names["tokens"]), 0).dtype
        == torch.float32
    )


@pytest.mark.parametrize("norm", ["LN", "RMS", None])
def test_coupling_from_end_to_end(norm: str | None) -> None:
    result = tlc.depth_coupling(
        tlc.trace(hooked(normalization_type=norm), tiny.TOKENS), k=4
    )
    assert result.coupling(4).isfinite().all()
    torch.testing.assert_close(
        result.coupling(4).diagonal(), torch.ones(2), rtol=0, atol=1e-4
    )
