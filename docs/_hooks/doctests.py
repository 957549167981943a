"""Show docstrings as they are meant: doctests as code, which Markdown would take for quotations,
and stars of formulas, as in L(w*), which it would take for emphasis.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
_CODE = re.compile(r"(```.*?```|``.*?``|`[^`]*`|(?<=\n\n)(?: {4}[^\n]*\n?)+)", re.DOTALL)
_STAR = re.compile(r"(?<=[^\s*\\])\*(?!\*)")


def keep_stars(text: str) -> str:
    """The text with a backslash before stars that follow a letter or a bracket, outside of code."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else _STAR.sub(r"\*", part) for i, part in enumerate(parts))


class Doctests(griffe.Extension):
    """Put a fence around every doctest (an event of Griffe, which reads the sources)."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            fenced = _DOCTEST.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
            obj.docstring.value = keep_stars(fenced)
