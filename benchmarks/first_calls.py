"""How long do the import and the first calls of a process take?

Each row is a fresh process: ``import lambdahat`` over torch's own import, and then the same call
four times. The first call also imports the modules that it needs, from byte code that an earlier
process left. Times are CPU seconds, the least of some processes, so that other work on the machine
does not count.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from timing import arguments, report, setting

CALLS = {
    "trace": "lh.trace(lh.hessian(problem))",
    "ten eigenvalues": "lh.eigenpairs(lh.hessian(problem), k=10)",
    "density, depth 100": "lh.spectrum(lh.hessian(problem), depth=100)",
    "log-determinant": "lh.logdet(matrix)",
    "llc": "lh.llc(problem, chains=2, draws=100)",
}
CHILD = """
import json, sys, time
clock = time.process_time
start = clock()
import torch
own = clock() - start
start = clock()
import lambdahat as lh
imported = clock() - start
import scipy.sparse
n = 200_000
matrix = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
torch.manual_seed(0)
layers = torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
data = torch.randn(1024, 784), torch.randint(0, 10, (1024,))
model, times = torch.nn.Sequential(*layers), []
for _ in range(4):
    start = clock()
    problem = lh.Problem(model, "cross_entropy", data)
    CALL
    times.append(clock() - start)
late = [name for name in ("torch._dynamo", "sympy", "scipy.stats", "pandas") if name in sys.modules]
print(json.dumps([own, imported, times[0], min(times[1:]), late]))
"""


def measure(call: str, processes: int) -> dict[str, Any]:
    """The least times over some processes, after one that leaves the byte code."""

    def run(child: str) -> list[Any]:
        command = [sys.executable, "-c", child.replace("CALL", call)]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        found: list[Any] = json.loads(out.splitlines()[-1])
        return found

    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        run(CHILD)
        found = [run(CHILD) for _ in range(processes)]
    own, imported, first, again = (min(each[part] for each in found) for part in range(4))
    return {
        "import torch": own,
        "import lambdahat": imported,
        "first call": first,
        "later calls": again,
        "first / later": first / again,
        "imported meanwhile": ", ".join(found[0][4]),
    }


def main() -> None:
    args = arguments(__doc__).parse_args()
    described = setting(args)
    del described["batch size"]
    processes = 1 if args.quick else 3
    rows = [{"call": name} | measure(call, processes) for name, call in CALLS.items()]
    report("Import and first calls", described, rows, args.json)


if __name__ == "__main__":
    main()
