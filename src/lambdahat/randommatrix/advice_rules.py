"""From measured curvature and its noise to learning rates and damping: one function for each
family of optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lambdahat._core.storage import Result
from lambdahat.randommatrix.noise_levels import NoiseLevels
from lambdahat.randommatrix.rate_limits import (
    PositiveEstimate,
    allowed_excess,
    coupled_limit,
    differ,
    limit_of,
    propagate,
    stability_limit,
)
from lambdahat.results import Estimate

GRADIENT = ("sgd", "momentum", "nesterov")
ADAPTIVE = ("adam", "adamw", "rmsprop")
SECOND_ORDER = ("kfac", "lanczos-newton")
HALF_DOUBLING = (math.sqrt(0.5), math.sqrt(2.0))
SHARPEST = "the sharpest direction"
# of the noise: chosen on 30 cases, where the rule was 0.79 to 1.22 times the exact limit of second
# moments and the interval held it in 28; on 114 others in 104
# (tests/randommatrix/test_advice_limits.py)
MODEL = 0.15
FLATTEST = 1e-6  # of λ₁: a direction below has no curvature to limit a rate
# standard errors, downwards and upwards, of the logarithm of the rate at which training ends over
# the limit of the local quadratic, by benchmarks/advice_edges.py. With normalisation layers (True)
# the loss does not depend on the length of weights before them, and bears far higher rates, which
# lengthen these.
BEYOND_QUADRATIC = {False: (0.5, 1.3), True: (0.5, 2.2)}
CALIBRATED = (
    "its interval holds what networks do beyond the local quadratic"
    ' (documentation: "Choosing batch size and learning rate")'
)
# what a prediction of a batch's λ₁ rests on
NOISE_WORDS = {
    "additive": "isotropic noise, σ²",
    "directional": "the noise along sharp directions, τ²",
}
NORMAL_95 = 1.959  # rounded down, so that an interval holds its ends
USUAL_RATE = dict.fromkeys(ADAPTIVE, 1e-3) | dict.fromkeys(SECOND_ORDER, 1.0)


@dataclass(frozen=True)
class Recommendation(Result):
    """One piece of advice: ``value`` for ``batch_size`` (0: any), and the ``reason``."""

    name: str
    batch_size: int
    value: Estimate
    reason: str


@dataclass(frozen=True)
class AdviceRequest:
    """The question: an optimiser, one or two batch sizes, and the present rate, if any."""

    optimizer: str
    batch_sizes: tuple[int, ...]
    learning_rate: float | None
    momentum: float

    @property
    def nesterov(self) -> bool:
        """Whether momentum is Nesterov's."""
        return self.optimizer == "nesterov"

    @property
    def rate(self) -> float:
        """The rate in use, or the usual one of the optimiser."""
        return USUAL_RATE[self.optimizer] if self.learning_rate is None else self.learning_rate


def recommendations(levels: NoiseLevels, request: AdviceRequest) -> tuple[Recommendation, ...]:
    """Everything that follows for the optimiser."""
    if request.optimizer in GRADIENT:
        rates = *_stable_rates(levels, request), *_keep_share(levels, request)
        return (*rates, *_scaling(levels, request))
    if request.optimizer in ADAPTIVE:
        return (*_damping(levels, request, "least epsilon"), *_root_rate(levels, request))
    return tuple(_damping(levels, request, "least damping"))


def rate_limit(levels: NoiseLevels, request: AdviceRequest, batch_size: int) -> Estimate:
    """The largest stable rate at a batch size on the local quadratic.

    If the known directions are all there are, this is the limit of their coupled second moments;
    otherwise the lowest of single directions, as if all of their noise stayed along them.
    """
    b = levels.view(batch_size).effective
    if levels.complete and not math.isinf(b):
        return _coupled_limit(levels, request, b)
    return _binding(levels, request, batch_size).limit(request, b)


