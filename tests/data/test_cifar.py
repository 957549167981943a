"""CIFAR files, and pickles that are not what they seem."""

import os
import pickle

import numpy as np
import pytest
import torch

from lambdahat.data import load
from lambdahat.data.image_files import unpickle
from tests.data.standard_files import colours, dump


def write_ten(folder, batches=5, count=4):
    labels = [list(range(i, i + count)) for i in range(batches)]
    for i in range(batches):
        dump(folder / f"data_batch_{i + 1}", {b"data": colours(count, i), b"labels": labels[i]})
    dump(folder / "test_batch", {b"data": colours(3, 99), b"labels": [9, 0, 1]})
    return np.concatenate([colours(count, i) for i in range(batches)]), np.concatenate(labels)


def test_cifar10_pickles(tmp_path):
    rows, labels = write_ten(tmp_path / "cifar-10-batches-py")
    (x, y), (x_test, y_test) = load("cifar10", tmp_path, verify=False, normalization="raw")
    assert torch.equal(x, torch.from_numpy(rows.reshape(-1, 3, 32, 32)))
    assert torch.equal(y, torch.from_numpy(labels))
    assert torch.equal(x_test.flatten(1), torch.from_numpy(colours(3, 99)))
    assert y_test.tolist() == [9, 0, 1]


def test_batches_beyond_nine_are_in_the_order_of_their_numbers(tmp_path):
    rows, _ = write_ten(tmp_path, batches=6, count=1)
    for i in range(6, 11):
        dump(tmp_path / f"data_batch_{i + 1}", {b"data": colours(1, i), b"labels": [0]})
    (x, _), _ = load("cifar10", tmp_path, verify=False, normalization="raw")
    assert torch.equal(x.flatten(1)[:6], torch.from_numpy(rows))
    assert torch.equal(x.flatten(1)[10:], torch.from_numpy(colours(1, 10)))


def test_cifar10_binary_is_the_same(tmp_path):
    write_ten(tmp_path / "python")
    (tmp_path / "binary").mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batch = pickle.loads((tmp_path / "python" / name).read_bytes())
        records = np.concatenate(
            [np.array(batch[b"labels"], np.uint8)[:, None], batch[b"data"]], axis=1
        )
        (tmp_path / "binary" / f"{name}.bin").write_bytes(records.tobytes())
    pickled, binary = (
        load("cifar10", tmp_path / form, verify=False) for form in ("python", "binary")
    )
    for ours, theirs in zip(pickled, binary, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("form", ["python", "binary"])
def test_cifar100_takes_the_fine_labels(tmp_path, form):
    for name, count in (("train", 5), ("test", 2)):
        fine, coarse = [90 + i for i in range(count)], [3] * count
        if form == "python":
            dump(
                tmp_path / name,
                {"data": colours(count), "fine_labels": fine, "coarse_labels": coarse},
            )
        else:
            records = np.concatenate([np.array([coarse, fine], np.uint8).T, colours(count)], axis=1)
            (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    split = load("cifar100", tmp_path, verify=False, normalization="raw")
    assert split.train[1].tolist() == [90, 91, 92, 93, 94]
    assert torch.equal(split.test[0].flatten(1), torch.from_numpy(colours(2)))
    assert split.classes == 100


class Bomb:
    def __reduce__(self):
        return os.system, ("echo hello > hacked",)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {b"data": colours(4), b"labels": Bomb()},
            "got (posix|nt).system, which no data set needs",
        ),
        (
            {b"data": colours(4), b"labels": np.int64(3)},
            r"got numpy._core.multiarray.scalar, which no data set needs",
        ),
        ({b"data": colours(4)}, "must have the entry 'labels', got data"),
        ({b"labels": [0]}, "must have the entry 'data', got labels"),
        (
            {b"data": colours(4), b"labels": [0, 1, 2]},
            r"must hold 4 whole labels, got int64 \(3,\)",
        ),
        ({b"data": colours(4), b"labels": [0.5] * 4}, "must hold 4 whole labels, got float;"),
        ({b"data": colours(4), b"labels": [0, 1, 2, 10]}, "must hold labels 0 to 9, got 0 to 10"),
        ({b"data": colours(4), b"labels": [0, 1, 2, -1]}, "must hold labels 0 to 9, got -1 to 2"),
        (
            {b"data": colours(4)[:, 1:], b"labels": [0] * 4},
            r"must hold bytes \(n, 3072\), got uint8 \(4, 3071\)",
        ),
        ({b"data": colours(4).astype(float), b"labels": [0] * 4}, "got float64"),
        ({b"data": "text", b"labels": [0] * 4}, "got str"),
        ({b"data": colours(0), b"labels": []}, "must hold 0 whole labels, got float64"),
        ([1, 2], "must be a pickled dictionary of arrays, got a list"),
    ],
)
def test_wrong_batches_are_refused_by_name(tmp_path, monkeypatch, batch, message):
    monkeypatch.chdir(tmp_path)
    write_ten(tmp_path)
    dump(tmp_path / "data_batch_2", batch)
    with pytest.raises(ValueError, match=message) as error:
        load("cifar10", tmp_path, verify=False)
    assert "data_batch_2" in str(error.value)
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1])
def test_a_truncated_pickle_is_refused(tmp_path, keep):
    dump(tmp_path / "batch", {b"data": colours(4), b"labels": [0] * 4})
    whole = (tmp_path / "batch").read_bytes()
    (tmp_path / "batch").write_bytes(whole[:keep])
    with pytest.raises(
        ValueError,
        match=r"batch must be a pickled dictionary of arrays, got .*; delete it and fetch",
    ):
        unpickle(tmp_path / "batch")


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_pickles_of_every_protocol(tmp_path, protocol):
    dump(tmp_path / "batch", {b"data": colours(2), "labels": [1, 2], "name": b"\xff"}, protocol)
    # numpy reconstructs from buffers there, by a function that is not let through
    if protocol == 5:
        with pytest.raises(ValueError, match="which no data set needs"):
            unpickle(tmp_path / "batch")
        return
    found = unpickle(tmp_path / "batch")
    assert np.array_equal(found["data"], colours(2))
    assert (found["labels"], found["name"]) == ([1, 2], b"\xff")


def test_a_codec_other_than_latin1_is_refused(tmp_path):
    (tmp_path / "batch").write_bytes(
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR."
    )
    with pytest.raises(ValueError, match="got an encoding 'rot13'"):
        unpickle(tmp_path / "batch")


def test_half_a_record_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0" * 3075)
    (tmp_path / "test.bin").write_bytes(b"\0" * 3074)
    with pytest.raises(
        ValueError,
        match=r"train.bin must hold whole records of 3,074 bytes, got 3,075 bytes; delete",
    ):
        load("cifar100", tmp_path, verify=False)


def test_a_gap_in_the_batches_is_refused(tmp_path):
    write_ten(tmp_path)
    (tmp_path / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="folder must hold data_batch_3, got"):
        load("cifar10", tmp_path, verify=False)
