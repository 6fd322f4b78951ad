"""A depth coupling stage by stage, and the matrix products that no way to its Jacobians
can do without.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import tl_coupling as tlc
from benchmarks.timing import timed
from tl_coupling.jacobians import fill_pairs

_VOCABULARY = 1024
STAGES = ("forward", "gate", "jacobians", "svd", "pairs")


def by_stage(
    model: nn.Module,
    ids: Sequence[int],
    device: torch.device,
    k: int,
    final_norm: bool = False,
) -> tuple[dict[str, float], tuple[Tensor, Tensor, Tensor]]:
    """Seconds of each stage, with nothing done twice; and A in both orientations, and
    the singular values.

    The gate, one forward and one backward pass of each block and one more forward pass,
    comes before the Jacobians that it judges.
    """
    seconds = {}
    trace, seconds["forward"] = timed(
        device, lambda: tlc.trace(model, ids, final_norm=final_norm)
    )
    _, seconds["gate"] = timed(
        device, lambda: [block.reference(len(ids) - 1) for block in trace.blocks]
    )
    J, seconds["jacobians"] = timed(
        device, lambda: tlc.block_jacobians(trace, progress=False)
    )
    spectrum, seconds["svd"] = timed(
        device, lambda: tlc.svd(J, min(k + 1, trace.d_model))
    )
    (A, B), seconds["pairs"] = timed(device, lambda: fill_both(J, spectrum.top(k)))
    return seconds, (A, B, spectrum.S)


def fill_both(J: Tensor, spectrum: tlc.Spectrum) -> Tensor:
    """Return A of all pairs in both orientations, `[2 n n k k]`."""
    matrices = J.new_empty(2, len(J), len(J), spectrum.k, spectrum.k)
    for A, orientation in zip(matrices, ("ujv", "vju"), strict=True):
        fill_pairs(A, J, spectrum, orientation)
    return matrices


@dataclass(frozen=True)
class Product:
    """One matrix product, or a batch of them: `[… n m] @ [… m p]`."""

    left: tuple[int, ...]
    right: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * prod(self.left) * self.right[-1]

    def ready(self, device: torch.device) -> Callable[[], Tensor]:
        """Return the product as a function, its operands and room for the result laid
        out beforehand.
        """
        left, right = (
            torch.randn(shape, device=device) for shape in (self.left, self.right)
        )
        out = torch.empty(*self.left[:-1], self.right[-1], device=device)
        return lambda: torch.matmul(left, right, out=out)


def bare_products(cfg: Any, n_pos: int) -> dict[str, Product]:
    """Return the products of one standard block's Jacobian at one token: those that
    remain once each is done in closed form.

    `W_out · inner`, with the MLP's branches combined and the norm applied to `inner`;
    `W_O · ∂z/∂x`; for every head `Cᵀ K`, which is d_head × d_head, and that times
    `∂q/∂x`; and `J_mlp · J_attention`. Norms are diagonal plus rank one, softmax and
    rotation act on a head at a time: none of them is a product of this size.
    """
    d = cfg.d_model
    d_mlp = cfg.d_mlp
    n_heads = cfg.n_heads
    d_head = cfg.d_head
    return {
        "MLP": Product((d, d_mlp), (d_mlp, d)),
        "attention output": Product((d, n_heads * d_head), (n_heads * d_head, d)),
        "keys": Product((n_heads, d_head, n_pos), (n_heads, n_pos, d_head)),
        "queries": Product((n_heads, d_head, d_head), (n_heads, d_head, d)),
        "MLP after attention": Product((d, d), (d, d)),
    }


def seconds_of(
    products: dict[str, Product], device: torch.device, n_layers: int
) -> dict[str, float]:
    """Seconds of each product, in float32, done once for each layer."""
    seconds = {}
    for name, product in products.items():
        work = product.ready(device)
        work()
        _, seconds[name] = timed(
            device, lambda work=work: [work() for _ in range(n_layers)]
        )
    return seconds


def best_flops_per_second(
    device: torch.device, size: int | None = None, repeats: int = 5
) -> float:
    """Return what one large float32 product reaches: the machine's peak, as far as a
    program sees it.
    """
    n = size or (8192 if device.type == "cuda" else 2048)
    product = Product((n, n), (n, n))
    work = product.ready(device)
    work()
    return product.flops / min(timed(device, work)[1] for _ in range(repeats))


def random_llama(
    width: int,
    n_layers: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    n_ctx: int = 512,
    seed: int = 0,
) -> nn.Module:
    """Return a Llama of random weights in the proportions of Llama-3-8B: `d_mlp = 3.5
    d`, four query heads to one of keys.

    Heads are 128 wide from `d = 2048` on, as there, and 64 below.
    """
    from transformers import LlamaConfig

    d_head = 128 if width >= 2048 else 64
    n_heads = max(1, width // d_head)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=n_heads // 4
        if n_heads % 4 == 0
        else n_heads // 3
        if n_heads % 3 == 0
        else n_heads,
        head_dim=d_head,
        max_position_embeddings=n_ctx,
    )
    config.architectures = ["LlamaForCausalLM"]
    return random_model(config, f"llama-{width}", device, dtype, seed)


def random_huggingface_model(
    config: Any,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    attention: str = "sdpa",
) -> Any:
    """Return a causal model of random weights, of a transformers configuration that
    names its architecture.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention
        ).eval()
    model.config.architectures = config.architectures
    return model.requires_grad_(False)


def random_model(
    config: Any,
    name: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> nn.Module:
    """Return a bridge of a causal model of random weights, of a transformers
    configuration that names its architecture.
    """
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.model_bridge.sources import transformers as _  # noqa: F401  (attaches boot_transformers)

    hf_model = random_huggingface_model(config, device, dtype, seed, "eager")
    options: dict[str, Any] = {
        "hf_model": hf_model,
        "device": str(device),
        "dtype": dtype,
    }
    with tempfile.TemporaryDirectory() as folder:
        return TransformerBridge.boot_transformers(
            f"random/{name}", tokenizer=_tokenizer(folder), **options
        ).eval()


def _tokenizer(folder: str) -> Any:
    """Without one TransformerLens would ask the hub; it reads the one that it is given
    once more, from the folder.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        WordLevel({f"w{i}": i for i in range(_VOCABULARY)}, unk_token="w0")
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w0"
    ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def random_ids(n_tokens: int, seed: int = 0) -> list[int]:
    """Token ids for `random_llama`."""
    return torch.randint(
        _VOCABULARY, (n_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
