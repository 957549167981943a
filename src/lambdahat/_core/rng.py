"""The only source of randomness: a generator for every (seed, name)."""

from __future__ import annotations

import hashlib

import torch

from lambdahat._core.check import require_count


def generator(seed: int, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """An independent stream for ``(seed, *names)``.

    The stream's own seed is a hash of seed and names, so that streams of neighbouring seeds or
    different purposes never overlap as ``seed + i`` would. Draw on the CPU (the default) where the
    numbers must not depend on the device.

    >>> draw = lambda name: torch.rand(2, generator=generator(0, name))
    >>> torch.equal(draw("a"), draw("a")), torch.equal(draw("a"), draw("b"))
    (True, False)
    """
    return torch.Generator(device=device).manual_seed(derived_seed(seed, *names))


def derived_seed(seed: int, *names: object) -> int:
    """The seed of the stream ``(seed, *names)``, for functions that name streams themselves."""
    require_count(seed, "seed", least=0)
    text = "\x1f".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
