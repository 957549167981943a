"""The page: one HTML file that opens offline, of experiments or of any results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lambdahat._core.check import require
from lambdahat._core.storage import write_atomically
from lambdahat.experiments import published
from lambdahat.experiments.kit.experiment import Experiment
from lambdahat.experiments.kit.store import stores_in
from lambdahat.report.page_markup import document
from lambdahat.report.sections import Section, named_results, section_of_result, section_of_store

Find = Callable[[str], Experiment]


def page(results: Any, path: str | Path, title: str = "Measurements") -> Path:
    """Write one HTML file of any results, and return its path.

    ``results`` is a result, a mapping from names, a sequence, or a folder: of saved results, of the
    stores of experiments, or of both. The file needs no server and no network: it holds its charts,
    tables and data.
    """
    sections = [_section(name, result) for name, result in named_results(results).items()]
    if isinstance(results, str | Path):
        sections = [*_sections_of_stores([results], None), *sections]
    return write_page(sections, path, title)


def page_of_stores(
    folders: str | Path | Iterable[str | Path],
    path: str | Path,
    title: str = "Reproductions",
    find: Find | None = None,
) -> Path:
    """Write the page of all experiments whose stores lie in ``folders``, from the stores alone.

    ``find`` gives the experiment of a name, and raises ValueError for one that it does not know; by
    default it is that of ``lambdahat.experiments.published``.
    """
    listed = [folders] if isinstance(folders, str | Path) else list(folders)
    return write_page(_sections_of_stores(listed, find), path, title)


def page_of_folders(folders: Iterable[str | Path], path: str | Path) -> Path:
    """Write the page of all stores and all saved results in ``folders``."""
    listed = list(folders)
    results = [
        _section(name, found, Path(folder))
        for folder in listed
        for name, found in named_results(folder).items()
    ]
    title = "Measurements" if results else "Reproductions"
    return write_page([*_sections_of_stores(listed, None), *results], path, title)


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> Path:
    """Write the page of given sections."""
    require(
        len(sections) > 0,
        "the page",
        "have something to show",
        "no results",
        "name a folder with saved results or with the stores of experiments",
    )
    from plotly.offline import get_plotlyjs

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, document(sections, title, get_plotlyjs()).encode())
    return path


def _section(name: str, result: Any, folder: Path | None = None) -> Section:
    """The section of a result; one that does not hold what its kind should is named, with its
    place.
    """
    try:
        return section_of_result(name, result)
    except Exception as error:  # whatever is wrong inside a result, a reader wants to know which
        place = name if folder is None else str(folder / name)
        text = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{place} must be a result that can be shown, got one that fails with"
            f" {type(error).__name__}: {text}"
        ) from error


def _sections_of_stores(folders: Sequence[str | Path], find: Find | None) -> list[Section]:
    """Paper by paper, in the order of the registry."""
    known = {name: place for place, name in enumerate(published.PLACES)}
    stores = [store for folder in folders for store in stores_in(folder)]
    stores.sort(key=lambda store: known.get(store.experiment, len(known)))
    return [section_of_store(store, _known(find, store.experiment)) for store in stores]


def _known(find: Find | None, name: str) -> Experiment | None:
    """The experiment of a store; None where another version of the library has made it."""
    try:
        return (find or published.find)(name)
    except ValueError:
        return None
