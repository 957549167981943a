"""All chains on a GPU, a whole step captured in one CUDA graph: small networks are bound by
launches otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lambdahat._core.device import beside, side_stream
from lambdahat.operators.linearise import repeated
from lambdahat.sampling.gradients import OneByOne, Together
from lambdahat.sampling.kernels import Kernel
from lambdahat.sampling.runners import Ground, Record, Runner

ROOM = 512


class GraphRunner(Runner):
    """A runner whose steps are replays of one captured step; the traces are written on the
    device.
    """

    def __init__(
        self, ground: Ground, kernel: Kernel, chains: Sequence[int], gradients: Together | OneByOne
    ) -> None:
        super().__init__(ground, kernel, chains, gradients)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._room = max(ROOM, self.plan.thin)
        shape = (len(self.traces), len(self.chains), self._room)
        self._traces = torch.zeros(shape, dtype=torch.float64, device=self.problem.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self.problem.device)
        self._capture()

    def retune(self, kernel: Kernel) -> None:
        super().retune(kernel)
        self._capture()

    def restart(self, chains: Sequence[int] | None = None) -> None:
        super().restart(chains)
        self._capture()

    def resize(self, batch_size: int, accumulate: int) -> None:
        super().resize(batch_size, accumulate)
        self._capture()

    def skip(self, steps: int) -> None:
        assert self._graph is not None
        for start in range(0, steps, self._room):
            self._place.zero_()
            for _ in range(min(self._room, steps - start)):
                self._graph.replay()
        self._count(steps)

    def advance(self, draws: int, look: bool = True) -> Record:
        parts = []
        while draws > 0:
            now = min(draws, self._room // self.plan.thin)
            parts.append(self._replayed(now))
            draws -= now
        names = parts[0].keys()
        return {name: torch.cat([part[name] for part in parts], dim=1) for name in names}

    def _replayed(self, draws: int) -> Record:
        assert self._graph is not None
        self._place.zero_()
        for _ in range(draws * self.plan.thin):
            self._graph.replay()
        self._count(draws * self.plan.thin)
        last = slice(self.plan.thin - 1, draws * self.plan.thin, self.plan.thin)
        return dict(zip(self.traces, self._traces[:, :, last].cpu(), strict=True))

    def _count(self, steps: int) -> None:
        self.gradients_spent += steps
        self.state.steps += steps

    def _recorded_step(self) -> None:
        values = torch.stack([value.double() for value in self._step()])
        self._traces.index_copy_(2, self._place, values.unsqueeze(2))
        self._place.add_(1)

    def _capture(self) -> None:
        with repeated():
            self._captured()

    def _captured(self) -> None:
        """Record one step; the steps that warm up and record leave no mark on state, traces or
        random numbers.
        """
        before = [tensor.clone() for tensor in self._tensors()]
        streams = self.rng.generators + ([] if self.source is None else self.source.generators)
        marks = [stream.get_state() for stream in streams]
        spent, steps = self.gradients_spent, self.state.steps
        self._place.zero_()
        self._graph = None  # and its memory, before the next takes as much
        side = side_stream(self.problem.device)
        with beside(self.problem.device, side):
            for _ in range(3):
                self._recorded_step()
        fresh = self._tensors()[len(before) :]  # what the kernel made at its first step
        self._graph = torch.cuda.CUDAGraph()
        for stream in streams:
            self._graph.register_generator_state(stream)
        with torch.cuda.graph(self._graph, stream=side):
            self._recorded_step()
        for tensor, value in zip(self._tensors(), before, strict=False):
            tensor.copy_(value)
        for tensor in fresh:
            tensor.zero_()
        for stream, mark in zip(streams, marks, strict=True):
            stream.set_state(mark)
        self.gradients_spent, self.state.steps = spent, steps

    def _tensors(self) -> list[Tensor]:
        return [self.state.position, self.bounded, *self.state.memory.values()]
