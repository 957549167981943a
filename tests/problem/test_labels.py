"""What a model does with its labels: the causal shift, found on any data, and encoder-decoders,
which read them.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lambdahat as lh
from lambdahat._core.rng import generator
from tests.language import causal, padded, seeded, token_losses, translating, translations


def without_first(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with the first label left out of every sentence, as that of a prompt or of its
    first token.
    """
    return {**columns, "labels": columns["labels"].index_fill(1, torch.tensor([0]), -100)}


def left_padded(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The shorter sentences with their padding before them."""
    lengths = columns["attention_mask"].sum(1)
    short = [i for i, length in enumerate(lengths) if length < 7]
    return {
        name: torch.stack([rows[i].roll(7 - int(lengths[i])) for i in short])
        for name, rows in columns.items()
    }


@pytest.mark.parametrize("count", [None, "sequences"])
@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
@pytest.mark.parametrize("change", [without_first, left_padded])
def test_the_shift_is_found_where_no_sentence_has_a_first_label(change, loss, count):
    model, columns = causal(), change(padded())
    assert bool((columns["labels"][:, 0] == -100).all())
    losses = token_losses(model, columns, shift=True)
    kept = int(columns["labels"][:, 1:].ne(-100).sum())
    expected = losses.sum() / (len(losses) if count else kept)
    problem = lh.Problem(model, loss, columns, batch_size=2, count=count)
    assert problem.loss() == pytest.approx(float(expected.detach()), rel=1e-6)
    names = [name for name, _ in model.named_parameters() if "ln_f" in name]
    product = lh.hessian(problem.restrict("*ln_f*")) @ torch.ones(16, dtype=torch.float64)
    slopes = torch.autograd.grad(
        expected, [dict(model.named_parameters())[name] for name in names], create_graph=True
    )
    twice = torch.autograd.grad(
        sum(slope.sum() for slope in slopes), [dict(model.named_parameters())[n] for n in names]
    )
    assert torch.allclose(product, torch.cat(twice), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [None, "sequences"])
@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
def test_the_shift_is_that_of_the_model_on_any_data(loss, count):
    model, columns = causal(), padded()
    direct = lh.Problem(model, loss, columns, batch_size=2, count=count).loss()
    moved = lh.Problem(model, loss, without_first(columns), count=count).on(columns, batch_size=2)
    assert moved.loss() == pytest.approx(direct, rel=1e-12)


def test_the_shift_is_found_by_the_first_data_that_have_labels():
    model, columns = causal(), padded()
    pairs = lh.Problem(model, "cross_entropy", (columns["input_ids"], columns["input_ids"]))
    assert pairs.on(columns).loss() == pytest.approx(
        lh.Problem(model, "cross_entropy", columns).loss(), rel=1e-12
    )


class Reader(nn.Module):
    """Logits of each token alone, NaN for padding; its mean over no label is NaN, or 0."""

    def __init__(self, shift: bool, empty: float) -> None:
        super().__init__()
        self.embed, self.shift, self.empty = nn.Embedding(5, 3), shift, empty

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.embed(input_ids).masked_fill(attention_mask.unsqueeze(-1) == 0, math.nan)
        if labels is None:
            return {"logits": logits}
        z, y = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        total = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")
        return {
            "logits": logits,
            "loss": total / y.ne(-100).sum() if bool(y.ne(-100).any()) else self.empty + 0 * total,
        }


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("sure", [False, True])
@pytest.mark.parametrize("empty", [0.0, math.nan])
@pytest.mark.parametrize("shift", [False, True])
def test_neither_certainty_nor_padding_passes_for_the_shift(shift, empty, sure, padding):
    """A model that is sure of the first token has a loss of exactly 0 there; so has one that
    does not see its label.
    """
    model = seeded(lambda: Reader(shift, empty))
    if sure:
        with torch.no_grad():
            model.embed.weight[0] = torch.tensor([2000.0, 0.0, 0.0])
    rng = generator(0, "reader")
    ids = torch.randint(1, 5, (4, 6), generator=rng)
    ids[:, 0] = 0
    labels = torch.randint(0, 3, (4, 6), generator=rng)
    labels[:, 0], labels[:, 1] = 0, -100 if padding else 0
    mask = torch.ones_like(ids)
    if padding:
        mask[:, 0], labels[:, 0] = 0, -100
    z, y = (model.embed(ids)[:, :-1], labels[:, 1:]) if shift else (model.embed(ids), labels)
    expected = F.cross_entropy(z.movedim(-1, 1), y)
    columns = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    for loss in ("model", "cross_entropy"):
        problem = lh.Problem(model, loss, columns, batch_size=3)
        assert problem.loss() == pytest.approx(float(expected.detach()), rel=1e-12)
        assert problem._evaluate.shifts is shift


# Encoder-decoders, whose decoder reads the labels


def read_by_decoder(model: nn.Module, labels: Tensor) -> Tensor:
    """The labels moved by one to the right, padding (0) for −100, by hand."""
    start = labels.new_full((len(labels), 1), model.config.decoder_start_token_id)
    return torch.cat([start, labels[:, :-1].where(labels[:, :-1] != -100, 0)], dim=1)


@pytest.mark.parametrize("width", [7, 5])
@pytest.mark.parametrize("count", [None, "sequences"])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_both_losses_of_an_encoder_decoder_are_one_function(kind, count, width):
    """With labels as wide as the inputs, and narrower."""
    model, columns = translating(kind), translations(width)
    labels = columns["labels"]
    given = {**columns, "decoder_input_ids": read_by_decoder(model, labels)}
    losses = token_losses(model, given, shift=False)
    expected = losses.sum() / (6 if count else int(labels.ne(-100).sum()))
    leaves = list(model.parameters())
    slope = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(expected, leaves, materialize_grads=True)]
    )
    for loss in ("model", "cross_entropy"):
        for data in (columns, given):
            problem = lh.Problem(model, loss, data, batch_size=2, count=count)
            assert problem.loss() == pytest.approx(float(expected.detach()), rel=1e-7)
            error = float((problem.gradient() - slope).norm() / slope.norm())
            assert error < 1e-6  # layer norms of T5 are in float32


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_curvature_of_an_encoder_decoder(kind):
    """The Hessian by two backward passes, and (1/n) Σ_t J_tᵀ(diag p − ppᵀ)J_t, with the
    decoder's inputs by hand.
    """
    model, columns = translating(kind), translations(4, rows=3)
    name = {
        "t5": "decoder.final_layer_norm.weight",
        "bart": "model.decoder.layernorm_embedding.weight",
    }[kind]
    problem = lh.Problem(model, "cross_entropy", columns, batch_size=2, parameters=name)
    inputs = {**columns, "decoder_input_ids": read_by_decoder(model, columns["labels"])}
    labels = inputs.pop("labels")

    def logits(parameter: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.functional_call(model, {name: parameter}, (), inputs).logits[
                labels != -100
            ]

    point = dict(model.named_parameters())[name].detach()
    hessian = torch.autograd.functional.hessian(
        lambda w: F.cross_entropy(logits(w), labels[labels != -100]), point
    )
    jacobian, p = torch.autograd.functional.jacobian(logits, point), logits(point).softmax(-1)
    middle = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    gauss_newton = torch.einsum("tcp,tcd,tdq->pq", jacobian, middle, jacobian) / len(p)
    for found, truth in ((lh.hessian(problem), hessian), (lh.ggn(problem), gauss_newton)):
        assert float((found.dense() - truth).detach().norm() / truth.detach().norm()) < 1e-6


def test_an_encoder_decoder_that_takes_no_labels_needs_the_inputs_of_its_decoder():
    """It would make them of its inputs, without a word: another function."""

    class Bare(nn.Module):
        config = SimpleNamespace(is_encoder_decoder=True)

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 13)

        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
            return self.embed(input_ids if decoder_input_ids is None else decoder_input_ids)

    model, columns = (
        seeded(Bare),
        {name: rows for name, rows in translations(7).items() if name != "attention_mask"},
    )
    with pytest.raises(
        ValueError, match=r"data must hold 'decoder_input_ids' for an encoder-decoder.*add them"
    ):
        lh.Problem(model, "cross_entropy", columns)
    ids = columns["labels"].clamp(min=0).roll(1, 1)
    expected = F.cross_entropy(model(ids).movedim(-1, 1), columns["labels"])
    found = lh.Problem(model, "cross_entropy", {**columns, "decoder_input_ids": ids}).loss()
    assert found == pytest.approx(float(expected.detach()), rel=1e-12)


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"ignore_index": 3}])
def test_cross_entropy_with_options_takes_the_logits_of_language_models(options):
    model, loss = causal(), nn.CrossEntropyLoss(**options)
    columns = (
        padded() if "label_smoothing" in options else {k: v[:, :4] for k, v in padded().items()}
    )
    if "ignore_index" in options:
        columns["labels"] = columns["input_ids"]
    inputs = {name: value for name, value in columns.items() if name != "labels"}
    expected = loss(model(**inputs).logits[:, :-1].movedim(-1, 1), columns["labels"][:, 1:])
    problem = lh.Problem(model, loss, columns, batch_size=2)
    assert problem.loss() == pytest.approx(float(expected.detach()), rel=1e-12)
    slope = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
    assert torch.allclose(
        problem.gradient(), torch.cat([g.reshape(-1) for g in slope]), rtol=1e-9, atol=1e-12
    )


# Kernels, recomputation, precision
