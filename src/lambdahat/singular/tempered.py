"""Chains at a temperature."""

from __future__ import annotations

import math
from typing import Any

from lambdahat._core.check import require
from lambdahat.problem import Problem
from lambdahat.results import Estimate
from lambdahat.sampling.automatic import Drawn, drawn
from lambdahat.sampling.estimation import degrees_of_freedom
from lambdahat.sampling.kernels import Kernel


def tempered(problem: Problem, nbeta: float, **settings: Any) -> Drawn:
    """Chains at nβ and λ̂ read off them, with ``settings`` as for ``llc``; a kernel among these
    must have that nβ.
    """
    kernel = settings.get("kernel")
    if isinstance(kernel, Kernel):
        require(
            math.isclose(kernel.nbeta, nbeta, rel_tol=1e-6),
            "kernel",
            f"have nbeta = {nbeta:.6g}",
            f"one at {kernel.nbeta:.6g}",
            'give its name, such as "hmc", and its settings apart',
        )
    return drawn(problem, nbeta, **settings)


def reading_of(found: Drawn) -> Estimate:
    """λ̂ of chains that have been drawn, with what their kernel allows to take off noise and
    bias.
    """
    chains, reading = found.chains, found.reading
    return Estimate(
        reading.value, reading.stderr, chains.cost, chains.status, degrees_of_freedom(chains)
    )
