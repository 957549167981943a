"""The largest stable learning rate over batch sizes, and scaling it (§5.7 and §5.8.1)."""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from lambdahat._core.check import require_choice
from lambdahat._core.progress import report
from lambdahat._core.rng import derived_seed, generator
from lambdahat.estimators import eigenpairs, variance
from lambdahat.experiments import kit
from lambdahat.experiments.kit import training
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.minibatch import stability_edges as edges
from lambdahat.experiments.minibatch.stability_edges import (
    HELD,
    LEAST_SIZES,
    EdgeSubject,
    Frontier,
    PreparedSubject,
    RateRule,
    ScalingRuns,
    SearchSection,
    StackedSettings,
)
from lambdahat.operators.curvature import hessian
from lambdahat.randommatrix import batch_eigenpairs, predict

AWAY = 4.0  # times the threshold, where the rate should no longer depend on the batch
SMALLEST_BATCH = 16  # the batch size from which the thesis speaks
FACTOR = 8  # of the reference batch size, 1,024 against 128
# percent of validation error that do not count: the thesis's own from B = 128 to 1,024
SAME_ERROR = 1.5
# percent of validation error of the run that is scaled, above which there is little to keep
WORST_REFERENCE = 50.0
CHANCE = 0.9  # the error of a network that guesses among ten classes, as one that diverged does
GUESSED = math.log(10)  # its loss
LEARNT_LOSS = 0.9  # of the first loss, below which a network has learnt

REFERENCE, FAR = 128, 1024  # batch sizes of the thesis's scaled runs
UNRULED = "no eigenvalues of batches are here, and so no threshold"
UNSCALED = "no such run of this network is here"

NAMES = {"sgd": "SGD", "momentum": "SGD with momentum", "adam": "Adam"}

CLAIMS = kit.ClaimTexts("""
    rising: {name}: up to a threshold the largest stable rate is proportional to B
      | §5.7 | slope 1 | within 0.2 of 1
    growing: {name}: up to where it stops growing the largest stable rate is proportional to B |
      after §5.7 | slope 1 | within 0.2 of 1 | up to B = {end:.3g}, chosen after the results | ours
    constant: {name}: beyond the threshold (from four times the rule's) it no longer grows
      | §5.7 | slope 0 | within 0.2 of 0
    limit: {name}: the largest stable rate is {limit} of a batch ({point}), within a factor 2
      | after Eq. 5.34 | ratio 1 | within 1 of 0 | | ours
    root: {name}, small ε: from B = 16 the largest stable rate grows as √B
      | §5.8.1, Figure 5.15 | slope 0.5 | within 0.2 of 0.5
    kept: {where}: linear scaling keeps the validation error
      | Figure 5.7a | 1.5 % more | below 1.5 | %
    better: {where}: linear scaling generalises better than the square root
      | §5.7.0.2 | 35.65 against 38.92 % | above | %
    further: {where}: linear scaling ends further from the start than the square root
      | §5.7.0.2 | 145.76 against 67.44
    link: {network}, momentum, linear scaling: the further from the start, the lower the error
      | Figure 5.8a | error falls | below | = rank correlation
    Adam: {where}: the square root generalises better than linear scaling
      | §5.8.1, Figure 5.16 | linear “fails completely” | above | %
    later: {network}, momentum: a rate that trains in the steps of the search is unstable later
      | §5.7.0.1, Figure 5.7b | unstable later
""")


def claims(rows: Rows) -> Iterator[kit.Claim]:
    """Every claim, for each network that it is made of; n counts starts.

    Those on thresholds are not testable before the rule is there. Of a network of which edges alone
    were searched, those on scaled runs are judged in batch-norm-rates; it has none by Adam, and no
    search from the same start.
    """
    rules, scaling = edges.rules_of(rows), edges.scaling_of(rows)
    yield from claims_of(edges.frontiers_of(rows), rules, scaling)
    late = searched_late(rows)
    for network in sorted(late - {rule.network for rule in rules}):
        for optimizer, key in product(HELD, ("rising", "constant")):
            name = f"{network}, {NAMES[optimizer]}"
            yield CLAIMS(key, kit.UNKNOWN, name=name, unmet=UNRULED)
    for network in sorted(late - {runs.network for runs in scaling}):
        for key in ("later", "Adam"):
            where = f"{network}, {NAMES['adam']}, B = {FAR} from {REFERENCE}"
            yield CLAIMS(key, kit.UNKNOWN, where=where, network=network, unmet=UNSCALED)


