"""The best start of averaging on two networks, and Lookahead (Table 7.6, Figures 7.11, 7.12b)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lambdahat.experiments import kit
from lambdahat.experiments.averaging import averaged_training as runs
from lambdahat.experiments.averaging import averaging_schedules as schedules
from lambdahat.experiments.averaging.averaged_training import BASES, family
from lambdahat.experiments.averaging.averaging_schedules import AHEAD, FLAT, SCHEDULED
from lambdahat.experiments.averaging.gadam_image import tuned_settings
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table

AVERAGED = ("Gadam", "GadamX")
LOOKAHEAD_ON = "PreResNet"  # Figure 7.12b; 7.12a, of VGG-16, is in averaging-schedules
ELSEWHERE = ("VGG", "Gadam")  # whose starts are judged in averaging-schedules
WHERE = "§7.8.5, Figure 7.12b"
# Test accuracy on CIFAR-100: with the best start (Table 7.6) and with the thesis's own (Table 7.2)
PRINTED: dict[tuple[str, str], tuple[float, float]] = {
    ("VGG", "Gadam"): (76.11, 75.73),
    ("VGG", "GadamX"): (77.22, 76.85),
    ("PreResNet", "Gadam"): (77.41, 77.37),
    ("PreResNet", "GadamX"): (79.41, 77.90),
}


COLUMNS = {
    "accuracy": "accuracy, %",
    "iterate accuracy": "of the iterate",
    "training accuracy": "in training",
    "early": "first third",
}


def cells(images: Cell, networks: Sequence[str], seeds: int, quick: bool = False) -> list[Cell]:
    """Network × run × seed; a run at a constant rate has the averages of all starts.

    Both base optimisers run at a constant and a scheduled rate; on one network also Lookahead.
    ``quick`` takes the small networks' rates.
    """
    out = []
    for network in networks:
        wanted = {
            name + tail: (name, "flat" if tail == FLAT else "")
            for name in (BASES[averaged] for averaged in AVERAGED)
            for tail in (FLAT, SCHEDULED)
        }
        if family(network) == LOOKAHEAD_ON:
            wanted |= {name: (name.removesuffix(SCHEDULED).replace(" ", ""), "") for name in AHEAD}
        for name, (optimizer, schedule) in wanted.items():
            tuned = tuned_settings(network, optimizer.removesuffix("+LH"), quick)
            plan = runs.recipe(optimizer, *tuned, images["epochs"], schedule)
            setting = {**images, "network": network, "run": name, **plan}
            out += kit.grid(setting, seed=range(seeds))
    return out


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs and of the end; at a constant rate one more for each start."""
    return schedules.run_with_averages(cell, device)


def claims(rows: Rows) -> Iterator[Claim]:
    """Any sensible start, what tuning it gains, GadamX over Gadam, Lookahead, by network."""
    for network, part in rows.groups("network"):
        kind = family(network)
        for name in AVERAGED:
            best, own = PRINTED[kind, name]
            printed = f"{best:.2f} to {own:.2f}"
            if (kind, name) != ELSEWHERE:
                yield from schedules.start_claims(name, part, printed, f"{network}: ")
        # GadamX's best start against Gadam's, each chosen by the other seeds
        made = [averages_of(part, name) for name in AVERAGED]
        gadam, gadam_x = (runs.tuned_start(each, "accuracy") for each in made)
        flat = [part.where(kind="end", run=BASES[name] + FLAT) for name in AVERAGED]
        printed = " to ".join(f"{PRINTED[kind, name][0]:.2f}" for name in reversed(AVERAGED))
        words = "GadamX with its best T_avg is above Gadam with its own (over the other seeds)"
        said = f"{network}: {words}", "§7.8.4, Table 7.6", printed
        unmet = runs.unlearnt_reason(*flat) or runs.ceiling_reason(*flat)
        reading = kit.paired_difference(gadam_x, gadam)
        yield Claim(*said, reading, unit=" points", unmet=unmet)
        if kind == LOOKAHEAD_ON:
            yield from lookahead_claims(f"{network}: ", part.where(kind="end"))


def averages_of(rows: Rows, name: str) -> Rows:
    """The averages of one of ``AVERAGED``: those of its base's iterates at a constant rate."""
    return rows.where(kind="average", run=BASES[name] + FLAT)


def lookahead_claims(prefix: str, ends: Rows) -> Iterator[Claim]:
    """The claims of Figure 7.12b."""
    of = {name: ends.where(run=name) for name in AHEAD}
    early = {name: runs.mean(part, "early").value for name, part in of.items()}
    fast, slow = max(early, key=early.__getitem__), min(early, key=early.__getitem__)
    small, ahead = schedules.SMALL_CHANGE, schedules.GADAM_AHEAD
    claim = kit.ClaimTexts(f"""
        alike: {prefix}at first all optimisers converge alike (accuracy over the first third, within
          {small:g} point from {fast} to {slow}, the extremes)
          | {WHERE} | the initial difference is minimal | within {small:g} of 0 | points
        ahead: {prefix}{ahead} is above Gadam
          | {WHERE} | stronger than our result without Lookahead
    """)
    yield from schedules.lookahead_pairs(of, WHERE, prefix)
    apart, unmet = runs.gap(of[fast], of[slow], "early"), runs.unlearnt_reason(*of.values())
    yield claim("alike", apart, unmet=unmet)
    yield claim("ahead", **runs.comparison(of[ahead], of["Gadam"]))


