"""What the regularization thesis says of XOR and XOR detection, as code."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from scipy.stats import kendalltau
from torch import Tensor

from lambdahat.experiments.reproduction import FAILS, HOLDS, Verdict, judged, paired_gap, worst
from lambdahat.storage import Result

SMALL = ("SGD Small", "Metric Small")
SELECTIVE = ("Selective L2", "L2 Stopped Selective")
PLAIN = ("SGD Large", "Metric Large", "L2", "L2 Stopped")
LARGE = (*PLAIN, *SELECTIVE)
RULES = ("SGD Small", "SGD Large", "Metric Small", "Metric Large", "L2", "Selective L2", "L2 Stopped",
         "L2 Stopped Selective")  # fmt: skip


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
class Below:
    """On average over seeds, every rule of ``lower`` has less of ``quantity`` than every rule of ``upper``."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    lower: tuple[str, ...]
    upper: tuple[str, ...]

    def judge(self, runs: Mapping[str, RuleRun]) -> tuple[str, str]:
        """Verdict and figures: those of the pair that decides it, the one that speaks most against the claim."""
        pairs = []
        for low, high in product(self.lower, self.upper):
            gap, stderr = paired_gap(runs[low].values[self.quantity], runs[high].values[self.quantity])
            pairs.append((low, high, gap, stderr))
        verdict = worst([judged(gap, stderr) for *_, gap, stderr in pairs])
        decisive = [pair for pair in pairs if judged(*pair[2:]) == verdict]
        low, high, gap, stderr = min(decisive, key=lambda pair: _score(*pair[2:]))
        figures = f"{low} {runs[low].mean(self.quantity):.3g}, {high} {runs[high].mean(self.quantity):.3g}"
        return verdict, f"{figures}, difference {gap:+.2g} ± {stderr:.1g}"


def _score(gap: float, stderr: float) -> float:
    """How well a gap above 0 is supported; least where too few seeds did not diverge."""
    if math.isnan(gap):
        return -math.inf
    return gap / stderr if stderr else math.copysign(math.inf, gap) if gap else 0.0


