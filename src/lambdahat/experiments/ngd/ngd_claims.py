"""The NGD paper's comparison in its several forms, what it needs of a run, and what the tables and
charts of its experiments share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Chart, Claim, Reading, Row, Rows, Series, Table, mean_of
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.kit.experiment import SETS
from lambdahat.experiments.ngd.ngd_runs import SIDE, TEMPERATURES, WORDS, network, status_of

QUANTITIES = {column: f"λ̂ at {words}" for column, words in WORDS.items()} | {
    "trace": "Tr H",
    "wbic": "WBIC",
}
TITLES = {column: f"Learning coefficient λ̂ at {words}" for column, words in WORDS.items()} | {
    "trace": "Trace of the Hessian",
    "wbic": "WBIC",
    "g_n": "Bayes generalisation loss G_n",
    "loss": "Training loss",
    "validation_loss": "Validation loss",
    "update_norm": "Update norm",
}
HEADINGS = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "llc_batch": "λ̂ (B/ln B)",
    "llc": "λ̂ (n/ln n)",
    "trace": "Tr H",
    "wbic": "WBIC",
    "update_norm": "update norm",
}
INPUTS = {"digits": 64}  # pixels of an image where they are not 28 × 28
HERE = "here"  # the source of a claim that the paper does not make
CLASSES = 10  # of all data sets here
CHANCE = math.log(CLASSES)  # the loss of guessing
LEARNT = CHANCE / 2
INTERPOLATED = CHANCE / 100
# statuses of readings with an error bar that holds, if a wide one
SOUND = ("CONVERGED", "GRADIENTS_SPENT")
ASSUMED = kit.sentences(f"""
    Inputs of zero mean and unit standard deviation, ReLU, PyTorch's default initialisation, no
      momentum and no weight decay: the paper does not say.
    The online natural gradient (Eqs. 6 and 7) with its default rank, period and forgetting,
      rescaled to ‖∇L‖.
    The paper does not state its sampler's settings. Here: SGLD, γ = 100, chains of fixed length,
      and the step size of a pilot run.
    At paper scale: the default kernel and step size of llc with γ = 100, until the standard error
      is 5 % of λ̂ or 10,000 gradients are spent.
    The default γ of llc (perceptrons of ngd-vs-sgd at paper scale) is computed at the end of SGD
      and used at all points of the same seed.
    λ̂ is sampled at nβ = n/ln n (Eq. 19) and at nβ = B/ln B, where B is the sampler's batch size:
      the default of devinterp.
    A seed determines the images, the initial weights and the batches; both optimisers use the same.
      n counts seeds.
    Comparisons at equal training loss use the final loss of the run that ends highest, and of the
      others the nearest of about 100 points.
    A claim is not testable if half or more of the runs of a setting that it compares have a
      training loss above {LEARNT:.2f} (half of ln 10, the loss of guessing) or, for λ̂ and WBIC,
      are NOT_A_MINIMUM, because the paper speaks of solutions. The same holds if half or more of
      the readings are NOT_MIXED.
    This rule, the claims about single widths, the log-ratios and the slopes by seed were introduced
      after the cpu runs had been seen; the extension to NOT_MIXED, WBIC and G_n after all runs.
    Claims that are not testable are left out of Holm's correction, which makes the other claims
      easier to decide.
