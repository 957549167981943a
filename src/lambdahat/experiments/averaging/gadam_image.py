"""Six optimisers on images, with and without averages (Tables 7.2, 7.3, Figures 7.8–7.17)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lambdahat.estimators import spectrum
from lambdahat.experiments.averaging.averaged_training import (
    BASES,
    FULL,
    AveragedTask,
    Trained,
    against_best,
    change,
    decades,
    family,
    gap,
    image_task,
    recipe,
    shared_settings,
    size_of,
    train,
    unlearnt,
    unready,
)
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    errors,
    means,
    over_seeds,
    stems,
)
from lambdahat.experiments.kit.claims import Claim, Claims, Table, TableLines, split_header
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.experiments.kit.training import Images, curvature_problem, hessian_row
from lambdahat.operators.curvature import hessian
from lambdahat.results.charts import Chart, Series

SHARP = ("SGD", "Gadam")
MODES = {"train": "Figures 7.14 and 7.15", "eval": "Figure 7.17"}
SIMILAR = 1.0  # points of training accuracy; the thesis has 99.64 and 99.81
# Printed of VGG-16 with batch norm: how much larger λ₁ is, and tr(H²)/P of SGD and Gadam, on
# CIFAR-100 and CIFAR-10
PRINTED_SHARPNESS = {
    ("largest", "train"): "almost 40× (CIFAR-100)",
    ("largest", "eval"): "35× (CIFAR-100)",
    ("frobenius", "train"): "1e-4 to 0.02 (CIFAR-100), 1.43e-5 to 1.55e-3 (CIFAR-10)",
    ("frobenius", "eval"): "1.3e-5 to 0.04 (CIFAR-100), 7.7e-7 to 0.012 (CIFAR-10)",
}
WORDS = {"largest": "λ₁", "frobenius": "mean squared eigenvalue tr(H²)/P"}


def spectrum_rows(cell: Cell, device: str) -> list[Row]:
    """The end of the run with λ₁, tr(H²)/P and Ritz values of the Hessian, for each mode."""
    task = image_task(cell, device)
    trained = train(cell, task)
    return [_spectrum_row(task, trained, cell, mode) for mode in MODES]


def _spectrum_row(task: AveragedTask, trained: Trained, cell: Cell, mode: str) -> Row:
    first = next(iter(task.problem.batches)).data
    problem = curvature_problem(trained.solution, Images(first, first, 0), cell, mode)
    return {**trained.end, "kind": "spectrum", "mode": mode, **hessian_row(problem, cell)}


def spectrum_claims(rows: Rows) -> list[Claim]:
    """Gadam's solutions are the sharper ones, in each mode, though as well trained and better."""
    found = Claims()
    for network in rows.distinct("network"):
        part = rows.where(network=network)
        unmet = incomparable(*(part.where(optimizer=name) for name in SHARP))
        for (column, mode), printed in PRINTED_SHARPNESS.items():
            sgd, gadam = (part.where(optimizer=name, mode=mode) for name in SHARP)
            words = (
                f"{network}: Gadam generalises better with {WORDS[column]} above SGD's (batch norm"
                f" in {mode} mode)"
            )
            reading = decades(gadam, sgd, column)
            found.add(words, f"§7.9, {MODES[mode]}", printed, reading, unit=" decades", unmet=unmet)
    return found


def incomparable(sgd: Rows, gadam: Rows) -> str:
    """Why two solutions cannot be compared: unequal fits, or Gadam does not generalise better."""
    fits = [over_seeds(part, "training accuracy").value for part in (sgd, gadam)]
    held = [over_seeds(part, "accuracy").value for part in (sgd, gadam)]
    if abs(fits[1] - fits[0]) > SIMILAR:
        return (
            f"training accuracy is {fits[0]:.1f} % with SGD and {fits[1]:.1f} % with Gadam, in the"
            " thesis alike"
        )
    if held[1] <= held[0]:
        return (
            f"Gadam does not generalise better here, {held[1]:.1f} % held out to SGD's"
            f" {held[0]:.1f} %"
        )
    return ""


