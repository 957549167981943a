"""Does the library meet its goals of speed and memory? The table of goals in docs/bench.md, from
stored results.

    python benchmarks/speed_figures.py

writes, between its marks in the page, each goal with what was measured on the CPU and on the H200.
Most are rows of ``lambdahat bench`` (benchmarks/results/bench-cpu.json and bench-h200.json), the
others of the scripts here; a figure with no measurement has the command that makes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lambdahat.bench import FAMILIES, BenchResult
from lambdahat.bench.records import OURS, UNIT
from lambdahat.cli.printing import markdown_table

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "bench.md", ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- goals: begin -->", "<!-- goals: end -->"
HEADER = ("about", "goal", "measured by", "CPU", "H200", "verdict")
CPU, H200 = "cpu", "h200"

Read = Callable[["Stored", str], float]  # the number on a machine; NaN where there is none


class Stored:
    """The result files of a folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self.bench = {
            name: BenchResult.load(path)
            for name in (CPU, H200)
            if (path := folder / f"bench-{name}.json").exists()
        }
        self.files = {
            path.stem: document["rows"]
            for path in sorted(folder.glob("*.json"))
            if isinstance(document := json.loads(path.read_text(encoding="utf-8")), dict)
            and "rows" in document
        }

    def row(self, machine: str, work: str, case: str, by: str = OURS) -> Any:
        """A row of the benchmark, or None."""
        return self.bench[machine].of(work, case).get(by) if machine in self.bench else None

    def record(self, name: str, **fields: Any) -> dict[str, Any]:
        """The row of a result file with these fields; empty where there is none."""
        rows = self.files.get(name, [])
        return next(
            (row for row in rows if all(row.get(key) == value for key, value in fields.items())), {}
        )


def cost(work: str, case: str) -> Read:
    """Our time in units of the task."""
    return lambda stored, machine: getattr(stored.row(machine, work, case), "cost", math.nan)


def seconds(work: str, case: str, factor: float = 1.0) -> Read:
    """Our time."""
    return lambda stored, machine: (
        factor * getattr(stored.row(machine, work, case), "seconds", math.nan)
    )


def memory(work: str, case: str, by: str = OURS) -> Read:
    """By how many MiB our peak rose, or another's."""
    return lambda stored, machine: getattr(stored.row(machine, work, case, by), "memory", math.nan)


def faster(work: str, case: str, peer: str) -> Read:
    """How many times as fast as the peer ours is; nothing where the peer is not accurate enough."""

    def read(stored: Stored, machine: str) -> float:
        ours, other = (stored.row(machine, work, case, by) for by in (OURS, peer))
        return (
            math.nan
            if ours is None or other is None or not other.accurate
            else other.cost / ours.cost
        )

    return read


def filed(names: dict[str, str], field: str, **fields: Any) -> Read:
    """A field of a result file; ``names`` has one a machine."""
    return lambda stored, machine: stored.record(names.get(machine, ""), **fields).get(
        field, math.nan
    )


def ratio(above: Read, below: Read) -> Read:
    """One number over another."""
    return lambda stored, machine: above(stored, machine) / below(stored, machine)


@dataclass(frozen=True)
class Figure:
    """A goal on one machine, ``on``: at ``most`` or at ``least`` so much; or, without a bound, a
    figure to report.

    ``by`` is the family of the benchmark, or the script, that measures it, ``where`` the machines
    on which it can. What that has not measured yet is taken from the results of an ``older``
    script: its name and reading.
    """

    about: str
    goal: str
    by: str
    read: Read
    unit: str = ""
    most: float = math.inf
    least: float = -math.inf
    on: str = CPU
    where: tuple[str, ...] = (CPU, H200)
    older: tuple[str, Read] | None = None

    def line(self, stored: Stored) -> tuple[str, ...]:
        """A row of the table."""
        cells = (self._cell(stored, machine) for machine in (CPU, H200))
        return self.about, self.goal, f"`{self.by}`", *cells, self._verdict(stored)

    def _found(self, stored: Stored, machine: str) -> tuple[float, str]:
        """The number and, where it is an older one, its source."""
        value = self.read(stored, machine)
        if math.isnan(value) and self.older is not None:
            return self.older[1](stored, machine), f" (`{self.older[0]}`)"
        return value, ""

    def _cell(self, stored: Stored, machine: str) -> str:
        value, source = self._found(stored, machine)
        if not math.isnan(value):
            return f"{value:.3g}{self.unit}{source}"
        return f"— `{self.command(machine)}`" if machine in self.where else "—"

    def _verdict(self, stored: Stored) -> str:
        value, _ = self._found(stored, self.on)
        if math.isnan(value):
            return "not measured"
        if math.isinf(self.most) and math.isinf(self.least):
            return "reported"
        return "met" if self.least <= value <= self.most else "**missed**"

    def command(self, machine: str) -> str:
        """What measures it there."""
        if ".py" in self.by:
            return f"python benchmarks/{self.by}"
        if self.by not in FAMILIES:
            return self.by
        return (
            "lambdahat bench --peers"
            + (" --device cuda" if machine == H200 else "")
            + f" --only {self.by}"
        )


