"""Rows of the benchmark: products, estimates, real networks, determinants, optimisers, graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.polynomial.chebyshev import chebvander
from scipy.sparse.linalg import eigsh, splu
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from lambdahat._core.rng import generator
from lambdahat.bench import problems
from lambdahat.bench.chain_rows import import_transformers
from lambdahat.bench.limits import Limit
from lambdahat.bench.peers import Peer, Traced
from lambdahat.bench.plans import Plan, rows
from lambdahat.bench.problems import BenchCase
from lambdahat.bench.records import OURS, UNIT, BenchRow
from lambdahat.bench.timing import Maker, Run, Timed
from lambdahat.estimators import eigenpairs, logdet, spectrum, trace
from lambdahat.experiments.graph_spectra.graph_subjects import planted_graph
from lambdahat.experiments.logdets.logdet_moments import laplacian
from lambdahat.graphs.cluster_counts import clusters
from lambdahat.graphs.read import graph
from lambdahat.graphs.spectra import COLUMNS, components, probed_moments
from lambdahat.graphs.structure import Graph, csr_tensor
from lambdahat.models import gpt, mlp, preresnet, resnet50
from lambdahat.operators.curvature import ggn, hessian
from lambdahat.operators.kronecker import kfac
from lambdahat.operators.matrix import operator
from lambdahat.optim import KFAC, NGD
from lambdahat.problem import Problem
from lambdahat.results import Array
from lambdahat.training.ensembles import DEFAULTS, StackedDescent, StackedModel, StackedStep

TOP, ACCURACY = 10, 0.01
PROBES = 16  # of a trace whose error falls as 1/√probes: its time is scaled to the accuracy
# products of a trace whose error falls faster: the first that is accurate is timed
LADDER = (8, 16, 32, 64, 128)
# Lanczos steps for each eigenvalue, likewise, and what is accurate in float32
STEPS, NEAR = (2, 3, 4, 6, 8), 1e-5


def estimate_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Traces, eigenvalues and densities; LeNet-5 without peers, which take minutes on a CPU."""
    for name in ("mlp", "lenet5", "tanh"):
        yield trace_rows(plan, plan.case(name))
    for name in ("mlp",) if plan.quick else ("mlp", "lenet5"):
        alone = name == "lenet5" and not plan.gpu
        truth = problems.top_eigenvalues(plan.case(name), 3 if plan.quick else TOP)
        yield _eigenvalue_rows(plan, plan.case(name), truth, alone)
        yield _density_rows(plan, plan.case(name), float(truth[0]), alone)
    if plan.gpu and not plan.quick:
        case = plan.case("vgg16")
        yield _density_rows(plan, case, math.nan, alone=True)
        with _tf32():
            found = _density_rows(plan, replace(case, name="vgg16, TF32"), math.nan, alone=True)
        yield found


def trace_rows(plan: Plan, case: BenchCase) -> list[BenchRow]:
    """tr H with a standard error of one per cent, which is a 95 % interval of 1.96 per cent either
    side.

    A peer does not know when to stop. Where it samples, its time of a few probes is scaled to a
    standard error of one per cent. Else it is given 8, 16, 32, … products until the answer is
    within one per cent of the truth, and only the last run counts: nobody without the truth would
    be as quick.
    """
    truth = problems.trace(case)
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient}

    def ours() -> Traced:
        return Traced(float(trace(hessian(case.problem()), tol=1.96 * ACCURACY)))

    makers[OURS] = lambda: ours
    notes: dict[str, str] = {}
    for peer in plan.able("trace"):
        makers[peer.name] = partial(_peer_trace, peer, case, truth, notes, plan.quick)
    timed = plan.timed(makers)
    for name, one in timed.items():
        if isinstance(one.value, Traced) and one.value.stderr:
            # the time of as many probes as bring the standard error to the accuracy
            factor = max((one.value.stderr / (ACCURACY * abs(truth))) ** 2, 1 / PROBES)
            notes[name] = f"{PROBES} probes timed, scaled to {math.ceil(factor * PROBES):,}"
            timed[name] = replace(one, seconds=one.seconds * factor, cost=one.cost * factor)

    def error(found: Traced) -> float:
        return ACCURACY if found.stderr else abs(found.value / truth - 1)

    work = f"trace to {ACCURACY * 100:.0f} %"
    # an answer three standard errors off would be a fault, one would not
    return rows(work, case.name, timed, error, 3 * ACCURACY, plan.limit(work, case), notes)


