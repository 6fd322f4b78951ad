"""GGUF files are converted once, into a copy that is whole or made again; what they
lack is refused.
"""

import importlib.util
import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import tl_coupling as tlc
from model_folders import save_gguf

# transformers reads these files, in one version for both lines of TransformerLens.
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
    ),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tl_coupling"


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    save_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each time that transformers reads tensors or fields from a GGUF file."""
    from transformers import configuration_utils
    from transformers import modeling_gguf_pytorch_utils as legacy
    from transformers.models.auto import tokenization_auto

    seen: list[str] = []
    load = legacy.load_gguf_checkpoint

    def counted(path: Any, return_tensors: bool = False, **options: Any) -> Any:
        seen.append("tensors" if return_tensors else "fields")
        return load(path, return_tensors=return_tensors, **options)

    # Some versions import its name at the top of the modules that call it.
    for module in (legacy, configuration_utils, tokenization_auto):
        if hasattr(module, load.__name__):
            monkeypatch.setattr(module, load.__name__, counted)
    return seen


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(tlc.ModelError) as caught:
        tlc.load_model(*map(str, arguments), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def stream(name: Path, **options: Any) -> torch.Tensor:
    return tlc.trace(tlc.load_model(str(name), **options), tiny.TOKENS).residual


def test_a_file_is_converted_once(file: Path, cache: Path, parses: list[str]) -> None:
    first = tlc.trace(tlc.load_model(str(file)), "w3w4")
    assert parses.count("tensors") == 1
    parses.clear()
    again = tlc.trace(
        tlc.load_model(str(file.rename(file.with_name("other.gguf")))), "w3w4"
    )
    assert parses == []
    assert torch.equal(first.residual, again.residual)
    assert first.str_tokens == again.str_tokens
    assert again.provenance["quantization"] == "gguf"
    assert again.provenance["quantized"] == "as saved"
    assert again.provenance["weights"] == "dequantised on loading"
    assert [folder.name[:5] for folder in cache.iterdir()] == ["gguf-"]


def test_another_file_of_the_same_name_is_another_model(
    file: Path, cache: Path
) -> None:
    from_first_copy = stream(file)
    raw = bytearray(file.read_bytes())
    raw[-4] ^= 1
    file.write_bytes(raw)
    stream(file)
    assert len(list(cache.iterdir())) == 2
    assert from_first_copy.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_numbers_are_those_of_the_file(dtype: torch.dtype, file: Path) -> None:
    """Against HuggingFace's own reading, in each dtype."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype
    )
    for _ in ("from the file", "from the copy"):
        model = tlc.load_model(str(file), dtype=dtype)
        assert torch.equal(model.W_E, plain.get_input_embeddings().weight)
        assert model.W_E.dtype == dtype


def test_weights_may_stay_on_disk(file: Path) -> None:
    assert torch.equal(stream(file, memory="stream"), stream(file))
    provenance = tlc.trace(
        tlc.load_model(str(file), memory="stream"), tiny.TOKENS
    ).provenance
    assert (provenance["quantization"], provenance["memory"]) == ("gguf", "stream")


