"""The least damping at which KFAC and Adam train at α = 1, over batch sizes (§5.8)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import generator
from lambdahat.experiments import kit
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.minibatch import largest_rates as rates
from lambdahat.experiments.minibatch import stability_edges as edges
from lambdahat.experiments.minibatch.largest_rates import LEARNT_LOSS, SAME_ERROR, WORST_REFERENCE
from lambdahat.experiments.minibatch.stability_edges import (
    EdgeSubject,
    Frontier,
    PreparedSubject,
    RateRule,
    ScalingRuns,
    SearchSection,
    StackedSettings,
)
from lambdahat.optim.kfac import KFAC
from lambdahat.randommatrix import stability_limit

RATE = 1.0
NAMES = {"adam": "Adam's ε", "kfac": "KFAC's δ"}
FIGURES = {"adam": "Figures 5.11, 5.12", "kfac": "Figures 5.13, 5.14"}

CLAIMS = kit.ClaimTexts("""
    slope: {where}: the least damping is proportional to 1/B
      | Eq. 5.36, {figures} | slope −1 | within 0.2 of -1
    adam: {where}: the least damping is heavy ball's at rate α/ε, λ₁(B) of batches, within a
      factor 2 | after Eq. 5.36 | ratio 1 | within 1 of 0 | | ours
    kfac: {where}: the least damping is α(λ₁(B) − λ₁)/2, λ₁(B) of batches, within a factor 2
      | after Eq. 5.36 | ratio 1 | within 1 of 0 | | ours
    isotropic: {where}: the least damping is αPσ²/(2bλ₁), within a factor 2
      | Eq. 5.36 | ratio 1 | within 1 of 0
    kept: {where}, B = {far} from {reference}: damping ∝ 1/B keeps the validation error
      | {figures} | good agreement with theory | below 1.5 | %
    better: {where}, B = {far} from {reference}: damping ∝ 1/B generalises better than constant
      damping | this work | not shown | above | % | ours
""")


def claims(rows: Rows) -> Iterator[kit.Claim]:
    """Every claim, for each network and optimiser.

    Those on KFAC and on scaled runs are not testable for a network of which Adam's edges alone were
    searched.
    """
    rules, scaling = edges.rules_of(rows), edges.scaling_of(rows)
    yield from claims_of(edges.frontiers_of(rows), rules, scaling)
    for network in sorted(rates.searched_late(rows) - {runs.network for runs in scaling}):
        for optimizer in OPTIMIZERS:
            where = f"{network}, {NAMES[optimizer]}"
            sizes = {"reference": rates.REFERENCE, "far": rates.FAR}
            said: dict[str, Any] = {"where": where, "figures": FIGURES[optimizer], **sizes}
            claim: Callable[..., kit.Claim] = partial(CLAIMS, **said)
            if optimizer not in LATE:
                yield claim("slope", kit.UNKNOWN, unmet="its edges were not searched")
            if optimizer not in LATE or network not in {rule.network for rule in rules}:
                unmet = "no edges of it, or no variance of the Hessian, are here"
                yield claim("isotropic", kit.UNKNOWN, unmet=unmet)
            yield claim("kept", kit.UNKNOWN, unmet="no scaled run of this network is here")


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> Iterator[kit.Claim]:
    """The same of what the rows hold: that dampings fall as 1/B, that they are Eq. 5.36's, and
    those of our rule by measured batch curvature; and what comes of scaling them.
    """

    def claim_of(subject: Frontier | ScalingRuns) -> Callable[..., kit.Claim]:
        where = f"{subject.network}, {NAMES[subject.optimizer]}"
        return partial(CLAIMS, where=where, figures=FIGURES[subject.optimizer])

    for frontier in frontiers:
        claim, optimizer = claim_of(frontier), frontier.optimizer
        yield claim("slope", frontier.slope())
        for rule in (rule for rule in rules if rule.network == frontier.network):
            expected = {optimizer: expected_damping(rule, optimizer)}
            if "additive" in rule.predicted:
                expected["isotropic"] = rule.dampings(RATE, "additive")
            for key, dampings in expected.items():
                worst, unit = rates.worst_ratio(frontier, by_size(rule, dampings))
                yield claim(key, worst, unit=unit)
    for runs in scaling:
        sizes = {"far": rates.far_from(runs), "reference": runs.reference}
        claim = partial(claim_of(runs), unmet=rates.untrained_reason(runs), **sizes)
        yield claim("kept", rates.rise(runs, "inverse"))
        yield claim("better", rates.advantage(runs, "inverse", "constant"))


def expected_damping(rule: RateRule, optimizer: str) -> Tensor:
    """The least damping (sizes,) from what batches add to λ₁; for KFAC α/2 times that, no Eq. 5.36.

    For Adam's ε that of heavy ball at rate (1 − β₁)/ε. At the large ε that α = 1 needs, √v̂ is
    small beside it and Adam is SGD with averaged momentum.
    """
    if optimizer == "kfac":
        return rule.dampings(RATE)
    beta = edges.BETAS[0]
    limits = [stability_limit(rule.full, float(value), beta) for value in rule.excess()]
    return RATE * (1 - beta) / torch.tensor(limits, dtype=torch.float64)


def by_size(rule: RateRule, dampings: Tensor) -> dict[int, float]:
    """Dampings (sizes,) of a rule by its batch sizes."""
    return dict(zip(rule.batch_sizes, dampings.tolist(), strict=True))


def tables(rows: Rows) -> Iterator[kit.Table]:
    """The least damping beside the rule's, and the runs under both rules."""
    for network, frontiers, rules in edges.networks_of(rows):
        expected = {}
        for rule in rules:
            for name, dampings in _expected_dampings(rule, frontiers).items():
                values = by_size(rule, dampings).items()
                expected[name] = {size: f"{value:.3g}" for size, value in values}
        title = f"{network}: the smallest damping at which the loss falls, α = 1"
        yield rates.edge_table(title, {f.optimizer: f for f in frontiers}, expected)
    yield from (runs.by_size() for runs in edges.scaling_of(rows))


