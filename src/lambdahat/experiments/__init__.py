"""Published experiments by paper, and the runner: cells, rows in a store, claims judged.

``find("xor")`` is an experiment, ``sweep(find("xor"), "runs")`` runs it, ``judge`` says which of
its claims hold.
"""

from lambdahat.experiments.kit import (
    Chart,
    Claim,
    Experiment,
    Heat,
    Reading,
    Rows,
    Series,
    Store,
    Table,
    Verdict,
    judge,
    sweep,
)
from lambdahat.experiments.published import every, find

__all__ = [
    "Chart",
    "Claim",
    "Experiment",
    "Heat",
    "Reading",
    "Rows",
    "Series",
    "Store",
    "Table",
    "Verdict",
    "every",
    "find",
    "judge",
    "sweep",
]
