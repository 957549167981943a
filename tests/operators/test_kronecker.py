"""KFAC and EKFAC against dense Kronecker products, the dense Gauss–Newton matrix, and
curvlinops.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat.models import mlp
from lambdahat.operators import kronecker_factors
from lambdahat.operators.kronecker import _eigen, ekfac, kfac
from lambdahat.problem import Problem
from tests.operators.kronecker_cases import (
    LOSSES,
    MODELS,
    data,
    dense_ggn,
    explicit_block,
    layer_matrix,
    make,
    mixed_problem,
    relative,
    vectors,
)

DAMPING = 0.05
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_product_is_that_of_the_dense_kronecker_product(case: str, loss: str) -> None:
    build, shape, layers = MODELS[case]
    model = build().double()
    x, y = data(shape, 3, loss)
    problem = make(model, x, y, loss)
    K = kfac(problem)
    assert K.psd
    assert K.symmetric
    plain = copy.deepcopy(model)
    for layer in plain:
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    expected = torch.zeros(K.dim, K.dim, dtype=torch.float64)
    for at in layers:
        A, G = explicit_block(plain, at, loss, x, y)
        names = [f"{at}.{name}" for name, _ in plain[at].named_parameters()]
        where = problem.space.slices
        parts = [
            torch.arange(where[n].start, where[n].stop).reshape(len(plain[at].weight), -1)
            for n in names
        ]
        order = torch.cat(parts, dim=1).reshape(-1)
        expected[order[:, None], order] = torch.kron(G, A)
    V = vectors(problem)
    before = K.matvecs
    assert relative(K @ V, expected @ V) < 1e-9
    assert K.matvecs - before == 5
    assert relative(K @ V[:, 0], expected @ V[:, 0]) < 1e-9


def test_groups_have_a_kronecker_product_each() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)
    ).double()
    x, y = data((4, 3, 3), 3)
    K = kfac(make(model, x, y))
    found = layer_matrix(K, ["0.weight", "0.bias"])
    blocks = [
        torch.kron(G, A)
        for A, G in (explicit_block(model, 0, "cross_entropy", x, y, g) for g in range(2))
    ]
    assert relative(found, torch.block_diag(*blocks)) < 1e-9
    assert K.structure()["0"] == "kronecker 3×3 ⊗ 9×9, in each of 2 groups"


def test_one_sample_makes_every_layer_exact() -> None:
    x, y = data((4,), 3, count=1)
    problem = make(mlp([4, 5, 3], "tanh"), x, y)
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    K = kfac(problem)
    for names in problem.space.layers().values():
        where = problem.space.indices(names)
        assert relative(K.dense()[where][:, where], F_dense[where][:, where]) < 1e-12


def test_deep_linear_network_with_square_loss_is_exact_in_each_layer() -> None:
    x, y = data((4,), 2, "mse", count=9)
    problem = make(mlp([4, 3, 2], "identity"), x, y, "mse")
    F_dense, K = dense_ggn(problem, "mse", x, y), kfac(problem).dense()
    for names in problem.space.layers().values():
        where = problem.space.indices(names)
        assert relative(K[where][:, where], F_dense[where][:, where]) < 1e-12


@pytest.mark.parametrize("build", [kfac, ekfac])
def test_inverse_and_spectrum_are_those_of_the_dense_matrix(build) -> None:
    problem, _, _ = mixed_problem(False)
    K = build(problem)
    D = K.dense()
    eye = torch.eye(K.dim, dtype=torch.float64)
    assert relative(D, D.T) < 1e-14
    assert relative(K.inverse(DAMPING).dense(), torch.linalg.inv(D + DAMPING * eye)) < 1e-9
    assert K.logdet(DAMPING) == pytest.approx(
        float(torch.linalg.slogdet(D + DAMPING * eye)[1]), rel=1e-12
    )
    assert relative(K.eigenvalues(), torch.linalg.eigvalsh(D)) < 1e-12
    assert relative(K.known_diagonal(), D.diagonal()) < 1e-12
    assert K.known_trace() == pytest.approx(float(D.trace()), rel=1e-12)
    for label, block in K.blocks.items():
        where = block.indices.reshape(-1)
        assert relative(block.dense(), D[where][:, where]) < 1e-12, label


def test_without_damping_a_singular_operator_says_so() -> None:
    x, y = data((4,), 3, count=2)  # two samples cannot span five inputs
    K = kfac(make(mlp([4, 3], "tanh"), x, y))
    assert K.logdet() == -math.inf
    with pytest.raises(
        ValueError,
        match=r"damping must make the operator positive definite, got 0.0.*raise damping",
    ):
        K.inverse(0.0)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0"):
        K.logdet(-1.0)


def test_undamped_inverse_where_there_is_one() -> None:
    x, y = data((3,), 2, "mse", count=12)
    K = kfac(make(mlp([3, 2], "identity"), x, y, "mse"))
    eye = torch.eye(K.dim, dtype=torch.float64)
    assert relative(K.inverse(0.0) @ (K @ eye), eye) < 1e-10
    assert K.logdet() == pytest.approx(float(K.dense().logdet()), rel=1e-12)


def test_factored_damping_is_that_of_martens_and_grosse() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 5, 3], "tanh"), x, y)
    K = kfac(problem)
    inverse = K.inverse(DAMPING, factored=True).dense()
    for block in K.blocks.values():
        A, G = block.A[0], block.G[0]
        pi = ((A.trace() / len(A)) / (G.trace() / len(G))).sqrt()
        eyes = torch.eye(len(A)).double(), torch.eye(len(G)).double()
        expected = torch.kron(
            torch.linalg.inv(G + math.sqrt(DAMPING) / pi * eyes[1]),
            torch.linalg.inv(A + math.sqrt(DAMPING) * pi * eyes[0]),
        )
        where = block.indices.reshape(-1)
        assert relative(inverse[where][:, where], expected) < 1e-9
    with pytest.raises(ValueError, match="factored must be False for EKFAC"):
        ekfac(problem).inverse(DAMPING, factored=True)


@pytest.mark.parametrize("case", MODELS)
def test_ekfac_has_the_fishers_diagonal_in_the_kronecker_eigenbasis(case: str) -> None:
    build, shape, _ = MODELS[case]
    model = build()
    x, y = data(shape, 3)
    problem = make(model, x, y)
    for layer in problem.model.modules():
        if isinstance(layer, nn.ReLU):
            layer.inplace = False
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    plain, corrected = kfac(problem), ekfac(problem)
    gain = 0.0
    for label, block in corrected.blocks.items():
        where = block.indices.reshape(-1)
        own = F_dense[where][:, where]
        U = torch.kron(block.basis[3][0], block.basis[1][0])
        assert relative(block.values.reshape(-1), (U.T @ own @ U).diagonal()) < 1e-9, label
        gain += float((own - plain.blocks[label].dense()).norm() - (own - block.dense()).norm())
    assert (F_dense - corrected.dense()).norm() <= (F_dense - plain.dense()).norm()
    assert gain > 0
    # a basis change keeps the trace
    assert corrected.known_trace() == pytest.approx(float(F_dense.trace()), rel=1e-10)


def test_ekfac_of_grouped_and_repeated_layers_keeps_the_trace() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
            self.head = nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))

    x, y = data((4, 5), 3)
    problem = make(Twice(), x, y)
    K = ekfac(problem)
    assert all(text.startswith("kronecker") for text in K.structure().values())
    F_dense = dense_ggn(problem, "cross_entropy", x, y)
    assert K.known_trace() == pytest.approx(float(F_dense.trace()), rel=1e-10)
    assert (F_dense - K.dense()).norm() <= (F_dense - kfac(problem).dense()).norm()


def test_chunks_do_not_change_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape, _ = MODELS["conv2d"]
    problem = make(build(), *data(shape, 3), batch_size=7)
    V = vectors(problem)
    whole = kfac(problem) @ V, ekfac(problem) @ V
    monkeypatch.setattr(kronecker_factors, "CHUNK_ELEMENTS", 1)
    assert relative(kfac(problem) @ V, whole[0]) < 1e-12
    assert relative(ekfac(problem) @ V, whole[1]) < 1e-12


def test_empirical_uses_the_datas_own_labels() -> None:
    x, y = data((4,), 3)
    problem = make(mlp([4, 3], "identity"), x, y)
    z = problem.model(x).detach()
    g = z.softmax(dim=1) - F.one_hot(y, 3)
    a = torch.cat([x, torch.ones(7, 1)], dim=1)
    found = layer_matrix(kfac(problem, kind="empirical"), ["0.weight", "0.bias"])
    assert relative(found, torch.kron(g.T @ g / 7, a.T @ a / 7)) < 1e-12


@pytest.mark.parametrize("loss", LOSSES)
def test_monte_carlo_is_unbiased_in_its_trace_and_fixed_by_its_seed(loss: str) -> None:
    problem = make(mlp([4, 5, 3], "tanh"), *data((4,), 3, loss), loss, batch_size=7)
    exact = kfac(problem).known_trace()
    traces = torch.tensor(
        [kfac(problem, kind="monte_carlo", seed=seed).known_trace() for seed in range(100)]
    )
    assert abs(float(traces.mean()) - exact) < 4 * float(traces.std()) / 10
    assert float(traces.std()) > 0
    V = vectors(problem)
    again = kfac(problem, kind="monte_carlo", seed=1)
    assert torch.equal(again @ V, kfac(problem, kind="monte_carlo", seed=1) @ V)
    assert ekfac(problem, kind="monte_carlo", samples=400).known_trace() == pytest.approx(
        exact, rel=0.1
    )


def test_single_precision_and_bfloat16_have_float32_factors() -> None:
    x, y = data((4,), 3)
    model = mlp([4, 5, 3], "tanh")
    exact = kfac(make(model, x, y))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        K = kfac(
            Problem(copy.deepcopy(model).to(dtype), "cross_entropy", (x.to(dtype), y), batch_size=3)
        )
        assert K.dtype == torch.float32
        assert relative(K.dense().double(), exact.dense()) < tolerance
        assert K.logdet(DAMPING) == pytest.approx(exact.logdet(DAMPING), rel=tolerance)


def test_a_convolution_changed_after_it_was_made_is_taken_as_it_is() -> None:
    made = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(75, 3)
    ).double()
    changed = copy.deepcopy(made)
    changed[0] = nn.Conv2d(2, 3, 3).double()
    changed[0].load_state_dict(made[0].state_dict())
    changed[0].padding = (1, 1)
    x, y = data((2, 5, 5), 3)
    for build in (kfac, ekfac):
        assert torch.equal(build(make(changed, x, y)).dense(), build(make(made, x, y)).dense())


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["mlp", "cnn"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_agrees_with_curvlinops(case: str, loss: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    model, shape = mlp([4, 5, 3], "tanh").double(), (4,)
    if case == "cnn":
        conv = (
            nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0)),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, dilation=2, bias=False),
        )
        model, shape = (
            nn.Sequential(*conv, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double(),
            (2, 7, 5),
        )
    x, y = data(shape, 3, loss, count=6)
    problem = make(model, x, y, loss)
    their_loss = nn.CrossEntropyLoss() if loss == "cross_entropy" else nn.MSELoss()
    parameters = list(model.parameters())
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    V = vectors(problem)
    columns = [part.movedim(0, -1) for part in problem.space.split(V.T.contiguous())]
    for ours, theirs in ((kfac, "KFACLinearOperator"), (ekfac, "EKFACLinearOperator")):
        for kind, name in (("exact", "type-2"), ("empirical", "empirical")):
            peer = getattr(curvlinops, theirs)(
                model,
                their_loss,
                parameters,
                batches,
                fisher_type=name,
                separate_weight_and_bias=False,
                check_deterministic=False,
            )
            expected = torch.cat([part.flatten(0, -2).detach() for part in peer @ columns])
            scale = 3.0 if loss == "mse" and kind == "empirical" else 1.0
            # curvlinops scales the empirical gradients of a mean square by √C; a sample's gradient
            # has no such factor
            assert relative(scale * (ours(problem, kind=kind) @ V), expected) < 1e-9, (theirs, kind)


@pytest.mark.gpu
def test_the_same_on_cuda() -> None:
    problem, x, y = mixed_problem(False)
    on_gpu = Problem(problem.model, "cross_entropy", (x, y), batch_size=3, device="cuda")
    V = vectors(problem)
    for build in (kfac, ekfac):
        assert relative((build(on_gpu) @ V.cuda()).cpu(), build(problem) @ V) < 1e-9
        assert (
            relative(
                (build(on_gpu).inverse(DAMPING) @ V.cuda()).cpu(),
                build(problem).inverse(DAMPING) @ V,
            )
            < 1e-9
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_singular_factor_has_as_many_eigenvalues_above_zero_as_its_rank(
    dtype: torch.dtype,
) -> None:
    a = torch.randn(50, 20, generator=torch.Generator().manual_seed(0), dtype=dtype)
    values, _ = _eigen((a @ a.T)[None])
    assert int((values > 0).sum()) == 20


def test_a_damped_inverse_keeps_the_small_eigenvalues_of_float32_factors() -> None:
    """A large mean in one input: n·eps·λ_max exceeds the variance of the others, which the
    damping does not.
    """
    x, y = data((8,), 3, count=60)
    x = 0.1 * x
    x[:, 0] += 100.0
    model = mlp([8, 3], "tanh")
    with torch.no_grad():
        model[-1].weight[:, 0] = 0.0  # else the softmax is saturated
    exact, single = (
        kfac(Problem(copy.deepcopy(model).to(t), "cross_entropy", (x.to(t), y)))
        for t in (torch.float64, torch.float32)
    )
    inputs = next(iter(exact.blocks.values())).basis[0][0]
    assert int((inputs < 9 * torch.finfo(torch.float32).eps * inputs[-1]).sum()) > 4
    V = torch.randn(exact.dim, 3, dtype=torch.float64)
    for damping in (1e-1, 3e-2):
        assert (
            relative((single.inverse(damping) @ V.float()).double(), exact.inverse(damping) @ V)
            < 1e-4
        )
        assert single.logdet(damping) == pytest.approx(exact.logdet(damping), rel=1e-4)
    assert single.logdet() == -math.inf
