"""Weights that come in other forms than a checkpoint's own: GGUF files, quantised
weights, weights that stay on disk.
"""
# ruff: noqa: F401

from tl_coupling.models.weights.gguf_files import GgufModel, is_gguf
from tl_coupling.models.weights.quantized import (
    Quantization,
    dequantising,
    needs_package,
    refuse_streaming,
)
from tl_coupling.models.weights.streaming import (
    filled,
    hollow_cuts,
    hollow_model,
    looked_up,
    looks_up,
)
