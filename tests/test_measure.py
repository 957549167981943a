"""``measure``: the right numbers, kept as they come, resumed where they stopped."""

import json
import math
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import lambdahat as lh
from lambdahat import _measure as measuring
from lambdahat._core.storage import Damaged
from lambdahat._measure import measure
from lambdahat.cli.app import app
from lambdahat.estimators.quantities import CURVATURES, QUANTITIES, MeasureSettings
from lambdahat.models import mlp
from lambdahat.operators.curvature import hessian
from lambdahat.problem import Problem
from lambdahat.results import Estimate, LearningCoefficient
from lambdahat.results.measurement import Measurement
from lambdahat.singular._llc import llc


def a_problem(seed=0, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 6, generator=rng), torch.randint(3, (40,), generator=rng)
    return Problem(mlp([6, 8, 3], seed=seed), "cross_entropy", (x, y), dtype=dtype)


SHORT = {
    "chains": 2,
    "draws": 12,
    "burn_in": 4,
    "step_size": 1e-4,
    "localization": 5.0,
    "nbeta": "batch",
}


@pytest.fixture
def counted(monkeypatch):
    """How often each quantity is measured."""
    calls = []

    def count(name, inner):
        def run(*args):
            calls.append(name)
            return inner(*args)

        return run

    monkeypatch.setattr(
        measuring, "QUANTITIES", {name: count(name, inner) for name, inner in QUANTITIES.items()}
    )
    return calls


def test_numbers_are_those_of_the_dense_matrix():
    problem = a_problem()
    dense = hessian(problem).dense()
    values = torch.linalg.eigvalsh(dense).flip(0)
    found = measure(
        problem,
        ("trace", "frobenius", "spectral_norm", "eigenpairs", "spectrum", "diagonal"),
        top=3,
    )
    assert list(found.results) == [
        "trace",
        "frobenius",
        "spectral_norm",
        "eigenpairs",
        "spectrum",
        "diagonal",
    ]
    torch.testing.assert_close(found["eigenpairs"].values, values[:3])
    torch.testing.assert_close(found["diagonal"].value, dense.diagonal())
    assert float(found["trace"]) == pytest.approx(float(dense.trace()), rel=1e-9)
    assert float(found["spectral_norm"]) == pytest.approx(float(values.abs().max()), rel=1e-6)
    for reading, truth in (
        (found["frobenius"], dense.norm()),
        (found["spectrum"].trace, dense.trace()),
    ):
        low, high = reading.interval(0.999)
        assert low - 1e-9 <= float(truth) <= high + 1e-9


@pytest.mark.parametrize("curvature", CURVATURES)
def test_every_curvature_is_measured(curvature):
    problem = a_problem()
    found = measure(problem, "eigenpairs", curvature, top=2)
    dense = CURVATURES[curvature](problem).dense()
    torch.testing.assert_close(found["eigenpairs"].values, torch.linalg.eigvalsh(dense).flip(0)[:2])
    assert found.about["curvature"] == curvature


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_is_kept_and_read_again(name, tmp_path, counted):
    first = measure(a_problem(), name, sampling=SHORT, folder=tmp_path)
    again = measure(a_problem(), name, sampling=SHORT, folder=tmp_path)
    assert counted == [name]
    # text, for NaN is not NaN
    tables = [str(each.table()) for each in (again, first, Measurement.load(tmp_path))]
    assert tables[0] == tables[1] == tables[2]
    assert again.about["seconds"] == first.about["seconds"]