def _peer_trace(
    peer: Peer, case: BenchCase, truth: float, notes: dict[str, str], quick: bool
) -> Callable[[], Traced]:
    if peer.exact_trace:
        return partial(peer.trace, case, 0)
    for products in LADDER[:3] if quick else LADDER:
        found = peer.trace(case, products)
        if found.stderr is not None:
            return partial(peer.trace, case, PROBES)
        if abs(found.value / truth - 1) <= ACCURACY:
            break
    else:
        notes[peer.name] = f"{products} products, not within {ACCURACY:.0%} yet"
        return partial(peer.trace, case, products)
    notes[peer.name] = f"{products} products"
    return partial(peer.trace, case, products)


def _eigenvalue_rows(plan: Plan, case: BenchCase, truth: Tensor, alone: bool) -> list[BenchRow]:
    top = len(truth)

    def ours() -> Tensor:
        # a residual of 1e-7 of the largest gives each to about 1e-6
        return torch.as_tensor(eigenpairs(hessian(case.problem()), k=top, tol=1e-7).values)

    def error(found: Tensor) -> float:
        return float((found.cpu().double() / truth - 1).abs().max())

    notes: dict[str, str] = {}

    def peers_own(peer: Peer) -> Callable[[], Tensor]:
        """Give a peer without a stopping rule ever more steps until it is near the truth."""
        if not peer.steps_given:
            return partial(peer.top_eigenvalues, case, top)
        for steps in STEPS:
            run = partial(peer.top_eigenvalues, case, top, steps * top)
            if error(run()) <= NEAR:
                break
        notes[peer.name] = f"{steps * top} steps"
        return run

    timed = _against(plan, case, "top_eigenvalues", ours, alone, peers_own)
    work = f"top-{top} eigenvalues"
    return rows(work, case.name, timed, error, 1e-4, plan.limit(work, case), notes)


def _density_rows(plan: Plan, case: BenchCase, truth: float, alone: bool) -> list[BenchRow]:
    """One probe, judged by the error of its upper end against λ₁; the rest is chance."""
    depth = 20 if plan.quick else 100

    def ours() -> tuple[Tensor, Tensor]:
        found = spectrum(hessian(case.problem()), depth=depth, probes=1, seed=0)
        return torch.as_tensor(found.nodes).flatten(), torch.as_tensor(found.weights).flatten()

    def error(found: tuple[Tensor, Tensor]) -> float:
        points, masses = (part.cpu().double() for part in found)
        return abs(float(points[masses > 0].max()) / truth - 1)

    def peers_own(peer: Peer) -> Run:
        return partial(peer.density, case, depth)

    timed = _against(plan, case, "density", ours, alone, peers_own)
    work = f"density, depth {depth}"
    least = plan.limit(work, case, depth, "HVP")
    if torch.backends.cudnn.allow_tf32:  # the rates of the machine are those of float32
        least = Limit(least.units, least.why)
    return rows(work, case.name, timed, least=least, error=error)


@contextmanager
def _tf32() -> Iterator[None]:
    """Allow TF32 in products and convolutions inside; the benchmark forbids it elsewhere."""
    flags: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    for flag in flags:
        flag.allow_tf32 = True
    try:
        yield
    finally:
        for flag in flags:
            flag.allow_tf32 = False


def _against(
    plan: Plan,
    case: BenchCase,
    method: str,
    ours: Run,
    alone: bool,
    peers_own: Callable[[Peer], Run],
) -> dict[str, Timed]:
    """Ours and, unless ``alone``, the peers that have the method."""
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient, OURS: lambda: ours}
    for peer in [] if alone else plan.able(method):
        makers[peer.name] = partial(peers_own, peer)
    return plan.timed(makers)


BLOCK = 8
WORKS = {"hvp": "HVP", "ggn": "GGN product", "block": f"HVP, block of {BLOCK}"}


