"""Averages of iterates: exact variances on a noisy quadratic, whose iterates they hold, batch
norm, resuming.
"""

import copy
import math

import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.optim import SWA, IterateAverage, refresh_batch_norm

RATE, CURVATURE, NOISE, REPLICAS = 0.4, 1.5, 0.7, 100_000
PHI = 1 - RATE * CURVATURE
FINAL = RATE * NOISE**2 / (CURVATURE * (2 - RATE * CURVATURE))


class Points(nn.Module):
    """Many independent copies of one parameter."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(REPLICAS, dtype=torch.float64))


def descend(model, optimizer, steps, rng, after=lambda: None):
    for _ in range(steps):
        noise = torch.randn(REPLICAS, generator=rng, dtype=torch.float64)
        model.x.grad = CURVATURE * model.x.detach() + NOISE * noise
        optimizer.step()
        after()


def assert_variance(found, expected):
    """A variance over normal replicas has the standard error V·√(2/R)."""
    value = float(found.square().mean())
    assert abs(value - expected) < 4 * expected * math.sqrt(2 / REPLICAS), (value, expected)


def mean_of(n):
    """Variance of the mean of n stationary iterates: σ²/(λ²n), with the end effect of a finite
    n.
    """
    return NOISE**2 / (CURVATURE**2 * n) * (1 - 2 * PHI * (1 - PHI**n) / (n * (1 - PHI**2)))


def test_variances_on_a_noisy_quadratic():
    model, rng = Points(), generator(0, "quadratic")
    optimizer = SWA(model.parameters(), lr=RATE, momentum=0.0)
    descend(model, optimizer, 40, rng)
    assert_variance(model.x.detach(), FINAL)
    kept, ema = (
        IterateAverage(model, unit="step"),
        IterateAverage(model, "ema", unit="step", decay=0.8),
    )

    def update():
        kept.update()
        ema.update()

    optimizer.param_groups[0]["average_start"] = 41
    descend(model, optimizer, 60, rng, update)
    assert_variance(optimizer.averaged_parameters[0], mean_of(60))
    torch.testing.assert_close(kept.model.x.detach(), optimizer.averaged_parameters[0])
    rho = 0.8  # 0.8^60 of the start is left: 1.5e-6
    assert_variance(
        ema.model.x, FINAL * (1 - rho) * (1 + rho * PHI) / ((1 + rho) * (1 - rho * PHI))
    )
    assert_variance(model.x.detach(), FINAL)
    assert mean_of(10**6) * 10**6 == pytest.approx(NOISE**2 / CURVATURE**2, rel=1e-5)


def network():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def wander(model, average, calls, seed=0):
    """Random iterates; those after each call."""
    rng, seen = torch.Generator().manual_seed(seed), []
    for _ in range(calls):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=rng))
        average.update()
        seen.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    return torch.stack(seen)


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("start", "every", "taken"), [(1, 1, range(1, 11)), (4, 3, (4, 7, 10)), (10, 2, (10,))]
)
def test_the_mean_is_that_of_the_iterates_named(start, every, taken):
    model = network()
    average = IterateAverage(model, start=start, every=every)
    seen = wander(model, average, 10)
    assert average.count == len(taken)
    torch.testing.assert_close(
        vector(average.model), seen[[t - 1 for t in taken]].mean(0), rtol=1e-5, atol=1e-6
    )


def test_the_moving_average_by_hand():
    model = network()
    average = IterateAverage(model, "ema", start=2, decay=0.7)
    seen = wander(model, average, 6)
    expected = seen[1]
    for theta in seen[2:]:
        expected = 0.7 * expected + 0.3 * theta
    torch.testing.assert_close(vector(average.model), expected)


def test_before_the_first_average_the_model_is_the_live_one():
    model = network()
    average = IterateAverage(model, start=5)
    wander(model, average, 4)
    assert average.model is model
    seen = wander(model, average, 1)
    assert average.model is not model
    assert torch.equal(vector(average.model), seen[0])  # an average of one iterate is the iterate


def test_batch_norm_is_renewed_on_all_or_a_sample():
    model = network()
    average = IterateAverage(model)
    wander(model, average, 3)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    average.refresh_batch_norm([(x[:20], None), (x[20:], None)])
    layer, hidden = average.model[1], average.model[0](x)
    torch.testing.assert_close(layer.running_mean, hidden.mean(0).detach())
    average.refresh_batch_norm(x.split(20), limit=1)
    torch.testing.assert_close(layer.running_mean, hidden[:20].mean(0).detach())
    assert layer.momentum == 0.1
    assert torch.equal(model[1].running_mean, torch.zeros(4))  # the live model keeps its own
    refresh_batch_norm(model, [x])
    torch.testing.assert_close(model[1].running_mean, model[0](x).mean(0).detach())


@pytest.mark.parametrize("kind", ["average", "ema"])
def test_resuming_has_the_same_bits(kind):
    def begin():
        model = network()
        return model, IterateAverage(model, kind, start=2, every=2)

    model, average = begin()
    wander(model, average, 5)
    weights, kept = copy.deepcopy(model.state_dict()), copy.deepcopy(average.state_dict())
    wander(model, average, 4, seed=9)
    twin, resumed = begin()
    twin.load_state_dict(weights)
    resumed.load_state_dict(kept)
    wander(twin, resumed, 4, seed=9)
    assert average.count == resumed.count == 4
    assert torch.equal(vector(average.model), vector(resumed.model))