def test_about_says_what_was_measured():
    about = measure(a_problem(), "trace", seed=3).about
    assert about["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert about["samples"] == 40
    assert (about["loss"], about["curvature"], about["seed"]) == ("cross_entropy", "hessian", 3)
    assert (about["dtype"], about["device"], about["norm"]) == ("float64", "cpu", "eval")
    assert about["loss_value"] == pytest.approx(a_problem().loss())
    assert about["versions"]["torch"] == torch.__version__
    assert about["seconds"]["trace"] >= 0


def test_a_killed_run_resumes_with_what_is_missing(tmp_path, monkeypatch, counted):
    def killed(*_):
        raise KeyboardInterrupt

    whole = measuring.QUANTITIES
    monkeypatch.setattr(measuring, "QUANTITIES", {**whole, "eigenpairs": killed})
    with pytest.raises(KeyboardInterrupt):
        measure(a_problem(), ("trace", "eigenpairs", "frobenius"), folder=tmp_path)
    monkeypatch.setattr(measuring, "QUANTITIES", whole)
    assert counted == ["trace"]
    found = measure(a_problem(), ("trace", "eigenpairs", "frobenius"), folder=tmp_path)
    assert counted == ["trace", "eigenpairs", "frobenius"]
    assert list(found.results) == ["trace", "eigenpairs", "frobenius"]


def test_more_can_be_asked_of_the_same_folder(tmp_path, counted):
    measure(a_problem(), "trace", folder=tmp_path)
    measure(a_problem(), ("frobenius", "trace"), folder=tmp_path)
    assert counted == ["trace", "frobenius"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed = 1"),
        ({"curvature": "ggn"}, "curvature = ggn"),
        ({"top": 4}, "top = 4"),
        ({"keep_vectors": False}, "vectors = False"),
    ],
)
def test_a_folder_of_other_settings_is_refused(tmp_path, change, named):
    measure(a_problem(), "trace", folder=tmp_path)
    with pytest.raises(ValueError, match=rf"folder must hold .*{named}.*choose another folder"):
        measure(a_problem(), "trace", **change, folder=tmp_path)


def test_a_folder_of_other_parameters_or_data_is_refused(tmp_path):
    problem = a_problem()
    measure(problem, "trace", folder=tmp_path)
    with pytest.raises(ValueError, match="folder must hold results of this run"):
        measure(problem.at(problem.vector * 1.0000001), "trace", folder=tmp_path)
    other = problem.on(next(iter(a_problem(1).batches)).data)
    with pytest.raises(ValueError, match="with loss_value ="):
        measure(other, "trace", folder=tmp_path)


def headless(data_seed=0, label_seed=0, activation=nn.Tanh, **settings):
    """A network whose last layer is 0: its loss is ln 3 whatever the data are."""
    model = nn.Sequential(nn.Linear(6, 8), activation(), nn.BatchNorm1d(8), nn.Linear(8, 3))
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(8, 6, generator=rng))
        for parameter in model[3].parameters():
            parameter.zero_()
        model[0].bias.zero_()
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(data_seed))
    y = torch.randint(3, (40,), generator=torch.Generator().manual_seed(label_seed))
    return Problem(model, settings.pop("loss", "cross_entropy"), (x, y), **settings)


def other_statistics():
    problem = headless()
    problem.model[2].running_mean.add_(1.0)
    return problem


OTHERS = {
    "data": (lambda: headless(data_seed=1), "data ="),
    "labels": (lambda: headless(label_seed=1), "data ="),
    "buffers": (other_statistics, "constants ="),
    "layers": (lambda: headless(activation=nn.ReLU), "model ="),
    "loss": (
        lambda: headless(loss=nn.CrossEntropyLoss(weight=torch.ones(3) / 3)),
        "loss function =",
    ),
    "function": (lambda: headless(loss=lambda z, y: F.cross_entropy(z, y)), "loss ="),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_problem_of_the_same_parameters_and_loss_is_another_measurement(what, tmp_path):
    make, named = OTHERS[what]
    measure(headless(), "trace", folder=tmp_path)
    assert make().loss() == pytest.approx(headless().loss(), rel=1e-6)
    with pytest.raises(ValueError, match=rf"folder must hold results of this run, with {named}"):
        measure(make(), "trace", folder=tmp_path)


def test_the_same_loss_with_another_number_of_terms_is_another_measurement(tmp_path):
    """Tokens or sequences as what n counts: the loss is the same mean over tokens, BIC is not."""
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 5, 4, generator=rng), torch.randint(0, 3, (6, 5), generator=rng)
    y[3:, 2:] = -100
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
    plain, tokens = (
        Problem(model, "cross_entropy", (x, y), count=count) for count in (None, "tokens")
    )
    assert (plain.num_terms, tokens.num_terms) == (6, 21)
    assert plain.loss() == pytest.approx(tokens.loss())
    measure(plain, "bic", folder=tmp_path)
    with pytest.raises(ValueError, match="with num_terms = 21"):
        measure(tokens, "bic", folder=tmp_path)


