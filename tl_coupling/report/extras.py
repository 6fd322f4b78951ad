"""Make the sections that a page has only where they were asked for: what carries
coupling, what the blocks do together, and the tokens of a block's directions.
"""

import html
from collections.abc import Iterator, Mapping

from tl_coupling import plots
from tl_coupling.comparisons import Carriers, strongest_heads
from tl_coupling.directions import Decoded
from tl_coupling.dynamics import Products
from tl_coupling.interactive import visible_token
from tl_coupling.portraits import Portrait
from tl_coupling.report.parts import figure, grid, named_token, sentence, table

_N_TOKENS = 8
_N_HEADS = 5
_N_COMPONENTS = 4
# The signs of a direction's two ends.
_ENDS = "+−"


def extra_sections(runs: Mapping[str, Portrait]) -> dict[str, str]:
    """Return the sections that there are, and the links to them."""
    # All runs have the same parts: `html_report` has checked it.
    first = next(iter(runs.values()))
    sections = {}
    if first.carriers is not None:
        shares = {name: run.carriers for name, run in runs.items() if run.carriers}
        sections["What carries coupling"] = _carriers(shares)
    if first.products is not None:
        products = {name: run.products for name, run in runs.items() if run.products}
        sections["Blocks together"] = _products(products)
    if first.decoded is not None:
        decoded = {name: run.decoded for name, run in runs.items() if run.decoded}
        sections["Directions"] = _directions(decoded, first)
    links = []
    written = []
    for title, body in sections.items():
        anchor = title.lower().replace(" ", "-")
        links.append(f'<a href="#{anchor}">{title}</a>\n')
        written.append(f'<section id="{anchor}"><h2>{title}</h2>\n{body}\n</section>\n')
    return {"extras": "".join(written), "extras_links": "".join(links)}


def _carriers(results: Mapping[str, Carriers]) -> str:
    # The main run comes first.
    trained, *twins = results.values()
    rows = []
    for name, result in results.items():
        merged = result.by_branch()
        shares = [
            merged.mean(share).tolist()
            for share in ("diagonal_share", "jacobian_share", "excess")
        ]
        for label, diagonal, jacobian_share, excess in zip(
            merged.labels, *shares, strict=True
        ):
            low, high = merged.null_interval(label)
            numbers = [f"{diagonal:.3f}", f"{jacobian_share:.3f}", f"{excess:+.3f}"]
            rows.append([f"{label}, {name}", *numbers, f"{low:+.3f} to {high:+.3f}"])
    headings = ["", "of coupling", "of J", "excess", "random"]
    heads = plots.plot_carriers(trained, untrained=twins[0] if twins else None)
    picture = heads.get_figure(root=True)
    assert picture is not None
    # The caption says what the titles would.
    picture.suptitle("")
    if not twins:
        heads.set_title("")
    names = " | ".join(map(html.escape, results))
    strongest = ""
    if names_of_heads := strongest_heads(trained, _N_HEADS):
        strongest = f"Most: {', '.join(names_of_heads)}."
    parts = [
        figure(
            picture,
            "Heat map of each head's excess by layer",
            f"<strong>Heads, {names}.</strong> Each head's share of coupling minus its share "
            f"of J: red carries more than its size, blue less. {strongest}",
        )
    ]
    parts += [
        figure(
            plots.plot_carriers_by_depth(result),
            f"Shares of attention and MLP by layer, {name}",
            f"<strong>By depth, {html.escape(name)}.</strong> Solid: share of coupling; "
            "dashed: share of J, which random subspaces would give.",
        )
        for name, result in results.items()
    ]
    return (
        "<p>The Jacobian of a block is the sum of those of its heads, its MLP, and the MLP "
        "acting on what attention adds. So is each matrix A: every component has a share of "
        f"its diagonal, here the mean over pairs of different layers at k = {trained.k}, "
        "beside its share of J. The excess is the first minus the second, with the 95 % of "
        f"random subspaces.</p>{table(headings, rows)}{grid(parts)}"
    )


