"""The options of the commands, alone and in groups, their help texts, and the names they take.

Nothing here imports torch: help texts, completion and misspelt names are answered at once.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from lambdahat._core.check import did_you_mean, require_choice
from lambdahat.cli.exits import OK, exit_codes, output_path

LIBRARY = Path(__file__).parent.parent
# each registry, and the source files and decorators that fill it
REGISTRIES = {
    "data set": ("data.catalogue", "CATALOGUE", "data/*.py", "register_dataset"),
    "experiment": ("experiments.published", "PLACES", "experiments/published.py", ""),
    "kernel": ("sampling.kernels", "KERNELS", "sampling/kernels/*.py", "register"),
    "model": ("models", "MODELS", "models/*.py", "register_model"),
    "optimizer": ("optim.registry", "OPTIMIZERS", "optim/*.py", "register_optimizer"),
    "quantity": ("_quantities", "QUANTITIES", "_quantities.py", ""),
    "regularizer": ("optim.registry", "REGULARIZERS", "optim/*.py", "register_regularizer"),
    "schedule": ("optim.schedules", "SCHEDULES", "optim/schedules.py", ""),
    "tracker": ("training.trackers", "TRACKERS", "training/*trackers.py", "register"),
}
PROBLEM, SAMPLING, OUTPUT = "Problem", "Sampling; what is not given is tuned", "Output"


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
    for path in sorted(LIBRARY.glob(pattern)):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names |= dict.fromkeys(_registrations(node, registry, decorator))
    return tuple(names)


def _registrations(node: ast.AST, registry: str, decorator: str) -> Iterator[str]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) == registry:
            yield from (ast.literal_eval(key) for key in node.value.keys if key)
    for mark in getattr(node, "decorator_list", ()):
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == decorator:
            # a tracker has the name of its class and of further columns, all others one name
            count = len(mark.args) if decorator == "register" else 1
            yield from (ast.literal_eval(word) for word in mark.args[:count])
            for part in getattr(node, "body", ()):
                if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "name":
                    yield ast.literal_eval(part.value)


def require_known(kind: str, name: str, option: str, cure: str = "") -> None:
    """Refuse a name that is not registered, before anything heavy is imported."""
    require_choice(name, option, known_names(kind), cure)


def complete(kind: str, *others: str) -> Callable[[str], list[str]]:
    """The completion of a name, or of the last of a comma-separated list."""

    def names(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known = (*known_names(kind), *others)
        return [before + comma + name for name in known if name.startswith(last)]

    return names


def words(*choices: str) -> Callable[[], list[str]]:
    """The completion of an option with fixed choices."""
    return lambda: list(choices)


class _Help:
    """Help with one option per line, under the title of its group; errors name what is near."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the nearest choice to Typer's error, in which pydantic's words are left out."""
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc,no-any-return]
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            given, _, choices = error.message.partition(" is not one of ")
            near = did_you_mean(given.strip("'"), re.findall("'([^']+)'", choices))
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

        def add(function: Callable[..., int | None]) -> Callable[..., None]:
            @wraps(function)
            def run(**given: Any) -> None:
                text = kept if isinstance(kept, str) else kept[given.get("out") is None]
                with exit_codes("" if given.get("dry_run") else text.format(**given)):
                    code = function(**given)
                raise typer.Exit(OK if code is None else code)

            return register(run)

        return add


def _of(panel: str, help: str, metavar: str = "N", **settings: Any) -> Any:
    """An option of a group; N is a count and X a real number."""
    return typer.Option(metavar=metavar, rich_help_panel=panel, help=help, **settings)


def out_option(help: str) -> Any:
    """An --out with its help; an empty name stays one."""
    return typer.Option(parser=output_path, metavar="PATH", rich_help_panel=OUTPUT, help=help)


Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Random seed.")]
Out = Annotated[Path | None, out_option("Folder for results, tables and figures.")]
Kept = Annotated[Path | None, out_option("Folder for results; the same command resumes there.")]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON document only.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", rich_help_panel=OUTPUT, help="No progress bars and no tables.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", rich_help_panel=OUTPUT, help="Time one product and predict the cost."
    ),
]


class CurvatureChoice(StrEnum):
    """The matrices that can be measured."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"
    empirical_fisher = "empirical_fisher"
    covariance = "covariance"


class NormChoice(StrEnum):
    """How normalisation layers are evaluated."""

    eval = "eval"
    train = "train"
    frozen = "frozen"


class Dtype(StrEnum):
    """The precision of the model."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


Factory = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY", help="module:function that returns a Problem, or a run folder."
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        rich_help_panel=PROBLEM,
        help="State-dict file or run folder; best or averaged of a run.",
    ),
]
Curvature = Annotated[
    CurvatureChoice,
    typer.Option(metavar="NAME", help="hessian, ggn, fisher, empirical_fisher or covariance."),
]
Depth = Annotated[int, typer.Option(min=1, metavar="N", help="Lanczos steps (one product each).")]


