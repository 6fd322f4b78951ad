"""Tensors of a checkpoint that its model does without and stays the same model, each
with the reason.

Nothing else that a file holds may be left out. What transformers leaves out without a
word is more: it goes by patterns of names, whatever stands under them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from tl_coupling.models.file_tensors import FileTensor
from tl_coupling.models.patched_transformers import Weight

# The parts of a name before a layer's number, or all of them where there is none.
_NO_NUMBER = r"^(?:(?!\d)\w+\.)*"
# Modules that read the stream behind the last block, beside those that make the logits:
# BERT's and ViT's pooled first token, classifiers of it, values for reinforcement
# learning, ColBERT's projection.
_HEADS = (
    "pooler|seq_relationship|sop_classifier|classifier|pre_classifier|score|"
    "classification_head|qa_outputs|discriminator_predictions|multiple_choice_head|"
    "v_head|reward_head|linear"
)
# Modules that make tokens of pictures or sounds, or sounds of tokens.
_TOWERS = (
    "vision_tower|vision_model|vision_encoder|vision_embed_tokens|visual|"
    "multi_modal_projector|mm_projector|image_newline|embed_vision|audio_tower|"
    "audio_model|embed_audio|talker|token2wav|code2wav"
)
_IN_TOWER = rf"{_NO_NUMBER}(?P<part>{_TOWERS})(\.|$)"
_READS_POOLED = re.compile(r"(^|\.)(pooler|seq_relationship)\.")
# In which fields configurations say how many layers predict later tokens.
_COUNTS_LATER = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


class LeftTensor(NamedTuple):
    """A tensor of a checkpoint that its model was not given.

    Attributes:
        tensor: where it is.
        weight: what transformers calls it.
        model: the model.
        weights: those of the model, by name.
        is_quantized: whether the checkpoint was saved in codes that are dequantised.
    """

    tensor: FileTensor
    weight: str
    model: Any
    weights: Mapping[str, Weight]
    is_quantized: bool = False

    @property
    def config(self) -> Any:
        """The configuration of the model, of its text where it reads other things."""
        config = self.model.config
        return getattr(config, "text_config", None) or config

    @property
    def depth(self) -> int:
        """The number of the model's layers."""
        return int(getattr(self.config, "num_hidden_layers", None) or 0)


def reason_to_leave(left: LeftTensor) -> str | None:
    """Return why a tensor need not be in the model; None for one that must."""
    for harmless in _HARMLESS:
        for name in (left.tensor.name, left.weight):
            match = re.search(harmless.names, name)
            if match and harmless.holds(left, match):
                return harmless.reason
    return None


def reads_pooled(name: str) -> bool:
    """Say whether neither the stream nor the logits depend on a weight: BERT's and
    ViT's pooled first token, and what reads it.
    """
    return _READS_POOLED.search(name) is not None


def is_of_tower(name: str) -> bool:
    """Say whether a weight is of a part that reads pictures or sounds, or speaks."""
    return re.search(_IN_TOWER, name) is not None


def _later_layers(left: LeftTensor) -> range:
    if not left.depth:
        return range(0)
    counts = [getattr(left.config, field, None) or 0 for field in _COUNTS_LATER]
    n_later = int(max(counts))
    # Where the configuration does not say it, the class may name the layer.
    patterns = getattr(left.model, "_keys_to_ignore_on_load_unexpected", None) or ()
    is_named = any(
        f"{left.depth}" in pattern and re.search(pattern, left.weight)
        for pattern in patterns
    )
    return range(left.depth, left.depth + max(n_later, int(is_named)))


def _always(_: LeftTensor, __: re.Match[str]) -> bool:
    return True


def _is_vector(left: LeftTensor, _: re.Match[str]) -> bool:
    return len(left.tensor.shape) == 1


def _is_one_number(left: LeftTensor, _: re.Match[str]) -> bool:
    return all(size == 1 for size in left.tensor.shape)


def _is_whole(left: LeftTensor, _: re.Match[str]) -> bool:
    return left.tensor.holds_whole_numbers


def _is_made_anew(left: LeftTensor, _: re.Match[str]) -> bool:
    """Say whether the model makes a buffer of this name with the same numbers, up to
    their rounding in 16 bits.
    """
    buffer = dict(left.model.named_buffers()).get(left.weight)
    if buffer is None or tuple(buffer.shape) != left.tensor.shape:
        return False
    saved = left.tensor.read().float()
    return torch.allclose(saved, buffer.float().cpu(), rtol=1e-2, atol=1e-2)


