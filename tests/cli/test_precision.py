"""`tl-coupling precision`, and `--quantization` and `--memory` of the other commands,
as a user meets them.
"""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

import tiny
import tl_coupling as tlc
from model_folders import save_gguf
from tl_coupling.studies.surveys import Settings, precision_changes, precision_sweep

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed",
)
TEXTS = {"one": "w3 w14 w15", "other": "w9 w2 w6 w5"}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text(
        "\n".join(
            json.dumps({"id": name, "prompt": text}) for name, text in TEXTS.items()
        )
    )
    return path


def by_hand(model: nn.Module, k: int) -> dict[str, dict[str, Any]]:
    """Of each prompt what should be compared, with numpy's SVD and plain loops."""
    expected: dict[str, dict[str, Any]] = {}
    for name, text in TEXTS.items():
        trace = tlc.trace(model, text)
        J = np.stack(
            [
                tlc.block_jacobian(trace, layer).double().numpy()
                for layer in range(trace.n_layers)
            ]
        )
        U, S, Vh = np.linalg.svd(J)
        C = np.empty((len(J), len(J)))
        for a in range(len(J)):
            for b in range(len(J)):
                A = U[b, :, :k].T @ J[a] @ Vh[b, :k].T
                C[a, b] = 1 - np.linalg.norm(A - np.diag(np.diag(A))) / np.linalg.norm(
                    A
                )
        score = float(tlc.line_shape_score(trace.residual)[-1])
        expected[name] = {
            "C": C[~np.eye(len(J), dtype=bool)],
            "U": U[..., :k],
            "S": S,
            "line_shape_score": score,
        }
    return expected


