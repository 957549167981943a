"""Run folders: what was trained on what, so that the model of a run can be made again and measured.

A folder holds ``config.json`` (the recipe), ``metrics.jsonl`` and ``metrics.csv``,
``checkpoints/``, ``measurements/``, ``training.json`` (the ``Run``) and, where iterates were
averaged, ``averaged.safetensors``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import require
from lambdahat._core.storage import read_json, unseal, write_sealed
from lambdahat.data.loading import load
from lambdahat.data.splits import Split
from lambdahat.models.registry import make_model
from lambdahat.problem import Problem
from lambdahat.problem.network import named_tensors
from lambdahat.training.checkpoints import Checkpoints, read

WHICH = ("last", "best")
APART = ("settings", "free")  # the one is compared entry by entry, the other not at all


@dataclass(frozen=True)
class Recipe:
    """A model and its data by name, enough to make both again.

    ``settings`` is what else decides the numbers of the run, ``free`` what may change when it is
    resumed.
    """

    model: str
    data: str
    loss: str = "cross_entropy"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    data_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    samples: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    free: Mapping[str, Any] = field(default_factory=dict)

    def split(self) -> Split:
        """The data; with ``samples`` the first so many of the training data."""
        split = load(self.data, **self.data_options)
        if self.samples is None:
            return split
        x, y = split.train
        require(
            self.samples <= len(x),
            "samples",
            f"be at most the {len(x):,} training samples of {self.data!r}",
            f"{self.samples:,}",
        )
        return Split((x[: self.samples], y[: self.samples]), split.test, split.classes)

    def network(self, split: Split) -> nn.Module:
        """The model as it was before training."""
        return make_model(self.model, split.shape, split.classes, self.seed, **self.model_options)

    def save(self, folder: Path) -> None:
        """Write ``config.json``; a folder that has another one is refused."""
        document = {"format": "lambdahat-run", **asdict(self)}
        there = folder / "config.json"
        if there.is_file():
            was = unseal(read_json(there), there, sealed=False)
            now = json.loads(json.dumps(document))
            flat_was, flat_now = ({**each, **each.get("settings", {})} for each in (was, now))
            changed = [
                key for key in flat_now if flat_was.get(key) != flat_now[key] and key not in APART
            ]
            news = "; ".join(f"{key} = {flat_was.get(key)}, not {flat_now[key]}" for key in changed)
            require(
                not changed,
                "folder",
                "hold a run of the same settings",
                f"{folder} with {news}",
                "give the same options, or choose another folder",
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_sealed(there, document, indent=1)


def is_run_folder(path: str | Path) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / "checkpoints").is_dir() or (Path(path) / "config.json").is_file()


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe of a run folder."""
    path = Path(folder) / "config.json"
    require(
        path.is_file(),
        "folder",
        "hold config.json, which `lambdahat train` writes",
        f"{folder} without it",
        "a run of fit with your own model is measured as package.module:function --checkpoint"
        " FOLDER",
        FileNotFoundError,
    )
    try:
        document = unseal(read_json(path), path, sealed=False)
        document.pop("format")
        return Recipe(**document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the recipe of a run ({error})") from error


def weights(folder: str | Path, which: str = "last") -> dict[str, Tensor]:
    """Parameters and buffers of a run by name, at its newest whole checkpoint or at its best."""
    checkpoints = Checkpoints(Path(folder) / "checkpoints")
    if which == "best":
        path = checkpoints.best()
        require(
            path is not None, "which", 'be "last" for a run without a best checkpoint', '"best"'
        )
        assert path is not None
        state = read(path)[1]
    else:
        found = checkpoints.newest()
        require(
            found is not None, "folder", "hold a checkpoint", f"{folder} without one", "train first"
        )
        assert found is not None
        if found.damaged:
            warnings.warn(
                f"{'; '.join(found.damaged)}: taking {found.path.name}",
                RuntimeWarning,
                stacklevel=3,
            )
        state = found.state
    return dict(state["model"])


def load_run(
    folder: str | Path, which: str = "last", device: torch.device | str | None = None
) -> Problem:
    """The problem of a run that ``lambdahat train`` made: its model at a checkpoint, on its
    training data.
    """
    recipe = read_recipe(folder)
    split = recipe.split()
    model = recipe.network(split)
    own, stored = named_tensors(model), weights(folder, which)
    fits = {name: tensor.shape for name, tensor in own.items()} == {
        name: t.shape for name, t in stored.items()
    }
    require(fits, "folder", "hold weights of the model in its config.json", f"{folder} with others")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    return Problem(model if device is None else model.to(device), recipe.loss, split.train)
