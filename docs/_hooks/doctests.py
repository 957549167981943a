"""Show the doctests in docstrings as code: Markdown would take ``>>>`` for quotations."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put a fence around every doctest (an event of Griffe, which reads the sources)."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(
                lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value
            )
