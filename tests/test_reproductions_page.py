"""docs/reproductions.md and docs/claims: what the stored runs say, and nothing else."""

import importlib.util
import re
from dataclasses import replace

import pytest

from lambdahat.experiments import published
from lambdahat.experiments.kit.claims import Verdict
from lambdahat.experiments.kit.experiment import Size
from lambdahat.experiments.kit.sweeps import sweep
from tests.documents import DOCS, ROOT
from tests.experiments.toys import Config, toy

STORES = ROOT / "benchmarks" / "results" / "reproductions"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location(
        "reproductions", ROOT / "benchmarks" / "reproductions.py"
    )
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # its dataclass looks its module up
        patch.setitem(__import__("sys").modules, "reproductions", module)
        spec.loader.exec_module(module)
        chapter = module.Chapter("toys", "Toys", "toy-results.md")
        patch.setattr(module, "CHAPTERS", {**module.CHAPTERS, "toy": chapter})
        yield module


@pytest.fixture
def one_toy(monkeypatch):
    experiment = toy()
    monkeypatch.setattr(
        published, "PLACES", {"toy": ("nowhere", "TOY"), "other": ("nowhere", "OTHER")}
    )
    monkeypatch.setattr(published, "find", lambda name: experiment)
    return experiment


def test_a_line_and_a_section_for_each_run(script, one_toy, tmp_path):
    for scale in ("smoke", "cpu"):
        sweep(one_toy, tmp_path, scale=scale, command=f"lambdahat reproduce toy --scale {scale}")
    path = tmp_path / "page.md"
    path.write_text(f"above\n\n{script.BEGIN}\nbefore\n{script.END}\n\nbelow\n")
    documents = script.documents(path, tmp_path)
    assert set(documents) == {path, tmp_path / "claims" / "toys.md"}
    page, claims = documents.values()
    assert page.startswith(f"above\n\n{script.BEGIN}\n\n")
    assert page.endswith(f"{script.END}\n\nbelow\n")
    assert "before" not in page
    head = "| paper | experiments | holds | does not hold | undecided | not testable here |"
    assert f"{head} not testable: precondition / stand-in" in page
    for name in ("[**no paper**](claims/toys.md)", "**all**"):
        assert f"| {name} | 1 | 1 | 0 | 0 | 0 |  |  |" in page
    assert "| [`toy`](claims/toys.md#toy-cpu) | cpu |" in page
    assert "Decided: 1 of the papers' 1 claims whose data are available here, 100%." in page
    assert "without a verdict: `other`." in page
    assert claims.startswith(
        script.UNSEARCHED + '# Toys: all claims\n\nEvery claim of "no paper" that was tested,'
    )
    assert "[Toys](../toy-results.md)" in claims
    assert "| [`toy`](#toy-cpu) | cpu | A toy | 1 | 0 | 0 | 0 |" in claims
    assert "\n## toy cpu\n\nA toy (Table 1).\n\n- Command: `lambdahat reproduce toy" in claims
    assert "`lambdahat reproduce toy --scale cpu` (8 cells, torch" in claims
    assert "| holds | The fast rate is above one | Table 1 | 2 |" in claims
    assert "--scale smoke" not in claims  # a smoke run has no verdict
    path.write_text(page)
    assert script.documents(path, tmp_path) == documents


def test_totals_count_an_experiment_once_and_our_own_claims_apart(script, one_toy, tmp_path):
    for scale in ("cpu", "paper"):
        sweep(one_toy, tmp_path, scale=scale)
    ours = Verdict("one of ours", "Table 1", "undecided", "0 ± 1", own=True)
    runs = [replace(run, verdicts=(*run.verdicts, ours)) for run in script.runs_in(tmp_path)]
    assert len(runs) == 2
    assert "| **all** | 1 | 1 | 0 | 0 | 0 |  | 0 / 0 / 1 / 0 |" in script.overview(runs)
    large, small = script.largest_first(runs)
    assert (large.store.scale, small.store.scale) == ("paper", "cpu")
    assert "| undecided | One of ours | Table 1, ours |" in script.section(runs[0])


def test_reduced_runs_and_stand_ins_are_named_and_stand_ins_decide_nothing(
    script, one_toy, tmp_path, monkeypatch
):
    net = {"network": "net", "data": "mnist", "training": 60_000}
    scales = {
        scale: [{**cell, **net, "epochs": epochs} for cell in one_toy.scales[scale]]
        for scale, epochs in (("smoke", 20), ("cpu", 40), ("paper", 80))
    }
    sizes = (Size("net", "mnist", epochs=100),)
    trained = replace(one_toy, size="A net on MNIST.", sizes=sizes, scales=scales)
    monkeypatch.setattr(published, "find", lambda name: trained)
    for scale in ("cpu", "paper"):
        sweep(trained, tmp_path, scale=scale)
    page = script.tables(script.runs_in(tmp_path))
    assert "| reduced: 40 of 100 epochs |" in page
    assert "| reduced: 80 of 100 epochs |" in page
    (claims,) = script.claim_pages(script.runs_in(tmp_path)).values()
    assert "- Size in the paper: A net on MNIST.\n- Size here: reduced: 80 of 100 epochs." in claims
    monkeypatch.setattr(
        published, "find", lambda name: replace(trained, sizes=(Size("VGG-16", "cifar100"),))
    )
    page = script.tables(script.runs_in(tmp_path))
    assert "| **all** | 1 | 0 | 0 | 0 | 1 | 0 / 1 / 0 |" in page
    assert "| stand-in: net on MNIST in place of VGG-16 on CIFAR-100 |" in page
    assert "Decided: 0 of the papers' 1 claims" in page
    (claims,) = script.claim_pages(script.runs_in(tmp_path)).values()
    assert claims.count("<summary>Claims tested on this stand-in (1)") == 2