def test_a_closure_shows_in_how_the_loss_behaves(tmp_path):
    def made(scale):
        return Problem.from_function(
            lambda p, b: scale * (b[0] @ p["w"]).square().mean(),
            {"w": torch.zeros(6)},
            (torch.randn(40, 6, generator=torch.Generator().manual_seed(0)),),
        )

    measure(made(1.0), "trace", folder=tmp_path)
    measure(made(1.0), "trace", folder=tmp_path)
    with pytest.raises(ValueError, match="with behaviour ="):
        measure(made(2.0), "trace", folder=tmp_path)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_how_the_data_are_cut_into_batches_does_not_matter(batch_size, tmp_path, counted):
    first = measure(headless(), "trace", folder=tmp_path)
    again = measure(headless(batch_size=batch_size), "trace", folder=tmp_path)
    assert counted == ["trace"]
    assert float(again["trace"]) == float(first["trace"])
    train = headless(batch_size=10, norm="train").identity()["data"]
    assert train != headless(batch_size=20, norm="train").identity()["data"]


def test_a_folder_of_an_earlier_version_is_refused(tmp_path):
    measure(a_problem(), "trace", folder=tmp_path)
    path = tmp_path / "run.json"
    document = json.loads(path.read_text())
    kept = {key: value for key, value in document["settings"].items() if key not in problem_keys()}
    path.write_text(json.dumps({"settings": kept, "seconds": document["seconds"]}))
    with pytest.raises(
        ValueError,
        match="theta = unknown, by an earlier version of lambdahat; choose another folder",
    ):
        measure(a_problem(), "trace", folder=tmp_path)


def problem_keys():
    return set(a_problem().identity())


@pytest.mark.parametrize("damage", ["digit", "cut", "other"])
def test_a_damaged_result_is_measured_again(damage, tmp_path, counted):
    first = measure(a_problem(), ("trace", "frobenius"), folder=tmp_path)
    path = tmp_path / "trace.json"
    if damage == "other":  # whole, and not of this run
        Estimate(12.5).save(path)
    else:
        text = path.read_text()
        path.write_text(text.replace('"cost": ', '"cost": 1') if damage == "digit" else text[:30])
    with pytest.warns(RuntimeWarning, match=r"trace\.json.*measuring trace again"):
        again = measure(a_problem(), ("trace", "frobenius"), folder=tmp_path)
    assert counted == ["trace", "frobenius", "trace"]
    assert str(again.table()) == str(first.table())


def test_a_damaged_index_is_named(tmp_path):
    measure(a_problem(), "trace", folder=tmp_path)
    path = tmp_path / "run.json"
    path.write_text(path.read_text().replace('"samples": 40', '"samples": 41'))
    with pytest.raises(Damaged, match=r"run\.json is damaged"):
        measure(a_problem(), "trace", folder=tmp_path)


def test_eigenvectors_are_dropped_on_request(tmp_path):
    found = measure(a_problem(), "eigenpairs", top=2, folder=tmp_path, keep_vectors=False)
    assert tuple(found["eigenpairs"].vectors.shape) == (0, 2)
    assert len(Measurement.load(tmp_path).table()) == 2


def test_the_learning_coefficient_is_that_of_llc_with_the_settings_given(tmp_path):
    problem = a_problem()
    found = measure(problem, "llc", seed=3, sampling=SHORT, folder=tmp_path)
    direct = llc(problem, seed=3, **SHORT)
    assert float(found["llc"]) == float(direct)
    assert found["llc"].chains.losses.shape == (2, 12)
    assert found.about["sampling"] == SHORT
    stored = Measurement.load(tmp_path)["llc"]
    assert isinstance(stored, LearningCoefficient)
    assert (stored.temperature, stored.cost) == (direct.temperature, direct.cost)


def test_the_table_counts_gradients_of_the_learning_coefficient():
    found = measure(a_problem(), "llc", sampling={**SHORT, "nbeta": "n/log n"})
    rows = {row["quantity"]: row for row in found.table()}
    result = found["llc"]
    assert set(rows) == {"llc", "llc.wbic", "llc.d/dlnγ", "llc.d/dlnnβ"}
    assert {(row["nbeta"], row["localization"]) for row in rows.values()} == {(result.nbeta, 5.0)}
    assert (rows["llc"]["value"], rows["llc"]["stderr"], rows["llc"]["cost"]) == (
        float(result),
        float(result.stderr),
        result.cost,
    )
    assert result.cost >= 2 * 16
    assert rows["llc.wbic"]["value"] == float(result.wbic)
    assert set(measure(a_problem(), "llc", sampling=SHORT).table()[0]) == set(rows["llc"])


def test_rows_have_the_temperature_and_localization_that_they_depend_on():
    layers = LearningCoefficient(1.0, 0.1, nbeta=9.0, localization=torch.tensor([1.0, 2.0]))
    rows = Measurement({"trace": Estimate(2.0), "llc": layers}).table()
    assert [(row["nbeta"], row["localization"]) for row in rows] == [
        (None, None),
        (9.0, "by parameter"),
    ]


