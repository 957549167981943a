"""The pages on single papers show what the stored runs say: their tables are made again here,
from the stores.
"""

import re
import runpy

import pytest

from lambdahat.experiments import Store, find, judge
from lambdahat.experiments.kit.claims import VERDICTS
from lambdahat.experiments.ngd.ngd_claims import INTERPOLATED, LEARNT
from tests.documents import DOCS, ROOT

pytestmark = pytest.mark.documents
STORES = ROOT / "benchmarks" / "results" / "reproductions"
LARGER = {"rules-synthetic": "paper"}  # those of RULES whose pages show another scale than cpu
SMALLER = {"rules-mnist": "MNIST, 2,000 images"}  # titles of tables beside one of a larger run
RULES = {
    "xor": ("XOR", "training accuracy"),
    "xord": ("XORD", "test error"),
    "rules-mnist": ("MNIST", "test accuracy"),
    "rules-synthetic": ("synthetic", "test error"),
    "rules-cifar10": ("CIFAR-10", "test accuracy"),
}


def lines_of(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        re.sub(r"\|\s+(?=\|)", "| ", line) for line in text.splitlines() if line.startswith("|")
    ]


def line(*cells):
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return re.sub(r"\|\s+(?=\|)", "| ", f"| {' | '.join(escaped)} |")


def rows_of(name, scale="cpu"):
    return Store(STORES, name, scale).rows()


@pytest.fixture(scope="module")
def drawn():
    return runpy.run_path(str(DOCS / "experiment_figures.py"))


@pytest.mark.parametrize("name", RULES)
def test_rules_are_shown_as_stored(name):
    title, judged = RULES[name]
    tanh, relu = find(name).tables(rows_of(name, LARGER.get(name, "cpu")))[:2]
    places = [tanh.header.index(column) for column in (judged, "norm")]
    expected = [
        line(first[0], *(row[place] for row in (first, second) for place in places))
        for first, second in zip(tanh.rows, relu.rows, strict=True)
    ]
    lines = lines_of("regularizers.md")
    start = lines.index(
        line(
            SMALLER.get(name, title),
            *(f"{column}, {word}" for word in ("tanh", "ReLU") for column in (judged, "norm")),
        )
    )
    assert lines[start + 2 : start + 2 + len(expected)] == expected


@pytest.mark.parametrize("name", RULES)
def test_verdicts_on_rules_are_those_of_the_stores(name):
    verdicts = {}
    for found in judge(find(name).claims(rows_of(name, LARGER.get(name, "cpu")))):
        if found.own:
            continue
        activation, claim = re.fullmatch(r"(tanh|relu)(?:, |: )(.*)", found.claim).groups()
        verdicts.setdefault(claim, {})[activation] = found.verdict
    expected = [
        line(claim, *(both.get(word, "") for word in ("tanh", "relu")))
        for claim, both in verdicts.items()
    ]
    lines = lines_of("regularizers.md")
    words = RULES[name][0].replace("synthetic", "the synthetic regression")
    start = lines.index(line(f"claim of the thesis on {words}", "tanh", "ReLU"))
    assert lines[start + 2 : start + 2 + len(expected)] == expected


def test_softmax_regression_is_shown_as_stored():
    experiment, lines = find("softmax-decay"), lines_of("experiments-flatness.md")
    main, *variants = experiment.tables(rows_of("softmax-decay", "paper"))
    assert {line(*row) for row in main.rows} <= set(lines)
    for table in variants:
        name = table.title.removeprefix("Softmax regression, ")
        cells = [row[place].split(" [")[0] for place in (1, 3) for row in table.rows[:3]]
        assert line(name, *cells) in lines


@pytest.mark.parametrize("name", ["cnn-decay", "gadam-sharpness"])
def test_networks_on_cifar100_are_shown_as_stored(name):
    lines = lines_of("experiments-flatness.md")
    for table in find(name).tables(rows_of(name, "paper")):
        start = lines.index(line(*table.rows[0]))
        assert {line(*row) for row in table.rows} <= set(lines[start:])


def test_pairs_are_counted_as_stored(drawn):
    lines, names = lines_of("experiments-ngd.md"), {**drawn["TEMPERATURES"], "trace": "Tr H"}
    for at, where in (("end", "at the end"), ("equal loss", "at equal training loss")):
        pairs = list(drawn["pairs"](at))
        for column, words in names.items():
            kept = (
                [pair for pair in pairs if drawn["sound"](pair, column)]
                if column != "trace"
                else []
            )
            learnt = [pair for pair in pairs if max(row["loss"] for row in pair) <= LEARNT]
            parts = (pairs, learnt, kept)
            counts = [
                f"{sum(ngd[column] > sgd[column] for sgd, ngd in part)} of {len(part)}"
                for part in parts
            ]
            assert line(f"{where}, {words}", *counts[:2], counts[2] if kept else "") in lines


@pytest.mark.parametrize(("name", "tail"), [("ngd-widths", ""), ("ngd-vs-sgd", ", α = 0.1")])
def test_ends_at_the_papers_size_are_shown_as_stored(name, tail):
    (table,) = (
        found
        for found in find(name).tables(rows_of(name, "paper"))
        if found.title.startswith("SGD and NGD")
    )
    ends = [row for row in table.rows if row[1] == "end"]
    assert ends
    lines = lines_of("experiments-ngd.md")
    for network, _, optimizer, *figures in ends:
        assert line(network + tail, optimizer, *figures[:5]) in lines


def test_switching_and_overfitting_at_the_papers_size_are_shown_as_stored():
    lines = lines_of("experiments-ngd.md")
    switching = find("ngd-switch").tables(rows_of("ngd-switch", "paper"))[0]
    assert {line(*row[1:]) for row in switching.rows} <= set(lines)
    overfitting = find("ngd-overfitting").tables(rows_of("ngd-overfitting", "paper"))[0]
    epochs = ("25", "75", "125", "200")
    assert {line(*row) for row in overfitting.rows if row[1] in epochs} <= set(lines)


def test_networks_that_interpolate_are_not_judged_as_overfitting():
    claims = find("ngd-overfitting").claims(rows_of("ngd-overfitting"))
    assert all("interpolates before" in claim.unmet for claim in claims)
    assert f"below {INTERPOLATED:.3f}, 1 %" in (DOCS / "experiments-ngd.md").read_text(
        encoding="utf-8"
    )


FLATNESS = ("mlp-decay", "cnn-decay", "gadam-sharpness", "rank-degeneracy", "deep-linear-toy")


@pytest.mark.parametrize("name", FLATNESS)
def test_what_holds_elsewhere_has_a_place_for_each_kind_of_verdict(name):
    """A column of the table is empty for an experiment, or one of its networks, just if no claim
    has that verdict.
    """
    verdicts = judge(find(name).claims(rows_of(name)))
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", text[1:-1])]
        for text in lines_of("experiments-flatness.md")
    ]
    found = [
        row for row in cells if len(row) == 1 + len(VERDICTS) and row[0].startswith(f"`{name}`")
    ]
    assert found
    for title, *columns in found:
        network = title.partition(", ")[2]
        kinds = {verdict.verdict for verdict in verdicts if verdict.claim.startswith(network)}
        assert [bool(column) for column in columns] == [kind in kinds for kind in VERDICTS], title
