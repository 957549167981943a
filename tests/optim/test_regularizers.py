"""Regularizers against dense float64 Hessians, finite differences, and what they reduce to."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lambdahat.models import mlp
from lambdahat.optim import (
    L1,
    L2,
    Metric,
    SelectiveL2,
    StoppedL2,
    StoppedThenSelectiveL2,
    batch_product,
    layers_of,
)
from lambdahat.optim.regularizers import BatchProduct, absolute_product, dense_hessian

SIZES = [3, 4, 2]
RNG = torch.Generator().manual_seed(0)
X = torch.randn(7, 3, generator=RNG, dtype=torch.float64)
Y = torch.randn(7, 2, generator=RNG, dtype=torch.float64)


def network():
    return mlp(SIZES, "tanh", seed=1).double()


def loss_at(model, flat):
    """The loss with the flat vector in place of the parameters."""
    shapes = [p.shape for p in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    parts = flat.split([math.prod(shape) for shape in shapes])
    state = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
    return mse_loss(torch.func.functional_call(model, state, (X,)), Y)


def flat_of(tensors):
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def hessian_at(model, flat):
    return torch.autograd.functional.hessian(lambda v: loss_at(model, v), flat)


def product_of(model):
    return batch_product(mse_loss(model(X), Y), list(model.parameters()))


def added(rule, model, step=0, product=None):
    """What a rule adds to the gradient, flat."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    needed = product_of(model) if product is None and rule.needs_product else product
    rule.add_to(parameters, needed, step)
    return flat_of([parameter.grad for parameter in parameters])


def test_the_product_is_the_dense_hessian():
    model = network()
    theta = flat_of(model.parameters())
    product, dense = product_of(model), hessian_at(model, theta)
    torch.testing.assert_close(dense_hessian(product, list(model.parameters())), dense)
    gradient = torch.func.grad(lambda v: loss_at(model, v))(theta)
    torch.testing.assert_close(flat_of(product.gradient), gradient)


def test_products_of_several_batches_add_up():
    model = network()
    parameters = list(model.parameters())
    graphs = [
        torch.autograd.grad(
            mse_loss(model(X[part]), Y[part]) * share, parameters, create_graph=True
        )
        for part, share in ((slice(3), 3 / 7), (slice(3, None), 4 / 7))
    ]
    vector = [torch.randn_like(p) for p in parameters]
    torch.testing.assert_close(
        flat_of(BatchProduct(parameters, graphs)(vector)), flat_of(product_of(model)(vector))
    )


def test_a_loss_linear_in_a_parameter_has_a_hessian_of_0():
    weight, unused = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    product = batch_product(weight.sum(), [weight, unused])
    assert all(
        not part.any()
        for part in (*product([torch.ones(3), torch.ones(2)]), *product.third([weight, unused]))
    )


def test_metric_is_the_dense_hessian_times_the_parameters():
    model = network()
    theta = flat_of(model.parameters())
    torch.testing.assert_close(added(Metric(0.3), model), 0.3 * hessian_at(model, theta) @ theta)


def half_length(model, theta):
    return 0.5 * theta @ hessian_at(model, theta) @ theta


def half_log_determinant(model, theta):
    return 0.5 * torch.linalg.slogdet(hessian_at(model, theta))[1]


def differences(function, theta, width=1e-4):
    """The gradient by central differences."""
    steps = width * torch.eye(len(theta), dtype=theta.dtype)
    return torch.stack([(function(theta + e) - function(theta - e)) / (2 * width) for e in steps])


def test_the_third_derivative_makes_metric_the_gradient_of_the_length():
    model = network()
    expected = differences(lambda v: half_length(model, v), flat_of(model.parameters()))
    whole = added(Metric(1.0, third_derivative=True), model)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-7)
    assert (whole - added(Metric(1.0), model)).norm() > 0.01 * whole.norm()


@pytest.mark.parametrize("norm", [nn.LayerNorm(3), nn.BatchNorm1d(3)])
def test_third_derivatives_of_norms_are_refused(norm):
    """PyTorch holds their statistics constant; those of group norms are right."""
    x, y = torch.randn(5, 2).double(), torch.randn(5, 3).double()
    for layer in (norm, nn.GroupNorm(1, 3)):
        model = nn.Sequential(nn.Linear(2, 3), layer, nn.Tanh()).double()
        product = batch_product(mse_loss(model(x), y), list(model.parameters()))
        vectors = [torch.ones_like(parameter) for parameter in model.parameters()]
        if layer is norm:
            with pytest.raises(ValueError, match=r"a true third derivative.*GroupNorm"):
                product.third(vectors)
        else:
            assert all(part.isfinite().all() for part in product.third(vectors))


