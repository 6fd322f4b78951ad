"""The smallest module of the protocol that TransformerLens' pretraining adapter asks
for.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.configs import D_HEAD, D_MLP, D_MODEL, N_CTX, N_HEADS, VOCAB


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL, bias=False)
        self.out = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, N_HEADS, D_HEAD)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(D_MODEL, D_MLP, bias=False) for _ in range(2))
        self.down = nn.Linear(D_MLP, D_MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            nn.RMSNorm(D_MODEL, eps=1e-5),
            nn.RMSNorm(D_MODEL, eps=1e-5),
        )
        self.attn, self.mlp = _Attention(), _MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class PretrainModel(nn.Module):
    """Rotary attention, RMSNorm, gated MLPs; returns a dict of logits."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D_MODEL)
        self.blocks = nn.ModuleList(_Block() for _ in range(n_layers))
        self.norm_f = nn.RMSNorm(D_MODEL, eps=1e-5)
        self.lm_head = nn.Linear(D_MODEL, VOCAB, bias=False)
        angles = torch.outer(
            torch.arange(N_CTX), 100.0 ** -torch.linspace(0, 1, D_HEAD // 2)
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: Tensor, **_: object) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        n_pos = x.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:n_pos], self.sin[:n_pos])
        return {"logits": self.lm_head(self.norm_f(x))}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring dimensions as the real and imaginary part of one number, turned."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
