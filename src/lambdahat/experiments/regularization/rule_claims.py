"""What the regularization thesis says of its learning rules, as code, when a run is not what it
speaks of, and the tables and charts of such runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.stats import kendalltau, spearmanr

from lambdahat.experiments.kit.cells import Row, Rows
from lambdahat.experiments.kit.claims import Claim, Reading, Table, mean_of, paired_difference
from lambdahat.experiments.kit.experiment import sentences
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    ACCURACY,
    DROPOUT,
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
from lambdahat.results.charts import Chart, Series

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
        "" if quantity in (ACCURACY, TRAIN) else rules_that_failed(task, activation, rows, rules),
        _rates(rows.where(rule=rules)) if quantity in EARLY and activation == "relu" else "",
    ]
    return "; ".join(reason for reason in reasons if reason)


def rules_that_failed(task: str, activation: str, rows: Rows, rules: Sequence[str]) -> str:
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
        values = {rule: by_seed(rows.where(rule=rule), self.quantity) for rule in rules}
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
            mean_of(list(by_seed(rows.where(rule=rule), self.quantity).values()))
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


def by_seed(rows: Rows, quantity: str) -> dict[int, float]:
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
    task: tuple(_statement(line.strip()) for line in sentences(text) if line.strip())
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


DATA = {
    "xor": "XOR",
    "xord": "XORD",
    "mnist": "MNIST",
    "synthetic": "synthetic regression",
    "cifar10": "CIFAR-10",
    "digits": "8 × 8 digits",
}


def tables_of(task: str, rows: Rows) -> Iterator[Table]:
    """Mean ± standard deviation over the seeds, the published mean in brackets, by activation;
    then Kendall's τ.
    """
    for activation in rows.distinct("activation"):
        part = rows.where(activation=activation)
        names = [
            name
            for name in (*quantities_of(task), "training accuracy", "test accuracy", "vectors")
            if part.values(name)
        ]
        names = list(dict.fromkeys(names))
        lines = tuple(
            (
                rule,
                *(_cell(task, activation, rule, part.where(rule=rule), name) for name in names),
                _top(part, rule),
            )
            for rule in part.distinct("rule")
        )
        seeds = len(part.distinct("seed"))
        title = f"{_data(task, part)}, {activation}: mean ± sd over {seeds} seeds [thesis]"
        yield Table(title, ("rule", *names, "λ₁"), lines)
    ranks = agreement(task, rows)
    cells = tuple(
        (f"{activation}, {name}", f"{tau:+.2f}") for (activation, name), tau in ranks.items()
    )
    yield Table(
        "Order of the rules' means against the thesis's", ("quantity", "Kendall's τ"), cells
    )


def agreement(task: str, rows: Rows) -> dict[tuple[str, str], float]:
    """Kendall's τ between our means and the thesis's over its eight rule–regime pairs: 1 for the
    same order.
    """
    out = {}
    for activation in rows.distinct("activation"):
        printed = PUBLISHED[task, activation]
        for name in quantities_of(task):
            ours = {
                rule: mean_and_deviation(rows.where(activation=activation, rule=rule), name)[0]
                for rule in printed
            }
            kept = [rule for rule in printed if math.isfinite(ours[rule])]
            pairs = [(ours[rule], printed[rule][name]) for rule in kept]
            tau = kendalltau(*zip(*pairs, strict=True)).statistic if len(kept) > 1 else math.nan
            out[activation, name] = float(tau)
    return out


def mean_and_deviation(rows: Rows, name: str) -> tuple[float, float]:
    """Over the seeds that did not diverge; NaN where there are too few."""
    found = np.array([value for value in rows.values(name) if math.isfinite(value)])
    return (
        float(found.mean()) if len(found) else math.nan,
        float(found.std(ddof=1)) if len(found) > 1 else math.nan,
    )


def _data(task: str, rows: Rows) -> str:
    """The data set; another one where the thesis's was not at hand."""
    used = rows[0].get("data", task)
    return DATA[task] if used == task else f"{DATA[used]} in place of {DATA[task]}"


