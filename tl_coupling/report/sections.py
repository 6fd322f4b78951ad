"""The sections of the page: each takes the runs and returns HTML, with the numbers in the words."""

import html
import json
from collections.abc import Mapping

import torch

from tl_coupling import plots
from tl_coupling.comparisons import CouplingMap
from tl_coupling.interactive import show_layers_by_token, visible_token
from tl_coupling.plots.maps import color_scale
from tl_coupling.portraits import Portrait
from tl_coupling.report.images import figure, grid, table, view
from tl_coupling.trajectories import equidistance, expodistance, line_shape_score

Runs = Mapping[str, Portrait]

_PAPER = '<a href="https://arxiv.org/abs/2407.07810">Aubry et al. 2025</a>'


def summary(runs: Runs) -> str:
    """The prompt, the measured token, what the symbols mean, and mean depth coupling at every k beside the null."""
    first = _first(runs)
    prompt = first.trace.provenance.get("prompt")
    quoted = f"<blockquote>{html.escape(prompt)}</blockquote>" if prompt else ""
    str_tokens = " ".join(_token(first, position) for position in range(first.trace.n_pos))
    rows = [
        [f"k = {k}", *(_mean(run.depth, k) for run in runs.values()), f"{first.depth.null(k):.3f}"] for k in first.ks
    ]
    return (
        f"{quoted}<p>{first.trace.n_layers} layers of width {first.trace.d_model}, {first.trace.n_pos} tokens: "
        f"{str_tokens}. Measured at {_token(first, first.position)}. Layers and positions count from 0.</p>"
        "<p><strong>J₁</strong> is the Jacobian of one block at one token: how a small change in what enters the block "
        "changes what the block adds to the residual stream. <strong>m̃</strong> is the off-diagonal share of A = "
        "UᵀJ₁V, ‖A − Diag(A)‖ / ‖A‖, where U and V are the top k singular vectors of another Jacobian; coupling is "
        "1 − m̃, and 1 means that these vectors diagonalise J₁. The <strong>null</strong>, 1 − √(1 − 1/k), is the "
        f"coupling that random subspaces would give. J₁ and m̃ are those of {_PAPER}.</p>"
        "<p>Mean coupling 1 − m̃ over pairs of different layers:</p>" + table(["", *runs, "null"], rows)
    )


def depth(runs: Runs) -> str:
    """Heat maps of coupling across depth, and the matrices behind them."""
    maps, grids, first = [], [], _first(runs)
    for k in sorted({first.ks[0], first.ks[-1]}):
        low, high = color_scale([run.depth for run in runs.values()], k)
        for name, run in runs.items():
            caption = (
                f"<strong>{html.escape(name)}, k = {k}.</strong> Mean {_mean(run.depth, k)}, null "
                f"{run.depth.null(k):.3f}. {_strongest(run.depth, k)}"
            )
            drawn = plots.plot_coupling(run.depth, k=k, vmin=low, vmax=high)
            maps.append(figure(drawn, f"Heat map of coupling for every pair of layers, {name}, k = {k}", caption))
    for name, run in runs.items():
        caption = f"<strong>The matrices A, {html.escape(name)}</strong>, k = {run.depth.k}."
        alt = f"Coupling matrices, one panel for each pair of layers, {name}"
        grids.append(figure(plots.plot_coupling_matrices(run.depth).axes[0], alt, caption, as_png=True))
    return (
        "<p>Row: the layer of J₁. Column: the layer of the singular vectors. Bright cells are coupled layers, a bright "
        "band along the diagonal is locality; the diagonal itself, a layer with its own vectors, is grey. Maps at one "
        f"k share one colour scale.</p>{grid(maps)}<p>Behind every cell is a coupling matrix A = UᵀJ₁V; here is one "
        "panel for each pair of some layers, |A| divided by the largest singular value of J₁. Coupled layers show a "
        f"bright diagonal, uncoupled ones an even speckle.</p>{grid(grids)}"
    )


def locality(runs: Runs) -> str:
    """How coupling fades with distance, and the layers as a graph."""
    maps = {name: run.depth for name, run in runs.items()}
    first = _first(runs)
    parts = []
    for k in sorted({first.ks[0], first.ks[-1]}):
        profiles = {html.escape(name): result.locality_profile(k) for name, result in maps.items()}
        ends = "; ".join(
            f"{name}: {profile[1]:.3f} between neighbours, {profile[-1]:.3f} from the first layer to the last"
            for name, profile in profiles.items()
            if len(profile) > 1
        )
        caption = f"<strong>Mean coupling against the distance of two layers</strong>, k = {k}. {_sentence(ends)}"
        drawn = plots.plot_locality(maps, k=k)
        parts.append(figure(drawn, f"Mean coupling against the distance of two layers, k = {k}", caption))
    for name, result in maps.items():
        caption = (
            f"<strong>Layers as a graph, {html.escape(name)}.</strong> The wider an edge, the more its two layers are "
            f"coupled (k = {first.ks[0]}); only the strongest edges are drawn. Groups of them share singular vectors."
        )
        drawn = plots.plot_adjacency(result, k=first.ks[0])
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
        f"block amplifies its top directions. {_sentence('; '.join(peaks))} Where lines are close together, so are the "
        "singular values, and their vectors are hard to tell apart."
    )
    parts = [figure(plots.plot_singular_values(maps), "Singular values of the Jacobians against depth", caption)]
    if _first(runs).trace.n_layers > 1:
        caption = (
            "<strong>1/σ against depth</strong>, with fitted lines. Where R² is near 1 the gains fall off inversely "
            "with depth."
        )
        drawn = plots.plot_inverse_singular_values(maps)
        parts.append(figure(drawn, "Inverse singular values against depth", caption))
    return grid(parts)


