"""Networks: shapes, and weights from the seed alone."""

import pytest
import torch

from lambdahat.models import lenet5, mlp

BUILDERS = {"mlp": lambda seed: mlp([64, 32, 10], seed=seed), "lenet5": lambda seed: lenet5(seed=seed)}


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("name", BUILDERS)
def test_weights_come_from_the_seed_and_leave_the_global_generator_alone(name):
    before = torch.random.get_rng_state()
    first, again, other = flat(BUILDERS[name](0)), flat(BUILDERS[name](0)), flat(BUILDERS[name](1))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()


def test_mlp_layers_and_scale():
    model = mlp([64, 32, 10], activation="tanh")
    assert [type(layer).__name__ for layer in model] == ["Linear", "Tanh", "Linear"]
    assert tuple(model(torch.zeros(3, 64)).shape) == (3, 10)
    bound = 64**-0.5
    largest = float(model[0].weight.detach().abs().max())
    assert 0.99 * bound < largest <= bound


def test_lenet5_size():
    assert flat(lenet5()).numel() == 61_706


@pytest.mark.parametrize(
    ("sizes", "activation", "message"),
    [([4], "relu", "sizes must name"), ([4, 0], "relu", "at least 1"), ([4, 2], "step", "one of 'relu'")],
)
def test_mlp_refuses(sizes, activation, message):
    with pytest.raises(ValueError, match=message):
        mlp(sizes, activation)
