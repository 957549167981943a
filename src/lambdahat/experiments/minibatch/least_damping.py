"""The least damping at which KFAC and Adam train at α = 1, over batch sizes (§5.8)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.experiments.minibatch.largest_rates import (
    FALL,
    LOST,
    SAME,
    better_claim,
    edge_series,
    factor_claim,
    far_from,
    kept_claim,
    scaling_charts,
)
from lambdahat.experiments.minibatch.stability_edges import (
    BETAS,
    MARGIN,
    Cells,
    EdgeSubject,
    Frontier,
    PreparedSubject,
    RateRule,
    ScalingRuns,
    SearchSection,
    StackedSettings,
    edge_rows,
    frontiers_of,
    largest_passing,
    outcome,
    powers,
    prepare,
    rule_at,
    rule_rows,
    rules_of,
    scaling_of,
    scaling_rows,
    scaling_runs,
    start_of,
    steps_of,
    subject_of,
)
from lambdahat.optim.kfac import KFAC
from lambdahat.randommatrix import stability_limit
from lambdahat.results.charts import Chart, Series

RATE = 1.0
NAMES = {"adam": "Adam's ε", "kfac": "KFAC's δ"}
FIGURES = {"adam": "Figures 5.11, 5.12", "kfac": "Figures 5.13, 5.14"}


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network and optimiser."""
    return claims_of(frontiers_of(rows), rules_of(rows), scaling_of(rows))


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> list[Claim]:
    """The same of what the rows hold."""
    found = []
    for frontier in frontiers:
        where, figures = (
            f"{frontier.network}, {NAMES[frontier.optimizer]}",
            FIGURES[frontier.optimizer],
        )
        sentence = f"{where}: the least damping is proportional to 1/B"
        source = f"Eq. 5.36, {figures}"
        found.append(Claim(sentence, source, "slope −1", frontier.slope(), "within", -1.0, MARGIN))
        for rule in (rule for rule in rules if rule.network == frontier.network):
            found += _rule_claims(where, frontier, rule)
    for runs in scaling:
        where = (
            f"{runs.network}, {NAMES[runs.optimizer]}, B = {far_from(runs)} from {runs.reference}"
        )
        better = f"{where}: damping ∝ 1/B generalises better than constant damping"
        found += [
            kept_claim(
                f"{where}: damping ∝ 1/B keeps the validation error",
                FIGURES[runs.optimizer],
                "good agreement with theory",
                runs,
                "inverse",
            ),
            replace(
                better_claim(better, "this work", "not shown", runs, "inverse", "constant"),
                own=True,
            ),
        ]
    return found


def _rule_claims(where: str, frontier: Frontier, rule: RateRule) -> list[Claim]:
    """That the least damping is Eq. 5.36's, and that of our rule by measured batch curvature."""
    kind = "heavy ball's at rate α/ε" if frontier.optimizer == "adam" else "α(λ₁(B) − λ₁)/2"
    sentence = f"{where}: the least damping is {kind}, λ₁(B) of batches, within a factor 2"
    expected = by_size(rule, expected_damping(rule, frontier.optimizer))
    found = [replace(factor_claim(sentence, "after Eq. 5.36", frontier, expected), own=True)]
    if "additive" in rule.predicted:
        sentence = f"{where}: the least damping is αPσ²/(2bλ₁), within a factor 2"
        found.append(
            factor_claim(
                sentence, "Eq. 5.36", frontier, by_size(rule, rule.dampings(RATE, "additive"))
            )
        )
    return found


def expected_damping(rule: RateRule, optimizer: str) -> Tensor:
    """The least damping (sizes,) from what batches add to λ₁: α/2 times that for KFAC, which is not
    Eq. 5.36.

    For Adam's ε that of heavy ball at rate (1 − β₁)/ε. At the large ε that α = 1 needs, √v̂ is
    small beside it and Adam is SGD with averaged momentum.
    """
    if optimizer == "kfac":
        return rule.dampings(RATE)
    beta = BETAS[0]
    limits = [stability_limit(rule.full, float(value), beta) for value in rule.excess()]
    return RATE * (1 - beta) / torch.tensor(limits, dtype=torch.float64)