def tokens(runs: Runs) -> str:
    """Coupling across tokens."""
    first = _first(runs)
    if not first.tokens:
        return "<p>The prompt has one token: there are no others to compare it with.</p>"
    k, own, parts = first.ks[0], first.tokens["self"], []
    for kind in first.tokens:
        low, high = color_scale([run.tokens[kind] for run in runs.values()], k)
        for name, run in runs.items():
            result = run.tokens[kind]
            caption = (
                f"<strong>{kind.capitalize()}, {html.escape(name)}</strong>, k = {k}. Mean {_mean(result, k)}, null "
                f"{result.null(k):.3f}."
            )
            drawn = plots.plot_coupling(result, k=k, vmin=low, vmax=high)
            parts.append(figure(drawn, f"Heat map of coupling for every pair of tokens, {kind}, {name}", caption))
    return (
        f"<p>The layers are fixed, {own.row_layers[0]} for J₁ and {own.col_layers[0]} for the singular vectors; the "
        "tokens vary. Row: the token of J₁. Column: the token of the singular vectors. <em>Self</em>: the Jacobian of "
        f"each token's output by its own input. <em>Fixed input</em>: of each token's output by the input "
        f"{_token(first, first.input_position)}. <em>Fixed output</em>: of the output {_token(first, first.position)} "
        f"by each token's input. Both maps of a kind share one colour scale.</p>{grid(parts)}"
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
        "the first on top. Share of influence: the Frobenius norm of the Jacobian from that token, divided by the sum "
        f"over all these tokens. {_sentence('; '.join(words))} Effective rank: over how many directions the influence "
        f"is spread. The token's own Jacobian is left out: its norm, {float(own.median()):.3g} in the median layer, "
        "would drown the others."
    )
    return view("".join(shown), "Influence of tokens by layer", caption)


def trajectories(runs: Runs) -> str:
    """Paths of the tokens through the residual stream, and their shape."""
    parts, paths, first = [], [], _first(runs)
    for span in ("all", "shallow", "deep") if first.trace.n_pos > 3 else ():
        for name, run in runs.items():
            drawn = plots.plot_trajectories(run.trace, views=(span,))
            what = html.escape(drawn.get_suptitle().splitlines()[0])
            drawn.suptitle("")
            caption = f"<strong>{html.escape(name)}, {span} layers.</strong> {what}"
            paths.append(figure(drawn, f"Paths of the tokens, {name}, {span} layers", caption))
    if paths:
        parts = [
            "<p>Every token's path through the layers, in the two principal components of the last one; the last token "
            f"is black. Regular paths are straight and evenly spaced.</p>{grid(paths)}"
        ]
    scores = {name: line_shape_score(run.trace.residual) for name, run in runs.items()}
    means = ", ".join(f"{html.escape(name)} {float(s[s.isfinite()].mean()):.3g}" for name, s in scores.items())
    entropies = {name: run.entropy for name, run in runs.items()}
    caption = (
        "<strong>Along depth</strong>, the mean over tokens, each of them faint. Line-shape score of the whole path, "
        f"mean over tokens: {means}; 1 is a straight line, and steps in random directions give about "
        f"√{first.trace.n_layers} = {first.trace.n_layers**0.5:.3g}."
    )
    drawn = plots.plot_trajectory_metrics({name: run.trace for name, run in runs.items()})
    parts.append(figure(drawn, "Measures of the paths against depth", caption))

    str_tokens = first.trace.str_tokens
    measures = {"line-shape score": line_shape_score, "expodistance": expodistance, "equidistance": equidistance}
    values = {
        what: torch.stack([measure(run.trace.residual) for run in runs.values()]) for what, measure in measures.items()
    }
    shown = (show_layers_by_token(str_tokens, {what: rows}, layers=list(runs)).body for what, rows in values.items())
    caption = (
        "<strong>Token by token.</strong> Low is regular: a straight path (line-shape score 1), exponential growth of "
        "the norm (expodistance 0), equal steps (equidistance 0)."
    )
    parts.append(view("".join(shown), "Tokens coloured by measures of their paths", caption))
    names = [f"{position} {visible_token(token)}" for position, token in enumerate(str_tokens)]
    numbers = torch.cat(list(values.values())).T.tolist()
    cells = [[name, *(f"{value:.3g}" for value in row)] for name, row in zip(names, numbers, strict=True)]
    headings = ["token", *(f"{what}, {name}" for what in values for name in runs)]
    parts.append(f"<details><summary>The same as numbers</summary>{table(headings, cells)}</details>")

    ends = "; ".join(
        f"{html.escape(name)}: {float(entropy[0, first.position]):.2f} nats at depth 0, "
        f"{float(entropy[-1, first.position]):.2f} at depth {len(entropy) - 1}"
        for name, entropy in entropies.items()
    )
    caption = (
        "<strong>How certain the next token is</strong>, read off every depth (0: what enters the first block) by "
        f"final norm and unembedding. White is certain. At {_token(first, first.position)}, {ends}."
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
    values = result.coupling(k).nan_to_num(-1).fill_diagonal_(-1)
    if len(values) < 2:
        return ""
    row, col = divmod(int(values.argmax()), values.shape[1])
    return (
        f"The strongest pair is J₁ of layer {result.row_layers[row]} with the vectors of layer "
        f"{result.col_layers[col]}: {float(values[row, col]):.3f}."
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
