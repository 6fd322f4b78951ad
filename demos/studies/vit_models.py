"""Small vision transformers (HuggingFace's ViT) trained from scratch on the CPU, and
the images they learn.

By default scikit-learn's handwritten digits, which need no download. Training is DeiT's
in the ways that the paper names: stochastic depth, mixup, AdamW, a linear warm-up and a
cosine.
"""

import gzip
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn

from stochastic_depth import DropPath, drop_rates
from tl_coupling.files import write_atomically

# Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
# What is held out, and what `n_train` draws, is the same in every run.
SPLIT_SEED = 0


@dataclass(frozen=True)
class TrainingConfig:
    """A ViT and how it is trained; drop-out is 0 everywhere.

    Attributes:
        width: of the residual stream, d_model.
        n_layers, n_heads, mlp_ratio: blocks; heads in each; how much wider than the
            stream their MLP is.
        patch: side of a patch in pixels.
        epochs, batch: passes over the training images; images in a step.
        learning_rate, warmup: its peak, reached after so many epochs; then a cosine
            down to 0.
        weight_decay: AdamW's, of matrices only.
        stochastic_depth: rate of the last block, see `drop_rates`.
        mixup: α of the Beta distribution of mixing shares; 0 for none.
        seed: tells models apart that are otherwise trained alike.
    """

    width: int = 64
    n_layers: int = 8
    n_heads: int = 4
    mlp_ratio: int = 2
    patch: int = 2
    epochs: int = 60
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 5
    weight_decay: float = 0.05
    stochastic_depth: float = 0.0
    mixup: float = 0.8
    seed: int = 0


@dataclass(frozen=True)
class Images:
    """Images with labels to learn from and to be tested on, in RGB; grey ones have
    three equal channels.
    """

    name: str
    train: UInt8[np.ndarray, "n_train side side 3"]
    train_labels: Int[np.ndarray, " n_train"]
    test: UInt8[np.ndarray, "n_test side side 3"]
    test_labels: Int[np.ndarray, " n_test"]

    @property
    def side(self) -> int:
        return self.train.shape[1]

    @property
    def n_classes(self) -> int:
        return 1 + int(max(self.train_labels.max(), self.test_labels.max()))

    @property
    def digest(self) -> str:
        arrays = (self.train, self.train_labels, self.test, self.test_labels)
        return hashlib.sha256(
            b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
        ).hexdigest()[:8]


def load_images(source: str, n_train: int | None = None) -> Images:
    """`"digits"`, `"fashion-mnist"`, `"cifar10"`, or a folder with the four idx files
    of MNIST and its like.

    `n_train` draws so many of the training images, always the same.

    Raises:
        ValueError: no such images; fewer than `n_train`; a package is missing.
        OSError: they cannot be read or downloaded.
    """
    if source == "digits":
        images = _digits()
    elif source == "cifar10":
        images = _cifar10()
    else:
        images = _idx_files(
            FASHION_MNIST if source == "fashion-mnist" else Path(source), source
        )
    if n_train is None:
        return images
    if not 1 <= n_train <= len(images.train):
        raise ValueError(
            f"wanted {n_train} training images, {images.name} has {len(images.train)}"
        )
    places = np.sort(
        np.random.default_rng(SPLIT_SEED).permutation(len(images.train))[:n_train]
    )
    return Images(
        images.name,
        images.train[places],
        images.train_labels[places],
        images.test,
        images.test_labels,
    )