def searched_late(rows: Rows) -> set[str]:
    """The networks whose edges were searched after some training."""
    return {row["network"] for row in rows.where(part="edge") if "loss" in row}


def claims_of(
    frontiers: Sequence[Frontier], rules: Sequence[RateRule], scaling: Sequence[ScalingRuns]
) -> Iterator[kit.Claim]:
    """The same of what the rows hold."""
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        if frontier.optimizer not in HELD:
            yield CLAIMS("root", frontier.slope(low=SMALLEST_BATCH), name=name_of(frontier))
        elif own:
            yield from _slope_claims(frontier, own[0])
            limit = "2/λ₁" if frontier.optimizer == "sgd" else "the momentum-aware limit"
            for rule in own:  # below 2/λ₁ the loss falls by Eq. 5.34, pessimistic in the thesis
                rates = rule.rates(frontier.optimizer).tolist()
                worst, unit = worst_ratio(frontier, dict(zip(rule.batch_sizes, rates, strict=True)))
                values = {"name": name_of(frontier), "limit": limit, "point": rule.point}
                yield CLAIMS("limit", worst, unit=unit, **values)
    for runs in scaling:
        yield from _scaling_claims(runs)
        for frontier in frontiers if runs.optimizer == "momentum" else ():
            same = (frontier.network, frontier.optimizer) == (runs.network, runs.optimizer)
            if same and frontier.criterion != "steady":
                yield _later(runs, frontier)


def _slope_claims(frontier: Frontier, rule: RateRule) -> Iterator[kit.Claim]:
    """The slope up to the rule's threshold, and where that leaves too few sizes up to where the
    edges stop growing; and the slope from four times the threshold on.

    The second was chosen after the results were seen, and so were the steady edges made a form of
    the claims, for the thesis asks what trains: both are ours.
    """
    claim = partial(CLAIMS, name=name_of(frontier), own=frontier.criterion == "steady")
    threshold = rule.turning(frontier.optimizer)
    slope = frontier.slope(high=threshold)
    few = _too_few(slope, f"up to the rule's threshold, {threshold:.3g}")
    unit = "" if few else f" up to the rule's threshold, B = {threshold:.3g}"
    yield claim("rising", slope, unit=unit, unmet=few)
    end, _ = frontier.turning()
    slope = frontier.slope(high=end)
    if few and math.isfinite(slope.value):
        yield claim("growing", slope, end=end, own=True)
    slope = frontier.slope(low=AWAY * threshold)
    few = _too_few(slope, f"from four times the rule's threshold on, {AWAY * threshold:.3g}")
    yield claim("constant", slope, unmet=few)


def _too_few(slope: kit.Reading, where: str) -> str:
    known = math.isfinite(slope.value)
    return "" if known else f"fewer than {LEAST_SIZES} batch sizes with a rate lie {where}"


def worst_ratio(frontier: Frontier, expected: Mapping[int, float]) -> tuple[kit.Reading, str]:
    """log₂ of the edges over the expected ones where it is largest, and where that is."""
    ratios = [
        (size, kit.mean_of((values / expected[size]).log2().tolist()))
        for size, values in zip(frontier.batch_sizes, frontier.edges, strict=True)
        if expected.get(size, 0.0) > 0
    ]
    known = [(size, reading) for size, reading in ratios if math.isfinite(reading.value)]
    if not known:
        return kit.UNKNOWN, ""
    size, worst = max(known, key=lambda item: abs(item[1].value))
    return worst, f" = log₂ of the ratio at B = {size}"


