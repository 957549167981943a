"""The learning rules of Table 4.1 of the regularization thesis, their rates (Table 4.2), and what
it prints of them (Tables 5.1 and 5.2).
"""

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
class RuleRates:
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

    def scale_rates(self, gain: float, stretch: float, share: float) -> RuleRates:
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
    """The rule of the thesis's tables that a label stands for: they have one Metric."""
    return label.replace(" |H|", "")


def rule_of(
    label: str, setting: RuleRates, steps: int, layers: tuple[str, ...], depth: int = 20
) -> Rule | None:
    """A row of Table 4.1, with ``steps`` an epoch; None adds nothing.

    Terms are subtracted with rates of their own, θ ← θ − α∇L − λ·term(θ), as the table prints. |H|θ
    is found by ``depth`` Lanczos steps.
    """
    tau, kind = round(setting.tau * steps), label.removesuffix(" Small").removesuffix(" Large")
    l2, selective, omega = setting.l2, setting.selective, setting.omega
    if kind in ("Metric", "Metric |H|"):
        return Metric(setting.metric, reading=READINGS["|H|" in kind], depth=depth, decoupled=True)
    if kind == "L2":
        return L2(l2, decoupled=True)
    if kind == "Selective L2":
        return SelectiveL2(selective, omega, layers=layers, decoupled=True)
    if kind == "L2 Stopped":
        return StoppedL2(l2, tau, decoupled=True)
    if kind == "L2 Stopped Selective":
        return StoppedThenSelectiveL2(l2, tau, omega, selective, layers=layers, decoupled=True)
    return None


SETTINGS = {
    ("xor", "tanh"): RuleRates((0.12, 0.0015), (0.03, 2.3), 0.008, 0.001, 0.1, 280, 0.1),
    ("xor", "relu"): RuleRates((0.12, 0.002), (0.03, 1.7), 1e-4, 0.001, 0.1, 280, 0.05),
    ("xord", "tanh"): RuleRates((0.02, 0.02), (0.4, 4.0), 1e-4, 1e-5, 0.001, 500, 0.01),
    ("xord", "relu"): RuleRates((0.05, 0.002), (0.2, 2.0), 0.001, 1e-4, 0.001, 500, 0.1),
    ("mnist", "tanh"): RuleRates((0.001, 0.001), (0.1, 2.0), 1e-4, 1e-5, 0.001, 280, 0.001),
    ("mnist", "relu"): RuleRates((0.001, 0.001), (0.1, 2.0), 1e-4, 1e-5, 1e-5, 280, 0.01),
    ("synthetic", "tanh"): RuleRates((2e-4, 1e-4), (0.05, 0.5), 5e-4, 1e-4, 0.1, 600, 5e-4),
    ("synthetic", "relu"): RuleRates((2e-4, 6e-5), (0.02, 0.2), 2e-6, 1e-5, 0.001, 600, 0.005),
    ("cifar10", "tanh"): RuleRates((0.005, 0.005), (0.2, 5.0), 1e-5, 1e-5, 5e-5, 490, 0.02),
    ("cifar10", "relu"): RuleRates((0.005, 0.005), (0.2, 5.0), 1e-5, 1e-5, 5e-5, 490, 0.02),
}


ACCURACY, TEST_ACCURACY = "training accuracy", "test accuracy"
TRAIN, TEST, NORM = "training error", "test error", "norm"
# how fast a rule trains: read off the curve of the other
EARLY = {"early training accuracy": ACCURACY, "early training error": TRAIN}


# data set and activation | quantity | mean, in the order of RULES
_PRINTED = """
    xor tanh | training accuracy | 1 1 1 1 1 0.975 1 1
    xor tanh | norm | 7.18 27.08 6.83 24.12 18.44 16.41 20.7 15.23
    xor relu | training accuracy | 1 1 1 0.95 1 1 1 1
    xor relu | norm | 5 24.49 4.84 22.16 16.77 14.85 18.8 12.63
    xord tanh | training error | 0.74 0.0001 1.675 0.0004 1 0.75 0.0025 0.62
    xord tanh | test error | 17.64 60.8 16.9 43.36 73.3 19.31 78.53 28.33
    xord tanh | norm | 12.18 90.88 11.59 95.05 92.41 34.61 89.72 47.09
    xord relu | training error | 0 17.87 0.2 38.65 21.28 22.3 19.26 22.79
    xord relu | test error | 6.6 8.56 5.5 10.32 8.3 8.8 8.37 8.54
    xord relu | norm | 8.35 31.89 7.3 25.53 21.52 18.39 26.21 16.49
    mnist tanh | training accuracy | 0.995 0.96 0.976 0.724 0.937 0.968 0.992 0.968
    mnist tanh | test accuracy | 0.97 0.703 0.96 0.706 0.934 0.96 0.949 0.959
    mnist tanh | norm | 209.89 4170.87 187.21 3041.36 98.82 101.9 301.89 124.78
    mnist relu | training accuracy | 0.998 1 0.96 0.99 0.95 0.99 1 1
    mnist relu | test accuracy | 0.97 0.95 0.96 0.92 0.95 0.95 0.96 0.96
    mnist relu | norm | 209.39 4160.49 181.96 3706.94 98.86 377.67 301.13 212.54
    synthetic tanh | training error | 0.107 0.252 27.57 27.56 17.41 0.189 8.46 11.36
    synthetic tanh | test error | 15.22 48.64 29.09 29.09 22.67 17.68 15.23 16.59
    synthetic tanh | norm | 23.49 146.22 12.46 110.02 5.38 29.69 15.91 11.24
    synthetic relu | training error | 0 0.002 22.58 6.06 0.42 1.41 0.02 1.42
    synthetic relu | test error | 23.41 34.09 24.31 30.58 24.83 23.6 27.88 23.75
    synthetic relu | norm | 16.99 60.29 20.36 41.57 26.17 21.6 36 20.75
    cifar10 tanh | training accuracy | 1 1 1 1 1 0.9375 1 0.859
    cifar10 tanh | test accuracy | 0.673 0.6 0.6751 0.6 0.658 0.66 0.675 0.62
    cifar10 tanh | norm | 71.35 172.3 71.23 171.53 42.79 59.59 52.79 50.13
    cifar10 relu | training accuracy | 1 0.9 1 1 0.99 0.97 1 0.97
    cifar10 relu | test accuracy | 0.66 0.49 0.65 0.54 0.62 0.63 0.62 0.62
    cifar10 relu | norm | 65.96 169.67 66.38 178.02 40.03 55.41 50.47 48.75
"""


def _read_printed() -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """The printed means by data set and activation, rule and quantity."""
    printed: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for line in _PRINTED.strip().splitlines():
        place, quantity, means = line.split(" | ")
        task, activation = place.split()
        table = printed.setdefault((task, activation), {rule: {} for rule in RULES})
        for rule, mean in zip(RULES, means.split(), strict=True):
            table[rule][quantity] = float(mean)
    return printed


PUBLISHED = _read_printed()


def quantities_of(task: str) -> tuple[str, ...]:
    """The quantities that the thesis prints for a data set."""
    return tuple(next(iter(PUBLISHED[task, "tanh"].values())))


def score_of(task: str) -> tuple[str, int]:
    """The quantity that says how well a network generalises, and 1 if more is better, else −1."""
    names = quantities_of(task)
    if TEST_ACCURACY in names:
        return TEST_ACCURACY, 1
    return (TEST, -1) if TEST in names else (ACCURACY, 1)
