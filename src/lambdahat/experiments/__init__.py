"""Published experiments by paper, and the runner: cells, rows in a store, claims judged.

``find("xor")`` is an experiment, ``sweep(find("xor"), "runs")`` runs it, ``judge`` says which of
its claims hold.
"""

from lambdahat.experiments.claims import Claim, judge
from lambdahat.experiments.experiment import Experiment, Rows
from lambdahat.experiments.registry import every, find
from lambdahat.experiments.reproduction import Table, Verdict
from lambdahat.experiments.statistics import Reading
from lambdahat.experiments.store import Store
from lambdahat.experiments.sweeps import sweep
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
