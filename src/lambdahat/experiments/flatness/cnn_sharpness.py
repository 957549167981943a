"""Convolutional networks, sharper and better at once: with weight decay against without (cnn-decay,
Figures 4–7 of the flatness paper), and by Gadam against SGD (gadam-sharpness, §5, Figures 8–10).

The Hessian is taken with batch norm in training and in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import nn

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Reading, Row, Rows, Table, training
from lambdahat.optim.adaptive import Gadam
from lambdahat.optim.schedules import averaging_decay

NAMES = {
    "accuracy": "validation accuracy, %",
    "training accuracy": "training accuracy, %",
    "loss": "training loss",
    "norm": "weight norm",
    "largest": "λ₁",
    "frobenius": "mean squared eigenvalue tr(H²)/P",
}
SHARPNESS = ("largest", "frobenius")
FROBENIUS = "The paper's Frobenius norm is read as tr(H²)/P."


def modes_rows(model: nn.Module, data: training.Images, cell: Cell) -> list[Row]:
    """A row for each mode of the batch norm: how well the network does, and its Hessian there."""
    quality, out = training.final_row(model, data), []
    for mode in training.modes_of(model):
        problem = training.curvature_problem(model, data, cell, mode)
        out.append({"mode": mode, **quality, **training.hessian_row(problem, cell)})
    return out


def magnification(upper: Rows, lower: Rows, column: str) -> Reading:
    """The log-ratio of two settings in evaluation mode less that in training mode."""
    rises = []
    for mode in ("eval", "train"):
        high, low = (kit.logs(part.where(mode=mode), column) for part in (upper, lower))
        rises.append({seed: high[seed] - low[seed] for seed in high if seed in low})
    return kit.paired_difference(*rises)


def lines_of(lower: Rows, upper: Rows) -> list[tuple[str, ...]]:
    """Two settings and the ratio of the second to the first, for every quantity."""
    lines = []
    for column, words in NAMES.items():
        ratio = 10 ** kit.decades(upper, lower, column).value
        pair = (str(kit.over_seeds(part, column)) for part in (lower, upper))
        lines.append((words, *pair, f"{ratio:.3g}×"))
    return lines


def _title(rows: Rows, mode: str) -> str:
    return f"{rows[0]['network']}, {rows[0]['parameters']:,} parameters, Hessian in {mode} mode"


# The paper's network that one of ours stands for, by the first word of its name; all on CIFAR-100
NINE_LAYERS, PRERESNET = "nine layers, CIFAR-100", "PreResNet-164, CIFAR-100"
WIDE_RESNET = "WideResNet-28×10, CIFAR-100"
PAPERS = {
    "All-CNN": (NINE_LAYERS, "Figure 4"),
    "LeNet-5": (NINE_LAYERS, "Figure 4"),
    "PreResNet": (PRERESNET, "Figure 5"),
    "WideResNet": (WIDE_RESNET, "Figures 6 and 7"),
}
# Printed there, by quantity and mode of the batch norm: without and with weight decay, or by how
# much more
PUBLISHED = {
    (NINE_LAYERS, "frobenius", "eval"): (0.01, 0.02),
    (NINE_LAYERS, "excess", "eval"): (1.89, 1.57),
    (PRERESNET, "accuracy", ""): (73.12, 77.36),
    (PRERESNET, "frobenius", "train"): (5e-5, 3e-3),
    (WIDE_RESNET, "accuracy", ""): (0, 5),
    (WIDE_RESNET, "largest", "train"): (1, 30),
    (WIDE_RESNET, "frobenius", "train"): (2.3e-7, 1e-4),
    (WIDE_RESNET, "largest", "eval"): (1, 1000),
    (WIDE_RESNET, "frobenius", "eval"): (9.8e-12, 4.9e-5),
}
ONE_NUMBER: dict[float, str] = {5: "more than 5 points", 30: "almost 30×", 1000: "nearly 1000×"}


def decay_cells(
    images: Cell, networks: Iterable[tuple[str, int, float]], seeds: int, decay: float = 5e-4
) -> list[Cell]:
    """Network with the side of its images and its rate × weight decay or none × seed."""
    names = "network", "side", "rate"
    named = [dict(zip(names, each, strict=True)) for each in networks]
    return kit.grid(images, network=named, decay=(0.0, decay), seed=range(seeds))


def decay_run(cell: Cell, device: str) -> list[Row]:
    """A row for each mode of the batch norm."""
    model, data = training.model_and_images(cell, device)
    training.train_by_sgd(model, data, cell, cell["decay"])
    rows = modes_rows(model, data, cell)
    return [{**row, "excess": row["validation loss"] - row["loss"]} for row in rows]


def decay_claims(rows: Rows) -> Iterator[Claim]:
    """Each network is better and sharper with weight decay, at once and apart; by which mode."""
    for _, part in rows.groups("network"):
        modes, (paper, figure), what = part.distinct("mode"), _paper(part), kit.subject(part)
        better = _change(part, "accuracy", "")
        pairs = [(column, mode) for mode in modes for column in SHARPNESS]
        sharper = {pair: _change(part, *pair) for pair in pairs}
        several = len(modes) > 1
        label = "λ₁ in {} mode" if several else "λ₁"
        norms = {label.format(mode): sharper["largest", mode] for mode in modes}
        joined = f"validation accuracy and {' and '.join(norms)} rise together with weight decay"
        printed = f"sharper, despite generalising better ({paper})"
        parts = {"validation accuracy": better, **norms}
        yield kit.jointly(f"{what}: {joined}", f"§4, {figure}", printed, parts)
        yield better
        yield from sharper.values()
        if not several:
            yield _change(part, "excess", "eval", "below")
            continue
        without, decayed = _pair(part)
        for column in SHARPNESS:
            words = f"{what}: {NAMES[column]} rises more in evaluation than in training mode"
            said = f"§4, {figure}", f"massively magnified ({paper})"
            yield Claim(words, *said, magnification(decayed, without, column), unit=" decades")


def _pair(rows: Rows) -> tuple[Rows, Rows]:
    """The rows without and those with weight decay."""
    low, high = sorted(rows.distinct("decay"))
    return rows.where(decay=low), rows.where(decay=high)


def _paper(rows: Rows) -> tuple[str, str]:
    """The paper's network and figure."""
    name = rows[0]["network"]
    return PAPERS[name if name in PAPERS else name.split("-")[0]]


