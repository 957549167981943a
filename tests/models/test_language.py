"""Language models: the LSTM and the GPT."""

import pytest
import torch
from torch import nn

from lambdahat._core.rng import generator
from lambdahat.models import gpt, lstm
from lambdahat.models.language import LSTMLanguageModel
from tests.language import hugging_face


def test_the_unrolled_lstm_is_torchs():
    model = lstm(20, 6, 9).double()
    tokens = torch.randint(0, 20, (3, 7), generator=generator(0, "tokens"))
    plain, after = model.advance(tokens)
    model.fused = True
    fused, fused_after = model.advance(tokens)
    assert torch.allclose(plain, fused, atol=1e-12)
    for ours, theirs in zip(after, fused_after, strict=True):
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_a_text_in_stretches_gives_the_logits_of_the_whole(fused):
    model = lstm(20, 6, 9, fused=fused).double()
    tokens = torch.randint(0, 20, (2, 8), generator=generator(0, "tokens"))
    first, state = model.advance(tokens[:, :3])
    second, state = model.advance(tokens[:, 3:], state)
    assert torch.allclose(torch.cat([first, second], 1), model(tokens), atol=1e-12)
    assert not any(part.requires_grad for pair in state for part in pair)


def test_lstm_dropout_drops_the_same_units_at_every_position():
    model = LSTMLanguageModel(5, 400, 8, 1, dropout=0.5).train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = model._drop(torch.ones(2, 6, 400))
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(dropped[0], dropped[1])
    assert torch.equal(model.eval()._drop(torch.ones(2, 6, 400)), torch.ones(2, 6, 400))


def test_gpt_sees_the_past_only():
    model = gpt(20, 8, 16, 2, 2).double()
    tokens = torch.randint(0, 20, (1, 8), generator=generator(0, "tokens"))
    other = tokens.clone()
    other[0, 5] = (tokens[0, 5] + 1) % 20
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_fused_attention_is_ours():
    tokens = torch.randint(0, 20, (2, 8), generator=generator(0, "tokens"))
    models = [gpt(20, 8, 16, 2, 2, fused=fused).double() for fused in (False, True)]
    assert torch.allclose(models[0](tokens), models[1](tokens), atol=1e-12)


@pytest.mark.oracle
def test_gpt_with_their_weights_is_the_gpt2_of_transformers():
    transformers = hugging_face()
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    ours = gpt(20, 8, 16, 2, 2).double().eval()
    parts = {"wte": ours.tokens, "wpe": ours.positions, "ln_f": ours.norm}
    for i, block in enumerate(ours.blocks):
        layers = {
            "ln_1": block.norm,
            "attn.c_attn": block.attention.project,
            "attn.c_proj": block.attention.out,
            "ln_2": block.mlp[0],
            "mlp.c_fc": block.mlp[1],
            "mlp.c_proj": block.mlp[3],
        }
        parts |= {f"h.{i}.{key}": layer for key, layer in layers.items()}
    weights = theirs.transformer.state_dict()
    with torch.no_grad():
        for key, layer in parts.items():
            turned = isinstance(layer, nn.Linear)  # they keep (inputs, outputs)
            layer.weight.copy_(weights[f"{key}.weight"].T if turned else weights[f"{key}.weight"])
            if hasattr(layer, "bias"):
                layer.bias.copy_(weights[f"{key}.bias"])
    tokens = torch.randint(0, 20, (2, 8), generator=generator(0, "tokens"))
    assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-10)
