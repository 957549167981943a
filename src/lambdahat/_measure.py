"""``measure``: several quantities of one problem at once, kept on disk as they come, so that a
killed run resumes.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch

from lambdahat._core.check import require, require_choice
from lambdahat._core.progress import report
from lambdahat._core.storage import Damaged, digest, read_json, unseal, write_sealed
from lambdahat._quantities import CURVATURES, QUANTITIES, MeasureSettings
from lambdahat.operators.base import LinearOperator
from lambdahat.problem import Problem, require_problem
from lambdahat.problem.distributed import behaves_alike
from lambdahat.results import Eigenpairs, Result
from lambdahat.results.measurement import Measurement


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
) -> Measurement:
    """Measure the quantities named in ``what``, most of them on one curvature operator.

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
    names = quantity_names(what)
    settings = MeasureSettings(curvature, depth, probes, top, seed, dict(sampling or {}))
    about = description(problem, settings)
    store = None
    if folder is not None:
        store = _Folder(
            Path(folder), {**fingerprint(problem, about), "vectors": keep_vectors}, problem.dtype
        )
    operator: LinearOperator | None = None
    results, seconds = {}, {}
    for done, name in enumerate(names):
        report("measure", done, len(names))
        found = None if store is None else store.read(name)
        if found is None:
            operator = CURVATURES[curvature](problem) if operator is None else operator
            start = time.perf_counter()
            result = QUANTITIES[name](problem, operator, settings)
            result = result if keep_vectors else without_vectors(result)
            found = result, time.perf_counter() - start
            if store is not None:
                store.write(name, *found)
        results[name], seconds[name] = found
    report("measure", len(names), len(names))
    measurement = Measurement(results, {**about, "seconds": seconds})
    if folder is not None:
        measurement.save(folder)
    return measurement


def quantity_names(what: str | Sequence[str]) -> tuple[str, ...]:
    """The names asked for, each known and each once."""
    names = (what,) if isinstance(what, str) else tuple(dict.fromkeys(what))
    require(
        len(names) > 0,
        "what",
        "name at least one quantity",
        "none",
        f"choose from {', '.join(QUANTITIES)}",
    )
    return tuple(require_choice(name, "what", QUANTITIES) for name in names)


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
        **dataclasses.asdict(settings),
        "norm": problem.norm,
        "dtype": str(problem.dtype)[6:],
        "device": str(problem.device),
        "versions": versions,
    }


def fingerprint(problem: Problem, about: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree for a result on disk to be the one asked for: settings, sizes, and the
    problem's identity.
    """
    return {
        **{key: value for key, value in about.items() if key not in ("versions", "device")},
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
        path.mkdir(parents=True, exist_ok=True)
        if self._index.is_file():
            stored = unseal(read_json(self._index), self._index, sealed=False)
            self._require_same(stored.get("settings", {}))
            self.seconds, self._digests = stored["seconds"], stored["digests"]

    @property
    def _index(self) -> Path:
        return self.path / "run.json"

    def _require_same(self, stored: Mapping[str, Any]) -> None:
        """The loss may differ by rounding, as on another device; all else is equal or the run is
        another one.
        """
        for key, now in self.mark.items():
            was = stored.get(key, "unknown, by an earlier version of lambdahat")
            if key == "behaviour" and isinstance(was, list):
                same = behaves_alike(was, now, self._dtype)
            else:
                near = (
                    isinstance(was, float)
                    and isinstance(now, float)
                    and math.isclose(was, now, rel_tol=1e-4)
                )
                same = was == now or near
            require(
                same,
                "folder",
                f"hold results of this run, with {key} = {now}",
                f"{self.path} with {key} = {was}",
                "choose another folder, or delete this one",
            )

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
