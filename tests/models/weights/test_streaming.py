"""Models whose weights stay on disk give the numbers of those in memory, and read every
weight once.
"""

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling.blocks.streamed import streamed_passage
from tl_coupling.models import facts_of
from tl_coupling.models.weights import streaming

pytestmark = pytest.mark.both_lines

# Plain; joint QKV; joint QKV and gate; merged experts; blocks that return tuples; buffers
# that are saved.
ARCHITECTURES = ["llama", "gpt2", "phi3", "mixtral", "falcon", "deepseek_v3"]


def saved(
    folder: Path,
    architecture: str = "llama",
    dtype: torch.dtype = torch.float32,
    tie_word_embeddings: bool = False,
    **options,
) -> nn.Module:
    """A tiny model in HuggingFace format; returned as HuggingFace's own."""
    tied = {"tie_word_embeddings": True} if tie_word_embeddings else {}
    model = tiny.huggingface_model(architecture, dtype=dtype, **tied)
    model.save_pretrained(folder, **options)
    tiny.save_tokenizer(folder)
    return model


def both(folder: Path) -> tuple[tlc.Trace, tlc.Trace]:
    streamed, resident = (
        tlc.load_model(str(folder), memory="stream"),
        tlc.load_model(str(folder)),
    )
    return tlc.trace(streamed, tiny.TOKENS), tlc.trace(resident, tiny.TOKENS)


def is_empty(model: nn.Module) -> bool:
    """Whether no weight of the model is in it: each is one number in memory, but for
    the zeros that 3.9 adds.
    """
    return all(
        p.untyped_storage().nbytes() == p.element_size() or not p.any()
        for p in model.parameters()
    )


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved(folder := tmp_path_factory.mktemp("llama"))
    return folder


