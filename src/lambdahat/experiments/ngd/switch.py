"""SGD, then on with SGD or with NGD, at several rates (Figures 4 to 6 of the NGD paper).

The paper splits when the loss and λ̂ have settled (§3.3). Where SGD has not come so far, its claims
are not judged: ngd-switch-late splits Figures 5 and 6 later. At SGD's slow rate a minimum is far:
the gradient goes along flat directions, where much is still to be gained. What counts is rate ×
steps, about 50 for 4,096 images: 100,000 steps at 5·10⁻⁴. So SGD goes most of this way at a quicker
rate, and the rest at the slow one. That λ̂ "has stabilized" at the split is measured there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Size, Table
from lambdahat.experiments.ngd import ngd_claims as ngd
from lambdahat.experiments.ngd import ngd_runs as runs

FIGURES = {  # optimiser and factor of the rate after the split
    "4": (("sgd", 1), ("ngd", 1)),
    "5 and 6": (("sgd", 1), ("ngd", 1), ("ngd", 10), ("ngd", 100), ("sgd", 100)),
}
PLACE = ("optimizer", "at", "part", "diverged")  # what ``measure_along`` adds to a measured point
STEADY = 0.25  # part by which an update norm may differ from SGD's where it "changes little"
RISE = 0.1  # part by which λ̂ may grow where it "does not increase"
SETTLED = 0.1  # part by which λ̂ may change from the row "before" the split to it
QUARTER = 0.25  # the part of the quick epochs in which λ̂ is to have settled
SAME_RATE = kit.ClaimTexts("""
    rises: after the split λ̂ rises more by NGD than by SGD, {words} | Figure 4b | steadily
      increases, SGD slower
    norm: after the split the update norm of NGD stays within {steady:.0%} of that at the split
      (log-ratio) | Figure 4a | changes little after splitting | within
    beside: the update norm of NGD stays within {steady:.0%} of SGD's at the same epoch (log-ratio)
      | here | not compared | within | | ours
""")
RATES = kit.ClaimTexts("""
    NGD ×1: λ̂ of NGD at 100 times the rate is above that of NGD ×1, {words} | Figure 5 | plateaus at
      a higher value
    SGD ×1: λ̂ of NGD at 100 times the rate is above that of SGD ×1, {words} | Figure 5c | rises, SGD
      steady
    SGD ×100: λ̂ of NGD at 100 times the rate is above that of SGD ×100, {words} | §3.3 | due to the
      nature of NGD
    raised: λ̂ of SGD at 100 times the rate is not above SGD ×1's by {rise:.0%} (log-ratio), {words}
      | Figure 6b | does not increase | below
    equal: at equal training loss λ̂ of NGD ×100 is above that of SGD ×100, {words} | here | not
      compared | | | ours
    validation: the validation loss of SGD falls when its rate is raised (log-ratio to SGD ×1) |
      Figure 6 | decreases sharply | below
""")
LATE = kit.ClaimTexts("""
    steady: λ̂ of SGD that goes on at its rate stays within {rise:.0%} (log-ratio), {words} | Figure
      5 | remains steady | within
    alike: λ̂ of NGD at SGD's rate stays like SGD's, within {rise:.0%} (log-ratio), {words} | Figure
      5a | behave similarly | within
    tenfold: λ̂ of NGD at 10 times the rate is above that of NGD ×1, {words} | Figure 5b | increases
      faster
    hundredfold: λ̂ of NGD at 100 times the rate ends above that at the split, {words} | Figure 5c |
      rises
    training: the training loss of SGD falls when its rate is raised (log-ratio to SGD ×1) | §3.3 |
      decreases sharply | below
    norm: the update norm of SGD at a raised rate falls on the way (log-ratio of its last part to
      its first) | Figure 6a | steadily decreases | below
