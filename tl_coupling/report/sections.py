"""The sections of the page: each takes the runs and returns HTML, with the numbers in the words."""

import html
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from tl_coupling.comparisons import CouplingMap
from tl_coupling.interactive import show_layers_by_token, show_token_coupling, show_tokens, visible_token
from tl_coupling.plots import (
    plot_adjacency,
    plot_coupling,
    plot_coupling_matrices,
    plot_inverse_singular_values,
    plot_locality,
    plot_singular_values,
    plot_trajectories,
    plot_trajectory_metrics,
)
from tl_coupling.portraits import Portrait
from tl_coupling.report.images import figure, grid, table, view
from tl_coupling.trajectories import equidistance, expodistance, line_shape_score

Runs = Mapping[str, Portrait]


def summary(runs: Runs) -> str:
    """The prompt, the measured token, and mean depth coupling at every k beside the null."""
    first = _first(runs)
    prompt = first.trace.provenance.get("prompt")
    quoted = f"<blockquote>{html.escape(prompt)}</blockquote>" if prompt else ""
    str_tokens = " ".join(_token(first, position) for position in range(first.trace.n_pos))
    rows = [
        [f"k = {k}", *(_mean(run.depth, k) for run in runs.values()), f"{first.depth.null(k):.3f}"] for k in first.ks
    ]
    return (
        f"{quoted}<p>{first.trace.n_layers} layers of width {first.trace.d_model}, {first.trace.n_pos} tokens: "
        f"{str_tokens}. Measured at {_token(first, first.position)}. Layers and positions count from 0.</p><p>Mean "
        "coupling 1 − m̃ across depth, over pairs of different layers. It is 1 where every block's top k singular "
        "vectors diagonalise every other block's Jacobian.</p>" + table(["", *runs, "random subspaces"], rows)
    )


def depth(runs: Runs) -> str:
    """Heat maps of coupling across depth, and the matrices behind them."""
    maps, grids = [], []
    for name, run in runs.items():
        result = run.depth
        for k in sorted({run.ks[0], run.ks[-1]}):
            caption = (
                f"<strong>{html.escape(name)}, k = {k}.</strong> Mean {_mean(result, k)}; random subspaces would give "
                f"{result.null(k):.3f}. {_strongest(result, k)}"
            )
            drawn = plot_coupling(result, k=k)
            maps.append(figure(drawn, f"Heat map of coupling for every pair of layers, {name}, k = {k}", caption))
        caption = f"<strong>The matrices A, {html.escape(name)}</strong>, k = {result.k}."
        alt = f"Coupling matrices, one panel for each pair of layers, {name}"
        grids.append(figure(plot_coupling_matrices(result), alt, caption, "png"))
    return (
        "<p>Row: the layer whose Jacobian J₁ is tested; column: the layer that gave the singular vectors. On the "
        "diagonal a layer meets its own. Bright cells away from it are coupled layers, a bright band along it is "
        f"locality.</p>{grid(maps)}<p>Behind every cell lies a coupling matrix A = UᵀJ₁V; here one panel for each pair "
        "of some layers, divided by the largest singular value of J₁. Coupled layers show a bright diagonal, "
        f"uncoupled ones an even speckle.</p>{grid(grids)}"
    )


def locality(runs: Runs) -> str:
    """How coupling fades with distance, and the layers as a graph."""
    maps = {name: run.depth for name, run in runs.items()}
    first = _first(runs)
    parts = []
    for k in sorted({first.ks[0], first.ks[-1]}):
        profiles = {name: result.locality_profile(k) for name, result in maps.items()}
        ends = "; ".join(
            f"{html.escape(name)}: {profile[1]:.3f} between neighbours, {profile[-1]:.3f} from the first layer to the "
            "last"
            for name, profile in profiles.items()
            if len(profile) > 1
        )
        caption = f"<strong>Mean coupling of layers that lie this far apart</strong>, k = {k}. {_sentence(ends)}"
        drawn = plot_locality(maps, k=k)
        parts.append(figure(drawn, f"Mean coupling against the distance of two layers, k = {k}", caption))
    for name, result in maps.items():
        caption = (
            f"<strong>Layers as a graph, {html.escape(name)}.</strong> An edge is as wide and as opaque as its two "
            f"layers are coupled (k = {first.ks[0]}). Groups of strong edges are layers that share singular vectors."
        )
        drawn = plot_adjacency(result, k=first.ks[0])
        parts.append(figure(drawn, f"Graph of layers with edges as wide as their coupling, {name}", caption))
    return grid(parts)


