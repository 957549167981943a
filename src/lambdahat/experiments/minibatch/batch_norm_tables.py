"""Rates over batch sizes with batch normalisation in tables and charts."""

from __future__ import annotations

from lambdahat.experiments.kit.cells import Rows, curve, over_seeds
from lambdahat.experiments.kit.claims import Table, mean_of
from lambdahat.experiments.minibatch.batch_norm_claims import Setup, links_of, setups_of, slopes_of
from lambdahat.results.charts import Chart, Series

COLUMNS = (
    "error",
    "training error",
    "training loss",
    "validation loss",
    "distance",
    "before",
    "oscillation",
)
HEADER = (
    "rule",
    "B",
    "rate",
    "validation error, %",
    "training error, %",
    "training loss",
    "validation loss",
    "distance",
    "error before the rate falls, %",
    "its change per epoch, %",
    "diverged",
)
# §5.7.0.2: VGG-16 without batch norm on CIFAR-100, the only figures that the thesis prints
PRINTED_ERRORS = {"linear": {128: 34.18, 1024: 35.65}, "square root": {1024: 38.92}}
PRINTED_TEST = {"linear": (145.76, 34.64), "square root": (67.44, 37.55)}  # distance, test error


def tables(rows: Rows) -> list[Table]:
    """The ends of all runs of each network, distance against error, and the rates tried at the
    reference.
    """
    setups = setups_of(rows)
    out = [_runs(setup) for setup in setups]
    lines = [
        (
            setup.name,
            str(mean_of(list(links_of(setup).values()))),
            str(mean_of(list(slopes_of(setup).values()))),
        )
        for setup in setups
    ]
    if setups:
        header = ("network", "rank correlation", "% of error per doubling of the distance")
        out.append(
            Table("Distance from the start and validation error, α ∝ B", header, tuple(lines))
        )
    tried = [setup for setup in setups if len(setup.ends.where(rule="search"))]
    return out + ([_search(tried)] if tried else [])


def _runs(setup: Setup) -> Table:
    lines = []
    ends = setup.ends.where(rule=["linear", "square root", "constant"])
    for rule, size in dict.fromkeys((row["rule"], row["batch"]) for row in ends):
        part = ends.where(rule=rule, batch=size)
        lost = sum(row["diverged"] for row in part)
        lines.append(
            (
                rule,
                str(size),
                f"{part[0]['rate']:.3g}",
                *(str(over_seeds(part, name)) for name in COLUMNS),
                f"{lost} of {len(part)}",
            )
        )
    first = setup.ends[0]
    title = (
        f"{setup.name}, {first['parameters']:,} parameters, {first['data']}: after"
        f" {first['epochs']} epochs"
    )
    return Table(title, HEADER, tuple(lines))


def _tried(setup: Setup) -> Rows:
    """All runs at the reference."""
    return setup.ends.where(batch=setup.reference)


def _search(setups: list[Setup]) -> Table:
    rates = sorted({rate for setup in setups for rate in _tried(setup).distinct("rate")})
    lines = tuple(
        (
            f"{rate:g}",
            *(
                str(over_seeds(_tried(setup).where(rate=rate), column))
                for setup in setups
                for column in ("error", "training loss")
            ),
        )
        for rate in rates
    )
    header = (
        "rate",
        *(
            f"{setup.network}, {column}"
            for setup in setups
            for column in ("validation error, %", "training loss")
        ),
    )
    return Table(f"Rates at B = {setups[0].reference}", header, lines)


def charts(rows: Rows) -> list[Chart]:
    """For each network the error over batch sizes by rule, over epochs by batch size, and over
    the distance.
    """
    setups, epochs = setups_of(rows), rows.where(kind="epoch", rule="linear")
    out = []
    for setup in setups:
        mine = epochs.where(network=setup.network, decay=setup.decay)
        out += [_over_sizes(setup), _over_epochs(setup, mine), _over_distance(setup)]
    tried = [setup for setup in setups if len(setup.ends.where(rule="search"))]
    if tried:
        series = tuple(curve(setup.name, _tried(setup), "error", "rate") for setup in tried)
        out.append(
            Chart(
                f"Rates at B = {tried[0].reference}",
                "learning rate",
                "validation error, %",
                series,
                x_log=True,
                source="§5.7.0.1",
            )
        )
    return out


def _rules(setup: Setup) -> list[str]:
    return [
        rule for rule in ("linear", "square root", "constant") if len(setup.ends.where(rule=rule))
    ]


def _over_sizes(setup: Setup) -> Chart:
    series = []
    for rule in _rules(setup):
        part = setup.ends.where(rule=rule)
        if rule != "linear":
            part = Rows([*setup.at(setup.reference), *part])
        series.append(curve(rule, part, "error", "batch"))
        printed = {} if setup.normed else PRINTED_ERRORS.get(rule, {})
        if printed:
            series.append(
                Series(
                    f"{rule}, thesis, VGG-16 on CIFAR-100",
                    list(printed),
                    list(printed.values()),
                    style="points",
                    published=True,
                )
            )
    return Chart(
        f"{setup.name}: error over batch sizes",
        "batch size B",
        "validation error, %",
        tuple(series),
        x_log=True,
        source=setup.figure,
        caption=f"Rates scaled from B = {setup.reference}.",
    )


def _over_epochs(setup: Setup, epochs: Rows) -> Chart:
    series = tuple(curve(f"B = {size}", epochs.where(batch=size), "error") for size in setup.sizes)
    return Chart(
        f"{setup.name}: error over epochs, α ∝ B",
        "epoch",
        "validation error, %",
        series,
        source=setup.figure,
        caption="The rate falls in the second half.",
    )


def _over_distance(setup: Setup) -> Chart:
    series = []
    for rule in _rules(setup):
        part = setup.ends.where(rule=rule, diverged=False)
        series.append(Series(rule, part.values("distance"), part.values("error"), style="points"))
        if not setup.normed and rule in PRINTED_TEST:
            distance, error = PRINTED_TEST[rule]
            series.append(
                Series(
                    f"{rule}, thesis, VGG-16 on CIFAR-100",
                    [distance],
                    [error],
                    style="points",
                    published=True,
                )
            )
    return Chart(
        f"{setup.name}: error over distance",
        "distance from the start",
        "validation error, %",
        tuple(series),
        x_log=True,
        source="Figure 5.8b" if setup.normed else "Figure 5.8a",
    )
