"""What must not mislead the closed forms of trace and diagonal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lambdahat as lh
from lambdahat.estimators import trace
from lambdahat.operators import ggn, hessian
from lambdahat.operators.exact import residuals, validity
from lambdahat.operators.exact.layer_squares import trace_layers
from lambdahat.operators.exact.residuals import Layers
from lambdahat.operators.exact.validity import few_of
from lambdahat.operators.linearise import leaves_of
from lambdahat.problem import Problem
from lambdahat.problem.evaluators import OF_IMAGES, OF_ROWS
from tests.operators.test_closed_form import agree, flat, problem_of
from tests.operators.test_piecewise import Net
from tests.oracles import dense_ggn, dense_hessian, dense_second_moment


def test_hooks_that_change_a_layer_s_output() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].register_forward_hook(lambda layer, given, out: 2 * out)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randint(3, (9,))
    problem = Problem(model, "cross_entropy", (x, y), batch_size=4)
    agree(problem, dense_ggn(problem))


@pytest.mark.parametrize("make", [nn.utils.spectral_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("which", ["*", "2.*"])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_that_old_style_hooks_compute(make: Any, which: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
    x, y = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    problem = Problem(model.double(), "mse", (x, y), parameters=which)
    agree(problem, dense_ggn(problem))
    found = trace(hessian(problem))
    assert found.value == pytest.approx(float(hessian(problem).dense().trace()), rel=1e-9)


@pytest.mark.parametrize("name", ["flip", "turn"])
def test_hooks_that_keep_lengths_do_not_mislead_the_diagonal(name):
    """A permutation or rotation of what a layer gives changes no sum of squares."""
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double())[
        0
    ]
    change = {"flip": lambda z: z.flip(-1), "turn": lambda z: z @ turn}[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    model[0].register_forward_hook(lambda layer, given, left: change(left))
    G = lh.ggn(lh.Problem(model, "mse", (torch.randn(7, 5).double(), torch.randn(7, 3).double())))
    torch.testing.assert_close(G.known_diagonal(), G.dense().diagonal(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mixing", ["neighbours", "the last two", "the mean"])
def test_hooks_that_mix_the_signals_of_samples(mixing: str) -> None:
    """The output of a sample is its own, and a layer's form has the whole gradient, but no
    sample's.
    """

    def mixed(delta: Tensor) -> Tensor:
        if mixing == "the last two":
            return torch.cat([delta[:-1], delta[-1:] + delta[-2:-1]])
        return delta + (delta.roll(1, 0) if mixing == "neighbours" else delta.mean(dim=0))

    def hook(layer: nn.Module, given: object, left: Tensor) -> None:
        if left.requires_grad:
            left.register_hook(mixed)

    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    model[1].register_forward_hook(hook)
    problem = Problem(model, "cross_entropy", (torch.randn(8, 4).double(), torch.arange(8) % 3))
    trusted = validity.trusted_layers(few_of(problem, leaves_of(problem, problem.vector)))
    assert trusted.names == {"2.weight", "2.bias"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"padding": 1}, {"padding": (2, 2), "dilation": (2, 2)}),
        ({"padding": 1}, {"padding": (0, 1)}),
        ({"padding": "same"}, {"dilation": (1, 3)}),
    ],
)
def test_convolutions_changed_after_they_were_made(before, after) -> None:
    """As networks for segmentation do with those of a classifier: torch pads by what the layer
    says now.
    """

    def make() -> nn.Module:
        layer = nn.Conv2d(2, 3, 3, **before)
        for name, value in after.items():
            setattr(layer, name, value)
        return flat(layer, nn.Tanh(), width=layer(torch.zeros(1, 2, 5, 5)).numel())

    problem = problem_of(make, (2, 5, 5))
    agree(problem, dense_ggn(problem))
    assert trace(hessian(problem), method="exact").value == pytest.approx(
        float(dense_hessian(problem).trace())
    )


@pytest.mark.parametrize(
    ("layer", "shape"), [(nn.Linear(4, 5), (4,)), (nn.Conv1d(4, 5, 3), (4, 3))]
)
def test_layers_that_take_one_input_without_a_batch(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """Of as many numbers or channels as guards look at samples."""
    given = torch.randn(shape, generator=torch.Generator().manual_seed(0)).double()

    def make() -> nn.Module:
        return Net(
            lambda m, x: m.b(torch.relu(m.a(x) + m.c(given).flatten())),
            a=nn.Linear(4, 5),
            b=nn.Linear(5, 3),
            c=layer,
        )

    problem = problem_of(make, (4,))
    agree(problem, dense_ggn(problem))
    assert trace(hessian(problem), method="exact").value == pytest.approx(
        float(dense_hessian(problem).trace())
    )


def test_operations_whose_rule_for_vmap_is_wrong() -> None:
    """Of several signals at once torch sends back wrong ones through cdist, without an error
    (2.13).
    """
    places = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()

    def make() -> nn.Module:
        return Net(
            lambda m, x: m.b(torch.cdist(m.a(x), places)), a=nn.Linear(4, 5), b=nn.Linear(6, 3)
        )

    problem = problem_of(make, (4,))
    agree(problem, dense_ggn(problem))


def test_first_samples_in_which_a_layer_is_dead() -> None:
    """They do not show that signals come back wrong when they come together."""
    stream = torch.Generator().manual_seed(0)
    places = torch.randn(6, 5, generator=stream).double()
    x, y = torch.randn(9, 4, generator=stream).double(), torch.arange(9) % 3
    x[:4] = 0.0
    model = Net(
        lambda m, x: m.b(torch.cdist(m.a(x).relu(), places)), a=nn.Linear(4, 5), b=nn.Linear(6, 3)
    )
    nn.init.constant_(model.a.bias, -1.0)
    nn.init.normal_(model.a.weight, generator=stream)
    problem = Problem(model.double(), "cross_entropy", (x, y))
    agree(problem, dense_ggn(problem))


@pytest.mark.parametrize("make", [hessian, ggn])
def test_a_model_that_writes_into_its_input(make) -> None:
    """What guards keep of the first samples is not what later passes write into."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.ReLU(inplace=True), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)
        )

    problem = problem_of(model, (4,))
    operator = make(problem)
    assert operator.known_trace() == pytest.approx(float(dense_ggn(problem).trace()))
    torch.testing.assert_close(operator.known_diagonal(), dense_ggn(problem).diagonal())


