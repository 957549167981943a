"""The documentation is true: its Python runs and prints what it shows, its tables and figures are
there.

Python blocks of a page run in their order, in one namespace, in an empty folder; notes above them
are told in documents.py. Commands: test_commands.py.
"""

import contextlib
import importlib.util
import io
import json
import math
import re
import warnings
from collections import Counter

import pytest

import lambdahat as lh
from lambdahat.cli import exits
from lambdahat.results import Status
from tests.documents import DOCS, PAGES, assert_alike, blocks, empty_folder, in_two_jobs


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with empty_folder(tmp_path, monkeypatch):
        yield tmp_path


@pytest.mark.parametrize("page", in_two_jobs(PAGES), ids=lambda page: page.name)
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
    deeper = {page for page in navigation if page.startswith("claims/")}  # from reproductions.md
    assert set(navigation) - linked == {"index.md"} | deeper


def test_the_navigation_has_its_groups():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = navigation.split("nav:\n")[1].split("exclude_docs:")[0]
    groups = re.findall(r"^  - ([\w-]+):$", navigation, re.MULTILINE)
    assert groups == ["Start", "How-to", "Understand", "Results", "Reference", "Decisions"]


QUESTIONS = {
    "What is the top Hessian eigenvalue of my ResNet?": "top-eigenvalue",
    "What is the learning coefficient of my transformer?": "transformer-coefficient",
    "Which learning rate can I use?": "learning-rate",
    "How does sharpness change during training?": "sharpness-during-training",
    "How do two checkpoints compare?": "compare-checkpoints",
    "What does NOT_A_MINIMUM mean?": "not-a-minimum",
}
STOP_WORDS = {"a", "can", "do", "does", "how", "i", "is", "my", "of", "the", "what", "which"}


def words(text):
    """The search terms of a text: lower case, without markup, punctuation and stop words."""
    tokens = re.split(r"[\s-]+", re.sub(r"<[^>]*>", " ", text).lower())
    trimmed = (re.sub(r"^\W+|\W+$", "", token) for token in tokens)
    return [word for word in trimmed if word and word not in STOP_WORDS]


def rank(sections, query, boosts):
    """Sections of the site's search index by BM25 over their fields, as lunr.js scores them."""
    scores = dict.fromkeys((section["location"] for section in sections), 0.0)
    for field, boost in boosts.items():
        counts = {s["location"]: Counter(words(s.get(field) or "")) for s in sections}
        mean = sum(map(Counter.total, counts.values())) / len(counts)
        for term in words(query):
            matches = sum(term in count for count in counts.values())
            rarity = math.log(1 + abs((len(counts) - matches + 0.5) / (matches + 0.5)))
            for location, count in counts.items():
                length = 1.2 * (0.25 + 0.75 * count.total() / mean)
                scores[location] += boost * rarity * 2.2 * count[term] / (length + count[term])
    return sorted(scores, key=scores.__getitem__, reverse=True)


@pytest.fixture(scope="session")
def search_index(tmp_path_factory):
    """The search index of the site, built without the reference, which takes most of the time."""
    mkdocs_config = pytest.importorskip("mkdocs.config")
    from mkdocs.commands.build import build

    site = tmp_path_factory.mktemp("site")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(
            mkdocs_config.load_config(
                str(DOCS.parent / "mkdocs.yml"), site_dir=str(site), plugins=["search"]
            )
        )
    return json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))


@pytest.mark.documents
def test_questions_find_their_pages_first(search_index):
    boosts = {"title": 1000.0, "text": 1.0}  # those of the theme's index
    for question, page in QUESTIONS.items():
        assert (DOCS / f"{page}.md").read_text(encoding="utf-8").startswith(f"# {question}\n")
        first = rank(search_index["docs"], question, boosts)[0]
        assert first.split("#")[0] == f"{page}/", question


def test_exit_codes_are_those_of_the_command():
    codes = {
        exits.OK,
        exits.NOT_CONVERGED,
        exits.BAD_INPUT,
        exits.FAILED,
        exits.INTERRUPTED,
        exits.UNREAD,
    }
    for name in ("errors-and-status.md", "command-line.md"):
        table = (DOCS / name).read_text(encoding="utf-8").split("## Exit codes")[1]
        assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes


KERNELS = {
    "kinetic": "kernels.Kinetic",
    "sgld": "kernels.SGLD",
    "rmsprop_sgld": "kernels.RMSpropSGLD",
    "sghmc": "kernels.SGHMC",
    "sgnht": "kernels.SGNHT",
    "hmc": "kernels.HMC",
}


def test_every_public_name_is_in_the_reference():
    page = (DOCS / "reference.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: lambdahat\.([\w.]+)$", page, re.MULTILINE))
    modules = {
        "data",
        "experiments",
        "graphs",
        "maxent",
        "models",
        "optim",
        "randommatrix",
        "sampling",
        "singular",
        "training",
    }
    assert {name for name in listed if "." not in name} == set(lh.__all__) - modules
    elsewhere = {"exact", "llc", "sample"}  # a module of its own, and names of lambdahat itself
    for module in sorted(modules):
        names = {KERNELS.get(name, name) for name in set(getattr(lh, module).__all__) - elsewhere}
        inner = {
            name.removeprefix(f"{module}.") for name in listed if name.startswith(f"{module}.")
        }
        assert {name for name in inner if not name.startswith("exact.")} == names


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
        shown |= {page.parent / link for link in links if link.endswith(".png")}
    assert {DOCS / "figures" / f"{name}.png" for name in figures_script().FIGURES} <= shown
    sizes = {path: path.stat().st_size for path in (DOCS / "figures").iterdir()}
    assert set(sizes) == shown
    assert max(sizes.values()) < 120_000
    assert sum(sizes.values()) < 1_500_000


@pytest.mark.slow
def test_figures_are_drawn(folder):
    script = figures_script()
    script.main(folder)
    assert {path.stem for path in folder.glob("*.png")} == set(script.FIGURES)
