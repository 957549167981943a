r"""What does a step of a chain cost, ours and devinterp's, and do both find the same λ̂ at the same
settings?

The unit is one gradient on one batch. A step's time is a median while the chains run; "call ms"
divides the whole call, set-up included, by its steps. λ̂ is over several seeds with the same ε, nβ,
γ, batch size, chains and draws, without burn-in; devinterp's once as it reports it and once
paired, from its own trace.

For a machine without network access, prepare a copy of devinterp in the repository root (git
ignores carry/), here for Python 3.12:

    pip install --no-deps --only-binary=:all: --python-version 3.12 \
        --platform manylinux2014_x86_64 --platform any --target carry/peers \
        devinterp pydantic pydantic_core annotated_types typing_inspection tqdm
    pip install --no-deps --target carry/arviz arviz-stats arviz-base xarray xarray-einstats

and there: PYTHONPATH=src:carry/arviz python3 benchmarks/sampling.py --device cuda --peer-path
carry/peers --json … With --images a file of MNIST (.npz with train_images (n, 28, 28) of bytes and
train_labels) replaces the digits: on these images the networks are trained to a minimum, so that λ̂
is meaningful; the two libraries can be compared either way.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import arguments, report, set_tf32, setting
from torch.nn.functional import cross_entropy

import lambdahat as lh
from lambdahat.bench import chain_rows
from lambdahat.bench.chain_rows import ChainSettings, our_steps
from lambdahat.bench.problems import LOSS, BenchCase, load
from lambdahat.bench.timing import compare
from lambdahat.sampling import sample, sgld

LOSSES = partial(cross_entropy, reduction="none")
MODES = {
    "cpu": ("batched", "sequential", "processes", "auto"),
    "cuda": ("batched", "graph", "auto"),
}
STEP_SIZE, LOCALIZATION = 1e-5, 1000.0
GRADIENT = "one gradient"
# per epoch
RATES = {
    "mlp": (0.1,) * 4 + (0.02,) * 3 + (0.005,) * 2,
    "lenet5": (0.05,) * 3 + (0.01,) * 2 + (0.002,),
}


def trained_on(path: Path, name: str, batch_size: int, device: str) -> BenchCase:
    """The network trained by SGD with momentum 0.9 and batches of 128 until its gradient is
    small.
    """
    stored = np.load(path)
    x = torch.as_tensor(stored["train_images"], device=device).unsqueeze(1).float() / 255
    y = torch.as_tensor(stored["train_labels"], device=device).long()
    case = load(name, 128, batch_size=batch_size, device=device)
    optimizer = torch.optim.SGD(case.model.parameters(), momentum=0.9)
    rng = torch.Generator().manual_seed(0)
    for optimizer.param_groups[0]["lr"] in RATES[name]:
        for rows in torch.randperm(len(x), generator=rng).split(128):
            optimizer.zero_grad()
            LOSS(case.model(x[rows]), y[rows]).backward()
            optimizer.step()
    case.model.zero_grad()
    return replace(case, batches=list(zip(x.split(batch_size), y.split(batch_size), strict=True)))


def available() -> bool:
    try:
        chain_rows.devinterp("slt.sampler")
    except ImportError as error:
        print(f"devinterp: skipped, {error}")
        return False
    return True


def costs(
    case: BenchCase,
    problem: lh.Problem,
    settings: ChainSettings,
    modes: tuple[str, ...],
    rounds: int,
) -> list[dict]:
    """A chain-step in every way of running the chains, in interleaved rounds."""
    one = case.one_batch(settings.batch_size)
    makers = {GRADIENT: lambda: one.gradient}
    makers |= {mode: partial(partial, our_steps, problem, settings, mode) for mode in modes}
    return [
        {
            "case": case.name,
            "chains": settings.chains,
            "by": name,
            "ms": 1e3 * found.seconds,
            "gradients": found.cost,
            "note": found.note,
        }
        for name, found in compare(makers, GRADIENT, rounds).items()
    ]


def our_mean(problem: lh.Problem, settings: ChainSettings) -> float:
    """λ̂ with the batches of a step shared by all chains, as devinterp has it."""
    kernel = sgld(
        step_size=settings.step_size, nbeta=settings.nbeta, localization=settings.localization
    )
    found = sample(
        problem,
        kernel,
        settings.chains,
        settings.draws,
        settings.seed,
        batch_size=settings.batch_size,
        shared_batches=True,
    )
    return found.energies.mean().item()


def agreement(
    case: BenchCase, problem: lh.Problem, settings: ChainSettings, seeds: int
) -> list[dict]:
    """λ̂ of both over seeds; z is the distance from ours in standard errors of the difference."""
    names = "lambdahat", "devinterp, paired, with replacement", "devinterp, paired", "devinterp"
    data, found = case.whole(), {name: [] for name in names}
    for seed in range(seeds):
        now = replace(settings, seed=1000 * seed)  # devinterp seeds chain i with seed + i
        found["lambdahat"].append(our_mean(problem, now))
        if available():
            again = chain_rows.sampled(case.model, LOSSES, data, now, replacement=True)
            run = chain_rows.sampled(case.model, LOSSES, data, now)
            runs = again.paired, run.paired, run.per_chain
            for name, values in zip(names[1:], runs, strict=True):
                found[name].append(values.mean().item())
    rows = []
    reference = np.asarray(found["lambdahat"])
    for name, values in found.items():
        if not values:
            continue
        sd = np.std(values, ddof=1).item()
        error = math.hypot(sd, reference.std(ddof=1).item()) / math.sqrt(seeds)
        z = (
            None
            if name == "lambdahat"
            else (np.mean(values).item() - reference.mean().item()) / error
        )
        rows.append(
            {
                "case": case.name,
                "by": name,
                "λ̂": np.mean(values).item(),
                "sd over seeds": sd,
                "z": z,
            }
        )
        if name == "devinterp":
            rows[-1]["sd of its baseline, expected"] = baseline_spread(case, data, settings)
    return rows


def baseline_spread(
    case: BenchCase, data: tuple[torch.Tensor, torch.Tensor], settings: ChainSettings
) -> float:
    """nβ·σ·√(1/m − 1/n): the standard deviation of nβ·L₀ over m = 32 batches drawn without
    replacement, σ² the variance of a sample's loss at w*. The mean over the chain's batches varies
    far less.
    """
    centre = chain_rows.losses_at(case.model, LOSSES, data)
    taken = min(chain_rows.INIT_BATCHES * settings.batch_size, len(centre))
    return settings.nbeta * centre.std().item() * math.sqrt(1 / taken - 1 / len(centre))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--peer-path", type=Path, help="folder with a copy of devinterp, put on sys.path"
    )
    parser.add_argument(
        "--images", type=Path, help="MNIST as .npz, in place of the enlarged digits"
    )
    parser.add_argument(
        "--networks", nargs="+", default=["mlp", "lenet5"], choices=["mlp", "lenet5"]
    )
    parser.add_argument(
        "--samples", type=int, default=60_000, help="of the enlarged digits; a step costs the same"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of which the medians are taken")
    parser.add_argument("--draws", type=int, default=200, help="steps of a chain")
    parser.add_argument(
        "--seeds", type=int, default=10, help="runs of each for λ̂; 0 leaves the comparison out"
    )
    args = parser.parse_args()
    if args.peer_path is not None:
        sys.path.append(str(args.peer_path.resolve()))
    set_tf32(False)
    kind = args.device.partition(":")[0]
    samples, rounds, seeds = (
        (2048, 1, min(args.seeds, 2)) if args.quick else (args.samples, args.rounds, args.seeds)
    )
    draws = 40 if args.quick else args.draws
    described = setting(args) | {
        "data": "digits" if args.images is None else args.images.name,
        "draws": draws,
    }
    described |= {"ε": STEP_SIZE, "γ": LOCALIZATION, "seeds": seeds}
    table: list[dict] = []
    for name in args.networks:
        if args.images is None:
            case = load(name, samples, batch_size=args.batch_size, device=args.device)
        else:
            case = trained_on(args.images, name, args.batch_size, args.device)
        print(case.describe(), f"‖∇L‖ {case.gradient().norm():.2g}")
        problem, nbeta = case.problem(), case.num_samples / math.log(case.num_samples)
        described |= {"n": case.num_samples, "nβ": round(nbeta, 1)}
        settings = ChainSettings(STEP_SIZE, nbeta, LOCALIZATION, args.batch_size, 4, draws)
        for chains in (4, 32) if kind == "cuda" else (4,):
            table += costs(case, problem, replace(settings, chains=chains), MODES[kind], rounds)
            report("Chain-steps, so far", described, table, args.json)
        if seeds > 1:
            table += agreement(case, problem, settings, seeds)
            report("Chain-steps and λ̂, so far", described, table, args.json)


if __name__ == "__main__":
    main()
