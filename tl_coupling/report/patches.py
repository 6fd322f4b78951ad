"""Make the part of a page that only images have.

It shows the picture, and what was measured of its patches over it.
"""

import base64
import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from tl_coupling import pictures
from tl_coupling.blocks import Trace
from tl_coupling.pictures import measure_label, new_figure, patches_of, picture_of
from tl_coupling.portraits import Portrait
from tl_coupling.report.parts import figure, grid, named_token, piece

# Smaller pictures are enlarged, each pixel to a square.
_LEAST_PIXELS = 224


def shown_picture(trace: Trace) -> Markup:
    """Show the picture that the model read; nothing for a text."""
    if trace.pixels is None:
        return Markup("")
    # From [0, 1] to 8 bits.
    picture = Image.fromarray((picture_of(trace) * 255).round().astype(np.uint8))
    times = math.ceil(_LEAST_PIXELS / max(picture.size))
    width, height = (times * side for side in picture.size)
    buffer = io.BytesIO()
    picture.resize((width, height), Image.Resampling.NEAREST).save(
        buffer, "PNG", optimize=True
    )
    name = trace.provenance["image"].get("name", "")
    shown = piece(
        "image",
        mime="png",
        data=base64.b64encode(buffer.getvalue()).decode(),
        alt=f"The image that was measured, {name or 'given as pixels'}",
        width=width,
        height=height,
        widest=width,
    )
    size = f"{picture.width} × {picture.height} pixels"
    text = f" as the model reads it, {size}."
    return piece("figure", image=shown, lead=f"The image {name}", text=text)


def patch_section(runs: Mapping[str, Portrait]) -> Markup:
    """Return the section on patches; nothing where the tokens are no patches."""
    first = next(iter(runs.values()))
    if patches_of(first.trace) is None:
        return Markup("")
    # A picture of one patch, without a class token, has no maps of tokens.
    own = first.tokens.get("self")
    return piece(
        "patches",
        measured=named_token(first, first.position),
        own_row=own and own.row_layers[0],
        own_col=own and own.col_layers[0],
        k=first.ks[0],
        pictures=grid(_pictures(runs), " small"),
    )


def _pictures(runs: Mapping[str, Portrait]) -> Iterator[Markup]:
    shares = {name: _shares(run) for name, run in runs.items()}
    # One scale over all runs and layers.
    all_shares = torch.stack(
        [values for run_shares in shares.values() for values in run_shares.values()]
    ).nan_to_num(0)
    for name, run in runs.items():
        for layers, values in shares[name].items():
            quantity = f"Share of influence, {layers}, {name}"
            yield _draw_over_picture(
                run,
                values,
                quantity,
                "share of influence",
                0.0,
                float(all_shares.max()) or 1.0,
            )
    coupled = {
        name: run.tokens["self"].coupling()[run.position]
        for name, run in runs.items()
        if run.tokens
    }
    for name, values in coupled.items():
        own = runs[name].tokens["self"]
        high = max(
            # As in `color_scale`: four times the null at least.
            4 * own.null(),
            *(float(values.max()) for values in coupled.values()),
        )
        yield _draw_over_picture(
            runs[name],
            values,
            f"Coupling, {name}",
            measure_label("coupling", own.k),
            0.0,
            high,
        )
    for name, run in runs.items():
        yield _draw_over_picture(
            run,
            run.trajectory.line_shape_score,
            f"Line-shape score, {name}",
            "line-shape score",
        )


def _shares(run: Portrait) -> dict[str, Float[Tensor, " n_pos"]]:
    """Return each token's share of the influence on the measured one, by layers.

    Shares are means over layers, NaN for the token itself.
    """
    influence = run.influence
    norms = torch.full(
        (len(influence.layers), run.trace.n_pos),
        torch.nan,
        dtype=influence.frobenius_norm.dtype,
    )
    norms[:, list(influence.source_positions)] = influence.frobenius_norm.cpu()
    # The token's own Jacobian would drown the others.
    norms[:, run.position] = torch.nan
    # `[layer token]`, each layer summing to 1.
    share = norms / norms.nansum(1, keepdim=True)
    thirds = (
        zip(("early", "middle", "late"), share.tensor_split(3), strict=True)
        if len(share) > 2
        else ()
    )
    first, parts = 0, {"all layers": share.nanmean(0)}
    for name, part in thirds:
        last = first + len(part) - 1
        layers = (
            f"{name} layers {first} to {last}"
            if last > first
            else f"{name} layer {first}"
        )
        parts[layers], first = part.nanmean(0), last + 1
    return parts


def _draw_over_picture(
    run: Portrait,
    values: Float[Tensor, " n_pos"],
    quantity: str,
    label: str,
    *ends: float,
) -> Markup:
    scale: dict[str, Any] = dict(zip(("vmin", "vmax"), ends, strict=False))
    ax = new_figure(3.5, 3.1, "compressed").subplots()
    drawn = pictures.plot_patches(
        run.trace, values, label=label, position=run.position, ax=ax, **scale
    )
    rows, columns = patches_of(run.trace) or (0, 0)
    first_patch = run.trace.n_pos - rows * columns
    # The most of a patch, and beside it the tokens that have no place in the picture.
    largest = first_patch + int(values[first_patch:].nan_to_num(-torch.inf).argmax())
    shown = [
        largest,
        *(position for position in range(first_patch) if values[position].isfinite()),
    ]
    numbers = Markup("; ").join(
        Markup("{}: {:.3g}").format(named_token(run, position), float(values[position]))
        for position in shown
    )
    return figure(
        drawn,
        f"The picture with its patches coloured by: {quantity}",
        f"{quantity}.",
        Markup(" Largest at {}.").format(numbers),
    )
