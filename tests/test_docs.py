"""The documentation is true: its Python runs and prints what it shows, its tables and figures are
there.

Python blocks of a page run in their order, in one namespace, in an empty folder; notes above them
are told in documents.py. Commands: test_commands.py.
"""

import contextlib
import importlib.util
import io
import json
import re
import threading
import warnings
from collections import Counter
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType

import pytest
import typer

import lambdahat as lh
from lambdahat.cli import exits
from lambdahat.cli.app import app
from lambdahat.results import Status
from tests.documents import DOCS, PAGES, assert_alike, blocks, empty_folder, in_two_jobs
from tests.report.browser import CHROMIUM, Browser


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with empty_folder(tmp_path, monkeypatch):
        yield tmp_path


WITH_PYTHON = [page for page in PAGES if any(kind == "python" for kind, *_ in blocks(page))]


@pytest.mark.parametrize("page", in_two_jobs(WITH_PYTHON), ids=lambda page: page.name)
def test_python_blocks_run_and_print_what_is_shown(page, folder):
    namespace = {"__name__": "documentation"}
    for kind, body, note, shown in blocks(page):
        if kind != "python" or note.startswith("skip: "):
            continue
        if note.startswith("file: "):
            (folder / note.removeprefix("file: ")).write_text(body, encoding="utf-8")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, page.name, "exec"), namespace)
        if shown is not None and not note.startswith("output varies: "):
            assert_alike(shown, printed.getvalue())


def test_every_status_is_in_the_table_with_its_remedy():
    page = (DOCS / "errors-and-status.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| .* \|$", page, re.MULTILINE)
    assert rows == [(status.name, status.value or "none needed") for status in Status]