def _products(results: Mapping[str, Products]) -> str:
    texts = []
    for name, result in results.items():
        # After the last block: the product of all.
        low, high = result.null_interval[-1].tolist()
        turned = float(result.null_participation_ratio[:, -1].mean())
        texts.append(
            f"{html.escape(name)}: log σ₁ is {float(result.log_largest[-1]):.2f} after "
            f"{len(result.layers)} blocks, where turned blocks have {low:.2f} to "
            f"{high:.2f}, and {float(result.participation_ratio[-1]):.1f} directions carry "
            f"the product, {turned:.1f} with turned blocks"
        )
    drawn = plots.plot_products(results)
    drawn.suptitle("")
    caption = f"<strong>Products of blocks.</strong> {sentence(texts)}"
    return (
        "<p>The product (I + J) … (I + J) of all blocks up to a layer says what they do to "
        "a small change together. If coupled blocks amplify the same directions, its "
        "largest singular value σ₁ exceeds that of the same blocks, each turned by a random "
        "rotation of its own (band: 95 % of their whole lines), and fewer directions carry "
        "the product (dashed: their mean).</p>"
        f"{figure(drawn, 'log σ₁ and participation ratio of products by layer', caption)}"
    )


def _directions(results: Mapping[str, Decoded], first: Portrait) -> str:
    decoded = next(iter(results.values()))
    # Through the rest of the network, as the text says, and not straight to the
    # unembedding.
    way = decoded.ways.index("network")
    kurtosis = [
        f"{html.escape(name)}: {float(result.kurtosis[way].mean()):.2f} on average, and "
        f"{float(result.control_kurtosis[0, way].nanmean()):.2f} for random directions"
        for name, result in results.items()
    ]
    cards = grid(_cards(decoded, way), " small")
    return (
        f"<p>What the top singular vectors of layer {decoded.layer} at "
        f"{named_token(first, decoded.position)} write and read. <em>Writes</em>: the "
        "tokens that the direction promotes most through the rest of the network. The sign "
        "of a direction is arbitrary, so both ends are given. <em>Reads</em>: the product "
        "of the direction that is read with what each component wrote.</p>"
        "<p>Any list of tokens can be given a meaning. The excess kurtosis of the logits says "
        "whether a direction promotes few tokens strongly. "
        f"{sentence(kurtosis)} Gains that differ by less than 1 % are one group: inside it "
        "any other directions of the same span would "
        f"do.</p>{cards}"
    )


def _cards(decoded: Decoded, way: int) -> Iterator[str]:
    """Write each direction: its tokens at both ends, and what it reads."""
    groups = decoded.groups.tolist()
    drawn = decoded.control_kurtosis[0, way]
    for i, gain in enumerate(decoded.gains.tolist()):
        kurtosis = float(decoded.kurtosis[way, i])
        exceeded = float((drawn >= kurtosis).double().mean())
        group_members = [
            str(j) for j, group in enumerate(groups) if group == groups[i] and j != i
        ]
        # Singular vectors of nearly equal gains are defined up to a rotation among
        # them.
        group = f"; one group with {', '.join(group_members)}" if group_members else ""
        facts = [
            (f"writes {_ENDS[end]}", _chips(decoded.texts_of(way, i, end)[:_N_TOKENS]))
            for end in (0, 1)
        ]
        facts.append(("reads", html.escape(_components(decoded, i))))
        listed = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts)
        yield (
            f'<div class="direction"><h3>Direction {i}</h3><p>σ = {gain:.2f}{group}; kurtosis '
            f"{kurtosis:.2f} ({exceeded:.0%} of random directions have as much)</p>"
            f"<dl>{listed}</dl></div>"
        )


def _chips(tokens: list[str]) -> str:
    # A token of spaces alone would be an empty chip.
    shown = (html.escape(visible_token(token).strip() or "␣") for token in tokens)
    return " ".join(f"<code>{token}</code>" for token in shown)


def _components(decoded: Decoded, direction: int) -> str:
    """Name the components that a read direction responds to most."""
    reads = decoded.reads[direction]
    largest = reads.abs().topk(min(_N_COMPONENTS, len(reads))).indices.tolist()
    return ", ".join(f"{decoded.components[i]} {float(reads[i]):+.2f}" for i in largest)