def _change(rows: Rows, column: str, mode: str, direction: str = "above") -> Claim:
    """The claim that weight decay changes a quantity; sharpness in decades."""
    without, decayed = _pair(rows.where(mode=mode) if mode else rows)
    sharp, (paper, figure) = column in SHARPNESS, _paper(rows)
    reading = (kit.decades if sharp else kit.gap)(decayed, without, column)
    unit = {"accuracy": " points", "excess": ""}.get(column, " decades")
    bound, margin, printed = 0.0, "", "it does"
    if (paper, column, mode) in PUBLISHED:
        low, high = PUBLISHED[paper, column, mode]
        bound = (kit.least_decades if sharp else kit.least)(low, high)
        printed = ONE_NUMBER.get(high, f"{low:g} to {high:g}")
        margin = f", by more than {abs(bound):.2g}{unit}"
    names = {**NAMES, "excess": "validation less training loss"}
    change = "rises" if direction == "above" else "falls"
    words = f"{names[column].removesuffix(', %')} {change} with weight decay{margin}"
    tail = f" (batch norm in {mode} mode)" if len(rows.distinct("mode")) > 1 and mode else ""
    said = f"{kit.subject(rows)}: {words}{tail}", f"§4, {figure}", f"{printed} ({paper})"
    return Claim(*said, reading, direction, bound, unit=unit)


def decay_tables(rows: Rows) -> Iterator[Table]:
    """By network and mode: without and with weight decay, and the ratio."""
    for (_, mode), part in rows.groups("network", "mode"):
        pair = _pair(part)
        header = ("", *(f"weight decay {half[0]['decay']:g}" for half in pair), "ratio")
        yield kit.table(_title(part, mode), header, tuple(lines_of(*pair)))


