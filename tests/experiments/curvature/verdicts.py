"""Verdicts on rows that are made up, so that claims are seen to hold and to fail."""

from lambdahat.experiments.claims import judge
from lambdahat.experiments.experiment import Rows
from lambdahat.experiments.reproduction import FAILS, HOLDS

SEEDS = 6
BOTH = [(True, HOLDS), (False, FAILS)]


def verdicts_of(module, rows):
    """Verdict by claim."""
    return {verdict.claim: verdict.verdict for verdict in judge(module.claims(Rows(rows)))}


def jitter(seed, size=1e-3):
    """A little that differs from seed to seed, of mean near 0."""
    return size * ((seed * 37 % 11) / 5 - 1)
