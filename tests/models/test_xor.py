"""The networks of XOR and XOR detection, and the initialisation regimes."""

import math

import pytest
import torch
from torch import nn

from lambdahat.models import draw_weights, mlp, xor_network, xord_network


def test_a_filter_sees_one_pair_at_a_time():
    model = xord_network(pairs=3, width=4, activation="identity", variance=1.0)
    filters, output = model[1], model[-1]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    hidden = torch.stack(
        [x[:, 2 * k : 2 * k + 2] @ filters.weight[:, 0].T + filters.bias for k in range(3)], dim=2
    )
    torch.testing.assert_close(model(x), hidden.flatten(1) @ output.weight.T + output.bias)


@pytest.mark.parametrize("make", [xor_network, xord_network])
def test_weights_have_the_variance_asked_for_and_come_from_the_seed(make):
    before = torch.get_rng_state()
    found = {
        seed: nn.utils.parameters_to_vector(make(width=2000, variance=2.3, seed=seed).parameters())
        for seed in (0, 1)
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(found[0], found[1])
    again = nn.utils.parameters_to_vector(make(width=2000, variance=2.3, seed=0).parameters())
    assert torch.equal(found[0], again)
    assert float(found[0].detach().var()) == pytest.approx(
        2.3, rel=5 * math.sqrt(2 / len(found[0]))
    )


def test_dropout_is_an_option():
    assert any(isinstance(layer, nn.Dropout) for layer in xor_network(dropout=0.3))
    assert not any(isinstance(layer, nn.Dropout) for layer in xor_network())
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\)"):
        xor_network(dropout=1.0)


def test_regimes_of_any_model():
    model = mlp([30, 40, 10])
    assert draw_weights(model, 4.0, seed=1) is model
    assert float(nn.utils.parameters_to_vector(model.parameters()).detach().std()) == pytest.approx(
        2.0, rel=0.1
    )
    with pytest.raises(ValueError, match="variance must be a finite number above 0"):
        draw_weights(model, 0.0)
