"""What a checkpoint may hold beside its model, and what only has such a name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from other_folders import changed
from tl_coupling.models.file_tensors import FileTensor
from tl_coupling.models.harmless import LeftTensor, reason_to_leave
from tl_coupling.models.patched_transformers import Weight

pytestmark = pytest.mark.both_lines

State = dict[str, Tensor]
# What is read, and not how, decides.
MEMORIES = [
    "resident",
    pytest.param("stream", marks=pytest.mark.long("the same once more")),
]
LAYER = "model.layers.0.self_attn"
MASK = torch.tril(torch.ones(8, 8))[None, None]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


# The architecture, what its file holds besides, and fields of its configuration.
HARMLESS: dict[str, tuple[str, State, dict[str, Any]]] = {
    "angles": ("llama", {f"{LAYER}.rotary_emb.inv_freq": random(4)}, {}),
    "tables of angles": ("llama", {f"{LAYER}.rotary_emb.cos_cached": random(1, 1, 8, 4)}, {}),
    "a mask": ("gpt2", {"transformer.h.0.attn.bias": MASK}, {}),
    "a mask in bytes": ("gpt2", {"transformer.h.0.attn.bias": MASK.byte()}, {}),
    "a mask without a prefix": ("gpt2", {"h.1.attn.bias": MASK[0, 0].bool()}, {}),
    "a mask and its number": (
        "gpt_neox",
        {
            "gpt_neox.layers.0.attention.bias": MASK.bool(),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        },
        {},
    ),
    "numbers of positions": (
        "bert",
        {"bert.embeddings.position_ids": torch.arange(32)[None]},
        {},
    ),
    "a pooler": (
        "bert",
        {"bert.pooler.dense.weight": random(32, 32), "bert.pooler.dense.bias": random(32)},
        {},
    ),
    "the next sentence": ("bert", {"cls.seq_relationship.weight": random(2, 32)}, {}),
    "a classifier": (
        "bert",
        {"classifier.weight": random(3, 32), "classifier.bias": random(3)},
        {},
    ),
    "a score": ("llama", {"score.weight": random(1, 32)}, {}),
    "values": ("gpt2", {"v_head.summary.weight": random(1, 32)}, {}),
    "later tokens": ("llama", {"mtp.layers.0.mlp.up_proj.weight": random(48, 32)}, {}),
    "later tokens, in the body": ("llama", {"model.mtp_block.0.norm.weight": random(32)}, {}),
    "Medusa's heads": ("llama", {"medusa_head.0.1.weight": random(100, 32)}, {}),
    "a later layer": (
        "llama",
        {"model.layers.2.eh_proj.weight": random(32, 64)},
        {"num_nextn_predict_layers": 1},
    ),
    "a picture's tower": (
        "llama",
        {
            "vision_tower.layers.0.mlp.weight": random(8, 8),
            "model.multi_modal_projector.weight": random(32, 8),
            "image_newline": random(32),
        },
        {},
    ),
    "a bias of zeros": ("llama", {f"{LAYER}.q_proj.bias": torch.zeros(32)}, {}),
}  # fmt: skip
# The same names with something else, or in a place where it would be missed.
HARMFUL: dict[str, tuple[str, State, dict[str, Any]]] = {
    "a matrix by the name of angles": ("llama", {f"{LAYER}.inv_freq": random(4, 4)}, {}),
    "a bias by the name of a mask": ("gpt2", {"transformer.h.0.attn.bias": random(32)}, {}),
    "a square by the name of a mask": (
        "gpt2",
        {"transformer.h.0.attn.bias": random(1, 1, 8, 8)},
        {},
    ),
    "a mask for each head": (
        "gpt_neox",
        {"gpt_neox.layers.0.attention.bias": MASK.expand(1, 4, 8, 8)},
        {},
    ),
    "many numbers of a mask": (
        "gpt_neox",
        {"gpt_neox.layers.0.attention.masked_bias": random(4)},
        {},
    ),
    "positions that were learned": (
        "bert",
        {"bert.embeddings.position_ids": random(1, 32)},
        {},
    ),
    "a pooler inside a layer": ("llama", {"model.layers.0.pooler.weight": random(8)}, {}),
    "later tokens inside a layer": (
        "llama",
        {"model.layers.0.mtp.weight": random(8)},
        {},
    ),
    "an expert as a later layer": (
        "llama",
        {"model.layers.1.mlp.experts.2.weight": random(8)},
        {"num_nextn_predict_layers": 1},
    ),
    "a layer after the later one": (
        "llama",
        {"model.layers.3.eh_proj.weight": random(32, 64)},
        {"num_nextn_predict_layers": 1},
    ),
    "a norm of zeros": ("llama", {f"{LAYER}.q_norm.weight": torch.zeros(8)}, {}),
    "a norm's bias of zeros": ("llama", {"model.norm.bias": torch.zeros(32)}, {}),
    "keys of a layer that has its own": (
        "llama",
        {"model.layers.1.self_attn.k_norm.weight": random(8)},
        {"num_kv_shared_layers": 1},
    ),
}  # fmt: skip


def with_more(
    source: Path, folder: Path, tensors: State, fields: dict[str, Any]
) -> Path:
    return changed(source, folder, lambda state: state | tensors, **fields)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", HARMLESS)
def test_what_is_harmless_changes_nothing(
    kind: str, memory: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    architecture, tensors, fields = HARMLESS[kind]
    folder = with_more(saved(architecture), tmp_path / "more", tensors, fields)
    trace = tlc.trace(tlc.load_model(str(folder), memory=memory), tiny.TOKENS)
    plain = tlc.trace(tlc.load_model(str(saved(architecture))), tiny.TOKENS)
    assert torch.equal(trace.residual, plain.residual)
    assert "head" not in trace.provenance


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("kind", HARMFUL)
def test_a_name_alone_is_no_reason(
    kind: str, memory: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    architecture, tensors, fields = HARMFUL[kind]
    folder = with_more(saved(architecture), tmp_path / "more", tensors, fields)
    with pytest.raises(tlc.ModelError, match=r"for which a .* has no place") as caught:
        tlc.load_model(str(folder), memory=memory)
    assert next(iter(tensors)) in str(caught.value)
    # transformers says nothing of some.
    assert "\n" not in str(caught.value)


class Model(nn.Module):
    """What rules ask of a model."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 4, **fields})()


