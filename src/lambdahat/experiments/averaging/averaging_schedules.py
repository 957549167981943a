"""When to start averaging and how often, schedules, Lookahead, GadamAuto (§§7.5.5, 7.8.4–7.8.7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lambdahat.experiments.averaging.averaged_training import (
    BASES,
    FULL,
    AveragedTask,
    AveragePlan,
    Averages,
    against_best,
    gap,
    image_task,
    mean,
    recipe,
    saturated,
    shared_settings,
    size_of,
    top_accuracy,
    train,
    tuned_start,
    unlearnt,
    unready,
    unsettled,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, errors, means, over_seeds
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.results.charts import Chart, Series

STARTS = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the run
REFERENCE = 0.5
SENSIBLE = (0.25, 0.5, 0.75)
FLAT, SCHEDULED = ", flat", ", linear"


def run_with_averages(cell: Cell, device: str, frequencies: Sequence[int] = ()) -> list[Row]:
    """Rows of epochs and of the end; of a run named "…, flat" one more for each average."""
    task = image_task(cell, device)
    steps = math.ceil(task.problem.num_samples / cell["batch"])
    chosen = plans(cell["epochs"], steps, frequencies) if cell["run"].endswith(FLAT) else {}
    averages = Averages(list(chosen.values()))
    trained = train(cell, task, averages)
    rows = [*trained.rows, {**trained.end, **size_of(task), "early": early(trained.rows)}]
    return rows + averaged_rows(averages, chosen, task, cell)


def plans(
    epochs: int, steps: int, frequencies: Sequence[int] = ()
) -> dict[tuple[float, int], AveragePlan]:
    """By start (a share of the run) and frequency: all starts once per epoch, and all frequencies
    from the half on.

    A frequency is in steps between averaged iterates, 0 for an epoch.
    """
    wanted = [(start, 0) for start in STARTS] + [(REFERENCE, every) for every in frequencies]
    return {
        (start, every): AveragePlan(
            min(max(1, round(start * epochs)), epochs) * steps if start else 0, every or steps
        )
        for start, every in dict.fromkeys(wanted)
    }


def averaged_rows(
    averages: Averages, chosen: dict[tuple[float, int], AveragePlan], task: AveragedTask, cell: Cell
) -> list[Row]:
    """The accuracy of each average at the end of the run."""
    rows = []
    for (start, every), plan in chosen.items():
        if averages.counts[plan] == 0:  # a run that diverged
            continue
        model = averages.model(plan, task.model, task.training(cell["batch"]))
        rows.append(
            {
                "kind": "average",
                "start": start,
                "frequency": every,
                "averages": averages.counts[plan],
                "accuracy": top_accuracy(model, task.held_out),
            }
        )
    return rows


def early(rows: list[Row]) -> float:
    """Mean accuracy of the iterates over the first third of the epochs, a measure of speed."""
    first = rows[: max(1, len(rows) // 3)]
    return float(sum(row["iterate accuracy"] for row in first) / len(first))


def start_claims(name: str, rows: Rows, tuned_from: str, prefix: str = "") -> list[Claim]:
    """Gadam or GadamX on one network: each sensible start beats the base with its schedule, and
    tuning gains.

    ``rows`` are all rows of the network; ``tuned_from`` is what the thesis prints of the best start
    and of its own.
    """
    base = BASES[name]
    flat, ends = rows.where(run=base + FLAT), rows.where(kind="end")
    made, epochs = flat.where(kind="average", frequency=0), flat.where(kind="epoch")
    scheduled = ends.where(run=base + SCHEDULED)
    learnt = unlearnt(flat.where(kind="end"), scheduled)
    tuned = paired_difference(
        tuned_start(made, "accuracy"), made.where(start=REFERENCE).paired("accuracy")
    )
    found = Claims(
        Claim(
            f"{prefix}{name} beats {base} with its schedule when averages begin at {share:.0%}"
            " of the run",
            "§7.8.4, Figure 7.11",
            "for any reasonable T_avg",
            gap(made.where(start=share), scheduled, "accuracy"),
            unit=" points",
            unmet=learnt or unsettled(iterates_at(epochs, share, base)),
        )
        for share in SENSIBLE
    )
    sentence = (
        f"{prefix}{name} gains from tuning T_avg (best start over the other seeds, against"
        f" {REFERENCE:.0%} of the run)"
    )
    found.add(sentence, "§7.8.4, Table 7.6", tuned_from, tuned, unit=" points", unmet=learnt)
    return found


def iterates_at(epochs: Rows, share: float, base: str) -> Rows:
    """The iterates of a constant-rate run where averaging begins, and at its end."""
    last = max(epochs.values("epoch"), default=0)
    first = min(max(1, round(share * last)), last)
    before = epochs.where(epoch=first).paired("iterate accuracy")
    after = epochs.where(epoch=last).paired("iterate accuracy")
    named = {"run": f"{base} at a flat rate", "averaged": True}
    return Rows(
        {**named, "seed": seed, "before": before[seed], "iterate accuracy": after[seed]}
        for seed in after
    )


SMALL_CHANGE = 1.0  # points within which two runs count as alike
NO_GAP = 10.0  # points of training over held-out accuracy that count as none
GADAM_AHEAD = "Gadam + LH"
# the runs of Figure 7.12
AHEAD = ("SGD, linear", "SGD + LH", "AdamW, linear", "AdamW + LH", "Gadam", GADAM_AHEAD)
PRINTED_TUNED = "76.11 to 75.73 (VGG-16)"


def claims(rows: Rows) -> list[Claim]:
    """Starts, frequencies, generalisation gaps, Lookahead and the automatic start."""
    ends, epochs = rows.where(kind="end"), rows.where(kind="epoch")
    of = {name: ends.where(run=name) for name in ends.distinct("run")}
    return (
        start_claims("Gadam", rows, PRINTED_TUNED)
        + _frequency_claims(
            of, rows.where(kind="average", run="AdamW, flat"), epochs.where(run="AdamW, flat")
        )
        + _schedule_claims(of)
        + _lookahead_claims(of, epochs)
        + _automatic_claims(of)
    )


def _frequency_claims(of: dict[str, Rows], made: Rows, flat: Rows) -> list[Claim]:
    """How often to average: Figure 7.13."""
    half = unlearnt(of["AdamW, flat"], of["AdamW, linear"]) or unsettled(
        iterates_at(flat, REFERENCE, "AdamW")
    )
    often, seldom = (
        made.where(start=REFERENCE, frequency=1),
        made.where(start=REFERENCE, frequency=0),
    )
    found = Claims()
    sentence = "averaging every step or once per epoch makes little difference"
    source = "§7.8.6, Figure 7.13b"
    published = "very insensitive"
    reading = gap(seldom, often, "accuracy")
    found.add(sentence, source, published, reading, "within", 0.0, SMALL_CHANGE, " points", half)
    sentence = "averaging once per epoch is above averaging every step"
    source = "§7.8.6, Figure 7.13b"
    reading = gap(seldom, often, "accuracy")
    found.add(sentence, source, "slightly better", reading, unit=" points", unmet=half)
    return found


def _schedule_claims(of: dict[str, Rows]) -> list[Claim]:
    """Flat rates against schedules: Figure 7.4, and what §7.4.1 says of AdamW."""
    flat, step = of["SGD, flat"], of["SGD, step"]
    gap_now = (
        over_seeds(flat, "training accuracy").value - over_seeds(flat, "iterate accuracy").value
    )
    wide = (
        f"the gap at a flat rate is {gap_now:.0f} points already, where the thesis has none"
        if gap_now > NO_GAP
        else ""
    )
    found = Claims(unit=" points")
    sentence = (
        "the gap between training and held-out accuracy is wider after step decay than at a"
        " flat rate"
    )
    source = "§7.5.5, Figure 7.4"
    reading = generalization(step, flat)
    found.add(sentence, source, "ΔE₂ > ΔE₁", reading, unmet=unlearnt(flat, step) or wide)
    sentence = "step decay is above a flat rate"
    source = "§7.5.5, Figure 7.4"
    found.add(sentence, source, "it is", gap(step, flat, "accuracy"), unmet=unready(flat, step))
    sentence = "AdamW at a flat rate is below scheduled AdamW"
    published = "by more than 5 points, not drawn"
    reading = gap(of["AdamW, flat"], of["AdamW, linear"], "accuracy")
    unmet = unready(of["AdamW, flat"], of["AdamW, linear"])
    found.add(sentence, "§7.4.1", published, reading, "below", unmet=unmet)
    return found


def _lookahead_claims(of: dict[str, Rows], epochs: Rows) -> list[Claim]:
    """Lookahead alone and before averages: Figure 7.12."""
    where, both = "§7.8.5, Figure 7.12", GADAM_AHEAD
    others = {name: of[name] for name in AHEAD if name != "Gadam"}
    rival, ahead = against_best(others, both)
    runner, faster = against_best({**others, "Gadam": of["Gadam"]}, both, "early")
    rough = [fluctuation(epochs.where(run=name)) for name in ("AdamW + LH", "AdamW, linear")]
    found = Claims(lookahead_pairs(of, where))
    sentence = "Lookahead makes AdamW converge faster (accuracy over the first third)"
    reading = gap(of["AdamW + LH"], of["AdamW, linear"], "early")
    unmet = unlearnt(of["AdamW + LH"], of["AdamW, linear"])
    found.add(sentence, where, "clearly", reading, unit=" points", unmet=unmet)
    sentence = "Lookahead makes AdamW fluctuate less from epoch to epoch"
    published = "it reduces fluctuations"
    reading = paired_difference(*rough)
    unmet = unlearnt(of["AdamW + LH"])
    found.add(sentence, where, published, reading, "below", unit=" points", unmet=unmet)
    sentence = f"{both} is within {SMALL_CHANGE:g} point of Gadam"
    published = "only marginally worse (VGG-16)"
    reading = gap(of[both], of["Gadam"], "accuracy")
    unmet = unready(of[both], of["Gadam"])
    found.add(sentence, where, published, reading, "within", 0.0, SMALL_CHANGE, " points", unmet)
    sentence = f"{both} is above all others but Gadam (here above {rival}, the best of them)"
    published = "still stronger than all others (VGG-16)"
    unmet = unready(of[both], of[rival])
    found.add(sentence, where, published, ahead, unit=" points", unmet=unmet)
    sentence = f"{both} converges fastest (accuracy over the first third, here against {runner})"
    published = "at the fastest speed in all the optimisers tested (VGG-16)"
    unmet = unlearnt(of[both], of[runner])
    found.add(sentence, where, published, faster, unit=" points", unmet=unmet)
    return found


def lookahead_pairs(of: dict[str, Rows], source: str, prefix: str = "") -> list[Claim]:
    """§7.8.5, on both networks: Lookahead helps SGD, and helps AdamW less than averaging."""
    said = (
        (
            "SGD + LH",
            "SGD, linear",
            "SGD + Lookahead is above SGD",
            "by a rather significant margin",
        ),
        (
            "Gadam",
            "AdamW + LH",
            "Gadam is above AdamW + Lookahead",
            "more significant and more consistent",
        ),
    )
    return [
        Claim(
            prefix + sentence,
            source,
            words,
            gap(of[upper], of[lower], "accuracy"),
            unit=" points",
            unmet=unready(of[upper], of[lower]),
        )
        for upper, lower, sentence, words in said
    ]


def fluctuation(epochs: Rows) -> dict[Any, float]:
    """The mean absolute change of the iterates' accuracy per epoch, for each seed."""
    out = {}
    for seed in epochs.distinct("seed"):
        values = [
            row["iterate accuracy"]
            for row in sorted(epochs.where(seed=seed), key=lambda row: row["epoch"])
        ]
        changes = [abs(after - before) for before, after in pairwise(values)]
        if changes:
            out[seed] = sum(changes) / len(changes)
    return out


