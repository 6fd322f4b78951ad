"""Does coupling explain a lens to later tokens? `lens_products.py`, between all tokens.

    python demos/studies/lens_products_later.py
    python demos/studies/lens_products_later.py --table  # only prints

A block is the matrix that maps the streams of several tokens to one another, `B = I + J`,
and is never built: random gradients are pulled back through it, and the mean of their
squares is the square of a Frobenius norm. Every control's gradients go through a block
of a text together. `lens_products.md` says, under what was added afterwards, what is
compared and what each outcome means; it was committed before this was run.

The results are one file for each model, in `demos/studies/results/lens_products/later`;
what is there is not run again. About ten minutes of one core; `SMALL=1`: seconds, of
three texts and four blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm import tqdm

import lens_products as study
import tl_coupling as tlc
from lens_products import IS_SMALL, N_DRAWS, OTHER_PROMPTS, OWN, TURNED, K
from paths import distinct_texts
from tl_coupling.blocks import pull_back_span
from tl_coupling.measures import mean_random_coupling, random_rotations

N_TOKENS = 10
# The first token is left out, and the last, as lenses leave it out.
FIRST = 1
N_PROBES = 4 if IS_SMALL else 32
LAYERS = 4 if IS_SMALL else None
RESULTS = study.RESULTS / "later"
# Gradients of the tokens' streams, and of each prompt.
Gradients = Float[Tensor, "n n_tokens d"]
PromptGradients = Float[Tensor, "n_prompts n n_tokens d"]
# Of a layer, a prompt and gradients of what leaves its block: those of what enters.
PullBack = Callable[[int, int, Gradients], Gradients]
Row = dict[str, float | str]


@dataclass
class Course:
    """Gradients on their way from the last block down, in one draw of a control.

    Attributes:
        orders: the prompt whose block each product takes, at each layer.
        rotations: behind each block but the last, or None.
        products: of each product of blocks.
        of_means: of the product of mean blocks.
        departures: what left the block above, less its mean; none above the last.
    """

    control: str
    draw: int
    orders: Int[Tensor, "n_layers n_prompts"]
    rotations: Float[Tensor, "n_pairs d d"] | None
    products: PromptGradients
    of_means: Gradients
    departures: PromptGradients | None = None

    def slot(self, layer: int, prompt: int) -> int:
        """Return which product takes the block of a prompt."""
        return self.orders[layer].tolist().index(prompt)

    def groups(self, layer: int, prompt: int) -> list[Gradients]:
        """Return the gradients that go through a block of a prompt."""
        slot = self.slot(layer, prompt)
        groups = [self.products[slot], self.of_means]
        if self.departures is not None:
            groups.append(self.departures[slot])
        return groups

    def defect(self) -> float:
        """Return that of the lens: sums over tokens that are acted on, a mean over others."""
        lens = self.products.mean(0).mean(1)
        difference = lens - self.of_means.mean(1)
        return float(difference.norm() / lens.norm())

    def enter(self, layer: int, departures: PromptGradients) -> None:
        """Turn what enters a block into what leaves the one before."""
        self.departures = departures[self.orders[layer]]
        if self.rotations is not None and layer > 0:
            rotation = self.rotations[layer - 1]
            self.products = self.products @ rotation
            self.of_means = self.of_means @ rotation
            self.departures = self.departures @ rotation


def courses_of(
    n_layers: int, products: PromptGradients, n_draws: int
) -> Iterator[Course]:
    """Yield the courses of the blocks themselves and of each draw of the controls."""
    n_prompts, d = len(products), products.shape[-1]
    own_order = torch.arange(n_prompts).repeat(n_layers, 1)
    yield Course(OWN, 0, own_order, None, products.clone(), products[0].clone())
    for draw in range(n_draws):
        generator = torch.Generator().manual_seed(draw)
        orders = torch.stack(
            [torch.randperm(n_prompts, generator=generator) for _ in range(n_layers)]
        )
        rotations = random_rotations(n_layers - 1, d, generator=generator).to(products)
        of_means = products[0].clone()
        yield Course(OTHER_PROMPTS, draw, orders, None, products.clone(), of_means)
        of_means = products[0].clone()
        yield Course(TURNED, draw, own_order, rotations, products.clone(), of_means)


def rows_of(
    pull_back: PullBack, shape: Sequence[int], n_probes: int, n_draws: int
) -> list[Row]:
    """Return both measures of the blocks and of every draw of the controls.

    Args:
        pull_back: through the block of a layer and prompt.
        shape: numbers of layers, prompts, tokens, and the width of the stream.
        n_probes: random gradients.
        n_draws: of each control.
    """
    n_layers, n_prompts, n_tokens, d = shape
    generator = torch.Generator().manual_seed(0)
    # Effects on all tokens are summed: each begins with the same gradient.
    outputs = torch.randn(n_probes, 1, d, generator=generator)
    products = outputs.repeat(n_prompts, 1, n_tokens, 1)
    courses = list(courses_of(n_layers, products, n_draws))
    rows: list[Row] = []
    size_above = 0.0
    for layer in tqdm(reversed(range(n_layers)), total=n_layers, desc="blocks"):
        probes = torch.randn(n_probes, n_tokens, d, generator=generator)
        probed = probes.new_empty(n_prompts, *probes.shape)
        means = torch.zeros_like(probes).repeat(len(courses), 1, 1, 1)
        together = torch.zeros_like(means)
        for prompt in range(n_prompts):
            groups = [course.groups(layer, prompt) for course in courses]
            entering = torch.cat(
                [probes, *(part for group in groups for part in group)]
            )
            pulled = iter(pull_back(layer, prompt, entering).split(n_probes))
            probed[prompt] = next(pulled)
            for index, course in enumerate(courses):
                course.products[course.slot(layer, prompt)] = next(pulled)
                means[index] += next(pulled) / n_prompts
                if course.departures is not None:
                    together[index] += next(pulled) / n_prompts
        departures = probed - probed.mean(0)
        size = float(departures.square().sum() / (n_prompts * n_probes))
        for course, mean, of_pair in zip(courses, means, together, strict=True):
            course.of_means = mean
            values = {"defect": course.defect()}
            if course.departures is not None:
                of_pair_size = float(of_pair.norm()) / n_probes**0.5
                values["covariation"] = of_pair_size / (size * size_above) ** 0.5
            rows += [
                {
                    "measure": measure,
                    "control": course.control,
                    "draw": course.draw,
                    "layer": layer,
                    "value": value,
                }
                for measure, value in values.items()
            ]
            course.enter(layer, departures)
        size_above = size
    return rows


def mean_coupling(traces: Sequence[tlc.Trace], position: int) -> Float[Tensor, " n"]:
    """Return the mean coupling of neighbours at a token, above chance."""
    couplings = []
    for trace in tqdm(traces, desc="coupling"):
        J = tlc.block_jacobians(
            trace, range(trace.n_layers)[:LAYERS], position=position, progress=False
        )
        coupling = tlc.comparisons.jacobian_coupling(J, K).coupling()
        couplings.append(coupling.diagonal(1) - mean_random_coupling(K))
    return torch.stack(couplings).mean(0)


def measured(name: str, n_texts: int) -> pandas.DataFrame:
    """Measure a model on so many texts."""
    model: nn.Module = tlc.load_model(name)
    traces = [
        tlc.trace(model, model.to_tokens(text)[:, :N_TOKENS])
        for text in distinct_texts(n_texts)
    ]
    last = N_TOKENS - 2
    coupling = mean_coupling(traces, last)
    tables = []
    for tokens, start in (("same", last), ("later", FIRST)):

        def pull_back(
            layer: int, prompt: int, gradients: Gradients, start: int = start
        ) -> Gradients:
            pull_back_span(traces[prompt].blocks[layer], gradients, start)
            return gradients

        n_layers = LAYERS or traces[0].n_layers
        shape = (n_layers, len(traces), last + 1 - start, traces[0].d_model)
        rows = rows_of(pull_back, shape, N_PROBES, N_DRAWS)
        rows += [
            {
                "measure": "coupling",
                "control": OWN,
                "draw": 0,
                "layer": layer,
                "value": value,
            }
            for layer, value in enumerate(coupling.tolist())
        ]
        table = pandas.DataFrame(rows)
        tables.append(table.assign(n_prompts=len(traces), tokens=tokens))
    return pandas.concat(tables)


def report(name: str, table: pandas.DataFrame) -> str:
    """Return what the results of a model say, at the same token and at later ones."""
    lines = []
    excess = {}
    for tokens, of_tokens in table.groupby("tokens", sort=False):
        lines.append(study.report(f"{name}, {tokens} token", of_tokens))
        first = study.by_control(of_tokens, "defect").iloc[0]
        excess[tokens] = first[OWN] - first[OTHER_PROMPTS]
    shown = ", ".join(f"{tokens} {value:+.3f}" for tokens, value in excess.items())
    lines.append(f"defect from the first block on, less that of other prompts: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    study.main(__doc__, RESULTS, Path("out/lens_products/later"), measured, report)
