"""What a GGUF file says of its model, and whether the model that is built of it is that
model.

transformers reads the keys and tensors that it has a place for, and skips the others
without a word. Here a configuration is completed by what else the file says, where
transformers can be told so; what then still has no place is refused, by its name.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tl_coupling.models.completeness import refuse_unplaced
from tl_coupling.models.errors import ModelError
from tl_coupling.models.file_tensors import FileTensor
from tl_coupling.models.patched_transformers import Place, Reading

if TYPE_CHECKING:
    import gguf

# Keys beside those of the architecture, and why no number of the model depends on them.
_HARMLESS_BEGINNINGS = {
    "GGUF.": "how the file is laid out",
    "general.": "what the model is called, who made it, under which licence",
    "tokenizer.": "how text is split; measured are the token ids, which results list",
    "quantize.": "how the weights were quantised; tensors say it themselves",
    "imatrix.": "which texts the quantisation was tuned on",
    "split.": "of which files this is one; what the others hold is missed as weights",
    "mradermacher.": "notes of somebody who quantises models",
}
# Keys of an architecture, and why no number depends on them.
_HARMLESS = {
    "vocab_size": "the embedding's rows say it, and another number is refused",
    "context_length": "how long prompts may be",
    "tensor_data_layout": "old files; tensors are read as transformers expects them",
    "pooling_type": "how a text's one vector is made, behind the blocks",
    "rope.scaling.finetuned": "whether the weights were trained with the scaling",
    "feed_forward_length": "the weights' shapes say it",
}
# Where transformers has a place for what a key says, if the configuration's class has
# one of these fields.
_FIELDS = {
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.key_length_swa": ("head_dim",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
    ),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
}
# Values that say nothing: what is computed without the key, or 0 for "not set".
_SAYS_NOTHING: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.head_count": (0,),
    "attention.head_count_kv": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.factor": (0, 1),
    "rope.scaling.type": ("none",),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
    "ssm.dt_b_c_rms": (False,),
    "swin_norm": (False,),
}
# Biases for which a configuration has a switch: all of these, or none.
_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
_ROPE_FREQS = "rope_freqs.weight"
_LONG = "rope_factors_long.weight"
_SHORT = "rope_factors_short.weight"
# Tensors that are computed from keys, and that llama.cpp skips too.
_HARMLESS_TENSOR = "attn_rot_embd"
# Depths of the models in whose attention llama.cpp divides by the root of the width of
# a head as if heads had d_model / n_heads entries; no key says so.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Characters of a key's value in an error message.
_MOST_SHOWN = 40
_ELSEWHERE = "load the same model from a folder or hub name in HuggingFace format"


@dataclass(frozen=True)
class GgufContents:
    """The keys and tensors of a GGUF file.

    Attributes:
        name: of the model in error messages.
        architecture: as llama.cpp calls it.
        keys: all names of keys.
        settings: the values of the architecture's keys, without its name before them.
        tensors: each as the file has it.
    """

    name: str
    architecture: str
    keys: tuple[str, ...]
    settings: Mapping[str, Any]
    tensors: Mapping[str, "gguf.ReaderTensor"]

    @classmethod
    def from_file(cls, name: str, path: Path) -> "GgufContents":
        """Read a file.

        Raises:
            ModelError: the file is an adapter.
        """
        import gguf

        reader = gguf.GGUFReader(path)
        architecture = str(reader.fields["general.architecture"].contents())
        kind = reader.fields.get("general.type")
        if kind is not None and kind.contents() == "adapter":
            raise ModelError(
                f"{name!r} is an adapter alone: merge it into its base model "
                "(`merge_and_unload` of peft), save that, and load what was saved"
            )
        own = f"{architecture}."
        settings = {
            key.removeprefix(own): field.contents()
            for key, field in reader.fields.items()
            if key.startswith(own)
        }
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        return cls(name, architecture, tuple(reader.fields), settings, tensors)

    def numbers(self, tensor: str) -> list[float] | None:
        """Return the entries of a tensor in floating point; None if it is not there."""
        from gguf import dequantize

        if tensor not in self.tensors:
            return None
        stored = self.tensors[tensor]
        numbers = dequantize(stored.data, stored.tensor_type)
        return numbers.astype(np.float64).ravel().tolist()

    def places(self, model: Any, reading: Reading) -> dict[FileTensor, Place]:
        """Return where in a model each tensor is that is to be a weight of it.

        One that is nowhere has its own name as place, which no weight has. Tensors that
        the configuration was completed by, or compared with, are left out.
        """
        elsewhere = self._names_in_configuration(model.config)
        tensors = [
            FileTensor(
                self.name,
                name,
                # In which all of them are read.
                torch.float32,
                tuple(int(size) for size in reversed(tensor.shape)),
            )
            for name, tensor in self.tensors.items()
            if name not in elsewhere
        ]
        if self.architecture in _recent_architectures():
            places = dict(reading.places)
        else:
            places = self._legacy_places(model)
        return {
            tensor: places.get(tensor.name, Place(tensor.name, None))
            for tensor in tensors
        }

    def _legacy_places(self, model: Any) -> dict[str, Place]:
        from transformers import modeling_gguf_pytorch_utils as legacy

        processors: Any = legacy.TENSOR_PROCESSORS
        kind = processors.get(self.architecture, legacy.TensorProcessor)
        processor = kind(config=model.config.to_dict())
        weights = legacy.get_gguf_hf_weights_map(model, processor)
        if self.architecture == "gpt2":
            # The processor has this name itself.
            weights["output.weight"] = "lm_head.weight"
        places = {}
        for name in self.tensors:
            # Experts' weights are fused, into one that has no such ending.
            weight = weights.get(name, weights.get(name.removesuffix(".weight")))
            if weight is not None:
                # Several may be fused into one weight: each has a pattern of its own.
                places[name] = Place(weight, pattern=name)
        return places

    def _names_in_configuration(self, config: Any) -> set[str]:
        """Return names of tensors that are no weights of the model."""
        names = {name for name in self.tensors if _HARMLESS_TENSOR in name}
        parameters = getattr(config, "rope_parameters", None) or {}
        is_longrope = parameters.get("rope_type") == "longrope"
        if is_longrope or self.architecture == "gemma4":
            names |= {_ROPE_FREQS, _LONG, _SHORT}
        return names

    def refuse(self, unplaced: Iterable[str]) -> None:
        """Raise ModelError on parts of the file that the model would lack; none is
        fine.
        """
        refuse_unplaced(repr(self.name), list(unplaced), "transformers", _ELSEWHERE)

    def refuse_setting(self, setting: str) -> None:
        """Raise ModelError on a key of the architecture that the model would lack."""
        self.refuse([self.shown(setting)])

    def shown(self, setting: str) -> str:
        """Return a key of the architecture and its value, for an error message."""
        value = self.settings[setting]
        if isinstance(value, float):
            # Most are kept in 32 bits.
            value = float(f"{value:.6g}")
        shown = str(value)
        return f"{self.architecture}.{setting} = {shown[:_MOST_SHOWN]}"


class CompletedConfig:
    """The fields of a model's configuration: those that transformers reads from a GGUF
    file, and what else the file says.

    Attributes:
        contents: the file.
        fields: what a configuration is made from; completed in place.
    """

    def __init__(self, contents: GgufContents, fields: dict[str, Any]) -> None:
        from transformers import CONFIG_MAPPING

        self.contents = contents
        self.fields = fields
        self._reads_all = contents.architecture in _recent_architectures()
        self._consumed = _consumed(contents)
        self._class: Any = CONFIG_MAPPING[fields["model_type"]]
        # For the fields that the class has; some raise errors when they are read off.
        self._default: dict[str, Any] = self._class().to_dict()

    def config(self) -> Any:
        """Return the configuration.

        Raises:
            ModelError: the file says what it has no place for.
        """
        self._complete_by_tensors()
        unplaced = []
        for key in self.contents.keys:
            setting = key.removeprefix(f"{self.contents.architecture}.")
            # Not a key of the architecture.
            if setting == key:
                if not key.startswith(tuple(_HARMLESS_BEGINNINGS)):
                    unplaced.append(key)
            elif not self._place(setting):
                unplaced.append(self.contents.shown(setting))
        self.contents.refuse(unplaced)
        rotation = self._rotation()
        if rotation:
            self.fields["rope_scaling"] = rotation
        try:
            config = self._class.from_dict(self.fields)
        except Exception:
            if rotation:
                self._refuse_rotation()
            raise
        # transformers may read the rotation in another way than it was told: what it
        # made of it is compared with the file.
        self._check_rotation(config, rotation)
        return config

    def _has(self, field: str) -> bool:
        return field in self._default

    def _complete_by_tensors(self) -> None:
        for switch, parts in _BIASES.items():
            biases = [f"blk.0.{part}.bias" for part in parts]
            if self._has(switch) and self.contents.tensors.keys() >= set(biases):
                self.fields[switch] = True
        width = _SCALED_BY_WIDTH.get(self.contents.architecture)
        if width is not None and self.contents.settings.get("block_count") == width:
            n_heads = self.contents.settings["attention.head_count"]
            d_model = self.contents.settings["embedding_length"]
            self.fields["query_pre_attn_scalar"] = d_model // n_heads

    def _place(self, setting: str) -> bool:
        """Say whether the configuration says what a key does, or can be told so."""
        value = self.contents.settings[setting]
        if self._reads_all and setting in self._consumed:
            return True
        # `_rotation` places these together, or refuses them.
        if setting.startswith(("rope.scaling.", "rope.scale_linear")):
            return True
        place: Callable[..., bool] | None = {
            "attention.scale": self._place_scale,
            "attention.sliding_window": self._place_window,
            "attention.sliding_window_pattern": self._place_pattern,
            "attention.value_length": self._is_head_width,
            "attention.value_length_swa": self._is_local_head_width,
            "rope.dimension_count": self._place_rotated_width,
            "rope.dimension_count_swa": self._is_local_head_width,
            "rope.freq_base": self._place_base,
            "rope.freq_base_swa": self._place_local_base,
        }.get(setting)
        if place is not None:
            return place(value)
        if setting in self._consumed or setting in _HARMLESS:
            return True
        if self._is_own_rule(setting, value):
            return True
        says_nothing = value in _SAYS_NOTHING.get(setting, ())
        for field in _FIELDS.get(setting, ()):
            if self._has(field):
                is_switched_off = says_nothing and "softcapping" in setting
                self.fields[field] = None if is_switched_off else value
                return True
        return says_nothing

    def _is_own_rule(self, setting: str, value: object) -> bool:
        """Say whether a key repeats what holds for every model of its architecture."""
        architecture = self.contents.architecture
        rules = {
            # Which blocks are parallel, transformers and llama.cpp read off the norms.
            ("stablelm", "use_parallel_residual"): (True, False),
            ("bloom", "attention.max_alibi_bias"): (8,),
            ("gpt2", "attention.head_count_kv"): (
                self.contents.settings.get("attention.head_count"),
            ),
            ("bloom", "attention.head_count_kv"): (
                self.contents.settings.get("attention.head_count"),
            ),
        }
        return value in rules.get((architecture, setting), ())

    @property
    def _head_width(self) -> int:
        """How many entries the query of a head has."""
        stated = self.contents.settings.get("attention.key_length")
        if stated is not None:
            return int(stated)
        n_heads = self.contents.settings.get("attention.head_count") or 1
        return int(self.contents.settings.get("embedding_length", 0)) // n_heads

    def _is_head_width(self, width: object) -> bool:
        return bool(width == self._head_width)

    def _is_local_head_width(self, width: object) -> bool:
        return bool(width == self.contents.settings.get("attention.key_length_swa"))

    def _place_scale(self, scale: float) -> bool:
        if scale == 0:
            return True
        if self._has("query_pre_attn_scalar"):
            # A whole number in transformers.
            divisor = round(scale**-2)
            self.fields["query_pre_attn_scalar"] = divisor
            return math.isclose(divisor, scale**-2, rel_tol=1e-5)
        if self._has("attention_multiplier"):
            self.fields["attention_multiplier"] = scale
            return True
        # No field for it: fine if it is the usual 1/√width, up to the rounding of 32
        # bits.
        return math.isclose(scale * math.sqrt(self._head_width), 1, rel_tol=1e-5)

    def _place_window(self, window: int | list[int]) -> bool:
        n_ctx = self.contents.settings.get("context_length", math.inf)
        hides_nothing = isinstance(window, int) and window >= n_ctx
        if not window or hides_nothing:
            if self._has("sliding_window") and not self._has("layer_types"):
                self.fields["sliding_window"] = None
            return True
        # Classes with a switch slide in some of their layers; which, no key says.
        if self._has("use_sliding_window") or not self._has("sliding_window"):
            return False
        self.fields["sliding_window"] = window
        return True

    def _place_pattern(self, pattern: int | list[bool]) -> bool:
        if not self._has("layer_types"):
            return False
        if isinstance(pattern, int):
            n_layers = int(self.contents.settings["block_count"])
            # Every layer slides but each `pattern`-th, counted from 1.
            pattern = [bool((layer + 1) % pattern) for layer in range(n_layers)]
        self.fields["layer_types"] = [
            "sliding_attention" if is_local else "full_attention"
            for is_local in pattern
        ]
        return True

    def _place_rotated_width(self, width: int) -> bool:
        if not self._has("rope_parameters"):
            return False
        if self.fields.get("head_dim") == width:
            # transformers took the rotated width for that of a head; where no key says
            # that of a head, the weights' shapes do.
            if "attention.key_length" not in self.contents.settings:
                return True
            self.fields["head_dim"] = self._head_width
        if self._rotates_in_part:
            self.fields["partial_rotary_factor"] = width / self._head_width
            return True
        return self._has("rotary_dim") or width == self._head_width

    @property
    def _rotates_in_part(self) -> bool:
        """Whether models of the class can rotate some entries of a head alone."""
        parameters = self._default.get("rope_parameters") or {}
        return (
            self._has("partial_rotary_factor") or "partial_rotary_factor" in parameters
        )

    def _place_base(self, base: float) -> bool:
        if not self._has("rope_parameters"):
            return False
        self.fields["rope_theta"] = base
        return True

    def _place_local_base(self, base: float) -> bool:
        if self._is_layered:
            self.fields["rope_local_base_freq"] = base
            return True
        return bool(base == self.contents.settings.get("rope.freq_base"))

    @property
    def _is_layered(self) -> bool:
        """Whether layers of two kinds rotate by angles of their own."""
        parameters = self._default.get("rope_parameters") or {}
        return "full_attention" in parameters

    def _rotation(self) -> dict[str, Any] | None:
        """Return how transformers is told of scaled rotations; None where the file has
        none.

        llama.cpp divides the angle of pair i by a factor of its own (`rope_freqs`), or
        all by one (`linear`); YaRN between the two; or by the long or the short factors
        of LongRoPE. Factors of pairs are told as LongRoPE with the same factors for all
        lengths.
        """
        settings = self.contents.settings
        kind = settings.get("rope.scaling.type", "linear")
        factor = float(
            settings.get("rope.scaling.factor")
            or settings.get("rope.scale_linear")
            or 1
        )
        attention = float(
            settings.get("rope.scaling.attn_factor")
            or settings.get("rope.scaling.yarn_attn_factor")
            or 1
        )
        n_trained = settings.get(
            "rope.scaling.original_context_length", settings.get("context_length")
        )
        long = self.contents.numbers(_LONG)
        short = self.contents.numbers(_SHORT)
        pair_factors = self.contents.numbers(_ROPE_FREQS)
        if pair_factors is not None and self.contents.architecture == "gemma4":
            # Compared with what the configuration says by itself.
            pair_factors = None
        if long is not None and short is not None and pair_factors is None:
            self._refuse_rotation_but_for("type", "original_context_length")
            self.fields["original_max_position_embeddings"] = n_trained
            return {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "attention_factor": attention,
                "original_max_position_embeddings": n_trained,
            }
        if kind == "yarn" and factor != 1 and pair_factors is None:
            self._refuse_rotation_but_for(
                "type", "factor", "original_context_length",
                "yarn_beta_fast", "yarn_beta_slow",
            )  # fmt: skip
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": n_trained,
                # Where the file is silent: the defaults of llama.cpp, as of the paper.
                "beta_fast": settings.get("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": settings.get("rope.scaling.yarn_beta_slow", 1.0),
                # YaRN's temperature of attention, 0.1 ln s + 1 (Peng et al. 2023), which
                # llama.cpp applies beside a factor of the file.
                "attention_factor": attention * (1 + 0.1 * math.log(factor)),
            }
        if kind not in ("linear", "none", "yarn") or (kind == "yarn" and pair_factors):
            self._refuse_rotation()
        if attention != 1:
            self._refuse_rotation()
        self._refuse_rotation_but_for(
            "type", "factor", "original_context_length",
            "yarn_beta_fast", "yarn_beta_slow",
        )  # fmt: skip
        # A factor may be left over from where scaling was turned off.
        if kind == "none":
            factor = 1.0
        if pair_factors is not None:
            if self._is_layered or not self._has("rope_parameters"):
                self._refuse_rotation()
            factors = [factor * pair_factor for pair_factor in pair_factors]
            return {
                "rope_type": "longrope",
                "long_factor": factors,
                "short_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": settings.get("context_length"),
            }
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None

    @property
    def _rotation_parts(self) -> Iterator[str]:
        """Name what the file says of scaled rotations."""
        for setting in self.contents.settings:
            if setting.startswith(("rope.scaling.", "rope.scale_linear")):
                yield self.contents.shown(setting)
        yield from self.contents.tensors.keys() & {_ROPE_FREQS, _LONG, _SHORT}

    def _refuse_rotation(self) -> None:
        self.contents.refuse(self._rotation_parts)

    def _refuse_rotation_but_for(self, *placed: str) -> None:
        """Refuse keys of the scaling that say something which is not placed."""
        self.contents.refuse(
            self.contents.shown(setting)
            for setting, value in self.contents.settings.items()
            if setting.startswith("rope.scaling.")
            and setting.removeprefix("rope.scaling.") not in (*placed, "attn_factor")
            and setting not in _HARMLESS
            and value not in _SAYS_NOTHING.get(setting, ())
        )

    def _check_rotation(
        self, config: Any, expected_rotation: dict[str, Any] | None
    ) -> None:
        """Raise ModelError where the configuration rotates by other angles than the
        file.
        """
        parameters = getattr(config, "rope_parameters", None)
        if parameters is None:
            if expected_rotation or _ROPE_FREQS in self.contents.tensors:
                self._refuse_rotation()
            return
        # Layered models keep one set of parameters for each kind of layer.
        local = parameters.get("sliding_attention", parameters)
        parameters = parameters.get("full_attention", parameters)
        for setting, angles in (
            ("rope.freq_base", parameters),
            ("rope.freq_base_swa", local),
        ):
            base = self.contents.settings.get(setting)
            if base is not None and angles.get("rope_theta") != base:
                self.contents.refuse_setting(setting)
        if expected_rotation:
            is_told = all(
                parameters.get(part) == expected_rotation[part]
                for part in expected_rotation
            )
            # LongRoPE has one factor for each pair of rotated entries.
            n_pairs = len(expected_rotation.get("short_factor", ()))
            width = self.contents.settings.get("rope.dimension_count")
            if not is_told or n_pairs not in (0, (width or self._head_width) // 2):
                self._refuse_rotation()
        elif self.contents.architecture == "gemma4":
            self._check_proportional(config)

    def _check_proportional(self, config: Any) -> None:
        """Compare the factors of Gemma 4's pairs, very large for those that are not
        rotated, with the angles of its configuration.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors = self.contents.numbers(_ROPE_FREQS)
        if factors is None:
            return
        parameters = config.rope_parameters["full_attention"]
        angles, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
            config, layer_type="full_attention"
        )
        # Angles are θ^(−i/n) for pair i of n, divided by the pair's factor.
        exponents = np.arange(len(factors)) / len(factors)
        expected = parameters["rope_theta"] ** -exponents / np.asarray(factors)
        if len(angles) != len(factors) or not np.allclose(angles, expected, rtol=1e-4):
            self._refuse_rotation()


