"""XOR and XOR detection under the learning rules of Table 4.1: Tables 5.1 and 5.2 of the regularization thesis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lambdahat._check import require_count
from lambdahat._rng import derived_seed, generator
from lambdahat.data.logic import xor, xord
from lambdahat.experiments.regularization_claims import PUBLISHED, RuleRun, agreement, judge
from lambdahat.experiments.reproduction import Reproduction, Table, Verdict
from lambdahat.experiments.stacks import Member, Stack, train
from lambdahat.models.xor import xor_network, xord_network
from lambdahat.optim.regularizers import L2, Metric, Rule, SelectiveL2, StoppedL2, StoppedThenSelectiveL2, layers_of

SEEDS, ALL_SEEDS = 20, 100
DROPOUT = 0.2


@dataclass(frozen=True)
class Setting:
    """One column of Table 4.2, for one activation."""

    rates: dict[str, float]  # learning rates, by regime
    variances: dict[str, float]  # of the initial weights, by regime
    metric: float
    l2: float
    selective: float
    tau: int  # epochs
    omega: float


@dataclass(frozen=True)
class Task:
    """A data set with its network, and what the text leaves open."""

    name: str
    settings: dict[str, Setting]
    network: Callable[..., nn.Module]
    epochs: int
    batches: int  # an epoch
    assumptions: tuple[str, ...]


@dataclass(frozen=True)
class RegularizationResult(Reproduction):
    """The runs of all rules, regimes and activations, seed by seed, and the verdicts on what the thesis claims."""

    name: str
    runs: tuple[RuleRun, ...]
    verdicts: tuple[Verdict, ...]
    assumptions: tuple[str, ...]
    seeds: int
    seed: int

    def tables(self) -> tuple[Table, ...]:
        """Mean ± standard deviation over the seeds, with the published mean in brackets; then the rank agreement."""
        out = []
        for activation in dict.fromkeys(run.activation for run in self.runs):
            rows = [run for run in self.runs if run.activation == activation]
            names = list(rows[0].values)
            lines = tuple((run.label, *(_cell(self.name, run, name) for name in names)) for run in rows)
            title = f"{self.name.upper()}, {activation}: mean ± sd over {self.seeds} seeds [thesis]"
            out.append(Table(title, ("rule", *names), lines))
        ranks = agreement(self.name, self.runs)
        cells = tuple((f"{activation}, {name}", f"{tau:+.2f}") for (activation, name), tau in ranks.items())
        return (*out, Table("Order of the rules' means against the thesis's", ("quantity", "Kendall's τ"), cells))


def run_xor(full: bool = False, seed: int = 0, **choices: int) -> RegularizationResult:
    """All rules on XOR; 20 seeds, 100 with ``full``. ``choices`` may set ``seeds``, ``epochs`` and ``width``."""
    return _run(XOR, full, seed, **choices)


def run_xord(full: bool = False, seed: int = 0, **choices: int) -> RegularizationResult:
    """All rules on XOR detection; 20 seeds, 100 with ``full``. ``choices`` as for ``run_xor``."""
    return _run(XORD, full, seed, **choices)


def _run(
    task: Task, full: bool, seed: int, seeds: int | None = None, epochs: int | None = None, width: int | None = None
) -> RegularizationResult:
    require_count(seed, "seed", least=0)
    if width is not None:
        changed = f"{width} hidden units or filters, as asked for, not {task.assumptions[0].split()[0]}."
        task = replace(task, network=partial(task.network, width=width), assumptions=(changed, *task.assumptions[1:]))
    count = (ALL_SEEDS if full else SEEDS) if seeds is None else require_count(seeds, "seeds", least=2)
    length = task.epochs if epochs is None else require_count(epochs, "epochs")
    runs = tuple(run for activation in task.settings for run in _train_all(task, activation, count, length, seed))
    return RegularizationResult(task.name, runs, judge(task.name, runs), task.assumptions, count, seed)


def _train_all(task: Task, activation: str, seeds: int, epochs: int, seed: int) -> Iterator[RuleRun]:
    """All rules of one activation: those of Table 4.1 in one stack, dropout, whose networks differ, in another."""
    setting = task.settings[activation]
    starts = {regime: _models(task, activation, regime, seeds, seed) for regime in setting.rates}
    rules = _rules(setting, task.batches, layers_of(starts["small"][0]))
    members = [(label, Member(rule, starts[_regime(label)], setting.rates[_regime(label)])) for label, rule in rules]
    dropped = Member(None, _models(task, activation, "large", seeds, seed, dropout=DROPOUT), setting.rates["large"])
    data = _data(task, seeds, seed)
    for group in (members, [("Dropout Large", dropped)]):
        stack = Stack([member for _, member in group])
        steps, losses = epochs * task.batches, LOSSES[task.name]
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            torch.manual_seed(derived_seed(seed, task.name, activation, "dropout"))
            train(stack, _batches(data[0], task.batches, epochs, seed), losses, steps, f"{task.name} {activation}")
        stack.template.eval()
        measured = MEASURES[task.name](stack, data) | {"norm": stack.norms()}
        for row, (label, _) in enumerate(group):
            yield RuleRun(activation, label, {name: values[row].double() for name, values in measured.items()})


def _regime(label: str) -> str:
    return "small" if label.endswith("Small") else "large"


def _rules(setting: Setting, batches: int, layers: tuple[str, ...]) -> list[tuple[str, Rule | None]]:
    """Table 4.1: six rules, eight rule–regime pairs. Terms are subtracted with rates of their own, as it prints."""
    tau = setting.tau * batches
    stopped = StoppedThenSelectiveL2(setting.l2, tau, setting.omega, setting.selective, layers=layers, decoupled=True)
    return [
        ("SGD Small", None),
        ("SGD Large", None),
        ("Metric Small", Metric(setting.metric, decoupled=True)),
        ("Metric Large", Metric(setting.metric, decoupled=True)),
        ("L2", L2(setting.l2, decoupled=True)),
        ("Selective L2", SelectiveL2(setting.selective, setting.omega, layers=layers, decoupled=True)),
        ("L2 Stopped", StoppedL2(setting.l2, tau, decoupled=True)),
        ("L2 Stopped Selective", stopped),
    ]


def _models(task: Task, activation: str, regime: str, seeds: int, seed: int, dropout: float = 0.0) -> list[nn.Module]:
    """The same initial weights for every rule of a regime (§4.4)."""
    variance = task.settings[activation].variances[regime]
    streams = [derived_seed(seed, task.name, regime, index) for index in range(seeds)]
    return [task.network(activation=activation, variance=variance, dropout=dropout, seed=stream) for stream in streams]


Pair = tuple[Tensor, Tensor]


def _data(task: Task, seeds: int, seed: int) -> tuple[Pair, Pair]:
    """Training and test inputs (S, n, d) and labels (S, n) of every seed; XOR has no test part and repeats itself."""
    if task.name == "xor":
        x, y = xor()
        whole = x.expand(seeds, *x.shape), y.expand(seeds, *y.shape)
        return whole, whole
    splits = [xord(seed=derived_seed(seed, "xord data", index)) for index in range(seeds)]
    train_x, train_y = (torch.stack(parts) for parts in zip(*(split.train for split in splits), strict=True))
    test_x, test_y = (torch.stack(parts) for parts in zip(*(split.test for split in splits), strict=True))
    return (train_x, train_y), (test_x, test_y)


def _batches(data: Pair, batches: int, epochs: int, seed: int) -> Iterator[Pair]:
    """A new order every epoch, the same for all rules."""
    x, y = data
    rng = generator(seed, "order of batches")
    for _ in range(epochs):
        order = torch.randperm(x.shape[1], generator=rng) if batches > 1 else torch.arange(x.shape[1])
        for part in order.chunk(batches):
            yield x[:, part], y[:, part]


def _logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the softmax, network by network."""
    return cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)


