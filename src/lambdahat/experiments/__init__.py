"""Published experiments, one file each: what was run, what was assumed, the paper's claims as code, and the verdicts.

``EXPERIMENTS`` maps a name to its run function, ``run(full=False, seed=0) -> Reproduction``, or, for those in
``SCALED``, ``run(scale="cpu", seed=0) -> Reproduction`` with the scales "smoke", "cpu" and "paper".
"""

from collections.abc import Callable

from lambdahat.experiments.lanczos_generalisation import run_lanczos_opt
from lambdahat.experiments.minibatch_damping import run_damping
from lambdahat.experiments.minibatch_eigenvalues import run_batch_eigenvalues
from lambdahat.experiments.minibatch_rates import run_stable_rates
from lambdahat.experiments.reproduction import Reproduction, Verdict

SCALED: dict[str, Callable[..., Reproduction]] = {
    "batch-eigenvalues": run_batch_eigenvalues,
    "damping": run_damping,
    "lanczos-opt": run_lanczos_opt,
    "stable-rates": run_stable_rates,
}
EXPERIMENTS: dict[str, Callable[..., Reproduction]] = {**SCALED}

__all__ = [
    "EXPERIMENTS",
    "SCALED",
    "Reproduction",
    "Verdict",
    "run_batch_eigenvalues",
    "run_damping",
    "run_lanczos_opt",
    "run_stable_rates",
]
