"""What the regularization thesis says of its learning rules, as code."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from scipy.stats import spearmanr

from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.regularization.learning_rules import LARGE, PLAIN, RULES, SELECTIVE, SMALL
from lambdahat.experiments.regularization.published import (
    ACCURACY,
    NORM,
    PUBLISHED,
    TEST,
    TEST_ACCURACY,
    TRAIN,
    score_of,
)
from lambdahat.experiments.statistics import Reading, mean_of, paired_difference

LARGEST, RATIO, VECTORS = "λ₁", "λ₁/λ₂", "vectors"


@dataclass(frozen=True)
class Every(Claim):
    """A claim of several pairs of rules at once; ``reading`` is that of the pair that speaks least for it.

    It holds if every pair does (an intersection–union test: the largest p-value), and fails if one pair, at a level
    divided by their number, does.
    """

    readings: tuple[Reading, ...] = ()

    def p_values(self) -> tuple[float, float]:
        """As of any claim."""
        above = [reading.p_above(self.bound) for reading in self.readings]
        if all(math.isnan(value) for value in above):
            return math.nan, math.nan
        # a pair with too few seeds left speaks neither way
        support = max(1.0 if math.isnan(value) else value for value in above)
        against = min(1.0 if math.isnan(value) else 1 - value for value in above)
        return support, min(1.0, len(above) * against)


@dataclass(frozen=True)
class Below:
    """On average over seeds, every rule of ``lower`` has less of ``quantity`` than every rule of ``upper``."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    lower: tuple[str, ...]
    upper: tuple[str, ...]

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The paired differences upper − lower of all pairs, and the weakest of them."""
        values = {rule: measured(rows.where(rule=rule), self.quantity) for rule in (*self.lower, *self.upper)}
        pairs = list(product(self.lower, self.upper))
        readings = tuple(paired_difference(values[high], values[low]) for low, high in pairs)
        weakest = _weakest(readings, 0.0)
        low, high = pairs[weakest]
        printed = [PUBLISHED[task, activation][rule].get(self.quantity) for rule in (low, high)]
        known = "" if None in printed else f"{printed[0]:g} below {printed[1]:g}"
        return Every(f"{activation}, {self.quantity}: {self.text}", self.source, known, readings[weakest],
                     unit=f", {high} less {low}", readings=readings)  # fmt: skip


@dataclass(frozen=True)
class Reaches:
    """The mean of ``quantity`` over seeds is above ``least`` for every rule named."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    rules: tuple[str, ...]
    least: float

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The means of all rules, and the lowest in its errors."""
        readings = tuple(mean_of(list(measured(rows.where(rule=rule), self.quantity).values())) for rule in self.rules)
        weakest = _weakest(readings, self.least)
        rule = self.rules[weakest]
        printed = PUBLISHED[task, activation][rule].get(self.quantity)
        return Every(f"{activation}, {self.quantity}: {self.text}", self.source,
                     "" if printed is None else f"{printed:g}", readings[weakest], bound=self.least,
                     unit=f", {rule}", readings=readings)  # fmt: skip


@dataclass(frozen=True)
class Falls:
    """Over the eight rules, a larger norm goes with worse generalisation: the mean over seeds of rank correlations."""

    source: str = "Figure 5.39"
    activations: tuple[str, ...] = ("tanh", "relu")

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """Spearman's correlation of norm and test score at each seed."""
        score, sign = score_of(task)
        found = []
        for seed in rows.distinct("seed"):
            part = rows.where(seed=seed, rule=RULES)
            pairs = [(row[NORM], sign * row[score]) for row in part if math.isfinite(row[NORM] * row[score])]
            if len(pairs) > 3 and all(len(set(column)) > 1 for column in zip(*pairs, strict=True)):
                found.append(float(spearmanr(*zip(*pairs, strict=True)).statistic))
        printed = PUBLISHED[task, activation].values()
        theirs = spearmanr([row[NORM] for row in printed], [sign * row[score] for row in printed]).statistic
        return Claim(f"{activation}: rules that end at a smaller norm generalise better (rank correlation)",
                     self.source, f"{theirs:+.2f}, from the tables", mean_of(found), "below")  # fmt: skip


