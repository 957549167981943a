"""Errors name the argument, the expectation, what came and the cure."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lambdahat._core.check import (
    describe,
    require,
    require_choice,
    require_count,
    require_finite,
    require_number,
    require_positive,
    require_shape,
    require_type,
)


def test_require_says_name_expectation_value_and_cure():
    with pytest.raises(ValueError, match=r"^depth must lie in \[1, 5\], got 9; use dense\(\)$"):
        require(False, "depth", "lie in [1, 5]", 9, "use dense()")


def test_require_without_cure_and_with_another_error():
    with pytest.raises(TypeError, match=r"^k must be whole, got 1\.5$"):
        require(False, "k", "be whole", 1.5, error=TypeError)


def test_require_is_silent_when_it_holds():
    require(True, "x", "hold", None)


def test_describe_prefers_shapes_and_stays_short():
    assert describe(torch.zeros(3, 4)) == "Tensor of shape (3, 4)"
    assert describe(np.zeros(2)) == "ndarray of shape (2,)"
    assert describe("a") == "'a'"
    assert describe(torch.Tensor) == repr(torch.Tensor)
    assert len(describe(list(range(10_000)))) < 80


@pytest.mark.parametrize("value", [1, 7, np.int64(3), np.uint8(2)])
def test_counts_are_returned_as_int(value):
    found = require_count(value, "k", 1, 7)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        (8, ValueError),
        (1.0, TypeError),
        (True, TypeError),
        ("3", TypeError),
        (None, TypeError),
        (math.nan, TypeError),
        (torch.tensor(3), TypeError),
    ],
)
def test_counts_refuse(value, error):
    with pytest.raises(error, match=r"^k must be an integer in \[1, 7\], got .*; ask for fewer$"):
        require_count(value, "k", 1, 7, "ask for fewer")


@pytest.mark.parametrize("value", [1e-300, 1, 2.5, np.float32(0.5)])
def test_positive_numbers_are_returned_as_float(value):
    found = require_positive(value, "tol")
    assert found == float(value)
    assert type(found) is float


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-0.1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("1", TypeError),
        (None, TypeError),
        (True, TypeError),
        (1j, TypeError),
    ],
)
def test_positive_numbers_refuse(value, error):
    with pytest.raises(error, match=r"^tol must be a .*number above 0, got "):
        require_positive(value, "tol")


@pytest.mark.parametrize(
    ("value", "interval", "error", "text"),
    [
        (1, "[0, 1)", ValueError, r"lie in \[0, 1\), got 1; lower it$"),
        (0, "(0, 1]", ValueError, r"lie in \(0, 1\], got 0; lower it$"),
        (math.nan, "[0, 1]", ValueError, r"lie in \[0, 1\], got nan"),
        (-1, "[0, inf)", ValueError, r"be a finite number of at least 0, got -1"),
        (math.inf, "[0, inf)", ValueError, r"be a finite number of at least 0, got inf"),
        (math.nan, "[0, inf]", ValueError, r"be a number of at least 0, got nan"),
        (-math.inf, "(-inf, inf)", ValueError, r"be a finite number, got -inf"),
        ("1", "[0, 1]", TypeError, r"be a number in \[0, 1\], got '1'"),
        (True, "[0, inf)", TypeError, r"be a number of at least 0, got True"),
        (None, "(-inf, inf)", TypeError, r"be a number, got None"),
    ],
)
def test_numbers_outside_an_interval_are_refused(value, interval, error, text):
    with pytest.raises(error, match="^rate must " + text):
        require_number(value, "rate", interval, "lower it")


def test_numbers_in_an_interval_are_returned_as_float():
    cases = ((0, "[0, 1)"), (1, "(0, 1]"), (np.float32(0.5), "(0, 1)"), (math.inf, "[0, inf]"))
    for value, interval in cases:
        found = require_number(value, "rate", interval)
        assert (found, type(found)) == (float(value), float)


def test_types():
    require_type(torch.zeros(2), torch.Tensor, "x", "be a tensor")
    require_type(len, Callable, "make", "be a function")
    with pytest.raises(TypeError, match=r"^make must be a function, got 3; such as len$"):
        require_type(3, Callable, "make", "be a function", "such as len")


def test_shapes():
    require_shape(torch.zeros(4, 7), (4, "k"), "start")
    require_shape(np.zeros(4), (4,), "start")
    for wrong in (torch.zeros(7, 4), torch.zeros(4), [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"^start must have shape \(4, k\), got .*; cut it$"):
            require_shape(wrong, (4, "k"), "start", "cut it")
    with pytest.raises(
        ValueError, match=r"^x must have shape \(3,\), got ndarray of shape \(2,\)$"
    ):
        require_shape(np.zeros(2), (3,), "x")


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_finite_values(make):
    require_finite(make([1.0, -2.0]), "theta")
    for wrong in (math.nan, math.inf):
        with pytest.raises(
            ValueError, match=r"^theta must be finite, got NaN or infinity in it; train again$"
        ):
            require_finite(make([1.0, wrong]), "theta", "train again")


def test_choices():
    assert require_choice("b", "which", ("a", "b")) == "b"
    for wrong in ("c", None, 3, ["a"]):
        with pytest.raises(ValueError, match=r"^which must be one of 'a', 'b', got "):
            require_choice(wrong, "which", ("a", "b"))


def test_a_choice_is_spelt_for_you():
    with pytest.raises(
        ValueError,
        match=r"^data set must be one of 'mnist', 'xord', got 'mnst'; did you mean 'mnist'\?$",
    ):
        require_choice("mnst", "data set", ("mnist", "xord"))
    with pytest.raises(ValueError, match=r"got 'mnst'; did you mean 'mnist'\?; or pass a path$"):
        require_choice("mnst", "data set", {"mnist": 0}, "or pass a path")
    with pytest.raises(ValueError, match=r"got 'ngd'; did you mean 'NGD'\?$"):
        require_choice("ngd", "optimizer", ("SGD", "NGD"))
    with pytest.raises(ValueError, match=r"got 'nothing'$"):
        require_choice("nothing", "data set", ("mnist", "xord"))
