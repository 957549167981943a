"""Trackers of scales: learning coefficient, variance over samples, norms, effective rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lambdahat._core.check import require, require_count, require_type
from lambdahat.estimators import variance
from lambdahat.problem import Problem
from lambdahat.results import Estimate
from lambdahat.sampling.kernels import Kernel
from lambdahat.singular._llc import check_settings, llc
from lambdahat.training.step_rules import innermost, learning_rate
from lambdahat.training.trackers import SampledTracker, TrackerReading, register, with_errors


@register("wbic")
class LearningCoefficientTracker(SampledTracker):
    """λ̂ and WBIC = n·E[L(w)], n the samples measured on: columns ``llc`` and ``wbic``.

    The columns ``llc_nbeta`` and ``llc_localization`` hold nβ and γ (NaN if γ differs between
    parameters). All measurements are at one nβ and one γ, that of the first by the rule of
    ``lh.llc`` unless ``settings`` give it, as in ``lh.singular.llc_along``. ``settings`` are those
    of ``lh.llc``; ``max_gradients`` are over all chains, pilots included.
    """

    name = "llc"
    columns = (*with_errors("llc", "wbic"), "llc_nbeta", "llc_localization")
    unit_of_cost = "gradients"

    def __init__(
        self,
        *,
        chains: int = 4,
        max_gradients: int = 4000,
        settings: Mapping[str, Any] | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.chains = require_count(chains, "chains")
        self.max_gradients = require_count(max_gradients, "max_gradients", least=100)
        require_type(settings or {}, Mapping, "settings", "be a dict of settings of llc")
        self.settings = dict(settings or {})
        own = sorted({"chains", "max_gradients", "seed"} & set(self.settings))
        expected, cure = "hold none of the tracker's own", "give them to the tracker"
        require(not own, "settings", expected, ", ".join(own), cure)
        check_settings({"chains": chains, "max_gradients": max_gradients, **self.settings})
        self._known: dict[str, Any] = {}

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        settings = dict(self.settings)
        known = {key: value for key, value in self._known.items() if key != "device"}
        if self._known.get("device") != sample.device.type:
            known.pop("mode", None)
        if isinstance(settings.get("kernel"), Kernel):  # it has a localization of its own
            known.pop("localization", None)
        own = {name: getattr(self, name) for name in ("chains", "seed", "max_gradients")}
        result = llc(sample, **own, **{**known, **settings})
        assert result.chains is not None
        # the next measurement starts with these; the backend only if it is as fast again
        first = self._known.get("localization", result.localization)
        device = sample.device.type
        self._known = {"localization": first, "mode": result.chains.mode, "device": device}
        values: dict[str, float | Estimate] = {"llc": result}
        if result.wbic is not None:
            values["wbic"] = result.wbic
        gamma = math.nan if isinstance(result.localization, torch.Tensor) else result.localization
        at = {"llc_nbeta": result.nbeta, "llc_localization": gamma}
        return TrackerReading(values, result.cost, result.status, result, at)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        return self.chains, self.max_gradients

    def state_dict(self) -> dict[str, Any]:
        return {"known": dict(self._known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = dict(state["known"])


@register()
class VarianceTracker(SampledTracker):
    """The variance of an element of gradient, Hessian and Gauss–Newton matrix over samples
    (``lh.variance``).

    Columns ``variance_gradient``, ``variance_hessian`` and, for a model with a loss of its output,
    ``variance_ggn``. The cost counts passes over the sample, each of per-sample gradients or
    products.
    """

    name = "variance"
    columns = with_errors("variance_gradient", "variance_hessian", "variance_ggn")
    unit_of_cost = "gradients and products"

    def __init__(self, *, probes: int = 4, **common: Any) -> None:
        super().__init__(**common)
        cure = "the standard error comes from their spread"
        self.probes = require_count(probes, "probes", 2, cure=cure)

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        variances = variance(sample, self.probes, self.seed)
        values: dict[str, float | Estimate] = {
            "variance_gradient": variances.gradient_variance,
            "variance_hessian": variances.hessian_variance,
        }
        if variances.ggn_variance is not None:
            values["variance_ggn"] = variances.ggn_variance
        return TrackerReading(values, variances.cost, variances.status, variances)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        each = 1 if sample.loss_function is None else 2
        return (2 + min(self.probes, sample.num_parameters) * each,) * 2


@register()
class NormTracker(SampledTracker):
    """Columns ``norms_l2`` ‖θ‖₂, ``norms_linf`` ‖θ‖_∞ and ``norms_gradient`` ‖∇L‖₂."""

    name = "norms"
    columns = ("norms_l2", "norms_linf", "norms_gradient")
    unit_of_cost = "gradients"

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        theta, gradient = sample.vector.double(), sample.gradient().double()
        sizes = float(theta.norm()), float(theta.abs().max()), float(gradient.norm())
        return TrackerReading(dict(zip(self.columns, sizes, strict=True)), 1)

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        return 1, 1


@register()
class EffectiveRateTracker(SampledTracker):
    """α/‖w‖², the effective learning rate of scale-invariant weights, such as those before batch
    norm (§7.4, spectral thesis; Zhang et al. 2018).

    Column ``effective_rate``; for several parameter groups the largest of theirs, each with its own
    α and norm. It costs nothing.
    """

    name = "effective_rate"
    columns = ("effective_rate",)
    unit_of_cost = "gradients"

    def _read(self, sample: Problem, optimizer: Any) -> TrackerReading:
        base, rates = innermost(optimizer), []
        for group in base.param_groups:
            size = float(sum(weight.detach().double().square().sum() for weight in group["params"]))
            if size > 0:
                rates.append(learning_rate(base, group) / size)
        require(bool(rates), "optimizer", "hold parameters that are not all 0", "none")
        return TrackerReading({"effective_rate": max(rates)})

    def _bounds(self, sample: Problem) -> tuple[int, int]:
        return 0, 0
