"""Models: loading them, what they are run on, and what is known of a loaded one."""
# ruff: noqa: F401

from tl_coupling.models.devices import named_device
from tl_coupling.models.digests import module_digest, weights_digest
from tl_coupling.models.embedded import EMBEDDED_MODEL, embedded_folder
from tl_coupling.models.errors import ModelError
from tl_coupling.models.facts import BlockOutputs, ModelFacts, facts_of
from tl_coupling.models.in_memory import (
    bridge_of,
    is_huggingface,
    own_model_of,
    with_own_modules,
)
from tl_coupling.models.inputs import ModelInput, Pixels, TokenIds, model_input
from tl_coupling.models.lens_tools import (
    JacobianLens,
    UsableLens,
    check_lens_fits,
    check_takes_lens,
    described_for_lens,
    factored_matrix,
    jacobian_lens,
    load_lens,
    usable_lens,
)
from tl_coupling.models.load_request import Backend, Memory
from tl_coupling.models.loaded import (
    context_length,
    describe_kind,
    describe_model,
    describe_modules,
    has_packed_parts,
    is_bridge,
    is_packed,
    missing_head,
    reads_pixels,
)
from tl_coupling.models.loading import empty_model, load_model
from tl_coupling.models.made_of import MadeOf
from tl_coupling.models.model_files import changed_file, described_files
from tl_coupling.models.module_state import (
    CallState,
    Change,
    attributes_set,
    eager_experts,
    left_as_found,
)
from tl_coupling.models.own_model import (
    OwnModel,
    in_eval_mode,
    input_device,
    refuse_offloaded,
    refuse_without_weights,
)
from tl_coupling.models.stored import holds_stored_weights
from tl_coupling.models.tokenization import tokenize
from tl_coupling.models.user_changes import backward_hooks_on, hooks_on, is_of_user
from tl_coupling.models.weights import (
    Quantization,
    dequantising,
    filled,
    is_gguf,
    looked_up,
    looks_up,
    needs_package,
)

__all__ = ["ModelError", "load_model"]
__dir__ = __all__.copy
