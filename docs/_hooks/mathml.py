"""Turn the TeX that arithmatex marks into MathML while the site is built, so that a page needs
no script to show it.
"""

import html
import re

from latex2mathml.converter import convert

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Replace every formula of a rendered page (an event of MkDocs)."""
    content = _BLOCK.sub(
        lambda found: convert(html.unescape(found[1]).strip(), display="block"), content
    )
    return _INLINE.sub(lambda found: convert(html.unescape(found[1]).strip()), content)
