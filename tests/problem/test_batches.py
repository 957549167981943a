"""A data set becomes fixed batches in a fixed order, or is refused by name."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lambdahat.problem import batches as module
from lambdahat.problem.batches import (
    Batch,
    Batches,
    concatenate,
    free_memory,
    make_batches,
    restored,
    rng_untouched,
    take,
)

CPU = torch.device("cpu")
X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


PARTS = (slice(0, 4), slice(4, 8), slice(8, 10))


class Items(Dataset):
    def __init__(self, noise: float = 0.0, as_dict: bool = False) -> None:
        self.noise, self.as_dict = noise, as_dict

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int):
        x = X[index] + self.noise * torch.randn(2)
        return {"x": x, "labels": int(Y[index])} if self.as_dict else (x, int(Y[index]))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Sequence:
    """Anything with a length and items is a data set."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 10:
            raise IndexError
        return X[index], Y[index]


def make(data, batch_size=None, dtype=None) -> Batches:
    return make_batches(data, batch_size, 1024, CPU, dtype)


FORMS = {
    "tensors": ((X, Y), 4),
    "list of tensors": ([X, Y], 4),
    "dict of tensors": ({"x": X, "labels": Y}, 4),
    "Dataset": (Items(), 4),
    "Dataset of dicts": (Items(as_dict=True), 4),
    "TensorDataset": (TensorDataset(X, Y), 4),
    "a sequence": (Sequence(), 4),
    "IterableDataset": (Stream(), 4),
    "DataLoader": (DataLoader(TensorDataset(X, Y), batch_size=4), None),
    "DataLoader of dicts": (DataLoader(Items(as_dict=True), batch_size=4), None),
    "list of batches": ([(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])], None),
    "tuple of batches": (((X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])), None),
    "list of dicts": ([{"x": X[part], "labels": Y[part]} for part in PARTS], None),
    "UserDicts": ([UserDict(x=X[part], labels=Y[part]) for part in PARTS], None),
    "UserDict of columns": (UserDict(x=X, labels=Y), 4),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_batches(form, kept, monkeypatch):
    if not kept:
        monkeypatch.setattr(module, "CACHE_FRACTION", 0.0)
    data, batch_size = FORMS[form]
    found = make(data, batch_size)
    assert found.sizes == [4, 4, 2]
    assert (len(found), found.num_samples) == (3, 10)
    for _ in range(2):
        for index, (batch, start) in enumerate(zip(found, (0, 4, 8), strict=True)):
            x, y = batch.data.values() if isinstance(batch.data, dict) else batch.data
            assert torch.equal(x, X[start : start + 4])
            assert torch.equal(y, Y[start : start + 4])
            assert (batch.size, batch.index) == (len(x), index)
    assert torch.equal(
        next(iter(found)).data["x"]
        if isinstance(found.first().data, dict)
        else found.first().data[0],
        X[:4],
    )


def test_one_tensor_is_inputs_alone():
    assert [batch.size for batch in make(X, 6)] == [6, 4]
    assert torch.equal(make(X).first().data, X)


def test_casting_touches_floats_only():
    batch = make((X, Y), dtype=torch.float64).first()
    assert [leaf.dtype for leaf in batch.data] == [torch.float64, torch.int64]
    assert X.dtype == torch.float32


def test_batches_hold_no_graph():
    assert not make((X.clone().requires_grad_(), Y)).first().data[0].requires_grad


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("form", ["Dataset", "DataLoader", "IterableDataset", "tensors"])
def test_the_global_generator_is_untouched(form, kept, monkeypatch):
    """A DataLoader draws a seed for its workers at every pass."""
    if not kept:
        monkeypatch.setattr(module, "CACHE_FRACTION", 0.0)
    data, batch_size = FORMS[form]
    before = torch.get_rng_state()
    found = make(data, batch_size)
    assert (found._kept is not None) == kept
    list(found)
    found.first()
    assert torch.equal(before, torch.get_rng_state())


