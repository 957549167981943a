"""What every registered optimiser keeps: it resumes to the bit, and takes closures and groups."""

import copy
import importlib.util
import inspect
import io
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from lambdahat.optim.registry import OPTIMIZERS, make_optimizer
from lambdahat.problem import Problem
from tests.optim.small_runs import X, Y, flat, network

LR = 0.02


def required(kind):
    """The options without a default, apart from the learning rate: all are positive numbers."""
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    return {p.name: 1.0 for p in parameters if p.default is p.empty and p.name != "lr"}


def make(name, model):
    return make_optimizer(name, model, lr=LR, **required(OPTIMIZERS[name]))


def train(model, optimizer, steps, start=0, closure=False):
    """The losses of a few steps on mini-batches; curvature is observed whenever it is due."""
    losses = []
    for t in range(start, start + steps):
        rows = torch.arange(4) + 4 * (t % 4)
        if getattr(optimizer, "due", False):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            names = [name for name, p in model.named_parameters() if id(p) in held]
            optimizer.observe(Problem(model, "mse", (X[rows], Y[rows]), parameters=names))

        def loss(rows=rows):
            optimizer.zero_grad()
            value = mse_loss(model(X[rows]), Y[rows])
            value.backward()
            return value

        if closure:
            losses.append(float(optimizer.step(loss).detach()))
        else:
            losses.append(float(loss().detach()))
            optimizer.step()
    return losses


