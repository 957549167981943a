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
from dataclasses import dataclass, replace
from itertools import pairwise

from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, sentences
from lambdahat.experiments.ngd.epochs import along
from lambdahat.experiments.ngd.ngd_claims import (
    ASSUMED,
    HEADINGS,
    HERE,
    NAMES,
    QUANTITIES,
    SMALLER,
    TITLES,
    beside_plots,
    by_group,
    by_optimizer,
    by_run,
    curve,
    group_of,
    log_ratio,
    mean_gap,
    means,
    minima_table,
    unmet,
)
from lambdahat.experiments.ngd.ngd_runs import (
    SMALL,
    TINY,
    WHOLE,
    WORDS,
    Net,
    NgdSetting,
    NgdSubject,
    Way,
    at_equal_loss,
    measure,
    run_cells,
    subject_of,
    train_run,
)
from lambdahat.results.charts import Chart

FIGURES = {  # optimiser and factor of the rate after the split
    "4": (("sgd", 1), ("ngd", 1)),
    "5 and 6": (("sgd", 1), ("ngd", 1), ("ngd", 10), ("ngd", 100), ("sgd", 100)),
}
PLACE = ("optimizer", "at", "part", "diverged")  # what ``along`` adds to a measured point
STEADY = 0.25  # part by which an update norm may differ from SGD's where it "changes little"
RISE = 0.1  # part by which λ̂ may grow where it "does not increase"
SETTLED = 0.1  # part by which λ̂ may change from the row "before" the split to it
QUARTER = 0.25  # the part of the quick epochs in which λ̂ is to have settled


@dataclass(frozen=True)
class SwitchScale:
    """One scale: ``before`` epochs of SGD at ``slow`` (Figures 5 and 6) or at the setting's rate
    (Figure 4).
    """

    setting: NgdSetting
    data: tuple[tuple[str, str], ...]  # figure and data set
    net: Net
    slow: float
    before: int
    points: int
    seeds: int


@dataclass(frozen=True)
class SwitchLateScale(SwitchScale):
    """One scale: ``approach`` epochs of SGD at ``quick``, then ``before`` at ``slow``, then the
    branches.
    """

    quick: float
    approach: int


def cells(scale: SwitchScale) -> list[Cell]:
    """Figure × seed; the branches of a split are one cell."""
    out = []
    for figure, data in scale.data:
        rate = scale.slow if figure == "5 and 6" else scale.setting.rate
        more = {"figure": figure, "before": scale.before, "points": scale.points}
        setting = replace(scale.setting, rate=rate)
        out += run_cells(setting, [data], [scale.net], scale.seeds, **more)
    return out


def late_cells(scale: SwitchLateScale) -> list[Cell]:
    """The same, with the approach."""
    return [{**cell, "quick": scale.quick, "approach": scale.approach} for cell in cells(scale)]


def run(cell: Cell, device: str) -> list[Row]:
    """A row at the split, rows along each branch, and the two fastest branches at equal training
    loss.
    """
    subject = subject_of(cell, device)
    before = train_run(subject, "sgd", stage="before", epochs=cell["before"])
    return _after_split(subject, cell, before)


def late_run(cell: Cell, device: str) -> list[Row]:
    """The same, after a row at three quarters of the approach."""
    subject = subject_of(cell, device)
    quick = train_run(subject, "sgd", stage="approach", rate=cell["quick"], epochs=cell["approach"])
    slow = train_run(subject, "sgd", quick.end.vector, "before", epochs=cell["before"])
    point = quick.at((1 - QUARTER) * cell["approach"])
    about = {"branch": "before", "optimizer": "sgd", "at": "before", "part": 0}
    epoch = point.epoch - cell["approach"] - cell["before"]
    first = {**about, **measure(subject, point), "epoch": epoch}
    return [first, *_after_split(subject, cell, slow)]


def _after_split(subject: NgdSubject, cell: Cell, first: Way) -> list[Row]:
    """The rows of branches that go on from the end of ``first``."""
    split = first.end
    about = {"optimizer": "sgd", "at": "split", "part": 0, "update_norm": first.update_norms[-1]}
    rows: list[Row] = [{"branch": "split", **about, **measure(subject, split), "epoch": 0.0}]
    ways: dict[str, Way] = {}
    ends: dict[str, Row] = {}
    for optimizer, factor in FIGURES[cell["figure"]]:
        name = f"{NAMES[optimizer]} ×{factor}"
        ways[name] = train_run(
            subject, optimizer, split.vector, "after", rate=cell["rate"] * factor
        )
        found = along(subject, ways[name], cell["points"])
        ends[name] = {key: value for key, value in found[-1].items() if key not in PLACE}
        norms = _means(ways[name].update_norms, cell["points"])
        rows += [{"branch": name, **row, "update_norm": norms[row["part"] - 1]} for row in found]
    most = FIGURES[cell["figure"]][-1][1]
    pair = [f"{NAMES[optimizer]} ×{most}" for optimizer in ("sgd", "ngd")]
    for name, point in zip(pair, at_equal_loss([ways[name] for name in pair]), strict=True):
        equal = ends[name] if point is ways[name].end else measure(subject, point)
        place = {"branch": name, "optimizer": ways[name].optimizer, "at": "equal loss"}
        rows.append({**place, **equal})
    return rows


