"""NGD against references written from the papers: dense Fishers per axis, and the low-rank
recursion step by step.
"""

import copy
import io
import math
import threading

import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.models import mlp
from lambdahat.optim import KFAC, NGD
from lambdahat.optim.online_fisher import (
    OnlineFisher,
    Seen,
    Smoothing,
    _random_rows,
    default_rank,
    power_of,
    precondition,
    start,
    update,
)

ETA, DELTA, EPSILON = 0.1, 5e-4, 1e-10


def rng(*names):
    return generator(0, "test ngd", *names)


def randn(*shape, name=""):
    return torch.randn(*shape, generator=rng(name, *shape), dtype=torch.float64)


def uneven(size):
    """A matrix that gives Gaussian rows a spectrum over three decades."""
    return randn(size, size, name="uneven") * torch.logspace(0, -1.5, size, dtype=torch.float64)


class Dense:
    """F of one axis as a full matrix: (F + κI)⁻¹ by a dense solve, the update by the singular
    values of RY.
    """

    def __init__(self, alpha, rank=None):
        self.alpha, self.rank, self.F = alpha, rank, None

    def first(self, X):
        n, d = X.shape
        level = max(float((X * X).sum()) / (2 * n * d), EPSILON)
        R = _random_rows(default_rank(d, self.rank), d)
        self.R, self.D, self.rho = R, torch.full((len(R),), level, dtype=X.dtype), level
        for _ in range(5):
            self.update(X, 0.9)

    def matrix(self):
        return self.R.T @ torch.diag(self.D) @ self.R + self.rho * torch.eye(
            self.R.shape[1], dtype=self.R.dtype
        )

    def precondition(self, X):
        F, d = self.matrix(), X.shape[1]
        kappa = self.alpha / d * F.trace()
        smoothed = F + kappa * torch.eye(d, dtype=X.dtype)
        return (self.rho + kappa) * torch.linalg.solve(smoothed, X.T).T

    def update(self, X, eta=ETA):
        n, d = X.shape
        Y = eta * X.T @ X / n + (1 - eta) * self.matrix()
        _, root, self.R = torch.linalg.svd(self.R @ Y, full_matrices=False)
        rho = float((Y.trace() - root.sum()) / (d - len(root)))
        floor = max(EPSILON, DELTA * float(root.max()))
        self.D, self.rho = (root - rho).clamp_min(floor), max(rho, floor)


class Printed(Dense):
    """The recursion as Povey, Zhang and Khudanpur print it, in W = E^½R."""

    def first(self, X):
        super().first(X)
        self.W = self.shares().sqrt()[:, None] * self.R

    def shares(self):
        beta = self.rho * (1 + self.alpha) + self.alpha * self.D.sum() / self.R.shape[1]
        return 1 / (beta / self.D + 1)

    def precondition(self, X):
        return X - X @ self.W.T @ self.W

    def update(self, X, eta=ETA):
        if not hasattr(self, "W"):
            super().update(X, eta)
            return
        n, d = X.shape
        W, D, rho, E = self.W, self.D, self.rho, self.shares()
        H = X @ W.T
        J = H.T @ X
        K, L, e, Dr = J @ J.T, H.T @ H, E.rsqrt(), D + rho
        cross = (eta / n) * (1 - eta) * (e[:, None] * L * e) * Dr
        Z = (
            (eta / n) ** 2 * (e[:, None] * K * e)
            + cross
            + cross.T
            + torch.diag(((1 - eta) * Dr) ** 2)
        )
        C, U = torch.linalg.eigh(Z)
        root = C.clamp_min((rho * (1 - eta)) ** 2).sqrt()
        left = (eta / n) * (X * X).sum() + (1 - eta) * (d * rho + D.sum()) - root.sum()
        rho1 = float(left / (d - len(D)))
        floor = max(EPSILON, DELTA * float(root.max()))
        self.D, self.rho = (root - rho1).clamp_min(floor), max(rho1, floor)
        B = J + ((1 - eta) * n / eta) * Dr[:, None] * W
        self.W = (self.shares().sqrt() / root)[:, None] * (U.T @ ((eta / n) * e[:, None] * B))


