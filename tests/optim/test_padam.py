"""Padam against a float64 recursion written from the equations, torch's Adam and AdamW, and
pytorch_optimizer.
"""

import copy

import pytest
import torch

from lambdahat.optim import GadamX, Padam, PadamW

SHAPES = ((4, 3), (3,), (2, 1, 3, 3))
BETAS = (0.8, 0.95)


def weights(dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def gradients(steps, seed=1):
    """A fixed list of gradients of very different sizes."""
    rng = torch.Generator().manual_seed(seed)
    for t in range(steps):
        yield [
            torch.randn(shape, generator=rng, dtype=torch.float64) * 10.0 ** (t % 3 - 1)
            for shape in SHAPES
        ]


def run(make, steps=12, dtype=torch.float64):
    params = weights(dtype)
    optimizer = make(params)
    for grads in gradients(steps):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
    return [p.detach() for p in params]


def reference(form, power, amsgrad, decay, decoupled, lr=0.05, eps=1e-3, steps=12):
    """One parameter at a time, from FACTS "Gadam" and Algorithm 9 of the spectral thesis."""
    beta1, beta2 = BETAS
    found = []
    for index, start in enumerate(weights()):
        theta, m, v, top = start.detach().clone(), 0.0, 0.0, torch.zeros_like(start)
        for t, grads in enumerate(gradients(steps), start=1):
            g = grads[index] + (0 if decoupled else decay * theta)
            theta = theta * (1 - lr * decay) if decoupled else theta
            c1, c2 = 1 - beta1**t, 1 - beta2**t
            m = beta1 * m + (1 - beta1) * (g / c1 if form == "printed" else g)
            v = beta2 * v + (1 - beta2) * (g**2 / c2 if form == "printed" else g**2)
            top = torch.maximum(top, v)
            used = top if amsgrad else v
            if form == "adamw":
                step = (m / c1) / ((used / c2) ** 0.5 + eps) ** (2 * power)
            elif form == "coded":
                step = c2**0.5 / c1 * m / (used**0.5 + eps) ** (2 * power)
            else:
                step = m / (used + eps) ** power
            theta = theta - lr * step
        found.append(theta)
    return found


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("form", ["adamw", "coded", "printed"])
def test_the_recursion_of_each_form(form, amsgrad, decoupled, capturable):
    settings = {"lr": 0.05, "betas": BETAS, "eps": 1e-3, "weight_decay": 0.1, "p": 0.2}
    flags = {"form": form, "amsgrad": amsgrad, "decoupled": decoupled, "capturable": capturable}
    ours = run(lambda params: Padam(params, **settings, **flags))
    theirs = reference(form, 0.2, amsgrad, 0.1, decoupled)
    # A captured step counts in float32, as torch's own do.
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-5 if capturable else 0)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_is_torch_adam_and_adamw(dtype, amsgrad):
    common = {"lr": 0.05, "betas": BETAS, "eps": 1e-6, "weight_decay": 0.1, "amsgrad": amsgrad}
    rtol = 2e-6 if dtype == torch.float32 else 1e-14
    pairs = [
        (lambda p: Padam(p, p=0.5, **common), lambda p: torch.optim.Adam(p, **common)),
        (lambda p: PadamW(p, p=0.5, **common), lambda p: torch.optim.AdamW(p, **common)),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(
            run(ours, dtype=dtype), run(theirs, dtype=dtype), rtol=rtol, atol=0
        )


def test_gadamx_at_half_is_amsgrad_w():
    ours = run(lambda p: GadamX(p, lr=0.01, weight_decay=0.1, p=0.5))
    theirs = run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)


def test_small_p_goes_to_bias_corrected_momentum():
    found = run(lambda p: Padam(p, lr=0.05, betas=BETAS, p=1e-9, amsgrad=False))
    for index, (theta, start) in enumerate(zip(found, weights(), strict=True)):
        m, expected = 0.0, start.detach().clone()
        for t, grads in enumerate(gradients(12), start=1):
            m = BETAS[0] * m + (1 - BETAS[0]) * grads[index]
            expected -= 0.05 * m / (1 - BETAS[0] ** t)
        torch.testing.assert_close(theta, expected, rtol=1e-6, atol=1e-8)


def test_the_three_forms_differ_away_from_each_other():
    found = [
        torch.cat([t.ravel() for t in reference(form, 0.2, False, 0.0, True)])
        for form in ("adamw", "coded")
    ]
    assert not torch.allclose(*found, rtol=1e-3)


def test_groups_frozen_parameters_and_closures():
    a, b, idle = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = Padam([{"params": [a], "lr": 0.5}, {"params": [b, idle], "p": 0.5}], lr=0.25)

    def closure():
        optimizer.zero_grad()
        loss = a.sum() + 2 * b.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6.0
    assert a.tolist() == pytest.approx([0.5, 0.5])
    assert b.tolist() == pytest.approx([0.75, 0.75])
    assert idle.tolist() == [1.0, 1.0]
    assert idle not in optimizer.state


def test_a_gradient_scaler_unscales_and_skips():
    model = torch.nn.Linear(3, 1)
    twin = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled, plain = (Padam(m.parameters(), lr=0.1) for m in (model, twin))
    x = torch.ones(2, 3)
    scaler.scale(model(x).sum()).backward()
    scaler.step(scaled)
    scaler.update()
    twin(x).sum().backward()
    plain.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=1e-6, atol=0)
    before = copy.deepcopy(model.state_dict())
    scaled.zero_grad()
    scaler.scale(model(x * torch.inf).sum()).backward()
    scaler.step(scaled)
    scaler.update()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.oracle
def test_coded_form_is_pytorch_optimizers():
    peer = pytest.importorskip("pytorch_optimizer")
    settings = {"lr": 0.05, "betas": BETAS, "eps": 1e-3, "weight_decay": 0.1}
    ours = run(lambda p: Padam(p, p=0.2, form="coded", amsgrad=False, **settings))
    theirs = run(lambda p: peer.PAdam(p, partial=0.2, **settings))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
