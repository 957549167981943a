"""A language model with and without averages (Table 7.5, Figures 7.10, 7.11a and 7.13a)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lambdahat._core.check import require
from lambdahat._core.rng import generator
from lambdahat.data.catalogue import load_text
from lambdahat.data.texts import windows
from lambdahat.experiments.averaging.averaged_training import (
    BASES,
    AveragedTask,
    AveragePlan,
    Averages,
    gap,
    recipe,
    size_of,
    train,
    tuned_start,
)
from lambdahat.experiments.kit.cells import (
    Cell,
    Row,
    Rows,
    Scale,
    curve,
    errors,
    means,
    over_seeds,
    settings_of,
)
from lambdahat.experiments.kit.claims import Claim, Claims, Table, paired_difference, split_header
from lambdahat.experiments.kit.experiment import SPECTRAL, Experiment, Size, sentences
from lambdahat.models.language import lstm
from lambdahat.problem import Problem
from lambdahat.results.charts import Chart, Series

OPTIMIZERS = ("ASGD", "Adam", "Padam", "Gadam", "GadamX")
AVERAGED = ("ASGD", "Gadam", "GadamX")
START = 0.5  # of the epochs: 100 of 200
STARTS = (0.25, 0.5, 0.75)
FREQUENCIES = (1, 10, 100)  # steps between averaged iterates
DECAY = 1.2e-6
POWER = 0.2  # p of Padam in the language experiments
CLIP = 0.25
TEST = "test perplexity"
STEADY = 0.01  # of the iterates' perplexity, by which it may still fall while they are averaged
SMALL_CHANGE = 0.05  # perplexity within which frequencies count as alike
# Validation and test perplexity on Penn Treebank by words (Table 7.5)
PRINTED = {
    "ASGD": (64.88, 61.98),
    "Adam": (65.96, 63.16),
    "Padam": (65.69, 62.15),
    "Gadam": (61.35, 58.77),
    "GadamX": (63.49, 60.45),
}


@dataclass(frozen=True)
class LanguageScale(Scale):
    """One scale: characters to train on and to judge by, and the LSTM."""

    embedding: int
    hidden: int
    layers: int
    dropout: float = 0.0
    length: int = 64
    sgd_rate: float = 10.0
    adam_rate: float = 3e-3
    padam_rate: float = 1.0


def cells(config: LanguageScale) -> list[Cell]:
    """Optimiser × seed."""
    base = settings_of(config, "seeds", "sgd_rate", "adam_rate", "padam_rate")
    base |= {"clip": CLIP, "power": POWER, "momentum": 0.0}
    rates = {"SGD": config.sgd_rate, "Adam": config.adam_rate, "Padam": config.padam_rate}
    kinds = {"Gadam": "Adam", "GadamX": "Padam"}  # without decoupled decay here
    out = []
    for name in OPTIMIZERS:
        rate = rates[kinds.get(name, BASES.get(name, name))]
        schedule = "step" if name == "Padam" else "flat"  # Padam needs one to converge
        plan = recipe(
            f"{kinds[name]}-IA" if name in kinds else name,
            rate,
            DECAY,
            config.epochs,
            schedule,
            first=max(1, round(START * config.epochs)),
            every=1,
        )
        out += [{**base, "name": name, **plan, "seed": seed} for seed in range(config.seeds)]
    return out


def run(cell: Cell, device: str) -> list[Row]:
    """Rows of epochs and of the end with test perplexity; of Adam also each average."""
    task, test = language_task(cell, device)
    steps = math.ceil(task.problem.num_samples / cell["batch"])
    chosen = list(plans(cell["epochs"], steps).values()) if cell["name"] == "Gadam" else []
    averages = Averages(chosen)
    trained = train(cell, task, averages)
    rows = [
        {**row, "perplexity": _exp(row["loss"]), "iterate perplexity": _exp(row["iterate loss"])}
        for row in trained.rows
    ]
    end = {
        **rows[-1],
        **trained.end,
        **size_of(task),
        "test perplexity": perplexity(trained.solution, test),
    }
    rows.append({**end, "before": rows[trained.end["begun"] - 1]["iterate perplexity"]})
    for (start, every), plan in plans(cell["epochs"], steps).items() if chosen else ():
        if averages.counts[plan]:
            model = averages.model(plan, task.model, ())
            rows.append(
                {
                    "kind": "average",
                    "start": start,
                    "frequency": every,
                    "averages": averages.counts[plan],
                    "perplexity": perplexity(model, task.problem.on(task.held_out)),
                    "test perplexity": perplexity(model, test),
                }
            )
    return rows


def plans(epochs: int, steps: int) -> dict[tuple[float, int], AveragePlan]:
    """The averages by start and frequency: all starts every step, all frequencies from half on."""
    wanted = [(start, 1) for start in STARTS] + [(START, every) for every in FREQUENCIES]
    return {
        (start, every): AveragePlan(max(1, round(start * epochs)) * steps, every)
        for start, every in dict.fromkeys(wanted)
    }


def language_task(cell: Cell, device: str) -> tuple[AveragedTask, Problem]:
    """An LSTM on stretches of a text, with the validation part held out; and the test part."""
    parts, vocabulary = text_parts(cell)
    model = lstm(
        vocabulary,
        cell["embedding"],
        cell["hidden"],
        cell["layers"],
        cell["dropout"],
        fused=True,
        seed=cell["seed"],
    ).to(device)
    stretches = [
        tuple(part.to(device) for part in windows(tokens, cell["length"])) for tokens in parts
    ]
    problem = Problem(model, "cross_entropy", stretches[0])
    return AveragedTask(model, problem, problem.on(stretches[1]).batches), problem.on(stretches[2])


def text_parts(cell: Cell) -> tuple[list[Tensor], int]:
    """Tokens to train on, to validate and to test by, and how many kinds there are."""
    count, held_out = cell["training"], cell["held_out"]
    if cell["data"] == "made":
        tokens = made_text(count + 2 * held_out, MADE)
        return list(tokens.split([count, held_out, held_out])), MADE
    text = load_text(cell["data"])
    enough = count + held_out <= len(text.train) and held_out <= len(text.test)
    require(
        enough,
        "training and held_out",
        f"fit {len(text.train):,} and {len(text.test):,} tokens",
        f"{count:,} and {held_out:,}",
    )
    valid = text.train[count : count + held_out]
    return [text.train[:count], valid, text.test[:held_out]], len(text.vocabulary)


MADE = 8  # kinds of tokens in a made text
STAY = 0.7


def made_text(length: int, kinds: int) -> Tensor:
    """A text without files: each token is the one after its predecessor with probability 0.7, else
    any.

    The best perplexity possible is exp of the entropy rate, ``made_perplexity``.
    """
    rng = generator(0, "made text")
    follow = torch.rand(length, generator=rng) < STAY
    drawn = torch.randint(0, kinds, (length,), generator=rng)
    tokens, last = [], 0
    for next_one, other in zip(follow.tolist(), drawn.tolist(), strict=True):
        last = (last + 1) % kinds if next_one else other
        tokens.append(last)
    return torch.tensor(tokens)


def made_perplexity(kinds: int = MADE) -> float:
    """exp(H), H = −Σ p ln p of the next token given the last."""
    other = (1 - STAY) / kinds
    return math.exp(
        -(STAY + other) * math.log(STAY + other) - (kinds - 1) * other * math.log(other)
    )


def perplexity(model: torch.nn.Module, problem: Problem) -> float:
    """exp of the mean loss per token."""
    return _exp(float(Problem(model, "cross_entropy", problem.batches).loss()))


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0)) if math.isfinite(loss) else math.nan


def claims(rows: Rows) -> list[Claim]:
    """The order of Table 7.5, and how little start and frequency matter."""
    ends, epochs = rows.where(kind="end"), rows.where(kind="epoch")
    of = {name: ends.where(name=name) for name in OPTIMIZERS}
    found = [
        Claim(
            f"{name}'s perplexity is below {other}'s",
            "§7.8.3, Table 7.5",
            _printed_pair(name, other),
            gap(of[name], of[other], TEST),
            "below",
            unmet=unready(epochs, name, other),
        )
        for name, other in (
            ("Gadam", "Adam"),
            ("GadamX", "Padam"),
            ("Gadam", "ASGD"),
            ("Gadam", "GadamX"),
        )
    ]
    return found + _average_claims(rows.where(kind="average"), of["Adam"], epochs)


def _average_claims(made: Rows, adam: Rows, epochs: Rows) -> list[Claim]:
    """Figures 7.11a and 7.13a and Table 7.6: averages of one run, by start and by frequency."""
    found = [
        Claim(
            f"averages from {start:.0%} of the run are below Adam",
            "§7.8.4, Figure 7.11a",
            "for any reasonable T_avg",
            gap(made.where(start=start, frequency=1), adam, TEST),
            "below",
            unmet=unlearnt(epochs, "Adam") or unsettled(epochs, "Gadam", start),
        )
        for start in STARTS
        if start != START
    ]
    often, seldom = (
        made.where(start=START, frequency=every) for every in (FREQUENCIES[0], FREQUENCIES[-1])
    )
    tuned = paired_difference(
        tuned_start(made.where(frequency=1), TEST, lowest=True), often.paired(TEST)
    )
    unmet = unready(epochs, "Gadam")
    said = Claims(found)
    sentence = (
        f"Gadam gains from tuning T_avg (best start over the other seeds, against {START:.0%}"
        " of the run)"
    )
    source = "§7.8.4, Table 7.6"
    published = "58.61 to 58.77"
    said.add(sentence, source, published, tuned, "below", unmet=unlearnt(epochs, "Gadam"))
    sentence = f"averaging every step or every {FREQUENCIES[-1]} makes little difference"
    source = "§7.8.6, Figure 7.13a"
    published = "very insensitive"
    reading = gap(seldom, often, "perplexity")
    said.add(sentence, source, published, reading, "within", 0.0, SMALL_CHANGE, unmet=unmet)
    sentence = f"averaging every {FREQUENCIES[-1]} steps is below averaging every step"
    reading = gap(seldom, often, "perplexity")
    said.add(sentence, "§7.8.6, Figure 7.13a", "slightly better", reading, "below", unmet=unmet)
    return said


def unready(epochs: Rows, *names: str) -> str:
    """Why runs cannot be compared by their perplexity, by rules that do not look at the outcome."""
    averaged = [name for name in names if name in AVERAGED]
    reasons = [unlearnt(epochs, *names), *(unsettled(epochs, name, START) for name in averaged)]
    return next((reason for reason in reasons if reason), "")


def unlearnt(epochs: Rows, *names: str) -> str:
    """A run whose iterates do not end below half of their perplexity after one epoch."""
    for name in names:
        before, after = (_iterates(epochs, name, share) for share in (0.0, 1.0))
        if 2 * after > before:
            return f"{name} learnt little, perplexity {after:.3g} from {before:.3g} after one epoch"
    return ""


def unsettled(epochs: Rows, name: str, start: float) -> str:
    """Why averages begin too soon: the perplexity still falls by more than ``STEADY`` of itself."""
    before, after = (_iterates(epochs, name, share) for share in (start, 1.0))
    if after < (1 - STEADY) * before:
        return (
            f"averages of {name} begin too soon, its iterates go on from {before:.3g} to"
            f" {after:.3g}"
        )
    return ""


def _iterates(epochs: Rows, name: str, share: float) -> float:
    """The iterates' perplexity at a share of the run, over seeds."""
    part = epochs.where(name=name)
    epoch = max(1, round(share * max(part.values("epoch"), default=1)))
    return over_seeds(part.where(epoch=epoch), "iterate perplexity").value