@pytest.mark.long("measures several precisions of a model")
@needs_bitsandbytes
def test_how_far_measures_move(
    call, folder_model: Path, prompts: Path, tmp_path: Path
) -> None:
    options = {"model": folder_model, "prompts": prompts, "k": [4, 8]}
    precisions = ["float32", "bfloat16", "nf4"]
    output = call(
        "precision", **options, precision=precisions, out=tmp_path / "out", drawn=True
    ).out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "precisions",
        "precision.nc",
        "table.csv",
        "summary.json",
        "precision.png",
        "precision.svg",
    }
    first = by_hand(tlc.load_model(str(folder_model)), 8)
    with (tmp_path / "out" / "table.csv").open() as file:
        rows = {
            (row["measure"], row["k"], row["precision"]): row
            for row in csv.DictReader(file)
        }

    rounded = tlc.load_model(str(folder_model))
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    for precision, model in (
        ("bfloat16", rounded),
        ("nf4", tlc.load_model(str(folder_model), quantization="nf4")),
    ):
        second = by_hand(model, 8)

        def changes(of: Any, second: dict[str, dict[str, Any]] = second) -> np.ndarray:
            return np.array([of(first[name], second[name]) for name in TEXTS])

        expected = {
            ("mean_coupling", "8"): changes(lambda a, b: (b["C"] - a["C"]).mean()),
            ("mean_normalized_miscoupling", "8"): changes(
                lambda a, b: (a["C"] - b["C"]).mean()
            ),
            ("pair_change", "8"): changes(
                lambda a, b: np.sqrt(((b["C"] - a["C"]) ** 2).mean())
            ),
            ("left_overlap", "8"): changes(
                lambda a, b: np.mean(
                    [
                        np.linalg.norm(u.T @ v) ** 2 / 8 - 1
                        for u, v in zip(a["U"], b["U"], strict=True)
                    ]
                )
            ),
            ("largest_singular_value_change", ""): changes(
                lambda a, b: abs(b["S"][:, 0] / a["S"][:, 0] - 1).mean()
            ),
            ("line_shape_score", ""): changes(
                lambda a, b: b["line_shape_score"] - a["line_shape_score"]
            ),
        }
        for (measure, k), of_prompts in expected.items():
            row = rows[measure, k, precision]
            assert float(row["change"]) == pytest.approx(of_prompts.mean(), abs=1e-5)
            assert float(row["spread"]) == pytest.approx(
                of_prompts.std(ddof=1), abs=1e-5
            )
    assert rows["mean_coupling", "8", "float32"]["change"] == "0.0"
    # Four bits move measures by more than bfloat16 does.
    assert abs(float(rows["pair_change", "8", "nf4"]["change"])) > abs(
        float(rows["pair_change", "8", "bfloat16"]["change"])
    )
    assert f"{float(rows['mean_coupling', '8', 'nf4']['change']):+.2g} ±" in output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["provenance"]["nf4"]["quantization"] == "nf4"
    assert "quantization" not in summary["provenance"]["bfloat16"]

    # Again, with one more: what is there is kept.
    written_at = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "out" / "precisions").glob("*.nc")
    }
    assert len(written_at) == 3
    settings = Settings(k=(4, 8))
    options_of_sweep = {
        "settings": settings,
        "folder": tmp_path / "out" / "precisions",
        "progress": False,
    }
    more = ["float32", "bfloat16", "nf4", "int8"]
    precision_sweep(
        str(folder_model),
        more,
        [tlc.Prompt(text, prompt_id) for prompt_id, text in TEXTS.items()],
        **options_of_sweep,
    )
    assert {path: path.stat().st_mtime_ns for path in written_at} == written_at
    assert len(list((tmp_path / "out" / "precisions").glob("*.nc"))) == 4


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_bfloat16_rounds_every_weight_and_nothing_else(
    architecture: str, tmp_path: Path
) -> None:
    """Of GPT-2 as well, whose bridge holds copies of the parts of fused matrices."""
    tiny.huggingface_model(architecture).save_pretrained(tmp_path / "model")
    tiny.save_tokenizer(tmp_path / "model")
    plain = tiny.huggingface_model(architecture)
    for parameter in plain.parameters():
        parameter.data = parameter.data.bfloat16().float()
    plain.save_pretrained(tmp_path / "rounded")
    tiny.save_tokenizer(tmp_path / "rounded")
    precisions = [f"same={tmp_path / 'rounded'}", "bfloat16"]
    data = precision_sweep(
        tmp_path / "model",
        precisions,
        "w3 w4 w5",
        settings=Settings(k=(4,)),
        progress=False,
    )
    assert float(data["pair_change"].sel(precision="bfloat16").max()) == 0
    assert float(data["loss"].diff("precision")[0, 0]) == 0


def save_tokenizer_of(gguf_file: Path, folder: Path) -> None:
    """The file's own: TransformerLens 3.9 gives its models one that always prepends a
    BOS token.
    """
    AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name
    ).save_pretrained(folder)


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)
def test_a_gguf_file_against_the_same_weights(tmp_path: Path) -> None:
    save_gguf(tmp_path / "tiny.gguf").save_pretrained(tmp_path / "same")
    save_tokenizer_of(tmp_path / "tiny.gguf", tmp_path / "same")
    precisions = ["float32", f"file={tmp_path / 'tiny.gguf'}"]
    data = precision_sweep(
        tmp_path / "same", precisions, "w3w4", settings=Settings(k=(4,)), progress=False
    )
    assert data["precision"].values.tolist() == ["float32", "file"]
    assert max(abs(row.change) for row in precision_changes(data)) < 1e-6


@pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)
def test_a_gguf_file_of_a_mistral_is_called_a_llama(tmp_path: Path) -> None:
    plain = save_gguf(tmp_path / "tiny.gguf")
    config = {
        name: x
        for name, x in plain.config.to_dict().items()
        if name not in ("model_type", "architectures")
    }
    mistral = MistralForCausalLM(MistralConfig(**config | {"sliding_window": None}))
    mistral.load_state_dict(
        {name: x for name, x in plain.state_dict().items() if name != "lm_head.bias"}
    )
    mistral.save_pretrained(tmp_path / "same")
    save_tokenizer_of(tmp_path / "tiny.gguf", tmp_path / "same")
    precisions = ["float32", f"file={tmp_path / 'tiny.gguf'}"]
    data = precision_sweep(
        tmp_path / "same", precisions, "w3w4", settings=Settings(k=(4,)), progress=False
    )
    assert data["precision"].values.tolist() == ["float32", "file"]
    assert max(abs(row.change) for row in precision_changes(data)) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--precision", "float32", "--precision", "nf5"],
            "`precisions` must be float32, bfloat16, int8, nf4, or NAME=",
        ),
        (
            ["--precision", "float32"],
            "`precisions` must be two or more, each once; got ['float32']",
        ),
        (
            ["--precision", "float32", "--precision", "float32"],
            "`precisions` must be two or more, each once",
        ),
        (
            ["--precision", "float32", "--precision", "q4="],
            "or NAME=MODEL for other weights of the same model",
        ),
    ],
)
def test_bad_precisions(
    call, folder_model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    errors = call(
        "precision", *options, model=folder_model, out=tmp_path / "out", status=2
    ).err
    assert message in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changed", [{"without": "identity"}, {"metric": "stream"}, {"method": "products"}]
)
def test_settings_that_are_not_of_whole_jacobians_are_refused(changed) -> None:
    settings = tlc.Settings(**changed)
    with pytest.raises(ValueError, match="leave `without`, `metric` and `method` out"):
        precision_sweep("gpt2", ["float32", "bfloat16"], settings=settings)


def test_without_bitsandbytes_nothing_is_begun(
    call, folder_model: Path, tmp_path: Path, monkeypatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "bitsandbytes" else find_spec(name),
    )
    errors = call(
        "precision", "--model", folder_model, "--out", tmp_path / "out", status=2
    ).err
    assert (
        "'int8' needs bitsandbytes, which is not installed: pip install \"tl-coupling[quantized]\""
        in errors
    )
    assert not (tmp_path / "out").exists()


def test_another_model_is_not_compared(
    call, folder_model: Path, tmp_path: Path
) -> None:
    tiny.huggingface_model("llama", num_hidden_layers=3).save_pretrained(
        tmp_path / "deeper"
    )
    tiny.save_tokenizer(tmp_path / "deeper")
    precisions = ["float32", f"deeper={tmp_path / 'deeper'}"]
    options = {
        "model": folder_model,
        "prompt": "w3 w4",
        "k": 4,
        "precision": precisions,
    }
    done = call("precision", **options, out=tmp_path / "out", status=1)
    assert (
        "deeper is not the model it is compared with: they have 3 "
        "blocks of width 32 and 2 blocks of"
    ) in done.err


@pytest.mark.long("measures many pairs of models")
@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("mistral", {}, "they are MistralForCausalLM and LlamaForCausalLM"),
        (
            "llama",
            {"num_attention_heads": 2, "head_dim": 16},
            "attention heads 2 and 4",
        ),
        ("llama", {"num_key_value_heads": 4}, "key-value heads 4 and 2"),
        ("llama", {"intermediate_size": 48}, "width of the MLP 48 and 64"),
        ("llama", {"vocab_size": 120}, "vocabulary 120 and 100"),
    ],
)
def test_another_architecture_of_the_same_width_is_not_compared(
    call, tmp_path: Path, architecture: str, changes: dict[str, int], message: str
) -> None:
    """Its blocks would be compared, and all of the change put down to rounding."""
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    for name, of, given in (("a", "llama", {}), ("b", architecture, changes)):
        tiny.huggingface_model(of, **(sizes | given)).save_pretrained(tmp_path / name)
        tiny.save_tokenizer(tmp_path / name)
    precisions = ["float32", f"b={tmp_path / 'b'}"]
    options = {
        "model": tmp_path / "a",
        "prompt": "w3 w4",
        "k": 4,
        "precision": precisions,
    }
    done = call("precision", **options, out=tmp_path / "out", status=1)
    said = [
        line
        for line in done.err.splitlines()
        if "b is not the model it is compared with" in line
    ]
    assert len(said) == 1
    assert said[0].endswith(
        f"b: ValueError: b is not the model it is compared with: {message}"
    )
    assert not list((tmp_path / "out" / "precisions").glob("b*.nc"))