def require_same_state(one, other):
    """Two state dicts hold the same tensors, bit for bit, and the same settings."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_same_state(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for part, twin in zip(one, other, strict=True):
            require_same_state(part, twin)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def check_resume(name):
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, 13)  # past the first steps, at which some update always
    stored = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), stored)
    stored.seek(0)
    weights, state = torch.load(stored, weights_only=True)
    again = network()
    again.load_state_dict(weights)
    resumed = make(name, again)
    resumed.load_state_dict(state)
    require_same_state(resumed.state_dict(), state)
    before = flat(model.parameters())
    train(model, optimizer, 5, start=13)
    train(again, resumed, 5, start=13)
    assert not torch.equal(flat(model.parameters()), before)
    assert torch.equal(flat(again.parameters()), flat(model.parameters()))
    require_same_state(resumed.state_dict(), optimizer.state_dict())


def check_closure(name):
    model, other = network(), network()
    plain = train(model, make(name, model), 5)
    assert train(other, make(name, other), 5, closure=True) == plain
    assert torch.equal(flat(other.parameters()), flat(model.parameters()))


def make_of(kind, model, groups, **options):
    options = {"lr": LR, **required(kind), **options}
    if getattr(kind, "takes_model", False):
        return kind(model, parameters=groups, **options)
    return kind(groups, **options)


def check_groups(name):
    """A group with lr = 0 stands still, the other moves; a state holds both groups."""
    model, kind = network(), OPTIMIZERS[name]
    groups = [
        {"params": list(model[0].parameters()), "lr": 0.0},
        {"params": list(model[2].parameters())},
    ]
    optimizer = make_of(kind, model, groups)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, LR]
    first, second = (flat(model[i].parameters()) for i in (0, 2))
    train(model, optimizer, 3)
    assert torch.equal(flat(model[0].parameters()), first)
    assert not torch.equal(flat(model[2].parameters()), second)
    state = copy.deepcopy(optimizer.state_dict())
    assert [len(group["params"]) for group in state["param_groups"]] == [2, 2]
    optimizer.load_state_dict(state)
    require_same_state(optimizer.state_dict(), state)


def check_frozen(name):
    """Parameters without a gradient are left alone."""
    model = network()
    model[2].bias.requires_grad_(False)
    kept = model[2].bias.clone()
    train(model, make(name, model), 3)
    assert torch.equal(model[2].bias, kept)


def check_order(name):
    """Weights and biases in groups of their own are trained as all are in one group."""
    model, other = network(), network()
    kinds = ("weight", "bias")
    named = list(model.named_parameters())
    groups = [{"params": [p for key, p in named if key.endswith(kind)]} for kind in kinds]
    train(model, make_of(OPTIMIZERS[name], model, groups), 5)
    train(other, make(name, other), 5)
    assert torch.allclose(flat(model.parameters()), flat(other.parameters()), atol=1e-5)


def check_late_group(name):
    """Parameters of a group that is added later move too."""
    model, rarely = network(), RARELY.get(name, {})
    optimizer = make_of(OPTIMIZERS[name], model, list(model[2].parameters()), **rarely)
    train(model, optimizer, 3)
    before = flat(model[0].parameters())
    optimizer.add_param_group({"params": list(model[0].parameters())})
    train(model, optimizer, 2, start=3)
    assert not torch.equal(flat(model[0].parameters()), before)


# one observation is to last for the whole test
RARELY = {name: {"every": 100} for name in ("exact-ngd", "lanczos-newton", "spectral-sgd")}
RARELY["lanczos-newton"]["pairs"] = 4


def check_copies(name):
    """Copies and pickles of a model with its optimiser train on as they do, each by itself."""
    model = network()
    optimizer = make(name, model)
    train(model, optimizer, 13)
    pairs = model, optimizer
    copies = [copy.deepcopy(pairs), pickle.loads(pickle.dumps(pairs))]
    train(*pairs, 5, start=13)
    for twin, its in copies:
        train(twin, its, 5, start=13)
        assert torch.equal(flat(twin.parameters()), flat(model.parameters()))
        require_same_state(its.state_dict(), optimizer.state_dict())


def check_zero_size(name):
    """A parameter without entries changes nothing."""
    model, other = network(), network()
    for shape in ((0,), (0, 3), (3, 0, 2)):
        model[0].register_parameter(f"none{len(shape)}", nn.Parameter(torch.zeros(shape)))
    model.register_forward_hook(lambda m, _, y: y + sum(p.sum() for p in list(m.parameters())[2:5]))
    train(model, make(name, model), 5)
    train(other, make(name, other), 5)
    assert torch.allclose(flat(model.parameters()), flat(other.parameters()), atol=1e-6)


CONTRACT = (check_resume, check_closure, check_groups, check_frozen, check_order)
CONTRACT += (check_late_group, check_copies, check_zero_size)


@pytest.mark.parametrize("check", CONTRACT)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_contract(name, check):
    check(name)


TOY = '''
import torch
from lambdahat.optim.registry import register_optimizer

@register_optimizer("toy")
class Toy(torch.optim.SGD):
    """Sign descent."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p -= group["lr"] * p.grad.sign() * {factor}
        return loss
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A new optimiser is one file that registers itself."""

    def add(factor="1.0"):
        path = tmp_path / "toy.py"
        path.write_text(TOY.replace("{factor}", factor))
        spec = importlib.util.spec_from_file_location("toy", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "toy", module)
        spec.loader.exec_module(module)

    yield add
    OPTIMIZERS.pop("toy", None)


@pytest.mark.parametrize("check", CONTRACT)
def test_a_new_optimiser_is_tested_by_being_registered(toy, check):
    toy()
    check("toy")


def test_the_contract_finds_a_state_that_is_not_stored(toy):
    toy("(vars(self).setdefault('count', []).append(1) or len(self.count))")
    with pytest.raises(AssertionError):
        check_resume("toy")


def test_a_name_is_registered_once(toy):
    toy()
    with pytest.raises(ValueError, match="name must not be taken, got 'toy'"):
        toy()


def test_optimisers_take_parameters_unless_they_say_otherwise():
    model = nn.Linear(2, 1)
    assert [name for name, kind in OPTIMIZERS.items() if getattr(kind, "takes_model", False)] == [
        "kfac"
    ]
    assert make("kfac", model).param_groups[0]["params"][0] is model.weight
