"""Penn Treebank and Tiny Shakespeare."""

import gzip

import pytest
import torch

from lambdahat.data import Text, load, load_text, streams
from lambdahat.data.splits import windows

TRAIN = " the cat sat \n the cat <unk> \n the dog sat \n"


@pytest.fixture
def treebank(tmp_path):
    for part, text in (
        ("train", TRAIN),
        ("valid", " the dog ran \n"),
        ("test", " the bird sat \n"),
    ):
        (tmp_path / f"ptb.{part}.txt").write_text(text)
    return tmp_path


def test_words_are_numbered_by_frequency_and_lines_are_closed(treebank):
    text = load_text("penn-treebank", treebank, verify=False)
    assert text.vocabulary == ("<eos>", "the", "cat", "sat", "<unk>", "dog")
    assert text.decode(text.train, " ") == TRAIN.replace("\n", "<eos>").replace("  ", " ").strip()
    assert text.decode(text.test, " ") == "the <unk> sat <eos>"
    assert text.decode(text.valid, " ") == "the dog <unk> <eos>"


def test_a_new_word_without_a_place_for_it_is_refused(treebank):
    (treebank / "ptb.train.txt").write_text("the cat sat\n")
    with pytest.raises(
        ValueError, match="use only words of its training part, or have <unk> there, got 'dog'"
    ):
        load_text("penn-treebank", treebank, verify=False)


@pytest.mark.parametrize("compressed", [False, True])
def test_shakespeare_by_characters(tmp_path, compressed):
    data = b"ba" * 50 + b"c"
    (tmp_path / ("input.txt.gz" if compressed else "input.txt")).write_bytes(
        gzip.compress(data) if compressed else data
    )
    text = load_text("tiny-shakespeare", tmp_path, verify=False)
    assert text.vocabulary == ("a", "b", "c")
    assert (len(text.train), len(text.test)) == (90, 11)
    split = load("tiny-shakespeare", tmp_path, verify=False, length=10)
    assert split.classes == 3
    assert split.shape == (10,)
    assert tuple(split.train[0].shape) == (8, 10)


def test_targets_are_the_inputs_one_token_later():
    x, y = windows(torch.arange(10), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert torch.equal(y, x + 1)


def test_streams_continue_from_column_to_column():
    assert streams(torch.arange(11), 2).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: windows(torch.arange(4), 4), r"length must be an integer in \[1, 3\], got 4"),
        (lambda: streams(torch.arange(4), 5), r"batch_size must be an integer in \[1, 4\], got 5"),
        (
            lambda: load_text("mnist"),
            "name must be one of 'penn-treebank', 'tiny-shakespeare', got 'mnist'",
        ),
        (lambda: Text(torch.arange(3), torch.arange(3), ("a",)).split(0), "length must be"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("data", "message"), [(b"\xff\xfe\x00", "must be a text in UTF-8"), (b"", "must hold a text")]
)
def test_what_is_no_text_is_refused(tmp_path, data, message):
    (tmp_path / "input.txt").write_bytes(data)
    with pytest.raises(ValueError, match=f"input.txt {message}"):
        load_text("tiny-shakespeare", tmp_path, verify=False)
