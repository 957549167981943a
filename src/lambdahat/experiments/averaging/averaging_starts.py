"""The best start of averaging on two networks, and Lookahead (Table 7.6, Figures 7.11, 7.12b)."""

from __future__ import annotations

from dataclasses import dataclass

from lambdahat.experiments.averaging.averaged_training import (
    BASES,
    FULL,
    family,
    gap,
    mean,
    recipe,
    saturated,
    shared_settings,
    tuned_start,
    unlearnt,
    unready,
)
from lambdahat.experiments.averaging.averaging_schedules import (
    AHEAD,
    FLAT,
    GADAM_AHEAD,
    REFERENCE,
    SCHEDULED,
    SMALL_CHANGE,
    STARTS,
    lookahead_pairs,
    run_with_averages,
    start_claims,
)
from lambdahat.experiments.averaging.gadam_image import tuned_settings
from lambdahat.experiments.kit.cells import Cell, Row, Rows, Scale, curve, means, over_seeds
from lambdahat.experiments.kit.claims import (
    Claim,
    Claims,
    Reading,
    Table,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.results.charts import Chart

AVERAGED = ("Gadam", "GadamX")
LOOKAHEAD_ON = "PreResNet"  # Figure 7.12b; 7.12a, of VGG-16, is in averaging-schedules
WHERE = "§7.8.5, Figure 7.12b"
# Test accuracy on CIFAR-100: with the best start (Table 7.6) and with the thesis's own (Table 7.2)
PRINTED: dict[tuple[str, str], tuple[float, float]] = {
    ("VGG", "Gadam"): (76.11, 75.73),
    ("VGG", "GadamX"): (77.22, 76.85),
    ("PreResNet", "Gadam"): (77.41, 77.37),
    ("PreResNet", "GadamX"): (79.41, 77.90),
}


@dataclass(frozen=True)
class StartScale(Scale):
    """One scale: networks, the side of their images; ``quick`` takes the small networks' rates."""

    networks: tuple[str, ...]
    side: int = 0
    augmented: bool = False
    precision: str = FULL
    quick: bool = False


def cells(config: StartScale) -> list[Cell]:
    """Network × run × seed; a run at a constant rate has the averages of all ``STARTS``."""
    base = shared_settings(config, "networks", "quick", "seeds")
    return [
        {**base, "network": network, "run": name, **plan, "seed": seed}
        for network in config.networks
        for name, plan in recipes(network, config).items()
        for seed in range(config.seeds)
    ]


def recipes(network: str, config: StartScale) -> dict[str, Cell]:
    """Both base optimisers at a constant and a scheduled rate; on one network also Lookahead."""
    bases = [BASES[name] for name in AVERAGED]
    wanted = {
        base + tail: (base, "flat" if tail == FLAT else "")
        for base in bases
        for tail in (FLAT, SCHEDULED)
    }
    if family(network) == LOOKAHEAD_ON:
        wanted |= {name: (name.removesuffix(SCHEDULED).replace(" ", ""), "") for name in AHEAD}
    return {
        name: recipe(
            optimizer,
            *tuned_settings(network, optimizer.removesuffix("+LH"), config.quick),
            config.epochs,
            schedule,
        )
        for name, (optimizer, schedule) in wanted.items()
    }


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs and of the end; at a constant rate one more for each start."""
    return run_with_averages(cell, device)


def claims(rows: Rows) -> list[Claim]:
    """Any sensible start, what tuning it gains, GadamX over Gadam, Lookahead, by network."""
    found = []
    for network in rows.distinct("network"):
        part = rows.where(network=network)
        for name in AVERAGED:
            best, own = PRINTED[family(network), name]
            found += start_claims(name, part, f"{best:.2f} to {own:.2f}", f"{network}: ")
        found.append(best_claim(network, part))
        if family(network) == LOOKAHEAD_ON:
            found += lookahead_claims(f"{network}: ", part.where(kind="end"))
    return found


def best_claim(network: str, rows: Rows) -> Claim:
    """GadamX's best start is above Gadam's, each chosen by the other seeds."""
    gadam, gadam_x = (tuned_start(averages_of(rows, name), "accuracy") for name in AVERAGED)
    flat = [rows.where(kind="end", run=BASES[name] + FLAT) for name in AVERAGED]
    printed = " to ".join(f"{PRINTED[family(network), name][0]:.2f}" for name in reversed(AVERAGED))
    sentence = (
        f"{network}: GadamX with its best T_avg is above Gadam with its own (over the other seeds)"
    )
    reading = paired_difference(gadam_x, gadam)
    unmet = unlearnt(*flat) or saturated(*flat)
    return Claim(sentence, "§7.8.4, Table 7.6", printed, reading, unit=" points", unmet=unmet)


def averages_of(rows: Rows, name: str) -> Rows:
    """The averages of one of ``AVERAGED``: those of its base's iterates at a constant rate."""
    return rows.where(kind="average", run=BASES[name] + FLAT)


def lookahead_claims(prefix: str, ends: Rows) -> list[Claim]:
    """What the text says of Figure 7.12b."""
    of = {name: ends.where(run=name) for name in AHEAD}
    fast, slow, apart = widest(of, "early")
    found = Claims(lookahead_pairs(of, WHERE, prefix))
    sentence = (
        f"{prefix}at first all optimisers converge alike (accuracy over the first third, within"
        f" {SMALL_CHANGE:g} point from {fast} to {slow}, the extremes)"
    )
    published = "the initial difference is minimal"
    unmet = unlearnt(*of.values())
    found.add(sentence, WHERE, published, apart, "within", 0.0, SMALL_CHANGE, " points", unmet)
    sentence = f"{prefix}{GADAM_AHEAD} is above Gadam"
    published = "stronger than our result without Lookahead"
    reading = gap(of[GADAM_AHEAD], of["Gadam"], "accuracy")
    unmet = unready(of[GADAM_AHEAD], of["Gadam"])
    found.add(sentence, WHERE, published, reading, unit=" points", unmet=unmet)
    return found


def widest(of: dict[str, Rows], column: str) -> tuple[str, str, Reading]:
    """The settings with the largest and the smallest mean of a column, and their difference."""
    means = {name: mean(part, column).value for name, part in of.items()}
    high, low = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    return high, low, gap(of[high], of[low], column)


def tables(rows: Rows) -> list[Table]:
    """Of each network its runs and its averages by start; the best of them beside Table 7.6."""
    out, best = [], []
    for network in rows.distinct("network"):
        part = rows.where(network=network)
        out += [_runs_table(network, part.where(kind="end")), _starts_table(network, part)]
        best += [_best_line(network, name, part) for name in AVERAGED]
    header = split_header(
        "network | optimiser | best start | accuracy there, % | "
        "with the start of the other seeds | thesis, CIFAR-100, best start | its own start"
    )
    return [Table("Best start of averaging", header, tuple(best)), *out]


def _runs_table(network: str, ends: Rows) -> Table:
    columns = ("accuracy", "iterate accuracy", "training accuracy", "early")
    lines = ((name, *means(ends.where(run=name), *columns)) for name in ends.distinct("run"))
    header = ("run", "accuracy, %", "of the iterate", "in training", "first third")
    return Table(
        f"{network}, {ends[0]['parameters']:,} parameters, {ends[0]['data']}", header, tuple(lines)
    )


def _starts_table(network: str, rows: Rows) -> Table:
    made = [averages_of(rows, name) for name in AVERAGED]
    ends = [rows.where(kind="end", run=BASES[name] + SCHEDULED) for name in AVERAGED]
    lines = [
        (f"{start:.0%}", *(str(over_seeds(part.where(start=start), "accuracy")) for part in made))
        for start in STARTS
    ]
    lines.append(
        ("the base with its schedule", *(str(over_seeds(part, "accuracy")) for part in ends))
    )
    return Table(
        f"Averages by start, {network}", ("T_avg, share of the run", *AVERAGED), tuple(lines)
    )


def _best_line(network: str, name: str, rows: Rows) -> tuple[str, ...]:
    made = averages_of(rows, name)
    means = made.paired("accuracy", by="start")
    start = max(means, key=means.__getitem__)
    there = over_seeds(made.where(start=start), "accuracy")
    chosen = mean_of(list(tuned_start(made, "accuracy").values()))
    printed = (f"{value:.2f}" for value in PRINTED[family(network), name])
    return (network, name, f"{start:.0%}", str(there), str(chosen), *printed)


def charts(rows: Rows) -> list[Chart]:
    """Accuracy by start beside the scheduled bases, and Lookahead over epochs, by network."""
    out = []
    for network in rows.distinct("network"):
        part = rows.where(network=network)
        lines = [BASES[name] + SCHEDULED for name in AVERAGED]
        title = f"Start of averaging, {network}"
        across = "share of the run"
        series = tuple(
            curve(name, averages_of(part, name), "accuracy", "start") for name in AVERAGED
        )
        marks = tuple(
            (name, mean(part.where(kind="end", run=name), "accuracy").value) for name in lines
        )
        out.append(Chart(title, across, "accuracy, %", series, source="Figure 7.11", lines=marks))
        if family(network) == LOOKAHEAD_ON:
            epochs = part.where(kind="epoch")
            title = f"Lookahead, {network}"
            axis = "accuracy, %"
            series = tuple(curve(name, epochs.where(run=name), "accuracy") for name in AHEAD)
            caption = "Of the average from when there is one."
            out.append(Chart(title, "epoch", axis, series, source="Figure 7.12b", caption=caption))
    return out


# data set, training and held-out samples, epochs, seeds
CPU = ("cifar10", 2000, 3000, 25, 5)
PAPER = ("cifar100", 45_000, 5_000, 34, 3)
EXPERIMENT = Experiment(
    "averaging-starts",
    "The best start of averaging for Gadam and GadamX, and Lookahead on a second network",
    SPECTRAL,
    "§§7.8.4 and 7.8.5, Table 7.6, Figures 7.11 and 7.12b",
    {
        "smoke": StartScale(
            "digits", 96, 64, 4, 2, ("VGG-4×4-BN", "PreResNet-11"), batch=32, quick=True
        ),
        "cpu": StartScale(*CPU, ("VGG-4×16-BN", "PreResNet-11"), side=8, batch=64, quick=True),
        "paper": StartScale(
            *PAPER, ("VGG-16-BN", "PreResNet-110"), augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences(f"""
        At paper scale 34 epochs of the thesis's 300 on 45,000 images of CIFAR-100.
        On a CPU 2,000 images of CIFAR-10 at 8 × 8, small networks and AdamW's rate 1e-3.
        Rates and weight decays are otherwise those of the thesis's code for CIFAR-100, as in
          gadam-image.
        Starts are compared at a constant rate, the initial one: no step reads an average, so one
          run has them all.
        The thesis also moves its schedule with T_avg, and averages at half of the initial rate.
        Sensible starts are 25, 50 and 75 % of the run; {REFERENCE:.0%} stands for the thesis's own,
          161 of 300.
        The thesis does not print the values of T_avg that it tried.
        Table 7.6 has the best start; here it is chosen by the other seeds, so that no seed chooses
          for itself.
        Best starts are compared whether or not the iterates have settled: a late start is among the
          choices.
        Its row of ImageNet 32 × 32 is not here; the language model's is in gadam-language.
        VGG's Gadam is in averaging-schedules too, on other images there and over another number of
          epochs.
        Lookahead has k = 5 and α = 0.5; in Gadam + LH it ends where averaging begins. One point
          counts as little.
        The fastest and the slowest run are chosen by their means on the same seeds, which makes
          them differ more.
        That Gadam + LH beats the Lookahead paper's own result is not tested.
        On a GPU networks train and are judged in bfloat16 forward passes; averages by start are
          judged in float32.
    """),
    size="VGG-16 and PreResNet-110 on CIFAR-100, 3 runs; epochs are not in the text.",
    sizes=(Size("VGG-16-BN", "cifar100"), Size("PreResNet-110", "cifar100")),
)
