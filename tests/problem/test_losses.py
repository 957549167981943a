"""Each loss's curvature at the output against the dense Hessian there, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.problem import losses
from lambdahat.problem.losses import IGNORE, make_loss

RNG = generator(0, "test losses")


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=RNG, dtype=torch.float64)


def labels(classes: int, *shape: int) -> Tensor:
    return torch.randint(0, classes, shape, generator=RNG)


def ignored(target: Tensor) -> Tensor:
    target = target.clone()
    target.view(-1)[::3] = IGNORE
    return target


# name: loss, output, target, torch's own value
CASES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "classes": ("cross_entropy", normal(5, 4), labels(4, 5)),
    "classes, some left out": ("cross_entropy", normal(7, 4), ignored(labels(4, 7))),
    "images (B, C, H, W)": ("cross_entropy", normal(2, 3, 2, 2), labels(3, 2, 2, 2)),
    "images, some left out": ("cross_entropy", normal(2, 3, 2, 2), ignored(labels(3, 2, 2, 2))),
    "language (B, T, C)": ("cross_entropy", normal(3, 2, 4), labels(4, 3, 2)),
    "language, some left out": ("cross_entropy", normal(3, 2, 4), ignored(labels(4, 3, 2))),
    "probabilities": ("cross_entropy", normal(5, 4), normal(5, 4).softmax(1)),
    "probabilities of images": ("cross_entropy", normal(2, 3, 2), normal(2, 3, 2).softmax(1)),
    "unnormalised targets": ("cross_entropy", normal(5, 4), 2.5 * normal(5, 4).softmax(1)),
    "mse": ("mse", normal(4, 3), normal(4, 3)),
    "mse of scalars": ("mse", normal(4), normal(4)),
    "mse of images": ("mse", normal(2, 2, 3), normal(2, 2, 3)),
    "bce": ("bce_with_logits", normal(5, 1), labels(2, 5, 1).double()),
    "bce, integer targets": ("bce_with_logits", normal(4, 2, 2), labels(2, 4, 2, 2)),
    "log-probabilities": ("nll", normal(5, 4).log_softmax(1), labels(4, 5)),
}
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.7], dtype=torch.float64)
SMOOTH = nn.CrossEntropyLoss(label_smoothing=0.2)
EVERY = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3, ignore_index=2)
CASES |= {
    "smoothed": (SMOOTH, normal(5, 4), labels(4, 5)),
    "smoothed, some left out": (SMOOTH, normal(7, 4), ignored(labels(4, 7))),
    "smoothed probabilities": (SMOOTH, normal(5, 4), normal(5, 4).softmax(1)),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), normal(6, 4), labels(4, 6)),
    "class weights of probabilities": (
        nn.CrossEntropyLoss(weight=WEIGHTS),
        normal(5, 4),
        normal(5, 4).softmax(1),
    ),
    "class weights of images": (
        nn.CrossEntropyLoss(weight=WEIGHTS),
        normal(2, 4, 2, 2),
        labels(4, 2, 2, 2),
    ),
    "another ignore_index": (nn.CrossEntropyLoss(ignore_index=1), normal(9, 4), labels(4, 9)),
    "ignore_index beyond the classes": (
        nn.CrossEntropyLoss(ignore_index=255),
        normal(3, 4),
        torch.tensor([1, 255, 3]),
    ),
    "all options": (EVERY, normal(9, 4), labels(4, 9)),
    "all options, language": (EVERY, normal(3, 5, 4), labels(4, 3, 5)),
    "all options, probabilities": (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.3),
        normal(3, 4, 2),
        normal(3, 4, 2).softmax(1),
    ),
    "weighted log-probabilities": (
        nn.NLLLoss(weight=WEIGHTS),
        normal(5, 4).log_softmax(1),
        labels(4, 5),
    ),
    "pos_weight": (
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        normal(5, 4),
        labels(2, 5, 4).double(),
    ),
    "pos_weight of soft targets": (
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        normal(5, 4),
        normal(5, 4).sigmoid(),
    ),
    "weight and pos_weight": (
        nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS.flip(0)),
        normal(3, 2, 4),
        labels(2, 3, 2, 4).double(),
    ),
    "a function with options": (
        functools.partial(F.cross_entropy, label_smoothing=0.1, weight=WEIGHTS),
        normal(6, 4),
        labels(4, 6),
    ),
}


def plain_value(name: Any, output: Tensor, target: Tensor) -> Tensor:
    """torch's own mean loss."""
    if name == "mse":
        return F.mse_loss(output, target)
    if name == "bce_with_logits":
        return F.binary_cross_entropy_with_logits(output, target.double())
    of_elements = isinstance(name, nn.BCEWithLogitsLoss)
    classes_last = not target.is_floating_point() and target.shape != (
        output.shape[0],
        *output.shape[2:],
    )
    if isinstance(name, nn.NLLLoss):
        output = output.log_softmax(1)  # what leaves log-probabilities as they are
    own = F.cross_entropy if isinstance(name, str) else name
    return own(output.movedim(-1, 1) if classes_last and not of_elements else output, target)


