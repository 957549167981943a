"""Importing lambdahat imports torch, numpy and scipy, and nothing else that is heavy."""

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
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_heavy_packages_are_imported_where_they_are_used():
    """What torch itself brings in does not count."""
    code = f"""
import sys, torch, numpy, scipy.stats, scipy.sparse.linalg
before = set(sys.modules)
import lambdahat
print(*sorted(set({LATER!r}) & (set(sys.modules) - before)))
"""
    assert run(code) == ""


def test_importing_draws_no_random_number_and_prints_nothing():
    assert (
        run(
            "import torch; s = torch.get_rng_state(); import lambdahat; assert torch.equal(s,"
            " torch.get_rng_state())"
        )
        == ""
    )


def test_public_names_are_there():
    import lambdahat

    for name in lambdahat.__all__:
        assert getattr(lambdahat, name) is not None


def test_unknown_names_are_attribute_errors():
    import lambdahat

    with pytest.raises(AttributeError, match="no attribute 'hesian'"):
        _ = lambdahat.hesian


def test_completion_finds_every_public_name():
    code = "import lambdahat as lh; print(set(lh.__all__) - set(dir(lh)))"
    assert run(code) == "set()"
