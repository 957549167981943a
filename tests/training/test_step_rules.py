"""The linearised steps of optimisers: rates against the steps they take, thresholds against runs
that blow up.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

import lambdahat as lh
from lambdahat.optim import GadamX, Lookahead, Padam, SpectralSGD
from lambdahat.training.step_rules import PreconditionedCurvature, step_rule
from tests.cases import classifier
from tests.oracles import dense_hessian


def trained(make, steps=7):
    """A small network after some steps: its problem, its optimiser and the last step's change of
    every parameter.
    """
    problem = classifier()
    model = problem.model
    optimizer = make(model.parameters())
    before = problem.vector
    for _ in range(steps):
        before = problem.vector
        optimizer.zero_grad()
        sum(
            w * problem.batch_loss(dict(model.named_parameters()), b) for w, b in problem.weighted()
        ).backward()
        optimizer.step()
    return problem, optimizer, problem.vector - before


def state_vector(problem, optimizer, key):
    return torch.cat([optimizer.state[p][key].reshape(-1) for p in problem.model.parameters()])


AVERAGING = {
    "Adam": lambda p: Adam(p, lr=0.01),
    "Adam, other betas": lambda p: Adam(p, lr=0.01, betas=(0.5, 0.7), eps=1e-3),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, betas=(0.9, 0.5)),
    "AdamW": lambda p: AdamW(p, lr=0.01, weight_decay=0.0),
    "Padam": lambda p: Padam(p, lr=0.01, p=0.2, eps=1e-3, betas=(0.9, 0.9)),
    "Padam, plain": lambda p: Padam(p, lr=0.01, p=0.125, amsgrad=False),
    "Padam, coded": lambda p: Padam(p, lr=0.01, p=0.2, form="coded"),
    "GadamX": lambda p: GadamX(p, lr=0.01, weight_decay=0.0),
}


@pytest.mark.parametrize("name", AVERAGING)
def test_rates_times_the_averaged_gradient_are_the_step_just_taken(name):
    """Δθ = −(α/d)·m, with d as the preconditioner and m the optimiser's own first moment."""
    problem, optimizer, step = trained(AVERAGING[name])
    rates = step_rule(problem, optimizer).rates
    assert torch.allclose(
        -rates * state_vector(problem, optimizer, "exp_avg"), step, rtol=1e-8, atol=1e-15
    )


def test_printed_padam_has_its_correction_in_the_moment():
    """There m already has 1/(1 − β₁ᵗ) in it, which the linearised step then has instead."""
    problem, optimizer, step = trained(
        lambda p: Padam(p, lr=0.01, p=0.2, eps=1e-3, form="printed"), steps=7
    )
    rates = step_rule(problem, optimizer).rates * (1 - 0.9**7)
    assert torch.allclose(
        -rates * state_vector(problem, optimizer, "exp_avg"), step, rtol=1e-8, atol=1e-15
    )


@pytest.mark.parametrize("centered", [False, True])
def test_rates_of_rmsprop_times_the_gradient_are_the_step_just_taken(centered):
    problem, optimizer, step = trained(lambda p: RMSprop(p, lr=0.01, centered=centered, alpha=0.9))
    gradient = torch.cat([p.grad.reshape(-1) for p in problem.model.parameters()])
    assert torch.allclose(
        -step_rule(problem, optimizer).rates * gradient, step, rtol=1e-8, atol=1e-15
    )


