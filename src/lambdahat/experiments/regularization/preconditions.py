"""When a run is not what the regularization thesis speaks of: networks that have learnt, on its
data, at its rates.
"""

from __future__ import annotations

from collections.abc import Sequence

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import mean_of
from lambdahat.experiments.regularization.learning_rules import regime_of
from lambdahat.experiments.regularization.published import (
    ACCURACY,
    EARLY,
    PUBLISHED,
    TRAIN,
    quantities_of,
)

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