def test_two_samples_among_the_others_are_exchanged() -> None:
    """The first and the last are what they are alone."""

    def rule(m: Net, x: Tensor) -> Tensor:
        h = m.a(x).relu()
        return m.b(torch.cat([h[:1], h[1:3].flip(0), h[3:]]) if len(h) == 4 else h)

    problem = problem_of(
        lambda: Net(rule, a=nn.Linear(5, 6), b=nn.Linear(6, 3)), (5,), samples=4, batch_size=4
    )
    for operator in (hessian(problem), ggn(problem)):
        with pytest.raises(ValueError, match="exact"):
            trace(operator, method="exact")


def test_a_model_that_asserts_its_batch_size() -> None:
    def rule(m: Net, x: Tensor) -> Tensor:
        assert len(x) == 8, "eight samples"
        return m.a(x)

    problem = problem_of(lambda: Net(rule, a=nn.Linear(4, 3)), (4,), samples=16, batch_size=8)
    for operator in (hessian(problem), ggn(problem)):
        with pytest.raises(ValueError, match=r"does not take 4 samples \(eight samples"):
            trace(operator, method="exact")
        found = trace(operator)
        assert found.value == pytest.approx(
            float(dense_hessian(problem).trace()), abs=4 * found.stderr + 1e-9
        )


@pytest.mark.parametrize("loss", ["cross_entropy", lambda z, y: F.cross_entropy(z, y)])
def test_gradients_of_a_model_that_asserts_its_batch_size(loss: Any) -> None:
    def rule(m: Net, x: Tensor) -> Tensor:
        assert len(x) in m.sizes
        return m.a(x)

    def make(*sizes: int) -> Problem:
        def net() -> nn.Module:
            model = Net(rule, a=nn.Linear(4, 3))
            model.sizes = sizes
            return model

        return problem_of(net, (4,), samples=16, batch_size=8, loss=loss)

    found = trace(lh.gradient_covariance(make(8), centred=False))
    exact = float(dense_second_moment(make(1, 8)).trace())
    assert found.value == pytest.approx(exact, rel=1e-9)


def test_one_class_has_no_curvature():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    data = (torch.randn(7, 5).double(), torch.zeros(7, dtype=torch.long))
    assert float(lh.trace(lh.hessian(lh.Problem(model, "cross_entropy", data)))) == pytest.approx(
        0.0, abs=1e-12
    )