def _cell(task: str, activation: str, rule: str, rows: Rows, name: str) -> str:
    mean, deviation = mean_and_deviation(rows, name)
    text = f"{mean:.3g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")
    lost = sum(not math.isfinite(value) for value in rows.values(name))
    text += f" ({lost} diverged)" if lost else ""
    published = PUBLISHED[task, activation].get(printed_as(rule), {}).get(name)
    return text if published is None else f"{text} [{published:g}]"


def _top(rows: Rows, rule: str) -> str:
    tops = [values[0] for values in rows.where(rule=rule).values("eigenvalues") if values]
    return f"{np.mean(tops):.3g}" if tops else "–"


BAND = "Mean over the seeds whose curves are stored; the band is 2 standard deviations."
FIGURES = {
    "xor": {"tanh": "Figures 5.3–5.5", "relu": "Figures 5.6–5.8"},
    "xord": {"tanh": "Figures 5.9–5.12", "relu": "Figures 5.13–5.16"},
    "mnist": {"tanh": "Figures 5.17–5.19", "relu": "Figures 5.20–5.22"},
    "synthetic": {"tanh": "Figures 5.23–5.25", "relu": "Figures 5.26–5.28"},
    "cifar10": {"tanh": "Figures 5.29–5.31", "relu": "Figures 5.32–5.34"},
}
VECTOR_FIGURES = {  # of which the thesis has a panel for each rule
    "xor": {"tanh": "Figure 5.5", "relu": "Figure 5.8"},
    "xord": {"tanh": "Figure 5.12", "relu": "Figure 5.16"},
}
EIGENVALUE_FIGURES = {
    "xor": "Figure 5.35",
    "mnist": "Figure 5.36",
    "synthetic": "Figure 5.37",
    "cifar10": "Figure 5.38",
}


def charts_of(task: str, rows: Rows) -> Iterator[Chart]:
    """For each activation the curves, norms and eigenvalues; where weights are pairs, they too;
    then Figure 5.39.
    """
    for activation in rows.distinct("activation"):
        part, source = rows.where(activation=activation), FIGURES[task][activation]
        yield from [
            _curves(part.where(rule=RULES), name, activation, source)
            for name in quantities_of(task)
        ]
        if DROPOUT in part.distinct("rule"):  # which the thesis has not, so that it stands apart
            beside = part.where(rule=["SGD Large", DROPOUT])
            yield from [
                _curves(beside, name, f"{activation}, with dropout", "")
                for name in quantities_of(task)
            ]
        yield _bars(task, part, activation)
        yield _eigenvalues(part.where(rule=RULES), activation, EIGENVALUE_FIGURES.get(task, ""))
        yield from [
            _vectors(row, activation, VECTOR_FIGURES[task][activation])
            for row in part
            if row.get("weights")
        ]
    yield from [_norms(task, rows)] if task != "xor" else []


def _curves(rows: Rows, name: str, activation: str, source: str) -> Chart:
    series = []
    for rule in rows.distinct("rule"):
        part = Rows(row for row in rows.where(rule=rule) if f"{name} curve" in row)
        table = np.array(part.values(f"{name} curve"), float)
        means, deviations = _over_seeds(table)
        series.append(Series(rule, part[0]["recorded"], means, [2 * value for value in deviations]))
    log = "error" in name
    title = f"{name.capitalize()}, {activation}"
    return Chart(title, "epoch", name, tuple(series), y_log=log, source=source, caption=BAND)


def _over_seeds(table: np.ndarray) -> tuple[list[float | None], list[float]]:
    """Means and deviations over the seeds (S, …) that had not diverged; None where none is left."""
    means: list[float | None] = []
    deviations = []
    for column in table.T:
        kept = column[np.isfinite(column)]
        means.append(float(kept.mean()) if len(kept) else None)
        deviations.append(float(kept.std(ddof=1)) if len(kept) > 1 else 0.0)
    return means, deviations


