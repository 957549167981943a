"""GadamX, SGD with averages and the step schedule, on ImageNet or a substitute (§7.10)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data.catalogue import load
from lambdahat.data.image_files import ImageFolder
from lambdahat.experiments.averaging.averaged_training import (
    FULL,
    AveragedTask,
    against_best,
    family,
    gap,
    image_task,
    mean,
    recipe,
    shared_settings,
    size_of,
    top_accuracy,
    train,
    unready,
)
from lambdahat.experiments.averaging.averaged_training import network as make_network
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, means
from lambdahat.experiments.kit.claims import (
    MISSING,
    PRECONDITION,
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    correlation,
    mean_of,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart

SIDE = 224


def picture_task(cell: Cell, device: str) -> AveragedTask:
    """A cell's network on ImageNet, or on a data set in its place.

    "imagenet32" takes ``training`` images in the seed's order and ``held_out`` of the validation
    part from the files in ``folder``, or where data are usually found. "imagenet" reads the
    pictures in ``folder``/train and ``folder``/val, in one folder per class, at ``side`` ×
    ``side``.
    """
    if cell["data"] not in ("imagenet32", "imagenet"):
        return image_task(cell, device)
    training, held_out, shape, classes = (
        _small(cell, device) if cell["data"] == "imagenet32" else _large(cell)
    )
    model = make_network(cell["network"], shape, classes, cell["seed"]).to(device)
    problem = Problem(model, "cross_entropy", training)
    return AveragedTask(model, problem, problem.on(held_out).batches)


def _small(cell: Cell, device: str) -> tuple[Any, Any, tuple[int, ...], int]:
    split = load("imagenet32", cell["folder"] or None, verify=False, normalization="raw")
    (x, y), (x_held, y_held) = split
    count, held_out = min(cell["training"], len(x)), min(cell["held_out"], len(x_held))
    chosen = torch.randperm(len(x), generator=generator(cell["seed"], "split"))[:count]
    pixels = x[chosen].to(device).float()
    deviation, mean = torch.std_mean(pixels, (0, 2, 3), keepdim=True)

    def ready(images: Tensor) -> Tensor:
        return (images.to(device).float() - mean) / deviation

    training = ((pixels - mean) / deviation, y[chosen].to(device))
    return (
        training,
        (ready(x_held[:held_out]), y_held[:held_out].to(device)),
        split.shape,
        split.classes,
    )


def _large(cell: Cell) -> tuple[Any, Any, tuple[int, ...], int]:
    require(
        bool(cell["folder"]), "folder", "name the folder above train and val", repr(cell["folder"])
    )
    side = cell["side"] or SIDE
    training, held_out = (
        ImageFolder(Path(cell["folder"]) / part, side) for part in ("train", "val")
    )
    same = training.classes == held_out.classes
    require(
        same,
        "folder",
        "have the same classes in train and val",
        f"{len(training.classes)} and {len(held_out.classes)}",
    )
    return training, held_out, (3, side, side), len(training.classes)


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
# The rest of Table 7.4, and Figure 7.19a: the rates of ImageNet 32 × 32 (§7.7.1)
MORE: dict[str, tuple[str, float, float, str, dict[str, float | bool]]] = {
    "AdamW": ("AdamW", 1e-3, 1e-2, "linear", {}),
    "Padam": ("Padam", 0.1, 1e-4, "linear", {}),
    "SGD IA, untuned": ("SWA", 0.03, 1e-4, "averaging", {}),
    "GadamX, untuned": ("GadamX", 0.03, 3e-4, "averaging", {}),
}
TABLE = ("SGD", "SGD IA", "AdamW", "Padam", "Gadam", "GadamX")  # SWA is here SGD IA
# Table 7.4: top 1 and top 5 on ImageNet 32 × 32
PRINTED: dict[str, dict[str, tuple[float, float]]] = {
    "PRN-110": {
        "SGD": (54.27, 77.96),
        "SGD IA": (54.37, 78.04),
        "AdamW": (54.84, 78.43),
        "Padam": (53.71, 77.31),
        "Gadam": (54.97, 78.48),
        "GadamX": (54.45, 77.91),
    },
    "WRN-28-10": {
        "SGD": (61.33, 83.52),
        "SGD IA": (62.32, 84.23),
        "AdamW": (55.51, 79.09),
        "Padam": (59.65, 81.74),
        "Gadam": (60.50, 82.56),
        "GadamX": (63.04, 84.75),
    },
}
PRINTED_OF = {"PreResNet": "PRN-110", "WideResNet": "WRN-28-10"}  # by the family of ours
RACE = "§7.10.1, Figure 7.19b"
# Comparisons of Table 7.4, and those of §7.10 with what the text says: it prints no figures
IN_TABLE = (
    ("SGD IA", "SGD"),
    ("Gadam", "AdamW"),
    ("GadamX", "Padam"),
    ("GadamX", "SGD"),
    ("GadamX", "SGD IA"),
)
IN_TEXT = (
    ("SGD IA", "SGD", "§7.10, Figure 7.18", "both improve upon the baseline"),
    ("GadamX", "SGD", "§7.10, Figure 7.18", "both improve upon the baseline"),
    ("GadamX", "SGD IA", "§7.10, Figure 7.18", "significantly improved"),
    ("SGD", "SGD IA, untuned", "§7.10, Figure 7.19a", "SGD IA significantly underperforms"),
    ("GadamX, untuned", "SGD", "§7.10, Figure 7.19a", "marginally beats the baseline"),
    ("GadamX", "Gadam δ = 1", RACE, "does not quite catch up"),
    ("Gadam δ = 1", "Gadam", RACE, "smaller rates and damping generalise less"),
    ("SGD", "Lookahead, centralised", RACE, "does not beat SGD"),
    ("SGD", "SGD large", RACE, "a larger rate decreases the performance"),
)
FASTER = (
    ("Lookahead, centralised", "SGD", "converges faster"),
    ("GadamX", "Gadam δ = 1", "converges slower than GadamX"),
    ("Gadam", "Gadam δ = 1", "smaller rates and damping lead to faster optimisation"),
    ("SGD", "SGD large", "decreases the convergence speed"),
)
SMALL, WHOLE = "ImageNet 32 × 32", "ImageNet"
DATA = {SMALL: "imagenet32", WHOLE: "imagenet"}
UNTUNED = ("SGD", "SGD IA, untuned", "GadamX, untuned")
PLACED = IN_TABLE[3:] + IN_TABLE[:1]  # judged on the stand-in too, as claims of ours


@dataclass(frozen=True)
class ImagenetScale(Scale):
    """One scale; ``folder`` is where ImageNet is, "" for where data are usually found.

    The runs of ``MORE`` have so many ``more_seeds``.
    """

    networks: tuple[str, ...]
    side: int = 0
    augmented: bool = False
    folder: str = ""
    precision: str = FULL
    more_seeds: int = 3


# What the thesis ran: pass one of these in place of a scale where the data are there
IMAGENET_32 = ImagenetScale(
    "imagenet32", 1_281_167, 50_000, 50, 3, ("WideResNet-28×10",), augmented=True
)
IMAGENET = ImagenetScale(
    "imagenet",
    1_281_167,
    50_000,
    90,
    3,
    ("ResNet-50",),
    side=224,
    batch=256,
    augmented=True,
    folder="imagenet",
)


def cells(config: ImagenetScale) -> list[Cell]:
    """Network × run × seed; networks after the first have the runs of Table 7.4 alone."""
    base = shared_settings(config, "networks", "seeds", "more_seeds")
    first = max(1, round(FIRST * config.epochs))
    marks = [round(config.epochs / 3), round(2 * config.epochs / 3)]
    return [
        {
            **base,
            "network": network,
            "run": name,
            **recipe(optimizer, rate, decay, config.epochs, schedule, first),
            **more,
            **({"milestones": marks} if schedule == "step" else {}),
            "seed": seed,
        }
        for network in config.networks
        for runs, seeds in ((RUNS, config.seeds), (MORE, config.more_seeds))
        for name, (optimizer, rate, decay, schedule, more) in runs.items()
        for seed in range(seeds)
        if network == config.networks[0] or name in TABLE
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs, and of the end with the accuracy among the five largest logits."""
    task = picture_task(cell, device)
    trained = train(cell, task)
    end = {
        **trained.end,
        **size_of(task),
        "top 5": top_accuracy(trained.solution, task.held_out, 5),
    }
    return [*trained.rows, end]


