"""``lambdahat demo``: the NGD paper in miniature, from untrained networks to the page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lambdahat.cli.measurements import bars
from lambdahat.cli.reproduce import say_errors, say_notes, show, write_tables
from lambdahat.experiments.kit.experiment import Experiment, findings
from lambdahat.experiments.kit.sweeps import sweep
from lambdahat.experiments.ngd.epochs import DIGITS
from lambdahat.report.figures import draw, save_figure
from lambdahat.report.page import page_of_stores

SCALE = "cpu"


def run_demo(out: Path, seed: int, quiet: bool) -> int:
    """Train, measure, judge, write and print; 0 whatever the verdicts, 1 where a cell raised."""
    from joblib import cpu_count

    experiment = seeded(DIGITS, seed)
    # a cell gives the same numbers in any process
    jobs = min(cpu_count(), len(experiment.grid(SCALE)))
    with bars(quiet), one_thread():
        store = sweep(
            experiment,
            out,
            scale=SCALE,
            jobs=jobs,
            resume=False,
            command=f"lambdahat demo --seed {seed}",
        )
    code = say_errors(store)
    if len(store.rows()) == 0:
        return code
    found = findings(experiment, store)
    code = max(code, say_notes(store, found))
    write_tables(experiment, found, out / "table")
    for number, chart in enumerate(found.charts, 1):
        axes: Any = draw(chart)
        save_figure(axes, out / f"figure-{number:02d}.png", dpi=110)
    page = page_of_stores(out, out / "report.html", title="Demonstration")
    if not quiet:
        show(experiment, SCALE, found)
        print(f"rows, tables and figures are in {out}; open {page}")
    return code


def seeded(experiment: Experiment, seed: int) -> Experiment:
    """The experiment with other seeds at the demonstration's scale."""
    cells = [{**cell, "seed": seed + cell["seed"]} for cell in experiment.scales[SCALE]]
    return replace(experiment, scales={**experiment.scales, SCALE: cells})


@contextmanager
def one_thread() -> Iterator[None]:
    """Products this small take longer on several threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
