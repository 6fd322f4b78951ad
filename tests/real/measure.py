"""One trained model: its Jacobians, its depth coupling and its untrained twin's, and
what HuggingFace says of them.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import einops
import torch
from jaxtyping import Float
from torch import Tensor, nn

import tl_coupling as tlc
from benchmarks import released_algorithm as released
from benchmarks.depth_coupling import Maps, released_measures
from benchmarks.timing import resident
from real.contents import tensors_not_in_model
from real.oracle import Exact, ExactOracle, in_float64
from real.prompts import PROMPTS, shortened
from real.registry import RealModel
from real.weights import checked_file, unpacked_folder
from tl_coupling.files import write_atomically
from tl_coupling.models import EMBEDDED_MODEL, embedded_folder
from tl_coupling.models.loaded import version
from tl_coupling.pictures.maps import color_scale

# Of a J measured in float32, relative to what float64 gives: random products of it, by
# autograd and by differences.
JACOBIAN_TOLERANCE = 1e-5
# Where float32 cannot give that, as where SmolLM2 writes its massive first token (layer
# 12: 1.1e-5 by HuggingFace's own autograd), at most so many times the error of
# HuggingFace's own float32 autograd at that very point.
ROUNDING_MARGIN = 2.0
# Of every measure that the released algorithm reports, all of them between 0 and about
# 1 in these models, but "m".
RELEASED_TOLERANCE = 1e-4
N_PROBES = 2


@dataclass(frozen=True)
class Measured:
    """One J as tl_coupling gave it: the way that was taken, and the products that are
    compared.
    """

    layer: int
    position: int
    way: str
    products: Float[Tensor, "n_probes d_model"]
    image: Float[Tensor, " d_model"]


@dataclass
class Outcome:
    """What became of one model; JSON-able."""

    name: str
    licence: str
    source: str
    # Of the file that was measured.
    sha256: str = ""
    # The day, in UTC; the others from the provenance, as a user's own results name them.
    measured_on: str = ""
    weights_digest: str = ""
    device: str = ""
    dtype: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    n_layers: int = 0
    d_model: int = 0
    prompt_lengths: list[int] = field(default_factory=list)
    n_jacobians: int = 0
    ways: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # Of a GGUF file: how many of its tensors are in HuggingFace's model.
    n_tensors: int = 0
    # The largest relative errors, and of the released algorithm the largest difference
    # by k.
    autograd_error: float = 0.0
    difference_error: float = 0.0
    # Where either is above the tolerance: how many, and HuggingFace's own largest error
    # there, in float32.
    n_beyond_float32: int = 0
    float32_error: float = 0.0
    released_difference: dict[str, float] = field(default_factory=dict)
    # By k: the mean over pairs and prompts, and the smallest and largest prompt.
    coupling: dict[str, list[float]] = field(default_factory=dict)
    untrained: dict[str, list[float]] = field(default_factory=dict)
    null: dict[str, float] = field(default_factory=dict)
    # Where blocks normalise after adding: by function and by whether it was trained,
    # the mean coupling by k.
    by_function: dict[str, dict[str, float]] = field(default_factory=dict)
    # Smallest and largest norm of a row of the stream that enters a block.
    stream: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: float = 0.0


def measure(model: RealModel, cache: Path, figures: Path | None = None) -> Outcome:
    """Everything about one model.

    Raises:
        WeightsError, ModelError: its weights cannot be had or loaded.
    """
    outcome = Outcome(model.name, model.licence, model.source, model.sha256)
    clock = Clock(outcome.seconds)
    source = _source(model, cache)
    clock.stop("fetch")
    bridge = tlc.load_model(source, device="cpu")
    clock.stop("load")
    prompts = [
        shortened(text, n_tokens, bridge.tokenizer) for n_tokens, text in PROMPTS
    ]
    traces = [tlc.trace(bridge, prompt) for prompt in prompts]
    outcome.n_layers = traces[0].n_layers
    outcome.d_model = traces[0].d_model
    outcome.prompt_lengths = [trace.n_pos for trace in traces]
    outcome.stream = _stream_of(traces)
    describe_run(traces[0].provenance, outcome)
    measured = [list(measured_jacobians(trace, outcome)) for trace in traces]
    clock.stop("jacobians")
    trained = _coupling_of(traces, "trained", outcome)
    ours = _released_by_us(bridge, prompts[0], model, outcome)
    if model.post_norm:
        outcome.by_function |= _coupling_by_function(traces[0], "trained")
    clock.stop("coupling")
    residuals = [trace.residual[:-1].clone() for trace in traces]
    tokens = [trace.tokens.tolist() for trace in traces]
    del bridge, traces
    twin = tlc.load_model(source, device="cpu", untrained=True)
    twin_traces = [tlc.trace(twin, prompt) for prompt in prompts]
    untrained = _coupling_of(twin_traces, "untrained", outcome)
    if model.post_norm:
        outcome.by_function |= _coupling_by_function(twin_traces[0], "untrained")
    del twin, twin_traces
    clock.stop("untrained twin")
    # What a user needs; what follows is the comparison.
    outcome.peak_gib = resident(peak=True) / 2**10
    for maps, summary in ((trained, outcome.coupling), (untrained, outcome.untrained)):
        summary |= _summary(maps)
    outcome.null = {
        str(k): result.null(k) for result in trained[:1] for k in released.KS
    }
    if figures and trained and untrained:
        _draw(
            tlc.comparisons.MeanCouplingMap.over(trained),
            tlc.comparisons.MeanCouplingMap.over(untrained),
            figures / f"{model.name}.png",
        )
    original = _huggingface(source)
    path = checked_file(model, cache)
    if not model.is_archive:
        outcome.n_tensors, sentences = tensors_not_in_model(path, original)
        outcome.wrong += sentences
    clock.stop("tensors of the file")
    compare_with_released(ours, released_by_huggingface(original, tokens[0]), outcome)
    clock.stop("released algorithm")
    exact = in_float64(copy.deepcopy(original), model.blocks)
    for n, (ids, residual) in enumerate(zip(tokens, residuals, strict=True)):
        inputs = {"input_ids": torch.tensor([ids])} | (
            {} if model.post_norm else {"use_cache": False}
        )
        oracle = ExactOracle(exact, original, model.blocks, inputs, residual)
        compare_with_exact(measured[n], oracle, f"{len(ids)} tokens", outcome)
    clock.stop("float64")
    return outcome


def describe_run(provenance: Mapping[str, Any], outcome: Outcome) -> None:
    """Put down what was measured where, and when."""
    outcome.measured_on = datetime.now(timezone.utc).date().isoformat()
    outcome.weights_digest = provenance["weights_digest"]
    outcome.device = provenance["device"]
    outcome.dtype = provenance["dtype"]
    # The GGUF reader's too, which results do not name.
    outcome.versions = {**provenance["versions"], "gguf": version("gguf")}


def measured_jacobians(
    trace: tlc.Trace, outcome: Outcome, layers: Sequence[int] | None = None
) -> Iterator[Measured]:
    """J of each layer at the first, middle and last token; what is refused is put down
    in words.
    """
    for layer in range(trace.n_layers) if layers is None else layers:
        for position in sorted({0, trace.n_pos // 2, trace.n_pos - 1}):
            outcome.n_jacobians += 1
            try:
                J, way = trace.blocks[layer].jacobian(position, position)
            except ValueError as error:
                outcome.refused.append(
                    f"layer {layer}, token {position} of {trace.n_pos}: {error}"
                )
                continue
            outcome.ways[way] = outcome.ways.get(way, 0) + 1
            u, v = probes(layer, position, trace.d_model)
            J = J.double()
            yield Measured(layer, position, way, u @ J, J @ v)


def probes(
    layer: int, position: int, d_model: int
) -> tuple[Float[Tensor, "n_probes d_model"], Float[Tensor, " d_model"]]:
    """Random directions, the same wherever they are asked for: those read off, and the
    one that the token is moved in.

    `E‖u E‖² = ‖E‖²`, so the norm of a few random products is an estimate of a matrix's.
    """
    generator = torch.Generator().manual_seed(1000 * layer + position)
    u, v = torch.randn(
        N_PROBES + 1, d_model, generator=generator, dtype=torch.float64
    ).split([N_PROBES, 1])
    return u, v[0]


def compare_with_exact(
    measured: Sequence[Measured], oracle: ExactOracle, prompt: str, outcome: Outcome
) -> None:
    """Every measured J of one prompt against float64; what is off is put down in
    words.
    """
    steps = oracle.steps(sorted({J.layer for J in measured}))
    for position in sorted({J.position for J in measured}):
        here = {J.layer: J for J in measured if J.position == position}
        directions = {
            layer: probes(layer, position, len(J.image)) for layer, J in here.items()
        }
        left = {layer: u for layer, (u, _) in directions.items()}
        right = {layer: v for layer, (_, v) in directions.items()}
        for layer, exact in oracle.at(position, left, right, steps).items():
            judge(here[layer], exact, oracle, prompt, outcome)


def judge(
    J: Measured, exact: Exact, oracle: ExactOracle, prompt: str, outcome: Outcome
) -> None:
    """One measured J against what float64 says of it."""
    _, v = probes(J.layer, J.position, len(J.image))
    # E‖uJ‖² = ‖J‖², and E‖Jv‖² = ‖J‖² ‖v‖² / d: of a J of nearly one direction, as at a
    # massive token, one image alone may be far smaller than that.
    norm = float(exact.products.norm()) / math.sqrt(len(exact.products))
    typical_image = norm * float(v.norm()) / math.sqrt(len(v))
    errors = {
        "autograd": relative_error(J.products, exact.products),
        "a finite difference": relative_error(J.image, exact.image, typical_image),
    }
    outcome.autograd_error = max(outcome.autograd_error, errors["autograd"])
    outcome.difference_error = max(
        outcome.difference_error, errors["a finite difference"]
    )
    if all(error <= JACOBIAN_TOLERANCE for error in errors.values()):
        return
    left, _ = probes(J.layer, J.position, len(J.image))
    in_float32 = oracle.products_in_float32(J.layer, J.position, left)
    rounding = relative_error(in_float32, exact.products)
    outcome.n_beyond_float32 += 1
    outcome.float32_error = max(outcome.float32_error, rounding)
    tolerance = max(JACOBIAN_TOLERANCE, ROUNDING_MARGIN * rounding)
    for name, error in errors.items():
        if not error <= tolerance:
            where = f"layer {J.layer}, token {J.position} of {prompt}, {J.way}"
            remark = f"HuggingFace's own in float32: {rounding:.1e}"
            outcome.wrong.append(
                f"{where}: off by {error:.1e} from {name} in float64 ({remark})"
            )


def relative_error(got: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """`‖got − expected‖ / ‖expected‖`, or over `least` if that is more; infinite if
    that is no number.
    """
    difference = float((got - expected).norm())
    size = max(float(expected.norm()), least)
    error = difference / size if size > 0 else math.inf
    return error if math.isfinite(error) else math.inf


def released_by_huggingface(original: nn.Module, tokens: Sequence[int]) -> Maps:
    """Return what the released algorithm reports of a prompt, on HuggingFace's model in
    float32.
    """
    states = list(released.hidden_states(original, tokens))
    Js = released.jacobians(states)
    return released.couplings(Js, released.decompositions(Js))


def compare_with_released(ours: Maps | None, theirs: Maps, outcome: Outcome) -> None:
    """All measures at each k; a difference is relative to the measure's largest value
    where that is above 1.
    """
    for k, by_measure in theirs.items() if ours else ():
        largest = 0.0
        for name, expected in by_measure.items():
            scale = max(1.0, float(expected.abs().max()))
            difference = float((ours[k][name] - expected).abs().max()) / scale
            difference = difference if math.isfinite(difference) else math.inf
            largest = max(largest, difference)
            if not difference <= RELEASED_TOLERANCE:
                outcome.wrong.append(
                    f"{name} at k = {k}: off by {difference:.1e} from the released algorithm"
                )
        outcome.released_difference[str(k)] = largest


def _released_by_us(
    bridge: nn.Module, prompt: str, model: RealModel, outcome: Outcome
) -> Maps | None:
    """Return the measures of the released algorithm, from public calls; None if a layer
    is refused.

    The released algorithm takes any block for X + f(X). Of a block that normalises
    after adding, that is another Jacobian than the one that `depth_coupling` compares.
    """
    k = max(released.KS)
    try:
        trace = tlc.trace(bridge, prompt, final_norm=not model.post_norm)
        if model.post_norm:
            J = tlc.block_jacobians(trace, progress=False)
            ujv, vju = (
                tlc.comparisons.jacobian_coupling(J, k, orientation)
                for orientation in ("ujv", "vju")
            )
        else:
            both = tlc.comparisons.depth_coupling_by_orientation(
                trace, k=k, orientations=("ujv", "vju"), progress=False
            )
            ujv, vju = both["ujv"], both["vju"]
    except ValueError as error:
        outcome.refused.append(f"depth map beside the released algorithm: {error}")
        return None
    return released_measures(ujv, vju)


def _coupling_of(
    traces: Sequence[tlc.Trace], which: str, outcome: Outcome
) -> list[tlc.CouplingMap]:
    """Return the depth map of each prompt's last token."""
    maps = []
    for trace in traces:
        try:
            maps.append(tlc.depth_coupling(trace, k=max(released.KS), progress=False))
        except ValueError as error:
            outcome.refused.append(f"depth map, {which}, {trace.n_pos} tokens: {error}")
    return maps


