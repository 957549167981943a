"""A problem at other points, on other data, over fewer parameters; and what of its model it
follows.
"""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lambdahat as lh
from lambdahat.problem import Problem
from lambdahat.problem.batches import Batches
from tests.oracles import dense_hessian
from tests.small_problems import C, N, X, Y, agrees, batchnorm, mlp, plain


def test_at_another_point():
    model = mlp()
    problem = Problem(model, "cross_entropy", (X, Y), batch_size=4)
    theta = problem.vector + 0.1
    other = problem.at(theta)
    assert other.loss() == problem.loss(theta) != problem.loss()
    assert torch.equal(other.gradient(), problem.gradient(theta))
    assert torch.equal(other.vector, theta)
    theta.zero_()
    assert float(other.vector.abs().sum()) > 0  # a copy
    bias = problem.at({"2.bias": torch.full((C,), 9.0)})
    assert torch.equal(bias.vector[:-C], problem.vector[:-C])
    assert torch.equal(bias.vector[-C:], torch.full((C,), 9.0, dtype=torch.float64))


def test_the_state_of_a_model_with_tied_weights():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(5, 5), torch.nn.Linear(5, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    data = torch.arange(12) % 5, torch.arange(12) % 3
    model, other = Tied(), Tied()
    problem = Problem(model, "cross_entropy", data)
    loss = Problem(other, "cross_entropy", data).loss()
    assert list(other.state_dict()) == ["embed.weight", "head.weight"]
    assert problem.at(other.state_dict()).loss() == loss
    assert problem.at({"head.weight": other.head.weight}).loss() == loss
    torn = {**other.state_dict(), "head.weight": torch.zeros(5, 5)}
    with pytest.raises(ValueError, match=r"head.weight must equal embed.weight, to which"):
        problem.at(torn)


def test_vector_follows_the_model_and_operators_do_not():
    model = mlp()
    problem = Problem(model, "cross_entropy", (X, Y))
    H, v = lh.hessian(problem), torch.ones(problem.num_parameters, dtype=torch.float64)
    before, product = problem.vector, H @ v
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert torch.equal(problem.vector[:20], 2 * before[:20])
    assert torch.equal(H @ v, product)


@pytest.mark.parametrize(("mode", "memory"), [("reverse", None), ("reverse", 0), ("forward", None)])
def test_operators_do_not_follow_the_statistics_or_the_rest_of_the_model(mode, memory):
    """Batch-norm in eval mode reads its statistics again in every backward pass."""
    model = batchnorm()
    problem = Problem(model, "cross_entropy", (X, Y), parameters="0.*")
    H, v = (
        lh.hessian(problem, mode=mode, memory=memory),
        torch.ones(problem.num_parameters, dtype=torch.float64),
    )
    before, trace = H @ v, lh.ggn(problem)
    known, loss = trace.known_trace(), problem.loss()
    model(X + 3.0)  # in train mode: new statistics
    with torch.no_grad():
        model[4].weight.mul_(2.0)
    assert problem.loss() != loss  # the problem follows
    assert torch.equal(H @ v, before)
    assert trace.known_trace() == known


def squares(params: dict[str, torch.Tensor], batch: torch.Tensor | None = None) -> torch.Tensor:
    return (params["w"] ** 2).sum() * (1.0 if batch is None else batch.square().mean())


PICKLED = {
    "tensors": lambda: Problem(mlp(), "cross_entropy", (X, Y), batch_size=4),
    "data set": lambda: Problem(
        batchnorm(), "cross_entropy", TensorDataset(X, Y), batch_size=4, norm="train"
    ),
    "loader": lambda: Problem(
        mlp(), F.cross_entropy, DataLoader(TensorDataset(X, Y), batch_size=5)
    ),
    "list of batches": lambda: Problem(mlp(), "cross_entropy", [(X, Y), (X[:3], Y[:3])]),
    "another problem's data": lambda: Problem(
        mlp(), "cross_entropy", Batches(partial(list, [(X, Y)]), X.device, None)
    ),
    "a function": lambda: Problem.from_function(squares, {"w": torch.arange(3.0)}),
    "a function of data": lambda: Problem.from_function(squares, {"w": torch.arange(3.0)}, X),
}


@pytest.mark.parametrize("kind", PICKLED)
def test_a_problem_goes_to_another_process_whole(kind):
    problem = PICKLED[kind]()
    twin = pickle.loads(pickle.dumps(problem))
    v = torch.ones(problem.num_parameters, dtype=problem.vector.dtype)
    assert twin.loss() == problem.loss()
    assert torch.equal(lh.hessian(twin) @ v, lh.hessian(problem) @ v)
    if isinstance(twin.source, torch.nn.Module):
        before = problem.loss()
        with torch.no_grad():
            next(twin.source.parameters()).mul_(2.0)
        assert twin.loss() != before == problem.loss()  # it follows the model that came with it


def test_vector_is_a_copy():
    problem = Problem(mlp(), "cross_entropy", (X, Y))
    problem.vector.zero_()
    assert float(problem.vector.abs().sum()) > 0


@pytest.mark.parametrize("moved", [False, True])
def test_restrict_holds_the_rest_constant(moved):
    problem = Problem(mlp(), "cross_entropy", (X, Y), batch_size=4)
    problem = problem.at(problem.vector + 0.1) if moved else problem
    part = problem.restrict("2.*")
    where = problem.space.indices(part.space.names)
    assert part.loss() == pytest.approx(problem.loss(), rel=1e-14)
    assert torch.allclose(part.gradient(), problem.gradient()[where], rtol=1e-12)
    assert torch.allclose(dense_hessian(part), dense_hessian(problem)[where][:, where], atol=1e-13)


def test_restrict_a_function():
    problem = Problem.from_function(
        lambda p: (p["a"] * p["b"]).sum(), {"a": torch.ones(2), "b": torch.full((2,), 3.0)}
    )
    assert torch.equal(problem.restrict("b").gradient(), torch.ones(2))


def test_subsample_is_a_random_part_of_the_data():
    problem = Problem(mlp(), "cross_entropy", (X, Y), batch_size=4)
    part, again, other = (
        problem.subsample(6, seed=1),
        problem.subsample(6, seed=1),
        problem.subsample(6, seed=2),
    )
    rows = torch.cat([batch.data[0] for batch in part.batches])
    assert len(rows) == part.num_samples == 6
    assert len({tuple(row.tolist()) for row in rows} & {tuple(row.tolist()) for row in X}) == 6
    assert part.loss() == again.loss() != other.loss()
    assert problem.subsample(N).loss() == pytest.approx(problem.loss(), rel=1e-14)
    assert problem.subsample(7, batch_size=5).batches.sizes == [5, 2]


def test_on_other_data():
    model = mlp()
    problem = Problem(model, "cross_entropy", (X, Y))
    agrees(problem.on((X[:5], Y[:5]), batch_size=2), plain(model, F.cross_entropy, X[:5], Y[:5]))
    moved = problem.at(problem.vector + 1.0).on((X[:5], Y[:5]))
    assert torch.equal(moved.vector, problem.vector + 1.0)
    assert problem.num_samples == N
