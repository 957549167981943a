"""The mean loss of a model over data as a function of one vector, against plain torch; and the
model as it was.
"""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.problem import Problem
from lambdahat.problem import batches as batches_module
from tests.cases import Block, LanguageModel, Tied, sentences
from tests.language import hugging_face
from tests.oracles import dense_hessian
from tests.small_problems import RNG, C, D, N, X, Y, Z, agrees, mlp, plain, seeded

FORMS: dict[str, tuple[Any, int | None]] = {
    "tensors": ((X, Y), None),
    "tensors in uneven batches": ((X, Y), 4),
    "one sample a batch": ((X, Y), 1),
    "Dataset": (TensorDataset(X, Y), 4),
    "DataLoader": (DataLoader(TensorDataset(X, Y), batch_size=3), None),
    "list of uneven batches": ([(X[:1], Y[:1]), (X[1:8], Y[1:8]), (X[8:], Y[8:])], None),
    "dict of tensors": ({"input": X, "labels": Y}, 4),
    "list of dicts": ([{"input": X[:7], "target": Y[:7]}, {"input": X[7:], "target": Y[7:]}], None),
    "mappings that are no dicts": (
        [UserDict(input=X[:7], labels=Y[:7]), UserDict(input=X[7:], labels=Y[7:])],
        None,
    ),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradient_over_any_form_of_data(form, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(batches_module, "CACHE_FRACTION", 0.0)
    data, batch_size = FORMS[form]
    model = mlp()
    problem = Problem(model, "cross_entropy", data, batch_size=batch_size)
    assert (problem.num_samples, problem.num_parameters) == (
        N,
        sum(p.numel() for p in model.parameters()),
    )
    assert sum(problem.weights) == pytest.approx(1.0)
    agrees(problem, plain(model, F.cross_entropy, X, Y))


LOSSES = {
    "name": ("mse", F.mse_loss, Z),
    "module": (nn.MSELoss(), F.mse_loss, Z),
    "function": (F.mse_loss, F.mse_loss, Z),
    "bce": ("bce_with_logits", F.binary_cross_entropy_with_logits, (Z > 0).double()),
    "other module": (nn.SmoothL1Loss(), F.smooth_l1_loss, Z),
    "callable": (
        lambda z, y: (z - y).abs().pow(3).mean(),
        lambda z, y: (z - y).abs().pow(3).mean(),
        Z,
    ),
    "label smoothing": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        Y,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_name_module_and_function(name):
    loss, same, target = LOSSES[name]
    model = mlp()
    agrees(Problem(model, loss, (X, target), batch_size=4), plain(model, same, X, target))


def test_nll_of_log_softmax():
    model = nn.Sequential(mlp(), nn.LogSoftmax(dim=1))
    agrees(Problem(model, "nll", (X, Y), batch_size=4), plain(model, F.nll_loss, X, Y))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(D, C), nn.Linear(D, C)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.spread(x).exp()


def test_several_outputs():
    model = seeded(TwoHeads)
    expected = plain(model, lambda z, y: F.gaussian_nll_loss(z[0], y, z[1]), X, Z)
    agrees(Problem(model, "gaussian_nll", (X, Z), batch_size=4), expected)
    agrees(
        Problem(model, lambda z, y: F.gaussian_nll_loss(z[0], y, z[1]), (X, Z), batch_size=4),
        expected,
    )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D + C, C)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.body(torch.cat([x, z], dim=1))


def test_several_inputs_come_before_the_target():
    model = seeded(TwoInputs)
    value = F.cross_entropy(model(X, Z), Y)
    assert Problem(model, "cross_entropy", (X, Z, Y), batch_size=4).loss() == pytest.approx(
        float(value.detach()), rel=1e-12
    )
    columns = {"x": X, "z": Z, "label": Y}
    assert Problem(model, "cross_entropy", columns, batch_size=4).loss() == pytest.approx(
        float(value.detach()), rel=1e-12
    )


def test_one_tensor_is_its_own_target():
    model = seeded(lambda: nn.Linear(D, D))
    agrees(Problem(model, "mse", X, batch_size=4), plain(model, F.mse_loss, X, X))


@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
def test_models_that_return_logits_and_loss(loss):
    """Batches weigh by the labels that count, those that are not −100."""
    model, columns = seeded(LanguageModel), sentences()
    problem = Problem(model, loss, columns, batch_size=2)
    value = model(**columns).loss
    grads = torch.autograd.grad(value, list(model.parameters()))
    agrees(problem, (float(value.detach()), parameters_to_vector(grads)))
    assert problem.num_parameters == 7 * 4 + 20  # tied weights once


class InADict(nn.Module):
    """What a model gives, as a plain dict."""

    def __init__(self, body: nn.Module, *names: str) -> None:
        super().__init__()
        self.body, self.names = body, names

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        output = self.body(*args, **kwargs)
        return {name: getattr(output, name, output) for name in self.names}


@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
def test_models_that_return_a_dict(loss):
    model, columns = seeded(LanguageModel), sentences()
    told = Problem(InADict(model, "logits", "loss"), loss, columns, batch_size=2)
    same = Problem(model, loss, columns, batch_size=2)
    assert told.loss() == same.loss()
    assert torch.equal(told.gradient(), same.gradient())
    run = lh.training.fit(
        told,
        torch.optim.SGD(told.source.parameters(), lr=0.0),
        epochs=1,
        batch_size=len(columns["labels"]),
    )
    assert run.history[0]["loss"] == pytest.approx(same.loss(), rel=1e-6)


class Told(dict):
    """A dict that holds its parts as attributes alone."""


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_callable_gets_the_whole_mapping(kind):
    model = InADict(mlp(), "scores", "logits")
    model.register_forward_hook(lambda layer, inputs, output: kind(output))
    problem = Problem(model, lambda output, y: F.cross_entropy(output["scores"], y), (X, Y))
    agrees(problem, plain(mlp(), F.cross_entropy, X, Y))


class Keyed(nn.Module):
    """A model that takes one mapping and gives one."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.body, self.kind = mlp(), kind

    def forward(self, inputs: Any) -> Any:
        assert type(inputs) is self.kind
        return self.kind(scores=self.body(inputs["x"]))


@pytest.mark.parametrize("kind", [dict, UserDict, Told])
def test_mappings_as_inputs_and_outputs(kind):
    """Sliced, cast and multiplied with as plain tensors are."""

    def loss(output: Any, y: Tensor) -> Tensor:
        assert type(output) is kind
        return F.cross_entropy(output["scores"], y)

    data = (kind(x=X.float()), Y)
    problem = Problem(Keyed(kind), loss, data, batch_size=4, dtype=torch.float64)
    single = Problem(mlp(), F.cross_entropy, (X.float().double(), Y), batch_size=4)
    assert problem.batches.sizes == single.batches.sizes
    assert problem.loss() == pytest.approx(single.loss(), rel=1e-12)
    v = torch.randn(problem.num_parameters, generator=generator(0, "mappings"), dtype=torch.float64)
    for build in (
        lh.hessian,
        lh.ggn,
        lambda p: lh.fisher(p, "empirical"),
        lambda p: lh.kfac(p, kind="empirical"),
    ):
        assert torch.allclose(build(problem) @ v, build(single) @ v, rtol=1e-9, atol=1e-12)
    assert torch.allclose(
        lh.ggn(problem, mode="forward") @ v, lh.ggn(single) @ v, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("loss", ["cross_entropy", F.cross_entropy])
def test_logits_that_are_an_attribute_of_a_dict(loss):
    def told(layer, inputs, output):
        held = Told(other=0)
        held.logits = output
        return held

    model = mlp()
    model.register_forward_hook(told)
    agrees(Problem(model, loss, (X, Y)), plain(mlp(), F.cross_entropy, X, Y))


def test_a_dict_without_what_is_looked_for():
    with pytest.raises(
        TypeError,
        match=r"output must be a tensor for loss 'cross_entropy', got dict of 'scores'.*logits",
    ):
        Problem(InADict(mlp(), "scores"), "cross_entropy", (X, Y))
    with pytest.raises(
        TypeError, match=r"must hold its loss, got dict of 'scores'; .*return it as \"loss\""
    ):
        Problem(InADict(mlp(), "scores"), "model", (X, Y))


def test_a_batch_without_a_label_that_counts_weighs_nothing():
    columns = sentences()
    columns["labels"][:2] = -100
    model = seeded(LanguageModel)
    problem = Problem(model, "cross_entropy", columns, batch_size=2)
    assert problem.weights[0] == 0.0
    value = model(**columns).loss
    agrees(
        problem,
        (
            float(value.detach()),
            parameters_to_vector(torch.autograd.grad(value, list(model.parameters()))),
        ),
    )
    v = torch.ones(problem.num_parameters, dtype=torch.float64)
    assert torch.allclose(lh.hessian(problem) @ v, dense_hessian(problem) @ v, atol=1e-12)
    assert bool(torch.isfinite(lh.ggn(problem) @ v).all())


def test_a_real_transformer():
    transformers = hugging_face()
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).double()
    ids = torch.randint(0, 11, (4, 6), generator=generator(0, "ids"))
    columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    value = model.eval()(**columns).loss
    assert Problem(model, "model", columns).loss() == pytest.approx(
        float(value.detach()), rel=1e-10
    )


def test_from_function_with_data():
    params = {"w": X[0].clone(), "b": torch.zeros((), dtype=torch.float64)}

    def loss_fn(p: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (x @ p["w"] + p["b"] - y).square().mean()

    problem = Problem.from_function(loss_fn, params, (X, Z[:, 0]), batch_size=4)
    residual = X @ params["w"] - Z[:, 0]
    assert problem.num_samples == N
    assert problem.space.shapes == ((4,), ())
    agrees(
        problem,
        (
            float(residual.square().mean()),
            torch.cat([2 * X.T @ residual, 2 * residual.sum()[None]]) / N,
        ),
    )


def test_from_function_without_data():
    problem = Problem.from_function(
        lambda p: p["a"].pow(4).sum(), {"a": torch.tensor([1.0, -2.0])}, num_samples=50
    )
    assert problem.num_samples == 50
    assert problem.loss() == 17.0
    assert torch.equal(problem.gradient(), torch.tensor([4.0, -32.0]))
    assert Problem.from_function(lambda p: p["a"].sum() ** 2, {"a": torch.ones(2)}).num_samples == 1


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (None, ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        (["*.bias"], ["0.bias", "2.bias"]),
        (lambda name: name.startswith("0"), ["0.weight", "0.bias"]),
    ],
)
def test_parameters_are_chosen_by_name(pattern, names):
    model = mlp()
    problem = Problem(model, "cross_entropy", (X, Y), parameters=pattern)
    assert list(problem.space.names) == names
    named = dict(model.named_parameters())
    expected = torch.autograd.grad(F.cross_entropy(model(X), Y), [named[name] for name in names])
    assert torch.allclose(problem.gradient(), parameters_to_vector(expected), rtol=1e-11)
    assert torch.equal(
        problem.vector, parameters_to_vector([named[name] for name in names]).detach()
    )


@pytest.mark.parametrize("name", ["first.weight", "second.weight"])
def test_tied_weights_are_one_parameter_under_any_of_their_names(name):
    model = seeded(Tied)
    x = torch.cat([X, X[:, :1]], dim=1)
    problem = Problem(model, "cross_entropy", (x, Y), parameters=name)
    assert problem.space.names == ("first.weight",)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), Y), [model.first.weight])
    assert torch.allclose(problem.gradient(), expected.flatten(), rtol=1e-11)
    whole = Problem(model, "cross_entropy", (x, Y))
    assert whole.num_parameters == sum(p.numel() for p in model.parameters())


def test_frozen_parameters_are_constants():
    model = mlp()
    model[0].requires_grad_(False)
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4)
    assert problem.space.names == ("2.weight", "2.bias")
    agrees(problem, plain(model, F.cross_entropy, X, Y))


def test_buffers_are_constants():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(D, C)
            self.register_buffer("scale", torch.tensor(3.0, dtype=torch.float64))
            self.register_buffer("table", torch.arange(C), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.body(x)[:, self.table]

    model = seeded(Scaled)
    problem = Problem(model, "cross_entropy", (X, Y), dtype=torch.float64)
    assert problem.num_parameters == D * C + C
    agrees(problem, plain(model, F.cross_entropy, X, Y))


def test_parametrized_weights_and_pruning_hooks():
    model = seeded(
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(D, 5)), nn.Tanh(), nn.Linear(5, C)
        )
    )
    agrees(
        Problem(model, "cross_entropy", (X, Y), batch_size=4), plain(model, F.cross_entropy, X, Y)
    )


# dtype and device


def test_dtype_casts_model_and_data():
    model = mlp().float()
    problem = Problem(model, "cross_entropy", (X, Y), dtype=torch.float64)
    assert (problem.dtype, problem.vector.dtype, problem.gradient().dtype) == (torch.float64,) * 3
    agrees(problem, plain(copy.deepcopy(model).double(), F.cross_entropy, X, Y))
    assert model[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        (torch.float16, "float32 vector of float16 parameters"),
        (torch.bfloat16, "bfloat16"),
        (torch.float64, "float64"),
    ],
)
def test_the_text_says_what_is_computed_in(dtype, told):
    problem = Problem(mlp().to(dtype), "cross_entropy", (X.to(dtype), Y))
    assert repr(problem) == f"Problem(P={problem.num_parameters}, n={len(X)}, {told}, cpu)"
    assert {tensor.dtype for tensor in problem.named(problem.vector).values()} == {dtype}


def test_the_text_of_parameters_of_two_kinds():
    model = mlp()
    model[0].half()
    assert "float64 vector of float16 and float64" in repr(
        Problem(Halved(model), "cross_entropy", (X, Y))
    )
    cast = Problem(mlp().half(), "cross_entropy", (X, Y), dtype=torch.float32)
    assert "float32, cpu" in repr(cast)


class Halved(nn.Module):
    """A first layer in half precision."""

    def __init__(self, body: nn.Sequential) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body[1:](self.body[0](x.half()).double())


def test_bfloat16_models():
    model = mlp().bfloat16()
    problem = Problem(model, "cross_entropy", (X.bfloat16(), Y), batch_size=4)
    expected = plain(copy.deepcopy(model).double(), F.cross_entropy, X.bfloat16().double(), Y)
    assert (problem.dtype, problem.gradient().dtype) == (torch.bfloat16, torch.bfloat16)
    assert problem.loss() == pytest.approx(expected[0], rel=2e-2)
    assert float((problem.gradient().double() - expected[1]).norm() / expected[1].norm()) < 3e-2


def test_mixed_models_keep_each_dtype():
    model = nn.Sequential(nn.Linear(D, 5), nn.Linear(5, C).double())
    model[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    problem = Problem(model, "cross_entropy", (X.float(), Y))
    assert problem.dtype == torch.float64
    assert {name: t.dtype for name, t in problem.named(problem.vector).items()} == {
        "0.weight": torch.float32,
        "0.bias": torch.float32,
        "1.weight": torch.float64,
        "1.bias": torch.float64,
    }


def test_attention_in_single_precision_is_deterministic():
    """In eval mode without a graph torch takes another attention kernel, of other rounding."""
    model = seeded(Block).float()
    x = torch.randn(5, 3, 6, generator=generator(0, "attention"))
    assert Problem(model, "cross_entropy", (x, Y[:5])).num_samples == 5


@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
def test_gradients_are_there_under_no_grad(guard):
    model = mlp()
    expected = plain(model, F.cross_entropy, X, Y)
    with guard():
        agrees(Problem(model, "cross_entropy", (X, Y)), expected)


def test_logits_with_as_many_steps_as_classes_are_read_like_the_others():
    """(B, T, C) with T = C in the first batch only."""
    model = seeded(lambda: nn.Linear(D, C))
    batches = [
        (
            torch.randn(2, steps, D, generator=RNG).double(),
            torch.randint(0, C, (2, steps), generator=RNG),
        )
        for steps in (3, 5)
    ]
    problem = Problem(model, "cross_entropy", batches)
    total = sum(F.cross_entropy(model(x).movedim(-1, 1), y, reduction="sum") for x, y in batches)
    assert problem.loss() == pytest.approx(float(total.detach()) / 16, rel=1e-12)
    with pytest.raises(ValueError, match="show which dimension holds the classes"):
        Problem(model, "cross_entropy", batches[:1])


@pytest.mark.parametrize("loss", ["weighted", "model"])
def test_batch_size_does_not_change_the_numbers(loss):
    if loss == "model":
        model, data, loss = seeded(LanguageModel), sentences(), "model"
    else:
        model, data = mlp(), (X, Y)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]).double(), ignore_index=0)
    whole, cut = Problem(model, loss, data), Problem(model, loss, data, batch_size=2)
    assert cut.loss() == pytest.approx(whole.loss(), rel=1e-12)
    assert torch.allclose(cut.gradient(), whole.gradient(), rtol=1e-10, atol=1e-12)


def test_repr_says_what_it_is():
    assert repr(Problem(mlp(), "cross_entropy", (X, Y))) == "Problem(P=43, n=11, float64, cpu)"
