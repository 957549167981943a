"""ImageNet at 32 × 32, and folders of pictures."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lambdahat.data import ImageFolder, load
from lambdahat.data.image_files import BATCHES, DEVIATION, MEAN
from tests.data.standard_files import colours, dump


def write_small(folder, form):
    for i, name in enumerate([*BATCHES, "val_data"]):
        labels = [i + 1, 1000]
        if form == "npz":
            np.savez(folder / f"{name}.npz", data=colours(2, i), labels=np.array(labels))
        else:
            dump(folder / name, {"data": colours(2, i), "labels": labels, "mean": np.zeros(3072)})


@pytest.mark.parametrize("form", ["npz", "pickle"])
def test_imagenet32_counts_its_classes_from_one(tmp_path, form):
    write_small(tmp_path, form)
    split = load("imagenet32", tmp_path, verify=False)
    assert split.train[0].dtype == torch.uint8
    assert tuple(split.train[0].shape) == (20, 3, 32, 32)
    assert torch.equal(split.train[0][2:4].flatten(1), torch.from_numpy(colours(2, 1)))
    assert split.train[1].tolist() == [label for i in range(10) for label in (i, 999)]
    assert torch.equal(split.test[0].flatten(1), torch.from_numpy(colours(2, 10)))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:200]),
            ValueError,
            "train_data_batch_3.npz must be a whole",
        ),
        (
            lambda path: np.savez(path, data=colours(2)),
            ValueError,
            "must have the entry 'labels', got data",
        ),
        (
            lambda path: np.savez(path, data=colours(2), labels=[0, 1]),
            ValueError,
            "must hold labels 1 to 1000, got 0 to 1",
        ),
        (
            lambda path: np.savez(path, data=np.array([{}], object), labels=[1]),
            ValueError,
            "must be a whole .npz",
        ),
        (
            lambda path: path.unlink(),
            FileNotFoundError,
            "hold train_data_batch_3 or train_data_batch_3.npz",
        ),
    ],
)
def test_wrong_batches_are_refused_by_name(tmp_path, spoil, error, message):
    write_small(tmp_path, "npz")
    spoil(tmp_path / "train_data_batch_3.npz")
    with pytest.raises(error, match=message):
        load("imagenet32", tmp_path, verify=False)


@pytest.fixture
def pictures(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    for name, colour in (("n02", (255, 0, 0)), ("n01", (0, 128, 255))):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (60, 40), colour).save(tmp_path / name / f"{name}_{i}.PNG")
    (tmp_path / "n01" / "notes.txt").write_text("no picture")
    Image.new("L", (40, 50), 77).save(tmp_path / "n01" / "grey.jpg")
    return tmp_path


def test_pictures_by_class_in_alphabetical_order(pictures):
    data = ImageFolder(pictures, size=28, normalization="unit")
    assert data.classes == ["n01", "n02"]
    assert len(data) == 7
    image, label = data[6]
    assert label == 1
    assert tuple(image.shape) == (3, 28, 28)
    assert torch.equal(image, torch.tensor([1.0, 0, 0]).view(3, 1, 1).expand(3, 28, 28))
    grey = data[0][0]
    assert torch.allclose(grey, torch.full_like(grey, 77 / 255), atol=0.01)
    standard = ImageFolder(pictures, size=28)[6][0][:, 0, 0]
    expected = (torch.tensor([1.0, 0, 0]) - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    assert torch.allclose(standard, expected, atol=1e-5)
    images, labels = next(iter(DataLoader(data, batch_size=7)))
    assert tuple(images.shape) == (7, 3, 28, 28)
    assert labels.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_the_middle_is_cut_out(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    wide = np.zeros((32, 96, 3), np.uint8)
    wide[:, 32:64] = 255
    (tmp_path / "only").mkdir()
    Image.fromarray(wide).save(tmp_path / "only" / "wide.png")
    image, _ = ImageFolder(tmp_path, size=28, normalization="unit")[0]
    assert float(image.min()) == 1.0


def test_wrong_pictures_and_folders_are_refused(pictures):
    path = next((pictures / "n02").iterdir())
    path.write_bytes(path.read_bytes()[:60])
    data = ImageFolder(pictures, size=28)
    with pytest.raises(ValueError, match=r"must be a whole picture, got .*; replace or remove it"):
        [data[i] for i in range(len(data))]
    (pictures / "n03").mkdir()
    with pytest.raises(
        ValueError,
        match=r"folder must hold one folder of pictures for each class, got .* n03 empty",
    ):
        ImageFolder(pictures)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        ImageFolder(pictures / "nowhere")
    with pytest.raises(ValueError, match="normalization must be one of"):
        ImageFolder(pictures, normalization="raw")
