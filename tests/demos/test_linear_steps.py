"""The study of linear steps: what it says of blocks whose linearity is known."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import linear_steps as study
import tiny
import tl_coupling as tlc


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> tlc.Trace:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    model = tiny.bridge(tiny.huggingface_model("llama"), folder)
    return tlc.trace(model, "w1 w2 w3 w4 w5")


def added(trace: tlc.Trace, layer: int, last: torch.Tensor) -> torch.Tensor:
    """What the block adds to its last row where another is put in its place."""
    X = torch.cat([trace.residual[layer, :-1], last[None]])
    return trace.blocks[layer](X)[-1].double()


def test_differences_are_those_of_whole_sequences(trace):
    target = trace.residual[1, 2]
    x = trace.residual[1, -1]
    rows = list(study.differences(trace, 1, target, "another token"))
    assert [row["share"] for row in rows] == list(study.SHARES)
    J = tlc.block_jacobian(trace, 1).double()
    step = (target - x).double()
    for row in rows:
        share = row["share"]
        difference = added(trace, 1, x + share * (target - x)) - added(trace, 1, x)
        error = (difference - share * J @ step).norm() / difference.norm()
        assert row["error"] == pytest.approx(float(error), abs=2e-3)
        cosine = torch.cosine_similarity(J @ step, difference, dim=0)
        assert row["cosine"] == pytest.approx(float(cosine), abs=2e-3)
    # A right Jacobian: the error vanishes with the share.
    errors = [row["error"] for row in rows]
    assert errors[0] < 0.05
    assert errors == sorted(errors)


def test_a_state_of_the_same_token_has_no_difference(trace):
    x = trace.residual[0, -1]
    assert list(study.differences(trace, 0, x.clone(), "another text")) == []


def test_a_linear_step_is_that_of_the_library(trace):
    expected = tlc.trajectories.linearisation(trace, closed_form=False, progress=False)
    for name, column in (("one_step", "error"), ("previous", "error_of_none")):
        errors = expected.relative_error(name)
        for layer in range(trace.n_layers):
            row = study.linear_step(trace, layer)
            assert row[column] == pytest.approx(float(errors[layer]), abs=1e-4)


def test_the_prompt_stands_apart_from_texts():
    rows = [
        {"model": "trained", "text": text, "layer": layer, "to": "linear step"}
        | {"share": 1.0, "error": error, "error_of_none": 1.0, "cosine": 0.0}
        for text, error in ((0, 9.0), (1, 0.1), (2, 0.2), (3, 0.3))
        for layer in (0, 1)
    ]
    said = study.report(pandas.DataFrame(rows))
    of_prompt, of_texts = said.split("means over 3 texts")
    assert "9.0" in of_prompt
    assert "0.2 [" in of_texts


@pytest.mark.long("runs a study")
def test_it_runs_small_and_prints_its_table(tmp_path):
    command = [sys.executable, str(Path(study.__file__)), "--out", str(tmp_path)]
    options = {
        "env": os.environ | {"SMALL": "1"},
        "capture_output": True,
        "text": True,
        "check": True,
    }
    first = subprocess.run(command, **options).stdout
    assert subprocess.run([*command, "--table"], **options).stdout == first
    table = pandas.read_csv(tmp_path / "measured.csv")
    assert set(table["model"]) == {"trained", "untrained"}
    smallest = table[table["share"] == min(study.SHARES)]
    assert np.all(smallest["cosine"] > 0.99)