def measured(rows: Rows, quantity: str) -> dict[int, float]:
    """A quantity for each seed; λ₁ and λ₁/λ₂ come from the list of eigenvalues."""
    if quantity not in (LARGEST, RATIO):
        return rows.paired(quantity)
    tops = {row["seed"]: row["eigenvalues"] for row in rows if row["eigenvalues"]}
    return {seed: values[0] / (values[1] if quantity == RATIO else 1.0) for seed, values in tops.items()}


def _weakest(readings: tuple[Reading, ...], bound: float) -> int:
    """The reading that is least surely above a bound; one without an error, for want of seeds, least of all."""
    values = [reading.p_above(bound) for reading in readings]
    return max(range(len(values)), key=lambda index: math.inf if math.isnan(values[index]) else values[index])


BOTH, TANH, RELU = ("tanh", "relu"), ("tanh",), ("relu",)
TABLES, XORS, EIGENVALUES = "Tables 5.1, 5.2", "§5.3", "§5.7"
NOT_METRIC = tuple(rule for rule in RULES if rule != "Metric Large")
DECAYED = ("L2", "L2 Stopped", *SELECTIVE)
UNDECAYED = ("SGD Large", "Metric Large")

FEWER = Below("the small regime uses the fewest first-layer vectors", XORS, BOTH, VECTORS, SMALL, LARGE)
FEWER_TOO = Below(
    "of the large regime the selective rules use the fewest first-layer vectors", XORS, BOTH, VECTORS, SELECTIVE, PLAIN
)
LOWEST = Below("the small regime ends at the lowest norms", XORS, BOTH, NORM, SMALL, LARGE)
LOWEST_TOO = Below("the selective rules end at the lowest norms of the large regime", TABLES, BOTH, NORM, SELECTIVE,
                   PLAIN)  # fmt: skip