def _printed_pair(name: str, other: str) -> str:
    return f"{PRINTED[name][1]:g} to {PRINTED[other][1]:g}"


def tables(rows: Rows) -> list[Table]:
    """Perplexities of each optimiser beside the printed ones, and of Adam's averages."""
    ends, made = rows.where(kind="end"), rows.where(kind="average")
    lines = [
        (
            name,
            *means(ends.where(name=name), "perplexity", "test perplexity", "iterate perplexity"),
            *(f"{value:.2f}" for value in PRINTED[name]),
        )
        for name in OPTIMIZERS
    ]
    title = f"{ends[0]['data']}, LSTM of {ends[0]['parameters']:,} parameters"
    header = split_header(
        "optimiser | validation | test | validation, iterate | thesis, PTB words, validation | test"
    )
    kept = dict.fromkeys((row["start"], row["frequency"]) for row in made)
    averages = tuple(
        (
            f"{start:.0%}",
            f"{every}",
            *means(made.where(start=start, frequency=every), "perplexity", "test perplexity"),
        )
        for start, every in kept
    )
    out = []
    out.append(Table(title, header, tuple(lines)))
    heading = "Averages of Adam's iterates"
    out.append(Table(heading, ("from", "steps between", "validation", "test"), averages))
    return out


def charts(rows: Rows) -> list[Chart]:
    """Perplexity over epochs, by start and by frequency."""
    epochs, made = rows.where(kind="epoch"), rows.where(kind="average")
    series = tuple(curve(name, epochs.where(name=name), "perplexity") for name in OPTIMIZERS)
    starts = made.where(frequency=1)
    readings = [
        over_seeds(made.where(start=START, frequency=every), "perplexity") for every in FREQUENCIES
    ]
    out = []
    title = "Validation perplexity"
    source = "Figure 7.10"
    caption = "Of the average from when there is one."
    out.append(
        Chart(title, "epoch", "perplexity", series, y_log=True, source=source, caption=caption)
    )
    title = "Start of averaging"
    curves = (
        curve("validation", starts, "perplexity", "start"),
        curve("test", starts, "test perplexity", "start"),
    )
    out.append(Chart(title, "share of the run", "perplexity", curves, source="Figure 7.11a"))
    title = "Frequency of averaging"
    across = "steps between averaged iterates"
    axis = "validation perplexity"
    values = [reading.value for reading in readings]
    over = (Series("Gadam", FREQUENCIES, values, errors(readings)),)
    out.append(Chart(title, across, axis, over, x_log=True, source="Figure 7.13a"))
    return out


