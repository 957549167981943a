"""Misuses of the library and the errors they must get.

Each row maps a misuse to a call, the type of its error and a pattern that its text must hold: the
argument, the cure.
"""

from __future__ import annotations

import functools
import math
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lambdahat as lh
from lambdahat._core.rng import generator
from tests.cases import LanguageModel, Products, sentences, with_eigenvalues

RNG = generator(0, "misuse")
N = 10
X = torch.randn(N, 4, generator=RNG)
Y = torch.randint(0, 3, (N,), generator=RNG)
Z = torch.randn(N, 3, generator=RNG)
A = lh.operator(with_eigenvalues(torch.linspace(-1, 2, 8)))
SPD = lh.operator(with_eigenvalues(torch.linspace(1, 2, 8)), psd=True)
SKEW = lh.operator(np.triu(np.ones((4, 4))))


def net(*extra: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), *extra)


def problem(
    model: Any = None, loss: Any = "cross_entropy", data: Any = (X, Y), **options: Any
) -> lh.Problem:
    return lh.Problem(net() if model is None else model, loss, data, **options)


def function(
    loss_fn: Any = lambda p: p["a"].square().sum(), params: Any = None, *args: Any, **options: Any
) -> lh.Problem:
    return lh.Problem.from_function(
        loss_fn, {"a": torch.ones(3)} if params is None else params, *args, **options
    )


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(net(), X)


class Apply(nn.Module):
    """Any function as a layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Augmented(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + torch.randn(4), Y[index]


def with_nan(tensor: Tensor, value: float = math.nan) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = value
    return tensor


def nan_parameters() -> nn.Module:
    model = net()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    return model


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def integer_parameters() -> nn.Module:
    model = nn.Module()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    return model


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).abs()[:, :3]


class Stranger(nn.Module):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.rows = (row for row in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def in_inference_mode() -> None:
    with torch.inference_mode():
        problem()


class Spare(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def linear_loss(z: Tensor, y: Tensor) -> Tensor:
    return (z * y).sum(dim=1).mean()


def argmax_loss(z: Tensor, y: Tensor) -> Tensor:
    return (z.argmax(1) != y).float().mean()


def no_grad_loss(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(z, y)


def spoiled() -> lh.Problem:
    """A problem whose model diverged after it was made."""
    model = nn.Linear(4, 3)
    made = problem(model)
    with torch.no_grad():
        model.weight[0, 0] = math.nan
    return made


def batchnorm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


class Penalised(LanguageModel):
    """Has a loss of its own that is more than the cross-entropy of its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + 0.1 * output.logits.square().mean()
        return output


def later_nan() -> lh.Problem:
    """Finite data whose second batch has a root of negative numbers."""
    return problem(nn.Sequential(Apply(torch.sqrt), *net()), data=[(X.abs(), Y), (X, Y)])


MLP = problem()
H = lh.hessian(MLP)
ones = torch.ones(MLP.num_parameters)

Row = tuple[Callable[[], Any], type[Exception], str]

DATA: dict[str, Row] = {
    "empty tensors": (
        lambda: problem(data=(X[:0], Y[:0])),
        ValueError,
        "data must hold at least one sample",
    ),
    "empty list": (
        lambda: problem(data=[]),
        ValueError,
        "data must hold at least one batch, got an empty list",
    ),
    "empty Dataset": (
        lambda: problem(data=TensorDataset(X[:0], Y[:0])),
        ValueError,
        "data must hold at least one sample",
    ),
    "generator": (
        lambda: problem(data=((X, Y) for _ in range(2))),
        TypeError,
        r"one-shot iterator; pass list\(data\)",
    ),
    "iterator": (
        lambda: problem(data=iter([(X, Y)])),
        TypeError,
        r"one-shot iterator; pass list\(data\)",
    ),
    "file name": (
        lambda: problem(data="mnist"),
        TypeError,
        r"data must be a Dataset.*got 'mnist'; lambdahat\.data\.load",
    ),
    "train and test": (
        lambda: problem(data=lh.data.load("digits")),
        TypeError,
        r"got a train and a test set; pass data\.train",
    ),
    "integer inputs": (
        lambda: problem(data=(torch.ones(N, 4, dtype=torch.long), Y)),
        RuntimeError,
        r"with torch\.float32 parameters.*not integers: call \.float\(\)",
    ),
    "a single sample in a batch of batch norm": (
        lambda: problem(batchnorm(), norm="train", batch_size=3),
        ValueError,
        "more than one sample in each batch.*got one sample in batch 3.*batch_size",
    ),
    "no data": (
        lambda: problem(data=None),
        TypeError,
        "data must be a Dataset, a DataLoader, tensors or a list",
    ),
    "numpy arrays": (
        lambda: problem(data=(X.numpy(), Y.numpy())),
        TypeError,
        "data must be .*torch.as_tensor",
    ),
    "inputs only": (
        lambda: problem(data=[(X,)]),
        TypeError,
        r"data must give \(inputs, targets\) batches.*labels",
    ),
    "a different number of targets": (
        lambda: problem(data=(X, Y[:4])),
        ValueError,
        "data must .*same first dimension",
    ),
    "single samples": (
        lambda: problem(data=[(x, y) for x, y in zip(X, Y, strict=True)]),
        ValueError,
        "data must be a list of batches, got .* a target that is one number; .*default_collate",
    ),
    "single samples under a loss of one's own": (
        lambda: problem(
            loss=lambda z, y: F.cross_entropy(z, y),
            data=[(x, y) for x, y in zip(X, Y, strict=True)],
        ),
        ValueError,
        "data must be a list of batches, got .* a target that is one number",
    ),
    "single samples of an autoencoder": (
        lambda: problem(nn.Linear(4, 4), "mse", [(x, x) for x in X]),
        ValueError,
        "data must be a list of batches, got .* inputs that the model takes as one sample",
    ),
    "one row of positions": (
        lambda: problem(LanguageModel(), data={**sentences(), "position_ids": torch.ones(1, 5)}),
        ValueError,
        r"shapes \(6, \d\), .*\(1, 5\); give each sample its own row: position_ids.expand\(6, -1\)",
    ),
    "shuffling loader": (
        lambda: problem(data=DataLoader(TensorDataset(X, Y), shuffle=True)),
        ValueError,
        r"data must come in the same order.*shuffle=False, or list\(loader\)",
    ),
    "augmenting Dataset": (
        lambda: problem(data=Augmented()),
        ValueError,
        r"augmentation\); fix one pass with list",
    ),
    "augmenting loader": (
        lambda: problem(data=DataLoader(Augmented())),
        ValueError,
        "augmentation.*list",
    ),
    "batch_size of 0": (
        lambda: problem(batch_size=0),
        ValueError,
        "batch_size must be an integer of at least 1, got 0",
    ),
    "batch_size beside a loader": (
        lambda: problem(data=DataLoader(TensorDataset(X, Y)), batch_size=2),
        ValueError,
        "batch_size must be left out for a DataLoader, got 2; it has its own",
    ),
    "NaN input": (
        lambda: problem(data=(with_nan(X), Y)),
        ValueError,
        (
            "the inputs of the first batch must be finite, got NaN in 1 of 10 samples, first in"
            " sample 0; drop"
        ),
    ),
    "NaN in a Dataset": (
        lambda: problem(data=TensorDataset(with_nan(X), Y)),
        ValueError,
        "the inputs of the first batch must be finite, got NaN",
    ),
    "infinite input": (
        lambda: problem(data=(with_nan(X, math.inf), Y)),
        ValueError,
        "the inputs of the first batch must be finite, got infinity in 1 of 10 samples",
    ),
    "inputs of another dtype": (
        lambda: problem(data=(X.double(), Y)),
        RuntimeError,
        "first batch.*float64.*dtype=torch.float32 casts",
    ),
    "inputs of another width": (
        lambda: problem(data=(X[:, :2], Y)),
        RuntimeError,
        r"first batch, \(10, 2\)",
    ),
    "only ignored targets": (
        lambda: problem(data=(X, torch.full((N,), -100))),
        ValueError,
        "one target that counts",
    ),
    "subsample of none": (
        lambda: MLP.subsample(0),
        ValueError,
        r"count must be an integer in \[1, 10\], got 0",
    ),
    "subsample of more": (
        lambda: MLP.subsample(11),
        ValueError,
        r"count must be an integer in \[1, 10\], got 11",
    ),
    "num_samples beside data": (
        lambda: function(lambda p, b: p["a"].sum(), None, X, num_samples=4),
        ValueError,
        "num_samples must be left out when data is given",
    ),
}

