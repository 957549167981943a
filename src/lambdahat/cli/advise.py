"""``lambdahat advise``."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from lambdahat.cli.exits import code_of, foreign_output, require_writable, say
from lambdahat.cli.loading import load_problem
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import Output, ProblemChoices
from lambdahat.cli.printing import markdown_table, print_json, print_table, text_table
from lambdahat.randommatrix import Advice, NoiseLevels, advise
from lambdahat.randommatrix.advice_rules import NOISE_WORDS, text
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Estimate, write_atomically
from lambdahat.results.charts import value_text

MEASURED = ("measured", "value ± error", "of")
NEAR = 0.25  # of the samples taken, above which a batch is not small beside them
ADVISED = ("advice", "batch", "value ± error", "95 % interval")


def run_advise(
    factory: str, checkpoint: Path | None, choices: ProblemChoices, output: Output, **question: Any
) -> int:
    """Measure, advise, print and write; the exit code. ``question`` are arguments of ``advise``."""
    require_writable(output.out)
    problem = load_problem(factory, choices, checkpoint)
    with bars(output.quiet), foreign_output():
        advice = advise(problem, **question)
    if choices.samples is not None:
        advice = replace(advice, cautions=(*advice.cautions, *mind_samples(advice)))
    if output.out is not None:
        _write(advice, output.out)
    if output.as_json:
        print_json(document(advice))
    elif not output.quiet:
        print(f"{advice.headline}\n")
        print_table(MEASURED, measurement_rows(advice), headline(advice))
        print()
        print_table(ADVISED, advice_rows(advice))
        print(f"\n{reasons(advice)}")
        output.print_folder()
    if not advice.status.ok:
        say(f"eigenpairs: {advice.status.name}. {advice.status.value}")
    return code_of([advice.status])


def mind_samples(advice: Advice) -> list[str]:
    """Warn if batches are not far smaller than --samples, which the formulas take for all data."""
    total, cautions = advice.levels.population, []
    for size in (view.batch_size for view in advice.levels.views if view.batch_size > NEAR * total):
        less = "noise, and none is seen here"
        if size < total:
            less = f"{1 / (1 - size / total):.2g} times the noise seen here"
        cautions.append(
            f"a batch of {size:,} is {size / total:.0%} of the {total:,} samples taken, which count"
            f" as all data in b = B/(1 − B/N): with far more data it has {less}; take more"
            " --samples"
        )
    return cautions


def headline(advice: Advice) -> str:
    """One line on what was measured."""
    levels = advice.levels
    return f"{advice.rule}: {levels.parameters:,} parameters, {levels.population:,} samples"


def measurement_rows(advice: Advice) -> list[tuple[str, str, str]]:
    """The numbers behind the advice."""
    levels, rows = advice.levels, []
    if isinstance(levels, NoiseLevels):
        rows = [
            (
                "λ₁",
                value_text(levels.largest),
                f"largest eigenvalue, {levels.operator} of all data",
            ),
            _low_end(levels),
            ("σ²", value_text(levels.variance), "variance of an element over samples"),
            ("τ²", value_text(levels.tau2), "variance along the sharpest direction over samples"),
        ]
    for view in levels.views:
        size = f"batches of {view.batch_size:,}"
        spread = f"{size}, mean; standard deviation {view.spread:.2g}"
        rows.append(("λ₁", value_text(view.measured), spread))
        if isinstance(levels, NoiseLevels):
            words = f"{size}, overlap of the sharpest direction with that of all data"
            rows.append(("|φ̂₁ᵀφ₁|²", value_text(view.overlap), words))
        rows += [
            ("λ₁", value_text(each), f"{size}, predicted from {NOISE_WORDS[model]}")
            for model, each in view.predicted.items()
        ]
    return rows


def _low_end(levels: NoiseLevels) -> tuple[str, str, str]:
    """λ_P; for a Gauss–Newton matrix, which is positive semi-definite, the mean eigenvalue."""
    if levels.operator != "ggn":
        return (
            "λ_P",
            value_text(levels.smallest),
            f"smallest eigenvalue, {levels.operator} of all data",
        )
    order = levels.parameters
    mean = Estimate(float(levels.trace) / order, float(levels.trace.stderr) / order)
    return "mean λ", value_text(mean), "mean eigenvalue, ggn of all data, tr/P; none is below 0"


def advice_rows(advice: Advice) -> list[tuple[str, ...]]:
    """One row for each recommendation; a value of unknown error has two digits alone, for more
    would promise something.
    """
    rows: list[tuple[str, ...]] = []
    for each in advice.recommendations:
        known = not math.isnan(float(each.value.stderr))
        value = value_text(each.value) if known else text(each.value)
        low, high = each.value.interval()
        interval = "unknown" if math.isnan(low) else f"{low:.3g} to {high:.3g}"
        batch = f"{each.batch_size:,}" if each.batch_size else "any"
        rows.append((each.name, batch, value, interval))
    return rows


def reasons(advice: Advice) -> str:
    """Why, one line each, and what to mind."""
    lines = [
        f"{each.name}{f' ({each.batch_size:,})' if each.batch_size else ''}: {each.reason}"
        for each in advice.recommendations
    ]
    return "\n".join([*lines, *(f"caution: {caution}" for caution in advice.cautions)])


def document(advice: Advice) -> dict[str, Any]:
    """Everything for --json."""
    levels = advice.levels
    names = ("largest", "smallest", "variance", "tau2") if isinstance(levels, NoiseLevels) else ()
    views = [
        {
            "batch_size": view.batch_size,
            "effective": view.effective,
            "measured": _pair(view.measured),
            "spread": view.spread,
            "overlap": _pair(view.overlap),
            "predicted": {model: _pair(each) for model, each in view.predicted.items()},
        }
        for view in levels.views
    ]
    about = {
        "optimizer": advice.optimizer,
        "momentum": advice.momentum,
        "learning_rate": advice.learning_rate,
        "curvature": levels.operator,
        "parameters": levels.parameters,
        "samples": levels.population,
    }
    return {
        "headline": advice.headline,
        "about": about,
        "measured": {name: _pair(getattr(levels, name)) for name in names},
        "batches": views,
        "advice": advice.table(),
        "cautions": list(advice.cautions),
        "cost": advice.cost,
        "status": advice.status.name,
    }


def _pair(value: Estimate) -> dict[str, float]:
    return {"value": float(value), "stderr": float(value.stderr)}


def _write(advice: Advice, folder: Path) -> None:
    """``advice.json``, ``table.txt``, ``table.md`` and ``advice.png``."""
    advice.save(folder / "advice.json")
    title, why, rows = headline(advice), reasons(advice), advice_rows(advice)
    first = measurement_rows(advice)
    plain = [advice.headline, text_table(MEASURED, first, title), text_table(ADVISED, rows), why]
    marked = [f"{advice.headline}\n", f"{title}\n", markdown_table(MEASURED, first)]
    marked += [markdown_table(ADVISED, rows), why]
    write_atomically(folder / "table.txt", ("\n\n".join(plain) + "\n").encode())
    write_atomically(folder / "table.md", ("\n".join(marked) + "\n").encode())
    save_figure(plot(advice), folder / "advice.png")
