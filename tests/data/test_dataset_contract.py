"""What every registered data set keeps: counts, types, seeds, a digest, and help where it is
missing.
"""

import inspect

import numpy as np
import pytest
import torch

from lambdahat.data import CATALOGUE, Split, fetch, load, load_text, register_dataset
from lambdahat.data.catalogue import data_digest
from tests.data.standard_files import colours, dump, write_handwriting
from tests.data.test_cifar import write_ten
from tests.data.test_imagenet import write_small

NOBODY = "http://127.0.0.1:9"  # the port where nothing listens


def write_hundred(folder):
    for name, count in (("train", 5), ("test", 2)):
        dump(folder / name, {b"data": colours(count), b"fine_labels": list(range(count))})


def write_treebank(folder):
    for part in ("train", "valid", "test"):
        (folder / f"ptb.{part}.txt").write_text(" the cat sat \n" * 80)


# a few samples in the standard files of each data set that is not made on the spot
SAMPLES = {
    "mnist": write_handwriting,
    "fashion-mnist": write_handwriting,
    "cifar10": write_ten,
    "cifar100": write_hundred,
    "imagenet32": lambda folder: write_small(folder, "npz"),
    "penn-treebank": write_treebank,
    "tiny-shakespeare": lambda folder: (folder / "input.txt").write_text("to be or not " * 90),
}
BUNDLED = [name for name, entry in CATALOGUE.items() if entry.bundled]
FILES = [name for name, entry in CATALOGUE.items() if not entry.bundled]


def require_sound(split):
    """Two parts of the same form, images or numbers with labels or values for each."""
    assert isinstance(split, Split)
    for x, y in split:
        assert len(x) == len(y) > 0
        assert tuple(x.shape[1:]) == split.shape
        assert x.dtype in (torch.float32, torch.uint8, torch.int64)
        assert y.dtype in (torch.float32, torch.int64)
        assert torch.isfinite(x).all()
        assert torch.isfinite(y).all()
        if y.dtype == torch.int64:
            assert 0 <= int(y.min()) <= int(y.max()) < split.classes
        else:
            assert y.shape[1] == split.classes


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) for pair, twin in pairs for a, b in zip(pair, twin, strict=True))


def check_bundled(name):
    """The stated counts; the same for the same seed, other for another, without torch's
    generator; one digest of what is loaded by default.
    """
    entry, before = CATALOGUE[name], torch.random.get_rng_state()
    split = load(name)
    require_sound(split)
    assert (len(split.train[0]), len(split.test[0])) == entry.counts
    assert same(split, load(name, seed=0))
    assert not same(split, load(name, seed=1))
    assert torch.equal(before, torch.random.get_rng_state())
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(entry.read).parameters.items()
    }
    assert {key: defaults[key] for key in entry.options} == entry.options
    assert len(data_digest(name)) == 32
    assert data_digest(name) == data_digest(name)
    with pytest.raises(ValueError, match="name must be a data set that is not bundled, got"):
        fetch(name)


def check_files(name, folder):
    """Read from small files of the standard form; the digest follows what is in them."""
    SAMPLES[name](folder)
    split = load(name, folder, verify=False)
    require_sound(split)
    assert same(split, load(name, folder, verify=False))
    if "length" in CATALOGUE[name].options:
        assert load_text(name, folder, verify=False).train.dtype == torch.int64
        assert torch.equal(split.train[0].flatten()[1:], split.train[1].flatten()[:-1])
    before = data_digest(name, folder)
    assert len(before) == 32
    assert data_digest(name, folder) == before
    path = min(folder.rglob("*"), key=lambda path: (path.is_dir(), path.name))
    path.write_bytes(path.read_bytes() + b"\n")
    assert data_digest(name, folder) != before


def check_entry(name):
    """It can be had, and every file that is fetched has a checksum."""
    entry = CATALOGUE[name]
    assert entry.sources or entry.manual
    assert entry.folders[0] == name
    for file in entry.forms[0] if entry.sources else ():
        kind, _, digest = file.digest.partition(":")
        assert len(digest) == {"sha256": 64, "md5": 32}[kind]


def check_offline(name, folder, monkeypatch):
    """Without the files the error says where they were looked for and what to do; without a
    network, which files to put where.
    """
    entry = CATALOGUE[name]
    monkeypatch.setenv("LAMBDAHAT_DATA", str(folder / "named"))
    monkeypatch.setattr("lambdahat.data.sources.cache", lambda: folder / "cache")
    with pytest.raises(FileNotFoundError) as absent:
        load(name)
    cure = f"lambdahat data fetch {name}" if entry.sources else entry.manual
    for part in (name, folder / "named", folder / "cache", "LAMBDAHAT_DATA", cure):
        assert str(part) in str(absent.value)
    assert data_digest(name) is None
    with pytest.raises(ConnectionError) as unreachable:
        fetch(name, mirror=NOBODY)
    for part in (name, NOBODY, entry.forms[0][0].name, folder / "named" / name):
        assert str(part) in str(unreachable.value)
    if not entry.sources:
        with pytest.raises(ValueError, match="name must be a data set with an open source"):
            fetch(name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_only_its_own_options_are_taken(name, tmp_path):
    with pytest.raises(ValueError, match=f"options must be among those of '{name}': .*, got speed"):
        load(name, tmp_path, speed=1)


@pytest.mark.parametrize("name", BUNDLED)
def test_what_comes_with_the_package(name):
    check_bundled(name)


@pytest.mark.parametrize("name", FILES)
def test_what_is_read_from_files(name, tmp_path, monkeypatch):
    check_entry(name)
    (tmp_path / "files").mkdir()
    check_files(name, tmp_path / "files")
    check_offline(name, tmp_path, monkeypatch)


def test_a_new_data_set_is_tested_by_being_registered(monkeypatch):
    monkeypatch.setattr("lambdahat.data.catalogue.CATALOGUE", registry := dict(CATALOGUE))

    def points(seed):
        x = torch.from_numpy(np.random.default_rng(seed).normal(size=(6, 2))).float()
        return Split((x[:4], x[:4]), (x[4:], x[4:]), 2)

    @register_dataset("points", "points of a plane", (4, 2), {"seed": 0})
    def seeded(seed=0):
        return points(seed)

    @register_dataset("fixed", "points that ignore the seed", (4, 2), {"seed": 0})
    def unseeded(seed=0):
        return points(0)

    for name in ("points", "fixed"):
        monkeypatch.setitem(CATALOGUE, name, registry[name])
    check_bundled("points")
    with pytest.raises(AssertionError):
        check_bundled("fixed")
    with pytest.raises(ValueError, match="name must not be taken, got 'digits'"):
        register_dataset("digits", "others", (1, 1))
