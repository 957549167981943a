"""A small experiment whose rows are known: functions inside a function, so that workers get them
by value.
"""

from dataclasses import dataclass, replace

from lambdahat.experiments.kit.cells import Rows, key_of
from lambdahat.experiments.kit.claims import Claim, Table, mean_of
from lambdahat.experiments.kit.experiment import Experiment
from lambdahat.results.charts import Chart, Series


@dataclass(frozen=True)
class Config:
    seeds: int
    rates: tuple[float, ...] = (0.5, 2.0)
    pause: float = 0.0
    broken: int = -1


def toy(**scales: Config) -> Experiment:
    """Cells rate × seed; a cell draws three numbers from its own stream, and one seed may raise."""

    def cells(config):
        base = {"pause": config.pause, "broken": config.broken}
        return [
            {**base, "rate": rate, "seed": seed}
            for rate in config.rates
            for seed in range(config.seeds)
        ]

    def run(cell, device):
        import time

        import torch

        from lambdahat._core.rng import generator

        time.sleep(cell["pause"])
        if cell["seed"] == cell["broken"]:
            raise RuntimeError("this cell is broken")
        draws = torch.randn(
            3, generator=generator(cell["seed"], "toy", cell["rate"]), dtype=torch.float64
        )
        return [
            {"step": i, "value": cell["rate"] + 0.1 * float(draw)} for i, draw in enumerate(draws)
        ]

    def claims(rows: Rows):
        reading = mean_of(list(rows.where(rate=2.0).paired("value").values()))
        return [Claim("the fast rate is above one", "Table 1", "2", reading, bound=1.0)]

    def tables(rows: Rows):
        return [
            Table(
                "Values",
                ("rate", "mean"),
                tuple(
                    (f"{r:g}", str(mean_of(rows.where(rate=r).values("value"))))
                    for r in rows.distinct("rate")
                ),
            )
        ]

    def charts(rows: Rows):
        rates = rows.distinct("rate")
        means = [mean_of(rows.where(rate=rate).values("value")) for rate in rates]
        return [
            Chart(
                "Value over rate",
                "rate",
                "value",
                (Series("ours", rates, [m.value for m in means], [m.stderr for m in means]),),
            )
        ]

    every = {"smoke": Config(2), "cpu": Config(4), "paper": Config(8)} | scales
    return Experiment(
        "toy",
        "A toy",
        "no paper",
        "Table 1",
        {scale: cells(config) for scale, config in every.items()},
        run,
        claims,
        tables,
        charts,
        ("nothing",),
    )


def watched(experiment: Experiment, log: str, pause: float) -> Experiment:
    """The same, but a cell writes its key to the end of a file when it begins, and takes a
    while.
    """
    inner = experiment.run

    def run(cell, device):
        import time

        with open(log, "a") as file:
            file.write(key_of(cell) + "\n")
        time.sleep(pause)
        return inner(cell, device)

    return replace(experiment, run=run)
