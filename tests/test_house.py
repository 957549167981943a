"""The rules of the layout, read off the source: names, imports, and how small a module may be."""

import runpy

import pytest

from tests.documents import ROOT


@pytest.fixture(scope="module")
def sizes():
    return runpy.run_path(str(ROOT / "benchmarks" / "house.py"))["sizes"]()


def test_a_name_is_used_once(sizes):
    assert sizes["file names used twice"] == []
    # lh.KFAC is the operator and lh.optim.KFAC the optimiser; both are public names of the field
    assert sizes["public class names used twice"] == ["KFAC"]


def test_private_names_stay_in_their_module(sizes):
    assert sizes["private names imported elsewhere"] == []


def test_modules_do_not_import_one_another_in_circles(sizes):
    assert sizes["import cycles"] == []


def test_a_small_module_with_one_user_is_part_of_it(sizes):
    """Commands of the command line are the exception: one file each, all imported by the app."""
    lone = sizes["modules under 300 lines with one importing sibling"]
    assert [name for name in lone if not name.startswith("lambdahat.cli.")] == []


def test_the_library_stays_small(sizes):
    assert sizes["files"] <= 270