class Scaled(nn.Module):
    """Keyword inputs of which some belong to every sample, and a layer that is called by
    keyword.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.fc = nn.Parameter(torch.ones(4)), nn.Linear(4, 3)

    def forward(self, x: Tensor, weight: Tensor, scale: Tensor, power: float) -> Tensor:
        return self.fc(input=(x + self.shift) * weight.unsqueeze(1) * scale * power)


def test_batches_with_numbers_and_layers_called_by_keyword() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, weight = Scaled().double(), torch.randn(6, 4).double(), torch.rand(6).double()
    batch = {
        "x": x,
        "weight": weight,
        "scale": torch.tensor(2.0).double(),
        "power": 0.5,
        "labels": torch.arange(6) % 3,
    }
    problem = Problem(model, "cross_entropy", [batch])
    agree(problem, dense_ggn(problem))
    trusted = validity.trusted_layers(few_of(problem, leaves_of(problem, problem.vector)))
    assert trusted.names == {"fc.weight", "fc.bias"}
    assert trace(hessian(problem)).value == pytest.approx(
        float(dense_hessian(problem).trace()), rel=1e-10
    )


@pytest.mark.parametrize("layered", [True, False])
def test_squares_of_bfloat16_are_summed_in_single_precision(
    layered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear model of two outputs under the mean square: M = I, and the trace is 2·mean(‖x‖² +
    1), exactly.
    """
    if not layered:
        monkeypatch.setattr(validity, "trusted_layers", lambda *_: validity.Trusted(set(), 2))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(300, 7).bfloat16()
        problem = Problem(nn.Linear(7, 2).bfloat16(), "mse", (x, torch.zeros(300, 2).bfloat16()))
    expected = 2 * float(x.double().square().sum(dim=1).mean() + 1)
    assert ggn(problem).known_trace() == pytest.approx(expected, rel=1e-5)
    assert float(ggn(problem).known_diagonal().double().sum()) == pytest.approx(expected, rel=1e-5)


class Hooked(nn.Module):
    """Passes on what it gets, with a derivative that autograd takes twice and no node shows, in
    some of the units.
    """

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = units

    def forward(self, h: Tensor) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            some = (torch.arange(h.shape[1]) < self.units).to(h).reshape(-1, *[1] * (h.ndim - 2))
            h.register_hook(lambda delta: delta * (1 + some * h))
        return h


class Modulus(nn.Module):
    """√(h² + 1), through nodes that are linear, and abs, which of real numbers is piecewise so."""

    def forward(self, h: Tensor) -> Tensor:
        return (h.to(torch.complex128) + 1j).abs()


HIDING = {
    "hooks": (lambda: Hooked(3), "in 0.weight is not that of its activations"),
    "a hook on one unit": (lambda: Hooked(1), "in 0.weight is not that of its activations"),
    "complex numbers": (Modulus, "computes with complex numbers"),
}


@pytest.mark.parametrize("kind", ["more columns than are compared", "positions"])
@pytest.mark.parametrize("hiding", HIDING)
def test_what_a_graph_hides_beside_smooth_activations(hiding: str, kind: str) -> None:
    make, reason = HIDING[hiding]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        if kind == "positions":
            model = nn.Sequential(
                nn.Conv1d(2, 3, 3), make(), nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Conv1d(4, 3, 1)
            )
            x, y = torch.randn(6, 2, 8).double(), torch.arange(24).reshape(6, 4) % 3
        else:
            layers = [nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 66), nn.Tanh(), nn.Linear(66, 3)]
            model = nn.Sequential(nn.Linear(4, 3), make(), *layers)
            x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    problem = Problem(model.double(), "cross_entropy", (x, y))
    operator, exact = hessian(problem), float(dense_hessian(problem).trace())
    found = trace(operator, tol=0.02)
    assert abs(found.value - exact) <= 4 * found.stderr + 1e-10 * abs(exact)
    assert operator.known_diagonal() is None
    assert operator.sampled_trace(0.1, 0) is None
    assert reason in operator.why_no_trace()


def deep(depth: int, hooked: int | None, act: type[nn.Module] = nn.Sigmoid) -> Problem:
    """Signals die out from layer to layer: what is hidden in one is hardly felt far below."""
    with torch.random.fork_rng():
        torch.manual_seed(depth)
        layers: list[nn.Module] = [nn.Linear(4, 5)]
        for place in range(depth):
            layers += [Hooked(5)] * (place == hooked) + [act(), nn.Linear(5, 5)]
        x, y = torch.randn(6, 4), torch.arange(6) % 5
    return Problem(nn.Sequential(*layers), "cross_entropy", (x, y))


