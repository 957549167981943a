"""When to start averaging and how often, schedules, Lookahead, GadamAuto (§§7.5.5, 7.8.4–7.8.7)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.averaging.averaged_training import comparison, recipe, unlearnt_reason
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table

STARTS = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the run
REFERENCE = 0.5
SENSIBLE = (0.25, 0.5, 0.75)
FLAT, SCHEDULED = ", flat", ", linear"


def run_with_averages(cell: Cell, device: str, frequencies: Sequence[int] = ()) -> list[Row]:
    """Rows of epochs and of the end; of a run named "…, flat" one more for each average."""
    task = runs.image_task(cell, device)
    steps = math.ceil(task.problem.num_samples / cell["batch"])
    chosen = plans(cell["epochs"], steps, frequencies) if cell["run"].endswith(FLAT) else {}
    averages = runs.Averages(list(chosen.values()))
    trained = runs.train(cell, task, averages)
    first = trained.rows[: max(1, len(trained.rows) // 3)]
    early = float(sum(row["iterate accuracy"] for row in first) / len(first))
    rows = [*trained.rows, {**trained.end, **runs.size_of(task), "early": early}]
    for (start, every), plan in chosen.items():
        if averages.counts[plan] == 0:  # a run that diverged
            continue
        model = averages.model(plan, task.model, task.training(cell["batch"]))
        row = {"kind": "average", "start": start, "frequency": every}
        row["averages"] = averages.counts[plan]
        rows.append({**row, "accuracy": runs.top_accuracy(model, task.held_out)})
    return rows


def plans(
    epochs: int, steps: int, frequencies: Sequence[int] = ()
) -> dict[tuple[float, int], runs.AveragePlan]:
    """The averages: all starts (shares of the run) once per epoch, all frequencies from half on.

    A frequency is in steps between averaged iterates, 0 for an epoch.
    """
    wanted = [(start, 0) for start in STARTS] + [(REFERENCE, every) for every in frequencies]
    chosen = {}
    for start, every in wanted:
        first = min(max(1, round(start * epochs)), epochs) * steps if start else 0
        chosen[start, every] = runs.AveragePlan(first, every or steps)
    return chosen


def start_claims(name: str, rows: Rows, tuned_from: str, prefix: str = "") -> Iterator[Claim]:
    """Gadam or GadamX on one network: sensible starts beat the scheduled base, and tuning gains.

    ``rows`` are all rows of the network; ``tuned_from`` is what the thesis prints of the best start
    and of its own.
    """
    base = runs.BASES[name]
    flat, scheduled = rows.where(run=base + FLAT), rows.where(kind="end", run=base + SCHEDULED)
    made, epochs = flat.where(kind="average", frequency=0), flat.where(kind="epoch")
    learnt = unlearnt_reason(flat.where(kind="end"), scheduled)
    claim = kit.ClaimTexts(f"""
        beats: {prefix}{name} beats {base} with its schedule when averages begin at {{share:.0%}} of
          the run | §7.8.4, Figure 7.11 | for any reasonable T_avg | above | points
        gains: {prefix}{name} gains from tuning T_avg (best start over the other seeds, against
          {REFERENCE:.0%} of the run) | §7.8.4, Table 7.6 | {tuned_from} | above | points
    """)
    for share in SENSIBLE:
        reading = runs.gap(made.where(start=share), scheduled, "accuracy")
        unmet = learnt or runs.unsettled_reason(iterates_at(epochs, share, base))
        yield claim("beats", reading, share=share, unmet=unmet)
    usual = made.where(start=REFERENCE).paired("accuracy")
    tuned = kit.paired_difference(runs.tuned_start(made, "accuracy"), usual)
    yield claim("gains", tuned, unmet=learnt)


def iterates_at(epochs: Rows, share: float, base: str) -> Rows:
    """The iterates of a constant-rate run where averaging begins, and at its end."""
    last = max(epochs.values("epoch"), default=0)
    first = min(max(1, round(share * last)), last)
    before = epochs.where(epoch=first).paired("iterate accuracy")
    after = epochs.where(epoch=last).paired("iterate accuracy")
    named = {"run": f"{base} at a flat rate", "averaged": True}
    return Rows(
        {**named, "seed": seed, "before": before[seed], "iterate accuracy": value}
        for seed, value in after.items()
    )


SMALL_CHANGE = 1.0  # points within which two runs count as alike
NO_GAP = 10.0  # points of training over held-out accuracy that count as none
GADAM_AHEAD = "Gadam + LH"
# the runs of Figure 7.12
AHEAD = ("SGD, linear", "SGD + LH", "AdamW, linear", "AdamW + LH", "Gadam", GADAM_AHEAD)
PRINTED_TUNED = "76.11 to 75.73 (VGG-16)"


def claims(rows: Rows) -> Iterator[Claim]:
    """Starts, frequencies, generalisation gaps, Lookahead and the automatic start."""
    ends, epochs = rows.where(kind="end"), rows.where(kind="epoch")
    of = dict(ends.groups("run"))
    yield from start_claims("Gadam", rows, PRINTED_TUNED)
    # how often to average: Figure 7.13
    flat = rows.where(run="AdamW, flat")
    claim = kit.ClaimTexts(f"""
        same: averaging every step or once per epoch makes little difference
          | §7.8.6, Figure 7.13b | very insensitive | within {SMALL_CHANGE:g} of 0 | points
        seldom: averaging once per epoch is above averaging every step
          | §7.8.6, Figure 7.13b | slightly better | above | points
    """)
    unmet = unlearnt_reason(of["AdamW, flat"], of["AdamW, linear"])
    unmet = unmet or runs.unsettled_reason(
        iterates_at(flat.where(kind="epoch"), REFERENCE, "AdamW")
    )
    made = flat.where(kind="average", start=REFERENCE)
    reading = runs.gap(made.where(frequency=0), made.where(frequency=1), "accuracy")
    yield claim("same", reading, unmet=unmet)
    yield claim("seldom", reading, unmet=unmet)
    yield from _schedule_claims(of)
    yield from _lookahead_claims(of, epochs)
    yield from _automatic_claims(of)


def _schedule_claims(of: dict[str, Rows]) -> Iterator[Claim]:
    """Flat rates against schedules: Figure 7.4, and what §7.4.1 says of AdamW."""
    claim = kit.ClaimTexts("""
        wider: the gap between training and held-out accuracy is wider after step decay than at a
          flat rate | §7.5.5, Figure 7.4 | ΔE₂ > ΔE₁ | above | points
        step: step decay is above a flat rate | §7.5.5, Figure 7.4 | it is
        AdamW: AdamW at a flat rate is below scheduled AdamW
          | §7.4.1 | by more than 5 points, not drawn | below
    """)
    flat, step = of["SGD, flat"], of["SGD, step"]
    trained, held_out = "training accuracy", "iterate accuracy"
    apart = kit.over_seeds(flat, trained).value - kit.over_seeds(flat, held_out).value
    unmet = unlearnt_reason(flat, step)
    if not unmet and apart > NO_GAP:
        unmet = f"the gap at a flat rate is {apart:.0f} points already, where the thesis has none"
    reading = kit.gap_of_gaps((step, step), (flat, flat), trained, held_out)
    yield claim("wider", reading, unmet=unmet)
    yield claim("step", **comparison(step, flat) | {"unmet": runs.unready(flat, step)})
    yield claim("AdamW", **comparison(of["AdamW, flat"], of["AdamW, linear"]))


def _lookahead_claims(of: dict[str, Rows], epochs: Rows) -> Iterator[Claim]:
    """Lookahead alone and before averages: Figure 7.12."""
    where, both, gadam = "§7.8.5, Figure 7.12", GADAM_AHEAD, of["Gadam"]
    others = {name: of[name] for name in AHEAD if name != "Gadam"}
    rival, ahead = runs.against_best(others, both)
    runner, faster = runs.against_best({**others, "Gadam": gadam}, both, "early")
    claim = kit.ClaimTexts(f"""
        speed: Lookahead makes AdamW converge faster (accuracy over the first third)
          | {where} | clearly
        smooth: Lookahead makes AdamW fluctuate less from epoch to epoch
          | {where} | it reduces fluctuations | below | points
        near: {both} is within {SMALL_CHANGE:g} point of Gadam
          | {where} | only marginally worse (VGG-16) | within {SMALL_CHANGE:g} of 0
        above: {both} is above all others but Gadam (here above {rival}, the best of them)
          | {where} | still stronger than all others (VGG-16) | above | points
        fastest: {both} converges fastest (accuracy over the first third, here against {runner})
          | {where} | at the fastest speed in all the optimisers tested (VGG-16) | above | points
    """)
    yield from lookahead_pairs(of, where)
    pair = of["AdamW + LH"], of["AdamW, linear"]
    yield claim("speed", **comparison(*pair, "early", unmet=unlearnt_reason))
    rough = [fluctuation(epochs.where(run=name)) for name in ("AdamW + LH", "AdamW, linear")]
    yield claim("smooth", kit.paired_difference(*rough), unmet=unlearnt_reason(pair[0]))
    yield claim("near", **comparison(of[both], gadam))
    yield claim("above", ahead, unmet=runs.unready(of[both], of[rival]))
    yield claim("fastest", faster, unmet=unlearnt_reason(of[both], of[runner]))


def lookahead_pairs(of: dict[str, Rows], source: str, prefix: str = "") -> Iterator[Claim]:
    """§7.8.5, on both networks: Lookahead helps SGD, and helps AdamW less than averaging."""
    claim = kit.ClaimTexts(f"""
        SGD: {prefix}SGD + Lookahead is above SGD | {source} | by a rather significant margin
        AdamW: {prefix}Gadam is above AdamW + Lookahead
          | {source} | more significant and more consistent
    """)
    yield claim("SGD", **comparison(of["SGD + LH"], of["SGD, linear"]))
    yield claim("AdamW", **comparison(of["Gadam"], of["AdamW + LH"]))


def fluctuation(epochs: Rows) -> dict[Any, float]:
    """The mean absolute change of the iterates' accuracy per epoch, for each seed."""
    out = {}
    for seed, part in epochs.groups("seed"):
        ordered = sorted(part, key=lambda row: row["epoch"])
        values = [row["iterate accuracy"] for row in ordered]
        changes = [abs(after - before) for before, after in pairwise(values)]
        if changes:
            out[seed] = sum(changes) / len(changes)
    return out


