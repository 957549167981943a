"""Batch-norm in evaluation and in training mode: two functions of the same weights, and two
Hessians.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lambdahat as lh

torch.manual_seed(0)
x, y = lh.data.digits()
model = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(100):
    batch = torch.arange(128 * step, 128 * (step + 1)) % len(x)
    optimizer.zero_grad()
    cross_entropy(model(x[batch]), y[batch]).backward()
    optimizer.step()

evaluation = lh.Problem(model, "cross_entropy", (x, y)).refresh_statistics()
training = lh.Problem(model, "cross_entropy", (x, y), norm="train", batch_size=128)
for name, problem in (("eval", evaluation), ("train", training)):
    H = lh.hessian(problem)
    print(
        f"{name:5} loss {problem.loss():.4f}  trace {lh.trace(H, tol=0.1)}  largest"
        f" {lh.spectral_norm(H)}"
    )

try:
    lh.trace(lh.hessian(training), method="exact")
except ValueError as error:
    print(f"no exact trace in train mode: {str(error).split(': ')[-1]}")
