"""Where data sets are found, and that only the published files pass."""

import pytest

from lambdahat.data import CATALOGUE, check, load
from lambdahat.data.catalogue import locate
from lambdahat.data.image_files import NAMES
from lambdahat.data.sources import cache
from tests.data.standard_files import published, write_handwriting


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The folder the user names and the cache, both empty, and a small MNIST as the published
    one.
    """
    write_handwriting(tmp_path / "original")
    entry = CATALOGUE["mnist"]
    monkeypatch.setitem(
        CATALOGUE, "mnist", published(entry, tmp_path / "original", (7, 5), entry.sources)
    )
    monkeypatch.setenv("LAMBDAHAT_DATA", str(tmp_path / "named"))
    monkeypatch.setattr("lambdahat.data.sources.cache", lambda: tmp_path / "cache")
    return tmp_path / "named", tmp_path / "cache"


def test_the_folder_the_user_names_wins(places):
    named, cached = places
    write_handwriting(cached / "mnist")
    assert check("mnist").folder == cached / "mnist"
    write_handwriting(named / "mnist", compressed=True)
    assert check("mnist").folder == named / "mnist"
    assert len(load("mnist").train[0]) == 7


def test_half_a_data_set_in_the_named_folder_is_an_error_even_with_a_whole_one_in_the_cache(places):
    named, cached = places
    write_handwriting(cached / "mnist")
    write_handwriting(named / "mnist")
    (named / "mnist" / NAMES[0]).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"must hold all files of mnist, got none of {NAMES[0]}; run"
    ):
        load("mnist")


def test_the_folders_of_torchvision_are_known(places):
    write_handwriting(places[0] / "MNIST" / "raw")
    assert locate("mnist").folder == places[0] / "MNIST" / "raw"
    assert len(load("mnist", places[0]).test[0]) == 5


def test_nothing_anywhere_says_where_it_was_looked_for(places):
    with pytest.raises(FileNotFoundError) as error:
        load("mnist")
    for part in (*map(str, places), "mnist or MNIST/raw", "LAMBDAHAT_DATA"):
        assert part in str(error.value)


def test_other_contents_pass_only_on_purpose(places):
    named, _ = places
    write_handwriting(named / "mnist", train=6)
    with pytest.raises(
        ValueError, match=r"must hold 5,504 bytes, got 4,720; fetch it again .* verify=False"
    ):
        load("mnist")
    assert len(load("mnist", verify=False).train[0]) == 6


def test_one_flipped_bit_is_noticed(places):
    named, _ = places
    write_handwriting(named / "mnist")
    path = named / "mnist" / NAMES[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte must have the sha256 checksum"):
        load("mnist")


def test_a_count_other_than_the_published_is_noticed_where_no_checksum_is_known(tmp_path):
    from tests.data.test_imagenet import write_small

    write_small(tmp_path, "npz")
    with pytest.raises(
        ValueError,
        match=r"must hold 1,281,167 \+ 50,000 samples, got 20 \+ 2; fetch the data again",
    ):
        load("imagenet32", tmp_path)


def test_files_without_a_published_checksum_are_named(tmp_path, places):
    from tests.data.test_imagenet import write_small

    write_small(tmp_path, "npz")
    found = check("imagenet32", tmp_path)
    assert len(found.unpublished) == len(found.form) == 11
    (tmp_path / "val_data.npz").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"val_data.npz must hold data, got an empty file; fetch it again"
    ):
        check("imagenet32", tmp_path)
    write_handwriting(places[0] / "mnist")
    assert check("mnist").unpublished == ()


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"folder must be a folder, got .*nowhere \(no such folder\)"
    ):
        load("mnist", tmp_path / "nowhere")


def test_the_cache_is_where_the_platform_keeps_data(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert cache() == tmp_path / "lambdahat" / "data"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache() == tmp_path / ".local" / "share" / "lambdahat" / "data"
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache() == tmp_path / "Library" / "Application Support" / "lambdahat" / "data"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache() == tmp_path / "local" / "lambdahat" / "data"
