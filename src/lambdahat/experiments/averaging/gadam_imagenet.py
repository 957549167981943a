"""GadamX, SGD with averages and the step schedule on ImageNet, or in its place (Table 7.4, §7.10, spectral thesis)."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.experiments.averaging.pictures import picture_task
from lambdahat.experiments.averaging.recipes import recipe
from lambdahat.experiments.averaging.runs import change, gap, judged, mean, size_of, train
from lambdahat.experiments.charts import Chart
from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import Cell, Experiment, Row, Rows, Scale, settings_of
from lambdahat.experiments.papers import SPECTRAL
from lambdahat.experiments.readings import curve, over_seeds
from lambdahat.experiments.reproduction import Table

FIRST = 2 / 3  # of the epochs: Figure 7.18 shows the averages of the last 30 of 90
# Optimiser, rate, weight decay and schedule of each run (§7.10, and §7.7.1 where it is silent)
RUNS: dict[str, tuple[str, float, float, str, dict[str, float | bool]]] = {
    "SGD": ("SGD", 0.1, 1e-4, "step", {}),
    "SGD large": ("SGD", 0.3, 1e-4, "step", {}),
    "SGD IA": ("SWA", 0.1, 1e-4, "averaging", {"ratio": 0.03}),
    "Lookahead, centralised": ("SGD+LH", 0.1, 1e-4, "step", {"centralize": True}),
    "Gadam": ("Gadam", 1e-3, 1e-2, "averaging", {}),
    "Gadam δ = 1": ("Gadam", 0.5, 1e-4, "averaging", {"eps": 1.0}),
    "GadamX": ("GadamX", 0.3, 3e-4, "averaging", {"eps": 1e-4}),
}
# Table 7.4: top 1 and top 5 on ImageNet 32 × 32, WRN-28-10
PRINTED = {"SGD": (61.33, 83.52), "SGD IA": (62.32, 84.23), "Gadam": (60.50, 82.56), "GadamX": (63.04, 84.75)}


@dataclass(frozen=True)
class Config(Scale):
    """One scale; ``folder`` is where ImageNet is, "" for where data are usually found."""

    network: str
    side: int = 0
    augmented: bool = False
    folder: str = ""


# What the thesis ran: pass one of these in place of a scale where the data are there
IMAGENET_32 = Config("imagenet32", 1_281_167, 50_000, 50, 3, "WideResNet-28×10", augmented=True)
IMAGENET = Config(
    "imagenet", 1_281_167, 50_000, 90, 3, "ResNet-50", side=224, batch=256, augmented=True, folder="imagenet"
)


def cells(config: Config) -> list[Cell]:
    """Run × seed."""
    base = settings_of(config, "seeds")
    first = max(1, round(FIRST * config.epochs))
    marks = [round(config.epochs / 3), round(2 * config.epochs / 3)]
    return [
        {**base, "run": name, **recipe(optimizer, rate, decay, config.epochs, schedule, first), **more,
         **({"milestones": marks} if schedule == "step" else {}), "seed": seed}
        for name, (optimizer, rate, decay, schedule, more) in RUNS.items()
        for seed in range(config.seeds)
    ]  # fmt: skip


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs, and of the end with the accuracy among the five largest logits."""
    task = picture_task(cell, device)
    trained = train(cell, task)
    end = {**trained.end, **size_of(task), "top 5": judged(trained.solution, task.held_out, 5)}
    return [*trained.rows, end]


