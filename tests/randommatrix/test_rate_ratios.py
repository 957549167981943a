"""The learning-rate ratio of optimisers, against their preconditioners written out."""

import copy

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat.optim import KFAC, NGD, ExactNGD, Gadam, LanczosNewton, Lookahead, Padam
from lambdahat.randommatrix import RateRatio, rate_ratio
from lambdahat.results import Eigenpairs
from tests.cases import classifier

PROBLEM = classifier((4, 5, 3), samples=30, batch_size=None)
MODEL = PROBLEM.source
START = {name: value.clone() for name, value in MODEL.state_dict().items()}
GGN = lh.ggn(PROBLEM).dense()
VALUES, VECTORS = torch.linalg.eigh(GGN)
SHARP = Eigenpairs(
    VALUES[-3:].flip(0), VECTORS[:, -3:].flip(1), torch.zeros(3), torch.ones(3, dtype=torch.bool)
)
FLATTEST = VECTORS[:, :1]


@pytest.fixture(autouse=True)
def point():
    """The same parameters for every test, and no gradients."""
    MODEL.load_state_dict(START)
    MODEL.zero_grad()
    MODEL.train()


def backward():
    (batch,) = PROBLEM.batches
    x, y = batch.data
    nn.functional.cross_entropy(MODEL(x), y).backward()


