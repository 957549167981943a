"""The least damping in tables and charts."""

from __future__ import annotations

from collections.abc import Sequence

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.minibatch.damping_claims import NAMES, RATE, by_size, expected_damping
from lambdahat.experiments.minibatch.frontiers import Frontier
from lambdahat.experiments.minibatch.rate_rows import frontiers_of, rules_of, scaling_of
from lambdahat.experiments.minibatch.rate_rules import RateRule
from lambdahat.experiments.minibatch.rate_tables import edge_series, scaling_charts
from lambdahat.results.charts import Chart, Series


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
    expected = {name: values for rule in own for name, values in _expected(rule, mine).items()}
    lines = []
    for size in sorted({size for frontier in mine for size in frontier.batch_sizes}):
        found = [frontier.cell(size) if size in frontier.batch_sizes else "" for frontier in mine]
        told = [f"{values[size]:.3g}" if size in values else "" for values in expected.values()]
        lines.append((str(size), *found, *told))
    header = ("B", *(frontier.optimizer for frontier in mine), *expected)
    return Table(f"{network}: the least damping that trains at α = 1", header, tuple(lines))


def _expected(rule: RateRule, frontiers: Sequence[Frontier]) -> dict[str, dict[int, float]]:
    """The dampings that are compared, by batch size: Eq. 5.36 with Pσ² and with τ², and with
    what batches add to λ₁.
    """
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
            for name, values in _expected(rule, mine).items()
        ]
        series = (*(edge_series(frontier, NAMES[frontier.optimizer]) for frontier in mine), *told)
        out.append(
            Chart(
                f"{network}: the least damping at α = 1",
                "batch size B",
                "damping",
                series,
                x_log=True,
                y_log=True,
                source="Eq. 5.36",
            )
        )
    return out + scaling_charts(scaling_of(rows))
