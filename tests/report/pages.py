"""Pages for the tests of the page, and what a reader of their HTML sees."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import math
from html.parser import HTMLParser
from typing import Any

import numpy as np

from lambdahat.experiments.kit.claims import FAILS, HOLDS, OPEN, UNTESTED, Table, Verdict
from lambdahat.report.sections import Card, Section
from lambdahat.results.charts import Chart, Heat, Series

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"
EMPTY = {"meta", "link", "br", "img", "input", "hr"}


def with_own_claims() -> list[Section]:
    """An experiment at two scales with a claim of ours, and another one."""
    own = Verdict(
        "ours is faster", "", UNTESTED, "1 ± 2; not testable: nothing has learnt", own=True
    )
    small = dataclasses.replace(an_experiment(1, FAILS), experiment="one", size=1)
    small = dataclasses.replace(small, verdicts=(*small.verdicts, own))
    large = dataclasses.replace(an_experiment(2), experiment="one", size=2, setting="paper scale")
    large = dataclasses.replace(
        large, verdicts=(*large.verdicts, own, dataclasses.replace(own, verdict=HOLDS))
    )
    return [large, small, dataclasses.replace(an_experiment(3, UNTESTED), experiment="two", size=1)]


def an_experiment(number: int, verdict: str = HOLDS, paper: str = "A paper") -> Section:
    """A section with everything in it."""
    epochs = list(range(50))
    curves = tuple(
        Series(name, epochs, [math.exp(-i / 20) * scale for i in epochs], [0.02] * 50)
        for name, scale in (("SGD", 1.0), ("NGD", 2.0))
    )
    told = Series("SGD, paper", [20], [0.4], style="points", published=True)
    offsets = [float(x) for x in np.linspace(-1, 1, 9)]
    plane = Heat(offsets, offsets, [[x * x + y * y for x in offsets] for y in offsets], "loss")
    return Section(
        f"Experiment {number}",
        "What it is.\n\nAnd more.",
        paper,
        verdicts=(
            Verdict(f"claim {number}", "Figure 1", verdict, "1.2 ± 0.1", "1.1"),
            Verdict("a second claim", "Table 2", OPEN, "0.3 ± 0.4"),
        ),
        cards=(Card("λ̂", "12.3 ± 0.4", "95 %: 11.5 to 13.1", "NOT_MIXED: draw more"),),
        charts=(
            Chart(
                "Curves",
                "epoch",
                "loss",
                (*curves, told),
                y_log=True,
                source="Figure 2",
                caption="Errors.",
            ),
            Chart("Plane", "x", "y", heat=plane, surface=number == 3),
        ),
        tables=(Table("Table 1", ("rule", "accuracy"), (("SGD", "93.4"), ("NGD", "94.0"))),),
        assumptions=("One batch size is not given.",),
        notes=("3 of 4 cells have finished.",),
        facts={"torch": "2.6", "seeds": "0 to 3"},
        command="lambdahat reproduce one --scale cpu",
        rows=[
            {"seed": 0, "loss": 0.5, "name": 'a,"b"\nc'},
            {"seed": 1, "loss": math.nan, "extra": [1, 2.5, math.inf]},
        ],
        setting="cpu scale",
        name=f"experiment-{number}-cpu",
        part="§2",
        ran="data: digits · epochs: 3",
    )


def experiments() -> list[Section]:
    """Three of them, of two papers."""
    return [
        an_experiment(1),
        an_experiment(2, FAILS, "Another paper"),
        an_experiment(3, HOLDS, "Another paper"),
    ]


class Reader(HTMLParser):
    """Elements in order as (tag, attributes), texts, and whether every element that was opened
    was closed.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.scripts: dict[str, str] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if self.open and self.open[-1] == "script":
            name = str(self.elements[-1][1].get("id"))
            self.scripts[name] = self.scripts.get(name, "") + data

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]

    def payload(self, name: str) -> Any:
        """The data of a section."""
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[f"data-{name}"])))
