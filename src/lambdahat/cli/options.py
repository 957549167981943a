"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Seed = Annotated[int, typer.Option(min=0, help="Decides all random probes and subsamples.")]
Out = Annotated[Path | None, typer.Option(help="Folder for results, tables and figures; a killed run resumes from it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars and no table.")]
