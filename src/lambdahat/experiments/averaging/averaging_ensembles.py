"""Averages of weights against ensembles of networks, by weight decay (§7.5.4, Figure 7.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lambdahat._core.rng import derived_seed
from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table
from lambdahat.problem.batches import Batches

RATE = 0.02
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


def cells(
    images: Cell, network: str, decays: Sequence[float], seeds: int, members: int = 3
) -> list[Cell]:
    """Weight decay × seed; a cell trains one averaged network and the members of an ensemble."""
    plans = [runs.recipe("SWA", RATE, decay, images["epochs"]) for decay in decays]
    base = images | {"network": network, "members": members}
    return kit.grid(base, plan=plans, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """One row: the average and the iterate it began at, the members and their ensemble."""
    task = runs.image_task(cell, device)
    trained = runs.train(cell, task)
    end = {**trained.end, **runs.size_of(task), "distance": contraction(trained.rows)}
    members = [member(cell, number, device) for number in range(cell["members"])]
    alone = [runs.top_accuracy(each, task.held_out) for each in members]
    single, together = sum(alone) / len(alone), ensemble_accuracy(members, task.held_out)
    gains = {"average gain": end["accuracy"] - end["before"], "member": single}
    return [{**end, **gains, "ensemble": together, "ensemble gain": together - single}]


def contraction(rows: Sequence[Row]) -> float:
    """1 − ‖θ̄‖/mean‖θ‖ over the averaged iterates: 0 where they are all the same."""
    kept = [row for row in rows if row["averaged"]]
    if not kept:
        return 0.0
    return float(1 - kept[-1]["average norm"] / (sum(row["norm"] for row in kept) / len(kept)))


def member(cell: Cell, number: int, device: str) -> nn.Module:
    """A network trained by SGD on the cell's data from another start and order."""
    own = derived_seed(cell["seed"], "member", number)
    plan = runs.recipe("SGD", cell["rate"], cell["decay"], cell["epochs"])
    return runs.train({**cell, **plan, "seed": own}, runs.image_task(cell, device, own)).solution


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


def claims(rows: Rows) -> Iterator[Claim]:
    """The effect of weight decay on the gains of averages and of ensembles."""
    decays = sorted(rows.distinct("decay"))
    none, most = rows.where(decay=decays[0]), rows.where(decay=decays[-1])
    text = f"""
        most: averaging gains more at weight decay {decays[-1]:g} than at 0
          | §7.5.4, Figure 7.3b | no regularisation corresponds to the lowest improvement
        others: averaging gains more with weight decay than without
          | §7.5.4, Figure 7.3b | weight decay is essential
        before: before averaging strong weight decay is worse
          | §7.5.4, Figure 7.3b | it decreases test performance before starting IA | below
        after: after averaging it is better
          | §7.5.4, Figure 7.3b | more than makes up for this
        rises: weight decay raises the gain of averaging more than that of an ensemble
          | §7.5.4, Figure 7.3 | the ensemble's is largely agnostic to it
        agnostic: the gain of an ensemble at weight decay {decays[-1]:g} is within {AGNOSTIC:g}
          points of that at 0 | §7.5.4, Figure 7.3a | largely agnostic to the weight decay
          | within {AGNOSTIC:g} of 0
        ensemble: an ensemble is above its members, over all weight decays
          | §7.5.4, Figure 7.3a | it improves
        apart: averaged iterates lie further apart with weight decay (1 − ‖θ̄‖/mean‖θ‖)
          | §7.5.4 | a greater solution difference between epochs
    """
    claim = kit.ClaimTexts(text, unit=" points", unmet=runs.unready(none, most))
    yield claim("most", runs.gap(most, none, "average gain"))
    reading = runs.gap(rows.where(decay=decays[1:]), none, "average gain")
    ready = runs.unready(*(rows.where(decay=decay) for decay in decays))
    yield claim("others", reading, unmet=ready)
    yield claim("before", runs.gap(most, none, "before"))
    yield claim("after", runs.gap(most, none, "accuracy"))
    rises = kit.gap_of_gaps((most, most), (none, none), "average gain", "ensemble gain")
    yield claim("rises", rises)
    reading = runs.gap(most, none, "ensemble gain")
    yield claim("agnostic", reading, unmet=runs.unlearnt_reason(none, most))
    reading = runs.change(rows, "ensemble", "member")
    yield claim("ensemble", reading, unmet=runs.unlearnt_reason(rows))
    yield claim("apart", runs.gap(most, none, "distance"), unit="")


def tables(rows: Rows) -> Iterator[Table]:
    """Accuracies and gains by weight decay."""
    title = f"{kit.network_title(rows)}, ensembles of {rows[0]['members']}"
    yield kit.means_table(title, "weight decay", rows.by("decay", "{:g}"), COLUMNS)


def charts(rows: Rows) -> Iterator[Chart]:
    """Gains and accuracies over weight decay."""
    gains = {"ensemble gain": "ensemble", "average gain": "average"}
    levels = {"member": "one network", "ensemble": "ensemble"}
    levels |= {"before": "before averaging", "accuracy": "average"}
    for title, axis, columns in (
        ("Gain of ensembles and of averages", "points of accuracy", gains),
        ("Accuracy", "accuracy, %", levels),
    ):
        series = kit.curves(rows, columns, "decay")
        yield Chart(title, "weight decay", axis, series, source="Figure 7.3")


SMOKE = kit.image_setting("digits", 96, 64, epochs=3, batch=32)
CPU = kit.image_setting("cifar10", 2000, 4000, epochs=25, side=8, batch=64)
PAPER = kit.image_setting("cifar10", 5_000, 10_000, epochs=30, augmented=True, precision="bfloat16")
EXPERIMENT = kit.Experiment(
    "averaging-ensembles",
    "Averages of weights and ensembles of networks, by weight decay",
    kit.SPECTRAL,
    "§7.5.4, Figure 7.3",
    {
        "smoke": cells(SMOKE, "VGG-4×4-BN", (0.0, 5e-3), seeds=2, members=2),
        "cpu": cells(CPU, "VGG-4×16-BN", (0.0, 1e-3, 3e-3, 1e-2), seeds=5),
        "paper": cells(PAPER, "VGG-16-BN", (0.0, 5e-4, 2e-3, 5e-3), seeds=3),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        CIFAR-10 in place of CIFAR-100; 30 epochs of the thesis's 100.
        Ensembles of three networks; their number is not printed.
        Rate 0.02, down to a hundredth for ensembles and to a half for averages, as printed.
        Weight decays are not printed.
        Here they cover a wide range, because a run has few steps and the product rate × decay ×
          steps counts.
        The gain of averaging is the accuracy of the final average minus that of the iterate where
          averaging begins.
        The point within which the gain of an ensemble counts as unchanged was set after the
          results.
        The gain of an ensemble is the accuracy of its mean probabilities less the mean accuracy of
          its members.
        On a GPU networks train with bfloat16 in their forward passes.
    """),
    "VGG-16 on CIFAR-100, 100 epochs, rate 0.02; seeds are not in the text.",
    tuple(kit.Size(name, "cifar100", epochs=100) for name in ("VGG-16", "VGG-16-BN")),
)
