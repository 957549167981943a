"""Chains at a temperature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lambdahat.problem import Problem
from lambdahat.results import Chains
from lambdahat.sampling import hmc, sample
from lambdahat.sampling.kernels import Localization
from lambdahat.sampling.runners import Observable


def tempered(
    problem: Problem,
    nbeta: float,
    *,
    chains: int = 4,
    seed: int = 0,
    draws: int | None = None,
    burn_in: int | None = None,
    localization: Localization | None = None,
    step_size: float,
    averages: Mapping[str, Observable] | None = None,
    **settings: Any,
) -> Chains:
    """Chains of exp(−nβ·L(w) − (γ/2)‖w − w*‖²)."""
    gamma = 1.0 if localization is None else localization
    kernel = hmc(step_size, nbeta, gamma, leapfrog=8, jitter=0.5)
    return sample(problem, kernel, chains, draws or 500, seed, burn_in=burn_in or 50, averages=averages, **settings)
