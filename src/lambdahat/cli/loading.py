"""From ``module:factory`` and a checkpoint, or from the folder of a run, to a problem."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lambdahat._core.check import did_you_mean, require_count
from lambdahat.cli.exits import FactoryError, InputError, foreign_output, one_line
from lambdahat.cli.options import ProblemChoices
from lambdahat.problem import Problem
from lambdahat.problem.network import named_tensors, own_names
from lambdahat.training import checkpoints

UNCHANGED = ProblemChoices()
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def load_problem(
    spec: str,
    choices: ProblemChoices = UNCHANGED,
    checkpoint: Path | None = None,
    option: str = "--checkpoint",
) -> Problem:
    """The problem of a factory or run folder, at the checkpoint's weights, with the choices."""
    run = Path(spec).is_dir()
    problem = _run_problem(spec) if run else call_factory(spec)
    if not isinstance(problem, Problem):
        raise InputError(
            f"{spec} must return a lambdahat.Problem, got {type(problem).__name__}; "
            "end it with: return lambdahat.Problem(model, loss, data)"
        )
    if checkpoint is not None:
        path = _within(spec, checkpoint) if run else checkpoint
        problem = _with_checkpoint(problem, path, option)
    if choices.device is not None or choices.dtype is not None or choices.norm is not None:
        problem = _rebuilt(problem, choices.device, choices.dtype, choices.norm)
    if choices.samples is None:
        return problem
    cure = "leave it out for all of the data"
    require_count(choices.samples, "--samples", 1, problem.num_samples, cure)
    return problem.subsample(choices.samples, seed=choices.seed)


