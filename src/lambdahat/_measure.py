"""``measure``: several quantities of one problem at once, kept on disk as they come, so that a
killed run resumes; ``compare``: the same quantities of several problems.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lambdahat._core.check import describe, require, require_choice, require_count, require_type
from lambdahat._core.progress import ProgressFile, report
from lambdahat._core.rng import derived_seed
from lambdahat._core.storage import (
    Damaged,
    digest,
    digest_tensors,
    make_folder,
    read_json,
    unseal,
    write_sealed,
)
from lambdahat.estimators.quantities import CURVATURES, QUANTITIES, SAMPLING, MeasureSettings
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.distributed import behaves_alike
from lambdahat.results import Eigenpairs, Estimate, LearningCoefficient, Result, Status
from lambdahat.results.measurement import Comparison, Measurement
from lambdahat.sampling.backends.minibatches import DEFAULT_BATCH
from lambdahat.singular._llc import default_localization, inverse_temperature


def measure(
    problem: Problem,
    what: str | Sequence[str] = ("trace", "eigenpairs", "spectrum"),
    curvature: str = "hessian",
    *,
    depth: int = 100,
    probes: int = 1,
    top: int = 10,
    seed: int = 0,
    sampling: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    keep_vectors: bool = True,
    **options: Any,
) -> Measurement:
    """Measure several quantities of one problem, such as trace, spectrum and learning coefficient.

    Those of the curvature share one operator.

    "llc" is the learning coefficient at the problem's parameters; ``sampling`` holds settings for
    it and for "llc_curve", "bayes_criteria", "temperature_regression", "free_energy" and "sweep",
    such as {"draws": 1000, "nbeta": "batch"}; settings not given are tuned. "llc_curve" is λ̂ over
    γ, from 1/16 to 16 times the γ of "llc". "volume_scaling" is for small models only.

    With ``folder``, every finished result is written there immediately, and a later call with the
    same problem and settings measures only what is missing; ``Measurement.load(folder)`` reads
    everything. Two problems are the same if all data, parameters, buffers, the model and the loss
    are (``Problem.identity``, which passes over the data once); a folder of a different problem is
    refused. A damaged result is measured again, with a warning. Without ``keep_vectors`` the
    eigenvectors, (P, top), are dropped.
    """
    require_problem(problem)
    _require_sampling(sampling, options)
    names = quantity_names(what)
    settings = MeasureSettings(curvature, depth, probes, top, seed, dict(sampling or {}))
    about = description(problem, settings)
    store = None
    require_type(folder, str | os.PathLike | None, "folder", "be the name of a folder")
    if folder is not None:
        store = _Folder(
            Path(folder), {**fingerprint(problem, about), "vectors": keep_vectors}, problem.dtype
        )
    operator: LinearOperator | None = None
    results, seconds = {}, {}
    path = None if folder is None else Path(folder) / "progress.json"
    with ProgressFile(path, kind="measurement", what=names):
        for done, name in enumerate(names):
            report("measure", done, len(names))
            stored = None if store is None else store.read(name)
            if stored is None:
                operator = CURVATURES[curvature](problem) if operator is None else operator
                start = time.perf_counter()
                result = QUANTITIES[name](problem, operator, settings)
                result = result if keep_vectors else without_vectors(result)
                stored = result, time.perf_counter() - start
                if store is not None:
                    store.write(name, *stored)
            results[name], seconds[name] = stored
        report("measure", len(names), len(names))
    measurement = Measurement(results, {**about, "seconds": seconds})
    if folder is not None:
        measurement.save(folder)
    return measurement


def compare(
    problems: Mapping[str, Problem | Measurement | Sequence[Problem] | Sequence[Measurement]],
    what: str | Sequence[str] = ("llc", "trace", "eigenvalues", "loss"),
    curvature: str = "hessian",
    *,
    top: int = 3,
    depth: int = 100,
    probes: int = 1,
    seed: int = 0,
    sampling: Mapping[str, Any] | None = None,
    **options: Any,
) -> Comparison:
    """Measure the same quantities of several problems and compare them, with errors.

    λ̂ is comparable only at the same data, temperature and localization. So all problems must have
    the same data, and all λ̂ the same nβ and γ: those of ``sampling``, else n/ln n and the geometric
    mean of the γ that ``llc`` would choose for each problem. Give γ to compare with other calls.

    Args:
        problems: Names and what to compare: a problem each, or for each name a list with one
            problem per seed. The i-th of every name form a pair and need the same data. In place of
            problems, measurements that ``measure`` made; they must have the same nβ and γ.
        what: Quantities of ``measure``, "eigenvalues" (the ``top`` largest) and "loss".
        curvature: The matrix whose trace and eigenvalues are measured.
        top: Number of eigenvalues.
        depth: Lanczos steps of a spectrum.
        probes: Starting vectors of a spectrum.
        seed: Seed of all randomness; every problem has its own stream.
        sampling: Settings of ``llc``, as for ``measure``.

    Returns:
        The comparison: ``value``, ``difference``, ``table()``, ``frame()``; ``lh.plot`` draws it.

    >>> import torch, lambdahat as lh
    >>> data = torch.eye(3), torch.zeros(3, 1)
    >>> flat, steep = (torch.nn.Linear(3, 1, bias=False) for _ in range(2))
    >>> problems = {name: lh.Problem(model, "mse", data)
    ...             for name, model in {"flat": flat, "steep": steep}.items()}
    >>> lh.compare(problems, "trace").difference("trace", "steep", "flat").value
    0.0
    """
    _require_sampling(sampling, options)
    every = _as_lists(problems)
    names = quantity_names(what, [*QUANTITIES, "eigenvalues", "loss"])
    asked = [{"eigenvalues": "eigenpairs"}.get(name, name) for name in names if name != "loss"]
    if isinstance(next(iter(every.values()))[0], Measurement):
        measured = every
        _require_same_settings(every)
    else:
        given = dict(sampling or {})
        MeasureSettings(curvature, depth, probes, top, seed, given)
        _require_same_data(every)
        if any(name in SAMPLED for name in asked):
            given = _common_estimand(every, given)
        effort = {"top": top, "depth": depth, "probes": probes, "sampling": given}
        measured, done, total = {}, 0, sum(map(len, every.values()))
        for place, (name, measurements) in enumerate(every.items()):
            measured[name] = []
            for i, problem in enumerate(measurements):
                report("compare", done, total)
                own = derived_seed(seed, "compare", place, i)
                settings: dict[str, Any] = {"seed": own, "keep_vectors": False, **effort}
                measured[name].append(
                    measure(problem, asked, curvature, **settings)
                    if asked
                    else Measurement({}, description(problem, MeasureSettings(curvature)))
                )
                done += 1
        report("compare", total, total)
    return _comparison(measured, names, top)


# take settings of chains
SAMPLED = {"llc", "llc_curve", "bayes_criteria", "temperature_regression", "free_energy", "sweep"}


def _as_lists(problems: Any) -> dict[str, list[Any]]:
    """What is compared, by name, as lists of the same length and one kind."""
    require(
        isinstance(problems, Mapping) and len(problems) > 1,
        "problems",
        "be a dict of two or more names, such as {'SGD': a, 'Adam': b}",
        describe(problems),
        error=TypeError if not isinstance(problems, Mapping) else ValueError,
    )
    every = {
        str(name): list(listed) if isinstance(listed, list | tuple) else [listed]
        for name, listed in problems.items()
    }
    expected = "have names that differ as text"
    require(len(every) == len(problems), "problems", expected, ", ".join(map(repr, problems)))
    kinds = {
        type(one) if isinstance(one, Problem | Measurement) else None
        for listed in every.values()
        for one in listed
    }
    require(
        len(kinds) == 1 and kinds <= {Problem, Measurement},
        "problems",
        "hold problems alone or measurements alone",
        {name: describe(listed[0]) if listed else "none" for name, listed in every.items()},
        error=TypeError,
    )
    counts = {name: len(listed) for name, listed in every.items()}
    require(
        len(set(counts.values())) == 1 and 0 not in counts.values(),
        "problems",
        "have the same number of seeds for every name, since seeds are compared in pairs",
        counts,
        "leave out the others",
    )
    return every


def _require_same_data(every: Mapping[str, Sequence[Problem]]) -> None:
    """Each seed's problems have the same data, whatever their batches, and the same loss."""
    first, *others = every
    for i, reference in enumerate(every[first]):
        odd = [name for name in others if not _is_alike(reference, every[name][i])]
        expected = "have the same data and loss, or their numbers are not comparable"
        got = f"{odd[0]!r} with other data or another loss than {first!r}" if odd else ""
        cure = "make every problem of one data set (for several seeds, the i-th of each name)"
        require(not odd, "problems", expected, got, cure)


