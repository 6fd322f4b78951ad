"""What formats of quantised weights are called, by a configuration or by the tensors of
a file; and what may be done about one that cannot be read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

FLOAT_INSTEAD = (
    "load its float checkpoint, with `quantization=` if you wish, or a GGUF file"
)
# The ends of tensors' names in files of each format. A file is in the first format
# whose ends it has all, in one of the alternatives.
_ENDINGS = {
    "NVFP4": ({"weight_scale_2"}, {"weight_packed", "weight_global_scale"}),
    "compressed-tensors": ({"weight_packed"}, {"weight_scale", "weight_zero_point"}),
    "GPTQ or AWQ": ({"qweight"},),
    "MXFP4": ({"gate_up_proj_blocks"}, {"down_proj_blocks"}),
    "bitsandbytes in 4 bits": ({"quant_map", "absmax"},),
    "bitsandbytes in int8": ({"SCB"},),
    "MLX": ({"scales", "biases"},),
    "HQQ": ({"W_q"},),
    "AQLM": ({"codebooks"},),
    "torchao": ({"weight_qdata"},),
    "FP8 with a scale for each block": ({"weight_scale_inv"},),
}
# Where configurations speak of quantisation that transformers does not look: that of
# compressed-tensors until 2024, and that of MLX.
_UNREAD = ("compression_config", "quantization")
_EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


def quantization_fields(
    config: Any, places: Sequence[str] = ("quantization_config",)
) -> dict[str, Any] | None:
    """Return what a HuggingFace configuration, or that of its text, says of
    quantisation; None where it says nothing.
    """
    for owner in (config, getattr(config, "text_config", None)):
        for place in places:
            fields: Any = getattr(owner, place, None)
            if isinstance(fields, dict):
                return fields
            if hasattr(fields, "to_dict"):
                return fields.to_dict()
    return None


def unread_format(config: Any) -> str | None:
    """Return what a configuration calls the format in a place where transformers does
    not look; None where it says nothing.
    """
    fields = quantization_fields(config, _UNREAD)
    return None if fields is None else format_of_fields(fields)


def format_of_fields(fields: Mapping[str, Any]) -> str:
    """Return what a format is called whose configuration has these fields, such as
    "compressed-tensors (nvfp4-pack-quantized)".
    """
    method = fields.get("quant_method")
    name = str(getattr(method, "value", method))
    if method is None:
        # Those of MLX name no method.
        is_mlx = {"bits", "group_size"} <= fields.keys()
        name = "MLX" if is_mlx else "a method without a name (`quant_method`)"
    kind = fields.get("quant_algo") or fields.get("format")
    return f"{name} ({kind})" if isinstance(kind, str) else name


def format_of_tensors(names: Collection[str], dtypes: Collection[str]) -> str | None:
    """Return what the format is called of a file with tensors of these names, and codes
    of these dtypes; None where it is not known.
    """
    endings = {name.rpartition(".")[2] for name in names}
    for name, alternatives in _ENDINGS.items():
        if any(alternative <= endings for alternative in alternatives):
            return name
    if all(dtype in _EIGHT_BITS for dtype in dtypes):
        return "FP8"
    return None