def decay_charts(rows: Rows) -> Iterator[Chart]:
    """λ₁ and tr(H²)/P with and without weight decay; then the spectra of the first seed."""
    groups = {", ".join(key): part for key, part in rows.groups("network", "mode")}
    for column in SHARPNESS:
        series = []
        for decay in sorted(rows.distinct("decay")):
            halves = {name: part.where(decay=decay) for name, part in groups.items()}
            series.append(kit.points(f"decay {decay:g}", halves, column))
        yield _sharpness_chart(column, "network", series, "Figures 4–7")
    for name, part in groups.items():
        first, title = part.where(seed=0), f"Spectrum, {name} mode"
        yield kit.spectra(title, first, "decay {decay:g}", _paper(part)[1])


def _sharpness_chart(column: str, across: str, series: list[kit.Series], source: str) -> Chart:
    words = NAMES[column]
    return Chart(kit.capitalize(words), across, words, tuple(series), y_log=True, source=source)


NETWORKS = (("All-CNN", 0, 0.03), ("PreResNet-164", 0, 0.1), ("WideResNet-28×10", 0, 0.1))
SMALL_NETWORKS = (("LeNet-5", 28, 0.03), ("PreResNet-11", 8, 0.1), ("WideResNet-10×1", 8, 0.1))
# the Hessian is over ``samples`` images, by ``depth`` Lanczos steps
_PLAIN: Cell = {"batch": 32, "augmented": False, "precision": "float32"}
_TINY = partial(kit.setting, "digits", 96, 64, samples=32, depth=6, **_PLAIN)
_SMALL = partial(kit.setting, "cifar10", 1000, 1000, samples=256, depth=30, **_PLAIN)
_WHOLE = kit.setting("cifar100", 45_000, 5_000, epochs=34, samples=512, depth=60)
_WHOLE |= {"augmented": True, "precision": "bfloat16"}
_DECAY_NOTES = kit.sentences(f"""
    Reduced at the paper's scale: 34 epochs of CIFAR-100 where the paper has 300.
    On a CPU: LeNet-5 in place of the nine-layer network, small residual networks, 1,000 images of 8
      × 8.
    On a CPU the images are those of CIFAR-10 in place of CIFAR-100.
    On a CPU weight decay is 5e-3: over so few steps 5e-4 would shrink the weights by a few per cent
      at most.
    The learning rate of residual networks is 0.1, from the paper's grid; the paper states 0.03 for
      the nine-layer network only.
    The Hessian is that of the first training images, not cropped or flipped; in training mode in
      their batches.
    {FROBENIUS}
    {kit.LEAST_EFFECT}
""")
CNN_DECAY = kit.Experiment(
    "cnn-decay",
    "Sharpness and accuracy of convolutional networks with and without weight decay",
    kit.FLATNESS,
    "§4, Figures 4–7",
    {
        "smoke": decay_cells(_TINY(epochs=2), [("WideResNet-10×1", 4, 0.1)], seeds=2),
        "cpu": decay_cells(_SMALL(epochs=40), SMALL_NETWORKS, seeds=3, decay=5e-3),
        "paper": decay_cells(_WHOLE, NETWORKS, seeds=4),
    },
    *(decay_run, decay_claims, decay_tables, decay_charts),
    _DECAY_NOTES,
    "CIFAR-100, 300 epochs: a nine-layer network of 1,387,108 parameters at rate 0.03,"
    " PreResNet-164 and WideResNet-28×10; split, batch size and seeds are not in the text.",
    tuple(kit.Size(name, "cifar100", epochs=300) for name, *_ in NETWORKS),
)

