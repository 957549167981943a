"""KFAC's running moments, their inverses and the norm of its steps, against their definitions in
float64.
"""

import math

import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.optim.descent import total_norm
from lambdahat.optim.kronecker_layers import average, refresh


def drawn(*shape, name):
    return torch.randn(*shape, generator=generator(0, "test blocks", name), dtype=torch.float64)


def moment(order, name):
    rows = drawn(2, order // 2, order, name=name)  # singular without damping, in two groups
    return rows.mT @ rows / order


def test_the_running_moment_is_the_weighted_sum_of_its_batches():
    decay, factor, state = 0.8, 1 / 7, {}
    totals = [moment(6, k) for k in range(9)]
    kept = [total.clone() for total in totals]
    for number, total in enumerate(totals):
        average(state, {"A": total, "G": 2 * total}, {"A": factor, "G": 3 * factor}, decay)
        if number == 4:  # the count goes on, the moment stays
            average(
                state,
                {"A": math.nan * total, "G": math.inf * total},
                {"A": factor, "G": 1.0},
                decay,
            )
    expected, count = torch.zeros(2, 6, 6, dtype=torch.float64), 0
    for number, total in enumerate(kept):
        count += 2 if number == 5 else 1
        weight = 1 - min(1 - 1 / count, decay)
        expected += weight * (factor * total - expected)
    torch.testing.assert_close(state["A"], expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(state["G"], 6 * expected, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(totals, kept, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_inverse_is_that_of_the_damped_moment_which_stays(dtype):
    A, G = moment(12, "A"), moment(8, "G")
    state = {"A": A.to(dtype), "G": G.to(dtype)}
    refresh(state, 0.04, None, False, "layer")
    pi = (A.diagonal(dim1=1, dim2=2).mean(-1) / G.diagonal(dim1=1, dim2=2).mean(-1)).sqrt()[
        :, None, None
    ]
    rtol = 1e-12 if dtype == torch.float64 else 1e-4
    for side, raw, shift in (("A", A, 0.2 * pi), ("G", G, 0.2 / pi)):
        exact = torch.linalg.inv(raw + shift * torch.eye(raw.shape[-1], dtype=torch.float64))
        torch.testing.assert_close(state[f"{side}_inverse"].double(), exact, rtol=rtol, atol=rtol)
        assert torch.equal(state[side], raw.to(dtype))
        assert torch.equal(state[f"{side}_inverse"], state[f"{side}_inverse"].mT)


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float32] * 3,
        [torch.float64] * 3,
        [torch.float32, torch.float64],
        [torch.bfloat16, torch.float32],
        [],
    ],
    ids=str,
)
def test_the_norm_of_several_tensors_is_that_of_all_their_entries(dtypes):
    tensors = [drawn(5, 4, name=k).to(dtype)[:, : 4 - k] for k, dtype in enumerate(dtypes)]
    exact = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    coarse = torch.bfloat16 in dtypes
    assert float(total_norm(tensors)) == pytest.approx(exact, rel=1e-2 if coarse else 1e-6)
