"""AdamW over dampings with batch norm and decoupled decay (§6.5.3, Figures 6.7 and 6.8)."""

from __future__ import annotations

from lambdahat.experiments.curvature.adaptive_damping import (
    SHARED,
    AdaptiveScale,
    DampedSetting,
    cells,
    run,
)
from lambdahat.experiments.kit.cells import Row, Rows, curve, gap, means, over_seeds
from lambdahat.experiments.kit.claims import MISSING, Claim, Claims, Table, TableLines, split_header
from lambdahat.experiments.kit.experiment import (
    SPECTRAL,
    Experiment,
    Size,
    saturated,
    sentences,
    subject,
)
from lambdahat.results.charts import Chart

RATE, LARGE_RATE = 1e-3, 3e-3
DEFAULT = 1e-8
SAME, MATCH = 1.0, 0.25  # points of training and of validation error
THEIRS = "VGG-16 with batch norm, CIFAR-100"
RESNET = "ResNet-50, ImageNet"
Key = tuple[str, float, float, float]


def _at(rows: Rows, key: Key, kind: str = "end") -> Rows:
    optimizer, rate, damping, decay = key
    return rows.where(kind=kind, optimizer=optimizer, rate=rate, damping=damping, decay=decay)


def _keys(rows: Rows) -> list[Key]:
    return list(dict.fromkeys(_key(row) for row in rows))


def _key(row: Row) -> Key:
    return row["optimizer"], row["rate"], row["damping"], row["decay"]


def _best(rows: Rows, decay: float) -> Key:
    """The damping above the default of least validation error at the standard rate."""
    found = [key for key in _keys(rows) if key[0] == "AdamW" and key[1] == RATE and key[3] == decay]
    return min(
        (key for key in found if key[2] > DEFAULT),
        key=lambda key: over_seeds(_at(rows, key), "error").value,
    )


def claims(rows: Rows) -> list[Claim]:
    """A larger δ helps with and without decay; AdamW with it reaches SGD."""
    found, what = Claims(), subject(rows)
    decays = sorted(rows.where(optimizer="AdamW").distinct("decay"))
    for decay in decays:
        usual, best = _at(rows, ("AdamW", RATE, DEFAULT, decay)), _at(rows, _best(rows, decay))
        where = f"{what}: AdamW, α = 0.001, γ = {decay:g}, δ = {best[0]['damping']:g} against 10⁻⁸"
        text = f"{where}: the validation error falls"
        printed = f"improves generalisation ({THEIRS})"
        found.add(text, "§6.5.2, Figure 6.7", printed, gap(usual, best, "error"), unit=" points")
        text = f"{where}: the training error does not rise (by {SAME:g} point)"
        printed = f"slightly assists training ({THEIRS})"
        value = gap(best, usual, "training error")
        unmet = saturated(best, usual)
        found.add(
            text, "§6.5.2, Figure 6.7", printed, value, "below", SAME, unit=" points", unmet=unmet
        )
    sgd, last = rows.where(kind="end", optimizer="SGD"), decays[-1]
    high = next(key for key in _keys(rows) if key[1] == LARGE_RATE)
    best = _at(rows, _best(rows, last))
    sentence = (
        f"{what}: AdamW, α = 0.001, γ = {last:g}, δ = {best[0]['damping']:g}: it matches SGD"
        f" (excess of error below {MATCH:g} points)"
    )
    published = f"matches ({RESNET}), outperforms ({THEIRS})"
    reading = gap(best, sgd, "error")
    found.add(sentence, "Figures 6.7, 6.8", published, reading, "below", MATCH, unit=" points")
    sentence = (
        f"{what}: AdamW, α = {high[1]:g}, γ = {last:g}, δ = {high[2]:g}: it surpasses SGD"
        " (validation error)"
    )
    published = f"surpasses ({RESNET})"
    reading = gap(sgd, _at(rows, high), "error")
    found.add(sentence, "Figure 6.8", published, reading, unit=" points", barrier=MISSING)
    return found


def tables(rows: Rows) -> list[Table]:
    """Every setting."""
    part, lines = rows.where(kind="end"), TableLines()
    for key in _keys(part):
        chosen = _at(rows, key)
        readings = means(chosen, "training error", "error", "largest")
        lines.add(
            key[0],
            *(f"{value:g}" for value in key[1:]),
            *readings,
            str(sum(chosen.values("diverged"))),
        )
    header = split_header(
        "optimiser | α | δ | γ | training error, % | validation error, % | λ₁ | diverged"
    )
    return [Table(f"{part[0]['network']}, {part[0]['data']}", header, tuple(lines))]


def charts(rows: Rows) -> list[Chart]:
    """Training and validation error over epochs."""
    out = []
    for column, words in (("training error", "Training error"), ("error", "Validation error")):
        series = tuple(curve(_label(key), _at(rows, key, "epoch"), column) for key in _keys(rows))
        out.append(Chart(words, "epoch", f"{column}, %", series, source="Figures 6.7, 6.8"))
    return out


def _label(key: Key) -> str:
    if key[0] == "SGD":
        return f"SGD, α = {key[1]:g}"
    return f"AdamW, α = {key[1]:g}, δ = {key[2]:g}, γ = {key[3]:g}"


DECOUPLED = (
    DampedSetting("SGD", 0.1, decay=5e-4),
    *(
        DampedSetting("AdamW", 1e-3, damping, decay)
        for decay in (0.0, 0.25)
        for damping in (1e-8, 1e-4, 1e-3)
    ),
    DampedSetting("AdamW", 3e-3, 1e-3, 0.25),
)

# data set, training and held-out samples, epochs, seeds
PAPER = ("cifar10", 45_000, 5_000, 30, 3)
EXPERIMENT = Experiment(
    "adaptive-batch-norm",
    "AdamW over dampings with batch norm and decoupled weight decay, beside SGD",
    SPECTRAL,
    "§6.5, Figures 6.7 and 6.8",
    {
        "smoke": AdaptiveScale(
            "digits", 60, 60, 2, 2, "WideResNet-10×1", 0, DECOUPLED, side=4, batch=30
        ),
        "cpu": AdaptiveScale(
            "mnist", 1000, 4000, 30, 5, "WideResNet-10×1", 256, DECOUPLED, side=8, batch=64
        ),
        "paper": AdaptiveScale(
            *PAPER, "VGG-16-BN", 2000, DECOUPLED, augmented=True, precision="bfloat16"
        ),
    },
    *(cells, run, claims, tables, charts),
    (
        *SHARED,
        *sentences("""
            AdamW at α = 0.001 with γ = 0 and 0.25, and the larger rate 0.003 of Figure 6.8; SGD at
              0.1 with L2 5e-4.
            The dampings 1e-4 and 1e-3 stand for those of Figures 6.7 and 6.8. λ₁ is taken in
              evaluation mode.
            CIFAR-10 in place of CIFAR-100 and of ImageNet, VGG-16 with batch norm in place of
              ResNet-50 too.
            On a CPU a small WideResNet and 1,000 images of MNIST, 8 × 8.
        """),
    ),
    size=(
        "VGG-16 with batch norm on CIFAR-100, ResNet-50 on ImageNet; epochs and seeds are not in"
        " the text."
    ),
    sizes=(Size("VGG-16-BN", "cifar100"), Size("ResNet-50", "imagenet")),
)
