"""Are the error bars true? How often 95 % intervals hold the exact answer, over 400 seeds on three trained networks.

The Hessian H and the Gauss–Newton matrix G are formed densely in float64 for the exact answer; the estimators see
products with them only, so that nothing is exact for them. The readings: tr H and ‖H‖_F at a relative tolerance of
2 %; log det(G + δI) by each method and to a tolerance of 1 %; and of the spectrum of H its mean, its second moment and
tr exp(H), from ten probes of 60 steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from timing import arguments, report, setting
from torch import Tensor, nn

import lambdahat as lh

SEEDS, TOLERANCE, SHIFT = 400, 0.02, 1e-2
DEPTH, PROBES = 60, 10


class Products(lh.LinearOperator):
    """A dense matrix of which only products are known."""

    def __init__(self, matrix: Tensor, psd: bool) -> None:
        super().__init__(len(matrix), matrix.dtype, matrix.device, psd=psd)
        self.matrix = matrix

    def _apply(self, block: Tensor) -> Tensor:
        return self.matrix @ block


def convolutional() -> nn.Module:
    layers = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    return nn.Sequential(*layers)


def networks() -> dict[str, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution = convolutional()
    return {
        "ReLU MLP": lh.models.mlp([64, 10, 10], "relu", seed=0),
        "tanh MLP": lh.models.mlp([64, 10, 10], "tanh", seed=0),
        "convolutional": convolution,
    }


def trained(model: nn.Module) -> lh.Problem:
    (x, y), _ = lh.data.digits_split(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return lh.Problem(model, "cross_entropy", (x, y), dtype=torch.float64)


def covered(estimate: Callable[[int], lh.Estimate], truth: float, seeds: int) -> dict[str, float]:
    """The share of intervals that hold the truth, and the spread of the errors in standard errors."""
    held, scores, products = 0, [], 0
    for seed in range(seeds):
        found = estimate(seed)
        low, high = found.interval(0.95)
        rounding = 1e-9 * abs(truth)
        held += low - rounding <= truth <= high + rounding
        # an answer that P products made exact has no error to speak of
        scores.append((float(found) - truth) / float(found.stderr) if float(found.stderr) > 0 else 0.0)
        products += found.cost
    spread = torch.tensor(scores)
    return {"coverage": held / seeds, "mean z": float(spread.mean()), "sd z": float(spread.std()),
            "products": products / seeds}  # fmt: skip


def measure(name: str, model: nn.Module, seeds: int) -> list[dict]:
    problem = trained(model)
    hessian, gauss = lh.hessian(problem).dense(), lh.ggn(problem).dense()
    shifted = gauss + SHIFT * torch.eye(len(gauss), dtype=gauss.dtype)
    curvature, positive = Products((hessian + hessian.T) / 2, False), Products((shifted + shifted.T) / 2, True)
    determinant = float(torch.logdet(shifted))

    def spectrum(seed: int) -> lh.Spectrum:
        return lh.spectrum(curvature, depth=DEPTH, probes=PROBES, seed=seed)

    tasks = {
        "trace of H": (lambda seed: lh.trace(curvature, tol=TOLERANCE, seed=seed), float(hessian.trace())),
        "Frobenius norm of H": (
            lambda seed: lh.frobenius_norm(curvature, tol=TOLERANCE, seed=seed),
            float(hessian.norm()),
        ),
        "mean of the spectrum of H": (lambda seed: spectrum(seed).mean, float(hessian.trace()) / len(hessian)),
        "second moment of H": (lambda seed: spectrum(seed).moment(2), float(hessian.square().sum()) / len(hessian)),
        "tr exp(H)": (
            lambda seed: lh.trace_function(curvature, np.exp, depth=DEPTH, probes=PROBES, seed=seed),
            float(torch.linalg.eigvalsh(curvature.matrix).exp().sum()),
        ),
        "log det(GGN + δI), tol=0.01": (lambda seed: lh.logdet(positive, tol=0.01, seed=seed), determinant),
    }
    for method in ("slq", "maxent", "chebyshev"):
        call = functools.partial(lh.logdet, positive, method, depth=DEPTH, probes=PROBES)
        tasks[f"log det(GGN + δI), {method}"] = (lambda seed, call=call: call(seed=seed), determinant)
    return [
        {"network": name, "P": problem.num_parameters, "estimate": label, "exact": truth} | covered(task, truth, seeds)
        for label, (task, truth) in tasks.items()
    ]


def main() -> None:
    args = arguments(__doc__).parse_args()
    described = setting(args) | {"seeds": 5 if args.quick else SEEDS, "tol": TOLERANCE, "shift": SHIFT}
    del described["batch size"]
    described["precision"] = "float64"
    table = []
    for name, model in networks().items():
        table += measure(name, model, described["seeds"])
    report("Coverage of 95 % intervals", described, table, args.json)


if __name__ == "__main__":
    main()
