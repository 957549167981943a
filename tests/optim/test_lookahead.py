"""Lookahead against its recursion, its base and pytorch_optimizer."""

import pytest
import torch

from lambdahat.optim import KFAC, SWA, Averaged, Gadam, Lookahead
from tests.optim.small_runs import network, same, train


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.Adam]
)
def test_alpha_one_is_the_base(make):
    ours, theirs = network(), network()
    a = train(ours, Lookahead(make(ours.parameters()), k=3, alpha=1.0), 10)
    assert torch.equal(a, train(theirs, make(theirs.parameters()), 10))


def test_slow_weights_by_hand():
    w = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = Lookahead(torch.optim.SGD([w], lr=0.1), k=2, alpha=0.3)
    slow = fast = 1.0
    for t in range(1, 8):
        w.grad = 2 * w.detach()
        optimizer.step()
        fast -= 0.1 * 2 * fast
        if t % 2 == 0:
            slow = fast = slow + 0.3 * (fast - slow)
        assert w.item() == pytest.approx(fast, rel=1e-14)


def test_centralised_gradients_have_no_mean_per_output():
    ours, theirs = network(), network()
    optimizer = Lookahead(torch.optim.SGD(ours.parameters(), lr=0.1), k=100, centralize=True)
    x = torch.ones(4, 3)

    def closure():
        optimizer.zero_grad()
        loss = ours(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    theirs(x).square().mean().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        g = q.grad - q.grad.mean(1, keepdim=True) if q.dim() == 2 else q.grad
        torch.testing.assert_close(p, q - 0.1 * g)
    optimizer.zero_grad()
    ours(x).square().mean().backward()
    optimizer.step()  # and without a closure
    weights = [p.grad for p in ours.parameters() if p.dim() == 2]
    assert all(w.mean(1).abs().max() < 1e-6 for w in weights)


@pytest.mark.parametrize("wrap", [lambda base: Lookahead(base, alpha=1.0), Averaged])
def test_clearing_gradients_clears_what_the_base_keeps_beside_them(wrap):
    """KFAC forgets the passes that it traced for a step that was not taken."""
    models = network(), network()
    for model, wrapped in zip(models, (False, True), strict=True):
        base = KFAC(model, lr=0.1)
        optimizer = wrap(base) if wrapped else base
        for scale in (10.0, 1.0, 1.0):
            optimizer.zero_grad()
            model(scale * torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
    assert same(*(model.parameters() for model in models))


TWICE = {
    "lookahead_k": lambda p: Lookahead(Averaged(Lookahead(torch.optim.SGD(p, lr=0.1), k=2)), k=6),
    "average_start": lambda p: Averaged(Gadam(p), average_start=3),
    "patience": lambda p: Averaged(Lookahead(SWA(p)), average_start=3),
}


@pytest.mark.parametrize("name", TWICE)
def test_what_the_base_does_already_is_refused(name):
    """Both would share one set of settings and counts."""
    with pytest.raises(ValueError, match=r"base must have no .* of its own, got a "):
        TWICE[name](network().parameters())


def test_names_of_the_base_shine_through():
    base = torch.optim.SGD(network().parameters(), lr=0.1)
    base.due = True
    optimizer = Lookahead(base)
    assert optimizer.due
    assert optimizer.base is base
    assert not hasattr(optimizer, "observe")
    base.param_groups[0]["lr"] = 0.7
    assert optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.oracle
def test_steps_are_pytorch_optimizers():
    peer = pytest.importorskip("pytorch_optimizer")
    ours, theirs = network(), network()
    a = train(ours, Lookahead(torch.optim.Adam(ours.parameters(), lr=0.05), k=3, alpha=0.4), 10)
    b = train(
        theirs, peer.Lookahead(torch.optim.Adam(theirs.parameters(), lr=0.05), k=3, alpha=0.4), 10
    )
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