def product_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Each product on each network."""
    networks = ("mlp", "lenet5") if plan.quick or not plan.gpu else ("mlp", "lenet5", "vgg16")
    for name in networks:
        for work in WORKS:
            if not (work == "block" and name == "vgg16"):
                yield _product_rows(plan, plan.case(name), work)


def _product_rows(plan: Plan, case: BenchCase, work: str) -> list[BenchRow]:
    block = work == "block"
    shape = (case.num_parameters, BLOCK) if block else (case.num_parameters,)
    v = torch.randn(shape, generator=generator(0, "bench vector")).to(case.device)
    operator = {"hvp": hessian, "ggn": ggn, "block": hessian}[work]
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient}
    makers[OURS] = lambda: partial(operator(case.problem()).__matmul__, v)
    for peer in plan.able(work):
        makers[peer.name] = partial(lambda make: partial(make(case), v), getattr(peer, work))
    timed = plan.timed(makers, long=case.name == "vgg16")
    kind = "GGN product" if work == "ggn" else "HVP"
    least = plan.limit(WORKS[work], case, BLOCK if block else 1, kind)
    error = _error(case, work, v[:, 0] if block else v)
    return rows(WORKS[work], case.name, timed, error, 1e-3, least)


def _error(case: BenchCase, work: str, v: Tensor) -> Callable[[Tensor], float]:
    """The relative error of a product, or of a block's first column, against float64."""
    reference = problems.gauss_newton_product if work == "ggn" else problems.product
    truth = reference(problems.double(case), v.double())

    def error(found: Tensor) -> float:
        first = found[:, 0] if found.ndim == 2 else found
        return float((first.double() - truth).norm() / truth.norm())

    return error


class NextToken(nn.Module):
    """The logits (B, V, T − 1) of the tokens that follow, from a language model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.model(tokens)
        logits: Tensor = getattr(found, "logits", found)
        return logits[:, :-1].transpose(1, 2)


def _gpt2() -> nn.Module:
    transformers = import_transformers()
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return NextToken(transformers.GPT2LMHeadModel(transformers.GPT2Config(**quiet)))


def _vit_b_16() -> nn.Module:
    try:
        return cast(nn.Module, import_module("torchvision.models").vit_b_16())
    except RuntimeError as error:  # of its import: its operators are not registered
        raise ImportError("torchvision was built for another torch", name="torchvision") from error


class Network(NamedTuple):
    """A network, and the shape and the number of values of a sample: pixels, or tokens."""

    make: Callable[[], Any]
    shape: tuple[int, ...]
    classes: int
    samples: int


NETWORK_BLOCK, TOP_NETWORK = 4, 3
TINY_GPT: dict[str, Any] = {"context": 8, "width": 8, "heads": 2, "blocks": 2}
SMALL_NETWORKS = {
    "small resnet": Network(lambda: preresnet(depth=11), (3, 16, 16), 10, 4),
    "small gpt": Network(lambda: NextToken(gpt(32, **TINY_GPT)), (8,), 32, 4),
}
REAL_NETWORKS = {
    "resnet50": Network(resnet50, (3, 224, 224), 1000, 64),
    "vit_b_16": Network(_vit_b_16, (3, 224, 224), 1000, 64),
    "gpt2": Network(_gpt2, (256,), 50257, 8),
}


def network_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Products and the largest eigenvalues of real networks at initialisation, one batch of data.

    In TF32 on a GPU; with fewer samples and without eigenvalues on a CPU, where they take an hour.
    ViT-B/16 needs torchvision and GPT-2 transformers; without them a row says so.
    """
    for name, kind in (SMALL_NETWORKS if plan.quick else REAL_NETWORKS).items():
        try:
            model = kind.make().to(plan.device).eval()
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            absent = isinstance(error, ModuleNotFoundError)
            why = f"{package} is not installed" if absent else str(error)
            yield rows("HVP", name, {OURS: Timed(note=f"{why}: pip install {package}")})
            continue
        count, rng = kind.samples if plan.gpu else min(kind.samples, 4), generator(0, name)
        if len(kind.shape) == 1:
            x = torch.randint(kind.classes, (count, *kind.shape), generator=rng)
            y = x[:, 1:]
        else:
            x = torch.randn(count, *kind.shape, generator=rng)
            y = torch.randint(kind.classes, (count,), generator=rng)
        case = BenchCase(name, model, [(x.to(plan.device), y.to(plan.device))])
        with _tf32() if plan.gpu else nullcontext():
            for work, (make, vectors, least) in {
                "HVP": (hessian, 1, 2.0),
                "GGN product": (ggn, 1, 4 / 3),
                f"HVP, block of {NETWORK_BLOCK}": (hessian, NETWORK_BLOCK, 2.0 * NETWORK_BLOCK),
            }.items():
                yield _network_products(plan, case, work, make, vectors, Limit(least, "arithmetic"))
            if plan.gpu or plan.quick:
                yield _network_eigenvalues(plan, case)
            if plan.gpu and name == "resnet50":
                yield _network_trace(plan, case)


