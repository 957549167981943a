"""Learning rates over batch sizes with batch normalisation (Figures 5.7c, 5.8b, 5.9 and 5.10)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scipy.stats import linregress, spearmanr

from lambdahat.experiments.averaging.averaged_training import network, parameters_of
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    gap,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import (
    MISSING,
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    mean_of,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.experiments.kit.training import final_row, images, train_by_sgd
from lambdahat.experiments.minibatch.largest_rates import (
    FACTOR,
    FALL,
    GUESSED,
    LOST,
    RULES,
    SAME,
    UNKNOWN,
)
from lambdahat.experiments.minibatch.stability_edges import FEWEST
from lambdahat.results.charts import Chart, Series

STABLE = 4  # times the reference, 512 against 128: up to there the thesis has no drop
OSCILLATES = 2.0  # times the change per epoch at the reference
NORM = "-BN"
ON_IMAGENET = "Figure 5.10"
DECAY = 5e-4  # γ of Figures 5.7c and 5.9; Figure 5.10 has a tenth of it
UNSTABLE = "§5.7.0.3"
BESIDE = "§5.7.0.2"


@dataclass(frozen=True)
class Setup:
    """The ends of one network's runs at one weight decay."""

    ends: Rows

    @property
    def network(self) -> str:
        """Its name as in ``averaged_training``."""
        return str(self.ends[0]["network"])

    @property
    def decay(self) -> float:
        """γ."""
        return float(self.ends[0]["decay"])

    @property
    def name(self) -> str:
        """Network and weight decay in words."""
        return f"{self.network}, γ = {self.decay:g}"

    @property
    def residual(self) -> bool:
        """Whether it stands for the WideResNet."""
        return not self.network.startswith("VGG")

    @property
    def normed(self) -> bool:
        """Whether it has batch normalisation: a residual network always has."""
        return self.residual or self.network.endswith(NORM)

    @property
    def figure(self) -> str:
        """That of the thesis which its runs under the linear rule stand beside."""
        if not self.normed:
            return "Figure 5.7a"
        if not self.residual:
            return "Figure 5.7c"
        return ON_IMAGENET if self.decay < DECAY else "Figure 5.9"

    @property
    def reference(self) -> int:
        """The batch size that rates are scaled from."""
        return int(self.ends[0]["reference"])

    @property
    def sizes(self) -> list[int]:
        """The batch sizes of the linear rule."""
        return sorted(self.ends.where(rule="linear").distinct("batch"))

    @property
    def far(self) -> int:
        """The largest batch size up to eight times the reference."""
        return max(size for size in self.sizes if size <= FACTOR * self.reference)

    def at(self, size: int, rule: str = "linear") -> Rows:
        """The runs of a rule at a batch size; at the reference all rules are one."""
        return self.ends.where(rule="linear" if size == self.reference else rule, batch=size)

    def rise(self, size: int) -> Reading:
        """The validation error above that of the reference, seed by seed."""
        return gap(self.at(size), self.at(self.reference), "error")


def setups_of(rows: Rows) -> list[Setup]:
    """One for each network and weight decay whose reference has run."""
    ends = rows.where(kind="end")
    keys = dict.fromkeys((row["network"], row["decay"]) for row in ends)
    found = [Setup(ends.where(network=network, decay=decay)) for network, decay in keys]
    return [setup for setup in found if setup.reference in setup.sizes]


def claims(rows: Rows) -> list[Claim]:
    """Every claim, for each network and weight decay that it is made of; n counts seeds."""
    found: list[Claim] = []
    setups = setups_of(rows)
    for setup in setups:
        if setup.normed:
            found.append(_stable(setup))
        if setup.residual:
            found += _recovering(setup)
        else:
            found += [*(_dropping(setup) if setup.normed else []), _instability_claim(setup)]
        found += _rule_claims(setup) + ([_link_claim(setup)] if links_of(setup) else [])
    for setup, twin in _twins(setups):
        found += _against(setup, twin)
    return [
        replace(claim, barrier=MISSING) if claim.source == ON_IMAGENET else claim for claim in found
    ]