def test_the_learning_coefficient_over_localizations_has_a_row_for_each_point(tmp_path):
    found = measure(a_problem(), "llc_curve", seed=3, sampling=SHORT, folder=tmp_path)
    grid = [5 / 16, 5 / 4, 5.0, 20.0, 80.0]
    rows = {row["quantity"]: row for row in found.table()}
    assert [rows[f"llc_curve[{place}]"]["localization"] for place in range(1, 6)] == grid
    assert rows["llc_curve[3]"]["value"] == float(llc(a_problem(), seed=3, **SHORT))
    assert Measurement.load(tmp_path)["llc_curve"].table() == found["llc_curve"].table()


def test_readings_at_other_temperatures_take_the_same_settings():
    found = measure(
        a_problem(),
        ("bayes_criteria", "temperature_regression", "laplace_evidence"),
        sampling=SHORT,
    )
    assert found["bayes_criteria"].chains.losses.shape == (2, 12)
    assert found["bayes_criteria"].chains.nbeta == 40
    assert found["temperature_regression"].localization == 5.0
    names = [row["quantity"] for row in found.table()]
    assert {"bayes_criteria.waic", "temperature_regression.learning_coefficient"} < set(names)
    assert not [name for name in names if ".chains" in name]


def test_evidence_volumes_and_a_sweep_can_be_measured(tmp_path):
    h = torch.tensor([1.0, 4.0], dtype=torch.float64)
    bowl = Problem.from_function(
        lambda p: 0.5 * (h * p["w"] ** 2).sum(), {"w": torch.zeros(2).double()}, num_samples=1000
    )
    sampling = {
        "chains": 2,
        "draws": 30,
        "burn_in": 10,
        "step_size": 1e-4,
        "localization": 5.0,
        "kernel": "sgld",
    }
    found = measure(
        bowl, ("bic", "free_energy", "volume_scaling", "sweep"), sampling=sampling, folder=tmp_path
    )
    rows = {row["quantity"]: row for row in found.table()}
    assert rows["bic"]["value"] == pytest.approx(math.log(1000))
    exact = 0.5 * math.log(1 + 1000 / 5) + 0.5 * math.log(1 + 4000 / 5)
    assert abs(rows["free_energy.value"]["value"] - exact) < 5 * rows["free_energy.value"]["stderr"]
    volume = rows["volume_scaling.coefficient"]
    assert abs(volume["value"] - 1.0) < 5 * volume["stderr"]
    assert found["sweep"].values.shape == (3, 5)
    assert found["sweep"].localization == 5.0
    assert found["sweep"].chosen[0] == 1e-4
    stored = Measurement.load(tmp_path)
    assert stored["sweep"].values == pytest.approx(found["sweep"].values, nan_ok=True)


def test_a_folder_of_other_sampling_is_refused(tmp_path, counted):
    measure(a_problem(), "llc", sampling=SHORT, folder=tmp_path)
    measure(a_problem(), "llc", sampling=dict(SHORT), folder=tmp_path)
    assert counted == ["llc"]
    for other in ({**SHORT, "draws": 13}, None):
        with pytest.raises(
            ValueError, match="folder must hold results of this run, with sampling ="
        ):
            measure(a_problem(), "llc", sampling=other, folder=tmp_path)


def test_sampling_in_other_things_than_numbers_and_text_is_refused():
    for value in (torch.ones(83), {"a": torch.ones(1)}, None):
        with pytest.raises(
            TypeError, match=r"sampling\['localization'\] must be a number, a text, or a dict"
        ):
            measure(a_problem(), "llc", sampling={"localization": value})


