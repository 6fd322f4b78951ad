"""One table of small configs for every architecture that TransformerLens' registry
names; tests and zoo build from it.

Sizes are those of `tiny.py`. A window or chunk is shorter than the prompt, so that it
really hides something; a model with several kinds of layers has each kind among its
first two or three.
"""

from collections.abc import Mapping
from typing import Any

D_MODEL, N_HEADS, D_HEAD, D_MLP, VOCAB, N_CTX = 32, 4, 8, 48, 100, 32


class Depth:
    """Stands for the number of layers."""


class Each(tuple[Any, ...]):
    """Stands for one entry per layer, taken in turn."""


def at_depth(value: Any, n_layers: int) -> Any:
    """Return a config with its `Depth` and `Each` filled in."""
    if value is Depth:
        return n_layers
    if isinstance(value, Each):
        return [
            at_depth(value[layer % len(value)], n_layers) for layer in range(n_layers)
        ]
    if isinstance(value, Mapping):
        return {key: at_depth(entry, n_layers) for key, entry in value.items()}
    return value


IDS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BASE: dict[str, Any] = {
    **IDS,
    "hidden_size": D_MODEL,
    "num_hidden_layers": Depth,
    "num_attention_heads": N_HEADS,
    "intermediate_size": D_MLP,
    "max_position_embeddings": N_CTX,
}
GROUPED: dict[str, Any] = {**BASE, "num_key_value_heads": 2}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": D_HEAD}
GPT: dict[str, Any] = {
    **IDS,
    "n_embd": D_MODEL,
    "n_layer": Depth,
    "n_head": N_HEADS,
    "n_positions": N_CTX,
}
SLIDING: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": Each(("sliding_attention", "full_attention")),
}
GEMMA: dict[str, Any] = {**HEADS, **SLIDING, "query_pre_attn_scalar": D_HEAD}
LINEAR: dict[str, Any] = {
    "layer_types": Each(("linear_attention", "full_attention")),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 16}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
# Keys and values of low rank, one part of them rotated.
LATENT: dict[str, Any] = {
    "num_key_value_heads": N_HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}

