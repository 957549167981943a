"""ImageNet for the Gadam chapter: the 32 × 32 version in memory, or folders of pictures read one
by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data.imagenet import ImageFolder
from lambdahat.data.loading import load
from lambdahat.experiments.averaging.networks import network
from lambdahat.experiments.averaging.runs import Task, image_task
from lambdahat.experiments.kit.cells import Cell
from lambdahat.problem import Problem

SIDE = 224


def picture_task(cell: Cell, device: str) -> Task:
    """A cell's network on ImageNet, or on a data set in its place.

    "imagenet32" takes ``training`` images in the seed's order and ``held_out`` of the validation
    part from the files in ``folder``, or where data are usually found. "imagenet" reads the
    pictures in ``folder``/train and ``folder``/val, in one folder per class, at ``side`` ×
    ``side``.
    """
    if cell["data"] not in ("imagenet32", "imagenet"):
        return image_task(cell, device)
    training, held_out, shape, classes = (
        _small(cell, device) if cell["data"] == "imagenet32" else _large(cell)
    )
    model = network(cell["network"], shape, classes, cell["seed"]).to(device)
    problem = Problem(model, "cross_entropy", training)
    return Task(model, problem, problem.on(held_out).batches)


def _small(cell: Cell, device: str) -> tuple[Any, Any, tuple[int, ...], int]:
    split = load("imagenet32", cell["folder"] or None, verify=False, normalization="raw")
    (x, y), (x_held, y_held) = split
    count, held_out = min(cell["training"], len(x)), min(cell["held_out"], len(x_held))
    chosen = torch.randperm(len(x), generator=generator(cell["seed"], "split"))[:count]
    pixels = x[chosen].to(device).float()
    deviation, mean = torch.std_mean(pixels, (0, 2, 3), keepdim=True)

    def ready(images: Tensor) -> Tensor:
        return (images.to(device).float() - mean) / deviation

    training = ((pixels - mean) / deviation, y[chosen].to(device))
    return (
        training,
        (ready(x_held[:held_out]), y_held[:held_out].to(device)),
        split.shape,
        split.classes,
    )


def _large(cell: Cell) -> tuple[Any, Any, tuple[int, ...], int]:
    require(
        bool(cell["folder"]), "folder", "name the folder above train and val", repr(cell["folder"])
    )
    side = cell["side"] or SIDE
    training, held_out = (
        ImageFolder(Path(cell["folder"]) / part, side) for part in ("train", "val")
    )
    same = training.classes == held_out.classes
    require(
        same,
        "folder",
        "have the same classes in train and val",
        f"{len(training.classes)} and {len(held_out.classes)}",
    )
    return training, held_out, (3, side, side), len(training.classes)
