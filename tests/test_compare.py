"""``lh.compare`` against closed forms: quadratic losses with known trace, eigenvalues and λ̂."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

import lambdahat as lh
from lambdahat.cli.app import app
from lambdahat.results import Estimate
from lambdahat.results.measurement import Comparison

N, P = 64, 3


def quadratic(scales, seed=0, data=None):
    """Σ_j scales_j·(w·x)_j² over rows whose second moments are the identity: H = 2·diag(scales)."""
    x = torch.linalg.qr(torch.randn(N, P, generator=torch.Generator().manual_seed(seed)).double())[
        0
    ]
    x = x * math.sqrt(N) if data is None else data
    weights = torch.tensor(scales, dtype=torch.float64)
    return lh.Problem.from_function(
        lambda p, rows: (weights.sqrt() * p["w"] * rows).sum(1).square().mean(),
        {"w": torch.zeros(P, dtype=torch.float64)},
        x,
    )


def test_one_problem_each_is_compared_exactly():
    found = lh.compare(
        {"flat": quadratic((1.0, 2.0, 3.0)), "steep": quadratic((2.0, 4.0, 7.0))},
        ("trace", "eigenvalues", "loss"),
    )
    assert found.names == ("flat", "steep")
    assert float(found.value("trace", "steep")) == pytest.approx(26.0)
    assert float(found.difference("trace", "steep", "flat")) == pytest.approx(14.0)
    assert float(found.difference("trace", "flat", "steep")) == pytest.approx(-14.0)
    largest = [float(found.value(f"eigenvalues[{i}]", "steep")) for i in (1, 2, 3)]
    assert largest == pytest.approx([14.0, 8.0, 4.0])
    assert float(found.value("loss", "flat")) == 0.0
    assert found.status is lh.Status.CONVERGED


def test_seeds_are_paired():
    """What a seed adds to both names drops out of the difference and stays in the values."""
    added = (0.0, 5.0, 9.0)
    problems = {
        "flat": [quadratic((1.0 + a, 1.0, 1.0), seed) for seed, a in enumerate(added)],
        "steep": [quadratic((3.0 + a, 1.0, 1.0 + i), i) for i, a in enumerate(added)],
    }
    found = lh.compare(problems, "trace")
    values = [6.0 + 2 * a for a in added]
    mean = found.value("trace", "flat")
    assert float(mean) == pytest.approx(statistics.fmean(values))
    assert float(mean.stderr) == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    gap = found.difference("trace", "steep", "flat")
    assert float(gap) == pytest.approx(6.0)  # 4 + 2i, i = 0, 1, 2
    assert float(gap.stderr) == pytest.approx(2.0 / math.sqrt(3))
    assert gap.dof == 2
    rows = found.table()
    assert [row["name"] for row in rows] == ["flat", "steep", "steep − flat"]
    assert {row["n"] for row in rows} == {3}


@pytest.fixture(scope="module")
def coefficients():
    """A regular and a degenerate model of one data set, at γ = 1e-3."""
    rows = quadratic((1.0,) * P).batches
    (batch,) = rows
    data = batch.data[0] if isinstance(batch.data, tuple) else batch.data
    problems = {
        "three": quadratic((1.0, 1.0, 1.0), data=data),
        "one": quadratic((1.0, 0.0, 0.0), data=data),
    }
    return lh.compare(problems, "llc", sampling={"localization": 1e-3, "tol": 0.1}, seed=1)


def test_coefficients_of_regular_and_degenerate_models(coefficients):
    """λ̂ = Σ_j h_j/(2(h_j + γ/nβ)): half the number of directions that the data determine."""
    three, one = (coefficients.value("llc", name) for name in ("three", "one"))
    assert abs(float(three) - 1.5) < 4 * float(three.stderr) + 0.01
    assert abs(float(one) - 0.5) < 4 * float(one.stderr) + 0.01
    gap = coefficients.difference("llc", "three", "one")
    assert abs(float(gap) - 1.0) < 4 * float(gap.stderr) + 0.01
    assert float(gap.stderr) == pytest.approx(math.hypot(float(three.stderr), float(one.stderr)))
    assert coefficients.settings["localization"] == 1e-3
    assert coefficients.settings["nbeta"] == pytest.approx(N / math.log(N))


def test_all_have_one_localization_where_none_is_given():
    model = torch.nn.Linear(4, 2).double()
    data = torch.eye(4).double().repeat(8, 1), torch.zeros(32, 2).double()
    near = lh.Problem(model, "mse", data)
    far = near.at(10 * near.vector)
    alone = [lh.singular._llc.default_localization(p, 32 / math.log(32))[0] for p in (near, far)]
    few = {"draws": 20, "burn_in": 2, "step_size": 1e-3}
    found = lh.compare({"near": near, "far": far}, "llc", sampling=few)
    assert alone[0] > 2 * alone[1]
    assert found.settings["localization"] == pytest.approx(math.sqrt(alone[0] * alone[1]))


def test_measurements_are_compared_if_their_temperature_and_localization_agree():
    problem = quadratic((1.0, 1.0, 1.0))
    few = {"draws": 20, "burn_in": 2, "step_size": 1e-3, "localization": 1.0}
    first, second = (lh.measure(problem, "llc", seed=s, sampling=few) for s in (0, 1))
    found = lh.compare({"a": first, "b": second}, "llc")
    assert float(found.value("llc", "a")) == float(first["llc"])
    other = lh.measure(problem, "llc", sampling={**few, "localization": 2.0})
    with pytest.raises(ValueError, match=r"same localization.*1.0 \(a\) and 2.0 \(b\)"):
        lh.compare({"a": first, "b": other}, "llc")
    ggn = lh.measure(problem, "trace", "covariance")
    with pytest.raises(ValueError, match=r"same curvature.*'hessian' .a. and 'covariance' .b."):
        lh.compare({"a": lh.measure(problem, "trace"), "b": ggn}, "trace")
    with pytest.raises(ValueError, match="have measured trace, got only llc"):
        lh.compare({"a": first, "b": second}, "trace")


BAD = {
    "one name": ({"a": quadratic((1.0,) * P)}, "two or more names", ValueError),
    "no dict": ([quadratic((1.0,) * P)], "a dict of two or more names", TypeError),
    "other data": (
        {"a": quadratic((1.0,) * P, 0), "b": quadratic((1.0,) * P, 1)},
        "same data.*'b' with other data or another loss than 'a'",
        ValueError,
    ),
    "a problem without a partner": (
        {"a": [quadratic((1.0,) * P)] * 2, "b": quadratic((1.0,) * P)},
        "same number of seeds.*'a': 2, 'b': 1",
        ValueError,
    ),
    "names that are one text": (
        {1: quadratic((1.0,) * P), "1": quadratic((1.0,) * P)},
        "differ as text, got 1, '1'",
        ValueError,
    ),
    "no problem": ({"a": quadratic((1.0,) * P), "b": 3}, "problems alone", TypeError),
    "an empty list": ({"a": [], "b": []}, "problems alone", TypeError),
}


@pytest.mark.parametrize(("problems", "words", "kind"), BAD.values(), ids=BAD)
def test_what_cannot_be_compared_is_refused(problems, words, kind):
    with pytest.raises(kind, match=words):
        lh.compare(problems, "trace")


def test_another_loss_is_refused():
    model, data = torch.nn.Linear(4, 2), (torch.eye(4), torch.zeros(4, 2))
    plain, scaled = (
        lh.Problem(model, lambda out, y, c=c: c * (out - y).square().mean(), data) for c in (1, 100)
    )
    with pytest.raises(ValueError, match="another loss"):
        lh.compare({"a": lh.Problem(model, "mse", data), "b": plain}, "trace")
    with pytest.raises(ValueError, match="another loss"):
        lh.compare({"a": plain, "b": scaled}, "trace")


def test_settings_of_the_sampler_are_checked_before_anything_is_measured():
    pair = {"a": quadratic((1.0,) * P), "b": quadratic((1.0,) * P)}
    for sampling, words in (
        (3, "sampling must be"),
        ({"batch_size": None}, r"sampling\['batch_size'\] must be"),
        ({"batch_size": "x"}, "batch_size must be"),
        ({"temperature": 1.0}, "sampling must be one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            lh.compare(pair, "llc", sampling=sampling)


def test_a_quantity_without_numbers_is_refused():
    with pytest.raises(ValueError, match=r"what must name quantities that are numbers.*'diagonal'"):
        lh.compare({"a": quadratic((1.0,) * P), "b": quadratic((2.0,) * P)}, ("trace", "diagonal"))


def test_a_localization_by_parameter():
    model, data = (
        torch.nn.Linear(4, 2).double(),
        (torch.eye(4).double(), torch.zeros(4, 2).double()),
    )
    one = lh.Problem(model, "mse", data)
    few = {
        "draws": 20,
        "burn_in": 2,
        "step_size": 1e-3,
        "localization": {"weight": 1.0, "bias": 2.0},
    }
    found = lh.compare({"a": one, "b": one.at(2 * one.vector)}, "llc", sampling=few)
    assert found.settings["localization"] == "by parameter"
    first = lh.measure(one, "llc", sampling=few)
    other = lh.measure(one, "llc", sampling={**few, "localization": {"weight": 1.0, "bias": 3.0}})
    wide = lh.Problem(torch.nn.Linear(4, 3).double(), "mse", (data[0], torch.zeros(4, 3).double()))
    for another in (other, lh.measure(wide, "llc", sampling=few)):
        with pytest.raises(ValueError, match=r"same (localization|data)"):
            lh.compare({"a": first, "b": another}, "llc")


def test_an_unknown_quantity_is_named_before_anything_is_measured():
    with pytest.raises(ValueError, match="what must be one of"):
        lh.compare({"a": quadratic((1.0,) * P), "b": quadratic((1.0,) * P)}, ("trace", "lcc"))


def test_a_comparison_is_stored_and_leaves_as_frame_latex_and_dict(coefficients, tmp_path):
    stored = lh.Comparison.load(coefficients.save(tmp_path / "found"))
    assert stored.table() == coefficients.table()
    frame = coefficients.frame()
    assert list(frame.columns) == ["quantity", "name", "value", "stderr", "n", "status"]
    assert len(frame) == len(coefficients.table())
    latex = coefficients.to_latex()
    assert r"three & $1." in latex
    assert latex.count(r" \\") == len(frame) + 1
    assert json.loads(json.dumps(coefficients.to_dict()))["settings"]["localization"] == 1e-3
    assert ">three</td>" in coefficients._repr_html_()


FACTORY = """
import scipy.stats
import torch
import lambdahat as lh

