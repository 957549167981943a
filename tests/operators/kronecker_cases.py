"""Small problems for KFAC, and the dense matrices that it must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

from lambdahat.models import mlp
from lambdahat.operators.kronecker import KFAC
from lambdahat.problem import Problem

LOSSES = {
    "cross_entropy": F.cross_entropy,
    "mse": F.mse_loss,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}


def data(
    inputs: tuple[int, ...], outputs: int, loss: str = "cross_entropy", count: int = 7
) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, *inputs, dtype=torch.float64)
    if loss == "mse":
        return x, torch.randn(count, outputs, dtype=torch.float64)
    if loss == "bce_with_logits":
        return x, (torch.rand(count, outputs) < 0.5).double()
    return x, torch.randint(outputs, (count,))


def make(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy", **options) -> Problem:
    options = {"batch_size": 3, **options}  # 7 samples: two full batches and a short one
    return Problem(model.double(), loss, (x, y), **options)


def curvature_at_output(loss: str, z: Tensor, y: Tensor) -> Tensor:
    """M of one sample, (C, C), by automatic differentiation of the loss."""
    return hessian(lambda output: LOSSES[loss](output[None], y[None]))(z)


def dense_ggn(problem: Problem, loss: str, x: Tensor, y: Tensor) -> Tensor:
    """(1/n) Σ J_iᵀ M_i J_i from per-sample Jacobians."""
    model, space = problem.model, problem.space

    def output(theta: Tensor, sample: Tensor) -> Tensor:
        return functional_call(model, space.unflatten(theta), (sample[None],))[0]

    total = torch.zeros(space.size, space.size, dtype=torch.float64)
    for sample, target in zip(x, y, strict=True):
        J = jacrev(output)(problem.vector, sample)
        total += (
            J.T @ curvature_at_output(loss, output(problem.vector, sample), target) @ J / len(x)
        )
    return total


def explicit_block(
    model: nn.Sequential, at: int, loss: str, x: Tensor, y: Tensor, group: int = 0
) -> tuple[Tensor, Tensor]:
    """(A, G) of layer ``at`` of a sequential model, in one group, from Jacobians of the layer and
    of what follows it.

    The inputs at an output position are the derivative of that output by the weight's row, so that
    nothing is unfolded.
    """
    layer, before, after = model[at], model[:at], model[at + 1 :]
    groups = getattr(layer, "groups", 1)
    rows = range(group * len(layer.weight) // groups, (group + 1) * len(layer.weight) // groups)
    axis = -1 if isinstance(layer, nn.Linear) else 0
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    for sample, target in zip(x, y, strict=True):
        h = before(sample[None]).detach()
        named = dict(layer.named_parameters())
        out = layer(h)[0].detach()

        def row_zero(parameters, h=h):
            return functional_call(layer, parameters, (h,))[0].movedim(axis, 0)[rows[0]].reshape(-1)

        jacobian = jacrev(row_zero)(named)
        parts = [jacobian["weight"][:, rows[0]].flatten(1)]
        if "bias" in named:
            parts.append(jacobian["bias"][:, rows[0], None])
        a = torch.cat(parts, dim=1)  # (R, n)
        J = jacrev(lambda out: after(out[None])[0])(out)  # (C, *out)
        M = curvature_at_output(loss, after(out[None])[0], target)
        # (C, m, R)
        J = J.movedim(axis if axis == -1 else 1, 1)[:, list(rows)].reshape(len(J), len(rows), -1)
        A = A + a.T @ a / len(a) / len(x)
        G = G + torch.einsum("cmr,cd,dor->mo", J, M, J) / len(x)
    return A.detach().contiguous(), G.detach().contiguous()


def relative(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


def vectors(problem: Problem, columns: int = 5) -> Tensor:
    return torch.randn(problem.num_parameters, columns, dtype=torch.float64)


def layer_matrix(K: KFAC, names: list[str]) -> Tensor:
    """K's own submatrix of a layer, from products, in the order of [W | b] by rows."""
    whole = K.dense()
    space = K.space
    parts = [
        torch.arange(s.start, s.stop).reshape(space.shapes[space.names.index(n)][0], -1)
        for n, s in space.slices.items()
        if n in names
    ]
    order = torch.cat(parts, dim=1).reshape(-1)
    return whole[order][:, order]


MODELS = {
    "mlp": (lambda: mlp([4, 5, 3], "tanh"), (4,), (0, 2)),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        (0, 2),
    ),
    "sequence": (
        lambda: nn.Sequential(
            nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2), nn.Flatten(), nn.Linear(10, 3)
        ),
        (5, 4),
        (0, 2, 4),
    ),
    "conv1d": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(9, 3),
        ),
        (2, 8),
        (0, 3),
    ),
    "conv2d": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(inplace=True),
            nn.Conv2d(3, 2, 2, bias=False, padding="same"),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (2, 5, 4),
        (0, 2, 6),
    ),
    "circular": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 3)
        ),
        (1, 4, 4),
        (0, 2),
    ),
    "conv3d": (
        lambda: nn.Sequential(
            nn.Conv3d(1, 2, 2, dilation=(1, 2, 1)), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        (1, 3, 4, 3),
        (0, 3),
    ),
}


class Mixed(nn.Module):
    """An embedding, a norm, a loose parameter, a convolution and linear layers; ``tied`` shares
    a weight.
    """

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.scale = nn.Parameter(torch.randn(4))
        self.mix = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens)) * self.scale
        h = self.mix(h.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.hidden(h)).mean(dim=1))


def mixed_problem(tied: bool) -> tuple[Problem, Tensor, Tensor]:
    x, y = torch.randint(6, (7, 5)), torch.randint(6, (7,))
    return make(Mixed(tied), x, y), x, y
