"""Files that are read back: digests that show damage, atomic writes, and results with the status
each one carries.

On disk a result is a JSON file, written last and atomically, plus one ``.npz`` for its arrays whose
name holds a digest of its contents: a reader never sees half a result, and a killed writer leaves
the old one whole.

Every JSON document that is read back is sealed: it carries a digest of everything else it says
(``seal``), and its digests of other files cover those. A file that differs from what was written
raises ``Damaged``, which names it. Documents written before version 2 of a format have no seal, and
are read without that check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lambdahat._core.check import describe, require, require_type, why_not

FORMAT = "lambdahat"
FORMAT_VERSION = 2  # 1 had no digest
DIGEST = "digest"  # the key of a document's digest of all else in it
HEAD = f'{{\n "format": "{FORMAT}"'.encode()  # what the file of a result begins with
PARTS_SHOWN = 5  # parts of a tuple or a mapping that the text of a result shows
LONG = 80  # letters of a result within it
BUFFER = 1 << 18
SMALL = 64 << 20  # bytes that any packed file may unpack to
# beyond that, times its own size: what people store packs 2 to 20 times, a bomb 1,000 times
RATIO = 50
# what reading a file imports where it holds a result that is not known yet: CORE, or the module of
# the result where that is outside
CORE = ("results.measurement", "maxent", "estimators", "singular")
TYPE_HOMES = {
    "bench.records": "BenchResult BenchRow",
    "experiments.minibatch.batch_points": "BatchCell CurvaturePoint",
    "experiments.minibatch.stability_edges": "Frontier RateRule ScalingRuns",
    "experiments.kit.claims": "Table Verdict",
    "graphs.cluster_counts": "Clusters Gap",
    "graphs.similarities": "Similarity",
    "graphs.random_models": "ModelChoice ModelFit",
    "graphs.spectra": "EdgePerturbation GraphSpectrum",
    "randommatrix.advice": "Advice",
    "randommatrix.advice_rules": "Recommendation",
    "randommatrix.batch_curvature": "BatchEigenvalues DirectionalVariance",
    "randommatrix.bulk": "BulkFit",
    "randommatrix.noise_levels": "BatchLevels BatchView NoiseLevels",
    "randommatrix.noisy_quadratic": "IterateLaw",
    "randommatrix.predictions": "BatchComparison BatchPrediction PredictedOutlier",
    "randommatrix.rate_limits": "PositiveEstimate",
    "randommatrix.spikes": "LinearShrinkage",
    "randommatrix.stable_rates": "RateRatio StableRate",
    "training.ensembles": "Ensemble",
    "training.history": "Run",
}


class Damaged(ValueError):
    """A file is not as it was written; the message names it."""


def digest(data: bytes) -> str:
    """The SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def update_digest(hasher: Any, tensor: Tensor, headed: bool = True) -> None:
    """Add all bytes of a tensor to a ``hashlib`` object, with ``headed`` after dtype and shape."""
    plain = tensor.detach()
    if headed:
        hasher.update(f"{plain.dtype} {tuple(plain.shape)} {plain.layout}".encode())
    if plain.layout == torch.sparse_coo:
        plain = plain.coalesce()
        parts = [plain.indices(), plain.values()]
    elif plain.layout != torch.strided:
        parts = [plain.to_dense()]
    else:
        parts = [torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain]
    for part in parts:
        hasher.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A digest of the names, dtypes, shapes and bytes of tensors, on any device."""
    hasher = hashlib.sha256()
    for name, tensor in tensors.items():
        hasher.update(f"{len(name)} {name} ".encode())
        update_digest(hasher, tensor)
    return hasher.hexdigest()[:32]


def seal(document: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON document with a digest of all it says; ``unseal`` checks it and takes it off.

    >>> seal({"step": 3})
    {'step': 3, 'digest': 'f2c76473acac2fa2146cd9615b918e8a'}
    """
    if DIGEST in document:
        raise ValueError(
            f"the key {DIGEST!r} must be left to the digest of a document, got one of its own"
        )
    return {**document, DIGEST: _digest_of(document)}


