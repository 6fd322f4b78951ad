"""The command that compares two models: what it writes equals what the library says."""

import json
from pathlib import Path

import pytest

import tl_coupling as tlc
from command_line import typed
from tl_coupling.comparisons import Comparison


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in ("w3 w14 w15", "w9 w2", "w6 w5")]
    path.write_text("\n".join(lines))
    return path


def test_a_model_beside_its_untrained_twin(call, folder_model, prompts, tmp_path):
    out = tmp_path / "out"
    options = typed(model=folder_model, prompts=prompts, k=[2, 4], out=out)
    streams = call("compare", *options, "--other-untrained", drawn=True)
    names = {path.name for path in out.iterdir()}
    files = {f"comparison-k{k}.{kind}" for k in (2, 4) for kind in ("nc", "png")}
    assert names == {*files, "summary.json"}
    maps = []
    for untrained in (False, True):
        model = tlc.load_model(str(folder_model), untrained=untrained)
        traces = [tlc.trace(model, prompt) for prompt in tlc.load_prompts(prompts)]
        maps.append([tlc.depth_coupling(trace, 4) for trace in traces])
    expected = tlc.compare(*maps, k=2)
    written = Comparison.load(out / "comparison-k2.nc")
    assert written.mean_difference == pytest.approx(expected.mean_difference, abs=1e-6)
    assert written.interval == pytest.approx(expected.interval, abs=1e-6)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["by_k"]["2"]["interval"] == pytest.approx(
        expected.interval, abs=1e-6
    )
    assert f"{expected.mean_difference:+.3f}" in streams.out
    assert "paired, over the same prompts" in streams.out


def test_products_give_the_same_comparison(call, folder_model, prompts, tmp_path):
    options = {"model": folder_model, "prompts": prompts, "k": 2}
    results = []
    for method in ("jacobians", "products"):
        out = tmp_path / method
        call("compare", "--other-untrained", **options, method=method, out=out)
        results.append(Comparison.load(out / "comparison-k2.nc"))
    exact, found = results
    assert found.provenance != exact.provenance
    assert found.mean_difference == pytest.approx(exact.mean_difference, abs=1e-4)
    assert found.interval == pytest.approx(exact.interval, abs=1e-4)


def test_texts_under_another_key_are_the_same(call, folder_model, prompts, tmp_path):
    options = {"model": folder_model, "k": 2}
    call("compare", "--other-untrained", **options, prompts=prompts, out=tmp_path / "a")
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(prompts.read_text().replace('"prompt"', '"body"'))
    other = {"other_prompts": renamed, "prompt_key": "body"}
    keyed = options | {"prompts": renamed, "out": tmp_path / "b"}
    call("compare", "--other-untrained", **keyed, **other)
    first, second = (
        Comparison.load(tmp_path / name / "comparison-k2.nc") for name in ("a", "b")
    )
    assert second.mean_difference == first.mean_difference
    streams = call("compare", "--prompt-key", "body", "--other-untrained", status=2)
    assert "--prompt-key is for a file: give --prompts as well" in streams.err


def test_one_must_say_what_to_compare_with(call, folder_model):
    streams = call("compare", "--model", str(folder_model), status=2)
    assert "say what to compare with: --other-model" in streams.err
