"""Averages of weights against ensembles of networks, by weight decay (§7.5.4, Figure 7.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lambdahat._core.rng import derived_seed
from lambdahat.experiments.averaging.averaged_training import (
    FULL,
    change,
    gap,
    image_task,
    pairs,
    recipe,
    shared_settings,
    size_of,
    top_accuracy,
    train,
    unlearnt,
    unready,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, means
from lambdahat.experiments.kit.claims import Claim, Claims, Reading, Table, paired_difference
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.problem.batches import Batches
from lambdahat.results.charts import Chart

AGNOSTIC = 1.0  # points
COLUMNS = {
    "member": "one network, %",
    "ensemble": "ensemble, %",
    "ensemble gain": "its gain",
    "before": "before averaging, %",
    "accuracy": "average, %",
    "average gain": "its gain",
    "distance": "1 − ‖θ̄‖/mean‖θ‖",
}


@dataclass(frozen=True)
class EnsembleScale(Scale):
    """One scale; an ensemble has so many ``members``."""

    network: str
    decays: tuple[float, ...]
    members: int = 3
    side: int = 0
    rate: float = 0.02
    augmented: bool = False
    precision: str = FULL


def cells(config: EnsembleScale) -> list[Cell]:
    """Weight decay × seed; a cell trains one averaged network and the members of an ensemble."""
    base = shared_settings(config, "decays", "seeds")
    return [
        {**base, **recipe("SWA", config.rate, decay, config.epochs), "seed": seed}
        for decay in config.decays
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """One row: the average and the iterate it began at, the members and their ensemble."""
    task = image_task(cell, device)
    trained = train(cell, task)
    end = {**trained.end, **size_of(task), "distance": contraction(trained.rows)}
    members = [member(cell, number, device) for number in range(cell["members"])]
    alone = [top_accuracy(each, task.held_out) for each in members]
    single, together = sum(alone) / len(alone), ensemble_accuracy(members, task.held_out)
    return [
        {
            **end,
            "average gain": end["accuracy"] - end["before"],
            "member": single,
            "ensemble": together,
            "ensemble gain": together - single,
        }
    ]


def contraction(rows: Sequence[Row]) -> float:
    """1 − ‖θ̄‖/mean‖θ‖ over the averaged iterates: 0 where they are all the same."""
    kept = [row for row in rows if row["averaged"]]
    if not kept:
        return 0.0
    return float(1 - kept[-1]["average norm"] / (sum(row["norm"] for row in kept) / len(kept)))


def member(cell: Cell, number: int, device: str) -> nn.Module:
    """A network trained by SGD on the cell's data from another start and order."""
    own = derived_seed(cell["seed"], "member", number)
    plan = recipe("SGD", cell["rate"], cell["decay"], cell["epochs"])
    return train({**cell, **plan, "seed": own}, image_task(cell, device, own)).solution


@torch.no_grad()
def ensemble_accuracy(models: Sequence[nn.Module], batches: Batches) -> float:
    """The accuracy, in per cent, of the mean of the predicted probabilities."""
    hits = count = 0
    for batch in batches:
        x, y = batch.data
        mean = torch.stack([model.eval()(x).softmax(-1) for model in models]).mean(0)
        hits += int((mean.argmax(-1) == y).sum())
        count += len(y)
    return 100 * hits / count


def claims(rows: Rows) -> list[Claim]:
    """What weight decay does to the gain of averages and to that of ensembles."""
    decays = sorted(rows.distinct("decay"))
    none, most = rows.where(decay=decays[0]), rows.where(decay=decays[-1])
    others, unmet = rows.where(decay=decays[1:]), unready(none, most)
    where = "§7.5.4, Figure 7.3b"
    found = Claims()
    sentence = f"averaging gains more at weight decay {decays[-1]:g} than at 0"
    published = "no regularisation corresponds to the lowest improvement"
    reading = gap(most, none, "average gain")
    found.add(sentence, where, published, reading, unit=" points", unmet=unmet)
    found.add(
        "averaging gains more with weight decay than without",
        where,
        "weight decay is essential",
        gap(others, none, "average gain"),
        unit=" points",
        unmet=unready(none, *(rows.where(decay=decay) for decay in decays[1:])),
    )
    sentence = "before averaging strong weight decay is worse"
    published = "it decreases test performance before starting IA"
    reading = gap(most, none, "before")
    found.add(sentence, where, published, reading, "below", unit=" points", unmet=unmet)
    sentence = "after averaging it is better"
    published = "more than makes up for this"
    reading = gap(most, none, "accuracy")
    found.add(sentence, where, published, reading, unit=" points", unmet=unmet)
    sentence = "weight decay raises the gain of averaging more than that of an ensemble"
    source = "§7.5.4, Figure 7.3"
    published = "the ensemble's is largely agnostic to it"
    found.add(sentence, source, published, rises(most, none), unit=" points", unmet=unmet)
    found.add(
        (
            f"the gain of an ensemble at weight decay {decays[-1]:g} is within {AGNOSTIC:g} points"
            " of that at 0"
        ),
        "§7.5.4, Figure 7.3a",
        "largely agnostic to the weight decay",
        gap(most, none, "ensemble gain"),
        "within",
        0.0,
        AGNOSTIC,
        " points",
        unlearnt(none, most),
    )
    sentence = "an ensemble is above its members, over all weight decays"
    source = "§7.5.4, Figure 7.3a"
    reading = change(rows, "ensemble", "member")
    found.add(sentence, source, "it improves", reading, unit=" points", unmet=unlearnt(rows))
    sentence = "averaged iterates lie further apart with weight decay (1 − ‖θ̄‖/mean‖θ‖)"
    published = "a greater solution difference between epochs"
    found.add(sentence, "§7.5.4", published, gap(most, none, "distance"), unmet=unmet)
    return found


