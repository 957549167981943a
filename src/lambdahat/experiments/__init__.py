"""Published experiments by paper, and the runner: cells, rows in a store, claims judged.

``find("xor")`` is an experiment, ``sweep(find("xor"), "runs")`` runs it, ``judge`` says which of its claims hold. Those
about mini-batches can also be run in one piece, which returns a ``Reproduction`` to save and to draw.
"""

from lambdahat.experiments.charts import Chart, Heat, Series
from lambdahat.experiments.claims import Claim, judge
from lambdahat.experiments.experiment import Experiment, Rows
from lambdahat.experiments.minibatch.damping import run_damping
from lambdahat.experiments.minibatch.eigenvalues import run_batch_eigenvalues
from lambdahat.experiments.minibatch.lanczos import run_lanczos_opt
from lambdahat.experiments.minibatch.rates import run_stable_rates
from lambdahat.experiments.registry import every, find
from lambdahat.experiments.reproduction import Reproduction, Table, Verdict
from lambdahat.experiments.statistics import Reading
from lambdahat.experiments.store import Store
from lambdahat.experiments.sweeps import sweep

__all__ = [
    "Chart",
    "Claim",
    "Experiment",
    "Heat",
    "Reading",
    "Reproduction",
    "Rows",
    "Series",
    "Store",
    "Table",
    "Verdict",
    "every",
    "find",
    "judge",
    "run_batch_eigenvalues",
    "run_damping",
    "run_lanczos_opt",
    "run_stable_rates",
    "sweep",
]