def _scaling_claims(runs: ScalingRuns) -> Iterator[kit.Claim]:
    """Figures 5.7a and 5.8a and the text between them, and of Adam Figure 5.16."""
    far, adam = far_from(runs), runs.optimizer == "adam"
    where = f"{runs.network}, {'Adam' if adam else 'momentum'}, B = {far} from {runs.reference}"
    claim = partial(CLAIMS, where=where, network=runs.network, unmet=untrained_reason(runs))
    if adam:
        yield claim("Adam", advantage(runs, "square root", "linear"))
        return
    yield claim("kept", rise(runs, "linear"))
    yield claim("better", advantage(runs, "linear", "square root"))
    distances = (_by_seed(runs.at("distance", rule, far)) for rule in ("linear", "square root"))
    yield claim("further", kit.paired_difference(*distances))
    yield claim("link", _distance_correlation(runs))


def _later(runs: ScalingRuns, frontier: Frontier) -> kit.Claim:
    """Figure 5.7b: rates that lower the loss at first become unstable later.

    Judged by the run whose rate is nearest below the edge of every start, of batch sizes up to the
    reference, at which the epochs have more steps than the search.
    """
    claim = partial(CLAIMS, "later", network=runs.network, bound=LEARNT_LOSS * GUESSED)
    shares = []
    for place, size in enumerate(runs.batch_sizes):
        if size <= runs.reference and size in frontier.batch_sizes:
            least = frontier.edges[frontier.batch_sizes.index(size)].min()
            values = enumerate(runs.values[:, place])
            shares += [(float(value / least), row, place) for row, value in values]
    below = [share for share in shares if share[0] < 1]
    if not below:
        return claim(kit.UNKNOWN, unmet="no run has a rate below the edge")
    _, row, place = max(below)
    losses = runs.training_loss[row, place].nan_to_num(GUESSED, GUESSED).tolist()
    size, rate = runs.batch_sizes[place], float(runs.values[row, place])
    where = f"{rate:.2g} at B = {size}, {rate / frontier.at(size):.0%} of the edge"
    after = f"after {runs.epochs} epochs; {LEARNT_LOSS * GUESSED:.3g} is near guessing"
    return claim(kit.mean_of(losses), unit=f" = training loss at rate {where}, {after}")


def rise(runs: ScalingRuns, rule: str) -> kit.Reading:
    """The validation error far from the reference above that at the reference, in percent."""
    sizes = (far_from(runs), runs.reference)
    return kit.paired_difference(*(errors_of(runs, rule, size) for size in sizes))


def advantage(runs: ScalingRuns, better: str, worse: str) -> kit.Reading:
    """The difference of two rules' validation errors, far from the reference."""
    return kit.paired_difference(
        *(errors_of(runs, rule, far_from(runs)) for rule in (worse, better))
    )


def untrained_reason(runs: ScalingRuns) -> str:
    """Why scaling is not judged: the baseline run's error exceeds 50 %; "" if it does not."""
    errors = [errors_of(runs, rule, runs.reference).values() for rule in runs.rules]
    base = kit.mean_of([value for values in errors for value in values]).value
    lost = f"the run at B = {runs.reference} that is scaled errs on {base:.0f} %"
    return "" if base <= WORST_REFERENCE else lost


def errors_of(runs: ScalingRuns, rule: str, size: int) -> dict[int, float]:
    """Validation errors in percent, seed by seed; a network that diverged guesses."""
    return _by_seed(100 * runs.at("validation_error", rule, size).nan_to_num(CHANCE))


def far_from(runs: ScalingRuns) -> int:
    """The largest batch size up to eight times the reference."""
    return max(size for size in runs.batch_sizes if size <= FACTOR * runs.reference)


def _by_seed(values: Tensor) -> dict[int, float]:
    return dict(enumerate(values.tolist()))


def _distance_correlation(runs: ScalingRuns) -> kit.Reading:
    """Spearman's rank correlation of distance and error over batch sizes, seed by seed."""
    linear, correlations = runs.rules.index("linear"), []
    for far, wrong in zip(runs.distance[linear].T, runs.validation_error[linear].T, strict=True):
        fine = far.isfinite() & wrong.isfinite()
        if int(fine.sum()) >= LEAST_SIZES:
            correlations.append(float(spearmanr(far[fine], wrong[fine]).statistic))
    return kit.mean_of(correlations)


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


