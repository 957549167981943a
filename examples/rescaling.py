"""The same function, other weights: λ̂ of a ReLU pair (a·W₁, W₂/a), with the localization left and taken along."""

from __future__ import annotations

import torch
from torch import nn

import lambdahat as lh

torch.manual_seed(0)
x = torch.randn(60, 2, dtype=torch.float64)
y = torch.tanh(x[:, :1] * x[:, 1:]) + 0.3 * torch.randn(60, 1, dtype=torch.float64)
model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1, bias=False)).double()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2000, tolerance_grad=1e-10, tolerance_change=1e-14)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss


optimizer.step(closure)
settings = {"draws": 150}
plain = lh.llc(lh.Problem(model, "mse", (x, y)), localization=1.0, **settings)
scale = 4.0
with torch.no_grad():
    model[0].weight.mul_(scale)
    model[0].bias.mul_(scale)
    model[2].weight.div_(scale)
scaled = lh.Problem(model, "mse", (x, y))
along = lh.llc(scaled, localization={"0": 1 / scale**2, "2": scale**2}, **settings)
left = lh.llc(scaled, localization=1.0, **settings)
print(f"as trained              {plain}")
print(f"rescaled, γ taken along {along}")
print(f"rescaled, γ left        {left}")
