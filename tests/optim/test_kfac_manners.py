"""KFAC as an optimiser among others: accumulation, hooks that leave no trace, checkpoints,
schedulers, scaling.
"""

import copy
import gc
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lambdahat as lh
from lambdahat.optim import KFAC
from tests.cases import Tied, normed

SETTINGS = {
    "damping": 0.03,
    "momentum": 0.9,
    "weight_decay": 0.01,
    "factor_every": 2,
    "inverse_every": 3,
}


@pytest.fixture(autouse=True)
def _draws():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


@pytest.fixture
def model():
    return nn.Sequential(
        nn.Linear(4, 5), nn.LayerNorm(5), nn.ReLU(inplace=True), nn.Linear(5, 3)
    ).double()


@pytest.fixture
def data():
    return torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))


def train(optimizer, model, x, y, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def same(one, other, exactly=True):
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0 if exactly else 1e-10, atol=0 if exactly else 1e-12)


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_accumulated_batches_are_one_batch(model, data, kind):
    x, y = data
    parts = copy.deepcopy(model)
    settings = {**SETTINGS, "factor_every": 1}
    train(KFAC(model, 0.1, kind=kind, **settings), model, x, y, 4)
    optimizer = KFAC(parts, 0.1, kind=kind, **settings)
    for _ in range(4):
        optimizer.zero_grad()
        for half in (slice(0, 3), slice(3, 8)):
            (F.cross_entropy(parts(x[half]), y[half], reduction="sum") / len(x)).backward()
        optimizer.step()
    same(model, parts, exactly=False)


def test_passes_without_training_are_not_recorded(model, data):
    x, y = data
    quiet = copy.deepcopy(model)
    train(KFAC(quiet, 0.1, **SETTINGS), quiet, x, y, 13)
    optimizer = KFAC(model, 0.1, **SETTINGS)
    for _ in range(13):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            model(3 * x)
        model.eval()
        torch.autograd.grad(F.cross_entropy(model(2 * x), y), list(model.parameters()))
        model.train()
        grads = torch.autograd.grad(
            F.cross_entropy(model(2 * x), y), list(model.parameters()), create_graph=True
        )
        torch.autograd.grad(sum(g.square().sum() for g in grads), list(model.parameters()))
        problem = lh.Problem(model, "cross_entropy", (x, y))
        lh.hessian(problem) @ problem.vector
        loss.backward()
        optimizer.step()
    same(model, quiet)


def test_a_step_not_taken_leaves_nothing(model, data):
    x, y = data
    clean = copy.deepcopy(model)
    train(KFAC(clean, 0.1, **SETTINGS), clean, x, y)
    optimizer = KFAC(model, 0.1, **SETTINGS)
    F.cross_entropy(model(5 * x), y).backward()
    train(optimizer, model, x, y)
    same(model, clean)