""")
SMALLER = (
    "At smoke and cpu scale fewer images and a rate of 0.05 in place of 0.01 stand for the paper's"
    " longer runs. Those stored were sampled before fewer than 50 effective draws counted as"
    " NOT_MIXED: some of their readings would be NOT_MIXED today."
)
PLOTTED = (
    "The paper has this as a plot only and prints no numbers: there is no curve of its own to set"
    " beside ours."
)


def unmet(groups: Mapping[str, Rows], column: str = "") -> str:
    """Why a claim about solutions cannot be read off these groups of runs; empty where it can.

    The runs must have learnt and, where ``column`` has a status, have sound readings (the rule in
    ASSUMED).
    """
    reasons = []
    for name, rows in groups.items():
        losses = rows.values("loss")
        high = sum(not loss <= LEARNT for loss in losses)
        if losses and 2 * high >= len(losses):
            mean = mean_of(losses).value
            reasons.append(f"{name} has not learnt (training loss {mean:.2f}, chance {CHANCE:.2f})")
        statuses = rows.values(status_of(column))
        failed = Counter(status for status in statuses if status not in SOUND)
        if failed and 2 * failed.total() >= len(statuses):
            words = " and ".join(f"{status} in {count}" for status, count in failed.most_common())
            reasons.append(f"{name} is {words} of {len(statuses)}")
    return "; ".join(reasons)


@dataclass(frozen=True)
class ClaimForm:
    """A form of "NGD ends higher than SGD": which column, compared where, whether of sound pairs
    only.

    The paper compares at the end, whatever the losses, and all runs: other forms are ours.
    """

    words: str
    column: str
    at: str
    source: str
    sound: bool = False

    @property
    def own(self) -> bool:
        """Whether the paper does not make the claim in this form."""
        return self.source == HERE

    def sentence(self, where: str) -> str:
        """The claim about the runs of a group, "" for all."""
        return f"{where}{': ' * bool(where)}NGD is above SGD {self.words}"


_FIRST, _EQ_19 = "Figures 1 and 2a", "Eq. 19, Figures 1 and 2a"
_EQUAL = "at equal training loss"
FORMS = (
    ClaimForm("at the end, λ̂ at nβ = B/ln B", "llc_batch", "end", _FIRST),
    ClaimForm("at the end, λ̂ at nβ = n/ln n", "llc", "end", _EQ_19),
    ClaimForm(
        "at the end, λ̂ at nβ = n/ln n, of pairs without NOT_A_MINIMUM or NOT_MIXED",
        *("llc", "end", HERE, True),
    ),
    ClaimForm("at the end, Tr H", "trace", "end", "Figure 2b"),
    ClaimForm(f"{_EQUAL}, λ̂ at nβ = B/ln B", "llc_batch", "equal loss", HERE),
    ClaimForm(f"{_EQUAL}, λ̂ at nβ = n/ln n", "llc", "equal loss", HERE),
    ClaimForm(f"{_EQUAL}, Tr H", "trace", "equal loss", HERE),
    ClaimForm("at the end, λ̂ at nβ = B/ln B, γ by the rule", "llc_batch_rule", "end", _FIRST),
    ClaimForm("at the end, λ̂ at nβ = n/ln n, γ by the rule", "llc_rule", "end", _EQ_19),
    ClaimForm(f"{_EQUAL}, λ̂ at nβ = B/ln B, γ by the rule", "llc_batch_rule", "equal loss", HERE),
    ClaimForm(f"{_EQUAL}, λ̂ at nβ = n/ln n, γ by the rule", "llc_rule", "equal loss", HERE),
    ClaimForm("at the end, WBIC", "wbic", "end", HERE),
)


def form_claims(rows: Rows, where: str = "") -> list[Claim]:
    """Every form that can be read off the rows, which have the runs of one group."""
    return [form_claim(rows, form, where) for form in FORMS if rows.values(form.column)]


def form_claim(rows: Rows, form: ClaimForm, where: str = "") -> Claim:
    """Whether NGD is above SGD in this form, over the pairs in the rows."""
    part = every = rows.where(at=form.at)
    if form.sound:
        spoilt = [row["seed"] for row in every if row[status_of(form.column)] not in SOUND]
        part = Rows(row for row in every if row["seed"] not in spoilt)
    reading = gap_of(part, form.column, optimizer=("ngd", "sgd"))
    reason = unmet(by_optimizer(part), form.column)
    if form.sound and reading.count < 2:
        reason = f"{reading.count} of {len(every) // 2} pairs are left"
    sentence, printed = form.sentence(where), "not compared" if form.own else "NGD higher"
    return Claim(sentence, form.source, printed, reading, unmet=reason, own=form.own)


def criterion_claims(rows: Rows, where: str) -> Iterator[Claim]:
    """WBIC against BIC = n·L_n + (d/2)·ln n at the end: "λ < d/2 in general" (under Eq. 3)."""
    for name, part in by_optimizer(rows.where(at="end")).items():
        gaps = [row["wbic"] / bic(row) - 1 for row in part if row.get("wbic") is not None]
        if gaps:
            sentence = f"{where}: WBIC of {name} is below BIC (relative difference)"
            reading, reason = mean_of(gaps), unmet({name: part}, "llc")
            yield Claim(sentence, "Eqs. 2 and 3", "λ < d/2", reading, "below", unmet=reason)


def bic(row: Row) -> float:
    """BIC (Eq. 2) of the point of a row."""
    return float(row["training"] * row["loss"] + dimension(row) / 2 * math.log(row["training"]))


def dimension(row: Row) -> int:
    """The number of parameters d of the network of a row."""
    with torch.device("meta"):
        model = network({**row, "seed": 0}, INPUTS.get(row["data"], SIDE**2), CLASSES)
    return sum(parameter.numel() for parameter in model.parameters())


def gap_of(rows: Rows, column: str, **sides: tuple[str, str]) -> Reading:
    """The mean difference, over seeds, of the rows with the first value of a setting and those with
    the second: ``gap_of(rows, "llc", optimizer=("ngd", "sgd"))``.
    """
    ((name, values),) = sides.items()
    upper, lower = (rows.where(**{name: value}) for value in values)
    return kit.gap(upper, lower, column)


def log_ratio(upper: Rows, lower: Rows, column: str) -> Reading:
    """The mean over seeds of ln(upper/lower); a seed where either is not positive has none."""
    logs = [
        {seed: math.log(x) if x > 0 else math.nan for seed, x in rows.paired(column).items()}
        for rows in (upper, lower)
    ]
    return kit.paired_difference(*logs)


def by_optimizer(rows: Rows) -> dict[str, Rows]:
    """The rows of SGD and of NGD."""
    return {name.upper(): rows.where(optimizer=name) for name in ("sgd", "ngd")}


def group_of(row: Row) -> str:
    """The network and its data in words."""
    name = "LeNet-5" if row["network"] == "lenet5" else f"FFNN {row['layers']} × {row['width']}"
    return f"{name} on {SETS[row['data']]}"


def by_group(rows: Rows, name: Callable[[Row], str] = group_of) -> dict[str, Rows]:
    """The rows by their group, in order of appearance."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return {key: Rows(part) for key, part in groups.items()}


