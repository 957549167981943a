"""On one GPU: what does a repeated product cost against curvlinops, and a depth-100 density of VGG-16?

The GPU machine has no curvlinops: carry a pure-Python copy of it. In the repository root (carry/ is ignored by git):

    pip install --no-deps --target carry/peers curvlinops-for-pytorch einops einconv linear_operator opt_einsum tqdm

and there: PYTHONPATH=src python3 benchmarks/gpu.py --peer-path carry/peers --json $OUT/gpu.json
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from ours import Lambdahat
from peers import Curvlinops
from problems import LOSS, Case, load
from timing import GRADIENT, arguments, compare, precision, report, rows, set_tf32, setting


def products(case: Case, repeats: int) -> list[dict]:
    v = torch.randn(case.num_parameters, device=case.parameters[0].device)
    tasks = {GRADIENT: case.gradient}
    for peer in (Lambdahat(), Curvlinops()):
        if peer.available():
            product = peer.hvp(case.model, LOSS, case.batches)
            tasks[peer.name] = lambda product=product: product(v)
    return rows(case.name, "hvp", compare(tasks, repeats))


def density(case: Case, depth: int, repeats: int) -> list[dict]:
    """From a fresh start, so that a CUDA graph is captured in the precision being timed."""
    ours = Lambdahat()
    run = partial(ours.density, case.model, LOSS, case.batches, depth=depth)
    times = compare({GRADIENT: case.gradient} | ({ours.name: run} if ours.available() else {}), repeats)
    return rows(case.name, f"density, depth {depth}", times)


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(device="cuda", batch_size=8192)
    parser.add_argument("--peer-path", type=Path, help="folder with a copy of curvlinops, put on sys.path")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu: skipped, no CUDA device")
        return
    if args.peer_path is not None:
        sys.path.append(str(args.peer_path.resolve()))
    set_tf32(False)
    torch.backends.cudnn.benchmark = True  # for the peer too; ours asks for it in any case
    described = setting(args)
    del described["precision"]  # it differs by row
    small, large, depth, repeats = (128, 32, 5, 1) if args.quick else (8192, 2048, 100, 15)
    table = []

    def add(new: list[dict]) -> None:
        table.extend(row | {"precision": precision(args.device)} for row in new)
        report("GPU, so far", described, table, args.json)

    mlp = load("mlp", small, batch_size=args.batch_size, device=args.device)
    print(mlp.describe())
    add(products(mlp, repeats))
    vgg = load("vgg16", large, batch_size=args.batch_size, device=args.device)
    print(vgg.describe())
    add(products(vgg, repeats))
    for allowed in (False, True):
        set_tf32(allowed)
        add(products(vgg, repeats) if allowed else [])
        add(density(vgg, depth, 1))


if __name__ == "__main__":
    main()
