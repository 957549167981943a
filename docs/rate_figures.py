"""The figures of minibatch-rates.md, on the digits that come with the package."""

from __future__ import annotations

from typing import Any

import lambdahat as lh
from lambdahat.experiments.minibatch.lanczos import Scale, lanczos_opt_of
from lambdahat.experiments.minibatch.rate_subjects import Subject
from lambdahat.experiments.minibatch.rates import stable_rates_of
from lambdahat.report.style import new_axes


def stable_rates() -> Any:
    """The largest stable rates of a perceptron over batch sizes, with the rule's."""
    sizes = (4, 16, 64, 256, 1024)
    digits = Subject("MLP 64-16-10, digits", "mlp", "digits", 1024, sizes, 100, 3, 0, 16, {"widths": (16,)})
    axes = new_axes(4.4)
    return lh.plot(stable_rates_of([digits]), axes)


def lanczos_opt() -> Any:
    """Both errors of LanczosOPT over damping and η."""
    return lh.plot(lanczos_opt_of(Scale("digits", 200, (1e-4, 1e-3, 1e-2, 1e-1), 100, 20, 10, 8)))