COLUMNS = {
    "accuracy": "accuracy, %",
    "training accuracy": "in training",
    "solution norm": "‖θ‖",
} | WORDS


def spectrum_tables(rows: Rows) -> list[Table]:
    """A line for each network, mode and optimiser."""
    lines = tuple(
        (
            network,
            mode,
            name,
            *means(rows.where(network=network, mode=mode, optimizer=name), *COLUMNS),
        )
        for network in rows.distinct("network")
        for mode in MODES
        for name in SHARP
    )
    title = "Solutions and their Hessian"
    return [Table(title, ("network", "batch norm", "optimiser", *COLUMNS.values()), lines)]


def spectrum_charts(rows: Rows) -> list[Chart]:
    """The Ritz values of the first seed, network by network and in both modes."""
    out = []
    for network in rows.distinct("network"):
        for mode, source in MODES.items():
            part = rows.where(network=network, mode=mode, seed=0)
            series = tuple(stems(row["optimizer"], row) for row in part)
            title = f"Spectrum of the solutions, {network}, batch norm in {mode} mode"
            out.append(Chart(title, "eigenvalue", "weight", series, y_log=True, source=source))
    return out


OPTIMIZERS = ("SGD", "SWA", "AdamW", "Gadam", "PadamW", "GadamX")
# Rate and weight decay of each base optimiser, by the first word of the network's name (the
# thesis's code)
SETTINGS: dict[str, dict[str, tuple[float, float]]] = {
    "VGG": {"SGD": (0.1, 5e-4), "AdamW": (5e-4, 0.25), "PadamW": (0.1, 2.5e-3)},
    "PreResNet": {"SGD": (0.1, 5e-4), "AdamW": (1e-3, 0.1), "PadamW": (0.1, 2.5e-3)},
}
SHORT = {"AdamW": 1e-3}  # of small networks over few steps
PRINTED_ON = ("CIFAR-100", "CIFAR-10")
# Test accuracy on CIFAR-100 (Table 7.2) and CIFAR-10 (Table 7.3)
PRINTED: dict[tuple[str, str], tuple[float, float]] = {
    ("VGG", "SGD"): (74.15, 94.14),
    ("VGG", "SWA"): (74.57, 94.69),
    ("VGG", "AdamW"): (73.26, 93.90),
    ("VGG", "PadamW"): (74.56, 94.13),
    ("VGG", "Gadam"): (75.73, 94.62),
    ("VGG", "GadamX"): (76.85, 94.88),
    ("PreResNet", "SGD"): (77.22, 95.40),
    ("PreResNet", "SWA"): (77.92, 95.55),
    ("PreResNet", "AdamW"): (75.47, 94.69),
    ("PreResNet", "PadamW"): (77.30, 95.28),
    ("PreResNet", "Gadam"): (77.37, 95.27),
    ("PreResNet", "GadamX"): (77.90, 95.95),
}


@dataclass(frozen=True)
class ImageScale(Scale):
    """One scale: networks, each with the side its images are pooled to; the Hessian is over
    ``samples`` images.

    ``quick`` takes the rates of ``SHORT``. Whole spectra are by ``lanczos`` steps, over so many
    ``sharp_seeds``.
    """

    networks: tuple[str, ...]
    samples: int
    depth: int
    side: int = 0
    augmented: bool = False
    precision: str = FULL
    quick: bool = False
    lanczos: int = 30
    sharp_seeds: int = 2


def tuned_settings(network: str, optimizer: str, quick: bool = False) -> tuple[float, float]:
    """Rate and weight decay of an optimiser, which are its base's."""
    base = BASES.get(optimizer, optimizer)
    rate, decay = SETTINGS[family(network)][base]
    return (SHORT.get(base, rate) if quick else rate), decay


