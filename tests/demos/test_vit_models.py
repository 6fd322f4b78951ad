"""The small vision transformers of the study: their images, stochastic depth, mixup,
training, and what is saved.
"""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from transformers import AutoImageProcessor, ViTForImageClassification

import vit_models
from vit_models import DropPath, Images, TrainingConfig

CONFIG = TrainingConfig(
    width=16, n_layers=3, n_heads=2, epochs=2, warmup=1, batch=64, stochastic_depth=0.3
)
GREY = np.random.default_rng(0).integers(0, 256, (7, 12, 12))


@pytest.fixture(scope="module")
def digits() -> Images:
    return vit_models.load_images("digits", 200)


@pytest.fixture(scope="module")
def trained(digits: Images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vit_models.train(CONFIG, digits, tmp_path_factory.mktemp("models"))


def test_digits_are_split_once_and_for_all():
    images = vit_models.load_images("digits")
    assert (len(images.train), len(images.test), images.side, images.n_classes) == (
        1347,
        450,
        8,
        10,
    )
    # A quarter of each class.
    of_classes = np.bincount(images.test_labels) / np.bincount(
        np.r_[images.train_labels, images.test_labels]
    )
    np.testing.assert_allclose(of_classes, 0.25, atol=0.005)
    assert images.digest == vit_models.load_images("digits").digest
    fewer = vit_models.load_images("digits", 200)
    assert len(fewer.train) == 200
    np.testing.assert_array_equal(fewer.test, images.test)
    # None of the 200 is a test image that came in again.
    learned = {image.tobytes() for image in images.train}
    assert all(image.tobytes() in learned for image in fewer.train)
    np.testing.assert_array_equal(images.train[..., 0], images.train[..., 2])


def idx(values: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, values.ndim])
        + np.array(values.shape, ">i4").tobytes()
        + values.astype(np.uint8).tobytes()
    )


def test_idx_files_are_read_compressed_or_not(tmp_path):
    parts = {
        "train": (GREY, np.arange(7)),
        "t10k": (GREY[:3] // 2, np.array([2, 0, 1])),
    }
    for part, (images, labels) in parts.items():
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx(images))
        )
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    found = vit_models.load_images(str(tmp_path))
    for channel in range(3):
        np.testing.assert_array_equal(found.train[..., channel], parts["train"][0])
        np.testing.assert_array_equal(found.test[..., channel], parts["t10k"][0])
    assert (found.train_labels.tolist(), found.test_labels.tolist()) == (
        [*range(7)],
        [2, 0, 1],
    )
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([2, 0, 1]))[:-1])
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is not an idx file"):
        vit_models.load_images(str(tmp_path))


def test_fashion_mnist_is_where_debian_puts_it(tmp_path, monkeypatch):
    monkeypatch.setattr(vit_models, "FASHION_MNIST", tmp_path / "fashion-mnist")
    with pytest.raises(
        ValueError,
        match="fashion-mnist: install Debian's package dataset-fashion-mnist, or name a",
    ):
        vit_models.load_images("fashion-mnist")
    (tmp_path / "fashion-mnist").mkdir()
    for part, images in (("train", GREY), ("t10k", GREY[:2])):
        (tmp_path / f"fashion-mnist/{part}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(idx(images))
        )
        (tmp_path / f"fashion-mnist/{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(idx(images[:, 0, 0]))
        )
    found = vit_models.load_images("fashion-mnist")
    np.testing.assert_array_equal(found.test[..., 1], GREY[:2])
    assert found.name == "fashion-mnist"


def test_cifar10_is_read_as_datasets_gives_it(monkeypatch):
    """From a data set of PNG files in memory with the columns of the one on the hub,
    which tests cannot reach.
    """
    colours = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    kinds = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(10)}
    )

    def loaded(name):
        assert name == "uoft-cs/cifar10"
        columns = {
            "img": [Image.fromarray(pixels) for pixels in colours],
            "label": [3, 0, 9, 1, 2],
        }
        whole = datasets.Dataset.from_dict(columns, kinds)
        return {"train": whole.select(range(3)), "test": whole.select(range(3, 5))}

    monkeypatch.setattr(datasets, "load_dataset", loaded)
    images = vit_models.load_images("cifar10")
    np.testing.assert_array_equal(np.concatenate([images.train, images.test]), colours)
    assert (images.train_labels.tolist(), images.test_labels.tolist()) == (
        [3, 0, 9],
        [1, 2],
    )
    assert (images.side, images.n_classes) == (32, 10)


