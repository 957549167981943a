"""Claims of the regularization thesis on its learning rules, the conditions for testing them, and
the tables and charts of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.stats import kendalltau, spearmanr

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Chart, Claim, Reading, Row, Rows, Series, Table, mean_of
from lambdahat.experiments.kit.experiment import SETS
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

LEARNT = 0.8  # of the printed training accuracy
# training error of predicting 0 for 12 targets ±1; Metric's, the mean
CHANCE = {"xord": 12.0, "synthetic": 27.57}
IMAGES = ("mnist", "cifar10")
RULE = (
    "A claim about norms, vectors, eigenvalues, speed or generalisation is not testable if half or"
    " more of the seeds of a rule that it compares have not learnt: training accuracy below"
    f" {LEARNT} of the printed one, or a training error above half of that of predicting the mean"
    " although the printed one is below."
)
# rules whose weight decay shrinks the large weights, and those without it
DECAYED, UNDECAYED = ("L2", "L2 Stopped", *SELECTIVE), ("SGD Large", "Metric Large")
SHRUNK = 2.0  # times the printed share of its norm that L2 may keep
DECAY = (
    "A claim that compares a rule with weight decay is not testable if a shortened run leaves the"
    f" norm of L2 at more than {SHRUNK:g} times the printed share of SGD Large's norm; claims on"
    " speed are exempt. This condition was introduced after rules-mnist had been run for 60 of 400"
    " epochs."
)


def unmet(task: str, activation: str, rows: Rows, quantity: str, rules: Sequence[str]) -> str:
    """Why a claim about a quantity of these rules cannot be tested on these rows; or ""."""
    reasons = []
    if task in IMAGES and "digits" in rows.distinct("data"):
        reasons.append(f"8 × 8 digits in place of {SETS[task]}")
    if quantity not in (ACCURACY, TRAIN):
        reasons.append(rules_that_failed(task, activation, rows, rules))
    if quantity in EARLY and activation == "relu":
        reasons.append(_unequal_rates(rows.where(rule=rules)))
    if quantity not in EARLY and set(rules) & set(DECAYED):
        reasons.append(_too_little_decay(PUBLISHED[task, activation], rows))
    return "; ".join(filter(None, reasons))


def rules_that_failed(task: str, activation: str, rows: Rows, rules: Sequence[str]) -> str:
    """The rules that have not learnt (RULE), with what they reached [and what the thesis has]."""
    name, failed = quantities_of(task)[0], []
    for rule in dict.fromkeys(rules):
        values = rows.where(rule=rule).values(name)
        printed = PUBLISHED[task, activation][rule][name]
        if task in CHANCE:
            half = CHANCE[task] / 2
            learnt = [printed > half or value <= half for value in values]
        else:
            learnt = [value >= LEARNT * printed for value in values]
        if values and 2 * sum(learnt) <= len(values):
            failed.append(f"{rule} {mean_of(values).value:.3g} [{printed:g}]")
    return f"not learnt, by {name}: {', '.join(failed)}" if failed else ""


def _too_little_decay(published: dict[str, dict[str, float]], rows: Rows) -> str:
    """Why the run is too short for rules with weight decay (DECAY); or ""."""
    norms = [mean_of(rows.where(rule=rule).values(NORM)).value for rule in ("L2", "SGD Large")]
    kept = norms[0] / norms[1]
    printed = published["L2"][NORM] / published["SGD Large"][NORM]
    if not kept > SHRUNK * printed:  # nan where one of the rules has not run
        return ""
    return f"L2 keeps {kept:.2g} of SGD Large's norm, in the thesis {printed:.2g}"


def _unequal_rates(rows: Rows) -> str:
    """Why speeds of two regimes cannot be compared: only one rate was raised (``steep``)."""
    regimes = {regime_of(rule) for rule in rows.distinct("rule")}
    gains = {(row["gain"], row["steep"]) for row in rows}
    if len(regimes) < 2 or all(gain == steep for gain, steep in gains):
        return ""
    gain, steep = gains.pop()
    small = f"the learning rate is {gain:g} times the printed one in the small regime"
    return f"{small}, {steep:g} times in the large"


LARGEST, RATIO, VECTORS = "λ₁", "λ₁/λ₂", "vectors"
EFFECT_SHARE = 0.1  # of the published difference: what a difference must exceed
READ = kit.sentences(f"""
    Where the thesis prints both numbers, a difference must exceed {EFFECT_SHARE:g} of the published
      one. For norms, which depend on the size of the network, differences are relative to the
      larger norm. A sign alone says nothing about size.
    How fast a rule trains is the mean of its training accuracy or error over the first quarter of
      the epochs; the thesis judges by eye.
    There is no column of epoch times: all rules and seeds of a cell train in one stack, and only
      the whole is timed.
    That L2 leaves the number of vectors, that Selective L2 ends lowest on XORD, and that three
      rules nearly match SGD from the small regime (a fifth covers the printed errors) are
      statements of the text that were added after all runs.
    The smallest difference that counts, the condition of having learnt and the claims on speed were
      introduced after the cpu runs had been seen.