def unseal(document: Any, where: str | Path, sealed: bool = True) -> dict[str, Any]:
    """The document that ``seal`` was given, read from the file ``where``; without ``sealed`` a
    digest may be missing.

    Raises:
        Damaged: If it says anything else than what was sealed.
    """
    mark = document.get(DIGEST) if isinstance(document, dict) else None
    if not isinstance(document, dict) or (sealed and mark is None):
        raise Damaged(f"{where} is damaged: it has no digest of its contents")
    rest = {key: value for key, value in document.items() if key != DIGEST}
    if mark is not None and mark != _digest_of(rest):
        raise Damaged(f"{where} is damaged: its contents do not match their digest")
    return rest


def read_json(path: Path) -> Any:
    """The JSON in a file; ``Damaged`` where there is none."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} is damaged: it is not JSON ({error})") from error


def write_sealed(path: Path, document: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON document with its digest, atomically."""
    write_atomically(path, json.dumps(seal(document), indent=indent, ensure_ascii=False).encode())


def _digest_of(document: Mapping[str, Any]) -> str:
    """Of a document as JSON without white space: what a file says, not how it is laid out."""
    return digest(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())[:32]


class Status(Enum):
    """How a computation ended; the value is the remedy, empty when none is needed."""

    CONVERGED = ""
    BUDGET_SPENT = (
        "The products allowed ran out before the tolerance was reached: raise max_matvecs or tol."
    )
    SAMPLES_SPENT = (
        "The rounds of random signals ran out before the tolerance was reached: raise tol."
    )
    NOT_CONVERGED = (
        "Residuals are above tol, or further copies are not ruled out: raise max_matvecs, or"
        " lower k."
    )
    PRECISION_LIMIT = (
        "Rounding, also in the model, stops further progress: use dtype=torch.float64, or raise"
        " tol."
    )
    QUADRATURE = "The quadrature has not settled: raise depth."
    POSITIVITY = (
        "No eigenvalue bound above 0 is known, nor was one seen: pass bounds, add a shift, or raise"
        " depth."
    )
    NOT_A_MINIMUM = (
        "The sampled loss fell below the loss at the centre: train further, or raise localization."
    )
    NOT_MIXED = (
        "The chains disagree or still drift: raise max_gradients (or draws, burn_in), or"
        " localization."
    )
    DIVERGED = "Chains ran away to infinite loss: lower step_size, or raise localization."
    BOUNDED = "Chains ran into the bound and were pulled back: raise localization, or bound."
    STEP_BIAS = "The steps are so large that they add much of the value: lower step_size."
    REJECTED = "Nearly every proposal was rejected: lower step_size."
    NOT_MOVING = "The chains did not move, so their spread says nothing: raise step_size."
    GRADIENTS_SPENT = (
        "The gradients ran out before the error was small and reliable: raise max_gradients or tol."
    )
    INDEFINITE = (
        "The curvature is negative beyond the prior's, no minimum: train further, or raise"
        " prior_precision."
    )
    NOT_STATIONARY = "The gradient has not vanished here: train further, or subtract the decrement."
    NOT_ASYMPTOTIC = "The slope still changes along the levels used: raise levels, or lower radius."
    MISFIT = (
        "The points do not lie on a line within their errors: lower localization, or choose betas"
        " closer together."
    )
    FEW_WEIGHTS = (
        "A few draws carry nearly all the weight: sample at the temperature asked for instead."
    )
    MISMATCH = (
        "The density does not match its moments within their error: ask for fewer moments, or wider"
        " bounds."
    )
    NO_GAP = "No gap parts the small eigenvalues from the rest: raise moments, or pass cut."
    UNRESOLVED = (
        "Gaps narrower than the moments resolve are not ruled out by the least eigenvalues: raise"
        " moments."
    )
    RIVAL_GAPS = (
        "Several gaps are about as wide, so that no count is likelier than the others together: see"
        " rivals."
    )
    NO_OUTLIER = (
        "No eigenvalue stands apart from the bulk for sure: raise depth to resolve its edge, or"
        " lower level."
    )
    NO_EDGE = (
        "The bulk thins out without an edge, and what is called outliers may be its tail: count"
        " only wide gaps."
    )
    TRAINING_DIVERGED = (
        "The training loss is infinite or NaN: lower the learning rate, or pass clip."
    )

    @property
    def ok(self) -> bool:
        """True when nothing needs doing."""
        return self is Status.CONVERGED

    @classmethod
    def joint(cls, statuses: Iterable[Status]) -> Status:
        """The first of several that is not CONVERGED, if any."""
        return next((status for status in statuses if not status.ok), cls.CONVERGED)