def _stable(setup: Setup) -> Claim:
    """The worst size of those up to four times the reference."""
    inside = [
        size for size in setup.sizes if size <= STABLE * setup.reference and size != setup.reference
    ]
    known = [(size, setup.rise(size)) for size in inside]
    size, worst = max(
        known, key=lambda item: abs(item[1].value), default=(setup.reference, UNKNOWN)
    )
    sizes = ", ".join(map(str, inside))
    sentence = (
        f"{setup.name}: at α ∝ B the validation error at B = {sizes} is that at {setup.reference}"
    )
    unit = f" % at B = {size}, the worst"
    unmet = unlearnt(setup)
    return Claim(sentence, setup.figure, "stable", worst, "within", 0.0, SAME, unit, unmet)


def _dropping(setup: Setup) -> list[Claim]:
    """Figure 5.7c, "a similar pattern" to 5.7a: a small drop at B = 1,024, a larger at 2,048."""
    far, largest, unmet = setup.far, setup.sizes[-1], unlearnt(setup)
    sentence = f"{setup.name}: at α ∝ B the validation error rises by little at B = {far}"
    published = "1.47 % without batch norm, “a similar pattern” with it"
    reading = setup.rise(far)
    found = [
        Claim(sentence, setup.figure, published, reading, "below", SAME, unit=" %", unmet=unmet)
    ]
    if largest > far:
        sentence = f"{setup.name}: it is higher still at B = {largest}"
        published = "“a larger drop still” without batch norm, “a similar pattern” with it"
        reading = gap(setup.at(largest), setup.at(far), "error")
        found.append(Claim(sentence, setup.figure, published, reading, unit=" %", unmet=unmet))
    return found


def _instability_claim(setup: Setup) -> Claim:
    """A VGG that has become unstable does not train, or without batch norm diverges."""
    size, bound = setup.sizes[-1], FALL * GUESSED
    losses = {row["seed"]: _loss(row) for row in setup.at(size)}
    word = "do not train" if setup.normed else "diverge"
    rate = setup.at(size)[0]["rate"]
    unit = f" = training loss at α = {rate:.3g}, B = {size}; {bound:.3g} is near guessing"
    sentence = f"{setup.name}: unstable runs {word}"
    reading = mean_of(list(losses.values()))
    unmet = unlearnt(setup) or calm(setup)
    return Claim(sentence, UNSTABLE, word, reading, bound=bound, unit=unit, unmet=unmet)


def _loss(row: dict[str, float]) -> float:
    """The training loss; a run that diverged has a guess's."""
    loss = row.get("training loss")
    return GUESSED if loss is None else float(loss)


def _recovering(setup: Setup) -> list[Claim]:
    """An oscillating WideResNet recovers at a lower rate, but not to the peak performance."""
    size, unmet = setup.sizes[-1], unlearnt(setup) or smooth(setup)
    source = f"{UNSTABLE}, {setup.figure}"
    part = setup.at(size)
    found = Claims(unit=" %", unmet=unmet)
    sentence = f"{setup.name}, B = {size}: the error falls when the rate is reduced"
    reading = paired_difference(part.paired("before"), part.paired("error"))
    found.add(sentence, source, "oscillatory trajectories converge", reading)
    sentence = f"{setup.name}, B = {size}: it ends above that at B = {setup.reference}"
    found.add(sentence, source, "“they never reach peak performance”", setup.rise(size))
    return found


def _rule_claims(setup: Setup) -> list[Claim]:
    """The linear rule against the others at eight times the reference batch size."""
    far, found = setup.far, Claims()
    where, ours = f"{setup.name}, B = {far} from {setup.reference}", setup.normed
    printed = "35.65 against 38.92 %" + (" without batch norm" if ours else "")
    for rule in ("square root", "constant"):
        other = setup.at(far, rule)
        if not len(other) or far == setup.reference:
            continue
        text = f"{where}: linear scaling generalises better than the {_rule(rule)}"
        told = printed if rule == "square root" else ""
        value = gap(other, setup.at(far), "error")
        unmet = unlearnt(setup)
        found.add(text, BESIDE, told, value, unit=" %", unmet=unmet, own=ours or rule == "constant")
        if rule == "square root":
            sentence = f"{where}: linear scaling ends further from the start than the {_rule(rule)}"
            published = "145.76 against 67.44" + (" without batch norm" if ours else "")
            reading = gap(setup.at(far), other, "distance")
            found.add(sentence, BESIDE, published, reading, unmet=unlearnt(setup), own=ours)
    return found


