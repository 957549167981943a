"""What is λ̂ where no closed form is known? The stored references of the ground-truth suite, each
with its standard error.

Writes src/lambdahat/singular/references.json: the minimum of the ReLU network, and for every case
without a closed form nβ·E[L − L*] at nβ = n/ln n and each of three localizations: by block Gibbs
for linear networks, by long chains of MALA for the ReLU network. What is stored already is kept;
--anew begins again. About 15 minutes on an idle core, an hour on a busy one.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from lambdahat._core.rng import generator
from lambdahat.singular import known_cases
from lambdahat.singular.verification import KnownCase

PATH = Path(known_cases.__file__).with_name("references.json")
LOCALIZATIONS = (1.0, 10.0, 100.0)
EFFORT = 4.0
RESTARTS, ADAM_STEPS = 10, 6000


def trained() -> dict[str, list[Any]]:
    """The ReLU network's parameters at the lowest end of ten starts, on all data in float64."""
    x, y = known_cases.perceptron_data()
    ends = []
    for start in range(RESTARTS):
        model = known_cases.perceptron_model().to_empty(device="cpu")
        rng = generator(start, known_cases.MLP, "start")
        for parameter in model.parameters():
            parameter.data = 0.7 * torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        ends.append(
            (
                _minimised(model, x, y),
                {name: value.tolist() for name, value in model.state_dict().items()},
            )
        )
        print(f"start {start}: loss {ends[-1][0]:.6f}", flush=True)
    return min(ends, key=lambda end: end[0])[1]


def _minimised(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """L-BFGS until it stalls, at a kink of the loss as a rule, then Adam with a rate that falls
    to 1e-7.
    """

    def closure() -> torch.Tensor:
        model.zero_grad()
        value = torch.nn.functional.cross_entropy(model(x), y)
        value.backward()
        return value

    lbfgs = torch.optim.LBFGS(
        model.parameters(), max_iter=1000, history_size=50, line_search_fn="strong_wolfe"
    )
    lbfgs.step(closure)
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    falling = torch.optim.lr_scheduler.ExponentialLR(adam, (1e-7 / 0.02) ** (1 / ADAM_STEPS))
    for _ in range(ADAM_STEPS):
        adam.step(closure)
        falling.step()
    return float(closure().detach())


def missing(case: KnownCase) -> list[tuple[float, float]]:
    """The (nβ, γ) of a case that are not stored yet."""
    samples = case.make().num_samples
    nbeta = samples / math.log(samples)
    known = {(row[0], row[1]) for row in read()["values"].get(case.name, ())}
    return [(nbeta, gamma) for gamma in LOCALIZATIONS if (nbeta, gamma) not in known]


def read() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(PATH.read_text("utf-8"))
    return document


def write(document: dict[str, Any]) -> None:
    rows = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in document["values"].items()
    )
    others = "".join(
        f",\n {json.dumps(name)}: {json.dumps(document[name])}"
        for name in ("parameters", "problems")
    )
    PATH.write_text(f'{{\n "values": {{\n{rows}\n }}{others}\n}}\n', encoding="utf-8")
    known_cases.stored_references.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--anew", action="store_true", help="forget what is stored")
    parser.add_argument("--cases", default="", help="only cases whose name holds this")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.anew or not PATH.is_file():
        write({"values": {}, "parameters": {known_cases.MLP: trained()}, "problems": {}})
        problems = {known_cases.MLP: known_cases.rounded_digest(known_cases.perceptron_problem())}
        write({**read(), "problems": problems})
    for case in known_cases.suite():
        if not isinstance(case.truth, known_cases.Reference) or args.cases not in case.name:
            continue
        for nbeta, gamma in missing(case):
            start = time.perf_counter()
            found = case.truth.compute(nbeta, gamma, EFFORT)
            print(
                f"{case.name}, γ = {gamma:g}: {found}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
            if found.status.ok:
                document = read()  # anew: several of this script may run side by side
                row = [nbeta, gamma, float(found), float(f"{float(found.stderr):.3g}"), found.dof]
                document["values"].setdefault(case.name, []).append(row)
                write(document)


if __name__ == "__main__":
    main()
