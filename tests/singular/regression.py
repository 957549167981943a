"""Models whose posterior is known: linear regression with unit noise in closed form, and a coin by
quadrature.

The prior is that of the localization: N(w*, γ⁻¹) around the parameters w* of the problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.rng import generator
from lambdahat.problem import Problem

LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Regression:
    """y = xᵀw + ξ with ξ ~ N(0, 1): loss ½(y − xᵀw)² + ½ln 2π of each sample."""

    x: Tensor
    y: Tensor
    centre: Tensor
    truth: Tensor
    gamma: float = 1.0
    beta: float = 1.0

    @property
    def problem(self) -> Problem:
        def loss(parameters, batch):
            return (0.5 * (batch[1] - batch[0] @ parameters["w"]).square()).mean() + LOG_2PI / 2

        return Problem.from_function(loss, {"w": self.centre}, (self.x, self.y))

    @property
    def posterior(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance at inverse temperature β."""
        precision = self.beta * self.x.T @ self.x + self.gamma * torch.eye(
            self.x.shape[1], dtype=self.x.dtype
        )
        covariance = torch.linalg.inv(precision)
        return covariance @ (self.beta * self.x.T @ self.y + self.gamma * self.centre), covariance

    def by_sample(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """−ln E[p], E[ℓ] and Var[ℓ] of each sample: y − xᵀw is normal with mean r and variance
        s.
        """
        mean, covariance = self.posterior
        r, s = y - x @ mean, ((x @ covariance) * x).sum(1)
        bayes = LOG_2PI / 2 + 0.5 * torch.log1p(s) + 0.5 * r**2 / (1 + s)
        return bayes, LOG_2PI / 2 + 0.5 * (r**2 + s), r**2 * s + s**2 / 2

    def free_energy(self) -> float:
        """−ln ∫ p(y|w) φ(w) dw: y is normal around x·w* with covariance I + xxᵀ/γ."""
        covariance = torch.eye(len(self.y), dtype=self.x.dtype) + self.x @ self.x.T / self.gamma
        r = self.y - self.x @ self.centre
        square = r @ torch.linalg.solve(covariance, r)
        return float(0.5 * torch.logdet(covariance) + 0.5 * square + len(r) * LOG_2PI / 2)

    def energy(self, beta: float) -> float:
        """E^β[n·L_n]."""
        return float(replace(self, beta=beta).by_sample(self.x, self.y)[1].sum())

    def more(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """New samples of the truth."""
        return _samples(self.truth, count, seed)


def regression(samples: int = 30, size: int = 3, gamma: float = 1.0, seed: int = 0) -> Regression:
    """Regression of normal inputs, with the parameters at the least squares."""
    truth = torch.randn(size, generator=generator(seed, "truth"), dtype=torch.float64)
    x, y = _samples(truth, samples, seed)
    return Regression(x, y, torch.linalg.lstsq(x, y).solution, truth, gamma)


def _samples(truth: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = generator(seed, "samples")
    x = torch.randn(count, len(truth), generator=rng, dtype=torch.float64)
    return x, x @ truth + torch.randn(count, generator=rng, dtype=torch.float64)


@dataclass(frozen=True)
class Coin:
    """Tosses of a coin, ln p(1)/p(0) = w: not Gaussian, one parameter; posterior by quadrature."""

    heads: int = 14
    tosses: int = 20
    gamma: float = 1.0

    @property
    def outcomes(self) -> Tensor:
        return (torch.arange(self.tosses) < self.heads).double()

    @property
    def centre(self) -> float:
        return math.log(self.heads / (self.tosses - self.heads))

    @property
    def problem(self) -> Problem:
        def loss(parameters, batch):
            return torch.nn.functional.softplus((1 - 2 * batch[0]) * parameters["w"]).mean()

        return Problem.from_function(
            loss, {"w": torch.tensor([self.centre]).double()}, (self.outcomes,)
        )

    def mean(self, function, nbeta: float) -> float:
        """E[f(w)] at nβ."""
        w = np.linspace(self.centre - 12, self.centre + 12, 20_001)
        density = np.exp(
            -nbeta * (self.loss(w) - self.loss(self.centre))
            - self.gamma / 2 * (w - self.centre) ** 2
        )
        return float((function(w) * density).sum() / density.sum())

    def loss(self, w):
        share = self.heads / self.tosses
        return share * np.logaddexp(0, -w) + (1 - share) * np.logaddexp(0, w)
