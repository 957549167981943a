"""The command: what it prints, what it writes, and how it exits."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lambdahat
from lambdahat.cli.app import app
from lambdahat.cli.measurements import forecast
from lambdahat.estimators.quantities import MeasureSettings
from lambdahat.experiments.kit.store import Store
from lambdahat.operators import hessian
from lambdahat.operators.exact import MAX_ROUNDS, MIN_ROUNDS
from lambdahat.results import Landscape, Status
from lambdahat.results.measurement import Measurement

FACTORY = """
import torch
from lambdahat.data import digits_split
from lambdahat.models import mlp
from lambdahat.problem import Problem

def network(seed=0):
    return mlp([64, 8, 10], seed=seed)

def make_problem():
    (x, y), _ = digits_split()
    return Problem(network(), "cross_entropy", (x[:200], y[:200]))

def bowl():
    start = {"w": torch.zeros(2).double()}
    return Problem.from_function(lambda p: (p["w"] ** 2).sum(), start, num_samples=1000)

def with_batch_norm():
    (x, y), _ = digits_split()
    torch.manual_seed(0)
    first, last = torch.nn.Linear(64, 4), torch.nn.Linear(4, 10)
    model = torch.nn.Sequential(first, torch.nn.BatchNorm1d(4), torch.nn.ReLU(), last)
    return Problem(model, "cross_entropy", [(x[:100], y[:100]), (x[100:200], y[100:200])])

def held_out():
    return digits_split()[1]

def by_function():
    return Problem.from_function(lambda p: (p["w"] ** 4).sum(), {"w": torch.ones(3)})

def not_a_problem():
    return network()

def broken():
    return {}["missing"]

def of_seed(seed):
    return make_problem()


number = 3
"""


OWN_ERRORS = """
measuring = []

def misspelt():
    return Problem(network(), "cross_entrpy", digits_split()[0])

class Faulty(torch.nn.Linear):
    def __init__(self, fault):
        super().__init__(64, 10)
        self.fault = fault

    def forward(self, x):
        if measuring:
            self.fault(self, x)
        return super().forward(x)

def later(fault):
    data = torch.ones(3, 64), torch.zeros(3).long()
    problem = Problem(Faulty(fault), "cross_entropy", data)
    measuring.append(True)
    return problem

def refusing():
    raise ValueError("my own")

def converting():
    return later(lambda layer, x: int("x"))

def raising():
    return later(lambda layer, x: refusing())

def misfit():
    return later(lambda layer, x: torch.nn.Linear.forward(layer, x[:, :3]))
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder with the user's module in it, as the current directory."""
    name = f"users_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return name


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def one_line_error(result):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    return line


def test_version():
    assert call("--version").stdout == f"lambdahat {lambdahat.__version__}\n"


def test_measure_prints_a_table_and_writes_everything(project, tmp_path):
    result = call("measure", f"{project}:make_problem", "--depth", 20, "--top", 2, "--out", "run")
    assert result.exit_code == 0, result.output
    assert "610 parameters, 200 samples, cross_entropy" in result.stdout
    assert re.search(
        r"^trace +\d+\.\d+ ± \d+(\.\d+)?e-0[4-9] +0  CONVERGED", result.stdout, re.MULTILINE
    )
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {
        "trace.json",
        "eigenpairs.json",
        "spectrum.json",
        "measurement.json",
        "table.txt",
        "table.md",
        "measurement.png",
        "spectrum.png",
        "eigenpairs.png",
    }
    assert (tmp_path / "run" / "table.txt").read_text().strip() in result.stdout
    stored = Measurement.load(tmp_path / "run")
    assert stored["eigenpairs"].vectors.shape[0] == 0
    assert stored["spectrum"].nodes.shape == (1, 20)


def test_json_is_all_there_is_on_standard_output(project):
    result = call(
        "measure", f"{project}:make_problem", "--what", "trace,eigenpairs", "--top", 1, "--json"
    )
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert [row["quantity"] for row in document["results"]] == ["trace", "eigenpairs[1]"]
    assert document["about"]["parameters"] == 610
    assert result.stderr == ""