def _quadratic(outputs: Tensor, labels: Tensor) -> Tensor:
    """Mean of ½(f − y)², y = ±1."""
    return 0.5 * (outputs[..., 0] - (2 * labels - 1)).square().mean(1)


def _accuracy(stack: Stack, data: tuple[Pair, Pair]) -> dict[str, Tensor]:
    (x, y), _ = data
    with torch.no_grad():
        right = (stack.per_member(stack.outputs(x)).argmax(-1) == y).double().mean(-1)
    return {"training accuracy": right}


def _errors(stack: Stack, data: tuple[Pair, Pair]) -> dict[str, Tensor]:
    """Sums of squared errors ("we report the sum of the error", §5.3)."""
    out = {}
    for name, (x, y) in zip(("training", "test"), data, strict=True):
        with torch.no_grad():
            found = stack.per_member(stack.outputs(x))[..., 0]
        targets = 2 * y - 1
        out[f"{name} accuracy"] = (found * targets > 0).double().mean(-1)
        out[f"{name} error"] = (found - targets).double().square().sum(-1)
    return out


def _cell(task: str, run: RuleRun, name: str) -> str:
    published = PUBLISHED[task, run.activation].get(run.label, {}).get(name)
    text = f"{run.mean(name):.3g} ± {run.deviation(name):.2g}"
    lost = len(run.values[name]) - len(run.finite(name))
    text += f" ({lost} diverged)" if lost else ""
    return text if published is None else f"{text} [{published:g}]"