INDEXES = "measurement.json", "training.json"  # of results that are folders


class Result:
    """Base class of all results, with ``save(path)``, ``load(path)`` and a short text that shows
    the shapes of arrays.
    """

    _types: ClassVar[dict[str, type[Result]]] = {}

    axes: ClassVar[tuple[str, ...]] = ("row", "column")
    """What the dimensions of its arrays count, for the columns of a frame."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Result._types[cls.__name__] = cls
        if "__repr__" not in vars(cls):
            cls.__repr__ = super(cls, cls).__repr__  # type: ignore[method-assign]  # or ``dataclass`` makes one of all

    def __repr__(self) -> str:
        pairs = [(part.name, getattr(self, part.name)) for part in dataclasses.fields(self)]  # type: ignore[arg-type]
        parts = [f"{name}={_short(value)}" for name, value in pairs if not _is_empty(value)]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """For notebooks: the numbers with error, cost and status, the remedies, a small figure if
        there is a curve to see, and all fields.
        """
        picture = import_module("lambdahat.report.figures").thumbnail(self)
        named = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}  # type: ignore[arg-type]
        texts = {name: _short(value) for name, value in named.items() if not _is_empty(value)}
        for name, value in named.items():
            if isinstance(value, Status):
                texts[name] = value.name if value.ok else f"{value.name}: {value.value}"
        text: str = _tables().html_of(self, texts, picture)
        return text

    def table(self) -> list[dict[str, Any]]:
        """One row per number: quantity, value, stderr, cost and status."""
        rows: list[dict[str, Any]] = _tables().number_rows({type(self).__name__: self})
        return rows

    def frame(self) -> Any:
        """The rows of ``table()`` as a ``pandas.DataFrame``; of a result that holds arrays alone,
        such as a density, a column for each; else one row of its fields.
        """
        return _tables().frame_of(self)

    def to_latex(self) -> str:
        """The rows of ``frame()`` as a LaTeX tabular with the rules of booktabs, a value and its
        standard error in one column.
        """
        text: str = _tables().latex_of(_tables().rows_of(self))
        return text

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain numbers, texts, lists and dictionaries."""
        fields: dict[str, Any] = _plain(self)
        return fields

    def save(self, path: str | Path) -> Path:
        """Write to ``path`` (".json" is added when missing), atomically; arrays go to an .npz."""
        path = _json_path(path)
        make_folder(path.parent)
        arrays: dict[str, NDArray[Any]] = {}
        document: dict[str, Any] = {"format": FORMAT, "version": FORMAT_VERSION}
        document["result"] = _encode(self, arrays)
        if arrays:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
            mark = digest(buffer.getvalue())
            document["arrays"] = {"file": f"{path.stem}.{mark[:12]}.npz", "sha256": mark}
            write_atomically(path.with_name(document["arrays"]["file"]), buffer.getvalue())
        stale = _arrays_file(path)
        write_sealed(path, document, indent=1)
        own = re.compile(rf"{re.escape(path.stem)}\.[0-9a-f]{{12}}\.npz")
        kept = document.get("arrays", {}).get("file")
        # what a file names need not be ours
        if stale is not None and own.fullmatch(stale.name) and stale.name != kept:
            stale.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what ``save`` wrote; ``Result.load`` reads any kind, also from the folder of a
        measurement or a training run.
        """
        folder = Path(path)
        index = next((folder / name for name in INDEXES if (folder / name).is_file()), None)
        path = _json_path(path) if index is None else index
        if not path.is_file():
            got = f"{path} ({why_not(path)})"
            if folder.is_dir():
                got = f"{folder} (a folder without {' or '.join(INDEXES)})"
            raise FileNotFoundError(f"path must name a result written by save(), got {got}")
        try:
            document = read_json(path)
        except Damaged as error:
            text = f"{path} is not a lambdahat result, or a damaged one: {error.__cause__}"
            raise Damaged(text) from error
        known = isinstance(document, dict)
        ours = known and document.get("format") == FORMAT and "result" in document
        if not ours and known and DIGEST in document:
            unseal(document, path)
        require(ours, "path", "name a result written by save()", f"{path} (other contents)")
        version = document.get("version")
        document = unseal(document, path, sealed=version == FORMAT_VERSION)
        if version not in (1, FORMAT_VERSION):
            raise ValueError(
                f"path must hold format version {FORMAT_VERSION} or 1, got version {version} in"
                f" {path}; upgrade lambdahat to read it"
            )
        try:
            result = _decode(document["result"], _read_arrays(path, document.get("arrays")))
        except (Damaged, FileNotFoundError):
            raise
        except Exception as error:  # whatever a file of another version, or by others, leads to
            raise ValueError(
                f"{path} holds unknown parts ({error}); upgrade lambdahat to read it"
            ) from error
        if not isinstance(result, cls):
            kind, own = cls.__name__, type(result).__name__
            raise TypeError(
                f"path must hold {_article(kind)} {kind}, got {_article(own)} {own}; call"
                f" {own}.load, or Result.load for any kind"
            )
        return result


def _short(value: Any) -> str:
    """A value in a result's text: long arrays by shape, results by name, the first few of many."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim == 0:
            return _short(value.item())
        if value.ndim == 1 and 0 < len(value) <= PARTS_SHOWN:
            return f"[{', '.join(map(_short, value.tolist()))}]"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Status):
        return value.name
    if isinstance(value, Result):
        status = getattr(value, "status", Status.CONVERGED)
        # the remedy is for its own text
        text = str(value).replace(f"{status.name}: {status.value}", status.name)
        worded = type(value).__str__ is not object.__str__ and len(text) <= LONG
        return text if worded else f"{type(value).__name__}(…)"
    if isinstance(value, float | np.floating):
        return f"{float(value):.6g}"
    if isinstance(value, Mapping):
        parts = ", ".join(
            f"{key!r}: {_short(item)}" for key, item in list(value.items())[:PARTS_SHOWN]
        )
        return f"{{{parts}{_rest(len(value))}}}"
    if isinstance(value, tuple | list):
        parts = ", ".join(_short(item) for item in value[:PARTS_SHOWN])
        return f"({parts}{_rest(len(value)) or ',' * (len(value) == 1)})"
    return describe(value)


