"""Do the draws of every kernel follow the posterior, at the settings that its own pilot finds?

Simulation-based calibration on Gaussian posteriors. Each run makes a least-squares problem of its
own (20 parameters, 2,000 samples, condition numbers of about 30), draws one point from the exact
posterior, and ranks it among the draws of ``lh.llc(kernel=...)`` on mini-batches: by its loss, its
distance from w*, and its coordinate along a random direction. If the draws follow the posterior,
all ranks are uniform; the table has the p-values of Kolmogorov–Smirnov tests. Kernels that never
reject have a known bias of steps, which ``llc`` takes off its value. "loss, corrected" ranks the
losses after they are scaled by the same factor. The last columns compare λ̂ with its closed form.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from timing import in_processes, report
from torch import nn

import lambdahat as lh
from lambdahat.results import student_quantile

Row = dict[str, Any]
KERNELS = "kinetic", "sgld", "rmsprop_sgld", "sghmc", "sgnht", "hmc", "mala"
PARAMETERS, SAMPLES, DECADES, BATCH = 20, 2000, 1.5, 256
# draws among which the exact one is ranked, or half the effective sample size if that is less
RANKED = 99
COLUMNS = "loss", "loss, corrected", "distance", "direction"


def make_problem(rng: np.random.Generator) -> tuple[lh.Problem, np.ndarray, np.ndarray]:
    """A least-squares problem at its minimiser w*, with w* and the Hessian."""
    scales = 10 ** (DECADES / 2 * rng.uniform(-1, 0, PARAMETERS))
    mixing = np.linalg.qr(rng.standard_normal((PARAMETERS, PARAMETERS)))[0]
    x = (rng.standard_normal((SAMPLES, PARAMETERS)) * scales) @ mixing
    y = x @ rng.standard_normal(PARAMETERS) + rng.standard_normal(SAMPLES)
    minimum = np.linalg.lstsq(x, y, rcond=None)[0]
    model = nn.Linear(PARAMETERS, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(minimum))
    problem = lh.Problem(model, "mse", (torch.from_numpy(x), torch.from_numpy(y).unsqueeze(1)))
    return problem, minimum, 2 * x.T @ x / SAMPLES


def single(task: tuple[str, int, int | None]) -> Row:
    """One problem, one run, one exact draw and its ranks."""
    name, seed, batch_size = task
    torch.set_num_threads(1)
    row: Row = {"kernel": name, "seed": seed, "batch_size": batch_size}
    rng = np.random.default_rng([seed, 20])
    problem, minimum, hessian = make_problem(rng)
    start = time.perf_counter()
    try:
        found = lh.llc(problem, kernel=name, batch_size=batch_size, seed=seed, keep_parameters=True)
    except Exception as error:  # one run that breaks must not end the others
        return row | {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - start
    assert found.chains is not None
    assert found.chains.parameters is not None
    values, vectors = np.linalg.eigh(
        found.nbeta * hessian + float(found.localization) * np.eye(PARAMETERS)
    )
    exact = vectors @ (rng.standard_normal(PARAMETERS) / np.sqrt(values))
    draws = found.chains.parameters.numpy().reshape(-1, PARAMETERS) - minimum
    count = max(min(RANKED, int(found.ess / 2)), 9)
    kept = np.concatenate([draws[np.linspace(0, len(draws) - 1, count).astype(int)], exact[None]])
    losses = found.nbeta / 2 * np.einsum("ki,ij,kj->k", kept, hessian, kept)
    factor = np.append(np.full(count, float(found) / found.raw), 1.0)
    direction = rng.standard_normal(PARAMETERS)
    seen = losses, losses * factor, np.linalg.norm(kept, axis=1), kept @ direction
    truth = 0.5 * float(
        np.trace(
            found.nbeta
            * hessian
            @ np.linalg.inv(found.nbeta * hessian + float(found.localization) * np.eye(PARAMETERS))
        )
    )
    return row | {
        "ranks": [
            float(((stat[:-1] < stat[-1]).sum() + rng.uniform()) / (count + 1)) for stat in seen
        ],
        "value": float(found),
        "stderr": float(found.stderr),
        "dof": found.dof,
        "raw": found.raw,
        "truth": truth,
        "status": found.status.name,
        "gradients": found.cost,
        "ess": found.ess,
        "step_size": found.step_size,
        "batch": found.chains.batch_size,
        "localization": float(found.localization),
        "seconds": seconds,
    }


def summary(name: str, rows: list[Row]) -> Row:
    scores = [(row["value"] - row["truth"]) / row["stderr"] for row in rows]
    held = [
        abs(z) <= student_quantile(0.95, row["dof"]) for z, row in zip(scores, rows, strict=True)
    ]
    ranks = zip(*(row["ranks"] for row in rows), strict=True)
    statuses = [row["status"] for row in rows]
    return {
        "kernel": name,
        "runs": len(rows),
        **{
            f"p, {label}": scipy.stats.kstest(list(values), "uniform").pvalue
            for label, values in zip(COLUMNS, ranks, strict=True)
        },
        "raw error %": 100 * statistics.fmean(row["raw"] / row["truth"] - 1 for row in rows),
        "error %": 100 * statistics.fmean(row["value"] / row["truth"] - 1 for row in rows),
        "± %": 100
        * statistics.stdev(row["value"] / row["truth"] for row in rows)
        / math.sqrt(len(rows)),
        "coverage %": 100 * statistics.fmean(held),
        "rms z": math.sqrt(statistics.fmean(z**2 for z in scores)),
        "gradients": round(statistics.median(row["gradients"] for row in rows)),
        "seconds": statistics.median(row["seconds"] for row in rows),
        "not ok": " ".join(
            f"{s}:{statuses.count(s)}" for s in sorted(set(statuses)) if s != "CONVERGED"
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(KERNELS), help="with commas between")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument(
        "--batch-size", type=int, default=BATCH, help="of the kernels that never reject"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no more runs are started"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("llc_calibration.jsonl"), help="one line for each run"
    )
    parser.add_argument("--summary", type=Path, help="write the table to this file as JSON")
    args = parser.parse_args()
    os.environ.update(
        dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    )
    lines = args.json.read_text("utf-8").splitlines() if args.json.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    done = {(row["kernel"], row["seed"], row["batch_size"]) for row in rows if "error" not in row}
    sizes = {
        name: None if name in ("hmc", "mala") else args.batch_size
        for name in args.kernels.split(",")
    }
    tasks = [(name, seed, size) for seed in range(args.runs) for name, size in sizes.items()]
    tasks = [task for task in tasks if task not in done]
    with args.json.open("a", encoding="utf-8") as file:
        for row in in_processes(single, tasks, args.workers, args.minutes):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    for row in rows:
        if "error" in row:
            print(f"{row['kernel']}, seed {row['seed']}: {row['error']}")
    groups = {
        name: [row for row in rows if row["kernel"] == name and "error" not in row]
        for name in sizes
    }
    table = [summary(name, group) for name, group in groups.items() if len(group) > 1]
    setting = {"parameters": PARAMETERS, "samples": SAMPLES, "torch": torch.__version__}
    report("Ranks of exact draws among those of each kernel", setting, table, args.summary)


if __name__ == "__main__":
    main()
