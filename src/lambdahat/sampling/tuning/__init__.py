"""Tuning: what a caller fixed of a run, and the chains that come of it."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat._core.check import describe, require, require_choice, require_count, require_positive
from lambdahat.results import Array, Chains
from lambdahat.sampling._sample import Watch
from lambdahat.sampling.diagnostics import ChainReading
from lambdahat.sampling.kernels import KERNELS, Kernel, Localization

TOL = 0.03, 1.0  # standard error to draw for, of a value that counts as no less than the second
LEAST_EFFORT = 0.25  # of those rounds and effective draws, where the tolerance is loose


@dataclass(frozen=True)
class Drawn:
    """Chains and λ̂ read off them; ``spent`` says that the gradients ran out before the tolerance
    was reached.

    ``full`` is λ̂ from the losses over the whole data beside the paired one, where both were asked
    for, and ``ties`` Σγ_i(w_i − w*_i)² of the draws, (chains, draws), where γ differs between
    parameters.
    """

    chains: Chains
    reading: ChainReading
    spent: bool = False
    full: ChainReading | None = None
    ties: Array | None = None


@dataclass(frozen=True)
class SamplingRequest:
    """The settings that a caller gave; those that are None are found by a pilot."""

    nbeta: float
    chains: int = 4
    draws: int | None = None
    burn_in: int | None = None
    localization: Localization | None = None
    step_size: float | None = None
    kernel: str | Kernel | None = None
    tol: float | None = None
    max_gradients: int | None = None
    mode: str = "auto"
    watch: Watch | None = None
    baseline: str = "paired"

    def __post_init__(self) -> None:
        require_count(self.chains, "chains")
        require_choice(self.baseline, "baseline", ("paired", "full", "both"))
        for name, least in (("draws", 8), ("burn_in", 0), ("max_gradients", 100)):
            if getattr(self, name) is not None:
                require_count(getattr(self, name), name, least)
        if self.step_size is not None:
            number = isinstance(self.step_size, int | float) and not isinstance(
                self.step_size, bool
            )
            require(
                number and self.step_size >= 0,
                "step_size",
                "be a number of at least 0",
                describe(self.step_size),
            )
        if self.tol is not None:
            require_positive(self.tol, "tol")
        names = sorted(KERNELS, key=lambda name: name != "kinetic")  # the default first
        if isinstance(self.kernel, str):
            require_choice(self.kernel, "kernel", names)
        elif self.kernel is not None:
            require(
                isinstance(self.kernel, Kernel),
                "kernel",
                f"be one of {', '.join(names)}, or a kernel",
                self.kernel,
                "",
                TypeError,
            )
            others = {"step_size": self.step_size, "localization": self.localization}
            given = ", ".join(name for name, value in others.items() if value is not None)
            require(
                not given,
                "kernel",
                "be a name where the settings are given apart",
                f"a kernel and {given}",
                "set them in the kernel",
            )

    def reached(self, reading: ChainReading) -> bool:
        """Whether the standard error is within the tolerance."""
        if self.tol is not None:
            return reading.stderr <= self.tol * abs(reading.value)
        return reading.stderr <= TOL[0] * max(abs(reading.value), TOL[1])

    @property
    def effort(self) -> float:
        """The share of the usual draws before a standard error is trusted: less for a loose
        tolerance.
        """
        return 1.0 if self.tol is None else min(max(TOL[0] / self.tol, LEAST_EFFORT), 1.0)

    @property
    def goal(self) -> str:
        """The tolerance in words."""
        return (
            f"until the standard error is {TOL[0] if self.tol is None else self.tol:.3g} of the"
            " value"
        )

    def missed(self, reading: ChainReading) -> bool:
        """Whether the standard error is beyond the tolerance, where draws were to be taken until
        it is not.
        """
        return self.draws is None and not self.reached(reading)
