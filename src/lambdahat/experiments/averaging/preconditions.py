"""What must be so of a run before a claim about it can be judged: rules on its rows that do not
look at the outcome.

Each gives the reason why a claim cannot be tested here, or "". The thresholds were set after the
first runs at the scale ``cpu``; none depends on which side a comparison came out on.
"""

from __future__ import annotations

from lambdahat.experiments.kit.cells import Rows, over_seeds
from lambdahat.experiments.kit.claims import paired_difference

CHANCE = {"imagenet32": 0.1, "imagenet": 0.1}  # per cent; the other sets have ten classes
TEN_CLASSES = 10.0
LEARNT = 2.0  # times chance
FULL = 99.5  # per cent held out, beyond which nothing is left to gain
SETTLED = 1.0  # points that the iterates may still gain while they are averaged


def unready(*parts: Rows) -> str:
    """Why runs cannot be compared by their accuracy; each part has the ends of one setting."""
    return unlearnt(*parts) or saturated(*parts) or unsettled(*parts)


def unlearnt(*parts: Rows) -> str:
    """A run whose held-out accuracy is less than twice that of a guess."""
    for part in parts:
        accuracy = over_seeds(part, "accuracy").value
        chance = CHANCE.get(part[0].get("data", ""), TEN_CLASSES) if len(part) else TEN_CLASSES
        if accuracy < LEARNT * chance:
            return (
                f"{name_of(part)} learnt nothing, {accuracy:.1f} % held out where a guess has"
                f" {chance:g} %"
            )
    return ""


def saturated(*parts: Rows) -> str:
    """All runs at the top: no order is left among them."""
    values = [over_seeds(part, "accuracy").value for part in parts]
    if values and all(value >= FULL for value in values):
        return f"all have at least {FULL:g} % held out"
    return ""


def unsettled(*parts: Rows) -> str:
    """Averages that began while the iterates still improved, where the thesis lets them begin once
    "the validation statistics stop improving and iterates oscillate around the minimum" (§7.5.6).
    """
    for part in parts:
        kept = part.where(averaged=True)
        rise = paired_difference(kept.paired("iterate accuracy"), kept.paired("before")).value
        if rise > SETTLED:
            return (
                f"averages of {name_of(part)} begin too soon, its iterates gain {rise:.1f} points"
                " more"
            )
    return ""


def name_of(part: Rows) -> str:
    """The setting of a part, by whichever column tells it."""
    row = part[0] if len(part) else {}
    return str(row.get("run") or row.get("name") or row.get("optimizer") or "the run")
