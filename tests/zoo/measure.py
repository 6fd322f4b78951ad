"""One architecture in one precision: built, traced, and every measured Jacobian checked
against the oracle.
"""

import copy
import math
import re
import tempfile
import traceback
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import tiny
import tl_coupling as tlc
from zoo.models import (
    AUDIO,
    HOOKED,
    NATIVE,
    PRETRAIN,
    SEQ2SEQ,
    VISION,
    bridge,
    hooked_transformer,
    original_model,
)
from zoo.oracle import Oracle, OracleError, to_float32

# TransformerLens reads a tokenizer once more from where it lies.
_FOLDER = tempfile.TemporaryDirectory(prefix="tl_coupling_zoo_tokenizer_")

N_LAYERS = 3
FIRST, MIDDLE, LAST = 0, 4, 7
# The last: a causal model's is zero, an encoder's is not.
PAIRS = [
    (FIRST, FIRST),
    (MIDDLE, MIDDLE),
    (LAST, LAST),
    (FIRST, LAST),
    (MIDDLE, LAST),
    (LAST, MIDDLE),
]
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
# The library's own gate. HuggingFace's norms, softmax and rotation compute in float32
# inside a float64 model.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-4, "float64": 1e-5}

# What a refusal of a model of another kind has to speak of.
_KINDS = ((AUDIO, "audio|sound|speech"), (SEQ2SEQ, "encoder|sequence-to-sequence"))


@dataclass
class Finding:
    """What became of one architecture in one precision."""

    verdict: str  # see page.VERDICTS
    error: float | None = None
    ways: list[str] = field(default_factory=list)
    sentence: str = ""


def measure(name: str, precision: str, own_modules: bool = False) -> Finding:
    """Build the architecture, measure it, and say what came of it: the HuggingFace model
    by its `own_modules`, or a bridge around it.
    """
    dtype = DTYPES[precision]
    inputs = _inputs(name, dtype)
    if name in HOOKED:
        original = hooked_transformer(name, N_LAYERS, dtype)
        model, path = original, "blocks"
        inputs = {"input": inputs["input_ids"]}
    else:
        original = original_model(name, N_LAYERS, dtype)
        model = bridge(
            original, None if name in VISION or name in AUDIO else _tokenizer()
        )
        path = (
            "blocks"
            if name == PRETRAIN
            else getattr(model.adapter.component_mapping.get("blocks"), "name", None)
        )
    try:
        if own_modules and name not in HOOKED:
            trace = tlc.trace(original, next(iter(inputs.values())))
        else:
            trace = tlc.trace(model, next(iter(inputs.values())))
        return _compare(trace, original, path, inputs, precision)
    except OracleError as error:
        return Finding("wrong", sentence=f"taken, but {error}")
    except Exception as error:
        finding = judge(name, error)
        if finding.verdict == "unclear" and not _runs(model, inputs):
            return Finding(
                "does not run", sentence=f"the model itself raises {finding.sentence}"
            )
        return finding


