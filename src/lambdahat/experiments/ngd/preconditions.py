"""When runs are not what the NGD paper's claims are about: solutions, which have learnt and are
minima.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import mean_of

CLASSES = 10  # of all data sets here
CHANCE = math.log(CLASSES)  # the loss of guessing
LEARNT = CHANCE / 2
INTERPOLATED = CHANCE / 100
RULE = (
    "A claim is not testable where half or more of the runs of a setting it compares have a"
    f" training loss above {LEARNT:.2f}, half of chance's ln 10, or, for λ̂, are NOT_A_MINIMUM: the"
    " paper speaks of solutions."
)


def unmet(groups: Mapping[str, Rows], column: str = "") -> str:
    """Why a claim about solutions cannot be read off these groups of runs (RULE); empty where it
    can.

    ``column`` is the quantity compared; of "llc" and "llc_batch" the points must be minima.
    """
    reasons = []
    for name, rows in groups.items():
        losses = rows.values("loss")
        high = sum(not loss <= LEARNT for loss in losses)
        if losses and 2 * high >= len(losses):
            mean = mean_of(losses).value
            reasons.append(f"{name} has not learnt (training loss {mean:.2f}, chance {CHANCE:.2f})")
        flags = rows.values(flag_of(column)) if column.startswith("llc") else []
        if flags and 2 * sum(flags) >= len(flags):
            reasons.append(f"{name} is NOT_A_MINIMUM in {sum(flags)} of {len(flags)}")
    return "; ".join(reasons)


def flag_of(column: str) -> str:
    """The column that says NOT_A_MINIMUM of a λ̂."""
    return column.replace("llc", "below_centre")
