"""HuggingFace models that somebody has changed, drawn at random: where, what kind of
change, which architecture. And whether what is measured is the model that was given.

    python tests/support/changed_models.py --number 60 --seed 0
"""

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

if __name__ == "__main__":
    _TESTS = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(_TESTS), str(_TESTS / "support"), str(_TESTS.parent)]

import tiny
import tl_coupling as tlc
from zoo.oracle import Oracle

try:
    import peft
except ImportError:
    peft = None

IDS = [1, 5, 3, 9, 2, 7, 11, 4]
ARCHITECTURES = (
    "gpt2",
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "phi",
    "phi3",
    "bloom",
    "falcon",
    "mpt",
    "opt",
    "llama",
    "mistral",
    "mixtral",
    "qwen3",
    "gemma2",
    "olmo2",
    "bert",
)
TOLERANCE = 1e-4


class Given(NamedTuple):
    """A model, its inputs by name, and what was changed, in words."""

    model: Any
    inputs: dict[str, Tensor]
    change: str


class NotPossible(Exception):
    """A change that this architecture does not have."""


def draw(rng: random.Random) -> Given:
    """Return a changed model."""
    while True:
        architecture = rng.choice(ARCHITECTURES)
        kind = rng.choice(list(KINDS))
        model = tiny.huggingface_model(architecture, seed=rng.randrange(100))
        # As users have it, beside the tests' own "eager".
        if rng.random() < 0.5:
            with suppress(ValueError):
                model.set_attn_implementation("sdpa")
        try:
            model, inputs, where = KINDS[kind](model, rng)
        except NotPossible:
            continue
        text = {"input_ids": torch.tensor([IDS]), **inputs}
        return Given(model.eval(), text, f"{architecture}: {kind} {where}")


