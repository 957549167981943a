"""The benchmark: ours and the installed peers on the same model, data, precision and accuracy,
in one process.
"""

from lambdahat.bench.plans import Plan
from lambdahat.bench.records import BenchResult, BenchRow, Regression, regressions
from lambdahat.bench.suite import FAMILIES, run

__all__ = ["FAMILIES", "BenchResult", "BenchRow", "Plan", "Regression", "regressions", "run"]
