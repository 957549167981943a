"""Verdicts on rows that are made up, so that claims are seen to hold and to fail."""

from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import FAILS, HOLDS, judge

SEEDS = 6
BOTH = [(True, HOLDS), (False, FAILS)]


SUBJECT = {"network": "MLP-9", "training": 1200, "data": "mnist"}


def verdicts_of(module, rows):
    """Verdict by claim, of rows of a perceptron, whose name leads the claims on networks and is
    left out here.
    """
    whole = Rows({**SUBJECT, **row} for row in rows)
    return {
        found.claim.removeprefix("MLP-9, 1,200 images of MNIST: "): found.verdict
        for found in judge(module.claims(whole))
    }


def jitter(seed, size=1e-3):
    """A little that differs from seed to seed, of mean near 0."""
    return size * ((seed * 37 % 11) / 5 - 1)
