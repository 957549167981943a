"""The largest stable learning rate over batch sizes, and scaling it (§5.7 and §5.8.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from scipy.stats import spearmanr
from torch import Tensor

from lambdahat._core.check import require_choice
from lambdahat.experiments.kit.cells import Cell, Row, Rows
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
from lambdahat.experiments.minibatch.stability_edges import (
    FEWEST,
    HELD,
    MARGIN,
    Cells,
    EdgeSubject,
    Frontier,
    PreparedSubject,
    RateRule,
    ScalingRuns,
    SearchSection,
    StackedSettings,
    edge_rows,
    frontiers_of,
    largest_passing,
    outcome,
    powers,
    prepare,
    rule_at,
    rule_rows,
    rules_of,
    scaling_of,
    scaling_rows,
    scaling_runs,
    start_of,
    subject_of,
    train_from,
)
from lambdahat.results.charts import Chart, Series

AWAY = 4.0  # times the threshold, where the rate should no longer depend on the batch
LEAST = 16  # the batch size from which the thesis speaks
FACTOR = 8  # of the reference batch size, 1,024 against 128
SAME = 1.5  # percent of validation error that do not count: the thesis's own from B = 128 to 1,024
# percent of validation error of the run that is scaled, above which there is little to keep
LOST = 50.0
CHANCE = 0.9  # the error of a network that guesses among ten classes, as one that diverged does
GUESSED = math.log(10)  # its loss
FALL = 0.9  # of the first loss, below which a network has learnt
UNKNOWN = Reading(math.nan, math.nan, math.nan, 0)
NAMES = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network that it is made of; n counts starts."""
    return claims_of(frontiers_of(rows), rules_of(rows), scaling_of(rows))


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> list[Claim]:
    """The same of what the rows hold."""
    found: list[Claim] = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        if frontier.optimizer not in HELD:
            found.append(_square_root(frontier))
        elif own:
            found += [*_proportional(frontier, own[0]), _constant(frontier, own[0])]
            found += [_limit_claim(frontier, rule) for rule in own]
    for runs in scaling:
        found += _linear_claims(runs) if runs.optimizer == "momentum" else [_adam_rule(runs)]
        found += [
            _later(runs, each)
            for each in frontiers
            if runs.optimizer == "momentum" and _edge_of(runs, each)
        ]
    return found


def _proportional(frontier: Frontier, rule: RateRule) -> list[Claim]:
    """The slope up to the rule's threshold; where that leaves too few sizes, also up to where the
    edges stop growing.

    The second was chosen after the results were seen, and so were the steady edges made a form of
    the claim: both are ours.
    """
    threshold = rule.turning(frontier.optimizer)
    sentence = (
        f"{name_of(frontier)}: up to a threshold the largest stable rate is proportional to B"
    )
    slope = frontier.slope(high=threshold)
    few = _too_few(slope, f"up to the rule's threshold, {threshold:.3g}")
    unit = "" if few else f" up to the rule's threshold, B = {threshold:.3g}"
    found = Claims()
    found.add(
        sentence, "§5.7", "slope 1", slope, "within", 1.0, MARGIN, unit, few, _steady(frontier)
    )
    end, _ = frontier.turning()
    slope = frontier.slope(high=end)
    if few and math.isfinite(slope.value):
        sentence = (
            f"{name_of(frontier)}: up to where it stops growing the largest stable rate is"
            " proportional to B"
        )
        unit = f" up to B = {end:.3g}, chosen after the results"
        found.append(
            Claim(sentence, "after §5.7", "slope 1", slope, "within", 1.0, MARGIN, unit, own=True)
        )
    return found


def _too_few(slope: Reading, where: str) -> str:
    return (
        ""
        if math.isfinite(slope.value)
        else f"fewer than {FEWEST} batch sizes with a rate lie {where}"
    )


def _steady(frontier: Frontier) -> bool:
    """Whether the edge is that of steady runs; the thesis asks what trains."""
    return frontier.criterion == "steady"


