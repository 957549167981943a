"""GadamX, SGD with averages and the step schedule, on ImageNet or a substitute (§7.10)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data.catalogue import load
from lambdahat.data.image_files import ImageFolder
from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.averaging.averaged_training import gap
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Table
from lambdahat.experiments.kit.training import network as make_network
from lambdahat.problem import Problem

SIDE = 224


def picture_task(cell: Cell, device: str) -> runs.AveragedTask:
    """A cell's network on ImageNet, or on a data set in its place.

    "imagenet32" takes ``training`` images in the seed's order and ``held_out`` of the validation
    part from the files in ``folder``, or where data are usually found. "imagenet" reads the
    pictures in ``folder``/train and ``folder``/val, in one folder per class, at ``side`` ×
    ``side``.
    """
    if cell["data"] not in ("imagenet32", "imagenet"):
        return runs.image_task(cell, device)
    load_parts = _small if cell["data"] == "imagenet32" else _large
    training, held_out, shape, classes = load_parts(cell, device)
    model = make_network(cell["network"], shape, classes, cell["seed"]).to(device)
    problem = Problem(model, "cross_entropy", training)
    return runs.AveragedTask(model, problem, problem.on(held_out).batches)


def _small(cell: Cell, device: str) -> tuple[Any, Any, tuple[int, ...], int]:
    split = load("imagenet32", cell["folder"] or None, verify=False, normalization="raw")
    (x, y), (x_held, y_held) = split
    count, held_out = min(cell["training"], len(x)), min(cell["held_out"], len(x_held))
    chosen = torch.randperm(len(x), generator=generator(cell["seed"], "split"))[:count]
    pixels = x[chosen].to(device).float()
    deviation, mean = torch.std_mean(pixels, (0, 2, 3), keepdim=True)

    def standardize(images: Tensor) -> Tensor:
        return (images.to(device).float() - mean) / deviation

    training = (standardize(pixels), y[chosen].to(device))
    held = (standardize(x_held[:held_out]), y_held[:held_out].to(device))
    return training, held, split.shape, split.classes


def _large(cell: Cell, device: str) -> tuple[Any, Any, tuple[int, ...], int]:
    folder, side = cell["folder"], cell["side"] or SIDE
    require(bool(folder), "folder", "name the folder above train and val", repr(folder))
    training, held_out = (ImageFolder(Path(folder) / part, side) for part in ("train", "val"))
    count, counts = len(training.classes), f"{len(training.classes)} and {len(held_out.classes)}"
    same, wanted = training.classes == held_out.classes, "have the same classes in train and val"
    require(same, "folder", wanted, counts)
    return training, held_out, (3, side, side), count


Recipe = tuple[str, float, float, str, dict[str, float | bool]]
FIRST = 2 / 3  # of the epochs: Figure 7.18 shows the averages of the last 30 of 90
# Optimiser, rate, weight decay and schedule of each run (§7.10, and §7.7.1 where it is silent)
RUNS: dict[str, Recipe] = {
    "SGD": ("SGD", 0.1, 1e-4, "step", {}),
    "SGD large": ("SGD", 0.3, 1e-4, "step", {}),
    "SGD IA": ("SWA", 0.1, 1e-4, "averaging", {"ratio": 0.03}),
    "Lookahead, centralised": ("SGD+LH", 0.1, 1e-4, "step", {"centralize": True}),
    "Gadam": ("Gadam", 1e-3, 1e-2, "averaging", {}),
    "Gadam δ = 1": ("Gadam", 0.5, 1e-4, "averaging", {"eps": 1.0}),
    "GadamX": ("GadamX", 0.3, 3e-4, "averaging", {"eps": 1e-4}),
}
# The rest of Table 7.4, and Figure 7.19a: the rates of ImageNet 32 × 32 (§7.7.1)
MORE: dict[str, Recipe] = {
    "AdamW": ("AdamW", 1e-3, 1e-2, "linear", {}),
    "Padam": ("Padam", 0.1, 1e-4, "linear", {}),
    "SGD IA, untuned": ("SWA", 0.03, 1e-4, "averaging", {}),
    "GadamX, untuned": ("GadamX", 0.03, 3e-4, "averaging", {}),
}
TABLE = ("SGD", "SGD IA", "AdamW", "Padam", "Gadam", "GadamX")  # SWA is here SGD IA
# Table 7.4: top 1 and top 5 of two networks on ImageNet 32 × 32
TOP = {
    "SGD": ((54.27, 77.96), (61.33, 83.52)),
    "SGD IA": ((54.37, 78.04), (62.32, 84.23)),
    "AdamW": ((54.84, 78.43), (55.51, 79.09)),
    "Padam": ((53.71, 77.31), (59.65, 81.74)),
    "Gadam": ((54.97, 78.48), (60.50, 82.56)),
    "GadamX": ((54.45, 77.91), (63.04, 84.75)),
}
PRINTED = {
    network: {name: pairs[place] for name, pairs in TOP.items()}
    for place, network in enumerate(("PRN-110", "WRN-28-10"))
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


def cells(
    images: Cell, networks: Sequence[str], seeds: int = 3, more_seeds: int = 3, folder: str = ""
) -> list[Cell]:
    """Network × run × seed; networks after the first have the runs of Table 7.4 alone.

    The runs of ``MORE`` have so many ``more_seeds``. ``folder`` is where ImageNet is, "" for where
    data are usually found.
    """
    epochs, out = images["epochs"], []
    first, marks = max(1, round(FIRST * epochs)), [round(epochs / 3), round(2 * epochs / 3)]
    for network in networks:
        for name, (optimizer, rate, decay, schedule, more) in (RUNS | MORE).items():
            if network != networks[0] and name not in TABLE:
                continue
            plan = runs.recipe(optimizer, rate, decay, epochs, schedule, first) | more
            if schedule == "step":
                plan["milestones"] = marks
            setting = {**images, "folder": folder, "network": network, "run": name, **plan}
            out += kit.grid(setting, seed=range(seeds if name in RUNS else more_seeds))
    return out


# What the thesis ran: pass one of these in place of a scale where the data are there
SMALL_PICTURES = kit.image_setting("imagenet32", 1_281_167, 50_000, epochs=50, augmented=True)
PICTURES = kit.image_setting("imagenet", 1_281_167, 50_000, epochs=90, side=SIDE, batch=256)
PICTURES["augmented"] = True
IMAGENET_32 = cells(SMALL_PICTURES, ("WideResNet-28×10",))
IMAGENET = cells(PICTURES, ("ResNet-50",), folder="imagenet")


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs, and of the end with the accuracy among the five largest logits."""
    task = picture_task(cell, device)
    trained = runs.train(cell, task)
    five = {"top 5": runs.top_accuracy(trained.solution, task.held_out, 5)}
    return [*trained.rows, {**trained.end, **runs.size_of(task), **five}]