def _rule(rule: str) -> str:
    return "constant rate" if rule == "constant" else rule


def _link_claim(setup: Setup) -> Claim:
    """Figure 5.8: without batch norm the further the better, with it "even" the other way round."""
    links = mean_of(list(links_of(setup).values()))
    unit, unmet = " = rank correlation", unlearnt(setup)
    if not setup.normed:
        sentence = f"{setup.name}: the further from the start, the lower the error"
        source = f"{BESIDE}, Figure 5.8a"
        return Claim(sentence, source, "a strong link", links, "below", unit=unit, unmet=unmet)
    sentence = f"{setup.name}: the further from the start, the higher the error"
    source = f"{BESIDE}, Figure 5.8b"
    published = "“distance … increasing as test error also increases”"
    return Claim(sentence, source, published, links, unit=unit, unmet=unmet, own=setup.residual)


def links_of(setup: Setup, sizes: Sequence[int] | None = None) -> dict[int, float]:
    """Spearman's rank correlation of distance and error over batch sizes, by seed."""
    return {
        seed: float(spearmanr(*points).statistic) for seed, points in _points(setup, sizes).items()
    }


def slopes_of(setup: Setup, sizes: Sequence[int] | None = None) -> dict[int, float]:
    """The size of the slope of the error over the distance in doublings, in per cent, by seed."""
    return {
        seed: abs(float(linregress([math.log2(value) for value in far], errors).slope))
        for seed, (far, errors) in _points(setup, sizes).items()
    }


def _points(
    setup: Setup, sizes: Sequence[int] | None = None
) -> dict[int, tuple[list[float], list[float]]]:
    """Distances and errors under the linear rule by seed, of runs that did not diverge.

    Of the sizes up to eight times the reference, or of ``sizes`` among them; without seeds that
    have too few runs, or runs that are all alike.
    """
    inside = [size for size in sizes or setup.sizes if size <= setup.far]
    found = {}
    for seed in setup.ends.distinct("seed"):
        part = setup.ends.where(rule="linear", seed=seed, batch=inside, diverged=False)
        far, errors = part.values("distance"), part.values("error")
        if len(far) >= FEWEST and len(set(far)) > 1 and len(set(errors)) > 1:
            found[seed] = far, errors
    return found


def _twins(setups: list[Setup]) -> list[tuple[Setup, Setup]]:
    """Networks with batch norm, each with the same without."""
    plain = {(setup.network, setup.decay): setup for setup in setups if not setup.normed}
    keys = [
        (setup, (setup.network.removesuffix(NORM), setup.decay)) for setup in setups if setup.normed
    ]
    return [(setup, plain[key]) for setup, key in keys if key in plain]


def _against(setup: Setup, twin: Setup) -> list[Claim]:
    """With against without batch norm: distance and error, the cost of scaling, largest rates."""
    unmet = unlearnt(setup) or unlearnt(twin)
    common = sorted(set(setup.sizes) & set(twin.sizes))
    links = [
        {seed: abs(value) for seed, value in links_of(each, common).items()}
        for each in (setup, twin)
    ]
    slopes = [slopes_of(each, common) for each in (setup, twin)]
    size = common[-1]
    rises = [_rises(each, size) for each in (setup, twin)]
    found = Claims(unmet=unmet)
    sentence = f"{setup.name}: the link of distance and error is weaker than without batch norm"
    source = f"{BESIDE}, Figure 5.8b"
    unit = " = difference of |rank correlation|"
    found.add(sentence, source, "“much weaker”", paired_difference(*links), "below", unit=unit)
    sentence = f"{setup.name}: it is smaller in magnitude than without batch norm"
    source = f"{BESIDE}, Figure 5.8b"
    published = "“much smaller in magnitude”"
    unit = " % of error per doubling of the distance"
    found.add(sentence, source, published, paired_difference(*slopes), "below", unit=unit)
    sentence = f"{setup.name}: α ∝ B costs less at B = {size} than without batch norm"
    reading = paired_difference(*rises)
    found.add(sentence, "after Figure 5.7", "", reading, "below", unit=" % of rise", own=True)
    if len(setup.ends.where(rule="search")) and len(twin.ends.where(rule="search")):
        sentence = (
            f"{setup.name}: the largest rate that trains at B = {setup.reference} is larger"
            " than without it"
        )
        published = "“a greater range of permissible learning rates”"
        reading = paired_difference(largest_rates(setup), largest_rates(twin))
        found.append(Claim(sentence, "§5.7.0.1", published, reading, unit=" decades", unmet=unmet))
    return found