def _constant(frontier: Frontier, rule: RateRule) -> Claim:
    start = AWAY * rule.turning(frontier.optimizer)
    slope = frontier.slope(low=start)
    sentence = (
        f"{name_of(frontier)}: beyond the threshold (from four times the rule's) it no longer grows"
    )
    few = _too_few(slope, f"from four times the rule's threshold on, {start:.3g}")
    return Claim(
        sentence, "§5.7", "slope 0", slope, "within", 0.0, MARGIN, "", few, _steady(frontier)
    )


def _limit_claim(frontier: Frontier, rule: RateRule) -> Claim:
    """Ours: below 2/λ₁ the loss falls by Eq. 5.34, which the thesis calls pessimistic."""
    limit = "2/λ₁" if frontier.optimizer == "sgd" else "the momentum-aware limit"
    sentence = (
        f"{name_of(frontier)}: the largest stable rate is {limit} of a batch ({rule.point}), within"
        " a factor 2"
    )
    expected = dict(zip(rule.batch_sizes, rule.rates(frontier.optimizer).tolist(), strict=True))
    return replace(factor_claim(sentence, "after Eq. 5.34", frontier, expected), own=True)


def factor_claim(
    sentence: str, source: str, frontier: Frontier, expected: Mapping[int, float]
) -> Claim:
    """That edges are within a factor 2 of the expected ones: log₂ of the worst ratio."""
    found = [
        (size, mean_of((edges / expected[size]).log2().tolist()))
        for size, edges in zip(frontier.batch_sizes, frontier.edges, strict=True)
        if expected.get(size, 0.0) > 0
    ]
    known = [(size, reading) for size, reading in found if math.isfinite(reading.value)]
    if not known:
        return Claim(sentence, source, "ratio 1", UNKNOWN, "within", 0.0, 1.0)
    size, worst = max(known, key=lambda item: abs(item[1].value))
    unit = f" = log₂ of the ratio at B = {size}"
    return Claim(sentence, source, "ratio 1", worst, "within", 0.0, 1.0, unit)


def _square_root(frontier: Frontier) -> Claim:
    sentence = f"{name_of(frontier)}, small ε: from B = {LEAST} the largest stable rate grows as √B"
    slope = frontier.slope(low=LEAST)
    return Claim(sentence, "§5.8.1, Figure 5.15", "slope 0.5", slope, "within", 0.5, MARGIN)


def _linear_claims(runs: ScalingRuns) -> list[Claim]:
    """Figures 5.7a and 5.8a and the text between them."""
    far = far_from(runs)
    where = f"{runs.network}, momentum, B = {far} from {runs.reference}"
    distances = [
        _by_seed(runs.distance[runs.rules.index(rule), runs.batch_sizes.index(far)])
        for rule in ("linear", "square root")
    ]
    found = Claims(unmet=unlearnt(runs))
    found.append(
        kept_claim(
            f"{where}: linear scaling keeps the validation error",
            "Figure 5.7a",
            "1.5 % more",
            runs,
            "linear",
        )
    )
    found.append(
        better_claim(
            f"{where}: linear scaling generalises better than the square root",
            "§5.7.0.2",
            "35.65 against 38.92 %",
            runs,
            "linear",
            "square root",
        )
    )
    sentence = f"{where}: linear scaling ends further from the start than the square root"
    found.add(sentence, "§5.7.0.2", "145.76 against 67.44", paired_difference(*distances))
    sentence = (
        f"{runs.network}, momentum, linear scaling: the further from the start, the lower the error"
    )
    unit = " = rank correlation"
    found.add(
        sentence, "Figure 5.8a", "error falls", _distance_correlation(runs), "below", unit=unit
    )
    return found


def _adam_rule(runs: ScalingRuns) -> Claim:
    where = f"{runs.network}, Adam, B = {far_from(runs)} from {runs.reference}"
    sentence = f"{where}: the square root generalises better than linear scaling"
    return better_claim(
        sentence, "§5.8.1, Figure 5.16", "linear “fails completely”", runs, "square root", "linear"
    )