def test_networks_that_the_larger_run_has_not_reached_count_with_the_smaller(
    script, one_toy, tmp_path, monkeypatch
):
    grids = toy(cpu=Config(8), paper=Config(4)).scales
    networks = {"cpu": ("LeNet", "WideResNet-10"), "paper": ("All-CNN", "WideResNet-28")}
    scales = {
        scale: [{**cell, "network": name} for name in names for cell in grids[scale]]
        for scale, names in networks.items()
    }
    trained = replace(one_toy, scales=scales)
    monkeypatch.setattr(published, "find", lambda name: trained)
    sweep(trained, tmp_path, scale="cpu")
    sweep(trained, tmp_path, scale="paper", only="network=All-CNN")
    small, large = script.runs_in(tmp_path)
    assert (small.unreached, large.unreached) == ([], ["WideResNet-28"])
    assert "**8 of 16 cells so far** (none of WideResNet-28)" in script.section(large)
    other = [Verdict(f"{name}: rises", "Table 1", "undecided", "") for name in networks["cpu"]]
    totals = script.overview([replace(small, verdicts=tuple(other)), large])
    assert "| **all** | 1 | 1 | 0 | 1 | 0 |" in totals
    # with too few seeds for any verdict the larger run leaves every claim to the smaller
    totals = script.overview([replace(small, verdicts=tuple(other)), replace(large, verdicts=())])
    assert "| **all** | 1 | 0 | 0 | 2 | 0 |" in totals


def test_undecided_claims_say_how_many_seeds_would_decide_them(script, one_toy, tmp_path):
    sweep(one_toy, tmp_path, scale="cpu")
    (run,) = script.runs_in(tmp_path)
    unknown = Verdict("one more", "Table 1", "undecided", "1 ± 1", plan="n = 12 (power so far 20%)")
    assert "to decide" not in script.section(run)
    assert "| 1 ± 1 | n = 12 (power so far 20%) |" in script.section(
        replace(run, verdicts=(*run.verdicts, unknown))
    )


def test_a_run_that_has_not_ended_says_so(script, one_toy, tmp_path):
    sweep(one_toy, tmp_path, scale="cpu", only="rate=2.0")
    (claims,) = script.claim_pages(script.runs_in(tmp_path)).values()
    assert "**4 of 8 cells so far**" in claims


def test_bars_in_words_do_not_part_columns(script, one_toy, tmp_path):
    sweep(toy(cpu=Config(3)), tmp_path, scale="cpu")
    verdicts = script.runs_in(tmp_path)[0].verdicts
    changed = type(verdicts[0])(
        "a | b", *(getattr(verdicts[0], name) for name in ("source", "verdict", "evidence"))
    )
    run = replace(script.runs_in(tmp_path)[0], verdicts=(changed,))
    assert "| a \\| b |" in script.section(run)


@pytest.mark.documents
def test_the_pages_are_those_of_the_stores(script):
    command = (
        "python benchmarks/reproductions.py benchmarks/results/reproductions --page"
        " docs/reproductions.md"
    )
    documents = script.documents(DOCS / "reproductions.md", STORES)
    assert {path for path in documents if path.parent != DOCS} == set((DOCS / "claims").iterdir())
    for path, text in documents.items():
        assert path.read_text(encoding="utf-8") == text, f"run {command}"


@pytest.mark.documents
def test_runs_at_paper_scale_are_of_marked_experiments(script):
    runs = [run for run in script.runs_in(STORES) if run.store.scale == "paper"]
    assert {run.experiment.name for run in runs} <= published.PAPER_SCALE <= set(published.PLACES)


def test_incomplete_runs_at_paper_scale_are_named(script, one_toy, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "PAPER_SCALE", {"toy"})
    sweep(one_toy, tmp_path, scale="paper", only="rate=2.0")
    assert script.overview(script.runs_in(tmp_path)).endswith("not completed there: `toy`.")
    sweep(one_toy, tmp_path, scale="paper")
    assert "not completed" not in script.overview(script.runs_in(tmp_path))


def test_stores_are_small():
    sizes = {path.name: path.stat().st_size for path in STORES.glob("*.sqlite")}
    assert sizes
    assert {name for name, size in sizes.items() if size > 1_000_000} == set()


def test_links_of_the_tables_lead_to_sections():
    page = (DOCS / "reproductions.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(claims/([\w-]+\.md#[\w-]+)\)", page))
    assert "\n### Sizes, the papers' and ours\n" in page
    sections = set()
    for path in (DOCS / "claims").iterdir():
        text = path.read_text(encoding="utf-8")
        here = {name.replace(" ", "-") for name in re.findall(r"^## (.*)$", text, re.MULTILINE)}
        assert set(re.findall(r"\]\(#([\w-]+)\)", text)) == here
        sections |= {f"{path.name}#{name}" for name in here}
    assert links == sections


def test_no_page_of_claims_is_enormous():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "claims").iterdir()}
    assert max(sizes.values()) < 150_000, sizes