def test_pixels_are_what_the_saved_processor_makes_of_png_files(trained, tmp_path):
    """Every value that a byte can have."""
    images = np.arange(4 * 8 * 8 * 3).reshape(4, 8, 8, 3).astype(np.uint8)
    assert len(np.unique(images)) == 256
    read = [
        Image.open(path) for path in vit_models.save_images(images, tmp_path / "images")
    ]
    found = AutoImageProcessor.from_pretrained(trained)(read, return_tensors="pt")[
        "pixel_values"
    ]
    assert torch.equal(found, vit_models.pixels(images))
    assert (float(found.min()), float(found.max())) == (-1, 1)


def test_rates_of_stochastic_depth_rise_linearly(digits):
    assert vit_models.drop_rates(4, 0.3) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert vit_models.drop_rates(1, 0.3) == [0]
    model = vit_models.new_model(replace(CONFIG, n_layers=4), 8, 10)
    assert [layer.dropout.rate for layer in model.vit.layers] == pytest.approx(
        [0, 0.1, 0.2, 0.3]
    )


def test_dropped_branches_keep_the_mean():
    torch.manual_seed(0)
    branch = torch.ones(40_000, 2, 3)
    scaled = DropPath(0.3)(branch)
    # A sample is dropped as a whole.
    np.testing.assert_allclose(np.unique(scaled), [0, 1 / 0.7], rtol=1e-6)
    assert (scaled == scaled[:, :1, :1]).all()
    # Five standard errors.
    assert float(scaled.mean()) == pytest.approx(1, abs=5 * np.sqrt(0.3 / 0.7 / 40_000))
    assert DropPath(0.3).eval()(branch) is branch
    assert DropPath(0.0)(branch) is branch


def test_both_branches_of_a_block_are_dropped_each_for_itself():
    torch.manual_seed(0)
    layer = vit_models.new_model(CONFIG, 8, 10).vit.layers[-1].train()
    x = torch.randn(1, 17, 16).expand(200, -1, -1)
    output = layer(x).detach()
    # Neither, the first, the second, both.
    assert len(torch.unique(output[:, 0].mul(1e4).round(), dim=0)) == 4
    n_untouched = int((output == x).all((1, 2)).sum())
    assert 0.3**2 * 200 - 15 < n_untouched < 0.3**2 * 200 + 15
    assert (
        len(torch.unique(layer.eval()(x).detach()[:, 0].mul(1e4).round(), dim=0)) == 1
    )


def test_mixup_mixes_images_and_labels_alike():
    labels = torch.tensor([3, 1, 2, 0, 4])
    one_hot = torch.eye(5)[labels]
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(300):
        x, soft = vit_models.mixed(one_hot, labels, 5, 0.8, rng)
        torch.testing.assert_close(soft.sum(1), torch.ones(5))
        assert torch.equal(x, soft)
        shares.append(float(soft[0, 3]))
        torch.testing.assert_close(
            soft[0], shares[-1] * one_hot[0] + (1 - shares[-1]) * one_hot[-1]
        )
    # Most of a Beta(0.8, 0.8) lies near 0 and 1, unlike a uniform one.
    assert stats.kstest(shares, stats.beta(0.8, 0.8).cdf).pvalue > 0.01
    assert np.var(shares) == pytest.approx(stats.beta(0.8, 0.8).var(), rel=0.15)
    x, hard = vit_models.mixed(one_hot, labels, 5, 0, rng)
    assert torch.equal(x, one_hot)
    assert torch.equal(hard, one_hot)


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine():
    config = TrainingConfig(epochs=10, warmup=2, learning_rate=1.0)
    rates = [vit_models.rate_at(config, step, 5) for step in range(1, 51)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) / 10)
    assert rates[9:] == pytest.approx((1 + np.cos(np.linspace(0, np.pi, 41))) / 2)
    assert vit_models.rate_at(replace(config, warmup=0), 25, 5) == pytest.approx(0.5)