def _expected_dampings(rule: RateRule, frontiers: Sequence[Frontier]) -> dict[str, Tensor]:
    """Dampings (sizes,): Eq. 5.36 with Pσ² and τ², and by what batches add to λ₁."""
    models = {"additive": "Eq. 5.36, Pσ²", "directional": "τ² for Pσ²"}
    expected = {
        name: rule.dampings(RATE, model)
        for model, name in models.items()
        if model in rule.predicted
    }
    optimizers = [frontier.optimizer for frontier in frontiers]
    return expected | {
        f"from batch curvature, {each}": expected_damping(rule, each) for each in optimizers
    }


def charts(rows: Rows) -> Iterator[kit.Chart]:
    """The least damping over batch sizes with the rule's, and what comes of scaling it."""
    for network, frontiers, rules in edges.networks_of(rows):
        series = [rates.edge_series(frontier, NAMES[frontier.optimizer]) for frontier in frontiers]
        for rule in rules:
            for name, dampings in _expected_dampings(rule, frontiers).items():
                heights = [value or None for value in dampings.tolist()]
                series.append(kit.Series(name, rule.batch_sizes, heights))
        labels = (
            f"{network}: the smallest damping at which the loss falls, α = 1",
            "batch size B",
            "damping",
        )
        yield kit.Chart(*labels, tuple(series), x_log=True, y_log=True, source="Eq. 5.36")
    yield from rates.scaling_charts(edges.scaling_of(rows))


OPTIMIZERS = ("adam", "kfac")
SECTION = SearchSection(1e-4, 1e3, points=8)  # of 1/ε
KFAC_SECTION = SearchSection(1e-2, 1e6, points=5, rounds=3)  # of 1/δ; its runs are one by one
# of 1/ε for a network that has been trained
LATE: rates.Searched = {
    "adam": (
        lambda parameters, inverse: torch.optim.Adam(parameters, RATE, eps=1 / inverse),
        SearchSection(1e-2, 1e2, points=4),
    )
}
NOISE_SAMPLES = 128  # per probe, for the variance of its Hessian
RULES = {"inverse": -1.0, "constant": 0.0}
SAFETY = 2.0  # times the least damping, from which the rules start


