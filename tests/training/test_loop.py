"""The loop against a loop written by hand, and what it must leave alone."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from lambdahat import optim
from lambdahat._core.progress import progress
from lambdahat._core.rng import derived_seed, generator
from lambdahat.problem import Problem
from lambdahat.results import Result, Status
from lambdahat.training import EarlyStopping, fit, make_tracker
from tests.cases import LanguageModel, sentences
from tests.training.small_runs import TEST, TRAIN, Setup, StepCount, network, plain, same, timeless

X, Y = TRAIN


def by_hand(model, epochs, batch_size=64, seed=3, lr=0.1):
    """SGD with momentum and a cosine schedule, as anybody would write it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    losses = []
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(seed, "training"))
        for epoch in range(epochs):
            order = torch.randperm(len(X), generator=generator(seed, f"epoch {epoch}"))
            total = 0.0
            for indices in order.split(batch_size):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(X[indices]), Y[indices])
                loss.backward()
                optimizer.step()
                total += float(loss.detach().double()) * len(indices)
            losses.append(total / len(X))
            schedule.step()
    return losses


@pytest.mark.parametrize("make", [plain, network])
def test_equals_a_loop_written_by_hand_bit_for_bit(make):
    setup, model = Setup("sgd", make()), make()
    run = setup.fit(3)
    losses = by_hand(model, 3)
    assert same(setup.tensors, model.state_dict())
    assert [row["loss"] for row in run.epochs] == pytest.approx(losses, rel=1e-12)
    model.eval()
    with torch.no_grad():
        right = (model(TEST[0]).argmax(1) == TEST[1]).double().mean()
        loss = F.cross_entropy(model(TEST[0]), TEST[1])
    assert run.last["validation_accuracy"] == pytest.approx(float(right), rel=1e-12)
    assert run.last["validation_loss"] == pytest.approx(float(loss), rel=1e-6)


def test_rows_say_what_happened():
    setup = Setup("sgd", plain())
    start = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
    run = setup.fit(2, batch_size=300, accuracy=None)
    end = torch.cat([p.detach().flatten() for p in setup.model.parameters()]).double()
    assert [row["epoch"] for row in run.epochs] == [1, 2]
    assert [row["step"] for row in run.epochs] == [1, 2]
    first, last = run.epochs
    assert last["norm"] == pytest.approx(float(end.norm()), rel=1e-6)
    assert last["max_norm"] == pytest.approx(float(end.abs().max()), rel=1e-12)
    assert last["distance"] == pytest.approx(float((end - start).norm()), rel=1e-5)
    assert first["learning_rate"] == 0.1
    assert last["learning_rate"] == pytest.approx(0.1 * (1 + math.cos(math.pi / 3)) / 2)
    # one batch: the loss and gradient of the first epoch
    before = Problem(plain(), "cross_entropy", TRAIN)
    assert first["loss"] == pytest.approx(before.loss(), rel=1e-6)
    assert first["gradient_norm"] == pytest.approx(float(before.gradient().norm()), rel=1e-5)
    assert first["update_norm"] == first["gradient_norm"]
    epochs, losses = run.column("loss")
    assert (epochs.tolist(), losses.tolist()) == ([1.0, 2.0], [first["loss"], last["loss"]])


def test_the_update_norm_is_the_optimisers_own():
    class Halved(torch.optim.SGD):
        def step(self, closure=None):
            self.update_norm = torch.tensor(0.5)
            return super().step(closure)

    model = plain()
    run = fit(Problem(model, "cross_entropy", TRAIN), Halved(model.parameters(), lr=0.1), 1)
    assert run.last["update_norm"] == 0.5
    assert run.last["gradient_norm"] != 0.5
    wrapped = optim.Lookahead(Halved(model.parameters(), lr=0.1))
    assert fit(Problem(model, "cross_entropy", TRAIN), wrapped, 1).last["update_norm"] == 0.5


