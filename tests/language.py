"""Small language models of transformers with random weights, and columns of tokens for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lambdahat._core.rng import generator
from lambdahat.bench.chain_rows import import_transformers

WORDS, LENGTH = 13, 7


def hugging_face() -> Any:
    """The transformers package, or a skip."""
    pytest.importorskip("transformers")
    return import_transformers()


def causal(**options: Any) -> nn.Module:
    """A GPT-2 of two layers, tied embeddings, float64, in eval mode."""
    found = hugging_face()
    config = found.GPT2Config(
        vocab_size=WORDS,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        **options,
    )
    return seeded(lambda: found.GPT2LMHeadModel(config))


def masked(**options: Any) -> nn.Module:
    """A BERT of two layers with a masked-language head, float64, in eval mode."""
    found = hugging_face()
    config = found.BertConfig(
        vocab_size=WORDS,
        max_position_embeddings=8,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        **options,
    )
    return seeded(lambda: found.BertForMaskedLM(config))


def translating(kind: str) -> nn.Module:
    """A T5 or BART of one layer each way, float64, in eval mode; the decoder starts with 0 or 2,
    padding is 0.
    """
    found = hugging_face()
    if kind == "t5":
        config = found.T5Config(
            vocab_size=WORDS,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        return seeded(lambda: found.T5ForConditionalGeneration(config))
    width = {
        f"{part}_{size}": n
        for part in ("encoder", "decoder")
        for size, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 8))
    }
    config = found.BartConfig(
        vocab_size=WORDS,
        d_model=8,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        init_std=0.5,
        **width,
    )
    return seeded(lambda: found.BartForConditionalGeneration(config))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The model, the same at every call, float64, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


def padded(rows: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Sentences of 2 … LENGTH tokens, padded on the right; labels of the padding are −100."""
    rng = generator(seed, "padded")
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=rng)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=rng)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def hidden(rows: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """The same for a masked model: a third of the labels kept, none in the last two rows."""
    columns = padded(rows, seed)
    keep = torch.rand(rows, LENGTH, generator=generator(seed, "hidden")) < 0.3
    keep[-2:], keep[0, 0] = False, True
    return {**columns, "labels": columns["labels"].where(keep, torch.tensor(-100))}


def translations(width: int, rows: int = 6) -> dict[str, Tensor]:
    """Padded sentences with labels (rows, width) of other sentences, each ending in −100s but
    the first.
    """
    rng = generator(width, "translations")
    labels = torch.randint(3, WORDS, (rows, width), generator=rng)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=rng)
    lengths[0] = width
    return {**padded(rows), "labels": labels.masked_fill(torch.arange(width) >= lengths, -100)}


def token_losses(model: nn.Module, columns: dict[str, Tensor], shift: bool) -> Tensor:
    """The loss of every label, (B, T'), 0 where it does not count: by hand, in float64."""
    inputs = {name: value for name, value in columns.items() if name != "labels"}
    logits, labels = model(**inputs).logits, columns["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
