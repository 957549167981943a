"""Two networks: the loss between them, and which sharpness survives a change of scale."""

import torch
from torch.nn.functional import cross_entropy

import lambdahat as lh

x, y = lh.data.digits()


def train(seed: int, rate: float) -> torch.nn.Sequential:
    model = lh.models.mlp([64, 16, 10], seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(150):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


first, second = (
    lh.Problem(train(seed, rate), "cross_entropy", (x, y)) for seed, rate in ((0, 0.5), (1, 0.05))
)
line = lh.landscape(first, lh.towards(first, second), distance=(0, 1), points=11)
print(f"loss on the line: {', '.join(f'{float(value):.2f}' for value in line.loss)}")

weights = {name: tensor.clone() for name, tensor in first.named(first.vector).items()}
for name, factor in (("0.weight", 3.0), ("0.bias", 3.0), ("2.weight", 1 / 3)):
    weights[name] *= factor  # the same function: ReLU passes the factor on
rescaled = first.at(weights)
for name, problem in (("first", first), ("second", second), ("first, rescaled", rescaled)):
    trace, relative = (
        lh.trace(lh.hessian(problem)),
        lh.relative_sharpness(problem).layers["0.weight"],
    )
    print(
        f"{name:16} loss {problem.loss():.4f}  trace {trace.value:9.3f}  relative"
        f" {relative.value:.3f}"
    )
