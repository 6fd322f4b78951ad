"""Does stochastic depth raise coupling, and does coupling go with accuracy? Small
vision transformers trained here.

    python demos/studies/vit.py --out out/vit python demos/studies/vit.py --data
    fashion-mnist --train-images 6000 --epochs 20 --out out/vit-fashion

ViTs learn scikit-learn's handwritten digits (or Fashion-MNIST, or CIFAR-10) at every
weight decay with every rate of stochastic depth, from several seeds. A survey measures
the coupling of their blocks on test images, at the class token and at patches; the
paper's released script reads the last patch, where one would expect the class token.
Then two claims are put to the test: that coupling rises with the rate, and that at a
fixed rate it goes with accuracy.

Models and measurements that are finished are kept: a second run does what is missing,
and the statistics anew.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
import transformers
import xarray
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import tl_coupling as tlc
from tl_coupling.files import output_folder, write_atomically

# What demos share lies above.
sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_models as small
from vit_models import (
    Images,
    TrainingConfig,
    check_config,
    left_of_idle_weights,
    load_images,
    save_images,
    train,
)
from vit_report import Study, claims, draw_accuracy, draw_rates, means, print_report

GRID = ("weight_decay", "stochastic_depth")
OPTIONS: list[tuple[str, Any, str]] = [
    ("out", Path("out/vit"), "folder for models, measurements, statistics, figures"),
    (
        "data",
        "digits",
        (
            "digits, fashion-mnist (Debian's package "
            "dataset-fashion-mnist), cifar10, or a folder like it"
        ),
    ),
    ("weight-decay", [0.005, 0.02, 0.06, 0.2], "AdamW's"),
    ("stochastic-depth", [0.0, 0.1, 0.2, 0.3], "rates at the last block"),
    ("seeds", 2, "models of each kind"),
    ("images", 24, "test images to measure"),
    ("patches", 4, "patches of each image to measure, the last one among them"),
    ("k", 10, "singular vectors"),
    ("jobs", os.cpu_count() or 1, "processes of one thread each"),
]


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options: those above, and every other field of `TrainingConfig`."""
    named = {name for name, _, _ in OPTIONS} | {"patch", "seed"}
    training = [
        (field.name.replace("_", "-"), field.default, "of training")
        for field in fields(TrainingConfig)
    ]
    parser = small.parser_of(
        str(__doc__),
        [*OPTIONS, *(option for option in training if option[0] not in named)],
    )
    parser.add_argument(
        "--patch",
        type=int,
        help="side of a patch in pixels (default: a quarter of the image's)",
    )
    parser.add_argument(
        "--train-images", type=int, help="images to learn from (default: all)"
    )
    return parser.parse_args(argv)