def cells(config: ImageScale) -> list[Cell]:
    """Network × optimiser × seed, and for whole spectra once more of SGD and Gadam."""
    base = shared_settings(config, "networks", "quick", "seeds", "lanczos", "sharp_seeds")
    whole = {**base, "part": "spectrum", "depth": config.lanczos}

    def grid(shared: Cell, optimizers: tuple[str, ...], seeds: int) -> list[Cell]:
        return [
            {
                **shared,
                "network": name,
                **recipe(optimizer, *tuned_settings(name, optimizer, config.quick), config.epochs),
                "seed": seed,
            }
            for name in config.networks
            for optimizer in optimizers
            for seed in range(seeds)
        ]

    return grid(base, OPTIMIZERS, config.seeds) + grid(whole, SHARP, config.sharp_seeds)


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch and one of the end with the solution's sharpness; or the spectra."""
    if cell.get("part") == "spectrum":
        return spectrum_rows(cell, device)
    task = image_task(cell, device)
    trained = train(cell, task)
    return [
        *trained.rows,
        {**trained.end, **size_of(task), **sharpness(trained.solution, task, cell)},
    ]


def sharpness(model: nn.Module, task: AveragedTask, cell: Cell) -> Row:
    """λ₁ on the first training images by ``depth`` Lanczos steps, batch norm in evaluation mode."""
    first = next(iter(task.problem.batches)).data
    curvature = hessian(curvature_problem(model, Images(first, first, 0), cell))
    largest = spectrum(
        curvature, depth=min(cell["depth"], curvature.dim), seed=cell["seed"]
    ).extremes[1]
    return {"largest": float(largest), "largest residual": float(largest.stderr)}


PAIRS = (
    ("SWA", "SGD"),
    ("Gadam", "AdamW"),
    ("GadamX", "PadamW"),
    ("Gadam", "SGD"),
    ("Gadam", "PadamW"),
    ("SGD", "AdamW"),
)
# What the text says of GadamX: on CIFAR-100 it makes an exception for PreResNet-110, on CIFAR-10 it
# makes none
STRONGEST = {
    "VGG": (
        "strongest by a considerable margin: +1.12 over Gadam on CIFAR-100, +0.19 over SWA on"
        " CIFAR-10"
    ),
    "PreResNet": (
        "on CIFAR-10 by a non-trivial margin, +0.40 over SWA; on CIFAR-100 not significant, -0.02"
    ),
}


def claims(rows: Rows) -> list[Claim]:
    """Averages help each base, Gadam beats SGD, GadamX beats all; Gadam's norms and spectra."""
    ends = rows.where(kind="end")
    found = []
    for network in ends.distinct("network"):
        found += network_claims(network, ends.where(network=network))
    return found + spectrum_claims(rows.where(kind="spectrum"))


def network_claims(network: str, ends: Rows) -> list[Claim]:
    """The claims of Tables 7.2 and 7.3 and of Figure 7.16 on one network; n counts seeds."""
    of = {name: ends.where(optimizer=name) for name in OPTIMIZERS}
    kind, where = family(network), "§7.8.1, Tables 7.2 and 7.3"
    found = [
        Claim(
            f"{network}: {name} is above {base}",
            where,
            printed_gap(kind, name, base),
            gap(of[name], of[base], "accuracy"),
            unit=" points",
            unmet=unready(of[name], of[base]),
        )
        for name, base in PAIRS
    ]
    rival, reading = against_best(of, "GadamX")
    averaged = [of[name] for name in ("SWA", "Gadam", "GadamX")]
    said = Claims(found)
    sentence = f"{network}: GadamX is above all others (here above {rival}, the best of them)"
    unmet = unready(of["GadamX"], of[rival])
    said.add(sentence, where, STRONGEST[kind], reading, unit=" points", unmet=unmet)
    sentence = f"{network}: the average is above the iterates where averaging begins"
    source = "§7.8.1, Figures 7.8 and 7.9"
    value = change(ends.where(optimizer=("SWA", "Gadam", "GadamX")), "accuracy", "before")
    said.add(sentence, source, "", value, unit=" points", unmet=unready(*averaged), own=True)
    sentence = f"{network}: Gadam's λ₁ is above SGD's, whichever generalises better"
    value = decades(of["Gadam"], of["SGD"], "largest")
    unmet = unlearnt(of["Gadam"], of["SGD"])
    said.add(sentence, "§7.9, Figure 7.17", "", value, unit=" decades", unmet=unmet, own=True)
    sentence = f"{network}: Gadam's weight norm is above SGD's"
    source = "§7.9, Figure 7.16"
    value = gap(of["Gadam"], of["SGD"], "solution norm")
    said.add(sentence, source, "always higher", value, unmet=unlearnt(of["Gadam"], of["SGD"]))
    return said


