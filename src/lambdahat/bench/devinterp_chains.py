"""devinterp's SGLD behind one call, on any model and loss.

devinterp 2 is written for language models: a batch is ``input_ids`` and a loss is one number per
token. Its inner loop ``sample_single_chain`` takes any ``evaluate``, so ``input_ids`` here holds
sample numbers and ``evaluate`` looks the samples up. Step, noise, order of batches and chains are
devinterp's own. ``official`` is its whole ``llc()``, which needs datasets, zarr and xarray besides.

Its step is w ← w − (ε/2)(nβ·∇L_b(w) + γ(w − w*)) + √ε·N(0, I), all chains on the same batches,
drawn without replacement, the first pass over the data repeated. Its λ̂ is nβ(mean of all losses,
burn-in and the first one at w* included, − L₀), L₀ the loss at w* on the first 32 of these batches.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lambdahat._core.rng import generator
from lambdahat.bench.timing import synchronize

INIT_BATCHES = 32  # devinterp's own default for the baseline
SKIPPED = 5  # steps before the clock starts

Losses = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> (batch,)


@dataclass(frozen=True)
class Settings:
    """What both sides are told. ε multiplies ½(nβ∇L + γ(w − w*)), and √ε the noise, on both."""

    step_size: float
    nbeta: float
    localization: float
    batch_size: int = 512
    chains: int = 4
    draws: int = 200
    seed: int = 0


@dataclass(frozen=True)
class PeerRun:
    """``losses`` and ``centre_losses``, (chains, draws), are of the same batches, at w_t and at w*.

    ``baseline`` is devinterp's L₀, ``whole`` the same over all data, which its users can ask for.
    ``step_s`` is the median time of a chain-step once it runs; ``total_s`` is of the call, with
    copying the model and collecting garbage at each end of a chain.
    """

    losses: Tensor
    centre_losses: Tensor
    baseline: float
    whole: float
    nbeta: float
    step_s: float
    total_s: float

    @property
    def per_chain(self) -> Tensor:
        """devinterp's λ̂ of each chain."""
        return self.nbeta * (self.losses.mean(1) - self.baseline)

    @property
    def above_whole(self) -> Tensor:
        """devinterp's λ̂ of each chain where it is asked for a baseline over all data."""
        return self.nbeta * (self.losses.mean(1) - self.whole)

    @property
    def paired(self) -> Tensor:
        """λ̂ of each chain with every loss paired with the centre's on the same batch."""
        return self.nbeta * (self.losses - self.centre_losses).mean(1)


class Numbers(Dataset[dict[str, Tensor]]):
    """Samples by number, twice, for a sequence has two tokens at least.

    ``whole`` hands over a batch in one piece, not as many small tensors.
    """

    def __init__(self, numbers: Tensor, whole: bool) -> None:
        self.rows, self.whole = numbers.unsqueeze(1).repeat(1, 2), whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index]}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        rows = self.rows[indices]
        return [{"input_ids": rows}] if self.whole else [{"input_ids": row} for row in rows]


def devinterp(module: str) -> Any:
    """A module of devinterp."""
    with contextlib.suppress(ImportError):
        try:
            import_module("torchvision")
        except RuntimeError:  # built for another torch; transformers imports it if it finds it
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    return import_module(f"devinterp.{module}")


def token_loss(
    losses: Losses, data: tuple[Tensor, Tensor]
) -> Callable[[nn.Module, Tensor], Tensor]:
    """``losses`` as devinterp's loss (model, input_ids) -> (…, batch, 1)."""
    inputs, targets = data

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        numbers = ids[..., 0]
        chosen = numbers.reshape(-1)
        return losses(model(inputs[chosen]), targets[chosen]).view(*numbers.shape, 1)

    return loss