def stable_rate(levels: NoiseLevels, request: AdviceRequest, batch_size: int) -> PositiveEstimate:
    """The largest stable rate of training: that on the local quadratic, with a doubt for the rest.

    On a quadratic of more directions than are known, the limit lies between that of single
    directions and that of the coupled second moments of the known ones.
    """
    limit, b = rate_limit(levels, request, batch_size), levels.view(batch_size).effective
    down, up = (0.0, 0.0) if levels.quadratic else BEYOND_QUADRATIC[levels.normalized]
    if not levels.complete and not math.isinf(b):
        apart = math.log(float(_coupled_limit(levels, request, b)) / float(limit)) / NORMAL_95
        down, up = max(down, -apart), max(up, apart)
    return PositiveEstimate.of(limit, (down, up))


def _coupled_limit(levels: NoiseLevels, request: AdviceRequest, b: float) -> Estimate:
    """``coupled_limit`` of the known directions of positive curvature."""
    along = levels.directions
    values = torch.as_tensor(along.eigenvalues.value).double()
    kept = (values > FLATTEST * float(levels.largest)).nonzero()[:, 0]
    order = len(along)
    matrices = torch.zeros(len(along.elements), order, order, dtype=torch.float64)
    rows, columns = torch.triu_indices(order, order)
    matrices[:, rows, columns] = matrices[:, columns, rows] = along.elements.double()
    matrices = matrices[:, kept][:, :, kept]
    tau2 = torch.as_tensor(along.tau2.value).double()
    errors = torch.as_tensor(along.tau2.stderr).double()
    unsure = float((errors / tau2.clamp(min=1e-300))[kept].max())

    def of(scale: float) -> float:
        share, rho = levels.finite * scale / b, request.momentum
        return coupled_limit(values[kept].numpy(), matrices.numpy(), share, rho, request.nesterov)

    value, most = of(1.0), 1 + NORMAL_95 * unsure
    # τ² may be several times what a subset shows: its error is a factor, and so is that of the
    # limit
    apart = max(math.log(value / of(most)), math.log(of(1 / most) / value)) if unsure else 0.0
    return Estimate(value, value * apart / NORMAL_95)


def expected_limit(levels: NoiseLevels, request: AdviceRequest, b: float) -> Estimate:
    """The largest stable rate at an effective batch, all noise from τ²."""
    return min((each.limit(request, b) for each in _noisy_directions(levels)), key=float)


@dataclass(frozen=True)
class _Direction:
    """A direction of curvature λ, where batches of effective size b add noise/b to it.

    If ``rival``, another estimate of the noise, differs significantly, the difference is added to
    the errors.
    """

    name: str
    curvature: Estimate
    noise: Estimate
    rival: Estimate | None = None

    def limit(self, request: AdviceRequest, b: float) -> Estimate:
        limits = []
        for noise in (self.noise, self.rival):
            if noise is not None:
                excess = propagate(lambda level: level / b, noise)
                limits.append(limit_of(self.curvature, excess, request.momentum, request.nesterov))
        return _add_error(limits[0], abs(float(limits[0]) - float(limits[-1])))

    def exponent(self, request: AdviceRequest, b: float) -> Estimate:
        """p in limit ∝ bᵖ, over a doubling of b about its value."""

        def of(true: float, noise: float) -> float:
            excess, rule = (noise / (b * part) for part in HALF_DOUBLING), request.nesterov
            first, last = (stability_limit(true, e, request.momentum, rule) for e in excess)
            return math.log2(last / first)

        return self._both(of)

    def reaches(self, request: AdviceRequest, rate: Estimate) -> Estimate:
        """The effective b at which the limit is ``rate``."""

        def of(true: float, noise: float, wanted: float) -> float:
            allowed = allowed_excess(wanted, true, request.momentum, request.nesterov)
            return max(noise, 0.0) / allowed

        return self._both(of, rate)

    def _both(self, function: Callable[..., float], *others: Estimate) -> Estimate:
        value = propagate(function, self.curvature, self.noise, *others)
        if self.rival is None:
            return value
        rival = function(float(self.curvature), float(self.rival), *map(float, others))
        return _add_error(value, abs(float(value) - rival))


