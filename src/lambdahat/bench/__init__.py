"""The benchmark: ours and installed peers on the same problems at the same accuracy."""

from lambdahat.bench.plans import Plan
from lambdahat.bench.records import BenchResult, BenchRow, Regression, regressions
from lambdahat.bench.suite import FAMILIES, run

__all__ = ["FAMILIES", "BenchResult", "BenchRow", "Plan", "Regression", "regressions", "run"]