Statement = Below | Reaches | Falls
CLAIMS: dict[str, tuple[Statement, ...]] = {
    "xor": (
        Reaches("all rules reach roughly 100 %", XORS, TANH, ACCURACY, RULES, 0.95),
        Reaches("all rules but Metric Large reach 100 %", XORS, RELU, ACCURACY, NOT_METRIC, 0.99),
        Below("Metric Large trains worst", XORS, RELU, ACCURACY, ("Metric Large",), NOT_METRIC),
        LOWEST,
        LOWEST_TOO,
        Below("L2 ends below L2 Stopped", TABLES, BOTH, NORM, ("L2",), ("L2 Stopped",)),
        Below("L2 Stopped ends below Metric Large", TABLES, BOTH, NORM, ("L2 Stopped",), ("Metric Large",)),
        Below("Metric Large ends below SGD Large", TABLES, BOTH, NORM, ("Metric Large",), ("SGD Large",)),
        Below("Metric Small ends below SGD Small", TABLES, BOTH, NORM, ("Metric Small",), ("SGD Small",)),
        FEWER,
        FEWER_TOO,
        Below("the small regime has the smallest top eigenvalue", EIGENVALUES, TANH, LARGEST, SMALL, LARGE),
    ),
    "xord": (
        Below("the small regime has the lowest test errors", XORS, BOTH, TEST, SMALL, LARGE),
        Below("the selective rules follow", XORS, TANH, TEST, SELECTIVE, PLAIN),
        Below("L2 and L2 Stopped generalise worst", XORS, TANH, TEST, (*SMALL, *SELECTIVE, *UNDECAYED),
              ("L2", "L2 Stopped")),
        Below("Metric Large generalises worst", XORS, RELU, TEST, NOT_METRIC, ("Metric Large",)),
        Below("Metric Small generalises better than SGD Small", XORS, BOTH, TEST, ("Metric Small",), ("SGD Small",)),
        Below("only the small regime and the selective rules keep one", XORS, TANH, TRAIN,
              ("SGD Large", "Metric Large", "L2 Stopped"), (*SMALL, *SELECTIVE)),
        Below("the small regime fits the training data best", XORS, RELU, TRAIN, SMALL, LARGE),
        Below("Metric Large fits the training data worst", XORS, RELU, TRAIN, NOT_METRIC, ("Metric Large",)),
        LOWEST,
        LOWEST_TOO,
        FEWER,
        FEWER_TOO,
        Falls(),
    ),
    "mnist": (
        Below("Metric Large trains worst", "§5.4", TANH, ACCURACY, ("Metric Large",), NOT_METRIC),
        Below("L2 for too long trains worse than L2 Stopped", "§5.4", BOTH, ACCURACY, ("L2",), ("L2 Stopped",)),
        Below("Metric trains worse than SGD from the small regime", "§5.4", BOTH, ACCURACY, ("Metric Small",),
              ("SGD Small",)),
        Below("SGD generalises worse from the large regime than from the small", "§5.4", BOTH, TEST_ACCURACY,
              ("SGD Large",), ("SGD Small",)),
        Below("Metric generalises worse than SGD from the small regime", "§5.4", BOTH, TEST_ACCURACY,
              ("Metric Small",), ("SGD Small",)),
        Below("SGD, Metric and L2 from the large regime generalise worse than L2 Stopped Selective", "§5.4", BOTH,
              TEST_ACCURACY, (*UNDECAYED, "L2"), ("L2 Stopped Selective",)),
        Below("L2 generalises worse than L2 Stopped", "§5.4", BOTH, TEST_ACCURACY, ("L2",), ("L2 Stopped",)),
        Below("SGD, Metric and L2 from the large regime generalise worse than Selective L2", "§5.4", TANH,
              TEST_ACCURACY, (*UNDECAYED, "L2"), ("Selective L2",)),
        Below("SGD and Metric from the large regime keep the largest norms", "§5.4", BOTH, NORM, (*SMALL, *DECAYED),
              UNDECAYED),
        Below("Metric Large and Selective L2 have the largest top eigenvalues", EIGENVALUES, TANH, LARGEST,
              ("SGD Small", "SGD Large", "L2", "L2 Stopped"), ("Metric Large", "Selective L2")),
        Falls(),
    ),
    "synthetic": (
        Below("Metric trains worse than SGD from the small regime", "§5.5", BOTH, TRAIN, ("SGD Small",),
              ("Metric Small",)),
        Below("Metric trains worse than SGD from the large regime", "§5.5", BOTH, TRAIN, ("SGD Large",),
              ("Metric Large",)),
        Below("L2 trains worse than SGD, both from the large regime", "§5.5", BOTH, TRAIN, ("SGD Large",), ("L2",)),
        Below("SGD from the small regime has the lowest test error", "§5.5", BOTH, TEST, ("SGD Small",), LARGE),
        Below("SGD from the large regime has the highest test error", "§5.5", BOTH, TEST, (*SMALL, *DECAYED),
              ("SGD Large",)),
        Below("the selective rules generalise better than L2", "§5.5", BOTH, TEST, SELECTIVE, ("L2",)),
        Below("L2 Stopped Selective ends below L2", "§5.5", RELU, NORM, ("L2 Stopped Selective",), ("L2",)),
        Below("L2 ends below L2 Stopped", "§5.5", RELU, NORM, ("L2",), ("L2 Stopped",)),
        Reaches("one eigenvalue dominates, as there is one output", EIGENVALUES, RELU, RATIO,
                (*SMALL, *UNDECAYED), 2.0),
        Falls(),
    ),
    "cifar10": (
        Reaches("all rules but SGD Large train to over 80 %", "§5.6", RELU, ACCURACY,
                tuple(rule for rule in RULES if rule != "SGD Large"), 0.8),
        Reaches("all rules train to over 80 %", "§5.6", TANH, ACCURACY, RULES, 0.8),
        Below("SGD and Metric from the large regime generalise worst", "§5.6", BOTH, TEST_ACCURACY, UNDECAYED,
              (*SMALL, *DECAYED)),
        Below("the regularised generalise worse than SGD from the small regime", "§5.6", RELU, TEST_ACCURACY, DECAYED,
              ("SGD Small",)),
        Below("the regularised end below SGD from the small regime", "§5.6", BOTH, NORM, DECAYED, ("SGD Small",)),
        Below("regularisation raises the top eigenvalue of the large regime", EIGENVALUES, RELU, LARGEST,
              ("SGD Large",), ("L2", "Selective L2")),
        Falls(),
    ),
}  # fmt: skip


def claims_of(task: str, rows: Rows) -> list[Claim]:
    """Every claim on a data set, for each activation that it is made of."""
    return [
        statement.claim(task, activation, rows.where(activation=activation))
        for statement in CLAIMS[task]
        for activation in statement.activations
    ]
