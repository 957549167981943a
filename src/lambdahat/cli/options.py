"""The options of the commands, alone and in groups, their help texts, and the names they take.

Nothing here imports torch: help texts, completion and misspelt names are answered at once.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache, partial, wraps
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, dataclass_transform, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from lambdahat._core.check import did_you_mean, require, require_choice, require_positive
from lambdahat.cli.exits import OK, exit_codes, output_path

LIBRARY = Path(__file__).parent.parent
# each registry, and the source files and decorators that fill it
REGISTRIES = {
    "data set": ("data.catalogue", "CATALOGUE", "data/*.py", "register_dataset"),
    "experiment": ("experiments.published", "PLACES", "experiments/published.py", ""),
    "kernel": ("sampling.kernels", "KERNELS", "sampling/kernels/*.py", "register"),
    "model": ("models", "MODELS", "models/*.py", "register_model"),
    "optimizer": ("optim.registry", "OPTIMIZERS", "optim/*.py", "register_optimizer"),
    "quantity": ("_measure", "QUANTITIES", "estimators/*.py singular/*.py", "quantity"),
    "regularizer": ("optim.registry", "REGULARIZERS", "optim/*.py", "register_regularizer"),
    "schedule": ("optim.schedules", "SCHEDULES", "optim/schedules.py", ""),
    "tracker": ("training.trackers", "TRACKERS", "training/*trackers.py", "register"),
}
PROBLEM, OUTPUT = "Problem", "Output"
Choices = TypeVar("Choices")
Complete = str | tuple[str, ...] | Callable[[str], list[str]] | None


def known_names(kind: str) -> tuple[str, ...]:
    """The names in a registry; if its module is not loaded, which takes seconds, of its source."""
    module, registry, *_ = REGISTRIES[kind]
    loaded = sys.modules.get(f"lambdahat.{module}")
    return tuple(getattr(loaded, registry)) if loaded else names_in_source(kind)


@cache
def names_in_source(kind: str) -> tuple[str, ...]:
    """The names that the source files of a registry give it: dictionary keys and decorators."""
    _, registry, pattern, decorator = REGISTRIES[kind]
    names: dict[str, None] = {}
    for path in sorted(path for part in pattern.split() for path in LIBRARY.glob(part)):
        source = path.read_text(encoding="utf-8")
        if kind != "tracker":  # a decorator of something, or its call on what is defined elsewhere
            found = re.findall(rf'^@?{decorator}\(\s*"([^"]+)"', source, re.MULTILINE)
            names |= dict.fromkeys(found if decorator else ())
        # parsing takes ten times as long
        if kind == "tracker" or re.search(rf"^{registry}\b.* = {{", source, re.MULTILINE):
            for node in ast.parse(source).body:
                names |= dict.fromkeys(_registrations(node, registry, decorator))
    return tuple(names)


def _registrations(node: ast.AST, registry: str, decorator: str) -> Iterator[str]:
    """Keys of a registry written as a dictionary; the name and the columns of a tracker."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) == registry:
            yield from (ast.literal_eval(key) for key in node.value.keys if key)
    for mark in getattr(node, "decorator_list", ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == decorator:
            yield from (ast.literal_eval(word) for word in mark.args)
            for part in getattr(node, "body", ()):
                if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "name":
                    yield ast.literal_eval(part.value)


def require_known(kind: str, name: str, option: str, cure: str = "") -> None:
    """Refuse a name that is not registered, before anything heavy is imported."""
    require_choice(name, option, known_names(kind), cure)


def names_completion(kind: str, *others: str) -> Callable[[str], list[str]]:
    """The completion of a name in a registry, or of the last of a comma-separated list."""

    def names(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = (*known_names(kind), *others)
        return [before + comma + name for name in known if name.startswith(last)]

    return names


class _Help:
    """Help with one option per line, under the title of its group; errors name what is near."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add what came and the nearest choice to Typer's error, without pydantic's words."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            wanted = error.message.partition(",")[0].removeprefix("Input should ")
            if wanted != error.message.partition(",")[0]:
                error.message = f"must {wanted}, got {_value_in(given, error.param)!r}"
            name, _, choices = error.message.partition(" is not one of ")
            near = did_you_mean(name.strip("'"), re.findall("'([^']+)'", choices))
            error.message += f" D{near[1:]}" if near else ""
            raise

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments by their names, without the braces of Typer."""
        params = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]  # type: ignore[attr-defined]
        names = [_value_name(p) for p in params]
        names = [
            name if p.required else f"[{name.strip('.')}]"
            for p, name in zip(params, names, strict=True)
        ]
        commands = ["COMMAND"] if isinstance(self, TyperGroup) else []
        return [*names, *commands, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            if not getattr(param, "hidden", False):
                argument = param.param_type_name == "argument"
                usual = "Arguments" if argument else "Options"
                if param.name == "help" and OUTPUT in groups:
                    usual = OUTPUT
                title = getattr(param, "rich_help_panel", None) or usual
                groups.setdefault(title, []).append(_describe(param))
        first = max(len(name) for rows in groups.values() for name, _ in rows)
        formatter.write("\n")
        for title, rows in groups.items():
            formatter.write(typer.style(f"{title}:", bold=True) + "\n")
            formatter.indent()
            formatter.write_dl([(name.ljust(min(first, 28)), text) for name, text in rows])
            formatter.dedent()
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


def _value_in(args: Sequence[str], param: Any) -> str:
    """What an option was given on the command line."""
    for word, after in zip(args, [*args[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in param.opts:
            return value if equals else after
    return ""


def _describe(param: Any) -> tuple[str, str]:
    """The names of an option with its value, and what it does with its default."""
    names = ", ".join(sorted(param.opts, key=len))
    names += "".join(f"/{name}" for name in param.secondary_opts)
    argument = param.param_type_name == "argument"
    if argument:
        names = _value_name(param)
    elif not param.is_flag and not getattr(param, "count", False):
        names += f" {_value_name(param)}"
    shown, default = param.show_default, param.default
    if not isinstance(shown, str):
        plain = default.value if isinstance(default, Enum) else default
        empty = plain is None or plain is False or plain is True or plain in ("", [], ())
        shown = "" if empty or callable(plain) or not shown else str(plain)
    extra = f"default: {shown}" if shown else "required" if param.required and not argument else ""
    text = param.help or ""
    return names, f"{text} [{extra}]" if extra else text


def _value_name(param: Any) -> str:
    return str(param.metavar or param.name.upper())


class Command(_Help, TyperCommand):
    """A command with compact help."""


class Group(_Help, TyperGroup):
    """A group of commands with compact help."""


class App(typer.Typer):
    """A Typer app whose commands have compact help."""

    def __init__(self, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=Group, rich_markup_mode=None, context_settings=names, **settings)

    def command(  # type: ignore[override]
        self, name: str | None = None, kept: str | tuple[str, str] = "", **settings: Any
    ) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
        """Register a function that returns the exit code; errors become codes of their own.

        ``kept`` says what an interrupt leaves, with and without --out; a dry run leaves nothing.
        """
        settings.setdefault("cls", Command)
        register = super().command(name, **settings)

        def add(command: Callable[..., int | None]) -> Callable[..., None]:
            function = _with_groups(command)

            @wraps(function)
            def run(**given: Any) -> None:
                text = kept if isinstance(kept, str) else kept[given.get("out") is None]
                with exit_codes("" if given.get("dry_run") else text.format(**given)):
                    code = function(**given)
                raise typer.Exit(OK if code is None else code)

            return register(run)

        return add


def option(
    help: str,
    default: Any = None,
    metavar: str = "",
    *flags: str,
    panel: str | None = None,
    shown: str | bool = True,
    complete: Complete = None,
    **settings: Any,
) -> Any:
    """Declare an option, as the default of a command's parameter or of a field of a group.

    Args:
        help: What the option does.
        default: Its default; ``...`` if it is required.
        metavar: The name of its value in the help: by default N for integers, X for real numbers,
            PATH for paths, else NAME.
        flags: Its names, where they are not "--" and the parameter's name.
        panel: The title of its group in the help.
        shown: The default in words.
        complete: A registry or a tuple of words that its value is completed from, or a function.
        settings: Further arguments of ``typer.Option``, such as ``min``.
    """
    settings |= {"rich_help_panel": panel, "show_default": shown, "metavar": metavar or None}
    settings["autocompletion"] = _completion(complete)
    return typer.Option(default, *flags, help=help, **settings)


def argument(
    help: str, default: Any, metavar: str, complete: Complete = None, shown: str | bool = True
) -> Any:
    """Declare an argument as the default of a command's parameter; ``...`` if it is required."""
    completion = _completion(complete)
    return typer.Argument(
        default, metavar=metavar, help=help, show_default=shown, autocompletion=completion
    )


def _completion(complete: Complete) -> Callable[..., list[str]] | None:
    if isinstance(complete, tuple):
        return lambda: list(complete)
    return names_completion(complete) if isinstance(complete, str) else complete


@dataclass_transform(frozen_default=True)
def option_group(kind: type[Choices]) -> type[Choices]:
    """A frozen dataclass of options: a command with such a parameter has them all."""
    for name in kind.__annotations__:
        declared = getattr(kind, name)
        default = MISSING if declared.default is ... else declared.default
        setattr(kind, name, field(default=default, metadata={"option": declared}))
    return dataclass(frozen=True)(kind)


def out_option(help: str, default: Path | None = None) -> Any:
    """An --out with its help; an empty name stays one."""
    return option(help, default, "PATH", panel=OUTPUT, parser=output_path)


DEVICES = ("cpu", "cuda")
SEED = option("Random seed.", 0, min=0)
OUT = out_option("Folder for results, tables and figures.")
KEPT = out_option("Folder for results; the same command resumes there.")
JSON = option("Print one JSON document only.", False, "", "--json", panel=OUTPUT)
QUIET = option("No progress bars and no tables.", False, panel=OUTPUT)
DRY_RUN = option("Time one product and predict the cost.", False, panel=OUTPUT)
FACTORY = argument("module:function that returns a Problem, or a run folder.", ..., "FACTORY")
CHECKPOINT = option("State-dict file or run folder; best or averaged of a run.", panel=PROBLEM)
DEPTH = option("Lanczos steps (one product each).", 100, min=1)

CurvatureChoice = StrEnum("CurvatureChoice", "hessian ggn fisher empirical_fisher covariance")
NormChoice = StrEnum("NormChoice", "eval train frozen")
Dtype = StrEnum("Dtype", "float32 float64 bfloat16")
CURVATURE = option("hessian, ggn, fisher, empirical_fisher or covariance.", CurvatureChoice.hessian)


@option_group
class Output:
    """Where results go. A command may declare an --out of its own as the default of the group."""

    out: Path | None = OUT
    as_json: bool = JSON
    quiet: bool = QUIET

    def print_folder(self) -> None:
        """Name the folder of the results, if there is one."""
        if self.out is not None:
            print(f"written to {self.out}")


_problem = partial(option, panel=PROBLEM)


@option_group
class ProblemChoices:
    """What the command line says about a problem; None leaves it as the factory made it."""

    samples: int | None = _problem("Use a random subset of N samples.", shown="all", min=1)
    seed: int = _problem("Random seed.", 0, min=0)
    device: str | None = _problem("cpu, cuda, cuda:1, …", shown="the model's", complete=DEVICES)
    dtype: Dtype | None = _problem("float32, float64 or bfloat16.", shown="the model's")
    norm: NormChoice | None = _problem("Norm layers: eval, train, frozen.", shown="the factory's")


_sampling = partial(option, panel="Sampling; what is not given is tuned")


@option_group
class SamplingChoices:
    """Settings of the chains; None leaves them to be tuned."""

    chains: int | None = _sampling("Number of chains.", shown="4", min=1)
    draws: int | None = _sampling("Draws per chain.", min=1)
    burn_in: int | None = _sampling("Burn-in steps per chain.", min=0)
    batch_size: int | None = _sampling("Batch size of a step.", min=1)
    nbeta: str | None = _sampling(
        'Inverse temperature nβ: a number, "n/log n" or batch.',
        metavar="X",
        shown="n/log n",
        complete=("n/log n", "batch"),
    )
    localization: float | None = _sampling(
        "Localization γ around the checkpoint.", shown="by rule", min=0
    )
    step_size: float | None = _sampling("Step size of the kernel.", min=0)
    kernel: str | None = _sampling(
        "kinetic, sgld, hmc, mala, rmsprop_sgld, sghmc or sgnht.", complete="kernel"
    )
    tol: float | None = _sampling("Relative standard error to reach.", shown="0.03")
    max_gradients: int | None = _sampling("Limit on the gradients of all chains.", min=100)

    def given(self) -> dict[str, Any]:
        """The settings that were given; a temperature that is a number becomes one."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        if self.kernel is not None:  # also where no quantity of this command is sampled
            require_known("kernel", self.kernel, "--kernel")
        try:
            return {**chosen, "nbeta": float(chosen["nbeta"])}
        except (KeyError, ValueError):
            return chosen


_data = partial(option, panel="Model and data")


@option_group
class RecipeChoices:
    """The model and the data of a training run."""

    model: str = _data("Network; an unknown name lists all.", ..., complete="model")
    data: str = _data("Data set; an unknown name lists all.", ..., complete="data set")
    model_option: list[str] | None = _data('Such as "widths=(64,32)"; repeatable.', None, "OPTION")
    data_option: list[str] | None = _data(
        "Such as normalization=standard; repeatable.", None, "OPTION"
    )
    samples: int | None = _data("Train on the first N samples.", shown="all", min=1)
    seed: int = _data("Random seed.", 0, min=0)


_step, _track, _keep = (
    partial(option, panel=title) for title in ("Optimisation", "Tracking", OUTPUT)
)


@option_group
class TrainingChoices:
    """How a training run goes, what it tracks and what it keeps."""

    optimizer: str = _step("Optimiser; an unknown name lists all.", "sgd", complete="optimizer")
    lr: float | None = _step("Learning rate.", shown="sgd 0.1, momentum 0.9; else its own")
    epochs: int = _step("Passes over the training data.", 10, min=1)
    batch_size: int = _step("Batch size.", 128, min=1)
    schedule: str | None = _step('cosine, "step:milestones=(6,8)", …', complete="schedule")
    regularizer: list[str] | None = _step("l2:rate=1e-4, …; repeatable.", complete="regularizer")
    averaging: str | None = _step(
        "average:start=161, ema:unit=step, …", complete=("average", "ema")
    )
    lookahead: int | None = _step("Wrap in Lookahead of N steps.", min=1)
    accumulate: int = _step("Batches per optimiser step.", 1, min=1)
    clip: float | None = _step("Clip the gradient norm to X.")
    augment: bool = _step("Random crops and flips.", False)
    precision: str = _step(
        "float32, bfloat16 or float16.", "float32", complete=("float32", "bfloat16", "float16")
    )
    early_stopping: int | None = _step("Stop after N epochs without improvement.", min=1)
    device: str = _step("cpu, cuda, …", "cpu", complete=DEVICES)
    track: str = _track(
        "Comma-separated: llc, trace, spectrum, top, …", "", "NAMES", complete="tracker"
    )
    track_every: int = _track("Epochs (or steps) between.", 1, min=1)
    track_unit: str = _track("epoch or step.", "epoch", complete=("epoch", "step"))
    track_samples: int | None = _track("Samples to measure on.", shown="1000", min=2)
    curvature_samples: int | None = _track(
        "For the optimiser's curvature.", shown="batch size", min=1
    )
    checkpoint_every: int = _keep("Epochs between checkpoints.", 1, min=1)
    checkpoint_steps: int | None = _keep("Also checkpoint every N steps.", min=1)
    keep: int = _keep("Checkpoints to keep, beside the best.", 2, min=1)
    resume: bool = _keep("Resume the run in --out.", False)
    log: str = _keep(
        "csv, tensorboard, wandb, mlflow.",
        "",
        "NAMES",
        complete=("csv", "tensorboard", "wandb", "mlflow"),
    )


RITZ = ("largest", "smallest", "smallest-magnitude")
RANDOM = {"random": "a random direction", "filter": "a filter-normalised direction"}


@option_group
class Lines:
    """Where to look at the loss: directions (a plane or lines), or ``towards`` a checkpoint."""

    along: str = option(
        "Of largest, smallest, smallest-magnitude, random and filter.",
        ",".join(RITZ),
        "NAMES",
        complete=(*RITZ, *RANDOM),
    )
    plane: bool = option("Plane of the first two directions instead of lines.", False)
    towards: Path | None = option("Line to this checkpoint instead of --along.")
    distance: float = option("Distance along each direction.", 1.0)
    points: int = option("Points along each direction.", 21, min=3)
    curvature: CurvatureChoice = CURVATURE
    depth: int = DEPTH
    refresh: bool = option("Recompute batch-norm statistics at every point.", False)

    def __post_init__(self) -> None:
        known, names = (*RITZ, *RANDOM), self.names
        require(self.towards is None or not self.plane, "towards", "go without --plane", "both")
        require(len(names) > 0, "along", f"name at least one of {', '.join(known)}", "none")
        for name in names:
            require_choice(name, "along", known)
        two = not self.plane or len(names) >= 2
        require(two, "along", "name two directions with --plane", repr(names))
        require_positive(self.distance, "distance")

    @property
    def names(self) -> tuple[str, ...]:
        """The directions."""
        return tuple(name.strip() for name in self.along.split(",") if name.strip())

    @property
    def evaluations(self) -> int:
        """How often the loss of the whole data is computed."""
        lines = len(self.names) if self.towards is None else 1
        return self.points**2 if self.plane else self.points * lines

    @property
    def ritz(self) -> bool:
        """Whether a Lanczos run is needed."""
        return self.towards is None and bool(set(self.names) & set(RITZ))


@option_group
class SweepChoices:
    """Which cells of experiments run, and where."""

    scale: str = option(
        "smoke (seconds), cpu (15 minutes on two cores) or paper (a GPU).",
        "cpu",
        complete=("smoke", "cpu", "paper"),
    )
    jobs: int = option("Cells in parallel; a cluster uses all its workers.", 1, min=1)
    backend: str = option(
        "Where cells run: loky (this machine), dask or ray.",
        "loky",
        complete=("loky", "dask", "ray"),
    )
    address: str | None = option(
        "Dask or ray cluster, or auto (ray).", None, "URL", shown="a local one"
    )
    only: str | None = option('Only cells such as "alpha=0.1 seed=3".', None, "TEXT")
    device: str = option("cpu or cuda.", "cpu", complete=DEVICES)
    resume: bool = option("Keep finished cells, or start over.", True, "", "--resume/--fresh")


_read = partial(option, panel="Reading files")


@option_group
class GraphReading:
    """How graph files are read."""

    format: str | None = _read(
        "edges, gml, mtx or npz.", shown="by suffix", complete=("edges", "gml", "mtx", "npz")
    )
    unweighted: bool = _read("Give every edge the weight 1.", False)
    loops: str = _read("Self-loops: drop or keep.", "drop", complete=("drop", "keep"))
    duplicates: str = _read(
        "Repeated edges: max, sum, mean or refuse.",
        "max",
        complete=("max", "sum", "mean", "refuse"),
    )
    directed: str = _read(
        "Unequal directions: max, sum, mean, mutual or refuse.",
        "max",
        complete=("max", "sum", "mean", "mutual", "refuse"),
    )


def _with_groups(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """A command whose parameters that are groups become options, one per field, in order."""
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            inner = get_type_hints(groups[name])
            options = {each.name: each.metadata["option"] for each in fields(groups[name])}
            if isinstance(parameter.default, OptionInfo):
                options["out"] = parameter.default
            parameters += [_parameter(each, inner[each], options[each]) for each in options]
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))

    def whole(**given: Any) -> int | None:
        plain = {k: v.value if isinstance(v, Enum) else v for k, v in given.items()}
        for name, group in groups.items():
            plain[name] = group(**{each.name: plain.pop(each.name) for each in fields(group)})
        return command(**plain)

    whole.__name__, whole.__doc__ = command.__name__, command.__doc__
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return whole


METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    """A parameter as Typer reads it, whose option knows its value's name, and a flag no "--no-"."""
    if isinstance(default, OptionInfo):
        default = copy(default)
        kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
        if kinds != [bool]:
            default.metavar = default.metavar or METAVARS.get(kinds[0], "NAME")
        elif not default.param_decls:
            default.param_decls = (f"--{name.replace('_', '-')}",)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
