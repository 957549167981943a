"""Recurrent layers: a problem keeps them from cuDNN, whose kernels cannot be differentiated as
curvature asks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.problem.network import private_copy


class Spy(nn.LSTM):
    """Notes whether cuDNN is allowed while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.backends.cudnn.enabled
        if len(x) == 0:
            raise RuntimeError("nothing to read")
        return super().forward(x)[0]


def test_cudnn_is_off_inside_a_recurrent_layer_and_back_after_it_even_if_it_fails() -> None:
    layer = private_copy(Spy(2, 3), "eval")
    before = torch.backends.cudnn.enabled
    layer(torch.zeros(4, 1, 2))
    assert layer.seen is False
    assert torch.backends.cudnn.enabled is before
    with pytest.raises(RuntimeError, match="nothing to read"):
        layer(torch.zeros(0, 1, 2))
    assert torch.backends.cudnn.enabled is before


def test_the_users_own_model_keeps_cudnn() -> None:
    model = Spy(2, 3)
    private_copy(model, "eval")
    model(torch.zeros(4, 1, 2))
    assert model.seen is torch.backends.cudnn.enabled


def test_a_copy_of_a_copy_puts_cudnn_back_too() -> None:
    before = torch.backends.cudnn.enabled
    private_copy(private_copy(Spy(2, 3), "eval"), "eval")(torch.zeros(4, 1, 2))
    assert torch.backends.cudnn.enabled is before


class Reader(nn.Module):
    """The last state of an LSTM, read out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


def products(device: str) -> tuple[Tensor, Tensor]:
    """Hv of an LSTM, and the same by differences of gradients."""
    torch.manual_seed(0)
    model = Reader().double().to(device)
    x = torch.randn(6, 5, 2, dtype=torch.double).to(device)
    problem = Problem(model, "cross_entropy", (x, torch.tensor([0, 1, 1, 0, 1, 0], device=device)))
    v = torch.randn(problem.num_parameters, dtype=torch.double).to(device)
    ahead, behind = (problem.at(problem.vector + step * v).gradient() for step in (1e-5, -1e-5))
    return hessian(problem) @ v, (ahead - behind) / 2e-5


def test_an_lstm_has_a_hessian() -> None:
    exact, differences = products("cpu")
    torch.testing.assert_close(exact, differences, rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_lstm_has_a_hessian_on_a_gpu() -> None:
    exact, differences = products("cuda")
    torch.testing.assert_close(exact, differences, rtol=1e-6, atol=1e-8)
