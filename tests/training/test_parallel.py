"""Models whose weights are spread over processes, in a group of one process on the CPU.

DeepSpeed is not installed here: attributes that its parameters have stand for it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import TrainerControl, TrainerState, TrainingArguments

import tiny
import tl_coupling as tlc

IDS = [[1, 5, 3, 9, 2, 7]]
K = 4


@pytest.fixture(autouse=True)
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def in_one_fsdp(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def with_own_parameters(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=True
    )


def with_an_fsdp_for_each_block(model: nn.Module) -> nn.Module:
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = in_one_fsdp(layer)
    return in_one_fsdp(model)


def fully_sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        parallelize_module(layer.mlp, mesh, {"up_proj": ColwiseParallel()})
    return model


def zero_3(model: nn.Module) -> nn.Module:
    for i, weight in enumerate(model.parameters()):
        weight.ds_id = i
        weight.ds_shape = weight.shape
        weight.data = torch.empty(0)
    return model


SHARDED = {
    in_one_fsdp: "FSDP",
    with_own_parameters: "FSDP",
    with_an_fsdp_for_each_block: "FSDP",
    fully_sharded: "FSDP",
    tensor_parallel: "a DTensor",
    zero_3: "DeepSpeed's ZeRO-3",
}


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("shard", SHARDED)
def test_sharded_weights_are_refused_before_the_model_is_called(
    shard: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tiny.huggingface_model("llama").train()
    model = shard(inner)
    blocks = list(inner.model.layers)
    monkeypatch.setattr(inner, "forward", lambda *_: pytest.fail("it was called"))
    monkeypatch.setattr(model, "forward", lambda *_: pytest.fail("it was called"))
    ids = torch.tensor(IDS)
    callback = tlc.training.CouplingCallback(IDS, 1, K)
    refused: list[Callable[[], object]] = [
        lambda: callback.step(0, model),
        lambda: tlc.training.measure(blocks, lambda: model(ids), K),
        lambda: tlc.training.coupling(blocks, lambda: model(ids), K),
        lambda: tlc.training.jacobians(blocks, lambda: model(ids)),
    ]
    message = f"are spread over processes by {SHARDED[shard]}.*train with DDP"
    for call in refused:
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
    assert all(module.training for module in model.modules())


def test_every_process_of_a_trainer_refuses(tmp_path: Path) -> None:
    """Where the first ended alone, the others would wait for it."""
    model = fully_sharded(tiny.huggingface_model("llama"))
    callback = tlc.training.CouplingCallback(IDS, 1, K)
    state = TrainerState(is_world_process_zero=False)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="are spread over processes by FSDP"):
        callback.on_train_begin(arguments, state, TrainerControl(), model=model)


def test_what_run_calls_beside_the_blocks_is_refused_before_it_is_called() -> None:
    """An embedding whose weights are spread, of blocks whose weights are not."""
    model = tiny.huggingface_model("llama").train()
    fully_shard(model.model.embed_tokens, mesh=init_device_mesh("cpu", (1,)))
    blocks = tiny.layers_of(model)
    for refused in (tlc.training.measure, tlc.training.coupling):
        with pytest.raises(ValueError, match=r"Embedding are spread over processes"):
            refused(blocks, lambda: model(torch.tensor(IDS)), K)
    assert all(module.training for module in model.modules())


def test_other_parallel_training_is_measured() -> None:
    """DDP, and ZeRO-1 and 2: each process has all weights."""
    model = tiny.huggingface_model("llama")
    expected = tlc.training.CouplingCallback(IDS, 1, K).step(0, model)
    wrapped = nn.parallel.DistributedDataParallel(model)
    callback = tlc.training.CouplingCallback(IDS, 1, K)
    wrapped.forward = lambda *_: pytest.fail("its own call waits for other processes")
    logs = callback.step(0, wrapped)
    assert expected is not None
    assert logs is not None
    assert logs["coupling/mean"] == expected["coupling/mean"]
    blocks = tiny.layers_of(model)
    ids = torch.tensor(IDS)
    tlc.training.coupling(blocks, lambda: wrapped.module(ids), K).backward()
    assert all(p.grad.isfinite().all() for p in blocks[0].parameters())
