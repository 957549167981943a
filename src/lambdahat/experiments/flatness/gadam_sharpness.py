"""Gadam against SGD: sharpness and accuracy (§5, Figures 8–10 of the flatness paper)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
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
    least_decades,
    paired_difference,
)
from lambdahat.experiments.kit.experiment import (
    FLATNESS,
    Experiment,
    Size,
    notes,
    saturated,
    subject,
)
from lambdahat.experiments.kit.training import (
    Images,
    curvature_problem,
    final_row,
    hessian_row,
    images,
    modes_of,
    network,
    train,
    train_by_sgd,
)
from lambdahat.optim.adaptive import Gadam
from lambdahat.optim.schedules import averaging_decay
from lambdahat.results.charts import Chart, Series
from lambdahat.training import Run

OPTIMIZERS = ("SGD", "Gadam")
AVERAGED_FROM = 161 / 300  # of the epochs (chapter 7, spectral thesis)
SGD_DECAY, SGD_RATE = 3e-4, 0.1
GADAM_DECAY, GADAM_RATE = 0.25, 5e-4
NAMES = {
    "accuracy": "validation accuracy, %",
    "training accuracy": "training accuracy, %",
    "loss": "training loss",
    "norm": "weight norm",
    "largest": "λ₁",
    "frobenius": "mean squared eigenvalue tr(H²)/P",
}
# Printed for VGG-16 with batch norm: SGD and Gadam, or their ratio; in words, and where
PUBLISHED = {
    ("largest", "train"): (1, 40, "almost 40× on CIFAR-100", "§5, Figure 8"),
    ("largest", "eval"): (1, 35, "35× on CIFAR-100", "§5, Figure 10"),
    ("frobenius", "train"): (1e-4, 0.02, "0.0001 to 0.02 on CIFAR-100", "§5"),
    ("frobenius", "eval"): (1.3e-5, 0.04, "1.3e-5 to 0.04 on CIFAR-100", "§5"),
}
ON_CIFAR10 = {
    ("frobenius", "train"): (1.43e-5, 1.55e-3, "1.43e-5 to 1.55e-3 on CIFAR-10", "§5, Figure 9"),
    ("frobenius", "eval"): (7.7e-7, 0.012, "7.7e-7 to 0.012 on CIFAR-10", "§5"),
}
PAPERS = "VGG-16 with batch norm"
SIMILAR = 1.0  # points of training accuracy


@dataclass(frozen=True)
class GadamSharpnessScale(Scale):
    """One scale; the Hessian is over ``samples`` images."""

    network: str
    samples: int
    depth: int
    side: int = 0
    augmented: bool = False
    precision: str = "float32"


def cells(config: GadamSharpnessScale) -> list[Cell]:
    """Optimiser × seed."""
    base = settings_of(config, "seeds")
    return [
        {**base, "optimizer": name, "seed": seed}
        for name in OPTIMIZERS
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch, then one for each mode of the batch norm; Gadam's end is the average of
    its iterates.
    """
    found = images(cell, device)
    start = network(cell["network"], found, cell["seed"])
    history, model = (
        _by_sgd(start, found, cell) if cell["optimizer"] == "SGD" else _by_gadam(start, found, cell)
    )
    rows: list[Row] = [
        {"mode": "", "epoch": row["epoch"], "accuracy": 100 * row["validation_accuracy"]}
        for row in history.epochs
    ]
    quality = final_row(model, found)
    return rows + [
        {"mode": mode, **quality, **hessian_row(curvature_problem(model, found, cell, mode), cell)}
        for mode in modes_of(model)
    ]


def _by_sgd(model: nn.Module, found: Images, cell: Cell) -> tuple[Run, nn.Module]:
    return train_by_sgd(model, found, {**cell, "rate": SGD_RATE}, SGD_DECAY), model


def _by_gadam(model: nn.Module, found: Images, cell: Cell) -> tuple[Run, nn.Module]:
    """AdamW with the schedule of Eq. 13, its iterates averaged once per epoch; the averaged
    model.
    """
    x = found.training[0]
    steps = math.ceil(len(x) / cell["batch"])
    first = max(1, round(AVERAGED_FROM * cell["epochs"]))
    optimizer = Gadam(
        model.parameters(),
        lr=GADAM_RATE,
        weight_decay=GADAM_DECAY,
        average_start=first * steps,
        average_every=steps,
    )
    schedule = averaging_decay(optimizer, cell["epochs"], first)
    history = train(found.problem(model), cell, optimizer, schedule, found.held_out)
    batches = [part for part in x.split(cell["batch"]) if len(part) > 1]
    with torch.no_grad():
        return history, optimizer.averaged_model(model, batches)


def claims(rows: Rows) -> Iterator[Claim]:
    """Better and sharper, at once and apart in both modes; and no better trained."""
    ours = rows.where(mode=("train", "eval"))
    sgd, gadam = (ours.where(optimizer=name) for name in OPTIMIZERS)
    what = subject(ours)
    sentence = f"{what}: Gadam's validation accuracy is above SGD's"
    printed = f"clearly better on CIFAR-100 ({PAPERS})"
    better = Claim(sentence, "§5, Figure 8c", printed, gap(gadam, sgd, "accuracy"), unit=" points")
    sharper = {key: _sharper(what, gadam, sgd, *key) for key in PUBLISHED}
    norms = {f"λ₁ in {mode} mode": sharper["largest", mode] for mode in ("train", "eval")}
    sentence = f"{what}: Gadam's validation accuracy and its λ₁ in both modes are above SGD's"
    printed = f"better, and 40× and 35× sharper, on CIFAR-100 ({PAPERS})"
    parts = {"validation accuracy": better, **norms}
    yield jointly(sentence, "§5, Figures 8 and 10", printed, parts)
    yield better
    sentence = f"{what}: Gadam and SGD train to similar accuracy (within {SIMILAR:g} point)"
    printed = "99.81 and 99.64 on CIFAR-100"
    reading = gap(gadam, sgd, "training accuracy")
    yield Claim(
        sentence, "§5", printed, reading, "within", 0.0, SIMILAR, " points", saturated(gadam, sgd)
    )
    yield from sharper.values()
    yield _magnified(what, gadam, sgd)


