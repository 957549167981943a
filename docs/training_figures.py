"""Figures of optimisation: averages and schedules, the edge of stability, a tracked run,
regularizers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lambdahat as lh
from lambdahat.experiments import Store, find
from lambdahat.report.figures import draw
from lambdahat.report.style import AMBER, BLUE, GREEN, GREY, VERMILION, new_figure, tidy

RUNS = Path(__file__).parents[1] / "benchmarks" / "results" / "reproductions"


def averaging() -> Any:
    """Left, the variance of iterate, moving average and average on a noisy quadratic; right, the
    schedules.
    """
    figure = new_figure(8.4, 3.6)
    axes = tidy(figure.add_subplot(1, 2, 1))
    rate, curvature, replicas, steps, decay = 0.1, 1.0, 4000, 1000, 0.9
    rng = torch.Generator().manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(replicas, dtype=torch.float64))])
    optimizer = lh.optim.SWA(model, lr=rate, momentum=0.0, average_start=101)
    moving = lh.optim.IterateAverage(model, "ema", unit="step", decay=decay)
    marks: dict[str, list[tuple[int, float]]] = {
        "iterate": [],
        f"EMA, ρ = {decay}": [],
        "average": [],
    }
    for step in range(1, 100 + steps + 1):  # the first hundred steps forget the start
        model[0].grad = curvature * model[0].detach() + torch.randn(
            replicas, generator=rng, dtype=torch.float64
        )
        optimizer.step()
        moving.update()
        n = step - 100
        if n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000):
            points = (model[0].detach(), moving.model[0].detach(), optimizer.averaged_parameters[0])
            for kept, point in zip(marks.values(), points, strict=True):
                kept.append((n, float(point.square().mean())))
    phi = 1 - rate * curvature
    final = rate / (curvature * (2 - rate * curvature))
    n = np.geomspace(1, steps, 200)
    whole = 1 / (curvature**2 * n) * (1 - 2 * phi * (1 - phi**n) / (n * (1 - phi**2)))
    ema = final * (1 - decay) * (1 + decay * phi) / ((1 + decay) * (1 - decay * phi))
    for (name, kept), line, colour in zip(
        marks.items(), (final, ema, whole), (GREY, AMBER, BLUE), strict=True
    ):
        axes.loglog(n, np.broadcast_to(line, n.shape), color=colour)
        axes.loglog(*zip(*kept, strict=True), "o", color=colour, markersize=4, label=name)
    axes.set_xlabel("iterates n")
    axes.set_ylabel("variance around the minimum")
    axes.legend(frameon=False, fontsize="small")
    _schedules(tidy(figure.add_subplot(1, 2, 2)))
    return axes


def _schedules(axes: Any, epochs: int = 200) -> None:
    """The rate of every schedule over the epochs."""
    colours = {
        "flat": GREY,
        "linear": BLUE,
        "averaging": GREEN,
        "step": VERMILION,
        "cosine": AMBER,
        "inverse-sqrt": "k",
    }
    for name, colour in colours.items():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        settings = {"averaging_start": 160} if name == "averaging" else {}
        schedule = lh.optim.make_schedule(name, optimizer, epochs, **settings)
        rates = []
        for _ in range(epochs):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        axes.plot(rates, color=colour, label=name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("rate / first rate")
    axes.legend(frameon=False, fontsize="small")


def edge_of_stability() -> Any:
    """Learning rate times sharpness along full-batch gradient descent, plain and with momentum,
    and the loss.
    """
    (x, y), _ = lh.data.digits_split(seed=0)
    x, y = x[:1000], nn.functional.one_hot(y[:1000], 10).float()
    figure = new_figure(8.4, 3.6)
    left, right = (tidy(figure.add_subplot(1, 2, place)) for place in (1, 2))
    for (rate, momentum), colour in zip(
        ((0.5, 0.0), (1.0, 0.0), (0.5, 0.5)), (BLUE, VERMILION, GREEN), strict=True
    ):
        model = lh.models.mlp([64, 32, 32, 10], "tanh")
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
        problem = lh.Problem(model, "mse", (x, y))
        with lh.training.tracking(
            problem, [lh.training.make_tracker("edge", 20, "step")], optimizer
        ) as track:
            for step in range(1500):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                track.step(**({"loss": float(loss.detach())} if step % 20 == 19 else {}))
        label = f"α = {rate}" + (f", β = {momentum}" if momentum else "")
        left.plot(*track.run.column("edge"), color=colour, label=label)
        left.plot(*track.run.column("edge_threshold"), color=colour, linestyle="--", linewidth=0.9)
        right.semilogy(*track.run.column("loss"), color=colour, label=label)
    left.set_ylabel("learning rate × sharpness, α·λ₁")
    right.set_ylabel("training loss")
    for axes in (left, right):
        axes.set_xlabel("step")
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize="small", loc="lower right")
    return left


def training() -> Any:
    """The run of the training page."""
    train, test = lh.data.digits_split(seed=0)
    model = lh.models.mlp([64, 32, 10])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = lh.training.fit(
        lh.Problem(model, "cross_entropy", train),
        optimizer,
        20,
        schedule=lh.optim.schedules.cosine(optimizer, 20),
        validation=test,
        trackers=lh.training.make_trackers("trace", every=2),
    )
    return lh.plot(run)


def regularizers() -> Any:
    """The norms under the rules on XOR beside the thesis's, from the stored run of ``reproduce
    xor``.
    """
    figure = new_figure(11.0, 3.8)
    charts = find("xor").charts(Store(RUNS, "xor", "cpu").rows())
    norms = [chart for chart in charts if chart.title.startswith("Norm at the end")]
    for place, chart in enumerate(norms, start=1):
        axes = draw(chart, tidy(figure.add_subplot(1, len(norms), place)))
        for label in axes.get_xticklabels():  # a slanted word ends below its bar
            label.set(rotation=35, horizontalalignment="right", rotation_mode="anchor")
        axes.set(xlabel="", ylim=(3, 60))
        axes.set_yticks([3, 5, 10, 20, 50], ["3", "5", "10", "20", "50"])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize="small", loc="upper center", ncols=2)
    return axes