@dataclass(frozen=True)
class Output:
    """Where results go."""

    out: Out = None
    as_json: Json = False
    quiet: Quiet = False


@dataclass(frozen=True)
class ProblemChoices:
    """What the command line says about a problem; None leaves it as the factory made it."""

    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=PROBLEM,
            help="Use a random subset of N samples.",
            show_default="all",
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=PROBLEM, help="Random seed.")
    ] = 0
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=PROBLEM,
            help="cpu, cuda, cuda:1, …",
            show_default="the model's",
            autocompletion=words("cpu", "cuda"),
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=PROBLEM,
            help="float32, float64 or bfloat16.",
            show_default="the model's",
        ),
    ] = None
    norm: Annotated[
        NormChoice | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=PROBLEM,
            help="Norm layers: eval, train, frozen.",
            show_default="the factory's",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingChoices:
    """Settings of the chains; None leaves them to be tuned."""

    chains: Annotated[int | None, _of(SAMPLING, "Number of chains.", min=1, show_default="4")] = (
        None
    )
    draws: Annotated[int | None, _of(SAMPLING, "Draws per chain.", min=1)] = None
    burn_in: Annotated[int | None, _of(SAMPLING, "Burn-in steps per chain.", min=0)] = None
    batch_size: Annotated[int | None, _of(SAMPLING, "Batch size of a step.", min=1)] = None
    nbeta: Annotated[
        str | None,
        _of(
            SAMPLING,
            'Inverse temperature nβ: a number, "n/log n" or batch.',
            "X",
            show_default="n/log n",
            autocompletion=words("n/log n", "batch"),
        ),
    ] = None
    localization: Annotated[
        float | None,
        _of(SAMPLING, "Localization γ around the checkpoint.", "X", min=0, show_default="by rule"),
    ] = None
    step_size: Annotated[float | None, _of(SAMPLING, "Step size of the kernel.", "X", min=0)] = None
    kernel: Annotated[
        str | None,
        _of(
            SAMPLING,
            "kinetic, sgld, hmc, mala, rmsprop_sgld, sghmc or sgnht.",
            "NAME",
            autocompletion=complete("kernel"),
        ),
    ] = None
    tol: Annotated[
        float | None, _of(SAMPLING, "Relative standard error to reach.", "X", show_default="0.03")
    ] = None
    max_gradients: Annotated[
        int | None, _of(SAMPLING, "Most gradients over all chains.", min=100)
    ] = None

    def given(self) -> dict[str, Any]:
        """The settings that were given; a temperature that is a number becomes one."""
        chosen = {name: value for name, value in asdict(self).items() if value is not None}
        try:
            return {**chosen, "nbeta": float(chosen["nbeta"])}
        except (KeyError, ValueError):
            return chosen


DATA, STEPS, TRACKING = "Model and data", "Optimisation", "Tracking"


@dataclass(frozen=True)
class RecipeChoices:
    """The model and the data of a training run."""

    model: Annotated[
        str,
        _of(DATA, "Network; an unknown name lists all.", "NAME", autocompletion=complete("model")),
    ]
    data: Annotated[
        str,
        _of(
            DATA,
            "Data set; an unknown name lists all.",
            "NAME",
            autocompletion=complete("data set"),
        ),
    ]
    model_option: Annotated[
        list[str] | None, _of(DATA, 'Such as "widths=(64,32)"; repeatable.', "OPTION")
    ] = None
    data_option: Annotated[
        list[str] | None, _of(DATA, "Such as normalization=standard; repeatable.", "OPTION")
    ] = None
    samples: Annotated[
        int | None, _of(DATA, "Train on the first N samples.", min=1, show_default="all")
    ] = None
    seed: Annotated[int, _of(DATA, "Random seed.", min=0)] = 0


@dataclass(frozen=True)
class TrainingChoices:
    """How a training run goes, what it tracks and what it keeps."""

    optimizer: Annotated[
        str,
        _of(
            STEPS,
            "Optimiser; an unknown name lists all.",
            "NAME",
            autocompletion=complete("optimizer"),
        ),
    ] = "sgd"
    lr: Annotated[
        float | None,
        _of(STEPS, "Learning rate.", "X", show_default="sgd 0.1, momentum 0.9; else its own"),
    ] = None
    epochs: Annotated[int, _of(STEPS, "Passes over the training data.", min=1)] = 10
    batch_size: Annotated[int, _of(STEPS, "Batch size.", min=1)] = 128
    schedule: Annotated[
        str | None,
        _of(
            STEPS, 'cosine, "step:milestones=(6,8)", …', "NAME", autocompletion=complete("schedule")
        ),
    ] = None
    regularizer: Annotated[
        list[str] | None,
        _of(STEPS, "l2:rate=1e-4, …; repeatable.", "NAME", autocompletion=complete("regularizer")),
    ] = None
    averaging: Annotated[
        str | None,
        _of(
            STEPS,
            "average:start=161, ema:unit=step, …",
            "NAME",
            autocompletion=words("average", "ema"),
        ),
    ] = None
    lookahead: Annotated[int | None, _of(STEPS, "Wrap in Lookahead of N steps.", min=1)] = None
    accumulate: Annotated[int, _of(STEPS, "Batches per optimiser step.", min=1)] = 1
    clip: Annotated[float | None, _of(STEPS, "Clip the gradient norm to X.", "X")] = None
    augment: Annotated[
        bool, typer.Option("--augment", rich_help_panel=STEPS, help="Random crops and flips.")
    ] = False
    precision: Annotated[
        str,
        _of(
            STEPS,
            "float32, bfloat16 or float16.",
            "NAME",
            autocompletion=words("float32", "bfloat16", "float16"),
        ),
    ] = "float32"
    early_stopping: Annotated[
        int | None, _of(STEPS, "Stop after N epochs without improvement.", min=1)
    ] = None
    device: Annotated[
        str, _of(STEPS, "cpu, cuda, …", "NAME", autocompletion=words("cpu", "cuda"))
    ] = "cpu"
    track: Annotated[
        str,
        _of(
            TRACKING,
            "Comma-separated: llc, trace, spectrum, top, …",
            "NAMES",
            autocompletion=complete("tracker"),
        ),
    ] = ""
    track_every: Annotated[int, _of(TRACKING, "Epochs (or steps) between.", min=1)] = 1
    track_unit: Annotated[
        str, _of(TRACKING, "epoch or step.", "NAME", autocompletion=words("epoch", "step"))
    ] = "epoch"
    track_samples: Annotated[
        int | None, _of(TRACKING, "Samples to measure on.", min=2, show_default="1000")
    ] = None
    curvature_samples: Annotated[
        int | None,
        _of(TRACKING, "For the optimiser's curvature.", min=1, show_default="batch size"),
    ] = None
    checkpoint_every: Annotated[int, _of(OUTPUT, "Epochs between checkpoints.", min=1)] = 1
    checkpoint_steps: Annotated[
        int | None, _of(OUTPUT, "Also checkpoint every N steps.", min=1)
    ] = None
    keep: Annotated[int, _of(OUTPUT, "Checkpoints to keep, beside the best.", min=1)] = 2
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=OUTPUT, help="Resume the run in --out.")
    ] = False
    log: Annotated[
        str,
        _of(
            OUTPUT,
            "csv, tensorboard, wandb, mlflow.",
            "NAMES",
            autocompletion=words("csv", "tensorboard", "wandb", "mlflow"),
        ),
    ] = ""


