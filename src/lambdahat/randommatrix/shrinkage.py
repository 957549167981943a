"""Damping read as linear shrinkage of a noisy curvature, and what a batch calls for (§6.3.2,
spectral thesis).

A step along (Ĥ + δI)⁻¹g at rate α is one along (βĤ + (1−β)tI)⁻¹g at rate αβ, with δ = t(1−β)/β. The
thesis has t = 1 (Eq. 6.5), which is right for curvature in units of its mean eigenvalue alone; t =
tr H̄/P has the right units always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from lambdahat._core.check import require, require_positive
from lambdahat._core.storage import Result
from lambdahat.randommatrix.rate_limits import propagated
from lambdahat.randommatrix.spikes import effective_batch
from lambdahat.results import Estimate, Spectrum


class Shrinkage(NamedTuple):
    """1/(λ + δ) = 1/(κ(βλ + (1−β)t)): ``kappa`` divides the rate, ``beta`` is the weight left to
    the estimate.
    """

    kappa: float
    beta: float


def damping_as_shrinkage(damping: float, target: float = 1.0) -> Shrinkage:
    """κ = 1 + δ/t and β = 1/κ: what a ``damping`` δ does to rate and curvature (Eq. 6.5 at t =
    ``target`` = 1).

    >>> damping_as_shrinkage(0.25)
    Shrinkage(kappa=1.25, beta=0.8)
    """
    require(0 <= damping < math.inf, "damping", "be a finite number of at least 0", repr(damping))
    kappa = 1.0 + damping / require_positive(target, "target")
    return Shrinkage(kappa, 1.0 / kappa)


def shrinkage_as_damping(beta: float, target: float = 1.0) -> float:
    """δ = t(1−β)/β: the damping that shrinks as β towards ``target``·I does."""
    require(0 < beta <= 1, "beta", "lie in (0, 1]", repr(beta))
    return require_positive(target, "target") * (1.0 - beta) / beta


@dataclass(frozen=True)
class LinearShrinkage(Result):
    """The β of least expected error ‖βĤ + (1−β)tI − H̄‖_F² for a batch's Ĥ, and the ``damping`` δ
    it is equal to.

    ``signal`` is ‖H̄ − tI‖_F², ``noise`` E‖Ĥ − H̄‖_F² and ``target`` t = tr H̄/P. ``damping`` is
    NaN where the trace is not positive: then no positive damping shrinks towards it.
    """

    beta: Estimate
    damping: Estimate
    target: Estimate
    signal: Estimate
    noise: Estimate


def linear_shrinkage(
    spectrum: Spectrum, variance: Estimate | float, batch_size: int, population: int | None = None
) -> LinearShrinkage:
    """How much to trust the curvature of a batch: β = signal/(signal + noise) (Ledoit and Wolf
    2004).

    ``spectrum`` is that of the full data's curvature H̄, ``variance`` σ² that of an element of it
    over samples (``lh.variance``), ``population`` the N samples that the batch is drawn from. With
    Ĥ = H̄ + E and mean E = 0, E‖βĤ + (1−β)tI − H̄‖_F² = β²·noise + (1−β)²·signal, noise = P²σ²/b,
    signal = ‖H̄ − tI‖_F² = tr H̄² − (tr H̄)²/P; the β above is where that is least. Its error is
    that of the spectrum's probes and of σ².
    """
    require(
        isinstance(spectrum, Spectrum),
        "spectrum",
        "be a Spectrum",
        spectrum,
        "take it with lh.spectrum(lh.hessian(problem))",
        TypeError,
    )
    element = variance if isinstance(variance, Estimate) else Estimate(float(variance))
    require(
        0 <= float(element) < math.inf, "variance", "be a finite number of at least 0", str(element)
    )
    size, batch = spectrum.dim, effective_batch(batch_size, population)
    target = spectrum.mean
    signal = spectrum.expectation(lambda nodes: (nodes - float(target)) ** 2, size)
    noise = Estimate(
        size**2 * float(element) / batch, size**2 * float(element.stderr) / batch, dof=element.dof
    )
    require(
        float(signal) > 0,
        "spectrum",
        "have some spread",
        "one eigenvalue, P times",
        "a multiple of the identity is its own target",
    )
    beta = propagated(lambda kept, lost: kept / (kept + lost), signal, noise)
    damping = Estimate(math.nan, math.nan)
    if float(target) > 0:
        damping = propagated(lambda mean, kept, lost: mean * lost / kept, target, signal, noise)
    return LinearShrinkage(beta, damping, target, signal, noise)
