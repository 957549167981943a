"""How much of the Hessian is zero while a network trains, beside the rank bound (Figures 1, 11–14,
flatness paper).

§5.9 of the spectral thesis has the same figures, 5.17 to 5.20, and the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import nn

from lambdahat.estimators import rank_bound, spectrum
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, Chart, Claim, Row, Rows, Table, short, training
from lambdahat.operators.base import LinearOperator
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.problem import Problem

CURVATURES: dict[str, Callable[[Problem], LinearOperator]] = {"hessian": hessian, "ggn": ggn}
WORDS = {"hessian": "Hessian", "ggn": "Gauss–Newton matrix"}
DECAY = 5e-4
PROXY_MARGIN = 0.05
THESIS = "spectral thesis §5.9.1"
PRECISION = -6.0  # log₁₀ of |Ritz value at the origin|/λ₁: float32 ends near −7


def subject(
    network: str,
    data: str,
    training: int,
    side: int = 0,
    exact: bool = False,
    samples: int = 3000,
    points: int = 4,
) -> Cell:
    """A network, its data and the side of its images; curvature over ``samples`` of them.

    It is taken at the start and at ``points`` of the training. If ``exact``, the network learns
    even or odd, and the rank itself is computed too.
    """
    where = {"network": network, "data": data, "training": training, "side": side}
    return {**where, "exact": exact, "parity": exact, "samples": samples, "points": points}


def cells(subjects: Iterable[Cell], epochs: int, seeds: int, depth: int = 100) -> list[Cell]:
    """Subject × seed."""
    base = {"epochs": epochs, "depth": depth, "held_out": 200, "rate": 0.03, "batch": 128}
    return kit.grid(base, subject=subjects, seed=range(seeds))


def run(cell: Cell, device: str) -> list[Row]:
    """Rows at the start and along the training, for each curvature and mode of the batch norm."""
    model, data = training.model_and_images(cell, device)
    modes = training.modes_of(model)
    problems = {mode: training.curvature_problem(model, data, cell, mode) for mode in modes}
    bound = claimed_bound(problems["eval"], model, math.prod(data.shape), data.classes)

    def look() -> Row:
        readings = [
            {"mode": mode, "curvature": name, **_reading(problem, name, cell)}
            for mode, problem in problems.items()
            for name in CURVATURES
        ]
        return {"readings": readings}

    watch = training.Watch(look, max(1, cell["epochs"] // cell["points"]))
    watch.measure(problems["eval"])
    training.train_by_sgd(model, data, cell, DECAY, [watch])
    accuracy, last = training.loss_and_accuracy(model, data.held_out)[1], watch.rows[-1]["epoch"]
    size = problems["eval"].num_parameters
    common = {"bound": bound, "parameters": size, "final accuracy": accuracy}
    return [
        {**common, "epoch": row["epoch"], "last": row["epoch"] == last, **reading}
        for row in watch.rows
        for reading in row["readings"]
    ]


def claimed_bound(problem: Problem, model: nn.Module, inputs: int, classes: int) -> int | None:
    """4·d_y·(ΣN_l + d_x), channels counted as neurons as for VGG-16; None with shortcuts."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not isinstance(model, nn.Sequential) or any(list(part.children()) for part in model):
        return None
    if all(isinstance(layer, nn.Linear) for layer in layers):
        return rank_bound(problem).bound
    # of both kinds of layers the weight has the shape (outputs, …)
    return 4 * classes * (sum(len(layer.weight) for layer in layers) + inputs)


def _reading(problem: Problem, name: str, cell: Cell) -> Row:
    """The paper's degeneracy from Ritz values, and for small networks the rank itself."""
    curvature = CURVATURES[name](problem)
    shape = spectrum(curvature, depth=min(cell["depth"], problem.num_parameters), seed=cell["seed"])
    # the weighted mean of the Ritz values that stand for 0, relative to λ₁
    nearest = np.argsort(np.abs(shape.nodes[0]))[: 1 if shape.psd else 2]
    weights = shape.weights[0][nearest]
    total = max(weights.sum(), np.finfo(float).tiny)
    zero = abs(float((shape.nodes[0][nearest] * weights).sum() / total))
    row: Row = {
        "degeneracy": float(shape.degeneracy()),
        "degeneracy stderr": float(shape.degeneracy().stderr),
        "one node": float(shape.degeneracy(merge=1)),
        "origin": zero / float(shape.nodes.max()),
        "largest": float(shape.extremes[1]),
        "nodes": short(shape.nodes[0]),
        "weights": short(shape.weights[0]),
    }
    if cell["exact"]:
        model = problem.model
        assert model is not None
        x, y = (torch.cat([batch.data[i] for batch in problem.batches]) for i in range(2))
        double = Problem(model, "cross_entropy", (x.double(), y), dtype=torch.float64)
        row["rank"] = exact_rank(CURVATURES[name](double))
        row["zeros"] = 1 - row["rank"] / problem.num_parameters
    return row


