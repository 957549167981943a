"""Are the error bars correct? How often 95 % intervals contain the exact answer, over 400 seeds for
each case.

Each run (a case and a seed) is a line of the --json file as soon as it ends; another call with the
same file runs only what is missing. The estimators see products with dense float64 matrices only,
so that nothing is exact for them.

    networks    Hessian H and Gauss–Newton matrix G of three trained networks: tr H and
                ‖H‖_F to 2 %, the mean and the second moment of the spectrum, tr exp(H), and
                log det(G + δI) by each method and to a tolerance of 1 %
    spectra     the same for matrices drawn anew for each seed: outliers, bulks, signs, zeros and
                tolerances at random
    isolated    log det of matrices drawn anew for each seed with one eigenvalue of 1e-8 below 199
                in [1, 2]
    clusters    planted partitions drawn anew for each seed: clear ones up to 1,000 nodes, beyond,
                by probes; blurred
    regression  ``advise`` on linear regression with 14 to 17 parameters, or with τ² from a third of
                the samples, drawn anew for each seed, against the exact limit of mean-square
                stability
    training    ``advise`` on a network drawn anew for each seed (kind, widths, activation,
                normalisation, loss, data, point of training, optimiser, batch), against the rate at
                which training becomes unstable
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import advice_edges
import cluster_counts
import networkx as nx
import numpy as np
import torch
from timing import recorded, report
from torch import Tensor, nn

import lambdahat as lh
from lambdahat.randommatrix import advise
from lambdahat.randommatrix.stable_rates import NoLimitError, largest_stable_rate

Row = dict[str, Any]
SEEDS, TOLERANCE, SHIFT = 400, 0.02, 1e-2
DEPTH, PROBES = 60, 10
ROUNDING = 1e-9
METHODS = ("slq", "maxent", "chebyshev")
SIZE = 300  # of a random matrix
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Products(lh.LinearOperator):
    """A dense matrix of which only products are known."""

    def __init__(self, matrix: Tensor, psd: bool) -> None:
        super().__init__(len(matrix), matrix.dtype, matrix.device, psd=psd)
        self.matrix = matrix

    def _apply(self, block: Tensor) -> Tensor:
        return self.matrix @ block


def convolutional() -> nn.Module:
    layers = (
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 10),
    )
    return nn.Sequential(*layers)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ReLU MLP": lambda: lh.models.mlp([64, 10, 10], "relu", seed=0),
    "tanh MLP": lambda: lh.models.mlp([64, 10, 10], "tanh", seed=0),
    "convolutional": convolutional,
}


@functools.cache
def network_matrices(name: str) -> tuple[Tensor, Tensor]:
    """H and G + δI of a trained network."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name]()
    (x, y), _ = lh.data.digits_split(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    problem = lh.Problem(model, "cross_entropy", (x, y), dtype=torch.float64)
    hessian, gauss = lh.hessian(problem).dense(), lh.ggn(problem).dense()
    shifted = gauss + SHIFT * torch.eye(len(gauss), dtype=gauss.dtype)
    return (hessian + hessian.T) / 2, (shifted + shifted.T) / 2


def random_matrices(seed: int) -> tuple[Tensor, Tensor, float]:
    """A symmetric matrix with a random kind of spectrum, a positive definite one, and a
    tolerance.
    """
    rng = np.random.default_rng((seed, 20))
    bulk = [
        lambda: rng.lognormal(0, rng.uniform(0.3, 2), SIZE),
        lambda: np.arange(1, SIZE + 1.0) ** -rng.uniform(0.5, 2),
        lambda: rng.beta(1.5, 1.5, SIZE),
        lambda: rng.uniform(0.9, 0.999) ** np.arange(SIZE),
    ][rng.integers(4)]()
    bulk *= np.where(rng.random(SIZE) < rng.choice([0, 0.1, 0.5]), -1, 1)
    bulk[rng.random(SIZE) < rng.choice([0, 0, 0.5])] *= 1e-4
    outliers = int(rng.choice([0, 1, 3, 10, 20]))
    bulk[:outliers] = (
        rng.choice([1, 1, -1], outliers)
        * np.abs(bulk).max()
        * rng.uniform(1, 10 ** rng.uniform(0.5, 2.5), outliers)
    )
    vectors, _ = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))
    positive = np.abs(bulk) / np.abs(bulk).max() + 10 ** -rng.uniform(0.5, 4)
    matrices = [torch.as_tensor((vectors * values) @ vectors.T) for values in (bulk, positive)]
    return matrices[0], matrices[1], float(rng.choice([0.01, 0.03, 0.1]))