def _is_alike(one: Problem, two: Problem) -> bool:
    """Whether two problems have the same data and loss.

    What no digest sees, such as a constant that a custom loss holds, shows at the same parameters.
    """
    marks = []
    for problem in (one, two):
        identity = problem.identity()
        data = problem.batches.digest() if problem.has_data else "none"
        network = [identity[key] for key in ("model", "constants")]
        marks.append((data, problem.num_samples, identity["loss function"], network))
    if marks[0][:3] != marks[1][:3]:
        return False
    if marks[0] != marks[1]:
        return True  # of two networks, or of one with other running statistics, losses differ
    return math.isclose(two.at(one.vector.to(two.vector)).loss(), one.loss(), rel_tol=1e-3)


def _require_same_settings(every: Mapping[str, Sequence[Measurement]]) -> None:
    """Measurements of as many samples, with the same loss and curvature; λ̂ at the same nβ and γ."""
    settings: dict[str, tuple[str, Any]] = {}
    for name, measurements in every.items():
        for one in measurements:
            facts = {key: one.about.get(key) for key in ("samples", "loss", "curvature")}
            if "first_sample" in one.about:  # measurements of early versions do not tell
                facts["data"] = one.about["first_sample"]
            coefficient = one.results.get("llc")
            for key in ("nbeta", "localization"):
                facts[key] = getattr(coefficient, key, None)
            for key, value in facts.items():
                first, known = settings.setdefault(key, (name, value))
                require(
                    _is_close(known, value),
                    "problems",
                    f"have the same {key}, or their numbers are not comparable",
                    f"{name!r} measured on other data than {first!r}"
                    if key == "data"
                    else f"{describe(known)} ({first}) and {describe(value)} ({name})",
                    "measure all alike, or give the problems themselves",
                )