LOSSES: dict[str, Row] = {
    "classes out of range in a later batch": (
        lambda: problem(data=[(X, Y), (X, Y + 5)]),
        ValueError,
        r"targets must lie in \[0, 2\] for 3 classes, got values in \[5, 7\]",
    ),
    "logits in place of probabilities": (
        lambda: problem(data=(X, Z)),
        ValueError,
        r"targets must be class indices \(int64\) or probabilities, got -.*of logits \.softmax",
    ),
    "three classes for binary cross-entropy": (
        lambda: problem(nn.Linear(4, 1), "bce_with_logits", (X, 2.0 * torch.ones(N, 1))),
        ValueError,
        r"targets must lie in \[0, 1\], got values in \[2, 2\]; 0 and 1 stand for",
    ),
    "three classes in a later batch": (
        lambda: problem(
            nn.Linear(4, 1),
            "bce_with_logits",
            (X, torch.arange(10.0).ge(8)[:, None] * 2.0),
            batch_size=4,
        ),
        ValueError,
        r"targets must lie in \[0, 1\], got values in \[2, 2\]",
    ),
    "a number of a loss": (
        lambda: problem(loss=lambda z, y: F.cross_entropy(z, y).item()),
        TypeError,
        r"loss must return a tensor, got 1\..*leave out \.item",
    ),
    "one-hot targets": (
        lambda: problem(data=(X, F.one_hot(Y, 3))),
        ValueError,
        r"targets must have shape \(10,\).*of one-hot targets take \.argmax\(1\)",
    ),
    "targets in a column": (
        lambda: problem(data=(X, Y[:, None])),
        ValueError,
        r"targets must have shape \(10,\).*take \.squeeze\(1\)",
    ),
    "data in its place": (
        lambda: lh.Problem(net(), (X, Y), "cross_entropy"),
        TypeError,
        r"loss must be .*got tuple; .*Problem\(model, loss, data\)",
    ),
    "AttributeError inside": (
        lambda: problem(loss=lambda z, y: z.no_such_thing()),
        AttributeError,
        "lambdahat: raised at the first batch",
    ),
    "misspelt": (
        lambda: problem(loss="cros_entropy"),
        ValueError,
        'did you mean .cross_entropy.\\?; "model" takes',
    ),
    "reduction=sum": (
        lambda: problem(loss=nn.CrossEntropyLoss(reduction="sum")),
        ValueError,
        'use reduction="mean"',
    ),
    "reduction=none": (
        lambda: problem(loss=nn.MSELoss(reduction="none")),
        ValueError,
        'use reduction="mean"',
    ),
    "callable that sums": (
        lambda: problem(loss=lambda z, y: F.cross_entropy(z, y, reduction="sum")),
        ValueError,
        "loss must average over the batch.*divide by the batch size",
    ),
    "function that sums": (
        lambda: function(lambda p, b: (b @ p["a"]).square().sum(), {"a": torch.ones(4)}, X),
        ValueError,
        "loss must average over the batch.*divide by the batch size",
    ),
    "callable that does not reduce": (
        lambda: problem(loss=functools.partial(F.cross_entropy, reduction="none")),
        ValueError,
        "loss must average over the batch, got reduction='none'",
    ),
    "function that does not reduce": (
        lambda: problem(loss=lambda z, y: F.cross_entropy(z, y, reduction="none")),
        ValueError,
        'loss must return one number.*use reduction="mean"',
    ),
    "a class of losses": (
        lambda: problem(loss=nn.CrossEntropyLoss),
        TypeError,
        (
            r"loss must be one of .*got the class CrossEntropyLoss; make an instance:"
            r" CrossEntropyLoss\(\)"
        ),
    ),
    "inputs alone": (
        lambda: problem(data=X),
        ValueError,
        (
            r"data must give \(inputs, targets\) .* 'cross_entropy', got inputs alone, \(10, 4\);"
            r" pass \(x, y"
        ),
    ),
    "inputs alone, mse": (
        lambda: problem(loss="mse", data=X),
        ValueError,
        r"got inputs alone, \(10, 4\); pass \(x, y",
    ),
    "inputs alone in a tuple": (
        lambda: problem(data=(X,)),
        TypeError,
        r"got inputs alone; use \(x, y\) tuples",
    ),
    "inputs alone, own loss": (
        lambda: problem(loss=lambda z, y: (z - y).square().mean(), data=X),
        RuntimeError,
        r"the data are inputs alone, taken for their own targets: pass \(x, y\)",
    ),
    "a dict without labels": (
        lambda: problem(data={"input": X}),
        TypeError,
        r"got dict of 'input'; use \(x, y\) tuples, or dicts with the target under \"labels\"",
    ),
    "a dict with a target of another name": (
        lambda: problem(data={"input": X, "y": Y}),
        TypeError,
        r"the batch holds 'input', 'y' and no target, which goes under \"labels\"",
    ),
    "NaN targets": (
        lambda: problem(loss="mse", data=(X, with_nan(Z))),
        ValueError,
        (
            "the targets of the first batch must be finite, got NaN in 1 of 10 samples, first in"
            " sample 0; drop"
        ),
    ),
    "NaN data in a later batch": (
        lambda: problem(data=[(X, Y), (with_nan(X), Y)]),
        ValueError,
        "the inputs of batch 1 must be finite, got NaN in 1 of 10 samples",
    ),
    "NaN in a later batch, gradient": (
        lambda: later_nan().gradient(),
        ValueError,
        "gradient must be finite, got NaN",
    ),
    "NaN in a later batch, KFAC": (
        lambda: lh.kfac(later_nan()),
        ValueError,
        "the Fisher must be finite.*at '1'",
    ),
    "NaN in a later batch, EKFAC": (
        lambda: lh.ekfac(later_nan()),
        ValueError,
        "the Fisher must be finite.*at '1'",
    ),
    "NaN gradient": (
        lambda: function(lambda p: (p["a"] - 1).square().sum().sqrt()).gradient(),
        ValueError,
        "the gradient must be finite, got NaN.*at 0",
    ),
    "a Monte-Carlo Fisher by another name": (
        lambda: lh.fisher(MLP, "mc"),
        ValueError,
        "kind must be one of .*got 'mc'; use kind='monte_carlo'",
    ),
    "loss that is a float": (
        lambda: problem(loss=lambda z, y: 1.0),
        TypeError,
        "loss must return a tensor, got 1.0",
    ),
    "NaN loss": (
        lambda: problem(loss=lambda z, y: z.mean() * math.nan),
        ValueError,
        (
            "the loss of the first batch must be finite, got nan; data and parameters are: look for"
            " a log"
        ),
    ),
    "NaN parameters": (
        lambda: problem(nan_parameters()),
        ValueError,
        "the parameter '0.weight' must be finite, got NaN",
    ),
    "unknown loss": (
        lambda: problem(loss="crossentropy"),
        ValueError,
        "loss must be one of 'cross_entropy', 'mse'",
    ),
    "loss not callable": (
        lambda: problem(loss=3),
        TypeError,
        "loss must be one of cross_entropy.*a callable, got 3",
    ),
    "loss is None": (lambda: problem(loss=None), TypeError, "loss must be .* a callable, got None"),
    "argmax": (
        lambda: problem(loss=argmax_loss),
        ValueError,
        "loss must depend on the selected parameters.*argmax",
    ),
    "detach": (
        lambda: problem(loss=lambda z, y: F.cross_entropy(z.detach(), y)),
        ValueError,
        "do not detach",
    ),
    "no_grad": (
        lambda: problem(loss=no_grad_loss),
        ValueError,
        "loss must depend.*do not detach, use no_grad",
    ),
    "parameters that the loss does not reach": (
        lambda: problem(Spare(), parameters="spare.*"),
        ValueError,
        "loss must depend on the selected parameters",
    ),
    "float class targets": (
        lambda: problem(data=(X, Y.float())),
        ValueError,
        r"targets must be class indices.*\.long",
    ),
    "int32 targets": (
        lambda: problem(data=(X, Y.int())),
        ValueError,
        r"dtype int64, got torch.int32; call .long",
    ),
    "targets (B, 1)": (
        lambda: problem(data=(X, Y[:, None])),
        ValueError,
        r"targets must have shape \(10,\)",
    ),
    "classes from 1": (
        lambda: problem(data=(X, Y + 1)),
        ValueError,
        r"targets must lie in \[0, 2\].*number classes from 0",
    ),
    "two classes of one output": (
        lambda: problem(nn.Linear(4, 1), data=(X, Y % 2)),
        ValueError,
        r"targets must lie in \[0, 0\] for 1 class.*use \"bce_with_logits\"",
    ),
    "mse that broadcasts": (
        lambda: problem(nn.Linear(4, 1), "mse", (X, Z[:, 0])),
        ValueError,
        "targets must have the shape of the model's output .*reshape the targets",
    ),
    "bce that broadcasts": (
        lambda: problem(nn.Linear(4, 1), "bce_with_logits", (X, Z[:, 0])),
        ValueError,
        "reshape the tar",
    ),
    "nll of logits": (
        lambda: problem(loss="nll"),
        ValueError,
        "must be log-probabilities for nll.*use cross_entropy",
    ),
    "tuple output": (
        lambda: problem(net(Apply(lambda z: (z, z)))),
        TypeError,
        "output must be a tensor.*wrap the model",
    ),
    "loss=model without one": (
        lambda: problem(loss="model"),
        TypeError,
        'loss="model" must hold its loss.*name a loss',
    ),
    "loss=model without labels": (
        lambda: problem(
            LanguageModel(), "model", {k: v for k, v in sentences().items() if k != "labels"}
        ),
        TypeError,
        'must hold its loss.*give "labels"',
    ),
    "no labels": (
        lambda: problem(
            LanguageModel(), data={k: v for k, v in sentences().items() if k != "labels"}
        ),
        TypeError,
        r"data must give \(inputs, targets\).*labels",
    ),
}