@pytest.mark.parametrize("form", ["dataset", "loader", "list", "dict", "own batches"])
def test_the_form_of_the_data_does_not_matter(form):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain()

        def forward(self, x):
            return self.inner(x)

    data = {
        "dataset": TensorDataset(X, Y),
        "loader": DataLoader(TensorDataset(X, Y), batch_size=50),
        "list": [(X[:100], Y[:100]), (X[100:], Y[100:])],
        "dict": {"x": X, "labels": Y},
        "own batches": [
            (X[order], Y[order])
            for order in torch.randperm(300, generator=generator(3, "epoch 0")).split(64)
        ],
    }[form]
    model, reference = Named(), Setup("sgd", plain())
    reference.fit(1)
    options = {"batch_size": None} if form == "own batches" else {"batch_size": 64}
    fit(
        Problem(model, "cross_entropy", data),
        torch.optim.SGD(model.parameters(), 0.1, 0.9),
        1,
        seed=3,
        **options,
    )
    if form == "own batches":  # in another order: only near
        for a, b in zip(model.inner.parameters(), reference.model.parameters(), strict=True):
            assert torch.allclose(a, b, atol=0.1)
        assert not same(model.inner.state_dict(), reference.tensors)
    else:
        assert same(model.inner.state_dict(), reference.tensors)


def test_data_that_do_not_fit_are_read_sample_by_sample(monkeypatch):
    class Samples(Dataset):
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            return X[index], Y[index]

    monkeypatch.setattr("lambdahat.problem.batches.free_memory", lambda device: 0)
    model, reference = plain(), Setup("sgd", plain())
    problem = Problem(model, "cross_entropy", Samples(), batch_size=100)
    assert not problem.batches.in_memory
    fit(problem, torch.optim.SGD(model.parameters(), 0.1, 0.9), 1, batch_size=64, seed=3)
    reference.fit(1)
    assert same(model.state_dict(), reference.tensors)


class Numbers(Dataset):
    """Sample i is i; workers must have been made ready."""

    ready = False

    def __len__(self):
        return 20

    def __getitem__(self, index):
        assert get_worker_info() is None or Numbers.ready
        return torch.full((1,), float(index)), torch.zeros(1)


ODD = [3, 3, 7, 5, 19, 2, 2]
LOADERS = {
    "a sampler": ({"sampler": ODD, "batch_size": 4}, ODD),
    "batches by hand": ({"batch_sampler": [[3, 4], [9, 8, 7]]}, [3, 4, 7, 8, 9]),
    "whole batches": ({"batch_size": 6, "drop_last": True}, list(range(18))),
    "workers that are prepared": (
        {
            "batch_size": 6,
            "num_workers": 1,
            "worker_init_fn": lambda worker: setattr(Numbers, "ready", True),
        },
        list(range(20)),
    ),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("fits", [True, False])
def test_a_loaders_own_samples_are_drawn(name, fits, monkeypatch):
    if not fits:
        monkeypatch.setattr("lambdahat.problem.batches.free_memory", lambda device: 0)
    options, expected = LOADERS[name]
    model, seen = nn.Linear(1, 1), []
    problem = Problem(model, "mse", DataLoader(Numbers(), **options))
    assert problem.batches.in_memory is fits

    def look(inputs, generator):
        seen.extend(inputs.flatten().tolist())
        return inputs

    fit(problem, torch.optim.SGD(model.parameters(), lr=1e-6), 1, batch_size=3, augment=look)
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (list(torch.arange(12.0).view(3, 4, 1).unbind()), {"batch_size": None}),
        (Numbers(), {"collate_fn": lambda rows: (torch.ones(2 * len(rows), 1),) * 2}),
    ],
    ids=["a data set of batches", "two samples for every one"],
)
def test_samples_that_no_key_names_are_not_drawn(data, options, monkeypatch):
    class Listed(Dataset):
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            return data[index] if isinstance(data, Dataset) else (data[index], data[index])

    monkeypatch.setattr("lambdahat.problem.batches.free_memory", lambda device: 0)
    model = nn.Linear(1, 1)
    problem = Problem(model, "mse", DataLoader(Listed(), **options))
    with pytest.raises(ValueError, match="batch_size must be None where samples cannot be drawn"):
        fit(problem, torch.optim.SGD(model.parameters(), lr=0.1), 1, batch_size=2)


def test_models_with_their_own_loss_and_ignored_labels():
    model = LanguageModel()
    problem = Problem(model, "model", sentences(8))
    run = fit(problem, torch.optim.Adam(model.parameters(), lr=0.05), 10, batch_size=4)
    assert run.last["loss"] < run.epochs[0]["loss"]
    assert math.isnan(run.last["accuracy"])
    model = LanguageModel()
    problem = Problem(model, "cross_entropy", sentences(8))
    run = fit(problem, torch.optim.Adam(model.parameters(), lr=0.05), 40, batch_size=8)
    data = sentences(8)
    kept = data["labels"] != -100
    with torch.no_grad():
        right = model(data["input_ids"], data["attention_mask"]).logits.argmax(-1) == data["labels"]
    accuracy = fit(problem, torch.optim.SGD(model.parameters(), lr=1e-12), 1, batch_size=8).last[
        "accuracy"
    ]
    assert accuracy == pytest.approx(float(right[kept].double().mean()))


