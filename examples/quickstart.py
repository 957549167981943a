"""The curvature of a small network on handwritten digits, in five lines after training."""

import torch
from torch.nn.functional import cross_entropy

import lambdahat as lh

x, y = lh.data.digits()
model = lh.models.mlp([64, 32, 10])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
for _ in range(100):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()

problem = lh.Problem(model, "cross_entropy", (x, y))
H = lh.hessian(problem)
trace = lh.trace(H)  # exact: a ReLU network is piecewise linear in each weight
top = lh.eigenpairs(H, k=5)
spectrum = lh.spectrum(H, depth=40)

print(f"loss      {problem.loss():.4f} with {problem.num_parameters} parameters")
print(f"trace     {trace}")
print(f"top five  {', '.join(f'{value:.3f}' for value in top.values)}  ({top.cost} products)")
print(f"near zero {100 * float(spectrum.degeneracy()):.1f} % of the eigenvalues")