def test_groups_of_results_are_kept(tmp_path, monkeypatch, counted):
    group = {"a": Estimate(1.0, 0.5), "b": Estimate(2.0)}
    monkeypatch.setitem(measuring.QUANTITIES, "trace", lambda *_: group)
    measure(a_problem(), "trace", folder=tmp_path)
    assert json.loads((tmp_path / "run.json").read_text())["seconds"]["trace"] >= 0
    monkeypatch.setitem(measuring.QUANTITIES, "trace", lambda *_: pytest.fail("measured twice"))
    assert dict(measure(a_problem(), "trace", folder=tmp_path)["trace"]) == group


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"what": ()}, "what must name at least one"),
        ({"what": "traces"}, "what must be one of 'diagonal'"),
        ({"curvature": "jacobian"}, "curvature must be one of"),
        ({"depth": 0}, "depth must be an integer"),
        ({"probes": 0}, "probes must be an integer"),
        ({"top": 0}, "top must be an integer"),
        ({"seed": -1}, "seed must be an integer"),
        ({"sampling": {"steps": 3}}, "sampling must be one of 'chains'"),
        ({"what": "llc", "sampling": {"kernel": "gibbs"}}, "kernel must be one of"),
        ({"what": "llc", "sampling": {"draws": 2}}, "draws must be an integer of at least 8"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(a_problem(), **arguments)


NEW_ESTIMATOR = '''
"""The largest entries of the diagonal."""

from dataclasses import dataclass

from lambdahat.estimators import diagonal
from lambdahat.estimators.quantities import products, quantity
from lambdahat.results import Estimate, Result
from lambdahat.results.charts import Chart, Series, charts_of


@dataclass(frozen=True)
class LargestEntries(Result):
    largest: Estimate
    entries: tuple[float, ...]


def largest_entries(operator, count=3, seed=0):
    known = diagonal(operator, seed=seed)
    entries, places = known.value.sort(descending=True)
    largest = Estimate(float(entries[0]), float(known.stderr[places[0]]), known.cost)
    return LargestEntries(largest, tuple(entries[:count].tolist()))


@quantity("largest_entries", lambda _, matrix, settings: largest_entries(matrix, settings.top))
def largest_entries_work(problem, operator, settings):
    return products(operator, 0, operator.dim, settings.top)


@charts_of.register
def _(found: LargestEntries):
    places = tuple(range(1, len(found.entries) + 1))
    return [Chart("Largest entries", "place", "entry", (Series("entries", places, found.entries),))]
'''


def test_a_new_estimator_with_its_figure_and_its_forecast_is_one_file(monkeypatch, tmp_path):
    """``measure``, its folder, the command line, figures and pages know what one file registers."""
    (tmp_path / "largest_entries.py").write_text(NEW_ESTIMATOR)
    (tmp_path / "own_problem.py").write_text(
        "from tests.test_measure import a_problem as make_problem"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(QUANTITIES)
    try:
        import_module("largest_entries")
        problem = import_module("own_problem").make_problem()
        found = measure(problem, ("largest_entries", "frobenius"), top=4, folder=tmp_path / "kept")
        dense = hessian(problem).dense().diagonal().sort(descending=True).values[:4]
        assert found["largest_entries"].entries == pytest.approx(dense.tolist())
        kept = Measurement.load(tmp_path / "kept")
        assert kept["largest_entries"].entries == found["largest_entries"].entries
        call = ["measure", "own_problem:make_problem", "--what", "largest_entries", "--json"]
        (row,) = json.loads(CliRunner().invoke(app, [*call, "--dry-run"]).stdout)["forecast"]
        assert (row["quantity"], row["fewest"]) == ("largest_entries", 0)
        assert row["most"] == problem.num_parameters
        assert "largest_entries" in CliRunner().invoke(app, call).stdout
        assert lh.plot(found["largest_entries"]).get_title() == "Largest entries"
        page = lh.page(tmp_path / "kept", tmp_path / "page.html").read_text(encoding="utf-8")
        assert "Largest entries" in page
    finally:
        for name in set(QUANTITIES) - set(before):
            del QUANTITIES[name]


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity_forecasts_its_work(name):
    problem = a_problem()
    work = QUANTITIES[name].work(problem, hessian(problem), MeasureSettings())
    assert 0 <= work.fewest <= work.most
    assert work.vectors_bytes > 0
    assert work.unit in ("products", "gradients", "losses")
    assert (work.samples > 0) == (work.unit == "gradients")


def test_settings_of_chains_do_not_bar_a_folder_without_chains(tmp_path):
    measure(a_problem(), "trace", folder=tmp_path)
    short = {"draws": 20, "burn_in": 5, "step_size": 1e-5, "kernel": "sgld"}
    both = measure(a_problem(), ("trace", "llc"), sampling=short, folder=tmp_path)
    assert set(both.results) == {"trace", "llc"}
    with pytest.raises(ValueError, match="folder must hold results of this run, with sampling"):
        measure(a_problem(), "llc", sampling={**short, "draws": 30}, folder=tmp_path)


def test_settings_of_chains_that_come_by_themselves_are_named():
    with pytest.raises(TypeError, match=r"sampling must hold .* pass sampling=\{'draws': …\}"):
        measure(a_problem(), "trace", draws=20)
    with pytest.raises(TypeError, match="problems must be a dict of two or more names"):
        lh.compare(a_problem(), a_problem())