def _bars(task: str, rows: Rows, activation: str) -> Chart:
    rules = rows.distinct("rule")
    found = [mean_and_deviation(rows.where(rule=rule), "norm") for rule in rules]
    printed = PUBLISHED[task, activation]
    ours = Series(
        "ours",
        rules,
        _known([mean for mean, _ in found]),
        _known([2 * sd for _, sd in found]),
        "bars",
    )
    theirs = Series(
        "thesis",
        rules,
        [printed.get(rule, {}).get("norm") for rule in rules],
        style="bars",
        published=True,
    )
    title = f"Norm at the end, {activation}"
    caption = "Error bars are 2 standard deviations over the seeds."
    return Chart(
        title, "rule", "‖θ‖₂", (ours, theirs), y_log=True, source="Tables 5.1, 5.2", caption=caption
    )


def _known(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _eigenvalues(rows: Rows, activation: str, source: str) -> Chart:
    series = []
    for rule in rows.distinct("rule"):
        tops = [values for values in rows.where(rule=rule).values("eigenvalues") if values]
        if tops:
            means, deviations = _over_seeds(np.array(tops, float))
            places = [str(place + 1) for place in range(len(means))]
            series.append(Series(rule, places, means, [2 * value for value in deviations], "bars"))
    title = f"Largest eigenvalues of the Hessian, {activation}"
    caption = "Of the loss alone, at the end; bars of 2 standard deviations."
    return Chart(title, "place", "eigenvalue", tuple(series), source=source, caption=caption)


def _vectors(row: Row, activation: str, source: str) -> Chart:
    """The first-layer weights of one rule as strokes from the origin, as a panel of the thesis
    has them.
    """
    x = [part for first, _ in row["weights"] for part in (0.0, first, first)]
    y: list[float | None] = []
    for _, second in row["weights"]:
        y += [0.0, second, None]  # None ends the stroke
    caption = (
        f"Every vector of seed 0. Of {len(row['weights'])}, {row['vectors']:.1f} count:"
        " (Σ‖w‖²)²/Σ‖w‖⁴."
    )
    return Chart(
        f"First-layer weights, {activation}, {row['rule']}",
        "weight of the first input",
        "weight of the second",
        (Series(row["rule"], x, y),),
        source=source if row["rule"] in RULES else "",
        caption=caption,
    )


def _norms(task: str, rows: Rows) -> Chart:
    """Figure 5.39: each rule's norm and test score relative to the largest; an error is turned
    into 1 − error.
    """
    score, sign = score_of(task)
    series = []
    for activation in rows.distinct("activation"):
        part = rows.where(activation=activation)
        ours = [
            tuple(mean_and_deviation(part.where(rule=rule), name)[0] for name in ("norm", score))
            for rule in RULES
        ]
        series.append(_relative(activation, ours, sign, False))
        printed = PUBLISHED[task, activation]
        theirs = [(printed[rule]["norm"], printed[rule][score]) for rule in RULES]
        series.append(_relative(f"{activation}, thesis", theirs, sign, True))
    title = "Norm against generalisation"
    curves = tuple(series)
    caption = "A point for each of the eight rules."
    words = "relative test performance"
    return Chart(title, "relative norm", words, curves, source="Figure 5.39", caption=caption)


def _relative(name: str, points: Sequence[tuple[float, ...]], sign: int, published: bool) -> Series:
    kept = np.array([point for point in points if all(map(math.isfinite, point))], float).reshape(
        -1, 2
    )
    shares = kept / kept.max(0) if len(kept) else kept
    scores = shares[:, 1] if sign > 0 else 1 - shares[:, 1]
    return Series(name, shares[:, 0].tolist(), scores.tolist(), style="points", published=published)