def tables(rows: Rows) -> Iterator[kit.Table]:
    """Stable rates and slopes by network, λ₁ of batches, and the runs under scaling rules."""
    for network, frontiers, rules in edges.networks_of(rows):
        allowed = {}
        for rule in rules:
            rates = [f"{rate:.3g}" for rate in rule.rates("sgd").tolist()]
            allowed[f"2/λ₁, {rule.point}"] = dict(zip(rule.batch_sizes, rates, strict=True))
        title = f"{network}: the largest stable rate, and the rule for SGD"
        yield edge_table(title, {f"{f.optimizer}, {f.criterion}": f for f in frontiers}, allowed)
    frontiers, rules = edges.frontiers_of(rows), edges.rules_of(rows)
    if frontiers:
        yield _thresholds(frontiers, rules)
    for rule in rules:
        lines = []
        for place, size in enumerate(rule.batch_sizes):
            shown = kit.mean_of(rule.measured[place].tolist())
            predicted = [f"{float(values[place]):.3g}" for values in rule.predicted.values()]
            lines.append((size, f"{shown.value:.3g} ± {shown.stderr:.1g}", *predicted))
        title = f"{rule.network}, {rule.point}: λ₁ of a batch; {rule.full:.3g} on all data"
        yield kit.table(title, ("B", "measured", *rule.predicted), lines)
    yield from (runs.by_size() for runs in edges.scaling_of(rows))


def edge_table(
    title: str, frontiers: Mapping[str, Frontier], rules: Mapping[str, Mapping[int, str]]
) -> kit.Table:
    """Edges by batch size, and beside them the rules' values by batch size."""
    sizes = sorted({size for frontier in frontiers.values() for size in frontier.batch_sizes})
    lines = []
    for size in sizes:
        edges = [f.cell(size) if size in f.batch_sizes else "" for f in frontiers.values()]
        lines.append((size, *edges, *(values.get(size, "") for values in rules.values())))
    return kit.table(title, ("B", *frontiers, *rules), lines)


def _thresholds(frontiers: Sequence[Frontier], rules: Sequence[RateRule]) -> kit.Table:
    """Where growth ends, by the rule and by the edges, and the slopes on either side."""
    lines = []
    for frontier in frontiers:
        own = [rule for rule in rules if rule.network == frontier.network]
        fitted, spread = frontier.turning()
        seen = f"{fitted:.3g} ± {100 * spread:.0f} %" if math.isfinite(fitted) else "none"
        held = frontier.optimizer in HELD
        upto = _slope(frontier.slope(high=fitted)) if held else ""
        line = [name_of(frontier), seen, upto, _slope(frontier.slope())]
        if own and held:
            turning = own[0].turning(frontier.optimizer)
            rates = zip(own[0].batch_sizes, own[0].rates(frontier.optimizer).tolist(), strict=True)
            logs = [(math.log(size), math.log(rate)) for size, rate in rates if size <= turning]
            expected = kit.slope([x for x, _ in logs], [y for _, y in logs]).value
            rule_slope = f"{expected:+.2f}" if math.isfinite(expected) else "too few"
            below, above = frontier.slope(high=turning), frontier.slope(low=turning)
            line += [f"{turning:.3g}", _slope(below), rule_slope, _slope(above)]
        lines.append(line + [""] * (8 - len(line)))
    header = (
        "edge | threshold by the edges | slope up to it | slope, all B | "
        "threshold by the rule | slope below | the rule's own | slope above"
    )
    return kit.table("d log rate/d log B and the batch size at which it changes", header, lines)


def _slope(slope: kit.Reading) -> str:
    return f"{slope.value:+.2f} ± {slope.stderr:.2f}" if math.isfinite(slope.value) else "too few"