""")


def run(cell: Cell, device: str) -> list[Row]:
    """Rows at the split, along each branch, and of the two fastest at equal training loss."""
    subject = runs.subject_of(cell, device)
    before = runs.train_run(subject, "sgd", stage="before", epochs=cell["before"])
    return _after_split(subject, cell, before)


def late_run(cell: Cell, device: str) -> list[Row]:
    """The same, after a row at three quarters of the approach."""
    subject, approach = runs.subject_of(cell, device), cell["approach"]
    quick = runs.train_run(subject, "sgd", stage="approach", rate=cell["quick"], epochs=approach)
    slow = runs.train_run(subject, "sgd", quick.end.vector, "before", epochs=cell["before"])
    point = quick.at((1 - QUARTER) * approach)
    about = {"branch": "before", "optimizer": "sgd", "at": "before", "part": 0}
    epoch = point.epoch - approach - cell["before"]
    first = {**about, **runs.measure(subject, point), "epoch": epoch}
    return [first, *_after_split(subject, cell, slow)]


def _after_split(subject: runs.NgdSubject, cell: Cell, first: runs.Way) -> list[Row]:
    """The rows of branches that go on from the end of ``first``."""
    split, points, figure = first.end, cell["points"], FIGURES[cell["figure"]]
    about = {"optimizer": "sgd", "at": "split", "part": 0, "update_norm": first.update_norms[-1]}
    rows: list[Row] = [{"branch": "split", **about, **runs.measure(subject, split), "epoch": 0.0}]
    ways: dict[str, runs.Way] = {}
    ends: dict[str, Row] = {}
    for optimizer, factor in figure:
        name, rate = f"{optimizer.upper()} ×{factor}", cell["rate"] * factor
        way = ways[name] = runs.train_run(subject, optimizer, split.vector, "after", rate=rate)
        measured = runs.measure_along(subject, way, points)
        ends[name] = {key: value for key, value in measured[-1].items() if key not in PLACE}
        # the mean update norm of each part; a run that diverged has the last it reached
        edges = [len(way.update_norms) * part // points for part in range(points + 1)]
        cuts = [
            way.update_norms[start:end] or way.update_norms[-1:] for start, end in pairwise(edges)
        ]
        norms = [sum(cut) / len(cut) for cut in cuts]
        rows += [{"branch": name, **row, "update_norm": norms[row["part"] - 1]} for row in measured]
    pair = [f"{optimizer} ×{figure[-1][1]}" for optimizer in ("SGD", "NGD")]
    for name, point in zip(pair, runs.at_equal_loss([ways[name] for name in pair]), strict=True):
        equal = ends[name] if point is ways[name].end else runs.measure(subject, point)
        place = {"branch": name, "optimizer": ways[name].optimizer, "at": "equal loss"}
        rows.append({**place, **equal})
    return rows


def claims(rows: Rows) -> Iterator[Claim]:
    """λ̂ rises by NGD, not by longer steps (4); more by faster NGD, not by faster SGD (5, 6)."""
    for figure, part in rows.groups("figure"):
        yield from _same_rate(part) if figure == "4" else _rates(part)


def _same_rate(rows: Rows) -> Iterator[Claim]:
    end, split = _end_of(rows), rows.where(branch="split")
    both = {"the split": split, **dict(end.groups("branch"))}
    for column, words in runs.WORDS.items():
        reading = ngd.gap_of(end, column, branch=("NGD ×1", "SGD ×1"))
        yield SAME_RATE("rises", reading, words=words, unmet=ngd.unmet(both, column))
    reason, near = ngd.unmet({"the split": split}), math.log1p(STEADY)
    for key, other in (("norm", split), ("beside", end.where(branch="SGD ×1"))):
        reading = ngd.log_ratio(end.where(branch="NGD ×1"), other, "update_norm")
        yield SAME_RATE(key, reading, steady=STEADY, margin=near, unmet=reason)


def _rates(rows: Rows) -> Iterator[Claim]:
    """Figures 5 and 6: faster NGD rises more, faster SGD does not."""
    end, equal = _end_of(rows), rows.where(at="equal loss")
    raised, steady = end.where(branch="SGD ×100"), end.where(branch="SGD ×1")
    for column, words in runs.WORDS.items():
        for low in ("NGD ×1", "SGD ×1", "SGD ×100"):
            reading = ngd.gap_of(end, column, branch=("NGD ×100", low))
            reason = _untestable(rows, column, "NGD ×100", low)
            yield RATES(low, reading, words=words, unmet=reason)
        reading = ngd.log_ratio(raised, steady, column)
        reason = _untestable(rows, column, "SGD ×100", "SGD ×1")
        yield RATES("raised", reading, words=words, rise=RISE, bound=math.log1p(RISE), unmet=reason)
        reading = ngd.gap_of(equal, column, branch=("NGD ×100", "SGD ×100"))
        yield RATES("equal", reading, words=words, unmet=ngd.unmet(ngd.by_optimizer(equal), column))
    reading = ngd.log_ratio(raised, steady, "validation_loss")
    yield RATES("validation", reading, unmet=_untestable(rows))


def late_claims(rows: Rows) -> Iterator[Claim]:
    """Those of ``claims``, and: SGD is steady, NGD like it at its rate, and rises at others."""
    yield from _rates(rows)
    end, split = _end_of(rows), rows.where(branch="split")
    slow, natural, tenfold, fast = (
        end.where(branch=name) for name in ("SGD ×1", "NGD ×1", "NGD ×10", "NGD ×100")
    )
    within = {"rise": RISE, "margin": math.log1p(RISE)}
    for column, words in runs.WORDS.items():
        for key, reading, branches, settings in (
            ("steady", ngd.log_ratio(slow, split, column), ["SGD ×1"], within),
            ("alike", ngd.log_ratio(natural, slow, column), ["NGD ×1", "SGD ×1"], within),
            ("tenfold", kit.gap(tenfold, natural, column), ["NGD ×10", "NGD ×1"], {}),
            ("hundredfold", kit.gap(fast, split, column), ["NGD ×100"], {}),
        ):
            reason = _untestable(rows, column, *branches)
            yield LATE(key, reading, words=words, **settings, unmet=reason)
    raised, course = end.where(branch="SGD ×100"), rows.where(branch="SGD ×100", at="on the way")
    reason = _untestable(rows)
    yield LATE("training", ngd.log_ratio(raised, slow, "loss"), unmet=reason)
    reading = ngd.log_ratio(_end_of(course), course.where(part=1), "update_norm")
    yield LATE("norm", reading, unmet=reason)


def _untestable(rows: Rows, column: str = "", *branches: str) -> str:
    """Why a claim cannot be read off the split and the ends of these branches: no solutions, or
    λ̂ still changed before the split in half or more of the runs (SETTLED).
    """
    ends = {branch: _end_of(rows).where(branch=branch) for branch in branches}
    reason = ngd.unmet({"the split": rows.where(branch="split"), **ends}, column)
    if not column:
        return reason
    early, late = (rows.where(branch=branch).paired(column) for branch in ("before", "split"))
    known = [seed for seed in late if seed in early]
    moving = sum(not _near(late[seed], early[seed]) for seed in known)
    if known and 2 * moving >= len(known):
        change = f"λ̂ changed by more than {SETTLED:.0%} before the split"
        return "; ".join(filter(None, [reason, f"{change} in {moving} of {len(known)}"]))
    return reason


def _near(one: float, other: float) -> bool:
    return one > 0 and other > 0 and abs(math.log(one / other)) <= math.log1p(SETTLED)


def _end_of(rows: Rows) -> Rows:
    """The last rows of every branch."""
    return rows.where(part=max(rows.values("part"), default=0))


def tables(rows: Rows) -> Iterator[Table]:
    """The split and the end of every branch, and the statuses of λ̂."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace", "update_norm")
    parts = {}
    groups = ngd.by_group(rows, lambda row: f"{row['figure']}: {ngd.group_of(row)}")
    for figure, group in groups.items():
        for branch, part in group.groups("branch"):
            parts[figure, branch, "end"] = _end_of(part.where(at=["before", "split", "on the way"]))
            parts[figure, branch, "equal loss"] = part.where(at="equal loss")
    there = {place: part for place, part in parts.items() if len(part)}
    title = "From SGD to NGD, mean ± standard error over seeds"
    named = {column: ngd.HEADINGS[column] for column in columns}
    yield kit.means_table(title, "figure | branch | where", there, named)
    yield ngd.status_table(rows)


