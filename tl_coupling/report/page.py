"""Make one HTML page from all that was measured on a prompt, whole or not at all.

Its prose is in `page.html`.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from markupsafe import Markup

from tl_coupling import pictures
from tl_coupling.arguments import AnyPath, checked
from tl_coupling.comparisons import CouplingMap
from tl_coupling.files import write_atomically
from tl_coupling.interactive import (
    VIEW_STYLE,
    View,
    circuitsvis_script,
    explorer_script,
    show_coupling,
    show_layers_by_token,
    visible_token,
)
from tl_coupling.pictures import color_scale, patches_of
from tl_coupling.portraits import Portrait
from tl_coupling.report.extras import extra_sections
from tl_coupling.report.parts import (
    TEMPLATES,
    figure,
    grid,
    image,
    named_token,
    piece,
    sentence,
    spaced_tokens,
    table,
)
from tl_coupling.report.patches import patch_section, shown_picture
from tl_coupling.results import check_alike
from tl_coupling.trajectories import attention_sinks

# Layers of a map whose brightest columns are worth naming.
_FEWEST_COLUMNS = 8
_SHAPES = {
    "line-shape score": "line_shape_score",
    "expodistance": "expodistance",
    "equidistance": "equidistance",
}


@checked
def html_report(runs: Mapping[str, Portrait]) -> str:
    """Return one self-contained HTML page on a prompt.

    It has figures with captions, coloured tokens, and how it was made.

    The page asks no host for anything, and its security policy forbids it to; scripts
    other than its own do not run.

    Args:
        runs: what `portrait` returns for one prompt, by name, the main one first:
            `{"trained": …, "untrained": …}`.

    Raises:
        ValueError: no runs, or runs of different tokens, layers, positions or k.

    Cost: seconds of drawing; 1.3 MB of the page are circuitsvis' script.

    Example:
        >>> page = tlc.report.html_report({"trained": tlc.portrait(trace, k=(4, 8))})
        >>> page.splitlines()[1]
        '<html lang="en">'
    """
    if not runs:
        raise ValueError("`runs` is empty: wanted at least one Portrait")
    first = next(iter(runs.values()))
    for name, run in runs.items():
        expected = _shared_facts(first)
        check_alike(
            expected,
            _shared_facts(run),
            expected,
            f"the first run and {name!r} must have",
        )
    script = f"{circuitsvis_script()}\n{explorer_script()}"
    # The page's security policy allows the script with this digest and no other.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    provenance = first.trace.provenance
    model = str(provenance.get("model"))
    if provenance.get("checkpoint") is not None:
        model += f" at checkpoint {provenance['checkpoint']}"
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    with pictures.off_screen():
        pieces = _pieces(runs)
    return TEMPLATES.get_template("page.html").render(
        pieces,
        digest=digest,
        model=model,
        style=Markup(style + VIEW_STYLE),
        version=provenance["versions"]["tl-coupling"],
        script=Markup(script),
    )


@checked
def write_report(path: AnyPath, runs: Portrait | Mapping[str, Portrait]) -> Path:
    """Write `html_report(runs)` as UTF-8, whole or not at all.

    One portrait goes by the name of its model.

    An OSError leaves what was there.

    Example:
        >>> tlc.write_report("report.html", {"trained": tlc.portrait(trace, k=(4,))}).name
        'report.html'
    """
    # A lone surrogate (half a character, from a tokenizer of bytes) has no UTF-8.
    if isinstance(runs, Portrait):
        runs = {str(runs.trace.provenance.get("model")): runs}
    page = html_report(runs).encode("utf-8", "xmlcharrefreplace")
    return write_atomically(path, lambda unfinished: unfinished.write_bytes(page))


def _shared_facts(run: Portrait) -> dict[str, object]:
    """Return what all runs on a page must have in common."""
    return {
        "k": run.ks,
        "tokens": run.trace.str_tokens,
        "layers": run.depth.row_layers,
        "position": run.position,
        "token maps": list(run.tokens),
        "parts": [
            name
            for name in ("carriers", "products", "decoded")
            if getattr(run, name) is not None
        ],
    }


def _pieces(runs: Mapping[str, Portrait]) -> dict[str, object]:
    """Return what to put in place of each name in the template."""
    first = next(iter(runs.values()))
    trace = first.trace
    maps = {name: run.depth for name, run in runs.items()}
    # A set: they may be the same.
    smallest_and_largest_k = sorted({first.ks[0], first.ks[-1]})
    # The figure at the top shows the smallest k.
    depth = Markup()
    if len(smallest_and_largest_k) > 1:
        depth = piece(
            "depth", k=first.ks[-1], maps=grid(_heat_maps(maps, first.ks[-1], "layers"))
        )
    locality_figures = [_locality(maps, k) for k in smallest_and_largest_k]
    gains = pictures.plot_singular_values(maps)
    return {
        "prompt": trace.provenance.get("prompt"),
        "picture": shown_picture(trace),
        "n_layers": trace.n_layers,
        "d_model": trace.d_model,
        "n_pos": trace.n_pos,
        "str_tokens": _names(first),
        "measured": named_token(first, first.position),
        "conclusions": _conclusions(runs, first),
        "means": _table_of_means(maps, first.ks),
        "remarks": _remarks(maps),
        "explorer": Markup(
            show_coupling(
                maps, k=first.ks[0], matrix_k=12, decoded=first.decoded or ()
            ).body
        ),
        "depth": depth,
        "matrices": grid(_matrices(maps)),
        "locality": grid(locality_figures),
        "gains": image(gains, "Singular values of the Jacobians against depth"),
        "peaks": sentence(map(_peak, maps, maps.values())),
        "inverse_gains": _inverse_gains(maps) if trace.n_layers > 1 else "",
        "n_runs": len(runs),
        "tokens": _tokens(runs, first),
        "influence": _influence(runs, first),
        "patches": patch_section(runs),
        "extras": extra_sections(runs),
        **_trajectories(runs, first),
        "provenance": {name: _provenance(run) for name, run in maps.items()},
    }


def _conclusions(runs: Mapping[str, Portrait], first: Portrait) -> list[str]:
    """Say in three lines how coupled the model is, where, and which token acts most."""
    conclusions: list[str] = []
    if len(first.depth.row_layers) > 1:
        conclusions += [_how_coupled(runs, first), _where_coupled(first)]
    strongest = _strongest_token(first)
    if strongest is not None:
        token, share = strongest
        conclusions.append(
            Markup(
                "Among the other tokens, {} acts most on {}: it has {:.0%} of their "
                "influence, averaged over layers."
            ).format(token, named_token(first, first.position), share)
        )
    return conclusions


def _how_coupled(runs: Mapping[str, Portrait], first: Portrait) -> str:
    k = first.ks[0]
    mean = first.depth.mean(k)
    null = first.depth.null(k)
    text = (
        f"The mean coupling of different layers is {mean:.3f} at k = {k}, "
        f"{mean / null:.1f} times the {null:.3f} of random subspaces"
    )
    other_means = [
        f"{name}: {run.depth.mean(k):.3f}"
        for name, run in runs.items()
        if run is not first
    ]
    return f"{text} ({', '.join(other_means)})." if other_means else f"{text}."


def _where_coupled(first: Portrait) -> str:
    depth = first.depth
    values = depth.coupling(first.ks[0])
    # A layer with itself is always coupled most.
    values = values.where(~depth.own_pairs(), torch.nan)
    best = int(values.nan_to_num(-1).argmax())
    row, column = divmod(best, values.shape[1])
    pair = (
        f"The most coupled pair is the Jacobian of layer {depth.row_layers[row]} in "
        f"the singular vectors of layer {depth.col_layers[column]}: "
        f"{values[row, column]:.3f}."
    )
    # Three of a few layers would say nothing.
    if values.shape[1] < _FEWEST_COLUMNS:
        return pair
    column_means = values.nanmean(0).nan_to_num(-1)
    brightest = column_means.argsort(descending=True)[:3].tolist()
    layers = ", ".join(str(depth.col_layers[i]) for i in sorted(brightest))
    return (
        f"{pair} On average, the vectors of layers {layers} diagonalise Jacobians best."
    )


def _strongest_token(run: Portrait) -> tuple[Markup, float] | None:
    """Return the token that acts most on the measured one, and its mean share."""
    sources = run.influence.source_positions
    # The token's influence on itself would drown the others.
    other_places = [i for i, position in enumerate(sources) if position != run.position]
    if not other_places:
        return None
    norms = run.influence.frobenius_norm[:, other_places]
    # `[layer token]`, each layer summing to 1, so that layers of large gains do not
    # decide the mean.
    share = norms / norms.sum(1, keepdim=True)
    strongest = int(share.nan_to_num(0).mean(0).argmax())
    token = named_token(run, sources[other_places[strongest]])
    return token, float(share[:, strongest].nanmean())


def _table_of_means(maps: Mapping[str, CouplingMap], ks: Sequence[int]) -> Markup:
    """Make the table of mean coupling, a row for each k, and its null."""
    first = next(iter(maps.values()))
    rows = []
    for k in ks:
        # A column for each run; the null, which depends on k alone, has one.
        means = [_mean(result, k) for result in maps.values()]
        rows.append([f"k = {k}", *means, f"{first.null(k):.3f}"])
    return table(["", *maps, "null"], rows)


def _matrices(maps: Mapping[str, CouplingMap]) -> Iterator[Markup]:
    """Draw the coupling matrices of every run on the scale of the first.

    A twin's noise must not look like structure.
    """
    vmax = None
    for name, result in maps.items():
        drawn = pictures.plot_coupling_matrices(result, vmax=vmax)
        vmax = drawn.axes[0].images[0].get_clim()[1]
        yield figure(
            drawn.axes[0],
            f"Coupling matrices, one panel for each pair of layers, {name}",
            f"The matrices A, {name}",
            f", k = {min(20, result.k)}.",
            as_png=True,
        )


def _remarks(maps: Mapping[str, CouplingMap]) -> list[str]:
    """Say what is unusual about the runs, such as blocks that normalise the stream."""
    remarks = dict.fromkeys(
        remark for run in maps.values() for remark in run.provenance.get("remarks", ())
    )
    return list(remarks)


def _names(first: Portrait) -> Markup:
    """Write every token; of an image those before the patches, and the patches' names."""
    n_pos = first.trace.n_pos
    patches = patches_of(first.trace)
    if patches is None:
        return Markup(" ").join(
            named_token(first, position) for position in range(n_pos)
        )
    rows, columns = patches
    first_patch = n_pos - rows * columns
    first_tokens = [named_token(first, position) for position in range(first_patch)]
    return Markup("{} and {} × {} patches, named by row and column, {} … {}").format(
        Markup(" ").join(first_tokens),
        rows,
        columns,
        named_token(first, first_patch),
        named_token(first, n_pos - 1),
    )