def _network_products(
    plan: Plan, case: BenchCase, work: str, make: Callable[..., Any], vectors: int, least: Limit
) -> list[BenchRow]:
    """A product beside curvlinops', which is the one peer that takes any network and block."""
    shape = (case.num_parameters,) if vectors == 1 else (case.num_parameters, vectors)
    v = torch.randn(shape, generator=generator(0, "bench vector")).to(case.device)
    makers: dict[str, Maker] = {UNIT: lambda: case.gradient}
    makers[OURS] = lambda: partial(make(case.problem()).__matmul__, v)
    method = "ggn" if make is ggn else "hvp"
    for peer in plan.able("block"):
        makers[peer.name] = partial(lambda peer: partial(getattr(peer, method)(case), v), peer)
    timed = plan.timed(makers)
    (x, y), few = case.batches[0], replace(case, batches=[])
    few.batches.extend(zip(x.split(4), y.split(4), strict=True))
    with sdpa_kernel(SDPBackend.MATH):
        error = _error(few, method, v if vectors == 1 else v[:, 0])
    # single products in TF32 are good to about 1e-3
    accuracy = 0.02 if plan.gpu else 1e-3
    return rows(work, case.name, timed, error, accuracy, Limit() if plan.quick else least)


def _network_eigenvalues(plan: Plan, case: BenchCase) -> list[BenchRow]:
    """The largest eigenvalues to 1e-3; errors are relative to the largest one, from another start
    at a hundredth of the tolerance.
    """

    def top(tol: float, seed: int) -> Any:
        return eigenpairs(hessian(case.problem()), k=TOP_NETWORK, tol=tol, seed=seed)

    def error(found: Any) -> float:
        exact = top(1e-5, 1).values
        return float((found.values - exact).abs().max() / exact.abs().max())

    work = f"top-{TOP_NETWORK} eigenvalues to 1e-3"
    return _alone(plan, case, work, lambda: top(1e-3, 0), error, 2e-3, "products")


def _network_trace(plan: Plan, case: BenchCase) -> list[BenchRow]:
    """tr H to 10 %; the error is the standard error relative to the value."""

    def ours() -> Any:
        return trace(hessian(case.problem()), tol=0.1, seed=0)

    def error(found: Any) -> float:
        return float(found.stderr / abs(found.value))

    return _alone(plan, case, "trace to 10 %", ours, error, 0.1, "rounds")


def _alone(
    plan: Plan,
    case: BenchCase,
    work: str,
    ours: Run,
    error: Callable[[Any], float],
    accuracy: float,
    counted: str,
) -> list[BenchRow]:
    """An estimate without peers, with a note of what it cost."""
    timed = plan.timed({UNIT: lambda: case.gradient, OURS: lambda: ours})
    notes = {} if timed[OURS].note else {OURS: f"{timed[OURS].value.cost:,} {counted}"}
    return rows(work, case.name, timed, error, accuracy, notes=notes)


SHIFT = 0.05


class SolverEffort(NamedTuple):
    """Probes and depth of a stochastic quadrature."""

    probes: int
    depth: int


@dataclass(frozen=True)
class Cube:
    """The Laplacian of a cube of points, an accuracy, and efforts to try, the least first.

    Without efforts it is the call without settings, which stops by itself.
    """

    side: int
    accuracy: float
    ladder: tuple[SolverEffort, ...]


SMALL = Cube(
    32, 1e-2, (SolverEffort(2, 10), SolverEffort(5, 10), SolverEffort(10, 20), SolverEffort(20, 40))
)
LARGE = Cube(100, 2e-4, ())  # beyond n = 10⁵ a factorisation takes minutes


def determinant_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """log det of a cube's Laplacian plus 0.05: one size for the peers, and a million rows."""
    yield _cube_rows(plan, replace(SMALL, side=8) if plan.quick else SMALL, plan.peers)
    yield _cube_rows(plan, replace(LARGE, side=10) if plan.quick else LARGE, False)