def test_options_reach_the_measurement(project):
    result = call(
        "measure",
        f"{project}:make_problem",
        "--what",
        "eigenpairs",
        "--curvature",
        "covariance",
        "--samples",
        50,
        "--dtype",
        "float64",
        "--seed",
        5,
        "--top",
        1,
        "--json",
    )
    about = json.loads(result.stdout)["about"]
    wanted = {"curvature": "covariance", "samples": 50, "dtype": "float64", "seed": 5}
    assert {key: about[key] for key in wanted} == wanted


def test_batch_norm_mode_changes_the_loss(project):
    losses = {}
    for norm in ("eval", "train"):
        result = call(
            "measure", f"{project}:with_batch_norm", "--what", "trace", "--norm", norm, "--json"
        )
        about = json.loads(result.stdout)["about"]
        assert about["norm"] == norm
        losses[norm] = about["loss_value"]
    assert losses["eval"] != pytest.approx(losses["train"], rel=1e-3)


def test_eigenvectors_can_be_kept(project, tmp_path):
    call(
        "measure",
        f"{project}:make_problem",
        "--what",
        "eigenpairs",
        "--top",
        2,
        "--vectors",
        "--out",
        "run",
    )
    assert tuple(Measurement.load(tmp_path / "run")["eigenpairs"].vectors.shape) == (610, 2)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "nested", "compiled", "in parallel"])
def test_checkpoint_is_what_is_measured(project, kind, tmp_path):
    module = __import__(project)
    state = module.network(seed=7).state_dict()
    path = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    before = {"compiled": "_orig_mod.", "in parallel": "module._orig_mod."}.get(kind, "")
    state = {f"{before}{name}": tensor for name, tensor in state.items()}
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested" else state, path)
    result = call(
        "measure", f"{project}:make_problem", "--checkpoint", path, "--what", "trace", "--json"
    )
    problem = module.make_problem()
    truth = problem.loss(torch.cat([tensor.flatten() for tensor in state.values()]))
    assert json.loads(result.stdout)["about"]["loss_value"] == pytest.approx(truth, rel=1e-6)


def test_checkpoint_brings_buffers_and_takes_other_options(project, tmp_path):
    module = __import__(project)
    problem = module.with_batch_norm()
    state = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    state["1.running_mean"] += 3.0
    save_file(state, tmp_path / "weights.safetensors")
    before = problem.loss()
    result = call(
        "measure",
        f"{project}:with_batch_norm",
        "--checkpoint",
        "weights.safetensors",
        "--dtype",
        "float64",
        "--what",
        "trace",
        "--json",
    )
    problem.model.load_state_dict(state)
    assert json.loads(result.stdout)["about"]["loss_value"] == pytest.approx(
        problem.loss(), rel=1e-6
    )
    assert before != pytest.approx(problem.loss(), rel=1e-3)


def test_checkpoint_of_a_function(project, tmp_path):
    save_file({"w": torch.full((3,), 2.0)}, tmp_path / "w.safetensors")
    result = call(
        "measure",
        f"{project}:by_function",
        "--checkpoint",
        "w.safetensors",
        "--what",
        "trace",
        "--json",
    )
    document = json.loads(result.stdout)
    assert document["about"]["loss_value"] == pytest.approx(48.0)
    assert document["results"][0]["value"] == pytest.approx(3 * 12 * 4.0, rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("0.bias"), "lacks 0.bias"),
        (lambda state: state.update(extra=torch.ones(2)), "has unknown extra"),
        (
            lambda state: state.update({"0.bias": torch.ones(3)}),
            "0.bias must have shape (8,), got (3,)",
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused(project, tmp_path, change, message):
    state = __import__(project).network().state_dict()
    change(state)
    save_file(dict(state), tmp_path / "weights.safetensors")
    line = one_line_error(
        call("measure", f"{project}:make_problem", "--checkpoint", "weights.safetensors")
    )
    assert "--checkpoint" in line
    assert message in line


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere:make", "no module named 'nowhere'"),
        ("{}:absent", "has no 'absent'; it has"),
        ("{}:not_a_problem", "must return a lambdahat.Problem, got Sequential"),
        ("{}:number", "must be a function, got int; write a function that returns the int"),
        ("{}:of_seed", "must be a function without arguments, got of_seed(seed); write one"),
        ("{}", "FACTORY must be module:function"),
        (
            "my/{}.py:make_problem",
            "got the file 'my/{0}.py:make_problem'; write my.{0}:make_problem",
        ),
    ],
)
def test_a_bad_factory_is_explained(project, spec, message):
    assert message.format(project) in one_line_error(call("measure", spec.format(project)))


