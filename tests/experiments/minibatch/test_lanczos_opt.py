"""LanczosOPT on stacked softmax regressions: its steps against the library's optimiser, its
claims, what is stored.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.data import Split, digits_split
from lambdahat.experiments.kit.cells import Rows
from lambdahat.experiments.kit.claims import judge
from lambdahat.experiments.minibatch import lanczos_opt as module
from lambdahat.experiments.minibatch.lanczos_opt import (
    EXPERIMENT,
    Softmax,
    cells,
    krylov,
    newton_directions,
    start_vectors,
)
from lambdahat.krylov import lanczos
from lambdahat.models import softmax_regression
from lambdahat.operators import hessian
from lambdahat.optim import LanczosNewton
from lambdahat.problem import Problem
from lambdahat.report.figures import draw

CLASSES, INPUTS, SAMPLES = 3, 4, 30


def data(sets=2):
    rng = generator(0, "stacked softmax")
    x = torch.randn(sets, SAMPLES, INPUTS, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (sets, SAMPLES), generator=rng)


def weights(sets=2, cells=3):
    rng = generator(0, "weights")
    return 0.5 * torch.randn(
        sets, cells, (INPUTS + 1) * CLASSES, generator=rng, dtype=torch.float64
    )


def network(vector):
    """The same weights as a module."""
    model = softmax_regression(INPUTS, CLASSES).double()
    matrix = vector.view(INPUTS + 1, CLASSES)
    with torch.no_grad():
        model[0].weight.copy_(matrix[:-1].T)
        model[0].bias.copy_(matrix[-1])
    return model


def ours(flat):
    """A vector of the problem (weight (K, d), then bias) in the order of the stack."""
    weight, bias = flat[: INPUTS * CLASSES].view(CLASSES, INPUTS), flat[INPUTS * CLASSES :]
    return torch.cat([weight.T, bias[None]]).flatten()


def test_losses_gradients_and_products_are_those_of_the_problem():
    (x, y), at = data(), weights()
    stack, vectors = Softmax(x, y, CLASSES), weights().flip(0)
    loss, wrong = stack.evaluate(at)
    gradient, product = stack.gradient(at), stack.product(at)(vectors)
    for s in range(2):
        for r in range(3):
            problem = Problem(network(at[s, r]), "cross_entropy", (x[s], y[s]))
            torch.testing.assert_close(float(loss[s, r]), problem.loss())
            torch.testing.assert_close(gradient[s, r], ours(problem.gradient()))
            model = network(vectors[s, r])
            flat = torch.cat([model[0].weight.detach().flatten(), model[0].bias.detach()])
            torch.testing.assert_close(product[s, r], ours(hessian(problem) @ flat))
            outputs = network(at[s, r])(x[s])
            assert float(wrong[s, r]) == float((outputs.argmax(1) != y[s]).double().mean())


def test_ritz_values_are_those_of_the_library():
    (x, y), at, pairs = data(), weights(), 6
    stack = Softmax(x, y, CLASSES)
    start = weights().flip(1)
    space = krylov(stack.product(at), start, pairs)
    for s in range(2):
        problem = Problem(network(at[s, 1]), "cross_entropy", (x[s], y[s]))
        model = network(start[s, 1])
        flat = torch.cat([model[0].weight.detach().flatten(), model[0].bias.detach()])
        run = lanczos(hessian(problem), flat, pairs, "test")
        expected = torch.linalg.eigvalsh(
            torch.diag(run.alpha) + torch.diag(run.beta, 1) + torch.diag(run.beta, -1)
        )
        torch.testing.assert_close(space.values[s, 1].sort().values, expected.abs().sort().values)
        gram = space.basis[s, 1] @ space.basis[s, 1].T
        torch.testing.assert_close(gram, torch.eye(pairs, dtype=gram.dtype))


@pytest.mark.parametrize(("eta", "damping"), [(1.0, 0.3), (10.0, 0.01)])
def test_steps_are_those_of_the_optimiser(eta, damping):
    """With as many pairs as a Krylov space of this Hessian holds, whatever the start:
    LanczosNewton, LOPT[η].
    """
    (x, y), at, rank = data(), weights(), (INPUTS + 1) * (CLASSES - 1) + 1
    stack, cells = Softmax(x, y, CLASSES), at.shape[1]
    space = krylov(stack.product(at), start_vectors(at.shape, 0, 0, at), rank)
    full = torch.full((cells,), 1.0, dtype=torch.float64)
    moved = at - 0.2 * newton_directions(stack.gradient(at), space, eta * full, damping * full)
    for s in range(2):
        model = network(at[s, 2])
        optimizer = LanczosNewton(model.parameters(), 0.2, damping, pairs=rank, eta=eta)
        optimizer.observe(Problem(model, "cross_entropy", (x[s], y[s])))
        cross_entropy(model(x[s]), y[s]).backward()
        optimizer.step()
        found = torch.cat([model[0].weight.detach().flatten(), model[0].bias.detach()])
        torch.testing.assert_close(moved[s, 2], ours(found), rtol=1e-6, atol=1e-8)


def test_eta_0_and_damping_1_is_gradient_descent():
    (x, y), at = data(), weights()
    stack = Softmax(x, y, CLASSES)
    space = krylov(stack.product(at), start_vectors(at.shape, 0, 0, at), 4)
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(
        newton_directions(stack.gradient(at), space, 0 * ones, ones), stack.gradient(at)
    )


def test_a_cell_that_diverges_is_told_and_stops_no_other():
    (x, y), at = data(), weights()
    at[0, 0] = float("nan")
    stack = Softmax(x, y, CLASSES)
    space = krylov(stack.product(at), start_vectors(at.shape, 0, 0, at), 4)
    ones = torch.ones(3, dtype=torch.float64)
    steps = newton_directions(stack.gradient(at), space, ones, ones)
    assert steps.isfinite().all(-1).tolist() == [[False, True, True], [True, True, True]]
    loss, wrong = stack.evaluate(at)
    assert (
        loss.isnan().tolist()
        == wrong.isnan().tolist()
        == [[True, False, False], [False, False, False]]
    )


@pytest.fixture(scope="module")
def found():
    """All seeds of the scale smoke together, as rows."""
    return Rows(module.rows_at(module.SCALES["smoke"], 0))


def test_every_run_is_measured_and_every_claim_judged(found):
    assert len(found) == (3 * 3 + 1) * 2 * 3  # dampings × η and gradient descent, seeds, looks
    assert found.distinct("step") == [20, 40, 60]
    assert len(judge(EXPERIMENT.claims(found))) == 2 + 3 + 1 + 2
    train, test = EXPERIMENT.tables(found)
    assert test.header == ("δ", "η = 1", "η = 3", "η = 10")
    assert [row[0] for row in train.rows] == ["0.001", "0.01", "0.1", "GD"]


def test_smaller_steps_in_sharp_directions_train_slower(found):
    """At every δ and seed the training loss rises with η: Newton's rate in the sharp directions
    is divided by η.
    """
    last = found.where(step=60, method="LanczosOPT")
    for damping in last.distinct("damping"):
        for seed in (0, 1):
            losses = [row["training loss"] for row in last.where(damping=damping, seed=seed)]
            assert losses == sorted(losses)
            assert len(set(losses)) == 3


def test_gradient_descent_is_torch_s(found):
    """The last look of seed 0, by torch.optim.SGD."""
    setting = module.SCALES["smoke"]
    train, _ = module._data(setting, digits_split(), 0, torch.device("cpu"))
    start = module._initial(train, 0)[0].view(65, 10)
    model = softmax_regression(64)
    with torch.no_grad():
        model[0].weight.copy_(start[:-1].T)
        model[0].bias.copy_(start[-1])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = train.x[0, :, :-1], train.y[0]
    for _ in range(setting["steps"]):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    expected = cross_entropy(model(x), y).item()
    (last,) = found.where(method="GD", seed=0, step=setting["steps"])
    assert last["training loss"] == pytest.approx(expected, rel=1e-5)


def test_the_same_seed_gives_the_same_numbers(found):
    before = torch.get_rng_state()
    assert module.rows_at(module.SCALES["smoke"], 0) == list(found)
    assert torch.equal(torch.get_rng_state(), before)


def made(test, training=0.0, seeds=4):
    """Rows at δ = 0.1 and 1, η = 1, 3, 10, with these test errors; the seeds differ by a little
    of their own.
    """
    rows = []
    for damping, errors in zip((0.1, 1.0), test, strict=True):
        for eta, error in zip((1.0, 3.0, 10.0), errors, strict=True):
            rows += [
                {
                    "seed": seed,
                    "method": "LanczosOPT",
                    "damping": damping,
                    "eta": eta,
                    "step": 5,
                    "test error": error * (1 + 0.001 * seed),
                    "training error": training,
                }
                for seed in range(seeds)
            ]
    return Rows(rows)


def verdicts(rows):
    return [verdict.verdict for verdict in judge(EXPERIMENT.claims(rows))]


def test_claims_are_judged_as_stated():
    rising = [[0.20, 0.22, 0.25], [0.10, 0.16, 0.24]]
    # the training error does not move at all: a tie decides nothing
    assert verdicts(made(rising)) == [
        "holds",
        "holds",
        "holds",
        "holds",
        "holds",
        "undecided",
        "holds",
    ]
    opposite = [[0.10, 0.10, 0.05], [0.20, 0.16, 0.10]]
    assert verdicts(made(opposite))[:5] == ["does not hold"] * 5
    assert verdicts(made(rising, training=0.5))[:2] == ["holds", "undecided"]  # nothing is fitted
    assert [claim.own for claim in EXPERIMENT.claims(made(rising))][:3] == [False, True, False]


def test_the_slope_over_dampings_is_in_percent_per_tenfold():
    claim = EXPERIMENT.claims(made([[0.20, 0.2, 0.2], [0.10, 0.1, 0.1]], seeds=2))[0]
    assert claim.reading.value == pytest.approx(-10.0 * 1.0005)
    assert claim.reading.count == 2


def test_cells_of_seeds_together_are_the_whole_run(found):
    (cell,) = cells(module.SCALES["smoke"], seeds=2, together=2)
    assert EXPERIMENT.run(cell, "cpu") == list(found)
    alone = EXPERIMENT.grid("smoke")
    assert [(one["group"], one["seeds"]) for one in alone] == [(0, 1), (1, 1)]
    assert {row["seed"] for row in EXPERIMENT.run(alone[1], "cpu")} == {1}


def test_charts_come_from_rows(found):
    training, test, way = EXPERIMENT.charts(found)
    part = found.where(step=60, damping=0.01, eta=10.0).values("test error")
    assert test.heat.values[1][2] == pytest.approx(100 * sum(part) / len(part))
    assert training.heat.y == ["δ = 0.001", "δ = 0.01", "δ = 0.1"]
    assert way.series[0].x == [20, 40, 60]
    descent = [found.where(method="GD", step=step).values("test error") for step in (20, 40, 60)]
    assert way.series[-1].y == pytest.approx(
        [100 * sum(values) / len(values) for values in descent]
    )
    for chart in (training, test, way):
        draw(chart)


def test_too_few_images_are_refused():
    x, y = torch.zeros(20, 64), torch.zeros(20, dtype=torch.int64)
    with pytest.raises(ValueError, match="split must have 200 training samples, got 20"):
        module.train_runs(module.SCALES["smoke"], 0, Split((x, y), (x, y), 10))
