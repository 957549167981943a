"""Data and networks on the device."""

import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.data import augment, digits_split
from lambdahat.models import gpt, lstm

pytestmark = pytest.mark.gpu


def test_a_split_moves():
    split, moved = digits_split(), digits_split().to("cuda")
    assert all(tensor.is_cuda for pair in moved for tensor in pair)
    assert torch.equal(moved.train[0].cpu(), split.train[0])
    assert moved.classes == 10


def test_augmentation_decided_on_the_cpu_is_the_same_on_the_device():
    images = torch.rand(64, 3, 32, 32, generator=generator(0, "images"))
    ours = augment(images.cuda(), generator(0, "augment"))
    assert ours.is_cuda
    assert torch.equal(ours.cpu(), augment(images, generator(0, "augment")))


def test_augmentation_by_a_generator_on_the_device():
    images = torch.rand(64, 3, 32, 32, device="cuda")
    first, again = (augment(images, torch.Generator("cuda").manual_seed(0)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, images)


@pytest.mark.parametrize(
    "build", [lambda fused: lstm(20, 8, 12, fused=fused), lambda fused: gpt(20, fused=fused)]
)
def test_fused_kernels_agree_with_ours(build):
    tokens = torch.randint(0, 20, (4, 16), generator=generator(0, "tokens")).cuda()
    plain, fused = (build(fused).cuda().eval()(tokens) for fused in (False, True))
    assert torch.allclose(plain, fused, atol=2e-3)