def own_error(result):
    """What is said of an error in the user's code: its traceback, and the last line."""
    assert result.exit_code == 4, result.output
    assert result.stdout == ""
    *told, line = result.stderr.strip().splitlines()
    assert told[0] == "Traceback (most recent call last):"
    return "\n".join(told), line


@pytest.mark.parametrize(
    ("factory", "where", "what"),
    [
        ("broken", 'return {}["missing"]', "{0}:broken() raised KeyError: 'missing' ({0}.py, line"),
        # an argument check of the library, of what the factory gave it
        ("misspelt", '"cross_entrpy"', "{0}:misspelt() raised ValueError: loss must be"),
        # the same kinds of error as argument checks raise, but from the user's own lines
        ("converting", 'int("x")', "your code raised ValueError: invalid literal for int()"),
        ("raising", "in refusing", "your code raised ValueError: my own ({0}.py, line"),
        ("misfit", "x[:, :3]", "your code raised RuntimeError: mat1 and mat2"),
    ],
)
def test_an_error_in_the_users_code_keeps_its_traceback(project, tmp_path, factory, where, what):
    with (tmp_path / f"{project}.py").open("a") as file:
        file.write(OWN_ERRORS)
    told, line = own_error(call("measure", f"{project}:{factory}", "--what", "trace"))
    assert f"{project}.py" in told.splitlines()[1]
    assert where in told
    assert what.format(project) in line


def test_the_same_error_of_the_library_is_an_error_inside(project, monkeypatch):
    """``int("x")`` in the library is a mistake of ours; ``raise ValueError`` an argument check."""
    from lambdahat import _measure

    def within(text):
        space = {}
        exec(compile(f"def run(*_):\n    {text}", _measure.__file__, "exec"), space)
        monkeypatch.setitem(_measure.QUANTITIES, "trace", space["run"])
        return call("measure", f"{project}:make_problem", "--what", "trace")

    assert one_line_error(within("raise ValueError('depth must be 1')")) == "error: depth must be 1"
    inside = within("int('x')")
    assert inside.exit_code == 3
    assert "Traceback" in inside.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "traces"], "what must be one of 'diagonal'"),
        (["--what", ","], "what must name at least one"),
        (["--samples", "100000"], "--samples must be an integer in [1, 200]"),
        (["--checkpoint", "none.pt"], "--checkpoint: no such file: none.pt"),
        (["--checkpoint", "."], "--checkpoint must name a file of weights, got the folder ."),
        (["--device", "abacus"], "abacus"),
        (["--what", "trace", "--kernel", "nuts"], "--kernel must be one of "),
    ],
)
def test_bad_arguments_are_explained(project, arguments, message):
    assert message in one_line_error(call("measure", f"{project}:make_problem", *arguments))


@pytest.mark.parametrize(
    "arguments", [["--depth", "0"], ["--curvature", "slope"], ["--dtype", "int8"], ["--nonsense"]]
)
def test_bad_usage_exits_with_2(project, arguments):
    assert call("measure", f"{project}:make_problem", *arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--top", "five"], "'--top': must be a valid integer, got 'five'"),
        (["--depth=0"], "'--depth': must be greater than or equal to 1, got '0'"),
        (["--tol", "tight"], "'--tol': must be a valid number, got 'tight'"),
    ],
)
def test_bad_usage_says_what_came(project, arguments, told):
    assert told in call("measure", f"{project}:make_problem", *arguments).stderr