def claims(rows: Rows) -> list[Claim]:
    """Averages beat the step schedule, and GadamX beats the rest."""
    ends = rows.where(kind="end")
    of = {name: ends.where(run=name) for name in RUNS}
    averaged = ends.where(run=("SGD IA", "GadamX"))
    pairs = [
        ("SGD IA", "SGD", "Table 7.4, Figure 7.18", "+0.99 (WRN-28-10)"),
        ("GadamX", "SGD", "Table 7.4, Figure 7.18", "+1.71 (WRN-28-10)"),
        ("GadamX", "SGD IA", "Table 7.4, Figure 7.18", "+0.72 (WRN-28-10)"),
        ("GadamX", "Gadam δ = 1", "§7.10.1, Figure 7.19b", "does not quite catch up"),
        ("Gadam δ = 1", "Gadam", "§7.10.1, Figure 7.19b", "small rates generalise less"),
        ("SGD", "Lookahead, centralised", "§7.10.1, Figure 7.19b", "does not beat SGD"),
        ("SGD", "SGD large", "§7.10.1, Figure 7.19b", "a larger rate decreases the performance"),
    ]
    found = [
        Claim(f"{upper} is above {lower}", f"§7.10, {where}" if where.startswith("Table") else where, printed,
              gap(of[upper], of[lower], "accuracy"), unit=" points")
        for upper, lower, where, printed in pairs
    ]  # fmt: skip
    found.append(Claim("the average is above the iterate where averaging begins", "§7.10, Figure 7.18",
                       "monotonic with increasing number of IA epochs", change(averaged, "accuracy", "before"),
                       unit=" points"))  # fmt: skip
    return found


def tables(rows: Rows) -> list[Table]:
    """Top 1 and top 5 of each run beside Table 7.4."""
    ends = rows.where(kind="end")
    lines = []
    for name in RUNS:
        part = ends.where(run=name)
        printed = PRINTED.get(name)
        lines.append((name, *(str(over_seeds(part, column)) for column in ("accuracy", "top 5", "iterate accuracy",
                                                                          "training accuracy")),
                      *(("", "") if printed is None else (f"{printed[0]:.2f}", f"{printed[1]:.2f}"))))  # fmt: skip
    first = ends[0]
    stand_in = "" if first["data"].startswith("imagenet") else ", in place of ImageNet, which cannot be had here"
    title = f"{first['network']}, {first['parameters']:,} parameters, {first['data']}{stand_in}"
    header = (
        "run",
        "top 1, %",
        "top 5, %",
        "of the iterate",
        "in training",
        "thesis, ImageNet 32 × 32, top 1",
        "top 5",
    )
    return [Table(title, header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Accuracy over epochs, and over the epochs with averages."""
    epochs = rows.where(kind="epoch")
    last = mean(rows.where(kind="end", run="SGD"), "accuracy").value
    late = [curve(name, epochs.where(run=name, averaged=True), "accuracy") for name in ("SGD IA", "GadamX")]
    return [
        Chart("Accuracy on held-out pictures", "epoch", "accuracy, %",
              tuple(curve(name, epochs.where(run=name), "accuracy") for name in RUNS), source="Figures 7.7 and 7.19"),
        Chart("Averages beside the end of SGD", "epoch", "accuracy, %", tuple(late), source="Figure 7.18",
              lines=(("SGD, step schedule", last),)),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "gadam-imagenet",
    "Averages and GadamX against SGD with the step schedule",
    SPECTRAL,
    "§7.10, Table 7.4, Figures 7.7, 7.18 and 7.19",
    {
        "smoke": Config("digits", 96, 64, 6, 2, "VGG-4×4-BN", batch=32),
        "cpu": Config("cifar10", 2000, 4000, 30, 5, "VGG-4×16-BN", side=8, batch=64),
        "paper": Config("cifar10", 10_000, 10_000, 30, 3, "PreResNet-20", augmented=True),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        "CIFAR-10 and small networks in place of ImageNet, which cannot be had here.",
        "IMAGENET_32 and IMAGENET in experiments/averaging/gadam_imagenet.py read the real files where they are.",
        "Rates of §7.10: SGD 0.1, a tenth after each third; SGD IA down to 0.003; GadamX 0.3; Gadam δ = 1 at 0.5.",
        "Not printed, and chosen here: rates while averaging (a half), and the decays of both Gadam.",
        "Averages over the last third of the epochs, as in Figure 7.18.",
    ),
)  # fmt: skip
