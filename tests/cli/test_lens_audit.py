"""`tl-coupling lens-audit` as a user meets it."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import LensAudit

WORDS = np.random.default_rng(0).integers(3, 95, (10, 9))
TEXTS = [" ".join(f"w{word}" for word in row) for row in WORDS]
FITTED = TEXTS[:5]
# Shorter than the prompts with their BOS token.
LONGEST = 8


@pytest.fixture(scope="module")
def lens(folder_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lens of TransformerLens's own, which cut its prompts."""
    from transformer_lens.tools.analysis import JacobianLens

    path = tmp_path_factory.mktemp("lens") / "lens.pt"
    JacobianLens.fit(
        tlc.load_model(str(folder_model)),
        FITTED,
        corpus="c",
        max_seq_len=LONGEST,
        skip_first_positions=1,
        show_progress=False,
    ).save(str(path))
    return path


def write_prompts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_with_its_own_prompts_nothing_is_left_of_a_lens(
    call, folder_model: Path, lens: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", FITTED)
    out = tmp_path / "out"
    options = {"model": folder_model, "lens": lens, "prompts": prompts}
    shown = call("lens-audit", out=out, accuracy=1.0, drawn=True, **options).out
    assert {path.name for path in out.iterdir()} == {
        "audit.nc",
        "audit.png",
        "summary.json",
        "table.csv",
    }
    audit = LensAudit.load(out / "audit.nc")
    # It is only so with the tokens of the fit: after a BOS token, and cut.
    assert float(audit.distance_from_mean.max()) < 1e-3
    assert audit.of_its_prompts
    assert " ".join(audit.verdict.split()) in " ".join(shown.split())
    assert f"{float(audit.halves[0]):.3f}" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["verdict"] == audit.verdict
    assert summary["needed_prompts"] == audit.needed_prompts.tolist()
    table = pandas.read_csv(out / "table.csv")
    assert table["distance"].tolist() == pytest.approx(
        audit.distance.flatten().tolist()
    )


def test_another_rotary_embedding_is_found(call, lens: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.huggingface_model("llama", rope_theta=10.0).save_pretrained(folder)
    tiny.save_tokenizer(folder)
    prompts = write_prompts(tmp_path / "prompts.jsonl", FITTED)
    options = {"model": folder, "lens": lens, "prompts": prompts, "out": tmp_path / "o"}
    shown = call("lens-audit", "--its-prompts", **options).out
    assert "is not in the mean of its own prompts" in " ".join(shown.split())


def test_what_cannot_be_audited_is_one_line(
    call, refused, folder_model: Path, lens: Path, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", TEXTS[5:9])
    options = {"model": folder_model, "lens": lens, "prompts": prompts}
    missing = refused("lens-audit", options, ["--lens", "no/such.pt"])
    assert "there is no lens at no/such.pt" in missing
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes(lens.read_bytes()[:100])
    line = refused("lens-audit", options, ["--lens", str(damaged)])
    assert "is not a file that `JacobianLens.save` wrote" in line
    # Four prompts, where the lens has five.
    failed = call(
        "lens-audit", "--its-prompts", status=2, out=tmp_path / "o", **options
    )
    assert "all prompts of the lens, 5, got 4" in " ".join(failed.err.split())
    alone = {"model": folder_model, "lens": lens, "prompt": "w1 w2 w3 w4"}
    assert "give two or more, with --prompts" in refused("lens-audit", alone, [])