def test_names_may_have_spaces_between_them(project):
    words = "--what", "bic fisher_rao, trace", "--json"
    found = json.loads(call("measure", f"{project}:make_problem", *words).stdout)
    assert {row["quantity"] for row in found["results"]} == {"bic", "fisher_rao", "trace"}


def test_a_misspelt_choice_is_told_the_nearest(project):
    told = call("measure", f"{project}:make_problem", "--curvature", "hesian").stderr
    assert "Invalid value for '--curvature': 'hesian' is not one of" in told
    assert "Did you mean 'hessian'?" in told


def test_options_that_a_function_cannot_take_are_refused(project):
    assert "set them in the factory" in one_line_error(
        call("measure", f"{project}:by_function", "--norm", "train")
    )


def test_files_that_are_no_checkpoints_are_refused(project, tmp_path):
    (tmp_path / "bad.pt").write_text("not a checkpoint")
    line = one_line_error(call("measure", f"{project}:make_problem", "--checkpoint", "bad.pt"))
    assert "is not a state dict (it holds other things than tensors, or is damaged)" in line
    torch.save([1, 2], tmp_path / "list.pt")
    line = one_line_error(call("measure", f"{project}:make_problem", "--checkpoint", "list.pt"))
    assert "must hold a dict of name to tensor" in line


def test_dry_run_makes_one_product_and_measures_nothing(project, tmp_path, monkeypatch):
    from lambdahat.operators import base

    made = []
    inner = base.LinearOperator._multiply
    monkeypatch.setattr(
        base.LinearOperator, "_multiply", lambda self, v: made.append(v) or inner(self, v)
    )
    result = call(
        "measure",
        f"{project}:make_problem",
        "--depth",
        50,
        "--probes",
        3,
        "--dry-run",
        "--json",
        "--out",
        "run",
    )
    assert result.exit_code == 0
    assert len(made) == 1
    document = json.loads(result.stdout)
    (spectrum,) = [row for row in document["forecast"] if row["quantity"] == "spectrum"]
    assert (spectrum["fewest"], spectrum["most"]) == (150, 150)
    assert spectrum["seconds_most"] == pytest.approx(150 * document["seconds"])
    assert spectrum["vectors_bytes"] == 51 * 610 * 4
    (pairs,) = [row for row in document["forecast"] if row["quantity"] == "eigenpairs"]
    assert (
        pairs["vectors_bytes"] == 201 * 610 * 4
    )  # as many as thick-restart Lanczos allocates for ten pairs
    (trace,) = [row for row in document["forecast"] if row["quantity"] == "trace"]
    assert trace["most"] == 0  # a ReLU network's trace is a closed form
    assert not (tmp_path / "run").exists()


def test_the_trace_of_many_classes_is_forecast_in_rounds():
    problem = lambdahat.Problem(
        lambdahat.models.mlp([4, 200]), "cross_entropy", (torch.randn(8, 4), torch.arange(8))
    )
    _, (row,) = forecast(problem, ["trace"], MeasureSettings(curvature="ggn"))
    assert (row.fewest, row.most) == (MIN_ROUNDS, MAX_ROUNDS)


QUICK = ["--draws", 20, "--burn-in", 5, "--step-size", 1e-5]


@pytest.mark.parametrize("name", sorted(__import__("lambdahat._measure")._measure.QUANTITIES))
def test_forecasts_hold(project, name):
    factory = "bowl" if name == "volume_scaling" else "make_problem"
    arguments = [
        "measure",
        f"{project}:{factory}",
        "--what",
        name,
        "--depth",
        10,
        "--top",
        2,
        "--json",
        *QUICK,
    ]
    (row,) = json.loads(call(*arguments, "--dry-run").stdout)["forecast"]
    rows = json.loads(call(*arguments).stdout)["results"]
    for cost in (row_["cost"] for row_ in rows):
        alone = name in (
            "sweep",
            "llc_curve",
        )  # a row is one coefficient's, without the others of the grid
        assert cost == 0 or ((alone or row["fewest"] <= cost) and cost <= row["most"])


