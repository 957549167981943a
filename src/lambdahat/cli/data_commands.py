"""The arguments of ``lambdahat data``; what each command does is in ``datasets``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lambdahat.cli.exits import EXIT_CODES, exit_codes, output_path
from lambdahat.cli.options import Json, Quiet

data_commands = typer.Typer(help="List, download and verify data sets.", no_args_is_help=True)
Names = Annotated[
    list[str] | None, typer.Argument(help="Data set names.", show_default="all present")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        parser=output_path,
        metavar="PATH",
        help="Data folder.",
        show_default="LAMBDAHAT_DATA, else the user's data folder",
    ),
]


@data_commands.command("list", epilog=EXIT_CODES)
def list_data(as_json: Json = False) -> None:
    """List every data set and the location of its files."""
    from lambdahat.cli.datasets import run_list

    with exit_codes():
        code = run_list(as_json)
    raise typer.Exit(code)


@data_commands.command("fetch", epilog=EXIT_CODES)
def fetch_data(
    names: Annotated[list[str], typer.Argument(help="Data set names; an unknown name lists all.")],
    folder: DataFolder = None,
    mirror: Annotated[str | None, typer.Option(help="Base URL of another mirror.")] = None,
    quiet: Quiet = False,
) -> None:
    """Download and verify data sets; an interrupted download resumes."""
    from lambdahat.cli.datasets import run_fetch

    with exit_codes("what has come is kept; the same command continues"):
        code = run_fetch(names, folder, mirror, quiet)
    raise typer.Exit(code)


@data_commands.command("check", epilog=EXIT_CODES)
def check_data(
    names: Names = None, folder: DataFolder = None, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Compare the files with their published checksums, or with their size if none is published."""
    from lambdahat.cli.datasets import run_check

    with exit_codes():
        code = run_check(names or [], folder, as_json, quiet)
    raise typer.Exit(code)