POWERS_OF_4, MNIST = (16, 64, 256, 1024, 4096), ("MLP, MNIST", "mlp", "mnist")
TINY = EdgeSubject(
    "MLP, digits", "mlp", "digits", 256, (16, 64, 256), 10, 2, 1, 64, {"widths": (8,)}
)
SCALES: dict[str, tuple[EdgeSubject, ...]] = {
    "smoke": (TINY,),
    "cpu": (EdgeSubject(*MNIST, 10_000, edges.powers(4, 10), 100, 3, 3, 128, {"widths": (32,)}),),
    # a stand-in, for benchmarks/minibatch_rates.py; at this scale the experiment has VGG-16
    "paper": (EdgeSubject(*MNIST, 60_000, POWERS_OF_4, 100, 3, 5, 256, {"widths": (100,)}),),
}


def scaled_runs(ground: PreparedSubject, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under both rules, from twice the least damping at the reference batch size."""
    require_choice(optimizer, "optimizer", OPTIMIZERS)
    reference, seeds = ground.subject.reference, ground.subject.seeds
    base = SAFETY * EDGE_SEARCHES[optimizer](ground.at(reference), seed).at(reference)

    def by_adam(size: int, epsilon: Tensor) -> edges.Outcome:
        values = epsilon.expand(seeds, -1)
        settings = StackedSettings("adam", torch.full_like(values, RATE), values)
        return edges.outcome(ground, settings, size, seed)

    def by_kfac(size: int, dampings: Tensor) -> edges.Outcome:
        outcomes = [
            [_kfac_outcome(ground, index, damping, size, seed) for index in range(seeds)]
            for damping in dampings.tolist()
        ]
        errors, losses, distances = torch.tensor(outcomes, dtype=torch.float64).unbind(-1)
        return errors, losses, distances

    scaled, run = ("ε", by_adam) if optimizer == "adam" else ("δ", by_kfac)
    return edges.scaling_runs(ground, optimizer, scaled, base, RULES, run)


def least_epsilon(ground: PreparedSubject, seed: int, section: SearchSection = SECTION) -> Frontier:
    """Adam's least ε at α = 1, at every batch size."""
    subject, first = ground.subject, ground.first_losses()

    def learns(size: int, inverse: Tensor) -> Tensor:
        settings = StackedSettings("adam", torch.full_like(inverse, RATE), inverse.reciprocal())
        cells = ground.cells(settings)
        cells.train(size, subject.steps, seed, f"{subject.network}, Adam's ε, B = {size}")
        return cells.evaluate(ground.probe)[0] < LEARNT_LOSS * first

    return ground.search("adam", "trains", section, learns).inverse()


def least_kfac_damping(
    ground: PreparedSubject, seed: int, section: SearchSection = KFAC_SECTION
) -> Frontier:
    """KFAC's least δ at α = 1, at every batch size."""
    subject, first = ground.subject, [_loss(model, ground) for model in ground.models]

    def learns(size: int, inverse: Tensor) -> Tensor:
        passed = torch.zeros_like(inverse, dtype=torch.bool)
        for index, values in enumerate(inverse.tolist()):
            # from the largest 1/δ down to the first at which this seed's network learns
            for column in reversed(range(len(values))):
                run = (index, 1 / values[column], size, subject.steps, seed)
                trained = _train_kfac(ground, *run)
                if trained is not None and _loss(trained, ground) < LEARNT_LOSS * first[index]:
                    passed[index, column] = True
                    break
        sizes = subject.batch_sizes
        report(f"{subject.network}, KFAC's δ", sizes.index(size) + 1, len(sizes))
        return passed

    return ground.search("kfac", "trains", section, learns).inverse()


def _train_kfac(
    ground: PreparedSubject, index: int, damping: float, size: int, steps: int, seed: int
) -> nn.Module | None:
    """The network of one seed after ``steps`` steps of KFAC at α = 1; None where it diverged."""
    model = copy.deepcopy(ground.models[index]).train()
    optimizer = KFAC(model, RATE, damping)
    (x, y), rng = ground.train, generator(seed, "kfac order", index)
    order = torch.randperm(len(x), generator=rng)
    try:
        for _ in range(steps):
            if len(order) < size:
                order = torch.randperm(len(x), generator=rng)
            rows, order = order[:size].to(x.device), order[size:]
            loss = cross_entropy(model(x[rows]), y[rows])
            if not bool(loss.isfinite()):
                return None
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # moments that are infinite, or that so little damping does not make invertible
    except RuntimeError:
        return None
    finally:
        optimizer.close()
    return model


@torch.no_grad()
def _loss(model: nn.Module, ground: PreparedSubject) -> float:
    x, y = ground.probe
    return float(cross_entropy(model(x), y))


@torch.no_grad()
def _kfac_outcome(
    ground: PreparedSubject, index: int, damping: float, size: int, seed: int
) -> tuple[float, float, float]:
    """Validation error, training loss and distance of one run; NaN where it diverged."""
    with torch.enable_grad():
        model = _train_kfac(ground, index, damping, size, edges.steps_of(ground, size), seed)
    loss = math.nan if model is None else _loss(model, ground)
    if model is None or not math.isfinite(loss):
        return math.nan, math.nan, math.nan
    x, y = ground.test
    error = float((model(x).argmax(1) != y).double().mean())
    pairs = zip(model.parameters(), ground.models[index].parameters(), strict=True)
    return error, loss, float(sum((a - b).double().square().sum() for a, b in pairs) ** 0.5)


EDGE_SEARCHES: dict[str, Callable[[PreparedSubject, int], Frontier]] = {
    "adam": least_epsilon,
    "kfac": least_kfac_damping,
}
ASSUMPTIONS = kit.sentences(f"""
    A run trains if its mean loss over 2,000 training images ends below {LEARNT_LOSS:g} of the
      initial one.
    The number of steps is the same at every batch size. α = 1; no momentum beside Adam's β₁ = 0.9,
      no decay.
    KFAC takes the empirical Fisher, renewed at each of the first ten steps, then every ten.
    Scaling starts from {SAFETY:g} times the smallest stable damping at the reference batch size.
    Eq. 5.36 with consistent units is αPσ²/(2bλ₁), with σ² of the Hessian at the initial weights.
    There Pσ²/(bλ₁) approximates the excess of a batch's λ₁ over that of the full data. The measured
      excess is far larger, because the noise is not isotropic.
    The rule α(λ₁(B) − λ₁)/2 with the excess measured on five batches is therefore another rule than
      Eq. 5.36, and so is the one with τ² in place of Pσ².
    The rule for ε is that of SGD with averaged momentum at rate α/ε, which Adam is where ε is
      large.
    Validation errors are not compared if that of the baseline run exceeds {WORST_REFERENCE:g} %.
    An error counts as unchanged if it rises by at most {SAME_ERROR:g} %. The thesis does not show
      constant damping. n counts initial weights.
    These two bounds, and judging Eq. 5.36 with Pσ² separately, were chosen after the results had
      been seen.
    A run that diverged counts with the validation error of guessing, 90 %.
    At paper scale VGG-16 is trained for 34 of 300 epochs, and Adam's edges are searched from there,
      as in stable-rates.
    Those of KFAC are not searched there, because its factors take too long to compute, and no runs
      are scaled.
""")


def run(cell: Cell, device: str) -> list[Row]:
    """The least damping, the rule, or the scaled runs, as ``part`` says."""
    if "steps" in cell and "model" not in cell:
        rows = rates.run_late(cell, device, LATE, NOISE_SAMPLES)
        return [row | {"edge": 1 / row["edge"]} if "edge" in row else row for row in rows]
    ground, root = edges.prepare_cell(cell, device), cell["root"]
    if cell["part"] == "rule":
        start = edges.start_of(ground)
        return edges.rule_rows(edges.rule_at(ground, start, "at the start", root))
    if cell["part"] == "scaling":
        return edges.scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    return edges.edge_rows(EDGE_SEARCHES[cell["optimizer"]](ground, root))


EXPERIMENT = kit.Experiment(
    "damping",
    "The least damping of KFAC and Adam over batch sizes",
    kit.SPECTRAL,
    "§5.8, Figures 5.11–5.14",
    {
        **{
            scale: edges.edge_cells(SCALES[scale], OPTIMIZERS, [{}], OPTIMIZERS)
            for scale in ("smoke", "cpu")
        },
        "paper": rates.late_cells(rates.PAPER, edges.powers(4, 10), (16, 64, 256), seeds=3),
    },
    *(run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs by KFAC and"
        " Adam at α = 1; seeds are not in the text."
    ),
    sizes=(kit.Size("VGG-16", "cifar100", 45_000, 300),),
)