def _means(norms: tuple[float, ...], parts: int) -> list[float]:
    """The mean update norm in each of so many equal parts; a run that diverged has the last it
    reached.
    """
    edges = [len(norms) * part // parts for part in range(parts + 1)]
    cuts = [norms[first:last] for first, last in pairwise(edges)]
    return [sum(cut) / len(cut) if cut else norms[-1] for cut in cuts]


def claims(rows: Rows) -> Iterator[Claim]:
    """Figure 4: λ̂ rises by NGD, not by longer steps. Figures 5 and 6: faster NGD rises more,
    faster SGD does not.
    """
    for figure in rows.distinct("figure"):
        part = rows.where(figure=figure)
        yield from _same_rate(part) if figure == "4" else _rates(part)


def _same_rate(rows: Rows) -> Iterator[Claim]:
    end, split = _end_of(rows), rows.where(branch="split")
    both = {"the split": split, **by_group(end, lambda row: row["branch"])}
    for column, words in WORDS.items():
        sentence = f"after the split λ̂ rises more by NGD than by SGD, {words}"
        printed, reason = "steadily increases, SGD slower", unmet(both, column)
        reading = mean_gap(end, column, {"branch": "NGD ×1"}, {"branch": "SGD ×1"})
        yield Claim(sentence, "Figure 4b", printed, reading, unmet=reason)
    sentence = (
        f"the update norm of NGD stays within {STEADY:.0%} of SGD's at the same epoch (log-ratio)"
    )
    reading = log_ratio(end.where(branch="NGD ×1"), end.where(branch="SGD ×1"), "update_norm")
    bounds, reason = ("within", 0.0, math.log1p(STEADY)), unmet({"the split": split})
    yield Claim(sentence, "Figure 4a", "changes little", reading, *bounds, unmet=reason)


def _rates(rows: Rows) -> Iterator[Claim]:
    """Figures 5 and 6: faster NGD rises more, faster SGD does not."""
    end, equal = _end_of(rows), rows.where(at="equal loss")
    raised, steady = end.where(branch="SGD ×100"), end.where(branch="SGD ×1")
    for column, words in WORDS.items():
        for low, source, printed in (
            ("NGD ×1", "Figure 5", "plateaus at a higher value"),
            ("SGD ×1", "Figure 5c", "rises, SGD steady"),
            ("SGD ×100", "§3.3", "due to the nature of NGD"),
        ):
            sentence = f"λ̂ of NGD at 100 times the rate is above that of {low}, {words}"
            reading = mean_gap(end, column, {"branch": "NGD ×100"}, {"branch": low})
            reason = _untestable(rows, column, ("NGD ×100", low))
            yield Claim(sentence, source, printed, reading, unmet=reason)
        sentence = (
            f"λ̂ of SGD at 100 times the rate is not above SGD ×1's by {RISE:.0%} (log-ratio),"
            f" {words}"
        )
        reading, bounds = log_ratio(raised, steady, column), ("below", math.log1p(RISE))
        reason = _untestable(rows, column, ("SGD ×100", "SGD ×1"))
        yield Claim(sentence, "Figure 6b", "does not increase", reading, *bounds, unmet=reason)
        sentence = f"at equal training loss λ̂ of NGD ×100 is above that of SGD ×100, {words}"
        reading = mean_gap(equal, column, {"branch": "NGD ×100"}, {"branch": "SGD ×100"})
        reason = unmet(by_optimizer(equal), column)
        yield Claim(sentence, HERE, "not compared", reading, unmet=reason, own=True)
    sentence = "the validation loss of SGD falls when its rate is raised (log-ratio to SGD ×1)"
    reading, reason = log_ratio(raised, steady, "validation_loss"), _untestable(rows)
    yield Claim(sentence, "Figure 6", "decreases sharply", reading, "below", unmet=reason)


def late_claims(rows: Rows) -> Iterator[Claim]:
    """Those of Figures 5 and 6, and what else they show: SGD steady, NGD like it at its rate,
    rising at others.
    """
    yield from _rates(rows)
    end, split = _end_of(rows), rows.where(branch="split")
    slow, natural, fast = (end.where(branch=name) for name in ("SGD ×1", "NGD ×1", "NGD ×100"))
    bounds = "within", 0.0, math.log1p(RISE)
    for column, words in WORDS.items():
        tail = f"within {RISE:.0%} (log-ratio), {words}"
        sentence = f"λ̂ of SGD that goes on at its rate stays {tail}"
        reading, reason = log_ratio(slow, split, column), _untestable(rows, column, ("SGD ×1",))
        yield Claim(sentence, "Figure 5", "remains steady", reading, *bounds, unmet=reason)
        sentence = f"λ̂ of NGD at SGD's rate stays like SGD's, {tail}"
        reading = log_ratio(natural, slow, column)
        reason = _untestable(rows, column, ("NGD ×1", "SGD ×1"))
        yield Claim(sentence, "Figure 5a", "behave similarly", reading, *bounds, unmet=reason)
        sentence = f"λ̂ of NGD at 10 times the rate is above that of NGD ×1, {words}"
        reading = mean_gap(end, column, {"branch": "NGD ×10"}, {"branch": "NGD ×1"})
        reason = _untestable(rows, column, ("NGD ×10", "NGD ×1"))
        yield Claim(sentence, "Figure 5b", "increases faster", reading, unmet=reason)
        sentence = f"λ̂ of NGD at 100 times the rate ends above that at the split, {words}"
        both = Rows([*fast, *split])
        reading = mean_gap(both, column, {"branch": "NGD ×100"}, {"branch": "split"})
        reason = _untestable(rows, column, ("NGD ×100",))
        yield Claim(sentence, "Figure 5c", "rises", reading, unmet=reason)
    raised, course = end.where(branch="SGD ×100"), rows.where(branch="SGD ×100", at="on the way")
    sentence = "the training loss of SGD falls when its rate is raised (log-ratio to SGD ×1)"
    reading, reason = log_ratio(raised, slow, "loss"), _untestable(rows)
    yield Claim(sentence, "§3.3", "decreases sharply", reading, "below", unmet=reason)
    sentence = (
        "the update norm of SGD at a raised rate falls on the way (log-ratio of its last part"
        " to its first)"
    )
    reading = log_ratio(_end_of(course), course.where(part=1), "update_norm")
    yield Claim(sentence, "Figure 6a", "steadily decreases", reading, "below", unmet=reason)


def _untestable(rows: Rows, column: str = "", branches: tuple[str, ...] = ()) -> str:
    """Why a claim cannot be read off the split and the ends of these branches: no solutions, or
    λ̂ had not settled (SETTLED).
    """
    ends = {branch: _end_of(rows).where(branch=branch) for branch in branches}
    reason = unmet({"the split": rows.where(branch="split"), **ends}, column)
    return "; ".join(filter(None, (reason, _unsettled(rows, column) if column else "")))


def _unsettled(rows: Rows, column: str) -> str:
    """Why λ̂ has not settled at the split, where a row "before" it tells: it still changed in
    half or more of runs.
    """
    early, late = (by_run(rows.where(branch=branch), column) for branch in ("before", "split"))
    known = [key for key in late if key in early]
    moving = sum(not _near(late[key], early[key]) for key in known)
    if not known or 2 * moving < len(known):
        return ""
    return f"λ̂ changed by more than {SETTLED:.0%} before the split in {moving} of {len(known)}"


def _near(one: float, other: float) -> bool:
    return one > 0 and other > 0 and abs(math.log(one / other)) <= math.log1p(SETTLED)


def _end_of(rows: Rows) -> Rows:
    """The last rows of every branch."""
    return rows.where(part=max(rows.values("part"), default=0))


def tables(rows: Rows) -> Iterator[Table]:
    """The split and the end of every branch, and where no minimum was."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace", "update_norm")
    lines = []
    for figure, group in by_group(rows, lambda row: f"{row['figure']}: {group_of(row)}").items():
        for branch in group.distinct("branch"):
            part = group.where(branch=branch)
            end = _end_of(part.where(at=["before", "split", "on the way"]))
            for at, here in (("end", end), ("equal loss", part.where(at="equal loss"))):
                if len(here):
                    lines.append((figure, branch, at, *means(here, columns)))
    header = ("figure", "branch", "where", *(HEADINGS[column] for column in columns))
    yield Table("From SGD to NGD, mean ± standard error over seeds", header, tuple(lines))
    yield minima_table(rows)


def charts(rows: Rows) -> list[Chart]:
    """λ̂, update norm and validation loss of every branch over epochs after the split."""
    names = {**QUANTITIES, "update_norm": "update norm", "validation_loss": "validation loss"}
    out = []
    for number, part in by_group(rows, lambda row: row["figure"]).items():
        figure = f"Figures {number}" if " and " in number else f"Figure {number}"
        split, way = part.where(branch="split"), part.where(at="on the way")
        for column in ("llc_batch", "llc", "update_norm", "validation_loss"):
            series = tuple(
                curve(branch, Rows([*split, *way.where(branch=branch)]), "epoch", column)
                for branch in part.distinct("branch")
                if branch not in ("before", "split")
            )
            title = f"{TITLES[column]} after the split, {figure}"
            axes = "epoch after the split", names[column]
            out.append(Chart(title, *axes, series, source=figure))
    return beside_plots(out)


_BOTH = ("4", "fashion-mnist"), ("5 and 6", "mnist")
_TINY_BOTH = ("4", "digits"), ("5 and 6", "digits")
_LOG_RATIOS = (
    "Changes after the split are log-ratios to SGD ×1 at the same epoch, which goes on training"
    " too."
)

_SWITCH_NOTES = sentences(f"""
    Figures 5 and 6 at cpu scale split from SGD at 5·10⁻⁴ in place of 10⁻⁴.
    When the paper's runs split is not in the text: here after 50 epochs (100 of 4,096 images at
      cpu scale).
    At that rate SGD at cpu scale has hardly trained when Figures 5 and 6 split: ngd-switch-late
      splits later.
    {_LOG_RATIOS}
    At paper scale Figure 4 alone (ngd-switch-late has the others), γ = 100 alone, and 2 points
      of a branch, where 3 had been planned: cut before the run to save time.
