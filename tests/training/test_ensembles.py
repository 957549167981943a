"""Members trained together against plain loops of torch.optim.SGD and of NGD, one by one."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from lambdahat._core.rng import generator
from lambdahat._core.storage import Result
from lambdahat.models import lenet5, mlp
from lambdahat.optim import NGD
from lambdahat.results import Status
from lambdahat.training import Ensemble, fit_many
from lambdahat.training.feeding import epoch_order

EPOCHS, BATCH = 4, 16


def blobs(samples=50, name="train"):
    rng = generator(0, "blobs", name)
    y = torch.randint(0, 3, (samples,), generator=rng)
    centres = torch.randn(3, 6, generator=generator(0, "centres"), dtype=torch.float64)
    return centres[y] + torch.randn(samples, 6, generator=rng, dtype=torch.float64), y


def make(seed):
    return mlp([6, 8, 8, 3], seed=seed).double()


def alone(seed, kind, order_seed=None, **options):
    """One member in a plain loop: its model, and loss and accuracy per epoch."""
    model, (x, y) = make(seed), blobs()
    optimizer = kind(model.parameters(), **options)
    curves = []
    for epoch in range(EPOCHS):
        loss_sum, hits = 0.0, 0
        for rows in epoch_order(seed if order_seed is None else order_seed, epoch, len(x)).split(
            BATCH
        ):
            optimizer.zero_grad()
            output = model(x[rows])
            loss = cross_entropy(output, y[rows])
            loss.backward()
            optimizer.step()
            loss_sum, hits = (
                loss_sum + loss.item() * len(rows),
                hits + int((output.argmax(1) == y[rows]).sum()),
            )
        curves.append((loss_sum / len(x), hits / len(x)))
    return model, np.array(curves).T


def together(**options):
    given = {"seeds": range(3), "lr": 0.1, "epochs": EPOCHS, "batch_size": BATCH, **options}
    return fit_many(make, blobs(), **given)


def agrees(ensemble, member, model, curves, tol=1e-8):
    np.testing.assert_allclose(ensemble.loss[member], curves[0], rtol=tol)
    np.testing.assert_allclose(ensemble.accuracy[member], curves[1])
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ensemble.state_dict(member)[name], tensor, rtol=tol, atol=tol)


SGD_CASES = [{}, {"momentum": 0.9}, {"weight_decay": 0.05}, {"momentum": 0.5, "weight_decay": 0.05}]
NGD_CASES = [
    {},
    {"alpha": 0.1, "momentum": 0.9},
    {"weight_decay": 0.05, "rescale": False, "period": 2, "rank": 3},
    {"weight_decay": 0.05, "decoupled": True, "eta": 0.3},
]


@pytest.mark.parametrize("options", SGD_CASES, ids=str)
def test_sgd_is_that_of_torch_one_by_one(options):
    ensemble = together(**options)
    for seed in range(3):
        agrees(ensemble, seed, *alone(seed, torch.optim.SGD, lr=0.1, **options))


@pytest.mark.parametrize("options", NGD_CASES, ids=str)
def test_ngd_is_that_of_the_optimiser_one_by_one(options):
    ensemble = together(optimizer="ngd", **options)
    for seed in range(3):
        agrees(ensemble, seed, *alone(seed, NGD, lr=0.1, **options))


@pytest.mark.parametrize(
    ("optimizer", "kind", "name", "values"),
    [
        ("sgd", torch.optim.SGD, "lr", (0.3, 0.1, 0.01)),
        ("ngd", NGD, "lr", torch.tensor([0.3, 0.1, 0.01])),
        ("ngd", NGD, "alpha", np.array([4.0, 0.1, 0.5])),
        ("sgd", torch.optim.SGD, "weight_decay", [0.0, 0.1, 0.2]),
        ("ngd", NGD, "weight_decay", [0.0, 0.1, 0.2]),
        ("sgd", torch.optim.SGD, "momentum", [0.0, 0.5, 0.9]),
    ],
)
def test_a_value_for_each_member_of_one_seed(optimizer, kind, name, values):
    ensemble = together(seeds=[5], optimizer=optimizer, **{name: values})
    assert ensemble.seeds == (5, 5, 5)
    assert ensemble.settings[name] == tuple(float(value) for value in values)
    for member, value in enumerate(values):
        agrees(ensemble, member, *alone(5, kind, **{"lr": 0.1, name: float(value)}), tol=1e-6)


def test_a_shared_order_is_that_of_the_first():
    ensemble = together(seeds=[4, 2], order="shared", optimizer="ngd")
    for member, seed in enumerate((4, 2)):
        agrees(ensemble, member, *alone(seed, NGD, order_seed=4, lr=0.1))


def test_held_out_curves_are_those_of_the_models():
    held_out = blobs(40, "test")
    ensemble = together(validation=held_out)
    for member in range(3):
        model = make(0)
        model.load_state_dict(ensemble.state_dict(member))
        with torch.no_grad():
            output = model(held_out[0])
        assert ensemble.validation_loss[member, -1] == pytest.approx(
            cross_entropy(output, held_out[1]).item()
        )
        assert (
            ensemble.validation_accuracy[member, -1]
            == (output.argmax(1) == held_out[1]).double().mean().item()
        )
    assert np.isnan(together(epochs=1).validation_loss).all()


def test_convolutions_and_regression():
    rng = generator(0, "images")
    images, y = (
        torch.randn(12, 1, 28, 28, generator=rng),
        torch.randint(0, 10, (12,), generator=rng),
    )
    ensemble = fit_many(
        lambda seed: lenet5(seed=seed),
        (images, y),
        seeds=[0, 1],
        lr=0.05,
        epochs=2,
        batch_size=6,
        optimizer="ngd",
    )
    model = lenet5(seed=1)
    optimizer = NGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        for rows in epoch_order(1, epoch, 12).split(6):
            optimizer.zero_grad()
            cross_entropy(model(images[rows]), y[rows]).backward()
            optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ensemble.state_dict(1)[name], tensor, rtol=1e-3, atol=1e-4)

    x, target = blobs()[0], blobs()[0][:, :3]
    ensemble = fit_many(make, (x, target), loss="mse", seeds=[0], lr=0.1, epochs=2, batch_size=25)
    assert np.isnan(ensemble.accuracy).all()
    model = make(0)
    model.load_state_dict(ensemble.state_dict(0))
    assert mse_loss(model(x), target).item() < ensemble.loss[0, 0]


def test_frozen_tensors_stay_and_models_are_left_alone():
    models = {}

    def frozen(seed):
        models[seed] = make(seed)
        models[seed][0].weight.requires_grad_(False)
        return models[seed]

    ensemble = fit_many(frozen, blobs(), seeds=[0, 1], lr=0.1, epochs=1)
    for seed, model in models.items():
        assert torch.equal(model[2].weight, make(seed)[2].weight)
        assert torch.equal(ensemble.state_dict(seed)["0.weight"], make(seed)[0].weight)
        assert not torch.equal(ensemble.state_dict(seed)["2.weight"], make(seed)[2].weight)


@pytest.mark.parametrize("optimizer", ["sgd", "ngd"])
def test_the_result_is_kept_and_says_when_it_diverged(optimizer, tmp_path):
    ensemble = together(lr=[0.1, 1e200, 0.1], optimizer=optimizer)
    assert ensemble.status is Status.TRAINING_DIVERGED
    assert np.isfinite(ensemble.loss[[0, 2]]).all()
    again = Result.load(ensemble.save(tmp_path / "ensemble"))
    assert isinstance(again, Ensemble)
    assert len(again) == 3
    np.testing.assert_array_equal(again.loss, ensemble.loss)
    assert torch.equal(again.state_dict(2)["0.weight"], ensemble.state_dict(2)["0.weight"])


def uneven(seed):
    return mlp([6, 4 + seed, 3], seed=seed).double()


def with_layer(layer):
    return lambda seed: nn.Sequential(
        mlp([6, 8], seed=seed).double(), layer, mlp([8, 3], seed=seed).double()
    )


def fail(**options):
    make_model = options.pop("make_model", make)
    return fit_many(make_model, blobs(), **{"seeds": [0, 1], "lr": 0.1, "epochs": 1, **options})


ERRORS = {
    "no seeds": (
        lambda: fail(seeds=[]),
        TypeError,
        "seeds must be a sequence of at least one seed",
    ),
    "a number of seeds": (
        lambda: fail(seeds=10),
        TypeError,
        r"seeds must be a sequence.*got 10; such as range\(10\)",
    ),
    "negative seed": (
        lambda: fail(seeds=[-1]),
        ValueError,
        "seeds must be an integer of at least 0",
    ),
    "too few values": (
        lambda: fail(seeds=range(3), lr=[0.1, 0.2]),
        ValueError,
        "lr must have one value or 3",
    ),
    "too few seeds": (lambda: fail(lr=[0.1] * 3), ValueError, "seeds must be one or 3"),
    "a bad value": (
        lambda: fail(lr=[0.1, -0.1]),
        ValueError,
        "lr must be a finite number of at least 0, got -0.1",
    ),
    "a text value": (
        lambda: fail(lr="0.1"),
        TypeError,
        "lr must be a number, or one for each member, got '0.1'",
    ),
    "unknown optimiser": (
        lambda: fail(optimizer="adam"),
        ValueError,
        "optimizer must be one of 'sgd', 'ngd'",
    ),
    "alpha of SGD": (
        lambda: fail(alpha=1.0),
        ValueError,
        "settings of 'sgd' must be among lr, momentum.*got alpha",
    ),
    "unknown order": (
        lambda: fail(order="random"),
        ValueError,
        "order must be one of 'own', 'shared'",
    ),
    "no epochs": (lambda: fail(epochs=0), ValueError, "epochs must be an integer of at least 1"),
    "a model": (
        lambda: fail(make_model=make(0)),
        TypeError,
        "make_model must be a function of a seed",
    ),
    "no model": (
        lambda: fail(make_model=lambda seed: None),
        TypeError,
        "make_model must return a torch.nn.Module",
    ),
    "uneven models": (
        lambda: fail(make_model=uneven),
        ValueError,
        "make_model must give the same tensors for every",
    ),
    "dropout": (
        lambda: fail(make_model=with_layer(nn.Dropout())),
        ValueError,
        "draw nothing in training, got Dropout",
    ),
    "batch norm": (
        lambda: fail(make_model=with_layer(nn.BatchNorm1d(8).double())),
        ValueError,
        "without batch norm",
    ),
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_misuse_is_named(case):
    call, error, text = ERRORS[case]
    with pytest.raises(error, match=text):
        call()


def test_progress_is_reported():
    from lambdahat import progress

    seen = []
    with progress(lambda task, done, total, *note: seen.append((task, done, total))):
        together(epochs=2)
    assert seen == [("members", 1, 2), ("members", 2, 2)]
    assert math.isfinite(seen[0][1])