""")


@dataclass(frozen=True)
class Every(Claim):
    """A claim of several pairs of rules at once; ``reading`` is that of the pair that supports it
    least, and ``bound`` what this one must exceed.

    It holds if every one of ``readings``, which are less what each must exceed, is above 0 (an
    intersection–union test: the largest p-value), and fails if one, at a level divided by their
    number, is not.
    """

    readings: tuple[Reading, ...] = ()

    def p_values(self) -> tuple[float, float]:
        """The p-values for the claim and against it."""
        pairs = [Claim("", "", "", reading).p_values() for reading in self.readings]
        if self.unmet or all(math.isnan(support) for support, _ in pairs):
            return math.nan, math.nan
        # a pair with too few seeds left speaks neither way
        known = [(1.0, 1.0) if math.isnan(pair[0]) else pair for pair in pairs]
        support, against = zip(*known, strict=True)
        return max(support), min(1.0, len(known) * min(against))


@dataclass(frozen=True)
class RuleStatement:
    """A statement of the thesis on a quantity of some rules, with its source."""

    text: str
    source: str
    activations: tuple[str, ...]
    quantity: str


def exceed(readings: Sequence[Reading], bounds: Iterable[float]) -> tuple[tuple[Reading, ...], int]:
    """The readings less what each must exceed, and the place of the one that is least surely above
    0; one without an error, for want of seeds, least of all.
    """
    pairs = zip(readings, bounds, strict=True)
    tested = tuple(replace(reading, value=reading.value - bound) for reading, bound in pairs)
    p_values = [reading.p_above(0.0) for reading in tested]
    order = [math.inf if math.isnan(value) else value for value in p_values]
    return tested, order.index(max(order))


@dataclass(frozen=True)
class Below(RuleStatement):
    """On average over seeds, every rule of ``lower`` has less of ``quantity`` than every rule of
    ``upper``.

    Where the thesis prints both, the difference must exceed EFFECT_SHARE of the published one.
    """

    lower: tuple[str, ...]
    upper: tuple[str, ...]

    @property
    def compared(self) -> tuple[str, ...]:
        """The rules that the claim is about."""
        return self.lower + self.upper

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The paired differences upper − lower of all pairs, and the weakest of them."""
        printed, quantity = PUBLISHED[task, activation], self.quantity
        values = {rule: by_seed(rows.where(rule=rule), quantity) for rule in self.compared}
        pairs = list(product(self.lower, self.upper))
        readings = [kit.paired_difference(values[high], values[low]) for low, high in pairs]
        # 0 where the thesis prints no such numbers. A norm goes with the size of the network: of a
        # norm it is the published share of ours, the larger
        bounds = []
        for low, high in pairs:
            small, large = printed[low].get(quantity), printed[high].get(quantity)
            least = 0.0 if small is None or large is None else EFFECT_SHARE * (large - small)
            if quantity == NORM and large is not None:
                least *= mean_of([*values[high].values()]).value / large
            bounds.append(least)

        tested, weakest = exceed(readings, bounds)
        low, high = pairs[weakest]
        # as in the difference; a rule may have run on fewer seeds
        shared = sorted(values[low].keys() & values[high].keys())
        below, above = (mean_of([values[rule][seed] for seed in shared]) for rule in (low, high))
        known = "by eye" if quantity in EARLY else ""
        if bounds[weakest]:
            known = f"{printed[low][quantity]:g} below {printed[high][quantity]:g}"
            known += f"; least here {bounds[weakest]:.2g}"
        return Every(
            f"{activation}, {quantity}: {self.text}",
            self.source,
            known,
            readings[weakest],
            bound=bounds[weakest],
            unit=f", {high} {above.value:.4g} less {low} {below.value:.4g}",
            readings=tested,
            unmet=unmet(task, activation, rows, quantity, self.compared),
        )