def train(optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        backward()
        optimizer.step()
    return optimizer


def flat_state(optimizer, name):
    return torch.cat([optimizer.state[p][name].reshape(-1) for p in MODEL.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steps", [0, 3])
def test_sgd_moves_alike_in_all_directions(momentum, steps):
    optimizer = train(torch.optim.SGD(MODEL.parameters(), 0.1, momentum, weight_decay=0.01), steps)
    found = rate_ratio(PROBLEM, optimizer, SHARP)
    assert float(found.ratio) == pytest.approx(1, rel=1e-9)
    torch.testing.assert_close(found.sharp, torch.full((3,), 0.1, dtype=torch.float64))
    assert found.nonlinearity < 1e-9


@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_damped_newton_has_the_ratio_of_section_6_3_1(damping):
    """R = 1 + (λ₁ − λ_P)/δ, and 1/(λ + δ) along each eigenvector."""
    optimizer = LanczosNewton(
        MODEL.parameters(), 0.5, damping, pairs=PROBLEM.num_parameters, curvature="ggn"
    )
    found = rate_ratio(PROBLEM, optimizer, SHARP, FLATTEST)
    expected = 0.5 / (VALUES.flip(0)[:3] + damping)
    torch.testing.assert_close(found.sharp, expected, rtol=1e-6, atol=0)
    assert float(found.ratio) == pytest.approx(
        float(1 + (VALUES[-1] - VALUES[0]) / (damping + VALUES[0])), rel=1e-6
    )


def test_eta_slows_the_sharp_directions_alone():
    pairs = 8
    kinds = [
        LanczosNewton(MODEL.parameters(), 0.5, 0.1, pairs, curvature="ggn", eta=eta)
        for eta in (1.0, 10.0)
    ]
    plain, slowed = (rate_ratio(PROBLEM, optimizer, SHARP, FLATTEST) for optimizer in kinds)
    assert float(slowed.ratio) > 3 * float(plain.ratio)


@pytest.mark.parametrize("solver", ["dense", "cg"])
def test_the_exact_natural_gradient(solver):
    optimizer = ExactNGD(MODEL.parameters(), 0.1, alpha=1.0, solver=solver)
    found = rate_ratio(PROBLEM, optimizer, SHARP, FLATTEST)
    kappa = float(VALUES.mean())
    torch.testing.assert_close(found.sharp, 0.1 / (VALUES.flip(0)[:3] + kappa), rtol=1e-4, atol=0)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_divides_by_its_second_moment(amsgrad):
    steps, betas, rate, eps = 5, (0.9, 0.99), 1e-3, 1e-4
    optimizer = train(
        torch.optim.Adam(MODEL.parameters(), rate, betas, eps, amsgrad=amsgrad), steps
    )
    found = rate_ratio(PROBLEM, optimizer, SHARP, 4)
    first, second = 1 - betas[0] ** (steps + 1), 1 - betas[1] ** (steps + 1)
    moment = betas[1] * flat_state(optimizer, "exp_avg_sq")
    if amsgrad:
        moment = torch.maximum(moment, flat_state(optimizer, "max_exp_avg_sq"))
    diagonal = rate * (1 - betas[0]) / first / ((moment / second).sqrt() + eps)
    expected = (SHARP.vectors**2 * diagonal[:, None]).sum(0)
    torch.testing.assert_close(found.sharp, expected, rtol=1e-6, atol=0)
    assert found.nonlinearity < 1e-6


def test_a_small_power_is_nearer_to_sgd():
    ratios = [
        float(rate_ratio(PROBLEM, train(Padam(MODEL.parameters(), 1e-3, p=p), 3), SHARP).ratio)
        for p in (0.5, 0.125, 0.01)
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(1, abs=0.1)


def test_a_large_epsilon_makes_adam_sgd():
    """Epsilon tuning (§6.6, spectral thesis) lowers the ratio."""
    optimizers = [
        train(torch.optim.Adam(MODEL.parameters(), 1e-3, eps=eps), 3) for eps in (1e-8, 1e-2, 1e3)
    ]
    ratios = [float(rate_ratio(PROBLEM, optimizer, SHARP).ratio) for optimizer in optimizers]
    assert ratios[0] > ratios[1] > ratios[2]
    assert ratios[2] == pytest.approx(1, abs=1e-3)


def test_an_optimiser_without_a_state_takes_its_first_step_before():
    fresh = rate_ratio(PROBLEM, torch.optim.Adam(MODEL.parameters(), 1e-3), SHARP)
    begun = torch.optim.Adam(MODEL.parameters(), 1e-3)
    for p, part in zip(MODEL.parameters(), PROBLEM.space.split(PROBLEM.gradient()), strict=True):
        p.grad = part.clone()
    begun.step()
    MODEL.load_state_dict(START)
    assert float(rate_ratio(PROBLEM, begun, SHARP).ratio) == pytest.approx(
        float(fresh.ratio), rel=1e-6
    )


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_kfac_is_its_blocks(fisher):
    optimizer = KFAC(MODEL, 0.1, damping=0.05, fisher=fisher)
    listening = backward if fisher == "empirical" else None
    try:
        found = rate_ratio(PROBLEM, optimizer, SHARP, FLATTEST, backward=listening)
    finally:
        optimizer.close()
    assert found.nonlinearity < 1e-6
    assert float(found.ratio) > 1.5
    if fisher == "exact":  # at its first step: compare with the preconditioner applied by hand
        again = KFAC(MODEL, 0.1, damping=0.05, fisher="exact")
        again.observe(PROBLEM)
        for p, part in zip(
            MODEL.parameters(), PROBLEM.space.split(SHARP.vectors[:, 0].clone()), strict=True
        ):
            p.grad = part.clone()
        before = PROBLEM.vector
        again.step()
        again.close()
        assert float(SHARP.vectors[:, 0] @ (before - PROBLEM.vector)) == pytest.approx(
            float(found.sharp[0]), rel=1e-6
        )


def test_kfac_without_a_backward_pass_says_so():
    optimizer = KFAC(MODEL, 0.1)
    with pytest.raises(RuntimeError, match="forward and backward"):
        rate_ratio(PROBLEM, optimizer, SHARP)
    optimizer.close()


def test_a_rescaled_step_is_not_linear_but_about_a_gradient():
    scaled, plain = (
        train(NGD(MODEL.parameters(), 0.1, rescale=rescale), 3) for rescale in (True, False)
    )
    at_zero = rate_ratio(PROBLEM, scaled, SHARP)
    about = rate_ratio(PROBLEM, scaled, SHARP, gradient=PROBLEM.gradient())
    assert at_zero.nonlinearity > 0.02
    assert about.nonlinearity < 1e-5
    assert rate_ratio(PROBLEM, plain, SHARP).nonlinearity < 1e-6


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.optim.Adam(MODEL.parameters(), 1e-2, weight_decay=0.1),
        lambda: torch.optim.SGD(MODEL.parameters(), 0.1, 0.9, nesterov=True),
        lambda: NGD(MODEL.parameters(), 0.1),
        lambda: Lookahead(torch.optim.Adam(MODEL.parameters(), 1e-2), k=2),
        lambda: Gadam(MODEL.parameters(), 1e-2, average_start=1),
    ],
    ids=["Adam", "SGD", "NGD", "Lookahead", "Gadam"],
)
def test_nothing_is_left_changed(make):
    """Training goes on bit for bit as if nothing had been measured."""
    runs = []
    for measured in (False, True):
        MODEL.load_state_dict(START)
        optimizer = train(make(), 3)
        backward()
        gradients = [p.grad.clone() for p in MODEL.parameters()]
        tensors = [p.grad for p in MODEL.parameters()]
        if measured:
            state = copy.deepcopy(optimizer.state_dict())
            rate_ratio(PROBLEM, optimizer, SHARP, 2)
            torch.testing.assert_close(
                optimizer.state_dict()["state"], state["state"], rtol=0, atol=0
            )
            assert optimizer.state_dict()["param_groups"] == state["param_groups"]
            assert all(p.grad is held for p, held in zip(MODEL.parameters(), tensors, strict=True))
            assert all(
                torch.equal(p.grad, g) for p, g in zip(MODEL.parameters(), gradients, strict=True)
            )
        train(optimizer, 3)
        runs.append(PROBLEM.vector)
    assert torch.equal(*runs)


def test_hooks_after_a_step_do_not_see_probes():
    optimizer, seen = torch.optim.SGD(MODEL.parameters(), 0.1), []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    rate_ratio(PROBLEM, optimizer, SHARP)
    assert not seen
    train(optimizer, 1)
    assert seen == [1]


def test_parameters_in_another_order_and_group_are_matched():
    first, *rest = MODEL.parameters()
    groups = [{"params": rest, "lr": 0.2}, {"params": [first], "lr": 0.2}]
    found = rate_ratio(PROBLEM, torch.optim.SGD(groups, 0.1), SHARP)
    assert float(found.flat) == pytest.approx(0.2)


def test_sharp_directions_are_found_when_not_given():
    found = rate_ratio(PROBLEM, torch.optim.SGD(MODEL.parameters(), 0.1))
    top = float(torch.linalg.eigvalsh(lh.hessian(PROBLEM).dense())[-1])
    assert float(found.curvatures[0]) == pytest.approx(top, rel=1e-5)


def test_float32_is_enough():
    model = lh.models.mlp([4, 5, 3])
    model.load_state_dict({name: value.float() for name, value in START.items()})
    (batch,) = PROBLEM.batches
    x, y = batch.data
    single = lh.Problem(model, "cross_entropy", (x.float(), y))
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (model, MODEL)]
    found = [
        rate_ratio(p, o, SHARP, FLATTEST)
        for p, o in zip((single, PROBLEM), optimizers, strict=True)
    ]
    assert float(found[0].ratio) == pytest.approx(float(found[1].ratio), rel=1e-2)


def test_it_is_saved_and_loaded(tmp_path):
    found = rate_ratio(PROBLEM, torch.optim.SGD(MODEL.parameters(), 0.1), SHARP)
    loaded = RateRatio.load(found.save(tmp_path / "ratio"))
    assert loaded.ratio == found.ratio
    assert torch.equal(loaded.sharp, found.sharp)


SGD = torch.optim.SGD


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: rate_ratio(MODEL, SGD(MODEL.parameters(), 0.1)),
            TypeError,
            "problem must be a lambdahat.Problem",
        ),
        (
            lambda: rate_ratio(PROBLEM, MODEL),
            TypeError,
            "optimizer must be a torch.optim.Optimizer that steps without",
        ),
        (
            lambda: rate_ratio(PROBLEM, torch.optim.LBFGS(MODEL.parameters())),
            TypeError,
            "without a closure",
        ),
        (
            lambda: rate_ratio(PROBLEM, SGD([nn.Parameter(torch.ones(3))], 0.1)),
            ValueError,
            "hold the parameters of",
        ),
        (
            lambda: rate_ratio(PROBLEM, SGD(MODEL.parameters(), 0.0), SHARP),
            ValueError,
            "move along the sharpest",
        ),
        (
            lambda: rate_ratio(PROBLEM, SGD(MODEL.parameters(), 0.1), SHARP, 0),
            ValueError,
            "flat must be an integer",
        ),
        (
            lambda: rate_ratio(PROBLEM, SGD(MODEL.parameters(), 0.1), SHARP, torch.ones(3, 1)),
            ValueError,
            r"flat must have shape \(43, k\)",
        ),
        (
            lambda: rate_ratio(
                PROBLEM, SGD(MODEL.parameters(), 0.1), SHARP, gradient=torch.ones(3)
            ),
            ValueError,
            r"gradient must be a tensor of shape \(43,\)",
        ),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=message):
        call()