class Reference:
    """NGD of one tensor, axis by axis, with one object of ``kind`` for each."""

    def __init__(self, shape, alpha, kind=Dense, rescale=True, period=4, rank=None):
        self.axes = {axis: kind(alpha, rank) for axis, size in enumerate(shape) if size > 1}
        self.rescale, self.period, self.t = rescale, period, 0

    def direction(self, g):
        for axis, fisher in self.axes.items():
            moved = g.movedim(axis, -1)
            X = moved.reshape(-1, moved.shape[-1])
            if self.t == 0:
                fisher.first(X)
            out = fisher.precondition(X)
            if self.t < 10 or self.t % self.period == 0:
                fisher.update(X)
            out = out.reshape(moved.shape).movedim(-1, axis)
            g = out * (g.norm() / out.norm()) if self.rescale else out
        self.t += 1
        return g


def gradients(shape, steps):
    """Gradients with uneven rows and columns, one of them twenty times the others."""
    for t in range(steps):
        g = randn(*shape, name=("gradient", t))
        for axis, size in enumerate(shape):
            g = (g.movedim(axis, -1) @ uneven(size)).movedim(-1, axis)
        yield g * (20.0 if t == 14 else 1.0)


def walk(optimizer, parameter, grads):
    """The steps that the optimiser takes on given gradients."""
    for g in grads:
        before = parameter.detach().clone()
        parameter.grad = g.to(parameter.dtype)
        optimizer.step()
        yield before - parameter.detach()


def zeros(*shape, dtype=torch.float64):
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("kind", [Dense, Printed])
@pytest.mark.parametrize("shape", [(9, 14), (11,), (5, 4, 3, 3), (6, 1, 7)], ids=str)
@pytest.mark.parametrize(("alpha", "rescale"), [(4.0, True), (0.01, False)])
def test_every_step_is_that_of_the_reference(kind, shape, alpha, rescale):
    weight, reference = zeros(*shape), Reference(shape, alpha, kind, rescale)
    optimizer = NGD([weight], lr=1.0, alpha=alpha, rescale=rescale)
    for t, (step, g) in enumerate(
        zip(walk(optimizer, weight, gradients(shape, 24)), gradients(shape, 24), strict=True)
    ):
        wanted = reference.direction(g)
        assert (step - wanted).norm() < 1e-7 * wanted.norm(), t


@pytest.mark.parametrize("alpha", [4.0, 0.1, 0.01])
def test_low_rank_fishers_are_exact_to_a_percent(alpha):
    """Gradients of rank 3 below R: the direction is that of the plain running means of XᵀX/N, kept
    whole.

    The floor δ of the low-rank form is out of the way: at 5e-4 it alone can turn the direction by a
    percent.
    """
    left, right = randn(3, 24, name="left"), randn(3, 30, name="right")
    grads = [left.T @ randn(3, 3, name=t) @ right for t in range(30)]
    weight = zeros(24, 30)
    means = [None, None]
    for t, (step, g) in enumerate(
        zip(
            walk(NGD([weight], lr=1.0, alpha=alpha, period=1, delta=1e-6), weight, grads),
            grads,
            strict=True,
        )
    ):
        for axis in (0, 1):
            X = g.T if axis == 0 else g
            F, d = X.T @ X / len(X), X.shape[1]
            old = means[axis] = F if t == 0 else means[axis]
            smooth = old + alpha / d * old.trace() * torch.eye(d, dtype=g.dtype)
            out = torch.linalg.solve(smooth, X.T).T * (
                X.norm() / torch.linalg.solve(smooth, X.T).norm()
            )
            means[axis] = ETA * F + (1 - ETA) * old
            g = out.T if axis == 0 else out
        assert (step - g).norm() < 0.01 * g.norm(), t


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.5, "weight_decay": 0.1}],
)
@pytest.mark.parametrize("rescale", [True, False])
def test_infinite_smoothing_is_sgd(options, rescale):
    models = [mlp([5, 7, 3]).double() for _ in range(2)]
    optimizers = [
        NGD(models[0].parameters(), lr=0.1, alpha=1e12, rescale=rescale, **options),
        torch.optim.SGD(models[1].parameters(), lr=0.1, **options),
    ]
    for t in range(15):
        for model, optimizer in zip(models, optimizers, strict=True):
            train_once(model, optimizer, t)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_decoupled_decay_shrinks_the_weights_and_leaves_the_direction():
    shrunk, plain = zeros(4, 6), zeros(4, 6)
    with torch.no_grad():
        shrunk.fill_(1.0)
        plain.fill_(1.0)
    g = randn(4, 6, name="decay")
    (a,) = walk(NGD([shrunk], lr=0.5, weight_decay=0.1, decoupled=True), shrunk, [g])
    (b,) = walk(NGD([plain], lr=0.5), plain, [g])
    torch.testing.assert_close(a - b, torch.full_like(g, 0.05))


