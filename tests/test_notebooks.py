"""The notebooks show what is stored in them, and results, figures and progress show themselves in a
kernel.
"""

import ast
import re
import sys

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel

from tests.notebooks import (
    NOTEBOOKS,
    assert_consistent,
    estimates,
    execute,
    mime_types,
    outputs,
    printed,
)

FIRST, *OTHERS = (path.name for path in NOTEBOOKS)
# of the event loop and the sockets of Jupyter, none of ours
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:jupyter_client"),
    pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def stored(name):
    (path,) = (path for path in NOTEBOOKS if path.name == name)
    return path, nbformat.read(path, as_version=4)


def test_there_are_six_and_they_are_small():
    assert len(NOTEBOOKS) == 6
    sizes = [path.stat().st_size for path in NOTEBOOKS]
    assert max(sizes) < 300_000
    assert sum(sizes) < 1_000_000


@pytest.mark.parametrize("name", [FIRST, *OTHERS])
def test_what_is_stored_is_a_whole_run(name):
    path, notebook = stored(name)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.cells[0].source.startswith("# ")
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))
    assert mime_types(notebook) <= {"image/png", "text/html", "text/plain"}
    assert {"image/png", "text/html"} <= mime_types(notebook)
    assert {out.output_type for out in outputs(notebook)} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert all(out.name == "stdout" for out in outputs(notebook) if out.output_type == "stream")
    assert estimates(printed(notebook))
    assert not re.search(r"/(work|home|root|tmp|Users)/", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(name, marks=pytest.mark.documents) for name in OTHERS)]
)
def test_a_run_agrees_with_what_is_stored(name):
    path, before = stored(name)
    now = execute(path)
    assert {"image/png", "text/html"} <= mime_types(now)
    assert_consistent(before, now)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A function that runs a cell and returns its outputs, and a client for completions."""
    manager, client = start_new_kernel(cwd=str(tmp_path_factory.mktemp("kernel")))

    def run(source):
        shown = []

        def hook(message):
            if message["msg_type"] in SHOWN:
                shown.append((message["msg_type"], message["content"]))

        reply = client.execute_interactive(source, output_hook=hook, timeout=120)
        assert reply["content"]["status"] == "ok", reply["content"]
        return shown

    run(f"import sys, time; sys.path[:0] = {sys.path}")
    run("import lambdahat as lh, torch; from lambdahat._core.progress import report")
    run("spectrum = lh.spectrum(torch.diag(torch.arange(30.0)), depth=10)")
    yield run, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


SHOWN = ("display_data", "execute_result", "update_display_data", "stream", "error")


def pictures(shown):
    return sum("image/png" in content.get("data", {}) for _, content in shown)


def test_a_figure_shows_itself_once(kernel):
    run, _ = kernel
    assert pictures(run("axes = lh.plot(spectrum)")) == 0
    assert pictures(run("axes")) == pictures(run("axes.figure")) == 1
    assert pictures(run("%matplotlib inline\naxes")) == pictures(run("axes.figure")) == 1
    assert pictures(run("lh.plot({'one': spectrum, 'two': spectrum})")) == 1
    own = "import matplotlib.pyplot as plt\nlh.plot(spectrum, plt.subplots()[1]);"
    assert pictures(run(own)) == 1


def test_a_result_shows_itself_as_html(kernel):
    ((kind, content),) = kernel[0]("spectrum")
    assert kind == "execute_result"
    assert "standard error" in content["data"]["text/html"]
    assert "<img" in content["data"]["text/html"]


def test_names_complete(kernel):
    _, client = kernel
    for start, expected in (("lh.pl", "plot"), ("lh.gra", "graphs"), ("lh.optim.N", "NGD")):
        reply = client.complete(start, reply=True, timeout=60)["content"]
        assert any(match.rpartition(".")[2] == expected for match in reply["matches"]), start


SLOW = "for i in range(150): report('sample', i, 150); time.sleep(0.01)"


def test_progress_shows_after_a_second_and_is_gone_at_the_end(kernel):
    run, _ = kernel
    shown = run(SLOW)
    assert shown[0][0] == "display_data"
    assert {kind for kind, _ in shown[1:]} == {"update_display_data"}
    texts = [content["data"]["text/html"] for _, content in shown]
    assert all("<progress" in text and "sample" in text for text in texts[:-1])
    assert texts[-1] == ""
    assert len(texts) >= 2
    assert 'value="0.000"' not in texts[0]  # not at once
    assert run("report('sample', 1, 2)") == []
    assert run(f"lh.progress(False);\n{SLOW}") == []
    assert run(f"lh.progress();\n{SLOW}")
