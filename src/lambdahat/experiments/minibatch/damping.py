"""The least damping at which KFAC and Adam train at α = 1, over batch sizes: §5.8, spectral
thesis.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.experiments.minibatch.damping_claims import RATE
from lambdahat.experiments.minibatch.frontiers import Frontier, Section, largest_passing
from lambdahat.experiments.minibatch.rate_claims import FALL, LOST, SAME
from lambdahat.experiments.minibatch.rate_subjects import Ground, Subject, powers
from lambdahat.experiments.minibatch.scaling_runs import (
    ScalingRuns,
    outcome,
    scaling_runs,
    steps_of,
)
from lambdahat.experiments.minibatch.stacked_networks import Cells, Settings
from lambdahat.optim.kfac import KFAC

OPTIMIZERS = ("adam", "kfac")
SECTION = Section(1e-4, 1e3, points=8)  # of 1/ε
KFAC_SECTION = Section(1e-2, 1e6, points=5, rounds=3)  # of 1/δ; its runs are one by one
RULES = {"inverse": -1.0, "constant": 0.0}
SAFETY = 2.0  # times the least damping, from which the rules start

POWERS_OF_4 = (16, 64, 256, 1024, 4096)
SCALES: dict[str, tuple[Subject, ...]] = {
    "smoke": (
        Subject("MLP, digits", "mlp", "digits", 256, (16, 64, 256), 10, 2, 1, 64, {"widths": (8,)}),
    ),
    "cpu": (
        Subject(
            "MLP, MNIST", "mlp", "mnist", 10_000, powers(4, 10), 100, 3, 3, 128, {"widths": (32,)}
        ),
    ),
    "paper": (
        Subject(
            "MLP, MNIST", "mlp", "mnist", 60_000, POWERS_OF_4, 100, 3, 5, 256, {"widths": (100,)}
        ),
    ),
}


def scaled_runs(ground: Ground, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under both rules, from twice the least damping at the reference batch size."""
    require_choice(optimizer, "optimizer", OPTIMIZERS)
    reference = ground.subject.reference
    base = SAFETY * LEAST[optimizer](ground.at(reference), seed).at(reference)
    return (_scaled_adam if optimizer == "adam" else _scaled_kfac)(ground, base, seed)


def least_epsilon(ground: Ground, seed: int, section: Section = SECTION) -> Frontier:
    """Adam's least ε at α = 1, at every batch size."""
    subject, edges = ground.subject, []
    start = Cells(ground.models, ground.train, Settings("adam", torch.zeros(subject.seeds, 1)))
    first = start.judged(ground.probe)[0]
    for size in subject.batch_sizes:

        def learns(inverse: Tensor, size: int = size) -> Tensor:
            settings = Settings("adam", torch.full_like(inverse, RATE), inverse.reciprocal())
            cells = Cells(ground.models, ground.train, settings)
            cells.train(size, subject.steps, seed, f"{subject.network}, Adam's ε, B = {size}")
            return cells.judged(ground.probe)[0] < FALL * first

        edges.append(largest_passing(learns, section, subject.seeds).reciprocal())
    return Frontier(
        subject.network,
        "adam",
        "trains",
        subject.batch_sizes,
        torch.stack(edges),
        section.resolution,
    )


def least_kfac_damping(ground: Ground, seed: int, section: Section = KFAC_SECTION) -> Frontier:
    """KFAC's least δ at α = 1, at every batch size."""
    subject, edges = ground.subject, []
    first = [_loss(model, ground) for model in ground.models]
    for place, size in enumerate(subject.batch_sizes):

        def learns(inverse: Tensor, size: int = size) -> Tensor:
            return torch.stack(
                [_largest_learning(ground, seed, size, row, first) for row in enumerate(inverse)]
            )

        edges.append(largest_passing(learns, section, subject.seeds).reciprocal())
        report(f"{subject.network}, KFAC's δ", place + 1, len(subject.batch_sizes))
    return Frontier(
        subject.network,
        "kfac",
        "trains",
        subject.batch_sizes,
        torch.stack(edges),
        section.resolution,
    )


def _largest_learning(
    ground: Ground, seed: int, size: int, row: tuple[int, Tensor], first: list[float]
) -> Tensor:
    """Whether one seed's network learns at each 1/δ: from the largest down, for what passes
    below it plays no part.
    """
    index, inverse = row
    passed = torch.zeros(len(inverse), dtype=torch.bool)
    for column in reversed(range(len(inverse))):
        trained = _kfac_trained(
            ground, index, 1 / float(inverse[column]), size, ground.subject.steps, seed
        )
        if trained is not None and _loss(trained, ground) < FALL * first[index]:
            passed[column] = True
            break
    return passed


