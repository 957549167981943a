"""Published experiments by paper, and the runner: cells, rows in a store, claims judged.

``find("xor")`` is an experiment, ``sweep(find("xor"), "runs")`` runs it, ``judge`` says which of
its claims hold.
"""

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import Claim, Reading, Table, Verdict, judge
from lambdahat.experiments.kit.experiment import Experiment
from lambdahat.experiments.kit.store import Store
from lambdahat.experiments.kit.sweeps import sweep
from lambdahat.experiments.published import every, find
from lambdahat.results.charts import Chart, Heat, Series

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
