"""A loss that is not a model and a criterion: any function of named tensors and a batch."""

import torch

import lambdahat as lh

rng = torch.Generator().manual_seed(0)
t = torch.linspace(0, 4, 200, dtype=torch.float64)
seen = 2.0 * torch.exp(-0.7 * t) + 0.05 * torch.randn(200, generator=rng, dtype=torch.float64)


def decay(
    params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """The mean square error of a·exp(−k·t)."""
    times, values = batch
    return (params["a"] * torch.exp(-params["k"] * times) - values).square().mean()


start = {"a": torch.tensor(1.5, dtype=torch.float64), "k": torch.tensor(0.5, dtype=torch.float64)}
problem = lh.Problem.from_function(decay, start, (t, seen))
for _ in range(10):  # Newton's method, with the Hessian that the library gives
    step = torch.linalg.solve(lh.hessian(problem).dense(), problem.gradient())
    problem = problem.at(problem.vector - step)

a, k = problem.vector.tolist()
print(f"a = {a:.3f}, k = {k:.3f}, loss {problem.loss():.5f}")
H = lh.hessian(problem)
print(
    f"eigenvalues {', '.join(f'{value:.4f}' for value in lh.eigenpairs(H, k=2).values)}, trace"
    f" {lh.trace(H)}"
)
covariance = 2 * problem.loss() / len(t) * torch.linalg.inv(H.dense())
print(
    f"standard errors {', '.join(f'{float(error):.4f}' for error in covariance.diagonal().sqrt())}"
)
