"""What the pages send to W&B and TensorBoard: their code as it stands, against a run
that is disabled and a writer that writes down what it gets.
"""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pages
import tl_coupling as tlc

PAGE = pages.ROOT / "docs/how-to/tables.md"
BLOCKS = pages.blocks(PAGE)


def code_that_imports(name: str) -> str:
    (block,) = [block for block in BLOCKS if f" {name}" in block.text.splitlines()[0]]
    # It is not run with the page.
    assert block.needs
    return block.text


def test_wandb_takes_provenance_pictures_and_tables(
    tiny_trace: tlc.Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb: Any = pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    result = tlc.depth_coupling(tiny_trace, k=10)
    tlc.plot_coupling(result).figure.savefig("coupling.png")
    begun: dict[str, Any] = {}
    logged: dict[str, Any] = {}

    def init(**given: Any) -> SimpleNamespace:
        begun.update(given)
        return SimpleNamespace(log=logged.update, finish=lambda: None)

    monkeypatch.setattr(wandb, "init", init)
    names = {"result": result, "table": result.to_dataframe([5, 10])}
    exec(code_that_imports("wandb"), names)
    assert json.loads(json.dumps(begun["config"])) == begun["config"]
    assert logged["coupling"] == result.mean(10)
    assert logged["null"] == result.null(10)
    assert len(logged["pairs"].data) == 2 * tiny_trace.n_layers**2
    assert logged["map"].format == "png"


def test_tensorboard_gets_every_number_of_a_measured_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *given: written.append(given))
    module = SimpleNamespace(SummaryWriter=lambda folder: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    layer = torch.nn.TransformerEncoderLayer
    blocks = [layer(16, 2, 32, norm_first=True, batch_first=True) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), *blocks)
    coupling = tlc.training.CouplingCallback(
        [[1, 2, 3]], every=2, k=4, blocks=lambda model: blocks
    )
    exec(
        code_that_imports("torch.utils.tensorboard"),
        {"coupling": coupling, "model": model, "batches": range(3)},
    )
    assert {step for _, _, step in written} == {0, 2} == set(coupling.steps)
    names = {name for name, _, _ in written}
    assert names >= {"coupling/mean", "coupling/seconds"}
    means = coupling.to_dataset()["mean_coupling"].values.ravel()
    assert [v for name, v, _ in written if name == "coupling/mean"] == list(means)


def test_trainers_reports_have_the_names_that_the_page_says() -> None:
    from transformers.integrations.integration_utils import rewrite_logs

    page = (pages.ROOT / "docs/how-to/training.md").read_text()
    named = set(re.findall(r"`(train/coupling/\w+)`", page))
    assert len(named) == 2
    blocks = [torch.nn.TransformerEncoderLayer(16, 2, 32, norm_first=True)] * 2
    network = torch.nn.Sequential(*blocks)
    measured = tlc.training.measure(blocks, lambda: network(torch.randn(5, 1, 16)), k=4)
    assert named <= set(rewrite_logs(measured.logs()))