OPTIMIZERS = ("SGD", "Gadam")
AVERAGED_FROM = 161 / 300  # of the epochs (chapter 7, spectral thesis)
SGD_DECAY, SGD_RATE = 3e-4, 0.1
GADAM_DECAY, GADAM_RATE = 0.25, 5e-4
# Printed for VGG-16 with batch norm: SGD and Gadam, or their ratio; in words, and where
RATIOS = {
    ("largest", "train"): (1, 40, "almost 40× on CIFAR-100", "§5, Figure 8"),
    ("largest", "eval"): (1, 35, "35× on CIFAR-100", "§5, Figure 10"),
    ("frobenius", "train"): (1e-4, 0.02, "0.0001 to 0.02 on CIFAR-100", "§5"),
    ("frobenius", "eval"): (1.3e-5, 0.04, "1.3e-5 to 0.04 on CIFAR-100", "§5"),
}
ON_CIFAR10 = {
    ("frobenius", "train"): (1.43e-5, 1.55e-3, "1.43e-5 to 1.55e-3 on CIFAR-10", "§5, Figure 9"),
    ("frobenius", "eval"): (7.7e-7, 0.012, "7.7e-7 to 0.012 on CIFAR-10", "§5"),
}
VGG = "VGG-16 with batch norm"
SIMILAR = 1.0  # points of training accuracy


def gadam_cells(images: Cell, network: str, side: int, seeds: int) -> list[Cell]:
    """Optimiser × seed."""
    base = images | {"network": network, "side": side}
    return kit.grid(base, optimizer=OPTIMIZERS, seed=range(seeds))


def gadam_run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch, then one per mode of the batch norm; Gadam's are those of its average."""
    model, data = training.model_and_images(cell, device)
    if cell["optimizer"] == "SGD":
        history = training.train_by_sgd(model, data, {**cell, "rate": SGD_RATE}, SGD_DECAY)
    else:
        # AdamW with the schedule of Eq. 13, its iterates averaged once per epoch
        x = data.training[0]
        steps = math.ceil(len(x) / cell["batch"])
        first = max(1, round(AVERAGED_FROM * cell["epochs"]))
        when = {"average_start": first * steps, "average_every": steps}
        optimizer = Gadam(model.parameters(), GADAM_RATE, weight_decay=GADAM_DECAY, **when)
        schedule = averaging_decay(optimizer, cell["epochs"], first)
        history = training.train(data.problem(model), cell, optimizer, schedule, data.held_out)
        batches = [part for part in x.split(cell["batch"]) if len(part) > 1]
        with torch.no_grad():
            model = optimizer.averaged_model(model, batches)
    rows: list[Row] = [
        {"mode": "", "epoch": row["epoch"], "accuracy": 100 * row["validation_accuracy"]}
        for row in history.epochs
    ]
    return rows + modes_rows(model, data, cell)


def gadam_claims(rows: Rows) -> Iterator[Claim]:
    """Better and sharper, at once and apart in both modes; and no better trained."""
    ours = rows.where(mode=("train", "eval"))
    sgd, gadam = (ours.where(optimizer=name) for name in OPTIMIZERS)
    what = kit.subject(ours)
    claim = kit.ClaimTexts(f"""
        better: {what}: Gadam's validation accuracy is above SGD's
          | §5, Figure 8c | clearly better on CIFAR-100 ({VGG}) | above | points
        similar: {what}: Gadam and SGD train to similar accuracy (within {SIMILAR:g} point)
          | §5 | 99.81 and 99.64 on CIFAR-100 | within {SIMILAR:g} of 0 | points
        ratio: {what}: the ratio of tr(H²)/P is larger in evaluation mode
          | §1 | more extreme ({VGG}) | above | decades
    """)
    better = claim("better", kit.gap(gadam, sgd, "accuracy"))
    sharper = {key: _sharper(what, gadam, sgd, *key) for key in RATIOS}
    norms = {f"λ₁ in {mode} mode": sharper["largest", mode] for mode in ("train", "eval")}
    words = "Gadam's validation accuracy and its λ₁ in both modes are above SGD's"
    printed = f"better, and 40× and 35× sharper, on CIFAR-100 ({VGG})"
    parts = {"validation accuracy": better, **norms}
    yield kit.jointly(f"{what}: {words}", "§5, Figures 8 and 10", printed, parts)
    yield better
    reading = kit.gap(gadam, sgd, "training accuracy")
    yield claim("similar", reading, unmet=kit.saturation_reason(gadam, sgd))
    yield from sharper.values()
    yield claim("ratio", magnification(gadam, sgd, "frobenius"))


