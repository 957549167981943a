"""What the rows of a store say, as far as they go."""

import dataclasses

from lambdahat.experiments.claims import Claim
from lambdahat.experiments.experiment import key_of
from lambdahat.experiments.findings import _begun, findings
from lambdahat.experiments.statistics import mean_of
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


def grown(**scales):
    """The toy with a claim for each rate that it has rows of, in order of the grid."""

    def claims(rows):
        return [
            Claim(
                f"rate {rate:g} is above {rate - 0.3:g}", "Table 1", "", mean_of(list(part.values())), bound=rate - 0.3
            )
            for rate in rows.distinct("rate")
            if (part := rows.where(rate=rate).paired("value"))
        ]

    return dataclasses.replace(toy(**scales), claims=claims)


def test_a_setting_that_has_just_begun_is_not_judged_beside_others(tmp_path):
    experiment = grown(smoke=Config(4, rates=(0.5, 2.0, 3.0)))
    whole = findings(experiment, sweep(experiment, tmp_path, scale="smoke", only="rate=0.5"))
    for seed in range(2):
        store = sweep(experiment, tmp_path, scale="smoke", only=f"rate=2.0 seed={seed}")
    found = findings(experiment, store)
    assert len(whole.verdicts) == 1
    assert (found.verdicts, found.tables, found.charts) == (whole.verdicts, whole.tables, whole.charts)
    assert found.done == 6
    assert found.notes[1] == "Neither judged nor shown before 3 seeds have run: rate=2.0 (2 of 4)."
    found = findings(experiment, sweep(experiment, tmp_path, scale="smoke", only="rate=2.0 seed=2"))
    assert [verdict.claim for verdict in found.verdicts] == ["rate 0.5 is above 0.2", "rate 2 is above 1.7"]
    assert len(found.notes) == 1


def test_few_seeds_are_judged_where_no_setting_has_more_or_is_to_have_more(tmp_path):
    experiment = grown(smoke=Config(4))
    found = findings(experiment, sweep(experiment, tmp_path / "young", scale="smoke", only="seed=0"))
    assert len(found.verdicts) == 2
    experiment = grown(smoke=Config(2))
    found = findings(experiment, sweep(experiment, tmp_path / "planned", scale="smoke", only="rate=2.0"))
    assert [verdict.claim for verdict in found.verdicts] == ["rate 2 is above 1.7"]


def test_seeds_that_run_together_count_each():
    together = [(1.0, [0, 1]), (1.0, [2, 3]), (2.0, [0, 1, 2]), (2.0, [3]), (3.0, 1)]
    cells = {key_of(cell): cell for cell in ({"rate": rate, "seeds": seeds} for rate, seeds in together)}
    first, _, third, _, last = cells
    assert _begun(cells, set(cells)) == (set(), [])
    assert _begun(cells, {first, third, last}) == ({first}, ["rate=1.0 (2 of 4)"])
