"""Checkpoints chosen by loss, what counting reaches, a cosine, stochastic depth: what
matched studies train with.
"""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import small_models
from loss_marks import LossMarks, counting_losses, is_evaluated, mean_loss, windows_of
from stochastic_depth import DropPath


def test_counting_is_witten_and_bells():
    """Against sums over counters, token by token."""
    text = np.random.default_rng(0).integers(0, 6, 60).tolist()
    windows = [[0, 1, 5, 2], [3, 3, 7, 7]]
    tokens, pairs = Counter(text), Counter(itertools.pairwise(text))

    def unigram(t):
        return (tokens[t] + 1) / (len(text) + 8)

    def bigram(s, t):
        followers = {b for a, b in pairs if a == s}
        seen = sum(n for (a, _), n in pairs.items() if a == s)
        return (
            (pairs[s, t] + len(followers) * unigram(t)) / (seen + len(followers))
            if seen
            else unigram(t)
        )

    after = [pair for window in windows for pair in itertools.pairwise(window)]
    losses = counting_losses(torch.tensor(text), torch.tensor(windows), 8)
    assert losses["unigram"] == pytest.approx(
        -np.mean([math.log(unigram(t)) for _, t in after])
    )
    # Token 7 never came: what follows it is what comes at all.
    assert losses["bigram"] == pytest.approx(
        -np.mean([math.log(bigram(s, t)) for s, t in after])
    )


def test_what_counting_gives_are_distributions():
    text, every = torch.tensor([0, 1, 0, 2, 0, 1]), torch.arange(4)
    for name in ("unigram", "bigram"):
        losses = [counting_losses(text, torch.tensor([[0, t]]), 4)[name] for t in every]
        assert np.exp(-np.array(losses)).sum() == pytest.approx(1)


def test_windows_are_spread_and_do_not_overlap():
    windows = windows_of(torch.arange(103), 10, 4)
    assert windows[:, 0].tolist() == [0, 30, 60, 90]
    assert (windows.diff(dim=1) == 1).all()
    assert len(windows_of(torch.arange(103), 10, 99)) == 10
    with pytest.raises(ValueError, match="a text of at least 10 tokens, got 9"):
        windows_of(torch.arange(9), 10, 1)


def test_losses_are_taken_densely_enough():
    taken = [step for step in range(3001) if is_evaluated(step, 3001)]
    assert taken[:20] == list(range(20))
    for before, after in itertools.pairwise(taken):
        assert after - before <= max(1, min(16, before / 16 + 1))
    assert is_evaluated(3001, 3001)


def test_the_rate_rises_and_falls_along_a_cosine(small_config):
    config = replace(
        small_config, steps=30, warmup=10, learning_rate=0.4, final_rate=0.25
    )
    rates = [small_models.rate_at(config, step) for step in (1, 5, 10, 20, 30)]
    assert rates == pytest.approx([0.04, 0.2, 0.4, 0.25, 0.1])
    assert {small_models.rate_at(small_config, step) for step in range(1, 7)} == {
        small_config.learning_rate
    }


@pytest.fixture(scope="module")
def marks(small_corpus) -> LossMarks:
    windows = {
        "held_out": windows_of(small_corpus.held_out_tokens, 16, 8),
        "training": small_corpus.tokens[None, :32],
    }
    return LossMarks((5.5, 4.9, 1.0), windows, "held_out")


def test_checkpoints_are_where_the_loss_first_falls_to_a_mark(
    small_config, small_corpus, marks, tmp_path
):
    config = replace(small_config, steps=40)
    folder = small_models.train(config, small_corpus, tmp_path, checkpoints=marks)
    known = json.loads((folder / "training.json").read_text())
    around = dict(known["reached"])
    assert around[1.0] is None
    reached = {mark: around[mark][1] for mark in (5.5, 4.9)}
    assert 0 < reached[5.5] < reached[4.9] < 40
    assert {path.name for path in folder.glob("step*")} == {
        f"step{s}" for s in (0, *around[5.5], *around[4.9], 40)
    }
    losses = {int(step): of["held_out"] for step, of in known["evaluated"].items()}
    for mark in (5.5, 4.9):
        before = max(step for step in losses if step < reached[mark])
        assert around[mark][0] == before
        assert losses[before] > mark >= losses[reached[mark]]
        for step in around[mark]:
            model = AutoModelForCausalLM.from_pretrained(folder / f"step{step}")
            for name, windows in marks.windows.items():
                assert mean_loss(model, windows) == pytest.approx(
                    known["evaluated"][str(step)][name], rel=1e-5
                )