def test_a_class_that_is_ignored_is_never_met():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3), torch.randn(40, 4)
    y = torch.arange(40) % 3
    problem = Problem(model, torch.nn.CrossEntropyLoss(ignore_index=2), (x, y))
    with torch.no_grad():
        expected = (model(x).argmax(1) == y)[y != 2].double().mean()
    found = fit(problem, torch.optim.SGD(model.parameters(), lr=1e-12), 1, batch_size=40).last[
        "accuracy"
    ]
    assert found == pytest.approx(float(expected))


def test_an_output_function_is_trained_as_one_function_is():
    params = {"w": torch.zeros(4, 3, requires_grad=True)}
    x, y = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    problem = Problem.from_function(lambda p, x: x @ p["w"], params, (x, y), loss="cross_entropy")
    run = fit(problem, torch.optim.SGD(list(params.values()), lr=0.5), 5, batch_size=40)
    assert run.last["loss"] < run.epochs[0]["loss"]
    assert float(params["w"].detach().abs().sum()) > 0


def test_a_problem_made_of_a_function():
    weights = {"w": torch.tensor([2.0, -1.0], requires_grad=True)}
    problem = Problem.from_function(lambda p: (p["w"] ** 2).sum(), weights)
    run = fit(problem, torch.optim.SGD([weights["w"]], lr=0.25), 3)
    assert torch.equal(weights["w"].detach(), torch.tensor([0.25, -0.125]))  # w ← w − 0.25·2w
    assert run.last["loss"] == 0.5**2 + 0.25**2
    slope = {"w": torch.zeros(64, requires_grad=True)}
    problem = Problem.from_function(
        lambda p, batch: (batch[0] @ p["w"] - batch[1]).square().mean(), slope, TRAIN
    )
    run = fit(problem, torch.optim.SGD([slope["w"]], lr=0.01), 5, validation=TEST)
    assert run.last["validation_loss"] < run.epochs[0]["validation_loss"]