@pytest.mark.parametrize("damage", ["weights", "tokenizer", "no weights", "empty"])
def test_a_damaged_copy_is_made_again(damage: str, file: Path, cache: Path) -> None:
    expected = stream(file)
    (folder,) = cache.iterdir()
    damaged = folder / (
        "tokenizer.json" if damage == "tokenizer" else "model.safetensors"
    )
    if damage == "no weights":
        damaged.unlink()
    else:
        damaged.write_bytes(b"" if damage == "empty" else damaged.read_bytes()[:-100])
    assert torch.equal(stream(file), expected)
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_a_conversion_that_is_killed_leaves_nothing_that_is_taken_for_a_copy(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tl_coupling.models.weights.gguf_files import GgufModel

    def killed(self: GgufModel, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GgufModel, "_save", killed)
        with pytest.raises(KeyboardInterrupt):
            tlc.load_model(str(file))
    assert list(cache.iterdir()) == []
    assert stream(file).isfinite().all()


def test_where_the_cache_cannot_be_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stream(file)
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-folder"))
    with pytest.warns(
        UserWarning, match=r"the converted copy of '.*tiny.gguf' cannot be kept in"
    ):
        model = tlc.load_model(str(file))
    trace = tlc.trace(model, tiny.TOKENS)
    assert torch.equal(trace.residual, expected)
    assert trace.provenance["quantization"] == "gguf"
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME says where caches are"):
        assert (
            tlc.load_model(str(file), dtype=torch.bfloat16).W_E.dtype == torch.bfloat16
        )
    assert 'and `memory="stream"` reads from it: set XDG_CACHE_HOME' in refused(
        file, memory="stream"
    )


def _converted(file: str) -> float:
    return float(stream(Path(file)).double().sum())


@pytest.mark.long("starts processes")
def test_processes_that_convert_at_once(file: Path, cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        sums = pool.map(_converted, [str(file)] * 2, chunksize=1)
    assert sums[0] == sums[1] == _converted(str(file))
    assert [folder.name[:5] for folder in cache.iterdir()] == ["gguf-"]


def test_the_untrained_twin_reads_only_the_configuration(
    file: Path, cache: Path, parses: list[str]
) -> None:
    first = tlc.load_model(str(file), untrained=True)
    assert set(parses) == {"fields"}
    assert not cache.exists()
    tlc.load_model(str(file))
    assert len(list(cache.iterdir())) == 1
    parses.clear()
    again = tlc.load_model(str(file), untrained=True)
    assert parses == []
    assert torch.equal(first.W_E, again.W_E)
    assert tlc.trace(again, "w3w4").str_tokens == tlc.trace(first, "w3w4").str_tokens
    assert tlc.trace(again, "w3w4").provenance["untrained"]


def test_what_a_file_lacks(tmp_path: Path, cache: Path) -> None:
    save_gguf(
        renamed := tmp_path / "renamed.gguf",
        renamed=("blk.1.ffn_up", "blk.1.ffn_sideways"),
    )
    assert (
        "lacks 1 of the 21 weights of a LlamaForCausalLM: model.layers.1.mlp.up_proj.weight"
        in refused(renamed)
    )
    save_gguf(strange := tmp_path / "strange.gguf", renamed=("blk.", "block."))
    assert "lacks 18 of the 21 weights of a LlamaForCausalLM" in refused(strange)
    save_gguf(shallow := tmp_path / "shallow.gguf", block_count=3)
    assert (
        "lacks 9 of the 30 weights of a LlamaForCausalLM: model.layers.2.input_layern"
        in refused(shallow)
    )
    save_gguf(deep := tmp_path / "deep.gguf", block_count=1)
    assert (
        "holds weights of layer 1, counted from 0, and says that it has 1 layers"
        in refused(deep)
    )
    assert not any(cache.glob("*"))


def test_depths_that_nobody_builds(
    tmp_path: Path, cache: Path, folder_model: Path
) -> None:
    save_gguf(deep := tmp_path / "deep.gguf", block_count=10_000)
    for untrained in (False, True):
        assert (
            "says that it has 10,000 layers (`block_count`), wanted fewer"
            in refused(deep, untrained=untrained)
        )
    config = json.loads((folder_model / "config.json").read_text())
    folder = Path(shutil.copytree(folder_model, tmp_path / "folder"))
    for field, deeper in {
        "num_hidden_layers": config | {"num_hidden_layers": 10**9},
        "n_layer": {"model_type": "gpt2", "n_layer": 10**9},
    }.items():
        (folder / "config.json").write_text(json.dumps(deeper))
        for untrained in (False, True):
            assert f"says that it has 1,000,000,000 layers (`{field}`)" in refused(
                folder, untrained=untrained
            )
        with pytest.raises(tlc.ModelError, match="layers"):
            tlc.models.loading.empty_model(str(folder))


def test_quantisation_of_a_file_that_is_quantised(file: Path) -> None:
    for kind in ("nf4", "int8"):
        assert refused(file, quantization=kind).endswith(
            "is quantised already (gguf): leave `quantization` out"
        )
