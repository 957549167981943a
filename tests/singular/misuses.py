"""Misuses of the learning coefficient and what is read off it, in the form of
``tests/misuses.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from lambdahat import Problem, llc
from lambdahat.sampling import sgld
from lambdahat.singular import exact, llc_along, sweep, temperature_regression, volume_scaling
from tests.misuses import MLP, Row, net

BARE = Problem.from_function(lambda p: p["w"].square().sum(), {"w": torch.zeros(2)})


def run(given: Any = None, **options: Any) -> Any:
    return llc(MLP if given is None else given, **{"chains": 2, "draws": 8, **options})


SINGULAR: dict[str, Row] = {
    "a model for λ̂": (
        lambda: llc(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "no samples for a temperature": (
        lambda: llc(BARE),
        ValueError,
        "nbeta must be a number for so little data",
    ),
    "unknown temperature": (
        lambda: run(nbeta="n log n"),
        ValueError,
        "nbeta must be a number or one of 'n/log n'",
    ),
    "temperature 0": (
        lambda: run(nbeta=0.0),
        ValueError,
        "nbeta must be a finite number above 0, got 0",
    ),
    "temperature as a flag": (
        lambda: run(nbeta=True),
        TypeError,
        "nbeta must be a number or one of",
    ),
    "no chains for λ̂": (
        lambda: llc(MLP, chains=0),
        ValueError,
        "chains must be an integer of at least 1",
    ),
    "one draw": (lambda: llc(MLP, draws=1), ValueError, "draws must be an integer of at least 8"),
    "negative burn-in for λ̂": (
        lambda: run(burn_in=-1),
        ValueError,
        "burn_in must be an integer of at least 0",
    ),
    "half a draw": (lambda: run(draws=8.5), TypeError, "draws must be an integer of at least 8"),
    "negative step of a chain": (
        lambda: run(step_size=-1e-3),
        ValueError,
        "step_size must be a number of at least 0",
    ),
    "step of a chain as text": (
        lambda: run(step_size="auto"),
        ValueError,
        "step_size must be a number of at least 0",
    ),
    "no tolerance for λ̂": (lambda: run(tol=0.0), ValueError, "tol must be a finite number above 0"),
    "hardly any gradients": (
        lambda: run(max_gradients=3),
        ValueError,
        "max_gradients must be an integer of at least",
    ),
    "unknown kernel": (
        lambda: run(kernel="nuts"),
        ValueError,
        "kernel must be one of 'kinetic'.*got 'nuts'",
    ),
    "a kernel's class for λ̂": (
        lambda: run(kernel=sgld),
        TypeError,
        "kernel must be one of kinetic.*or a kernel",
    ),
    "a kernel and a step": (
        lambda: run(kernel=sgld(1e-3, 1.0), step_size=1e-3),
        ValueError,
        "set them in the kernel",
    ),
    "unknown layers for γ": (lambda: run(localization={"layer9": 1.0}), ValueError, "localization"),
    "negative γ for λ̂": (
        lambda: run(localization=-1.0),
        ValueError,
        "localization must be finite and at least 0",
    ),
    "γ of another size": (
        lambda: run(localization=torch.ones(3)),
        ValueError,
        r"localization must have shape",
    ),
    "too large a batch for λ̂": (
        lambda: run(batch_size=10_000),
        ValueError,
        r"batch_size must be an integer in \[1, ",
    ),
    "unknown way to run for λ̂": (
        lambda: run(mode="fast", kernel="sgld"),
        ValueError,
        "mode must be one of 'auto'",
    ),
    "unknown baseline": (
        lambda: run(baseline="first"),
        ValueError,
        "baseline must be one of 'paired'",
    ),
    "no checkpoints": (
        lambda: llc_along(MLP, []),
        ValueError,
        "checkpoints must hold at least one, got none",
    ),
    "half a checkpoint": (
        lambda: llc_along(MLP, [{"x": torch.ones(1)}]),
        ValueError,
        r"checkpoints\[0\] must",
    ),
    "a sweep of a model": (lambda: sweep(net()), TypeError, "problem must be a lambdahat.Problem"),
    "a regression of a model": (
        lambda: temperature_regression(net()),
        TypeError,
        "problem must be a lambda",
    ),
    "a volume of a model": (
        lambda: volume_scaling(net()),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "a rank above the widths": (lambda: exact.deep_linear((3, 2, 3), 5), ValueError, "rank"),
    "one width": (
        lambda: exact.deep_linear((3,), 0),
        TypeError,
        "widths must be a list of two layer widths",
    ),
    "exponent 0": (lambda: exact.normal_crossing([0]), ValueError, "exponents"),
    "no dimension": (lambda: exact.regular(-1), ValueError, "dimension"),
    "a step that diverges": (
        lambda: exact.quadratic([1.0], 100.0, 0.0, 1.0),
        ValueError,
        "step_size",
    ),
    "a NaN eigenvalue": (
        lambda: exact.quadratic([math.nan], 100.0, 0.0),
        ValueError,
        "eigenvalues",
    ),
}
