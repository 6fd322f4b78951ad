"""A TransformerBridge: TransformerLens builds it, and gets the HuggingFace model inside
it from here, whole, quantised, left on disk or untrained.
"""

from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from tl_coupling.models.adapters import adapter_beside, merge_adapters
from tl_coupling.models.completeness import load_whole, number_of_weights
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import LoadedAs, facts_of
from tl_coupling.models.in_memory import copied_modules
from tl_coupling.models.load_request import LoadRequest
from tl_coupling.models.loaded import kind_of_config, reads_pixels
from tl_coupling.models.made_of import MadeOf, paths_of
from tl_coupling.models.module_state import packing_kept
from tl_coupling.models.own_model import OwnModel
from tl_coupling.models.tokenization import lacks_tokenizer, wordless_tokenizer
from tl_coupling.models.untrained import fresh_model
from tl_coupling.models.weights import GgufModel, hollow_cuts, hollow_model, quantized


def load_bridge(request: LoadRequest, source: str, device: torch.device) -> nn.Module:
    """Return a TransformerBridge, and remember how it was loaded.

    Models without a single residual stream are refused before their weights are read.

    Args:
        request: what was asked for.
        source: a hub name, a folder, or a GGUF file.
        device: where the weights go.

    Raises:
        ModelError: as `load_model`; other errors are those of TransformerLens and
            HuggingFace.
    """
    loading = _BridgeLoading(request, source, device)
    bridge = loading.bridge()
    facts = facts_of(bridge)
    facts.loaded_as = loading.loaded_as
    facts.made_of = loading.made_of(bridge)
    if request.is_streamed:
        _check_dtype_of_streamed(bridge, request.dtype)
        # While it was built, the bridge cut its tensors from stand-ins, which hold NaN.
        hollow_cuts(bridge)
    return bridge