def dense(name: Any, output: Tensor, target: Tensor) -> Tensor:
    """M (B, D, D) = B·∂²L/∂z_i², and a check that samples do not mix."""
    B, D = len(output), output[0].numel()
    whole = torch.autograd.functional.hessian(
        lambda z: plain_value(name, z, target), output
    ).reshape(B, D, B, D)
    blocks = torch.stack([whole[i, :, i] for i in range(B)])
    assert float(whole.abs().sum() - blocks.abs().sum()) == pytest.approx(0.0, abs=1e-12)
    return B * blocks


@pytest.mark.parametrize("case", CASES)
def test_value(case):
    name, output, target = CASES[case]
    assert float(make_loss(name).value(output, target)) == pytest.approx(
        float(plain_value(name, output, target)), rel=1e-14
    )


@pytest.mark.parametrize("case", CASES)
def test_product(case):
    name, output, target = CASES[case]
    M, loss, u = dense(name, output, target), make_loss(name), normal(*output.shape)
    found = loss.product(output, target)(u)
    expected = torch.einsum("bij,bj->bi", M, u.reshape(len(u), -1)).reshape(u.shape)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_factors(case):
    name, output, target = CASES[case]
    loss = make_loss(name)
    M, of_classes = dense(name, output, target), isinstance(loss, losses.CrossEntropy)
    count, each = loss.each_factor(output, target)
    flat = torch.stack(list(each)).reshape(count, len(output), -1)
    assert torch.allclose(torch.einsum("kbi,kbj->bij", flat, flat), M, rtol=1e-12, atol=1e-14)
    classes_last = of_classes and loss._classes_first(output, target) is not output
    classes = output.shape[-1 if classes_last else 1] if of_classes else 0
    assert count == output[0].numel() - (output[0].numel() // classes if of_classes else 0)
    factors = loss.factors(output, target)
    assert loss.factor_count(output, target) == (None if factors is None else len(factors))
    if of_classes and output.ndim > 2:
        assert factors is None  # too many at once: left to products
    else:
        assert torch.equal(factors.reshape(flat.shape), flat)


@pytest.mark.parametrize("case", CASES)
def test_random_factor_has_the_hessian_for_its_second_moment(case):
    """1,000 draws; each entry of the mean of s sᵀ within five of its standard errors, and room
    for rare events.
    """
    name, output, target = CASES[case]
    M, loss, stream = dense(name, output, target), make_loss(name), generator(1, case)
    draws = torch.stack([loss.random_factor(output, target, stream) for _ in range(1000)])
    draws = draws.reshape(1000, len(output), -1)
    outer = torch.einsum("kbi,kbj->kbij", draws, draws)
    error, stderr = (outer.mean(0) - M).abs(), outer.std(0) / math.sqrt(1000)
    assert bool((error <= 5 * stderr + 5e-3 * M.abs().max()).all())
    left_out = M.abs().sum(dim=(1, 2)) == 0
    assert float(draws[:, left_out].abs().sum()) == 0.0


def test_terms_count_what_the_mean_is_over():
    loss = make_loss("cross_entropy")
    assert loss.terms(torch.tensor([0, 1, IGNORE, 2]), 4) == 3
    assert loss.terms(torch.full((4, 3), IGNORE), 4) == 0
    assert loss.terms(torch.rand(4, 3), 4) == 4
    assert make_loss("mse").terms(torch.rand(4, 3), 4) == 4


def test_no_target_that_counts_is_no_loss():
    logits = normal(2, 3).requires_grad_()
    value = make_loss("cross_entropy").value(logits, torch.tensor([IGNORE, IGNORE]))
    assert float(value.detach()) == 0.0
    assert float(torch.autograd.grad(value, logits)[0].abs().sum()) == 0.0


@pytest.mark.parametrize("form", ["pair", "tensor"])
def test_gaussian_nll_takes_pairs_and_tensors(form):
    mean, log_variance, target = normal(5, 2), normal(5, 2), normal(5, 2)
    output = (
        (mean, log_variance.exp()) if form == "pair" else torch.cat([mean, log_variance], dim=1)
    )
    loss = make_loss("gaussian_nll")
    loss.check(output, target)
    expected = 0.5 * (log_variance + (mean - target).square() / log_variance.exp()).mean()
    assert float(loss.value(output, target)) == pytest.approx(float(expected), rel=1e-12)
    assert loss.product(output, target) is None
    full = nn.GaussianNLLLoss(full=True, eps=0.5)
    found = make_loss(full).value(output, target)
    assert float(found) == pytest.approx(float(full(mean, target, log_variance.exp())), rel=1e-12)


@pytest.mark.parametrize("form", ["pair", "tensor"])
def test_fisher_of_gaussian_nll_is_the_mean_square_of_its_slope(form):
    """E over y of the outer product of the slope, by Gauss–Hermite quadrature, which is exact
    for polynomials.
    """
    mean, log_variance = normal(2, 3), normal(2, 3)
    output = (
        (mean, log_variance.exp()) if form == "pair" else torch.cat([mean, log_variance], dim=1)
    )
    loss = make_loss("gaussian_nll")
    points, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(9))
    target = mean + points[:, None, None] * log_variance.mul(0.5).exp()
    leaves = [part.expand(9, *part.shape).clone().requires_grad_() for part in (mean, log_variance)]
    if form == "pair":
        leaves[1] = leaves[1].detach().exp().requires_grad_()
    variance = leaves[1] if form == "pair" else leaves[1].exp()
    total = F.gaussian_nll_loss(leaves[0], target, variance, reduction="sum")
    slopes = torch.cat(torch.autograd.grad(total, leaves), dim=2)
    # a mean over 3 elements
    expected = torch.einsum("q,qbi,qbi->bi", weights / weights.sum(), slopes, slopes) / 3
    found = torch.cat(loss.fisher(output, torch.zeros_like(mean)), dim=1)
    assert torch.allclose(found, expected, rtol=1e-12)
    stream = generator(0, "gaussian fisher")
    draws = torch.stack(
        [torch.cat(loss.random_factors(output, mean, stream), dim=1) for _ in range(4000)]
    )
    outer = torch.einsum("kbi,kbj->kbij", draws, draws)
    stderr = outer.std(0) / math.sqrt(4000)
    assert bool(((outer.mean(0) - torch.diag_embed(expected)).abs() <= 5 * stderr).all())


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 5), (6, 5, 4)], ids=str)
def test_cross_entropy_of_models_side_by_side(shape):
    """Inside vmap, values and gradients are those of each model alone."""
    output = normal(3, *shape).requires_grad_()
    target = ignored(labels(4, *(size for size in shape if size != 4)))
    loss = make_loss("cross_entropy").settle([(output[0], target)])
    together = torch.func.vmap(loss.value, (0, None))(output, target)
    alone = torch.stack([loss.value(each, target) for each in output])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(part.sum(), output)[0] for part in (together, alone))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_classes_of_dtype_uint8_are_all_counted():
    """156 is −100 in 8 bits, and must not pass for the mark of targets to leave out."""
    output, target = normal(3, 200), torch.tensor([156, 7, 199], dtype=torch.uint8)
    loss = make_loss("cross_entropy")
    assert float(loss.value(output, target)) == pytest.approx(
        float(F.cross_entropy(output, target.long())), rel=1e-14
    )
    assert loss.terms(target, 3) == 3


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("cross_entropy", losses.CrossEntropy),
        (nn.CrossEntropyLoss(), losses.CrossEntropy),
        (F.cross_entropy, losses.CrossEntropy),
        ("mse", losses.MeanSquare),
        (nn.MSELoss(), losses.MeanSquare),
        (F.mse_loss, losses.MeanSquare),
        ("bce_with_logits", losses.BinaryCrossEntropy),
        (nn.BCEWithLogitsLoss(), losses.BinaryCrossEntropy),
        (F.nll_loss, losses.NegativeLogLikelihood),
        (nn.NLLLoss(), losses.NegativeLogLikelihood),
        ("gaussian_nll", losses.GaussianNLL),
        (nn.GaussianNLLLoss(), losses.GaussianNLL),
        (F.gaussian_nll_loss, losses.GaussianNLL),
        (losses.MeanSquare(), losses.MeanSquare),
        (nn.CrossEntropyLoss(label_smoothing=0.1), losses.CrossEntropy),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), losses.CrossEntropy),
        (nn.CrossEntropyLoss(ignore_index=0), losses.CrossEntropy),
        (nn.NLLLoss(ignore_index=0), losses.NegativeLogLikelihood),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(1)), losses.BinaryCrossEntropy),
        (nn.GaussianNLLLoss(full=True), losses.GaussianNLL),
        (functools.partial(F.nll_loss, ignore_index=1), losses.NegativeLogLikelihood),
        # what the closed forms do not cover is taken as it is
        (nn.SmoothL1Loss(), losses.Custom),
        (nn.KLDivLoss(reduction="batchmean"), losses.Custom),
        (lambda z, y: (z - y).abs().mean(), losses.Custom),
        (functools.partial(F.huber_loss, delta=2.0), losses.Custom),
    ],
)
def test_make_loss_knows_its_kind(given, kind):
    assert type(make_loss(given)) is kind