def _locality(maps: Mapping[str, CouplingMap], k: int) -> Markup:
    """Draw how coupling fades with distance."""
    ends = []
    for name, result in maps.items():
        profile = result.locality_profile(k)
        if len(profile) > 1:
            ends.append(
                f"{name}: {profile[1]:.3f} between neighbours, "
                f"{profile[-1]:.3f} from the first layer to the last"
            )
    title = "Mean coupling against the distance of two layers"
    text = Markup(", k = {}. {}").format(k, sentence(ends))
    return figure(pictures.plot_locality(maps, k=k), f"{title}, k = {k}", title, text)


def _peak(name: str, result: CouplingMap) -> str:
    sigma = result.singular_values[:, 0]
    peak_layer = result.row_layers[int(sigma.argmax())]
    gains = f"{sigma.min():.3g} to {sigma.max():.3g}"
    return f"{name}: σ₁ from {gains} (layer {peak_layer})"


def _inverse_gains(maps: Mapping[str, CouplingMap]) -> Markup:
    return figure(
        pictures.plot_inverse_singular_values(maps),
        "Inverse singular values against depth",
        "1/σ against depth",
        ", with fitted lines. Where R² is near 1 the gains fall off inversely with depth; "
        "where it is near 0 they do not.",
    )


def _tokens(runs: Mapping[str, Portrait], first: Portrait) -> Markup:
    """Write the section on coupling across tokens."""
    if not first.tokens:
        return Markup(
            "<p>The prompt has one token: there are no others to compare it with.</p>"
        )
    own = first.tokens["self"]
    maps = {
        kind: {name: run.tokens[kind] for name, run in runs.items()}
        for kind in first.tokens
    }
    parts = [
        part
        for kind in maps
        for part in _heat_maps(maps[kind], first.ks[0], "tokens", f"{kind}, ")
    ]
    return piece(
        "tokens",
        own_row=own.row_layers[0],
        own_col=own.col_layers[0],
        measured=named_token(first, first.position),
        input=named_token(first, first.input_position),
        one_scale=len(runs) > 1,
        maps=grid(parts),
    )