def _rises(setup: Setup, size: int) -> dict[int, float]:
    base = setup.at(setup.reference).paired("error")
    return {
        seed: error - base[seed]
        for seed, error in setup.at(size).paired("error").items()
        if seed in base
    }


def largest_rates(setup: Setup) -> dict[int, float]:
    """log₁₀ of the largest rate tried at the reference that trains, by seed."""
    tried = setup.ends.where(batch=setup.reference, rule=["search", "linear"])
    found: dict[int, float] = {}
    for row in tried:
        if _loss(row) < FALL * GUESSED:
            found[row["seed"]] = max(found.get(row["seed"], -math.inf), math.log10(row["rate"]))
    return found


def unlearnt(setup: Setup) -> str:
    """Why scaling is not judged: the baseline run's error exceeds 50 %; "" if it does not."""
    base = over_seeds(setup.at(setup.reference), "error").value
    return (
        ""
        if base <= LOST
        else f"{setup.network} at B = {setup.reference}, which is scaled, errs on {base:.0f} %"
    )


def calm(setup: Setup) -> str:
    """Why the largest batch is not unstable: its error does not exceed the reference's."""
    rise = setup.rise(setup.sizes[-1]).value
    return (
        f"no run is unstable: at B = {setup.sizes[-1]} the error is {rise:+.1f} % off"
        if rise <= SAME
        else ""
    )


def smooth(setup: Setup) -> str:
    """Why the largest batch says nothing of oscillations: it has none."""
    here, base = (
        over_seeds(setup.at(size), "oscillation").value
        for size in (setup.sizes[-1], setup.reference)
    )
    if here >= OSCILLATES * base:
        return ""
    return (
        f"no run oscillates: {here:.1f} % per epoch at B = {setup.sizes[-1]}, {base:.1f} at"
        f" {setup.reference}"
    )


COLUMNS = split_header(
    "error | training error | training loss | validation loss | distance | before | oscillation"
)
HEADER = split_header(
    "rule | B | rate | validation error, % | training error, % | training loss | "
    "validation loss | distance | error before the rate falls, % | "
    "its change per epoch, % | diverged"
)
# §5.7.0.2: VGG-16 without batch norm on CIFAR-100, the only figures that the thesis prints
PRINTED_ERRORS = {"linear": {128: 34.18, 1024: 35.65}, "square root": {1024: 38.92}}
PRINTED_TEST = {"linear": (145.76, 34.64), "square root": (67.44, 37.55)}  # distance, test error


def tables(rows: Rows) -> list[Table]:
    """The ends of all runs, distance against error, and the rates tried at the reference."""
    setups = setups_of(rows)
    out = [_runs(setup) for setup in setups]
    lines = [
        (
            setup.name,
            str(mean_of(list(links_of(setup).values()))),
            str(mean_of(list(slopes_of(setup).values()))),
        )
        for setup in setups
    ]
    if setups:
        header = ("network", "rank correlation", "% of error per doubling of the distance")
        out.append(
            Table("Distance from the start and validation error, α ∝ B", header, tuple(lines))
        )
    tried = [setup for setup in setups if len(setup.ends.where(rule="search"))]
    return out + ([_search(tried)] if tried else [])


def _runs(setup: Setup) -> Table:
    lines = TableLines()
    ends = setup.ends.where(rule=["linear", "square root", "constant"])
    for rule, size in dict.fromkeys((row["rule"], row["batch"]) for row in ends):
        part = ends.where(rule=rule, batch=size)
        lost = sum(row["diverged"] for row in part)
        lines.add(
            rule,
            str(size),
            f"{part[0]['rate']:.3g}",
            *means(part, *COLUMNS),
            f"{lost} of {len(part)}",
        )
    first = setup.ends[0]
    title = (
        f"{setup.name}, {first['parameters']:,} parameters, {first['data']}: after"
        f" {first['epochs']} epochs"
    )
    return Table(title, HEADER, tuple(lines))