def singular_values(runs: Runs) -> str:
    """Singular values against depth."""
    maps = {name: run.depth for name, run in runs.items()}
    peaks = []
    for name, result in maps.items():
        sigma = result.singular_values[:, 0]
        at = result.row_layers[int(sigma.argmax())]
        peaks.append(f"{html.escape(name)}: σ₁ from {sigma.min():.3g} to {sigma.max():.3g} (layer {at})")
    caption = (
        "<strong>Gains.</strong> The largest singular values of each block's Jacobian, σ₁ darkest: how strongly the "
        f"block amplifies its top directions. {_sentence('; '.join(peaks))} Lines close together are singular values "
        "close together, whose vectors are hard to tell apart."
    )
    parts = [figure(plot_singular_values(maps), "Singular values of the Jacobians against depth", caption)]
    if _first(runs).trace.n_layers > 1:
        caption = (
            "<strong>1/σ against depth</strong>, with fitted lines. Where R² is near 1 the gains fall off inversely "
            "with depth."
        )
        drawn = plot_inverse_singular_values(maps)
        parts.append(figure(drawn, "Inverse singular values against depth", caption))
    return grid(parts)


def tokens(runs: Runs) -> str:
    """Coupling across tokens, to hover over."""
    first = _first(runs)
    if not first.tokens:
        return "<p>The prompt has one token: there are no others to compare it with.</p>"
    k, own = first.ks[0], first.tokens["self"]
    rows = [
        [f"{name}, {kind}", _mean(run.tokens[kind], k), f"{run.tokens[kind].null(k):.3f}"]
        for kind in first.tokens
        for name, run in runs.items()
    ]
    shown = show_token_coupling(
        {f"{n}, {kind}": run.tokens[kind] for n, run in runs.items() for kind in run.tokens}, k=k
    )
    caption = (
        "<strong>Token by token.</strong> Row (“destination”): the token of J₁; column (“source”): the token that "
        "gave the singular vectors. Dark pairs share singular vectors. Point at a cell for its value."
    )
    return (
        f"<p>Two layers are held, J₁ of layer {own.row_layers[0]} and the singular vectors of layer "
        f"{own.col_layers[0]}; the tokens vary. <em>Self</em>: the Jacobian of each token's output by its own input. "
        f"<em>Fixed input</em>: of each token's output by the input {_token(first, first.input_position)}. <em>Fixed "
        f"output</em>: of the output {_token(first, first.position)} by each token's input.</p>"
        + table(["", f"mean coupling, k = {k}", "random subspaces"], rows)
        + view(shown.body, "Coupling of every pair of tokens", caption)
    )


def influence(runs: Runs) -> str:
    """What the other tokens do to the measured one."""
    first = _first(runs)
    sources = first.influence.source_positions
    others = [i for i, position in enumerate(sources) if position != first.position]
    if not others:
        return "<p>No token stands before the measured one.</p>"
    shares, ranks, words = {}, {}, []
    for name, run in runs.items():
        norms = run.influence.frobenius_norm[:, others]
        share = shares[f"share of influence, {name}"] = norms / norms.sum(1, keepdim=True)
        ranks[f"effective rank, {name}"] = run.influence.effective_rank[:, others]
        strongest = int(share.nan_to_num(0).mean(0).argmax())
        words.append(
            f"{html.escape(name)}: {_token(run, sources[others[strongest]])} has the largest share, "
            f"{float(share[:, strongest].nanmean()):.0%} in the mean over layers"
        )
    where = [first.trace.str_tokens[sources[i]] for i in others]
    shown = [show_layers_by_token(where, each, layers=first.influence.layers).body for each in (shares, ranks)]
    own = first.influence.frobenius_norm[:, sources.index(first.position)]
    caption = (
        f"<strong>What the tokens before {_token(first, first.position)} do to it</strong>, one row for each layer, "
        "the deepest on top. Share of influence: the Frobenius norm of the Jacobian from that token, as a share of "
        f"all these tokens' in the layer. {_sentence('; '.join(words))} Effective rank: over how many directions the "
        f"influence is spread. The token's own Jacobian is left out: its norm, {float(own.median()):.3g} in the median "
        "layer, would drown the others."
    )
    return view("".join(shown), "Influence of tokens by layer", caption)