def _cube_rows(plan: Plan, cube: Cube, peers: bool) -> list[BenchRow]:
    """The unit is one product with a vector, on the CPU."""
    matrix, values = laplacian((cube.side,) * 3, SHIFT)
    exact = float(np.log(values).sum())
    ours = operator(matrix, psd=True)
    v = torch.randn(ours.dim, generator=generator(0, "bench vector"), dtype=torch.float64)
    makers: dict[str, Maker] = {UNIT: lambda: lambda: ours @ v}
    notes = {"SciPy": "SuperLU, exact"}

    def error(found: Any) -> float:
        return abs(float(found) / exact - 1)

    def chosen(name: str, estimate: Callable[[SolverEffort], Any]) -> Run:
        """The first effort that is near enough."""
        for effort in cube.ladder:
            if error(estimate(effort)) <= cube.accuracy:
                break
        notes[name] = f"{effort.probes} probes, depth {effort.depth}"
        return partial(estimate, effort)

    def mine(effort: SolverEffort) -> Any:
        return logdet(operator(matrix, psd=True), depth=effort.depth, probes=effort.probes)

    makers[OURS] = lambda: chosen(OURS, mine) if cube.ladder else partial(logdet, matrix)
    if peers:
        makers["SciPy"] = lambda: lambda: _factorise(matrix)
        makers["linear_operator"] = lambda: chosen("linear_operator", _quadrature(matrix))
    timed = plan.timed(makers)
    products = timed[OURS].value.cost
    if cube.ladder:  # the least that could do
        products = cube.ladder[0].depth * cube.ladder[0].probes
    else:
        notes[OURS] = f"logdet(matrix): {products} products"
    least = Limit() if plan.quick else Limit(products, "its products")
    work = f"log-determinant to {100 * cube.accuracy:g} %"
    # few probes of a small matrix vary by more
    accuracy = max(cube.accuracy, 0.01) if plan.quick else cube.accuracy
    name = f"Laplacian, n = {cube.side**3:,}"
    return rows(work, name, timed, error, accuracy, least, notes, "product")


