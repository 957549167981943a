"""Checkpoints that survive ``kill -9``, a full disk and damage: safetensors and JSON, the last few
and the best.

A checkpoint is ``step-00000120.safetensors`` with the tensors and ``step-00000120.json`` with all
else, the digest of the first and one of itself. Both are written to a temporary file, synced and
renamed, the JSON last: it makes the checkpoint count. ``best.json`` names the best one. An old
checkpoint goes only once a newer one is whole.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambdahat._core import storage
from lambdahat._core.check import describe, require
from lambdahat.data.catalogue import load
from lambdahat.data.splits import Split
from lambdahat.models import make_model
from lambdahat.problem import Problem
from lambdahat.problem.network import named_tensors
from lambdahat.training.history import Metrics


def pack(state: Any) -> tuple[dict[str, Tensor], Any]:
    """A nested state of dicts, lists, tuples, tensors and plain values as tensors by name, and a
    JSON document.

    Keys of dicts keep their type (a state dict of an optimiser numbers its parameters). Tensors are
    CPU copies, or the tensors themselves where they are on the CPU already; one tensor in two
    places is stored once.

    >>> tensors, document = pack({"step": 3, "state": {0: {"momentum": torch.ones(2)}}})
    >>> list(tensors)
    ['state/0/momentum']
    >>> unpack(tensors, document)["state"][0]["momentum"].tolist()
    [1.0, 1.0]
    """
    packer = _Packer()
    document = packer.encode(state, "")
    return packer.tensors, document


def unpack(tensors: Mapping[str, Tensor], document: Any) -> Any:
    """The inverse of ``pack``, with new tensors on the CPU."""
    if isinstance(document, list):
        return [unpack(tensors, item) for item in document]
    if not isinstance(document, dict):
        return document
    (kind, value), *rest = document.items()
    if rest or kind not in _READERS:
        raise ValueError(f"document must be one that pack() made, got {describe(document)}")
    return _READERS[kind](tensors, value)


class _Packer:
    """The tensors met so far, each under the path where it was met first."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._keep(value.detach(), path)
        if isinstance(value, np.generic):
            return self.encode(value.item(), path)
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, Mapping):
            kind = "counter" if isinstance(value, Counter) else "dict"
            pairs = value.items()
            return {kind: [[_key(k, path), self.encode(v, f"{path}/{k}")] for k, v in pairs]}
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        raise TypeError(
            f"{path.strip('/')} must be a tensor, a number, text, or a list, tuple or dict of them"
            f" to be kept in a checkpoint, got {describe(value)}; convert it in state_dict()"
        )

    def _keep(self, tensor: Tensor, path: str) -> dict[str, Any]:
        """Store a tensor with its layout: products with a transposed matrix round differently."""
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            return {"permuted": [self._keep(tensor.permute(order), path), order]}
        same = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device))
        if not (tensor.numel() and same in self._names):
            self._names[same] = path.strip("/") or "value"
            self.tensors[self._names[same]] = tensor.cpu().contiguous()
        return {"tensor": self._names[same]}


def _key(key: Any, path: str) -> Any:
    if key is not None and not isinstance(key, bool | int | str | float):
        raise TypeError(
            f"a key of {path.strip('/') or 'the state'} must be text or a number, got"
            f" {describe(key)}"
        )
    return key


_READERS: dict[str, Any] = {
    "tensor": lambda tensors, name: tensors[name].clone(),
    "permuted": lambda tensors, pair: unpack(tensors, pair[0]).permute(*np.argsort(pair[1])),
    "float": lambda _, text: float(text),
    "dict": lambda tensors, items: {key: unpack(tensors, item) for key, item in items},
    "counter": lambda tensors, items: Counter({key: unpack(tensors, item) for key, item in items}),
    "tuple": lambda tensors, items: tuple(unpack(tensors, item) for item in items),
    "dtype": lambda _, name: getattr(torch, name),
    "device": lambda _, name: torch.device(name),
}