def _noisy_directions(levels: NoiseLevels) -> list[_Direction]:
    """The sharpest direction and flatter ones, which can be noisier, with the noise τ²/λ of each.

    E‖(I − αH_batch)φ‖² ≤ 1 along every eigenvector is not the limit of the coupled second moments,
    hence the error MODEL of the noise.
    """
    known = {SHARPEST: (levels.largest, levels.tau2), **levels.flatter()}
    directions = []
    for name, (curvature, tau2) in known.items():
        noise = propagate(lambda level, true: levels.finite * level / true, tau2, curvature)
        directions.append(_Direction(name, curvature, _add_error(noise, MODEL * float(noise))))
    return directions


def _directions(levels: NoiseLevels, batch_size: int) -> list[_Direction]:
    """The same, with the noise of the batches, and τ² as its rival, if they show more for sure.

    If they show less it is not used: a few batches miss rare samples, which τ² includes.
    """
    sharpest, *others = _noisy_directions(levels)
    b = levels.view(batch_size).effective
    if math.isinf(b):
        return [sharpest, *others]
    seen = propagate(lambda excess: b * excess, levels.excess(batch_size))
    if float(seen) > float(sharpest.noise) and differ(seen, sharpest.noise):
        sharpest = _Direction(SHARPEST, levels.largest, seen, sharpest.noise)
    return [sharpest, *others]


def _add_error(estimate: Estimate, error: float) -> Estimate:
    """An estimate with a further error."""
    return propagate(lambda value, doubt: value + doubt, estimate, Estimate(0.0, error))


def _binding(levels: NoiseLevels, request: AdviceRequest, batch_size: int) -> _Direction:
    b = levels.view(batch_size).effective
    return min(_directions(levels, batch_size), key=lambda each: float(each.limit(request, b)))


def _stable_rates(levels: NoiseLevels, request: AdviceRequest) -> list[Recommendation]:
    rates = []
    for size in request.batch_sizes:
        view, binding = levels.view(size), _binding(levels, request, size)
        added = propagate(lambda noise, b=view.effective: noise / b, binding.noise)
        adds = f"and a batch of {size:,} adds {text(added)}"
        if binding.name == SHARPEST:
            true, seen = text(levels.largest), text(view.measured)
            numbers = f"λ₁ = {true} on all data, {adds}; measured on batches, λ₁ = {seen}"
        else:
            noisier = f"{binding.name}, noisier than the sharpest direction"
            numbers = f"{noisier}, has λ = {text(binding.curvature)}, {adds}"
        beyond = "" if levels.quadratic else f"; {CALIBRATED}"
        reason = f"{_formula(request)}: {numbers}{beyond}"
        rate = stable_rate(levels, request, size)
        rates.append(Recommendation("largest stable rate", size, rate, reason))
    return rates


def _formula(request: AdviceRequest) -> str:
    if request.momentum == 0:
        return "2/(λ + excess of a batch): Eq. 5.34, 2/λ₁ of the batch, in mean square over batches"
    rho = f"{request.momentum:g}"
    if request.nesterov:
        limit = "2(1 + ρ)/((1 + 2ρ)λ₁) with all data"
        return f"mean-square stability of Nesterov's momentum ρ = {rho}, {limit}"
    noise = (1 + request.momentum) / (1 - request.momentum)
    return f"2(1 + ρ)/(λ + {noise:.3g}·(excess of a batch)) with momentum ρ = {rho}"