def _runs_at_reference(setup: Setup) -> Rows:
    """All runs at the reference."""
    return setup.ends.where(batch=setup.reference)


def _search(setups: list[Setup]) -> Table:
    rates = sorted(
        {rate for setup in setups for rate in _runs_at_reference(setup).distinct("rate")}
    )
    lines = tuple(
        (
            f"{rate:g}",
            *(
                str(over_seeds(_runs_at_reference(setup).where(rate=rate), column))
                for setup in setups
                for column in ("error", "training loss")
            ),
        )
        for rate in rates
    )
    header = (
        "rate",
        *(
            f"{setup.network}, {column}"
            for setup in setups
            for column in ("validation error, %", "training loss")
        ),
    )
    return Table(f"Rates at B = {setups[0].reference}", header, lines)


def charts(rows: Rows) -> list[Chart]:
    """The error over batch sizes by rule, over epochs by batch size, and over the distance."""
    setups, epochs = setups_of(rows), rows.where(kind="epoch", rule="linear")
    out = []
    for setup in setups:
        mine = epochs.where(network=setup.network, decay=setup.decay)
        out += [_over_sizes(setup), _over_epochs(setup, mine), _over_distance(setup)]
    tried = [setup for setup in setups if len(setup.ends.where(rule="search"))]
    if tried:
        series = tuple(
            curve(setup.name, _runs_at_reference(setup), "error", "rate") for setup in tried
        )
        title = f"Rates at B = {tried[0].reference}"
        axis = "validation error, %"
        out.append(Chart(title, "learning rate", axis, series, x_log=True, source="§5.7.0.1"))
    return out


def _run_rules(setup: Setup) -> list[str]:
    return [
        rule for rule in ("linear", "square root", "constant") if len(setup.ends.where(rule=rule))
    ]


def _over_sizes(setup: Setup) -> Chart:
    series = []
    for rule in _run_rules(setup):
        part = setup.ends.where(rule=rule)
        if rule != "linear":
            part = Rows([*setup.at(setup.reference), *part])
        series.append(curve(rule, part, "error", "batch"))
        printed = {} if setup.normed else PRINTED_ERRORS.get(rule, {})
        if printed:
            label = f"{rule}, thesis, VGG-16 on CIFAR-100"
            heights = list(printed.values())
            series.append(Series(label, list(printed), heights, style="points", published=True))
    title = f"{setup.name}: error over batch sizes"
    axis = "validation error, %"
    caption = f"Rates scaled from B = {setup.reference}."
    return Chart(
        title, "batch size B", axis, tuple(series), x_log=True, source=setup.figure, caption=caption
    )


def _over_epochs(setup: Setup, epochs: Rows) -> Chart:
    series = tuple(curve(f"B = {size}", epochs.where(batch=size), "error") for size in setup.sizes)
    title = f"{setup.name}: error over epochs, α ∝ B"
    axis = "validation error, %"
    caption = "The rate falls in the second half."
    return Chart(title, "epoch", axis, series, source=setup.figure, caption=caption)


def _over_distance(setup: Setup) -> Chart:
    series = []
    for rule in _run_rules(setup):
        part = setup.ends.where(rule=rule, diverged=False)
        series.append(Series(rule, part.values("distance"), part.values("error"), style="points"))
        if not setup.normed and rule in PRINTED_TEST:
            distance, error = PRINTED_TEST[rule]
            label = f"{rule}, thesis, VGG-16 on CIFAR-100"
            series.append(Series(label, [distance], [error], style="points", published=True))
    title = f"{setup.name}: error over distance"
    across = "distance from the start"
    source = "Figure 5.8b" if setup.normed else "Figure 5.8a"
    return Chart(title, across, "validation error, %", tuple(series), x_log=True, source=source)


@dataclass(frozen=True)
class NormedSubject:
    """A network with weight decay ``decay``, trained at the rate ``base``·B/128 for all ``sizes``
    B.

    128 is the scale's ``batch``. ``compared`` has the sizes of other rules, "square root" and
    "constant". All ``rates`` are tried at B = 128. ``seeds``, unless 0, is instead of the scale's.
    """

    network: str
    decay: float
    base: float
    sizes: tuple[int, ...]
    compared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rates: tuple[float, ...] = ()
    seeds: int = 0


