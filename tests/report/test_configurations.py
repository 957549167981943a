"""The configuration of a run in one line."""

from dataclasses import dataclass

import pytest

from lambdahat.report.sections import in_full, in_short


@dataclass(frozen=True)
class Part:
    network: str
    epochs: int
    data: str = "digits"


@dataclass(frozen=True)
class Config:
    depth: int
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    data: tuple[str, ...] = ()
    net: tuple[str | int, ...] = ()
    nets: tuple[tuple[str, int], ...] = ()
    held_out: int = 0
    augmented: bool = False
    words: str = ""


LINES = {
    "what is zero or empty is left out": (Config(3), "depth: 3"),
    "what is asked first comes first": (Config(3, held_out=2000), "held out: 2,000 · depth: 3"),
    "parts are looked into": (
        Config(3, Part("MLP", 5)),
        "data: digits · network: MLP · epochs: 5 · depth: 3",
    ),
    "what differs has all values": (
        Config(3, parts=(Part("MLP", 0), Part("CNN", 0))),
        "data: digits · network: MLP / CNN · depth: 3",
    ),
    "a field hides one inside": (
        Config(3, Part("MLP", 5), data=("mnist", "xor")),
        "data: mnist / xor · network: MLP · epochs: 5 · depth: 3",
    ),
    "a thing of several words": (
        Config(3, net=("ffnn", 2, 64), nets=(("a", 1), ("b", 2))),
        "net: ffnn 2 64 · nets: a 1 / b 2 · depth: 3",
    ),
    "what is long is left out": (Config(3, words="x" * 100), "depth: 3"),
    "a list of cells": (
        [{"rate": rate, "seed": seed, "data": "digits"} for rate in (0.1, 0.2) for seed in (0, 1)],
        "data: digits · seeds: 2 · rate: 0.1 / 0.2",
    ),
    "cells of several seeds": ([{"rate": 0.1, "seeds": [0, 1]}], "seeds: 2 · rate: 0.1"),
    "groups of seeds": ([{"k": 3, "seeds": 2, "group": i} for i in range(3)], "seeds: 6 · k: 3"),
    "no configuration": (None, ""),
}


@pytest.mark.parametrize(("config", "line"), LINES.values(), ids=LINES)
def test_one_line(config, line):
    assert in_short(config) == line


def test_in_full_it_has_every_field():
    assert in_full(Part("MLP", 5)) == {
        "config: network": "MLP",
        "config: epochs": "5",
        "config: data": "digits",
    }
    cells = [
        {"rate": rate, "data": "digits", "seed": seed} for rate in (0.1, 0.2) for seed in (0, 1)
    ]
    assert in_full(cells) == {
        "config: cells": "4",
        "config: rate": "0.1 / 0.2",
        "config: data": "digits",
    }
    assert in_full(None) == {}
