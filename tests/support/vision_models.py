"""Tiny random networks that see, or read both ways, each with the way that its own
library runs it.
"""

import struct
import sys
import zlib
from collections.abc import Callable
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from transformers import ViTImageProcessorPil

from zoo.models import bridge, original_model, randomised

D_MODEL, N_LAYERS = 32, 3


class Network(NamedTuple):
    """A network, the path of its blocks, and its inputs by name."""

    model: nn.Module
    path: str
    inputs: dict[str, Any]

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.model.get_submodule(self.path).children())

    def run(self) -> Any:
        return self.model(**self.inputs)


def pixels(height: int = 16, width: int = 8) -> torch.Tensor:
    return torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))


def vit(name: str) -> tuple[nn.Module, nn.Module]:
    """Return a bridge of a HuggingFace model, and the model itself, which the bridge
    holds a copy of.
    """
    original = original_model(name, N_LAYERS)
    return bridge(original, None), original


def save_vit(folder: Path, name: str = "ViTForImageClassification") -> Path:
    """Return a folder with a tiny ViT, the same each time, and its processor; and an
    image, as the model reads it.
    """
    original_model(name, N_LAYERS).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 8}).save_pretrained(folder)
    colors = torch.randint(
        256, (16, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    Image.fromarray(colors.numpy()).save(folder / "image.png")
    return folder


def png_header(width: int, height: int) -> bytes:
    """Return a PNG of that size by its header, with the first bytes of its picture
    alone.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data))
            + kind
            + data
            + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(64)))
    )


class _Hollow(type):
    """A class that has everything that is looked up on it, hollow too."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Hollow(name, (), {})


class _HollowModule(ModuleType):
    __getattr__ = _Hollow.__getattr__


class _Torchvision(MetaPathFinder, Loader):
    """In place of torchvision, which timm imports and its ViT does not use; its wheel
    fails beside a torch for CPUs.
    """

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self, is_package=True)
            if name.split(".")[0] == "torchvision"
            else None
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _HollowModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def timm_vit() -> Network:
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    with mock.patch.object(sys, "meta_path", [_Torchvision(), *sys.meta_path]):
        from timm.models.vision_transformer import VisionTransformer
    # transformers asks what is installed.
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    options = {
        "img_size": (16, 8),
        "patch_size": 4,
        "embed_dim": D_MODEL,
        "depth": N_LAYERS,
        "num_heads": 4,
    }
    model = randomised(
        lambda: VisionTransformer(**options, num_classes=5, init_values=0.5).eval()
    )
    return Network(model, "blocks", {"x": pixels()})


def torch_encoder(batch_first: bool = True, norm_first: bool = True) -> Network:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            D_MODEL, 4, 64, batch_first=batch_first, norm_first=norm_first
        )
        return nn.TransformerEncoder(layer, N_LAYERS, enable_nested_tensor=False).eval()

    x = torch.randn(1, 7, D_MODEL, generator=torch.Generator().manual_seed(1))
    return Network(
        randomised(build), "layers", {"src": x if batch_first else x.transpose(0, 1)}
    )


def bert() -> Network:
    from transformers import BertConfig, BertModel

    sizes = {
        "hidden_size": D_MODEL,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    model = randomised(
        lambda: BertModel(BertConfig(num_hidden_layers=N_LAYERS, **sizes)).eval()
    )
    return Network(
        model, "encoder.layer", {"input_ids": torch.tensor([[3, 14, 15, 92, 65, 35]])}
    )


def without_adapter(class_name: str, config_name: str, path: str) -> Network:
    """Return a vision model of HuggingFace that TransformerLens has no adapter for."""
    sizes = {
        "hidden_size": D_MODEL,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "image_size": 8,
    }
    config = getattr(transformers, config_name)(
        num_hidden_layers=N_LAYERS, patch_size=4, **sizes
    )
    model = randomised(lambda: getattr(transformers, class_name)(config).eval())
    return Network(model, path, {"pixel_values": pixels(8, 8)})


NO_ADAPTER = {
    "dinov2": partial(without_adapter, "Dinov2Model", "Dinov2Config", "encoder.layer"),
    "clip": partial(
        without_adapter, "CLIPVisionModel", "CLIPVisionConfig", "encoder.layers"
    ),
    "deit with teacher": partial(
        without_adapter,
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        "deit.layers",
    ),
}
NETWORKS: dict[str, Callable[[], Network]] = {
    "timm": timm_vit,
    "torch": torch_encoder,
    "bert": bert,
    **NO_ADAPTER,
}