def claims(rows: Rows) -> list[Claim]:
    """Table 7.4, network by network, and §7.10, over the networks that have all its runs.

    Both speak of ImageNet; on another set three of the comparisons are claims of ours.
    """
    ends = rows.where(kind="end")
    small, missing = stand_in(ends, SMALL), stand_in(ends, WHOLE)
    raced = [
        name
        for name in ends.distinct("network")
        if {*RUNS} <= {*ends.where(network=name).distinct("run")}
    ]
    of = _by_run(ends.where(network=raced))
    table = Claims()
    placed: list[Claim] = []
    for network, tail in name_networks(ends):
        part = _by_run(ends.where(network=network))
        # of a sweep that was cut short, what it has
        there = [pair for pair in IN_TABLE if {*pair} <= {*part}]
        table += [
            _above(
                part,
                upper,
                lower,
                SMALL + tail,
                "§7.8.2, Table 7.4",
                printed_gap(upper, lower, network),
                small,
            )
            for upper, lower in there
        ]
        placed += [
            _placement_claim(part, *pair, tail)
            for pair in PLACED
            if small and missing and pair in there
        ]
    text = [
        _above(of, upper, lower, WHOLE, source, said, missing)
        for upper, lower, source, said in IN_TEXT
    ]
    rival, reading = against_best(
        {name: of[name] for name in RUNS if name != "GadamX"}, "Gadam δ = 1"
    )
    table += text
    sentence = (
        f"{WHOLE}: Gadam δ = 1 is above all but GadamX (here above {rival}, the best of them)"
    )
    published = "beats all other optimisers"
    table.add(sentence, RACE, published, reading, unit=" points", unmet=missing, barrier=MISSING)
    table += _course_claims(rows.where(network=raced), missing)
    table += placed
    return table


