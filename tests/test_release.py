"""What a release says of itself: one version everywhere, packages that install, code that the
formatter wrote.
"""

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
    assert (
        re.search(r"^version: (.+)$", citation, re.MULTILINE)[1]
        == project["version"]
        == lh.__version__
    )
    assert re.search(r"^license: (.+)$", citation, re.MULTILINE)[1] == project["license"]
    assert "  - name: The lambdahat developers\n" in citation


def test_the_formatter_writes_every_line():
    sources = [
        path
        for folder in ("src", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(sources) > 400
    exempt = "# fmt" + ": "  # in two parts, or this file would be found
    assert not [path.name for path in sources if exempt in path.read_text(encoding="utf-8")]


@pytest.mark.slow
def test_wheel_and_sdist_install_and_measure_a_trace(capsys):
    distribution.main()
    wheel, sdist = capsys.readouterr().out.splitlines()
    number = wheel.split(", trace ")[1]
    assert (
        wheel == f"lambdahat-{lh.__version__}-py3-none-any.whl: lambdahat {lh.__version__}, trace"
        f" {number}"
    )
    assert sdist == f"lambdahat-{lh.__version__}.tar.gz: lambdahat {lh.__version__}, trace {number}"