@pytest.mark.parametrize(
    "settings",
    [
        ["--localization", 100, "--chains", 1, "--max-gradients", 500],
        ["--kernel", "hmc", "--step-size", 1e-4, "--draws", 10],
        ["--kernel", "sgld", "--max-gradients", 800, "--batch-size", 50, "--chains", 2],
        ["--kernel", "kinetic", "--batch-size", 50, "--draws", 30],
    ],
)
def test_forecasts_of_chains_hold(project, settings):
    arguments = ["measure", f"{project}:make_problem", "--what", "llc", "--json", *settings]
    (row,) = json.loads(call(*arguments, "--dry-run").stdout)["forecast"]
    cost = json.loads(call(*arguments).stdout)["results"][0]["cost"]
    assert row["fewest"] <= cost <= row["most"]
    assert row["unit"] == "gradients"
    assert row["most"] < 20 * row["fewest"] + 20000


def test_a_forecast_of_chains_is_in_gradients_of_a_batch(project):
    result = call(
        "measure",
        f"{project}:make_problem",
        "--what",
        "trace,llc",
        "--step-size",
        1e-5,
        "--dry-run",
    )
    line = next(line for line in result.stdout.splitlines() if line.startswith("llc"))
    assert " gradients " in line
    document = json.loads(
        call(
            "measure", f"{project}:make_problem", "--what", "llc", *QUICK, "--dry-run", "--json"
        ).stdout
    )
    assert document["forecast"][0]["vectors_bytes"] == 6 * 4 * 610 * 4


def test_measure_llc_with_its_options(project, tmp_path):
    result = call(
        "measure",
        f"{project}:make_problem",
        "--what",
        "llc",
        "--chains",
        2,
        "--draws",
        20,
        "--burn-in",
        5,
        "--batch-size",
        50,
        "--nbeta",
        "batch",
        "--localization",
        10,
        "--step-size",
        1e-4,
        "--kernel",
        "sgld",
        "--out",
        "run",
    )
    assert result.exit_code in (0, 1), result.output
    header, line = (
        next(line for line in result.stdout.splitlines() if line.startswith(s))
        for s in ("quan", "llc")
    )
    assert "gradients" in line
    assert header.split("  ")[0] == "quantity"
    assert {"nβ", "γ"} < set(header.split())
    assert {"12.781", "10"} < set(line.split())  # 50/ln 50
    found = Measurement.load("run")["llc"]
    assert found.chains.losses.shape == (2, 20)
    assert (found.chains.batch_size, found.localization, found.step_size) == (50, 10.0, 1e-4)
    assert found.temperature == "B/log B, B = 50"
    assert {"llc.json", "llc.png", "measurement.png"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    again = ["measure", f"{project}:make_problem", "--what", "llc", "--out", "run"]
    assert "with sampling = {}" in one_line_error(call(*again))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nbeta", "hot"], "nbeta must be a number or one of 'n/log n', 'batch'"),
        (["--nbeta", "-3"], "nbeta must be a finite number above 0"),
        (["--kernel", "gibbs"], "--kernel must be one of "),
        (["--tol", "0"], "tol must be"),
        (["--batch-size", "1000"], "batch_size must be an integer in [1, 200]"),
    ],
)
def test_bad_sampling_is_explained(project, arguments, message):
    assert message in one_line_error(
        call("measure", f"{project}:make_problem", "--what", "llc", *arguments)
    )


def test_nbeta_can_be_a_number(project):
    result = call(
        "measure", f"{project}:make_problem", "--what", "llc", "--nbeta", "12.5", *QUICK, "--json"
    )
    assert json.loads(result.stdout)["about"]["sampling"]["nbeta"] == 12.5


