"""Networks: published sizes, shapes, weights from the seed alone, and curvature through them."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state

from lambdahat._core.rng import generator
from lambdahat.models import (
    all_cnn,
    deep_linear,
    gpt,
    lenet5,
    lstm,
    make_model,
    mlp,
    preresnet,
    resnet50,
    resnext29,
    softmax_regression,
    vgg16,
    wide_resnet,
)
from lambdahat.models.language import GPT

SMALL = {
    "softmax": lambda seed: softmax_regression(12, 4, seed),
    "mlp": lambda seed: mlp([12, 5, 4], "tanh", seed),
    "deep_linear": lambda seed: deep_linear([12, 3, 4], seed=seed),
    "lenet5": lambda seed: lenet5(classes=4, seed=seed),
    "all_cnn": lambda seed: all_cnn(classes=4, seed=seed),
    "vgg16": lambda seed: vgg16(classes=4, seed=seed),
    "preresnet": lambda seed: preresnet(11, classes=4, seed=seed),
    "wide_resnet": lambda seed: wide_resnet(10, 1, classes=4, seed=seed),
    "resnext29": lambda seed: resnext29(classes=4, cardinality=2, base_width=4, seed=seed),
    "lstm": lambda seed: lstm(4, 3, 5, seed=seed),
    "gpt": lambda seed: gpt(4, 6, 8, 2, 2, seed=seed),
}
VECTORS, TOKENS = {"softmax", "mlp", "deep_linear"}, {"lstm", "gpt"}


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def samples(name, number=3):
    """Inputs and labels that fit the small network of this name, in float64."""
    rng = generator(0, "samples", name)
    if name in TOKENS:
        text = torch.randint(0, 4, (number, 6), generator=rng)
        return text[:, :-1], text[:, 1:]
    shape = (12,) if name in VECTORS else (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    x = torch.randn(number, *shape, generator=rng, dtype=torch.float64)
    return x, torch.randint(0, 4, (number,), generator=rng)


@pytest.mark.parametrize(("cardinality", "millions"), [(8, 34.4), (16, 68.1)])
def test_resnext_sizes_are_those_of_its_paper(cardinality, millions):
    assert math.isclose(count(resnext29(cardinality=cardinality)) / 1e6, millions, abs_tol=0.06)


def test_sizes_of_variants_are_the_published_ones():
    assert count(vgg16(classes=100, batch_norm=True)) == 15_291_300 + 2 * 4224
    assert count(wide_resnet(classes=100, bias=False)) == 36_536_884


def test_gpt_at_the_sizes_of_gpt2_has_its_parameters():
    with torch.device("meta"):
        assert count(GPT(50_257, 1024, 768, 12, 12)) == 124_439_808


def test_depth_counts_the_layers_with_weights():
    def convolutions(model):
        return sum(isinstance(m, nn.Conv2d) and m.kernel_size != (1, 1) for m in model.modules())

    assert convolutions(vgg16()) + 3 == 16
    assert convolutions(wide_resnet(28, 1)) + 3 == 28  # and three shortcuts of 1 × 1
    bottlenecks = [m for m in preresnet(110).modules() if hasattr(m, "branch")]
    assert 3 * len(bottlenecks) + 2 == 110


@pytest.mark.parametrize(
    "name", ["softmax", "mlp", "deep_linear", "lenet5", "all_cnn", "vgg16", "lstm", "gpt"]
)
def test_seeds_stacked_by_vmap_are_the_seeds_one_by_one(name):
    x, _ = samples(name, 2)
    models = [SMALL[name](seed).double().eval() for seed in (0, 1)]
    parameters, buffers = stack_module_state(models)
    skeleton = SMALL[name](0).to("meta").eval()
    together = torch.vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
    for model, logits in zip(models, together, strict=True):
        assert torch.allclose(model(x), logits, atol=1e-12)


def test_mlp_layers_and_scale():
    model = mlp([64, 32, 10], activation="tanh")
    assert [type(layer).__name__ for layer in model] == ["Linear", "Tanh", "Linear"]
    assert tuple(model(torch.zeros(3, 64)).shape) == (3, 10)
    bound = 64**-0.5
    largest = float(model[0].weight.detach().abs().max())
    assert 0.99 * bound < largest <= bound


def test_dropout_follows_each_hidden_activation_and_leaves_the_weights_as_they_were():
    model = mlp([64, 32, 16, 10], dropout=0.25)
    kinds = [type(layer).__name__ for layer in model]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    assert model[2].p == 0.25
    assert torch.equal(flat(model), flat(mlp([64, 32, 16, 10])))


def test_convolutions_of_residual_networks_have_hes_variance():
    weight = preresnet(11)[3].branch[5].weight  # 64 × 64 × 3 × 3
    assert math.isclose(float(weight.detach().var()), 2 / (64 * 9), rel_tol=0.05)


def test_a_deep_linear_network_is_the_product_of_its_matrices():
    model = deep_linear([5, 3, 4, 2]).double()
    x = torch.randn(7, 5, generator=generator(0, "x"), dtype=torch.float64)
    product = model[2].weight @ model[1].weight @ model[0].weight
    assert torch.allclose(model(x), x @ product.T)


def test_a_model_by_name_is_that_of_the_function():
    assert torch.equal(
        flat(make_model("mlp", (64,), 10, 5, widths=[32])), flat(mlp([64, 32, 10], seed=5))
    )
    assert torch.equal(flat(make_model("preresnet110", classes=3)), flat(preresnet(110, classes=3)))
    with_norm = make_model("vgg16bn", classes=3, dropout=0.0)
    assert torch.equal(flat(with_norm), flat(vgg16(classes=3, batch_norm=True, dropout=0.0)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mlp([4]), "sizes must name"),
        (lambda: mlp([4, 0]), "at least 1"),
        (lambda: mlp([4, 2], "step"), "one of 'relu'"),
        (lambda: mlp([4, 2], dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
        (lambda: deep_linear([4]), "sizes must name"),
        (lambda: preresnet(18), "depth must be 9n \\+ 2, such as 110 or 164, got 18"),
        (lambda: wide_resnet(27), "depth must be 6n \\+ 4, such as 28, got 27"),
        (lambda: wide_resnet(28, 0), "width must be"),
        (lambda: resnet50(stem="mnist"), "stem must be one of 'imagenet', 'cifar'"),
        (lambda: resnext29(cardinality=0), "cardinality must be"),
        (lambda: lstm(20, layers=0), "layers must be"),
        (lambda: lstm(20, dropout=-0.1), "dropout must lie in"),
        (lambda: gpt(width=10, heads=3), "heads must divide the width 10, got 3"),
        (
            lambda: gpt(20, 4, 8, 2, 1)(torch.zeros(1, 5, dtype=torch.long)),
            "tokens must be at most 4 long, got 5; cut",
        ),
        (lambda: make_model("vgg"), "name must be one of 'softmax'"),
        (
            lambda: make_model("lenet5", shape=(784,)),
            r"shape must be \(channels, 28, 28\) for 'lenet5', got \(784,\)",
        ),
        (
            lambda: make_model("vgg16", shape=(1, 28, 28)),
            r"shape must be \(channels, 32, 32\) for 'vgg16', got",
        ),
        (
            lambda: make_model("all_cnn", shape=(3072,)),
            r"shape must be \(channels, height, width\) for 'all_cnn'",
        ),
        (
            lambda: make_model("vgg16", width=3),
            "options must be among those of 'vgg16': dropout, got width",
        ),
        (
            lambda: make_model("softmax", width=3),
            "options must be among those of 'softmax': none, got width",
        ),
        (lambda: make_model("mlp", classes=0), "classes must be"),
        (lambda: make_model("mlp", shape=(0,)), "shape must be"),
    ],
)
def test_misuse_is_refused_with_the_cure(call, message):
    with pytest.raises(ValueError, match=message):
        call()
