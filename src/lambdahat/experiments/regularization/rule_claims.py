"""What the regularization thesis says of its learning rules, as code, and when a run is not what it
speaks of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from scipy.stats import spearmanr

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import notes
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    ACCURACY,
    EARLY,
    LARGE,
    NORM,
    PLAIN,
    PUBLISHED,
    RULES,
    SELECTIVE,
    SMALL,
    TRAIN,
    printed_as,
    quantities_of,
    regime_of,
    score_of,
)
from lambdahat.experiments.regularization.rule_runs import early

LEARNT = 0.8  # of the printed training accuracy
# training error of predicting 0 for 12 targets ±1; Metric's, the mean
CHANCE = {"xord": 12.0, "synthetic": 27.57}
IMAGES = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
RULE = (
    "A claim about norms, vectors, eigenvalues, speed or generalisation is not testable where half"
    f" or more of the seeds of a rule it compares have not learnt: training accuracy below {LEARNT}"
    " of the printed one, or training error above half of that of predicting the mean, where the"
    " printed one is below."
)


def unmet(task: str, activation: str, rows: Rows, quantity: str, rules: Sequence[str]) -> str:
    """Why a claim about a quantity of these rules cannot be read off the rows of an activation;
    empty where it can.
    """
    stands = task in IMAGES and "digits" in rows.distinct("data")
    reasons = [
        f"8 × 8 digits in place of {IMAGES[task]}" if stands else "",
        "" if quantity in (ACCURACY, TRAIN) else unlearnt(task, activation, rows, rules),
        _rates(rows.where(rule=rules)) if quantity in EARLY and activation == "relu" else "",
    ]
    return "; ".join(reason for reason in reasons if reason)


def unlearnt(task: str, activation: str, rows: Rows, rules: Sequence[str]) -> str:
    """The rules that have not learnt (RULE), with what they reached and, in brackets, what the
    thesis has.
    """
    name, found = quantities_of(task)[0], []
    for rule in dict.fromkeys(rules):
        values, printed = (
            rows.where(rule=rule).values(name),
            PUBLISHED[task, activation][rule][name],
        )
        failed = sum(not _learnt(task, value, printed) for value in values)
        if values and 2 * failed >= len(values):
            found.append(f"{rule} {mean_of(values).value:.3g} [{printed:g}]")
    return f"not learnt, by {name}: {', '.join(found)}" if found else ""


def _learnt(task: str, value: float, printed: float) -> bool:
    if task not in CHANCE:
        return value >= LEARNT * printed
    half = CHANCE[task] / 2
    return printed > half or value <= half


def _rates(rows: Rows) -> str:
    """Speeds of two regimes are compared at learning rates of which only one was raised
    (``RulesScale.steep``).
    """
    regimes = {regime_of(rule) for rule in rows.distinct("rule")}
    gains = {(row["gain"], row["steep"]) for row in rows}
    if len(regimes) < 2 or all(gain == steep for gain, steep in gains):
        return ""
    gain, steep = gains.pop()
    return (
        f"the learning rate is {gain:g} times the printed one in the small regime, {steep:g} times"
        " in the large"
    )


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


DECAYED, UNDECAYED = ("L2", "L2 Stopped", *SELECTIVE), ("SGD Large", "Metric Large")
GROUPS = {
    "all": RULES,
    "small": SMALL,
    "large": LARGE,
    "plain": PLAIN,
    "selective": SELECTIVE,
    "decayed": DECAYED,
    "undecayed": UNDECAYED,
}
# where it is said | activations | quantity | what is compared | in words; ``falls`` is Figure 5.39
_VECTORS = """
    §5.3 | tanh relu | vectors | small < large | the small regime uses the fewest first-layer
      vectors
    §5.3 | tanh relu | vectors | selective < plain | of the large regime the selective rules use the
      fewest first-layer vectors
"""
_NORMS = """
    §5.3 | tanh relu | norm | small < large | the small regime ends at the lowest norms
    Tables 5.1, 5.2 | tanh relu | norm | selective < plain | the selective rules end at the lowest
      norms of the large regime
