"""The feed-forward rank bound of the Hessian, a claim to hold measured ranks against."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lambdahat._core.check import message, require
from lambdahat.problem import Problem, require_problem
from lambdahat.results import Result


@dataclass(frozen=True)
class RankBound(Result):
    """``bound`` = 4·d_y·(ΣN_l + d_x) beside the number of ``parameters`` P."""

    bound: int
    parameters: int
    inputs: int
    outputs: int
    neurons: int

    @property
    def degeneracy(self) -> float:
        """The least share of zero eigenvalues that the bound implies, max(0, 1 − bound/P)."""
        return max(0.0, 1.0 - self.bound / self.parameters)


def rank_bound(problem: Problem) -> RankBound:
    """The bound 4·d_y·(ΣN_l + d_x) on the Hessian's rank (§3.2 of "Flatness is a False Friend").

    N_l counts the neurons of layer l, the output layer included, as in the paper's figure for
    VGG-16 (13,416 neurons); d_x and d_y are inputs and outputs. A claim to check, not a theorem for
    ReLU networks: at random initialisation the rank can be near P where the bound is half of it.
    Compare it with ``Spectrum.degeneracy``. Only chains of linear layers are counted; others are
    refused by name.
    """
    require_problem(problem)
    if (model := problem.model) is None:
        got, cure = "one made by from_function", "its neurons are counted"
        raise ValueError(message("the problem", "have a model", got, cure))
    layers = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    strange = sorted({type(layer).__name__ for layer in layers if not isinstance(layer, nn.Linear)})
    expected = "have parameters in Linear layers only, a feed-forward network"
    got = f"parameters in {', '.join(strange)}"
    require(not strange, "the model", expected, got, "the bound is stated for no other")
    chain = [layer for layer in layers if isinstance(layer, nn.Linear)]
    linked = all(first.out_features == second.in_features for first, second in pairwise(chain))
    got = " then ".join(f"{layer.in_features} → {layer.out_features}" for layer in chain)
    require(linked, "the model", "be a chain of Linear layers, each fed by the one before", got)
    inputs, outputs = chain[0].in_features, chain[-1].out_features
    neurons = sum(layer.out_features for layer in chain)
    bound = 4 * outputs * (neurons + inputs)
    return RankBound(bound, problem.num_parameters, inputs, outputs, neurons)
