"""The bundled digits."""

import pytest
import torch

from lambdahat.data import digits, digits_split


def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    theirs = datasets.load_digits()
    x, y = digits()
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert torch.equal(x * 16, torch.as_tensor(theirs.data, dtype=torch.float32))
    assert torch.equal(y, torch.as_tensor(theirs.target))


def test_split_parts_the_data_set_by_seed():
    (train, train_labels), (rest, _) = digits_split(seed=3)
    assert (len(train), len(rest)) == (1438, 359)
    everything = torch.cat([train, rest])
    x, _ = digits()
    assert torch.equal(everything.sum(0), x.sum(0))
    assert torch.equal(train_labels, digits_split(seed=3)[0][1])
    assert not torch.equal(train_labels, digits_split(seed=4)[0][1])


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_split_refuses_empty_parts(share):
    with pytest.raises(ValueError, match="held_out must lie in"):
        digits_split(held_out=share)