""")
SWITCH = Experiment(
    "ngd-switch",
    "Switching from SGD to NGD raises λ̂",
    NGD,
    "§3.3, Figures 4–6",
    {
        "smoke": SwitchScale(TINY, _TINY_BOTH, ("ffnn", 1, 8), 5e-4, 10, 1, 1),
        "cpu": SwitchScale(SMALL, _BOTH, ("ffnn", 2, 64), 5e-4, 100, 3, 4),
        "paper": SwitchScale(
            replace(WHOLE, epochs=30), _BOTH[:1], ("ffnn", 2, 256), 1e-4, 50, 2, 5
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (*ASSUMED, SMALLER, *_SWITCH_NOTES),
    "two hidden layers of 256; Figure 4: Fashion-MNIST, rates 0.01 and 0.01; Figures 5 and 6:"
    " MNIST, SGD at 10⁻⁴; split when loss and λ̂ have settled.",
    (
        Size("FFNN 2 × 256", "fashion-mnist", rate="0.01"),
        Size("FFNN 2 × 256", "mnist", rate="0.0001"),
    ),
)

_SWITCH_LATE_NOTES = sentences(f"""
    SGD at cpu scale splits at 5·10⁻⁴ in place of 10⁻⁴, and ×100 is 0.05 in place of 0.01.
    The paper comes to the split at one rate. Here SGD takes 156 epochs of 4,096 images at 0.01,
      which go as far as 3,120 at 5·10⁻⁴, and 100 at 5·10⁻⁴ (paper scale: 60 of 60,000 at 0.01,
      as far as 6,000 at 10⁻⁴, and 20).
    Nor is what is said of λ̂ testable where in half or more of the runs it changed by more than
      {SETTLED:.0%} in the last quarter of the epochs at 0.01 and on to the split: the paper
      splits when it has stabilized.
    Written after ngd-switch had run; settings were chosen by runs of another seed, claims and
      rules before it ran.
    {_LOG_RATIOS}