class _BridgeLoading:
    """One model on its way into a bridge.

    TransformerLens takes it for the HuggingFace class that it would choose, and calls
    `from_pretrained`.
    """

    def __init__(self, request: LoadRequest, source: str, device: torch.device) -> None:
        self._request = request
        self._source = source
        self._device = device
        # How a checkpoint is quantised that was read; empty for one that is not.
        self._quantization: LoadedAs = {}
        self._weight_facts: LoadedAs = {}
        # A HuggingFace model that is there already, and its tokenizer.
        self._ready: dict[str, Any] = {}
        # The HuggingFace model with its own modules, since a bridge rewires those that
        # it gets, and the paths of these.
        self._own_modules: nn.Module | None = None
        self._paths: dict[nn.Module, str] = {}

    @property
    def loaded_as(self) -> LoadedAs:
        """The provenance of its weights."""
        return {**self._quantization, **self._weight_facts}

    def made_of(self, bridge: Any) -> MadeOf | None:
        """Return what the bridge was made of; None where that cannot be copied."""
        if self._own_modules is None:
            return None
        own_model = OwnModel(
            self._own_modules,
            bridge.tokenizer,
            self._request.label or self._request.name,
        )
        return MadeOf.from_bridge(bridge, own_model, self._paths)

    def bridge(self) -> nn.Module:
        """Build the bridge."""
        if self._request.is_file:
            self._open_gguf(GgufModel(self._source))
        elif lacks_tokenizer(self._source):
            # TransformerLens would fail to make one.
            self._ready = {"tokenizer": wordless_tokenizer()}
        try:
            bridge = self._boot()
        # A bridge raises these when it takes apart fused matrices that are packed; see
        # below.
        except (NotImplementedError, RuntimeError):
            if not self._quantization:
                raise
        else:
            if not self._quantization or not quantized.has_foreign_weights(bridge):
                return bridge
        # Bridges that take fused matrices apart cannot do so while these are packed:
        # the second time `from_pretrained` unpacks them.
        return self._boot()

    def _boot(self) -> nn.Module:
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(
            self._source,
            # Asked for `from_pretrained` alone, in place of HuggingFace's class.
            model_class=cast(Any, self),
            **self._request.boot_options(self._device),
            **self._ready,
        )

    def _open_gguf(self, file: GgufModel) -> None:
        """Have transformers convert a GGUF file; the copy is then read like any
        folder.
        """
        dtype = self._request.dtype
        if self._request.untrained:
            hf_model = file.untrained(
                partial(
                    fresh_model,
                    dtype=dtype,
                    trust_remote_code=self._request.trust_remote_code,
                    attention="eager",
                )
            )
            self._weight_facts.update(number_of_weights(hf_model))
        else:
            file.convert(needs_folder=self._request.is_streamed)
            self._weight_facts.update(quantized.described(None, "gguf"))
            if file.loaded is None:
                self._source = str(file.folder)
                return
            self._weight_facts.update(file.loaded.facts)
            hf_model = _cast_parameters(file.loaded.model, dtype)
        self._ready = {
            "hf_model": self._copied_first(hf_model.to(self._device)),
            "tokenizer": file.tokenizer,
        }

    def from_pretrained(
        self, source: str, *, config: Any, torch_dtype: torch.dtype, **options: Any
    ) -> nn.Module:
        """Return the HuggingFace model of a configuration, as it was asked for."""
        return self._copied_first(
            self._huggingface_model(source, config, torch_dtype, options)
        )

    def _copied_first(self, model: nn.Module) -> nn.Module:
        """Return a model, of which a copy that shares its weights is kept."""
        self._own_modules = None
        self._paths = paths_of(model)
        with suppress(ModelError):
            self._own_modules = copied_modules(model)
        return model

    def _huggingface_model(
        self,
        source: str,
        config: Any,
        torch_dtype: torch.dtype,
        options: dict[str, Any],
    ) -> nn.Module:
        from transformer_lens.model_bridge.sources import transformers

        name = self._request.name
        kind = kind_of_config(config)
        if kind:
            raise ModelError(f"{name!r} is {kind}")
        architecture = transformers.determine_architecture_from_hf_config(config)
        auto = transformers.get_hf_model_class_for_architecture(architecture)
        if self._request.untrained:
            # Built where a trained one is read, so that class, configuration,
            # attention, device and dtype are the same.
            attention = options.get("attn_implementation")
            trusted = self._request.trust_remote_code
            untrained = fresh_model(auto, config, torch_dtype, trusted, attention)
            self._weight_facts.update(number_of_weights(untrained))
            return untrained
        adapter = adapter_beside(
            name, source, options.get("revision"), self._request.is_streamed
        )
        if adapter is not None:
            self._weight_facts["adapter"] = adapter
        options["config"] = config
        options["dtype"] = torch_dtype
        quantized.refuse_format(name, config)
        if self._request.is_streamed:
            quantized.refuse_streaming(name, quantized.how_saved(config))
            hollow = hollow_model(name, auto, source, self._device, **options)
            self._weight_facts.update(hollow.facts)
            return hollow.model
        return self._resident(auto, source, config, options)

    def _resident(
        self, auto: Any, source: str, config: Any, options: dict[str, Any]
    ) -> nn.Module:
        """Return a model in memory, quantised where it was asked for or saved so."""
        request = self._request
        options |= quantized.loading_options(
            request.name, config, request.quantization, self._device, options["dtype"]
        )
        # Filled in the first time, when the bridge could not take the packed weights
        # apart.
        is_second_time = bool(self._quantization)
        saved_as = quantized.how_saved(config)
        self._quantization = quantized.described(request.quantization, saved_as)
        loaded = load_whole(request.name, auto.from_pretrained, source, **options)
        self._weight_facts.update(loaded.facts)
        model = quantized.unpacked(loaded.model) if is_second_time else loaded.model
        # Into packed weights an adapter cannot be merged exactly.
        if "adapter" in self._weight_facts and (
            is_second_time or not self._quantization
        ):
            merge_adapters(model)
        if is_second_time:
            return model
        for part, name, value in packing_kept(loaded.model):
            setattr(part, name, value)
        return loaded.model


def _check_dtype_of_streamed(bridge: nn.Module, dtype: torch.dtype) -> None:
    if reads_pixels(bridge) and dtype not in (torch.float32, torch.float64):
        raise ModelError(
            '`dtype` with `memory="stream"` must be float32 or float64: a vision model '
            f"rounds its image to the dtype of weights, {dtype}, that are not in memory"
        )


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its weights in `dtype`, as HuggingFace loads them: buffers
    keep theirs.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model
