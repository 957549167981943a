"""Convolutional networks with and without weight decay, batch norm in both modes (Figures 4–7,
flatness paper).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    decades,
    errors,
    gap,
    logs,
    over_seeds,
    settings_of,
    stems,
    titled,
)
from lambdahat.experiments.kit.claims import (
    LEAST_EFFECT,
    Claim,
    Table,
    jointly,
    least,
    least_decades,
    paired_difference,
)
from lambdahat.experiments.kit.experiment import FLATNESS, Experiment, Size, notes, subject
from lambdahat.experiments.kit.training import (
    curvature_problem,
    final_row,
    hessian_row,
    images,
    modes_of,
    network,
    train_by_sgd,
)
from lambdahat.results.charts import Chart, Series

NAMES = {
    "accuracy": "validation accuracy, %",
    "training accuracy": "training accuracy, %",
    "loss": "training loss",
    "norm": "weight norm",
    "largest": "λ₁",
    "frobenius": "mean squared eigenvalue tr(H²)/P",
}
SHARPNESS = ("largest", "frobenius")
# The paper's network that one of ours stands for, by the first word of its name; all on CIFAR-100
NINE_LAYERS = "nine layers, CIFAR-100"
PAPERS = {
    "All-CNN": (NINE_LAYERS, "Figure 4"),
    "LeNet-5": (NINE_LAYERS, "Figure 4"),
    "PreResNet": ("PreResNet-164, CIFAR-100", "Figure 5"),
    "WideResNet": ("WideResNet-28×10, CIFAR-100", "Figures 6 and 7"),
}
# Printed there, by quantity and mode of the batch norm: without and with weight decay, or by how
# much more
PUBLISHED = {
    (NINE_LAYERS, "frobenius", "eval"): (0.01, 0.02),
    (NINE_LAYERS, "excess", "eval"): (1.89, 1.57),
    ("PreResNet-164, CIFAR-100", "accuracy", ""): (73.12, 77.36),
    ("PreResNet-164, CIFAR-100", "frobenius", "train"): (5e-5, 3e-3),
    ("WideResNet-28×10, CIFAR-100", "accuracy", ""): (0, 5),
    ("WideResNet-28×10, CIFAR-100", "largest", "train"): (1, 30),
    ("WideResNet-28×10, CIFAR-100", "frobenius", "train"): (2.3e-7, 1e-4),
    ("WideResNet-28×10, CIFAR-100", "largest", "eval"): (1, 1000),
    ("WideResNet-28×10, CIFAR-100", "frobenius", "eval"): (9.8e-12, 4.9e-5),
}
ONE_NUMBER: dict[float, str] = {5: "more than 5 points", 30: "almost 30×", 1000: "nearly 1000×"}


@dataclass(frozen=True)
class CnnDecayScale(Scale):
    """One scale: networks, each with the side its images are pooled to and its rate; ``decay`` is
    set against none.

    The Hessian is over ``samples`` images.
    """

    networks: tuple[tuple[str, int, float], ...]
    samples: int
    depth: int
    decay: float = 5e-4
    augmented: bool = False
    precision: str = "float32"


def cells(config: CnnDecayScale) -> list[Cell]:
    """Network × weight decay × seed."""
    base = settings_of(config, "networks", "decay", "seeds")
    return [
        {**base, "network": name, "side": side, "rate": rate, "decay": decay, "seed": seed}
        for name, side, rate in config.networks
        for decay in (0.0, config.decay)
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each mode of the batch norm: how well the network does, and its Hessian in that
    mode.
    """
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    train_by_sgd(model, found, cell, cell["decay"])
    quality = final_row(model, found)
    quality["excess"] = quality["validation loss"] - quality["loss"]
    return [
        {"mode": mode, **quality, **hessian_row(curvature_problem(model, found, cell, mode), cell)}
        for mode in modes_of(model)
    ]


def claims(rows: Rows) -> Iterator[Claim]:
    """For each network: better and sharper with weight decay, at once and apart; which mode
    shows it more.
    """
    for name in rows.distinct("network"):
        part = rows.where(network=name)
        yield from _rises(part)
        if len(part.distinct("mode")) > 1:
            yield from _magnified(part)


