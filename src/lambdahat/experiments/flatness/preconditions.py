"""What claims of the flatness paper and of the thesis's chapters 4 and 6 need of a run, and what
it was a run of.
"""

from __future__ import annotations

import math

from lambdahat.experiments.kit import Rows
from lambdahat.experiments.kit.experiment import SETS

NEGLIGIBLE = 0.1  # of a printed change: a smaller one is none
LEAST_EFFECT = (
    "Where two values are printed, a change counts from a tenth of the printed one on: set after"
    " the runs, for all such claims alike."
)


def subject(rows: Rows) -> str:
    """The network and its data, which often stand in for the paper's: "LeNet-5, 1,000 images of
    CIFAR-10".
    """
    row = rows[0]
    return f"{row['network']}, {row['training']:,} images of {SETS[row['data']]}"


def saturated(*parts: Rows) -> str:
    """Why training errors cannot be compared, nor what falls with them: all runs of all parts
    have none.
    """
    found = [value for rows in parts for value in rows.values("training error")]
    found += [100 - value for rows in parts for value in rows.values("training accuracy")]
    return "every run fits all of its training images" if found and max(found) == 0 else ""


def least(low: float, high: float) -> float:
    """The least change that counts where the paper prints these two, with its sign."""
    return NEGLIGIBLE * (high - low)


def least_decades(low: float, high: float) -> float:
    """The same in decades."""
    return NEGLIGIBLE * math.log10(high / low)