def test_what_weight_decay_leaves_of_an_idle_weight_is_what_adamw_leaves():
    """A weight whose gradient is 0 at every step."""
    config = replace(CONFIG, weight_decay=5.0, learning_rate=0.01)
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.AdamW([weight], weight_decay=5.0)
    # 200 images in batches of 64, twice.
    for step in range(1, 9):
        optimizer.param_groups[0]["lr"] = vit_models.rate_at(config, step, 4)
        optimizer.step()
    left = weight.item()
    assert 0.5 < left < 0.9
    assert vit_models.left_of_idle_weights(config, 200) == pytest.approx(left, rel=1e-5)


def test_weight_decay_is_of_matrices_alone(digits):
    model = vit_models.new_model(CONFIG, 8, 10)
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    # So strong that the first step, at the full rate, leaves nothing of what decays but
    # Adam's own step.
    config = replace(CONFIG, batch=200, weight_decay=1000.0, learning_rate=1e-3)
    next(vit_models.learn(model, config, digits, np.random.default_rng(0)))
    for name, p in model.named_parameters():
        is_matrix = name.endswith("weight") and "layernorm" not in name
        moved = p.detach() if is_matrix else p.detach() - weights_before[name]
        assert float(moved.abs().max()) < 1.1e-3, name


@pytest.mark.long("trains a model")
def test_a_model_learns(digits):
    torch.manual_seed(0)
    config = replace(
        CONFIG,
        width=32,
        epochs=25,
        warmup=2,
        batch=16,
        learning_rate=2e-3,
        mixup=0,
        stochastic_depth=0,
    )
    model = vit_models.new_model(config, 8, 10)
    losses = list(vit_models.learn(model, config, digits, np.random.default_rng(0)))
    assert not model.training
    assert losses[-1] < losses[0] - 0.5
    accuracy_and_loss = vit_models.evaluate(model, digits.test, digits.test_labels)
    # Chance is a tenth, and ln 10.
    assert accuracy_and_loss["accuracy"] > 0.35
    assert accuracy_and_loss["loss"] < 2


def test_a_saved_model_is_a_plain_one_with_the_recorded_accuracy(trained, digits):
    record = json.loads((trained / "training.json").read_text())
    config = json.loads((trained / "config.json").read_text())
    assert config["architectures"] == ["ViTForImageClassification"]
    model, notes = ViTForImageClassification.from_pretrained(
        trained, output_loading_info=True
    )
    assert not any(
        notes[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    assert all(
        type(layer.dropout) is torch.nn.Dropout and layer.dropout.p == 0
        for layer in model.vit.layers
    )
    processed = AutoImageProcessor.from_pretrained(trained)(
        list(digits.test), return_tensors="pt"
    )
    with torch.no_grad():
        predicted = model.eval()(**processed).logits.argmax(1).numpy()
    assert record["test_accuracy"] == pytest.approx(
        (predicted == digits.test_labels).mean()
    )
    assert len(record["loss"]) == 2
    assert (record["stochastic_depth"], record["seed"], record["images"]) == (
        0.3,
        0,
        digits.digest,
    )


def test_a_finished_model_is_kept_and_an_interrupted_one_leaves_none(
    trained, digits, tmp_path
):
    written_at = {path: path.stat().st_mtime_ns for path in trained.iterdir()}
    assert vit_models.train(CONFIG, digits, trained.parent) == trained
    assert {path: path.stat().st_mtime_ns for path in trained.iterdir()} == written_at

    def interrupted(losses):
        next(losses)
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        vit_models.train(CONFIG, digits, tmp_path, interrupted)
    assert [
        path.name for path in tmp_path.iterdir() if not path.name.startswith(".")
    ] == []
    again = vit_models.train(CONFIG, digits, tmp_path)
    # The same random numbers; and others for another seed.
    weights, other = (
        ViTForImageClassification.from_pretrained(one).vit.layers[0].mlp.fc1.weight
        for one in (again, vit_models.train(replace(CONFIG, seed=1), digits, tmp_path))
    )
    assert torch.equal(
        weights,
        ViTForImageClassification.from_pretrained(trained).vit.layers[0].mlp.fc1.weight,
    )
    assert not torch.allclose(weights, other, atol=1e-3)