def _is_close(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor | float) and isinstance(two, Tensor | float):
        first, second = torch.as_tensor(one).double(), torch.as_tensor(two).double()
        same = first.shape == second.shape or 0 in (first.ndim, second.ndim)
        return same and bool(torch.isclose(first, second, rtol=1e-6).all())
    return bool(one == two)


def _common_estimand(
    every: Mapping[str, Sequence[Problem]], given: Mapping[str, Any]
) -> dict[str, Any]:
    """``given`` with a localization for all, where it has none."""
    if "localization" in given:
        return dict(given)
    logs = []
    for measurements in every.values():
        for problem in measurements:
            asked = require_count(given.get("batch_size", DEFAULT_BATCH), "batch_size")
            size = min(asked, problem.num_samples)
            nbeta, _ = inverse_temperature(given.get("nbeta", "n/log n"), problem.num_terms, size)
            logs.append(math.log(default_localization(problem, nbeta)[0]))
    return {**given, "localization": math.exp(sum(logs) / len(logs))}


def _comparison(
    measured: Mapping[str, Sequence[Measurement]], names: Sequence[str], top: int
) -> Comparison:
    """The numbers of measurements by quantity and name."""
    readings: dict[str, dict[str, tuple[Estimate, ...]]] = {}
    numbers = {
        name: [_numbers_of(one, names, top) for one in parts] for name, parts in measured.items()
    }
    first = next(iter(numbers.values()))[0]
    for name in names:
        require(
            any(label == name or label.startswith((f"{name}.", f"{name}[")) for label in first),
            "what",
            "name quantities that are numbers",
            f"{name!r}, which has none",
            "measure it with lh.measure",
        )
    for label in dict.fromkeys(label for parts in numbers.values() for n in parts for label in n):
        missing = [name for name, parts in numbers.items() if any(label not in n for n in parts)]
        if missing and label.startswith("eigenvalues["):
            continue  # of networks of several sizes, as many as the smallest has
        expected, got = f"all have {label}", f"{', '.join(missing)} without it"
        require(not missing, "problems", expected, got, "measure the same quantities of all")
        readings[label] = {
            name: tuple(each[label] for each in parts) for name, parts in numbers.items()
        }
    some = next(iter(measured.values()))[0].results.get("llc")
    keys = ("nbeta", "localization") if isinstance(some, LearningCoefficient) else ()
    gamma = getattr(some, "localization", None)
    uniform = not isinstance(gamma, Tensor) or bool((gamma == gamma.flatten()[0]).all())
    settings = {key: getattr(some, key) for key in keys}
    if keys and isinstance(gamma, Tensor):
        settings["localization"] = float(gamma.flatten()[0]) if uniform else "by parameter"
    return Comparison(readings, settings)


