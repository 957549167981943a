"""Language models: LSTM and GPT."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._core.check import require, require_count, require_number
from lambdahat.models.initial import initialize
from lambdahat.models.model_registry import register_model

State = list[tuple[Tensor, Tensor]]


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers, and a read-out with the embedding's weights: (B, T) ↦ (B, T, V).

    The last layer is as wide as the embedding, to share its weights (Merity et al., 2017).
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float = 0.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        require_count(layers, "layers")
        require_number(dropout, "dropout", "[0, 1)")
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.dropout, self.fused = dropout, fused
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.layers = nn.ModuleList(nn.LSTM(*pair, batch_first=True) for pair in pairwise(widths))
        self.bias = nn.Parameter(torch.empty(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        return self._run(tokens, None)[0]

    def advance(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits and the detached state after the last token, for the next stretch of the text."""
        logits, after = self._run(tokens, state)
        return logits, [(h.detach(), c.detach()) for h, c in after]

    def _run(self, tokens: Tensor, state: State | None) -> tuple[Tensor, State]:
        x = self._drop(self.embedding(tokens))
        after: State = []
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, nn.LSTM)
            x, last = self._layer(layer, x, None if state is None else state[i])
            x = self._drop(x)
            after.append(last)
        return F.linear(x, self.embedding.weight, self.bias), after

    def _layer(
        self, layer: nn.LSTM, x: Tensor, start: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = start or 2 * (x.new_zeros(len(x), layer.hidden_size),)
        if not self.fused:
            return unroll(layer, x, h, c)
        out, (h, c) = layer(x, (h.unsqueeze(0), c.unsqueeze(0)))
        return out, (h.squeeze(0), c.squeeze(0))

    def _drop(self, x: Tensor) -> Tensor:
        """Drop the same units at every position of a sequence (Gal and Ghahramani, 2016)."""
        if not (self.training and self.dropout):
            return x
        return x * F.dropout(x.new_ones(len(x), 1, x.shape[2]), self.dropout)


def unroll(layer: nn.LSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The layer written out: x (B, T, D) ↦ (B, T, H) and the last (h, c), differentiable any number
    of times.

    c ← σ(f)·c + σ(i)·tanh(g) and h ← σ(o)·tanh(c), with (i, f, g, o) = W_ih x + b_ih + W_hh h +
    b_hh.
    """
    weights = dict(layer.named_parameters())
    driven = F.linear(x, weights["weight_ih_l0"], weights["bias_ih_l0"] + weights["bias_hh_l0"])
    out = []
    for t in range(x.shape[1]):
        i, f, g, o = (driven[:, t] + F.linear(h, weights["weight_hh_l0"])).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out, dim=1), (h, c)


@register_model(
    "lstm",
    "tokens",
    "three-layer LSTM language model",
    {10_000: 24_221_600},
    small={"embedding": 3, "hidden": 5},
)
def lstm(
    vocabulary: int = 10_000,
    embedding: int = 400,
    hidden: int = 1150,
    layers: int = 3,
    dropout: float = 0.0,
    fused: bool = False,
    seed: int = 0,
) -> LSTMLanguageModel:
    """The three-layer LSTM of Merity et al. (2017) for Penn Treebank: 24,221,600 parameters.

    ``dropout`` drops units of the embedding and of every layer, the same at each position.
    ``fused`` uses the library's own LSTM kernels: faster, the same numbers to rounding, but
    differentiable only once on a GPU, so no Hessian products there.

    >>> tuple(lstm(20, 8, 12)(torch.zeros(2, 5, dtype=torch.long)).shape)
    (2, 5, 20)
    """
    with torch.device("meta"):
        model = LSTMLanguageModel(vocabulary, embedding, hidden, layers, dropout, fused)
    return initialize(model, seed, "lstm", _draw_lstm)


def _draw_lstm(layer: nn.Module, rng: torch.Generator) -> None:
    """Embedding uniform on ±0.1, LSTM weights on ±1/√H, bias 0, as Merity et al. do."""
    if isinstance(layer, nn.Embedding):
        layer.weight.uniform_(-0.1, 0.1, generator=rng)
    elif isinstance(layer, nn.LSTM):
        for parameter in layer.parameters():
            parameter.uniform_(-(layer.hidden_size**-0.5), layer.hidden_size**-0.5, generator=rng)
    elif isinstance(layer, LSTMLanguageModel):
        layer.bias.zero_()


class Attention(nn.Module):
    """Causal self-attention, softmax(QKᵀ/√d + mask)·V in each head: (B, T, D) ↦ (B, T, D)."""

    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
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
        inner = (nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.mlp = nn.Sequential(nn.LayerNorm(width), *inner)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm(x)))
        out: Tensor = x + self.drop(self.mlp(x))
        return out


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm, and a read-out with the token embedding.

    Tokens (B, T) ↦ logits (B, T, V), those at t from the tokens up to t; T ≤ ``context``.
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
        require_number(dropout, "dropout", "[0, 1)")
        require(width % heads == 0, "heads", f"divide the width {width}", repr(heads))
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, fused) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        length, most = tokens.shape[1], self.positions.num_embeddings
        if length > most:
            raise ValueError(
                f"tokens must be at most {most} long, got {length}; cut the text, or raise context"
            )
        x = self.drop(self.tokens(tokens) + self.positions.weight[:length])
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


@register_model(
    "gpt", "tokens", "small GPT", small={"context": 6, "width": 8, "heads": 2, "blocks": 2}
)
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
    initialize(model, seed, "gpt", _draw_gpt)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.3.weight")):
                weight.mul_(1.0 / math.sqrt(2 * blocks))
    return model


def _draw_gpt(layer: nn.Module, rng: torch.Generator) -> None:
    if isinstance(layer, nn.Embedding | nn.Linear):
        layer.weight.normal_(0.0, 0.02, generator=rng)
    if isinstance(layer, nn.Linear):
        layer.bias.zero_()