def charts(rows: Rows) -> Iterator[kit.Chart]:
    """Stable rates with the rule's, errors under each scaling rule, error over distance."""
    for network, frontiers, rules in edges.networks_of(rows):
        series = [edge_series(f, f"{f.optimizer}, {f.criterion}") for f in frontiers]
        for rule, optimizer in product(rules, HELD):
            rates, name = rule.rates(optimizer).tolist(), f"rule, {optimizer}, {rule.point}"
            series.append(kit.Series(name, rule.batch_sizes, rates))
        labels = (f"{network}: the largest stable rate", "batch size B", "learning rate")
        caption = "Rules from λ₁ of single batches, at the start and after some training."
        source = "§§5.7, 5.8.1"
        lines = tuple(series)
        yield kit.Chart(*labels, lines, x_log=True, y_log=True, source=source, caption=caption)
    yield from scaling_charts(edges.scaling_of(rows))


def edge_series(frontier: Frontier, name: str) -> kit.Series:
    """Geometric means over seeds with their errors."""
    centre = frontier.centre()
    spread = centre * frontier.stderr()
    heights, errors = (kit.finite(values.tolist()) for values in (centre, spread))
    band = "± standard error over seeds"
    return kit.Series(name, frontier.batch_sizes, heights, errors, "points", band=band)


def scaling_charts(scaling: Sequence[ScalingRuns]) -> Iterator[kit.Chart]:
    """Validation error and training loss over batch sizes, and error over distance, by rule."""
    for runs in scaling:
        figures = FIGURES[runs.optimizer, runs.scaled]
        name = f"{runs.network}, {runs.optimizer}"
        title = f"{name}: {runs.scaled} scaled from B = {runs.reference}"
        words, after = "batch size B", f"After {runs.epochs} epochs at every size."
        axis, errors = "validation error, %", 100 * runs.validation_error
        labels, lines = (title, words, axis), _over_sizes(runs, errors)
        yield kit.Chart(*labels, lines, x_log=True, source=figures[0], caption=after)
        clouds = []
        for rule, distance, error in zip(runs.rules, runs.distance, errors, strict=True):
            far, wrong = distance.flatten(), error.flatten()
            fine = far.isfinite() & wrong.isfinite()
            both = far[fine].tolist(), wrong[fine].tolist()
            clouds.append(kit.Series(rule, *both, style="points"))
        labels = (f"{name}: error and distance", "distance from the start", axis)
        yield kit.Chart(*labels, tuple(clouds), x_log=True, source=figures[1])
        labels = (f"{title}, training", words, "training loss")
        lines = _over_sizes(runs, runs.training_loss)
        caption = f"{after} The thesis shows the training error."
        yield kit.Chart(*labels, lines, x_log=True, y_log=True, source=figures[2], caption=caption)


def _over_sizes(runs: ScalingRuns, values: Tensor) -> tuple[kit.Series, ...]:
    """Means over the seeds of values (rules, sizes, S), a curve for each rule."""
    series = []
    for rule, row in zip(runs.rules, values, strict=True):
        readings = [kit.mean_of(each.tolist()) for each in row]
        curve = kit.reading_series(rule, runs.batch_sizes, readings)
        series.append(replace(curve, y=kit.finite(each.value for each in readings)))
    return tuple(series)


RISE = 1.1  # times the first loss, above which a run is not steady
SECTION = SearchSection(1e-5, 1e3, points=10)
CRITERIA = ("trains", "steady")
SEARCHES = (*product(("sgd", "momentum"), CRITERIA), ("adam", "trains"))
RULES = {"linear": 1.0, "square root": 0.5, "constant": 0.0}
POINTS = ("at the start", "trained")
RULE_CELLS = [{"point": point} for point in POINTS]
SCALED_OPTIMIZERS = ("momentum", "adam")
SAFETY = 0.5  # of the largest stable rate, from which the rules start