def test_copies_and_pickles_of_the_model_stay_apart(model, data):
    x, y = data
    alone = copy.deepcopy(model)
    train(KFAC(alone, 0.1, **SETTINGS), alone, x, y, 3)
    optimizer = KFAC(model, 0.1, **SETTINGS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for other in others:
            F.cross_entropy(other(7 * x), y).backward()
        optimizer.step()
    same(model, alone)


def test_a_saved_model_loads_without_lambdahat(tmp_path, model):
    optimizer = KFAC(model, 0.1)
    torch.save(model, tmp_path / "model.pt")
    optimizer.close()
    code = (
        "import sys, torch; sys.modules['lambdahat'] = None; "
        f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(2, 4).double())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_hooks_go_with_the_optimiser(model, data):
    optimizer = KFAC(model, 0.1)
    assert hooks(model) == 5
    optimizer.close()
    assert hooks(model) == 0
    optimizer = KFAC(model, 0.1)
    train(optimizer, model, *data)
    del optimizer
    gc.collect()
    assert hooks(model) == 0


@pytest.mark.parametrize("extra", [{}, {"kind": "ekfac"}, {"rank": 2}, {"sharing": "reduce"}])
@pytest.mark.parametrize("saved", [1, 12, 13])
def test_resumes_bit_for_bit(extra, saved):
    x, y = torch.randn(5, 2, 8, 8), torch.randint(3, (5,))
    first = normed()
    settings = {**SETTINGS, **extra, "lr": 0.05}
    optimizer = KFAC(first, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)

    def advance(optimizer, schedule, model, steps):
        for _ in range(steps):
            train(optimizer, model, x, y)
            schedule.step()

    advance(optimizer, schedule, first, saved)
    buffer = io.BytesIO()
    torch.save([first.state_dict(), optimizer.state_dict(), schedule.state_dict()], buffer)
    buffer.seek(0)
    weights, state, times = torch.load(buffer)  # tensors and plain values only
    second = normed()
    again = KFAC(second, **settings)
    later = torch.optim.lr_scheduler.StepLR(again, 5, 0.5)
    second.load_state_dict(weights)
    again.load_state_dict(state)
    later.load_state_dict(times)
    advance(optimizer, schedule, first, 17 - saved)
    advance(again, later, second, 17 - saved)
    same(first, second)


def test_moments_of_half_precision_weights_keep_their_dtype(data):
    model = nn.Linear(4, 3).bfloat16()
    optimizer = KFAC(model, 0.1)
    train(optimizer, model, data[0].bfloat16(), data[1])
    again = KFAC(model, 0.1)
    again.load_state_dict(optimizer.state_dict())
    for name, value in optimizer.state[model.weight].items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.float32
            assert torch.equal(again.state[model.weight][name], value)


def test_loss_scaling_changes_nothing(model, data):
    x, y = data
    plain = copy.deepcopy(model)
    train(KFAC(plain, 0.1, **SETTINGS), plain, x, y, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer = KFAC(model, 0.1, scaler=scaler, **SETTINGS)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    same(model, plain, exactly=False)


def test_an_overflow_does_not_reach_the_moments(model, data):
    x, y = data
    optimizer = KFAC(model, 0.1, factor_every=1)
    train(optimizer, model, x, y)
    before = {
        name: value.clone()
        for name, value in optimizer.state[model[0].weight].items()
        if name in "AG"
    }
    optimizer.zero_grad()
    (F.cross_entropy(model(x), y) * torch.inf).backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[model[0].weight]["G"], before["G"], rtol=0, atol=0)


def test_weight_decay_is_decoupled(model, data):
    x, y = data
    plain = copy.deepcopy(model)
    start = [p.detach().clone() for p in model.parameters()]
    train(KFAC(model, 0.1, weight_decay=0.2), model, x, y)
    train(KFAC(plain, 0.1), plain, x, y)
    for p, q, old in zip(model.parameters(), plain.parameters(), start, strict=True):
        torch.testing.assert_close(p, q - 0.1 * 0.2 * old)


def test_groups_have_their_own_rates(model, data):
    x, y = data
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    joint = copy.deepcopy(model)
    start = [p.detach().clone() for p in joint.parameters()]
    train(KFAC(joint, 0.1), joint, x, y)
    optimizer = KFAC(model, 0.1, parameters=[{"params": weights, "lr": 0.02}, {"params": biases}])
    train(optimizer, model, x, y)
    for p, q, old in zip(model.parameters(), joint.parameters(), start, strict=True):
        torch.testing.assert_close(old - p, (old - q) * (0.2 if p.ndim > 1 else 1.0))


def test_closure_and_update_norm(model, data):
    x, y = data
    twin = copy.deepcopy(model)
    train(KFAC(twin, 0.5), twin, x, y)
    optimizer = KFAC(model, 0.5)
    before = [p.detach().clone() for p in model.parameters()]

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.ndim == 0
    same(model, twin)
    change = torch.cat(
        [(old - p).flatten() for old, p in zip(before, model.parameters(), strict=True)]
    )
    torch.testing.assert_close(optimizer.update_norm * 0.5, change.norm())


def test_structure_names_every_parameter_once():
    model = nn.ModuleDict(
        {
            "tied": Tied(),
            "norm": nn.GroupNorm(2, 4),
            "words": nn.Embedding(6, 4),
            "lstm": nn.LSTM(3, 2),
        }
    )
    model.loose = nn.Parameter(torch.ones(3))
    found = KFAC(model, 0.1).structure()
    assert found["norm"] == "2×2 for each of 4 units"
    assert found["words"] == "kronecker 4×4 ⊗ diagonal of 6"
    assert found["tied.last"] == "kronecker 3×3 ⊗ 6×6"
    assert found["tied.first.weight"] == "plain gradient (tied)"
    assert found["tied.first"] == "kronecker 5×5 ⊗ 1×1"  # its bias is its own
    assert found["loose"] == found["lstm.bias_hh_l0"]
    assert (
        found["loose"] == "plain gradient (not in a linear, convolution, embedding or norm layer)"
    )


def test_parameters_without_a_block_take_sgds_step():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.scale

    model = Scale()
    other = copy.deepcopy(model)
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    train(KFAC(model, 0.1, momentum=0.9), model, x, y, 4)
    train(torch.optim.SGD(other.parameters(), 0.1, momentum=0.9), other, x, y, 4)
    same(model, other)


def test_layers_thawed_later_get_their_blocks(model, data):
    whole = copy.deepcopy(model)
    model[3].requires_grad_(False)
    optimizer = KFAC(model, 0.1)
    assert list(optimizer.structure()) == ["0", "1"]
    model[3].requires_grad_(True)
    optimizer.add_param_group({"params": model[3].parameters(), "damping": 0.01})
    assert list(optimizer.structure()) == ["0", "1", "3"]
    assert hooks(model) == 5
    train(optimizer, model, *data, 3)
    train(KFAC(whole, 0.1), whole, *data, 3)
    same(model, whole)


def test_observed_moments_are_due_every_factor_every_steps(model, data):
    x, y = data
    optimizer = KFAC(model, 0.1, fisher="monte_carlo", factor_every=3)
    problem = lh.Problem(model, "cross_entropy", data)
    seen = []
    for _ in range(16):
        seen.append(optimizer.due)
        if optimizer.due:
            optimizer.observe(problem)
            assert not optimizer.due
        train(optimizer, model, x, y)
    assert seen == [True] * 10 + [False, False, True, False, False, True]
    assert hooks(problem.model) == hooks(copy.deepcopy(model))
    assert not KFAC(model, 0.1).due


def test_functional_transforms_of_the_hooked_model_work(model, data):
    x, y = data
    optimizer = KFAC(model, 0.1)
    named = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(named, x, y)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(grads["0.weight"].mean(0), model[0].weight.grad)


MISUSES = {
    "parameters in place of a model": (
        lambda m: KFAC(m.parameters(), 0.1),
        TypeError,
        r"model must be a torch.nn.Module.*parameters=",
    ),
    "a compiled model": (
        lambda m: KFAC(torch.compile(m, backend="eager"), 0.1),
        ValueError,
        "model must not be compiled, got one of torch.compile; train it as it is",
    ),
    "negative damping": (
        lambda m: KFAC(m, 0.1, -1.0),
        ValueError,
        "damping must be a finite number of at least 0",
    ),
    "infinite rate": (
        lambda m: KFAC(m, float("inf")),
        ValueError,
        "lr must be a finite number of at least 0, got inf",
    ),
    "rate as text": (
        lambda m: KFAC(m, "0.1"),
        TypeError,
        "lr must be a number of at least 0, got '0.1'",
    ),
    "decay of 1": (
        lambda m: KFAC(m, 0.1, decay=1.0),
        ValueError,
        r"decay must lie in \[0, 1\), got 1.0",
    ),
    "momentum of 2": (
        lambda m: KFAC(m, 0.1, momentum=2),
        ValueError,
        r"momentum must lie in \[0, 1\), got 2",
    ),
    "no change at all": (
        lambda m: KFAC(m, 0.1, kl_clip=0),
        ValueError,
        "kl_clip must be .* above 0.*None switches it",
    ),
    "never inverted": (
        lambda m: KFAC(m, 0.1, inverse_every=0),
        ValueError,
        "inverse_every must be an integer of at",
    ),
    "unknown kind": (
        lambda m: KFAC(m, 0.1, kind="kron"),
        ValueError,
        "kind must be one of 'kfac', 'ekfac'",
    ),
    "unknown Fisher": (
        lambda m: KFAC(m, 0.1, fisher="true"),
        ValueError,
        "fisher must be one of 'empirical'",
    ),
    "unknown sharing": (
        lambda m: KFAC(m, 0.1, sharing="sum"),
        ValueError,
        "sharing must be one of 'expand', 'reduce'",
    ),
    "EKFAC of low rank": (
        lambda m: KFAC(m, 0.1, kind="ekfac", rank=3),
        ValueError,
        'rank must be None for kind="ekf',
    ),
    "bad group": (
        lambda m: KFAC(m, 0.1, parameters=[{"params": m.parameters(), "damping": -1}]),
        ValueError,
        "damping must be",
    ),
    "step before any pass": (
        lambda m: KFAC(m, 0.1).step(),
        RuntimeError,
        "the model must have run forward and backw",
    ),
    "training in eval mode": (
        lambda m: train(KFAC(m, 0.1), m.eval(), torch.ones(2, 4).double(), torch.tensor([0, 1])),
        RuntimeError,
        r"call model.train\(\)",
    ),
    "observing the empirical Fisher": (
        lambda m: KFAC(m, 0.1).observe(None),
        ValueError,
        'fisher must be "monte_carlo" or "exact"',
    ),
    "no observation": (
        lambda m: train(
            KFAC(m, 0.1, fisher="exact"), m, torch.ones(2, 4).double(), torch.tensor([0, 1])
        ),
        RuntimeError,
        r"observe\(problem\) must be called before the first step",
    ),
    "observing a model": (
        lambda m: KFAC(m, 0.1, fisher="exact").observe(m),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "another model": (
        lambda m: KFAC(m, 0.1, fisher="exact").observe(
            lh.Problem(
                nn.Linear(4, 3).double(),
                "cross_entropy",
                (torch.ones(2, 4).double(), torch.tensor([0, 1])),
            )
        ),
        ValueError,
        "problem must have parameters of shapes",
    ),
    "another point": (
        lambda m: KFAC(m, 0.1, fisher="exact").observe(
            lh.Problem(m, "cross_entropy", (torch.ones(2, 4).double(), torch.tensor([0, 1]))).at(
                torch.zeros(53)
            )
        ),
        ValueError,
        "problem must be at the optimiser's present parameters",
    ),
    "singular without damping": (
        lambda m: train(KFAC(m, 0.1, 0.0), m, torch.zeros(2, 4).double(), torch.tensor([0, 1])),
        RuntimeError,
        "damping must make the moments of layer '0' positive definite.*raise damping",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_with_the_cure(name, model):
    call, error, text = MISUSES[name]
    with pytest.raises(error, match=text):
        call(model)
