"""Where the curvature sits: traces layer by layer, and one layer's own spectrum."""

import torch
from torch.nn.functional import cross_entropy

import lambdahat as lh

x, y = lh.data.digits()
model = lh.models.mlp([64, 24, 16, 10], activation="tanh")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(60):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()

problem = lh.Problem(model, "cross_entropy", (x, y))
H = lh.hessian(problem)
for layer, trace in lh.trace_per_layer(H, tol=0.1).items():
    print(f"layer {layer}: trace {trace}")

last = H.restrict("4.*")  # differentiates by the last layer only, in which a tanh network is linear
print(
    f"last layer, exactly: trace {lh.trace(last, method='exact')}, largest eigenvalue"
    f" {lh.spectral_norm(last)}"
)
blocks = H.block_diagonal()
print(
    f"largest eigenvalue: {lh.spectral_norm(H)} with, {lh.spectral_norm(blocks)} without what lies"
    " between layers"
)