def by_size(rule: RateRule, dampings: Tensor) -> dict[int, float]:
    """Dampings (sizes,) of a rule by its batch sizes."""
    return dict(zip(rule.batch_sizes, dampings.tolist(), strict=True))


def tables(rows: Rows) -> list[Table]:
    """The least damping beside the rule's, and the runs under both rules."""
    frontiers, rules, scaling = frontiers_of(rows), rules_of(rows), scaling_of(rows)
    out = [
        _dampings(name, frontiers, rules)
        for name in dict.fromkeys(frontier.network for frontier in frontiers)
    ]
    return [*out, *(runs.table() for runs in scaling)]


def _dampings(network: str, frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> Table:
    mine = [frontier for frontier in frontiers if frontier.network == network]
    own = [rule for rule in rules if rule.network == network]
    expected = {
        name: values for rule in own for name, values in _expected_dampings(rule, mine).items()
    }
    lines = []
    for size in sorted({size for frontier in mine for size in frontier.batch_sizes}):
        found = [frontier.cell(size) if size in frontier.batch_sizes else "" for frontier in mine]
        told = [f"{values[size]:.3g}" if size in values else "" for values in expected.values()]
        lines.append((str(size), *found, *told))
    header = ("B", *(frontier.optimizer for frontier in mine), *expected)
    return Table(f"{network}: the least damping that trains at α = 1", header, tuple(lines))


def _expected_dampings(
    rule: RateRule, frontiers: Sequence[Frontier]
) -> dict[str, dict[int, float]]:
    """Dampings by batch size: Eq. 5.36 with Pσ² and τ², and by what batches add to λ₁."""
    models = {"additive": "Eq. 5.36, Pσ²", "directional": "τ² for Pσ²"}
    told = {
        name: by_size(rule, rule.dampings(RATE, model))
        for model, name in models.items()
        if model in rule.predicted
    }
    shown = {
        f"by batches, {f.optimizer}": by_size(rule, expected_damping(rule, f.optimizer))
        for f in frontiers
    }
    return told | shown


def charts(rows: Rows) -> list[Chart]:
    """The least damping over batch sizes with the rule's, and what comes of scaling it."""
    frontiers, rules, out = frontiers_of(rows), rules_of(rows), []
    for network in dict.fromkeys(frontier.network for frontier in frontiers):
        mine = [frontier for frontier in frontiers if frontier.network == network]
        told = [
            Series(name, rule.batch_sizes, [value or None for value in values.values()])
            for rule in rules
            if rule.network == network
            for name, values in _expected_dampings(rule, mine).items()
        ]
        series = (*(edge_series(frontier, NAMES[frontier.optimizer]) for frontier in mine), *told)
        title = f"{network}: the least damping at α = 1"
        across = "batch size B"
        out.append(
            Chart(title, across, "damping", series, x_log=True, y_log=True, source="Eq. 5.36")
        )
    return out + scaling_charts(scaling_of(rows))


OPTIMIZERS = ("adam", "kfac")
SECTION = SearchSection(1e-4, 1e3, points=8)  # of 1/ε
KFAC_SECTION = SearchSection(1e-2, 1e6, points=5, rounds=3)  # of 1/δ; its runs are one by one
RULES = {"inverse": -1.0, "constant": 0.0}
SAFETY = 2.0  # times the least damping, from which the rules start

POWERS_OF_4 = (16, 64, 256, 1024, 4096)
SCALES: dict[str, tuple[EdgeSubject, ...]] = {
    "smoke": (
        EdgeSubject(
            "MLP, digits", "mlp", "digits", 256, (16, 64, 256), 10, 2, 1, 64, {"widths": (8,)}
        ),
    ),
    "cpu": (
        EdgeSubject(
            "MLP, MNIST", "mlp", "mnist", 10_000, powers(4, 10), 100, 3, 3, 128, {"widths": (32,)}
        ),
    ),
    "paper": (
        EdgeSubject(
            "MLP, MNIST", "mlp", "mnist", 60_000, POWERS_OF_4, 100, 3, 5, 256, {"widths": (100,)}
        ),
    ),
}


def scaled_runs(ground: PreparedSubject, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under both rules, from twice the least damping at the reference batch size."""
    require_choice(optimizer, "optimizer", OPTIMIZERS)
    reference = ground.subject.reference
    base = SAFETY * LEAST[optimizer](ground.at(reference), seed).at(reference)
    return (_scaled_adam if optimizer == "adam" else _scaled_kfac)(ground, base, seed)


def least_epsilon(ground: PreparedSubject, seed: int, section: SearchSection = SECTION) -> Frontier:
    """Adam's least ε at α = 1, at every batch size."""
    subject, edges = ground.subject, []
    start = Cells(
        ground.models, ground.train, StackedSettings("adam", torch.zeros(subject.seeds, 1))
    )
    first = start.evaluate(ground.probe)[0]
    for size in subject.batch_sizes:

        def learns(inverse: Tensor, size: int = size) -> Tensor:
            settings = StackedSettings("adam", torch.full_like(inverse, RATE), inverse.reciprocal())
            cells = Cells(ground.models, ground.train, settings)
            cells.train(size, subject.steps, seed, f"{subject.network}, Adam's ε, B = {size}")
            return cells.evaluate(ground.probe)[0] < FALL * first

        edges.append(largest_passing(learns, section, subject.seeds).reciprocal())
    return Frontier(
        subject.network,
        "adam",
        "trains",
        subject.batch_sizes,
        torch.stack(edges),
        section.resolution,
    )


def least_kfac_damping(
    ground: PreparedSubject, seed: int, section: SearchSection = KFAC_SECTION
) -> Frontier:
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
    ground: PreparedSubject, seed: int, size: int, row: tuple[int, Tensor], first: list[float]
) -> Tensor:
    """Whether one seed's network learns at each 1/δ, from the largest down to the first."""
    index, inverse = row
    passed = torch.zeros(len(inverse), dtype=torch.bool)
    for column in reversed(range(len(inverse))):
        trained = _train_kfac(
            ground, index, 1 / float(inverse[column]), size, ground.subject.steps, seed
        )
        if trained is not None and _loss(trained, ground) < FALL * first[index]:
            passed[column] = True
            break
    return passed


def _train_kfac(
    ground: PreparedSubject, index: int, damping: float, size: int, steps: int, seed: int
) -> nn.Module | None:
    """The network of one seed after ``steps`` steps of KFAC at α = 1; None where it diverged."""
    model = copy.deepcopy(ground.models[index]).train()
    optimizer = KFAC(model, RATE, damping)
    try:
        return model if _run_steps(model, optimizer, ground, index, size, steps, seed) else None
    # moments that are infinite, or that so little damping does not make invertible
    except RuntimeError:
        return None
    finally:
        optimizer.close()


def _run_steps(
    model: nn.Module,
    optimizer: KFAC,
    ground: PreparedSubject,
    index: int,
    size: int,
    steps: int,
    seed: int,
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
def _loss(model: nn.Module, ground: PreparedSubject) -> float:
    x, y = ground.probe
    return float(cross_entropy(model(x), y))


def _scaled_adam(ground: PreparedSubject, base: float, seed: int) -> ScalingRuns:
    def run(size: int, epsilon: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = epsilon.expand(ground.subject.seeds, -1)
        return outcome(
            ground, StackedSettings("adam", torch.full_like(values, RATE), values), size, seed
        )

    return scaling_runs(ground, "adam", "ε", base, RULES, run)


def _scaled_kfac(ground: PreparedSubject, base: float, seed: int) -> ScalingRuns:
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
    ground: PreparedSubject, index: int, damping: float, size: int, seed: int
) -> tuple[float, float, float]:
    """Validation error, training loss and distance of one run; NaN where it diverged."""
    with torch.enable_grad():
        model = _train_kfac(ground, index, damping, size, steps_of(ground, size), seed)
    loss = math.nan if model is None else _loss(model, ground)
    if model is None or not math.isfinite(loss):
        return math.nan, math.nan, math.nan
    x, y = ground.test
    error = float((model(x).argmax(1) != y).double().mean())
    pairs = zip(model.parameters(), ground.models[index].parameters(), strict=True)
    return error, loss, float(sum((a - b).double().square().sum() for a, b in pairs) ** 0.5)


LEAST: dict[str, Callable[[PreparedSubject, int], Frontier]] = {
    "adam": least_epsilon,
    "kfac": least_kfac_damping,
}
ASSUMPTIONS = sentences(f"""
    It trains if the mean loss over 2,000 training images ends below {FALL:g} of its start.
    The number of steps is the same at every batch size. α = 1; no momentum beside Adam's β₁ = 0.9,
      no decay.
    KFAC takes the empirical Fisher, renewed at each of the first ten steps, then every ten.
    Scaling starts from {SAFETY:g} times the least damping at the reference batch size.
    Eq. 5.36, its units mended, is αPσ²/(2bλ₁), with σ² of the Hessian at the start.
    There Pσ²/(bλ₁) stands for what a batch adds to λ₁. A batch adds far more, for the noise is not
      isotropic.
    So α(λ₁(B) − λ₁)/2 with what five batches add is another rule than Eq. 5.36, and so is that with
      τ² for Pσ².
    The rule for ε is that of SGD with averaged momentum at rate α/ε, which Adam is where ε is
      large.
    Validation errors are not compared where the run that is scaled errs on more than {LOST:g} %
      itself.
    An error is kept if it rises by at most {SAME:g} %. The thesis does not show constant damping. n
      counts starts.
    These two bounds, and to judge Eq. 5.36 with Pσ² by itself, were chosen after the results were
      seen.
    A run that diverged has the validation error of a network that guesses, 90 %.
""")


@dataclass(frozen=True)
class DampingScale:
    """The networks of a scale, and the ``root`` of the seeds of starts, samples and batches."""

    subjects: tuple[EdgeSubject, ...]
    root: int = 0


def cells(config: DampingScale) -> list[Cell]:
    """An optimiser's least damping at one batch size, the rule, the scaled runs, by network."""
    found: list[Cell] = []
    for subject in config.subjects:
        whole = asdict(subject) | {"root": config.root}
        found += [
            {
                "part": "edge",
                "optimizer": optimizer,
                "batch_size": size,
                **whole,
                "batch_sizes": (size,),
            }
            for optimizer in OPTIMIZERS
            for size in subject.batch_sizes
        ]
        found.append({"part": "rule", **whole})
        found += [{"part": "scaling", "optimizer": optimizer, **whole} for optimizer in OPTIMIZERS]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """The least damping, the rule, or the scaled runs, as ``part`` says."""
    ground, root = prepare(subject_of(cell), {}, cell["root"], device), cell["root"]
    if cell["part"] == "rule":
        return rule_rows(rule_at(ground, start_of(ground), "at the start", root))
    if cell["part"] == "scaling":
        return scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    return edge_rows(LEAST[cell["optimizer"]](ground, root))


EXPERIMENT = Experiment(
    "damping",
    "The least damping of KFAC and Adam over batch sizes",
    SPECTRAL,
    "§5.8, Figures 5.11–5.14",
    {scale: DampingScale(subjects) for scale, subjects in SCALES.items()},
    *(cells, run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs by KFAC and"
        " Adam at α = 1; seeds are not in the text."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
