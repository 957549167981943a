"""Fill the gallery: every figure of the documentation as a card, and the code that draws it.

A card has the figure, its description (the alternative text on the page that shows it), a link to
that page and one to the code, which is cut out of ``docs/*figures.py``.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

CARDS, CODE = "<!-- cards -->", "<!-- code -->"
SHOWN = re.compile(r"!\[([^]]*)\]\(figures/([\w-]+)\.png\)")
DRAWN = re.compile(r'"([\w-]+)": (?:part\("(\w+)", "(\w+)"\)|lambda: script\("(\w+)"\)\["(\w+)"\])')
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)


class Card(NamedTuple):
    """A figure, what it shows, and the page and its title that it is on."""

    figure: str
    text: str
    page: str
    title: str


@cache
def _cards(docs: Path) -> tuple[Card, ...]:
    """Every figure once, with the first page that shows it; the first page of the site is last."""
    found: dict[str, Card] = {}
    for path in sorted(docs.glob("*.md"), key=lambda path: (path.stem == "index", path.name)):
        text = path.read_text(encoding="utf-8")
        title = TITLE.search(text)
        for description, figure in SHOWN.findall(text):
            assert title is not None
            found.setdefault(figure, Card(figure, description, path.name, title[1]))
    return tuple(found.values())


@cache
def _sources(docs: Path) -> dict[str, str]:
    """The code of each figure: its function and those of the same file that it calls."""
    listed = DRAWN.findall((docs / "figures.py").read_text(encoding="utf-8"))
    return {
        name: _source(docs / f"{script or other}_figures.py", function or another)
        for name, script, function, other, another in listed
    }


def _source(path: Path, name: str) -> str:
    text = path.read_text(encoding="utf-8")
    functions = {
        node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    }
    needed, waiting = set[str](), [name]
    while waiting:
        at = waiting.pop()
        if at not in needed and at in functions:
            needed.add(at)
            called = (node.id for node in ast.walk(functions[at]) if isinstance(node, ast.Name))
            waiting += called
    parts = [ast.get_source_segment(text, node) for key, node in functions.items() if key in needed]
    return "\n\n\n".join(part for part in parts if part)


def _grids(cards: tuple[Card, ...], sources: dict[str, str], navigation: Any) -> str:
    """The cards group by group and page by page, in the order of the navigation."""
    parts = []
    for group in navigation:
        for name, entries in group.items():
            pages = [page for entry in entries for page in entry.values()]
            mine = [card for page in pages for card in cards if card.page == page]
            if mine:
                parts.append(f"## {name}\n\n{_grid(mine, sources)}")
    return "\n\n".join(parts)


def _grid(cards: list[Card], sources: dict[str, str]) -> str:
    lines = ['<div class="grid cards" markdown>', ""]
    for card in cards:
        code = f" · [code](gallery-code.md#{card.figure})" if card.figure in sources else ""
        lines += [
            f"-   [![{card.text}](figures/{card.figure}.png)]({card.page})",
            "",
            f"    {card.text}",
            "",
            f"    [{card.title}]({card.page}){code}",
            "",
        ]
    return "\n".join([*lines, "</div>"])


def on_page_markdown(markdown: str, *, config: Any, **_: object) -> str:
    """Put the cards and the code where a page marks them (an event of MkDocs)."""
    if CARDS not in markdown and CODE not in markdown:
        return markdown
    docs = Path(config.docs_dir)
    cards, sources = _cards(docs), _sources(docs)
    sections = [
        f"## {card.figure}\n\n{card.text}. Shown in [{card.title}]({card.page}).\n\n"
        f"```python\n{sources[card.figure]}\n```"
        for card in cards
        if card.figure in sources
    ]
    grids = _grids(cards, sources, config.nav)
    return markdown.replace(CARDS, grids).replace(CODE, "\n\n".join(sections))