def readings(
    curvature: Tensor, positive: Tensor, tol: float
) -> dict[str, tuple[Callable[[int], lh.Estimate], float]]:
    """The estimators and their exact answers."""
    hessian, definite = Products(curvature, False), Products(positive, True)
    values = torch.linalg.eigvalsh(curvature)
    scale = float(values.abs().max())  # of random matrices: exp of an outlier would be all there is
    wide = 5.0 if scale > 5 * math.sqrt(float(values.square().mean())) + 5 else scale
    determinant = float(torch.linalg.eigvalsh(positive).log().sum())

    def spectrum(seed: int) -> lh.Spectrum:
        return lh.spectrum(hessian, depth=DEPTH, probes=PROBES, seed=seed)

    def exponential(x: Any) -> Any:
        return np.exp(x * (wide / scale))

    return {
        "trace": (lambda seed: lh.trace(hessian, tol=tol, seed=seed), float(curvature.trace())),
        "Frobenius norm": (
            lambda seed: lh.frobenius_norm(hessian, tol=tol, seed=seed),
            float(curvature.norm()),
        ),
        "mean of the spectrum": (lambda seed: spectrum(seed).mean, float(values.mean())),
        "second moment": (lambda seed: spectrum(seed).moment(2), float(values.square().mean())),
        "tr exp": (
            lambda seed: lh.trace_function(
                hessian, exponential, depth=DEPTH, probes=PROBES, seed=seed
            ),
            float((values * (wide / scale)).exp().sum()),
        ),
        "log det, tol=0.01": (lambda seed: lh.logdet(definite, tol=0.01, seed=seed), determinant),
        **{
            f"log det, {method}": (
                lambda seed, method=method: lh.logdet(
                    definite, method, depth=DEPTH, probes=PROBES, seed=seed
                ),
                determinant,
            )
            for method in METHODS
        },
    }


READINGS = (
    "trace",
    "Frobenius norm",
    "mean of the spectrum",
    "second moment",
    "tr exp",
    "log det, tol=0.01",
    *(f"log det, {method}" for method in METHODS),
)


@functools.cache
def network_readings(name: str) -> dict[str, tuple[Callable[[int], lh.Estimate], float]]:
    return readings(*network_matrices(name), TOLERANCE)


def of_network(name: str, reading: str, seed: int) -> tuple[lh.Estimate, float]:
    estimate, truth = network_readings(name)[reading]
    return estimate(seed), truth


@functools.lru_cache(maxsize=1)
def drawn_readings(seed: int) -> dict[str, tuple[Callable[[int], lh.Estimate], float]]:
    return readings(*random_matrices(seed))


def of_spectrum(reading: str, seed: int) -> tuple[lh.Estimate, float]:
    estimate, truth = drawn_readings(seed)[reading]
    return estimate(seed), truth


def of_isolated(method: str, seed: int) -> tuple[lh.Estimate, float]:
    """One small eigenvalue far below a bulk, in a random basis."""
    values = np.append(1e-8, np.linspace(1, 2, 199))
    vectors, _ = np.linalg.qr(np.random.default_rng((seed, 25)).normal(size=(200, 200)))
    matrix = torch.as_tensor((vectors * values) @ vectors.T)
    return lh.logdet(Products((matrix + matrix.T) / 2, True), method, seed=seed), float(
        np.log(values).sum()
    )


