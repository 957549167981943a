"""What the regularization thesis says of its learning rules, as code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from scipy.stats import spearmanr

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, mean_of, paired_difference
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    LARGE,
    PLAIN,
    RULES,
    SELECTIVE,
    SMALL,
    printed_as,
)
from lambdahat.experiments.regularization.preconditions import unmet
from lambdahat.experiments.regularization.published import (
    ACCURACY,
    EARLY,
    EARLY_ACCURACY,
    EARLY_ERROR,
    NORM,
    PUBLISHED,
    TEST,
    TEST_ACCURACY,
    TRAIN,
    score_of,
)
from lambdahat.experiments.regularization.speeds import early

LARGEST, RATIO, VECTORS = "λ₁", "λ₁/λ₂", "vectors"
LEAST = 0.1  # of the published difference: what a difference must exceed
READ = (
    f"Where the thesis prints both numbers a difference must exceed {LEAST:g} of the published one,"
    " that of norms, which go with the size of the network, as a share of the larger: a sign alone"
    " says nothing about size.\nHow fast a rule trains is the mean of its training accuracy or"
    " error over the first quarter of the epochs; the thesis judges by eye.\nNo column of epoch"
    " times: all rules and seeds of a cell train in one stack, and only the whole is timed.\nThe"
    " least difference, the condition of having learnt and the claims on speed came after the cpu"
    " runs were seen."
).split("\n")


@dataclass(frozen=True)
class Every(Claim):
    """A claim of several pairs of rules at once; ``reading`` is that of the pair that speaks least
    for it.

    It holds if every one of ``readings``, which are less what each must exceed, is above 0 (an
    intersection–union test: the largest p-value), and fails if one, at a level divided by their
    number, is not.
    """

    readings: tuple[Reading, ...] = ()

    def p_values(self) -> tuple[float, float]:
        """As of any claim."""
        pairs = [Claim("", "", "", reading).p_values() for reading in self.readings]
        if self.unmet or all(math.isnan(support) for support, _ in pairs):
            return math.nan, math.nan
        # a pair with too few seeds left speaks neither way
        known = [
            (1.0, 1.0) if math.isnan(support) else (support, against) for support, against in pairs
        ]
        return max(support for support, _ in known), min(
            1.0, len(known) * min(against for _, against in known)
        )


@dataclass(frozen=True)
class Below:
    """On average over seeds, every rule of ``lower`` has less of ``quantity`` than every rule of
    ``upper``.

    Where the thesis prints both, the difference must exceed LEAST of the published one.
    """

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    lower: tuple[str, ...]
    upper: tuple[str, ...]

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules that the claim is about."""
        return self.lower + self.upper

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The paired differences upper − lower of all pairs, and the weakest of them."""
        rules = self.compared
        values = {rule: measured(rows.where(rule=rule), self.quantity) for rule in rules}
        means = {rule: mean_of(list(found.values())).value for rule, found in values.items()}
        pairs = list(product(self.lower, self.upper))
        readings = [paired_difference(values[high], values[low]) for low, high in pairs]
        least = [_least(task, activation, self.quantity, pair, means[pair[1]]) for pair in pairs]
        tested = tuple(
            _less(reading, bound) for reading, bound in zip(readings, least, strict=True)
        )
        weakest = _weakest(tested)
        low, high = pairs[weakest]
        # as in the difference; a rule may have run on fewer seeds
        shared = values[low].keys() & values[high].keys()
        below, above = (
            mean_of([values[rule][seed] for seed in sorted(shared)]).value for rule in (low, high)
        )
        known = "by eye" if self.quantity in EARLY else ""
        if least[weakest]:
            printed = PUBLISHED[task, activation]
            known = f"{printed[low][self.quantity]:g} below {printed[high][self.quantity]:g}"
            known += f"; least here {least[weakest]:.2g}"
        return Every(
            f"{activation}, {self.quantity}: {self.text}",
            self.source,
            known,
            readings[weakest],
            unit=f", {high} {above:.4g} less {low} {below:.4g}",
            readings=tested,
            unmet=unmet(task, activation, rows, self.quantity, rules),
        )


@dataclass(frozen=True)
class Reaches:
    """The mean of ``quantity`` over seeds is above ``least`` for every rule named."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str
    rules: tuple[str, ...]
    least: float

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules that the claim is about."""
        return self.rules

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The means of all rules, and the lowest in its errors."""
        readings = [
            mean_of(list(measured(rows.where(rule=rule), self.quantity).values()))
            for rule in self.rules
        ]
        tested = tuple(_less(reading, self.least) for reading in readings)
        weakest = _weakest(tested)
        rule = self.rules[weakest]
        printed = PUBLISHED[task, activation][rule].get(self.quantity)
        return Every(
            f"{activation}, {self.quantity}: {self.text}",
            self.source,
            "" if printed is None else f"{printed:g}",
            readings[weakest],
            unit=f", {rule}",
            readings=tested,
            unmet=unmet(task, activation, rows, self.quantity, self.rules),
        )