"""
STATEMENTS = {
    "xor": f"""
    §5.3 | tanh | training accuracy | all > 0.95 | all rules reach roughly 100 %
    §5.3 | relu | training accuracy | all but Metric Large > 0.99 | all rules but Metric Large reach
      100 %
    §5.3 | relu | training accuracy | Metric Large < all but Metric Large | Metric Large trains
      worst
    {_NORMS}
    Tables 5.1, 5.2 | tanh relu | norm | L2 < L2 Stopped | L2 ends below L2 Stopped
    Tables 5.1, 5.2 | tanh relu | norm | L2 Stopped < Metric Large | L2 Stopped ends below Metric
      Large
    Tables 5.1, 5.2 | tanh relu | norm | Metric Large < SGD Large | Metric Large ends below SGD
      Large
    Tables 5.1, 5.2 | tanh relu | norm | Metric Small < SGD Small | Metric Small ends below SGD
      Small
    {_VECTORS}
    §5.7 | tanh | λ₁ | small < large | the small regime has the smallest top eigenvalue
    §5.3 | tanh | early training accuracy | SGD Small < SGD Large | SGD trains faster from the large
      regime
    §5.3 | relu | early training accuracy | SGD Large < SGD Small | SGD trains faster from the small
      regime
    §5.3 | tanh relu | early training accuracy | L2 < SGD Large | L2 slows training
    §5.3 | tanh relu | early training accuracy | Selective L2 < SGD Large | Selective L2 slows
      training
    §5.3 | tanh relu | early training accuracy | Metric Small < SGD Small | Metric slows training
      from the small regime
    §5.3 | tanh relu | early training accuracy | Metric Large < SGD Large | Metric slows training
      from the large regime
    """,
    "xord": f"""
    §5.3 | tanh relu | test error | small < large | the small regime has the lowest test errors
    §5.3 | tanh | test error | selective < plain | the selective rules follow
    §5.3 | tanh | test error | small, selective, undecayed < L2, L2 Stopped | L2 and L2 Stopped
      generalise worst
    §5.3 | relu | test error | all but Metric Large < Metric Large | Metric Large generalises worst
    §5.3 | tanh relu | test error | Metric Small < SGD Small | Metric Small generalises better than
      SGD Small
    §5.3 | tanh | training error | undecayed, L2 Stopped < small, selective | only the small regime
      and the selective rules keep one
    §5.3 | relu | training error | small < large | the small regime fits the training data best
    §5.3 | relu | training error | all but Metric Large < Metric Large | Metric Large fits the
      training data worst
    {_NORMS}
    {_VECTORS}
    falls
    §5.3 | tanh | early training error | SGD Large < SGD Small | SGD trains faster from the large
      regime
    """,
    "mnist": """
    §5.4 | tanh | training accuracy | Metric Large < all but Metric Large | Metric Large trains
      worst
    §5.4 | tanh relu | training accuracy | L2 < L2 Stopped | L2 for too long trains worse than L2
      Stopped
    §5.4 | tanh relu | training accuracy | Metric Small < SGD Small | Metric trains worse than SGD
      from the small regime
    §5.4 | tanh relu | test accuracy | SGD Large < SGD Small | SGD generalises worse from the large
      regime than from the small
    §5.4 | tanh relu | test accuracy | Metric Small < SGD Small | Metric generalises worse than SGD
      from the small regime
    §5.4 | tanh relu | test accuracy | undecayed, L2 < L2 Stopped Selective | SGD, Metric and L2
      from the large regime generalise worse than L2 Stopped Selective
    §5.4 | tanh relu | test accuracy | L2 < L2 Stopped | L2 generalises worse than L2 Stopped
    §5.4 | tanh | test accuracy | undecayed, L2 < Selective L2 | SGD, Metric and L2 from the large
      regime generalise worse than Selective L2
    §5.4 | tanh relu | norm | small, decayed < undecayed | SGD and Metric from the large regime keep
      the largest norms
    §5.7 | tanh | λ₁ | SGD Small, SGD Large, L2, L2 Stopped < Metric Large, Selective L2 | Metric
      Large and Selective L2 have the largest top eigenvalues
    falls
    §5.4 | tanh | early training accuracy | SGD Large < SGD Small | SGD trains faster from the small
      regime
    §5.4 | relu | early training accuracy | SGD Small < SGD Large | SGD trains faster from the large
      regime
    """,
    "synthetic": """
    §5.5 | tanh relu | training error | SGD Small < Metric Small | Metric trains worse than SGD from
      the small regime
    §5.5 | tanh relu | training error | SGD Large < Metric Large | Metric trains worse than SGD from
      the large regime
    §5.5 | tanh relu | training error | SGD Large < L2 | L2 trains worse than SGD, both from the
      large regime
    §5.5 | tanh relu | test error | SGD Small < large | SGD from the small regime has the lowest
      test error
    §5.5 | tanh relu | test error | small, decayed < SGD Large | SGD from the large regime has the
      highest test error
    §5.5 | tanh relu | test error | selective < L2 | the selective rules generalise better than L2
    §5.5 | relu | norm | L2 Stopped Selective < L2 | L2 Stopped Selective ends below L2
    §5.5 | relu | norm | L2 < L2 Stopped | L2 ends below L2 Stopped
    §5.7 | relu | λ₁/λ₂ | small, undecayed > 2 | one eigenvalue dominates, as there is one output
    falls
    §5.5 | tanh relu | early training error | SGD Large < SGD Small | SGD trains faster from the
      large regime
    """,
    "cifar10": """
    §5.6 | relu | training accuracy | all but SGD Large > 0.8 | all rules but SGD Large train to
      over 80 %
    §5.6 | tanh | training accuracy | all > 0.8 | all rules train to over 80 %
    §5.6 | tanh relu | test accuracy | undecayed < small, decayed | SGD and Metric from the large
      regime generalise worst
    §5.6 | relu | test accuracy | decayed < SGD Small | the regularised generalise worse than SGD
      from the small regime
    §5.6 | tanh relu | norm | decayed < SGD Small | the regularised end below SGD from the small
      regime
    §5.7 | relu | λ₁ | SGD Large < L2, Selective L2 | regularisation raises the top eigenvalue of
      the large regime
    falls
    §5.6 | tanh relu | early training accuracy | SGD Small < SGD Large | SGD trains faster from the
      large regime
    """,
}
Statement = Below | Reaches | Falls


def _rules(text: str) -> tuple[str, ...]:
    """The rules of a list such as "small, L2" or "all but Metric Large"."""
    if text.startswith("all but "):
        return tuple(rule for rule in RULES if rule != text.removeprefix("all but "))
    return tuple(rule for name in text.split(", ") for rule in GROUPS.get(name, (name,)))


def _statement(line: str) -> Statement:
    """A line of STATEMENTS."""
    if line == "falls":
        return Falls()
    source, activations, quantity, compared, words = line.split(" | ")
    told = words, source, tuple(activations.split()), quantity
    if " > " in compared:
        rules, least = compared.split(" > ")
        return Reaches(*told, _rules(rules), float(least))
    lower, upper = compared.split(" < ")
    return Below(*told, _rules(lower), _rules(upper))


CLAIMS: dict[str, tuple[Statement, ...]] = {
    task: tuple(_statement(line.strip()) for line in notes(text) if line.strip())
    for task, text in STATEMENTS.items()
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