def _printed_ratios(rows: Rows) -> dict[tuple[str, str], tuple[float, float, str, str]]:
    """The printed ratios on the data set of the rows, else on CIFAR-100."""
    return RATIOS | (ON_CIFAR10 if rows[0]["data"] == "cifar10" else {})


def _sharper(what: str, gadam: Rows, sgd: Rows, column: str, mode: str) -> Claim:
    low, high, printed, source = _printed_ratios(sgd)[column, mode]
    bound = kit.least_decades(low, high)
    words = f"Gadam's {NAMES[column]} is above SGD's by more than {bound:.2g} decades"
    said = f"{what}: {words} (batch norm in {mode} mode)", source, f"{printed} ({VGG})"
    reading = kit.decades(gadam.where(mode=mode), sgd.where(mode=mode), column)
    return Claim(*said, reading, bound=bound, unit=" decades")


def gadam_tables(rows: Rows) -> Iterator[Table]:
    """SGD beside Gadam in each mode of the batch norm."""
    for mode in ("train", "eval"):
        part = rows.where(mode=mode)
        printed = _printed_ratios(part)
        lines = lines_of(*(part.where(optimizer=name) for name in OPTIMIZERS))
        words = [printed[column, mode][2] if column in SHARPNESS else "" for column in NAMES]
        labelled = tuple((*line, word) for line, word in zip(lines, words, strict=True))
        yield kit.table(_title(part, mode), ("", *OPTIMIZERS, "ratio", "paper"), labelled)


def gadam_charts(rows: Rows) -> Iterator[Chart]:
    """Accuracy over epochs, sharpness in both modes, and the spectra of the first seed."""
    halves = rows.by("optimizer", OPTIMIZERS).items()
    curves = kit.curves(rows.where(mode="").by("optimizer", OPTIMIZERS), "accuracy")
    title = "Validation accuracy of the iterates"
    yield Chart(title, "epoch", NAMES["accuracy"], curves, source="Figure 8c")
    modes = {"train": "Figures 8 and 9", "eval": "Figure 10"}
    for column in SHARPNESS:
        series = [kit.points(name, half.by("mode", [*modes]), column) for name, half in halves]
        yield _sharpness_chart(column, "mode of the batch norm", series, "Figures 8–10")
    for mode, source in modes.items():
        first = rows.where(mode=mode, seed=0)
        yield kit.spectra(f"Spectrum in {mode} mode", first, "{optimizer}", source)


_GADAM_NOTES = kit.sentences(f"""
    Reduced at the paper's scale: 34 epochs; averages begin after the share 161/300 of them.
    On a CPU a small WideResNet and 1,000 images of 8 × 8 in place of VGG-16 with batch norm.
    SGD: rate 0.1, L2 decay 3e-4. Gadam: rate 5e-4, decoupled decay 0.25. The paper prints two
      decays for each.
    {FROBENIUS}
    Training accuracies of 100 % on both sides are not compared.
    {kit.LEAST_EFFECT}
""")
GADAM_SHARPNESS = kit.Experiment(
    "gadam-sharpness",
    "Sharpness and accuracy of Gadam and of SGD",
    kit.FLATNESS,
    "§5, Figures 8–10",
    {
        "smoke": gadam_cells(_TINY(epochs=3), "WideResNet-10×1", 4, seeds=2),
        "cpu": gadam_cells(_SMALL(epochs=50), "WideResNet-10×1", 8, seeds=4),
        "paper": gadam_cells(_WHOLE, "VGG-16-BN", 0, seeds=4),
    },
    *(gadam_run, gadam_claims, gadam_tables, gadam_charts),
    _GADAM_NOTES,
    "VGG-16 with batch norm on CIFAR-100 and CIFAR-10, 300 epochs, Gadam at 0.0005 and SGD at 0.1;"
    " split, batch size and seeds are not in the text.",
    (kit.Size("VGG-16-BN", "cifar100", epochs=300), kit.Size("VGG-16-BN", "cifar10", epochs=300)),
)