def _runs(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether the model's own forward pass succeeds, tl_coupling aside."""
    if hasattr(
        original := getattr(model, "original_model", None), "set_experts_implementation"
    ):
        original.set_experts_implementation("eager")
    try:
        with torch.no_grad():
            model(next(iter(inputs.values())), return_type=None)
    except Exception:
        return False
    return True


def judge(name: str, error: Exception) -> Finding:
    """Whether an error is a clear refusal: the library's own, of one line, no riddle,
    and naming what the model is.
    """
    text = str(error)
    of_the_library = type(error).__module__.startswith("tl_coupling")
    raised_at = traceback.extract_tb(error.__traceback__)[-1]
    raised_here = of_the_library or "/tl_coupling/" in raised_at.filename
    if not raised_here or not (
        of_the_library or isinstance(error, ValueError | TypeError)
    ):
        where = f"{Path(raised_at.filename).name}:{raised_at.lineno}"
        return Finding(
            "unclear",
            sentence=f"{type(error).__name__} at {where}: {' '.join(text.split())[:300]}",
        )
    if not text or "\n" in text:
        return Finding(
            "unclear", sentence=f"not one line: {' '.join(text.split())[:300]}"
        )
    if re.search(r"wanted .*?\b(\w+)\b.*, got \1\b", text):
        return Finding("unclear", sentence=f"contradicts itself: {text}")
    kind = next((kind for names, kind in _KINDS if name in names), "")
    if not re.search(kind, text, re.IGNORECASE):
        return Finding("unclear", sentence=f"does not say what the model is: {text}")
    return Finding("refused", sentence=text)


def _compare(
    trace: tlc.Trace, original: Any, path: str, inputs: dict[str, Any], precision: str
) -> Finding:
    """Return the trace's Jacobians against the original model's; against the bridge's
    own where that is another function.
    """
    residual = None
    if precision == "bfloat16":
        residual, original = trace.residual, to_float32(copy.deepcopy(original))
    finding = _against(trace, Oracle(original, path, inputs, residual), precision)
    if finding.verdict == "correct" or not hasattr(original, "config"):
        return finding
    model = trace.model if residual is None else to_float32(trace.model)
    own_inputs = {"input": next(iter(inputs.values())), "use_cache": False}
    with torch.no_grad():
        theirs, ours = original(**inputs).logits, model(**own_inputs)
    difference = float((ours - theirs).norm() / theirs.norm())
    if difference < 1e-3:
        return finding
    finding = _against(trace, Oracle(model, "blocks", own_inputs, residual), precision)
    remark = (
        f"TransformerLens' bridge is not the original model (its "
        f"logits are off by {difference:.0e})"
    )
    return replace(
        finding,
        sentence=f"{remark}: compared with autograd over the bridge. {finding.sentence}".strip(),
    )


def _against(trace: tlc.Trace, oracle: Oracle, precision: str) -> Finding:
    worst, at, ways = 0.0, "", set()
    for layer in sorted({0, trace.n_layers // 2, trace.n_layers - 1}):
        expected = oracle.jacobians(layer, PAIRS)
        for pair in PAIRS:
            J, way = trace.blocks[layer].jacobian(*pair)
            if pair[0] <= pair[1]:
                ways.add(way)
            error = relative_error(J, expected[pair], expected[pair[1], pair[1]])
            if error > worst:
                worst, at = error, f"layer {layer}, token {pair[0]} to {pair[1]}, {way}"
    verdict = "correct" if worst <= TOLERANCE[precision] else "wrong"
    return Finding(
        verdict,
        worst,
        sorted(ways),
        "" if verdict == "correct" else f"off by {worst:.1e} ({at})",
    )


def relative_error(J: Tensor, expected: Tensor, own: Tensor) -> float:
    """`‖J − E‖ / ‖E‖`; where E vanishes, relative to a hundredth of the output token's
    own Jacobian.
    """
    scale = max(float(expected.norm()), 1e-2 * float(own.norm()))
    error = float((J.double() - expected.double()).norm()) / scale
    return error if math.isfinite(error) else math.inf


def _inputs(name: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    if name in VISION:
        return {"pixel_values": torch.randn(1, 3, 16, 8, generator=generator).to(dtype)}
    if name in AUDIO:
        shape = (1, 16, 16) if name.startswith("AST") else (1, 64)
        return {"input_values": torch.randn(shape, generator=generator).to(dtype)}
    inputs: dict[str, Any] = {"input_ids": torch.tensor([tiny.TOKENS])}
    return inputs | ({} if name in NATIVE else {"use_cache": False})


@cache
def _tokenizer() -> PreTrainedTokenizerFast:
    tiny.save_tokenizer(Path(_FOLDER.name))
    return PreTrainedTokenizerFast.from_pretrained(_FOLDER.name)
