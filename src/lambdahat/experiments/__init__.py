"""Published experiments, one file each: what was run, what was assumed, the paper's claims as code, and the verdicts.

``EXPERIMENTS`` maps a name to its run function, ``run(full=False, seed=0) -> Reproduction``.
"""

from collections.abc import Callable

from lambdahat.experiments.regularization import run_xor, run_xord
from lambdahat.experiments.reproduction import Reproduction, Verdict

EXPERIMENTS: dict[str, Callable[..., Reproduction]] = {"xor": run_xor, "xord": run_xord}

__all__ = ["EXPERIMENTS", "Reproduction", "Verdict", "run_xor", "run_xord"]
