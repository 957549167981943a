"""The stored runs are of today's grids: a cell that has run would not run again, whatever data
this machine has.
"""

from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.store import stores_in
from lambdahat.experiments.published import find
from tests.documents import ROOT

STORES = ROOT / "benchmarks" / "results" / "reproductions"


def test_stored_cells_are_in_the_grid():
    strangers = {}
    for store in stores_in(STORES):
        grid = {key_of(cell) for cell in find(store.experiment).grid(store.scale)}
        strangers[store.path.name] = len(store.finished() - grid)
    assert strangers
    assert {name: count for name, count in strangers.items() if count} == {}