def _automatic_claims(of: dict[str, Rows]) -> list[Claim]:
    """Averages that begin by themselves: Table 7.7."""
    parts = [of[name] for name in ("Gadam", "Gadam-Auto", "SWA", "SWA-Auto")]
    # that they may begin too soon is part of what is tested
    unmet = unlearnt(*parts) or saturated(*parts)
    found = Claims(unit=" points", unmet=unmet)
    reading = gap(of["Gadam-Auto"], of["SWA-Auto"], "accuracy")
    found.add("GadamAuto is above SWA-Auto", "Table 7.7", "75.39 and 73.93", reading)
    sentence = "the automatic start costs SGD more than it costs Gadam"
    found.add(sentence, "§7.8.7", "0.64 and 0.34 points", losses(of))
    sentence = "SWA-Auto is below scheduled SGD"
    reading = gap(of["SWA-Auto"], of["SGD, linear"], "accuracy")
    found.add(sentence, "§7.8.7, Tables 7.2 and 7.7", "73.93 and 74.15", reading, "below")
    return found


def generalization(upper: Rows, lower: Rows) -> Reading:
    """The difference of training less held-out accuracy."""
    gaps = []
    for part in (upper, lower):
        training, held_out = part.paired("training accuracy"), part.paired("iterate accuracy")
        gaps.append({seed: training[seed] - held_out[seed] for seed in training})
    return paired_difference(*gaps)