MODELS: dict[str, Row] = {
    "a scripted model": (
        lambda: problem(scripted()),
        TypeError,
        "model must be a module of Python, got a ScriptModule",
    ),
    "not a module": (
        lambda: problem(lambda x: x),
        TypeError,
        "model must be a torch.nn.Module.*Problem.from_function",
    ),
    "no parameters": (
        lambda: problem(nn.ReLU()),
        ValueError,
        "model must have parameters, got ReLU without any",
    ),
    "all frozen": (
        lambda: problem(frozen()),
        ValueError,
        r"parameters must select .*requires_grad_\(True\)",
    ),
    "integer parameters": (
        lambda: problem(integer_parameters()),
        ValueError,
        "only frozen, integer or excluded ones",
    ),
    "integer params": (
        lambda: function(lambda p: p["a"].sum(), {"a": torch.arange(3)}),
        ValueError,
        r"params\['a'\] must be floating point, got torch.int64",
    ),
    "complex parameters": (
        lambda: problem(Complex()),
        ValueError,
        "parameter 'phase' must be real floating point",
    ),
    "lazy parameters": (
        lambda: problem(nn.LazyLinear(3)),
        ValueError,
        "parameter 'weight' must be .*initialised.*lazy",
    ),
    "none selected": (
        lambda: problem(parameters="conv*"),
        ValueError,
        r"parameters must match at least one of 0\.weight",
    ),
    "empty selection": (
        lambda: problem(parameters=[]),
        ValueError,
        "parameters must match at least one of",
    ),
    "params not a dict": (
        lambda: function(params=[torch.ones(3)]),
        TypeError,
        "params must be a non-empty dict",
    ),
    "params empty": (
        lambda: function(params={}),
        TypeError,
        "params must be a non-empty dict of name to tensor",
    ),
    "loss_fn not callable": (lambda: function(3), TypeError, "loss_fn must be callable, got 3"),
    "functional dropout": (
        lambda: problem(net(Apply(lambda z: F.dropout(z, 0.5, training=True)))),
        ValueError,
        "the model must give the same loss twice.*switch off dropout",
    ),
    "noise in the model": (
        lambda: problem(net(Apply(lambda z: z + 0.01 * torch.randn_like(z)))),
        ValueError,
        "loss twice",
    ),
    "uncopyable model": (
        lambda: problem(Stranger()),
        TypeError,
        r"model must survive copy\.deepcopy.*drop",
    ),
    "norm unknown": (
        lambda: problem(norm="test"),
        ValueError,
        "norm must be one of 'eval', 'train', 'frozen', got",
    ),
    "norm=train without batch_size": (
        lambda: problem(batchnorm(), norm="train"),
        ValueError,
        'batch_size must be given with norm="train"',
    ),
    "batch-norm without statistics": (
        lambda: problem(
            nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
        ),
        ValueError,
        "norm must be \"train\": layer '0'.*track_running",
    ),
    "missing device": (
        lambda: problem(device="cuda:99"),
        ValueError,
        'device must be available, got .cuda:99.; use "cpu"',
    ),
    "inference mode": (
        in_inference_mode,
        ValueError,
        r"a problem must be made outside torch\.inference_mode.*no_grad",
    ),
    "meta device": (
        lambda: problem(nn.Linear(4, 3, device="meta")),
        ValueError,
        "model must be on one device, with data, got meta.*to_empty",
    ),
    "meta as device": (
        lambda: problem(device="meta"),
        ValueError,
        "device must be one that computes, got 'meta'.*cpu",
    ),
    "data on meta": (
        lambda: problem(data=(X.to("meta"), Y)),
        ValueError,
        "data must hold numbers, got.*meta device",
    ),
    "parameters that became NaN": (
        lambda: lh.hessian(spoiled()),
        ValueError,
        "theta must be finite, got NaN or infinity in 'weight'; load a checkpoint",
    ),
    "gradient at parameters that became NaN": (
        lambda: spoiled().gradient(),
        ValueError,
        "theta must be finite, got NaN or infinity in 'weight'; load a checkpoint",
    ),
    "parameters as tensors": (
        lambda: problem(parameters=[Z]),
        TypeError,
        "pass names, as in parameters=",
    ),
    "parameters by number": (
        lambda: problem(parameters=3),
        TypeError,
        "parameters must be a glob, a list of globs",
    ),
    "missing device of a function": (
        lambda: function(device="cuda:99"),
        ValueError,
        "device must be available",
    ),
    "no such device": (
        lambda: problem(device="gpu"),
        ValueError,
        'device must be available, got .gpu.; use "cpu"',
    ),
    "integer dtype": (
        lambda: problem(dtype=torch.int32),
        ValueError,
        "dtype must be torch.float32.*got torch.int32",
    ),
    "half precision": (
        lambda: problem(dtype=torch.float16),
        ValueError,
        "dtype must be .*torch.bfloat16",
    ),
    "dtype by name": (
        lambda: problem(dtype="float64"),
        ValueError,
        "dtype must be .*got 'float64'",
    ),
    "theta of another length": (
        lambda: MLP.loss(torch.ones(3)),
        ValueError,
        r"theta must be a tensor of shape \(43,\)",
    ),
    "theta as a list": (
        lambda: MLP.gradient([0.0] * 43),
        ValueError,
        r"theta must be a tensor of shape \(43,\)",
    ),
    "a path as theta": (
        lambda: MLP.at("weights.pt"),  # type: ignore[arg-type]
        ValueError,
        r"theta must be a tensor .*got 'weights.pt'; load it first",
    ),
    "theta with NaN": (lambda: MLP.at(with_nan(ones)), ValueError, "theta must be finite"),
    "theta with unknown names": (
        lambda: MLP.at({"conv": ones}),
        ValueError,
        "theta must name parameters.*got conv",
    ),
    "theta with wrong shapes": (
        lambda: MLP.at({"0.bias": ones}),
        ValueError,
        r"0\.bias must have shape \(5,\)",
    ),
    "theta with lists": (
        lambda: MLP.at({"0.bias": [0.0] * 5}),
        TypeError,
        r"0\.bias must be a tensor, got \[0\.0",
    ),
    "restricting to no name": (
        lambda: MLP.restrict("conv*"),
        ValueError,
        r"parameters must match at least one of 0\.weight",
    ),
    "loss_fn without a batch": (
        lambda: function(lambda p: p["a"].sum(), None, X),
        TypeError,
        r"called as loss_fn\(params, batch",
    ),
    "loss_fn with a batch": (
        lambda: function(lambda p, batch: p["a"].sum()),
        TypeError,
        r"loss_fn\(params\)",
    ),
    "held-out data of another kind": (lambda: MLP.on(iter([])), TypeError, r"pass list\(data\)"),
}