def configs_of(arguments: argparse.Namespace, images: Images) -> list[TrainingConfig]:
    """Every weight decay with every rate from every seed.

    Raises:
        ValueError: an option out of range.
    """
    decays, rates = (sorted(set(getattr(arguments, name))) for name in GRID)
    if min(arguments.seeds, arguments.jobs) < 1:
        raise ValueError(
            f"`--seeds` and `--jobs` must be at least 1, got {arguments.seeds} and "
            f"{arguments.jobs}"
        )
    if not 1 <= arguments.k <= arguments.width:
        raise ValueError(
            f"`--k` must lie in [1, {arguments.width}], the width of the models, got "
            f"{arguments.k}"
        )
    shared = {
        f.name: getattr(arguments, f.name)
        for f in fields(TrainingConfig)
        if f.name not in (*GRID, "seed")
    }
    base = TrainingConfig(
        **shared
        | {"patch": images.side // 4 if arguments.patch is None else arguments.patch}
    )
    configs = [
        replace(base, weight_decay=decay, stochastic_depth=rate, seed=seed)
        for seed, decay, rate in product(range(arguments.seeds), decays, rates)
    ]
    for config in configs:
        check_config(config, images.side)
    return configs


_images = lru_cache(maxsize=1)(load_images)


def one_model(
    config: TrainingConfig, data: str, n_train: int | None, folder: Path
) -> Path:
    """Train a model on one thread: other models have the other cores."""
    # Again: this may be a process of its own.
    disable_progress_bar()
    torch.set_num_threads(1)
    return train(config, _images(data, n_train), folder)


def prompts_of(images: Images, n: int, folder: Path) -> list[tlc.Prompt]:
    """Test images, evenly spread over all, as PNG files; a prompt's task is its class.

    Raises:
        ValueError: there are not so many.
    """
    if not 1 <= n <= len(images.test):
        raise ValueError(f"`--images` must lie in [1, {len(images.test)}], got {n}")
    places = np.linspace(0, len(images.test) - 1, n).round().astype(int)
    paths = save_images(images.test[places], folder)
    labels = images.test_labels[places]
    return [
        tlc.Prompt(id=path.stem, image=str(path), task=f"class {c}")
        for path, c in zip(paths, labels, strict=True)
    ]


def positions_of(n_patches: int, n: int) -> list[int]:
    """Return the class token, 0, and `n` of the patches, 1 and on: the last, and others
    evenly spread.

    Raises:
        ValueError: there are not so many.
    """
    if not 1 <= n <= n_patches:
        raise ValueError(f"`--patches` must lie in [1, {n_patches}], got {n}")
    return [0, *np.linspace(n_patches, 1, n).round().astype(int)[::-1].tolist()]


def coupling_at(
    position: int,
    models: dict[str, Path],
    prompts: list[tlc.Prompt],
    k: int,
    folder: Path,
    pool: Any,
) -> xarray.DataArray:
    """Mean coupling of different blocks at a token, `[model prompt]`, and its `null`.

    Raises:
        ModelError: a model could not be measured.
    """
    planned = tlc.Survey(
        models, prompts, settings=tlc.Settings(k=(k,), position=position), device="cpu"
    )
    data = tlc.run_survey(
        planned, folder, pool, partial(tqdm, desc=f"coupling at token {position}")
    )
    if failed := json.loads(data.attrs["failed"]):
        name, error = next(iter(failed.items()))
        raise tlc.models.ModelError(
            f"{len(failed)} models could not be measured, run again; {name}: {error}"
        )
    means = data.isel(checkpoint=0, k=0, drop=True).sel(model=list(models)).load()
    return means["mean_coupling"].assign_attrs(
        null=float(means["null_coupling"].mean())
    )


def study_here(arguments: argparse.Namespace) -> Study:
    """Train and measure, `jobs` models at a time."""
    images = load_images(arguments.data, arguments.train_images)
    configs = configs_of(arguments, images)
    positions = positions_of((images.side // configs[0].patch) ** 2, arguments.patches)
    described = (
        f"{images.digest}, {arguments.images} images, patches of "
        f"{configs[0].patch}, k = {arguments.k}"
    )
    folder_of_measurements = (
        arguments.out / "measured" / hashlib.sha256(described.encode()).hexdigest()[:8]
    )
    prompts = prompts_of(images, arguments.images, folder_of_measurements / "images")
    work = partial(
        one_model,
        data=arguments.data,
        n_train=arguments.train_images,
        folder=arguments.out / "models",
    )
    with tlc.surveys.process_pool(arguments.jobs) as pool:
        # The bar ends before an error is printed.
        with tqdm(desc="models", total=len(configs)) as bar:
            folders: list[Path] = []
            for folder in pool.map(work, configs):
                folders.append(folder)
                bar.update()
        models = {folder.name: folder for folder in folders}
        couplings = [
            coupling_at(
                p,
                models,
                prompts,
                arguments.k,
                folder_of_measurements / f"token{p}",
                pool,
            )
            for p in positions
        ]
    coupling = xarray.concat(
        couplings,
        pandas.Index(positions, name="position"),
        combine_attrs="drop_conflicts",
    )
    rows = [json.loads((folder / "training.json").read_text()) for folder in folders]
    table = pandas.DataFrame(rows, pandas.Index(models, name="model")).drop(
        columns="loss"
    )
    table["idle_weights_left"] = [
        left_of_idle_weights(config, len(images.train)) for config in configs
    ]
    return Study(
        images.name, len(images.train), len(images.test), table, coupling, arguments.k
    )


@tlc.plots.off_screen()
def study(arguments: argparse.Namespace) -> None:
    """Train, measure, report, draw."""
    with output_folder(arguments.out) as out:
        measured = study_here(arguments)
        of_claims, left_out = claims(measured)
        tables = {"models": measured.table.reset_index(), "claims": of_claims}
        tables |= {
            f"means-{column.replace('_', '-')}": means(measured, column)
            for column in GRID
        }
        print_report(measured, tables, left_out)
        for name, table in tables.items():
            write_atomically(out / f"{name}.csv", partial(table.to_csv, index=False))
        contents = {
            name: json.loads(table.to_json(orient="records"))
            for name, table in tables.items()
        }
        contents |= {
            "left_out": left_out,
            "images": measured.name,
            "n_train": measured.n_train,
            "n_test": measured.n_test,
        }
        contents |= {
            "k": measured.k,
            "null": measured.null,
            "n_measured": measured.n_images,
        }
        contents["positions"] = measured.coupling["position"].values.tolist()
        contents["versions"] = {
            package.__name__: package.__version__
            for package in (tlc, torch, transformers)
        }
        paths = [
            write_atomically(
                out / "study.json",
                lambda path: path.write_text(json.dumps(contents, indent=1)),
            )
        ]
        for name, drawn in (
            ("rates", draw_rates(measured)),
            ("accuracy", draw_accuracy(measured)),
        ):
            save = partial(drawn.savefig, dpi=120, format="png")
            paths.append(write_atomically(out / f"coupling-{name}.png", save))
    print(*paths, sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    arguments = arguments_of(argv)
    return small.status_of(lambda: study(arguments))


if __name__ == "__main__":
    sys.exit(main())