SOFTMAX, MLP = ("softmax, MNIST", "softmax", "mnist"), ("MLP, MNIST", "mlp", "mnist")
LENET = ("LeNet-5, CIFAR-10", "lenet5", "cifar10")
SMALL, WHOLE = (1, 4, *edges.powers(4, 10)), (1, 4, *edges.powers(4, 12))  # batch sizes
TINY = EdgeSubject("softmax, digits", "softmax", "digits", 256, (4, 16, 64), 15, 2, 1, 16)
SCALES: dict[str, tuple[EdgeSubject, ...]] = {
    "smoke": (TINY,),
    "cpu": (
        EdgeSubject(*SOFTMAX, 10_000, SMALL, 100, 3),
        EdgeSubject(*MLP, 10_000, SMALL, 100, 3, 5, options={"widths": (32,)}),
    ),
    # stand-ins, for benchmarks/minibatch_rates.py; at this scale the experiment has VGG-16
    "paper": (
        EdgeSubject(*SOFTMAX, 60_000, WHOLE, 300, 5, 5),
        EdgeSubject(*MLP, 60_000, WHOLE, 300, 5, 5, options={"widths": (100,)}),
        EdgeSubject(*LENET, 8_000, (16, 64, 256, 1024, 4096), 100, 3, 6, reference=256),
    ),
}
JUDGED = 1000  # training images on which it is judged whether a trained network is still one
# by name an optimiser of parameters and the value that is searched, and where to look for it
Searched = Mapping[str, tuple[Callable[..., Optimizer], SearchSection]]
LATE: Searched = {
    "sgd": (torch.optim.SGD, SearchSection(1e-2, 1e2, points=4)),
    "momentum": (
        partial(torch.optim.SGD, momentum=edges.MOMENTUM),
        SearchSection(1e-3, 10.0, points=4),
    ),
    "adam": (torch.optim.Adam, SearchSection(1e-5, 0.1, points=4)),
}


def late_cells(images: Cell, sizes: Sequence[int], ruled: Sequence[int], seeds: int) -> list[Cell]:
    """The edges of every seed from a trained network, and the rule there for ``ruled`` sizes.

    ``images`` says how it is trained, at a constant rate, and has the number of ``steps`` at each
    rate and of ``samples`` for the rule.
    """
    edge = {**images, "part": "edge", "batch_sizes": list(sizes)}
    rule = {**images, "part": "rule", "batch_sizes": list(ruled), "seed": 0}
    return [*kit.grid(edge, seed=range(seeds)), rule]


def run_late(
    cell: Cell, device: str, searched: Searched = LATE, noise_samples: int = 0
) -> list[Row]:
    """A row for each optimiser and batch size, or for each batch of the rule.

    The rule also has the prediction by the variance of the Hessian over ``noise_samples``, if any.
    """
    model, data = training.model_and_images(cell, device)
    optimizer = torch.optim.SGD(model.parameters(), cell["rate"], edges.MOMENTUM)
    training.train(data.problem(model), cell, optimizer)
    if cell["part"] == "rule":
        return _late_rule(model, data, cell, noise_samples)
    probe = data.training[0][:JUDGED], data.training[1][:JUDGED]
    loss, learnt = training.loss_and_accuracy(model, probe)[0], LEARNT_LOSS * math.log(data.classes)
    start, rows = copy.deepcopy(model.state_dict()), []

    def stays(name: str, size: int, rate: float) -> bool:
        """Whether the network is still better than guessing after all steps."""
        model.load_state_dict(start)
        optimizer = searched[name][0](model.parameters(), rate)
        finite = _take_steps(model, optimizer, data, cell, size)
        return finite and training.loss_and_accuracy(model, probe)[0] < learnt

    def passes(name: str, size: int, rates: Tensor) -> Tensor:
        """Which rates do, by bisection: larger ones than one that fails are taken to fail."""
        lost = bisect_left(rates[0].tolist(), True, key=lambda rate: not stays(name, size, rate))
        return torch.arange(rates.shape[1])[None] < lost

    for name, (_, section) in searched.items():
        where = {"optimizer": name, "criterion": CRITERIA[0], "resolution": section.resolution}
        for size in cell["batch_sizes"]:
            # a grid of each search's own, so that its coarseness shows in the spread over seeds
            rng = generator(cell["seed"], "section", name, size)
            shift = section.resolution ** float(torch.rand((), generator=rng))
            own = replace(section, low=shift * section.low, high=shift * section.high)
            edge = math.nan
            if loss < learnt:
                edge = float(edges.largest_passing(partial(passes, name, size), own, seeds=1))
            rows.append({**where, "loss": loss, "batch_size": size, "edge": edge})
            report("edges of stability", len(rows), len(searched) * len(cell["batch_sizes"]))
    return rows