def charts(rows: Rows) -> Iterator[Chart]:
    """λ̂, update norm and validation loss of every branch over epochs after the split."""
    names = {**ngd.QUANTITIES, "update_norm": "update norm", "validation_loss": "validation loss"}
    for number, part in rows.groups("figure"):
        figure = f"Figures {number}" if " and " in number else f"Figure {number}"
        split, way = part.where(branch="split"), part.where(at="on the way")
        branches = [name for name in part.distinct("branch") if name not in ("before", "split")]
        for column in ("llc_batch", "llc", "update_norm", "validation_loss"):
            parts = {name: Rows([*split, *way.where(branch=name)]) for name in branches}
            series = kit.curves(parts, column)
            title = f"{ngd.TITLES[column]} after the split, {figure}"
            axes = "epoch after the split", names[column]
            yield Chart(title, *axes, series, source=figure)


def _cells(
    setting: Cell, data: dict[str, str], net: runs.Net, slow: float, seeds: int, **more: Any
) -> list[Cell]:
    """Figure × seed; the branches of a split are one cell. SGD comes to the split at ``slow``
    (Figures 5 and 6) or at the setting's rate (Figure 4).
    """
    cells = []
    for figure, name in data.items():
        rate = {"rate": slow} if figure == "5 and 6" else {}
        chosen = setting | {"data": name} | rate
        cells += runs.run_cells(chosen, [net], seeds, figure=figure, **more)
    return cells


