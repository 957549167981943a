"""SGD, then on with SGD or with NGD, at several rates (Figures 4 to 6 of the NGD paper).

The paper splits when the loss and λ̂ have settled (§3.3). Where SGD has not come so far, its claims
are not judged: ``switch_late`` splits Figures 5 and 6 later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, Table, mean_of
from lambdahat.experiments.kit.experiment import NGD, Experiment, Size, notes
from lambdahat.experiments.ngd.claims import (
    ASSUMED,
    HERE,
    NAMES,
    QUANTITIES,
    SMALLER,
    TITLES,
    beside_plots,
    by_optimizer,
    curve,
    group_of,
    grouped,
    keyed,
    log_ratio,
    minima_table,
    paired,
)
from lambdahat.experiments.ngd.epochs import along
from lambdahat.experiments.ngd.measuring import WORDS, measured
from lambdahat.experiments.ngd.preconditions import unmet
from lambdahat.experiments.ngd.training import (
    Net,
    Setting,
    Subject,
    Way,
    at_equal_loss,
    grid,
    subject_of,
    trained,
)
from lambdahat.experiments.ngd.vs_sgd import SMALL, TINY, WHOLE
from lambdahat.results.charts import Chart

FIGURES = {  # optimiser and factor of the rate after the split
    "4": (("sgd", 1), ("ngd", 1)),
    "5 and 6": (("sgd", 1), ("ngd", 1), ("ngd", 10), ("ngd", 100), ("sgd", 100)),
}
PLACE = ("optimizer", "at", "part", "diverged")  # what ``along`` adds to a measured point
STEADY = 0.25  # part by which an update norm may differ from SGD's where it "changes little"
RISE = 0.1  # part by which λ̂ may grow where it "does not increase"
SETTLED = 0.1  # part by which λ̂ may change from the row "before" the split to it


@dataclass(frozen=True)
class SwitchScale:
    """One scale: ``before`` epochs of SGD at ``slow`` (Figures 5 and 6) or at the setting's rate
    (Figure 4).
    """

    setting: Setting
    data: tuple[tuple[str, str], ...]  # figure and data set
    net: Net
    slow: float
    before: int
    points: int
    seeds: int


def cells(config: SwitchScale) -> list[Cell]:
    """Figure × seed; the branches of a split are one cell."""
    found = []
    for figure, data in config.data:
        rate = config.slow if figure == "5 and 6" else config.setting.rate
        base = grid(replace(config.setting, rate=rate), [data], [config.net], config.seeds)
        found += [
            {**cell, "figure": figure, "before": config.before, "points": config.points}
            for cell in base
        ]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """A row at the split, rows along each branch, and the two fastest branches at equal training
    loss.
    """
    subject = subject_of(cell, device)
    return after_split(
        subject, cell, trained(subject, "sgd", stage="before", epochs=cell["before"])
    )


def after_split(subject: Subject, cell: Cell, first: Way) -> list[Row]:
    """The rows of ``run``, of branches that go on from the end of ``first``."""
    split = first.end
    about = {"optimizer": "sgd", "at": "split", "part": 0, "update_norm": first.update_norms[-1]}
    rows: list[Row] = [{"branch": "split", **about, **measured(subject, split), "epoch": 0.0}]
    ways: dict[str, Way] = {}
    ends: dict[str, Row] = {}
    for optimizer, factor in FIGURES[cell["figure"]]:
        name = f"{NAMES[optimizer]} ×{factor}"
        ways[name] = trained(subject, optimizer, split.vector, "after", rate=cell["rate"] * factor)
        found = along(subject, ways[name], cell["points"])
        ends[name] = {key: value for key, value in found[-1].items() if key not in PLACE}
        norms = _means(ways[name].update_norms, cell["points"])
        rows += [{"branch": name, **row, "update_norm": norms[row["part"] - 1]} for row in found]
    most = FIGURES[cell["figure"]][-1][1]
    pair = [f"{NAMES[optimizer]} ×{most}" for optimizer in ("sgd", "ngd")]
    for name, point in zip(pair, at_equal_loss([ways[name] for name in pair]), strict=True):
        equal = ends[name] if point is ways[name].end else measured(subject, point)
        rows.append(
            {"branch": name, "optimizer": ways[name].optimizer, "at": "equal loss", **equal}
        )
    return rows


def _means(norms: tuple[float, ...], parts: int) -> list[float]:
    """The mean update norm in each of so many equal parts; a run that diverged has the last it
    reached.
    """
    cuts = [
        norms[len(norms) * part // parts : len(norms) * (part + 1) // parts]
        for part in range(parts)
    ]
    return [sum(cut) / len(cut) if cut else norms[-1] for cut in cuts]


def claims(rows: Rows) -> list[Claim]:
    """Figure 4: λ̂ rises by NGD, not by longer steps. Figures 5 and 6: faster NGD rises more,
    faster SGD does not.
    """
    makers = {"4": _same_rate, "5 and 6": rates}
    return [
        claim
        for figure in rows.distinct("figure")
        for claim in makers[figure](rows.where(figure=figure))
    ]


def _same_rate(rows: Rows) -> Iterator[Claim]:
    end, split = end_of(rows), rows.where(branch="split")
    both = {"the split": split, **grouped(end, lambda row: row["branch"])}
    for column, words in WORDS.items():
        gap = paired(end, column, {"branch": "NGD ×1"}, {"branch": "SGD ×1"})
        sentence = f"after the split λ̂ rises more by NGD than by SGD, {words}"
        printed = "steadily increases, SGD slower"
        yield Claim(sentence, "Figure 4b", printed, gap, unmet=unmet(both, column))
    norms = log_ratio(end.where(branch="NGD ×1"), end.where(branch="SGD ×1"), "update_norm")
    sentence = (
        f"the update norm of NGD stays within {STEADY:.0%} of SGD's at the same epoch (log-ratio)"
    )
    printed = "changes little"
    reason = unmet({"the split": split})
    yield Claim(
        sentence, "Figure 4a", printed, norms, "within", 0.0, math.log1p(STEADY), unmet=reason
    )


def rates(rows: Rows) -> Iterator[Claim]:
    """Figures 5 and 6: faster NGD rises more, faster SGD does not."""
    end, equal = end_of(rows), rows.where(at="equal loss")
    raised, steady = end.where(branch="SGD ×100"), end.where(branch="SGD ×1")
    for column, words in WORDS.items():
        for low, source, said in (
            ("NGD ×1", "Figure 5", "plateaus at a higher value"),
            ("SGD ×1", "Figure 5c", "rises, SGD steady"),
            ("SGD ×100", "§3.3", "due to the nature of NGD"),
        ):
            gap = paired(end, column, {"branch": "NGD ×100"}, {"branch": low})
            sentence = f"λ̂ of NGD at 100 times the rate is above that of {low}, {words}"
            reason = untestable(rows, column, ("NGD ×100", low))
            yield Claim(sentence, source, said, gap, unmet=reason)
        grown = log_ratio(raised, steady, column)
        sentence = (
            f"λ̂ of SGD at 100 times the rate is not above SGD ×1's by {RISE:.0%} (log-ratio),"
            f" {words}"
        )
        printed = "does not increase"
        reason = untestable(rows, column, ("SGD ×100", "SGD ×1"))
        yield Claim(sentence, "Figure 6b", printed, grown, "below", math.log1p(RISE), unmet=reason)
        level = paired(equal, column, {"branch": "NGD ×100"}, {"branch": "SGD ×100"})
        sentence = f"at equal training loss λ̂ of NGD ×100 is above that of SGD ×100, {words}"
        reason = unmet(by_optimizer(equal), column)
        yield Claim(sentence, HERE, "not compared", level, unmet=reason, own=True)
    fall = log_ratio(raised, steady, "validation_loss")
    sentence = "the validation loss of SGD falls when its rate is raised (log-ratio to SGD ×1)"
    yield Claim(sentence, "Figure 6", "decreases sharply", fall, "below", unmet=untestable(rows))


def untestable(rows: Rows, column: str = "", branches: tuple[str, ...] = ()) -> str:
    """Why a claim cannot be read off the split and the ends of these branches
    (``preconditions.RULE``, SETTLED).
    """
    groups = {"the split": rows.where(branch="split")}
    reason = unmet(
        groups | {branch: end_of(rows).where(branch=branch) for branch in branches}, column
    )
    return "; ".join(filter(None, (reason, _unsettled(rows, column) if column else "")))


def _unsettled(rows: Rows, column: str) -> str:
    """Why λ̂ has not settled at the split, where a row "before" it tells: it still changed in
    half or more of runs.
    """
    early, late = (keyed(rows.where(branch=branch), column) for branch in ("before", "split"))
    known = [key for key in late if key in early]
    moving = sum(not _near(late[key], early[key]) for key in known)
    if not known or 2 * moving < len(known):
        return ""
    return f"λ̂ changed by more than {SETTLED:.0%} before the split in {moving} of {len(known)}"


def _near(one: float, other: float) -> bool:
    return one > 0 and other > 0 and abs(math.log(one / other)) <= math.log1p(SETTLED)


def end_of(rows: Rows) -> Rows:
    """The last rows of every branch."""
    return rows.where(part=max(rows.values("part"), default=0))


def tables(rows: Rows) -> Iterator[Table]:
    """The split and the end of every branch, and where no minimum was."""
    columns = ("loss", "validation_loss", "llc_batch", "llc", "trace", "update_norm")
    lines = []
    for figure, group in grouped(rows, lambda row: f"{row['figure']}: {group_of(row)}").items():
        for branch in group.distinct("branch"):
            part = group.where(branch=branch)
            for at, here in (
                ("end", end_of(part.where(at=["before", "split", "on the way"]))),
                ("equal loss", part.where(at="equal loss")),
            ):
                if len(here):
                    lines.append(
                        (
                            figure,
                            branch,
                            at,
                            *(str(mean_of(here.values(column))) for column in columns),
                        )
                    )
    header = (
        "figure",
        "branch",
        "where",
        "training loss",
        "validation loss",
        "λ̂ (B/ln B)",
        "λ̂ (n/ln n)",
        "Tr H",
        "update norm",
    )
    yield Table("From SGD to NGD, mean ± standard error over seeds", header, tuple(lines))
    yield minima_table(rows)


def charts(rows: Rows) -> list[Chart]:
    """λ̂, update norm and validation loss of every branch over epochs after the split."""
    names = {**QUANTITIES, "update_norm": "update norm", "validation_loss": "validation loss"}
    out = []
    for number, part in grouped(rows, lambda row: row["figure"]).items():
        figure = f"Figures {number}" if " and " in number else f"Figure {number}"
        for column in ("llc_batch", "llc", "update_norm", "validation_loss"):
            split = part.where(branch="split")
            series = tuple(
                curve(
                    branch,
                    Rows([*split, *part.where(branch=branch, at="on the way")]),
                    "epoch",
                    column,
                )
                for branch in part.distinct("branch")
                if branch not in ("before", "split")
            )
            out.append(
                Chart(
                    f"{TITLES[column]} after the split, {figure}",
                    "epoch after the split",
                    names[column],
                    series,
                    source=figure,
                )
            )
    return beside_plots(out)


EXPERIMENT = Experiment(
    "ngd-switch",
    "Switching from SGD to NGD raises λ̂",
    NGD,
    "§3.3, Figures 4–6",
    {
        "smoke": SwitchScale(
            TINY, (("4", "digits"), ("5 and 6", "digits")), ("ffnn", 1, 8), 5e-4, 10, 1, 1
        ),
        "cpu": SwitchScale(
            SMALL, (("4", "fashion-mnist"), ("5 and 6", "mnist")), ("ffnn", 2, 64), 5e-4, 100, 3, 4
        ),
        "paper": SwitchScale(
            replace(WHOLE, epochs=30), (("4", "fashion-mnist"),), ("ffnn", 2, 256), 1e-4, 50, 2, 5
        ),
    },
    cells,
    run,
    claims,
    tables,
    charts,
    (
        *ASSUMED,
        SMALLER,
        *notes("""
            Figures 5 and 6 at cpu scale split from SGD at 5·10⁻⁴ in place of 10⁻⁴.
            When the paper's runs split is not in the text: here after 50 epochs (100 of 4,096
              images at cpu scale).
            At that rate SGD at cpu scale has hardly trained when Figures 5 and 6 split:
              ngd-switch-late splits later.
            Changes after the split are log-ratios to SGD ×1 at the same epoch, which goes on
              training too.
            At paper scale Figure 4 alone (ngd-switch-late has the others), γ = 100 alone, and 2
              points of a branch, where 3 had been planned: cut before the run to save time.
        """),
    ),
    size=(
        "two hidden layers of 256; Figure 4: Fashion-MNIST, rates 0.01 and 0.01; Figures 5 and 6:"
        " MNIST, SGD at 10⁻⁴; split when loss and λ̂ have settled."
    ),
    sizes=(
        Size("FFNN 2 × 256", "fashion-mnist", rate="0.01"),
        Size("FFNN 2 × 256", "mnist", rate="0.0001"),
    ),
)