def exact_rank(curvature: LinearOperator) -> int:
    """The number of eigenvalues above P·ε·|λ|_max, from the dense matrix in float64."""
    sizes = torch.linalg.eigvalsh(curvature.dense().double()).abs()
    return int((sizes > len(sizes) * torch.finfo(torch.float64).eps * sizes.max()).sum())


def claims(rows: Rows) -> Iterator[Claim]:
    """Ranks and shares of zeros against the bound; what Ritz values show of them, in H and GGN.

    Where the paper's own networks have run, what it says of their Ritz values is asked of no other.
    """
    own = {*LARGE} & {*rows.distinct("network")}
    for name, part in rows.groups("network"):
        exact, what = part.where(exact=True), kit.subject(part)
        if exact:
            yield from _exact_claims(what, exact)
        if own and name not in own:
            continue
        for mode, end in part.where(last=True).groups("mode"):
            tail = f" (batch norm in {mode} mode)" if mode == "train" else ""
            yield from _end_claims(what, end, tail)


def _exact_claims(name: str, rows: Rows) -> Iterator[Claim]:
    """The Hessian's rank over the bound, at the start and the end; its zeros by Ritz values."""
    text = f"""
        rank: {name}: the Hessian's rank is at most the bound {{when}} (largest rank/bound)
          | §3.2; spectral thesis §5.9.4 | at most 1 | below 1
        zeros: {name}: the Ritz values at the origin hold the share of zeros of the {{matrix}}
          (difference) | Appendix D | 0 | within {PROXY_MARGIN:g} of 0
    """
    claim = kit.ClaimTexts(text, general=True)
    for when, place in (("at the start", {"epoch": 0}), ("after training", {"last": True})):
        # a bound falls with one rank above it
        part = rows.where(curvature="hessian", **place)
        worst = kit.Reading(max(row["rank"] / row["bound"] for row in part), 0.0)
        yield claim("rank", worst, when=when)
    for curvature, words in WORDS.items():
        end = rows.where(curvature=curvature, last=True)
        apart = kit.mean_of([row["degeneracy"] - row["zeros"] for row in end])
        yield claim("zeros", apart, matrix=words)


def _end_claims(name: str, rows: Rows, tail: str) -> Iterator[Claim]:
    """Zeros beyond what the bound leaves, and how near 0 the Ritz values at the origin lie."""
    matrix, thesis = WORDS["ggn"], THESIS
    claim = kit.ClaimTexts(f"""
        exceeds: {name}: the degeneracy of the {{words}} exceeds what the bound implies{tail}
          | §3.2, Figure 1d | 0.9639 for VGG-16, largely respected
        near: {name}: the {matrix}'s Ritz value at the origin is 0 to float32 (log₁₀ of its
          share of λ₁){tail} | Figures 12b and 13; {thesis}, Figures 5.18b and 5.19
          | near the precision of the GPU (VGG-16 and PreResNet-110, CIFAR-100)
          | below {PRECISION:g}
        hold: {name}: two Ritz values of the Hessian hold more at the origin than one of the
          {matrix}{tail} | Appendix D.1; {thesis}, Figures 5.18a and c
          | even larger (VGG-16, CIFAR-100)
        less near: {name}: the Hessian's Ritz values at the origin lie less near 0 than that of the
          {matrix}{tail} | Appendix D.1; {thesis}, Figures 5.18b and d
          | not as close (VGG-16, CIFAR-100) | above | decades
    """)
    for curvature, words in WORDS.items():
        part = rows.where(curvature=curvature)
        if part.values("bound"):
            above = kit.mean_of([row["degeneracy"] - implied_share(row) for row in part])
            yield claim("exceeds", above, words=words)
    whole, part = rows.where(curvature="hessian"), rows.where(curvature="ggn")
    near = kit.mean_of([math.log10(max(row["origin"], 1e-30)) for row in part])
    yield claim("near", near)
    yield claim("hold", kit.gap(whole, part, "degeneracy"))
    yield claim("less near", kit.decades(whole, part, "origin"))


def implied_share(row: Row) -> float:
    """The least share of zeros that the bound leaves, max(0, 1 − bound/P)."""
    return max(0.0, 1 - float(row["bound"]) / float(row["parameters"]))