def test_unconverged_results_exit_with_1_and_state_the_remedy(project, monkeypatch):
    import dataclasses

    from lambdahat import _measure as measuring

    inner = measuring.QUANTITIES["trace"]

    def spent(*arguments):
        return dataclasses.replace(inner(*arguments), status=Status.BUDGET_SPENT)

    monkeypatch.setitem(measuring.QUANTITIES, "trace", spent)
    result = call("measure", f"{project}:make_problem", "--what", "trace")
    assert result.exit_code == 1
    assert "BUDGET_SPENT" in result.stdout
    assert "trace: BUDGET_SPENT. The products allowed ran out" in result.stderr


def test_a_second_run_resumes(project, tmp_path):
    arguments = ["measure", f"{project}:make_problem", "--what", "trace,frobenius", "--out", "run"]
    assert call(*arguments).exit_code == 0
    before = (tmp_path / "run" / "run.json").stat().st_mtime_ns
    assert call(*arguments).exit_code == 0
    assert (tmp_path / "run" / "run.json").stat().st_mtime_ns == before
    line = one_line_error(call(*arguments, "--seed", 1))
    assert "folder must hold results of this run, with seed = 1" in line


def test_interrupt_exits_with_130_and_keeps_what_was_finished(project, tmp_path):
    slow = (
        (tmp_path / f"{project}.py").read_text()
        + "\nimport time\nfrom lambdahat import _measure as measuring\n"
        + "measuring.QUANTITIES['eigenpairs'] = lambda *_: time.sleep(60)\n"
    )
    (tmp_path / "slow_users.py").write_text(slow)
    arguments = ["measure", "slow_users:make_problem", "--what", "trace,eigenpairs", "--out", "run"]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a shell's background jobs ignore it
    command = [sys.executable, "-m", "lambdahat", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    # on a busy machine lines of progress come before it
    *_, last = error.strip().splitlines()
    assert last == "interrupted; finished results are kept; the same command resumes"
    assert (tmp_path / "run" / "trace.json").exists()


def test_quiet_prints_nothing(project):
    result = call("measure", f"{project}:make_problem", "--what", "trace", "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_landscape_along_ritz_vectors_on_both_data_sets(project, tmp_path):
    result = call(
        "landscape",
        f"{project}:make_problem",
        "--held-out",
        f"{project}:held_out",
        "--depth",
        30,
        "--out",
        "run",
    )
    assert result.exit_code == 0, result.output
    names = ("largest", "smallest", "smallest-magnitude")
    found = {name: Landscape.load(Path("run") / f"landscape-{name}.json") for name in names}
    problem = __import__(project).make_problem()
    for name, line in found.items():
        assert line.offsets.tolist() == pytest.approx(torch.linspace(-1, 1, 21).tolist(), abs=1e-6)
        assert line.loss[10] == pytest.approx(problem.loss(), rel=1e-5)
        assert line.held_out[10] == pytest.approx(
            problem.on(__import__(project).held_out()).loss(), rel=1e-5
        )
        assert (tmp_path / "run" / f"landscape-{name}.png").exists()
    bends = [found[name].curvature[0] for name in names]
    assert bends[0] > abs(bends[2])
    assert bends[1] <= bends[2] + 1e-4
    assert bends[0] == pytest.approx(
        float(torch.linalg.eigvalsh(hessian(problem).dense())[-1]), rel=1e-3
    )


def test_landscape_plane_and_json(project):
    result = call(
        "landscape",
        f"{project}:make_problem",
        "--along",
        "largest,random",
        "--plane",
        "--points",
        5,
        "--json",
        "--depth",
        20,
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)["plane"]
    assert torch.tensor(document["loss"]).shape == (5, 5)
    assert document["labels"][0].startswith("the largest Ritz vector, λ = ")
    assert document["labels"][1] == "a random direction"


def test_landscape_of_even_points_has_the_loss_at_the_centre(project):
    here = __import__(project).make_problem()
    line = (
        call(
            "landscape",
            f"{project}:make_problem",
            "--along",
            "random",
            "--points",
            4,
            "--distance",
            5,
            "--held-out",
            f"{project}:held_out",
        )
        .stdout.splitlines()[2]
        .split()
    )
    assert float(line[2]) == pytest.approx(here.loss(), rel=1e-4)
    assert float(line[5]) == pytest.approx(here.on(__import__(project).held_out()).loss(), rel=1e-4)


def test_landscape_towards_another_checkpoint(project, tmp_path):
    save_file(__import__(project).network(seed=1).state_dict(), tmp_path / "other.safetensors")
    result = call(
        "landscape",
        f"{project}:make_problem",
        "--towards",
        "other.safetensors",
        "--points",
        3,
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["towards"]
    here = __import__(project).make_problem()
    there = call(
        "measure",
        f"{project}:make_problem",
        "--checkpoint",
        "other.safetensors",
        "--what",
        "trace",
        "--json",
    )
    assert found["offsets"] == [0, 0.5, 1]
    assert found["loss"][0] == pytest.approx(here.loss(), rel=1e-5)
    assert found["loss"][2] == pytest.approx(
        json.loads(there.stdout)["about"]["loss_value"], rel=1e-5
    )


def test_landscape_dry_run(project):
    document = json.loads(
        call("landscape", f"{project}:make_problem", "--dry-run", "--json").stdout
    )
    assert (document["products"], document["loss_evaluations"]) == (100, 63)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--along", "upwards"], "along must be one of 'largest'"),
        (["--along", "largest", "--plane"], "along must name two directions"),
        (["--distance", "-1"], "distance must be"),
        (["--held-out", "nowhere:data"], "--held-out: no module named 'nowhere'"),
    ],
)
def test_landscape_refuses(project, arguments, message):
    assert message in one_line_error(call("landscape", f"{project}:make_problem", *arguments))


def test_demo_writes_rows_tables_figures_and_the_page(tmp_path, monkeypatch):
    from lambdahat.cli import reproduce

    monkeypatch.setattr(reproduce, "DEMO_SCALE", "smoke")
    monkeypatch.chdir(tmp_path)
    result = call("demo", "--out", "demo", "--seed", "3")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "demo"
    assert {row["seed"] for row in Store(folder, "ngd-digits", "smoke").rows()} == {3}
    assert len(list(folder.glob("figure-*.png"))) == 8
    assert "NGD is above SGD" in (folder / "table.md").read_text()
    assert "Claims" in result.stdout
    assert "report.html" in result.stdout
    assert "NGD is above SGD at equal training loss" in (folder / "report.html").read_text()


@pytest.mark.parametrize(("cores", "jobs"), [(1, 1), (2, 2), (64, 4)])
def test_demo_runs_as_many_seeds_at_once_as_there_are_cores(tmp_path, monkeypatch, cores, jobs):
    from lambdahat.cli import reproduce

    asked = {}

    def stop(experiment, folder, **settings):
        asked.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("joblib.cpu_count", lambda: cores)
    monkeypatch.setattr(reproduce, "sweep", stop)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run_demo(tmp_path, seed=0, quiet=True)
    assert asked["jobs"] == jobs


@pytest.mark.parametrize("kind", ["plain", "images", "transformers"])
def test_init_writes_a_factory_that_runs_at_once(kind, tmp_path):
    if kind == "transformers":
        pytest.importorskip("transformers")
    name = f"written_{os.getpid()}_{time.monotonic_ns()}"
    result = call("init", f"{name}.py", "--kind", kind)
    assert result.exit_code == 0, result.output
    assert f"lambdahat measure {name}:make_problem" in result.stdout
    found = call("measure", f"{name}:make_problem", "--what", "fisher_rao", "--json")
    assert found.exit_code in (0, 1), found.output
    about = json.loads(found.stdout)["about"]
    assert about["samples"] == {"plain": 1438, "images": 32, "transformers": 9}[kind]


def test_init_overwrites_nothing(tmp_path):
    (tmp_path / "mine.py").write_text("kept")
    assert "which exists; name another" in one_line_error(call("init", "mine.py"))
    assert (tmp_path / "mine.py").read_text() == "kept"
    assert "such as problem.py, got 'my-model.py'" in one_line_error(call("init", "my-model.py"))
    assert "a folder that exists" in one_line_error(call("init", "nowhere/mine.py"))