def _rises(rows: Rows) -> Iterator[Claim]:
    modes = rows.distinct("mode")
    better = _change(rows, "accuracy", "")
    sharper = {
        (column, mode): _change(rows, column, mode) for mode in modes for column in SHARPNESS
    }
    norms = {
        f"λ₁ in {mode} mode" if len(modes) > 1 else "λ₁": sharper["largest", mode] for mode in modes
    }
    paper, figure = _paper(rows)
    sentence = (
        f"{subject(rows)}: validation accuracy and {' and '.join(norms)} rise together with weight"
        " decay"
    )
    printed = f"sharper, despite generalising better ({paper})"
    both = jointly(sentence, f"§4, {figure}", printed, {"validation accuracy": better, **norms})
    excess = [_change(rows, "excess", "eval", "below")] if len(modes) == 1 else []
    yield both
    yield better
    yield from sharper.values()
    yield from excess


def _pair(rows: Rows) -> tuple[Rows, Rows]:
    """The rows without and those with weight decay."""
    low, high = sorted(rows.distinct("decay"))
    return rows.where(decay=low), rows.where(decay=high)


def _paper(rows: Rows) -> tuple[str, str]:
    """The paper's network and figure."""
    name = rows[0]["network"]
    return PAPERS[name if name in PAPERS else name.split("-")[0]]


def _change(rows: Rows, column: str, mode: str, direction: str = "above") -> Claim:
    """What weight decay does to a quantity: sharpness in decades."""
    without, decayed = _pair(rows.where(mode=mode) if mode else rows)
    sharp = column in SHARPNESS
    reading = (decades if sharp else gap)(decayed, without, column)
    paper, figure = _paper(rows)
    unit = {"accuracy": " points", "excess": ""}.get(column, " decades")
    bound, least_told, printed = 0.0, "", "it does"
    if (paper, column, mode) in PUBLISHED:
        low, high = PUBLISHED[paper, column, mode]
        bound, printed = (
            (least_decades if sharp else least)(low, high),
            ONE_NUMBER.get(high, f"{low:g} to {high:g}"),
        )
        least_told = f", by more than {abs(bound):.2g}{unit}"
    words = (
        "validation less training loss" if column == "excess" else NAMES[column].removesuffix(", %")
    )
    tail = f" (batch norm in {mode} mode)" if len(rows.distinct("mode")) > 1 and mode else ""
    change = "rises" if direction == "above" else "falls"
    sentence = f"{subject(rows)}: {words} {change} with weight decay{least_told}{tail}"
    said = f"{printed} ({paper})"
    return Claim(sentence, f"§4, {figure}", said, reading, direction, bound, unit=unit)


def _magnified(rows: Rows) -> Iterator[Claim]:
    """The ratio of decayed to plain in evaluation mode over that in training mode."""
    paper, figure = _paper(rows)
    for column in SHARPNESS:
        rises = {}
        for mode in ("eval", "train"):
            without, decayed = (logs(part.where(mode=mode), column) for part in _pair(rows))
            rises[mode] = {
                seed: decayed[seed] - without[seed] for seed in decayed if seed in without
            }
        reading = paired_difference(rises["eval"], rises["train"])
        sentence = (
            f"{subject(rows)}: {NAMES[column]} rises more in evaluation than in training mode"
        )
        yield Claim(
            sentence, f"§4, {figure}", f"massively magnified ({paper})", reading, unit=" decades"
        )


def tables(rows: Rows) -> Iterator[Table]:
    """A table for each network and mode of its batch norm: without and with weight decay, and
    the ratio.
    """
    for name in rows.distinct("network"):
        for mode in rows.where(network=name).distinct("mode"):
            part = rows.where(network=name, mode=mode)
            without, decayed = _pair(part)
            lines = []
            for column, words in NAMES.items():
                ratio = 10 ** decades(decayed, without, column).value
                lines.append(
                    (
                        words,
                        str(over_seeds(without, column)),
                        str(over_seeds(decayed, column)),
                        f"{ratio:.3g}×",
                    )
                )
            title = f"{name}, {part[0]['parameters']:,} parameters, Hessian in {mode} mode"
            header = (
                "",
                *(f"weight decay {half[0]['decay']:g}" for half in (without, decayed)),
                "ratio",
            )
            yield Table(title, header, tuple(lines))


