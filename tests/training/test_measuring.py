"""Measuring inside a training loop: nothing of the training changes, and the numbers are
those of saved checkpoints.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
import tl_coupling as tlc
from tl_coupling.training.measuring import undisturbed

IDS = [[1, 5, 3, 9, 2, 7]]


def model_in_training(architecture: str) -> nn.Module:
    changes: dict[str, Any] = {}
    if architecture == "gpt2":
        changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    return tiny.huggingface_model(architecture, **changes).train()


def losses(
    model: nn.Module, n_steps: int, measured: tlc.training.CouplingCallback | None
) -> list[float]:
    """The losses of a plain loop, with or without measurements."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    found = []
    for step in range(n_steps):
        if measured is not None:
            measured.step(step, model)
        ids = torch.randint(0, 90, (2, 12), generator=generator)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_losses_of_training_are_the_same_to_the_bit(architecture: str) -> None:
    callback = tlc.training.CouplingCallback(IDS, every=5, k=4)
    with_it = losses(model_in_training(architecture), 12, callback)
    without = losses(model_in_training(architecture), 12, None)
    assert with_it == without
    assert callback.steps == [0, 5, 10]


@pytest.mark.long("trains four models for 50 steps")
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_losses_of_50_steps_of_a_trainer_are_the_same(
    architecture: str, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    def train(callbacks: list[Any], folder: Path) -> list[float]:
        torch.manual_seed(0)
        model = model_in_training(architecture)
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(0, 90, (100, 12), generator=generator)
        data = [{"input_ids": row, "labels": row} for row in ids]
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=50,
            per_device_train_batch_size=2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        for callback in callbacks:
            callback.log = trainer.log
        trainer.train()
        if callbacks:
            logged = [
                line["coupling/mean"]
                for line in trainer.state.log_history
                if "coupling/mean" in line
            ]
            assert len(logged) == len(callbacks[0].steps)
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    callback = tlc.training.CouplingCallback(IDS, every=10, k=4)
    with_it = train([callback], tmp_path / "a")
    without = train([], tmp_path / "b")
    assert len(with_it) == 50
    assert with_it == without
    assert callback.steps == [0, 10, 20, 30, 40, 50]


def test_a_trainer_in_16_bits_is_measured_in_float32(tmp_path: Path) -> None:
    """It puts autocast into the model's own call, where it stays after training."""
    from transformers import Trainer, TrainingArguments

    model = model_in_training("llama")
    data = [{"input_ids": torch.tensor(IDS[0]), "labels": torch.tensor(IDS[0])}] * 4
    callback = tlc.training.CouplingCallback(IDS, every=1, k=4)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        bf16=True,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    twin = tiny.huggingface_model("llama")
    twin.load_state_dict(model.state_dict())
    expected = tlc.trace(twin, IDS[0])
    last = callback.to_dataset()["mean_coupling"][-1]
    assert float(last.squeeze()) == pytest.approx(
        tlc.depth_coupling(expected, 4).mean(), abs=1e-6
    )
    # A model in memory is measured without it too, logits as well.
    own_forward = vars(model)["forward"]
    found = tlc.trace(model, IDS[0])
    torch.testing.assert_close(found.residual, expected.residual)
    stream = expected.residual[-1]
    torch.testing.assert_close(found.logits(stream), expected.logits(stream))
    assert vars(model)["forward"] == own_forward


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_coupling_is_that_of_the_saved_checkpoint(
    architecture: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    model = model_in_training(architecture)
    callback = tlc.training.CouplingCallback(IDS, every=4, k=(2, 4))
    losses(model, 5, callback)
    # Measured before the update of the step: as they are now.
    step = tlc.training.measure(
        tlc.training.callback.residual_blocks(model),
        lambda: model(torch.tensor(IDS)),
        k=4,
    )
    model.save_pretrained(tmp_path)
    tiny.save_tokenizer(tmp_path)
    saved = tlc.load_model(str(tmp_path))
    expected = tlc.depth_coupling(tlc.trace(saved, IDS[0]), k=4)
    # Two ways to the same blocks, in float32.
    assert abs(step.coupling - expected.mean()) < 1e-5
    assert step.null == pytest.approx(expected.null())
    assert torch.allclose(step.depth.coupling(), expected.coupling(), atol=1e-4)


def test_the_run_as_a_dataset_is_drawn_as_a_sweep() -> None:
    callback = tlc.training.CouplingCallback([*IDS, [3, 2, 1]], every=2, k=(2, 4))
    losses(model_in_training("llama"), 5, callback)
    data = callback.to_dataset()
    assert dict(data.sizes)["checkpoint"] == 3
    assert data["loss"].notnull().all()
    mean = data["mean_coupling"].sel(k=2, checkpoint=4, prompt="1").item()
    maps = data["coupling"].sel(k=2, checkpoint=4, prompt="1").values
    different = ~np.eye(len(maps), dtype=bool)
    assert mean == pytest.approx(maps[different].mean(), abs=1e-6)
    with tlc.plots.off_screen():
        figure = tlc.plots.plot_emergence(data, k=4)
    assert figure.axes


class Failing(nn.Module):
    """Raises where it is measured, with dropout before."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)
        assert not self.dropout.training
        raise RuntimeError("no memory")


def test_an_error_leaves_mode_gradients_and_random_numbers_as_they_were() -> None:
    model = Failing().train()
    model.blocks[1].eval()
    model.blocks[0].weight.grad = torch.ones(4, 4)
    # Python's own are drawn by the type checks at calls of the tests.
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with pytest.raises(RuntimeError, match="no memory"):
        tlc.training.measure(list(model.blocks), lambda: model(torch.randn(3, 4)), k=2)
    assert model.training
    assert model.dropout.training
    assert model.blocks[0].training
    assert not model.blocks[1].training
    assert torch.equal(model.blocks[0].weight.grad, torch.ones(4, 4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert not nn.modules.module._global_forward_pre_hooks


def test_random_numbers_that_are_drawn_inside_are_drawn_again() -> None:
    torch.manual_seed(0)
    with undisturbed([nn.Linear(2, 2)]):
        inside = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    after = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    assert torch.equal(inside[0], after[0])
    assert inside[1:] == after[1:]


def test_no_more_is_measured_than_max_seconds() -> None:
    callback = tlc.training.CouplingCallback(IDS, every=1, k=4, max_seconds=1e-6)
    model = model_in_training("llama")
    assert callback.step(0, model) is not None
    with pytest.warns(UserWarning, match=r"it is not measured at step 1 and later"):
        assert callback.step(1, model) is None


def test_bad_input_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="`prompts` is empty"):
        tlc.training.CouplingCallback([])
    with pytest.raises(ValueError, match="`tokenizer` is needed"):
        tlc.training.CouplingCallback("a text").step(0, model_in_training("llama"))
    with pytest.raises(ValueError, match="`blocks` must say which modules of Linear"):
        tlc.training.CouplingCallback(IDS).step(0, nn.Linear(2, 2))


def _train_in_parallel(rank: int, port: int, folder: str) -> None:
    import os

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    callback = tlc.training.CouplingCallback(IDS, every=2, k=4)
    measured = callback if rank == 0 else None
    # Models are not kept: one that outlives its process group may wait for it for ever.
    found = losses(DistributedDataParallel(model_in_training("llama")), 5, measured)
    plain = losses(DistributedDataParallel(model_in_training("llama")), 5, None)
    torch.save((found, plain, callback.steps), f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.long("starts two processes that train together")
def test_two_processes_train_as_without_it_and_the_first_measures(
    tmp_path: Path,
) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(
        _train_in_parallel, (port, str(tmp_path)), nprocs=2, join=True
    )
    for rank in range(2):
        found, plain, steps = torch.load(tmp_path / f"{rank}.pt")
        assert found == plain
        assert steps == ([0, 2, 4] if rank == 0 else [])
