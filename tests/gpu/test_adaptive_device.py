"""Adaptive optimisers on a GPU: no step waits for the device, and a captured step is the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lambdahat.optim import SWA, Gadam, GadamX, Lookahead, Padam, PadamW
from tests.gpu.waiting import no_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MAKERS = {
    "padam": lambda p: Padam(p, weight_decay=0.1),
    "padamw": lambda p: PadamW(p, form="printed"),
    "gadam": lambda p: Gadam(p, average_start=3),
    "gadamx": lambda p: GadamX(p, average_start=3, average_every=2),
    "swa": lambda p: SWA(p, average_start=3),
    "lookahead": lambda p: Lookahead(Gadam(p, average_start=8), k=2, centralize=True),
}


def weights() -> list[torch.nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=rng).cuda())
        for shape in ((5, 4), (4,), (3, 2, 2))
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).cuda()
    return params


@pytest.mark.parametrize("name", MAKERS)
def test_no_step_waits_for_the_device(name: str) -> None:
    params = weights()
    optimizer: Any = MAKERS[name](params)
    with no_waiting():
        for _ in range(12):
            optimizer.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("form", ["adamw", "coded", "printed"])
def test_a_captured_step_is_the_step(form: str) -> None:
    ours, theirs = weights(), weights()
    optimizer = PadamW(ours, lr=0.01, form=form, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(4):
        graph.replay()
    eager = PadamW(theirs, lr=0.01, form=form)
    for _ in range(7):
        eager.step()
    torch.testing.assert_close(
        [p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-5, atol=1e-6
    )


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capturing_needs_to_be_asked_for() -> None:
    optimizer = Gadam(weights())
    optimizer.step()
    with (
        pytest.raises(ValueError, match="capturable must be True"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
