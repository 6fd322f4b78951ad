"""Images as what a model reads: from a tensor, a picture or a file; in results,
provenance, prompts and surveys.
"""

import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tiny
import tl_coupling as tlc
from tl_coupling.trajectories import measure_trajectory
from vision_models import N_LAYERS, pixels, save_vit, vit
from zoo.oracle import Oracle

pytestmark = pytest.mark.both_lines

PATCHES = [f"{row},{column}" for row in range(4) for column in range(2)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return vit("ViTForImageClassification")[0]


@pytest.fixture(scope="module")
def traced(model: nn.Module) -> tlc.Trace:
    return tlc.trace(model, pixels())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier as HuggingFace saves it, with its processor."""
    return save_vit(tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def picture(folder: Path) -> Path:
    return folder / "image.png"


def test_tokens_are_named_by_what_they_see(traced: tlc.Trace) -> None:
    assert traced.str_tokens == ("cls", *PATCHES)
    assert traced.tokens is None
    assert torch.equal(traced.pixels, pixels())
    assert tlc.trace(vit("DeiTModel")[0], pixels()).str_tokens == (
        "cls",
        "distillation",
        *PATCHES,
    )


def test_the_stream_is_that_of_the_huggingface_model(traced: tlc.Trace) -> None:
    with torch.no_grad():
        states = vit("ViTForImageClassification")[1](
            pixels(), output_hidden_states=True
        ).hidden_states
    torch.testing.assert_close(traced.residual, torch.cat(states), atol=1e-5, rtol=1e-5)


def test_provenance_has_a_checksum_and_never_the_image(traced: tlc.Trace) -> None:
    facts = json.loads(json.dumps(traced.provenance))
    digest = hashlib.sha256(pixels().numpy().tobytes()).hexdigest()
    assert facts["image"]["pixels_sha256"] == digest
    assert facts["image"]["pixels_shape"] == [3, 16, 8]
    assert facts["patch_grid"] == [4, 2]
    assert len(json.dumps(facts)) < 2000


def test_a_file_a_picture_and_its_pixels_are_one_input(
    folder: Path, picture: Path
) -> None:
    model = tlc.load_model(str(folder))
    by_hand = torch.tensor(
        np.array(Image.open(picture)) / 127.5 - 1, dtype=torch.float32
    ).permute(2, 0, 1)
    same_image = [
        picture,
        str(picture),
        Image.open(picture),
        tlc.Prompt(id="a", image=picture),
        by_hand,
        by_hand[None],
    ]
    traces = [tlc.trace(model, image) for image in same_image]
    for trace in traces:
        torch.testing.assert_close(
            trace.residual, traces[-1].residual, atol=1e-5, rtol=1e-5
        )
    processed = json.loads(json.dumps(traces[0].provenance))["image"]["preprocessing"]
    assert processed["image_mean"] == [0.5, 0.5, 0.5]
    assert processed["mode"] == "RGB"
    assert traces[-1].provenance["image"]["preprocessing"] == "none: pixels were given"
    digests = [trace.provenance["image"]["pixels_sha256"] for trace in traces]
    assert len(set(digests[:4])) == 1


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1, 2], TypeError, "this model reads images: wanted pixels .* got a list"),
        (
            torch.ones(1, 3, 16, 8, dtype=torch.long),
            TypeError,
            "got a tensor of torch.int64",
        ),
        (
            torch.ones(2, 3, 16, 8),
            ValueError,
            r"must be one image, \[1 channels height width\], got shape \[2, 3, 16, 8\]",
        ),
        (torch.ones(16, 8), ValueError, r"got shape \[16, 8\]"),
        (
            torch.full((1, 3, 16, 8), torch.nan),
            ValueError,
            "must be an image of finite numbers, got NaN",
        ),
        (torch.ones(1, 1, 16, 8), ValueError, "Expected 3 but got 1"),
        (
            "no such file.png",
            ValueError,
            "this model reads images, and 'no such file.png' is not an image file",
        ),
        (__file__, ValueError, "is not an image file"),
        (
            tlc.Prompt("a text", "a"),
            ValueError,
            "this model reads images, and 'a text' is not an image file",
        ),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(
    model: nn.Module, prompt, error, message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        tlc.trace(model, prompt)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_processor_takes_pixels_alone(
    model: nn.Module, picture: Path
) -> None:
    with pytest.raises(
        ValueError,
        match="no image processor is saved with this model, so it takes only pixels",
    ):
        tlc.trace(model, picture)


def test_every_token_acts_on_every_other(
    traced: tlc.Trace, tiny_trace: tlc.Trace
) -> None:
    assert not traced.is_causal
    assert tiny_trace.is_causal
    result = tlc.context_coupling(traced, 0, 1, fixed="input", position=3, k=4)
    assert result.row_positions == tuple(range(9))
    influence = tlc.cross_token_influence(traced, 2)
    assert influence.source_positions == tuple(range(9))
    oracle = Oracle(
        vit("ViTForImageClassification")[1], "vit.layers", {"pixel_values": pixels()}
    )
    for layer in range(N_LAYERS):
        expected = oracle.jacobians(layer, [(t1, 2) for t1 in range(9)])
        norms = torch.stack([expected[t1, 2].norm() for t1 in range(9)])
        torch.testing.assert_close(
            influence.frobenius_norm[layer], norms, atol=1e-5, rtol=1e-4
        )
    # Of another layer's tokens by hand: A = Uᵀ J V for a later token acting on an
    # earlier one.
    J_1, J_2 = (
        oracle.jacobians(layer, [(3, t)])[3, t] for layer, t in ((0, 1), (1, 0))
    )
    U, _, Vh = torch.linalg.svd(J_2)
    A = U[:, :4].T @ J_1 @ Vh[:4].T
    off = A - A.diag().diag()
    assert float(result.normalized_miscoupling(4)[1, 0]) == pytest.approx(
        float(off.norm() / A.norm()), abs=1e-3
    )


def test_logits_of_the_class_token_are_those_of_the_classifier(
    model: nn.Module, traced: tlc.Trace
) -> None:
    original = vit("ViTForImageClassification")[1]
    with torch.no_grad():
        expected = original(pixels()).logits[0]
        of_patches = original.classifier(original.vit.layernorm(traced.residual[1]))
    torch.testing.assert_close(
        traced.logits(traced.residual[-1, 0]), expected, atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        traced.logits(traced.residual[1]), of_patches, atol=1e-5, rtol=1e-5
    )
    bare = tlc.trace(vit("ViTModel")[0], pixels())
    with pytest.raises(
        ValueError,
        match=r"wanted a model with logits for an image, \[1 n_classes\], ViTModel gives",
    ):
        bare.logits(bare.residual[-1])


@pytest.mark.parametrize("name", ["ViTForImageClassification", "ViTModel"])
def test_everything_that_is_measured_of_text_is_measured_of_an_image(name: str) -> None:
    traced = tlc.trace(vit(name)[0], pixels())
    has_logits = name == "ViTForImageClassification"
    with (
        nullcontext()
        if has_logits
        else pytest.warns(UserWarning, match="no logit-lens entropy")
    ):
        portrait = tlc.portrait(traced, k=(4, 8), position=0)
        trajectory = measure_trajectory(traced, position=0)
    assert (
        (portrait.entropy is not None)
        == (trajectory.logit_lens_entropy is not None)
        == has_logits
    )
    assert portrait.tokens["fixed output"].row_positions == tuple(range(9))
    assert trajectory.linearisation.position == 0
    assert portrait.depth.mean(4) != portrait.depth.null(4)
    assert tlc.self_coupling(traced, 0, 1, k=4).coupling().shape == (9, 9)


def test_models_and_their_twins_are_loaded_from_a_folder(folder: Path) -> None:
    trained, untrained = (
        tlc.load_model(str(folder), untrained=is_untrained)
        for is_untrained in (False, True)
    )
    assert (
        type(trained.original_model).__name__
        == type(untrained.original_model).__name__
        == "ViTForImageClassification"
    )
    assert not torch.equal(
        *(tlc.trace(model, pixels()).residual[-1] for model in (trained, untrained))
    )


def test_a_survey_of_images_is_that_of_each_and_resumes(
    folder: Path, picture: Path, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    entries = [
        {"id": "a", "image": str(picture), "task": "noise"},
        {"id": "b", "image": "grey.png"},
    ]
    Image.new("RGB", (8, 16), "grey").save(tmp_path / "grey.png")
    file.write_text("\n".join(map(json.dumps, entries)))
    prompts = tlc.load_prompts(file)
    settings = tlc.Settings(k=(4,), position=0)
    survey = tlc.Survey(
        {"vit": folder}, prompts, settings=settings, prompts_per_unit=1, untrained=True
    )
    data = tlc.run_survey(survey, tmp_path / "results", progress=False)
    expected = tlc.depth_coupling(
        tlc.trace(tlc.load_model(str(folder)), picture), k=4, position=0
    ).mean(4)
    assert float(
        data["mean_coupling"].sel(model="vit", checkpoint="main", prompt="a", k=4)
    ) == pytest.approx(expected, abs=1e-4)
    assert data["loss"].isnull().all()
    assert (
        str(data["text"].sel(prompt="a").item())
        == f"image sha256:{hashlib.sha256(picture.read_bytes()).hexdigest()}"
    )
    assert "image.png" not in data.attrs["provenance"]
    assert json.loads(data.attrs["provenance"])["preprocessing"]["image_std"] == [
        0.5,
        0.5,
        0.5,
    ]
    first_writes = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*.nc")
    }
    (tmp_path / "results" / "vit@main+0.nc").unlink()
    with pytest.warns(UserWarning, match="1 result in .* measured anew: vit@main.0"):
        again = tlc.run_survey(survey, tmp_path / "results", progress=False)
    after = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "results").glob("*.nc")
    }
    assert [
        path.name for path in first_writes if first_writes[path] != after[path]
    ] == ["vit@main+0.nc"]
    assert float(abs(again["mean_coupling"] - data["mean_coupling"]).max()) < 1e-6
    # Another picture under the same name is another survey.
    Image.new("RGB", (8, 16), "black").save(tmp_path / "grey.png")
    with pytest.raises(ValueError, match="another"):
        tlc.run_survey(
            tlc.Survey({"vit": folder}, tlc.load_prompts(file), settings=settings),
            tmp_path / "results",
        )


def test_a_text_that_names_an_image_is_no_prompt_of_a_survey(
    folder: Path, picture: Path, tmp_path: Path
) -> None:
    """It was opened, and the plan held its name and no checksum: results stayed when
    the image changed.
    """
    settings = tlc.Settings(k=(4,), position=0)
    message = (
        r"prompt '0' is a text, '.*image\.png', and this model reads images: give "
        r"Prompt\(image=FILE\)"
    )
    with pytest.raises(ValueError, match=message):
        tlc.surveys.measure_prompts(tlc.load_model(str(folder)), str(picture), settings)
    with pytest.raises(
        tlc.ModelError,
        match=f"none of the 1 units could be measured; vit@main: ValueError: {message}",
    ):
        tlc.run_survey(
            tlc.Survey({"vit": folder}, str(picture), settings=settings),
            tmp_path,
            progress=False,
        )


def test_an_image_for_a_model_of_text_is_said(picture: Path, tmp_path: Path) -> None:
    tiny.save_tokenizer(tmp_path)
    model = tiny.bridge(tiny.huggingface_model("gpt2"), tmp_path)
    prompts = [tlc.Prompt("w1 w2 w3", "a"), tlc.Prompt(id="b", image=picture)]
    with pytest.raises(
        ValueError,
        match=r"^prompt 'b' is an image, and this model reads text: give Prompt",
    ):
        tlc.surveys.measure_prompts(model, prompts, tlc.Settings(k=(4,)))


def test_an_image_that_changes_during_a_run_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan holds its checksum, and its unit would hold the values of another."""
    image = tmp_path / "grey.png"
    Image.new("RGB", (8, 16), "grey").save(image)
    survey = tlc.Survey(
        {"vit": folder},
        [tlc.Prompt(id="a", image=image)],
        settings=tlc.Settings(k=(4,), position=0),
    )
    load_model = tlc.load_model

    def loaded(*arguments: object, **options: object) -> nn.Module:
        Image.new("RGB", (8, 16), "black").save(image)
        return load_model(*arguments, **options)

    monkeypatch.setattr("tl_coupling.studies.surveys.survey.load_model", loaded)
    with pytest.raises(
        tlc.ModelError,
        match=r"prompt 'a': the image .*grey.png was changed after this run began",
    ):
        tlc.run_survey(survey, tmp_path / "results", progress=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": "a text", "image": __file__},
            "prompt 'a' is a text or an image, not both",
        ),
        (
            {"image": "no such file.png"},
            "prompt 'a': there is no image file 'no such file.png'",
        ),
        ({}, "the prompt is empty"),
    ],
)
def test_a_prompt_is_a_text_or_an_image(fields, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tlc.Prompt(id="a", **fields)


@pytest.mark.parametrize(
    "line", ['{"image": "no.png"}', '{"image": 3}', '{"image": "a.png", "prompt": "b"}']
)
def test_a_line_that_names_no_image_says_so(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 1: ") as caught:
        tlc.load_prompts(tmp_path / "prompts.jsonl")
    assert "\n" not in str(caught.value)


def test_a_processor_with_code_of_its_own_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch
) -> None:
    folder = save_vit(tmp_path / "vit")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {
        "auto_map": {"AutoImageProcessor": "code.Processor"},
        "image_processor_type": "Processor",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Processor: pass\n"
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ValueError, match="no image processor is saved with this model"):
        tlc.trace(tlc.load_model(str(folder)), folder / "image.png")
    assert not (tmp_path / "ran").exists()