@dataclass(frozen=True)
class Falls:
    """Over the eight rules, a larger norm goes with worse generalisation: the mean over seeds of
    rank correlations.
    """

    source: str = "Figure 5.39"
    activations: tuple[str, ...] = ("tanh", "relu")

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules that the claim is about: all."""
        return RULES

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """Spearman's correlation of norm and test score at each seed."""
        score, sign = score_of(task)
        found = []
        for seed in rows.distinct("seed"):
            part = rows.where(seed=seed, rule=RULES)
            pairs = [
                (row[NORM], sign * row[score])
                for row in part
                if math.isfinite(row[NORM] * row[score])
            ]
            if len(pairs) > 3 and all(len(set(column)) > 1 for column in zip(*pairs, strict=True)):
                found.append(float(spearmanr(*zip(*pairs, strict=True)).statistic))
        printed = PUBLISHED[task, activation].values()
        theirs = spearmanr(
            [row[NORM] for row in printed], [sign * row[score] for row in printed]
        ).statistic
        sentence = (
            f"{activation}: rules that end at a smaller norm generalise better (rank correlation)"
        )
        said = f"{theirs:+.2f}, from the tables"
        reason = unmet(task, activation, rows, score, RULES)
        return Claim(sentence, self.source, said, mean_of(found), "below", unmet=reason)


def measured(rows: Rows, quantity: str) -> dict[int, float]:
    """A quantity for each seed; λ₁ and λ₁/λ₂ come from the list of eigenvalues, speeds from
    stored curves.
    """
    if quantity in EARLY:
        names = quantity, f"{EARLY[quantity]} curve"
        return {
            row["seed"]: early(row, quantity) for row in rows if any(name in row for name in names)
        }
    if quantity not in (LARGEST, RATIO):
        return rows.paired(quantity)
    tops = {row["seed"]: row["eigenvalues"] for row in rows if row["eigenvalues"]}
    return {
        seed: values[0] / (values[1] if quantity == RATIO else 1.0) for seed, values in tops.items()
    }


def _least(task: str, activation: str, quantity: str, pair: tuple[str, str], ours: float) -> float:
    """What the difference of two rules must exceed; 0 where the thesis prints no such numbers.

    A norm goes with the size of the network: of a norm it is the published share of ``ours``, the
    larger.
    """
    low, high = (PUBLISHED[task, activation][rule].get(quantity) for rule in pair)
    if low is None or high is None:
        return 0.0
    return LEAST * (high - low) * (ours / high if quantity == NORM else 1.0)


def _less(reading: Reading, bound: float) -> Reading:
    return replace(reading, value=reading.value - bound)


def _weakest(readings: Sequence[Reading]) -> int:
    """The reading that is least surely above 0; one without an error, for want of seeds, least
    of all.
    """
    values = [reading.p_above(0.0) for reading in readings]
    return max(
        range(len(values)),
        key=lambda index: math.inf if math.isnan(values[index]) else values[index],
    )