def _recent_architectures() -> Mapping[str, Callable[..., object]]:
    """Return the architectures that transformers 5.23 reads in a new way, which fails
    on keys that it lacks and reports tensors that are left; each with the function
    that makes the configuration of a file's keys.
    """
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError:
        return {}
    return GGUF_CONFIG_ARCHS


class _Asked(dict[str, object]):
    """A dictionary that remembers for what it was asked."""

    def __init__(self, content: Mapping[str, object]) -> None:
        super().__init__(content)
        self.keys_asked_for: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.keys_asked_for.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: object = None) -> object:
        """Return a value, or the default."""
        self.keys_asked_for.add(key)
        return super().get(key, default)


def _consumed(contents: GgufContents) -> set[str]:
    """Return the keys of the architecture that transformers reads."""
    from transformers import modeling_gguf_pytorch_utils as legacy

    make_config = _recent_architectures().get(contents.architecture)
    if make_config is not None:
        own = f"{contents.architecture}."
        named_settings = {
            own + setting: value for setting, value in contents.settings.items()
        }
        # The function that makes the configuration is called on a dictionary that notes
        # which keys it looks up.
        recorder = _Asked(named_settings | {"tokenizer.ggml.tokens": 1})
        make_config(recorder, tuple(contents.tensors))
        return {key.removeprefix(own) for key in recorder.keys_asked_for}
    mappings: Any = legacy.GGUF_TO_TRANSFORMERS_MAPPING["config"]
    # As transformers looks for it.
    renamed = contents.architecture.replace("moe", "_moe").replace("-", "_")
    mapping = mappings.get(contents.architecture) or mappings.get(renamed, {})
    return {setting for setting, field in mapping.items() if field is not None}
