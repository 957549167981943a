"""The learning-rate rule at a point: λ₁ of a batch, predicted and measured, and the rate that
each allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.storage import Result
from lambdahat.estimators import eigenpairs, variance
from lambdahat.experiments.minibatch.rate_subjects import Ground
from lambdahat.experiments.minibatch.stacked_networks import MOMENTUM, Cells, Settings
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.randommatrix import (
    DirectionalVariance,
    batch_eigenpairs,
    directional_variance,
    effective_batch,
    predict,
    stability_limit,
)
from lambdahat.results import Eigenpairs, Estimate

Noise = Estimate | DirectionalVariance

BATCHES = 5
PAIRS = 5
VARIANCE_SAMPLES = 1000
TOL = 1e-2
MODELS = ("additive", "directional")
HELD = {"sgd": 0.0, "momentum": MOMENTUM}  # the momentum of the optimisers that the rule speaks of


@dataclass(frozen=True)
class RateRule(Result):
    """λ₁ of all data at a point, and of batches: ``predicted`` by model (sizes,), ``measured``
    (sizes, batches).
    """

    network: str
    point: str
    samples: int
    batch_sizes: tuple[int, ...]
    full: float
    predicted: dict[str, Tensor]
    measured: Tensor

    def rates(self, optimizer: str, by: str = "measured") -> Tensor:
        """The largest stable rates (sizes,) that the rule allows, from λ₁ "measured" or as a model
        predicts it.

        2/λ₁ of the batch for SGD (Eq. 5.34, spectral thesis); with momentum the noise counts for
        more, see ``randommatrix.stability_limit``.
        """
        found = [
            stability_limit(self.full, float(value), HELD[optimizer]) for value in self.excess(by)
        ]
        return torch.tensor(found, dtype=torch.float64)

    def excess(self, by: str = "measured") -> Tensor:
        """What a batch adds to λ₁ (sizes,), as the batches show it or as a model predicts it; no
        less than 0.
        """
        batch = self.measured.mean(1) if by == "measured" else self.predicted[by]
        return (batch - self.full).clamp_min(0.0)

    def dampings(self, rate: float = 1.0, by: str = "measured") -> Tensor:
        """The least damping (sizes,) of a second-order method at a rate: α/2 times what a batch
        adds to λ₁.

        By the model "additive" a batch adds Pσ²/(bλ₁), and this is Eq. 5.36 of the spectral thesis
        with its units mended, δ = αPσ²/(2bλ₁). By "directional" it is ατ²/(2bλ₁) to first order.
        The "measured" one is no equation of the thesis.
        """
        return 0.5 * rate * self.excess(by)

    def turning(self, optimizer: str) -> float:
        """The batch size at which noise halves the rate, from what single batches show.

        The excess of λ₁ over that of all data is c/b: c is the slope of least squares over 1/b,
        batch sizes weighted by the spread of its batches and by 1 % of λ₁.
        """
        inverse = torch.tensor(
            [1 / effective_batch(size, self.samples) for size in self.batch_sizes]
        ).double()
        excess = self.measured.mean(1) - self.full
        weights = (
            self.measured.var(1) / self.measured.shape[1] + (0.01 * self.full) ** 2
        ).reciprocal()
        slope = float((weights * inverse * excess).sum() / (weights * inverse.square()).sum())
        momentum = HELD[optimizer]
        return max(slope, 0.0) / self.full * (1 + momentum) / (1 - momentum)


def rule_at(ground: Ground, problem: Problem, point: str, seed: int) -> RateRule:
    """Everything the rule needs, at the parameters of a problem over the ground's training
    samples.
    """
    pairs = eigenpairs(hessian(problem), PAIRS, tol=1e-3, seed=seed)
    samples = min(VARIANCE_SAMPLES, problem.num_samples)
    noise: dict[str, Noise] = {
        "additive": variance(problem, probes=4, seed=seed, samples=samples).hessian_variance,
        "directional": directional_variance(problem, pairs, probes=1, samples=samples, seed=seed),
    }
    sizes = ground.subject.batch_sizes
    predicted = {
        model: [_predicted(problem, pairs, noise[model], size, model) for size in sizes]
        for model in MODELS
    }
    shown = [
        batch_eigenpairs(problem, size, BATCHES, seed=seed, tol=TOL).largest[:, 0] for size in sizes
    ]
    return RateRule(
        ground.subject.network,
        point,
        problem.num_samples,
        sizes,
        float(pairs.values[0]),
        {model: torch.tensor(values, dtype=torch.float64) for model, values in predicted.items()},
        torch.stack([torch.as_tensor(values, dtype=torch.float64) for values in shown]),
    )


def start_of(ground: Ground) -> Problem:
    """The first seed's network at its start."""
    return Problem(ground.models[0], "cross_entropy", ground.train)


def trained_from(ground: Ground, rate: float, seed: int) -> Problem:
    """The first seed's network after the subject's steps of SGD at a rate, on batches of the
    reference size.
    """
    subject = ground.subject
    cells = Cells(ground.models[:1], ground.train, Settings("sgd", torch.tensor([[rate]])))
    cells.train(subject.reference, subject.steps, seed, f"{subject.network}, a trained point")
    return start_of(ground).at({name: tensor[0, 0] for name, tensor in cells.parameters.items()})


def _predicted(problem: Problem, pairs: Eigenpairs, noise: Noise, size: int, model: str) -> float:
    return float(predict(pairs, noise, size, population=problem.num_samples, model=model).largest)
