"""When to start averaging and how often, schedules, Lookahead and GadamAuto (§7.5.5 and
§7.8.4–7.8.7).
"""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.experiments.averaging.recipes import FULL, recipe, shared_settings
from lambdahat.experiments.averaging.runs import mean
from lambdahat.experiments.averaging.schedule_claims import AHEAD, claims
from lambdahat.experiments.averaging.starts import REFERENCE, STARTS, run_with_averages
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, errors, over_seeds
from lambdahat.experiments.kit.claims import Table
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size
from lambdahat.results.charts import Chart, Series

FREQUENCIES = (1, 5, 20, 0)  # steps between averaged iterates, 0 once per epoch
# Tables 7.2, 7.6 and 7.7: test accuracy of VGG-16 on CIFAR-100
PRINTED = {
    "SGD, linear": 74.15,
    "SWA": 74.57,
    "AdamW, linear": 73.26,
    "Gadam": 75.73,
    "Gadam-Auto": 75.39,
    "SWA-Auto": 73.93,
}
PRINTED_BEST = 76.11


@dataclass(frozen=True)
class Config(Scale):
    """One scale; ``adam_rate`` is AdamW's and Gadam's, ``patience`` that of the automatic ones
    in epochs.
    """

    network: str
    adam_rate: float
    patience: int
    side: int = 0
    augmented: bool = False
    precision: str = FULL
    rate: float = 0.1
    coupled: float = 5e-4
    decoupled: float = 0.25


