"""The learning coefficient of a classifier, of its layers, and at another temperature."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lambdahat as lh

torch.manual_seed(0)
x, y = lh.data.digits()
images = x.reshape(-1, 1, 8, 8)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(72, 10),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for step in range(150):
    rows = torch.arange(256 * step, 256 * (step + 1)) % len(images)
    optimizer.zero_grad()
    cross_entropy(model(images[rows]), y[rows]).backward()
    optimizer.step()

problem = lh.Problem(model, "cross_entropy", (images, y)).refresh_statistics()
found = lh.llc(problem, batch_size=512, max_gradients=2400)
print(f"loss {problem.loss():.4f} with {problem.num_parameters} parameters")
print(f"learning coefficient {found.value:.1f} ± {found.stderr:.1f}, {found.status.name}")
print(
    f"at nβ = {found.nbeta:.0f} ({found.temperature}), γ = {found.localization:.3g}, by"
    f" {found.chains.kernel}"
)

same = {"localization": found.localization, "batch_size": 512, "max_gradients": 2400}
head = lh.llc(problem.restrict("5.*"), **same)
hot = lh.llc(problem, nbeta="batch", **same)
print(f"last layer alone     {head.value:.1f} ± {head.stderr:.1f}, {head.status.name}")
print(f"at nβ = {hot.nbeta:.0f} (batch)  {hot.value:.1f} ± {hot.stderr:.1f}, {hot.status.name}")