def test_all_terms_of_metric_are_the_gradient_of_equation_3_5():
    """½θᵀHθ − ½ log|det H|, on a model whose Hessian has no flat direction."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for parameter, value in zip(
            model.parameters(),
            torch.randn(14, dtype=torch.float64, generator=RNG).split([6, 2, 4, 2]),
            strict=True,
        ):
            parameter.copy_(value.view(parameter.shape))
    theta = flat_of(model.parameters())
    values = torch.linalg.eigvalsh(hessian_at(model, theta)).abs()
    assert values.min() > 1e-5 * values.max()
    expected = differences(lambda v: half_length(model, v) - half_log_determinant(model, v), theta)
    whole = added(Metric(1.0, third_derivative=True, log_determinant=True), model)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


def test_flat_directions_are_left_out_of_the_determinant():
    """a⁴ + b with b flat: log|H| = log 12a² has gradient 2/a in a, none in b."""
    a, b = (torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.5, 2.0))
    for parameter in (a, b):
        parameter.grad = torch.zeros_like(parameter)
    Metric(1.0, log_determinant=True).add_to([a, b], batch_product(a**4 + b, [a, b]), 0)
    assert float(a.grad) == pytest.approx(12 * 0.5**3 - 0.5 * 2 / 0.5)
    assert float(b.grad) == 0.0


def test_the_absolute_hessian_has_the_absolute_eigenvalues():
    model = network()
    theta = flat_of(model.parameters())
    values, vectors = torch.linalg.eigh(hessian_at(model, theta))
    assert values.min() < -1e-3  # else |H| were H
    expected = vectors @ (values.abs() * (vectors.T @ theta))
    found = added(Metric(1.0, reading="absolute_hessian", depth=len(theta)), model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    nothing = absolute_product(
        product_of(model), [torch.zeros_like(p) for p in model.parameters()], 5
    )
    assert not flat_of(nothing).any()


@pytest.mark.parametrize("reading", ["hessian_vector", "absolute_hessian"])
def test_selective_spares_what_is_large_within_its_layer(reading):
    model = network()
    theta, omega = flat_of(model.parameters()), 0.3
    values, vectors = torch.linalg.eigh(hessian_at(model, theta))
    values = values.abs() if reading == "absolute_hessian" else values
    curvature = (vectors @ (values * (vectors.T @ theta))).abs()
    expected = theta.clone()
    for layer in (slice(0, 16), slice(16, 26)):  # weights and biases of a layer together
        spared = curvature[layer] >= omega * curvature[layer].max()
        assert 0 < spared.sum() < len(spared)
        expected[layer][spared] = 0.0
    rule = SelectiveL2(0.5, omega, reading, depth=len(theta), layers=layers_of(model))
    torch.testing.assert_close(added(rule, model), 0.5 * expected)


def test_the_maximum_is_over_the_layer_and_by_default_over_the_tensor():
    """L = ½Σc_iθ_i² at θ = 1 has Hθ = c."""
    sizes = [torch.tensor([10.0, 4.0]), torch.tensor([3.0, 1.0]), torch.tensor([0.2, 0.1])]
    parameters = [torch.ones(2, requires_grad=True) for _ in sizes]

    def regularized(layers):
        loss = sum(0.5 * (c * p * p).sum() for c, p in zip(sizes, parameters, strict=True))
        for parameter in parameters:
            parameter.grad = None
        SelectiveL2(1.0, 0.6, layers=layers).add_to(parameters, batch_product(loss, parameters), 0)
        return [parameter.grad.tolist() for parameter in parameters]

    assert regularized(None) == [[0, 1], [0, 1], [0, 1]]
    assert regularized(["first", "first", "second"]) == [[0, 1], [1, 1], [0, 1]]
    assert regularized("aaa") == [[0, 1], [1, 1], [1, 1]]


def test_layers_are_those_of_the_trained_parameters():
    model = network()
    model[0].bias.requires_grad_(False)
    assert layers_of(model) == ("0", "2", "2")


def test_a_parameter_without_entries_has_no_maximum():
    weight, none = torch.ones(2, requires_grad=True), torch.ones(0, 3, requires_grad=True)
    loss = (torch.tensor([2.0, 1.0]) * weight * weight).sum() + none.sum()
    product = batch_product(loss, [weight, none])
    SelectiveL2(1.0, 0.6).add_to([weight, none], product, 0)
    assert weight.grad.tolist() == [0, 1]


def test_selective_at_its_limits_is_the_base_and_l2():
    model = network()
    assert not added(SelectiveL2(0.5, 0.0), model).any()
    torch.testing.assert_close(
        added(SelectiveL2(0.5, math.inf), model), added(L2(0.5), model), rtol=0, atol=0
    )


def test_infinite_omega_is_l2_even_where_the_curvature_vanishes():
    weight = torch.ones(2, requires_grad=True)
    SelectiveL2(0.5, math.inf).add_to([weight], batch_product(weight.sum(), [weight]), 0)
    assert weight.grad.tolist() == [0.5, 0.5]


def test_l1_and_l2_are_the_gradients_of_their_norms():
    model = network()
    theta = flat_of(model.parameters()).requires_grad_()
    for rule, norm in ((L1(0.3), theta.abs().sum()), (L2(0.3), 0.5 * theta.square().sum())):
        torch.testing.assert_close(added(rule, model), 0.3 * torch.autograd.grad(norm, theta)[0])


def test_stopped_rules_change_at_tau():
    model = network()
    whole, none = added(L2(0.2), model), torch.zeros(26, dtype=torch.float64)
    for step, expected in ((0, whole), (4, whole), (5, none), (6, none)):
        torch.testing.assert_close(added(StoppedL2(0.2, 5), model, step), expected)
    both = StoppedThenSelectiveL2(0.2, 5, 0.3, selective_rate=0.7)
    torch.testing.assert_close(added(both, model, 4), whole)
    torch.testing.assert_close(added(both, model, 5), added(SelectiveL2(0.7, 0.3), model))
    torch.testing.assert_close(
        added(StoppedThenSelectiveL2(0.2, 0, 0.3), model), added(SelectiveL2(0.2, 0.3), model)
    )


def test_no_product_is_made_before_it_is_needed():
    def fail(vectors):
        raise AssertionError

    added(StoppedThenSelectiveL2(0.2, 5, 0.3), network(), 4, fail)


def train(make, rules, steps=6):
    """A stranger's loop."""
    model = network()
    parameters = list(model.parameters())
    optimizer = make(parameters)
    for step in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(X), Y)
        product = (
            batch_product(loss, parameters) if any(rule.needs_product for rule in rules) else None
        )
        loss.backward(retain_graph=product is not None)
        for rule in rules:
            rule.add_to(parameters, product, step)
        optimizer.step()
        for rule in rules:
            rule.after_step(parameters, optimizer.param_groups[0]["lr"])
    return flat_of(parameters)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_rate_of_0_leaves_the_base_optimiser(make, decoupled):
    base = train(make, [])
    rules = [
        Metric(0.0, decoupled=decoupled),
        SelectiveL2(0.4, 0.0, decoupled=decoupled),
        L2(0.0, decoupled=decoupled),
    ]
    for rule in rules:
        assert torch.equal(train(make, [rule]), base)
    assert not torch.equal(train(make, [Metric(0.01, decoupled=decoupled)]), base)


