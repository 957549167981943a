"""``kill -9`` at random moments: the run goes on to the same bits, and no row is lost or
doubled.
"""

import multiprocessing
import os
import random
import signal
import time
import warnings

import pytest
import torch
from torch import nn

from lambdahat import optim
from lambdahat._core.progress import progress
from lambdahat.data import digits_split
from lambdahat.problem import Problem
from lambdahat.training import Checkpoints, fit, read_rows
from lambdahat.training.checkpoints import read
from lambdahat.training.trackers import make_trackers
from tests.training.small_runs import network, same, timeless

STEPS_AN_EPOCH = 6


def train(folder, epochs, told):
    """A tracked run on digits with all that has a state; one byte goes to ``told`` for every
    step.
    """
    torch.set_num_threads(1)
    (x, y), (x_test, y_test) = digits_split(seed=0)
    model: nn.Module = network()
    optimizer = optim.Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01), k=4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    average = optim.IterateAverage(model, "ema", unit="step", decay=0.9)
    trackers = [
        *make_trackers("trace", samples=50, every=2),
        *make_trackers("norms", samples=50, every=4, unit="step"),
    ]
    with progress(lambda task, *_: os.write(told, b".") if task == "training" else None):
        fit(
            Problem(model, "cross_entropy", (x[:300], y[:300])),
            optimizer,
            epochs,
            batch_size=50,
            schedule=schedule,
            averaging=average,
            validation=(x_test[:100], y_test[:100]),
            trackers=trackers,
            folder=folder,
            resume=True,
            checkpoint_steps=4,
            seed=1,
        )


def start(folder, epochs):
    """A child that trains, and the end of a pipe that tells of its steps."""
    hears, tells = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=train, args=(folder, epochs, tells))
    with warnings.catch_warnings():  # Python 3.12 warns of threads; the child takes one only
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    os.close(tells)
    return child, hears


def finish(folder, epochs):
    child, hears = start(folder, epochs)
    while os.read(hears, 4096):
        pass
    os.close(hears)
    child.join()
    assert child.exitcode == 0


def kill_at_random(folder, epochs, rng):
    """Kill the child a little after a random number of its steps; whether it was still running."""
    child, hears = start(folder, epochs)
    for _ in range(rng.randint(0, 7)):
        if not os.read(hears, 1):
            break
    # anywhere in a step, a measurement or the writing of a checkpoint
    time.sleep(rng.random() * 0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    os.close(hears)
    return child.exitcode == -signal.SIGKILL


def assert_same_after_kills(tmp_path, kills, epochs, seed):
    # what torch imports late is imported once, here, and not by every child
    with open(os.devnull, "wb") as nobody:
        train(tmp_path / "warm", 1, nobody.fileno())
    rng = random.Random(seed)
    done = sum(kill_at_random(tmp_path / "killed", epochs, rng) for _ in range(kills))
    finish(tmp_path / "killed", epochs)
    finish(tmp_path / "whole", epochs)
    states = [
        read(Checkpoints(tmp_path / name / "checkpoints").paths()[-1])[1]
        for name in ("killed", "whole")
    ]
    assert [state["step"] for state in states] == [STEPS_AN_EPOCH * epochs] * 2
    assert same(states[0]["model"], states[1]["model"])
    first, second = (
        timeless(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("killed", "whole")
    )
    assert first == second
    assert [row["epoch"] for row in first if row["kind"] == "epoch"] == list(range(1, epochs + 1))
    lines = [
        (tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("killed", "whole")
    ]
    assert len(lines[0]) == len(lines[1]) == len(first) + 1
    return done


def test_three_kills(tmp_path):
    assert assert_same_after_kills(tmp_path, 3, epochs=4, seed=0) >= 2


@pytest.mark.slow
def test_a_hundred_kills(tmp_path):
    assert assert_same_after_kills(tmp_path, 100, epochs=70, seed=1) == 100
