"""Vector–Jacobian products against dense Jacobians, and what they leave behind."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from lambdahat._core.device import Pullback, pull_back

A, B = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def graph():
    """z = (sin(Ax), (Bx)²) at a point x."""
    x = torch.linspace(-1, 1, 3, dtype=torch.float64, requires_grad=True)
    return x, ((A @ x).sin(), (B @ x).square())


def expected(x, u, v):
    point = x.detach()
    return A.T @ ((A @ point).cos() * u) + B.T @ (2 * (B @ point) * v)


def test_it_is_the_transposed_jacobian_again_and_again(graph):
    x, outputs = graph
    pull, rows = Pullback(outputs), torch.randn(3, 2, 4, dtype=torch.float64)
    for u, v in rows:
        (found,) = pull([x], (u, v), retain_graph=True)
        torch.testing.assert_close(found, expected(x, u, v))
    with torch.no_grad():
        (found,) = pull_back(outputs, [x], (u, v), retain_graph=True)
    torch.testing.assert_close(found, expected(x, u, v))


def test_a_block_within_vmap_and_edges(graph):
    x, outputs = graph
    pull, rows = Pullback(outputs), torch.randn(2, 5, 4, dtype=torch.float64)
    found = torch.vmap(lambda u, v: pull([x], (u, v), retain_graph=True)[0])(*rows)
    each = torch.stack([expected(x, u, v) for u, v in zip(*rows, strict=True)])
    torch.testing.assert_close(found, each)
    edges = [get_gradient_edge(z) for z in outputs]
    (found,) = pull_back(edges, [x], list(rows[:, 0]))
    torch.testing.assert_close(found, each[0])


def test_it_can_be_differentiated_in_the_vectors_and_the_inputs(graph):
    x, outputs = graph
    u, v = (torch.full((4,), c, dtype=torch.float64, requires_grad=True) for c in (0.5, -2.0))
    (slope,) = pull_back(outputs, [x], (u, v), create_graph=True)
    of_x, of_u = torch.autograd.grad(slope.sum(), (x, u))
    point, ones = x.detach(), torch.ones(3, dtype=torch.float64)
    hessian = A.T @ torch.diag(-(A @ point).sin() * 0.5) @ A + 2 * B.T @ torch.diag(v) @ B
    torch.testing.assert_close(of_x, hessian.detach() @ ones)
    torch.testing.assert_close(of_u, (A @ point).cos() * (A @ ones))


def test_neither_outputs_nor_vectors_are_held(graph):
    x, _ = graph
    output, u = (A @ x).sum(dim=0, keepdim=True), torch.ones(1, dtype=torch.float64)
    pull, held = Pullback([output]), [weakref.ref(output), weakref.ref(u)]
    pull([x], [u], retain_graph=True)
    del output, u
    gc.collect()
    assert [reference() for reference in held] == [None, None]


SCRIPT = """
import sys
import torch
import lambdahat as lh
model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
problem = lh.Problem(model, "cross_entropy", (torch.randn(8, 5), torch.randint(0, 3, (8,))))
for operator in (lh.hessian(problem), lh.ggn(problem)):
    operator @ torch.ones(operator.dim)
    operator @ torch.ones(operator.dim, 2)
    lh.trace(operator), lh.diagonal(operator), lh.eigenpairs(operator, k=2)
    lh.spectrum(operator, depth=5)
lh.kfac(problem) @ torch.ones(problem.num_parameters)
print("sympy" in sys.modules)
"""


def test_torch_does_not_import_sympy_for_our_products():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["False"], done.stderr
