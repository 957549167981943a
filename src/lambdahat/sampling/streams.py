"""Random numbers for chains: a stream for each, so that a chain does not depend on which chains
run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lambdahat._core.rng import generator


class Streams:
    """Random numbers for several chains at once, one row a chain.

    On the CPU every chain has a stream of its own, named by ``(seed, "chain", its number)``:
    however the chains are distributed over calls or processes, each draws the same numbers. On
    another device the chains share one stream of that device, which a CUDA graph can hold.
    """

    def __init__(
        self, seed: int, chains: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.generators = [generator(seed, "chain", chain) for chain in chains]
        else:
            self.generators = [generator(seed, "chains", tuple(chains), device=device)]

    def normal_(self, out: Tensor) -> Tensor:
        """Fill ``out``, (chains, …), with standard normal numbers."""
        for row, source in self._rows(out):
            row.normal_(generator=source)
        return out

    def uniform(self, count: int, dtype: torch.dtype) -> Tensor:
        """Numbers uniform on [0, 1), (count,)."""
        out = torch.empty(count, dtype=dtype, device=self.device)
        for row, source in self._rows(out):
            row.uniform_(generator=source)
        return out

    def integers(self, high: int, chains: int, count: int) -> Tensor:
        """Integers below ``high``, (chains, count)."""
        out = torch.empty(chains, count, dtype=torch.int64, device=self.device)
        for row, source in self._rows(out):
            row.random_(0, high, generator=source)
        return out

    def _rows(self, out: Tensor) -> list[tuple[Tensor, torch.Generator]]:
        """Pieces of ``out`` with the stream that fills each; a single vector is the row of the
        only chain.
        """
        if len(self.generators) == 1:
            return [(out, self.generators[0])]
        return list(zip(out.unbind(), self.generators, strict=True))