def _tables() -> Any:
    """The module that knows which numbers a result has, one layer above this one."""
    return import_module("lambdahat.results.measurement")


def _plain(value: Any) -> Any:
    if isinstance(value, Result):
        parts = dataclasses.fields(value)  # type: ignore[arg-type]
        return {part.name: _plain(getattr(value, part.name)) for part in parts}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Status) else value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, tuple | list | Mapping) and not value)


def _rest(count: int) -> str:
    return f", … {count} in all" if count > PARTS_SHOWN else ""


def _article(word: str) -> str:
    return "an" if word[0] in "AEIO" else "a"


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        block = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        where = "it" if block == folder else str(block)
        raise FileExistsError(
            f"folder must be a folder or the name of a new one, got {folder}, but {where} is a"
            " file; name another"
        ) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old contents or the new, never a part."""
    if path.is_dir():
        raise IsADirectoryError(f"path must name a file, got {path}, a folder; name a file in it")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:  # the name that its caller knows
        raise OSError(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, temporary):
            # the name that its caller knows
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def is_result_file(path: Path) -> bool:
    """Whether a JSON file holds a result; a damaged one counts, so that its reader notices."""
    blob = path.read_bytes()
    try:
        document = json.loads(blob.decode("utf-8"))
    except (ValueError, RecursionError):
        if len(blob) < len(HEAD) and HEAD.startswith(blob):
            text = f"{path} is left out: it may be a result that was cut short"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
        return blob.startswith(HEAD) or f'"{DIGEST}": "'.encode() in blob
    if not isinstance(document, dict):
        return False
    kind, mark = document.get("format"), document.get(DIGEST)
    rest = {key: value for key, value in document.items() if key != DIGEST}
    if kind == FORMAT or mark is None:
        return bool(kind == FORMAT)
    # others of ours are such as those of a checkpoint
    return not (str(kind).startswith(f"{FORMAT}-") or mark == _digest_of(rest))


def _read_arrays(path: Path, entry: Any) -> dict[str, NDArray[Any]]:
    """The arrays beside the result at ``path``, checked against the digest that it holds."""
    if entry is None:
        return {}
    file = path.with_name(entry["file"])
    if not file.is_file():
        raise FileNotFoundError(
            f"path must have its arrays beside it, got {file} (no such file); copy the .npz too"
        )
    blob = file.read_bytes()
    if digest(blob) != entry["sha256"]:
        raise Damaged(f"{file} is damaged: it is not what {path.name} was saved with")
    return read_arrays(file)


def unpacked_size(packed: int) -> int:
    """The most bytes that a packed file of a given size may unpack to where nothing says how many
    it should.

    >>> unpacked_size(1_000) == SMALL, unpacked_size(10_000_000)
    (True, 500000000)
    """
    return max(SMALL, RATIO * packed)


def bounded_stream(stream: Any, path: Path) -> IO[bytes]:
    """A stream of an unpacked file that raises ``ValueError`` beyond ``unpacked_size``."""
    return io.BufferedReader(_Bounded(stream, path), BUFFER)


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends in a ``ValueError`` where a file unpacks to more than it may."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path
        self._packed = path.stat().st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._check()
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = self._stream.seek(offset, whence)
        self._check()
        return place

    def tell(self) -> int:
        return self._stream.tell()

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _check(self) -> None:
        most = unpacked_size(self._packed)
        if self._stream.tell() > most:
            raise ValueError(
                f"{self._path} must unpack to at most {most:,} bytes, got more, packed into"
                f" {self._packed:,}; unpack it first if it is what you want"
            )


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz; ValueError names the file where it is damaged, holds objects, or
    unpacks to far more.

    zipfile reads no more of a member than the archive declares, so that the declared sizes are what
    counts.
    """
    try:
        require_modest(path)
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except Exception as error:  # a damaged archive fails in a dozen ways
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} must be a whole .npz of arrays, got {text[:200]}") from None