# data set, training and held-out samples, epochs, seeds
CPU = ("tiny-shakespeare", 40_000, 10_000, 40, 5)
EXPERIMENT = Experiment(
    "gadam-language",
    "Gadam on a language model",
    SPECTRAL,
    "§§7.8.3–7.8.6, Tables 7.5 and 7.6, Figures 7.10, 7.11a and 7.13a",
    {
        "smoke": LanguageScale("made", 2000, 500, 4, 2, 8, 12, 2, length=10, batch=20),
        "cpu": LanguageScale(*CPU, 32, 64, 2, length=32, batch=16, dropout=0.1, adam_rate=1e-2),
        "paper": LanguageScale(
            "tiny-shakespeare", 200_000, 50_000, 30, 3, 128, 256, 3, batch=20, dropout=0.2
        ),
    },
    *(cells, run, claims, tables, charts),
    sentences("""
        Tiny Shakespeare by characters in place of Penn Treebank by words, which cannot be had here.
        Perplexities are therefore per character, and only their order can be compared.
        A smaller LSTM without weight dropout, whose state does not pass from stretch to stretch; 30
          epochs of 200.
        Rates of the thesis's code: Adam 3e-3 (on a CPU 1e-2, the most in its grid), Padam 1 with p
          = 0.2.
        SGD 10 with gradients clipped at 0.25, where the thesis has 30: at 30 this LSTM does not
          settle.
        L2 decay of 1.2e-6 in the gradient, so that Gadam is here Adam with averages, as it is
          there.
        Averages of every step from half of the epochs on at a constant rate; Padam alone has a step
          schedule.
        Starts and frequencies are averages of the same run: no step reads them.
        The best start of Table 7.6 is chosen by the other seeds, so that no seed chooses for
          itself.
        Averages count as begun too soon if the iterates' perplexity falls 1 % further: set after
          the results.
    """),
    size="a three-layer LSTM (the AWD-LSTM code) on Penn Treebank, 200 epochs, 3 runs.",
    sizes=(Size("LSTM", "penn-treebank", epochs=200),),
)