def _take_steps(
    model: nn.Module, optimizer: Optimizer, data: training.Images, cell: Cell, size: int
) -> bool:
    """Take the cell's number of steps on batches of a size; False where the loss is not finite."""
    (x, y), rng = data.training, generator(cell["seed"], "order", size)
    order, half = torch.randperm(len(x), generator=rng), cell["precision"] == "bfloat16"
    model.train()
    # dropout draws from the global generator
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(derived_seed(cell["seed"], "dropout", size))
        for step in range(cell["steps"]):
            if len(order) < size:
                order = torch.randperm(len(x), generator=rng)
            rows, order = order[:size].to(x.device), order[size:]
            with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
                loss = cross_entropy(model(x[rows]), y[rows])
            if step % 10 == 0 and not bool(loss.isfinite()):
                return False
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return True


def _late_rule(
    model: nn.Module, data: training.Images, cell: Cell, noise_samples: int
) -> list[Row]:
    """λ₁ of batches and of the cell's number of samples."""
    problem, seed = training.curvature_problem(model, data, cell), cell["seed"]
    full = eigenpairs(hessian(problem), 1, tol=edges.TOL, seed=seed)
    sizes, shown = tuple(cell["batch_sizes"]), []
    for size in sizes:
        batches = batch_eigenpairs(problem, size, edges.BATCHES, seed=seed, tol=edges.TOL)
        shown.append(torch.as_tensor(batches.largest[:, 0], dtype=torch.float64))
    predicted = {}
    if noise_samples:
        noise = variance(problem, probes=4, seed=seed, samples=noise_samples).hessian_variance
        model_of = partial(predict, full, noise, population=problem.num_samples, model="additive")
        values = [float(model_of(size).largest) for size in sizes]
        predicted["additive"] = torch.tensor(values, dtype=torch.float64)
    where = cell["network"], f"after {cell['epochs']} epochs", problem.num_samples, sizes
    largest = float(full.values[0])
    return edges.rule_rows(RateRule(*where, largest, predicted, torch.stack(shown)))


def rule_of(ground: PreparedSubject, point: str, seed: int) -> RateRule:
    """The rule "at the start", or "trained" by SGD at half its largest stable rate."""
    require_choice(point, "point", POINTS)
    if point == "at the start":
        return edges.rule_at(ground, edges.start_of(ground), point, seed)
    trained = edges.train_from(ground, _half_edge(ground, "sgd", seed), seed)
    return edges.rule_at(ground, trained, point, seed)


def scaled_runs(ground: PreparedSubject, optimizer: str, seed: int) -> ScalingRuns:
    """Runs under the three rules, from half the largest stable rate of the reference batch size."""

    def run(size: int, rates: Tensor) -> edges.Outcome:
        settings = StackedSettings(optimizer, rates.expand(ground.subject.seeds, -1))
        return edges.outcome(ground, settings, size, seed)

    base = _half_edge(ground, optimizer, seed)
    return edges.scaling_runs(ground, optimizer, "rate", base, RULES, run)


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
    subject, first = ground.subject, ground.first_losses()

    def stable(size: int, rates: Tensor) -> Tensor:
        cells = ground.cells(StackedSettings(optimizer, rates))
        task = f"{subject.network}, {optimizer}, B = {size}"
        met = cells.train(size, subject.steps, seed, task)
        ended = cells.evaluate(ground.probe)[0] < LEARNT_LOSS * first
        return ended if criterion == "trains" else ended & (met < RISE * first).all(0)

    return ground.search(optimizer, criterion, section, stable)


PAPER = kit.image_setting(
    "cifar100", 45_000, 5000, epochs=34, batch=512, augmented=True, precision="bfloat16"
)
PAPER |= {"network": "VGG-16", "rate": 0.04, "steps": 100, "samples": 4096}