def _influence(runs: Mapping[str, Portrait], first: Portrait) -> Markup:
    """Write what the other tokens do to the measured one."""
    sources = first.influence.source_positions
    other_columns = [
        i for i, position in enumerate(sources) if position != first.position
    ]
    if not other_columns:
        return Markup("<p>There is no token before the measured one.</p>")
    shares = {}
    ranks = {}
    strongest_tokens = []
    for name, run in runs.items():
        norms = run.influence.frobenius_norm[:, other_columns]
        share = norms / norms.sum(1, keepdim=True)
        shares[f"share of influence, {name}"] = share
        ranks[f"effective rank, {name}"] = run.influence.effective_rank[
            :, other_columns
        ]
        strongest = _strongest_token(run)
        assert strongest is not None
        token, mean_share = strongest
        strongest_tokens.append(
            Markup("{}: {} has the largest share, {:.0%}, averaged over layers").format(
                name, token, mean_share
            )
        )
    names = spaced_tokens(first.trace)
    source_names = [names[sources[i]] for i in other_columns]
    layers = first.influence.layers
    views = [
        show_layers_by_token(source_names, values, layers=layers)
        for values in (shares, ranks)
    ]
    own = first.influence.frobenius_norm[:, sources.index(first.position)]
    return piece(
        "influence",
        body=_bodies(views),
        is_causal=first.trace.is_causal,
        measured=named_token(first, first.position),
        strongest=sentence(strongest_tokens),
        own_norm=f"{float(own.median()):.3g}",
    )


