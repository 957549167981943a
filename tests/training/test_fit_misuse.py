"""Misuses of the loop: each gets an error that names the argument and the cure."""

import math
from functools import partial

import pytest
import torch

from lambdahat.optim import KFAC, L2, IterateAverage, Metric, schedules
from lambdahat.optim.registry import make_optimizer, make_regularizer
from lambdahat.problem import Problem
from lambdahat.training import EarlyStopping, fit
from lambdahat.training.checkpoints import load_run, weights
from tests.training.small_runs import TEST, TRAIN, plain


def call(epochs=1, optimizer=None, problem=None, **options):
    model = plain()
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    )
    return fit((problem or digits)(model), optimizer, epochs, **options)


def digits(model, **options):
    return Problem(model, "cross_entropy", TRAIN, **options)


def elsewhere(model):
    return digits(model).at(digits(model).vector)


def on_odd_batches(**options):
    """Sequences of different lengths, which no one tensor holds."""
    model = torch.nn.Sequential(
        torch.nn.AdaptiveAvgPool1d(4), torch.nn.Flatten(), torch.nn.Linear(4, 2)
    )
    data = [(torch.ones(3, 1, length), torch.zeros(3, dtype=torch.long)) for length in (5, 6)]
    return fit(
        Problem(model, "cross_entropy", data),
        torch.optim.SGD(model.parameters(), lr=0.1),
        2,
        **options,
    )