def _keep_share(levels: NoiseLevels, request: AdviceRequest) -> list[Recommendation]:
    """The rate in use, moved to the new batch size at the same share of its limit."""
    if request.learning_rate is None or len(request.batch_sizes) < 2:
        return []
    old, new = request.batch_sizes
    rate = request.learning_rate
    limits = [rate_limit(levels, request, size) for size in (old, new)]
    value = PositiveEstimate.of(propagate(lambda first, last: rate * last / first, *limits))
    share = f"{rate:g} is {rate / float(limits[0]):.0%} of the limit at {old:,}"
    reason = f"{share}, and this is the same share of the limit at {new:,}"
    return [Recommendation("learning rate", new, value, reason)]


def _scaling(levels: NoiseLevels, request: AdviceRequest) -> list[Recommendation]:
    """The exponent of the limit in the batch size, and the batch size where scaling ends."""
    first, last = request.batch_sizes[0], request.batch_sizes[-1]
    if first != last:
        limits = [rate_limit(levels, request, size) for size in (first, last)]
        exponent = propagate(lambda a, b: math.log(b / a) / math.log(last / first), *limits)
        about = f"from {first:,} to {last:,} the limit grows as B^p"
    else:
        exponent = _binding(levels, request, first).exponent(request, levels.view(first).effective)
        about = f"at {first:,}, where noise falls as 1/b, doubling b gives 2^p times the limit"
    found = [Recommendation("scaling exponent", 0, exponent, f"{about}: {in_words(exponent)}")]
    return [*found, _end(levels, request)]


def in_words(exponent: Estimate) -> str:
    """An exponent in words, as far as its interval decides."""
    if math.isnan(float(exponent.stderr)):
        return "how, is unknown"
    low, high = (
        "linear" if end > 0.75 else "square-root" if end > 0.25 else "hardly any"
        for end in exponent.interval()
    )
    return f"{low} scaling" if low == high else f"anything from {low} to {high} scaling"


def _end(levels: NoiseLevels, request: AdviceRequest) -> Recommendation:
    """B* = b*/(1 + b*/N), b* the effective batch at which the limit is half that of all data.

    It is that of the direction which needs the largest batches. Below one sample it is reported as
    1.
    """
    total = levels.population
    rule = request.momentum, request.nesterov
    half = propagate(lambda true: stability_limit(true, 0.0, *rule) / 2, levels.largest)
    directions = _directions(levels, request.batch_sizes[0])
    reached = [(each.reaches(request, half), each) for each in directions]
    last, slowest = max(reached, key=lambda pair: float(pair[0]))
    value = propagate(lambda b: b / (1 + b / total), last)
    about = _about_end(levels, slowest)
    if value.interval()[1] <= 1:
        past = "at B = 1 the limit is already more than half that of all data"
        return Recommendation("end of scaling", 0, Estimate(1.0), f"{past}; {about}")
    if float(value) <= 1:
        past = "at B = 1 the limit may already be more than half that of all data"
        reason = f"it comes out at {text(value)}, so that {past}; {about}"
        value = replace(value, value=1.0)
        return Recommendation("end of scaling", 0, PositiveEstimate.of(value), reason)
    reason = f"the limit is half that of all data there, and larger batches gain little; {about}"
    return Recommendation("end of scaling", 0, PositiveEstimate.of(value), reason)


def _about_end(levels: NoiseLevels, slowest: _Direction) -> str:
    """b* without momentum: n/(2λ₁ − λ) where a batch adds n/b to λ; τ²/λ₁² for the sharpest."""
    true = float(levels.largest)
    ratio = f"τ²/λ₁² = {float(levels.tau2) / true**2:.3g}"
    plain = levels.parameters * float(levels.variance) / true**2
    isotropic = f"Pσ²/λ₁² = {plain:.3g} if the noise were isotropic"
    near = max(float(slowest.noise), 0.0) / (2 * true - float(slowest.curvature))
    about = f"without momentum it is near {near:.3g}"
    if slowest.name != SHARPEST:
        noisier = f"{about} along {slowest.name}, noisier than the sharpest direction"
        return f"{noisier}; along that it would be {ratio}, or {isotropic}"
    if slowest.rival is not None:
        return f"{about} by the batches, {ratio} by samples, or {isotropic}"
    return f"without momentum it is near {ratio}, or {isotropic}"