def test_a_subclass_that_computes_something_else_is_taken_as_it_is():
    class Focal(nn.CrossEntropyLoss):
        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            p = z.softmax(1).gather(1, y[:, None])
            return -((1 - p).square() * p.log()).mean()

    class Named(nn.CrossEntropyLoss):
        pass

    output, target = normal(5, 3), labels(3, 5)
    assert type(make_loss(Focal())) is losses.Custom
    assert float(make_loss(Focal()).value(output, target)) == float(Focal()(output, target))
    assert type(make_loss(Named())) is losses.CrossEntropy


def test_callables_need_not_be_hashable():
    class Loss:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, z: Tensor, y: Tensor) -> Tensor:
            return (z - y).abs().mean()

    assert float(make_loss(Loss()).value(torch.ones(2), torch.zeros(2))) == 1.0
    assert make_loss(Loss()).name == "Loss"


@pytest.mark.parametrize("form", ["module", "name"])
def test_custom_losses_agree_with_named_ones(form):
    output, target = normal(5, 3), labels(3, 5)
    custom = make_loss(lambda z, y: F.cross_entropy(z, y))
    named = make_loss(nn.CrossEntropyLoss() if form == "module" else "cross_entropy")
    assert float(custom.value(output, target)) == pytest.approx(
        float(named.value(output, target)), rel=1e-14
    )


