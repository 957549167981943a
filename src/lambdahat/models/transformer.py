"""A small GPT."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._core.check import require, require_count
from lambdahat.models.initial import initialize
from lambdahat.models.perceptrons import require_share


class Attention(nn.Module):
    """Causal self-attention, softmax(QKᵀ/√d + mask)·V in each head: (B, T, D) ↦ (B, T, D)."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part in self.project(x).chunk(3, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
            weights = scores.masked_fill(future, -math.inf).softmax(dim=3)
            mixed = F.dropout(weights, rate, training=self.training) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """x + attention(ln(x)), then x + mlp(ln(x))."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, fused)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU("tanh"),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        out: Tensor = x + self.drop(self.mlp(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm, and a read-out with the token embedding's own
    weights.

    tokens (B, T) ↦ logits (B, T, V), the logits at t from the tokens up to t; T at most
    ``context``.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        heads: int,
        blocks: int,
        dropout: float = 0.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        require_count(blocks, "blocks")
        require_share(dropout)
        require(width % heads == 0, "heads", f"divide the width {width}", repr(heads))
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, fused) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        length, most = tokens.shape[1], self.positions.num_embeddings
        require(
            length <= most,
            "tokens",
            f"be at most {most} long",
            f"{length}",
            "cut the text, or raise context",
        )
        x = self.drop(self.tokens(tokens) + self.positions.weight[:length])
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def gpt(
    vocabulary: int = 65,
    context: int = 64,
    width: int = 128,
    heads: int = 4,
    blocks: int = 4,
    dropout: float = 0.0,
    fused: bool = False,
    seed: int = 0,
) -> GPT:
    """A GPT-2 of any size (Radford et al., 2019); the defaults suit Tiny Shakespeare by characters.

    ``fused`` uses the library's attention kernels: faster and lighter, the same numbers to
    rounding, but differentiable only once, so no Hessian products. Weights start at N(0, 0.02²),
    those that write to the residual stream at N(0, 0.02²/2L) with L blocks, biases at 0.
    124,439,808 parameters at GPT-2's own sizes.

    >>> tuple(gpt(20, 8, 16, 2, 1)(torch.zeros(2, 5, dtype=torch.long)).shape)
    (2, 5, 20)
    """
    with torch.device("meta"):
        model = GPT(vocabulary, context, width, heads, blocks, dropout, fused)
    initialize(model, seed, "gpt", _draw)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.3.weight")):
                weight.mul_(1.0 / math.sqrt(2 * blocks))
    return model


def _draw(layer: nn.Module, rng: torch.Generator) -> None:
    if isinstance(layer, nn.Embedding | nn.Linear):
        layer.weight.normal_(0.0, 0.02, generator=rng)
    if isinstance(layer, nn.Linear):
        layer.bias.zero_()