def printed_gap(kind: str, upper: str, lower: str) -> str:
    """The differences of two optimisers in Tables 7.2 and 7.3, for this kind of network."""
    shown = (
        f"{high - low:+.2f} on {data}"
        for high, low, data in zip(
            PRINTED[kind, upper], PRINTED[kind, lower], PRINTED_ON, strict=True
        )
    )
    return ", ".join(shown)


def tables(rows: Rows) -> list[Table]:
    """Accuracy, norm and sharpness of each optimiser beside the printed accuracies, by network."""
    out = []
    ends = rows.where(kind="end")
    for name in ends.distinct("network"):
        part = ends.where(network=name)
        lines = TableLines()
        for optimizer in OPTIMIZERS:
            mine = part.where(optimizer=optimizer)
            printed = PRINTED[family(name), optimizer]
            lines.add(
                optimizer,
                *means(
                    mine,
                    "accuracy",
                    "iterate accuracy",
                    "training accuracy",
                    "solution norm",
                    "largest",
                ),
                *(f"{value:.2f}" for value in printed),
            )
        header = (
            *split_header("optimiser | accuracy, % | of the iterate | in training | ‖θ‖ | λ₁"),
            *(f"thesis, {data}" for data in PRINTED_ON),
        )
        title = f"{name}, {part[0]['parameters']:,} parameters, {part[0]['data']}"
        out.append(Table(title, header, tuple(lines)))
    return out + spectrum_tables(rows.where(kind="spectrum"))


def charts(rows: Rows) -> list[Chart]:
    """Accuracy and norm over epochs, final accuracy beside the thesis's, sharpness, spectra."""
    out: list[Chart] = []
    for name in rows.distinct("network"):
        out += network_charts(name, rows.where(network=name))
    ends = rows.where(kind="end")
    sharp = [
        Series(
            f"{optimizer}, {name}", part.values("largest"), part.values("accuracy"), style="points"
        )
        for name in ends.distinct("network")
        for optimizer in OPTIMIZERS
        if (part := ends.where(network=name, optimizer=optimizer))
    ]
    title = "Sharpness against accuracy"
    axis = "accuracy, %"
    caption = "Not drawn in the thesis. Batch norm in evaluation mode."
    out.append(Chart(title, "λ₁", axis, tuple(sharp), x_log=True, source="§7.9", caption=caption))
    return out + spectrum_charts(rows.where(kind="spectrum"))


def network_charts(name: str, rows: Rows) -> list[Chart]:
    """Accuracy over epochs, at the end beside Table 7.3, and the weight norm of SGD and Gadam."""
    epochs, ends = rows.where(kind="epoch"), rows.where(kind="end")
    accuracy, norm = (
        tuple(curve(each, epochs.where(optimizer=each), column) for each in names)
        for column, names in (("accuracy", OPTIMIZERS), ("solution norm", SHARP))
    )
    readings = [over_seeds(ends.where(optimizer=optimizer), "accuracy") for optimizer in OPTIMIZERS]
    printed = [PRINTED[family(name), optimizer][1] for optimizer in OPTIMIZERS]
    caption = "Of the average from when there is one."
    last = (
        Series(
            "ours", OPTIMIZERS, [reading.value for reading in readings], errors(readings), "points"
        ),
        Series("thesis, CIFAR-10", OPTIMIZERS, printed, style="points", published=True),
    )
    out = []
    title = f"Accuracy on held-out images, {name}"
    source = "Figures 7.8 and 7.9"
    out.append(Chart(title, "epoch", "accuracy, %", accuracy, source=source, caption=caption))
    title = f"Weight norm, {name}"
    out.append(Chart(title, "epoch", "‖θ‖", norm, source="Figure 7.16", caption=caption))
    title = f"Accuracy at the end, {name}"
    out.append(Chart(title, "optimiser", "accuracy, %", last, source="Table 7.3"))
    return out