def curvature() -> Iterator[Figure]:
    """Products with curvature matrices, and what is estimated from them."""
    tasks = {
        "HVP": ("products", {"mlp": 1.4, "lenet5": 2.4}),
        "GGN product": ("products", {"mlp": 1.1, "lenet5": 2.2}),
        "trace to 1 %": ("estimates", {"mlp": 3.0, "lenet5": 8.0}),
        "top-10 eigenvalues": ("estimates", {"mlp": 45.0, "lenet5": 110.0}),
        "density, depth 100": ("estimates", {"mlp": 160.0, "lenet5": 260.0}),
    }
    for work, (family, bounds) in tasks.items():
        for case, most in bounds.items():
            goal = f"{work}, {case}: at most {most:g} gradients on the CPU"
            yield Figure("curvature", goal, family, cost(work, case), most=most)
    density = "density, depth 100"
    yield Figure(
        "curvature", "memory of Lanczos, 100 deep, mlp", "estimates", memory(density, "mlp"), " MiB"
    )
    goal = "HVP, mlp, 8,192 images on the H200: at least 10 times as fast as curvlinops"
    yield Figure(
        "curvature", goal, "products", faster("HVP", "mlp", "curvlinops"), "×", least=10, on=H200
    )
    for work in ("HVP", "GGN product"):
        goal, read = (
            f"{work}, vgg16 on the H200, float32: no slower than curvlinops",
            faster(work, "vgg16", "curvlinops"),
        )
        yield Figure("curvature", goal, "products", read, "×", least=1, on=H200, where=(H200,))
    for case, most in (("vgg16", 14.0), ("vgg16, TF32", 8.0)):
        goal = f"{density}, {case}, on the H200: under {most:g} s"
        yield Figure(
            "curvature",
            goal,
            "estimates",
            seconds(density, case),
            " s",
            most,
            on=H200,
            where=(H200,),
        )
    settings: dict[str, Any] = {"on": H200, "where": (H200,)}
    for case in ("resnet50", "vit_b_16", "gpt2"):
        goal, read = f"HVP, {case}, TF32, on the H200: at most 2.5 gradients", cost("HVP", case)
        yield Figure("curvature", goal, "networks", read, most=2.5, **settings)
        read = ratio(memory("HVP", case), memory("HVP", case, UNIT))
        goal = f"HVP, {case}, TF32, on the H200: at most 3 times the gradient's memory"
        yield Figure("curvature", goal, "networks", read, "×", most=3.0, **settings)
    for case in ("vit_b_16", "gpt2"):
        work = "top-3 eigenvalues to 1e-3"
        goal, read = f"{work}, {case}, TF32, on the H200: under 12 s", seconds(work, case)
        yield Figure("curvature", goal, "networks", read, " s", most=12.0, **settings)
    for axis in ("data", "parameters", "depth"):
        read = filed({CPU: "scaling-cpu"}, "exponent", axis=axis)
        yield Figure(
            "curvature", f"time linear in {axis}: the exponent", "scaling.py", read, where=(CPU,)
        )
    goal = "the demo, the NGD paper in miniature: under two minutes"
    yield Figure(
        "curvature",
        goal,
        "time make demo",
        filed({CPU: "demo-cpu"}, "seconds", work="demo"),
        " s",
        120,
        where=(CPU,),
    )


def degeneracy() -> Iterator[Figure]:
    """Chains, and the learning coefficient."""
    files = {
        "mlp": {CPU: "sampling-cpu", H200: "sampling_cuda"},
        "lenet5": {CPU: "sampling_lenet_cpu", H200: "sampling_lenet_cuda"},
    }
    for case, names in files.items():
        older = filed(names, "gradients", case=case, chains=4, by="lambdahat, auto")
        goal, read = (
            f"chain-step, {case}, 4 chains: at most 1.15 gradients on the CPU",
            f"{case}, 4 chains",
        )
        yield Figure(
            "sampling",
            goal,
            "chains",
            cost("chain-step", read),
            most=1.15,
            older=("sampling.py", older),
        )
    for case, chains, least in (("mlp", 4, 25.0), ("mlp", 32, 80.0), ("lenet5", 32, 14.0)):
        older = filed(
            files[case], "devinterp over it", case=case, chains=chains, by="lambdahat, auto"
        )
        goal = (
            f"chain-step, {case}, {chains} chains on the H200: at least {least:g} times as fast as"
            " devinterp"
        )
        read = faster("chain-step", f"{case}, {chains} chains", "devinterp")
        where = (CPU, H200) if chains == 4 else (H200,)
        yield Figure(
            "sampling",
            goal,
            "chains",
            read,
            "×",
            least=least,
            on=H200,
            where=where,
            older=("sampling.py", older),
        )
    results = {CPU: "llc_cost_cpu", H200: "llc_cost_cuda"}
    for unit, machine in (("samples", CPU), ("seconds", H200)):
        goal = f"λ̂ of the MNIST MLP to 5 %, in {unit}: at least 5 times as cheap as devinterp"
        read = filed({machine: results[machine]}, "ratio", by="least", setting=f"{unit} to 5 %")
        yield Figure(
            "sampling", goal, "llc_cost.py", read, "×", least=5.0, on=machine, where=(machine,)
        )
    for chains in (4, 32):
        goal = f"kinetic step, 784-128-10, {chains} chains on the H200: at most 1.1 of SGLD's"
        read = filed(results, "ratio", by="steps", setting=f"graph, {chains} chains, batch 512")
        yield Figure("sampling", goal, "llc_cost.py", read, most=1.1, on=H200, where=(H200,))
    read = faster("λ̂ to 5 %", "least squares, d = 30", "devinterp")
    yield Figure(
        "sampling",
        "λ̂ of least squares to 5 %, compared with devinterp",
        "chains",
        read,
        "×",
        where=(CPU,),
    )


