"""Learning rates from the eigenvalues of single batches alone, where samples have no curvature of
their own.

With batch-norm by the batch's statistics a loss is that of a whole batch. Its Hessian is no mean
over samples, so that there is none of all data and no τ², and batches of one size say nothing of
those of another. What is left is λ₁ of the batches that were measured: of its s = E λ₁²/E λ₁ an
unknown part is curvature that batches share, and the rest noise.
"""

from __future__ import annotations

import math

from lambdahat.randommatrix.advice_rules import (
    BEYOND_QUADRATIC,
    GRADIENT,
    Recommendation,
    Request,
    in_words,
    stable_rate,
    text,
)
from lambdahat.randommatrix.noise_levels import BatchLevels, NoiseLevels
from lambdahat.randommatrix.rate_limits import PositiveEstimate, propagated, stability_limit
from lambdahat.results import Estimate

ALONE = "batch statistics couple samples, so nothing is predicted from all data or for other sizes"
LENGTH = (
    "the loss does not depend on how long weights before batch-norm are: a rate above the limit"
    " lengthens them, and the curvature falls, so training may bear far higher rates; pass steps"
    " to see"
)
UNMOVED = (
    "with momentum it takes the part of λ₁ that is noise to move a rate to another batch size, and"
    " that is unknown"
)


def limits(
    levels: NoiseLevels | BatchLevels, request: Request, batch_size: int
) -> tuple[Estimate, Estimate]:
    """The largest stable rate, twice; or, with momentum and single batches alone, the two it
    lies between.
    """
    if isinstance(levels, NoiseLevels):
        limit = stable_rate(levels, request, batch_size)
        return limit, limit
    if math.isinf(levels.view(batch_size).effective):
        limit = _positive(_limit(levels, request, batch_size, 0.0))
        return limit, limit
    return _positive(_limit(levels, request, batch_size, 1.0)), _positive(
        _limit(levels, request, batch_size, 0.0)
    )


def _positive(limit: Estimate) -> PositiveEstimate:
    """A limit of training by batch statistics, with the doubt of networks that have them."""
    return PositiveEstimate.of(limit, BEYOND_QUADRATIC[True])


def _limit(levels: BatchLevels, request: Request, batch_size: int, noise: float) -> Estimate:
    """The limit of s = λ + excess where ``noise`` (0 or 1) of it is excess: 2(1 − ρ)/s if all is,
    2/s without momentum.

    That 2/s is the limit takes a sharpest direction that batches share. One that is sharp in few
    has their λ₁ for its limit, so that the spread between batches is a further error of s.
    """
    view, rho = levels.view(batch_size), request.momentum
    doubted = propagated(lambda s, doubt: s + doubt, view.sharpness, Estimate(0.0, view.spread))
    if noise:
        return propagated(lambda s: 2 * (1 - rho) / s, doubted)
    return propagated(lambda s: stability_limit(s, 0.0, rho, request.nesterov), doubted)


def batch_recommendations(levels: BatchLevels, request: Request) -> tuple[Recommendation, ...]:
    """The largest stable rates at the measured sizes and, without momentum, how they scale from one
    to the other.

    Of adaptive methods nothing: no eigenvalue limits their rate.
    """
    if request.optimizer not in GRADIENT:
        return ()
    rates = [each for size in request.batch_sizes for each in _rates(levels, request, size)]
    known = request.momentum == 0 and len(request.batch_sizes) == 2
    return (*rates, *_moved(levels, request)) if known else tuple(rates)


def batch_cautions(request: Request, trained: bool) -> list[str]:
    """What these rules cannot know."""
    if request.optimizer not in GRADIENT:
        return []
    unmoved = request.momentum > 0 and len(request.batch_sizes) == 2
    return [*([] if trained else [LENGTH]), *([UNMOVED] if unmoved else [])]


def _rates(levels: BatchLevels, request: Request, size: int) -> list[Recommendation]:
    view, (low, high) = levels.view(size), limits(levels, request, size)
    if math.isinf(view.effective):
        reason = f"as of a quadratic, for all data are one batch: λ₁ = {text(view.measured)}"
        return [Recommendation("largest stable rate", size, low, reason)]
    numbers = (
        f"batches have λ₁ = {text(view.measured)}, standard deviation {view.spread:.2g}; {ALONE}"
    )
    if request.momentum == 0:
        reason = f"2/λ₁ of the batch (Eq. 5.34) in mean square over batches: {numbers}"
        return [Recommendation("largest stable rate", size, low, reason)]
    rho = f"{request.momentum:g}"
    return [
        Recommendation(
            "largest stable rate, all noise",
            size,
            low,
            f"2(1 − ρ)/λ₁ with momentum ρ = {rho}, were λ₁ of a batch all noise: {numbers}",
        ),
        Recommendation(
            "largest stable rate, no noise",
            size,
            high,
            f"the limit with momentum ρ = {rho}, were all batches alike; the true one lies between"
            " the two",
        ),
    ]


def _moved(levels: BatchLevels, request: Request) -> list[Recommendation]:
    """The rate in use at the same share of its limit, and the exponent between the two sizes."""
    old, new = request.batch_sizes
    ends = [
        _limit(levels, request, size, 0.0 if math.isinf(levels.view(size).effective) else 1.0)
        for size in (old, new)
    ]
    exponent = propagated(lambda first, last: math.log(last / first) / math.log(new / old), *ends)
    reason = (
        f"from {old:,} to {new:,} the measured limit goes as B^p: {in_words(exponent)}; elsewhere"
        " it is unknown"
    )
    found = [Recommendation("scaling exponent", 0, exponent, reason)]
    if request.learning_rate is None:
        return found
    rate = request.learning_rate
    value = PositiveEstimate.of(propagated(lambda first, last: rate * last / first, *ends))
    share = (
        f"{rate:g} is {rate / float(ends[0]):.0%} of the limit at {old:,}, and this is as much of"
        f" that at {new:,}"
    )
    return [Recommendation("learning rate", new, value, share), *found]