def _later(runs: ScalingRuns, frontier: Frontier) -> Claim:
    """Figure 5.7b: rates that lower the loss at first become unstable later."""
    sentence = (
        f"{runs.network}, momentum: a rate that trains in the steps of the search is unstable later"
    )
    bound, source, published = FALL * GUESSED, "§5.7.0.1, Figure 5.7b", "unstable later"
    found = _nearest_below(runs, frontier)
    if found is None:
        unmet = "no run has a rate below the edge"
        return Claim(sentence, source, published, UNKNOWN, bound=bound, unmet=unmet)
    row, place = found
    losses = runs.training_loss[row, place].nan_to_num(GUESSED, GUESSED).tolist()
    size, rate = runs.batch_sizes[place], float(runs.values[row, place])
    where = (
        f"{rate:.2g} at B = {size}, {rate / frontier.at(size):.0%} of the edge, after {runs.epochs}"
        " epochs"
    )
    unit = f" = training loss at rate {where}; {bound:.3g} is near guessing"
    return Claim(sentence, source, published, mean_of(losses), bound=bound, unit=unit)


def _nearest_below(runs: ScalingRuns, frontier: Frontier) -> tuple[int, int] | None:
    """Rule and size of the run whose rate is nearest below the edge of every start.

    Of batch sizes up to the reference, at which the epochs have more steps than the search.
    """
    sizes = [
        size for size in runs.batch_sizes if size <= runs.reference and size in frontier.batch_sizes
    ]
    least = {size: frontier.edges[frontier.batch_sizes.index(size)].min() for size in sizes}
    shares = [
        (
            float(runs.values[row, runs.batch_sizes.index(size)] / least[size]),
            row,
            runs.batch_sizes.index(size),
        )
        for row in range(len(runs.rules))
        for size in sizes
    ]
    below = [item for item in shares if item[0] < 1]
    return max(below)[1:] if below else None


def _edge_of(runs: ScalingRuns, frontier: Frontier) -> bool:
    same = (frontier.network, frontier.optimizer) == (runs.network, runs.optimizer)
    return same and not _steady(frontier)


def kept_claim(sentence: str, source: str, published: str, runs: ScalingRuns, rule: str) -> Claim:
    """That far from the reference a rule has the same validation error, or at most 1.5 % more."""
    gap = paired_difference(
        errors_of(runs, rule, far_from(runs)), errors_of(runs, rule, runs.reference)
    )
    return Claim(sentence, source, published, gap, "below", SAME, unit=" %", unmet=unlearnt(runs))


def better_claim(
    sentence: str, source: str, published: str, runs: ScalingRuns, better: str, worse: str
) -> Claim:
    """That far from the reference one rule has a lower validation error than another."""
    gap = paired_difference(
        errors_of(runs, worse, far_from(runs)), errors_of(runs, better, far_from(runs))
    )
    return Claim(sentence, source, published, gap, unit=" %", unmet=unlearnt(runs))


def unlearnt(runs: ScalingRuns) -> str:
    """Why scaling is not judged: the baseline run's error exceeds 50 %; "" if it does not."""
    base = mean_of(
        [value for rule in runs.rules for value in errors_of(runs, rule, runs.reference).values()]
    ).value
    return (
        ""
        if base <= LOST
        else f"the run at B = {runs.reference} that is scaled errs on {base:.0f} %"
    )


def errors_of(runs: ScalingRuns, rule: str, size: int) -> dict[int, float]:
    """Validation errors in percent, seed by seed; a network that diverged guesses."""
    values = runs.validation_error[runs.rules.index(rule), runs.batch_sizes.index(size)]
    return _by_seed(100 * values.nan_to_num(CHANCE))


def far_from(runs: ScalingRuns) -> int:
    """The largest batch size up to eight times the reference."""
    return max(size for size in runs.batch_sizes if size <= FACTOR * runs.reference)


def _by_seed(values: Tensor) -> dict[int, float]:
    return dict(enumerate(values.tolist()))


def _distance_correlation(runs: ScalingRuns) -> Reading:
    """Spearman's rank correlation of distance and error over batch sizes, seed by seed."""
    linear, found = runs.rules.index("linear"), []
    for far, wrong in zip(runs.distance[linear].T, runs.validation_error[linear].T, strict=True):
        fine = far.isfinite() & wrong.isfinite()
        if int(fine.sum()) >= FEWEST:
            found.append(float(spearmanr(far[fine], wrong[fine]).statistic))
    return mean_of(found)


