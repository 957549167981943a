"""Tables as text and Markdown: words stand to the left, numbers to the right."""

import pytest

from lambdahat.cli.printing import markdown_table, text_table

HEADER = ("run", "λ̂", "claim", "of 4", "here")
ROWS = [
    ("NGD", "12.3 ± 0.4", "it is above", "1 of 4", "2.4 ± 0.2; not testable: it has not learnt"),
    ("SGD", "4", "", "10 of 4", "1"),
]


def test_text():
    assert text_table(HEADER, ROWS, "Title").splitlines() == [
        "Title",
        "run           λ̂  claim           of 4  here",
        "---  ----------  -----------  -------  ------------------------------------------",
        "NGD  12.3 ± 0.4  it is above   1 of 4  2.4 ± 0.2; not testable: it has not learnt",
        "SGD           4               10 of 4  1",
    ]


def test_markdown():
    assert markdown_table(HEADER, ROWS).splitlines()[1] == "| :-- | --: | :-- | --: | :-- |"


@pytest.mark.parametrize(
    ("cell", "right"),
    [
        ("-0.5", True),
        ("−3", True),
        ("< 1e-4", True),
        ("at least 12", True),
        ("12.3 (exact)", True),
        ("nan", True),
        ("1,200 gradients", True),
        ("CONVERGED", False),
        ("", False),
        ("–", False),
        ("infinite", False),
        ("§5.3", False),
    ],
)
def test_numbers_are_told_from_words(cell, right):
    mark = markdown_table(("name", "value"), [("a", cell)]).splitlines()[1]
    assert mark == f"| :-- | {'--:' if right else ':--'} |"
