"""Six optimisers on images, with and without averages (Tables 7.2, 7.3, Figures 7.8–7.17)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from torch import nn

from lambdahat.estimators import spectrum
from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.averaging.averaged_training import BASES, comparison, decades, family
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Series, Table, training
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem

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
    task = runs.image_task(cell, device)
    trained, rows = runs.train(cell, task), []
    for mode in MODES:
        problem = _curvature_problem(trained.solution, task, cell, mode)
        end = {**trained.end, "kind": "spectrum", "mode": mode}
        rows.append({**end, **training.hessian_row(problem, cell)})
    return rows


def _curvature_problem(
    model: nn.Module, task: runs.AveragedTask, cell: Cell, mode: str = "eval"
) -> Problem:
    """The loss of a solution on the first training images."""
    first = next(iter(task.problem.batches)).data
    return training.curvature_problem(model, training.Images(first, first, 0), cell, mode)


def spectrum_claims(rows: Rows) -> Iterator[Claim]:
    """Gadam's solutions are the sharper ones, in each mode, though as well trained and better."""
    for network, part in rows.groups("network"):
        sgd, gadam = (part.where(optimizer=name) for name in SHARP)
        unmet = incomparable(sgd, gadam)
        for (column, mode), printed in PRINTED_SHARPNESS.items():
            words = f"Gadam generalises better with {WORDS[column]} above SGD's"
            sentence = f"{network}: {words} (batch norm in {mode} mode)"
            reading = decades(gadam.where(mode=mode), sgd.where(mode=mode), column)
            said = sentence, f"§7.9, {MODES[mode]}", printed
            yield Claim(*said, reading, unit=" decades", unmet=unmet)


def incomparable(sgd: Rows, gadam: Rows) -> str:
    """Why two solutions cannot be compared: unequal fits, or Gadam does not generalise better."""
    fits = [kit.over_seeds(part, "training accuracy").value for part in (sgd, gadam)]
    held = [kit.over_seeds(part, "accuracy").value for part in (sgd, gadam)]
    if abs(fits[1] - fits[0]) > SIMILAR:
        figures = f"{fits[0]:.1f} % with SGD and {fits[1]:.1f} % with Gadam"
        return f"training accuracy is {figures}, in the thesis alike"
    if held[1] <= held[0]:
        figures = f"{held[1]:.1f} % held out to SGD's {held[0]:.1f} %"
        return f"Gadam does not generalise better here, {figures}"
    return ""


COLUMNS = {"accuracy": "accuracy, %", "training accuracy": "in training", "solution norm": "‖θ‖"}
COLUMNS |= WORDS


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


def tuned_settings(network: str, optimizer: str, quick: bool = False) -> tuple[float, float]:
    """Rate and weight decay of an optimiser, those of the base that it averages."""
    base = BASES.get(optimizer, optimizer)
    rate, decay = SETTINGS[family(network)][base]
    return (SHORT.get(base, rate) if quick else rate), decay


def cells(
    images: Cell,
    networks: Sequence[str],
    seeds: int,
    lanczos: int = 30,
    sharp_seeds: int = 2,
    quick: bool = False,
) -> list[Cell]:
    """Network × optimiser × seed; then of SGD and Gadam for ``sharp_seeds`` whole spectra, by
    ``lanczos`` steps. ``quick`` takes the rates of ``SHORT``.
    """
    whole = {**images, "part": "spectrum", "depth": lanczos}
    out = []
    runs_of = (images, OPTIMIZERS, seeds), (whole, SHARP, sharp_seeds)
    for (shared, optimizers, count), network in product(runs_of, networks):
        for name in optimizers:
            tuned = tuned_settings(network, name, quick)
            setting = {**shared, "network": network, **runs.recipe(name, *tuned, images["epochs"])}
            out += kit.grid(setting, seed=range(count))
    return out


def run(cell: Cell, device: str) -> list[Row]:
    """A row per epoch and one of the end with the solution's λ₁; or the spectra.

    λ₁ is by ``depth`` Lanczos steps, with batch norm in evaluation mode.
    """
    if cell.get("part") == "spectrum":
        return spectrum_rows(cell, device)
    task = runs.image_task(cell, device)
    trained = runs.train(cell, task)
    curvature = hessian(_curvature_problem(trained.solution, task, cell))
    shape = spectrum(curvature, depth=min(cell["depth"], curvature.dim), seed=cell["seed"])
    largest = shape.extremes[1]
    sharpness = {"largest": float(largest), "largest residual": float(largest.stderr)}
    return [*trained.rows, {**trained.end, **runs.size_of(task), **sharpness}]


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


