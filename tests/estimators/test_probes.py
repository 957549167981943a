from __future__ import annotations

import pytest
import torch

from lambdahat.estimators.probes import KINDS, Probes, column_dots, probes_for, unit_blocks
from lambdahat.operators import Identity

SIZE = 37


def stream(
    kind: str, seed: int = 0, name: str = "test", dtype: torch.dtype = torch.float64
) -> Probes:
    return Probes(Identity(SIZE, dtype), kind, seed, name)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_do_not_depend_on_how_the_stream_is_cut(kind: str) -> None:
    whole, parts = stream(kind), stream(kind)
    assert torch.equal(
        whole.draw(7), torch.cat([parts.draw(2), parts.draw(0), parts.draw(5)], dim=1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_streams_differ_by_seed_and_name_but_not_by_dtype(kind: str) -> None:
    first = stream(kind).draw(3)
    assert not torch.equal(first, stream(kind, seed=1).draw(3))
    assert not torch.equal(first, stream(kind, name="other").draw(3))
    torch.testing.assert_close(
        stream(kind, dtype=torch.float32).draw(3).double(), first, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_covariance_is_the_identity(kind: str) -> None:
    count = 4_000
    block = stream(kind).draw(count)
    # The entries of the sample covariance have standard errors of at most √(2/n), and there are 37²
    # of them.
    assert float((block @ block.T / count - torch.eye(SIZE)).abs().max()) < 5 * (2 / count) ** 0.5
    assert float(block.mean(dim=1).abs().max()) < 5 / count**0.5


def test_lengths() -> None:
    assert bool((stream("rademacher").draw(4).abs() == 1).all())
    torch.testing.assert_close(
        stream("sphere").draw(4).square().sum(dim=0), torch.full((4,), 37.0, dtype=torch.float64)
    )


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ValueError, match="probe must be one of 'rademacher', 'gaussian', 'sphere', got 'uniform'"
    ):
        stream("uniform")


def test_unit_blocks_make_the_identity() -> None:
    operator = Identity(150, torch.float64)
    blocks = [block for _, block in unit_blocks(operator)]
    assert len(blocks) > 1
    assert torch.equal(torch.cat(blocks, dim=1), torch.eye(150, dtype=torch.float64))


def test_dots_add_up_in_float64() -> None:
    ones = torch.full((2**20, 1), 1.1, dtype=torch.float32)
    exact = float(torch.tensor(1.1, dtype=torch.float32).double() * 2**20)
    assert float(column_dots(ones, torch.ones_like(ones))) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_probes_for_a_relative_error_suffice_and_fall_with_the_condition(kind: str) -> None:
    """Eq. 2.34 against the exact variance of uᵀAu for diagonal A: (m₄ − 1)·tr A², m₄ = 1 or 3."""
    for condition in (1.0, 3.0, 30.0):
        values = torch.linspace(1.0, condition, 200, dtype=torch.float64)
        count = probes_for(0.01, 200, kind, condition)
        variance = (0.0 if kind == "rademacher" else 2.0) * float(values.square().sum()) / count
        assert variance**0.5 <= 0.01 * float(values.sum())
    counts = [
        probes_for(0.01, 200, kind, condition) for condition in (1.0, 3.0, 30.0, float("inf"))
    ]
    assert counts == sorted(counts)
    most = (3 if kind == "rademacher" else 5) * 10_000
    assert counts[-1] == most
    assert counts[0] == -(-most // 200)


def test_a_condition_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="condition must be at least 1"):
        probes_for(0.1, 10, condition=0.5)