def reason(name: str, weights: tuple[str, ...] = (), **fields: object) -> str | None:
    tensor = FileTensor("", name, torch.float32, (32, 32))
    known = {weight: Weight(torch.float32, (32, 32), True) for weight in weights}
    return reason_to_leave(LeftTensor(tensor, name, Model(**fields), known))


def test_layers_that_share_keys_and_values() -> None:
    """As in Gemma 3n, whose files hold what its last layers do not use."""
    weights = ("model.layers.0.self_attn.k_proj.weight",)
    shared = {"num_kv_shared_layers": 2}
    name = "model.layers.{}.self_attn.k_proj.weight"
    assert "of an earlier one" in str(reason(name.format(2), weights, **shared))
    assert "of an earlier one" in str(reason(name.format(3), weights, **shared))
    assert reason(name.format(1), weights, **shared) is None
    assert reason(name.format(4), weights, **shared) is None
    assert reason(name.format(3), weights) is None
    assert reason("model.layers.3.self_attn.k_proj.scale", weights, **shared) is None
    assert reason(name.format(3), (), **shared) is None


def test_a_part_that_the_model_has_itself_must_be_whole() -> None:
    for part in ("pooler", "vision_tower", "mtp", "score"):
        assert reason(f"{part}.extra")
        assert reason(f"{part}.extra", (f"model.{part}.dense.weight",)) is None


def test_a_layer_that_transformers_names_for_a_class_predicts_later_tokens() -> None:
    name = "model.layers.61.eh_proj.weight"
    model = Model(num_hidden_layers=61)
    left = LeftTensor(FileTensor("", name, torch.float32, (2, 2)), name, model, {})
    assert reason_to_leave(left) is None
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.61.*"]  # type: ignore[attr-defined]
    assert reason_to_leave(left)
    model.config.num_hidden_layers = 60
    assert reason_to_leave(left) is None


def test_scales_of_activations_where_weights_are_dequantised() -> None:
    name = "model.layers.0.mlp.up_proj.input_scale"
    tensor = FileTensor("", name, torch.float32, ())
    assert reason_to_leave(LeftTensor(tensor, name, Model(), {})) is None
    assert reason_to_leave(LeftTensor(tensor, name, Model(), {}, is_quantized=True))


def test_a_buffer_that_the_model_makes_by_itself(tmp_path: Path) -> None:
    """XGLM's table of sinusoids, which old files hold."""
    model = Model()
    model.register_buffer("weights", random(8, 4), persistent=False)
    file = str(tmp_path / "model.safetensors")
    save_file({"weights": model.weights.bfloat16(), "others": random(8, 4)}, file)
    for name, shape, is_harmless in (
        ("weights", (8, 4), True),
        ("weights", (4, 8), False),
        ("others", (8, 4), False),
    ):
        tensor = FileTensor(file, name, torch.float32, shape)
        left = LeftTensor(tensor, name, model, {})
        assert (reason_to_leave(left) is not None) == is_harmless
    save_file({"weights": model.weights + 0.1}, file)
    tensor = FileTensor(file, "weights", torch.float32, (8, 4))
    assert reason_to_leave(LeftTensor(tensor, "weights", model, {})) is None