@dataclass(frozen=True)
class NormScale(Scale):
    """One scale; ``batch`` is the batch size that rates are scaled from."""

    subjects: tuple[NormedSubject, ...]
    side: int = 0
    augmented: bool = False


def cells(config: NormScale) -> list[Cell]:
    """Network × rule × batch size × seed, and network × rate × seed at the reference.

    At the reference all rules are the same: its cell is that of the linear rule.
    """
    base = settings_of(config, "subjects", "batch", "seeds") | {"reference": config.batch}
    found: list[Cell] = []
    for subject in config.subjects:
        plans = [("linear", size) for size in subject.sizes]
        plans += [(rule, size) for rule, sizes in subject.compared for size in sizes]
        runs = [
            (rule, size, subject.base * (size / config.batch) ** RULES[rule])
            for rule, size in plans
        ]
        runs += [("search", config.batch, rate) for rate in subject.rates]
        own = base | {"network": subject.network, "decay": subject.decay}
        found += [
            {**own, "rule": rule, "batch": size, "rate": rate, "seed": seed}
            for rule, size, rate in runs
            for seed in range(subject.seeds or config.seeds)
        ]
    return found


def run(cell: Cell, device: str) -> list[Row]:
    """A row for each epoch, and one for the end with both losses in evaluation mode."""
    found = images(cell, device)
    model = network(cell["network"], found.shape, found.classes, cell["seed"]).to(device)
    trained = train_by_sgd(model, found, cell, cell["decay"])
    guess = 100 * (1 - 1 / found.classes)
    rows = [_epoch(row, guess) for row in trained.epochs]
    end = {
        **rows[-1],
        **trajectory(rows, cell["epochs"]),
        "parameters": parameters_of(model),
        "kind": "end",
    }
    if not end["diverged"]:
        last = final_row(model, found)
        end |= {"training loss": last["loss"], "training error": 100 - last["training accuracy"]}
    return [*rows, end]


def _epoch(row: Mapping[str, Any], guess: float) -> Row:
    """An epoch's row, errors in per cent; a diverged network has chance error and no distance."""
    figures = {
        "training loss": row["loss"],
        "validation loss": row.get("validation_loss"),
        "distance": row["distance"],
    }
    lost = any(value is None or not math.isfinite(value) for value in figures.values())
    wrong = {"training error": row["accuracy"], "error": row.get("validation_accuracy")}
    return {
        "kind": "epoch",
        "epoch": row["epoch"],
        "rate now": row["learning_rate"],
        "diverged": lost,
        **(dict.fromkeys(figures) if lost else figures),
        **(
            dict.fromkeys(wrong, guess)
            if lost
            else {name: 100 * (1 - value) for name, value in wrong.items()}
        ),
    }