def on_words(**options):
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, **options), torch.nn.Flatten())
    problem = Problem(model, "cross_entropy", (torch.tensor([[1], [3]]), torch.tensor([0, 1])))
    return fit(problem, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def other(kind):
    return lambda model: kind(plain().parameters(), lr=0.1)


MISUSES = {
    "a model as problem": (lambda: fit(plain(), None, 1), TypeError, r"make one with lh\.Problem"),
    "an optimiser's class": (
        lambda: call(optimizer=lambda m: torch.optim.SGD),
        TypeError,
        "optimizer must be a torch",
    ),
    "an optimiser of another model": (
        lambda: call(optimizer=other(torch.optim.SGD)),
        ValueError,
        r"optimizer must hold parameters of the problem's own model.*4 others",
    ),
    "a closure": (
        lambda: call(optimizer=lambda m: torch.optim.LBFGS(m.parameters())),
        ValueError,
        "without a closure",
    ),
    "parameters without gradients": (
        lambda: call(
            optimizer=lambda m: torch.optim.SGD(
                [p.requires_grad_(i > 1) for i, p in enumerate(m.parameters())]
            )
        ),
        ValueError,
        "that require gradients",
    ),
    "a problem elsewhere": (
        lambda: call(problem=elsewhere),
        ValueError,
        "problem must follow its model.*at()",
    ),
    "a problem in another dtype": (
        lambda: call(problem=partial(digits, dtype=torch.float64)),
        ValueError,
        "problem must have its model's own dtype",
    ),
    "no epochs": (lambda: call(0), ValueError, "epochs must be an integer of at least 1, got 0"),
    "half an epoch": (lambda: call(0.5), TypeError, "epochs must be an integer"),
    "an empty batch": (
        lambda: call(batch_size=0),
        ValueError,
        "batch_size must be an integer of at least 1",
    ),
    "no accumulation": (
        lambda: call(accumulate=0),
        ValueError,
        "accumulate must be an integer of at least 1",
    ),
    "an unknown precision": (
        lambda: call(precision="float8"),
        ValueError,
        "precision must be one of 'float32'",
    ),
    "a clip of 0": (lambda: call(clip=0.0), ValueError, "clip must be a finite number above 0"),
    "a negative seed": (lambda: call(seed=-1), ValueError, "seed must be an integer of at least 0"),
    "keeping none": (lambda: call(keep=0), ValueError, "keep must be an integer of at least 1"),
    "an unknown unit": (
        lambda: call(schedule_unit="batch"),
        ValueError,
        "schedule_unit must be one of",
    ),
    "a schedule's name": (
        lambda: call(schedule="cosine"),
        TypeError,
        r"be a scheduler.*schedules\.cosine",
    ),
    "a schedule of another": (
        lambda: call(schedule=schedules.flat(other(torch.optim.SGD)(None), 1)),
        ValueError,
        "schedule must be of this optimizer",
    ),
    "a regularizer alone": (
        lambda: call(regularizers=L2(0.1)),
        TypeError,
        "regularizers must be a list",
    ),
    "a number as regularizer": (
        lambda: call(regularizers=[0.1]),
        TypeError,
        "regularizers must have add_to",
    ),
    "trackers of no list": (lambda: call(trackers=3), TypeError, "trackers must be a list"),
    "a misspelt tracker": (lambda: call(trackers="trase"), ValueError, "did you mean 'trace'"),
    "averaging by name": (
        lambda: call(averaging="ema"),
        TypeError,
        "averaging must be an IterateAverage",
    ),
    "an unknown logger": (
        lambda: call(loggers=["comet"]),
        ValueError,
        "loggers must be one of 'csv', 'tensorboard', 'wandb', 'mlflow'",
    ),
    "a logger without close": (
        lambda: call(loggers=[print]),
        TypeError,
        "loggers must be among csv, .* or have log",
    ),
    "loggers as text": (lambda: call(loggers="wandb"), TypeError, "loggers must be a list"),
    "augmentation by name": (lambda: call(augment="crop"), TypeError, "augment must be a function"),
    "accuracy by name": (lambda: call(accuracy="top5"), TypeError, "accuracy must be a function"),
    "resuming nothing": (lambda: call(resume=True), ValueError, "resume must come with the folder"),
    "checkpoints nowhere": (
        lambda: call(checkpoint_steps=5),
        ValueError,
        "checkpoint_steps must come with a folder",
    ),
    "watching nothing": (
        lambda: call(early_stopping=3),
        ValueError,
        "validation must be given for early stopping",
    ),
    "watching the unknown": (
        lambda: call(validation=TEST, early_stopping=EarlyStopping(3, "f1")),
        ValueError,
        "metric of early stopping must be one of kind, epoch.*got 'f1'",
    ),
    "no patience": (
        lambda: call(validation=TEST, early_stopping=0),
        ValueError,
        "early_stopping must be an integer",
    ),
    "a negative margin": (
        lambda: EarlyStopping(3, least=-1.0),
        ValueError,
        "least must be at least 0",
    ),
    "patience without validation": (
        lambda: call(optimizer=lambda m: make_optimizer("gadam-auto", m)),
        ValueError,
        "validation must be given to an optimiser with a patience",
    ),
    "scaled products": (
        lambda: call(precision="float16", regularizers=[Metric(0.1)]),
        ValueError,
        'precision must be "float32" or "bfloat16" with a regularizer of curvature',
    ),
    "products beside hooks": (
        lambda: call(optimizer=lambda m: KFAC(m, lr=0.1), regularizers=[Metric(0.1)]),
        ValueError,
        'optimizer must be KFAC with another Fisher.*pass fisher="monte_carlo"',
    ),
    "samples of odd batches": (
        lambda: on_odd_batches(batch_size=2),
        ValueError,
        "batch_size must be None where samples cannot be drawn one by one",
    ),
    "sparse gradients": (
        lambda: on_words(sparse=True),
        ValueError,
        "gradients must be dense, got a sparse one; use sparse=False",
    ),
    "an unknown optimiser": (
        lambda: make_optimizer("sdg", plain()),
        ValueError,
        "name must be one of 'sgd'",
    ),
    "an unknown option": (
        lambda: make_optimizer("sgd", plain(), alpha=1),
        ValueError,
        "options of 'sgd' must be among lr, momentum.*got alpha",
    ),
    "a missing option": (
        lambda: make_optimizer("lanczos-newton", plain(), lr=1.0),
        ValueError,
        "options of 'lanczos-newton' must include damping, got lr",
    ),
    "a missing rate": (
        lambda: make_regularizer("l2"),
        ValueError,
        "options of 'l2' must include rate, got none",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    act, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        act()


def test_batches_of_their_own_are_taken_as_they_are():
    run = on_odd_batches(batch_size=None)
    assert run.last["step"] == 4
    assert run.last["loss"] < run.epochs[0]["loss"]


def test_products_beside_a_sampled_fisher():
    run = call(
        3, optimizer=lambda m: KFAC(m, lr=0.1, fisher="monte_carlo"), regularizers=[Metric(1e-3)]
    )
    assert run.last["loss"] < run.epochs[0]["loss"]


SGD = torch.optim.SGD
CHANGES = {
    "lr": (
        {"optimizer": lambda m: SGD(m.parameters(), lr=0.5)},
        r"lr = \['0.5'\], got one with lr = \['0.1'\]",
    ),
    "momentum": ({"optimizer": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9)}, "momentum = "),
    "weight decay": (
        {"optimizer": lambda m: SGD([{"params": m.parameters(), "weight_decay": 0.1}], lr=0.1)},
        "weight_decay = ",
    ),
    "regularizers": ({"regularizers": [L2(0.2)]}, r"regularizers = \['L2\(rate=0.2"),
    "early stopping": (
        {"early_stopping": EarlyStopping(4, "loss")},
        "early stopping = .*'patience': 4",
    ),
    "data": (
        {"problem": lambda m: Problem(m, "cross_entropy", (TRAIN[0] + 5, TRAIN[1]))},
        "data = torch.float32",
    ),
    "labels": (
        {"problem": lambda m: Problem(m, "cross_entropy", (TRAIN[0], TRAIN[1].flip(0)))},
        "data = .*int64",
    ),
}


def test_what_differs_from_the_run_in_the_folder_is_named(tmp_path):
    common = {
        "folder": tmp_path,
        "regularizers": [L2(0.1)],
        "early_stopping": EarlyStopping(3, "loss"),
    }
    call(**common)
    for changed, text in CHANGES.values():
        with pytest.raises(ValueError, match=f"folder must hold a run with {text}"):
            call(2, **{**common, **changed}, resume=True)
    assert len(call(2, **common, resume=True)) == 2


def test_the_same_objects_go_on(tmp_path):
    """A schedule has moved the rate, and the run goes on with the optimiser that it left."""
    model = plain()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    for epochs in (3, 5):
        run = fit(digits(model), optimizer, epochs, schedule=schedule, folder=tmp_path, resume=True)
    assert len(run) == 5
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_second_run_of_the_same_process_is_refused(tmp_path):
    class Intruder:
        name, every, unit = "intruder", 1, "step"

        def measure(self, *_):
            with pytest.raises(ValueError, match=r"folder must have one run at a time, got .*run"):
                call(folder=tmp_path / "." / "run", resume=True)
            return {}

    assert len(call(folder=tmp_path / "run", trackers=[Intruder()])) == 1
    assert len(call(2, folder=tmp_path / "run", resume=True, trackers=[Intruder()])) == 2


def test_folders_in_use_and_of_other_runs(tmp_path):
    call(folder=tmp_path)
    with pytest.raises(ValueError, match=r"folder must be new or empty.*pass resume=True"):
        call(folder=tmp_path)
    with pytest.raises(
        ValueError,
        match=r"folder must hold a run with batch_size = 32, got one with batch_size = 128",
    ):
        call(folder=tmp_path, resume=True, batch_size=32)
    with pytest.raises(
        ValueError, match=r"hold a run with optimizer = Adam, got one with optimizer = SGD"
    ):
        call(folder=tmp_path, resume=True, optimizer=lambda m: torch.optim.Adam(m.parameters()))
    with pytest.raises(
        ValueError, match=r"folder must hold a run of the same parts, got one without averaging"
    ):
        call(2, folder=tmp_path, resume=True, averaging=IterateAverage(plain()))
    with pytest.raises(
        FileNotFoundError, match=r"folder must hold config.json.*--checkpoint FOLDER"
    ):
        load_run(tmp_path)
    with pytest.raises(ValueError, match="folder must hold a checkpoint"):
        weights(tmp_path / "nothing")
    assert not math.isnan(float(weights(tmp_path)["0.bias"].sum()))