def verdict(given: Given, rng: random.Random) -> str:
    """Return "right", "refused: …", or what is silently wrong."""
    model = given.model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    path = tiny._path_of_layers(inner)
    layer = rng.randrange(tiny.N_LAYERS)
    t2 = rng.randrange(1, len(IDS))
    pairs = [(t2, t2), (rng.randrange(t2), t2)]
    prompt = IDS if len(given.inputs) == 1 else given.inputs
    state = state_of(model)
    try:
        trace = tlc.trace(model, prompt)
        measured = [
            tlc.block_jacobian(trace, layer, input_position=t1, output_position=t2)
            for t1, t2 in pairs
        ]
        logits = trace.logits(trace.residual[-1])
    except (ValueError, TypeError) as error:
        if "\n" in str(error):
            return f"an error of several lines: {error}"
        return f"refused: {error}"
    changed = changes_of(state, state_of(model))
    if changed:
        return f"the model is another afterwards: {changed}"
    streams: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        streams.append(output[0] if isinstance(output, tuple) else output)

    handles = [b.register_forward_hook(note) for b in inner.get_submodule(path)]
    with torch.no_grad():
        own_logits = model(**given.inputs, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    for name, value, expected in (
        ("stream", trace.residual[1:], torch.stack([s[0] for s in streams])),
        ("logits", logits, own_logits),
    ):
        error = float((value - expected).norm() / expected.norm())
        if not error <= TOLERANCE:
            return f"{name} off by {error:.2g}"
    inputs = {**given.inputs, "use_cache": False}
    oracle = _WholeModel(model, inner, path, inputs)
    expected_jacobians = oracle.jacobians(layer, pairs)
    for pair, J in zip(pairs, measured, strict=True):
        expected = expected_jacobians[pair]
        error = float((J - expected).norm() / (expected.norm() + 1e-6))
        if not error <= TOLERANCE:
            return f"J{pair} of layer {layer} off by {error:.2g}"
    return "right"


class _WholeModel(Oracle):
    """The oracle where a wrapper is called, and blocks are in the model within it."""

    def __init__(self, model: Any, inner: nn.Module, path: str, inputs: Any) -> None:
        super().__init__(inner, path, inputs)
        self.model = model


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return all of a model's state: tensors, attributes, hooks, modes, generator."""
    state: dict[str, Any] = {"generator": torch.get_rng_state().clone()}
    for path, part in model.named_modules():
        for name, value in vars(part).items():
            key = f"{path}.{name}"
            if name in ("_parameters", "_buffers"):
                for entry, tensor in value.items():
                    state[f"{key}.{entry}"] = (id(tensor), _content(tensor))
            elif isinstance(value, dict):
                state[key] = [(k, id(v)) for k, v in value.items()]
            elif isinstance(value, Tensor):
                state[key] = _content(value)
            else:
                state[key] = (id(value), repr(value)[:200])
    for name, parameter in model.named_parameters():
        state[f"{name}.flags"] = (parameter.requires_grad, parameter.grad is None)
    return state


def _content(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach().clone()


def changes_of(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names under which two states differ."""
    return [
        name
        for name in {**before, **after}
        if name not in before
        or name not in after
        or not _same(before[name], after[name])
    ]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


# Places


def _blocks(model: nn.Module) -> nn.ModuleList:
    return tiny.layers_of(model)


def _place(model: nn.Module, rng: random.Random) -> tuple[nn.Module, str]:
    """Return a module that is called in a block, or around the blocks."""
    called: list[nn.Module] = []
    handles = [
        part.register_forward_hook(lambda m, *_: called.append(m))
        for part in model.modules()
    ]
    with torch.no_grad():
        model(torch.tensor([IDS]), use_cache=False)
    for handle in handles:
        handle.remove()
    paths = {part: path for path, part in model.named_modules()}
    places = sorted({paths[part] for part in called if paths[part]})
    path = rng.choice(places)
    return model.get_submodule(path), path


def _scaled(output: Any, factor: float) -> Any:
    """Return an output with its first floating tensor scaled."""
    if isinstance(output, Tensor):
        return output * factor if output.is_floating_point() else output
    if isinstance(output, tuple):
        return (_scaled(output[0], factor), *output[1:])
    if isinstance(output, dict):  # HuggingFace's ModelOutput.
        first = next(iter(output))
        output[first] = _scaled(output[first], factor)
    return output


# Kinds of changes: each returns the model, further inputs, and where it was changed.

Changed = tuple[Any, dict[str, Tensor], str]


def hook(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)
    part.register_forward_hook(lambda m, a, output: _scaled(output, 1.3))
    return model, {}, path


def pre_hook(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)

    def scale(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            return (_scaled(args[0], 0.7), *args[1:]), kwargs
        name = next(iter(kwargs), None)
        if name and isinstance(kwargs[name], Tensor):
            return args, {**kwargs, name: _scaled(kwargs[name], 0.7)}
        return args, kwargs

    part.register_forward_pre_hook(scale, with_kwargs=True)
    return model, {}, path


def hook_at_a_token(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)

    def scale(_: nn.Module, __: Any, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        if not isinstance(stream, Tensor) or not stream.is_floating_point():
            return output
        if stream.ndim != 3:
            return output
        place = min(3, stream.shape[1] - 1)
        factor = torch.ones(stream.shape[1], 1)
        factor[place] = 1.4
        changed = stream * factor
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    part.register_forward_hook(scale)
    return model, {}, path


def patched_forward(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)
    own = part.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _scaled(own(*args, **kwargs), 1.2)

    part.forward = MethodType(forward, part)
    return model, {}, path


def subclass(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)
    kind: Any = type(part)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _scaled(kind.forward(self, *args, **kwargs), 1.2)

    part.__class__ = type(f"My{kind.__name__}", (kind,), {"forward": forward})
    return model, {}, path


class Wrapper(nn.Module):
    """Stands in a module's place, and scales what it gives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _scaled(self.inner(*args, **kwargs), 1.2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def wrapper(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _place(model, rng)
    parent, _, name = path.rpartition(".")
    owner = model.get_submodule(parent)
    if isinstance(owner, nn.ModuleList):
        owner[int(name)] = Wrapper(part)
    else:
        setattr(owner, name, Wrapper(part))
    return model, {}, path


class Shrinks(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.abs().tanh()


def _linear(model: nn.Module, rng: random.Random) -> tuple[Any, str]:
    names = [
        name
        for name, part in _blocks(model).named_modules()
        if isinstance(getattr(part, "weight", None), nn.Parameter)
        and part.weight.ndim == 2
    ]
    name = rng.choice(names)
    return _blocks(model).get_submodule(name), name


def parametrization(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _linear(model, rng)
    nn.utils.parametrize.register_parametrization(part, "weight", Shrinks())
    return model, {}, path


def pruning(model: nn.Module, rng: random.Random) -> Changed:
    from torch.nn.utils import prune

    part, path = _linear(model, rng)
    prune.random_unstructured(part, "weight", 0.4)
    return model, {}, path


def weight_norm(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _linear(model, rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(part)
    part.weight_g.data.mul_(1.5)
    return model, {}, path


def _attention(model: nn.Module, rng: random.Random) -> tuple[Any, str]:
    names = [
        name
        for name, part in _blocks(model).named_modules()
        if "attention" in type(part).__name__.lower()
    ]
    if not names:
        raise NotPossible
    name = rng.choice(names)
    return _blocks(model).get_submodule(name), name


def setting(model: nn.Module, rng: random.Random) -> Changed:
    """A number that a module keeps: a scale, an epsilon, a window."""
    settings = [
        (name, attribute, value)
        for name, part in _blocks(model).named_modules()
        for attribute, value in vars(part).items()
        if isinstance(value, float) and value > 0 and "drop" not in attribute
    ]
    if not settings:
        raise NotPossible
    name, attribute, value = rng.choice(settings)
    changed = 0.3 if "eps" in attribute else 1.7 * value
    setattr(_blocks(model).get_submodule(name), attribute, changed)
    return model, {}, f"{name}.{attribute}"


def is_causal(model: nn.Module, rng: random.Random) -> Changed:
    part, path = _attention(model, rng)
    if not hasattr(part, "is_causal"):
        raise NotPossible
    try:
        model.set_attn_implementation("sdpa")
    except ValueError as error:
        raise NotPossible from error
    part.is_causal = False
    return model, {}, path


def is_causal_in_config(model: nn.Module, rng: random.Random) -> Changed:
    model.config.is_causal = False
    return model, {}, "config"


def activation(model: nn.Module, rng: random.Random) -> Changed:
    names = [
        name
        for name, part in _blocks(model).named_modules()
        if name.rpartition(".")[2] in ("act", "act_fn", "activation_fn", "gelu_impl")
    ]
    if not names:
        raise NotPossible
    name = rng.choice(names)
    parent, _, child = name.rpartition(".")
    setattr(_blocks(model).get_submodule(parent), child, nn.Tanh())
    return model, {}, name


def attention_interface(model: nn.Module, rng: random.Random) -> Changed:
    from transformers import AttentionInterface

    def doubled(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any
    ) -> Any:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        n = q.shape[2]
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = (2 * q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous(), None

    AttentionInterface.register("doubled", doubled)
    try:
        model.set_attn_implementation("doubled")
    except (ValueError, KeyError) as error:
        raise NotPossible from error
    if model.config._attn_implementation != "doubled":
        raise NotPossible
    return model, {}, ""


def rotation(model: nn.Module, rng: random.Random) -> Changed:
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(getattr(part, "inv_freq", None), Tensor)
    ]
    if not names:
        raise NotPossible
    name = rng.choice(names)
    model.get_submodule(name).inv_freq.mul_(0.5)
    return model, {}, name


def _with_noise(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.2 * noise
    return model


def _peft(model: nn.Module, **options: Any) -> Any:
    if peft is None:
        raise NotPossible
    try:
        return _with_noise(peft.get_peft_model(model, peft.LoraConfig(r=4, **options)))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise NotPossible from error


def lora(model: nn.Module, rng: random.Random) -> Changed:
    names = {
        name.rpartition(".")[2]
        for name, part in _blocks(model).named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    }
    targets = rng.sample(sorted(names), min(2, len(names)))
    dora = rng.random() < 0.3
    return _peft(model, target_modules=targets, use_dora=dora), {}, " ".join(targets)


def lora_on_embedding(model: nn.Module, rng: random.Random) -> Changed:
    embedding = next(
        name.rpartition(".")[2]
        for name, part in model.named_modules()
        if part is model.get_input_embeddings()
    )
    return _peft(model, target_modules=[embedding]), {}, embedding


def modules_to_save(model: nn.Module, rng: random.Random) -> Changed:
    path = _attention(model, rng)[1]
    linear = _linear(model, rng)[1].rpartition(".")[2]
    saved = path.rpartition(".")[2]
    adapted = _peft(model, target_modules=[linear], modules_to_save=[saved])
    return adapted, {}, f"{saved}, LoRA on {linear}"


def activated_lora(model: nn.Module, rng: random.Random) -> Changed:
    names = {
        name.rpartition(".")[2]
        for name, part in _blocks(model).named_modules()
        if isinstance(part, nn.Linear)
    }
    if not names:
        raise NotPossible
    target = rng.choice(sorted(names))
    return (
        _peft(
            model,
            target_modules=[target],
            task_type="CAUSAL_LM",
            alora_invocation_tokens=IDS[3:5],
        ),
        {},
        target,
    )


def position_ids(model: nn.Module, rng: random.Random) -> Changed:
    ids = torch.tensor([[rng.randrange(12) for _ in IDS]])
    return model, {"position_ids": ids}, ""


def mask_of_four_axes(model: nn.Module, rng: random.Random) -> Changed:
    n = len(IDS)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    hidden[5, 2] = True
    mask = torch.zeros(n, n).masked_fill(hidden, torch.finfo(torch.float32).min)
    return model, {"attention_mask": mask[None, None]}, ""


def segments(model: nn.Module, rng: random.Random) -> Changed:
    return model, {"token_type_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])}, ""


KINDS: dict[str, Callable[[nn.Module, random.Random], Changed]] = {
    function.__name__: function
    for function in (
        hook,
        pre_hook,
        hook_at_a_token,
        patched_forward,
        subclass,
        wrapper,
        parametrization,
        pruning,
        weight_norm,
        setting,
        is_causal,
        is_causal_in_config,
        activation,
        attention_interface,
        rotation,
        lora,
        lora_on_embedding,
        modules_to_save,
        activated_lora,
        position_ids,
        mask_of_four_axes,
        segments,
    )
}


def main() -> int:
    """Draw changes, print each verdict, and say how many were silently wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = {"right": 0, "refused": 0, "silent": 0}
    for i in range(options.number):
        rng = random.Random(f"{options.seed} {i}")
        given = draw(rng)
        while options.only and not any(word in given.change for word in options.only):
            given = draw(rng)
        result = verdict(given, rng)
        kind = result.partition(":")[0]
        counts[kind if kind in counts else "silent"] += 1
        print(f"{i:4d} {given.change}: {result}", flush=True)
    print(counts)
    return 1 if counts["silent"] else 0


if __name__ == "__main__":
    sys.exit(main())
