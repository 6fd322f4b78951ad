"""What the benchmarks answer: each question, the answer in a sentence, and the command of
each file of results.

Numbers in an answer are read from the results, so that they are those of its tables.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The contents of a file, by its name.
Results = Mapping[str, dict[str, Any]]
OUT = "--out benchmarks/results"


class Question(NamedTuple):
    """A question, and where its answer is from.

    Attributes:
        text: the question.
        answer: its answer, from all results.
        commands: of each file of results by its name, the first of which the answer is
            read from.
    """

    text: str
    answer: Callable[[Results], str]
    commands: dict[str, str]


def _cost_of_depth_coupling(results: Results) -> str:
    runs = results["expected"]["runs"]
    first = min(runs, key=lambda run: run["seconds"])
    last = max(runs, key=lambda run: run["seconds"])
    return (
        f"One prompt of {results['expected']['n_pos']} tokens takes "
        f"{first['seconds']:.1f} s with {first['model']} and {last['seconds']:.1f} s with "
        f"{last['model']}, {last['peak_mib'] / 2**10:.1f} GiB at the peak."
    )


def _beside_the_released_algorithm(results: Results) -> str:
    ratios = []
    differences = []
    for run in results["depth_coupling"]["runs"]:
        if "released" in run:
            theirs = run["released"]["seconds"]["end to end"]
            ours = run["ours"]["seconds"]["end to end"]
            ratios.append(f"{theirs / ours:.1f} × at {run['shapes']['n_pos']} tokens")
            differences.append(run["largest_difference"])
    return (
        f"It is faster end to end, by {' and '.join(ratios)}, and no measure differs by "
        f"more than {max(differences):.0e}."
    )


def _cost_of_a_jacobian(results: Results) -> str:
    runs = results["jacobians"]["runs"]
    over_bare = [run["jacobians_over_bare"] for run in runs]
    widest = max(runs, key=lambda run: run["shapes"]["d_model"])
    return (
        f"{min(over_bare):.1f} to {max(over_bare):.1f} times the matrix products that no "
        "way can do without; least for wide blocks, of which one of width "
        f"{widest['shapes']['d_model']} takes {widest['seconds']['jacobians']:.1f} s."
    )


def _cost_of_singular_vectors(results: Results) -> str:
    gains = []
    for run in results["truncated_svd"]["runs"]:
        ways = run["ways"]
        gain = ways["full SVD"]["seconds"] / ways["tlc.svd"]["seconds"]
        gains.append((gain, run["shape"][-1]))
    least, _ = min(gains)
    most, width = max(gains)
    return (
        f"The top of a spectrum comes {least:.1f} to {most:.1f} times as fast as by a "
        f"full SVD, most at width {width}."
    )


def _large_models(results: Results) -> str:
    largest = max(results["large_shapes"]["runs"], key=lambda run: run["d_model"])
    shape = largest["shape"]
    texts = []
    for name in ("large_shapes", "gpu"):
        figures = results.get(name, {"runs": []})
        for run in figures["runs"]:
            if run["shape"] == shape:
                stages = ("gate", "jacobian", "svd")
                seconds = sum(run["seconds"][stage] for stage in stages)
                device = figures["environment"]["device_name"]
                texts.append(f"{seconds:.3g} s on {device}")
    return f"A block of {shape} takes {' and '.join(texts)}."


def _weights_on_disk(results: Results) -> str:
    figures = results["streaming_1b"]
    run = figures["runs"][0]
    share = run["peak_above_interpreter_mib"] * 2**20 / figures["weights_bytes"]
    return (
        f"A model is read from disk block by block: one of 16 layers of width 2048 takes "
        f"{share:.0%} of its weights as memory, and {run['seconds']['all']:.0f} s."
    )


def _other_measurements(results: Results) -> str:
    seconds = results["beside_coupling"]["seconds"]
    ratios = {
        name: value / seconds["depth_coupling"]
        for name, value in seconds.items()
        if name != "depth_coupling"
    }
    least = min(ratios, key=ratios.__getitem__)
    most = max(ratios, key=ratios.__getitem__)
    return (
        f"From {ratios[least]:.1f} times a depth coupling (`{least}`) to "
        f"{ratios[most]:.1f} times (`{most}`)."
    )


def _trust_in_intervals(results: Results) -> str:
    return (
        "On synthetic studies whose truth is known, the share of intervals that hold it "
        "stands in each table beside the share that is wanted."
    )


QUESTIONS = (
    Question(
        "What does a depth coupling cost?",
        _cost_of_depth_coupling,
        {
            "expected": f"python -m benchmarks.expected {OUT}",
            "expected_1024": "python -m benchmarks.expected --tokens 1024 "
            f"--models gpt2 {OUT}",
            "floor": f"python -m benchmarks.floor --against 5c3ec58 {OUT}",
        },
    ),
    Question(
        "How does it compare with the released algorithm?",
        _beside_the_released_algorithm,
        {"depth_coupling": f"python -m benchmarks.depth_coupling {OUT}"},
    ),
    Question(
        "What does a Jacobian cost?",
        _cost_of_a_jacobian,
        {"jacobians": f"python -m benchmarks.jacobians {OUT}"},
    ),
    Question(
        "What do singular values and vectors cost?",
        _cost_of_singular_vectors,
        {
            "truncated_svd": "OMP_NUM_THREADS=1 python -m benchmarks.truncated_svd "
            f"--d 576 1024 2048 4096 {OUT}",
            "largest": "python -m benchmarks.largest --model "
            f"qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --tokens 10 {OUT}",
        },
    ),
    Question(
        "What does a large model take, on a CPU and on a GPU?",
        _large_models,
        {
            "large_shapes": "python -m benchmarks.gpu --device cpu --shapes llama-3-8b "
            f"qwen3-32b llama-3-70b mixtral-8x7b {OUT}",
            "gpu": f"python -m benchmarks.gpu {OUT}",
        },
    ),
    Question(
        "What if the weights don't fit into memory?",
        _weights_on_disk,
        {
            "streaming_1b": f"python -m benchmarks.streaming --shape 1b --accelerate {OUT}",
            "streaming_small": "python -m benchmarks.streaming --shape small --compare "
            f"--accelerate {OUT}",
        },
    ),
    Question(
        "What does everything else cost?",
        _other_measurements,
        {
            "beside_coupling": f"python -m benchmarks.beside_coupling {OUT}",
            "lens": f"python -m benchmarks.lens {OUT}",
            "training": f"python -m benchmarks.training {OUT}",
        },
    ),
    Question(
        "Can intervals and p be trusted?",
        _trust_in_intervals,
        {"statistics": f"python -m benchmarks.statistics {OUT}"},
    ),
)