def survival(groups: Mapping[str, Rows], claims: Sequence[Claim]) -> Table:
    """Which form of the claim survives, by the verdicts of ``claims``."""
    verdicts = {judged.claim: f"{judged.verdict}: {judged.evidence}" for judged in judge(claims)}
    lines = [
        (form.words, *(verdicts.get(form.sentence(group), "") for group in groups))
        for form in FORMS
    ]
    kept = [line for line in lines if any(line[1:])]
    return kit.table("NGD above SGD: which form of the claim survives", ("form", *groups), kept)


def points_table(rows: Rows, title: str, name: Callable[[Row], str] = group_of) -> Table:
    """The means over seeds of what was measured, by group, place and optimiser."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace", "wbic")
    parts = {
        (group, at, optimizer.upper()): here
        for group, part in by_group(rows, name).items()
        for at in part.distinct("at")
        for optimizer, here in part.where(at=at).groups("optimizer")
    }
    return kit.means_table(title, "run | where | by", parts, {c: HEADINGS[c] for c in columns})


def status_table(rows: Rows) -> Table:
    """How many readings of λ̂ have which status, by optimiser, place and temperature."""
    lines = []
    for optimizer, runs in rows.groups("optimizer"):
        for at in rows.distinct("at"):
            part = runs.where(at=at)
            if len(part):
                counts = (Counter(part.values(status_of(column))) for column in TEMPERATURES)
                words = (", ".join(f"{n} {name}" for name, n in c.most_common()) for c in counts)
                lines.append((optimizer.upper(), at, *words))
    title = "Statuses of the readings of λ̂"
    return kit.table(title, ("by", "where", *WORDS.values()), lines)


def epoch_line(rows: Rows, columns: Sequence[str]) -> tuple[str, ...]:
    """The epoch of a part of the runs, and the means of some columns there."""
    return f"{mean_of(rows.values('epoch')).value:.4g}", *kit.means(rows, *columns)


def curves(rows: Rows, x: str, column: str) -> tuple[Series, ...]:
    """The means of SGD and of NGD over seeds, over a column."""
    return kit.curves(by_optimizer(rows), column, x)


def over_epochs(title: str, rows: Rows, column: str, words: str, source: str) -> Chart:
    """A column of SGD and NGD over epochs."""
    return Chart(title, "epoch", words, curves(rows, "epoch", column), source=source)


def bars(title: str, rows: Rows, column: str, at: str, source: str) -> Chart:
    """SGD beside NGD, a pair of bars for each group."""
    groups = by_group(rows.where(at=at))
    series = []
    for optimizer in ("sgd", "ngd"):
        parts = [part.where(optimizer=optimizer) for part in groups.values()]
        series.append(kit.series_of(optimizer.upper(), list(groups), parts, column, "bars"))
    return Chart(title, "network and data", QUANTITIES[column], tuple(series), source=source)


def _beside_plots(charts: Callable[[Rows], Iterable[Chart]], rows: Rows) -> list[Chart]:
    """Charts of figures of the paper say why no curve of its own is in them."""
    return [
        replace(chart, caption=f"{chart.caption} {PLOTTED}".strip()) if chart.source else chart
        for chart in charts(rows)
    ]


def ngd_experiment(
    name: str,
    title: str,
    part: str,
    scales: Mapping[str, list[kit.Cell]],
    run: Callable[[kit.Cell, str], list[Row]],
    claims: Callable[[Rows], Iterable[Claim]],
    tables: Callable[[Rows], Iterable[Table]],
    charts: Callable[[Rows], Iterable[Chart]],
    notes: Iterable[str],
    size: str,
    sizes: tuple[kit.Size, ...] = (),
) -> kit.Experiment:
    """An experiment of the paper, its cells given for each scale; ``notes`` follow ASSUMED."""
    about, assumed = (name, title, kit.NGD, part), (*ASSUMED, *notes)
    plots = partial(_beside_plots, charts)
    return kit.Experiment(*about, scales, run, claims, tables, plots, assumed, size, sizes)