BOTH, TANH, RELU = ("tanh", "relu"), ("tanh",), ("relu",)
TABLES, XORS, EIGENVALUES = "Tables 5.1, 5.2", "§5.3", "§5.7"
NOT_METRIC = tuple(rule for rule in RULES if rule != "Metric Large")
DECAYED = ("L2", "L2 Stopped", *SELECTIVE)
UNDECAYED = ("SGD Large", "Metric Large")

FEWER = Below(
    "the small regime uses the fewest first-layer vectors", XORS, BOTH, VECTORS, SMALL, LARGE
)
FEWER_TOO = Below(
    "of the large regime the selective rules use the fewest first-layer vectors",
    XORS,
    BOTH,
    VECTORS,
    SELECTIVE,
    PLAIN,
)
LOWEST = Below("the small regime ends at the lowest norms", XORS, BOTH, NORM, SMALL, LARGE)
LOWEST_TOO = Below(
    "the selective rules end at the lowest norms of the large regime",
    TABLES,
    BOTH,
    NORM,
    SELECTIVE,
    PLAIN,
)
FASTER_SMALL, FASTER_LARGE = (
    "SGD trains faster from the small regime",
    "SGD trains faster from the large regime",
)
FIRST, SECOND = ("SGD Small",), ("SGD Large",)

