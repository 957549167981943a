"""What does λ̂ to a root mean square error of 5 % cost on the MNIST MLP, here and with devinterp?

Both estimate λ̂ of the stored network 784-128-10 at the nβ and γ of a stored reference
(llc_networks.py). A cell is one estimate with one seed, written to ``--out`` at once; another call
with the same file runs only what is missing.

``lh.llc`` gets an accuracy or a budget, and its cost includes its pilot. devinterp 2.0.1's SGLD
gets nβ, γ, a step size ε from a grid, and a batch size, and runs 4 chains for some relaxation
times 2/(εγ). All shorter runs are the beginnings of a long one, so their estimates come from the
same chains. devinterp is favoured: the cost of finding its settings, of its baseline loss and of
its files is not counted, and of all settings and readings the best counts.

- "as reported" is its mean over all steps, from w* on, less the loss at w* on 32 batches (its
  default), on the batches of the chain or on all data, whichever is nearest to the reference;
- "burn-in discarded" is a mean over the last quarter, half or three quarters of the steps of the
  loss less that at w* on the same batch, which its users can compute from the losses that it
  stores.

Cost is counted in gradients × samples, and in seconds. It is that of the shortest run from which on
the error stays within 5 %, if the second half of the longest run is within 5 % too. "First" is the
shortest run within 5 % at all: at a large ε it lies where a chain on its way to a value that is too
high passes the right one, which only a user who knows the answer could tell.

On a machine without devinterp carry a copy, made as sampling.py says, and name its folder with
--peer-path.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llc_networks import NETWORKS, RESULTS, append, find_reference, load_network, read
from timing import arguments, report, set_tf32, setting
from torch.nn.functional import cross_entropy

import lambdahat as lh
from lambdahat.bench import chain_rows
from lambdahat.bench.chain_rows import ChainSettings, our_steps
from lambdahat.sampling import kinetic, sgld
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH
from lambdahat.sampling.tuning.unadjusted import LONGEST_PILOT

Row = dict[str, Any]
NETWORK, TARGET, CHAINS, BLOCK = "mnist-mlp", 0.05, 4, 10
FEWEST = 5  # seeds of a setting that counts among the cheapest
SHARES = (0.25, 0.5, 0.75)  # of the steps that are discarded as burn-in
OURS: dict[str, Row] = {
    "tol=0.05": {"tol": 0.05},
    "tol=0.1": {"tol": 0.1},
    "tol=0.05, batches of 512": {"tol": 0.05, "batch_size": 512},
    "4,000 gradients of 512": {"batch_size": 512, "max_gradients": 4000},
    "2,000 gradients of 512": {"batch_size": 512, "max_gradients": 2000},
    "1,000 gradients of 512": {"batch_size": 512, "max_gradients": 1000},
    "500 gradients of 512": {"batch_size": 512, "max_gradients": 500},
    "SGLD, 4,000 gradients of 512": {"kernel": "sgld", "batch_size": 512, "max_gradients": 4000},
    "SGLD, 2,000 gradients of 512": {"kernel": "sgld", "batch_size": 512, "max_gradients": 2000},
}
LOSSES = partial(cross_entropy, reduction="none")


def run_ours(problem: lh.Problem, reference: Row, name: str, seed: int) -> Row:
    """One call of ``lh.llc``; ``samples`` are those that its gradients saw, of the pilot in
    batches of 512.
    """
    start = time.perf_counter()
    found = lh.llc(
        problem,
        seed=seed,
        nbeta=reference["nbeta"],
        localization=reference["localization"],
        **OURS[name],
    )
    seconds = time.perf_counter() - start
    batch = found.chains.batch_size
    pilot = min(CHAINS * LONGEST_PILOT, found.cost) if "batch_size" not in OURS[name] else 0
    low, high = found.interval(0.95)
    return {
        "value": float(found),
        "stderr": float(found.stderr),
        "half_width": float(high - low) / 2,
        "status": found.status.name,
        "gradients": found.cost,
        "batch": batch,
        "draws": found.chains.losses.shape[1],
        "burn_in": found.chains.burn_in,
        "samples": pilot * DEFAULT_BATCH + (found.cost - pilot) * batch,
        "seconds": seconds,
        "mode": found.chains.mode,
        "rhat": found.rhat,
        "reasons": dict(found.chains.reasons),
    }


def run_devinterp(
    case: tuple[Any, Any], reference: Row, rate: float, batch: int, steps: int, seed: int
) -> Row:
    """devinterp's chains; nβ(L − L₀) as the mean over the chains in blocks of ten steps, for
    three choices of L₀.
    """
    model, data = case
    settings = ChainSettings(
        rate, reference["nbeta"], reference["localization"], batch, CHAINS, steps, 1000 * seed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = chain_rows.sampled(model, LOSSES, data, settings)

    def blocks(energies: torch.Tensor) -> list[float]:
        return [float(value) for value in energies.mean(0).view(-1, BLOCK).mean(1)]

    return {
        "paired": blocks(run.nbeta * (run.losses - run.centre_losses)),
        "first": blocks(run.nbeta * (run.losses - run.baseline)),
        "whole": blocks(run.nbeta * (run.losses - run.whole)),
        "step_seconds": run.step_s,
        "seconds": run.total_s,
    }


def readings(runs: list[Row], count: int) -> dict[str, list[list[float]]]:
    """λ̂ of each run after so many blocks, in the ways that a user may read it."""
    reported = [
        [statistics.fmean(run[kind][:count]) for run in runs]
        for kind in ("first", "paired", "whole")
    ]
    discarded = [
        [statistics.fmean(run["paired"][int(share * count) : count]) for run in runs]
        for share in SHARES
    ]
    return {"as reported": reported, "burn-in discarded": discarded}


def rmse(values: list[float], truth: float) -> float:
    """The relative root mean square error; infinite where a chain diverged."""
    return math.sqrt(statistics.fmean((value / truth - 1) ** 2 for value in values))


def devinterp_row(runs: list[Row], reading: str, truth: float) -> Row:
    """The cost of one setting and reading, for its best choice of baseline or share."""
    rate, batch, steps = (runs[0][key] for key in ("rate", "batch", "steps"))
    counts = range(2, steps // BLOCK + 1)
    tables = [readings(runs, count)[reading] for count in counts]
    errors = [[rmse(values, truth) for values in table] for table in tables]
    settled = [statistics.fmean(run["paired"][len(run["paired"]) // 2 :]) for run in runs]
    within = [[error <= TARGET for error in row] for row in errors]
    choices, sound = range(len(tables[0])), abs(statistics.fmean(settled) / truth - 1) <= TARGET
    ends = {
        choice: next(
            (i for i in range(len(within)) if all(row[choice] for row in within[i:])), None
        )
        for choice in choices
    }
    kept = {choice: end for choice, end in ends.items() if sound and end is not None}
    best = min(kept, key=lambda choice: kept[choice], default=None)
    nearest = min(choices, key=lambda choice: errors[-1][choice])
    choice, place = (nearest, len(tables) - 1) if best is None else (best, kept[best])
    first = next((count for count, row in zip(counts, within, strict=True) if any(row)), None)
    pace = statistics.median(run["seconds"] / run["steps"] for run in runs)
    needed = None if best is None else BLOCK * counts[place]
    return {
        "by": "devinterp",
        "setting": f"ε = {rate:g}, batch {batch}, {reading}",
        "seeds": len(runs),
        "λ̂": statistics.fmean(tables[place][choice]),
        "RMSE %": 100 * errors[place][choice],
        "gradients": needed and CHAINS * needed,
        "samples": needed and CHAINS * needed * batch,
        "seconds": needed and needed * pace,
        "settles at": statistics.fmean(settled),
        "samples, first": first and CHAINS * BLOCK * first * batch,
        "seconds, first": first and BLOCK * first * pace,
        "steps run": steps,
        "ms a step": 1e3 * pace / CHAINS,
    }


def our_row(name: str, runs: list[Row], truth: float) -> Row:
    values = [run["value"] for run in runs]
    error = rmse(values, truth)
    held = sum(abs(run["value"] - truth) <= run["half_width"] for run in runs)
    statuses = [run["status"] for run in runs]
    return {
        "by": "lambdahat",
        "setting": name,
        "seeds": len(runs),
        "λ̂": statistics.fmean(values),
        "RMSE %": 100 * error,
        **{
            key: statistics.median(run[key] for run in runs)
            for key in ("gradients", "samples", "seconds")
        },
        "batch": statistics.median(run["batch"] for run in runs),
        "intervals hold": f"{held} of {len(runs)}",
        "statuses": " ".join(
            f"{status}:{statuses.count(status)}" for status in sorted(set(statuses))
        ),
    }


def step_row(runs: list[Row]) -> Row:
    """A step of kinetic Langevin dynamics beside one of SGLD, by the median of the ratios of the
    rounds.
    """
    chains = runs[0]["chains"]
    kinds = {kind: statistics.median(run[kind] for run in runs) for kind in ("kinetic", "sgld")}
    ratio = statistics.median(run["kinetic"] / run["sgld"] for run in runs)
    return {
        "by": "steps",
        "setting": f"{runs[0]['mode']}, {chains} chains, batch {runs[0]['batch']}",
        "ms kinetic": 1e3 * kinds["kinetic"],
        "ms SGLD": 1e3 * kinds["sgld"],
        "ratio": ratio,
    }


def summary(rows: list[Row], truth: float) -> list[Row]:
    """One line for each setting, and the cheapest of each side last."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = {
            "lambdahat": ("setting",),
            "devinterp": ("rate", "batch", "steps"),
            "steps": ("mode", "chains", "batch"),
        }
        groups.setdefault((row["by"], *(row[name] for name in key[row["by"]])), []).append(row)
    table = []
    for (by, *_), runs in groups.items():
        if by == "lambdahat":
            table.append(our_row(runs[0]["setting"], runs, truth))
        elif by == "devinterp":
            table += [
                devinterp_row(runs, reading, truth)
                for reading in ("as reported", "burn-in discarded")
            ]
        else:
            table.append(step_row(runs))
    sides = "lambdahat", "devinterp"
    tried = [row for row in table if row["by"] in sides and row["seeds"] >= FEWEST]
    good = [row for row in tried if row["samples"] and row["RMSE %"] <= 100 * TARGET]
    for unit in ("samples", "seconds"):
        best = {
            by: min((row[unit] for row in good if row["by"] == by), default=None) for by in sides
        }
        passing = [row[f"{unit}, first"] for row in tried if row.get(f"{unit}, first")]
        costs = {
            "ours": best["lambdahat"],
            "devinterp's": best["devinterp"],
            "first": min(passing, default=None),
        }
        if all(best.values()):
            costs["ratio"] = best["devinterp"] / best["lambdahat"]
        table.append({"by": "least", "setting": f"{unit} to {100 * TARGET:g} %", **costs})
    return table


def numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",") if part]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--peer-path", type=Path, help="folder with a copy of devinterp, put on sys.path"
    )
    parser.add_argument("--data", type=Path, default=Path("carry/mnist"), help="folder of MNIST")
    parser.add_argument(
        "--out", type=Path, default=Path("llc_cost.jsonl"), help="file of the finished cells"
    )
    parser.add_argument(
        "--gamma", type=float, default=1.0, help="the reference's γ over P/‖w*‖²: 0.5, 1 or 2"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--ours", default="0,1", help=f"numbers of {', '.join(OURS)}")
    parser.add_argument(
        "--peers",
        default="3e-5:512",
        help="pairs ε:batch size; a batch size of 0 is the whole data",
    )
    parser.add_argument(
        "--relaxations", type=float, default=4.0, help="length of devinterp's chains over 2/(εγ)"
    )
    parser.add_argument(
        "--step-chains", type=numbers(int), default=[], help="chains whose steps are timed: 4,32"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the timing of steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing is started later")
    args = parser.parse_args()
    begin = time.monotonic()
    if args.peer_path is not None:
        sys.path.append(str(args.peer_path.resolve()))
    set_tf32(False)
    described = setting(args)
    model, digest = load_network(NETWORK, argparse.Namespace(weights=RESULTS))
    stored = read(RESULTS / "networks.jsonl")
    reference = min(
        (row for row in stored if row["network"] == NETWORK),
        key=lambda row: abs(math.log(row["over_scale"] / args.gamma)),
    )
    if find_reference(stored, NETWORK, digest, reference["localization"]) is None:
        raise SystemExit(f"the weights of {NETWORK} are not those of the reference")
    x, y = (part.to(args.device) for part in NETWORKS[NETWORK].data(args.data))
    if args.quick:
        x, y = x[:2048], y[:2048]
    model = model.to(args.device)
    problem = lh.Problem(model, "cross_entropy", (x, y), norm="eval")
    gamma, truth = reference["localization"], reference["value"]
    described |= {
        "nβ": reference["nbeta"],
        "γ": gamma,
        "reference": truth,
        "its error": reference["stderr"],
    }
    cells: list[tuple[Row, Any]] = []
    for round_ in range(args.rounds if args.step_chains else 0):
        for chains in args.step_chains:
            mode = "graph" if args.device.startswith("cuda") else "auto"
            key = {
                "by": "steps",
                "chains": chains,
                "batch": args.batch_size,
                "mode": mode,
                "seed": round_,
            }
            cells.append(
                (
                    key,
                    partial(
                        time_steps, problem, reference, chains, args.batch_size, mode, args.quick
                    ),
                )
            )
    for seed in range(args.seeds):
        for number in numbers(int)(args.ours):
            name = list(OURS)[number]
            key = {"by": "lambdahat", "setting": name, "seed": seed}
            cells.append((key, partial(run_ours, problem, reference, name, seed)))
        for pair in args.peers.split(",") if args.peers else []:
            rate, size = float(pair.split(":")[0]), int(pair.split(":")[1]) or len(x)
            steps = (
                40
                if args.quick
                else BLOCK * math.ceil(args.relaxations * 2 / (rate * gamma) / BLOCK)
            )
            key = {"by": "devinterp", "rate": rate, "batch": size, "steps": steps, "seed": seed}
            cells.append(
                (key, partial(run_devinterp, (model, (x, y)), reference, rate, size, steps, seed))
            )
    place = {"device": described["device"], "quick": args.quick, "localization": gamma}
    done = [row for row in read(args.out) if place.items() <= row.items()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for key, run in cells:
        if any(key.items() <= row.items() for row in done):
            continue
        if time.monotonic() - begin > args.seconds:
            print("out of time", flush=True)
            break
        try:
            row = place | key | run()
        except RuntimeError as error:  # a cell that fails must not end the others
            print(f"{key} fails: {error}", flush=True)
            continue
        append(args.out, row)
        done.append(row)
        shown = {
            name: row[name]
            for name in ("value", "stderr", "status", "gradients", "batch", "seconds")
            if name in row
        }
        print(key, shown, f"{time.monotonic() - begin:.0f} s in all", flush=True)
    report("λ̂ of the MNIST MLP to 5 %", described, summary(done, truth), args.json)


def time_steps(
    problem: lh.Problem, reference: Row, chains: int, batch: int, mode: str, quick: bool
) -> Row:
    """Seconds of a chain-step of both kernels, one after the other."""
    settings = ChainSettings(
        1e-5, reference["nbeta"], reference["localization"], batch, chains, 20 if quick else 400
    )
    kinds = {"kinetic": kinetic, "sgld": sgld}
    return {name: our_steps(problem, settings, mode, make).seconds for name, make in kinds.items()}


if __name__ == "__main__":
    main()