OPERATORS: dict[str, Row] = {
    "not square": (
        lambda: lh.operator(np.ones((2, 3))),
        ValueError,
        r"matrix must be square.*got shape \(2, 3\)",
    ),
    "a vector": (lambda: lh.operator(np.ones(3)), ValueError, "matrix must be square"),
    "empty matrix": (
        lambda: lh.operator(np.ones((0, 0))),
        ValueError,
        "matrix must be square and not empty",
    ),
    "NaN matrix": (
        lambda: lh.operator(with_nan(torch.eye(3))),
        ValueError,
        "matrix must hold finite numbers only",
    ),
    "NaN sparse matrix": (
        lambda: lh.operator(scipy.sparse.diags([1.0, math.nan])),
        ValueError,
        "finite numbers only",
    ),
    "complex matrix": (
        lambda: lh.operator(np.eye(2) * 1j),
        ValueError,
        "matrix must be real, got torch.complex128",
    ),
    "boolean matrix": (
        lambda: lh.operator(np.eye(2) > 0),
        ValueError,
        "matrix must be real, got torch.bool",
    ),
    "asymmetric, declared symmetric": (
        lambda: lh.operator(np.triu(np.ones((3, 3))), symmetric=True),
        ValueError,
        "matrix must be symmetric as declared",
    ),
    "asymmetric SciPy operator": (
        lambda: lh.operator(scipy.sparse.linalg.aslinearoperator(np.triu(np.ones((3, 3))))),
        ValueError,
        "matrix must be symmetric.*pass symmetric=False",
    ),
    "ragged rows": (
        lambda: lh.operator([[1, 2], [3]]),
        TypeError,
        "matrix must be a square array of numbers, got",
    ),
    "nothing as a matrix": (
        lambda: lh.operator(None),
        TypeError,
        "matrix must be a square array of numbers, got None",
    ),
    "a problem as a matrix": (
        lambda: lh.operator(MLP),
        TypeError,
        r"square array of numbers.*lh\.hessian\(problem\)",
    ),
    "identity like a problem": (
        lambda: lh.identity(MLP),
        TypeError,
        r"call lh\.hessian\(problem\)",
    ),
    "restrict by mask": (
        lambda: A.restrict(torch.ones(8, dtype=torch.bool)),
        ValueError,
        r"pass mask\.nonzero\(\)",
    ),
    "restrict to one number": (
        lambda: A.restrict(3),
        TypeError,
        "which must be names or a list of integers, got 3",
    ),
    "a matrix as a problem": (
        lambda: lh.hessian(torch.eye(3)),
        TypeError,
        r"problem must be .*lh\.Problem\(model, loss",
    ),
    "a model as a problem": (
        lambda: lh.ggn(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "short vector": (
        lambda: H @ torch.ones(3),
        ValueError,
        r"right-hand side of @ must have shape \(43,\) or \(43, k\)",
    ),
    "a list of tensors": (
        lambda: A @ [torch.ones(4), torch.ones(4)],
        ValueError,
        (
            r"right-hand side of @ must be one tensor of 8 rows, got a list of tensors.*join them"
            r" by torch\.cat"
        ),
    ),
    "too few tensors": (
        lambda: H @ [ones],
        ValueError,
        "must hold 4 tensors, one for each parameter, got 1",
    ),
    "tensors of other shapes": (
        lambda: H @ [torch.ones(5, 4), torch.ones(5), torch.ones(5, 3), torch.ones(3)],
        ValueError,
        r"at '2.weight', must have shape \(3, 5\), or that and a dimension of k vectors",
    ),
    "tensors of other names": (
        lambda: H @ {"0.weight": torch.ones(5, 4), "bias": torch.ones(5)},
        ValueError,
        r"must hold a tensor for every parameter of the operator, got .*bias",
    ),
    "a row on the left": (
        lambda: torch.ones(7) @ H,
        ValueError,
        r"left-hand side of @ must have shape \(43,\) or \(k",
    ),
    "row vector": (lambda: H @ ones[None], ValueError, "right-hand side of @ must have shape"),
    "three dimensions": (
        lambda: H @ torch.ones(43, 1, 1),
        ValueError,
        "right-hand side of @ must have shape",
    ),
    "integer vector": (
        lambda: H @ torch.ones(43, dtype=torch.long),
        ValueError,
        "must be real floating point, got torch.int",
    ),
    "complex vector": (
        lambda: H @ (1j * ones),
        ValueError,
        "must be real floating point, got torch.complex64",
    ),
    "operators of different orders": (
        lambda: H + A,
        ValueError,
        r"operators of \+ must have the same order, got 43 and 8",
    ),
    "product of different orders": (
        lambda: H @ A,
        ValueError,
        "operators of @ must have the same order",
    ),
    "infinite factor": (lambda: math.inf * H, ValueError, "the factor must be finite, got inf"),
    "operator plus number": (
        lambda: H + 1e-3,
        TypeError,
        r"must be an operator, got 0.001; add 0.001 \* lh.identity\(operator\)",
    ),
    "restrict to no name": (
        lambda: H.restrict("conv*"),
        ValueError,
        r"parameters must match at least one of 0\.weight",
    ),
    "restrict to nothing": (
        lambda: A.restrict([]),
        ValueError,
        "which must be names or a non-empty 1-D list of integers",
    ),
    "restrict a matrix by name": (
        lambda: A.restrict("0.*"),
        ValueError,
        r"have named parameters.*restrict\(\[0, 1, …\]\)",
    ),
    "restrict outside": (
        lambda: A.restrict([0, 8]),
        ValueError,
        r"which must hold indices in \[0, 7\], got 0 … 8",
    ),
    "restrict twice": (lambda: A.restrict([1, 1]), ValueError, "which must hold each index once"),
    "overlapping blocks": (
        lambda: H.block_diagonal({"a": "0.*", "b": "*.bias"}),
        ValueError,
        "blocks must not overlap",
    ),
    "blocks of a matrix": (lambda: A.block_diagonal(), ValueError, "must have named parameters"),
    "mode unknown": (
        lambda: lh.hessian(MLP, mode="backward"),
        ValueError,
        "mode must be one of 'auto', 'reverse'",
    ),
    "negative memory": (
        lambda: lh.hessian(MLP, memory=-1),
        ValueError,
        "memory must be an integer of at least 0, got -1",
    ),
    "kind unknown": (
        lambda: lh.fisher(MLP, "true"),
        ValueError,
        "kind must be one of 'exact', 'monte_carlo', 'empirical'",
    ),
    "no Monte-Carlo samples": (
        lambda: lh.fisher(MLP, "monte_carlo", samples=0),
        ValueError,
        "samples must be .* at least 1",
    ),
    "GGN of a function": (
        lambda: lh.ggn(function()),
        TypeError,
        (
            "the problem must be made of a model and a loss of its output.*the output function and"
            " loss= apart"
        ),
    ),
    "GGN of a model with a loss of more terms": (
        lambda: lh.ggn(problem(Penalised(), "model", sentences())),
        TypeError,
        "the problem must be made of a model and a loss of its output.*name the loss of the output",
    ),
    "Fisher of a custom loss": (
        lambda: lh.fisher(problem(loss=nn.SmoothL1Loss(), data=(X, Z))),
        ValueError,
        "loss must be a negative log-likelihood.*cross_entropy",
    ),
    "GGN of a linear loss": (
        lambda: lh.ggn(problem(loss=linear_loss, data=(X, Z))) @ ones,
        ValueError,
        "loss must be curved in the model's output.*return logits",
    ),
    "covariance in train mode": (
        lambda: lh.gradient_covariance(problem(batchnorm(), batch_size=5, norm="train")),
        ValueError,
        'norm must be "eval" or "frozen" for per-sample gradients',
    ),
    "KFAC in train mode": (
        lambda: lh.kfac(problem(batchnorm(), batch_size=5, norm="train")),
        ValueError,
        "norm must be",
    ),
    "KFAC of a model": (
        lambda: lh.kfac(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "KFAC of a function": (
        lambda: lh.kfac(function()),
        (TypeError, ValueError),
        "must be made of a model and a loss",
    ),
}

ESTIMATORS: dict[str, Row] = {
    "a folder that is a number": (
        lambda: lh.measure(MLP, "trace", folder=3),
        TypeError,
        "folder must be the name of a folder, got 3",
    ),
    "a result without a name": (
        lambda: lh.Estimate(1.0).save(""),
        ValueError,
        "path must be the name of a file, got an empty one",
    ),
    "a function of tensors": (
        lambda: lh.trace_function(A, torch.log),
        TypeError,
        "function must take a NumPy array of eigenvalues.*numpy.log",
    ),
    "samples of an exact Fisher": (
        lambda: lh.fisher(MLP, samples=3),
        ValueError,
        "samples must be left out for kind='exact', which draws none, got 3",
    ),
    "depth of 0": (
        lambda: lh.spectrum(A, depth=0),
        ValueError,
        r"depth must be an integer in \[1, 8\], got 0",
    ),
    "depth beyond P": (
        lambda: lh.spectrum(A, depth=9),
        ValueError,
        r"depth must .*\[1, 8\], got 9; .*dense\(\) is exact",
    ),
    "half a depth": (lambda: lh.spectrum(A, depth=2.5), TypeError, "depth must be an integer"),
    "no probes": (
        lambda: lh.spectrum(A, probes=0),
        ValueError,
        "probes must be an integer of at least 1, got 0",
    ),
    "one probe for moments": (
        lambda: lh.moments(A, 3, probes=1),
        ValueError,
        "probes must .*2, got 1; the standard error",
    ),
    "no moments": (
        lambda: lh.moments(A, 0),
        ValueError,
        "count must be an integer of at least 1, got 0",
    ),
    "basis unknown": (
        lambda: lh.moments(A, 3, basis="hermite"),
        ValueError,
        "basis must be one of 'power', 'chebyshev'",
    ),
    "bounds backwards": (
        lambda: lh.moments(A, 3, bounds=(1.0, -1.0)),
        ValueError,
        "bounds must be two finite numbers",
    ),
    "bounds too narrow": (
        lambda: lh.moments(A, 20, basis="chebyshev", bounds=(-0.1, 0.1)),
        ValueError,
        "pass wider bounds",
    ),
    "no pairs": (
        lambda: lh.eigenpairs(A, k=0),
        ValueError,
        r"k must be an integer in \[1, 8\], got 0",
    ),
    "more pairs than P": (
        lambda: lh.eigenpairs(A, k=9),
        ValueError,
        r"k must .*\[1, 8\], got 9; .*P has P eigenvalues",
    ),
    "which unknown": (
        lambda: lh.eigenpairs(A, 1, "LM"),
        ValueError,
        "which must be one of 'largest', 'smallest'",
    ),
    "negative tol": (
        lambda: lh.eigenpairs(A, 1, tol=-1.0),
        ValueError,
        "tol must be a finite number above 0, got -1.0",
    ),
    "tol of 0": (
        lambda: lh.trace(H, tol=0),
        ValueError,
        "tol must be a finite number above 0, got 0",
    ),
    "tol of NaN": (
        lambda: lh.trace(H, tol=math.nan),
        ValueError,
        "tol must be a finite number above 0, got nan",
    ),
    "tol as text": (
        lambda: lh.frobenius_norm(H, tol="1%"),
        TypeError,
        "tol must be a number above 0, got '1%'",
    ),
    "negative seed": (
        lambda: lh.spectrum(A, seed=-1),
        ValueError,
        "seed must be an integer of at least 0, got -1",
    ),
    "half a seed": (
        lambda: lh.eigenpairs(lh.operator(torch.eye(300)), 1, seed=1.5),
        TypeError,
        "seed must be an integer",
    ),
    "seed of a trace": (
        lambda: lh.trace(Products(torch.eye(40)), seed=-1),
        ValueError,
        "seed must be an integer of at le",
    ),
    "method unknown": (
        lambda: lh.trace(H, method="exactly"),
        ValueError,
        "method must be one of 'auto', 'exact'",
    ),
    "logdet method unknown": (
        lambda: lh.logdet(SPD, method="lu"),
        ValueError,
        "method must be one of 'slq'",
    ),
    "probe unknown": (
        lambda: lh.trace(Products(torch.eye(40)), probe="uniform"),
        ValueError,
        "probe must be one of 'rade",
    ),
    "exact trace of products": (
        lambda: lh.trace(Products(torch.eye(40)), method="exact"),
        ValueError,
        "method='auto'",
    ),
    "no products allowed": (
        lambda: lh.trace(Products(torch.eye(40)), max_matvecs=0),
        ValueError,
        "max_matvecs must be",
    ),
    "too few products for pairs": (
        lambda: lh.eigenpairs(lh.operator(torch.eye(300)), 5, max_matvecs=3),
        ValueError,
        "max_matvecs must be at least 5",
    ),
    "no memory for pairs": (
        lambda: lh.eigenpairs(lh.operator(torch.eye(300)), 5, max_memory=10),
        ValueError,
        "max_memory must hold .* bytes.*raise it, or ask for fewer pairs",
    ),
    "asymmetric eigenpairs": (
        lambda: lh.eigenpairs(SKEW),
        ValueError,
        "operator of eigenpairs must be symmetric",
    ),
    "asymmetric spectrum": (
        lambda: lh.spectrum(SKEW),
        ValueError,
        "operator of spectrum must be symmetric",
    ),
    "hutch++ of an asymmetric matrix": (
        lambda: lh.trace(SKEW, method="hutch++"),
        ValueError,
        "method must be 'hutchinson'",
    ),
    "a problem for eigenpairs": (
        lambda: lh.eigenpairs(MLP),
        TypeError,
        r"call lh\.hessian\(problem\)",
    ),
    "an asymmetric matrix": (
        lambda: lh.eigenpairs(torch.ones(3, 3).triu()),
        ValueError,
        "must be symmetric",
    ),
    "a matrix that is not square": (
        lambda: lh.trace(torch.ones(3, 2)),
        ValueError,
        "matrix must be square",
    ),
    "a problem for trace": (
        lambda: lh.trace(MLP),
        TypeError,
        "operator must be an operator or a matrix",
    ),
    "a problem for diagonal": (
        lambda: lh.diagonal(MLP),
        TypeError,
        "operator must be an operator or a matrix",
    ),
    "a problem for a norm": (
        lambda: lh.frobenius_norm(MLP),
        TypeError,
        "operator must be an operator or a matrix",
    ),
    "NaN in a later batch": (
        lambda: lh.trace(lh.hessian(later_nan())),
        ValueError,
        "finite .*look for a NaN",
    ),
    "NaN in a later batch, diagonal": (
        lambda: lh.diagonal(lh.hessian(later_nan())),
        ValueError,
        "finite .*look for a NaN",
    ),
    "NaN in a later batch, spectrum": (
        lambda: lh.spectrum(lh.hessian(later_nan()), 4),
        ValueError,
        "finite.*for NaN",
    ),
    "a model for a landscape": (
        lambda: lh.landscape(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "a model for a variance": (
        lambda: lh.variance(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "a model for measure": (
        lambda: lh.measure(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "a model for the rank bound": (
        lambda: lh.rank_bound(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "a short direction": (
        lambda: lh.landscape(MLP, torch.ones(3)),
        ValueError,
        r"directions must have shape \(43,\)",
    ),
    "one probe for a diagonal": (
        lambda: lh.diagonal(A, probes=1),
        ValueError,
        "probes must .*2, got 1; one probe shows",
    ),
    "layers of a matrix": (
        lambda: lh.trace_per_layer(A),
        ValueError,
        "operator must have named parameters.*call trace",
    ),
    "logdet of an indefinite matrix": (
        lambda: lh.logdet(A),
        ValueError,
        "must be positive definite.*add a shift",
    ),
    "exact logdet of an indefinite matrix": (
        lambda: lh.logdet(A, method="exact"),
        ValueError,
        "add a shift",
    ),
    "log of negative eigenvalues": (
        lambda: lh.trace_function(A, np.log),
        ValueError,
        "function must .*shift the operator",
    ),
    "function that is not element-wise": (
        lambda: lh.trace_function(A, np.sum),
        ValueError,
        "function must be element-wise",
    ),
    "inverse of an indefinite matrix": (
        lambda: lh.inverse(A) @ torch.ones(8).double(),
        ValueError,
        "raise damping",
    ),
    "level of 2": (
        lambda: lh.trace(H).interval(level=2),
        ValueError,
        r"level must lie in \(0, 1\), got 2",
    ),
    "negative order": (
        lambda: lh.spectrum(A).moment(-1),
        ValueError,
        "order must be an integer of at least 0, got -1",
    ),
    "one point of a landscape": (
        lambda: lh.landscape(MLP, points=1),
        ValueError,
        "points must be an integer of at least 2",
    ),
    "variance of one sample": (
        lambda: lh.variance(problem(data=(X[:1], Y[:1]))),
        ValueError,
        "two samples or more",
    ),
    "sharpness of radius 0": (
        lambda: lh.sharpness(MLP, radius=0.0),
        ValueError,
        "radius must be a finite number above 0",
    ),
    "measure the unknown": (
        lambda: lh.measure(MLP, what=("traces",)),
        ValueError,
        "what must be one of",
    ),
    "measure nothing": (
        lambda: lh.measure(MLP, what=()),
        ValueError,
        "what must name at least one quantity",
    ),
    "loading a missing file": (
        lambda: lh.Result.load("/nowhere/r.json"),
        FileNotFoundError,
        "path must name a result.*no such",
    ),
}

ARPACK = {
    f"which={word!r} of ARPACK": (
        lambda word=word: lh.eigenpairs(A, k=2, which=word),
        ValueError,
        f"which must be one of .*got '{word}'; which='{ours}'",
    )
    for word, ours in {
        "LA": "largest",
        "SA": "smallest",
        "LM": "magnitude",
        "BE": "both",
        "SM": "smallest",
        "la": "largest",
    }.items()
}

ALGEBRA = {
    "array added": (
        lambda: A + np.eye(8),
        TypeError,
        r"other side of \+ must be an operator.*lh.operator\(matrix\)",
    ),
    "added to an array": (
        lambda: np.eye(8) + A,
        TypeError,
        r"other side of \+ must be an operator.*lh.operator",
    ),
    "tensor subtracted": (
        lambda: A - torch.eye(8),
        TypeError,
        "other side of − must be an operator.*lh.operator",
    ),
    "subtracted from a sparse matrix": (
        lambda: scipy.sparse.eye_array(8) - A,
        TypeError,
        "must be an operator.*lh.op",
    ),
    "times a vector": (
        lambda: A * torch.ones(8),
        TypeError,
        "factor of an operator must be one real number.*A @ v",
    ),
    "times an operator": (
        lambda: A * A,
        TypeError,
        "factor of an operator must be one real number.*A @ B",
    ),
    "times a complex number": (
        lambda: A * 2j,
        TypeError,
        "factor of an operator must be one real number, got 2j",
    ),
    "product with None": (
        lambda: A @ None,
        TypeError,
        "right-hand side of @ must be a tensor or an array.*got None",
    ),
    "product with objects": (
        lambda: A @ np.ones(8, dtype=object),
        TypeError,
        r"dtype object; .*astype\(float\)",
    ),
    "a tensor missing in a list": (
        lambda: H @ [*(torch.ones(s) for s in MLP.space.shapes[:-1]), None],
        TypeError,
        "right-hand side of @, at '2.bias', must be a tensor",
    ),
    "matrix of objects": (
        lambda: lh.trace(np.eye(3, dtype=object)),
        TypeError,
        r"dtype object; .*astype\(float\)",
    ),
    "matrix on meta": (
        lambda: lh.trace(torch.eye(3, device="meta")),
        ValueError,
        "matrix must hold numbers.*meta",
    ),
}


def in_a_file(write: Callable[[Path], object]) -> Callable[[], object]:
    """A call that writes to a path below a file."""

    def call() -> object:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "file"
            file.touch()
            return write(file / "name")

    return call


FILES = {
    "saving below a file": (
        in_a_file(lambda path: lh.trace(A).save(path)),
        FileExistsError,
        "folder must be a folder or the name of a new one.*is a file; name another",
    ),
    "a page below a file": (
        in_a_file(lambda path: lh.page([lh.trace(A)], path)),
        FileExistsError,
        "folder must be a folder or the name of a new one",
    ),
    "measuring into a file": (
        in_a_file(lambda path: lh.measure(problem(), ("trace",), folder=path.parent)),
        FileExistsError,
        "file, but it is a file; name another",
    ),
    "a page as PDF": (
        in_a_file(lambda path: lh.page([lh.trace(A)], path.with_name("page.pdf"))),
        ValueError,
        "path must name an HTML file, got .*page.pdf; figures .*savefig",
    ),
    "progress by a word": (
        lambda: lh.progress("yes"),  # type: ignore[arg-type]
        TypeError,
        "listener must be True, False or a function, got 'yes'",
    ),
    "a page in place of a folder": (
        in_a_file(lambda path: lh.page([lh.trace(A)], path.parent.parent)),
        IsADirectoryError,
        "path must name a file, got .*, a folder; name a file in it",
    ),
    "loading a file as a folder of results": (
        in_a_file(lambda path: lh.page(path.parent, path)),
        FileNotFoundError,
        "results must name a folder of saved results, got .*it is a file",
    ),
    "a result that was not measured": (
        lambda: lh.measure(problem(), ("trace",))["spectrum"],
        KeyError,
        "'spectrum' was not measured; the results are 'trace'",
    ),
    "several results in one plot": (
        lambda: lh.plot([lh.trace(A)]),
        TypeError,
        "result must be a result, got .*draw several with lh.page",
    ),
    "sizes of a network as arguments": (
        lambda: lh.models.mlp(64, 10),  # type: ignore[arg-type]
        ValueError,
        "sizes must name at least the inputs and the outputs, got 64; such as",
    ),
}

ERRORS = {**FILES, **DATA, **LOSSES, **MODELS, **OPERATORS, **ESTIMATORS, **ARPACK, **ALGEBRA}
