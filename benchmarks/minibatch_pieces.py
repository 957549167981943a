"""The mini-batch experiments in one piece, for a machine with a GPU and data in .npz files.

The same functions with the same seeds as the cells of ``lambdahat reproduce``;
``minibatch_store.py`` puts the results into the stores. Results are saved files: their names
and fields are a format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.storage import Result
from lambdahat.data.splits import Split
from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Verdict, judge
from lambdahat.experiments.minibatch import lanczos_opt, largest_rates, least_damping
from lambdahat.experiments.minibatch.batch_points import (
    SCALES,
    CurvaturePoint,
    load_split,
    measure_point,
    rows_of,
    training_stops,
)
from lambdahat.experiments.minibatch.stability_edges import (
    Frontier,
    RateRule,
    ScalingRuns,
    edge_rows,
    prepare,
    rule_at,
    rule_rows,
    scaling_rows,
    start_of,
)
from lambdahat.experiments.published import find


@dataclass(frozen=True)
class Piece(Result):
    """What was measured for the experiment ``name``; its verdicts and tables are the
    experiment's, from ``rows()``.
    """

    name: str

    def rows(self) -> list[Row]:
        """All of it, flat, as the cells of the experiment give it."""
        raise NotImplementedError

    def judged(self) -> list[Verdict]:
        """The verdicts as they are judged now."""
        return judge(find(self.name).claims(Rows(self.rows())))


@dataclass(frozen=True)
class EdgesResult(Piece):
    """Edges over batch sizes, the rule's predictions, and runs under scaling rules."""

    frontiers: tuple[Frontier, ...]
    rules: tuple[RateRule, ...]
    scaling: tuple[ScalingRuns, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    def rows(self) -> list[Row]:
        parts = (
            *map(edge_rows, self.frontiers),
            *map(rule_rows, self.rules),
            *map(scaling_rows, self.scaling),
        )
        return [row for part in parts for row in part]


class StableRatesResult(EdgesResult):
    """The largest stable rates."""


class DampingResult(EdgesResult):
    """The least dampings."""


@dataclass(frozen=True)
class LanczosResult(Piece):
    """``measures`` by name, (looks, S, D, E) for S seeds, D dampings and E factors η;
    ``descent`` (looks, S).
    """

    dampings: tuple[float, ...]
    etas: tuple[float, ...]
    steps: tuple[int, ...]
    measures: dict[str, Tensor]
    descent: dict[str, Tensor]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    def rows(self) -> list[Row]:
        flat = {
            name: torch.cat([values.flatten(2), self.descent[name].unsqueeze(2)], 2)
            for name, values in self.measures.items()
        }
        return lanczos_opt.rows_of(self.dampings, self.steps, flat)


@dataclass(frozen=True)
class BatchEigenvaluesResult(Piece):
    """Every network at every point of its training, through Hessian and GGN."""

    scale: str
    points: tuple[CurvaturePoint, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seed: int

    def rows(self) -> list[Row]:
        return rows_of(self.points)


def with_verdicts(found: Any) -> Any:
    """The same with its claims judged."""
    return replace(found, verdicts=tuple(found.judged()), assumptions=find(found.name).assumptions)


def run_stable_rates(
    scale: str, seed: int, splits: Mapping[str, Split], device: str, networks: Sequence[str]
) -> StableRatesResult:
    """The edges of some networks of a scale and the runs that follow; ``splits`` replaces data
    sets by name.
    """
    edges, rules, scaling = [], [], []
    for subject in (
        subject for subject in largest_rates.SCALES[scale] if subject.network in networks
    ):
        ground = prepare(subject, splits, seed, device)
        edges += [
            largest_rates.stable_rates(ground, optimizer, seed, criterion)
            for optimizer, criterion in largest_rates.SEARCHES
        ]
        rules += [largest_rates.rule_of(ground, point, seed) for point in largest_rates.POINTS]
        if subject.epochs:
            scaling += [
                largest_rates.scaled_runs(ground, optimizer, seed)
                for optimizer in largest_rates.SCALED_OPTIMIZERS
            ]
    return with_verdicts(
        StableRatesResult("stable-rates", tuple(edges), tuple(rules), tuple(scaling), (), (), seed)
    )


def run_damping(scale: str, seed: int, splits: Mapping[str, Split], device: str) -> DampingResult:
    """The least dampings of a scale's networks and the runs that follow."""
    edges, rules, scaling = [], [], []
    for subject in least_damping.SCALES[scale]:
        ground = prepare(subject, splits, seed, device)
        edges += [
            least_damping.EDGE_SEARCHES[optimizer](ground, seed)
            for optimizer in least_damping.OPTIMIZERS
        ]
        rules.append(rule_at(ground, start_of(ground), "at the start", seed))
        scaling += [
            least_damping.scaled_runs(ground, optimizer, seed)
            for optimizer in least_damping.OPTIMIZERS
        ]
    return with_verdicts(
        DampingResult("damping", tuple(edges), tuple(rules), tuple(scaling), (), (), seed)
    )


def run_lanczos_opt(scale: str, seed: int, split: Split | None, device: str) -> LanczosResult:
    """The grid of dampings δ and factors η, and gradient descent; all seeds together."""
    setting = lanczos_opt.SCALES[scale]
    steps, found = lanczos_opt.train_runs(setting, seed, split, device)
    grid = (len(setting["dampings"]), len(lanczos_opt.ETAS))
    measures = {name: values[..., :-1].unflatten(2, grid) for name, values in found.items()}
    descent = {name: values[..., -1] for name, values in found.items()}
    return with_verdicts(
        LanczosResult(
            "lanczos-opt",
            setting["dampings"],
            lanczos_opt.ETAS,
            steps,
            measures,
            descent,
            (),
            (),
            seed,
        )
    )


def measure_networks(
    scale: str,
    seed: int,
    device: str,
    data: Mapping[str, Split],
    networks: Sequence[str] | None,
    keep: Callable[[BatchEigenvaluesResult], None],
) -> None:
    """Train the networks of a scale, or those named, and measure them at their stops, without
    predictions.

    ``keep`` is called after each stop with all that was measured so far, lest a kill lose it.
    """
    subjects = SCALES[scale]
    for name in networks or ():
        require_choice(name, "networks", [subject["network"] for subject in subjects])
    points: list[CurvaturePoint] = []
    for subject in (
        subject for subject in subjects if networks is None or subject["network"] in networks
    ):
        split = data.get(subject["data"]) or load_split(subject["data"])
        for epoch, problem in training_stops(subject, split, seed, device):
            points += measure_point(subject, epoch, problem, seed)
            keep(BatchEigenvaluesResult("batch-eigenvalues", scale, tuple(points), (), (), seed))


def concluded(parts: Sequence[BatchEigenvaluesResult]) -> BatchEigenvaluesResult:
    """What was measured in one run, or in several of some networks each, with predictions and
    verdicts.
    """
    scales = {part.scale for part in parts}
    points = []
    for point in (point for part in parts for point in part.points):
        points.append(point.with_predictions())
        report("predictions", len(points), sum(len(part.points) for part in parts))
    return with_verdicts(
        replace(parts[0], scale=" and ".join(sorted(scales)), points=tuple(points))
    )
