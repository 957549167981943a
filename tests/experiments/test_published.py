"""Every experiment runs whole at the scale smoke: rows, tables, claims that are judged, charts."""

from itertools import groupby

import pytest

from lambdahat.experiments.kit.claims import VERDICTS, judge
from lambdahat.experiments.kit.experiment import FLATNESS, NGD, REGULARIZATION, SCALES, SPECTRAL
from lambdahat.experiments.published import PLACES, every, find


@pytest.mark.parametrize("name", PLACES)
def test_the_smoke_scale_runs(name, smoke):
    experiment, store = find(name), smoke(name)
    assert store.errors() == []
    rows = store.rows()
    verdicts = judge(experiment.claims(rows))
    assert verdicts
    assert {verdict.verdict for verdict in verdicts} <= set(VERDICTS)
    for table in experiment.tables(rows):
        assert table.rows
        assert all(len(row) == len(table.header) for row in table.rows), table.title
    assert experiment.charts(rows)


def test_experiments_come_paper_by_paper():
    found = [experiment.paper for experiment in every()]
    assert [paper for paper, _ in groupby(found)] == [NGD, FLATNESS, REGULARIZATION, SPECTRAL]


def test_every_experiment_says_what_it_is():
    for experiment in every():
        assert set(experiment.scales) == set(SCALES)
        assert experiment.title
        assert experiment.part
        assert experiment.assumptions
        # what the paper ran, or that it does not say
        assert experiment.size.endswith("."), experiment.name
        assert [len(experiment.grid(scale)) for scale in SCALES]
