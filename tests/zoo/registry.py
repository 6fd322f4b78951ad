"""What TransformerLens' registry names, and why some of it cannot be built from a
config.
"""

from zoo.models import HOOKED

_HUB_CODE = (
    "Its code is on the HuggingFace hub, not in transformers, so it is not built here. "
    "`load_model(name, trust_remote_code=True)` fetches it, and "
    "every trace is still checked against the recorded step."
)
_DIFFUSION = "A masked diffusion model: every token sees every other. "
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        (
            "BaiChuanForCausalLM",
            "BaichuanForCausalLM",
            "ExaoneForCausalLM",
            "InternLM2ForCausalLM",
            "OpenELMForCausalLM",
            "QwenForCausalLM",
        ),
        _HUB_CODE,
    ),
    **dict.fromkeys(
        (
            "BD3LM",
            "DreamModel",
            "GiddForDiffusionLM",
            "LLaDA2MoeModelLM",
            "LLaDAModelLM",
        ),
        _DIFFUSION + _HUB_CODE,
    ),
    "HyenaDNAForCausalLM": "Long convolutions in place of attention. " + _HUB_CODE,
    "OuroForCausalLM": "A looped model: its blocks run several times in one forward pass. "
    + _HUB_CODE,
    "RWKV7ForCausalLM": "Recurrent; also needs the package flash-linear-attention. "
    + _HUB_CODE,
    "RavenForCausalLM": "A looped model that starts from random numbers. " + _HUB_CODE,
}
# What is measured under a name that is no class of transformers.
_LEGACY = (
    "TransformerLens loads these checkpoints into its own model "
    "(`boot_tl_legacy`), which is measured."
)
_TEXT_ONLY = (
    "TransformerLens requires the package torchvision (built for "
    "the same torch); the text stack, which is measured "
    "here, does not need it."
)
MEASURED_AS: dict[str, str] = {
    **dict.fromkeys(
        (
            "Glm4vForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        _TEXT_ONLY,
    ),
    "BloomModel": "TransformerLens loads such checkpoints as BloomForCausalLM.",
    "GPT2LMHeadCustomModel": (
        "Measured with GPT-2's modules, which the adapter "
        "expects; its own code is on the hub."
    ),
    "Gemma1ForCausalLM": "Another name of GemmaForCausalLM.",
    "JetMoEForCausalLM": "Another name of JetMoeForCausalLM.",
    "MPTForCausalLM": "Another name of MptForCausalLM.",
    "MinGPTForCausalLM": _LEGACY,
    "NanoGPTForCausalLM": "Measured with GPT-2's modules, which the adapter expects.",
    "NeelSoluOldForCausalLM": _LEGACY,
    "NeoForCausalLM": "Another name of GPTNeoForCausalLM.",
    "NeoXForCausalLM": "Another name of GPTNeoXForCausalLM.",
    "PhiMoEForCausalLM": "Measured as transformers' PhimoeForCausalLM.",
    "T5WithLMHeadModel": "Another name of T5ForConditionalGeneration.",
    "Wav2Vec2ForPreTraining": "TransformerLens loads such checkpoints as Wav2Vec2Model.",
    "TransformerLensPretrain": (
        "Measured with a small module of the protocol that the adapter asks for."
    ),
}


def names_of_this_line() -> list[str]:
    """Every architecture of the installed TransformerLens, and HookedTransformer's
    kinds where it still has one.
    """
    from transformer_lens.factories.architecture_adapter_factory import (
        SUPPORTED_ARCHITECTURES,
    )

    from tiny import HAS_HOOKED_TRANSFORMER

    return [
        *sorted(SUPPORTED_ARCHITECTURES, key=str.lower),
        *(HOOKED if HAS_HOOKED_TRANSFORMER else ()),
    ]
