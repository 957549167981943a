"""Adam and KFAC over rates and dampings, beside SGD (Figures 6.5 and 6.6, Tables 6.1–6.3)."""

from __future__ import annotations

from collections.abc import Iterator

from lambdahat.experiments import kit
from lambdahat.experiments.curvature import second_order
from lambdahat.experiments.curvature.second_order import Key, at, damped, damped_cells, keys
from lambdahat.experiments.kit import Chart, Claim, Rows, Series, Table

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
UNCHANGED = 1.0  # points of training error: "effectively unchanged"
MATCH = 0.25  # points of validation error: "match or even beat"
THEIRS = "VGG-16, CIFAR-100"


def claims(rows: Rows) -> Iterator[Claim]:
    """Claims on KFAC, on Adam, and on the sharpness at the end of both."""
    what, where, ends = kit.subject(rows), "§6.5.1, Figure 6.5", rows.where(kind="end")
    best = min(LARGE, key=lambda key: kit.over_seeds(at(rows, key), "error").value)
    slower = f"{what}: KFAC, δ/α = 10, α = 0.01 to 0.0001"
    undamped = f"{what}: KFAC, α = 0.0001, δ = 0.001 to 0.0001"
    adam = f"{what}: Adam, α = 0.0004"
    text = f"""
        slower: {slower}: the training error stays (within {UNCHANGED:g} point)
          | {where} | effectively unchanged ({THEIRS}) | within {UNCHANGED:g} of 0
        rises more: {undamped}: the validation error rises more than the training error
          | §6.5.1 | significantly larger ({THEIRS})
        default: {adam}, δ = 10⁻⁸: its validation error is above SGD's
          | §6.5.2, Figure 6.6 | significantly underperforms ({THEIRS})
        over: {adam}, δ = 0.1 against 0.0004: over-damping raises the validation error again
          | §6.5.2 | decreases the performance ({THEIRS})
        best: {what}: Adam, α = 0.001, δ = {best[2]:g}: it matches or beats SGD (excess of error
          below {MATCH:g} points) | §6.5.2 | match or even beat ({THEIRS}) | below {MATCH:g}
    """
    claim = kit.ClaimTexts(text, unit=" points")
    sgd, default, better = ends.where(optimizer="SGD"), at(rows, DEFAULT), at(rows, BETTER)
    first, last, least = (at(rows, key) for key in (CONSTANT[0], CONSTANT[-1], LOWERED[-1]))
    reading, unmet = kit.gap(last, first, "training error"), kit.saturation_reason(last, first)
    yield claim("slower", reading, unmet=unmet)
    words = f"{slower}: the validation error rises"
    yield _worse(rows, words, where, CONSTANT[-1], CONSTANT[0])
    words = f"{undamped}: the validation error rises"
    yield _worse(rows, words, "§6.5.1", LOWERED[-1], CONSTANT[-1])
    reading = kit.gap_of_gaps((least, least), (last, last), "error", "training error")
    yield claim("rises more", reading, unmet=kit.saturation_reason(least, last))
    yield claim("default", kit.gap(default, sgd, "error"))
    words = f"{adam}, δ = 10⁻⁸ against 0.0004: the validation error is higher"
    yield _worse(rows, words, "§6.5.2, Table 6.1", DEFAULT, BETTER)
    yield claim("over", kit.gap(at(rows, OVER), better, "error"))
    yield claim("best", kit.gap(at(rows, best), sgd, "error"))
    yield from _sharpness_claims(rows, what)


def _worse(rows: Rows, sentence: str, source: str, upper: Key, lower: Key) -> Claim:
    """``upper`` has a larger validation error than ``lower``, as printed."""
    before, after = PRINTED[lower][1], PRINTED[upper][1]
    bound, printed = -kit.least(before, after), f"{before:g} to {after:g} % accuracy ({THEIRS})"
    reading = kit.gap(at(rows, upper), at(rows, lower), "error")
    sentence += f" by more than {bound:.2g} points"
    return Claim(sentence, source, printed, reading, bound=bound, unit=" points")


def _sharpness_claims(rows: Rows, what: str) -> Iterator[Claim]:
    """Compare λ₁ of two settings unless both fit all images: then λ₁ vanishes with the loss."""
    usual = ("Adam", 4e-4, 1e-3), DEFAULT, LARGE[1], ("Adam", 1e-3, 1e-3)
    for words, lower, upper in (
        ("Adam, α = 0.0004: less damping ends sharper (δ = 0.001 to 10⁻⁸)", *usual[:2]),
        ("Adam, α = 0.001: less damping ends sharper (δ = 0.0075 to 0.001)", *usual[2:]),
        ("KFAC, δ/α = 10: a smaller α ends sharper (0.01 to 0.0001)", *CONSTANT[::2]),
        ("KFAC, α = 0.0001: less damping ends sharper (δ = 0.001 to 0.0001)", *LOWERED[::2]),
    ):
        low, high = PRINTED[lower][0], PRINTED[upper][0]
        before, after = at(rows, lower), at(rows, upper)
        bound, fitted = kit.least_decades(low, high), kit.saturation_reason(before, after)
        unmet = f"{fitted}, and λ₁ falls with what is left of the loss" if fitted else ""
        sentence = f"{what}: {words}: λ₁, by more than {bound:.2g} decades"
        said = sentence, "Tables 6.1 to 6.3", f"{low:g} to {high:g} ({THEIRS})"
        reading = kit.decades(after, before, "largest")
        yield Claim(*said, reading, bound=bound, unit=" decades", unmet=unmet)


