"""What the rows of a store say, as far as they go."""

import dataclasses

from lambdahat.experiments.findings import findings
from lambdahat.experiments.sweeps import sweep
from tests.experiments.toys import Config, toy


def unreadable(rows):
    raise KeyError("width")


def test_all_cells_give_everything(tmp_path):
    found = findings(toy(), sweep(toy(), tmp_path, scale="smoke"))
    assert (found.done, found.total, found.notes, found.faulty) == (4, 4, (), False)
    assert found.progress == "All 4 cells have finished."
    assert found.verdicts
    assert found.tables
    assert found.charts


def test_some_cells_give_what_they_can(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke", only="rate=2.0")
    found = findings(dataclasses.replace(toy(), claims=unreadable, charts=unreadable), store)
    assert found.progress == "2 of 4 cells have finished; the claims and charts need some of the others."
    assert (found.notes, found.faulty) == ((found.progress,), False)
    assert found.tables
    assert findings(toy(), store).progress.startswith("2 of 4 cells have finished: figures and verdicts are those")


def test_what_all_cells_do_not_give_is_a_fault(tmp_path):
    store = sweep(toy(), tmp_path, scale="smoke")
    found = findings(dataclasses.replace(toy(), tables=unreadable), store)
    assert found.notes == ("The tables could not be made from these rows: KeyError: 'width'",)
    assert found.faulty
    assert found.verdicts


def test_cells_of_another_grid_do_not_count(tmp_path):
    store = sweep(toy(smoke=Config(3)), tmp_path, scale="smoke")
    found = findings(toy(smoke=Config(2, rates=(2.0, 3.0))), store)
    assert (found.done, found.total) == (2, 4)
    assert found.notes[1].startswith("4 stored cells are not in the grid of this version")