def claims(rows: Rows) -> Iterator[Claim]:
    """Table 7.4, network by network, and §7.10, over the networks that have all its runs.

    Both speak of ImageNet; on another set three of the comparisons are claims of ours.
    """
    ends = rows.where(kind="end")
    small, missing = stand_in(ends, SMALL), stand_in(ends, WHOLE)
    raced = [name for name, part in ends.groups("network") if {*RUNS} <= {*part.distinct("run")}]
    of = dict(ends.where(network=raced).groups("run"))
    placed: list[Claim] = []
    for network, tail in name_networks(ends):
        part = dict(ends.where(network=network).groups("run"))
        # of a sweep that was cut short, what it has
        there = [pair for pair in IN_TABLE if {*pair} <= {*part}]
        for upper, lower in there:
            said = "§7.8.2, Table 7.4", printed_gap(upper, lower, network)
            yield _above(part, upper, lower, SMALL + tail, *said, small)
        for upper, lower in PLACED:
            if small and missing and (upper, lower) in there:
                sentence = f"on {ends[0].get('data')} in its place{tail}, {upper} is above {lower}"
                test = runs.comparison(part[upper], part[lower])
                placed.append(Claim(sentence, "after Table 7.4", "", **test, own=True))
    for upper, lower, source, printed in IN_TEXT:
        yield _above(of, upper, lower, WHOLE, source, printed, missing)
    others = {name: of[name] for name in RUNS if name != "GadamX"}
    rival, reading = runs.against_best(others, "Gadam δ = 1")
    words = f"Gadam δ = 1 is above all but GadamX (here above {rival}, the best of them)"
    best = f"{WHOLE}: {words}", RACE, "beats all other optimisers"
    yield Claim(*best, reading, unit=" points", unmet=missing, barrier=kit.MISSING)
    yield from _course_claims(rows.where(network=raced, kind="epoch"), missing)
    yield from placed