""")
SWITCH_LATE = Experiment(
    "ngd-switch-late",
    "Switching from SGD to NGD once SGD has settled",
    NGD,
    "§3.3, Figures 5 and 6",
    {
        "smoke": SwitchLateScale(TINY, _TINY_BOTH[1:], ("ffnn", 1, 8), 5e-4, 5, 2, 1, 0.01, 20),
        "cpu": SwitchLateScale(
            replace(SMALL, draws=100, burn_in=100),
            _BOTH[1:],
            ("ffnn", 2, 64),
            5e-4,
            100,
            2,
            5,
            0.01,
            156,
        ),
        "paper": SwitchLateScale(
            replace(WHOLE, epochs=20), _BOTH[1:], ("ffnn", 2, 256), 1e-4, 20, 2, 5, 0.01, 60
        ),
    },
    late_cells,
    late_run,
    late_claims,
    tables,
    charts,
    (*ASSUMED, SMALLER, *_SWITCH_LATE_NOTES),
    "two hidden layers of 256 on MNIST, SGD at 10⁻⁴ until loss and λ̂ have settled, then NGD at"
    " 10⁻⁴, 10⁻³ and 10⁻², SGD at 10⁻².",
    (Size("FFNN 2 × 256", "mnist", rate="0.0001"),),
)