@dataclass(frozen=True)
class Reaches(RuleStatement):
    """The mean of ``quantity`` over seeds is above ``least`` for every rule ``compared``."""

    compared: tuple[str, ...]
    least: float

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The means of all rules, and the lowest in its errors."""
        parts = [rows.where(rule=rule) for rule in self.compared]
        readings = [mean_of([*by_seed(part, self.quantity).values()]) for part in parts]

        tested, weakest = exceed(readings, [self.least] * len(readings))
        rule = self.compared[weakest]
        printed = PUBLISHED[task, activation][rule].get(self.quantity)
        return Every(
            f"{activation}, {self.quantity}: {self.text}",
            self.source,
            "" if printed is None else f"{printed:g}",
            readings[weakest],
            bound=self.least,
            unit=f", {rule}",
            readings=tested,
            unmet=unmet(task, activation, rows, self.quantity, self.compared),
        )


@dataclass(frozen=True)
class Near(RuleStatement):
    """On average over seeds, every rule ``compared`` but the last has at most ``share`` times the
    last one's ``quantity``, or where ``share`` is below 1 at least that.
    """

    compared: tuple[str, ...]
    share: float

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """The paired log-ratios to the last rule, with the sign of an excess, and the weakest."""
        *others, last = self.compared
        parts = {rule: rows.where(rule=rule) for rule in self.compared}
        pairs = [(last, rule) if self.share > 1 else (rule, last) for rule in others]
        ratios = [kit.decades(parts[high], parts[low], self.quantity) for high, low in pairs]
        bound = -abs(math.log10(self.share))
        tested, weakest = exceed(ratios, [bound] * len(ratios))
        printed = PUBLISHED[task, activation]
        known = [printed[rule].get(self.quantity) for rule in (others[weakest], last)]
        return Every(
            f"{activation}, {self.quantity}: {self.text}",
            self.source,
            "" if None in known else f"{known[0]:g} beside {known[1]:g}",
            ratios[weakest],
            bound=bound,
            unit=f" decades from {pairs[weakest][1]} to {pairs[weakest][0]}",
            readings=tested,
            unmet=unmet(task, activation, rows, self.quantity, self.compared),
        )


@dataclass(frozen=True)
class Falls:
    """The rank correlation of norm and generalisation over the eight rules is negative."""

    source: str = "Figure 5.39"
    activations: tuple[str, ...] = ("tanh", "relu")
    compared: tuple[str, ...] = RULES

    def claim(self, task: str, activation: str, rows: Rows) -> Claim:
        """Spearman's correlation of norm and test score at each seed."""
        score, sign = score_of(task)
        falls = []
        for _, part in rows.where(rule=RULES).groups("seed"):
            pairs = [(row[NORM], sign * row[score]) for row in part if NORM in row]
            finite = [pair for pair in pairs if math.isfinite(math.prod(pair))]
            columns = list(zip(*finite, strict=True))
            if columns and len(columns[0]) > 3 and all(len(set(column)) > 1 for column in columns):
                falls.append(float(spearmanr(*columns).statistic))
        printed = PUBLISHED[task, activation].values()
        norms, scores = [row[NORM] for row in printed], [sign * row[score] for row in printed]
        known = f"{spearmanr(norms, scores).statistic:+.2f}, from the tables"
        sentence = "rules that end at a smaller norm generalise better (rank correlation)"
        claim = f"{activation}: {sentence}", self.source, known, mean_of(falls), "below"
        return Claim(*claim, unmet=unmet(task, activation, rows, score, RULES))


