"""Gadam's family: what it reduces to, whose average it keeps, when it starts and stops; and that
all of it resumes.
"""

import copy
import json
import pickle

import pytest
import torch
from torch import nn

from lambdahat.optim import (
    ASGD,
    SWA,
    Averaged,
    Gadam,
    GadamAuto,
    GadamX,
    Lookahead,
    Padam,
    PadamW,
    schedules,
)
from tests.optim.small_runs import X, Y, flat, network, same, train


@pytest.mark.parametrize("average_start", [None, 3])
def test_gadams_steps_are_adamws(average_start):
    ours, theirs = network(), network()
    a = train(
        ours, Gadam(ours.parameters(), lr=0.01, weight_decay=0.1, average_start=average_start), 10
    )
    b = train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1), 10)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


TAKEN = [
    (0, 1, range(1, 12)),
    (1, 1, range(1, 12)),
    (5, 1, range(5, 12)),
    (4, 3, (4, 7, 10)),
    (11, 4, (11,)),
    (0, 5, (5, 10)),
]


@pytest.mark.parametrize(("start", "every", "taken"), TAKEN)
def test_the_average_is_that_of_the_iterates_named(start, every, taken):
    model = network()
    optimizer = Gadam(model.parameters(), lr=0.01, average_start=start, average_every=every)
    iterates = train(model, optimizer, 11)
    expected = iterates[[t - 1 for t in taken]].double().mean(0).float()
    torch.testing.assert_close(flat(optimizer.averaged_parameters), expected, rtol=1e-5, atol=1e-7)
    assert optimizer.averaging


def test_an_average_of_one_iterate_is_the_iterate():
    model = network()
    optimizer = GadamX(model.parameters(), lr=0.01, average_start=6)
    iterates = train(model, optimizer, 6)
    assert torch.equal(flat(optimizer.averaged_parameters), iterates[-1])


def test_before_averaging_the_average_is_the_weights():
    model = network()
    optimizer = Gadam(model.parameters(), average_start=100)
    train(model, optimizer, 2)
    assert not optimizer.averaging
    assert same(optimizer.averaged_parameters, model.parameters())


def test_the_average_stands_in_only_inside_the_block():
    model = network()
    optimizer = Gadam(model.parameters(), lr=0.1, average_start=1)
    last = train(model, optimizer, 5)[-1]
    with optimizer.average():
        assert same(model.parameters(), optimizer.averaged_parameters)
        assert not torch.equal(flat(model.parameters()), last)
    assert torch.equal(flat(model.parameters()), last)
    with pytest.raises(ZeroDivisionError), optimizer.average():
        raise ZeroDivisionError
    assert torch.equal(flat(model.parameters()), last)
    with pytest.raises(RuntimeError, match="step or load weights outside"), optimizer.average():
        optimizer.step()
    assert torch.equal(flat(model.parameters()), last)


