"""KFAC-expand and KFAC-reduce (Eschenhagen et al. 2023): where they are exact, by definition,
and beside curvlinops.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import lambdahat as lh
from tests.operators.kronecker_cases import relative

RNG = torch.Generator().manual_seed(0)


class Mean(nn.Module):
    """The mean over positions: over the sequence (B, T, D), or over the image (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1) if x.ndim == 3 else x.mean(dim=(2, 3))


def seeded(*layers: Any) -> nn.Sequential:
    """Layers, or functions that make them, in a row; the same numbers at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = [layer if isinstance(layer, nn.Module) else layer() for layer in layers]
        return nn.Sequential(*made).double()


def conv(*args: Any, **options: Any) -> Any:
    return lambda: nn.Conv2d(*args, **options)


def linear(*args: Any, **options: Any) -> Any:
    return lambda: nn.Linear(*args, **options)


SEQUENCE = torch.randn(7, 5, 4, generator=RNG, dtype=torch.float64)
IMAGE = torch.randn(7, 2, 5, 4, generator=RNG, dtype=torch.float64)


def dense(model: nn.Module, problem: lh.Problem, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    space, theta = problem.space, problem.vector

    def output(t: Tensor) -> Tensor:
        return functional_call(model, space.unflatten(t), (x,))

    z = output(theta).detach()
    J = jacrev(output)(theta).reshape(-1, len(theta))
    return J.T @ hessian(lambda z: loss(z, y))(z).reshape(z.numel(), z.numel()) @ J


EXACT = {
    ("expand", "sequence"): (seeded(linear(4, 3), linear(3, 2, bias=False)), SEQUENCE),
    ("expand", "image"): (seeded(conv(2, 3, 2, padding=1), conv(3, 2, 1)), IMAGE),
    ("reduce", "sequence"): (seeded(linear(4, 3), linear(3, 2), Mean), SEQUENCE),
    ("reduce", "image"): (
        seeded(conv(2, 3, 2, stride=2), conv(3, 4, 1), Mean, linear(4, 2)),
        IMAGE,
    ),
}


@pytest.mark.parametrize("build", [lh.kfac, lh.ekfac])
@pytest.mark.parametrize("batch_size", [7, 3])
@pytest.mark.parametrize(("sharing", "kind"), EXACT)
def test_deep_linear_networks_are_exact_in_their_own_setting(
    sharing: str, kind: str, batch_size: int, build: Any
) -> None:
    """A loss at each position for "expand", one of the mean over positions for "reduce"."""
    model, x = EXACT[sharing, kind]
    y = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    problem = lh.Problem(model, "mse", (x, y), batch_size=batch_size)
    truth, K = dense(model, problem, nn.MSELoss(), x, y), build(problem, sharing=sharing)
    other = build(problem, sharing="reduce" if sharing == "expand" else "expand")
    gaps = []
    for block in K.blocks.values():
        where = block.indices.reshape(-1)
        assert relative(block.dense(), truth[where][:, where]) < 1e-10
        gaps.append(relative(other.dense()[where][:, where], truth[where][:, where]))
    assert max(gaps) > 1e-2  # the other setting is none


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_those_of_the_definition(sharing: str) -> None:
    """Layer by layer: the inputs at each position and the Jacobian of the output by the layer's
    output.
    """
    model = seeded(linear(4, 3), nn.Tanh(), linear(3, 3), nn.Sigmoid(), Mean, linear(3, 3))
    y = torch.randint(3, (7,), generator=torch.Generator().manual_seed(3))
    K = lh.kfac(lh.Problem(model, "cross_entropy", (SEQUENCE, y), batch_size=3), sharing=sharing)
    for at in (0, 2):
        A, G = 0.0, 0.0
        for x, target in zip(SEQUENCE, y, strict=True):
            a = model[:at](x[None]).detach()[0]
            a = torch.cat([a, torch.ones(len(a), 1)], dim=1)
            out = model[: at + 1](x[None]).detach()
            J = jacrev(lambda out, at=at: model[at + 1 :](out)[0])(out)[:, 0]  # (C, R, m)
            z = model(x[None])[0].detach()
            M = hessian(lambda z, target=target: nn.CrossEntropyLoss()(z[None], target[None]))(z)
            if sharing == "expand":
                A = A + a.T @ a / len(a) / 7
                G = G + torch.einsum("crm,cd,dro->mo", J, M, J) / 7
            else:
                A = A + torch.outer(a.mean(0), a.mean(0)) / 7
                G = G + torch.einsum("crm,cd,dso->mo", J, M, J) / 7
        block = K.blocks[str(at)]
        assert relative(block.A[0], A.detach()) < 1e-12
        assert relative(block.G[0], G.detach()) < 1e-12


def test_a_layer_used_twice_shares_its_weight() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x[:, 0]) + self.inner(x[:, 1])

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Twice().double()
    x = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.zeros(5, 3, dtype=torch.float64)
    problem = lh.Problem(model, "mse", (x, y), batch_size=2)
    truth = dense(model, problem, nn.MSELoss(), x, y)
    K = lh.kfac(problem, sharing="reduce")  # linear, and the sum over both uses before the loss
    where = K.blocks["inner"].indices.reshape(-1)
    assert relative(K.blocks["inner"].dense(), truth[where][:, where]) < 1e-12
    assert 'sharing="reduce"' in repr(K)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_sums_over_positions_are_made_in_single_precision(sharing: str) -> None:
    """1,000 positions: in bfloat16 a running sum would stop at 256 times its terms."""
    model = nn.Sequential(nn.Linear(2, 3), Mean()).to(torch.bfloat16)
    x = torch.ones(2, 1000, 2, dtype=torch.bfloat16)
    K = lh.kfac(
        lh.Problem(model, "mse", (x, torch.zeros(2, 3, dtype=torch.bfloat16))), sharing=sharing
    )
    assert K.dtype == torch.float32
    assert torch.allclose(K.blocks["0"].A, torch.ones(1, 3, 3), rtol=1e-3)


def test_the_repr_says_which_is_used_where_weights_are_shared() -> None:
    model, x = EXACT["reduce", "sequence"]
    shared = lh.Problem(model, "mse", (x, torch.zeros(7, 2, dtype=torch.float64)))
    assert repr(lh.kfac(shared)) == 'KFAC(23 × 23, psd, float64, cpu, sharing="expand")'
    assert (
        repr(lh.ekfac(shared, sharing="reduce"))
        == 'EKFAC(23 × 23, psd, float64, cpu, sharing="reduce")'
    )
    assert lh.kfac(shared).shared == ("0", "1")
    plain = lh.Problem(
        seeded(linear(4, 2)), "mse", (x[:, 0], torch.zeros(7, 2, dtype=torch.float64))
    )
    assert repr(lh.kfac(plain)) == "KFAC(10 × 10, psd, float64, cpu)"
    assert torch.equal(lh.kfac(plain, sharing="reduce").dense(), lh.kfac(plain).dense())


def test_reduce_refuses_layers_whose_rows_are_not_samples() -> None:
    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]).mean(dim=1)

    problem = lh.Problem(
        Flattened().double(), "mse", (SEQUENCE, torch.zeros(7, 2, dtype=torch.float64))
    )
    message = (
        "input of layer 'inner' must have the 7 samples first.*use sharing=\"expand\", or put the"
        " batch first"
    )
    with pytest.raises(ValueError, match=message):
        lh.kfac(problem, sharing="reduce")
    assert lh.kfac(problem).shared == ("inner",)


PEERS = {
    "sequence": (
        lambda: seeded(linear(4, 3), nn.Tanh(), linear(3, 3), Mean, nn.ReLU(), linear(3, 3)),
        (5, 4),
    ),
    "images": (
        lambda: seeded(
            conv(2, 3, (3, 2), padding=(1, 0)), nn.ReLU(), conv(3, 2, 2), Mean, linear(2, 3)
        ),
        (2, 5, 4),
    ),
}


@pytest.mark.oracle
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
@pytest.mark.parametrize("case", PEERS)
def test_agrees_with_curvlinops(case: str, loss: str, sharing: str) -> None:
    curvlinops = pytest.importorskip("curvlinops")
    build, shape = PEERS[case]
    model, rng = build(), torch.Generator().manual_seed(4)
    # as many as make the eigenbasis of A unique
    x = torch.randn(20, *shape, generator=rng, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=rng)
    if loss != "cross_entropy":
        y = torch.randint(2, (20, 3), generator=rng).double()
    theirs = {
        "cross_entropy": nn.CrossEntropyLoss(),
        "mse": nn.MSELoss(),
        "bce_with_logits": nn.BCEWithLogitsLoss(),
    }
    problem = lh.Problem(model, loss, (x, y), batch_size=12)
    batches = [(x[:12], y[:12]), (x[12:], y[12:])]
    for ours, name in ((lh.kfac, "KFACLinearOperator"), (lh.ekfac, "EKFACLinearOperator")):
        for kind, their_kind in (("exact", "type-2"), ("empirical", "empirical")):
            peer = getattr(curvlinops, name)(
                model,
                theirs[loss],
                list(model.parameters()),
                batches,
                fisher_type=their_kind,
                kfac_approx=sharing,
                separate_weight_and_bias=False,
                check_deterministic=False,
            )
            expected = (peer @ torch.eye(problem.num_parameters, dtype=torch.float64)).detach()
            # their empirical gradients of a mean over D outputs are scaled by √D, which no sample's
            # gradient is
            scale = 3.0 if loss != "cross_entropy" and kind == "empirical" else 1.0
            assert (
                relative(scale * ours(problem, kind=kind, sharing=sharing).dense(), expected) < 1e-9
            ), (name, kind)


@pytest.mark.oracle
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
def test_agrees_with_curvlinops_on_losses_at_each_position(loss: str) -> None:
    """A network that treats positions apart: with others, curvlinops adds up the gradients of
    different positions.
    """
    curvlinops = pytest.importorskip("curvlinops")
    model, rng = seeded(linear(4, 3), nn.Tanh(), linear(3, 3)), torch.Generator().manual_seed(5)
    y = torch.randint(3, (7, 5), generator=rng)
    theirs: Any = nn.CrossEntropyLoss()
    their_model: nn.Module = model
    if loss == "cross_entropy":  # curvlinops takes the classes where torch does
        their_model = nn.Sequential(*model, Transposed())
    else:
        y = torch.randint(2, (7, 5, 3), generator=rng).double()
        theirs = nn.MSELoss() if loss == "mse" else nn.BCEWithLogitsLoss()
    peer = curvlinops.KFACLinearOperator(
        their_model,
        theirs,
        list(model.parameters()),
        [(SEQUENCE[:4], y[:4]), (SEQUENCE[4:], y[4:])],
        fisher_type="type-2",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    problem = lh.Problem(model, loss, (SEQUENCE, y), batch_size=4)
    expected = (peer @ torch.eye(problem.num_parameters, dtype=torch.float64)).detach()
    assert relative(lh.kfac(problem).dense(), expected) < 1e-9


class Transposed(nn.Module):
    """Classes from the last dimension to dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        return x.movedim(-1, 1)
