"""Configs of what is more or other than a decoder of text: towers for images and sound,
encoders, two stacks.

Only the text stack of a model with towers is measured; the towers are as small as can
be built.
"""

from typing import Any

from zoo.configs import (
    BASE,
    D_MLP,
    D_MODEL,
    DECODERS,
    GEMMA,
    GROUPED,
    HEADS,
    IDS,
    LINEAR,
    LOCAL_EXPERTS,
    N_CTX,
    N_HEADS,
    SHARED_EXPERT,
    SLIDING,
    VOCAB,
    Depth,
    Each,
)

_MARKS = {
    "image_token_id": 98,
    "image_token_index": 98,
    "video_token_id": 97,
    "audio_token_id": 96,
}
_TOWER: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": N_HEADS,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_heads": N_HEADS,
    "out_hidden_size": D_MODEL,
    "patch_size": 4,
    "image_size": 8,
    "num_position_embeddings": 16,
}
_AUDIO_TOWER: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "intermediate_size": D_MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": N_HEADS,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}


def _tower(
    text: dict[str, Any], vision: dict[str, Any] | None = _TOWER, **others: Any
) -> dict[str, Any]:
    return _MARKS | {"text_config": text, "vision_config": vision} | others


# Three coordinates of a position, one for each part of the rotated dimensions.
_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    }
}
_LLAMA = {"model_type": "llama", **GROUPED}
_QWEN2 = {"model_type": "qwen2", **GROUPED}
_GEMMA4 = {**DECODERS["Gemma4ForCausalLM"]}
_HEARING: dict[str, Any] = {
    **_MARKS,
    "text_config": _QWEN2,
    "audio_config": _AUDIO_TOWER,
}