def require_modest(path: Path) -> None:
    """Refuse a zip archive that declares to hold far more than its own size can."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        declared = sum(member.file_size for member in archive.infolist())
    if declared > unpacked_size(size):
        raise ValueError(
            f"{path} must unpack to at most {unpacked_size(size):,} bytes, got {declared:,} packed"
            f" into {size:,}"
        )


def _json_path(path: str | Path) -> Path:
    require_type(path, str | os.PathLike, "path", "be the name of a file")
    path = Path(path)
    require(bool(path.name), "path", "be the name of a file", "an empty one")
    return path if path.suffix == ".json" else path.with_name(path.name + ".json")


def _arrays_file(path: Path) -> Path | None:
    """The .npz that the result now at ``path`` refers to, if any."""
    try:
        return path.with_name(json.loads(path.read_text(encoding="utf-8"))["arrays"]["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _encode(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(value, Result):
        names = [field.name for field in dataclasses.fields(value)]  # type: ignore[arg-type]
        fields = {name: _encode(getattr(value, name), arrays) for name in names}
        return {"type": type(value).__name__, "fields": fields}
    if isinstance(value, Status):
        return {"status": value.name}
    if isinstance(value, Tensor | np.ndarray):
        key, coarse = f"a{len(arrays)}", value.dtype == torch.bfloat16
        if isinstance(value, Tensor):
            plain = value.detach().cpu()
            # numpy has no bfloat16; float32 holds it exactly
            arrays[key] = (plain.float() if coarse else plain).numpy()
        else:
            arrays[key] = value
        form = {"array": key, "tensor": isinstance(value, Tensor)}
        return form | ({"dtype": "bfloat16"} if coarse else {})
    if isinstance(value, np.generic):
        return _encode(value.item(), arrays)
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, Mapping):
        return {"map": [[key, _encode(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        return {"tuple": [_encode(item, arrays) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"a result can hold numbers, text, arrays and results, got {type(value).__name__}; convert"
        " it first"
    )


def _decode(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    if not isinstance(value, dict):
        return value
    if "type" in value:
        kind = _kind(value["type"], value["fields"])
        if kind is None:
            raise ValueError(
                f"path must hold a known result, got {value['type']}; upgrade lambdahat to read it"
            )
        fields = {str(name): _decode(item, arrays) for name, item in dict(value["fields"]).items()}
        _require_kinds(kind, fields)
        known = {part.name for part in dataclasses.fields(kind)}  # type: ignore[arg-type]
        unknown = [name for name in fields if name not in known]
        if unknown and known <= fields.keys():  # added by a newer version, and none renamed
            text = f"a newer lambdahat wrote {kind.__name__} with {', '.join(unknown)}"
            warnings.warn(f"{text}, which is left out; upgrade lambdahat to read it", stacklevel=2)
            fields = {name: item for name, item in fields.items() if name in known}
        return kind(**fields)
    if "status" in value:
        return Status[value["status"]]
    if "array" in value:
        array = arrays[value["array"]]
        if not value["tensor"]:
            return array
        return torch.from_numpy(array).to(torch.bfloat16 if "dtype" in value else None)
    if "float" in value:
        return float(value["float"])
    if "map" in value:
        return {key: _decode(item, arrays) for key, item in value["map"]}
    return tuple(_decode(item, arrays) for item in value["tuple"])


def _kind(name: str, fields: Iterable[str]) -> type[Result] | None:
    """The class of a result by its name; its module is imported where that has not happened.

    The cases of a verification once had the name that the comparison of problems has now.
    """
    name = "CheckedCase" if name == "Comparison" and "case" in fields else name
    if name not in Result._types:
        for module in [home for home, names in TYPE_HOMES.items() if name in names.split()] or CORE:
            import_module(f"lambdahat.{module}")
    return Result._types.get(name)


def _require_kinds(kind: type[Result], fields: Mapping[str, Any]) -> None:
    """Refuse fields that contradict their annotations, on which a figure would fail later."""
    for part in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, value = str(part.type), fields.get(part.name)
        if part.name not in fields or (value is None and "None" in hint):
            continue
        wrong = (
            (isinstance(value, str) and not any(word in hint for word in ("str", "Any", "object")))
            or (hint == "Status" and not isinstance(value, Status))
            or (hint.startswith(("Array", "NDArray")) and not isinstance(value, np.ndarray))
            or (hint in ("float", "int") and not isinstance(value, int | float))
            or (hint == "float | Tensor" and not isinstance(value, int | float | Tensor))
        )
        if wrong:
            raise TypeError(f"{part.name} must be {hint}, got {describe(value)}")
