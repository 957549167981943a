"""Splits, normalisation and augmentation."""

import numpy as np
import pytest
import torch

from lambdahat._core.rng import generator
from lambdahat.data import Split, augment, digits_split, load
from lambdahat.data.splits import image_split


def bytes_split(kind, train=None):
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (20, 3, 4, 4), np.uint8) if train is None else train
    test = rng.integers(0, 256, (5, 3, 4, 4), np.uint8)
    split = image_split(
        (train, np.zeros(len(train), np.uint8)), (test, np.zeros(5, np.uint8)), 10, kind
    )
    return torch.from_numpy(train).double(), torch.from_numpy(test).double(), split


@pytest.mark.parametrize(
    ("kind", "mapped"),
    [("raw", lambda x: x), ("unit", lambda x: x / 255), ("symmetric", lambda x: 2 * x / 255 - 1)],
)
def test_fixed_scales(kind, mapped):
    train, test, split = bytes_split(kind)
    assert torch.allclose(split.train[0].double(), mapped(train), atol=1e-6)
    assert torch.allclose(split.test[0].double(), mapped(test), atol=1e-6)
    assert split.train[0].dtype == (torch.uint8 if kind == "raw" else torch.float32)


def test_standard_scale_is_that_of_the_training_images_per_channel():
    train, test, split = bytes_split("standard")
    mean, deviation = train.mean((0, 2, 3)), train.std((0, 2, 3), correction=0)
    for part, source in ((split.train[0], train), (split.test[0], test)):
        expected = (source - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)
        assert torch.allclose(part.double(), expected, atol=1e-5)


def test_a_constant_channel_stays_finite():
    _, _, split = bytes_split("standard", np.full((4, 3, 4, 4), 9, np.uint8))
    assert torch.equal(split.train[0], torch.zeros_like(split.train[0]))


def test_a_split_unpacks_indexes_and_moves():
    split = digits_split()
    (x, y), test = split
    assert x is split.train[0]
    assert y is split[0][1]
    assert test is split[1]
    assert (len(split), split.shape, split.classes) == (2, (64,), 10)
    assert split.nbytes == 1797 * (64 * 4 + 8)
    moved = split.to("meta")
    assert moved.train[0].is_meta
    assert moved.test[1].is_meta
    assert isinstance(moved, Split)


def test_a_device_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    with pytest.raises(
        ValueError, match="device must have 474,408 bytes free for the data, got 1,100; keep"
    ):
        digits_split().to("cuda")


def test_digits_by_name_are_the_digits():
    ours, theirs = load("digits", seed=3, held_out=0.5), digits_split(3, 0.5)
    assert torch.equal(ours.train[0], theirs.train[0])
    assert torch.equal(ours.test[1], theirs.test[1])


def numbered(count=64, side=6):
    """Images whose pixels are all different, and none of them 0."""
    return torch.arange(1.0, count * 2 * side * side + 1).view(count, 2, side, side)


def test_each_image_is_one_of_its_shifted_and_mirrored_copies():
    images = numbered()
    out = augment(images, generator(0, "augment"), padding=2)
    padded = torch.nn.functional.pad(images, [2] * 4)
    seen = set()
    for i, image in enumerate(out):
        cuts = {
            (top, left): padded[i, :, top : top + 6, left : left + 6]
            for top in range(5)
            for left in range(5)
        }
        copies = {
            (*key, turned): cut.flip(2) if turned else cut
            for key, cut in cuts.items()
            for turned in (0, 1)
        }
        matches = [key for key, copy in copies.items() if torch.equal(copy, image)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(5))
    assert {turned for _, _, turned in seen} == {0, 1}


def test_the_generator_decides():
    images = numbered()
    first, again = (augment(images, generator(0, "augment")) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, augment(images, generator(1, "augment")))


def test_without_padding_and_flip_nothing_changes():
    assert torch.equal(
        augment(numbered(), generator(0, "augment"), padding=0, flip=False), numbered()
    )


def test_a_smaller_cut_lies_inside_the_image():
    images = numbered(count=200)
    out = augment(images, generator(0, "augment"), padding=0, size=4, flip=False)
    assert tuple(out.shape) == (200, 2, 4, 4)
    corner = (out[:, 0, 0, 0] - images[:, 0, 0, 0]).long()
    assert set(corner.tolist()) == {6 * top + left for top in range(3) for left in range(3)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: augment(torch.zeros(3, 8, 8), torch.Generator()),
            r"images must be a batch \(B, C, H, W\)",
        ),
        (
            lambda: augment(numbered(), torch.Generator(), padding=-1),
            "padding must be an integer of at least 0",
        ),
        (
            lambda: augment(numbered(), torch.Generator(), padding=1, size=9),
            "size must be at most 8",
        ),
        (lambda: bytes_split("none"), "normalization must be one of 'unit', 'symmetric'"),
        (
            lambda: load("digits", normalization="unit"),
            "options must be among those of 'digits': seed, held_out, got",
        ),
        (lambda: load("mnists"), "name must be one of 'digits', 'xord'"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