def _printed(rows: Rows) -> dict[tuple[str, str], tuple[float, float, str, str]]:
    """What is printed of the data set of the rows, else of CIFAR-100."""
    return PUBLISHED | (ON_CIFAR10 if rows[0]["data"] == "cifar10" else {})


def _sharper(what: str, gadam: Rows, sgd: Rows, column: str, mode: str) -> Claim:
    low, high, printed, source = _printed(sgd)[column, mode]
    bound, tail = least_decades(low, high), f"(batch norm in {mode} mode)"
    sentence = (
        f"{what}: Gadam's {NAMES[column]} is above SGD's by more than {bound:.2g} decades {tail}"
    )
    reading = decades(gadam.where(mode=mode), sgd.where(mode=mode), column)
    return Claim(sentence, source, f"{printed} ({PAPERS})", reading, bound=bound, unit=" decades")


def _magnified(what: str, gadam: Rows, sgd: Rows) -> Claim:
    ratios = {}
    for mode in ("eval", "train"):
        upper, lower = (logs(part.where(mode=mode), "frobenius") for part in (gadam, sgd))
        ratios[mode] = {seed: upper[seed] - lower[seed] for seed in upper if seed in lower}
    sentence = f"{what}: the ratio of tr(H²)/P is larger in evaluation mode"
    reading = paired_difference(ratios["eval"], ratios["train"])
    return Claim(sentence, "§1", f"more extreme ({PAPERS})", reading, unit=" decades")


def tables(rows: Rows) -> Iterator[Table]:
    """SGD beside Gadam in each mode of the batch norm."""
    for mode in ("train", "eval"):
        part = rows.where(mode=mode)
        sgd, gadam = (part.where(optimizer=name) for name in OPTIMIZERS)
        lines = []
        for column, words in NAMES.items():
            ratio = 10 ** decades(gadam, sgd, column).value
            lines.append(
                (
                    words,
                    str(over_seeds(sgd, column)),
                    str(over_seeds(gadam, column)),
                    f"{ratio:.3g}×",
                    _printed(part)[column, mode][2] if (column, mode) in PUBLISHED else "",
                )
            )
        title = (
            f"{part[0]['network']}, {part[0]['parameters']:,} parameters, Hessian in {mode} mode"
        )
        yield Table(title, ("", *OPTIMIZERS, "ratio", "paper"), tuple(lines))


def charts(rows: Rows) -> Iterator[Chart]:
    """Accuracy over epochs, sharpness in both modes, and the spectra of the first seed."""
    accuracy = tuple(
        curve(name, rows.where(mode="", optimizer=name), "accuracy") for name in OPTIMIZERS
    )
    title = "Validation accuracy of the iterates"
    yield Chart(title, "epoch", NAMES["accuracy"], accuracy, source="Figure 8c")
    modes = ["train", "eval"]
    for column in ("largest", "frobenius"):
        series = []
        for name in OPTIMIZERS:
            readings = [over_seeds(rows.where(mode=mode, optimizer=name), column) for mode in modes]
            series.append(
                Series(name, modes, [r.value for r in readings], errors(readings), "points")
            )
        title = titled(NAMES[column])
        words = NAMES[column]
        yield Chart(
            title, "mode of the batch norm", words, tuple(series), y_log=True, source="Figures 8–10"
        )
    for mode, source in zip(modes, ("Figures 8 and 9", "Figure 10"), strict=True):
        spectra = tuple(stems(row["optimizer"], row) for row in rows.where(mode=mode, seed=0))
        yield Chart(
            f"Spectrum in {mode} mode", "eigenvalue", "weight", spectra, y_log=True, source=source
        )


EXPERIMENT = Experiment(
    "gadam-sharpness",
    "Sharpness and accuracy of Gadam and of SGD",
    FLATNESS,
    "§5, Figures 8–10",
    {
        "smoke": GadamSharpnessScale(
            "digits", 96, 64, 3, 2, "WideResNet-10×1", samples=32, depth=6, side=4, batch=32
        ),
        "cpu": GadamSharpnessScale(
            "cifar10", 1000, 1000, 50, 4, "WideResNet-10×1", samples=256, depth=30, side=8, batch=32
        ),
        "paper": GadamSharpnessScale(
            "cifar100",
            45_000,
            5_000,
            100,
            3,
            "VGG-16-BN",
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
            Reduced at the paper's scale: 100 epochs; averages begin after the share 161/300 of
              them.
            On a CPU a small WideResNet and 1,000 images of 8 × 8 in place of VGG-16 with batch
              norm.
            SGD: rate 0.1, L2 decay 3e-4. Gadam: rate 5e-4, decoupled decay 0.25. The paper prints
              two decays for each.
            The paper's Frobenius norm is read as tr(H²)/P.
            Training accuracies of 100 % on both sides are not compared.
        """),
        LEAST_EFFECT,
    ),
    size=(
        "VGG-16 with batch norm on CIFAR-100 and CIFAR-10, 300 epochs, Gadam at 0.0005 and SGD at"
        " 0.1; split, batch size and seeds are not in the text."
    ),
    sizes=(Size("VGG-16-BN", "cifar100", epochs=300), Size("VGG-16-BN", "cifar10", epochs=300)),
)