def _automatic_claims(of: dict[str, Rows]) -> Iterator[Claim]:
    """Averages with an automatic start: Table 7.7."""
    text = """
        GadamAuto: GadamAuto is above SWA-Auto | Table 7.7 | 75.39 and 73.93
        cost: the automatic start costs SGD more than it costs Gadam | §7.8.7 | 0.64 and 0.34 points
        SWA: SWA-Auto is below scheduled SGD | §7.8.7, Tables 7.2 and 7.7 | 73.93 and 74.15 | below
    """
    parts = [of[name] for name in ("Gadam", "Gadam-Auto", "SWA", "SWA-Auto")]
    gadam, gadam_auto, swa, swa_auto = parts
    # that they may begin too soon is part of what is tested
    unmet = unlearnt_reason(*parts) or runs.ceiling_reason(*parts)
    claim = kit.ClaimTexts(text, unit=" points", unmet=unmet)
    yield claim("GadamAuto", runs.gap(gadam_auto, swa_auto, "accuracy"))
    yield claim("cost", kit.gap_of_gaps((swa, swa_auto), (gadam, gadam_auto), "accuracy"))
    yield claim("SWA", runs.gap(swa_auto, of["SGD, linear"], "accuracy"))


FREQUENCIES = (1, 5, 20, 0)  # steps between averaged iterates, 0 once per epoch
OFTEN = {1: "every step", 5: "every 5 steps", 20: "every 20 steps", 0: "every epoch"}
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