def tables(rows: Rows) -> Iterator[Table]:
    """The best starts beside Table 7.6; the runs and the averages by start of each network."""
    best, rest = [], []
    for network, part in rows.groups("network"):
        ends = part.where(kind="end")
        runs_table = kit.means_table(kit.network_title(ends), "run", ends.by("run"), COLUMNS)
        rest += [runs_table, _starts_table(network, part)]
        for name in AVERAGED:
            made = averages_of(part, name)
            means = made.paired("accuracy", by="start")
            start = max(means, key=means.__getitem__)
            there = kit.over_seeds(made.where(start=start), "accuracy")
            chosen = kit.mean_of(list(runs.tuned_start(made, "accuracy").values()))
            printed = (f"{value:.2f}" for value in PRINTED[family(network), name])
            best.append((network, name, f"{start:.0%}", str(there), str(chosen), *printed))
    header = (
        "network | optimiser | best start | accuracy there, % | "
        "with the start of the other seeds | thesis, CIFAR-100, best start | its own start"
    )
    yield kit.table("Best start of averaging", header, best)
    yield from rest


def _starts_table(network: str, rows: Rows) -> Table:
    made = [averages_of(rows, name) for name in AVERAGED]
    starts, ends = schedules.STARTS, rows.where(kind="end")
    parts = {f"{start:.0%}": [each.where(start=start) for each in made] for start in starts}
    scheduled = [ends.where(run=BASES[name] + SCHEDULED) for name in AVERAGED]
    parts["the base with its schedule"] = scheduled
    lines = tuple(
        (words, *(str(kit.over_seeds(each, "accuracy")) for each in pair))
        for words, pair in parts.items()
    )
    return kit.table(f"Averages by start, {network}", ("T_avg, share of the run", *AVERAGED), lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Accuracy by start beside the scheduled bases, and Lookahead over epochs, by network."""
    across, axis = "share of the run", "accuracy, %"
    for network, part in rows.groups("network"):
        made = {name: averages_of(part, name) for name in AVERAGED}
        series = kit.curves(made, "accuracy", "start")
        ends, bases = part.where(kind="end"), [BASES[name] + SCHEDULED for name in AVERAGED]
        marks = tuple((name, runs.mean(ends.where(run=name), "accuracy").value) for name in bases)
        title = f"Start of averaging, {network}"
        yield Chart(title, across, axis, series, source="Figure 7.11", lines=marks)
        if family(network) == LOOKAHEAD_ON:
            epochs = part.where(kind="epoch")
            title, caption = f"Lookahead, {network}", "Of the average from when there is one."
            series = kit.curves(epochs.by("run", AHEAD), "accuracy")
            yield Chart(title, "epoch", axis, series, source="Figure 7.12b", caption=caption)


SMOKE = kit.image_setting("digits", 48, 32, epochs=4, batch=24)
CPU = kit.image_setting("cifar10", 2000, 3000, epochs=25, side=8, batch=64)
PAPER = kit.image_setting("cifar100", 45_000, 5000, epochs=34, augmented=True, precision="bfloat16")
WHOLE = cells(PAPER, ("VGG-16-BN", "PreResNet-110"), seeds=3)
FLAT_RUNS = [BASES[name] + FLAT for name in AVERAGED]
EXPERIMENT = kit.Experiment(
    "averaging-starts",
    "The best start of averaging for Gadam and GadamX, and Lookahead on a second network",
    kit.SPECTRAL,
    "§§7.8.4 and 7.8.5, Table 7.6, Figures 7.11 and 7.12b",
    {
        "smoke": cells(SMOKE, ("VGG-4×4-BN", "PreResNet-11"), seeds=2, quick=True),
        "cpu": cells(CPU, ("VGG-4×16-BN", "PreResNet-11"), seeds=5, quick=True),
        "paper": [*WHOLE, *kit.more_seeds(WHOLE, [3, 4], network=["VGG-16-BN"], run=FLAT_RUNS)],
    },
    *(run, claims, tables, charts),
    kit.sentences(f"""
        At paper scale 34 epochs of the thesis's 300 on 45,000 images of CIFAR-100.
        On a CPU 2,000 images of CIFAR-10 at 8 × 8, small networks and AdamW's rate 1e-3.
        Rates and weight decays are otherwise those of the thesis's code for CIFAR-100, as in
          gadam-image.
        Starts are compared at the initial rate, held constant: averages do not affect the steps, so
          one run has them all.
        The thesis also moves its schedule with T_avg, and averages at half of the initial rate.
        Sensible starts are 25, 50 and 75 % of the run; {schedules.REFERENCE:.0%} stands for the
          thesis's own, 161 of 300.
        The thesis does not print the values of T_avg that it tried.
        Table 7.6 has the best start; here it is chosen by the other seeds, so that no seed chooses
          for itself.
        Best starts are compared whether or not the iterates have settled: a late start is among the
          choices.
        The row of ImageNet 32 × 32 is left out; that of the language model is in gadam-language.
        VGG's Gadam is judged in averaging-schedules, at paper scale by the same runs.
        At first both experiments counted those claims.
        Lookahead has k = 5 and α = 0.5; in Gadam + LH it ends where averaging begins. One point
          counts as little.
        Three seeds left it undecided what tuning gains GadamX: VGG-16's flat runs have a planned
          fourth and fifth.
        The fastest and the slowest run are chosen by their means over the same seeds, which
          exaggerates their difference.
        That Gadam + LH beats the Lookahead paper's own result is not tested.
        On a GPU networks train and are judged in bfloat16 forward passes; averages by start are
          judged in float32.
    """),
    "VGG-16 and PreResNet-110 on CIFAR-100, 3 runs; epochs are not in the text.",
    tuple(kit.Size(name, "cifar100") for name in ("VGG-16-BN", "PreResNet-110")),
)