LOSSES = {"xor": _logistic, "xord": _quadratic}
MEASURES = {"xor": _accuracy, "xord": _errors}

SILENT = (
    "λ is not multiplied by the learning rate, as in Table 4.1: the printed norms fall by e^(−λt).",
    "Weights and biases are drawn from N(0, σ²), σ² as in Table 4.2 (§4.4 speaks of a uniform draw instead).",
    "Selective L2 compares |(Hθ)_i| with ω times its maximum over the layer, weights and biases together.",
    "L2 Stopped Selective uses the L2 rate before τ and the Selective L2 rate after it.",
    "Metric is λHθ with the Hessian of the batch as it is, not its absolute value.",
    f"Dropout (share {DROPOUT}) from the large regime is added for comparison; the thesis does not run it.",
)

XOR = Task(
    "xor",
    {
        "tanh": Setting({"small": 0.12, "large": 0.0015}, {"small": 0.03, "large": 2.3}, 0.008, 0.001, 0.1, 280, 0.1),
        "relu": Setting({"small": 0.12, "large": 0.002}, {"small": 0.03, "large": 1.7}, 1e-4, 0.001, 0.1, 280, 0.05),
    },
    xor_network,
    epochs=400,
    batches=1,
    assumptions=(
        "64 hidden units, whose norms under SGD come near the printed ones in both regimes.",
        "Biases: a tanh network without them is odd and cannot learn XOR.",
        "All four points in every step and 400 epochs: what the printed norms of L2 and L2 Stopped imply.",
        "Mean cross-entropy of two softmax outputs.",
        *SILENT,
    ),
)

XORD = Task(
    "xord",
    {
        "tanh": Setting({"small": 0.02, "large": 0.02}, {"small": 0.4, "large": 4.0}, 1e-4, 1e-5, 0.001, 500, 0.01),
        "relu": Setting({"small": 0.05, "large": 0.002}, {"small": 0.2, "large": 2.0}, 0.001, 1e-4, 0.001, 500, 0.1),
    },
    xord_network,
    epochs=1000,
    batches=4,
    assumptions=(
        "32 filters with biases: the most, in powers of 2, at which SGD is stable at the printed rates (64 diverge).",
        "Batches of 3 and 1,000 epochs: what the printed norms of L2 and L2 Stopped with ReLU imply.",
        "One linear output, loss ½(f − y)² with y = ±1, mean over a batch: the printed errors exceed a softmax's.",
        "Every seed draws its own 12 training and 10 test samples, the same for all rules.",
        *SILENT,
    ),
)