FORMAT = "lambdahat-checkpoint"
VERSION = 2  # 1 had no digest of the JSON itself
# of killed writers
TEMPORARY = re.compile(r"\.(step-\d+\.(json|safetensors)|best\.json|initial\.safetensors)\.\w+")


@dataclass(frozen=True)
class Checkpoint:
    """A state read from disk, its step, and the damaged checkpoints that were skipped."""

    step: int
    state: dict[str, Any]
    path: Path
    damaged: tuple[str, ...] = ()


class DamagedCheckpoint(storage.Damaged):
    """A checkpoint that cannot be read as it was written."""


class Checkpoints:
    """The checkpoints of one run in ``folder``: the ``keep`` newest, and the best."""

    def __init__(self, folder: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(folder), keep

    def write(self, step: int, state: Any, best: bool = False) -> Path:
        """Write a state and drop the oldest beyond ``keep``, but not the best."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"step-{step:08d}.json"
            tensors, packed = pack(state)
            mark = write_tensors(path.with_suffix(".safetensors"), tensors)
            document = {"format": FORMAT, "version": VERSION, "step": step}
            storage.write_sealed(path, {**document, "sha256": mark, "state": packed})
            _sync(self.folder)
            if best:
                self.name_best(step)
            self._prune(path)
        except OSError as error:
            there = self.paths()
            whole = f"the checkpoint before is whole: {there[-1]}" if there else "there is no other"
            text = (
                f"the checkpoint of step {step} could not be written to {self.folder} "
                f"({error.strerror or error}); {whole}; make room or choose another folder, "
                "then resume"
            )
            raise OSError(error.errno, text) from error
        return path

    def write_initial(self, tensors: dict[str, Tensor]) -> str:
        """Store the initial parameters and return their digest, which every checkpoint holds."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return write_tensors(self._initial, tensors)
        except OSError as error:
            text = (
                f"folder must be one that can be written to, got {self.folder} "
                f"({error.strerror or error}); make room or choose another one"
            )
            raise OSError(error.errno, text) from error

    def read_initial(self, mark: str) -> dict[str, Tensor]:
        """The parameters that training began from."""
        from safetensors.torch import load

        there = self._initial.is_file()
        blob = self._initial.read_bytes() if there else b""
        if storage.digest(blob) != mark:
            raise ValueError(
                "folder must hold the initial parameters, from which distances are measured, got"
                f" {self._initial} ({'damaged' if there else 'missing'}); put it back, or begin"
                " anew"
            )
        return load(blob)

    @property
    def _initial(self) -> Path:
        return self.folder / "initial.safetensors"

    def paths(self) -> list[Path]:
        """The checkpoints there are, oldest first."""
        return sorted(self.folder.glob("step-*.json"))

    def newest(self, rows: int | None = None) -> Checkpoint | None:
        """The newest whole checkpoint, or None where there are none at all.

        Damaged ones are passed over and named in ``damaged``; where all are damaged, that is an
        error. So is one passed over that counts on more ``rows``, in bytes, than there are.
        """
        damaged: list[str] = []
        for path in reversed(self.paths()):
            try:
                step, state = read(path)
                if rows is not None and state["metrics"] > rows:
                    missing = "counts on rows that metrics.jsonl does not hold"
                    raise DamagedCheckpoint(f"{path} {missing}")
            except DamagedCheckpoint as error:
                damaged.append(str(error))
                continue
            return Checkpoint(step, state, path, tuple(damaged))
        if damaged:
            raise ValueError(
                f"folder must hold a whole checkpoint, got {'; '.join(damaged)}; delete it to begin"
                " again"
            )
        return None

    def name_best(self, step: int | None) -> None:
        """Say that the checkpoint of ``step`` is the best, if it is there."""
        name = None if step is None else f"step-{step:08d}.json"
        if name is not None and (self.folder / name).is_file():
            storage.write_sealed(self.folder / "best.json", {"checkpoint": name})

    def best(self) -> Path | None:
        """The best checkpoint, or None if none is named; ``Damaged`` if the naming file is."""
        index = self.folder / "best.json"
        if not index.is_file():
            return None
        name = storage.unseal(storage.read_json(index), index, sealed=False).get("checkpoint")
        return next((path for path in self.paths() if path.name == name), None)

    def forget_after(self, step: int) -> None:
        """Remove what was written after ``step``: a run that goes on from there writes it again."""
        for path in [*self.folder.glob("step-*.json"), *self.folder.glob("step-*.safetensors")]:
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink(missing_ok=True)

    def _prune(self, newest: Path) -> None:
        """The JSON goes first, so that what is left is never taken for a checkpoint."""
        there = self.paths()
        try:
            best = self.best()
        # which one is the best is unknown until training names the next: keep them all
        except storage.Damaged:
            return
        stay = {path.stem for path in [*there[-self.keep :], newest, best or newest]}
        for path in [*there, *self.folder.glob("step-*.safetensors")]:
            if path.stem not in stay:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(".*"):
            if TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


def require_new(folder: Path, resume: bool) -> None:
    """Raise if the folder holds a run that is not to be resumed."""
    new = not Checkpoints(folder / "checkpoints").paths() and Metrics(folder).length == 0
    cure = "pass resume=True (--resume) to go on with it, or choose another folder"
    require(resume or new, "folder", "be new or empty", f"{folder}, which holds a run", cure)


def read(path: Path) -> tuple[int, dict[str, Any]]:
    """The step and state of one checkpoint; ``DamagedCheckpoint`` unless every byte matches."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        index = storage.read_json(path)
        ours = isinstance(index, dict) and index.get("format") == FORMAT
        version = index.get("version") if ours else None
        index = storage.unseal(index, path, sealed=version != 1)
        if version not in (1, VERSION):
            raise DamagedCheckpoint(f"{path} is not a checkpoint of this version of lambdahat")
        blob = path.with_suffix(".safetensors").read_bytes()
        if storage.digest(blob) != index["sha256"]:
            raise DamagedCheckpoint(f"{path.with_suffix('.safetensors')} is damaged")
        return int(index["step"]), unpack(load(blob), index["state"])
    except storage.Damaged as error:
        raise DamagedCheckpoint(str(error)) from error
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise DamagedCheckpoint(f"{path} is damaged ({type(error).__name__}: {error})") from error


# folders of the runs in this process, which the system's lock does not keep apart
_running: set[str] = set()
_turn = threading.Lock()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run, in this process or, where supported, in another; the
    lock ends with the process.
    """
    place = os.path.realpath(folder)
    with _turn:
        if place in _running:
            raise _in_use(folder)
        _running.add(place)
    try:
        with _locked(folder):
            yield
    finally:
        _running.discard(place)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the system's lock of a folder, where there is one."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        # neither emptied nor reached through a link: in a folder from elsewhere it may be the name
        # of another file
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        stream = os.fdopen(os.open(folder / ".lock", flags, 0o644), "r+b")
    except (ImportError, OSError):  # not POSIX; or a folder that the first write will complain of
        yield
        return
    with stream:
        try:
            # not inherited by children, unlike flock
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _in_use(folder) from error
        yield


def _in_use(folder: Path) -> ValueError:
    return ValueError(
        f"folder must have one run at a time, got {folder}, where another is running; wait for it,"
        " or choose another folder"
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], sealed: bool = False) -> str:
    """Write tensors by name to a safetensors file, atomically; the digest of its bytes.

    With ``sealed`` the file carries a digest of its own, for ``read_tensors``, where no other file
    holds one.
    """
    from safetensors.torch import save

    plain: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        plain[name] = own.clone() if place in places else own  # safetensors shares no memory
        places.add(place)
    blob = save(plain, {storage.DIGEST: storage.digest_tensors(plain)} if sealed else None)
    storage.write_atomically(path, blob)
    return storage.digest(blob)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; ``Damaged`` if they do not match its digest."""
    from safetensors import safe_open

    with safe_open(path, "pt") as stream:
        tensors = {name: stream.get_tensor(name) for name in sorted(stream.keys())}
        mark = (stream.metadata() or {}).get(storage.DIGEST)
    if mark is not None and mark != storage.digest_tensors(tensors):
        raise storage.Damaged(f"{path} is damaged: its tensors do not match their digest")
    return tensors


def _sync(folder: Path) -> None:
    """Make the renames of a folder last through a loss of power, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


