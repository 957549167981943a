"""``lambdahat train``."""

from __future__ import annotations

import ast
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from lambdahat._core.check import describe, require, require_choice
from lambdahat.cli.exits import InputError, code_of, one_line, say
from lambdahat.cli.measurements import bars
from lambdahat.cli.options import Output, RecipeChoices, TrainingChoices
from lambdahat.cli.printing import print_json, print_table
from lambdahat.data import augment
from lambdahat.data.splits import Split
from lambdahat.models import MODELS
from lambdahat.optim import IterateAverage, Lookahead, layers_of, make_schedule
from lambdahat.optim.registry import REGULARIZERS, make_optimizer, make_regularizer
from lambdahat.problem import Problem
from lambdahat.report.figures import plot, save_figure
from lambdahat.results import Estimate
from lambdahat.results.charts import value_text
from lambdahat.training import Run, fit
from lambdahat.training.checkpoints import Recipe
from lambdahat.training.loggers import require_loggers
from lambdahat.training.trackers import SampledTracker, make_trackers

HEADER = ("epoch", "loss", "accuracy", "val. loss", "val. acc.", "update", "‖θ‖", "rate", "seconds")
COLUMNS: tuple[str, ...] = ("loss", "accuracy", "validation_loss", "validation_accuracy")
COLUMNS += ("update_norm", "norm", "learning_rate", "seconds")
# what decides no numbers of a run, and what ``fit`` takes as it is
KEPT = ("resume", "keep", "checkpoint_every", "checkpoint_steps")
FREE = ("epochs", "device", "loggers", *KEPT)
LOOP: tuple[str, ...] = ("batch_size", "early_stopping", "precision", "clip", "accumulate")
LOOP += ("curvature_samples", *KEPT)
DEFAULTS: dict[str, dict[str, Any]] = {"sgd": {"lr": 0.1, "momentum": 0.9}}
SHOWN = 12  # rows of a table


def run_train(
    given: RecipeChoices, choices: TrainingChoices, words: Sequence[str], output: Output
) -> int:
    """Train, write and print; the exit code. ``words`` are the options of the optimiser."""
    # torch's own rate for SGD, 0.001, learns next to nothing in ten epochs
    own = DEFAULTS.get(choices.optimizer, {}) if choices.lr is None else {"lr": choices.lr}
    options = {**own, **extra_options(words)}
    loop = {name: getattr(choices, name) for name in LOOP}
    loop["loggers"] = [name.strip() for name in choices.log.split(",") if name.strip()]
    _naming("--log", require_loggers, loop["loggers"])
    settings, free = documents(choices, options, loop)
    recipe = Recipe(
        given.model,
        given.data,
        model_options=key_values(given.model_option or ()),
        data_options=key_values(given.data_option or ()),
        seed=given.seed,
        samples=given.samples,
        settings=settings,
        free=free,
    )
    split = _naming("--data", recipe.split, given=recipe.data_options)
    recipe = replace(recipe, loss=loss_for(split, recipe))
    model = _naming("--model", recipe.network, split, given=recipe.model_options)
    model = model.to(_device(choices.device))
    problem = Problem(model, recipe.loss, split.train)
    optimizer: Any = _optimizer(choices.optimizer, model, options)
    if choices.lookahead is not None:
        optimizer = Lookahead(optimizer, choices.lookahead)
    schedule = None
    if choices.schedule is not None:
        name, more = named_options(choices.schedule)
        make = partial(make_schedule, name, optimizer, choices.epochs)
        schedule = _naming("--schedule", make, given=more, **more)
    average = None
    if choices.averaging is not None:
        kind, more = named_options(choices.averaging)
        average = _naming("--averaging", IterateAverage, model, kind, given=more, **more)
    rules = [_rule(text, model) for text in choices.regularizer or ()]
    trackers = _trackers(choices, recipe.seed)
    out = output.out
    if out is not None:
        _on_disk(recipe.save, out, choices.resume)
    with bars(output.quiet), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", RuntimeWarning)
        run = _on_disk(
            fit,
            problem,
            optimizer,
            choices.epochs,
            schedule=schedule,
            regularizers=rules,
            averaging=average,
            trackers=trackers,
            validation=split.test,
            augment=augment if choices.augment else None,
            folder=out,
            seed=recipe.seed,
            **loop,
        )
    for warning in heard:
        say(f"warning: {one_line(Warning(warning.message))}")
    if out is not None:
        save_figure(plot(run), out / "training.png", dpi=110)
    show(run, trackers, output)
    return code_of([run.status])