def test_the_operator_against_dense_matrices_from_a_history_of_gradients():
    """λ₁(D^−½HD^−½) of Adam, its D by a recursion of our own over the gradients seen."""
    problem = classifier()
    model, second = problem.model, torch.zeros(problem.num_parameters, dtype=torch.float64)
    optimizer = Adam(model.parameters(), lr=0.03, betas=(0.8, 0.95), eps=1e-4)
    for _ in range(5):
        gradient = problem.gradient()
        for parameter, part in zip(model.parameters(), problem.space.split(gradient), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
        second = 0.95 * second + 0.05 * gradient**2
    d = (1 - 0.8**5) * ((second / (1 - 0.95**5)).sqrt() + 1e-4)
    dense = dense_hessian(problem) / (d[:, None] * d[None, :]).sqrt()
    exact = 0.03 * float(torch.linalg.eigvalsh(dense)[-1])
    found = PreconditionedCurvature(lh.hessian(problem), step_rule(problem, optimizer)).dense()
    assert float(torch.linalg.eigvalsh(found)[-1]) == pytest.approx(exact, rel=1e-8)


def test_groups_have_their_own_rate_and_decay_and_what_no_group_holds_does_not_move():
    problem = classifier()
    first, second, third, _ = problem.model.parameters()
    groups = [{"params": [third], "lr": 0.5, "weight_decay": 0.1}, {"params": [first, second]}]
    rule = step_rule(problem, SGD(groups, lr=0.02))
    sizes = [p.numel() for p in problem.model.parameters()]
    for found, values in ((rule.rates, [0.02, 0.02, 0.5, 0.0]), (rule.decay, [0.0, 0.0, 0.1, 0.0])):
        parts = [
            torch.full((n,), value, dtype=torch.float64)
            for n, value in zip(sizes, values, strict=True)
        ]
        assert torch.equal(found, torch.cat(parts))
    root = rule.rates.sqrt()
    dense = root[:, None] * (dense_hessian(problem) + torch.diag(rule.decay)) * root
    assert torch.allclose(
        PreconditionedCurvature(lh.hessian(problem), rule).dense(), dense, atol=1e-10
    )


def test_a_function_of_tensors_matches_by_order_and_shape():
    theta = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    problem = lh.Problem.from_function(lambda p: (p["theta"] ** 2).sum(), {"theta": theta})
    assert torch.equal(
        step_rule(problem, SGD([theta], lr=0.25)).rates, torch.full((2,), 0.25, dtype=torch.float64)
    )


def test_a_wrapper_has_the_rule_of_its_base():
    problem, optimizer, _ = trained(lambda p: Lookahead(Adam(p, lr=0.01), k=100))
    assert torch.equal(
        step_rule(problem, optimizer).rates, step_rule(problem, optimizer.base).rates
    )


def test_spectral_sgd_has_the_rate_that_it_measured():
    problem = classifier()
    optimizer = SpectralSGD(problem.model.parameters(), lr=0.5)
    optimizer.observe(problem)
    rule, group = step_rule(problem, optimizer), optimizer.param_groups[0]
    assert torch.allclose(rule.rates, torch.tensor(0.5 * group["rate"], dtype=torch.float64))
    assert rule.threshold == 2 * (1 + group["momentum"])


UNSTABLE = {
    "plain": (lambda p, lr: SGD(p, lr=lr), 2.0),
    "heavy ball": (lambda p, lr: SGD(p, lr=lr, momentum=0.8), 3.6),
    "dampened": (lambda p, lr: SGD(p, lr=lr, momentum=0.8, dampening=0.5), 7.2),
    "nesterov": (lambda p, lr: SGD(p, lr=lr, momentum=0.8, nesterov=True), 3.6 / 2.6),
    "weight decay": (lambda p, lr: SGD(p, lr=lr, weight_decay=0.5), 2.0),
    "averaged": (lambda p, lr: Adam(p, lr=1e12 * lr, eps=1e12), 38.0),
    "averaged, coupled decay": (
        lambda p, lr: Adam(p, lr=1e12 * lr, eps=1e12, weight_decay=0.5),
        38.0,
    ),
    "rmsprop, momentum": (lambda p, lr: RMSprop(p, lr=1e12 * lr, eps=1e12, momentum=0.8), 3.6),
}


@pytest.mark.parametrize("name", UNSTABLE)
def test_steps_shrink_just_below_the_threshold_and_grow_just_above(name):
    """θ ← step on ½θᵀdiag(3, 1)θ, at 0.98 and 1.02 of the rate where the rule puts the edge."""
    make, threshold = UNSTABLE[name]
    curvature = torch.tensor([3.0, 1.0], dtype=torch.float64)

    def after(factor):
        theta = nn.Parameter(torch.ones(2, dtype=torch.float64))
        problem = lh.Problem.from_function(
            lambda p: 0.5 * (curvature * p["theta"] ** 2).sum(), {"theta": theta}
        )
        decay = 0.5 if "decay" in name else 0.0
        optimizer = make([theta], factor * threshold / (3.0 + decay))
        rate, size = optimizer.param_groups[0]["lr"], 1.0
        # the first 300 stand still, so that Adam's corrections of its start are over
        for step in range(3300):
            optimizer.param_groups[0]["lr"] = rate if step >= 300 else 0.0
            theta.grad = curvature * theta.detach()
            optimizer.step()
            size = float(theta.detach().abs().max())
            if not 1e-5 < size < 1e5:
                break
        rule = step_rule(problem, optimizer)
        assert rule.threshold == pytest.approx(threshold, rel=1e-12)
        edge = float(
            torch.linalg.eigvalsh(PreconditionedCurvature(lh.hessian(problem), rule).dense())[-1]
        )
        return size, edge

    small, below = after(0.98)
    large, above = after(1.02)
    assert small <= 1e-5
    assert large >= 1e5
    # Adam's v is not quite nothing beside eps
    assert below == pytest.approx(0.98 * threshold, rel=1e-3)
    assert above == pytest.approx(1.02 * threshold, rel=1e-3)


class Strange(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})


MISUSES = {
    "no optimiser": (
        lambda p: None,
        TypeError,
        "optimizer must be a torch.optim.Optimizer, got None",
    ),
    "unknown optimiser": (
        lambda p: Strange(p),
        TypeError,
        "optimizer must be SGD, .*got Strange; for others no diag",
    ),
    "no step yet": (
        lambda p: Adam(p),
        ValueError,
        "optimizer must have taken a step.*not known yet",
    ),
    "maximise": (lambda p: SGD(p, lr=0.1, maximize=True), ValueError, "optimizer must minimise"),
    "another model": (
        lambda p: SGD([nn.Parameter(torch.ones(3))], lr=0.1),
        ValueError,
        "optimizer must hold parameters of the problem, got none of them",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    make, error, message = MISUSES[name]
    problem = classifier()
    with pytest.raises(error, match=message):
        step_rule(problem, make(problem.model.parameters()))


def test_a_function_whose_optimiser_holds_other_shapes():
    problem = lh.Problem.from_function(lambda p: (p["theta"] ** 2).sum(), {"theta": torch.ones(2)})
    with pytest.raises(
        ValueError, match="optimizer must hold the problem's parameters, in their order"
    ):
        step_rule(problem, SGD([nn.Parameter(torch.ones(3))], lr=0.1))
