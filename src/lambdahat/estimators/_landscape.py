"""The loss on a line or a plane through parameter space."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lambdahat._core.check import require, require_choice, require_count, require_positive
from lambdahat._core.device import default_context
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.operators import hessian
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Eigenpairs, Landscape

Direction = str | Tensor | Eigenpairs


@default_context()
def landscape(
    problem: Problem,
    directions: Direction | Sequence[Direction] = "filter",
    distance: float | tuple[float, float] = 1.0,
    points: int = 21,
    held_out: Any = None,
    *,
    refresh: bool = False,
    labels: Sequence[str] | None = None,
    seed: int = 0,
) -> Landscape:
    """Evaluate the loss on a line, L(θ + t·v), or on a plane, L(θ + t·v + s·w), through θ.

    A direction is "random" (uniform on the unit sphere), "filter" (see ``random_direction``), a
    vector (P,), ``Eigenpairs`` (their first vector), or the result of ``towards``; one direction
    gives a line, a sequence of two or a tensor (P, 2) a plane. A vector is used with its own
    length: an offset of 1 is the vector's end. The ``points`` offsets are evenly spaced on
    [−distance, distance], or on ``distance`` = (low, high).

    ``held_out`` is other data, or a problem on it. ``refresh``
    recomputes batch-norm statistics over the training data at each point, for both losses; without
    it the curvature vᵀHv of each direction is measured too.
    """
    require_problem(problem)
    vectors, names = _directions(problem, directions, seed)
    fine = labels is None or len(labels) == len(names)
    require(fine, "labels", f"have {len(names)} entries", labels)
    require_count(points, "points", least=2)
    if isinstance(distance, tuple | list):
        ordered = len(distance) == 2 and distance[0] < distance[1]
        require(ordered, "distance", "be a number above 0, or (low, high)", repr(distance))
        offsets = np.linspace(float(distance[0]), float(distance[1]), points)
    else:
        reach = require_positive(distance, "distance")
        offsets = np.linspace(-reach, reach, points)
        if points % 2:
            offsets[points // 2] = 0.0  # the centre exactly, whatever linspace rounds to
    other = held_out if held_out is None or isinstance(held_out, Problem) else problem.on(held_out)
    if other is not None:
        fine = other.space == problem.space
        require(fine, "held_out", "have the problem's parameters", repr(other))
    loss = np.empty((points,) * len(vectors))
    test = None if other is None else np.empty_like(loss)
    for done, index in enumerate(product(range(points), repeat=len(vectors)), start=1):
        theta = problem.vector
        for vector, i in zip(vectors, index, strict=True):
            theta = theta.add(vector, alpha=float(offsets[i]))
        here = problem.at(theta)
        if refresh:
            here = here.refresh_statistics()
        loss[index] = here.loss()
        if test is not None and other is not None:
            test[index] = _loss_on(here, other)
        report("landscape", done, loss.size)
    curvature: tuple[float, ...] = ()
    if not refresh:  # vᵀHv
        curved = hessian(problem)
        curvature = tuple(float(v.double() @ (curved @ v).double()) for v in vectors)
    names = names if labels is None else tuple(labels)
    return Landscape(offsets, loss, test, names, curvature, loss.size + len(curvature))


def random_direction(
    problem: Problem, seed: int = 0, name: str = "direction", filters: bool = True
) -> Tensor:
    """Draw a random direction (P,), by default normalised per filter (Li et al. 2018, §4).

    Each filter, a slice along the first dimension of a weight, is rescaled to the norm of the
    parameters' own: d_f ← d_f·‖θ_f‖/‖d_f‖. Parameters of fewer than two dimensions (biases, norm
    layers) stay as they are. Losses along such directions compare between networks that differ by
    the scale of their layers. Without ``filters``, a unit vector.
    """
    rng = generator(seed, "landscape", name)
    drawn = torch.randn(problem.num_parameters, dtype=torch.float64, generator=rng)
    if not filters:
        return drawn.div(torch.linalg.vector_norm(drawn)).to(problem.device, problem.dtype)
    own = problem.space.unflatten(problem.vector.double().cpu())
    fine = any(tensor.ndim > 1 for tensor in own.values())
    expected = "have a weight of two dimensions or more"
    require(fine, "the problem", expected, "only vectors", 'use the direction "random"')
    for key, noise in problem.space.unflatten(drawn).items():
        if noise.ndim < 2:
            noise.zero_()
        else:
            rows, like = noise.view(len(noise), -1), own[key].reshape(len(noise), -1)
            rows *= like.norm(dim=1, keepdim=True) / rows.norm(dim=1, keepdim=True)
    return drawn.to(problem.device, problem.dtype)


def towards(problem: Problem, end: Problem | Tensor) -> Tensor:
    """Return the direction (P,) from a problem's parameters to others; offset 1 is the other end.

    ``landscape(problem, towards(problem, other), distance=(0, 1))`` is the loss between two
    checkpoints.
    """
    theta = end.vector if isinstance(end, Problem) else end
    fits = isinstance(theta, Tensor) and theta.shape == (problem.num_parameters,)
    require(fits, "end", f"be a problem, or a vector of shape ({problem.num_parameters},)", theta)
    return theta.detach().to(problem.device, problem.dtype) - problem.vector


def _directions(problem: Problem, asked: Any, seed: int) -> tuple[list[Tensor], tuple[str, ...]]:
    """One or two vectors (P,) and their labels."""
    if isinstance(asked, Tensor) and asked.ndim == 2:
        asked = list(asked.T)
    alone = isinstance(asked, str | Tensor | Eigenpairs)
    items: list[Direction] = [asked] if alone else list(asked)
    fine = len(items) in (1, 2)
    require(fine, "directions", "be one (a line) or two (a plane)", f"{len(items)} directions")
    pairs = [_direction(problem, item, i, seed) for i, item in enumerate(items)]
    labels = [label for _, label in pairs]
    if len(set(labels)) < len(labels):  # two of one kind
        labels[1] = f"another {labels[1].removeprefix('a ')}"
    return [vector for vector, _ in pairs], tuple(labels)


def _direction(problem: Problem, asked: Any, i: int, seed: int) -> tuple[Tensor, str]:
    if isinstance(asked, str):
        kind = require_choice(asked, "directions", ("random", "filter"))
        label = "a random direction" if kind == "random" else "a filter-normalised direction"
        return random_direction(problem, seed, f"direction {i}", kind == "filter"), label
    label = f"direction {i + 1}"
    if isinstance(asked, Eigenpairs):
        asked, label = asked.vectors[:, 0], f"the eigenvector of λ = {float(asked.values[0]):.4g}"
    fits = isinstance(asked, Tensor) and asked.shape == (problem.num_parameters,)
    expected = f"have shape ({problem.num_parameters},), one for each parameter"
    require(fits, "directions", expected, asked)
    vector = asked.detach().to(problem.device, problem.dtype)
    moves = bool(torch.isfinite(vector).all()) and bool(vector.any())
    require(moves, "directions", "be finite and not zero", "a vector that is not")
    return vector, label


def _loss_on(here: Problem, other: Problem) -> float:
    """The loss on another problem's data, with this one's parameters and batch-norm statistics."""
    parameters = here.named(here.vector)
    with torch.no_grad():
        parts = [
            weight * here.batch_loss(parameters, batch).double().reshape(())
            for weight, batch in other.share
        ]
        zero = torch.zeros((), dtype=torch.float64, device=other.device)
        total = torch.stack(parts).sum() if parts else zero
    return float(other.ranks.sum(total, "a loss on other data", here.vector))
