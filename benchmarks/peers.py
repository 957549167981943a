"""Adaptors to the peers, each in its fastest supported use; one that is missing or broken is skipped, with the reason.

All take ``(model, loss, batches)``. ``hvp`` and ``ggn`` build an operator and return its product, flat vector to flat
vector; ``trace``, ``top_eigenvalues`` and ``density`` do the whole computation, set-up included. A density is a pair
(points, masses) with masses that sum to one. What a peer lacks is None.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from unittest import mock

import torch
from scipy.sparse.linalg import eigsh

PROBES = 99  # products given to each peer's stochastic trace


class Peer:
    name = module = ""
    hvp = ggn = trace = top_eigenvalues = density = None

    def available(self) -> bool:
        try:
            import_module(self.module)
        except Exception as error:  # a peer may break in any way on a torch newer than itself
            print(f"{self.name}: skipped, {type(error).__name__}: {error}")
            return False
        return True


class Curvlinops(Peer):
    """Its density is smoothed, from Lanczos without reorthogonalisation after an eigsh for the boundaries."""

    name = module = "curvlinops"

    def _operator(self, kind, model, loss, batches):
        make = getattr(import_module("curvlinops"), kind)
        return make(model, loss, list(model.parameters()), batches, check_deterministic=False)

    def hvp(self, *problem):
        return self._operator("HessianLinearOperator", *problem).__matmul__

    def ggn(self, *problem):
        return self._operator("GGNLinearOperator", *problem).__matmul__

    def trace(self, *problem):
        """One probe a call: a block of 99 goes through vmap and needs 99 times the memory."""
        operator, estimate = self._operator("HessianLinearOperator", *problem), import_module("curvlinops")
        return sum(estimate.hutchinson_trace(operator, 1).item() for _ in range(PROBES)) / PROBES

    def top_eigenvalues(self, *problem, k=10, tol=1e-6):
        operator = self._operator("HessianLinearOperator", *problem).to_scipy()
        return torch.as_tensor(eigsh(operator, k=k, which="LA", tol=tol)[0]).flip(0)

    def density(self, *problem, depth=100):
        operator = self._operator("HessianLinearOperator", *problem)
        grid, density = import_module("curvlinops").lanczos_approximate_spectrum(operator, depth)
        return grid, density / density.sum()


class HessianEigenthings(Peer):
    """It weighs batches equally, so the benchmarks use batches of one size. Lanczos runs a set number of steps."""

    name, module = "hessian-eigenthings", "hessian_eigenthings"

    def _operator(self, model, loss, batches):
        he = import_module(self.module)
        return he.HessianOperator(model, batches, he.supervised_loss(loss))

    def hvp(self, *problem):
        return self._operator(*problem).matvec

    def ggn(self, model, loss, batches):
        he = import_module(self.module)
        return he.GGNOperator(model, batches, he.supervised_forward, he.supervised_loss_of_output(loss)).matvec

    def trace(self, *problem):
        return import_module(self.module).trace(self._operator(*problem), num_matvecs=PROBES, seed=0).estimate

    def top_eigenvalues(self, *problem, k=10, tol=1e-6):
        settings = {"k": k, "max_iter": 8 * k, "tol": tol, "which": "LA", "reorthogonalize": True, "seed": 0}
        return import_module(self.module).lanczos(self._operator(*problem), **settings).eigenvalues

    def density(self, *problem, depth=100):
        settings = {"num_runs": 1, "lanczos_steps": depth, "seed": 0}
        result = import_module(self.module).spectral_density(self._operator(*problem), **settings)
        return result.raw_eigenvalues[0], result.raw_weights[0]


class PyHessian(Peer):
    """With one batch it keeps the gradient's graph between products; with several it recomputes.

    Its eigenvalues are the largest in magnitude. Its density calls torch.eig, which torch has removed, so that one
    function is supplied here.
    """

    name = module = "pyhessian"

    def _hessian(self, model, loss, batches):
        data = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
        warnings.filterwarnings("ignore", message="Using backward")  # of a reference cycle, which zero_grad breaks
        hessian = import_module("pyhessian").hessian(model, loss, cuda=batches[0][0].is_cuda, **data)
        model.zero_grad()
        return hessian

    def hvp(self, model, loss, batches):
        hessian = self._hessian(model, loss, batches)
        product = import_module("pyhessian.utils").hessian_vector_product

        def run(v):
            pieces = v.split([p.numel() for p in hessian.params])
            parts = [piece.view_as(p) for piece, p in zip(pieces, hessian.params, strict=True)]
            one = len(batches) == 1
            parts = product(hessian.gradsH, hessian.params, parts) if one else hessian.dataloader_hv_product(parts)[1]
            return torch.cat([part.reshape(-1) for part in parts])

        return run

    def trace(self, *problem):
        samples = self._hessian(*problem).trace(maxIter=PROBES)
        return sum(samples) / len(samples)

    def top_eigenvalues(self, *problem, k=10, tol=1e-6):
        return torch.tensor(self._hessian(*problem).eigenvalues(maxIter=100, tol=tol, top_n=k)[0])

    def density(self, *problem, depth=100):
        def eig(matrix, eigenvectors):
            values, vectors = torch.linalg.eigh(matrix)
            return values[:, None], vectors

        with mock.patch.object(torch, "eig", eig, create=True):
            nodes, weights = self._hessian(*problem).density(iter=depth, n_v=1)
        return torch.tensor(nodes[0]), torch.tensor(weights[0])


PEERS = (Curvlinops(), HessianEigenthings(), PyHessian())