Statement = Below | Reaches | Falls
CLAIMS: dict[str, tuple[Statement, ...]] = {
    "xor": (
        Reaches("all rules reach roughly 100 %", XORS, TANH, ACCURACY, RULES, 0.95),
        Reaches("all rules but Metric Large reach 100 %", XORS, RELU, ACCURACY, NOT_METRIC, 0.99),
        Below("Metric Large trains worst", XORS, RELU, ACCURACY, ("Metric Large",), NOT_METRIC),
        LOWEST,
        LOWEST_TOO,
        Below("L2 ends below L2 Stopped", TABLES, BOTH, NORM, ("L2",), ("L2 Stopped",)),
        Below(
            "L2 Stopped ends below Metric Large",
            TABLES,
            BOTH,
            NORM,
            ("L2 Stopped",),
            ("Metric Large",),
        ),
        Below(
            "Metric Large ends below SGD Large",
            TABLES,
            BOTH,
            NORM,
            ("Metric Large",),
            ("SGD Large",),
        ),
        Below(
            "Metric Small ends below SGD Small",
            TABLES,
            BOTH,
            NORM,
            ("Metric Small",),
            ("SGD Small",),
        ),
        FEWER,
        FEWER_TOO,
        Below(
            "the small regime has the smallest top eigenvalue",
            EIGENVALUES,
            TANH,
            LARGEST,
            SMALL,
            LARGE,
        ),
        Below(FASTER_LARGE, XORS, TANH, EARLY_ACCURACY, FIRST, SECOND),
        Below(FASTER_SMALL, XORS, RELU, EARLY_ACCURACY, SECOND, FIRST),
        Below("L2 slows training", XORS, BOTH, EARLY_ACCURACY, ("L2",), SECOND),
        Below("Selective L2 slows training", XORS, BOTH, EARLY_ACCURACY, ("Selective L2",), SECOND),
        Below(
            "Metric slows training from the small regime",
            XORS,
            BOTH,
            EARLY_ACCURACY,
            ("Metric Small",),
            FIRST,
        ),
        Below(
            "Metric slows training from the large regime",
            XORS,
            BOTH,
            EARLY_ACCURACY,
            ("Metric Large",),
            SECOND,
        ),
    ),
    "xord": (
        Below("the small regime has the lowest test errors", XORS, BOTH, TEST, SMALL, LARGE),
        Below("the selective rules follow", XORS, TANH, TEST, SELECTIVE, PLAIN),
        Below(
            "L2 and L2 Stopped generalise worst",
            XORS,
            TANH,
            TEST,
            (*SMALL, *SELECTIVE, *UNDECAYED),
            ("L2", "L2 Stopped"),
        ),
        Below("Metric Large generalises worst", XORS, RELU, TEST, NOT_METRIC, ("Metric Large",)),
        Below(
            "Metric Small generalises better than SGD Small",
            XORS,
            BOTH,
            TEST,
            ("Metric Small",),
            ("SGD Small",),
        ),
        Below(
            "only the small regime and the selective rules keep one",
            XORS,
            TANH,
            TRAIN,
            ("SGD Large", "Metric Large", "L2 Stopped"),
            (*SMALL, *SELECTIVE),
        ),
        Below("the small regime fits the training data best", XORS, RELU, TRAIN, SMALL, LARGE),
        Below(
            "Metric Large fits the training data worst",
            XORS,
            RELU,
            TRAIN,
            NOT_METRIC,
            ("Metric Large",),
        ),
        LOWEST,
        LOWEST_TOO,
        FEWER,
        FEWER_TOO,
        Falls(),
        Below(FASTER_LARGE, XORS, TANH, EARLY_ERROR, SECOND, FIRST),
    ),
    "mnist": (
        Below("Metric Large trains worst", "§5.4", TANH, ACCURACY, ("Metric Large",), NOT_METRIC),
        Below(
            "L2 for too long trains worse than L2 Stopped",
            "§5.4",
            BOTH,
            ACCURACY,
            ("L2",),
            ("L2 Stopped",),
        ),
        Below(
            "Metric trains worse than SGD from the small regime",
            "§5.4",
            BOTH,
            ACCURACY,
            ("Metric Small",),
            ("SGD Small",),
        ),
        Below(
            "SGD generalises worse from the large regime than from the small",
            "§5.4",
            BOTH,
            TEST_ACCURACY,
            ("SGD Large",),
            ("SGD Small",),
        ),
        Below(
            "Metric generalises worse than SGD from the small regime",
            "§5.4",
            BOTH,
            TEST_ACCURACY,
            ("Metric Small",),
            ("SGD Small",),
        ),
        Below(
            "SGD, Metric and L2 from the large regime generalise worse than L2 Stopped Selective",
            "§5.4",
            BOTH,
            TEST_ACCURACY,
            (*UNDECAYED, "L2"),
            ("L2 Stopped Selective",),
        ),
        Below(
            "L2 generalises worse than L2 Stopped",
            "§5.4",
            BOTH,
            TEST_ACCURACY,
            ("L2",),
            ("L2 Stopped",),
        ),
        Below(
            "SGD, Metric and L2 from the large regime generalise worse than Selective L2",
            "§5.4",
            TANH,
            TEST_ACCURACY,
            (*UNDECAYED, "L2"),
            ("Selective L2",),
        ),
        Below(
            "SGD and Metric from the large regime keep the largest norms",
            "§5.4",
            BOTH,
            NORM,
            (*SMALL, *DECAYED),
            UNDECAYED,
        ),
        Below(
            "Metric Large and Selective L2 have the largest top eigenvalues",
            EIGENVALUES,
            TANH,
            LARGEST,
            ("SGD Small", "SGD Large", "L2", "L2 Stopped"),
            ("Metric Large", "Selective L2"),
        ),
        Falls(),
        Below(FASTER_SMALL, "§5.4", TANH, EARLY_ACCURACY, SECOND, FIRST),
        Below(FASTER_LARGE, "§5.4", RELU, EARLY_ACCURACY, FIRST, SECOND),
    ),
    "synthetic": (
        Below(
            "Metric trains worse than SGD from the small regime",
            "§5.5",
            BOTH,
            TRAIN,
            ("SGD Small",),
            ("Metric Small",),
        ),
        Below(
            "Metric trains worse than SGD from the large regime",
            "§5.5",
            BOTH,
            TRAIN,
            ("SGD Large",),
            ("Metric Large",),
        ),
        Below(
            "L2 trains worse than SGD, both from the large regime",
            "§5.5",
            BOTH,
            TRAIN,
            ("SGD Large",),
            ("L2",),
        ),
        Below(
            "SGD from the small regime has the lowest test error",
            "§5.5",
            BOTH,
            TEST,
            ("SGD Small",),
            LARGE,
        ),
        Below(
            "SGD from the large regime has the highest test error",
            "§5.5",
            BOTH,
            TEST,
            (*SMALL, *DECAYED),
            ("SGD Large",),
        ),
        Below(
            "the selective rules generalise better than L2", "§5.5", BOTH, TEST, SELECTIVE, ("L2",)
        ),
        Below(
            "L2 Stopped Selective ends below L2",
            "§5.5",
            RELU,
            NORM,
            ("L2 Stopped Selective",),
            ("L2",),
        ),
        Below("L2 ends below L2 Stopped", "§5.5", RELU, NORM, ("L2",), ("L2 Stopped",)),
        Reaches(
            "one eigenvalue dominates, as there is one output",
            EIGENVALUES,
            RELU,
            RATIO,
            (*SMALL, *UNDECAYED),
            2.0,
        ),
        Falls(),
        Below(FASTER_LARGE, "§5.5", BOTH, EARLY_ERROR, SECOND, FIRST),
    ),
    "cifar10": (
        Reaches(
            "all rules but SGD Large train to over 80 %",
            "§5.6",
            RELU,
            ACCURACY,
            tuple(rule for rule in RULES if rule != "SGD Large"),
            0.8,
        ),
        Reaches("all rules train to over 80 %", "§5.6", TANH, ACCURACY, RULES, 0.8),
        Below(
            "SGD and Metric from the large regime generalise worst",
            "§5.6",
            BOTH,
            TEST_ACCURACY,
            UNDECAYED,
            (*SMALL, *DECAYED),
        ),
        Below(
            "the regularised generalise worse than SGD from the small regime",
            "§5.6",
            RELU,
            TEST_ACCURACY,
            DECAYED,
            ("SGD Small",),
        ),
        Below(
            "the regularised end below SGD from the small regime",
            "§5.6",
            BOTH,
            NORM,
            DECAYED,
            ("SGD Small",),
        ),
        Below(
            "regularisation raises the top eigenvalue of the large regime",
            EIGENVALUES,
            RELU,
            LARGEST,
            ("SGD Large",),
            ("L2", "Selective L2"),
        ),
        Falls(),
        Below(FASTER_LARGE, "§5.6", BOTH, EARLY_ACCURACY, FIRST, SECOND),
    ),
}


def claims_of(task: str, rows: Rows) -> list[Claim]:
    """Every claim on a data set, for each activation that it is made of.

    Where Metric was run with |H| too, which §4.3 speaks of, a claim that has a part in it is judged
    so; with H, as a claim of ours.
    """
    return [
        claim
        for statement in CLAIMS[task]
        for activation in statement.activations
        for claim in _in_both_readings(
            statement, task, activation, rows.where(activation=activation)
        )
    ]


def _in_both_readings(statement: Statement, task: str, activation: str, rows: Rows) -> list[Claim]:
    plain = Rows(row for row in rows if row["rule"] not in ABSOLUTE)
    claim = statement.claim(task, activation, plain)
    if len(plain) == len(rows) or not any(rule.startswith("Metric") for rule in statement.compared):
        return [claim]
    replaced = {printed_as(rule) for rule in ABSOLUTE}
    absolute = Rows(
        {**row, "rule": printed_as(row["rule"])} for row in rows if row["rule"] not in replaced
    )
    judged = statement.claim(task, activation, absolute)
    return [
        replace(judged, sentence=f"{judged.sentence} (Metric with |H|)"),
        replace(claim, sentence=f"{claim.sentence} (Metric with H)", own=True),
    ]