CHECKS = [
    (
        "cross_entropy",
        normal(4, 3),
        torch.tensor([0, 1, 2, 3]),
        r"targets must lie in \[0, 2\] for 3 classes.*from 0",
    ),
    (
        "cross_entropy",
        normal(4, 3),
        torch.tensor([0, 1, -1, 2]),
        r"mark targets to leave out with -100",
    ),
    (
        "cross_entropy",
        normal(4, 3),
        torch.rand(4),
        r"targets must be class indices .*call \.long\(\)",
    ),
    (
        "cross_entropy",
        normal(4, 3),
        torch.zeros(4, dtype=torch.int32),
        r"dtype int64, got torch.int32; call \.long\(\)",
    ),
    (
        "cross_entropy",
        normal(4, 3),
        torch.zeros(4, 1, dtype=torch.long),
        r"targets must have shape \(4,\)",
    ),
    (
        "cross_entropy",
        normal(4),
        torch.zeros(4, dtype=torch.long),
        r"output must be logits \(batch, classes\)",
    ),
    (
        "mse",
        normal(4, 1),
        normal(4),
        r"targets must have the shape of the model's output.*reshape the targets",
    ),
    ("bce_with_logits", normal(4, 1), normal(4), r"targets must have the shape"),
    (
        "nll",
        normal(4, 3),
        torch.zeros(4, dtype=torch.long),
        r"must be log-probabilities for nll.*use cross_entropy",
    ),
    (
        "gaussian_nll",
        (normal(4), normal(4).exp()),
        normal(4, 1),
        r"targets must have the shape of the means",
    ),
    ("gaussian_nll", normal(4, 3), normal(4, 1), r"even last dimension"),
    (
        "gaussian_nll",
        (normal(4), normal(4), normal(4)),
        normal(4),
        r"must be \(mean, variance\) for gaussian_nll",
    ),
    (
        nn.CrossEntropyLoss(ignore_index=2),
        normal(4, 3),
        normal(4, 3).softmax(1),
        r"ignore_index must be left out for",
    ),
    (
        EVERY,
        normal(4, 3),
        torch.zeros(4, dtype=torch.long),
        r"weight must hold one number for each of the 3 classes",
    ),
    (
        nn.BCEWithLogitsLoss(weight=torch.ones(4, 1)),
        normal(4, 2),
        normal(4, 2),
        r"weight must broadcast to the outputs \(2,\) of one sample.*another one in every batch",
    ),
]