def _digits() -> Images:
    """1797 digits of 8 × 8 pixels and 17 greys, a quarter of each class held out."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ValueError(
            'the digits come with scikit-learn: pip install "tl-coupling[vision]"'
        ) from None
    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)
    parts = train_test_split(
        grey,
        digits.target,
        test_size=0.25,
        stratify=digits.target,
        random_state=SPLIT_SEED,
    )
    train, test, train_labels, test_labels = parts
    return Images("digits", _rgb(train), train_labels, _rgb(test), test_labels)


def _idx_files(folder: Path, source: str) -> Images:
    if not folder.is_dir():
        hint = "install Debian's package dataset-fashion-mnist, or name a folder with these files"
        hint = (
            hint
            if source == "fashion-mnist"
            else "wanted digits, fashion-mnist, cifar10, or a folder of idx files"
        )
        raise ValueError(f"there is no folder {folder}: {hint}")
    names = (
        "train-images-idx3",
        "train-labels-idx1",
        "t10k-images-idx3",
        "t10k-labels-idx1",
    )
    train, train_labels, test, test_labels = (
        _idx(folder, f"{name}-ubyte") for name in names
    )
    return Images(
        folder.name,
        _rgb(train),
        train_labels.astype(np.int64),
        _rgb(test),
        test_labels.astype(np.int64),
    )


def _idx(folder: Path, name: str) -> UInt8[np.ndarray, "..."]:
    """Return an idx file of bytes, compressed or not: three bytes of magic, the number
    of axes, their sizes, the values.
    """
    path = folder / f"{name}.gz"
    data = (
        gzip.decompress(path.read_bytes())
        if path.exists()
        else (folder / name).read_bytes()
    )
    n_axes = data[3] if data[:3] == b"\x00\x00\x08" else 0
    shape = (
        np.frombuffer(data, ">i4", n_axes, 4) if len(data) >= 4 * (1 + n_axes) else ()
    )
    if not n_axes or len(data) != 4 * (1 + n_axes) + math.prod(map(int, shape)):
        raise ValueError(f"{folder / name} is not an idx file of bytes")
    return np.frombuffer(data, np.uint8, offset=4 * (1 + n_axes)).reshape(shape)


def _cifar10() -> Images:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            'CIFAR-10 comes through the package datasets: pip install "tl-coupling[vision]"'
        ) from None
    try:
        splits = load_dataset("uoft-cs/cifar10")
    # datasets, huggingface_hub, httpx and pyarrow each have their own; none is
    # documented.
    except Exception as error:
        raise OSError(
            f"CIFAR-10 cannot be had from the hub ({type(error).__name__}): is there "
            "a network?"
        ) from error
    halves = [splits[split].with_format("numpy") for split in ("train", "test")]
    (train, train_labels), (test, test_labels) = (
        (np.stack(half["img"]), np.array(half["label"])) for half in halves
    )
    return Images("cifar10", train, train_labels, test, test_labels)


def _rgb(grey: UInt8[np.ndarray, "n side side"]) -> UInt8[np.ndarray, "n side side 3"]:
    return np.repeat(grey[..., None], 3, axis=3)


def pixels(
    images: UInt8[np.ndarray, "n side side 3"],
) -> Float[Tensor, "n 3 side side"]:
    """Return what `processor` makes of them: from -1 to 1."""
    return (
        torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2) / 255 - 0.5
    ) / 0.5


def processor(side: int) -> Any:
    """HuggingFace's, saved with each model, in its form that needs no torchvision."""
    from transformers import ViTImageProcessorPil

    return ViTImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )


def save_images(images: UInt8[np.ndarray, "n side side 3"], folder: Path) -> list[Path]:
    """As PNG files, named by their place."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{i}.png" for i in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        write_atomically(path, Image.fromarray(image).save)
    return paths


def check_config(config: TrainingConfig, side: int) -> None:
    """Raise ValueError on what cannot be trained on images of that side."""
    if not 1 <= config.patch <= side or side % config.patch:
        raise ValueError(
            f"patches must fill the image of {side} × {side} pixels, got a side of "
            f"{config.patch}"
        )
    if config.n_heads < 1 or config.width % config.n_heads:
        raise ValueError(
            f"heads must fill the width, got {config.n_heads} heads in {config.width}"
        )
    if (
        min(
            config.width, config.n_layers, config.mlp_ratio, config.epochs, config.batch
        )
        < 1
    ):
        raise ValueError(
            "width, layers, the ratio of the MLP, epochs and the batch must be at "
            "least 1"
        )
    if not 0 <= config.warmup <= config.epochs:
        raise ValueError(
            f"the warm-up must lie in [0, {config.epochs}] epochs, got {config.warmup}"
        )
    if not 0 <= config.stochastic_depth < 1:
        raise ValueError(
            "the rate of stochastic depth must lie in [0, 1), got "
            f"{config.stochastic_depth}"
        )
    if min(config.weight_decay, config.mixup) < 0 or config.learning_rate <= 0:
        raise ValueError(
            "weight decay and mixup must not be negative, and the learning rate above 0"
        )


def new_model(config: TrainingConfig, side: int, n_classes: int) -> Any:
    """Return a ViT at its own initialisation, from torch's generator; stochastic depth
    takes the place of its drop-out.

    That has no weights and does nothing in eval mode: what is saved is a plain
    `ViTForImageClassification`.
    """
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=config.width,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=config.mlp_ratio * config.width,
            image_size=side,
            patch_size=config.patch,
            num_labels=n_classes,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    # On a CPU, for so few tokens, faster than the fused one.
    model.set_attn_implementation("eager")
    for layer, rate in zip(
        model.vit.layers,
        drop_rates(config.n_layers, config.stochastic_depth),
        strict=True,
    ):
        # Both branches of a block pass through it before they are added, with a draw
        # for each, as in timm.
        layer.dropout = DropPath(rate)
    return model


def mixed(
    x: Float[Tensor, "n ..."],
    labels: Int[Tensor, " n"],
    n_classes: int,
    alpha: float,
    generator: np.random.Generator,
) -> tuple[Float[Tensor, "n ..."], Float[Tensor, "n n_classes"]]:
    """Mixup: each image with another of the batch, and its label too, at a share from
    Beta(α, α), one for the batch.
    """
    one_hot = nn.functional.one_hot(labels, n_classes).to(x.dtype)
    if not alpha:
        return x, one_hot
    share = generator.beta(alpha, alpha)
    return share * x + (1 - share) * x.flip(0), share * one_hot + (
        1 - share
    ) * one_hot.flip(0)


def rate_at(config: TrainingConfig, step: int, steps_per_epoch: int) -> float:
    """Return the learning rate of a step, counted from 1: a linear warm-up, then a
    cosine that ends at 0.
    """
    warmup = config.warmup * steps_per_epoch
    total = config.epochs * steps_per_epoch
    if step <= warmup:
        return config.learning_rate * step / warmup
    return (
        config.learning_rate
        * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
        / 2
    )


def left_of_idle_weights(config: TrainingConfig, n_train: int) -> float:
    """Return what weight decay leaves, over a whole training, of a weight that no
    gradient moves: `Π (1 - rate · decay)`.

    So strong a decay is: AdamW's acts by the rate and the number of steps, and short
    trainings hardly feel it.
    """
    n_steps = math.ceil(n_train / config.batch)
    steps = range(1, config.epochs * n_steps + 1)
    return math.prod(
        1 - rate_at(config, step, n_steps) * config.weight_decay for step in steps
    )


def learn(
    model: Any, config: TrainingConfig, images: Images, generator: np.random.Generator
) -> Iterator[float]:
    """Train in memory: the mean loss of each epoch, on mixed images, in nats."""
    # As DeiT: not biases, norms, the class token and positions.
    decayed = [p for p in model.parameters() if p.ndim in (2, 4)]
    not_decayed = [p for p in model.parameters() if p.ndim not in (2, 4)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
    x = pixels(images.train)
    labels = torch.from_numpy(images.train_labels)
    n_steps = math.ceil(len(x) / config.batch)
    step = 0
    model.train()
    for _ in range(config.epochs):
        losses = []
        for batch in torch.from_numpy(generator.permutation(len(x))).split(
            config.batch
        ):
            step += 1
            for group in optimizer.param_groups:
                group["lr"] = rate_at(config, step, n_steps)
            inputs, targets = mixed(
                x[batch], labels[batch], images.n_classes, config.mixup, generator
            )
            loss = nn.functional.cross_entropy(model(inputs).logits, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        yield float(np.mean(losses))
    model.eval()


@torch.no_grad()
def evaluate(
    model: Any,
    images: UInt8[np.ndarray, "n side side 3"],
    labels: Int[np.ndarray, " n"],
) -> dict[str, float]:
    """Top-1 accuracy, and mean cross-entropy in nats, in eval mode."""
    model.eval()
    logits = torch.cat([model(batch).logits for batch in pixels(images).split(256)])
    targets = torch.from_numpy(labels)
    accuracy = (logits.argmax(1) == targets).double().mean()
    return {
        "accuracy": float(accuracy),
        "loss": float(nn.functional.cross_entropy(logits, targets)),
    }


def train(
    config: TrainingConfig,
    images: Images,
    folder: Path,
    progress: Callable[[Iterable[float]], Iterable[float]] = iter,
) -> Path:
    """Train one model; a folder in HuggingFace format, with the processor and
    `training.json`.

    That holds the config, train and test accuracy and loss, and the loss of every
    epoch. A finished model is kept. The folder gets its name when everything is in it,
    so an interrupted run leaves none. Every config has random numbers of its own:
    models are independent.
    """
    described = asdict(config) | {"images": images.digest}
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:8]
    done = (
        folder
        / f"decay{config.weight_decay:g}-drop{config.stochastic_depth:g}-seed{config.seed}-{digest}"
    )
    if done.is_dir():
        return done
    unfinished = folder / f".{done.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(digest, 16))
        model = new_model(config, images.side, images.n_classes)
        losses = list(
            progress(
                learn(model, config, images, np.random.default_rng(int(digest, 16)))
            )
        )
    model.save_pretrained(unfinished)
    processor(images.side).save_pretrained(unfinished)
    scores = {
        f"{part}_{name}": value
        for part, data, labels in (
            ("train", images.train, images.train_labels),
            ("test", images.test, images.test_labels),
        )
        for name, value in evaluate(model, data, labels).items()
    }
    (unfinished / "training.json").write_text(
        json.dumps(described | scores | {"loss": losses})
    )
    unfinished.rename(done)
    return done
