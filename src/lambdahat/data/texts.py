"""Penn Treebank by words and Tiny Shakespeare by characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lambdahat._core.check import require, require_count
from lambdahat.data.sources import CURE, File, contents
from lambdahat.data.splits import Pair, Split

END, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenised text: ``train``, ``test`` and, if there is one, ``valid``, (n,) int64, with its
    vocabulary.
    """

    train: Tensor
    test: Tensor
    vocabulary: tuple[str, ...]
    valid: Tensor | None = None

    def split(self, length: int = 64) -> Split:
        """Disjoint stretches of ``length`` tokens: inputs (n, length), targets one token later."""
        return Split(windows(self.train, length), windows(self.test, length), len(self.vocabulary))

    def decode(self, tokens: Iterable[int], between: str = "") -> str:
        """The text of some tokens."""
        return between.join(self.vocabulary[int(token)] for token in tokens)


def windows(tokens: Tensor, length: int) -> Pair:
    """Inputs (n, length) and targets one token later; an incomplete last stretch is dropped."""
    most = len(tokens) - 1
    count = most // require_count(length, "length", most=most)
    return tokens[: count * length].view(count, length), tokens[1 : count * length + 1].view(
        count, length
    )


def streams(tokens: Tensor, batch_size: int) -> Tensor:
    """Split a text into ``batch_size`` equal rows, (batch_size, n), which a recurrent network reads
    in parallel.
    """
    require_count(batch_size, "batch_size", most=len(tokens))
    width = len(tokens) // batch_size
    return tokens[: batch_size * width].view(batch_size, width)


def penn_treebank_files(folder: Path) -> Text:
    """``ptb.train.txt``, ``ptb.valid.txt`` and ``ptb.test.txt``: words, each line closed by <eos>.

    Words are numbered from the most frequent on, ties in alphabetical order.
    """
    parts = [_words(folder, f"ptb.{part}.txt") for part in ("train", "valid", "test")]
    counts = Counter(parts[0])
    vocabulary = tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    train, valid, test = (_numbers(part, vocabulary) for part in parts)
    return Text(train, test, vocabulary, valid)


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
    if strange is not None:
        raise ValueError(
            "the text must use only words of its training part, or have <unk> there, got"
            f" {strange!r}"
        )
    return torch.tensor([index.get(word, unknown) for word in words], dtype=torch.int64)
