"""What tells models, and modules that a user puts into one, apart."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from tl_coupling.models import module_digest, weights_digest


class Registered(nn.Module):
    """An SAE whose weights are parameters."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.W = nn.Parameter(W)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(x @ self.W)


class Hidden(nn.Module):
    """As SAELens keeps a spliced SAE: out of the registered modules."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.__dict__["_sae"] = Registered(W)

    def forward(self, x: Tensor) -> Tensor:
        return self.__dict__["_sae"](x)


class Plain(nn.Module):
    """Keeps its weights in a list in a dictionary."""

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.kept = {"weights": [W]}

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(x @ self.kept["weights"][0])


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def closure(W: Tensor) -> nn.Module:
    return Calls(lambda x: x + 0.1 * torch.tanh(x @ W))


def added(W: Tensor, x: Tensor) -> Tensor:
    return x + 0.1 * torch.tanh(x @ W)


def of_partial(W: Tensor) -> nn.Module:
    return Calls(partial(added, W))


def bound_method(W: Tensor) -> nn.Module:
    return Calls(Registered(W).forward)


KINDS = [Registered, Hidden, Plain, closure, of_partial, bound_method]


def weights(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 32, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_is_told_by_its_tensors_however_it_keeps_them(
    kind: Callable[[Tensor], nn.Module],
) -> None:
    first = module_digest(kind(weights(0)))
    assert first is not None
    assert first == module_digest(kind(weights(0).clone()))
    assert first != module_digest(kind(weights(1)))


def test_settings_and_code_tell_modules_apart_too() -> None:
    modules = [Registered(weights(0)) for _ in range(2)]
    modules[1].use_error_term = True
    assert module_digest(modules[0]) != module_digest(modules[1])
    W = weights(0)
    doubled = Calls(lambda x: x + 0.2 * torch.tanh(x @ W))
    assert module_digest(closure(W)) != module_digest(doubled)


def test_modules_without_tensors_are_not_known() -> None:
    assert module_digest(nn.Tanh()) is None
    assert weights_digest(nn.Tanh()) is None
    loop = Plain(weights(0))
    loop.kept["itself"] = loop
    assert module_digest(loop) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_two_spliced_modules_are_not_averaged(
    kind: Callable[[Tensor], nn.Module], tokenizer_folder: Path
) -> None:
    maps = []
    for seed in (0, 1):
        model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
        model.blocks[1].hook_out = kind(weights(seed))
        traced = tlc.trace(model, tiny.TOKENS[seed:])
        maps.append(tlc.depth_coupling(traced, k=3))
    spliced = [m.provenance["spliced"]["blocks.1.hook_out"] for m in maps]
    assert spliced[0] != spliced[1]
    with pytest.raises(ValueError, match=r"spliced|weights_digest"):
        tlc.mean_of_maps(maps)


def test_provenance_says_where_weights_are_not_known(tokenizer_folder: Path) -> None:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    model.blocks[1].hook_out = nn.Hardtanh(-100, 100)
    traced = tlc.trace(model, tiny.TOKENS)
    assert traced.provenance["spliced"] == {
        "blocks.1.hook_out": "Hardtanh (weights not known)"
    }