WHICH = ("last", "best")
APART = ("settings", "free")  # the one is compared entry by entry, the other not at all


@dataclass(frozen=True)
class Recipe:
    """A model and its data by name; ``free`` is what may change when the run is resumed."""

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
        expected = f"be at most the {len(x):,} training samples of {self.data!r}"
        require(self.samples <= len(x), "samples", expected, f"{self.samples:,}")
        return Split((x[: self.samples], y[: self.samples]), split.test, split.classes)

    def network(self, split: Split) -> nn.Module:
        """The model as it was before training."""
        return make_model(self.model, split.shape, split.classes, self.seed, **self.model_options)

    def save(self, folder: Path, resume: bool = False) -> None:
        """Write ``config.json``; a folder that has another one, or a run that is not to be resumed,
        is refused.
        """
        document = {"format": "lambdahat-run", **asdict(self)}
        there = folder / "config.json"
        if there.is_file():
            was = storage.unseal(storage.read_json(there), there, sealed=False)
            now = json.loads(json.dumps(document))
            flat_was, flat_now = ({**each, **each.get("settings", {})} for each in (was, now))
            changed = [k for k in flat_now if flat_was.get(k) != flat_now[k] and k not in APART]
            if changed:
                news = "; ".join(f"{k} = {flat_was.get(k)!r}, not {flat_now[k]!r}" for k in changed)
                raise ValueError(
                    f"folder must hold a run of the same settings, got {folder} with {news}; give"
                    " the same options, or choose another folder"
                )
        require_new(folder, resume)
        folder.mkdir(parents=True, exist_ok=True)
        storage.write_sealed(there, document, indent=1)


