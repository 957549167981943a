"""When averaging starts: the averages of one run at a constant rate, and the claims on T_avg
(§7.8.4, spectral thesis).

No step reads an average, so that one run has the averages of all starts. Those of AdamW's iterates
are Gadam's, those of PadamW's are GadamX's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lambdahat.experiments.averaging.plans import Averages, Plan
from lambdahat.experiments.averaging.preconditions import unlearnt, unsettled
from lambdahat.experiments.averaging.recipes import BASES
from lambdahat.experiments.averaging.runs import (
    Task,
    gap,
    image_task,
    judged,
    size_of,
    train,
    tuned_start,
)
from lambdahat.experiments.kit.cells import Cell, Row, Rows
from lambdahat.experiments.kit.claims import Claim, paired_difference

STARTS = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the run
REFERENCE = 0.5
SENSIBLE = (0.25, 0.5, 0.75)
FLAT, SCHEDULED = ", flat", ", linear"


def run_with_averages(cell: Cell, device: str, frequencies: Sequence[int] = ()) -> list[Row]:
    """Rows of epochs and of the end; of a run named "…, flat" one more for each average."""
    task = image_task(cell, device)
    steps = math.ceil(task.problem.num_samples / cell["batch"])
    chosen = plans(cell["epochs"], steps, frequencies) if cell["run"].endswith(FLAT) else {}
    averages = Averages(list(chosen.values()))
    trained = train(cell, task, [averages] if chosen else [])
    rows = [*trained.rows, {**trained.end, **size_of(task), "early": early(trained.rows)}]
    return rows + averaged_rows(averages, chosen, task, cell)


def plans(
    epochs: int, steps: int, frequencies: Sequence[int] = ()
) -> dict[tuple[float, int], Plan]:
    """By start (a share of the run) and frequency: all starts once per epoch, and all frequencies
    from the half on.

    A frequency is in steps between averaged iterates, 0 for an epoch.
    """
    wanted = [(start, 0) for start in STARTS] + [(REFERENCE, every) for every in frequencies]
    return {
        (start, every): Plan(
            min(max(1, round(start * epochs)), epochs) * steps if start else 0, every or steps
        )
        for start, every in dict.fromkeys(wanted)
    }


def averaged_rows(
    averages: Averages, chosen: dict[tuple[float, int], Plan], task: Task, cell: Cell
) -> list[Row]:
    """The accuracy of each average at the end of the run."""
    rows = []
    for (start, every), plan in chosen.items():
        if averages.counts[plan] == 0:  # a run that diverged
            continue
        model = averages.model(plan, task.model, task.training(cell["batch"]))
        rows.append(
            {
                "kind": "average",
                "start": start,
                "frequency": every,
                "averages": averages.counts[plan],
                "accuracy": judged(model, task.held_out),
            }
        )
    return rows


def early(rows: list[Row]) -> float:
    """Mean accuracy of the iterates over the first third of the epochs: how fast a run
    converges.
    """
    first = rows[: max(1, len(rows) // 3)]
    return float(sum(row["iterate accuracy"] for row in first) / len(first))


def start_claims(name: str, rows: Rows, tuned_from: str, prefix: str = "") -> list[Claim]:
    """Gadam or GadamX on one network: each sensible start beats the base with its schedule, and
    tuning gains.

    ``rows`` are all rows of the network; ``tuned_from`` is what the thesis prints of the best start
    and of its own.
    """
    base = BASES[name]
    flat, ends = rows.where(run=base + FLAT), rows.where(kind="end")
    made, epochs = flat.where(kind="average", frequency=0), flat.where(kind="epoch")
    scheduled = ends.where(run=base + SCHEDULED)
    learnt = unlearnt(flat.where(kind="end"), scheduled)
    tuned = paired_difference(
        tuned_start(made, "accuracy"), made.where(start=REFERENCE).paired("accuracy")
    )
    return [
        *(
            Claim(
                f"{prefix}{name} beats {base} with its schedule when averages begin at {share:.0%}"
                " of the run",
                "§7.8.4, Figure 7.11",
                "for any reasonable T_avg",
                gap(made.where(start=share), scheduled, "accuracy"),
                unit=" points",
                unmet=learnt or unsettled(begun_at(epochs, share, base)),
            )
            for share in SENSIBLE
        ),
        Claim(
            f"{prefix}{name} gains from tuning T_avg (best start over the other seeds, against"
            f" {REFERENCE:.0%} of the run)",
            "§7.8.4, Table 7.6",
            tuned_from,
            tuned,
            unit=" points",
            unmet=learnt,
        ),
    ]


def begun_at(epochs: Rows, share: float, base: str) -> Rows:
    """The iterates of a run at a flat rate where averages begin at a share of it, and at its
    end.
    """
    last = max(epochs.values("epoch"), default=0)
    first = min(max(1, round(share * last)), last)
    before = epochs.where(epoch=first).paired("iterate accuracy")
    after = epochs.where(epoch=last).paired("iterate accuracy")
    named = {"run": f"{base} at a flat rate", "averaged": True}
    return Rows(
        {**named, "seed": seed, "before": before[seed], "iterate accuracy": after[seed]}
        for seed in after
    )
