"""Options that several commands share, alone and in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from lambdahat.cli.exits import output_path

Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]


def out_option(help: str) -> Any:
    """An --out with its help; an empty name stays one."""
    return typer.Option(parser=output_path, metavar="PATH", help=help)


Out = Annotated[Path | None, out_option("Folder for results, tables and figures.")]
Kept = Annotated[
    Path | None,
    out_option("Folder for results, tables and figures; an interrupted run resumes from it."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document only.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no tables.")]


@dataclass(frozen=True)
class Output:
    """Where results go."""

    out: Out = None
    as_json: Json = False
    quiet: Quiet = False


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
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

    def whole(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    whole.__name__, whole.__doc__ = command.__name__, command.__doc__
    whole.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    whole.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return whole


def _option(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
