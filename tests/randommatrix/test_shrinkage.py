"""Damping as shrinkage, and the shrinkage of least error against simulated batches."""

import math

import numpy as np
import pytest
import torch

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.randommatrix import (
    LinearShrinkage,
    damping_as_shrinkage,
    linear_shrinkage,
    shrinkage_as_damping,
)
from lambdahat.results import Estimate, Spectrum
from tests.cases import classifier


@pytest.mark.parametrize("target", [1.0, 0.02])
@pytest.mark.parametrize("damping", [0.0, 1e-4, 3.0])
def test_equation_6_5_and_back(damping, target):
    kappa, beta = damping_as_shrinkage(damping, target)
    curvatures = np.array([0.0, 0.5, 7.0])
    np.testing.assert_allclose(
        kappa * (beta * curvatures + (1 - beta) * target), curvatures + damping
    )
    assert shrinkage_as_damping(beta, target) == pytest.approx(damping, abs=1e-15)


def test_at_target_one_it_is_the_thesis():
    assert damping_as_shrinkage(0.5) == (1.5, 1 / 1.5)


def population(samples=40, size=6):
    """Curvatures H_i (N, P, P) of samples, of rank two each."""
    factors = torch.randn(
        samples, size, 2, generator=generator(0, "population"), dtype=torch.float64
    )
    factors = factors * torch.linspace(0.3, 2, size, dtype=torch.float64)[:, None]
    return factors @ factors.mT


def exact_spectrum(matrix):
    """The eigenvalues themselves, each of weight 1/P."""
    values = torch.linalg.eigvalsh(matrix).numpy()[None]
    return Spectrum(
        values, np.full_like(values, 1 / values.size), np.zeros_like(values), values.size
    )


def test_it_has_the_least_error_over_batches():
    samples, size = 40, 6
    each, batch = population(samples, size), 8
    mean = each.mean(0)
    element = float(((each - mean) ** 2).mean())
    found = linear_shrinkage(exact_spectrum(mean), element, batch, samples)
    target = float(mean.trace()) / size * torch.eye(size, dtype=torch.float64)
    rng = generator(1, "batches")
    draws = torch.stack(
        [each[torch.randperm(samples, generator=rng)[:batch]].mean(0) for _ in range(20_000)]
    )
    noise, signal = (
        float(((draws - mean) ** 2).sum((1, 2)).mean()),
        float(((mean - target) ** 2).sum()),
    )
    best = -float(
        ((draws - target) * (target - mean)).sum((1, 2)).mean()
        / ((draws - target) ** 2).sum((1, 2)).mean()
    )
    assert float(found.noise) == pytest.approx(noise * (samples - 1) / samples, rel=0.02)
    assert float(found.signal) == pytest.approx(signal)
    assert float(found.beta) == pytest.approx(best, rel=0.03)
    assert 0.1 < best < 0.9

    def error(beta):
        return float(((beta * draws + (1 - beta) * target - mean) ** 2).sum((1, 2)).mean())

    assert error(float(found.beta)) < min(
        error(1.0), error(0.0), error(best + 0.1), error(best - 0.1)
    )
    assert float(found.damping) == pytest.approx(
        shrinkage_as_damping(float(found.beta), float(found.target))
    )


def test_the_whole_population_needs_no_shrinkage():
    found = linear_shrinkage(exact_spectrum(population().mean(0)), 1.0, 40, 40)
    assert float(found.beta) == 1.0
    assert float(found.damping) == 0.0


def test_small_batches_are_trusted_less():
    spectrum = exact_spectrum(population().mean(0))
    betas = [float(linear_shrinkage(spectrum, 0.5, batch).beta) for batch in (1, 10, 100, 10_000)]
    assert betas == sorted(betas)
    assert betas[-1] > 0.99


def test_errors_come_from_spectrum_and_variance():
    problem = classifier((4, 8, 3), samples=60)
    spectrum, spread = lh.spectrum(lh.ggn(problem), probes=3), lh.variance(problem, probes=4)
    found = linear_shrinkage(spectrum, spread.ggn_variance, 10, problem.num_samples)
    ratio = float(found.noise) / float(found.signal)
    relative = math.hypot(
        *(float(part.stderr) / float(part) for part in (found.noise, found.signal))
    )
    assert float(found.beta) == pytest.approx(1 / (1 + ratio))
    assert float(found.beta.stderr) == pytest.approx(ratio * relative / (1 + ratio) ** 2, rel=0.05)
    fixed = linear_shrinkage(
        spectrum, Estimate(float(spread.ggn_variance)), 10, problem.num_samples
    )
    assert 0 < float(fixed.beta.stderr) < float(found.beta.stderr)


def test_a_negative_trace_has_no_damping():
    found = linear_shrinkage(exact_spectrum(-population().mean(0)), 1.0, 4)
    assert math.isnan(float(found.damping))
    assert 0 < float(found.beta) < 1


def test_it_is_saved_and_loaded(tmp_path):
    found = linear_shrinkage(exact_spectrum(population().mean(0)), 1.0, 4)
    assert LinearShrinkage.load(found.save(tmp_path / "shrinkage")) == found


SPECTRUM = exact_spectrum(population(size=3).mean(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: damping_as_shrinkage(-1.0),
            ValueError,
            "damping must be a finite number of at least 0, got -1.0",
        ),
        (
            lambda: damping_as_shrinkage(1.0, 0.0),
            ValueError,
            "target must be a finite number above 0",
        ),
        (lambda: shrinkage_as_damping(0.0), ValueError, r"beta must lie in \(0, 1\]"),
        (
            lambda: linear_shrinkage(SPECTRUM.nodes, 1.0, 4),
            TypeError,
            "spectrum must be a Spectrum.*lh.spectrum",
        ),
        (
            lambda: linear_shrinkage(SPECTRUM, -1.0, 4),
            ValueError,
            "variance must be a finite number of at least 0",
        ),
        (
            lambda: linear_shrinkage(SPECTRUM, 1.0, 9, 4),
            ValueError,
            "batch_size must be at most the population, 4",
        ),
        (
            lambda: linear_shrinkage(exact_spectrum(torch.eye(3).double()), 1.0, 4),
            ValueError,
            "have some spread",
        ),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