def _by_run(ends: Rows) -> dict[str, Rows]:
    return {name: ends.where(run=name) for name in ends.distinct("run")}


def name_networks(rows: Rows) -> list[tuple[str, str]]:
    """The networks, each with its name for claims and titles; none if there is only one."""
    names = rows.distinct("network")
    return [(name, f", {name}" if len(names) > 1 else "") for name in names]


def _course_claims(rows: Rows, missing: str) -> list[Claim]:
    """How averages go on improving, and which runs are ahead in the first third of the epochs."""
    epochs = rows.where(kind="epoch")
    rises = [
        Claim(
            f"{WHOLE}: the average of {name} improves with the number of epochs in it (rank"
            " correlation)",
            "§7.10, Figure 7.18",
            "monotonic",
            rising(epochs.where(run=name, averaged=True)),
            unmet=missing,
            barrier=MISSING,
        )
        for name in ("SGD IA", "GadamX")
    ]
    first = [
        epoch for epoch in epochs.distinct("epoch") if 3 * epoch <= max(epochs.values("epoch"))
    ]
    early = epochs.where(epoch=first)
    return rises + [
        Claim(
            f"{WHOLE}: {upper} converges faster than {lower} (accuracy over the first third)",
            RACE,
            said,
            gap(early.where(run=upper), early.where(run=lower), "iterate accuracy"),
            unit=" points",
            unmet=missing,
            barrier=MISSING,
        )
        for upper, lower, said in FASTER
    ]


def _above(
    of: dict[str, Rows], upper: str, lower: str, data: str, source: str, printed: str, missing: str
) -> Claim:
    return Claim(
        f"{data}: {upper} is above {lower}",
        source,
        printed,
        gap(of[upper], of[lower], "accuracy"),
        unit=" points",
        unmet=missing or unready(of[upper], of[lower]),
        barrier=MISSING if missing else PRECONDITION,
    )


def _placement_claim(of: dict[str, Rows], upper: str, lower: str, tail: str) -> Claim:
    data = of[upper][0].get("data")
    sentence = f"on {data} in its place{tail}, {upper} is above {lower}"
    reading = gap(of[upper], of[lower], "accuracy")
    unmet = unready(of[upper], of[lower])
    return Claim(sentence, "after Table 7.4", "", reading, unit=" points", unmet=unmet, own=True)


def stand_in(ends: Rows, wanted: str) -> str:
    """Whether the data are not those that a claim is about."""
    data = str(ends[0].get("data", "")) if len(ends) else ""
    return "" if data == DATA[wanted] else f"{data} in place of {wanted}"


def rising(epochs: Rows) -> Reading:
    """The rank correlation of accuracy and epoch, network by network and seed by seed."""
    parts = [
        epochs.where(network=network, seed=seed)
        for network in epochs.distinct("network")
        for seed in epochs.distinct("seed")
    ]
    return mean_of(
        [correlation(part.values("epoch"), part.values("accuracy")).value for part in parts]
    )


def printed_of(network: str) -> dict[str, dict[str, tuple[float, float]]]:
    """The columns of Table 7.4 beside which a network stands: its family's, or both."""
    name = PRINTED_OF.get(family(network))
    return {name: PRINTED[name]} if name else PRINTED


def printed_gap(upper: str, lower: str, network: str = "") -> str:
    """The differences of two rows of Table 7.4."""
    columns = printed_of(network).items()
    return ", ".join(
        f"{table[upper][0] - table[lower][0]:+.2f} ({name})" for name, table in columns
    )


def tables(rows: Rows) -> list[Table]:
    """Of each network top 1 and top 5 of each run beside Table 7.4."""
    ends = rows.where(kind="end")
    return [
        _table(ends.where(network=network), printed_of(network))
        for network in ends.distinct("network")
    ]