def by_seed(rows: Rows, quantity: str) -> dict[int, float]:
    """A quantity for each seed, some of them from the lists of eigenvalues and stored curves."""
    if quantity in EARLY:
        names = {quantity, f"{EARLY[quantity]} curve"}
        return {row["seed"]: early(row, quantity) for row in rows if names & row.keys()}
    if quantity not in (LARGEST, RATIO):
        return rows.paired(quantity)
    tops = [(row["seed"], *row["eigenvalues"][:2]) for row in rows if row.get("eigenvalues")]
    return {seed: first / (rest[0] if quantity == RATIO else 1.0) for seed, first, *rest in tops}


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
    §5.3 | tanh relu | vectors | L2 near 0.9 × SGD Large | L2 leaves the number of vectors, within a
      tenth
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
    §5.3 | tanh | norm | Selective L2 < plain, L2 Stopped Selective | Selective L2 ends at the
      lowest norm of the large regime
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
    §5.5 | tanh relu | test error | selective, L2 Stopped near 1.2 × SGD Small | the selective rules
      and L2 Stopped nearly match SGD from the small regime, at most a fifth above it
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
Statement = Below | Reaches | Near | Falls


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
    common = words, source, tuple(activations.split()), quantity
    if " > " in compared:
        rules, least = compared.split(" > ")
        return Reaches(*common, _rules(rules), float(least))
    if " near " in compared:
        rules, near = compared.split(" near ")
        share, last = near.split(" × ")
        return Near(*common, (*_rules(rules), last), float(share))
    lower, upper = compared.split(" < ")
    return Below(*common, _rules(lower), _rules(upper))


CLAIMS: dict[str, tuple[Statement, ...]] = {
    task: tuple(_statement(line.strip()) for line in kit.sentences(text) if line.strip())
    for task, text in STATEMENTS.items()
}


def claims_of(task: str, rows: Rows) -> list[Claim]:
    """Every claim on a data set, for each activation that it is made of.

    Where Metric was run with |H| too, which §4.3 speaks of, a claim that has a part in it is judged
    so; with H, as a claim of ours.
    """
    claims = []
    for statement in CLAIMS[task]:
        of_metric = any(rule.startswith("Metric") for rule in statement.compared)
        for activation in statement.activations:
            part = rows.where(activation=activation)
            plain = Rows(row for row in part if row["rule"] not in ABSOLUTE)
            claim = statement.claim(task, activation, plain)
            if not of_metric or len(plain) == len(part):
                claims.append(claim)
                continue
            kept = [row for row in part if row["rule"] not in map(printed_as, ABSOLUTE)]
            absolute = Rows({**row, "rule": printed_as(row["rule"])} for row in kept)
            judged = statement.claim(task, activation, absolute)
            claims.append(replace(judged, sentence=f"{judged.sentence} (Metric with |H|)"))
            claims.append(replace(claim, sentence=f"{claim.sentence} (Metric with H)", own=True))
    return claims


DATA = SETS | {"synthetic": "synthetic regression", "digits": "8 × 8 digits"}


def tables_of(task: str, rows: Rows) -> Iterator[Table]:
    """Mean ± standard deviation [published mean] by activation; then Kendall's τ."""
    for activation, part in rows.groups("activation"):
        every = (*quantities_of(task), "training accuracy", "test accuracy", "vectors")
        names = [name for name in dict.fromkeys(every) if part.values(name)]
        lines = []
        for rule, runs in part.groups("rule"):
            tops = [values[0] for values in runs.values("eigenvalues") if values]
            largest = f"{np.mean(tops):.3g}" if tops else "–"
            printed = PUBLISHED[task, activation].get(printed_as(rule), {})
            lines.append((rule, *(_cell(runs, name, printed.get(name)) for name in names), largest))
        used = part[0].get("data", task)
        data = DATA[task] if used == task else f"{DATA[used]} in place of {DATA[task]}"
        counts = sorted({len(runs) for _, runs in part.groups("rule")})
        seeds = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
        title = f"{data}, {activation}: mean ± sd over {seeds} seeds [thesis]"
        yield kit.table(title, ("rule", *names, "λ₁"), lines)
    ranks = agreement(task, rows).items()
    lines = [(f"{activation}, {name}", f"{tau:+.2f}") for (activation, name), tau in ranks]
    title = "Order of the rules' means against the thesis's"
    yield kit.table(title, "quantity | Kendall's τ", lines)


