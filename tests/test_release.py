"""What a release says of itself: one version everywhere, and the benchmark's page fits its record."""

import re
import tomllib
from pathlib import Path

import pytest

import lambdahat as lh
from tests import distribution

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == project["version"] == lh.__version__
    assert re.search(r"^license: (.+)$", citation, re.MULTILINE)[1] == project["license"]
    assert "  - name: The lambdahat developers\n" in citation


@pytest.mark.slow
def test_wheel_and_sdist_install_and_measure_a_trace(capsys):
    distribution.main()
    wheel, sdist = capsys.readouterr().out.splitlines()
    number = wheel.split(", trace ")[1]
    assert wheel == f"lambdahat-{lh.__version__}-py3-none-any.whl: lambdahat {lh.__version__}, trace {number}"
    assert sdist == f"lambdahat-{lh.__version__}.tar.gz: lambdahat {lh.__version__}, trace {number}"