def test_another_tokenizer_is_not_compared(
    call, folder_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder_model, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(
        file.read_text()
        .replace('"w3":', '"w3?":')
        .replace('"w4":', '"w3":')
        .replace('"w3?":', '"w4":')
    )
    precisions = ["float32", f"other={tmp_path / 'other'}"]
    options = {
        "model": folder_model,
        "prompt": "w3 w5",
        "k": 4,
        "precision": precisions,
    }
    done = call("precision", **options, out=tmp_path / "out", status=1)
    assert (
        "other is not the model it is compared with: it splits the prompts into other tokens"
        in done.err
    )


@pytest.mark.long("runs several commands")
@needs_bitsandbytes
def test_other_commands_quantise(
    call, folder_model: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--model", folder_model, "--k", 4, "--quantization", "nf4"]
    call("depth", *options, "--prompt", TEXTS["one"], "--out", tmp_path / "depth")
    got = tlc.CouplingMap.load(tmp_path / "depth" / "depth.nc")
    model = tlc.load_model(str(folder_model), quantization="nf4")
    torch.testing.assert_close(
        got.coupling(4),
        tlc.depth_coupling(tlc.trace(model, TEXTS["one"]), 4).coupling(4),
    )
    assert got.provenance["quantization"] == "nf4"
    errors = call(
        "depth", *options, "--untrained", "--out", tmp_path / "no", status=2
    ).err
    assert (
        "`--quantization` is for weights in files, and an "
        "untrained twin has none: give --no-untrained"
    ) in errors
    errors = call("depth", *options[:-1], "nf5", status=2).err
    assert "'nf5' is not one of 'nf4', 'int8'" in errors

    # The same model twice in one survey's folder, and an older survey's units as they
    # were.
    named = [tlc.Prompt(text, prompt_id) for prompt_id, text in TEXTS.items()]
    survey = tlc.Survey({"it": folder_model}, named, settings=Settings(k=(4,)))
    tlc.run_survey(survey, tmp_path / "survey" / "units", progress=False)
    units = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "survey" / "units").glob("it@main*")
    }
    options = {"model": f"it={folder_model}", "prompts": prompts, "k": 4}
    call("survey", **options, quantization="nf4", out=tmp_path / "survey")
    data = tlc.open_survey(tmp_path / "survey" / "units").load()
    assert {path: path.stat().st_mtime_ns for path in units} == units
    assert data["model"].values.tolist() == ["it", "it (nf4)"]
    coupling = data["mean_coupling"].sel(prompt="one", k=4).values.ravel()
    assert coupling[1] == pytest.approx(got.mean(4), abs=1e-5)
    assert abs(coupling[0] - coupling[1]) > 1e-4


def test_commands_leave_weights_in_their_files(
    call, folder_model: Path, tmp_path: Path
) -> None:
    options = ["--model", folder_model, "--k", 4, "--prompt", TEXTS["one"]]
    call("depth", *options, "--memory", "stream", "--out", tmp_path)
    stream = tlc.CouplingMap.load(tmp_path / "depth.nc")
    resident = tlc.depth_coupling(
        tlc.trace(tlc.load_model(str(folder_model)), TEXTS["one"]), 4
    )
    assert torch.equal(resident.matrices, stream.matrices)
    assert stream.provenance["memory"] == "stream"
    assert (
        "`--memory stream` is for weights in files"
        in call("report", *options[:2], "--memory", "stream", status=2).err
    )
