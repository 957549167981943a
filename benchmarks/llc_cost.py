"""What does a given standard error of λ̂ cost, here and with devinterp, on the MLP trained on MNIST?

``lh.llc`` finds ε and γ once. Then twenty independent runs of each at those settings, nβ = n/ln n and batches of 512
give the spread of λ̂, the gradients and the seconds of a run; both are scaled to a spread of one per cent of λ̂ (error ∝
1/√draws beyond the burn-in, which has to be paid for once). devinterp averages its burn-in into λ̂, so its mean is that
of shorter chains: only its spread is compared. The GPU machine needs what sampling.py's text says.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from sampling import available, trained_on
from timing import arguments, report, set_tf32, setting
from torch.nn.functional import cross_entropy

import lambdahat as lh
from lambdahat.bench import devinterp_chains
from lambdahat.bench.devinterp_chains import Settings
from lambdahat.sampling import sample, sgld

RUNS, BURN_IN, DRAWS, PEER_DRAWS, TARGET = 20, 500, 500, 150, 0.01
LOSSES = partial(cross_entropy, reduction="none")


def row(by: str, values: list[float], burn_in: int, draws: int, seconds: float, chains: int) -> dict:
    """Spread over runs, and what a spread of one per cent would take; ``seconds`` are those of one run's steps."""
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
    factor = (spread / (TARGET * abs(mean))) ** 2
    needed = chains * (burn_in + draws * factor)
    step = seconds / (chains * (burn_in + draws))
    return {"by": by, "λ̂": mean, "sd over runs": spread, "gradients of a run": chains * (burn_in + draws),
            "seconds of a run": seconds, "ms of a chain-step": 1e3 * step, "gradients to 1 %": round(needed),
            "seconds to 1 %": needed * step}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--peer-path", type=Path, help="folder with a copy of devinterp, put on sys.path")
    parser.add_argument("--images", type=Path, required=True, help="MNIST as .npz")
    args = parser.parse_args()
    if args.peer_path is not None:
        sys.path.append(str(args.peer_path.resolve()))
    set_tf32(False)
    runs = 3 if args.quick else RUNS
    case = trained_on(args.images, "mlp", args.batch_size, args.device)
    problem = case.problem()
    start = time.perf_counter()
    found = lh.llc(problem, kernel="sgld", batch_size=args.batch_size)
    described = setting(args) | {"runs": runs, "nβ": found.nbeta, "γ": found.localization, "ε": found.step_size}
    seconds = time.perf_counter() - start
    described |= {"llc by SGLD": str(found), "its raw mean": found.raw, "its gradients": found.cost}
    described |= {"its seconds": seconds, "sensitivity": str(found.sensitivity)}
    report("λ̂ by SGLD", described, [], args.json)
    kernel = sgld(found.step_size, found.nbeta, float(found.localization))
    table = []
    for chains in (4, 32) if args.device.startswith("cuda") else (4,):
        values, times = [], []
        for seed in range(runs):
            begin = time.perf_counter()
            run = sample(problem, kernel, chains, DRAWS, seed, burn_in=BURN_IN, batch_size=args.batch_size)
            times.append(time.perf_counter() - begin)
            values.append(float(run.energies.mean()))
        label = f"lambdahat, {chains} chains, whole call"
        table.append(row(label, values, BURN_IN, DRAWS, float(np.median(times)), chains))
        report("Cost of one per cent", described, table, args.json)
    if available():
        settings = Settings(found.step_size, found.nbeta, float(found.localization), args.batch_size, 4, PEER_DRAWS)
        values, steps = [], []
        for seed in range(runs):
            run = devinterp_chains.sampled(case.model, LOSSES, case.whole(), replace(settings, seed=1000 * seed))
            values.append(float(run.per_chain.mean()))
            steps.append(run.step_s)
        seconds = 4 * PEER_DRAWS * float(np.median(steps))
        table.append(row("devinterp, 4 chains, steps alone", values, 0, PEER_DRAWS, seconds, 4))
        report("Cost of one per cent", described, table, args.json)


if __name__ == "__main__":
    main()
