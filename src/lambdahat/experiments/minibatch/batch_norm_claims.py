"""What §5.7 of the spectral thesis says of networks with batch normalisation at rates in
proportion to B, as code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.stats import linregress, spearmanr

from lambdahat.experiments.kit.cells import Rows, gap, over_seeds
from lambdahat.experiments.kit.claims import MISSING, Claim, Reading, mean_of, paired_difference
from lambdahat.experiments.minibatch.frontiers import FEWEST
from lambdahat.experiments.minibatch.rate_claims import FACTOR, FALL, GUESSED, LOST, SAME, UNKNOWN

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
        """Its name as in ``averaging.networks``."""
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
            found += [*(_dropping(setup) if setup.normed else []), _untrained(setup)]
        found += _rules(setup) + ([_linked(setup)] if links_of(setup) else [])
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
    return Claim(
        f"{setup.name}: at α ∝ B the validation error at B = {sizes} is that at {setup.reference}",
        setup.figure,
        "stable",
        worst,
        "within",
        0.0,
        SAME,
        f" % at B = {size}, the worst",
        unlearnt(setup),
    )


def _dropping(setup: Setup) -> list[Claim]:
    """Figure 5.7c has "a similar pattern" to 5.7a: a small drop at B = 1,024, and a larger one
    still at 2,048.
    """
    far, largest, unmet = setup.far, setup.sizes[-1], unlearnt(setup)
    found = [
        Claim(
            f"{setup.name}: at α ∝ B the validation error rises by little at B = {far}",
            setup.figure,
            "1.47 % without batch norm, “a similar pattern” with it",
            setup.rise(far),
            "below",
            SAME,
            unit=" %",
            unmet=unmet,
        )
    ]
    if largest > far:
        found.append(
            Claim(
                f"{setup.name}: it is higher still at B = {largest}",
                setup.figure,
                "“a larger drop still” without batch norm, “a similar pattern” with it",
                gap(setup.at(largest), setup.at(far), "error"),
                unit=" %",
                unmet=unmet,
            )
        )
    return found


def _untrained(setup: Setup) -> Claim:
    """A VGG that has become unstable does not train, or without batch norm diverges."""
    size, bound = setup.sizes[-1], FALL * GUESSED
    losses = {row["seed"]: _loss(row) for row in setup.at(size)}
    word = "do not train" if setup.normed else "diverge"
    rate = setup.at(size)[0]["rate"]
    unit = f" = training loss at α = {rate:.3g}, B = {size}; {bound:.3g} is near guessing"
    return Claim(
        f"{setup.name}: unstable runs {word}",
        UNSTABLE,
        word,
        mean_of(list(losses.values())),
        bound=bound,
        unit=unit,
        unmet=unlearnt(setup) or calm(setup),
    )


def _loss(row: dict[str, float]) -> float:
    """The training loss; a run that diverged has a guess's."""
    loss = row.get("training loss")
    return GUESSED if loss is None else float(loss)


def _recovering(setup: Setup) -> list[Claim]:
    """A WideResNet that oscillates comes back when the rate is reduced, and never reaches the
    peak performance.
    """
    size, unmet = setup.sizes[-1], unlearnt(setup) or smooth(setup)
    source = f"{UNSTABLE}, {setup.figure}"
    part = setup.at(size)
    return [
        Claim(
            f"{setup.name}, B = {size}: the error falls when the rate is reduced",
            source,
            "oscillatory trajectories converge",
            paired_difference(part.paired("before"), part.paired("error")),
            unit=" %",
            unmet=unmet,
        ),
        Claim(
            f"{setup.name}, B = {size}: it ends above that at B = {setup.reference}",
            source,
            "“they never reach peak performance”",
            setup.rise(size),
            unit=" %",
            unmet=unmet,
        ),
    ]


