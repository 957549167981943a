"""The page on chapter 7 counts the verdicts of the stored runs."""

import re

import pytest

from lambdahat.experiments import Store, find, judge
from lambdahat.experiments.kit.cells import key_of
from lambdahat.experiments.kit.claims import FAILS, HOLDS, OPEN, UNTESTED
from tests.documents import DOCS, ROOT

pytestmark = pytest.mark.documents
STORES = ROOT / "benchmarks" / "results" / "reproductions"
NAMES = (
    "gadam-image",
    "gadam-imagenet",
    "gadam-language",
    "adam-ia",
    "averaging-schedules",
    "averaging-starts",
    "averaging-dimension",
    "averaging-ensembles",
)


@pytest.mark.parametrize("name", NAMES)
def test_stores_have_just_the_cells_of_the_grid(name):
    assert Store(STORES, name, "cpu").finished() == {
        key_of(cell) for cell in find(name).grid("cpu")
    }


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_are_counted_as_stored(name):
    verdicts = judge(find(name).claims(Store(STORES, name, "cpu").rows()))
    thesis, ours = ([each.verdict for each in verdicts if each.own is own] for own in (False, True))
    counts = [str(thesis.count(kind)) for kind in (HOLDS, FAILS, OPEN, UNTESTED)]
    own = (
        f"{ours.count(HOLDS)}, {ours.count(FAILS)},"
        f" {len(ours) - ours.count(HOLDS) - ours.count(FAILS)}"
    )
    text = (DOCS / "experiments-averaging.md").read_text(encoding="utf-8")
    found = re.findall(rf"^\| `{name}` \| (\d.*) \|$", text, re.MULTILINE)
    assert found == [" | ".join([*counts, own])]