@pytest.mark.parametrize("hooked", [None, *range(0, 30, 3), 29])
def test_what_is_hidden_in_one_of_many_layers(hooked: int | None) -> None:
    assert bool(hessian(deep(30, hooked)).exact.form.refused) == (hooked is not None)


def passes(monkeypatch: pytest.MonkeyPatch, depth: int) -> int:
    """How often a signal comes back through a layer while the form is looked for."""
    problem, seen = deep(depth, None, nn.Tanh), []
    assert problem.model is not None

    def count(layer: nn.Module, given: object, left: Tensor) -> None:
        if left.requires_grad:
            left.register_hook(lambda slope: seen.append(1))

    for layer in problem.model:
        layer.register_forward_hook(count)
    monkeypatch.setattr(residuals, "MOST_CHECKED", 0)
    assert not hessian(problem).exact.form.refused
    return len(seen)


def test_the_check_is_linear_in_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, four = (passes(monkeypatch, depth) for depth in (15, 30, 60))
    assert four - two <= 2.2 * (two - one)


class Branches(nn.Module):
    """Parallel layers, of which some are added and some multiplied, with something hidden in one
    of them.
    """

    def __init__(self, hooked: int | None, gated: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 5) for _ in range(12))
        self.last, self.hidden, self.hooked, self.gated = nn.Linear(5, 3), Hooked(5), hooked, gated

    def forward(self, x: Tensor) -> Tensor:
        found = [
            self.hidden(z) if i == self.hooked else z
            for i, z in enumerate(f(x) for f in self.branches)
        ]
        gate = torch.sigmoid(found.pop(3)) if self.gated else 1.0
        return self.last(torch.tanh(sum(found)) * gate)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("hooked", [None, 0, 7])