def agreement(task: str, rows: Rows) -> dict[tuple[str, str], float]:
    """Kendall's τ between our means and the thesis's over the eight rules: 1 for the same order."""
    out = {}
    for activation, part in rows.groups("activation"):
        for name in quantities_of(task):
            pairs = [
                (mean_and_deviation(part.where(rule=rule), name)[0], printed[name])
                for rule, printed in PUBLISHED[task, activation].items()
            ]
            kept = [pair for pair in pairs if math.isfinite(pair[0])]
            tau = kendalltau(*zip(*kept, strict=True)).statistic if len(kept) > 1 else math.nan
            out[activation, name] = float(tau)
    return out


def mean_and_deviation(rows: Rows, name: str) -> tuple[float, float]:
    """Over the seeds that did not diverge; NaN where there are too few."""
    kept = np.array([value for value in rows.values(name) if math.isfinite(value)])
    deviation = float(kept.std(ddof=1)) if len(kept) > 1 else math.nan
    return float(kept.mean()) if len(kept) else math.nan, deviation


def _cell(rows: Rows, name: str, published: float | None) -> str:
    mean, deviation = mean_and_deviation(rows, name)
    text = f"{mean:.3g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")
    lost = sum(not math.isfinite(value) for value in rows.values(name))
    text += f" ({lost} diverged)" if lost else ""
    return text if published is None else f"{text} [{published:g}]"


BAND = "Mean over the seeds whose curves are stored; the band is 2 standard deviations."
FIGURES = {  # with tanh, and with ReLU
    "xor": ("Figures 5.3–5.5", "Figures 5.6–5.8"),
    "xord": ("Figures 5.9–5.12", "Figures 5.13–5.16"),
    "mnist": ("Figures 5.17–5.19", "Figures 5.20–5.22"),
    "synthetic": ("Figures 5.23–5.25", "Figures 5.26–5.28"),
    "cifar10": ("Figures 5.29–5.31", "Figures 5.32–5.34"),
}
# of which the thesis has a panel for each rule
VECTOR_FIGURES = {"xor": ("Figure 5.5", "Figure 5.8"), "xord": ("Figure 5.12", "Figure 5.16")}
EIGENVALUE_FIGURES = {"xor": 35, "mnist": 36, "synthetic": 37, "cifar10": 38}


def charts_of(task: str, rows: Rows) -> Iterator[Chart]:
    """Curves, norms, eigenvalues and pairs of weights by activation; then Figure 5.39."""
    for activation, part in rows.groups("activation"):
        panel, ours = activation == "relu", part.where(rule=RULES)
        for name in quantities_of(task):
            yield _curves(ours, name, activation, FIGURES[task][panel])
        if DROPOUT in part.distinct("rule"):  # which the thesis has not, so that it stands apart
            beside = part.where(rule=["SGD Large", DROPOUT])
            for name in quantities_of(task):
                yield _curves(beside, name, f"{activation}, with dropout", "")
        rules = part.distinct("rule")
        readings = [mean_and_deviation(part.where(rule=rule), "norm") for rule in rules]
        spreads = ([mean for mean, _ in readings], [2 * deviation for _, deviation in readings])
        means, errors = map(kit.finite, spreads)
        printed = [PUBLISHED[task, activation].get(rule, {}).get("norm") for rule in rules]
        thesis = Series("thesis", rules, printed, style="bars", published=True)
        series = Series("ours", rules, means, errors, "bars"), thesis
        axes, source = ("rule", "‖θ‖₂"), "Tables 5.1, 5.2"
        caption = "Error bars are 2 standard deviations over the seeds."
        title = f"Norm at the end, {activation}"
        yield Chart(title, *axes, series, y_log=True, source=source, caption=caption)
        number = EIGENVALUE_FIGURES.get(task)
        yield _eigenvalues(ours, activation, f"Figure 5.{number}" if number else "")
        for row in part:
            if row.get("weights"):
                yield _vectors(row, activation, VECTOR_FIGURES[task][panel])
    if task != "xor":
        yield _norms(task, rows)