def _numbers_of(one: Measurement, names: Sequence[str], top: int) -> dict[str, Estimate]:
    """The estimates of a measurement by label, in the order of ``names``."""
    kept: dict[str, Estimate] = {}
    for name in names:
        if name == "loss":
            require("loss_value" in one.about, "problems", "know their loss", "none")
            kept["loss"] = Estimate(float(one.about["loss_value"]))
            continue
        own = {"eigenvalues": "eigenpairs"}.get(name, name)
        expected, got = f"have measured {own}", f"only {', '.join(one.results)}"
        require(own in one.results, "problems", expected, got, "name what was measured in what=")
        part = Measurement({name: one.results[own]})
        for row in part.table():
            if name == "llc" and row["quantity"] not in ("llc", "llc.wbic"):
                continue
            if name == "eigenvalues" and len([k for k in kept if k.startswith(name)]) >= top:
                continue
            # the degrees of freedom of its result where that is one number
            dof = float(getattr(one.results[own], "dof", math.inf))
            status = Status[row["status"]]
            kept[row["quantity"]] = Estimate(row["value"], row["stderr"], row["cost"], status, dof)
    return kept


def quantity_names(
    what: str | Sequence[str], known: Collection[str] = QUANTITIES.keys()
) -> tuple[str, ...]:
    """The names asked for, each known and each once."""
    expected, cure = "name at least one quantity", f"choose from {', '.join(known)}"
    require_type(what, str | Iterable, "what", expected, cure)
    names = (what,) if isinstance(what, str) else tuple(dict.fromkeys(what))
    require(len(names) > 0, "what", expected, "none", cure)
    return tuple(require_choice(name, "what", known) for name in names)


def _require_sampling(sampling: Any, options: Mapping[str, Any]) -> None:
    """Refuse settings of chains that are no dict, or that came by themselves."""
    require_type(sampling or {}, Mapping, "sampling", "be a dict of settings of llc")
    for name in options:
        if name not in SAMPLING:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
        cure = f"pass sampling={{{name!r}: …}}"
        require(False, "sampling", "hold the settings of llc", f"{name}=…", cure, TypeError)