def test_l2_is_weight_decay_coupled_and_decoupled():
    for name, decay in (("sgd", torch.optim.SGD), ("adam", torch.optim.Adam)):
        options = {"lr": 0.1, "momentum": 0.9} if name == "sgd" else {"lr": 0.05}
        expected = train(lambda p, d=decay, o=options: d(p, weight_decay=0.3, **o), [])
        torch.testing.assert_close(train(OPTIMIZERS[name], [L2(0.3)]), expected)
    expected = train(lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.3), [])
    torch.testing.assert_close(
        train(OPTIMIZERS["adam"], [L2(0.05 * 0.3, decoupled=True)]), expected
    )


def test_decoupled_metric_with_sgd_is_the_rule_of_table_4_1():
    model, rate, own = network(), 0.1, 0.02
    theta = flat_of(model.parameters())
    for _ in range(3):
        gradient = torch.func.grad(lambda v: loss_at(model, v))(theta)
        theta = theta - rate * gradient - own * hessian_at(model, theta) @ theta
    torch.testing.assert_close(
        train(lambda p: torch.optim.SGD(p, lr=rate), [Metric(own, decoupled=True)], 3), theta
    )


def test_rules_compose_by_addition():
    model = network()
    rules = [L1(0.1), L2(0.2), Metric(0.3), SelectiveL2(0.4, 0.2)]
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None  # as zero_grad leaves it
    product = product_of(model)
    for rule in rules:
        rule.add_to(parameters, product, 0)
    total = flat_of([parameter.grad for parameter in parameters])
    torch.testing.assert_close(total, sum(added(rule, model) for rule in rules))