@torch.no_grad()
def losses_at(model: nn.Module, losses: Losses, data: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of every sample, (n,), on the CPU in float64."""
    parts = zip(*(tensor.split(4096) for tensor in data), strict=True)
    return torch.cat([losses(model(x), y) for x, y in parts]).double().cpu()


def sampled(
    model: nn.Module,
    losses: Losses,
    data: tuple[Tensor, Tensor],
    settings: Settings,
    replacement: bool = False,
) -> PeerRun:
    """devinterp's chains, one after the other as it runs them, on the device where ``data`` is.

    It walks through the data once, so that the loss of a step is of samples that the chain has not
    been pulled by; then again in the same order. ``replacement`` gives it a data set drawn with
    replacement, long enough for all steps.
    """
    sampler = devinterp("slt.sampler")
    inputs, targets = data
    numbers = torch.arange(len(targets))
    if replacement:
        rng = generator(settings.seed, "devinterp batches")
        numbers = torch.randint(
            len(targets), (settings.draws * settings.batch_size,), generator=rng
        )
    loss = token_loss(losses, data)
    seen: list[tuple[Tensor, Tensor]] = []
    clock: list[list[float]] = [[] for _ in range(settings.chains)]

    def on_batch(*, loss: Tensor, input_ids: Tensor, **_: Any) -> None:
        seen.append((loss.mean(), input_ids[..., 0].reshape(-1)))

    def on_step(chain: int, *_: Any) -> None:
        clock[chain].append(time.perf_counter())

    options = {
        "lr": settings.step_size,
        "nbeta": settings.nbeta,
        "localization": settings.localization,
    }
    synchronize()
    start = time.perf_counter()
    for chain in range(settings.chains):
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars
            sampler.sample_single_chain(
                model,
                Numbers(numbers, whole=True),
                lambda model, batch: (loss(model, batch["input_ids"]), {}),
                {name: None for name, _ in model.named_parameters()},
                num_draws=settings.draws,
                batch_size=settings.batch_size,
                sampling_method=devinterp("optim").SGMCMC.sgld,
                sampling_method_kwargs=options,
                chain=chain,
                seed=settings.seed + chain,
                dataloader_seed=settings.seed,
                device=str(inputs.device),
                micro_callback=on_batch,
                step_callback=on_step,
            )
    synchronize()
    total = time.perf_counter() - start
    return _as_run(seen, clock, losses_at(model, losses, data), settings, total)


def _as_run(
    seen: list[tuple[Tensor, Tensor]],
    clock: list[list[float]],
    centre: Tensor,
    settings: Settings,
    total: float,
) -> PeerRun:
    shape = settings.chains, settings.draws
    if len(seen) != settings.chains * settings.draws:
        raise RuntimeError(
            f"devinterp stopped a chain: {len(seen)} of {settings.chains * settings.draws} steps"
            " done"
        )
    traces = torch.stack([loss for loss, _ in seen]).double().cpu().view(shape)
    centres = torch.stack([centre[numbers.cpu()].mean() for _, numbers in seen]).view(shape)
    steps = torch.tensor([times[SKIPPED:] for times in clock], dtype=torch.float64).diff(dim=1)
    first = float(centres[:, :INIT_BATCHES].mean())
    return PeerRun(
        traces, centres, first, float(centre.mean()), settings.nbeta, float(steps.median()), total
    )


def official(
    model: nn.Module, losses: Losses, data: tuple[Tensor, Tensor], settings: Settings
) -> tuple[Tensor, float]:
    """λ̂ of each chain and the baseline from devinterp's own ``llc()``, which stores all losses
    on disk.
    """
    dataset = Numbers(torch.arange(len(data[1])), whole=False)
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        found = (
            devinterp("slt.llc")
            .llc(
                model,
                dataset,
                {},
                lr=settings.step_size,
                n_beta=settings.nbeta,
                localization=settings.localization,
                num_chains=settings.chains,
                num_draws=settings.draws,
                batch_size=settings.batch_size,
                init_seed=settings.seed,
                num_init_loss_batches=INIT_BATCHES,
                device=str(data[0].device),
                loss_fn=token_loss(losses, data),
                output_path=Path(folder) / "samples.zarr",
            )
            .load()
        )
    return torch.as_tensor(found.llc_per_chain.values, dtype=torch.float64), float(found.init_loss)
