"""Lanczos steps and training steps replayed from CUDA graphs: how often, and the same numbers as
without.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lambdahat as lh
from lambdahat import optim
from lambdahat.krylov import Krylov, lanczos, random_vector
from lambdahat.krylov.lanczos import CapturedSteps
from lambdahat.problem import Problem
from lambdahat.training import fit
from lambdahat.training.feeding import Feed
from lambdahat.training.stepping import CapturedGradients, Stepper, Tally, TrainingSubject
from tests.gpu.waiting import no_waiting
from tests.training.small_runs import TEST, TRAIN, network, plain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def made(monkeypatch):
    """The captured steps of every decomposition."""
    found, original = [], CapturedSteps.of.__func__

    def of(basis, operator, scalars):
        found.append(original(CapturedSteps, basis, operator, scalars))
        return found[-1]

    monkeypatch.setattr(CapturedSteps, "of", of)
    return found


def digits(dtype=torch.float64, make=plain):
    return Problem(make().to("cuda", dtype), "cross_entropy", (TRAIN[0].to(dtype), TRAIN[1]))


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("curvature", [lh.hessian, lh.ggn])
def test_lanczos_steps_are_replayed(made, monkeypatch, curvature, dtype, tol):
    operator = curvature(digits(dtype))
    start = random_vector(operator, 0, "start")
    taken = lanczos(operator, start, 40)
    assert made[0].replay.replays == 39, "the first step warms up"
    assert operator.matvecs == 40
    monkeypatch.setattr(CapturedSteps, "of", lambda *_: None)
    eager = lanczos(operator, start, 40)
    scale = float(eager.alpha.abs().max())
    few = 12  # later ones depend on rounding, as they do between any two runs
    assert torch.allclose(taken.alpha[:few], eager.alpha[:few], atol=tol * scale)
    assert torch.allclose(taken.beta[:few], eager.beta[:few], atol=tol * scale)
    assert taken.ritz()[0][-1] == pytest.approx(float(eager.ritz()[0][-1]), rel=tol)
    gram = taken.basis.T @ taken.basis
    assert float((gram - torch.eye(40).to(gram)).abs().max()) < 100 * torch.finfo(dtype).eps


def test_eigenpairs_with_restarts_are_those_of_the_cpu(made):
    here = Problem(plain().double(), "cross_entropy", (TRAIN[0].double(), TRAIN[1]))
    found = [lh.eigenpairs(lh.hessian(p), k=3, tol=1e-8).values.cpu() for p in (digits(), here)]
    assert torch.allclose(*found, rtol=1e-7)
    assert made[0].replay.replays > 0


def test_replayed_lanczos_steps_do_not_wait():
    operator = lh.hessian(digits(torch.float32))
    start = random_vector(operator, 0, "start")
    lanczos(operator, start, 20)
    state = Krylov(operator, start, 30)
    for _ in range(3):
        state.extend()
    with no_waiting():
        for _ in range(20):
            state.extend()
    assert state.captured.replay.replays == 22


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10)
    )


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "ngd": lambda model: optim.NGD(model.parameters(), lr=0.1, momentum=0.9),
}


def trained(monkeypatch, make, kind, captured, **options):
    """A model after six epochs, the run, and how many gradients were replays."""
    steppers, original = [], Stepper.__init__

    def noted(self, *args, **kwargs):
        original(self, *args, **kwargs)
        steppers.append(self)
        if not captured:
            self.captured = None

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__init__", noted)
        model = make().cuda()
        optimizer = OPTIMIZERS[kind](model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        run = fit(
            Problem(model, "cross_entropy", TRAIN),
            optimizer,
            6,
            batch_size=64,
            validation=TEST,
            seed=1,
            schedule=schedule,
            schedule_unit="step",
            **options,
        )
    replays = steppers[0].captured.replay.replays if steppers[0].captured is not None else 0
    return model, run, replays


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", [plain, normed, convolutional])
def test_training_steps_are_replayed(monkeypatch, make, kind):
    found = [trained(monkeypatch, make, kind, captured) for captured in (True, False)]
    models, runs, replays = zip(*found, strict=True)
    # 24 whole steps and 6 short ones; of each kind the first two are run as they are
    assert replays == (26, 0)
    for a, b in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
    losses = [[row["loss"] for row in run.history if row["kind"] == "epoch"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert runs[0].history[-1]["gradient_norm"] == pytest.approx(
        runs[1].history[-1]["gradient_norm"], rel=1e-2
    )


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"precision": "bfloat16"}, {"clip": 0.1}], ids=str
)
def test_other_ways_to_train(monkeypatch, options):
    models, _, replays = zip(
        *(trained(monkeypatch, plain, "sgd", captured, **options) for captured in (True, False)),
        strict=True,
    )
    assert replays[0] > 10
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_replayed_dropout_draws_as_plain_steps_do(monkeypatch):
    model, _, replays = trained(monkeypatch, network, "sgd", True)
    assert replays == 26
    eager, _, _ = trained(monkeypatch, network, "sgd", False)
    # other masks would leave the weights far apart
    for a, b in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Drawing(nn.Module):
    """Noise from a generator of the model's own on the device, which no graph advances."""

    def __init__(self):
        super().__init__()
        self.inner, self.rng = nn.Linear(64, 10), torch.Generator("cuda").manual_seed(0)

    def forward(self, x):
        noise = torch.rand(len(x), 1, device=x.device, generator=self.rng)
        return self.inner(x) * (1 + noise)


def test_a_generator_of_the_models_own_is_not_replayed(monkeypatch):
    models, _, replays = zip(
        *(
            trained(monkeypatch, lambda: torch.manual_seed(0) and Drawing(), "sgd", captured)
            for captured in (True, False)
        ),
        strict=True,
    )
    assert replays == (0, 0)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Waiting(nn.Module):
    """A look at the data from the host, which no graph can capture."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        return self.inner(x) * (2.0 if float(x.sum()) > 0 else 1.0)


def test_what_cannot_be_captured_runs_as_it_is(monkeypatch):
    model, _, replays = trained(
        monkeypatch, lambda: torch.manual_seed(0) and Waiting(), "sgd", True
    )
    eager, _, _ = trained(monkeypatch, lambda: torch.manual_seed(0) and Waiting(), "sgd", False)
    assert replays == 0
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_replayed_step_waits_for_the_device():
    model = normed().cuda()
    problem = Problem(model, "cross_entropy", TRAIN)
    feed = Feed(problem, 60, 1, seed=0)
    stepper = Stepper(
        TrainingSubject(problem),
        OPTIMIZERS["sgd"](model),
        feed,
        precision="float32",
        clip=1.0,
        regularizers=(),
        curvature_samples=None,
    )
    assert isinstance(stepper.captured, CapturedGradients)
    groups, tally = list(feed.epoch(0)), Tally(problem.device)
    for step in range(3):
        stepper(groups[step], step, tally)
    with no_waiting():
        for step, group in enumerate(groups, start=3):
            stepper(group, step, tally)
    assert stepper.captured.replay.replays == 6
    assert 0 < tally.read()["loss"] < 10
