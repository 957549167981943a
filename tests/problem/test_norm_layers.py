"""A problem whose model has norm layers: the mode it holds them in, and their statistics."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lambdahat.problem import Problem
from tests.small_problems import C, N, X, Y, agrees, batchnorm, plain, seeded


def test_eval_uses_running_statistics_and_switches_dropout_off():
    model = batchnorm()
    agrees(
        Problem(model, "cross_entropy", (X, Y), batch_size=4),
        plain(copy.deepcopy(model).eval(), F.cross_entropy, X, Y),
    )


def test_train_uses_the_statistics_of_each_fixed_batch():
    model = batchnorm()
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4, norm="train")
    by_hand = copy.deepcopy(model)
    by_hand[3].eval()
    total, gradient = 0.0, torch.zeros(problem.num_parameters, dtype=torch.float64)
    for start in (0, 4, 8):
        x, y = X[start : start + 4], Y[start : start + 4]
        value, part = plain(by_hand, F.cross_entropy, x, y)
        total += len(x) / N * value
        gradient += len(x) / N * part
    for _ in range(2):  # nothing drifts from call to call
        agrees(problem, (total, gradient))


def test_frozen_holds_the_layers_own_parameters():
    model = batchnorm()
    problem = Problem(model, "cross_entropy", (X, Y), norm="frozen")
    assert problem.space.names == ("0.weight", "4.weight", "4.bias")
    whole = Problem(model, "cross_entropy", (X, Y))
    assert problem.loss() == whole.loss()
    assert torch.allclose(
        problem.gradient(), whole.gradient()[whole.space.indices(problem.space.names)]
    )


def test_refreshed_statistics_are_those_of_update_bn():
    model = batchnorm()
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    problem = Problem(model, "cross_entropy", loader).refresh_statistics()
    twin = copy.deepcopy(model)
    torch.optim.swa_utils.update_bn(loader, twin)
    agrees(problem, plain(twin.eval(), F.cross_entropy, X, Y))
    constants = problem._evaluate.constants()
    for name, buffer in twin.named_buffers():
        assert torch.allclose(constants[name].double(), buffer.double(), rtol=1e-12), name


def test_refresh_needs_a_model():
    with pytest.raises(
        ValueError, match="the problem must have a model, got one made by from_function"
    ):
        Problem.from_function(lambda p: p["a"] ** 2, {"a": torch.ones(())}).refresh_statistics()


def test_instance_norm_needs_no_statistics():
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 2), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(6, C)
        )
    )
    agrees(
        Problem(model, "cross_entropy", (X[:, None], Y), batch_size=4),
        plain(model, F.cross_entropy, X[:, None], Y),
    )


def test_statistics_follow_the_model_in_another_precision_too():
    model = batchnorm().float()
    problem = Problem(model, "cross_entropy", (X, Y), dtype=torch.float64)
    held = problem.at(problem.vector)
    before = problem.loss()
    model(X.float() + 3.0)  # in train mode: new statistics
    assert (
        problem.loss()
        == Problem(model, "cross_entropy", (X, Y), dtype=torch.float64).loss()
        != before
    )
    assert held.loss() == before


class Centred(nn.Module):
    """It puts another tensor in place of a buffer in every pass in train mode."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(X.shape[1], 1)
        self.register_buffer("mean", torch.zeros(X.shape[1]))

    def forward(self, x):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.inner(x - self.mean)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_buffers_that_a_pass_replaces_follow_the_model(dtype):
    model = Centred()
    data = X.float(), torch.zeros(len(X), 1)
    problem = Problem(model, "mse", data, dtype=dtype)
    before = problem.loss()
    model(data[0] + 3.0)
    assert model.mean.any()
    for each in (problem, pickle.loads(pickle.dumps(problem))):
        assert each.loss() == Problem(model, "mse", data, dtype=dtype).loss()
        assert each.loss() != before


def test_other_data_with_batch_statistics_need_a_batch_size():
    problem = Problem(batchnorm(), "cross_entropy", (X, Y), norm="train", batch_size=4)
    with pytest.raises(ValueError, match='batch_size must be given with norm="train"'):
        problem.subsample(6)
    with pytest.raises(ValueError, match='batch_size must be given with norm="train"'):
        problem.on((X, Y))
    assert (
        problem.subsample(8, batch_size=4).batches.sizes
        == problem.on((X[:8], Y[:8]), 4).batches.sizes
        == [4, 4]
    )