DECODERS: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {**HEADS, **EXPERTS, **SLIDING, "num_dense_layers": 1},
    "ApertusForCausalLM": GROUPED,
    "ArceeForCausalLM": HEADS,
    "BambaForCausalLM": {**GROUPED, **MAMBA2, "attn_layer_indices": [1]},
    "BertForMaskedLM": BASE,
    "BertLMHeadModel": {**BASE, "is_decoder": True},
    "BitNetForCausalLM": GROUPED,
    "BloomForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "n_layer": Depth,
        "n_head": N_HEADS,
    },
    "CodeGenForCausalLM": {**GPT, "n_ctx": N_CTX, "rotary_dim": 4, "n_inner": D_MLP},
    "Cohere2ForCausalLM": {**HEADS, **SLIDING},
    "CohereForCausalLM": GROUPED,
    "DeepseekV2ForCausalLM": {**BASE, **LATENT, **ROUTED, "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {**BASE, **LATENT, **ROUTED, "first_k_dense_replace": 1},
    "DeepseekV4ForCausalLM": {
        **BASE,
        **ROUTED,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "partial_rotary_factor": 0.5,
        "sliding_window": 4,
        "layer_types": Each(
            (
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            )
        ),
        "compress_rates": {
            "compressed_sparse_attention": 2,
            "heavily_compressed_attention": 4,
        },
        "mlp_layer_types": Each(("moe",)),
    },
    "Ernie4_5ForCausalLM": HEADS,
    "Ernie4_5_MoeForCausalLM": {
        **GROUPED,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "Exaone4ForCausalLM": {**GROUPED, **SLIDING},
    "FalconForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "num_hidden_layers": Depth,
        "num_attention_heads": N_HEADS,
        "ffn_hidden_size": D_MLP,
    },
    "FalconH1ForCausalLM": {**HEADS, **MAMBA2, "mamba_d_ssm": 64},
    "FalconMambaForCausalLM": {**BASE, "state_size": 8, "time_step_rank": 4},
    "FlexOlmoForCausalLM": {**GROUPED, **EXPERTS},
    "GPT2LMHeadModel": {**GPT, "n_ctx": N_CTX},
    "GPTBigCodeForCausalLM": GPT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4, "n_inner": D_MLP},
    "GPTNeoForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "num_layers": Depth,
        "num_heads": N_HEADS,
        "intermediate_size": D_MLP,
        "attention_types": Each(([["global"], 1], [["local"], 1])),
        "window_size": 4,
        "max_position_embeddings": N_CTX,
    },
    "GPTNeoXForCausalLM": {**BASE, "rotary_pct": 0.5},
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Gemma4ForCausalLM": {
        **HEADS,
        **SLIDING,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
    },
    "GemmaForCausalLM": HEADS,
    "Glm4ForCausalLM": HEADS,
    "Glm4MoeForCausalLM": {**HEADS, **ROUTED, "first_k_dense_replace": 1},
    "Glm4MoeLiteForCausalLM": {
        **BASE,
        **LATENT,
        **ROUTED,
        "mlp_layer_types": Each(("dense", "sparse")),
    },
    "GlmForCausalLM": HEADS,
    "GlmMoeDsaForCausalLM": {
        **BASE,
        **LATENT,
        **ROUTED,
        "mlp_layer_types": Each(("dense", "sparse")),
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
    },
    "GptOssForCausalLM": {**HEADS, **LOCAL_EXPERTS, **SLIDING},
    "GraniteForCausalLM": {
        **GROUPED,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 4.0,
    },
    "GraniteMoeForCausalLM": {**GROUPED, **LOCAL_EXPERTS, "residual_multiplier": 0.5},
    "GraniteMoeHybridForCausalLM": {
        **GROUPED,
        **LOCAL_EXPERTS,
        **MAMBA2,
        "layer_types": Each(("mamba", "attention")),
        "shared_intermediate_size": 16,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.5,
    },
    "HrmTextForCausalLM": {**HEADS, "num_layers_per_stack": Depth, "prefix_lm": False},
    "HunYuanDenseV1ForCausalLM": HEADS,
    "Jais2ForCausalLM": HEADS,
    "JambaForCausalLM": {
        **GROUPED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "JetMoeForCausalLM": {**GROUPED, **LOCAL_EXPERTS, "kv_channels": 8},
    "LagunaForCausalLM": {
        **HEADS,
        **SHARED_EXPERT,
        **SLIDING,
        "num_attention_heads_per_layer": Each((N_HEADS,)),
        "mlp_layer_types": Each(("dense", "sparse")),
    },
    "Lfm2ForCausalLM": {
        **GROUPED,
        "layer_types": Each(("conv", "full_attention")),
        "block_auto_adjust_ff_dim": False,
    },
    "Lfm2MoeForCausalLM": {
        **GROUPED,
        **EXPERTS,
        "num_dense_layers": 1,
        "layer_types": Each(("conv", "full_attention")),
    },
    "Llama4ForCausalLM": {
        **HEADS,
        "num_local_experts": 4,
        "intermediate_size_mlp": 16,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 4,
        "layer_types": Each(("chunked_attention", "full_attention")),
        "no_rope_layers": Each((1, 0)),
    },
    "LlamaForCausalLM": GROUPED,
    "Mamba2ForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "num_hidden_layers": Depth,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
    },
    "MambaForCausalLM": {**BASE, "state_size": 8, "time_step_rank": 4},
    "MiniMaxM2ForCausalLM": {**HEADS, **LOCAL_EXPERTS},
    "Ministral3ForCausalLM": HEADS,
    "MistralForCausalLM": {**HEADS, "sliding_window": 4},
    "MixtralForCausalLM": {**GROUPED, **LOCAL_EXPERTS},
    "ModernBertDecoderForCausalLM": {**BASE, "local_attention": 8, **SLIDING},
    "MptForCausalLM": {
        **IDS,
        "d_model": D_MODEL,
        "n_layers": Depth,
        "n_heads": N_HEADS,
        "expansion_ratio": 2,
        "max_seq_len": N_CTX,
    },
    "NanoChatForCausalLM": GROUPED,
    "NemotronForCausalLM": HEADS,
    "NemotronHForCausalLM": {
        **HEADS,
        **ROUTED,
        "layers_block_type": Each(("linear_attention", "full_attention", "moe")),
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 16,
        "use_mamba_kernels": False,
    },
    "OPTForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "num_hidden_layers": Depth,
        "num_attention_heads": N_HEADS,
        "ffn_dim": D_MLP,
        "word_embed_proj_dim": D_MODEL,
        "max_position_embeddings": N_CTX,
    },
    "Olmo2ForCausalLM": GROUPED,
    "Olmo3ForCausalLM": {**GROUPED, **SLIDING},
    "OlmoForCausalLM": GROUPED,
    "OlmoHybridForCausalLM": {**GROUPED, **LINEAR, "linear_num_key_heads": 4},
    "OlmoeForCausalLM": {**GROUPED, **EXPERTS},
    "OpenAIGPTLMHeadModel": GPT,
    "Phi3ForCausalLM": {**GROUPED, "sliding_window": 4},
    "PhiForCausalLM": {**BASE, "partial_rotary_factor": 0.5},
    "PhiMoEForCausalLM": {**GROUPED, **LOCAL_EXPERTS},
    "Qwen2ForCausalLM": {
        **GROUPED,
        "use_sliding_window": True,
        "max_window_layers": 1,
        "sliding_window": 4,
    },
    "Qwen2MoeForCausalLM": {**GROUPED, **SHARED_EXPERT},
    "Qwen3ForCausalLM": HEADS,
    "Qwen3MoeForCausalLM": {**HEADS, **EXPERTS},
    "Qwen3NextForCausalLM": {**HEADS, **SHARED_EXPERT, **LINEAR},
    "Qwen3_5ForCausalLM": {**HEADS, **LINEAR},
    "Qwen3_5MoeForCausalLM": {**HEADS, **SHARED_EXPERT, **LINEAR},
    "RecurrentGemmaForCausalLM": {
        **HEADS,
        "lru_width": D_MODEL,
        "attention_window_size": 4,
        "block_types": ["recurrent", "attention"],
    },
    "RobertaForMaskedLM": {**BASE, "pad_token_id": 1},
    "RwkvForCausalLM": {
        **IDS,
        "hidden_size": D_MODEL,
        "attention_hidden_size": D_MODEL,
        "num_hidden_layers": Depth,
    },
    "SeedOssForCausalLM": HEADS,
    "SmolLM3ForCausalLM": {**GROUPED, "no_rope_layers": Each((1, 0))},
    "StableLmForCausalLM": GROUPED,
    "Starcoder2ForCausalLM": {**GROUPED, "sliding_window": 4},
    "VaultGemmaForCausalLM": GEMMA,
    "XGLMForCausalLM": {
        **IDS,
        "d_model": D_MODEL,
        "ffn_dim": D_MLP,
        "num_layers": Depth,
        "attention_heads": N_HEADS,
        "max_position_embeddings": N_CTX,
    },
    "YoutuForCausalLM": {**BASE, **LATENT},
    "Zamba2ForCausalLM": {
        **BASE,
        "num_key_value_heads": N_HEADS,
        "layers_block_type": Each(("linear_attention", "hybrid")),
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 4,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
}
