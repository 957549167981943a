"""What importing lambdahat and using its core names brings into a process."""

import json
import subprocess
import sys

import pytest

LATER = (
    "matplotlib",
    "rich",
    "typer",
    "plotly",
    "networkx",
    "joblib",
    "pandas",
    "safetensors",
    "arviz_stats",
    "sklearn",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.sparse",
    "scipy.special",
    "numpy.f2py",
)


SCRIPT = f"""
import gc, json, sys
import lambdahat as lh
alone = sorted(name for name in ("torch", "numpy", "scipy") if name in sys.modules)
import torch
before, state = set(sys.modules), torch.get_rng_state()
lh.Problem, lh.hessian, lh.trace, lh.spectrum, lh.llc, lh.sample, lh.measure, lh.compare
print(json.dumps({{
    "alone": alone,
    "heavy": sorted(set({LATER!r}) & (set(sys.modules) - before)),
    "package": lh.operators.__name__,
    "same state": torch.equal(state, torch.get_rng_state()),
    "collects": gc.isenabled(),
    "not completed": sorted(set(lh.__all__) - set(dir(lh))),
}}))
"""


@pytest.fixture(scope="module")
def imported():
    """What a process that imports lambdahat says; what torch itself brings in does not count."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_are_loaded_when_they_are_asked_for(imported):
    assert json.loads(imported)["alone"] == []
    assert json.loads(imported)["package"] == "lambdahat.operators"


def test_heavy_packages_are_imported_where_they_are_used(imported):
    assert json.loads(imported)["heavy"] == []


def test_importing_draws_no_random_number_and_prints_nothing(imported):
    assert json.loads(imported)["same state"]
    assert len(imported.splitlines()) == 1


def test_garbage_is_collected_after_an_import(imported):
    assert json.loads(imported)["collects"]


def test_public_names_are_there():
    import lambdahat

    for name in lambdahat.__all__:
        assert getattr(lambdahat, name) is not None
    assert sorted(lambdahat.__all__) == sorted(set(lambdahat.__all__))


def test_unknown_names_are_attribute_errors():
    import lambdahat

    with pytest.raises(AttributeError, match="no attribute 'hesian'"):
        _ = lambdahat.hesian


def test_completion_finds_every_public_name(imported):
    assert json.loads(imported)["not completed"] == []


FIRST_CALL = """
import sys, torch
import lambdahat as lh
before = set(sys.modules)
layers = torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)
data = torch.randn(8, 4), torch.randint(0, 3, (8,))
problem = lh.Problem(torch.nn.Sequential(*layers), "cross_entropy", data)
lh.trace(lh.hessian(problem))
lh.eigenpairs(lh.hessian(problem), k=2)
own = sorted(name for name in set(sys.modules) - before if name.startswith("lambdahat"))
torch.func.vmap(problem.loss_function.value, (0, None))(torch.randn(2, 8, 3), data[1])
print(own, "sympy" in sys.modules)
"""


def test_first_calls_import_nothing_more():
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"