def rises(upper: Rows, lower: Rows) -> Reading:
    """(average's gain − ensemble's gain) with weight decay less the same without."""
    differences = []
    for part in (upper, lower):
        ours, theirs = pairs(part, "average gain"), pairs(part, "ensemble gain")
        differences.append({key: ours[key] - theirs[key] for key in ours if key in theirs})
    return paired_difference(*differences)


def tables(rows: Rows) -> list[Table]:
    """Accuracies and gains by weight decay."""
    lines = tuple(
        (f"{decay:g}", *means(rows.where(decay=decay), *COLUMNS))
        for decay in sorted(rows.distinct("decay"))
    )
    title = (
        f"{rows[0]['network']}, {rows[0]['parameters']:,} parameters, {rows[0]['data']}, ensembles"
        f" of {rows[0]['members']}"
    )
    return [Table(title, ("weight decay", *COLUMNS.values()), lines)]


def charts(rows: Rows) -> list[Chart]:
    """Gains and accuracies over weight decay."""
    out = []
    title = "Gain of ensembles and of averages"
    series = (
        curve("ensemble", rows, "ensemble gain", "decay"),
        curve("average", rows, "average gain", "decay"),
    )
    out.append(Chart(title, "weight decay", "points of accuracy", series, source="Figure 7.3"))
    levels = tuple(
        curve(words, rows, column, "decay")
        for column, words in (
            ("member", "one network"),
            ("ensemble", "ensemble"),
            ("before", "before averaging"),
            ("accuracy", "average"),
        )
    )
    out.append(Chart("Accuracy", "weight decay", "accuracy, %", levels, source="Figure 7.3"))
    return out


# data set, training and held-out samples, epochs, seeds
PAPER = ("cifar10", 5_000, 10_000, 30, 3)
EXPERIMENT = Experiment(
    "averaging-ensembles",
    "Averages of weights and ensembles of networks, by weight decay",
    SPECTRAL,
    "§7.5.4, Figure 7.3",
    {
        "smoke": EnsembleScale(
            "digits", 96, 64, 3, 2, "VGG-4×4-BN", (0.0, 5e-3), members=2, batch=32
        ),
        "cpu": EnsembleScale(
            "cifar10", 2000, 4000, 25, 5, "VGG-4×16-BN", (0.0, 1e-3, 3e-3, 1e-2), side=8, batch=64
        ),
        "paper": EnsembleScale(
            *PAPER, "VGG-16-BN", (0.0, 5e-4, 2e-3, 5e-3), augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        CIFAR-10 in place of CIFAR-100, which cannot be had here; 30 epochs of the thesis's 100.
        Ensembles of three networks; their number is not printed.
        Rate 0.02, down to a hundredth for ensembles and to a half for averages, as printed.
        Weight decays are not printed. Here they reach far, for a run has few steps: rate × decay ×
          steps counts.
        The gain of averaging is the average at the end less the iterate where averaging begins.
        The point within which the gain of an ensemble counts as unchanged was set after the
          results.
        The gain of an ensemble is the accuracy of its mean probabilities less the mean accuracy of
          its members.
        On a GPU networks train with bfloat16 in their forward passes.
    """),
    size="VGG-16 on CIFAR-100, 100 epochs, rate 0.02; seeds are not in the text.",
    sizes=(Size("VGG-16", "cifar100", epochs=100), Size("VGG-16-BN", "cifar100", epochs=100)),
)
