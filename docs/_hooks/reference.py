"""Give every page of the reference a table of its names, and its first page a table of all names.

A page lists objects as ``::: lambdahat.trace``, which mkdocstrings renders. A comment in the line
above, ``<!-- lh.sampling.sgld -->``, gives the public name of an object that is defined under
another one.
"""

import re
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import griffe

keep_stars = runpy.run_path(str(Path(__file__).with_name("doctests.py")))["keep_stars"]
ENTRY = re.compile(
    r"^(?:<!-- (?P<shown>lh\.[\w.]+) -->\n)?::: lambdahat\.(?P<path>[\w.]+)$", re.MULTILINE
)
SENTENCE_END = re.compile(r"(?<=\.)(?<!al\.)(?<!Eq\.)(?<!Eqs\.)(?<!Fig\.)\s")
FOLDER, ALL = "reference/", "<!-- all names -->"


@cache
def _package(source: str) -> griffe.Object:
    package = griffe.load("lambdahat", search_paths=[source])
    assert isinstance(package, griffe.Object)
    return package


def _row(found: re.Match[str], source: str, anchor: bool = False) -> str:
    """A row of the table: the name with its link, and the first sentence of its docstring."""
    docstring = _package(source)[found["path"]].docstring
    text = docstring.value.split("\n\n")[0] if docstring else ""
    first = SENTENCE_END.split(" ".join(text.split()), maxsplit=1)[0]
    said = keep_stars(first.replace("``", "`").replace("|", "\\|"))
    shown = found["shown"] or f"lh.{found['path']}"
    here = f'<span id="lambdahat.{found["path"]}"></span>' if anchor else ""
    return f"| {here}[`{shown}`][lambdahat.{found['path']}] | {said} |"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Add the table to the source of a page (an event of MkDocs)."""
    uri, folder = page.file.src_uri, Path(config.docs_dir)
    if not uri.startswith(FOLDER):
        return markdown
    source = str(folder.parent / "src")
    head = "| name | what it is |\n| --- | --- |\n"
    if ALL in markdown:
        pages = sorted((folder / FOLDER).glob("*.md"))
        found = [m for path in pages for m in ENTRY.finditer(path.read_text(encoding="utf-8"))]
        found.sort(key=lambda m: (m["shown"] or f"lh.{m['path']}").lower())
        # links to the reference from before it had several pages end at these rows
        rows = [_row(m, source, anchor=True) for m in found]
        return markdown.replace(ALL, head + "\n".join(rows))
    found = list(ENTRY.finditer(markdown))
    if len(found) < 3:
        return markdown
    start = re.search(r"^(?:## |<!-- lh\.|::: )", markdown, re.MULTILINE)
    assert start is not None
    table = head + "\n".join(_row(m, source) for m in found)
    return f"{markdown[: start.start()]}{table}\n\n{markdown[start.start() :]}"
