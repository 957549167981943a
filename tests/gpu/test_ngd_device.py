"""NGD on a GPU: steps replayed from CUDA graphs, by products alone, are those of the CPU's
eigenvectors.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.optim import NGD
from lambdahat.training import fit_many
from tests.gpu.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = [12, 16, 16, 5]


def batches(count: int, dtype: torch.dtype = torch.float64):
    rng = generator(0, "ngd device")
    for _ in range(count):
        x = torch.randn(20, SIZES[0], generator=rng, dtype=torch.float64)
        yield x.to(dtype), torch.randint(0, SIZES[-1], (20,), generator=rng)


def train(model, optimizer, data, schedule=None):
    device = next(model.parameters()).device
    for x, y in data:
        optimizer.zero_grad()
        cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def close(first, second, tol):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=tol, atol=tol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.1, "momentum": 0.9},
        {"weight_decay": 0.05, "rescale": False},
        {"weight_decay": 0.05, "decoupled": True, "momentum": 0.5, "period": 2},
    ],
    ids=str,
)
def test_replayed_steps_are_those_of_the_cpu(options):
    models = [mlp(SIZES).double() for _ in range(2)]
    models[1].cuda()
    for model in models:
        optimizer = NGD(model.parameters(), lr=0.1, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        train(model, optimizer, batches(30), schedule)
    close(*models, 1e-6)
    assert float(optimizer.update_norm) > 0


def test_float32_keeps_to_float64():
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = mlp(SIZES).to("cuda", dtype)
        train(model, NGD(model.parameters(), lr=0.1), batches(30, dtype))
        found[dtype] = model
    close(found[torch.float32].double(), found[torch.float64], 1e-3)


def test_no_step_waits_for_the_device():
    model = mlp(SIZES).cuda()
    optimizer = NGD(model.parameters(), lr=0.1, momentum=0.9)
    data = [(x.cuda(), y.cuda()) for x, y in batches(24, torch.float32)]
    train(model, optimizer, data)
    with no_waiting():
        train(model, optimizer, data)


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_state_moves_between_devices(first, then):
    model = mlp(SIZES).double().to(first)
    optimizer = NGD(model.parameters(), lr=0.1, momentum=0.5)
    data = list(batches(26))
    train(model, optimizer, data[:13])
    other = copy.deepcopy(model).to(then)
    resumed = NGD(other.parameters(), lr=0.1, momentum=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, data[13:])
    train(other, resumed, data[13:])
    close(model, other, 1e-7)
    if first == then:
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )


@pytest.mark.parametrize("optimizer", ["sgd", "ngd"])
@pytest.mark.parametrize("order", ["own", "shared"])
def test_members_on_a_gpu_are_those_on_a_cpu(optimizer, order):
    rng = generator(1, "ngd device")
    data = (
        torch.randn(90, SIZES[0], generator=rng, dtype=torch.float64),
        torch.randint(0, 5, (90,), generator=rng),
    )
    runs = [
        fit_many(
            lambda seed: mlp(SIZES, seed=seed).double(),
            data,
            seeds=range(3),
            lr=[0.1, 0.2, 0.05],
            epochs=4,
            batch_size=20,
            optimizer=optimizer,
            order=order,
            momentum=0.5,
            validation=data,
            device=device,
        )
        for device in ("cpu", "cuda")
    ]
    np.testing.assert_allclose(runs[0].loss, runs[1].loss, rtol=1e-6)
    np.testing.assert_allclose(runs[0].validation_accuracy, runs[1].validation_accuracy)
    for name, tensor in runs[0].tensors.items():
        torch.testing.assert_close(runs[1].tensors[name], tensor, rtol=1e-5, atol=1e-6)
