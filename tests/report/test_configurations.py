"""The configuration of a run in one line."""

import pytest

from lambdahat.report.sections import in_full, in_short

LINES = {
    "what is zero or empty is left out": (
        [{"depth": 3, "held_out": 0, "augmented": False, "words": "", "net": ()}],
        "depth: 3",
    ),
    "what is asked first comes first": (
        [{"depth": 3, "held_out": 2000}],
        "held out: 2,000 · depth: 3",
    ),
    "what differs has all values": (
        [{"network": name, "depth": 3, "data": ["mnist", "xor"]} for name in ("MLP", "CNN")],
        "data: mnist / xor · network: MLP / CNN · depth: 3",
    ),
    "a thing of several words": (
        [{"depth": 3, "net": ("ffnn", 2, 64), "nets": (("a", 1), ("b", 2))}],
        "net: ffnn 2 64 · nets: a 1 / b 2 · depth: 3",
    ),
    "what is long is left out": ([{"depth": 3, "words": "x" * 100}], "depth: 3"),
    "a list of cells": (
        [{"rate": rate, "seed": seed, "data": "digits"} for rate in (0.1, 0.2) for seed in (0, 1)],
        "data: digits · seeds: 2 · rate: 0.1 / 0.2",
    ),
    "cells of several seeds": ([{"rate": 0.1, "seeds": [0, 1]}], "seeds: 2 · rate: 0.1"),
    "groups of seeds": ([{"k": 3, "seeds": 2, "group": i} for i in range(3)], "seeds: 6 · k: 3"),
    "no cells": ([], ""),
}


@pytest.mark.parametrize(("cells", "line"), LINES.values(), ids=LINES)
def test_one_line(cells, line):
    assert in_short(cells) == line


def test_in_full_it_has_every_setting():
    cells = [
        {"rate": rate, "data": "digits", "seed": seed} for rate in (0.1, 0.2) for seed in (0, 1)
    ]
    assert in_full(cells) == {
        "config: cells": "4",
        "config: rate": "0.1 / 0.2",
        "config: data": "digits",
    }
    assert in_full([]) == {}
