"""Dict batches and an output object with logits, as language models of the transformers library
have them.
"""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import lambdahat as lh


class Tagger(nn.Module):
    """A small transformer that gives each of the tokens one of four tags."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        hidden = self.block(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        return SimpleNamespace(logits=self.head(hidden))


torch.manual_seed(0)
tokens = torch.randint(1, 20, (64, 6))
mask = (torch.arange(6) < torch.randint(3, 7, (64, 1))).long()
labels = torch.where(mask == 1, tokens % 4, -100)  # what is padding does not count
batches = {"input_ids": tokens, "attention_mask": mask, "labels": labels}

problem = lh.Problem(Tagger(), "cross_entropy", batches, batch_size=16)
G = lh.ggn(problem)
print(f"{problem}: loss {problem.loss():.3f}")
print(f"trace of the GGN {lh.trace(G, tol=0.05)}")
print(f"of the head alone {lh.trace(lh.hessian(problem).restrict('head.*'), tol=0.05)}")
