"""Hugging Face models as they are: label masks, the causal shift, what n counts, kernels,
precision, parameter sets.
"""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lambdahat as lh
from lambdahat._core.rng import generator
from lambdahat.sampling import sgld
from tests.cases import LanguageModel, sentences
from tests.language import causal, hidden, masked, padded, seeded, token_losses
from tests.oracles import dense_hessian

CASES = {"causal": (causal, padded), "masked": (masked, hidden)}


def by_hand(kind: str, count: str | None) -> tuple[nn.Module, dict[str, Tensor], Tensor, int]:
    """Model, data, loss with its graph, and n."""
    make, data = CASES[kind]
    model, columns = make(), data()
    losses = token_losses(model, columns, kind == "causal")
    kept = int((columns["labels"][:, 1:] if kind == "causal" else columns["labels"]).ne(-100).sum())
    rows = len(columns["labels"])
    total = losses.sum()
    return (
        model,
        columns,
        total / (rows if count == "sequences" else kept),
        kept if count == "tokens" else rows,
    )


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("count", [None, "tokens", "sequences"])
@pytest.mark.parametrize("loss", ["model", "cross_entropy"])
@pytest.mark.parametrize("kind", CASES)
def test_the_loss_over_the_data_set(kind, loss, count, batch_size):
    """Batches have different numbers of labels that count, and some have none."""
    model, columns, expected, n = by_hand(kind, count)
    problem = lh.Problem(model, loss, columns, batch_size=batch_size, count=count)
    # transformers' own is in float32
    assert problem.loss() == pytest.approx(float(expected.detach()), rel=1e-6)
    assert (problem.num_terms, problem.num_samples) == (n, 6)
    grads = torch.autograd.grad(
        expected, list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    assert torch.allclose(problem.gradient(), flat, rtol=1e-5, atol=1e-6 * float(flat.abs().max()))


def test_the_log_likelihood_is_the_same_however_it_is_counted():
    model, columns = causal(), padded()
    found = [
        lh.Problem(model, "cross_entropy", columns, batch_size=2, count=unit)
        for unit in ("tokens", "sequences")
    ]
    assert found[0].num_terms * found[0].loss() == pytest.approx(
        found[1].num_terms * found[1].loss(), rel=1e-12
    )
    assert "tokens" in repr(found[0])


@pytest.mark.parametrize("count", ["tokens", "sequences"])
def test_curvature_on_padded_sentences_is_the_dense_one(count):
    model, columns, _, _ = by_hand("causal", None)
    problem = lh.Problem(
        model, "cross_entropy", columns, batch_size=2, count=count, parameters="*ln_f*"
    )
    rows, kept = 6, int(columns["labels"][:, 1:].ne(-100).sum())
    whole = lh.Problem(model, "cross_entropy", columns, parameters="*ln_f*")
    scale = kept / rows if count == "sequences" else 1.0
    expected = scale * dense_hessian(whole)
    assert torch.allclose(lh.hessian(problem).dense(), expected, rtol=1e-8, atol=1e-10)
    gauss_newton = scale * lh.ggn(whole).dense()
    assert torch.allclose(lh.ggn(problem).dense(), gauss_newton, rtol=1e-8, atol=1e-10)
    assert float(gauss_newton.norm()) > 0


@pytest.mark.parametrize("count", ["tokens", "sequences"])
def test_the_gauss_newton_matrix_is_that_of_the_tokens(count):
    """(1/n) Σ_t J_tᵀ(diag p − ppᵀ)J_t over the tokens that count, by hand."""
    model, columns = causal(), padded(3)
    problem = lh.Problem(
        model, "cross_entropy", columns, batch_size=2, count=count, parameters="*ln_f*"
    )
    names = list(problem.space.names)

    def logits(*parameters: Tensor) -> Tensor:
        named = dict(zip(names, parameters, strict=True))
        inputs = {name: value for name, value in columns.items() if name != "labels"}
        out = torch.func.functional_call(model, named, (), inputs).logits[:, :-1]
        return out[columns["labels"][:, 1:] != -100]

    points = tuple(dict(model.named_parameters())[name].detach() for name in names)
    parts = torch.autograd.functional.jacobian(logits, points)
    jacobian = torch.cat([part.flatten(2) for part in parts], dim=2)
    p = logits(*points).softmax(-1)
    middle = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    total = torch.einsum("tcp,tcd,tdq->pq", jacobian, middle, jacobian)
    assert torch.allclose(lh.ggn(problem).dense(), total / problem.num_terms, rtol=1e-9, atol=1e-12)


def test_a_model_that_does_not_move_its_labels_is_left_as_it_is():
    model, data = seeded(LanguageModel), sentences()
    problem = lh.Problem(model, "cross_entropy", data, batch_size=2)
    assert problem.loss() == pytest.approx(float(model(**data).loss.detach()), rel=1e-12)


def test_a_head_that_knows_nothing_moves_its_labels_all_the_same():
    """All losses are ln V at a head of zeros: which labels count cannot be read off their mean."""
    model = causal(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    problem = lh.Problem(model, "model", padded(), batch_size=1)
    weights = padded()["labels"][:, 1:].ne(-100).sum(1).double()
    assert problem.loss() == pytest.approx(math.log(13), rel=1e-6)
    assert torch.allclose(torch.tensor(problem.weights).double(), weights / weights.sum())


def test_the_learning_coefficient_counts_in_the_unit_asked_for():
    model, columns = causal(), padded()
    found = {}
    for unit in ("tokens", "sequences"):
        problem = lh.Problem(model, "cross_entropy", columns, count=unit, parameters="*ln_f*")
        kernel = sgld(1e-4, problem.num_terms / math.log(problem.num_terms))
        found[unit] = lh.llc(problem, chains=2, draws=8, burn_in=0, kernel=kernel)
        whole = problem.num_terms * problem.loss() + math.log(problem.num_terms) * found[unit].value
        assert found[unit].wbic is not None
        assert float(found[unit].wbic) == pytest.approx(whole, rel=1e-9)
    assert found["tokens"].nbeta != found["sequences"].nbeta


def test_chains_draw_sentences_where_the_loss_is_counted_in_them():
    """Counted in tokens, sentences have uneven weights: then a batch is one of the problem's
    own.
    """
    model, columns = causal(), padded()
    by_sentence = lh.Problem(
        model, "cross_entropy", columns, count="sequences", parameters="*ln_f*", batch_size=2
    )
    kernel = sgld(1e-4, 1.0)
    assert lh.sample(by_sentence, kernel, chains=2, draws=2, batch_size=3).batch_size == 3
    by_token = lh.Problem(
        model, "cross_entropy", columns, count="tokens", parameters="*ln_f*", batch_size=2
    )
    with pytest.raises(ValueError, match="left out where batches cannot be drawn sample by sample"):
        lh.sample(by_token, kernel, chains=2, draws=2, batch_size=3)


def test_sentences_of_any_length_have_a_variance_where_they_are_the_samples():
    """(1/n) Σ_i ‖g_i‖² − ‖ḡ‖², per parameter, of the gradients of single sentences."""
    model, columns = causal(), padded()
    problem = lh.Problem(model, "cross_entropy", columns, count="sequences", parameters="*ln_f*")
    singles = [problem.subset([i]).gradient() for i in range(6)]
    spread = torch.stack(singles).var(dim=0, unbiased=False).mean()
    covariance = lh.gradient_covariance(problem)
    assert float(covariance.dense().trace()) / problem.num_parameters == pytest.approx(
        float(spread), rel=1e-8
    )
    assert lh.variance(problem) is not None


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, d: lh.Problem(m, "model", d, count="words"),
            ValueError,
            "count must be one of 'tokens'",
        ),
        (
            lambda m, d: lh.Problem(
                nn.Linear(2, 1), "mse", (torch.ones(3, 2), torch.ones(3, 1)), count="tokens"
            ),
            ValueError,
            "count must be left out for a loss that is not cross-entropy",
        ),
        (
            lambda m, d: lh.Problem(
                m, "model", {**d, "labels": torch.full_like(d["labels"], -100)}
            ),
            ValueError,
            "data must hold at least one target that counts",
        ),
    ],
)
def test_misuse(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(seeded(LanguageModel), sentences())


# What a model does with its labels


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_fused_attention_gives_the_products_of_plain_attention(mode):
    fused, plain = (causal(attn_implementation=kind) for kind in ("sdpa", "eager"))
    v = torch.randn(
        sum(p.numel() for p in fused.parameters()), generator=generator(0, "v"), dtype=torch.float64
    )
    products = [
        lh.hessian(lh.Problem(m, "cross_entropy", padded()), mode=mode) @ v for m in (fused, plain)
    ]
    assert torch.allclose(products[0], products[1], rtol=1e-9, atol=1e-11)


class Once(torch.autograd.Function):
    """A kernel such as flash attention, with a first derivative only: x ↦ x·tanh(x)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.tanh() + x * (1 - x.tanh().square()))


class Fused(nn.Module):
    def __init__(self, kernel) -> None:
        super().__init__()
        self.first, self.kernel, self.last = nn.Linear(4, 5), kernel, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.kernel(self.first(x)))


def test_a_kernel_without_second_derivative_is_found_out_and_differenced():
    x, y = torch.randn(9, 4, generator=generator(0, "x"), dtype=torch.float64), torch.arange(9) % 3
    plain = seeded(lambda: Fused(lambda x: x * x.tanh()))
    once = seeded(lambda: Fused(Once.apply))
    v = torch.ones(43, dtype=torch.float64)
    expected = lh.hessian(lh.Problem(plain, "cross_entropy", (x, y))) @ v
    H = lh.hessian(lh.Problem(once, "cross_entropy", (x, y)))
    with pytest.warns(UserWarning, match="finite differences"):
        found = H @ v
    assert H.mode == "finite"
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


class Checkpointed(nn.Module):
    """A network that recomputes its middle in the backward pass."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(4, 5), nn.Linear(5, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            return self.first(x).tanh()

        x = body(x) if self.reentrant is None else checkpoint(body, x, use_reentrant=self.reentrant)
        return self.last(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["reverse", "forward", "finite"])
def test_activation_checkpointing_leaves_the_numbers_alone(mode, reentrant):
    """Also at parameters that the modules do not hold, where recomputing would see the wrong
    ones.
    """
    x, y = torch.randn(9, 4, generator=generator(0, "x"), dtype=torch.float64), torch.arange(9) % 3
    plain, recomputed = (
        lh.Problem(seeded(partial(Checkpointed, kind)), "cross_entropy", (x, y))
        for kind in (None, reentrant)
    )
    theta = plain.vector + 0.3
    assert torch.allclose(recomputed.gradient(theta), plain.gradient(theta), rtol=1e-12)
    v = torch.ones_like(theta)
    products = [lh.hessian(problem.at(theta), mode=mode) @ v for problem in (plain, recomputed)]
    assert torch.allclose(products[0], products[1], rtol=1e-10, atol=1e-12)
    chains = [lh.sample(problem, sgld(1e-2, 5.0), 2, 5).losses for problem in (plain, recomputed)]
    assert np.allclose(*chains, rtol=1e-10)


def test_checkpointing_outside_is_as_it_was():
    model = Checkpointed(False)
    x = torch.ones(2, 4)
    lh.Problem(model, "cross_entropy", (x, torch.tensor([0, 1])))
    model(x).sum().backward()
    assert model.first.weight.grad is not None


def test_gradient_checkpointing_of_transformers():
    model, recomputed = causal(), causal()
    recomputed.gradient_checkpointing_enable()
    recomputed.train()
    v = torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    products = [
        lh.hessian(lh.Problem(m, "cross_entropy", padded())) @ v for m in (model, recomputed)
    ]
    assert torch.allclose(products[0], products[1], rtol=1e-10, atol=1e-12)


def test_half_precision_weights_accumulate_in_single():
    model, columns = causal(), padded(12)
    rough = causal().bfloat16()
    exact = lh.Problem(rough.double(), "cross_entropy", columns, batch_size=1)  # the same weights
    problem = lh.Problem(causal().bfloat16(), "cross_entropy", columns, batch_size=1)
    assert problem.loss() == pytest.approx(exact.loss(), rel=5e-3)
    H = lh.hessian(problem)
    assert H.dtype == torch.float32
    v = torch.randn(H.dim, generator=generator(0, "v"))
    product, truth = H @ v, lh.hessian(exact) @ v.double()
    assert float((product.double() - truth).norm() / truth.norm()) < 0.05
    assert model.dtype == torch.float64


def test_chains_of_half_precision_weights_move_in_single():
    """A step of 1e-4 is below the rounding of bfloat16 weights of 1: positions in bfloat16 would
    stand still.
    """
    model = nn.Linear(3, 2).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    data = (torch.randn(8, 3, generator=generator(0, "x")).bfloat16(), torch.arange(8) % 2)
    chains = lh.sample(
        lh.Problem(model, "cross_entropy", data), sgld(1e-8, 1.0), chains=2, draws=50
    )
    assert np.allclose(chains.distances[:, -1], math.sqrt(8 * 49 * 1e-8), rtol=0.6)


# Which parameters


def test_tied_embeddings_are_counted_once():
    tied, apart = causal(), causal(tie_word_embeddings=False)
    sizes = [lh.Problem(model, "cross_entropy", padded()).num_parameters for model in (tied, apart)]
    assert sizes[1] - sizes[0] == 13 * 8
    assert sizes[0] == sum(p.numel() for p in tied.parameters())
    by_alias = lh.Problem(tied, "cross_entropy", padded(), parameters="lm_head.weight")
    assert by_alias.space.names == ("transformer.wte.weight",)


class LowRank(nn.Module):
    """A linear layer W + BA with W fixed, as PEFT names it."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        inputs, outputs = base.weight.shape  # transformers' Conv1D
        self.lora_A = nn.Parameter(0.1 * torch.randn(inputs, rank, dtype=torch.float64))
        self.lora_B = nn.Parameter(0.1 * torch.randn(rank, outputs, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A @ self.lora_B


def test_low_rank_and_layer_sets_of_parameters():
    model = causal()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for block in model.transformer.h:
            block.attn.c_attn = LowRank(block.attn.c_attn)
    adapters = lh.Problem(model, "cross_entropy", padded(), parameters="*lora_*")
    assert adapters.num_parameters == 2 * 2 * (8 + 24)
    v = torch.ones(adapters.num_parameters, dtype=torch.float64)
    whole = lh.Problem(model, "cross_entropy", padded())
    where = whole.space.indices(adapters.space.names)
    assert torch.allclose(
        lh.hessian(adapters) @ v, lh.hessian(whole).restrict(where) @ v, rtol=1e-9, atol=1e-11
    )
    layer = lh.Problem(model, "cross_entropy", padded(), parameters="transformer.h.1.*")
    assert all(name.startswith("transformer.h.1.") for name in layer.space.names)
