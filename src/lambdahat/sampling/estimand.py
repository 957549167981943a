"""What is estimated: the inverse temperature nβ and the localization γ, functions of the problem
alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from lambdahat._core.check import describe, require
from lambdahat.krylov import lanczos, random_vector
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Array

NAMES = ("n/log n", "batch")
DENSE = 300  # parameters up to which the whole Hessian is diagonalised
# parameters beyond which no data set determines most directions, and the spectrum is not looked at
LARGE = 1_000_000
# parameters up to which the Lanczos quadrature is fine: 2 probes of depth 30 on 2P samples or all
MIDDLE = 8192
COARSE = 1, 20, 2048  # probes, depth and samples of the quadrature beyond
ROUNDS = 3  # of the iteration that finds the localization
WEAKEST = 128  # no localization is weaker than the parameters' own scale by more than this factor


def inverse_temperature(nbeta: Any, num_samples: int, batch_size: int) -> tuple[float, str]:
    """Return nβ and how it was found.

    Args:
        nbeta: "n/log n" (β = 1/ln n, Watanabe 2013), "batch" (B/ln B, as devinterp), or a number.
        num_samples: The number of samples n.
        batch_size: The batch size B.

    >>> inverse_temperature("n/log n", 1000, 512)
    (144.76482730108395, 'n/log n, n = 1000')
    """
    choices = f"be a number or one of {', '.join(map(repr, NAMES))}"
    if isinstance(nbeta, str):
        require(nbeta in NAMES, "nbeta", choices, describe(nbeta))
        size, letter = (num_samples, "n") if nbeta == "n/log n" else (batch_size, "B")
        require(
            size > 2,
            "nbeta",
            "be a number for so little data",
            f"{nbeta!r} with {letter} = {size}",
            "for a loss without data give num_samples to from_function, or a number here",
        )
        name = nbeta if letter == "n" else "B/log B"
        return size / math.log(size), f"{name}, {letter} = {size}"
    number = isinstance(nbeta, int | float) and not isinstance(nbeta, bool)
    require(number, "nbeta", choices, describe(nbeta), error=TypeError)
    require(0 < nbeta < math.inf, "nbeta", "be a finite number above 0", repr(nbeta))
    return float(nbeta), "given"


def default_localization(problem: Problem, nbeta: float) -> tuple[float, str]:
    """Return the localization γ of a problem at its parameters w*, and the reason in words.

    The scale is γ₀ = P/‖w*‖² (1 where w* = 0): under the localization alone a parameter moves as
    far as parameters are large. Where the data determine most directions, so strong a tie would
    bias λ̂. The share of the parameters that the localization decides is β(γ) = (1/P) Σ_i
    γ/(nβ|h_i| + γ), with h_i the eigenvalues of the Hessian at w*, and γ = γ₀·β², by three rounds
    of fixed-point iteration from γ₀. For a network β is near 1 and γ = γ₀; for a regular model γ
    falls to γ₀/128, which takes less than 1 % off λ̂ = d/2 unless the parameters are small against
    their own posterior. The factor β² is rounded to a power of two, so that it is the same in every
    precision and on every device.

    γ depends on the problem and nβ alone: not on seed, budget, batch size, number of chains or
    device. It is equivariant: if all parameters are rescaled by c, γ is by 1/c², and λ̂ stays as it
    is.
    """
    square = float(problem.vector.double().square().sum())
    scale = problem.num_parameters / square if square > 0 else 1.0
    said = "P/‖w*‖²" if square > 0 else "1, for w* = 0"
    spectrum = None if problem.num_parameters > LARGE else _spectrum(problem)
    if spectrum is None:
        return scale, said
    values, weights = spectrum
    stiffness, gamma = nbeta * np.abs(values), scale
    for _ in range(ROUNDS):
        gamma = scale * float((weights * gamma / (stiffness + gamma)).sum()) ** 2
        gamma = max(gamma, scale / WEAKEST)
    halvings = max(round(math.log2(scale / gamma)), 0)
    decided = 1 - float((weights * gamma / (stiffness + gamma)).sum())
    if halvings:
        said += (
            f", divided by {2**halvings}: the data determine {decided:.0%} of the directions at w*"
        )
    return scale / 2**halvings, said


def _spectrum(problem: Problem) -> tuple[Array, Array] | None:
    """Eigenvalues of the Hessian at w* with weights that sum to 1, or None where there is no
    finite Hessian.
    """
    try:
        values, weights = _quadrature(problem)
    except torch.OutOfMemoryError:
        raise
    # a loss that can be differentiated once, or is not finite
    except (RuntimeError, ValueError, FloatingPointError):
        return None
    return (values, weights) if np.isfinite(values).all() else None


def _quadrature(problem: Problem) -> tuple[Array, Array]:
    """All eigenvalues, or a Lanczos quadrature on some of the data.

    Neither the probes nor the samples depend on a caller's seed.
    """
    size, samples = problem.num_parameters, problem.num_samples
    if size <= DENSE:
        values = torch.linalg.eigvalsh(hessian(problem).dense().double()).cpu().numpy()
        return values, np.full(size, 1 / size)
    probes, depth, few = (2, 30, max(2 * size, COARSE[2])) if size <= MIDDLE else COARSE
    few = min(few, samples)
    part = problem if few == samples or not problem.has_data else _part(problem, few)
    operator = hessian(part)
    place = "device" if problem.memory is None else "host"
    nodes, weights = [], []
    for probe in range(probes):
        start = random_vector(operator, 0, "localization", probe)
        values, shares, _ = lanczos(operator, start, depth, place=place).ritz()
        nodes.append(values.numpy())
        weights.append(shares.numpy() / probes)
    return np.concatenate(nodes), np.concatenate(weights)


def _part(problem: Problem, samples: int) -> Problem:
    """The problem on some of its data, always the same; on its first batches where samples
    depend on each other.
    """
    return problem if problem.norm == "train" else problem.subsample(samples, 0, samples)
