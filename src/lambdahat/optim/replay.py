"""Work on a GPU recorded in CUDA graphs: many small launches as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Replay:
    """Runs functions of no arguments that read and write fixed tensors, by key: first as they are, later as a graph.

    A function's first run warms up, its second is recorded; both do their work once. Where CUDA cannot record it, or
    records already, it runs as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def __call__(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run ``function``, or replay what it did before under ``key``."""
        if not self._on or torch.cuda.is_current_stream_capturing():
            function()
        elif key not in self._graphs:
            function()
            self._graphs[key] = None
        else:
            graph = self._graphs[key] or self._recorded(function)
            if graph is None:
                function()
            else:
                self._graphs[key] = graph
                graph.replay()

    def _recorded(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                function()
        except RuntimeError:  # an operation that cannot be recorded: nothing has been computed
            self._on = False
            torch.cuda.synchronize()
            return None
        return graph