def test_averaged_model_has_its_own_batch_norm_statistics():
    model = network(norm=True)
    optimizer = SWA(model.parameters(), lr=0.1, average_start=2)
    train(model, optimizer, 6)
    before = copy.deepcopy(model.state_dict())
    twin = optimizer.averaged_model(model, [(X, Y)])
    assert same(twin.parameters(), optimizer.averaged_parameters)
    hidden = twin[0](X)
    torch.testing.assert_close(twin[1].running_mean, hidden.mean(0))
    torch.testing.assert_close(twin[1].running_var, hidden.var(0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    first = optimizer.averaged_model(model, X.split(4), limit=1)
    torch.testing.assert_close(first[1].running_mean, twin[0](X[:4]).mean(0))


def test_swa_is_sgd_with_the_mean_of_its_iterates():
    ours, theirs = network(), network()
    optimizer = SWA(
        ours.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01, average_start=4, average_every=2
    )
    train(ours, optimizer, 10)
    iterates = train(
        theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01), 10
    )
    assert torch.equal(flat(ours.parameters()), iterates[-1])
    torch.testing.assert_close(flat(optimizer.averaged_parameters), iterates[[3, 5, 7, 9]].mean(0))


def test_asgd_without_decay_is_averaged_sgd():
    ours, theirs = network(), network()
    a = ASGD(ours.parameters(), lr=0.1, lambd=0.0, t0=4)
    b = Averaged(torch.optim.SGD(theirs.parameters(), lr=0.1), average_start=6)
    train(ours, a, 10)
    train(theirs, b, 10)
    torch.testing.assert_close(
        flat(a.averaged_parameters), flat(b.averaged_parameters), rtol=1e-5, atol=1e-7
    )
    with a.average():
        assert same(ours.parameters(), a.averaged_parameters)


def test_asgd_averages_where_its_first_parameter_has_no_gradient():
    still, moving = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = ASGD([still, moving], lr=0.1, t0=1)
    for step in range(6):
        assert optimizer.averaging is (step > 2)
        moving.grad = torch.ones(2)
        optimizer.step()


def test_patience_starts_the_average_and_then_stops():
    model = network()
    optimizer = GadamAuto(model.parameters(), patience=2, average_every=3)
    history = []
    for value in (5.0, 4.0, 4.5, float("nan"), 6.0, 5.9, 5.8, 5.9, 5.8):
        train(model, optimizer, 3)
        optimizer.record(value)
        history.append(
            (optimizer.averaging, optimizer.param_groups[0]["averaged"], optimizer.stopped)
        )
    # 4.0 is followed by two epochs without a new best; the average's own values count afresh from
    # 6.0 on.
    waiting, averaging = [(False, 0, False)] * 3, [(True, n, False) for n in range(1, 6)]
    assert history == [*waiting, *averaging, (True, 6, True)]


def test_lookahead_rests_once_gadam_averages():
    ours, theirs = network(), network()
    settings = {"lr": 0.05, "average_start": 7}
    a = train(ours, Lookahead(Gadam(ours.parameters(), **settings), k=3), 12)
    b = train(theirs, Lookahead(Gadam(theirs.parameters(), lr=0.05), k=3), 12)
    assert torch.equal(a[:8], b[:8])
    assert not torch.equal(a[8], b[8])  # the ninth step pulls back only without averaging


MAKERS = {
    "padam": lambda p: Padam(p, lr=0.05, weight_decay=0.01),
    "padamw": lambda p: PadamW(p, lr=0.05, capturable=True),
    "gadam": lambda p: Gadam(p, lr=0.05, average_start=4, average_every=2),
    "gadamx": lambda p: GadamX(p, lr=0.05, average_start=7),
    "gadamauto": lambda p: GadamAuto(p, lr=0.05, patience=3),
    "swa": lambda p: SWA(p, lr=0.05, average_start=3),
    "asgd": lambda p: ASGD(p, lr=0.05, t0=3),
    "lookahead": lambda p: Lookahead(torch.optim.Adam(p, lr=0.05), k=4),
    "gadam + lookahead": lambda p: Lookahead(Gadam(p, lr=0.05, average_start=8), k=3),
    "averaged lookahead": lambda p: Averaged(
        Lookahead(torch.optim.SGD(p, lr=0.05, momentum=0.9), k=4), average_start=3
    ),
}


def through_disk(state):
    """Tensors apart and the rest through JSON, as a checkpoint of safetensors and JSON does."""
    tensors, plain = {}, {}
    for index, entry in state["state"].items():
        for name, value in entry.items():
            (tensors if isinstance(value, torch.Tensor) else plain)[(index, name)] = copy.deepcopy(
                value
            )
    values = json.loads(json.dumps([[*key, value] for key, value in plain.items()]))
    found = {index: {} for index in state["state"]}
    for index, name, value in [*values, *([*key, value] for key, value in tensors.items())]:
        found[index][name] = value
    return {"state": found, "param_groups": json.loads(json.dumps(state["param_groups"]))}


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_has_the_same_bits(name):
    def begin():
        model = network()
        optimizer = MAKERS[name](model.parameters())
        return model, optimizer, schedules.cosine(optimizer, 20)

    model, optimizer, scheduler = begin()
    train(model, optimizer, 10, scheduler)
    if name == "gadamauto":
        for value in (1.0, 2.0, 2.0):
            optimizer.record(value)
    weights, kept = copy.deepcopy(model.state_dict()), through_disk(optimizer.state_dict())
    rate = json.loads(json.dumps(scheduler.state_dict()))
    if name == "gadamauto":
        optimizer.record(3.0)
    train(model, optimizer, 6, scheduler)

    twin, resumed, schedule = begin()
    twin.load_state_dict(weights)
    resumed.load_state_dict(kept)
    schedule.load_state_dict(rate)
    if name == "gadamauto":
        resumed.record(3.0)
        assert resumed.averaging
    train(twin, resumed, 6, schedule)
    assert same(model.parameters(), twin.parameters())
    if hasattr(optimizer, "averaged_parameters"):
        assert same(optimizer.averaged_parameters, resumed.averaged_parameters)


@pytest.mark.parametrize("name", MAKERS)
def test_it_survives_pickling_with_its_model(name):
    model = network()
    optimizer = MAKERS[name](list(model.parameters()))
    train(model, optimizer, 5)
    twin, copied = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, 5)
    train(twin, copied, 5)
    assert same(model.parameters(), twin.parameters())