def _rules(setup: Setup) -> list[Claim]:
    """The linear rule against the others, eight times from the reference: the thesis has it of
    VGG-16 without norm.
    """
    far, found = setup.far, []
    where, ours = f"{setup.name}, B = {far} from {setup.reference}", setup.normed
    printed = "35.65 against 38.92 %" + (" without batch norm" if ours else "")
    for rule in ("square root", "constant"):
        other = setup.at(far, rule)
        if not len(other) or far == setup.reference:
            continue
        found.append(
            Claim(
                f"{where}: linear scaling generalises better than the {_rule(rule)}",
                BESIDE,
                printed if rule == "square root" else "",
                gap(other, setup.at(far), "error"),
                unit=" %",
                unmet=unlearnt(setup),
                own=ours or rule == "constant",
            )
        )
        if rule == "square root":
            found.append(
                Claim(
                    f"{where}: linear scaling ends further from the start than the {_rule(rule)}",
                    BESIDE,
                    "145.76 against 67.44" + (" without batch norm" if ours else ""),
                    gap(setup.at(far), other, "distance"),
                    unmet=unlearnt(setup),
                    own=ours,
                )
            )
    return found


def _rule(rule: str) -> str:
    return "constant rate" if rule == "constant" else rule


def _linked(setup: Setup) -> Claim:
    """Figure 5.8: without batch norm the further the better, with it "even" the other way round."""
    links = mean_of(list(links_of(setup).values()))
    unit, unmet = " = rank correlation", unlearnt(setup)
    if not setup.normed:
        return Claim(
            f"{setup.name}: the further from the start, the lower the error",
            f"{BESIDE}, Figure 5.8a",
            "a strong link",
            links,
            "below",
            unit=unit,
            unmet=unmet,
        )
    return Claim(
        f"{setup.name}: the further from the start, the higher the error",
        f"{BESIDE}, Figure 5.8b",
        "“distance … increasing as test error also increases”",
        links,
        unit=unit,
        unmet=unmet,
        own=setup.residual,
    )


def links_of(setup: Setup, sizes: Sequence[int] | None = None) -> dict[int, float]:
    """Spearman's rank correlation of distance and error over batch sizes, by seed: those of
    ``_points``.
    """
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
    """With against without batch norm: the link of distance and error, the rates that train, how
    far scaling goes.
    """
    unmet = unlearnt(setup) or unlearnt(twin)
    common = sorted(set(setup.sizes) & set(twin.sizes))
    links = [
        {seed: abs(value) for seed, value in links_of(each, common).items()}
        for each in (setup, twin)
    ]
    slopes = [slopes_of(each, common) for each in (setup, twin)]
    size = common[-1]
    rises = [_rises(each, size) for each in (setup, twin)]
    found = [
        Claim(
            f"{setup.name}: the link of distance and error is weaker than without batch norm",
            f"{BESIDE}, Figure 5.8b",
            "“much weaker”",
            paired_difference(*links),
            "below",
            unit=" = difference of |rank correlation|",
            unmet=unmet,
        ),
        Claim(
            f"{setup.name}: it is smaller in magnitude than without batch norm",
            f"{BESIDE}, Figure 5.8b",
            "“much smaller in magnitude”",
            paired_difference(*slopes),
            "below",
            unit=" % of error per doubling of the distance",
            unmet=unmet,
        ),
        Claim(
            f"{setup.name}: α ∝ B costs less at B = {size} than without batch norm",
            "after Figure 5.7",
            "",
            paired_difference(*rises),
            "below",
            unit=" % of rise",
            unmet=unmet,
            own=True,
        ),
    ]
    if len(setup.ends.where(rule="search")) and len(twin.ends.where(rule="search")):
        found.append(
            Claim(
                f"{setup.name}: the largest rate that trains at B = {setup.reference} is larger"
                " than without it",
                "§5.7.0.1",
                "“a greater range of permissible learning rates”",
                paired_difference(largest_rates(setup), largest_rates(twin)),
                unit=" decades",
                unmet=unmet,
            )
        )
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
    """Why runs say nothing of scaling: that at the reference errs on more than half itself.
    Empty where it does not.
    """
    base = over_seeds(setup.at(setup.reference), "error").value
    return (
        ""
        if base <= LOST
        else f"{setup.network} at B = {setup.reference}, which is scaled, errs on {base:.0f} %"
    )


def calm(setup: Setup) -> str:
    """Why the largest batch says nothing of unstable runs: its error is no higher than the
    reference's.
    """
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