def tables(rows: Rows) -> Iterator[Table]:
    """Every setting: errors, λ₁, and the printed λ₁ and accuracy."""
    part, lines = rows.where(kind="end"), []
    for key in keys(part, 3):
        printed = ["", ""]
        if key in PRINTED:
            largest, accuracy = PRINTED[key]
            printed = [f"{largest:g}", f"{100 - accuracy:.2f}"]
        lines.append((*second_order.setting_line(rows, key), *printed))
    header = (
        "optimiser | α | δ | training error, % | validation error, % | λ₁ | diverged | "
        "λ₁ printed | error printed, %"
    )
    yield kit.table(f"{part[0]['network']}, {part[0]['data']}", header, lines)


def charts(rows: Rows) -> Iterator[Chart]:
    """Errors over epochs, and λ₁ and error over δ beside the printed ones."""

    def label(key: Key) -> str:
        return f"{key[0]}, α = {key[1]:g}" + (f", δ = {key[2]:g}" if key[2] else "")

    for optimizer, source in (("KFAC", "Figure 6.5"), ("Adam", "Figure 6.6")):
        shown = rows.where(optimizer=(optimizer, "SGD"))
        yield from second_order.error_charts(shown, 3, label, f", {optimizer}", source)
    for column, words in (
        ("largest", "λ₁ at the end"),
        ("error", "Validation error at the end, %"),
    ):
        axes, source = ("damping δ", words), "Tables 6.1 and 6.2"
        title, log = f"{words} over damping", column == "largest"
        over = _over_damping(rows, column)
        yield Chart(title, *axes, over, x_log=True, y_log=log, source=source)


def _over_damping(rows: Rows, column: str) -> tuple[Series, ...]:
    """One series for each optimiser and rate, ours and the printed."""
    out: list[Series] = []
    for name, rate in (key for key in keys(rows, 2) if key[0] != "SGD"):
        label = f"{name}, α = {rate:g}"
        part = rows.where(kind="end", optimizer=name, rate=rate)
        chosen = sorted(key for key in PRINTED if key in keys(part, 3))
        pairs, places = [PRINTED[key] for key in chosen], [key[2] for key in chosen]
        values = [top if column == "largest" else 100 - accuracy for top, accuracy in pairs]
        out.append(kit.curve(label, part, column, "damping"))
        out.append(Series(f"{label}, printed", places, values, style="points", published=True))
    return tuple(out)


ADAM = ((4e-4, 1e-8), (4e-4, 4e-4), (4e-4, 1e-3), (4e-4, 1e-1))
ADAM_FASTER = ((1e-3, 1e-3), (1e-3, 5e-3), (1e-3, 7.5e-3))
PLAIN = (
    damped("SGD", 0.01),
    *(damped("Adam", *pair) for pair in (*ADAM, *ADAM_FASTER)),
    *(damped(*key) for key in (*CONSTANT, *LOWERED[1:])),
)
SMOKE = kit.image_setting("digits", 120, 200, epochs=3, batch=40)
CPU = kit.image_setting("mnist", 1000, 4000, epochs=300, side=14, batch=32)
PAPER = kit.image_setting(
    "cifar100", 45_000, 5_000, epochs=20, augmented=True, precision="bfloat16"
)
EXPERIMENT = kit.Experiment(
    "adaptive-damping",
    "Adam and KFAC over rates and dampings, beside SGD",
    kit.SPECTRAL,
    "§6.5, Tables 6.1–6.3, Figures 6.5 and 6.6",
    {
        "smoke": damped_cells(SMOKE, "MLP-8", 120, PLAIN, seeds=2),
        "cpu": damped_cells(CPU, "MLP-100-100", 1000, PLAIN, seeds=5),
        "paper": damped_cells(PAPER, "VGG-16", 2000, PLAIN, seeds=5),
    },
    *(second_order.damped_run, claims, tables, charts),
    (
        *second_order.DAMPED_NOTES,
        *kit.sentences("""
            No weight decay, no batch norm. KFAC takes the empirical Fisher, renewed every ten
              steps.
            KFAC's first pair is read as α = 0.01, δ = 0.1, so that δ/α = 10 throughout; Table 6.2
              prints α = 0.1.
            Adam at δ = 0.1 is ours: over-damping is claimed and no value is given.
            At paper scale 45,000 images of CIFAR-100, with crops and flips, and 20 epochs; forward
              passes are in bfloat16. On a CPU a perceptron and 1,000 images of MNIST.
            Claims that are not testable are left out of Holm's correction, which is why
              over-damping is decided on a CPU.
            λ₁ of two runs is not compared if both fit every training image: it then falls with the
              vanishing loss.
        """),
        kit.LEAST_EFFECT,
    ),
    "VGG-16 without batch norm on CIFAR-100, linear schedule; epochs and seeds are not in the"
    " text.",
    (kit.Size("VGG-16", "cifar100"),),
)