def _damping(levels: NoiseLevels, request: AdviceRequest, name: str) -> list[Recommendation]:
    """The damping against overshooting along falsely flat directions (Eq. 5.36, corrected).

    Training refutes the rule by factors (docs/minibatch-rates.md), so that its error is unknown. A
    batch's flat directions together hold the share r = 1 − |φ̂₁ᵀφ₁|² of the sharpest one, so that δ
    > αλ₁r/2. To first order r = τ²/(bλ₁²), and Pσ²/(bλ₁²) for isotropic noise: δ > ατ²/(2bλ₁) and
    αPσ²/(2bλ₁).
    """
    rate = request.rate
    usual = "" if request.learning_rate is not None else " (the usual rate)"
    least = []
    for size in request.batch_sizes:
        # λ₁r, the curvature hidden in a batch's flat directions, estimated in three ways
        view, order = levels.view(size), levels.parameters
        b = view.effective
        expected, true = float(levels.expected_excess(b)), float(levels.largest)
        isotropic = levels.finite * order * float(levels.variance) / (b * true)
        seen = true * (1 - float(view.overlap))
        spread = f"σ² = {text(levels.variance)}, P = {order:,}, b = {b:.5g}"
        overlap = f"|φ̂₁ᵀφ₁|² = {text(view.overlap)} measured on the batches"
        for suffix, (curvature, formula, numbers) in {
            "": (expected, "ατ²/(2bλ₁)", f"τ² = {text(levels.tau2)}, b = {b:.5g}"),
            ", isotropic noise": (isotropic, "αPσ²/(2bλ₁)", spread),
            ", from overlap": (seen, "αλ₁(1 − |φ̂₁ᵀφ₁|²)/2", overlap),
        }.items():
            value = Estimate(rate * curvature / 2, math.nan)
            reason = f"{formula} with α = {rate:g}{usual}, λ₁ = {text(levels.largest)}, {numbers}"
            least.append(Recommendation(name + suffix, size, value, reason))
    return least


def _root_rate(levels: NoiseLevels, request: AdviceRequest) -> list[Recommendation]:
    """Square-root scaling while ε is far below √v (§5.8.1, spectral thesis): a rule of thumb."""
    old, new = request.batch_sizes[0], request.batch_sizes[-1]
    noise = propagate(lambda level: levels.finite * level, levels.gradient_variance)
    b = levels.view(old).effective
    typical = propagate(lambda mean, var: math.sqrt(mean + var / b), levels.gradient, noise)
    share = float(noise) / b / max(float(typical) ** 2, 1e-300)
    reason = (
        f"root mean square of an element of the gradient of {old:,} samples, {share:.0%} of its"
        " square from noise; with ε far above it Adam is SGD of rate α/ε, and scales as SGD does"
    )
    advice = [Recommendation("typical √v", old, typical, reason)]
    if request.learning_rate is not None and old != new:
        value = Estimate(request.learning_rate * math.sqrt(new / old), math.nan)
        rule = f"α·√(B'/B), for ε far below √v = {text(typical)} (§5.8.1)"
        reason = f"{rule}: a rule of thumb, not measured here"
        advice.append(Recommendation("learning rate", new, value, reason))
    return advice


def text(estimate: Estimate) -> str:
    """A number with its error; two digits if the error is unknown."""
    error = float(estimate.stderr)
    if error == math.inf:
        return f"at least {float(estimate):.4g}"
    if math.isnan(error):
        return f"{float(estimate):.2g} (error unknown)"
    return f"{float(estimate):.4g}" if error == 0 else f"{float(estimate):.4g} ± {error:.2g}"