def train_once(model, optimizer, t, scaler=None):
    dtype = next(model.parameters()).dtype
    x, y = randn(8, 5, name=("x", t)).to(dtype), torch.arange(8) % 3
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def met(fisher, rows, inner):
    ones = torch.ones(len(rows), dtype=torch.float64)
    return Seen(fisher, torch.bmm(inner, rows), rows.shape[1], power_of(rows), ones)


@pytest.mark.parametrize("alpha", [4.0, 0.01])
def test_products_alone_give_what_eigenvectors_give(alpha):
    """What runs on a GPU, on stacks of different orders and ranks, some of them short of rows."""
    shapes = [(40, 20, 8), (1, 12, 6), (7, 9, 5), (50, 2, 1)]
    smoothing = Smoothing(alpha, ETA, DELTA, EPSILON)
    rows = [
        [randn(2, n, d, name=t) @ uneven(d) * (30.0 if t == 5 else 1.0) for n, d, _ in shapes]
        for t in range(12)
    ]
    kinds = [
        [start(x, r, smoothing, diagonal) for x, (_, _, r) in zip(rows[0], shapes, strict=True)]
        for diagonal in (True, False)
    ]
    for now in rows:
        outputs = []
        for fishers in kinds:
            inner = [torch.bmm(fisher.basis, x.mT) for fisher, x in zip(fishers, now, strict=True)]
            outputs.append(
                [precondition(f, x, h) for f, x, h in zip(fishers, now, inner, strict=True)]
            )
            update([met(f, x, h) for f, x, h in zip(fishers, now, inner, strict=True)], smoothing)
        for ours, theirs in zip(*outputs, strict=True):
            assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    for ours, theirs in zip(*kinds, strict=True):
        torch.testing.assert_close(
            ours.dense(), theirs.dense(), rtol=1e-6, atol=1e-7 * float(theirs.dense().max())
        )


def test_a_stack_is_its_members_one_by_one():
    smoothing = Smoothing(torch.tensor([4.0, 0.1, 1.0], dtype=torch.float64), ETA, DELTA, EPSILON)
    together, alone = None, [None] * 3
    for t in range(8):
        x = randn(3, 12, 9, name=t) @ uneven(9)
        for i in range(-1, 3):
            part, alpha = (
                (x, smoothing.alpha) if i < 0 else (x[i : i + 1], float(smoothing.alpha[i]))
            )
            here = smoothing._replace(alpha=alpha)
            fisher = together if i < 0 else alone[i]
            fisher = start(part, 4, here, True) if fisher is None else fisher
            inner = torch.bmm(fisher.basis, part.mT)
            out = precondition(fisher, part, inner)
            update([met(fisher, part, inner)], here)
            if i < 0:
                together, whole = fisher, out
            else:
                alone[i] = fisher
                torch.testing.assert_close(whole[i : i + 1], out, rtol=1e-10, atol=1e-12)


def test_float32_keeps_to_float64():
    steps = {}
    for dtype in (torch.float32, torch.float64):
        weight = zeros(60, 50, dtype=dtype)
        steps[dtype] = list(walk(NGD([weight], lr=1.0, alpha=0.1), weight, gradients((60, 50), 30)))
    for low, high in zip(*steps.values(), strict=True):
        assert (low - high).norm() < 1e-4 * high.norm()


