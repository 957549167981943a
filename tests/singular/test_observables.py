"""Part of the data: problems on some samples, and the losses of single samples along a chain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lambdahat.sampling import hmc, sample
from lambdahat.singular.observables import sample_losses
from tests.cases import classifier
from tests.singular.regression import regression

KNOWN = regression(12, 2)


@pytest.mark.parametrize(
    "indices", [[7, 2, 11], torch.tensor([2, 7, 11]), range(2, 12, 4), np.array([11, 2])]
)
def test_a_subset_is_the_problem_on_those_samples(indices):
    chosen = sorted(int(i) for i in indices)
    part = KNOWN.problem.subset(indices)
    whole = KNOWN.problem.on((KNOWN.x[chosen], KNOWN.y[chosen]))
    assert part.num_samples == len(chosen)
    assert part.loss() == pytest.approx(whole.loss(), rel=1e-14)
    assert torch.allclose(part.gradient(), whole.gradient())


def test_a_mask_is_as_good_as_numbers():
    mask = KNOWN.x[:, 0] > 0
    problem = classifier(samples=12, batch_size=5)
    assert problem.subset(mask).loss() == problem.subset(mask.nonzero().flatten()).loss()
    assert problem.subset(mask, batch_size=2).batches.sizes[0] == 2


def test_a_chain_on_a_subset_samples_the_loss_of_the_subset():
    """The posterior of the part: λ̂ of least squares at its own minimum is ½ tr[XᵀX(XᵀX + γ)⁻¹]."""
    part = KNOWN.problem.subset(range(6))
    x, y = KNOWN.x[:6], KNOWN.y[:6]
    own = part.at(torch.linalg.lstsq(x, y).solution)
    chains = sample(own, hmc(0.05, 6.0, 1.0, leapfrog=3), 4, 200, burn_in=20)
    curvature = x.T @ x
    wanted = 0.5 * float(torch.trace(curvature @ torch.linalg.inv(curvature + torch.eye(2))))
    error = chains.energies.std() / np.sqrt(chains.diagnostics.ess_mean)
    assert abs(chains.energies.mean() - wanted) < 4 * error < 0.5
    assert chains.num_samples == 6


def test_losses_of_single_samples_along_a_chain():
    watch = {"some": sample_losses(KNOWN.problem, [5, 1]), "all": sample_losses(KNOWN.problem)}
    chains = sample(
        KNOWN.problem, hmc(0.02, 12.0, 1.0), 2, 6, observables=watch, keep_parameters=True
    )
    assert chains.observables["some"].shape == (2, 6, 2)
    assert chains.observables["all"].shape == (2, 6, 12)
    assert np.array_equal(chains.observables["some"], chains.observables["all"][:, :, [1, 5]])
    assert chains.observables["all"].mean(axis=2) == pytest.approx(chains.losses)
    residual = KNOWN.y[1] - KNOWN.x[1] @ chains.parameters[1, 3]
    wanted = 0.5 * float(residual) ** 2 + 0.5 * np.log(2 * np.pi)
    assert chains.observables["some"][1, 3, 0] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ([], "indices must be some integers"),
        ([0.5], "indices must be some integers"),
        ("abc", "indices must be some integers"),
        ([[1]], "indices must be some integers"),
        ([12], r"indices must lie in \[0, 11\], got 12 … 12"),
        ([-1, 3], r"indices must lie in \[0, 11\], got -1 … 3"),
        (
            torch.zeros(12, dtype=torch.bool),
            "indices must be some integers, or a mask with a True in it",
        ),
        (torch.ones(5, dtype=torch.bool), "indices must be a mask of 12 entries"),
    ],
)
def test_bad_indices_are_refused_by_name(indices, match):
    with pytest.raises(ValueError, match=match):
        KNOWN.problem.subset(indices)