def trajectories(runs: Runs) -> str:
    """Paths of the tokens through the residual stream, and their shape."""
    parts = []
    for name, run in runs.items():
        if run.trace.n_pos > 3:
            caption = (
                f"<strong>Paths, {html.escape(name)}.</strong> Every token's way through the layers in the two "
                "principal components of the last one; the last token is black. Straight, evenly spaced paths are "
                "regular ones."
            )
            drawn = plot_trajectories(run.trace)
            alt = f"Paths of the tokens in two principal components, {name}"
            parts.append(figure(drawn, alt, caption, wide=True))
    traces = {name: run.trace for name, run in runs.items()}
    scores = {name: line_shape_score(trace.residual) for name, trace in traces.items()}
    means = ", ".join(f"{html.escape(name)} {_finite_mean(score):.3g}" for name, score in scores.items())
    n_layers = _first(runs).trace.n_layers
    caption = (
        "<strong>Along depth</strong>, the mean over tokens, each of them faint. Line-shape score of the whole path, "
        f"mean over tokens: {means}; 1 is a straight line, and steps in random directions give about √{n_layers} = "
        f"{n_layers**0.5:.3g}."
    )
    entropies = {name: run.entropy for name, run in runs.items()}
    drawn = plot_trajectory_metrics(traces)
    parts.append(figure(drawn, "Measures of the paths against depth", caption, wide=True))

    str_tokens = _first(runs).trace.str_tokens
    shown = []
    for name, trace in traces.items():
        x = trace.residual
        measures = {"line-shape score": scores[name], "expodistance": expodistance(x), "equidistance": equidistance(x)}
        shown.append(show_tokens(str_tokens, {f"{what}, {name}": values for what, values in measures.items()}).body)
    caption = (
        "<strong>Token by token.</strong> Low is regular: a straight path (line-shape score 1), exponential growth of "
        "the norm (expodistance 0), equal steps (equidistance 0). Point at a token for its value."
    )
    parts.append(view(grid(shown), "Tokens coloured by measures of their paths", caption))

    ends = "; ".join(
        f"{html.escape(name)}: {float(entropy[0, _first(runs).position]):.2f} nats at depth 0, "
        f"{float(entropy[-1, _first(runs).position]):.2f} at depth {len(entropy) - 1}"
        for name, entropy in entropies.items()
    )
    caption = (
        "<strong>How sure the next token is</strong>, read off every depth (0: what enters the first block) by final "
        f"norm and unembedding. White is certain. At {_token(_first(runs), _first(runs).position)}, {ends}."
    )
    named = {f"logit-lens entropy in nats, {name}": entropy for name, entropy in entropies.items()}
    parts.append(view(show_layers_by_token(str_tokens, named).body, "Logit-lens entropy by depth and token", caption))
    return "".join(parts)


def provenance(runs: Runs) -> str:
    """How all this was made."""
    parts = []
    for name, run in runs.items():
        facts = {key: value for key, value in run.depth.provenance.items() if key not in ("versions", "str_tokens")}
        facts |= {f"version of {package}": version for package, version in run.depth.provenance["versions"].items()}
        rows = [
            [key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)]
            for key, value in facts.items()
        ]
        parts.append(f"<details><summary>{html.escape(name)}</summary>{table([], rows, kind='facts')}</details>")
    return "".join(parts)


def _first(runs: Runs) -> Portrait:
    return next(iter(runs.values()))


def _token(run: Portrait, position: int) -> str:
    """A position and its token, as HTML."""
    token = visible_token(run.trace.str_tokens[position]).strip() or "␣"
    return f"<code><small>{position}</small> {html.escape(token)}</code>"


def _mean(result: CouplingMap, k: int) -> str:
    connections = set(zip(result.row_layers, result.row_positions, strict=True))
    connections |= set(zip(result.col_layers, result.col_positions, strict=True))
    return f"{result.mean(k, off_diagonal=len(connections) > 1):.3f}"


def _strongest(result: CouplingMap, k: int) -> str:
    values = result.coupling(k).clone().nan_to_num(-1)
    if len(values) < 2:
        return ""
    values.fill_diagonal_(-1)
    row, col = divmod(int(values.argmax()), values.shape[1])
    return (
        f"The strongest pair of different layers is ({result.row_layers[row]}, {result.col_layers[col]}) with "
        f"{float(values[row, col]):.3f}."
    )


def _finite_mean(values: Tensor) -> float:
    return float(values[torch.isfinite(values)].mean())


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
