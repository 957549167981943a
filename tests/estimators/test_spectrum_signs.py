"""What a spectrum says of signs and ends is no more than its products hold."""

import numpy as np
import pytest
import torch

from lambdahat.estimators import spectrum
from lambdahat.operators import operator
from lambdahat.results import Spectrum


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_an_unresolved_cluster_at_zero_has_no_sign(sign):
    nodes, residuals = np.array([[-2.0, sign * 1e-5, 3.0]]), np.array([[0.0, 1e-3, 0.0]])
    found = Spectrum(nodes, np.array([[0.1, 0.8, 0.1]]), residuals, dim=100)
    assert float(found.negative_mass) == pytest.approx(0.1)


def test_resolved_nodes_count_however_near_zero():
    nodes = np.array([[-2.0, -1e-5, 3.0]])
    found = Spectrum(nodes, np.array([[0.1, 0.8, 0.1]]), np.zeros((1, 3)), dim=100)
    assert float(found.negative_mass) == pytest.approx(0.9)


def test_negative_mass_does_not_jump_with_the_depth():
    """The standard error is of the probes: what a finite depth misses of a step function, here
    0.03, comes on top.
    """
    rng = np.random.default_rng(0)
    values = np.concatenate(
        [-rng.uniform(0.05, 0.5, 60), 1e-6 * rng.normal(size=840), rng.uniform(0.05, 5, 100)]
    )
    matrix = operator(torch.diag(torch.as_tensor(values)))
    for depth in (20, 21, 30, 31):
        found = spectrum(matrix, depth, probes=4)
        assert float(found.negative_mass) == pytest.approx(0.06, abs=0.03)


def test_ends_are_not_known_better_than_the_dtype():
    matrix = torch.diag(torch.linspace(-1, 4, 300, dtype=torch.float32))
    low, high = spectrum(operator(matrix), 120).extremes
    assert min(low.stderr, high.stderr) > torch.finfo(torch.float32).eps
    assert abs(float(high) - 4.0) <= high.stderr
