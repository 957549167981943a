"""Tables 5.1 and 5.2 of the regularization thesis beside ours, and how far the orders of the
rules agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy.stats import kendalltau

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.regularization.learning_rules import printed_as
from lambdahat.experiments.regularization.published import PUBLISHED, quantities_of

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