def _is_mask(left: LeftTensor, _: re.Match[str]) -> bool:
    """Say whether a square has no entries but 0 and 1, which are not learned."""
    *others, n_rows, n_columns = (0, 0, *left.tensor.shape)
    is_square = n_rows == n_columns > 1 and all(size <= 1 for size in others)
    if not is_square:
        return False
    entries = left.tensor.read().float()
    return bool(((entries == 0) | (entries == 1)).all())


def _adds_zeros(left: LeftTensor, _: re.Match[str]) -> bool:
    """Say whether a bias of a matrix is zero."""
    matrix = left.weights.get(f"{left.weight.removesuffix('bias')}weight")
    is_of_matrix = matrix is not None and len(matrix.shape) == 2
    if not is_of_matrix or len(left.tensor.shape) != 1:
        return False
    return not left.tensor.read().float().any()


def _lacks_part(left: LeftTensor, match: re.Match[str]) -> bool:
    """Say whether the model has no such part at all: a stray tensor of one that it has
    would be missed.
    """
    part = match["part"]
    return not any(part in name.split(".") for name in left.weights)


def _is_later(left: LeftTensor, match: re.Match[str]) -> bool:
    """Say whether a layer predicts later tokens; transformers leaves it out."""
    return int(match["layer"]) in _later_layers(left)


def _is_shared(left: LeftTensor, match: re.Match[str]) -> bool:
    """Say whether a layer takes the keys and values of an earlier one, which has such a
    weight itself.
    """
    n_shared = int(getattr(left.config, "num_kv_shared_layers", None) or 0)
    first_shared = left.depth - n_shared
    start, end = match.span("layer")
    earlier = f"{match.string[:start]}0{match.string[end:]}"
    is_shared = 0 < first_shared <= int(match["layer"]) < left.depth
    return is_shared and earlier in left.weights


def _is_quantized(left: LeftTensor, _: re.Match[str]) -> bool:
    return left.is_quantized


class _Harmless(NamedTuple):
    """Names of tensors that may be left out where the condition holds."""

    names: str
    reason: str
    holds: Callable[[LeftTensor, re.Match[str]], bool]


_HARMLESS = (
    _Harmless(
        r"(^|[._])inv_freq$|(^|\.)rope\.freqs$",
        "angles of rotations, which the configuration says",
        _is_vector,
    ),
    _Harmless(
        r"(^|\.)rotary_emb\.(cos|sin)(_cached)?$",
        "cosines and sines of these angles at each position",
        _always,
    ),
    _Harmless(
        r"(^|\.)masked_bias$|(^|\.)version$",
        "what a mask puts in the place of scores, or the version of a format",
        _is_one_number,
    ),
    _Harmless(
        r"(^|\.)(bias|(causal_|attn_|attention_)?mask)$",
        "a mask of what tokens see, which the architecture says",
        _is_mask,
    ),
    _Harmless(
        r"(^|\.)(position_ids|token_type_ids|relative_position_index|num_batches_tracked)$",
        "whole numbers that count positions, kinds of tokens or steps of training",
        _is_whole,
    ),
    _Harmless(
        r"\.bias$",
        "it is zero, and adds nothing",
        _adds_zeros,
    ),
    _Harmless(
        rf"^(?:\w+\.)?(?P<part>{_HEADS})\.",
        "it reads the stream behind the last block, and makes no logits",
        _lacks_part,
    ),
    _Harmless(
        rf"{_NO_NUMBER}(?P<part>mtp(_\w+)?|medusa_heads?)\.",
        "it predicts tokens after the next one, from the stream behind the last block",
        _lacks_part,
    ),
    _Harmless(
        rf"{_NO_NUMBER}(?P<layer>\d+)\.",
        "its layer is behind the last one, and predicts tokens after the next one",
        _is_later,
    ),
    _Harmless(
        _IN_TOWER,
        "it reads pictures or sounds, or speaks, where the model is one of text",
        _lacks_part,
    ),
    _Harmless(
        rf"{_NO_NUMBER}(?P<layer>\d+)\.self_attn\.[kv]_(proj|norm)\.weight$",
        "its layer takes the keys and values of an earlier one",
        _is_shared,
    ),
    _Harmless(
        r"\.((input|activation|output|q|k|v|kv)_scale)$",
        "activations are divided by it where they are rounded, and here they are not",
        _is_quantized,
    ),
    # The last, as it looks at all buffers.
    _Harmless(
        r".",
        "a buffer that the model makes by itself, of the same numbers",
        _is_made_anew,
    ),
)