def _coupling_by_function(trace: tlc.Trace, which: str) -> dict[str, dict[str, float]]:
    """Return what coupling would be of other functions of a block that normalises after
    adding, at the last token.
    """
    of_block = tlc.block_jacobians(trace, progress=False)
    of_branches = tlc.block_jacobians(trace, progress=False, function="branches")
    multiples = einops.einsum(of_branches, "layer d d -> layer") / trace.d_model
    identity = torch.eye(trace.d_model)
    functions = {
        "block(X) − X": of_block,
        "the whole block": of_block + identity,
        "its branches": of_branches,
        "its branches, less the best multiple of I": of_branches
        - multiples[:, None, None] * identity,
    }
    couplings = {}
    for name, J in functions.items():
        result = tlc.comparisons.jacobian_coupling(J, max(released.KS))
        couplings[f"{name}, {which}"] = {str(k): result.mean(k) for k in released.KS}
    return couplings


def _summary(maps: Sequence[tlc.CouplingMap]) -> dict[str, list[float]]:
    """By k: the mean over prompts, the smallest and the largest."""
    summary = {}
    for k in released.KS if maps else ():
        means = [result.mean(k) for result in maps]
        summary[str(k)] = [sum(means) / len(means), min(means), max(means)]
    return summary


def _stream_of(traces: Sequence[tlc.Trace]) -> list[float]:
    """Return the largest norm of a token's row that enters the first block, and that
    enters any.
    """
    first = max(float(trace.residual[0].norm(dim=-1).max()) for trace in traces)
    largest = max(float(trace.residual[:-1].norm(dim=-1).max()) for trace in traces)
    return [first, largest]