@pytest.mark.parametrize("make", [lambda m: NGD(m.parameters(), 0.1), lambda m: KFAC(m, 0.1, 0.3)])
def test_wide_layers_keep_to_float64(make):
    """Their products are large enough for the fastest kernels."""
    rng = generator(0, "wide")
    x, y = torch.rand(128, 300, generator=rng), torch.randint(0, 10, (128,), generator=rng)
    models = [mlp([300, 200, 10], seed=0).to(dtype) for dtype in (torch.float32, torch.float64)]
    for model in models:
        optimizer = make(model)
        for _ in range(12):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)), y).backward()
            optimizer.step()
    before = mlp([300, 200, 10], seed=0)
    for near, exact, first in zip(*(m.parameters() for m in (*models, before)), strict=True):
        moved = (exact - first).norm()
        assert (near - exact).norm() < 1e-4 * moved


def test_a_second_thread_solves_the_same_eigenproblems(monkeypatch):
    ends = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        model, rng = mlp([90, 160, 10], seed=0), generator(0, "threads")
        optimizer = NGD(model.parameters(), 0.1)
        for _ in range(6):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=rng)
            optimizer.step()
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert torch.equal(*ends)
    names = [thread.name for thread in threading.enumerate()]
    assert any(name.startswith("lambdahat-eigenpairs") for name in names)


def test_norms_are_kept_tensor_by_tensor_or_not():
    for rescale in (True, False):
        weight = zeros(6, 8)
        optimizer = NGD([weight], lr=1.0, rescale=rescale)
        for step, g in zip(
            walk(optimizer, weight, gradients((6, 8), 5)), gradients((6, 8), 5), strict=True
        ):
            assert math.isclose(float(optimizer.update_norm), float(step.norm()), rel_tol=1e-9)
            assert math.isclose(float(step.norm()), float(g.norm()), rel_tol=1e-9) == rescale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loaded_state_continues_bit_for_bit(dtype):
    options = {"lr": 0.05, "alpha": 0.3, "momentum": 0.9, "weight_decay": 1e-3}
    model = mlp([5, 7, 3]).to(dtype)
    optimizer = NGD(model.parameters(), **options)
    for t in range(13):
        train_once(model, optimizer, t)
    other = copy.deepcopy(model)
    stream = io.BytesIO()
    torch.save(optimizer.state_dict(), stream)
    stream.seek(0)
    resumed = NGD(other.parameters(), **{**options, "lr": 1.0})
    resumed.load_state_dict(torch.load(stream, weights_only=True))
    for t in range(13, 22):
        train_once(model, optimizer, t)
        train_once(other, resumed, t)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_state_from_a_gpu_continues_on_a_cpu():
    """There D is full: the same estimate in another basis."""
    model = mlp([5, 7, 3]).double()
    optimizer = NGD(model.parameters(), lr=0.05, alpha=0.3)
    for t in range(12):
        train_once(model, optimizer, t)
    other, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for axis in (0, 1):
            if f"axis{axis}_basis" in state:
                D = state[f"axis{axis}_weights"]
                turn = torch.linalg.qr(randn(len(D), len(D), name="turn")).Q
                state[f"axis{axis}_weights"] = turn @ torch.diag(D) @ turn.T
                for field in ("basis", "shared"):
                    state[f"axis{axis}_{field}"] = turn @ state[f"axis{axis}_{field}"]
    resumed = NGD(other.parameters(), lr=0.05, alpha=0.3)
    resumed.load_state_dict(saved)
    for t in range(12, 20):
        train_once(model, optimizer, t)
        train_once(other, resumed, t)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_dense_is_the_matrix_that_preconditions():
    x = randn(1, 30, 7, name="rows")
    fisher = start(x, 3, Smoothing(0.5, ETA, DELTA, EPSILON), False)
    F = fisher.dense()[0]
    kappa = 0.5 / 7 * F.trace()
    wanted = (fisher.rest + kappa) * torch.linalg.solve(
        F + kappa * torch.eye(7, dtype=F.dtype), x[0].T
    ).T
    torch.testing.assert_close(
        precondition(fisher, x, torch.bmm(fisher.basis, x.mT))[0], wanted, rtol=1e-7, atol=1e-9
    )
    assert isinstance(fisher.with_diagonal(True), OnlineFisher)