ASSUMPTIONS = kit.sentences(f"""
    A run trains if its mean loss over 2,000 training images ends below {LEARNT_LOSS:g} of the
      initial one.
    It is steady if, in addition, the mean batch loss of no tenth of the run exceeds {RISE:g} of the
      initial loss: a criterion of ours.
    The number of steps is the same at every batch size, so that all runs have equally long to
      diverge.
    The largest stable rate is bracketed to within a factor of {SECTION.resolution:.2f}.
    λ₁ is that of the Hessian at the start, and after as many steps of SGD at half its largest
      stable rate.
    Whether the largest stable rate is 2/λ₁ within a factor of 2 is a question of ours: the thesis
      calls Eq. 5.34 a pessimistic bound.
    Images have zero mean and unit standard deviation; no weight decay, no augmentation, no
      schedule. n counts initial weights.
    Scaling rules start from half the largest stable rate at the reference batch; the thesis takes
      all of it.
    An error counts as unchanged if it rises by at most {SAME_ERROR:g} %, as the thesis's own does
      from B = 128 to 1,024.
    No claim about scaling is judged if the error of the baseline run exceeds {WORST_REFERENCE:g} %.
    The slope that should be 1 is fitted up to the rule's threshold, if at least three batch sizes
      lie there.
    If not, it is also fitted up to the batch size where the measured rates stop growing, which is
      itself fitted to the same rates.
    That end of the fit, the bound on the baseline run, and the 1.5 % were chosen after the results
      had been seen.
    “Unstable later” means a training loss near that of guessing after all epochs, at a rate below
      the largest stable one.
    This was added after the results had been seen; losses during training are not stored, nor is
      the variance that causes it.
    A run that diverged counts with the validation error of guessing, 90 %.
    At paper scale VGG-16 is trained for {PAPER["epochs"]} of 300 epochs at a constant rate, on the
      line of the thesis's rates, and the edges are searched from there.
    There a rate is stable if after {PAPER["steps"]} steps the loss over {JUDGED:,} images is below
      {LEARNT_LOSS:g} of that of guessing, as in batch-norm-rates.
    There the largest stable rate is bracketed to within a factor of
      {LATE["sgd"][1].resolution:.2f}, and each search has its own start. Rates above one that fails
      are assumed to fail too.
    The search does not begin at the initial weights, because VGG-16 without batch norm stays at the
      loss of guessing for longer than that.
    There λ₁ is that of the first of these networks, over {PAPER["samples"]:,} images, and of
      batches of up to 256.
    Claims on scaled runs of VGG-16 by SGD are judged in batch-norm-rates, where its runs are; at
      first they were counted here too, as not testable.
    No network has batch normalisation: Figures 5.7c, 5.8b, 5.9 and 5.10 are those of
      batch-norm-rates.
""")


def run(cell: Cell, device: str) -> list[Row]:
    """The edges by every criterion, the rule, or the scaled runs, as ``part`` says."""
    if "steps" in cell and "model" not in cell:
        return run_late(cell, device)
    ground, root = edges.prepare_cell(cell, device), cell["root"]
    if cell["part"] == "rule":
        return edges.rule_rows(rule_of(ground, cell["point"], root))
    if cell["part"] == "scaling":
        return edges.scaling_rows(scaled_runs(ground, cell["optimizer"], root))
    criteria = [criterion for optimizer, criterion in SEARCHES if optimizer == cell["optimizer"]]
    frontiers = (stable_rates(ground, cell["optimizer"], root, criterion) for criterion in criteria)
    return [row for frontier in frontiers for row in edges.edge_rows(frontier)]


EXPERIMENT = kit.Experiment(
    "stable-rates",
    "The largest stable learning rate over batch sizes, and what comes of scaling it",
    kit.SPECTRAL,
    "§§5.7 and 5.8.1, Figures 5.7a, 5.7b, 5.8a, 5.15 and 5.16",
    {
        **{
            scale: edges.edge_cells(SCALES[scale], list(NAMES), RULE_CELLS, SCALED_OPTIMIZERS)
            for scale in ("smoke", "cpu")
        },
        "paper": late_cells(PAPER, edges.powers(4, 10), (16, 64, 256), seeds=3),
    },
    *(run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 without batch norm on CIFAR-100, 45,000 training images, 300 epochs, batches of 128"
        " to 4,096; seeds are not in the text."
    ),
    sizes=(kit.Size("VGG-16", "cifar100", 45_000, 300),),
)