def _source(model: RealModel, cache: Path) -> str:
    """Return what `load_model` is given."""
    path = checked_file(model, cache)
    if model.load_as is not None:
        return model.load_as
    return str(unpacked_folder(path) if model.is_archive else path)


def _huggingface(source: str) -> nn.Module:
    """HuggingFace's own model without its head, from the same file and by HuggingFace's
    own loader, in float32.
    """
    from transformers import AutoModel

    given: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if source.endswith(".gguf"):
        path = Path(source)
        model = AutoModel.from_pretrained(path.parent, gguf_file=path.name, **given)
    else:
        folder = embedded_folder() if source == EMBEDDED_MODEL else source
        model = AutoModel.from_pretrained(folder, **given)
    return model.eval().requires_grad_(False)


def _draw(trained: tlc.CouplingMap, untrained: tlc.CouplingMap, path: Path) -> None:
    """Both depth maps side by side, on one scale."""
    from matplotlib import pyplot

    k = 10
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.4), layout="compressed")
    low, high = color_scale([trained, untrained], k, "coupling")
    for ax, result, title in zip(
        axes, (trained, untrained), ("trained", "untrained"), strict=True
    ):
        tlc.plot_coupling(result, k=k, ax=ax, vmin=low, vmax=high)
        ax.set_title(
            f"{path.stem}, {title}: mean {result.mean(k):.3f}, null {result.null(k):.3f}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, figure.savefig)
    pyplot.close(figure)


class Clock:
    """Seconds of processor time between one stop and the next, put into a dictionary by
    name: the same, whatever else the machine does.
    """

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.last = time.process_time()

    def stop(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self.last
        self.last = now
