"""Misuses of sampling and the errors they must get, in the form of ``tests/misuses.py``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lambdahat.results import Chains
from lambdahat.sampling import hmc, kinetic, mala, rmsprop_sgld, sample, sghmc, sgld, sgnht
from lambdahat.sampling.backends.minibatches import SampleLosses
from tests.cases import LanguageModel, sentences
from tests.misuses import MLP, Row, batchnorm, function, net, ones, problem

STEP = sgld(1e-4, 10.0)


def run(given: Any = None, kernel: Any = STEP, **options: Any) -> Chains:
    return sample(MLP if given is None else given, kernel, **{"chains": 2, "draws": 2, **options})


def by_hand(kernel: Any) -> Any:
    return kernel.init(torch.ones(3))


def lopsided(theta: Tensor) -> Tensor:
    return theta[: 1 + int(theta[0] > 0.1)]


SAMPLING: dict[str, Row] = {
    "a model to sample": (
        lambda: run(net()),
        TypeError,
        r"make one with lh\.Problem\(model, loss, data\)",
    ),
    "a kernel's class": (
        lambda: run(kernel=sgld),
        TypeError,
        "kernel must be a kernel such as .*got <class.*rmsprop",
    ),
    "a kernel's name": (
        lambda: run(kernel="sgld"),
        TypeError,
        "kernel must be a kernel such as .*got 'sgld'",
    ),
    "problem and kernel exchanged": (
        lambda: sample(STEP, MLP),
        TypeError,
        "problem must be a lambdahat.Problem",
    ),
    "negative step": (
        lambda: sgld(-1e-4, 10.0),
        ValueError,
        "step_size must be a finite number of at least 0, got -0",
    ),
    "infinite step": (
        lambda: mala(math.inf, 10.0),
        ValueError,
        "step_size must be a finite number",
    ),
    "NaN step": (
        lambda: sghmc(math.nan, 10.0),
        ValueError,
        "step_size must be a finite number of at least 0, got nan",
    ),
    "step as text": (
        lambda: sgld("1e-4", 10.0),
        TypeError,
        "step_size must be a number of at least 0, got '1e-4'",
    ),
    "step as a tensor": (
        lambda: sgld(torch.ones(3), 10.0),
        TypeError,
        r"step_size must be a number of at least 0, got .*\(3,\)",
    ),
    "negative temperature": (
        lambda: hmc(1e-4, -10.0),
        ValueError,
        "nbeta must be a finite number of at least 0",
    ),
    "temperature by name": (
        lambda: sgld(1e-4, "n/log n"),
        TypeError,
        "nbeta must be a number of at least 0, got 'n/log n'",
    ),
    "negative localization": (
        lambda: sgld(1e-4, 10.0, -1.0),
        ValueError,
        "localization must be finite and at least 0",
    ),
    "infinite localization": (
        lambda: sgld(1e-4, 10.0, math.inf),
        ValueError,
        "localization must be finite",
    ),
    "localization as text": (
        lambda: sgld(1e-4, 10.0, "strong"),
        TypeError,
        "localization must be a number, a tensor",
    ),
    "localization as a list": (
        lambda: sgld(1e-4, 10.0, [1.0]),
        TypeError,
        r"a number, a tensor \(P,\), or a dict of",
    ),
    "localization of nobody": (
        lambda: sgld(1e-4, 10.0, {}),
        TypeError,
        "dict of parameter names or globs to numbers",
    ),
    "localization by number": (
        lambda: sgld(1e-4, 10.0, {0: 1.0}),
        TypeError,
        "parameter names or globs to numbers",
    ),
    "localization by None": (
        lambda: sgld(1e-4, 10.0, None),
        TypeError,
        "localization must be a number.*got None",
    ),
    "localization as a matrix": (
        lambda: sgld(1e-4, 10.0, torch.eye(3)),
        ValueError,
        r"localization must be a vector",
    ),
    "NaN in a localization": (
        lambda: sgld(1e-4, 10.0, torch.tensor([math.nan])),
        ValueError,
        "vector .* of finite",
    ),
    "a short localization": (
        lambda: run(kernel=sgld(1e-4, 10.0, torch.ones(3))),
        ValueError,
        r"localization must have shape \(43,\), got Tensor of shape \(3,\)",
    ),
    "localization of unknown names": (
        lambda: run(kernel=sgld(1e-4, 10.0, {"conv.*": 1.0})),
        ValueError,
        r"localization must name parameters, layers or globs.*0\.weight.*got 'conv",
    ),
    "names in a kernel stepped by hand": (
        lambda: by_hand(sgld(1e-4, 10.0, {"0.*": 1.0})),
        ValueError,
        "localization must be a number or a tensor.*lh.sample knows the names",
    ),
    "a short scale": (
        lambda: run(kernel=sgld(1e-4, 10.0, 0.0, torch.ones(3))),
        ValueError,
        r"scale must have shape \(43,\) or \(43, 43\), got",
    ),
    "a number as scale": (
        lambda: sgld(1e-4, 10.0, 0.0, 2.0),
        TypeError,
        r"scale must be a tensor \(P,\) or \(P, P\)",
    ),
    "an asymmetric scale": (
        lambda: sgld(1e-4, 10.0, 0.0, torch.ones(3, 3).triu()),
        ValueError,
        "scale must be symm",
    ),
    "a scale with a zero": (
        lambda: sgld(1e-4, 10.0, 0.0, torch.tensor([1.0, 0.0])),
        ValueError,
        "have no zeros",
    ),
    "a NaN scale": (
        lambda: sgld(1e-4, 10.0, 0.0, torch.full((3,), math.nan)),
        ValueError,
        "scale must be finite",
    ),
    "a scale for RMSprop": (
        lambda: rmsprop_sgld(1e-4, 10.0, 0.0, ones),
        ValueError,
        "scale must be left out: RMSprop",
    ),
    "a scale for a thermostat": (
        lambda: sgnht(1e-4, 10.0, 0.0, ones),
        ValueError,
        "scale must be left out: the therm",
    ),
    "decay above 1": (
        lambda: rmsprop_sgld(1e-4, 10.0, decay=1.1),
        ValueError,
        r"decay must lie in \(0, 1\], got 1\.1",
    ),
    "decay as text": (
        lambda: rmsprop_sgld(1e-4, 10.0, decay="slow"),
        TypeError,
        "decay must be a number in .0, 1., got 'slow'",
    ),
    "epsilon of 0": (
        lambda: rmsprop_sgld(1e-4, 10.0, epsilon=0.0),
        ValueError,
        "epsilon must be a finite number abov",
    ),
    "no friction": (
        lambda: sghmc(1e-4, 10.0, friction=0.0),
        ValueError,
        r"friction must lie in \(0, 1\], got 0\.0",
    ),
    "kinetic without friction": (
        lambda: kinetic(1e-2, 10.0, friction=0.0),
        ValueError,
        r"friction must be above 0, ",
    ),
    "negative kinetic friction": (
        lambda: kinetic(1e-2, 10.0, friction=-1),
        ValueError,
        "friction must be above 0, ",
    ),
    "NaN as friction": (
        lambda: kinetic(1e-2, 10.0, friction=math.nan),
        ValueError,
        "friction must be .*got nan",
    ),
    "friction as text": (
        lambda: kinetic(1e-2, 10.0, friction="high"),
        TypeError,
        "friction must be a number, got 'h",
    ),
    "negative time step": (
        lambda: kinetic(-1e-2, 10.0),
        ValueError,
        "step_size must be a finite number of at least",
    ),
    "no diffusion": (
        lambda: sgnht(1e-4, 10.0, diffusion=-1),
        ValueError,
        r"diffusion must lie in \(0, 1\], got -1",
    ),
    "no leapfrog steps": (
        lambda: hmc(1e-4, 10.0, leapfrog=0),
        ValueError,
        "leapfrog must be an integer of at least 1",
    ),
    "half a leapfrog step": (
        lambda: hmc(1e-4, 10.0, leapfrog=1.5),
        TypeError,
        "leapfrog must be an integer",
    ),
    "no jitter": (
        lambda: hmc(1e-4, 10.0, jitter=0.0),
        ValueError,
        r"jitter must lie in \(0, 1\], got 0\.0",
    ),
    "jitter as text": (
        lambda: hmc(1e-4, 10.0, jitter="some"),
        TypeError,
        "jitter must be a number in .0, 1., got 'some'",
    ),
    "no chains": (
        lambda: run(chains=0),
        ValueError,
        "chains must be an integer of at least 1, got 0",
    ),
    "half a chain": (
        lambda: run(chains=1.5),
        TypeError,
        "chains must be an integer of at least 1, got 1.5",
    ),
    "no draws": (lambda: run(draws=0), ValueError, "draws must be an integer of at least 1, got 0"),
    "draws as text": (
        lambda: run(draws="500"),
        TypeError,
        "draws must be an integer of at least 1, got '500'",
    ),
    "negative burn-in": (
        lambda: run(burn_in=-1),
        ValueError,
        "burn_in must be an integer of at least 0, got -1",
    ),
    "no thinning": (
        lambda: run(thin=0),
        ValueError,
        "thin must be an integer of at least 1, got 0",
    ),
    "no pieces": (
        lambda: run(accumulate=0),
        ValueError,
        "accumulate must be an integer of at least 1, got 0",
    ),
    "a negative seed for chains": (
        lambda: run(seed=-1),
        ValueError,
        "seed must be an integer of at least 0, got -1",
    ),
    "an empty batch": (
        lambda: run(batch_size=0),
        ValueError,
        r"batch_size must be an integer in \[1, 10\], got 0",
    ),
    "a batch beyond the data": (
        lambda: run(batch_size=11),
        ValueError,
        r"batch_size must .*in \[1, 10\], got 11",
    ),
    "a share as a batch": (
        lambda: run(batch_size=0.5),
        TypeError,
        r"batch_size must be an integer in \[1, 10\]",
    ),
    "batches of batch statistics": (
        lambda: run(problem(batchnorm(), batch_size=5, norm="train"), batch_size=3),
        ValueError,
        "batch_size must be left out .*own batches, of 5 samples, are used",
    ),
    "baseline unknown": (
        lambda: run(baseline="initial"),
        ValueError,
        "baseline must be one of .paired., .full.",
    ),
    "a bound of 0": (
        lambda: run(bound=0.0),
        ValueError,
        "bound must be a finite number above 0, got 0.0",
    ),
    "mode of sampling unknown": (
        lambda: run(mode="parallel"),
        ValueError,
        "mode must be one of 'auto', 'batched'",
    ),
    "a CUDA graph on a CPU": (
        lambda: run(mode="graph"),
        ValueError,
        "mode must be one of sequential.*got 'graph'; a CUDA graph needs a CUDA problem",
    ),
    "processes for one chain": (
        lambda: run(chains=1, mode="processes"),
        ValueError,
        "processes need .*several cores",
    ),
    "batch statistics together": (
        lambda: run(problem(batchnorm(), batch_size=5, norm="train"), mode="batched"),
        ValueError,
        "got 'batched'; chains can share a call only where",
    ),
    "ignored tokens together": (
        lambda: run(problem(LanguageModel(), data=sentences(), batch_size=2), mode="batched"),
        ValueError,
        "got 'batched'; chains can share a call only where",
    ),
    "observables as a list": (
        lambda: run(observables=[torch.norm]),
        TypeError,
        "observables must be a dict of",
    ),
    "an observable that is none": (
        lambda: run(observables={"norm": 2.0}),
        TypeError,
        "observables must be a dict of",
    ),
    "an observable without a name": (
        lambda: run(averages={0: torch.norm}),
        TypeError,
        "averages must be a dict of",
    ),
    "an observable that returns text": (
        lambda: run(observables={"name": lambda w: "text"}),
        TypeError,
        "observable 'name' must return a number or a tensor.*got 'text'",
    ),
    "an observable that returns None": (
        lambda: run(observables={"none": lambda w: None}),
        TypeError,
        "observable 'none' must return a number or a tensor",
    ),
    "an observable of changing shape": (
        lambda: run(chains=9, kernel=sgld(1.0, 0.0), observables={"odd": lopsided}),
        TypeError,
        "observable 'odd' must return .*of one shape",
    ),
    "a watch that cannot be called": (
        lambda: run(watch=3),
        TypeError,
        "watch must be a function of the energies",
    ),
    "losses of samples that depend on each other": (
        lambda: SampleLosses(function(lambda p, b: p["a"].sum() / len(b), None, torch.ones(4, 3))),
        TypeError,
        "be a mean over the samples",
    ),
    "whole-data energies never asked for": (
        lambda: run(batch_size=3).full_energies,
        ValueError,
        'full_energies must have losses .*sample with baseline="full"',
    ),
}