@pytest.mark.parametrize(("name", "output", "target", "message"), CHECKS)
def test_checks_name_what_does_not_fit(name, output, target, message):
    with pytest.raises(ValueError, match=message):
        make_loss(name).check(output, target)


@pytest.mark.parametrize("case", CASES)
def test_checks_pass_what_fits(case):
    name, output, target = CASES[case]
    make_loss(name).check(output, target)


WEIGHTED = {
    "weights": nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
    "ignore_index": nn.CrossEntropyLoss(ignore_index=1),
    "weights, smoothed": nn.CrossEntropyLoss(
        weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64),
        label_smoothing=0.2,
        ignore_index=0,
    ),
    "nll": nn.NLLLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_batches_add_up_to_the_whole_mean(name):
    loss = make_loss(WEIGHTED[name])
    output, target = normal(9, 3).log_softmax(1), torch.tensor([0, 1, 2, 2, 1, 0, 0, 2, 1])
    assert torch.allclose(loss.value(output, target), WEIGHTED[name](output, target), rtol=1e-12)
    parts = [
        (loss.terms(y, len(y)), loss.value(z, y))
        for z, y in zip(output.split(4), target.split(4), strict=True)
    ]
    mean = sum(terms * value for terms, value in parts) / sum(terms for terms, _ in parts)
    assert torch.allclose(mean, WEIGHTED[name](output, target), rtol=1e-12)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weighted_losses_take_classes_in_the_last_dimension(name):
    loss, module = make_loss(WEIGHTED[name]), WEIGHTED[name]
    output, target = normal(4, 5, 3).log_softmax(-1), labels(3, 4, 5)
    assert torch.allclose(
        loss.value(output, target), module(output.movedim(-1, 1), target), rtol=1e-12
    )
    square = normal(2, 3, 3).log_softmax(-1), labels(3, 2, 3)
    settled = loss.settle([square, (output, target)])
    assert torch.allclose(
        settled.value(*square), module(square[0].movedim(-1, 1), square[1]), rtol=1e-12
    )
    either = square[0].log_softmax(1), square[1]
    # as torch has it, where both fit
    assert torch.allclose(loss.value(*either), module(*either), rtol=1e-12)


def test_a_weighted_batch_without_a_target_that_counts_is_no_loss():
    loss = make_loss(nn.CrossEntropyLoss(ignore_index=1))
    assert float(loss.value(normal(3, 3), torch.ones(3, dtype=torch.long))) == 0.0


def test_class_weights_are_taken_in_the_precision_of_the_output():
    module = nn.CrossEntropyLoss(weight=torch.ones(3))
    assert make_loss(module).value(normal(4, 3), labels(3, 4)).dtype == torch.float64
    assert module.weight.dtype == torch.float32


def test_the_dimension_of_the_classes_is_decided_by_a_batch_that_shows_it():
    clear, square = (normal(2, 2, 3), labels(3, 2, 2)), (normal(2, 3, 3), labels(3, 2, 3))
    loss = make_loss("cross_entropy").settle([square, clear])
    expected = F.cross_entropy(square[0].movedim(-1, 1), square[1])
    assert torch.allclose(loss.value(*square), expected)
    with pytest.raises(ValueError, match="same dimension in every batch"):
        loss.value(normal(2, 3, 2), labels(3, 2, 2))
    with pytest.raises(
        ValueError, match=r"both fit the targets; move the classes to dimension 1 .* or flatten"
    ):
        make_loss("cross_entropy").settle([square])
    assert torch.allclose(
        make_loss(F.cross_entropy).settle([square]).value(*square), F.cross_entropy(*square)
    )
