"""How the steps that a chain of SGLD may take are dealt out to pilot, burn-in and draws."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lambdahat._check import require

STEPS = 4000  # of a chain at most, where nobody says; half of them as a rule
BURN_SHARE = 0.55
AFTER = 3  # the burn-in that follows the pilot is at least one part in so many of all
FEWEST_DRAWS = 8


@dataclass(frozen=True)
class Steps:
    """Of a chain: ``most`` it takes in all, ``burn_in``, draws in a ``round``, and what is left for the ``pilot``.

    ``given`` says that the burn-in was asked for: then it all comes after the pilot.
    """

    most: int
    burn_in: int
    round: int
    pilot: int
    given: bool

    @property
    def after_pilot(self) -> int:
        """The least burn-in that follows the pilot."""
        return self.burn_in if self.given else self.burn_in // AFTER


def dealt(chains: int, burn_in: int | None, draws: int | None, max_gradients: int | None, shortest_pilot: int) -> Steps:
    """The steps of a chain, with what was asked for; refused where ``max_gradients`` over all chains are too few."""
    if max_gradients is None:
        return _split(STEPS + (burn_in or 0), burn_in, draws, limited=False)
    found = _split(max_gradients // chains, burn_in, draws, limited=True)
    least = found
    while least.pilot < shortest_pilot:
        least = _split(least.most * 21 // 20 + 1, burn_in, draws, limited=True)
    require(least is found, "max_gradients", f"be at least {least.most * chains} for {chains} chains", max_gradients,
            "pilot, burn-in and draws all count")  # fmt: skip
    return found


def _split(most: int, burn_in: int | None, draws: int | None, limited: bool) -> Steps:
    """Half of the steps burn in and are drawn at first; what the least of both leaves, the pilot may take."""
    free = most - (burn_in or 0)
    usual = int(BURN_SHARE * free / 2)
    thrown, rest = usual if burn_in is None else burn_in, free // 2 - usual
    found = Steps(most, thrown, max(rest, FEWEST_DRAWS) if draws is None else draws, most, burn_in is not None)
    return replace(found, pilot=most - found.after_pilot - found.round) if limited else found