def description(problem: Problem, settings: MeasureSettings) -> dict[str, Any]:
    """What was measured, with which settings and versions."""
    loss = problem.loss_function
    own = sys.modules["lambdahat"].__version__  # importing the package here would be a circle
    versions = {
        "lambdahat": own,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    return {
        "parameters": problem.num_parameters,
        "samples": problem.num_samples,
        "loss": "custom" if loss is None else loss.name,
        "loss_value": problem.loss(),
        "first_sample": _first_sample(problem),
        **dataclasses.asdict(settings),
        "norm": problem.norm,
        "dtype": str(problem.dtype)[6:],
        "device": str(problem.device),
        "versions": versions,
    }


UNFIXED = ("versions", "device", "first_sample")  # the identity has digests of all data


def _first_sample(problem: Problem) -> str:
    """A digest of the first sample, by which ``compare`` sees that measurements differ in data."""
    if not problem.has_data:
        return ""
    leaves, _ = tree_flatten(problem.batches.first().data)
    rows = {f"{i}": leaf[:1] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return digest_tensors({name: row for name, row in rows.items() if row.ndim})


def fingerprint(problem: Problem, about: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree for a result on disk to be the one asked for: settings, sizes, and the
    problem's identity.
    """
    return {
        **{key: value for key, value in about.items() if key not in UNFIXED},
        **problem.identity(),
    }


def without_vectors(result: Any) -> Any:
    """Eigenpairs with vectors of no length, (0, k); anything else as it is."""
    if not isinstance(result, Eigenpairs):
        return result
    return dataclasses.replace(result, vectors=result.vectors[:0].clone())


class _Folder:
    """Finished results in a folder, with the fingerprint of the run they belong to and their
    digests.
    """

    def __init__(self, path: Path, mark: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.path, self.mark, self._dtype = path, mark, dtype
        self.seconds: dict[str, float] = {}
        self._digests: dict[str, str] = {}
        make_folder(path)
        if self._index.is_file():
            stored = unseal(read_json(self._index), self._index, sealed=False)
            self.seconds = stored["seconds"]
            self._require_same(stored.get("settings", {}))
            self._digests = stored["digests"]

    @property
    def _index(self) -> Path:
        return self.path / "run.json"

    def _require_same(self, stored: Mapping[str, Any]) -> None:
        """The loss may differ by rounding, as on another device; all else is equal or the run is
        another one.
        """
        for key, now in self.mark.items():
            was = stored.get(key, "unknown, by an earlier version of lambdahat")
            if key == "sampling" and SAMPLED.isdisjoint(self.seconds):
                same = True  # nothing there depends on it
            elif key == "behaviour" and isinstance(was, list):
                same = behaves_alike(was, now, self._dtype)
            else:
                near = (
                    isinstance(was, float)
                    and isinstance(now, float)
                    and math.isclose(was, now, rel_tol=1e-4)
                )
                same = was == now or near
            expected = f"hold results of this run, with {key} = {now}"
            got = f"{self.path} with {key} = {was}"
            require(same, "folder", expected, got, "choose another folder, or delete this one")

    def read(self, name: str) -> tuple[Any, float] | None:
        """A finished result and the seconds it took; None where there is none that this run
        wrote, undamaged.
        """
        path = self.path / f"{name}.json"
        if name not in self.seconds or not path.is_file():
            return None
        try:
            stored = Result.load(path)
            if digest(path.read_bytes()) != self._digests.get(name):
                raise Damaged(f"{path} is not what this run wrote")
        except (ValueError, OSError) as error:
            warnings.warn(f"{error}: measuring {name} again", RuntimeWarning, stacklevel=3)
            return None
        return (stored.results if isinstance(stored, Measurement) else stored), self.seconds[name]

    def write(self, name: str, result: Any, seconds: float) -> None:
        """Keep a result: its file first, then the index that makes it count."""
        kept = result if isinstance(result, Result) else Measurement(result)
        path = Result.save(kept, self.path / f"{name}.json")
        self.seconds[name], self._digests[name] = seconds, digest(path.read_bytes())
        document = {
            "format": "lambdahat-measure",
            "settings": dict(self.mark),
            "seconds": self.seconds,
        }
        write_sealed(self._index, {**document, "digests": self._digests}, indent=1)
