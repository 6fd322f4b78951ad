"""The commands that measure one model, on an image in place of a prompt."""

import json
from pathlib import Path

import pytest
from PIL import Image

import tl_coupling as tlc
from vision_models import png_header


@pytest.fixture
def options(folder_vit: Path, tmp_path: Path) -> dict[str, object]:
    image = folder_vit / "image.png"
    return {"model": folder_vit, "image": image, "out": tmp_path / "out"}


def summary(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "out" / "summary.json").read_text())


def test_depth_measures_the_class_token(
    call, options: dict[str, object], folder_vit: Path, tmp_path: Path
) -> None:
    done = call("depth", **options, k=4, untrained=True, drawn=True)
    trace = tlc.trace(tlc.load_model(str(folder_vit)), folder_vit / "image.png")
    expected = tlc.depth_coupling(trace, 4, position=0).mean()
    assert tlc.CouplingMap.load(tmp_path / "out" / "depth.nc").mean() == pytest.approx(
        expected, abs=1e-5
    )
    assert f"{expected:.3f}" in done.out
    facts = summary(tmp_path)
    assert facts["provenance"]["untrained"]["image"]["name"] == "image.png"
    assert facts["mean"]["trained"] == {
        "image.png": {"4": pytest.approx(expected, abs=1e-5)}
    }
    call("depth", **options, k=4, position=-1)
    last = tlc.depth_coupling(trace, 4, position=-1).mean()
    assert abs(last - expected) > 1e-3
    assert summary(tmp_path)["mean"]["trained"]["image.png"]["4"] == pytest.approx(
        last, abs=1e-5
    )


def test_depth_of_many_images(call, folder_vit: Path, tmp_path: Path) -> None:
    with Image.open(folder_vit / "image.png") as image:
        image.transpose(Image.Transpose.ROTATE_90).save(folder_vit / "turned.png")
    file = folder_vit / "images.jsonl"
    file.write_text(
        '{"id": "a", "image": "image.png"}\n{"id": "b", "image": "turned.png"}\n'
    )
    call("depth", model=folder_vit, prompts=file, k=4, out=tmp_path / "out")
    model = tlc.load_model(str(folder_vit))
    means = {}
    for name, image in {"a": "image.png", "b": "turned.png"}.items():
        trace = tlc.trace(model, folder_vit / image)
        mean = tlc.depth_coupling(trace, 4, position=0).mean()
        means[name] = {"4": pytest.approx(mean, abs=1e-5)}
    assert summary(tmp_path)["mean"]["trained"] == means
    file.write_text(file.read_text().replace("turned.png", "image.png"))
    call("depth", model=folder_vit, prompts=file, k=4, out=tmp_path, status=2)


@pytest.mark.long("runs several commands")
def test_tokens_and_trajectory(
    call, options: dict[str, object], tmp_path: Path
) -> None:
    call("tokens", **options, k=4)
    influence = summary(tmp_path)["influence"]
    # Patches come after the class token, and act on it.
    assert (influence["output_position"], influence["source_positions"]) == (
        0,
        list(range(9)),
    )
    assert all(value > 0 for value in influence["trained"]["frobenius_norm"])
    call("trajectory", **options, no_perturbation=True)
    assert summary(tmp_path)["position"] == 0
    assert len(summary(tmp_path)["tokens"]["trained"]["line_shape_score"]) == 9


@pytest.mark.long("makes a report of an image")
def test_report(call, options: dict[str, object], tmp_path: Path) -> None:
    options["out"] = tmp_path / "page.html"
    call("report", **options, k=4, no_untrained=True)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "The image image.png" in page
    assert 'id="patches"' in page


@pytest.mark.parametrize("command", ["depth", "tokens", "trajectory", "report"])
def test_help_says_which_token_is_measured(call, command: str) -> None:
    help_text = " ".join(call(command, "--help").out.replace("│", " ").split())
    assert "--image" in help_text
    assert "of an image the class token" in help_text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "w3"], "give --prompt or --image, not both"),
        (["--image", "no-such.png"], "there is no image file 'no-such.png'"),
        (["--image", __file__], "is not an image file"),
        (["--model", "{text}"], "reads text, not images: give --model a vision model"),
        (["--position", "9"], "`position` must lie in [-9, 8]"),
    ],
)
@pytest.mark.parametrize("command", ["depth", "report"])
def test_bad_input_is_one_line(
    refused,
    folder_vit: Path,
    folder_model: Path,
    tmp_path: Path,
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    options = {"model": folder_vit, "image": folder_vit / "image.png", "k": 4}
    options["out"] = tmp_path / "out.html"
    with_paths = [part.replace("{text}", str(folder_model)) for part in arguments]
    assert message in refused(command, options, with_paths)


def test_an_image_of_too_many_pixels(
    refused, options: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(30_000, 30_000))
    message = "bomb.png' has too many pixels"
    assert message in refused("depth", options, ["--image", str(tmp_path / "bomb.png")])


def test_an_image_and_a_file_of_prompts(refused, options: dict[str, object]) -> None:
    message = "give --image or --prompts, not both"
    assert message in refused("depth", options, ["--prompts", "prompts.jsonl"])


def test_a_vision_model_without_an_image(
    refused, folder_vit: Path, tmp_path: Path
) -> None:
    options = {"model": folder_vit, "out": tmp_path / "out"}
    assert f"'{folder_vit}' reads images: give one, with --image" in refused(
        "tokens", options, []
    )


def test_a_text_model_does_not_read_the_path_of_an_image(
    folder_model: Path, folder_vit: Path
) -> None:
    prompt = tlc.Prompt(id="a", image=folder_vit / "image.png")
    with pytest.raises(TypeError, match="this model reads text"):
        tlc.trace(tlc.load_model(str(folder_model)), prompt)