# data set, training and held-out samples, epochs, seeds
SMOKE = ("digits", 96, 64, 4, 2)
CPU = ("cifar10", 2000, 3000, 25, 3)
PAPER = ("cifar100", 45_000, 5_000, 34, 3)
EXPERIMENT = Experiment(
    "gadam-image",
    "Gadam, GadamX and the optimisers they average, on images",
    SPECTRAL,
    "§§7.8.1 and 7.9, Tables 7.2 and 7.3, Figures 7.8, 7.9 and 7.14–7.17",
    {
        "smoke": ImageScale(
            *SMOKE,
            ("VGG-4×4-BN",),
            samples=32,
            depth=4,
            batch=32,
            quick=True,
            lanczos=4,
            sharp_seeds=1,
        ),
        "cpu": ImageScale(
            *CPU,
            ("VGG-4×16-BN", "PreResNet-11"),
            samples=256,
            depth=15,
            side=8,
            batch=64,
            quick=True,
        ),
        "paper": ImageScale(
            *PAPER,
            ("VGG-16-BN", "PreResNet-110"),
            samples=512,
            depth=20,
            augmented=True,
            precision="bfloat16",
            lanczos=60,
            sharp_seeds=3,
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        At paper scale CIFAR-100, 45,000 images and 34 epochs of the thesis's 300; no ResNeXt-29.
        On a CPU 2,000 images of CIFAR-10 at 8 × 8, and small networks in place of VGG-16 and
          PreResNet-110.
        Rates and weight decays are those of the thesis's code (github.com/diegogranziol/Gadam) for
          CIFAR-100.
        On a CPU AdamW's rate is 1e-3, for over so few steps 5e-4 goes not far enough.
        Averages begin after the share 161/300 of the epochs and take one iterate per epoch.
        Accuracy is that of images held out of the training part. Claims are read network by
          network: n counts seeds.
        At first both networks were read together; they differ too much for that. ResNeXt-29's rows
          are not tested.
        The text has Gadam above SGD and Padam in all cases; Table 7.3 has both above it on
          PreResNet-110.
        The best rival of GadamX is the best by its mean on the same images, which favours the
          rival.
        Spectra are by Lanczos from one random vector; on a CPU of two seeds, whose runs were added
          later.
        The thesis's Frobenius norm is read as tr(H²)/P. §7.9 compares solutions that fit alike,
          Gadam's the better.
        Where ours are not so its claims cannot be tested; that of λ₁ alone, in evaluation mode, is
          a claim of ours.
        On a GPU networks train with bfloat16 in their forward passes and are judged by it;
          curvature is in float32.
    """),
    size=(
        "VGG-16, PreResNet-110 and ResNeXt-29 on CIFAR-100, the first two on CIFAR-10, batches of"
        " 128, averages from epoch 161, 3 runs; 300 epochs of VGG-16 (Figures 7.14 to 7.17), those"
        " of the others are not in the text."
    ),
    sizes=(
        Size("VGG-16-BN", "cifar100", epochs=300),
        Size("VGG-16", "cifar100", epochs=300),
        Size("VGG-16-BN", "cifar10", epochs=300),
        Size("PreResNet-110", "cifar100"),
        Size("PreResNet-110", "cifar10"),
        Size("ResNeXt-29", "cifar100"),
    ),
)