def rule_slope(rule: RateRule, optimizer: str) -> float:
    """The slope of the rule's own rates up to its threshold; NaN with too few batch sizes."""
    inside = torch.tensor([size <= rule.turning(optimizer) for size in rule.batch_sizes])
    if int(inside.sum()) < FEWEST:
        return math.nan
    x = torch.tensor(rule.batch_sizes, dtype=torch.float64)[inside].log()
    x, y = x - x.mean(), rule.rates(optimizer)[inside].log()
    return float((x * y).sum() / x.square().sum())


def name_of(frontier: Frontier) -> str:
    """Network, optimiser and criterion in words."""
    steady = ", steady" if frontier.criterion == "steady" else ""
    return f"{frontier.network}, {NAMES[frontier.optimizer]}{steady}"


ABSENT = "not in the thesis"
# of validation error, error over distance, and training, by optimiser and what is scaled
FIGURES = {
    ("momentum", "rate"): ("Figure 5.7a", "Figure 5.8a", ABSENT),
    ("adam", "rate"): ("Figure 5.16", ABSENT, "Figure 5.15"),
    ("adam", "ε"): ("Figure 5.12", ABSENT, "Figure 5.11"),
    ("kfac", "δ"): ("Figure 5.14", ABSENT, "Figure 5.13"),
}


def tables(rows: Rows) -> list[Table]:
    """Stable rates and slopes by network, λ₁ of batches, and the runs under scaling rules."""
    frontiers, rules, scaling = frontiers_of(rows), rules_of(rows), scaling_of(rows)
    networks = dict.fromkeys(frontier.network for frontier in frontiers)
    out = [
        _rates(name, frontiers, [rule for rule in rules if rule.network == name])
        for name in networks
    ]
    if frontiers:
        out.append(_thresholds(frontiers, rules))
    return [*out, *map(_curvature, rules), *(runs.table() for runs in scaling)]


