"""What figures share: a canvas that needs no display, colours, numbers as text. Nothing changes global settings."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lambdahat.results import Estimate, Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers too
BLUE, VERMILION, GREEN, AMBER, SKY, PURPLE = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7"
GREY = "#666666"


def new_figure(width: float = 6.4, height: float = 4.0) -> Figure:
    """An empty figure on the Agg canvas, outside pyplot: it needs no display and is freed like any object."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_axes(height: float = 4.0) -> Axes:
    """One pair of axes in a new figure."""
    return tidy(new_figure(height=height).add_subplot())


def tidy(axes: Axes) -> Axes:
    """Axes without the box's upper and right edges, with a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def title(axes: Axes, text: str, status: Status) -> None:
    """A title, which also says when the result is not to be trusted as it is."""
    axes.set_title(text if status.ok else f"{text} [{status.name}]", fontsize="medium")


def counted(number: int, noun: str) -> str:
    """A text such as "1 probe", "1,200 parameters"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def sentence(text: str) -> str:
    """With a capital, where it begins with a word: "the loss" as "The loss", "λ̂ rises" and "k = 3" as they are."""
    word = re.match(r"a \w|[a-z]{2,}\b", text)
    return text[0].upper() + text[1:] if word else text


def minus(text: str) -> str:
    """With a minus sign where a number is negative, in text or HTML: not in ranges, exponents, tags and commands.

    >>> minus("-0.3 (-1.5 to 2), 3-5, 1e-05")
    '−0.3 (−1.5 to 2), 3-5, 1e-05'
    """
    return text if "<code" in text else re.sub(r"(?<![\w.)\]/-])-(?=\.?\d)(?![^<>]*>)", "−", text)


def text_colour(background: Sequence[float]) -> str:
    """Black or white, whichever has the higher contrast on a colour (red, green, blue in [0, 1]; WCAG 2.1)."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in background]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"


def value_text(estimate: Estimate) -> str:
    """As "12.3 ± 0.4", "12.3 (exact)" where there is no error, "at least 12.3" where it is infinite.

    As many digits as the error leaves.
    """
    value, error = float(estimate), float(estimate.stderr)
    if error == math.inf:
        return f"at least {value:.6g}"
    if not math.isfinite(error):
        return f"{value:.6g} (error unknown)"
    if error == 0 or not math.isfinite(value):
        return f"{value:.6g}" + (" (exact)" if error == 0 else f" ± {error:.2g}")
    lead = math.floor(math.log10(abs(value))) if value else 0
    digits = min(max(lead - math.floor(math.log10(error)) + 2, 2), 10)
    return f"{value:#.{digits}g}".removesuffix(".") + f" ± {error:.2g}"