@pytest.mark.parametrize("name", MAKERS)
def test_hooks_run_once_a_step(name):
    model = network()
    optimizer = MAKERS[name](model.parameters())
    # a class that has made an instance runs the hooks of its subclasses too
    MAKERS["padam"](network().parameters())
    MAKERS["padamw"](network().parameters())
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    train(model, optimizer, 3)
    assert len(seen) == 3


@pytest.mark.parametrize("name", MAKERS)
def test_a_group_can_be_added(name):
    model, late = network(), nn.Parameter(torch.ones(2))
    optimizer = MAKERS[name](model.parameters())
    train(model, optimizer, 5)
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(2)
    optimizer.step()
    assert late.max() < 1
    assert len(optimizer.state_dict()["param_groups"]) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Gadam(p, lr=0.05, average_start=2, average_every=2),
        lambda p: SWA(p, lr=0.05, average_start=2, average_every=2),
        lambda p: Lookahead(Gadam(p, lr=0.05, average_start=2, average_every=2)),
    ],
)
def test_a_group_added_later_shares_the_count(make):
    model, late = network(), nn.Parameter(torch.ones(2))
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": [late]})
    iterates = []
    for _ in range(4):
        late.grad = torch.ones(2)
        optimizer.step()
        iterates.append(late.detach().clone())
    assert [(g["average_step"], g["averaged"]) for g in optimizer.param_groups] == [(7, 3), (7, 2)]
    average = optimizer.averaged_parameters[-1]
    # steps 4 and 6; 2 was before its time
    torch.testing.assert_close(average, (iterates[0] + iterates[2]) / 2)


def test_a_group_added_later_joins_an_average_that_patience_began():
    model, late = network(), nn.Parameter(torch.ones(2))
    optimizer = GadamAuto(model.parameters(), lr=0.05, patience=1)
    train(model, optimizer, 2)
    for value in (1.0, 2.0, 3.0, 4.0):
        optimizer.record(value)
    assert optimizer.stopped
    optimizer.add_param_group({"params": [late]})
    first, second = optimizer.param_groups
    assert {k: second[k] for k in ("best", "waited", "stopped")} == {
        "best": 3.0,
        "waited": 1,
        "stopped": True,
    }
    late.grad = torch.ones(2)
    optimizer.step()
    assert (second["average_step"], second["averaged"]) == (first["average_step"], 1)
    assert torch.equal(optimizer.averaged_parameters[-1], late)


def test_a_group_added_later_may_have_its_own_start():
    model, late = network(), nn.Parameter(torch.ones(2))
    optimizer = Gadam(model.parameters(), lr=0.05, average_start=2)
    train(model, optimizer, 3)
    optimizer.add_param_group({"params": [late], "average_start": 5})
    counts = []
    for _ in range(3):
        late.grad = torch.ones(2)
        optimizer.step()
        counts.append(optimizer.param_groups[1]["averaged"])
    assert counts == [0, 1, 2]
