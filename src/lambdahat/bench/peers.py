"""The peers, each in its fastest supported use, behind the same calls as ours.

``hvp``, ``ggn`` and ``block`` build an operator and return its product, of a flat vector (P,) or a
block (P, k); ``trace``, ``top_eigenvalues`` and ``density`` do the whole computation, set-up
included. A density is (points, masses) with masses that sum to one. What a peer lacks is None. A
peer is imported when it is used: one that is missing or broken raises there, and its row says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from lambdahat.bench.problems import LOSS, BenchCase

Product = Callable[[Tensor], Tensor]


class Traced(NamedTuple):
    """A stochastic trace, and its standard error where the peer's samples show it."""

    value: float
    stderr: float | None = None


def installed_version(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


class Peer:
    """A library that does some of the work.

    ``exact_trace`` says that its trace needs no products, ``steps_given`` that its eigenvalues take
    a number of steps.
    """

    name: ClassVar[str] = ""
    module: ClassVar[str] = ""
    package: ClassVar[str] = ""
    exact_trace = False
    steps_given = False
    hvp: Any = None
    ggn: Any = None
    block: Any = None
    trace: Any = None
    top_eigenvalues: Any = None
    density: Any = None
    kfac: Any = None

    def load(self, name: str = "") -> Any:
        """The module of the peer, or one inside it."""
        return import_module(f"{self.module}.{name}" if name else self.module)


class Curvlinops(Peer):
    """Its density is smoothed Lanczos without reorthogonalisation, after eigsh for the ends."""

    name = module = "curvlinops"
    package = "curvlinops-for-pytorch"

    def _operator(self, kind: str, case: BenchCase, **options: Any) -> Any:
        about = (case.model, LOSS, case.parameters, case.batches)
        return getattr(self.load(), kind)(*about, check_deterministic=False, **options)

    def hvp(self, case: BenchCase) -> Product:
        return self._operator("HessianLinearOperator", case).__matmul__  # type: ignore[no-any-return]

    block = hvp

    def ggn(self, case: BenchCase) -> Product:
        return self._operator("GGNLinearOperator", case).__matmul__  # type: ignore[no-any-return]

    def trace(self, case: BenchCase, products: int) -> Traced:
        """Its XTrace, the best of its estimators at a given number of products."""
        torch.manual_seed(0)
        operator = self._operator("HessianLinearOperator", case)
        return Traced(float(self.load().xtrace(operator, products)))

    def top_eigenvalues(self, case: BenchCase, k: int) -> Tensor:
        operator = self._operator("HessianLinearOperator", case).to_scipy()
        return torch.as_tensor(eigsh(operator, k=k, which="LA", tol=1e-6)[0]).flip(0)

    def density(self, case: BenchCase, depth: int) -> tuple[Tensor, Tensor]:
        operator = self._operator("HessianLinearOperator", case)
        # of the plot
        grid, density = self.load().lanczos_approximate_spectrum(operator, depth, margin=0.0)
        return grid, density / density.sum()

    def kfac(self, case: BenchCase, gradient: Tensor, damping: float) -> Tensor:
        """Exact Fisher, weight and bias in one block, (K + δI)⁻¹ by eigendecompositions."""
        exact = {"fisher_type": "type-2", "separate_weight_and_bias": False}
        operator, make = self._operator("KFACLinearOperator", case, **exact), self.load()
        settings = {"damping": damping, "use_exact_damping": True}
        inverse = make.KFACInverseLinearOperator(operator, **settings)
        return torch.as_tensor(inverse @ gradient)


class HessianEigenthings(Peer):
    """It weighs batches equally, so batches have one size; Lanczos runs ``steps`` steps."""

    steps_given = True
    name = package = "hessian-eigenthings"
    module = "hessian_eigenthings"

    def _operator(self, case: BenchCase) -> Any:
        he = self.load()
        return he.HessianOperator(case.model, case.batches, he.supervised_loss(LOSS))

    def hvp(self, case: BenchCase) -> Product:
        return self._operator(case).matvec  # type: ignore[no-any-return]

    def ggn(self, case: BenchCase) -> Product:
        he = self.load()
        loss = he.supervised_loss_of_output(LOSS)
        return he.GGNOperator(case.model, case.batches, he.supervised_forward, loss).matvec  # type: ignore[no-any-return]

    def trace(self, case: BenchCase, products: int) -> Traced:
        """Its Hutch++."""
        found = self.load().trace(self._operator(case), num_matvecs=products, seed=0)
        return Traced(found.estimate)

    def top_eigenvalues(self, case: BenchCase, k: int, steps: int) -> Tensor:
        settings = {"k": k, "max_iter": steps, "tol": 1e-6, "which": "LA", "seed": 0}
        found = self.load().lanczos(self._operator(case), **settings, reorthogonalize=True)
        return torch.as_tensor(found.eigenvalues)

    def density(self, case: BenchCase, depth: int) -> tuple[Tensor, Tensor]:
        settings = {"num_runs": 1, "lanczos_steps": depth, "seed": 0}
        result = self.load().spectral_density(self._operator(case), **settings)
        return result.raw_eigenvalues[0], result.raw_weights[0]


class PyHessian(Peer):
    """With one batch it keeps the gradient's graph between products; with several it recomputes.

    Its eigenvalues are the largest in magnitude. Its density calls torch.eig, which torch has
    removed, so that one function is supplied here.
    """

    name = package = "PyHessian"
    module = "pyhessian"

    def _hessian(self, case: BenchCase) -> Any:
        data = {"data": case.batches[0]} if len(case.batches) == 1 else {"dataloader": case.batches}
        hessian = self.load().hessian(case.model, LOSS, cuda=case.device.type == "cuda", **data)
        case.model.zero_grad()
        return hessian

    def hvp(self, case: BenchCase) -> Product:
        hessian, product = self._hessian(case), self.load("utils").hessian_vector_product

        def run(v: Tensor) -> Tensor:
            pieces = v.split([p.numel() for p in hessian.params])
            parts = [piece.view_as(p) for piece, p in zip(pieces, hessian.params, strict=True)]
            if len(case.batches) == 1:
                parts = product(hessian.gradsH, hessian.params, parts)
            else:
                parts = hessian.dataloader_hv_product(parts)[1]
            return torch.cat([part.reshape(-1) for part in parts])

        return run

    def trace(self, case: BenchCase, products: int) -> Traced:
        """Hutchinson's, without its early stopping, which compares running means."""
        torch.manual_seed(0)
        samples = torch.tensor(self._hessian(case).trace(maxIter=products, tol=0.0))
        return Traced(float(samples.mean()), float(samples.std()) / products**0.5)

    def top_eigenvalues(self, case: BenchCase, k: int) -> Tensor:
        torch.manual_seed(0)
        return torch.tensor(self._hessian(case).eigenvalues(maxIter=100, tol=1e-6, top_n=k)[0])

    def density(self, case: BenchCase, depth: int) -> tuple[Tensor, Tensor]:
        def eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
            values, vectors = torch.linalg.eigh(matrix)
            return values[:, None], vectors

        torch.manual_seed(0)
        with mock.patch.object(torch, "eig", eig, create=True):
            nodes, weights = self._hessian(case).density(iter=depth, n_v=1)
        return torch.tensor(nodes[0]), torch.tensor(weights[0])


class Backpack(Peer):
    """The exact diagonal of the Hessian, from one extended backward pass a batch."""

    name, module, package = "BackPACK", "backpack", "backpack-for-pytorch"
    exact_trace = True

    def trace(self, case: BenchCase, products: int) -> Traced:
        backpack, extension = self.load(), self.load("extensions").DiagHessian()
        model, loss = (backpack.extend(copy.deepcopy(part)) for part in (case.model, LOSS))
        total = 0.0
        for x, y in case.batches:
            model.zero_grad()
            with backpack.backpack(extension):
                loss(model(x), y).backward()
            traces = sum(float(p.diag_h.sum()) for p in model.parameters())
            total += traces * len(y) / case.num_samples
        return Traced(total, 0.0)


PEERS: tuple[Peer, ...] = (Curvlinops(), HessianEigenthings(), PyHessian(), Backpack())
VERSIONS = {"linear_operator": "linear-operator", "SciPy": "scipy"}
VERSIONS |= {name: name for name in ("devinterp", "networkx")}
