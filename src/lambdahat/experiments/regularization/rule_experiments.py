"""XOR, XOR detection, MNIST, a synthetic regression and CIFAR-10 under the rules of Table 4.1
(§5.3–5.6 of the thesis).

The thesis prints no widths, epochs or batch sizes. Its norms tell: L2 Stopped over SGD Large is
e^(−λt) at the stop, L2 over SGD Large at the end, and SGD Large itself is σ√P.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from lambdahat._core.rng import derived_seed, generator
from lambdahat.data.built_in import synthetic_regression, xor, xord
from lambdahat.data.catalogue import load
from lambdahat.experiments import kit
from lambdahat.experiments.kit import Cell, sentences
from lambdahat.experiments.regularization import rule_claims
from lambdahat.experiments.regularization.learning_rules import (
    ABSOLUTE,
    DROPOUT,
    DROPPED,
    RULES,
    SETTINGS,
)
from lambdahat.experiments.regularization.rule_runs import (
    MoreSeeds,
    Pair,
    RuleTask,
    logistic,
    quadratic,
    right,
    rule_cells,
    run_rules,
)
from lambdahat.models.initial import initialize
from lambdahat.models.perceptrons import ACTIVATIONS, draw_weights, mlp, xor_network, xord_network


def _network(name: str, make: Any, cell: Cell, regime: str, dropout: float, seed: int) -> nn.Module:
    activation = cell["activation"]
    variance = SETTINGS[name, activation].spread[regime == "large"]
    network: nn.Module = make(
        width=cell["width"], activation=activation, variance=variance, dropout=dropout, seed=seed
    )
    return network


def _points(cell: Cell) -> tuple[Pair, None]:
    """All four points for every seed; there is no test part."""
    x, y = xor()
    seeds = len(cell["seeds"])
    return (x.expand(seeds, *x.shape), y.expand(seeds, *y.shape)), None


def _detections(cell: Cell) -> tuple[Pair, Pair]:
    """12 training and 10 test samples of each seed's own; targets are ±1."""
    splits = [xord(seed=derived_seed(seed, "xord data")) for seed in cell["seeds"]]
    training, test = (
        (torch.stack([x for x, _ in pairs]), 2.0 * torch.stack([y for _, y in pairs]) - 1)
        for pairs in zip(*splits, strict=True)
    )
    return training, test