def make_problem():
    data = torch.eye(4).repeat(8, 1), torch.zeros(32, 2)
    return lh.Problem(torch.nn.Linear(4, 2), "mse", data)
"""


def test_checkpoints_from_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "compared_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, scale in (("small", 0.1), ("large", 2.0)):
        model = torch.nn.Linear(4, 2)
        torch.nn.init.constant_(model.weight, scale)
        torch.nn.init.zeros_(model.bias)
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    words = ["compare", "compared_factory:make_problem", "small.pt", "B=large.pt"]
    result = CliRunner().invoke(app, [*words, "--what", "trace,loss", "--json", "--out", "found"])
    assert result.exit_code == 0, result.output
    rows = {(row["quantity"], row["name"]): row for row in json.loads(result.stdout)["results"]}
    assert rows["loss", "small"]["value"] == pytest.approx(0.01)
    assert rows["loss", "B"]["value"] == pytest.approx(4.0)
    assert rows["trace", "B − small"]["value"] == pytest.approx(0.0, abs=1e-5)
    assert (tmp_path / "found" / "comparison.png").stat().st_size > 1000
    assert lh.Comparison.load(tmp_path / "found" / "comparison.json").names == ("small", "B")
    for bad, words_said in (
        (["small.pt"], "two or more"),
        (["small.pt", "small.pt"], "a second 'small'"),
        (["=small.pt", "large.pt"], "NAME=FILE"),
        (["small.pt", "none.pt"], "CHECKPOINTS: no such file: none.pt"),
    ):
        refused = CliRunner().invoke(app, ["compare", "compared_factory:make_problem", *bad])
        assert refused.exit_code == 2
        assert words_said in refused.stderr


def network(seed, width=4, batch_norm=False, shift=0.0):
    torch.manual_seed(seed)
    x, y = torch.linspace(-1, 1, 60).reshape(20, 3), torch.linspace(0, 1, 20)[:, None]
    norm = [torch.nn.BatchNorm1d(width)] if batch_norm else []
    layers = [torch.nn.Linear(3, width), *norm, torch.nn.Tanh(), torch.nn.Linear(width, 1)]
    return lh.Problem(torch.nn.Sequential(*layers), "mse", (x + shift, y))


@pytest.mark.parametrize("batch_norm", [False, True])
def test_differences_of_three_names_are_those_of_a_paired_t_test(batch_norm):
    """Against SciPy's, on traces of dense Hessians."""
    problems = {
        name: [network(10 * i + s, 4, batch_norm) for s in range(4)]
        for i, name in enumerate(("SGD", "Adam", "NGD"))
    }
    found = lh.compare(problems, "trace")
    exact = {
        name: [float(lh.hessian(p).dense().trace()) for p in part]
        for name, part in problems.items()
    }
    for one, two in (("Adam", "SGD"), ("NGD", "SGD"), ("NGD", "Adam")):
        test = scipy.stats.ttest_rel(exact[one], exact[two])
        difference = found.difference("trace", one, two)
        assert difference.value / difference.stderr == pytest.approx(test.statistic, rel=1e-3)
        assert difference.interval() == pytest.approx(tuple(test.confidence_interval()), rel=1e-3)