def cells(
    images: Cell, network: str, adam_rate: float, seeds: int, patience: int = 3
) -> list[Cell]:
    """Run × seed; a constant-rate run also has the averages of ``STARTS`` and ``FREQUENCIES``.

    ``adam_rate`` is for AdamW and Gadam, ``patience`` for automatic schedules.
    """
    sgd, adam, epochs = (0.1, 5e-4), (adam_rate, 0.25), images["epochs"]
    auto = {"patience": patience}
    recipes = {
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
    named = [{"run": name, **plan} for name, plan in recipes.items()]
    return kit.grid(images | {"network": network}, run=named, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs and of the end; at a constant rate one more for each average."""
    return run_with_averages(cell, device, FREQUENCIES)


def tables(rows: Rows) -> Iterator[Table]:
    """All runs at their end, and the averages by start and by frequency."""
    ends, lines = rows.where(kind="end"), []
    shown = "accuracy", "iterate accuracy", "training accuracy", "early", "begun", "stopped"
    for name, part in ends.groups("run"):
        printed = f"{PRINTED[name]:.2f}" if name in PRINTED else ""
        lines.append((name, *kit.means(part, *shown), printed))
    header = (
        "run | accuracy, % | of the iterate | in training | first third | averages from | "
        "epochs | thesis, CIFAR-100"
    )
    yield kit.table(kit.network_title(ends), header, lines)
    made = rows.where(kind="average")
    names = made.distinct("run")

    def accuracies(start: float, every: int) -> list[str]:
        part = made.where(start=start, frequency=every)
        return [str(kit.over_seeds(part.where(run=name), "accuracy")) for name in names]

    gadam = made.where(run="AdamW, flat", frequency=0)
    best = max(runs.mean(gadam.where(start=start), "accuracy").value for start in STARTS)
    starts = tuple((f"{start:.0%}", *accuracies(start, 0)) for start in STARTS)
    title = f"Averages by start (best of Gadam {best:.2f}; thesis, CIFAR-100, {PRINTED_BEST})"
    yield kit.table(title, ("T_avg, share of the run", *names), starts)
    often = tuple((words, *accuracies(REFERENCE, every)) for every, words in OFTEN.items())
    yield kit.table("Averages by frequency, from half of the run on", ("an iterate", *names), often)


def charts(rows: Rows) -> Iterator[Chart]:
    """The generalisation gap, Lookahead over epochs, accuracy by start and by frequency."""
    epochs, made = rows.where(kind="epoch"), rows.where(kind="average")
    parts = {"training accuracy": "training", "iterate accuracy": "held out"}
    series = kit.curves(epochs.by("run", ("SGD, flat", "SGD, step")), parts)
    title, axis = "Training and held-out accuracy", "accuracy, %"
    yield Chart(title, "epoch", axis, series, source="Figure 7.4")
    series = kit.curves(epochs.by("run", AHEAD), "accuracy")
    yield Chart("Lookahead", "epoch", axis, series, source="Figure 7.12")
    series = kit.curves(made.where(frequency=0).by("run"), "accuracy", "start")
    yield Chart("Start of averaging", "share of the run", axis, series, source="Figure 7.11")
    series = tuple(
        kit.points(name, half.by("frequency", OFTEN), "accuracy")
        for name, half in made.where(start=REFERENCE).groups("run")
    )
    title, across = "Frequency of averaging", "an iterate is averaged"
    yield Chart(title, across, axis, series, source="Figure 7.13b")


SMOKE = kit.image_setting("digits", 96, 64, epochs=4, batch=32)
CPU = kit.image_setting("cifar10", 2000, 4000, epochs=30, side=8, batch=64)
PAPER = kit.image_setting("cifar100", 45_000, 5000, epochs=34, augmented=True, precision="bfloat16")
WHOLE = cells(PAPER, "VGG-16-BN", adam_rate=5e-4, seeds=3)
# runs of the claims that these leave undecided, and that a few more seeds decide
PLANNED = ("SGD, linear", "SGD + LH", "SWA", "SWA-Auto", "AdamW, flat", "Gadam", "Gadam-Auto")
EXPERIMENT = kit.Experiment(
    "averaging-schedules",
    "When to start averaging, how often, and what schedules and Lookahead do",
    kit.SPECTRAL,
    "§§7.4.1, 7.5.5 and 7.8.4–7.8.7, Tables 7.6 and 7.7, Figures 7.4 and 7.11–7.13",
    {
        "smoke": cells(SMOKE, "VGG-4×4-BN", adam_rate=3e-3, seeds=2, patience=1),
        "cpu": cells(CPU, "VGG-4×16-BN", adam_rate=1e-3, seeds=5),
        "paper": [
            *WHOLE,
            *kit.more_seeds(WHOLE, [3], run=PLANNED),
            *kit.more_seeds(WHOLE, [4], run=("SWA", "SWA-Auto", "Gadam", "Gadam-Auto")),
            *kit.more_seeds(WHOLE, [4, 5], run=("SGD, linear", "SGD + LH")),
            *kit.more_seeds(WHOLE, range(3, 8), run=("AdamW, linear", "AdamW + LH")),
        ],
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        At paper scale 34 epochs of the thesis's 300 on 45,000 images of CIFAR-100; on a CPU
          CIFAR-10.
        On a CPU a small network of VGG's kind.
        Starts and frequencies are compared at a constant rate: averages do not affect the steps, so
          one run has them all.
        The thesis also moves its schedule with T_avg.
        The automatic variants start and stop by the loss on the same held-out images by which they
          are judged.
        Their patience is a tenth of the epochs, where the thesis has 10 of 300; none outlasts the
          other runs.
        Table 7.6 has the best start; here it is chosen by the other seeds, so that no seed chooses
          for itself.
        Differences of up to one point count as small.
        That a gap of 10 points counts as none in Figure 7.4 was set after the results.
        At paper scale the runs of claims that three seeds left undecided have a planned fourth.
        Then five seeds were planned for what the automatic start costs.
        Six were planned for SGD with Lookahead, and eight for the fluctuations of AdamW.
        Lookahead has k = 5 and α = 0.5; in Gadam + LH it ends where averaging begins.
        On a GPU networks train with bfloat16 in their forward passes.
    """),
    "VGG-16 on CIFAR-100, rates a tenth at epochs 100 and 150, averages from epoch 161, 3 runs;"
    " epochs are not in the text.",
    tuple(kit.Size(name, "cifar100") for name in ("VGG-16-BN", "VGG-16")),
)