def _errors(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Accuracy, and the sum of squared errors ("we report the sum of the error", §5.3)."""
    logits = outputs[..., 0]
    return {
        "accuracy": (logits * targets > 0).double().mean(-1),
        "error": (logits - targets).square().sum(-1),
    }


SIDES = {"mnist": (1, 28), "digits": (1, 8), "cifar10": (3, 32)}


def _perceptron(name: str, cell: Cell, regime: str, dropout: float, seed: int) -> nn.Module:
    """Two hidden layers; weights and biases from N(0, s²), s the spread of Table 4.2."""
    activation, width = cell["activation"], cell["width"]
    spread = SETTINGS[name, activation].spread[regime == "large"]
    inputs, outputs = (256, 1) if name == "synthetic" else (math.prod(_shape(cell)), 10)
    model = mlp([inputs, width, width, outputs], activation, dropout=dropout)
    return draw_weights(model, spread**2, seed)


def _shape(cell: Cell) -> tuple[int, int, int]:
    channels, side = SIDES[cell["data"]]
    return channels, side // cell["shrink"], side // cell["shrink"]


def _convolutional(cell: Cell, regime: str, dropout: float, seed: int) -> nn.Module:
    """Two convolutions with pooling and a hidden layer, with Glorot-normal weights."""
    activation, width = cell["activation"], cell["width"]
    channels, side, _ = _shape(cell)
    kind, filters = ACTIVATIONS[activation], max(width // 16, 4)
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Unflatten(1, (channels, side, side)),
            nn.Conv2d(channels, filters, 3, padding=1),
            kind(),
            nn.AvgPool2d(2),
            nn.Conv2d(filters, 2 * filters, 3, padding=1),
            kind(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * filters * (side // 4) ** 2, width),
            kind(),
            nn.Dropout(dropout),
            nn.Linear(width, 10),
        )
    spread = SETTINGS["cifar10", activation].spread[regime == "large"]
    initialize(model, seed, "glorot", partial(_glorot, spread))
    return model


def _glorot(scale: float, layer: nn.Module, rng: torch.Generator) -> None:
    """N(0, 2·scale/(fan_in + fan_out)), biases 0."""
    if isinstance(layer, nn.Linear | nn.Conv2d):
        field = layer.weight[0, 0].numel()
        deviation = math.sqrt(2 * scale / (field * (layer.weight.shape[0] + layer.weight.shape[1])))
        layer.weight.normal_(0.0, deviation, generator=rng)
        assert layer.bias is not None
        layer.bias.zero_()


def _images(cell: Cell) -> tuple[Pair, Pair]:
    """Pixels in [0, 1] as rows, the same images for every seed: the first in random order."""
    name = cell["data"]
    # CIFAR-10 may be unpacked into other batches than the published archive's
    options: dict[str, Any] = {"verify": name != "cifar10", "normalization": "unit"}
    split = load(name, **({} if name == "digits" else options))
    scale, seeds, parts = float(split.train[0].max()), len(cell["seeds"]), []
    for part, (x, y) in zip(("training", "test"), split, strict=True):
        kept = torch.randperm(len(x), generator=generator(0, "images", part))[: cell[part]]
        x, y = x[kept] / scale, y[kept]
        x = (avg_pool2d(x, cell["shrink"]) if cell["shrink"] > 1 else x).flatten(1)
        parts.append((x.expand(seeds, *x.shape), y.expand(seeds, *y.shape)))
    return parts[0], parts[1]


def _regression(cell: Cell) -> tuple[Pair, Pair]:
    """A data set of each seed's own (§4.2.3), its targets less the mean of the training part."""
    samples = cell["training"] + cell["test"]
    held_out = cell["test"] / samples
    splits = [synthetic_regression(samples, held_out=held_out, seed=seed) for seed in cell["seeds"]]
    means = torch.stack([split.train[1].mean() for split in splits]).unsqueeze(1)
    training, test = (
        (torch.stack([x for x, _ in pairs]), torch.stack([y[:, 0] for _, y in pairs]) - means)
        for pairs in zip(*splits, strict=True)
    )
    return training, test


def _mean_square(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"error": (outputs[..., 0] - targets).square().mean(-1)}


SILENT = sentences("""
    λ is not multiplied by the learning rate, as in Table 4.1: the printed norms fall by e^(−λt).
    Selective L2 compares |(Hθ)_i| with ω times its maximum over the layer, weights and biases
      together.
    L2 Stopped Selective uses the L2 rate before τ and the Selective L2 rate after it.
    Metric is run with λHθ, H being the Hessian of the batch, and with λ|H|θ, the absolute Hessian
      of §4.3.
    Where both were run, the thesis's claims are judged with |H|, and those with H count as claims
      of ours.
    |H|θ is found by 100 Lanczos steps for XOR, 40 for XORD and 20 elsewhere.
""")
SMALL_NETWORKS = sentences(f"""
    The thesis has 10 seeds; 20 here at cpu scale, 100 at paper scale.
    The effective number of first-layer vectors is (Σ‖w‖²)²/Σ‖w‖⁴; the thesis judges by eye.
    {SILENT[0]}
    Weights and biases are drawn from N(0, σ²), σ² as in Table 4.2 (§4.4 speaks of a uniform draw
      instead).
""")
DROPS = (
    f"Dropout (share {DROPPED}) from the large regime is added for comparison; the thesis does not"
    " run it."
)
MORE = (
    "At paper scale the claims on speed that 100 seeds left undecided have more seeds, planned from"
    " the first 100: on XOR 500 of SGD Large and L2, and with tanh 260 of SGD Small and Metric"
    " Small with |H|; on XORD with tanh 160 of SGD Small and SGD Large, where 225 were planned, to"
    " keep the stored runs small. Of the additional seeds only the training curves are stored."
)
SHORT = (
    "Below paper scale the network is narrower and training shorter: learning rates and Metric's"
    " rate are multiplied by the gain (steep for ReLU from the large regime), the other rates by"
    " the stretch in the cells' settings, so that ‖θ‖ shrinks by the same factor."
)
DEVIATION = (
    'The column "init σ²" is read as a standard deviation: only then do the printed norms of both'
    " regimes give the same P."
)


def _small(data: str, training: int, test: int, batch: int, seeds: int, **more: Any) -> list[Cell]:
    """Cells of XOR or XORD, whose rules and dropout train in three groups."""
    more = {"eigenvalues": 3, "groups": (RULES, (DROPOUT,), ABSOLUTE), **more}
    together = min(seeds, 20)
    return rule_cells(data, training, test, batch=batch, seeds=seeds, together=together, **more)


def _experiment(
    name: str,
    task: RuleTask,
    title: str,
    part: str,
    scales: dict[str, list[Cell]],
    assumptions: tuple[str, ...],
    size: str,
    samples: int = 0,
) -> kit.Experiment:
    return kit.Experiment(
        name,
        f"Six learning rules from small and large weights on {title}",
        kit.REGULARIZATION,
        part,
        scales,
        partial(run_rules, task),
        partial(rule_claims.claims_of, task.name),
        partial(rule_claims.tables_of, task.name),
        partial(rule_claims.charts_of, task.name),
        (*assumptions, rule_claims.RULE, rule_claims.DECAY, *rule_claims.READ),
        f"{size} runs, rates of Table 4.2; widths, epochs and batch sizes are only in figures that"
        f" the text lacks: {task.epochs:,} epochs are what the printed norms imply.",
        (kit.Size(data=task.name, samples=samples, epochs=task.epochs, rate=kit.PRINTED_RATES),),
    )


XOR_TASK = RuleTask(
    "xor", 400, partial(_network, "xor", xor_network), _points, logistic, right, depth=100
)
_xor = partial(_small, "xor", 4, 0, 4, epochs=400, width=64)
_XOR_NOTES = sentences("""
    64 hidden units, whose norms under SGD come near the printed ones in both regimes.
    The networks have biases: a tanh network without them is odd and cannot learn XOR.
    All four points in every step and 400 epochs: what the printed norms of L2 and L2 Stopped imply.
    Mean cross-entropy of two softmax outputs.
""")
XOR = _experiment(
    "xor",
    XOR_TASK,
    "XOR",
    "§§5.3 and 5.7, Tables 5.1 and 5.2, Figures 5.3–5.8 and 5.35",
    {
        "smoke": _xor(2, epochs=10, width=16, points=2),
        "cpu": _xor(20),
        "paper": _xor(
            100,
            more=(
                *(MoreSeeds(kind, ("SGD Large", "L2"), 500) for kind in ("tanh", "relu")),
                MoreSeeds("tanh", ("SGD Small", ABSOLUTE[0]), 260),
            ),
        ),
    },
    (*_XOR_NOTES, *SMALL_NETWORKS, *SILENT[1:], DROPS, MORE),
    "the four points of XOR, one hidden layer, 10",
)

XORD_TASK = RuleTask(
    "xord", 1000, partial(_network, "xord", xord_network), _detections, quadratic, _errors, depth=40
)
_xord = partial(_small, "xord", 12, 10, 3, epochs=1000, width=32)
_XORD_NOTES = sentences("""
    32 filters with biases: the largest power of 2 at which SGD is stable at the printed rates (64
      diverge).
    Batches of 3 and 1,000 epochs: what the printed norms of L2 and L2 Stopped with ReLU imply.
    One linear output, loss ½(f − y)² with y = ±1, mean over a batch: the printed errors exceed a
      softmax's.
    Every seed draws its own 12 training and 10 test samples, the same for all rules.
    If the smallest difference were a share for errors too, the claim about the lowest test errors
      with tanh would be undecided.
""")
XORD = _experiment(
    "xord",
    XORD_TASK,
    "XOR detection",
    "§5.3, Tables 5.1 and 5.2, Figures 5.9–5.16 and 5.39",
    {
        "smoke": _xord(2, epochs=3, width=8, points=3),
        "cpu": _xord(20),
        "paper": _xord(100, more=(MoreSeeds("tanh", ("SGD Small", "SGD Large"), 160),)),
    },
    (*_XORD_NOTES, *SMALL_NETWORKS, *SILENT[1:], DROPS, MORE),
    "XOR detection by one convolutional layer; the numbers of samples are not in the text, 10",
)

MNIST_TASK = RuleTask("mnist", 400, partial(_perceptron, "mnist"), _images, logistic, right)
_few = partial(rule_cells, eigenvalues=2, points=2)  # smoke scale: little of everything
_MNIST_NOTES = sentences("""
    Batches of 64: 280 epochs of 938 steps at λ = 1e-5 take SGD Large's 4,160.49 to 301.0 (printed:
      301.13).
    400 epochs: at their end L2 has taken it to 97.7 (printed: 98.86).
    1,720 units in both hidden layers: σ√P is then the printed norm in both regimes.
    At paper scale 60 of the 400 epochs at the printed rates, τ at the same share of the run, and
      matrix products of training in TF32; curvature is in float32.
    There 3 seeds left it undecided whether Metric generalises worse with ReLU from the small
      regime: these two rules have a planned 6.
""")
MNIST = _experiment(
    "rules-mnist",
    MNIST_TASK,
    "MNIST",
    "§§5.4 and 5.7, Tables 5.1 and 5.2, Figures 5.17–5.22, 5.36 and 5.39",
    {
        "smoke": _few("digits", 100, 100, 8, 4, 50, 2, 2, gain=27.0, steep=8.0, stretch=2000.0),
        "cpu": rule_cells(
            "mnist", 2000, 2000, 64, 96, 64, 5, 5, gain=27.0, steep=8.0, stretch=122.0
        ),
        "paper": rule_cells(
            *("mnist", 60_000, 10_000, 1720, 60, 64, 3, 3),
            curvature=10_000,
            precision="tf32",
            more=(MoreSeeds("relu", ("SGD Small", "Metric Small"), 6, whole=True),),
        ),
    },
    (*_MNIST_NOTES, DEVIATION, SHORT, *SILENT),
    "MNIST, 60,000 training and 10,000 test images, 10",
    60_000,
)

SYNTHETIC_TASK = RuleTask(
    "synthetic", 1000, partial(_perceptron, "synthetic"), _regression, quadratic, _mean_square
)
_SYNTHETIC_NOTES = sentences(f"""
    Batches of 16 and 1,000 epochs: what the printed norms of L2 and L2 Stopped with ReLU imply.
    200 units in both hidden layers: σ√P is then SGD Large's printed norm with ReLU.
    {DEVIATION}
    Targets are centred by their training mean: the printed errors of Metric, 27.6, are those of a
      network that predicts the mean.
    Errors are mean squared errors; every seed draws its own data.
""")
_synthetic = partial(rule_cells, "synthetic", 1600, 400, 200, curvature=1600)
SYNTHETIC = _experiment(
    "rules-synthetic",
    SYNTHETIC_TASK,
    "a synthetic regression",
    "§§5.5 and 5.7, Tables 5.1 and 5.2, Figures 5.23–5.28, 5.37 and 5.39",
    {
        "smoke": _few("synthetic", 80, 40, 8, 4, 40, 2, 2, stretch=100.0),
        "cpu": _synthetic(150, 16, 4, 4, gain=3.0, steep=3.0, stretch=6.67),
        "paper": _synthetic(1000, 16, 30, 10),
    },
    (*_SYNTHETIC_NOTES, SHORT, *SILENT),
    "2,000 points in 256 dimensions, a fifth of them for testing, 30",
    1600,
)

CIFAR_TASK = RuleTask("cifar10", 600, _convolutional, _images, logistic, right)
_CIFAR_NOTES = sentences("""
    Batches of 200: 490 epochs of 250 steps at λ = 1e-5 take SGD Large's 169.67 to 49.8 (printed:
      50.47).
    600 epochs: at their end L2 has taken it to 37.9 (printed: 40.03).
    Two convolutions (64 and 128 filters at paper scale) with average pooling, a hidden layer of
      1,024.
    Figure 4.8 is not in the text, and the printed norms need more units: orders are compared, not
      norms.
    The scale of the Glorot-normal draw is the column "init σ²" (§4.4).
""")
CIFAR = _experiment(
    "rules-cifar10",
    CIFAR_TASK,
    "CIFAR-10",
    "§§5.6 and 5.7, Tables 5.1 and 5.2, Figures 5.29–5.34, 5.38 and 5.39",
    {
        "smoke": _few("digits", 50, 50, 16, 2, 50, 2, 2, stretch=10_000.0),
        "cpu": rule_cells(
            *("cifar10", 600, 1000, 64, 240, 20, 3, 3),
            gain=5.0,
            steep=5.0,
            stretch=20.8,
            shrink=2,
            curvature=600,
        ),
        "paper": rule_cells("cifar10", 50_000, 10_000, 1024, 600, 200, 3, 1, curvature=5000),
    },
    (*_CIFAR_NOTES, SHORT, *SILENT),
    "CIFAR-10, 50,000 training and 10,000 test images, 10",
    50_000,
)