def tables(rows: Rows) -> Iterator[Table]:
    """Each network at the start and the end: degeneracy by Ritz values, exactly, by the bound."""
    header = "matrix | mode | epoch | degeneracy | one Ritz value | its ratio to λ₁ | exact"
    for name, part in rows.groups("network"):
        lines = []
        for curvature, words in WORDS.items():
            for mode in part.distinct("mode"):
                for epoch in (0, max(part.values("epoch"))):
                    chosen = part.where(curvature=curvature, mode=mode, epoch=epoch)
                    shown = kit.means(chosen, "degeneracy", "one node", "origin", "zeros")
                    shown[-1] = shown[-1] if chosen.values("zeros") else "not computed"
                    lines.append((words, mode, str(epoch), *shown))
        count, bounds = part[0]["parameters"], part.values("bound")
        claimed = "no bound is claimed"
        if bounds:
            claimed = f"the bound {bounds[0]:,} implies {implied_share(part[0]):.4f}"
        title = f"{name}, {count:,} parameters; {claimed}"
        yield kit.table(title, header, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Degeneracy over epochs with the bound as a line, and the last spectra of the first seed."""
    for name, part in rows.groups("network"):
        series = []
        for curvature, words in WORDS.items():
            for mode, chosen in part.where(curvature=curvature).groups("mode"):
                tail = ", train mode" if mode == "train" else ""
                series.append(kit.curve(words + tail, chosen, "degeneracy"))
                if chosen.values("zeros"):
                    series.append(kit.curve(f"{words}, exact", chosen, "zeros"))
        lines = (("implied by the bound", implied_share(part[0])),) if part.values("bound") else ()
        axes = "epoch", "share of eigenvalues at 0"
        source = "Figures 1d, 11–14; 5.17–5.20 of the spectral thesis"
        yield Chart(f"Degeneracy, {name}", *axes, tuple(series), lines=lines, source=source)
        end = part.where(last=True, seed=0, mode="eval")
        named = [{**row, "words": WORDS[row["curvature"]]} for row in end]
        yield kit.spectra(f"Spectra at the end, {name}", named, "{words}", "Figure 1")


PARITY = {"MLP-24": 8, "MLP-20-20": 4}
LARGE = ("VGG-16", "PreResNet-110")
BFLOAT16 = {"precision": "bfloat16"}
TINY = subject("MLP-14-14", "digits", 700, side=4, exact=True, samples=700, points=1)
SMALL = [subject(name, "mnist", 3000, side, exact=True) for name, side in PARITY.items()]
FEWER, WHOLE = (subject("MLP-100", "mnist", count) for count in (10_000, 45_000))
OURS = [subject(name, "cifar100", 45_000, samples=512, points=1) | BFLOAT16 for name in LARGE]
FIRST = cells([*SMALL, WHOLE, *OURS], epochs=30, seeds=3)
EXPERIMENT = kit.Experiment(
    "rank-degeneracy",
    "How much of the Hessian is zero, beside the rank bound",
    kit.FLATNESS,
    "§3.2, Figures 1 and 11–14; §5.9 and Figures 5.17–5.20 of the spectral thesis",
    {
        "smoke": cells([TINY], epochs=4, seeds=2, depth=30),
        "cpu": cells([*SMALL, FEWER], epochs=20, seeds=4),
        "paper": [*FIRST, *kit.more_seeds(FIRST, range(3, 6), network=["VGG-16"])],
    },
    *(run, claims, tables, charts),
    kit.sentences("""
        VGG-16 and PreResNet-110 on CIFAR-100: 30 epochs of the paper's 225 and 300, weight decay
          5e-4, 512 images; on a GPU they train in bfloat16, and curvature is in float32.
        Three seeds of VGG-16 left it undecided whether two Ritz values hold more; six are planned.
        For perceptrons only ranks are judged if one of these networks has run.
        Exact ranks: even or odd digits, with more images than parameters and a bound well below
          both.
        A rank counts the eigenvalues of the dense matrix in float64 above P·ε·|λ|_max.
        The bound counts channels as neurons, as the paper's 13,416 for VGG-16 does; our VGG-16 has
          heads of 512.
        No bound is claimed for networks with shortcuts.
        The two comparisons of Hessian and Gauss–Newton matrix at the origin were added after the
          cpu runs.
    """),
    "VGG-16 on CIFAR-10 (Figure 1) and CIFAR-100, PreResNet-110 on CIFAR-100 (225 epochs); the"
    " epochs of VGG-16 and seeds are not in the text. The rank bound is for any feed-forward"
    " network.",
    (
        *(kit.Size("VGG-16", name) for name in ("cifar10", "cifar100")),
        kit.Size("PreResNet-110", "cifar100", epochs=225),
    ),
)