def cells(config: Config) -> list[Cell]:
    """Run × seed; a run at a constant rate also has all averages of ``STARTS`` and
    ``FREQUENCIES``.
    """
    base = shared_settings(config, "adam_rate", "patience", "rate", "coupled", "decoupled", "seeds")
    sgd, adam, epochs = (
        (config.rate, config.coupled),
        (config.adam_rate, config.decoupled),
        config.epochs,
    )
    auto = {"patience": config.patience}
    runs = {
        "SGD, flat": recipe("SGD", *sgd, epochs, "flat"),
        "SGD, step": recipe("SGD", *sgd, epochs, "step"),
        "SGD, linear": recipe("SGD", *sgd, epochs),
        "SGD + LH": recipe("SGD+LH", *sgd, epochs),
        "SWA": recipe("SWA", *sgd, epochs),
        "SWA-Auto": recipe("SWA-Auto", *sgd, epochs, "flat") | auto,
        "AdamW, flat": recipe("AdamW", *adam, epochs, "flat"),
        "AdamW, linear": recipe("AdamW", *adam, epochs),
        "AdamW + LH": recipe("AdamW+LH", *adam, epochs),
        "Gadam": recipe("Gadam", *adam, epochs),
        "Gadam + LH": recipe("Gadam+LH", *adam, epochs),
        "Gadam-Auto": recipe("Gadam-Auto", *adam, epochs, "flat") | auto,
    }
    return [
        {**base, "run": name, **plan, "seed": seed}
        for name, plan in runs.items()
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs and of the end; at a constant rate one more for each average."""
    return run_with_averages(cell, device, FREQUENCIES)


def tables(rows: Rows) -> list[Table]:
    """All runs at their end, and the averages by start and by frequency."""
    ends = rows.where(kind="end")
    lines = []
    for name in ends.distinct("run"):
        part = ends.where(run=name)
        printed = PRINTED.get(name)
        lines.append(
            (
                name,
                *(
                    str(over_seeds(part, column))
                    for column in (
                        "accuracy",
                        "iterate accuracy",
                        "training accuracy",
                        "early",
                        "begun",
                        "stopped",
                    )
                ),
                "" if printed is None else f"{printed:.2f}",
            )
        )
    header = (
        "run",
        "accuracy, %",
        "of the iterate",
        "in training",
        "first third",
        "averages from",
        "epochs",
        "thesis, CIFAR-100",
    )
    title = f"{ends[0]['network']}, {ends[0]['parameters']:,} parameters, {ends[0]['data']}"
    return [Table(title, header, tuple(lines)), *_average_tables(rows)]


def _average_tables(rows: Rows) -> list[Table]:
    made = rows.where(kind="average")
    names = made.distinct("run")
    starts = tuple(
        (
            f"{start:.0%}",
            *(
                str(over_seeds(made.where(run=name, start=start, frequency=0), "accuracy"))
                for name in names
            ),
        )
        for start in STARTS
    )
    often = tuple(
        (
            _words(every),
            *(
                str(over_seeds(made.where(run=name, start=REFERENCE, frequency=every), "accuracy"))
                for name in names
            ),
        )
        for every in FREQUENCIES
    )
    best = max(
        mean(made.where(run="AdamW, flat", start=start, frequency=0), "accuracy").value
        for start in STARTS
    )
    return [
        Table(
            f"Averages by start (best of Gadam {best:.2f}; thesis, CIFAR-100, {PRINTED_BEST})",
            ("T_avg, share of the run", *names),
            starts,
        ),
        Table("Averages by frequency, from half of the run on", ("an iterate", *names), often),
    ]


def _words(every: int) -> str:
    return {0: "every epoch", 1: "every step"}.get(every, f"every {every} steps")


def charts(rows: Rows) -> list[Chart]:
    """The generalisation gap, Lookahead over epochs, accuracy by start and by frequency."""
    epochs, made = rows.where(kind="epoch"), rows.where(kind="average")
    gaps: list[Series] = []
    for name in ("SGD, flat", "SGD, step"):
        part = epochs.where(run=name)
        gaps += [
            curve(f"{name}, training", part, "training accuracy"),
            curve(f"{name}, held out", part, "iterate accuracy"),
        ]
    starts = tuple(
        curve(name, made.where(run=name, frequency=0), "accuracy", "start")
        for name in made.distinct("run")
    )
    return [
        Chart(
            "Training and held-out accuracy",
            "epoch",
            "accuracy, %",
            tuple(gaps),
            source="Figure 7.4",
        ),
        Chart(
            "Lookahead",
            "epoch",
            "accuracy, %",
            tuple(curve(name, epochs.where(run=name), "accuracy") for name in AHEAD),
            source="Figure 7.12",
        ),
        Chart(
            "Start of averaging", "share of the run", "accuracy, %", starts, source="Figure 7.11"
        ),
        Chart(
            "Frequency of averaging",
            "an iterate is averaged",
            "accuracy, %",
            tuple(
                _by_frequency(made.where(run=name, start=REFERENCE), name)
                for name in made.distinct("run")
            ),
            source="Figure 7.13b",
        ),
    ]


def _by_frequency(rows: Rows, name: str) -> Series:
    readings = [over_seeds(rows.where(frequency=every), "accuracy") for every in FREQUENCIES]
    return Series(
        name,
        [_words(every) for every in FREQUENCIES],
        [reading.value for reading in readings],
        errors(readings),
        "points",
    )


EXPERIMENT = Experiment(
    "averaging-schedules",
    "When to start averaging, how often, and what schedules and Lookahead do",
    SPECTRAL,
    "§§7.4.1, 7.5.5 and 7.8.4–7.8.7, Tables 7.6 and 7.7, Figures 7.4 and 7.11–7.13",
    {
        "smoke": Config("digits", 96, 64, 4, 2, "VGG-4×4-BN", 3e-3, patience=1, batch=32),
        "cpu": Config(
            "cifar10", 2000, 4000, 30, 5, "VGG-4×16-BN", 1e-3, patience=3, side=8, batch=64
        ),
        "paper": Config(
            "cifar10",
            8_000,
            10_000,
            30,
            3,
            "VGG-16-BN",
            5e-4,
            patience=3,
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
        "CIFAR-10 in place of CIFAR-100, which cannot be had here; 30 epochs of the thesis's 300.",
        "On a CPU a small network of VGG's kind.",
        (
            "Starts and frequencies are compared at a constant rate: no step reads an average, so"
            " one run has them all."
        ),
        "The thesis also moves its schedule with T_avg.",
        (
            "The automatic ones start and stop by the loss on the same held-out images that they"
            " are judged by."
        ),
        (
            "Their patience is a tenth of the epochs, where the thesis has 10 of 300; none outlasts"
            " the other runs."
        ),
        (
            "Table 7.6 has the best start; here it is chosen by the other seeds, so that no seed"
            " chooses for itself."
        ),
        (
            "One point counts as little. That 10 points of gap count as none in Figure 7.4 was set"
            " after the results."
        ),
        "Lookahead has k = 5 and α = 0.5; in Gadam + LH it ends where averaging begins.",
        "On a GPU networks train with bfloat16 in their forward passes.",
    ),
    size=(
        "VGG-16 on CIFAR-100, rates a tenth at epochs 100 and 150, averages from epoch 161, 3 runs;"
        " epochs are not in the text."
    ),
    sizes=(Size("VGG-16-BN", "cifar100"), Size("VGG-16", "cifar100")),
)
