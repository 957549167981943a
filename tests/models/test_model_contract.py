"""What every registered network keeps: shapes, weights from the seed alone, sizes, derivatives."""

import copy
import inspect
import io
from functools import lru_cache

import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.models import MODELS, make_model, mlp, register_model
from lambdahat.operators import hessian
from lambdahat.problem import Problem

CLASSES, TOKENS = 4, 6
WHOLE = 100_000  # parameters up to which curvature is checked for all of them at once


def shape_of(entry):
    """One sample: a small image, of the side that the network asks for."""
    return (12,) if entry.takes == "vectors" else (3, entry.side or 16, entry.side or 16)


def build(name, seed=0):
    entry = MODELS[name]
    return make_model(name, shape_of(entry), CLASSES, seed, **entry.small)


kept = lru_cache(maxsize=2)(build)  # a network is copied faster than drawn


def samples(entry, number=2):
    rng = generator(0, "samples")
    if entry.takes == "tokens":
        text = torch.randint(0, CLASSES, (number, TOKENS), generator=rng)
        return text[:, :-1], text[:, 1:]
    x = torch.randn(number, *shape_of(entry), generator=rng)
    return x, torch.randint(0, CLASSES, (number,), generator=rng)


def check_shapes_and_options(name):
    """Logits for every label, a gradient that is finite and not 0, and only named options."""
    entry, model = MODELS[name], copy.deepcopy(kept(name))
    x, y = samples(entry)
    assert tuple(model.eval()(x).shape) == (*y.shape, CLASSES)
    logits = model.train()(x)
    nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert float(parameter.grad.abs().max()) > 0, key
    with pytest.raises(ValueError, match=f"options must be among those of '{name}': .*, got speed"):
        make_model(name, shape_of(entry), CLASSES, speed=1)


def check_seed(name):
    """The same weights for the same seed, others for another, and no draw from torch's generator;
    norm layers start as the identity.
    """
    before = torch.random.get_rng_state()
    first, again, other = kept(name).state_dict(), build(name).state_dict(), kept(name, 1)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    weights = [(first[key], value.detach()) for key, value in other.named_parameters()]
    assert not all(torch.equal(one, two) for one, two in weights)
    assert all(torch.isfinite(one).all() for one, _ in weights)
    for key, buffer in other.named_buffers():
        assert torch.equal(buffer, torch.full_like(buffer, key.endswith("running_var"))), key


def check_state_dict(name):
    """Another seed's network with these weights, through a file, gives the same bits."""
    stored = io.BytesIO()
    torch.save(kept(name).state_dict(), stored)
    stored.seek(0)
    twin = copy.deepcopy(kept(name, 1))
    twin.load_state_dict(torch.load(stored, weights_only=True))
    x, _ = samples(MODELS[name])
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), copy.deepcopy(kept(name)).eval()(x))


def check_hessian_product(name):
    """Hv is the difference of gradients along v. A large network is checked by a second backward
    pass for its outermost tensors: a step of any length switches one of its many units.
    """
    model, rng = copy.deepcopy(kept(name)).double(), generator(1, "direction")
    x, y = samples(MODELS[name])
    x = x.double() if x.is_floating_point() else x
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # statistics of this batch, or deep networks saturate the loss
    with torch.no_grad():
        model(samples(MODELS[name], 8)[0].to(x.dtype))
        for parameter in model.parameters():  # units that see only dead ones are at the kink itself
            if parameter.ndim == 1:
                parameter += 0.01 * torch.randn(parameter.shape, generator=rng)
    named = dict(model.eval().named_parameters())
    small = sum(parameter.numel() for parameter in named.values()) <= WHOLE
    chosen = list(named) if small else [next(iter(named)), list(named)[-1]]
    problem = Problem(model, "cross_entropy", (x, y), parameters=chosen)
    theta = problem.vector
    v = torch.randn(len(theta), generator=rng, dtype=torch.float64)
    v, step = v / v.norm(), 1e-7
    if small:
        ahead, behind = problem.gradient(theta + step * v), problem.gradient(theta - step * v)
        expected, tolerance = (ahead - behind) / (2 * step), 1e-5
    else:
        tensors = [named[key] for key in chosen]
        loss = nn.functional.cross_entropy(model(x), y)
        gradient = torch.autograd.grad(loss, tensors, create_graph=True)
        parts = [
            part.view_as(t)
            for part, t in zip(v.split([t.numel() for t in tensors]), tensors, strict=True)
        ]
        products = torch.autograd.grad(gradient, tensors, parts)
        expected, tolerance = torch.cat([part.flatten() for part in products]), 1e-9
    assert float(expected.norm()) > 0
    assert float((hessian(problem) @ v - expected).norm()) <= tolerance * float(expected.norm())


CHECKS = [check_shapes_and_options, check_seed, check_state_dict, check_hessian_product]


HEAVY = {
    name
    for name, entry in MODELS.items()
    if not entry.small and max(entry.parameters.values(), default=0) > 10_000_000
}
# the same layers as in a network of less depth, which keeps the whole contract
DEEP = {"resnet101", "preresnet164"}


def slow(name, check):
    """Whether a check waits for ``-m slow``."""
    heavy = check is check_hessian_product and name in HEAVY | DEEP
    return heavy or (check is not check_shapes_and_options and name in DEEP)


CASES = [
    pytest.param(name, check, marks=[pytest.mark.slow] * slow(name, check))
    for name in MODELS
    for check in CHECKS
]


@pytest.mark.parametrize(("name", "check"), CASES)
def test_contract(name, check):
    check(name)


PUBLISHED = [(name, *each) for name, entry in MODELS.items() for each in entry.parameters.items()]


@pytest.mark.parametrize(("name", "classes", "count"), PUBLISHED)
def test_the_number_of_parameters_is_the_published_one(name, classes, count, monkeypatch):
    # weights are not drawn: a size needs none
    build = inspect.unwrap(getattr(MODELS[name].build, "func", MODELS[name].build))
    monkeypatch.setattr(f"{build.__module__}.initialize", lambda model, *_: model)
    grey = MODELS[name].takes == "vectors" or MODELS[name].side == 28  # as those of MNIST
    shape = (1, 28, 28) if grey else (3, 32, 32)
    model = make_model(name, shape, classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_a_new_network_is_tested_by_being_registered(monkeypatch):
    monkeypatch.setattr("lambdahat.models.model_registry.MODELS", registry := dict(MODELS))

    @register_model("narrow", "vectors", "a narrow network")
    def narrow(inputs, classes, seed=0):
        return mlp([inputs, 2, classes], "tanh", seed)

    @register_model("unseeded", "vectors", "a network that ignores its seed")
    def unseeded(inputs, classes, seed=0):
        return mlp([inputs, 2, classes], "tanh")

    monkeypatch.setitem(MODELS, "narrow", registry["narrow"])
    monkeypatch.setitem(MODELS, "unseeded", registry["unseeded"])
    for check in CHECKS:
        check("narrow")
    with pytest.raises(AssertionError):
        check_seed("unseeded")
    with pytest.raises(ValueError, match="name must not be taken, got 'mlp'"):
        register_model("mlp", "vectors", "another")