def test_training_is_over_where_the_last_mark_is_reached(
    small_config, small_corpus, marks, tmp_path
):
    config = replace(small_config, steps=40)
    short = replace(marks, values=(5.5,), stops=True)
    folder = small_models.train(config, small_corpus, tmp_path, checkpoints=short)
    known = json.loads((folder / "training.json").read_text())
    assert (
        len(known["loss"])
        == max(map(int, known["evaluated"]))
        == dict(known["reached"])[5.5][1]
    )
    # Another choice of checkpoints is another run.
    assert (
        small_models.train(config, small_corpus, tmp_path, checkpoints=marks) != folder
    )


def trained(
    config: small_models.TrainingConfig, corpus: small_models.Corpus, folder: Path
) -> dict[str, torch.Tensor]:
    done = small_models.train(config, corpus, folder, checkpoints=[config.steps])
    return AutoModelForCausalLM.from_pretrained(
        done / f"step{config.steps}"
    ).state_dict()


def test_stochastic_depth_is_the_seeds_and_leaves_a_plain_model(
    small_config, small_corpus, tmp_path
):
    config = replace(small_config, stochastic_depth=0.5)
    random_state = torch.get_rng_state()
    one, again = (trained(config, small_corpus, tmp_path / name) for name in "ab")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(one[name], again[name]) for name in one)
    without = trained(small_config, small_corpus, tmp_path / "c")
    assert one.keys() == without.keys()
    assert not all(torch.equal(one[name], without[name]) for name in one)


def test_branches_are_dropped_while_training_at_the_rate_of_their_block(
    small_config, small_corpus
):
    model = small_models.new_model(
        replace(small_config, n_layers=3, stochastic_depth=0.4)
    )
    rates = [
        (b.post_attention_dropout.rate, b.post_mlp_dropout.rate)
        for b in model.gpt_neox.layers
    ]
    assert rates == [(0, 0), (0.2, 0.2), (0.4, 0.4)]
    branch = torch.ones(4000, 2, 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = DropPath(0.4)(branch)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / 0.6])
    # A sample is dropped as a whole; four standard errors.
    assert (dropped.flatten(1).amin(1) == dropped.flatten(1).amax(1)).all()
    assert (dropped[:, 0, 0] == 0).double().mean() == pytest.approx(
        0.4, abs=4 * (0.24 / 4000) ** 0.5
    )
    plain, tokens = (
        small_models.new_model(replace(small_config, n_layers=3)),
        small_corpus.tokens[None, :16],
    )
    torch.testing.assert_close(model.eval()(tokens).logits, plain.eval()(tokens).logits)


def test_a_subset_is_different_pieces_of_the_text_and_part_of_a_larger_one(
    small_corpus,
):
    part, larger = (small_corpus.subset(n * small_models.PIECE + 3) for n in (4, 9))
    whole = small_corpus.tokens[
        : len(small_corpus.tokens) // small_models.PIECE * small_models.PIECE
    ]
    of_text = [tuple(piece) for piece in whole.view(-1, small_models.PIECE).tolist()]
    pieces = [tuple(piece) for piece in larger.tokens.view(9, -1).tolist()]
    assert len(set(pieces)) == 9
    assert set(pieces) <= set(of_text)
    assert part.tokens.tolist() == larger.tokens[: 4 * small_models.PIECE].tolist()
    assert part.held_out == small_corpus.held_out
    assert part.digest != small_corpus.digest
    next_part = small_corpus.subset(5 * small_models.PIECE, first=4)
    assert next_part.tokens.tolist() == larger.tokens[4 * small_models.PIECE :].tolist()
    assert len({part.digest, next_part.digest, larger.digest}) == 3
    for wanted in (100, 10**7):
        with pytest.raises(
            ValueError,
            match=f"wanted {wanted} tokens to learn from, in pieces of 512, of ",
        ):
            small_corpus.subset(wanted)
