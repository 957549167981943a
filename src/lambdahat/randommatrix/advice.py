"""Advice on learning rate and batch size from measured curvature, with the reasons.

With batch norm in training mode a loss is that of a whole batch. Its Hessian is no mean over
samples, so that there is none of all data and no τ², and batches of one size say nothing of those
of another. What is left is λ₁ of the batches that were measured: of its s = E λ₁²/E λ₁ an unknown
part is curvature that batches share, and the rest is noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lambdahat._core.check import (
    require,
    require_choice,
    require_count,
    require_number,
    require_positive,
)
from lambdahat._core.storage import Result, Status
from lambdahat.estimators._variance import require_own_losses
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.network import BATCH_NORMS
from lambdahat.randommatrix.advice_rules import (
    ADAPTIVE,
    BEYOND_QUADRATIC,
    GRADIENT,
    NOISE_WORDS,
    SECOND_ORDER,
    AdviceRequest,
    Recommendation,
    in_words,
    recommendations,
    stable_rate,
    text,
)
from lambdahat.randommatrix.noise_levels import BatchLevels, NoiseLevels, batch_levels, noise_levels
from lambdahat.randommatrix.rate_limits import PositiveEstimate, differ, propagate, stability_limit
from lambdahat.randommatrix.stable_rates import NoLimitError, StableRate, largest_stable_rate
from lambdahat.results import Estimate

ALONE = "batch statistics couple samples, so nothing is predicted from all data or for other sizes"
LENGTH = (
    "the loss does not depend on how long weights before batch-norm are: a rate above the limit"
    " lengthens them, and the curvature falls, so training may bear far higher rates; pass steps"
    " (--steps) to see"
)
UNMOVED = (
    "with momentum it takes the part of λ₁ that is noise to move a rate to another batch size, and"
    " that is unknown"
)
OPTIMIZERS = (*GRADIENT, *ADAPTIVE, *SECOND_ORDER)
USUAL_BATCH = 128
USUAL_MOMENTUM = {"sgd": 0.0, "momentum": 0.9, "nesterov": 0.9}


def limits(
    levels: NoiseLevels | BatchLevels, request: AdviceRequest, batch_size: int
) -> tuple[Estimate, Estimate]:
    """The range of the largest stable rate: one value twice if it is known."""
    if isinstance(levels, NoiseLevels):
        limit = stable_rate(levels, request, batch_size)
        return limit, limit
    sure = math.isinf(levels.view(batch_size).effective)
    ends = [_limit(levels, request, batch_size, noise) for noise in (0.0 if sure else 1.0, 0.0)]
    low, high = (PositiveEstimate.of(limit, BEYOND_QUADRATIC[True]) for limit in ends)
    return low, high


def _limit(levels: BatchLevels, request: AdviceRequest, batch_size: int, noise: float) -> Estimate:
    """The limit of s = λ + excess if ``noise`` (0 or 1) of it is excess: 2(1 − ρ)/s if all is.

    Batches may not share the sharpest direction; one that is sharp in few has their λ₁ for its
    limit, so that the spread between batches is a further error of s.
    """
    view, rho = levels.view(batch_size), request.momentum
    doubted = propagate(lambda s, doubt: s + doubt, view.sharpness, Estimate(0.0, view.spread))
    if noise:
        return propagate(lambda s: 2 * (1 - rho) / s, doubted)
    return propagate(lambda s: stability_limit(s, 0.0, rho, request.nesterov), doubted)


def batch_recommendations(
    levels: BatchLevels, request: AdviceRequest
) -> tuple[Recommendation, ...]:
    """The largest stable rates at the measured sizes and, without momentum, how they scale.

    There is none for adaptive methods: no eigenvalue limits their rate.
    """
    if request.optimizer not in GRADIENT:
        return ()
    rates = [each for size in request.batch_sizes for each in _rates(levels, request, size)]
    known = request.momentum == 0 and len(request.batch_sizes) == 2
    return (*rates, *_move_rate(levels, request)) if known else tuple(rates)


def _rates(levels: BatchLevels, request: AdviceRequest, size: int) -> list[Recommendation]:
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
    rho = f"with momentum ρ = {request.momentum:g}"
    noisy = f"2(1 − ρ)/λ₁ {rho}, were λ₁ of a batch all noise: {numbers}"
    plain = f"the limit {rho}, were all batches alike; the true one lies between the two"
    return [
        Recommendation("largest stable rate, all noise", size, low, noisy),
        Recommendation("largest stable rate, no noise", size, high, plain),
    ]


def _move_rate(levels: BatchLevels, request: AdviceRequest) -> list[Recommendation]:
    """The rate in use at the same share of its limit, and the exponent between the two sizes."""
    old, new = request.batch_sizes
    ends = [
        _limit(levels, request, size, 0.0 if math.isinf(levels.view(size).effective) else 1.0)
        for size in (old, new)
    ]
    exponent = propagate(lambda first, last: math.log(last / first) / math.log(new / old), *ends)
    reason = (
        f"from {old:,} to {new:,} the measured limit grows as B^p: {in_words(exponent)}; elsewhere"
        " it is unknown"
    )
    advice = [Recommendation("scaling exponent", 0, exponent, reason)]
    if request.learning_rate is None:
        return advice
    rate = request.learning_rate
    value = PositiveEstimate.of(propagate(lambda first, last: rate * last / first, *ends))
    share = (
        f"{rate:g} is {rate / float(ends[0]):.0%} of the limit at {old:,}, and this is as much of"
        f" that at {new:,}"
    )
    return [Recommendation("learning rate", new, value, share), *advice]


@dataclass(frozen=True)
class Advice(Result):
    """Recommended learning rate, batch size and damping, from a problem's curvature.

    ``levels`` are the measured numbers (``BatchLevels`` of a problem with norm="train"),
    ``recommendations`` what follows from them, each with its reason, and ``cautions`` what to
    watch. ``advice["largest stable rate"]`` is the value of the first recommendation of that name,
    ``advice["largest stable rate", 1024]`` that for a batch size. ``cost`` counts passes over the
    data.
    """

    optimizer: str
    momentum: float
    learning_rate: float | None
    levels: NoiseLevels | BatchLevels
    recommendations: tuple[Recommendation, ...]
    cautions: tuple[str, ...] = ()
    cost: int = 0
    status: Status = Status.CONVERGED

    @property
    def rule(self) -> str:
        """The optimiser with its momentum, such as "nesterov 0.9"."""
        return f"{self.optimizer} {self.momentum:g}" if self.momentum else self.optimizer

    def __getitem__(self, key: str | tuple[str, int]) -> Estimate:
        name, size = (key, None) if isinstance(key, str) else key
        named = [each for each in self.recommendations if each.name == name]
        chosen = [each for each in named if size in (None, each.batch_size)]
        known = ", ".join(f"{each.name!r}, {each.batch_size}" for each in self.recommendations)
        require(bool(chosen), "a recommendation", f"be one of {known}", repr(key), "", KeyError)
        return chosen[0].value

    @property
    def headline(self) -> str:
        """The advice in one line: half of the largest stable rate, the fastest on a quadratic.

        A rate by training takes precedence over one by curvature, and one that was moved from
        another batch size over both.
        """
        point = "for this point of training"
        starts = ("learning rate", 1.0), ("stable rate by training", 0.5)
        for start, share in (*starts, ("largest stable rate", 0.5)):
            fitting = [each for each in self.recommendations if each.name.startswith(start)]
            if not fitting:
                continue
            value, (low, high) = float(fitting[0].value), fitting[0].value.interval()
            at = f"at batch {fitting[0].batch_size:,}, {point}"
            if not math.isfinite(low):
                return f"use lr ≈ {share * value:.2g} (error unknown) {at}"
            between = f"{share * low:.3g} to {share * high:.3g}"
            return f"use lr ≈ {share * value:.3g} ({between}) {at}"
        least = [each for each in self.recommendations if each.name.startswith("least")]
        size, action = self.levels.views[0].batch_size, "no rate is known"
        if least:
            size = least[0].batch_size
            action = f"use {least[0].name} ≈ {float(least[0].value):.2g} (error unknown)"
        cure = "pass steps (--steps) to find the rate by training"
        return f"{action} at batch {size:,}, {point}: {cure}"

    def table(self) -> list[dict[str, Any]]:
        """One row per recommendation: name, batch_size, value, stderr, low, high (95 %), reason."""
        rows = []
        for each in self.recommendations:
            low, high = each.value.interval()
            row: dict[str, Any] = {"name": each.name, "batch_size": each.batch_size or None}
            row |= {"value": float(each.value), "stderr": float(each.value.stderr)}
            rows.append(row | {"low": low, "high": high, "reason": each.reason})
        return rows

    def __str__(self) -> str:
        sizes = f"{self.levels.parameters:,} parameters, {self.levels.population:,} samples"
        lines = [self.headline, f"{self.rule}, {sizes}"]
        for each in self.recommendations:
            at = f", batch of {each.batch_size:,}" if each.batch_size else ""
            lines.append(f"{each.name}{at}: {text(each.value)}")
            lines.append(f"    {each.reason}")
        return "\n".join([*lines, *(f"caution: {caution}" for caution in self.cautions)])


def advise(
    problem: Problem,
    optimizer: str = "sgd",
    batch_size: int | None = None,
    new_batch_size: int | None = None,
    learning_rate: float | None = None,
    momentum: float | None = None,
    *,
    batches: int | None = None,
    samples: int | None = None,
    steps: int = 0,
    factor: float | None = None,
    seed: int = 0,
) -> Advice:
    """Learning rate, batch size and damping from the curvature at the problem's parameters.

    ``optimizer`` is "sgd", "momentum" or "nesterov" (with ``momentum``, default 0, 0.9 and 0.9),
    "adam", "adamw", "rmsprop", "kfac" (on the Gauss–Newton matrix) or "lanczos-newton". For the
    first three come the largest stable rate, how it scales with the batch size (default 128, or all
    data if fewer) and where that ends; for the rest the least ε or damping δ at ``learning_rate``
    (default 1e-3 and 1), by a rule whose error is unknown. With ``new_batch_size`` everything is
    computed for both sizes, and ``learning_rate`` is moved to the new one.

    λ₁ is measured on all data, τ² and σ² on ``samples`` samples (default at most 1,024), and λ₁ of
    ``batches`` batches of each size (default: enough to cover the data once, from 10 to 30). For up
    to 12 parameters, rates are the exact limit of the coupled second moments; beyond, they follow
    τ² of the direction with the lowest, or the batches if these show significantly less. Their
    intervals are positive and, unless the loss is quadratic, include what networks do beyond the
    local quadratic. Predictions that disagree with the measurements are listed as cautions. With
    ``steps`` the largest stable rates are also found by training that long, judged by ``factor`` as
    ``largest_stable_rate`` does. All of this holds at the present parameters: advice for the start
    of training does not hold at its end.

    With norm="train" no sample has a curvature of its own, and rates come from λ₁ of the measured
    batches alone: with momentum two rates that bracket the limit, no predictions, and no ε or
    damping.
    """
    require_problem(problem)
    request = _request(problem, optimizer, batch_size, new_batch_size, learning_rate, momentum)
    if batches is not None:
        require_count(batches, "batches", 2, cure="one batch shows no error")
    if optimizer in SECOND_ORDER:
        require_count(steps, "steps", 0, 0, "largest_stable_rate takes any torch optimiser")
    require_count(steps, "steps", 0)
    if samples is not None:
        require_count(samples, "samples", 2, problem.num_samples)
    if factor is not None:
        require_positive(factor, "factor")
    levels = _measure(problem, request, batches, samples, steps, seed)
    if isinstance(levels, BatchLevels):
        curvatures = [view.sharpness for view in levels.views]
    else:
        curvatures = [levels.largest]
    for value in curvatures:
        name, expected = f"the largest eigenvalue of the {levels.operator}", "be above 0"
        cure = "measure at parameters where the loss bends upwards: train further"
        fine = value.interval()[0] > 0
        require(fine, name, f"{expected} for any of these rules", text(value), cure)
    if isinstance(levels, BatchLevels):
        rules = batch_recommendations(levels, request)
    else:
        rules = recommendations(levels, request)
    trained, failed = _train(problem, request, levels, steps, factor, seed) if steps else ((), ())
    cautions = (
        *_layer_cautions(problem),
        *_rate_cautions(levels, request, bool(trained)),
        *_training_cautions(levels, request, trained),
        *failed,
    )
    every = list(rules)
    for rate in trained:
        end = "what noise explains" if factor is None else f"{factor:g} times the first loss"
        above = f"{steps} steps from here at higher rates end above {end}"
        reason = f"{above}, or at no loss; {rate.cost:,} gradients"
        every.append(Recommendation("stable rate by training", rate.batch_size, rate, reason))
    passes = (math.ceil(rate.cost * rate.batch_size / levels.population) for rate in trained)
    cost, asked = levels.cost + sum(passes), (optimizer, request.momentum, learning_rate)
    return Advice(*asked, levels, tuple(every), cautions, cost, levels.status)


def _request(
    problem: Problem,
    optimizer: str,
    batch_size: int | None,
    new: int | None,
    rate: float | None,
    momentum: float | None,
) -> AdviceRequest:
    require_choice(optimizer, "optimizer", OPTIMIZERS, "take the nearest of its kind")
    fine = problem.has_data
    expected = "be a loss over data"
    require(fine, "problem", expected, "one without data", "a batch of nothing has no noise")
    total, cure = problem.num_samples, "a batch cannot hold more samples than the data"
    fine = total >= 2
    require(fine, "problem", "have two samples or more", repr(total), "one sample has no noise")
    if batch_size is None:
        size = min(USUAL_BATCH, total)
    else:
        size = require_count(batch_size, "batch_size", 1, total, cure)
    sizes = [size]
    if new is not None:
        sizes.append(require_count(new, "new_batch_size", 1, total, cure))
        fine = new != size
        require(fine, "new_batch_size", "differ from batch_size", repr(new), "or leave it out")
    if rate is not None:
        require_positive(rate, "learning_rate")
    if momentum is not None:
        require(
            optimizer in GRADIENT,
            "momentum",
            f"be left out with {optimizer!r}",
            repr(momentum),
            f"no advice here depends on it; it belongs to {', '.join(GRADIENT)}",
        )
        require_number(momentum, "momentum", "[0, 1)")
    held = USUAL_MOMENTUM.get(optimizer, 0.0) if momentum is None else float(momentum)
    return AdviceRequest(optimizer, tuple(sizes), rate, held)


def _measure(
    problem: Problem,
    request: AdviceRequest,
    batches: int | None,
    samples: int | None,
    steps: int,
    seed: int,
) -> NoiseLevels | BatchLevels:
    optimizer = request.optimizer
    if problem.norm == "train":
        known = optimizer in GRADIENT or (optimizer in ADAPTIVE and steps > 0)
        expected = (
            f"be one of {', '.join(GRADIENT)}, or come with steps if it is one of "
            f'{", ".join(ADAPTIVE)}, for a problem with norm="train"'
        )
        cure = "batch statistics leave no sample a curvature, from which ε and damping come"
        require(known, "optimizer", expected, repr(optimizer), cure)
        fine = samples is None
        expected = 'be left out for a problem with norm="train"'
        require(fine, "samples", expected, repr(samples), "no sample is looked at by itself")
        return batch_levels(problem, request.batch_sizes, batches, seed)
    operator = "ggn" if optimizer == "kfac" else "hessian"
    known = operator == "hessian" or problem.loss_function is not None
    expected = "be made of a model and a loss of its output for KFAC"
    require(known, "problem", expected, "one function", "", TypeError)
    require_own_losses(problem)
    return noise_levels(problem, operator, request.batch_sizes, batches, samples, seed)


def _train(
    problem: Problem,
    request: AdviceRequest,
    levels: NoiseLevels | BatchLevels,
    steps: int,
    factor: float | None,
    seed: int,
) -> tuple[tuple[StableRate, ...], tuple[str, ...]]:
    """The largest stable rate at each batch size by bisection, and where none was found."""
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
    }

    def make(parameters: list[Tensor], rate: float) -> Optimizer:
        if request.optimizer in kinds:
            return kinds[request.optimizer](parameters, lr=rate)  # type: ignore[no-any-return]
        rho, nesterov = request.momentum, request.nesterov
        return torch.optim.SGD(parameters, rate, momentum=rho, nesterov=nesterov)

    rates, failed = [], []
    for size in request.batch_sizes:
        adaptive = request.optimizer in ADAPTIVE
        start = request.rate if adaptive else float(limits(levels, request, size)[0])
        try:
            rate = largest_stable_rate(
                problem, make, size, steps=steps, start=start, factor=factor, seed=seed
            )
        except NoLimitError as error:
            failed.append(f"training with batches of {size:,} found no limit: {error}")
        else:
            rates.append(rate)
    return tuple(rates), tuple(failed)


def _layer_cautions(problem: Problem) -> list[str]:
    """Cautions about layers that behave differently in training."""
    layers = list(problem.source.modules()) if isinstance(problem.source, torch.nn.Module) else []
    cautions = []
    if problem.norm != "train" and any(isinstance(layer, BATCH_NORMS) for layer in layers):
        cautions.append(
            "normalisation layers use running statistics here and those of the batch in training,"
            " so that this is advice for another network: ask for that of a problem with"
            ' norm="train"'
        )
    dropouts = (each for each in layers if isinstance(each, torch.nn.modules.dropout._DropoutNd))
    if any(layer.p > 0 for layer in dropouts):
        cautions.append(
            "dropout is off here and on in training, where it adds noise: stay further below the"
            " limit"
        )
    return cautions


def _rate_cautions(
    levels: NoiseLevels | BatchLevels, request: AdviceRequest, trained: bool
) -> list[str]:
    """Cautions: rules known to fail, missed predictions, rates too large, no minimum."""
    if isinstance(levels, BatchLevels):
        cautions = []
        if request.optimizer in GRADIENT and not trained:
            cautions.append(LENGTH)
        if request.optimizer in GRADIENT and request.momentum > 0 and len(request.batch_sizes) == 2:
            cautions.append(UNMOVED)
    else:
        cautions = _rule_cautions(levels, request)
    if request.optimizer in GRADIENT and request.learning_rate is not None:
        size = request.batch_sizes[0]
        low, high = limits(levels, request, size)
        least, most = low.interval()[0], high.interval()[1]
        if request.learning_rate > least:
            sure = "is above" if request.learning_rate > most else "may be above"
            cautions.append(
                f"the learning rate {request.learning_rate:g} {sure} the limit at {size:,},"
                f" {least:.3g} to {most:.3g}"
            )
    if isinstance(levels, NoiseLevels) and float(levels.smallest) < -0.1 * float(levels.largest):
        cautions.append(
            f"the smallest eigenvalue is {text(levels.smallest)}: the loss still falls along it,"
            " and λ₁ will change"
        )
    return cautions


def _rule_cautions(levels: NoiseLevels, request: AdviceRequest) -> list[str]:
    """Cautions about rules that are known to fail, and predictions that measurements refute."""
    cautions = []
    if request.optimizer not in GRADIENT:
        cautions.append(
            "the least ε or damping tells an order of magnitude at best: on MNIST KFAC needed 0.9"
            " (B = 16) to 0.0001 (B = 1,024) of that by τ², and Adam 0.4 to 2.7, but up to 770"
            ' times that by isotropic noise (documentation: "Stable learning rates and damping,'
            ' measured")'
        )
    for view in levels.views:
        missed = [model for model in view.predicted if view.strays(model)]
        stray = [f"{text(view.predicted[each])} from {NOISE_WORDS[each]}" for each in missed]
        if stray and math.isfinite(view.effective):
            harmless = request.optimizer in GRADIENT and not view.strays("directional")
            cautions.append(
                f"λ₁ of batches of {view.batch_size:,} was measured as {text(view.measured)} but"
                " predicted differently "
                f"({'; '.join(stray)})" + "; no rate here assumes isotropic noise" * harmless
            )
    return cautions


def _training_cautions(
    levels: NoiseLevels | BatchLevels, request: AdviceRequest, trained: tuple[StableRate, ...]
) -> list[str]:
    """Where training and the rule disagree, or where only training can tell."""
    if request.optimizer in ADAPTIVE:
        unknown = (
            "no eigenvalue limits an adaptive method's rate: pass steps (--steps) to find it by"
            " training"
        )
        return [] if trained else [unknown]
    cautions = []
    for rate in trained:
        low, high = limits(levels, request, rate.batch_size)
        between = float(low) <= float(rate) <= float(high)
        if not between and differ(rate, low) and differ(rate, high):
            limit = text(low) if low == high else f"{text(low)} to {text(high)}"
            cautions.append(
                f"by training, rates up to {text(rate)} are stable at {rate.batch_size:,}; by the"
                f" rule, which knows only this point's curvature, up to {limit}: trust the training"
                " for as many steps"
            )
    return cautions
