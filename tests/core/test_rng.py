"""One stream of randomness for each (seed, name), and nothing else touched."""

import numpy as np
import pytest
import torch

from lambdahat._core.rng import generator


def draw(*key):
    return torch.randn(4000, generator=generator(*key), dtype=torch.float64)


def test_the_same_key_gives_the_same_stream():
    assert torch.equal(draw(3, "trace", 1), draw(3, "trace", 1))
    assert torch.equal(draw(3, "trace"), draw(np.int64(3), "trace"))


@pytest.mark.parametrize(
    "other", [(4, "a", 0), (3, "b", 0), (3, "a", 1), (3, "a"), (30, "a"), (3, "a0")]
)
def test_different_keys_are_uncorrelated(other):
    first, second = draw(3, "a", 0), draw(*other)
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) < 4 / 4000**0.5  # four standard errors


def test_neighbouring_seeds_do_not_overlap():
    """``seed + i`` would make the second draw of seed 0 the first of seed 1."""
    streams = [set(draw(seed, "x").tolist()) for seed in range(5)]
    assert len(set().union(*streams)) == 5 * 4000


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    draw(0, "x")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError), ("0", TypeError)]
)
def test_seeds_are_counts(seed, error):
    with pytest.raises(error, match="seed must be an integer of at least 0"):
        generator(seed, "x")


def test_huge_seeds_work():
    assert not torch.equal(draw(2**70, "x"), draw(2**70 + 1, "x"))