def is_run_folder(path: str | Path) -> bool:
    """Whether a folder holds a run."""
    return (Path(path) / "checkpoints").is_dir() or (Path(path) / "config.json").is_file()


def read_recipe(folder: str | Path) -> Recipe:
    """The recipe of a run folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"folder must hold config.json, which `lambdahat train` writes, got {folder} without"
            " it; a run of fit with your own model is measured as package.module:function"
            " --checkpoint FOLDER"
        )
    try:
        document = storage.unseal(storage.read_json(path), path, sealed=False)
        document.pop("format")
        return Recipe(**document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the recipe of a run ({error})") from error


def weights(folder: str | Path, which: str = "last") -> dict[str, Tensor]:
    """Parameters and buffers of a run by name, at its newest whole checkpoint or at its best."""
    checkpoints = Checkpoints(Path(folder) / "checkpoints")
    if which == "best":
        path = checkpoints.best()
        if path is None:
            raise ValueError('which must be "last" for a run without a best checkpoint, got "best"')
        state = read(path)[1]
    else:
        newest = checkpoints.newest()
        if newest is None:
            raise ValueError(
                f"folder must hold a checkpoint, got {folder} without one; train first"
            )
        if newest.damaged:
            text = f"{'; '.join(newest.damaged)}: taking {newest.path.name}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        state = newest.state
    return dict(state["model"])


def load_run(
    folder: str | Path, which: str = "last", device: torch.device | str | None = None
) -> Problem:
    """The problem of a ``lambdahat train`` run: its model at a checkpoint, on its training data."""
    recipe = read_recipe(folder)
    split = recipe.split()
    model = recipe.network(split)
    own, stored = named_tensors(model), weights(folder, which)
    shapes = ({name: tensor.shape for name, tensor in each.items()} for each in (own, stored))
    expected = "hold weights of the model in its config.json"
    require(next(shapes) == next(shapes), "folder", expected, f"{folder} with others")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(stored[name])
    return Problem(model if device is None else model.to(device), recipe.loss, split.train)