@pytest.fixture
def streamed(llama_folder: Path) -> nn.Module:
    return tlc.load_model(str(llama_folder), memory="stream")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each weight was read."""
    counted: Counter[str] = Counter()
    read = streaming.Stored.read

    def counting(self: streaming.Stored) -> torch.Tensor:
        counted[self.tensor.name] += 1
        return read(self)

    monkeypatch.setattr(streaming.Stored, "read", counting)
    return counted


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_numbers_are_those_in_memory_bit_for_bit(
    tmp_path: Path, architecture: str
) -> None:
    saved(tmp_path, architecture)
    streamed, resident = both(tmp_path)
    assert torch.equal(tlc.block_jacobians(streamed), tlc.block_jacobians(resident))
    assert torch.equal(streamed.residual, resident.residual)
    x = resident.residual[-1]
    assert torch.equal(streamed.logits(x), resident.logits(x))
    assert torch.equal(
        streamed.logits(x, normalised=True), resident.logits(x, normalised=True)
    )
    assert streamed.is_causal is resident.is_causal is True
    assert is_empty(streamed.model)


def test_the_numbers_are_those_of_huggingface_and_autograd(tmp_path: Path) -> None:
    hf_model = saved(tmp_path)
    streamed, _ = both(tmp_path)
    hidden = hf_model(
        torch.tensor([tiny.TOKENS]), output_hidden_states=True
    ).hidden_states
    torch.testing.assert_close(
        streamed.residual[:-1], torch.cat(hidden[:-1]).detach(), rtol=1e-5, atol=1e-5
    )
    J = tlc.block_jacobian(streamed, 1, input_position=2, output_position=5)
    torch.testing.assert_close(
        J, tiny.oracle_jacobian(hf_model, tiny.TOKENS, 1, 2, 5), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize(
    "names", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]
)
def test_a_tied_weight_by_either_name(
    names: list[str], is_same: bool, tmp_path: Path
) -> None:
    """Where a file has other numbers under both names, they are two weights."""
    saved(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    embedding = state.pop("model.embed_tokens.weight")
    paths = {"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    for n, name in enumerate(names):
        state[paths[name]] = embedding.clone() if is_same else embedding * (n + 1)
    save_file(state, file, {"format": "pt"})
    streamed, resident = both(tmp_path)
    assert torch.equal(streamed.residual, resident.residual)
    x = resident.residual[-1]
    assert torch.equal(streamed.logits(x), resident.logits(x))


def test_with_the_final_norm(llama_folder: Path, streamed: nn.Module) -> None:
    streamed_trace, resident_trace = (
        tlc.trace(m, tiny.TOKENS, final_norm=True)
        for m in (streamed, tlc.load_model(str(llama_folder)))
    )
    assert torch.equal(
        tlc.block_jacobian(streamed_trace, -1), tlc.block_jacobian(resident_trace, -1)
    )
    assert torch.equal(streamed_trace.residual, resident_trace.residual)


def test_trace_and_jacobians_read_each_weight_of_the_blocks_once(
    streamed: nn.Module, reads: Counter[str]
) -> None:
    trace = tlc.trace(streamed, tiny.TOKENS)
    assert not [name for name in reads if "layers" in name]
    assert trace.n_pos == len(tiny.TOKENS)
    tlc.depth_coupling(trace, k=4)
    assert trace.residual.shape == (tiny.N_LAYERS + 1, trace.n_pos, trace.d_model)
    blocks = {name: n for name, n in reads.items() if "layers" in name}
    assert len(blocks) == 9 * tiny.N_LAYERS
    assert set(blocks.values()) == {1}
    assert "lm_head.weight" not in reads


def test_one_block_is_in_memory_and_it_is_freed(streamed: nn.Module) -> None:
    # The end of another streamed model lets go of all that was read last.
    gc.collect()
    tlc.block_jacobians(tlc.trace(streamed, tiny.TOKENS))
    largest = max(
        sum(p.numel() for p in block.parameters()) for block in streamed.blocks
    )
    assert sum(weight.numel() for weight in streaming._last_read.values()) == largest
    assert is_empty(streamed)
    del streamed


def test_what_a_block_keeps_is_freed_with_its_weights(streamed: nn.Module) -> None:
    trace = tlc.trace(streamed, tiny.TOKENS)
    J = tlc.block_jacobians(trace)
    keeps_keys = [block._keys_and_values is not None for block in trace.blocks]
    assert keeps_keys == [False, True]
    assert [len(block.references) for block in trace.blocks] == [0, 1]
    assert torch.equal(tlc.block_jacobian(trace, 0), J[0])


def test_bfloat16_weights_are_computed_in_float32(tmp_path: Path) -> None:
    saved(tmp_path, dtype=torch.bfloat16)
    streamed, resident = both(tmp_path)
    assert torch.equal(streamed.residual, resident.residual)
    rounded = tlc.trace(
        tlc.load_model(str(tmp_path), memory="stream", dtype=torch.bfloat16),
        tiny.TOKENS,
    )
    assert rounded.residual.dtype == torch.float32
    assert torch.equal(rounded.residual, resident.residual)
    assert torch.equal(tlc.block_jacobian(rounded, 1), tlc.block_jacobian(resident, 1))


def test_in_float64_the_model_runs_in_float64(
    llama_folder: Path, streamed: nn.Module
) -> None:
    trace = tlc.trace(streamed, tiny.TOKENS, dtype=torch.float64)
    expected = tlc.trace(
        tlc.load_model(str(llama_folder), dtype=torch.float64), tiny.TOKENS
    )
    assert torch.equal(trace.residual, expected.residual)
    assert torch.equal(tlc.block_jacobian(trace, 1), tlc.block_jacobian(expected, 1))


def test_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    saved(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    streamed, resident = both(tmp_path)
    assert torch.equal(streamed.residual, resident.residual)


def test_provenance_says_so(streamed: nn.Module) -> None:
    provenance = tlc.trace(streamed, tiny.TOKENS).provenance
    assert provenance["memory"] == "stream"
    assert provenance["device"] == "cpu"
    assert provenance["n_params"] == sum(
        p.numel() for p in tiny.huggingface_model("llama").parameters()
    )


def test_hooks_are_part_of_what_is_measured(streamed: nn.Module) -> None:
    plain = tlc.trace(streamed, tiny.TOKENS).residual
    streamed.blocks[1].hook_in.add_hook(lambda x, hook: 2 * x)
    trace = tlc.trace(streamed, tiny.TOKENS)
    assert trace.provenance["hooks"] == ["blocks.1.hook_resid_pre"]
    assert torch.equal(trace.residual[1], plain[1])
    assert not torch.equal(trace.residual[2], plain[2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "disk"}, r'`memory` must be "resident" or "stream", got \'disk\''),
        ({"memory": "stream", "untrained": True}, "untrained=True` has no files"),
        ({"memory": "stream", "backend": "hooked"}, "leave one of the two out"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    llama_folder: Path, options: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.load_model(str(llama_folder), **options)


def test_other_files_than_safetensors_are_refused(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(tlc.ModelError, match="in no safetensors file") as caught:
        tlc.load_model(str(tmp_path), memory="stream")
    assert "\n" not in str(caught.value)


class Layer(nn.Module):
    def forward(self, hidden_states: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return scale * hidden_states


def test_blocks_whose_arguments_depend_on_the_stream_are_refused() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Layer() for _ in range(2))
    X = torch.randn(1, 3, 4)

    def run(of_stream: bool) -> None:
        Y = model.blocks[0](X, torch.ones(()))
        model.blocks[1](Y, Y.mean() if of_stream else X.mean())

    assert len(streamed_passage(model, lambda: run(False), 3).calls) == 2
    with pytest.raises(
        ValueError,
        match="argument 'scale' of block 1 depends on what earlier blocks computed",
    ):
        streamed_passage(model, lambda: run(True), 3)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    trace = tlc.trace(tlc.load_model(str(tmp_path), memory="stream"), tiny.TOKENS)
    with pytest.raises(
        ValueError,
        match=r"at layer 2 has NaN or infinite entries; parameter '.*' of the block",
    ):
        _ = trace.residual


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_a_block_is_freed_on_every_way_out(
    streamed: nn.Module, error: type[BaseException]
) -> None:
    trace = tlc.trace(streamed, tiny.TOKENS)
    expected = tlc.trace(streamed, tiny.TOKENS).residual

    def fail(*_: object) -> None:
        raise error("here")

    handle = streamed.blocks[1].register_forward_hook(fail)
    with pytest.raises(error, match="here"):
        tlc.block_jacobian(trace, 1)
    with pytest.raises(error, match="here"):
        trace.logits(expected[-1])
    assert is_empty(streamed)
    handle.remove()
    assert torch.equal(trace.residual, expected)


def test_two_threads_see_whole_blocks(streamed: nn.Module, llama_folder: Path) -> None:
    expected = tlc.block_jacobians(
        tlc.trace(tlc.load_model(str(llama_folder)), tiny.TOKENS)
    )
    shared = tlc.trace(streamed, tiny.TOKENS)
    results: list[torch.Tensor] = []

    def measure(of: tlc.Trace) -> None:
        results.append(tlc.block_jacobians(of))

    traces = [shared, shared, tlc.trace(streamed, tiny.TOKENS)]
    threads = [threading.Thread(target=measure, args=(trace,)) for trace in traces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(traces)
    assert all(torch.equal(J, expected) for J in results)


def test_a_model_in_memory_is_not_streamed(
    llama_folder: Path, streamed: nn.Module
) -> None:
    assert facts_of(streamed).is_streamed
    assert not facts_of(tlc.load_model(str(llama_folder))).is_streamed


def test_a_streamed_vision_model_in_half_precision_is_refused_in_words(
    folder_vit: Path,
) -> None:
    with pytest.raises(
        tlc.ModelError,
        match=r'^`dtype` with `memory="stream"` must be float32 or float64: a vision',
    ):
        tlc.load_model(str(folder_vit), memory="stream", dtype=torch.bfloat16)
    assert tlc.load_model(str(folder_vit), memory="stream").cfg.n_layers > 0


def in_place(shard: Path, content: bytes) -> None:
    """As a program does that opens the file for writing; of the same size."""
    shard.write_bytes(content)


def replaced(shard: Path, content: bytes) -> None:
    """As `save_pretrained` and downloads do."""
    new_file = shard.with_suffix(".new")
    new_file.write_bytes(content)
    os.replace(new_file, shard)


def removed(shard: Path, content: bytes) -> None:
    shard.unlink()


@pytest.mark.parametrize("change", [in_place, replaced, removed])
def test_files_that_change_under_a_streamed_model_are_an_error(
    tmp_path: Path, change: Callable[[Path, bytes], None]
) -> None:
    """The blocks read before are of one model, those read afterwards of another."""
    saved(tmp_path / "one")
    tiny.huggingface_model("llama", 1).save_pretrained(tmp_path / "other")
    tiny.save_tokenizer(tmp_path / "other")
    shard, content = (
        tmp_path / "one" / "model.safetensors",
        (tmp_path / "other" / "model.safetensors").read_bytes(),
    )
    model = tlc.load_model(str(tmp_path / "one"), memory="stream")
    trace = tlc.trace(model, tiny.TOKENS)
    first = tlc.block_jacobian(trace, 0)
    change(shard, content)
    message = (
        r"model\.safetensors was changed, replaced or removed after the model was "
        "loaded, .*: load the model again"
    )
    for measure in (
        tlc.block_jacobians,
        lambda trace: trace.residual,
        lambda trace: tlc.trace(model, tiny.TOKENS),
    ):
        with pytest.raises(tlc.ModelError, match=message) as caught:
            measure(trace)
        assert "\n" not in str(caught.value)
    if change is not removed:
        again = tlc.trace(
            tlc.load_model(str(tmp_path / "one"), memory="stream"), tiny.TOKENS
        )
        resident = tlc.trace(tlc.load_model(str(tmp_path / "other")), tiny.TOKENS)
        assert torch.equal(tlc.block_jacobians(again), tlc.block_jacobians(resident))
        assert not torch.equal(tlc.block_jacobian(again, 0), first)


def test_a_file_that_changes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    shard = tmp_path / "model.safetensors"
    trace = tlc.trace(tlc.load_model(str(tmp_path), memory="stream"), tiny.TOKENS)
    read = streaming.Stored.read

    def reading(self: streaming.Stored) -> torch.Tensor:
        weight = read(self)
        replaced(shard, shard.read_bytes())
        return weight

    monkeypatch.setattr(streaming.Stored, "read", reading)
    with pytest.raises(tlc.ModelError, match="was changed, replaced or removed"):
        tlc.block_jacobians(trace)
