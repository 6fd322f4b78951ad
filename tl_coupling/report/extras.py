"""Make the sections that a page has only where they were asked for: what carries
coupling, what the blocks do together, and the tokens of a block's directions.
"""

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from tl_coupling import pictures
from tl_coupling.comparisons import Carriers, strongest_heads
from tl_coupling.directions import Decoded
from tl_coupling.dynamics import Products
from tl_coupling.interactive import visible_token
from tl_coupling.portraits import Portrait
from tl_coupling.report.parts import (
    figure,
    grid,
    named_token,
    piece,
    sentence,
    table,
)
from tl_coupling.results import RANDOM_SUBSPACES

_N_TOKENS = 8
_N_HEADS = 5
_N_COMPONENTS = 4
# The signs of a direction's two ends.
_ENDS = "+−"


def extra_sections(runs: Mapping[str, Portrait]) -> dict[str, Markup]:
    """Return the sections that there are, by title."""
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
    return sections


def _carriers(results: Mapping[str, Carriers]) -> Markup:
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
    headings = ["", "of coupling", "of J", "excess", RANDOM_SUBSPACES]
    heads = pictures.plot_carriers(trained, untrained=twins[0] if twins else None)
    picture = heads.get_figure(root=True)
    assert picture is not None
    # The caption says what the titles would.
    picture.suptitle("")
    if not twins:
        heads.set_title("")
    names = " | ".join(results)
    strongest = ""
    if names_of_heads := strongest_heads(trained, _N_HEADS):
        strongest = f"Most: {', '.join(names_of_heads)}."
    parts = [
        figure(
            picture,
            "Heat map of each head's excess by layer",
            f"Heads, {names}.",
            " Each head's share of coupling minus its share of J: red carries more than "
            f"its size, blue less. {strongest}",
        )
    ]
    parts += [
        figure(
            pictures.plot_carriers_by_depth(result),
            f"Shares of attention and MLP by layer, {name}",
            f"By depth, {name}.",
            " Solid: share of coupling; dashed: share of J, which random subspaces would "
            "give.",
        )
        for name, result in results.items()
    ]
    shares_table = table(headings, rows)
    return piece("carriers", k=trained.k, numbers=shares_table, pictures=grid(parts))


def _products(results: Mapping[str, Products]) -> Markup:
    texts = []
    for name, result in results.items():
        # After the last block: the product of all.
        low, high = result.null_interval[-1].tolist()
        turned = float(result.null_participation_ratio[:, -1].mean())
        texts.append(
            f"{name}: log σ₁ is {float(result.log_largest[-1]):.2f} after "
            f"{len(result.layers)} blocks, where turned blocks have {low:.2f} to "
            f"{high:.2f}, and {float(result.participation_ratio[-1]):.1f} directions carry "
            f"the product, {turned:.1f} with turned blocks"
        )
    drawn = pictures.plot_products(results)
    drawn.suptitle("")
    alt = "log σ₁ and participation ratio of products by layer"
    # A space, as the caption goes on behind its first words.
    caption = Markup(" {}").format(sentence(texts))
    return piece("products", picture=figure(drawn, alt, "Products of blocks.", caption))


def _directions(results: Mapping[str, Decoded], first: Portrait) -> Markup:
    decoded = next(iter(results.values()))
    # Through the rest of the network, as the text says, and not straight to the
    # unembedding.
    way = decoded.ways.index("network")
    kurtosis = [
        f"{name}: {float(result.kurtosis[way].mean()):.2f} on average, and "
        f"{float(result.control_kurtosis[0, way].nanmean()):.2f} for random directions"
        for name, result in results.items()
    ]
    return piece(
        "directions",
        layer=decoded.layer,
        token=named_token(first, decoded.position),
        kurtosis=sentence(kurtosis),
        above_random=sentence(
            _above_random(name, result, way) for name, result in results.items()
        ),
        any_above=bool(decoded.above_control(way)),
        cards=grid(_cards(decoded, way), " small"),
    )


def _above_random(name: str, decoded: Decoded, way: int) -> str:
    """Say how many directions stand out from random ones, and how many would anyway."""
    n_directions = len(decoded.gains)
    n_draws = int(decoded.provenance["n_draws"])
    above = decoded.above_control(way)
    compared = f"a higher kurtosis than each of {n_draws} random directions"
    if not above:
        return (
            f"{name}: nothing is above random, none of {n_directions} directions has "
            f"{compared}"
        )
    verb = "has" if len(above) == 1 else "have"
    numbers = ", ".join(map(str, above))
    by_chance = n_directions / (n_draws + 1)
    return (
        f"{name}: {len(above)} of {n_directions} directions ({numbers}) {verb} "
        f"{compared}, where chance alone gives {by_chance:.1f}"
    )


def _cards(decoded: Decoded, way: int) -> Iterator[Markup]:
    """Write each direction: its tokens at both ends, and what it reads."""
    groups = decoded.groups.tolist()
    for i, gain in enumerate(decoded.gains.tolist()):
        kurtosis = float(decoded.kurtosis[way, i])
        exceeded = decoded.kurtosis_exceeded(way, i)
        group_members = [
            str(j) for j, group in enumerate(groups) if group == groups[i] and j != i
        ]
        # Singular vectors of nearly equal gains are defined up to a rotation among
        # them.
        tokens_at_ends = [
            _shown(decoded.texts_of(way, i, end)[:_N_TOKENS]) for end in (0, 1)
        ]
        yield piece(
            "direction",
            number=i,
            gain=f"{gain:.2f}",
            group=", ".join(group_members),
            kurtosis=f"{kurtosis:.2f}",
            exceeded=f"{exceeded:.0%}",
            ends=list(zip(_ENDS, tokens_at_ends, strict=True)),
            reads=_components(decoded, i),
        )


def _shown(tokens: list[str]) -> list[str]:
    # A token of spaces alone would be an empty chip.
    return [visible_token(token).strip() or "␣" for token in tokens]


def _components(decoded: Decoded, direction: int) -> str:
    """Name the components that a read direction responds to most."""
    reads = decoded.reads[direction]
    largest = reads.abs().topk(min(_N_COMPONENTS, len(reads))).indices.tolist()
    return ", ".join(f"{decoded.components[i]} {float(reads[i]):+.2f}" for i in largest)