def _above(
    of: dict[str, Rows], upper: str, lower: str, data: str, source: str, printed: str, missing: str
) -> Claim:
    test = runs.comparison(of[upper], of[lower])
    if missing:
        test |= {"unmet": missing, "barrier": kit.MISSING}
    return Claim(f"{data}: {upper} is above {lower}", source, printed, **test)


def name_networks(rows: Rows) -> list[tuple[str, str]]:
    """The networks, each with a suffix for claims and titles; "" if there is only one."""
    names = rows.distinct("network")
    return [(name, f", {name}" if len(names) > 1 else "") for name in names]


def _course_claims(epochs: Rows, missing: str) -> Iterator[Claim]:
    """Whether averages keep improving, and which runs lead in the first third of the epochs."""
    text = f"""
        improves: {WHOLE}: the average of {{name}} improves with the number of epochs in it (rank
          correlation) | §7.10, Figure 7.18 | monotonic
        faster: {WHOLE}: {{upper}} converges faster than {{lower}} (accuracy over the first third)
          | {RACE} | {{printed}} | above | points
    """
    claim = kit.ClaimTexts(text, unmet=missing, barrier=kit.MISSING)
    for name in ("SGD IA", "GadamX"):
        yield claim("improves", rising(epochs.where(run=name, averaged=True)), name=name)
    end = max(epochs.values("epoch"))
    early = epochs.where(epoch=[epoch for epoch in epochs.distinct("epoch") if 3 * epoch <= end])
    for upper, lower, printed in FASTER:
        reading = gap(early.where(run=upper), early.where(run=lower), "iterate accuracy")
        yield claim("faster", reading, upper=upper, lower=lower, printed=printed)


def stand_in(ends: Rows, wanted: str) -> str:
    """Says that the data are not those that a claim is about, or ""."""
    data = str(ends[0].get("data", "")) if len(ends) else ""
    return "" if data == DATA[wanted] else f"{data} in place of {wanted}"


def rising(epochs: Rows) -> Reading:
    """The rank correlation of accuracy and epoch, network by network and seed by seed."""
    correlations = []
    for _, part in epochs.groups("network", "seed"):
        correlations.append(kit.correlation(part.values("epoch"), part.values("accuracy")).value)
    return kit.mean_of(correlations)


def printed_of(network: str) -> dict[str, dict[str, tuple[float, float]]]:
    """The columns of Table 7.4 beside which a network stands: its family's, or both."""
    name = PRINTED_OF.get(runs.family(network))
    return {name: PRINTED[name]} if name else PRINTED


def printed_gap(upper: str, lower: str, network: str = "") -> str:
    """The differences of two rows of Table 7.4."""
    columns = printed_of(network).items()
    gaps = {name: table[upper][0] - table[lower][0] for name, table in columns}
    return ", ".join(f"{value:+.2f} ({name})" for name, value in gaps.items())


