"""The learning rules of Table 4.1 of the regularization thesis, with the rates of its Table 4.2."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lambdahat.optim.regularizers import (
    L2,
    READINGS,
    Metric,
    Rule,
    SelectiveL2,
    StoppedL2,
    StoppedThenSelectiveL2,
)

RULES = (
    "SGD Small",
    "SGD Large",
    "Metric Small",
    "Metric Large",
    "L2",
    "Selective L2",
    "L2 Stopped",
    "L2 Stopped Selective",
)
SMALL = ("SGD Small", "Metric Small")
SELECTIVE = ("Selective L2", "L2 Stopped Selective")
PLAIN = ("SGD Large", "Metric Large", "L2", "L2 Stopped")
LARGE = (*PLAIN, *SELECTIVE)
CURVED = ("Metric Small", "Metric Large", *SELECTIVE)  # one product Hθ a step
FLAT = ("SGD Small", "SGD Large", "L2", "L2 Stopped")
# Metric with the absolute Hessian: |H|θ in place of Hθ
ABSOLUTE = ("Metric |H| Small", "Metric |H| Large")
DROPOUT = "Dropout Large"
DROPPED = 0.2


@dataclass(frozen=True)
class Setting:
    """One column of Table 4.2; ``spread`` is its "init σ²", by regime."""

    rates: tuple[float, float]  # learning rates, small regime and large
    spread: tuple[float, float]
    metric: float
    l2: float
    selective: float
    tau: float  # epochs
    omega: float

    def rate(self, label: str) -> float:
        """The learning rate of a rule's regime."""
        return self.rates[regime_of(label) == "large"]

    def scaled(self, gain: float, stretch: float, share: float) -> Setting:
        """For another network or a shorter run: learning rates and Metric's by ``gain``, the others
        by ``stretch``.

        ``share`` of the epochs are run, so that τ falls at the same part of training. A selective
        rate stays at most ½, for a parameter that is not spared is then gone in a few steps either
        way.
        """
        small, large = self.rates
        return replace(
            self,
            rates=(gain * small, gain * large),
            metric=gain * self.metric,
            l2=stretch * self.l2,
            selective=min(stretch * self.selective, 0.5),
            tau=share * self.tau,
        )


def regime_of(label: str) -> str:
    """The initialisation regime that a rule starts from."""
    return "small" if label.endswith("Small") else "large"


def printed_as(label: str) -> str:
    """The rule of the thesis's tables that a label stands for: they have one Metric, in
    whichever reading.
    """
    return label.replace(" |H|", "")


def rule_of(
    label: str, setting: Setting, steps: int, layers: tuple[str, ...], depth: int = 20
) -> Rule | None:
    """A row of Table 4.1, with ``steps`` an epoch; None adds nothing.

    Terms are subtracted with rates of their own, θ ← θ − α∇L − λ·term(θ), as the table prints. |H|θ
    is found by ``depth`` Lanczos steps.
    """
    tau, kind = round(setting.tau * steps), label.removesuffix(" Small").removesuffix(" Large")
    if kind in ("Metric", "Metric |H|"):
        return Metric(setting.metric, reading=READINGS["|H|" in kind], depth=depth, decoupled=True)
    if kind == "L2":
        return L2(setting.l2, decoupled=True)
    if kind == "Selective L2":
        return SelectiveL2(setting.selective, setting.omega, layers=layers, decoupled=True)
    if kind == "L2 Stopped":
        return StoppedL2(setting.l2, tau, decoupled=True)
    if kind == "L2 Stopped Selective":
        return StoppedThenSelectiveL2(
            setting.l2, tau, setting.omega, setting.selective, layers=layers, decoupled=True
        )
    return None


SETTINGS = {
    ("xor", "tanh"): Setting((0.12, 0.0015), (0.03, 2.3), 0.008, 0.001, 0.1, 280, 0.1),
    ("xor", "relu"): Setting((0.12, 0.002), (0.03, 1.7), 1e-4, 0.001, 0.1, 280, 0.05),
    ("xord", "tanh"): Setting((0.02, 0.02), (0.4, 4.0), 1e-4, 1e-5, 0.001, 500, 0.01),
    ("xord", "relu"): Setting((0.05, 0.002), (0.2, 2.0), 0.001, 1e-4, 0.001, 500, 0.1),
    ("mnist", "tanh"): Setting((0.001, 0.001), (0.1, 2.0), 1e-4, 1e-5, 0.001, 280, 0.001),
    ("mnist", "relu"): Setting((0.001, 0.001), (0.1, 2.0), 1e-4, 1e-5, 1e-5, 280, 0.01),
    ("synthetic", "tanh"): Setting((2e-4, 1e-4), (0.05, 0.5), 5e-4, 1e-4, 0.1, 600, 5e-4),
    ("synthetic", "relu"): Setting((2e-4, 6e-5), (0.02, 0.2), 2e-6, 1e-5, 0.001, 600, 0.005),
    ("cifar10", "tanh"): Setting((0.005, 0.005), (0.2, 5.0), 1e-5, 1e-5, 5e-5, 490, 0.02),
    ("cifar10", "relu"): Setting((0.005, 0.005), (0.2, 5.0), 1e-5, 1e-5, 5e-5, 490, 0.02),
}
