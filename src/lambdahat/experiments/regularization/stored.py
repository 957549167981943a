"""Results of XOR and XORD as they were stored before the runner, which figures of the documentation are drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.regularization.tables import tables_of
from lambdahat.experiments.reproduction import Reproduction, Table, Verdict
from lambdahat.storage import Result


@dataclass(frozen=True)
class RuleRun(Result):
    """One rule from one regime: the final value of each quantity, seed by seed (S,)."""

    activation: str
    label: str
    values: Mapping[str, Tensor]

    def finite(self, name: str) -> Tensor:
        """The values of the seeds that did not diverge."""
        values = self.values[name]
        return values[values.isfinite()]

    def mean(self, name: str) -> float:
        """The mean over the seeds that did not diverge."""
        return float(self.finite(name).mean())

    def deviation(self, name: str) -> float:
        """The standard deviation over them."""
        return float(self.finite(name).std())


@dataclass(frozen=True)
class RegularizationResult(Reproduction):
    """The runs of all rules, regimes and activations, seed by seed, and the verdicts on what the thesis claims."""

    name: str
    runs: tuple[RuleRun, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seeds: int
    seed: int

    def tables(self) -> tuple[Table, ...]:
        """Those of the experiment."""
        return tuple(tables_of(self.name, self.rows()))

    def rows(self) -> Rows:
        """The same figures as rows of the experiment."""
        return Rows(
            {"activation": run.activation, "rule": run.label, "seed": seed, "data": self.name}
            | {name: float(values[seed]) for name, values in run.values.items()}
            for run in self.runs
            for seed in range(self.seeds)
        )
