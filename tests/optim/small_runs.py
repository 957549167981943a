"""A small network trained for a few steps by any optimiser, and the bits of its weights."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

X = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).sin()


def network(norm=False):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, 1)
        )


def train(model, optimizer, steps, scheduler=None):
    """The iterates after every step, flat."""
    seen = []
    for t in range(steps):
        optimizer.zero_grad()
        rows = torch.arange(4) + 4 * (t % 4)
        mse_loss(model(X[rows]), Y[rows]).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        seen.append(flat(model.parameters()))
    return torch.stack(seen)


def flat(tensors):
    return torch.cat([t.detach().ravel() for t in tensors])


def same(a, b):
    return torch.equal(flat(a), flat(b))