def _run_problem(folder: str) -> Problem:
    """The problem of a run; what is wrong with its recipe is said of the file that it is in."""
    try:
        return checkpoints.load_run(folder)
    except FileNotFoundError:
        raise
    except (ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        text = one_line(error)
        where = "" if folder in text else f"{Path(folder) / 'config.json'}: "
        raise InputError(f"{where}{text[:300]}") from error


def held_out_data(spec: str, factory: str) -> Any:
    """What ``--held-out`` names: a function's data or problem, or "test" of a run folder."""
    if spec == "test" and Path(factory).is_dir():
        return checkpoints.read_recipe(factory).split().test
    return call_factory(spec, "--held-out")


def _within(run: str, checkpoint: Path) -> Path:
    """A checkpoint of the run by its name, such as "best", or a file as it is."""
    named = str(checkpoint) in (*checkpoints.WHICH, "averaged") and not checkpoint.exists()
    if named and str(checkpoint) == "averaged":
        return Path(run) / "averaged.safetensors"
    return Path(run) / "checkpoints" / str(checkpoint) if named else checkpoint


def call_factory(spec: str, option: str = "FACTORY") -> Any:
    """Call ``package.module:attribute``, which may lie in the current directory."""
    module_name, colon, attribute = spec.partition(":")
    if module_name.endswith(".py"):
        place = module_name.removesuffix(".py").replace("/", ".")
        cure = f"write {place}:{attribute or 'make_problem'}"
        raise InputError(f"{option} must be module:function, got the file {spec!r}; {cure}")
    if not (module_name and colon and attribute):
        cure = "for example: package.module:make_problem"
        raise InputError(f"{option} must be module:function, got {spec!r}; {cure}")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with foreign_output():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"imported by {module_name}"
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            where = "the current directory and the Python path were searched"
        raise InputError(f"{option}: no module named {error.name!r}; {where}") from error
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{option}: importing {module_name}") from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if callable(getattr(module, name))]
        names = sorted(name for name in names if name[0] != "_")
        near = did_you_mean(attribute, names)
        known = f"it has {', '.join(names) or 'no functions'}" + (f"; {near}" if near else "")
        raise InputError(f"{option}: module {module_name} has no {attribute!r}; {known}")
    factory = getattr(module, attribute)
    if not callable(factory):
        cure = f"write a function that returns the {type(factory).__name__}"
        raise InputError(
            f"{option}: {spec} must be a function, got {type(factory).__name__}; {cure}"
        )
    with suppress(ValueError):  # of a function without a signature
        signature = inspect.signature(factory)
        try:
            signature.bind()
        except TypeError as error:
            cure = "write one that calls it with its arguments"
            text = f"must be a function without arguments, got {attribute}{signature}; {cure}"
            raise InputError(f"{option}: {spec} {text}") from error
    try:
        with foreign_output():
            return factory()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{option}: {spec}()") from error


def read_checkpoint(path: Path, option: str) -> dict[str, Tensor]:
    """Named tensors from a safetensors file, or from a state dict saved by torch (also under
    "state_dict").

    A run folder gives its newest weights; "best" or "last" in its folder of checkpoints those.
    """
    if path.is_dir() and checkpoints.is_run_folder(path):
        return checkpoints.weights(path)
    if path.parent.name == "checkpoints" and path.name in checkpoints.WHICH:
        return checkpoints.weights(path.parent.parent, path.name)
    if not path.is_file():
        if path.is_dir():
            cure = "name a file in it, or a run folder with checkpoints"
            raise InputError(f"{option} must name a file of weights, got the folder {path}; {cure}")
        raise InputError(f"{option}: no such file: {path}")
    try:
        if path.suffix == ".safetensors":
            return checkpoints.read_tensors(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        cure = "save model.state_dict() with torch.save, or with safetensors"
        cause = one_line(error)[:120]
        if "weights_only" in cause or isinstance(error, LookupError | EOFError):
            cause = "it holds other things than tensors, or is damaged"
        raise InputError(f"{option}: {path} is not a state dict ({cause}); {cure}") from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(stored, Mapping) and isinstance(stored.get(key), Mapping):
            stored = stored[key]
    values = list(stored.values()) if isinstance(stored, Mapping) else []
    if not values or not all(isinstance(value, Tensor) for value in values):
        cure = "save model.state_dict()"
        raise InputError(f"{option}: {path} must hold a dict of name to tensor; {cure}")
    return {str(name): tensor for name, tensor in stored.items()}


def _with_checkpoint(problem: Problem, path: Path, option: str) -> Problem:
    """The problem at the checkpoint's weights, and its buffers where there is a model."""
    state, model = read_checkpoint(path, option), problem.model
    expected: Mapping[str, Tensor] = (
        problem.space.unflatten(problem.vector) if model is None else model.state_dict()
    )
    state = own_names(state, expected.keys())
    of_run = model is not None and set(state) == set(named_tensors(model)) != set(expected)
    if model is not None and of_run:  # a run keeps tied parameters once, and every buffer
        expected = named_tensors(model)
    _require_same_names(state, expected, path, option)
    if model is None:
        return problem.at(state)
    if of_run:
        with torch.no_grad():
            for name, tensor in expected.items():
                tensor.copy_(state[name])
    else:
        model.load_state_dict(state)
    return _rebuilt(problem, None, None, None)


def _require_same_names(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path, option: str
) -> None:
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing or unexpected:
        parts = []
        for label, names in (("lacks", missing), ("has unknown", unexpected)):
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            parts += [f"{label} {', '.join(names[:4])}{more}"] if names else []
        raise InputError(f"{option}: {path} {' and '.join(parts)}; is it of this model?")
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            shapes = f"have shape {tuple(tensor.shape)}, got {tuple(state[name].shape)}"
            raise InputError(f"{option}: {name} must {shapes} in {path}")


def _rebuilt(problem: Problem, device: str | None, dtype: str | None, norm: str | None) -> Problem:
    """The same model, loss and batches as a new problem."""
    model = problem.model
    if model is None:
        came = "got one made by from_function; set them in the factory"
        raise InputError(f"--device, --dtype and --norm need a problem made of a model, {came}")
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        torch.device(problem.device if device is None else device)
    except RuntimeError as error:
        expected = 'be a device that torch knows, such as "cpu" or "cuda"'
        raise InputError(f"--device must {expected}, got {device!r}") from error
    return Problem(
        model,
        problem.loss_function or "model",
        problem.batches,
        parameters=list(problem.space.names),
        norm=norm or problem.norm,
        device=device or problem.device,
        dtype=_cast_of(problem, model) if dtype is None else DTYPES[dtype],
    )


def _cast_of(problem: Problem, model: nn.Module) -> torch.dtype | None:
    """The dtype that the problem casts its model to, or None where it takes the model's own."""
    own = torch.bfloat16
    parameters = dict(model.named_parameters())
    for name in problem.space.names:
        own = torch.promote_types(own, parameters[name].dtype)
    return None if own == problem.dtype else problem.dtype
