"""What figures share: a canvas without a display, colours and texts; no global settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lambdahat.results.charts import COLOURS, Chart, Heat, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VECTOR_TEXT: Any = {"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}
# Okabe and Ito's palette, told apart by colour-blind readers too
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
AMBER, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"
GREY = "#666666"
TURNS = 4  # how often the colours are used again, each time with other dashes, marks and hatching
MARKED = 40  # a line of more points has no marks
FINE = 8  # a map with at least so many numbers along both sides is a field, drawn as contours
TEXTED = 12  # a map with at most so many cells along a side has its values written in


def new_figure(width: float = 6.4, height: float = 4.0) -> Figure:
    """An empty figure on the Agg canvas, outside pyplot: no display, freed like any object.

    Text in its PDF and SVG files is text, which can be searched and edited, and not outlines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.savefig = partial(_save_text_as_text, figure)
    return figure  # type: ignore[no-any-return]


def _save_text_as_text(figure: Figure, *args: Any, **options: Any) -> None:
    from matplotlib import rc_context

    with rc_context(VECTOR_TEXT):  # for this file alone
        type(figure).savefig(figure, *args, **options)


def new_axes(height: float = 4.0) -> Axes:
    """One pair of axes in a new figure."""
    return tidy(new_figure(height=height).add_subplot())


def tidy(axes: Axes) -> Axes:
    """Axes without the box's upper and right edges, with a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def look_of(chart: Chart, number: int, colours: int) -> tuple[int | None, int]:
    """Which of the colours a series has, and how often they were used up before.

    A published series has the colour of the series whose name begins its own, else none; one that
    names its colour does not use up another.
    """
    ours = [i for i, each in enumerate(chart.series) if not (each.published or each.colour)]
    series = chart.series[number]
    if series.colour:
        return (COLOURS.index(series.colour) if series.colour in COLOURS else None), 0
    place: int | None
    if series.published:
        names = [chart.series[index].name for index in ours]
        alike = [at for at, name in enumerate(names) if series.name.startswith(name)]
        place = max(alike, key=lambda at: len(names[at]), default=None)
    else:
        place = ours.index(number)
    return (None, 0) if place is None else (place % colours, place // colours % TURNS)


def is_field(heat: Heat) -> bool:
    """Whether a map is a function sampled on a fine grid rather than a table of cells."""
    fine = heat.cells or min(len(heat.x), len(heat.y)) >= FINE
    return fine and not any(isinstance(v, str) for v in (*heat.x, *heat.y))


def all_hollow(series: Series) -> bool:
    """Whether no point of a series converged, so that its entry in the legend is hollow too."""
    return bool(series.hollow) and len(series.hollow) == len(series.x)


def level_texts(levels: Iterable[float]) -> list[str]:
    """Ascending levels with as many digits as tell neighbours apart.

    >>> level_texts([2.35, 2.4, 2.45])
    ['2.35', '2.4', '2.45']
    """
    plain = [float(level) for level in levels]
    gaps = [math.inf, *(high - low or math.inf for low, high in pairwise(plain)), math.inf]
    rooms = [0.1 * min(pair) for pair in pairwise(gaps)]
    for digits in range(2, 15):
        texts = [f"{level:.{digits}g}" for level in plain]
        errors = (abs(float(text) - level) for text, level in zip(texts, plain, strict=True))
        if all(error <= room for error, room in zip(errors, rooms, strict=True)):
            break
    return texts


def names_of(chart: Chart) -> list[str]:
    """The names along the x axis in order; none where its places are numbers."""
    if chart.x_names:
        return list(chart.x_names)
    places = [place for series in chart.series for place in series.x]
    if not any(isinstance(place, str) for place in places):
        return []
    return list(dict.fromkeys(map(place_text, places)))


def place_text(place: float | str) -> str:
    """A place on an axis in words."""
    return place if isinstance(place, str) else f"{place:.6g}"


def side_by_side(chart: Chart) -> bool:
    """Whether bars of several series share places, so that they must stand beside each other."""
    places = [place for series in chart.series if series.style == "bars" for place in set(series.x)]
    return len(set(places)) < len(places)


def sentence(text: str) -> str:
    """Capitalise a text that begins with a word; "λ̂ rises" and "k = 3" stay as they are."""
    word = re.match(r"a \w|[a-z]{2,}\b", text)
    return text[0].upper() + text[1:] if word else text


def minus(text: str) -> str:
    """With a minus sign where a number is negative, in text or HTML: not in ranges, exponents, tags
    and commands.

    >>> minus("-0.3 (-1.5 to 2), 3-5, 1e-05")
    '−0.3 (−1.5 to 2), 3-5, 1e-05'
    """
    return text if "<code" in text else re.sub(r"(?<![\w.)\]/-])-(?=\.?\d)(?![^<>]*>)", "−", text)


def text_colour(background: Sequence[float]) -> str:
    """Black or white, whichever has the higher contrast on an RGB colour (WCAG 2.1)."""
    luminance = 0.0
    for weight, part in zip((0.2126, 0.7152, 0.0722), background, strict=True):
        linear = part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        luminance += weight * linear
    return "black" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "white"