@pytest.mark.parametrize("pieces", [2, 3])
def test_accumulation_equals_one_large_batch(pieces):
    models = [plain().double() for _ in range(2)]
    for model, options in zip(
        models, ({"batch_size": 40 * pieces}, {"batch_size": 40, "accumulate": pieces}), strict=True
    ):
        # 300 samples: the last step is a short one
        problem = Problem(model, "cross_entropy", (X.double(), Y))
        run = fit(problem, torch.optim.SGD(model.parameters(), 0.1, 0.9), 2, **options)
        assert run.last["step"] == 2 * math.ceil(300 / (40 * pieces))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_clipping_bounds_the_step():
    model = plain()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    fit(
        Problem(model, "cross_entropy", TRAIN),
        torch.optim.SGD(model.parameters(), lr=1.0),
        1,
        batch_size=300,
        clip=1e-3,
    )
    after = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert float((after - before).norm()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_trains_float32_parameters(precision):
    setup, whole = Setup("sgd", plain()), Setup("sgd", plain())
    run, reference = setup.fit(3, precision=precision), whole.fit(3)
    assert all(p.dtype == torch.float32 for p in setup.model.parameters())
    assert run.last["loss"] == pytest.approx(reference.last["loss"], rel=0.05)
    assert not same(setup.tensors, whole.tensors)


def test_steps_that_a_scaled_loss_skips_are_no_divergence(tmp_path):
    """Inputs so large that the first gradients overflow at the first scale."""

    def train(**options):
        model = plain()
        problem = Problem(model, "cross_entropy", (50 * X, Y))
        run = fit(
            problem,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            2,
            batch_size=64,
            precision="float16",
            **options,
        )
        return model, run

    (model, run), (kept, again) = train(), train(folder=tmp_path, checkpoint_steps=1)
    assert again.last["step"] == 10
    assert same(kept.state_dict(), model.state_dict())
    assert timeless(again.history) == timeless(run.history)
    assert all(
        math.isfinite(row[name]) for row in run.epochs for name in ("update_norm", "gradient_norm")
    )


def test_decoupled_regularizers_rest_on_skipped_steps():
    model = plain()
    before = plain().state_dict()
    run = fit(
        Problem(model, "cross_entropy", (1e4 * X, Y)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        1,
        batch_size=300,
        precision="float16",
        regularizers=[optim.L2(0.1, decoupled=True)],
    )
    assert math.isnan(run.last["gradient_norm"])  # the only step was skipped
    assert same(model.state_dict(), before)
    fit(
        Problem(model, "cross_entropy", TRAIN),
        torch.optim.SGD(model.parameters(), lr=0.0),
        1,
        batch_size=300,
        precision="float16",
        regularizers=[optim.L2(0.1, decoupled=True)],
    )
    assert torch.allclose(model[0].weight, 0.9 * before["0.weight"])


def test_a_metric_that_comes_late_is_not_judged_before():
    def train(metric, **options):
        model = plain()
        average = optim.IterateAverage(model, start=3)
        return fit(
            Problem(model, "cross_entropy", TRAIN),
            torch.optim.SGD(model.parameters(), lr=0.1),
            6,
            validation=TEST,
            averaging=average,
            early_stopping=EarlyStopping(2, metric),
            **options,
        )

    run = train("average_validation_loss")
    seen = {
        row["epoch"]: row["average_validation_loss"]
        for row in run.epochs
        if "average_validation_loss" in row
    }
    assert min(seen) == 3
    assert run.best["epoch"] == min(seen, key=seen.get)
    # which rises: the first is the best
    run = train("count_epoch", trackers=[StepCount(2, "epoch")])
    assert run.best["epoch"] == 2
    # after two that were judged and no better
    assert (run.ended, len(run)) == ("early stopping", 6)
    with pytest.raises(ValueError, match="metric of early stopping must be one of"):
        train("f1", trackers=[StepCount(2, "epoch")])


def test_trackers_by_name():
    def columns(trackers):
        model = plain()
        problem = Problem(model, "cross_entropy", TRAIN)
        run = fit(problem, torch.optim.SGD(model.parameters(), lr=0.1), 1, trackers=trackers)
        return {name: run.column(name)[1][-1] for name in ("trace", "norms_l2")}

    made = columns([make_tracker("trace"), make_tracker("norms")])
    assert columns("trace,norms") == made
    assert columns([make_tracker("norms"), "trace"]) == made


def test_early_stopping_and_the_best_epoch():
    def train(**options):
        model = plain()
        problem = Problem(model, "cross_entropy", TRAIN)
        watch = EarlyStopping(2, "validation_accuracy", **options)
        run = fit(
            problem,
            torch.optim.SGD(model.parameters(), lr=0.5),
            200,
            validation=TEST,
            early_stopping=watch,
        )
        return model, run

    model, run = train()
    seen = [row["validation_accuracy"] for row in run.epochs]
    assert run.ended == "early stopping"
    assert run.status is Status.CONVERGED
    assert len(run) < 200
    assert run.best["validation_accuracy"] == max(seen)
    assert len(run) - run.best["epoch"] == 2
    restored, again = train(restore=True)
    assert timeless(again.history) == timeless(run.history)
    with torch.no_grad():
        accuracy = (restored(TEST[0]).argmax(1) == TEST[1]).double().mean()
    assert float(accuracy) == run.best["validation_accuracy"]
    assert not same(restored.state_dict(), model.state_dict())


def test_an_optimiser_with_patience_averages_and_stops():
    model = plain()
    optimizer = optim.GadamAuto(model.parameters(), lr=0.3, patience=2)
    run = fit(Problem(model, "cross_entropy", TRAIN), optimizer, 100, validation=TEST)
    assert optimizer.stopped
    assert run.ended == "early stopping"
    averaged = optimizer.averaged_model(model)
    with torch.no_grad():
        assert run.averaged["average_validation_loss"] == pytest.approx(
            float(F.cross_entropy(averaged(TEST[0]), TEST[1])), rel=1e-6
        )


@pytest.mark.parametrize(("t0", "there"), [(1, True), (9, False)])
def test_the_average_of_asgd_is_judged(t0, there):
    model = plain()
    optimizer = optim.ASGD(model.parameters(), lr=0.1, t0=t0)
    # 10 steps
    run = fit(Problem(model, "cross_entropy", TRAIN), optimizer, 2, batch_size=64, validation=TEST)
    assert optimizer.averaging is there
    assert ("average_validation_loss" in run.averaged) is there
    if there:
        with torch.no_grad():
            loss = F.cross_entropy(optimizer.averaged_model(model)(TEST[0]), TEST[1])
        assert run.averaged["average_validation_loss"] == pytest.approx(float(loss), rel=1e-6)


def test_the_average_has_batch_norm_statistics_of_its_own():
    setup = Setup("averaged")
    run = setup.fit(2)
    average = setup.options["averaging"].model
    inputs = average[0](X[torch.randperm(300, generator=generator(3, "epoch 0"))])
    means = torch.stack([part.mean(0) for part in inputs.split(64)]).mean(0)
    assert torch.allclose(average[1].running_mean, means, atol=1e-5)
    assert run.last["average_validation_loss"] == run.averaged["average_validation_loss"]


def test_a_loss_that_is_not_finite_ends_the_run():
    model = plain()
    run = fit(
        Problem(model, "cross_entropy", TRAIN),
        torch.optim.SGD(model.parameters(), lr=1e30),
        5,
        batch_size=32,
    )
    assert run.status is Status.TRAINING_DIVERGED
    assert run.ended == "diverged"
    assert len(run) < 5
    assert math.isnan(run.last["loss"])
    assert "lower the learning rate" in str(run)


@pytest.mark.parametrize("stop", [None, ValueError, KeyboardInterrupt])
def test_modes_generators_and_gradients_come_back(stop):
    class Stops:
        name, every, unit = "stops", 2, "step"

        def measure(self, problem, optimizer, epoch, step):
            raise stop

    setup = Setup("sgd")
    setup.model.eval()
    setup.model[3].train()
    modes = [layer.training for layer in setup.model.modules()]
    random = torch.get_rng_state()
    if stop is None:
        setup.fit(1)
    else:
        with pytest.raises(stop):
            setup.fit(1, trackers=[Stops()])
    assert [layer.training for layer in setup.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert [layer.training for layer in setup.problem.model.modules()] == [False] * 6


def test_trackers_add_columns_and_change_nothing():
    bare, tracked = Setup("sgd"), Setup("sgd")
    run = tracked.fit(2, trackers=[StepCount(2, "step"), StepCount(2, "epoch")])
    bare.fit(2)
    assert same(bare.tensors, tracked.tensors)
    assert [(row["kind"], row["step"]) for row in run.history] == [
        ("step", 2),
        ("step", 4),
        ("epoch", 5),
        ("step", 6),
        ("step", 8),
        ("step", 10),
        ("epoch", 10),
    ]
    assert run.column("count_step")[0].tolist() == [2 / 5, 4 / 5, 6 / 5, 8 / 5, 2.0]
    assert run.last["count_epoch"] == 1.0
    assert math.isnan(run.last["count_epoch_nan"])
    assert run.last["count_epoch_loss"] == tracked.problem.loss()


def test_curvature_is_observed_when_due():
    class Curved(torch.optim.SGD):
        seen = ()

        @property
        def due(self):
            return len(self.seen) < 2

        def observe(self, problem):
            self.seen = (*self.seen, problem)

    model = plain()
    optimizer = Curved(model.parameters(), lr=0.1)
    fit(Problem(model, "cross_entropy", TRAIN), optimizer, 1, batch_size=64, curvature_samples=40)
    first, second = optimizer.seen
    assert first.num_samples == second.num_samples == 40
    assert not torch.equal(first.batches.first().data[0], second.batches.first().data[0])
    assert torch.equal(first.vector, torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_curvature_of_a_loss_that_is_not_finite_ends_the_run():
    model = plain()
    optimizer = optim.LanczosNewton(model.parameters(), lr=1e35, damping=1.0, pairs=2)
    run = fit(Problem(model, "cross_entropy", TRAIN), optimizer, 5, batch_size=32)
    assert run.status is Status.TRAINING_DIVERGED
    assert len(run) == 1


def test_regularizers_get_the_product_of_the_step():
    class Curl:
        needs_product = True

        def __init__(self, strength):
            self.strength, self.steps = strength, []

        def add_to(self, parameters, product, step):
            self.steps.append(step)
            for parameter, part in zip(
                parameters, product([p.detach() for p in parameters]), strict=True
            ):
                parameter.grad += self.strength * part

    model, hand = plain().double(), plain().double()
    data = (X[:64].double(), Y[:64])
    rule = Curl(0.3)
    fit(
        Problem(model, "cross_entropy", data),
        torch.optim.SGD(model.parameters(), lr=0.1),
        2,
        batch_size=64,
        regularizers=[rule],
    )
    pieces = plain().double()
    fit(
        Problem(pieces, "cross_entropy", data),
        torch.optim.SGD(pieces.parameters(), lr=0.1),
        2,
        batch_size=16,
        accumulate=4,
        regularizers=[Curl(0.3)],
    )
    for _ in range(2):
        theta = list(hand.parameters())
        problem = Problem(hand, "cross_entropy", data)
        vector = problem.vector
        hessian = torch.func.hessian(
            lambda v, problem=problem: problem.batch_loss(problem.named(v), problem.batches.first())
        )
        step = problem.gradient() + 0.3 * hessian(vector) @ vector
        with torch.no_grad():
            for parameter, part in zip(theta, problem.space.split(step), strict=True):
                parameter -= 0.1 * part
    assert rule.steps == [0, 1]
    for a, b, c in zip(model.parameters(), hand.parameters(), pieces.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-10)
        assert torch.allclose(c, b, atol=1e-10)


def test_regularizers_know_layers_of_parameters_in_groups():
    """Weights and biases have groups of their own, in another order than the model's layers."""
    ends = []
    for grouped in (False, True):
        model = plain()
        groups = list(model.parameters())
        groups = [{"params": groups[::2]}, {"params": groups[1::2]}] if grouped else groups
        rule = optim.SelectiveL2(0.5, 0.5, layers=optim.layers_of(model))
        fit(
            Problem(model, "cross_entropy", TRAIN),
            torch.optim.SGD(groups, lr=0.1),
            1,
            regularizers=[rule],
        )
        ends.append(model.state_dict())
    assert same(*ends)


@pytest.mark.parametrize("name", ["exact-ngd", "lanczos-newton", "spectral-sgd", "kfac"])
def test_curvature_is_observed_for_parameters_in_groups(name):
    model = nn.Sequential(nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 10))
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.01}, {"params": parameters[1::2]}]
    own = {
        "exact-ngd": lambda: optim.ExactNGD(groups, lr=0.1, alpha=10.0),
        "lanczos-newton": lambda: optim.LanczosNewton(groups, lr=0.1, damping=1.0, pairs=5),
        "spectral-sgd": lambda: optim.SpectralSGD(groups, every=2, depth=5),
        "kfac": lambda: optim.KFAC(model, 0.01, parameters=groups, fisher="monte_carlo"),
    }
    run = fit(Problem(model, "cross_entropy", TRAIN), own[name](), 2)
    assert run.last["loss"] < run.epochs[0]["loss"]


def test_augmentation_sees_each_batch_once_with_its_own_stream():
    seen = []

    def shift(inputs, rng):
        seen.append((inputs.shape, float(torch.rand((), generator=rng))))
        return inputs + 1.0

    model = plain()
    run = fit(
        Problem(model, "cross_entropy", TRAIN),
        torch.optim.SGD(model.parameters(), lr=1e-9),
        1,
        batch_size=300,
        augment=shift,
    )
    assert [shape for shape, _ in seen] == [(300, 64)]
    shifted = Problem(plain(), "cross_entropy", (X + 1.0, Y))
    assert run.last["loss"] == pytest.approx(shifted.loss(), rel=1e-5)
    fit(
        Problem(model, "cross_entropy", TRAIN),
        torch.optim.SGD(model.parameters(), lr=1e-9),
        2,
        augment=shift,
    )
    # the first batch of the first epoch, twice
    assert len({draw for _, draw in seen}) == len(seen) - 1


def test_accuracy_by_the_users_rule():
    model = plain()
    one_hot = F.one_hot(Y, 10).float()
    problem = Problem(model, "mse", (X, one_hot))
    run = fit(
        problem,
        torch.optim.SGD(model.parameters(), lr=1e-12),
        1,
        accuracy=lambda output, target: output.argmax(1) == target.argmax(1),
    )
    with torch.no_grad():
        assert run.last["accuracy"] == pytest.approx(
            float((model(X).argmax(1) == Y).double().mean())
        )


def test_progress_counts_every_step():
    seen = []
    with progress(lambda task, done, total: seen.append((task, done, total))):
        Setup("sgd").fit(2)
    assert [entry for entry in seen if entry[0] == "training"] == [
        ("training", step, 10) for step in range(1, 11)
    ]


def test_a_run_saves_and_loads(tmp_path):
    run = Setup("sgd").fit(1)
    loaded = Result.load(run.save(tmp_path / "run.json"))
    assert timeless(loaded.history) == timeless(run.history)
    assert str(loaded) == str(run)
    assert (loaded.ended, loaded.status) == ("epochs", Status.CONVERGED)