def tables(rows: Rows) -> Iterator[Table]:
    """Top-1 and top-5 accuracy of each run beside Table 7.4, a table for each network."""
    shown = "accuracy", "top 5", "iterate accuracy", "training accuracy"
    header = "run | top 1, % | top 5, % | of the iterate | in training | "
    for network, ends in rows.where(kind="end").groups("network"):
        columns, lines = printed_of(network), []
        for name, part in ends.groups("run"):
            pairs = (table.get(name) for table in columns.values())
            printed = ("" if pair is None else f"{pair[0]:.2f}, {pair[1]:.2f}" for pair in pairs)
            lines.append((name, *kit.means(part, *shown), *printed))
        title = kit.network_title(ends)
        if ends[0]["data"] not in DATA.values():
            title += ", in place of ImageNet, which cannot be had here"
        thesis = (f"thesis, ImageNet 32 × 32, {name}" for name in columns)
        yield kit.table(title, header + " | ".join(thesis), lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Accuracy over epochs, and over the epochs with averages, for each network."""
    for network, tail in name_networks(rows):
        yield from _charts(rows.where(network=network), tail)


def _charts(rows: Rows, tail: str) -> Iterator[Chart]:
    epochs, there = rows.where(kind="epoch"), rows.distinct("run")

    def chart(title: str, part: Rows, names: Iterable[str], source: str, **more: Any) -> Chart:
        shown = [name for name in names if name in there]
        series = kit.curves(part.by("run", shown), "accuracy")
        return Chart(title + tail, "epoch", "accuracy, %", series, source=source, **more)

    yield chart("Accuracy on held-out pictures", epochs, RUNS, "Figure 7.19b")
    caption = "The figure has the error among five. Of the average from when there is one."
    title = "Top 1 of the optimisers of Table 7.4"
    yield chart(title, epochs, TABLE, "Figure 7.7", caption=caption)
    if set(UNTUNED) <= set(there):
        yield chart("Rates of ImageNet 32 × 32 kept", epochs, UNTUNED, "Figure 7.19a")
    last = runs.mean(rows.where(kind="end", run="SGD"), "accuracy").value
    averaged, marks = epochs.where(averaged=True), (("SGD, step schedule", last),)
    title, names = "Averages beside the end of SGD", ("SGD IA", "GadamX")
    yield chart(title, averaged, names, "Figure 7.18", lines=marks)


SMOKE = kit.image_setting("digits", 96, 64, epochs=6, batch=32)
CPU = kit.image_setting("cifar10", 2000, 4000, epochs=30, side=8, batch=64)
PAPER = kit.image_setting("cifar10", 5_000, 5_000, epochs=30, augmented=True, precision="bfloat16")
EXPERIMENT = kit.Experiment(
    "gadam-imagenet",
    "Averages and GadamX against SGD with the step schedule",
    kit.SPECTRAL,
    "§§7.8.2 and 7.10, Table 7.4, Figures 7.7, 7.18 and 7.19",
    {
        "smoke": cells(SMOKE, ("VGG-4×4-BN",), seeds=2, more_seeds=1),
        "cpu": cells(CPU, ("VGG-4×16-BN",), seeds=5, more_seeds=2),
        "paper": cells(PAPER, ("PreResNet-20", "WideResNet-16×4")),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        CIFAR-10 and small networks in place of ImageNet, which is not available: its claims are not
          tested.
        Three of the comparisons are judged on CIFAR-10 all the same, as claims of ours.
        IMAGENET_32 and IMAGENET in experiments/averaging/gadam_imagenet.py read the real files
          where they exist.
        Rates of §7.10: SGD 0.1, a tenth after each third; SGD IA down to 0.003; GadamX 0.3; Gadam δ
          = 1 at 0.5.
        Not printed, and chosen here: rates while averaging (a half), and the decays of both Gadam.
        Averages over the last third of the epochs, as in Figure 7.18.
        On a GPU PreResNet-20 and, for Table 7.4 alone, WideResNet-16×4, in place of PRN-110 and
          WRN-28-10.
        They have 5,000 images; on a CPU there is one network of VGG's kind.
        Both have the same rates, where §7.7.1 has separate ones for each network, and 200 epochs
          for the first.
        Table 7.4 is read network by network, §7.10 of the first alone. On a GPU forward passes are
          in bfloat16.
        Untuned are the rates of ImageNet 32 × 32, 0.03, with half of it while averaging; on a CPU
          of two seeds.
        These runs, AdamW and Padam were added later; Padam has SGD's rate.
    """),
    "PreResNet-110 (200 epochs) and WideResNet-28×10 on ImageNet 32 × 32, ResNet-50 and"
    " ResNet-101 on ImageNet (90 epochs), 3 runs.",
    (
        kit.Size("PreResNet-110", "imagenet32", epochs=200),
        kit.Size("WideResNet-28×10", "imagenet32"),
        kit.Size("ResNet-50", "imagenet", epochs=90),
        kit.Size("ResNet-101", "imagenet", epochs=90),
    ),
)