def trajectory(rows: Sequence[Row], epochs: int) -> Row:
    """The validation error "before" the rate is reduced, its mean change from epoch to epoch after
    a quarter of the run, at the full rate ("oscillation"), and the "least" over all epochs.
    """
    errors = [row["error"] for row in rows]
    full = epochs // 2 + 1  # epochs of which t/T ≤ ½, from t = 0
    changes = [
        abs(after - before) for before, after in pairwise(errors[:full][max(0, epochs // 4 - 1) :])
    ]
    oscillation = sum(changes) / len(changes) if changes else None
    return {"before": errors[:full][-1], "oscillation": oscillation, "least": min(errors)}


ASSUMPTIONS = sentences(f"""
    CIFAR-10 in place of CIFAR-100 and ImageNet-32: 16,384 images at 8 × 8 (cpu), 10,240 at 32 × 32
      (paper).
    8 epochs (cpu) and 20 (paper) of the thesis's 300, by its schedule, Eq. 5.37.
    Crops and flips, which the thesis has, at paper alone. Momentum is 0.9.
    On a CPU a small network stands for VGG-16, and WideResNet-10×1 for 28×10; on a GPU PreResNet-20
      does.
    All batches are whole: the number of images is a multiple of 2,048. Rate times steps is the same
      at every B.
    The thesis does not print α₀ of VGG-16BN: 0.1 (cpu) and 0.05 (paper) here. Others are tried on a
      CPU.
    Images, epochs and rates of cpu were chosen by trial runs from seeds 0 and 1: that at B = 128
      was to learn.
    The rules on what is judged were set after those, and before the other runs.
    VGG-16 without batch norm has α₀ = 0.02, where the thesis has 0.01 and 300 epochs; γ is the same
      as with it.
    Validation images stand for the thesis's test images too. n counts seeds: start, images and
      batches.
    An error is kept if it changes by at most {SAME:g} %, as the thesis's own does from B = 128 to
      1,024.
    Nothing is judged of scaling where the run at B = 128 errs on more than {LOST:g} % itself.
    Of “unstable” runs nothing is judged where the largest B errs on at most {SAME:g} % more than B
      = 128.
    A run oscillates if its error changes {OSCILLATES:g} times as much per epoch as that at B = 128.
    That is read from the end of the first quarter of the run on, as long as the rate is full.
    The similar solutions, of which distance and error are compared, are those up to B = 1,024.
    A run does not train if its loss ends above {FALL:g} of a guess's. One that diverged errs as a
      guess does.
    Other rules with batch norm, and the cost of α ∝ B with and without it, are claims of ours.
""")

LARGE = ("square root", (1024, 2048)), ("constant", (1024, 2048))
FAR = ("square root", (1024,)), ("constant", (1024,))
LONG = (32, 128, 256, 512, 1024, 2048)
SHORT = (128, 512, 1024, 2048)
FEW = (128, 512, 2048)
TINY = (16, 32, 64, 128, 256)
FAR_TINY = ("square root", (128,)), ("constant", (128,))

# data set, training and held-out samples, epochs, seeds
SMOKE = ("digits", 256, 128, 4, 2)
CPU = ("cifar10", 16_384, 4096, 8, 5)
PAPER = ("cifar10", 10_240, 4096, 20, 3)
EXPERIMENT = Experiment(
    "batch-norm-rates",
    "Learning rates scaled with the batch size, with batch normalisation",
    SPECTRAL,
    "§5.7, Figures 5.7c, 5.8b, 5.9 and 5.10",
    {
        "smoke": NormScale(
            *SMOKE,
            (
                NormedSubject("VGG-4×4-BN", 5e-4, 0.1, TINY, FAR_TINY, (10.0,)),
                NormedSubject("WideResNet-10×1", 5e-5, 0.1, TINY[::2], seeds=1),
                NormedSubject("VGG-4×4", 5e-4, 0.1, (16, *TINY[2:]), FAR_TINY[:1], (10.0,)),
            ),
            batch=16,
        ),
        "cpu": NormScale(
            *CPU,
            (
                NormedSubject("VGG-4×16-BN", 5e-4, 0.1, (64, *LONG[1:]), LARGE, (0.3, 1.0, 3.0)),
                NormedSubject("VGG-4×16", 5e-4, 0.1, (64, *SHORT), FAR[:1], (0.3, 1.0)),
                NormedSubject("WideResNet-10×1", 5e-4, 0.1, FEW, seeds=3),
                NormedSubject("WideResNet-10×1", 5e-5, 0.1, FEW, seeds=3),
            ),
            side=8,
        ),
        "paper": NormScale(
            *PAPER,
            (
                NormedSubject("VGG-16-BN", 5e-4, 0.05, LONG, FAR),
                NormedSubject("PreResNet-20", 5e-4, 0.1, LONG, FAR),
                NormedSubject("PreResNet-20", 5e-5, 0.1, SHORT),
                NormedSubject("VGG-16", 5e-4, 0.02, (32, *SHORT), FAR[:1]),
            ),
            augmented=True,
        ),
    },
    *(cells, run, claims, tables, charts),
    ASSUMPTIONS,
    size=(
        "VGG-16 with and without batch norm and WideResNet-28×10 on CIFAR-100 (45,000 training"
        " images), WideResNet-28×10 on ImageNet-32 (a million), 300 epochs; seeds are not in the"
        " text."
    ),
    sizes=(
        Size("VGG-16-BN", "cifar100", 45_000, 300),
        Size("VGG-16", "cifar100", 45_000, 300),
        Size("WideResNet-28×10", "cifar100", 45_000, 300),
        Size("WideResNet-28×10", "imagenet32", 1_000_000, 300),
    ),
)