def of_partition(least: int, most: int, probes: int | None, seed: int) -> tuple[lh.Estimate, float]:
    """A planted partition with a clear eigengap, its number of nodes in a range."""
    rng = np.random.default_rng((seed, least, most))
    while True:
        count, size = int(rng.integers(2, 41)), int(rng.integers(20, 61))
        inside, outside = rng.uniform(0.25, 0.7), 10 ** rng.uniform(-3, -1.7)
        if not least <= count * size <= most:
            continue
        made = nx.planted_partition_graph(
            count, size, inside, outside, seed=int(rng.integers(1 << 31))
        )
        if cluster_counts.eigengap_is_clear(made, count):
            return lh.graphs.clusters(lh.graphs.graph(made), probes=probes, seed=seed), count


def of_blurred(seed: int) -> tuple[lh.Estimate, float]:
    """Clusters of random sizes, degrees and mixing, with other seeds than those that fixed the
    weights of gaps.
    """
    rng = np.random.default_rng((seed, 21))
    while True:
        made, count = cluster_counts.blurred_graph(rng, int(rng.integers(1 << 31)))
        if made is not None:
            return lh.graphs.clusters(lh.graphs.graph(made), seed=seed), count


def mean_square_limit(rows: np.ndarray, size: int, rho: float, nesterov: bool) -> float:
    """The least rate at which X ↦ E[A X Aᵀ], A a step of SGD on a random batch, has the eigenvalue
    1.

    The map keeps positive matrices positive, so that its spectral radius is an eigenvalue, and
    passes 1 where det(1 − map) first changes its sign. The map acts on symmetric matrices here.
    """
    total, order = rows.shape
    mean, eye = rows.T @ rows / total, np.eye(order)
    share = (total - size) / (size * (total - 1))
    width = 2 * order if rho else order
    upper = np.triu_indices(width)
    basis = np.zeros((len(upper[0]), width, width))
    basis[np.arange(len(basis)), upper[0], upper[1]] = basis[
        np.arange(len(basis)), upper[1], upper[0]
    ] = 1
    seen = (
        eye
        if not rho
        else np.hstack([(1 + rho) * eye, -rho * eye])
        if nesterov
        else np.hstack([eye, 0 * eye])
    )
    inner = seen @ basis @ seen.T
    along = np.einsum("kni,ni->kn", rows @ inner, rows)
    spread = (
        np.einsum("ni,kn,nj->kij", rows, along, rows, optimize=True) / total - mean @ inner @ mean
    )

    def sign(rate: float) -> float:
        step = eye - rate * mean
        if rho:
            ahead = step @ seen if nesterov else np.hstack([step + rho * eye, -rho * eye])
            step = np.vstack([ahead, np.hstack([eye, 0 * eye])])
        after = step @ basis @ step.T
        after[:, :order, :order] += rate**2 * share * spread
        return float(np.linalg.slogdet(np.eye(len(basis)) - after[:, upper[0], upper[1]])[0])

    highest = (
        2 * (1 + rho) / ((1 + 2 * rho if nesterov else 1) * float(np.linalg.eigvalsh(mean)[-1]))
    )
    rates = np.geomspace(1e-3 * highest, highest * (1 - 1e-9), 60)
    above = next((i for i, rate in enumerate(rates) if sign(rate) < 0), None)
    if above is None:
        return highest
    low, high = rates[above - 1], rates[above]
    while high > (1 + 1e-6) * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if sign(middle) > 0 else (low, middle)
    return float(math.sqrt(low * high))


def of_regression(complete: bool, seed: int) -> tuple[lh.Estimate, float]:
    """All directions known and τ² from a third of the samples, or more directions than are
    known.
    """
    rng = np.random.default_rng((seed, 22 + complete))
    total = int(rng.integers(60, 400))
    order = int(rng.integers(2, 13) if complete else rng.integers(14, 18))
    rows = rng.standard_t(rng.choice([4, 8, 100]), size=(total, order)) * np.geomspace(
        rng.uniform(1, 10), 1, order
    )
    if rng.random() < 0.3:
        rows *= rng.random(rows.shape) < rng.uniform(0.1, 0.6)
    if rng.random() < 0.3:
        rows[:, 0] += rng.uniform(1, 3) * np.abs(rows).std()
    rows[0] += 1e-3
    size, rho = int(rng.choice([1, 2, 4, 8, 16, 32])), float(rng.choice([0.0, 0.5, 0.9]))
    nesterov = bool(rho and rng.random() < 0.3)
    start = {"theta": torch.ones(order, dtype=torch.float64)}
    data = torch.as_tensor(rows)
    problem = lh.Problem.from_function(
        lambda p, x: 0.5 * (x @ p["theta"]).square().mean(), start, data
    )
    samples = total // 3 if complete else None
    found = advise(
        problem, "nesterov" if nesterov else "sgd", size, momentum=rho, samples=samples, seed=seed
    )
    return found["largest stable rate"], mean_square_limit(rows, size, rho, nesterov)