def test_parallel_layers_are_looked_at_together(hooked: int | None, gated: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x, y = Branches(hooked, gated), torch.randn(6, 4), torch.arange(6) % 3
    problem = Problem(model.double(), "cross_entropy", (x.double(), y))
    operator = hessian(problem)
    if hooked is not None:
        assert f"in branches.{hooked}.weight is not that of" in operator.why_no_trace()
    else:
        assert trace(operator).value == pytest.approx(
            float(dense_hessian(problem).trace()), rel=1e-10
        )
    leaves = leaves_of(problem, problem.vector)
    part = trace_layers(problem, leaves, problem.batches.first())
    layers = Layers(part.output, leaves, part.once)
    groups = layers.probe_groups()
    assert sorted(map(len, groups)) == ([1, 1, 11] if gated else [1, 12])


SIZES: dict[Any, tuple[Any, ...]] = {nn.Linear: (4, 4), nn.Threshold: (0.1, -1.0)}


@pytest.mark.parametrize("kind", [*OF_IMAGES, *sorted(OF_ROWS, key=lambda kind: kind.__name__)])
def test_every_kind_of_layer_in_a_chain(kind: Any) -> None:
    """What is known of a chain is not looked at in numbers, so that it must be true of them all."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dims = next((n for n in (1, 2, 3) if kind.__name__.endswith(f"{n}d")), 2)
        sized = kind in OF_IMAGES or "BatchNorm" in kind.__name__
        sizes = (2, 2, 2) if "Conv" in kind.__name__ else SIZES.get(kind, (2,) if sized else ())
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        layers = [convolution(1, 2, 2), kind(*sizes), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)]
        model, x, y = nn.Sequential(*layers), torch.randn(6, 1, *dims * [5]), torch.arange(6) % 3
        model.double().eval()(x.double())
        for buffer in model[1].buffers():
            buffer.add_(torch.rand_like(buffer.double()).to(buffer.dtype))
    problem = Problem(model, "cross_entropy", (x.double(), y))
    assert problem.chain(problem.batches.first()) is not None
    leaves = leaves_of(problem, problem.vector)
    part = trace_layers(problem, leaves, problem.batches.first())
    assert torch.equal(part.output, problem.output(leaves, problem.batches.first()))
    for operator, dense in ((hessian(problem), dense_hessian), (ggn(problem), dense_ggn)):
        expected = pytest.approx(float(dense(problem).trace()), rel=1e-10)
        assert trace(operator, method="exact").value == expected


def squared(layer: Any, given: Any, left: Tensor) -> Tensor:
    return left * left


def doubled(layer: Any, given: tuple[Tensor]) -> tuple[Tensor]:
    return (2 * given[0],)


def with_forward(model: nn.Sequential) -> None:
    model[1].forward = lambda z: z.relu() - z.mean(dim=0)  # type: ignore[method-assign]


def with_tied_weights(model: nn.Sequential) -> None:
    model[2].weight = model[0].weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model[1].register_forward_hook(squared),
    "a hook of the whole": lambda model: model.register_forward_hook(squared),
    "a hook before": lambda model: model[2].register_forward_pre_hook(doubled),
    "a hook of signals": lambda model: model[1].register_full_backward_hook(lambda *_: None),
    "a pass of its own": with_forward,
    "tied weights": with_tied_weights,
    "a layer twice": lambda model: model.append(model[2]),
    "statistics twice": lambda model: model.extend(2 * [nn.BatchNorm1d(4, affine=False)]),
    "a layer of another kind": lambda model: model.append(nn.LayerNorm(4)),
    "a subclass": lambda model: model.append(type("Own", (nn.Linear,), {})(4, 4)),
    "samples that are joined": lambda model: model.extend(
        [nn.Flatten(0, 1), nn.Unflatten(0, (-1, 4))]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_no_chain(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double().eval()
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.arange(6) % 4
        CHANGES[name](model)
        problem = Problem(model.double(), "cross_entropy", (x, y))
    assert problem.chain(problem.batches.first()) is None
    expected = pytest.approx(float(dense_hessian(problem).trace()), rel=1e-10)
    assert trace(hessian(problem)).value == expected


@contextmanager
def a_hook_of_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(squared)
    try:
        yield
    finally:
        handle.remove()


def test_a_chain_is_one_no_more_under_hooks_of_all_modules_and_replaced_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    problem = Problem(model, "cross_entropy", (torch.randn(6, 4).double(), torch.arange(6) % 3))
    batch = problem.batches.first()
    assert problem.chain(batch) is not None
    with a_hook_of_all():
        assert problem.chain(batch) is None
    for kind in (nn.ReLU, nn.Sequential):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda layer, given: given)
            assert problem.chain(batch) is None
    assert problem.chain(batch) is not None


def _rank(z: Tensor, y: Tensor) -> Tensor:
    """A loss of pairs of samples of two classes; the data are sorted by class."""
    gaps = z[y > 0] - z[y == 0].T
    return F.softplus(-gaps).sum() / max(1, gaps.numel()) + 0.0 * z.sum()


def _attract(z: Tensor, y: Tensor) -> Tensor:
    """A loss of pairs of one class; the first samples are of a class each."""
    return ((z - z.T).square() * (y[:, None] == y)).sum() / len(y) ** 2


@pytest.mark.parametrize("batch_size", [None, 24])
@pytest.mark.parametrize("loss", [_rank, _attract])
def test_losses_that_compare_samples_only_of_some_classes(
    loss: Any, batch_size: int | None
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)).double()
    x, y = torch.randn(40, 6).double(), torch.arange(40)
    y = y // 20 if loss is _rank else y % 12
    problem = Problem(model, loss, (x, y), batch_size=batch_size)
    truth = dense_hessian(problem).diagonal()  # the output is piecewise linear in each weight
    for operator in (hessian(problem), ggn(problem)):
        found, diagonal = trace(operator), lh.diagonal(operator)
        assert abs(found.value - float(truth.sum())) <= 4 * found.stderr + 1e-12
        assert (diagonal.value - truth).norm() <= 2 * diagonal.stderr.norm() + 1e-12
        assert operator.known_trace() is None
        with pytest.raises(ValueError, match="no factors at this output"):
            trace(operator, method="exact")
    for refused in (lh.gradient_covariance, lh.variance):
        with pytest.raises(ValueError, match="from two halves of it; a loss that compares samples"):
            refused(problem)


def test_the_hessian_of_a_loss_that_is_linear_in_the_output() -> None:
    """As a KL divergence is in log-probabilities: there is no Gauss–Newton matrix beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4), nn.LogSoftmax(1)).double()
    x, y = torch.randn(20, 6).double(), torch.randn(20, 4).double().softmax(1)
    problem = Problem(model, nn.KLDivLoss(reduction="batchmean"), (x, y))
    truth = dense_hessian(problem).diagonal()
    found, diagonal = trace(hessian(problem)), lh.diagonal(hessian(problem))
    assert abs(found.value - float(truth.sum())) <= 4 * found.stderr + 1e-12
    assert (diagonal.value - truth).norm() <= 2 * diagonal.stderr.norm() + 1e-12
    for layer, found in lh.trace_per_layer(hessian(problem)).items():
        where = problem.space.indices(problem.space.layers()[layer])
        assert abs(found.value - float(truth[where].sum())) <= 4 * found.stderr + 1e-12