def test_networks_of_several_sizes_are_compared_in_any_order():
    small, large = network(0, 1), network(1, 8)
    for problems in ({"s": small, "l": large}, {"l": large, "s": small}):
        found = lh.compare(problems, "eigenvalues", top=100)
        assert len(found.readings) == small.num_parameters


def test_measurements_of_other_data_are_refused():
    one, two = (lh.measure(network(0, shift=shift), "trace") for shift in (0.0, 1.0))
    with pytest.raises(ValueError, match=r"same data.*'b' measured on other data than 'a'"):
        lh.compare({"a": one, "b": two}, "trace")


def test_less_a_lower_bound_is_no_lower_bound():
    spent = lh.Estimate(3.0, math.inf, status=lh.Status.BUDGET_SPENT)
    found = lh.Comparison({"norm": {"a": (lh.Estimate(5.0, 0.1),), "b": (spent,)}})
    assert math.isnan(found.difference("norm", "a", "b").stderr)
    assert found.difference("norm", "b", "a").stderr == math.inf
    assert found.table()[-1]["status"] == "BUDGET_SPENT"


def test_the_mean_over_seeds_of_lower_bounds_is_one():
    """Their spread is no error; less a lower bound, nothing is known."""
    bounds = tuple(
        lh.Estimate(value, math.inf, status=lh.Status.BUDGET_SPENT) for value in (3.0, 3.1)
    )
    known = lh.Estimate(5.0, 0.1), lh.Estimate(5.2, 0.1)
    found = lh.Comparison({"norm": {"a": known, "b": bounds}})
    assert found.value("norm", "b").stderr == math.inf
    assert float(found.value("norm", "a").stderr) == pytest.approx(0.1)
    assert found.difference("norm", "b", "a").stderr == math.inf
    assert math.isnan(float(found.difference("norm", "a", "b").stderr))


def test_bounds_of_eigenvalues_add_up():
    one, two = Estimate(3.0, 0.25), Estimate(1.0, 0.5)
    readings = {name: {"a": (one,), "b": (two,)} for name in ("eigenvalues[1]", "trace")}
    found = Comparison(readings)
    assert float(found.difference("eigenvalues[1]", "a", "b").stderr) == 0.75
    assert float(found.difference("trace", "a", "b").stderr) == pytest.approx(math.hypot(0.25, 0.5))