def test_a_parameter_may_join_late_and_pause():
    early, late = zeros(4, 5), zeros(4, 5)
    optimizer, alone = NGD([early, late], lr=1.0), zeros(4, 5)
    single = NGD([alone], lr=1.0)
    grads = list(gradients((4, 5), 8))
    for t, g in enumerate(grads):
        early.grad, late.grad = g, (g if t >= 3 and t != 5 else None)
        optimizer.step()
        if t >= 3 and t != 5:
            alone.grad = g
            single.step()
    assert torch.equal(late, alone)
    assert optimizer.state[early]["step"] == 8
    assert optimizer.state[late]["step"] == 4


def test_groups_keep_their_own_settings_and_schedules_work():
    first, second = zeros(4, 5), zeros(3, 4)
    optimizer = NGD([{"params": [first], "alpha": 0.1}, {"params": [second], "lr": 0.25}], lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    parts = [zeros(4, 5), zeros(3, 4)]
    alone = [NGD([parts[0]], lr=0.5, alpha=0.1), NGD([parts[1]], lr=0.25)]
    for t, (g, h) in enumerate(zip(gradients((4, 5), 4), gradients((3, 4), 4), strict=True)):
        first.grad, second.grad, parts[0].grad, parts[1].grad = g, h, g, h
        optimizer.step()
        schedule.step()
        for one, rate in zip(alone, (0.5, 0.25), strict=True):
            one.param_groups[0]["lr"] = rate * 0.5**t
            one.step()
    assert torch.equal(first, parts[0])
    assert torch.equal(second, parts[1])


def test_gradients_of_zero_and_single_numbers():
    still, number, short = zeros(4, 5), zeros(), zeros(1, 1)
    optimizer = NGD([still, number, short], lr=0.5)
    for _ in range(12):
        still.grad, number.grad, short.grad = (
            torch.zeros_like(still),
            torch.ones_like(number),
            torch.ones_like(short),
        )
        optimizer.step()
    assert torch.equal(still, torch.zeros_like(still))
    assert number.item() == short.item() == -6.0


def test_every_step_takes_the_rate_it_finds():
    number = zeros()
    optimizer = NGD([number], lr=0.5)
    for rate in (0.5, 0.5, torch.tensor(0.25), 0.5, 0.0, torch.tensor(0.0), 0.5):
        optimizer.param_groups[0]["lr"] = rate
        number.grad = torch.ones_like(number)
        optimizer.step()
    assert number.item() == -2.25


def test_scaled_losses_and_closures():
    models = [mlp([5, 7, 3]) for _ in range(3)]
    optimizers = [NGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(6):
        train_once(models[0], optimizers[0], t)
        train_once(models[1], optimizers[1], t, scaler)
        x = randn(8, 5, name=("x", t)).float()

        def closure(x=x):
            optimizers[2].zero_grad()
            loss = nn.functional.cross_entropy(models[2](x), torch.arange(8) % 3)
            loss.backward()
            return loss

        assert float(optimizers[2].step(closure).detach()) > 0
    for plain, scaled, closed in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(plain, scaled)
        assert torch.equal(plain, closed)


def test_it_descends_where_curvature_is_uneven():
    """At the same rate and with kept norms NGD is far below SGD on a badly scaled regression."""
    x, target = randn(200, 12, name="data") @ uneven(12), randn(12, 4, name="target")
    losses = {}
    for kind in (NGD, torch.optim.SGD):
        weight = zeros(12, 4)
        optimizer = kind([weight], lr=0.05, **({"alpha": 0.01} if kind is NGD else {}))
        for _ in range(200):
            optimizer.zero_grad()
            loss = (x @ (weight - target)).square().mean()
            loss.backward()
            optimizer.step()
        losses[kind] = loss.item()
    assert losses[NGD] < 0.3 * losses[torch.optim.SGD]


def test_what_is_not_finite_is_handed_on():
    """As with SGD: an error would stop the other members of an ensemble."""
    lost, kept, alone = zeros(4, 5), zeros(4, 5), zeros(4, 5)
    optimizer, single = NGD([lost, kept], lr=0.1), NGD([alone], lr=0.1)
    for t, g in enumerate(gradients((4, 5), 8)):
        lost.grad, kept.grad, alone.grad = g * (math.nan if t == 3 else 1.0), g, g
        optimizer.step()
        single.step()
    assert lost.isnan().all()
    assert torch.equal(kept, alone)


W = [nn.Parameter(torch.ones(2, 3))]


def stepped(parameter, *gradients):
    optimizer = NGD([parameter], lr=0.1)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()


ERRORS = {
    "negative rate": (
        lambda: NGD(W, lr=-1.0),
        ValueError,
        "lr must be a finite number of at least 0, got -1.0",
    ),
    "NaN rate": (
        lambda: NGD(W, lr=math.nan),
        ValueError,
        "lr must be a finite number of at least 0, got nan",
    ),
    "rate as text": (
        lambda: NGD(W, lr="0.1"),
        TypeError,
        "lr must be a number of at least 0, got '0.1'",
    ),
    "negative alpha": (
        lambda: NGD(W, lr=0.1, alpha=-1),
        ValueError,
        "alpha must be a finite number of at least 0",
    ),
    "infinite alpha": (
        lambda: NGD(W, lr=0.1, alpha=math.inf),
        ValueError,
        "alpha must be a finite number",
    ),
    "alpha in a group": (
        lambda: NGD([{"params": W, "alpha": -1.0}], lr=0.1),
        ValueError,
        "alpha must be a finite",
    ),
    "eta of 1": (lambda: NGD(W, lr=0.1, eta=1.0), ValueError, r"eta must lie in \(0, 1\), got 1.0"),
    "delta of 0": (
        lambda: NGD(W, lr=0.1, delta=0.0),
        ValueError,
        r"delta must lie in \(0, 1\), got 0.0",
    ),
    "epsilon of 0": (
        lambda: NGD(W, lr=0.1, epsilon=0.0),
        ValueError,
        "epsilon must be a finite number above 0",
    ),
    "no period": (
        lambda: NGD(W, lr=0.1, period=0),
        ValueError,
        "period must be an integer of at least 1, got 0",
    ),
    "rank of 0": (
        lambda: NGD(W, lr=0.1, rank=0),
        ValueError,
        "rank must be an integer of at least 1, got 0; leave it",
    ),
    "rank as share": (
        lambda: NGD(W, lr=0.1, rank=0.5),
        TypeError,
        "rank must be an integer of at least 1, got 0.5",
    ),
    "momentum of 1": (
        lambda: NGD(W, lr=0.1, momentum=1.0),
        ValueError,
        r"momentum must lie in \[0, 1\), got 1.0",
    ),
    "negative decay": (
        lambda: NGD(W, lr=0.1, weight_decay=-0.1),
        ValueError,
        "weight_decay must be a finite number",
    ),
    "complex weights": (
        lambda: NGD([nn.Parameter(torch.ones(3) * 1j)], lr=0.1),
        ValueError,
        "real floating point",
    ),
    "sparse gradient": (
        lambda: stepped(nn.Parameter(torch.ones(3)), torch.ones(3).to_sparse()),
        ValueError,
        "gradients must be dense.*sparse=False",
    ),
    "sparse gradient after a dense one": (
        lambda: stepped(nn.Parameter(torch.ones(3)), torch.ones(3), torch.ones(3).to_sparse()),
        ValueError,
        "gradients must be dense.*sparse=False",
    ),
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_misuse_is_named(case):
    call, error, text = ERRORS[case]
    with pytest.raises(error, match=text):
        call()