def _factorise(matrix: Any) -> float:
    """Σ log|u_ii| of SuperLU with the ordering for symmetric matrices."""
    found = splu(matrix.tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    return float(np.log(np.abs(found.U.diagonal())).sum())


def _quadrature(matrix: Any) -> Callable[[SolverEffort], float]:
    """GPyTorch's, from conjugate gradients."""
    linear = import_module("linear_operator")
    settings = linear.settings
    rows, columns, values = map(torch.as_tensor, (matrix.indptr, matrix.indices, matrix.data))
    sparse = torch.sparse_csr_tensor(rows, columns, values, matrix.shape)

    class Sparse(linear.LinearOperator):  # type: ignore[misc,name-defined]
        def _matmul(self, rhs: Tensor) -> Tensor:
            return sparse @ rhs

        def _size(self) -> torch.Size:
            return torch.Size(matrix.shape)

        def _transpose_nonbatch(self) -> Any:
            return self

    def estimate(effort: SolverEffort) -> float:
        torch.manual_seed(0)
        depths = settings.max_lanczos_quadrature_iterations, settings.max_cg_iterations
        lanczos_steps, cg_steps = (depth(effort.depth) for depth in depths)
        with settings.num_trace_samples(effort.probes), lanczos_steps, cg_steps:
            return float(Sparse(torch.empty(0, dtype=torch.float64)).logdet())

    return estimate


BATCH, DAMPING = 128, 1e-2
OPTIMIZER_STEPS = 40  # whole periods of NGD's 4 and KFAC's 10
SGD = "SGD step"
# in SGD steps, on two CPU cores
GOALS = {"NGD step": 2.2, "KFAC step": 2.5, "KFAC step, rank 32": 2.5}

Optimizers = dict[str, Callable[[nn.Module], Any]]


def optimizer_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Whole training steps of the perceptron on batches of 128, and then KFAC's inverse."""
    sizes = [784, plan.width, plan.width, 10]
    rank = 4 if plan.quick else 80
    factored = partial(KFAC, lr=0.01, damping=DAMPING, inverse_every=10)
    optimizers: Optimizers = {
        SGD: lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        "NGD step": lambda m: NGD(m.parameters(), lr=0.01, rank=rank, period=4),
        "KFAC step": factored,
        "KFAC step, rank 32": partial(factored, rank=32),
    }
    makers: dict[str, Maker] = {
        name: partial(_steps, sizes, make, plan) for name, make in optimizers.items()
    }
    timed = {
        name: replace(one, seconds=one.seconds / _count(plan))
        for name, one in plan.timed(makers, SGD).items()
    }
    for name in GOALS:
        least = Limit() if plan.gpu or plan.quick else Limit(GOALS[name], "our goal")
        both = {UNIT: timed[SGD], OURS: timed[name]}
        yield rows(name, "mlp, batch 128", both, least=least, unit="SGD step")
    yield _inverse_rows(plan)
    if plan.gpu:
        yield _stacked_rows(plan, sizes)


def _count(plan: Plan) -> int:
    """Steps of a run."""
    return 4 if plan.quick else OPTIMIZER_STEPS


def _steps(sizes: list[int], make: Callable[[nn.Module], Any], plan: Plan) -> Run:
    """A function that takes 40 steps; its first call passes the denser first updates."""
    rng = generator(0, "bench batch")
    x = torch.rand(BATCH, sizes[0], generator=rng).to(plan.device)
    y = torch.randint(0, sizes[-1], (BATCH,), generator=rng).to(plan.device)
    model = mlp(sizes).to(plan.device)
    optimizer = make(model)

    def run() -> None:
        for _ in range(_count(plan)):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()

    return run


def _inverse_rows(plan: Plan) -> list[BenchRow]:
    """(K + δI)⁻¹∇L with the exact Fisher's factors, from scratch."""
    case = plan.case("mlp")
    gradient = case.gradient()
    truth = problems.kronecker_solution(case, gradient, DAMPING)

    def ours() -> Tensor:
        found: Tensor = kfac(case.problem()).inverse(DAMPING) @ gradient
        return found

    def error(found: Tensor) -> float:
        return float((found.double() - truth).norm() / truth.norm())

    makers: dict[str, Maker] = {UNIT: lambda: case.gradient, OURS: lambda: ours}
    for peer in plan.able("kfac"):
        makers[peer.name] = partial(partial, peer.kfac, case, gradient, DAMPING)
    return rows("KFAC, factors and inverse", "mlp", plan.timed(makers), error, 1e-2)


def _stacked_rows(plan: Plan, sizes: list[int]) -> list[BenchRow]:
    """Ten seeds of NGD trained together over one: 40 steps with their data, as ``fit_many``."""
    seeds = {UNIT: 1, OURS: 10}
    makers: dict[str, Maker] = {by: partial(_stack, seeds[by], sizes, plan.device) for by in seeds}
    timed = {
        name: replace(one, seconds=one.seconds / OPTIMIZER_STEPS)
        for name, one in plan.timed(makers).items()
    }
    least, unit = Limit(2.0, "our goal"), "step of one seed"
    return rows("NGD step of ten seeds", "mlp, batch 128", timed, least=least, unit=unit)


def _stack(members: int, sizes: list[int], device: str) -> Run:
    rng = generator(0, "bench batch")
    x = torch.rand(OPTIMIZER_STEPS * BATCH, sizes[0], generator=rng).to(device)
    data = x, torch.randint(0, sizes[-1], (len(x),), generator=rng).to(device)
    models = [mlp(sizes, seed=seed).to(device) for seed in range(members)]
    stacked = StackedModel(models, Problem(models[0], "cross_entropy", data))
    settings = {**DEFAULTS["ngd"], "lr": 0.01, "rank": min(80, sizes[1] // 2)}
    descent = StackedDescent(stacked.parameters, "ngd", settings)
    stepped = StackedStep(stacked, descent, data)
    orders = torch.stack([torch.randperm(len(x), generator=rng) for _ in range(members)]).to(device)
    return lambda: stepped.epoch(orders, BATCH)


MOMENTS, GRAPH_PROBES, DENSE = 100, 96, 3000
BLOCK_PRODUCT = f"product with {COLUMNS} vectors"
# eigenvalues that a peer computes beyond the clusters, to see the gap
CLUSTER_MOMENTS, BEYOND = 80, 10


def graph_rows(plan: Plan) -> Iterator[list[BenchRow]]:
    """Moments of a small and a large torus and a cluster count, on the CPU."""
    for side in (12, 16) if plan.quick else (45, 200):
        yield _torus_rows(plan, side)
    yield _cluster_rows(plan, 9 if plan.quick else 240)


def _torus_rows(plan: Plan, side: int) -> list[BenchRow]:
    """The error is the largest over all moments, against the known spectrum."""
    one = graph(torus(side))
    exact = torus_moments(side, MOMENTS)

    def ours() -> Array:
        return probed_moments(one, MOMENTS, GRAPH_PROBES, 0, components(one)).values

    makers: dict[str, Maker] = {UNIT: _block_product(one), OURS: lambda: ours}
    if plan.peers:
        makers["SciPy"] = lambda: lambda: _recurrence(one)
        if len(one) <= DENSE:
            makers["networkx"] = lambda: _all_eigenvalues(one)

    def error(found: Array) -> float:
        return float(np.abs(found - exact).max())

    least = Limit() if plan.quick else Limit(GRAPH_PROBES / COLUMNS * MOMENTS / 2, "its products")
    notes = {"SciPy": f"{GRAPH_PROBES} probes, one product a moment", "networkx": "all eigenvalues"}
    work, name = f"{MOMENTS} graph moments", f"torus, n = {len(one):,}"
    return rows(work, name, plan.timed(makers), error, 0.05, least, notes, BLOCK_PRODUCT)


def _block_product(one: Graph) -> Maker:
    """A product of the normalised adjacency matrix with a block of vectors."""
    matrix, rng = csr_tensor(one.normalized(), torch.float64), generator(0, "bench vector")
    block = torch.randn(len(one), COLUMNS, generator=rng, dtype=torch.float64)
    return lambda: lambda: matrix @ block


def _cluster_rows(plan: Plan, count: int) -> list[BenchRow]:
    """How many clusters a graph of ``count`` planted ones has (Table 3.2, spectral thesis)."""
    one = planted_graph(count, 0.1, 0)
    makers: dict[str, Maker] = {UNIT: _block_product(one)}
    makers[OURS] = lambda: lambda: float(clusters(one, CLUSTER_MOMENTS))
    if plan.peers:
        makers["SciPy"] = lambda: lambda: _largest_gap(one, count + BEYOND)

    def error(found: float) -> float:
        return abs(found / count - 1)

    notes = {"SciPy": f"eigsh with {count + BEYOND} eigenvalues, a number that must be known"}
    name, timed = f"{count} clusters, n = {len(one):,}", plan.timed(makers)
    return rows("cluster count", name, timed, error, 0.05, None, notes, BLOCK_PRODUCT)


def _largest_gap(one: Graph, many: int) -> float:
    """The number of the smallest eigenvalues λ below the largest gap in arccos(1 − λ)."""
    start = torch.randn(len(one), generator=generator(0, "bench vector")).double().numpy()
    values = eigsh(one.normalized(), many, which="LA", v0=start)[0]
    return float(np.argmax(np.diff(np.arccos(np.clip(np.sort(values)[::-1], -1, 1)))) + 1)


def torus(side: int) -> Array:
    """The edges (2·side², 2) of a square grid that closes on itself."""
    numbers = np.arange(side * side).reshape(side, side)
    beside = [np.roll(numbers, -1, axis).ravel() for axis in (0, 1)]
    return np.concatenate([np.stack([numbers.ravel(), each], axis=1) for each in beside])


def torus_moments(side: int, count: int) -> Array:
    """tr T_k(L − I)/n for k = 0 … count: the eigenvalues of L are 1 − (cos a + cos b)/2."""
    waves = np.cos(2 * np.pi * np.arange(side) / side)
    values = -(waves[:, None] + waves) / 2
    return np.asarray(chebvander(values.ravel(), count).mean(axis=0))


def _recurrence(one: Graph) -> Array:
    """T_{k+1} = 2BT_k − T_{k−1} on a block of random signs, B = −D^{−½}WD^{−½}, in SciPy."""
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (len(one), GRAPH_PROBES))
    matrix = -one.normalized()
    before, now = signs, matrix @ signs
    found = [1.0, float((signs * now).mean())]
    for _ in range(MOMENTS - 1):
        before, now = now, 2 * (matrix @ now) - before
        found.append(float((signs * now).mean()))
    return np.array(found)


def _all_eigenvalues(one: Graph) -> Run:
    networkx = import_module("networkx")
    made = networkx.from_scipy_sparse_array(one.adjacency)

    def run() -> Array:
        values = networkx.normalized_laplacian_spectrum(made).real
        return np.asarray(chebvander(values - 1, MOMENTS).mean(axis=0))

    return run
