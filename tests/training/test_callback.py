"""What a callback measures of what it is given, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc

IDS = [[1, 5, 3, 9, 2, 7]]
K = 4


def measured(model: nn.Module, **options: Any) -> float:
    """Mean coupling of a model, by a callback of its own."""
    logs = tlc.training.CouplingCallback(IDS, 1, K, **options).step(0, model)
    assert logs is not None
    return logs["coupling/mean"]


class Plain(nn.Module):
    """An embedding and blocks."""

    def __init__(self, n_layers: int = 2, width: int = 16) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(
            layer(width, 2, 32, norm_first=True, batch_first=True)
            for _ in range(n_layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Whole(Plain):
    """A model of three blocks, in which another one, `module`, is a part."""

    def __init__(self) -> None:
        super().__init__(n_layers=3)
        self.module = Plain()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.module(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_part_that_is_called_module_is_a_part() -> None:
    torch.manual_seed(0)
    model = Whole().eval()
    ids = torch.tensor(IDS)
    trace = tlc.trace_modules(model.layers, lambda: model(ids))
    expected = tlc.depth_coupling(trace, K).mean()
    assert measured(model) == pytest.approx(expected, abs=1e-5)
    assert abs(measured(model.module) - expected) > 1e-3


def test_wrappers_that_compute_the_same_are_taken_off() -> None:
    model = tiny.huggingface_model("llama")
    expected = measured(model)

    class Calls(nn.Module):
        """What raises where the wrapper itself is called."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *_: object) -> None:
            raise AssertionError("the wrapper was called")

    wrappers: list[Callable[[nn.Module], nn.Module]] = [
        nn.DataParallel,
        torch.compile,
        lambda model: nn.DataParallel(torch.compile(model)),
        lambda model: torch.compile(nn.DataParallel(model)),
        torch.optim.swa_utils.AveragedModel,
    ]
    # Neither library is installed here: classes of these names stand for theirs.
    for module, name in (
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("lightning.fabric.wrappers", "_FabricModule"),
    ):
        facts = {"__module__": module, "__qualname__": name}
        engine = type(name, (Calls,), facts)
        wrappers += [engine, type("Subclass", (engine,), {})]
    for wrap in wrappers:
        assert measured(wrap(model)) == expected


def test_a_second_model_at_a_measured_step_is_refused() -> None:
    callback = tlc.training.CouplingCallback(IDS, 5, K)
    model, other = (tiny.huggingface_model("llama") for _ in range(2))
    assert callback.step(0, model) is not None
    # A loop may come by twice, as that of gradient accumulation, and a `Trainer` where
    # it goes on from a checkpoint.
    assert callback.step(0, model) is None
    assert callback.step(0, nn.DataParallel(model)) is None
    assert callback.step(3, other) is None
    with pytest.raises(ValueError, match="step 0 was measured already, of another mod"):
        callback.step(0, other)
    # One that was loaded anew for each step, as checkpoints are, is the same run.
    assert callback.step(5, other) is not None
    assert callback.to_dataset().sizes["checkpoint"] == 2


@pytest.mark.parametrize(
    ("other", "fact"),
    [(Plain(n_layers=3), "n_layers, got 2 and 3"), (Plain(width=8), "d_model, got 16")],
)
def test_models_of_two_shapes_are_not_one_run(other: nn.Module, fact: str) -> None:
    callback = tlc.training.CouplingCallback(IDS, 1, K)
    callback.step(0, Plain())
    with pytest.raises(ValueError, match=f"the same {fact}.*CouplingCallback for each"):
        callback.step(1, other)
    # What was measured is as it was.
    assert callback.steps == [0]
    assert callback.step(1, Plain()) is not None
    assert not callback.to_dataset()["coupling"].isnull().any()


@pytest.mark.parametrize(
    ("k", "message"),
    [((), "`k` is empty"), (0, "`k` must be at least 1"), ((4, -1), "`k` must be")],
)
def test_a_k_that_is_none_is_refused_at_once(k: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.training.CouplingCallback(IDS, k=k)


@pytest.mark.parametrize(
    "prompts", [[[]], [[1, 2], []], ["", "a"], "", torch.empty(1, 0, dtype=torch.long)]
)
def test_an_empty_prompt_is_refused_at_once(prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"`prompts\[\d\]` is empty: wanted at least"):
        tlc.training.CouplingCallback(prompts)


def test_a_text_without_tokens_is_refused() -> None:
    def tokenizer(text: str, **_: object) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([[1, 2][: len(text.split())]])}

    model = Plain().eval()
    options = {"every": 1, "k": K, "tokenizer": tokenizer}
    callback = tlc.training.CouplingCallback(["a text", " "], **options)
    with pytest.raises(ValueError, match=r"`prompts\[1\]` is empty"):
        callback.step(0, model)
    assert callback.steps == []


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "opt", "gemma2"])
def test_ids_beyond_the_vocabulary_are_refused_in_one_line(architecture: str) -> None:
    """All that are within are taken: tables of positions have fewer rows than ids."""
    model = tiny.huggingface_model(architecture)
    n = model.config.vocab_size
    for token in (n, -1):
        callback = tlc.training.CouplingCallback([[1, 2], [3, token]], 1, K)
        with pytest.raises(ValueError, match=rf"`prompts\[1\]` asks for.*has {n}: giv"):
            callback.step(0, model)
    callback = tlc.training.CouplingCallback([[0, n - 1, n - 2]], 1, K)
    assert callback.step(0, model) is not None


def test_a_prompt_beyond_the_context_is_refused_in_one_line() -> None:
    model = tiny.huggingface_model("gpt2")
    n = model.config.n_positions
    callback = tlc.training.CouplingCallback([[1] * (n + 1)], 1, K)
    with pytest.raises(ValueError, match=f"rows 0 … {n} of a table.*has {n}"):
        callback.step(0, model)
