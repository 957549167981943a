"""docs/coming-from.md: another library's call and ours give the same number, theirs where it is
installed.
"""

import contextlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[1] / "docs" / "coming-from.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
PEERS = {
    "PyHessian": "pyhessian",
    "curvlinops": "curvlinops",
    "hessian-eigenthings": "hessian_eigenthings",
    "devinterp": "devinterp",
}
TOLERANCE = {"trace": 0.1, "λ̂": 0.25}  # of what they sample; 1 % for the rest
NEEDS = {"devinterp": ("devinterp", "datasets", "zarr")}


def section(name):
    """The blocks of a library's section: theirs, then ours."""
    (text,) = [part for part in SECTIONS[1:] if part.startswith(f"{name}\n")]
    return BLOCK.findall(text)


def run(body, namespace):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(body, PAGE.name, "exec"), namespace)


@pytest.fixture
def namespace():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        names = {"__name__": "documentation"}
        run(BLOCK.findall(SECTIONS[0])[0], names)
        yield names


@pytest.fixture
def torchvision_as_it_was():
    """The block of devinterp hides torchvision."""
    before = {name: module for name, module in sys.modules.items() if name == "torchvision"}
    yield
    sys.modules.pop("torchvision", None)
    sys.modules.update(before)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.usefixtures("torchvision_as_it_was")
@pytest.mark.parametrize(
    "name", [*list(PEERS)[:-1], pytest.param("devinterp", marks=pytest.mark.slow)]
)
def test_both_calls_give_the_same_number(name, namespace):
    theirs, ours = section(name)
    run(ours, namespace)
    assert all(isinstance(value, float) for value in namespace["ours"].values())
    missing = [module for module in NEEDS.get(name, (PEERS[name],)) if find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: only our half was run")
    run(theirs, namespace)
    assert namespace["theirs"].keys() == namespace["ours"].keys()
    for key, value in namespace["theirs"].items():
        assert namespace["ours"][key] == pytest.approx(value, rel=TOLERANCE.get(key, 0.01)), key


def test_every_library_has_a_section():
    assert [part.split("\n", 1)[0] for part in SECTIONS[1:]] == list(PEERS)
