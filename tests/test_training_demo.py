"""A small model trained here: the pieces, and the whole demo at a size of seconds."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray

from tl_coupling.checkpoints import local_checkpoints

DEMOS = Path(__file__).parents[1] / "demos"
TEXT = "".join(f"def f{i}(x):\n    return {i % 7} * x + {i % 5}  # the number {i}\n\n" for i in range(800))


@pytest.fixture(scope="module")
def demo():
    sys.path.insert(0, str(DEMOS))
    yield importlib.import_module("train_and_trace")
    sys.path.remove(str(DEMOS))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def corpus(demo, text):
    return demo.build_corpus(demo.read_documents(text), 300)


@pytest.fixture(scope="module")
def config(demo):
    return demo.TrainingConfig(width=32, n_layers=2, n_heads=2, vocabulary=300, n_ctx=16, batch=4, steps=6)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_resolve_the_early_steps(demo):
    assert demo.checkpoint_steps(512) == (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    assert demo.checkpoint_steps(20) == (0, 1, 2, 4, 8, 16, 20)
    assert demo.checkpoint_steps(0) == (0,)


def test_text_is_learned_without_what_is_held_out(demo, text, corpus):
    documents = demo.read_documents(text)
    assert "".join(documents) == TEXT
    assert corpus.held_out == tuple(documents[::20])
    learned = [document for i, document in enumerate(documents) if i % 20]
    end = demo.END_OF_TEXT
    assert corpus.tokenizer.decode(corpus.tokens.tolist()) == "".join(document + end for document in learned)
    assert int(corpus.tokens.max()) < 300


def test_the_standard_library_is_always_there(demo, monkeypatch):
    monkeypatch.setattr(demo, "MAX_CHARACTERS", 200_000)
    documents = demo.read_documents()
    assert sum(map(len, documents)) >= 200_000
    assert any("import " in document for document in documents)


def test_passages_come_from_documents_as_they_are(demo, corpus):
    found = demo.passages(corpus.held_out, corpus.tokenizer, 5, 12)
    assert len(set(found)) == 5
    assert all(any(passage in document for document in corpus.held_out) for passage in found)
    with pytest.raises(ValueError, match="wanted 5 held-out passages of 5000 tokens, the text has 0"):
        demo.passages(corpus.held_out, corpus.tokenizer, 5, 5000)


def test_batches_are_windows_of_the_text_in_the_order_of_the_seed(demo, config):
    tokens = torch.arange(100, 200)
    first, again, other = (list(demo.batches(replace(config, seed=seed), tokens)) for seed in (0, 0, 1))
    assert len(first) == 6
    for batch in first:
        assert batch.shape == (4, 16)
        assert (batch.diff(dim=1) == 1).all()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.stack(first), torch.stack(other))


def test_model_has_the_size_asked_for_and_leaves_the_generator_alone(demo, config):
    before = torch.get_rng_state()
    model = demo.new_model(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.config.use_parallel_residual
    assert len(model.gpt_neox.layers) == 2
    assert model.gpt_neox.embed_in.weight.shape == (300, 32)


def test_training_is_the_same_twice_and_another_from_another_seed(demo, config, corpus, tmp_path):
    a, b = (demo.train(config, corpus, tmp_path / name) for name in "ab")
    c = demo.train(replace(config, seed=1), corpus, tmp_path / "a")
    assert list(local_checkpoints(a)) == [0, 1, 2, 4, 6]
    assert same(a / "step6", b / "step6")
    assert not same(a / "step0", a / "step1")
    assert not same(a / "step0", c / "step0")
    losses = json.loads((a / "training.json").read_text())["loss"]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(np.log(300), abs=0.5)
    assert losses[-1] < losses[0]


def test_first_step_of_a_warm_up_is_shorter(demo, config, corpus, tmp_path):
    one_step = replace(config, steps=1)
    folders = [demo.train(replace(one_step, warmup=warmup), corpus, tmp_path) for warmup in (0, 10)]
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    moved = [float((weights(f / "step1")[name] - weights(f / "step0")[name]).abs().max()) for f in folders]
    assert moved[1] == pytest.approx(moved[0] / 10, rel=0.05)


def test_finished_training_is_kept_and_interrupted_training_leaves_none(demo, config, corpus, tmp_path):
    def interrupted(batches):
        for i, batch in enumerate(batches):
            if i == 3:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        demo.train(config, corpus, tmp_path, interrupted)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    done = demo.train(config, corpus, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [done.name]

    def untouched(batches):
        raise AssertionError("trained again")

    assert demo.train(config, corpus, tmp_path, untouched) == done


def test_rank_correlations_split_at_the_peak(demo):
    coupling, loss = np.array([0.1, 0.3, 0.6, 0.5, 0.4]), np.array([8.0, 7, 6, 5, 4])
    data = xarray.Dataset(
        {
            "mean_coupling": (("seed", "checkpoint", "prompt", "k"), coupling[None, :, None, None]),
            "loss": (("seed", "checkpoint", "prompt"), loss[None, :, None]),
        },
        {"checkpoint": [0, 1, 2, 4, 8], "k": [5]},
    )
    found = demo.rank_correlations(data, 5)
    # Ranks of coupling 1 2 5 4 3, of loss 5 4 3 2 1: 1 − 6 Σd² / n(n² − 1) with Σd² = 16 + 4 + 4 + 4 + 4.
    assert found["all"] == [pytest.approx(1 - 6 * 32 / 120)]
    assert found["up to the peak"] == [pytest.approx(-1)]
    assert found["from the peak on"] == [pytest.approx(1)]


@pytest.fixture(scope="module")
def options(text, tmp_path_factory) -> list[str]:
    size = "--width 32 --n-layers 2 --n-heads 2 --vocabulary 300 --n-ctx 16 --batch 4 --steps 6 --prompts 2 --k 5"
    return [*size.split(), "--text", str(text), "--out", str(tmp_path_factory.mktemp("out"))]


def test_demo_trains_measures_reports_and_draws(demo, options, capsys):
    assert demo.main([*options, "--seeds", "2", "--jobs", "1"]) == 0
    out = Path(options[-1])
    data = xarray.load_dataset(out / "training.nc")
    assert dict(data.mean_coupling.sizes) == {"seed": 2, "checkpoint": 5, "prompt": 2, "k": 1}
    assert data.checkpoint.values.tolist() == [0, 1, 2, 4, 6]
    assert np.isfinite(data.mean_coupling).all()
    assert np.isfinite(data.loss).all()
    assert (data.loss.isel(checkpoint=-1) < data.loss.isel(checkpoint=0)).all()
    assert json.loads(data.training)["width"] == 32
    assert len(data.text) == 2
    figures = {path.stem for path in out.glob("*.png")}
    assert {"emergence", "strip", "shapes", "adjacency", "trajectories-step0", "trajectories-step6"} <= figures
    text = capsys.readouterr().out
    assert "0.106" in text
    assert text.count("rank correlation") == 3
    assert f"{float(data.mean_coupling.isel(checkpoint=0).mean()):.3f}" in text


def test_demo_keeps_what_is_finished(demo, options, monkeypatch):
    def untouched(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr("tl_coupling.checkpoints.measure_prompts", untouched)
    monkeypatch.setattr(demo, "new_model", untouched)
    assert demo.main([*options, "--seeds", "2", "--jobs", "1"]) == 0


def test_demo_traces_checkpoints_that_are_there(demo, options, corpus, config, text, tmp_path):
    folder = demo.train(replace(config, steps=2), corpus, tmp_path)
    given = ["--model", str(folder), "--text", str(text), "--out", str(tmp_path / "out")]
    assert demo.main([*given, "--n-ctx", "16", "--prompts", "2", "--k", "4"]) == 0
    data = xarray.load_dataset(tmp_path / "out" / "training.nc")
    assert data.checkpoint.values.tolist() == [0, 1, 2]
    assert data.attrs["model"] == str(folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seeds", "0"], "`--seeds` and `--jobs` must be at least 1, got 0 and"),
        (["--k", "0"], "`k` must be"),
        (["--prompts", "500"], "wanted 500 held-out passages"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--model", "no/such-model"], "no/such-model"),
    ],
)
def test_demo_says_in_one_line_what_is_wrong(demo, options, given, message, capsys):
    assert demo.main([*options, "--jobs", "1", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    lines = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