WITH_TOWERS: dict[str, dict[str, Any]] = {
    "AudioFlamingo3ForConditionalGeneration": _HEARING,
    "Emu3ForConditionalGeneration": {
        **_MARKS,
        "text_config": GROUPED,
        "vq_config": {
            "codebook_size": 8,
            "base_channels": 32,
            "hidden_size": D_MODEL,
            "num_res_blocks": 1,
        },
        "vocabulary_map": {"<image>": 98},
    },
    "Gemma3ForConditionalGeneration": _tower(GEMMA, mm_tokens_per_image=4),
    "Gemma3nForConditionalGeneration": _tower(
        {
            **HEADS,
            **SLIDING,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": Each((0.0,)),
        },
        {"hidden_size": D_MODEL, "vocab_size": 8, "vocab_offset": VOCAB},
        audio_config={
            "hidden_size": D_MODEL,
            "vocab_size": 8,
            "vocab_offset": VOCAB + 8,
            "input_feat_size": 8,
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 2,
            "sscp_conv_channel_size": [8, 4],
        },
    ),
    "Gemma4ForConditionalGeneration": _tower(_GEMMA4, None),
    "Gemma4UnifiedForConditionalGeneration": _tower(_GEMMA4, None),
    "Glm4vForConditionalGeneration": _tower({**GROUPED, **_MROPE}, _QWEN_TOWER),
    "GlmAsrForConditionalGeneration": {**_HEARING, "text_config": _LLAMA},
    "Idefics3ForConditionalGeneration": _tower(_LLAMA),
    "Llama4ForConditionalGeneration": _tower(
        DECODERS["Llama4ForCausalLM"],
        {
            **_TOWER,
            "vision_output_dim": D_MODEL,
            "projector_input_dim": D_MODEL,
            "projector_output_dim": D_MODEL,
        },
    ),
    "LlavaForConditionalGeneration": _tower(
        _LLAMA, {"model_type": "clip_vision_model", **_TOWER}
    ),
    "LlavaNextForConditionalGeneration": _tower(
        _LLAMA, {"model_type": "clip_vision_model", **_TOWER}
    ),
    "LlavaOnevisionForConditionalGeneration": _tower(
        _QWEN2, {"model_type": "siglip_vision_model", **_TOWER}
    ),
    "Mistral3ForConditionalGeneration": _tower(
        {"model_type": "mistral", **HEADS, "sliding_window": None},
        {"model_type": "pixtral", **_TOWER, "head_dim": 8},
    ),
    "MuseGlimmerForConditionalGeneration": _tower(
        {**HEADS, **SLIDING}, projector_hidden_size=D_MODEL
    ),
    "MusicFlamingoForConditionalGeneration": {
        **_HEARING,
        "audio_config": {"model_type": "audioflamingo3_encoder", **_AUDIO_TOWER},
    },
    "Qwen2AudioForConditionalGeneration": {
        **_HEARING,
        "audio_config": {
            "d_model": D_MODEL,
            "encoder_layers": 1,
            "encoder_attention_heads": N_HEADS,
            "encoder_ffn_dim": D_MLP,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
    },
    "Qwen2_5_VLForConditionalGeneration": _tower(
        {**GROUPED, **_MROPE},
        {**_QWEN_TOWER, "window_size": 8, "fullatt_block_indexes": [0]},
    ),
    "Qwen3VLForConditionalGeneration": _tower(
        {**HEADS, **_MROPE}, {**_QWEN_TOWER, "deepstack_visual_indexes": [0]}
    ),
    "Qwen3VLMoeForConditionalGeneration": _tower(
        {**HEADS, **LOCAL_EXPERTS, **_MROPE, "moe_intermediate_size": 16},
        {**_QWEN_TOWER, "deepstack_visual_indexes": [0]},
    ),
    "Qwen3_5ForConditionalGeneration": _tower({**HEADS, **LINEAR}, _QWEN_TOWER),
    "Qwen3_5MoeForConditionalGeneration": _tower(
        {**HEADS, **SHARED_EXPERT, **LINEAR}, _QWEN_TOWER
    ),
}

# Eight patches.
_SEES = {**BASE, "image_size": [16, 8], "patch_size": 4}
VISION: dict[str, dict[str, Any]] = dict.fromkeys(
    (
        "DeiTForImageClassification",
        "DeiTModel",
        "ViTForImageClassification",
        "ViTModel",
    ),
    _SEES,
)

_HEARS = {
    **{key: BASE[key] for key in BASE if key != "max_position_embeddings"},
    "conv_dim": [D_MODEL, D_MODEL],
    "conv_stride": [2, 2],
    "conv_kernel": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "codevector_dim": 16,
    "proj_codevector_dim": 16,
}
AUDIO: dict[str, dict[str, Any]] = {
    "ASTForAudioClassification": {
        **BASE,
        "patch_size": 4,
        "max_length": 16,
        "num_mel_bins": 16,
    },
    **dict.fromkeys(
        (
            "HubertForCTC",
            "HubertModel",
            "Wav2Vec2ForCTC",
            "Wav2Vec2ForPreTraining",
            "Wav2Vec2Model",
        ),
        _HEARS,
    ),
}

_BART: dict[str, Any] = {
    **IDS,
    "d_model": D_MODEL,
    "encoder_layers": Depth,
    "decoder_layers": Depth,
    "encoder_attention_heads": N_HEADS,
    "decoder_attention_heads": N_HEADS,
    "encoder_ffn_dim": D_MLP,
    "decoder_ffn_dim": D_MLP,
    "max_position_embeddings": N_CTX,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 0,
}
_T5: dict[str, Any] = {
    **IDS,
    "d_model": D_MODEL,
    "d_kv": 8,
    "d_ff": D_MLP,
    "num_layers": Depth,
    "num_decoder_layers": Depth,
    "num_heads": N_HEADS,
    "decoder_start_token_id": 0,
}
_GEMMA_STACKS: dict[str, Any] = {
    "encoder": GEMMA,
    "decoder": {**GEMMA, "cross_attention_hidden_size": D_MODEL},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "BartForConditionalGeneration",
            "BlenderbotForConditionalGeneration",
            "M2M100ForConditionalGeneration",
            "MBartForConditionalGeneration",
            "MarianMTModel",
            "PegasusForConditionalGeneration",
        ),
        _BART,
    ),
    "Florence2ForConditionalGeneration": _tower(
        _BART,
        {
            "embed_dim": [8],
            "depths": [1],
            "num_heads": [2],
            "num_groups": [2],
            "patch_size": [4],
            "patch_stride": [4],
        }
        | {
            "patch_padding": [0],
            "patch_prenorm": [False],
            "window_size": 2,
            "projection_dim": D_MODEL,
        },
    ),
    "LEDForConditionalGeneration": {
        **_BART,
        "attention_window": 4,
        "max_encoder_position_embeddings": N_CTX,
    },
    "LongT5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": _T5,
    "SwitchTransformersForConditionalGeneration": {**_T5, "num_experts": 4},
    "T5ForConditionalGeneration": _T5,
    "T5Gemma2ForConditionalGeneration": {
        "encoder": {"text_config": GEMMA, "vision_config": _TOWER},
        "decoder": GEMMA,
    },
    "T5GemmaForConditionalGeneration": _GEMMA_STACKS,
}
