"""What must not mislead the closed forms of trace and diagonal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lambdahat as lh


@pytest.mark.parametrize("name", ["flip", "turn"])
def test_hooks_that_keep_lengths_do_not_mislead_the_diagonal(name):
    """A permutation or rotation of what a layer gives changes no sum of squares."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double())[0]
    change = {"flip": lambda z: z.flip(-1), "turn": lambda z: z @ turn}[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda layer, given, left: change(left))
    G = lh.ggn(lh.Problem(model, "mse", (torch.randn(7, 5).double(), torch.randn(7, 3).double())))
    torch.testing.assert_close(G.known_diagonal(), G.dense().diagonal(), rtol=1e-10, atol=1e-12)


def test_one_class_has_no_curvature():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = (torch.randn(7, 5).double(), torch.zeros(7, dtype=torch.long))
    assert float(lh.trace(lh.hessian(lh.Problem(model, "cross_entropy", data)))) == pytest.approx(0.0, abs=1e-12)