def claims(rows: Rows) -> Iterator[Claim]:
    """Averages help each base, Gadam beats SGD, GadamX beats all; Gadam's norms and spectra."""
    for network, part in rows.where(kind="end").groups("network"):
        yield from network_claims(network, part)
    yield from spectrum_claims(rows.where(kind="spectrum"))


def network_claims(network: str, ends: Rows) -> Iterator[Claim]:
    """The claims of Tables 7.2 and 7.3 and of Figure 7.16 on one network; n counts seeds."""
    of = {name: ends.where(optimizer=name) for name in OPTIMIZERS}
    sgd, gadam = of["SGD"], of["Gadam"]
    kind, where = family(network), "§7.8.1, Tables 7.2 and 7.3"
    averaged = ("SWA", "Gadam", "GadamX")
    rival, reading = runs.against_best(of, "GadamX")
    claim = kit.ClaimTexts(f"""
        above: {network}: {{name}} is above {{base}} | {where} | {{printed}}
        best: {network}: GadamX is above all others (here above {rival}, the best of them)
          | {where} | {STRONGEST[kind]} | above | points
        average: {network}: the average is above the iterates where averaging begins
          | §7.8.1, Figures 7.8 and 7.9 | | above | points | ours
        sharp: {network}: Gadam's λ₁ is above SGD's, whichever generalises better
          | §7.9, Figure 7.17 | | above | | ours
        norm: {network}: Gadam's weight norm is above SGD's | §7.9, Figure 7.16 | always higher
    """)
    for name, base in PAIRS:
        test, printed = comparison(of[name], of[base]), printed_gap(kind, name, base)
        yield claim("above", **test, name=name, base=base, printed=printed)
    yield claim("best", reading, unmet=runs.unready(of["GadamX"], of[rival]))
    value = runs.change(ends.where(optimizer=averaged), "accuracy", "before")
    yield claim("average", value, unmet=runs.unready(*(of[name] for name in averaged)))
    yield claim("sharp", **comparison(gadam, sgd, "largest", decades, runs.unlearnt_reason))
    longer = comparison(gadam, sgd, "solution norm", unmet=runs.unlearnt_reason) | {"unit": ""}
    yield claim("norm", **longer)


def printed_gap(kind: str, upper: str, lower: str) -> str:
    """The differences of two optimisers in Tables 7.2 and 7.3, for this kind of network."""
    columns = zip(PRINTED[kind, upper], PRINTED[kind, lower], PRINTED_ON, strict=True)
    return ", ".join(f"{high - low:+.2f} on {data}" for high, low, data in columns)


def tables(rows: Rows) -> Iterator[Table]:
    """Accuracy, norm and sharpness of each optimiser beside the printed accuracies; spectra."""
    ends, sharp = rows.where(kind="end"), rows.where(kind="spectrum")
    thesis = " | ".join(f"thesis, {data}" for data in PRINTED_ON)
    header = f"optimiser | accuracy, % | of the iterate | in training | ‖θ‖ | λ₁ | {thesis}"
    shown = "accuracy", "iterate accuracy", "training accuracy", "solution norm", "largest"
    for name, part in ends.groups("network"):
        lines = []
        for optimizer in OPTIMIZERS:
            printed = (f"{value:.2f}" for value in PRINTED[family(name), optimizer])
            lines.append((optimizer, *kit.means(part.where(optimizer=optimizer), *shown), *printed))
        yield kit.table(kit.network_title(part), header, lines)
    parts = {
        (network, mode, name): sharp.where(network=network, mode=mode, optimizer=name)
        for network, mode, name in product(sharp.distinct("network"), MODES, SHARP)
    }
    first = "network | batch norm | optimiser"
    yield kit.means_table("Solutions and their Hessian", first, parts, COLUMNS)


def charts(rows: Rows) -> Iterator[Chart]:
    """Accuracy and norm over epochs, final accuracy beside the thesis's, sharpness, spectra."""
    ends, spectra = rows.where(kind="end"), rows.where(kind="spectrum")
    for name, part in rows.groups("network"):
        yield from network_charts(name, part)
    series = []
    for (name, optimizer), part in ends.groups("network", "optimizer"):
        places = part.values("largest"), part.values("accuracy")
        series.append(Series(f"{optimizer}, {name}", *places, style="points"))
    title, axes = "Sharpness against accuracy", ("λ₁", "accuracy, %")
    caption = "Not drawn in the thesis. Batch norm in evaluation mode."
    yield Chart(title, *axes, tuple(series), x_log=True, source="§7.9", caption=caption)
    for network in spectra.distinct("network"):
        for mode, source in MODES.items():
            title = f"Spectrum of the solutions, {network}, batch norm in {mode} mode"
            first = spectra.where(network=network, mode=mode, seed=0)
            yield kit.spectra(title, first, "{optimizer}", source)


