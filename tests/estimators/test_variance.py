"""Variance over samples, against per-sample Hessians in full."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lambdahat._core.progress import progress
from lambdahat._core.rng import generator
from lambdahat.estimators import _variance as variances
from lambdahat.estimators import variance
from lambdahat.operators import ggn
from lambdahat.problem import Problem
from lambdahat.results import Variance
from tests.cases import NETWORKS, classifier, network, quadratic
from tests.oracles import per_sample


def element_variance(stack: Tensor) -> float:
    """Mean over the elements of their variance over samples, with 1/n."""
    return float(stack.var(dim=0, correction=0).mean())


def sample_ggns(problem: Problem) -> Tensor:
    """J_iᵀ (diag p − ppᵀ) J_i of every sample, (n, P, P)."""
    theta, out = problem.vector, []
    for batch in problem.batches:
        jacobian = torch.func.jacrev(lambda t, b=batch: problem.output(problem.named(t), b))(theta)
        p = problem.output(problem.named(theta), batch).softmax(dim=1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        out.append(jacobian.transpose(1, 2) @ middle @ jacobian)
    return torch.cat(out)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_with_a_probe_per_parameter_everything_is_exact(activation: str) -> None:
    problem = classifier((3, 4, 2), activation, samples=8, batch_size=5)
    gradients, hessians = per_sample(
        problem, torch.eye(problem.num_parameters, dtype=torch.float64)
    )
    ggns = sample_ggns(problem)
    found = variance(problem, probes=problem.num_parameters)
    expected = {
        "gradient_mean_norm": float(gradients.mean(dim=0).norm()),
        "gradient_variance": element_variance(gradients),
        "hessian_mean": float(hessians.mean(dim=0).diagonal().mean()),
        "hessian_variance": element_variance(hessians),
        "ggn_mean": float(ggns.mean(dim=0).diagonal().mean()),
        "ggn_variance": element_variance(ggns),
        "parameter_l2": float(problem.vector.norm()),
        "parameter_linf": float(problem.vector.abs().max()),
    }
    for name, value in expected.items():
        estimate = getattr(found, name)
        assert float(estimate) == pytest.approx(value, rel=1e-11), name
        assert estimate.stderr == 0


@pytest.mark.parametrize("name", NETWORKS)
def test_each_probe_measures_the_variance_of_its_products(name: str) -> None:
    problem = network(name, samples=5)
    rng = generator(0, "variance", 0)  # the first probe, a unit vector
    draw = torch.randn(problem.num_parameters, dtype=torch.float64, generator=rng)
    v = draw / draw.norm()
    gradients, products = (found.squeeze(-1) for found in per_sample(problem, v[:, None]))
    spread = float(products.square().sum(dim=1).mean() - products.mean(dim=0).square().sum())
    found = variance(problem, probes=1)
    assert float(found.hessian_variance) == pytest.approx(
        spread / problem.num_parameters, rel=1e-10
    )
    assert float(found.hessian_mean) == pytest.approx(float(v @ products.mean(dim=0)), rel=1e-10)
    assert float(found.gradient_variance) == pytest.approx(element_variance(gradients), rel=1e-10)
    assert found.ggn_mean is not None
    assert float(found.ggn_mean) == pytest.approx(float(v @ (ggn(problem) @ v)), rel=1e-10)
    assert math.isnan(float(found.hessian_variance.stderr))  # one probe has no standard error


@pytest.mark.parametrize("samples", [None, 6])
def test_estimates_are_unbiased_and_their_errors_true(samples: int | None) -> None:
    problem = classifier((2, 3, 2), "tanh", samples=10, batch_size=None)
    gradients, hessians = per_sample(
        problem, torch.eye(problem.num_parameters, dtype=torch.float64)
    )
    truth = {
        "hessian_variance": element_variance(hessians),
        "gradient_variance": element_variance(gradients),
    }
    runs = [variance(problem, probes=4, seed=seed, samples=samples) for seed in range(30)]
    for name, value in truth.items():
        if samples is None and name == "gradient_variance":
            assert all(getattr(run, name).stderr == 0 for run in runs)
            continue
        found = torch.tensor([float(getattr(run, name)) for run in runs])
        reported = torch.tensor([float(getattr(run, name).stderr) for run in runs])
        error = float(found.std() / math.sqrt(len(runs)))
        assert abs(float(found.mean()) - value) < 3.5 * error, name
        assert float(reported.square().mean().sqrt()) == pytest.approx(
            float(found.std()), rel=0.3
        ), name
        covered = sum(
            low <= value <= high for low, high in (getattr(run, name).interval() for run in runs)
        )
        assert 25 <= covered <= 30, name


def test_errors_are_wider_where_one_probe_shows_most_of_the_variance() -> None:
    """The standard error of the mean, times 1 + 2g²/n for readings of skewness g."""
    readings = torch.tensor([1.0] * 7 + [9.0], dtype=torch.float64)
    found = variances._estimate(list(readings), exact=False)
    skewness = 6 / math.sqrt(7)  # of 7 equal numbers and another
    plain = float(readings.std()) / math.sqrt(8)
    assert float(found.stderr) == pytest.approx(plain * (1 + 2 * skewness**2 / 8), rel=1e-12)


@pytest.mark.parametrize("kinked", [False, True])
@pytest.mark.parametrize("samples", [200, 1500])
def test_errors_hold_the_rounding_of_a_model_in_float32(samples: int, kinked: bool) -> None:
    """Inputs of some samples are large and cancel; the variance of gradients has no other error."""
    for seed in range(4):
        torch.manual_seed(seed)
        first, last = nn.Linear(12, 16), nn.Linear(16, 4)
        x, y = torch.randn(samples, 12), torch.randint(0, 4, (samples,))
        with torch.no_grad():
            x[-75:] += 1e5
            first.weight[:, 0] = -first.weight[:, 1:].sum(dim=1)
        model = nn.Sequential(first, nn.ReLU() if kinked else nn.Tanh(), last)
        found, truth = (
            variance(Problem(model, "cross_entropy", (x, y), dtype=dtype), probes=2)
            for dtype in (torch.float32, torch.float64)
        )
        for name in ("gradient_variance", "gradient_mean_norm"):
            value, stderr = (getattr(getattr(found, name), part) for part in ("value", "stderr"))
            exact = float(getattr(truth, name))
            assert abs(value - exact) <= 4 * stderr, name
            assert stderr <= 100 * max(abs(value - exact), 1e-7 * exact), name
            assert getattr(truth, name).stderr == 0, name


def test_batch_size_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = variance(classifier(batch_size=None), probes=2)
    monkeypatch.setattr(variances, "CHUNK_SAMPLES", 3)
    pieces = variance(classifier(batch_size=7), probes=2)
    for name in (
        "gradient_variance",
        "hessian_variance",
        "ggn_variance",
        "hessian_mean",
        "ggn_mean",
    ):
        assert float(getattr(pieces, name)) == pytest.approx(
            float(getattr(whole, name)), rel=1e-12
        ), name


def test_a_model_that_vmap_cannot_take_goes_sample_by_sample() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            return out if x.sum().item() == math.inf else out.tanh()

    x, y = (
        torch.randn(6, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 1, 0, 1, 0]),
    )
    problem = Problem(Branching(), "cross_entropy", (x, y), dtype=torch.float64)
    gradients, hessians = per_sample(
        problem, torch.eye(problem.num_parameters, dtype=torch.float64)
    )
    found = variance(problem, probes=problem.num_parameters)
    assert float(found.hessian_variance) == pytest.approx(element_variance(hessians), rel=1e-10)
    assert float(found.gradient_variance) == pytest.approx(element_variance(gradients), rel=1e-10)


def test_functions_of_a_batch_have_no_gauss_newton_matrix() -> None:
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [3.0, 0.0]], dtype=torch.float64)

    def loss(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        return (batch @ params["w"]).square().mean()

    problem = Problem.from_function(loss, {"w": torch.ones(2, dtype=torch.float64)}, x)
    found = variance(problem, probes=2)
    assert found.ggn_variance is None
    assert float(found.hessian_variance) == pytest.approx(
        element_variance(2 * x[:, :, None] * x[:, None, :]), rel=1e-12
    )
    still = variance(
        Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.ones(3)}, num_samples=4),
        probes=2,
    )
    assert float(still.hessian_variance) == 0 == float(still.gradient_variance)


def test_refusals_name_the_cause() -> None:
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    normed = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="batch statistics couple"):
        variance(Problem(normed, "cross_entropy", (x, y), norm="train", batch_size=8))
    with pytest.raises(ValueError, match="two samples"):
        variance(quadratic(torch.eye(2, dtype=torch.float64)))
    with pytest.raises(ValueError, match="samples must be an integer in"):
        variance(classifier(), samples=1)
    with pytest.raises(ValueError, match="not −100"):
        variance(Problem(nn.Linear(4, 3), "cross_entropy", (x, y.where(y > 0, -100))))
    weighted, late = (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 5.0])),
        torch.cat([torch.zeros(8).long(), y]),
    )
    with pytest.raises(ValueError, match="of one weight, in every sample, got 1 to 5"):
        variance(Problem(nn.Linear(4, 3), weighted, (torch.cat([x, x]), late)))

    def pairs(params: dict[str, Tensor], batch: Tensor) -> Tensor:
        return ((batch @ params["w"]).mean() - 1).square()

    with pytest.raises(ValueError, match="mean of its samples' own losses"):
        variance(Problem.from_function(pairs, {"w": torch.ones(4)}, x))


def test_result_saves_tables_and_reports(tmp_path: object) -> None:
    seen: list[tuple[str, int, int | None]] = []
    with progress(lambda *args: seen.append(args)):
        found = variance(classifier(), probes=3)
    assert seen == [("variance", 1, 3), ("variance", 2, 3), ("variance", 3, 3)]
    # gradients of samples, Hessian and Gauss–Newton products, the mean gradient
    assert found.cost == 1 + 3 + 3 + 1
    assert Variance.load(found.save(f"{tmp_path}/variance")) == found
