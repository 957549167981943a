"""Published experiments, one file each: what was run, what was assumed, the paper's claims as code.

``lambdahat.experiments.registry`` has them by name, ``lambdahat.experiments.sweeps.sweep`` runs one. Those about
mini-batches can also be run in one piece, which returns a ``Reproduction`` to save and to draw.
"""

from lambdahat.experiments.minibatch.damping import run_damping
from lambdahat.experiments.minibatch.eigenvalues import run_batch_eigenvalues
from lambdahat.experiments.minibatch.lanczos import run_lanczos_opt
from lambdahat.experiments.minibatch.rates import run_stable_rates
from lambdahat.experiments.reproduction import Reproduction, Verdict

__all__ = [
    "Reproduction",
    "Verdict",
    "run_batch_eigenvalues",
    "run_damping",
    "run_lanczos_opt",
    "run_stable_rates",
]
