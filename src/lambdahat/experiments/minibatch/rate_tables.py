"""Stable rates in tables and charts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Reading, Table, mean_of
from lambdahat.experiments.minibatch.frontiers import Frontier
from lambdahat.experiments.minibatch.rate_claims import name_of, rule_slope
from lambdahat.experiments.minibatch.rate_rows import frontiers_of, rules_of, scaling_of
from lambdahat.experiments.minibatch.rate_rules import HELD, RateRule
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns
from lambdahat.results.charts import Chart, Series

ABSENT = "not in the thesis"
# of validation error, error over distance, and training, by optimiser and what is scaled
FIGURES = {
    ("momentum", "rate"): ("Figure 5.7a", "Figure 5.8a", ABSENT),
    ("adam", "rate"): ("Figure 5.16", ABSENT, "Figure 5.15"),
    ("adam", "ε"): ("Figure 5.12", ABSENT, "Figure 5.11"),
    ("kfac", "δ"): ("Figure 5.14", ABSENT, "Figure 5.13"),
}


def tables(rows: Rows) -> list[Table]:
    """Stable rates and slopes of each network, λ₁ of its batches, and the runs under scaling
    rules.
    """
    frontiers, rules, scaling = frontiers_of(rows), rules_of(rows), scaling_of(rows)
    networks = dict.fromkeys(frontier.network for frontier in frontiers)
    out = [
        _rates(name, frontiers, [rule for rule in rules if rule.network == name])
        for name in networks
    ]
    if frontiers:
        out.append(_thresholds(frontiers, rules))
    return [*out, *map(_curvature, rules), *(runs.table() for runs in scaling)]


def _rates(network: str, frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> Table:
    mine = [frontier for frontier in frontiers if frontier.network == network]
    sizes = sorted({size for frontier in mine for size in frontier.batch_sizes})
    lines = []
    for size in sizes:
        found = [frontier.cell(size) if size in frontier.batch_sizes else "" for frontier in mine]
        lines.append((str(size), *found, *(_allowed(rule, size) for rule in rules)))
    header = (
        "B",
        *(f"{f.optimizer}, {f.criterion}" for f in mine),
        *(f"2/λ₁, {rule.point}" for rule in rules),
    )
    return Table(f"{network}: the largest stable rate, and the rule for SGD", header, tuple(lines))


def _allowed(rule: RateRule, size: int) -> str:
    return (
        f"{float(rule.rates('sgd')[rule.batch_sizes.index(size)]):.3g}"
        if size in rule.batch_sizes
        else ""
    )


def _thresholds(frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> Table:
    """Where the growth ends by the rule and by the edges themselves, and the slopes on either
    side of it.
    """
    lines = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        fitted, spread = frontier.turning()
        seen = f"{fitted:.3g} ± {100 * spread:.0f} %" if math.isfinite(fitted) else "none"
        held = frontier.optimizer in HELD
        line = [
            name_of(frontier),
            seen,
            _slope(frontier.slope(high=fitted)) if held else "",
            _slope(frontier.slope()),
        ]
        if own and held:
            turning, expected = (
                own[0].turning(frontier.optimizer),
                rule_slope(own[0], frontier.optimizer),
            )
            told = f"{expected:+.2f}" if math.isfinite(expected) else "too few"
            below, above = frontier.slope(high=turning), frontier.slope(low=turning)
            line += [f"{turning:.3g}", _slope(below), told, _slope(above)]
        lines.append(tuple(line + [""] * (8 - len(line))))
    header = (
        "edge",
        "threshold by the edges",
        "slope up to it",
        "slope, all B",
        "threshold by the rule",
        "slope below",
        "the rule's own",
        "slope above",
    )
    return Table("d log rate/d log B and the batch size at which it changes", header, tuple(lines))


def _slope(slope: Reading) -> str:
    return f"{slope.value:+.2f} ± {slope.stderr:.2f}" if math.isfinite(slope.value) else "too few"


def _curvature(rule: RateRule) -> Table:
    """λ₁ of batches, predicted and measured."""
    lines = []
    for place, size in enumerate(rule.batch_sizes):
        shown = mean_of(rule.measured[place].tolist())
        told = (f"{float(values[place]):.3g}" for values in rule.predicted.values())
        lines.append((str(size), f"{shown.value:.3g} ± {shown.stderr:.1g}", *told))
    title = f"{rule.network}, {rule.point}: λ₁ of a batch; {rule.full:.3g} on all data"
    return Table(title, ("B", "measured", *rule.predicted), tuple(lines))


def charts(rows: Rows) -> list[Chart]:
    """Stable rates over batch sizes with the rule's, errors under each scaling rule, and error
    over distance.
    """
    frontiers, rules, out = frontiers_of(rows), rules_of(rows), []
    for network in dict.fromkeys(frontier.network for frontier in frontiers):
        edges = [
            edge_series(f, f"{f.optimizer}, {f.criterion}")
            for f in frontiers
            if f.network == network
        ]
        allowed = [
            Series(
                f"rule, {optimizer}, {rule.point}", rule.batch_sizes, rule.rates(optimizer).tolist()
            )
            for rule in rules
            for optimizer in HELD
            if rule.network == network
        ]
        out.append(
            Chart(
                f"{network}: the largest stable rate",
                "batch size B",
                "learning rate",
                (*edges, *allowed),
                x_log=True,
                y_log=True,
                source="§§5.7, 5.8.1",
                caption="Rules from λ₁ of single batches, at the start and after some training.",
            )
        )
    return out + scaling_charts(scaling_of(rows))


def edge_series(frontier: Frontier, name: str) -> Series:
    """Geometric means over seeds with their errors."""
    centre = frontier.centre()
    error = centre * frontier.stderr()
    return Series(
        name, frontier.batch_sizes, _known(centre.tolist()), _known(error.tolist()), "points"
    )


def scaling_charts(scaling: Sequence[ScalingRuns]) -> list[Chart]:
    """Over batch sizes under each rule validation error and training loss, and the error over
    the distance.
    """
    out = []
    for runs in scaling:
        figures = FIGURES[runs.optimizer, runs.scaled]
        title = f"{runs.network}, {runs.optimizer}: {runs.scaled} scaled from B = {runs.reference}"
        words, after = "batch size B", f"After {runs.epochs} epochs at every size."
        out.append(
            Chart(
                title,
                words,
                "validation error, %",
                _over_sizes(runs, 100 * runs.validation_error),
                x_log=True,
                source=figures[0],
                caption=after,
            )
        )
        clouds = []
        for place, rule in enumerate(runs.rules):
            far, wrong = (
                runs.distance[place].flatten(),
                100 * runs.validation_error[place].flatten(),
            )
            fine = far.isfinite() & wrong.isfinite()
            clouds.append(Series(rule, far[fine].tolist(), wrong[fine].tolist(), style="points"))
        out.append(
            Chart(
                f"{runs.network}, {runs.optimizer}: error and distance",
                "distance from the start",
                "validation error, %",
                tuple(clouds),
                x_log=True,
                source=figures[1],
            )
        )
        out.append(
            Chart(
                f"{title}, training",
                words,
                "training loss",
                _over_sizes(runs, runs.training_loss),
                x_log=True,
                y_log=True,
                source=figures[2],
                caption=f"{after} The thesis shows the training error.",
            )
        )
    return out


def _over_sizes(runs: ScalingRuns, values: Tensor) -> tuple[Series, ...]:
    """Means over the seeds of values (rules, sizes, S), a curve for each rule."""
    series = []
    for rule, row in zip(runs.rules, values, strict=True):
        readings = [mean_of(each.tolist()) for each in row]
        series.append(
            Series(
                rule,
                runs.batch_sizes,
                _known([r.value for r in readings]),
                _known([r.stderr for r in readings]),
            )
        )
    return tuple(series)


def _known(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