def test_rng_is_put_back_after_an_exception():
    before = torch.get_rng_state()

    def interrupted() -> None:
        with rng_untouched():
            torch.rand(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(before, torch.get_rng_state())


REFUSED = {
    "a generator": (
        ((X, Y) for _ in range(3)),
        None,
        TypeError,
        r"one-shot iterator; pass list\(data\)",
    ),
    "an iterator": (iter([(X, Y)]), None, TypeError, "one-shot iterator"),
    "no batches": ([], None, ValueError, "data must hold at least one batch, got an empty list"),
    "no rows": ((X[:0], Y[:0]), None, ValueError, "data must hold at least one sample"),
    "an empty Dataset": (
        TensorDataset(X[:0], Y[:0]),
        None,
        ValueError,
        "data must hold at least one sample",
    ),
    "an empty loader": (
        DataLoader(TensorDataset(X[:0], Y[:0])),
        None,
        ValueError,
        "data must hold at least one sample",
    ),
    "an empty batch": (
        [(X, Y), (X[:0], Y[:0])],
        None,
        ValueError,
        "batch 1 of the data must hold .* an empty batch",
    ),
    "uneven columns": (
        (X, Y[:5]),
        None,
        ValueError,
        r"same first dimension, got shapes \(10, 2\), \(5,\)",
    ),
    "no tensors": (
        [("a", "b")],
        None,
        ValueError,
        "data must have one tensor or more.*a batch without tensors",
    ),
    "numbers": (
        [1, 2, 3],
        None,
        TypeError,
        "data must be a list of batches .* first entry is 1; torch.as_tensor",
    ),
    "arrays": (
        (X.numpy(), Y.numpy()),
        None,
        TypeError,
        "first entry is ndarray of shape .* torch.as_tensor",
    ),
    "nothing": (
        None,
        None,
        TypeError,
        "data must be a Dataset, a DataLoader, tensors or a list of batches, got None",
    ),
    "a number": (3, None, TypeError, "data must be a Dataset"),
    "a shuffling loader": (
        DataLoader(TensorDataset(X, Y), shuffle=True),
        None,
        ValueError,
        "shuffles; use shuffle=False",
    ),
    "augmentation": (
        Items(noise=1.0),
        None,
        ValueError,
        r"random augmentation\); fix one pass with list\(loader\)",
    ),
    "augmentation in a loader": (
        DataLoader(Items(noise=1.0)),
        None,
        ValueError,
        "random augmentation",
    ),
    "a size of 0": ((X, Y), 0, ValueError, "batch_size must be an integer of at least 1, got 0"),
    "half a size": ((X, Y), 2.5, TypeError, "batch_size must be an integer"),
    "a size beside a loader": (
        DataLoader(TensorDataset(X, Y)),
        3,
        ValueError,
        "batch_size must be left out for a DataLoader",
    ),
    "a size beside batches": (
        [(X, Y)],
        3,
        ValueError,
        "batch_size must be left out for a list of batches",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_one_data_set_is_refused(name):
    data, batch_size, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make(data, batch_size)


def test_a_custom_sampler_that_shuffles_is_seen():
    class Shuffled(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(torch.randperm(10).tolist())

        def __len__(self) -> int:
            return 10

    with pytest.raises(ValueError, match="data must be the same at every pass"):
        make(DataLoader(TensorDataset(X, Y), sampler=Shuffled(), batch_size=5))


def test_missing_values_are_not_taken_for_augmentation():
    holes = X.clone()
    holes[0] = torch.nan
    assert make(TensorDataset(holes, Y), 4).num_samples == 10


def test_data_that_shrinks_is_named(monkeypatch):
    monkeypatch.setattr(module, "CACHE_FRACTION", 0.0)
    rows = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    found = make(rows)
    rows.pop()
    with pytest.raises(ValueError, match="data must give 2 batches at every pass, got 1"):
        list(found)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_subset(batch_size):
    chosen = torch.tensor([0, 3, 4, 9])
    part = make((X, Y), 4).subset(chosen, batch_size)
    assert part.sizes == ([2, 1, 1] if batch_size is None else [3, 1])
    assert torch.equal(torch.cat([batch.data[1] for batch in part]), chosen)
    assert torch.equal(torch.cat([batch.data[0] for batch in part]), X[chosen])


def test_subset_checks_its_size():
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        make((X, Y)).subset(torch.arange(3), 0)


def test_take_and_concatenate_undo_each_other():
    batch = Batch({"x": X, "labels": Y, "name": "text", "scale": torch.tensor(2.0)}, 10)
    first, second = take(batch, torch.arange(6)), take(batch, torch.arange(6, 10))
    assert (first.size, second.size) == (6, 4)
    assert first.data["name"] == "text"
    whole = concatenate([(p.data["x"], p.data["labels"]) for p in (first, second)])
    assert torch.equal(whole[0], X)
    assert torch.equal(whole[1], Y)


def test_free_memory_is_a_number_of_bytes():
    assert 1 << 20 < free_memory(CPU) < 1 << 50


@pytest.mark.parametrize(("share", "expected"), [(1.0, 70), (0.5, 40), (0.2, 10)])
def test_free_memory_is_that_of_a_process_s_share(monkeypatch, share, expected):
    """Of 100 bytes 60 are free; the process has reserved 20 and uses 10 of them."""
    for name, value in (
        ("mem_get_info", (60, 100)),
        ("memory_reserved", 20),
        ("memory_allocated", 10),
        ("get_per_process_memory_fraction", share),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value, raising=False)
    assert free_memory(torch.device("cuda")) == expected


class Sample(dict):
    """A dict that pytrees do not know."""


class Frozen(Mapping):
    """A mapping that can be read and no more."""

    def __init__(self, given):
        self.given = dict(given)

    def __getitem__(self, key):
        return self.given[key]

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)


@pytest.mark.parametrize("kind", [dict, UserDict, OrderedDict, Sample, Frozen])
@pytest.mark.parametrize("nested", [False, True])
def test_mappings_in_a_batch_are_moved_cast_and_sliced(kind, nested):
    def wrap(part):
        inner = kind({"x": X[part]})
        return (kind({"deep": inner, "name": "text"}) if nested else inner, Y[part])

    def inputs(batch):
        found = restored(batch.data)[0]
        assert type(found) is kind
        return found["deep"]["x"] if nested else found["x"]

    dtype = torch.float64
    for data, batch_size in (
        ([wrap(slice(0, 6)), wrap(slice(6, 10))], None),
        (wrap(slice(0, 10)), 6),
    ):
        batches = Batches(module._passes(data, batch_size, 4), CPU, dtype)
        assert batches.sizes == [6, 4]
        assert [inputs(batch).dtype for batch in batches] == [dtype] * 2
        assert torch.equal(torch.cat([inputs(batch) for batch in batches]), X.to(dtype))
        part = batches.subset(torch.tensor([1, 7, 8]))
        assert torch.equal(torch.cat([inputs(batch) for batch in part]), X[[1, 7, 8]].to(dtype))
        again = pickle.loads(pickle.dumps(batches.first()))
        assert torch.equal(inputs(again), X[:6].to(dtype))


def test_columns_may_be_nested_and_a_dict_by_number_is_a_data_set():
    batches = make({"inputs": UserDict(x=X), "labels": Y, "name": "text"}, 6)
    assert [batch.data["inputs"]["x"].shape for batch in batches] == [(6, 2), (4, 2)]
    assert batches.first().data["name"] == "text"
    numbered = make({i: (X[i], Y[i]) for i in range(10)}, 6)
    assert torch.equal(torch.cat([batch.data[0] for batch in numbered]), X)


def test_a_mapping_that_is_not_made_of_a_dict_comes_back_as_one():
    class Two(UserDict):
        def __init__(self, first, second):
            super().__init__(x=first)

    found = restored(make([(Two(X, 1), Y)]).first().data)[0]
    assert type(found) is dict
    assert torch.equal(found["x"], X)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_numbers_of_sparse_tensors_are_looked_at(layout):
    whole = X.to_sparse(layout=layout)
    assert [float(total) for _, total in make([(whole, Y)]).sums] == [float(X.sum())]