def _table(ends: Rows, columns: dict[str, dict[str, tuple[float, float]]]) -> Table:
    lines = TableLines()
    for name in ends.distinct("run"):
        part = ends.where(run=name)
        printed = [table.get(name) for table in columns.values()]
        lines.add(
            name,
            *means(part, "accuracy", "top 5", "iterate accuracy", "training accuracy"),
            *("" if pair is None else f"{pair[0]:.2f}, {pair[1]:.2f}" for pair in printed),
        )
    first = ends[0]
    apart = (
        "" if first["data"] in DATA.values() else ", in place of ImageNet, which cannot be had here"
    )
    title = f"{first['network']}, {first['parameters']:,} parameters, {first['data']}{apart}"
    header = (
        *split_header("run | top 1, % | top 5, % | of the iterate | in training"),
        *(f"thesis, ImageNet 32 × 32, {name}" for name in columns),
    )
    return Table(title, header, tuple(lines))


def charts(rows: Rows) -> list[Chart]:
    """Of each network accuracy over epochs, and over the epochs with averages."""
    return [
        chart
        for network, tail in name_networks(rows)
        for chart in _charts(rows.where(network=network), tail)
    ]


def _charts(rows: Rows, tail: str) -> list[Chart]:
    epochs, there = rows.where(kind="epoch"), rows.distinct("run")
    last = mean(rows.where(kind="end", run="SGD"), "accuracy").value
    late = [
        curve(name, epochs.where(run=name, averaged=True), "accuracy")
        for name in ("SGD IA", "GadamX")
        if name in there
    ]

    def chart(title: str, names: Iterable[str], source: str, caption: str = "") -> Chart:
        series = tuple(
            curve(name, epochs.where(run=name), "accuracy") for name in names if name in there
        )
        return Chart(title + tail, "epoch", "accuracy, %", series, source=source, caption=caption)

    of_average = "The figure has the error among five. Of the average from when there is one."
    found = []
    found.append(chart("Accuracy on held-out pictures", RUNS, "Figure 7.19b"))
    found.append(chart("Top 1 of the optimisers of Table 7.4", TABLE, "Figure 7.7", of_average))
    heading = f"Averages beside the end of SGD{tail}"
    axis = "accuracy, %"
    marks = (("SGD, step schedule", last),)
    found.append(Chart(heading, "epoch", axis, tuple(late), source="Figure 7.18", lines=marks))
    if set(UNTUNED) <= set(there):
        found.insert(2, chart("Rates of ImageNet 32 × 32 kept", UNTUNED, "Figure 7.19a"))
    return found


# data set, training and held-out samples, epochs, seeds
PAPER = ("cifar10", 5_000, 5_000, 30, 3)
EXPERIMENT = Experiment(
    "gadam-imagenet",
    "Averages and GadamX against SGD with the step schedule",
    SPECTRAL,
    "§§7.8.2 and 7.10, Table 7.4, Figures 7.7, 7.18 and 7.19",
    {
        "smoke": ImagenetScale("digits", 96, 64, 6, 2, ("VGG-4×4-BN",), batch=32, more_seeds=1),
        "cpu": ImagenetScale(
            "cifar10", 2000, 4000, 30, 5, ("VGG-4×16-BN",), side=8, batch=64, more_seeds=2
        ),
        "paper": ImagenetScale(
            *PAPER, ("PreResNet-20", "WideResNet-16×4"), augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        CIFAR-10 and small networks in place of ImageNet, which cannot be had here: its claims are
          not tested.
        Three of the comparisons are judged on CIFAR-10 all the same, as claims of ours.
        IMAGENET_32 and IMAGENET in experiments/averaging/gadam_imagenet.py read the real files
          where they are.
        Rates of §7.10: SGD 0.1, a tenth after each third; SGD IA down to 0.003; GadamX 0.3; Gadam δ
          = 1 at 0.5.
        Not printed, and chosen here: rates while averaging (a half), and the decays of both Gadam.
        Averages over the last third of the epochs, as in Figure 7.18.
        On a GPU PreResNet-20 and, for Table 7.4 alone, WideResNet-16×4, in place of PRN-110 and
          WRN-28-10.
        They have 5,000 images; on a CPU there is one network of VGG's kind.
        Both have the same rates, where §7.7.1 has some of its own for each network, and 200 epochs
          for the first.
        Table 7.4 is read network by network, §7.10 of the first alone. On a GPU forward passes are
          in bfloat16.
        Untuned are the rates of ImageNet 32 × 32, 0.03, with half of it while averaging; on a CPU
          of two seeds.
        Those runs, AdamW and Padam were added later; Padam has SGD's rate.
    """),
    size=(
        "PreResNet-110 (200 epochs) and WideResNet-28×10 on ImageNet 32 × 32, ResNet-50 and"
        " ResNet-101 on ImageNet (90 epochs), 3 runs."
    ),
    sizes=(
        Size("PreResNet-110", "imagenet32", epochs=200),
        Size("WideResNet-28×10", "imagenet32"),
        Size("ResNet-50", "imagenet", epochs=90),
        Size("ResNet-101", "imagenet", epochs=90),
    ),
)
