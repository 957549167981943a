"""Edges, rules and scaled runs as flat rows, and back.

``part`` tells the rows apart: "edge" has an edge for each seed and batch size, "rule" the largest
eigenvalue of one batch beside the predictions, "scaling" what came of one run. Where nothing was
found or a run diverged stands NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.minibatch.frontiers import Frontier
from lambdahat.experiments.minibatch.rate_rules import MODELS, RateRule
from lambdahat.experiments.minibatch.scaling_runs import ScalingRuns

OUTCOMES = {
    "validation error": "validation_error",
    "training loss": "training_loss",
    "distance": "distance",
}


def edge_rows(frontier: Frontier) -> list[Row]:
    """A row for each batch size and seed."""
    where = {
        "part": "edge",
        "network": frontier.network,
        "optimizer": frontier.optimizer,
        "criterion": frontier.criterion,
        "resolution": frontier.resolution,
    }
    return [
        {**where, "batch_size": size, "seed": seed, "edge": float(edge)}
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        for seed, edge in enumerate(edges)
    ]


def rule_rows(rule: RateRule) -> list[Row]:
    """A row for each batch that was measured."""
    where = {
        "part": "rule",
        "network": rule.network,
        "point": rule.point,
        "population": rule.samples,
        "full": rule.full,
    }
    return [
        {**where, "batch_size": size, "batch": batch, "largest": float(value)}
        | {model: float(values[place]) for model, values in rule.predicted.items()}
        for place, size in enumerate(rule.batch_sizes)
        for batch, value in enumerate(rule.measured[place])
    ]


def scaling_rows(runs: ScalingRuns) -> list[Row]:
    """A row for each run."""
    where = {
        "part": "scaling",
        "network": runs.network,
        "optimizer": runs.optimizer,
        "scaled": runs.scaled,
        "reference": runs.reference,
        "epochs": runs.epochs,
    }
    return [
        {
            **where,
            "rule": rule,
            "batch_size": size,
            "seed": seed,
            "value": float(runs.values[row, place]),
        }
        | {name: float(getattr(runs, field)[row, place, seed]) for name, field in OUTCOMES.items()}
        for row, rule in enumerate(runs.rules)
        for place, size in enumerate(runs.batch_sizes)
        for seed in range(runs.validation_error.shape[2])
    ]


def frontiers_of(rows: Rows) -> list[Frontier]:
    """The edges of every network, optimiser and criterion."""
    edges, out = rows.where(part="edge"), []
    for network, optimizer, criterion in dict.fromkeys(
        (r["network"], r["optimizer"], r["criterion"]) for r in edges
    ):
        part = edges.where(network=network, optimizer=optimizer, criterion=criterion)
        sizes, seeds = sorted(part.distinct("batch_size")), part.distinct("seed")
        found = _filled(part, "edge", batch_size=sizes, seed=seeds)
        out.append(
            Frontier(network, optimizer, criterion, tuple(sizes), found, part[0]["resolution"])
        )
    return out


def rules_of(rows: Rows) -> list[RateRule]:
    """The rule of every network at every point."""
    measured, out = rows.where(part="rule"), []
    for network, point in dict.fromkeys((row["network"], row["point"]) for row in measured):
        part = measured.where(network=network, point=point)
        sizes, first = sorted(part.distinct("batch_size")), part[0]
        values = _filled(part, "largest", batch_size=sizes, batch=part.distinct("batch"))
        told = {
            model: _filled(part, model, batch_size=sizes, batch=[0])[:, 0]
            for model in MODELS
            if model in first
        }
        out.append(
            RateRule(network, point, first["population"], tuple(sizes), first["full"], told, values)
        )
    return out


def scaling_of(rows: Rows) -> list[ScalingRuns]:
    """The runs of every network and optimiser."""
    every, out = rows.where(part="scaling"), []
    for network, optimizer in dict.fromkeys((row["network"], row["optimizer"]) for row in every):
        part = every.where(network=network, optimizer=optimizer)
        first, rules, sizes = part[0], part.distinct("rule"), sorted(part.distinct("batch_size"))
        axes = {"rule": rules, "batch_size": sizes, "seed": part.distinct("seed")}
        values = _filled(part, "value", **axes)[..., 0]
        outcomes = [_filled(part, name, **axes) for name in OUTCOMES]
        out.append(
            ScalingRuns(
                network,
                optimizer,
                first["scaled"],
                first["reference"],
                first["epochs"],
                tuple(rules),
                tuple(sizes),
                values,
                *outcomes,
            )
        )
    return out


def _filled(rows: Rows, name: str, **axes: list[object]) -> Tensor:
    """A column as an array over the values of other columns; NaN where there is no row."""
    places = [{value: place for place, value in enumerate(values)} for values in axes.values()]
    found = torch.full([len(values) for values in axes.values()], math.nan, dtype=torch.float64)
    for row in rows:
        index = tuple(place.get(row[axis]) for axis, place in zip(axes, places, strict=True))
        if None not in index:
            found[index] = row[name]
    return found
