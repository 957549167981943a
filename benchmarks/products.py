"""What does a repeated Hessian- or GGN-vector product cost, in gradients over the same data?"""

from __future__ import annotations

import torch
from ours import Lambdahat
from peers import PEERS
from problems import LOSS, Case, load
from timing import GRADIENT, arguments, compare, report, rows, setting


def disagreement(products, v):
    """Relative distance of each product from the first one: all must be the same matrix."""
    results = {name: product(v) for name, product in products.items()}
    first = next(iter(results.values()))
    return {name: ((result - first).norm() / first.norm()).item() for name, result in results.items()}


def measure(case: Case, work: str, repeats: int) -> list[dict]:
    print(case.describe())
    problem = case.model, LOSS, case.batches
    peers = [peer for peer in (Lambdahat(), *PEERS) if getattr(peer, work) is not None and peer.available()]
    products = {peer.name: getattr(peer, work)(*problem) for peer in peers}
    rng = torch.Generator().manual_seed(0)
    v = torch.randn(case.num_parameters, generator=rng).to(case.parameters[0].device)
    differences = disagreement(products, v)
    tasks = {name: lambda product=product: product(v) for name, product in products.items()}
    times = compare({GRADIENT: case.gradient} | tasks, repeats)
    return rows(case.name, work, times, difference=differences)


def main() -> None:
    args = arguments(__doc__).parse_args()
    described = setting(args)
    samples, repeats = (128, 1) if args.quick else (2048, 15)
    cases = [load(name, samples, batch_size=args.batch_size, device=args.device) for name in ("mlp", "lenet5")]
    table = [row for case in cases for work in ("hvp", "ggn") for row in measure(case, work, repeats)]
    report("Repeated products", described, table, args.json)


if __name__ == "__main__":
    main()