def test_the_first_page_leads_to_every_page():
    navigation = re.findall(
        r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert len(navigation) > 40
    deeper = {  # from reproductions.md and reference/index.md
        page for page in navigation if page.startswith(("claims/", "reference/"))
    } - {"reference/index.md"}
    assert set(navigation) - linked == {"index.md"} | deeper


def test_the_navigation_has_its_groups():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = navigation.split("nav:\n")[1].split("exclude_docs:")[0]
    groups = re.findall(r"^  - ([\w-]+):$", navigation, re.MULTILINE)
    assert groups == ["Start", "How-to", "Understand", "Results", "Reference", "Decisions"]


# the question of each page, and other ways to put it
QUESTIONS = {
    "top-eigenvalue": (
        "What is the top Hessian eigenvalue of my ResNet?",
        "largest eigenvalue of the Hessian of a ResNet",
        "how do I compute the largest Hessian eigenvalue",
        "top eigenvalue",
    ),
    "transformer-coefficient": (
        "What is the learning coefficient of my transformer?",
        "llc of a transformer",
        "local learning coefficient of a language model",
        "λ̂ of my transformer",
        "λ̂ of my Hugging Face model",
    ),
    "learning-rate": (
        "Which learning rate can I use?",
        "what learning rate should I use",
        "largest stable learning rate",
        "maximum learning rate",
    ),
    "sharpness-during-training": (
        "How does sharpness change during training?",
        "track sharpness while training",
        "sharpness during training",
        "sharpness beside 2/lr",
    ),
    "compare-checkpoints": (
        "How do two checkpoints compare?",
        "compare checkpoints",
        "which of two checkpoints is sharper",
        "difference between two checkpoints",
        "compare SGD and Adam",
    ),
    "not-mixed": ("Why is my result NOT_MIXED?", "NOT_MIXED", "status not mixed"),
    "not-a-minimum": (
        "What does NOT_A_MINIMUM mean?",
        "NOT_A_MINIMUM",
        "status not a minimum",
        "why is λ̂ negative",
    ),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as it is published."""
    mkdocs_config = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build

    folder = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings(), contextlib.chdir(DOCS.parent):
        warnings.simplefilter("ignore")
        build(mkdocs_config.load_config("mkdocs.yml", site_dir=str(folder)))
    return folder


class Quiet(SimpleHTTPRequestHandler):
    """Serve a folder without a line for each request."""

    def log_message(self, *_):
        pass


@pytest.fixture
def address(site):
    """Where the site is served, on this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.documents
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_questions_find_their_pages_first_and_no_other_host_is_asked(address, tmp_path):
    with Browser(tmp_path) as browser:
        browser.size(1300)
        browser.call("Page.navigate", url=f"{address}/")
        browser.until("document.querySelector('.md-search__input')")
        for page, questions in QUESTIONS.items():
            head = (DOCS / f"{page}.md").read_text(encoding="utf-8").split("---\n\n")[1]
            assert head.startswith(f"# {questions[0]}\n")
            for question in questions:
                browser.evaluate(
                    "document.querySelectorAll('.md-search-result__item').forEach(e => e.remove());"
                    "var box = document.querySelector('.md-search__input'); box.focus();"
                    f"box.value = {json.dumps(question)}; box.dispatchEvent(new Event('keyup'))"
                )
                browser.until("document.querySelector('.md-search-result__item > a')")
                first = browser.evaluate(
                    "document.querySelector('.md-search-result__item > a').href"
                )
                assert first.removeprefix(address).partition("#")[0] == f"/{page}/", question
        assert [url for url in browser.complaints() if not str(url).startswith(address)] == []


@pytest.mark.documents
def test_pages_of_the_reference_are_of_readable_length(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    lengths = Counter()
    for section in index["docs"]:
        page = section["location"].partition("#")[0]
        lengths[page] += len(section["title"]) + len(section["text"])
    reference = {page: size for page, size in lengths.items() if page.startswith("reference/")}
    assert len(reference) == len(list((DOCS / "reference").iterdir()))
    assert max(reference.values()) < 50_000, reference  # 30,000 are about 20,000 pixels


@pytest.mark.documents
def test_stars_of_formulas_are_no_emphasis(site):
    pages = {page.parent.name: page.read_text("utf-8") for page in site.glob("reference/*/*.html")}
    for name, page in pages.items():
        assert set(re.findall("<em>([^<]*)", page)) <= {"required"}, name
        assert r"\*" not in page, name
    assert "− L(w*)) at the problem's parameters w* (Lau" in pages["singular"]


def test_the_gallery_has_every_figure_with_its_page_and_its_code(site):
    gallery, code = (
        (site / page / "index.html").read_text(encoding="utf-8")
        for page in ("gallery", "gallery-code")
    )
    cards = re.findall(
        r'<li>\s*<p><a href="\.\./?([\w-]*)/?"><img [^>]*src="\.\./figures/([\w-]+)\.png"', gallery
    )
    # pictures of decisions compare with what is no longer there
    decided = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "decisions").iterdir())
    figures = {path.stem for path in (DOCS / "figures").iterdir()}
    compared = set(re.findall(r"figures/([\w-]+)\.png", decided))
    assert sorted(figure for _, figure in cards) == sorted(figures - compared)
    for page, figure in cards:
        html = (site / page / "index.html").read_text(encoding="utf-8")
        assert f"figures/{figure}.png" in html
    linked = set(re.findall(r'href="\.\./gallery-code/#([\w-]+)"', gallery))
    assert linked == set(figures_script().FIGURES) == set(re.findall(r'<h2 id="([\w-]+)"', code))


def test_exit_codes_are_those_of_the_command():
    codes = {
        exits.OK,
        exits.NOT_CONVERGED,
        exits.BAD_INPUT,
        exits.FAILED,
        exits.USERS_CODE,
        exits.INTERRUPTED,
        exits.UNREAD,
    }
    pages = "errors-and-status.md", "command-line.md"
    texts = [(DOCS / name).read_text(encoding="utf-8").split("## Exit codes")[1] for name in pages]
    first, second = (re.findall(r"^\| (\d+) \| (.*)$", text, re.MULTILINE) for text in texts)
    assert {int(code) for code, _ in first} == codes
    assert first == second


def test_the_table_of_commands_has_every_command():
    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `lambdahat ([\w-]+)`", text, re.MULTILINE))
    assert named == set(typer.main.get_group(app).commands)


MODULES = {name for name in lh.__all__ if isinstance(getattr(lh, name), ModuleType)}


def test_every_public_name_is_on_one_page_of_the_reference():
    entry = re.compile(r"^(?:<!-- lh\.([\w.]+) -->\n)?::: lambdahat\.([\w.]+)$", re.MULTILINE)
    listed = Counter()
    for page in (DOCS / "reference").glob("*.md"):
        found = entry.findall(page.read_text(encoding="utf-8"))
        listed.update(shown or path for shown, path in found)
    assert [name for name, times in listed.items() if times > 1] == []
    public = set(lh.__all__) - MODULES
    for module in MODULES:
        names = set(getattr(lh, module).__all__)
        # names of lambdahat itself, and a module with a page of its own
        public |= {f"{module}.{name}" for name in names - {"llc", "sample", "exact"}}
    elsewhere = {
        name for name in listed if name.startswith(("results.", "singular.exact.", "fsdp."))
    }
    assert set(listed) - elsewhere == public


def figures_script():
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_somewhere_and_figures_are_small():
    shown = set()
    for page in PAGES:
        links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
        missing = [link for link in links if not (page.parent / link).exists()]
        assert not missing, f"{page.name}: {missing}"
        shown |= {(page.parent / link).resolve() for link in links if link.endswith(".png")}
    assert {DOCS / "figures" / f"{name}.png" for name in figures_script().FIGURES} <= shown
    sizes = {path: path.stat().st_size for path in (DOCS / "figures").iterdir()}
    assert set(sizes) == shown
    assert max(sizes.values()) < 120_000
    assert sum(sizes.values()) < 1_800_000


def test_pages_speak_of_the_library_and_not_of_how_it_was_made():
    words = re.compile(r"\b(?:issues?|sessions?|strangers?|reviewers?)\b", re.IGNORECASE)
    found = {
        page.name: words.findall(page.read_text(encoding="utf-8"))
        for page in (*PAGES, DOCS.parent / "CHANGELOG.md")
    }
    assert {name: hits for name, hits in found.items() if hits} == {}


@pytest.mark.slow
def test_figures_are_drawn(folder):
    script = figures_script()
    script.main(folder)
    assert {path.stem for path in folder.glob("*.png")} == set(script.FIGURES)