_LOG_RATIOS = (
    "Changes after the split are log-ratios to SGD ×1 at the same epoch, which goes on training"
    " too."
)
_SHALLOW, _SMALL_NET, _NET = ("ffnn", 1, 8), ("ffnn", 2, 64), ("ffnn", 2, 256)
_BOTH = {"4": "fashion-mnist", "5 and 6": "mnist"}
_TINY_BOTH = {"4": "digits", "5 and 6": "digits"}
_SHORT, _SHORTER = runs.WHOLE | {"epochs": 30}, runs.WHOLE | {"epochs": 20}
_FEW_DRAWS = runs.SMALL | {"draws": 100, "burn_in": 100}

_SWITCH_NOTES = kit.sentences(f"""
    Figures 5 and 6 at cpu scale split from SGD at 5·10⁻⁴ in place of 10⁻⁴.
    The text does not say when the paper's runs split: here after 50 epochs (100 epochs of 4,096
      images at cpu scale).
    At that rate SGD has hardly trained at cpu scale when Figures 5 and 6 split; ngd-switch-late
      splits later.
    {_LOG_RATIOS}
    That the update norm changes little after the split is judged against the split, as the caption
      of Figure 4a says it. At first it was judged beside SGD, whose norm grows; that is now a claim
      of ours. The change came after the results.
    At paper scale only Figure 4 (ngd-switch-late has the others), only γ = 100, and 2 points per
      branch where 3 had been planned: reduced before the run to save time.
""")
SWITCH = ngd.ngd_experiment(
    "ngd-switch",
    "Switching from SGD to NGD raises λ̂",
    "§3.3, Figures 4–6",
    {
        "smoke": _cells(runs.TINY, _TINY_BOTH, _SHALLOW, 5e-4, 1, before=10, points=1),
        "cpu": _cells(runs.SMALL, _BOTH, _SMALL_NET, 5e-4, 4, before=100, points=3),
        "paper": _cells(_SHORT, {"4": _BOTH["4"]}, _NET, 1e-4, 5, before=50, points=2),
    },
    *(run, claims, tables, charts),
    (ngd.SMALLER, *_SWITCH_NOTES),
    "two hidden layers of 256; Figure 4: Fashion-MNIST, rates 0.01 and 0.01; Figures 5 and 6:"
    " MNIST, SGD at 10⁻⁴; split when loss and λ̂ have settled.",
    (
        Size("FFNN 2 × 256", "fashion-mnist", rate="0.01"),
        Size("FFNN 2 × 256", "mnist", rate="0.0001"),
    ),
)

_SWITCH_LATE_NOTES = kit.sentences(f"""
    SGD at cpu scale splits at 5·10⁻⁴ in place of 10⁻⁴, and ×100 is 0.05 in place of 0.01.
    The paper reaches the split at a single rate. Here SGD runs for 156 epochs of 4,096 images at
      0.01, which are worth 3,120 epochs at 5·10⁻⁴, and for 100 epochs at 5·10⁻⁴ (paper scale: 60
      epochs of 60,000 images at 0.01, worth 6,000 at 10⁻⁴, and 20 at 10⁻⁴).
    Claims about λ̂ are also not testable if in half or more of the runs λ̂ changed by more than
      {SETTLED:.0%} over the last quarter of the epochs at 0.01 and up to the split: the paper
      splits when it has stabilised.
    This experiment was written after ngd-switch had run; its settings were chosen with another
      seed, its claims and rules before it ran.
    {_LOG_RATIOS}
""")


def _late_cells(
    setting: Cell, data: str, net: runs.Net, slow: float, seeds: int, before: int, approach: int
) -> list[Cell]:
    """``approach`` epochs of SGD at 0.01, then ``before`` at ``slow``, then the branches."""
    more = {"before": before, "points": 2, "quick": 0.01, "approach": approach}
    return _cells(setting, {"5 and 6": data}, net, slow, seeds, **more)


SWITCH_LATE = ngd.ngd_experiment(
    "ngd-switch-late",
    "Switching from SGD to NGD once SGD has settled",
    "§3.3, Figures 5 and 6",
    {
        "smoke": _late_cells(runs.TINY, "digits", _SHALLOW, 5e-4, 1, 5, 20),
        "cpu": _late_cells(_FEW_DRAWS, "mnist", _SMALL_NET, 5e-4, 5, 100, 156),
        "paper": _late_cells(_SHORTER, "mnist", _NET, 1e-4, 5, 20, 60),
    },
    *(late_run, late_claims, tables, charts),
    (ngd.SMALLER, *_SWITCH_LATE_NOTES),
    "two hidden layers of 256 on MNIST, SGD at 10⁻⁴ until loss and λ̂ have settled, then NGD at"
    " 10⁻⁴, 10⁻³ and 10⁻², SGD at 10⁻².",
    (Size("FFNN 2 × 256", "mnist", rate="0.0001"),),
)
