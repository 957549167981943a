"""Is λ̂ correct at its defaults, and are its error bars? Every case of the ground-truth suite
over many seeds.

``lh.llc(problem)`` of each case and seed, in processes of one thread, against the truth at the same
nβ and γ. Each run is a line of the --json file as soon as it ends; another call with the same file
and options runs only what is missing. The summary says how far single runs and the means of cases
are off, and how often 95 % intervals hold the truth.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timing import recorded, report

from lambdahat.results import student_quantile
from lambdahat.singular._llc import llc
from lambdahat.singular.known_cases import Reference, suite
from lambdahat.singular.verification import KnownCase

Row = dict[str, Any]
Task = tuple[str, int, int | None, int | None]  # case, seed, batch size and most gradients
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="*", help="globs of case names, with commas between")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--batch-size", type=int, help="samples of a batch, which forces mini-batches"
    )
    parser.add_argument("--max-gradients", type=int, help="the gradients that each run may take")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no more runs are started"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("llc_coverage.jsonl"), help="one line for each run"
    )
    parser.add_argument("--summary", type=Path, help="write the summary to this file too")
    return parser.parse_args()


def single(task: Task) -> Row:
    """One run: what ``llc`` says, and the truth where it says it."""
    name, seed, batch_size, max_gradients = task
    options = {"batch_size": batch_size, "max_gradients": max_gradients}
    torch.set_num_threads(1)
    case = next(case for case in suite() if case.name == name)
    row: Row = {"case": name, "seed": seed, **options}
    try:
        problem = case.make()
        start = time.perf_counter()
        found = llc(problem, seed=seed, **options)
        seconds = time.perf_counter() - start
        truth = known_truth(case, found.nbeta, float(found.localization))
    except Exception as error:  # one case that breaks must not end the others
        return row | {"error": f"{type(error).__name__}: {error}"}
    assert found.chains is not None
    assert found.sensitivity is not None
    return row | {
        "value": float(found),
        "stderr": float(found.stderr),
        "dof": found.dof,
        **truth,
        "asymptotic": case.asymptotic,
        "nbeta": found.nbeta,
        "localization": float(found.localization),
        "raw": found.raw,
        "ess": found.ess,
        "d_ln_gamma": float(found.sensitivity.localization),
        "d_ln_nbeta": float(found.sensitivity.nbeta),
        "step_size": found.step_size,
        "rhat": found.rhat,
        "acceptance": found.chains.diagnostics.acceptance,
        "kernel": found.chains.kernel,
        "gradients": found.cost,
        "seconds": seconds,
        "status": found.status.name,
    }


def known_truth(case: KnownCase, nbeta: float, localization: float) -> Row:
    """The truth, or nothing where it takes minutes and is not stored: ``main`` looks again."""
    slow = isinstance(case.truth, Reference)
    truth = (case.truth.known if slow else case.truth)(nbeta, localization)
    return {} if truth is None else {"truth": float(truth), "truth_stderr": float(truth.stderr)}


def run(args: argparse.Namespace) -> list[Row]:
    """All runs that are asked for and not in the file yet, seed by seed so that an early end
    cuts all cases alike.
    """
    names = [
        case.name
        for case in suite()
        if any(fnmatch.fnmatch(case.name, g) for g in args.cases.split(","))
    ]
    seeds = range(args.first, args.first + args.seeds)
    wanted = [(name, seed, args.batch_size, args.max_gradients) for seed in seeds for name in names]
    return recorded(single, wanted, args.json, task_of, args.workers, args.minutes)


def task_of(row: Row) -> Task:
    """Which run a row is of; rows of older files have no options."""
    return row["case"], row["seed"], row.get("batch_size"), row.get("max_gradients")


def covered(row: Row) -> bool:
    quantile = student_quantile(0.95, row["dof"])
    return abs(row["value"] - row["truth"]) <= quantile * math.hypot(
        row["stderr"], row["truth_stderr"]
    )


def error(row: Row) -> float:
    return (row["value"] - row["truth"]) / row["truth"]


def summary(name: str, rows: list[Row]) -> Row:
    """One case: its errors relative to the truth, their mean in standard errors of the mean,
    coverage, cost.
    """
    errors = [error(row) for row in rows]
    scores = [
        (row["value"] - row["truth"]) / math.hypot(row["stderr"], row["truth_stderr"])
        for row in rows
    ]
    statuses = [row["status"] for row in rows]
    sizes = sorted(map(abs, errors))
    mean = statistics.fmean(errors)
    spread = statistics.stdev(errors) if len(errors) > 1 else math.nan
    asymptotic = rows[0]["asymptotic"]
    truth = statistics.fmean(row["truth"] for row in rows)
    return {
        "case": name,
        "runs": len(rows),
        "truth": truth,
        "asymptotic": asymptotic,
        "off asymptotic %": None
        if asymptotic is None
        else 100 * statistics.fmean(row["value"] / asymptotic - 1 for row in rows),
        "mean error %": 100 * mean,
        "± %": 100 * math.hypot(spread / math.sqrt(len(rows)), rows[0]["truth_stderr"] / truth),
        "median |error| %": 100 * statistics.median(sizes),
        "worst |error| %": 100 * sizes[-1],
        "stderr %": 100 * statistics.median(row["stderr"] / abs(row["truth"]) for row in rows),
        "coverage %": 100 * statistics.fmean(map(covered, rows)),
        "rms z": math.sqrt(statistics.fmean(score**2 for score in scores)),
        "γ": "/".join(f"{g:.3g}" for g in quantiles([row["localization"] for row in rows])),
        "gradients": round(statistics.median(row["gradients"] for row in rows)),
        "seconds": statistics.median(row["seconds"] for row in rows),
        "not ok": " ".join(
            f"{s}:{statuses.count(s)}" for s in sorted(set(statuses)) if s != "CONVERGED"
        ),
    }


def quantiles(values: list[float]) -> list[float]:
    """Least, median and largest, or the one value they share."""
    return sorted({min(values), statistics.median_low(values), max(values)})


def overall(rows: list[Row], table: list[Row]) -> dict[str, Any]:
    sizes = [abs(error(row)) for row in rows]
    worst = max(table, key=lambda line: abs(line["mean error %"]))
    farthest = max(rows, key=lambda row: abs(error(row)))
    return {
        "runs": len(rows),
        "median |error| %": round(100 * statistics.median(sizes), 2),
        "share of runs within 5 %": round(statistics.fmean(size <= 0.05 for size in sizes), 3),
        "within 15 %": round(statistics.fmean(size <= 0.15 for size in sizes), 4),
        "worst mean of a case %": f"{worst['mean error %']:.2f} ({worst['case']})",
        "worst run %": f"{100 * error(farthest):.1f} ({farthest['case']}, seed {farthest['seed']})",
        "coverage %": round(100 * statistics.fmean(map(covered, rows)), 1),
        "coverage of cases %": "{:.0f} to {:.0f}".format(
            *(f(t["coverage %"] for t in table) for f in (min, max))
        ),
    }


def with_truth(rows: list[Row]) -> list[Row]:
    """The runs that ended well and whose truth is known; the others are printed."""
    by_name, fine = {case.name: case for case in suite()}, []
    for row in rows:
        label = f"{row['case']}, seed {row['seed']}"
        if "error" in row:
            print(f"{label}: {row['error']}")
            continue
        case = by_name[row["case"]]
        if isinstance(case.truth, Reference):  # it may have been made since, or anew
            row |= known_truth(case, row["nbeta"], row["localization"])
        if "truth" in row:
            fine.append(row)
        else:
            print(f"{label}: no reference at γ = {row['localization']:g}")
    return fine


def main() -> None:
    args = arguments()
    os.environ.update(dict.fromkeys(THREADS, "1"))  # the workers are born with it
    start = time.perf_counter()
    rows = run(args)
    minutes = round((time.perf_counter() - start) / 60, 1)
    fine = with_truth(rows)
    by_case: dict[str, list[Row]] = {}
    for row in fine:
        by_case.setdefault(row["case"], []).append(row)
    table = [summary(case.name, by_case[case.name]) for case in suite() if case.name in by_case]
    described = {"torch": torch.__version__, "workers": args.workers, "minutes": minutes}
    described |= {"batch size": args.batch_size, "most gradients": args.max_gradients}
    described["left out"] = len(rows) - len(fine)
    described |= overall(fine, table) if fine else {}
    report("λ̂ at its defaults against the truth", described, table, args.summary)


if __name__ == "__main__":
    main()