def _bodies(views: Sequence[View]) -> Markup:
    # Views escape what they show.
    return Markup("".join(view.body for view in views))


def _trajectories(runs: Mapping[str, Portrait], first: Portrait) -> dict[str, str]:
    """Write the section on paths of the tokens through the stream, and their shape."""
    n_layers = first.trace.n_layers
    values = {
        name: torch.stack([getattr(run.trajectory, field) for run in runs.values()])
        for name, field in _SHAPES.items()
    }
    str_tokens = spaced_tokens(first.trace)
    # One view for each measure: their scales have nothing in common.
    views = [
        show_layers_by_token(str_tokens, {name: run_values}, layers=list(runs))
        for name, run_values in values.items()
    ]
    mean_scores = []
    for name, scores in zip(runs, values["line-shape score"], strict=True):
        # A token that does not move at a layer has no score.
        mean = float(scores[scores.isfinite()].mean())
        mean_scores.append(f"{name} {mean:.3g}")
    metrics = pictures.plot_trajectory_metrics(
        {name: run.trajectory for name, run in runs.items()}
    )
    return {
        "paths": _paths(runs, first) if first.trace.n_pos > 3 else "",
        "along_depth": image(metrics, "Measures of the paths against depth"),
        "scores": ", ".join(mean_scores),
        "of_random_steps": f"√{n_layers} = {n_layers**0.5:.3g}",
        "by_token": _bodies(views),
        "numbers": _table_of_shapes(first, list(runs), values),
        "entropy": _entropy(runs, first),
    }


def _table_of_shapes(
    first: Portrait, runs: Sequence[str], values: Mapping[str, torch.Tensor]
) -> Markup:
    """Make the table of every token's measures of shape, a column for each run."""
    headings = ["token", *(f"{measure}, {name}" for measure in values for name in runs)]
    token_rows = torch.cat(list(values.values())).T.tolist()
    rows = [
        [f"{position} {visible_token(token)}", *(f"{value:.3g}" for value in numbers)]
        for position, (token, numbers) in enumerate(
            zip(first.trace.str_tokens, token_rows, strict=True)
        )
    ]
    return table(headings, rows)