def charts(rows: Rows) -> list[Chart]:
    """λ₁ and tr(H²)/P of all networks, with and without weight decay; then the spectra of the
    first seed.
    """
    decays = sorted(rows.distinct("decay"))
    out = [
        Chart(
            titled(NAMES[column]),
            "network",
            NAMES[column],
            tuple(_bars(rows, column, decay) for decay in decays),
            y_log=True,
            source="Figures 4–7",
        )
        for column in SHARPNESS
    ]
    for name in rows.distinct("network"):
        for mode in rows.where(network=name).distinct("mode"):
            part = rows.where(network=name, mode=mode, seed=0)
            spectra = tuple(stems(f"decay {row['decay']:g}", row) for row in part)
            out.append(
                Chart(
                    f"Spectrum, {name}, {mode} mode",
                    "eigenvalue",
                    "weight",
                    spectra,
                    y_log=True,
                    source=_paper(part)[1],
                )
            )
    return out


def _bars(rows: Rows, column: str, decay: float) -> Series:
    places = [
        (name, mode)
        for name in rows.distinct("network")
        for mode in rows.where(network=name).distinct("mode")
    ]
    readings = [
        over_seeds(rows.where(network=name, mode=mode, decay=decay), column)
        for name, mode in places
    ]
    labels = [f"{name}, {mode}" for name, mode in places]
    return Series(
        f"decay {decay:g}",
        labels,
        [reading.value for reading in readings],
        errors(readings),
        "points",
    )


EXPERIMENT = Experiment(
    "cnn-decay",
    "Sharpness and accuracy of convolutional networks with and without weight decay",
    FLATNESS,
    "§4, Figures 4–7",
    {
        "smoke": CnnDecayScale(
            "digits", 96, 64, 2, 2, (("WideResNet-10×1", 4, 0.1),), samples=32, depth=6, batch=32
        ),
        "cpu": CnnDecayScale(
            "cifar10",
            1000,
            1000,
            40,
            3,
            (("LeNet-5", 28, 0.03), ("PreResNet-11", 8, 0.1), ("WideResNet-10×1", 8, 0.1)),
            samples=256,
            depth=30,
            decay=5e-3,
            batch=32,
        ),
        "paper": CnnDecayScale(
            "cifar100",
            45_000,
            5_000,
            100,
            3,
            (("All-CNN", 0, 0.03), ("PreResNet-164", 0, 0.1), ("WideResNet-28×10", 0, 0.1)),
            samples=1024,
            depth=100,
            augmented=True,
            precision="bfloat16",
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        *notes("""
            Reduced at the paper's scale: 100 epochs of CIFAR-100 where the paper has 300.
            On a CPU: LeNet-5 in place of the nine-layer network, small residual networks, 1,000
              images of 8 × 8.
            There the images are CIFAR-10's in place of CIFAR-100's.
            There weight decay is 5e-3, for over so few steps 5e-4 would shorten the weights by a
              few per cent at most.
            Learning rate 0.1 for residual networks, of the paper's grid; it states 0.03 for the
              nine-layer one alone.
            The Hessian is that of the first training images, not cropped or flipped; in training
              mode in their batches.
            The paper's Frobenius norm is read as tr(H²)/P.
        """),
        LEAST_EFFECT,
    ),
    size=(
        "CIFAR-100, 300 epochs: a nine-layer network of 1,387,108 parameters at rate 0.03,"
        " PreResNet-164 and WideResNet-28×10; split, batch size and seeds are not in the text."
    ),
    sizes=(
        Size("All-CNN", "cifar100", epochs=300),
        Size("PreResNet-164", "cifar100", epochs=300),
        Size("WideResNet-28×10", "cifar100", epochs=300),
    ),
)
