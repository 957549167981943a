"""``lambdahat demo``: from an untrained network to its curvature and learning coefficient, on bundled data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lambdahat._progress import report
from lambdahat._rng import generator
from lambdahat.cli.exits import code_of, say
from lambdahat.cli.measurements import bars, headline, write_figures, write_tables
from lambdahat.cli.tables import HEADER, NOTE, print_table, remedies, rows_of, statuses
from lambdahat.data import digits_split
from lambdahat.estimators.landscapes import landscape
from lambdahat.measurements import Measurement
from lambdahat.measuring import measure
from lambdahat.models import mlp
from lambdahat.problem import Problem
from lambdahat.results import Eigenpairs, Landscape

WHAT = ("trace", "frobenius", "spectral_norm", "eigenpairs", "spectrum", "diagonal", "llc")
SAMPLING = {"max_gradients": 8000}  # so that the demonstration stays quick
SIZES = (64, 64, 32, 10)
EPOCHS, BATCH, RATE = 30, 128, 0.01


def run_demo(out: Path, seed: int, quiet: bool) -> int:
    """Train, measure, write and print; the exit code."""
    train, held_out = digits_split(seed)
    with bars(quiet), one_thread():
        model = train_network(train, seed)
        problem = Problem(model, "cross_entropy", train)
        measurement = measure(problem, WHAT, depth=80, top=10, seed=seed, sampling=SAMPLING, folder=out)
        lines = landscapes(problem, measurement["eigenpairs"], held_out)
    measurement = Measurement({**measurement.results, **lines}, measurement.about)
    measurement.save(out)
    write_tables(measurement, out)
    write_figures(measurement, out)
    if not quiet:
        print_table(HEADER, rows_of(measurement), headline(measurement))
        print(NOTE)
        print(f"accuracy {accuracy(model, train):.1%} in training, {accuracy(model, held_out):.1%} held out")
        print(f"figures, tables and results are in {out}")
    for line in remedies(measurement):
        say(line)
    return code_of(statuses(measurement))


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small take longer on several threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def train_network(data: tuple[Tensor, Tensor], seed: int) -> nn.Module:
    """A perceptron trained by Adam, the rate falling linearly to 0."""
    x, y = data
    model = mlp(SIZES, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rng = generator(seed, "demo batches")
    for epoch in range(EPOCHS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - epoch / EPOCHS)
        for rows in torch.randperm(len(x), generator=rng).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        report("train", epoch + 1, EPOCHS)
    return model


def landscapes(problem: Problem, pairs: Eigenpairs, held_out: tuple[Tensor, Tensor]) -> dict[str, Landscape]:
    """The loss along the sharpest direction, and in the plane of the two sharpest."""
    first, second = pairs.vectors[:, 0], pairs.vectors[:, 1]
    names = ("the first eigenvector", "the second eigenvector")
    return {
        "landscape": landscape(problem, first, 1.0, 41, held_out, labels=names[:1]),
        "plane": landscape(problem, [first, second], 1.0, 17, held_out, labels=names),
    }


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Share of samples whose largest logit is the label's."""
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).double().mean())