class Residual(nn.Module):
    """x + f(x) over a few layers of one width."""

    def __init__(
        self, width: int, depth: int, activation: Callable[[], nn.Module], norm: bool
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *([nn.LayerNorm(width)] if norm else []), nn.Linear(width, width), activation()
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def random_network(rng: np.random.Generator) -> tuple[str, Callable[[], nn.Module]]:
    """A kind of network and what makes it; each call of that draws new weights."""
    activation = [nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.ELU][
        rng.integers(7)
    ]
    norm, depth = bool(rng.random() < 0.3), int(rng.integers(1, 4))
    kind = str(rng.choice(["perceptron", "CNN", "transformer", "residual"]))
    about = f"{kind}, {activation.__name__}{', normalised' if norm else ''}"
    if kind == "perceptron":
        sizes = [64, *(int(w) for w in rng.integers(12, 64, depth)), 10]
        return about, lambda: advice_edges.perceptron(sizes, activation, norm)
    if kind == "CNN":
        widths = (2 * int(rng.integers(2, 6)), 2 * int(rng.integers(2, 8)))
        return about, lambda: advice_edges.convolutional(widths, activation, norm)
    width = 2 * int(rng.integers(5, 14))
    if kind == "transformer":
        return f"transformer, {min(depth, 2)}", lambda: advice_edges.Transformer(
            width, min(depth, 2)
        )
    return about, lambda: Residual(width, depth, activation, norm)


def of_training(seed: int) -> tuple[lh.Estimate, float, Row]:
    """The advised rate and the edge of training, on a network drawn by the seed."""
    rng = np.random.default_rng((seed, 24))
    about, make = random_network(rng)
    loss, trained = (
        str(rng.choice(["cross_entropy", "cross_entropy", "mse"])),
        bool(rng.integers(2)),
    )
    size, rho = int(rng.choice([16, 32, 64, 256])), float(rng.choice([0.0, 0.9]))
    nesterov = bool(rho and rng.random() < 0.3)
    problem = advice_edges.problem_of(make, loss, trained, 10_000 + seed)
    found = advise(problem, "nesterov" if nesterov else "sgd", size, momentum=rho, seed=seed)
    rate = found["largest stable rate"]

    def optimizer(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=rho, nesterov=nesterov)

    try:
        edge = float(
            largest_stable_rate(
                problem,
                optimizer,
                size,
                steps=advice_edges.STEPS,
                start=float(rate),
                runs=advice_edges.RUNS,
                tol=advice_edges.TOL,
                factor=None,
                seed=seed,
            )
        )
    except NoLimitError:
        edge = math.nan
    told = {
        "network": about,
        "loss": loss,
        "trained": trained,
        "batch": size,
        "momentum": rho,
        "nesterov": nesterov,
    }
    return rate, edge, told


CASES: dict[str, Callable[[int], tuple[Any, ...]]] = {
    **{
        f"{name}: {reading}": functools.partial(of_network, name, reading)
        for name in NETWORKS
        for reading in READINGS
    },
    **{f"spectra: {reading}": functools.partial(of_spectrum, reading) for reading in READINGS},
    **{
        f"isolated: log det, {method}": functools.partial(of_isolated, method) for method in METHODS
    },
    "clusters: clear, up to 1,000 nodes": functools.partial(of_partition, 60, 1000, None),
    "clusters: clear, 1,000 to 2,000 nodes": functools.partial(of_partition, 1001, 2000, None),
    "clusters: clear, by 30 probes": functools.partial(of_partition, 100, 1000, 30),
    "clusters: blurred": of_blurred,
    "regression: τ² from a third": functools.partial(of_regression, True),
    "regression: 14 to 17 parameters": functools.partial(of_regression, False),
    "training: networks": of_training,
}


def single(task: tuple[str, int]) -> Row:
    """One run: the estimate, its interval and the truth."""
    torch.set_num_threads(1)
    name, seed = task
    row: Row = {"case": name, "seed": seed}
    start = time.perf_counter()
    try:
        found, truth, *more = CASES[name](seed)
        low, high = found.interval(0.95)
    except Exception as error:  # one run that breaks must not end the others
        return row | {"error": f"{type(error).__name__}: {error}"}
    row |= {
        "value": float(found),
        "stderr": float(found.stderr),
        "low": float(low),
        "high": float(high),
    }
    row |= {"truth": float(truth), "cost": found.cost, "status": found.status.name}
    return row | (more[0] if more else {}) | {"seconds": round(time.perf_counter() - start, 3)}


def held(row: Row) -> bool:
    rounding = ROUNDING * abs(row["truth"])
    return bool(row["low"] - rounding <= row["truth"] <= row["high"] + rounding)


def summary(name: str, rows: list[Row]) -> Row:
    """One case. Answers without an error bar, and those no one knows (NaN), are told apart."""
    known = [row for row in rows if math.isfinite(row["value"]) and math.isfinite(row["truth"])]
    barred = [row for row in known if row["stderr"] > 0]
    scores = [(row["value"] - row["truth"]) / row["stderr"] for row in barred]
    exact = [held(row) for row in known if row["stderr"] == 0]
    statuses = [row["status"] for row in rows]
    below = sum(row["truth"] < row["low"] for row in barred)
    return {
        "case": name,
        "runs": len(rows),
        "unknown": len(rows) - len(known),
        "exact": f"{sum(exact)} of {len(exact)} right" if exact else "",
        "coverage %": 100 * statistics.fmean(map(held, known)) if known else None,
        "of bars %": 100 * statistics.fmean(map(held, barred)) if barred else None,
        "truth below": below,
        "above": sum(row["truth"] > row["high"] for row in barred),
        "mean z": statistics.fmean(scores) if scores else None,
        "rms z": math.sqrt(statistics.fmean(z * z for z in scores)) if scores else None,
        "cost": statistics.fmean(row["cost"] for row in rows),
        "seconds": statistics.fmean(row["seconds"] for row in rows),
        "not ok": " ".join(
            f"{s}:{statuses.count(s)}" for s in sorted(set(statuses)) if s != "CONVERGED"
        ),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="*", help="globs of case names, with semicolons between")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="after which no more runs are started"
    )
    parser.add_argument(
        "--json", type=Path, default=Path("coverage.jsonl"), help="one line for each run"
    )
    parser.add_argument("--summary", type=Path, help="write the table to this file too")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    os.environ.update(dict.fromkeys(THREADS, "1"))  # the workers are born with it
    names = [
        name for name in CASES if any(fnmatch.fnmatch(name, glob) for glob in args.cases.split(";"))
    ]
    seeds = range(args.first, args.first + args.seeds)
    # by seeds: an early end cuts all cases alike
    tasks = [(name, seed) for seed in seeds for name in names]
    rows = recorded(
        single, tasks, args.json, lambda row: (row["case"], row["seed"]), args.workers, args.minutes
    )
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"{row['case']}, seed {row['seed']}: {row['error']}")
    fine = [row for row in rows if "error" not in row]
    table = [
        summary(name, of) for name in names if (of := [row for row in fine if row["case"] == name])
    ]
    described = {
        "torch": torch.__version__,
        "precision": "float64",
        "seeds": f"{seeds[0]} to {seeds[-1]}",
        "failed": len(failed),
    }
    report("Coverage of 95 % intervals", described, table, args.summary)


if __name__ == "__main__":
    main()