READING = "Reading files"


@dataclass(frozen=True)
class GraphReading:
    """How graph files are read."""

    format: Annotated[
        str | None,
        _of(
            READING,
            "edges, gml, mtx or npz.",
            "NAME",
            show_default="by suffix",
            autocompletion=words("edges", "gml", "mtx", "npz"),
        ),
    ] = None
    unweighted: Annotated[
        bool,
        typer.Option("--unweighted", rich_help_panel=READING, help="Give every edge the weight 1."),
    ] = False
    loops: Annotated[
        str, _of(READING, "Self-loops: drop or keep.", "NAME", autocompletion=words("drop", "keep"))
    ] = "drop"
    duplicates: Annotated[
        str,
        _of(
            READING,
            "Repeated edges: max, sum, mean or refuse.",
            "NAME",
            autocompletion=words("max", "sum", "mean", "refuse"),
        ),
    ] = "max"
    directed: Annotated[
        str,
        _of(
            READING,
            "Unequal directions: max, sum, mean, mutual or refuse.",
            "NAME",
            autocompletion=words("max", "sum", "mean", "mutual", "refuse"),
        ),
    ] = "max"


def with_groups(command: Callable[..., int]) -> Callable[..., int]:
    """A command whose dataclass parameters become options, one per field, in order."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            inner = get_type_hints(groups[name], include_extras=True)
            parameters += [
                _option(field.name, inner[field.name], field.default)
                for field in fields(groups[name])
            ]
        else:
            parameters.append(_option(name, hints[name], parameter.default))

    def whole(**given: Any) -> int:
        plain = {k: v.value if isinstance(v, Enum) else v for k, v in given.items()}
        for name, group in groups.items():
            plain[name] = group(**{field.name: plain.pop(field.name) for field in fields(group)})
        return command(**plain)

    whole.__name__, whole.__doc__ = command.__name__, command.__doc__
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return whole


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
