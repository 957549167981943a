"""lambdahat behind the same calls as the peers (see peers.py)."""

from __future__ import annotations

from importlib import import_module

import torch
from peers import Peer


class Lambdahat(Peer):
    name = module = "lambdahat"

    def _operator(self, kind, *problem):
        lh = import_module(self.module)
        return getattr(lh, kind)(lh.Problem(*problem))

    def hvp(self, *problem):
        return self._operator("hessian", *problem).__matmul__

    def ggn(self, *problem):
        return self._operator("ggn", *problem).__matmul__

    def trace(self, *problem):
        return float(import_module(self.module).trace(self._operator("hessian", *problem), method="exact"))

    def top_eigenvalues(self, *problem, k=10, tol=1e-7):  # of the largest, for 1e-6 of each
        pairs = import_module(self.module).eigenpairs(self._operator("hessian", *problem), k=k, tol=tol)
        return torch.as_tensor(pairs.values)

    def density(self, *problem, depth=100):
        operator = self._operator("hessian", *problem)
        spectrum = import_module(self.module).spectrum(operator, depth=depth, probes=1, seed=0)
        return torch.as_tensor(spectrum.nodes).flatten(), torch.as_tensor(spectrum.weights).flatten()