def training() -> Iterator[Figure]:
    """Steps of optimisers."""
    case = "mlp, batch 128"
    for work, most in (("NGD step", 2.2), ("KFAC step", 2.5), ("KFAC step, rank 32", 2.5)):
        goal = f"{work}, {case}: at most {most:g} steps of SGD on the CPU"
        yield Figure("training", goal, "optimizers", cost(work, case), most=most)
    goal, read = "NGD step on the H200: at most 1.0 ms", seconds("NGD step", case, 1e3)
    yield Figure("training", goal, "optimizers", read, " ms", 1.0, on=H200)
    goal, read = (
        "NGD steps of ten seeds together on the H200: at most 2 of one",
        cost("NGD step of ten seeds", case),
    )
    yield Figure("training", goal, "optimizers", read, most=2.0, on=H200, where=(H200,))


def determinants() -> Iterator[Figure]:
    """Log-determinants, on two CPU cores."""
    case = "Laplacian, n = 1,000,000"
    goal, read = (
        "log det of a Laplacian of 10⁶ rows to 0.02 %: under 15 s",
        seconds("log-determinant to 0.02 %", case),
    )
    older = "logdet.py", filed({CPU: "logdet-matrices"}, "seconds", matrix=case, method="slq")
    yield Figure("determinants", goal, "determinants", read, " s", 15, where=(CPU,), older=older)
    read = faster("log-determinant to 1 %", "Laplacian, n = 32,768", "SciPy")
    yield Figure(
        "determinants",
        "log-determinant, n = 32,768, compared with SuperLU",
        "determinants",
        read,
        "×",
        where=(CPU,),
    )


def graphs() -> Iterator[Figure]:
    """Graphs, on two CPU cores."""
    speed, script = {CPU: "graphs-speed"}, "graphs.py speed"
    goal = "100 moments, 100 probes, road graph of 114,599 nodes: under 10 s"
    read = filed(speed, "seconds", work="100 moments, 100 probes")
    yield Figure("graphs", goal, script, read, " s", 10, where=(CPU,))
    read = faster("100 graph moments", "torus, n = 2,025", "networkx")
    yield Figure(
        "graphs",
        "100 moments, 2,025 nodes, compared with networkx's spectrum",
        "graphs",
        read,
        "×",
        where=(CPU,),
    )
    work = "count of 240 clusters"
    ours, some, every = (
        filed(speed, "seconds", work=work, by=by)
        for by in ("ours", "eigsh, 250 largest of I − L", "eigh, all (numpy)")
    )
    read = faster("cluster count", "240 clusters, n = 7,074", "SciPy")
    yield Figure(
        "graphs",
        f"{work}, compared with eigsh",
        "graphs",
        read,
        "×",
        where=(CPU,),
        older=(script, ratio(some, ours)),
    )
    yield Figure(
        "graphs", f"{work}, compared with eigh", script, ratio(every, ours), "×", where=(CPU,)
    )
    growth, script = {CPU: "graphs-scaling"}, "graphs.py scaling"
    for kind in ("near", "anywhere"):
        read = filed(growth, "CPU seconds", nodes="exponent", neighbours=kind)
        yield Figure(
            "graphs",
            f"time linear in edges, neighbours {kind}: the exponent",
            script,
            read,
            where=(CPU,),
        )
    peak, block = (
        filed(growth, field, neighbours="near", nodes=1599935)
        for field in ("peak of moments, MiB", "a block of 16 vectors, MiB")
    )
    goal = "memory of the moments of 1.6 million nodes: a few vectors a probe"
    yield Figure("graphs", goal, script, ratio(peak, block), " vectors", where=(CPU,))
    for kind in ("plain", "weights", "names"):
        goal = (
            f"edges by the million ({kind}) stream in without doubling memory: peak over graph and"
            " names"
        )
        read = filed({CPU: "graphs-reading"}, "times the graph", kind=kind)
        yield Figure("graphs", goal, "graphs.py reading", read, most=2, where=(CPU,))


def table(folder: Path = RESULTS) -> str:
    """The whole table, as Markdown."""
    stored = Stored(folder)
    figures = (*curvature(), *degeneracy(), *training(), *determinants(), *graphs())
    return markdown_table(HEADER, [figure.line(stored) for figure in figures]).rstrip()


def written(page: str, folder: Path = RESULTS) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table(folder)}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