def _rates(network: str, frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> Table:
    mine = [frontier for frontier in frontiers if frontier.network == network]
    sizes = sorted({size for frontier in mine for size in frontier.batch_sizes})
    lines = []
    for size in sizes:
        found = [frontier.cell(size) if size in frontier.batch_sizes else "" for frontier in mine]
        lines.append((str(size), *found, *(_allowed_rate(rule, size) for rule in rules)))
    header = (
        "B",
        *(f"{f.optimizer}, {f.criterion}" for f in mine),
        *(f"2/λ₁, {rule.point}" for rule in rules),
    )
    return Table(f"{network}: the largest stable rate, and the rule for SGD", header, tuple(lines))


def _allowed_rate(rule: RateRule, size: int) -> str:
    return (
        f"{float(rule.rates('sgd')[rule.batch_sizes.index(size)]):.3g}"
        if size in rule.batch_sizes
        else ""
    )


def _thresholds(frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> Table:
    """Where growth ends, by the rule and by the edges, and the slopes on either side."""
    lines = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        fitted, spread = frontier.turning()
        seen = f"{fitted:.3g} ± {100 * spread:.0f} %" if math.isfinite(fitted) else "none"
        held = frontier.optimizer in HELD
        line = [
            name_of(frontier),
            seen,
            _slope(frontier.slope(high=fitted)) if held else "",
            _slope(frontier.slope()),
        ]
        if own and held:
            turning, expected = (
                own[0].turning(frontier.optimizer),
                rule_slope(own[0], frontier.optimizer),
            )
            told = f"{expected:+.2f}" if math.isfinite(expected) else "too few"
            below, above = frontier.slope(high=turning), frontier.slope(low=turning)
            line += [f"{turning:.3g}", _slope(below), told, _slope(above)]
        lines.append(tuple(line + [""] * (8 - len(line))))
    header = split_header(
        "edge | threshold by the edges | slope up to it | slope, all B | "
        "threshold by the rule | slope below | the rule's own | slope above"
    )
    return Table("d log rate/d log B and the batch size at which it changes", header, tuple(lines))


def _slope(slope: Reading) -> str:
    return f"{slope.value:+.2f} ± {slope.stderr:.2f}" if math.isfinite(slope.value) else "too few"


def _curvature(rule: RateRule) -> Table:
    """λ₁ of batches, predicted and measured."""
    lines = []
    for place, size in enumerate(rule.batch_sizes):
        shown = mean_of(rule.measured[place].tolist())
        told = (f"{float(values[place]):.3g}" for values in rule.predicted.values())
        lines.append((str(size), f"{shown.value:.3g} ± {shown.stderr:.1g}", *told))
    title = f"{rule.network}, {rule.point}: λ₁ of a batch; {rule.full:.3g} on all data"
    return Table(title, ("B", "measured", *rule.predicted), tuple(lines))


def charts(rows: Rows) -> list[Chart]:
    """Stable rates with the rule's, errors under each scaling rule, error over distance."""
    frontiers, rules, out = frontiers_of(rows), rules_of(rows), []
    for network in dict.fromkeys(frontier.network for frontier in frontiers):
        edges = [
            edge_series(f, f"{f.optimizer}, {f.criterion}")
            for f in frontiers
            if f.network == network
        ]
        allowed = [
            Series(
                f"rule, {optimizer}, {rule.point}", rule.batch_sizes, rule.rates(optimizer).tolist()
            )
            for rule in rules
            for optimizer in HELD
            if rule.network == network
        ]
        out.append(
            Chart(
                f"{network}: the largest stable rate",
                "batch size B",
                "learning rate",
                (*edges, *allowed),
                x_log=True,
                y_log=True,
                source="§§5.7, 5.8.1",
                caption="Rules from λ₁ of single batches, at the start and after some training.",
            )
        )
    return out + scaling_charts(scaling_of(rows))


def edge_series(frontier: Frontier, name: str) -> Series:
    """Geometric means over seeds with their errors."""
    centre = frontier.centre()
    error = centre * frontier.stderr()
    return Series(
        name, frontier.batch_sizes, _finite(centre.tolist()), _finite(error.tolist()), "points"
    )


def scaling_charts(scaling: Sequence[ScalingRuns]) -> list[Chart]:
    """Validation error and training loss over batch sizes, and error over distance, by rule."""
    out = []
    for runs in scaling:
        figures = FIGURES[runs.optimizer, runs.scaled]
        title = f"{runs.network}, {runs.optimizer}: {runs.scaled} scaled from B = {runs.reference}"
        words, after = "batch size B", f"After {runs.epochs} epochs at every size."
        axis = "validation error, %"
        series = _over_sizes(runs, 100 * runs.validation_error)
        out.append(Chart(title, words, axis, series, x_log=True, source=figures[0], caption=after))
        clouds = []
        for place, rule in enumerate(runs.rules):
            far, wrong = (
                runs.distance[place].flatten(),
                100 * runs.validation_error[place].flatten(),
            )
            fine = far.isfinite() & wrong.isfinite()
            clouds.append(Series(rule, far[fine].tolist(), wrong[fine].tolist(), style="points"))
        heading = f"{runs.network}, {runs.optimizer}: error and distance"
        across = "distance from the start"
        axis = "validation error, %"
        out.append(Chart(heading, across, axis, tuple(clouds), x_log=True, source=figures[1]))
        out.append(
            Chart(
                f"{title}, training",
                words,
                "training loss",
                _over_sizes(runs, runs.training_loss),
                x_log=True,
                y_log=True,
                source=figures[2],
                caption=f"{after} The thesis shows the training error.",
            )
        )
    return out


def _over_sizes(runs: ScalingRuns, values: Tensor) -> tuple[Series, ...]:
    """Means over the seeds of values (rules, sizes, S), a curve for each rule."""
    series = []
    for rule, row in zip(runs.rules, values, strict=True):
        readings = [mean_of(each.tolist()) for each in row]
        heights = _finite([r.value for r in readings])
        series.append(
            Series(rule, runs.batch_sizes, heights, _finite([r.stderr for r in readings]))
        )
    return tuple(series)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


RISE = 1.1  # times the first loss, above which a run is not steady
SECTION = SearchSection(1e-5, 1e3, points=10)
CRITERIA = ("trains", "steady")
SEARCHES = (
    ("sgd", "trains"),
    ("sgd", "steady"),
    ("momentum", "trains"),
    ("momentum", "steady"),
    ("adam", "trains"),
)
RULES = {"linear": 1.0, "square root": 0.5, "constant": 0.0}
POINTS = ("at the start", "trained")
SCALED_OPTIMIZERS = ("momentum", "adam")
SAFETY = 0.5  # of the largest stable rate, from which the rules start

SOFTMAX, MLP = ("softmax, MNIST", "softmax", "mnist"), ("MLP, MNIST", "mlp", "mnist")
LENET = ("LeNet-5, CIFAR-10", "lenet5", "cifar10")
SMALL, WHOLE = (1, 4, *powers(4, 10)), (1, 4, *powers(4, 12))  # batch sizes
TINY = EdgeSubject("softmax, digits", "softmax", "digits", 256, (4, 16, 64), 15, 2, 1, 16)
SCALES: dict[str, tuple[EdgeSubject, ...]] = {
    "smoke": (TINY,),
    "cpu": (
        EdgeSubject(*SOFTMAX, 10_000, SMALL, 100, 3),
        EdgeSubject(*MLP, 10_000, SMALL, 100, 3, 5, options={"widths": (32,)}),
    ),
    "paper": (
        EdgeSubject(*SOFTMAX, 60_000, WHOLE, 300, 5, 5),
        EdgeSubject(*MLP, 60_000, WHOLE, 300, 5, 5, options={"widths": (100,)}),
        EdgeSubject(*LENET, 8_000, (16, 64, 256, 1024, 4096), 100, 3, 6, reference=256),
    ),
}


def rule_of(ground: PreparedSubject, point: str, seed: int) -> RateRule:
    """The rule "at the start", or "trained" by SGD at half its largest stable rate."""
    require_choice(point, "point", POINTS)
    if point == "at the start":
        return rule_at(ground, start_of(ground), point, seed)
    return rule_at(ground, train_from(ground, _half_edge(ground, "sgd", seed), seed), point, seed)


def scaled_runs(ground: PreparedSubject, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under the three rules, from half the largest stable rate of the reference batch size."""

    def run(size: int, rates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return outcome(
            ground, StackedSettings(optimizer, rates.expand(ground.subject.seeds, -1)), size, seed
        )

    return scaling_runs(ground, optimizer, "rate", _half_edge(ground, optimizer, seed), RULES, run)


def _half_edge(ground: PreparedSubject, optimizer: str, seed: int) -> float:
    """Half the largest rate that trains at the reference batch size."""
    reference = ground.subject.reference
    return SAFETY * stable_rates(ground.at(reference), optimizer, seed).at(reference)


def stable_rates(
    ground: PreparedSubject,
    optimizer: str,
    seed: int,
    criterion: str = "trains",
    section: SearchSection = SECTION,
) -> Frontier:
    """The largest stable rate of one optimiser at every batch size, from every seed's start.

    A run "trains" if its loss ends below 0.9 of the first. It is "steady" if, besides, in no tenth
    of the run the mean loss of its batches is above 1.1 of the first: a step that is too long for
    the curvature raises the loss, though the run may recover.
    """
    require_choice(criterion, "criterion", CRITERIA)
    subject, edges = ground.subject, []
    first = _loss(
        ground,
        Cells(
            ground.models, ground.train, StackedSettings(optimizer, torch.zeros(subject.seeds, 1))
        ),
    )
    for size in subject.batch_sizes:

        def stable(rates: Tensor, size: int = size) -> Tensor:
            cells = Cells(ground.models, ground.train, StackedSettings(optimizer, rates))
            met = cells.train(
                size, subject.steps, seed, f"{subject.network}, {optimizer}, B = {size}"
            )
            ended = _loss(ground, cells) < FALL * first
            return ended if criterion == "trains" else ended & (met < RISE * first).all(0)

        edges.append(largest_passing(stable, section, subject.seeds))
    return Frontier(
        subject.network,
        optimizer,
        criterion,
        subject.batch_sizes,
        torch.stack(edges),
        section.resolution,
    )


def _loss(ground: PreparedSubject, cells: Cells) -> Tensor:
    return cells.evaluate(ground.probe)[0]


ASSUMPTIONS = sentences(f"""
    A run trains if the mean loss over 2,000 training images ends below {FALL:g} of its start.
    It is steady if besides no tenth of it has a mean batch loss above {RISE:g} of the start: a form
      of ours.
    The number of steps is the same at every batch size, so that all have as long to diverge.
    The edge is searched by sections to a factor {SECTION.resolution:.2f}.
    λ₁ is that of the Hessian at the start, and after as many steps of SGD at half its largest
      stable rate.
    That the edge is 2/λ₁ within a factor 2 is our question: the thesis calls Eq. 5.34 a pessimistic
      bound.
    Images have mean 0 and deviation 1; no weight decay, no augmentation, no schedule. n counts
      starts.
    Scaling rules start from half the largest stable rate at the reference batch; the thesis takes
      all of it.
    An error is kept if it rises by at most {SAME:g} %, as the thesis's own does from B = 128 to
      1,024.
    Nothing is judged of scaling where the run that is scaled errs on more than {LOST:g} % itself.
    The slope that should be 1 is read up to the rule's threshold, if three batch sizes or more lie
      there.
    If not, it is also read up to where the measured rates stop growing, by a fit to the same rates.
    That other end, the bound on the run that is scaled, and the 1.5 % were chosen after the results
      were seen.
    “Unstable later” is a training loss near guessing after all epochs at a rate below the edge of
      the search.
    It was added after the results were seen; no loss on the way is stored, nor is the variance that
      causes it.
    A run that diverged has the validation error of a network that guesses, 90 %.
    No network has batch normalisation: Figures 5.7c, 5.8b, 5.9 and 5.10 are those of
      batch-norm-rates.
""")


@dataclass(frozen=True)
class RateScale:
    """The networks of a scale, and the ``root`` of the seeds of starts, samples and batches."""

    subjects: tuple[EdgeSubject, ...]
    root: int = 0


def cells(config: RateScale) -> list[Cell]:
    """For each network: the edges of an optimiser at one batch size, the rule at one point, an
    optimiser's scaled runs.

    All seeds of a network are in one cell, for they train together.
    """
    found: list[Cell] = []
    for subject in config.subjects:
        whole = asdict(subject) | {"root": config.root}
        for optimizer in dict.fromkeys(optimizer for optimizer, _ in SEARCHES):
            found += [
                {
                    "part": "edge",
                    "optimizer": optimizer,
                    "batch_size": size,
                    **whole,
                    "batch_sizes": (size,),
                }
                for size in subject.batch_sizes
            ]
        found += [{"part": "rule", "point": point, **whole} for point in POINTS]
        if subject.epochs:
            found += [
                {"part": "scaling", "optimizer": optimizer, **whole}
                for optimizer in SCALED_OPTIMIZERS
            ]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """The edges by every criterion, the rule, or the scaled runs, as ``part`` says."""
    ground, root = prepare(subject_of(cell), {}, cell["root"], device), cell["root"]
    if cell["part"] == "rule":
        return rule_rows(rule_of(ground, cell["point"], root))
    if cell["part"] == "scaling":
        return scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    criteria = [criterion for optimizer, criterion in SEARCHES if optimizer == cell["optimizer"]]
    found = (stable_rates(ground, cell["optimizer"], root, criterion) for criterion in criteria)
    return [row for frontier in found for row in edge_rows(frontier)]


EXPERIMENT = Experiment(
    "stable-rates",
    "The largest stable learning rate over batch sizes, and what comes of scaling it",
    SPECTRAL,
    "§§5.7 and 5.8.1, Figures 5.7a, 5.7b, 5.8a, 5.15 and 5.16",
    {scale: RateScale(subjects) for scale, subjects in SCALES.items()},
    *(cells, run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs, batches of 128"
        " to 4,096; seeds are not in the text."
    ),
    sizes=(Size("VGG-16", "cifar100", 45_000, 300),),
)