def losses(of: dict[str, Rows]) -> Reading:
    """(SWA − SWA-Auto) − (Gadam − GadamAuto), seed by seed."""
    found = []
    for tuned, automatic in (("SWA", "SWA-Auto"), ("Gadam", "Gadam-Auto")):
        upper, lower = of[tuned].paired("accuracy"), of[automatic].paired("accuracy")
        found.append({seed: upper[seed] - lower[seed] for seed in upper if seed in lower})
    return paired_difference(*found)


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
class ScheduleScale(Scale):
    """One scale; ``adam_rate`` is for AdamW and Gadam, ``patience`` for automatic schedules."""

    network: str
    adam_rate: float
    patience: int
    side: int = 0
    augmented: bool = False
    precision: str = FULL
    rate: float = 0.1
    coupled: float = 5e-4
    decoupled: float = 0.25


def cells(config: ScheduleScale) -> list[Cell]:
    """Run × seed; a constant-rate run also has the averages of ``STARTS`` and ``FREQUENCIES``."""
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
    lines = TableLines()
    for name in ends.distinct("run"):
        part = ends.where(run=name)
        printed = PRINTED.get(name)
        lines.add(
            name,
            *means(
                part,
                "accuracy",
                "iterate accuracy",
                "training accuracy",
                "early",
                "begun",
                "stopped",
            ),
            "" if printed is None else f"{printed:.2f}",
        )
    header = split_header(
        "run | accuracy, % | of the iterate | in training | first third | averages from | "
        "epochs | thesis, CIFAR-100"
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
    out = []
    title = f"Averages by start (best of Gadam {best:.2f}; thesis, CIFAR-100, {PRINTED_BEST})"
    out.append(Table(title, ("T_avg, share of the run", *names), starts))
    title = "Averages by frequency, from half of the run on"
    out.append(Table(title, ("an iterate", *names), often))
    return out


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
    out = []
    title = "Training and held-out accuracy"
    out.append(Chart(title, "epoch", "accuracy, %", tuple(gaps), source="Figure 7.4"))
    series = tuple(curve(name, epochs.where(run=name), "accuracy") for name in AHEAD)
    out.append(Chart("Lookahead", "epoch", "accuracy, %", series, source="Figure 7.12"))
    title = "Start of averaging"
    out.append(Chart(title, "share of the run", "accuracy, %", starts, source="Figure 7.11"))
    title = "Frequency of averaging"
    across = "an iterate is averaged"
    series = tuple(
        _by_frequency(made.where(run=name, start=REFERENCE), name) for name in made.distinct("run")
    )
    out.append(Chart(title, across, "accuracy, %", series, source="Figure 7.13b"))
    return out


def _by_frequency(rows: Rows, name: str) -> Series:
    readings = [over_seeds(rows.where(frequency=every), "accuracy") for every in FREQUENCIES]
    places = [_words(every) for every in FREQUENCIES]
    return Series(name, places, [reading.value for reading in readings], errors(readings), "points")


# data set, training and held-out samples, epochs, seeds
PAPER = ("cifar100", 45_000, 5_000, 34, 3)
EXPERIMENT = Experiment(
    "averaging-schedules",
    "When to start averaging, how often, and what schedules and Lookahead do",
    SPECTRAL,
    "§§7.4.1, 7.5.5 and 7.8.4–7.8.7, Tables 7.6 and 7.7, Figures 7.4 and 7.11–7.13",
    {
        "smoke": ScheduleScale("digits", 96, 64, 4, 2, "VGG-4×4-BN", 3e-3, patience=1, batch=32),
        "cpu": ScheduleScale(
            "cifar10", 2000, 4000, 30, 5, "VGG-4×16-BN", 1e-3, patience=3, side=8, batch=64
        ),
        "paper": ScheduleScale(
            *PAPER, "VGG-16-BN", 5e-4, patience=3, augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        At paper scale 34 epochs of the thesis's 300 on 45,000 images of CIFAR-100; on a CPU
          CIFAR-10.
        On a CPU a small network of VGG's kind.
        Starts and frequencies are compared at a constant rate: no step reads an average, so one run
          has them all.
        The thesis also moves its schedule with T_avg.
        The automatic ones start and stop by the loss on the same held-out images that they are
          judged by.
        Their patience is a tenth of the epochs, where the thesis has 10 of 300; none outlasts the
          other runs.
        Table 7.6 has the best start; here it is chosen by the other seeds, so that no seed chooses
          for itself.
        One point counts as little. That 10 points of gap count as none in Figure 7.4 was set after
          the results.
        Lookahead has k = 5 and α = 0.5; in Gadam + LH it ends where averaging begins.
        On a GPU networks train with bfloat16 in their forward passes.
    """),
    size=(
        "VGG-16 on CIFAR-100, rates a tenth at epochs 100 and 150, averages from epoch 161, 3 runs;"
        " epochs are not in the text."
    ),
    sizes=(Size("VGG-16-BN", "cifar100"), Size("VGG-16", "cifar100")),
)
