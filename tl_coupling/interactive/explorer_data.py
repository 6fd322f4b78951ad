"""The numbers of a map to explore, as a page or a widget holds them, and its picture."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from matplotlib import colormaps, rcParams
from matplotlib.colors import to_hex

from tl_coupling.comparisons import CouplingMap
from tl_coupling.directions import Decoded
from tl_coupling.interactive.views import token_names, visible_token
from tl_coupling.pictures import off_screen
from tl_coupling.pictures.labels import map_heading
from tl_coupling.pictures.maps import draw_maps
from tl_coupling.spectra import check_k

# Steps of a colour scale: no fewer than 8 bits a channel tell apart around 0, and odd, so
# that 0 is the middle of a diverging scale.
_N_COLORS = 511
_LARGEST_CODE = 65534
_UNDEFINED = 65535
_UNDEFINED_COLOR = "#bbbbbb"
# Of the picture that stands where scripts do not run.
_DOTS_PER_INCH = 100
# Words that a direction writes.
_N_WORDS = 6
# More runs than this, such as steps of training, are gone through by a slider.
MOST_SIDE_BY_SIDE = 4


class ExplorerData(NamedTuple):
    """What a page or a widget needs of maps to explore.

    Attributes:
        numbers: what the script draws, as JSON holds it.
        picture: the maps side by side, as PNG.
        name: says in a line what the maps show.
    """

    numbers: dict[str, Any]
    picture: bytes
    name: str

    @classmethod
    def of(
        cls,
        results: CouplingMap | Mapping[str, CouplingMap],
        k: int | None,
        matrix_k: int,
        decoded: Decoded | Sequence[Decoded] = (),
    ) -> "ExplorerData":
        """Return the data of one map, or of several by name, to begin with at k."""
        runs = {"": results} if isinstance(results, CouplingMap) else dict(results)
        numbers = _numbers_of_all(runs, k, matrix_k, decoded)
        picture = _draw_picture(runs, numbers["first_k"])
        return cls(numbers, picture, _describe(runs, numbers))


def _numbers_of_all(
    runs: Mapping[str, CouplingMap],
    k: int | None,
    matrix_k: int,
    decoded: Decoded | Sequence[Decoded] = (),
) -> dict[str, Any]:
    """Return what the script draws, as JSON holds it."""
    if not runs:
        raise ValueError("`results` is empty: wanted at least one map")
    first = next(iter(runs.values()))
    for name, result in runs.items():
        if _pairs(result) != _pairs(first):
            raise ValueError(
                f"`results` must be maps of the same pairs, {name!r} has others than "
                f"{next(iter(runs))!r}"
            )
    largest_k = min(result.k for result in runs.values())
    first_k = min(10, largest_k) if k is None else k
    check_k(first_k, largest_k)
    matrix_k = min(matrix_k, largest_k)
    is_depth = first.kind == "depth"
    rows, cols = _labels(first)
    row_keys = first.row_layers if is_depth else first.row_positions
    col_keys = first.col_layers if is_depth else first.col_positions
    return {
        "heading": map_heading(list(runs.values())).split("\n"),
        "side": "layer" if is_depth else "token",
        "rows": rows,
        "cols": cols,
        # Numbers of layers or positions, as an address and the axes have them.
        "row_keys": list(row_keys),
        "col_keys": list(col_keys),
        "row_ids": _ids(first.row_layers, first.row_positions),
        "col_ids": _ids(first.col_layers, first.col_positions),
        "row_layers": list(first.row_layers),
        "col_layers": list(first.col_layers),
        "first_k": first_k,
        "ks": list(range(1, largest_k + 1)),
        "matrix_k": matrix_k,
        "pair": _strongest_pair(first, first_k),
        "runs": [
            _numbers(name, result, largest_k, matrix_k) for name, result in runs.items()
        ],
        "directions": written_directions(
            [decoded] if isinstance(decoded, Decoded) else decoded
        ),
        **color_scales(),
    }


def color_scales() -> dict[str, Any]:
    """Return the colours of every map, and how many maps stand side by side."""
    return {
        "sequential": _colors(str(rcParams["image.cmap"])),
        "diverging": _colors("RdBu_r"),
        "undefined_color": _UNDEFINED_COLOR,
        "most_side_by_side": MOST_SIDE_BY_SIDE,
    }


def _describe(runs: Mapping[str, CouplingMap], numbers: Mapping[str, Any]) -> str:
    """Say in a line what a map shows."""
    n_rows, n_cols = len(numbers["rows"]), len(numbers["cols"])
    name = (
        f"the coupling of {n_rows} × {n_cols} {numbers['side']}s, "
        f"k ≤ {numbers['ks'][-1]}"
    )
    if any(runs):
        name += f": {', '.join(runs)}"
    return name


def _draw_picture(runs: Mapping[str, CouplingMap], k: int) -> bytes:
    """Return the maps side by side as PNG; of many, the first and the last."""
    shown = dict(runs)
    if len(runs) > MOST_SIDE_BY_SIDE:
        names = list(runs)
        shown = {name: runs[name] for name in (names[0], names[-1])}
    with off_screen():
        figure: Any = draw_maps(shown, k)[0].figure
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DOTS_PER_INCH)
    # 256 colours take half of the room.
    small = io.BytesIO()
    PIL.Image.open(file).convert("RGB").quantize(256).save(small, "PNG", optimize=True)
    return small.getvalue()


def _pairs(result: CouplingMap) -> tuple[object, ...]:
    if result.kind == "depth":
        # The last tokens of prompts of different lengths are at different positions.
        is_one_token = result.row_positions == result.col_positions
        return (result.kind, result.row_layers, result.col_layers, is_one_token)
    return (
        result.kind,
        result.row_layers,
        result.col_layers,
        result.row_positions,
        result.col_positions,
    )


def _labels(result: CouplingMap) -> tuple[list[str], list[str]]:
    if result.kind == "depth":
        return list(map(str, result.row_layers)), list(map(str, result.col_layers))
    return (
        token_names(result, result.row_positions),
        token_names(result, result.col_positions),
    )


def _ids(layers: Sequence[int], positions: Sequence[int]) -> list[str]:
    """Name connections, so that a pair of one with itself is known."""
    return [
        f"{layer}:{position}" for layer, position in zip(layers, positions, strict=True)
    ]


def _strongest_pair(result: CouplingMap, k: int) -> list[int]:
    """Return row and column of the largest value of two different connections."""
    values = result.coupling(k).where(~result.own_pairs(), torch.nan)
    row, column = divmod(int(values.nan_to_num(-1).argmax()), values.shape[1])
    return [row, column]


def _numbers(name: str, result: CouplingMap, largest_k: int, m: int) -> dict[str, Any]:
    """Return one result as numbers that a page holds: values, nulls, matrices."""
    result.check_finite()
    table = result.to_dataset()
    values = table["coupling"].values[:largest_k]
    nulls = table["null"].values[:largest_k, :, 0]
    sigma = result.singular_values[:, :m].cpu()
    # The upper half of a float32: every entry has an exponent of its own, so that weak
    # pairs, and weak entries at a small k, are held as exactly as strong ones, to 0.4 %.
    upper_halves = result.matrices[..., :m, :m].detach().cpu().bfloat16()
    return {
        "name": name,
        "values": coded_values(values),
        "nulls": np.round(np.nan_to_num(nulls), 5).tolist(),
        "sigma": [[float(f"{s:.4g}") for s in row] for row in sigma.tolist()],
        "matrices": _base64(upper_halves.view(torch.int16).numpy().astype("<i2")),
    }


def coded_values(values: np.ndarray) -> str:
    """Return values from 0 to 1, in 16 bits each, as text; NaN has a code of its own."""
    codes = np.where(
        np.isnan(values),
        _UNDEFINED,
        np.rint(np.clip(np.nan_to_num(values), 0, 1) * _LARGEST_CODE),
    )
    return _base64(codes.astype("<u2"))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def written_directions(decoded: Sequence[Decoded]) -> dict[int, list[str]]:
    """Return what each direction of a layer writes, at both of its ends."""
    texts = {}
    for result in decoded:
        # The last way goes furthest: through the later blocks, or the lens.
        ends = result.tokens[-1, :, :, :_N_WORDS].tolist()
        texts[result.layer] = [
            " · − ".join(
                " ".join(visible_token(result.texts[token]).strip() for token in end)
                for end in both_ends
            )
            for both_ends in ends
        ]
    return texts


def _colors(name: str) -> list[str]:
    steps = colormaps[name].resampled(_N_COLORS)
    return [to_hex(color) for color in steps(np.arange(_N_COLORS))]