def _curves(rows: Rows, name: str, activation: str, source: str) -> Chart:
    series = []
    for rule, part in rows.groups("rule"):
        stored = [row for row in part if f"{name} curve" in row]
        table = [row[f"{name} curve"] for row in stored]
        series.append(_over_seeds(rule, stored[0]["recorded"], table, "line"))
    log = "error" in name
    title = f"{name.capitalize()}, {activation}"
    return Chart(title, "epoch", name, tuple(series), y_log=log, source=source, caption=BAND)


def _over_seeds(
    label: str, x: Sequence[float | str], table: Sequence[Sequence[float]], style: str
) -> Series:
    """Means ± 2 standard deviations over the seeds (S, …) that had not diverged."""
    columns = [Rows({"value": value} for value in column) for column in zip(*table, strict=True)]
    readings = [mean_and_deviation(column, "value") for column in columns]
    errors = [0.0 if math.isnan(deviation) else 2 * deviation for _, deviation in readings]
    return Series(label, x, kit.finite([mean for mean, _ in readings]), errors, style)


def _eigenvalues(rows: Rows, activation: str, source: str) -> Chart:
    series = []
    for rule, part in rows.groups("rule"):
        tops = [values for values in part.values("eigenvalues") if values]
        if tops:
            places = [str(place + 1) for place in range(len(tops[0]))]
            series.append(_over_seeds(rule, places, tops, "bars"))
    title = f"Largest eigenvalues of the Hessian, {activation}"
    caption = "Of the loss alone, at the end; bars of 2 standard deviations."
    return Chart(title, "place", "eigenvalue", tuple(series), source=source, caption=caption)


def _vectors(row: Row, activation: str, source: str) -> Chart:
    """The first-layer weights of one rule as strokes from the origin, as a panel of the thesis."""
    rule, weights = row["rule"], row["weights"]
    x = [part for first, _ in weights for part in (0.0, first, first)]
    y = [part for _, second in weights for part in (0.0, second, None)]  # None ends the stroke
    count = f"Of {len(weights)}, {row['vectors']:.1f} count"
    caption = f"Every vector of seed 0. {count}: (Σ‖w‖²)²/Σ‖w‖⁴."
    title = f"First-layer weights, {activation}, {rule}"
    axes, series = ("weight of the first input", "weight of the second"), (Series(rule, x, y),)
    return Chart(title, *axes, series, source=source if rule in RULES else "", caption=caption)


def _norms(task: str, rows: Rows) -> Chart:
    """Figure 5.39: each rule's norm and test score, or 1 − error, relative to the largest."""
    score, sign = score_of(task)
    series = []
    for activation, part in rows.groups("activation"):
        printed = PUBLISHED[task, activation]
        thesis = [[printed[rule][name] for name in (NORM, score)] for rule in RULES]
        runs = [part.where(rule=rule) for rule in RULES]
        ours = [[mean_and_deviation(run, name)[0] for name in (NORM, score)] for run in runs]
        for label, pairs in ((activation, ours), (f"{activation}, thesis", thesis)):
            kept = np.array([pair for pair in pairs if all(map(math.isfinite, pair))], float)
            shares = kept.reshape(-1, 2) / kept.max(0) if len(kept) else kept.reshape(-1, 2)
            scores = shares[:, 1] if sign > 0 else 1 - shares[:, 1]
            points = shares[:, 0].tolist(), scores.tolist()
            series.append(Series(label, *points, style="points", published=pairs is thesis))
    axes, source = ("relative norm", "relative test performance"), "Figure 5.39"
    caption = "A point for each of the eight rules."
    title = "Norm against generalisation"
    return Chart(title, *axes, tuple(series), source=source, caption=caption)
