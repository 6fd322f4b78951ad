"""The command `report` as a user meets it."""

from pathlib import Path

import pytest

import tl_coupling as tlc


@pytest.mark.long("measures SmolLM2 and its twin, everything")
def test_the_command_writes_one_page(call, folder_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    done = call(
        "report", model=folder_model, prompt="w3 w14 w15", k=[4, 8], out=out, drawn=True
    )
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert done.out.split() == ["wrote", "to", f"{out.parent}:", out.name]
    # On a slow machine stages that take over five seconds are said.
    said = [line for line in done.err.splitlines() if not line.endswith(" …")]
    assert not any(line.strip() for line in said)
    page = out.read_text(encoding="utf-8")
    traces = [
        tlc.trace(tlc.load_model(str(folder_model), untrained=u), "w3 w14 w15")
        for u in (False, True)
    ]
    for trace in traces:
        assert f"{tlc.depth_coupling(trace, 8).mean(4):.3f}" in page
    call("report", model=folder_model, prompt="w3 w14", k=4, no_untrained=True, out=out)
    assert "untrained, " not in out.read_text(encoding="utf-8")


@pytest.mark.long("measures SmolLM2")
def test_what_takes_long_is_said_before(
    call, folder_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tl_coupling.cli.report._MANY_INFLUENCES", 5)
    out = tmp_path / "page.html"
    options = {"model": folder_model, "k": 4, "no_untrained": True, "out": out}
    said = call("report", prompt="w3 w14 w15", **options).err
    assert "the influence of 3 tokens at 2 layers takes longest: up to 6 Jac" in said


def test_a_label_in_place_of_a_path(call, folder_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    options = {"prompt": "w3 w14", "k": 4, "no_untrained": True, "out": out}
    call("report", model=folder_model, label="model A", **options)
    page = out.read_text(encoding="utf-8")
    assert "Transformer block coupling: model A" in page
    assert str(folder_model) not in page


def test_help_has_examples(call) -> None:
    assert "Examples:" in call("report", "--help").out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "`--k` must be at least 1, got 0"),
        (["--k", "33"], "`k` must lie in [1, 32]"),
        (["--layer", "2"], "`layer` must lie in [-2, 1]"),
        (["--input-position", "5"], "`input_position` must lie in [-2, 1]"),
        (["--model", "no-such/model"], "could not load 'no-such/model'"),
        (["--out", "{file}/report.html"], "cannot write to the output folder"),
    ],
)
def test_bad_input_is_one_line_status_2_and_nothing_written(
    refused, folder_model: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    options = {"model": folder_model, "prompt": "w1 w2", "k": 4}
    options["out"] = tmp_path / "out.html"
    with_paths = [part.replace("{file}", str(file)) for part in arguments]
    assert message in refused("report", options, with_paths)