def documents(
    choices: TrainingChoices, options: Mapping[str, Any], loop: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings kept beside a run: those that decide its numbers, and those free to change."""
    everything = {**asdict(choices), **loop, "options": dict(options)}
    everything["regularizers"] = everything.pop("regularizer") or ()
    del everything["lr"], everything["log"]
    return {k: v for k, v in everything.items() if k not in FREE}, {k: everything[k] for k in FREE}


def loss_for(split: Split, recipe: Recipe) -> str:
    """The loss for the targets: squared error for real numbers, else cross-entropy."""
    x, y = split.train
    kind = MODELS[require_choice(recipe.model, "--model", MODELS)].takes
    tokens, text = kind == "tokens", not x.is_floating_point()
    expected = f"take the inputs of {recipe.data!r}, {'tokens' if text else 'real numbers'}"
    require(tokens == text, "--model", expected, f"{recipe.model!r}, which takes {kind}")
    if not y.is_floating_point():
        expected = "have at least 2 classes"
        require(split.classes > 1, "--data", expected, f"{recipe.data!r} with {split.classes}")
        return "cross_entropy"
    fits = tuple(y.shape[1:]) == (split.classes,)
    expected = "have real targets of one row for each sample"
    require(fits, "--data", expected, f"{recipe.data!r} of {tuple(y.shape)}")
    return "mse"


def _optimizer(name: str, model: nn.Module, options: Mapping[str, Any]) -> Any:
    """The optimiser ``name``; torch's own errors about its options do not say whose they are."""
    try:
        return _naming("--optimizer", make_optimizer, name, model, **options)
    except ValueError as error:
        if " must " in str(error):
            raise
        raise InputError(f"--optimizer {name}: {one_line(error)}") from error


def _rule(text: str, model: nn.Module) -> Any:
    """A regularizer; one that acts by layer gets the layers of the model."""
    name, given = named_options(text)
    kind, layers = REGULARIZERS.get(name), {}
    if kind is not None and "layers" in inspect.signature(kind).parameters:
        layers = {"layers": layers_of(model)}
    return _naming("--regularizer", make_regularizer, name, given=given, **{**layers, **given})


def _trackers(choices: TrainingChoices, seed: int) -> list[SampledTracker]:
    if not choices.track:
        return []
    samples = {} if choices.track_samples is None else {"samples": choices.track_samples}
    options: dict[str, Any] = {"every": choices.track_every, "unit": choices.track_unit, **samples}
    return list(_naming("--track", make_trackers, choices.track, seed=seed, keep=True, **options))


def _naming(
    option: str,
    function: Any,
    *arguments: Any,
    given: Mapping[str, Any] | None = None,
    **named: Any,
) -> Any:
    """What the function returns; an error about a name, or about options ``given`` by text, says
    where that came from.

    Options may ask for any size: what torch says of memory that is not there is about them too.
    """
    try:
        return function(*arguments, **named)
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        text = one_line(error)
        word, _, rest = text.partition(" must ")
        # what an optimizer, a schedule, an average is asked for by
        if word in ("name", "kind", "loggers") and rest:
            raise InputError(f"{option} must {rest}") from error
        if not given or isinstance(error, InputError):
            raise
        plain = [f"{key}={describe(value)}" for key, value in given.items()]
        raise InputError(f"{option} with {', '.join(plain)}: {text[:300]}") from error


def _on_disk(function: Any, *arguments: Any, **named: Any) -> Any:
    """What the function returns; trouble with the disk is the input's fault, in one line."""
    try:
        return function(*arguments, **named)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(one_line(error)) from error


def _device(name: str) -> torch.device:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        cure = f'use "cpu" ({one_line(error)[:80]})'
        raise InputError(f"--device must be available, got {name!r}; {cure}") from error
    return torch.device(name)


def show(run: Run, trackers: Sequence[SampledTracker], output: Output) -> None:
    """Print epochs and tracked quantities, or a JSON document; remedies go to standard error."""
    if output.as_json:
        rows = {"last": run.last, "best": run.best, "averaged": run.averaged}
        ended = {"ended": run.ended, "status": run.status.name}
        print_json(ended | rows | {"folder": run.folder})
    elif not output.quiet:
        print_table(HEADER, [_row(row) for row in _thin(run.epochs)], str(run))
        if trackers:
            print()
            print_table(*tracker_rows(run, trackers), "tracked, with standard errors")
        output.print_folder()
    if not run.status.ok:
        say(f"{run.status.name}. {run.status.value}")


def tracker_rows(
    run: Run, trackers: Sequence[SampledTracker]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each quantity with its first and last value, and the status of the last."""
    names = [name for tracker in trackers for name in tracker.columns]
    every = [row for row in run.history if any(row.get(name) is not None for name in names)]
    some = [*every[:1], *every[1:][-1:]]
    units = ["epoch" if row["kind"] == "epoch" else "step" for row in some]
    places = [f"{unit} {row[unit]}" for unit, row in zip(units, some, strict=True)]
    rows = []
    for tracker in trackers:
        for name in (name for name in tracker.columns if not name.endswith("_stderr")):
            texts = []
            for row in some:
                value = Estimate(row.get(name, math.nan), row.get(f"{name}_stderr", 0.0))
                text = value_text(value).removesuffix(" (exact)")
                texts.append(text if math.isfinite(value.value) else "")
            status = some[-1].get(f"{tracker.name}_status", "") if some else ""
            rows.append((name, *texts, str(status)))
    return ("quantity", *places, "status"), rows


def _thin(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows spread evenly, the last one among them."""
    gap = -(-len(rows) // SHOWN)
    return [row for i, row in enumerate(rows, start=1) if i % gap == 0 or i == len(rows)]


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    cells = (row.get(column, float("nan")) for column in COLUMNS)
    return str(row["epoch"]), *("" if cell != cell else f"{cell:.4g}" for cell in cells)


def named_options(text: str) -> tuple[str, dict[str, Any]]:
    """A text such as "cosine:ratio=0.1" as a name and its options.

    >>> named_options("step:milestones=(60,120),factor=0.2")
    ('step', {'milestones': (60, 120), 'factor': 0.2})
    """
    name, _, rest = text.partition(":")
    # parts between commas that are not within parentheses
    parts, depth = [""], 0
    for letter in rest:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return name.strip(), key_values([part for part in parts if part.strip()])


def key_values(parts: Sequence[str]) -> dict[str, Any]:
    """Texts such as "lr=0.1" as options."""
    out = {}
    for part in parts:
        key, equals, value = part.partition("=")
        require(bool(key.strip() and equals), "an option", "be written as name=value", repr(part))
        out[key.strip().replace("-", "_")] = literal(value.strip())
    return out


def extra_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse words such as ["--alpha", "0.1", "--nesterov"]; one without a value is True."""
    out: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            expected = "be written as --name value"
            raise InputError(f"options of the optimizer must {expected}, got {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "True"
        out[key.replace("-", "_")] = literal(value)
    return out


def literal(text: str) -> Any:
    """A number, truth value, tuple ("0.9,0.99") or None if the text is one, else the text."""
    try:
        return ast.literal_eval(text if text not in ("true", "false") else text.capitalize())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
