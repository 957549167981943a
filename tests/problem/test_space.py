"""Named parameters and flat vectors are two views of one point."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lambdahat.problem.network import matcher
from lambdahat.problem.problem import Space

NAMED = {
    "conv.weight": torch.arange(24.0).reshape(2, 3, 4),
    "conv.bias": torch.tensor([1.0, 2.0]),
    "head.weight": torch.ones(2, 2),
    "scale": torch.tensor(5.0),
}
SPACE = Space.of(NAMED)


def test_sizes_slices_and_order():
    assert SPACE.sizes == (24, 2, 4, 1)
    assert SPACE.size == 31
    assert SPACE.slices["head.weight"] == slice(26, 30)
    assert SPACE.names == tuple(NAMED)


def test_flatten_is_the_concatenation_and_unflatten_undoes_it():
    flat = SPACE.flatten(NAMED)
    assert torch.equal(flat, torch.cat([tensor.flatten() for tensor in NAMED.values()]))
    back = SPACE.unflatten(flat)
    assert all(torch.equal(back[name], tensor) for name, tensor in NAMED.items())


def test_unflatten_gives_views():
    flat = torch.zeros(31)
    SPACE.unflatten(flat)["conv.bias"].fill_(7.0)
    assert torch.equal(flat[24:26], torch.tensor([7.0, 7.0]))


def test_flatten_promotes():
    mixed = {"a": torch.zeros(1, dtype=torch.bfloat16), "b": torch.zeros(1, dtype=torch.float64)}
    assert Space.of(mixed).flatten(mixed).dtype == torch.float64


def test_split_keeps_leading_dimensions():
    block = torch.randn(5, 31, generator=torch.Generator().manual_seed(0))
    for rows in (block, block.T.contiguous().T):
        pieces = SPACE.split(rows)
        assert [tuple(piece.shape) for piece in pieces] == [(5, 2, 3, 4), (5, 2), (5, 2, 2), (5,)]
        assert torch.equal(pieces[2][3], block[3, 26:30].reshape(2, 2))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
def test_round_trip_of_any_shapes(shapes):
    named = {
        f"p{i}": torch.randn(tuple(shape), dtype=torch.float64) for i, shape in enumerate(shapes)
    }
    space = Space.of(named)
    back = space.unflatten(space.flatten(named))
    assert all(torch.equal(back[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("conv.*", ("conv.weight", "conv.bias")),
        ("*.weight", ("conv.weight", "head.weight")),
        (["scale", "conv.bias"], ("conv.bias", "scale")),
        (lambda name: "h" in name, ("conv.weight", "head.weight")),
        ("*", SPACE.names),
    ],
)
def test_select_keeps_the_order_of_the_space(pattern, expected):
    assert SPACE.select(pattern) == expected


@pytest.mark.parametrize("pattern", ["nothing", "CONV.*", [], lambda name: False])
def test_select_refuses_what_matches_nothing(pattern):
    with pytest.raises(ValueError, match=r"parameters must match at least one of conv\.weight"):
        SPACE.select(pattern)


def test_long_lists_of_names_are_cut_short():
    names = tuple(f"layer{i}" for i in range(100))
    with pytest.raises(ValueError, match="layer5, …, got") as caught:
        Space(names, ((1,),) * 100).select("x")
    assert len(str(caught.value)) < 120


def test_subspace_and_indices_agree():
    names = ("scale", "conv.bias")
    flat = torch.arange(31)
    assert SPACE.subspace(names).names == ("conv.bias", "scale")
    assert torch.equal(flat[SPACE.indices(names)], torch.tensor([24, 25, 30]))


def test_layers_group_by_owner():
    assert SPACE.layers() == {
        "conv": ("conv.weight", "conv.bias"),
        "head": ("head.weight",),
        "scale": ("scale",),
    }


def test_wrong_length_is_named():
    with pytest.raises(
        ValueError, match=r"vector must have shape \(31,\), got Tensor of shape \(30,\)"
    ):
        SPACE.unflatten(torch.zeros(30))


def test_matcher_of_a_callable_is_the_callable():
    assert matcher(str.isupper) is str.isupper
