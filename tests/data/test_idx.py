"""MNIST and Fashion-MNIST files."""

import gzip

import numpy as np
import pytest
import torch

from lambdahat.data import load
from lambdahat.data.image_files import NAMES, read_idx
from tests.data.standard_files import idx, write_handwriting


@pytest.mark.parametrize("compressed", [False, True])
def test_images_and_labels_come_back(tmp_path, compressed):
    arrays = write_handwriting(tmp_path, compressed)
    split = load("mnist", tmp_path, verify=False, normalization="raw")
    (x, y), (x_test, y_test) = split
    for tensor, name in zip((x[:, 0], y, x_test[:, 0], y_test), NAMES, strict=True):
        assert torch.equal(tensor, torch.from_numpy(arrays[name]).to(tensor.dtype))
    assert (x.shape, x.dtype, y.dtype, split.classes, split.shape) == (
        (7, 1, 28, 28),
        torch.uint8,
        torch.int64,
        10,
        (1, 28, 28),
    )


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 5)])
def test_idx_of_any_rank(tmp_path, shape):
    array = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    (tmp_path / "file").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "file"), array)


WHOLE = idx(np.zeros((2, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (WHOLE[:-1], r"must hold 1,584 bytes for 2×28×28 values, got 1,583; delete it and fetch"),
        (WHOLE + b"\0", r"must hold 1,584 bytes for 2×28×28 values, got 1,585"),
        (WHOLE[:10], "must have a header of 16 bytes, got 10 bytes in all"),
        (b"", "must be an idx file of bytes, got a file that begins with ''"),
        (
            b"<html>not found</html>",
            "must be an idx file of bytes, got a file that begins with '3c68746d'",
        ),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "must be an idx file of bytes"),
        (
            gzip.compress(WHOLE, mtime=0)[:-9],
            "must be a whole gzip file, got a damaged or truncated one",
        ),
        (gzip.compress(WHOLE, mtime=0)[:30] + b"\0" * 40, "must be a whole gzip file"),
        (
            idx(np.zeros((2, 27, 28), np.uint8)),
            r"must hold images of 28 × 28, got an array \(2, 27, 28\)",
        ),
        (
            idx(np.zeros((3, 28, 28), np.uint8)),
            r"t10k-labels-idx1-ubyte must hold 3 labels, got an array \(2,\)",
        ),
    ],
)
def test_wrong_image_files_are_refused_by_name(tmp_path, data, message):
    write_handwriting(tmp_path, test=2)
    (tmp_path / NAMES[2]).write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        load("mnist", tmp_path, verify=False)
    assert str(tmp_path) in str(error.value)


def test_labels_out_of_range_are_refused(tmp_path):
    write_handwriting(tmp_path)
    (tmp_path / NAMES[1]).write_bytes(idx(np.full(7, 10, np.uint8)))
    with pytest.raises(
        ValueError, match="train-labels-idx1-ubyte must hold labels 0 to 9, got up to 10"
    ):
        load("mnist", tmp_path, verify=False)


def test_a_missing_file_is_named(tmp_path):
    write_handwriting(tmp_path)
    (tmp_path / NAMES[3]).unlink()
    with pytest.raises(FileNotFoundError, match=f"folder must hold {NAMES[3]} or {NAMES[3]}.gz"):
        load("mnist", tmp_path, verify=False)
    with pytest.raises(
        FileNotFoundError, match=f"got none of {NAMES[3]}; run `lambdahat data fetch mnist`"
    ):
        load("mnist", tmp_path)