def _entropy(runs: Mapping[str, Portrait], first: Portrait) -> Markup:
    """Write how certain the logit lens is; nothing for models without logits."""
    entropies = {
        name: run.entropy for name, run in runs.items() if run.entropy is not None
    }
    if not entropies:
        return Markup("")
    # A vision model's stream is read by its classifier.
    if first.trace.pixels is not None:
        certain, read_by = (
            "class",
            "final norm and classifier, as if the token were the class token",
        )
    else:
        certain = "next token" if first.trace.is_causal else "predicted token"
        read_by = "final norm and unembedding"
    drawn = {
        f"logit-lens entropy in nats, {name}": entropy
        for name, entropy in entropies.items()
    }
    ends = "; ".join(
        f"{name}: {entropy[0, first.position]:.2f} nats at depth 0, "
        f"{entropy[-1, first.position]:.2f} at "
        f"depth {len(entropy) - 1}"
        for name, entropy in entropies.items()
    )
    return piece(
        "entropy",
        body=_bodies([show_layers_by_token(spaced_tokens(first.trace), drawn)]),
        certain=certain,
        read_by=read_by,
        measured=named_token(first, first.position),
        ends=ends,
    )


def _paths(runs: Mapping[str, Portrait], first: Portrait) -> Markup:
    # The same tokens in all pictures: without what is a sink in any run.
    sinks = {
        position
        for run in runs.values()
        for position in attention_sinks(run.trace.residual)
    }
    # A short prompt may have too few other tokens: each picture then leaves out its own.
    if first.trace.n_pos - len(sinks) < 2:
        sinks = set()
    positions = None
    if sinks:
        positions = [place for place in range(first.trace.n_pos) if place not in sinks]
    left_out = Markup("")
    if sinks:
        names = Markup(", ").join(named_token(first, place) for place in sorted(sinks))
        left_out = Markup(", without attention sinks: {}").format(names)
    parts = []
    # Streams grow: in the picture of all layers the early ones are a point.
    for span in ("all", "shallow"):
        for name, run in runs.items():
            drawn = pictures.plot_trajectories(
                run.trace, views=(span,), positions=positions, black=first.position
            )
            # The first line says what is drawn; model and prompt stand at the head of
            # the page.
            drawn_title = drawn.get_suptitle().splitlines()[0]
            drawn.suptitle("")
            alt = f"Paths of the tokens, {name}, {span} layers"
            text = Markup(" {}{}").format(drawn_title, left_out)
            parts.append(figure(drawn, alt, f"{name}, {span} layers.", text))
    measured = named_token(first, first.position)
    return piece("paths", measured=measured, pictures=grid(parts))


def _provenance(result: CouplingMap) -> Markup:
    """Write how a run was made."""
    facts = {
        key: value
        for key, value in result.provenance.items()
        # Versions have a row each, tokens a place of their own on the page.
        if key not in ("versions", "str_tokens")
    }
    for package, version in result.provenance["versions"].items():
        facts[f"version of {package}"] = version
    rows = []
    for key, value in facts.items():
        is_text = isinstance(value, str)
        rows.append([key, value if is_text else json.dumps(value, ensure_ascii=False)])
    return table([], rows, "facts")


def _heat_maps(
    maps: Mapping[str, CouplingMap], k: int, places: str, kind: str = ""
) -> Iterator[Markup]:
    """Draw heat maps on one colour scale."""
    # All runs on one scale: a twin's noise must not look like structure.
    low, high = color_scale(list(maps.values()), k)
    for name, result in maps.items():
        drawn = pictures.plot_coupling(result, k=k, vmin=low, vmax=high)
        yield figure(
            drawn,
            f"Heat map of coupling for every pair of {places}, {kind}{name}, k = {k}",
            f"{kind.capitalize()}{name}, k = {k}.",
            f" Mean {_mean(result, k)}, null {result.null(k):.3f}. {_strongest(result, k)}",
        )


def _strongest(result: CouplingMap, k: int) -> str:
    if result.kind != "depth" or len(result.row_layers) < 2:
        return ""
    # Coupling is at least 0: −1 is never the largest.
    values = result.coupling(k).nan_to_num(-1).fill_diagonal_(-1)
    row, col = divmod(int(values.argmax()), values.shape[1])
    return (
        f"The strongest pair is J₁ of layer {result.row_layers[row]} with the vectors of layer "
        f"{result.col_layers[col]}: {float(values[row, col]):.3f}."
    )


def _mean(result: CouplingMap, k: int) -> str:
    # Where there are no other pairs, in a model of one layer, the mean is of its own.
    return f"{result.mean(k, off_diagonal=not result.own_pairs().all()):.3f}"