def _kfac_trained(
    ground: Ground, index: int, damping: float, size: int, steps: int, seed: int
) -> nn.Module | None:
    """The network of one seed after ``steps`` steps of KFAC at α = 1; None where it diverged."""
    model = copy.deepcopy(ground.models[index]).train()
    optimizer = KFAC(model, RATE, damping)
    try:
        return model if _stepped(model, optimizer, ground, index, size, steps, seed) else None
    # moments that are infinite, or that so little damping does not make invertible
    except RuntimeError:
        return None
    finally:
        optimizer.close()


def _stepped(
    model: nn.Module, optimizer: KFAC, ground: Ground, index: int, size: int, steps: int, seed: int
) -> bool:
    """Train, and say whether the loss stayed finite."""
    x, y = ground.train
    rng = generator(seed, "kfac order", index)
    order = torch.randperm(len(x), generator=rng)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(x), generator=rng)
        rows, order = order[:size].to(x.device), order[size:]
        loss = cross_entropy(model(x[rows]), y[rows])
        if not bool(loss.isfinite()):
            return False
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return True


@torch.no_grad()
def _loss(model: nn.Module, ground: Ground) -> float:
    x, y = ground.probe
    return float(cross_entropy(model(x), y))


def _scaled_adam(ground: Ground, base: float, seed: int) -> ScalingRuns:
    def run(size: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = epsilon.expand(ground.subject.seeds, -1)
        return outcome(ground, Settings("adam", torch.full_like(values, RATE), values), size, seed)

    return scaling_runs(ground, "adam", "ε", base, RULES, run)


def _scaled_kfac(ground: Ground, base: float, seed: int) -> ScalingRuns:
    def run(size: int, dampings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = [
            [
                _kfac_outcome(ground, index, float(damping), size, seed)
                for index in range(ground.subject.seeds)
            ]
            for damping in dampings
        ]
        errors, losses, distances = torch.tensor(found, dtype=torch.float64).unbind(-1)
        return errors, losses, distances

    return scaling_runs(ground, "kfac", "δ", base, RULES, run)


@torch.no_grad()
def _kfac_outcome(
    ground: Ground, index: int, damping: float, size: int, seed: int
) -> tuple[float, float, float]:
    """Validation error, training loss and distance of one run; NaN where it diverged."""
    with torch.enable_grad():
        model = _kfac_trained(ground, index, damping, size, steps_of(ground, size), seed)
    loss = math.nan if model is None else _loss(model, ground)
    if model is None or not math.isfinite(loss):
        return math.nan, math.nan, math.nan
    x, y = ground.test
    error = float((model(x).argmax(1) != y).double().mean())
    pairs = zip(model.parameters(), ground.models[index].parameters(), strict=True)
    return error, loss, float(sum((a - b).double().square().sum() for a, b in pairs) ** 0.5)


LEAST: dict[str, Callable[[Ground, int], Frontier]] = {
    "adam": least_epsilon,
    "kfac": least_kfac_damping,
}
ASSUMPTIONS = (
    f"It trains if the mean loss over 2,000 training images ends below {FALL:g} of its start.",
    (
        "The number of steps is the same at every batch size. α = 1; no momentum beside Adam's β₁ ="
        " 0.9, no decay."
    ),
    "KFAC takes the empirical Fisher, renewed at each of the first ten steps, then every ten.",
    f"Scaling starts from {SAFETY:g} times the least damping at the reference batch size.",
    "Eq. 5.36, its units mended, is αPσ²/(2bλ₁), with σ² of the Hessian at the start.",
    (
        "There Pσ²/(bλ₁) stands for what a batch adds to λ₁. A batch adds far more, for the noise"
        " is not isotropic."
    ),
    (
        "So α(λ₁(B) − λ₁)/2 with what five batches add is another rule than Eq. 5.36, and so is"
        " that with τ² for Pσ²."
    ),
    (
        "The rule for ε is that of SGD with averaged momentum at rate α/ε, which Adam is where ε is"
        " large."
    ),
    (
        "Validation errors are not compared where the run that is scaled errs on more than"
        f" {LOST:g} % itself."
    ),
    (
        f"An error is kept if it rises by at most {SAME:g} %. The thesis does not show constant"
        " damping. n counts starts."
    ),
    (
        "These two bounds, and to judge Eq. 5.36 with Pσ² by itself, were chosen after the results"
        " were seen."
    ),
    "A run that diverged has the validation error of a network that guesses, 90 %.",
)