def test_a_rule_leaves_the_parameters_alone_until_after_the_step():
    model = network()
    before = copy.deepcopy(model.state_dict())
    rule = L2(0.5, decoupled=True)
    assert not added(rule, model).any()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    rule.after_step(list(model.parameters()), 0.1)
    rule.after_step(list(model.parameters()), 0.1)  # what was kept is used once
    torch.testing.assert_close(flat_of(model.parameters()), 0.5 * flat_of(before.values()))


MISUSES = {
    "negative rate": (
        lambda: L2(-1.0),
        ValueError,
        "rate must be a finite number of at least 0, got -1.0",
    ),
    "NaN rate": (lambda: L1(math.nan), ValueError, "rate must be a finite number"),
    "infinite rate": (
        lambda: Metric(math.inf),
        ValueError,
        "rate must be a finite number of at least 0, got inf",
    ),
    "rate as text": (
        lambda: L2("0.1"),
        TypeError,
        "rate must be a number of at least 0, got '0.1'",
    ),
    "rate as a tensor": (
        lambda: L2(torch.ones(2)),
        TypeError,
        r"rate must be a number.*got Tensor of shape \(2,\)",
    ),
    "negative omega": (
        lambda: SelectiveL2(0.1, -0.1),
        ValueError,
        "omega must be a number of at least 0, got -0.1",
    ),
    "NaN omega": (
        lambda: SelectiveL2(0.1, math.nan),
        ValueError,
        "omega must be a number of at least 0, got nan",
    ),
    "unknown reading": (
        lambda: SelectiveL2(0.1, 0.1, "fisher"),
        ValueError,
        "reading must be one of 'hessian_vector'",
    ),
    "tau of a half": (
        lambda: StoppedL2(0.1, 0.5),
        TypeError,
        "tau must be an integer of at least 0, got 0.5",
    ),
    "negative tau": (
        lambda: StoppedL2(0.1, -1),
        ValueError,
        "tau must be an integer of at least 0, got -1",
    ),
    "negative second rate": (
        lambda: StoppedThenSelectiveL2(0.1, 1, 0.1, -1.0),
        ValueError,
        "selective_rate must be",
    ),
    "depth of 0": (
        lambda: Metric(0.1, "absolute_hessian", depth=0),
        ValueError,
        "depth must be an integer of at",
    ),
    "third derivatives of |H|": (
        lambda: Metric(0.1, "absolute_hessian", third_derivative=True),
        ValueError,
        "reading must be 'hessian_vector' with third derivatives",
    ),
    "no product": (
        lambda: Metric(0.1).add_to([torch.ones(2)], None, 0),
        TypeError,
        r"product must be a function v -> Hv for Metric, got None; make it with .*batch_product",
    ),
    "a plain product": (
        lambda: added(Metric(0.1, third_derivative=True), network(), product=lambda v: v),
        TypeError,
        "product must be a BatchProduct where third derivatives are asked for",
    ),
    "too few layers": (
        lambda: added(SelectiveL2(0.1, 0.1, layers="ab"), network()),
        ValueError,
        r"layers must name the layer of each of the 4 parameters, got 2 names; .*layers_of",
    ),
    "a loss per sample": (
        lambda: batch_product(torch.ones(3, requires_grad=True), []),
        ValueError,
        r"loss must be a scalar tensor, got Tensor of shape \(3,\); take its mean",
    ),
    "a loss without graph": (
        lambda: batch_product(torch.tensor(1.0), []),
        ValueError,
        "loss must have its graph",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), MISUSES.values(), ids=MISUSES)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
