"""The learning coefficient along training, at one temperature and one localization for all
checkpoints.
"""

import torch
from torch.nn.functional import cross_entropy

import lambdahat as lh

train, _ = lh.data.digits_split(seed=0)
model = lh.models.mlp([64, 16, 10])
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
checkpoints = {}
for step in range(401):
    if step in (100, 200, 400):
        checkpoints[step] = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad()
    cross_entropy(model(train[0]), train[1]).backward()
    optimizer.step()

problem = lh.Problem(model, "cross_entropy", train)
path = lh.singular.llc_along(problem, checkpoints, max_gradients=4000)
for step, found in zip(path.labels, path.results, strict=True):
    print(
        f"step {step:3.0f}  loss {found.initial_loss:.4f}  coefficient {found.value:.1f} ±"
        f" {found.stderr:.1f}  {found.status.name}, {found.cost} gradients"
    )