@dataclass(frozen=True)
class Reaches:
    """The mean of ``quantity`` is at least ``least`` for every rule named."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    rules: tuple[str, ...]
    least: float

    def judge(self, runs: Mapping[str, RuleRun]) -> tuple[str, str]:
        """Verdict and figures of the lowest."""
        lowest = min(self.rules, key=lambda rule: runs[rule].mean(self.quantity))
        mean = runs[lowest].mean(self.quantity)
        return (HOLDS if mean >= self.least else FAILS), f"lowest: {lowest} {mean:.3g}"


BOTH = ("tanh", "relu")
ACCURACY, TRAIN, TEST, NORM = "training accuracy", "training error", "test error", "norm"
TABLES, TEXT = "Tables 5.1, 5.2", "§5.3"
NOT_METRIC = tuple(rule for rule in RULES if rule != "Metric Large")

CLAIMS: dict[str, tuple[Below | Reaches, ...]] = {
    "xor": (
        Reaches("all rules reach a training accuracy of roughly 100 %", TEXT, ("tanh",), ACCURACY, RULES, 0.95),
        Reaches("all rules but Metric Large reach 100 % at every seed", TEXT, ("relu",), ACCURACY, NOT_METRIC, 1.0),
        Below("Metric Large trains worst", TEXT, ("relu",), ACCURACY, ("Metric Large",), NOT_METRIC),
        Below("the small regime ends at the lowest norms", TEXT, BOTH, NORM, SMALL, LARGE),
        Below("the selective rules end at the lowest norms of the large regime", TABLES, BOTH, NORM, SELECTIVE, PLAIN),
        Below("L2 ends below L2 Stopped", TABLES, BOTH, NORM, ("L2",), ("L2 Stopped",)),
        Below("L2 Stopped ends below Metric Large", TABLES, BOTH, NORM, ("L2 Stopped",), ("Metric Large",)),
        Below("Metric Large ends below SGD Large", TABLES, BOTH, NORM, ("Metric Large",), ("SGD Large",)),
        Below("Metric Small ends below SGD Small", TABLES, BOTH, NORM, ("Metric Small",), ("SGD Small",)),
    ),
    "xord": (
        Below("the small regime has the lowest test errors", TEXT, BOTH, TEST, SMALL, LARGE),
        Below("the selective rules follow", TEXT, ("tanh",), TEST, SELECTIVE, PLAIN),
        Below("L2 and L2 Stopped generalise worst", TEXT, ("tanh",), TEST,
              (*SMALL, *SELECTIVE, "SGD Large", "Metric Large"), ("L2", "L2 Stopped")),
        Below("Metric Large generalises worst", TEXT, ("relu",), TEST, NOT_METRIC, ("Metric Large",)),
        Below("Metric Small generalises better than SGD Small", TEXT, BOTH, TEST, ("Metric Small",), ("SGD Small",)),
        Below("only the small regime and the selective rules keep a training error", TEXT, ("tanh",), TRAIN,
              ("SGD Large", "Metric Large", "L2 Stopped"), (*SMALL, *SELECTIVE)),
        Below("the small regime fits the training data best", TEXT, ("relu",), TRAIN, SMALL, LARGE),
        Below("Metric Large fits the training data worst", TEXT, ("relu",), TRAIN, NOT_METRIC, ("Metric Large",)),
        Below("the small regime ends at the lowest norms", TEXT, BOTH, NORM, SMALL, LARGE),
        Below("the selective rules end at the lowest norms of the large regime", TABLES, BOTH, NORM, SELECTIVE, PLAIN),
    ),
}  # fmt: skip


def judge(task: str, runs: Sequence[RuleRun]) -> tuple[Verdict, ...]:
    """The verdict on every claim, for each activation that it is made of."""
    found = []
    for claim in CLAIMS[task]:
        for activation in claim.activations:
            verdict, evidence = claim.judge({run.label: run for run in runs if run.activation == activation})
            found.append(Verdict(f"{activation}, {claim.quantity}: {claim.text}", claim.source, verdict, evidence))
    return tuple(found)


def agreement(task: str, runs: Iterable[RuleRun]) -> dict[tuple[str, str], float]:
    """Kendall's τ between our means and the thesis's over its eight rule–regime pairs: 1 for the same order."""
    runs, out = list(runs), {}
    for (name, activation), published in PUBLISHED.items():
        rows = [run for run in runs if name == task and run.activation == activation and run.label in published]
        for quantity in next(iter(published.values())) if rows else ():
            pairs = [(run.mean(quantity), published[run.label][quantity]) for run in rows]
            out[activation, quantity] = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return out


def _table(quantities: Sequence[str], *columns: Sequence[float]) -> dict[str, dict[str, float]]:
    rows = zip(RULES, zip(*columns, strict=True), strict=True)
    return {rule: dict(zip(quantities, values, strict=True)) for rule, values in rows}


# Means of Tables 5.1 (tanh) and 5.2 (ReLU), in the order of RULES.
PUBLISHED = {
    ("xor", "tanh"): _table((ACCURACY, NORM), (1, 1, 1, 1, 1, 0.975, 1, 1),
                            (7.18, 27.08, 6.83, 24.12, 18.44, 16.41, 20.7, 15.23)),
    ("xor", "relu"): _table((ACCURACY, NORM), (1, 1, 1, 0.95, 1, 1, 1, 1),
                            (5.0, 24.49, 4.84, 22.16, 16.77, 14.85, 18.8, 12.63)),
    ("xord", "tanh"): _table((TRAIN, TEST, NORM), (0.74, 0.0001, 1.675, 0.0004, 1.0, 0.75, 0.0025, 0.62),
                             (17.64, 60.8, 16.9, 43.36, 73.3, 19.31, 78.53, 28.33),
                             (12.18, 90.88, 11.59, 95.05, 92.41, 34.61, 89.72, 47.09)),
    ("xord", "relu"): _table((TRAIN, TEST, NORM), (0, 17.87, 0.2, 38.65, 21.28, 22.3, 19.26, 22.79),
                             (6.6, 8.56, 5.5, 10.32, 8.3, 8.8, 8.37, 8.54),
                             (8.35, 31.89, 7.3, 25.53, 21.52, 18.39, 26.21, 16.49)),
}  # fmt: skip
