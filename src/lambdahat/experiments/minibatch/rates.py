"""The largest stable learning rate over batch sizes, and what comes of scaling it: §5.7 and
§5.8.1, spectral thesis.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lambdahat._core.check import require_choice
from lambdahat.experiments.minibatch.frontiers import Frontier, Section, largest_passing
from lambdahat.experiments.minibatch.rate_claims import FALL, LOST, SAME
from lambdahat.experiments.minibatch.rate_rules import RateRule, rule_at, start_of, trained_from
from lambdahat.experiments.minibatch.rate_subjects import Ground, Subject, powers
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns, outcome, scaling_runs
from lambdahat.experiments.minibatch.stacked_networks import Cells, Settings

RISE = 1.1  # times the first loss, above which a run is not steady
SECTION = Section(1e-5, 1e3, points=10)
CRITERIA = ("trains", "steady")
SEARCHES = (
    ("sgd", "trains"),
    ("sgd", "steady"),
    ("momentum", "trains"),
    ("momentum", "steady"),
    ("adam", "trains"),
)
RULES = {"linear": 1.0, "square root": 0.5, "constant": 0.0}
POINTS = ("at the start", "trained")
SCALED_OPTIMIZERS = ("momentum", "adam")
SAFETY = 0.5  # of the largest stable rate, from which the rules start

SCALES: dict[str, tuple[Subject, ...]] = {
    "smoke": (
        Subject(
            "softmax, digits", "softmax", "digits", 256, (4, 16, 64), 15, 2, epochs=1, reference=16
        ),
    ),
    "cpu": (
        Subject("softmax, MNIST", "softmax", "mnist", 10_000, (1, 4, *powers(4, 10)), 100, 3),
        Subject(
            "MLP, MNIST",
            "mlp",
            "mnist",
            10_000,
            (1, 4, *powers(4, 10)),
            100,
            3,
            5,
            options={"widths": (32,)},
        ),
    ),
    "paper": (
        Subject("softmax, MNIST", "softmax", "mnist", 60_000, (1, 4, *powers(4, 12)), 300, 5, 5),
        Subject(
            "MLP, MNIST",
            "mlp",
            "mnist",
            60_000,
            (1, 4, *powers(4, 12)),
            300,
            5,
            5,
            options={"widths": (100,)},
        ),
        Subject(
            "LeNet-5, CIFAR-10",
            "lenet5",
            "cifar10",
            8_000,
            (16, 64, 256, 1024, 4096),
            100,
            3,
            6,
            reference=256,
        ),
    ),
}


def rule_of(ground: Ground, point: str, seed: int) -> RateRule:
    """The rule "at the start", or "trained" by as many steps of SGD at half its largest stable
    rate.
    """
    require_choice(point, "point", POINTS)
    if point == "at the start":
        return rule_at(ground, start_of(ground), point, seed)
    return rule_at(ground, trained_from(ground, _half_edge(ground, "sgd", seed), seed), point, seed)


def scaled_runs(ground: Ground, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under the three rules, from half the largest stable rate of the reference batch size."""

    def run(size: int, rates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return outcome(
            ground, Settings(optimizer, rates.expand(ground.subject.seeds, -1)), size, seed
        )

    return scaling_runs(ground, optimizer, "rate", _half_edge(ground, optimizer, seed), RULES, run)


def _half_edge(ground: Ground, optimizer: str, seed: int) -> float:
    """Half the largest rate that trains at the reference batch size."""
    reference = ground.subject.reference
    return SAFETY * stable_rates(ground.at(reference), optimizer, seed).at(reference)


def stable_rates(
    ground: Ground, optimizer: str, seed: int, criterion: str = "trains", section: Section = SECTION
) -> Frontier:
    """The largest stable rate of one optimiser at every batch size, from every seed's start.

    A run "trains" if its loss ends below 0.9 of the first. It is "steady" if, besides, in no tenth
    of the run the mean loss of its batches is above 1.1 of the first: a step that is too long for
    the curvature raises the loss, though the run may recover.
    """
    require_choice(criterion, "criterion", CRITERIA)
    subject, edges = ground.subject, []
    first = _loss(
        ground,
        Cells(ground.models, ground.train, Settings(optimizer, torch.zeros(subject.seeds, 1))),
    )
    for size in subject.batch_sizes:

        def stable(rates: Tensor, size: int = size) -> Tensor:
            cells = Cells(ground.models, ground.train, Settings(optimizer, rates))
            met = cells.train(
                size, subject.steps, seed, f"{subject.network}, {optimizer}, B = {size}"
            )
            ended = _loss(ground, cells) < FALL * first
            return ended if criterion == "trains" else ended & (met < RISE * first).all(0)

        edges.append(largest_passing(stable, section, subject.seeds))
    return Frontier(
        subject.network,
        optimizer,
        criterion,
        subject.batch_sizes,
        torch.stack(edges),
        section.resolution,
    )


def _loss(ground: Ground, cells: Cells) -> Tensor:
    return cells.judged(ground.probe)[0]


ASSUMPTIONS = (
    f"A run trains if the mean loss over 2,000 training images ends below {FALL:g} of its start.",
    (
        f"It is steady if besides no tenth of it has a mean batch loss above {RISE:g} of the start:"
        " a form of ours."
    ),
    "The number of steps is the same at every batch size, so that all have as long to diverge.",
    f"The edge is searched by sections to a factor {SECTION.resolution:.2f}.",
    (
        "λ₁ is that of the Hessian at the start, and after as many steps of SGD at half its largest"
        " stable rate."
    ),
    (
        "That the edge is 2/λ₁ within a factor 2 is our question: the thesis calls Eq. 5.34 a"
        " pessimistic bound."
    ),
    (
        "Images have mean 0 and deviation 1; no weight decay, no augmentation, no schedule. n"
        " counts starts."
    ),
    (
        "Scaling rules start from half the largest stable rate at the reference batch; the thesis"
        " takes all of it."
    ),
    (
        f"An error is kept if it rises by at most {SAME:g} %, as the thesis's own does from B = 128"
        " to 1,024."
    ),
    (
        f"Nothing is judged of scaling where the run that is scaled errs on more than {LOST:g} %"
        " itself."
    ),
    (
        "The slope that should be 1 is read up to the rule's threshold, if three batch sizes or"
        " more lie there."
    ),
    (
        "If not, it is also read up to where the measured rates stop growing, by a fit to the same"
        " rates."
    ),
    (
        "That other end, the bound on the run that is scaled, and the 1.5 % were chosen after the"
        " results were seen."
    ),
    (
        "“Unstable later” is a training loss near guessing after all epochs at a rate below the"
        " edge of the search."
    ),
    (
        "It was added after the results were seen; no loss on the way is stored, nor is the"
        " variance that causes it."
    ),
    "A run that diverged has the validation error of a network that guesses, 90 %.",
    (
        "No network has batch normalisation: Figures 5.7c, 5.8b, 5.9 and 5.10 are those of"
        " batch-norm-rates."
    ),
)
