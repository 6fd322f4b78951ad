"""Small models trained here: their small_text, their batches, their checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import small_models
from tl_coupling.studies.surveys.checkpoints import local_checkpoints


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(a: Path, b: Path) -> bool:
    one, other = weights(a), weights(b)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_checkpoints_resolve_the_early_steps():
    assert small_models.checkpoint_steps(512) == (
        0,
        1,
        2,
        4,
        8,
        16,
        24,
        32,
        48,
        64,
        96,
        128,
        192,
        256,
        384,
        512,
    )
    assert small_models.checkpoint_steps(20) == (0, 1, 2, 4, 8, 16, 20)
    assert small_models.checkpoint_steps(0) == (0,)


def test_text_is_learned_without_what_is_held_out(small_text, small_corpus):
    documents = small_models.read_documents(small_text)
    assert "".join(documents) == small_text.read_text()
    assert small_corpus.held_out == tuple(documents[::20])
    learned = [document for i, document in enumerate(documents) if i % 20]
    end = small_models.END_OF_TEXT
    assert small_corpus.tokenizer.decode(small_corpus.tokens.tolist()) == "".join(
        document + end for document in learned
    )
    assert int(small_corpus.tokens.max()) < 300


def test_the_standard_library_is_always_there(monkeypatch):
    monkeypatch.setattr(small_models, "MAX_CHARACTERS", 200_000)
    documents = small_models.read_documents()
    assert sum(map(len, documents)) >= 200_000
    assert any("import " in document for document in documents)


def test_modules_of_a_folder_are_read_up_to_a_length(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").write_text(name * 100)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "d.py").write_text("d")
    (tmp_path / "notes.txt").write_text("n")
    a, b, c = ("a" * 100, "b" * 100, "c" * 100)
    assert small_models.read_documents(tmp_path) == [a, b, c]
    assert small_models.read_documents(tmp_path, 150) == [a, b]
    assert "".join(small_models.read_documents(tmp_path / "a.py", 30)) == "a" * 30


def test_training_goes_on_where_it_was(small_config, small_corpus):
    """Two halves are a whole: with the optimizer, and the data that follow."""
    data = list(small_models.batches(small_config, small_corpus.tokens))
    whole = small_models.new_model(small_config)
    losses = list(small_models.learn(whole, small_config, data))
    model = small_models.new_model(small_config)
    optimizer = small_models.optimizer_of(model, small_config)
    again = [
        row
        for n_done in (0, 3)
        for row in small_models.learn(
            model,
            small_config,
            data[n_done : n_done + 3],
            optimizer=optimizer,
            n_done=n_done,
        )
    ]
    assert [step for step, _ in again] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert again[1:4] + again[5:] == losses[1:]


def test_passages_come_from_documents_as_they_are(small_corpus):
    passages = small_models.passages(
        small_corpus.held_out, small_corpus.tokenizer, 5, 12
    )
    assert len(set(passages)) == 5
    assert all(
        any(passage in document for document in small_corpus.held_out)
        for passage in passages
    )
    with pytest.raises(
        ValueError, match="wanted 5 held-out passages of 5000 tokens, the text has 0"
    ):
        small_models.passages(small_corpus.held_out, small_corpus.tokenizer, 5, 5000)


def test_batches_are_windows_of_the_text_in_the_order_of_the_seed(small_config):
    tokens = torch.arange(100, 200)
    first, again, other = (
        list(small_models.batches(replace(small_config, seed=seed), tokens))
        for seed in (0, 0, 1)
    )
    assert len(first) == 6
    for batch in first:
        assert batch.shape == (4, 16)
        assert (batch.diff(dim=1) == 1).all()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.stack(first), torch.stack(other))


def test_model_has_the_size_asked_for_and_leaves_the_generator_alone(small_config):
    random_state = torch.get_rng_state()
    model = small_models.new_model(small_config)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.config.use_parallel_residual
    assert len(model.gpt_neox.layers) == 2
    assert model.gpt_neox.embed_in.weight.shape == (300, 32)


def test_training_is_the_same_twice_and_another_from_another_seed(
    small_config, small_corpus, tmp_path
):
    a, b = (
        small_models.train(small_config, small_corpus, tmp_path / name) for name in "ab"
    )
    c = small_models.train(replace(small_config, seed=1), small_corpus, tmp_path / "a")
    assert list(local_checkpoints(a)) == [0, 1, 2, 4, 6]
    assert same(a / "step6", b / "step6")
    assert not same(a / "step0", a / "step1")
    assert not same(a / "step0", c / "step0")
    losses = json.loads((a / "training.json").read_text())["loss"]
    assert len(losses) == 6
    assert losses[0] == pytest.approx(np.log(300), abs=0.5)
    assert losses[-1] < losses[0]


def test_first_step_of_a_warm_up_is_shorter(small_config, small_corpus, tmp_path):
    one_step = replace(small_config, steps=1)
    folders = [
        small_models.train(replace(one_step, warmup=warmup), small_corpus, tmp_path)
        for warmup in (0, 10)
    ]
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    moved = [
        float((weights(f / "step1")[name] - weights(f / "step0")[name]).abs().max())
        for f in folders
    ]
    assert moved[1] == pytest.approx(moved[0] / 10, rel=0.05)


def test_finished_training_is_kept_and_interrupted_training_leaves_none(
    small_config, small_corpus, tmp_path
):
    def interrupted(batches):
        for i, batch in enumerate(batches):
            if i == 3:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        small_models.train(small_config, small_corpus, tmp_path, interrupted)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    done = small_models.train(small_config, small_corpus, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [done.name]

    def untouched(batches):
        raise AssertionError("trained again")

    assert small_models.train(small_config, small_corpus, tmp_path, untouched) == done
