"""A page of three made-up experiments, and a browser to look at it."""

import pytest

from lambdahat.report.page import write_page
from tests.report.browser import Browser
from tests.report.pages import experiments


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_page(experiments(), tmp_path_factory.mktemp("page") / "report.html", "A title")