def network_charts(name: str, rows: Rows) -> Iterator[Chart]:
    """Accuracy over epochs, at the end beside Table 7.3, and the weight norm of SGD and Gadam."""
    epochs, ends = rows.where(kind="epoch"), rows.where(kind="end")
    caption = "Of the average from when there is one."
    accuracy = ("accuracy", "accuracy, %", OPTIMIZERS, "Figures 7.8 and 7.9")
    norm = ("solution norm", "‖θ‖", SHARP, "Figure 7.16")
    for title, (column, axis, names, source) in (
        ("Accuracy on held-out images", accuracy),
        ("Weight norm", norm),
    ):
        series = kit.curves(epochs.by("optimizer", names), column)
        yield Chart(f"{title}, {name}", "epoch", axis, series, source=source, caption=caption)
    readings = [kit.over_seeds(ends.where(optimizer=each), "accuracy") for each in OPTIMIZERS]
    printed = [PRINTED[family(name), each][1] for each in OPTIMIZERS]
    last = (
        kit.reading_series("ours", OPTIMIZERS, readings, "points"),
        Series("thesis, CIFAR-10", OPTIMIZERS, printed, style="points", published=True),
    )
    title = f"Accuracy at the end, {name}"
    yield Chart(title, "optimiser", "accuracy, %", last, source="Table 7.3")


# the Hessian is over ``samples`` images, by ``depth`` Lanczos steps
SMOKE = kit.image_setting("digits", 96, 64, epochs=4, batch=32, samples=32, depth=4)
CPU = kit.image_setting("cifar10", 2000, 3000, epochs=25, side=8, batch=64, samples=256, depth=15)
PAPER = kit.image_setting("cifar100", 45_000, 5_000, epochs=34, samples=512, depth=20)
PAPER |= {"augmented": True, "precision": "bfloat16"}
EXPERIMENT = kit.Experiment(
    "gadam-image",
    "Gadam, GadamX and the optimisers they average, on images",
    kit.SPECTRAL,
    "§§7.8.1 and 7.9, Tables 7.2 and 7.3, Figures 7.8, 7.9 and 7.14–7.17",
    {
        "smoke": cells(SMOKE, ("VGG-4×4-BN",), 2, lanczos=4, sharp_seeds=1, quick=True),
        "cpu": cells(CPU, ("VGG-4×16-BN", "PreResNet-11"), seeds=3, quick=True),
        "paper": cells(PAPER, ("VGG-16-BN", "PreResNet-110"), 3, lanczos=60, sharp_seeds=3),
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        At paper scale CIFAR-100, 45,000 images and 34 epochs of the thesis's 300; no ResNeXt-29.
        On a CPU 2,000 images of CIFAR-10 at 8 × 8, and small networks in place of VGG-16 and
          PreResNet-110.
        Rates and weight decays are those of the thesis's code (github.com/diegogranziol/Gadam) for
          CIFAR-100.
        On a CPU AdamW's rate is 1e-3: over so few steps 5e-4 does not go far enough.
        Averages begin after the share 161/300 of the epochs and take one iterate per epoch.
        Accuracies are those of images held out of the training part. Claims are judged network by
          network: n counts seeds.
        At first both networks were judged together, but they differ too much for that. ResNeXt-29's
          rows are not tested.
        The text has Gadam above SGD and Padam in all cases; Table 7.3 has both above it on
          PreResNet-110.
        The best rival of GadamX is the best by its mean on the same images, which favours the
          rival.
        Spectra are by Lanczos from one random vector; on a CPU of two seeds, whose runs were added
          later.
        The thesis's Frobenius norm is read as tr(H²)/P. §7.9 compares solutions that fit alike,
          Gadam's the better.
        Where ours do not, its claims cannot be tested; the claim about λ₁ alone, in evaluation
          mode, is ours.
        On a GPU networks train with bfloat16 in their forward passes and are judged by it;
          curvature is in float32.
    """),
    "VGG-16, PreResNet-110 and ResNeXt-29 on CIFAR-100, the first two on CIFAR-10, batches of"
    " 128, averages from epoch 161, 3 runs; 300 epochs of VGG-16 (Figures 7.14 to 7.17), those"
    " of the others are not in the text.",
    (
        kit.Size("VGG-16-BN", "cifar100", epochs=300),
        kit.Size("VGG-16", "cifar100", epochs=300),
        kit.Size("VGG-16-BN", "cifar10", epochs=300),
        kit.Size("PreResNet-110", "cifar100"),
        kit.Size("PreResNet-110", "cifar10"),
        kit.Size("ResNeXt-29", "cifar100"),
    ),
)
